"""What benchmarks/peer_tests.py runs inside the processes of Accelerate's tests: a plugin of pytest, and a runner of
one of Accelerate's test scripts. Both append what happened to the file PEER_REPORT, a line of JSON each.

    python -m pytest -p peer_inside tests/test_scheduler.py
    accelerate launch -m faithful benchmarks/peer_inside.py test_sync SKIPPED_CHECK ...
"""

import faulthandler
import functools
import importlib
import inspect
import json
import os
import re
import sys


def say(name, outcome, why=None):
    with open(os.environ["PEER_REPORT"], "a") as file:
        file.write(json.dumps({"test": name, "outcome": outcome, "why": why}) + "\n")


def pytest_configure():
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


def main(script, skipped):
    module, inside, calls = importlib.import_module(f"accelerate.test_utils.scripts.{script}"), [], {}
    for name, value in list(vars(module).items()):
        if inspect.isfunction(value) and re.match("test_|check_|.*_check$", name):
            setattr(module, name, watched(name, value, skipped, inside, calls))
    module.main()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
