"""Stochastic rounding of fp32 values to fp16 and e4m3, with random numbers that depend on step and position alone."""

import math

import torch

from . import scaling

HASH = 0x5BD1E995  # of an element's index


def store(target, value, scale, bits=None):
    """Writes fp32 values into a tensor: as codes for e4m3 and fp16, as plain values for fp32 and bf16. bits: what
    `random_bits` returned, for stochastic rounding, or None."""
    if target.dtype in (torch.float32, torch.bfloat16, torch.float64):
        target.copy_(value)
    elif bits is None:
        target.copy_(scaling.quantize(value, scale, target.dtype))
    else:
        target.copy_(round_stochastically(value * scale, target.dtype, bits))


def as_int32(x):
    """An integer modulo 2**32 in the range of int32."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


def random_bits(n, seed, start=0):
    """n random int32, a hash of each element's index, counted from `start`, and of `seed` (0-d int32): the same on
    every rank, in a resumed run and in compiled code."""
    h = torch.arange(n, dtype=torch.int32, device=seed.device)
    h = h.mul_(as_int32(HASH)).add_(seed + as_int32(start * HASH))
    h = h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(0x21F0AAAD)
    h = h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF)).mul_(0x735A2D97)
    return h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF))


def round_stochastically(x, dtype, bits):
    """fp32 -> fp16 or e4m3, up or down with probabilities that make the mean exact. Saturates.

    Rounding to nearest loses a change much smaller than a number's last bit; stochastic rounding keeps it on average.
    bits: int32 of the shape of x; the highest 13 (fp16) or 16 (e4m3) are used.
    """
    info = torch.finfo(dtype)
    x = x.clamp(-info.max, info.max)
    unit = scaling.binade(x, info.smallest_normal)
    # What is added is less than half of the last bit, as the number is odd and so never an end of its range; then the
    # sum is rounded to nearest. So a number that is on the grid stays. More bits than these would not fit in fp32.
    shift = 32 - min(16, 23 + round(math.log2(info.eps)))
    noise = (bits >> shift).bitwise_or_(1).float()
    x.addcmul_(noise, unit, value=info.eps * 2.0 ** (shift - 32))
    return scaling.to_grid(x, unit, dtype).clamp_(-info.max, info.max).to(dtype)
