"""The folder of a run, on each machine: whose it is, and what of it is this run's.

The main process owns the folder. Where a machine does not see the main process's disk, the first process there owns the
folder of the same name on its own disk.
"""

import contextlib
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable
from pathlib import Path

from accelerate.state import PartialState

from faithful.checkpoint import checkpoints
from faithful.disk import names, readers
from faithful.errors import Refused
from faithful.launch import launcher

RECORD, METRICS = "run.json", "metrics.jsonl"
LEFT = r"error-rank\d+\.json|\.taken-[0-9a-f]{32}(-disk)?"  # files that killed processes leave, and folders
LEFT_FOLDER = r"checkpoint[-_]\d+\.tmp"


class RunFolder:
    """The folder `name` of a run, as this process's machine has it. Nothing is written there before `begin`. On all
    machines it has the main process's name for it.

    run: the id of the run, which its record and its checkpoints have. goes_on: whether it has loaded a checkpoint, and
    has the id of that one. kept: why what another run has left could not be moved, and nothing is written; or None."""

    def __init__(self, name: Path, main: bool) -> None:
        self.name, self.path = name, name.absolute()  # the script may change its working directory
        self.main, self.owned, self.run = main, main, uuid.uuid4().hex
        self.begun = self.agreed = self.goes_on = False
        self.lock: int | None = None
        self.kept: str | None = None

    @property
    def shown(self) -> Path:
        """The folder as the script names it, while that name still leads there."""
        with contextlib.suppress(FileNotFoundError):  # the working directory was removed
            return self.name if self.name.absolute() == self.path else self.path
        return self.path

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def claim(self, mark: Path | None = None) -> None:
        """Locks the folder against other runs, if it exists. mark: see launcher.lock_folder."""
        if self.owned and self.lock is None and self.path.exists():
            self.lock = launcher.lock_folder(self.path, mark)

    def loads(self, run: str | None) -> None:
        """A checkpoint of this run is loaded. run: None if it says none."""
        self.run, self.goes_on = run or self.run, True

    def release(self) -> None:
        """Lets other runs use the folder, when this one has ended."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def begin(self, resumed: bool, also: Iterable[str] = (), together: bool = False) -> str | None:
        """Takes the folder for this run, before anything is written there, and moves what other runs have left in it to
        a folder of its own. Returns a line that says so, or None. also: names of what a run of this kind leaves besides
        the record and checkpoints. together: whether all processes call it: then nothing is moved before the folders
        on all disks are free. Raises OSError, and Refused if another run is writing there."""
        if not self.agreed and together and launcher.several_machines():
            self.agreed = True
            self.take_on_each_disk(resumed)
        elif self.owned and (problem := self.take(resumed)):
            raise problem
        if not self.owned or self.begun:
            return None
        self.begun = True
        for path in list(self.path.iterdir()):
            if re.fullmatch(LEFT_FOLDER, path.name) and checkpoints.is_unfinished(path):
                shutil.rmtree(path, ignore_errors=True)
            elif re.fullmatch(LEFT, path.name):
                path.unlink(missing_ok=True)
        try:
            line, self.kept = self.set_aside(resumed, also), None
            return line
        except OSError as problem:
            self.begun, self.kept = False, f"what another run has left there cannot be moved: {problem.strerror}"
            raise

    def take(self, resumed: bool, mark: Path | None = None) -> OSError | Refused | None:
        """Makes and locks the folder on this disk, and the file `mark` in it. Returns why it could not, or None."""
        try:
            if not self.begun:
                self.make()
                self.claim(mark)
                if not resumed and self.lock is None and self.earlier()[0] == "running":
                    raise Refused(
                        f"{self.shown} holds a run that may still be running (its file system has no locks): "
                        "choose another folder for this one, or delete its run.json if it was killed"
                    )
            if mark:
                mark.touch()
        except (OSError, Refused) as problem:
            return problem
        return None

    def take_on_each_disk(self, resumed: bool) -> None:
        """`take` on each machine that has a disk of its own. Raises Refused on all if one cannot."""
        mark = self.path / f".taken-{uuid.uuid4().hex}"  # whoever sees that of the main process has its disk
        problem = self.take(resumed, mark) if self.main else None
        [(seen, taken), *_] = launcher.wait_for_all("take the run's folder", [str(mark), problem is None])
        mine, self.path, mark = self.path, Path(seen).parent, Path(seen if self.main else f"{seen}-disk")
        if not self.main and taken and PartialState().is_local_main_process and not checkpoints.sees(Path(seen)):
            self.owned = True
            problem = self.take(resumed, mark)
            if mine != self.path and checkpoints.sees(mine / Path(seen).name):
                where = f"{mine} is the folder that the main process has as {self.path}"
                problem = Refused(f"{where}: give it one name on all machines, by a mount or a symlink")
        refused = f"{problem} ({socket.gethostname()})" if isinstance(problem, Refused) else None
        told = launcher.wait_for_all("take the run's folder on each disk", refused)
        with contextlib.suppress(OSError):
            mark.unlink()
        if refused := next(filter(None, told), None):
            self.release()
            raise Refused(refused)
        self.owned = self.main or (self.owned and not problem)
        if problem and self.main:
            raise problem

    def earlier(self) -> tuple[str, str, str | None]:
        """(status, time of its start, id) of the run whose record is here. The id is None if it is of an earlier
        version."""
        try:
            earlier = readers.value_of(self.path / RECORD, {"status": str, "started": str})
            return earlier["status"], earlier["started"], earlier.get("run")
        except (OSError, ValueError):
            return "of unknown state", "", None

    def has_its_record(self) -> bool:
        """Whether a run that goes on goes on with the record that is here, too, if there is one. If it has found no
        checkpoint it does, unless that run has finished."""
        status, started, run = self.earlier()
        if not started:
            return names.kind_of(self.path / RECORD) is None
        return run in (None, self.run) or not (self.goes_on or status == "finished")

    def set_aside(self, resumed: bool, also: Iterable[str]) -> str | None:
        """Moves what an earlier run has left in this folder to a folder of its own in it. Beside a run that goes on
        only what has the id of another run is that."""
        ours, resumed = (None, self.run) if resumed else (), resumed and self.has_its_record()
        found = [path for path in checkpoints.list_checkpoints(self.path) if not path.is_symlink()]
        found = [path for path in found if (told := checkpoints.identity(path)) and told["run"] not in ours]
        files = [] if resumed else [path for path in (self.path / RECORD, self.path / METRICS) if path.exists()]
        record, files = bool(files), files + found
        if not files:
            return None
        if not resumed:
            files += [self.path / name for name in also if names.kind_of(self.path / name) in ("file", "folder")]
        status, started, _ = self.earlier()
        name = f"run_{re.sub('[^0-9T]', '', started if record else '')[:15] or 'earlier'}"
        free = [name, *(f"{name}_{again}" for again in range(2, 1000))]
        aside = next(self.path / each for each in free if not (self.path / each).exists())
        aside.mkdir()
        try:
            for path in files:
                os.replace(path, aside / path.name)
        except OSError:  # another user's folder, say: then all of it stays where it is
            for path in aside.iterdir():
                os.replace(path, self.path / path.name)
            aside.rmdir()
            raise
        where = f"{self.shown}{'' if self.main else f' on {socket.gethostname()}'}"
        if not record:
            return f"{where} holds checkpoints of another run, which are now in {aside.name}/"
        status = "was killed" if status == "running" else f"is {status}"
        return (
            f"{where} holds an earlier run, which {status}: its record is now in {aside.name}/"
            f"{', with its checkpoints' * bool(found)}"
            f"{'' if ours else '; to go on with it, load a checkpoint before the first step'}"
        )
