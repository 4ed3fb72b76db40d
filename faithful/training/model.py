"""One object for each model that the script has prepared: what is known of it, from `prepare` to `free_memory`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from faithful.backends.linear import in_fp8
from faithful.evidence.evidence import Evidence, Layers
from faithful.models import dtypes
from faithful.models.blocks import compile_blocks
from faithful.models.live import Live
from faithful.strategies.base import parameter_ids
from faithful.tensors.names import unwrapped

if TYPE_CHECKING:
    from faithful.accelerator import Accelerator


class PreparedModel:
    """`model` is what `prepare` returned. `layers`: it before its conversion, and `skipped`: [(name, reason)] of Linear
    layers that stay in high precision; both for models with trainable parameters. `evidence` begins with the first
    prepared optimizer that updates the model, and stays None for frozen models. `evaluation`: prepared by
    `prepare_model(model, evaluation_mode=True)`."""

    def __init__(
        self,
        model: nn.Module,
        layers: Layers | None = None,
        skipped: Iterable[tuple[str, str]] = (),
        evaluation: bool = False,
    ) -> None:
        self.model, self.layers, self.skipped, self.evaluation = model, layers, list(skipped), evaluation
        self.optimizers: list[torch.optim.Optimizer] = []
        self.evidence: Evidence | None = None
        self.live: Live | None = None  # with `evidence`
        self.parameters = set(map(id, model.parameters()))
        self.dtypes = dtypes.dtypes_of(model.parameters())

    def is_of(self, model: nn.Module) -> bool:
        return unwrapped(model) is unwrapped(self.model)

    def attach_optimizer(self, accelerator: "Accelerator", optimizer: torch.optim.Optimizer) -> None:
        """Takes note of a prepared optimizer. If it updates this model, backend and strategy may change both."""
        strategy, backend = accelerator.strategy, accelerator.backend
        if optimizer in self.optimizers or not strategy.parameter_ids(optimizer) & self.parameters:
            return
        self.optimizers.append(optimizer)
        if self.evidence:
            backend.another_optimizer(self.model, optimizer)
        elif self.layers:
            dtypes.refuse_cast(accelerator, list(self.model.parameters()), self.dtypes)
            strategy.after_prepare(accelerator, self.model, optimizer)
            self.skipped += backend.after_prepare(accelerator, self.model, optimizer)
            self.parameters = set(map(id, self.model.parameters()))
            self.evidence = Evidence(accelerator, self.model, self.optimizers, self.layers, self.skipped)
            self.live = Live(strategy.held_by_model(accelerator), self.model)


def trains(argument: object) -> TypeGuard[nn.Module]:
    """Whether an argument of `prepare` is a model that is not prepared yet and has trainable parameters."""
    if not isinstance(argument, nn.Module) or getattr(argument, "_is_accelerate_prepared", False):
        return False
    return any(parameter.requires_grad for parameter in argument.parameters())


def convert(
    accelerator: "Accelerator", model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> tuple[Layers, list[tuple[str, str]]]:
    """Converts a model in place as planned. Returns (its Layers before conversion, [(name, reason)] skipped)."""
    plan, strategy, backend = accelerator.plan, accelerator.strategy, accelerator.backend
    of_model = set(map(id, model.parameters()))
    optimizer = next((candidate for candidate in optimizers if parameter_ids(candidate) & of_model), None)
    layers = Layers(backend, model, set().union(*map(parameter_ids, optimizers)))
    strategy.before_prepare(accelerator, model, optimizer)
    skipped = backend.convert(accelerator, model, optimizer)
    if plan.compile:
        compile_blocks(model, in_fp8 if backend.eager_in_eval else None)
    return layers, skipped
