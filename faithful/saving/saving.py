"""The Accelerator's `save_state`, `load_state` and `save_model`: who takes part, which folder, what the user is told.

checkpoints.py has the files of a checkpoint, state.py its content, weight_files.py the files of save_model.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch
from accelerate.state import PartialState
from accelerate.utils import ProjectConfiguration, broadcast_object_list
from accelerate.utils.modeling import has_offloaded_params
from safetensors import SafetensorError
from torch import nn

from faithful.checkpoint import accelerate_format, checkpoints
from faithful.errors import Refused
from faithful.evidence.record import Record
from faithful.launch import launcher, machine, rank_sync
from faithful.saving.state import RunState, host_copy
from faithful.tensors.names import parameters_of

if TYPE_CHECKING:
    from faithful.backends.base import Backend
    from faithful.strategies.base import Strategy


def all_save(state: RunState, asks: tuple[Any, ...]) -> bool:
    """Whether all processes save, or the main one alone. Raises Refused if it cannot. asks: see all_ranks_called."""
    parts = in_parts(state.strategy, state.backend)
    together = state.stopping or rank_sync.all_ranks_called(f"save_state/{state.steps.taken}", parts, asks)
    if parts and not together:
        raise Refused(
            "the main process alone calls save_state, but each process holds a part of the run: call it on all of "
            "them, before end_training()"
        )
    return together


def in_parts(strategy: "Strategy", backend: "Backend") -> bool:
    """Whether each process holds a part of the run, so that all of them save."""
    return not strategy.replicates or backend.in_parts


def among_all(here: bool, together: bool) -> bool:
    """What the main process says, where all processes of several machines save: each may name a folder of its own."""
    return broadcast_object_list([here])[0] if together and launcher.several_machines() else here


def behind_training(asked: bool) -> bool:
    """Whether to write while training goes on: FAITHFUL_ASYNC_SAVE (1 or 0), or as the class asks."""
    choice = os.environ.get("FAITHFUL_ASYNC_SAVE", str(int(asked)))
    if choice not in ("0", "1"):
        raise Refused(f"FAITHFUL_ASYNC_SAVE={choice}: set 1 to save while training goes on, or 0 to wait")
    return choice == "1"


def room_for_a_copy(parts: dict[str, torch.Tensor]) -> bool:
    """Whether the host has room for a second copy of these tensors, in each process of this machine, twice."""
    size = sum(tensor.nbytes for tensor in parts.values())
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return psutil.virtual_memory().available > 2 * size * processes


class Checkpoints:
    """The checkpoints of a run, one after the other. default: the project folder of a script that names none."""

    def __init__(self, record: Record, project: ProjectConfiguration, default: str | None) -> None:
        self.record, self.project, self.default = record, project, default
        self.going_on: checkpoints.Save | None = None  # that may still be written
        self.newest: tuple[int, Path] | None = None  # step and path of the last one that was saved or loaded

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"going_on": None}

    @property
    def project_dir(self) -> str:
        return cast(str, self.project.project_dir or self.default)

    @property
    def folder(self) -> Path:
        """The folder of checkpoints that the script saves without a path."""
        return Path(self.project_dir, "checkpoints" if self.project.automatic_checkpoint_naming else "")

    def next_folder(self, step: int, output_dir: Path | str | None) -> Path:
        """The folder of the next checkpoint. output_dir: the script's, or None."""
        if not self.project.automatic_checkpoint_naming:
            return self.folder / f"checkpoint-{step}" if output_dir is None else Path(output_dir)
        folder = self.folder / f"checkpoint_{self.project.iteration}"
        if folder.exists():  # as in Accelerate, which raises ValueError
            raise Refused(
                f"{folder} exists, of an earlier run perhaps: resume it, choose another project_dir, or set "
                "project_configuration.iteration to the number to start with"
            )
        return folder

    def newest_complete(self) -> Path | None:
        """The path of the newest complete checkpoint, when the one that is being written is complete, or None."""
        self.wait()
        with contextlib.suppress(OSError):
            if self.newest and self.elsewhere(self.newest[1]) and (self.newest[1] / checkpoints.MANIFEST).exists():
                return self.newest[1]
            return next(iter(checkpoints.list_checkpoints(self.folder)), None)

    def elsewhere(self, path: Path) -> bool:
        """Whether a checkpoint is in a folder that the script has named, where `load_state()` alone does not look."""
        return path.resolve().parent != self.folder.resolve()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the checkpoint that is being written is complete, and tells the user if it could not be."""
        if self.going_on is not None:
            self.going_on.wait(seconds)
            self.poll()

    def poll(self) -> None:
        """Takes note of how writing a checkpoint ended, if it has ended."""
        save = self.going_on
        if save is None or not save.finished():
            return
        self.going_on = None
        machine.trim_memory()  # of the copies
        if save.error:
            self.record.failed_saves += 1
            said = f"warning: {save.folder} could not be written ({save.error}); training goes on"
            PartialState().print(said, flush=True)
        elif save.step is not None:
            self.newest = save.step, save.folder.resolve()

    def save(
        self, state: RunState, folder: Path, together: bool, hooks: Sequence[Callable[[str], Any]],
        weights: list[dict[str, Any]], behind: bool,
    ) -> None:  # fmt: skip
        """Writes `state` to `folder`. together: whether all processes do. hooks: the script's, called with the folder.
        weights: of each model, which a hook may take out. behind: whether training goes on, unless told to stop."""
        self.wait()
        given = list(weights) if len(weights) == len(state.models) else []
        if not together:
            line = "the main process alone calls save_state: the others' random states are in no checkpoint"
            self.record.note_once("saves alone", line)
        best = getattr(self.project, "best_model_checkpoint", None)  # ours: Accelerate knows of none
        own = self.record.own
        barred = own.kept if folder.absolute().parent == own.path else None
        save = checkpoints.Save(folder, not together, self.project.total_limit, best, own.run, barred)
        save.step, self.going_on = state.steps.taken if together else None, save
        self.project.iteration += 1
        if save.error:
            save.give_up()
            self.wait()
            return state.steps.pause()
        try:
            parts, values = state.state_dict(alone=not together, keeps=save.rank == save.keeper)
        except BaseException:  # of an object that the script has registered, say
            self.going_on = None
            save.give_up()
            raise
        try:
            for hook in hooks:
                hook(str(save.temporary))
        except (OSError, SafetensorError) as problem:
            save.error = str(problem)
        if hooks and together:  # where one waits for the others in its hook, this says so
            rank_sync.all_ranks_called("save_state/hooks", needed=True)
        state.leave_out([at for at, of in enumerate(given) if all(of is not kept for kept in weights)], parts, values)
        if behind and not state.stopping and room_for_a_copy(parts):
            save.behind(host_copy(parts), values)
        else:
            with launcher.saving_may_outlive_launcher():
                save.write(parts, values)
            self.wait()
        state.steps.pause()

    def find(self, input_dir: Path | str | None) -> Path | None:
        """The checkpoint to resume from: see checkpoints.find."""
        self.record.own.claim()
        self.wait()
        with readable(self.folder if input_dir is None else input_dir):
            found = checkpoints.find(input_dir, self.folder)
        if found is None:
            PartialState().print(f"no checkpoint in {self.folder}: starting at step 0")
        return found

    def load(self, state: RunState, folder: Path, models: list[nn.Module]) -> int:
        """Loads what `find` has found. models: as Accelerate lists them. Returns the number of the micro-batch."""
        process, micro, reached = PartialState(), state.micro, state.steps.taken
        saved_by = process.num_processes
        if checkpoints.is_accelerates(folder):
            self.record.note(accelerate_format.load(state.strategy, state.backend.codes, models, folder))
        else:
            with readable(folder):
                saved_by, micro = state.load(folder, self.record.note)
        if self.project.automatic_checkpoint_naming:
            self.project.iteration = max(self.project.iteration, (checkpoints.number(folder) or 0) + 1)
        self.newest = state.steps.taken, folder.resolve()
        self.record.own.loads((checkpoints.identity(folder) or {}).get("run"))
        process.print(
            f"{'went back to' if state.steps.taken < reached else 'resumed from'} {folder} at step {state.steps.taken}"
        )
        self.record.was_loaded(reached, state.steps)
        if saved_by != process.num_processes:
            process.print(
                f"{saved_by} processes saved it, {process.num_processes} go on: from the same weights and optimizer "
                "state, with other batches and random numbers"
            )
        return micro


@contextlib.contextmanager
def readable(folder: Path | str) -> Iterator[None]:
    """Turns an error in reading a file of a checkpoint into a refusal that names it."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise Refused(f"{error.filename or folder} cannot be read ({why}): take another checkpoint") from None


def can_save(model: nn.Module, folder: Path, record: Record) -> bool:
    """Whether there is a place for the model's weights: Accelerate warns of a file, too, and goes on. Raises Refused if
    it has none."""
    if not is_offloaded(model) and (empty := sum(parameter.is_meta for parameter in model.parameters())):
        raise Refused(
            f"save_model: {empty} parameters are on the meta device, so they have no values: load the "
            "model's weights before"
        )
    if folder.is_file() and record.main:
        record.failed_saves += 1
        PartialState().print(f"warning: {folder} is a file, save_model writes to a folder: nothing was saved")
    return not folder.is_file()


def is_offloaded(model: nn.Module) -> bool:
    return any(map(has_offloaded_params, model.modules()))


def each_once(model: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """`tensors`, {name: value}, without the second names of parameters that modules share."""
    first_names = {name for name, _ in parameters_of(model)}
    twice = {name for name, _ in parameters_of(model, remove_duplicate=False)} - first_names
    return {name: value for name, value in tensors.items() if name not in twice}
