"""States of a converted model that leave the process: exact ones to resume from, plain ones to use elsewhere."""

import torch
import torch.distributed as dist

from .convert import LEVELS, state_of
from .linear import FP8Linear


def root_of(model):
    """The module that was given to `initialize`, without what wraps it."""
    return next(module for module in model.modules() if getattr(module, "amp8_state", None) is not None)


def exact_state(model, optimizer):
    """Everything from which training resumes bit for bit, {key: tensor}, in dtypes that safetensors stores.

    Keys beginning with `all/` are the same on every rank, those with `rank/` this rank's own: amax histories, and
    under O3 the masters and moments of the layers it owns. Tensors are not copies. No gradients: save between steps.
    """
    state, root = state_of(model), root_of(model)
    tensors = {"all/level": torch.tensor(LEVELS.index(state.level) + 1), "all/world": torch.tensor(state.world)}
    for key, tensor in raw_tensors(root).items():
        tensors[key] = tensor.detach().contiguous()
    for name, parameter in root.named_parameters():
        own = "rank" if state.sharded and hasattr(parameter, "amp8_linear") else "all"
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{own}/optimizer/{name}/{key}"] = value.contiguous()
    for i, group in enumerate(optimizer.param_groups):
        for key, value in numbers_of(group).items():
            tensors[f"all/group/{i}/{key}"] = value
    return tensors


@torch.no_grad()
def load_exact_state(model, optimizer, tensors):
    """Puts back what `exact_state` gave, on a model and optimizer set up the same way.

    tensors: this rank's own entries and the shared ones, of any rank. Raises ValueError where level, number of ranks,
    names, shapes or dtypes are not those of the model.
    """
    state, root = state_of(model), root_of(model)
    level, world = LEVELS[int(tensors["all/level"]) - 1], int(tensors["all/world"])
    if (level, world) != (state.level, state.world):
        asked, there = f"{level} on {world} ranks", f"{state.level} on {state.world} ranks"
        raise ValueError(f"the saved state is of {asked}, the model is {there}: load its state_dict instead")
    targets = raw_tensors(root)
    saved = {key for key in tensors if key.split("/")[1] in ("model", "master")}
    if saved != targets.keys():
        odd = sorted(saved ^ targets.keys())
        raise ValueError(f"the saved state is of another model: {len(odd)} entries differ, {', '.join(odd[:3])}, ...")
    for key, target in targets.items():
        if (target.shape, target.dtype) != (tensors[key].shape, tensors[key].dtype):
            here, there = f"{target.dtype} {list(target.shape)}", f"{tensors[key].dtype} {list(tensors[key].shape)}"
            raise ValueError(f"{key} is {there} in the saved state, {here} in the model")
        target.copy_(tensors[key])
    parameters = dict(root.named_parameters())
    found = {}
    for key, tensor in tensors.items():
        _, kind, rest = key.split("/", 2) if key.count("/") > 1 else (None, None, None)
        if kind == "optimizer":
            name, entry = rest.rsplit("/", 1)
            found.setdefault(name, {})[entry] = tensor
    optimizer.state.clear()
    for name, values in found.items():
        optimizer.adopt(parameters[name], values)
    for i, group in enumerate(optimizer.param_groups):
        for key in numbers_of(group):
            load_number(group, key, tensors[f"all/group/{i}/{key}"])


def raw_tensors(root):
    """{key: tensor} of the model: parameters as they are stored, buffers, masters."""
    tensors = {f"all/model/{name}": parameter for name, parameter in root.named_parameters()}
    converted = {name for name, module in root.named_modules() if isinstance(module, FP8Linear)}
    for name, buffer in root.named_buffers():
        layer, _, entry = name.rpartition(".")
        shared = layer not in converted or entry in ("weight_scale", "weight_amax")
        tensors[f"{'all' if shared else 'rank'}/model/{name}"] = buffer
    for name, module in root.named_modules():
        if name in converted and module.master is not None:
            tensors[f"rank/master/{name}"] = module.master
            tensors[f"rank/master/{name}.scale"] = module.master_scale
    return tensors


def numbers_of(group):
    """A param_group's numbers as fp64 tensors: lr, betas, eps, weight_decay, and what a scheduler adds."""
    numbers = {}
    for key, value in group.items():
        if key == "betas" or isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
            numbers[key] = torch.tensor(value, dtype=torch.float64)
        elif isinstance(value, torch.Tensor) and value.dim() == 0:
            numbers[key] = value.detach().double()
    return numbers


def load_number(group, key, saved):
    if key == "betas":
        group[key] = tuple(saved.tolist())
    elif isinstance(group[key], torch.Tensor):
        group[key].copy_(saved)
    else:
        group[key] = type(group[key])(saved.item())


@torch.no_grad()
def master_state_dict(model):
    """The model's state_dict with the most precise weights there are: under O3 the owners' FP16 masters instead of the
    FP8 weights. Plain fp32, under the unconverted model's names. Every rank must call it; every rank gets all of it."""
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
            dist.broadcast(out[key], dist.get_global_rank(state.group, layer.gradient.owner), group=state.group)
    return out
