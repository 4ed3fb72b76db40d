"""Reads finished runs: why one cannot be used, and whether several differ in the config only."""

import contextlib
import math
import re
from pathlib import Path

from faithful.disk import readers
from faithful.disk.readers import count, number
from shared import args
from shared.args import Refused

SCHEMA = 2  # of run.json
NOT_FINITE = ("nan", "inf", "-inf")  # numbers that JSON does not have
ASIDE = {"step", "epoch", "grad_norm", "learning_rate", "lr"}  # logged beside metrics
# Options that may differ: they do not change what is computed, or are compared as the global batch and the seed.
FREE = args.Run.__annotations__.keys() | {"seed", "per_device_train_batch_size", "gradient_accumulation_steps"}


def none_or(form):
    return lambda value: value is None or form(value)


def text(value):
    return isinstance(value, str)


def texts(value):
    return isinstance(value, list) and all(map(text, value))


NOTHING_OR_TEXT, NOTHING_OR_NUMBER, NOTHING_OR_OBJECT = none_or(text), none_or(number), (dict, type(None))
PLAN = {"strategy": str, "precision?": str, "num_processes?": count(1, 10**6), "replicas?": count(1, 10**6)}
# What run.json must hold to be shown, exported or compared. Keys with `?` are not in the records of all versions.
RECORD = {
    "status": str, "recipe": str, "plan": PLAN, "command?": str, "args?": NOTHING_OR_OBJECT, "seen?": NOTHING_OR_OBJECT,
    "config?": {"name?": NOTHING_OR_TEXT, "text?": NOTHING_OR_TEXT, "sha256?": NOTHING_OR_TEXT},
    "evidence?": NOTHING_OR_OBJECT, "notes?": texts, "versions?": dict, "device_name?": NOTHING_OR_TEXT,
    "started?": str, "finished?": NOTHING_OR_TEXT, "throughput?": NOTHING_OR_OBJECT, "final?": NOTHING_OR_OBJECT,
    "peak_memory_bytes?": NOTHING_OR_NUMBER, "error?": NOTHING_OR_TEXT, "code_sha256?": NOTHING_OR_TEXT,
}  # fmt: skip
SIZE = count(1, 100_000)
# What data.json must hold to build the model and to prepare an input.
DATA = {
    "fingerprint?": NOTHING_OR_TEXT, "image_size?": none_or(SIZE), "in_chans?": count(1, 64), "num_classes?": SIZE,
    "sequence_length?": SIZE, "vocab_size?": count(1, 10**7), "classes?": none_or(texts), "interpolation?": str,
    "crop_pct?": number, "mean?": lambda value: numbers(value), "std?": lambda value: numbers(value),
}  # fmt: skip


def numbers(value):
    return isinstance(value, list) and 0 < len(value) <= 64 and all(map(number, value))


def record_of(folder):
    """The run.json of a run. Raises Refused if there is none, or if it does not hold what a run writes."""
    try:
        return readers.of_kind(folder / "run.json", readers.value_of(folder / "run.json"), RECORD)
    except OSError as error:
        why = error.strerror or error
        raise Refused(f"{folder} is not the folder of a run: no readable run.json ({why})") from None
    except readers.Damaged as error:
        raise Refused(f"{folder} is not the folder of a run: no readable run.json ({error})") from None


def data_of(folder):
    """The data.json of a recipe's run. Raises Refused if it does not hold what a recipe writes."""
    try:
        return readers.of_kind(folder / "data.json", readers.value_of(folder / "data.json"), DATA)
    except (OSError, readers.Damaged) as error:
        raise Refused(f"{folder} has no readable data.json ({error})") from None


@contextlib.contextmanager
def believed(folder):
    """Turns the error of who meets a missing key or another type in a run's record into Refused."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"{type(error).__name__}: {readers.short(str(error))}"
        raise Refused(f"{folder}/run.json does not hold what a run writes ({why})") from None


def rows_of(folder):
    """The rows of metrics.jsonl, without torn ones. Raises Refused if it is no file."""
    try:
        return [row for _, row in readers.rows_of(folder / "metrics.jsonl")[0]]
    except OSError as error:
        raise Refused(f"{folder}/metrics.jsonl cannot be read: {error}") from None


def read(folder, seed=None):
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
    run["seed"] = (record.get("args") or {}).get("seed", run["seed"]) if seed is None else seed
    try:
        with believed(folder):
            return run | {"record": record, "metrics": metrics, "problem": problem(record, metrics)}
    except Refused as error:
        return run | {"problem": str(error)}


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
    return " ".join([name, *(f"{key}={setting(record, key)}" for key in vary)])


def setting(record, key):
    return record["seen"]["samples_per_step"] if key == "global_batch_size" else record["args"].get(key)


def fixed(record, vary):
    """A flat dict of everything that must be equal if two runs differ in the config only."""
    flat = {key: value for key, value in record["args"].items() if key not in FREE}
    flat |= {f"version of {key}": value for key, value in record["versions"].items()}
    flat |= {key: record[key] for key in ("recipe", "device_name")}
    flat |= {"global_batch_size": setting(record, "global_batch_size"), "data": record["data"].get("fingerprint")}
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
    lines = differing(runs, vary) | differing_texts(runs, vary)
    lines = lines or differing_starts(runs, vary)  # which would follow from those
    if lines:
        advice = "compare runs made alike, or name what may differ: --vary NAME"
        raise Refused("\n  ".join(["these runs differ in more than the config:", *lines.values()]) + f"\n{advice}")


def differing(runs, vary):
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
                lines.setdefault(key, f"{key}: {then} in {first['folder']}, {now} in {run['folder']}")
    return lines


def differing_texts(runs, vary):
    """{row: a line} of rows whose runs had config files with other texts."""
    texts, lines = {}, {}
    for run in runs:
        row, digest = label(run["record"], vary, True), run["record"]["config"]["sha256"]
        if texts.setdefault(row, digest) != digest:
            lines[row] = f"text of {row}: not the same in all of its runs"
    return lines


def differing_starts(runs, vary):
    """{what: a line} of runs of one seed that began with other weights, or with another batch."""
    starts, lines = {}, {}
    for run in runs:
        record = run["record"]
        of_seed = (run["seed"], *(setting(record, key) for key in vary))
        weights = (record.get("evidence") or {}).get("initial_weights")
        batch = (record.get("seen") or {}).get("first_batch")
        for what, start in ((f"initial weights{', nudged' if nudged(run) else ''}", weights), ("first batch", batch)):
            if start and starts.setdefault((what, of_seed), start) != start:
                lines.setdefault(what, f"{what} of seed {run['seed']}: {run['folder']} began with another")
    return lines


def is_seed(run, key):
    """Whether this option is the run's seed, whatever its name is."""
    option = run["record"]["args"].get(key)
    return option is not None and run["seed"] is not None and str(option) == str(run["seed"])


def short(value):
    return f"{value[:12]}..." if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) else value
