"""Optimizer states of torchao's low-bit optimizers: each is one tensor to the optimizer and several to memory, codes
with their scales. A checkpoint holds those, and as JSON in bytes the class that they make up."""

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from faithful.errors import Refused
from faithful.tensors.names import local

CLASS = ".class"  # ends the key of the class in a checkpoint


def parts_of(key: str, state: torch.Tensor) -> dict[str, torch.Tensor]:
    """{key: plain tensor} of an optimizer's state `key`: this process's shard of it, or what that consists of."""
    part: Any = state.to_local() if isinstance(state, DTensor) else state
    if not type(part).__module__.startswith("torchao.optim."):
        return {key: local(state)}
    return {f"{key}.{name}": getattr(part, name) for name in part.__tensor_flatten__()[0]}


def class_of(state: torch.Tensor) -> torch.Tensor | None:
    """The class of a low-bit state and what it is made with besides tensors, uint8 [bytes]; None for a plain tensor."""
    part: Any = state.to_local() if isinstance(state, DTensor) else state
    if not type(part).__module__.startswith("torchao.optim."):
        return None
    context = [{"dtype": str(c)[6:]} if isinstance(c, torch.dtype) else c for c in part.__tensor_flatten__()[1] or ()]
    text = json.dumps([type(part).__module__, type(part).__qualname__, context])
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def put_together(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse: {key: state} of a checkpoint's {key: tensor}. Raises Refused if this torchao has no such class."""
    states = dict(values)
    for at in [key for key in values if key.endswith(CLASS)]:
        key = at.removesuffix(CLASS)
        module, name, context = json.loads(bytes(states.pop(at).tolist()))
        try:
            if not module.startswith("torchao.optim."):
                raise AttributeError(f"{module} is not torchao's")
            kind = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise Refused(f"the checkpoint's {key} is a {module}.{name}, which cannot be made here: {error}") from None
        inner = [part for part in values if part.startswith(f"{key}.") and part != at]
        context = [getattr(torch, c["dtype"]) if isinstance(c, dict) else c for c in context]
        states[key] = kind.__tensor_unflatten__(
            {part.removeprefix(f"{key}."): states.pop(part) for part in inner}, context
        )
    return states


def refuse_other_rows(parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Raises Refused if a checkpoint, a Mapping of each process that saved, has low-bit states: the blocks of their
    scales do not end where rows end."""
    if any(place.endswith(CLASS) for place in parts[0]):
        raise Refused(
            f"the checkpoint has low-bit optimizer states of {len(parts)} processes, which cannot be cut anew: resume "
            "with as many processes"
        )
