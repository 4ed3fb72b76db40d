"""ZeRO by DeepSpeed: what is needed in addition to its engine and to Accelerate.

stage  partitioned                              parameters
1      master weights, optimizer state          16 bit (fp32 under fp32), whole
2      also gradients                           as in stage 1
3      also parameters, gathered when used      as in stage 1; those up to PERSISTENT elements stay gathered
"""

import contextlib
import copy
import functools
import logging
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import gather_object
from torch import nn

from faithful import patches
from faithful.checkpoint import rows, tensor_keys
from faithful.config import deepspeed
from faithful.config.strategies import BUCKET
from faithful.errors import Refused
from faithful.models import averages, batch_norm, meta_init
from faithful.strategies import guard
from faithful.strategies.base import (
    Accelerates,
    Engine,
    GradientsElsewhere,
    Pieces,
    Saved,
    Session,
    Shard,
    Strategy,
    buffers_by_place,
    compute_in_autocast,
    has_parameters,
    needs_whole_model,
    persistent_buffers,
    refuse_other_model,
)
from faithful.strategies.deepspeed import dummies
from faithful.strategies.deepspeed.engine import (
    Fragments,
    Scaler,
    Zero,
    added_up,
    fragment,
    gathered,
    gradient_norm,
    groups,
    masters,
    restore_engine,
    shape,
    stage,
    take_exact,
    whole_master,
    zero_of,
)
from faithful.strategies.deepspeed.seen import Held
from faithful.tensors.names import parameters_of, tensors_of, unwrapped

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import GradScalerKwargs
    from deepspeed.runtime.engine import DeepSpeedEngine

    from faithful.plan import Plan

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # of torch.optim.Optimizer
PERSISTENT = 10_000  # elements; biases and norms are not worth a collective each. The default is 100,000.


ERRORS = {  # see errors.explained
    r"train_batch_size is not equal to .* (\d+ != \d+ \* \d+ \* \d+)":
        "deepspeed_config_file's train_batch_size is not train_micro_batch_size_per_gpu times gradient accumulation "
        "times processes: {found}: set it to auto",
    "Loss scaling is required for this configuration": guard.NOT_SCALED,
    "No inf checks were recorded for this optimizer": guard.OWN_SCALER,
}  # fmt: skip


class ZeRO(GradientsElsewhere, Strategy):
    """Stages 1, 2 and 3. Accelerate and DeepSpeed read the stage from the launcher's environment."""

    distributed_types = ("DEEPSPEED",)
    gradients_elsewhere = "DeepSpeed's gradients"
    errors = ERRORS
    any_number_of_processes = True
    model_keeps_run = False  # Python's collector does not see the hooks by which the engine holds itself and the model

    def __init__(self, plan: "Plan") -> None:
        super().__init__(plan)
        self.keeps_masters = plan.precision != "fp32"
        self.exchanges_in_passes = plan.strategy != "zero1"
        self._in_backward = self._passed_outside = False  # in accelerator.backward; outside it
        self._engine: weakref.ref[DeepSpeedEngine] | None = None  # what is prepared
        self._config: dict[str, Any] = {}  # DeepSpeed's, before Accelerate fills its `auto` values for a model
        self._splits_weights = plan.strategy.startswith("zero3")  # with Ulysses, too
        self.sharded_kinds = ("master", "optimizer", "gradient") + (("weight",) if self._splits_weights else ())

    def arguments(self, scaling: "GradScalerKwargs | None") -> dict[str, Any]:
        """Accelerate's DeepSpeedPlugin from the launcher's environment, with settings that the YAML lacks. It leaves no
        `auto` value that Accelerate could fill only from a model's `config.hidden_size`."""
        from accelerate.utils import DeepSpeedPlugin

        quiet()
        if self.plan.rehearsal:
            compile_nothing()
        leave_precision_to_the_config()
        leave_gradients_to_the_engine()
        made = DeepSpeedPlugin(gradient_clipping=self.plan.clip or 0.0)  # `clip_grad_norm_` sets it
        # With this reference transformers builds its models partitioned and in 16 bit under stage 3, whatever
        # zero3_init_flag says: with other initial weights than the other strategies, and another dtype when offloaded.
        made.set_deepspeed_weakref = lambda: None
        complete(made.deepspeed_config, self.plan, scaling)
        if file_of_deepspeed().get("gradient_clipping") == "auto":  # transformers' Trainer fills it with its own
            made.deepspeed_config["gradient_clipping"] = "auto"
        return {"deepspeed_plugin": made}

    def real(self, session: Session, args: tuple[Any, ...]) -> tuple[Any, ...]:
        fresh = fresh_of(args)
        self._config = self._config or copy.deepcopy(plugin().deepspeed_config)
        optimizers = sum(isinstance(each, torch.optim.Optimizer) for each in args)
        if not fresh and self.engine is None and optimizers:
            self.need_both(None)
        several = len(fresh) + (self.engine is not None and bool(fresh)) > 1
        if several or (fresh and not any(parameter.requires_grad for parameter in fresh[0].parameters())):
            what = "several" if several else "a frozen one"
            raise Refused(
                f"{self.plan.strategy} trains one model, the script prepares {what}: use a ddp or fsdp config, or for "
                "a model that it does not train accelerator.prepare_model(model, evaluation_mode=True)"
            )
        if fresh and optimizers > 1:
            raise Refused(
                f"under {self.plan.strategy} one optimizer updates the model, the script prepares {optimizers}: use "
                "one with parameter groups, or a ddp or fsdp config"
            )
        processes = 1 if session.split_batches else self.plan.num_processes
        return dummies.real(plugin().deepspeed_config, processes, args)

    def started(self, session: Session) -> None:
        if self.plan.ram_efficient:
            meta_init.start(session.is_main)

    def before_prepare(self, session: Session, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        plan = self.plan
        optimizer = self.need_both(optimizer)
        if bare := [name for name, parameter in model.named_parameters() if not shape(parameter)]:
            raise Refused(
                f"{', '.join(bare[:3])}: DeepSpeed takes no parameter without dimensions, give it one, as "
                "torch.ones(1) has, or use a ddp config"
            )
        guard.refuse_complex(model, "DeepSpeed")
        guard.refuse_sparse(model, "DeepSpeed")
        guard.refuse_own_parameters(model, "DeepSpeed")
        guard.refuse_strangers(model, optimizer)
        guard.refuse_other_order(model, optimizer, plan.strategy)
        if self._splits_weights:
            guard.refuse_compiled(model)
        guard.make_contiguous(model)
        refuse_optimizers_of_matrices(plan, optimizer)
        # DeepSpeed puts all parameters into the config's dtype, and makes fp32 masters from those in 16 bit.
        # Under fp32 it takes no others, not even frozen ones.
        needed = [] if self.keeps_masters else model.parameters()
        if others := {str(p.dtype)[6:] for p in needed} - {"float32"}:
            raise Refused(
                f"parameters of the model are in {', '.join(others)}, but {plan.strategy} {plan.precision} "
                "needs them in fp32: build it in fp32"
            )
        if plan.precision != "fp32":
            batch_norm.in_fp32(model)
        compute_in_autocast(session, model)

    def refuse_order(self, model: nn.Module, optimizer: "AcceleratedOptimizer") -> None:
        """Nothing: `before_prepare` has, and DeepSpeed's optimizer has flat parameters by now."""

    def prepare(
        self, session: Session, accelerates: Accelerates, args: tuple[Any, ...], device_placement: list[bool] | None
    ) -> tuple[Any, ...]:
        """Accelerate's own `prepare`. It asks for a batch size, which DeepSpeed uses for its messages alone: 1 if no
        loader has one."""
        key = "train_micro_batch_size_per_gpu"
        config, said = plugin().deepspeed_config, file_of_deepspeed().get(key)
        loaders = [argument for argument in args if hasattr(argument, "batch_size")]
        batches = {loader.batch_size for loader in loaders} - {None}  # None: of a batch sampler, or of the data set
        models = [argument for argument in args if isinstance(argument, torch.nn.Module)]
        fresh = fresh_of(args)
        if fresh and isinstance(said, int) and batches and said not in batches:  # loaders of an evaluation may be there
            raise Refused(
                f"deepspeed_config_file says {key} {said}, the script's loaders have batches of "
                f"{', '.join(map(str, sorted(batches)))}: set it to auto"
            )
        if config.get(key) == "auto" and (
            None in [loader.batch_size for loader in loaders] or (models and not loaders)
        ):
            config[key] = max(batches, default=1)
        if config.get("gradient_clipping") == "auto":  # transformers' Trainer has not said it
            config["gradient_clipping"] = 0.0
        every = [p for model in fresh for p in model.parameters() if self.keeps_masters and p.dtype == torch.float32]
        exact = {id(p): p.detach() for p in every}  # before DeepSpeed rounds them
        for model in fresh if self.plan.ram_efficient else ():
            dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(self.plan.precision, torch.bfloat16)
            meta_init.partition(model, dtype, config["zero_optimization"], session.device)
        if self.keeps_masters or self._splits_weights:
            held = "in 16 bit" if self.keeps_masters else "in parts"
            averages.refuse(f"under {self.plan.strategy} DeepSpeed holds the weights {held}")
        losses = {at: each for at, each in enumerate(args) if isinstance(each, nn.Module) and not has_parameters(each)}
        again = {at: each for at, each in enumerate(args) if getattr(each, "_is_accelerate_prepared", False)}
        without = tuple(None if at in losses | again else each for at, each in enumerate(args))
        with masters_for_all(session.note, args):
            prepared = super().prepare(session, accelerates, without, device_placement)
        for engine in (new for new, old in zip(prepared, args, strict=True) if any(old is model for model in fresh)):
            self._engine = weakref.ref(engine)
            for module in engine.module.modules() if self._splits_weights else ():
                # by this name, FSDP2's, transformers asks whether all processes need the same passes, as in generate()
                module._is_fsdp_managed_module = True
            if exact:
                take_exact(engine.optimizer, exact, session.device if self.plan.ram_efficient else None)
        done = again | {at: loss.to(session.device) for at, loss in losses.items()}
        return tuple(done.get(at, each) for at, each in enumerate(prepared))

    @property
    def engine(self) -> "DeepSpeedEngine | None":
        """The engine of the prepared model."""
        return self._engine() if self._engine else None

    def after_prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
        engine: Any = model
        zero = zero_of(optimizer)
        held = zero.held = Held(zero, engine.module)
        held.fragments = Fragments(zero, held.reached)
        clip_as_configured(zero)
        zero.add_param_group = zero.optimizer.add_param_group = refuse_new_group
        zero.defaults = zero.optimizer.defaults  # torch's OneCycleLR and CyclicLR look for a momentum there
        for name in ("state_dict", "load_state_dict"):
            setattr(zero, name, functools.partial(by_the_engine, held, getattr(zero, name)))
        with_checkpoints_of_its_own(engine, held)
        engine.module.register_forward_hook(self._once_differentiable)
        engine.module.__deepcopy__ = refuse_copy

        def backward(loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
            if (gradient := kwargs.pop("gradient", None)) is not None:
                loss = (loss * gradient).sum()
            guard.refuse_options(kwargs.keys() - {"retain_graph", "scale_wrt_gas"})
            divides, said = engine.gradient_accumulation_steps(), GradientState().num_steps
            if kwargs.get("scale_wrt_gas", True) and divides != said:  # said after prepare
                loss = loss * (divides / said)
            engine.set_gradient_accumulation_boundary(sync_gradients)
            self._in_backward = True
            with held.working(), added_up(zero):
                engine.backward(loss, **kwargs)
            self._in_backward = False
            held.after_backward(sync_gradients)

        def step() -> None:
            if self._passed_outside and not held.begun:
                guard.refuse_own_backward()
            self._passed_outside = False
            if held.nothing_to_update():
                return
            with held.working():
                engine.step()
            held.updated()
            clip_as_configured(zero)  # not as in this step's call of clip_grad_norm_

        def zero_grad(set_to_none: bool = True) -> None:
            self._passed_outside = False
            held.drop_gradients(set_to_none)

        if stage(zero) > 1:  # Accelerate calls it in stage 1 only
            engine.no_sync = refuse_no_sync
        engine.zero_grad = engine.module.zero_grad = zero_grad
        return Engine(backward, step, zero_grad, Scaler(zero) if zero.dtype == torch.float16 else None)

    def _once_differentiable(self, module: nn.Module, args: object, output: object) -> None:
        """A hook of the model: a second derivative through its output is refused, for which DeepSpeed's engine, which
        gives memory back in the first backward pass, has no rule."""

        def seen(gradient: torch.Tensor) -> None:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise Refused(
                    "DeepSpeed's engine takes no second derivative (create_graph=True, a gradient penalty or a "
                    "Hessian): use a ddp config"
                )
            self._passed_outside |= not self._in_backward

        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(seen)

    def take_written(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        zero_of(optimizer).held.take_weights()

    def refuse_between_passes(self, models: list[nn.Module], clips: bool) -> None:
        held = self.engine.optimizer.held if self.engine and clips else None  # pyrefly: ignore[missing-attribute]
        guard.refuse_between_passes(held is None or held.whole or not held.begun)

    def used(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bool]:
        held = zero_of(optimizer).held
        return [id(parameter) in held.reached for parameter in held.parameters]

    def free(self) -> None:
        """The model that is prepared next may have other batches, or accumulate over another number of them."""
        self._engine = None
        if self._config:
            plugin().deepspeed_config.clear()
            plugin().deepspeed_config.update(copy.deepcopy(self._config))

    def dropped(self, models: list[nn.Module]) -> None:
        """Lets go of the engine, but not of stage 3's, without which the model could not be evaluated any more."""
        for engine in (model for model in models if unwrapped(model) is not model and not self._splits_weights):
            with contextlib.suppress(AssertionError):  # after end_training, it cannot print its last message
                cast("DeepSpeedEngine", engine).destroy()

    def clip_grad_norm_(self, parameters: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Makes the engine clip in its step. Returns the gradient norm over all processes."""
        zero: Zero = cast("DeepSpeedEngine", self.engine).optimizer
        given = {id(parameter) for parameter in parameters if parameter.requires_grad}
        if not given:  # as torch does
            return torch.zeros(())
        if given != {id(p) for group in groups(zero) for p in group if p.requires_grad}:
            raise Refused(
                f"clip_grad_norm_ is called for a part of the parameters, {self.plan.strategy} clips all by one "
                "norm: pass model.parameters()"
            )
        configured = plugin().gradient_clipping
        if math.isinf(max_norm):  # the script asks for the norm alone
            return gradient_norm(zero)
        if configured not in (0.0, max_norm):
            raise Refused(
                f"the script clips gradients at {max_norm}, gradient_clipping in the config at {configured}: "
                "say it in one place"
            )
        zero.clip_grad = max_norm
        return gradient_norm(zero)

    def norm_of(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        return gradient_norm(zero_of(optimizer))

    def torch_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The torch optimizer inside DeepSpeed's optimizer inside Accelerate's. It updates the flat masters."""
        return zero_of(optimizer).optimizer

    def parameter_ids(self, optimizer: torch.optim.Optimizer) -> set[int]:
        return {id(parameter) for group in groups(zero_of(optimizer)) for parameter in group}

    def not_averaged(self, optimizer: torch.optim.Optimizer, prepared: set[int]) -> set[int]:
        return set()  # the engine averages all gradients that its optimizer uses

    def shape_of(self, parameter: nn.Parameter) -> torch.Size:
        return shape(parameter)

    def sharded(self, parameters: Iterable[nn.Parameter]) -> bool:
        return self.plan.num_processes > 1

    def how_sharded(self, model: nn.Module, record: dict[str, Any]) -> str:
        return f", {record.get('share_per_process', {}).get('optimizer', 1):.0%} of the optimizer state each"

    def shards(self, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer | None) -> Iterator[Shard]:
        """As in Strategy, without padding."""
        if optimizer is None:  # a model that DeepSpeed does not train, and each process holds whole
            yield from super().shards(parameters, None)
            return
        zero = zero_of(optimizer)
        yield from (Shard("gradient", "", None, gradient) for gradient in gradients(zero))
        for name, parameter in parameters.items():
            if stage(zero) < 3:
                yield Shard("weight", name, None, parameter)
            elif zero.held.has(parameter):
                length = fragment(zero, parameter, masters(zero)).numel()
                # pyrefly: ignore[missing-attribute]
                yield Shard("weight", name, None, parameter.ds_tensor.narrow(0, 0, length))
            if stage(zero) == 3 and parameter.ds_status.name == "AVAILABLE":  # pyrefly: ignore[missing-attribute]
                yield Shard("gathered", name, None, parameter)
            if zero.held.has(parameter):
                yield Shard("master", name, None, fragment(zero, parameter, masters(zero)))
                for key, state in zero.held.fragments.state(parameter).items():
                    yield Shard("optimizer" if state.dim() else "counter", name, key, state)

    def tensors(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
        """{name: this process's fragment}: fp32 masters, optimizer state, full shapes, buffers."""
        if optimizer is None:
            return super().tensors(model, None)
        zero, parts, parameters = zero_of(optimizer), buffers_by_place(model), dict(parameters_of(model))
        zero.held.take_weights()
        for name, parameter in parameters.items():
            parts[tensor_keys.shape(name)] = torch.tensor(shape(parameter), dtype=torch.int64)
            if not zero.held.has(parameter):
                whole = gathered(parameter).flatten()
                parts[tensor_keys.weight(name)] = whole if dist.get_rank() == 0 else whole[:0]
        shards = self.shards(parameters, optimizer)
        parts |= {shard.place: shard.tensor for shard in shards if shard.kind in ("master", "optimizer", "counter")}
        return {place: tensor.detach() for place, tensor in parts.items()}

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, parts: Saved) -> None:
        """Loads the result of `tensors`, bit for bit, and computes the 16-bit weights from the masters."""
        if optimizer is None:
            return super().restore(model, None, parts)
        live = self.tensors(model, optimizer)
        if isinstance(parts, list):
            lengths = {name: len(live[tensor_keys.weight(name)]) for name, _ in parameters_of(model)}
            parts = rows.Rows(parts, rows.of_fragments(gather_object([lengths]), dist.get_rank()))
        of_model = {place: part for place, part in live.items() if tensor_keys.kind(place) != tensor_keys.OPTIMIZER}
        refuse_other_model(of_model, parts)
        zero, parameters = zero_of(optimizer), list(parameters_of(model))
        restore_engine(zero, [zero.held.has(parameter) for _, parameter in parameters], parameters, parts)
        for place, buffer in buffers_by_place(model).items():
            buffer.copy_(parts[place])

    def pieces(self, model: nn.Module) -> Pieces:
        if unwrapped(model) is model:  # not DeepSpeed's
            return {name: (tensor, lambda tensor=tensor: tensor) for name, tensor in model.state_dict().items()}

        engine: Any = model
        held = engine.optimizer.held
        held.take_weights()

        def whole(parameter: nn.Parameter) -> torch.Tensor:
            return whole_master(engine.optimizer, parameter) if held.has(parameter) else gathered(parameter)

        each = {}
        for parameter in engine.module.parameters():
            dtype = torch.float32 if held.has(parameter) else parameter.dtype
            like = torch.empty(shape(parameter), dtype=dtype, device="meta")
            each[id(parameter)] = like, functools.partial(whole, parameter)
        pieces = {name: each[id(p)] for name, p in engine.module.named_parameters(remove_duplicate=False)}
        kept = persistent_buffers(engine.module, once=False)  # peft's VeRA reads shared ones by each name
        return pieces | {name: (buffer, lambda buffer=buffer: buffer) for name, buffer in kept}

    def explain(self, error: str) -> Refused | None:
        if self._passed_outside and error in ("list index out of range", "unknown parameter type"):  # DeepSpeed's
            return guard.not_averaged()
        said = super().explain(error) or needs_whole_model(error) or guard.second_pass(error)
        if said := said or guard.copied(error, "DeepSpeed"):
            return said
        if self.plan.ram_efficient and (said := meta_init.explain(error, "zero3_init_flag")):
            return said
        return guard.in_two_dtypes(error, f"under {self.plan.strategy} DeepSpeed holds the weights in 16 bit")


def gradients(zero: Zero) -> list[torch.Tensor]:
    """Those that the engine holds. Where depends on the stage, on the dtype and on offloading: in a list for each
    group, in `.grad` of the 16-bit parameters, or in `.grad` of the flat masters."""
    lists = [tensors for tensors in zero.averaged_gradients.values() if tensors]
    kept = [tensor for tensors in lists for tensor in tensors if tensor is not None]
    with zero.held.working():
        kept += [p.grad for group in groups(zero) for p in group if p.grad is not None]
    return kept + [flat.grad for flat in masters(zero) if flat.grad is not None]


def fresh_of(args: Iterable[Any]) -> list[nn.Module]:
    """The models in `args` that are not prepared yet."""
    models = [argument for argument in args if isinstance(argument, nn.Module) and has_parameters(argument)]
    return [model for model in models if not getattr(model, "_is_accelerate_prepared", False)]


def refuse_copy(memo: dict[int, Any]) -> NoReturn:
    raise cast(Refused, guard.copied("does not support deepcopy", "DeepSpeed"))


def refuse_optimizers_of_matrices(plan: "Plan", optimizer: torch.optim.Optimizer) -> None:
    """Raises Refused unless the optimizer does with flat parts of the weights what it does with whole ones: DeepSpeed
    or guard.py names its class, or the user's file for DeepSpeed says that it may be tried."""
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    name = type(optimizer).__name__
    flat = f"under {plan.strategy} each process updates a flat part of the weights"
    if any(vars(optimizer).get(hooks) for hooks in STEP_HOOKS):
        raise Refused(f"{flat}, which a hook of {name}'s step would see: use a ddp or fsdp config")
    if hasattr(type(optimizer), "eval"):  # those of schedulefree: DeepSpeed would not take over what it writes
        raise Refused(f"{flat}, and {name}.eval() writes into the whole ones: use a ddp or fsdp config")
    if type(optimizer) in ZERO_SUPPORTED_OPTIMIZERS or guard.updates_elements(optimizer):
        return
    if file_of_deepspeed().get("zero_allow_untested_optimizer") is not True:
        raise Refused(
            f"{flat}, and {name} is not known to update each element by itself: use a ddp or fsdp config, or if it "
            "does, say zero_allow_untested_optimizer: true in a deepspeed_config_file"
        )


def complete(config: dict[str, Any], plan: "Plan", scaling: "GradScalerKwargs | None") -> None:
    """Adds the settings that the launcher's environment lacks to DeepSpeed's config, in place. What a file of
    DeepSpeed's says stays. scaling: the script's GradScalerKwargs, or None."""
    from accelerate.utils import GradScalerKwargs

    config.setdefault("communication_data_type", "fp32")  # of gradient reductions, as in the other strategies
    if plan.strategy != "zero1":  # partitioned, fp32 costs 2/N bytes more; stage 1 would keep all in fp32
        config.setdefault("data_types", {"grad_accum_dtype": "fp32"})
    config["zero_force_ds_cpu_optimizer"] = False  # else offloading turns every optimizer into Adam, even SGD
    defaults: dict[str, Any] = {"reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": PERSISTENT}
    config["zero_optimization"] = defaults | deepspeed.explicit(config["zero_optimization"])
    for key in ("offload_optimizer", "offload_param"):
        offloaded = config["zero_optimization"].get(key)
        if offloaded and plan.rehearsal:
            offloaded.pop("pin_memory", None)  # it needs an accelerator
        elif offloaded:
            offloaded.setdefault("pin_memory", True)  # DeepSpeed's default is slow, and Accelerate's YAML has no key
    if plan.precision != "fp16" or ("fp16" in config and not scaling):
        return
    scaling = scaling or GradScalerKwargs()
    power = math.log2(scaling.init_scale)
    if power % 1 or scaling.growth_factor != 2 or scaling.backoff_factor != 0.5:
        raise Refused(
            "the gradient scaler under ZeRO: DeepSpeed's scale is a power of 2, and it doubles and "
            "halves it; leave growth_factor and backoff_factor out"
        )
    config["fp16"] = {"enabled": True, "initial_scale_power": int(power), "hysteresis": 1}
    config["fp16"]["loss_scale_window"] = scaling.growth_interval


def file_of_deepspeed() -> dict[str, Any]:
    """The mapping of deepspeed_config_file as it is written, or {} without one."""
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    return deepspeed.read(path)[1] if path else {}


def leave_precision_to_the_config() -> None:
    """Stops transformers' Trainer from comparing bf16 and fp16 of TrainingArguments with DeepSpeed's config: both are
    False if a script leaves the precision to the config. If set, `Accelerator(mixed_precision=...)` gets them."""
    trainers = sys.modules.get("transformers.integrations.deepspeed")
    if trainers is None:
        return
    compares = trainers.HfTrainerDeepSpeedConfig.fill_match

    def fill_match(self: object, key: str, *args: Any, **kwargs: Any) -> None:
        if key not in ("bf16.enabled", "fp16.enabled"):
            compares(self, key, *args, **kwargs)

    patches.replace("transformers.integrations.deepspeed:HfTrainerDeepSpeedConfig.fill_match", fill_match)


def leave_gradients_to_the_engine() -> None:
    """Stops transformers' Trainer from looking for DTensors among the gradients before it clips."""
    trainer = sys.modules.get("transformers.trainer")
    if hasattr(getattr(trainer, "Trainer", None), "_has_mixed_mesh_grads"):  # in newer releases
        patches.replace("transformers.trainer:Trainer._has_mixed_mesh_grads", lambda self, model: False)


def compile_nothing() -> None:
    """Turns off DeepSpeed's compiled all-reduce for processes of one host: it needs a compiler and a minute. And its
    refusal of fp16 on most CPUs."""
    import deepspeed  # noqa: F401  patches needs it imported

    patches.replace("deepspeed.ops:__compatible_ops__", {})
    patches.replace("deepspeed.accelerator.cpu_accelerator:CPU_Accelerator.is_fp16_supported", lambda self: True)


def quiet() -> None:
    """Silences DeepSpeed's messages, except errors."""
    patches.silence("DeepSpeed", logging.ERROR)


@contextlib.contextmanager
def masters_for_all(note: Callable[[str], None], args: tuple[Any, ...]) -> Iterator[None]:
    """Frozen parameters in an optimizer of `args` get masters too, as the script may thaw them."""
    groups = [group for each in args if isinstance(each, torch.optim.Optimizer) for group in each.param_groups]
    every = [p for group in groups for p in group["params"] if p.is_floating_point() and not p.requires_grad]
    if every:
        note(
            f"{sum(map(torch.numel, every)):,} parameters in the optimizer are frozen: they cost memory as the others "
            "do, as they may be thawed. Leave them out of the optimizer if they stay frozen"
        )
    for parameter in every:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in every:
            parameter.requires_grad_(False)


def with_checkpoints_of_its_own(engine: "DeepSpeedEngine", held: Held) -> None:
    """Makes DeepSpeed's own checkpoints hold what the script has written, and refuses those that would lose state."""
    saves, loads = engine.save_checkpoint, engine.load_checkpoint

    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if held.fragments.apart:
            raise Refused(
                "DeepSpeed's own checkpoint has one step counter for all parameters, and some of them got no gradient "
                "in a step: call accelerator.save_state (transformers' Trainer calls this one: save_only_model=True)"
            )
        held.take_weights()
        with held.working():
            return saves(*args, **kwargs)

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        with held.working():
            loaded = loads(*args, **kwargs)
        held.fragments.loaded()
        return loaded

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def by_the_engine(held: Held, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function of the optimizer for DeepSpeed, and refuses it to a script."""
    if not held.at_work:
        guard.refuse_optimizer_state()
    return function(*args, **kwargs)


def clip_as_configured(zero: Zero) -> None:
    zero.clip_grad = plugin().gradient_clipping


def plugin() -> Any:
    """Accelerate's DeepSpeedPlugin of this process."""
    return AcceleratorState().deepspeed_plugin


def refuse_new_group(*_: object) -> NoReturn:
    raise Refused(
        "add_param_group after prepare: under ZeRO the optimizer's parameters are fixed in prepare. Give it all of "
        "them before, frozen ones too, and set requires_grad when they are to be trained"
    )


def refuse_no_sync() -> NoReturn:
    raise Refused(
        "the script calls model.no_sync, which DeepSpeed has under ZeRO-1 only: call "
        "accelerator.accumulate(model), or use a ddp or fsdp config"
    )
