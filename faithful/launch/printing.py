"""What is printed is not the run. A reader that has gone (`| head`), a full disk or a closed stream ends no program of
ours, and a text from a file says nothing to the terminal but its letters."""

import contextlib
import errno
import functools
import os
import re
import sys
from collections.abc import Callable

# Control characters but \n and \t (C1 too), those that turn the direction of a line, and halves of surrogate pairs.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
FILES = {"stdout": 1, "stderr": 2}
lost: dict[str, str] = {}  # {stream: why it cannot be written}


def plain(text: str) -> str:
    """The text with every character that a terminal would obey as Python writes it: \\x1b."""
    return OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def survive(plainly: bool = False) -> None:
    """Makes print(), progress bars and logging go on when stdout or stderr cannot be written. plainly: what goes there
    is `plain`; for the programs that print what stands in files. Call it as early as can be."""
    for name, number in FILES.items():
        if getattr(sys, name) is None:  # it was closed when Python started
            with contextlib.suppress(OSError):
                os.fstat(number)  # raises if no other file has taken its number since
                number = None
            if number:
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # else the next file gets what C++ prints
            setattr(sys, name, open(os.devnull, "w"))
        stream = getattr(sys, name)
        if not hasattr(stream.write, "survives"):
            stream.flush = surviving(name, stream.flush)
            stream.write = surviving(name, stream.write)
        if plainly and not stream.write.plainly:
            keep = "\r" if name == "stderr" else ""  # of progress bars
            stream.write = surviving(name, plain_writer(stream.write, keep), plainly=True)


def plain_writer(write: Callable[[str], int], keep: str) -> Callable[[str], int]:
    return lambda text: write(keep.join(map(plain, text.split(keep))) if keep else plain(text))


def surviving(name: str, call: Callable[..., int | None], plainly: bool = False) -> Callable[..., int | None]:
    @functools.wraps(call)
    def called(*words: str) -> int | None:
        try:
            return call(*words)
        except OSError as error:
            if error.errno != errno.EPIPE and name not in lost:
                lost[name] = f"{name} cannot be written ({error.strerror}): what is printed is lost"
                at_once(f"warning: {lost[name]}\n")
        except UnicodeEncodeError:  # in an encoding that lacks the characters
            return call(*(word.encode("ascii", "backslashreplace").decode() for word in words))

    called.survives, called.plainly = True, plainly  # pyrefly: ignore[missing-attribute]
    return called


def at_once(text: str) -> None:
    """Writes to stderr, also where a signal may have interrupted a print()."""
    with contextlib.suppress(OSError):
        os.write(FILES["stderr"], text.encode())
