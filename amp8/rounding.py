"""Stochastic rounding of fp32 values to fp16 and e4m3, with random numbers that depend on step and position alone."""

import functools
from typing import TypeVar

import torch

from . import scaling

Integer = TypeVar("Integer", int, torch.Tensor)

BLOCK = 1 << 16  # elements of a tensor whose random numbers come from one table
MASK = (1 << 32) - 1
CPU = torch.device("cpu")


def store(target: torch.Tensor, value: torch.Tensor, scale: torch.Tensor, noise: torch.Tensor | None = None) -> None:
    """Writes fp32 values into a tensor: as codes for e4m3 and fp16, as plain values for fp32 and bf16. noise: what
    `random_noise` returned for the target's dtype, for stochastic rounding, or None."""
    if target.dtype in (torch.float32, torch.bfloat16, torch.float64):
        target.copy_(value)
    elif noise is None:
        target.copy_(scaling.quantize(value, scale, target.dtype))
    else:
        target.copy_(round_stochastically(value * scale, target.dtype, noise))


def mixed(x: Integer) -> Integer:
    """A hash of an integer from 0 to 2**32 - 1, or of int64 tensors of such integers."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK
    return x ^ (x >> 15)


@functools.cache
def table(device: torch.device) -> torch.Tensor:
    """A hash of each place in a block, int32 [BLOCK]."""
    return mixed(torch.arange(BLOCK, device=device)).to(torch.int32)


def factors(seed: int, block: int) -> tuple[int, int]:
    """The numbers a (odd) and b by which the table becomes the random numbers of a block: see `random_bits`."""
    a = mixed((seed + block * 0x9E3779B1) & MASK)
    return a | 1, mixed(a ^ 0x5BD1E995)


def random_bits(n: int, seed: int, start: int = 0, device: torch.device = CPU) -> torch.Tensor:
    """n random int32 for the elements of a tensor from `start` on, which depend on `seed` and each element's index
    alone: the same on every rank, in a resumed run and in the GPU's kernel.

    An element's number is a * x + b modulo 2**32, where x is a fixed hash of its place in a block, and a, b are hashes
    of the seed and the block. So the highest bits of any two elements are independent over the seeds (Dietzfelbinger et
    al., A Reliable Randomized Algorithm for the Closest-Pair Problem, 1997), at the price of a multiplication and an
    addition.
    """
    parts = []
    while n > 0:
        a, b = map(as_int32, factors(seed, start >> 16))
        first = start % BLOCK
        parts.append((table(device)[first : first + n] * a).add_(b))
        n, start = n - len(parts[-1]), start + len(parts[-1])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def as_int32(x: int) -> int:
    """An integer modulo 2**32 in the range of int32."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


def random_noise(n: int, seed: int, start: int = 0, device: torch.device = CPU) -> torch.Tensor:
    """What stochastic rounding adds to n values, in units of their last bits times 2**-32: fp32, the random bits."""
    return random_bits(n, seed, start, device).float()


def round_stochastically(x: torch.Tensor, dtype: scaling.Number, noise: torch.Tensor) -> torch.Tensor:
    """fp32 values on the grid of fp16, e4m3 or e2m1 in place of `x`, up or down with probabilities that keep the mean.
    Saturates. Rounding to nearest loses a change much smaller than a number's last bit; this keeps it on average.

    noise: what `random_noise` returned. It is scaled to less than half of the grid's last bit, by one last bit of fp32,
    and added; the sum is rounded to nearest. So a number that is on the grid stays. The mean is off by less than 2**-12
    of the grid's last bit for fp16, and 2**-19 for e4m3: that is two of fp32's last bits, one because the noise is
    scaled, and half of one because fp32 rounds the sum.
    """
    info = scaling.info(dtype)
    x = x.clamp_(-info.max, info.max)
    unit = scaling.binade(x, info.smallest_normal)
    fp32_bit = torch.finfo(torch.float32).eps / info.eps  # fp32's last bit over the grid's
    x.addcmul_(noise, unit, value=info.eps * 2.0**-32 * (1 - 2 * fp32_bit))
    return scaling.to_grid(x, unit, dtype)


def above(bound: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bound that also holds for the values after rounding to `dtype`, up as well as to nearest."""
    return bound * (1 + torch.finfo(dtype).eps)
