"""The Accelerator's `save_state`, `load_state` and `save_model`: who takes part, which folder, what the user is told.

checkpoint.py has the files of a checkpoint, state.py its content, weight_files.py the files of save_model.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from accelerate.utils.modeling import has_offloaded_params
from safetensors import SafetensorError
from torch import nn

from faithful.checkpoint import accelerate_format, checkpoints, weight_files
from faithful.errors import Refused
from faithful.launch import launcher, machine, rank_sync
from faithful.saving import state, whole_weights
from faithful.tensors.names import parameters_of

if TYPE_CHECKING:
    from faithful.accelerator import Accelerator


def save_state(accelerator: "Accelerator", output_dir: Path | str | None) -> str:
    steps, project = accelerator.steps, accelerator.project_configuration
    folder = checkpoint_folder(accelerator, output_dir)
    in_parts = not accelerator.strategy.replicates or accelerator.backend.in_parts
    together = accelerator.stopping or rank_sync.all_ranks_called(f"save_state/{steps.taken}", needed=in_parts)
    if in_parts and not together:
        raise Refused(
            "the main process alone calls save_state, but each process holds a part of the run: call it on all of them"
        )
    if not together and not accelerator.is_main_process:
        return str(folder)
    hooks = accelerator._save_model_state_pre_hook.values()
    weights = [accelerator.get_state_dict(model) for model in accelerator._models] if hooks else []
    wait_for_save(accelerator)
    if not together:
        accelerator.note("the main process alone calls save_state: the others' random states are in no checkpoint")
    save = checkpoints.Save(accelerator, folder, not together, project.total_limit)
    try:
        parts, values = state.state_dict(accelerator, alone=not together, keeps=save.rank == save.keeper)
    except BaseException:  # of an object that the script has registered, say
        save.give_up()
        raise
    try:
        for hook in hooks:
            hook(accelerator._models, weights, str(save.temporary))
    except (OSError, SafetensorError) as problem:
        save.error = save.error or str(problem)
    save.step = steps.taken if together else None
    accelerator.saving = save
    if saves_behind_training(accelerator) and room_for_a_copy(parts):
        save.behind(state.host_copy(parts), values)
    else:
        with launcher.saving_may_outlive_launcher():
            save.write(parts, values)
        wait_for_save(accelerator)
    project.iteration += 1
    steps.pause()
    return str(folder)


def saves_behind_training(accelerator: "Accelerator") -> bool:
    """Whether to write while training goes on: FAITHFUL_ASYNC_SAVE (1 or 0), or as the class says. The last checkpoint
    of a run that was told to stop is written at once."""
    choice = os.environ.get("FAITHFUL_ASYNC_SAVE", str(int(accelerator.async_save)))
    if choice not in ("0", "1"):
        raise Refused(f"FAITHFUL_ASYNC_SAVE={choice}: set 1 to save while training goes on, or 0 to wait")
    return choice == "1" and not accelerator.stopping


def room_for_a_copy(parts: dict[str, torch.Tensor]) -> bool:
    """Whether the host has room for a second copy of these tensors, in each process of this machine, twice."""
    size = sum(tensor.nbytes for tensor in parts.values())
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return psutil.virtual_memory().available > 2 * size * processes


def wait_for_save(accelerator: "Accelerator", seconds: float | None = None) -> None:
    """Waits until the checkpoint that is being written is complete, and tells the user if it could not be."""
    if accelerator.saving is not None:
        accelerator.saving.wait(seconds)
        poll_save(accelerator)


def poll_save(accelerator: "Accelerator") -> None:
    """Takes note of how writing a checkpoint ended, if it has ended."""
    save = accelerator.saving
    if save is None or not save.finished():
        return
    accelerator.saving = None
    machine.trim_memory()  # of the copies
    if save.error:
        accelerator.record.failed_saves += 1
        accelerator.print(f"warning: {save.folder} could not be written ({save.error}); training goes on", flush=True)
    elif save.step is not None:
        accelerator.newest = save.step, save.folder


def default_folder(accelerator: "Accelerator") -> Path:
    """The folder of checkpoints that the script saves without a path."""
    automatic = accelerator.project_configuration.automatic_checkpoint_naming
    return Path(accelerator.project_dir, "checkpoints") if automatic else Path(accelerator.project_dir)


def checkpoint_folder(accelerator: "Accelerator", output_dir: Path | str | None) -> Path:
    """The folder of the next checkpoint. output_dir: the script's, or None."""
    project, folder = accelerator.project_configuration, default_folder(accelerator)
    if not project.automatic_checkpoint_naming:
        return folder / f"checkpoint-{accelerator.steps.taken}" if output_dir is None else Path(output_dir)
    folder = folder / f"checkpoint_{project.iteration}"
    if folder.exists():  # as in Accelerate, which raises ValueError
        raise Refused(
            f"{folder} exists, of an earlier run perhaps: resume it, choose another project_dir, or set "
            "project_configuration.iteration to the number to start with"
        )
    return folder


def load_state(accelerator: "Accelerator", input_dir: Path | str | None) -> None:
    if input_dir is None and not accelerator.named_folder:
        raise Refused(
            "resuming the latest checkpoint needs --output_dir (a script of your own: project_dir), the "
            "folder of the run to go on with"
        )
    accelerator.record.claim()
    wait_for_save(accelerator)
    with readable(default_folder(accelerator) if input_dir is None else input_dir):
        folder = checkpoints.find(accelerator, input_dir, default_folder(accelerator))
    accelerator.resumed = True
    if folder is None:
        accelerator.print(f"no checkpoint in {default_folder(accelerator)}: starting at step 0")
        return
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(list(accelerator._models), str(folder))
    processes = accelerator.num_processes
    if checkpoints.is_accelerates(folder):
        accelerate_format.load(accelerator, folder)
        saved_by = processes
    else:
        with readable(folder):
            saved_by = state.load_state_dict(accelerator, folder)
    if accelerator.project_configuration.automatic_checkpoint_naming:
        accelerator.project_configuration.iteration = (checkpoints.number(folder) or 0) + 1
    accelerator.newest = accelerator.steps.taken, folder.resolve()
    accelerator.print(f"resumed from {folder} at step {accelerator.steps.taken}")
    if saved_by != processes:
        accelerator.print(
            f"{saved_by} processes saved it, {processes} go on: from the same weights and optimizer "
            "state, with other batches and random numbers"
        )


@contextlib.contextmanager
def readable(folder: Path | str) -> Iterator[None]:
    """Turns an error in reading a file of a checkpoint into a refusal that names it."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise Refused(f"{error.filename or folder} cannot be read ({why}): take another checkpoint") from None


def save_model(
    accelerator: "Accelerator", model: nn.Module, folder: Path, max_shard_size: int | str, safe_serialization: bool
) -> None:
    offloaded = any(map(has_offloaded_params, model.modules()))
    if not offloaded and (empty := sum(parameter.is_meta for parameter in model.parameters())):
        raise Refused(
            f"save_model: {empty} parameters are on the meta device, so they have no values: load the "
            "model's weights before"
        )
    if folder.is_file():  # Accelerate says so, too, and goes on
        if accelerator.is_main_process:
            accelerator.record.failed_saves += 1
            accelerator.print(f"warning: {folder} is a file, save_model writes to a folder: nothing was saved")
        return
    first_names = {name for name, _ in parameters_of(model)}
    twice = {name for name, _ in parameters_of(model, remove_duplicate=False)} - first_names
    each_node = accelerator.project_configuration.save_on_each_node
    if safe_serialization and not each_node and (pieces := whole_weights.pieces(accelerator, model)):
        pieces = {name: piece for name, piece in pieces.items() if name not in twice}
        weight_files.stream_weights(pieces, folder, max_shard_size, accelerator.is_main_process)
        return
    weights = weight_files.offloaded_weights(model) if offloaded else accelerator.get_state_dict(model)
    each_node = each_node and weights  # only process 0 has those of shards
    if not (accelerator.is_local_main_process if each_node else accelerator.is_main_process):
        return
    tensors = {n: weight for n, weight in weights.items() if n not in twice and torch.is_tensor(weight)}
    weight_files.write_weights(tensors, folder, max_shard_size, safe_serialization)
