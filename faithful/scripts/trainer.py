"""transformers' Trainer, and those made of it: trl's, sentence-transformers'. What a run needs of it is changed when
its modules are loaded: a script may import them before or after its Accelerator, and that takes a second.

TrainingArguments(bf16=True), and trl's, which are so by default, are made on a machine without an accelerator, too.
There transformers raises an error, although its Trainer only hands the precision on to `Accelerator(mixed_precision=)`.
TrainingArguments(deepspeed=) would set DeepSpeed up before an Accelerator can say that this is the config's.

Trainer.save_model writes what `from_pretrained` loads, in every config. The optimizer in its checkpoints is that of the
main process, so checkpoints with it are refused under tensor parallel, where that is no whole one.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from faithful import patches
from faithful.config import settings
from faithful.errors import Refused
from faithful.launch import launcher
from faithful.saving import whole_weights

BF16 = "transformers.training_args:is_torch_bf16_gpu_available"
MADE = "transformers.training_args:TrainingArguments.__post_init__"
SAVE = "transformers.trainer:Trainer.save_model"
RESUME = "transformers.trainer:Trainer._load_optimizer_and_scheduler"
OPTIMIZER = "optimizer.pt"  # in a checkpoint
IN_PARTS = (
    "under tp each process holds a part of the optimizer, and transformers' Trainer saves and loads the main process's"
)


def change() -> None:
    """Changes the modules that are loaded, and the others when they are, until the run ends."""
    for name, change_of in CHANGES.items():
        if name in sys.modules:
            change_of(sys.modules[name])
        elif not any(isinstance(finder, WhenLoaded) and finder.module == name for finder in sys.meta_path):
            finder = WhenLoaded(name)
            sys.meta_path.insert(0, finder)
            patches.undo_with(CHANGED[name], lambda f=finder: f in sys.meta_path and sys.meta_path.remove(f))


def leave_to_the_config(module: ModuleType) -> None:
    found, made = module.is_torch_bf16_gpu_available, module.TrainingArguments.__post_init__
    if getattr(found, "__module__", None) == __name__:  # by an earlier Accelerator
        return

    def is_torch_bf16_gpu_available() -> bool:
        return found() or not torch.accelerator.is_available()

    def __post_init__(self: Any) -> None:
        if self.deepspeed:
            raise Refused(
                "the script passes deepspeed to TrainingArguments, which is the config's to say: leave it out, and use "
                "a zero config, or name the file as deepspeed_config_file in a YAML of yours"
            )
        checkpoints = not self.save_only_model and self.save_strategy != "no"
        # now, as the first of them may come at the end, and before the processes connect, which one would wait for
        if checkpoints and settings.read_env(os.environ).strategy == "tp":
            raise Refused(
                f"{IN_PARTS}: pass save_only_model=True or save_strategy='no' to TrainingArguments, or use a ddp or "
                "fsdp config, whose checkpoints are whole"
            )
        made(self)

    patches.replace(BF16, is_torch_bf16_gpu_available, module, "is_torch_bf16_gpu_available")
    patches.replace(MADE, __post_init__)


def save_whole(module: ModuleType) -> None:
    original = module.Trainer.save_model
    if original.__module__ == __name__:  # by an earlier Accelerator
        return

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Every process calls it. Shards of DTensors are gathered on all, whatever the type of FSDP's checkpoints: with
        sharded ones the Trainer saves no model, and of tensor parallel it asks the main process alone."""
        strategy = getattr(self.accelerator, "strategy", None)
        if strategy is None or not strategy.mixes_dtensors:
            return original(self, output_dir, _internal_call)
        weights = self.accelerator.whole_weights(self.model)
        state = whole_weights.as_saved(strategy, self.model, weights)
        if self.args.should_save:  # before 5.23 `_save` does not ask
            # sentence-transformers' does not hand `state_dict` on
            with whole_weights.inside(self.model, weights), launcher.saving_for_all():
                self._save(output_dir or self.args.output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    load = module.Trainer._load_optimizer_and_scheduler

    def load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        plan = getattr(self.accelerator, "plan", None)
        if plan and plan.strategy == "tp" and checkpoint and Path(checkpoint, OPTIMIZER).exists():
            raise Refused(
                f"{Path(checkpoint, OPTIMIZER)}: {IN_PARTS}: begin anew with the model of this checkpoint "
                "(from_pretrained), or train under a ddp or fsdp config"
            )
        load(self, checkpoint)

    patches.replace(SAVE, save_model)
    patches.replace(RESUME, load_optimizer_and_scheduler)


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "transformers.training_args": leave_to_the_config,
    "transformers.trainer": save_whole,
}
CHANGED = {row.partition(":")[0]: row for row in (BF16, SAVE)}


class WhenLoaded(MetaPathFinder):
    """An entry of sys.meta_path that changes a module once it is loaded."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                CHANGES[name](module)

            spec.loader.exec_module = execute_and_change
        return spec
