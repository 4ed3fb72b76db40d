"""Helpers on tensors of any kind."""

import math
from collections.abc import Sequence

import torch

from . import scaling


def amaxes_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Largest magnitude of each tensor, fp32 [number of tensors]. Of none of its rows, as a shard may have, it is 0."""
    if not tensors[0].is_cuda:  # where torch's norm takes ten times as long
        return torch.stack([scaling.amax(tensor) for tensor in tensors])
    some = [tensor for tensor in tensors if tensor.numel()]
    norms = iter(torch._foreach_norm(some, math.inf) if some else ())
    zero = torch.zeros((), device=tensors[0].device)
    return torch.stack([next(norms).float() if tensor.numel() else zero for tensor in tensors])


def flat(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor | None:
    """A 1-d view of a dense tensor, in the order of memory of `like` (itself); None where there is none."""
    like = tensor if like is None else like
    if not like.is_contiguous():
        order = sorted(range(like.dim()), key=like.stride, reverse=True)
        like, tensor = like.permute(order), tensor.permute(order)
        if not like.is_contiguous():
            return None
    return tensor.detach().reshape(-1)


def without_waiting(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a CPU tensor to `device`. From pinned memory the copy is asynchronous, so the host does not wait."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
