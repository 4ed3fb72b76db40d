"""Weight gradients in FP8: e4m3 codes and a scale, kept beside the parameter.

Torch does not allow an e4m3 `.grad` on an fp16 parameter and cannot add to one, so the gradient of a converted layer is
stored in its WeightGradient. It arrives in autocast's dtype during the backward pass, layer by layer, and is rounded to
FP8 at once.
"""

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from . import kernels, scaling
from .coded import CodedWeight, CodesRead
from .compiled import compiled_on_cuda
from .grad_view import FP8Gradient
from .tensors import linear_of

if TYPE_CHECKING:
    from .convert import State
    from .fsdp import Sharding
    from .linear import FP8Linear

WAITING = 1 << 25  # elements of gradients that are not rounded yet: 64 MiB in 16 bit
CHUNK = 1 << 18  # elements that are fp32 at one time where a whole tensor need not be


class Phase(enum.Enum):
    """What a WeightGradient is now, and so which of its tensors there are."""

    NONE = "there is no gradient"
    SUM = "`fp32`, this rank's sum of micro-batches, not to be sent yet"
    READY = "`codes`, to be sent, or to be used where there is one rank"
    MEAN = "`codes`, the mean over ranks"
    CHANGED = "`fp32`, the mean over ranks, as somebody has set or changed it"
    RUNNING = "`accumulated` alone: under fully_shard the mean of this step's backward passes so far"
    ELSEWHERE = "under O3 the owner has the mean"
    CONSUMED = "a step has used it; it can still be read, and the next backward pass drops it"


AVERAGED = {Phase.MEAN, Phase.CHANGED, Phase.RUNNING, Phase.ELSEWHERE}


def quantize_gradient(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a gradient with in-time scaling: (e4m3 codes, scale)."""
    rounding = Rounding()
    made = rounding.begin(gradient)
    rounding.finish()
    return made


class Rounding:
    """Rounds the gradients of a model. On a GPU several at once, as for narrow layers the host would need longer for
    the launches than the GPU for their work: codes and scale are written later, by `finish`."""

    def __init__(self) -> None:
        self.waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def begin(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where `quantize_gradient` of it will be."""
        if not kernels.fits(gradient.device) or not gradient.numel():  # a shard may have no row
            scale = scaling.gradient_scale(scaling.amax(gradient))
            return scaling.quantize(gradient, scale, scaling.E4M3), scale
        if self.waiting and self.waiting[0][0].dtype != gradient.dtype:
            self.finish()
        codes = torch.empty(gradient.shape, dtype=scaling.E4M3, device=gradient.device)
        scale = torch.empty((), device=gradient.device)
        self.waiting.append((gradient.contiguous(), codes, scale))
        if sum(gradient.numel() for gradient, *_ in self.waiting) >= WAITING:
            self.finish()
        return codes, scale

    def finish(self) -> None:
        """Called before anybody uses codes or scales."""
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            kernels.round_gradients(*zip(*waiting, strict=True))


def squares(codes: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of each tensor of FP8 codes in a list, fp32 [length]. In slices, so that little is fp32 at
    one time."""
    if kernels.fits(codes[0].device):
        return kernels.squares(codes)
    found = []
    for tensor in codes:
        parts = tensor.reshape(-1).split(CHUNK)
        found.append(torch.stack([scaling.decode(part).square().sum() for part in parts]).sum())
    return torch.stack(found)


class WeightGradient:
    """The gradient of one converted weight. `phase` says what it is; tensors that are not of the phase are None.

    codes, scale: e4m3 [the weight's shape] and fp32 0-d; the value is codes / scale.
    fp32: fp32 [the weight's shape].
    piece, unrounded: the part of the flattened weight whose mean this rank computes, and its own gradient of that
    part in fp32, while it is READY. It is not sent, so it is not rounded.
    sharding: under fully_shard, where the weight's rows are; a mean is then of this rank's rows alone. accumulated: the
    mean of earlier backward passes of this step, fp32, and a bound on its magnitude that is the same on all ranks, or
    None if somebody has set the mean. It is there beside the next pass's gradient, in NONE, SUM and READY, too.
    copy: what somebody who may change it has got from `.grad`, fp32. See `take_copy`.
    """

    scale: torch.Tensor  # if there are codes

    def __init__(self, linear: "FP8Linear", owner: int, state: "State") -> None:
        self.linear, self.owner, self.state, self.shape = linear, owner, state, linear.weight.shape
        self.piece: slice | None = None
        self.sharding: Sharding | None = None
        self.view: torch.Tensor | None = None  # `.grad` of the weight, when somebody has read it
        self.exposed: torch.Tensor | None = None  # under fully_shard: what we have set `.grad` to
        self.clear()

    def set_phase(
        self,
        phase: Phase,
        codes: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        fp32: torch.Tensor | None = None,
        unrounded: torch.Tensor | None = None,
    ) -> None:
        """Changes the phase, with the tensors that belong to it. `accumulated` stays."""
        # pyrefly: ignore[bad-assignment]
        self.phase, self.codes, self.scale, self.fp32, self.unrounded = phase, codes, scale, fp32, unrounded
        self.copy: torch.Tensor | None = None

    def clear(self) -> None:
        self.accumulated: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self.set_phase(Phase.NONE)
        if self.exposed is not None:
            self.exposed = self.sharding.parameter.grad = None  # pyrefly: ignore[missing-attribute]

    @property
    def averaged(self) -> bool:
        """Whether what is there is a mean over ranks."""
        return self.phase in AVERAGED

    @property
    def pending(self) -> bool:
        """Whether it is in FP8 here, and no step has used it."""
        return self.codes is not None and self.phase is not Phase.CONSUMED

    def consume(self) -> None:
        """A step has used the gradient."""
        if self.phase is not Phase.NONE:
            self.phase = Phase.CONSUMED

    def refresh(self) -> None:
        """Takes over what somebody has done to `.grad`. Drops what a step has used, for whoever forgets zero_grad() or
        calls the model's would add to it."""
        self.take_copy()
        self.take_user_grad()
        if self.phase is Phase.CONSUMED:
            self.clear()

    def value(self) -> torch.Tensor | None:
        """The gradient in fp32, or None."""
        held = self.fp32 if self.copy is None else self.copy
        if held is not None or self.codes is None:
            return held
        self.state.rounding.finish()
        return scaling.dequantize(self.codes, self.scale)

    def fp32_bytes(self) -> int:
        """Bytes that are held in fp32 until the step."""
        held = [self.fp32, self.copy, *(self.accumulated or ())[:1]]
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def store(self, value: torch.Tensor) -> None:
        """Rounds this rank's gradient: it is ready to be sent or used."""
        codes, scale = self.state.rounding.begin(value)
        unrounded = None
        if self.piece is not None:
            unrounded = value.reshape(-1)[self.piece].to(torch.float32, copy=True)
        self.set_phase(Phase.READY, codes, scale, unrounded=unrounded)

    def receive(self, port: torch.Tensor) -> None:
        """Hook of the layer's ports: takes the gradient of a micro-batch. Calls the weight's own hooks, as torch does:
        those of the gradient before it is added, those of the accumulated gradient afterwards."""
        new: torch.Tensor = port.grad  # pyrefly: ignore[bad-assignment]
        port.grad = None
        if self.linear.replaced is not None:
            self.linear.replaced = None  # training goes on with the weight as it is
        before, after = hooks_of(self.linear.weight)
        if self.sharding is not None:  # FSDP2 calls the others for the shard
            before = tuple((self.linear.parameter._backward_hooks or {}).values())
        for hook in before:
            new = new.float()
            changed = hook(new)
            new = new if changed is None else changed.float()
        self.add(new)
        for hook in after:
            if hook != self.misused:
                hook(self.linear.weight)

    def refuse_others(self) -> None:
        """Called when the weight requires a gradient: one that does not come through a port ends the run."""
        weight = self.linear.weight
        if self.misused not in (weight._post_accumulate_grad_hooks or {}).values():
            weight.register_post_accumulate_grad_hook(self.misused)

    def misused(self, parameter: torch.Tensor) -> None:
        """Our own hook on the weight."""
        with torch._C.DisableTorchFunctionSubclass():  # `.grad` as autograd has it
            if parameter.grad is None:  # compiled code calls it for nothing
                return
            parameter.grad = None
        name, early = self.linear.name, ", or import amp8 before the code that takes an autograd function's `apply`"
        raise CodesRead(
            f"{name}.weight was used without calling {name}, as if its codes were values: leave the layer out "
            f"(skip={name!r}; in a config file, skip: {name}){early if self.sharding is None else ''}"
        )

    def add(self, new: torch.Tensor) -> None:
        """Adds the gradient of one micro-batch, in any dtype."""
        comm = self.state.comm
        if self.copy is None or self.phase is Phase.CONSUMED or self.sharding is not None:  # else it is added to
            self.refresh()
        if comm is not None and self.averaged:  # by an earlier backward pass, perhaps on another stream still
            comm.begin(self)
            self.keep()
        before = self.value()
        if before is not None:
            if self.averaged and self.state.sharded:  # the owner alone still holds the mean of N ranks
                before = before * self.state.world
            new = before.add_(new)
        last = self.state.last_micro_batch()
        # A loop that says nothing may go on: what has been added to stays in fp32 until the step.
        more = not last or (before is not None and comm is None and not self.state.told)
        if more and self.state.accumulate == "high":
            self.set_phase(Phase.SUM, fp32=new.float())
            return
        if comm is not None:
            comm.plan()
        self.store(new)
        if last and comm is not None:
            comm.ready(self)

    def settle(self) -> None:
        """Prepares the gradient to be sent or used, when `rounding` has finished: rounds what is in fp32."""
        if self.copy is not None and self.phase is not Phase.CONSUMED:
            self.round_copy(self.copy)
        self.refresh()
        if self.phase is Phase.SUM:  # no last micro-batch was announced
            self.store(self.fp32)  # pyrefly: ignore[bad-argument-type]
        elif self.phase is Phase.CHANGED:
            self.set_phase(Phase.MEAN, *quantize_gradient(self.fp32))  # pyrefly: ignore[bad-argument-type]
        elif self.phase is Phase.RUNNING:
            self.round()

    # What `.grad` of the weight does

    @property
    def of_rows(self) -> bool:
        """Whether `.grad` is the mean over ranks of this rank's rows."""
        return self.sharding is not None and self.state.comm is not None

    @property
    def there(self) -> bool:
        """Whether this rank has what `.grad` is."""
        if self.of_rows:  # the rest is of a backward pass that is not in `.grad` yet
            return self.accumulated is not None or self.phase in (Phase.MEAN, Phase.CONSUMED)
        return self.codes is not None or self.fp32 is not None

    def grad(self) -> torch.Tensor | None:
        """`.grad`: a tensor, or None if there is no gradient. Under O3 reading it raises an error, on all ranks."""
        elsewhere = self.state.sharded and self.phase is not Phase.NONE
        if not self.there and not elsewhere:
            return None
        if self.view is None:
            self.view = FP8Gradient(self, self.shape)
        return self.view

    def grad_in_fp32(self, shared: bool) -> torch.Tensor:
        """The gradient in fp32 for whoever reads `.grad`. shared: what is returned may be changed."""
        name, comm = self.linear.name, self.state.comm
        if self.state.sharded:
            raise CodesRead(f"{name}.weight.grad is on one rank alone under O3: clip with amp8.clip_grad_norm_")
        if not self.there:
            raise CodesRead(f"{name}.weight.grad was cleared after it was read: read it again")
        if comm is not None and self.phase is Phase.READY and not self.of_rows:
            raise CodesRead(
                f"{name}.weight.grad is not averaged over ranks yet, as other layers got no gradient or "
                "the backward pass goes on: read it after amp8.clip_grad_norm_"
            )
        if comm is not None and comm.stream is not None:
            torch.cuda.current_stream().wait_stream(comm.stream)
        if self.copy is not None:
            return self.copy
        if self.accumulated is not None:
            value, bound = self.accumulated
            if shared and bound is not None:
                self.copy = value = value.clone()
        elif self.fp32 is not None:
            value = self.fp32
        else:
            self.state.rounding.finish()
            value = scaling.dequantize(self.codes, self.scale)  # pyrefly: ignore[bad-argument-type]
            self.copy = value if shared else None
        return value

    def round_copy(self, copy: torch.Tensor) -> None:
        """Takes the copy that `.grad` gave, changed or not, before a step: without a wait for the device. If nobody has
        changed it, its scale is the one it had, and a look has changed nothing in the step."""
        self.copy = None
        unchanged = torch.eq(copy, self.grad_in_fp32(False)).all()
        if self.accumulated is not None:
            bound = cast(torch.Tensor, self.accumulated[1])  # what has none gives itself, not a copy
            self.accumulated = copy, torch.where(unchanged, bound, scaling.amax(copy))
        else:
            scale = torch.where(unchanged, self.scale, scaling.gradient_scale(scaling.amax(copy)))
            self.set_phase(self.phase, scaling.quantize(copy, scale, scaling.E4M3), scale)

    def take_copy(self) -> None:
        """As `round_copy`, where a step may have used the gradient or another pass adds to it: waits for the device. If
        somebody has changed the copy, it is the gradient from now on. Else it is dropped."""
        copy, self.copy = self.copy, None
        if copy is not None and not torch.equal(copy, self.grad_in_fp32(False)):
            self.set_grad(copy)

    def set_grad(self, value: torch.Tensor | None) -> None:
        """`.grad` is `value` from now on, fp32: this rank's gradient, or the mean if there are several ranks."""
        self.copy = None
        if not self.of_rows:
            held = Phase.SUM if self.state.comm is None else Phase.CHANGED
            self.set_phase(Phase.NONE if value is None else held, fp32=value)
            return
        self.accumulated = None if value is None else (value, None)
        if self.phase not in (Phase.SUM, Phase.READY):  # those are of a backward pass that is not in `.grad` yet
            self.set_phase(Phase.NONE if value is None else Phase.RUNNING)

    def replace(self, value: torch.Tensor | None) -> None:
        """`weight.grad = value`. None drops the gradient."""
        if value is None:
            return self.clear()
        if value is self.view:
            return None
        if self.state.sharded:
            raise CodesRead(f"{self.linear.name}.weight.grad is on one rank alone under O3: it can't be assigned")
        if value.shape != self.shape:
            raise RuntimeError(
                f"{self.linear.name}.weight is {list(self.shape)}, and was assigned a gradient of {list(value.shape)}"
            )
        value = value.clone() if isinstance(value, FP8Gradient) else value
        self.set_grad(value.detach().to(self.linear.weight.device, torch.float32))

    def zero(self) -> None:
        """`weight.grad.zero_()`, without a copy in fp32."""
        self.state.rounding.finish()
        held = (self.fp32, self.codes, self.unrounded) if self.accumulated is None else self.accumulated[:1]
        for tensor in (self.copy, *held):
            if tensor is not None:
                tensor.zero_()

    # Under fully_shard, where `.grad` is an ordinary attribute of a DTensor that anybody can set

    def expose_grad(self) -> None:
        """Sets `.grad` to what can be read: FSDP2's sharded parameter has a DTensor of this rank's rows there."""
        self.take_user_grad()
        if self.there and self.view is None:
            self.view = self.sharding.gradient_of(self)  # pyrefly: ignore[missing-attribute]
        self.exposed = self.view if self.there else None
        self.sharding.parameter.grad = self.exposed  # pyrefly: ignore[missing-attribute]

    def take_user_grad(self) -> None:
        """Takes over what somebody has set `.grad` to."""
        if self.sharding is None or self.sharding.parameter.grad is self.exposed:
            return
        self.exposed = given = self.sharding.parameter.grad
        self.set_grad(None if given is None else self.sharding.rows_of(given).detach().clone().float())
        self.expose_grad()

    def backward_runs(self, _: torch.Tensor) -> None:
        """Hook of the layer's ports: what follows when the backward pass has ended."""
        self.state.arrived.append(self)
        torch.autograd.Variable._execution_engine.queue_callback(self.state.backward_ended)

    def keep(self) -> None:
        """Keeps a mean, so that the next backward pass's gradient can be sent alone and its mean added."""
        if self.sharding is None:
            return
        if self.phase is Phase.MEAN:
            # pyrefly: ignore[bad-assignment]
            self.accumulated = self.value(), scaling.dtype_max(scaling.E4M3) / self.scale
        if self.averaged:
            self.set_phase(Phase.NONE)

    def add_mean(self, mean: torch.Tensor, scale: torch.Tensor) -> None:
        """Adds the mean over ranks, fp32 [this rank's rows], with a scale that fits it on all ranks."""
        bound = scaling.dtype_max(scaling.E4M3) / scale
        if self.accumulated is not None:
            before, bound_before = self.accumulated
            mean, bound = mean + before, bound + (scaling.amax(before) if bound_before is None else bound_before)
        self.accumulated = mean, bound
        self.set_phase(Phase.RUNNING)
        if self.state.accumulate == "fp8" or not self.state.more_to_come():
            self.round()

    def nothing_to_add(self) -> None:
        """No rank had a gradient to send."""
        self.set_phase(Phase.NONE if self.accumulated is None else Phase.RUNNING)

    def round(self) -> None:
        """Rounds the running mean to FP8. The scale comes from the bound, so all ranks have the same scale, unless
        somebody has changed the mean."""
        (mean, bound), self.accumulated = self.accumulated, None  # pyrefly: ignore[not-iterable]
        scale = scaling.gradient_scale(scaling.amax(mean) if bound is None else bound)
        self.set_phase(Phase.MEAN, scaling.quantize(mean, scale, scaling.E4M3), scale)


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_ for ordinary and FP8 gradients: one norm and one factor for all of them.

    Returns the norm before clipping, 0-d fp32, NaN or infinite if any gradient is. Only the scale of an FP8 gradient
    changes, not its codes. Finishes outstanding communication first. `foreach` changes nothing. Under O3 and
    fully_shard every rank must call it, as ranks add up their parts.
    """
    if float(norm_type) != 2.0:
        raise ValueError(f"amp8.clip_grad_norm_ knows the 2-norm, norm_type=2.0, not {norm_type}")
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    converted = [linear.gradient for p in parameters if (linear := linear_of(p)) is not None]
    states = {id(gradient.state): gradient.state for gradient in converted}.values()
    for state in states:
        state.finish()
    converted = [gradient for gradient in converted if gradient.pending]
    gradients = [p.grad for p in parameters if linear_of(p) is None and p.grad is not None]
    ordinary = [gradient for gradient in gradients if not hasattr(gradient, "placements")]
    sharded: list[Any] = [gradient for gradient in gradients if hasattr(gradient, "placements")]  # fully_shard's
    shards = [gradient.to_local() for gradient in sharded]
    # pyrefly: ignore[missing-attribute]
    device = next((t.device for t in [*(g.codes for g in converted), *ordinary, *parameters]), torch.device("cpu"))
    parts = norm_of(shards, device)
    if converted:
        found = squares([gradient.codes for gradient in converted])  # pyrefly: ignore[bad-argument-type]
        parts.append(descaled(found, torch.stack([gradient.scale for gradient in converted])))
    groups = [state.group for state in states if state.sharded or state.fsdp_group is not None]
    groups += [gradient.device_mesh.get_group(gradient.device_mesh.ndim - 1) for gradient in sharded]
    if groups:
        sharded_square = torch.stack([torch.zeros((), device=device), *parts]).square().sum()
        for group in dict.fromkeys(groups):
            dist.all_reduce(sharded_square, group=group)
        parts = [sharded_square.sqrt()]
    parts += norm_of(ordinary, device)
    total, factor = clipping(torch.stack(parts) if parts else torch.zeros(1, device=device), max_norm)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"the gradient's norm is {total.item()}: look for the step that made it so, or lower the LR")
    # All at once, because a GPU's host would launch a kernel for each.
    scales = torch._foreach_div([gradient.scale for gradient in converted], factor) if converted else ()
    for gradient, scale in zip(converted, scales, strict=True):
        gradient.scale = scale
    alike: dict[Any, list[torch.Tensor]] = {}
    for gradient in [*ordinary, *shards]:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for kind, some in alike.items():
        torch._foreach_mul_(some, factor.to(*kind))
    return total


def hooks_of(weight: torch.Tensor) -> tuple[tuple[Callable[..., Any], ...], tuple[Callable[..., Any], ...]]:
    """(hooks of the gradient, hooks of the accumulated gradient) that others have registered on a converted weight.
    Autograd never calls them, because the gradient arrives at a port."""
    if type(weight) is not CodedWeight:
        return (), ()
    before, after = weight._backward_hooks, weight._post_accumulate_grad_hooks
    return tuple((before or {}).values()), tuple((after or {}).values())


def norm_of(gradients: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """[the norm of ordinary gradients, in fp32], or nothing where there are none."""
    if not gradients:
        return []
    real = [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in gradients]
    found = torch._foreach_norm([gradient.detach().float() for gradient in real])
    return [torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in found]))]


@compiled_on_cuda
def descaled(squares: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The norm of tensors that are codes / scale, from the sums of squares of their codes."""
    return (squares.sqrt() / scales).square().sum().sqrt()  # the square of a scale may overflow


@compiled_on_cuda
def clipping(norms: torch.Tensor, max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm of tensors with these norms together, the factor that brings it to `max_norm`)."""
    total = norms.square().sum().sqrt()
    return total, (max_norm / (total + 1e-6)).clamp(max=1.0)
