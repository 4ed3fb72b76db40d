"""The parameters that a script sees under ZeRO.

DeepSpeed trains flat fp32 masters. `.grad` is empty, and under stage 3 so are weights that are not in use. After
`prepare` the model's parameters are of the classes here: a script's `.grad` is the averaged gradient, a released weight
is gathered when the script uses it, and what the script writes is taken over before the update. Both need all
processes, as with FSDP2's shards.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from faithful.errors import Refused
from faithful.launch import rank_sync
from faithful.strategies import guard
from faithful.strategies.deepspeed import engine
from faithful.strategies.deepspeed.engine import Partitioned, Zero

T = torch.Tensor
# pyrefly: ignore[missing-attribute]
SHAPES = {T.shape.__get__, T.ndim.__get__, T.size, T.numel, T.nelement, T.dim, T.__len__, torch.numel}
WITHOUT_VALUES = {  # what may be asked of a released parameter, which is an empty tensor
    *(
        getattr(T, name).__get__
        for name in ("grad", "requires_grad", "is_leaf", "grad_fn", "device", "dtype", "layout")
    ),
    *(getattr(T, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_xpu", "is_quantized")),
    *(getattr(T, name).__get__ for name in ("_backward_hooks", "_post_accumulate_grad_hooks", "_version", "is_nested")),
    *(getattr(T, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")),
    *(T.requires_grad_, T.is_floating_point, T.is_complex, T.element_size, T.get_device, T.register_hook),
    *(torch.is_floating_point, torch.is_complex, T.register_post_accumulate_grad_hook),
}


def asking() -> FrameType | None:
    """The frame of the script, or of a library, that uses a parameter; None if DeepSpeed does, or this package."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    package = "faithful" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]
    return None if package in ("faithful", "deepspeed") else frame


class Seen(nn.Parameter):
    """A parameter of the engine's model. `held`: its Held, in a class that `watch` makes."""

    held: "Held" = None  # pyrefly: ignore[bad-assignment]

    @property
    def grad(self) -> torch.Tensor | None:
        gradient = T.grad.__get__(self)  # pyrefly: ignore[missing-attribute]
        if gradient is None and self.held.begun and self.held.has(self) and (frame := asking()):
            return self.held.gradient(self, frame)
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.held.begun and self.held.has(self) and (frame := asking()):
            self.held.set_gradient(self, value, frame)
        else:
            T.grad.__set__(self, value)  # pyrefly: ignore[missing-attribute]

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """DeepSpeed's hook takes the gradient away, so it stays the last one."""
        handle = super().register_post_accumulate_grad_hook(hook)
        hooks = self._post_accumulate_grad_hooks
        for key in [key for key in hooks if key in self.held.hooks_of_engine]:
            hooks.move_to_end(key)  # pyrefly: ignore[missing-attribute]
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(engine.gathered(self).clone(), self.requires_grad)
        return memo[id(self)]


class Gathered(Seen):
    """A parameter of stage 3 while it is whole. DeepSpeed's `ds_status` makes it a `Released` one, and back.

    released: the other class.
    """

    released: "type[Released]" = None  # pyrefly: ignore[bad-assignment]

    @property
    def ds_status(self) -> Any:
        return self.__dict__["ds_status"]

    @ds_status.setter
    def ds_status(self, status: Any) -> None:
        self.__dict__["ds_status"] = status
        # pyrefly: ignore[bad-argument-type]
        self.__class__ = self.released if status.name == "NOT_AVAILABLE" else self.released.gathered
        if status.name == "AVAILABLE":
            self.gathered_at = self._version


class Released(Gathered):
    # the other class
    gathered: type[Gathered] = None  # pyrefly: ignore[bad-assignment]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        arguments = args, kwargs or {}
        if func not in WITHOUT_VALUES and (frame := asking()):
            if func in SHAPES:
                arguments = _pytree.tree_map_only(Released, of_its_shape, arguments)
            else:
                for parameter in _pytree.tree_leaves(arguments):
                    if isinstance(parameter, Released):
                        parameter.held.lend(parameter, frame)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*arguments[0], **arguments[1])


def of_its_shape(parameter: Partitioned) -> torch.Tensor:
    return torch.empty(parameter.ds_shape, device="meta")


class Held:
    """What the engine holds of a model's parameters, and what the script has done to them since the last update."""

    fragments: engine.Fragments  # set by ZeRO.after_prepare

    def __init__(self, zero: Zero, model: nn.Module) -> None:
        self.zero, parameters = zero, list(model.parameters())
        self.parameters: list[Partitioned] = parameters
        self.owned = {id(parameter) for group in engine.groups(zero) for parameter in group}
        self.begun = self.whole = False  # a backward pass of the step is done; the last one, and gradients are averaged
        reached: set[int] = set()
        self.reached = reached  # ids of the parameters that have a gradient
        self.gradients: dict[int, tuple[Partitioned, torch.Tensor | None]] = {}
        self.lent: dict[int, tuple[Partitioned, bool]] = {}
        self.sites: set[str] = set()
        self.hooks_of_engine = {handle.id for handle in zero._grad_acc_hooks}
        for parameter in self.parameters:
            if self.has(parameter):
                trained = parameter.requires_grad
                parameter.requires_grad_(True)
                # Not of `self`: Python's collector does not see what such hooks hold.
                parameter.register_post_accumulate_grad_hook(lambda parameter: reached.add(id(parameter)))
                parameter.requires_grad_(trained)
        self.watch()

    def watch(self) -> None:
        seen = type("Parameter", (Seen,), {"held": self})
        gathered: Any = type("Parameter", (Gathered,), {"held": self})
        released: Any = type("Parameter", (Released,), {"held": self, "gathered": gathered})
        gathered.released = released.released = released
        for parameter in self.parameters:
            if not hasattr(parameter, "ds_status"):
                parameter.__class__ = seen
                continue
            parameter.__class__ = gathered
            parameter.ds_status = parameter.ds_status
            parameter.partition = functools.partial(released_after, parameter, parameter.partition)

    def has(self, parameter: Partitioned) -> bool:
        """Whether the optimizer updates the parameter."""
        return id(parameter) in self.owned

    def of_all(self, frame: FrameType, what: str) -> None:
        """Raises Refused at the first use in a line of the script if the main process uses the parameter alone."""
        site = f"line {frame.f_lineno} of {frame.f_code.co_filename.replace(':', ' ')}"
        if site not in self.sites and not rank_sync.all_ranks_called(f"{what}/{site}", True):
            raise Refused(
                f"{site} uses {what} on some processes alone, but under ZeRO each holds a part of it: do it on all"
            )
        self.sites.add(site)

    # ---- weights ----

    def lend(self, parameter: Partitioned, frame: FrameType) -> None:
        """Gathers a parameter for the script. It stays whole until the update, for a backward pass may need it, or if
        gradients are off until the next forward pass."""
        self.of_all(frame, "a weight")
        parameter.all_gather()
        self.lent[id(parameter)] = parameter, torch.is_grad_enabled()
        parameter.is_external_param = True  # DeepSpeed does not release those after a module's passes

    def give_back(self, all_of_them: bool = True) -> None:
        """Releases lent parameters, with what was written into them."""
        for key, (parameter, with_gradients) in list(self.lent.items()):
            if all_of_them or not with_gradients:
                parameter.is_external_param = False
                del self.lent[key]
                if parameter.ds_status.name == "AVAILABLE":
                    engine.write_shards([parameter])
                    if not parameter.ds_persist:
                        parameter.partition()

    def take_weights(self) -> None:
        """Makes the masters what the script sees, see `engine.take_weights`."""
        if engine.stage(self.zero) == 3:
            engine.write_shards([p for p in self.parameters if p.ds_status.name == "AVAILABLE"])
        engine.take_weights(self.zero)

    # ---- gradients ----

    def before_backward(self) -> None:
        """What the script has written to `.grad` goes into the engine's gradients, to which this pass adds."""
        if self.gradients:
            guard.refuse_gradients_in_two_places(engine.offloads_gradients(self.zero))
        self.take_gradients()
        self.gradients.clear()

    def drop_gradients(self) -> None:
        """Gives up the gradients since the last update."""
        if self.begun:
            engine.drop_gradients(self.zero)
            self.updated()

    def after_backward(self, whole: bool) -> None:
        """whole: whether this was the step's last backward pass. Those of stage 3 without a gradient still hold the one
        of an earlier step."""
        if not self.begun and engine.stage(self.zero) == 3:
            for parameter in self.parameters:
                if self.has(parameter) and id(parameter) not in self.reached and parameter.requires_grad:
                    engine.set_gradient(self.zero, parameter, None)
        self.begun, self.whole = True, whole

    def gradient(self, parameter: Partitioned, frame: FrameType) -> torch.Tensor | None:
        """The averaged gradient in fp32, whole; None if there is none."""
        self.need_whole()
        if id(parameter) not in self.gradients:
            if id(parameter) not in self.reached:
                return None
            self.of_all(frame, "a gradient")
            self.gradients[id(parameter)] = parameter, engine.whole_gradient(self.zero, parameter)
        return self.gradients[id(parameter)][1]

    def set_gradient(self, parameter: Partitioned, value: torch.Tensor | None, frame: FrameType) -> None:
        self.need_whole()
        self.gradients[id(parameter)] = parameter, value

    def need_whole(self) -> None:
        if not self.whole:
            raise Refused(
                "the script uses .grad between the micro-batches of a step, but under ZeRO gradients are not averaged "
                "yet: use it if accelerator.sync_gradients, or use a ddp config"
            )

    def take_gradients(self) -> None:
        """Gives the engine the gradients that the script may have changed."""
        for key, (parameter, gradient) in self.gradients.items():
            engine.set_gradient(self.zero, parameter, gradient)
            self.reached.discard(key) if gradient is None else self.reached.add(key)

    def updated(self) -> None:
        """Called after each update."""
        self.begun = self.whole = False
        self.gradients.clear()
        self.reached.clear()


def released_after(
    parameter: Partitioned,
    partition: Callable[..., None],
    param_list: list[Partitioned] | None = None,
    hierarchy: int = 0,
    has_been_updated: bool = False,
    free_data: bool = True,
) -> None:
    """DeepSpeed's `partition`, which frees gathered parameters. What was written into them goes into the shards before.
    Shards in the host's memory are copied only if the parameter's version has changed, which `.data` does not do."""
    for each in [parameter] if param_list is None else param_list:
        whole = each.ds_status.name == "AVAILABLE" and not has_been_updated
        if whole and (each.ds_tensor.device == each.device or each._version != each.gathered_at):
            engine.write_shards([each])
    partition(param_list, hierarchy, has_been_updated, free_data)
