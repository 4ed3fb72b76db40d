"""The weight of a converted layer, as other code sees it: a parameter that returns values instead of codes.

Code that knows nothing of amp8 reads parameters, for an average of weights, a norm or a histogram, or to compute a loss
from them without calling their layer. It gets the true values, and their gradient is the layer's.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from .linear import FP8Linear

# Methods and properties that describe a tensor and do not read its values.
ABOUT = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "data_ptr",
    "untyped_storage", "is_contiguous", "is_floating_point", "is_complex", "is_pinned", "is_shared", "get_device",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "__hash__", "__len__", "is_same_size",
    "has_names", "retain_grad",
}  # fmt: skip
VIEWS = {"T", "H", "mT", "mH", "real", "imag"}  # properties that are values
ALIASES = {"data", "detach", "alias"}  # the same memory under another name
# Functions that set values, or some of them, whatever they were. Arithmetic (mul_, add_) is refused, because a change
# below half of a code's last bit would be lost in silence.
SETTERS = {
    "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_",
    "clamp_", "clamp_min_", "clamp_max_", "clip_", "__setitem__", "masked_fill_", "index_fill_", "index_copy_",
    "fill_diagonal_", "constant_", "ones_", "zeros_", "eye_", "sparse_", "trunc_normal_", "orthogonal_",
    "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
}  # fmt: skip
INPLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__"}
# Functions and properties whose results share the weight's memory.
PIECES = {
    "view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "t", "transpose", "permute", "__getitem__", "T",
    "mT", "narrow", "select", "unbind", "split", "chunk", "squeeze", "unsqueeze", "diagonal", "unflatten", "expand",
}  # fmt: skip


class CodesRead(RuntimeError):
    exit_code = 2  # a user's mistake; the message says what to do


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that torch.func has wrapped, or the tensor itself."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def refuse_transformed(name: str, *tensors: torch.Tensor) -> None:
    """Raises CodesRead in a transform of torch.func (grad, vmap, jvp), which takes codes for values, and for which FP8
    products have no rule. tensors: what a layer computes with."""
    if torch.compiler.is_compiling() or not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        return
    raise CodesRead(
        f"{name} is called inside torch.func (grad, vmap, jvp), which has no rule for FP8: give functional_call "
        "clones of the values, {k: v.detach().clone()}, leave the layer out (skip), or use a bf16 config"
    )


def refuse_a_derivative() -> None:
    """Called in the backward pass of FP8 products. Rounding has the derivative zero, so that of a gradient would be
    nothing like the unrounded one's."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise CodesRead(
            "a gradient of FP8 products has no derivative (create_graph=True, a gradient penalty or a Hessian): leave "
            "the layers out that it goes through (skip), or use a bf16 config"
        )


class CodedWeight(nn.Parameter):
    """A Parameter of codes, [out, in], fp16 or e4m3. `amp8_linear`: its layer, which has the scale."""

    amp8_linear: "FP8Linear"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            name = func.__self__.__name__
            setting = func.__name__ != "__get__"
            raw = name not in VIEWS and not (setting and name == "data")
        else:
            setting, raw = False, name in ABOUT
        if func is torch.autograd.grad:
            raise CodesRead(
                "torch.autograd.grad asks for the gradient of a converted weight, which is FP8 and kept in its layer: "
                "call loss.backward() and use .grad, or leave the layer out (skip)"
            )
        if name == "grad" and is_parameter(args[0]):
            gradient = args[0].amp8_linear.gradient
            return gradient.replace(args[1] if len(args) > 1 else None) if setting else gradient.grad()
        if name == "dtype":
            return args[0].amp8_linear.plain_dtype
        if raw and name not in ALIASES:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
                if name.startswith("requires_grad") and is_parameter(args[0]):
                    args[0].amp8_linear.train_weight(args[0].requires_grad)
                return result
        # Functions of nn.init pass `tensor` by name.
        first: Any = args[0] if args else next(iter(kwargs.values()), None)
        if name in ALIASES and not setting:
            return alias_of(first)
        changed = first if isinstance(first, list | tuple) else [first, *tree_leaves(kwargs.get("out"))]
        if setting or (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or "out" in kwargs:
            coded = [one for one in changed if isinstance(one, cls)]
            if coded and name == "copy_":
                return overwrite(first, args[1])
            if coded and name in SETTERS and first is coded[0]:
                return changed_by(first, func, args, kwargs)
            if coded:
                raise CodesRead(refusal(where(coded[0]), name))
        args, kwargs = tree_map(value_of, (args, kwargs))
        result = func(*args, **kwargs)
        if name in PIECES:  # in torch they share the weight's memory
            return tree_map(lambda x: piece(x, where(first)) if isinstance(x, torch.Tensor) else x, result)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(alias_of(self).amp8_linear.true_weight(), self.requires_grad)
        return copied

    def __reduce_ex__(self, proto: Any) -> tuple[Any, ...]:
        return nn.Parameter(alias_of(self).amp8_linear.true_weight(), self.requires_grad).__reduce_ex__(proto)

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]
        return f"{where(self)}: MS-AMP's codes for {value_of(alias_of(self))}"


class Piece(torch.Tensor):
    """A view of a converted weight's values. It is a copy, so it refuses changes: they would not reach the weight."""

    amp8_name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else None
        changes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in INPLACE
        if changes and isinstance(first, cls) and not name.startswith("requires_grad"):
            raise CodesRead(refusal(f"a view of {first.amp8_name}", name))
        name = func.__self__.__name__ if name == "__get__" else name
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map(lambda x: x.as_subclass(torch.Tensor) if isinstance(x, cls) else x, (args, kwargs))
            result = func(*args, **kwargs)
        if isinstance(first, cls) and (name in PIECES or name in ALIASES):
            return tree_map(lambda x: piece(x, first.amp8_name) if isinstance(x, torch.Tensor) else x, result)
        return result


def piece(values: torch.Tensor, name: str) -> Piece:
    made = values.as_subclass(Piece)
    made.amp8_name = name
    return made


def refusal(what: str, name: str) -> str:
    return (
        f"{what} holds MS-AMP's codes: it can't be changed by {name}. Set values with copy_ or load_state_dict, or "
        "leave the layer out (skip)"
    )


def is_parameter(weight: CodedWeight) -> bool:
    """Whether this is the layer's parameter, and not an alias of it as `.data` is."""
    return weight is weight.amp8_linear.own


def changed_by(
    weight: CodedWeight, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CodedWeight:
    """A function that sets values, on the weight's true values, which are then the weight's."""
    own = getattr(function, "__module__", None) == "torch.nn.init"  # they turn autograd off themselves
    if torch.is_grad_enabled() and not own and is_parameter(weight) and weight.requires_grad:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation")
    with torch.no_grad():
        value = weight.amp8_linear.true_weight()
        args, kwargs = tree_map(lambda x: value if x is weight else value_of(x), (args, kwargs))
        function(*args, **kwargs)
    return overwrite(weight, value)


def codes_of(weight: torch.Tensor) -> torch.Tensor:
    """The tensor of codes itself."""
    with torch._C.DisableTorchFunctionSubclass():
        return weight.data


def alias_of(weight: CodedWeight) -> CodedWeight:
    alias = torch.Tensor._make_subclass(CodedWeight, codes_of(weight), False)
    alias.amp8_linear = weight.amp8_linear
    return alias


def value_of(x: Any) -> Any:
    if type(x) is not CodedWeight:
        return x
    layer = x.amp8_linear
    value = layer.true_weight(layer.plain_dtype)
    if x.requires_grad and torch.is_grad_enabled():
        value = value + layer.port_for(layer.plain_dtype)  # zeros, which receive the gradient
    return value


def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """torch.autograd.Function.apply, which asks no __torch_function__: the forward pass, perhaps a kernel that takes
    the address of memory, would get codes, and the gradient would reach the parameter, where nobody looks."""
    if CodedWeight in map(type, (*args, *kwargs.values())):  # not isinstance: every function comes by here
        args, kwargs = tuple(map(value_of, args)), {key: value_of(value) for key, value in kwargs.items()}
    return PLAIN_APPLY.__get__(None, function)(*args, **kwargs)


PLAIN_APPLY = torch.autograd.Function.__dict__["apply"]
torch.autograd.Function.apply = classmethod(apply)  # pyrefly: ignore[bad-assignment]


def overwrite(weight: CodedWeight, value: torch.Tensor) -> CodedWeight:
    """`weight.copy_(value)`: as load_state_dict does it. Under O3 every rank must call it, with the same value."""
    weight.amp8_linear.replace(value_of(value))
    return weight


def where(weight: CodedWeight) -> str:
    return f"{weight.amp8_linear.name}.weight".lstrip(".")
