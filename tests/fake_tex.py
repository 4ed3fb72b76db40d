"""Replaces TransformerEngine's compiled module, `transformer_engine_torch`, by plain torch, as far as its Linear and
LayerNorm need it.

With it, TransformerEngine's own Python (modules, quantizers, autocast, amaxes and scales) runs without a GPU. This file
computes what the kernels would compute, in fp32, from real FP8 tensors. It does not use amp8, because tests compare
amp8 with it. Call `install()` after `import torch` and before `import transformer_engine`.

Source: TransformerEngine 2.20, transformer_engine/pytorch/csrc (what each function takes and returns) and
common/recipe/delayed_scaling.cu (the fused update). cuBLASLt's rules for FP8: its documentation, cublasLtMatmul.
"""

import enum
import importlib.metadata
import importlib.util
import math
import os
import re
import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F

VERSION = "2.20.2"
NAMES = "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
DTYPES = (
    torch.uint8,
    torch.int32,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
DType = enum.IntEnum("DType", NAMES, start=0)
FP8FwdTensors = enum.IntEnum(
    "FP8FwdTensors", [f"GEMM{i}_{what}" for i in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")], start=0
)
FP8BwdTensors = enum.IntEnum(
    "FP8BwdTensors", [f"GRAD_{what}{i}" for i in (1, 2, 3) for what in ("OUTPUT", "INPUT")], start=0
)
NVTE_Fused_Attn_Backend = enum.IntEnum(
    "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
)


def missing():
    """The reason why TransformerEngine's Python cannot be imported here, or None."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "TransformerEngine's Python is not installed: ./launch.sh setup --extra dev --extra te-python"
    found = importlib.metadata.version("transformer-engine")
    return None if found == VERSION else f"tests/fake_tex.py is for TransformerEngine {VERSION}, {found} is installed"


def install():
    """Installs this file's functions as TransformerEngine's compiled module. Returns that module."""
    os.environ["NVTE_FRAMEWORK"] = "none"  # importing the package tries its part for torch, and would warn
    import transformer_engine.common

    module = Compiled("transformer_engine_torch")
    sources = Path(transformer_engine.common.__file__).parents[1].glob("pytorch/**/*.py")
    module.__all__ = sorted(
        {name for path in sources for name in re.findall(r"\b(?:tex|ext)\.(\w+)", path.read_text())}
    )
    for value in (DType, FP8FwdTensors, FP8BwdTensors, NVTE_Fused_Attn_Backend, quantize, dequantize, generic_gemm, bgrad_quantize,
                  fp8_transpose, layernorm_fwd, layernorm_bwd, gelu, dgelu, dbias_dgelu, scaled_softmax_forward,
                  scaled_softmax_backward, fused_amax_and_scale_update_after_reduction):  # fmt: skip
        setattr(module, value.__name__, value)
    module.get_cublasLt_version, module.get_cudnn_version = lambda: 130400, lambda: 92600
    module.get_num_cublas_streams = lambda: 4
    sys.modules[module.__name__] = module
    transformer_engine.common.load_framework_extension = lambda framework: None
    torch.cuda.default_generators = (torch.default_generator,) * 8  # its checkpointing keeps their states
    return module


class Compiled(types.ModuleType):
    """What is not written above is a name only: TransformerEngine's files mention it when they are imported."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Absent(name, (), {}))
        return getattr(self, name)


class Absent(type):
    """A class for annotations, an enum whose members are counted as they are asked for; calling it says its name."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        return vars(cls)[name]

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(f"tests/fake_tex.py has no {cls.__name__}")


# Casts


def quantize(tensor, quantizer, output=None, noop=None):
    """`tensor` in FP8 as `quantizer` says, by rows, by columns, or both: Hopper sums along rows only, so columns are kept
    as rows of the transpose.

    Delayed scaling casts with the scale that it has and records the amax; all others make their scales from the tensor.
    """
    if type(quantizer).__name__ == "NVFP4Quantizer":
        return quantize_fp4(tensor, quantizer, output)
    if type(quantizer).__name__ not in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        return quantize_tiles(tensor, quantizer, output)
    fp8 = DTYPES[quantizer.dtype]
    top = torch.finfo(fp8).max
    amax = tensor.detach().abs().amax().float().reshape(1)
    if type(quantizer).__name__ == "Float8Quantizer":
        quantizer.amax.copy_(amax)
        scale = quantizer.scale.detach().reshape(1).clone()
    else:
        scale = torch.where(amax > 0, top / amax, torch.ones_like(amax))
    data = (tensor.detach().float() * scale).clamp(-top, top).to(fp8).view(torch.uint8)
    columns = fp8_transpose(data, quantizer.dtype) if quantizer.columnwise_usage else None
    if output is not None:
        output._data, output._transpose = data, columns
        output._transpose_invalid = columns is None
        output._scale_inv.copy_(scale.reciprocal())
        return output
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    parts = {"data": data if quantizer.rowwise_usage else None, "data_transpose": columns, "quantizer": quantizer,
             "fp8_scale_inv": scale.reciprocal(), "fp8_dtype": quantizer.dtype}  # fmt: skip
    if quantizer.internal:
        return Float8TensorStorage(fake_dtype=tensor.dtype, **parts)
    return Float8Tensor(shape=tensor.shape, dtype=tensor.dtype, requires_grad=False, device=tensor.device, **parts)


def tile(quantizer, columns):
    """How many (rows, columns) of the stored values share a scale."""
    if type(quantizer).__name__ == "MXFP8Quantizer":
        return (32, 1) if columns else (1, 32)
    return (128 if quantizer.block_scaling_dim == 2 else 1, 128)


def quantize_tiles(tensor, quantizer, output):
    """A power of two as the scale of each tile. MXFP8 keeps its exponents, and its columns as they stand."""
    mx = type(quantizer).__name__ == "MXFP8Quantizer"
    if output is not None or not (mx or type(quantizer).__name__ == "Float8BlockQuantizer"):
        raise NotImplementedError(f"tests/fake_tex.py casts into new tensors only, not by {type(quantizer).__name__}")
    fp8, shape, parts = DTYPES[quantizer.dtype], tensor.shape, {}
    for kind, columns, wanted in (
        ("rowwise", False, quantizer.rowwise_usage),
        ("columnwise", True, quantizer.columnwise_usage),
    ):
        x = tensor.detach().float().reshape(-1, shape[-1])
        x = x.t() if columns and not mx else x
        inverse = by_tiles(x, tile(quantizer, columns), fp8)
        data = (x / spread(inverse, tile(quantizer, columns), x.shape)).to(fp8).view(torch.uint8)
        if mx:
            inverse = (inverse.log2() + 127).to(torch.uint8)  # E8M0
        elif quantizer.block_scaling_dim == 1:
            inverse = inverse.t()
        room = quantizer.get_scale_shape(shape, columns)
        inverse = F.pad(inverse, (0, room[1] - inverse.shape[1], 0, room[0] - inverse.shape[0])).contiguous()
        stored = quantizer.get_columnwise_shape(tuple(shape)) if columns else shape
        parts[f"{kind}_data"] = data.reshape(stored) if wanted else None
        parts[f"{kind}_scale_inv"] = inverse if wanted else None
    return as_stored(tensor, quantizer, parts)


def as_stored(tensor, quantizer, parts):
    """The tensor class of a quantizer, of its parts."""
    kinds = quantizer.storage_metadata(tensor.dtype)
    if not quantizer.internal:
        kinds["nontensor_kwargs"].pop("fake_dtype")
        parts |= {"shape": tensor.shape, "dtype": tensor.dtype, "requires_grad": False, "device": tensor.device}
    return kinds["cls"](**parts, **kinds["nontensor_kwargs"])


def quantize_fp4(tensor, quantizer, output):
    """By TransformerEngine's own reference in Python, which rounds to nearest: what is random is a kernel's own."""
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    if output is not None:
        raise NotImplementedError("tests/fake_tex.py casts into new tensors only, not by NVFP4Quantizer")
    square, usage = quantizer.with_2d_quantization, (quantizer.rowwise_usage, quantizer.columnwise_usage)
    reference = NVFP4QuantizerRef(
        Fp4Formats.E2M1, *usage, quant_tile_shape=(16, 16) if square else (1, 16), with_rht=quantizer.with_rht
    )
    shape, parts = tensor.shape, {}
    made = reference.quantize(tensor.detach().reshape(-1, shape[-1]))
    for kind, columns, data, scale, amax in (
        ("rowwise", False, made.data, made.scale, made.global_amax_row),
        ("columnwise", True, made.data_t, made.scale_t, made.global_amax_col),
    ):
        wanted = data is not None
        if wanted:
            room = quantizer.get_scale_shape(shape, columns)
            scale = F.pad(scale.view(torch.uint8), (0, room[1] - scale.shape[1], 0, room[0] - scale.shape[0]))
            stored = quantizer.get_columnwise_shape(tuple(shape)) if columns else shape
            data = data.reshape(quantizer.convert_shape_for_fp4(stored))
        parts[f"{kind}_data"], parts[f"{kind}_scale_inv"] = (data, scale) if wanted else (None, None)
        parts[f"amax_{kind}"] = amax if wanted else None
    return as_stored(tensor, quantizer, parts)


def fp4_values(x, columns):
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import cast_from_fp4x2

    kind = "columnwise" if columns else "rowwise"
    data, scale, amax = (getattr(x, name) for name in (f"_{kind}_data", f"_{kind}_scale_inv", f"_amax_{kind}"))
    if data is None:
        raise RuntimeError(f"an FP4 tensor without its {'columns' if columns else 'rows'}")
    data = data.reshape(data.shape[0], -1) if columns else data.reshape(-1, data.shape[-1])
    out = cast_from_fp4x2(data, torch.float32)
    out = out * spread(scale.view(torch.float8_e4m3fn).float(), (1, 16), out.shape) * (amax / (6 * 448))
    return out.t() if columns else out


def by_tiles(x, size, fp8):
    """The inverse of the largest power of two that keeps each tile's amax in range; 1 where all is zero."""
    (m, n), (rows, columns) = x.shape, size
    padded = F.pad(x, (0, -n % columns, 0, -m % rows))
    amax = padded.view(padded.shape[0] // rows, rows, -1, columns).abs().amax((1, 3))
    exponents = torch.frexp(torch.finfo(fp8).max / amax.clamp(min=2.0**-100))[1] - 1
    return torch.where(amax > 0, torch.exp2(-exponents.float()), torch.ones_like(amax))


def spread(scales, size, shape):
    whole = scales.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)
    return whole[: shape[0], : shape[1]]


def values(x, columns=False):
    """fp32 values, two-dimensional, of an ordinary tensor or of an FP8 one's rows or columns."""
    if hasattr(x, "_fp4_dtype"):
        return fp4_values(x, columns)
    if not hasattr(x, "_fp8_dtype"):
        return x.reshape(-1, x.shape[-1]).float()
    if hasattr(x, "_scale_inv"):
        data, inverse = (x._transpose if columns else x._data), x._scale_inv
    else:
        data, inverse = (
            getattr(x, f"_{'columnwise' if columns else 'rowwise'}_{what}") for what in ("data", "scale_inv")
        )
    if data is None:
        raise RuntimeError(f"an FP8 tensor without its {'columns' if columns else 'rows'}")
    mx = hasattr(x, "_with_gemm_swizzled_scales")
    # the transpose of [.., tokens, features] is [features, .., tokens]
    out = data.reshape(data.shape[0], -1) if columns and not mx else data.reshape(-1, data.shape[-1])
    out = out.view(DTYPES[x._fp8_dtype]).float()
    if not hasattr(x, "_scale_inv"):
        if mx:
            inverse = torch.exp2(inverse.float() - 127)
        elif not x._is_2D_scaled:
            inverse = inverse.t()
        inverse = spread(inverse, tile(x._quantizer, columns), out.shape)
    out = out * inverse
    return out.t() if columns and not mx else out


def dequantize(tensor, dtype):
    return values(tensor).reshape(tensor.size()).to(DTYPES[dtype])


def bgrad_quantize(grad, quantizer):
    return grad.reshape(-1, grad.shape[-1]).float().sum(0).to(grad.dtype), quantize(grad, quantizer)


def fp8_transpose(data, dtype, out=None):
    return data.reshape(-1, data.shape[-1]).t().contiguous()


# Products


def generic_gemm(
    a, transa, b, transb, out, quantizer, out_dtype, bias, bias_dtype, use_gelu, gelu_in, grad, workspace, workspace_size,
    accumulate, use_split_accumulator, **more,
):  # fmt: skip
    """op(b) @ op(a), with `bias` added, or summed over b's rows where this is a gradient (`grad`); then through GELU,
    or times its derivative at `gelu_in`."""
    if quantizer is not None:
        raise NotImplementedError("tests/fake_tex.py has no product that casts its result")
    fp8, fp4 = ([hasattr(x, f"_fp{bits}_dtype") for x in (a, b)] for bits in (8, 4))
    if fp8[0] != fp8[1] or fp4[0] != fp4[1]:
        raise RuntimeError("cuBLASLt takes two FP8 operands or none")
    first, second = values(a, not transa), values(b, transb)
    if any(t.device.type != "cuda" for t in (first, second)):
        raise RuntimeError("cuBLASLt reads device memory only")
    if fp4[0] and ((first.shape if not transa else first.shape[::-1])[0] % 32 or first.numel() % 32):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED: FP4 product: multiples of 32")
    if fp8[0]:
        if {DTYPES[a._fp8_dtype], DTYPES[b._fp8_dtype]} == {torch.float8_e5m2}:
            raise RuntimeError("cuBLASLt multiplies at most one e5m2 operand")
        # Both operands are read along the summed dimension, so each row of it, and of the result, fills 16 bytes.
        inner, rows = first.shape if not transa else first.shape[::-1]
        if inner % 16 or rows % 16:
            raise RuntimeError(
                f"CUBLAS_STATUS_NOT_SUPPORTED: FP8 product over {inner}, {rows} columns: multiples of 16"
            )
    y = (second.t() if transb else second) @ (first.t() if transa else first)
    bias_grad = None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = second.sum(0).to(bias.dtype)
        else:
            y = y + bias.float()
    dtype = DTYPES[out_dtype] if out_dtype is not None else torch.bfloat16
    before = None
    if use_gelu and grad:
        y = gelu_slope(gelu_in.reshape(y.shape)) * y
    elif use_gelu:
        before, y = y.to(dtype), F.gelu(y, approximate="tanh")
    y = y.to(dtype)
    if not transb:
        y = y.view(*b.size()[:-1], y.shape[-1])
    if out is not None:
        y = out.add_(y) if accumulate else out.copy_(y)
    return y, bias_grad, before, None


# GELU, which is its tanh approximation here, and attention's softmax


def gelu(x, quantizer):
    y = F.gelu(x.float(), approximate="tanh").to(x.dtype)
    return y if quantizer is None else quantizer(y)


def gelu_slope(x):
    return torch.ops.aten.gelu_backward(torch.ones_like(x, dtype=torch.float32), x.float(), approximate="tanh")


def dgelu(grad, x, quantizer):
    y = (grad.float() * gelu_slope(x)).to(grad.dtype)
    return y if quantizer is None else quantizer(y)


def dbias_dgelu(grad, x, quantizer):
    return bgrad_quantize(dgelu(grad, x, None), quantizer)


def scaled_softmax_forward(x, scale):
    return torch.softmax(x.float() * scale, -1).to(x.dtype)


def scaled_softmax_backward(grad, y, scale):
    g, y = grad.float(), y.float()
    return (scale * y * (g - (g * y).sum(-1, keepdim=True))).to(grad.dtype)


# LayerNorm


def layernorm_fwd(x, weight, bias, eps, out, quantizer, dtype, sm_margin, zero_centered):
    if zero_centered:
        raise NotImplementedError("tests/fake_tex.py has no zero-centered LayerNorm")
    mean = x.float().mean(-1)
    rstd = (x.float().var(-1, unbiased=False) + eps).rsqrt()
    y = (x.float() - mean[:, None]) * rstd[:, None] * weight.float() + bias.float()
    y = y.to(DTYPES[dtype])
    return y if quantizer is None else quantizer(y), mean, rstd


def layernorm_bwd(grad, x, mean, rstd, weight, sm_margin, zero_centered):
    normal = (x.float() - mean[:, None]) * rstd[:, None]
    g = grad.float() * weight.float()
    dx = rstd[:, None] * (g - g.mean(-1, keepdim=True) - normal * (g * normal).mean(-1, keepdim=True))
    return dx.to(x.dtype), (grad.float() * normal).sum(0).to(weight.dtype), grad.float().sum(0).to(weight.dtype)


# Delayed scaling


def fused_amax_and_scale_update_after_reduction(amax, histories, scales, algo, dtype, margin):
    """Each slot on its own, as the kernel's threads do: the amax into the history, the scale from it, the next row."""
    top, begin, largest = torch.finfo(DTYPES[dtype]).max, 0, torch.finfo(torch.float32).max
    for history, scale in zip(histories, scales, strict=True):
        rows, last = history.cpu(), amax[begin : begin + history.shape[1]].cpu()
        begin += history.shape[1]
        new = scale.cpu()
        for slot in range(history.shape[1]):
            column = rows[:, slot]
            column[0] = last[slot]
            value = column.amax() if algo == "max" else last[slot]
            if last[slot] != 0:
                rows[:, slot] = column.roll(-1)
                rows[0, slot] = 0
                if math.isfinite(value) and value > 0:
                    # a tensor over a tensor: one fp32 division
                    new[slot] = (torch.tensor(top * 2.0**-margin) / value).clamp(max=largest)
        history.copy_(rows)
        scale.copy_(new)
