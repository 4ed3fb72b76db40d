"""The whole weights that FSDP2 gathers for a forward and a backward pass, and frees again.

A script sees them inside the model while it computes, and the shards outside. Autograd knows the gathered weights
alone. So hooks that a script registers on a parameter are called for the gathered weight, and what it writes to a
gathered weight goes into the shard. A parameter without dimensions, such as CLIP's logit_scale, is not sharded.
"""

import contextlib
import functools
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from faithful import patches
from faithful.errors import Refused
from faithful.strategies import guard

ROW = "torch.distributed.fsdp.FSDPModule.zero_grad"
Places = list[tuple[nn.Module, str, nn.Parameter]]  # (module, name in it, parameter)


def parameter_groups(state: FSDPState) -> list[FSDPParamGroup]:
    """The groups of parameters that FSDP2 gathers for this module: one or none on torch 2.11, a list on later ones."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def watch(model: nn.Module, scalars: Places) -> None:
    """Makes hooks and writes of the script count, in a model that has just been sharded. scalars: `taken_out` of it."""
    states = {module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)}
    for state in states:
        state.__class__ = State
        for group in parameter_groups(state):
            group.__class__ = Group
            for fsdp_param in group.fsdp_params:
                fsdp_param.__class__ = Param
        # one for the whole model
        # pyrefly: ignore[missing-attribute]
        state._state_ctx.scalars = list({id(p): p for _, _, p in scalars}.values())


def waiting(model: nn.Module) -> bool:
    """Whether gradients of a backward pass wait for those of the next one, whole, before FSDP2 averages them."""
    if torch._C._current_graph_task_id() >= 0:  # in a hook of a pass
        return False
    states = {module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)}
    each = [p for state in states for group in parameter_groups(state) for p in group.fsdp_params]
    held = [getattr(getattr(p, "_unsharded_param", None), "grad", None) for p in each]
    held += [getattr(p, "unsharded_accumulated_grad", None) for p in each]  # torch before 2.15
    return any(gradient is not None for gradient in held)


def take_zero_grad() -> None:
    """Makes `model.zero_grad()` raise where it would not give up gradients, until the run ends."""
    if "zero_grad" in vars(FSDPModule):
        return

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        guard.refuse_between_passes(not waiting(self), "FSDP2")
        nn.Module.zero_grad(self, set_to_none)

    FSDPModule.zero_grad = zero_grad  # pyrefly: ignore[missing-attribute]
    patches.undo_with(ROW, lambda: delattr(FSDPModule, "zero_grad"))


def taken_out(model: nn.Module) -> Places:
    """Takes the parameters without dimensions out of the model, as FSDP2 cannot shard them. Returns their places:
    [(module, name, parameter)]."""
    parameters = [(module, name, p) for module in model.modules() for name, p in module._parameters.items()]
    places = [(module, name, p) for module, name, p in parameters if p is not None and not p.dim()]
    for module, name, _ in places:
        module._parameters[name] = None
    return places


@torch.no_grad()
def put_back(places: Places, device: torch.device, sent: bool) -> None:
    """Puts them back on `device`. sent: by process 0, as the others have no values."""
    moved = {}
    for at, (module, name, parameter) in enumerate(places):
        if id(parameter) not in moved:
            value = torch.empty((), dtype=parameter.dtype) if parameter.is_meta else parameter.data
            value = value.to(device)
            if sent:
                dist.broadcast(value, 0)
            if parameter.is_meta:
                moved[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
            else:
                parameter.data, moved[id(parameter)] = value, parameter
        places[at] = module, name, moved[id(parameter)]
        module._parameters[name] = moved[id(parameter)]


@torch.no_grad()
def average(scalars: list[nn.Parameter]) -> None:
    """Averages their gradients over all processes. One that a process has not is zero there."""
    trained = [parameter for parameter in scalars if parameter.requires_grad]
    if not trained:
        return
    dtype = functools.reduce(torch.promote_types, (parameter.dtype for parameter in trained), torch.float32)
    gradients = torch.stack([(p.new_zeros(()) if p.grad is None else p.grad).to(dtype) for p in trained])
    dist.all_reduce(gradients)
    for parameter, gradient in zip(trained, gradients / dist.get_world_size(), strict=True):
        parameter.grad = gradient.to(parameter.dtype)


class State(FSDPState):
    """A module that FSDP2 gathers as one. The first one that a backward pass reaches is called at its end."""

    def _root_post_backward_final_callback(self) -> None:
        super()._root_post_backward_final_callback()
        if any(group.reduce_grads for state in self._state_ctx.all_states for group in parameter_groups(state)):
            average(self._state_ctx.scalars)  # pyrefly: ignore[missing-attribute]

    def _register_pre_backward_hook(self, output: Any) -> Any:
        """FSDP2 finds no tensors in a UserDict, such as transformers' BatchEncoding, and would average no gradient."""
        if not isinstance(output, UserDict):
            return super()._register_pre_backward_hook(output)
        output.data = super()._register_pre_backward_hook(output.data)
        return output


class Group(FSDPParamGroup):
    """What an evaluation under torch.inference_mode() gathers first, training uses later: it must be no inference
    tensor."""

    def lazy_init(self) -> None:
        with outside_inference_mode():
            return super().lazy_init()

    def unshard(self, async_op: bool = False) -> None:
        with outside_inference_mode():
            return super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        with outside_inference_mode():
            return super().wait_for_unshard()


def outside_inference_mode() -> contextlib.AbstractContextManager[None]:
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


class Param(FSDPParam):
    """One parameter: its shard, and its gathered weight."""

    version: int | None = None  # of the gathered weight, when it was gathered

    def init_unsharded_param(self) -> None:
        first = not hasattr(self, "_unsharded_param")
        super().init_unsharded_param()
        if first:
            hook = functools.partial(call_hooks, weakref.ref(self))
            self._unsharded_param._backward_hooks = OrderedDict({-1: hook})
            if type(self._unsharded_param) is nn.Parameter and not self.encoded:
                self._unsharded_param.__class__ = Gathered
        if first or self.encoded:  # FSDP2 fills the others without a new version
            self.version = self._unsharded_param._version

    @property
    def encoded(self) -> bool:
        """Whether the shards are gathered as something else than values, such as FP8 codes."""
        return hasattr(self._sharded_local_tensor, "fsdp_post_all_gather")

    def to_sharded(self) -> None:
        self.take_written()
        super().to_sharded()

    def to_sharded_post_forward(self) -> None:
        self.take_written()
        super().to_sharded_post_forward()

    @torch.no_grad()
    def take_written(self) -> None:
        """Copies what the script has written to the gathered weight into the shard. Where it has written nothing the
        shard keeps its value, which may have more digits."""
        weight = getattr(self, "_unsharded_param", None)
        if weight is None or self.sharded_state != ShardedState.UNSHARDED or not self.may_be_written(weight):
            return
        if self.encoded:
            raise Refused(
                f"the script writes to {self._param_fqn} in a forward pass, which FSDP2 gathers in FP8: write to it "
                "between steps, or use a bf16 config"
            )
        weight.handed_out, self.version = False, weight._version
        shard = self._sharded_param_data
        rank = getattr(self.mesh_info, "shard_mesh_rank", 0)
        part = self.all_gather_outputs[0].narrow(0, rank * shard.numel(), shard.numel()).to(shard.device)
        shard.copy_(torch.where(shard.to(part.dtype) == part, shard, part.to(shard.dtype)))

    def may_be_written(self, weight: torch.Tensor) -> bool:
        return weight._version != self.version or getattr(weight, "handed_out", False)


class Gathered(nn.Parameter):
    """A gathered weight. `.data` is a tensor with versions of its own, so it is noted that the script has got it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyrefly: ignore[bad-override]
    handed_out = False

    @property
    def data(self) -> torch.Tensor:
        self.handed_out = True
        return torch.Tensor.data.__get__(self)  # pyrefly: ignore[missing-attribute]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.data.copy_(value)


def call_hooks(reference: Callable[[], Any], gradient: torch.Tensor) -> torch.Tensor | None:
    """Calls the hooks of the sharded parameter with the whole gradient of this process, in the dtype of the shards, as
    DDP does. Returns what becomes of the gradient. reference: a weak one to the Param."""
    hooks = reference().sharded_param._backward_hooks
    if not hooks:
        return None
    value = gradient.to(reference().orig_dtype)
    for hook in list(hooks.values()):
        result = hook(value)
        value = value if result is None else result
    return value.to(gradient.dtype)
