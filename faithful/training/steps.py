"""The steps of a run: checks that they are finite, asks whether any process was told to stop, and measures their time.

All processes see the same gradient norm, that of the mean gradients, and stop at the same step. They exchange losses,
the norm and requests to stop before an update, every AGREE_SECONDS or every step, whichever is longer: with steps of
8 ms, an exchange in each of them would take a tenth of the time. All processes update together, but how many backward
passes they have had is their own.

On a GPU the host does not wait for these numbers, which would leave the device without work until the update is
launched. An optimizer that can leave its update out is told on the device whether the norm is finite (`masked`), and
the host reads the numbers before the next update, when the device has another step to do. So between a norm that is not
finite and the end of the run nothing is updated. A loss that is not finite makes the gradients NaN, on all processes:
where the norm is finite, the script has given these gradients up itself, and goes on.
"""

import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from faithful.errors import Diverged, Refused
from faithful.launch import process
from faithful.strategies.base import SAME_NORM
from faithful.tensors.names import whole_of

AGREE_SECONDS = 0.1
WARMUP_STEPS = 3  # not timed: they allocate, compile and count
SMALLEST_SCALE = 2**-14  # of a gradient scaler; below it, a smaller scale does not cure an overflow
EXACT = 1 << 24  # integers below it are exact in fp32
APART = (
    "LocalSGD, a step inside no_sync or in a hook of backward, gradients set by hand, or a cast of the model to "
    "another dtype and back: leave that out"
)
NO_BACKWARD = (
    "it steps without accelerator.backward, and torch.autograd.grad, or gradients set by hand, are this process's own: "
    "average them, gradient = accelerator.reduce(gradient, 'mean')"
)
ONE_GRAPH = (
    "more backward passes than forward passes, and DDP averages the first one's gradients alone: add the losses and "
    "call backward once, without retain_graph"
)
INSIDE = (
    "it calls the model inside DDP, as model.module and unwrap_model give it, and DDP averages after calls of its own: "
    "call the prepared model"
)
MASKED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)  # with fused=True


class Passes:
    """A hook of each prepared model that trains, before its forward pass, where strategies exchange in passes: counts
    those with gradients. A method of the Accelerator would keep it alive with the model."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += torch.is_grad_enabled()


@dataclass(frozen=True)
class Sent:
    """What a check has sent to the host. taken, tried, checked: as they were then."""

    rows: torch.Tensor  # has its values once `arrived` has happened
    arrived: torch.cuda.Event
    of_all: bool
    counts: bool
    taken: int
    tried: int
    checked: int


class Steps:
    """newest_checkpoint: returns the path of the newest complete one, or None."""

    def __init__(self, num_processes: int, newest_checkpoint: Callable[[], Path | None] = lambda: None) -> None:
        self.num_processes, self.newest_checkpoint = num_processes, newest_checkpoint
        self.taken = self.tried = 0  # optimizer steps; tried includes those that a gradient scaler skipped
        self.losses: list[torch.Tensor] = []  # of each backward pass since the last step
        self.norm: float | None = None
        self.loss: float | None = None
        self.device: torch.device | None = None  # of the losses
        self.apart = APART  # why gradients may not be averaged
        self.used = 0  # a number of which parameters had a gradient, in this process, in all updates
        self.copies = 0  # see Strategy.copies
        self.divided = True  # whether Accelerate divides the losses by their number; else their sum is the step's
        self.times: list[float] = []
        self.excluded = 0
        self.clock: float | None = None
        self.stopping = self.heard = False  # heard: that a process was told to stop, not yet by all
        self.told: torch.Tensor | None = None  # whether any rank was told to stop, as asked last in an evaluation
        self.checked = 0  # updates of all optimizers; taken and tried count the first one's
        self.next_exchange = 0  # the value of `checked` from which the processes exchange again
        self.last_exchange = (time.perf_counter(), 0)  # when, and `checked` at that time
        self.sent: Sent | None = None  # what the host has not read yet
        self.point: tuple[int, float] | None = None  # newly read: (step, its loss over all processes)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"sent": None}  # an event cannot be copied

    def backward(self, loss: torch.Tensor, divided: bool = True) -> None:
        """Called before each backward pass. divided: whether Accelerate divides the loss afterwards. transformers'
        Trainer and other scripts do so themselves."""
        self.divided = divided
        if loss.requires_grad:
            loss.register_hook(nan_unless_finite(loss.detach()))
        loss = loss.detach()
        self.losses.append(loss.to(at_least_fp32(loss)).mean() if loss.dim() else loss)
        self.device = loss.device

    def check(
        self, norm: torch.Tensor, scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer, counts: bool
    ) -> torch.Tensor | None:
        """Called before each optimizer step, on all ranks. Raises Diverged if the loss or the norm is not finite. Or
        returns a flag for the optimizer, 1 if the norm is not finite, and the next `settle` raises it; but not in the
        first steps, in which evidence is counted and most runs diverge that do. counts: whether these steps are those
        of the run."""
        self.settle()
        norm = whole_of(norm).detach()
        of_all = self.checked >= self.next_exchange or self.num_processes == 1
        row = self.row(norm, rates_of(optimizer) if of_all and self.num_processes > 1 else 0)
        rows = self.gathered(row) if of_all else row.unsqueeze(0)
        self.losses.clear()
        late = norm.device.type == "cuda" and scaler is None and self.excluded >= WARMUP_STEPS and masked(optimizer)
        if late:
            rows, arrived = rows.to("cpu", non_blocking=True), torch.cuda.Event()
            arrived.record()
            self.sent = Sent(rows, arrived, of_all, counts, self.taken, self.tried, self.checked)
        else:
            values = rows.tolist()  # the host waits for the device
            if not of_all and not math.isfinite(values[0][-1]):  # on all ranks, as all have the same norm
                of_all, values = True, self.gathered(row).tolist()
            self.judge(values, of_all, counts, self.checked, scaler)
        self.checked += 1
        heard = process.told_to_stop() if self.num_processes == 1 else self.heard
        self.stopping = self.stopping or heard  # here, as some processes may have called `settle` before
        return (norm - norm).ne(0).float() if late else None

    def passes(self, forward: int, backward: int) -> None:
        """What the script has done since the last update: so many passes."""
        graph = ONE_GRAPH if forward else INSIDE
        self.apart = NO_BACKWARD if not backward else graph if backward > forward else APART

    def uses(self, parameters: list[bool]) -> None:
        """Which parameters of an engine's model have a gradient in this process, which are those that it averages."""
        self.used = zlib.crc32(bytes(parameters), self.used)

    def settle(self) -> None:
        """Reads what the last check has sent, if the host has not yet. Raises Diverged, with `taken` and `tried` as
        they were before that step. Not a collective: a process may call it alone, before it saves or logs."""
        if self.sent is None:
            return
        (sent, self.sent), counts = (self.sent, None), (self.taken, self.tried)
        sent.arrived.synchronize()
        self.taken, self.tried = sent.taken, sent.tried
        self.judge(sent.rows.tolist(), sent.of_all, sent.counts, sent.checked)
        self.taken, self.tried = counts

    def judge(
        self,
        rows: list[list[float]],
        of_all: bool,
        counts: bool,
        checked: int,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Takes the rows of all processes (`of_all`) or this one's. Raises Diverged if they are not finite. checked: as
        it was when the rows were made."""
        self.norm = rows[0][-1]
        if of_all:
            self.agree(rows, checked)
        means = [total / count for total, count, *_ in rows if count]
        if math.isfinite(self.norm):  # so the script has given up the gradients of a loss that is not finite
            means = [mean for mean in means if math.isfinite(mean)]
        finite = all(map(math.isfinite, means))
        loss = sum(means) / max(1, len(means))
        self.loss = loss if means else self.loss
        if finite and math.isfinite(self.norm):
            self.point = (self.taken + 1, loss) if of_all and counts and means else self.point
            return
        if finite and scaler is not None and scaler.get_scale() > SMALLEST_SCALE:
            return  # it skips the step and lowers the scale
        what = f"gradient norm {self.norm}" if finite else f"loss {means} (one per rank)"
        raise Diverged(
            f"step {self.taken + 1}: {what} is not finite; nothing was updated. Newest checkpoint: "
            f"{self.newest_checkpoint() or 'none'}. Lower the learning rate; in FP8 or fp16, compare with a bf16 config"
        )

    def row(self, norm: torch.Tensor, rates: int = 0) -> torch.Tensor:
        """What this process tells the others, on its device: the sum of its losses, what to divide it by (0: there are
        none), whether it was told to stop, its copies, a number of its learning rates, what it used, seconds per step,
        the norm. All in the norm's dtype, which all processes have, or fp32: not every device has fp64."""
        now, (before, checked_before) = time.perf_counter(), self.last_exchange
        seconds = (now - before) / max(1, self.checked - checked_before)
        device = (self.device if norm.device.type == "cpu" else None) or norm.device  # optimizer offload: norm on a CPU
        dtype, count = at_least_fp32(norm), len(self.losses) if self.divided else min(1, len(self.losses))
        told, used = process.told_to_stop(), self.used % EXACT
        known = torch.tensor([count, told, self.copies % EXACT, rates, used, seconds], dtype=dtype)
        total = sum(loss.to(dtype) for loss in self.losses) if self.losses else torch.zeros((), dtype=dtype)
        parts = (total.view(1), known, norm.to(dtype).view(1))  # pyrefly: ignore[missing-attribute]
        return torch.cat([to_device(part, device) for part in parts])

    def gathered(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all processes."""
        if self.num_processes == 1:
            return row.unsqueeze(0)
        rows = row.new_empty(self.num_processes * len(row))
        dist.all_gather_into_tensor(rows, row)
        return rows.view(self.num_processes, -1)

    def agree(self, rows: list[list[float]], checked: int) -> None:
        """Takes what all processes have told. Raises Refused if their norms, learning rates or copies differ."""
        self.last_exchange = time.perf_counter(), self.checked
        self.heard = any(told for _, _, told, *_ in rows)
        if len({row[-3] for row in rows}) > 1:
            raise Refused(
                "the processes have used different parts of the model, an expert without tokens perhaps, and their "
                f"engine has averaged gradients of one with those of another: {process.EACH_PART}"
            )
        if len({row[-4] for row in rows}) > 1:
            raise Refused(
                "the processes have different learning rates, so each would train a model of its own: a scheduler that "
                "steps by a loss, as ReduceLROnPlateau, needs that of all: accelerator.reduce(loss, 'mean')"
            )
        if len({row[-5] for row in rows}) > 1:
            raise Refused(
                "some of the processes alone have written whole tensors into the sharded model, by load_state_dict "
                "perhaps: do it in all processes, or before prepare()"
            )
        seconds, norms = max(row[-2] for row in rows), [row[-1] for row in rows]
        if all(map(math.isfinite, norms)) and max(norms) > SAME_NORM * min(norms):
            each = ", ".join(f"{norm:.4g}" for norm in norms)
            raise Refused(
                f"the gradients were not averaged over the processes, their norms are {each}: each would "
                f"train a model of its own ({self.apart}), or use a single config"
            )
        self.next_exchange = checked + 1
        if self.excluded >= WARMUP_STEPS and seconds > 0:  # all ranks compute the same number
            self.next_exchange = checked + max(1, int(AGREE_SECONDS / seconds))

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


def masked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer changes neither weights nor its state where a `found_inf` on the GPU is 1: torch's fused
    kernels, which read it there for the sake of gradient scalers, and amp8's Adam. All others would need a copy of what
    they change."""
    if hasattr(optimizer, "can_mask"):
        return optimizer.can_mask()  # pyrefly: ignore[not-callable]
    if type(optimizer) not in MASKED or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    return all(parameter.device.type == "cuda" for group in optimizer.param_groups for parameter in group["params"])


def rates_of(optimizer: torch.optim.Optimizer) -> int:
    """A number of the optimizer's learning rates, without those on a device, for which the host would wait."""
    rates = [rate for group in optimizer.param_groups if not torch.is_tensor(rate := group.get("lr"))]
    return zlib.crc32(repr(rates).encode()) % EXACT


def nan_unless_finite(loss: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A hook for the gradient of a loss, which may be finite where the loss is not (of a label whose logit is -inf)."""
    return lambda gradient: gradient + (loss - loss)


def at_least_fp32(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Moves a small tensor to `device`, from pinned memory, so that the host does not wait."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
