"""The Triton kernels in Triton's interpreter, against the functions that say what they compute. test_kernels.py runs
this file in a process with TRITON_INTERPRET=1, which must be set when triton is imported."""

import pytest
import torch

from amp8 import gradients, kernels, linear, optimizer, scaling

E4M3, E5M2 = scaling.E4M3, scaling.E5M2


@pytest.fixture(autouse=True)
def several_blocks_for_each(monkeypatch):
    monkeypatch.setattr(kernels, "PROGRAMS", 4)
    monkeypatch.setattr(kernels, "PARTS", 2)
    torch.manual_seed(0)


def same(a, b):
    """Equal values; NaN is equal to NaN, and 0 to -0."""
    a, b = a.float(), b.float()
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, columns", [(64, 128), (100, 80), (7, 48)])
@pytest.mark.parametrize("updates", [0, 15, 16])
def test_the_cast_is_the_written_one(dtype, given, rows, columns, updates):
    x = (torch.randn(rows, columns) * torch.logspace(-9, 3, columns)).to(given)
    for bad in (None, torch.inf, -torch.inf, torch.nan, 0.0):
        if bad is not None:
            x[3, 5] = bad
        x = x if bad != 0 else torch.zeros_like(x)
        for slot, recording in ((0, True), (1, True), (1, False)):
            results = []
            for run in (kernels.cast_delayed, written):
                state = torch.zeros(scaling.HISTORY + 16, 2)
                scale, of_state, history = scaling.parts(state)
                history[0] = torch.tensor([0.5, 900.0])
                scale.copy_(torch.tensor([4.0, 64.0]))
                of_state.fill_(updates)
                results.append((*run(x, dtype, state, slot, 16, recording, True), history))
            (codes, turned, scale, factor, history), (written_codes, _, written_scale, written_history) = results
            assert same(scale, written_scale) and same(factor, written_scale.reciprocal())
            assert same(history, written_history) and same(turned, codes.t())
            if scale.isfinite():
                assert same(codes, written_codes)
    assert kernels.cast_delayed(x, dtype, state, 0, 16, False, False)[1] is None


def written(x, dtype, state, slot, window, recording, transposed):
    """linear.cast, as on a device whose products are in FP8."""
    scale, updates, history = scaling.parts(state)
    amax = scaling.amax(x)
    scale = linear.cast_scale(amax, scale[slot], updates[slot], dtype, window)
    if recording:
        scaling.record_(history[:, slot], amax)
    return scaling.quantize(x, scale, dtype), None, scale


def test_copies_of_weights_are_the_written_ones():
    codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    codes = codes[codes.isfinite()].view(-1, 64)  # all numbers
    scale = torch.tensor(3.0)
    copy, factor, _ = kernels.cast_weight(codes, scale, False)
    assert same(copy, linear.fp16_to_e4m3(codes, scale)) and factor == (scale * linear.FP16_TO_E4M3).reciprocal()
    bias = torch.arange(len(codes)).float()  # the interpreter cuts bits off for bf16
    bias -= bias % 8
    turned, factor, cast_bias = kernels.cast_weight(codes, scale, True, bias)
    assert cast_bias.dtype == torch.bfloat16 and same(cast_bias, bias)
    assert same(kernels.cast_weight(codes, scale, False, bias, torch.float16)[2], bias)
    assert same(turned, copy.t()) and factor == (scale * linear.FP16_TO_E4M3).reciprocal()
    turned, factor, _ = kernels.cast_weight(copy, scale, True)
    assert same(turned, copy.t()) and factor == scale.reciprocal()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shapes", [[(100, 48)], [(16, 16), (4, kernels.BLOCK + 48), (7, 3), (100, 48)]])
@pytest.mark.parametrize("factor", [1.0, 0.0, 1e-30, 1e30, torch.inf, torch.nan])
def test_gradients_are_rounded_as_written(dtype, shapes, factor):
    values = [torch.randn(shape).to(dtype) * (factor if at == 0 else 10.0**-at) for at, shape in enumerate(shapes)]
    codes, scales = [torch.empty(x.shape, dtype=E4M3) for x in values], [torch.empty(()) for _ in values]
    kernels.round_gradients(values, codes, scales)
    for value, code, scale in zip(values, codes, scales, strict=True):
        written_codes, written_scale = gradients.quantize_gradient(value)
        assert same(scale, written_scale)
        if scale.isfinite():
            assert same(code, written_codes)


def test_squares_are_summed_for_each_tensor():
    codes = [(torch.randn(n) * 50).to(E4M3) for n in (5000, 16, 0, 3 * kernels.BLOCK + 7)]
    expected = torch.stack([tensor.double().square().sum() for tensor in codes]).float()
    torch.testing.assert_close(kernels.squares(codes), expected, rtol=1e-6, atol=0)


def tensors(n, weight, moment, copied):
    """w, g, m, v and the copy of w, of n elements."""
    w = (torch.randn(n) * (1000 if weight == torch.float16 else 1)).to(weight)
    g = (torch.randn(n) * 50).to(E4M3)
    if moment == torch.float32:
        return [w, g, torch.randn(n) * 0.01, torch.rand(n) * 0.01, None]
    m, v = (torch.randn(n) * 50).to(E4M3), (torch.rand(n) * 1000).half()
    v[: n // 8] = 0
    return [w, g, m, v, torch.zeros(n, dtype=E4M3) if copied else None]


@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(
    "weight, moment, copied",
    [
        (torch.float16, E4M3, False),  # O2
        (torch.float16, E4M3, True),  # O3
        (torch.float16, torch.float32, False),  # O1
        (torch.float32, E4M3, False),  # O2, outside converted layers
        (torch.bfloat16, E4M3, False),
    ],
)
def test_adam_is_the_written_one(weight, moment, copied, decoupled, noisy):
    """Sizes and starts as of shards: in a block of random numbers, over its end, a part of a chunk, none."""
    sizes, starts = (5000, 16384, 4096, 48, 0), (0, 16, 3 * 65536 - 2000, 48, 7)
    seeds = (5, 7_000_024, 2**40 + 9, 11, 3)
    flats = [tensors(n, weight, moment, copied) for n in sizes]
    numbers = torch.rand(len(sizes), 16) * 0.1 + 0.01
    codes = moment == E4M3
    known = {optimizer.W_IN: 1e-3, optimizer.G_IN: 1e-2, optimizer.M_IN: 0.9 / 64 if codes else 0.9,
             optimizer.V_IN: 0.99 / 1024 if codes else 0.99, optimizer.LEAST_V: 2.0**-35, optimizer.ROOT_BIAS_V: 0.25,
             optimizer.KEEP_W: 0.999, optimizer.W_OUT: 1024, optimizer.M_OUT: 64, optimizer.V_OUT: 1024,
             optimizer.COPY_OUT: 32}  # fmt: skip
    for column, value in known.items():
        numbers[:, column] = value
    flats, twins = ([[None if t is None else t.clone() for t in flat] for flat in flats] for _ in range(2))
    found = kernels.adam(flats, numbers, list(seeds), list(starts), decoupled, noisy)
    for i, twin in enumerate(twins[:-1]):
        place = (seeds[i], starts[i]) if noisy else None
        expected = optimizer.adam_slice(*twin, numbers[i].unbind(), place, decoupled)
        torch.testing.assert_close(found[i], expected, rtol=2e-7, atol=0)
        for tensor, other in zip(flats[i], twin, strict=True):
            if tensor is not None and tensor.dtype in (torch.float32, torch.bfloat16):
                near = 1e-6 if tensor.dtype == torch.float32 else 2**-7  # the interpreter cuts bits off for bf16
                torch.testing.assert_close(tensor, other, rtol=near, atol=1e-7)
            elif tensor is not None:  # the last bit of fp32 decides a rounding now and then
                assert (tensor.float() != other.float()).float().mean() < 1e-3
    assert not found[-1].any()


def test_adam_changes_nothing_where_the_norm_is_not_finite():
    flat = tensors(5000, torch.float16, E4M3, True)
    before = [tensor.clone() for tensor in flat]
    numbers = torch.full((1, 16), torch.nan)
    found = kernels.adam([flat], numbers, [3], [0], True, True, torch.ones(1))
    assert all(map(same, flat, before)) and not found.any()
    kernels.adam([flat], numbers, [3], [0], True, True, torch.zeros(1))
    assert not same(flat[0], before[0])
