"""Nothing is silent: shared/args.py has the bars of a run, tools/progress.py those of the commands."""

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, edited

from faithful.errors import Refused
from faithful.launch import process
from tools import accelerate_launch, compare, find

PROGRAM = """
import time
from shared import args
args.QUIET = 0.4
{}
"""
COMMAND = """
import runpy, sys
sys.argv = {1}
try: runpy.run_path('tools/{0}.py', run_name='__main__')
except SystemExit as ended: assert not ended.code
"""
# What a program does, and the lines that a log gets of it.
LOGGED = {
    "a short one says nothing": ("for _ in args.with_bar([1, 2], True): pass", ()),
    "an evaluation": ("for _ in args.with_bar([1] * 5, True): time.sleep(0.15)", (r"evaluation: [1-5]/5 \[\S+\]",)),
    "only on the main process": ("for _ in args.with_bar([1] * 5, False): time.sleep(0.15)", ()),
    "training": ("bar = args.bar('training', 9, True, 3, 64)\ntime.sleep(0.5); bar.update()\nbar.close()",
                 (r"training: 4/9 \[00:0[01]<.*, \d+ samples/s\]",)),
    "not where the console says something": (
        "console, bar = args.trackers(None)[0], args.bar('training', 9, True, 0, 64)\n"
        "args.Lines.logged = time.monotonic()\nfor _ in range(4): time.sleep(0.2); console.log({'loss': 1.0}, 1); bar.update()", ()),
    "a command": ("from tools import progress; progress.QUIET = 0.5\nwith progress.waiting('loading'): time.sleep(0.7)",
                  ("loading, 00:0[01]",)),
    "a command with a count": (
        "from tools import progress; progress.QUIET = 0.5\n"
        "with progress.waiting('traced:', 3) as bar: bar.update(); time.sleep(0.7)", (r"traced: [01]/3, 00:0\d",)),
    "predict": (COMMAND.format("predict", "['predict', '--help']"), (r"imports torch, 00:\d\d",)),
    "export": (COMMAND.format("export", "['export', '--help']"), (r"imports torch, 00:\d\d",)),
    "copy": ("import tempfile\n" + COMMAND.format("copy_recipe", "['copy', 'vit', 'single_bf16', tempfile.mkdtemp()]"),
             (r"copies, and builds the wheel, 00:\d\d",)),
    "what was silent before counts, too": (
        "time.sleep(2); from tools import progress; progress.QUIET = args.QUIET = 2\n"
        "with progress.waiting('imports'): pass\nwith progress.waiting('loading'): time.sleep(1.3)", (r"loading, 00:0\d",)),
    "a launch": ("from tools import progress; progress.QUIET = 0.5\n"
                 "with progress.phases(lambda: 'starting'): time.sleep(1.2)", (r"starting, [1-4] s",)),
    "a launch that trains": ("from tools import progress; progress.QUIET = 0.5\n"
                             "with progress.phases(lambda: None): time.sleep(1.2)", ()),
}  # fmt: skip


def test_nothing_is_starting_after_the_line_of_a_refusal(tmp_path, monkeypatch, capsys):
    told = tmp_path / "run"
    monkeypatch.setenv("FAITHFUL_TELL_FOLDER", str(told))
    assert accelerate_launch.phase(told) == "starting"
    process.print_error_line(Refused("no"), "no", None, print)
    assert "refused: no" in capsys.readouterr().err and accelerate_launch.phase(told) is None


@pytest.mark.parametrize("name", LOGGED)
def test_a_log_gets_a_line_at_times(name):
    program, wanted = LOGGED[name]
    env = {key: value for key, value in os.environ.items() if key != "TQDM_DISABLE"}
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(program)], cwd=ROOT, env=env, text=True,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert bool(lines) == bool(wanted), lines
    assert all(re.fullmatch("|".join(wanted), line) for line in lines), lines  # twice on a busy machine


def test_every_recipe_evaluates_under_a_bar():
    for name in find.names("recipe"):
        assert find.recipe(name).read_text().count("in options.with_bar(loader, ") == 1, name


# The files that a run has left when the launcher looks, and what it says then.
PHASES = {
    "nothing yet": ({}, None, "starting"),
    "asked": ({"asked": "0"}, None, "before the first step"),
    "asked on another machine": ({"asked": "4"}, None, None),
    "trains": ({"asked": "0"}, "running", None),
    "has finished": ({"asked": "0"}, "finished", "ending"),
    "has failed": ({}, "failed", "ending"),
    "wrote no record": ({}, "", None),
}


@pytest.mark.parametrize("name", PHASES)
def test_what_a_launcher_waits_for(name, tmp_path):
    files, status, said = PHASES[name]
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    if status is not None:
        (tmp_path / "run").write_text(str(tmp_path))
    if status:
        (tmp_path / "run.json").write_text(json.dumps({"status": status}))
    assert accelerate_launch.phase(tmp_path / "run") == said


def test_a_comparison_says_how_long_it_will_take(tmp_path, monkeypatch):
    record = {"status": "finished", "recipe": "vit", "final": {"step": 100}, "seen": {"loss_curve": []}, "started": "2026-11-22T10:00:00+0000",
              "finished": "2026-11-22T10:01:00+0000",
              "args": {"model": "vit_nano", "dataset": "digits", "gradient_accumulation_steps": 1}}  # fmt: skip
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text("")
    monkeypatch.setattr(compare.find, "RUNS", tmp_path / "none")  # in which other tests run meanwhile
    monkeypatch.setattr(compare.records, "read", lambda folder: {"record": record})
    said = compare.how_long([1] * 10, find.recipe("vit"), ["--max_steps", "200"], tmp_path)
    assert said.startswith("about 21 min in all, if a run takes what ") and said.endswith("/a took")
    assert compare.how_long([1, 2, 4], find.recipe("vit"), ["--max_steps", "200"], tmp_path).startswith(
        "about 14 min in"
    )
    unlike = compare.how_long([1] * 10, find.recipe("vit"), ["--model", "vit_tiny"], tmp_path)
    assert unlike == compare.how_long([1] * 3, ROOT / "tests" / "conftest.py", [], tmp_path)
    assert unlike == "how long: the first run will tell"


def test_setup_says_what_it_does(tmp_path):
    """In a log: a line at its beginning, then one every 4 seconds, and no list of packages."""
    said = re.search(r"^said\(\) \{.*?^\}\n", (ROOT / "launch.sh").read_text(), re.M | re.S)[0]
    said = edited(said, "sleep 4", "sleep 1")
    log = tmp_path / "log"  # the command ends when the line that counts has come, however busy the machine is
    command = f"echo ' + torch' >&2; until grep -q ', ' {log}; do sleep 0.1; done; exit 3"
    program = f'set -euo pipefail\nhere=x\n{said}said "installs it" bash -c "{command}"\n'
    with log.open("w") as file:
        assert subprocess.run(["bash", "-c", program], stderr=file, timeout=60).returncode == 3
    assert re.fullmatch(r"setup: installs it\n(setup: installs it, [1-9]\d? s\n)+", log.read_text())
