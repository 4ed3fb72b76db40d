"""One test for each way in which MS-AMP went wrong."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from amp8_helpers import linears, on_ranks, run_ranks, seeded, seeded_model, start
from torch import nn

import amp8


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


def test_b01_a_tied_head_stays_tied_and_trains():
    model, optimizer = start(Tied())
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert all(id(p) in owned for p in model.parameters())
    before = model.head.weight.detach().clone()
    model(torch.arange(64)).square().sum().backward()
    optimizer.step()
    assert model.head.weight is model.embed.weight and (model.head.weight - before).abs().min() > 1e-3


def test_b02_a_frozen_layer_stays_frozen_and_computes_no_weight_gradient():
    model = linears(32, 32, 32)
    model[0].requires_grad_(False)
    model, optimizer = start(model)
    assert not model[0].weight.requires_grad and model[1].weight.requires_grad
    before = model[0].weight.detach().clone()
    x = seeded(8, 32).requires_grad_()
    model(x).sum().backward()
    assert model[0].gradient.codes is None and model[1].gradient.codes is not None and x.grad.abs().max() > 0
    optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_b03_bf16_parameters_outside_linear_layers_train():
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Embedding(300, 32)).to(torch.bfloat16)
    model, optimizer = start(model)
    before = [model[1].weight.detach().clone(), model[2].weight.detach().clone()]
    (model[1](model[0](seeded(8, 32).bfloat16())).square().sum() + model[2](torch.arange(300)).sum()).backward()
    optimizer.step()
    assert (model[1].weight - before[0]).abs().max() > 5e-3
    moved = (model[2].weight - before[1]).abs() > 5e-3
    assert moved.float().mean() > 0.95  # bf16 rounds the step of 0.01 away where a weight is large


def gradient_of_one_batch(rank, world):
    model, _ = start(linears(32, 32, bias=False), exact=True)
    model(seeded(8, 32)).sum().backward()
    model.amp8_state.finish()
    return model[0].gradient.value()


def test_b04_ranks_that_agree_do_not_overflow():
    alone = gradient_of_one_batch(0, 1)
    for gradient in run_ranks(4, gradient_of_one_batch):
        assert torch.equal(gradient, alone)  # not even rounded differently


@on_ranks(2)
def test_b05_no_sync_is_honoured(rank, world):
    model, _ = start(linears(32, 32, 32), ddp=True)
    sent = []
    for micro in range(3):
        with model.no_sync() if micro < 2 else contextlib.nullcontext():
            model(seeded(8, 32, seed=micro + rank)).sum().backward()
        sent.append(amp8.wire_bytes(model))
        in_fp32 = model.module[0].gradient.fp32 is not None
        assert in_fp32 == (micro < 2)  # so not rounded with every micro-batch
    assert sent[0] == sent[1] == 0 and sent[2] > 0


def test_b06_weights_are_tensors_for_everyone_else(tmp_path):
    from safetensors.torch import load_file, save_model

    model, optimizer = start(linears(32, 32, 32))
    assert all(isinstance(p, torch.Tensor) and p.requires_grad for _, p in model.named_parameters())
    save_model(model, str(tmp_path / "m.safetensors"))
    assert {v.dtype for v in load_file(tmp_path / "m.safetensors").values()} == {torch.float32}
    torch.save(model.state_dict(), tmp_path / "m.pt")
    assert torch.load(tmp_path / "m.pt", weights_only=True).keys() == model.state_dict().keys()
    model(seeded(8, 32)).sum().backward()
    assert torch.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))  # of what has a .grad
    assert amp8.clip_grad_norm_(model.parameters(), 1.0) > torch.nn.utils.get_total_norm([model[0].bias.grad])
    assert torch.nn.utils.parameters_to_vector(model.parameters()).numel() == 2 * (32 * 32 + 32)


def test_b06_reading_a_weight_leaves_it_trained():
    """An average of the weights (EMA) reads `weight.data`, whose requires_grad is False. The layer still trains."""
    model, optimizer = start(linears(32, 32, 32))
    averages = [torch.zeros(p.shape) for p in model.parameters()]
    for average, parameter in zip(averages, model.parameters(), strict=True):
        average.lerp_(parameter.data, 0.5)
        average.copy_(parameter.detach())
    assert not model[0].weight.data.requires_grad and model[0].trained
    before = model[0].weight.clone()
    model(seeded(8, 32)).square().sum().backward()
    optimizer.step()
    assert not before.equal(model[0].weight.clone())
    model[0].weight.requires_grad_(False)
    assert not model[0].trained and model[1].trained


def test_b07_evaluation_does_not_change_the_scaling_and_micro_batches_keep_their_maximum():
    model, optimizer = start(linears(32, 32))
    for factor in (3.0, 1.0):
        model(seeded(8, 32) * factor).sum().backward()
    model.eval()
    with torch.no_grad():
        model(seeded(8, 32) * 50)
    assert model[0].amax_history[0, 0] == (seeded(8, 32) * 3.0).abs().max()


def test_b08_nothing_of_torch_is_patched():
    linear, ddp, step = nn.functional.linear, nn.parallel.DistributedDataParallel, torch.optim.AdamW.step
    forward, functions = nn.Linear.forward, {name: getattr(torch, name) for name in ("zeros_like", "is_floating_point")}
    model, optimizer = start(linears(32, 32))
    model(seeded(8, 32)).sum().backward()
    optimizer.step()
    assert nn.functional.linear is linear and nn.parallel.DistributedDataParallel is ddp
    assert nn.Linear.forward is forward and torch.optim.AdamW.step is step
    assert all(getattr(torch, name) is function for name, function in functions.items())
    plain = nn.Linear(32, 32)
    plain(seeded(8, 32)).sum().backward()
    assert plain.weight.grad is not None


@pytest.mark.parametrize("capability, fp8", [((8, 0), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)])
def test_b09_the_capability_decides_not_the_name_of_the_device(monkeypatch, capability, fp8):
    class OnGPU:
        is_cuda, dtype, device = True, torch.float8_e4m3fn, "cuda:0"

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    monkeypatch.setattr(amp8.scaling, "known", amp8.scaling.capable)
    assert amp8.scaling._has_fp8_hardware(OnGPU()) is fp8


@on_ranks(2)
def test_b10_collectives_are_per_bucket_not_per_layer(rank, world):
    model, optimizer = start(linears(*[32] * 11, bias=False))
    names = []
    for name in ("all_to_all_single", "all_gather_into_tensor", "all_reduce"):

        def counted(*args, _name=name, _call=getattr(dist, name), **kwargs):
            names.append(_name)
            return _call(*args, **kwargs)

        setattr(dist, name, counted)
    model(seeded(8, 32)).sum().backward()
    optimizer.step()
    assert names == ["all_to_all_single", "all_gather_into_tensor"]


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, *, input_ids):
        return self.head(self.embed(input_ids))


def head_after_a_step(rank, world):
    model, optimizer = start(seeded_model(Keywords), ddp=True)
    model(input_ids=torch.arange(8) + 8 * rank).square().sum().backward()
    optimizer.step()
    return model.module.head.true_weight()


def test_b11_integer_keyword_inputs_do_not_step_on_unfinished_gradients():
    first, second = run_ranks(2, head_after_a_step)
    assert torch.equal(first, second)
    model, optimizer = start(seeded_model(Keywords))
    for rank in range(2):  # the sum in one process: to Adam it is the same as the mean
        model(input_ids=torch.arange(8) + 8 * rank).square().sum().backward()
    optimizer.step()
    initial = seeded_model(Keywords).head.weight.detach()
    same_way = (model.head.true_weight() - initial).sign() == (first - initial).sign()
    assert same_way.float().mean() > 0.97


def weights_after_a_step_of_the_first_layer(rank, world):
    model, optimizer = start(linears(32, 32, 32, bias=False))
    for layer in model:
        layer(seeded(8, 32))  # with gradients enabled, and without a backward pass
    model[0](seeded(8, 32, seed=rank)).square().sum().backward()
    optimizer.step()
    return [layer.true_weight() for layer in model]


def test_b12_a_second_forward_and_an_unused_layer_are_fine():
    first, second = run_ranks(2, weights_after_a_step_of_the_first_layer)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    used, unused = linears(32, 32, 32, bias=False)
    assert (first[0] - used.weight).abs().max() > 5e-3 and torch.allclose(first[1], unused.weight, atol=1e-4)
