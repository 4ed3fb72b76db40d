"""What data.json may hold: a run's folder may come from anyone. Imports no torch, because tools that read many runs don't
need it."""

import json

from shared.args import Refused


def whole(first, last):
    return lambda value: type(value) is int and first <= value <= last


def numbers(value):
    small = isinstance(value, list) and 0 < len(value) <= 64
    return small and all(type(one) in (int, float) and abs(one) < 1e6 for one in value)


def texts(value):
    return value is None or (isinstance(value, list) and all(isinstance(one, str) for one in value))


# What data.json may hold, which may be anyone's: {key: function from a value to whether it is right}. Another data set
# than images has no image_size; keys may be absent.
FORM = {
    "image_size": lambda size: size is None or whole(1, 4096)(size), "in_chans": whole(1, 64),
    "num_classes": whole(1, 100_000), "sequence_length": whole(1, 10**6), "vocab_size": whole(1, 10**7),
    "classes": texts, "interpolation": lambda name: isinstance(name, str), "mean": numbers, "std": numbers,
    "crop_pct": lambda value: value is None or (type(value) in (int, float) and 0 < value <= 10),
    "fingerprint": lambda value: value is None or isinstance(value, str),
}  # fmt: skip


def read(path):
    """The object in a JSON file. Raises Refused for anything else."""
    try:
        if not path.is_file():  # a pipe would be waited for
            raise OSError("no such file")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"{path} cannot be read ({str(error)[:200]})") from None
    if not isinstance(value, dict):
        raise Refused(f"{path}: its content is not an object")
    return value
