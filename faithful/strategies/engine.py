"""What DeepSpeed's ZeRO engine holds. Only this file uses its private state; tests check it.

Each process keeps its partition of the fp32 master weights and the optimizer state in flat tensors, one per parameter
group (stage 3: per sub-group). Each parameter has a fragment in them, which may be empty. In all functions `zero` is
DeepSpeed's ZeRO optimizer (`zero_of`).
"""

import math

import torch
import torch.distributed as dist

from faithful import places


def zero_of(optimizer):
    """DeepSpeed's ZeRO optimizer inside Accelerate's, or None."""
    zero = getattr(optimizer, "optimizer", optimizer)
    return zero if type(zero).__name__.startswith("DeepSpeedZeroOptimizer") else None


def count_gradients(zero, model):
    """Counts the elements of the gradients by dtype, in `zero.seen_gradients`, until `zero.forget()` is called. In
    hooks, because the engine frees `.grad` at once."""
    zero.seen_gradients = {}

    def count(gradient):
        dtype = str(gradient.dtype)[6:]
        zero.seen_gradients[dtype] = zero.seen_gradients.get(dtype, 0) + gradient.numel()

    hooks = [parameter.register_hook(count) for parameter in model.parameters() if parameter.requires_grad]

    def forget():
        while hooks:
            hooks.pop().remove()

    zero.forget = forget


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
    """The stage. Stage 3 has an optimizer class of its own, stages 1 and 2 share one that has a flag."""
    if hasattr(zero, "fp16_partitioned_groups_flat"):
        return 3
    return 2 if zero.partition_gradients else 1


def gradient_norm(zero):
    """L2 norm of the unscaled gradients over all processes, as a tensor; infinite if any gradient is not finite."""
    from deepspeed.runtime.utils import combine_grad_norm_groups

    # The engine's own step computes its norm with the same call, so the clipping and the check see one number.
    norm = combine_grad_norm_groups(zero._get_norm_groups()) if stage(zero) == 3 else zero.scaled_global_norm()
    norm = torch.as_tensor(norm, dtype=torch.float32)
    return torch.where(norm < 0, math.inf, norm / float(zero.loss_scale))  # the engine returns -1 for inf and nan


def masters(zero):
    """This process's flat fp32 master weights, which torch's optimizer updates."""
    return zero.fp32_partitioned_groups_flat if stage(zero) == 3 else zero.single_partition_of_fp32_groups


def groups(zero):
    """The optimizer's parameter groups, [[16-bit parameter]]."""
    return zero.fp16_groups if stage(zero) == 3 else zero.bit16_groups


def shape(parameter):
    """The shape of the full parameter, also while stage 3 has released it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def fragment(zero, parameter, flats):
    """This process's fragment of a parameter in `flats`, laid out like `masters`: a 1-D view, which may be empty.

    The fragments of all processes, concatenated by rank, are the flattened parameter.
    """
    # Stage 3 splits every parameter over all processes. Stages 1 and 2 split the flattened group, so a parameter may be
    # on one process, on several, or not on this one.
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


def restore_engine(zero, parameters, parts):
    from deepspeed.runtime.zero import GatheredParameters

    keys = {places.parsed(place)[2] for place in parts if places.kind(place) == places.OPTIMIZER}
    fused = zero.optimizer.defaults.get("fused")  # its kernel needs the step counters on the device
    for i, flat in enumerate(masters(zero)):
        for key in keys:
            counter = parts.get(places.counter(i, key))
            if counter is not None:
                zero.optimizer.state[flat][key] = counter.to(flat.device if fused else "cpu", copy=True)
            elif getattr(zero.optimizer.state[flat].get(key), "shape", None) != flat.shape:  # filled below
                zero.optimizer.state[flat][key] = torch.zeros_like(flat)
    for name, parameter in parameters:
        if not parameter.requires_grad:
            with GatheredParameters([parameter], modifier_rank=0):  # gathers only in stage 3
                if dist.get_rank() == 0:
                    parameter.copy_(parts[places.weight(name)].view_as(parameter))
                dist.broadcast(parameter.data, 0)
            continue
        fragment(zero, parameter, masters(zero)).copy_(parts[places.weight(name)])
        for key, flats in states(zero).items():
            if flats[0].dim():
                fragment(zero, parameter, flats).copy_(parts[places.state(name, key)])
    # The engine makes 16-bit weights from the masters only in a step. What follows is the end of such a step, in which
    # each process rounds its own masters and gets the weights of the others.
    if stage(zero) < 3:
        zero.update_lp_params()
        for group in range(len(zero.bit16_groups)):
            zero._update_model_bit16_weights(group)
        return
    # Small parameters stay gathered. They are released first and gathered last, because `all_gather` skips those that
    # are gathered: they would keep their old values.
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
