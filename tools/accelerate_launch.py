"""`accelerate launch` as ./launch.sh starts it: the same launcher in this process, with a plain end.

A worker that fails has said why: its exit code becomes the launcher's, and what Accelerate and torch would print after
it (a traceback of the launcher, a table) is left out. A worker that was killed cannot say so; one line does. After a
finished run come its table and what one would do next. faithful/launcher.py knows this file by its name.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # in place of tools/
from accelerate.commands import launch  # noqa: E402

OWN_CODES = (1, 2, 130, 143)  # of workers that have said why they end: faithful/process.py
# What torch's launcher logs of workers that end: each says why itself.
LOGGED = ("failed (exitcode", "Sending process", "Received %s death signal", "Got termination signal")


def hand_on(number, frame):
    """SIGTERM or Ctrl-C while Accelerate waits for a single worker: the worker gets it, and the launcher goes on
    waiting. For several workers torch's launcher does the same."""
    workers = psutil.Process().children()
    for worker in workers:
        worker.send_signal(number)
    if not workers:
        sys.exit(128 + number)


def code_of(returncode, who):
    """The exit code for a worker that ended with `returncode`; says what a killed worker could not say."""
    code = 128 - returncode if returncode < 0 else returncode
    if returncode < 0 and returncode not in (-signal.SIGTERM, -signal.SIGINT):
        killed = ", perhaps because memory ran out" if returncode == -signal.SIGKILL else ""
        print(f"error: {who} was ended by {signal.Signals(-returncode).name}{killed}", file=sys.stderr)
    elif code not in OWN_CODES:
        print(f"error: {who} ended with exit code {code}", file=sys.stderr)
    return code


def run():
    """Accelerate's launcher with this process's command line; the exit code."""
    for name in ("multiprocessing", "agent.server"):
        logger = logging.getLogger(f"torch.distributed.elastic.{name}.api")
        logger.addFilter(lambda record: not str(record.msg).startswith(LOGGED))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    try:
        launch.main()
        return 0
    except subprocess.CalledProcessError as failed:
        return code_of(failed.returncode, "the training process")
    except Exception as problem:
        if hasattr(problem, "get_first_failure"):  # torch's ChildFailedError
            rank, failure = problem.get_first_failure()
            return code_of(failure.exitcode, f"rank {rank}")
        if hasattr(problem, "sigval"):  # torch's SignalException
            return 128 + problem.sigval
        raise


def what_next(folder):
    """The table of a finished run, and commands for what comes after it."""
    import json

    from tools import find, show

    folder = Path(os.path.relpath(folder)) if folder.resolve().is_relative_to(Path.cwd()) else folder
    record = json.loads((folder / "run.json").read_text())
    if record["status"] != "finished":
        return
    print(show.text(folder))
    config, recipe = record["config"]["name"], record["recipe"]
    lines = []
    if (folder / "data.json").exists() and recipe in find.names("recipe"):
        what = {"gpt": '--prompt "The "', "bert": '--prompt "TEXT"'}.get(recipe, "FILE")
        lines.append((f"predict {folder} {what}", "use the model"))
    if (folder / "model").exists():
        lines.append((f"export {folder}", "the weights as plain fp32 safetensors"))
    other = f"{record['plan']['strategy']}_{'bf16' if record['plan']['precision'] == 'fp8' else 'fp8'}"
    if recipe in find.names("recipe") and {config, other} <= {*find.names("config")}:
        lines.append((f"compare {config} {other} -- {recipe}", "whether FP8 changes the loss"))
    lines.append((f"show {folder} --html", "the run as a page, with its curves"))
    width = max(len(command) for command, _ in lines)
    print("next:\n" + "\n".join(f"  ./launch.sh {command:<{width}}  {what}" for command, what in lines))


def main():
    with tempfile.TemporaryDirectory() as folder:
        left = Path(folder, "run")  # the main process writes here where its record is
        os.environ["FAITHFUL_TELL_FOLDER"] = str(left)
        code = run()
        if code == 0 and left.exists():
            what_next(Path(left.read_text()))
    return code


if __name__ == "__main__":
    sys.exit(main())
