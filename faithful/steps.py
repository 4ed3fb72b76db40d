"""The steps of a run: checks that they are finite, asks whether any process was told to stop, and measures their time.

All processes see the same gradient norm, that of the mean gradients, and stop at the same step. They exchange losses,
the previous norm and requests to stop during a backward pass, every AGREE_SECONDS or every step, whichever is longer:
with steps of 8 ms, an exchange in each of them would take a tenth of the time.
"""

import math
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from faithful import process
from faithful.errors import Diverged, Refused

AGREE_SECONDS = 0.1
WARMUP_STEPS = 3  # not timed: they allocate, compile and count
SAME_NORM = 1 + 1e-5  # largest ratio of equal norms: machines may sum in a different order
SMALLEST_SCALE = 2**-14  # of a gradient scaler; below it, a smaller scale does not cure an overflow


class Steps:
    def __init__(self, num_processes):
        self.num_processes = num_processes
        self.taken = self.tried = 0  # optimizer steps; tried includes those that a gradient scaler skipped
        self.losses, self.norm, self.loss = [], None, None  # losses: of each micro-batch since the last step
        self.loss_is_of_all = False  # whether `loss` is the mean over all processes
        self.times, self.excluded, self.clock = [], 0, None
        self.stopping = False
        self.told = None  # whether any rank was told to stop, as asked last in an evaluation
        self.checked = 0  # updates of all optimizers; taken and tried count the first one's
        self.next_exchange = 0  # the value of `checked` from which a backward pass exchanges again
        self.last_exchange = (time.perf_counter(), 0)  # when, and `checked` at that time
        self.exchanging = None  # (flat tensor of all ranks, Work or None) between the start of an exchange and its end

    def backward(self, loss, last):
        """Called before each backward pass. last: whether it is the last one before the optimizer step."""
        loss = loss.detach()
        self.losses.append(loss.double().mean() if loss.dim() else loss)
        if last:
            self.exchanging = self.exchange() if self.due() else None

    def due(self):
        return self.checked >= self.next_exchange

    def exchange_with(self, norm):
        """Exchanges this step's norm: before the first update of a run, and where the script calls loss.backward() or
        torch.autograd.grad itself, so that nothing was exchanged in a backward pass."""
        if self.exchanging is not None:
            self.exchanging[1].wait()
        self.exchanging = self.exchange(norm)

    def exchange(self, norm=None):
        """Starts to gather a row from each rank: its losses, whether it was told to stop, seconds per step, the
        norm, or the previous one. Returns (flat tensor of all rows, Work or None)."""
        now, (before, checked_before) = time.perf_counter(), self.last_exchange
        self.last_exchange = now, self.checked
        seconds = (now - before) / max(1, self.checked - checked_before)
        rest = torch.tensor([process.told_to_stop(), seconds, self.norm or 0.0], dtype=torch.float64)
        losses = torch.stack(self.losses).double().flatten()
        row = torch.cat([losses, to_device(rest, losses.device)])
        row = row if norm is None else torch.cat([row[:-1], norm.view(1)])
        if self.num_processes == 1:
            return row, None
        rows = row.new_empty(row.numel() * self.num_processes)
        return rows, dist.all_gather_into_tensor(rows, row, async_op=True)

    def check(self, norm, scaler, newest_checkpoint):
        """Called before each optimizer step, on all ranks. Raises Diverged if the loss or the norm is not finite."""
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        norm = norm.detach().double()
        if not self.losses:  # the script calls loss.backward() itself
            self.losses.append(norm * 0)
        norm = to_device(norm, self.losses[0].device)
        if self.num_processes > 1 and (not self.checked or (self.exchanging is None and self.due())):
            self.exchange_with(norm)
        if self.exchanging is None:
            *losses, self.norm = torch.stack([*(loss.double() for loss in self.losses), norm]).tolist()  # only sync
            losses_of_ranks = [losses]
            if not math.isfinite(self.norm):  # on all ranks, as all have the same norm
                self.exchanging = self.exchange()
        if self.exchanging is not None:
            losses_of_ranks = self.finish_exchange(norm)
        self.checked += 1
        self.loss_is_of_all = self.exchanging is not None or self.num_processes == 1
        self.losses.clear()
        self.exchanging = None
        means = [sum(losses) / len(losses) for losses in losses_of_ranks]
        self.loss = sum(means) / len(means)
        finite = all(map(math.isfinite, means))
        if finite and (math.isfinite(self.norm) or (scaler is not None and scaler.get_scale() > SMALLEST_SCALE)):
            return  # a gradient scaler handles an overflow: it skips the step and lowers the scale
        what = f"gradient norm {self.norm}" if finite else f"loss {means} (one per rank)"
        raise Diverged(
            f"step {self.taken + 1}: {what} is not finite; nothing was updated. Newest checkpoint: "
            f"{newest_checkpoint() or 'none'}. Lower the learning rate, or compare with a bf16 config"
        )

    def finish_exchange(self, norm):
        """Sets `norm` and `stopping`. Returns each rank's losses. Raises Refused if the norms differ."""
        gathered, work = self.exchanging
        if work is not None:
            work.wait()
        *values, self.norm = torch.cat([gathered, norm.view(1)]).tolist()  # the step's only sync with the device
        width = len(self.losses) + 3
        rows = [values[at : at + width] for at in range(0, len(values), width)]
        self.stopping = self.stopping or any(row[-3] for row in rows)
        seconds, norms = max(row[-2] for row in rows), [row[-1] for row in rows]
        if all(map(math.isfinite, norms)) and max(norms) > SAME_NORM * min(norms):
            each = ", ".join(f"{norm:.4g}" for norm in norms)
            raise Refused(
                f"the gradients were not averaged over the processes, their norms are {each}: each would train a model "
                "of its own. Leave out LocalSGD, steps inside no_sync, torch.autograd.grad, and under DDP a second "
                "backward pass of one forward pass, and parameters that are thawed or tied after prepare; "
                "those without a gradient need DistributedDataParallelKwargs(find_unused_parameters=True). Or use a "
                "single config"
            )
        self.next_exchange = self.checked + 1
        if self.excluded >= WARMUP_STEPS and seconds > 0:  # all ranks compute the same number
            self.next_exchange = self.checked + max(1, int(AGREE_SECONDS / seconds))
        return [row[:-3] for row in rows]

    def done(self, skipped):
        """Called after each optimizer step. skipped: by the gradient scaler."""
        self.tried += 1
        self.taken += not skipped
        now = time.perf_counter()
        if self.excluded < WARMUP_STEPS:
            self.excluded += 1
        elif self.clock is not None:
            self.times.append(now - self.clock)
        self.clock = now

    def pause(self):
        """Excludes evaluation, logging and saving from the time of a step."""
        if self.clock is not None:
            self.clock = time.perf_counter()

    def anyone_told_to_stop(self, device):
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


def to_device(tensor, device):
    """Moves a small tensor to `device`, from pinned memory, so that the host does not wait."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
