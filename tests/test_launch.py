"""launch.sh: what it adds to a launch, its commands, and the set-up of an environment."""

import os
import shutil
import subprocess
import time

import pytest
from conftest import ROOT, launched, record


def test_without_arguments_it_helps():
    result = launched("./launch.sh")
    assert result.returncode == 0
    for word in ("demo", "setup", "check", "ls", "test", "CONFIG"):
        assert word in result.stdout


def test_ls_names_everything():
    result = launched("./launch.sh", "ls")
    for path in [*ROOT.glob("accelerate_configs/*.yml"), *ROOT.glob("recipes/*.py")]:
        assert f"  {path.stem} " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("ddp_bf17", "vit"), "no config"),
        (("ddp_bf16",), "which recipe?"),
        (("ddp_bf16", "vitt"), "no recipe"),
        (("--bananas",), "unknown option"),
        (("ddp_bf16", "--num_processes"), "needs a value"),
        (("setup", "fast"), "setup takes --extra"),
        (("show", "/nowhere"), "show takes the folder of a run"),
    ],
)
def test_mistakes_are_one_line(arguments, expected):
    result = launched("./launch.sh", *arguments)
    assert result.returncode != 0 and expected in result.stderr and len(result.stderr.splitlines()) == 1


def test_it_prints_the_line_and_becomes_it(tmp_path):
    out = tmp_path / "run"
    result = launched("./launch.sh", "single_bf16", "vit", "--max_steps", "2", "--output_dir", str(out))
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if line.startswith("accelerate launch"))
    assert "--config_file" in line and "recipes/vit.py --max_steps 2" in line
    assert record(out)["status"] == "finished"
    shown = launched("./launch.sh", "show", str(out))
    assert "single_bf16, finished" in shown.stdout and "accuracy" in shown.stdout


def test_launch_sh_adds_under_a_second(tmp_path):
    """launch.sh adds less than a second before `accelerate launch`, measured with an accelerate that exits at once."""
    fake = tmp_path / "accelerate" / "commands"
    fake.mkdir(parents=True)
    (tmp_path / "accelerate" / "__init__.py").touch()
    (fake / "__init__.py").touch()
    (fake / "launch.py").write_text("import sys; sys.exit(7)")
    env = {"PYTHONPATH": str(tmp_path)}
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert launched("./launch.sh", "ddp_bf16", "vit", env=env).returncode == 7
        times.append(time.perf_counter() - start)
    assert min(times) < 1.5  # measured: 0.5 s; the bound leaves room for a busy machine


def test_an_interrupted_set_up_is_finished_by_the_next(tmp_path):
    """A set-up that was killed in the middle is finished by the next one. The installer here only logs its calls."""
    for name in ("launch.sh", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    stub = tmp_path / ".venv" / "bin" / "python"
    stub.parent.mkdir(parents=True)
    stub.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/calls\n[ ! -f {tmp_path}/fail ]\n')
    stub.chmod(0o755)
    env = {"VIRTUAL_ENV": "", "CONDA_PREFIX": ""}

    def setup():
        (tmp_path / "calls").write_text("")
        result = subprocess.run(["./launch.sh", "setup"], cwd=tmp_path, env=os.environ | env, capture_output=True)
        return result.returncode, (tmp_path / "calls").read_text()

    assert setup()[0] == 0 and (tmp_path / ".venv" / ".complete").exists()
    assert setup() == (0, "")  # nothing to do
    (tmp_path / "requirements.txt").write_text("changed")
    code, calls = setup()
    assert code == 0 and "--require-hashes" in calls
    (tmp_path / ".venv" / ".complete").unlink()  # what an interrupted set-up leaves: no mark
    code, calls = setup()
    assert code == 0 and "--require-hashes" in calls


@pytest.mark.parametrize("with_git", [False])
def test_a_copied_recipe_runs_from_an_empty_folder(tmp_path, with_git):
    project = tmp_path / "mine"
    (project / "recipes").mkdir(parents=True)
    shutil.copy(ROOT / "recipes" / "vit.py", project / "recipes")
    for name in ("shared", "faithful"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "accelerate_configs" / "ddp_bf16.yml", project)
    env = {"PYTHONPATH": ""}
    result = launched("accelerate", "launch", "--config_file", "ddp_bf16.yml", "--main_process_port", "0",
                      "recipes/vit.py", "--max_steps", "2", "--output_dir", "out", cwd=project, env=env)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert record(project / "out")["status"] == "finished"


def test_the_pins_name_no_registry():
    text = (ROOT / "requirements.txt").read_text()
    assert "://" not in text and "--index" not in text and text.count("--hash=sha256:") > 100
