"""Python values as JSON and tensors, for checkpoints, which hold no pickle; and whether what is loaded has the type,
the shape and the length of what is there."""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from faithful.disk.names import short
from faithful.errors import Refused

COLLECTIONS = {kind.__name__: kind for kind in (tuple, set, frozenset)}
DICTS = {kind.__name__: kind for kind in (dict, Counter, OrderedDict)}
MADE_BY = {kind.__name__: kind for kind in (int, float, str, list, dict, set)}  # values of a defaultdict


def pack(value: Any, tensors: dict[str, torch.Tensor], at: str) -> Any:
    """`value` as JSON. Its tensors go to `tensors`, under names that begin with `at`. Types that JSON lacks become
    {"!": kind, ...}. Raises Refused for types that only a pickle could hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    while at in tensors:  # {"a.b": tensor, "a": {"b": tensor}}
        at += "_"
    if torch.is_tensor(value):
        tensors[at] = value.detach().cpu().contiguous().clone()
        return {"!": "tensor", "at": at}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        tensors[at] = torch.from_numpy(np.array(value))
        return {"!": "array" if isinstance(value, np.ndarray) else "number", "at": at}
    if isinstance(value, dict):
        kind, factory = type(value).__name__, getattr(value, "default_factory", None)
        if kind not in ("Counter", "OrderedDict", "defaultdict") and "!" not in value and all(map(is_text, value)):
            return {key: pack(inner, tensors, f"{at}.{key}") for key, inner in value.items()}
        items = [
            [pack(k, tensors, f"{at}.{i}.key"), pack(v, tensors, f"{at}.{i}")] for i, (k, v) in enumerate(value.items())
        ]
        if factory and factory in MADE_BY.values():
            return {"!": "defaultdict", "of": factory.__name__, "items": items}
        return {"!": kind if kind in DICTS else "dict", "items": items}
    if isinstance(value, list | tuple):
        items = [pack(inner, tensors, f"{at}.{i}") for i, inner in enumerate(value)]
        return items if type(value) is list else {"!": "tuple", "items": items}
    if isinstance(value, set | frozenset | deque):
        items = [pack(inner, tensors, f"{at}.{i}") for i, inner in enumerate(value)]
        return {"!": type(value).__name__, "items": items} | ({"maxlen": value.maxlen} if type(value) is deque else {})
    raise Refused(
        f"save_state: {at} is a {type(value).__name__}, which a checkpoint without a pickle cannot hold: let "
        "state_dict() return numbers, strings, tensors, arrays, and lists and dicts of these"
    )


def unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, list):
        return [unpack(inner, tensors) for inner in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("!")
    if kind is None:
        return {key: unpack(inner, tensors) for key, inner in value.items()}
    if kind == "tensor":
        return tensors[value["at"]].clone()
    if kind == "array":
        return tensors[value["at"]].clone().numpy()
    if kind == "number":
        return tensors[value["at"]].numpy()[()]
    if kind == "deque":
        return deque((unpack(inner, tensors) for inner in value["items"]), value["maxlen"])
    if kind in COLLECTIONS:
        return COLLECTIONS[kind](unpack(inner, tensors) for inner in value["items"])
    items = {unpack(key, tensors): unpack(inner, tensors) for key, inner in value["items"]}
    return defaultdict(MADE_BY[value["of"]], items) if kind == "defaultdict" else DICTS[kind](items)


def check_like(here: Any, saved: Any, at: str) -> None:
    """Raises ValueError unless `saved` has the type, the shape and the length of `here`, of which it takes the place.
    None may take the place of what is no number, and the other way round; of two dicts the common keys count."""
    there = f"{at} is {short(saved)} there"
    if is_number(here):
        if not is_number(saved) or math.isnan(saved) and not math.isnan(here):
            raise ValueError(f"{there}, and {short(here)} here")
    elif type(here) in (torch.Tensor, np.ndarray):
        if type(saved) is not type(here) or (saved.shape, saved.dtype) != (here.shape, here.dtype):
            kind = f"{list(saved.shape)} {saved.dtype}" if hasattr(saved, "dtype") else short(saved)
            raise ValueError(f"{at} is {kind} there, and {list(here.shape)} {here.dtype} here")
    elif here is None or saved is None:
        return
    elif isinstance(here, list | tuple):
        if not isinstance(saved, list | tuple) or len(saved) != len(here):
            raise ValueError(f"{there}, and a list of {len(here)} here")
        for i, pair in enumerate(zip(here, saved, strict=True)):
            check_like(*pair, f"{at}.{i}")
    elif isinstance(here, dict):
        if not isinstance(saved, dict):
            raise ValueError(f"{there}, and an object here")
        for key in here.keys() & saved.keys():
            check_like(here[key], saved[key], f"{at}.{key}")
    elif not isinstance(saved, type(here)):
        raise ValueError(f"{there}, and {short(here)} here")


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) or torch.is_tensor(value) and not value.dim()
