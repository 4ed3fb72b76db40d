"""A subclass of Accelerate's Accelerator that does what its config says.

Its methods follow the order of a run: the launch, preparing, steps, saving, the record. Each strategy and each
precision backend has a module of its own (faithful/strategies, faithful/backends).
"""

import contextlib
import copy
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import accelerate
import accelerate.optimizer
import torch
from accelerate.utils import recursively_apply
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from faithful import arguments, backends, ending, patches, strategies
from faithful.backends import cpu_matmul
from faithful.checkpoint import weight_files
from faithful.config import settings
from faithful.errors import Refused, SkippedAlone
from faithful.evidence.batch import FirstBatch
from faithful.evidence.communication import OneStep
from faithful.evidence.evidence import Evidence, refuse_other_launch
from faithful.evidence.record import Record, described, now, of_arguments
from faithful.launch import following, launcher, process, rank_sync
from faithful.launch.machine import Memory
from faithful.models import dtypes
from faithful.plan import describe
from faithful.saving import hub, saving, whole_weights
from faithful.saving.state import RunState
from faithful.scripts import alone, trainer
from faithful.strategies.base import Accelerates, Engine, Session
from faithful.tensors.names import perturb, unwrapped
from faithful.training import clipping, draws, loaders, scaling
from faithful.training.model import (
    PreparedModel,
    convert,
    notes,
    prepared_parameters,
    refuse_untrained,
    to_convert,
    trains,
)
from faithful.training.optimizer import Optimizer, is_lomo_available
from faithful.training.steps import Passes, Steps

trainer.change()  # a script may make its arguments before its Accelerator


class Accelerator(accelerate.Accelerator):
    async_save = True  # see saving/saving.py
    model_card = True  # whether save_model writes more than weights, see saving/beside.py

    # ---- the launch ----

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        process.install_hooks(ending.newest)  # before anything that is refused, or waits for other processes
        with patches.kept_for(id(self)):
            self.launch(args, kwargs)

    def launch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What `__init__` does, or nothing that lasts: it may refuse."""
        patches.silence_torchao()
        patches.say_instead("torch._dynamo.convert_frame", "hit config.", ending.not_compiled)
        trainer.change()
        script = arguments.keyword_arguments(args, kwargs)
        self.plan = arguments.plan_for(script, [run.record for run in ending.made])
        self.strategy, self.backend = strategies.get_strategy(self.plan), backends.get_backend(self.plan)
        merged = arguments.with_config(self.plan, script, self.strategy, self.backend)
        folder, recorded = self.project_folder(merged)
        launcher.keep_timeout()
        super().__init__(**merged)
        patches.replace("accelerate.optimizer:is_lomo_available", is_lomo_available)
        patches.replace("accelerate.utils.other:is_deepspeed_available", lambda: bool(sys.modules.get("deepspeed")))
        if self.plan.rehearsal:
            patches.ignore_warning("'pin_memory' argument is set as true but no accelerator is found")
        if self.plan.rehearsal and self.plan.precision != "fp32":
            cpu_matmul.start()
        of_strategy, of_backend = self.strategy.started(self.session()), self.backend.started(self.scaler_handler)
        if scaler := of_strategy or of_backend:
            self.native_amp, self.scaler = True, scaler
        self.models: list[PreparedModel] = []
        self.preparing = False  # whether this is inside `prepare`
        self.for_metrics = False  # whether this is inside `gather_for_metrics`
        self.freed: list[dict[str, Any]] = []  # the evidence of models that were freed
        self.epochs: list[loaders.Epoch] = []  # one per prepared loader
        self.communication = OneStep()
        self.norms = clipping.Norms(self.strategy, self.backend)
        memory = Memory(self.device)
        self.record = Record(self.plan, folder, recorded, self.is_main_process)
        self.validated = False  # at all that is prepared, see `validate_prepared`
        self.uneven = False  # inside join_uneven_inputs without even batches
        self.between_steps = False  # after an update, before the next backward pass
        self.forward_passes, self.backward_passes = Passes(), 0
        self.draws = draws.Draws()
        self.computed = self.updated = 0, 0  # both at the last micro-batch, and at the last update
        self.resumed = False
        self.checkpoints = saving.Checkpoints(self.record, self.project_configuration, self.default_folder)
        self.steps = Steps(self.num_processes, self.checkpoints.newest_complete)
        self.run = ending.Run(self.strategy, self.record, self.steps, self.checkpoints, memory)
        self.run.repository = hub.repository(self.record.project) if self.is_main_process else None
        # Whether accumulation over several micro-batches is the launcher's alone, and the script has not begun any.
        self.never_accumulates = arguments.own_accumulation(script) is None and self.gradient_accumulation_steps > 1
        self.print(f"asked: {self.record.script} | {describe(self.plan)}")
        if self.is_local_main_process:
            settings.tell_launcher("asked", str(self.process_index))
        for line in (*arguments.notes(self.plan, script), *filter(None, [memory.note])):
            self.note(line)
        following.current = None
        if self.num_processes > 1 and saving.in_parts(self.strategy, self.backend) and alone.saves():
            following.start(weakref.WeakMethod(self.follow), weakref.WeakMethod(self.names_of))
        clipping.instead_of_torch(self)
        ending.made.append(self.run)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled and copied: a copy has no record of its own."""
        return self.__dict__ | {"run": copy.copy(self.run)}

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        """Lets go of what it holds. Its `run` stays, and closes the record at exit."""
        if at_exit() or vars(self).get("run") not in ending.made:  # modules are gone; it was refused, or is a copy
            return
        self.steps.losses.clear()
        self.strategy.dropped(self._models)
        if id(self) in patches.users:
            patches.users ^= {id(self), id(self.run)}

    def session(self) -> Session:
        """What the strategy sees of this run. Nothing keeps it: it refers to this object."""
        rank, main = self.process_index, self.is_main_process
        scripts = self.autocast_handler, self.scaler_handler, self.split_batches
        return Session(self.plan, self.device, rank, main, self.note, *scripts)

    def project_folder(self, merged: dict[str, Any]) -> tuple[str | Path, str | Path]:
        """Returns (project folder, folder of the record)."""
        named, folder, recorded = arguments.project(self.plan, merged, [run.record for run in ending.made])
        self.named_folder = bool(named or settings.default_project_dir())
        self.default_folder = None if named else str(Path(folder).absolute())
        return folder, recorded

    @property
    def project_dir(self) -> str:
        return super().project_dir or self.default_folder  # pyrefly: ignore[bad-return]

    @property
    def logging_dir(self) -> str:
        return super().logging_dir or self.default_folder  # pyrefly: ignore[bad-return]

    # ---- preparing ----

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        session = self.session()
        args = self.strategy.real(session, args)
        optimizers = [argument for argument in args if isinstance(argument, torch.optim.Optimizer)]
        self.strategy.refuse_state(optimizers)
        if line := dtypes.train_in_fp32(self.strategy, filter(trains, args), bool(optimizers)):
            self.run.put_in_fp32 = True
            self.note(line)
        if self.plan.rehearsal and any(cpu_matmul.of(model) for model in args if isinstance(model, nn.Module)):
            cpu_matmul.start()
        if os.environ.get("FAITHFUL_PERTURBED"):  # compare's control run: what does a change in the last bit do?
            self.perturb(filter(trains, args))
        how = session, self.strategy, self.backend
        models = to_convert(args, optimizers, self.backend.codes)
        converted = {at: convert(*how, model, optimizers) for at, model in models}
        before, self.preparing = list(self._optimizers), True
        try:
            accelerates = Accelerates(super().prepare, self.prepare_optimizer)
            prepared = self.strategy.prepare(session, accelerates, args, device_placement)
        finally:
            self.preparing = False
        kept = {id(optimizer) for optimizer in (*before, *prepared)}  # FSDP2's strategy throws others away
        self._optimizers[:] = [optimizer for optimizer in self._optimizers if id(optimizer) in kept]
        self._models[:] = dict.fromkeys(self._models)  # Accelerate has FSDP2's twice
        for at, module in enumerate(prepared):
            if isinstance(module, nn.Module) and not any(model.is_of(module) for model in self.models):
                self.models.append(PreparedModel(module, converted.get(at)))
                self.run.prepared = True
                if self.backend.codes or not self.strategy.replicates:
                    whole_weights.saved_whole(self.models[-1], self.whole_weights)
                if at in converted and self.num_processes > 1:
                    module.register_forward_pre_hook(self.forward_passes, prepend=True)
                    module.register_forward_pre_hook(following.before_forward, prepend=True)
        if optimizers:
            refuse_other_launch(self.strategy, self.distributed_type, self.num_processes)
        for optimizer in self._optimizers:
            for model in self.models:
                note = self.note if self.strategy.model_keeps_run else self.record.note
                if engine := model.attach_optimizer(*how[1:], optimizer, self.prepared_parameters(), note):
                    self.step_by(engine, optimizer)
                self.run.evidence = self.freed + [evidence.record for evidence in self.evidence]
        process.watch_others(ending.newest)
        first = next((model for model in self.models if model.evidence), None)
        if first and not any(m.first_batch for m in self.models):
            first.first_batch = FirstBatch(first.model)
        self.validated = False
        return prepared if len(args) > 1 else prepared[0]

    def step_by(self, engine: Engine, optimizer: Any) -> None:
        """Moves the optimizer step from `backward`, where Accelerate has DeepSpeed's, to `optimizer.step`. This way the
        gradient norm is checked before the update."""

        def step(self_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
            if closure is not None:
                raise Refused("DeepSpeed calls no closure of optimizer.step: use a ddp or fsdp config")
            if self.sync_gradients:
                self.before_update(optimizer)
                engine.step()
                self.after_update(optimizer)

        def zero_grad(self_: torch.optim.Optimizer, set_to_none: bool | None = None) -> None:
            if self.sync_gradients:
                self.steps.losses.clear()  # as Optimizer.zero_grad does
                engine.drop_gradients(set_to_none is not False)

        self.deepspeed_engine_wrapped.backward = engine.backward  # pyrefly: ignore[missing-attribute]
        optimizer.zero_grad = MethodType(zero_grad, optimizer)
        optimizer.step = MethodType(step, optimizer)  # a scheduler that is created later needs a method
        self.scaler = engine.scaler or self.scaler

    def perturb(self, models: Iterable[nn.Module]) -> None:
        """Changes every weight to the next larger number."""
        for model in models:
            perturb(model)
            self.record.seen["nudged"] = True

    @property
    def evidence(self) -> list[Evidence]:
        """The evidence of the prepared models that have a prepared optimizer."""
        return [model.evidence for model in self.models if model.evidence]

    def prepared_parameters(self) -> set[int]:
        """The ids of the parameters of all models that are prepared for training."""
        return prepared_parameters(self.models)

    def free_memory(self, *objects: Any) -> Any:
        """Forgets the prepared models, as Accelerate does. The run goes on with what is prepared next."""
        self.freed += [evidence.record for evidence in self.evidence if evidence.complete]
        self.run.evidence = self.freed
        self.strategy.free()
        if getattr(self, "deepspeed_engine_wrapped", None) is not None:
            self.scaler = None  # it refers to the engine's optimizer, and so to all masters and their state
        self.models, self.epochs, self.validated = [], [], False
        self.norms.clear()
        self.steps.losses.clear()
        return super().free_memory(*objects)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """As `prepare`, if the model is to be trained. Accelerate's own fails under DDP for a model without trainable
        parameters: here that one is for evaluation."""
        frozen = not any(parameter.requires_grad for parameter in model.parameters())
        if not self.preparing and not evaluation_mode and trains(model):
            return self.prepare(model, device_placement=None if device_placement is None else [device_placement])
        prepared = super().prepare_model(model, device_placement, evaluation_mode or frozen)
        if not self.preparing and not any(known.is_of(prepared) for known in self.models):
            self.models.append(PreparedModel(prepared, evaluation=evaluation_mode))
            self.run.prepared = True
        return prepared

    def _prepare_tp(self, *args: Any) -> tuple[Any, ...]:  # pyrefly: ignore[bad-override]
        """Nothing: the strategy has split the model. Accelerate's own, with FSDP2, needs transformers below 5."""
        return args

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> DataLoader:
        if getattr(data_loader, "num_workers", 0) and not getattr(data_loader, "_is_accelerate_prepared", False):
            data_loader.worker_init_fn = functools.partial(launcher.init_loader_worker, data_loader.worker_init_fn)
        groups = self.num_processes // self.plan.group_size
        if self.num_processes > 1:
            loaders.look_at(data_loader, groups, bool(self.dispatch_batches), self.record.note_once)
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        loaders.refuse_one_batch_for_all(prepared, groups)
        prepared.place = f"loader {len(self.epochs)}"  # see following.py
        self.epochs.append(loaders.Epoch(self.record.note_once if self.strategy.exchanges_in_passes else None))
        return self.epochs[-1].watch(prepared)

    def skip_first_batches(self, dataloader: DataLoader, num_batches: int = 0) -> loaders.Prepared | DataLoader:
        """The loader of the rest of an epoch, watched like the loader that it comes from."""
        left = loaders.as_before(super().skip_first_batches(dataloader, num_batches), dataloader)
        mine = next((epoch for epoch in self.epochs if any(loader is dataloader for loader in epoch.loaders)), None)
        return mine.watch(left) if mine else left

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """As `prepare`."""
        if not self.preparing and not getattr(optimizer, "_is_accelerate_prepared", False):
            return self.prepare(optimizer, device_placement=None if device_placement is None else [device_placement])
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if type(prepared) is accelerate.optimizer.AcceleratedOptimizer:
            prepared.__class__, prepared.accelerator = Optimizer, self  # pyrefly: ignore[missing-attribute]
        return prepared

    # ---- steps ----

    def validate_prepared(self) -> None:
        """Looks at everything that is prepared, and opens the record. Called in each step."""
        if self.uneven:
            raise Refused(
                "join_uneven_inputs without even batches: a process that has none left would miss optimizer "
                "steps, and its optimizer's state would be another. Leave even_batches at True to train, or "
                "only evaluate in it"
            )
        if self.validated:
            return
        self.validated = True
        refuse_untrained(self.strategy, self.models, self._optimizers)
        for evidence in self.evidence:
            evidence.record["optimizer_owns_all"] = not evidence.left_out()
        for line in notes(self.models, self._schedulers):  # again after each prepare
            self.record.note_once(line, line)
        self.record.seen["through_fp32"] = dict(cpu_matmul.active)
        if self.record.opened:
            return
        self.checkpoints.wait()  # opening deletes checkpoints that are not complete
        self.record.open(self.resumed, self.steps.taken)
        if (leading := self.leading()) is not None:
            self.record.seen["optimizer"] = described(self.strategy.torch_optimizer(leading))
        self.run.write()

    def leading(self) -> torch.optim.Optimizer | None:
        """The optimizer whose steps are those of the run: the first one of the first model, or None."""
        return next((model.optimizers[0] for model in self.models if model.evidence), None)

    def is_leading(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer is (self.leading() or optimizer)

    def note(self, line: str) -> None:
        """Prints a note for the user and keeps it in the record."""
        self.record.note(line)

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        self.never_accumulates = False
        self.stop_if_agreed()
        first = next(iter(self.evidence), None)
        models = tuple(each for given in models for each in (given if isinstance(given, list | tuple) else [given]))
        with super().accumulate(*models), self.communication.counted(first, self.gradient_state):
            yield
        before, self.computed = self.computed, (self.forward_passes.count, self.backward_passes)
        # Only a process that has computed nothing since the last micro-batch asks the others.
        if self.strategy.exchanges_in_passes and before == self.computed and not rank_sync.all_skip():
            raise SkippedAlone(
                "this process skips a micro-batch that another one computes, but under "
                f"{self.plan.strategy} all of them exchange weights or gradients in each pass: compute it and multiply "
                "its loss by 0, or use a ddp config"
            )

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.validate_prepared()
        self.stop_if_agreed()
        self.between_steps = False
        self.backward_passes += 1
        self.norms.clear()
        if self.scaler is not None:
            scaling.forget(self.scaler, [each for each in self._optimizers if not scaling.has_gradients(each)])
        # Under DeepSpeed the Trainer divides the loss itself, and tells the engine so by `scale_wrt_gas`.
        self.steps.backward(loss, self.gradient_accumulation_steps > 1 and kwargs.get("scale_wrt_gas", True))
        with self.strategy.in_backward([] if self.steps.tried else [model.model for model in self.models]):
            super().backward(loss, **kwargs)
        for evidence in self.evidence:
            self.backend.after_backward(evidence.model)

    def clip_grad_norm_(self, parameters: clipping.Parameters, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clips, and returns the norm over all processes before. `before_update` checks that it is finite."""
        parameters, elsewhere = clipping.as_list(parameters), self.norms.elsewhere
        self.refuse_between_passes(True)
        if self.scaler is not None:
            self.unscale_gradients(scaling.of_parameters(self._optimizers, parameters))
        self.norms.refuse_by_other(norm_type)
        if elsewhere:
            norm = elsewhere.clip_grad_norm_(parameters, max_norm)
        elif self.strategy.mixes_dtensors:
            norm = self._clip_grad_norm_dtensor_aware(parameters, max_norm, norm_type)
        else:
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return self.norms.keep(parameters, norm)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        self.norms.refuse_by_value()
        self.refuse_between_passes(True)
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        if self.scaler is not None:
            self.unscale_gradients(scaling.of_parameters(self._optimizers, parameters))
        if parameters:  # of none torch's function raises an error
            torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """As Accelerate's, of gradients that are still multiplied by fp16's scale."""
        given = self._optimizers if optimizer is None else optimizer
        if self.norms.elsewhere is None:
            scaling.divide(self.scaler, given if isinstance(given, list | tuple) else [given])

    def refuse_between_passes(self, clips: bool = False) -> None:
        """Raises Refused where gradients that are not averaged yet are clipped, or else given up, without effect."""
        self.strategy.refuse_between_passes([model.model for model in self.models], clips)

    def are_scaled(self, parameters: list[torch.Tensor]) -> bool:
        """Whether gradients of these parameters are multiplied by fp16's scale, which torch's clipping cannot know."""
        if self.scaler is None:
            return False
        return bool(scaling.undivided(self.scaler, scaling.of_parameters(self._optimizers, parameters)))

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Accelerate's. Without even batches it is for evaluations: `validate_prepared` refuses a step in it."""
        even = self.even_batches if even_batches is None else even_batches
        self.uneven = self.num_processes > 1 and not even
        try:
            with super().join_uneven_inputs(joinables, even_batches):
                yield
        finally:
            self.uneven = False

    def before_update(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """Called when all gradients of a step are there. Stops the run if the loss or their norm is not finite, or
        returns a flag that says so on the device, see `Steps.check`."""
        self.validate_prepared()  # here too, as a script may call loss.backward() itself
        if self.resumed:
            loaders.refuse_other_rest(self.epochs, self.gradient_state.active_dataloader)
            if loaders.trains_again(self.epochs, self.backward_passes - self.updated[1]):
                self.note(loaders.AGAIN)
        if self.never_accumulates:
            steps = self.gradient_accumulation_steps
            raise Refused(
                f"the launcher exports gradient_accumulation_steps {steps}, and the script steps after each "
                "micro-batch: put its step into `with accelerator.accumulate(model):`, or set 1 in the config"
            )
        for model in self.models:
            if model.live is not None and optimizer in model.optimizers:
                model.live.before_update(optimizer)
                self.steps.uses(self.strategy.used(model.model, optimizer))
        self.steps.copies = self.strategy.copies()
        inner, counts = optimizer.optimizer, self.is_leading(optimizer)  # pyrefly: ignore[missing-attribute]
        before, self.updated = self.updated, (self.forward_passes.count, self.backward_passes)
        self.steps.passes(*(now - then for now, then in zip(self.updated, before, strict=True)))
        found_inf = self.steps.check(self.norms.of(optimizer), self.scaler, inner, counts)
        for evidence in self.evidence:
            if evidence.waits_for(optimizer):
                evidence.before_first_update(optimizer)
        return found_inf

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        skipped, samples = self.optimizer_step_was_skipped, self.samples_per_step()
        for evidence in self.evidence:
            if evidence.waits_for(optimizer) and not skipped and evidence.after_first_update(optimizer):
                what = evidence.record["model"] if len(self.evidence) > 1 else self.record.script
                self.print(f"{what} | {evidence.summary()}" + (f" | global batch {samples}" if samples else ""))
        if self.is_leading(optimizer):
            self.steps.done(skipped)
            if self.steps.tried <= 2 and self.plan.num_processes > self.plan.group_size == 1:
                if self.draws.alike(self.epochs):
                    self.note(draws.ALIKE)
            self.run.draw()
            self.between_steps = True
            self.checkpoints.poll()
            process.handle_signals(self.note, ending.newest)

    def samples_per_step(self) -> int | None:
        first = next(filter(None, [model.first_batch for model in self.models]), None)
        if first and first.asked < 3:
            samples, hashes = first.result(self.plan, self.record.note_once)
            self.record.seen |= {"samples_per_step": samples, "first_batch": hashes} if samples else {}
        return self.record.seen["samples_per_step"]

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Also asks all processes whether one was told to stop, because an evaluation can be long."""
        same = self.strategy.same_batch  # then every process has every sample already
        objects = use_gather_object or not all(map(torch.is_tensor, tree_leaves(input_data)))
        self.strategy.refuse_metrics()
        if objects and self.plan.group_size > 1 and not same:
            raise Refused("gather_for_metrics of objects, of which the processes of a group have copies: use tensors")
        self.for_metrics = True
        try:
            data = input_data if same else super().gather_for_metrics(input_data, use_gather_object)
        finally:
            self.for_metrics = False
        if self.between_steps:
            if self.steps.anyone_told_to_stop(self.device):
                self.run.stop(self.save_state)
            self.steps.pause()
        return data

    def gather(self, tensor: Any) -> Any:
        """Accelerate's. For metrics each batch counts once, which the processes of a group share."""
        gathered, of_group = super().gather(tensor), self.plan.group_size
        if not self.for_metrics or of_group == 1:
            return gathered
        each = self.num_processes

        def first_of_groups(rows: torch.Tensor) -> torch.Tensor:
            return rows.view(each, len(rows) // each, *rows.shape[1:])[::of_group].flatten(0, 1)

        return recursively_apply(first_of_groups, gathered)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        if self.plan.tp_size > 1:
            raise Refused("split_between_processes: tensor parallel computes one batch in all processes, not parts")
        with super().split_between_processes(inputs, apply_padding) as part:
            yield part

    def stop_if_agreed(self) -> None:
        if self.steps.stopping and self.between_steps:
            self.run.stop(self.save_state)

    # ---- saving ----

    def asks(self, method: str, model: nn.Module | None, *args: Any) -> tuple[Any, ...]:
        """What the other processes are asked to `follow`, where the script calls a method on the main process alone."""
        at = next((at for at, known in enumerate(self.models) if model is not None and known.is_of(model)), None)
        return () if model is not None and at is None else (method, at, *args)

    def follow(self, method: str, at: int | None, *args: Any) -> None:
        getattr(self, method)(*([] if at is None else [self.models[at].model]), *args)

    def names_of(self, shards: list[Any]) -> list[tuple[int, str]]:
        return whole_weights.names_of([known.model for known in self.models], shards)

    def gather_shards(self, call: str, names: list[tuple[int, str]]) -> None:
        whole_weights.gather([known.model for known in self.models], call, names)

    def average(self, model: nn.Module, name: str, at: int) -> None:
        from faithful.models import averages  # only a strategy that shards loads it

        averages.follow(model, name, at)

    def wait_for_everyone(self) -> None:
        following.meet()
        super().wait_for_everyone()

    def save_state(  # pyrefly: ignore[bad-override]
        self, output_dir: str | Path | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> str:
        """Writes a checkpoint to `output_dir`, complete or not at all, and returns its path. With `async_save` it is
        written while training goes on. If that fails, training goes on too, and the process exits with an error."""
        others = {name: (value, None) for name, value in kwargs.items()}
        arguments.without_effect(self.record, "save_state", safe_serialization=(safe_serialization, True), **others)
        self.checkpoints.project = self.project_configuration  # a script may set another one
        self.run.settle()
        state, folder = self.run_state(), self.checkpoints.next_folder(self.steps.taken, output_dir)
        asks = self.asks("save_state", None, output_dir and str(output_dir))
        together, behind = saving.all_save(state, asks), saving.behind_training(self.async_save)
        if saving.among_all(folder.absolute().parent == self.record.folder, together):
            with self.record.writing("run.json"):
                self.record.begin(self.resumed, together=together)
        if together or self.is_main_process:
            scripts = self._save_model_state_pre_hook.values()
            weights = [self.get_state_dict(model) for model in self._models] if scripts else []
            models = list(map(unwrapped, self._models))  # under ZeRO too, as Accelerate keeps them under DDP
            hooks = [functools.partial(hook, models, weights) for hook in scripts]
            self.checkpoints.save(state, folder, together, hooks, weights, behind)
        if self.record.opened:
            self.run.write()  # a run that is killed later and resumed from here has its loss curve there
        return str(folder)

    def run_state(self) -> RunState:
        """What a checkpoint of the run holds, as it is now."""
        held = self.models, self._optimizers, self._schedulers, self._custom_objects, self.scaler, self.epochs
        return RunState(self.strategy, self.backend, *held, self.steps, self.step, self.run.stopping)

    def load_state(
        self, input_dir: str | Path | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Loads the checkpoint `input_dir`, or by default the newest complete one of the project folder."""
        others = {name: (value, {"strict": True}.get(name)) for name, value in kwargs.items()}
        arguments.without_effect(self.record, "load_state", load_kwargs=(load_kwargs or None, None), **others)
        if input_dir is None and not self.named_folder:
            raise Refused(
                "resuming the latest checkpoint needs --output_dir (a script of your own: project_dir), the "
                "folder of the run to go on with"
            )
        self.run.settle()
        self.checkpoints.project = self.project_configuration
        folder = self.checkpoints.find(input_dir)
        self.resumed = True
        if folder is not None:
            for hook in self._load_model_state_pre_hook.values():
                hook(list(map(unwrapped, self._models)), str(folder))
            self.step = self.checkpoints.load(self.run_state(), folder, self._models)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """{name: tensor} of the full weights, with the names of the unconverted model and without FP8 state."""
        return whole_weights.as_saved(self.strategy, model, self.whole_weights(model, unwrap))

    def whole_weights(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The same under the names of the parameters, where the model's own state_dict has others."""
        accelerates = functools.partial(super().get_state_dict, model, unwrap)
        return whole_weights.state_dict(self.strategy, model, accelerates, self.asks("get_state_dict", model))

    def save(self, obj: Any, f: str | os.PathLike, safe_serialization: bool = False) -> None:
        """As Accelerate's, with whole tensors in place of shards: then every process calls it."""
        writes = self.is_main_process or self.project_configuration.save_on_each_node
        super().save(whole_weights.whole(obj, writes), f, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes the weights as `model.safetensors`, with the model's config where its library is known; `end_training`
        adds the card. A shared tensor is saved once, under its first name."""
        weight_files.check_shard_size(max_shard_size)
        self.run.settle()
        self.run.peak = self.run.peak or self.run.memory.peak()  # training's: saving gathers and copies the weights
        folder, each_node = Path(save_directory), self.project_configuration.save_on_each_node
        if not saving.can_save(model, folder, self.record):
            return
        asks = self.asks("save_model", model, str(folder), max_shard_size)
        if safe_serialization and not each_node and (pieces := whole_weights.pieces(self.strategy, model, asks)):
            pieces = whole_weights.as_saved(self.strategy, model, saving.each_once(model, pieces))
            with launcher.saving_for_all():
                weight_files.stream_weights(pieces, folder, max_shard_size, self.is_main_process)
        else:
            offloaded = saving.is_offloaded(model)
            weights = weight_files.offloaded_weights(model) if offloaded else self.get_state_dict(model)
            if self.is_local_main_process if each_node and weights else self.is_main_process:  # 0 has those of shards
                tensors = {name: tensor for name, tensor in weights.items() if torch.is_tensor(tensor)}
                tensors = saving.each_once(model, tensors)
                with launcher.saving_for_all():
                    weight_files.write_weights(tensors, folder, max_shard_size, safe_serialization)
        if self.model_card and safe_serialization:
            self.run.describe_saved(model, folder)

    # ---- the record ----

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """May be called by the main process alone, as in Accelerate: it is no place to open the record."""
        self.record.arguments = of_arguments(config)
        if self.record.opened:
            self.run.write()
        super().init_trackers(project_name, config, init_kwargs or {})

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Logs to the trackers and to metrics.jsonl. May be called by one process, before the first step too."""
        self.run.settle()
        super().log(values, step=step, log_kwargs=log_kwargs)
        self.record.log(values, step, self.steps.taken, self.device)
        self.run.peak = self.run.memory.peak()
        if self.run.closed:
            self.run.write(now())  # with the values that it logs after the end
        self.steps.pause()

    def end_training(self) -> None:
        """Closes the record, while the processes can still communicate. Where others follow the main process, they do
        so until the script's end: it may save only then."""
        following.meet()
        self.run.finish()
        if following.current is None:
            super().end_training()
            patches.release(id(self))
        for tracker in self.trackers if following.current else ():
            tracker.finish()
