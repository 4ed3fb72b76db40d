"""./launch.sh setup --cpu: which packages it asks for, without a download."""

import os
import re
import shutil
import subprocess

import pytest
from conftest import ROOT

# Stands where .venv has its python: notes what it is asked for. Of the indexes, INDEX has torch's builds for CPUs.
PYTHON = """#!/usr/bin/env bash
echo "$*" >> {folder}/calls
case "$*" in
    *--dry-run*--torch-backend*) [ "$INDEX" = uv ] ;;
    *--dry-run*) [ "$INDEX" = own ] ;;
esac
"""
PINS = re.findall(r"^(torch(?:vision)?==\S+)", (ROOT / "requirements.txt").read_text(), re.M)
PAIR = [f"{pin}+cpu" for pin in PINS]


def set_up(folder, index, *words):
    """Runs ./launch.sh setup. Returns (exit code, stderr, what was installed, a line each)."""
    for name in ("launch.sh", "requirements.txt", "pyproject.toml"):
        if not (folder / name).exists():
            shutil.copy(ROOT / name, folder)
    (folder / "calls").write_text("")
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(PYTHON.format(folder=folder))
    python.chmod(0o755)
    env = os.environ | {"INDEX": index}
    done = subprocess.run([folder / "launch.sh", "setup", *words], env=env, capture_output=True, text=True, timeout=60)
    calls = (folder / "calls").read_text().splitlines()
    installed = [call for call in calls if call.startswith("-m uv pip install") and "--dry-run" not in call]
    return done.returncode, done.stderr, installed


@pytest.mark.parametrize(("index", "way"), [("own", []), ("uv", ["--torch-backend", "cpu"])])
def test_the_pinned_builds_for_cpus_are_installed_where_an_index_has_them(tmp_path, index, way):
    code, said, [first, second] = set_up(tmp_path, index, "--cpu", "--extra", "photos")
    assert code == 0 and "GB" not in said and len(PAIR) == 2, said
    assert first.split()[4:] == [*way, *PAIR, "-r", f"{tmp_path}/pyproject.toml", "--extra", "recipes",
                                 "--constraints", f"{tmp_path}/.venv/constraints.txt"]  # fmt: skip
    assert "--extra photos" in second and (tmp_path / ".venv" / ".complete").read_text().endswith("photos cpu\n")
    pins = (tmp_path / ".venv" / "constraints.txt").read_text().splitlines()
    assert len(pins) > 50 and all(pin.count("==") == 1 or ";" in pin for pin in pins)
    names = [pin.split("==")[0] for pin in pins if ";" not in pin]
    assert len(names) == len(set(names)), "a package with two versions has a marker"


def test_without_such_an_index_one_line_says_how_to_go_on(tmp_path):
    code, said, installed = set_up(tmp_path, "none", "--cpu")
    last = said.splitlines()[-1]
    assert code == 2 and not installed and not (tmp_path / ".venv" / ".complete").exists()
    assert last.startswith(f"error: no index has {' '.join(PAIR)}: ./launch.sh setup installs the builds for GPUs")


def test_without_it_the_size_is_said_before(tmp_path):
    code, said, [installed] = set_up(tmp_path, "own")
    assert code == 0 and "--require-hashes" in installed
    assert "(6 GB, with torch for GPUs; setup --cpu: for CPUs)" in said


def test_an_interrupted_set_up_is_finished_by_the_next(tmp_path):
    mark = tmp_path / ".venv" / ".complete"
    assert set_up(tmp_path, "own")[0] == 0 and mark.exists()
    assert set_up(tmp_path, "own")[::2] == (0, []), "nothing to do"
    for change in (lambda: (tmp_path / "requirements.txt").write_text("changed"), mark.unlink):
        change()  # a set-up that was killed leaves no mark
        code, _, [installed] = set_up(tmp_path, "own")
        assert code == 0 and "--require-hashes" in installed


def test_a_word_that_setup_does_not_know():
    done = subprocess.run([ROOT / "launch.sh", "setup", "--gpu"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "error: setup takes --cpu and --extra NAME, not --gpu\n"
