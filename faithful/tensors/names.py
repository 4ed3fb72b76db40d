"""Names, shards, sizes and hashes of tensors, for evidence, checkpoints and the record."""

from collections import UserDict
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
HALVES = (torch.bfloat16, torch.float16)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP's, DeepSpeed's and torch.compile's wrapper. FSDP2 has none: it changes the model's class."""
    while True:
        if isinstance(model, DistributedDataParallel) or type(model).__name__ == "DeepSpeedEngine":
            model = model.module  # pyrefly: ignore[bad-assignment]
        elif "_orig_mod" in model._modules:
            model = model._orig_mod  # pyrefly: ignore[bad-assignment]
        else:
            return model


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of what goes into or comes out of a forward pass, such as transformers' BatchEncoding too."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, UserDict):
            yield from tensors_of(leaf.data)
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def plain_names(pairs: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yields (name, value) with the names that an unwrapped model has without activation checkpointing, and before the
    script has compiled it."""
    for name, value in pairs:
        yield name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""), value


def parameters_of(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields (name, parameter) with the names that the model had before it was prepared."""
    yield from plain_names(unwrapped(model).named_parameters(remove_duplicate=remove_duplicate))


def whole_of(value: Any) -> Any:
    """The whole tensor of a DTensor, anything else as it is. Every process calls it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def shard_of(value: Any) -> Any:
    """This rank's shard of a DTensor, anything else as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, without torchao's wrapper. Of a weight of MS-AMP's levels: its codes."""
    part = shard_of(tensor)
    return getattr(part, "_tensor", getattr(part, "codes", part))


def rows_of(parameter: DTensor) -> tuple[int, int]:
    """(the first row, the number of rows) that this process holds of a DTensor that is sharded by its rows."""
    shape, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return start[0], shape[0]


def elements(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """{dtype name: number of elements}, of a weight of MS-AMP's levels that of its codes."""
    counts = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            name = str(tensor.dtype)[6:]
            counts[name] = counts.get(name, 0) + tensor.numel()
    return counts


def size(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of all `tensors` together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def of_fp8(name: str) -> bool:
    """Whether an entry of a state_dict is FP8 state: a scale, a history."""
    return ".fp8_" in f".{name}" or name.endswith("_extra_state")


def fingerprint(model: nn.Module, frozen: bool = False) -> str | None:
    """A hash of the weights, or of the frozen ones alone, and their names. Runs of one seed have the same at the start,
    in any config. None if this process has no values of them (faithful/models/meta_init.py)."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    taken = (each for each in model.named_parameters() if not (frozen and each[1].requires_grad))
    wholes = ((name, whole_of(p.detach())) for name, p in taken if p.numel())
    sums = [(name, torch.hash_tensor(hashable(p)).item()) for name, p in wholes]
    return sha256(repr(sums).encode()).hexdigest()


def hashable(values: torch.Tensor) -> torch.Tensor:
    """The values in a dtype that torch hashes; 16-bit ones in fp32, into which a run puts them in all configs but
    ZeRO's."""
    if values.is_complex():
        return torch.view_as_real(values)
    codes = values.itemsize == 1 and values.is_floating_point()  # FP8, as in a checkpoint of others
    return values.view(torch.uint8) if codes else values.float() if values.dtype in HALVES else values


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Changes every weight to the next larger number of its dtype, to measure the effect of rounding."""
    for parameter in model.parameters():
        parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))


def sum_of_sample_hashes(tensors: Iterable[torch.Tensor]) -> int:
    """The sum of the sha256 of every sample of a batch, modulo 2**256.

    tensors: each of shape [batch, ...]; a sample is one row of all of them. The sum does not depend on the order of the
    samples or on how they are split over processes.
    """
    rows = [tensor.detach().cpu().contiguous() for tensor in tensors]
    total = 0
    for sample in zip(*rows, strict=True):
        parts = b"".join(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in sample)
        total += int.from_bytes(sha256(parts).digest(), "big")
    return total % 2**256


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Splits tensors into what torch computes with in one call: those that are no DTensors, then the DTensors of each
    mesh, of fewest dimensions first."""
    parts: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        parts.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return [parts[mesh] for mesh in sorted(parts, key=lambda mesh: mesh.ndim if mesh else 0)]
