"""A copied recipe runs where nothing else of the project can be imported."""

import subprocess
import sys

import pytest
from conftest import ROOT, launched, record

from tools import copy_recipe as tool


def alone(folder, recipe, *argv):
    """Runs the recipe with `python -I`: neither PYTHONPATH nor the current folder is on the path."""
    command = [sys.executable, "-I", f"recipes/{recipe}.py", *map(str, argv)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("name", ["vit", "gpt"])
def test_it_runs_alone(tmp_path, name):
    written = tool.copy(name, "single_bf16", tmp_path / "mine")
    assert not any("amp8" in str(path) for path in written)
    assert sorted(p.relative_to(tmp_path / "mine") for p in (tmp_path / "mine").rglob("*") if p.is_file()) == written
    data = ("--dataset", ROOT / "shared", "--sequence_length", 16) if name == "gpt" else ()
    done = alone(tmp_path / "mine", name, "--max_steps", 2, *data, "--output_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr[-2000:]
    assert record(tmp_path / "run")["final"]["step"] == 2


def test_under_accelerate_with_its_own_config(tmp_path):
    """A copy with one of MS-AMP's levels runs under accelerate launch, in a folder outside the project."""
    tool.copy("vit", "ddp_fp8_msamp_o2", tmp_path / "mine")
    readme = (tmp_path / "mine" / "README.md").read_text()
    assert len(readme.splitlines()) <= 10
    [command] = [line.split() for line in readme.splitlines() if "accelerate launch" in line]
    out = str(tmp_path / "run")
    command = [*command[:2], "--main_process_port", "0", *command[2:]]
    done = launched(*command, "--max_steps", "2", "--output_dir", out, cwd=tmp_path / "mine", env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    assert record(out)["evidence"]["linear_converted"] == 16


def test_a_module_left_out_is_noticed(tmp_path):
    """A copy without one of the files does not run, so the tests above can fail."""
    tool.copy("vit", "single_bf16", tmp_path / "mine")
    (tmp_path / "mine" / "faithful" / "steps.py").unlink()
    done = alone(tmp_path / "mine", "vit", "--help")
    assert done.returncode != 0 and "No module named 'faithful.steps'" in done.stderr


def test_every_import_is_pinned_or_copied(tmp_path):
    for recipe in (path.stem for path in (ROOT / "recipes").glob("*.py")):
        folder = tmp_path / recipe
        tool.copy(recipe, "fsdp_fp8", folder)
        pinned = (folder / "requirements.txt").read_text()
        assert all("==" in line for line in pinned.splitlines()) and "torch==" in pinned and "torchvision==" in pinned
        for path in folder.rglob("*.py"):
            for name in tool.imports(path):
                top, *rest = name.split(".")
                if top in ("shared", "faithful", "amp8"):
                    for file in (f"{top}/__init__.py", *(f"{top}/{word}.py" for word in rest[:1])):
                        assert (folder / file).is_file() or not (ROOT / file).is_file(), f"{path}: {name}"
                elif top not in sys.stdlib_module_names and top not in tool.OPTIONAL:
                    packages = tool.PACKAGES.get(top, [top])
                    assert all(f"{package}==" in pinned for package in packages), f"{path}: {name}"


def test_a_zero_config_brings_its_engine(tmp_path):
    for config, there in (("zero2_bf16", True), ("ddp_bf16", False)):
        tool.copy("vit", config, tmp_path / config)
        assert ("deepspeed>=" in (tmp_path / config / "requirements.txt").read_text()) == there
