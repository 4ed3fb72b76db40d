"""The parameters that a script sees under ZeRO.

DeepSpeed trains flat fp32 masters. After a backward pass `.grad` is empty, and under stage 3 so are weights that are
not in use. A script that used them would use nothing without a word, so this raises (guard.py). What it writes into
weights is taken over before the update.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from faithful import patches
from faithful.strategies import guard
from faithful.strategies.deepspeed import engine
from faithful.strategies.deepspeed.engine import Partitioned, Zero

ROW = "torch.nn.Parameter.grad, register_post_accumulate_grad_hook, ds_status"
T = torch.Tensor
GRAD: Any = T.grad
DATA: Any = T.data  # pyrefly: ignore[missing-attribute]
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
    *(torch.is_floating_point, torch.is_complex, T.register_post_accumulate_grad_hook, DATA.__set__),
}


class Released(nn.Parameter):
    """A parameter of stage 3 while it is empty."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        arguments = args, kwargs or {}
        if func not in WITHOUT_VALUES and any(held_of(leaf) for leaf in _pytree.tree_leaves(arguments)):
            if func is torch.autograd.grad:
                raise guard.not_averaged()
            if func not in SHAPES:
                guard.refuse_released()
            arguments = _pytree.tree_map_only(Released, of_its_shape, arguments)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*arguments[0], **arguments[1])


def of_its_shape(parameter: Partitioned) -> torch.Tensor:
    return torch.empty(parameter.ds_shape, device="meta")


def held_of(parameter: object) -> "Held | None":
    """What an engine holds of a parameter that the script uses: not the engine itself, and no hook of a pass."""
    reference = vars(parameter).get("ds_held") if isinstance(parameter, nn.Parameter) else None
    held = reference() if reference else None
    return None if held is None or held.at_work or torch._C._current_graph_task_id() != -1 else held


def gradient_elsewhere(parameter: nn.Parameter) -> "Held | None":
    held = held_of(parameter)
    return held if held and held.begun and held.has(parameter) else None


def get_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    if gradient_elsewhere(parameter):
        guard.refuse_gradient("reads")
    return GRAD.__get__(parameter)


def set_grad(parameter: nn.Parameter, value: torch.Tensor | None) -> None:
    if (held := gradient_elsewhere(parameter)) is None:
        GRAD.__set__(parameter, value)
    elif value is None:
        held.drop_gradient(parameter)
    else:
        guard.refuse_gradient("sets")


def register_hook_before(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """register_post_accumulate_grad_hook. DeepSpeed's hooks take the gradient away, so they stay the last."""
    handle = T.register_post_accumulate_grad_hook(parameter, hook)
    held, hooks = held_of(parameter), parameter._post_accumulate_grad_hooks
    for key in [key for key in hooks if held and key in held.hooks_of_engine]:
        hooks.move_to_end(key)  # pyrefly: ignore[missing-attribute]
    return handle


def get_status(parameter: Partitioned) -> Any:
    try:
        return vars(parameter)["ds_status"]
    except KeyError:
        raise AttributeError("ds_status") from None


def set_status(parameter: Partitioned, status: Any) -> None:
    """DeepSpeed releases a parameter, or has gathered it."""
    vars(parameter)["ds_status"] = status
    if "ds_held" in vars(parameter) and type(parameter) in (nn.Parameter, Released):  # no class of a package's own
        parameter.__class__ = Released if status.name == "NOT_AVAILABLE" else nn.Parameter
        if status.name == "AVAILABLE":
            parameter.gathered_at = parameter._version


def watch_parameters() -> None:
    """Makes the parameters of all engines raise where a script uses what is not there, until the run ends."""
    if "grad" in vars(nn.Parameter):
        return
    ours = {"grad": property(get_grad, set_grad, lambda self: set_grad(self, None)),
            "register_post_accumulate_grad_hook": register_hook_before,
            "ds_status": property(get_status, set_status)}  # fmt: skip
    for name, value in ours.items():
        setattr(nn.Parameter, name, value)
        patches.undo_with(ROW, lambda name=name: delattr(nn.Parameter, name))


class Held:
    """What the engine holds of a model's parameters, and what the script has done to them since the last update."""

    fragments: engine.Fragments  # set by ZeRO.after_prepare

    def __init__(self, zero: Zero, model: nn.Module) -> None:
        self.zero, parameters = zero, list(model.parameters())
        self.parameters: list[Partitioned] = parameters
        self.owned = {id(parameter) for group in engine.groups(zero) for parameter in group}
        self.begun = self.whole = False  # a backward pass of the step is done; the last one, and gradients are averaged
        self.given_up = True  # no backward pass has begun, or zero_grad has set all gradients to None
        self.at_work = False  # the engine uses its parameters itself
        self.hooks_of_engine = {handle.id for handle in zero._grad_acc_hooks}
        self.reached: set[int] = set()  # ids of the parameters that have a gradient
        # Below stage 3: each parameter's part of a flat tensor, from which `parameter.data = ...` leads it away.
        self.places = [(p, p.data) for p in parameters if self.has(p) and engine.stage(zero) < 3]
        self.watch()

    def watch(self) -> None:
        watch_parameters()
        reached = self.reached
        for parameter in self.parameters:
            if self.has(parameter):
                trained = parameter.requires_grad
                parameter.requires_grad_(True)
                # Not of `self`: Python's collector does not see what such hooks hold.
                parameter.register_post_accumulate_grad_hook(lambda parameter: reached.add(id(parameter)))
                parameter.requires_grad_(trained)
            # With `_hp_grad` DeepSpeed's safe_get_full_grad asks this function, and does not look at `.grad`.
            parameter._hp_grad = True
            parameter.get_full_hp_grad = functools.partial(gradient, weakref.ref(parameter))
            parameter.ds_held = weakref.ref(self)
            if hasattr(parameter, "ds_status"):
                parameter.ds_status = parameter.ds_status
                parameter.partition = functools.partial(released_after, parameter, parameter.partition)

    def has(self, parameter: Partitioned) -> bool:
        """Whether the optimizer updates the parameter."""
        return id(parameter) in self.owned

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """The engine's own use of its parameters."""
        before, self.at_work = self.at_work, True
        try:
            yield
        finally:
            self.at_work = before

    def take_weights(self) -> None:
        """Makes the masters what the script sees, see `engine.take_weights`."""
        if engine.stage(self.zero) == 3:
            engine.write_shards([p for p in self.parameters if p.ds_status.name == "AVAILABLE"])
        for parameter, place in self.places:
            if parameter.data_ptr() != place.data_ptr():
                place.copy_(parameter.data)
                parameter.data = place
        engine.take_weights(self.zero)

    # ---- gradients ----

    def drop_gradient(self, parameter: Partitioned) -> None:
        guard.refuse_between_passes(self.whole)
        engine.drop_gradient(self.zero, parameter)
        self.reached.discard(id(parameter))

    def drop_gradients(self, set_to_none: bool = True) -> None:
        """Gives up the gradients since the last update."""
        if self.begun:
            with self.working():
                engine.drop_gradients(self.zero)
            self.updated()
        self.given_up = set_to_none

    def nothing_to_update(self) -> bool:
        """Whether no parameter has a gradient, so that torch's step changes nothing."""
        if not self.begun and not self.given_up:
            guard.refuse_step()
        return not self.begun

    def after_backward(self, whole: bool) -> None:
        """whole: whether this was the step's last backward pass. Those of stage 3 without a gradient still hold the one
        of an earlier step."""
        if not self.begun and engine.stage(self.zero) == 3:
            for parameter in self.parameters:
                if self.has(parameter) and id(parameter) not in self.reached and parameter.requires_grad:
                    engine.drop_gradient(self.zero, parameter)
        self.begun, self.whole = True, whole

    def updated(self) -> None:
        """Called after each update."""
        self.begun = self.whole = self.given_up = False
        self.reached.clear()


def gradient(reference: "weakref.ref[Partitioned]") -> torch.Tensor | None:
    """The averaged gradient of a parameter in fp32, whole; None if there is none. Every process calls it."""
    parameter: Partitioned = reference()
    held = parameter.ds_held()
    if id(parameter) not in held.reached:
        return None
    guard.refuse_between_passes(held.whole)
    return engine.whole_gradient(held.zero, parameter)


def released_after(
    parameter: Partitioned,
    partition: Callable[..., None],
    param_list: list[Partitioned] | None = None,
    hierarchy: int = 0,
    has_been_updated: bool = False,
    free_data: bool = True,
) -> None:
    """DeepSpeed's `partition`, which frees gathered parameters. What was written into them goes into the shards before.
    Shards in the host's memory are copied only if the parameter's version has changed, which `.data` does not do, or is
    not known: torch keeps a parameter of another class of tensor as it is."""
    for each in [parameter] if param_list is None else param_list:
        whole = each.ds_status.name == "AVAILABLE" and not has_been_updated
        if whole and (each.ds_tensor.device == each.device or each._version != vars(each).get("gathered_at")):
            engine.write_shards([each])
    partition(param_list, hierarchy, has_been_updated, free_data)
