"""The record of a run: `run.json` and `metrics.jsonl` in its folder.

run.json holds the plan of the run, what was observed, and the evidence. It is written when the run begins and when it
ends, finished or not. metrics.jsonl has one line for each call of `accelerator.log`.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from faithful import config, launcher, machine, plan
from faithful.checkpoint import write_json
from faithful.errors import Refused

LONGEST_CURVE = 1000  # points of the loss curve that run.json keeps


class Record:
    """The record of one run, in `folder`. Only the main process writes."""

    def __init__(self, asked, folder, main):
        self.plan, self.folder, self.main = asked, Path(folder), main
        self.script, self.started = Path(sys.argv[0]).stem, now()
        self.notes = []
        self.opened, self.claimed, self.failed_saves = False, False, 0
        self.status, self.error, self.final, self.arguments = "running", None, None, None
        self.seen = {"samples_per_step": None, "optimizer": None, "first_batch": None, "loss_curve": []}
        self.every = 1  # steps between two points of the loss curve
        self.utilization = []

    @property
    def metrics_file(self):
        return self.folder / "metrics.jsonl"

    def holds_a_run(self):
        return (self.folder / "run.json").exists()

    def claim(self):
        """Locks the folder against other runs, if it exists."""
        if self.main and not self.claimed and self.folder.exists():
            launcher.claim(self.folder)
            self.claimed = True

    def not_saved(self):
        return f"{self.failed_saves} checkpoints could not be written"

    def open(self, of_another, step):
        """Begins the record of a run that starts at `step`. Raises Refused if the folder holds a run (`of_another`)."""
        if of_another:
            raise Refused(f"{self.folder} already holds a run: choose another folder for this one (recipes: "
                          "--output_dir), or resume that one (--resume_from_checkpoint latest)")  # fmt: skip
        self.opened = True
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.claim()
            if file := config.tell_folder():
                Path(file).write_text(str(self.folder))
            for stale in self.folder.glob("checkpoint-*.tmp"):
                shutil.rmtree(stale, ignore_errors=True)
            rows = self.metrics_file.read_text().splitlines() if self.metrics_file.exists() else []
            rows = [row for row in rows if row.endswith("}") and stays(json.loads(row), step)]
            self.metrics_file.write_text("".join(row + "\n" for row in rows))

    def log(self, values, step, device):
        """Appends a line to metrics.jsonl."""
        self.final = values
        if self.main:
            with self.metrics_file.open("a") as file:
                file.write(json.dumps({"step": step} | values) + "\n")
            utilization = machine.gpu_utilization(device)
            self.utilization += [utilization] if utilization is not None else []

    def point(self, step, loss):
        """Adds a point to the loss curve. Drops every second point if there are more than LONGEST_CURVE."""
        curve = self.seen["loss_curve"]
        if step % self.every == 0:
            curve.append([step, loss])
        if len(curve) > LONGEST_CURVE:
            self.every *= 2
            curve[:] = [row for row in curve if row[0] % self.every == 0]

    def write(self, steps, evidence, memory, finished=None):
        line, file = plan.launch_line()
        text = file.read_text() if file and file.exists() else None
        median = statistics.median(steps.times) if steps.times else None
        p90 = statistics.quantiles(steps.times, n=10, method="inclusive")[-1] if len(steps.times) > 1 else median
        samples = self.seen["samples_per_step"]
        record = {
            "schema_version": 2,
            "recipe": self.script,
            "command": " ".join(line or [sys.executable, *sys.argv]),
            "args": self.arguments or {},
            "seen": self.seen,
            "config": {"name": self.plan.config, "text": text, "sha256": text and sha256(text.encode()).hexdigest()},
            "plan": asdict(self.plan),
            "evidence": evidence[0] if evidence else None,
            "evidence_of_other_models": evidence[1:],
            "notes": self.notes,
            "versions": machine.versions(),
            "device_name": machine.device_name(self.plan.device),
            **git_state(),
            "code_sha256": code_sha256(sys.argv[0]),
            "started": self.started,
            "finished": finished,
            "throughput": {
                "samples_per_second_median": samples / median if samples and median else None,
                "step_seconds_median": median,
                "step_seconds_p90": p90,
                "steps_measured": len(steps.times),
                "steps_excluded": steps.excluded,
            },
            "peak_memory_bytes": memory,
            "gpu_utilization_mean": statistics.mean(self.utilization) if self.utilization else None,
            "final": {"step": steps.taken, "loss": steps.loss, "metrics": self.final} if self.final else None,
            "status": self.status,
            "error": self.error,
        }
        write_json(self.folder / "run.json", record)


def stays(row, step):
    """Whether to keep a row of metrics.jsonl: a run resumed at `step` does not write it again."""
    return row["step"] < step or (row["step"] == step and "loss" in row)


def now():
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def code_sha256(script):
    """A hash of the script, shared/, faithful/ and amp8/. It is equal for runs of the same code."""
    root = Path(__file__).resolve().parents[1]
    ours = [path for folder in ("shared", "faithful", "amp8") for path in sorted(root.glob(f"{folder}/**/*.py"))]
    files = [path for path in (Path(script), *ours) if path.is_file()]
    text = b"".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)
    return sha256(text).hexdigest()


def git_state():
    def git(*words):
        try:
            here = Path(__file__).parent
            return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    changes = git("status", "--porcelain")
    return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": None if changes is None else bool(changes)}


def default_folder(asked):
    name = asked.config or f"{asked.strategy}_{asked.precision}"
    script = Path(sys.argv[0]).stem
    return os.path.join("runs", f"{script}-{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def described(optimizer):
    """An optimizer's class and the options of its param_groups, as values for JSON."""

    def plain(value):
        return value if value is None or isinstance(value, bool | int | float | str) else str(value)

    groups = [
        {key: plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "groups": groups}
