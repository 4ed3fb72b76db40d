"""What a JSON file of ours must hold. A file may be damaged, or made by anyone: keys, types and ranges are checked here
and nowhere else. Each function raises Damaged with a line that names the file."""

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from faithful.disk.names import opened, short

# What is read takes at most 5 seconds and 500 MB of memory, whatever is in it: docs/runs.md has the bounds.
CHECKPOINT = 1 << 25, 1_500_000  # bytes and values of a JSON file in a checkpoint, and of the header of a tensor file
RECORD = 1 << 23, 250_000  # of any other one: what a tool shows and compares
DEEPEST = 200  # objects and lists in one another
LONGEST_LOG, MOST_ROWS, MOST_LOGGED = 3 << 25, 1_000_000, 4_000_000  # bytes, lines and values of metrics.jsonl
LONGEST_ROW = 1 << 20  # bytes of a line
DECODER = json.JSONDecoder()


class Damaged(ValueError):
    """A file does not hold what it should. The message is one line that names the file."""


@contextlib.contextmanager
def reading(path: Path | str, most: int) -> Iterator[BinaryIO]:
    """A regular file of at most so many bytes. Raises OSError, which names it."""
    try:
        with os.fdopen(opened(path), "rb") as file:
            if os.fstat(file.fileno()).st_size > most:
                raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", str(path))
            yield file
    except OSError as error:
        if error.errno and not error.filename:  # an error in reading knows the descriptor alone
            error.filename = str(path)
        raise


def bytes_of(path: Path | str, most: int) -> bytes:
    """The bytes of a regular file, at most so many. Raises OSError, which names it."""
    with reading(path, most) as file:
        return file.read()


def values_in(text: bytes) -> int:
    """How many values a JSON text holds, at most."""
    return 1 + sum(map(text.count, (b",", b"[", b"{")))


def value_of(path: Path | str, form: Any, bounds: tuple[int, int] = RECORD) -> Any:
    """The value in a JSON file, if it has the form: see `of_kind`. Raises Damaged, and OSError where it cannot be
    read."""
    text = bytes_of(path, bounds[0])
    if values_in(text) > bounds[1]:
        raise Damaged(f"{path} holds more than {bounds[1]:,} values")
    try:
        value = parsed(text)
    except RecursionError:
        raise Damaged(f"{path} is nested too deep") from None
    except ValueError as error:
        raise Damaged(f"{path} is not JSON ({str(error).splitlines()[0]})") from None
    return of_kind(path, value, form)


def parsed(text: bytes) -> Any:
    """The value that a JSON text holds. Raises ValueError, and RecursionError where it is nested too deep."""
    value = DECODER.decode(text.decode())  # not json.loads, which takes halves of characters for text
    level = [value] if text.count(b"[") + text.count(b"{") > DEEPEST else []
    for _ in range(DEEPEST):
        lists = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [inner for one in lists for inner in one]
        if not level:
            return value
    raise RecursionError


def of_kind(path: Path | str, value: Any, form: Any, at: str = "") -> Any:
    """`value` if it has the form `form`, else raises Damaged, which names the key `at`.

    form: a type or a tuple of types; a function from a value to whether it is right; (None, form), which may be null;
    [form], a list; {str: form}, an object with any keys; or {key: form}, where a key with `?` at its end may be absent
    and other keys are ignored."""
    if isinstance(form, tuple) and form[0] is None:
        return value if value is None else of_kind(path, value, form[1], at)
    if isinstance(form, dict | list):
        wanted = type(form)
        if not isinstance(value, wanted):
            raise Damaged(f"{path}: {at or 'its content'} is {KINDS.get(type(value), 'a number')}, not {KINDS[wanted]}")
        if isinstance(form, list) or str in form:
            every = form[0] if isinstance(form, list) else form[str]
            for key, inner in enumerate(value) if isinstance(value, list) else value.items():
                of_kind(path, inner, every, f"{at}.{key if wanted is list else short(key)[1:-1]}".strip("."))
            return value
        for key, inner in form.items():
            name, there = key.rstrip("?"), f"{at}.{key}".strip(".?")
            if name in value:
                of_kind(path, value[name], inner, there)
            elif not key.endswith("?"):
                raise Damaged(f"{path} lacks {there}")
    elif not (isinstance(value, form) if isinstance(form, type | tuple) else form(value)):
        raise Damaged(f"{path}: {at} is {short(value)}, which it cannot be")
    return value


KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "a text", type(None): "null", bool: "true or false"}


def count(first: int = 0, last: int = 2**63 - 1) -> Callable[[Any], bool]:
    """The form of a whole number from `first` to `last`."""
    return lambda value: type(value) is int and first <= value <= last


def number(value: Any) -> bool:
    """The form of a finite number. Larger ones than 1e100 nobody has measured, and arithmetic with them overflows."""
    return type(value) in (int, float) and abs(value) < 1e100


def word(value: object) -> bool:
    """The form of null, or of a text that fits into a line."""
    return value is None or isinstance(value, str) and len(value) <= 255 and value.isprintable()


def rows_of(path: Path | str) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """(line, row) for each line of a file with a JSON object in each, as a crash leaves it: where a line is torn the
    row is None. Without a file there is none. Raises OSError if it cannot be read, and in its midst if it is too
    long."""
    with contextlib.suppress(FileNotFoundError), reading(path, LONGEST_LOG) as file:
        values = 0
        for number, line in enumerate(filter(bytes.strip, file)):
            values += values_in(line)
            if number == MOST_ROWS or values > MOST_LOGGED:
                many = f"{MOST_ROWS:,} lines" if number == MOST_ROWS else f"{MOST_LOGGED:,} values"
                raise OSError(errno.EFBIG, f"more than {many}", str(path))
            try:
                row = parsed(line) if len(line) <= LONGEST_ROW else None
                yield line.decode().strip(), row if isinstance(row, dict) else None
            except (ValueError, RecursionError):
                yield "", None
