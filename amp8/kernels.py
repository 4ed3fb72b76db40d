"""Launches the Triton kernels of a GPU with FP8 tensor cores (triton_kernels.py): a cast that writes both layouts a
product needs, and Adam for all tensors at once. Elsewhere the same values come from the functions of scaling.py and
optimizer.py, which say what they are.

Both are bound by memory, and each byte is moved once. Torch's own operations would read a tensor again for each of
these: its amax, the codes, their transpose (which torch copies at a tenth of an H100's rate).
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
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
PROGRAMS = 1024  # of a pass over a whole tensor, a power of two: about eight for each of an H100's multiprocessors
FP16_TO_E4M3 = 2.0**-8  # what brings FP16 codes into e4m3's range
HAS_TRITON = importlib.util.find_spec("triton") is not None


def fits(device: torch.device) -> bool:
    """Whether the kernels run on a device: an NVIDIA GPU with FP8 tensor cores (Triton has no e4m3 on older ones)."""
    return device.type == "cuda" and HAS_TRITON and not torch.version.hip and scaling.fp8_cores(device)


def blocks(n: int, size: int) -> int:
    return -(-n // size)


@functools.cache
def gpu() -> ModuleType:
    """The kernels. Not imported before they are needed, because importing triton takes a tenth of a second."""
    from . import triton_kernels

    return triton_kernels


def launch(name: str, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    with torch.cuda.device_of(args[0]):
        getattr(gpu(), name)[grid](*args, **constants, **FUSED)


def write(name: str, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """`launch` in compiled code."""
    torch.library.wrap_triton(getattr(gpu(), name))[grid](*args, **constants)


@functools.cache
def register() -> None:
    """Makes operators of what compiled code calls. torch's compiler calls their kernels directly."""

    def cast_delayed(
        x: torch.Tensor, dtype: torch.dtype, state: torch.Tensor, slot: int, window: int, recording: bool,
        transposed: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        return _cast_delayed(write, x, dtype, state, slot, window, recording, transposed)

    def cast_weight(
        weight: torch.Tensor, scale: torch.Tensor, transposed: bool, bias: torch.Tensor | None, dtype: torch.dtype,
        after: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        return _cast_weight(write, weight, scale, transposed, bias, dtype, after)

    torch.library.triton_op("amp8::cast_delayed", cast_delayed, mutates_args=())
    torch.library.triton_op("amp8::cast_weight", cast_weight, mutates_args=())


def cast_delayed(
    x: torch.Tensor, dtype: torch.dtype, state: torch.Tensor, slot: int, window: int, recording: bool, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(codes [M, N], the same transposed [N, M] or None, their scale, its reciprocal) of x [M, N]: what `linear.cast`
    says.

    state: of the layer's delayed scaling (see scaling.py); compiled code gets its address (int64 [1]). The amax of
    in-time scaling is read first, where the number of updates on the device says that the scale is still in-time; later
    one pass reads x, casts it and finds its amax.
    """
    cast = torch.ops.amp8.cast_delayed if torch.compiler.is_compiling() else functools.partial(_cast_delayed, launch)
    codes, turned, own, reciprocal = cast(x, dtype, state, slot, window, recording, transposed)
    return codes, turned if transposed else None, own.view(()), reciprocal.view(())


def _cast_delayed(
    run: Callable[..., None], x: torch.Tensor, dtype: torch.dtype, state: torch.Tensor, slot: int, window: int,
    recording: bool, transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    x = x.contiguous()
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=dtype, device=x.device)
    turned = torch.empty((columns, rows) if transposed else (0, 0), dtype=dtype, device=x.device)
    found = torch.empty(PROGRAMS, device=x.device)
    own, reciprocal = torch.empty(1, device=x.device), torch.empty(1, device=x.device)
    programs = PROGRAMS if window else 1  # one, which says that there is no scale yet
    address = state.dtype == torch.int64
    run(
        "amax", (programs,), x, found, own, reciprocal, state, slot, window, rows * columns,
        ADDRESS=address, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    info, (carry, exponent) = torch.finfo(dtype), scaling.carry_and_exponent(dtype)
    run(
        "cast", (blocks(rows, TILE), blocks(columns, TILE)),
        x, codes, turned if transposed else codes, found, own, reciprocal, state, slot, window, rows, columns,
        TOP=info.max, SMALLEST=info.smallest_normal, EPS=info.eps, CARRY=carry, EXPONENT=exponent,
        RECORDING=recording, TRANSPOSED=transposed, ADDRESS=address, TILE=TILE, PROGRAMS=PROGRAMS,
    )  # fmt: skip
    return codes, turned, own, reciprocal


def round_gradients(
    values: Sequence[torch.Tensor], codes: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]
) -> None:
    """Writes gradients.quantize_gradient of each of `values`, which have one dtype, into `codes` and `scales`. All are
    contiguous. Two launches for them together, as the host would need longer for each than a GPU for narrow layers."""
    each = zip(values, codes, scales, strict=True)
    rows = [[x.data_ptr(), code.data_ptr(), scale.data_ptr(), x.numel()] for x, code, scale in each]
    aligned = all(n % 16 == 0 for row in rows for n in row)
    table = without_waiting(torch.tensor(rows), values[0].device)
    programs = PROGRAMS if len(rows) == 1 else PROGRAMS // 4
    found = torch.empty(len(rows), programs, device=values[0].device)
    how = {"X": gpu().NAMED[values[0].dtype], "ALIGNED": aligned, "BLOCK": BLOCK, "num_warps": 8}
    launch("amaxes", found.shape, table, found, **how)
    carry, exponent = scaling.carry_and_exponent(scaling.E4M3)
    of_scale = {"CARRY": carry, "EXPONENT": exponent, "OF_ZEROS": scaling.OF_ZEROS}
    launch("gradients", found.shape, table, found, **how, **of_scale, PROGRAMS=programs)


def cast_weight(
    weight: torch.Tensor,
    scale: torch.Tensor,
    transposed: bool,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    after: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What `linear.weight_operand` says: of e4m3 codes transposed, or of fp16 codes."""
    cast = torch.ops.amp8.cast_weight if torch.compiler.is_compiling() else functools.partial(_cast_weight, launch)
    other = bias is not None and bias.dtype != dtype
    codes, reciprocal, cast_bias = cast(weight, scale, transposed, bias if other else None, dtype, after)
    return codes, reciprocal.view(()), cast_bias if other else bias


def _cast_weight(
    run: Callable[..., None],
    weight: torch.Tensor,
    scale: torch.Tensor,
    transposed: bool,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    after: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (rows, columns), factor = weight.shape, 1.0 if weight.dtype == scaling.E4M3 else FP16_TO_E4M3
    codes = torch.empty((columns, rows) if transposed else (rows, columns), dtype=scaling.E4M3, device=weight.device)
    reciprocal = torch.empty(1, device=weight.device)
    n = 0 if bias is None else bias.numel()
    cast_bias = torch.empty(n or 1, dtype=dtype, device=weight.device)
    beside = scale, reciprocal, next(t for t in (bias, after, scale) if t is not None), cast_bias, n
    if transposed:
        grid = blocks(rows, TILE), blocks(columns, TILE)
        run("turn", grid, weight, codes, *beside, rows, columns, FACTOR=factor, TILE=TILE)
    else:
        grid = (blocks(rows * columns, BLOCK),)
        run("scaled", grid, weight, codes, *beside, rows * columns, FACTOR=factor, BLOCK=BLOCK, num_warps=8)
    return codes, reciprocal, cast_bias


def squares(codes: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of each tensor of e4m3 codes in a list, fp32 [length]."""
    codes = [tensor.contiguous() for tensor in codes]
    rows = [[tensor.data_ptr(), tensor.numel()] for tensor in codes]
    aligned = all(n % 16 == 0 for row in rows for n in row)
    table = without_waiting(torch.tensor(rows), codes[0].device)
    found = torch.empty(len(codes), PARTS, device=codes[0].device)
    launch("squares", (len(codes), PARTS), table, found, ALIGNED=aligned, BLOCK=BLOCK, num_warps=8)
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
        launch(
            "adam", (len(places),), table, places, numbers, found, found_inf,
            W=named[w], G=named[g], M=named[m], V=named[v], COPY=copy is not None,
            NOISY=noisy, DECOUPLED=decoupled, ALIGNED=aligned, CHUNK=CHUNK,
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
