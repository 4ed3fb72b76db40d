"""What every benchmark needs: its arguments, where its figures came from, and several trainings timed in turns.

save() writes the figures of a script with its command, date, device and versions, and came_from() says them in a line.

in_turns() times several trainings on one machine: all are in memory at once, and one runs while the others wait. So
changes of the machine's speed affect all of them. A step is the time from one optimizer step to the next, measured by
the same hook in torch, so it includes everything in between. The first turn and the first 3 steps of each are not
timed, as other trainings were in the caches. All processes are started several times, because the same program can be
5% faster in one process than in the next.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # scripts import faithful, shared, amp8 and tools after this module

TURN, WARMUP_STEPS = 20, 3  # steps of a turn, and those at its start that are not timed
STARTS = 2  # of the processes; each gets a part of the turns
KINDS = ("wall", "cpu", "fastest")
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def arguments(doc):
    """A parser whose help is the script's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


# ---------------------------------------------------------------------------------------- where the figures came from


def device_name():
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    name = model[0] if model else platform.machine()
    return f"CPU: {name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def versions(packages=()):
    import torch

    found = {package: importlib.metadata.version(package) for package in packages}
    return {"python": platform.python_version(), "torch": torch.__version__} | found


def command(before=None):
    """The command line; of a folder outside of this repository only the name. before: what a file that it adds to was
    made with."""
    words = [f"../{Path(word).name}" if os.path.isabs(word) else word for word in sys.argv[1:]]
    now = " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *words])
    return together(before, now)


def together(before, now):
    return now if not before else before if now in before else f"{before} and {now}"


def origin(packages=(), run=None):
    """Command, date, device and versions. run: the run.json of a run that computed, in place of this process."""
    found = {"command": command(), "date": datetime.date.today().isoformat()}
    if run is None:
        return found | {"device": device_name(), "versions": versions(packages)}
    return found | {"device": run["device_name"], "versions": run["versions"]}


def save(file, figures, packages=(), run=None):
    """Writes the figures to a JSON file, with their origin; what they hold of it already is kept. Where their command
    is not this one alone, they keep rows of the file, and the devices of both are named."""
    file = Path(file)
    file.parent.mkdir(exist_ok=True, parents=True)
    new = origin(packages, run) | figures
    if new["command"] != command():
        new["device"] = together(made(file, device=None)["device"], new["device"])
    file.write_text(json.dumps(new, indent=1) + "\n")
    print(f"wrote {file}")


def made(file, **empty):
    """What a result file holds, or `empty` where there is none yet."""
    return json.loads(Path(file).read_text()) if file and Path(file).exists() else empty


def losses(python, launch, recipe, env=None, limit=900):
    """Each `loss` and `eval_loss` of a launched recipe, in order; in their place one line if it failed.

    launch: the words of `accelerate launch`. recipe: the recipe's name and its arguments."""
    with tempfile.TemporaryDirectory() as folder:
        line = [python, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0", *launch]
        line += [f"recipes/{recipe[0]}.py", *recipe[1:], "--output_dir", f"{folder}/run"]
        # compiled code of another release is not taken
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "PYTHONFAULTHANDLER": "1"} | (env or {})
        try:
            ended = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return f"not finished in {limit} s"
        if ended.returncode:
            said = ended.stdout + ended.stderr
            print(*said.splitlines()[-60:], sep="\n", file=sys.stderr, flush=True)  # the line alone rarely says why
            found = re.search(r".*(?:refused: |error: ).*|.*(?<!ChildFailed)Error: .*|.*Signal \d+ .*", said)
            return found[0].strip() if found else f"exit code {ended.returncode}"
        rows = [json.loads(row) for row in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows for key in ("loss", "eval_loss") if key in row]


def furthest(losses, expected):
    """The largest relative difference of two lists of losses; the line of the one that failed in its place."""
    if isinstance(expected, str) or isinstance(losses, str):
        return expected if isinstance(expected, str) else losses
    if not expected or len(losses) != len(expected):
        return f"{len(losses)} losses, not {len(expected)}"
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def marked(name, value):
    """The processes that have an environment variable with this value: those of a launch, wherever they went."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def came_from(figures):
    """The command, the machine and the main versions; the file has all versions."""
    known = [f"{name} {version}" for name, version in figures["versions"].items() if version and name != "cuda"]
    return f"`{figures['command']}` ({figures['device']}; {', '.join(known[:4])}; {figures['date']})"


# --------------------------------------------------------------------------------------------------- trainings in turns


def watch(file, steps, port=0):
    """Records when each optimizer step of this process ends, and writes `file` at the last one. With a port it waits
    after each turn until in_turns() lets it go on."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if int(os.environ.get("RANK", 0)):
        return  # the other ranks wait for rank 0's gradients
    turns = socket.create_connection(("127.0.0.1", port)) if port else None
    began, ends = [], []

    def after_step(*_):
        began or began.append(time.time())
        ends.append((time.perf_counter(), time.process_time()))
        if len(ends) == steps:
            Path(file).write_text(json.dumps({"first_step": began[0], "ends": ends}))
        if turns and len(ends) % TURN == 0:
            turns.sendall(b".")
            turns.recv(1)

    register_optimizer_step_post_hook(after_step)


def in_turns(ways, turns, start):
    """{way: {wall, cpu, fastest: seconds of a step in each turn; losses: the last ones printed}}. turns: in all.

    wall: the median step by the clock; cpu: the median step's CPU time; fastest: the fastest step by the clock, which
    other work on the machine disturbs least.

    start(way, steps, folder, port) returns a Popen. It calls watch(folder/way.json, steps, port) and prints to
    folder/way.log. Raises SystemExit with the end of that log if a training does not get to its last step.
    """
    found = {way: {kind: [] for kind in KINDS} for way in ways}
    for _ in range(STARTS):
        for way, more in in_turns_once(ways, turns // STARTS, start).items():
            found[way] = {kind: found[way][kind] + more[kind] for kind in KINDS} | {"losses": more["losses"]}
    return found


def in_turns_once(ways, turns, start):
    steps = TURN * (turns + 1)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(300)
        running = {}
        for way in ways:  # one after another, so that it is known who connects
            child = start(way, steps, folder, server.getsockname()[1])
            stack.callback(child.kill)
            try:
                running[way] = child, stack.enter_context(server.accept()[0])
            except TimeoutError:
                failed(way, folder)
        for turn in range(turns + 1):
            first = turn % len(ways)
            for way in ways[first:] + ways[:first]:
                _, connection = running[way]
                if turn:
                    connection.sendall(b".")
                connection.recv(1) or failed(way, folder)
        found = {}
        for way, (child, connection) in running.items():
            connection.close()
            child.wait()
            file = folder / f"{way}.json"
            ends = json.loads(file.read_text())["ends"] if file.exists() else failed(way, folder)
            found[way] = {"wall": of_turns(ends, 0, statistics.median), "cpu": of_turns(ends, 1, statistics.median)}
            found[way]["fastest"] = of_turns(ends, 0, min)
            said = (folder / f"{way}.log").read_text()
            found[way]["losses"] = [float(part) for part in re.findall(r"(?<!_)loss'?[: ]+'?([\d.e-]+)", said)]
        return found


def of_turns(ends, at, typical):
    """The typical step of each turn but the first, in seconds, by the clock (at=0) or of CPU (at=1)."""
    found = []
    for first in range(TURN, len(ends), TURN):
        timed = [end[at] for end in ends[first + WARMUP_STEPS - 1 : first + TURN]]
        found.append(typical(b - a for a, b in zip(timed, timed[1:], strict=False)))
    return found


def failed(way, folder):
    raise SystemExit(f"{way} did not get to its last step:\n{(folder / f'{way}.log').read_text()[-3000:]}")


def ratio(way, base):
    """The ratio of each turn's step to that of `base`, both lists of seconds: median and quartiles over the turns."""
    ratios = [here / there for here, there in zip(way, base, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": median, "quartiles": [low, high]}
