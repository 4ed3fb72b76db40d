"""Launches the Triton kernels of a GPU with FP8 tensor cores (triton_kernels.py): a cast that writes both layouts a
product needs, and Adam for all tensors at once. Elsewhere the same values come from the functions of scaling.py and
optimizer.py, which say what they are.

Both are bound by memory, and each byte is moved once. Torch's own operations would read a tensor again for each of
these: its amax, the codes, their transpose (which torch copies at a tenth of an H100's rate).
"""

import functools
import importlib.util
from types import ModuleType
from typing import Any

import torch

from . import scaling
from .tensors import without_waiting

BLOCK = 4096  # elements that one program of a pass over a whole tensor reads at one time
TILE = 64  # rows and columns of a matrix that one program casts
CHUNK = 2048  # elements that one program of Adam updates; divides the blocks of the random numbers
FUSED = {"enable_fp_fusion": True}  # products and sums round once, as by default until Triton 3.10
PARTS = 64  # programs for each tensor of a list
PROGRAMS = 1056  # of a pass over a whole tensor: eight for each of an H100's multiprocessors


@functools.cache
def fits(device: torch.device) -> bool:
    """Whether the kernels run on a device: an NVIDIA GPU with FP8 tensor cores (Triton has no e4m3 on older ones)."""
    if device.type != "cuda" or torch.version.hip or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def blocks(n: int, size: int) -> int:
    return -(-n // size)


@functools.cache
def gpu() -> ModuleType:
    """The kernels. Not imported before they are needed, because importing triton takes a tenth of a second."""
    from . import triton_kernels

    return triton_kernels


def cast_delayed(
    x: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor,
    updates: torch.Tensor,
    history: torch.Tensor,
    slot: int,
    window: int,
    recording: bool,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(codes [M, N], the same transposed [N, M] or None, their scale) of x [M, N]: what `linear.cast` says.

    scale, updates [slots], history [length, slots]: of the layer. The amax of in-time scaling is read first, where
    `updates` on the device says that the scale is still in-time; later one pass reads x, casts it and finds its amax.
    """
    x = x.contiguous()
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=dtype, device=x.device)
    turned = torch.empty(columns, rows, dtype=dtype, device=x.device) if transposed else None
    found = torch.zeros(2, dtype=torch.int32, device=x.device)  # bits of fp32: the amax in time, the scale
    with torch.cuda.device_of(x):
        if window:
            gpu().amax[(PROGRAMS,)](x, found, updates, slot, window, x.numel(), BLOCK=BLOCK, num_warps=8, **FUSED)
        grid = blocks(rows, TILE), blocks(columns, TILE)
        grid_of, (carry, exponent) = torch.finfo(dtype), scaling.carry_and_exponent(dtype)
        gpu().cast[grid](
            x, codes, codes if turned is None else turned, found, scale, updates, history, slot, window, rows, columns,
            TOP=grid_of.max, SMALLEST=grid_of.smallest_normal, EPS=grid_of.eps, CARRY=carry, EXPONENT=exponent,
            RECORDING=recording, TRANSPOSED=transposed, TILE=TILE, **FUSED,
        )  # fmt: skip
    return codes, turned, found.view(torch.float32)[1]


def quantize_gradient(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gradients.quantize_gradient"""
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=scaling.E4M3, device=x.device)
    found = torch.zeros(2, dtype=torch.int32, device=x.device)
    carry, exponent = scaling.carry_and_exponent(scaling.E4M3)
    with torch.cuda.device_of(x):
        gpu().amax[(PROGRAMS,)](x, found, found, 0, 1, x.numel(), BLOCK=BLOCK, num_warps=8, **FUSED)
        gpu().gradient[(blocks(x.numel(), BLOCK),)](
            x, codes, found, x.numel(), CARRY=carry, EXPONENT=exponent, OF_ZEROS=scaling.OF_ZEROS,
            BLOCK=BLOCK, num_warps=8, **FUSED,
        )  # fmt: skip
    return codes, found.view(torch.float32)[1]


def e4m3_of(x: torch.Tensor, factor: float) -> torch.Tensor:
    """e4m3 codes of `x * factor`, x fp16. Nothing saturates."""
    codes = torch.empty(x.shape, dtype=scaling.E4M3, device=x.device)
    with torch.cuda.device_of(x):
        grid = (blocks(x.numel(), BLOCK),)
        gpu().scaled[grid](x, codes, x.numel(), FACTOR=factor, BLOCK=BLOCK, num_warps=8, **FUSED)
    return codes


def transposed(x: torch.Tensor, factor: float) -> torch.Tensor:
    """e4m3 codes of `x * factor`, transposed: [M, N] -> [N, M]. x: fp16, or e4m3 with the factor 1."""
    rows, columns = x.shape
    turned = torch.empty(columns, rows, dtype=scaling.E4M3, device=x.device)
    with torch.cuda.device_of(x):
        grid = blocks(rows, TILE), blocks(columns, TILE)
        gpu().turn[grid](x, turned, rows, columns, FACTOR=factor, TILE=TILE, **FUSED)
    return turned


def squares(codes: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of each tensor of e4m3 codes in a list, fp32 [length]."""
    codes = [tensor.contiguous() for tensor in codes]
    rows = [[tensor.data_ptr(), tensor.numel()] for tensor in codes]
    aligned = all(n % 16 == 0 for row in rows for n in row)
    table = without_waiting(torch.tensor(rows), codes[0].device)
    found = torch.empty(len(codes), PARTS, device=codes[0].device)
    with torch.cuda.device_of(found):
        gpu().squares[(len(codes), PARTS)](table, found, ALIGNED=aligned, BLOCK=BLOCK, num_warps=8, **FUSED)
    return found.sum(1)


def adam(
    flats: list[Any],
    numbers: torch.Tensor,
    seeds: list[int],
    starts: list[int],
    decoupled: bool,
    noisy: bool,
    found_inf: torch.Tensor | None = None,
) -> torch.Tensor:
    """`Adam.slices` on a GPU: one kernel for all tensors of the same dtypes. Nothing changes where `found_inf`, fp32 on
    the GPU, is 1."""
    sizes = [len(weight) for weight, *_ in flats]
    pointers = [[0 if t is None else t.data_ptr() for t in flat] for flat in flats]
    aligned = all(n % 16 == 0 for row in (*pointers, sizes, starts) for n in row)
    rows = zip(pointers, sizes, starts, seeds, strict=True)
    device, named = numbers.device, gpu().NAMED
    table = without_waiting(torch.tensor([[*row, size, start, seed] for row, size, start, seed in rows]), device)
    found = torch.zeros(len(flats), 3, dtype=torch.int32, device=device)
    alike: dict[Any, list[int]] = {}
    for i, flat in enumerate(flats):
        alike.setdefault(tuple(None if t is None else t.dtype for t in flat), []).append(i)
    for (w, g, m, v, copy), which in alike.items():
        places = chunks(tuple(sizes[i] for i in which), tuple(starts[i] for i in which), tuple(which), device)
        with torch.cuda.device_of(numbers):
            gpu().adam[(len(places),)](
                table, places, numbers, found, found_inf,
                W=named[w], G=named[g], M=named[m], V=named[v], COPY=copy is not None,
                NOISY=noisy, DECOUPLED=decoupled, ALIGNED=aligned, CHUNK=CHUNK, **FUSED,
            )  # fmt: skip
    return found.view(torch.float32)


@functools.lru_cache(16)
def chunks(
    sizes: tuple[int, ...], starts: tuple[int, ...], which: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """int32 [programs, 2] on the device: of each program of Adam its tensor, one of `which`, and its chunk. Chunks
    count from the beginning of the whole parameter, of which a tensor is the part that begins at `start`."""
    firsts = [start // CHUNK for start in starts]
    counts = [blocks(start + size, CHUNK) - first for start, size, first in zip(starts, sizes, firsts, strict=True)]
    tensors = torch.tensor(which).repeat_interleave(torch.tensor(counts))
    numbers = torch.cat([torch.arange(first, first + count) for first, count in zip(firsts, counts, strict=True)])
    return without_waiting(torch.stack([tensors, numbers], 1).to(torch.int32), device)
