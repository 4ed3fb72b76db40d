"""Writes a comparison as a text table, Markdown, CSV, JSON and one HTML file that needs no network.

The tables are made once, as lists of strings, and written in each format, so the files cannot differ. The answer comes
first, with one line per config. tools/page.py draws the pictures.
"""

import csv
import json
from pathlib import Path

from tools import page, paired
from tools.judge import COSTS

CLASSES = ("weight", "gradient", "master", "optimizer")


def number(value, digits=4):
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def percent(value):
    """With a sign: +1.2%, -0.03%."""
    if value is None:
        return "-"
    if abs(value) < 1e-5:
        return "0%"
    return f"{100 * value:+.1f}%" if abs(value) >= 0.01 else f"{100 * value:+.2g}%"


def mebibytes(value):
    return "-" if value is None else f"{value / 2**20:,.0f}"


def shown(row):
    return f"{row['config']} (control)" if row["control"] else row["config"]


def difference(found):
    """`+1.2% (-0.3% to +2.7%)`"""
    if found.get("relative") is None:
        return "-"
    ends = found["interval"]
    return percent(found["relative"]) + (f" ({percent(ends[0])} to {percent(ends[1])})" if ends else "")


def judged(found):
    """`+1.2% (-0.3% to +2.7%), cannot tell: ...`"""
    if "verdict" not in found:
        return "baseline"
    return found["verdict"] if found.get("relative") is None else f"{difference(found)}, {found['verdict']}"


def chance(made, name):
    """How much the seed alone changes a result: `21%`."""
    found = made["chance"].get(name) or {}
    return paired.percent(found["deviation"]) if found.get("deviation") is not None else "-"


def answer(made):
    """The answer: [(config, its effect on the loss)]."""
    name, baseline = made["measure"], made["rows"][0]
    lines = []
    for row in made["rows"]:
        if row["error"]:
            lines.append((shown(row), f"has no numbers: {row['error']}"))
        elif row is not baseline and not row["control"]:
            found = row["measures"].get(name, {})
            said = f"{name} {difference(found)}: {found.get('verdict', 'cannot be compared')}"
            if found.get("kind") == "unknown" and found["more_seeds"]:
                said += f"; {paired.more(found['more_seeds'], made['margin'])}"
            lines.append((shown(row), said))
    return lines


def metric_names(made):
    row = next((row for row in made["rows"] if not row["error"]), None)
    return [name for name in row["measures"] if name not in COSTS] if row else []


def classes(made):
    """The classes of bytes per parameter: the common ones, then those that a strategy adds."""
    found = [name for row in made["rows"] for name in row.get("bytes_per_parameter", {})]
    return list(dict.fromkeys([*CLASSES, *(name for name in found if name != "total")]))


def tables(made):
    """[(title, heads, rows)]: all numbers of the report except the curves."""
    names = metric_names(made)
    sound = [row for row in made["rows"] if not row["error"]]
    several = f"{100 * made['confidence']:.3g}%"
    heads = ["config", "seeds", "Linear in FP8"]
    for name in names:
        heads += [name, f"difference, {several} interval", "verdict", "resolution"]
    results = []
    for row in made["rows"]:
        cells = [shown(row), " ".join(map(str, row["seeds"]))]
        if row["error"]:
            results.append([*cells, f"no numbers: {row['error']}", *[""] * (len(heads) - 3)])
            continue
        cells.append(f"{row['linear_converted']} of {row['linear_total']}")
        for name in names:
            found = row["measures"].get(name)
            shows = paired.needs(found or {}, made["margin"])
            verdict = found.get("verdict", "baseline") if found else "-"
            cells += [number(found["mean"]), difference(found), verdict, shows] if found else ["-"] * 4
        results.append(cells)
        if row is made["rows"][0]:  # the other control
            cells = [f"{row['config']}, other seeds (control)", "", ""]
            for name in names:
                ends = (made["chance"].get(name) or {}).get("interval")
                without = f"without pairs: {paired.percent(ends[1])}" if ends else "-"
                cells += ["", f"one seed to the next: {chance(made, name)}", "control", without]
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
    """Notes for the reader, one sentence each."""
    sound = [row for row in made["rows"] if not row["error"]]
    yield (
        f"The baseline is {made['baseline']}. Runs of one seed are pairs: the same weights, samples and order. A "
        "difference is the mean over the pairs, in percent of the baseline's mean, with its interval from Student's t."
    )
    margin = paired.percent(made["margin"])
    yield (
        f"Equal within {margin}: the whole interval is inside that margin. Higher or lower: the whole interval is on "
        "one side of zero. Cannot tell: neither. The resolution is half the interval: a smaller difference does not "
        "show with these seeds. Beside it stands how many more seeds would make it the margin."
    )
    if made["looks"] > 1:
        yield (
            f"Seeds were added until every config had a verdict, with {made['looks']} looks at most. Each interval has "
            f"the level {100 * made['confidence']:.4g}%, so that all looks together hold in 95% of comparisons "
            "(Bonferroni; repeated confidence intervals, Jennison and Turnbull 1989)."
        )
    else:
        yield "Each verdict errs in at most 5% of comparisons; of many verdicts, some will."
    if any(row["control"] for row in made["rows"]):
        yield (
            "Controls: other seeds, what chance alone does to one run, as the standard deviation over the baseline's "
            "seeds, and what would show without pairs; the twin, the baseline from weights one rounding apart: what it "
            "differs by, pairing cannot remove."
        )
    if made["fallback"]:
        yield (
            "These runs logged no metric with accelerator.log, so their training loss is compared, the mean over the "
            "last tenth of the steps. It is of samples that were trained on."
        )
    if made.get("once"):
        yield "Every config ran once: its script's command has no {seed}, and one pair has no interval."
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
    """The report for the terminal."""
    out = ["", *(f"{config}: {said}" for config, said in answer(made))]
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
    out = ["# " + title_of(made), "", *(f"- **{config}** {said}" for config, said in answer(made))]
    out += ["", "```", made["command"], "```"]
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
            keys = ("mean", "spread", "difference", "relative", "resolution", "more_seeds", "verdict")
            line |= {f"{name}_{key}": found.get(key) for key in keys}
            line |= dict(zip((f"{name}_low", f"{name}_high"), found.get("interval") or (None, None), strict=True))
        line |= {f"bytes_per_parameter_{name}": value for name, value in row.get("bytes_per_parameter", {}).items()}
        line |= {f"estimate_{name}": value for name, value in (row.get("estimate") or {}).items()}
        lines.append(line)
    names = list(dict.fromkeys(key for line in lines for key in line))
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)


# ------------------------------------------------------------------------------------------------------------- pictures


def colours(made):
    """{config: its colour in every picture}; controls are grey."""
    rows = [row["config"] for row in made["rows"] if not row["control"]]
    return {name: page.colour(i) for i, name in enumerate(rows)}


def interval_rows(made, name):
    """The rows of page.intervals for a measure, in percent."""
    rows, at = [], colours(made)
    if ends := (made["chance"].get(name) or {}).get("interval"):
        rows.append(("other seeds, not in pairs*", 0, 100 * ends[0], 100 * ends[1], page.DIM))
    for row in made["rows"][1:]:
        found = row.get("measures", {}).get(name, {})
        if found.get("interval"):
            ends = [100 * end for end in (found["relative"], *found["interval"])]
            rows.append((shown(row), *ends, page.DIM if row["control"] else at[row["config"]]))
    return rows


def drawn_intervals(made):
    """One section per metric, the main one first, with the paired differences and the margin."""
    for name in sorted(metric_names(made), key=lambda name: name != made["measure"]):
        if rows := interval_rows(made, name):
            caption = (
                f"{name}: mean difference to {made['baseline']} over pairs of one seed, with its "
                f"{100 * made['confidence']:.3g}% interval. Shaded: the margin, {paired.percent(made['margin'])}."
            )
            drawn = page.picture(page.intervals(rows, 100 * made["margin"]), caption, command=made["command"])
            yield page.section(f"Difference in {name}", drawn)


def drawn_differences(made):
    """Pictures of the difference to the baseline over the steps, for the main measure and the training loss."""
    at = colours(made)
    for name in dict.fromkeys([made["measure"], "loss"]):
        found = {r["config"]: r["difference_curves"].get(name) for r in made["rows"] if r.get("difference_curves")}
        found = {key: [[p[0], *(100 * v for v in p[1:])] for p in points] for key, points in found.items() if points}
        twin = next((found.pop(row["config"], None) for row in made["rows"] if row["control"]), None)
        if not found:
            continue
        title = "training loss" if name == "loss" else name
        level = f"{100 * made['confidence']:.3g}%"
        caption = f"{title}: mean difference to {made['baseline']} over pairs, and its {level} interval."
        caption += " Grey: the twin." if twin else ""
        draw = page.panels([(key, at[key], points) for key, points in found.items()], twin)
        drawn = page.picture(draw, caption, command=made["command"])
        every = found | ({f"{made['baseline']}, twin": twin} if twin else {})
        yield page.section(f"Difference over the steps: {title}", drawn, in_numbers(every, "{:+.2f}%".format))


def in_numbers(series, form):
    """A collapsed table of {name: [[step, mean, low, high]]}."""
    heads = ["step", *(word for name in series for word in (name, "from", "to"))]
    found = [{point[0]: point[1:] for point in points} for points in series.values()]
    steps = sorted({step for points in found for step in points})
    rows = [[step, *(form(v) if v is not None else "-" for points in found for v in points.get(step, [None] * 3))]
            for step in steps]  # fmt: skip
    return page.details("The same in numbers", page.table(heads, rows))


def drawn_curves(made):
    """A picture and a table of the training loss and of each held-out metric over the steps."""
    at = colours(made)
    plain = [row for row in made["rows"] if not row["error"] and not row["control"]]
    names = dict.fromkeys(name for row in plain for name in row["curves"])
    for name in sorted(names, key=lambda name: name != "loss"):
        series = {row["config"]: row["curves"][name] for row in plain if row["curves"].get(name)}
        if not any(series.values()):
            continue
        title = "Training loss" if name == "loss" else name
        caption = f"{title}: mean over the seeds; the band is from their minimum to their maximum."
        key = page.legend([(config, at[config]) for config in series])
        draw = page.lines([(config, at[config], points) for config, points in series.items()])
        yield page.section(title, page.picture(draw, caption, key, made["command"]), in_numbers(series, number))


def drawn_speed(made):
    rows = []
    for row in made["rows"]:
        if not row["error"]:
            rate = row["measures"]["samples_per_second"]["mean"]
            behind = number(rate) + (", emulated" if row["emulated"] else "")
            rows.append((shown(row), [(rate, page.colour(0))], behind, row["emulated"]))
    caption = "Speed. Pale bars are emulated and not ranked."
    return page.picture(page.bars(rows, "samples per second, median step"), caption, command=made["command"])


def drawn_memory(made):
    rows = []
    for row in made["rows"]:
        if not row["error"] and not row["control"]:
            per = row["bytes_per_parameter"]
            pieces = [(per.get(key, 0), page.colour(i)) for i, key in enumerate(classes(made))]
            rows.append((row["config"], pieces, f"{per['total']:.2f}", False))
    key = page.legend([(name, page.colour(i)) for i, name in enumerate(classes(made))])
    draw = page.bars(rows, "bytes per parameter, over all processes")
    return page.picture(draw, "Model states, counted on live tensors.", key, made["command"])


def whole_page(made):
    """The whole report as one HTML file."""
    parts = [*drawn_intervals(made), *drawn_differences(made)]
    for title, heads, rows in tables(made):
        drawn = {"Speed": drawn_speed, "Memory and wire, per process": drawn_memory}.get(title)
        parts += drawn_curves(made) if title == "Speed" else []  # behind the results
        parts.append(page.section(title, *([drawn(made)] if drawn else []), page.table(heads, rows)))
    return page.whole(title_of(made), made["command"], answer(made), parts, list(notes(made)))


def write(made, folder):
    """Writes all four files and prints the tables."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(made, indent=1) + "\n")
    (folder / "report.md").write_text(markdown(made))
    (folder / "report.html").write_text(whole_page(made))
    with (folder / "report.csv").open("w", newline="") as file:
        spreadsheet(made, file)
    print(text(made))
