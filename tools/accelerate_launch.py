"""Runs `accelerate launch` for the command that launches, with a short ending.

A worker that fails prints its own error. This launcher takes over its exit code and leaves out what Accelerate and
torch would print after it: a traceback of the launcher and a table. If a worker was killed, one line says so. After a
finished run it prints the run's table and the commands that one may want next. launch/launcher.py recognizes this
file by its name. While the processes start or end, a line says so every few seconds.
"""

import functools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # in place of tools/
from tools import progress  # noqa: E402

# torch reads this when it is imported: its store would print a trace of C++ for a machine that has gone, which
# tools/elastic.py says in a line. The workers get the variable as it was.
said = os.environ.get("TORCH_CPP_LOG_LEVEL")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
with progress.waiting("starting: imports torch"):
    from accelerate.commands import launch

if said is None:
    del os.environ["TORCH_CPP_LOG_LEVEL"]
from faithful.disk import readers  # noqa: E402
from faithful.errors import Refused  # noqa: E402
from faithful.launch import printing  # noqa: E402

OWN_CODES = (1, 2, 130, 143)  # a worker with one of these has printed its error: launch/process.py
# What torch's launchers log when workers end, which print their own errors, or when one that they met is gone.
LOGGED = ("failed (exitcode", "Sending process", "Received %s death signal", "Got termination signal", "The node '")


def hand_on(number: int, frame: FrameType | None) -> None:
    """Sends SIGTERM or Ctrl-C on to a single worker and goes on waiting for it. For several workers torch's launcher
    does the same."""
    workers = psutil.Process().children()
    for worker in workers:
        worker.send_signal(number)
        worker.resume()  # if somebody has stopped it, it would not get the signal
    if not workers:
        sys.exit(128 + number)


def end_of(returncode: int, who: str) -> tuple[int, str]:
    """Returns (the launcher's exit code for a worker's `returncode`, how the worker ended). Prints a line if the worker
    could not."""
    code = 128 - returncode if returncode < 0 else returncode
    how = f"{who} ended with exit code {code}"
    if returncode < 0:
        killed = ", perhaps because memory ran out" if returncode == -signal.SIGKILL else ""
        if returncode == -signal.SIGABRT:  # gloo's way
            killed = (
                ", perhaps because it made another collective call than the other processes, or used other parts of "
                "the model: use each part in every process, if need be times 0, or a ddp config with "
                "find_unused_parameters"
            )
        how = f"{who} was ended by {signal.Signals(-returncode).name}{killed}"
    if code not in OWN_CODES:
        print(f"error: {how}", file=sys.stderr)
    return code, how


def with_our_agent(launches: Callable[[Namespace], None]) -> Callable[[Namespace], None]:
    """One of Accelerate's launchers of several processes, which starts them by tools/elastic.py."""

    def launched(args: Namespace) -> None:
        from tools import elastic  # imports much of torch, which one process does not need

        elastic.install()
        launches(args)

    return launched


def run() -> tuple[int, str]:
    """Runs Accelerate's launcher with this process's command line. Returns (the exit code, how a worker ended)."""
    for name in ("multiprocessing.api", "agent.server.api", "rendezvous.dynamic_rendezvous"):
        logger = logging.getLogger(f"torch.distributed.elastic.{name}")
        logger.addFilter(lambda record: not str(record.msg).startswith(LOGGED))
    for name in ("multi_gpu_launcher", "deepspeed_launcher"):
        setattr(launch, name, with_our_agent(getattr(launch, name)))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    try:
        launch.main()
        return 0, ""
    except subprocess.CalledProcessError as failed:
        return end_of(failed.returncode, "the training process")
    except Refused as problem:
        what = "refused" if problem.exit_code == 2 else "error"
        print(f"{what}: {printing.plain(str(problem))}", file=sys.stderr)  # other machines have told their names
        return problem.exit_code, str(problem)
    except Exception as problem:
        if hasattr(problem, "failures"):  # torch's ChildFailedError
            from tools.elastic import cause_first

            rank, failure = min(problem.failures.items(), key=lambda item: cause_first(item[1]))
            return end_of(failure.exitcode, f"rank {rank}")
        if hasattr(problem, "sigval"):  # torch's SignalException
            return 128 + problem.sigval, f"the launcher was told to end by {signal.Signals(problem.sigval).name}"
        raise
    finally:  # the workers have ended: a second signal would find torch's handler, which raises
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def phase(told: Path) -> str | None:
    """What takes time now, or None: training says itself what it does. told: where the main process writes the folder
    of its record. In a file beside it the first process of this machine says that it has an Accelerator."""
    asked = told.with_name("asked")
    try:
        if told.exists():
            record = Path(told.read_text(), "run.json")
            return None if status_of(record, record.stat().st_mtime_ns) == "running" else "ending"
        if asked.exists():
            return "before the first step" if asked.read_text() == "0" else None  # None: a record on another machine
        return "starting"
    except (OSError, ValueError):
        return None


@functools.lru_cache(1)
def status_of(record: Path, changed: int) -> Any:
    """The status in a run.json, which is read again when it has changed."""
    return readers.value_of(record, {"status": str})["status"]


def what_next(folder: Path) -> None:
    """Prints the table of a finished run and the commands that one may want next."""
    from shared import args
    from tools import cli, find, records, show

    folder = Path(os.path.relpath(folder)) if folder.resolve().is_relative_to(Path.cwd()) else folder
    try:
        with records.believed(folder):
            record = records.record_of(folder)
            if record["status"] != "finished":
                return
            print(show.text(folder, printed=("measured", "note")))
            config, recipe, other = record["config"]["name"], record["recipe"], other_than(record["plan"])
    except args.Refused as refused:  # a script may write over its own record
        print(f"note: {refused}")
        return
    lines, is_recipe = [], (folder / "data.json").exists() and recipe in find.names("recipe")
    if is_recipe:
        what = "" if recipe == "diffusion" else "FILE"
        if recipe in find.PROMPTS:
            what = f'--prompt "{find.PROMPTS[recipe]}"'
        lines.append((f"predict {folder} {what}", "use the model"))
    if (folder / "model").exists():
        lines.append((f"export {folder}", "the weights as plain fp32 safetensors"))
    if is_recipe and {config, other} <= {*find.names("config")}:
        lines.append((f"compare {config} {other} -- {recipe}", "whether FP8 changes the loss"))
    print("next:", *(f"  {find.COMMAND} {line}" for line in cli.columns(lines)), sep="\n")


def other_than(plan: dict[str, Any]) -> str:
    """The config to compare a run with."""
    return f"{plan['strategy']}_{'bf16' if plan['precision'] == 'fp8' else 'fp8'}"


def main() -> int:
    printing.survive()
    with tempfile.TemporaryDirectory() as folder:
        left = Path(folder, "run")  # the main process writes here where its record is
        os.environ["FAITHFUL_TELL_FOLDER"] = str(left)
        with progress.phases(functools.partial(phase, left)):
            code, how = run()
            if code == 0 and left.exists():
                what_next(Path(left.read_text()))
            elif left.exists():
                from faithful.evidence.record import end_for

                end_for(Path(left.read_text()), how)
    return code


if __name__ == "__main__":
    code = main()
    if threading.active_count() > 1:  # one that asks a machine which is gone: Python aborts if it comes back now
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
