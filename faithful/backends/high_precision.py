"""fp32, bf16 and fp16, by torch and Accelerate."""

from typing import TYPE_CHECKING

import torch

from faithful import patches
from faithful.backends.base import Backend
from faithful.launch import machine

if TYPE_CHECKING:
    from accelerate.utils import GradScalerKwargs

    from faithful.plan import Plan


class Torch(Backend):
    any_number_of_processes = True

    def __init__(self, plan: "Plan") -> None:
        super().__init__(plan)
        self.tf32_before = machine.in_tf32()  # as the script has set it: Accelerate may change it

    @property
    def name(self) -> str:
        plan = self.plan
        if plan.precision == "fp32" and plan.device == "cuda":
            uses = machine.in_tf32()
            return f"fp32 (TF32 in {' and '.join(uses)})" if uses else "fp32 (IEEE, no TF32)"
        return {"fp32": "fp32", "bf16": "bf16 compute", "fp16": "fp16 compute, gradient scaler"}[plan.precision]

    def started(self, scaling: "GradScalerKwargs | None") -> torch.amp.GradScaler | None:
        """In fp32 products and convolutions both use TF32 if the script has switched it on for products, or neither.
        torch's default is TF32 in convolutions alone."""
        if self.plan.precision == "fp32" and self.plan.device == "cuda":
            products, convolutions = ("products" in self.tf32_before, "convolutions" in self.tf32_before)
            patches.undo_with("TF32 in torch.backends", lambda: machine.use_tf32(products, convolutions))
            machine.use_tf32(products, products)


class FP16OnCPU(Torch):
    """fp16 on a CPU, which torch supports. Accelerate would train in fp32 there."""

    def started(self, scaling: "GradScalerKwargs | None") -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", **(scaling.to_kwargs() if scaling else {}))
