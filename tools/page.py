"""One HTML page from an answer, pictures and tables: what compare writes.

    html = page.whole("title", command, answer=[("single_fp8", "equal within 1%")], parts=[
        page.section("Loss", page.picture(page.lines(series), "What is drawn, in a sentence.", page.legend(names))),
        page.section("Results", page.table(heads, rows)),
    ], notes=["A sentence a reader has to know."])

The file needs no network and no script: pictures are SVG, drawn by matplotlib. A picture is a function
`draw(figure, narrow)`, which is called twice: once for a screen, once for a phone, so text stays readable on both.
Colours are CSS variables, for light and dark: a function draws with COLOURS, INK, DIM, RULE and PAPER, stand-ins that
become the variables. The functions below make the usual pictures; any other may use matplotlib's own calls.
"""

import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jinja2
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

# No picture uses these colours by chance, so each can be replaced by its variable in the finished SVG.
INK, DIM, RULE, PAPER = "#0d0e01", "#0d0e02", "#0d0e03", "#0d0e04"
COLOURS = [f"#0c0d0{i}" for i in range(8)]
VARIABLES = {INK: "ink", DIM: "dim", RULE: "rule", PAPER: "paper"} | {name: f"c{i}" for i, name in enumerate(COLOURS)}
WIDE, NARROW = 860, 350  # pixels
WORDS = 16  # a cell of more characters is a sentence, which may be broken
FLAT = 0.05  # of its values: an axis shows no less, or noise fills it
Draw = Callable[[Figure, bool], None]
Points = Sequence[Sequence[float]]  # [[x, mean, low, high]]
STYLE = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 12, "text.color": INK, "axes.edgecolor": RULE,
    "axes.labelcolor": DIM, "axes.titlecolor": INK, "axes.titlesize": 12, "axes.titlelocation": "left",
    "xtick.color": DIM, "ytick.color": DIM, "xtick.major.size": 0, "ytick.major.size": 0, "grid.color": RULE,
    "grid.linewidth": 1, "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "axes.spines.left": False, "figure.constrained_layout.use": True,
    "path.simplify": False,
}  # fmt: skip


def colour(i: int) -> str:
    """A colour for the i-th of several things; they repeat after eight."""
    return COLOURS[i % len(COLOURS)]


# ---------------------------------------------------------------------------------------------------------- the page


def whole(
    title: str, command: str, answer: Iterable[tuple[str, str]], parts: Iterable[str], notes: Iterable[str] = ()
) -> str:
    """The page. answer: [(what, words)], one line each, which stand first. notes: sentences, which stand last."""
    folder = Path(__file__).parent
    loader = jinja2.Environment(loader=jinja2.FileSystemLoader(folder), autoescape=True, trim_blocks=True)
    parts = [jinja2.utils.markupsafe.Markup(part) for part in parts]
    return loader.get_template("page.html").render(
        title=title, command=command, answer=answer, parts=parts, notes=notes
    )


def section(title: str, *parts: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n" + "\n".join(parts)


def details(summary: str, *parts: str) -> str:
    """What a reader opens if they want it."""
    return f"<details><summary>{html.escape(summary)}</summary>\n{''.join(parts)}</details>"


def table(heads: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A table. The columns with a sentence in them are set to the left, and broken."""
    lines = [[str(cell) for cell in row] for row in (heads, *rows)]
    sentences = [any(len(cell) > WORDS and " " in cell for cell in column) for column in zip(*lines[1:], strict=True)]

    def row(cells: list[str], tag: str) -> str:
        css = (' class="words"' if sentence else "" for sentence in sentences or [False] * len(cells))
        return "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for cell, kind in zip(cells, css, strict=True))

    body = "\n".join(f"<tr>{row(cells, 'td')}</tr>" for cells in lines[1:])
    return f'<div class="scroll"><table><tr>{row(lines[0], "th")}</tr>\n{body}</table></div>'


def legend(pairs: Iterable[tuple[str, str]]) -> str:
    """[(name, colour)] above a picture."""
    keys = (f'<span><i style="background: var(--{VARIABLES[at]})"></i>{html.escape(name)}</span>' for name, at in pairs)
    return f'<div class="legend">{" ".join(keys)}</div>'


def picture(draw: Draw, caption: str, key: str = "") -> str:
    """draw(figure, narrow) as SVG, with a legend above and a caption below."""
    wide, narrow = (f'<div class="{name}">{svg(draw, caption, name == "narrow")}</div>' for name in ("wide", "narrow"))
    return f"<figure>{key}{wide}{narrow}<figcaption>{html.escape(caption)}</figcaption></figure>"


def svg(draw: Draw, name: str, narrow: bool = False) -> str:
    """One picture as the text of an SVG element. A function sets the figure's height; its width is given."""
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": f"{name} {narrow}"}):  # ids: unlike others, alike each time
        figure = Figure(figsize=((NARROW if narrow else WIDE) / 72, 4), facecolor="none")
        draw(figure, narrow)
        for axes in figure.axes:
            axes.set_facecolor("none")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.S)
    box = re.search(r'viewBox="[^"]*"', text)[0]  # pyrefly: ignore[unsupported-operation]
    text = re.sub(r"<svg[^>]*>", f'<svg {box} role="img" aria-label="{html.escape(name)}">', text, count=1)
    text = re.sub(r'<g id="[^"]*"', "<g", text).replace("xlink:href", "href")
    text = re.sub(r" font-family: [^;]*;| *<style.*?</style>\n", "", text)
    return re.sub("|".join(VARIABLES), lambda match: f"var(--{VARIABLES[match[0]]})", text)


def standalone(draw: Draw, name: str) -> str:
    """A picture as an SVG file of its own, light or dark as its reader."""
    style = (Path(__file__).parent / "page.html").read_text()
    style = re.search(r"(:root .*?)\nbody", style, re.S)[1] + " svg { background: var(--paper) }"  # pyrefly: ignore[unsupported-operation]
    attributes = ' xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif"'
    return re.sub(r"<svg( [^>]*)>", rf"<svg{attributes}\1>\n<style>{style}</style>", svg(draw, name), count=1) + "\n"


# ------------------------------------------------------------------------------------------------------ usual pictures


def height(figure: Figure, pixels: float) -> None:
    figure.set_figheight(pixels / 72)


def named(axes: Axes, names: Sequence[str], narrow: bool) -> None:
    """A row for each name, the first on top: names stand at the left, or on a phone above their rows."""
    axes.set_ylim(len(names) - 0.5, -0.75 if narrow else -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_yticks(range(len(names)), [""] * len(names) if narrow else names)
    axes.tick_params(axis="y", labelcolor=INK)
    for i, name in enumerate(names if narrow else ()):
        axes.text(0, i - 0.27, name, transform=axes.get_yaxis_transform(), va="bottom", fontsize=11)


def intervals(
    rows: Sequence[tuple[str, float, float, float, str]],
    margin: float | None = None,
    label: str = "difference to the baseline, %",
) -> Draw:
    """Means with their intervals, one below the other, against zero and, shaded, the margin around it.

    rows: [(name, mean, low, high, colour)]. An interval whose name ends with "*" may leave the picture: it doesn't set
    the scale, and an arrow says that it goes on.
    """

    def draw(figure: Figure, narrow: bool) -> None:
        height(figure, 44 + (44 if narrow else 30) * len(rows))
        axes = figure.add_subplot()
        inside = [abs(value) for name, _, low, high, _ in rows for value in (low, high) if not name.endswith("*")]
        edge = 1.08 * max([*inside, 1.5 * (margin or 0)]) or 1
        if margin:
            axes.axvspan(-margin, margin, color=RULE, alpha=0.6, lw=0)
        axes.axvline(0, color=DIM, lw=1)
        for i, (_, mean, low, high, at) in enumerate(rows):
            axes.plot([max(low, -edge), min(high, edge)], [i, i], color=at, lw=3, solid_capstyle="butt")
            for outside, end, marker in ((low < -edge, -edge, "<"), (high > edge, edge, ">")):
                if outside:
                    axes.plot(end, i, marker, color=at, ms=8, clip_on=False)
            if abs(mean) <= edge:
                axes.plot(mean, i, "o", color=at, ms=8)
        axes.set_xlim(-edge, edge)
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 9))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
        named(axes, [row[0].removesuffix("*") for row in rows], narrow)

    return draw


def line(axes: Axes, points: Points, at: str) -> None:
    """A mean with its band. points: [[x, mean, low, high]]."""
    x, mean, low, high = zip(*points, strict=True)
    axes.fill_between(x, low, high, color=at, alpha=0.16, lw=0)
    few = len(x) <= 10
    axes.plot(x, mean, color=at, lw=2, marker="o" if few else "", clip_on=not few)


def lines(series: Sequence[tuple[str, str, Points]], label: str = "optimizer step") -> Draw:
    """Means with their bands over the steps, in one frame, over decades with a logarithm. series: [(name, colour,
    [[step, mean, low, high]])]."""

    def draw(figure: Figure, narrow: bool) -> None:
        height(figure, 240 if narrow else 340)
        axes = figure.add_subplot()
        for _, at, points in series:
            line(axes, points, at)
        lows, highs = ([point[i] for _, _, points in series for point in points] for i in (2, 3))
        if min(lows) > 0 and max(highs) / min(lows) > 8:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        else:
            middle, least = (min(lows) + max(highs)) / 2, FLAT * max(map(abs, (*lows, *highs)))
            if max(highs) - min(lows) < least:
                axes.set_ylim(middle - least / 2, middle + least / 2)
        axes.margins(x=0)
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))

    return draw


def panels(
    series: Sequence[tuple[str, str, Points]],
    shade: Points | None = None,
    label: str = "optimizer step",
    unit: str = "%",
) -> Draw:
    """A frame for each series, all to one scale, with a line at zero and, in each, `shade` behind it: points like a
    series', of what they are compared with. series: [(name, colour, [[step, mean, low, high]])]."""

    def draw(figure: Figure, narrow: bool) -> None:
        across = min(len(series), 1 if narrow else 3)
        down = -(-len(series) // across)
        height(figure, 30 + (120 if narrow else 170) * down)
        frames = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
        for axes, (name, at, points) in zip(frames.flat, series, strict=False):
            axes.axhline(0, color=DIM, lw=1)
            if shade:
                line(axes, shade, DIM)
            line(axes, points, at)
            axes.set_title(name)
            axes.margins(x=0)
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}{unit}" if value else "0"))
        for axes in frames.flat[len(series) :]:
            axes.set_visible(False)
        for axes in frames[-1]:
            axes.set_xlabel(label)

    return draw


def bars(rows: Sequence[tuple[str, list[tuple[float, str]], str, bool]], label: str) -> Draw:
    """Horizontal bars. rows: [(name, [(length, colour)], text behind the bar, pale)]."""

    def draw(figure: Figure, narrow: bool) -> None:
        height(figure, 44 + (44 if narrow else 30) * len(rows))
        axes = figure.add_subplot()
        longest = max((sum(length for length, _ in pieces) for _, pieces, _, _ in rows), default=0) or 1
        for i, (_, pieces, behind, pale) in enumerate(rows):
            begin = 0
            for length, at in pieces:
                axes.barh(i, length, 0.4 if narrow else 0.66, left=begin, color=at, alpha=0.45 if pale else 1, lw=0)
                begin += length
            axes.text(begin + longest / 80, i, behind, va="center", color=DIM, fontsize=11)
        axes.set_xlim(0, longest * (1.6 if narrow else 1.25))
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(3 if narrow else 6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        named(axes, [row[0] for row in rows], narrow)

    return draw
