"""Files of settings that a user names: YAML and JSON, which anyone may have written. What harms is refused before it is
parsed or built: a pipe or a device, a file of megabytes, lists in lists in lists, aliases of aliases, a key that stands
twice, control characters. Each function raises Unreadable."""

import json
import os
from pathlib import Path
from typing import Any

import yaml

from faithful.disk.names import opened, short

LONGEST = 1 << 16  # bytes of a file
DEEPEST = 20  # lists and sections inside each other
MOST = 2_000  # values, those that aliases repeat counted again
WIDEST = 4096  # characters of a text, as of a path
GREATEST = 2**63  # of whole numbers


class Unreadable(ValueError):
    """The file cannot be read as settings. The message is the end of a line."""


def read(path: Path | str) -> Any:
    """The value in a file: JSON if its name says so, else YAML, as Accelerate reads it."""
    text = text_of(path)
    return of_json(text) if Path(path).suffix == ".json" else of_yaml(text)


def text_of(path: Path | str) -> str:
    """The text of a regular file, or of one to which a symlink of the user's leads."""
    try:
        with os.fdopen(opened(os.path.realpath(path)), "rb") as file:
            content = file.read(LONGEST + 1)
    except (OSError, ValueError) as error:  # a path that holds \0
        raise Unreadable(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > LONGEST:
        raise Unreadable(f"cannot be read: it is longer than {LONGEST:,} bytes, which no config is")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"cannot be read: byte {content[error.start]:#x} at {error.start} is not UTF-8") from None


def of_json(text: str) -> Any:
    """The value in a JSON text."""
    if text.startswith("\ufeff"):
        raise Unreadable("begins with a byte order mark, which Accelerate refuses in JSON: save it without")
    if len(text) > LONGEST:
        raise Unreadable(f"cannot be read: it is longer than {LONGEST:,} bytes, which no config is")
    try:
        value = json.loads(text, object_pairs_hook=section)
    except json.JSONDecodeError as error:
        raise Unreadable(f"not JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise too_deep() from None
    except Unreadable:
        raise
    except ValueError as error:  # of int: thousands of digits
        raise Unreadable(f"cannot be read: {str(error).partition(';')[0]}") from None
    return checked(value)


def section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        keys = [key for key, _ in pairs]
        raise twice(next(key for key in keys if keys.count(key) > 1))
    return names


def of_yaml(text: str) -> Any:
    """The value in a YAML text. Its events are counted before anything is built of them."""
    try:
        count_events(text)
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        said = getattr(error, "problem", None) or getattr(error, "reason", None) or type(error).__name__
        raise Unreadable(f"not YAML{where}: {short_line(said)}") from None
    except Unreadable:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        # of PyYAML's constructors: a date that there is not, !!bool x, thousands of digits
        raise Unreadable(f"cannot be read: {short_line(str(error).partition(';')[0])}") from None
    return checked(value)


def count_events(text: str) -> None:
    """Raises Unreadable for a YAML text that would become too much or too deep, or has a key twice."""
    whole: list[Any] = [0, None, False, None]  # values in it, keys of a section, whether a key comes next, its anchor
    stack: list[list[Any]] = [whole]
    sizes: dict[str, int] = {}
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        inner = stack[-1]
        if isinstance(event, yaml.CollectionEndEvent):
            _, _, _, anchor = stack.pop()
            stack[-1][0] += inner[0]
            if anchor:
                sizes[anchor] = inner[0]
        elif isinstance(event, yaml.NodeEvent):
            if inner[2] and isinstance(event, yaml.ScalarEvent):
                if event.value in inner[1] and event.value != "<<":
                    raise twice(event.value)
                inner[1].add(event.value)
            inner[2] = inner[1] is not None and not inner[2]
            if isinstance(event, yaml.CollectionStartEvent):
                keys = set() if isinstance(event, yaml.MappingStartEvent) else None
                stack.append([1, keys, keys is not None, event.anchor])
                if len(stack) > DEEPEST + 1:
                    raise too_deep()
            elif isinstance(event, yaml.AliasEvent):
                in_itself = any(frame[3] == event.anchor for frame in stack)
                inner[0] += MOST if in_itself else sizes.get(event.anchor, 1)
            else:
                inner[0] += 1
                if event.anchor:
                    sizes[event.anchor] = 1
        if sum(frame[0] for frame in stack) > MOST:
            raise Unreadable(f"holds more than {MOST:,} values, or aliases that make as many")


def checked(value: Any, depth: int = 0) -> Any:
    """`value`, if it has no number that is too large, no text of more than a line, and is not too deep."""
    if depth > DEEPEST:
        raise too_deep()
    if isinstance(value, dict):
        for key, inner in value.items():
            checked(key, depth)
            checked(inner, depth + 1)
    elif isinstance(value, list | tuple | set):
        for inner in value:
            checked(inner, depth + 1)
    elif isinstance(value, str) and len(value) > WIDEST:
        raise Unreadable(f"holds a text of {len(value):,} characters: {short(value)}, which no setting is")
    elif isinstance(value, str) and not value.isprintable():
        raise Unreadable(f"holds {short(value)}: write it on one line, without control characters")
    elif isinstance(value, int) and abs(value) >= GREATEST:
        raise Unreadable("holds a number of more than 64 bits: write a smaller one")
    return value


def too_deep() -> Unreadable:
    return Unreadable(f"is nested more than {DEEPEST} levels deep, which no config is")


def twice(key: object) -> Unreadable:
    return Unreadable(f"has the key {short(key)} twice in a section: remove one of them")


def short_line(text: str) -> str:
    """Other people's message, on one line."""
    return short(text)[1:-1] if not text.isprintable() else text[:200]
