"""Finished runs, judged: are they alike but for the config, and what is a difference between them worth?

`read` gets a run from its folder, `make` a report from many runs. tools/compare.py makes the runs, tools/report.py
writes the report.
"""

import json
import math
import re
import statistics
from collections import defaultdict
from pathlib import Path

from shared import args
from shared.args import Refused

SCHEMA = 2  # of run.json
SEEDS_TO_SAY = 3  # fewer values of the baseline cannot tell a difference from noise
# Options that may differ: they change nothing that is computed, or are compared as the global batch and the seed.
FREE = args.Run.__annotations__.keys() | {"seed", "per_device_train_batch_size", "gradient_accumulation_steps"}


# ------------------------------------------------------------------------------------------------ reading finished runs


def read(folder):
    """A run from its folder: its record, its metrics, and why it cannot become a number (or None)."""
    folder = Path(folder)
    try:
        record = json.loads((folder / "run.json").read_text())
        data = json.loads((folder / "data.json").read_text()) if (folder / "data.json").exists() else {}
        lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
        metrics = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        return {"folder": folder, "record": None, "metrics": [], "problem": f"no record: {error}"}
    record["data"] = data
    return {"folder": folder, "record": record, "metrics": metrics, "problem": problem(record, metrics)}


def problem(record, metrics):
    """What is missing for this run to be a number."""
    if record.get("schema_version") != SCHEMA:
        return f"run.json has schema_version {record.get('schema_version')}, this version reads {SCHEMA}: run it again"
    if record.get("status") != "finished" or record.get("error"):
        return f"{record.get('status')}: {record.get('error') or 'it did not finish'}"
    evidence, final = record.get("evidence") or {}, record.get("final") or {}
    lacks = [key for key in ("truth", "bytes_per_parameter", "initial_weights") if not evidence.get(key)]
    lacks += [key for key in ("samples_per_step", "first_batch") if not (record.get("seen") or {}).get(key)]
    lacks += [] if record.get("code_sha256") else ["code_sha256"]
    lacks += ["throughput"] if not (record.get("throughput") or {}).get("step_seconds_median") else []
    lacks += ["final metrics"] if not final.get("metrics") else []
    if lacks:
        return f"lacks evidence: {', '.join(lacks)}"
    if record["plan"]["precision"] == "fp8" and not evidence.get("linear_converted"):
        return "lacks evidence: asked for fp8, no Linear is recorded as converted"
    steps = record["args"].get("max_steps", final["step"])  # of a script of any kind, all that it took
    if final["step"] != steps:
        return f"lacks evidence: {final['step']} of {steps} steps are recorded"
    last = metrics[-1] if metrics else {}
    wrong = [name for name, value in final["metrics"].items() if last.get(name) != value or not math.isfinite(value)]
    return f"run.json and metrics.jsonl disagree on {', '.join(wrong)}" if wrong else None


def label(record, vary=(), processes=False):
    """The row a run belongs to: its config, and what was allowed to vary."""
    how = record["plan"]
    name = record["config"]["name"] or f"{how['strategy']}_{how['precision']}"
    name += f" x{how['num_processes']}" if processes else ""
    return " ".join([name, *(f"{key}={value(record, key)}" for key in vary)])


def value(record, key):
    return record["seen"]["samples_per_step"] if key == "global_batch_size" else record["args"].get(key)


def fixed(record, vary):
    """Everything that must be equal for two runs to differ in the config only, flat."""
    flat = {key: value for key, value in record["args"].items() if key not in FREE}
    flat |= {f"version of {key}": value for key, value in record["versions"].items()}
    flat |= {key: record[key] for key in ("recipe", "device_name")}
    flat |= {"global_batch_size": value(record, "global_batch_size"), "data": record["data"].get("fingerprint")}
    flat["code of the recipe, shared/, faithful/ and amp8/"] = record["code_sha256"]
    return {key: value for key, value in flat.items() if key not in vary}


def check_alike(runs, vary):
    """Refuses runs that differ in more than the config, naming each difference once."""
    if not runs:
        return
    first, lines, texts, began = runs[0], {}, {}, {}
    wanted = fixed(first["record"], vary)
    for run in runs:
        record = run["record"]
        here = fixed(record, vary)
        for key in dict.fromkeys([*wanted, *here]):
            if here.get(key) != wanted.get(key):
                then, now = short(wanted.get(key)), short(here.get(key))
                lines.setdefault(key, f"{key}: {then} in {first['folder']}, {now} in {run['folder']}")
        row, seed = label(record, vary, True), record["args"].get("seed")
        if texts.setdefault(row, record["config"]["sha256"]) != record["config"]["sha256"]:
            lines.setdefault(row, f"text of {row}: not the same in all of its runs")
        of_seed = (seed, *(value(record, key) for key in vary))
        weights, batch = record["evidence"]["initial_weights"], record["seen"]["first_batch"]
        for what, start in (("initial weights", weights), ("first batch", batch)):
            if began.setdefault((what, of_seed), start) != start and not lines:  # else it follows from what is named
                lines[what] = f"{what} of seed {seed}: {run['folder']} began with another"
    if lines:
        raise Refused("these runs differ in more than the config:\n  " + "\n  ".join(lines.values())
                      + "\ncompare runs made alike, or name what may differ: --vary NAME")  # fmt: skip


def short(value):
    return f"{value[:12]}..." if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) else value


# ----------------------------------------------------------------------------------------------------- numbers of a row


def verdict(difference, spread, values):
    """What a difference to the baseline is worth. `values`: how many seeds of the baseline the spread is over."""
    if abs(difference) <= spread:
        return "no measurable difference"
    if values < SEEDS_TO_SAY:
        return f"needs {SEEDS_TO_SAY} seeds of the baseline to say"
    return "higher" if difference > 0 else "lower"


def over_seeds(values):
    return {"values": values, "mean": statistics.mean(values), "spread": max(values) - min(values)}


def measures(run):
    """name -> number: what is compared with a verdict."""
    record = run["record"]
    throughput = record["throughput"]
    return {
        **record["final"]["metrics"],
        "step_seconds": throughput["step_seconds_median"],
        "samples_per_second": throughput["samples_per_second_median"],
        "peak_memory_bytes": record["peak_memory_bytes"],
    }


def curves(runs):
    """name -> [[step, mean, min, max]] over seeds, of the training loss and of every held-out metric."""
    points = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for row in run["metrics"]:
            for name in row.keys() - {"step", "grad_norm", "learning_rate"}:
                points[name][row["step"]].append(row[name])
    return {
        name: [[step, statistics.mean(v), min(v), max(v)] for step, v in sorted(steps.items()) if len(v) == len(runs)]
        for name, steps in sorted(points.items())
    }


def row_of(name, runs, seeds):
    """A row of the report: what all its runs say, or why they say nothing."""
    row = {"config": name, "control": False, "seeds": sorted(seeds), "error": None}
    missing = sorted(seeds - {run["seed"] for run in runs})
    errors = [f"seed {run['seed']}: {run['problem']}" for run in runs if run["problem"]]
    errors += [f"no run with seed {', '.join(map(str, missing))}"] if missing and not errors else []
    if errors:
        return row | {"error": "; ".join(errors)}
    record = runs[0]["record"]
    evidence = record["evidence"]
    numbers = [measures(run) for run in runs]
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
        "measures": {key: over_seeds([n[key] for n in numbers]) for key in numbers[0]},
        "bytes_per_parameter": evidence["bytes_per_parameter"],
        "wire_bytes_per_step": evidence["wire_bytes_per_step"],
        "gpu_utilization": statistics.mean(utilization) if None not in utilization else None,
        "step_seconds_p90": statistics.mean(p90) if None not in p90 else None,
        "estimate": None,
        "curves": curves(runs),
    }


def judge(rows, control):
    """Adds to every row its difference to the baseline (rows[0]) and what that is worth."""
    baseline = rows[0]
    if baseline["error"]:
        return
    for name, found in baseline["measures"].items():
        noise = found["values"] + (control["measures"][name]["values"] if control and not control["error"] else [])
        spread = max(noise) - min(noise)
        for row in rows:
            if row["error"] or row is baseline:
                continue
            here = row["measures"][name]
            here["difference"] = here["mean"] - found["mean"]
            here["relative"] = here["difference"] / found["mean"] if found["mean"] else None
            here["verdict"] = verdict(here["difference"], spread, len(noise))
            here["control_spread"] = spread
            if row["emulated"] and name in ("step_seconds", "samples_per_second"):
                here["verdict"] = "emulated"  # FP8 in software: its time says nothing about FP8
                here["difference"] = here["relative"] = None


def make(runs, command, baseline=None, vary=(), price=None, seeds=None, guess=lambda record: None):
    """The report, from runs that `read` returned. seeds: those of every row; the baseline's others are the control.
    guess: from a record to its memory estimate."""
    check_alike([run for run in runs if not run["problem"]], vary)
    processes = defaultdict(set)
    for run in runs:
        if run["record"]:
            processes[label(run["record"], vary)].add(run["record"]["plan"]["num_processes"])
    groups = {}
    for run in runs:
        record = run["record"]
        if record is None and (launched := re.fullmatch(r"(.*)-seed(\d+)", run["folder"].name)):
            name, run["seed"] = launched[1], int(launched[2])  # it ended before it had a record
        elif record is None:
            name, run["seed"] = str(run["folder"]), None
        else:
            name, run["seed"] = label(record, vary, len(processes[label(record, vary)]) > 1), record["args"].get("seed")
        if any(run["seed"] == other["seed"] for other in groups.setdefault(name, [])):
            raise Refused(f"two runs of {name} with seed {run['seed']}: {run['folder']} is one too many")
        groups[name].append(run)
    first = baseline or next(iter(groups))
    if first not in groups:
        raise Refused(f"no runs of the baseline {first}: there are {', '.join(groups)}")
    groups = {first: groups.pop(first)} | groups
    own = {run["seed"] for run in groups[first]}
    others = {run["seed"] for name, group in groups.items() if name != first for run in group} - {None}
    seeds = seeds or others or set(sorted(own - {None})[: max(1, len(own) // 2)])
    split = [run for run in groups[first] if run["seed"] in seeds]
    extra = [run for run in groups[first] if run["seed"] not in seeds]
    rows = [row_of(first, split, seeds)]
    control = row_of(first, extra, own - seeds) | {"control": True} if extra else None
    rows += [control] if control else []
    rows += [row_of(name, group, seeds) for name, group in groups.items() if name != first]
    judge(rows, control)
    sound = next((run["record"] for run in runs if not run["problem"]), None)
    made = {
        "schema_version": 1,
        "command": command,
        "baseline": first,
        "date": max((run["record"]["finished"][:10] for run in runs if not run["problem"]), default=None),
        "device": sound and sound["device_name"],
        "versions": sound and sound["versions"],
        "git_commit": sound and sound["git_commit"],
        "recipe": sound and sound["recipe"],
        "global_batch_size": sound and value(sound, "global_batch_size"),
        "args": sound and {key: value for key, value in sound["args"].items() if key not in FREE and key not in vary},
        "steps_measured": sound and sound["throughput"]["steps_measured"],
        "steps_excluded": sound and sound["throughput"]["steps_excluded"],
        "price_per_hour": price,
        "rows": rows,
    }
    for row in rows:
        if not row["error"]:
            group = groups[first if row["control"] else row["config"]]
            row["estimate"] = guess(group[0]["record"])
        if price and not row["error"] and not row["emulated"]:
            rate = row["measures"]["samples_per_second"]["mean"]
            row["samples_per_unit_of_price"] = rate * 3600 / price
    return made


def assert_close(made, name, rtol):
    """Lines that say which rows' final metrics are further than rtol from the row `name`'s."""
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
        for key in row["measures"].keys() - {"step_seconds", "samples_per_second", "peak_memory_bytes"}:
            here, wanted = row["measures"][key]["mean"], rows[name]["measures"][key]["mean"]
            if not math.isclose(here, wanted, rel_tol=0, abs_tol=rtol * abs(wanted)):
                lines.append(f"{other}: {key} {here:.6g} is further than {rtol:g} from {name}'s {wanted:.6g}")
    return lines
