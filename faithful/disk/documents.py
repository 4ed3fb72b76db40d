"""Files of settings that a user names: YAML and JSON, which anyone may have written. What harms is refused before
anybody reads it: a pipe or a device, a file of megabytes, lists in lists in lists, aliases of aliases, a key that
stands twice, control characters. Each function raises Unreadable."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from faithful.disk.names import opened, printable, short

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
    return built(lambda: json.loads(text, object_pairs_hook=section))


def of_yaml(text: str) -> Any:
    """The value in a YAML text."""
    return built(lambda: yaml.load(text, Loader))


def built(load: Callable[[], Any]) -> Any:
    """What `load` returns, if it can be settings."""
    try:
        value = load()
    except json.JSONDecodeError as error:
        raise Unreadable(f"not JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        said = getattr(error, "problem", None) or getattr(error, "reason", None) or type(error).__name__
        raise Unreadable(f"not YAML{where}: {printable(said)[:200]}") from None
    except Unreadable:
        raise
    except RecursionError:
        raise too_deep() from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # of the constructors: thousands of digits, and in YAML a date that there is not, !!bool x
        raise Unreadable(f"cannot be read: {printable(str(error).partition(';')[0])[:200]}") from None
    return checked(value)


def section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    refuse_twice(pairs)
    return dict(pairs)


class Loader(yaml.SafeLoader):
    """PyYAML's, for sections in which no key has two values, and into which few others are merged (`<<`)."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        made = super().compose_mapping_node(anchor)
        scalars = [(key.value, value) for key, value in made.value if isinstance(key, yaml.ScalarNode)]
        refuse_twice([(key, value.value if value.id == "scalar" else value) for key, value in scalars])
        if any(
            key.value == "<<" and value.id == "sequence" and len(value.value) > DEEPEST for key, value in made.value
        ):
            raise too_many()
        return made

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MOST:
            raise too_many()


def refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    """Raises Unreadable if a key has two values. Readers of YAML and JSON take the last one in silence."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if values.setdefault(key, value) != value:
            raise Unreadable(f"has the key {short(key)} twice in a section: remove one of them")


def checked(value: Any) -> Any:
    """`value`, if it is not too deep or too much, counting what aliases repeat, and has no number that is too large and
    no text of more than a line."""
    every = [(value, 0)]
    for inner, depth in every:  # it grows
        if depth > DEEPEST:
            raise too_deep()
        if len(every) > MOST:
            raise too_many()
        if isinstance(inner, dict):
            every += [(each, depth + 1) for pair in inner.items() for each in pair]
        elif isinstance(inner, list | tuple | set):
            every += [(each, depth + 1) for each in inner]
        elif isinstance(inner, str) and len(inner) > WIDEST:
            raise Unreadable(f"holds a text of {len(inner):,} characters: {short(inner)}, which no setting is")
        elif isinstance(inner, str) and not inner.isprintable():
            raise Unreadable(f"holds {short(inner)}: write it on one line, without control characters")
        elif isinstance(inner, int) and abs(inner) >= GREATEST:
            raise Unreadable("holds a number of more than 64 bits: write a smaller one")
    return value


def too_many() -> Unreadable:
    return Unreadable(f"holds more than {MOST:,} values, or aliases that make as many")


def too_deep() -> Unreadable:
    return Unreadable(f"is nested more than {DEEPEST} levels deep, which no config is")
