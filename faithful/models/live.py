"""What a script sees of its model is what trains.

In plain torch the optimizer updates the parameters that a script sees. So whatever a script writes has its effect: the
values of parameters, `.grad`, `requires_grad`, hooks, `training`, the dtype; before `prepare`, in a forward pass,
between backward and step, between steps. Strategies and backends that update other tensors (shards, masters, codes)
have to keep them in step with the model. This module says when, `Strategy` says how;
tests/models/test_live.py has the table.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from faithful.models import dtypes
from faithful.models.layers import Hook

if TYPE_CHECKING:
    from faithful.strategies.base import Strategy


class Live:
    """One prepared model that is trained, as its script sees it. model: what `prepare` returned. note: prints and keeps
    a line."""

    def __init__(self, strategy: "Strategy", model: nn.Module, note: Callable[[str], None]) -> None:
        self.strategy, self.model, self.note = strategy, model, note
        self.parameters = list(nn.Module.parameters(model))
        self.trainable = self.requires_grad()
        self.dtypes: list[torch.dtype] = []
        self.takes_part(self.parameters)
        model.register_forward_pre_hook(Hook(self.before_forward), prepend=True)

    def requires_grad(self) -> list[bool]:
        with torch._C.DisableTorchFunctionSubclass():  # a weight of MS-AMP's levels would run Python for it
            return [parameter.requires_grad for parameter in self.parameters]

    def takes_part(self, parameters: list[nn.Parameter]) -> None:
        """Some parameters are trained from now on."""
        if line := dtypes.thawed(self.strategy, self.model, parameters):
            self.note(line)
        self.dtypes = dtypes.dtypes_of(self.parameters)

    def before_forward(self, *_: object) -> None:
        """Before a forward pass: the script may have frozen parameters, or thawed them, or changed their dtype."""
        if not torch.is_grad_enabled():
            return
        if self.model.training:
            self.refuse_cast()
        if (now := self.requires_grad()) != self.trainable:
            before, self.trainable = self.trainable, now
            self.takes_part([p for p, was in zip(self.parameters, before, strict=True) if p.requires_grad and not was])
            self.strategy.requires_grad_changed(self.model)

    def refuse_cast(self) -> None:
        self.dtypes = dtypes.refuse_cast(self.strategy, self.parameters, self.dtypes)

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an update: the script may have written to parameters and gradients."""
        self.refuse_cast()
        self.strategy.take_written(self.model, optimizer)
