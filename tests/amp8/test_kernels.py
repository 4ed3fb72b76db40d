"""The Triton kernels, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from amp8_helpers import linears, seeded, start
from torch import nn

import amp8
from amp8 import gradients, kernels, linear, scaling


def test_the_kernels_compute_what_is_written():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "interpreted.py"]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


def test_only_gpus_with_fp8_tensor_cores_run_them(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(scaling, "known", scaling.capable)
    for capability, fits in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert kernels.fits(torch.device("cuda", 0)) is fits
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not kernels.fits(torch.device("cuda", 0)) and not kernels.fits(torch.device("cpu"))


def test_amp8_does_not_import_triton():
    code = "import sys, amp8; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def test_a_tensor_without_rows_is_no_kernels(monkeypatch):
    """A launch of no programs would leave its scale 0, of which the reciprocal is infinite."""
    monkeypatch.setattr(kernels, "fits", lambda device: True)
    state = torch.zeros(scaling.HISTORY + 16, 2)
    state[0] = 4
    codes, turned, scale, _ = linear.cast(torch.zeros(0, 32), (state, None), 0, scaling.E4M3, 16)
    assert codes.shape == (0, 32) and turned.shape == (32, 0) and scale == 4
    assert gradients.quantize_gradient(torch.zeros(0, 32))[1] == scaling.OF_ZEROS


def shared_layer(net, x):
    return net(net(x))


def looked_at(net):
    net[0].weight.grad.norm()


def halved(net):
    net[1].weight.grad.mul_(0.5)


def set_to_zero(net):
    net[2].weight.grad.zero_()


def dropped(net):
    net[1].weight.grad = None


@pytest.mark.parametrize("passes, max_norm", [(1, 0.1), (2, None)])
@pytest.mark.parametrize("forward", [nn.Module.__call__, shared_layer])
@pytest.mark.parametrize("use", [lambda net: None, looked_at, halved, set_to_zero, dropped])
def test_a_gradient_that_waits_to_be_rounded_is_there_when_it_is_used(use, forward, passes, max_norm, monkeypatch):
    """As on a GPU, where gradients are rounded several at once."""
    rounded = []

    def round_gradients(values, codes, scales):
        rounded.append(len(values))
        for value, code, scale in zip(values, codes, scales, strict=True):
            made = scaling.gradient_scale(scaling.amax(value))
            code.copy_(scaling.quantize(value, made, scaling.E4M3))
            scale.copy_(made)

    def trained():
        net, optimizer = start(linears(32, 32, 32, 32))
        for step in range(3):
            for micro in range(passes):
                forward(net, seeded(16, 32, seed=10 * step + micro)).square().mean().backward()
            use(net)
            if max_norm:
                amp8.clip_grad_norm_(net.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return net.state_dict()

    expected = trained()
    here = SimpleNamespace(fits=lambda device: True, round_gradients=round_gradients, squares=squares)
    monkeypatch.setattr(gradients, "kernels", here)
    found = trained()
    assert all(map(torch.equal, found.values(), expected.values())) and max(rounded) == 3
    monkeypatch.setattr(gradients, "WAITING", 2 * 32 * 32)
    rounded.clear()
    assert all(map(torch.equal, trained().values(), expected.values())) and max(rounded) == 2


def squares(codes):
    return torch.stack([scaling.decode(tensor.reshape(-1)).square().sum() for tensor in codes])
