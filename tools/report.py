"""A comparison as a text table, Markdown, CSV, JSON and one HTML file that needs no network.

The tables are made once, as lists of strings, and written in each format, so that no two files can differ. Pictures are
SVG, drawn here: three plain charts don't justify a plotting library among the dependencies, and one that brings scripts
or fonts would reach for the network. Colours are CSS variables, for light and dark.
"""

import csv
import html
import json
import math
from pathlib import Path

COSTS = ("step_seconds", "samples_per_second", "peak_memory_bytes")
CLASSES = ("weight", "gradient", "master", "optimizer")
COLOURS = 8


def number(value, digits=4):
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def percent(value):
    return "-" if value is None else f"{100 * value:+.1f}%"


def mebibytes(value):
    return "-" if value is None else f"{value / 2**20:,.0f}"


def shown(row):
    return f"{row['config']} (control)" if row["control"] else row["config"]


def judged(found):
    """`+1.2%, no measurable difference`"""
    if "verdict" not in found:
        return "baseline"
    if found["verdict"] == "emulated":
        return "emulated, not ranked"
    return f"{percent(found['relative'])}, {found['verdict']}"


def metric_names(made):
    row = next((row for row in made["rows"] if not row["error"]), None)
    return [name for name in row["measures"] if name not in COSTS] if row else []


def classes(made):
    """Of bytes per parameter: those every run has, and what a strategy adds to them."""
    found = [name for row in made["rows"] for name in row.get("bytes_per_parameter", {})]
    return list(dict.fromkeys([*CLASSES, *(name for name in found if name != "total")]))


def tables(made):
    """[(title, heads, rows)]: everything the report says in numbers, but for the curves."""
    names = metric_names(made)
    sound = [row for row in made["rows"] if not row["error"]]
    heads = ["config", "seeds", "Linear in FP8"]
    for name in names:
        heads += [name, "max - min", "against the baseline"]
    results = []
    for row in made["rows"]:
        cells = [shown(row), " ".join(map(str, row["seeds"]))]
        if row["error"]:
            results.append([*cells, f"no numbers: {row['error']}", *[""] * (len(heads) - 3)])
            continue
        cells.append(f"{row['linear_converted']} of {row['linear_total']}")
        for name in names:
            found = row["measures"][name]
            cells += [number(found["mean"]), number(found["spread"], 2), judged(found)]
        results.append(cells)
    yield "Results", heads, results

    heads = ["config", "step, ms", "90%, ms", "samples/s", "against the baseline", "GPU utilisation"]
    heads += ["samples per unit of price"] if made["price_per_hour"] else []
    costs = []
    for row in sound:
        m = row["measures"]
        p90, gpu = row.get("step_seconds_p90"), row["gpu_utilization"]
        cells = [shown(row), number(1000 * m["step_seconds"]["mean"]), number(p90 and 1000 * p90)]
        cells += [number(m["samples_per_second"]["mean"]), judged(m["samples_per_second"])]
        cells += ["-" if gpu is None else f"{gpu:.0f}%"]
        cells += [number(row.get("samples_per_unit_of_price"))] if made["price_per_hour"] else []
        costs.append(cells)
    yield "Speed", heads, costs

    heads = ["config", *(f"{name}, B/param" for name in classes(made)), "total, B/param", "peak memory, MiB"]
    heads += ["against the baseline", "estimated peak, MiB", "wire, bytes/step"]
    memory = []
    for row in sound:
        per, peak = row["bytes_per_parameter"], row["measures"]["peak_memory_bytes"]
        estimate = row["estimate"] and mebibytes(row["estimate"]["total"])
        cells = [
            shown(row),
            *(f"{per.get(name, 0):.2f}" for name in classes(made)),
            f"{per['total']:.2f}",
            mebibytes(peak["mean"]),
        ]
        memory.append([*cells, judged(peak), estimate or "-", number(row["wire_bytes_per_step"])])
    yield "Memory and wire, per process", heads, memory

    rows = [[shown(row), row["truth"]] for row in sound if not row["control"]]
    yield "What each run was, counted on its live tensors after the first optimizer step", ["config", "truth"], rows


def notes(made):
    """What a reader has to know, a sentence each."""
    sound = [row for row in made["rows"] if not row["error"]]
    yield f"Each row is the mean over its seeds; max - min beside it. The baseline is {made['baseline']}."
    judged_rows = [row for row in sound if any("control_spread" in m for m in row["measures"].values())]
    if judged_rows:
        spreads = {name: judged_rows[0]["measures"][name]["control_spread"] for name in metric_names(made)}
        text = ", ".join(f"{name} {number(spread, 2)}" for name, spread in spreads.items())
        yield (
            f"No measurable difference: inside what other seeds do to the baseline itself, max - min over all of its "
            f"seeds ({text})."
        )
    if any(row["emulated"] for row in sound):
        yield (
            "Emulated: this machine has no FP8 hardware. Values are rounded to FP8 as a GPU rounds them; speed, and "
            "what emulation itself holds in memory, say nothing about FP8. Bytes per parameter are real."
        )
    if made["steps_measured"]:
        yield (
            f"Step times are medians, and what 90% stay below, over {made['steps_measured']} steps per run; the first "
            f"{made['steps_excluded']} (warm-up, compilation), evaluation and checkpoints are not in them."
        )
    if made["versions"]:
        versions = ", ".join(f"{name} {v}" for name, v in made["versions"].items() if v)
        yield f"{made['device']}; {versions}; {made['date']}; commit {(made['git_commit'] or 'unknown')[:12]}."


def text(made):
    """For the terminal."""
    out = []
    for title, heads, rows in tables(made):
        out.append(f"\n{title}")
        if heads[-1] == "truth":
            out += [f"  {config}: {truth}" for config, truth in rows]
            continue
        lines = [heads, *rows]
        errors = [row for row in rows if any(cell.startswith("no numbers: ") for cell in row)]
        widths = [max(len(line[i]) for line in lines if line not in errors) for i in range(len(heads))]
        for line in lines:
            last = len(line) if line not in errors else 3
            out.append("  " + "  ".join(c.ljust(w) for c, w in zip(line[:last], widths, strict=False)).rstrip())
    return "\n".join([*out, "", *notes(made)])


def markdown(made):
    out = ["# " + title_of(made), "", "```", made["command"], "```"]
    for title, heads, rows in tables(made):
        out += ["", f"## {title}", "", table(heads, rows)]
    return "\n".join([*out, "", *(f"- {line}" for line in notes(made)), ""])


def table(heads, rows):
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def title_of(made):
    return f"{made['recipe'] or 'Runs'}: {len([r for r in made['rows'] if not r['control']])} configs compared"


def spreadsheet(made, file):
    """One line per row, every number unrounded."""
    lines = []
    for row in made["rows"]:
        line = {key: row[key] for key in ("config", "control", "error")} | {"seeds": " ".join(map(str, row["seeds"]))}
        for key in ("truth", "emulated", "num_processes", "linear_converted", "linear_total", "wire_bytes_per_step",
                    "step_seconds_p90", "gpu_utilization", "samples_per_unit_of_price"):  # fmt: skip
            line[key] = row.get(key)
        for name, found in row.get("measures", {}).items():
            line |= {f"{name}_{key}": found.get(key) for key in ("mean", "spread", "difference", "verdict")}
        line |= {f"bytes_per_parameter_{name}": value for name, value in row.get("bytes_per_parameter", {}).items()}
        line |= {f"estimate_{name}": value for name, value in (row.get("estimate") or {}).items()}
        lines.append(line)
    names = list(dict.fromkeys(key for line in lines for key in line))
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)


# ------------------------------------------------------------------------------------------------------------- pictures


def ticks(low, high, log):
    """A few round values between low and high."""
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high]
        return found if len(found) < 9 else [t for t in found if f"{t:e}"[0] == "1"]
    step = 10.0 ** math.floor(math.log10((high - low) or 1))
    step *= next(m for m in (0.1, 0.2, 0.5, 1, 2) if (high - low) / (step * m) <= 7)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def svg(width, height, parts, name):
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(name)}">\n{body}\n</svg>'


def label(x, y, words, css="", anchor="start"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{html.escape(str(words))}</text>'


def lines(series, name, width=860, height=340):
    """Means as lines, with a band from min to max. series: [(label, colour, [[step, mean, min, max]])]."""
    left, right, top, bottom = 64, 12, 12, 44
    steps = [point[0] for _, _, points in series for point in points]
    lows, highs = ([point[i] for _, _, points in series for point in points] for i in (2, 3))
    low, high = min(lows), max(highs)
    log = low > 0 and high / low > 8  # a loss that falls by decades
    first, last = min(steps), max(steps)

    def x(step):
        return left + (width - left - right) * ((step - first) / ((last - first) or 1))

    def y(value):
        at = math.log(value / low) / math.log(high / low) if log else (value - low) / ((high - low) or 1)
        return height - bottom - (height - top - bottom) * at

    parts = []
    for tick in ticks(low, high, log):
        parts.append(f'<path class="grid" d="M{left} {y(tick):.1f}H{width - right}"/>')
        parts.append(label(left - 6, y(tick) + 4, f"{tick:g}", "tick", "end"))
    for tick in ticks(first, last, False):
        parts.append(label(x(tick), height - bottom + 18, f"{tick:g}", "tick", "middle"))
    parts.append(label((left + width) / 2, height - 6, "optimizer step", "tick", "middle"))
    for _, colour, points in series:
        there, back = [(p[0], p[3]) for p in points], [(p[0], p[2]) for p in reversed(points)]
        edge = [f"{x(step):.1f},{y(value):.1f}" for step, value in there + back]
        parts.append(f'<polygon class="band f{colour}" points="{" ".join(edge)}"/>')
    for row, colour, points in series:
        line = " ".join(f"{x(p[0]):.1f},{y(p[1]):.1f}" for p in points)
        parts.append(f'<polyline class="line s{colour}" points="{line}"><title>{html.escape(row)}</title></polyline>')
    return svg(width, height, parts, name)


def bars(rows, name, unit, width=860):
    """Horizontal bars. rows: [(label, [(length, colour)], text behind the bar, emulated)]."""
    left, right, step = 250, 190, 30
    longest = max(sum(length for length, _ in pieces) for _, pieces, _, _ in rows) or 1
    parts = []
    for i, (row, pieces, behind, emulated) in enumerate(rows):
        at, y = left, 8 + i * step
        parts.append(label(left - 8, y + 15, row, "", "end"))
        for length, colour in pieces:
            wide = (width - left - right) * length / longest
            faint = " faint" if emulated else ""
            parts.append(f'<rect class="f{colour}{faint}" x="{at:.1f}" y="{y}" width="{wide:.1f}" height="20"/>')
            at += wide
        parts.append(label(at + 6, y + 15, behind, "tick"))
    parts.append(label(left, 8 + len(rows) * step + 14, unit, "tick"))
    return svg(width, 8 + len(rows) * step + 22, parts, name)


STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --dim: #57606a; --rule: #d8dee4; --head: #f6f8fa;
  --c0: #0b62c4; --c1: #c4501b; --c2: #1a7f5a; --c3: #9a3fb5; --c4: #a67c00; --c5: #c2255c; --c6: #0c8599;
  --c7: #5c6570 }
@media (prefers-color-scheme: dark) { :root { --paper: #0f1419; --ink: #e6e9ed; --dim: #9aa4af; --rule: #2f3842;
  --head: #1a2129; --c0: #6cb0ff; --c1: #ff9d6b; --c2: #5fd3a5; --c3: #d79bf0; --c4: #e5c453; --c5: #ff8fb3;
  --c6: #5fd0e2; --c7: #aab4bf } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 1200px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
pre, code { font: 13px/1.5 ui-monospace, monospace }
pre { background: var(--head); padding: .7rem; white-space: pre-wrap }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13.5px }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: top }
th { background: var(--head); font-weight: 600 } td { white-space: nowrap }
th:first-child, td:first-child, .words { text-align: left; white-space: normal }
figure { margin: 1rem 0 } figcaption, .tick, .notes { color: var(--dim); font-size: 13px }
svg { width: 100%; max-width: 900px }
svg text { fill: var(--ink); font: 13px system-ui, sans-serif } svg text.tick { fill: var(--dim); font-size: 12px }
.grid { stroke: var(--rule) } .line { fill: none; stroke-width: 2 } .band { opacity: .16 } .faint { opacity: .45 }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .35em 0 1em }
""" + "\n".join(f".f{i} {{ fill: var(--c{i}); background: var(--c{i}) }} .s{i} {{ stroke: var(--c{i}) }}"
                for i in range(COLOURS))  # fmt: skip


def legend(pairs):
    return "".join(f'<span class="key f{colour}"></span>{html.escape(name)}' for name, colour in pairs)


def figure(picture, words, command):
    caption = f"{html.escape(words)}<br>Made by <code>{html.escape(command)}</code>"
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def html_table(heads, rows):
    def cell(word, tag="td"):
        css = ' class="words"' if len(word) > 60 or word == "truth" else ""
        return f"<{tag}{css}>{html.escape(word)}</{tag}>"

    head = "".join(cell(word, "th") for word in heads)
    body = "\n".join("<tr>" + "".join(cell(str(word)) for word in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def drawn_curves(made, plain):
    """HTML of a picture, and the same in numbers, for the training loss and each held-out metric over the steps."""
    colour = {row["config"]: i % COLOURS for i, row in enumerate(plain)}
    parts = []
    names = dict.fromkeys(name for row in plain for name in row["curves"])
    for name in sorted(names, key=lambda name: name != "loss"):
        series = [(r["config"], colour[r["config"]], r["curves"][name]) for r in plain if r["curves"].get(name)]
        if not series:
            continue
        keys = legend([(config, at) for config, at, _ in series])
        title = "Training loss" if name == "loss" else name
        picture = keys + lines(series, title)
        heads = ["step", *(word for config, _, _ in series for word in (config, "min", "max"))]
        found = [{point[0]: point[1:] for point in points} for _, _, points in series]
        rows = [
            [step, *(number(v) for points in found for v in points.get(step, [None] * 3))]
            for step in sorted({step for points in found for step in points})
        ]
        parts.append(f"<h2>{html.escape(title)}</h2>")
        words = "Mean over the seeds; the band is from their minimum to their maximum."
        parts.append(figure(picture, words, made["command"]))
        parts.append(f"<details><summary>The same in numbers</summary>{html_table(heads, rows)}</details>")
    return parts


def page(made):
    """The whole report as one HTML file."""
    sound = [row for row in made["rows"] if not row["error"]]
    plain = [row for row in sound if not row["control"]]
    parts = []
    for title, heads, rows in tables(made):
        parts += drawn_curves(made, plain) if title == "Speed" else []  # behind the results
        parts.append(f"<h2>{html.escape(title)}</h2>")
        if title == "Speed" and sound:
            drawn = []
            for row in sound:
                rate = row["measures"]["samples_per_second"]["mean"]
                behind = number(rate) + (" (emulated, not ranked)" if row["emulated"] else "")
                drawn.append((shown(row), [(rate, 0)], behind, row["emulated"]))
            picture = bars(drawn, title, "samples per second, median step")
            parts.append(figure(picture, "Pale bars are emulated.", made["command"]))
        if title.startswith("Memory") and sound:
            drawn = []
            for row in plain:
                per = row["bytes_per_parameter"]
                pieces = [(per.get(key, 0), i) for i, key in enumerate(classes(made))]
                drawn.append((row["config"], pieces, f"{per['total']:.2f}", False))
            keys = legend([(name, i) for i, name in enumerate(classes(made))])
            picture = keys + bars(drawn, title, "bytes per parameter, over all processes")
            parts.append(figure(picture, "Model states, counted on live tensors.", made["command"]))
        parts.append(html_table(heads, rows))
    said = "".join(f"<li>{html.escape(line)}</li>" for line in notes(made))
    title = html.escape(title_of(made))
    # An icon of its own, or the browser asks the host for /favicon.ico.
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<link rel="icon" href="data:,"><style>{STYLE}</style></head><body>
<h1>{title}</h1>
<pre>{html.escape(made["command"])}</pre>
<ul class="notes">{said}</ul>
{chr(10).join(parts)}
</body></html>
"""


def write(made, folder):
    """All four files, and the tables on the terminal."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(made, indent=1) + "\n")
    (folder / "report.md").write_text(markdown(made))
    (folder / "report.html").write_text(page(made))
    with (folder / "report.csv").open("w", newline="") as file:
        spreadsheet(made, file)
    print(text(made))
