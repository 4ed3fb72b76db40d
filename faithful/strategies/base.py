"""What a run asks of its strategy, with the answers of plain torch: every process holds whole tensors."""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from accelerate.state import PartialState
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from torch.distributed.tensor import DTensor

from faithful.checkpoint import tensor_keys
from faithful.errors import Refused, explained
from faithful.strategies import guard
from faithful.tensors import optimizer_states
from faithful.tensors.names import local, parameters_of, plain_names, shard_of, unwrapped

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import AutocastKwargs, GradScalerKwargs

    from faithful.disk.tensor_files import TensorFile
    from faithful.plan import Plan

Saved = Mapping[str, torch.Tensor] | list["TensorFile"]  # what `restore` loads
Pieces = dict[str, tuple[torch.Tensor, Callable[[], torch.Tensor]]]  # see Strategy.pieces


SAVED = ("weight", "optimizer", "counter", "class")  # the kinds of Shard that a checkpoint holds
SAME_NORM = 1 + 1e-5  # largest ratio of equal norms: machines may compute, or sum, in a different order


class Shard(NamedTuple):
    """A live tensor that this process holds of a parameter: all of it, or its shard.

    kind: `weight`; `gradient`; `master`, a copy in higher precision, which is then what the optimizer updates;
    `gathered`, full weights in addition to shards; `optimizer`, a state of the optimizer; `counter`, a state without
    dimensions; or `class`, the form of a state that is no plain tensor like its weight (optimizer_states.py).
    key: of the optimizer's state, such as exp_avg; else None.
    """

    kind: str
    name: str
    key: str | None
    tensor: torch.Tensor

    @property
    def place(self) -> str:
        """The name in a checkpoint of what the optimizer updates, and of its state."""
        return tensor_keys.state(self.name, self.key) if self.key else tensor_keys.weight(self.name)


@dataclass(frozen=True)
class Session:
    """What a strategy sees of the run that it is in."""

    plan: "Plan"
    device: torch.device
    rank: int
    is_main: bool
    note: Callable[[str], None]  # prints and keeps a line
    autocast: "AutocastKwargs | None"  # the script's
    scaling: "GradScalerKwargs | None"  # the script's
    split_batches: bool  # whether the processes share each batch of a loader


class Accelerates(NamedTuple):
    """Accelerate's own functions."""

    prepare: Callable[..., Any]
    prepare_optimizer: Callable[[torch.optim.Optimizer], Any]


class Engine(NamedTuple):
    """What takes the steps in place of torch's optimizer. The Accelerator calls these."""

    backward: Callable[..., None]
    step: Callable[[], None]
    drop_gradients: Callable[[bool], None]
    scaler: Any  # with the interface of torch's GradScaler, or None


class Strategy:
    """How a model is distributed over the processes. A subclass overrides what differs from one process of torch's. If
    it keeps gradients outside `.grad`, it is a GradientsElsewhere too.

    The methods stand in the order in which a run calls them. `optimizer` is the script's own before `prepare`, and the
    prepared one afterwards.
    """

    distributed_types: tuple[str, ...] = ()  # names of the DistributedTypes that Accelerate may use
    replicates = False  # whether each process holds the whole model in plain torch, as one device and DDP do
    fully_shards = False  # whether each process holds a shard of every parameter, as FSDP2's `fully_shard` makes them
    must_shard = False  # whether a run in which nothing is sharded is refused
    # keys of bytes_per_parameter
    sharded_kinds: tuple[str, ...] = ("weight", "gradient", "gathered", "master", "optimizer")
    same_batch = False  # whether all processes compute the same batch
    exchanges_in_passes = False  # whether processes exchange in each pass, so that all need the same number of them
    keeps_masters = False  # whether the optimizer updates fp32 copies of the weights, whatever dtype the model has
    model_keeps_run = True  # whether a prepared model keeps its Accelerator: a script may drop that, and train on
    mixes_dtensors = False  # whether a model has both DTensors and tensors, which torch does not clip together
    any_number_of_processes = False  # whether `restore` also takes a list, the tensors of each process that saved
    errors: Mapping[str, str] = {}  # {pattern of a library's error: what it says of the script}, see errors.explained

    def __init__(self, plan: "Plan") -> None:
        self.plan = plan

    # ---- the launch ----

    def arguments(self, scaling: "GradScalerKwargs | None") -> dict[str, Any]:
        """Arguments that the plan adds to `Accelerator(...)`. scaling: the script's."""
        return {}

    def started(self, session: Session) -> torch.amp.GradScaler | None:
        """Called when Accelerate has started. Returns a gradient scaler, if Accelerate's does not do."""

    # ---- preparing ----

    def real(self, session: Session, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of `accelerator.prepare`, with real objects in place of those that only a config describes."""
        return args

    def has_split(self, model: nn.Module) -> bool:
        """Whether the script's model is distributed already, as this strategy would do it."""
        return False

    def before_prepare(self, session: Session, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Called before `accelerator.prepare`, to change the model. optimizer: its, or None if it comes later."""

    def after_convert(self, session: Session, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Called when the backend has converted the model's layers, before `accelerator.prepare`."""

    def prepare(
        self, session: Session, accelerates: Accelerates, args: tuple[Any, ...], device_placement: list[bool] | None
    ) -> tuple[Any, ...]:
        """Calls Accelerate's `prepare`, here once for all `args`. Returns a tuple as long as `args`."""
        prepared = accelerates.prepare(*args, device_placement=device_placement)
        return prepared if len(args) > 1 else (prepared,)

    def after_prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine | None:
        """Called with the prepared model and optimizer, to change them. Returns the Engine that takes the steps, if
        the optimizer does not."""

    def need_both(self, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
        """The optimizer, for strategies that need it and its model in one call. Raises Refused if there is none."""
        if optimizer is None:
            raise Refused(
                f"{self.plan.strategy} {self.plan.precision} needs a model and its optimizer in one call: "
                "accelerator.prepare(model, optimizer, ...)"
            )
        return optimizer

    def refuse_state(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Raises Refused if one of the script's optimizers has state already, and its parameters are to be sharded."""
        fresh = [optimizer for optimizer in optimizers if not getattr(optimizer, "_is_accelerate_prepared", False)]
        for optimizer in fresh:
            if not self.replicates and optimizer.state:
                raise Refused(
                    f"{type(optimizer).__name__} has state before it is prepared, which {self.plan.strategy} cannot "
                    "shard: prepare it first, then load its state, or, if it has it from the start, use a ddp config"
                )

    def refuse_order(self, model: nn.Module, optimizer: "AcceleratedOptimizer") -> None:
        """Raises Refused if the processes go through the weights in other orders, and exchange parts of them in an
        update, to have whole matrices perhaps, or draw random numbers for their rounding. Called with each prepared
        optimizer."""
        if self.plan.level:
            guard.refuse_other_order(model, optimizer.optimizer, "MS-AMP's levels")
        elif not self.replicates and not guard.updates_elements(optimizer.optimizer):
            guard.refuse_other_order(model, optimizer.optimizer, self.plan.strategy)

    def free(self) -> None:
        """Called by `accelerator.free_memory`, to let go of what this strategy holds of the models."""

    def dropped(self, models: list[nn.Module]) -> None:
        """Called when the script has dropped its Accelerator, which held these, and with it the optimizer."""

    # ---- steps ----

    def requires_grad_changed(self, model: nn.Module) -> None:
        """Called before a training forward pass of a prepared model, if the script has changed `requires_grad` of its
        parameters since the one before."""

    def take_written(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Called before each update, before the norm of the gradients is computed. Takes what the script has written
        into the parameters and `.grad`, where the optimizer updates other tensors."""

    def refuse_between_passes(self, models: list[nn.Module], clips: bool) -> None:
        """Raises Refused where the script clips gradients, or else gives them up, that are not averaged yet, and the
        engine has them where this changes nothing."""

    def refuse_metrics(self) -> None:
        """Raises Refused if what a script computes now is no batch that counts once, as gather_for_metrics counts."""

    def used(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bool]:
        """Which parameters have a gradient in this process before an update, if the engine needs the same in all."""
        return []

    # ---- what is held ----

    def torch_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The torch optimizer inside a prepared one."""
        return torch_optimizer(optimizer)

    def parameter_ids(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """The ids of the parameters that the optimizer updates, on any process."""
        return parameter_ids(optimizer)

    def not_averaged(self, optimizer: torch.optim.Optimizer, prepared: set[int]) -> set[int]:
        """Those of `parameter_ids` whose gradients are not averaged over the processes. prepared: the ids of the
        parameters of all prepared models."""
        return self.parameter_ids(optimizer) - prepared

    def shape_of(self, parameter: nn.Parameter) -> torch.Size:
        """The shape of the whole parameter."""
        return parameter.shape

    def sharded(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether this process holds only shards of `parameters`."""
        return any(isinstance(p, DTensor) and local(p).numel() < p.numel() for p in parameters)

    def units(self, model: nn.Module) -> int | None:
        """How many units of parameters are gathered one by one, or None if none are."""
        return None

    def how_sharded(self, model: nn.Module, record: dict[str, Any]) -> str:
        """The words of the summary line for a sharded model. record: the evidence, counted."""
        return ", sharded"

    def counted(self, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """The {name: parameter} that this process counts. One process counts a parameter that several hold whole."""
        return parameters

    def shards(self, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer | None) -> Iterator[Shard]:
        """Yields a Shard for each tensor that this process holds of `parameters`, {name: parameter}, of their gradients
        and of their state in `optimizer`, which may be None. Evidence adds them up, a checkpoint is made of them."""
        holders = optimizer_states.optimizers_in(self.torch_optimizer(optimizer)) if optimizer else {}
        for name, parameter in parameters.items():
            yield Shard("weight", name, None, local(parameter))
            of_a_level = hasattr(getattr(parameter, "_local_tensor", parameter), "amp8_linear")
            if parameter.grad is not None and not of_a_level:  # whose gradient the backend knows
                yield Shard("gradient", name, None, local(parameter.grad))
            for key, value in optimizer_states.states_of(holders, parameter).items():
                if torch.is_tensor(value):
                    for inner, tensor in optimizer_states.parts_of(key, value).items():
                        yield Shard("optimizer" if value.dim() else "counter", name, inner, tensor)
                    if (form := optimizer_states.form_of(value, parameter)) is not None:
                        yield Shard("class", name, f"{key}{optimizer_states.FORM}", form)

    # ---- checkpoints and weights ----

    def tensors(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
        """{place in a checkpoint: what this process holds}, live: weights, buffers, the state of the optimizer, if it
        has one."""
        parts, shards = buffers_by_place(model), self.shards(dict(parameters_of(model)), optimizer)
        parts |= {shard.place: shard.tensor for shard in shards if shard.kind in SAVED}
        return {place: tensor.detach() for place, tensor in parts.items()}

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, parts: Saved) -> None:
        """Loads the result of `tensors`, bit for bit. Raises Refused if names or shapes differ from the model's."""
        live, saved = self.tensors(model, None), cast(Mapping[str, torch.Tensor], parts)
        refuse_other_model(live, saved)
        for place, tensor in live.items():
            tensor.copy_(saved[place])
        if optimizer is not None:
            load_state(self.torch_optimizer(optimizer), dict(parameters_of(model)), saved)

    def copies(self) -> int:
        """How often this process has written a whole tensor into shards, by load_state_dict, say."""
        return 0

    def refuse_apart(self, model: nn.Module) -> None:
        """Raises Refused if processes that each hold the whole model hold different ones. Every process calls it."""

    def in_backward(self, models: list[nn.Module]) -> AbstractContextManager[None]:
        """Around backward passes before the first update. Raises Refused if an optimizer steps in one, too early."""
        return nullcontext()

    def order(self, model: nn.Module) -> list[int]:
        """Numbers of the parameters in the order in which their gradients are summed, where it is not fixed."""
        return []

    def restore_order(self, model: nn.Module, order: list[int]) -> None:
        """Sums gradients in the order that `order` returned in the run that is resumed. Every process calls it."""

    def pieces(self, model: nn.Module) -> Pieces | None:
        """{name: (a tensor of its shape and dtype, function that returns the whole tensor on process 0)}, of parameters
        and persistent buffers, of a model that no process holds whole. Every rank calls the functions, in one order.
        None if Accelerate's `get_state_dict` is right."""
        return None

    def tp_dims(self, model: nn.Module) -> dict[str, int | None]:
        """{name: dimension along which tensor parallel splits it, or None}, for readers of a checkpoint."""
        return {}

    def explain(self, error: str) -> Refused | None:
        """A Refused, if a library's error means that the script needs what this strategy does not have; else None."""
        return explained(error, self.errors, strategy=self.plan.strategy)


class GradientsElsewhere(abc.ABC):
    """A second base of a backend or strategy that keeps gradients outside `.grad`."""

    gradients_elsewhere = "gradients"  # what to call them

    @abc.abstractmethod
    def clip_grad_norm_(self, parameters: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clips the gradients by their 2-norm, and returns it as it was before."""

    @abc.abstractmethod
    def norm_of(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """The norm of the gradients of a prepared optimizer in a step in which they are not clipped."""


def autocast_of(session: Session) -> torch.autocast:
    """Of a plan in 16 bit or FP8."""
    dtype, handler = torch.float16 if session.plan.precision == "fp16" else torch.bfloat16, session.autocast
    return torch.autocast(session.device.type, dtype, **(handler.to_kwargs() if handler else {}))


def compute_in_autocast(session: Session, model: nn.Module) -> None:
    """What Accelerate does under DDP: `model.forward` gets its inputs as they are, computes under autocast, and returns
    fp32."""
    if session.plan.precision == "fp32":
        return
    autocast, forward = autocast_of(session), model.forward
    model._original_forward = forward  # pyrefly: ignore[bad-argument-type]  Accelerate's unwrap_model returns to it
    if isinstance(forward, MethodType):
        model.forward = MethodType(convert_outputs_to_fp32(autocast(forward.__func__)), model)
    else:
        model.forward = convert_outputs_to_fp32(autocast(forward))


def needs_whole_model(error: str) -> Refused | None:
    """A Refused for Accelerate's LocalSGD, which takes no shards; else None."""
    text = (
        "LocalSGD lets each process train a model of its own for some steps, but under FSDP2 and ZeRO no "
        "process has a whole model: leave it out, or use a single config"
    )
    return explained(error, {"LocalSGD is supported only": text})


# torch's errors where DTensors and whole tensors meet in one operation, or where it would have to put shards together
OF_SHARDS = {
    r"Operator c10d\.\S+ does not have a sharding strategy": (
        "the script exchanges a sharded tensor over the processes (accelerator.reduce or gather), which torch's shards "
        "do not allow: gradients are averaged already, and x.full_tensor() is the whole of one in all processes"
    ),
    "unbind along the sharded dimension|not supported with DTensor|no valid sharding strategy": (
        "the script uses a sharded tensor in a way that torch's shards do not have ({first}): read it by an index, as "
        "weight[i], or use a ddp config"
    ),
    "in-place operations that require placement changes": (
        "the script, or its optimizer, computes with sharded weights in a way that torch's shards do not have ({first} "
        "in place of a sum or norm): use another optimizer, or a ddp config"
    ),
    "got mixed torch.Tensor and DTensor|on inputs with different meshes|remove or reshape sharded dimension": (
        "the script computes with sharded weights and whole tensors together, which FSDP2 does not allow: perhaps in "
        "its optimizer, in a copy or average of the weights (EMA; give it accelerator.get_state_dict(model)), or where "
        "it calls a part or method of the model, as generate() or model.forward(x), and not the model itself: use a "
        "ddp config, or zero2 if it trains by such calls"
    ),
}


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of a DTensor, whose shards may be on the host; another as it is. Every process calls it."""
    # pyrefly: ignore[missing-attribute]
    return tensor.to(PartialState().device).full_tensor() if isinstance(tensor, DTensor) else tensor


def torch_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def compile_for_this_rank(session: Session, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Keeps compiled code of other ranks and low-bit optimizers out of this one. torch's cache on disk knows a DTensor
    by its whole shape, not by its shard or its class: uneven shards would crash, or weights stay as they are."""
    config, tag = torch.compiler.config, f"rank {session.rank} of {session.plan.num_processes}"
    if optimizer is not None and type(optimizer).__module__.startswith("torchao."):
        tag = f"with {type(optimizer).__name__}"
    if tag not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {tag}".lstrip()


def parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def has_parameters(module: nn.Module) -> bool:
    """A loss, as nn.MSELoss, has none."""
    return next(nn.Module.parameters(module), None) is not None


def buffers_by_place(model: nn.Module) -> dict[str, torch.Tensor]:
    """{place: this process's part} of the persistent buffers."""
    kept = persistent_buffers(unwrapped(model))
    return {tensor_keys.buffer(name): local(buffer) for name, buffer in plain_names(kept)}


def persistent_buffers(model: nn.Module, once: bool = True) -> list[tuple[str, torch.Tensor]]:
    """once: a buffer that modules share has one name; else all, as in a state dict."""
    modules = list(model.named_modules(remove_duplicate=once))
    derived = {f"{at}.{name}".lstrip(".") for at, module in modules for name in module._non_persistent_buffers_set}
    return [(name, buffer) for name, buffer in model.named_buffers(remove_duplicate=once) if name not in derived]


def refuse_other_model(live: dict[str, torch.Tensor], parts: Mapping[str, torch.Tensor]) -> None:
    """Raises Refused unless the checkpoint's tensors have the names, shapes and dtypes of this model's tensors."""
    saved = {place for place in parts if tensor_keys.kind(place) != tensor_keys.OPTIMIZER}
    wrong = sorted(live.keys() ^ saved) or [place for place in live if kind_of(live[place]) != kind_of(parts[place])]
    if wrong:
        raise Refused(
            f"the checkpoint is of another model: {', '.join(wrong[:3])}, ... differ. Build the model as it was"
        )


def kind_of(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def load_state(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], parts: Mapping[str, torch.Tensor]
) -> None:
    """Loads the optimizer state of `parameters`, {name: parameter}, from a checkpoint. State of others stays. Tensors
    that are there already are filled, because a second copy of them may not fit in memory."""
    holders = optimizer_states.optimizers_in(optimizer)
    states: dict[torch.optim.Optimizer, dict[nn.Parameter, dict[str, torch.Tensor]]] = {}
    for name, parameter in parameters.items():
        prefix, held = tensor_keys.state(name, ""), optimizer_states.states_of(holders, parameter)
        values = {
            place.removeprefix(prefix): filled(held.get(place.removeprefix(prefix)), parts[place])
            for place in parts
            if place.startswith(prefix)
        }
        for key, value in values.items():
            refuse_other_shape(optimizer, tensor_keys.state(name, key), value, local(parameter))
        values = optimizer_states.put_together(values, parameter)
        for each, kept in optimizer_states.by_optimizer(holders, values):
            states.setdefault(each, {})[parameter] = kept
    for each, kept in states.items():
        if "state" in (before := each.state_dict()):
            index = {p: i for i, p in enumerate(p for group in each.param_groups for p in group["params"])}
            new = {index[parameter]: values for parameter, values in kept.items() if parameter in index}
            groups = each.param_groups
            each.load_state_dict({"state": before["state"] | new, "param_groups": before["param_groups"]})
            if "param_groups" in vars(each):  # torch makes new ones, which an optimizer around it would not share
                each.param_groups = groups
        else:  # it has a form of its own
            for parameter, values in kept.items():
                each.state[parameter] = {k: v.to(parameter.device) if v.dim() else v for k, v in values.items()}


def refuse_other_shape(
    optimizer: torch.optim.Optimizer, place: str, value: torch.Tensor, parameter: torch.Tensor
) -> None:
    """Raises Refused if the state of a parameter has another shape than torch's optimizers give it: that of the
    parameter, or none, but for Adafactor's rows and columns and LBFGS's vectors of all parameters."""
    others = isinstance(optimizer, torch.optim.Adafactor | torch.optim.LBFGS)
    of_torch = type(optimizer).__module__.startswith("torch.optim.") and not others
    if of_torch and value.dim() and value.shape != parameter.shape:
        raise Refused(
            f"the checkpoint is of another model: {place} is {list(value.shape)} there, and the parameter here is "
            f"{list(parameter.shape)}. Build the model as it was"
        )


def filled(held: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """`value`, in the memory of `held` if that is a plain tensor of its kind, else in memory of its own."""
    shard = shard_of(held)
    if type(shard) is torch.Tensor and (shard.shape, shard.dtype) == (value.shape, value.dtype):
        return shard.copy_(value)
    return value.clone()
