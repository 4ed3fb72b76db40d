"""tools/formats.py: the limits of each format, the rounding errors, and torch's scaled product."""

import sys

import pytest
import torch
from conftest import ROOT

from tools import formats

LIMITS = {  # bits, max, smallest normal, eps: from each format's exponent and mantissa widths
    "fp32": (32, (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-23),
    "bf16": (16, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-7),
    "fp16": (16, 65504.0, 2.0**-14, 2.0**-10),
    "e4m3": (8, 448.0, 2.0**-6, 0.125),
    "e5m2": (8, 57344.0, 2.0**-14, 0.25),
}


def printed(capsys, monkeypatch, *options):
    """The tool's output as lines of words."""
    monkeypatch.setattr(sys, "argv", ["formats.py", *options])
    formats.main()
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_limits():
    assert list(formats.formats()) == list(LIMITS)
    for name, dtype in formats.formats().items():
        bits, top, smallest, eps = LIMITS[name]
        assert formats.limits(dtype) == (bits, top, -top, smallest, eps)


@pytest.mark.parametrize(
    ("name", "underflows", "saturations"),
    [("fp32", 0, 0), ("bf16", 0, 0), ("fp16", 2, 2), ("e4m3", 4, 4), ("e5m2", 2, 2)],
)
def test_counts_on_a_constructed_tensor(name, underflows, saturations):
    # Half of the smallest subnormal still rounds to zero (to even): 2**-10 for e4m3, 2**-17 for e5m2, 2**-25 for fp16.
    # 0 and max itself are no loss; 449 is nearest to 448, and yet beyond it.
    x = torch.tensor([0.0, 1.0, 448.0, 449.0, -(2.0**15), 2.0**-10, -(2.0**-12), 2.0**-40, -(2.0**-41), 1e6, -1e6])
    assert formats.rounding(x, formats.formats()[name], torch.ones(()))[1:] == (underflows, saturations)


def test_a_scale_moves_into_the_range_and_brings_no_precision():
    dtype = formats.formats()["e4m3"]
    x = torch.tensor([1.0, 2.0, 3.5, -7.0])
    for small in (2.0**-30, 2.0**30):
        y, fitting = x * small, torch.tensor(2.0**6 / small)
        lost = formats.rounding(y, dtype, torch.ones(()))
        assert lost[1:] == ((4, 0) if small < 1 else (0, 4)) and lost[0] > 0.99
        assert formats.rounding(y, dtype, fitting) == (0.0, 0, 0)
    y = torch.tensor([1.0, 2.0, 4.0, -8.0]) * 1.0625  # half-way between two values of e4m3, at any power of two
    assert formats.rounding(y, dtype, torch.ones(())) == formats.rounding(y, dtype, torch.tensor(2.0**5))
    assert formats.rounding(y, dtype, torch.ones(()))[0] == pytest.approx(0.0625 / 1.0625)


@pytest.mark.parametrize("older", [False, True], ids=["scaled_mm", "_scaled_mm"])
def test_product_is_torchs_and_its_error_is_the_roundings(monkeypatch, older):
    if older:
        monkeypatch.delattr(torch.nn.functional, "scaled_mm", raising=False)
    elif not hasattr(torch.nn.functional, "scaled_mm"):
        pytest.skip(f"torch {torch.__version__} has no torch.nn.functional.scaled_mm")
    e4m3, e5m2 = formats.formats()["e4m3"], formats.formats()["e5m2"]
    # by hand: codes and scales that leave nothing to round
    a, b = torch.tensor([[1.0, 2.0] * 8]).repeat(16, 1), torch.full((16, 16), 3.0)
    found = formats.scaled_mm(a.to(e4m3), b.to(e4m3), torch.tensor(2.0), torch.tensor(4.0))
    assert found.dtype == torch.float32 and (found == (8 * 1 + 8 * 2) * 3 / 8).all()
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 256, generator=generator), torch.randn(256, 48, generator=generator)
    # A value of eps e is rounded by up to e/2 of itself; spread evenly over a binade, by sqrt(mean of squares) of about
    # 0.21 e. Two operands' errors are independent and add as squares: 0.037 and 0.059.
    for pair, expected in (((e4m3, e4m3), 0.0375), ((e5m2, e4m3), 0.0595)):
        for magnitude in (1e-20, 1.0, 1e15):
            total, arithmetic = formats.product(a * magnitude, b, *pair)
            assert total == pytest.approx(expected, rel=0.06)
            assert arithmetic < 1e-6


def test_printed_tables(capsys, monkeypatch):
    lines = printed(capsys, monkeypatch)
    for name, (bits, top, smallest, eps) in LIMITS.items():
        assert [name, str(bits), *(f"{value:.6g}" for value in (top, -top, smallest, eps))] in lines
    rounded = {line[0]: line for line in lines if line and line[0] in LIMITS and line[1] == "1"}
    assert len(rounded) == 5 and float(rounded["fp32"][2]) == 0
    errors = [float(rounded[name][2]) for name in ("fp16", "bf16", "e4m3", "e5m2")]
    assert errors == sorted(errors) and errors[0] > 1e-5
    assert lines == printed(capsys, monkeypatch, "--seed", "0") != printed(capsys, monkeypatch, "--seed", "1")


@pytest.mark.parametrize(("scale", "column"), [("1e-6", 3), ("1e6", 4)], ids=["underflow", "saturation"])
def test_the_scale_option_shows_the_range(capsys, monkeypatch, scale, column):
    lines = printed(capsys, monkeypatch, "--scale", scale)
    for name in ("e4m3", "e5m2"):
        plain, scaled = [line for line in lines if line and line[0] == name and len(line) == 5]
        assert int(plain[column]) > 30_000 and int(scaled[column]) == 0
        assert float(plain[2]) > 0.3 > 0.1 > float(scaled[2])


@pytest.mark.parametrize("options", [("--scale", "0"), ("--scale", "nan"), ("--scale", "x"), ("--seed", "-1")])
def test_mistakes_are_one_line(capsys, monkeypatch, options):
    with pytest.raises(SystemExit) as stop:
        printed(capsys, monkeypatch, *options)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and len(error.splitlines()) == 1


def test_help_comes_before_torch():
    """The tool imports torch only after it has parsed the options, so --help and errors appear at once."""
    for line in (ROOT / "tools" / "formats.py").read_text().splitlines():
        assert not line.startswith(("import torch", "from torch", "from amp8"))
