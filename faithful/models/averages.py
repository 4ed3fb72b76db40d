"""Averages of weights (EMA) under FSDP2, by the classes of torch, timm, diffusers and ema_pytorch. ZeRO refuses them.

A copy of a model that was made before `prepare` holds whole tensors, and torch refuses to compute with whole tensors
and shards (DTensor) together. Inside the methods of these classes each shard is replaced by its whole tensor, or where
the model itself is changed, the whole tensor by its shard.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from faithful import patches
from faithful.errors import Refused
from faithful.launch import rank_sync
from faithful.tensors.names import shard_of, whole_of

METHODS = {  # (module, class): those of its methods that compute with the model's weights
    ("torch.optim.swa_utils", "AveragedModel"): ["update_parameters"],
    ("timm.utils.model_ema", "ModelEmaV2"): ["update", "set"],
    ("timm.utils.model_ema", "ModelEmaV3"): ["update", "set"],
    ("diffusers.training_utils", "EMAModel"): ["step", "store", "copy_to", "restore"],
    ("ema_pytorch.ema_pytorch", "EMA"): ["update", "update_model_with_ema"],
}


def of_shards() -> None:
    """Makes the averages of the imported packages work with sharded weights. Called whenever a model is prepared."""
    replace(on_all_processes)


def refuse(weights: str) -> None:
    """Makes the averages of the imported packages raise Refused. weights: what they would average."""

    def instead(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise Refused(f"{weights}, and {name} would average these: use a ddp or fsdp config")

        return call

    replace(instead)


def replace(by: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> None:
    for (module, name), methods in METHODS.items():
        kind = getattr(sys.modules.get(module), name, None)
        for method in methods if kind else ():
            if not hasattr(getattr(kind, method), "replaced"):
                ours: Any = by(getattr(kind, method), f"{name}.{method}")
                ours.replaced = True
                patches.replace("methods of averages of weights", ours, kind, method)


def on_all_processes(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wraps a method. Its first call raises Refused if the main process alone calls it: the others have to give it
    their shards."""
    come: bool | None = None

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal come
        if come is None:
            come = rank_sync.all_ranks_called(name, needed=True)
        if not come:
            raise called_alone(name)
        with WholeTensors():
            return method(*args, **kwargs)

    return call


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
