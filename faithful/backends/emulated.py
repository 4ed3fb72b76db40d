"""The numerics of torchao and of TransformerEngine in software (amp8/emulate.py), for a rehearsal on a CPU.

An EmulatedLinear knows itself when it computes without FP8, by the rule of linear.in_fp8.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from faithful.backends.base import Backend
from faithful.backends.linear import import_amp8, in_bf16, linears_to_convert, skipped_linears

if TYPE_CHECKING:
    from faithful.accelerator import Accelerator

PACKAGES: dict[str | None, str] = {"ao": "torchao", "te": "TransformerEngine"}


class Emulated(Backend):
    kinds = {"amp8.EmulatedLinear": (1, 0)}
    any_number_of_processes = True  # delayed scaling has the largest values of all of them

    @property
    def name(self) -> str:
        return f"{PACKAGES[self.plan.backend]} {self.plan.level}"

    @property
    def eager_in_eval(self) -> bool:  # pyrefly: ignore[bad-override]
        return self.plan.backend == "ao"

    def arguments(self) -> dict[str, Any]:
        return in_bf16()

    def convert(
        self, accelerator: "Accelerator", model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> list[tuple[str, str]]:
        plan = self.plan
        skipped = skipped_linears(model, plan.skip)
        names = linears_to_convert(model, skipped)
        if names:
            options = plan.fp8_options if plan.backend == "te" else {}
            import_amp8("amp8.emulate").convert(model, plan.level, lambda module, name: name in names, **options)
            # Each rank records its own amaxes. DDP would overwrite them with rank 0's before they are reduced.
            # pyrefly: ignore[bad-argument-type]
            model._ddp_params_and_buffers_to_ignore = [name for name, _ in model.named_buffers() if ".fp8_" in name]
        return skipped

    def after_backward(self, model: nn.Module) -> None:
        if self.plan.level == "delayed":  # TransformerEngine updates its scales after every micro-batch
            import_amp8("amp8.emulate").update_scales(model)
