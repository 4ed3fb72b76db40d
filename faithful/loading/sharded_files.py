"""Slices of safetensors files: where only process 0 has a model's weights (meta_init.py), each process reads its own.

From `Accelerator()` on a process notes which safetensors files are opened, by `from_pretrained`, say. When the model is
sharded, it looks in them for a tensor with the name and shape of a parameter, and reads the part that it is to hold.
The script may have changed the weights in the meantime, or the file may be another one on this machine: the part counts
if process 0's weights have the same hash there. Parameters for which any process has no such part are sent.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import xxhash
from accelerate.utils import broadcast_object_list, gather_object

from faithful import patches
from faithful.disk.tensor_files import TensorFile
from faithful.errors import Refused

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPEN = "safe_open of safetensors and transformers"
LOAD = "transformers.modeling_utils:convert_and_load_state_dict_in_model"
TIE = "transformers.modeling_utils:PreTrainedModel.tie_weights"
IMPORTERS = ("safetensors", "safetensors.torch", "transformers.modeling_utils")  # each has the function under its name

opened: list[Path | str] = []  # the newest last


def start(main: bool) -> None:
    """From now on notes the files. Processes other than the main one no longer read what they do not keep of them."""
    opened.clear()
    if "transformers" in sys.modules:  # which imports its modules when they are used
        with contextlib.suppress(ImportError):
            importlib.import_module("transformers.modeling_utils")
    for module in filter(None, map(sys.modules.get, IMPORTERS)):
        patches.replace(OPEN, noted(module.safe_open), module, "safe_open")
    transformers, reader = map(sys.modules.get, ("transformers.modeling_utils", "transformers.core_model_loading"))
    if not main and transformers and reader and hasattr(reader, "_materialize_copy"):  # transformers 5
        patches.replace(LOAD, without_reading(transformers.convert_and_load_state_dict_in_model, reader))
        patches.replace(TIE, tied_as_in_files(transformers.PreTrainedModel.tie_weights))


def noted(safe_open: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(safe_open)
    def open_and_note(filename: Path | str, *args: Any, **kwargs: Any) -> Any:
        opened.append(filename)
        return safe_open(filename, *args, **kwargs)

    return open_and_note


def without_reading(load: Callable[..., Any], reader: ModuleType) -> Callable[..., Any]:
    """transformers' function that loads a state dict into a model, with tensors without values. A quantizer needs them.
    reader: the module of transformers with the function that reads a tensor."""

    def unread(tensor: Any, device: object = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        view = tensor[...]  # of a file that is mapped into memory
        return view.to("meta", dtype or view.dtype)

    @functools.wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        if getattr(kwargs.get("load_config"), "hf_quantizer", True) is not None:
            return load(*args, **kwargs)
        with mock.patch.object(reader, "_materialize_copy", unread):
            return load(*args, **kwargs)

    return loaded


def tied_as_in_files(tie_weights: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' method, which does not tie two weights that are both in the file unless they are equal. Here they
    have no values: if they are equal in the file, the second one counts as missing there."""

    @functools.wraps(tie_weights)
    def tied(self: "PreTrainedModel", missing_keys: set[str] | None = None, *args: Any, **kwargs: Any) -> Any:
        if missing_keys is not None and (pairs := self.all_tied_weights_keys.items()):
            tensors = tensors_in_files()
            for second, first in pairs:
                if not {first, second} & missing_keys:
                    one, other = (in_file(tensors, name) for name in (first, second))
                    if one is not None and other is not None and torch.equal(one, other):
                        missing_keys.add(second)
        return tie_weights(self, missing_keys, *args, **kwargs)

    return tied


@torch.no_grad()
def read(
    parameters: Mapping[str, torch.Tensor],
    whole: Mapping[str, torch.Tensor] | None,
    span: Callable[[torch.Tensor], tuple[int, int]],
    device: torch.device | str,
) -> dict[str, torch.Tensor]:
    """{name: this process's part of the parameter, flat, on `device`} of those that all have read from a file.
    Every process calls it, and gets the same names.

    parameters: {name: parameter} of those to look for. whole: process 0's {name: tensor}; None on the others. span:
    returns the first element of a parameter that this process holds, and the one after the last.
    """
    parts, hashes = {}, {}
    tensors = tensors_in_files() if parameters and whole is None else {}
    for name, parameter in parameters.items():
        value = in_file(tensors, name)
        if value is not None and value.shape == parameter.shape:
            begin, end = span(parameter)
            part = value.flatten()[begin:end].to(parameter.dtype, copy=True)
            hashes[name], parts[name] = (begin, end, digest(part)), part.to(device)
    hashes_of_others = gather_object([hashes])[1:]
    [same] = broadcast_object_list([whole and names_of_equal(hashes_of_others, whole)])
    if whole:
        return {name: whole[name].flatten()[slice(*span(parameters[name]))].to(device) for name in same}
    return {name: parts[name] for name in same}


def names_of_equal(hashes: list[dict[str, tuple[int, int, bytes]]], whole: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the tensors of which each process has read what process 0 has. hashes: of each process {name: (first
    element, the one after the last, hash)}."""
    wanted = functools.cache(lambda name, begin, end: digest(whole[name].flatten()[begin:end]))

    def equal(name: str) -> bool:
        return all(wanted(name, begin, end) == read for begin, end, read in (of_process[name] for of_process in hashes))

    return sorted(name for name in set(whole).intersection(*hashes) if equal(name)) if hashes else []


def tensors_in_files() -> dict[str, tuple[TensorFile, str]]:
    """{name: (file, name in the file)} of the tensors in the files that were opened; of one name, the newest. A model
    inside another one has names with one part less, or more."""
    tensors, shorter = {}, {}
    for path in dict.fromkeys(opened):
        with contextlib.suppress(Refused):  # it is gone
            file = TensorFile(path)
            tensors |= {key: (file, key) for key in file}
            shorter |= {without_first(key): (file, key) for key in file}
    return shorter | tensors


def in_file(tensors: dict[str, tuple[TensorFile, str]], name: str) -> torch.Tensor | None:
    """The tensor of a name, not read yet, or None. tensors: see `tensors_in_files`."""
    found = tensors.get(name) or tensors.get(without_first(name))
    return found[0][found[1]] if found else None


def without_first(name: str) -> str:
    """`layers.0.weight` for `model.layers.0.weight`."""
    return name.partition(".")[2]


def digest(part: torch.Tensor) -> bytes:
    """The hash of a tensor's bytes."""
    return xxhash.xxh3_128_digest(part.cpu().contiguous().view(torch.uint8).numpy().data)
