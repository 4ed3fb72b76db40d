"""How a run ends: stopped by a signal, finished by the script, or with an error. The record says which."""

import contextlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from accelerate.state import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn

from faithful.backends import linear
from faithful.checkpoint.checkpoints import MANIFEST, taken
from faithful.disk import names, readers
from faithful.disk.readers import Damaged
from faithful.errors import Refused, Stopped, explained
from faithful.evidence.record import Record, errors_left, leave_error, now
from faithful.launch import following, launcher, process, rank_sync
from faithful.launch.machine import Memory
from faithful.models import dtypes
from faithful.saving import beside, card, hub
from faithful.saving.beside import Saved
from faithful.saving.saving import Checkpoints
from faithful.strategies.base import Strategy
from faithful.training.steps import Steps

NO_STEPS = "no prepared optimizer has updated a prepared model: steps were neither checked nor counted"


class Run:
    """What the end of an Accelerator's run needs. It stays where the script drops the Accelerator, so it holds no
    model, optimizer or loader. evidence: the record of each model's."""

    def __init__(
        self, strategy: Strategy, record: Record, steps: Steps, checkpoints: Checkpoints, memory: Memory
    ) -> None:
        self.strategy, self.record, self.steps = strategy, record, steps
        self.checkpoints, self.memory = checkpoints, memory
        self.evidence: list[dict[str, Any]] = []
        self.peak: int | None = None
        self.saved: dict[Path, Saved] = {}  # by their folders, the newest last
        self.repository: str | None = None  # on the Hub, for the newest of them
        self.put_in_fp32 = False  # whether trainable parameters were, see models/dtypes.py
        self.stopping = self.closed = self.prepared = False  # prepared: whether a model was
        self.made_by, self.previous = os.getpid(), newest()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"previous": None}

    def explain(self, error: str) -> Refused | None:
        """A Refused, if a library's error means that the script needs what the config has not; else None."""
        found = self.strategy.explain(error) or (dtypes.explain(error) if self.put_in_fp32 else None)
        return found or (explained(error, linear.ERRORS) if self.strategy.plan.backend == "ao" else None)

    def settle(self) -> None:
        """Reads the loss and the norm of the last step, if the host has not yet. Raises Diverged if it was not finite:
        called before anything is written that a run which has diverged must not leave."""
        self.steps.settle()
        self.draw()

    def draw(self) -> None:
        """Adds the newest loss of all processes to the curve."""
        if self.steps.point is not None:
            self.record.point(*self.steps.point)
            self.steps.point = None

    def stop(self, save_state: Callable[[Path], object]) -> NoReturn:
        """Ends the run after SIGTERM or Ctrl-C, on all processes, with a checkpoint of the last complete step."""
        self.settle()
        step, checkpoints = self.steps.taken, self.checkpoints
        checkpoints.wait()
        folder = Path(checkpoints.project_dir, f"checkpoint-{step}")
        written = checkpoints.newest == (step, folder.resolve()) and (folder / MANIFEST).exists()
        if taken(folder):  # of transformers' Trainer, say
            folder = folder.with_name(f"checkpoint_{step}")
        [written] = broadcast_object_list([written])
        self.stopping = True
        if not written:
            save_state(folder)
        self.record.status = "preempted"
        signal = "Ctrl-C" if process.interrupted else "SIGTERM"
        PartialState().print(f"{signal}: stopped after step {step}; {self.how_to_go_on()}", flush=True)
        raise KeyboardInterrupt if process.interrupted else Stopped

    def how_to_go_on(self) -> str:
        """A sentence for the user: what was saved, and how to resume it."""
        complete = self.checkpoints.newest_complete()
        if complete is None:
            return "no checkpoint was saved"
        if self.checkpoints.elsewhere(complete):
            return f"saved {complete}. To go on: accelerator.load_state({str(complete)!r})"
        return (
            f"saved {complete}. To go on: the same command with --output_dir {self.checkpoints.project_dir} "
            "--resume_from_checkpoint latest (a script of your own: accelerator.load_state())"
        )

    def finish(self) -> None:
        """Closes the record when the script calls `end_training`, while the processes can still communicate."""
        if isinstance(sys.exception(), Exception):  # in a `finally`: the end of the process says how the run has ended
            return
        record, steps = self.record, self.steps
        self.settle()
        self.checkpoints.wait()
        if not self.closed and record.opened and record.status == "running":
            self.closed, record.status = True, "finished"
            if record.failed_saves:
                record.status, record.error = "failed", record.not_saved()
            together = rank_sync.all_ranks_called("end_training", needed=True)
            mine = [(steps.loss, self.peak or self.memory.peak())]
            everyone = gather_object(mine) if together else mine
            losses = [loss for loss, _ in everyone if loss is not None]
            steps.loss = sum(losses) / len(losses) if losses else None
            if record.plan.device != "cpu":
                self.peak = max(peak for _, peak in everyone)
            self.write_last()
            record.own.release()
            if together:
                PartialState().wait_for_everyone()  # no process may exit while another still receives from it
        self.complete()
        process.restore_signals()  # there is no step any more to stop after
        self.push()

    def complete(self) -> None:
        """Completes the record of a run that was resumed after its last step, and has none of its own."""
        if not self.closed and self.record.main and not self.record.opened and self.record.complete(self.steps):
            self.closed = True
            print(f"{self.record.status}: {self.record.shown}", flush=True)

    def close(self, error: str | None, code: int) -> int:
        """Writes the final record, however the process ends, also of the runs before. error: one line, or None. code:
        the exit code so far. Returns the exit code."""
        if self.made_by != os.getpid():  # of the process that has forked this one
            return code
        self.checkpoints.wait(None if error is None else launcher.GRACE)
        if error is None and not code:
            following.close()
        rank_sync.tell("ended")
        if error is not None:
            following.end()
        record, stopped = self.record, self.record.status == "preempted"
        lost = error is not None and error.startswith((process.ENDED, process.SILENT))
        if error is None:
            self.complete()
            unseen = not (self.closed or any(run.record.opened for run in made))
            if record.main and not code and self is newest() and unseen:
                none = "the script has prepared no model, so nothing has run as its config says"
                print(f"note: {NO_STEPS if any(run.prepared for run in made) else none}", flush=True)
        none_to_write = code == 2 or (record.folder / "run.json").exists()  # refused, or the record of another run
        if not self.closed and error is None and record.opened:
            self.closed = True
            record.status = "preempted" if stopped else "finished"  # for scripts that do not call end_training
            self.write_last()
            self.push()
        elif not self.closed and error is not None and (record.opened or not none_to_write):
            if not record.main and not lost:
                leave_error(record.folder, PartialState().process_index, error)
            error = (lost and errors_left(record.folder)) or error
            self.closed, record.status, record.error = True, "failed", error
            with record.writing("run.json"):
                record.own.make()
            self.write_last()
        if record.failed_saves and not code:
            PartialState().print(f"error: {record.not_saved()}", flush=True)
            code = 1
        if stopped:
            code = 130 if process.interrupted else 143
        if self.previous:
            code = self.previous.close(error, code) or code
        return code

    def write(self, finished: str | None = None) -> None:
        if self.record.main:
            self.record.write(self.steps, self.evidence, self.peak or self.memory.peak(), finished)

    def write_last(self) -> None:
        if self.record.status == "finished" and self.prepared and not (self.steps.checked or self.steps.tried):
            self.record.note_once("no steps", NO_STEPS)
        self.write(now())
        if self.record.main:
            self.write_cards()
            print(f"{self.record.status}: {self.record.shown}", flush=True)

    def describe_saved(self, model: nn.Module, folder: Path) -> None:
        """Writes, on the main process, what belongs beside the weights of a model in `folder`."""
        if self.record.main:
            self.saved[folder.absolute()] = Saved(type(model).__name__)
            try:
                self.saved[folder.absolute()] = beside.write(model, folder, self.record.project / beside.FACTS)
            except (OSError, TypeError, ValueError) as error:
                line = f"{folder / beside.CONFIG} is not written: {names.printable(str(error).splitlines()[0])}"
                self.record.note_once("config of the model", line)

    def write_cards(self) -> None:
        """Writes the cards of the models that a finished run has saved."""
        if self.record.status == "finished":
            for folder, saved in self.saved.items():
                with contextlib.suppress(Damaged), self.record.writing(f"{folder.name}/{card.NAME}"):
                    record = readers.value_of(self.record.folder / "run.json", {})
                    card.write(folder, record, saved, self.repository)

    def push(self) -> None:
        """Pushes the model that was saved last, once, if that was asked for."""
        if self.record.main and self.repository and self.record.status == "finished" and self.saved:
            name, self.repository = self.repository, None
            print(hub.push(list(self.saved)[-1], name), flush=True)


made: list[Run] = []  # of each Accelerator of this process, the oldest first


def newest() -> Run | None:
    return made[-1] if made else None


def not_compiled(message: str) -> None:
    """Notes, in the newest run, that torch has compiled a function as often as it may. message: torch's, of lines."""
    limit, function, reason = (
        found[1] if (found := re.search(pattern, message)) else "unknown"
        for pattern in (r"hit (config\.\w+ \(\d+\))", r"function: (.*)", r"last reason: (.*)")
    )
    function = re.sub(r"\(/.*?(?:site-packages/|(?=[^/]+:))", "(", function)
    if run := newest():
        line = f"{function} is not compiled any more, what is new runs as it is, slower: torch._dynamo.{limit}"
        run.record.note_once(function, f"{line}, last reason {reason}")
