"""MS-AMP's FP4 against the formulas of its paper (arXiv:2501.17116), written here once more, and slowly."""

import math

import pytest
import torch
from amp8_helpers import relative_error, seeded, seeded_model, start
from torch import nn

import amp8
from amp8 import fp4, scaling

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # of e2m1, without the sign
MIDDLES = [(a + b) / 2 for a, b in zip(VALUES, VALUES[1:], strict=False)]
EVEN = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]  # the neighbour of each midpoint whose last bit is 0


def rounded(x):
    """Q: the nearest number of e2m1, of two the even one."""
    middles, even = torch.tensor(MIDDLES), torch.tensor(EVEN)
    y = torch.tensor(VALUES)[torch.searchsorted(middles, x.abs().contiguous())]
    for middle, tie in zip(middles, even, strict=True):
        y = torch.where(x.abs() == middle, tie, y)
    return y * x.sign()


def quantized(x, dim):
    """(codes, scale) with one scale 6 / amax for each vector along `dim`."""
    amax = x.abs().amax(dim, keepdim=True)
    scale = torch.where(amax == 0, 1.0, torch.full_like(amax, 6) / amax)
    return rounded(x * scale), scale


def smooth(x):
    """The paper's f on the whole range: between two neighbours lo and hi of e2m1, delta apart,
    lo + delta / 2 (1 + sign(2 z / delta - 1) |2 z / delta - 1| ** (1 / 5)) with z = x - lo."""
    sign, x = x.sign(), x.abs()
    at = torch.searchsorted(torch.tensor(VALUES), x.detach(), right=True).clamp(max=len(VALUES) - 1)
    lo, hi = torch.tensor(VALUES)[at - 1], torch.tensor(VALUES)[at]
    place = 2 * (x - lo) / (hi - lo) - 1
    return sign * (lo + (hi - lo) / 2 * (1 + place.sign() * place.abs() ** (1 / 5)))


def tails(x):
    """(low, high): as many values are outside as 1% of them on each side."""
    values = x.flatten().sort().values
    cut = len(values) // 100
    return values[cut], values[len(values) - 1 - cut]


def layer(transposed=False, bias=True, dtype=None, **options):
    if transposed:
        conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
        plain = seeded_model(lambda: nn.Sequential(conv1d(48, 64)))
        plain[0].weight.data.mul_(5)
    else:
        plain = seeded_model(lambda: nn.Sequential(nn.Linear(64, 48, bias=bias)))
    model, optimizer = start(plain, recipe="fp4", exact=dtype is None, **options)
    return model[0], optimizer


def outliers(*shape):
    """Values of which two in a hundred are thirty times as large."""
    x = seeded(*shape)
    return torch.where(seeded(*shape, seed=7).abs() > 2.6, 30 * x, x)


def test_all_numbers_of_e2m1_and_the_midpoints_between_them():
    signed = torch.tensor([-v for v in VALUES] + VALUES)
    assert torch.equal(fp4.to_e2m1(signed.clone()), signed)
    middles = torch.tensor([-m for m in MIDDLES] + MIDDLES)
    assert torch.equal(fp4.to_e2m1(middles.clone()), torch.tensor([-e for e in EVEN] + EVEN))
    assert torch.equal(fp4.to_e2m1(torch.tensor([6.1, 1e30, -7.0])), torch.tensor([6.0, 6.0, -6.0]))
    x = seeded(10000) * 4
    assert torch.equal(fp4.to_e2m1(x.clone()), rounded(x.clamp(-6, 6)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(128, 64), (37, 80), (1, 64), (3, 16), (700, 512)], ids=str)
@pytest.mark.parametrize("clamped", [True, False])
def test_an_input_is_its_rounded_inside_and_its_outliers(shape, dtype, clamped, monkeypatch):
    monkeypatch.setattr(fp4, "SAMPLE", 1 << 20)  # all of them
    x = outliers(*shape).to(dtype)
    x[0] = 0
    a, scale = fp4.of_input(x, clamped)
    x = x.float()
    low, high = tails(x) if clamped else (-math.inf, math.inf)
    inner = x.clamp(low, high)
    codes, reference = quantized(inner, 1)
    assert torch.equal(scale[1:], reference[1:]) and a.dtype == torch.bfloat16 and not a[0].any()
    expected = codes / reference + (x - inner)  # in high precision: bf16's
    assert torch.allclose(a.float() / scale, expected, rtol=2**-8, atol=0)
    inside = x == inner
    assert torch.equal(a.float()[inside], codes[inside]), "exactly e2m1 where nothing is cut off"
    assert inside.all() == (not clamped or x.numel() < 100)
    if clamped and x.numel() > 1e5:
        assert (~inside).float().mean() == pytest.approx(0.02, abs=0.001)


def test_what_is_cut_off_is_added_exactly_where_nothing_is_rounded():
    x = torch.ones(64, 64)
    x[0, :4], x[1, :4] = torch.tensor([12.0, -20.0, 60.0, 7.0]), torch.tensor([0.0, 0.5, 2.0, -1.0])
    x[0, 8:40] = -1.0  # the quantiles are -1 and 1
    a, scale = fp4.of_input(x, True)
    assert torch.equal(a.float() / scale, x) and (scale == 6).all()
    assert relative_error(fp4.of_input(x, False)[0][0].float(), x[0]) > 0.5, "else 60 leaves nothing of 1"


def test_quantiles_of_a_large_tensor_are_near_those_of_all():
    x = outliers(2048, 96)
    low, high = fp4.bounds(x)
    for bound, outside in ((low, x < low), (high, x > high)):
        assert bound in x and outside.float().mean() == pytest.approx(0.01, abs=0.003)
    x = seeded(16, 32, 1, 96).repeat(4, 1, 1, 1)
    x[:, 0] *= 1000  # of each sequence the first place
    low, high = fp4.bounds(x.view(-1, 96))
    assert (x.view(-1, 96) > high).float().mean() == pytest.approx(0.01, abs=0.01)


def test_the_slope_is_the_derivative_of_the_papers_function():
    x = torch.linspace(-6, 6, 4001, dtype=torch.float32)[1:-1]
    x = x[(x.unsqueeze(1) - torch.tensor(VALUES + MIDDLES + [-v for v in VALUES + MIDDLES])).abs().amin(1) > 1e-3]
    x.requires_grad_()
    smooth(x).sum().backward()
    assert torch.allclose(fp4.slope(x.detach()), x.grad.clamp(max=3.0), rtol=1e-3)
    assert (x.grad > 3).any() and (fp4.slope(torch.tensor(MIDDLES)) == 3).all(), "infinite there"
    assert torch.allclose(fp4.slope(torch.tensor(VALUES)), torch.tensor(0.2))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("left_out", [None, "disable_gradient_estimator", "disable_outlier_clamping"])
def test_forward_and_backward_are_the_papers(left_out, transposed):
    converted, _ = layer(transposed, recipe_options={left_out: True} if left_out else {})
    x, dy = outliers(2, 100, 64).requires_grad_(), seeded(2, 100, 48, seed=2) * 1e-3
    y = converted(x)
    y.backward(dy)
    flat, dy = x.detach().view(-1, 64), dy.view(-1, 48)
    weight = converted.true_weight().t() if transposed else converted.true_weight()
    w4, w_scale = quantized(weight, 1)
    low, high = (-math.inf, math.inf) if left_out == "disable_outlier_clamping" else tails(flat)
    inner = flat.clamp(low, high)
    codes, x_scale = quantized(inner, 1)
    a = (codes + (flat - inner) * x_scale).bfloat16() / x_scale  # what is cut off is in bf16
    assert torch.allclose(y.view(-1, 48), a @ (w4 / w_scale).t() + converted.bias, rtol=1e-4, atol=1e-5)

    def to_fp8(t, dtype):
        scale = scaling.power_of_two_scale(t.abs().max(), dtype)
        return scaling.dequantize(scaling.quantize(t, scale, dtype), scale)

    divided = to_fp8(dy / w_scale.t(), scaling.E5M2)
    assert torch.allclose(x.grad.view(-1, 64), divided @ w4, rtol=1e-4, atol=1e-7)
    dw = w_scale * (divided.t() @ to_fp8(flat, scaling.E4M3))
    if left_out != "disable_gradient_estimator":
        scaled = (weight * w_scale).requires_grad_()
        smooth(scaled).sum().backward()
        dw = dw * scaled.grad.nan_to_num(nan=math.inf).clamp(max=3.0)
    found = converted.gradient.value()
    assert relative_error(found.t() if transposed else found, dw) < 0.04  # it is stored as e4m3
    assert torch.equal(converted.bias.grad, dy.sum(0))


@pytest.mark.parametrize("clamped", [True, False])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_the_loss(poison, clamped):
    converted, _ = layer(recipe_options={"disable_outlier_clamping": not clamped})
    x = seeded(32, 64)
    x[3, 5] = poison
    y = converted(x)
    assert not torch.isfinite(y[3]).any() and not torch.isfinite(y.sum())
    converted, _ = layer()
    y = converted(seeded(32, 64))
    dy = torch.ones_like(y)
    dy[2, 7] = poison
    y.backward(dy)
    assert converted.gradient.value().isnan().all()
    with torch.no_grad():
        converted.weight[4, 4] = math.nan
    assert converted(seeded(32, 64)).isnan().any()


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-6, 1e6, 1e30])
def test_zeros_and_values_of_any_size(factor):
    """Rows of zeros in the input and the weight beside values of one size."""
    converted, _ = layer(bias=False)
    weight = converted.true_weight()
    weight[5] = 0
    x = seeded(32, 64).requires_grad_()
    with torch.no_grad():
        converted.weight.copy_(weight * factor)
        x[3] = 0
    y = converted(x)
    assert not y[3].any() and not y[:, 5].any()
    y.sum().backward()
    assert torch.isfinite(x.grad).all() and torch.isfinite(converted.gradient.value()).all()
    converted.weight.grad = None
    with torch.no_grad():
        converted.weight.copy_(weight)
    x = (seeded(32, 64) * factor).requires_grad_()
    y = converted(x)
    y.sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(converted.gradient.value()).all()
    exact = x.detach() @ weight.t()
    assert factor == 0 or relative_error(y / factor, exact / factor) < 0.2


def test_what_ran_is_reported_and_a_wrong_option_refused():
    for left_out, gemm in ((None, {"bf16 x e2m1"}), ("disable_outlier_clamping", set())):
        converted, optimizer = start(
            nn.Sequential(nn.Linear(64, 48)), recipe="fp4", recipe_options={left_out: True} if left_out else {}
        )
        converted(seeded(32, 64).requires_grad_()).sum().backward()
        optimizer.step()
        report = amp8.report(converted, optimizer)
        assert set(report["dtypes"]["gemm"]) == {"e2m1 x e2m1", "e5m2 x e2m1", "e5m2 x e4m3"} | gemm
        assert report["recipe"] == "fp4" and any("FP4 is emulated" in note for note in report["notes"])
        assert report["bytes_per_parameter"]["linear"]["total"] == pytest.approx(6, abs=0.02)
    with pytest.raises(ValueError, match="'fp4' knows disable_gradient_estimator, disable_outlier_clamping, not alpha"):
        layer(recipe_options={"alpha": 0.9})


def test_layers_of_one_input_clamp_it_once(monkeypatch):
    calls, real = [], fp4.of_input
    monkeypatch.setattr(fp4, "of_input", lambda *given: [calls.append(1), real(*given)][1])
    model, _ = start(nn.ModuleList(nn.Linear(64, 48) for _ in range(3)), recipe="fp4")
    x = seeded(32, 64)
    sum(layer(x) for layer in model).sum().backward()
    assert len(calls) == 1
