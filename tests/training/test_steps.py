"""Processes take their optimizer steps together. How many backward passes each has had before is its own."""

import functools
import re
import sys

import pytest
import torch
from conftest import Ranks, train
from torch import nn

from faithful import Accelerator
from faithful.launch import rank_sync


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def batches():
    """[step][process][micro-batch]"""
    torch.manual_seed(1)
    return torch.randn(4, 2, 3, 4, 16)


def loss_of(model, x):
    return (model(x).float() - x).square().mean()


# Each trains a step: (accelerator, model, the micro-batches of this process)


def skips_some(accelerator, model, optimizer, micro_batches):
    """One process has nothing to learn in the second micro-batch."""
    for at, x in enumerate(micro_batches):
        with accelerator.accumulate(model):
            if not left_out(accelerator.process_index, at):
                accelerator.backward(loss_of(model, x))
                optimizer.step()
                optimizer.zero_grad()


def by_itself(accelerator, model, optimizer, micro_batches):
    """Without accumulate(), and with as many backward passes as there are micro-batches to learn from."""
    mine = [x for at, x in enumerate(micro_batches) if not left_out(accelerator.process_index, at)]
    for x in mine[:-1]:
        with accelerator.no_sync(model):
            accelerator.backward(loss_of(model, x) / 3)
    accelerator.backward(loss_of(model, mine[-1]) / 3)
    optimizer.step()
    optimizer.zero_grad()


def averages_itself(accelerator, model, optimizer, micro_batches):
    """One process may have none at all, as the script averages the gradients."""
    with accelerator.no_sync(model):
        for at, x in enumerate(micro_batches):
            if accelerator.process_index == 0 or left_out(0, at):
                continue
            accelerator.backward(loss_of(model, x) / 3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = accelerator.reduce(parameter.grad, "mean")
    optimizer.step()
    optimizer.zero_grad()


def left_out(process, at):
    return process == 1 and at == 1


def learned(way, process, at):
    return process == 1 if way is averages_itself else not left_out(process, at)


def trained(way, poisoned=False):
    """What a rank runs."""
    accelerator = Accelerator(project_dir=sys.argv[2], gradient_accumulation_steps=3 if way is skips_some else 1)
    model = built()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    for step, of_processes in enumerate(batches()):
        mine = of_processes[accelerator.process_index]
        if poisoned and step == 2 and accelerator.process_index == 1:
            mine[2] = torch.nan
        way(accelerator, model, optimizer, mine)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        apart = max((state[name].float() - value).abs().max().item() for name, value in by_torch(way).items())
        print(f"apart: {apart}", flush=True)
    accelerator.end_training()


def by_torch(way):
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for of_processes in batches():
        for process, micro_batches in enumerate(of_processes):
            for at, x in enumerate(micro_batches):
                if learned(way, process, at):
                    (loss_of(model, x) / 3 / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("way", [skips_some, by_itself, averages_itself])
def test_with_other_numbers_of_backward_passes_they_train_as_torch_does(tmp_path, way):
    """Not under FSDP2, where each pass needs all processes."""
    train("ddp_fp32", tmp_path / "run", script=functools.partial(trained, way))
    log = (tmp_path / "run.log").read_text()
    assert float(re.search(r"apart: (\S+)", log).group(1)) < 1e-5


@pytest.mark.parametrize("config", ["fsdp_fp32", "zero2_bf16"])
def test_where_processes_exchange_in_each_pass_one_that_skips_is_refused(tmp_path, monkeypatch, config):
    monkeypatch.setattr(rank_sync, "SKIPS", 2)
    ranks = Ranks(config, ["--output_dir", str(tmp_path / "run")], script=functools.partial(trained, skips_some))
    assert ranks.wait()[1] == 2  # the other one is in a collective until the launcher, or `wait`, ends it
    log = ranks.text()
    assert "refused: this process skips a micro-batch that another one computes" in log and "Traceback" not in log


def test_the_loss_of_each_is_said_when_one_is_not_finite(tmp_path):
    train("ddp_fp32", tmp_path / "run", script=functools.partial(trained, skips_some, poisoned=True), code=1)
    log = (tmp_path / "run.log").read_text()
    assert re.search(r"error: step 3: loss \[\d\.\d+, nan\] \(one per rank\)", log) and "Traceback" not in log
