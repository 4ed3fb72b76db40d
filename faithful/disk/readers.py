"""What a JSON file of ours must hold. A file may be damaged, or made by anyone: keys, types and ranges are checked here
and nowhere else. Each function raises Damaged with a line that names the file."""

import json
import math
import os

from faithful.disk.names import opened, short


class Damaged(ValueError):
    """A file does not hold what it should. The message is one line that names the file."""


def bytes_of(path):
    """The bytes of a regular file. Raises OSError, which names it."""
    try:
        with os.fdopen(opened(path), "rb") as file:
            return file.read()
    except OSError as error:
        if error.errno and not error.filename:  # an error in reading knows the descriptor alone
            error.filename = str(path)
        raise


def value_of(path):
    """The value in a JSON file. Raises Damaged, and OSError where it cannot be read."""
    try:
        return json.loads(bytes_of(path))
    except RecursionError:
        raise Damaged(f"{path} is nested too deep") from None
    except ValueError as error:
        raise Damaged(f"{path} is not JSON ({str(error).splitlines()[0]})") from None


def of_kind(path, value, kinds, at=""):
    """`value` if it has the form `kinds`, else raises Damaged, which names the key `at`.

    kinds: a type or a tuple of types; a function from a value to whether it is right; or {key: form}, where a key with
    `?` at its end may be absent and other keys are ignored."""
    if isinstance(kinds, dict):
        if not isinstance(value, dict):
            raise Damaged(f"{path}: {at or 'its content'} is {kind(value)}, not an object")
        for key, inner in kinds.items():
            name, there = key.rstrip("?"), f"{at}.{key}".strip(".?")
            if name in value:
                of_kind(path, value[name], inner, there)
            elif not key.endswith("?"):
                raise Damaged(f"{path} lacks {there}")
    elif not (isinstance(value, kinds) if isinstance(kinds, type | tuple) else kinds(value)):
        raise Damaged(f"{path}: {at} is {short(value)}, which it cannot be")
    return value


def kind(value):
    names = {dict: "an object", list: "a list", str: "a text", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number")


def count(first=0, last=2**63 - 1):
    """The form of a whole number from `first` to `last`."""
    return lambda value: type(value) is int and first <= value <= last


def number(value):
    """The form of a finite number."""
    return type(value) in (int, float) and abs(value) < 2**63 and math.isfinite(value)


def rows_of(path):
    """([(line, row)], number of damaged lines) of a file with a JSON object in each line, as a crash leaves it: whole
    lines are read, torn ones counted. Without a file ([], 0). Raises OSError if it cannot be read."""
    try:
        lines = bytes_of(path).split(b"\n")
    except FileNotFoundError:
        return [], 0
    whole, damaged = [], 0
    for line in filter(bytes.strip, lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            whole.append((line.decode(), row))
        else:
            damaged += 1
    return whole, damaged
