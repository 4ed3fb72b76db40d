"""Whether an optimizer updates each element of the weights by itself, which is what ZeRO needs.

Under ZeRO each process gives the optimizer flat parts of the weights. SGD and Adam do not notice. LAMB, LARS, Muon,
Adafactor, Shampoo, Prodigy and those that clip each layer look at a whole matrix, or at the whole model: on flat parts
they are other optimizers. Their names do not say it, so the optimizer itself is asked: copies of it, with the same
options, update small tensors, once whole and once as the processes would have them.
"""

import collections
import contextlib
import copy
import math
from collections.abc import Callable, Container, Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
ByGroup = Mapping[int, Sequence[torch.Tensor]]  # {index of a group: its parameters, or a tensor for each}
Shapes = Sequence[tuple[int, ...]]
Kept = int | float | torch.Tensor
# What multiplies the gradients of each step. Clipping has to begin and to end, and Prodigy, LAMB and SOAP take their
# first steps as Adam does.
SCALES = (1.0, 1.0, 30.0, 0.01, 1.0, 3.0)
# Of the tensors, by their number of dimensions. Matrices of the second row are so large that Adafactor factors them,
# and halves of them have whole blocks of low-bit states.
SHAPES = (((), (6,), (6, 8), (4, 6, 2), (4, 6, 2, 2)), ((), (6,), (128, 160), (16, 32, 2), (16, 32, 2, 2)))
LR = 0.01  # of all copies, because a warm-up may begin with 0
# Of the largest change of a weight. An element goes through some ten operations in each of the steps, each of which
# rounds to 6e-8 of it where the optimizer computes in fp32. A norm of half a matrix is another one by tens of percent.
BOUND = 1e-4


def differs(
    optimizer: Optimizer, device: torch.device, processes: int, stage: int = 2, large: Container[int] = ()
) -> bool:
    """Whether `optimizer`, a torch.optim.Optimizer, updates whole tensors otherwise than their flat parts, of which
    each of `processes` has one. Changes neither it nor the random generators. Raises what it raises if a copy of it
    can't be made, or can't step.

    stage: stage 3 calls `step` once for each group; for those whose index is in `large`, once for each part of it.
    """
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type), torch.enable_grad(), eager():
        return any(tried(optimizer, device, min(processes, 2), stage, large, shapes) for shapes in SHAPES)


def tried(
    optimizer: Optimizer, device: torch.device, count: int, stage: int, large: Container[int], shapes: Shapes
) -> bool:
    """`differs` for tensors of these shapes and `count` processes."""
    wholes, kept = whole_tensors(optimizer, shapes, device), kinds(optimizer)
    of_one = Trial(optimizer, {at: wholes[at] for at in kept})
    of_all = [Trial(optimizer, {at: [parts(t, count)[i] for t in wholes[at]] for at in kept}) for i in range(count)]
    for step, scale in enumerate(SCALES):
        draws = torch.Generator().manual_seed(step)
        of_one.gradients = {at: [gradient(p, step, scale, draws) for p in ps] for at, ps in of_one.parameters.items()}
        of_one.step()
        for i, trial in enumerate(of_all):
            trial.gradients = {at: [parts(g, count)[i] for g in gs] for at, gs in of_one.gradients.items()}
            try:
                for turn in trial.turns(large) if stage == 3 else [None]:
                    trial.step(turn)
            except Exception:  # Muon's, say, which takes only matrices
                return True
        if not same(of_one, of_all, wholes):
            return True
    return False


def numbers_differ(optimizer: Optimizer, device: torch.device, world: int, rank: int) -> bool:
    """Whether the optimizer computes other numbers for its groups (a learning rate of its own) from shards than from
    whole tensors, as Prodigy does: `item()` of a sum over a shard is that of this process. Every process has to call
    it. Errors count as no: they end the run in its first step."""
    mesh = init_device_mesh(device.type, (world,))
    shapes = (), (4 * world,), (4 * world, 8), (4 * world, 6, 2), (4 * world, 6, 2, 2)

    def shard(tensor: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(tensor.chunk(world)[rank].clone(), mesh, [Shard(0)]) if tensor.dim() else tensor

    with (
        torch.random.fork_rng([], device_type=device.type),
        torch.enable_grad(),
        eager(),
        contextlib.suppress(Exception),
    ):
        wholes, kept = whole_tensors(optimizer, shapes, device), kinds(optimizer)
        one = Trial(optimizer, {at: wholes[at] for at in kept})
        other = Trial(optimizer, {at: [shard(tensor) for tensor in wholes[at]] for at in kept})
        for step, scale in enumerate(SCALES):
            draws = torch.Generator().manual_seed(step)
            one.gradients = {at: [gradient(p, step, scale, draws) for p in ps] for at, ps in one.parameters.items()}
            other.gradients = {at: [shard(g) for g in gs] for at, gs in one.gradients.items()}
            one.step()
            other.step()
        return not all(close(value, other.values()[name]) for name, value in one.values().items())
    return False


class Trial:
    """A copy of an optimizer, without its state, that updates `tensors`, {index of a group: [tensor]}."""

    def __init__(self, optimizer: Optimizer, tensors: ByGroup) -> None:
        self.parameters = {at: [torch.nn.Parameter(t.clone()) for t in each] for at, each in tensors.items()}
        self.optimizer = copied(optimizer, self.parameters)
        self.gradients: ByGroup = {}
        self.groups = dict(zip(self.parameters, self.optimizer.param_groups, strict=True))
        if callable(train := getattr(self.optimizer, "train", None)):  # of schedule-free optimizers
            train()

    def turns(self, large: Container[int]) -> list[ByGroup]:
        """The calls of `step` under stage 3, each a {index of a group: its parameters}. The second call for a large
        group has none here, which is enough for what an optimizer counts itself."""
        return [{at: each} for at, each in self.parameters.items()] + [{} for at in self.parameters if at in large]

    def step(self, turn: ByGroup | None = None) -> None:
        """turn: the parameters of this call, or None for all."""
        for at, group in self.groups.items():
            group["params"] = list(self.parameters[at]) if turn is None else list(turn.get(at, []))
            for parameter, value in zip(self.parameters[at], self.gradients[at], strict=True):
                parameter.grad = value.clone()
        self.optimizer.step()
        for at, group in self.groups.items():
            group["params"] = list(self.parameters[at])

    def values(self) -> dict[str, Kept]:
        """The numbers of the groups, and of the optimizer itself, by name."""
        groups = {f"{at}.{name}": value for at, group in self.groups.items() for name, value in group.items()}
        values = {name: value for name, value in vars(self.optimizer).items() if name not in ("state", "param_groups")}
        return {name: v for name, v in (groups | values).items() if isinstance(v, int | float | torch.Tensor)}


def copied(optimizer: Optimizer, parameters: ByGroup) -> Optimizer:
    """A copy of the optimizer, and of those inside it, with the groups and `parameters` of a Trial, without state."""
    memo: dict[int, Any] = {}
    all_of_them = inside(optimizer)
    for one in all_of_them:
        memo[id(one)] = object.__new__(type(one))
        if isinstance(vars(one).get("state"), dict):
            memo[id(one.state)] = collections.defaultdict(dict)
        for at, group in enumerate(one.param_groups):
            mine = parameters.get(at, [])
            like = {parameter.dim(): new for parameter, new in zip(representatives(group), mine, strict=False)}
            memo |= {id(parameter): like.get(parameter.dim()) for parameter in group["params"]}
    for one in all_of_them:
        for at, group in enumerate(one.param_groups):
            if id(group) not in memo:
                options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
                memo[id(group)] = copy.deepcopy(options, memo) | {"params": list(parameters.get(at, []))}
                if options.get("lr") is not None:
                    memo[id(group)]["lr"] = torch.tensor(LR) if torch.is_tensor(options["lr"]) else LR
        memo.setdefault(id(one.param_groups), [memo[id(one.param_groups[at])] for at in parameters])
        for module in of_kind(one, torch.nn.Module):  # what is frozen is not copied
            for parameter in module.parameters():
                memo.setdefault(id(parameter), parameter)
    for one in all_of_them:
        new = memo[id(one)]
        for name, value in vars(one).items():
            if name.endswith("_hooks"):  # of the script; ZeRO refuses those of steps
                vars(new)[name] = collections.OrderedDict()
            elif name == "step":
                new.step = MethodType(function_of(value), new)
            else:
                vars(new)[name] = copy.deepcopy(value, memo)
    return memo[id(optimizer)]


def inside(optimizer: Optimizer) -> list[Optimizer]:
    """[the optimizer, those that it wraps]."""
    found = [optimizer]
    for one in found:  # grows
        found += [new for new in of_kind(one, Optimizer) if not any(new is other for other in found)]
    return found


def of_kind(optimizer: Optimizer, kind: type[T]) -> list[T]:
    """The objects of a class among the attributes of an optimizer, and in lists among them."""
    values = [value if isinstance(value, list | tuple) else [value] for value in vars(optimizer).values()]
    return [value for several in values for value in several if isinstance(value, kind)]


def function_of(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a `step` that was set on an optimizer: by a method of its own, or by torch's schedulers, which
    count its calls."""
    while hasattr(step, "_wrapped_by_lr_sched"):
        step = step.__wrapped__  # pyrefly: ignore[missing-attribute]
        if not isinstance(step, MethodType):
            return step
    if not isinstance(step, MethodType):
        raise TypeError("its step was replaced by a function")
    return step.__func__


def kinds(optimizer: Optimizer) -> list[int]:
    """The indices of the groups to be tried: the first two with the same options and dimensions, not of all layers."""
    seen, kept = collections.Counter(), []
    for at, group in enumerate(optimizer.param_groups):
        ignored = ("params", "param_names", "lr", "initial_lr")
        options = {name: value for name, value in group.items() if name not in ignored}
        key = repr((options, [parameter.dim() for parameter in representatives(group)]))
        seen[key] += 1
        kept += [at] if seen[key] <= 2 and group["params"] else []
    return kept


def representatives(group: dict[str, Any]) -> list[torch.Tensor]:
    """[the first parameter of each number of dimensions]."""
    return list({parameter.dim(): parameter for parameter in reversed(group["params"])}.values())


def whole_tensors(optimizer: Optimizer, shapes: Shapes, device: torch.device) -> dict[int, list[torch.Tensor]]:
    """{index of a group: [a tensor for each of its `representatives`]}, in fp32 as ZeRO's masters."""
    draws = torch.Generator().manual_seed(len(SCALES))
    return {
        at: [torch.randn(shapes[min(p.dim(), 4)], generator=draws).to(device) for p in representatives(group)]
        for at, group in enumerate(optimizer.param_groups)
    }


def gradient(weight: torch.Tensor, step: int, scale: float, generator: torch.Generator) -> torch.Tensor:
    """A gradient that keeps its direction for the most part, and that is larger in one half than in the other. In every
    second step it is orthogonal to each row of the weights, as AdamP expects it before a normalization."""
    noise = torch.randn(weight.shape, generator=generator).to(weight.device)
    one_sided = torch.linspace(0.2, 4, weight.numel(), device=weight.device)
    made = scale * (1 + noise) * one_sided.view(weight.shape)
    if step % 2 and weight.dim() > 1:
        rows, along = made.flatten(1), weight.detach().flatten(1)
        rows -= (rows * along).sum(1, keepdim=True) / along.square().sum(1, keepdim=True) * along
    return made


def parts(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The flat parts of a tensor that `count` processes have. Those of the last may be empty."""
    flat = tensor.detach().flatten()
    size = math.ceil(flat.numel() / count)
    return [flat[i * size : (i + 1) * size] for i in range(count)]


def same(of_one: Trial, of_all: list[Trial], wholes: ByGroup) -> bool:
    """Whether the parts together are the whole: the weights, what the optimizer keeps of each, and its numbers."""
    for at, tensors in of_one.parameters.items():
        for i, whole in enumerate(tensors):
            moved = (whole.detach() - wholes[at][i]).abs().max()
            pieces = [trial.parameters[at][i] for trial in of_all]
            if not close(whole, torch.cat([piece.detach() for piece in pieces]), BOUND * moved):
                return False
            kept = [kept_of(trial, piece) for trial, piece in zip(of_all, pieces, strict=True) if piece.numel()]
            if not fits(kept_of(of_one, whole), kept):
                return False
    numbers = of_one.values()
    for other in (trial.values() for trial in of_all):
        if not all(name in other and close(value, other[name]) for name, value in numbers.items()):
            return False
    return True


def kept_of(trial: Trial, parameter: torch.Tensor) -> list[Kept]:
    """The numbers and plain tensors of a parameter's state."""
    leaves = [leaf for one in inside(trial.optimizer) for leaf in tree_leaves(dict(one.state.get(parameter, {})))]
    return [leaf for leaf in leaves if isinstance(leaf, int | float) or type(leaf) is torch.Tensor]


def fits(whole: list[Kept], pieces: list[list[Kept]]) -> bool:
    """Whether what is kept of a whole tensor is that of its parts: put together, or the same for each."""
    if any(len(piece) != len(whole) for piece in pieces):
        return False
    for one, *others in zip(whole, *pieces, strict=True):
        if all(close(one, other) for other in others):
            continue
        others = [other.flatten() for other in others if torch.is_tensor(other)]
        if not others or not close(one, torch.cat(others)):
            return False
    return True


def close(one: Kept, other: Kept, bound: Kept | None = None) -> bool:
    """Whether two tensors or numbers are equal, to `bound`, by default to BOUND of the largest."""
    one, other = (torch.as_tensor(value).detach().flatten().cpu().double() for value in (one, other))
    if one.numel() != other.numel():
        return False
    if not one.numel() or torch.equal(one, other):
        return True
    largest = BOUND * one.abs().max() if bound is None else bound
    return bool(((one - other).abs() <= float(largest)).all())


def eager() -> contextlib.AbstractContextManager[Any]:
    """Nothing is compiled: that takes longer than a hundred such trials."""
    return torch.compiler.set_stance("force_eager")
