"""What `.grad` of a converted weight is: a tensor that reads and changes the values of the FP8 gradient."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from . import scaling

if TYPE_CHECKING:
    from .gradients import WeightGradient

aten = torch.ops.aten


class FP8Gradient(torch.Tensor):
    """The gradient of a converted weight as a tensor, fp32 [the weight's shape, or under fully_shard this rank's rows],
    without values of its own.

    A function that only reads it gets the decoded values. One that changes it, or returns a view of it, gets the
    gradient in fp32, 4 bytes per parameter, which is rounded to FP8 again at the step.
    """

    def __new__(cls, gradient: "WeightGradient", shape: torch.Size) -> "FP8Gradient":
        device = gradient.linear.weight.device
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)

    def __init__(self, gradient: "WeightGradient", shape: torch.Size) -> None:
        self.amp8_gradient = gradient

    def __repr__(self, **_: object) -> str:
        return f"FP8Gradient({self.amp8_gradient.grad_in_fp32(False)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, proto: Any) -> tuple[Any, ...]:
        return self.clone().__reduce_ex__(proto)

    @classmethod
    # pyrefly: ignore[bad-override]
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if function is aten.zero_.default and isinstance(first, cls):
            first.amp8_gradient.zero()
            return first
        schema = function._schema
        shared = schema.is_mutable or any(one.alias_info is not None for one in schema.returns)

        def value_of(x: Any) -> Any:
            return x.amp8_gradient.grad_in_fp32(shared) if isinstance(x, cls) else x

        result = function(*tree_map(value_of, args), **tree_map(value_of, kwargs or {}))
        return first if schema.is_mutable and isinstance(first, cls) else result


class GradSnapshot(NamedTuple):
    """What a gradient was when somebody got a view of it in fp32: its magnitude, a bound that is the same on all ranks,
    and its scale. While the magnitude is the same the other two are still right, so that a view which nobody has
    written to changes nothing in the step."""

    amax: torch.Tensor
    bound: torch.Tensor | None  # of a mean of rows
    scale: torch.Tensor

    @classmethod
    def of(cls, value: torch.Tensor, bound: torch.Tensor | None, scale: torch.Tensor) -> "GradSnapshot":
        return cls(scaling.amax(value), bound, scale)

    def bound_of(self, value: torch.Tensor) -> torch.Tensor:
        amax = scaling.amax(value)
        return torch.where(amax == self.amax, self.bound, amax)  # pyrefly: ignore[no-matching-overload]

    def rounded(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(e4m3 codes, scale)"""
        amax = scaling.amax(value)
        scale = torch.where(amax == self.amax, self.scale, scaling.gradient_scale(amax))
        return scaling.quantize(value, scale, scaling.E4M3), scale
