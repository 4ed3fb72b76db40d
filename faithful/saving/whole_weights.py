"""The whole weights of a prepared model: for `get_state_dict`, and for its `save_pretrained`.

transformers, peft, diffusers and sentence-transformers save what they find in the model. Under FSDP2, tensor parallel
and ZeRO-3 these are shards, under ZeRO 16-bit copies, and under MS-AMP's levels codes. So for the time of the call the
model gets its weights as `accelerator.get_state_dict` returns them.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
from accelerate.state import PartialState
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from faithful.checkpoint.weight_files import Pieces
from faithful.errors import Refused
from faithful.launch import following, launcher, rank_sync
from faithful.strategies.base import persistent_buffers, whole_tensor
from faithful.tensors.names import local, of_fp8, parameters_of, plain_names, tensors_of, unwrapped

if TYPE_CHECKING:
    from faithful.strategies.base import Strategy
    from faithful.training.model import PreparedModel

T = TypeVar("T")


def state_dict(
    strategy: "Strategy", model: nn.Module, accelerates: Callable[[], dict[str, Any]], asks: tuple[Any, ...]
) -> dict[str, Any]:
    """{name: tensor} of the full weights, on the main process where they are sharded. accelerates: Accelerate's own
    `get_state_dict`, which is right where the strategy has no other way. asks: see all_ranks_called."""
    need_all(strategy, model, asks)
    # torch's takes the names of the state_dict for those of parameters
    torchs = strategy.fully_shards and own_names(model) is None
    if torchs or (pieces := strategy.pieces(model)) is None:
        whole = accelerates()
    else:  # one at a time, to save memory, and one that modules share once
        main = PartialState().is_main_process
        made = {}
        for get in dict.fromkeys(get for _, get in pieces.values()):
            tensor = get()
            made[get] = tensor.cpu() if main else None
        whole = {name: made[get] for name, (_, get) in pieces.items()} if main else {}
    whole = dict(plain_names(whole.items()))
    if strategy.plan.precision != "fp8":
        return whole
    return {name: tensor for name, tensor in whole.items() if torch.is_tensor(tensor) and not of_fp8(name)}


def own_names(model: nn.Module) -> dict[str, str] | None:
    """{name in the model's state_dict: name of the parameter or buffer} of a model whose class, or a hook, names them
    in another way or leaves some out; None of all others."""
    module = unwrapped(model)
    if all(type(part).state_dict is nn.Module.state_dict and not part._state_dict_hooks for part in module.modules()):
        return None
    each = dict(
        plain_names([*module.named_parameters(remove_duplicate=False), *persistent_buffers(module, once=False)])
    )
    with saved_plainly(module.modules(), itself=True):  # a state_dict of its own may take no keep_vars
        own = dict(plain_names(module.state_dict().items()))
    if all(own.get(name) is tensor for name, tensor in each.items()):
        return None
    known = {id(tensor): name for name, tensor in reversed(each.items())}
    return {name: known[id(tensor)] for name, tensor in own.items() if id(tensor) in known}


@contextlib.contextmanager
def saved_plainly(modules: Iterable[nn.Module], itself: bool = False) -> Iterator[None]:
    """Within it a state_dict has the parameters of these modules as torch's own would. itself: the very parameters."""

    def save(module: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(module, destination, prefix, keep_vars or itself)

    with contextlib.ExitStack() as after:
        for module in modules:
            before = vars(module)
            if "_save_to_state_dict" in before:
                after.callback(before.__setitem__, "_save_to_state_dict", before["_save_to_state_dict"])
            else:
                after.callback(before.pop, "_save_to_state_dict")
            module._save_to_state_dict = MethodType(save, module)
        yield


def as_saved(strategy: "Strategy", model: nn.Module, weights: dict[str, T]) -> dict[str, T]:
    """The weights under the names of the model's own state_dict, without those that it leaves out."""
    names = None if strategy.replicates or not weights else own_names(model)
    if names is None:
        return weights
    found = {own: weights.get(name, weights.get(own)) for own, name in names.items()}
    return {own: weight for own, weight in found.items() if weight is not None}


def need_all(strategy: "Strategy", model: nn.Module, asks: tuple[Any, ...]) -> None:
    """Raises Refused if the main process alone asks for weights that are sharded."""
    if strategy.sharded(model.parameters()) and not rank_sync.all_ranks_called("get_state_dict", True, asks):
        raise Refused(
            "the main process alone asks for the weights, but each process holds a part of them: call "
            "get_state_dict or save_model on all of them, before end_training()"
        )


def whole(obj: Any, keep: bool) -> Any:
    """`obj` with whole tensors in place of shards. Every process calls it. keep: whether this one writes them."""
    shards = [tensor for tensor in tensors_of(obj) if isinstance(tensor, DTensor)]
    if not shards:
        return obj
    from faithful.models.shards import need_all_for  # only a strategy that shards loads it

    need_all_for("accelerator.save", following.gathering("accelerator.save", shards))

    def gathered(shard: DTensor) -> torch.Tensor | None:
        tensor = whole_tensor(shard)
        return tensor.cpu() if keep else None

    return tree_map_only(DTensor, gathered, obj)


def names_of(models: list[nn.Module], shards: list[DTensor]) -> list[tuple[int, str]]:
    """(number of the model, name of the parameter) of each of these shards; nothing if one is of no parameter."""
    each = [(p, (at, name)) for at, model in enumerate(models) for name, p in parameters_of(model)]
    known = {(local(p).data_ptr(), p.shape): where for p, where in each if isinstance(p, DTensor)}
    found = [known.get((local(shard).data_ptr(), shard.shape)) for shard in shards if local(shard).data_ptr()]
    return [where for where in found if where] if all(found) and len(found) == len(shards) else []


def gather(models: list[nn.Module], call: str, names: list[tuple[int, str]]) -> None:
    """Gathers these parameters with the main process, which saves them by that call."""
    from faithful.models.shards import WRITES, need_all_for

    need_all_for(call)
    if call == WRITES:
        gather_object([None])  # in place of a path
    for at, name in names:
        whole_tensor(dict(parameters_of(models[at]))[name].detach())


def pieces(strategy: "Strategy", model: nn.Module, asks: tuple[Any, ...]) -> Pieces | None:
    """As `state_dict`, for one tensor after the other: see Strategy.pieces. None where that is not to be used."""
    if not strategy.sharded(model.parameters()):
        return None
    need_all(strategy, model, asks)
    pieces = strategy.pieces(model)
    if pieces is None or strategy.plan.precision != "fp8":
        return pieces
    return {name: piece for name, piece in pieces.items() if not of_fp8(name)}


def saved_whole(prepared: "PreparedModel", get_state_dict: Callable[[nn.Module], dict[str, Any]]) -> None:
    """Makes `save_pretrained` of a prepared model, and of its parts, write whole weights, as long as its Accelerator
    holds both. get_state_dict: the Accelerator's method."""
    for module in unwrapped(prepared.model).modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            # a copy of the module gets its own
            module.save_pretrained = MethodType(save_pretrained, module)  # pyrefly: ignore[bad-argument-type]
            prepared_parts[module] = ref(prepared), WeakMethod(get_state_dict)


# of each module with save_pretrained
prepared_parts: "WeakKeyDictionary[nn.Module, tuple[ref[PreparedModel], WeakMethod[Any]]]" = WeakKeyDictionary()
hold_whole: list[nn.Module] = []  # prepared models whose save_pretrained is running, with whole weights in them


def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Every process calls it where weights are sharded. There the main process alone writes. A model's may call that of
    its part."""
    held = prepared_parts.get(self)  # None: a copy of the module
    prepared, get_state_dict = (held[0](), held[1]()) if held else (None, None)
    if prepared is None or get_state_dict is None or any(prepared.model is model for model in hold_whole):
        return type(self).save_pretrained(self, *args, **kwargs)
    given = kwargs.get("state_dict")
    if given and not hasattr(self, "get_prompt_embedding_to_save"):
        from faithful.models.averages import WholeTensors

        with WholeTensors("save_pretrained"), launcher.saving_for_all():
            return type(self).save_pretrained(self, *args, **kwargs)
    # peft computes the prompts that it saves with the weights in the model
    weights = get_state_dict(prepared.model) if given is None else given
    if not weights:  # on the other processes: these write nothing
        return None
    with inside(prepared.model, weights), launcher.saving_for_all():
        return type(self).save_pretrained(self, *args, **kwargs)


@contextlib.contextmanager
def inside(model: nn.Module, weights: dict[str, torch.Tensor]) -> Iterator[None]:
    """Replaces the model's parameters by `weights`, {name: tensor}. Parameters that modules share stay shared. Modules
    compute as torch's do, without hooks."""
    own = {id(parameter): (name, parameter) for name, parameter in parameters_of(model) if name in weights}
    whole = {key: nn.Parameter(weights[name], parameter.requires_grad) for key, (name, parameter) in own.items()}
    with contextlib.ExitStack() as after:
        # not what amp8 makes of its codes, which under FSDP2 is a shard
        after.enter_context(saved_plainly(part for part in model.modules() if hasattr(part, "true_weight")))
        for module in list(unwrapped(model).modules()):
            before, hooks = vars(module), ("_forward_pre_hooks", "_forward_hooks")
            if isinstance(module, nn.Linear) and "forward" not in before:
                module.forward = MethodType(nn.Linear.forward, module)
                after.callback(before.pop, "forward")
            after.callback(before.update, {name: before[name] for name in hooks})
            before.update({name: OrderedDict() for name in hooks})
            for name, parameter in module._parameters.items():
                if id(parameter) in whole:
                    after.callback(module._parameters.__setitem__, name, parameter)
                    module._parameters[name] = whole[id(parameter)]
        hold_whole.append(model)
        after.callback(hold_whole.remove, model)
        yield
