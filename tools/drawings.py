"""The page of a comparison: its tables, from tools/report.py, with pictures."""

from collections.abc import Callable, Iterator
from typing import Any

from tools import page, paired, report


def colours(comparison: dict[str, Any]) -> dict[str, str]:
    """{config: its colour in every picture}; controls are grey."""
    rows = [row["config"] for row in comparison["rows"] if not row["control"]]
    return {name: page.colour(i) for i, name in enumerate(rows)}


def interval_rows(comparison: dict[str, Any], name: str) -> list[tuple[str, float, float, float, str]]:
    """The rows of page.intervals for a measure, in percent."""
    rows, colour_of = [], colours(comparison)
    if ends := report.spread(comparison, name).get("interval"):
        rows.append(("other seeds, not in pairs*", 0, 100 * ends[0], 100 * ends[1], page.DIM))
    for row in comparison["rows"][1:]:
        measure = row.get("measures", {}).get(name, {})
        if measure.get("interval"):
            ends = [100 * end for end in (measure["relative"], *measure["interval"])]
            rows.append((report.row_title(row), *ends, page.DIM if row["control"] else colour_of[row["config"]]))
    return rows


def drawn_intervals(comparison: dict[str, Any]) -> Iterator[str]:
    """One section per metric, the main one first, with the paired differences and the margin."""
    margin = comparison["margin"]
    for name in sorted(report.metric_names(comparison), key=lambda name: name != comparison["measure"]):
        if rows := interval_rows(comparison, name):
            caption = (
                f"{name}: mean difference to {comparison['baseline']} over pairs of one seed, with its "
                f"{report.level(comparison)} interval. Shaded: the margin, {paired.percent(margin)}."
            )
            drawn = page.picture(page.intervals(rows, 100 * margin), caption)
            yield page.section(f"Difference in {name}", drawn)


def difference_curves(
    comparison: dict[str, Any], name: str
) -> tuple[dict[str, list[list[float]]], list[list[float]] | None]:
    """({config: its differences to the baseline over the steps, in percent}, the same of the twin or None)."""
    curves, control = {}, None
    for row in comparison["rows"]:
        points = (row.get("difference_curves") or {}).get(name)
        if not points:
            continue
        shares = [[step, *(100 * value for value in values)] for step, *values in points]
        if row["control"]:
            control = shares
        else:
            curves[row["config"]] = shares
    return curves, control


def drawn_differences(comparison: dict[str, Any]) -> Iterator[str]:
    """Pictures of the difference to the baseline over the steps, for the main measure and the training loss."""
    colour_of, baseline = colours(comparison), comparison["baseline"]
    for name in dict.fromkeys([comparison["measure"], "loss"]):
        curves, control = difference_curves(comparison, name)
        if not curves:
            continue
        title = "training loss" if name == "loss" else name
        caption = f"{title}: mean difference to {baseline} over pairs, and its {report.level(comparison)} interval."
        caption += " Grey: the twin." if control else ""
        draw = page.panels([(key, colour_of[key], points) for key, points in curves.items()], control)
        drawn = page.picture(draw, caption)
        series = curves | ({f"{baseline}, twin": control} if control else {})
        yield page.section(f"Difference over the steps: {title}", drawn, in_numbers(series, "{:+.2f}%".format))


def in_numbers(series: dict[str, list[list[float]]], form: Callable[[float], str]) -> str:
    """A collapsed table of {name: [[step, mean, low, high]]}."""

    def cell(values: list[float] | None) -> str:
        if not values:
            return "-"
        mean, low, high = map(form, values)
        return mean if low == high else f"{mean} ({low} to {high})"

    values_at = [{step: values for step, *values in points} for points in series.values()]
    steps = sorted({step for values in values_at for step in values})
    rows = [[step, *(cell(values.get(step)) for values in values_at)] for step in steps]
    return page.details("The same in numbers", page.table(["step", *series], rows))


def drawn_curves(comparison: dict[str, Any]) -> Iterator[str]:
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
        drawn = page.picture(draw, caption, key)
        yield page.section(title, drawn, in_numbers(series, report.number))


def drawn_speed(comparison: dict[str, Any]) -> str:
    rows = []
    for row in comparison["rows"]:
        if not row["error"]:
            rate = row["measures"]["samples_per_second"]["mean"]
            behind = report.number(rate) + (", emulated" if row["emulated"] else "")
            rows.append((report.row_title(row), [(rate, page.colour(0))], behind, row["emulated"]))
    caption = "Speed. Pale bars are emulated and not ranked."
    return page.picture(page.bars(rows, "samples per second, median step"), caption)


def drawn_memory(comparison: dict[str, Any]) -> str:
    rows = []
    for row in comparison["rows"]:
        if not row["error"] and not row["control"]:
            per = row["bytes_per_parameter"]
            pieces = [(per.get(key, 0), page.colour(i)) for i, key in enumerate(report.classes(comparison))]
            rows.append((row["config"], pieces, f"{per['total']:.2f}", False))
    key = page.legend([(name, page.colour(i)) for i, name in enumerate(report.classes(comparison))])
    draw = page.bars(rows, "bytes per parameter of the whole model")
    return page.picture(draw, "Model states, counted on live tensors.", key)


def whole_page(comparison: dict[str, Any]) -> str:
    """The whole report as one HTML file."""
    parts = [*drawn_intervals(comparison), *drawn_differences(comparison)]
    for title, heads, rows in report.tables(comparison):
        drawn = {"Speed": drawn_speed, "Memory and wire, per process": drawn_memory}.get(title)
        parts += drawn_curves(comparison) if title == "Speed" else []  # behind the results
        parts.append(page.section(title, *([drawn(comparison)] if drawn else []), page.table(heads, rows)))
    title, notes = report.title_of(comparison), list(report.notes(comparison))
    return page.whole(title, comparison["command"], report.answer(comparison), parts, notes)
