"""Runs Accelerate's own tests with its Accelerator and with ours: which pass with both, and why others do not.

    python benchmarks/peer_tests.py --output results/peer_tests.json
    python benchmarks/peer_tests.py --only scheduler test_sync --output results/peer_tests.json
    python benchmarks/peer_tests.py --repository accelerate --output results/peer_tests.json

The tests are those of the source distribution of the installed Accelerate, which pip downloads from the package index,
and the test scripts inside the installed package. Each runs once as it is and once with our class in its place, as
`python -m faithful` puts it there. Their files are not changed.

test     a test of pytest, in one process; some of them fork two
check    a function of a script whose name begins with test_ or check_ or ends with _check, each call of it, and the
         script's end, launched by `accelerate launch` with one process and with two. A check that fails is left out of
         the next launch of its script, so that those after it are seen too

What Accelerate itself does not pass here (no GPU, no network, packages that are missing) is not counted. With
--repository, a clone of Accelerate, its examples run too, as tests/test_examples.py launches them. They ask for models
of a hub; a small one with random weights takes their place.
"""

import concurrent.futures
import contextlib
import faulthandler
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from pathlib import Path

import clients
import psutil
from harness import ROOT, arguments, command, marked, save

SCRIPTS = {  # script -> numbers of processes
    "test_script": (1, 2),
    "test_sync": (1, 2),
    "test_ops": (1, 2),
    "test_distributed_data_loop": (2,),
    "external_deps.test_metrics": (1, 2),
}
PACKAGES = ("accelerate", "torchdata", "parameterized", "pytest", "datasets", "transformers")
NEEDS = ("parameterized", "torchdata", "pytest_timeout")  # without them some tests are not even collected
EXAMPLES = "test_examples.py"  # needs the examples, which the source distribution does not have
NOT_COUNTED = "test_free_memory_dereferences_prepared_components"  # reads the whole machine's free memory: chance
DEFAULT_FOLDER = "without a project_dir a run still has a folder of its own, so a tracker that needs one gets it"
REASONS = {  # difference -> why it is a promise of ours
    "test_data_loader.py::DataLoaderTester::test_ensure_dataloader_gets_cleaned_up":
        "an Accelerator lives until the process ends, because its record is closed then; free_memory frees the models",
    "test_tracking.py::RegisterTrackerClassTest::test_register_requires_logging_directory": DEFAULT_FOLDER,
    "test_tracking.py::TensorBoardTrackingTest::test_project_dir": DEFAULT_FOLDER,
}  # fmt: skip


# -------------------- in the processes of the tests: what happened goes to the file PEER_REPORT, a line of JSON each


def say(name, outcome, why=None):
    with open(os.environ["PEER_REPORT"], "a") as file:
        file.write(json.dumps({"test": name, "outcome": outcome, "why": why}) + "\n")


def pytest_configure():
    """This and the other hooks: this module is a plugin of the pytest that runs Accelerate's tests."""
    if os.environ.get("PEER_CLASS") == "faithful":
        from faithful.__main__ import take_its_place

        take_its_place()
        launch_ours()


def launch_ours():
    """Tests that launch a script by `accelerate launch` launch it with `-m faithful`."""
    from accelerate.test_utils import testing

    plain = testing.run_command

    @functools.wraps(plain)
    def run_command(command, *args, **kwargs):
        at = next((at for at, word in enumerate(command) if str(word).endswith(".py")), None)
        if at and command[:2] == ["accelerate", "launch"]:
            command = [*command[:at], "-m", "faithful", *command[at:]]
        return plain(command, *args, **kwargs)

    testing.run_command = run_command


def pytest_runtest_logstart(nodeid):
    say(nodeid.removeprefix("tests/"), "begun")


def pytest_runtest_logreport(report):
    """Setup and teardown are named only if they fail or skip. The last line of a test counts."""
    if report.outcome != "passed" or report.when == "call":
        crash = getattr(report.longrepr, "reprcrash", None)
        why = crash.message if crash else report.longrepr and str(report.longrepr)[-300:]
        say(report.nodeid.removeprefix("tests/"), report.outcome, why)


def pytest_sessionfinish():
    faulthandler.dump_traceback_later(60, exit=True)  # prints `Timeout` and ends a process that does not end


def watched(name, function, skipped, inside, calls):
    """`function`, a check of a script, which reports how it ended. One that is in `skipped` is not called."""

    @functools.wraps(function)
    def check(*args, **kwargs):
        if inside:  # called by another check, which reports
            return function(*args, **kwargs)
        calls[name] = calls.get(name, 0) + 1
        label = name if calls[name] == 1 else f"{name} {calls[name]}"
        if label in skipped:
            return None
        say(label, "begun")
        inside.append(label)
        try:
            result = function(*args, **kwargs)
        except BaseException as problem:
            say(label, "failed", f"{type(problem).__name__}: {problem}")
            raise
        finally:
            inside.pop()
        say(label, "passed")
        return result

    return check


def checks_inside(script, skipped):
    """Runs one of Accelerate's test scripts in this process, without the checks that are `skipped`."""
    module, inside, calls = importlib.import_module(f"accelerate.test_utils.scripts.{script}"), [], {}
    for name, value in list(vars(module).items()):
        if inspect.isfunction(value) and re.match("test_|check_|.*_check$", name):
            setattr(module, name, watched(name, value, skipped, inside, calls))
    module.main()


# ---------------------------------------------------------------------------------------------------- their launches


def missing():
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


def source():
    """A new folder with the tests of the installed Accelerate."""
    if missing():
        raise SystemExit(f"Accelerate's tests need {', '.join(missing())}: ./launch.sh setup --extra dev")
    folder, version = Path(tempfile.mkdtemp(prefix="peers-")), importlib.metadata.version("accelerate")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--no-binary", ":all:", "--dest", folder, f"accelerate=={version}"], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"pip has no source distribution of accelerate {version}: {done.stderr.strip()[-300:]}")
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def environment(ours, report):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FAITHFUL_"))}
    paths = [ROOT, ROOT / "benchmarks", report.parent, os.environ.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RUN_SLOW": "1", "PEER_REPORT": str(report)}
    env["HF_HOME"] = str(report.parent / "home")  # no config of this machine's user
    return env | {"PEER_CLASS": "faithful" if ours else "accelerate"}


def run(command, ours, cwd, env=None, timeout=1200):
    """(the lines that the processes reported, exit code or None after the timeout, the last error line)."""
    report = Path(tempfile.mkstemp(prefix="report-", dir=cwd)[1])
    env, code = environment(ours, report) | (env or {}), None
    with open(f"{report}.log", "w+") as log:  # not a pipe, which processes that are left behind would keep open
        with contextlib.suppress(subprocess.TimeoutExpired):
            whole = {"stdout": log, "stderr": log, "timeout": timeout}
            code = subprocess.run(list(map(str, command)), cwd=cwd, env=env, **whole).returncode
        end_all(report)
        log.seek(0)
        said = log.read()
    code = None if "Timeout (0:01:00)!" in said else code  # pytest_sessionfinish waited for its end
    errors = [
        line for line in said.splitlines() if line.startswith(("refused:", "error:", "ERROR")) or "Error: " in line
    ]
    return [json.loads(line) for line in report.read_text().splitlines()], code, (errors or ["?"])[0].strip()


def end_all(report):
    """Ends the processes that write to `report`: some are in sessions of their own, some have lost their parent."""
    for process in marked("PEER_REPORT", str(report)):
        with contextlib.suppress(psutil.Error):
            process.kill()


def tests_of(file, ours, cwd):
    """{test: None if it passed, else why not} of a file of tests; those that were skipped are left out."""
    words = ["-m", "pytest", "-p", "peer_tests", "-p", "no:cacheprovider", "-q", "--timeout", "120", "-o", "addopts="]
    lines, code, error = run([sys.executable, *words, "--rootdir", file.parent.parent, file], ours, cwd)
    ended = {line["test"]: line for line in lines}
    if ended or code not in (0, 1, 5):  # 5: no test was collected
        right, why = code in (0, 1, 5), "the process does not end" if code is None else f"exit code {code}: {error}"
        ended[f"{file.name}::its end"] = {"outcome": "passed" if right else "failed", "why": why}
    return {
        name: None if line["outcome"] == "passed" else line["why"] or "the process ended"
        for name, line in ended.items()
        if line["outcome"] != "skipped" and not name.endswith(NOT_COUNTED)
    }


def checks_of(script, processes, ours, cwd, left_out=()):
    """{check: None if it passed, else why not} of a script on `processes` processes. left_out: checks not to run."""
    launch = ["-m", "accelerate.commands.launch", "--num_machines", "1", "--num_processes", processes]
    launch += ["--multi_gpu", "--main_process_port", "0"] if processes > 1 else []
    env = {} if ours else {"ACCELERATE_USE_CPU": "true"}  # without it Accelerate runs two times one process
    found, inside = {}, [__file__, "--inside"]
    while True:
        name = f"{script} on {processes}: "
        skipped = [check for check, why in found.items() if why]
        skipped += [check.removeprefix(name) for check in left_out if check.startswith(name)]
        words = [*(["-m", "faithful"] if ours else []), *inside, script, *skipped]
        lines, code, error = run([sys.executable, *launch, *words], ours, cwd, env, timeout=120)
        failed = {line["test"]: line["why"] for line in lines if line["outcome"] == "failed"}
        began, passed = ([line["test"] for line in lines if line["outcome"] == what] for what in ("begun", "passed"))
        if not failed and code != 0:
            where = next((check for check in began if passed.count(check) < processes), "its end")
            failed = {where: "no end in 120 s" if code is None else error}
        found |= dict.fromkeys(passed) | dict(list(failed.items())[:1])
        if not failed or "its end" in failed:
            return {name + check: why for check, why in ({"its end": None} | found).items()}


def examples(repository, folder):
    """Copies Accelerate's examples and their data into `folder`, beside small models under the names that the examples
    ask a hub for."""
    for name in ("examples", "tests"):
        shutil.copytree(Path(repository, name), folder / name)
    clients.language_models(folder)


def table(files, scripts, folder, repository=None, classes=("accelerate", "faithful"), left_out=()):
    """{class: {test: None if it passed, else why not}}. Two files or scripts run at a time."""
    jobs = [(tests_of, (file,)) for file in files]
    jobs += [
        (functools.partial(checks_of, left_out=left_out), (script, n)) for script in scripts for n in SCRIPTS[script]
    ]
    found, preparing = {name: {} for name in classes}, threading.Lock()

    def one(job):
        (function, args), which = job
        cwd = Path(tempfile.mkdtemp(dir=folder))
        (cwd / "evaluate.py").write_text(clients.EVALUATE)
        if args[0] in files and args[0].name == EXAMPLES:
            with preparing:  # transformers' lazy imports are not for two threads
                examples(repository, cwd)
        result = function(*args, which == "faithful", cwd)
        name = args[0].name if args[0] in files else "{} on {}".format(*args)
        print(f"{which}: {name}: {sum(why is None for why in result.values())} of {len(result)}", flush=True)
        return which, result

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for which, result in pool.map(one, [(job, name) for job in jobs for name in classes]):
            found[which] |= result
    return found


def differences(found):
    """[a row for each test that passes with Accelerate and not with ours]."""
    theirs, ours = found["accelerate"], found["faithful"]
    lost = [name for name, why in sorted(theirs.items()) if why is None and ours.get(name, "not run") is not None]
    why = {name: in_words(ours.get(name, "not run")) for name in lost}
    return [{"test": name, "why": why[name], "reason": REASONS.get(name)} for name in lost]


def part_of(name):
    """The file of a test, or the script and number of processes of a check."""
    return name.partition(":")[0]


def in_words(why):
    """The line of an error that names it, the last one where processes are inside, without this machine's paths."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Refused|Diverged|Exception)\b: \S", line)]
    refused = [line for line in lines if line.startswith("refused: ")]  # of a process that the test launched
    return re.sub(r"(/[\w.-]+)+/", ".../", (refused[:1] + named[-1:] + lines)[0])[:300]


def chosen(folder, only=(), examples=False):
    """(the files, the scripts) with a word of `only` in their names; all of them without words."""
    files = {file.name: file for file in sorted((folder / "tests").glob("test_*.py"))}
    names = [name for name in [*files, *SCRIPTS] if not only or any(word in name for word in only)]
    names = [name for name in names if examples or name != EXAMPLES]
    return [files[name] for name in names if name in files], [name for name in names if name in SCRIPTS]


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    parser.add_argument("--only", nargs="+", default=(), help="parts of the names of files and scripts")
    parser.add_argument("--repository", type=Path, help="a clone of Accelerate, for its examples")
    args = parser.parse_args()
    folder = source()
    found = table(*chosen(folder, args.only, args.repository is not None), folder, args.repository)
    theirs, ours = found["accelerate"], found["faithful"]
    rows = {name: [why is None, ours.get(name, "") is None] for name, why in theirs.items()}
    lost, said = differences(found), command()
    if args.only and args.output.exists():  # what did not run again stays
        before, again = json.loads(args.output.read_text()), {part_of(name) for name in rows}
        rows |= {name: both for name, both in before["rows"].items() if part_of(name) not in again}
        lost += [
            row | {"reason": REASONS.get(row["test"])}
            for row in before["differences"]
            if part_of(row["test"]) not in again
        ]
        said = f"{before['command']} and {said}"
    rows, lost = dict(sorted(rows.items())), sorted(lost, key=lambda row: row["test"])
    passed = {"tests": [both for name, both in rows.items() if "::" in name and both[0]]}
    passed["checks"] = [both for name, both in rows.items() if "::" not in name and both[0]]
    counts = {kind: f"{sum(mine for _, mine in all)} of {len(all)}" for kind, all in passed.items()}
    print(counts)
    save(args.output, {"command": said, "passed": counts, "differences": lost, "rows": rows}, PACKAGES)
    shutil.rmtree(folder.parent)
    if any(row["reason"] is None for row in lost):
        raise SystemExit("differences without a reason: cure them, or write a reason into REASONS")


if __name__ == "__main__":
    checks_inside(sys.argv[2], sys.argv[3:]) if "--inside" in sys.argv[:2] else main()
