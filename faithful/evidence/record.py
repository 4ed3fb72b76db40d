"""The record of a run: `run.json` and `metrics.jsonl` in its folder.

run.json holds the plan of the run, what was observed, and the evidence. It is written when the run begins, at each
checkpoint, and when it ends, finished or not. metrics.jsonl has one line for each call of `accelerator.log`.
"""

import contextlib
import errno
import json
import math
import numbers
import os
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import PartialState
from torch.distributed.tensor import DTensor

from faithful import plan
from faithful.checkpoint.run_folder import METRICS, RunFolder
from faithful.config import config_file, settings
from faithful.disk import names, readers, secrets
from faithful.disk.replacing import replaced, write_json
from faithful.launch import machine
from faithful.models.blocks import by_compiler
from faithful.plan import Plan

if TYPE_CHECKING:
    from faithful.training.steps import Steps

LONGEST_CURVE = 1000  # points of the loss curve that run.json keeps
LARGEST_ARRAY = 100  # elements of a tensor or array that metrics.jsonl holds
LEFT_OUT = object()


class Record:
    """The record of one run, in `folder`. Only the main process writes. An error in writing does not end the run.

    project: the project folder. It is the folder of the record too, unless an earlier Accelerator of this script has
    its record there: then the record's folder is `folder`, beside that one.
    """

    def __init__(self, plan: Plan, project: str | Path, folder: str | Path, main: bool) -> None:
        self.plan, self.project, self.main = plan, Path(project).absolute(), main
        self.own = RunFolder(Path(folder), main)
        self.script, self.started = script_name(), now()
        self.file = Path(sys.argv[0]).absolute()
        self.launched = as_launched(plan, self.file) if main else {}  # now: code and config may go on meanwhile
        self.notes: list[str] = []
        self.opened, self.failed_saves, self.status = False, 0, "running"
        self.error: str | None = None
        self.final: dict[str, Any] | None = None
        self.arguments: dict[str, Any] = {}
        self.seen: dict[str, Any] = {"samples_per_step": None, "optimizer": None, "first_batch": None, "loss_curve": []}
        self.every = 1  # steps between two points of the loss curve
        self.resumed_at: int | None = None  # the step of the first checkpoint that was loaded
        self.loaded: int | None = None  # that of the newest one to which the run went back
        self.utilization: list[float] = []
        self.early: list[str] = []  # rows that were logged before the record was opened
        self.said: set[str] = set()  # kinds of notes that are given once

    @property
    def folder(self) -> Path:
        return self.own.path

    @property
    def metrics_file(self) -> Path:
        return self.folder / METRICS

    @property
    def shown(self) -> Path:
        return self.own.shown

    def note(self, line: str) -> None:
        """Prints a note, once on each machine, and keeps it."""
        self.notes.append(line)
        PartialState().print(f"note: {line}", flush=True)

    def note_once(self, kind: str, line: str) -> None:
        """Prints and keeps a note, on the main process. Only one of each kind."""
        if self.main and kind not in self.said:
            self.said.add(kind)
            self.notes.append(line)
            print(f"note: {line}", flush=True)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Turns an error in writing the file `name` into a note."""
        try:
            yield
        except OSError as problem:
            why = problem.strerror or problem
            self.note_once(name, f"{self.shown / name} cannot be written ({why}): the run goes on without it")

    def begin(self, resumed: bool, also: Iterable[str] = (), together: bool = False) -> None:
        """Takes the folder for this run: see RunFolder.begin."""
        if line := self.own.begin(resumed, also, together):
            self.note_once("earlier", line) if self.main else print(f"note: {line}", flush=True)

    def not_saved(self) -> str:
        return f"{self.failed_saves} checkpoints could not be written"

    def open(self, resumed: bool, step: int) -> None:
        """Begins the record of a run that starts at `step`. Where there are several machines, every process calls it.
        Raises Refused if another run is writing to the folder."""
        if not self.main:
            with self.writing("run.json"):  # of the main process: a disk that cannot be read is seen at the next save
                self.begin(resumed, together=True)
            self.opened = True
            return
        if (file := settings.tell_folder()) and (self.folder == self.project or not Path(file).exists()):
            with contextlib.suppress(OSError):
                Path(file).write_text(str(self.folder))
        with self.writing("run.json"):
            self.begin(resumed, together=True)
            if resumed:
                self.go_on(step)
        self.opened = True
        if os.path.isdir(self.folder):  # it may be out of reach; not before: a run that is refused leaves none
            print(f"record: {self.shown}", flush=True)
        with self.writing("metrics.jsonl"):
            self.begin_metrics(step)

    def go_on(self, step: int) -> None:
        """Takes the loss curve up to `step` from the record of the run that is resumed, if this folder has one: a run
        is one curve, however often it was launched."""
        self.seen |= {"resumed_at": step} if step else {}
        with contextlib.suppress(OSError, ValueError, RecursionError):
            form = {"seen": {"loss_curve": [[readers.number]]}}
            path = self.folder / "run.json"
            before = readers.value_of(path, form)["seen"]["loss_curve"]
            self.seen["loss_curve"] = [point for point in before if len(point) == 2 and point[0] <= step]

    def complete(self, steps: "Steps") -> bool:
        """Adds how a run ended to its earlier record, if it took its last step before it was resumed: it has only been
        evaluated since. Returns whether it is that run's record."""
        path = self.folder / "run.json"
        seen = {"loss_curve": [[readers.number]], "last_step?": readers.number}
        form = {"recipe": str, "seen": seen, "final": (None, {"step": readers.number}), "run?": str}
        try:
            before = readers.value_of(path, form)
        except (OSError, ValueError, RecursionError):
            return False
        curve = dict(point for point in before["seen"]["loss_curve"] if len(point) == 2)
        reached = max((before["final"] or {"step": 0})["step"], before["seen"].get("last_step", 0), *curve)
        which = before["recipe"], before.get("run", self.own.run)
        if self.resumed_at is None or self.resumed_at < reached or which != (self.script, self.own.run):
            return False
        with self.writing("metrics.jsonl"):
            self.begin_metrics(self.resumed_at)
        self.status = "finished"
        ended = {"final": self.final and {"step": steps.taken, "loss": curve.get(steps.taken), "metrics": self.final}}
        went_back = {key: self.seen[key] for key in ("last_step",) if key in self.seen}
        ended |= {"seen": before["seen"] | went_back, "args": self.arguments, "status": self.status, "error": None}
        with self.writing("run.json"):
            write_json(path, secrets.hidden(as_json(before | ended | {"finished": now()}, [])))
        return True

    def was_loaded(self, reached: int, steps: "Steps") -> None:
        """Notes that a checkpoint was loaded after `reached` steps. If it is an older one, the loss is that of its step
        from now on."""
        self.resumed_at = steps.taken if self.resumed_at is None else self.resumed_at
        if steps.taken < reached:
            self.seen["last_step"] = max(reached, self.seen.get("last_step", 0))
            self.loaded = steps.taken
            steps.loss = dict(self.seen["loss_curve"]).get(steps.taken)

    def begin_metrics(self, step: int) -> None:
        """Keeps the rows of metrics.jsonl up to `step`, and adds those that were logged before the record was open."""
        if self.own.kept:
            return
        damaged = 0
        with replaced(self.metrics_file) as temporary, temporary.open("w", encoding="utf-8") as file:
            for line, row in readers.rows_of(self.metrics_file):
                damaged += row is None
                if row is not None and stays(row, step):
                    file.write(line + "\n")
            file.writelines(line + "\n" for line in self.early)
        if damaged:
            lines = "a line that is" if damaged == 1 else f"{damaged} lines that are"
            self.note_once(
                "damaged rows", f"{self.shown}/metrics.jsonl has {lines} damaged, as after a crash: left out"
            )
        self.early.clear()

    def log(self, values: Any, step: Any, taken: int, device: torch.device) -> None:
        """Appends a line to metrics.jsonl. Values that JSON does not have are left out, with a note.
        step: the script's, or None. taken: optimizer steps."""
        left: list[str] = []
        row = as_json(values, left) if isinstance(values, Mapping) else as_json({"values": values}, left)
        self.final = row
        if not self.main:
            return
        if left:
            self.note_once(
                "left out",
                f"metrics.jsonl leaves out {', '.join(left)}: JSON has no such values, or they are "
                "large. Trackers get them as they are",
            )
        steps = row.get("step"), as_json(step, left), taken
        at = next(number for number in steps if isinstance(number, int | float))
        again = {"last_step": self.seen["last_step"]} if taken == self.loaded else {}  # of the model that was loaded
        line = json.dumps({"step": at} | row | {"step": at} | again)
        if self.opened and not self.own.kept:
            with self.writing("metrics.jsonl"):
                append(self.metrics_file, line)
        elif not self.opened:
            self.early.append(line)
        utilization = machine.gpu_utilization(device)
        self.utilization += [utilization] if utilization is not None else []

    def point(self, step: int, loss: float | None) -> None:
        """Adds a point to the loss curve. Drops every second point if there are more than LONGEST_CURVE."""
        curve = self.seen["loss_curve"]
        if step % self.every == 0:
            curve.append([step, loss])
        if len(curve) > LONGEST_CURVE:
            self.every *= 2
            curve[:] = [row for row in curve if row[0] % self.every == 0]

    def write(
        self, steps: "Steps", evidence: list[dict[str, Any]], memory: int | None, finished: str | None = None
    ) -> None:
        if self.own.kept:
            return
        median = statistics.median(steps.times) if steps.times else None
        p90 = statistics.quantiles(steps.times, n=10, method="inclusive")[-1] if len(steps.times) > 1 else median
        samples = self.seen["samples_per_step"]
        record = {
            "schema_version": 3,
            "run": self.own.run,
            "recipe": self.script,
            "args": self.arguments,
            "seen": self.seen,
            "plan": asdict(self.plan),
            "evidence": evidence[0] if evidence else None,
            "evidence_of_other_models": evidence[1:],
            "notes": self.notes,
            **self.launched,
            "started": self.started,
            "finished": finished,
            "throughput": {
                "samples_per_second_median": samples / median if samples and median else None,
                "step_seconds_median": median,
                "step_seconds_p90": p90,
                "steps_measured": len(steps.times),
                "steps_excluded": steps.excluded,
            },
            "compiled": by_compiler() if self.plan.compile else None,
            "peak_memory_bytes": memory,
            "gpu_utilization_mean": statistics.mean(self.utilization) if self.utilization else None,
            "final": {"step": steps.taken, "loss": steps.loss, "metrics": self.final} if self.final else None,
            "status": self.status,
            "error": self.error,
        }
        with self.writing("run.json"):
            write_json(self.folder / "run.json", secrets.hidden(as_json(record, [])))


def leave_error(folder: Path, rank: int, error: str) -> None:
    """Leaves the error of a process that is not the main one, which may wait for this one until it is killed."""
    with contextlib.suppress(OSError):  # a folder of another machine
        left = {"rank": rank, "error": secrets.hidden(error), "time": now()}
        write_json(folder / f"error-rank{rank}.json", left)


def errors_left(folder: Path) -> str | None:
    """The errors of other processes in error line, the earliest first, or None."""
    errors = []
    for file in folder.glob("error-rank*.json"):
        with contextlib.suppress(OSError, ValueError):
            errors.append(readers.value_of(file, {"rank": int, "error": str, "time": str}))
    errors.sort(key=lambda error: (error["time"], error["rank"]))
    return "; ".join(f"rank {error['rank']}: {error['error']}" for error in errors[:3]) or None


def end_for(folder: Path, why: str) -> None:
    """Writes into run.json that the run has failed, if its main process was killed before it could. why: what its
    launcher knows."""
    with contextlib.suppress(OSError, ValueError):
        record = readers.value_of(folder / "run.json", {"status": str})
        if record["status"] == "running":
            error = errors_left(folder) or why
            write_json(folder / "run.json", record | {"status": "failed", "error": error, "finished": now()})


def stays(row: dict[str, Any], step: int) -> bool:
    """Whether to keep a row of metrics.jsonl: a run resumed at `step` does not write it again."""
    at = row.get("last_step", row.get("step"))
    return not isinstance(at, int | float) or at < step or (at == step and "loss" in row)


def append(path: Path, line: str) -> None:
    """Appends a line to a file: all of it or, on a full disk, nothing. A file that has another name, too, is copied: it
    may lie elsewhere."""
    if names.kind_of(path) == "file" and os.lstat(path).st_nlink > 1:
        with replaced(path) as own:
            shutil.copyfile(path, own)
    with os.fdopen(names.opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0) as file:
        before, data = file.tell(), line.encode() + b"\n"
        try:
            whole = file.write(data) == len(data)
        except OSError:
            file.truncate(before)
            raise
        if not whole:
            file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def as_json(value: Any, left: list[str], at: str = "") -> Any:
    """`value` in the types that JSON has: a tensor as its number or a list, a number that is not finite as a string
    that float() reads. What JSON cannot hold is left out, and its name is added to the list `left`."""
    if isinstance(value, DTensor) and all(placement.is_replicate() for placement in value.placements):
        value = value.to_local()
    if hasattr(value, "tolist"):
        value = numbers_of(value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        parts = {str(key): as_json(inner, left, f"{at}.{key}".lstrip(".")) for key, inner in value.items()}
        return {key: part for key, part in parts.items() if part is not LEFT_OUT}
    if isinstance(value, list | tuple):
        lacks: list[str] = []
        parts = [as_json(inner, lacks, at) for inner in value]
        if not lacks:
            return parts
    left.append(f"{at} ({type(value).__name__})")
    return LEFT_OUT


def numbers_of(array: Any) -> Any:
    """The number or the list of numbers in a tensor or array, or `array` itself if it is large or holds other types."""
    try:
        count = array.numel() if torch.is_tensor(array) else array.size
        if count > LARGEST_ARRAY or isinstance(array, DTensor):  # a collective would gather the shards
            return array
        return array.item() if count == 1 else array.tolist()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return array


def of_arguments(arguments: Any) -> dict[str, Any]:
    """What a script passes to init_trackers as its configuration, in the types that JSON has. Others become text."""
    if hasattr(arguments, "__dict__") and not isinstance(arguments, Mapping):
        arguments = vars(arguments)
    elif not isinstance(arguments, Mapping):
        arguments = {"config": arguments} if arguments else {}
    left: list[str] = []
    whole = {str(key): as_json(value, left) for key, value in arguments.items()}
    return {key: str(arguments[key]) if value is LEFT_OUT else value for key, value in whole.items()}


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def as_launched(asked: Plan, script: Path) -> dict[str, Any]:
    """What a run is made of: command, config, packages, device, and the code, in which commits and by its hash."""
    line, file = plan.launch_line()
    text = file.read_text() if file and file.exists() else None
    config = {"name": asked.config, "text": text, "sha256": text and sha256(text.encode()).hexdigest()}
    words = " ".join(secrets.hidden_in_words(line or [sys.executable, *sys.argv]))
    here = {"command": words, "config": config, "code_sha256": code_sha256(script)} | commits(script)
    return here | {"versions": machine.versions(), "device_name": machine.device_name(asked.device)}


def code_sha256(script: Path) -> str:
    """A hash of the script, shared/, faithful/ and amp8/. It is equal for runs of the same code."""
    root = config_file.BESIDE
    folders = (config_file.HOME / "shared", root / "faithful", root / "amp8")
    ours = [path for folder in folders for path in sorted(folder.glob("**/*.py"))]
    files = [path for path in (Path(script), *ours) if path.is_file()]
    text = b"".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)
    return sha256(text).hexdigest()


def commits(script: Path) -> dict[str, str | bool | None]:
    """The commits of the repositories in which the script and this package lie."""
    (theirs, dirty), (ours, changed) = git_state(script), git_state(Path(__file__))
    return {"git_commit": theirs, "git_dirty": dirty, "faithful_commit": ours, "faithful_dirty": changed}


def git_state(file: Path) -> tuple[str | None, bool | None]:
    """(commit, whether there are changes) of the repository in which a file lies, or (None, None): there is no file,
    repository or git, or the repository ignores the file, as an installed package in a project's folder."""

    def git(*words: str) -> str | None:
        found = subprocess.run(["git", *words], cwd=file.parent, capture_output=True, text=True)
        return found.stdout.strip() if found.returncode == 0 else None

    try:
        if not file.is_file() or git("check-ignore", "-q", file.name) is not None:
            return None, None
        commit, changes = git("rev-parse", "--verify", "HEAD"), git("status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return None, None
    return commit, None if commit is None or changes is None else bool(changes)


def script_name() -> str:
    """That of the script's file; of a package that `-m` runs, as lm_eval, that of its folder."""
    file = Path(sys.argv[0])
    return file.parent.name if file.stem == "__main__" else file.stem


def default_folder(plan: Plan) -> str:
    name = plan.config or f"{plan.strategy}_{plan.precision}"
    return os.path.join("runs", f"{script_name()}-{name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}")


def described(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's class, as the script has made it, and the options of its param_groups, as values for JSON."""

    def plain(value: Any) -> Any:
        return value if value is None or isinstance(value, bool | int | float | str) else str(value)

    groups = [
        {key: plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return {"class": getattr(optimizer, "replaced", type(optimizer)).__name__, "groups": groups}
