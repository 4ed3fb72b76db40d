"""`initialize` converts an ordinary model and its Adam to one of MS-AMP's levels."""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _find_tensors

from . import scaling
from .choice import Skip, check, check_optimizer, choose, is_conv1d
from .coded import CodesRead
from .comm import BUCKET, Comm, largest, partition
from .compiled import compiled_on_cuda
from .gradients import Rounding, WeightGradient
from .linear import FP8Conv1D, FP8Linear, InputCast
from .optimizer import Adam
from .recipes import TEDelayed, recipe_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from .fsdp import Place


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    opt_level: str = "O2",
    *,
    skip: Skip = (),
    accumulate: str = "high",
    stochastic_rounding: bool = True,
    recipe: str = "msamp",
    recipe_options: dict[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    exact: bool = False,
    bucket_bytes: int = BUCKET,
) -> tuple[nn.Module, Adam | None]:
    """Puts `model` and its `optimizer` on one of MS-AMP's levels; returns (model, optimizer).

    The model stays the same object, converted in place, as do its parameters. The returned optimizer takes over the
    one given, shares its param_groups, and is the one to step from now on. Call it on every rank, before
    DistributedDataParallel wraps the model, then `attach` the wrapped model; but after fully_shard, on an optimizer
    made after it.

    optimizer: torch.optim.Adam or AdamW, or None: `optimizer_of` then takes it later. opt_level: "O1", "O2", "O3".
    skip: names of modules that stay as they are, with all that is in them, or a predicate (name, module) -> bool.
    accumulate: "high" keeps gradients in fp32 between micro-batches, 4 bytes per parameter; "fp8" rounds each sum.
    stochastic_rounding: of weights, masters and moments. False rounds to nearest, as MS-AMP does: then moments stop
    decaying, so that weights without gradient drift, and updates below half of a weight's last bit are lost.
    recipe: how the layers compute, with `recipe_options` (amp8/recipes.py): "msamp", FP8 whose scales of activations
    and output gradients come from a window of 16 with in-time warm-up; "te_delayed", the same with TransformerEngine's
    DelayedScaling; "fp4", MS-AMP's FP4 in the forward product.
    process_group: whose ranks average gradients; None means all ranks, or fully_shard's mesh.
    exact: products in fp32 on dequantised values, for comparisons bit for bit. bucket_bytes: gradients sent at once.

    Raises TypeError for another optimizer, and ValueError for what can't work, such as a model with nothing to convert.
    Levels: FP8-LM (arXiv:2310.18313), section 2.
    """
    check(model, optimizer, opt_level, accumulate)
    state = State(opt_level, accumulate, stochastic_rounding, recipe, recipe_options)
    places: dict[nn.Parameter, Place] = {}  # of weights under fully_shard
    if fsdp_modules(model):
        from . import fsdp  # here, because DTensor takes a second to import

        places = fsdp.managed(fsdp_modules(model))
        fsdp.check(model, places, opt_level, optimizer, process_group)
    layers, state.skipped = choose(model, skip, places)
    if not layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in state.skipped[:3])
        name = type(model).__name__
        raise ValueError(f"amp8 finds no Linear to convert in {name} ({reasons or 'it has none'}): train it in bf16")
    if places:
        state.join_mesh(next(places[layer.weight] for layer in layers.values())[1])
    elif dist.is_available() and dist.is_initialized():
        state.join(process_group)
    owners = owners_of(layers, state)
    for name, layer in layers.items():
        if places:
            # pyrefly: ignore[unbound-name]
            layer.sharding = fsdp.Sharding(layer, places[layer.weight][0], state)
        elif state.world > 1:  # DistributedDataParallel will not see the weight, so can't make it equal
            broadcast(layer.weight, state.group)
        state.layers[name] = convert_layer(layer, name, owners[name], state, exact)
    state.gradients = [layer.gradient for layer in layers.values()]
    if places:
        if state.world * state.replicas > 1:
            # pyrefly: ignore[unbound-name]
            state.comm = fsdp.ShardComm(state.gradients, state.group, state.replica_group, bucket_bytes)
    elif state.group is not None:  # DistributedDataParallel may wrap the model of one process, too
        if state.world > 1:
            state.comm = Comm(state.gradients, state.group, opt_level == "O3", bucket_bytes)
        ours = [f"{name}.weight" for name in layers]
        model._ddp_params_and_buffers_to_ignore = Ignored(ours, model)  # pyrefly: ignore[bad-argument-type]
    model.amp8_state = state  # pyrefly: ignore[bad-argument-type]
    return model, None if optimizer is None else Adam(optimizer, state)


def owners_of(layers: dict[str, Any], state: "State") -> dict[str, int]:
    """{name of a layer: the rank that has its master under O3}. The bytes of what is trained are spread evenly."""
    if state.level != "O3":
        return dict.fromkeys(layers, state.rank)
    trained = {name: layer.weight.numel() for name, layer in layers.items() if layer.weight.requires_grad}
    frozen = {name: layer.weight.numel() for name, layer in layers.items() if name not in trained}
    return partition(trained, state.world) | partition(frozen, state.world)


def convert_layer(layer: Any, name: str, owner: int, state: "State", exact: bool) -> FP8Linear:
    """Turns one layer into an FP8Linear, in place. owner: the rank that keeps its master under O3."""
    keeps_master = state.level == "O3" and owner == state.rank and layer.weight.requires_grad
    layer.name, layer.plain_class = name, type(layer)
    layer.__class__ = converted_class(layer)
    layer.start(state, exact, keeps_master)
    layer.gradient = WeightGradient(layer, owner, state)
    layer.gradient.sharding = layer.sharding
    if layer.weight.requires_grad:
        layer.gradient.refuse_others()
    layer.open_ports()
    return layer


def optimizer_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Adam:
    """Replaces `optimizer` by the Adam of a model that was converted without its optimizer."""
    check_optimizer(optimizer)
    state = state_of(model)
    if state.fsdp_group is not None:
        from . import fsdp

        fsdp.check_parameters(model, optimizer)
    return Adam(optimizer, state)


def fsdp_modules(model: nn.Module) -> "list[FSDPModule]":
    """The modules that fully_shard has wrapped, in order."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [] if module is None else [part for part in model.modules() if isinstance(part, module.FSDPModule)]


def converted_class(layer: nn.Module) -> type[FP8Linear]:
    """FP8Linear or FP8Conv1D, or a subclass of it if fully_shard has already given the module a class of its own."""
    cls = FP8Conv1D if is_conv1d(layer) else FP8Linear
    if not fsdp_modules(layer):
        return cls
    from torch.distributed.fsdp import FSDPModule

    # pyrefly: ignore[missing-attribute]
    return sharded_class(cls, FSDPModule, type(layer).__deepcopy__)


@functools.cache  # one for all layers: compiled blocks are alike only if the classes of their layers are
def sharded_class(cls: type[FP8Linear], fsdp: type, deepcopy: Callable[..., Any]) -> type[FP8Linear]:
    return type(f"FSDP{cls.__name__}", (fsdp, cls), {"__deepcopy__": deepcopy})


@torch.no_grad()
def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sends rank 0's values to all ranks."""
    device = tensor.device
    if device.type == "cpu" and "gloo" not in dist.get_backend(group):
        device = torch.device("cuda", torch.cuda.current_device())
    moved = tensor.detach().to(device).contiguous()
    dist.broadcast(moved, dist.get_global_rank(group, 0), group=group)  # pyrefly: ignore[bad-argument-type]
    tensor.copy_(moved)


class Ignored(list[str]):
    """The names of parameters that DistributedDataParallel does not average. A copy of the model has plain layers, and
    ignores only those that the model ignored before."""

    def __init__(self, ours: list[str], model: nn.Module) -> None:
        self.before = list(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        super().__init__([*self.before, *ours])

    def __deepcopy__(self, memo: dict[int, Any]) -> list[str]:
        return list(self.before)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, (self.before,)


class State:
    """State that the converted layers of one model share, as `model.amp8_state`."""

    def __init__(
        self,
        level: str,
        accumulate: str,
        stochastic_rounding: bool,
        recipe: str,
        recipe_options: dict[str, Any] | None,
    ) -> None:
        self.level, self.accumulate, self.stochastic_rounding = level, accumulate, stochastic_rounding
        self.recipe = recipe_of(recipe, recipe_options or {})
        self.layers: dict[str, FP8Linear] = {}
        self.skipped: list[tuple[str, str]] = []
        self.gradients: list[WeightGradient] = []
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world = 0, 1
        self.comm: Comm | None = None
        self.fsdp_group: FSDPParamGroup | None = None  # under fully_shard: see join_mesh
        self.replica_group: dist.ProcessGroup | None = None  # likewise
        self.replicas = 1
        self.held = False  # inside no_sync()
        self.last_cast: InputCast | None = None  # which the next layer may use, too
        self.wrapper: weakref.CallableProxyType | None = None  # see attach()
        self.asked: Callable[[], bool] | None = None  # likewise
        self.arrived: list[WeightGradient] = []  # under fully_shard: the gradients that this backward pass has brought
        self.task: int | None = None  # the last backward pass through the wrapper
        self.told = False  # whether the loop says which backward pass is the last before a step
        self.rounding = Rounding()
        self.gradient_bytes = 0  # at the last step
        self.gradient_dtypes: set[torch.dtype] = set()  # likewise

    def forget_cast(self, input: "weakref.ref[torch.Tensor]") -> None:
        """Called when an input is freed."""
        if self.last_cast is not None and self.last_cast.input is input:
            self.last_cast = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # belongs to the one model that trains; a copy of it is for evaluation

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(None), ()

    def join(self, group: dist.ProcessGroup | None) -> None:
        # DistributedDataParallel's own: a second communicator would need one order with the first, see Comm.
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)

    def join_mesh(self, fsdp_group: "FSDPParamGroup") -> None:
        """Takes the ranks of a fully_shard mesh: `group`, `rank` and `world` are of its shards."""
        self.fsdp_group, mesh = fsdp_group, fsdp_group.mesh_info
        # pyrefly: ignore[missing-attribute]
        self.group, self.rank, self.world = mesh.shard_process_group, mesh.shard_mesh_rank, mesh.shard_mesh_size
        self.replica_group = getattr(mesh, "replicate_process_group", None)  # HSDP has one
        if self.replica_group is not None:
            self.replicas = dist.get_world_size(self.replica_group)

    @property
    def sharded(self) -> bool:
        """Whether only its owner has the mean gradient of a layer."""
        return self.level == "O3" and self.world > 1

    def last_micro_batch(self) -> bool:
        """Whether the optimizer steps after the current backward pass, as far as is known. Under fully_shard: whether
        this pass reduces gradients, which FSDP2 does in every backward pass unless told not to."""
        if self.wrapper is not None and self.wrapper._join_config.enable:
            raise CodesRead(
                "DistributedDataParallel.join() can't stand in for the exchange of FP8 gradients: ranks "
                "would wait for ever: give all ranks as many batches"
            )
        if self.held or (self.wrapper is not None and not self.wrapper.require_backward_grad_sync):
            return False
        if self.fsdp_group is not None:
            return self.fsdp_group.reduce_grads
        return not self.more_to_come()

    def more_to_come(self) -> bool:
        """Whether the loop said that another backward pass comes before the step."""
        return self.asked is not None and not self.asked()

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over the shards of fully_shard; `x` itself if there are none."""
        return x if self.fsdp_group is None else largest(x, self.group)

    def finish(self) -> None:
        """Rounds every gradient to FP8 and averages it over ranks. Called before a step, a norm or a report."""
        if self.comm is not None:
            self.comm.finish()
        for gradient in self.gradients:
            gradient.settle()
            if gradient.sharding is not None:
                gradient.expose_grad()
        self.rounding.finish()

    def pass_begins(self, _: torch.Tensor) -> None:
        """Hook of what DistributedDataParallel returned: exchanges gradients when this backward pass has ended. Queued
        here and not by a layer, as one that is checkpointed has a backward pass of its own within this one."""
        task = torch._C._current_graph_task_id()
        if task == self.task:
            return  # called for each output
        self.task = task
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self.pass_ended))  # behind what DistributedDataParallel has queued

    def pass_ended(self) -> None:
        """As DistributedDataParallel, averages after each backward pass, also what this rank has no gradient for."""
        if self.comm is not None and self.last_micro_batch():
            self.comm.finished = False
            self.comm.finish()

    def backward_ended(self) -> None:
        """Under fully_shard, called at the end of a backward pass: `.grad` is then the mean, as FSDP2's is."""
        arrived, self.arrived = self.arrived, []
        if not arrived:
            return  # called once for each layer
        reduced = self.last_micro_batch()
        if self.comm is not None and reduced:
            self.comm.finish()
        for gradient in self.gradients:
            gradient.expose_grad()
        for gradient in arrived if reduced else ():
            parameter = gradient.linear.parameter
            for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
                if hook != gradient.misused:
                    hook(parameter)

    @torch.no_grad()
    def stepped(self, used: list[WeightGradient]) -> None:
        """Called after an optimizer's step: sends new FP8 weights, updates delayed scales, marks the gradients of its
        layers, `used`, as used."""
        found = [gradient.codes for gradient in self.gradients if gradient.codes is not None]
        self.gradient_bytes = sum(codes.nbytes + 4 for codes in found)
        self.gradient_dtypes = {codes.dtype for codes in found}
        for gradient in used:
            gradient.consume()
        if self.comm is not None:
            self.comm.finished = any(gradient.pending for gradient in self.gradients)
            trained = [gradient.linear for gradient in self.gradients if gradient.linear.weight.requires_grad]
            if self.sharded and trained:
                self.comm.gather_weights(trained)
        self.update_scales()

    def update_scales(self) -> None:
        """Updates the delayed scales of all layers at once."""
        layers = list(self.layers.values())
        states = torch.stack([layer.scaling_state for layer in layers])
        dtypes = scaling.E4M3, self.recipe.gradient_format
        if isinstance(self.recipe, TEDelayed):
            scale, _, history = scaling.parts(states)
            self.update_delayed(history, scale, dtypes, self.recipe.options)
        else:
            states = updated(states, dtypes)
        torch._foreach_copy_([layer.scaling_state for layer in layers], list(states.unbind()))

    def update_delayed(
        self, history: torch.Tensor, scale: torch.Tensor, dtypes: Sequence[torch.dtype], options: dict[str, Any]
    ) -> None:
        """Updates history [layers, length, slots] and scale [layers, slots] by TransformerEngine's rule, in place. Not
        compiled: its division must round as TransformerEngine's does, and Triton's does not."""
        for slot, dtype in enumerate(dtypes):
            if self.comm is not None and options["reduce_amax"]:
                last = history[:, 0, slot].contiguous()
                dist.all_reduce(last, dist.ReduceOp.MAX, group=self.group)
                if self.replica_group is not None:
                    dist.all_reduce(last, dist.ReduceOp.MAX, group=self.replica_group)
                self.comm.sent += 2 * (self.world - 1) * last.nbytes // self.world
                history[:, 0, slot] = last
            margin, algo = options["margin"], options["amax_compute_algo"]
            scaling.update_delayed_(history[:, :, slot].T, scale[:, slot], scaling.dtype_max(dtype), margin, algo)


@compiled_on_cuda
def updated(states: torch.Tensor, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    scale, updates, history = scaling.parts(states)
    history, scale, updates = scaling.updated_window(history, scale, updates, dtypes)
    rows = scale.unsqueeze(-2), updates.unsqueeze(-2), history
    return torch.cat([each.view(torch.int32) for each in rows], -2).view(torch.float32)


def state_of(model: nn.Module) -> State:
    """The State of a converted model, however it is wrapped."""
    for module in model.modules():
        if getattr(module, "amp8_state", None) is not None:
            return module.amp8_state  # pyrefly: ignore[bad-return]
    raise ValueError("the model is on no level: call amp8.initialize first")


def attach(model: nn.Module, last_micro_batch: Callable[[], bool] | None = None) -> nn.Module:
    """Tells a converted model what wraps it, so that gradient accumulation works.

    model: the converted model or its DistributedDataParallel, whose `no_sync()` then holds for FP8 gradients too.
    last_micro_batch: a function without arguments that says during a backward pass whether the optimizer steps after
    it, for loops that accumulate without DistributedDataParallel. Returns `model`.
    """
    state = state_of(model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        state.wrapper = weakref.proxy(model)  # Python does not see what the C++ side of the wrapper holds
        model.register_forward_hook(functools.partial(watch, state))
    state.asked = last_micro_batch
    state.told = state.told or last_micro_batch is not None
    return model


def watch(state: State | None, wrapper: nn.Module, _: Any, output: Any) -> None:
    """Forward hook of DistributedDataParallel: the exchange of FP8 gradients follows each backward pass through it.
    state: None in a copy of the model, whose layers are plain."""
    if state is None or torch.compiler.is_compiling():  # compiled, the exchange comes before the step
        return
    for tensor in _find_tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(state.pass_begins)


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Within it, backward passes are not the last before a step: gradients add up on their rank and nothing is sent."""
    state = state_of(model)
    before, state.held, state.told = state.held, True, True
    try:
        yield
    finally:
        state.held = before


@contextlib.contextmanager
def high_precision(model: nn.Module) -> Iterator[None]:
    """Converted layers compute plain products of their true weights, in autocast's dtype or their input's. For
    evaluation: the weights get no gradient."""
    layers = [module for module in model.modules() if isinstance(module, FP8Linear)]
    before = [layer.high_precision for layer in layers]
    for layer in layers:
        layer.high_precision = True
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.high_precision = value


def wire_bytes(model: nn.Module) -> int:
    """Bytes this rank has sent for converted layers since `initialize`, counted where they are sent: of an all_to_all
    and an all_gather (N - 1) / N of the full size, as a ring sends."""
    comm = state_of(model).comm
    return 0 if comm is None else comm.sent
