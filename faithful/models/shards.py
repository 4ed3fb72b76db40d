"""What scripts do to sharded tensors (DTensor): what torch would put into a copy goes into the shards, or is refused.

Where an index selects along the sharded dimension, torch gathers the tensor and indexes the copy, and so do `chunk`,
`narrow` and `view`. A write to the result would be lost without a word: `weight.grad[:24] = 0`,
`weight.data[5].mul_(0)`. It is refused. `weight.data = value` goes into the shards. The number that `item()` and
`float()` give would be that of this process's part: `weight.grad.norm().item()`. Here it is that of the whole tensor.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn

import safetensors.torch
import torch
from accelerate.state import PartialState
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map_only

from faithful import patches
from faithful.errors import Refused
from faithful.launch import following, launcher, rank_sync
from faithful.models.averages import like
from faithful.tensors.names import by_mesh, tensors_of

WHOLE = (
    "on all of them call accelerator.get_state_dict(model), and save what it returns, or accelerator.save_model; for "
    "an optimizer's state, accelerator.save_state"
)
WRITES = "torch.save or save_file"
SAVES = "save of torch, save_file of safetensors.torch"
copies = 0  # how often this process has written a whole tensor into a shard, which all do as often
ROW = "DTensor.__setitem__, data, item, methods that change it"
OPERATORS = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"}
NUMBER = torch.ops.aten._local_scalar_dense.default  # of item() and float()
NO_VALUES = {"requires_grad_", "share_memory_", "detach_", "rename_", "resize_", "resize_as_", "set_"}
Hooks = tuple[dict[int, Callable[..., Any]] | None, dict[int, Callable[..., Any]] | None]  # see hooks_of


def take_writes() -> None:
    """Makes writes to DTensors count, until the run ends. Called when a model is sharded."""
    if isinstance(vars(DTensor).get("data"), property):
        return
    ours = {"__setitem__": setitem, "data": property(get_data, set_data)}
    names = [name for name in dir(torch.Tensor) if changes(name) and name not in NO_VALUES and name not in ours]
    for name, value in (ours | {name: changing(name) for name in names}).items():
        setattr(DTensor, name, value)
        patches.undo_with(ROW, lambda name=name: delattr(DTensor, name))
    for save in (torch.save, safetensors.torch.save_file):
        if getattr(save, "func", None) is not saved_by_all:
            patches.replace_everywhere(SAVES, save, functools.partial(saved_by_all, save))
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[NUMBER] = number_of_all
    patches.undo_with(ROW, lambda: handlers.pop(NUMBER, None))


def saved_by_all(save: Callable[..., Any], obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
    """A function that saves, which writes this process's part of a DTensor: fine where each process has a file of its
    own. Where the others follow the main process, it writes whole tensors."""
    shards = [tensor for tensor in tensors_of(obj) if isinstance(tensor, DTensor)]
    if shards and not launcher.is_distributed() and shards[0].device_mesh.size() > 1:
        raise Refused(f"{WRITES} after end_training(), when no process has the others' parts any more: {WHOLE}, before")
    if shards:
        need_all_for(WRITES, following.gathering(WRITES, shards))
        path = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)  # of an open file
        paths = gather_object([os.path.realpath(path)] if isinstance(path, str | os.PathLike) else [])
        if None in paths:  # of those that follow
            obj = tree_map_only(DTensor, whole_on_device, obj)
        elif len(set(paths)) < len(paths):
            raise Refused(
                f"several processes write their parts of sharded tensors to {path}, where one would be left: {WHOLE}"
            )
    save(obj, f, *args, **kwargs)


def whole_on_device(shard: Any) -> torch.Tensor:
    return shard.to(PartialState().device).full_tensor()


def need_all_for(call: str, asks: tuple[Any, ...] = ()) -> None:
    """Raises Refused if the main process alone calls this to write shards."""
    if not rank_sync.all_ranks_called(call, True, asks):
        raise Refused(
            f"the main process alone calls {call} with sharded tensors, of which each process holds a part: {WHOLE}"
        )


def changes(name: str) -> bool:
    """Whether a method of this name changes its tensor."""
    return name in OPERATORS or (name.endswith("_") and not name.startswith("_") and not name.endswith("__"))


def changing(name: str) -> Callable[..., Any]:
    """A method that changes a DTensor, unless torch has copied it out of another one. `copy_` takes a whole tensor
    too, the same on all processes: `load_state_dict` of whole weights."""
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def call(self: DTensor, *args: Any, **kwargs: Any) -> Any:  # an optimizer does so several times for each weight
        global copies
        if is_copy(self):
            refuse(name)
        if name == "copy_" and type(args[0]) in (torch.Tensor, torch.nn.Parameter):
            copies += 1
            whole = args[0].to(self.device).expand(self.shape)
            args = (distribute_tensor(whole, self.device_mesh, self.placements, src_data_rank=None), *args[1:])
        return method(self, *args, **kwargs)

    return call


def is_copy(tensor: DTensor) -> bool:
    """Whether torch has copied what in plain torch is part of another tensor's memory, and would not change."""
    base = tensor._base
    return isinstance(base, DTensor) and memory(base) != memory(tensor)


def refuse(name: str) -> NoReturn:
    raise Refused(
        f"the script changes a part of a sharded tensor by {name}, and torch has copied this part, as an index, chunk, "
        "narrow and view do along the sharded dimension: change the whole tensor, weight.mul_(mask) with a mask that "
        "is made of weight, or use a ddp config"
    )


def memory(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage().data_ptr()


def setitem(self: DTensor, index: Any, value: Any) -> None:
    """Writes what torch itself writes into the shards: along other dimensions than the sharded one."""
    parts = index if isinstance(index, tuple) else (index,)
    views = all(part is None or isinstance(part, int | slice | type(...)) for part in parts)
    sharded = any(placement.is_shard() for placement in self.placements)
    other_order = any(isinstance(placement, _StridedShard) for placement in self.placements)  # of a view
    if is_copy(self) or other_order or (sharded and not (views and is_part(self, index))):
        refuse("an index")
    torch.Tensor.__setitem__(self, index, value)


def is_part(tensor: DTensor, index: Any) -> bool:
    part: Any = torch.Tensor.__getitem__(tensor, index)
    return memory(part) == memory(tensor)


@torch.no_grad()
def write(tensor: DTensor, value: torch.Tensor) -> None:
    """Writes the whole `value`, or a DTensor, into the shard of this process."""
    tensor._local_tensor.copy_(like(value, tensor))


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
    write(self, value if same or not isinstance(value, DTensor) else value.full_tensor())


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
    """Makes the optimizer step its tensors and the DTensors of each mesh in turn, each with a kernel for lists, fused
    or foreach, which takes no mixture. In between its groups are the script's: a scheduler may hold on to their order.
    """
    if len(by_mesh(p for group in optimizer.param_groups for p in group["params"])) < 2:
        return
    whole = []

    def separate(*_: object) -> None:
        whole[:] = optimizer.param_groups
        optimizer.param_groups = []
        for group in whole:
            optimizer.param_groups += [group | {"params": params} for params in by_mesh(group["params"])]

    def join(*_: object) -> None:
        optimizer.param_groups = list(whole)

    optimizer.register_step_pre_hook(separate)
    optimizer.register_step_post_hook(join)
