"""What a run asks of its backend, with the answers of one that converts nothing."""

import abc
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from accelerate.utils import GradScalerKwargs

    from faithful.plan import Plan
    from faithful.strategies.base import Saved, Strategy


class Backend(abc.ABC):
    """What computes a model's matrix products, and in which precision. A subclass overrides what differs. If it keeps
    gradients outside `.grad`, it is a GradientsElsewhere (strategies/base.py) too.

    The methods stand in the order in which a run calls them.
    """

    kinds: dict[str, tuple[int, int]] = {}  # {"package.Class": (number of Linear, of LayerNorm in it)} of layers in FP8
    eager_in_eval = False  # whether compiled blocks must not be used outside FP8 (linear.in_fp8)
    codes = False  # whether weights are codes, so that the full weights must be computed from them
    in_parts = False  # whether each process holds a part of the model, whatever the strategy
    any_number_of_processes = False  # whether all processes have the same state of their own, or none

    def __init__(self, plan: "Plan") -> None:
        self.plan = plan

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The backend's name in the summary line."""

    @property
    def eval_precision(self) -> str:
        """The precision of an evaluation."""
        return "bf16" if self.plan.precision == "fp8" else self.plan.precision

    def arguments(self) -> dict[str, Any]:
        """Arguments that the plan adds to `Accelerator(...)`."""
        return {}

    def started(self, scaling: "GradScalerKwargs | None") -> torch.amp.GradScaler | None:
        """Called when Accelerate has started. Returns a gradient scaler, if Accelerate has none and the backend needs
        one. scaling: the script's options of it."""

    def convert(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[tuple[str, str]]:
        """Called before `accelerator.prepare`, to convert layers in place. optimizer: the model's, or None if it comes
        later. Returns [(name, reason)] of the Linear layers not converted."""
        return []

    def after_prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, prepared: set[int]
    ) -> list[tuple[str, str]]:
        """Called with the prepared model and optimizer, to change them. Returns more [(name, reason)] of layers not
        converted. prepared: the ids of the parameters of all prepared models."""
        return []

    def another_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Called for a further optimizer of the same model. Raises Refused if the backend does not support it."""

    def after_backward(self, model: nn.Module) -> None:
        """Called after the backward pass of each micro-batch."""

    def gradients(self, parameters: dict[str, nn.Parameter]) -> list[torch.Tensor]:
        """Gradient tensors that are kept outside `.grad`."""
        return []

    def levels(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """amp8's report of dtypes and bytes, or None."""
        return None

    def tensors(
        self, strategy: "Strategy", model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> dict[str, torch.Tensor]:
        """Model and optimizer state for a checkpoint: {name: what this process holds}, live."""
        return strategy.tensors(model, optimizer)

    def restore(
        self, strategy: "Strategy", model: nn.Module, optimizer: torch.optim.Optimizer | None, parts: "Saved"
    ) -> None:
        """Loads the result of `tensors`, bit for bit."""
        strategy.restore(model, optimizer, parts)
