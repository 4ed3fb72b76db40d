"""How a run ends: stopped by a signal, finished by the script, or with an error. The record says which."""

import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from accelerate.utils import broadcast_object_list, gather_object

from faithful import backends, patches, strategies
from faithful.checkpoint import checkpoints
from faithful.errors import Stopped
from faithful.evidence.record import errors_left, leave_error, now
from faithful.launch import launcher, process, rank_sync

if TYPE_CHECKING:
    from faithful.accelerator import Accelerator

# For each Accelerator of this process, the oldest first, what returns it, or what is left of it.
made: list[Callable[[], "Accelerator | None"]] = []
KEPT = ("number", "made_by", "plan", "state", "project_configuration", "default_folder", "named_folder", "resumed",
        "stopping", "closed", "checkpoints", "record", "steps", "memory", "peak", "put_in_fp32")  # fmt: skip


class Newest:
    """A class attribute: the newest Accelerator of this process, or None."""

    def __get__(self, *_: object) -> "Accelerator | None":
        return newest(len(made))


def newest(before: int) -> "Accelerator | None":
    """The newest of the first `before` Accelerators of this process, or None."""
    return next((run for get in made[:before][::-1] if (run := get()) is not None), None)


def remember(accelerator: "Accelerator") -> None:
    """Takes note of an Accelerator, without keeping it alive: it holds models, optimizers and loaders."""
    accelerator.number = len(made)
    made.append(weakref.ref(accelerator))


def keep_for_exit(
    accelerator: "Accelerator",
    at_exit: Callable[[], bool] = sys.is_finalizing,  # which modules do not have any more then
) -> None:
    """Keeps of an Accelerator that the script has dropped what writes its record at exit."""
    if at_exit() or "record" not in vars(accelerator) or accelerator.number is None:
        return  # refused, a copy, or the end of the process
    left = type(accelerator).__new__(type(accelerator))
    left.__dict__ |= {name: vars(accelerator)[name] for name in KEPT if name in vars(accelerator)}
    left.strategy, left.backend = strategies.get_strategy(left.plan), backends.get_backend(left.plan)
    left.freed, left.models = accelerator.freed + [evidence.record for evidence in accelerator.evidence], []
    left.steps.losses.clear()
    made[accelerator.number] = lambda: left
    accelerator.strategy.dropped(accelerator)
    if id(accelerator) in patches.users:
        patches.users ^= {id(accelerator), id(left)}


def stop(accelerator: "Accelerator") -> NoReturn:
    """Ends the run after SIGTERM or Ctrl-C, on all processes, with a checkpoint of the last complete step."""
    steps = accelerator.steps
    accelerator.checkpoints.wait()
    folder = Path(accelerator.project_dir, f"checkpoint-{steps.taken}")
    written = (
        accelerator.checkpoints.newest == (steps.taken, folder.resolve()) and (folder / checkpoints.MANIFEST).exists()
    )
    [written] = broadcast_object_list([written])
    accelerator.stopping = True
    if not written:
        accelerator.save_state(folder)
    accelerator.record.status = "preempted"
    signal = "Ctrl-C" if process.interrupted else "SIGTERM"
    accelerator.print(f"{signal}: stopped after step {steps.taken}; {how_to_go_on(accelerator)}", flush=True)
    raise KeyboardInterrupt if process.interrupted else Stopped


def how_to_go_on(accelerator: "Accelerator") -> str:
    """A sentence for the user: what was saved, and how to resume it."""
    newest = accelerator.newest_checkpoint()
    if newest is None:
        return "no checkpoint was saved"
    return (
        f"saved {newest}. To go on: the same command with --output_dir {accelerator.project_dir} "
        "--resume_from_checkpoint latest (a script of your own: accelerator.load_state())"
    )


def finish(accelerator: "Accelerator") -> None:
    """Closes the record when the script calls `end_training`, while the processes can still communicate."""
    record, steps = accelerator.record, accelerator.steps
    accelerator.checkpoints.wait()
    if not accelerator.closed and record.opened and record.status == "running":
        accelerator.closed, record.status = True, "finished"
        if record.failed_saves:
            record.status, record.error = "failed", record.not_saved()
        together = rank_sync.all_ranks_called("end_training", needed=True)
        mine = [(steps.loss, accelerator.peak or accelerator.memory.peak())]
        everyone = gather_object(mine) if together else mine
        losses = [loss for loss, _ in everyone if loss is not None]
        steps.loss = sum(losses) / len(losses) if losses else None
        if accelerator.plan.device != "cpu":
            accelerator.peak = max(peak for _, peak in everyone)
        write_last(accelerator)
        record.release()
        if together:
            accelerator.wait_for_everyone()  # no process may exit while another still receives from it
    process.restore_signals()  # there is no step any more to stop after


def close(accelerator: "Accelerator", error: str | None, code: int) -> int:
    """Writes the final record, however the process ends, also of the Accelerators that the script made before."""
    if accelerator.made_by != os.getpid():  # of the process that has forked this one
        return code
    accelerator.checkpoints.wait(None if error is None else launcher.GRACE)
    rank_sync.tell("ended")
    record, stopped = accelerator.record, accelerator.record.status == "preempted"
    lost = error is not None and error.startswith((process.ENDED, process.SILENT))
    none_to_write = code == 2 or (record.folder / "run.json").exists()  # refused, or the record of another run
    if not accelerator.closed and error is None and record.opened:
        accelerator.closed = True
        record.status = "preempted" if stopped else "finished"  # for scripts that do not call end_training
        write_last(accelerator)
    elif not accelerator.closed and error is not None and (record.opened or not none_to_write):
        if not record.main and not lost:
            leave_error(record.folder, accelerator.process_index, error)
        error = (lost and errors_left(record.folder)) or error
        accelerator.closed, record.status, record.error = True, "failed", error
        with record.writing("run.json"):
            record.folder.mkdir(parents=True, exist_ok=True)
        write_last(accelerator)
    if record.failed_saves and not code:
        accelerator.print(f"error: {record.not_saved()}", flush=True)
        code = 1
    if stopped:
        code = 130 if process.interrupted else 143
    if accelerator.previous:
        code = close(accelerator.previous, error, code) or code
    return code


def write_last(accelerator: "Accelerator") -> None:
    accelerator.write_record(now())
    accelerator.print(f"{accelerator.record.status}: {accelerator.record.shown}", flush=True)
