"""Replaces torchao's kernels of MXFP8 by the functions that say what they compute, with the conditions that they state.

With it torchao's own MXFP8Linear runs on a pretended GPU. Call `install()` before a model is built.

Source: torchao 0.18, prototype/mx_formats/kernels.py (`triton_to_mxfp8_dim0` and `mxfp8_quantize_cuda`).
"""

import torch

E4M3 = torch.float8_e4m3fn


def install():
    from torchao.prototype.mx_formats import kernels, mx_tensor
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    def cast(x, scaling_mode):
        return mx_tensor.to_mx(x, E4M3, 32, ScaleCalculationMode(scaling_mode))

    def triton_to_mxfp8_dim0(x, inner_block_size=32, scaling_mode="rceil"):
        assert x.is_cuda and x.is_contiguous() and x.dtype == torch.bfloat16, "only contiguous bfloat16 is supported"
        assert x.shape[-1] % inner_block_size == 0, "columns must be divisible by inner block size"
        scale, codes = cast(x, scaling_mode)
        return codes, scale

    def mxfp8_quantize_cuda(x, rowwise=False, colwise=True, scaling_mode="rceil"):
        assert x.is_cuda and x.ndim == 2 and colwise and not rowwise
        assert x.shape[0] % 32 == 0, "rows must be a multiple of 32"
        assert x.shape[1] % 32 == 0, "cols must be a multiple of 32"
        scale, codes = cast(x.t().contiguous(), scaling_mode)
        return None, codes.t(), None, scale

    mx_tensor.triton_to_mxfp8_dim0 = triton_to_mxfp8_dim0
    kernels.mxfp8_quantize_cuda = mxfp8_quantize_cuda
