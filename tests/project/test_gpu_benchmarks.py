"""benchmarks/card.py on a pretended GPU as a whole, launchers and all; what a layer of amp8 costs a GPU, counted."""

import json
import os
import sys
from pathlib import Path

import pytest
import speed
from conftest import ROOT, launched

NVIDIA_SMI = """#!/bin/sh
case "$*" in
    -L) echo "GPU 1: NVIDIA H100 (pretended)" ;;
    *compute_cap*) echo "GPU-1, NVIDIA H100 (pretended), 9.0" ;;
    *) echo "NVIDIA H100 (pretended), 580.00, 1980 MHz, 2619 MHz, 1980 MHz, 700.00 W, 30, 4 MiB" ;;
esac
"""
CUSTOMIZE = """
import os, sys
if any(part.endswith(("card.py", "vit.py", "gpt.py")) for part in sys.orig_argv):
    sys.path.append({tests!r})
    import pretend
    pretend.wear(count=1)
"""


@pytest.fixture
def everywhere(gpu, tmp_path):
    """The environment in which each Python process of a launch has a pretended GPU, and so has nvidia-smi."""
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(CUSTOMIZE.format(tests=str(ROOT / "tests")))
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(tmp_path)}


@pytest.mark.slow
def test_configs_are_launched_on_a_pretended_gpu(everywhere, tmp_path):
    file, only = tmp_path / "launched.json", ("single_bf16", "single_fp8_msamp_o3", "hsdp_bf16", "single_fp8_te_mxfp8")
    done = launched(
        sys.executable, "benchmarks/card.py", "--launch", str(file), "--only", *only, env=everywhere, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    runs = json.loads(file.read_text())["runs"]
    for config in ("single_bf16", "single_fp8_msamp_o3"):
        row = runs[config]
        assert row["exit"] == 0 and len(row["loss"]) == 20 and row["loss"][-1] < row["loss"][0], row
        assert row["step_seconds"] > 0 and row["processes"] == 1 and row["measured"].startswith("single | "), row
    for config in ("hsdp_bf16", "single_fp8_te_mxfp8"):
        assert runs[config]["exit"] == 2 and ".yml: not on this machine: " in runs[config]["said"], runs[config]


MOST = {  # way -> bytes for each element of x, y and w in a layer's passes, and for each of w in the update
    "O1": ({"x": 8, "y": 8, "w": 10}, 25),  # with the rounding of the weight's gradient
    "O2": ({"x": 8, "y": 8, "w": 10}, 15),  # torch's fused AdamW of fp32: 28
    "O3": ({"x": 8, "y": 8, "w": 6}, 17),
}


@pytest.mark.slow
def test_a_layer_of_a_level_moves_no_byte_in_vain():
    """A transposed copy by torch runs at a tenth of the memory's rate on an H100 (results/fp8_speed.json)."""
    found = speed.part("layers")
    for way, (passes, update) in MOST.items():
        assert found[way]["passes"]["bytes"] == passes and found[way]["update"]["bytes"]["w"] == update, found[way]
        assert found[way]["passes"]["turned"] == 0 and found[way]["update"]["turned"] < 1024, "a transposed copy"
        assert found[way]["passes"]["waits"] == found[way]["update"]["waits"] == 0
        assert found[way]["passes"]["launches"] <= 4 and found[way]["update"]["launches"] <= 17


@pytest.mark.slow
def test_a_compiled_layer_of_a_level_takes_few_kernels():
    """As many again would make a step of small layers wait for its host. None casts a weight's gradient."""
    found = speed.part("compiled")
    assert sum(map(len, found.pop("update").values())) <= 10, "of any number of layers, beside Adam's own"
    for passes in found.values():
        assert len(passes["forward"]) <= 6 and len(passes["backward"]) <= 7, passes


MOST_LAUNCHES = {"llama": 530, "vit": 1200}  # on an H200, at commit e30a4f4: 811 and 2,161 with what libraries add


@pytest.mark.slow
def test_a_compiled_step_of_a_level_takes_few_launches():
    """The host launches each by itself, and a step of small layers waits for it."""
    found = speed.part("launches")
    for model, most in MOST_LAUNCHES.items():
        assert found[model]["all"] <= most and found[model]["garbled"] == 0, found[model]
