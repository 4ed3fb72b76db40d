"""What an optimizer keeps of a parameter, and that as plain tensors, of which a checkpoint is made.

An optimizer around another, as timm's Lookahead, keeps a part in the one inside. Of torchao's low-bit ones a state is
one tensor to the optimizer and several to memory, codes with their scales. Of a sharded weight a state may have another
shape, or be split otherwise or not at all, as Prodigy's flat one. A checkpoint holds the plain tensors, and as JSON in
bytes the class that they make up, or how they are split."""

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from faithful.errors import Refused
from faithful.tensors.names import local, shard_of

FORM = ".class"  # ends the key of the class, or of the split, in a checkpoint


def optimizers_in(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """{prefix of the keys of its states: optimizer}, of this one and of those that it has as an attribute or in a list,
    with states of their own: {"": Lookahead, "_base_optimizer.": AdamW}."""
    found = {"": optimizer}
    for name, value in vars(optimizer).items():
        listed = {f"{name}.{at}.": each for at, each in enumerate(value)} if isinstance(value, list | tuple) else {}
        for at, inner in (listed or {f"{name}.": value}).items():
            if isinstance(inner, torch.optim.Optimizer) and all(inner.state is not f.state for f in found.values()):
                found[at] = inner
    return found


def states_of(holders: Mapping[str, torch.optim.Optimizer], parameter: torch.Tensor) -> dict[str, Any]:
    """{key: value} of what an optimizer, and those in it, keep of a parameter. holders: see `optimizers_in`."""
    return {at + key: value for at, each in holders.items() for key, value in each.state.get(parameter, {}).items()}


def by_optimizer(
    holders: Mapping[str, torch.optim.Optimizer], states: Mapping[str, Any]
) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """The inverse of `states_of`: each optimizer with what it keeps."""
    split: dict[str, dict[str, Any]] = {}
    for key, value in states.items():
        at = max((at for at in holders if key.startswith(at)), key=len)
        split.setdefault(at, {})[key.removeprefix(at)] = value
    return [(holders[at], values) for at, values in split.items()]


def of_no_parameter(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """{key: value} of what the optimizer's own `state_dict` adds to torch's; `state` has what it keeps by other keys
    than parameters."""
    kind = type(optimizer)
    own = kind.state_dict is not torch.optim.Optimizer.state_dict and not kind.__module__.startswith("amp8.")
    saved: dict[str, Any] = optimizer.state_dict() if own else {}
    values = {key: saved[key] for key in saved.keys() - {"state", "param_groups"}} if "state" in saved else {}
    if others := {key: value for key, value in optimizer.state.items() if not torch.is_tensor(key)}:
        values["state"] = others
    return values


def restore_of_no_parameter(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    """Loads what `of_no_parameter` returned. Raises ValueError for what this optimizer has not."""
    others: Any = optimizer.state
    others.update(values.get("state", {}))
    if added := {key: value for key, value in values.items() if key != "state"}:
        if unknown := added.keys() - of_no_parameter(optimizer).keys():
            raise ValueError(f"{', '.join(sorted(unknown))} is none of its values")
        optimizer.load_state_dict(optimizer.state_dict() | added)


def parts_of(key: str, state: torch.Tensor) -> dict[str, torch.Tensor]:
    """{key: plain tensor} of an optimizer's state `key`: this process's shard of it, or what that consists of."""
    part = shard_of(state)
    if not is_low_bit(part):
        return {key: local(state)}
    return {f"{key}.{name}": getattr(part, name) for name in part.__tensor_flatten__()[0]}


def is_low_bit(part: torch.Tensor) -> bool:
    return type(part).__module__.startswith("torchao.optim.")


def form_of(state: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
    """What a state is besides plain tensors in the form of its parameter's, uint8 [bytes]; None if it is no more."""
    part = shard_of(state)
    if is_low_bit(part):
        context = part.__tensor_flatten__()[1] or ()
        context = [{"dtype": str(c)[6:]} if isinstance(c, torch.dtype) else c for c in context]
        form: Any = [type(part).__module__, type(part).__qualname__, context]
    elif not isinstance(parameter, DTensor) or not (state.dim() or isinstance(state, DTensor)):
        return None
    elif not isinstance(state, DTensor):
        form = {}
    elif (state.shape, state.placements) == (parameter.shape, parameter.placements):
        return None
    elif all(type(placement) in (Shard, Replicate) for placement in state.placements):
        form = {"shape": list(state.shape), "dims": [getattr(p, "dim", None) for p in state.placements]}
    else:
        raise Refused(
            f"the optimizer keeps a state that is split as {state.placements} where its weight is split as "
            f"{parameter.placements}, which a checkpoint does not hold: use another optimizer, or a ddp config"
        )
    return torch.tensor(list(json.dumps(form).encode()), dtype=torch.uint8)


def put_together(values: Mapping[str, torch.Tensor], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inverse: {key: state} of a checkpoint's {key: tensor}. Raises Refused if this torchao has no such class, or
    if what is said of a state cannot be."""
    try:
        return joined(values, parameter)
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise Refused(
            f"the checkpoint's optimizer state is damaged ({type(error).__name__}: {said}): take another checkpoint"
        ) from None


def joined(values: Mapping[str, torch.Tensor], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    states, split = {key: value for key, value in values.items() if not key.endswith(FORM)}, {}
    for at in values.keys() - states.keys():
        key, form = at.removesuffix(FORM), json.loads(bytes(values[at].tolist()))
        if isinstance(form, dict):
            split[key] = form
            continue
        inner = [part for part in values if part.startswith(f"{key}.") and part != at]
        tensors = {part.removeprefix(f"{key}."): states.pop(part) for part in inner}
        states[key] = class_of(key, *form[:2]).__tensor_unflatten__(
            tensors, [getattr(torch, c["dtype"]) if isinstance(c, dict) else c for c in form[2]]
        )
    if not isinstance(parameter, DTensor):
        return states
    return {key: as_sharded(parameter, value, split.get(key)) for key, value in states.items()}


def class_of(key: str, module: str, name: str) -> Any:
    """The class of the low-bit state `key`. Raises Refused if it is not torchao's, or this torchao lacks it."""
    try:
        if not module.startswith("torchao.optim."):
            raise AttributeError(f"{module} is not torchao's")
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Refused(f"the checkpoint's {key} is a {module}.{name}, which cannot be made here: {error}") from None


def as_sharded(parameter: DTensor, shard: torch.Tensor, form: dict[str, Any] | None) -> torch.Tensor:
    """What this process holds as `shard`: a DTensor of the form that is given, or of the parameter's. A plain tensor
    stays one if the form is {}, or if it is a number."""
    if form == {} or (form is None and not shard.dim()):
        return shard
    shape, stride, placements = parameter.shape, parameter.stride(), parameter.placements
    if form is not None:
        shape = torch.Size(form["shape"])
        stride = torch.empty(shape, device="meta").stride()
        placements = [Replicate() if dim is None else Shard(dim) for dim in form["dims"]]
    shard = shard.to(local(parameter).device)
    return DTensor.from_local(
        shard, device_mesh=parameter.device_mesh, placements=placements, shape=shape, stride=stride
    )


def refuse_other_rows(parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Raises Refused if a checkpoint, a Mapping of each process that saved, has states that do not end where rows of
    their weights end."""
    if any(place.endswith(FORM) for place in parts[0]):
        raise Refused(
            f"the checkpoint has optimizer states of {len(parts)} processes, in low bits or split otherwise than their "
            "weights, which cannot be cut anew: resume with as many processes"
        )
