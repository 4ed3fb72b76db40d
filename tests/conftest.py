"""Runs the recipes' own `main` in forked ranks. The session imports torch only once, which saves seconds per launch.

A rank gets the environment that `accelerate launch` exports for the config (tests/config/test_plan.py compares the two), so a
forked run takes the same path as a launched one. Tests look at the files that a run leaves.
"""

import collections
import contextlib
import functools
import gc
import importlib.util
import itertools
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
import traceback
from pathlib import Path

import accelerate
import psutil
import pytest
import torch
import tqdm.auto
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "accelerate_configs"
SCRIPTS = ROOT / "tests" / "scripts"  # that tests launch, and whose functions they give to Ranks
sys.path += [str(ROOT), str(SCRIPTS)]
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # its pool of processes, from before a fork, never answers a rank
torch.set_num_threads(1)  # a pool of threads would not survive the fork

from faithful import plan  # noqa: E402
from faithful.config import settings as config_module  # noqa: E402
from faithful.evidence import record as run_record  # noqa: E402
from faithful.launch import machine, process, same_start  # noqa: E402
from faithful.scripts import alone  # noqa: E402
from faithful.training.steps import Steps  # noqa: E402
from shared import diffusion, text  # noqa: E402
from shared.args import parse  # noqa: E402

# The first backward of the process decides whether forks can compute gradients. They can if it ran on real CPU tensors,
# but not if it ran on the fake tensors of tools/estimate.py.
torch.ones(1, requires_grad=True).sum().backward()
text.SAMPLE = 8  # tokens that a run of gpt writes at its end: 100 take longer than these tests' training
diffusion.sample = functools.partial(diffusion.sample, steps=5)  # of the images of an evaluation: 25 take longer too


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config, items):
    """Marks the tests that slow.txt names as slow, and those without `by hand: ` as CI's. Raises UsageError for a name
    that no test has."""
    lines = (ROOT / "tests" / "slow.txt").read_text().splitlines()
    by_hand = {line.removeprefix("by hand: ") for line in lines if line.startswith("by hand: ")}
    names = {line.removeprefix("by hand: ") for line in lines if line and not line.startswith("#")}
    ids = {item: {item.nodeid, item.nodeid.split("[")[0]} for item in items}
    for item in items:
        if ids[item] & names:
            item.add_marker(pytest.mark.slow)
            if not ids[item] & by_hand:
                item.add_marker(pytest.mark.ci)
    files = {item.nodeid.split("::")[0] for item in items}
    unknown = {name for name in names if name.split("::")[0] in files} - set().union(*ids.values())
    if unknown and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"slow.txt names tests that are not there: {', '.join(sorted(unknown))}")


UNFINISHED = collections.Counter()  # tests by file, in the process that starts pytest-xdist's workers


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node, ids):
    global reporter
    reporter = node.config.pluginmanager.getplugin("terminalreporter")
    if not UNFINISHED:
        UNFINISHED.update(name.split("::")[0] for name in ids)


def pytest_runtest_logfinish(nodeid):
    """Prints each file whose tests are done, because pytest-xdist prints dots alone."""
    file = nodeid.split("::")[0]
    if file in UNFINISHED:
        UNFINISHED[file] -= 1
        if not UNFINISHED[file]:
            reporter.write_line(f"{file} done, {UNFINISHED.total()} tests left")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds the broken promise to the report of a failed test: its docstring, or its name in words."""
    report = yield
    if report.failed:
        words = item.function.__doc__ or item.originalname.removeprefix("test_").replace("_", " ")
        report.sections.append(("the promise", words))
    return report


@pytest.fixture(autouse=True)
def no_state_is_left():
    """Fails a test that leaves Accelerate's state in this process: the ranks of the tests after it would each be alone."""
    yield
    left = [state.__name__ for state in (PartialState, AcceleratorState, GradientState) if state._shared_state]
    AcceleratorState._reset_state(reset_partial_state=True), GradientState._reset_state()
    assert not left, f"left in this process: {', '.join(left)}"


@functools.cache
def recipe(name):
    """The module of recipes/<name>.py. Its model's code is imported here, not in each forked rank."""
    for kind in {
        "gpt": ("gpt2", "llama"),
        "sft": ("gpt2", "llama"),
        "dpo": ("llama",),
        "bert": ("bert",),
        "embed": ("bert",),
    }.get(name, ()):
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


PORTS = itertools.count(os.getpid())


def free_port():
    """A port that only this worker of pytest-xdist takes, below those that the kernel gives to whoever names none."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    while True:
        port = 10000 + worker % 20 * 1000 + next(PORTS) % 1000
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def as_a_script(main):
    """Runs `main` like Python runs a script, to the end of the process."""
    from faithful import ending

    try:
        main()
        code = process.exit_code_of(None, ending.newest())
    except BaseException as problem:
        code = process.exit_code_of(problem, ending.newest())
    os._exit(code)


# Packages of others that a run imports on its way, which would take each forked rank more time than its training.
IMPORTED_ONCE = """datasets deepspeed.ops.op_builder.all_ops deepspeed.runtime.zero.muon.muon_optimizer tokenizers.trainers
    torch.utils._sympy.reference torchdata.stateful_dataloader transformers.modelcard transformers.modeling_utils
    transformers.optimization transformers.tokenization_utils_tokenizers""".split()


# What each rank would find anew, and the same, in a third of the time of a short training.
OWNERS = {"versions": machine, "git_state": run_record, "hash_of": same_start}
FOUND_ONCE = {name: functools.cache(getattr(owner, name)) for name, owner in OWNERS.items()}


@functools.cache
def not_installed(number):
    """The first `number` modules of sys.modules, without packages' and Python's own: same_start compares none of them."""
    stdlib, found = sysconfig.get_path("stdlib"), {}
    for name, module in itertools.islice(sys.modules.items(), number):
        file = getattr(module, "__file__", None) or stdlib
        if not file.startswith((sys.prefix, stdlib)) and Path(file).is_file():
            found[name] = module
            FOUND_ONCE["hash_of"](Path(file))
    return found


class SmallSys:
    """sys as a rank's same_start sees it: to read all modules would copy 10,000 pages of memory from the parent's."""

    argv = property(lambda self: sys.argv)

    def __init__(self):
        self.number = len(sys.modules)
        self.before = not_installed(self.number)

    @property
    def modules(self):
        new = max(0, len(sys.modules) - self.number)
        return self.before | dict(itertools.islice(reversed(sys.modules.items()), new))


class Ranks:
    """Forked ranks of one run; their output goes to <output_dir>.log.

    name: a recipe. script: the path of a script to run instead, or a function. before(rank): called in each rank before
    the run.
    """

    def __init__(self, config, argv, name="vit", processes=None, env=None, before=None, script=None):
        path = Path(config) if Path(config).suffix else CONFIGS / f"{config}.yml"
        mapping = yaml.safe_load(path.read_text())
        mapping["num_processes"] = processes or mapping["num_processes"]
        # the recipes' bars are on, as a user has them; those of other packages read the variable when they are imported
        exported = config_module.to_env(mapping) | {"TQDM_DISABLE": "0"} | (env or {})
        world = mapping["num_processes"] if "LOCAL_RANK" in exported else 1
        port, module = str(free_port()), None if script else recipe(name)
        for name in IMPORTED_ONCE:
            importlib.import_module(name)
        small_sys = SmallSys()
        FOUND_ONCE["versions"]()
        for file in filter(None, (run_record.__file__, module and module.__file__)):
            FOUND_ONCE["git_state"](Path(file))
        self.log = open(argv[argv.index("--output_dir") + 1] + ".log", "a+")
        self.pids = []
        gc.freeze()  # a rank's garbage collector would copy most of the memory that it shares with this process
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                try:
                    # All forks share the lock of this process's bars, and a killed one may hold it.
                    tqdm.tqdm.set_lock(threading.RLock()), tqdm.auto.tqdm.set_lock(tqdm.tqdm.get_lock())
                    torch.set_num_threads(1)  # makes a new thread pool after the fork, before two threads do it at once
                    if world > 1 or "LOCAL_RANK" in exported:
                        exported |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                        exported |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                    os.environ.update(exported)
                    os.dup2(self.log.fileno(), 1)
                    os.dup2(self.log.fileno(), 2)
                    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # not pytest's capture
                    sys.argv = ["mine.py" if callable(script) else str(script or module.__file__), *argv]
                    for function, owner in OWNERS.items():
                        setattr(owner, function, FOUND_ONCE[function])
                    same_start.sys = small_sys
                    alone.files = lambda script: [script]  # not other tests, which this process has imported
                    plan.launch_line = lambda: (["accelerate", "launch", "--config_file", str(path)], path)
                    if before:
                        before(rank)
                    if script is None:
                        script = lambda: module.main(parse(module.Arguments))  # noqa: E731
                    elif not callable(script):
                        script = functools.partial(runpy.run_path, str(script), run_name="__main__")
                    as_a_script(script)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(99)
            self.pids.append(pid)
        gc.unfreeze()

    def wait(self, timeout=240):
        """Returns the exit codes of all ranks. After the timeout it kills all of them and the test fails."""
        codes, end = {}, time.time() + timeout
        while len(codes) < len(self.pids):
            for pid in self.pids:
                if pid not in codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[pid] = os.waitstatus_to_exitcode(status)
            if any(codes.values()) and len(codes) < len(self.pids):
                end = min(end, time.time() + 20)  # like torchrun, don't wait forever for the peers of a failed rank
            if time.time() > end:
                for pid in set(self.pids) - set(codes):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[pid] = -9
            time.sleep(0.02)
        return [codes[pid] for pid in self.pids]

    def kill(self, number=signal.SIGKILL):
        for pid in self.pids:
            os.kill(pid, number)

    def text(self):
        self.log.seek(0)
        return self.log.read()


def train(config, output_dir, *argv, code=0, **kwargs):
    """Trains to the end and returns the run's folder. Fails with the run's output unless all ranks exit with `code`."""
    ranks = Ranks(config, ["--output_dir", str(output_dir), *map(str, argv)], **kwargs)
    codes = ranks.wait()
    assert set(codes) == {code}, f"exit codes {codes}\n{ranks.text()[-4000:]}"
    return Path(output_dir)


def resumed(config, run, *argv, without="checkpoint-6", **kwargs):
    """A copy of the run without its last checkpoint, gone on with: it ends as the run did."""
    part = shutil.copytree(run, run.parent / "resumed", ignore=shutil.ignore_patterns(without, "model"))
    train(config, part, *argv, "--resume_from_checkpoint", "latest", **kwargs)
    assert metrics(part) == metrics(run) and distance(part, run) == 0
    return part


def assert_exported(run, step, files):
    """A checkpoint of the run's last step, in so many files, is exported as the finished model's weights."""
    from tools import export

    out = run.parent / "exported.safetensors"
    assert f"from checkpoint-{step} ({files} files)" in export.export(run, out, step=step)
    made, final = load_file(out), weights(run)
    assert made.keys() == final.keys()
    assert all(made[name].equal(final[name].float()) and made[name].dtype == torch.float32 for name in made)


def refusal(config, output_dir, *argv, **kwargs):
    """What a run says that is refused: one line, and no traceback."""
    log = Path(f"{train(config, output_dir, *argv, code=2, **kwargs)}.log").read_text()
    assert log.count("refused: ") and "Traceback" not in log, log[-4000:]
    return log


def signalled(step, only=None, number=signal.SIGTERM):
    """Called before a run: all ranks or one send themselves a signal before the backward of a step."""

    def before(rank):
        from faithful import Accelerator
        from faithful.training import steps

        backward = Accelerator.backward

        def patched(self, loss):
            if self.steps.taken + 1 == step and only in (None, rank):
                os.kill(os.getpid(), number)
            backward(self, loss)

        Accelerator.backward, steps.AGREE_SECONDS = patched, 0

    return before


def write_record(run, **changes):
    """Writes the record of a run that has taken no step, with changes in it, into the folder `run`."""
    made = run_record.Record(plan.Plan(None, "single", 1, "fp32", "cpu"), run, run, True)
    made.write(Steps(1), [], None)
    (run / "run.json").write_text(json.dumps(record(run) | changes))


def record(run):
    return json.loads((Path(run) / "run.json").read_text())


def weights(run):
    return load_file(Path(run) / "model" / "model.safetensors")


def metrics(run):
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [row["loss"] for row in metrics(run) if "loss" in row]


def distance(a, b):
    """Largest absolute difference between two runs' weights."""
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


def edited(text, before, after):
    """The text with `after` in place of `before`, which must be there: else the test would try something else."""
    assert before in text, f"there is no {before!r}"
    return text.replace(before, after)


def activated(env=None):
    """The variables of a user who has activated this interpreter's environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "VIRTUAL_ENV": sys.prefix} | (env or {})


def launched(*command, cwd=ROOT, env=None, timeout=240):
    """Runs a command as a user types it."""
    return subprocess.run(command, cwd=cwd, env=activated(env), capture_output=True, text=True, timeout=timeout)


def started(log, *command):
    """Starts a command as a user types it, in a group of its own. Its output goes to the file `log`."""
    with open(log, "a") as out:
        return subprocess.Popen(command, cwd=ROOT, env=activated(), stdout=out, stderr=out, start_new_session=True)


def until(condition, log, process, seconds=120):
    """Waits for a condition, while the process goes on whose output is in the file `log`."""
    end = time.time() + seconds
    while not condition():
        assert time.time() < end and process.poll() is None, Path(log).read_text()
        time.sleep(0.05)


def fake_accelerate(folder, main):
    """Puts a package `accelerate` into `folder` whose launcher is `main`, the text of a function of that name."""
    package = folder / "accelerate"
    for name in ("__init__", "commands/__init__", "commands/config/config_args", "commands/launch", "utils/launch"):
        file, real = package / f"{name}.py", Path(accelerate.__file__).parent / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("" if "__init__" in name else real.read_text())  # the keys of configs are read from these
    source = (package / "commands" / "launch.py").read_text()
    main = f"multi_gpu_launcher = deepspeed_launcher = None\n{main}\nif False:\n"
    (package / "commands" / "launch.py").write_text(main + textwrap.indent(source, "    "))


def alive(marker):
    """Other processes whose command line contains `marker`."""
    found = []
    for other in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(other.info["cmdline"] or [])
        if marker in line and other.pid != os.getpid() and other.info["status"] != psutil.STATUS_ZOMBIE:
            found.append((other.pid, line))
    return found


def until_gone(folder, seconds=30):
    """Waits until no process works in a folder; else kills those that do, and fails."""
    end = time.time() + seconds
    while (left := alive(str(folder))) and time.time() < end:
        time.sleep(0.1)
    for pid, _ in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, left


STAYING = set()  # processes that several tests use


class PretendedGpu:
    """Runs recipes on tests/pretend.py's device, in forks of one process that has loaded it before torch."""

    def __init__(self):
        line = [sys.executable, str(ROOT / "tests" / "pretend.py")]
        self.server = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        STAYING.add(self.server.pid)
        self.missing = json.loads(self.server.stdout.readline())["missing"]

    def run(self, config, output_dir, *argv, **job):
        """Returns (exit codes, output) of a run. job: what `serve` of tests/pretend.py takes."""
        argv = ["--output_dir", str(output_dir), *map(str, argv)]
        self.server.stdin.write(json.dumps({"config": str(config), "argv": argv} | job) + "\n")
        answer = json.loads(self.server.stdout.readline())
        return answer["exit_codes"], answer["text"]

    def train(self, config, output_dir, *argv, code=0, **job):
        """Trains to the end and returns the folder. Fails with the run's output unless all ranks exit with `code`."""
        codes, text = self.run(config, output_dir, *argv, **job)
        assert set(codes) == {code}, f"exit codes {codes}\n{text[-4000:]}"
        return Path(output_dir)


@pytest.fixture(scope="session")
def gpu():
    """A pretended GPU. Tests that use it are skipped, with the reason, if it cannot be built here."""
    pretended = PretendedGpu()
    if pretended.missing:
        pretended.server.wait()
        pytest.skip(pretended.missing)
    yield pretended
    pretended.server.stdin.close()
    pretended.server.wait()
    STAYING.discard(pretended.server.pid)


@pytest.fixture(scope="session", autouse=True)
def compiled_code_of_this_session(tmp_path_factory):
    """torch's cache of compiled code takes what was compiled for another instruction set, or what a killed process left
    half written: the results are garbage, or the process aborts."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(autouse=True)
def no_leftovers():
    """Fails a test that leaves a process behind, which would slow down every later test."""
    yield
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the quick way to know that there is none
        return
    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in STAYING]
    for child in children:
        child.kill()
    psutil.wait_procs(children, 10)  # else it is left behind by every later test, too
    assert not children, f"left behind: {children}"
