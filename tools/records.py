"""Reads finished runs: why one cannot be used, and whether several differ in the config only."""

import contextlib
import math
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from faithful.disk import readers
from faithful.disk.names import printable
from faithful.disk.readers import count, number, word
from shared import args
from shared.args import Refused

SCHEMA = 3  # of run.json
MOST = 800_000  # numbers of metrics.jsonl that a tool holds at once
NOT_FINITE = ("nan", "inf", "-inf")  # numbers that JSON does not have
ASIDE = {"step", "epoch", "grad_norm", "learning_rate", "lr"}  # logged beside metrics
# Options that may differ: they do not change what is computed, or are compared as the global batch and the seed.
BEST = {"load_best_model_at_end", "metric_for_best_model", "greater_is_better"}  # which model is evaluated last
FREE = {*args.Run.__annotations__, "seed", "per_device_train_batch_size", "gradient_accumulation_steps"} - BEST


def words(value: object) -> bool:
    return value is None or isinstance(value, str)


def line(value: object) -> bool:
    return value is not None and word(value)


def logged_number(value: object) -> bool:
    return number(value) or value in NOT_FINITE


COUNT, NOT_ALWAYS = count(), (None, number)
PLAN = {
    "strategy": line, "precision": line, "num_processes": count(1, 10**6), "replicas": count(1, 10**6),
    "level": word, "rehearsal": bool, "emulated": bool,
}  # fmt: skip
SEEN = {
    "samples_per_step": (None, COUNT), "first_batch": words, "nudged?": bool, "resumed_at?": COUNT, "last_step?": COUNT,
    "optimizer": (None, {"class": str}),
    "loss_curve": [lambda at: isinstance(at, list) and len(at) == 2 and number(at[0]) and logged_number(at[1])],
}  # fmt: skip
EVIDENCE = {
    "measured?": words, "parameters?": COUNT, "linear_total": COUNT, "linear_converted": COUNT,
    "linear_skipped": [{"name": str, "reason": str}], "eval_precision": str, "initial_weights": words,
    "wire_bytes_per_step": NOT_ALWAYS, "bytes_per_parameter": (None, {str: number}),
}  # fmt: skip
THROUGHPUT = {
    key: NOT_ALWAYS for key in ("samples_per_second_median", "step_seconds_median", "step_seconds_p90",
                                "steps_measured", "steps_excluded")
}  # fmt: skip
# What run.json must hold to be shown, exported or compared.
RECORD = {
    "schema_version": COUNT, "status": line, "recipe": line, "plan": PLAN, "command": str, "args": dict, "seen": SEEN,
    "config": {"name": word, "text": words, "sha256": words}, "evidence": (None, EVIDENCE), "notes": [str],
    "versions": {str: word}, "device_name": word, "started": str, "finished": words, "throughput": THROUGHPUT,
    "final": (None, {"step": number, "metrics": dict}), "peak_memory_bytes": NOT_ALWAYS,
    "gpu_utilization_mean": NOT_ALWAYS, "error": words, "code_sha256": str, "git_commit": word,
}  # fmt: skip
COMPARED = {"peak_memory_bytes": number, "finished": str}  # of a run that is compared
# What report.json of a comparison must hold to be read again.
MEASURE = {
    "kind?": words,
    "verdict?": words,
    "mean?": NOT_ALWAYS,
    "relative?": NOT_ALWAYS,
    "interval?": (None, lambda ends: isinstance(ends, list) and len(ends) == 2 and all(map(number, ends))),
}
ROW = {"config": str, "control": bool, "error": words, "emulated?": bool, "rehearsal?": bool,
       "measures?": {str: MEASURE}}  # fmt: skip
COMPARISON = {"rows": [ROW], "measure": words, "args": dict, "recipe": words, "device": words}


def numbers(value: object) -> bool:
    small = isinstance(value, list) and 0 < len(value) <= 64
    return small and all(type(one) in (int, float) and abs(one) < 1e6 for one in value)


# What data.json may hold, which may be anyone's. Another data set than images has no image_size.
DATA = {
    "image_size?": (None, count(1, 4096)), "in_chans?": count(1, 64), "num_classes?": count(1, 100_000),
    "sequence_length?": count(1, 10**6), "vocab_size?": count(1, 10**7), "classes?": (None, [str]),
    "interpolation?": str, "mean?": numbers, "std?": numbers, "fingerprint?": words,
    "crop_pct?": lambda value: value is None or (type(value) in (int, float) and 0 < value <= 10),
}  # fmt: skip


def record_of(folder: Path) -> dict[str, Any]:
    """The run.json of a run. Raises Refused if there is none, or if it does not hold what a run writes."""
    try:
        record = readers.value_of(folder / "run.json", RECORD)
        record["seen"]["loss_curve"] = [point for point in record["seen"]["loss_curve"] if number(point[1])]
        return record
    except OSError as error:
        why = error.strerror or error
        raise Refused(f"{folder} is not the folder of a run: no readable run.json ({why})") from None
    except readers.Damaged as error:
        raise Refused(f"{folder} is not the folder of a run: no readable run.json ({error})") from None


def data_of(folder: Path) -> dict[str, Any]:
    """The data.json of a recipe's run. Raises Refused if it does not hold what a recipe writes."""
    try:
        return readers.value_of(folder / "data.json", DATA)
    except (OSError, readers.Damaged) as error:
        raise Refused(f"{folder} has no readable data.json ({error})") from None


@contextlib.contextmanager
def believed(folder: Path) -> Iterator[None]:
    """Turns the error of who meets a missing key or another type in a run's record into Refused."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        why = f"{type(error).__name__}: {readers.short(str(error))}"
        raise Refused(f"{folder}/run.json does not hold what a run writes ({why})") from None


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that have a step, with the numbers in them: {name: number}. Torn rows are left out, and
    what a script has logged beside numbers. Raises Refused if it is no file, or has more numbers than MOST."""
    rows, count = [], 0
    try:
        for _, row in readers.rows_of(folder / "metrics.jsonl"):
            if row is not None and number(row.get("step")):
                rows.append({key: value for key, value in row.items() if number(value)})
                if (count := count + len(rows[-1])) > MOST:
                    raise Refused(f"{folder}/metrics.jsonl has more than {MOST:,} numbers: too many to show")
    except OSError as error:
        raise Refused(f"{folder}/metrics.jsonl cannot be read: {error}") from None
    return rows


def over_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without those of a model of an earlier step, which was loaded and evaluated again at the end."""
    return [row for row in rows if "last_step" not in row]


def read(folder: str | Path, seed: int | None = None) -> dict[str, Any]:
    """Reads a run from its folder: record, metrics, seed, and the reason why it cannot be used (or None).

    seed: the seed of the launch; the default is the record's, or the one in the folder's name."""
    folder = Path(folder)
    named = re.search(r"-seed(\d+)$", folder.name)
    run = {"folder": folder, "record": None, "metrics": [], "seed": int(named[1]) if named else None}
    run["seed"] = run["seed"] if seed is None else seed
    try:
        record, metrics = record_of(folder), rows_of(folder)
        record["data"] = data_of(folder) if (folder / "data.json").exists() else {}
    except Refused as error:
        return run | {"problem": f"no record: {error}"}
    said = record["args"].get("seed")
    run["seed"] = said if seed is None and COUNT(said) else run["seed"]
    try:
        with believed(folder):
            why = problem(record, metrics)
        return run | {"record": record, "metrics": over_time(metrics), "problem": why and printable(why)}
    except Refused as error:
        return run | {"problem": str(error)}


def problem(record: dict[str, Any], metrics: list[dict[str, Any]]) -> str | None:
    """The reason why this run cannot be used, or None."""
    if record["schema_version"] != SCHEMA:
        return f"run.json has schema_version {record['schema_version']}, this version reads {SCHEMA}: run it again"
    closed = ("finished",) if "max_steps" in record["args"] else ("finished", "ended")  # not a recipe
    if record["status"] not in closed or record["error"]:
        return f"{record['status']}: {record['error'] or 'it did not finish'}"
    readers.of_kind("run.json", record, COMPARED)
    evidence, seen = record["evidence"] or {}, record["seen"]
    lacks = [key for key in ("measured", "bytes_per_parameter", "initial_weights") if not evidence.get(key)]
    lacks += [key for key in ("samples_per_step", "first_batch") if not seen[key]]
    lacks += [] if record["throughput"]["step_seconds_median"] else ["throughput"]
    lacks += [] if logged(record) or seen["loss_curve"] else ["final metrics"]
    if lacks:
        return f"lacks evidence: {', '.join(lacks)}"
    if record["plan"]["precision"] == "fp8" and not evidence["linear_converted"]:
        return "lacks evidence: asked for fp8, no Linear is recorded as converted"
    taken = steps_of(record)
    steps = record["args"].get("max_steps", taken)  # of a script that is not a recipe: all its steps
    if taken != steps:
        return f"lacks evidence: {taken} of {str(steps)[:200]} steps are recorded"
    last = metrics[-1] if metrics else {}
    wrong = [name for name, value in logged(record).items() if last.get(name) != value or not math.isfinite(value)]
    return f"run.json and metrics.jsonl disagree on {', '.join(wrong)[:200]}" if wrong else None


def logged(record: dict[str, Any]) -> dict[str, float]:
    """The last metrics that the run logged."""
    values = record["final"]["metrics"] if record["final"] else {}
    values = {key: float(value) if value in NOT_FINITE else value for key, value in values.items() if key not in ASIDE}
    return {key: value for key, value in values.items() if number(value) or str(value) in NOT_FINITE}


def steps_of(record: dict[str, Any]) -> Any:
    """The optimizer steps that were taken. The model may be that of an earlier step, the best one: record["final"]."""
    curve, final = record["seen"]["loss_curve"], record["final"]  # a script of one's own may log nothing
    return record["seen"].get("last_step") or (final["step"] if final else curve[-1][0] if curve else None)


def nudged(run: dict[str, Any]) -> bool:
    """Whether the run started from weights changed by one rounding (the twin)."""
    return bool(run["record"] and run["record"]["seen"].get("nudged"))


def label(record: dict[str, Any], vary: Collection[str] = (), processes: bool = False) -> str:
    """The row of the report that a run belongs to: its config and the options that were allowed to vary."""
    how = record["plan"]
    name = record["config"]["name"] or f"{how['strategy']}_{how['precision']}"
    name += f" x{how['num_processes']}" if processes else ""
    return " ".join([name, *(f"{key}={short(setting(record, key))}" for key in vary)])


def setting(record: dict[str, Any], key: str) -> Any:
    return record["seen"]["samples_per_step"] if key == "global_batch_size" else record["args"].get(key)


def fixed(record: dict[str, Any], vary: Collection[str]) -> dict[str, Any]:
    """A flat dict of everything that must be equal if two runs differ in the config only."""
    flat = {key: value for key, value in record["args"].items() if key not in FREE}
    flat |= {f"version of {key}": value for key, value in record["versions"].items()}
    flat |= {key: record[key] for key in ("recipe", "device_name")}
    flat |= {"global_batch_size": setting(record, "global_batch_size"), "data": record["data"].get("fingerprint")}
    flat["code of the recipe, shared/, faithful/ and amp8/"] = record["code_sha256"]
    return {key: value for key, value in flat.items() if key not in vary}


def comparable(run: dict[str, Any]) -> bool:
    """Whether the record says what was run. A failed run can be comparable, too."""
    record = run["record"]
    return bool(record) and record["schema_version"] == SCHEMA and bool(record["args"])


def check_alike(runs: Iterable[dict[str, Any]], vary: Collection[str]) -> None:
    """Refuses runs that differ in more than the config, and names each difference once. A run that lacks evidence is
    compared by what its record has."""
    runs = sorted(filter(comparable, runs), key=lambda run: bool(run["problem"]))
    if not runs:
        return
    lines = differing(runs, vary) | differing_texts(runs, vary)
    lines = lines or differing_starts(runs, vary)  # which would follow from those
    if lines:
        advice = "compare runs made alike, or name what may differ: --vary NAME"
        told = [*lines.values()][:7]
        more = [f"and {len(lines) - len(told)} more"] if len(lines) > len(told) else []
        raise Refused("\n  ".join(["these runs differ in more than the config:", *told, *more]) + f"\n{advice}")


def differing(runs: list[dict[str, Any]], vary: Collection[str]) -> dict[str, str]:
    """{name: the first difference} of options, versions, data and code."""
    first, lines = runs[0], {}
    seeds = {key for key in first["record"]["args"] if all(is_seed(run, key) for run in runs)}
    wanted = fixed(first["record"], vary)
    for run in runs:
        values = fixed(run["record"], vary)
        for key in dict.fromkeys([*wanted, *values]):
            unknown = run["problem"] and (values.get(key) is None or wanted.get(key) is None)
            if values.get(key) != wanted.get(key) and key not in seeds and not unknown:
                then, now = short(wanted.get(key)), short(values.get(key))
                lines.setdefault(key, f"{printable(key[:200])}: {then} in {first['folder']}, {now} in {run['folder']}")
    return lines


def differing_texts(runs: list[dict[str, Any]], vary: Collection[str]) -> dict[str, str]:
    """{row: a line} of rows whose runs had config files with other texts."""
    texts, lines = {}, {}
    for run in runs:
        row, digest = label(run["record"], vary, True), run["record"]["config"]["sha256"]
        if texts.setdefault(row, digest) != digest:
            lines[row] = f"text of {row}: not the same in all of its runs"
    return lines


def differing_starts(runs: list[dict[str, Any]], vary: Collection[str]) -> dict[str, str]:
    """{what: a line} of runs of one seed that began with other weights, or with another batch."""
    starts, lines = {}, {}
    for run in runs:
        record = run["record"]
        of_seed = (run["seed"], *(str(setting(record, key)) for key in vary))
        weights = record["evidence"] and record["evidence"]["initial_weights"]
        batch = record["seen"]["first_batch"] if "_sp" not in record["plan"]["strategy"] else None  # of a slice
        for what, start in ((f"initial weights{', nudged' if nudged(run) else ''}", weights), ("first batch", batch)):
            if start and starts.setdefault((what, of_seed), start) != start:
                lines.setdefault(what, f"{what} of seed {run['seed']}: {run['folder']} began with another")
    return lines


def is_seed(run: dict[str, Any], key: str) -> bool:
    """Whether this option is the run's seed, whatever its name is."""
    option = run["record"]["args"].get(key)
    return option is not None and run["seed"] is not None and str(option) == str(run["seed"])


def short(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return f"{value[:12]}..."
    return printable(str(value)[:200])
