"""Counts and hashes the samples of the first optimizer step."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn

from faithful.errors import Refused
from faithful.models.layers import Hook
from faithful.plan import Plan
from faithful.tensors.names import sum_of_sample_hashes, tensors_of


class FirstBatch:
    """Watches the forward passes of a prepared model until `result` is called."""

    def __init__(self, model: nn.Module) -> None:
        self.samples = self.hashes = self.asked = 0
        self.hook = model.register_forward_pre_hook(Hook(self.see), prepend=True, with_kwargs=True)

    def see(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [each for each in tensors_of((args, kwargs)) if each.dim() and each.layout == torch.strided]
        if not tensors or not torch.is_grad_enabled():
            return
        samples = len(tensors[0])
        self.samples += samples
        self.hashes += sum_of_sample_hashes([tensor for tensor in tensors if len(tensor) == samples])

    def result(self, plan: Plan, note: Callable[[str, str], None]) -> tuple[int, str]:
        """(samples per optimizer step, one hash of them all) over all processes, which all call it; (0, ""): ask again.
        Raises Refused if processes that share each layer have computed different batches. note: prints a line."""
        told = gather_object([(self.samples, self.hashes)])
        self.asked += 1
        if self.asked < 3 and not any(samples for samples, _ in told):  # a GAN's other model takes the first step
            return 0, ""
        self.hook.remove()
        self.asked = 3
        seen = told[:: plan.group_size]  # a group computes one batch
        if plan.sp_size == 1 and told != [first for first in seen for _ in range(plan.tp_size)]:
            raise Refused(
                "the processes of tensor parallel compute one batch together, but the script gives each another one: "
                "prepare the loader, divide no data by process_index, and draw noise from one seed"
            )
        if len(seen) > 1 and self.samples and len(set(seen)) == 1:
            line = "all processes have computed the same samples in the first step: prepare the loader, and draw noise "
            note("same", line + "of its own in each")
        return sum(samples for samples, _ in seen), f"{sum(hashes for _, hashes in seen) % 2**256:064x}"
