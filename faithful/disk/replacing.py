"""How a file takes the place of another: in one step, so that a reader sees the old content or the new one, never a
device, a pipe, a folder or a symlink, and with the mode that the user's umask gives. And how several files of a folder
take the place of those of an earlier save (write_files)."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from faithful.disk.names import kind_of

TEMPORARY = ".model.tmp-"  # folders of write_files


def sync(path: Path | str) -> None:
    """Writes a file, or a folder's entries, from the page cache to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_target(path: Path | str) -> None:
    """Raises OSError unless the path is a regular file or absent."""
    kind = kind_of(path)
    if kind not in (None, "file"):
        raise OSError(f"{path} is a {kind}: name a file or a new one")


def created(path: Path | str) -> int:
    """Makes an empty file, which must not be there. Returns its mode, as the umask gives it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replaced(path: Path | str) -> Iterator[Path]:
    """Yields the path of an empty file beside `path`, which takes its place at the end. After an error `path` is as it
    was. Raises OSError."""
    path = Path(path)
    check_target(path)
    temporary = path.with_name(path.name + ".tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()  # of a killed process; a symlink goes, not what it leads to
    mode = created(temporary)
    try:
        yield temporary
        move(temporary, path, mode)
        sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def move(temporary: Path, path: Path, mode: int) -> None:
    """Puts a finished file, which is synced and gets `mode`, in the place of `path` on the same file system."""
    check_target(path)
    os.chmod(temporary, mode)  # a library that has written it may have made it for the user alone
    sync(temporary)
    os.replace(temporary, path)


def remove(path: Path) -> None:
    """Deletes a file, where there is one."""
    path.unlink(missing_ok=True)


def write_text(path: Path | str, text: str) -> None:
    """Writes a file in one step."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path | str, value: object) -> None:
    """Writes a JSON file in one step."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_files(folder: Path, write: Callable[[Path], object], names: str) -> None:
    """Calls `write(temporary folder)` and moves the files that it writes to `folder`. Of the files there, only those of
    an earlier save are replaced, which have the pattern `names`. After an error they are still there, or if several
    files were being moved, they have no index."""
    temporary = lock = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder))
        lock = locked(temporary)
        write(temporary)
        new = sorted(path.name for path in temporary.iterdir())
        mode = created(temporary / "mode")
        for name in new:
            sync(temporary / name)
            check_target(folder / name)
        for old in folder.glob("*.index.json") if len(new) > 1 else ():
            if re.fullmatch(names, old.name):
                old.unlink()  # the new one comes last: until then no loader takes old and new files for one model
        for name in new:
            move(temporary / name, folder / name, mode)
        sync(folder)
        for old in folder.iterdir():  # of a save in another number of files, which a loader could prefer
            if re.fullmatch(names, old.name) and old.name not in new:
                old.unlink()
        clear_leftovers(folder)
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def locked(folder: Path) -> int | None:
    """Locks a temporary folder while this process lives. Returns the descriptor that holds the lock, or None: another
    process has it, or there are no locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except OSError:
        os.close(descriptor)
        return None


def clear_leftovers(folder: Path) -> None:
    """Deletes the temporary folders of killed processes. Those of other machines that are writing are locked."""
    for left in folder.glob(f"{TEMPORARY}????????"):
        if (lock := locked(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
