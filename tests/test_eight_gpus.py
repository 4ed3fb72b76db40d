"""A machine with eight GPUs, as far as its launch can be tried without one: nvidia-smi is a script that lists them."""

import json
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch
from conftest import launched, train
from torch.distributed.tensor import DTensor

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


@pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason="needs CUDA's torch, and no GPU")
def test_cards_that_torch_does_not_see_are_no_rehearsal(node, tmp_path):
    """A driver that is too old for torch's CUDA: nothing trains on the CPU, unless it is asked to."""
    line = ("./launch.sh", "single_bf16", "vit", "--max_steps", "1", "--output_dir", str(tmp_path / "run"))
    done = launched(*line, env=node)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    [said] = [line for line in done.stderr.splitlines() if line.startswith("refused")]
    assert "8 x NVIDIA H100 80GB HBM3, and torch does not see them: Found no NVIDIA driver" in said
    assert f"The driver is 570.86.15, torch is built for CUDA {torch.version.cuda}: update the driver" in said
    done = launched(*line, env=node | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0 and "rehearsal on a CPU" in done.stdout, done.stderr


def test_fsdp_keeps_no_whole_weights_while_it_shards(tmp_path):
    """fully_shard moves a block's whole weights to the device and frees them with the last reference to them. So after
    each of its calls nothing may refer to what it has sharded: here the whole model would stay on every GPU."""

    def watch(rank):
        import torch.distributed.fsdp as fsdp

        shards, whole, held = fsdp.fully_shard, {}, []

        def watched(modules, **options):
            for module in modules if isinstance(modules, list) else [modules]:
                whole.update({id(one): (weakref.ref(one), one.numel()) for one in module.parameters()
                              if not isinstance(one, DTensor)})  # fmt: skip
            shards(modules, **options)
            held.append(sum(count for alive, count in whole.values() if alive() is not None))
            (tmp_path / f"rank{rank}.json").write_text(json.dumps([held, sum(count for _, count in whole.values())]))

        fsdp.fully_shard = watched

    train("fsdp_bf16", tmp_path / "run", "--max_steps", 1, "--eval_steps", 0, before=watch)
    for rank in (0, 1):
        held, total = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(held) > 4 and total > 10**5  # four blocks, the last norm and head, the rest
        assert max(held) <= 10, held  # Accelerate's loop over the parameters leaves the head's bias in a variable
