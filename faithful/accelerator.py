"""A subclass of Accelerate's Accelerator that does what its config says.

Its methods follow the order of a run: the launch, preparing, steps, saving, the record. Each strategy and each
precision backend has a module of its own (faithful/strategies, faithful/backends).
"""

import contextlib
import functools
import os
import sys
from pathlib import Path

import accelerate
import accelerate.optimizer
import torch
from accelerate.utils import broadcast_object_list, gather_object
from accelerate.utils.modeling import has_offloaded_params
from torch import nn

from faithful import (
    arguments,
    backends,
    checkpoint,
    clipping,
    config,
    foreign,
    launcher,
    loaders,
    machine,
    patches,
    process,
    products,
    state,
    strategies,
)
from faithful.backends.linear import refuse_unknown
from faithful.batch import FirstBatch
from faithful.blocks import compile_blocks
from faithful.errors import Refused, Stopped
from faithful.evidence import Layers, notes
from faithful.machine import Memory
from faithful.model import PreparedModel, trains
from faithful.optimizer import Optimizer
from faithful.plan import describe
from faithful.record import Record, described, errors_left, leave_error, now, of_arguments
from faithful.steps import Steps
from faithful.strategies import plain
from faithful.tensors import named, nudge, parameters_of
from faithful.whole_weights import saved_whole
from faithful.wire import Wire


@functools.cache
def is_lomo_available():
    return accelerate.utils.is_lomo_available()


class Accelerator(accelerate.Accelerator):
    current = None  # the newest one; faithful/process.py closes its record at exit

    # ---- the launch ----

    def __init__(self, *args, **kwargs):
        process.guard(Accelerator)  # before anything that can be refused, or waits for other processes
        patches.users.add(id(self))
        patches.silence("torch.utils._pytree", unless="is an Enum subclass")
        script, self.made_by = arguments.given(args, kwargs), os.getpid()
        self.plan = arguments.resolved(script, Accelerator.current)
        merged = arguments.merged(self.plan, script)
        folder, recorded = self.project_folder(merged)
        tf32 = machine.in_tf32()
        launcher.keep_patience()
        super().__init__(**merged)
        if self.plan.precision == "fp32" and self.plan.device == "cuda":
            patches.undo_with(
                "TF32 in torch.backends", lambda: machine.use_tf32("products" in tf32, "convolutions" in tf32)
            )
            machine.use_tf32("products" in tf32, "products" in tf32)  # torch's default is in convolutions alone
        patches.replace("accelerate.optimizer:is_lomo_available", is_lomo_available)
        if self.plan.strategy == "single" and "transformers.training_args" in sys.modules:
            counted = sys.modules["transformers.training_args"].TrainingArguments.n_gpu.fget
            one = property(lambda arguments: min(1, counted(arguments)))
            patches.replace("transformers.training_args:TrainingArguments.n_gpu", one)
        if self.plan.rehearsal and self.plan.precision != "fp32":
            products.start()
        self.backend.started(self, self.plan)
        clipping.instead_of_torch(self, lambda: Accelerator.current)
        self.models, self.freed = [], []  # PreparedModels; the evidence of models that were freed
        self.first_batch, self.norms, self.wire = None, clipping.Norms(), None
        self.steps, self.memory, self.peak = Steps(self.num_processes), Memory(self.device), None
        self.record = Record(self.plan, folder, recorded, self.is_main_process)
        self.resumed = self.between_steps = self.stopping = self.closed = self.looked = self.uneven = False
        # Whether accumulation over several micro-batches is the launcher's alone, and the script has not begun any.
        self.never_accumulates = arguments.own_accumulation(script) is None and self.gradient_accumulation_steps > 1
        self.newest = None  # the checkpoint of the last step for which this run has saved or loaded one: (step, path)
        self.epochs = []  # one per prepared loader
        self.before, Accelerator.current = Accelerator.current, self
        self.print(f"asked: {self.record.script} | {describe(self.plan)}")
        self.print(f"record: {self.record.shown}")
        for line in arguments.notes(self.plan, script):
            self.note(line)

    @property
    def strategy(self):
        return strategies.of(self.plan)

    @property
    def backend(self):
        return backends.of(self.plan)

    def __getstate__(self):
        """What is pickled and copied: not the Accelerators that this process made earlier."""
        return self.__dict__ | {"before": None}

    def project_folder(self, merged):
        """Returns (project folder, folder of the record)."""
        named, folder, recorded = arguments.project(self.plan, merged, Accelerator.current)
        self.named_folder = bool(named or config.default_project_dir())
        self.default_folder = None if named else str(Path(folder).absolute())
        return folder, recorded

    @property
    def project_dir(self):
        return super().project_dir or self.default_folder

    @property
    def logging_dir(self):
        return super().logging_dir or self.default_folder

    # ---- preparing ----

    def prepare(self, *args, device_placement=None):
        args = self.strategy.real(self, args)
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        if self.plan.rehearsal and any(products.of(one) for one in args if isinstance(one, nn.Module)):
            products.start()
        converted = {at: self.convert(model, optimizers) for at, model in enumerate(args) if trains(model)}
        prepared = self.strategy.prepare(self, super().prepare, args, device_placement)
        for at, one in enumerate(prepared):
            if isinstance(one, nn.Module) and not any(other.is_of(one) for other in self.models):
                self.models.append(PreparedModel(one, *converted.get(at, ())))
                saved_whole(self, one)
                if at in converted and self.num_processes > 1:
                    one.register_forward_pre_hook(launcher.passes, prepend=True)
        for optimizer in self._optimizers:
            for model in self.models:
                model.attach_optimizer(self, optimizer)
        self.first_batch = self.first_batch or (FirstBatch(self.evidence[0].model) if self.evidence else None)
        self.looked = False
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
        self.strategy.before_prepare(self, self.plan, model, optimizer)
        skipped = self.backend.convert(self, self.plan, model, optimizer)
        if self.plan.compile:
            compile_blocks(model, eager_in_eval=self.plan.backend == "ao")
        return layers, skipped

    @property
    def evidence(self):
        """The evidence of the prepared models that have a prepared optimizer."""
        return [one.evidence for one in self.models if one.evidence]

    def known(self):
        """The ids of all prepared parameters."""
        return set().union(*(one.parameters for one in self.models))

    def free_memory(self, *objects):
        """Forgets the prepared models, as Accelerate does. The run goes on with what is prepared next."""
        self.freed += [one.record for one in self.evidence if one.complete]
        self.strategy.free(self)
        self.models, self.epochs, self.looked = [], [], False
        self.norms.clear()
        self.steps.losses.clear()
        if self.record.seen["samples_per_step"] is None:
            self.first_batch = None
        return super().free_memory(*objects)

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        """Accelerate's, which DDP makes fail for a model without trainable parameters: there it is for evaluation."""
        frozen = not any(parameter.requires_grad for parameter in model.parameters())
        return super().prepare_model(model, device_placement, evaluation_mode or frozen)

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
        """Looks at everything that is prepared, and opens the record. Called in each step."""
        if self.uneven:
            raise Refused("join_uneven_inputs without even batches: a process that has none left would miss optimizer "
                          "steps, and its optimizer's state would be another. Leave even_batches at True to train, or "
                          "only evaluate in it")  # fmt: skip
        if self.looked:
            return
        self.looked = True
        if not self.evidence:
            self.train_without_evidence()
        refuse_unknown(self.plan.skip, [name for one in self.models if one.layers for name in one.layers.names])
        for line in notes(self):
            self.note(line)
        self.record.seen["through_fp32"] = dict(products.active)
        if self.record.opened:
            return
        self.record.open(self.resumed, self.steps.taken)
        if self.evidence:
            self.record.seen["optimizer"] = described(self.strategy.inner(self.leading()))
        self.write_record()

    def train_without_evidence(self):
        """Called where no prepared optimizer updates a prepared model. Raises Refused unless torch alone trains right
        then: in one process, or under DDP with a prepared model; both without FP8."""
        plan = self.plan
        if plan.level or not (plan.strategy == "single" or (plan.strategy == "ddp" and self.models)):
            raise Refused("no model and optimizer were prepared: call accelerator.prepare(model, optimizer, ...) first")
        self.note("no prepared optimizer updates a prepared model: steps are neither checked nor counted")

    def leading(self):
        """The optimizer whose steps are those of the run: the first one of the first model, or None."""
        return next((one.optimizers[0] for one in self.models if one.evidence), None)

    def note(self, line):
        """Prints a note for the user and keeps it in the record."""
        self.record.notes.append(line)
        self.print(f"note: {line}", flush=True)

    @contextlib.contextmanager
    def accumulate(self, *models):
        self.never_accumulates = False
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
        self.norms.clear()
        self.steps.backward(loss, self.sync_gradients)
        super().backward(loss, **kwargs)
        for evidence in self.evidence:
            self.backend.after_backward(self.plan, evidence.model)

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        """Clips, and returns the norm over all processes. `before_update` checks that it is finite."""
        own, parameters = clipping.own(self), clipping.listed(parameters)
        if own is None and self.plan.strategy in ("single", "ddp"):  # no DTensors, which Accelerate looks for
            self.unscale_gradients()
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        elif own is None:
            self.unscale_gradients()  # then Accelerate compares all parameters, which fails with several models
            norm = self._clip_grad_norm_dtensor_aware(parameters, max_norm, norm_type)
        else:
            clipping.check(self, parameters, norm_type)
            norm = own(parameters, max_norm, self._optimizers[0])
        norm = clipping.whole(norm)
        self.norms.keep(parameters, norm)
        return norm

    def clip_grad_value_(self, parameters, clip_value):
        clipping.check_value(self)
        self.unscale_gradients()  # Accelerate does the same, but raises an error under FSDP2
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        if parameters:  # none before the last micro-batch under FSDP2, and torch's function raises an error then
            torch.nn.utils.clip_grad_value_(parameters, clip_value)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables, even_batches=None):
        """Accelerate's. Without even batches it is for evaluations: `begin` refuses a step in it."""
        even = self.even_batches if even_batches is None else even_batches
        self.uneven = self.num_processes > 1 and not even
        try:
            with super().join_uneven_inputs(joinables, even_batches):
                yield
        finally:
            self.uneven = False

    def before_update(self, optimizer):
        """Called when all gradients of a step are there. Stops the run if the loss or their norm is not finite."""
        self.begin()  # here too, as a script may call loss.backward() itself
        if self.never_accumulates:
            steps = self.gradient_accumulation_steps
            raise Refused(
                f"the launcher exports gradient_accumulation_steps {steps}, and the script steps after each "
                "micro-batch: put its step into `with accelerator.accumulate(model):`, or set 1 in the config"
            )
        self.steps.check(self.norms.of(self, optimizer), self.scaler, self.newest_checkpoint)
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
        if optimizer is (self.leading() or optimizer):
            self.steps.done(skipped)
            if self.steps.loss_is_of_all:
                self.record.point(self.steps.taken, self.steps.loss)
            self.between_steps = True
            process.finish_steps_first(self)

    def samples_per_step(self):
        if self.record.seen["samples_per_step"] is None and self.first_batch:
            samples, hashes = self.first_batch.result(self.plan)
            self.record.seen |= {"samples_per_step": samples, "first_batch": hashes}
        return self.record.seen["samples_per_step"]

    def gather(self, tensor):
        launcher.begins("gather")
        return super().gather(tensor)

    def reduce(self, *args, **kwargs):
        launcher.begins("reduce")
        return super().reduce(*args, **kwargs)

    def wait_for_everyone(self):
        launcher.begins("wait")
        super().wait_for_everyone()

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
        written = self.newest == (self.steps.taken, folder.resolve()) and (folder / checkpoint.MANIFEST).exists()
        [written] = broadcast_object_list([written])
        self.stopping = True
        if not written:
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
            if output_dir.exists():  # as in Accelerate, which raises ValueError
                raise Refused(f"{output_dir} exists, of an earlier run perhaps: resume it, choose another project_dir, "
                              "or set project_configuration.iteration to the number to start with")  # fmt: skip
        elif output_dir is None:
            output_dir = self.checkpoints_folder() / f"checkpoint-{self.steps.taken}"
        in_parts = self.plan.strategy not in ("single", "ddp") or self.plan.level == "o3"
        agreed = self.stopping or launcher.all_come(f"save_state/{self.steps.taken}", needed=in_parts)
        folder, alone = Path(output_dir), not agreed
        if alone and in_parts:
            raise Refused("the main process alone calls save_state, but each process holds a part of the run: call it "
                          "on all of them")  # fmt: skip
        if alone and not self.is_main_process:
            return str(folder)
        weights = [self.get_state_dict(model) for model in self._models] if self._save_model_state_pre_hook else []

        def write_more(temporary):
            for hook in self._save_model_state_pre_hook.values():
                hook(self._models, weights, str(temporary))

        with launcher.writing():
            parts, values = state.collect(self, alone)
            if values["alone"]:
                self.note("the main process alone calls save_state: the others' random states are in no checkpoint")
            error = checkpoint.write(self, folder, parts, values, project.total_limit, write_more)
        if error:
            self.record.failed_saves += 1
            self.print(f"warning: {folder} could not be written ({error}); training goes on", flush=True)
        elif agreed:
            self.newest = self.steps.taken, folder.resolve()
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
        ours = not checkpoint.is_accelerates(folder)
        saved_by = state.put_back(self, folder) if ours else foreign.load(self, folder)
        if self.project_configuration.automatic_checkpoint_naming:
            self.project_configuration.iteration = (checkpoint.number(folder) or 0) + 1
        self.newest = self.steps.taken, folder.resolve()
        self.print(f"resumed from {folder} at step {self.steps.taken}")
        if ours and saved_by != self.num_processes:
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
        if self.strategy.sharded(model.parameters(), self.plan) and not launcher.all_come("get_state_dict", True):
            raise Refused("the main process alone asks for the weights, but each process holds a part of them: call "
                          "get_state_dict or save_model on all of them")  # fmt: skip
        whole = self.strategy.full_state(self, model)
        whole = super().get_state_dict(model, unwrap) if whole is None else whole  # unwrap=False keeps DDP's `module.`
        whole = dict(named(whole.items()))
        if self.plan.precision != "fp8":
            return whole
        tensors = {name: tensor for name, tensor in whole.items() if torch.is_tensor(tensor)}
        return {n: tensor for n, tensor in tensors.items() if ".fp8_" not in f".{n}" and not n.endswith("_extra_state")}

    def save_model(self, model, save_directory, max_shard_size="10GB", safe_serialization=True):
        """Writes the weights as `model.safetensors`. A shared tensor is saved once, under its first name."""
        self.peak = self.peak or self.memory.peak()  # training's peak: saving gathers and copies the weights
        offloaded = any(map(has_offloaded_params, model.modules()))
        if not offloaded and (empty := sum(one.is_meta for one in model.parameters())):
            raise Refused(f"save_model: {empty} parameters are on the meta device, so they have no values: load the "
                          "model's weights before")  # fmt: skip
        weights = checkpoint.offloaded_weights(model) if offloaded else self.get_state_dict(model)
        each_node = self.project_configuration.save_on_each_node and weights  # only process 0 has those of shards
        if not (self.is_local_main_process if each_node else self.is_main_process):
            return
        if Path(save_directory).is_file():  # Accelerate says so, too, and goes on
            self.record.failed_saves += 1
            return self.print(f"warning: {save_directory} is a file, save_model writes to a folder: nothing was saved")
        own = {name for name, _ in parameters_of(model)}
        twice = {name for name, _ in parameters_of(model, remove_duplicate=False)} - own
        plain_weights = {n: weight for n, weight in weights.items() if n not in twice and torch.is_tensor(weight)}
        checkpoint.write_weights(plain_weights, Path(save_directory), max_shard_size, safe_serialization)

    # ---- the record ----

    def init_trackers(self, project_name, config=None, init_kwargs=None):
        """May be called by the main process alone, as in Accelerate: it is no place to open the record."""
        self.record.arguments = of_arguments(config)
        if self.record.opened:
            self.write_record()
        super().init_trackers(project_name, config, init_kwargs or {})

    def log(self, values, step=None, log_kwargs=None):
        """Logs to the trackers and to metrics.jsonl. May be called by one process, before the first step too."""
        super().log(values, step=step, log_kwargs=log_kwargs)
        self.record.log(values, step, self.steps.taken, self.device)
        self.peak = self.memory.peak()
        if self.closed:
            self.write_record(now())  # with the values that it logs after the end
        self.steps.pause()

    def write_record(self, finished=None):
        if self.record.main:
            evidence = self.freed + [one.record for one in self.evidence]
            self.record.write(self.steps, evidence, self.peak or self.memory.peak(), finished)

    def end_training(self):
        """Closes the record, while the processes can still communicate."""
        if not self.closed and self.record.opened and self.record.status == "running":
            self.closed, self.record.status = True, "finished"
            if self.record.failed_saves:
                self.record.status, self.record.error = "failed", self.record.not_saved()
            together = launcher.all_come("end_training", needed=True)
            mine = [(self.steps.loss, self.peak or self.memory.peak())]
            everyone = gather_object(mine) if together else mine
            losses = [loss for loss, _ in everyone if loss is not None]
            self.steps.loss = sum(losses) / len(losses) if losses else None
            if self.plan.device != "cpu":
                self.peak = max(peak for _, peak in everyone)
            self.write_record(now())
            self.print(f"{self.record.status}: {self.record.shown}", flush=True)
            self.record.release()
            if together:
                self.wait_for_everyone()  # no process may exit while another still receives from it
        process.handle_signals_as_before()  # there is no step any more to stop after
        super().end_training()
        patches.release(id(self))

    def close(self, error, code):
        """Writes the final record, however the process ends. Returns the exit code."""
        if self.made_by != os.getpid():  # of the process that has forked this one
            return code
        launcher.tell("ended")
        record, stopped = self.record, self.record.status == "preempted"
        lost = error is not None and error.startswith((process.ENDED, process.SILENT))
        if self.closed:
            pass
        elif error is None and record.opened:
            self.closed = True
            record.status = "preempted" if stopped else "finished"  # for scripts that do not call end_training
            self.write_record(now())
            self.print(f"{record.status}: {record.shown}", flush=True)
        elif error is not None and (record.opened or (code != 2 and not (record.folder / "run.json").exists())):
            if not record.main and not lost:
                leave_error(record.folder, self.process_index, error)
            error = (lost and errors_left(record.folder)) or error
            self.closed, record.status, record.error = True, "failed", error
            with record.writing("run.json"):
                record.folder.mkdir(parents=True, exist_ok=True)
            self.write_record(now())
            self.print(f"failed: {record.shown}", flush=True)
        if record.failed_saves and not code:
            self.print(f"error: {record.not_saved()}", flush=True)
            code = 1
        if stopped:
            code = 130 if process.interrupted else 143
        return (self.before.close(error, code) or code) if self.before else code


def owns(optimizer, model):
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in ids for parameter in model.parameters())
