"""MS-AMP's FP4: "Optimizing Large Language Model Training Using FP4 Quantization", arXiv:2501.17116.

    forward    y  = A w4^T               A = Q(clamp(x)) + (x - clamp(x))
    backward   dx = dy w4                e5m2 x e2m1
               dw = dy^T x * f'(w)       e5m2 x e4m3

Q rounds to e2m1 under a scale 6 / amax for each row of x (a token) and for each output channel of w. Outliers of x, the
values below the 1% quantile and above the 99% quantile of the whole tensor, are clamped, and what that cuts off, about
2% of the values, is added in high precision (section 3.2). The gradient of w is multiplied by the derivative of a
steep, smooth function in place of Q, the differentiable gradient estimator (section 3.1); x has the straight-through
one. The scales of w cancel in it by the chain rule, so f' is taken at the scaled weight. The rest of the paper's
training is FP8-LM's: FP8 gradients, their communication, and the optimizer.

The product is in bf16, on a GPU too: bf16 holds e2m1 exactly, and what is cut off is rounded to it as x itself is. It
shows what FP4 does to the loss, and takes no less time than bf16.

What the paper and its authors' article on it leave open is done in the plainest way:
- Backward products have the level's formats, FP8, with the w4 of the forward pass, since dL/dA = dL/dy w4 follows from
  it, and with the FP8 copy of x. A scale for each channel does not fit a product that sums over channels, so dy is
  divided by the scales before it is cast.
- What is cut off is multiplied by w4: the paper's dL/dw4 = A^T dL/dy holds for the sum A only then.
- Ties are rounded to even, as in hardware. At a midpoint, where f' is infinite, it is 3, to which the paper clips it.
- w is what the layer has: FP16 codes, or FP8 ones under O3 and fully_shard.
- Quantiles of a large tensor are those of some of its rows. A tensor of less than 100 values has no outliers.
"""

from typing import Any

import torch

from . import linear, scaling
from .coded import refuse_a_derivative
from .compiled import output
from .scaling import E2M1

STEEPNESS = 5  # the paper's k
LARGEST_SLOPE = 3.0
TAIL = 100  # one of so many values is above the quantile alpha = 0.99, and one below 1 - alpha
SAMPLE = 1 << 14  # elements that quantiles are taken of


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """6 / amax. NaN for what is not finite: e2m1 has no infinity and would hide it. Finite for zeros."""
    scale = torch.full_like(amax, E2M1.max) / amax.clamp(min=2.0**-120)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """`x` (fp32, contiguous) rounded to e2m1, in place."""
    return scaling.round_to_grid(x.clamp_(-E2M1.max, E2M1.max), E2M1.smallest_normal, E2M1)


def bounds(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantiles 1 - alpha and alpha of x [M, in]."""
    # An odd step: if it divided the length of a sequence, it would see but the same places of each.
    step = -(-len(x) // max(1, SAMPLE // x.shape[1])) | 1
    sample = x[::step].reshape(-1).float()
    cut = sample.numel() // TAIL
    return sample.kthvalue(cut + 1).values, sample.kthvalue(sample.numel() - cut).values


def of_input(x: torch.Tensor, clamped: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(A as bf16, scales [M, 1]) of x [M, in], with the values A / scales. clamped: whether outliers are."""
    if not x.numel():  # an expert that gets no token
        return x.to(torch.bfloat16), x.new_ones(len(x), 1, dtype=torch.float32)
    least, largest = x.amin(1, keepdim=True).float(), x.amax(1, keepdim=True).float()
    if clamped:
        low, high = bounds(x)
        least, largest = least.clamp(low, high), largest.clamp(low, high)
    scale = scale_of(torch.maximum(least.abs(), largest.abs()))

    def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if not clamped:
            return to_e2m1(x.float() * scale)
        inner = x.float().clamp(low, high)
        return (x.float() - inner).mul_(scale).add_(to_e2m1(inner.mul_(scale)))

    return scaling.in_pieces(rounded, x, scale, dtype=torch.bfloat16), scale


def of_weight(codes: torch.Tensor, code_scale: torch.Tensor, transposed: bool) -> tuple[torch.Tensor, ...]:
    """(w4 as bf16, its scales, codes that can be scaled, the scales of these) of the codes of a weight, one for each
    output channel: [out, 1], or [1, out] of a weight [in, out]."""
    if codes.dtype == scaling.E4M3:
        codes = scaling.decode(codes, torch.bfloat16)
    own = scale_of(scaling.amax(codes, int(not transposed)).clamp(min=2.0**-24))  # FP16's least: no scale overflows
    w4 = scaling.in_pieces(lambda x, scale: to_e2m1(x.float() * scale), codes, own, dtype=torch.bfloat16)
    return w4, (own * code_scale).clamp(max=2.0**126), codes, own


def slope(x: torch.Tensor) -> torch.Tensor:
    """f'(x) = |2 x / delta - 1| ** (1 / k - 1) / k, at most 3, for x within one interval [0, delta] between two numbers
    of e2m1; each other interval has it shifted, so that its ends meet. x: scaled, fp32, contiguous."""
    x = x.abs()
    delta = scaling.binade(x, E2M1.smallest_normal) * E2M1.eps
    place = (x / delta).frac_().mul_(2).sub_(1).abs_()
    return place.log2_().mul_(1 / STEEPNESS - 1).exp2_().mul_(1 / STEEPNESS).clamp_(max=LARGEST_SLOPE)


class Products(torch.autograd.Function):
    """linear.Products with A and its scales in place of the input's FP8 operand."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, port: torch.Tensor | None, bias: torch.Tensor | None, weight: torch.Tensor,
        weight_scale: torch.Tensor, a: torch.Tensor, a_scale: torch.Tensor, x8_turned: torch.Tensor | None,
        x_scale: torch.Tensor, delayed: linear.Delayed,
        settings: tuple[bool, bool, int, torch.dtype, bool, bool, torch.dtype], operands: linear.Operands,
    ) -> torch.Tensor:  # fmt: skip
        _, clamped, _, _, transposed, exact, dtype = settings
        w4, w_scale, *_ = of_weight(weight, weight_scale, transposed)
        ctx.delayed, ctx.settings, ctx.operands = delayed, settings, operands
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        linear.note(operands, E2M1, E2M1)
        if clamped:  # what was cut off
            linear.note(operands, torch.bfloat16, E2M1)
        ctx.save_for_backward(x8_turned, x_scale, weight, weight_scale)  # what is made of the weight is made again
        w, columns = w4 if transposed else w4.t(), w_scale.view(1, -1)
        return output(scaling.product(a, w, a_scale, columns, dtype, bias=bias, exact=exact))

    @staticmethod
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_a_derivative()
        x8_turned, x_scale, weight, weight_scale = ctx.saved_tensors
        estimated, _, window, gradient_format, transposed, exact, _ = ctx.settings
        of_x, of_w, of_bias = ctx.needs_input_grad[:3]
        w4, w_scale, codes, own = of_weight(weight, weight_scale, transposed)
        divided, slot = dy * w_scale.reciprocal().view(1, -1), linear.OUTPUT_GRADIENT
        cast_as = gradient_format, window, True, of_w
        dy8, dy8_turned, dy_scale, dy_factor = linear.cast(divided, ctx.delayed, slot, *cast_as)
        dx = dw = None
        if of_x:
            linear.note(ctx.operands, gradient_format, E2M1)
            w, one = w4.to(scaling.E4M3) if w4.is_cuda else w4, torch.ones_like(dy_scale)  # e4m3 holds e2m1 exactly
            dx = scaling.product(dy8, w.t() if transposed else w, dy_scale, one, dy.dtype, exact=exact)
            dx = dx.to(ctx.x_dtype)
        if of_w:
            pair = (dy8_turned, dy_scale, dy_factor), (x8_turned, x_scale, x_scale.reciprocal())
            dw = linear.weight_gradient(ctx, *pair, dy.dtype)

            def corrected(
                dw: torch.Tensor, w_scale: torch.Tensor, codes: torch.Tensor, own: torch.Tensor
            ) -> torch.Tensor:
                return dw * w_scale * slope(codes.float() * own) if estimated else dw * w_scale

            dw = scaling.in_pieces(corrected, dw, w_scale, codes, own, dtype=dw.dtype)
        db = dy.sum(0).to(ctx.bias_dtype) if of_bias else None
        return dx, dw, db, None, None, None, None, None, None, None, None, None
