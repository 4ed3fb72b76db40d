"""Writes into sharded tensors (DTensor) as scripts make them: what torch would put into a copy goes into the shards.

Where an index selects along the sharded dimension, torch gathers the tensor and indexes the copy. A write to the result
would be lost without a word: `weight.grad[:24] = 0`, `weight.data[5].mul_(0)`. So would `weight.data = value`. Other
ways to such a copy (`chunk`, `narrow`, `view`) are refused when it is changed. And torch refuses to change a DTensor by
a whole tensor, `weight.grad.mul_(mask)`, of which each process takes its part here. The number that `item()` and
`float()` give would be that of this process's part: `weight.grad.norm().item()`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from faithful import patches
from faithful.errors import Refused
from faithful.models.averages import like

ROW = "DTensor.__getitem__, __setitem__, data, item, methods that change it"
METHODS = ("add_", "sub_", "mul_", "div_", "copy_", "masked_fill_", "lerp_", "addcmul_", "addcdiv_")
ASSIGNMENTS = ("__iadd__", "__isub__", "__imul__", "__itruediv__")
OPERATORS = {"__setitem__", *ASSIGNMENTS, "__ifloordiv__", "__imod__", "__ipow__"}
NUMBER = torch.ops.aten._local_scalar_dense.default  # of item() and float()
WHOLE = (torch.Tensor, torch.nn.Parameter)
NO_VALUES = {"requires_grad_", "share_memory_", "detach_", "rename_", "resize_", "resize_as_", "set_"}
Hooks = tuple[dict[int, Callable[..., Any]] | None, dict[int, Callable[..., Any]] | None]  # see hooks_of


def take_writes() -> None:
    """Makes writes to DTensors count, until the run ends. Called when a model is sharded."""
    if isinstance(vars(DTensor).get("data"), property):
        return
    ours = {"__getitem__": getitem, "__setitem__": setitem, "data": property(get_data, set_data)}
    names = [name for name in dir(torch.Tensor) if changes(name) and name not in NO_VALUES and name not in ours]
    for name, value in (ours | {name: changing(name) for name in names}).items():
        setattr(DTensor, name, value)
        patches.undo_with(ROW, lambda name=name: delattr(DTensor, name))
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[NUMBER] = number_of_all
    patches.undo_with(ROW, lambda: handlers.pop(NUMBER, None))


def changes(name: str) -> bool:
    """Whether a method of this name changes its tensor."""
    return name in OPERATORS or (name.endswith("_") and not name.startswith("_") and not name.endswith("__"))


def changing(name: str) -> Callable[..., Any]:
    """A method that changes a DTensor. Some take whole tensors, too, the same on all processes."""
    method, takes_whole = getattr(torch.Tensor, name), name in METHODS + ASSIGNMENTS

    @functools.wraps(method)
    def call(self: DTensor, *args: Any, **kwargs: Any) -> Any:  # an optimizer does so several times for each weight
        if self._base is not None:
            refuse_copy(self, name)
        if takes_whole and any(type(arg) in WHOLE for arg in args):
            return method(self, *[split_as(self, arg) for arg in args], **kwargs)
        return method(self, *args, **kwargs)

    return call


def refuse_copy(tensor: DTensor, name: str) -> None:
    """Raises Refused if torch has copied what in plain torch is part of another tensor's memory, which would not
    change; or if an index of a view selects in an order that shards do not have."""
    base = tensor._base
    copied = isinstance(base, DTensor) and not isinstance(tensor, Selected) and memory(base) != memory(tensor)
    if copied or (name == "an index" and any(isinstance(each, _StridedShard) for each in tensor.placements)):
        raise Refused(
            f"the script changes a part of a sharded tensor by {name}, and torch has copied this part (as chunk, "
            "narrow and view do along the sharded dimension): write weight[:n] = value, or use a ddp config"
        )


def memory(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage().data_ptr()


def split_as(tensor: DTensor, value: Any) -> Any:
    """`value`, as a DTensor if it is a whole tensor that is not a number."""
    if type(value) not in WHOLE or not value.dim():
        return value
    whole = value.to(tensor.device).expand(tensor.shape)
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


class Selected(DTensor):
    """Part of a DTensor, as a copy. A method that changes it changes the original: `origin[index]`."""

    origin: DTensor
    index: Any

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            target = args[0] if args else None
            if isinstance(target, Selected) and changes(getattr(func, "__name__", "")):
                with torch.no_grad():
                    target.origin[target.index] = target
        return result


def getitem(self: DTensor, index: Any) -> torch.Tensor:
    result: Any = torch.Tensor.__getitem__(self, index)
    if basic(index) and not result.requires_grad and sharded(self) and not sharded(result):
        result.__class__ = Selected
        result.origin, result.index = self, index
    return result


def basic(index: object) -> bool:
    """Whether this index selects a view of a tensor, as numbers and slices do."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or isinstance(part, int | slice | type(...)) for part in parts)


def sharded(tensor: torch.Tensor) -> bool:
    return any(placement.is_shard() for placement in tensor.placements)  # pyrefly: ignore[missing-attribute]


def setitem(self: DTensor, index: Any, value: Any) -> None:
    """Every process calls it: unless torch's own writes into the shards, the whole tensor is gathered, changed and
    split again. What autograd records is torch's own, which raises an error for a parameter."""
    refuse_copy(self, "an index")
    recorded = torch.is_grad_enabled() and (self.requires_grad or getattr(value, "requires_grad", False))
    plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if recorded or not sharded(self) or (basic(index) and not plain and sharded(torch.Tensor.__getitem__(self, index))):
        return torch.Tensor.__setitem__(self, index, value)
    whole = whole_of(self.detach())
    whole[whole_of(index)] = whole_of(value)
    write(self, whole)


@torch.no_grad()
def write(tensor: DTensor, value: torch.Tensor) -> None:
    """Writes the whole `value`, or a DTensor, into the shard of this process."""
    tensor._local_tensor.copy_(like(value, tensor))


def whole_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(whole_of, value))
    return value.full_tensor() if isinstance(value, DTensor) else value


def number_of_all(op_call: object, args: tuple[Any, ...], kwargs: object) -> float:
    """The number in a tensor of one element. Every process calls it."""
    return args[0].full_tensor().item()


def get_data(self: DTensor) -> torch.Tensor:
    return torch.Tensor.data.__get__(self)  # pyrefly: ignore[missing-attribute]


def set_data(self: DTensor, value: torch.Tensor) -> None:
    """Writes the values into the shard, which FSDP2 knows. Another shape or dtype is torch's own assignment."""
    if (value.shape, value.dtype) != (self.shape, self.dtype):
        return torch.Tensor.data.__set__(self, value)  # pyrefly: ignore[missing-attribute]
    same = isinstance(value, DTensor) and value.placements == self.placements
    write(self, value if same else whole_of(value))


def hooks_of(parameter: torch.Tensor) -> Hooks:
    """Those that a script has registered on a parameter: (before, after) its gradient is accumulated. The
    script's handles remove hooks from them."""
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def move_hooks(hooks: Hooks, parameter: torch.Tensor) -> None:
    """Registers `hooks_of` another parameter on this one."""
    before, after = hooks
    if before:
        parameter._backward_hooks = before
    if after:
        parameter._post_accumulate_grad_hooks = after


def step_in_turn(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer step its DTensors and its tensors in turn, each with a kernel for lists, fused or foreach,
    which takes no mixture. In between its groups are the script's: a scheduler may hold on to their order."""
    if len({isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]}) < 2:
        return
    whole = []

    def separate(*_: object) -> None:
        whole[:] = optimizer.param_groups
        optimizer.param_groups = []
        for group in whole:
            shards = [parameter for parameter in group["params"] if isinstance(parameter, DTensor)]
            others = [parameter for parameter in group["params"] if not isinstance(parameter, DTensor)]
            optimizer.param_groups += [group | {"params": params} for params in (shards, others) if params]

    def join(*_: object) -> None:
        optimizer.param_groups = list(whole)

    optimizer.register_step_pre_hook(separate)
    optimizer.register_step_post_hook(join)
