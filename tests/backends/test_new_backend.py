"""A backend is one class. The one here stores weights that are rounded to bf16; it trains under every strategy."""

import pytest
import torch
from conftest import record, train, weights

from faithful import backends
from faithful.backends.high_precision import Torch
from faithful.tensors.names import local


class RoundedWeights(Torch):
    """fp32, bf16 or fp16 compute. After each step the weights that the optimizer updates are rounded to bf16."""

    @property
    def name(self):
        return f"{super().name}, weights rounded to bf16"

    def after_prepare(self, accelerator, model, optimizer):
        updated = accelerator.strategy.torch_optimizer(optimizer)
        updated.register_step_post_hook(lambda *_: round_all(updated))
        return []


@torch.no_grad()
def round_all(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local(parameter).copy_(local(parameter).bfloat16())


def install(rank):
    backends.BACKENDS[None] = (RoundedWeights, "torch")


CASES = ["single_bf16", "ddp_bf16", "fsdp_bf16", "zero1_bf16", "zero3_bf16"]
CASES += [pytest.param(name, marks=pytest.mark.slow) for name in ("tp_bf16", "hsdp_bf16", "zero2_bf16")]


@pytest.mark.parametrize("config", CASES)
def test_a_new_backend_trains_under_every_strategy(tmp_path, config):
    recipe = {"name": "gpt"} if config.startswith("tp") else {}
    run = train(config, tmp_path / "run", "--max_steps", 3, "--save_steps", 0, before=install, **recipe)
    assert "weights rounded to bf16" in record(run)["evidence"]["truth"]
    assert all(weight.equal(weight.bfloat16().float()) for weight in weights(run).values())
