"""Atomic checkpoints.

`checkpoint-<optimizer step>/` holds the tensors as safetensors (one file per rank), the rest as `trainer_state.json`,
and `manifest.json` with size and hash of every file, written last. The folder is written as `checkpoint-<step>.tmp`,
fsynced and renamed, so a folder with the final name is complete. No file is a pickle.

tensor_keys.py has the names of the tensors in a rank's file.

A folder that exists keeps what is in it. There the files are written to a folder inside, `.checkpoint.tmp`, and moved
when they are complete. A process that is killed while it moves them leaves `.checkpoint.tmp` with its manifest, and
whoever looks at the checkpoint next moves the rest (`settle`).
"""

import contextlib
import errno
import hashlib
import math
import os
import re
import shutil
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate.state import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from faithful.disk import names, readers, tensor_files
from faithful.disk.replacing import sync, write_json
from faithful.errors import Refused
from faithful.launch import launcher

Entry = dict[str, Any]  # of a manifest: ENTRY
STATE, MANIFEST = "trainer_state.json", "manifest.json"
STAGED = ".checkpoint.tmp"  # in a folder that existed before
FORMAT = 4  # of trainer_state.json
RANKS_FILE = re.compile(r"rank(0|[1-9]\d{0,5})\.safetensors")
MARK = re.compile(r"\.[0-9a-f]{32}|rank\d+\.safetensors\.tmp")  # what else is in a folder that is not complete
MOST, MOST_FILES = 1_000_000, 100_000  # processes; files of a checkpoint on a disk, each of which is looked at
# What trainer_state.json must hold: for the order of checkpoints, for the number of files, and to be loaded.
AGE = {"counter": readers.count(0, 1 << 40), "run?": str, "save?": str}  # the last two: see `identity`
PLAN = {
    "num_processes": readers.count(1, MOST), "fp8_options": dict, "skip": list, "offload": bool, "compile": bool,
} | dict.fromkeys(("strategy", "precision", "backend", "level"), readers.word)  # fmt: skip
RANKS = {"alone": bool, "plan": PLAN}
STEPS = {key: readers.count() for key in ("taken", "tried", "micro")}
LOADER = {"running": bool, "epoch": readers.count(0, 1 << 40), "same_workers?": bool}
WHOLE = AGE | RANKS | {
    "steps": STEPS, "models": readers.count(0, MOST),
    "scaler": (None, {str: lambda value: type(value) is bool or readers.number(value)}),  # DeepSpeed's has flags
    "cuts": {str: lambda at: at is None or type(at) is int and at in range(64)}, "tp?": readers.count(1, MOST),
    "groups": list, "optimizers": list, "schedulers": list, "registered": list, "moments": [{str: str}],
    "loaders": [LOADER], "left_out?": {str: str},
}  # fmt: skip
# Of a manifest. keeper: of a file that is on another machine's disk, the rank that completed the checkpoint there.
ENTRY = {"bytes": readers.count(), "xxh3_128": str, "keeper?": readers.count(0, MOST)}


def digest(path: Path) -> str:
    """The hash of a file. xxh3_128 finds every damage by accident, and sha256 takes ten times as long as reading."""
    with os.fdopen(names.opened(path), "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def entry(path: Path) -> dict[str, int | str]:
    return {"bytes": path.stat().st_size, "xxh3_128": digest(path)}


def manifest_of(folder: Path) -> dict[str, Entry]:
    """{name: ENTRY} of a checkpoint's files. Each name is that of a file in the folder, or of one that is missing
    there. Raises OSError, and ValueError if it is damaged."""
    manifest = readers.value_of(folder / MANIFEST, {str: ENTRY}, readers.CHECKPOINT)
    if len(manifest) > MOST_FILES:
        raise readers.Damaged(f"{folder / MANIFEST} names more than {MOST_FILES:,} files")
    for name in manifest:
        names.inside(folder, name)
    return manifest


def state_of(folder: Path, form: Any) -> dict[str, Any]:
    """The trainer_state.json of a checkpoint, which has at least this form. Raises OSError, and ValueError if it has
    not."""
    return readers.value_of(folder / STATE, form, readers.CHECKPOINT)


DAMAGE = (OSError, ValueError)  # what reading a damaged manifest or state raises


def is_as_written(path: Path, wanted: Entry, check_hash: bool = True) -> bool:
    """Whether a file has the size and, if `check_hash`, the hash of its entry in a manifest."""
    return path.stat().st_size == wanted["bytes"] and (not check_hash or digest(path) == wanted["xxh3_128"])


class Save:
    """A checkpoint that is being written to `folder`. Every rank makes one, or if it is `alone` the main process.

    keep: number of complete checkpoints to keep, with the new one, which is written before older ones are deleted; None
    keeps all. best: the path of one that is kept whatever its age, or None. run: the id of the run, whose checkpoints
    alone are deleted. barred: why nothing may be written on this disk, or None. After an error on any rank (a full
    disk, say) the earlier checkpoints are still there.

    Where a machine does not see the main process's disk, the folder of the same name on its own disk is a checkpoint
    too, with the files of its processes. `keeper` is the rank that makes and completes the folder on this rank's disk.
    """

    error: str | None
    thread: threading.Thread | None
    step: int | None  # of the run; None if the main process alone saves

    def __init__(
        self,
        folder: Path,
        alone: bool,
        keep: int | None = None,
        best: Path | str | None = None,
        run: str = "",
        barred: str | None = None,
    ) -> None:
        process = PartialState()
        self.identity = {"run": run, "save": uuid.uuid4().hex}
        self.rank, self.main, self.alone = process.process_index, process.is_main_process, alone
        self.keep, self.error, self.thread, self.keeper, self.barred = keep, None, None, 0, barred
        self.best = best and Path(best).resolve()
        linked = number(folder) is not None and os.path.islink(folder)  # in the folder of a stranger's run
        # On another machine's disk a folder above may be no symlink, or lead elsewhere.
        folder = folder.resolve() if os.path.islink(folder) and not linked else folder.absolute()
        existed, self.count = os.path.exists(folder), None
        if not self.alone:  # a script may give each process a temporary folder of its own: the main process's is used
            folder, existed, linked = broadcast_object_list([folder, existed, linked])
        if linked:
            raise Refused(f"save_state: {folder} is a symlink, which leads out of its folder: remove it")
        if existed and not self.alone:
            settle_together(folder)
        self.folder, self.temporary = folder, folder / STAGED if existed else folder.with_name(folder.name + ".tmp")
        # By this file the folder is known as ours, and whoever sees that of the main process has its disk.
        self.mark, self.made = self.temporary / f".{self.identity['save']}", False
        if self.main:
            self.attempt(self.make_folder)
        told = self.together("make the checkpoint's folder", str(self.mark))
        if launcher.several_machines():
            if not self.main and not sees(Path(told[0])):
                self.keeper = self.rank - process.local_process_index
                if self.rank == self.keeper:
                    self.attempt(self.make_folder)
            told = self.together("make the checkpoint's folder on each disk", self.count)
            self.count = max(filter(None, told), default=None)

    def make_folder(self) -> None:
        if number(self.folder) is not None and self.folder.is_symlink():  # on a disk that the main process does not see
            raise OSError(f"{self.folder} is a symlink, which leads out of its folder, on {socket.gethostname()}")
        if self.barred:
            raise OSError(self.barred)
        self.count = next_count(self.folder.parent)
        settle(self.folder)
        refuse_others(self.folder)
        if os.path.lexists(self.temporary) and not is_unfinished(self.temporary):
            raise FileExistsError(f"{self.temporary} is somebody else's: move it away")
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        self.made = True
        self.mark.touch()

    def give_up(self) -> None:
        """Deletes what this rank has made, when nothing is going to be written."""
        if self.made:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def together(self, what: str, value: Any = None) -> list[Any]:
        """Waits for the other ranks, and returns what each says. `error` is then the first one of any rank."""
        told = [(self.error, value)] if self.alone else launcher.wait_for_all(what, (self.error, value))
        self.error = next((error for error, _ in told if error), None)
        return [value for _, value in told]

    def write(self, parts: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Writes {name: tensor} of this rank, and completes the checkpoint when all ranks have. Sets `error` to the
        first error of any rank, as text, or None. No collective is called: this may run in a thread.

        state: JSON values; rank 0's are written."""
        state = state | self.identity | {"counter": self.count}
        written, path = {}, self.temporary / f"rank{self.rank}.safetensors"
        try:
            written = {path.name: tensor_files.write(parts, path)}
        except OSError as problem:
            self.error = self.error or str(problem)
        outcomes = self.together("write their part of the checkpoint", (written, self.keeper))
        if any(keeper for _, keeper in outcomes):
            [state, *_] = self.together("share the checkpoint's state", state if self.main else None)
        if self.rank == self.keeper and not self.error:
            every: dict[str, Entry] = {}
            for files, keeper in outcomes:
                elsewhere = {} if keeper == self.keeper else {"keeper": keeper}
                every |= {name: of_file | elsewhere for name, of_file in files.items()}
            self.attempt(self.complete, every, state)
        self.together("complete the checkpoint")
        moved = not self.error and self.folder.exists()  # from now on, and by whoever is next if it cannot be done
        if self.rank == self.keeper and not self.error:
            self.attempt(self.publish)
        told = self.together("put the checkpoint in its place", self.outdated(state["run"]))
        if self.error:
            moved or self.give_up()
        elif self.rank == self.keeper:
            for name, which in told[0]:  # the main process says it for all disks
                if identity(self.folder.with_name(name)) == which:
                    with contextlib.suppress(*DAMAGE):
                        remove(self.folder.with_name(name))

    def outdated(self, run: str) -> list[tuple[str, dict[str, Any]]]:
        """Names and identities of the run's earlier checkpoints that are not to be kept, by the main process's disk."""
        told: dict[Path, dict[str, Any]] = {}
        if self.main and self.keep:
            with contextlib.suppress(OSError):  # the new one is complete; the next save deletes more
                others = [path for path in list_checkpoints(self.folder.parent) if path != self.folder]
                others = [path for path in others if not path.is_symlink()]
                told = {path: of for path in others if (of := identity(path)) and of["run"] == run}
        best = next((path for path in told if path.resolve() == self.best), None)
        known = sorted(told, key=lambda path: (path != best, -told[path]["counter"]))
        return [(path.name, told[path]) for path in known[max((self.keep or 0) - 1, int(best is not None)) :]]

    def attempt(self, action: Callable[..., None], *values: Any) -> None:
        try:
            action(*values)
        except (OSError, names.Unsafe) as problem:
            self.error = str(problem)

    def complete(self, files: dict[str, Entry], state: dict[str, Any]) -> None:
        """Writes the state and the manifest. files: {name: ENTRY} of all ranks' files."""
        self.mark.unlink(missing_ok=True)
        write_json(self.temporary / STATE, state | {"keeper": self.keeper})
        largest, most = readers.CHECKPOINT
        if readers.values_in(readers.bytes_of(self.temporary / STATE, largest)) > most:
            raise OSError(f"what it holds besides tensors is more than {most:,} values")
        for name in names.files_below(self.temporary):
            names.inside(self.temporary, name)  # a hook of the script may have made a symlink
            files[name] = files.get(name) or entry(self.temporary / name)
        refuse_others(self.folder, (*files, MANIFEST))
        write_json(self.temporary / MANIFEST, files)
        sync(self.temporary)

    def publish(self) -> None:
        """Moves the files to their place, when they are complete on all disks."""
        if self.folder.exists():  # the script may have made it in the meantime
            os.rename(self.temporary, self.folder / STAGED)
            take_over(self.folder, manifest_of(self.folder / STAGED))
        else:
            os.rename(self.temporary, self.folder)
            sync(self.folder.parent)

    def behind(self, parts: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """`write` in a thread, while training goes on. parts: tensors that training does not change."""

        def run() -> None:
            try:
                with launcher.saving_may_outlive_launcher():
                    self.write(parts, state)
            except Exception as problem:  # another process has ended: this one ends of it in its next collective
                self.error = str(problem)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def finished(self) -> bool:
        return self.thread is None or not self.thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        if self.thread is not None:
            self.thread.join(seconds)


def sees(file: Path) -> bool:
    """Whether the file is on a disk that this machine sees. A listing is newer than what NFS remembers of a name."""
    try:
        return file.name in os.listdir(file.parent)
    except OSError:
        return False


def settle_together(folder: Path) -> None:
    """`settle`, of a save of which each machine has its files, there or in their place. Every rank calls it."""
    here = identity(folder), identity(folder, staged=True)
    told = gather_object([here])
    if here[1] and all(here[1] in there for there in told):
        settle(folder, everywhere=True)


def settle(folder: Path, everywhere: bool = False) -> None:
    """Moves a complete checkpoint from `folder`/.checkpoint.tmp to `folder`, if all of its files are what was written,
    and deletes the files of the one that was there. Other files stay. Several processes may call it at once.
    everywhere: whether it is complete on all disks; else one of which other disks have files stays where it is."""
    staged = folder / STAGED
    if staged.is_symlink() or not (staged / MANIFEST).exists():
        return  # nothing there, or not complete
    with contextlib.suppress(*DAMAGE):  # whatever is there, it is no checkpoint of ours: it stays as it is
        new = manifest_of(staged)
        alone = not any("keeper" in wanted for wanted in new.values())
        if (alone or everywhere) and all(moved_or_sound(staged, folder, *of) for of in new.items()):
            take_over(folder, new)


def moved_or_sound(staged: Path, folder: Path, name: str, wanted: Entry) -> bool:
    """Whether the file is as written, where it was written or where it has been moved."""
    try:
        return is_as_written(staged / name, wanted)
    except FileNotFoundError:
        return "keeper" in wanted or is_as_written(names.inside(folder, name), wanted)


def ours(folder: Path) -> set[str]:
    """The names of the files in `folder` that are of a checkpoint: those that its manifest names. Where that is damaged
    or gone, those that every checkpoint has, if it has a rank's file."""
    try:
        known = {*manifest_of(folder), MANIFEST}
    except DAMAGE:
        ranks = {path.name for path in folder.glob("rank*.safetensors") if RANKS_FILE.fullmatch(path.name)}
        known = ranks and ranks | {STATE, MANIFEST}
    with contextlib.suppress(*DAMAGE):
        if "global_step" in state_of(folder, {}):
            known -= {STATE}  # transformers' Trainer has written its own
    return known


def taken(folder: Path, new: Iterable[str] = (STATE, MANIFEST)) -> str | None:
    """The first of the names `new` under which `folder` has what is not of a checkpoint, or None."""
    known = ours(folder)
    return next((name for name in new if name not in known and os.path.lexists(folder / name)), None)


def refuse_others(folder: Path, new: Iterable[str] = (STATE, MANIFEST)) -> None:
    """Raises OSError if a file would take the place of one that is not of a checkpoint."""
    if name := taken(folder, new):
        raise FileExistsError(f"its {name} is another program's: save to another folder")


def take_over(folder: Path, new: Mapping[str, object]) -> None:
    """Moves the files of the manifest `new` from `folder`/.checkpoint.tmp to their place in `folder`. Raises OSError or
    ValueError before anything is moved if a name's place is taken by what is no file of a checkpoint."""
    staged, places = folder / STAGED, {name: names.inside(folder, name) for name in (*new, MANIFEST)}
    refuse_others(folder, [name for name in places if os.path.lexists(staged / name)])
    with contextlib.suppress(*DAMAGE):
        for name in manifest_of(folder).keys() - new.keys():
            names.inside(folder, name).unlink(missing_ok=True)
    for name, place in places.items():  # the manifest last: until then this function can be called again
        place.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # moved already
            os.replace(staged / name, place)
    sync(folder)
    shutil.rmtree(staged, ignore_errors=True)


def identity(folder: Path, staged: bool = False) -> dict[str, Any] | None:
    """What tells a complete checkpoint from every other one: its counter, and the ids of the run and of the save, which
    are None in one of an earlier version. The same on the disks of all machines. None where it has none of ours.
    staged: of the one that is about to be moved to `folder`."""
    place = folder / STAGED if staged else folder
    try:
        state = state_of(place if (place / STATE).exists() else folder, AGE)  # where it has been moved
        return {key: state.get(key) for key in ("run", "save", "counter")} if (place / MANIFEST).exists() else None
    except DAMAGE:
        return None


def remove(folder: Path) -> None:
    """Deletes a checkpoint: the files that its manifest names. What others have put there stays. Raises OSError and
    ValueError."""
    files = [name for name in manifest_of(folder) if name != STATE]
    for name in (*files, STATE, MANIFEST):  # until then whoever is next sees that there is something to delete
        names.inside(folder, name).unlink(missing_ok=True)
    shutil.rmtree(folder / STAGED, ignore_errors=True)
    inner = {parent for name in files for parent in Path(name).parents}
    for parent in sorted(inner, key=lambda path: len(path.parts), reverse=True):
        with contextlib.suppress(OSError):  # not empty
            (folder / parent).rmdir()


def is_unfinished(folder: Path) -> bool:
    """Whether there is a folder that is empty, or has a file of a rank, or one by which a save is known."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    inside = os.listdir(folder)
    return not inside or any(RANKS_FILE.fullmatch(name) or MARK.fullmatch(name) for name in inside)


def number(folder: Path) -> int | None:
    """The number in `checkpoint-<number>`, or in Accelerate's automatic name `checkpoint_<number>`; else None."""
    match = re.fullmatch(r"checkpoint[-_](\d+)", folder.name)
    return int(match[1]) if match else None


def list_checkpoints(output_dir: Path | str) -> list[Path]:
    """The checkpoint folders in `output_dir`, newest first: by a counter, because clocks are set, and a run that goes
    on from an older one writes smaller numbers than those of the steps that it gave up. Incomplete and damaged ones are
    the last, by number. Raises OSError for a folder that cannot be read, which may hold some: Path.glob finds none."""
    try:
        found = [path for path in map(Path(output_dir).joinpath, os.listdir(output_dir)) if number(path) is not None]
    except (FileNotFoundError, NotADirectoryError):
        found = []
    return sorted(found, key=lambda folder: (age_of(folder), number(folder), folder), reverse=True)


def age_of(folder: Path) -> float:
    """The counter of a checkpoint; larger ones are newer. -1 where there is no state or it is damaged, inf where it
    cannot be read: it may be sound, so nobody deletes it."""
    try:
        return state_of(folder, AGE)["counter"]
    except ValueError:
        return -1
    except OSError as error:
        absent = error.errno in (None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # None: what is there is no file
        return -1 if absent else math.inf


def next_count(output_dir: Path | str) -> int:
    """The counter of a checkpoint that is the newest in its folder."""
    return 1 + max((int(age) for age in map(age_of, list_checkpoints(output_dir)) if age < math.inf), default=0)


def candidates(output_dir: Path | str) -> list[Path]:
    """The checkpoints in the order in which to look for a sound one: the newest first. Before them those that were
    complete and whose state is damaged, so that they are named: nothing says how new they are."""
    for folder in list_checkpoints(output_dir):
        settle(folder)
    return sorted(list_checkpoints(output_dir), key=lambda path: age_of(path) >= 0 or not (path / MANIFEST).exists())


def unsound(folder: Path, rank: int = 0, processes: int = 1) -> str | None:
    """Why a checkpoint is incomplete or damaged or cannot be read, or None. Files of others are ignored. Reads every
    byte; of several processes each reads the files of its rank, and the first one those of no rank too."""
    try:
        return damage(folder, rank, processes)
    except readers.Damaged as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"


def damage(folder: Path, rank: int, processes: int) -> str | None:
    try:
        settle(folder)
        manifest = manifest_of(folder)
    except names.Unsafe as error:
        return f"its {MANIFEST} is none of ours: {error}"
    except OSError as error:
        return f"no readable {MANIFEST} ({type(error).__name__})"
    absent = {name for name in {*manifest, STATE} if not (folder / name).is_file()}
    if missing := sorted(name for name in absent if "keeper" not in manifest.get(name, {})):
        return f"files {missing} are missing"
    manifest = {name: manifest[name] for name in manifest.keys() - absent}
    if STATE not in manifest:
        return f"{STATE} is not in its {MANIFEST}"
    if rank < ranks_that_saved(folder) and f"rank{rank}.safetensors" not in manifest:
        return f"rank{rank}.safetensors is missing, it was written to another machine's disk"
    first = 0 if "rank0.safetensors" in manifest else rank  # reads the rest; on a disk without rank 0's file each does
    for name, wanted in manifest.items():
        own = RANKS_FILE.fullmatch(name)
        mine = (int(own[1]) if own else first) % processes == rank
        if not is_as_written(folder / name, wanted, check_hash=mine):
            return f"{name} is not what was written" + (f" by rank {own[1]}" if own else "")
    state_of(folder, AGE)  # raises Damaged: a forger's manifest has the right hash
    return None


def ranks_that_saved(folder: Path) -> int:
    """The number of processes that wrote a file of the checkpoint; 0 if its state cannot be read."""
    try:
        state = state_of(folder, RANKS)
        return 1 if state["alone"] else state["plan"]["num_processes"]
    except DAMAGE:
        return 0


def files_of_ranks(folder: Path) -> dict[int, Path]:
    """{rank: file of its tensors} of a checkpoint that `unsound` has found sound, in the order of ranks."""
    there = [name for name in manifest_of(folder) if (folder / name).is_file()]  # others are on other machines' disks
    ranks = {int(own[1]): name for name in there if (own := RANKS_FILE.fullmatch(name))}
    return {rank: folder / ranks[rank] for rank in sorted(ranks)}


def find(wanted: Path | str | None, output_dir: Path | str) -> Path | None:
    """The checkpoint to resume from, the same on all ranks: the folder `wanted`, or if it is None the newest intact one
    in output_dir, or None if no machine has one. It may be one of Accelerate's. Raises Refused if `wanted` is damaged,
    or every one in output_dir that was complete once, or if the machines' disks have different ones."""
    process, damaged = PartialState(), None  # the newest one, and why
    given = Path(output_dir if wanted is None else wanted)
    wanted, output_dir = None if wanted is None else given.absolute(), Path(output_dir).absolute()
    folders = candidates(output_dir) if wanted is None and process.is_main_process else []
    [wanted, output_dir, folders] = broadcast_object_list([wanted, output_dir, folders])  # as the main process names it
    if wanted is None and process.is_local_main_process and not process.is_main_process:
        with contextlib.suppress(OSError):
            folders = folders + candidates(output_dir)  # what is on the disk of this machine
    listed = [folders] if wanted is None else [[wanted]]
    for folder in dict.fromkeys(folder for each in gather_object(listed) for folder in each):
        settle_together(folder)
        here = process.process_index, process.num_processes
        reason = None if is_accelerates(folder) else unsound(folder, *here)
        # as the script names it, which has given it or its parent, if that is the same here
        shown = next((path for path in (given, given / folder.name) if path.absolute() == folder), folder)
        launcher.wait_for_all("verify the checkpoint")
        if reason and launcher.several_machines():
            reason += f" on {socket.gethostname()}"
        told = gather_object([(reason, (folder / MANIFEST).exists(), identity(folder), socket.gethostname())])
        reasons = [reason for reason, *_ in told if reason]
        reasons += [
            f"{host} has another one of that name than {told[0][3]}" for *_, one, host in told if one != told[0][2]
        ]
        if not reasons:
            return shown
        if wanted is not None:
            raise Refused(
                f"the checkpoint {shown} cannot be resumed: {reasons[0]}. Take another one, or none: "
                "then the newest complete one of the project folder is loaded"
            )
        if any(complete for _, complete, *_ in told):  # the others were never complete, as after a kill
            damaged = damaged or f"{shown}: {reasons[0]}"
        process.print(f"skipping {shown}: {reasons[0]}")
    if damaged:
        raise Refused(f"no checkpoint can be resumed, {damaged}: move it elsewhere to start at step 0")
    return None


def is_accelerates(folder: Path) -> bool:
    """Whether Accelerate itself wrote the checkpoint `folder`."""
    return not (folder / MANIFEST).exists() and any(folder.glob("random_states_*.pkl"))


def read_state(folder: Path) -> dict[str, Any]:
    """`trainer_state.json` of a checkpoint that `find` has verified: all that this version writes, each value of its
    type and range."""
    try:
        state = state_of(folder, {"format": readers.count()})
        if state["format"] != FORMAT:
            raise Refused(
                f"{folder} was written in format {state['format']}, this version reads {FORMAT}: use the "
                "version that wrote it"
            )
        processes = readers.of_kind(folder / STATE, state, WHOLE)["plan"]["num_processes"]
        within = {"keeper": readers.count(0, processes - 1), "replicas": readers.count(1, processes)}
        return readers.of_kind(folder / STATE, state, within)
    except ValueError as error:
        raise Refused(f"{error}: take another checkpoint") from None


def cuts_of(folder: Path) -> tuple[dict[str, int | None], int]:
    """({name: dimension along which tensor parallel has split it, or None}, by how many processes) in a checkpoint's
    state. Raises Refused, also of one that has not all weights."""
    try:
        state = state_of(folder, {key: WHOLE[key] for key in ("cuts", "tp?", "left_out?")})
        if state.get("left_out"):
            raise Refused(f"{folder} has no frozen weights, a hook of the script left them out: use what it saved")
        return state["cuts"], state.get("tp", 1)
    except DAMAGE as error:
        raise Refused(f"{error}: take another checkpoint") from None


def tensors_of(folder: Path, rank: int, prefix: str = "") -> tensor_files.TensorFile:
    """The tensors in one rank's file whose names begin with `prefix`."""
    file = names.inside(folder, f"rank{rank}.safetensors")
    if not file.exists():
        raise Refused(f"{file} is missing: copy it from the disk of the machine that wrote it")
    return tensor_files.TensorFile(file, prefix)
