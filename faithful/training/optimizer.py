"""Accelerate's optimizer, which calls its Accelerator before and after each update."""

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import accelerate.utils
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor

from faithful.strategies.base import torch_optimizer
from faithful.training import scaling
from faithful.training.steps import Steps


class Updates(Protocol):
    """What an optimizer calls of its Accelerator."""

    steps: Steps

    def before_update(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None: ...
    def after_update(self, optimizer: torch.optim.Optimizer) -> None: ...
    def is_leading(self, optimizer: torch.optim.Optimizer) -> bool: ...
    def refuse_between_passes(self, clips: bool = False) -> None: ...


@functools.cache
def is_lomo_available() -> bool | None:
    """Accelerate's function, which it calls in each step and which looks for the package each time."""
    return accelerate.utils.is_lomo_available()


def part_of(value: Any, parameter: DTensor) -> Any:
    """A whole tensor of the parameter's shape, sharded as the parameter; anything else as it is."""
    if type(value) is not torch.Tensor or not value.dim() or value.shape != parameter.shape:
        return value
    value = value.to(parameter.device_mesh.device_type)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


class Optimizer(AcceleratedOptimizer):
    accelerator: Updates | None = None  # set by Accelerator.prepare_optimizer

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what a pickle becomes, is of no Accelerator's run: it steps as Accelerate's does."""
        return {name: value for name, value in super().__getstate__().items() if name != "accelerator"}

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if self.accelerator is None or not self.gradient_state.sync_gradients:
            return super().step(closure)
        optimizer = torch_optimizer(self)
        can_step = scaling.can_step(self.scaler, optimizer, closure)
        found_inf = self.accelerator.before_update(self)
        with scaling.alone(self.scaler, optimizer):
            if found_inf is not None:
                self.step_unless(found_inf, closure)
            elif can_step:
                super().step(closure)
            else:
                self._is_overflow = False
        if self.scaler is not None and not math.isfinite(self.accelerator.steps.norm):  # pyrefly: ignore[bad-argument-type]
            self._is_overflow = True  # a fused optimizer skips inside its kernel, where Accelerate can't see it
        self.accelerator.after_update(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. Of a state that was saved whole a sharded weight takes its part."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if "state" in state_dict and any(isinstance(parameter, DTensor) for parameter in parameters):
            saved = [each for group in state_dict["param_groups"] for each in group["params"]]
            states = dict(state_dict["state"])
            for at, parameter in zip(saved, parameters, strict=False):
                if isinstance(parameter, DTensor) and at in states:
                    states[at] = {key: part_of(value, parameter) for key, value in states[at].items()}
            state_dict = state_dict | {"state": states}
        super().load_state_dict(state_dict)

    def step_unless(self, found_inf: torch.Tensor, closure: Callable[[], Any] | None) -> None:
        """A step that changes nothing if `found_inf` is 1, as torch's gradient scaler hands it to fused optimizers."""
        self.optimizer.found_inf = found_inf
        try:
            super().step(closure)
        finally:
            del self.optimizer.found_inf

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Accelerate's inspects the signature in every step, which torch's own `zero_grad` does not need. Gradients
        that are given up, as those of a loss that is not finite, leave no loss to judge the next step by."""
        if self.accelerator is not None and self.gradient_state.sync_gradients and self.accelerator.is_leading(self):
            self.accelerator.steps.losses.clear()
        if self.gradient_state.sync_gradients:
            scaling.forget(self.scaler, [self])
            if self.accelerator is not None:
                self.accelerator.refuse_between_passes()
        if type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            super().zero_grad(set_to_none)
        elif self.gradient_state.sync_gradients:
            self.optimizer.zero_grad(set_to_none is not False)
