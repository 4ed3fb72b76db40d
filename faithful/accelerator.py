"""Accelerate's Accelerator, made to do what its config says.

A run goes through it from top to bottom: the launch, preparing, steps, saving, the record. What a strategy or a
precision backend does differently stands in its own module (faithful/strategies, faithful/backends).
"""

import contextlib
import functools
import math
import os
from pathlib import Path

import accelerate
import accelerate.optimizer
import torch
from accelerate.state import PartialState
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, broadcast_object_list, gather_object
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.tensor import DTensor

from faithful import arguments, backends, checkpoint, launcher, process, state, strategies
from faithful.backends.linear import refuse_unknown
from faithful.batch import FirstBatch
from faithful.blocks import compile_blocks
from faithful.errors import Refused, Stopped
from faithful.evidence import Evidence, Layers
from faithful.machine import Memory
from faithful.plan import describe, resolve
from faithful.record import Record, default_folder, now
from faithful.steps import Steps
from faithful.tensors import local, named, nudge
from faithful.wire import Wire


class Optimizer(accelerate.optimizer.AcceleratedOptimizer):
    """Accelerate's optimizer, whose Accelerator looks before and after each update."""

    def step(self, closure=None):
        if not self.gradient_state.sync_gradients:
            return super().step(closure)
        self.accelerator.before_update(self)
        super().step(closure)
        if self.scaler is not None and not math.isfinite(self.accelerator.steps.norm):
            self._is_overflow = True  # a fused optimizer, as on a GPU, skips inside its kernel: Accelerate can't see it
        self.accelerator.after_update(self)


class Accelerator(accelerate.Accelerator):
    current = None  # the one whose record `process` closes

    # ---- the launch ----

    def __init__(self, *args, **kwargs):
        self.plan = resolve()
        self.strategy, self.backend = strategies.of(self.plan), backends.of(self.plan)
        merged = arguments.merged(self.plan, arguments.given(args, kwargs))
        merged["project_config"] = self.project_folder(merged)
        super().__init__(**merged)
        # Accelerate searches the whole path for this package twice in every optimizer step.
        accelerate.optimizer.is_lomo_available = functools.cache(accelerate.utils.is_lomo_available)
        self.backend.started(self, self.plan)
        self.evidence, self.waiting, self.first_batch = [], [], None  # waiting: models whose optimizer is to come
        self.linear_names = []  # of all models, as they came
        self.steps, self.memory, self.peak = Steps(self.num_processes), Memory(self.device), None
        self.record = Record(self.plan, self.project_dir, self.is_main_process)
        self.resumed = self.between_steps = self.closed = False
        self.norm = self.wire = None
        Accelerator.current = self
        self.print(f"asked: {self.record.script} | {describe(self.plan)}")

    def project_folder(self, merged):
        """The script's ProjectConfiguration, with a new folder of its own where the script names none."""
        config = merged.pop("project_config", None) or ProjectConfiguration()
        folder = merged.pop("project_dir", None)
        self.named_folder = bool(config.project_dir or folder)
        if config.project_dir is None and folder is None:
            handlers = [one for one in merged["kwargs_handlers"] if isinstance(one, InitProcessGroupKwargs)]
            PartialState(**(handlers[0].to_kwargs() if handlers else {}))
            [folder] = broadcast_object_list([default_folder(self.plan)])
        if config.project_dir is None:
            config.set_directories(folder)
        return config

    # ---- preparing ----

    def prepare(self, *args, device_placement=None):
        args = list(args)
        fresh = [self.convert(args, model) for model in args if trains(model)]
        prepared = super().prepare(*args, device_placement=device_placement)
        result = prepared if len(args) > 1 else (prepared,)
        after = {id(before): now for before, now in zip(args, result, strict=True)}
        self.waiting += [(after[id(model)], layers, skipped) for model, layers, skipped in fresh]
        optimizers = [one for one in result if isinstance(one, torch.optim.Optimizer)]
        self.waiting = [one for one in self.waiting if not self.count(*one, optimizers)]
        return prepared

    def convert(self, args, model):
        """Makes `model` what the plan says, and in `args` its optimizer. Returns (model, its layers, those skipped)."""
        mine = ((i, one) for i, one in enumerate(args) if isinstance(one, torch.optim.Optimizer) and owns(one, model))
        at, optimizer = next(mine, (None, None))
        if at is None and (self.plan.strategy not in ("single", "ddp") or self.plan.backend == "msamp"):
            raise Refused(f"{self.plan.strategy} {self.plan.precision} wants a model and its optimizer in one call: "
                          "accelerator.prepare(model, optimizer, ...)")  # fmt: skip
        dtype = next(model.parameters()).dtype
        if dtype != torch.float32 and self.plan.precision != "fp32":
            raise Refused(f"the model comes in {str(dtype)[6:]}, which stays the dtype of its parameters: use an fp32 "
                          f"config, not {self.plan.precision}")  # fmt: skip
        if os.environ.get("FAITHFUL_TWIN"):  # compare's control: what does a change of one rounding do to this run?
            nudge(model)
            self.record.seen["nudged"] = True
        layers = Layers(self.plan, model)
        self.linear_names += layers.names
        self.strategy.before_prepare(self, self.plan, model, optimizer)
        optimizer, skipped = self.backend.convert(self, self.plan, model, optimizer)
        if at is not None:
            args[at] = optimizer
        if self.plan.compile:
            compile_blocks(model, eager_in_eval=self.plan.backend == "ao")
        return model, layers, skipped

    def prepare_data_loader(self, data_loader, *args, **kwargs):
        if getattr(data_loader, "generator", True) is None:
            # A loader draws a seed whenever it begins. Drawn from the generator that dropout uses, it would make a
            # resumed run, which begins in the middle, another run.
            data_loader.generator = torch.Generator().manual_seed(torch.initial_seed())
        if getattr(data_loader, "num_workers", 0) and not getattr(data_loader, "_is_accelerate_prepared", False):
            data_loader.worker_init_fn = functools.partial(launcher.loader_process, data_loader.worker_init_fn)
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_optimizer(self, optimizer, device_placement=None):
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if type(prepared) is accelerate.optimizer.AcceleratedOptimizer:
            prepared.__class__, prepared.accelerator = Optimizer, self
        return prepared

    def count(self, model, layers, skipped, optimizers):
        """Whether the optimizer of this prepared model is there; if so, the evidence is begun."""
        optimizer = next(
            (one for one in optimizers if self.strategy.owned(one) & set(map(id, model.parameters()))), None
        )
        if optimizer is None:
            return False
        self.strategy.after_prepare(self, self.plan, model, optimizer)
        skipped = skipped + (self.backend.after_prepare(self, self.plan, model, optimizer) or [])
        self.evidence.append(Evidence(self, self.plan, model, optimizer, layers, skipped))
        self.first_batch = self.first_batch or FirstBatch(model)
        return True

    # ---- steps ----

    def begin(self):
        """Everything is prepared: open the record, once."""
        if self.record.opened:
            return
        if not self.evidence:
            raise Refused("no model and optimizer were prepared: call accelerator.prepare(model, optimizer, ...) first")
        refuse_unknown(self.plan.skip, self.linear_names)
        [holds] = broadcast_object_list([self.is_main_process and self.record.holds_a_run()])
        self.record.open(holds and not self.resumed, self.steps.taken)
        self.record.seen["optimizer"] = described(self.strategy.inner(self.evidence[0].optimizer))
        self.write_record()

    @contextlib.contextmanager
    def accumulate(self, *models):
        self.stop_if_agreed()
        if self.wire is None and self.counts_wire():
            self.wire = Wire()
        with super().accumulate(*models), self.wire or contextlib.nullcontext():
            yield
        if self.wire is not None and self.sync_gradients:
            self.evidence[0].record["wire_bytes_per_step"] = round(self.wire.sent)
            self.wire = None

    def counts_wire(self):
        """Whether the next step's collectives are counted: the first one after everything exists. Compiled blocks would
        not run as such under a dispatch mode."""
        evidence = self.evidence[0] if self.evidence and not self.plan.compile else None
        return evidence is not None and evidence.complete and evidence.record["wire_bytes_per_step"] is None

    def backward(self, loss, **kwargs):
        self.begin()
        self.stop_if_agreed()
        self.between_steps = False
        self.steps.backward(loss, self.sync_gradients)
        super().backward(loss, **kwargs)
        for evidence in self.evidence:
            self.backend.after_backward(self.plan, evidence.model)

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        """The norm over all processes is kept: it tells whether the step is finite."""
        own = getattr(self.backend, "clip_grad_norm_", None) or getattr(self.strategy, "clip_grad_norm_", None)
        if own is None:
            self.norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        else:
            self.norm = own(list(parameters), max_norm, self._optimizers[0])
        self.norm = self.norm.full_tensor() if isinstance(self.norm, DTensor) else self.norm
        return self.norm

    def before_update(self, optimizer):
        """All gradients of the step are there. Nothing that is not finite gets into the weights."""
        if self.norm is None:  # the script does not clip
            own = getattr(self.backend, "clip_grad_norm_", None) or getattr(self.strategy, "clip_grad_norm_", None)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            self.norm = own(parameters, math.inf, optimizer) if own else torch.nn.utils.get_total_norm(gradients)
        norm, self.norm = self.norm, None
        self.steps.check(norm, self.scaler, self.newest_checkpoint)
        for evidence in self.evidence:
            if evidence.optimizer is optimizer and not evidence.complete:
                evidence.before_first_update()

    def after_update(self, optimizer):
        skipped, samples = self.optimizer_step_was_skipped, self.samples_per_step()
        for evidence in self.evidence:
            if evidence.optimizer is optimizer and not evidence.complete and not skipped:
                evidence.after_first_update()
                self.print(f"{self.record.script} | {evidence.truth()} | global batch {samples}")
        if optimizer is self.evidence[0].optimizer:
            self.steps.done(skipped)
            if self.steps.loss_is_of_all:
                self.record.point(self.steps.taken, self.steps.loss)
            self.between_steps = True
            process.finish_steps_first()

    def samples_per_step(self):
        if self.record.seen["samples_per_step"] is None:
            samples, hashes = self.first_batch.result(self.plan)
            self.record.seen |= {"samples_per_step": samples, "first_batch": hashes}
        return self.record.seen["samples_per_step"]

    def gather_for_metrics(self, input_data, use_gather_object=False):
        """Evaluation can be long: here, too, all processes ask each other whether one was told to stop."""
        alike = self.plan.split > 1  # tp: every process has seen every sample
        data = input_data if alike else super().gather_for_metrics(input_data, use_gather_object)
        if self.between_steps:
            if self.steps.anyone_told_to_stop(self.device):
                self.stop()
            self.steps.pause()
        return data

    def stop_if_agreed(self):
        if self.steps.stopping and self.between_steps:
            self.stop()

    def stop(self):
        """SIGTERM: a checkpoint of the last whole step, on all processes at once."""
        folder = Path(self.project_dir, f"checkpoint-{self.steps.taken}")
        sound = self.is_main_process and folder.exists() and checkpoint.unsound(folder) is None
        [there] = broadcast_object_list([sound])
        if not there:
            self.save_state(folder)
        self.record.status = "preempted"
        self.print(f"SIGTERM: stopped after step {self.steps.taken}")
        raise Stopped

    # ---- saving ----

    def save_state(self, output_dir=None, safe_serialization=True, **kwargs):
        """A checkpoint in `output_dir`, whole or not there. Where it cannot be written, training goes on, and the
        process ends with an error."""
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            output_dir = self.checkpoints_folder() / f"checkpoint_{project.iteration}"
        elif output_dir is None:
            output_dir = self.checkpoints_folder() / f"checkpoint-{self.steps.taken}"
        folder = Path(output_dir)
        weights = [self.get_state_dict(model) for model in self._models] if self._save_model_state_pre_hook else []

        def write_more(temporary):
            for hook in self._save_model_state_pre_hook.values():
                hook(self._models, weights, str(temporary))

        parts, values = state.collect(self)
        error = checkpoint.write(self, folder, parts, values, project.total_limit, write_more)
        if error:
            self.record.failed_saves += 1
            self.print(f"warning: {folder} could not be written ({error}); training goes on", flush=True)
        project.iteration += 1
        self.steps.pause()
        return str(folder)

    def load_state(self, input_dir=None, load_kwargs=None, **kwargs):
        """Goes on from a checkpoint: the folder, or where none is given the newest complete one of the project."""
        if input_dir is None and not self.named_folder:
            raise Refused("resuming the latest checkpoint needs --output_dir (a script of your own: project_dir), the "
                          "folder of the run to go on with")  # fmt: skip
        self.record.claim()
        folder = checkpoint.find(self, input_dir, self.checkpoints_folder())
        self.resumed = True
        if folder is None:
            self.print(f"no checkpoint in {self.checkpoints_folder()}: starting at step 0")
            return
        for hook in self._load_model_state_pre_hook.values():
            hook(list(self._models), str(folder))
        saved_by = state.put_back(self, folder)
        if self.project_configuration.automatic_checkpoint_naming:
            self.project_configuration.iteration = (checkpoint.number(folder) or 0) + 1
        self.print(f"resumed from {folder} at step {self.steps.taken}")
        if saved_by != self.num_processes:
            self.print(f"{saved_by} processes saved it, {self.num_processes} go on: from the same weights and "
                       "optimizer state, with other batches and random numbers")  # fmt: skip

    def newest_checkpoint(self):
        return next(iter(checkpoint.list_checkpoints(self.checkpoints_folder())), None)

    def checkpoints_folder(self):
        """Where checkpoints are whose folder the script does not name."""
        automatic = self.project_configuration.automatic_checkpoint_naming
        return Path(self.project_dir, "checkpoints") if automatic else Path(self.project_dir)

    def get_state_dict(self, model, unwrap=True):
        """Whole, plain weights under the names of the unconverted model, without FP8's own state."""
        whole = self.strategy.full_state(self, model)
        whole = super().get_state_dict(model, unwrap) if whole is None else whole
        tensors = {name: tensor for name, tensor in named(whole.items()) if torch.is_tensor(tensor)}
        return {n: tensor for n, tensor in tensors.items() if ".fp8_" not in f".{n}" and not n.endswith("_extra_state")}

    def save_model(self, model, save_directory, max_shard_size="10GB", safe_serialization=True):
        """The weights alone, as `model.safetensors`; a tensor that is shared stands under its first name."""
        self.peak = self.peak or self.memory.peak()  # of training: this gathers and copies the weights once more
        weights = self.get_state_dict(model)
        if not self.is_main_process:
            return
        own = {name for name, _ in named(model.named_parameters())}
        twice = {name for name, _ in named(model.named_parameters(remove_duplicate=False))} - own
        plain = {name: alone(weight) for name, weight in weights.items() if name not in twice}
        temporary, folder = Path(f"{save_directory}.tmp"), Path(save_directory)
        temporary.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(plain, temporary, max_shard_size=max_shard_size, safe_serialization=safe_serialization)
        folder.mkdir(exist_ok=True)
        for path in temporary.iterdir():
            checkpoint.sync(path)
            os.replace(path, folder / path.name)
        temporary.rmdir()

    # ---- the record ----

    def init_trackers(self, project_name, config=None, init_kwargs=None):
        self.begin()
        self.record.arguments = config
        self.write_record()
        super().init_trackers(project_name, config, init_kwargs or {})

    def log(self, values, step=None, log_kwargs=None):
        """To the trackers, and to metrics.jsonl."""
        self.begin()
        super().log(values, step=step, log_kwargs=log_kwargs)
        plain = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
        self.record.log(plain, self.steps.taken if step is None else step, self.device)
        self.peak = self.memory.peak()
        self.steps.pause()

    def write_record(self, finished=None):
        if self.record.main:
            evidence = self.evidence[0].record if self.evidence else None
            self.record.write(self.steps, evidence, self.peak or self.memory.peak(), finished)

    def end_training(self):
        """The run has done its steps: the record is closed while processes can still talk to each other."""
        if not self.closed and self.record.opened and self.record.status == "running":
            self.closed, self.record.status = True, "finished"
            if self.record.failed_saves:
                self.record.status, self.record.error = "failed", self.record.not_saved()
            everyone = gather_object([(self.steps.loss, self.peak or self.memory.peak())])
            losses = [loss for loss, _ in everyone if loss is not None]
            self.steps.loss = sum(losses) / len(losses) if losses else None
            if self.plan.device != "cpu":
                self.peak = max(peak for _, peak in everyone)
            self.write_record(now())
            self.print(f"{self.record.status}: {self.record.folder}", flush=True)
            self.wait_for_everyone()  # nobody leaves while another still reads what it sent
        super().end_training()

    def close(self, error, code):
        """However the process ends: writes the record, returns the exit code."""
        record, interrupted = self.record, self.record.status == "preempted"
        if self.closed:
            pass
        elif error is None and record.opened:
            self.closed = True
            record.status = "preempted" if interrupted else "ended"  # the script did not call end_training
            self.write_record(now())
            self.print(f"{record.status}: {record.folder}", flush=True)
        elif error is not None and (record.opened or (code != 2 and not (record.folder / "run.json").exists())):
            self.closed, record.status, record.error = True, "failed", error
            record.folder.mkdir(parents=True, exist_ok=True)
            self.write_record(now())
            self.print(f"failed: {record.folder}", flush=True)
        if record.failed_saves and not code:
            self.print(f"error: {record.not_saved()}", flush=True)
            return 1
        return 143 if interrupted else code


process.guard(lambda: Accelerator.current)  # from the import on: mistakes that come before an Accelerator, too


def trains(one):
    """Whether an argument of `prepare` is a model that is new here and has something to train."""
    fresh = isinstance(one, nn.Module) and not getattr(one, "_is_accelerate_prepared", False)
    return fresh and any(parameter.requires_grad for parameter in one.parameters())


def owns(optimizer, model):
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in ids for parameter in model.parameters())


def alone(tensor):
    """On the CPU, in memory of its own: FSDP2 gathers several tensors in one piece."""
    tensor = local(tensor.detach()).cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def described(optimizer):
    """An optimizer's class and the options of its groups, as JSON."""

    def plain(value):
        return value if value is None or isinstance(value, bool | int | float | str) else str(value)

    groups = [
        {key: plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "groups": groups}
