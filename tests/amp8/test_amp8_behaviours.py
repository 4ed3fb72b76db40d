"""One test for each way in which MS-AMP went wrong."""

import pytest
import torch
import torch.distributed as dist
from amp8_helpers import linears, on_ranks, seeded, start
from torch import nn

import amp8


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
