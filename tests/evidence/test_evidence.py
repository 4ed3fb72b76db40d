"""A run that is not what its config says refuses to train: each check of the evidence, against a library that does
something else than asked."""

import sys
from collections import UserDict

import pytest
import torch
from conftest import record, refusal, train
from torch.distributed.device_mesh import init_device_mesh

from faithful import Accelerator
from faithful.evidence.batch import FirstBatch

STEPS = ("--max_steps", 2, "--save_steps", 0, "--eval_steps", 0)


def one_process_instead_of_two(rank):
    import accelerate

    accelerate.Accelerator.distributed_type = property(lambda self: accelerate.DistributedType.NO)


def one_layer_forgotten(rank):
    from faithful.backends import emulation

    convert = emulation.convert

    def forgetful(model, *args, **kwargs):
        converted = convert(model, *args, **kwargs)
        mlp, plain = model.blocks[1].mlp, torch.nn.Linear(1, 1)
        plain.weight, plain.bias = mlp.fc1.weight, mlp.fc1.bias
        mlp.fc1 = plain
        return converted

    emulation.convert = forgetful


def weights_replaced(rank):
    from faithful.backends import emulation

    convert = emulation.convert

    def replacing(model, *args, **kwargs):
        converted = convert(model, *args, **kwargs)
        model.pos_embed = torch.nn.Parameter(model.pos_embed.detach().clone())
        return converted

    emulation.convert = replacing


def nothing_sharded(rank):
    import torch.distributed.fsdp

    torch.distributed.fsdp.fully_shard = lambda module, **_: module


def no_autocast(rank):
    torch.autocast.__enter__, torch.autocast.__exit__ = lambda self: self, lambda *_: None


@pytest.mark.parametrize(
    ("config", "before", "why"),
    [
        ("ddp_bf16", one_process_instead_of_two, "asked for ddp x2, Accelerate runs NO x2"),
        ("single_fp8_te", one_layer_forgotten, "16 Linear layers should be in FP8, 15 of 17 are"),
        ("single_fp8_te", weights_replaced, "1 trainable tensors are not in the optimizer any more: pos_embed"),
        ("fsdp_bf16", nothing_sharded, "asked for fsdp, but no parameter is sharded"),
        ("single_bf16", no_autocast, "asked for bf16, but Linear layers compute in float32"),
    ],
)
def test_what_is_not_as_asked_does_not_train(tmp_path, config, before, why):
    log = refusal(config, tmp_path / "run", *STEPS, before=before)
    assert f"refused: {why}" in log
    assert not list(tmp_path.glob("run/**/*.safetensors"))


def test_samples_in_a_dict_of_another_class_are_counted():
    """transformers' BatchEncoding, which a cross-encoder of sentence-transformers gets, is a UserDict."""
    seen = {}
    for kind in (dict, UserDict):
        first = FirstBatch(model := torch.nn.Identity())
        model(kind(ids=torch.arange(12).view(4, 3), more=[torch.ones(4)]))
        seen[kind] = first.samples, first.hashes
    assert seen[dict] == seen[UserDict] and seen[dict][0] == 4


def adapters_alone():
    """An adapter is prepared, the frozen model whose layers call it is not: no forward pass of it is seen."""
    accelerator, adapter = Accelerator(project_dir=sys.argv[2]), torch.nn.Linear(4, 4)
    adapter, optimizer = accelerator.prepare(adapter, torch.optim.SGD(adapter.parameters(), 0.1))
    for _ in range(4):
        accelerator.backward(torch.nn.functional.linear(torch.ones(2, 4), adapter.weight, adapter.bias).sum())
        optimizer.step(), optimizer.zero_grad()
    accelerator.end_training()


def mesh_first():
    """Which makes a process group with no backend's name."""
    init_device_mesh("cpu", (2,))
    accelerator, model = Accelerator(project_dir=sys.argv[2]), torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step(), accelerator.end_training()


@pytest.mark.parametrize(
    ("config", "script", "line", "samples"),
    [("single_fp32", adapters_alone, "single | fp32", None), ("ddp_fp32", mesh_first, "ddp x2 gloo | fp32", 4)],
)
def test_what_is_not_known_is_not_said(tmp_path, config, script, line, samples):
    made = record(train(config, tmp_path / "run", script=script))
    assert made["evidence"]["measured"].startswith(line) and made["seen"]["samples_per_step"] == samples
    assert (made["seen"]["first_batch"] is None) == (samples is None)
