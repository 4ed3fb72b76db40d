"""The files that save_model writes: `model.safetensors`, or in several files with an index."""

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.modeling import get_state_dict_offloaded_model
from huggingface_hub import StateDictSplit, save_torch_state_dict, split_torch_state_dict_into_shards
from safetensors import SafetensorError
from torch import nn

from faithful.disk import tensor_files
from faithful.disk.names import short
from faithful.disk.replacing import write_files, write_json
from faithful.errors import NotSaved, Refused
from faithful.launch import launcher
from faithful.tensors.names import local

# {name: (a tensor of its shape and dtype, function that returns the whole tensor)}
Pieces = dict[str, tuple[torch.Tensor, Callable[[], torch.Tensor]]]
WEIGHTS = {  # patterns of the file names of save_model, with safe_serialization and without
    True: r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?",
    False: r"pytorch_model(-\d{5}-of-\d{5})?\.bin(\.index\.json)?",
}


def check_shard_size(size: int | str) -> None:
    """Raises Refused for a `max_shard_size` that huggingface_hub cannot read."""
    try:
        split_torch_state_dict_into_shards({}, max_shard_size=size)
    except (ArithmeticError, ValueError) as error:
        raise Refused(
            f"save_model: max_shard_size is {short(size)} ({error}): write bytes, or a number with KB, MB, GB or TB"
        ) from None


def write_weights(
    weights: dict[str, torch.Tensor], folder: Path, max_shard_size: int | str, safe_serialization: bool
) -> None:
    """Writes {name: tensor} as `model.safetensors`, in several files above `max_shard_size`."""
    plain = {name: own_copy(weight) for name, weight in weights.items()}
    options: dict[str, Any] = {"max_shard_size": max_shard_size, "safe_serialization": safe_serialization}
    write = lambda temporary: save_torch_state_dict(plain, temporary, **options)  # noqa: E731
    write_model(folder, write, WEIGHTS[safe_serialization])


def stream_weights(pieces: Pieces, folder: Path, max_shard_size: int | str, main: bool) -> None:
    """As `write_weights`, of a model that no process holds whole: one tensor after the other. Every rank calls it.

    pieces: every rank calls their functions, in one order. main: whether this process writes."""
    like = {name: torch.empty_like(tensor, device="meta") for name, (tensor, _) in pieces.items()}
    split = split_torch_state_dict_into_shards(like, max_shard_size=max_shard_size)
    left = deque(
        name
        for names in split.filename_to_tensors.values()
        for name in tensor_files.in_order({n: like[n] for n in names})
    )

    def load(name: str) -> torch.Tensor:
        due = left.popleft()
        if name != due:
            raise RuntimeError(f"{name} is to be written, and the other processes are at {due}")
        return pieces[name][1]()

    try:
        if main:
            write_model(folder, lambda temporary: write_split(split, like, load, temporary), WEIGHTS[True])
    finally:
        while left:  # the others' share of the work, or after an error what the other ranks wait for
            load(left[0])
        launcher.wait_for_all("write the weights")


def write_split(
    split: StateDictSplit,
    like: Mapping[str, torch.Tensor],
    load: Callable[[str], torch.Tensor],
    folder: Path,
    name: str = "model.safetensors",
) -> None:
    """Writes tensors one after the other, as huggingface_hub's `split` divides them into files, with an index if there
    are several. like: {name: tensor of its shape and dtype}. load: returns the tensor of a name. name: of a single file
    """
    for file, names in split.filename_to_tensors.items():
        tensor_files.write({name: like[name] for name in names}, folder / file, load, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / f"{name}.index.json", index)


def write_model(folder: Path, write: Callable[[Path], object], names: str) -> None:
    """As disk.replacing.write_files. Raises NotSaved."""
    try:
        write_files(folder, write, names)
    except (OSError, RuntimeError, SafetensorError) as problem:
        why = getattr(problem, "strerror", None) or str(problem).splitlines()[0]
        raise NotSaved(
            f"{folder}: the weights could not be written ({why}): free its disk, or save to another folder"
        ) from None


def offloaded_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """{name: tensor} on the CPU of a model that Accelerate's hooks have offloaded to the CPU or a disk. Accelerate's
    own function leaves out the outermost module's parameters."""
    outermost = {name: tensor for name, tensor in model.state_dict().items() if "." not in name}
    hook = getattr(model, "_hf_hook", None)
    maps = [getattr(inner_hook, "weights_map", None) for inner_hook in getattr(hook, "hooks", [hook])]
    weights_map = next(filter(None, maps), {})
    outermost = {name: weights_map[name] if tensor.is_meta else tensor for name, tensor in outermost.items()}
    return get_state_dict_offloaded_model(model) | outermost


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, in memory of its own: FSDP2 gathers several tensors into one storage."""
    tensor = local(tensor.detach()).cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
