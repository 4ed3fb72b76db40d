"""FP8 numbers and their scales: casting to FP8, FP8 products, and casting back.

FP8 holds few values, so a tensor is multiplied by a `scale` that brings its largest magnitude, the `amax`, near the
format's largest finite value, and then rounded: `codes = round(x * scale)`, and `x ~ codes / scale`. Every scale here
is this *quantisation* scale, fp32, per tensor (0-d) or per row and column (broadcastable); its reciprocal is what
`torch._scaled_mm` calls a scale.

Where a scale comes from:
- current (in-time) scaling: from the amax of the tensor itself;
- delayed scaling: from a history of past amaxes, so that the cast does not wait for a reduction. The state is plain
  tensors: `history` [length, *slots] whose row 0 collects the step's amaxes, `scale` [*slots]. A slot is one tensor
  with a scale of its own: any number of them, of any shape, are updated at once. A layer has them in one (`parts`).

Formats: Micikevicius et al., FP8 Formats for Deep Learning (arXiv:2209.05433). Power-of-two scales with a window:
FP8-LM (arXiv:2310.18313). Scales that are not powers of two: TransformerEngine's DelayedScaling.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

E4M3 = torch.float8_e4m3fn  # 448 is its largest value; no infinity, one NaN
E5M2 = torch.float8_e5m2  # 57344; infinity and NaN as in IEEE 754


class Format(NamedTuple):
    """What torch.finfo says of a format, for one of which it knows nothing."""

    max: float
    smallest_normal: float
    eps: float


E2M1 = Format(6.0, 1.0, 0.5)  # FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6; no infinity, no NaN
Number = torch.dtype | Format
PIECE = 1 << 18  # elements: their fp32 copies stay in a core's cache
HISTORY = 2  # the row of a layer's state in which its history begins
FEW = 1 << 13  # elements: fewer are read faster by torch's own cast
OF_ZEROS = 2.0**60  # the scale of a gradient of zeros: it says that they are small, and leaves room for clipping
FP32_MAX = torch.finfo(torch.float32).max


def info(dtype: Number) -> Format:
    """Its largest finite value, its smallest normal one, and the distance from 1 to the next."""
    if isinstance(dtype, Format):
        return dtype
    known = torch.finfo(dtype)
    return Format(known.max, known.smallest_normal, known.eps)


def dtype_max(dtype: Number) -> float:
    """Largest finite value of a dtype: 6 for e2m1, 448 for e4m3, 57344 for e5m2, 65504 for fp16."""
    return info(dtype).max


def amax(x: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Largest magnitude of `x`, fp32: 0-d, or reduced over `dim` (one or several), which is kept. NaN and infinity are
    returned unchanged, because a saturating cast would hide them later. The amax of an empty tensor is 0."""
    x = x.detach()
    if dim is not None:
        # Without the sign bit, floats sort like the integers with the same bits, which a CPU compares faster.
        x = x if x.dtype in (torch.bfloat16, torch.float32) else x.float()
        ints, magnitude = (torch.int32, 0x7FFFFFFF) if x.dtype == torch.float32 else (torch.int16, 0x7FFF)
        return x.view(ints).bitwise_and(magnitude).amax(dim, keepdim=True).view(x.dtype).float()
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    if torch.compiler.is_compiling():  # one reduction, in the kernel that makes x
        return x.abs().amax().float()
    low, high = torch.aminmax(x)  # one pass; abs() would write a copy of x first
    return torch.maximum(low.abs(), high.abs()).float()


def power_of_two_scale(
    amax: torch.Tensor, dtype: Number, margin: int = 0, previous: torch.Tensor | None = None
) -> torch.Tensor:
    """The largest power of two that keeps `amax` within `dtype`, lowered by `margin` powers (FP8-LM's rule).

    amax: fp32, any shape. Returns fp32 of that shape: 2**(floor(log2(max / amax)) - margin), exactly, kept within
    2**-126 .. 2**126 so that neither it nor its reciprocal is subnormal. If amax is 0, infinite or NaN, the result is
    `previous`, or 1.
    """
    # With amax = m * 2**e and m in [0.5, 1), the logarithm's floor is a comparison of mantissas: log2() would round.
    if amax.dim() == 0 and not (amax.is_cuda or torch.compiler.is_compiling()):
        value = amax.item()  # on a CPU faster than a dozen operators of torch
        if not 0 < value < math.inf:
            return torch.ones(()) if previous is None else previous.clone()
        max_mantissa, max_exponent = math.frexp(dtype_max(dtype))
        mantissa, exponent = math.frexp(value)
        exponent = max_exponent - exponent - (mantissa > max_mantissa) - margin
        return torch.tensor(2.0 ** min(max(exponent, -126), 126))
    carry, exponent = carry_and_exponent(dtype)
    exponent = exponent - margin - ((amax.float().view(torch.int32) + carry) >> 23)
    scale = ((exponent.clamp(-126, 126) + 127) << 23).view(torch.float32)  # exp2() need not be exact either
    return torch.where((amax > 0) & (amax < math.inf), scale, 1.0 if previous is None else previous)


def e8m0_scale(amax: torch.Tensor, dtype: Number, floor: bool = False) -> torch.Tensor:
    """The scale of an MX block of magnitude `amax`: 2**127 .. 2**-127, whose reciprocal is what E8M0 stores.

    The stored exponent is that of amax / max, rounded up (`cvt.rp.satfinite.ue8m0x2.f32`), as in TransformerEngine and
    as RCEIL in torchao; so no finite value saturates. An infinite amax has the last exponent; NaN has E8M0's NaN.

    floor: OCP's own rule, torchao's FLOOR: the exponent of amax less that of max. An amax whose mantissa is larger than
    max's saturates.
    """
    if floor:  # without its mantissa, amax is rounded up to itself
        top = 2.0 ** math.floor(math.log2(dtype_max(dtype)))
        power = amax.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
        amax = torch.where(amax < math.inf, power * (dtype_max(dtype) / top), amax)
    quotient = (amax * (1 / dtype_max(dtype))).clamp_(max=2.0**127)
    quotient = torch.nn.functional.threshold(quotient, 2.0**-127, 0.0)
    # A mantissa other than 0 carries into the exponent. The bits of NaN are lost; NaN * 0 is NaN.
    inverse = (quotient.view(torch.int32) + 0x7FFFFF).bitwise_and_(0x7F800000).view(torch.float32)
    return inverse.clamp_(min=2.0**-127).add_(quotient, alpha=0).reciprocal_()


def carry_and_exponent(dtype: Number) -> tuple[int, int]:
    """Two numbers of `power_of_two_scale`, in the bits of fp32: the scale of an amax is 2**(exponent - ((bits + carry)
    >> 23)). Adding `carry` raises the exponent of an amax whose mantissa is larger than the maximum's."""
    max_mantissa, max_exponent = math.frexp(dtype_max(dtype))
    return (1 << 23) - 1 - int((2 * max_mantissa - 1) * (1 << 23)), max_exponent + 126


def gradient_scale(amax: torch.Tensor) -> torch.Tensor:
    """The scale of a gradient of magnitude `amax`. It is NaN if the gradient is not finite, because the saturated codes
    would hide that."""
    scale = torch.where(torch.isfinite(amax), power_of_two_scale(amax, E4M3), torch.nan)
    return torch.where(amax == 0, OF_ZEROS, scale)


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes of `dtype` (FP8 or fp16): x * scale in fp32, rounded to nearest even.

    Values outside the range, infinity too, saturate at the largest finite value; NaN stays NaN. We clamp ourselves,
    because torch's cast gives NaN for such values up to 2.11 and saturates from 2.13 on.
    """
    y, top = x.float() * scale, dtype_max(dtype)
    if torch.compiler.is_compiling():
        # No `clamp`: it becomes min.NaN and max.NaN, and beside them ptxas 12.9 writes garbage where a kernel stores
        # FP8 codes in both layouts (triton#11111).
        return torch.where(y > top, top, torch.where(y < -top, -top, y)).to(dtype)
    return y.clamp(-top, top).to(dtype)


def round_to_grid(x: torch.Tensor, smallest_normal: float | torch.Tensor, dtype: Number) -> torch.Tensor:
    """`x` (fp32, contiguous) rounded to nearest even on an FP8 grid that has no upper end, in place.

    smallest_normal: where the grid becomes subnormal: the smallest normal of `dtype`, maybe divided by a power-of-two
    scale; a number or broadcastable. No FP8 tensor is made, because reading one is slow on a CPU.
    """
    return to_grid(x, binade(x, smallest_normal), dtype)


def binade(x: torch.Tensor, smallest_normal: float | torch.Tensor) -> torch.Tensor:
    """2**e for each element, e being its exponent; where the grid is subnormal, `smallest_normal`."""
    return x.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32).clamp_(min=smallest_normal)


def to_grid(x: torch.Tensor, unit: torch.Tensor, dtype: Number) -> torch.Tensor:
    """`x` rounded to the grid of `dtype` in the binade that begins at `unit`, in place."""
    # In x + 1.5 * 2**(e + shift) only the grid's mantissa bits of x are left of the sum's last place, so the addition
    # rounds as hardware does, and the subtraction is exact. In fp32, since a compiler may keep wider intermediates than
    # bf16 and with them what should have been rounded away.
    magic = 1.5 * 2.0 ** (23 + round(math.log2(info(dtype).eps)))
    return x.add_(unit, alpha=magic).sub_(unit, alpha=magic)


def round_codes(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of `quantize(x, scale, dtype)` for a 0-d scale, as bf16, which holds them exactly. Several times
    faster on a CPU than the FP8 tensor and its way back."""
    info = torch.finfo(dtype)

    def rounded(piece: torch.Tensor) -> torch.Tensor:
        y = piece.to(torch.float32, copy=True).mul_(scale).clamp_(-info.max, info.max)
        return round_to_grid(y, info.smallest_normal, dtype)

    return in_pieces(rounded, x)


def in_pieces(
    rounded: Callable[..., torch.Tensor],
    x: torch.Tensor,
    *others: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """rounded(x, *others), elementwise, as `dtype`. In pieces that stay in the cache: each of the half dozen passes
    over a whole tensor would go through memory. others: broadcastable to `x`, which then is a matrix."""
    if torch.compiler.is_compiling():
        return rounded(x, *others).to(dtype)  # one fused loop
    if x.is_cuda or x.numel() <= PIECE:
        return rounded(x.contiguous(), *others).to(dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    whole = [t.expand(x.shape) for t in (x, *others, out)] if others else [x.reshape(-1), out.view(-1)]
    rows = max(1, PIECE * len(whole[0]) // x.numel())
    for *piece, codes in zip(*(t.split(rows) for t in whole), strict=True):
        codes.copy_(rounded(*piece))
    return out


def operand(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` as an operand of `product`: codes of `dtype` under a 0-d scale; `x` may be such codes. On a CPU, which has no
    FP8 products, the same values are bf16, because it makes and reads them several times faster."""
    if x.is_cuda:
        return x if x.dtype == dtype else quantize(x, scale, dtype)
    return decode(x, torch.bfloat16) if x.dtype == dtype else round_codes(x, scale, dtype)


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`codes.to(dtype)` for codes of any dtype. On a CPU torch reads FP8 one value after another. A tensor of some size
    takes a ninth of that time through the bits of fp16."""
    if codes.dtype not in (E4M3, E5M2) or codes.numel() < FEW or codes.device.type != "cpu":
        return codes.to(dtype)
    if torch.compiler.is_compiling():  # one loop in any case
        return codes.to(dtype)
    bits = codes.view(torch.int8).to(torch.int16)  # the sign fills the upper byte
    if codes.dtype == E5M2:  # the upper byte of an fp16
        return bits.bitwise_left_shift_(8).view(torch.float16).float().to(dtype)
    # Exponent and mantissa move to fp16's, whose exponent counts from 15 instead of 7: a factor of 2**8.
    bits = bits.bitwise_left_shift_(7).bitwise_and_(-0x8000 | 0x3F80)
    # All ones are NaN: only there the sum carries into the top bit of fp16's exponent.
    bits.bitwise_or_((bits + 0x80).bitwise_and_(0x4000))
    return bits.view(torch.float16).float().mul_(2**8).to(dtype)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """codes / scale in fp32, as `dtype`. Exact in fp32 for a power-of-two scale."""
    return (decode(codes) / scale).to(dtype)


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor | None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    bias: torch.Tensor | None = None,
    exact: bool = False,
    use_fast_accum: bool = False,
    pad_inner: bool = False,
    reciprocals: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """(a / scale_a) @ (b / scale_b) + bias for codes a [M, K] and b [K, N], as [M, N] of `out_dtype`. bias: [N].

    scale_a: 0-d or [M, 1]; scale_b: 0-d or [1, N]; reciprocals: of both, where they are known already: then scale_b may
    be None, if it is a power of two. K and N must be multiples of 16, as FP8 tensor cores demand, on every device;
    `pad_inner` allows any K, for tensor cores padded with zeros, which changes nothing.

    On a GPU with FP8 tensor cores: `torch._scaled_mm`, which adds a bias before it rounds; `use_fast_accum` is its own.
    Elsewhere the codes multiply as bf16, which holds every FP8 value exactly (codes may come as bf16 already), and the
    result is scaled. For bf16 the sum is rounded before the scale: a power of two adds no error of its own, another
    scale a second rounding to `out_dtype`. `exact`, or an fp32 out_dtype, multiplies dequantised values in fp32 and
    rounds once: with power-of-two scales bit for bit what `torch._scaled_mm` gives for fp32 on a CPU (without oneDNN,
    whose FP8 kernels on newer CPUs sum in another order). Two e5m2 operands raise, as on a GPU.
    """
    k, n = b.shape
    if n % 16 or (k % 16 and not pad_inner):
        raise ValueError(f"FP8 products need K and N to be multiples of 16, got K={k}, N={n}")
    if a.dtype == b.dtype == E5M2:
        raise ValueError("FP8 products take at most one e5m2 operand")
    # pyrefly: ignore[missing-attribute]
    factors = reciprocals or (scale_a.reciprocal(), scale_b.reciprocal())
    if _has_fp8_hardware(a) and not exact:
        return _hardware_product(a, b, *factors, out_dtype, bias, use_fast_accum)
    if bias is not None:
        out = product(a, b, scale_a, scale_b, out_dtype, exact=exact, reciprocals=factors)
        return out.add_(bias.to(out_dtype))
    if exact or out_dtype == torch.float32:
        scale_b = factors[1].reciprocal() if scale_b is None else scale_b
        with torch.autocast(a.device.type, enabled=False):
            return (dequantize(a, scale_a) @ dequantize(b, scale_b)).to(out_dtype)
    out = decode(a, torch.bfloat16) @ decode(b, torch.bfloat16)
    factor = factors[0] * factors[1]
    if out.is_cuda and factor.dim() == 0:
        factor = factor.reshape(1, 1)  # a 0-d factor would be rounded to bf16 there; a CPU keeps it fp32
    return out.mul_(factor).to(out_dtype)


def _has_fp8_hardware(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype in (E4M3, E5M2) and fp8_cores(x.device)


def fp8_cores(device: torch.device) -> bool:
    """Whether a GPU has FP8 tensor cores. torch's own lookup takes half as long as the launch of a product."""
    return capable(device) if torch.compiler.is_compiling() else known(device)


def capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


known = functools.cache(capable)


def _hardware_product(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    use_fast_accum: bool,
) -> torch.Tensor:
    """scale_a, scale_b: what torch calls so, the reciprocals of ours."""
    if padding := -a.shape[1] % 16:
        # through uint8: pad() has no FP8 kernel; the code 0 is zero in both formats
        a = torch.nn.functional.pad(a.view(torch.uint8), (0, padding)).view(a.dtype)
        b = torch.nn.functional.pad(b.t().contiguous().view(torch.uint8), (0, padding)).view(b.dtype).t()
    if scale_a.dim() or scale_b.dim():  # rowwise takes both as vectors, and returns bf16 only
        scale_a, scale_b = scale_a.expand(a.shape[0], 1), scale_b.expand(1, b.shape[1])
        dtype = torch.bfloat16
    else:
        dtype = out_dtype
    in_the_product = bias is not None and dtype == out_dtype != torch.float32
    out = torch._scaled_mm(
        a.contiguous(),
        b if b.stride() == (1, b.shape[0]) else b.t().contiguous().t(),  # tensor cores read rows of a and columns of b
        scale_a=scale_a.contiguous(),
        scale_b=scale_b.contiguous(),
        bias=bias.to(dtype) if in_the_product else None,  # pyrefly: ignore[missing-attribute]
        out_dtype=dtype,
        use_fast_accum=use_fast_accum,
    )
    out = out if dtype == out_dtype else out.to(out_dtype)
    return out if bias is None or in_the_product else out.add_(bias.to(out_dtype))


# Delayed scaling


def record_(history: torch.Tensor, value: torch.Tensor, slot: int | tuple[int, ...] = ()) -> None:
    """Records an amax in the history's row of this step, in place. The row keeps the maximum over the micro-batches of
    a step. NaN is stored as infinity, because a maximum over ranks could drop NaN. Don't call it in evaluation."""
    row = history[0][slot]
    row.copy_(torch.maximum(row, value.nan_to_num(nan=math.inf, posinf=math.inf)))


def record(amax: torch.Tensor, address: torch.Tensor, slot: int) -> torch.Tensor:
    """`record_` in code that is compiled for a CPU, by the address of the state (int64 [1]). Returns the amax. For a
    history that it changes the compiler would allow no second forward pass before a backward pass."""
    row, value = ctypes.c_float.from_address(int(address) + 4 * (2 * HISTORY + slot)), float(amax)
    row.value = max(row.value, math.inf if math.isnan(value) else value)
    return amax.clone()


@functools.cache
def register() -> None:
    """Makes an operator of `record`, which compiled code calls."""
    operator = torch.library.custom_op("amp8::record", record, mutates_args=())
    operator.register_fake(lambda amax, address, slot: torch.empty_like(amax))


def window_scale(
    value: torch.Tensor, scale: torch.Tensor, updates: torch.Tensor, dtype: torch.dtype, window: int
) -> torch.Tensor:
    """FP8-LM's scale for a tensor about to be cast: in-time, from its own amax `value`, during the first `window`
    updates (an empty history knows nothing), then the delayed `scale`. `updates`: integer tensor shaped as `scale`."""
    return torch.where(updates < window, power_of_two_scale(value, dtype, previous=scale), scale)


def parts(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scale, updates, history) in a state of two slots [..., HISTORY + window, 2], fp32: views. The updates, a number,
    are int32 in the place of fp32."""
    return state[..., 0, :], state[..., 1, :].view(torch.int32), state[..., HISTORY:, :]


def updated_window(
    history: torch.Tensor, scale: torch.Tensor, updates: torch.Tensor, dtypes: Sequence[torch.dtype]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8-LM's update, once per optimizer step: a power-of-two scale from the largest amax in the window.

    history [..., window, slots], scale and updates [..., slots]: returns what they become. dtypes: of each slot. An
    infinite amax is forgotten and sends its slot back to in-time scaling for a whole window, and so does a window of
    nothing but zeros, as of a layer that is not used yet.
    """
    last = history[..., :1, :]
    overflow = ~torch.isfinite(last)
    known = torch.cat([last.masked_fill(overflow, 0), history[..., 1:, :]], -2)
    amax = known.amax(-2)
    new, slot = scale, torch.arange(len(dtypes), device=scale.device)
    for i, dtype in enumerate(dtypes):  # not a stack of them, which the compiler writes one by one
        new = torch.where(slot == i, power_of_two_scale(amax, dtype, previous=scale), new)
    updates = (updates + 1).masked_fill(overflow.squeeze(-2) | (amax == 0), 0)
    return torch.cat([torch.zeros_like(last), known[..., :-1, :]], -2), new, updates


def update_delayed_(
    history: torch.Tensor,
    scale: torch.Tensor,
    fp8_max: float | torch.Tensor,
    margin: int = 0,
    amax_compute_algo: str = "max",
) -> None:
    """TransformerEngine's DelayedScaling update, in place: scale = fp8_max * 2**-margin / amax.

    history [amax_history_len, *slots], scale [*slots] starting at 1, fp8_max a number or [*slots]. The amax is the
    largest in the history ("max") or the last ("most_recent"). As in TransformerEngine's default CUDA kernel there is
    one true division, and a slot whose last amax is 0 is left as it is, unrolled. An amax of 0, infinite or NaN keeps
    the scale; an infinite scale becomes fp32's largest value.
    """
    if amax_compute_algo not in ("max", "most_recent"):
        raise ValueError(f"amax_compute_algo must be 'max' or 'most_recent', got {amax_compute_algo!r}")
    last = history[0].clone()
    value = history.amax(0) if amax_compute_algo == "max" else last
    rolled = history.roll(-1, 0)
    rolled[0] = 0
    # Tensor over tensor: torch computes a Python number over a tensor by the reciprocal, which rounds twice.
    new = torch.full_like(value, 2.0**-margin) * fp8_max / value
    new = torch.where(torch.isfinite(value) & (value > 0) & (last != 0), new, scale)
    scale.copy_(new.clamp(max=FP32_MAX))
    history.copy_(torch.where(last == 0, history, rolled))
