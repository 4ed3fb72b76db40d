"""Models that only process 0 builds with their weights: fsdp_cpu_ram_efficient_loading and zero3_init_flag.

From `Accelerator()` on, every other process keeps the parameters that a module registers on torch's `meta` device: they
have a shape and no values. Random numbers are drawn there all the same, so a process's generator, and with it the data,
are those of a run without the key. In `prepare` process 0 sends the weights, one after the other, and each process
keeps its part: by Accelerate's `cpu_ram_efficient_loading` under FSDP2 (`loaded_once`), by DeepSpeed's zero.Init under
ZeRO-3 (`partition`).
"""

import contextlib
import functools
import operator
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from faithful import patches
from faithful.errors import NoValues, Refused
from faithful.launch import machine
from faithful.tensors.names import parameters_of

if TYPE_CHECKING:
    from accelerate.utils import FullyShardedDataParallelPlugin

MODULE, KERNELS = "torch.nn.Module.register_parameter, _apply", "kernels of torch.ops.aten for meta"
RANDOM = ("normal_", "uniform_", "random_", "random_.from", "random_.to", "bernoulli_.float", "exponential_",
          "log_normal_", "cauchy_", "geometric_")  # fmt: skip

# {address: storage} of what from_pretrained makes on meta: there process 0 draws no numbers, either
made_on_meta: dict[int, torch.UntypedStorage] = {}


def start(main: bool) -> None:
    """From now on processes other than the main one build modules without weights, until the run ends."""
    if main:
        return
    made_on_meta.clear()
    machine.return_freed_memory()
    # transformers then reads one tensor of a file after the other, each of which `register_parameter` gives up
    patches.set_environment("HF_DEACTIVATE_ASYNC_LOAD", "1")
    register, apply = nn.Module.register_parameter, nn.Module._apply
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

    patches.replace(MODULE, register_parameter, nn.Module, "register_parameter")
    patches.replace(MODULE, _apply, nn.Module, "_apply")
    patches.undo_with(KERNELS, draw())


def stays(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """`fn(tensor)`, as in `model.to(device)`. A tensor without values changes its dtype alone: `prepare` moves it."""
    if not tensor.is_meta:
        return fn(tensor)
    try:
        return fn(tensor)
    except NotImplementedError:
        return tensor.to(fn(torch.empty((), dtype=tensor.dtype)).dtype)


def draw() -> Callable[[], None]:
    """Makes torch's random functions draw for tensors without values, too. Returns a function that undoes it."""
    library = torch.library.Library("aten", "IMPL")

    def drawn(method: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in made_on_meta:
            method(torch.empty_like(tensor, device="cpu"), *args, **kwargs)
        return tensor

    for name in RANDOM:
        library.impl(name, functools.partial(drawn, getattr(torch.Tensor, name.partition(".")[0])), "Meta",
                     allow_override=True)  # fmt: skip
    return library._destroy


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
def send_buffers(model: nn.Module, device: torch.device) -> None:
    """Gives all processes the buffers of process 0. One that was computed from weights has no values on the others."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                sent = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device).contiguous()
                dist.broadcast(sent.view(-1).view(torch.uint8), 0)  # gloo knows few dtypes
                module._buffers[name] = sent if buffer.is_meta else buffer.copy_(sent)


@contextlib.contextmanager
def loaded_once(model: nn.Module, plugin: "FullyShardedDataParallelPlugin", device: torch.device) -> Iterator[None]:
    """Around Accelerate's `prepare`, which shards the model on meta and sends the weights of process 0. It takes
    buffers that are saved for shards, asks the model for what transformers' have, and leaves ties to `tie_weights`."""
    refuse_other_models(model)
    send_buffers(model, device)
    tied: dict[int, list[str]] = {}
    for name, parameter in parameters_of(model, remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    ties = [names for names in tied.values() if len(names) > 1]
    saved = {module: {*module._buffers} - module._non_persistent_buffers_set for module in model.modules()}

    def tie_weights(*args: object, **kwargs: object) -> None:
        for first, *others in ties:
            for name in others:
                at, _, last = name.rpartition(".")
                model.get_submodule(at)._parameters[last] = operator.attrgetter(first)(model)

    for module, names in saved.items():
        module._non_persistent_buffers_set |= names
    own = {
        "tie_weights": tie_weights,
        "get_parameter_or_buffer": lambda name: operator.attrgetter(name)(model),
        "load_state_dict": functools.partial(model.load_state_dict, strict=False),  # BatchNorm adds keys of buffers
    }
    before = {name: vars(model)[name] for name in own if name in vars(model)}
    vars(model).update(own)
    plugin.cpu_ram_efficient_loading = True
    try:
        yield
    finally:
        plugin.cpu_ram_efficient_loading = False
        for name in own:
            del vars(model)[name]
        vars(model).update(before)
        for module, names in saved.items():
            module._non_persistent_buffers_set -= names
    model._apply(lambda tensor: tensor)  # FSDP2 looks for its parameters anew


@torch.no_grad()
def partition(model: nn.Module, dtype: torch.dtype, settings: dict[str, Any], device: torch.device) -> None:
    """Partitions a model by DeepSpeed's zero.Init, which sends process 0's weights, one parameter at a time. settings:
    the section zero_optimization of DeepSpeed's config."""
    from deepspeed.runtime.zero.partition_parameters import Init

    if others := {"zero_hpz_partition_size", "mics_shard_size"} & {*settings}:
        raise Refused(f"{', '.join(others)} of deepspeed_config_file makes other parts: set zero3_init_flag to false")
    refuse_other_models(model)
    send_buffers(model, device)
    said = {key: value for key, value in settings.items() if value != "auto"}
    init = Init(config_dict_or_path={"train_micro_batch_size_per_gpu": 1, "zero_optimization": said}, dtype=dtype)
    if init.mem_efficient_linear:  # as when the engine partitions: it adds the bias to a rounded product
        init._enable_mem_efficient_linear()
    for parameter in model.parameters():
        if parameter.is_meta:
            empty = torch.empty(parameter.shape, dtype=dtype, device=device)
            torch.utils.swap_tensors(parameter, nn.Parameter(empty, parameter.requires_grad))
        parameter.data = parameter.data.to(dtype)
        init._convert_to_zero_parameters([parameter])
    for module in model.modules():
        module._buffers |= {name: b.to(device) for name, b in module._buffers.items() if b is not None}


def explain(error: str, key: str) -> NoValues | None:
    """A NoValues for an error that comes of weights without values, or None. key: the config's, that asks for them."""
    if not re.search(r"\bmeta\b", error, re.IGNORECASE):
        return None
    return NoValues(
        f"with {key} only process 0 has the weights of a model before prepare(), and the script uses them on the "
        f"others ({error}): use them after prepare(), or set the key to false"
    )
