"""Shows the number formats of mixed precision, the rounding error of each, and one scaled FP8 product.

    ./launch.sh formats                    values around 1
    ./launch.sh formats --scale 1e-4       small ones: 8 bits underflow, unless the tensor has a scale
    ./launch.sh formats --scale 1000       large ones: e4m3 saturates, unless the tensor has a scale

A format has a range (max, smallest normal) and a precision (eps, the gap between 1 and the next value). e4m3 and e5m2
split the same eight bits differently: e4m3 has more precision, for weights and activations; e5m2 has more range, for
gradients. A scale moves a tensor into the range, but adds no precision. fp16 has the same range as e5m2, which is why
fp16 trains with a gradient scaler. bf16 has fp32's range and needs no scaler.

Formats: Micikevicius et al., FP8 Formats for Deep Learning (arXiv:2209.05433). The cast and the scale are those that
training uses (amp8/scaling.py); the product is torch's own. Everything runs on the CPU.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared.args import parse  # noqa: E402

SIZE = 1 << 16  # values of the random tensor
INNER, OUTER = 512, 128  # the product is [OUTER, INNER] @ [INNER, OUTER]; FP8 tensor cores want multiples of 16


@dataclass
class Arguments:
    scale: float = 1.0  # the random tensor is normal with this standard deviation, 1e-36 to 1e36
    seed: int = 0  # of the random numbers, 0 to 2**63 - 1


def formats():
    """{name: torch dtype}."""
    import torch

    return {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }


def limits(dtype):
    """(bits, max, min, smallest normal, eps) of a dtype. Below the smallest normal, the gap between values is eps times
    the smallest normal."""
    import torch

    info = torch.finfo(dtype)
    return info.bits, info.max, info.min, info.smallest_normal, info.eps


def relative_error(found, exact):
    """Norm of the difference divided by the norm of the exact values, in fp64."""
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def rounding(x, dtype, scale):
    """The error of rounding `x` (fp32) to `dtype` with a per-tensor `scale` (0-d): (relative error, underflows,
    saturations). Underflows are nonzero values that became zero; saturations are values beyond max that became max."""
    from amp8 import scaling

    codes = scaling.quantize(x, scale, dtype)
    underflows = int(((codes.float() == 0) & (x != 0)).count_nonzero())
    saturations = int(((x * scale).abs() > scaling.dtype_max(dtype)).count_nonzero())
    return relative_error(scaling.dequantize(codes, scale), x), underflows, saturations


def scaled_mm(a, b, scale_a, scale_b):
    """(a / scale_a) @ (b / scale_b) for FP8 codes [M, K] and [K, N], in fp32, by `torch.nn.functional.scaled_mm`, or by
    `torch._scaled_mm` in older versions of torch. torch's scale is the reciprocal of ours: it decodes."""
    import torch
    from torch.nn import functional

    b = b.t().contiguous().t()  # tensor cores read columns of b; a CPU takes either
    scale_a, scale_b = scale_a.reciprocal(), scale_b.reciprocal()
    if hasattr(functional, "scaled_mm"):
        kind = functional.ScalingType.TensorWise
        return functional.scaled_mm(a, b, scale_a, kind, scale_b, kind, output_dtype=torch.float32)
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)


def product(a, b, dtype_a, dtype_b):
    """The error of the FP8 product of fp32 `a` [M, K] and `b` [K, N]: (total error, error of the arithmetic alone).

    The total error is against the fp64 product of `a` and `b`. The arithmetic error is against the fp64 product of the
    rounded values: it is what multiplication and addition add to the rounding error.
    """
    from amp8 import scaling

    scale_a = scaling.power_of_two_scale(scaling.amax(a), dtype_a)
    scale_b = scaling.power_of_two_scale(scaling.amax(b), dtype_b)
    codes_a, codes_b = scaling.quantize(a, scale_a, dtype_a), scaling.quantize(b, scale_b, dtype_b)
    found = scaled_mm(codes_a, codes_b, scale_a, scale_b)
    rounded = (codes_a.double() / scale_a.double()) @ (codes_b.double() / scale_b.double())
    return relative_error(found, a.double() @ b.double()), relative_error(found, rounded)


def table(heads, rows):
    """Formats a table: the first column left-aligned, the others right-aligned."""
    lines = [heads, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    for first, *others in lines:
        cells = [first.ljust(widths[0])] + [text.rjust(w) for text, w in zip(others, widths[1:], strict=True)]
        print("  " + "  ".join(cells))


def fail(line):
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


def main():
    args = parse(Arguments)
    if not 1e-36 <= args.scale <= 1e36:  # beyond this range fp32 itself overflows or underflows
        fail(f"--scale {args.scale:g} is not from 1e-36 to 1e36")
    if not 0 <= args.seed < 2**63:
        fail(f"--seed {args.seed} is not from 0 to 2**63 - 1")
    import torch  # imported after the options are parsed: the import takes seconds, and --help does not need it

    from amp8 import scaling

    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(SIZE, generator=generator) * args.scale
    a, b = (torch.randn(OUTER, INNER, generator=generator) for _ in range(2))
    a, b = a * args.scale, b.t()
    largest = scaling.amax(x)

    print("formats (torch.finfo)")
    rows = [(name, *(f"{value:.6g}" for value in limits(dtype))) for name, dtype in formats().items()]
    table(("format", "bits", "max", "min", "smallest normal", "eps"), rows)

    print(f"\none tensor rounded: {x.numel()} normal values, standard deviation {args.scale:g}, largest {largest:.4g}")
    rows = []
    for name, dtype in formats().items():
        fitting = scaling.power_of_two_scale(largest, dtype)
        for label, scale in (("1", torch.ones(())), (f"2^{int(fitting.log2())}", fitting)):
            error, underflows, saturations = rounding(x, dtype, scale)
            rows.append((name, label, f"{error:.2e}", str(underflows), str(saturations)))
    table(("format", "scale", "relative error", "underflows", "saturations"), rows)

    used = "torch.nn.functional.scaled_mm" if hasattr(torch.nn.functional, "scaled_mm") else "torch._scaled_mm"
    print(f"\none scaled product: [{OUTER}, {INNER}] @ [{INNER}, {OUTER}] by {used}, fp32 out, error against fp64")
    exact = a.double() @ b.double()
    bf16 = relative_error(a.bfloat16() @ b.bfloat16(), exact)
    rows = [("bf16 @ bf16, for comparison", f"{bf16:.2e}", "-")]
    for name_a, name_b, use in (("e4m3", "e4m3", "forward"), ("e5m2", "e4m3", "backward")):
        errors = product(a, b, formats()[name_a], formats()[name_b])
        rows.append((f"{name_a} @ {name_b}, {use}", *(f"{error:.2e}" for error in errors)))
    table(("operands", "relative error", "of it arithmetic"), rows)


if __name__ == "__main__":
    main()
