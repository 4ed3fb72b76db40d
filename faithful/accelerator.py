"""A subclass of Accelerate's Accelerator that does what its config says.

Its methods follow the order of a run: the launch, preparing, steps, saving, the record. Each strategy and each
precision backend has a module of its own (faithful/strategies, faithful/backends).
"""

import contextlib
import functools
import logging
import math
import os
from pathlib import Path

import accelerate
import accelerate.optimizer
import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from torch.distributed.tensor import DTensor

from faithful import arguments, backends, checkpoint, clipping, launcher, loaders, process, state, strategies
from faithful.backends.linear import refuse_unknown
from faithful.batch import FirstBatch
from faithful.blocks import compile_blocks
from faithful.errors import Refused, Stopped
from faithful.evidence import Evidence, Layers, notes
from faithful.machine import Memory
from faithful.optimizer import Optimizer
from faithful.plan import describe, resolve
from faithful.record import Record, described, now
from faithful.steps import Steps
from faithful.strategies import plain
from faithful.tensors import named, nudge
from faithful.wire import Wire

# torchao registers enums in a way that makes torch warn in every process. The warning is harmless.
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "is an Enum subclass" not in record.getMessage())


class Accelerator(accelerate.Accelerator):
    current = None  # the newest one; faithful/process.py closes its record at exit

    # ---- the launch ----

    def __init__(self, *args, **kwargs):
        process.guard(Accelerator)  # before anything that can be refused, or waits for other processes
        self.plan, self.made_by = resolve(), os.getpid()
        self.strategy, self.backend = strategies.of(self.plan), backends.of(self.plan)
        merged = arguments.merged(self.plan, arguments.given(args, kwargs))
        merged["project_config"] = self.project_folder(merged)
        super().__init__(**merged)
        # Accelerate searches sys.path for this package twice in every optimizer step: cache the answer.
        accelerate.optimizer.is_lomo_available = functools.cache(accelerate.utils.is_lomo_available)
        self.backend.started(self, self.plan)
        clipping.instead_of_torch(self, lambda: Accelerator.current)
        self.evidence, self.waiting, self.first_batch = [], [], None  # waiting: models without a prepared optimizer
        self.linear_names = []  # of all models, before conversion
        self.steps, self.memory, self.peak = Steps(self.num_processes), Memory(self.device), None
        self.record = Record(self.plan, self.project_dir, self.is_main_process)
        self.resumed = self.between_steps = self.stopping = self.closed = False
        self.norm = self.wire = None
        self.epochs, self.known = [], set()  # epochs: one per prepared loader; known: ids of all prepared parameters
        self.before, Accelerator.current = Accelerator.current, self
        self.print(f"asked: {self.record.script} | {describe(self.plan)}")
        self.print(f"record: {self.record.folder}")

    def project_folder(self, merged):
        made, self.named_folder = arguments.project(self.plan, merged, Accelerator.current)
        return made

    # ---- preparing ----

    def prepare(self, *args, device_placement=None):
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        fresh = [(at, self.convert(model, optimizers)) for at, model in enumerate(args) if trains(model)]
        prepared = self.strategy.prepare(self, super().prepare, args, device_placement)
        self.waiting += [(prepared[at], *converted) for at, converted in fresh]
        for one in prepared:
            if isinstance(one, nn.Module):
                self.known |= set(map(id, one.parameters()))
        for one in prepared:
            if isinstance(one, torch.optim.Optimizer):
                self.belongs(one)
        return prepared if len(args) > 1 else prepared[0]

    def convert(self, model, optimizers):
        """Converts `model` in place as planned. Returns (its Layers before conversion, [(name, reason)] skipped)."""
        optimizer = next((one for one in optimizers if owns(one, model)), None)
        dtype = next(parameter for parameter in model.parameters() if parameter.requires_grad).dtype
        if dtype != torch.float32 and self.plan.precision != "fp32":
            raise Refused(f"the model's parameters are in {str(dtype)[6:]}, and {self.plan.precision} needs them in "
                          "fp32: build the model in fp32, or use an fp32 config")  # fmt: skip
        if os.environ.get("FAITHFUL_TWIN"):  # compare's control run: how much does a change in the last bit matter?
            nudge(model)
            self.record.seen["nudged"] = True
        layers = Layers(self.plan, model, set().union(*map(plain.owned, optimizers)))
        self.linear_names += layers.names
        self.strategy.before_prepare(self, self.plan, model, optimizer)
        skipped = self.backend.convert(self, self.plan, model, optimizer)
        if self.plan.compile:
            compile_blocks(model, eager_in_eval=self.plan.backend == "ao")
        return layers, skipped

    def belongs(self, optimizer):
        """Assigns a prepared optimizer to the models that it updates, and begins the evidence of each."""
        mine = self.strategy.owned(optimizer)
        for evidence in self.evidence:
            if mine & set(map(id, evidence.parameters.values())) and optimizer not in evidence.optimizers:
                self.backend.another_optimizer(self.plan, evidence.model, optimizer)
                evidence.optimizers.append(optimizer)
        for waiting in list(self.waiting):
            model, layers, skipped = waiting
            if mine & set(map(id, model.parameters())):
                self.waiting.remove(waiting)
                self.strategy.after_prepare(self, self.plan, model, optimizer)
                skipped = skipped + (self.backend.after_prepare(self, self.plan, model, optimizer) or [])
                self.evidence.append(Evidence(self, self.plan, model, optimizer, layers, skipped))
                self.first_batch = self.first_batch or FirstBatch(model)

    def prepare_data_loader(self, data_loader, *args, **kwargs):
        if getattr(data_loader, "num_workers", 0) and not getattr(data_loader, "_is_accelerate_prepared", False):
            data_loader.worker_init_fn = functools.partial(launcher.loader_process, data_loader.worker_init_fn)
        self.epochs.append(loaders.Epoch())
        return self.epochs[-1].watch(super().prepare_data_loader(data_loader, *args, **kwargs))

    def skip_first_batches(self, dataloader, num_batches=0):
        """The loader of the rest of an epoch, watched like the loader that it comes from."""
        left = super().skip_first_batches(dataloader, num_batches)
        mine = next((epoch for epoch in self.epochs if any(one is dataloader for one in epoch.loaders)), None)
        return mine.watch(left) if mine else left

    def prepare_optimizer(self, optimizer, device_placement=None):
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if type(prepared) is accelerate.optimizer.AcceleratedOptimizer:
            prepared.__class__, prepared.accelerator = Optimizer, self
        return prepared

    # ---- steps ----

    def begin(self):
        """Opens the record at the first call, when everything is prepared."""
        if self.record.opened:
            return
        if not self.evidence:
            raise Refused("no model and optimizer were prepared: call accelerator.prepare(model, optimizer, ...) first")
        refuse_unknown(self.plan.skip, self.linear_names)
        for line in notes(self):
            self.note(line)
        [holds] = broadcast_object_list([self.is_main_process and self.record.holds_a_run()])
        self.record.open(holds and not self.resumed, self.steps.taken)
        self.record.seen["optimizer"] = described(self.strategy.inner(self.evidence[0].optimizers[0]))
        self.write_record()

    def note(self, line):
        """Prints a note for the user and keeps it in the record."""
        self.record.notes.append(line)
        self.print(f"note: {line}", flush=True)

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
        """Whether to count the next step's collectives: once, after the first step. A dispatch mode, which counts them,
        would switch compiled blocks off."""
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
        """Clips, and keeps the norm over all processes: `before_update` checks that it is finite."""
        own, parameters = clipping.own(self), list(parameters)
        if own is None and self.plan.strategy in ("single", "ddp"):  # no DTensors, which Accelerate looks for
            self.unscale_gradients()
            self.norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        elif own is None:
            self.norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        else:
            clipping.check(self, parameters, norm_type)
            self.norm = own(parameters, max_norm, self._optimizers[0])
        self.norm = self.norm.full_tensor() if isinstance(self.norm, DTensor) else self.norm
        return self.norm

    def clip_grad_value_(self, parameters, clip_value):
        clipping.check_value(self)
        self.unscale_gradients()  # Accelerate does the same, but raises an error under FSDP2
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def join_uneven_inputs(self, joinables, even_batches=None):
        if self.num_processes > 1 and not (self.even_batches if even_batches is None else even_batches):
            raise Refused("join_uneven_inputs without even batches: a process that has none left would miss optimizer "
                          "steps, and its optimizer's state would be another. Leave even_batches at True")  # fmt: skip
        return super().join_uneven_inputs(joinables, even_batches)

    def before_update(self, optimizer):
        """Called when all gradients of a step are there. Stops the run if the loss or their norm is not finite."""
        self.begin()  # here too, as a script may call loss.backward() itself
        if self.norm is None:  # the script does not clip
            own = clipping.own(self)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            self.norm = own(parameters, math.inf, optimizer) if own else torch.nn.utils.get_total_norm(gradients)
        norm, self.norm = self.norm, None
        self.steps.check(norm, self.scaler, self.newest_checkpoint)
        for evidence in self.evidence:
            if optimizer in evidence.optimizers and not evidence.complete:
                evidence.before_first_update(optimizer)

    def after_update(self, optimizer):
        skipped, samples = self.optimizer_step_was_skipped, self.samples_per_step()
        for evidence in self.evidence:
            if optimizer in evidence.optimizers and not evidence.complete and not skipped:
                evidence.after_first_update(optimizer)
                what = evidence.record["model"] if len(self.evidence) > 1 else self.record.script
                if evidence.complete:
                    self.print(f"{what} | {evidence.truth()} | global batch {samples}")
        if optimizer is self.evidence[0].optimizers[0]:
            self.steps.done(skipped)
            if self.steps.loss_is_of_all:
                self.record.point(self.steps.taken, self.steps.loss)
            self.between_steps = True
            process.finish_steps_first(self)

    def samples_per_step(self):
        if self.record.seen["samples_per_step"] is None:
            samples, hashes = self.first_batch.result(self.plan)
            self.record.seen |= {"samples_per_step": samples, "first_batch": hashes}
        return self.record.seen["samples_per_step"]

    def gather_for_metrics(self, input_data, use_gather_object=False):
        """Also asks all processes whether one was told to stop, because an evaluation can be long."""
        alike = self.plan.split > 1  # tp: every process has every sample already
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
        """Ends the run after SIGTERM or Ctrl-C, on all processes, with a checkpoint of the last complete step."""
        folder = Path(self.project_dir, f"checkpoint-{self.steps.taken}")
        sound = self.is_main_process and folder.exists() and checkpoint.unsound(folder) is None
        [there] = broadcast_object_list([sound])
        self.stopping = True
        if not there:
            self.save_state(folder)
        self.record.status = "preempted"
        why = "Ctrl-C" if process.interrupted else "SIGTERM"
        self.print(f"{why}: stopped after step {self.steps.taken}; {self.how_to_go_on()}", flush=True)
        raise KeyboardInterrupt if process.interrupted else Stopped

    def how_to_go_on(self):
        """A sentence for the user: what was saved, and how to resume it."""
        newest = self.newest_checkpoint()
        if newest is None:
            return "no checkpoint was saved"
        return (f"saved {newest}. To go on: the same command with --output_dir {self.project_dir} "
                "--resume_from_checkpoint latest (a script of your own: accelerator.load_state())")  # fmt: skip

    # ---- saving ----

    def save_state(self, output_dir=None, safe_serialization=True, **kwargs):
        """Writes a checkpoint to `output_dir`, complete or not at all, and returns its path. If it cannot be written,
        training goes on, and the process exits with an error at the end."""
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            output_dir = self.checkpoints_folder() / f"checkpoint_{project.iteration}"
        elif output_dir is None:
            output_dir = self.checkpoints_folder() / f"checkpoint-{self.steps.taken}"
        agreed = self.stopping or launcher.all_come(f"save_state/{self.steps.taken}")
        folder, alone = Path(output_dir), not agreed
        if alone and (self.plan.strategy not in ("single", "ddp") or self.plan.level == "o3"):
            raise Refused("the main process alone calls save_state, but each process holds a part of the run: call it "
                          "on all of them")  # fmt: skip
        if alone and not self.is_main_process:
            return str(folder)
        weights = [self.get_state_dict(model) for model in self._models] if self._save_model_state_pre_hook else []

        def write_more(temporary):
            for hook in self._save_model_state_pre_hook.values():
                hook(self._models, weights, str(temporary))

        parts, values = state.collect(self, alone)
        if values["alone"]:
            self.note("the main process alone calls save_state: the random states of the others are in no checkpoint")
        error = checkpoint.write(self, folder, parts, values, project.total_limit, write_more)
        if error:
            self.record.failed_saves += 1
            self.print(f"warning: {folder} could not be written ({error}); training goes on", flush=True)
        project.iteration += 1
        self.steps.pause()
        return str(folder)

    def load_state(self, input_dir=None, load_kwargs=None, **kwargs):
        """Loads the checkpoint `input_dir`, or by default the newest complete one of the project folder."""
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
        """The folder of checkpoints that the script saves without a path."""
        automatic = self.project_configuration.automatic_checkpoint_naming
        return Path(self.project_dir, "checkpoints") if automatic else Path(self.project_dir)

    def get_state_dict(self, model, unwrap=True):
        """{name: tensor} of the full weights, with the names of the unconverted model and without FP8 state."""
        if self.strategy.sharded(model.parameters(), self.plan) and not launcher.all_come("get_state_dict"):
            raise Refused("the main process alone asks for the weights, but each process holds a part of them: call "
                          "get_state_dict or save_model on all of them")  # fmt: skip
        whole = self.strategy.full_state(self, model)
        whole = super().get_state_dict(model, unwrap) if whole is None else whole
        tensors = {name: tensor for name, tensor in named(whole.items()) if torch.is_tensor(tensor)}
        return {n: tensor for n, tensor in tensors.items() if ".fp8_" not in f".{n}" and not n.endswith("_extra_state")}

    def save_model(self, model, save_directory, max_shard_size="10GB", safe_serialization=True):
        """Writes the weights as `model.safetensors`. A shared tensor is saved once, under its first name."""
        self.peak = self.peak or self.memory.peak()  # training's peak: saving gathers and copies the weights
        weights = self.get_state_dict(model)
        if not self.is_main_process:
            return
        own = {name for name, _ in named(model.named_parameters())}
        twice = {name for name, _ in named(model.named_parameters(remove_duplicate=False))} - own
        plain_weights = {name: weight for name, weight in weights.items() if name not in twice}
        checkpoint.write_weights(plain_weights, Path(save_directory), max_shard_size, safe_serialization)

    # ---- the record ----

    def init_trackers(self, project_name, config=None, init_kwargs=None):
        self.record.arguments = config
        if self.evidence:  # without a prepared optimizer there is nothing to record yet
            self.begin()
            self.write_record()
        super().init_trackers(project_name, config, init_kwargs or {})

    def log(self, values, step=None, log_kwargs=None):
        """Logs to the trackers and to metrics.jsonl."""
        if self.evidence:
            self.begin()
        super().log(values, step=step, log_kwargs=log_kwargs)
        plain = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
        if self.record.opened:
            self.record.log(plain, self.steps.taken if step is None else step, self.device)
        self.peak = self.memory.peak()
        self.steps.pause()

    def write_record(self, finished=None):
        if self.record.main:
            evidence = [one.record for one in self.evidence]
            self.record.write(self.steps, evidence, self.peak or self.memory.peak(), finished)

    def end_training(self):
        """Closes the record, while the processes can still communicate."""
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
            self.wait_for_everyone()  # no process may exit while another still receives from it
        process.handle_signals_as_before()  # there is no step any more to stop after
        super().end_training()

    def close(self, error, code):
        """Writes the final record, however the process ends. Returns the exit code."""
        if self.made_by != os.getpid():  # of the process that has forked this one
            return code
        record, stopped = self.record, self.record.status == "preempted"
        if self.closed:
            pass
        elif error is None and record.opened:
            self.closed = True
            record.status = "preempted" if stopped else "finished"  # for scripts that do not call end_training
            self.write_record(now())
            self.print(f"{record.status}: {record.folder}", flush=True)
        elif error is not None and (record.opened or (code != 2 and not (record.folder / "run.json").exists())):
            self.closed, record.status, record.error = True, "failed", error
            record.folder.mkdir(parents=True, exist_ok=True)
            self.write_record(now())
            self.print(f"failed: {record.folder}", flush=True)
        if record.failed_saves and not code:
            self.print(f"error: {record.not_saved()}", flush=True)
            code = 1
        if stopped:
            code = 130 if process.interrupted else 143
        return (self.before.close(error, code) or code) if self.before else code


def trains(one):
    """Whether an argument of `prepare` is a model that is not prepared yet and has trainable parameters."""
    fresh = isinstance(one, nn.Module) and not getattr(one, "_is_accelerate_prepared", False)
    return fresh and any(parameter.requires_grad for parameter in one.parameters())


def owns(optimizer, model):
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in ids for parameter in model.parameters())
