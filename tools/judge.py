"""Judges finished runs: do they differ in the config only, and are the differences between them significant?

This module collects the numbers; tools/paired.py has the statistics. `read` reads a run from its folder, `make` makes a
report from many runs. tools/compare.py launches the runs, tools/report.py writes the report.
"""

import json
import math
import re
import statistics
from collections import defaultdict
from pathlib import Path

from shared import args
from shared.args import Refused
from tools import paired

SCHEMA = 2  # of run.json
NOT_FINITE = ("nan", "inf", "-inf")  # numbers that JSON does not have
COSTS = ("step_seconds", "samples_per_second", "peak_memory_bytes")
TIMES = COSTS[:2]
TRAINING_LOSS = "training loss, last tenth"  # of runs that log no metric
ASIDE = {"step", "epoch", "grad_norm", "learning_rate", "lr"}  # logged beside metrics
# Options that may differ: they do not change what is computed, or are compared as the global batch and the seed.
FREE = args.Run.__annotations__.keys() | {"seed", "per_device_train_batch_size", "gradient_accumulation_steps"}


# ------------------------------------------------------------------------------------------------ reading finished runs


def read(folder, seed=None):
    """Reads a run from its folder: record, metrics, seed, and the reason why it cannot be used (or None).

    seed: the seed of the launch; the default is the record's, or the one in the folder's name."""
    folder = Path(folder)
    named = re.search(r"-seed(\d+)$", folder.name)
    run = {"folder": folder, "record": None, "metrics": [], "seed": int(named[1]) if named else None}
    run["seed"] = run["seed"] if seed is None else seed
    try:
        record = json.loads((folder / "run.json").read_text())
        data = json.loads((folder / "data.json").read_text()) if (folder / "data.json").exists() else {}
        lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
        metrics = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        return run | {"problem": f"no record: {error}"}
    record["data"] = data
    run["seed"] = (record.get("args") or {}).get("seed", run["seed"]) if seed is None else seed
    return run | {"record": record, "metrics": metrics, "problem": problem(record, metrics)}


def problem(record, metrics):
    """The reason why this run cannot be used, or None."""
    if record.get("schema_version") != SCHEMA:
        return f"run.json has schema_version {record.get('schema_version')}, this version reads {SCHEMA}: run it again"
    closed = ("finished",) if "max_steps" in (record.get("args") or {}) else ("finished", "ended")  # not a recipe
    if record.get("status") not in closed or record.get("error"):
        return f"{record.get('status')}: {record.get('error') or 'it did not finish'}"
    evidence, final, seen = (record.get(key) or {} for key in ("evidence", "final", "seen"))
    lacks = [key for key in ("truth", "bytes_per_parameter", "initial_weights") if not evidence.get(key)]
    lacks += [key for key in ("samples_per_step", "first_batch") if not seen.get(key)]
    lacks += [] if record.get("code_sha256") else ["code_sha256"]
    lacks += ["throughput"] if not (record.get("throughput") or {}).get("step_seconds_median") else []
    lacks += [] if logged(record) or seen.get("loss_curve") else ["final metrics"]
    if lacks:
        return f"lacks evidence: {', '.join(lacks)}"
    if record["plan"]["precision"] == "fp8" and not evidence.get("linear_converted"):
        return "lacks evidence: asked for fp8, no Linear is recorded as converted"
    taken = final["step"] if final else seen["loss_curve"][-1][0]
    steps = record["args"].get("max_steps", taken)  # of a script that is not a recipe: all its steps
    if taken != steps:
        return f"lacks evidence: {taken} of {steps} steps are recorded"
    last = metrics[-1] if metrics else {}
    wrong = [name for name, value in logged(record).items() if last.get(name) != value or not math.isfinite(value)]
    return f"run.json and metrics.jsonl disagree on {', '.join(wrong)}" if wrong else None


def logged(record):
    """The last metrics that the run logged."""
    values = (record.get("final") or {}).get("metrics") or {}
    values = {key: float(value) if value in NOT_FINITE else value for key, value in values.items() if key not in ASIDE}
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


def nudged(run):
    """Whether the run started from weights changed by one rounding (the twin)."""
    return bool(((run["record"] or {}).get("seen") or {}).get("nudged"))


def label(record, vary=(), processes=False):
    """The row of the report that a run belongs to: its config and the options that were allowed to vary."""
    how = record["plan"]
    name = record["config"]["name"] or f"{how['strategy']}_{how['precision']}"
    name += f" x{how['num_processes']}" if processes else ""
    return " ".join([name, *(f"{key}={value(record, key)}" for key in vary)])


def value(record, key):
    return record["seen"]["samples_per_step"] if key == "global_batch_size" else record["args"].get(key)


def fixed(record, vary):
    """A flat dict of everything that must be equal if two runs differ in the config only."""
    flat = {key: value for key, value in record["args"].items() if key not in FREE}
    flat |= {f"version of {key}": value for key, value in record["versions"].items()}
    flat |= {key: record[key] for key in ("recipe", "device_name")}
    flat |= {"global_batch_size": value(record, "global_batch_size"), "data": record["data"].get("fingerprint")}
    flat["code of the recipe, shared/, faithful/ and amp8/"] = record["code_sha256"]
    return {key: value for key, value in flat.items() if key not in vary}


def comparable(run):
    """Whether the record says what was run. A failed run can be comparable, too."""
    record = run["record"]
    keys = ("args", "versions", "recipe", "device_name", "code_sha256", "config", "plan")
    return bool(record) and record.get("schema_version") == SCHEMA and all(record.get(key) for key in keys)


def check_alike(runs, vary):
    """Refuses runs that differ in more than the config, and names each difference once. A run that lacks evidence is
    compared by what its record has."""
    runs = sorted(filter(comparable, runs), key=lambda run: bool(run["problem"]))
    if not runs:
        return
    first, lines, texts, began = runs[0], {}, {}, {}
    seeds = {key for key in runs[0]["record"]["args"] if all(is_seed(run, key) for run in runs)}
    wanted = fixed(first["record"], vary)
    for run in runs:
        record = run["record"]
        here = fixed(record, vary)
        for key in dict.fromkeys([*wanted, *here]):
            unknown = run["problem"] and (here.get(key) is None or wanted.get(key) is None)
            if here.get(key) != wanted.get(key) and key not in seeds and not unknown:
                then, now = short(wanted.get(key)), short(here.get(key))
                lines.setdefault(key, f"{key}: {then} in {first['folder']}, {now} in {run['folder']}")
        row = label(record, vary, True)
        if texts.setdefault(row, record["config"]["sha256"]) != record["config"]["sha256"]:
            lines.setdefault(row, f"text of {row}: not the same in all of its runs")
        of_seed = (run["seed"], *(value(record, key) for key in vary))
        weights, batch = ((record.get(part) or {}).get(key) for part, key in
                          (("evidence", "initial_weights"), ("seen", "first_batch")))  # fmt: skip
        for what, start in ((f"initial weights{', nudged' if nudged(run) else ''}", weights), ("first batch", batch)):
            if start and began.setdefault((what, of_seed), start) != start and not lines:  # else it follows from those
                lines[what] = f"{what} of seed {run['seed']}: {run['folder']} began with another"
    if lines:
        raise Refused("these runs differ in more than the config:\n  " + "\n  ".join(lines.values())
                      + "\ncompare runs made alike, or name what may differ: --vary NAME")  # fmt: skip


def is_seed(run, key):
    """Whether this option is the run's seed, whatever its name is."""
    here = run["record"]["args"].get(key)
    return here is not None and run["seed"] is not None and str(here) == str(run["seed"])


def short(value):
    return f"{value[:12]}..." if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) else value


# ----------------------------------------------------------------------------------------------------- numbers of a row


def over_seeds(values):
    return {"values": values, "mean": statistics.mean(values), "spread": max(values) - min(values)}


def measures(run, fallback=False):
    """{name: number} of what gets a verdict. fallback: no run logged a metric, so the training loss is compared."""
    record = run["record"]
    throughput = record["throughput"]
    return {
        **({TRAINING_LOSS: training_loss(record)} if fallback else logged(record)),
        "step_seconds": throughput["step_seconds_median"],
        "samples_per_second": throughput["samples_per_second_median"],
        "peak_memory_bytes": record["peak_memory_bytes"],
    }


def training_loss(record):
    """The mean over the last tenth of the steps, because the loss of one step depends on its batch."""
    curve = record["seen"]["loss_curve"]
    return statistics.fmean(loss for _, loss in curve[-max(1, len(curve) // 10) :])


def main_measure(names):
    """The metric of the answer: a held-out loss if there is one."""
    names = [name for name in names if name not in COSTS]
    return next((name for name in names if "loss" in name), names[0]) if names else None


def curves(runs):
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


def differences(runs, baseline, confidence):
    """{name: [[step, mean, low, high]]}: the paired difference to the baseline at each step, relative to it."""
    points = defaultdict(lambda: defaultdict(list))
    before = {run["seed"]: run for run in baseline}
    for run in runs:
        pair = {row["step"]: {} for row in before[run["seed"]]["metrics"]}
        for row in before[run["seed"]]["metrics"]:
            pair[row["step"]] |= row
        for row in run["metrics"]:
            for name in row.keys() - ASIDE & pair.get(row["step"], {}).keys():
                points[name][row["step"]].append((pair[row["step"]][name], row[name]))
    found = defaultdict(list)
    for name, steps in sorted(points.items()):
        for step, pairs in sorted(steps.items()):
            scale = abs(statistics.fmean(one for one, _ in pairs))
            if len(pairs) == len(runs) and scale:
                mean, low, high = paired.interval([other - one for one, other in pairs], confidence)
                found[name].append([step, *((mean if end is None else end) / scale for end in (mean, low, high))])
    return dict(found)


def row_of(name, runs, seeds, fallback):
    """A row of the report: the numbers of all its runs, or the reason why it has none."""
    row = {"config": name, "control": False, "seeds": sorted(seeds), "error": None}
    missing = sorted(seeds - {run["seed"] for run in runs})
    errors = [f"seed {run['seed']}: {run['problem']}" for run in runs if run["problem"]]
    errors += [f"no run with seed {', '.join(map(str, missing))}"] if missing and not errors else []
    if errors:
        return row | {"error": "; ".join(errors)}
    runs = sorted(runs, key=lambda run: run["seed"] or 0)
    record = runs[0]["record"]
    evidence = record["evidence"]
    numbers = [measures(run, fallback) for run in runs]
    utilization = [run["record"]["gpu_utilization_mean"] for run in runs]
    p90 = [run["record"]["throughput"].get("step_seconds_p90") for run in runs]
    return row | {
        "truth": evidence["truth"],
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
        "estimate": None,
        "curves": curves(runs),
    }


def judge(rows, margin, confidence):
    """Adds to every row its difference to the baseline (rows[0]) and the verdict on it."""
    baseline = rows[0]
    for row in rows[1:] if not baseline["error"] else ():
        for name, here in row.get("measures", {}).items():
            if name not in baseline["measures"]:
                continue
            here |= paired.judge(baseline["measures"][name]["values"], here["values"], margin, confidence)
            if row["emulated"] and name in TIMES:  # emulated FP8: its time says nothing about FP8
                here |= dict.fromkeys(("difference", "relative", "interval", "resolution", "more_seeds"))
                here |= {"kind": "emulated", "verdict": "emulated, not ranked"}


def grouped(runs, vary):
    """{row: its runs}; the first is the baseline."""
    processes = defaultdict(set)
    for run in runs:
        if run["record"]:
            processes[label(run["record"], vary)].add(run["record"]["plan"]["num_processes"])
    groups = {}
    for run in runs:
        record = run["record"]
        if record is None:  # it ended before it wrote a record
            launched = re.fullmatch(r"(.*?)(-twin)?-seed\d+", run["folder"].name)
            name = f"{launched[1]}{', twin' if launched[2] else ''}" if launched else str(run["folder"])
        else:
            name = label(record, vary, len(processes[label(record, vary)]) > 1) + (", twin" if nudged(run) else "")
        if any(run["seed"] == other["seed"] for other in groups.setdefault(name, [])):
            raise Refused(f"two runs of {name} with seed {run['seed']}: {run['folder']} is one too many")
        groups[name].append(run)
    return groups


def make(runs, command, baseline=None, vary=(), price=None, margin=0.01, looks=1, guess=lambda record: None):
    """Makes the report from runs that `read` returned. looks: how often the comparison is looked at before it ends.
    guess: a function from a record to its memory estimate."""
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
    first = baseline or next(iter(groups))
    if first not in groups:
        raise Refused(f"no runs of the baseline {first}: there are {', '.join(groups)}")
    groups = {first: groups.pop(first)} | groups
    twin = f"{first}, twin"
    own = {run["seed"] for run in groups[first]}
    seeds = {run["seed"] for name, group in groups.items() if name != first for run in group} - {None} or own
    split = [run for run in groups[first] if run["seed"] in seeds]
    rows = [row_of(first, split, seeds, fallback)]
    order = sorted(groups, key=lambda name: name != twin)  # the control first
    rows += [row_of(name, groups[name], seeds, fallback) | {"control": name == twin} for name in order if name != first]
    confidence = paired.level(looks)
    judge(rows, margin, confidence)
    for row in rows[1:]:
        if not row["error"] and not rows[0]["error"]:
            row["difference_curves"] = differences(groups[row["config"]], split, confidence)
    unlike = [measures(run, fallback) for run in groups[first] if not run["problem"]]
    record = next((run["record"] for run in runs if not run["problem"]), None)
    args_shown = {key: value for key, value in record["args"].items() if key not in FREE and key not in vary}
    made = {
        "schema_version": 2,
        "command": command,
        "baseline": first,
        "margin": margin,
        "confidence": confidence,
        "looks": looks,
        "measure": main_measure(next((row["measures"] for row in rows if not row["error"]), ())),
        "fallback": fallback,
        "chance": {key: paired.chance([one[key] for one in unlike]) for key in (unlike[0] if unlike else ())},
        "date": max(run["record"]["finished"][:10] for run in runs if not run["problem"]),
        "device": record["device_name"],
        "versions": record["versions"],
        "git_commit": record["git_commit"],
        "recipe": record["recipe"],
        "global_batch_size": value(record, "global_batch_size"),
        "args": args_shown,
        "steps_measured": record["throughput"]["steps_measured"],
        "steps_excluded": record["throughput"]["steps_excluded"],
        "price_per_hour": price,
        "rows": rows,
    }
    for row in rows:
        if not row["error"]:
            row["estimate"] = guess(groups[row["config"]][0]["record"])
        if price and not row["error"] and not row["emulated"]:
            rate = row["measures"]["samples_per_second"]["mean"]
            row["samples_per_unit_of_price"] = rate * 3600 / price
    return made


def undecided(made):
    """The configs whose main measure has no verdict yet and could get one from more seeds."""
    rows = [row for row in made["rows"][1:] if not row["control"] and not row["error"]]
    return [row["config"] for row in rows if row["measures"].get(made["measure"], {}).get("kind") == "unknown"]


def assert_close(made, name, rtol):
    """One line for each final metric that is further than rtol from that of the row `name`."""
    rows = {row["config"]: row for row in reversed(made["rows"]) if not row["control"]}
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
