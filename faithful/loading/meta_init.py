"""Models that only process 0 builds with their weights: fsdp_cpu_ram_efficient_loading and zero3_init_flag.

From `Accelerator()` on, every other process keeps the parameters that a module registers on torch's `meta` device: they
have a shape and no values. Random numbers are drawn there all the same, so a process's generator, and with it the data,
are those of a run without the key. While a model is partitioned (ZeRO-3), or when it has been sharded (FSDP2: `fill`),
each process reads its part of the weights from their safetensors file (sharded_files.py). Process 0 sends the weights
that are in no file, or that differ from it, one after the other, and each process keeps its part. A copy of the model
that was made before, for an average of weights, gets them whole.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.weak import WeakIdKeyDictionary

from faithful import patches
from faithful.errors import NoValues, Refused
from faithful.launch import machine
from faithful.loading import sharded_files
from faithful.tensors.names import local, parameters_of, rows_of

CONVERT = "deepspeed.runtime.zero.partition_parameters:Init._convert_to_zero_parameters"
INIT = "deepspeed.runtime.zero.partition_parameters:Init._zero_init_param"
NAMES = "deepspeed.runtime.engine:debug_extract_module_and_param_names"
BROADCAST = "deepspeed.runtime.engine:DeepSpeedEngine._broadcast_model"
CONFIGURE = "deepspeed.runtime.engine:DeepSpeedEngine._configure_distributed_model"
PARAMETER = "torch.nn.Parameter.__deepcopy__"
MODULE, KERNELS = "torch.nn.Module.register_parameter, _apply", "kernels of torch.ops.aten for meta"
RANDOM = ("normal_", "uniform_", "random_", "random_.from", "random_.to", "bernoulli_.float", "exponential_",
          "log_normal_", "cauchy_", "geometric_")  # fmt: skip


# {id of a parameter without values: (it, its deep copies)}
copies: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
# {address: storage} of what from_pretrained makes on meta: there process 0 draws no numbers, either
made_on_meta: dict[int, torch.UntypedStorage] = {}
# ZeRO-3: {id of a parameter that is not sent: this process's part of it, until it is partitioned}
partitions: dict[int, torch.Tensor] = {}


def start(main: bool) -> None:
    """From now on processes other than the main one build modules without weights, until the run ends."""
    sharded_files.start(main)
    if main:
        return
    made_on_meta.clear()
    register, apply, deepcopy = nn.Module.register_parameter, nn.Module._apply, nn.Parameter.__deepcopy__
    without = WeakIdKeyDictionary()  # {parameter: the one without values that stands for it}

    @functools.wraps(register)
    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if type(param) is nn.Parameter and not param.is_meta:
            if param not in without:
                without[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
                without[param].__dict__.update(param.__dict__)
            self._parameters[name] = without[param]
        elif param is not None and param.is_meta and torch.get_default_device().type == "meta":
            storage = param.untyped_storage()
            made_on_meta[storage._cdata] = storage

    @functools.wraps(apply)
    def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        return apply(self, functools.partial(stays, fn), recurse)

    @functools.wraps(deepcopy)
    def __deepcopy__(self: nn.Parameter, memo: dict[int, Any]) -> torch.Tensor:
        copy = deepcopy(self, memo)
        if copy.is_meta:
            copies.setdefault(id(self), (self, []))[1].append(copy)
        return copy

    patches.replace(MODULE, register_parameter, nn.Module, "register_parameter")
    patches.replace(MODULE, _apply, nn.Module, "_apply")
    patches.replace(PARAMETER, __deepcopy__)
    patches.undo_with(KERNELS, draw())


def stays(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """`fn(tensor)`, as in `model.to(device)`. A tensor without values changes its dtype alone: `fill` moves it."""
    if not tensor.is_meta:
        return fn(tensor)
    try:
        return fn(tensor)
    except NotImplementedError:
        return tensor.to(fn(torch.empty((), dtype=tensor.dtype)).dtype)


def draw() -> Callable[[], None]:
    """Makes torch's random functions draw for tensors without values, too. Returns a function that undoes it."""
    library = torch.library.Library("aten", "IMPL")
    for name in RANDOM:
        library.impl(name, functools.partial(drawn, getattr(torch.Tensor, name.partition(".")[0])), "Meta",
                     allow_override=True)  # fmt: skip
    return library._destroy


def drawn(method: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if tensor.untyped_storage()._cdata in made_on_meta:
        return tensor
    method(scratch.like(tensor, "cpu"), *args, **kwargs)
    return tensor


class Scratch:
    """Memory for one tensor after the other. New memory for each would stay with the process: the C library gives pages
    back only from the end of its heap."""

    def __init__(self) -> None:
        self.free()

    def like(self, tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """A tensor with the shape and dtype of `tensor`, until the next call."""
        size = tensor.numel() * tensor.element_size()
        if size > self.bytes.numel() or self.bytes.device != torch.device(device):
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        return self.bytes[:size].view(tensor.dtype).view(tensor.shape)

    def free(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)


scratch = Scratch()


def weights_of(model: nn.Module) -> dict[str, Any]:
    """What `fill` needs of a model that is not sharded yet: {name: tensor} of process 0; on the others {name: the
    copies of the parameter}."""
    if dist.get_rank() == 0:
        return {name: parameter.detach() for name, parameter in parameters_of(model)}
    return {name: copies.pop(id(parameter), (None, []))[1] for name, parameter in parameters_of(model)}


def refuse_other_models(model: nn.Module) -> None:
    """Raises Refused, on every process, if one's model has other parameters than that of process 0, whose weights it is
    to get."""
    wanted, *others = gather_object([[name for name, _ in parameters_of(model)]])
    for rank, names in enumerate(others, 1):
        if wrong := sorted({*names} ^ {*wanted}):
            raise Refused(
                f"process {rank} is to get process 0's weights, but {', '.join(wrong[:3])} are in one model alone: "
                "build the same on each, or set fsdp_cpu_ram_efficient_loading and zero3_init_flag to false"
            )


@torch.no_grad()
def fill(model: nn.Module, before: dict[str, Any], device: torch.device, kept_on: torch.device | str) -> None:
    """Gives a sharded model the weights and buffers of process 0. Every process calls it. before: what `weights_of`
    returned. device: where tensors are sent, whole and one at a time. kept_on: where the shards stay."""
    main, filled = dist.get_rank() == 0, {}
    send_buffers(model, device)
    parameters = dict(parameters_of(model))
    without = {name: p for name, p in parameters.items() if main or (p.is_meta and not before[name])}
    parts = sharded_files.read(without, before if main else None, elements_held, kept_on)
    for name, parameter in parameters.items():
        mine = before.pop(name)
        if name in parts:
            part = torch.empty_like(parameter, device=kept_on)
            local(part).view(-1).copy_(parts.pop(name))
        else:
            sent = sent_to_all(mine if main else parameter, parameter, device)
            for copy in [] if main else mine:
                torch.utils.swap_tensors(copy, nn.Parameter(sent.to(copy.dtype, copy=True), copy.requires_grad))
            part = shard_of(sent, parameter, kept_on)
        if parameter.is_meta:
            filled[parameter] = nn.Parameter(part, parameter.requires_grad)
        elif not main:  # the model was built before Accelerator()
            local(parameter).copy_(local(part))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = filled.get(parameter, parameter)
    model._apply(lambda tensor: tensor)  # FSDP2 looks for its parameters anew
    scratch.free()
    machine.trim_memory()


@torch.no_grad()
def send_buffers(model: nn.Module, device: torch.device) -> None:
    """Gives all processes the buffers of process 0. One that was computed from weights has no values on the others."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                sent = sent_to_all(buffer, buffer, device)
                module._buffers[name] = sent.clone() if buffer.is_meta else buffer.copy_(sent)
    scratch.free()


def sent_to_all(value: torch.Tensor, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The `value` of process 0 on every process, until the next call. like: a tensor of its shape and dtype."""
    sent = scratch.like(like, device)
    if dist.get_rank() == 0:
        sent.copy_(value)
    dist.broadcast(sent.view(-1).view(torch.uint8), 0)  # gloo knows few dtypes
    return sent


def partition(main: bool) -> None:
    """Makes ZeRO-3 take memory for a parameter only when it partitions it. DeepSpeed sends that of process 0 before,
    and the whole model even before that, if every process has it. Process 0's stays on the host until then."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import Init

    configure, init, convert = (
        DeepSpeedEngine._configure_distributed_model,
        Init._zero_init_param,
        Init._convert_to_zero_parameters,
    )

    def on_the_host(self: DeepSpeedEngine, model: nn.Module) -> None:
        self.dont_change_device = True
        configure(self, model)
        for module in model.modules():
            module._buffers |= {name: b.to(self.device) for name, b in module._buffers.items() if b is not None}

    def without_sending(self: Init, param: Any) -> None:
        if id(param) not in partitions:
            return init(self, param)
        del partitions[id(param)]
        self._convert_to_deepspeed_param(param)
        param.partition()
        if param.ds_tensor.ds_numel != partition_size(param.ds_numel):
            raise RuntimeError(
                f"DeepSpeed splits {param.ds_shape} into parts of {param.ds_tensor.ds_numel} elements, and "
                f"{partition_size(param.ds_numel)} were read from the file: set zero3_init_flag to false"
            )

    patches.replace(CONFIGURE, on_the_host)
    patches.replace(BROADCAST, lambda self: None)
    patches.replace(INIT, without_sending)
    if main:
        return

    def one_by_one(self: Init, params: list[Any]) -> None:
        for param in params:
            if param.is_meta:
                empty = torch.empty(param.shape, dtype=param.dtype, device=self.local_device)
                if id(param) in partitions:
                    begin, end = partition_of(param)
                    empty.view(-1)[begin:end] = partitions[id(param)]
                torch.utils.swap_tensors(param, nn.Parameter(empty, param.requires_grad))
            convert(self, [param])

    patches.replace(CONVERT, one_by_one)
    patches.replace(NAMES, lambda model: None)


def read_partitions(model: nn.Module, device: torch.device) -> None:
    """ZeRO-3: reads this process's parts of the model's parameters from their file, where they are in one."""
    main = dist.get_rank() == 0
    parameters = {name: p for name, p in parameters_of(model) if main or p.is_meta}
    whole = {name: p.detach() for name, p in parameters.items()} if main else None
    parts = sharded_files.read(parameters, whole, partition_of, device)
    partitions.update({id(parameters[name]): part for name, part in parts.items()})


def partition_of(param: torch.Tensor) -> tuple[int, int]:
    """The first element of a parameter that DeepSpeed gives this process, and the one after the last."""
    size = partition_size(param.numel())
    begin = min(dist.get_rank() * size, param.numel())
    return begin, min(begin + size, param.numel())


def partition_size(elements: int) -> int:
    """The length of the parts of a parameter, with the padding of the last."""
    return -(-elements // dist.get_world_size())


def elements_held(parameter: torch.Tensor) -> tuple[int, int]:
    """The first element that this process holds of a parameter, and the one after the last."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.numel()
    first, number = rows_of(parameter)
    row = parameter.shape[1:].numel()
    return first * row, (first + number) * row


def explain(error: str, key: str) -> NoValues | None:
    """A NoValues for an error that comes of weights without values, or None. key: the config's, that asks for them."""
    if not re.search(r"\bmeta\b", error, re.IGNORECASE):
        return None
    return NoValues(
        f"with {key} only process 0 has the weights of a model before prepare(), and the script uses them on the "
        f"others ({error}): use them after prepare(), or set the key to false"
    )


def shard_of(sent: torch.Tensor, parameter: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """This process's part of a whole tensor, as a tensor like `parameter`, which has no values."""
    if not isinstance(parameter, DTensor):
        return sent.to(device, copy=True)
    part = torch.empty_like(parameter, device=device)
    mine = distribute_tensor(sent, parameter.device_mesh, parameter.placements, src_data_rank=None)
    part.to_local().copy_(mine.to_local())  # pyrefly: ignore[missing-attribute]
    return part
