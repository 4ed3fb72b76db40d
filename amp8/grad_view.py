"""What `.grad` of a converted weight is: a tensor that reads and changes the values of the FP8 gradient."""

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from .gradients import WeightGradient

aten = torch.ops.aten


class FP8Gradient(torch.Tensor):
    """The gradient of a converted weight as a tensor, fp32 [the weight's shape, or under fully_shard this rank's rows],
    without values of its own.

    A function that only reads it gets the decoded values. One that may change it, or returns a view of it, gets a copy
    in fp32 that stays until the step, 4 bytes per parameter. If somebody has changed the copy, it is the gradient.
    """

    def __new__(cls, gradient: "WeightGradient", shape: torch.Size) -> "FP8Gradient":
        device = gradient.linear.weight.device
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)

    def __init__(self, gradient: "WeightGradient", shape: torch.Size) -> None:
        self.amp8_gradient = gradient

    # torch would exchange the memory of this tensor, which has none.
    @property
    def data(self) -> torch.Tensor:  # pyrefly: ignore[bad-override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.copy_(value)

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
        shared = shared or function.namespace == "c10d"  # collectives change tensors without saying so

        def value_of(x: Any) -> Any:
            return x.amp8_gradient.grad_in_fp32(shared) if isinstance(x, cls) else x

        result = function(*tree_map(value_of, args), **tree_map(value_of, kwargs or {}))
        return first if schema.is_mutable and isinstance(first, cls) else result
