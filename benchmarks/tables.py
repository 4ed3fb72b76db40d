"""Writes the generated tables and the picture of README.md from the files in results/.

    python benchmarks/tables.py            write them
    python benchmarks/tables.py --check    exit code 1 where README.md says something else

A table stands between `<!-- from results/...: python benchmarks/tables.py -->` and `<!-- end -->`.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from tools import report  # noqa: E402

COMPARISON = "results/compare_digits/report.json"
PICTURE = ROOT / "results" / "compare_digits" / "loss.svg"


def read(name):
    return json.loads((ROOT / name).read_text())


def came_from(made):
    versions = ", ".join(
        f"{name} {version}" for name, version in made["versions"].items() if version and name != "cuda"
    )
    return f"`{made['command']}` ({made['device']}; {versions}; {made['date']})"


def comparison(made):
    heads = ["config", "Linear in FP8", "held-out loss", "max - min", "against bf16", "accuracy", "B/param", "step, ms"]
    rows = []
    for row in made["rows"]:
        m, loss = row["measures"], row["measures"]["eval_loss"]
        step = "emulated" if row["emulated"] else f"{1000 * m['step_seconds']['mean']:.1f}"
        rows.append([
            f"`{row['config']}`" + (", other seeds" if row["control"] else ""),
            f"{row['linear_converted']} of {row['linear_total']}", f"{loss['mean']:.4f}", f"{loss['spread']:.4f}",
            report.judged(loss), f"{m['accuracy']['mean']:.4f}", f"{row['bytes_per_parameter']['total']:.1f}", step,
        ])  # fmt: skip
    page = COMPARISON.replace(".json", ".html")
    picture = f"![Training loss of each config, mean and range over the seeds]({PICTURE.relative_to(ROOT)})"
    text = f"{came_from(made)}; all of it, with curves, memory and truth lines: [{page}]({page}), one file to open."
    return f"{text}\n\n{picture}\n\n{report.table(heads, rows)}"


def overhead(made):
    heads = ["model, precision, processes", "step by hand, ms", "recipe", "Lightning Fabric", "transformers' Trainer"]
    rows = []
    for row in made["rows"]:
        cells = [f"{row['model']}, {row['precision']}, {row['processes']}", f"{1000 * row['step_seconds_by_hand']:.1f}"]
        for way in ("recipe", "fabric", "trainer"):
            wall, cpu = row[way]["wall"], row[way]["cpu"]
            cells.append(f"{wall['median']:.2f} ({wall['min']:.2f} to {wall['max']:.2f}), CPU {cpu['median']:.3f}")
        rows.append(cells)
    text = f"{came_from(made)}; step time over that of the loop by hand: median of the "
    text += "rounds (range), and CPU time, which other work on the machine disturbs less:"
    text += "\n\n" + report.table(heads, rows)
    if made.get("start"):
        text += "\n\nFrom the command to the end of the first step:\n\n"
        starts = [
            [row["way"], str(row["processes"]), f"{row['seconds']:.1f}", f"{row['of_hand']:.2f}"]
            for row in made["start"]
        ]
        text += report.table(["started by", "processes", "seconds", "over by hand"], starts)
    return text


def estimates(made):
    heads = ["config", "model, data, batch", "states: estimated, counted", "off", "in all: estimated, peak", "off"]
    rows = []
    for row in made["rows"]:
        what = f"{row['model']}, {row['dataset']}, {row['per_device_train_batch_size']}"
        mib = {
            key: f"{row[key] / 2**20:,.0f}"
            for key in ("states_estimated", "states_measured", "total_estimated", "peak_measured")
        }
        rows.append([f"`{row['config']}`", what, f"{mib['states_estimated']}, {mib['states_measured']}",
                     f"{row['states_off']:+.1%}", f"{mib['total_estimated']}, {mib['peak_measured']}",
                     f"{row['total_off']:+.1%}"])  # fmt: skip
    within = sum(row["within"] for row in made["rows"])
    text = f"{came_from(made)}; MiB per process, {within} of {len(rows)} within 10% for states and 25% in all:"
    return f"{text}\n\n{report.table(heads, rows)}"


TABLES = {COMPARISON: comparison, "results/overhead.json": overhead, "results/estimate.json": estimates}


def picture(made):
    """The training loss of a comparison as an SVG file, light or dark as its reader."""
    rows = [row for row in made["rows"] if not row["control"]]
    drawn = report.lines([(row["config"], i, row["curves"]["loss"]) for i, row in enumerate(rows)], "Training loss")
    keys = "".join(
        f'<rect class="f{i}" x="{80 + 260 * (i % 3)}" y="{346 + 20 * (i // 3)}" width="10" height="10"/>'
        + report.label(96 + 260 * (i % 3), 355 + 20 * (i // 3), row["config"])
        for i, row in enumerate(rows)
    )
    drawn = drawn.replace('viewBox="0 0 860 340"', 'viewBox="0 0 860 396" xmlns="http://www.w3.org/2000/svg"')
    background = '<rect width="860" height="396" style="fill: var(--paper)"/>'
    return drawn.replace(">\n", f">\n<style>{report.STYLE}</style>\n{background}\n", 1).replace(
        "</svg>", f"{keys}</svg>\n"
    )


def written(text):
    """README's text with every table as its file says."""

    def fill(match):
        name = match.group(1)
        return f"{match.group(0).splitlines()[0]}\n{TABLES[name](read(name))}\n<!-- end -->"

    return re.sub(r"<!-- from (\S+): python benchmarks/tables\.py -->\n.*?<!-- end -->", fill, text, flags=re.S)


def main():
    readme = ROOT / "README.md"
    text, drawn = written(readme.read_text()), picture(read(COMPARISON))
    if "--check" in sys.argv:
        stale = [readme.name] if text != readme.read_text() else []
        stale += [] if PICTURE.exists() and PICTURE.read_text() == drawn else [PICTURE.name]
        sys.exit(f"not as results/ says: {', '.join(stale)}: run python benchmarks/tables.py" if stale else 0)
    readme.write_text(text)
    PICTURE.write_text(drawn)


if __name__ == "__main__":
    main()
