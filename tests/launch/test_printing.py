"""What is printed is not the run, and what stands in a file says nothing to the terminal."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from conftest import launched, record, train

from faithful.errors import Refused
from faithful.launch import printing, process
from shared import args, text
from tools import cli, predict, show

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08\r\u202e\ud800"
OBEYED = ("\x1b", "\x07", "\x9b", "\x08", "\u202e")
CLOSED = {  # {how: (what the rank does before the script, whether a warning is due)}
    "stdout's reader is gone": lambda: os.dup2(gone(), 1),
    "stderr's reader is gone": lambda: os.dup2(gone(), 2),
    "both are gone": lambda: (os.dup2(gone(), 1), os.dup2(gone(), 2)),
    "stdout's disk is full": lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1),
    "stdout is closed": lambda: (os.close(1), setattr(sys, "stdout", None)),
    "stderr is closed": lambda: (os.close(2), setattr(sys, "stderr", None)),
}


def gone():
    """A pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    return write


def opened_again():
    """Streams as Python makes them at its start, for what the descriptors are now."""
    for name, number in printing.FILES.items():
        if getattr(sys, name) is not None:
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))


@pytest.mark.parametrize("how", CLOSED)
def test_a_run_goes_on_when_nobody_reads_what_it_prints(how, tmp_path):
    def before(rank):
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as in every Python
        CLOSED[how]()
        opened_again()

    steps = ("--max_steps", 3, "--save_steps", 2, "--eval_steps", 0, "--logging_steps", 1)
    run = train("single_fp32", tmp_path / "run", *steps, before=before)
    assert record(run)["status"] == "finished" and (run / "model" / "model.safetensors").exists()
    said = Path(f"{run}.log").read_text()
    assert said.count("warning: stdout cannot be written (No space left on device)") == ("full" in how), said
    assert "Traceback" not in said


TOOLS = {  # what a tool makes of a text of a stranger
    "a line": lambda: print(EVIL),
    "a line on stderr": lambda: print(EVIL, file=sys.stderr),
    "a table": lambda: print(*cli.columns([(EVIL, "a\nb"), ("c", EVIL)]), sep="\n"),
    "a refusal": lambda: refuse(args.Refused(EVIL)),
    "a refusal of faithful's": lambda: refuse(Refused(EVIL)),
    "a bad option": lambda: cli.parser("show", "").parse_args([EVIL]),
    "an error": lambda: refuse(ValueError(EVIL)),
}


def refuse(error):
    raise error


def test_what_a_run_prints_of_its_data_is_plain():
    assert text.readable(f"a\n\tß{EVIL}") == "a\n\tß" + printing.plain(EVIL).replace("\r", "\\r")


@pytest.fixture
def terminal(capfd, monkeypatch):
    """stdout and stderr as a tool has them; returns what came to the terminal."""
    for name, number in printing.FILES.items():
        monkeypatch.setattr(sys, name, open(number, "w", closefd=False))

    def came():
        sys.stdout.flush(), sys.stderr.flush()
        return "".join(capfd.readouterr())

    return came


@pytest.mark.parametrize("what", TOOLS)
def test_no_text_moves_the_terminal(what, terminal):
    try:
        cli.run(lambda _: TOOLS[what]())
    except SystemExit:
        pass
    except ValueError:
        sys.excepthook(*sys.exc_info())  # as Python does at last
    said = terminal()
    assert "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\x08" in said and "\\u202e" in said and "\\ud800" in said
    bars = what in ("a line on stderr", "an error")  # stderr keeps the \r of progress bars
    assert not [character for character in (*OBEYED, *"\r" * (not bars)) if character in said]
    assert "a\nb" not in said


def test_a_traceback_of_a_run_does_not_either(capsys):
    process.print_with_rank(sys.__excepthook__, ValueError, ValueError(EVIL), None)
    said = capsys.readouterr().err
    assert said.startswith("ValueError: \\x1b]0;owned") and not [c for c in (*OBEYED, "\r") if c in said]


def changed(file, **new):
    file.write_text(json.dumps(json.loads(file.read_text()) | new))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return train("single_fp32", tmp_path_factory.mktemp("made") / "run", "--max_steps", 1, "--eval_steps", 0)


@pytest.mark.parametrize("tool", ["show", "predict"])
def test_a_stranger_s_run_is_shown_without_what_it_says_to_the_terminal(made, tmp_path, tool, terminal):
    run = shutil.copytree(made, tmp_path / "run")
    changed(run / "run.json", notes=[EVIL[:-1]], error=EVIL[:-1])
    changed(run / "data.json", classes=[f"{EVIL[:-1]}{i}" for i in range(10)])
    image = tmp_path / "digit.png"
    from PIL import Image

    Image.new("L", (8, 8)).save(image)
    words = [run] if tool == "show" else [run, image]
    with pytest.raises(SystemExit) as end:
        module = predict if tool == "predict" else show
        sys.argv, before = ["tool", *map(str, words)], sys.argv
        try:
            cli.run(module.main)
        finally:
            sys.argv = before
    said = terminal()
    assert not end.value.code, said
    assert not [character for character in OBEYED if character in said]
    assert "\\x1b]0;owned" in said


def test_a_run_that_failed_before_a_step_is_shown(made, tmp_path):
    run = shutil.copytree(made, tmp_path / "run")
    seen = record(run)["seen"] | {"loss_curve": []}
    changed(run / "run.json", evidence=None, final=None, status="failed", error="no luck", args={}, seen=seen)
    assert "failed" in show.text(run) and "no luck" in show.text(run)


@pytest.mark.parametrize("where", ["| head -1", "> /dev/full", ">&- 2>&-"])
def test_a_launched_run_goes_on_whatever_becomes_of_what_it_prints(where, tmp_path):
    line = f'set -o pipefail; ./launch.sh ddp_fp32 vit --max_steps 3 --output_dir "{tmp_path}/run" {where}'
    done = launched("bash", "-c", line)
    assert done.returncode == 0 and record(tmp_path / "run")["status"] == "finished", done.stderr
    assert "Traceback" not in done.stderr


SHOW = f'"{sys.executable}" tools/show.py "$RUN"'


@pytest.mark.parametrize(
    "line, code",
    [(f"{SHOW} | true", 0), (f"{SHOW} > /dev/full", 1), (f"{SHOW} >&-", 0), ("./launch.sh ls > /dev/full", 1)],
)
def test_a_command_whose_reader_has_gone_ends_quietly(line, code, made):
    done = launched("bash", "-c", f"set -o pipefail; {line}", env={"RUN": str(made)})
    warning = "warning: stdout cannot be written (No space left on device): what is printed is lost\n"
    assert done.returncode == code and done.stderr == (warning if code else "")
