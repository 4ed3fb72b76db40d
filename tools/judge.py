"""Judges finished runs: are the differences between configs significant?

This module collects the numbers of the runs that tools/records.py reads; tools/paired.py has the statistics. `make`
makes a report from many runs. tools/compare.py launches the runs, tools/report.py writes the report.
"""

import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from shared.args import Refused
from tools import paired
from tools.records import ASIDE, FREE, check_alike, label, logged, nudged, setting, steps_of

COSTS = ("step_seconds", "samples_per_second", "peak_memory_bytes")
TIMES = COSTS[:2]
Run = dict[str, Any]  # of records.read
Row = dict[str, Any]  # of the report, see row_of
TRAINING_LOSS = "training loss, last tenth"  # of runs that log no metric


def over_seeds(values: list[float]) -> dict[str, Any]:
    return {"values": values, "mean": statistics.mean(values)}


def measures(run: Run, fallback: bool = False) -> dict[str, float]:
    """{name: number} of what gets a verdict. fallback: no run logged a metric, so the training loss is compared."""
    record = run["record"]
    throughput = record["throughput"]
    return {
        **({TRAINING_LOSS: training_loss(record)} if fallback else logged(record)),
        "step_seconds": throughput["step_seconds_median"],
        "samples_per_second": throughput["samples_per_second_median"],
        "peak_memory_bytes": record["peak_memory_bytes"],
    }


def training_loss(record: dict[str, Any]) -> float:
    """The mean over the last tenth of the steps, because the loss of one step depends on its batch."""
    curve = record["seen"]["loss_curve"]
    return statistics.fmean(loss for _, loss in curve[-max(1, len(curve) // 10) :])


def main_measure(names: Iterable[str]) -> str | None:
    """The metric of the answer: a held-out loss if there is one."""
    names = [name for name in names if name not in COSTS]
    losses = [name for name in names if "loss" in name]
    return next(iter([*losses, *names]), None)


def curves(runs: list[Run]) -> dict[str, list[list[float]]]:
    """{name: [[step, mean, min, max]]} over seeds, for the training loss and every held-out metric."""
    points = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for row in run["metrics"]:
            for name in row.keys() - ASIDE:
                points[name][row["step"]].append(row[name])
    return {
        name: [[step, statistics.mean(v), min(v), max(v)] for step, v in sorted(steps.items()) if len(v) == len(runs)]
        for name, steps in sorted(points.items())
    }


def differences(runs: list[Run], baseline: list[Run], confidence: float) -> dict[str, list[list[float]]]:
    """{name: [[step, mean, low, high]]}: the paired difference to the baseline at each step, relative to it."""
    pairs_at = defaultdict(lambda: defaultdict(list))  # {name: {step: [(the baseline's value, this config's)]}}
    run_of = {run["seed"]: run for run in baseline}
    for run in runs:
        baseline_at = defaultdict(dict)
        for row in run_of[run["seed"]]["metrics"]:
            baseline_at[row["step"]] |= row
        for row in run["metrics"]:
            before = baseline_at[row["step"]]
            for name in row.keys() - ASIDE & before.keys():
                pairs_at[name][row["step"]].append((before[name], row[name]))
    curves = defaultdict(list)
    for name, steps in sorted(pairs_at.items()):
        for step, pairs in sorted(steps.items()):
            scale = abs(statistics.fmean(before for before, _ in pairs))
            if len(pairs) == len(runs) and scale:
                mean, low, high = paired.interval([after - before for before, after in pairs], confidence)
                ends = (mean, mean) if low is None or high is None else (low, high)  # a single pair has no interval
                curves[name].append([step, mean / scale, ends[0] / scale, ends[1] / scale])
    return dict(curves)


def row_of(name: str, runs: list[Run], seeds: set[int | None], fallback: bool) -> Row:
    """A row of the report: the numbers of all its runs, or the reason why it has none."""
    row = {
        "config": name,
        "control": False,
        "seeds": sorted(seeds, key=lambda seed: -1 if seed is None else seed),
        "error": None,
    }
    missing = sorted(seeds - {run["seed"] for run in runs})  # pyrefly: ignore[bad-specialization]
    errors = [f"seed {run['seed']}: {run['problem']}" for run in runs if run["problem"]]
    errors += [f"no run with seed {', '.join(map(str, missing))}"] if missing and not errors else []
    if errors:
        return row | {"error": "; ".join(errors)}
    runs = sorted(runs, key=lambda run: run["seed"] or 0)
    record = runs[0]["record"]
    evidence = record["evidence"]
    numbers = [measures(run, fallback) for run in runs]
    utilization = [run["record"]["gpu_utilization_mean"] for run in runs]
    p90 = [run["record"]["throughput"]["step_seconds_p90"] for run in runs]
    return row | {
        "measured": evidence["measured"],
        "emulated": record["plan"]["emulated"],
        "rehearsal": record["plan"]["rehearsal"],
        "num_processes": record["plan"]["num_processes"],
        "per_device_train_batch_size": record["args"].get("per_device_train_batch_size"),
        "gradient_accumulation_steps": record["args"].get("gradient_accumulation_steps"),
        "parameters": evidence.get("parameters"),
        "linear_converted": evidence["linear_converted"],
        "linear_total": evidence["linear_total"],
        "measures": {
            key: over_seeds([n[key] for n in numbers]) for key in numbers[0] if all(key in n for n in numbers)
        },
        "bytes_per_parameter": evidence["bytes_per_parameter"],
        "wire_bytes_per_step": evidence["wire_bytes_per_step"],
        "gpu_utilization": statistics.mean(utilization) if None not in utilization else None,
        "step_seconds_p90": statistics.mean(p90) if None not in p90 else None,
        "curves": curves(runs),
    }


def judge(rows: list[Row], margin: float, confidence: float) -> None:
    """Adds to every row its difference to the baseline (rows[0]) and the verdict on it."""
    baseline = rows[0]
    for row in rows[1:] if not baseline["error"] else ():
        for name, measure in row.get("measures", {}).items():
            if name not in baseline["measures"]:
                continue
            measure |= paired.judge(baseline["measures"][name]["values"], measure["values"], margin, confidence)
            if row["emulated"] and name in TIMES:  # emulated FP8: its time says nothing about FP8
                measure |= dict.fromkeys(("difference", "relative", "interval", "resolution", "more_seeds"))
                measure |= {"kind": "emulated", "verdict": "emulated, not ranked"}
        for name, logarithm in exponentials(row, baseline):
            measure = row["measures"][name]
            measure |= {key: row["measures"][logarithm][key] for key in ("kind", "verdict", "more_seeds")}


def exponentials(row: Row, baseline: Row) -> Iterator[tuple[str, str]]:
    """(perplexity, eval_loss), where the one is the exponential of the other: they get one verdict, the logarithm's."""
    names = [name for name in row.get("measures", {}) if name in baseline["measures"] and name not in COSTS]
    for name, other in itertools.permutations(names, 2):
        pairs = zip(
            *(row["measures"][key]["values"] + baseline["measures"][key]["values"] for key in (name, other)),
            strict=True,
        )
        if all(value > 0 and math.isclose(math.log(value), loss, rel_tol=1e-4) for value, loss in pairs):
            yield name, other


def grouped(runs: list[Run], vary: Collection[str]) -> dict[str, list[Run]]:
    """{row: its runs}; the first is the baseline."""
    processes = defaultdict(set)
    for run in runs:
        if run["record"] and "row" not in run:
            processes[label(run["record"], vary)].add(run["record"]["plan"]["num_processes"])
    groups = {}
    for run in runs:
        record = run["record"]
        if "row" in run:  # launched by compare
            name = run["row"]
        elif record is None:  # it ended before it wrote a record
            launched = re.fullmatch(r"(.*?)(-twin)?-seed\d+", run["folder"].name)
            name = f"{launched[1]}{', twin' if launched[2] else ''}" if launched else str(run["folder"])
        else:
            name = label(record, vary, len(processes[label(record, vary)]) > 1) + (", twin" if nudged(run) else "")
        if any(run["seed"] == other["seed"] for other in groups.setdefault(name, [])):
            raise Refused(f"two runs of {name} with seed {run['seed']}: {run['folder']} is one too many")
        groups[name].append(run)
    return groups


def make(
    runs: list[Run],
    command: str,
    vary: Collection[str] = (),
    margin: float = 0.01,
    looks: int = 1,
) -> dict[str, Any]:
    """Makes the report from runs that `read` returned. looks: how often the comparison is looked at before it ends."""
    check_alike(runs, vary)
    sound = [run for run in runs if not run["problem"]]
    if not sound:
        reasons = dict.fromkeys(f"{run['folder'].name}: {run['problem']}" for run in runs)
        raise Refused("no run has numbers to compare:\n  " + "\n  ".join(reasons))
    fallback = not any(logged(run["record"]) for run in sound)
    for run in sound if not fallback else ():
        if not logged(run["record"]):
            run["problem"] = "lacks evidence: final metrics"
    groups = grouped(runs, vary)
    first = next(iter(groups))
    twin = f"{first}, twin"
    seeds = {run["seed"] for name, group in groups.items() if name != first for run in group} - {None}
    if not seeds:  # nothing but the baseline
        seeds = {run["seed"] for run in groups[first]}
    in_pairs = [run for run in groups[first] if run["seed"] in seeds]
    rows = [row_of(first, in_pairs, seeds, fallback)]
    order = sorted(groups, key=lambda name: name != twin)  # the control first
    rows += [row_of(name, groups[name], seeds, fallback) | {"control": name == twin} for name in order if name != first]
    confidence = paired.level(looks)
    judge(rows, margin, confidence)
    for row in rows[1:]:
        if not row["error"] and not rows[0]["error"]:
            row["difference_curves"] = differences(groups[row["config"]], in_pairs, confidence)
    record = next(run["record"] for run in runs if not run["problem"])
    args_shown = {key: value for key, value in record["args"].items() if key not in FREE and key not in vary}
    comparison = {
        "schema_version": 2,
        "command": command,
        "baseline": first,
        "margin": margin,
        "confidence": confidence,
        "looks": looks,
        "measure": main_measure(next((row["measures"] for row in rows if not row["error"]), ())),
        "fallback": fallback,
        "chance": chances([measures(run, fallback) for run in groups[first] if not run["problem"]]),
        "date": max(run["record"]["finished"][:10] for run in runs if not run["problem"]),
        "device": record["device_name"],
        "versions": record["versions"],
        "git_commit": record["git_commit"],
        "recipe": record["recipe"],
        "global_batch_size": setting(record, "global_batch_size"),
        "samples": setting(record, "global_batch_size") * steps_of(record),
        "args": args_shown,
        "steps_measured": record["throughput"]["steps_measured"],
        "steps_excluded": record["throughput"]["steps_excluded"],
        "rows": rows,
    }
    return comparison


def tokens_of(made: dict[Any, dict[str, Any]]) -> None:
    """Adds to the last of {budget: its comparison} what each row costs in tokens at each budget, if it has a loss."""
    from tools import tokens  # imports numpy

    *_, main = made.values()
    name, first = main["measure"], main["baseline"]
    for row in main["rows"]:
        row["tokens"] = []
    if not name or "loss" not in name:
        return
    rows = {budget: {row["config"]: row for row in each["rows"]} for budget, each in made.items()}
    if any(rows[budget][first]["error"] for budget in made):
        return
    values = {
        budget: {row: all_of["measures"][name]["values"] for row, all_of in those.items() if not all_of["error"]}
        for budget, those in rows.items()
    }
    curve = [values[budget][first] for budget in made]
    for row in main["rows"]:
        for at, budget in enumerate(made):
            if row["config"] in values[budget]:
                here = values[budget][row["config"]]
                found = {"budget": budget, "samples": made[budget]["samples"], "values": here}
                if row is not main["rows"][0]:
                    found |= tokens.cost(list(made), curve, here, at, main["confidence"])
                row["tokens"].append(found)


def chances(each_seed: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """{name: what the seed alone does to it}, from the measures of the baseline's runs."""
    if not each_seed:
        return {}
    return {name: paired.chance([numbers[name] for numbers in each_seed]) for name in each_seed[0]}


def undecided(comparison: dict[str, Any]) -> list[str]:
    """The configs whose main measure has no verdict yet and could get one from more seeds."""
    rows = [row for row in comparison["rows"][1:] if not row["control"] and not row["error"]]
    return [row["config"] for row in rows if row["measures"].get(comparison["measure"], {}).get("kind") == "unknown"]


def assert_close(comparison: dict[str, Any], name: str, rtol: float) -> list[str]:
    """One line for each final metric that is further than rtol from that of the row `name`."""
    rows = {row["config"]: row for row in reversed(comparison["rows"]) if not row["control"]}
    if name not in rows:
        raise Refused(f"--assert-close {name}: there is no such row, only {', '.join(rows)}")
    if rows[name]["error"]:
        return [f"{name}: {rows[name]['error']}"]
    lines = []
    for other, row in rows.items():
        if row["error"]:
            lines.append(f"{other}: {row['error']}")
            continue
        for key in row["measures"].keys() - set(COSTS):
            here, wanted = row["measures"][key]["mean"], rows[name]["measures"][key]["mean"]
            if not math.isclose(here, wanted, rel_tol=0, abs_tol=rtol * abs(wanted)):
                lines.append(f"{other}: {key} {here:.6g} is further than {rtol:g} from {name}'s {wanted:.6g}")
    return lines
