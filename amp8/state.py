"""Saves and loads the state of a converted model: exact states to resume from, plain ones to use elsewhere."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from .choice import LEVELS
from .convert import fsdp_modules, state_of
from .linear import FP8Linear
from .optimizer import Adam
from .tensors import cut, linear_of, local, own_rows

SCALING = "weight_scale", "weight_amax", "amax_history", "scale", "updates"  # of a converted layer
Value = TypeVar("Value")
Tensors = Mapping[str, torch.Tensor]


def root_of(model: nn.Module) -> nn.Module:
    """The module that was given to `initialize`, without its wrappers."""
    return next(module for module in model.modules() if getattr(module, "amp8_state", None) is not None)


def at_rest(root: nn.Module) -> nn.Module:
    """Returns `root`, after freeing the gathered weights that a forward pass under fully_shard has left behind."""
    for module in fsdp_modules(root):
        module.reshard()
    return root


def named(pairs: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
    """Yields (name, value) with the names that the model has without checkpoint_wrapper."""
    for name, value in pairs:
        yield ".".join(part for part in name.split(".") if part != "_checkpoint_wrapped_module"), value


def exact_state(model: nn.Module, optimizer: Adam | None) -> dict[str, torch.Tensor]:
    """Everything that is needed to resume bit for bit, {key: tensor}, in dtypes that safetensors stores.

    Keys beginning with `all/` are the same on every rank, those with `rank/` this rank's own: amax histories, and
    under O3 the masters and moments of the layers it owns. Under fully_shard those with `rows/` are this rank's rows of
    weights and moments. Tensors are not copies. No gradients: save between steps. optimizer: None if there is none.
    """
    state, root = state_of(model), at_rest(root_of(model))
    tensors = {"all/level": torch.tensor(LEVELS.index(state.level) + 1), "all/world": torch.tensor(state.world)}
    for key, tensor in raw_tensors(root).items():
        tensors[key] = tensor.detach().contiguous()
    states, groups = (optimizer.state, optimizer.param_groups) if optimizer else ({}, [])
    for name, parameter in named(root.named_parameters()):
        for key, value in states.get(parameter, {}).items():
            own = "rank" if state.sharded and linear_of(parameter) is not None else "all"
            if hasattr(parameter, "_local_tensor") and key in ("exp_avg", "exp_avg_sq"):
                own = "rows"
            tensors[f"{own}/optimizer/{name}/{key}"] = value.contiguous()
    for i, group in enumerate(groups):
        for key, value in numbers_of(group).items():
            tensors[f"all/group/{i}/{key}"] = value
    return tensors


@torch.no_grad()
def load_exact_state(
    model: nn.Module, optimizer: Adam | None, tensors: Tensors | list[Tensors] | tuple[Tensors, ...]
) -> None:
    """Loads what `exact_state` returned into a model and optimizer that were set up the same way.

    tensors: this rank's own entries and the common ones of any rank. Under fully_shard it may also be a list with the
    entries of each rank that saved the model, in order; then the number of ranks may differ. Only the entries that this
    rank needs are read, so files opened lazily work. Raises ValueError if level, number of ranks, names, shapes or
    dtypes differ from the model's.
    """
    state, root = state_of(model), at_rest(root_of(model))
    parts = list(tensors) if isinstance(tensors, list | tuple) else None
    tensors = tensors[min(state.rank, len(tensors) - 1)] if isinstance(tensors, list | tuple) else tensors
    level, world = LEVELS[int(tensors["all/level"]) - 1], int(tensors["all/world"])
    if (level, world) != (state.level, state.world) and (parts is None or level != state.level):
        asked, there = f"{level} on {world} ranks", f"{state.level} on {state.world} ranks"
        raise ValueError(f"the saved state is of {asked}, the model is {there}: load its state_dict instead")
    if parts is not None and len(parts) != world:
        raise ValueError(f"the saved state is of {world} ranks, and {len(parts)} were given: give all, in order")
    targets = raw_tensors(root)
    saved = {key for key in tensors.keys() if key.split("/")[1] in ("model", "master")}
    if saved != targets.keys():
        odd = sorted(saved ^ targets.keys())
        raise ValueError(f"the saved state is of another model: {len(odd)} entries differ, {', '.join(odd[:3])}, ...")
    rows = {name: own_rows(parameter) for name, parameter in named(root.named_parameters())}

    def entry(key: str) -> torch.Tensor:
        """What this rank needs of a key: its rows from whoever had them."""
        kind, _, name = key.split("/", 2)
        if parts is None or world == state.world or kind == "all":
            return tensors[key]
        if kind == "rank":
            return agreed(key, [part[key] for part in parts])
        name = name if name in rows else name.rsplit("/", 1)[0]
        return rows_from(parts, key, *rows[name])  # pyrefly: ignore[not-iterable]

    for key, target in targets.items():
        value = entry(key)
        if (target.shape, target.dtype) != (value.shape, value.dtype):
            here, there = f"{target.dtype} {list(target.shape)}", f"{value.dtype} {list(value.shape)}"
            raise ValueError(f"{key} is {there} in the saved state, {here} in the model")
        target.copy_(value)
    for module in root.modules():
        if isinstance(module, FP8Linear):
            module.casts = module.saved_casts()
    if optimizer is None:
        return
    parameters = dict(named(root.named_parameters()))
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key in tensors.keys():
        _, kind, rest = key.split("/", 2) if key.count("/") > 1 else ("", "", "")
        if kind == "optimizer":
            name, moment = rest.rsplit("/", 1)
            found.setdefault(name, {})[moment] = entry(key)
    optimizer.state.clear()
    for name, values in found.items():
        optimizer.adopt(parameters[name], values)
    for i, group in enumerate(optimizer.param_groups):
        for key in numbers_of(group):
            load_number(group, key, tensors[f"all/group/{i}/{key}"])


def rows_from(parts: list[Tensors], key: str, first: int, last: int, rows: int) -> torch.Tensor:
    """Rows first .. last of a tensor that was sharded over len(parts) ranks."""
    found = []
    for i, part in enumerate(parts):
        start, end = cut(rows, len(parts), i)
        if max(first, start) < min(last, end) or i == len(parts) - 1 and not found:  # at least none, of the right shape
            found.append(part[key][max(first - start, 0) : max(last - start, 0)])
    return torch.cat(found)


def agreed(key: str, values: Iterable[torch.Tensor]) -> torch.Tensor:
    """Merges values that each rank had for itself, when the number of ranks changes: the largest amax histories, the
    smallest scales and numbers of updates, which are safe for all ranks."""
    values = torch.stack(list(values))
    return values.amax(0) if key.endswith("amax_history") else values.amin(0)


def raw_tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    """{key: tensor} of the model: parameters as they are stored, buffers, masters."""
    tensors = {}
    for name, parameter in named(root.named_parameters()):
        linear, kind = linear_of(parameter), "rows" if hasattr(parameter, "_local_tensor") else "all"
        tensors[f"{kind}/model/{name}"] = local(parameter) if linear is None else linear.codes
    converted = {name: module for name, module in named(root.named_modules()) if isinstance(module, FP8Linear)}
    for name, buffer in named(root.named_buffers()):
        tensors[f"all/model/{name}"] = buffer
    for name, module in converted.items():
        for entry in SCALING:
            shared = entry in ("weight_scale", "weight_amax")
            tensors[f"{'all' if shared else 'rank'}/model/{name}.{entry}".replace("/.", "/")] = getattr(module, entry)
    for name, module in converted.items():
        if module.master is not None:
            tensors[f"rank/master/{name}"] = module.master
            tensors[f"rank/master/{name}.scale"] = module.master_scale
    return tensors


def numbers_of(group: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The numbers of a param_group as fp64 tensors: lr, betas, eps, weight_decay, and what a scheduler adds."""
    numbers = {}
    for key, value in group.items():
        if key == "betas" or isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
            numbers[key] = torch.tensor(value, dtype=torch.float64)
        elif isinstance(value, torch.Tensor) and value.dim() == 0:
            numbers[key] = value.detach().double()
    return numbers


def load_number(group: dict[str, Any], key: str, saved: torch.Tensor) -> None:
    if key == "betas":
        group[key] = tuple(saved.tolist())
    elif isinstance(group[key], torch.Tensor):
        group[key].copy_(saved)
    else:
        group[key] = type(group[key])(saved.item())


@torch.no_grad()
def master_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state_dict with the most precise weights: under O3 the owners' FP16 masters instead of the FP8
    weights. Plain fp32, with the unconverted model's names. Every rank must call it; every rank gets the whole dict."""
    state, root = state_of(model), root_of(model)
    out = root.state_dict()
    if state.level != "O3":
        return out
    for name, layer in state.layers.items():
        if not layer.weight.requires_grad:
            continue
        key = f"{name}.weight" if name else "weight"
        if layer.master is not None:
            out[key] = layer.master.float() / layer.master_scale
        if state.sharded:
            # pyrefly: ignore[bad-argument-type]
            dist.broadcast(out[key], dist.get_global_rank(state.group, layer.gradient.owner), group=state.group)
    return out
