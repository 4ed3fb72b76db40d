"""A model that is prepared beside the trained one and is not trained: a teacher, an average of weights."""

import copy
import re
import sys
from functools import partial

import pytest
import torch
from conftest import record, refusal, train
from torch import nn
from torch.distributed.fsdp import FSDPModule

from faithful import Accelerator
from faithful.checkpoint import checkpoints, tensor_keys


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return x + self.linear(x).relu()


def of_blocks():
    return nn.Sequential(*(Block() for _ in range(3)))


def of_layers():
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), Block())


def distill(make):
    """What a rank runs: a model learns from a copy of it."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    torch.manual_seed(0)
    model = make()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, teacher, optimizer = accelerator.prepare(model, teacher, optimizer)
    for _ in range(3):
        x = torch.randn(8, 32)
        with torch.no_grad():
            wanted = teacher(x)
        accelerator.backward((model(x) - 2 * wanted).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    units = [sum(isinstance(part, FSDPModule) for part in one.modules()) for one in (model, teacher)]
    accelerator.print(f"units: {units}", flush=True)
    accelerator.end_training()


def frozen_and_updated():
    """What a rank runs: an optimizer holds the parameters of a frozen model, too."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    frozen, trained = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
    optimizer = torch.optim.SGD([*frozen.parameters(), *trained.parameters()], 0.1)
    frozen, trained, optimizer = accelerator.prepare(frozen, trained, optimizer)
    accelerator.backward(trained(frozen(torch.ones(2, 8))).sum())
    held = [parameter for model in (frozen, trained) for parameter in model.parameters()]
    before = [parameter.clone() for parameter in held]
    optimizer.step()
    changed = [not torch.equal(old, new) for old, new in zip(before, held, strict=True)]
    accelerator.print(f"changed: {changed}", flush=True)
    accelerator.end_training()


def test_an_optimizer_may_hold_a_frozen_model_too(tmp_path):
    train("single_fp32", tmp_path / "run", script=frozen_and_updated)
    assert "changed: [False, False, True, True]" in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize("config", ["fsdp_bf16", "fsdp_bf16_ckpt"])
def test_it_is_sharded_by_its_blocks_as_the_trained_one(tmp_path, config):
    """Else it would be gathered as one piece, and be whole in each process while it computes."""
    train(config, tmp_path / "run", script=partial(distill, of_blocks))
    of_teacher = re.search(r"units: \[\d+, (\d+)\]", (tmp_path / "run.log").read_text()).group(1)
    assert int(of_teacher) == 3 + 1, "its blocks, and the rest"


def test_checkpointing_without_blocks_is_refused(tmp_path):
    log = refusal("fsdp_bf16_ckpt", tmp_path / "run", script=partial(distill, of_layers))
    assert "activation checkpointing computes blocks again, and Sequential names none" in log


def one_by_one(way):
    """What a rank runs: a model and its optimizer, prepared together or by `prepare_model` and `prepare_optimizer`, and
    a second model for evaluation alone."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    torch.manual_seed(0)
    model = of_blocks()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if way == "prepare":
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer = accelerator.prepare_model(model), accelerator.prepare_optimizer(optimizer)
    accelerator.prepare_model(of_layers(), evaluation_mode=True)
    for _ in range(2):
        accelerator.backward(model(torch.randn(8, 32)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(f"{accelerator.project_dir}/checkpoint-2")
    accelerator.end_training()


@pytest.mark.parametrize("config", ["ddp_fp8_msamp_o2", "single_fp8"])
def test_prepare_model_and_prepare_optimizer_train_as_prepare_does(tmp_path, config):
    """Accelerate has them as methods of their own, and a model would not be converted by them."""
    runs = [train(config, tmp_path / way, script=partial(one_by_one, way)) for way in ("prepare", "methods")]
    seen = [record(run)["evidence"] for run in runs]
    assert seen[0] == seen[1] and seen[0]["measured"]
    held = [dict(checkpoints.tensors_of(run / "checkpoint-2", 0)) for run in runs]
    assert held[0].keys() == held[1].keys()
    of_second = [name for name in held[0] if name.startswith(tensor_keys.of_model(1))]
    assert of_second and all(torch.equal(held[0][name], held[1][name]) for name in held[0] if "random/" not in name)
