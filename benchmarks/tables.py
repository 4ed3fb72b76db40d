"""Writes the generated tables of the READMEs and docs/*.md, and README.md's picture, from the files in results/.

    python benchmarks/tables.py            write them
    python benchmarks/tables.py --check    exit code 1 where a page says something else

A table stands between `<!-- from results/...: python benchmarks/tables.py -->` and `<!-- end -->`. What was
measured once, on a card that was lent or by a script that is gone, has a table as a file: results/....md.
"""

import json
import re
import sys
from functools import partial
from pathlib import Path

from harness import ROOT, came_from

from tools import drawings, page, paired, report

COMPARISONS = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("results/compare_*/report.json"))
BUDGETS = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("results/tokens/*/report.json"))
PICTURE = "differences.svg"  # beside a comparison


def read(name):
    return json.loads((ROOT / name).read_text())


def comparison(file, figures):
    """The verdict on every config's loss, with its interval."""
    name, folder = figures["measure"], Path(file).parent
    others = [key for key in report.metric_names(figures) if key != name]
    apart = f"against {figures['baseline']}, {100 * figures['confidence']:.3g}% interval"
    heads = ["config", "Linear in FP8", name, apart, "verdict", "resolution", *others, "B/param"]
    rows = []
    for row in figures["rows"]:
        m, measure = row["measures"], row["measures"][name]
        rows.append([
            f"`{row['config']}`", f"{row['linear_converted']} of {row['linear_total']}", report.number(measure["mean"]),
            report.difference(measure), measure.get("verdict", "baseline"), paired.needs(measure, figures["margin"]),
            *(report.number(m[key]["mean"]) for key in others), f"{row['bytes_per_parameter']['total']:.1f}",
        ])  # fmt: skip
    seeds, apart = len(figures["rows"][0]["seeds"]), report.chance(figures, name)
    text = f"{came_from(figures)}; {seeds} seeds; from one seed to the next {name} of the baseline differs by {apart} "
    text += f"(standard deviation). All of it: [{folder}/report.html]({folder}/report.html), one file to open."
    picture = f"![{name}: mean paired difference of each config to the baseline, with its interval]({folder}/{PICTURE})"
    return f"{text}\n\n{picture}\n\n{report.table(heads, rows)}"


def tokens(file, figures):
    """What every config needs more of the tokens, at each budget."""
    sound, folder = [row for row in figures["rows"] if not row["error"]], Path(file).parent
    heads, rows = report.budgets(figures, sound)
    rows = [
        [f"`{row['config']}`", *cells, f"{row['bytes_per_parameter']['total']:.1f}"]
        for row, (_, *cells) in zip(sound, rows, strict=True)
    ]
    text = f"{came_from(figures)}; {len(sound[0]['seeds'])} seeds: [{folder}/report.html]({folder}/report.html):"
    return f"{text}\n\n{report.table([*heads, 'B/param'], rows)}"


def overhead(figures):
    heads = ["model, precision, processes", "step by hand, ms", "recipe", "Lightning Fabric", "transformers' Trainer"]
    rows = []
    for row in figures["rows"]:
        cells = [f"{row['model']}, {row['precision']}, {row['processes']}", f"{1000 * row['step_seconds_by_hand']:.1f}"]
        for way in ("recipe", "fabric", "trainer"):
            cells.append(ratios(row[way]))
        rows.append(cells)
    text = (
        f"{came_from(figures)}; step time over that of the loop by hand: median of the turns (quartiles), the same of "
    )
    text += "CPU time, and of each turn's fastest step, which other work on the machine disturbs least:"
    text += "\n\n" + report.table(heads, rows)
    if figures.get("start"):
        text += "\n\nFrom the command to the end of the first step:\n\n"
        starts = [
            [row["way"], str(row["processes"]), f"{row['seconds']:.1f}", f"{row['of_hand']:.2f}"]
            for row in figures["start"]
        ]
        text += report.table(["started by", "processes", "seconds", "over by hand"], starts)
    return text


def ratios(found):
    (low, high), cpu, fastest = found["wall"]["quartiles"], found["cpu"]["median"], found["fastest"]["median"]
    return f"{found['wall']['median']:.2f} ({low:.2f} to {high:.2f}), CPU {cpu:.2f}, fastest {fastest:.2f}"


def card(figures):
    """How far the losses of a rehearsal are from those of the card, the largest first."""
    there, found = figures["card"], figures["configs"]
    rows = sorted(((value, name) for name, value in found.items() if not isinstance(value, str)), reverse=True)
    table = report.table(["config", "largest difference of a loss"], [[f"`{n}`", f"{v:.2%}"] for v, n in rows])
    failed = "".join(f"\n\n`{name}` did not train here: {why}" for name, why in found.items() if isinstance(why, str))
    about = f"{there['device']}, torch {there['versions']['torch']}, commit {there['commit']}, {there['date']}"
    return f"{came_from(figures)} against {about}:\n\n{table}{failed}"


def versions(figures):
    """Per set of versions and config the largest relative difference of a loss to the pinned set's."""
    sets = figures["sets"]
    names = dict.fromkeys(name for row in sets.values() for name in row["configs"])
    heads = ["config, recipe"]
    for which, row in sets.items():
        found = row["versions"]
        newest = ", ".join(f"{package} {found[package]}" for package in ("torch", "transformers"))
        heads.append(f"`{which}`: Python {found['python']}, {newest}")

    def cell(value):
        return "-" if value is None else value if isinstance(value, str) else f"{value:.1g}" if value else "equal"

    rows = [[name, *(cell(row["configs"].get(name)) for row in sets.values())] for name in names]
    suites = []
    for name, row in figures.get("suites", {}).items():
        words = ", ".join(f"{key}={value}" for key, value in row["environment"].items())
        failed = ", ".join(f"`{test.rpartition('::')[2]}`" for test in row["failed"])
        suites.append(
            f"`{name}` ({words}): {row['passed']:,} pass, {len(row['failed'])} fail" + f" ({failed})" * bool(failed)
        )
    older = f"\n\nThe default tests, held down to what older CPUs have: {'; '.join(suites)}." if suites else ""
    return f"{came_from(figures)}:\n\n{report.table(heads, rows)}{older}"


def host(figures):
    rows = []
    for row in figures["rows"]:
        low, high = row["ratio"]["quartiles"]
        cells = [
            f"`{row['config']}`",
            f"{row['milliseconds']:.1f}",
            f"{row['ratio']['median']:.2f} ({low:.2f} to {high:.2f})",
        ]
        rows.append([*cells, *(f"{row[key]:,}" for key in ("kernels", "products", "waits"))])
    heads = ["config", "host, ms of a step", "over the first", "kernels", "products", "waits"]
    return f"{came_from(figures)}; median of the turns (quartiles):\n\n" + report.table(heads, rows)


KILLS = ("orphans", "failed_starts", "lost", "unequal")


def kills(figures):
    """Counts of one campaign: in which phase of a run the kills hit, and what went wrong."""
    phases = (("launcher", "imports and rendezvous", "model and first step"), ("training", "end"), ("saving",))
    rows = []
    for row in figures["rows"]:
        cells = [row["kills"], *(sum(row["phase"].get(name, 0) for name in group) for group in phases)]
        rows.append([f"`{row['config']}`", *cells, *(row[key] for key in KILLS)])
    rows.append(["all", *map(sum, zip(*(row[1:] for row in rows), strict=True))])
    heads = ["config", "kills", "while starting", "training", "saving", *(key.replace("_", " ") for key in KILLS)]
    return f"{came_from(figures)}:\n\n{report.table(heads, [[str(cell) for cell in row] for row in rows])}"


STUCK = {"sleep": "the last process sleeps outside a step", "alone": "the first process is in a collective alone",
         "stopped": "the last process is stopped by SIGSTOP"}  # fmt: skip


def stuck(figures):
    """Seconds until no process of a stuck run is left: the shortest and the longest of the strategies."""
    rows, ends = figures["rows"], list(dict.fromkeys(row["end"] for row in figures["rows"]))
    cells = []
    for state, words in STUCK.items():
        seconds = [[row["seconds"] for row in rows if (row["state"], row["end"]) == (state, end)] for end in ends]
        cells.append([words, *(f"{min(each):.0f} to {max(each):.0f}" for each in seconds)])
    configs = ", ".join(f"`{config}`" for config in dict.fromkeys(row["config"] for row in rows))
    left, lines = sum(row["orphans"] for row in rows), [len(row["said"]) for row in rows]
    text = f"{came_from(figures)}; {configs}: seconds to the end of the last process. In {len(rows)} runs {left} "
    text += f"processes were left, and {lines.count(1)} said in one line how they ended:"
    names = {"twice": "Ctrl-C twice", "killed": "launcher killed"}
    return f"{text}\n\n{report.table(['what is stuck', *(names.get(end, end) for end in ends)], cells)}"


def machines(figures):
    """How two machines end, under each launcher: exit codes, seconds, lines, what was lost."""
    launchers = list(dict.fromkeys(row["launcher"] for row in figures["rows"]))
    cells = {(row["case"], row["launcher"]): two_machines(row) for row in figures["rows"]}
    cases = list(dict.fromkeys(row["case"] for row in figures["rows"]))
    later = {row["case"]: f" ({row['date']}, {row['device']})" for row in figures["rows"] if "date" in row}
    of = lambda case: [cells.get((case, by), "has no FSDP on a CPU") for by in launchers]  # noqa: E731
    rows = [[case_of(case) + later.get(case, ""), *of(case)] for case in cases]
    heads = ["what differs or happens", *("accelerate launch" if by == "accelerate" else by for by in launchers)]
    return f"{came_from(figures)}:\n\n{report.table(heads, rows)}"


def case_of(case):
    return f"machine {case}".replace("_", " ") if case[0].isdigit() else case.replace("_", " ")


def two_machines(row):
    there = [code for code in row["exit_codes"] if code != "absent"]
    codes = ", ".join("-" if code is None else str(code) for code in there)
    time = "" if row["seconds"] is None else f" in {row['seconds']:.0f} s"
    lines = " + ".join(
        str(count) for count, code in zip(row["lines"], row["exit_codes"], strict=True) if code != "absent"
    )
    orphans = f", {row['orphans']} orphans" if row["orphans"] else ""
    lost = row["lost"].partition(":")
    return f"{codes}{time}, {lines} lines{orphans}: {'nothing' if lost[0] == 'nothing' else row['lost']}"


def large(figures):
    """MiB that a process and the machine hold at the peak of each phase, beside what estimate says."""
    rows = [
        [phase, *(f"{held[key]:,} ({held[f'{key}_estimated']:,})" for key in ("main", "others", "node"))]
        for phase, held in figures["phases"].items()
    ]
    rows.append(["export", f"{figures['export']:,}", "", ""])
    text = f"{came_from(figures)}; {figures['parameters'] / 1e6:,.0f} million parameters, {figures['processes']} "
    text += f"processes, a checkpoint of {figures['checkpoint_bytes'] / 1e9:.1f} GB:"
    heads = ["phase", "process 0, MiB (estimated)", "largest other", "all together at one moment"]
    return f"{text}\n\n{report.table(heads, rows)}"


SHORT = {"eval_loss": "held-out loss", "exact_match": "exact answers"}


def gallery(figures):
    """A row for each recipe, and below what there is to look at."""
    rows, seen = [], []
    for row in figures["rows"]:
        measures = [f"{SHORT.get(name, name)} {value:.3g}" for name, value in row["metrics"].items()]
        minutes, command = f"{row['seconds'] / 60:.1f}", f"`{row['command']}`"
        rows.append([f"`{row['recipe']}`", command, row["date"], minutes, ", ".join(measures)])
        if "left" in row:
            file = f"results/gallery/{row['left']}"
            shown = (ROOT / file).read_text().strip() if file.endswith(".txt") else None
            seen.append(f"**{row['recipe']}**\n\n" + (f"```text\n{shown}\n```" if shown else f"![drawn](../{file})"))
    table = report.table(["recipe", "command", "on", "minutes", "at the end"], rows)
    return "\n\n".join([f"{came_from(figures)}:", table, *seen])


def installs(figures):
    heads = ["Python", "packages", "downloaded, MB", "installed, MB", "to install, s", "to the demo's first step, s"]
    keys = ("packages", "downloaded_mb", "installed_mb", "install_seconds", "first_step_seconds")
    rows = [[python, *(f"{row[key]:,}" for key in keys)] for python, row in figures["rows"].items()]
    return f"{came_from(figures)}:\n\n{report.table(heads, rows)}"


TABLES = {
    **{file: partial(comparison, file) for file in COMPARISONS},
    **{file: partial(tokens, file) for file in BUDGETS},
    "results/overhead.json": overhead,
    "results/install.json": installs,
    "results/kills_saving.json": kills,
    "results/stuck.json": stuck,
    "results/card.json": card,
    "results/versions.json": versions,
    "results/host.json": host,
    "results/large.json": large,
    "results/machines.json": machines,
    "results/gallery.json": gallery,
}
PAGES = ("README.md", "amp8/README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))


def picture(figures):
    """The paired differences of a comparison as an SVG file that follows the reader's light or dark mode."""
    rows = drawings.interval_rows(figures, figures["measure"])
    return page.standalone(page.intervals(rows, 100 * figures["margin"]), f"Difference in {figures['measure']}")


def written(page, text=None):
    """A page's text with all tables made from their files, and links into results/ relative to the page."""
    up = "../" * page.count("/")

    def fill(match):
        name = match.group(1)
        table = (ROOT / name).read_text().strip() if name.endswith(".md") else TABLES[name](read(name))
        table = table.replace("](results/", f"]({up}results/")
        return f"{match.group(0).splitlines()[0]}\n{table}\n<!-- end -->"

    text = (ROOT / page).read_text() if text is None else text
    return re.sub(r"<!-- from (\S+): python benchmarks/tables\.py -->\n.*?<!-- end -->", fill, text, flags=re.S)


def main():
    texts = {ROOT / page: written(page) for page in PAGES}
    texts |= {(ROOT / name).with_name(PICTURE): picture(read(name)) for name in COMPARISONS}
    if "--check" in sys.argv:
        stale = [path.name for path, text in texts.items() if not path.exists() or path.read_text() != text]
        sys.exit(f"not as results/ says: {', '.join(stale)}: run python benchmarks/tables.py" if stale else 0)
    for path, text in texts.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
