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
import sys
import types

import torch

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
    for value in (DType, FP8FwdTensors, FP8BwdTensors, NVTE_Fused_Attn_Backend, quantize, dequantize, generic_gemm, bgrad_quantize,
                  fp8_transpose, layernorm_fwd, layernorm_bwd, fused_amax_and_scale_update_after_reduction):  # fmt: skip
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
    """`tensor` in FP8 as `quantizer` says, with its transpose where that is wanted: Hopper multiplies rows by rows only.

    Delayed scaling casts with the scale that it has and records the amax; current scaling makes the scale from it.
    """
    kind = type(quantizer).__name__
    if kind not in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        raise NotImplementedError(f"tests/fake_tex.py casts per tensor, not by {kind}")
    fp8 = DTYPES[quantizer.dtype]
    top = torch.finfo(fp8).max
    amax = tensor.detach().abs().amax().float().reshape(1)
    if kind == "Float8Quantizer":
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


def values(x):
    """fp32 values, two-dimensional, of an FP8 tensor or an ordinary one."""
    if isinstance(x, torch.Tensor) and not hasattr(x, "_scale_inv"):
        return x.reshape(-1, x.shape[-1]).float()
    data = x._data.reshape(-1, x._data.shape[-1]) if x._data is not None else x._transpose.t().contiguous()
    return data.view(DTYPES[x._fp8_dtype]).float() * x._scale_inv


def dequantize(tensor, dtype):
    return values(tensor).reshape(tensor.size()).to(DTYPES[dtype])


def bgrad_quantize(grad, quantizer):
    return grad.reshape(-1, grad.shape[-1]).float().sum(0).to(grad.dtype), quantize(grad, quantizer)


def fp8_transpose(data, dtype, out=None):
    return data.reshape(-1, data.shape[-1]).t().contiguous()


# Products


def generic_gemm(
    a, transa, b, transb, out, quantizer, out_dtype, bias, bias_dtype, gelu, gelu_in, grad, workspace, workspace_size,
    accumulate, use_split_accumulator, **more,
):  # fmt: skip
    """op(b) @ op(a), with `bias` added, or summed over b's rows where this is a gradient (`grad`)."""
    if quantizer is not None or gelu:
        raise NotImplementedError("tests/fake_tex.py has no product that casts or activates its result")
    fp8 = [hasattr(x, "_scale_inv") for x in (a, b)]
    if fp8[0] != fp8[1]:
        raise RuntimeError("cuBLASLt takes two FP8 operands or none")
    first, second = values(a), values(b)
    if any(t.device.type != "cuda" for t in (first, second)):
        raise RuntimeError("cuBLASLt reads device memory only")
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
    y = y.to(DTYPES[out_dtype] if out_dtype is not None else torch.bfloat16)
    if not transb:
        y = y.view(*b.size()[:-1], y.shape[-1])
    if out is not None:
        y = out.add_(y) if accumulate else out.copy_(y)
    return y, bias_grad, None, None


# LayerNorm


def layernorm_fwd(x, weight, bias, eps, out, quantizer, dtype, sm_margin, zero_centered):
    if quantizer is not None or zero_centered:
        raise NotImplementedError("tests/fake_tex.py has LayerNorm with a result that is not FP8 only")
    mean = x.float().mean(-1)
    rstd = (x.float().var(-1, unbiased=False) + eps).rsqrt()
    y = (x.float() - mean[:, None]) * rstd[:, None] * weight.float() + bias.float()
    return y.to(DTYPES[dtype]), mean, rstd


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
