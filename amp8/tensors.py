"""Helpers on tensors of any kind, sharded ones too."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from . import scaling

if TYPE_CHECKING:
    from .linear import FP8Linear


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: its rows of a DTensor from fully_shard, else the whole tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def linear_of(parameter: torch.Tensor) -> "FP8Linear | None":
    """The converted layer that a parameter is the weight of, or None. Under fully_shard the attribute is on this rank's
    rows, because torch drops the attributes of a DTensor parameter when the model is moved."""
    return getattr(local(parameter), "amp8_linear", None)


def cut(rows: int, shards: int, shard: int) -> tuple[int, int]:
    """(first, last) row of one shard of a tensor, cut as torch.chunk cuts. The last shards may have fewer, or none."""
    most = -(-rows // shards)
    first = min(shard * most, rows)
    return first, min(first + most, rows)


def own_rows(parameter: torch.Tensor) -> tuple[int, int, int] | None:
    """(first, last, all) rows that this rank has of a parameter under fully_shard, else None."""
    if not hasattr(parameter, "_local_tensor"):
        return None
    mesh, rows = parameter.device_mesh, parameter.shape[0]  # pyrefly: ignore[missing-attribute]
    return *cut(rows, mesh.size(-1), mesh.get_local_rank(-1)), rows


def amaxes_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Largest magnitude of each tensor, fp32 [number of tensors]. Of none of its rows, as a shard may have, it is 0."""
    if not tensors[0].is_cuda:  # where torch's norm takes ten times as long
        return torch.stack([scaling.amax(tensor) for tensor in tensors])
    some = [tensor for tensor in tensors if tensor.numel()]
    norms = iter(torch._foreach_norm(some, math.inf) if some else ())
    found = [next(norms).float() if tensor.numel() else tensor.new_zeros((), dtype=torch.float32) for tensor in tensors]
    return torch.stack(found)


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
