"""Python values as JSON and tensors, for checkpoints, which hold no pickle."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from faithful.errors import Refused

COLLECTIONS = {kind.__name__: kind for kind in (tuple, set, frozenset)}


def pack(value: Any, tensors: dict[str, torch.Tensor], at: str) -> Any:
    """`value` as JSON. Its tensors go to `tensors`, under names that begin with `at`. Types that JSON lacks become
    {"!": kind, ...}. Raises Refused for types that only a pickle could hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    while at in tensors:  # {"a.b": tensor, "a": {"b": tensor}}
        at += "_"
    if torch.is_tensor(value):
        tensors[at] = local_copy(value)
        return {"!": "tensor", "at": at}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        tensors[at] = torch.from_numpy(np.array(value))
        return {"!": "array" if isinstance(value, np.ndarray) else "number", "at": at}
    if isinstance(value, dict):
        if "!" not in value and all(isinstance(key, str) for key in value):
            return {key: pack(inner, tensors, f"{at}.{key}") for key, inner in value.items()}
        items = [
            [pack(k, tensors, f"{at}.{i}.key"), pack(v, tensors, f"{at}.{i}")] for i, (k, v) in enumerate(value.items())
        ]
        return {"!": "dict", "items": items}
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


def local_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().clone()


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
    return {unpack(key, tensors): unpack(inner, tensors) for key, inner in value["items"]}
