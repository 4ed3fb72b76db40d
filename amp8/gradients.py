"""Weight gradients in FP8: e4m3 codes and a scale, kept beside the parameter.

Torch does not allow an e4m3 `.grad` on an fp16 parameter and cannot add to one, so the gradient of a converted layer is
stored in its WeightGradient. It arrives in fp32 during the backward pass, layer by layer, and the fp32 copy is freed at
once.
"""

import math

import torch
import torch.distributed as dist

from . import scaling
from .coded import CodedWeight, CodesRead
from .comm import linear_of
from .compiled import compiled_on_cuda
from .dotgrad import FP8Gradient

CHUNK = 1 << 18  # elements that are fp32 at one time where a whole tensor need not be
BATCH = 16  # tensors in one compiled call on a GPU


@compiled_on_cuda
def quantize_gradient(gradient):
    """Rounds an fp32 gradient with in-time scaling: (e4m3 codes, scale). The scale is NaN if the gradient is not
    finite, because the saturated codes would hide that."""
    amax = scaling.amax(gradient)
    scale = torch.where(torch.isfinite(amax), scaling.power_of_two_scale(amax, scaling.E4M3), torch.nan)
    return scaling.quantize(gradient, scale, scaling.E4M3), scale


@compiled_on_cuda
def norms(codes):
    """2-norm of each tensor of FP8 codes in a list, fp32 [length]. In slices on a CPU, in one fused pass on a GPU."""
    found = []
    for tensor in codes:
        parts = [tensor] if tensor.is_cuda else tensor.reshape(-1).split(CHUNK)
        found.append(torch.stack([scaling.decode(part).square().sum() for part in parts]).sum().sqrt())
    return torch.stack(found)


class WeightGradient:
    """The gradient of one converted weight. It is in `codes` or in `high`, or there is none.

    codes, scale: e4m3 [the weight's shape] and fp32 0-d; the value is codes / scale.
    high: fp32 [the weight's shape], between micro-batches under accumulate="high", and once `.grad` was changed.
    piece, own: the part of the flattened weight whose mean this rank computes, and the rank's own gradient of that part
    in fp32, from the end of backward until the mean is computed. It is not sent, so it is not rounded.
    reduced: the codes are already the mean over ranks (on the owner alone under O3). spent: a step has used it.
    sharding: under fully_shard, where the weight's rows are; a mean is then of this rank's rows alone. kept: the mean
    of earlier backward passes of this step, fp32, and a bound on its magnitude that is the same on all ranks.
    """

    def __init__(self, linear, owner, state):
        self.linear, self.owner, self.state, self.shape = linear, owner, state, linear.weight.shape
        self.piece = self.sharding = None
        self.view = None  # `.grad` of the weight, when somebody has read it
        self.clear()

    def clear(self):
        self.codes = self.scale = self.high = self.own = self.kept = None
        self.reduced = self.spent = False

    def value(self):
        """The gradient in fp32, or None."""
        if self.high is not None:
            return self.high
        return None if self.codes is None else scaling.dequantize(self.codes, self.scale)

    def store(self, value):
        """Stores an fp32 gradient as the one to send or to use."""
        self.codes, self.scale = quantize_gradient(value)
        self.own = None if self.piece is None else value.reshape(-1)[self.piece].clone()
        self.high, self.reduced = None, False

    def receive(self, port):
        """Hook of the layer's port: takes the gradient of one micro-batch. Calls the weight's own hooks, as torch does:
        those of the gradient before it is added, those of the accumulated gradient afterwards."""
        new, port.grad = port.grad, None
        self.linear.replaced = None  # training goes on with the weight as it is
        before, after = hooks_of(self.linear.weight)
        for hook in before:
            changed = hook(new)
            new = new if changed is None else changed.float()
        self.add(new)
        for hook in after:
            hook(self.linear.weight)

    def add(self, new):
        """Adds the gradient of one micro-batch, fp32."""
        comm = self.state.comm
        if self.spent:  # a step has used it, and whoever forgets zero_grad() or calls the model's would add to it
            self.clear()
        if self.reduced:  # by an earlier backward pass, perhaps on another stream still
            comm.begin(self)
            if self.sharding is not None:  # what comes now is sent alone, and its mean is added there
                self.keep()
        before = self.value()
        if before is not None:
            if self.reduced and self.state.sharded:  # the owner alone still holds the mean of N ranks
                before = before * self.state.world
            new = before.add_(new)
        last = self.state.last_micro_batch()
        # A loop that says nothing may go on: what has been added to stays in fp32 until the step.
        more = not last or (before is not None and comm is None and not self.state.told)
        if more and self.state.accumulate == "high":
            self.clear()
            self.high = new
            return
        if comm is not None:
            comm.plan()
        self.store(new)
        if last and comm is not None:
            comm.ready(self)

    def settle(self):
        """Prepares the gradient to be sent or used: rounds what was kept in fp32, if no last micro-batch was announced,
        and drops a gradient that a step has already used."""
        if self.spent:
            self.clear()
        if self.high is not None:
            reduced = self.reduced  # a mean over ranks that somebody has changed is one still
            self.store(self.high)
            self.reduced = reduced
        if self.reduced and self.kept is not None:
            self.round()

    # What `.grad` of the weight does

    def visible(self):
        """`.grad`: a tensor, or None if there is no gradient."""
        if self.codes is None and self.high is None:
            return None
        if self.view is None:
            self.view = FP8Gradient(self)
        return self.view

    def readable(self, shared):
        """The gradient in fp32 for whoever reads `.grad`. shared: what is returned may be changed, and is the gradient
        from now on."""
        name, comm = self.linear.name, self.state.comm
        if self.state.sharded:
            raise CodesRead(f"{name}.weight.grad is on one rank alone under O3: clip with amp8.clip_grad_norm_")
        if self.codes is None and self.high is None:
            raise CodesRead(f"{name}.weight.grad was cleared after it was read: read it again")
        if comm is not None and self.high is None and not self.reduced:
            raise CodesRead(f"{name}.weight.grad is not averaged over ranks yet, as other layers got no gradient or "
                            "the backward pass goes on: read it after amp8.clip_grad_norm_")  # fmt: skip
        if comm is not None and comm.stream is not None:
            torch.cuda.current_stream().wait_stream(comm.stream)
        value = self.value()
        if shared:
            self.high, self.codes, self.scale = value, None, None
        return value

    def replace(self, value):
        """`weight.grad = value`. None drops the gradient."""
        if value is self.view and value is not None:
            return
        if value is not None and value.shape != self.shape:
            raise RuntimeError(f"{self.linear.name}.weight is {list(self.shape)}, and was assigned a gradient of "
                               f"{list(value.shape)}")  # fmt: skip
        value = value.clone() if isinstance(value, FP8Gradient) else value
        self.clear()
        if value is not None:
            self.high = value.detach().to(self.linear.weight.device, torch.float32)
            self.reduced = self.state.comm is not None

    def zero(self):
        """`weight.grad.zero_()`, without a copy in fp32."""
        if self.high is not None:
            self.high.zero_()
        elif self.codes is not None:
            self.codes.view(torch.uint8).zero_()
            self.own = None if self.own is None else torch.zeros_like(self.own)

    # Under fully_shard

    def keep(self):
        """Keeps a mean, so that the next backward pass's mean can be added to it."""
        if self.reduced and self.codes is not None:
            self.kept = self.value(), scaling.dtype_max(scaling.E4M3) / self.scale
            self.codes = self.scale = None
        self.reduced = False

    def add_mean(self, mean, scale):
        """Adds the mean over ranks, fp32 [this rank's rows], with a scale that fits it on all ranks."""
        bound = scaling.dtype_max(scaling.E4M3) / scale
        if self.kept is not None:
            mean, bound = mean + self.kept[0], bound + self.kept[1]
        self.kept, self.reduced = (mean, bound), True
        self.codes = self.scale = self.own = None
        if self.state.accumulate == "fp8" or not self.state.more_to_come():
            self.round()

    def round(self):
        """Rounds the kept mean to FP8. The scale comes from the bound, so all ranks have the same scale."""
        mean, bound = self.kept
        scale = torch.where(torch.isfinite(bound), scaling.power_of_two_scale(bound, scaling.E4M3), torch.nan)
        self.codes, self.scale, self.kept = scaling.quantize(mean, scale, scaling.E4M3), scale, None


@torch.no_grad()
def clip_grad_norm_(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    """torch.nn.utils.clip_grad_norm_ for ordinary and FP8 gradients: one norm and one factor for all of them.

    parameters: a module, a tensor, or an iterable of parameters. Returns the norm before clipping, 0-d fp32, NaN or
    infinite if any gradient is. Only the scale of an FP8 gradient changes, not its codes. Finishes outstanding
    communication first. `foreach` changes nothing. Under O3 and fully_shard every rank must call it, as ranks add up
    their parts.
    """
    if float(norm_type) != 2.0:
        raise ValueError(f"amp8.clip_grad_norm_ knows the 2-norm, norm_type=2.0, not {norm_type}")
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    converted = [linear_of(p).gradient for p in parameters if linear_of(p) is not None]
    states = {id(gradient.state): gradient.state for gradient in converted}.values()
    for state in states:
        state.finish()
    converted = [gradient for gradient in converted if gradient.codes is not None and not gradient.spent]
    gradients = [p.grad for p in parameters if linear_of(p) is None and p.grad is not None]
    ordinary = [gradient for gradient in gradients if not hasattr(gradient, "placements")]
    sharded = [gradient for gradient in gradients if hasattr(gradient, "placements")]  # fully_shard's
    shards = [gradient.to_local() for gradient in sharded]
    device = next((t.device for t in [*(g.codes for g in converted), *ordinary, *parameters]), torch.device("cpu"))
    total = torch.zeros((), device=device)
    if converted:
        parts = [converted[i : i + BATCH] for i in range(0, len(converted), BATCH)]
        found = torch.cat([norms([gradient.codes for gradient in part]) for part in parts])
        total += (found / torch.stack([gradient.scale for gradient in converted])).square().sum()
    total += sum_of_squares(shards, device)
    groups = [state.group for state in states if state.sharded or state.fsdp_group is not None]
    groups += [gradient.device_mesh.get_group(gradient.device_mesh.ndim - 1) for gradient in sharded]
    for group in dict.fromkeys(groups):
        dist.all_reduce(total, group=group)
    total += sum_of_squares(ordinary, device)
    total = total.sqrt()
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"the gradient's norm is {total.item()}: look for the step that made it so, or lower the LR")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in converted:
        gradient.scale = gradient.scale / factor
    for gradient in [*ordinary, *shards]:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return total


def hooks_of(weight):
    """(hooks of the gradient, hooks of the accumulated gradient) that others have registered on a converted weight.
    Autograd never calls them, because the gradient arrives at the port."""
    if type(weight) is not CodedWeight:
        return (), ()
    before, after = weight._backward_hooks, weight._post_accumulate_grad_hooks
    return tuple((before or {}).values()), tuple((after or {}).values())


def sum_of_squares(gradients, device):
    """The sum of squares of ordinary gradients, in fp32."""
    if not gradients:
        return 0.0
    found = torch._foreach_norm([gradient.detach().float() for gradient in gradients])
    return torch.stack([norm.to(device) for norm in found]).square().sum()
