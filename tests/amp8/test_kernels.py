"""The Triton kernels, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    delayed = torch.zeros(16, 2), torch.full((2,), 4.0), torch.zeros(2, dtype=torch.int32), None
    codes, turned, scale, _ = linear.cast(torch.zeros(0, 32), delayed, 0, scaling.E4M3, 16)
    assert codes.shape == (0, 32) and turned.shape == (32, 0) and scale == 4
    assert gradients.quantize_gradient(torch.zeros(0, 32))[1] == scaling.OF_ZEROS
