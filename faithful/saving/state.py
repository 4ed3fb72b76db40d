"""The content of a checkpoint: all state that a resumed run needs to be the same run.

It holds what Accelerate's checkpoints hold: all prepared models, optimizers, schedulers and data loaders, the gradient
scaler, registered objects, the step, and random states. Of each rank: its shards of models and optimizers, its random
state, its place in the data. The rest is stored once. Tensors are stored as safetensors, other values as JSON.
"""

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.state import PartialState
from torch import nn

from faithful.checkpoint import checkpoints, tensor_keys
from faithful.disk import names, tensor_files
from faithful.errors import Refused
from faithful.tensors import optimizer_states, random_states
from faithful.tensors.names import fingerprint, parameters_of, unwrapped
from faithful.tensors.serialization import check_like, pack, unpack
from faithful.training import loaders

if TYPE_CHECKING:
    from accelerate.scheduler import AcceleratedScheduler

    from faithful.backends.base import Backend
    from faithful.strategies.base import Strategy
    from faithful.training.model import PreparedModel
    from faithful.training.steps import Steps

STAGED = 64 << 20  # bytes of each of the two buffers through which tensors leave a GPU
PLANNED = ("strategy", "num_processes", "precision", "backend", "level", "fp8_options", "skip", "offload", "compile")


@dataclass(frozen=True)
class RunState:
    """All that a checkpoint holds of a run but random states: what is prepared, and what the script has registered.
    micro: the number of the micro-batch. stopping: whether it is the last one of a run that was told to stop."""

    strategy: "Strategy"
    backend: "Backend"
    models: "list[PreparedModel]"
    optimizers: list[torch.optim.Optimizer]
    schedulers: "list[AcceleratedScheduler]"
    registered: list[Any]
    scaler: torch.amp.GradScaler | None
    epochs: list[loaders.Epoch]
    steps: "Steps"
    micro: int
    stopping: bool

    @property
    def parts_differ(self) -> bool:
        """Whether ranks hold different tensors: shards, or FP8 histories."""
        sharded = any(self.strategy.sharded(prepared.model.parameters()) for prepared in self.models)
        return sharded or (self.backend.codes and PartialState().num_processes > 1)

    def state_dict(self, alone: bool, keeps: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """({name: live tensor} of this rank, JSON values of the run). Every rank calls it, or with `alone` the main
        one. keeps: whether this rank stores what all ranks have alike, see checkpoints.Save."""
        strategy, plan, models = self.strategy, self.strategy.plan, self.models
        parts, loaders_state = loaders.state_dict(self.epochs, self.stopping)
        parts |= {f"random/{name}": state for name, state in random_states.of_process().items()}
        for prepared in [] if alone else models:
            strategy.refuse_apart(prepared.model)
        stored = models if keeps or self.parts_differ else []  # the others hold the same: copies for nothing
        for index, prepared in enumerate(stored):
            for optimizer in prepared.optimizers or [None]:
                held = self.backend.tensors(strategy, prepared.model, optimizer)
                parts |= {tensor_keys.of_model(index) + name: tensor for name, tensor in held.items()}
            if order := strategy.order(prepared.model):
                parts[f"order/{index}"] = torch.tensor(order)
        tensors = {}  # those in the JSON values
        groups = [numbers_of_groups(strategy.torch_optimizer(optimizer)) for optimizer in self.optimizers]
        rest = [rest_of(strategy, optimizer, models) for optimizer in self.optimizers]
        registered = [each.state_dict() for each in self.registered]
        state = {
            "format": checkpoints.FORMAT,
            "plan": {key: getattr(plan, key) for key in PLANNED},
            "steps": {"taken": self.steps.taken, "tried": self.steps.tried, "micro": self.micro},
            "replicas": plan.replicas,
            "models": len(models),
            "moments": [dtypes_of_moments(parts, index) for index in range(len(models))],
            "groups": pack(groups, tensors, "groups"),
            "optimizers": pack(rest, tensors, "optimizers"),
            "schedulers": pack([scheduler.state_dict() for scheduler in self.schedulers], tensors, "schedulers"),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "loaders": loaders_state,
            "alone": alone,
            "registered": pack(registered, tensors, "registered"),
            "extra": pack([extra_state(prepared.model) for prepared in models], tensors, "extra"),
            "cuts": strategy.tp_dims(models[0].model) if models else {},
            "tp": plan.tp_size,
            "sp": plan.sp_size,
        }
        tensors_of_all = parts | tensors
        if odd := [name for name in tensors_of_all if not tensor_files.can_hold(tensors_of_all[name])]:
            tensor = tensors_of_all[odd[0]]
            raise Refused(
                f"save_state: {odd[0]} is {tensor.dtype if tensor.layout == torch.strided else tensor.layout}, which "
                "safetensors does not have: let state_dict() give another dtype, or make a buffer persistent=False"
            )
        return parts | (tensors if keeps else {}), state

    def leave_out(self, numbers: list[int], parts: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Takes the frozen weights of these models out of what `state_dict` has returned, and leaves their hash: a hook
        of the script saves what it needs of them, a LoRA say, and a run that resumes has built the same again."""
        whole = numbers if self.strategy.replicates and not self.backend.codes else []
        for index, model in ((index, self.models[index].model) for index in whole):
            places = [tensor_keys.of_model(index) + tensor_keys.weight(name) for name in frozen_weights(model)]
            if {*places} & parts.keys() and (hashed := fingerprint(model, frozen=True)):
                state.setdefault("left_out", {})[str(index)] = hashed
                for place in places:
                    parts.pop(place, None)

    def load(self, folder: Path, note: Callable[[str], None]) -> tuple[int, int]:
        """Restores a checkpoint that `Checkpoints.find` has verified. Every rank calls it. Returns (the number of
        processes that saved it, that of the micro-batch). note: prints and keeps a line."""
        strategy, backend, plan, rank = self.strategy, self.backend, self.strategy.plan, PartialState().process_index
        state = checkpoints.read_state(folder)
        saved_by = state["plan"]["num_processes"]
        any_number = strategy.any_number_of_processes and backend.any_number_of_processes
        fixed = [key for key in PLANNED if key != "num_processes" or not any_number]
        differs = [
            f"{key} {state['plan'][key]} -> {getattr(plan, key)}"
            for key in fixed
            if state["plan"][key] != getattr(plan, key)
        ]
        for key, size in (("tp", plan.tp_size), ("sp", plan.sp_size)):
            if size != (saved := state.get(key, size)):
                differs.append(f"parallelism_config_{key}_size {saved} -> {size}")
        if differs:
            raise Refused(f"{folder} is of another run: {', '.join(differs)}. Resume as it was, or start anew")
        keeper = state["keeper"]  # who stored, on this disk, what all processes had alike
        writer = rank if rank < (1 if state["alone"] else saved_by) else keeper
        mine, first = checkpoints.tensors_of(folder, writer), checkpoints.tensors_of(folder, keeper)
        keys = ("registered", "groups", "schedulers", "optimizers", "extra")
        registered, groups, schedulers, optimizers, extra = read_values(folder, state, first, keys)
        numbers = {
            "models": (len(self.models), state["models"]),
            "optimizers": (len(self.optimizers), len(groups)),
            "schedulers": (len(self.schedulers), len(schedulers)),
            "registered objects": (len(self.registered), len(registered)),
        }
        if more := compare_numbers(folder, numbers):
            note(more)
        if saved_by == plan.num_processes:
            refuse_other_moments(folder, state, mine if self.parts_differ else first)
        inner = [strategy.torch_optimizer(optimizer) for optimizer in self.optimizers]
        for optimizer, saved in zip(inner, groups, strict=False):
            with loading(folder, "the optimizer"):
                check_like(numbers_of_groups(optimizer), saved, "param_groups")
                if any("params" in values for values in saved):
                    raise ValueError("params in param_groups would take the place of the model's")
        for target, value in zip(self.registered, registered, strict=True):
            load_into(folder, target, value)  # first, so that an error here leaves the run unchanged
        for index, prepared in enumerate(self.models):
            saved = checkpoints.tensors_of(folder, writer if self.parts_differ else keeper, tensor_keys.of_model(index))
            if saved_by != plan.num_processes:
                others = range(saved_by // state["replicas"])
                saved = [checkpoints.tensors_of(folder, other, tensor_keys.of_model(index)) for other in others]
            if wanted := state.get("left_out", {}).get(str(index)):
                if fingerprint(prepared.model, frozen=True) != wanted:
                    raise Refused(
                        f"{folder} has no frozen weights (a hook left them out), and this model has others: load those"
                    )
                here = {tensor_keys.weight(name): weight for name, weight in frozen_weights(prepared.model).items()}
                saved = collections.ChainMap(cast(Any, saved), here)
            for optimizer in prepared.optimizers or [None]:
                backend.restore(strategy, prepared.model, optimizer, saved)
            if f"order/{index}" in first:
                with loading(folder, "the order of gradients"):
                    strategy.restore_order(prepared.model, first[f"order/{index}"].long().flatten().tolist())
        for prepared, saved in zip(self.models, extra, strict=False):
            modules = dict(unwrapped(prepared.model).named_modules())
            for name, value in saved.items():
                with loading(folder, f"the model's {name}"):
                    modules[name].set_extra_state(value)
        for optimizer, saved in zip(inner, optimizers, strict=False):
            with loading(folder, "the optimizer"):
                restore_rest(optimizer, saved)
        for optimizer, saved in zip(inner, groups, strict=False):
            for group, values in zip(optimizer.param_groups, saved, strict=True):
                group.update(values)
        for scheduler, saved in zip(self.schedulers, schedulers, strict=False):
            load_into(folder, getattr(scheduler, "scheduler", scheduler), saved)
        if self.scaler is not None and state["scaler"]:
            with loading(folder, "the gradient scaler"):
                check_like(self.scaler.state_dict(), state["scaler"], "scaler")
                self.scaler.load_state_dict(state["scaler"])
                if not self.scaler.get_scale() > 0:  # each step would be skipped
                    raise ValueError(f"its scale is {self.scaler.get_scale()}")
        self.steps.taken, self.steps.tried = state["steps"]["taken"], state["steps"]["tried"]
        if rank < saved_by:
            with loading(folder, "a data loader"):
                loaders.load_state_dict(self.epochs, mine, state["loaders"])
        if rank < (1 if state["alone"] else saved_by):  # other ranks keep their own random state
            with loading(folder, "the random generators"):
                random_states.set_process(checkpoints.tensors_of(folder, writer, "random/"))
        return saved_by, state["steps"]["micro"]


@contextlib.contextmanager
def loading(folder: Path, what: str) -> Iterator[None]:
    """Turns an error of what a checkpoint holds for `what` into a refusal."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise Refused(
            f"{folder} does not hold the state of {what} ({type(error).__name__}: {said}): take another checkpoint"
        ) from None


def load_into(folder: Path, target: Any, saved: Any) -> None:
    """Loads what a registered object or a scheduler has saved. torch's are checked first: no step makes their states
    longer. A class of the script's judges for itself, and its errors are the script's."""
    if not type(target).__module__.startswith("torch."):
        return target.load_state_dict(saved)
    with loading(folder, f"the script's {type(target).__name__}"):
        here = target.state_dict()
        check_like(here, saved, "state")
        if others := [
            key for key in saved.keys() - here.keys() if hasattr(target, key)
        ]:  # it takes all that it is given
            raise ValueError(f"{names.short(others[0])} is none of its values")
        target.load_state_dict(saved)


def frozen_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in parameters_of(model) if not weight.requires_grad}


def extra_state(model: nn.Module) -> dict[str, Any]:
    """{name of the module: what its own `get_extra_state` returns}, without TransformerEngine's, which its backend
    keeps."""
    return {
        name: module.get_extra_state()
        for name, module in unwrapped(model).named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and not type(module).__module__.startswith("transformer_engine")
    }


def numbers_of_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The param_groups of a torch optimizer, without the parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def host_copy(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the host, in memory of their own. The copies are complete when this returns.

    Those of a GPU come piece by piece through two pinned buffers: one is filled while the other one is emptied. Into
    memory that is not pinned CUDA copies at a fraction of the speed, and waits for each tensor. torch keeps the buffers
    for the next checkpoint.
    """
    copies = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype) if is_staged(tensor) else tensor.to("cpu", copy=True)
        for name, tensor in parts.items()
    }
    staged = [(tensor.detach(), copies[name]) for name, tensor in parts.items() if is_staged(tensor)]
    if not staged:
        return copies
    buffers = [torch.empty(STAGED, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    on_the_way: collections.deque[tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]] = collections.deque()

    def empty_one() -> None:
        arrived, buffer, place = on_the_way.popleft()
        arrived.synchronize()
        place.copy_(buffer)

    for tensor, copy in staged:
        size = STAGED // tensor.itemsize
        for piece, place in zip(tensor.view(-1).split(size), copy.view(-1).split(size), strict=True):
            if len(on_the_way) == len(buffers):
                empty_one()
            buffers.reverse()
            buffer = buffers[0][: piece.nbytes].view(piece.dtype)
            buffer.copy_(piece, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            on_the_way.append((arrived, buffer, place))
    while on_the_way:
        empty_one()
    return copies


def is_staged(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and tensor.is_contiguous()


def rest_of(
    strategy: "Strategy", optimizer: torch.optim.Optimizer, models: "list[PreparedModel]"
) -> dict[str, dict[str, Any]]:
    """The optimizer state that `backend.tensors` leaves out, {position of the parameter: {key: value}}: all of a
    parameter that is in no prepared model; of the others, values that are no tensors (LBFGS has lists). What belongs to
    no parameter has the position ""."""
    in_models = {id(parameter) for prepared in models for parameter in prepared.model.parameters()}
    owned, inner = strategy.parameter_ids(optimizer), strategy.torch_optimizer(optimizer)
    rest, holders = {"": optimizer_states.of_no_parameter(inner)}, optimizer_states.optimizers_in(inner)
    for at, parameter in enumerate(parameters_in(inner)):
        if id(parameter) in owned:  # under ZeRO the inner optimizer updates DeepSpeed's flat copies
            in_a_model, state = id(parameter) in in_models, optimizer_states.states_of(holders, parameter)
            rest[str(at)] = {key: value for key, value in state.items() if not (in_a_model and torch.is_tensor(value))}
    return {at: state for at, state in rest.items() if state}


def parameters_in(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def dtypes_of_moments(parts: dict[str, torch.Tensor], index: int) -> dict[str, str]:
    """{place: dtype} of the optimizer's state of a prepared model in `parts`, {name: tensor}."""
    prefix = tensor_keys.of_model(index) + tensor_keys.OPTIMIZER
    return {name: str(tensor.dtype) for name, tensor in parts.items() if name.startswith(f"{prefix}/")}


def refuse_other_moments(folder: Path, state: dict[str, Any], parts: tensor_files.TensorFile) -> None:
    """Raises Refused unless the rank's file has each tensor of the optimizer's state that the main process has saved: a
    parameter without any would begin anew in silence."""
    for index, wanted in enumerate(state["moments"]):
        saved = tensor_files.dtypes(parts, tensor_keys.of_model(index) + tensor_keys.OPTIMIZER)
        if wrong := sorted(saved.items() ^ wanted.items()):
            raise Refused(
                f"{folder}: {wrong[0][0].partition(':')[2]} of the optimizer's state is not what was saved: take "
                "another checkpoint"
            )


def read_values(
    folder: Path, state: dict[str, Any], tensors: Mapping[str, torch.Tensor], keys: Iterable[str]
) -> list[Any]:
    """The values of these keys of the state, as `pack` was given them. Raises Refused if they are damaged."""
    try:
        return [unpack(state[key], tensors) for key in keys]
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        kind = type(error).__name__
        raise Refused(f"{folder / checkpoints.STATE} is damaged ({kind}: {error}): take another checkpoint") from None


def compare_numbers(folder: Path, numbers: dict[str, tuple[int, int]]) -> str | None:
    """Raises Refused if the checkpoint lacks what the script has prepared. Returns a note of what it holds in addition,
    or None: a script that evaluates needs no optimizer. numbers: {what: (number in the script, in the checkpoint)}"""
    lacks = [
        f"{saved} {what}, the script has {here}"
        for what, (here, saved) in numbers.items()
        if here > saved or (here != saved and what == "registered objects")
    ]
    if lacks:
        raise Refused(f"{folder} holds {'; '.join(lacks)}: resume with the script as it was")
    more = [f"{saved - here} {what}" for what, (here, saved) in numbers.items() if saved > here]
    return f"{folder} also holds {', '.join(more)} that the script has not prepared: not loaded" if more else None


def restore_rest(optimizer: torch.optim.Optimizer, saved: dict[str, dict[str, Any]]) -> None:
    """Loads what `rest_of` returned."""
    parameters, holders = parameters_in(optimizer), optimizer_states.optimizers_in(optimizer)
    optimizer_states.restore_of_no_parameter(optimizer, saved.pop("", {}))
    for at, values in saved.items():
        parameter = parameters[int(at)]
        on_device = {k: v.to(parameter.device) if torch.is_tensor(v) and v.dim() else v for k, v in values.items()}
        for each, kept in optimizer_states.by_optimizer(holders, on_device):
            each.state[parameter] = {**each.state.get(parameter, {}), **kept}
