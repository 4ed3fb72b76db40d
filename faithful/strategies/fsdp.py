"""FSDP2 and HSDP: each process holds a shard of every parameter. Parameters are gathered block by block when used."""

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import fsdp_utils, gather_object
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from faithful import patches
from faithful.checkpoint import rows
from faithful.errors import Refused
from faithful.models import averages, batch_norm, meta_init, shards
from faithful.models.blocks import block_names, embedding_of, name_blocks
from faithful.strategies import gathered, guard
from faithful.strategies.base import (
    OF_SHARDS,
    Accelerates,
    Pieces,
    Saved,
    Session,
    Strategy,
    autocast_of,
    compile_for_this_rank,
    compute_in_autocast,
    has_parameters,
    needs_whole_model,
    whole_tensor,
)
from faithful.tensors import optimizer_states
from faithful.tensors.names import fingerprint, local, parameters_of, plain_names

if TYPE_CHECKING:
    from accelerate.utils import FullyShardedDataParallelPlugin, GradScalerKwargs
    from torch.distributed.fsdp import FSDPModule

    from faithful.plan import Plan


class FSDP(Strategy):
    """FSDP2: all processes together hold the model once."""

    distributed_types = ("FSDP",)
    fully_shards = True
    must_shard = True
    exchanges_in_passes = True
    any_number_of_processes = True
    mixes_dtensors = True  # parameters without dimensions are tensors
    errors = OF_SHARDS | {
        "RegisterPostBackwardFunction is a view": (
            "a layer changes what it gets in place (x += ..., x[mask] = 0), and FSDP2 gives each layer that it "
            "gathers a view, which torch protects: write x = x + ..., or use a ddp or zero config"
        ),
        "setStorage.*storage of size 0": (
            "a second derivative (create_graph=True, a gradient penalty) needs weights that {strategy} has freed after "
            "the first backward pass: use a ddp config"
        ),
        # of torchao's gathered weights, and of MS-AMP's levels
        r"attempting to run (\S+), this is not supported|(\S+) not implemented for 'Float8_e4m3fn'|"
        r"support floating point (conversion) for autocast w/ Float8TrainingTensor": (
            "the script computes with a weight that {strategy} gathers in FP8, in a forward pass ({found}): do it "
            "between steps, or use a bf16 config"
        ),
        "appears to not have been used in the graph|assign a gradient with dtype": (
            "torch.autograd.grad asks for gradients of shards, and under {strategy} the graph holds the gathered "
            "weights: call accelerator.backward(loss), then use .grad, or use a ddp config"
        ),
        r"Parameter '(\S+)' is shared with a parameter already managed by another FSDP group": (
            "{found} is tied to a weight of another layer, and FSDP2 gathers one of them by itself: leave that "
            "layer's class out of fsdp_transformer_layer_cls_to_wrap, or of the model's _no_split_modules, or use a "
            "ddp or zero config"
        ),
        r"object layout differs from '(\w+)'": (
            "FSDP2 gives {found} a class of its own, for which Python needs nn.Module as the first base: write class "
            "{found}(nn.Module, ...), with ABC or Generic behind it, here or in its base, or use a ddp or zero config"
        ),
        "save_only_model option is not compatible": (
            "transformers' save_only_model=True needs whole weights in its checkpoints: set fsdp_state_dict_type: "
            "FULL_STATE_DICT in the config's fsdp_config, or leave save_only_model out"
        ),
        "Couldn't swap": (  # torch's `_apply`
            "the script casts or moves a model after prepare(), where {strategy} shards it ({error}): do it before "
            "prepare(), or with a copy"
        ),
    }

    def arguments(self, scaling: "GradScalerKwargs | None") -> dict[str, Any]:
        from accelerate.utils import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        plan = self.plan
        # By default Accelerate reduces gradients in 16 bit, and pins host memory even without an accelerator.
        dtype = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(plan.precision)
        # It would round each input of a unit, too: a timestep of 501.3 to 502. Autocast casts where products need it.
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False) if dtype else None
        offload = CPUOffloadPolicy(pin_memory=not plan.rehearsal) if plan.offload else None
        by_torch = plan.ckpt and plan.implementation != "transformer_engine"  # which has its own checkpointing
        plugin = FullyShardedDataParallelPlugin(
            mixed_precision_policy=policy,
            cpu_offload=offload,  # pyrefly: ignore[bad-argument-type]
            activation_checkpointing=by_torch,
        )
        return {"fsdp_plugin": plugin}

    def started(self, session: Session) -> torch.amp.GradScaler | None:
        compile_for_this_rank(session)
        if self.plan.ram_efficient:
            meta_init.start(session.is_main)
        return None

    def before_prepare(self, session: Session, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Names the blocks, which FSDP2 gathers one by one. FSDP2 shards the weights that each process has built, and
        HSDP's groups would train apart, so those of process 0 are sent to all where they differ, as under DDP."""
        plan = self.plan
        guard.refuse_complex(model, "FSDP2")
        guard.refuse_sparse(model, "FSDP2")
        guard.refuse_own_parameters(model, "FSDP2")
        if not plan.ram_efficient and len(set(gather_object([fingerprint(model)]))) > 1:
            broadcast([*model.parameters(), *model.buffers()], session.device)
        if trained := ignored_and_trained(plan, model):
            raise Refused(
                f"fsdp_ignored_modules {plan.ignored_modules}: each process would train its own copy of "
                f"{', '.join(trained[:3])}, as their gradients are not averaged: freeze them before "
                "prepare(), or leave the key out"
            )
        name_blocks(model)
        batch_norm.in_fp32(model)

    def prepare(
        self, session: Session, accelerates: Accelerates, args: tuple[Any, ...], device_placement: list[bool] | None
    ) -> tuple[Any, ...]:
        """Accelerate's FSDP2 takes one model and its optimizer per call, but scripts may prepare several. So each model
        is prepared with an optimizer that is thrown away, and the script's optimizers then get the sharded parameters.
        """
        averages.of_shards()
        shards.take_writes()
        gathered.take_zero_grad()
        prepared, rest = list(args), []
        optimizers = [argument for argument in args if isinstance(argument, torch.optim.Optimizer)]
        for at, argument in enumerate(args):
            if isinstance(argument, torch.nn.Module) and not getattr(argument, "_is_accelerate_prepared", False):
                holds = has_parameters(argument)
                prepared[at] = (
                    shard(session, accelerates, argument, optimizers) if holds else argument.to(session.device)
                )
            elif not isinstance(argument, torch.nn.Module | torch.optim.Optimizer):
                rest.append(at)
        for at, argument in enumerate(args):
            if isinstance(argument, torch.optim.Optimizer) and not getattr(argument, "_is_accelerate_prepared", False):
                compile_for_this_rank(session, argument)
                follow(argument)
                shards.step_in_turn(argument)
                prepared[at] = accelerates.prepare_optimizer(argument)
                prepared[at]._is_accelerate_prepared = True
        if rest:
            others = accelerates.prepare(*(args[at] for at in rest))
            others = others if len(rest) > 1 else (others,)  # Accelerate returns one object without a tuple
            for at, other in zip(rest, others, strict=True):
                prepared[at] = other
        return tuple(prepared)

    def refuse_between_passes(self, models: list[nn.Module], clips: bool) -> None:
        guard.refuse_between_passes(not any(map(gathered.waiting, models)), "FSDP2")

    def copies(self) -> int:
        return shards.copies

    def take_written(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """A root that stays gathered, as no backward pass has followed, would miss the update."""
        if torch._C._current_graph_task_id() >= 0:  # in a hook of one, which FSDP2 calls with averaged gradients
            return
        if any(isinstance(p, gathered.Gathered) and p.grad is not None for p in model.parameters()):
            raise Refused(
                f"FSDP2 finds no tensors in what {type(model).__name__} returns, and has averaged no gradients: return "
                "a tensor, a tuple, a list or a dict, or use a ddp config"
            )
        reshard(model)

    def used(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bool]:
        return [parameter.grad is not None for parameter in model.parameters()]

    def units(self, model: nn.Module) -> int | None:
        """How many units FSDP2 gathers: groups of parameters."""
        from torch.distributed.fsdp import FSDPModule

        states = {module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)}
        return sum(len(gathered.parameter_groups(state)) for state in states)

    def how_sharded(self, model: nn.Module, record: dict[str, Any]) -> str:
        plan = self.plan
        names = plan.wrap_classes or ([] if plan.wrap_policy == "NO_WRAP" else block_names(model))
        return f", sharded by {', '.join(names)}" if names else ", sharded as one piece"

    def pieces(self, model: nn.Module) -> Pieces | None:
        reshard(model)
        pieces = {}
        for at, module in model.named_modules():  # one after the other: an MS-AMP layer decodes its shard for it
            for name, tensor in saved_by(module, at).items():
                if torch.is_tensor(tensor):
                    like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    whole = lambda module=module, at=at, n=name: whole_tensor(saved_by(module, at)[n])  # noqa: E731
                    pieces[name] = like, lambda whole=whole: local(whole())  # without torchao's wrapper
        return dict(plain_names(pieces.items()))

    def tensors(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
        reshard(model)
        return super().tensors(model, optimizer)

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, parts: Saved) -> None:
        reshard(model)
        if isinstance(parts, list):
            optimizer_states.refuse_other_rows(parts)
            parts = rows.Rows(parts, rows.of_dtensors(dict(parameters_of(model))))
        super().restore(model, optimizer, parts)

    def explain(self, error: str) -> Refused | None:
        of = re.search(r"'(\w+)' object has no attribute 'module'", error)
        if of and of[1] in SHARDED:
            return Refused(
                "the script uses model.module, the inside of DDP's wrapper, and FSDP2 has none: write "
                "accelerator.unwrap_model(model), which works under every config, or use a ddp config"
            )
        if said := needs_whole_model(error) or super().explain(error) or guard.copied(error, "FSDP2"):
            return said
        if self.plan.precision != "fp32" and (said := guard.in_two_dtypes(error, "FSDP2 gathers weights in 16 bit")):
            return said
        return meta_init.explain(error, "fsdp_cpu_ram_efficient_loading") if self.plan.ram_efficient else None


def saved_by(module: nn.Module, at: str) -> dict[str, torch.Tensor]:
    """{name: tensor} that a module, called `at`, has in the model's state_dict, without those of its children."""
    own = {}
    module._save_to_state_dict(own, f"{at}." if at else "", keep_vars=False)
    return own


class HSDP(FSDP):
    """Groups of processes that each hold the model once, and average their gradients."""

    def arguments(self, scaling: "GradScalerKwargs | None") -> dict[str, Any]:
        patches.ignore_warning("Slicing a flattened dim from root mesh")  # as Accelerate makes its mesh
        return super().arguments(scaling)


def ignored_and_trained(plan: "Plan", model: nn.Module) -> list[str]:
    """The names of trainable parameters of modules that the config does not shard."""
    modules = [
        name for name, _ in model.named_modules() if plan.ignored_modules and re.fullmatch(plan.ignored_modules, name)
    ]
    return [
        f"{module}.{name}"
        for module in modules
        for name, parameter in model.get_submodule(module).named_parameters()
        if parameter.requires_grad
    ]


@torch.no_grad()
def broadcast(tensors: list[torch.Tensor], device: torch.device) -> None:
    """Sends the tensors of process 0 to all, one at a time."""
    for tensor in tensors:
        sent = tensor.to(device)
        torch.distributed.broadcast(sent, 0)
        tensor.copy_(sent)


# {id of an original parameter: weak references to it and to its sharded parameter}
SHARDS: dict[int, tuple[weakref.ref, weakref.ref]] = {}
SHARDED: set[str] = set()  # names of the classes of sharded modules


def shard(
    session: Session, accelerates: Accelerates, model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> nn.Module:
    """Lets Accelerate shard `model` in the units that the config says, and gives the script's `optimizers` the sharded
    parameters. Returns the model, which Accelerate changes in place."""
    refuse_shared(model)
    plan, plugin = session.plan, cast("FullyShardedDataParallelPlugin", AcceleratorState().fsdp_plugin)
    policy, checkpointing = plugin.auto_wrap_policy, plugin.activation_checkpointing
    if not any(parameter.requires_grad for parameter in model.parameters()):  # `before_prepare` has not seen it
        name_blocks(model)
        plugin.activation_checkpointing = False  # it has no backward pass
    if plan.wrap_policy != "NO_WRAP":
        plugin.auto_wrap_policy = transformer_auto_wrap_policy  # not by size
        plugin.transformer_cls_names_to_wrap = named_layers(plan, model) or block_names(model) or None
    if plugin.transformer_cls_names_to_wrap is None:
        plugin.auto_wrap_policy = None  # no block is repeated, or none is asked for: shard the model as one unit
        if plugin.activation_checkpointing:
            raise Refused(
                f"activation checkpointing computes blocks again, and {type(model).__name__} names none and repeats "
                "none: set _no_split_modules to the names of their classes, or leave fsdp_activation_checkpointing out"
            )
    if plugin.auto_wrap_policy is not None:
        guard.refuse_tied_blocks(model, plugin.transformer_cls_names_to_wrap or ())
    guard.make_contiguous(model)
    # Nothing here may hold a parameter while it is sharded: fully_shard moves each block whole to the device, and frees
    # it with the last reference.
    was = {name: (id(p), weakref.ref(p)) for name, p in parameters_of(model, remove_duplicate=False)}
    hooks = {name: shards.hooks_of(parameter) for name, parameter in parameters_of(model)}
    places = taken_out(optimizers, {key: name for name, (key, _) in was.items()})
    scalars = gathered.taken_out(model)
    once = meta_init.loaded_once(model, plugin, session.device) if plan.ram_efficient else contextlib.nullcontext()
    with once, embedding_in_the_root(model, plan.wrap_policy == "NO_WRAP"):
        model, _ = accelerates.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for module in model.modules():
        if isinstance(module, CheckpointWrapper):  # else a block would be computed again with other dropout masks
            module.checkpoint_fn = functools.partial(module.checkpoint_fn, preserve_rng_state=True)
        keep_class_name(module)
    plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = policy, None  # the next model has other blocks
    plugin.activation_checkpointing = checkpointing
    gathered.put_back(scalars, session.device, plan.ram_efficient)
    gathered.watch(model, scalars)
    now = dict(parameters_of(model, remove_duplicate=False))
    for name in hooks:
        shards.move_hooks(hooks[name], now[name])
    for parameters, i, name in places:
        parameters[i] = now[name]
    for key in [key for key, pair in SHARDS.items() if any(reference() is None for reference in pair)]:
        del SHARDS[key]
    SHARDS.update({key: (old, weakref.ref(now[name])) for name, (key, old) in was.items()})
    model.no_sync, model._apply = MethodType(no_sync, model), MethodType(apply_changes, model)
    compute_in_autocast(session, model)
    model.register_forward_hook(lambda module, *_: None if torch.is_grad_enabled() else reshard(module))
    if hasattr(model, "generate"):  # of transformers: it calls an encoder outside the model's forward pass
        if plan.precision != "fp32":
            model.generate = autocast_of(session)(model.generate)
        register_fsdp_forward_method(model, "generate")
    return model


def keep_class_name(module: nn.Module) -> None:
    """Gives the class that torch makes for a sharded module the name of the module's own, which diffusers writes."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, FSDPModule):
        own = next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))
        for name in ("__name__", "__qualname__", "__module__"):
            setattr(type(module), name, getattr(own, name))
        SHARDED.add(own.__name__)


def refuse_shared(model: nn.Module) -> None:
    """Raises Refused if a part of the model is in one that was prepared before, as the encoder of distil-whisper's
    teacher and student."""
    held = {id(sharded()) for _, sharded in SHARDS.values()}
    shared = (name for name, parameter in parameters_of(model, remove_duplicate=False) if id(parameter) in held)
    if (name := next(shared, None)) is not None:
        raise Refused(
            f"{type(model).__name__} shares {name} with another prepared model, and FSDP2 shards a layer once: give it "
            "a copy of its own, or use a ddp config"
        )


def apply_changes(model: nn.Module, function: Callable[[torch.Tensor], Any], recurse: bool = True) -> nn.Module:
    """Torch's `_apply` puts a new tensor into each shard, which fails where something refers to the shard. So it is
    called only if `function` changes something, which to(device) of a model that is there does not."""
    with torch.no_grad():
        changes = any(function(tensor) is not tensor for tensor in (*model.parameters(), *model.buffers()))
    return type(model)._apply(model, function, recurse) if changes else model


def taken_out(
    optimizers: list[torch.optim.Optimizer], name_of: dict[int, str]
) -> list[tuple[list[torch.Tensor], int, str]]:
    """Replaces parameters in the groups of `optimizers` by empty ones. Returns their places: [(list, index, name)].
    name_of: {id of a parameter: its name}, of those to replace."""
    places = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                if id(parameter) in name_of:
                    places.append((group["params"], i, name_of[id(parameter)]))
                    group["params"][i] = parameter.new_empty(0)
    return places


def named_layers(plan: "Plan", model: nn.Module) -> list[str]:
    """The classes of `model` that the config names, all of them."""
    classes = {type(module).__name__ for module in model.modules()}
    if missing := [name for name in plan.wrap_classes if name not in classes]:
        blocks = ", ".join(block_names(model) or ()) or "no repeated blocks"
        raise Refused(
            f"fsdp_transformer_layer_cls_to_wrap names {', '.join(missing)}, and {type(model).__name__} has "
            f"{blocks}: name these, or leave the key out"
        )
    return plan.wrap_classes


@contextlib.contextmanager
def embedding_in_the_root(model: nn.Module, always: bool) -> Iterator[None]:
    """Accelerate shards the embedding, and the head with the last norm, as units; if they are tied, all as one. FSDP2
    refuses that if a third module has the same weight, as in T5. Then Accelerate is told of no embedding, and the
    weight belongs to the root's unit; likewise for a model that has none. always: the config says the units, and these
    are not among them."""
    weight = getattr(embedding_of(model), "weight", None)
    places = sum(parameter is weight for module in model.modules() for parameter in module._parameters.values())
    none = weight is None or places > 2
    hidden = ("get_input_embeddings", "get_output_embeddings") if none or always else ()
    for name in hidden:
        setattr(model, name, lambda: None)
    norm = fsdp_utils._find_final_norm(model)  # by its name: Wav2Vec2EncoderStableLayerNorm is an encoder
    if always or (norm is not None and any(norm.children())):  # Accelerate looks for it in this attribute
        hidden += ("base_model_prefix",)
        model.base_model_prefix = "no base model"  # pyrefly: ignore[bad-argument-type]
    try:
        yield
    finally:
        for name in hidden:
            delattr(model, name)


@contextlib.contextmanager
def no_sync(model: "FSDPModule") -> Iterator[None]:
    """DDP's method, which some scripts call themselves. FSDP2 has it under another name."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def none() -> None:
    """A reference to nothing."""


def follow(optimizer: torch.optim.Optimizer) -> None:
    """Replaces parameters that were sharded before this optimizer was prepared by their sharded parameters."""
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            old, now = (reference() for reference in SHARDS.get(id(parameter), (none, none)))
            if old is parameter and now is not None:
                group["params"][i] = now


def reshard(model: nn.Module) -> None:
    """Frees the gathered root, which FSDP2 keeps in 16 bit after a forward pass without a backward pass."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
