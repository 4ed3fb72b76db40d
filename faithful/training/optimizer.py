"""Accelerate's optimizer, which calls its Accelerator before and after each update."""

import functools
import math

import accelerate.utils
import torch
from accelerate.optimizer import AcceleratedOptimizer


@functools.cache
def is_lomo_available():
    """Accelerate's function, which it calls in each step and which looks for the package each time."""
    return accelerate.utils.is_lomo_available()


class Optimizer(AcceleratedOptimizer):
    accelerator = None  # set by Accelerator.prepare_optimizer

    def __getstate__(self):
        """A copy, or what a pickle becomes, is of no Accelerator's run: it steps as Accelerate's does."""
        return {name: value for name, value in super().__getstate__().items() if name != "accelerator"}

    def step(self, closure=None):
        if self.accelerator is None or not self.gradient_state.sync_gradients:
            return super().step(closure)
        self.accelerator.before_update(self)
        super().step(closure)
        if self.scaler is not None and not math.isfinite(self.accelerator.steps.norm):
            self._is_overflow = True  # a fused optimizer skips inside its kernel, where Accelerate can't see it
        self.accelerator.after_update(self)

    def zero_grad(self, set_to_none=None):
        """Accelerate's inspects the signature in every step, which torch's own `zero_grad` does not need."""
        if type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            super().zero_grad(set_to_none)
        elif self.gradient_state.sync_gradients:
            self.optimizer.zero_grad(set_to_none is not False)
