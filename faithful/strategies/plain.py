"""One device, or DDP: every process holds the whole model. Other strategies override functions of this file."""

import torch
from torch.distributed.tensor import DTensor

from faithful.errors import Refused
from faithful.tensors import elements, local, named, parameters_of, unwrapped

REHEARSED_AS = "MULTI_CPU"  # the DistributedType set at the start on a machine without an accelerator


def types(plan):
    """Names of the DistributedTypes that Accelerate may use for this strategy."""
    return ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU") if plan.strategy == "ddp" else ("NO",)


def arguments(plan, scaling):
    """Arguments that the plan adds to `Accelerator(...)`. scaling: the script's GradScalerKwargs, or None."""
    return {}


def before_prepare(accelerator, plan, model, optimizer):
    """Called before `accelerator.prepare`, to change the model. optimizer: the model's, or None if it comes later."""


def real(accelerator, args):
    """The arguments of `accelerator.prepare`, with real objects in place of those that only a config describes."""
    return args


def prepare(accelerator, accelerates, args, device_placement):
    """Calls Accelerate's `prepare`, here once for all `args`. Returns a tuple as long as `args`."""
    prepared = accelerates(*args, device_placement=device_placement)
    return prepared if len(args) > 1 else (prepared,)


def after_prepare(accelerator, plan, model, optimizer):
    """Called with the prepared model and optimizer, to change them."""


def free(accelerator):
    """Called by `accelerator.free_memory`, to let go of what this strategy holds of the models."""


def inner(optimizer):
    """The torch optimizer inside Accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def owned(optimizer):
    """The ids of the parameters that the optimizer updates, on any process."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def sharded(parameters, plan):
    """Whether a process holds only shards of `parameters`."""
    return any(isinstance(p, DTensor) and local(p).numel() < p.numel() for p in parameters)


def units(model):
    """How many units of parameters are gathered one by one, or None if none are."""
    return None


def parted(optimizer):
    """What is sharded, if `sharded` is true: keys of bytes_per_parameter."""
    return ("weight", "gradient", "gathered", "master", "optimizer")


def counted(parameters, accelerator):
    """The {name: parameter} that this process counts. Parameters that several hold whole are counted by one of them."""
    return parameters


def gradients(parameters, optimizer):
    """The gradients that this process holds before the first update. The backend counts those of amp8's layers."""
    plain = [parameter for parameter in parameters.values() if not hasattr(parameter, "amp8_linear")]
    return [local(parameter.grad) for parameter in plain if parameter.grad is not None]


def gradient_elements(parameters, optimizer):
    """{dtype: elements} of the gradients."""
    return elements(gradients(parameters, optimizer))


def held(parameters, optimizer):
    """What this process holds after the first update: {"weight": [tensors], "master": [tensors], "gathered": [tensors],
    "optimizer": {key: [tensors]}}. master: high-precision copies; gathered: full weights in addition to shards."""
    states = {}
    for parameter in parameters.values():
        for key, value in inner(optimizer).state.get(parameter, {}).items():
            if torch.is_tensor(value) and value.dim():  # without the step counters
                states.setdefault(key, []).append(local(value))
    weights = [local(parameter) for parameter in parameters.values()]
    return {"weight": weights, "master": [], "gathered": [], "optimizer": states}


def stored(model):
    """{"model/<name>" or "buffer/<name>": live tensor} of all parameters and persistent buffers."""
    return {f"model/{name}": parameter for name, parameter in parameters_of(model)} | buffers(model)


def buffers(model):
    model = unwrapped(model)
    derived = {f"{at}.{name}".lstrip(".") for at, m in model.named_modules() for name in m._non_persistent_buffers_set}
    kept = [(name, buffer) for name, buffer in model.named_buffers() if name not in derived]
    return {f"buffer/{name}": buffer for name, buffer in named(kept)}


def tensors(model, optimizer):
    """{"model/<name>", "buffer/<name>" and "optimizer/<name>/<state>": this rank's shard}, on the CPU. optimizer: or
    None."""
    parts, states = stored(model), inner(optimizer).state if optimizer else {}
    for name, parameter in parameters_of(model):
        tensors = {key: value for key, value in states.get(parameter, {}).items() if torch.is_tensor(value)}
        parts |= {f"optimizer/{name}/{key}": value for key, value in tensors.items()}
    return {name: local(tensor.detach()).cpu().contiguous() for name, tensor in parts.items()}


def restore(model, optimizer, parts):
    """Loads the result of `tensors`, bit for bit. Raises Refused if names or shapes differ from the model's."""
    own = stored(model)
    same_model({name: local(tensor) for name, tensor in own.items()}, parts)
    with torch.no_grad():
        for name, tensor in own.items():
            local(tensor).copy_(parts[name])
    if optimizer is None:
        return
    optimizer = inner(optimizer)
    index = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state = {}
    for name, parameter in parameters_of(model):
        if id(parameter) not in index:
            continue
        prefix = f"optimizer/{name}/"
        values = {key.removeprefix(prefix): value for key, value in parts.items() if key.startswith(prefix)}
        if isinstance(parameter, DTensor):
            mesh = {"device_mesh": parameter.device_mesh, "placements": parameter.placements}
            mesh |= {"shape": parameter.shape, "stride": parameter.stride()}
            values = {
                key: DTensor.from_local(v.to(local(parameter).device), **mesh) if v.dim() else v
                for key, v in values.items()
            }
        if values:
            state[index[id(parameter)]] = values
    there = optimizer.state_dict()  # keeps the state of other models that it updates
    optimizer.load_state_dict({"state": there["state"] | state, "param_groups": there["param_groups"]})


def one_call(plan, optimizer):
    """Raises Refused if the optimizer is missing: this strategy needs both in one call of `prepare`."""
    if optimizer is None:
        raise Refused(f"{plan.strategy} {plan.precision} needs a model and its optimizer in one call: "
                      "accelerator.prepare(model, optimizer, ...)")  # fmt: skip


def same_model(own, parts):
    """Raises Refused unless the checkpoint's tensors have the names and shapes of this model's tensors."""
    found = {name for name in parts if not name.startswith("optimizer/")}
    wrong = sorted(own.keys() ^ found) or [name for name in own if own[name].shape != parts[name].shape]
    if wrong:
        raise Refused(
            f"the checkpoint is of another model: {', '.join(wrong[:3])}, ... differ. Build the model as it was"
        )


def full_state(accelerator, model):
    """{name: full tensor} on process 0, or None if Accelerate's own `get_state_dict` is right."""
    return None
