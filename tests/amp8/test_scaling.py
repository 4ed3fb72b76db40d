"""FP8 rounding, scales, products and delayed scaling, against torch's own casts and products and numbers computed by
hand."""

import math

import pytest
import torch

from amp8 import scaling
from amp8.scaling import E4M3, E5M2

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
every_format = pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)


def every_bf16():
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def same_bits(a, b):
    """Whether two tensors are equal bit for bit; any NaN equals any other."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan].view(torch.uint8), b[~nan].view(torch.uint8))


def one():
    return torch.ones(())


@every_format
def test_rounding_is_torchs_cast_after_our_clamp(dtype):
    x = every_bf16()
    top = scaling.dtype_max(dtype)
    codes = scaling.quantize(x, one(), dtype)
    assert same_bits(codes.float(), x.float().clamp(-top, top).to(dtype).float())
    # and inside the range the clamp changes nothing
    inside = x[x.abs() <= top]
    assert len(inside) > 30_000 and same_bits(scaling.quantize(inside, one(), dtype).float(), inside.to(dtype).float())


@every_format
@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 37.3, 1e30])
def test_round_codes_are_the_codes_without_the_cast(dtype, scale):
    scale = torch.tensor(scale)
    for x in (every_bf16(), torch.randn(300_000, generator=torch.Generator().manual_seed(0)) * 40):
        expected = scaling.quantize(x, scale, dtype)
        rounded = scaling.round_codes(x, scale, dtype)
        assert rounded.dtype == torch.bfloat16
        torch.testing.assert_close(rounded.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def test_rounding_is_to_nearest_even_by_hand():
    # e4m3 near 1: steps of 1/8; near 448: steps of 32; subnormal steps 2**-9. e5m2 near 1: steps of 1/4.
    x = torch.tensor([1.0625, 1.1875, 1.07, 432.0, 2.0**-10, 3 * 2.0**-10, 2.0**-9, 2.0**-11])
    expected = [1.0, 1.25, 1.125, 448.0, 0.0, 2.0**-8, 2.0**-9, 0.0]
    assert scaling.quantize(x, one(), E4M3).float().tolist() == expected
    assert scaling.round_codes(x, one(), E4M3).tolist() == expected
    x = torch.tensor([1.125, 1.375, 2.0**-16, 2.0**-17, 3 * 2.0**-17])
    expected = [1.0, 1.5, 2.0**-16, 0.0, 2.0**-15]
    assert scaling.quantize(x, one(), E5M2).float().tolist() == expected
    assert scaling.round_codes(x, one(), E5M2).tolist() == expected


@pytest.mark.parametrize("dtype, top", [(E4M3, 448.0), (E5M2, 57344.0), (torch.float16, 65504.0)])
def test_out_of_range_saturates_and_nan_stays(dtype, top):
    x = torch.tensor([top * 1.2, -top * 1.2, 1e38, math.inf, -math.inf, math.nan, -0.0])
    assert scaling.dtype_max(dtype) == top
    codes = scaling.quantize(x, one(), dtype).float()
    assert codes[:5].tolist() == [top, -top, top, top, -top] and codes[5].isnan() and codes[6] == 0
    # a product that overflows fp32 saturates as well
    assert scaling.quantize(torch.tensor([1e38, -1e38]), torch.tensor(1e38), dtype).float().tolist() == [top, -top]


def test_fp16_input_does_not_overflow_on_its_way():
    x = torch.tensor([60000.0], dtype=torch.float16)
    assert scaling.quantize(x, torch.tensor(2.0**3), torch.float16).item() == 65504
    assert scaling.dequantize(scaling.quantize(x, torch.tensor(2.0**-8), E4M3), torch.tensor(2.0**-8)) == 61440


def test_amax_sees_what_is_not_finite():
    x = torch.tensor([[1.0, -3.0], [0.5, 0.25]], dtype=torch.bfloat16)
    assert scaling.amax(x).dtype == torch.float32 and scaling.amax(x).item() == 3
    assert scaling.amax(x, 1).tolist() == [[3.0], [0.5]] and scaling.amax(x, 0).tolist() == [[1.0, 3.0]]
    for zeros in (torch.zeros(2), -torch.zeros(2), torch.tensor([0.0, -0.0])):  # a negative zero would divide to -inf
        assert scaling.amax(zeros).item() == 0 and not scaling.amax(zeros).signbit()
    assert scaling.amax(torch.tensor([1.0, -math.inf])).item() == math.inf
    assert scaling.amax(torch.tensor([1.0, math.nan])).isnan() and scaling.amax(torch.empty(0, 4)).item() == 0
    rows = scaling.amax(torch.tensor([[math.nan, 1.0], [2.0, -math.inf], [1.0, -2.0]]), 1)
    assert rows[0].isnan() and rows[1].item() == math.inf and rows[2].item() == 2


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.float16])
def test_power_of_two_scale_is_exact(dtype):
    top = scaling.dtype_max(dtype)
    exponents = torch.arange(-100, 100)
    edges = torch.cat([torch.tensor(top * 2.0 ** e.item(), dtype=torch.float32).view(1) for e in exponents - 10])
    edges = edges[edges.isfinite()]
    powers = torch.tensor([2.0 ** e.item() for e in exponents])
    for base in (edges, powers):
        for value in (base, base.nextafter(torch.tensor(math.inf)), base.nextafter(torch.tensor(0.0))):
            value = value[value.isfinite()]
            # Python's fractions of doubles: the largest power of two s with s * amax <= top
            expected = []
            for a in value.tolist():
                s = 2.0 ** (math.frexp(top)[1] - math.frexp(a)[1] + 1)
                while s * a > top:
                    s /= 2
                expected.append(min(max(s, 2.0**-126), 2.0**126))
            assert scaling.power_of_two_scale(value, dtype).tolist() == expected
    assert scaling.power_of_two_scale(torch.tensor(top), dtype).item() == 1
    assert scaling.power_of_two_scale(torch.tensor(top).nextafter(torch.tensor(math.inf)), dtype).item() == 0.5
    assert scaling.power_of_two_scale(torch.tensor(top), dtype, margin=3).item() == 0.125


def test_power_of_two_scale_keeps_the_previous_where_amax_tells_nothing():
    amax = torch.tensor([0.0, math.inf, math.nan, 448.0, 1e-45, 3e38])
    previous = torch.full((6,), 8.0)
    assert scaling.power_of_two_scale(amax, E4M3)[:4].tolist() == [1, 1, 1, 1]
    assert scaling.power_of_two_scale(amax, E4M3, previous=previous)[:4].tolist() == [8, 8, 8, 1]
    tiny, huge = scaling.power_of_two_scale(amax, E4M3)[4:].tolist()
    assert tiny == 2.0**126 and huge == 2.0**-120
    assert (1 / torch.tensor([tiny, huge])).tolist() == [2.0**-126, 2.0**120]


def tensors(kind, rows, columns, seed):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    if kind == "zero":
        return torch.zeros_like(x)
    if kind == "outlier":
        x[rows // 2, columns // 3] = 1e4
    return x * {"tiny": 1e-17, "huge": 1e15}.get(kind, 1.0)


PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]


@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize("a_dtype, b_dtype", PAIRS, ids=["e4m3-e4m3", "e4m3-e5m2", "e5m2-e4m3"])
@pytest.mark.parametrize("kind", ["random", "tiny", "huge", "zero", "outlier"])
def test_exact_product_is_scaled_mm_bit_for_bit(kind, a_dtype, b_dtype):
    a, b = tensors(kind, 48, 160, 1), tensors(kind, 64, 160, 2).t()
    a_scale = scaling.power_of_two_scale(scaling.amax(a), a_dtype)
    b_scale = scaling.power_of_two_scale(scaling.amax(b), b_dtype)
    a8, b8 = scaling.quantize(a, a_scale, a_dtype), scaling.quantize(b, b_scale, b_dtype)
    scales = {"scale_a": 1 / a_scale, "scale_b": 1 / b_scale}
    with torch.backends.mkldnn.flags(enabled=False):  # on CPUs with FP8 or AMX kernels oneDNN sums in another order
        expected = torch._scaled_mm(a8, b8, **scales, out_dtype=torch.float32)
        ours = scaling.product(a8, b8, a_scale, b_scale, torch.float32)
    assert torch.equal(ours, expected)
    assert kind == "zero" or expected.abs().max() > 0
    reference = scaling.dequantize(a8, a_scale).double() @ scaling.dequantize(b8, b_scale).double()
    with_onednn = torch._scaled_mm(a8, b8, **scales, out_dtype=torch.float32)
    bound = (scaling.dequantize(a8, a_scale).double().abs() @ scaling.dequantize(b8, b_scale).double().abs()) * 1e-5
    assert bool(((with_onednn - reference).abs() <= bound).all())
    # the fast path: one bf16 product, whose only rounding is to bf16
    fast = scaling.product(a8, b8, a_scale, b_scale, torch.bfloat16)
    assert fast.dtype == torch.bfloat16
    assert bool(((fast.double() - reference).abs() <= reference.abs() * 2.0**-8 + bound).all())


def test_product_with_row_and_mixed_scales():
    a, b = tensors("random", 32, 48, 3), tensors("random", 48, 16, 4)
    rows, columns = scaling.amax(a, 1), scaling.amax(b, 0)
    a_row, b_column = scaling.power_of_two_scale(rows, E4M3), scaling.power_of_two_scale(columns, E4M3)
    a_one, b_one = 448 / scaling.amax(a), 448 / scaling.amax(b)  # not powers of two
    for a_scale, b_scale in [(a_row, b_column), (a_row, b_one), (a_one, b_column), (a_one, b_one)]:
        a8, b8 = scaling.quantize(a, a_scale, E4M3), scaling.quantize(b, b_scale, E4M3)
        expected = (a8.double() / a_scale) @ (b8.double() / b_scale)
        exact = scaling.product(a8, b8, a_scale, b_scale, torch.float32)
        torch.testing.assert_close(exact.double(), expected, rtol=1e-5, atol=1e-5)
        fast = scaling.product(a8, b8, a_scale, b_scale, torch.bfloat16)
        bound = expected.abs() * 2.0**-7 + 1e-5  # two roundings to bf16 where the scale is no power of two
        assert fast.dtype == torch.bfloat16 and bool(((fast.double() - expected).abs() <= bound).all())
        assert torch.equal(fast, scaling.product(a8.bfloat16(), b8.bfloat16(), a_scale, b_scale, torch.bfloat16))
        once = scaling.product(a8, b8, a_scale, b_scale, torch.bfloat16, exact=True)
        assert torch.equal(once, exact.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):  # must not reach the fp32 product
        assert torch.equal(scaling.product(a8, b8, a_scale, b_scale, torch.float32), exact)


def test_product_scales_in_fp32():
    a = torch.full((16, 16), 1.0).to(E4M3)
    scale = torch.tensor(1.00390625**-1)  # its reciprocal, 1 + 2**-8, would be 1 in bf16
    out = scaling.product(a, a, scale, one(), torch.bfloat16)
    assert out[0, 0].item() == torch.tensor(16 * 1.00390625).bfloat16().item()
    wide = scaling.product(torch.full((16, 16), 1.5).to(E4M3), a, scale, one(), torch.bfloat16)
    assert wide[0, 0].item() == torch.tensor(24 * 1.00390625).bfloat16().item() == 24.125


def test_product_refuses_what_a_gpu_refuses():
    def operands(m, k, n, a_dtype=E4M3, b_dtype=E4M3):
        return torch.ones(m, k).to(a_dtype), torch.ones(k, n).to(b_dtype), one(), one()

    with pytest.raises(ValueError, match="K=16, N=10"):
        scaling.product(*operands(4, 16, 10))
    with pytest.raises(ValueError, match="K=10, N=16"):
        scaling.product(*operands(4, 10, 16))
    with pytest.raises(ValueError, match="at most one e5m2"):
        scaling.product(*operands(4, 16, 16, E5M2, E5M2))
    assert torch.equal(scaling.product(*operands(4, 10, 16), pad_inner=True).float(), torch.full((4, 16), 10.0))
    assert torch.equal(scaling.product(*operands(3, 32, 16)).float(), torch.full((3, 16), 32.0))


def test_window_scaling_warms_up_and_goes_back_after_overflow():
    window = 4
    history, scale, updates = torch.zeros(window, 2), torch.ones(2), torch.zeros(2, dtype=torch.int64)

    def step(*micro_batches):
        nonlocal history, scale, updates
        for amaxes in micro_batches:
            scaling.record_(history, torch.tensor(amaxes))
        history, scale, updates = scaling.updated_window(history, scale, updates, (E4M3, E4M3))

    now = torch.tensor([7.0, 7.0])  # 448 / 7 = 64
    step([1.0, 448.0], [3.5, 7.0])  # the largest of the micro-batches counts: 3.5 and 448
    assert scale.tolist() == [128, 1] and updates.tolist() == [1, 1] and history[0].tolist() == [0, 0]
    assert scaling.window_scale(now, scale, updates, E4M3, window).tolist() == [64, 64]  # in-time
    for _ in range(3):
        step([1.75, 1.75])
    assert scale.tolist() == [128, 1] and updates.tolist() == [4, 4]
    assert scaling.window_scale(now, scale, updates, E4M3, window).tolist() == [128, 1]  # delayed
    step([1.75, 0.0])  # the first amaxes leave the window
    assert scale.tolist() == [256, 256]
    step([math.inf, 1.75])
    assert scale.tolist() == [256, 256] and updates.tolist() == [0, 6] and bool(history.isfinite().all())
    assert scaling.window_scale(now, scale, updates, E4M3, window).tolist() == [64, 256]
    step([math.nan, 1.75])
    assert updates.tolist() == [0, 7]
    for _ in range(window):
        step([0.0, 0.0])
    assert history.count_nonzero() == 0 and scale.tolist() == [256, 256]  # nothing to learn from: kept


def test_transformer_engines_delayed_scaling_by_hand_over_20_steps():
    """amax history of 4, e4m3; each amax divides 448, so the scales are known: 448 over the largest of the last four.

    Where the amax is 0 (steps 6 and 7) the history does not roll, as in the default kernel: at steps 8 and 9 it still
    knows step 4's 14.
    """
    amaxes = [1, 2, 4, 14, 3.5, 0, 0, 7, 1, 1.75, 28, math.inf, 7, 7, 7, 7, 0.875, 0.875, 0.4375, 0.21875]
    #          1    2    3   4   5   6   7   8   9   10   11  12  13  14  15  16  17  18  19  20
    largest = [448, 224, 112, 32, 32, 32, 32, 32, 32, 64, 16, 16, 16, 16, 16, 64, 64, 64, 64, 512]
    recent = [448, 224, 112, 32, 128, 128, 128, 64, 448, 256, 16, 16, 64, 64, 64, 64, 512, 512, 1024, 2048]
    for algo, expected in [("max", largest), ("most_recent", recent)]:
        history, scale, trace = torch.zeros(4, 1), torch.ones(1), []
        for amax in amaxes:
            scaling.record_(history, torch.tensor([float(amax)]))
            scaling.update_delayed_(history, scale, 448.0, amax_compute_algo=algo)
            trace.append(scale.item())
            assert history[0].item() == 0
        assert trace == expected, algo


def test_delayed_scaling_rounds_once():
    amaxes = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.1
    history, scale = torch.zeros(2, 1000), torch.ones(1000)
    scaling.record_(history, amaxes)
    scaling.update_delayed_(history, scale, 448.0, margin=1)
    assert torch.equal(scale, (224 / amaxes.double()).float())
    assert 0.1 < (scale != amaxes.reciprocal() * 448 / 2).float().mean() < 0.5  # as the reciprocal would


def test_delayed_scaling_by_slot_with_margin_and_limits():
    history, scale = torch.zeros(3, 3), torch.ones(3)
    scaling.record_(history, torch.tensor(7.0), 0)
    scaling.record_(history, torch.tensor(2.0), 0)
    scaling.record_(history, torch.tensor(1e-45), 1)
    scaling.record_(history, torch.tensor(0.875), 2)
    scaling.update_delayed_(history, scale, torch.tensor([448.0, 448.0, 57344.0]), margin=2)
    assert scale.tolist() == [16, torch.finfo(torch.float32).max, 16384]
    with pytest.raises(ValueError, match="amax_compute_algo"):
        scaling.update_delayed_(history, scale, 448.0, amax_compute_algo="mean")


@pytest.mark.parametrize("code_dtype", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_read_as_torch_reads_them(code_dtype, dtype):
    """All of them, NaN and both zeros too, from small and large tensors, contiguous or not."""
    every = torch.arange(256, dtype=torch.uint8).view(code_dtype)
    for codes in (every, every.repeat(64), every.repeat(64).view(128, 128).t(), every.repeat(96, 1)[:, 1::2]):
        assert codes.isnan().any() and same_bits(scaling.decode(codes, dtype), codes.to(dtype))
