"""How a file takes the place of another: in one step, so that a reader sees the old content or the new one, never a
device, a pipe, a folder or a symlink, and with the mode that the user's umask gives."""

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from faithful.disk.names import kind_of


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


def write_text(path: Path | str, text: str) -> None:
    """Writes a file in one step."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path | str, value: object) -> None:
    """Writes a JSON file in one step."""
    write_text(path, json.dumps(value, indent=1) + "\n")
