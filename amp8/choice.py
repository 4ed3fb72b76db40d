"""Which layers of a model are converted, and what can't be converted at all."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from .fsdp import Place

Skip = str | Iterable[str] | Callable[[str, nn.Module], bool]

LEVELS = ("O1", "O2", "O3")
# These modules read a child's weight instead of calling the child, at least in evaluation, and would read codes.
READ_DIRECTLY = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def check(model: nn.Module, optimizer: torch.optim.Optimizer | None, opt_level: str, accumulate: str) -> None:
    """Raises an error with a line that says what to do, if this can't be converted."""
    if opt_level not in LEVELS:
        raise ValueError(f"opt_level is one of {', '.join(LEVELS)}, not {opt_level!r}")
    if accumulate not in ("high", "fp8"):
        raise ValueError(f"accumulate is 'high' or 'fp8', not {accumulate!r}")
    if optimizer is not None:
        check_optimizer(optimizer)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("call amp8.initialize before DistributedDataParallel wraps the model, then amp8.attach")
    if any(getattr(module, "amp8_state", None) is not None for module in model.modules()):
        raise ValueError("the model is on a level already: call amp8.initialize once")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values: load the weights before amp8.initialize")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    # AdamW is a subclass of Adam; a subclass of one's own may have another step, which would be lost.
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        raise TypeError(f"amp8 needs torch.optim.AdamW or Adam itself, not {type(optimizer).__qualname__}")
    for option in ("amsgrad", "capturable", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise ValueError(f"amp8's Adam has no {option}: make the optimizer without it")


def choose(
    model: nn.Module, skip: Skip, places: "dict[nn.Parameter, Place]"
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Returns ({name: layer} to convert, [(name, reason)] for the other Linear layers). places: what `fsdp.managed`
    found."""
    modules = dict(model.named_modules())
    if not callable(skip):
        names = (skip,) if isinstance(skip, str) else tuple(skip)
        for name in names:
            if name not in modules:
                raise ValueError(f"skip names {name!r}, which is no module of the model")

        def skip(name: str, module: nn.Module) -> bool:
            return any(name == other or name.startswith(other + ".") for other in names)

    users: dict[nn.Parameter, list[str]] = {}
    for name, module in modules.items():
        for entry, parameter in module.named_parameters(recurse=False):
            users.setdefault(parameter, []).append(f"{name}.{entry}".lstrip("."))
    inside = [name + "." for name, module in modules.items() if isinstance(module, READ_DIRECTLY)]
    layers, skipped, meshes = {}, [], []
    for name, module in modules.items():
        if not isinstance(module, nn.Linear) and not is_conv1d(module):
            continue
        reason = None
        weight = module._parameters.get("weight")
        if skip(name, module):
            reason = "asked to be skipped"
        elif any(name.startswith(outer) for outer in inside):
            reason = "the module around it reads its weight directly"
        elif isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
            reason = f"{type(module).__name__} has a forward of its own"
        elif weight is None or not (weight in places if places else is_ordinary(weight)):
            reason = "its weight is not an ordinary parameter"
        elif weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            reason = f"its weight is {str(weight.dtype)[6:]}"
        elif len(users[weight]) > 1:
            others = ", ".join(user for user in users[weight] if user != f"{name}.weight".lstrip("."))
            reason = f"its weight is shared with {others}"
        elif any(size % 16 for size in weight.shape):
            reason = f"its weight is {weight.shape[0]} x {weight.shape[1]}: not multiples of 16"
        elif places:
            reason = sharded_otherwise(*places[weight], meshes)
        if reason is None:
            layers[name] = module
        else:
            skipped.append((name, reason))
    return layers, skipped


def sharded_otherwise(
    fsdp_param: "FSDPParam", group: "FSDPParamGroup", meshes: "list[DataParallelMeshInfo]"
) -> str | None:
    """The reason why a weight under fully_shard can't be converted, or None. meshes: the meshes seen so far."""
    if fsdp_param.is_dtensor:
        return "its weight is sharded by something else than fully_shard too"
    if fsdp_param.fsdp_placement.dim != 0:
        return "its weight is not sharded by rows"
    if meshes and group.mesh_info != meshes[0]:
        return "its weight is on another mesh"
    meshes.append(group.mesh_info)
    return None


def is_ordinary(weight: torch.Tensor) -> bool:
    """Whether a weight is a Parameter around a plain tensor or a fake tensor, which memory estimates use."""
    plain = type(weight) is nn.Parameter and type(weight.data) is torch.Tensor
    return plain or (isinstance(weight, nn.Parameter) and type(weight).__name__ == "FakeTensor")


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D. Checks the name, so that transformers need not be installed."""
    named = any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)  # fully_shard makes a subclass
    return named and hasattr(module, "nf") and module.weight.dim() == 2  # pyrefly: ignore[not-callable]
