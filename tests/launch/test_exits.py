"""How a script ends: with its own exit code, through Python's own exit, and as it would without faithful if it makes no
Accelerator.

The scripts run in forks of one process that has imported faithful, from the outermost frame as `python script.py` does.
"""

import json
import re
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, STAYING, free_port, record
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from faithful.launch import process
from tools import accelerate_launch, elastic

# The process that forks. It imports faithful outside the main thread, where Python allows no signal handlers.
SERVER = """
import atexit, gc, json, os, runpy, signal, sys, threading, warnings
sys.path.insert(0, {root!r})
import accelerate, torch, torch._dynamo, datasets
torch.set_num_threads(1)
torch.ones(1, requires_grad=True).sum().backward()

def state():
    handlers = [str(signal.getsignal(number)) for number in signal.valid_signals()]
    hooks = [str(one) for one in (sys.excepthook, sys.exit, exit, threading.excepthook, sys.stdout, sys.stderr)]
    return handlers, hooks, atexit._ncallbacks(), threading.active_count(), dict(os.environ), list(warnings.filters)

signal.signal(signal.SIGTERM, print)
before = state()
threads = [threading.Thread(target=lambda: __import__("faithful.accelerator"))]
threads[0].start()
threads[0].join()
changed = [str(one) for one, other in zip(before, state()) if one != other]
print(json.dumps(["faithful.accelerator" in sys.modules, changed]), flush=True)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
gc.freeze()  # else the exit of each fork copies all memory

for line in sys.stdin:
    job, pids = json.loads(line), []
    for rank in range(job["ranks"]):
        pids.append(os.fork())
        if not pids[-1]:
            break
    if not pids[-1]:
        break
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
else:
    os._exit(0)

os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open(job["folder"] + "/out", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
os.dup2(1, 2)
os.chdir(job["folder"])
os.environ.update(job["env"] | (dict(RANK=str(rank), LOCAL_RANK=str(rank)) if job["ranks"] > 1 else {{}}))
sys.argv = ["script.py"]
signal.alarm(60)
if job["door"] is not None:  # python -m faithful
    sys.argv += job["door"]
    runpy.run_module("faithful", run_name="__main__", alter_sys=True)
else:
    exec(compile(open("script.py").read(), "script.py", "exec"), {{"__name__": "__main__"}})
"""

# A script is text: it may end in its outermost frame, and its last lines are what a test is about.
BEGIN = """
import os, signal, sys, tempfile, threading, time
import torch
from {package} import Accelerator

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def train(accelerator, steps=2):
    global model, optimizer
    if not accelerator._models:
        model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(steps):
        accelerator.backward(model(torch.randn(3, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

keep = tempfile.TemporaryDirectory(dir=".", prefix="temporary")
"""
OURS, THEIRS = (BEGIN.format(package=package) for package in ("faithful", "accelerate"))
TRAIN = f'{OURS}accelerator = Accelerator(project_dir="run")\n'


@pytest.fixture(scope="module")
def server():
    started = subprocess.Popen([sys.executable, "-c", SERVER.format(root=str(ROOT))], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True, bufsize=1)  # fmt: skip
    STAYING.add(started.pid)
    started.changed = json.loads(started.stdout.readline())
    yield started
    started.stdin.close()
    started.wait()
    STAYING.discard(started.pid)


@pytest.fixture
def end(server, tmp_path):
    def run(script, door=None, ranks=1):
        """(exit codes of all ranks, their output, status and error of the record or None). door: what comes after
        `python -m faithful`."""
        (tmp_path / "script.py").write_text(script)
        world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env = world if ranks > 1 else {}
        server.stdin.write(json.dumps({"folder": str(tmp_path), "door": door, "ranks": ranks, "env": env}) + "\n")
        codes = json.loads(server.stdout.readline())
        left = record(tmp_path / "run") if (tmp_path / "run" / "run.json").exists() else None
        code = codes[0] if ranks == 1 else codes
        # What is frozen is not freed, which triton's library tells of.
        said = re.sub(r"(nanobind: | - ).*\n|See https://nanobind\S*?\.html", "", (tmp_path / "out").read_text())
        return code, said, left and (left["status"], left["error"])

    return run


def test_the_import_changes_nothing_in_the_process(server):
    """No handler of signals, no hook, no thread, no exit handler and no environment variable is another after it."""
    assert server.changed == [True, []]


UNKNOWN = "the script ended before accelerator.end_training(), and its exit code is not known here"


DOORS = pytest.mark.parametrize("door", [None, ["script.py"]], ids=["import", "door"])


@DOORS
@pytest.mark.parametrize(
    ("last", "code", "status", "error"),
    [
        ("raise SystemExit(3)", 3, "failed", UNKNOWN),
        ("accelerator.end_training(); raise SystemExit(3)", 3, "finished", None),
        ("exit(3)", 3, "failed", "the script exited with 3"),
        ("quit(3)", 3, "failed", "the script exited with 3"),
        ("sys.exit(3)", 3, "failed", "the script exited with 3"),
        ("sys.exit('no')", 1, "failed", "the script exited with 1"),
        ("sys.exit()", 0, "finished", None),
        ("with open('x', 'w'): sys.exit(0)", 0, "finished", None),
        ("try: sys.exit(3)\nexcept SystemExit: pass", 0, "finished", None),
        ("1 / 0", 1, "failed", "ZeroDivisionError: division by zero"),
        ("sys.excepthook = lambda *_: print('my hook')\n1 / 0", 1, "failed", "ZeroDivisionError: division by zero"),
        ("try: 1 / 0\nfinally: os.kill(os.getpid(), signal.SIGINT)", 130, "failed", "interrupted"),
    ],
)
def test_a_script_ends_with_its_own_code_and_cleans_up(end, tmp_path, last, code, status, error, door):
    error = "the script exited with 3" if error == UNKNOWN and door else error
    last = last if "SIGINT" not in last else f"signal.signal(signal.SIGINT, signal.default_int_handler)\n{last}"
    assert end(f"{TRAIN}train(accelerator, {0 if code == 130 else 2})\n{last}", door)[::2] == (code, (status, error))
    assert not list(tmp_path.glob("temporary*"))


CAUGHT = "from faithful.errors import Refused\ntry: raise {}\nexcept Exception: {}"
HANDLED = "while the script handled it"


@DOORS
@pytest.mark.parametrize(
    ("error", "exits", "code", "left"),
    [
        ("Refused('no')", "exit()", 2, ("failed", "no")),  # as ema_pytorch does if it cannot copy a model
        ("Refused('no')", "sys.exit(1)", 1, ("failed", "no")),
        ("ValueError('no')", "exit()", 0, ("finished", None)),
        ("Refused('no')", "pass\nexit()", 0, ("finished", None)),
        ("Refused('no')", "1 / 0", 2, ("failed", f"no; {HANDLED}: ZeroDivisionError: division by zero")),
        ("Refused('no')", "accelerator.end_training(); raise", 2, ("failed", "no")),
        ("ValueError('no')", "accelerator.end_training(); raise", 1, ("failed", "ValueError: no")),
    ],
)
def test_a_refusal_that_a_script_catches_to_exit_is_one(end, error, exits, code, left, door):
    ended, said, found = end(TRAIN + "train(accelerator)\n" + CAUGHT.format(error, exits), door)
    refused = isinstance(left[1], str) and left[1].startswith("no")
    assert (ended, found) == (code, left) and said.count(f"refused: {left[1]}\n") == refused


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "python -m faithful [--config_wins] SCRIPT"),
        (("nowhere.py",), "no file nowhere.py in"),
        (("--conf", "a.py"), "--conf: options before a script are --config_wins, --help, --version"),
    ],
)
def test_a_mistyped_command_is_one_line(end, words, line):
    code, said, _ = end("", door=words)
    assert code == 2 and line in said and "Traceback" not in said


def test_a_program_that_makes_no_accelerator_ends_as_without_faithful(end):
    text = (
        "import sys\nfrom faithful import Accelerator\nhook = sys.excepthook\nassert hook is sys.__excepthook__\n1 / 0"
    )
    code, said, _ = end(text)
    assert code == 1 and "ZeroDivisionError" in said and "faithful" not in said.split("Traceback")[1]


def test_a_refusal_is_one_line_and_cleans_up(end, tmp_path):
    code, said, left = end(f'{OURS}accelerator = Accelerator(project_dir="run", dynamo_backend="inductor")\n')
    assert code == 2 and said.startswith("refused: ") and said.count("\n") == 1 and left is None
    assert not list(tmp_path.glob("temporary*"))


@pytest.mark.parametrize(
    ("last", "codes"),
    [
        ("", [0, 0]),
        ("accelerator.end_training()", [0, 0]),
        ("raise SystemExit(3)", [3, 3]),
        ("raise RuntimeError('here')", [1, 1]),
    ],
)
def test_two_processes_end_with_their_codes_and_clean_up(end, tmp_path, last, codes):
    assert end(f"{TRAIN}train(accelerator)\n{last}", ranks=2)[0] == codes
    assert not list(tmp_path.glob("temporary*"))


def test_the_thread_that_looks_for_a_deadlock_is_not_in_the_store_at_the_end(end):
    """Python ends a thread that comes back from C++ once it shuts down, and pybind11 aborts the process then."""
    busy = "from faithful.launch import rank_sync\nrank_sync.LOOKS, rank_sync.STANDS = 0, 1e-6\n"
    busy += "rank_sync.waits_in = lambda idle: (1, 'a call')\n"
    assert end(f"{busy}{TRAIN}train(accelerator)\n", ranks=2)[0] == [0, 0]


@pytest.mark.parametrize(
    "loading",
    ["persistent_workers=True))\nfor batch in loader: pass", "))\nbatches = iter(loader)\nnext(batches)"],
)
def test_an_evaluation_ends_while_its_loader_has_processes(end, loading):
    """Loader processes ignore SIGTERM, by which multiprocessing would end them."""
    loader = "loader = accelerator.prepare(torch.utils.data.DataLoader(list(range(99)), 4, num_workers=1, "
    code, said, _ = end(f"{TRAIN}{loader}{loading}\nprint('done')")
    assert code == 0 and "done\n" in said


OWN = "signal.signal(signal.SIGTERM, lambda *_: (print('mine'), sys.exit(9)))\n"
KILL = "os.kill(os.getpid(), signal.SIGTERM)\n"


@pytest.mark.parametrize("first", [True, False])
def test_a_scripts_own_handler_of_sigterm_stays(end, first):
    train = "train(accelerator)\n"
    code, said, left = end(TRAIN + (OWN + train if first else train + OWN) + train + KILL + train)
    assert code == 9 and "mine\n" in said and left == ("failed", "the script exited with 9")
    assert said.count("note: SIGTERM has another handler, which stays") == 1


def test_after_end_training_sigterm_ends_the_process(end):
    """There is no step any more after which the run could stop."""
    code, _, left = end(f"{TRAIN}train(accelerator)\naccelerator.end_training()\n{KILL}print('alive')")
    assert code == -signal.SIGTERM and left == ("finished", None)


def test_a_forked_child_is_a_process_of_its_own(end):
    """Its exit leaves the record of its parent alone, and SIGTERM ends it."""
    text = (
        f"{TRAIN}train(accelerator)\npid = os.fork()\nif pid == 0: sys.exit(0)\nassert os.waitpid(pid, 0)[1] == 0\n"
        "assert '\"running\"' in open('run/run.json').read()\n"
        "pid = os.fork()\nif pid == 0: time.sleep(20), os._exit(1)\nos.kill(pid, signal.SIGTERM)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM\nprint('survived')"
    )
    code, said, left = end(text)
    assert code == 0 and left == ("finished", None) and said.count("finished: ") == 1 and "survived" in said


@pytest.mark.parametrize(
    ("last", "left"), [("accelerator.end_training()", ("finished", None)), ("", ("failed", UNKNOWN))]
)
def test_training_in_a_thread(end, last, left):
    """Python allows signal handlers in the main thread only, which does not see how the thread ends."""
    body = "\n    ".join(["def body():", "global accelerator", 'accelerator = Accelerator(project_dir="run")',
                          "train(accelerator)", last or "1 / 0"])  # fmt: skip
    assert end(f"{OURS}{body}\nthread = threading.Thread(target=body)\nthread.start()\nthread.join()")[::2] == (0, left)


@pytest.mark.parametrize(
    ("last", "code", "left"),
    [
        ("", 0, ("finished", None)),
        ("1 / 0", 1, ("failed", "ZeroDivisionError: division by zero")),
        ("raise SystemExit(4)", 4, ("failed", "the script exited with 4")),
    ],
)
def test_a_child_of_multiprocessing_closes_its_record(end, last, code, left):
    """It ends with os._exit, without Python's exit handlers. The record of its parent is not its own."""
    text = f'{OURS}accelerator = Accelerator(project_dir="parent")\n' + (
        f"def body():\n    train(Accelerator(project_dir='run'))\n    {last}\n"
        "import multiprocessing\nchild = multiprocessing.get_context('fork').Process(target=body)\n"
        "child.start()\nchild.join()\nsys.exit(child.exitcode)"
    )
    assert end(text)[::2] == (code, left)


def test_an_interactive_session_goes_on_after_an_error(end):
    lines = ["train(accelerator)", "1 / 0", "train(accelerator)", "print('here')", "accelerator.end_training()"]
    said = f"import code\nconsole = code.InteractiveConsole(globals())\nfor line in {lines}: console.push(line)\n"
    code, said, left = end(TRAIN + "sys.ps1 = '>>> '\n" + said)
    assert code == 0 and "ZeroDivisionError" in said and "here" in said and left == ("finished", None)


@pytest.mark.parametrize("door", [["script.py"], None], ids=["True", "False"])
def test_ranks_that_the_script_forks_itself(end, door):
    """Accelerate's debug_launcher makes the process group and sets no rank. `python -m faithful` plans before it."""
    for processes, options, what in ((2, "", "| ddp x2"), (1, ", num_processes=1", "| single")):
        code, said, left = end(
            f"{THEIRS if door else OURS}import accelerate\ndef main():\n    accelerator = Accelerator(project_dir='run')\n"
            f"    train(accelerator)\n    assert accelerator.gather(torch.ones(1)).sum() == {processes}\n"
            f"accelerate.debug_launcher(main{options})\nprint('back')",
            door=door,
        )
        assert code == 0 and said.endswith("back\n") and what in said and left == ("finished", None), said


def test_without_a_rank_two_processes_are_refused(end):
    code, said, _ = end("import os\nos.environ['WORLD_SIZE'] = '2'\n" + TRAIN)
    assert code == 2 and "WORLD_SIZE is 2, but RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not set" in said


@pytest.mark.parametrize(
    ("codes", "told"),
    [
        ({0: 1, 1: -9}, (137, "rank 1 was ended by SIGKILL, perhaps because memory ran out")),
        ({0: -11, 1: 1}, (139, "rank 0 was ended by SIGSEGV")),
        (
            {0: 1, 1: -6},
            (
                134,
                "rank 1 was ended by SIGABRT, perhaps because it made another collective call than the "
                "other processes, or used other parts of the model: use each part in every process, if need be times 0, or "
                "a ddp config with find_unused_parameters",
            ),
        ),
        ({0: -15, 1: 1}, (143, "rank 0 was ended by SIGTERM")),  # torch ends the others by it: then the first counts
        ({0: 2, 1: 1}, (2, "rank 0 ended with exit code 2")),
    ],
)
def test_of_processes_that_end_at_once_the_killed_one_is_the_cause(monkeypatch, codes, told):
    failures = {rank: ProcessFailure(rank, 1, code, "") for rank, code in codes.items()}
    for failure in failures.values():
        failure.timestamp = 1
    monkeypatch.setattr(accelerate_launch.launch, "main", partial(raises, ChildFailedError("run", failures)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert accelerate_launch.run() == told


def raises(error):
    raise error


def test_a_process_waits_at_its_end_until_gloo_sleeps(monkeypatch):
    """A thread of gloo that asks for Python's lock later aborts a finished run, on a machine with much to do."""
    looks = iter(["R", "S", "D", "S", "S"])
    monkeypatch.setattr(process, "states_of_gloo", lambda: next(looks))
    process.wait_for_gloo()
    assert not list(looks)
    monkeypatch.undo()
    store = torch.distributed.HashStore()
    group = torch.distributed.ProcessGroupGloo(store, 0, 1)
    end = time.monotonic() + 30  # a thread names itself, once it runs
    while len(list(process.states_of_gloo())) < 2:
        assert time.monotonic() < end
    group.shutdown()


def test_processes_that_end_at_once_are_no_lost_launcher(monkeypatch):
    """The thread that watches a launcher may look before the launcher itself has: it said "lost each other for 610 s"."""
    agent, looked = object.__new__(elastic.Agent), []
    watcher = SimpleNamespace(start=lambda: looked.append(agent.looked))
    monkeypatch.setattr(elastic.threading, "Thread", lambda **_: watcher)
    monkeypatch.setattr(elastic.LocalElasticAgent, "_monitor_workers", lambda *_: RunResult(WorkerState.SUCCEEDED))
    agent._monitor_workers(None), agent._monitor_workers(None)
    assert len(looked) == 1 and looked[0] > 0
