"""Writes a comparison as a text table, Markdown, JSON and one HTML file that needs no network.

The tables are made once, as lists of strings, and written in each format, so the files cannot differ. The answer comes
first, with one line per config. tools/drawings.py adds the pictures.
"""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools import cli, paired
from tools.judge import COSTS

CLASSES = ("weight", "gradient", "master", "optimizer")


def number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    """With a sign: +1.2%, -0.03%."""
    if value is None:
        return "-"
    if abs(value) < 1e-5:
        return "0%"
    return f"{100 * value:+.1f}%" if abs(value) >= 0.01 else f"{100 * value:+.2g}%"


def mebibytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.0f}"


def row_title(row: dict[str, Any]) -> str:
    return f"{row['config']} (control)" if row["control"] else row["config"]


def difference(measure: dict[str, Any]) -> str:
    """`+1.2% (-0.3% to +2.7%)`"""
    if measure.get("relative") is None:
        return "-"
    ends = measure.get("interval")
    return percent(measure["relative"]) + (f" ({percent(ends[0])} to {percent(ends[1])})" if ends else "")


def verdict_words(measure: dict[str, Any]) -> str:
    """`+1.2% (-0.3% to +2.7%), cannot tell: ...`"""
    if "verdict" not in measure:
        return "baseline"
    return measure["verdict"] if measure.get("relative") is None else f"{difference(measure)}, {measure['verdict']}"


def spread(comparison: dict[str, Any], name: str) -> dict[str, Any]:
    """What the seed alone does to a result: {} or {"values", "deviation", "interval"}."""
    return comparison["chance"].get(name) or {}


def chance(comparison: dict[str, Any], name: str) -> str:
    """How much the seed alone changes a result: `21%`."""
    deviation = spread(comparison, name).get("deviation")
    return "-" if deviation is None else paired.percent(deviation)


def level(comparison: dict[str, Any]) -> str:
    """Of the intervals: `95%`."""
    return f"{100 * comparison['confidence']:.3g}%"


def answer(comparison: dict[str, Any]) -> list[tuple[str, str]]:
    """The answer: [(config, its effect on the loss)]."""
    name, baseline = comparison["measure"], comparison["rows"][0]
    lines = []
    for row in comparison["rows"]:
        if row["error"]:
            lines.append((row_title(row), f"has no numbers: {row['error']}"))
        elif row is not baseline and not row["control"]:
            measure = row["measures"].get(name, {})
            said = f"{name} {difference(measure)}: {measure.get('verdict', 'cannot be compared')}"
            if measure.get("kind") == "unknown" and measure["more_seeds"]:
                said += f"; {paired.more(measure['more_seeds'], comparison['margin'])}"
            lines.append((row_title(row), "; ".join([said, *costs(row, baseline)])))
    return lines


def costs(row: dict[str, Any], baseline: dict[str, Any]) -> Iterator[str]:
    """What a row costs beside its loss, in words: tokens, memory, time."""
    if row.get("tokens"):
        yield f"tokens for the same loss {token_words(row['tokens'][-1])}"
    sizes = [each["bytes_per_parameter"]["total"] for each in (row, baseline)]
    yield "{:.1f} bytes per parameter for {:.1f}".format(*sizes)
    share = time_share(row, baseline)
    if share is None:
        yield "its time on a card is not measured here"
        return
    yield f"{share:.2f} of the time of a step"
    if row.get("tokens") and row["tokens"][-1]["share"] is not None:
        found = row["tokens"][-1]
        ends = ["open" if end is None else f"{share * (1 + end):.2f}" for end in found["interval"]]
        yield f"{share * (1 + found['share']):.2f} of the time to the same loss ({' to '.join(ends)})"


def time_share(row: dict[str, Any], baseline: dict[str, Any]) -> float | None:
    """The time of a step over the baseline's, None where either is a rehearsal or emulated."""
    if any(each["emulated"] or each["rehearsal"] for each in (row, baseline)):
        return None
    return row["measures"]["step_seconds"]["mean"] / baseline["measures"]["step_seconds"]["mean"]


def token_words(found: dict[str, Any]) -> str:
    """`+1.4% (+0.6% to +2.3%)`, with `open` for an end that the losses do not say."""
    if found["share"] is None:
        return found["why"]
    if found["interval"] == [None, None]:
        return percent(found["share"]) + (f": {found['why']}" if found["why"] else " (open)")
    low, high = ("open" if end is None else percent(end) for end in found["interval"])
    return f"{percent(found['share'])} ({low} to {high})"


def budgets(comparison: dict[str, Any], sound: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    name, heads, rows = comparison["measure"], ["config"], []
    for each in sound[0]["tokens"]:
        heads += [f"{name} after {each['samples']:,} samples", "tokens for the same loss"]
    for row in sound:
        cells, at = [row_title(row)], {each["budget"]: each for each in row["tokens"]}
        for each in sound[0]["tokens"]:
            found = at.get(each["budget"])  # the twin has the largest budget only
            cells += [number(statistics.fmean(found["values"])) if found else "-"]
            cells += [token_words(found) if found and "share" in found else "baseline" if found else "-"]
        rows.append(cells)
    return heads, rows


def metric_names(comparison: dict[str, Any]) -> list[str]:
    row = next((row for row in comparison["rows"] if not row["error"]), None)
    return [name for name in row["measures"] if name not in COSTS] if row else []


def classes(comparison: dict[str, Any]) -> list[str]:
    """The classes of bytes per parameter: the common ones, then those that a strategy adds."""
    names = [name for row in comparison["rows"] for name in row.get("bytes_per_parameter", {})]
    return list(dict.fromkeys([*CLASSES, *(name for name in names if name != "total")]))


def tables(comparison: dict[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """[(title, heads, rows)]: all numbers of the report except the curves."""
    sound = [row for row in comparison["rows"] if not row["error"]]
    rows = [[row_title(row), row["measured"]] for row in sound if not row["control"]]
    yield "Results", *results(comparison)
    if sound and sound[0].get("tokens"):
        yield "Tokens for the baseline's loss", *budgets(comparison, sound)
    yield "Speed", *speeds(comparison, sound)
    yield "Memory and wire, per process", *memories(comparison, sound)
    yield "What each run was, counted on its live tensors after the first optimizer step", ["config", "measured"], rows


def results(comparison: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    names, heads, rows = metric_names(comparison), ["config", "seeds", "Linear in FP8"], []
    for name in names:
        heads += [name, f"difference, {level(comparison)} interval", "verdict", "resolution"]
    for row in comparison["rows"]:
        cells = [row_title(row), " ".join(map(str, row["seeds"]))]
        if row["error"]:
            rows.append([*cells, f"no numbers: {row['error']}", *[""] * (len(heads) - 3)])
            continue
        cells.append(f"{row['linear_converted']} of {row['linear_total']}")
        for name in names:
            measure = row["measures"].get(name)
            if not measure:
                cells += ["-"] * 4
                continue
            shows = paired.needs(measure, comparison["margin"])
            cells += [number(measure["mean"]), difference(measure), measure.get("verdict", "baseline"), shows]
        rows.append(cells)
        if row is comparison["rows"][0]:
            rows.append(other_seeds(comparison, names))
    return heads, rows


def other_seeds(comparison: dict[str, Any], names: list[str]) -> list[str]:
    """The row of the other control: what chance alone does."""
    cells = [f"{comparison['rows'][0]['config']}, other seeds (control)", "", ""]
    for name in names:
        ends = spread(comparison, name).get("interval")
        without = f"without pairs: {paired.percent(ends[1])}" if ends else "-"
        cells += ["", f"one seed to the next: {chance(comparison, name)}", "control", without]
    return cells


def speeds(comparison: dict[str, Any], sound: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    heads = ["config", "step, ms", "90%, ms", "samples/s", "against the baseline", "GPU utilisation"]
    rows = []
    for row in sound:
        step, rate = row["measures"]["step_seconds"], row["measures"]["samples_per_second"]
        p90, gpu = row["step_seconds_p90"], row["gpu_utilization"]
        cells = [row_title(row), number(1000 * step["mean"]), number(p90 and 1000 * p90)]
        cells += [number(rate["mean"]), verdict_words(rate), "-" if gpu is None else f"{gpu:.0f}%"]
        rows.append(cells)
    return heads, rows


def memories(comparison: dict[str, Any], sound: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    names, rows = classes(comparison), []
    heads = ["config", *(f"{name}, B/param" for name in names), "total, B/param", "peak memory, MiB"]
    heads += ["against the baseline", "wire, bytes/step"]
    for row in sound:
        sizes, peak = row["bytes_per_parameter"], row["measures"]["peak_memory_bytes"]
        cells = [row_title(row), *(f"{sizes.get(name, 0):.2f}" for name in names), f"{sizes['total']:.2f}"]
        cells += [mebibytes(peak["mean"]), verdict_words(peak)]
        rows.append([*cells, number(row["wire_bytes_per_step"])])
    return heads, rows


def notes(comparison: dict[str, Any]) -> Iterator[str]:
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
            "Controls. Other seeds: how much chance changes one run, as the standard deviation over the baseline's "
            "seeds, and the smallest difference that would show without pairs. The twin repeats the baseline with each "
            "weight changed by one bit: a smaller difference than the twin's is noise."
        )
    if any(row.get("tokens") for row in sound):
        yield (
            "Tokens for the same loss: how many more a config needs to reach the baseline's loss. A parabola through "
            "the baseline's losses over the logarithm of its tokens, one for each seed, says what a difference is "
            "worth; Fieller's interval over the pairs. Each budget is a training of its own with a whole schedule."
        )
    if comparison["fallback"]:
        yield (
            "These runs logged no metric with accelerator.log, so their training loss is compared, the mean over the "
            "last tenth of the steps. It is of samples that were trained on."
        )
    if comparison.get("once"):
        yield "Every config ran once: its script's command has no {seed}, and one pair has no interval."
    yield (
        "B/param: bytes per parameter of the whole model: its weights and gradients, master weights where the "
        "optimizer updates others than these, and the optimizer's state. Wire: bytes that a process sends."
    )
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
    if comparison.get("advise"):
        yield f"For your cards: {comparison['advise']}"
    if comparison["versions"]:
        versions = ", ".join(f"{name} {v}" for name, v in comparison["versions"].items() if v)
        commit = (comparison["git_commit"] or "unknown")[:12]
        yield f"{comparison['device']}; {versions}; {comparison['date']}; commit {commit}."


def text(comparison: dict[str, Any]) -> str:
    """The report for the terminal."""
    out = ["", *(f"{config}: {said}" for config, said in answer(comparison))]
    for title, heads, rows in tables(comparison):
        out.append(f"\n{title}")
        if heads[-1] == "measured":
            out += [f"  {config}: {measured}" for config, measured in rows]
            continue
        lines = [heads, *rows]
        errors = [row for row in rows if any(cell.startswith("no numbers: ") for cell in row)]
        widths = [max(len(line[i]) for line in lines if line not in errors) for i in range(len(heads))]
        for line in lines:
            last = len(line) if line not in errors else 3
            out.append("  " + "  ".join(c.ljust(w) for c, w in zip(line[:last], widths, strict=False)).rstrip())
    return "\n".join([*out, "", *notes(comparison)])


def markdown(comparison: dict[str, Any]) -> str:
    out = ["# " + title_of(comparison), "", *(f"- **{config}** {said}" for config, said in answer(comparison))]
    out += ["", "```", comparison["command"], "```"]
    for title, heads, rows in tables(comparison):
        out += ["", f"## {title}", "", table(heads, rows)]
    return "\n".join([*out, "", *(f"- {line}" for line in notes(comparison)), ""])


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def title_of(comparison: dict[str, Any]) -> str:
    return (
        f"{comparison['recipe'] or 'Runs'}: {len([r for r in comparison['rows'] if not r['control']])} configs compared"
    )


def write(comparison: dict[str, Any], folder: str | Path) -> None:
    """Writes the three files."""
    from tools import drawings  # imports matplotlib

    folder = Path(folder)
    cli.write(folder / "report.json", json.dumps(comparison, indent=1) + "\n")
    cli.write(folder / "report.md", markdown(comparison))
    cli.write(folder / "report.html", drawings.whole_page(comparison))
