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


def difference(measure):
    """`+1.2% (-0.3% to +2.7%)`"""
    if measure.get("relative") is None:
        return "-"
    ends = measure["interval"]
    return percent(measure["relative"]) + (f" ({percent(ends[0])} to {percent(ends[1])})" if ends else "")


def judged(measure):
    """`+1.2% (-0.3% to +2.7%), cannot tell: ...`"""
    if "verdict" not in measure:
        return "baseline"
    return measure["verdict"] if measure.get("relative") is None else f"{difference(measure)}, {measure['verdict']}"


def chance(comparison, name):
    """How much the seed alone changes a result: `21%`."""
    spread = comparison["chance"].get(name) or {}
    return paired.percent(spread["deviation"]) if spread.get("deviation") is not None else "-"


def answer(comparison):
    """The answer: [(config, its effect on the loss)]."""
    name, baseline = comparison["measure"], comparison["rows"][0]
    lines = []
    for row in comparison["rows"]:
        if row["error"]:
            lines.append((shown(row), f"has no numbers: {row['error']}"))
        elif row is not baseline and not row["control"]:
            measure = row["measures"].get(name, {})
            said = f"{name} {difference(measure)}: {measure.get('verdict', 'cannot be compared')}"
            if measure.get("kind") == "unknown" and measure["more_seeds"]:
                said += f"; {paired.more(measure['more_seeds'], comparison['margin'])}"
            lines.append((shown(row), said))
    return lines


def metric_names(comparison):
    row = next((row for row in comparison["rows"] if not row["error"]), None)
    return [name for name in row["measures"] if name not in COSTS] if row else []


def classes(comparison):
    """The classes of bytes per parameter: the common ones, then those that a strategy adds."""
    names = [name for row in comparison["rows"] for name in row.get("bytes_per_parameter", {})]
    return list(dict.fromkeys([*CLASSES, *(name for name in names if name != "total")]))


def tables(comparison):
    """[(title, heads, rows)]: all numbers of the report except the curves."""
    names = metric_names(comparison)
    sound = [row for row in comparison["rows"] if not row["error"]]
    several = f"{100 * comparison['confidence']:.3g}%"
    heads = ["config", "seeds", "Linear in FP8"]
    for name in names:
        heads += [name, f"difference, {several} interval", "verdict", "resolution"]
    results = []
    for row in comparison["rows"]:
        cells = [shown(row), " ".join(map(str, row["seeds"]))]
        if row["error"]:
            results.append([*cells, f"no numbers: {row['error']}", *[""] * (len(heads) - 3)])
            continue
        cells.append(f"{row['linear_converted']} of {row['linear_total']}")
        for name in names:
            measure = row["measures"].get(name)
            shows = paired.needs(measure or {}, comparison["margin"])
            verdict = measure.get("verdict", "baseline") if measure else "-"
            cells += [number(measure["mean"]), difference(measure), verdict, shows] if measure else ["-"] * 4
        results.append(cells)
        if row is comparison["rows"][0]:  # the other control
            cells = [f"{row['config']}, other seeds (control)", "", ""]
            for name in names:
                ends = (comparison["chance"].get(name) or {}).get("interval")
                without = f"without pairs: {paired.percent(ends[1])}" if ends else "-"
                cells += ["", f"one seed to the next: {chance(comparison, name)}", "control", without]
            results.append(cells)
    yield "Results", heads, results

    heads = ["config", "step, ms", "90%, ms", "samples/s", "against the baseline", "GPU utilisation"]
    heads += ["samples per unit of price"] if comparison["price_per_hour"] else []
    costs = []
    for row in sound:
        measures = row["measures"]
        p90, gpu = row.get("step_seconds_p90"), row["gpu_utilization"]
        cells = [shown(row), number(1000 * measures["step_seconds"]["mean"]), number(p90 and 1000 * p90)]
        cells += [number(measures["samples_per_second"]["mean"]), judged(measures["samples_per_second"])]
        cells += ["-" if gpu is None else f"{gpu:.0f}%"]
        cells += [number(row.get("samples_per_unit_of_price"))] if comparison["price_per_hour"] else []
        costs.append(cells)
    yield "Speed", heads, costs

    heads = ["config", *(f"{name}, B/param" for name in classes(comparison)), "total, B/param", "peak memory, MiB"]
    heads += ["against the baseline", "estimated peak, MiB", "wire, bytes/step"]
    memory = []
    for row in sound:
        sizes, peak = row["bytes_per_parameter"], row["measures"]["peak_memory_bytes"]
        estimate = row["estimate"] and mebibytes(row["estimate"]["total"])
        cells = [
            shown(row),
            *(f"{sizes.get(name, 0):.2f}" for name in classes(comparison)),
            f"{sizes['total']:.2f}",
            mebibytes(peak["mean"]),
        ]
        memory.append([*cells, judged(peak), estimate or "-", number(row["wire_bytes_per_step"])])
    yield "Memory and wire, per process", heads, memory

    rows = [[shown(row), row["truth"]] for row in sound if not row["control"]]
    yield "What each run was, counted on its live tensors after the first optimizer step", ["config", "truth"], rows


def notes(comparison):
    """Notes for the reader, one sentence each."""
    sound = [row for row in comparison["rows"] if not row["error"]]
    yield (
        f"The baseline is {comparison['baseline']}. Runs of one seed are pairs: the same weights, samples and order. A "
        "difference is the mean over the pairs, in percent of the baseline's mean, with its interval from Student's t."
    )
    margin = paired.percent(comparison["margin"])
    yield (
        f"Equal within {margin}: the whole interval is inside that margin. Higher or lower: the whole interval is on "
        "one side of zero. Cannot tell: neither. The resolution is half the interval: a smaller difference does not "
        "show with these seeds. Beside it stands how many more seeds would make it the margin."
    )
    if comparison["looks"] > 1:
        yield (
            f"Seeds were added until every config had a verdict, with {comparison['looks']} looks at most. Each "
            f"interval has the level {100 * comparison['confidence']:.4g}%, so that all looks together hold in 95% of "
            "comparisons (Bonferroni; repeated confidence intervals, Jennison and Turnbull 1989)."
        )
    else:
        yield "Each verdict errs in at most 5% of comparisons; of many verdicts, some will."
    if any(row["control"] for row in comparison["rows"]):
        yield (
            "Controls: other seeds, what chance alone does to one run, as the standard deviation over the baseline's "
            "seeds, and what would show without pairs; the twin, the baseline from weights one rounding apart: what it "
            "differs by, pairing cannot remove."
        )
    if comparison["fallback"]:
        yield (
            "These runs logged no metric with accelerator.log, so their training loss is compared, the mean over the "
            "last tenth of the steps. It is of samples that were trained on."
        )
    if comparison.get("once"):
        yield "Every config ran once: its script's command has no {seed}, and one pair has no interval."
    if any(row["emulated"] for row in sound):
        yield (
            "Emulated: this machine has no FP8 hardware. Values are rounded to FP8 as a GPU rounds them; speed, and "
            "what emulation itself holds in memory, say nothing about FP8. Bytes per parameter are real."
        )
    if comparison["steps_measured"]:
        yield (
            f"Step times are medians, and what 90% stay below, over {comparison['steps_measured']} steps per run; the "
            f"first {comparison['steps_excluded']} (warm-up, compilation), evaluation and checkpoints are not in them."
        )
    if comparison["versions"]:
        versions = ", ".join(f"{name} {v}" for name, v in comparison["versions"].items() if v)
        commit = (comparison["git_commit"] or "unknown")[:12]
        yield f"{comparison['device']}; {versions}; {comparison['date']}; commit {commit}."


def text(comparison):
    """The report for the terminal."""
    out = ["", *(f"{config}: {said}" for config, said in answer(comparison))]
    for title, heads, rows in tables(comparison):
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
    return "\n".join([*out, "", *notes(comparison)])


def markdown(comparison):
    out = ["# " + title_of(comparison), "", *(f"- **{config}** {said}" for config, said in answer(comparison))]
    out += ["", "```", comparison["command"], "```"]
    for title, heads, rows in tables(comparison):
        out += ["", f"## {title}", "", table(heads, rows)]
    return "\n".join([*out, "", *(f"- {line}" for line in notes(comparison)), ""])


def table(heads, rows):
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def title_of(comparison):
    return (
        f"{comparison['recipe'] or 'Runs'}: {len([r for r in comparison['rows'] if not r['control']])} configs compared"
    )


def spreadsheet(comparison, file):
    """One line per row, every number unrounded."""
    lines = []
    for row in comparison["rows"]:
        line = {key: row[key] for key in ("config", "control", "error")} | {"seeds": " ".join(map(str, row["seeds"]))}
        for key in (
            "truth",
            "emulated",
            "num_processes",
            "linear_converted",
            "linear_total",
            "wire_bytes_per_step",
            "step_seconds_p90",
            "gpu_utilization",
            "samples_per_unit_of_price",
        ):
            line[key] = row.get(key)
        for name, measure in row.get("measures", {}).items():
            keys = ("mean", "spread", "difference", "relative", "resolution", "more_seeds", "verdict")
            line |= {f"{name}_{key}": measure.get(key) for key in keys}
            line |= dict(zip((f"{name}_low", f"{name}_high"), measure.get("interval") or (None, None), strict=True))
        line |= {f"bytes_per_parameter_{name}": value for name, value in row.get("bytes_per_parameter", {}).items()}
        line |= {f"estimate_{name}": value for name, value in (row.get("estimate") or {}).items()}
        lines.append(line)
    names = list(dict.fromkeys(key for line in lines for key in line))
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)


# ------------------------------------------------------------------------------------------------------------- pictures


def colours(comparison):
    """{config: its colour in every picture}; controls are grey."""
    rows = [row["config"] for row in comparison["rows"] if not row["control"]]
    return {name: page.colour(i) for i, name in enumerate(rows)}


def interval_rows(comparison, name):
    """The rows of page.intervals for a measure, in percent."""
    rows, colour_of = [], colours(comparison)
    if ends := (comparison["chance"].get(name) or {}).get("interval"):
        rows.append(("other seeds, not in pairs*", 0, 100 * ends[0], 100 * ends[1], page.DIM))
    for row in comparison["rows"][1:]:
        measure = row.get("measures", {}).get(name, {})
        if measure.get("interval"):
            ends = [100 * end for end in (measure["relative"], *measure["interval"])]
            rows.append((shown(row), *ends, page.DIM if row["control"] else colour_of[row["config"]]))
    return rows


def drawn_intervals(comparison):
    """One section per metric, the main one first, with the paired differences and the margin."""
    level, margin = f"{100 * comparison['confidence']:.3g}%", comparison["margin"]
    for name in sorted(metric_names(comparison), key=lambda name: name != comparison["measure"]):
        if rows := interval_rows(comparison, name):
            caption = (
                f"{name}: mean difference to {comparison['baseline']} over pairs of one seed, with its {level} "
                f"interval. Shaded: the margin, {paired.percent(margin)}."
            )
            drawn = page.picture(page.intervals(rows, 100 * margin), caption, command=comparison["command"])
            yield page.section(f"Difference in {name}", drawn)


def difference_curves(comparison, name):
    """({config: its differences to the baseline over the steps, in percent}, the same of the twin or None)."""
    curves, twin = {}, None
    for row in comparison["rows"]:
        points = (row.get("difference_curves") or {}).get(name)
        if not points:
            continue
        shares = [[step, *(100 * value for value in values)] for step, *values in points]
        if row["control"]:
            twin = shares
        else:
            curves[row["config"]] = shares
    return curves, twin


def drawn_differences(comparison):
    """Pictures of the difference to the baseline over the steps, for the main measure and the training loss."""
    colour_of, baseline = colours(comparison), comparison["baseline"]
    for name in dict.fromkeys([comparison["measure"], "loss"]):
        curves, twin = difference_curves(comparison, name)
        if not curves:
            continue
        title = "training loss" if name == "loss" else name
        level = f"{100 * comparison['confidence']:.3g}%"
        caption = f"{title}: mean difference to {baseline} over pairs, and its {level} interval."
        caption += " Grey: the twin." if twin else ""
        draw = page.panels([(key, colour_of[key], points) for key, points in curves.items()], twin)
        drawn = page.picture(draw, caption, command=comparison["command"])
        series = curves | ({f"{baseline}, twin": twin} if twin else {})
        yield page.section(f"Difference over the steps: {title}", drawn, in_numbers(series, "{:+.2f}%".format))


def in_numbers(series, form):
    """A collapsed table of {name: [[step, mean, low, high]]}."""
    heads = ["step", *(word for name in series for word in (name, "from", "to"))]
    values_at = [{step: values for step, *values in points} for points in series.values()]
    rows = []
    for step in sorted({step for values in values_at for step in values}):
        cells = [value for values in values_at for value in values.get(step, [None] * 3)]
        rows.append([step, *("-" if value is None else form(value) for value in cells)])
    return page.details("The same in numbers", page.table(heads, rows))


def drawn_curves(comparison):
    """A picture and a table of the training loss and of each held-out metric over the steps."""
    colour_of = colours(comparison)
    plain = [row for row in comparison["rows"] if not row["error"] and not row["control"]]
    names = dict.fromkeys(name for row in plain for name in row["curves"])
    for name in sorted(names, key=lambda name: name != "loss"):
        series = {row["config"]: row["curves"][name] for row in plain if row["curves"].get(name)}
        if not any(series.values()):
            continue
        title = "Training loss" if name == "loss" else name
        caption = f"{title}: mean over the seeds; the band is from their minimum to their maximum."
        key = page.legend([(config, colour_of[config]) for config in series])
        draw = page.lines([(config, colour_of[config], points) for config, points in series.items()])
        yield page.section(title, page.picture(draw, caption, key, comparison["command"]), in_numbers(series, number))


def drawn_speed(comparison):
    rows = []
    for row in comparison["rows"]:
        if not row["error"]:
            rate = row["measures"]["samples_per_second"]["mean"]
            behind = number(rate) + (", emulated" if row["emulated"] else "")
            rows.append((shown(row), [(rate, page.colour(0))], behind, row["emulated"]))
    caption = "Speed. Pale bars are emulated and not ranked."
    return page.picture(page.bars(rows, "samples per second, median step"), caption, command=comparison["command"])


def drawn_memory(comparison):
    rows = []
    for row in comparison["rows"]:
        if not row["error"] and not row["control"]:
            per = row["bytes_per_parameter"]
            pieces = [(per.get(key, 0), page.colour(i)) for i, key in enumerate(classes(comparison))]
            rows.append((row["config"], pieces, f"{per['total']:.2f}", False))
    key = page.legend([(name, page.colour(i)) for i, name in enumerate(classes(comparison))])
    draw = page.bars(rows, "bytes per parameter, over all processes")
    return page.picture(draw, "Model states, counted on live tensors.", key, comparison["command"])


def whole_page(comparison):
    """The whole report as one HTML file."""
    parts = [*drawn_intervals(comparison), *drawn_differences(comparison)]
    for title, heads, rows in tables(comparison):
        drawn = {"Speed": drawn_speed, "Memory and wire, per process": drawn_memory}.get(title)
        parts += drawn_curves(comparison) if title == "Speed" else []  # behind the results
        parts.append(page.section(title, *([drawn(comparison)] if drawn else []), page.table(heads, rows)))
    return page.whole(title_of(comparison), comparison["command"], answer(comparison), parts, list(notes(comparison)))


def write(comparison, folder):
    """Writes all four files and prints the tables."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(comparison, indent=1) + "\n")
    (folder / "report.md").write_text(markdown(comparison))
    (folder / "report.html").write_text(whole_page(comparison))
    with (folder / "report.csv").open("w", newline="") as file:
        spreadsheet(comparison, file)
    print(text(comparison))
