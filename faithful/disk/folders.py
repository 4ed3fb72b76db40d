"""How several files of a folder take the place of those of an earlier save, for a reader who may come at any time."""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from faithful.disk import replacing

TEMPORARY = ".model.tmp-"


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
        mode = replacing.created(temporary / "mode")
        for name in new:
            replacing.sync(temporary / name)
            replacing.check_target(folder / name)
        for old in folder.glob("*.index.json") if len(new) > 1 else ():
            if re.fullmatch(names, old.name):
                old.unlink()  # the new one comes last: until then no loader takes old and new files for one model
        for name in new:
            replacing.move(temporary / name, folder / name, mode)
        replacing.sync(folder)
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
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None


def clear_leftovers(folder: Path) -> None:
    """Deletes the temporary folders of killed processes. Those of other machines that are writing are locked."""
    for left in folder.glob(f"{TEMPORARY}????????"):
        if (lock := locked(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
