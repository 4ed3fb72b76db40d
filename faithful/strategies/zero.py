"""ZeRO by DeepSpeed: what is needed in addition to its engine and to Accelerate.

Each process keeps its partition of the fp32 master weights and the optimizer state in flat tensors, one per parameter
group (stage 3: per sub-group). Each parameter has a fragment in them, which may be empty. `fragment` returns it;
evidence, checkpoints and `full_state` use it. Only this file uses the engine's private state; tests check it.

stage  partitioned                              parameters
1      master weights, optimizer state          16 bit (fp32 under fp32), whole
2      also gradients                           as in stage 1
3      also parameters, gathered when used      as in stage 1; those up to PERSISTENT elements stay gathered
"""

import logging
import math
import sys
from types import MethodType

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from faithful import batch_norm, deepspeed_file, dummies, patches
from faithful.errors import Refused
from faithful.strategies import plain
from faithful.tensors import parameters_of, unwrapped

BUCKET = 50_000_000  # gradient elements per reduction. The default is ten times that and takes gigabytes
PERSISTENT = 10_000  # elements; biases and norms are not worth a collective each. The default is 100,000.


REHEARSED_AS = "NO"  # Accelerate changes it to DEEPSPEED


def types(plan):
    return ("DEEPSPEED",)


def before_rehearsal():
    """Turns off DeepSpeed's compiled all-reduce for processes of one host: it needs a compiler and a minute."""
    quiet()
    import deepspeed  # noqa: F401  patches needs it imported

    patches.replace("deepspeed.ops:__compatible_ops__", {})


def arguments(plan, scaling):
    """Accelerate's DeepSpeedPlugin from the launcher's environment, with settings that the YAML lacks. It leaves no
    `auto` value that Accelerate could fill only from a model's `config.hidden_size`."""
    from accelerate.utils import DeepSpeedPlugin, GradScalerKwargs

    quiet()
    leave_precision_to_the_config()
    made = DeepSpeedPlugin(gradient_clipping=plan.clip or 0.0)  # `clip_grad_norm_` sets it
    # With this reference transformers builds its models partitioned and in 16 bit under stage 3, whatever
    # zero3_init_flag says: with other initial weights than the other strategies, and another dtype when offloaded.
    made.set_deepspeed_weakref = lambda: None
    config = made.deepspeed_config
    told = deepspeed_file.explicit(
        config["zero_optimization"]
    )  # a file's settings; without one, the stage and offloading
    config.setdefault("communication_data_type", "fp32")  # of gradient reductions, as in the other strategies
    if plan.strategy != "zero1":  # partitioned, fp32 costs 2/N bytes more; stage 1 would keep all in fp32
        config.setdefault("data_types", {"grad_accum_dtype": "fp32"})
    config["zero_force_ds_cpu_optimizer"] = False  # else offloading turns every optimizer into Adam, even SGD
    config["zero_optimization"] = {
        "reduce_bucket_size": BUCKET,
        "stage3_param_persistence_threshold": PERSISTENT,
    } | told
    for what in ("offload_optimizer", "offload_param"):
        if told.get(what) and plan.rehearsal:
            told[what].pop("pin_memory", None)  # it needs an accelerator
        elif told.get(what):
            told[what].setdefault("pin_memory", True)  # DeepSpeed's default is slow, and Accelerate's YAML has no key
    if plan.precision == "fp16" and (scaling or "fp16" not in config):
        scaling = scaling or GradScalerKwargs()
        power = math.log2(scaling.init_scale)
        if power % 1 or scaling.growth_factor != 2 or scaling.backoff_factor != 0.5:
            raise Refused("the gradient scaler under ZeRO: DeepSpeed's scale is a power of 2, and it doubles and "
                          "halves it; leave growth_factor and backoff_factor out")  # fmt: skip
        config["fp16"] = {"enabled": True, "initial_scale_power": int(power), "hysteresis": 1}
        config["fp16"]["loss_scale_window"] = scaling.growth_interval
    return {"deepspeed_plugin": made}


def leave_precision_to_the_config():
    """Stops transformers' Trainer from comparing bf16 and fp16 of TrainingArguments with DeepSpeed's config: both are
    False if a script leaves the precision to the config. If set, `Accelerator(mixed_precision=...)` gets them."""
    trainers = sys.modules.get("transformers.integrations.deepspeed")
    if trainers is None:
        return
    compares = trainers.HfTrainerDeepSpeedConfig.fill_match

    def fill_match(self, key, *args, **kwargs):
        if key not in ("bf16.enabled", "fp16.enabled"):
            compares(self, key, *args, **kwargs)

    patches.replace("transformers.integrations.deepspeed:HfTrainerDeepSpeedConfig.fill_match", fill_match)


def real(accelerator, args):
    return dummies.real(accelerator.state.deepspeed_plugin.deepspeed_config, accelerator, args)


def prepare(accelerator, accelerates, args, device_placement):
    """Accelerate's own `prepare`. It asks for a batch size, which DeepSpeed uses for its messages alone: 1 if the
    script prepares the model without a loader."""
    plugin, key = accelerator.state.deepspeed_plugin, "train_micro_batch_size_per_gpu"
    config = plugin.deepspeed_config
    batches = {one.batch_size for one in args if isinstance(one, torch.utils.data.DataLoader)}
    ours = getattr(plugin, "batch_size_is_ours", False)
    if isinstance(config.get(key), int) and not ours and batches and config[key] not in batches:
        raise Refused(f"deepspeed_config_file says {key} {config[key]}, the script's loaders have batches of "
                      f"{', '.join(map(str, batches))}: set it to auto")  # fmt: skip
    models = [one for one in args if isinstance(one, torch.nn.Module)]
    fresh = [one for one in models if not getattr(one, "_is_accelerate_prepared", False)]
    if len(fresh) + (accelerator.deepspeed_engine_wrapped is not None and bool(fresh)) > 1:
        raise Refused(f"{accelerator.plan.strategy} trains one model, the script prepares several: use a ddp or fsdp "
                      "config, or for a model that it does not train accelerator.prepare_model(model, "
                      "evaluation_mode=True)")  # fmt: skip
    if models and config.get(key) == "auto" and not any(hasattr(one, "batch_size") for one in args):
        config[key], plugin.batch_size_is_ours = 1, True
    return plain.prepare(accelerator, accelerates, args, device_placement)


def quiet():
    """Silences DeepSpeed's messages, except errors."""
    patches.silence("DeepSpeed", logging.ERROR)


def of(optimizer):
    """DeepSpeed's ZeRO optimizer inside Accelerate's, or None."""
    found = getattr(optimizer, "optimizer", optimizer)
    return found if type(found).__name__.startswith("DeepSpeedZeroOptimizer") else None


def cast_inputs(model, dtype):
    """Casts inputs to `dtype`, because the engine keeps parameters in 16 bit and has no autocast."""

    def cast(module, args, kwargs):
        def one(value):
            return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value

        return tuple(map(one, args)), {key: one(value) for key, value in kwargs.items()}

    model.register_forward_pre_hook(cast, with_kwargs=True)


def before_prepare(accelerator, plan, model, optimizer):
    plain.one_call(plan, optimizer)
    # DeepSpeed makes its master weights from the trainable ones. Frozen ones may be in 16 bit, if all are to be.
    needed = [p for p in model.parameters() if p.requires_grad or plan.precision == "fp32"]
    if others := {str(p.dtype)[6:] for p in needed} - {"float32"}:
        raise Refused(f"parameters of the model are in {', '.join(others)}, but {plan.strategy} {plan.precision} needs "
                      "them in fp32: build it in fp32")  # fmt: skip
    if plan.precision != "fp32":
        batch_norm.in_fp32(model)
        cast_inputs(model, {"fp16": torch.float16}.get(plan.precision, torch.bfloat16))


def after_prepare(accelerator, plan, model, optimizer):
    """Moves the optimizer step from `accelerator.backward`, where Accelerate has it, to `optimizer.step`.

    This way the gradient norm is checked before the update.
    """
    engine, zero = model, of(optimizer)

    def backward(loss, sync_gradients=True, **kwargs):
        engine.set_gradient_accumulation_boundary(sync_gradients)
        engine.backward(loss, **kwargs)

    def step(self, *_, **__):
        if accelerator.sync_gradients:
            accelerator.before_update(optimizer)
            engine.step()
            accelerator.after_update(optimizer)

    accelerator.deepspeed_engine_wrapped.backward = backward
    if stage(zero) > 1:  # Accelerate calls it in stage 1 only
        engine.no_sync = refuse_no_sync
    optimizer.step = MethodType(step, optimizer)  # a scheduler that is created later needs a method
    if zero.dtype == torch.float16:
        accelerator.scaler = Scaler(zero)
    zero.seen_gradients = {}
    hooks = []

    def see(gradient):  # in a hook, because the engine frees `.grad` at once
        dtype = str(gradient.dtype)[6:]
        zero.seen_gradients[dtype] = zero.seen_gradients.get(dtype, 0) + gradient.numel()

    def forget():
        while hooks:
            hooks.pop().remove()

    hooks += [parameter.register_hook(see) for parameter in model.parameters() if parameter.requires_grad]
    zero.forget = forget


def free(accelerator):
    accelerator.scaler = None


def refuse_no_sync():
    raise Refused("the script calls model.no_sync, which DeepSpeed has under ZeRO-1 only: call "
                  "accelerator.accumulate(model), or use a ddp or fsdp config")  # fmt: skip


def clip_grad_norm_(parameters, max_norm, optimizer):
    """Makes the engine clip in its step. Returns the gradient norm over all processes."""
    zero, said = of(optimizer), AcceleratorState().deepspeed_plugin.gradient_clipping
    if said not in (0.0, max_norm) and not math.isinf(max_norm):
        raise Refused(f"the script clips gradients at {max_norm}, gradient_clipping in the config at {said}: say it in "
                      "one place")  # fmt: skip
    zero.clip_grad = said if math.isinf(max_norm) else max_norm
    return gradient_norm(zero)


class Scaler:
    """The engine's dynamic loss scale with the interface of torch's GradScaler."""

    def __init__(self, zero):
        self.zero = zero

    def get_scale(self):
        return float(self.zero.loss_scale)

    def state_dict(self):
        values = vars(self.zero.loss_scaler)
        return {key: value for key, value in values.items() if isinstance(value, bool | int | float)}

    def load_state_dict(self, state):
        vars(self.zero.loss_scaler).update(state)


def stage(zero):
    return 3 if hasattr(zero, "fp16_partitioned_groups_flat") else 2 if zero.partition_gradients else 1


def gradient_norm(zero):
    """L2 norm of the unscaled gradients over all processes, as a tensor; infinite if any gradient is not finite."""
    from deepspeed.runtime.utils import combine_grad_norm_groups

    norm = combine_grad_norm_groups(zero._get_norm_groups()) if stage(zero) == 3 else zero.scaled_global_norm()
    norm = torch.as_tensor(norm, dtype=torch.float32)
    return torch.where(norm < 0, math.inf, norm / float(zero.loss_scale))  # the engine returns -1 for inf and nan


def masters(zero):
    """This process's flat fp32 master weights, which torch's optimizer updates."""
    return zero.fp32_partitioned_groups_flat if stage(zero) == 3 else zero.single_partition_of_fp32_groups


def inner(optimizer):
    """The torch optimizer inside DeepSpeed's optimizer inside Accelerate's."""
    return of(optimizer).optimizer


def sharded(parameters, plan):
    return plan.num_processes > 1


def owned(optimizer):
    zero = of(optimizer)
    groups = zero.fp16_groups if stage(zero) == 3 else zero.bit16_groups
    return {id(parameter) for group in groups for parameter in group}


def shape(parameter):
    """The shape of the full parameter, also while stage 3 has released it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def fragment(zero, parameter, flats):
    """This process's fragment of a parameter in `flats`, laid out like `masters`: a 1-D view, which may be empty.

    The fragments of all processes, concatenated by rank, are the flattened parameter.
    """
    if stage(zero) == 3:
        group, start, length = zero.grad_position[zero.get_param_id(parameter)]
        before = dist.get_rank() * length  # the last partitions are padded
        return flats[group].narrow(0, start, max(0, min(length, parameter.ds_numel - before)))
    mapping = parameter._hp_mapping
    if mapping is None:
        return flats[0].narrow(0, 0, 0)
    address = mapping.hp_fragment_address
    return flats[mapping.param_group_index].narrow(0, address.start, address.numel)


def states(zero):
    """{key: [tensor per flat master]} of torch's optimizer state, with its step counters, which have no fragments."""
    each = [zero.optimizer.state.get(flat, {}) for flat in masters(zero)]
    keys = dict.fromkeys(key for state in each for key, value in state.items() if torch.is_tensor(value))
    return {key: [state[key] for state in each] for key in keys}


def gradients(parameters, optimizer):
    """The gradient tensors that this process holds between the backward pass and the optimizer step."""
    zero = of(optimizer)
    zero.forget()
    lists = [tensors for tensors in zero.averaged_gradients.values() if tensors]
    kept = [tensor for tensors in lists for tensor in tensors if tensor is not None]
    groups = zero.fp16_groups if stage(zero) == 3 else zero.bit16_groups
    kept += [p.grad for group in groups for p in group if p.grad is not None]
    kept += [flat.grad for flat in masters(zero) if flat.grad is not None]
    return kept


def gradient_elements(parameters, optimizer):
    """{dtype: elements} of the gradients of the backward pass, before the engine partitions and frees them."""
    return dict(of(optimizer).seen_gradients)


def held(parameters, optimizer):
    """As `plain.held`, without padding. gathered: parameters that stage 3 keeps whole in addition."""
    zero, parameters = of(optimizer), parameters.values()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    flats = {key: values for key, values in states(zero).items() if values[0].dim()}
    if stage(zero) == 3:
        weights = [p.ds_tensor.narrow(0, 0, fragment(zero, p, masters(zero)).numel()) for p in trained]
    else:
        weights = list(parameters)
    return {
        "weight": weights,
        "gathered": [p for p in parameters if p.numel()] if stage(zero) == 3 else [],
        "master": [fragment(zero, p, masters(zero)) for p in trained],
        "optimizer": {key: [fragment(zero, p, values) for p in trained] for key, values in flats.items()},
    }


def parted(optimizer):
    return ("master", "optimizer", "gradient") + (("weight",) if stage(of(optimizer)) == 3 else ())


def tensors(model, optimizer):
    """{name: this process's fragment} for a checkpoint: fp32 masters, optimizer state, full shapes, buffers. A model
    without an optimizer is not DeepSpeed's, and whole."""
    if optimizer is None:
        return plain.tensors(model, None)
    zero, parts = of(optimizer), plain.buffers(model)
    for name, parameter in parameters_of(model):
        parts[f"shape/{name}"] = torch.tensor(shape(parameter), dtype=torch.int64)
        if not parameter.requires_grad:
            parts[f"model/{name}"] = gathered(parameter).flatten()[slice(None) if dist.get_rank() == 0 else slice(0)]
            continue
        parts[f"model/{name}"] = fragment(zero, parameter, masters(zero))
        for key, flats in states(zero).items():
            if flats[0].dim():
                parts[f"optimizer/{name}/{key}"] = fragment(zero, parameter, flats)
    for key, values in states(zero).items():
        parts |= {f"optimizer/group{i}/{key}": value for i, value in enumerate(values) if not value.dim()}
    return {name: tensor.detach().cpu().clone() for name, tensor in parts.items()}


@torch.no_grad()
def restore(model, optimizer, parts):
    """Loads the result of `tensors`, bit for bit, and computes the 16-bit weights from the masters."""
    if optimizer is None:
        return plain.restore(model, None, parts)
    zero, parameters = of(optimizer), list(parameters_of(model))
    own = {name: part for name, part in tensors(model, optimizer).items() if not name.startswith("optimizer/")}
    plain.same_model(own, parts)
    restore_engine(zero, parameters, parts)
    for name, buffer in plain.buffers(model).items():
        buffer.copy_(parts[name])


def restore_engine(zero, parameters, parts):
    from deepspeed.runtime.zero import GatheredParameters

    keys = {key.rsplit("/", 1)[1] for key in parts if key.startswith("optimizer/")}
    fused = zero.optimizer.defaults.get("fused")  # its kernel needs the step counters on the device
    for i, flat in enumerate(masters(zero)):
        for key in keys:
            counter = parts.get(f"optimizer/group{i}/{key}")
            if counter is not None and fused:
                counter = counter.to(flat.device)
            zero.optimizer.state[flat][key] = torch.zeros_like(flat) if counter is None else counter
    for name, parameter in parameters:
        if not parameter.requires_grad:
            with GatheredParameters([parameter], modifier_rank=0):  # gathers only in stage 3
                if dist.get_rank() == 0:
                    parameter.copy_(parts[f"model/{name}"].view_as(parameter))
                dist.broadcast(parameter.data, 0)
            continue
        fragment(zero, parameter, masters(zero)).copy_(parts[f"model/{name}"])
        for key, flats in states(zero).items():
            if flats[0].dim():
                fragment(zero, parameter, flats).copy_(parts[f"optimizer/{name}/{key}"])
    if stage(zero) < 3:
        zero.update_lp_params()
        for group in range(len(zero.bit16_groups)):
            zero._update_model_bit16_weights(group)
        return
    if zero.persistent_parameters:
        zero.persistent_parameters[0].partition(zero.persistent_parameters)
    for group in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(group)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def gathered(parameter):
    """The full 16-bit parameter. Under stage 3 every process must call it."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach()
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        return parameter.detach().clone()


def full_state(accelerator, model):
    """{name: full fp32 tensor} of parameters and buffers, on the CPU of process 0; empty on the others."""
    from deepspeed.utils import safe_get_full_fp32_param

    main, state = dist.get_rank() == 0, {}
    if unwrapped(model) is model:  # not DeepSpeed's
        return {name: tensor.cpu() for name, tensor in model.state_dict().items() if main}
    for name, parameter in model.module.named_parameters():  # one at a time, to save memory
        whole = safe_get_full_fp32_param(parameter) if parameter.requires_grad else gathered(parameter)
        state |= {name: whole.cpu()} if main else {}
    buffers = model.module.state_dict().keys() - {name for name, _ in model.module.named_parameters()}
    return state | {name: tensor for name, tensor in model.module.named_buffers() if main and name in buffers}
