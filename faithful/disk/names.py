"""From a name that stands in a file to a path. Every such name goes through `inside`, and every file of a folder that
others may have made is opened by `opened`: neither leaves the folder, and no device or pipe is touched."""

import os
import re
import reprlib
import stat
from pathlib import Path
from typing import NoReturn

LONGEST = 255  # bytes of a file's name on the usual file systems
SHORT = reprlib.Repr()  # looks at the first items only, and not far into what is nested
SHORT.maxstring = SHORT.maxother = 60


def printable(text: str) -> str:
    """Text from a file for a terminal: control characters and halves of characters are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Unsafe(ValueError):
    """A name in a file is not the name of a file in its folder. The message is the end of a line."""


def inside(folder: Path | str, name: object) -> Path:
    """The path of `name` in `folder`: one plain name, or several with `/` between them. What is there already must be a
    regular file in folders that are no symlinks; it may be absent. Raises Unsafe."""
    parts = name.split("/") if isinstance(name, str) else []
    if not parts or not all(map(plain, parts)):
        raise Unsafe(f"it names {short(name)}, which is no file in the folder")
    path = Path(folder)
    for part, wanted in zip(parts, ["folder"] * (len(parts) - 1) + ["file"], strict=True):
        path /= part
        kind = kind_of(path)
        if kind not in (None, wanted):
            raise Unsafe(f"{short(str(path.relative_to(folder)))} is a {kind}, not a {wanted} of the checkpoint")
    return path


def plain(part: str) -> bool:
    """Whether this part of a name is neither empty nor `.` nor `..`, and has no control character or backslash."""
    return (
        part not in ("", ".", "..")
        and not re.search(r"[\x00-\x1f\x7f-\x9f\\\ud800-\udfff]", part)
        and len(part.encode()) <= LONGEST
    )


def short(name: object) -> str:
    """The name, or any other value of a file, as text of at most 60 characters, all of them ASCII and printable."""
    text = SHORT.repr(name).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


def kind_of(path: Path | str) -> str | None:
    """What is at the path itself, not behind a symlink: "file", "folder", "symlink", "special file", or None."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "folder"), (stat.S_ISLNK, "symlink"))
    return next((kind for test, kind in kinds if test(mode)), "special file")


def opened(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """The descriptor of a regular file. Raises OSError for what is none: a symlink, a folder, a pipe, a device."""
    path = Path(path)
    kind = kind_of(path)
    if kind not in (None, "file"):
        raise OSError(f"it is a {kind}, not a file")
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # changed since
        os.close(descriptor)
        raise OSError("it is not a file")
    return descriptor


def files_below(folder: Path | str) -> list[str]:
    """The names, relative to `folder`, of all that is no folder in it and below, sorted. A symlink is not followed.
    Raises OSError where a folder cannot be listed (Path.rglob finds nothing in it)."""

    def raised(error: OSError) -> NoReturn:
        raise error

    found = []
    for root, folders, files in os.walk(folder, onerror=raised):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        found += [os.path.relpath(os.path.join(root, name), folder) for name in (*files, *links)]
    return sorted(found)
