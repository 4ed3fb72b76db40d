"""`pip install .` installs faithful and amp8, and a script outside the project trains with them."""

import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import CONFIGS, ROOT, launched, record

SCRIPT = """
import torch
from faithful import Accelerator

accelerator, model = Accelerator(project_dir="run"), torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
for _ in range(3):
    x = torch.randn(8, 16, device=accelerator.device)
    accelerator.backward((model(x) - x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copy(ROOT / "pyproject.toml", source)
    for package in ("faithful", "amp8", "shared", "recipes"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)
    [made] = out.glob("*.whl")
    return made


def pip(*words):
    done = subprocess.run([sys.executable, "-m", "pip", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_wheel_holds_two_packages_and_all_of_them(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ours = {str(file.relative_to(ROOT)) for package in ("faithful", "amp8") for file in (ROOT / package).rglob("*.py")}
    assert names == ours


@pytest.mark.parametrize("config", ["ddp_bf16", "single_fp8_msamp_o2"])
def test_a_script_of_ones_own_trains_with_the_installed_packages(wheel, tmp_path, config):
    pip("install", "--no-deps", "--no-index", "--target", tmp_path / "installed", wheel)
    (tmp_path / "own.py").write_text(SCRIPT)
    out = launched(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yml"),
                   "own.py", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "installed")})  # fmt: skip
    assert out.returncode == 0, out.stderr[-3000:]
    assert f"asked: own | {config.split('_')[0]}" in out.stdout and "global batch" in out.stdout, out.stdout
    made = record(tmp_path / "run")
    assert made["status"] == "finished" and made["final"] is None and made["seen"]["loss_curve"][-1][0] == 3
    assert made["evidence"]["linear_converted"] == (2 if "fp8" in config else 0)
