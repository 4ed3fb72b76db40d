"""Averages of weights (EMA) under FSDP2, by the classes of torch, timm, diffusers and ema_pytorch. ZeRO refuses them.

A copy of a model that was made before `prepare` holds whole tensors, and torch refuses to compute with whole tensors
and shards (DTensor) together. Inside the methods of these classes each shard is replaced by its whole tensor, or where
the model itself is changed, the whole tensor by its shard.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from faithful import patches
from faithful.errors import Refused
from faithful.launch import following, rank_sync
from faithful.tensors.names import shard_of, whole_of

METHODS = {  # (module, class): those of its methods that compute with the model's weights
    ("torch.optim.swa_utils", "AveragedModel"): ["update_parameters"],
    ("timm.utils.model_ema", "ModelEmaV2"): ["update", "set"],
    ("timm.utils.model_ema", "ModelEmaV3"): ["update", "set"],
    ("diffusers.training_utils", "EMAModel"): ["step", "store", "copy_to", "restore"],
    ("ema_pytorch.ema_pytorch", "EMA"): ["update", "update_model_with_ema"],
}
OTHERS = {("trl.trainer.callbacks", "BEMACallback"): ["on_train_begin"]}  # which torch's shards refuse themselves


def of_shards() -> None:
    """Makes the averages of the imported packages work with sharded weights. Called whenever a model is prepared."""
    replace(on_all_processes, METHODS)


def refuse(weights: str) -> None:
    """Makes the averages of the imported packages raise Refused. weights: what they would average."""

    def instead(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise Refused(f"{weights}, and {name} would average these: use a ddp or fsdp config")

        return call

    replace(instead, METHODS | OTHERS)


def replace(by: Callable[[Callable[..., Any], str], Callable[..., Any]], of: dict[tuple[str, str], list[str]]) -> None:
    for (module, name), methods in of.items():
        kind = getattr(sys.modules.get(module), name, None)
        for method in methods if kind else ():
            if not hasattr(getattr(kind, method), "replaced"):
                ours: Any = by(getattr(kind, method), f"{name}.{method}")
                ours.replaced = True
                patches.replace("methods of averages of weights", ours, kind, method)


def on_all_processes(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wraps a method. A call by the main process alone, until all have called it, raises Refused where they do not
    follow: the others have to give it their shards."""
    all_call = False

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal all_call
        args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)  # parameters()
        if not any(each() is self for each in used):
            used.append(weakref.ref(self))
        whole = args and isinstance(args[0], list) and not any(isinstance(tensor, DTensor) for tensor in args[0])
        if not all_call and not whole:
            if not rank_sync.all_ranks_called(name, True, asks_for(self, name, args)):
                raise called_alone(name)
            all_call = not any(gather_object([following.serves()]))
        with WholeTensors():
            return method(self, *args, **kwargs)

    return call


used: list["weakref.ref[Any]"] = []  # averages, in the order of the first use


def asks_for(average: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the other processes are asked to do with their averages, see following.py; () where that is not known."""
    weights = list(args[0].parameters()) if args and isinstance(args[0], torch.nn.Module) else args[0] if args else []
    names = following.names_of([tensor for tensor in weights if isinstance(tensor, DTensor)][:1])
    return ("average", names[0][0], name, [each() for each in used].index(average)) if names else ()


def follow(model: torch.nn.Module, name: str, at: int) -> None:
    """Calls the method `Class.method` of an average with a prepared model, as the main process does."""
    average, method = used[at]() if at < len(used) else None, name.rpartition(".")[2]
    if average is None:
        raise called_alone(name)
    takes_model = type(average).__name__ != "EMAModel"
    getattr(average, method)(model if takes_model else model.parameters())


def called_alone(name: str) -> Refused:
    return Refused(
        f"the main process alone calls {name}, but each process holds a part of the weights: call it on all "
        "of them, or use a ddp config"
    )


class WholeTensors(TorchFunctionMode):
    """Gives a function that gets whole tensors and shards together only tensors of one kind. name: what the script
    calls, if it is not known yet whether all processes call it."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        shards = [isinstance(leaf, DTensor) for leaf in leaves]
        if any(leaf.is_meta for leaf in leaves):  # fsdp_cpu_ram_efficient_loading
            raise NotImplementedError("an average of meta tensors: a copy of the model from before prepare()")
        if not any(shards) or (all(shards) and func.__name__ != "_foreach_copy_"):  # torch has none for shards
            return func(*args, **kwargs)
        name, self.name = self.name, None
        if name and not rank_sync.all_ranks_called(name):
            raise called_alone(name)
        if func.__name__.endswith("_"):  # in place
            func(tree_map(shard_of, args[0]), tree_map(like, args[1], args[0]), *args[2:], **kwargs)
            return args[0]
        return func(*tree_map(whole_of, args), **tree_map(whole_of, kwargs))


def like(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that this process has of `target`: all of it if the target is whole. Same shapes."""
    if not isinstance(target, DTensor):
        return whole_of(tensor)
    if not isinstance(tensor, DTensor):
        tensor = distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)
    return tensor.to_local()
