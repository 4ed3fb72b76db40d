"""A machine with eight GPUs, as far as its launch can be tried without one: nvidia-smi is a script that lists them."""

import os
import sys
from pathlib import Path

import pytest
from conftest import launched

NVIDIA_SMI = """#!/bin/sh
case "$*" in
    *driver_version*) echo 570.86.15 ;;
    *compute_cap*) for i in 0 1 2 3 4 5 6 7; do echo "NVIDIA H100 80GB HBM3, 9.0"; done ;;
esac
"""


@pytest.fixture
def node(tmp_path):
    """The environment of a node with eight cards, as its driver lists them."""
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix}


def added(node, config, **env):
    """What launch.sh adds to a launch of `config`."""
    done = launched(sys.executable, "tools/check.py", "--quiet", config, env=node | env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("config", ["hsdp_bf16", "hsdp_fp8_msamp_o2", "tp_bf16"])
def test_a_mesh_keeps_its_number_of_processes(node, config):
    assert added(node, config) == ""


def test_other_files_run_on_all_cards_that_are_visible(node):
    assert added(node, "ddp_bf16") == added(node, "fsdp_bf16") == "--num_processes 8"
    assert added(node, "ddp_bf16", CUDA_VISIBLE_DEVICES="0,1,5") == "--num_processes 3"
    assert added(node, "ddp_bf16", CUDA_VISIBLE_DEVICES="") == ""  # a rehearsal with the file's own number
    assert added(node, "single_bf16") == ""
