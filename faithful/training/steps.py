"""The steps of a run: checks that they are finite, asks whether any process was told to stop, and measures their time.

All processes see the same gradient norm, that of the mean gradients, and stop at the same step. They exchange losses,
the norm and requests to stop before an update, every AGREE_SECONDS or every step, whichever is longer: with steps of
8 ms, an exchange in each of them would take a tenth of the time. All processes update together, but how many backward
passes they have had is their own.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from faithful.errors import Diverged, Refused
from faithful.launch import process

AGREE_SECONDS = 0.1
WARMUP_STEPS = 3  # not timed: they allocate, compile and count
SAME_NORM = 1 + 1e-5  # largest ratio of equal norms: machines may sum in a different order
SMALLEST_SCALE = 2**-14  # of a gradient scaler; below it, a smaller scale does not cure an overflow


class Passes:
    """A hook of each prepared model that trains, before its forward pass, where strategies exchange in passes: counts
    those with gradients. A method of the Accelerator would keep it alive with the model."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += torch.is_grad_enabled()


class Steps:
    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self.taken = self.tried = 0  # optimizer steps; tried includes those that a gradient scaler skipped
        self.losses: list[torch.Tensor] = []  # of each backward pass since the last step
        self.norm: float | None = None
        self.loss: float | None = None
        self.device: torch.device | None = None  # of the losses
        self.divided = True  # whether Accelerate divides the losses by their number; else their sum is the step's
        self.loss_is_of_all = False  # whether `loss` is the mean over all processes
        self.times: list[float] = []
        self.excluded = 0
        self.clock: float | None = None
        self.stopping = False
        self.told: torch.Tensor | None = None  # whether any rank was told to stop, as asked last in an evaluation
        self.checked = 0  # updates of all optimizers; taken and tried count the first one's
        self.next_exchange = 0  # the value of `checked` from which the processes exchange again
        self.last_exchange = (time.perf_counter(), 0)  # when, and `checked` at that time

    def backward(self, loss: torch.Tensor, divided: bool = True) -> None:
        """Called before each backward pass. divided: whether Accelerate divides the loss afterwards. transformers'
        Trainer and other scripts do so themselves."""
        self.divided = divided
        loss = loss.detach()
        self.losses.append(loss.double().mean() if loss.dim() else loss)
        self.device = loss.device

    def check(
        self, norm: torch.Tensor, scaler: torch.amp.GradScaler | None, newest_checkpoint: Callable[[], Path | None]
    ) -> None:
        """Called before each optimizer step, on all ranks. Raises Diverged if the loss or the norm is not finite."""
        row = self.row(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self.loss_is_of_all = self.checked >= self.next_exchange or self.num_processes == 1
        rows = self.gathered(row) if self.loss_is_of_all else [row.tolist()]  # the step's only sync with the device
        self.norm = rows[0][-1]
        if not math.isfinite(self.norm) and not self.loss_is_of_all:  # on all ranks, as all have the same norm
            self.loss_is_of_all, rows = True, self.gathered(row)
        if self.loss_is_of_all:
            self.agree(rows)
        self.checked += 1
        self.losses.clear()
        means = [total / count for total, count, *_ in rows if count]
        self.loss = sum(means) / max(1, len(means))
        finite = all(map(math.isfinite, means))
        if finite and (math.isfinite(self.norm) or (scaler is not None and scaler.get_scale() > SMALLEST_SCALE)):
            return  # a gradient scaler handles an overflow: it skips the step and lowers the scale
        what = f"gradient norm {self.norm}" if finite else f"loss {means} (one per rank)"
        raise Diverged(
            f"step {self.taken + 1}: {what} is not finite; nothing was updated. Newest checkpoint: "
            f"{newest_checkpoint() or 'none'}. Lower the learning rate, or compare with a bf16 config"
        )

    def row(self, norm: torch.Tensor) -> torch.Tensor:
        """What this process tells the others, on its device: the sum of its losses, what to divide it by (0: there are
        none), whether it was told to stop, seconds per step, the norm."""
        now, (before, checked_before) = time.perf_counter(), self.last_exchange
        seconds = (now - before) / max(1, self.checked - checked_before)
        device = (self.device if norm.device.type == "cpu" else None) or norm.device  # optimizer offload: norm on a CPU
        count = len(self.losses) if self.divided else min(1, len(self.losses))
        known = torch.tensor([count, process.told_to_stop(), seconds], dtype=torch.float64)
        total = sum(loss.double() for loss in self.losses) if self.losses else torch.zeros((), dtype=torch.float64)
        parts = (total.view(1), known, norm.detach().double().view(1))  # pyrefly: ignore[missing-attribute]
        return torch.cat([to_device(part, device) for part in parts])

    def gathered(self, row: torch.Tensor) -> list[list[float]]:
        """The rows of all processes."""
        if self.num_processes == 1:
            return [row.tolist()]
        rows = row.new_empty(self.num_processes * len(row))
        dist.all_gather_into_tensor(rows, row)
        return rows.view(self.num_processes, -1).tolist()

    def agree(self, rows: list[list[float]]) -> None:
        """Takes what all processes have told. Raises Refused if their norms differ."""
        self.last_exchange = time.perf_counter(), self.checked
        self.stopping = self.stopping or any(told for _, _, told, _, _ in rows)
        seconds, norms = max(row[-2] for row in rows), [row[-1] for row in rows]
        if all(map(math.isfinite, norms)) and max(norms) > SAME_NORM * min(norms):
            each = ", ".join(f"{norm:.4g}" for norm in norms)
            raise Refused(
                f"the gradients were not averaged over the processes, their norms are {each}: each would "
                "train a model of its own (LocalSGD, or a step inside no_sync). Leave that out, or use a "
                "single config"
            )
        self.next_exchange = self.checked + 1
        if self.excluded >= WARMUP_STEPS and seconds > 0:  # all ranks compute the same number
            self.next_exchange = self.checked + max(1, int(AGREE_SECONDS / seconds))

    def done(self, skipped: bool) -> None:
        """Called after each optimizer step. skipped: by the gradient scaler."""
        self.tried += 1
        self.taken += not skipped
        now = time.perf_counter()
        if self.excluded < WARMUP_STEPS:
            self.excluded += 1
        elif self.clock is not None:
            self.times.append(now - self.clock)
        self.clock = now

    def pause(self) -> None:
        """Excludes evaluation, logging and saving from the time of a step."""
        if self.clock is not None:
            self.clock = time.perf_counter()

    def anyone_told_to_stop(self, device: torch.device) -> bool:
        """Whether any rank was told to stop when this was asked last. Every rank must call it. The answer of this
        call is read in the next one, so that the device has work while the host waits for it."""
        if self.num_processes == 1:
            self.stopping = self.stopping or process.told_to_stop()
        elif not self.stopping:
            before, told = self.told, torch.tensor([float(process.told_to_stop())])
            self.told = to_device(told, device)
            dist.all_reduce(self.told, dist.ReduceOp.MAX)
            self.stopping = before is not None and bool(before.item())
        return self.stopping


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Moves a small tensor to `device`, from pinned memory, so that the host does not wait."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
