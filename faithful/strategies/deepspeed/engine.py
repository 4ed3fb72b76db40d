"""What DeepSpeed's ZeRO engine holds. Only this file uses its private state; tests check it.

Each process keeps its partition of the fp32 master weights and the optimizer state in flat tensors, one per parameter
group (stage 3: per sub-group). Each parameter has a fragment in them, which may be empty. In all functions `zero` is
DeepSpeed's ZeRO optimizer (`zero_of`).
"""

import collections
import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from faithful.checkpoint import tensor_keys
from faithful.strategies.base import filled, refuse_other_shape

Zero = Any  # DeepSpeed's ZeRO optimizer
Partitioned = Any  # an nn.Parameter with what DeepSpeed adds to it: ds_tensor, _hp_mapping
PIECE = 1 << 25  # elements that `take_weights` compares at once, to save memory


def zero_of(optimizer: torch.optim.Optimizer) -> Zero:
    """DeepSpeed's ZeRO optimizer inside Accelerate's, or None."""
    zero = getattr(optimizer, "optimizer", optimizer)
    return zero if type(zero).__name__.startswith("DeepSpeedZeroOptimizer") else None


class Scaler:
    """The engine's dynamic loss scale with the interface of torch's GradScaler."""

    def __init__(self, zero: Zero) -> None:
        self.zero = zero

    def get_scale(self) -> float:
        return float(self.zero.loss_scale)

    def state_dict(self) -> dict[str, float]:
        values = vars(self.zero.loss_scaler)
        return {key: value for key, value in values.items() if isinstance(value, bool | int | float)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        vars(self.zero.loss_scaler).update(state)


def stage(zero: Zero) -> int:
    """The stage. Stage 3 has an optimizer class of its own, stages 1 and 2 share one that has a flag."""
    if hasattr(zero, "fp16_partitioned_groups_flat"):
        return 3
    return 2 if zero.partition_gradients else 1


def gradient_norm(zero: Zero) -> torch.Tensor:
    """L2 norm of the unscaled gradients over all processes, as a tensor; infinite if any gradient is not finite."""
    from deepspeed.runtime.utils import combine_grad_norm_groups

    if not zero.held.begun:  # the script has given them up
        return masters(zero)[0].new_zeros(())
    # The engine's own step computes its norm with the same call, so the clipping and the check see one number.
    norm = combine_grad_norm_groups(zero._get_norm_groups()) if stage(zero) == 3 else zero.scaled_global_norm()
    norm = torch.as_tensor(norm, dtype=torch.float32)
    return torch.where(norm < 0, math.inf, norm / float(zero.loss_scale))  # the engine returns -1 for inf and nan


def masters(zero: Zero) -> list[torch.Tensor]:
    """This process's flat fp32 master weights, which torch's optimizer updates."""
    return zero.fp32_partitioned_groups_flat if stage(zero) == 3 else zero.single_partition_of_fp32_groups


def groups(zero: Zero) -> list[list[Partitioned]]:
    """The optimizer's parameter groups, [[16-bit parameter]]."""
    return zero.fp16_groups if stage(zero) == 3 else zero.bit16_groups


def shape(parameter: Partitioned) -> torch.Size:
    """The shape of the full parameter, also while stage 3 has released it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def position(zero: Zero, parameter: Partitioned) -> tuple[int, int, int]:
    """(the number of the flat master, where this process's fragment of a parameter begins in it, its elements or 0)"""
    # Stage 3 splits every parameter over all processes. Stages 1 and 2 split the flattened group, so a parameter may be
    # on one process, on several, or not on this one.
    if stage(zero) == 3:
        group, start, length = zero.grad_position[zero.get_param_id(parameter)]
        before = dist.get_rank() * length  # the last partitions are padded
        return group, start, max(0, min(length, parameter.ds_numel - before))
    mapping = parameter._hp_mapping
    if mapping is None:
        return 0, 0, 0
    return mapping.param_group_index, mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel


def fragment(zero: Zero, parameter: Partitioned, flats: list[torch.Tensor]) -> torch.Tensor:
    """This process's fragment of a parameter in `flats`, laid out like `masters`: a 1-D view, which may be empty.

    The fragments of all processes, concatenated by rank, are the flattened parameter.
    """
    flat, start, length = position(zero, parameter)
    return flats[flat].narrow(0, start, length)


def cut(zero: Zero, parameter: Partitioned, whole: torch.Tensor) -> torch.Tensor:
    """This process's fragment of `whole`, which has the parameter's shape: a 1-D view of a contiguous tensor."""
    length = position(zero, parameter)[2]
    if stage(zero) == 3:
        begin = dist.get_rank() * zero.grad_position[zero.get_param_id(parameter)][2]
    else:
        begin = parameter._hp_mapping.lp_fragment_address.start if length else 0
    return whole.reshape(-1).narrow(0, begin if length else 0, length)


@torch.no_grad()
def take_exact(zero: Zero, weights: dict[int, torch.Tensor], device: torch.device | None) -> None:
    """Gives the masters the bits that they lack since DeepSpeed made them from weights that it had rounded. weights:
    {id of a parameter: its value before}, which in another process than the first may be another one. device: where
    process 0 sends them, if it alone has them."""
    for parameter in (p for group in groups(zero) for p in group if id(p) in weights):
        exact, part = weights[id(parameter)], fragment(zero, parameter, masters(zero))
        if device:
            exact = torch.empty(exact.shape, device=device) if dist.get_rank() else exact.to(device).contiguous()
            dist.broadcast(exact, 0)
        exact = cut(zero, parameter, exact).to(part.device)
        part.copy_(torch.where(exact.to(parameter.dtype) == part, exact, part))


# ---- what the script writes ----


@torch.no_grad()
def take_weights(zero: Zero) -> None:
    """Makes this process's masters what the script sees: where the model's weight is not its master, rounded, the
    script has written it. Three kernels over 1/N of the weights, for each PIECE of them; nothing waits."""
    for live, master in zip(live_parts(zero), masters(zero), strict=True):
        if live is None:
            continue
        for seen, kept in zip(live.split(PIECE), master.detach().split(PIECE), strict=True):
            seen = seen.to(kept.device)
            kept.copy_(seen if seen.dtype == kept.dtype else torch.where(seen == kept.to(seen.dtype), kept, seen))


def live_parts(zero: Zero) -> list[torch.Tensor | None]:
    """This process's flat parts of the model's weights, laid out like `masters`; None where they are on a disk."""
    if stage(zero) == 3:
        return zero.fp16_partitioned_groups_flat
    ranks = [dist.get_rank(group) for group in zero.real_dp_process_group]
    return [parts[rank] for parts, rank in zip(zero.parallel_partitioned_bit16_groups, ranks, strict=True)]


@torch.no_grad()
def write_shards(parameters: list[Partitioned]) -> None:
    """Writes whole parameters of stage 3 into this process's shards of them."""
    shards, parts = [], []
    for parameter in parameters:
        length = parameter.ds_tensor.numel()  # 0 on a disk
        begin = min(dist.get_rank(parameter.ds_process_group) * length, parameter.ds_numel)
        parts.append(parameter.data.reshape(-1).narrow(0, begin, min(length, parameter.ds_numel - begin)))
        shards.append(parameter.ds_tensor.narrow(0, 0, len(parts[-1])))
    if shards:
        torch._foreach_copy_(shards, parts)


def gradient_part(zero: Zero, parameter: Partitioned) -> torch.Tensor:
    """This process's fragment of the averaged gradient, a view of what the engine's step uses. It is not empty."""
    if offloads_gradients(zero):
        return fragment(zero, parameter, [flat.grad for flat in masters(zero)])  # pyrefly: ignore[bad-argument-type]
    if stage(zero) == 3:
        group = zero.grad_position[zero.get_param_id(parameter)][0]
        [at] = [at for at, each in enumerate(zero.fp16_groups[group]) if each is parameter]
        return zero.averaged_gradients[group][at].view(-1).narrow(0, 0, position(zero, parameter)[2])
    group = parameter._hp_mapping.param_group_index
    [at] = [at for at, each in enumerate(zero.params_in_partition[group]) if each is parameter]
    kept = [part for part in zero.averaged_gradients[group] if not hasattr(part, "_zero_padding")]
    return kept[at].view(-1)


@torch.no_grad()
def put_together(zero: Zero, parameter: Partitioned, part: torch.Tensor) -> torch.Tensor:
    """The whole fp32 tensor of the fragments of all processes. Every process calls it."""
    whole = torch.zeros(shape(parameter), dtype=torch.float32, device=parameter.device)
    mine = cut(zero, parameter, whole)
    mine.copy_(part[: len(mine)])
    dist.all_reduce(whole)
    return whole


def whole_gradient(zero: Zero, parameter: Partitioned) -> torch.Tensor:
    """The averaged gradient in fp32. Every process calls it."""
    empty = not position(zero, parameter)[2]
    return put_together(zero, parameter, torch.zeros(0) if empty else gradient_part(zero, parameter))


def whole_master(zero: Zero, parameter: Partitioned) -> torch.Tensor:
    """The fp32 weight. Every process calls it."""
    return put_together(zero, parameter, fragment(zero, parameter, masters(zero)))


@torch.no_grad()
def drop_gradient(zero: Zero, parameter: Partitioned) -> None:
    """Makes the averaged gradient zero."""
    if position(zero, parameter)[2]:
        gradient_part(zero, parameter).zero_()
        norms = getattr(zero, "norm_for_param_grads", {})  # where gradients are offloaded
        if zero.get_param_id(parameter) in norms:
            norms[zero.get_param_id(parameter)] = torch.zeros(())


def offloads_gradients(zero: Zero) -> bool:
    """Whether the engine adds up gradients in the host's memory, in buffers of its own."""
    return bool(getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False))


@contextlib.contextmanager
def added_up(zero: Zero) -> Iterator[None]:
    """A backward pass, whose gradients are added to those of earlier ones of the step. Stages 1 and 2 without fp32
    gradients put new ones in their place, and stage 3 if no forward pass came between."""
    if zero._epilogue_ran_this_backward:
        zero.clear_backward_seen_flag()
    earlier = dict(zero.averaged_gradients)
    yield
    for group, parts in zero.averaged_gradients.items() if stage(zero) < 3 else ():
        if earlier.get(group) is not None and parts is not earlier[group]:
            torch._foreach_add_(list(parts), list(earlier[group]))


def drop_gradients(zero: Zero) -> None:
    """Forgets the gradients of the backward passes since the last step."""
    zero.zero_grad()
    if stage(zero) < 3:  # stage 3 writes over them
        zero.averaged_gradients.update(dict.fromkeys(zero.averaged_gradients))
        zero.all_grad_tensors.update(dict.fromkeys(zero.all_grad_tensors))
        zero.micro_step_id = -1  # as after a step
        zero._epilogue_ran_this_backward = False
        zero._offload_accumulated_param_ids = set()


# ---- torch's optimizer ----


class Fragments:
    """Lets torch's optimizer update what plain torch would: the parameters with a gradient, each with a step counter of
    its own. It updates a flat master as a whole as long as all its parameters have a gradient in each step, which costs
    one call instead of one for each parameter, and the fragments of it from the first step in which they have not.

    reached: the ids of the parameters with a gradient, now. `views`: {id of a parameter: its fragment of the
    masters}, some of which are empty. `apart`: the numbers of the masters whose fragments are updated.
    """

    def __init__(self, zero: Zero, reached: set[int]) -> None:
        self.zero, self.reached, self.optimizer, self.flats, self.apart = zero, reached, zero.optimizer, [], set()
        self.places = {id(p): (at, *position(zero, p)[1:]) for at, group in enumerate(groups(zero)) for p in group}
        self.views = {id(p): nn.Parameter(self.cut(p, masters(zero)).detach()) for group in groups(zero) for p in group}
        self.optimizer.register_step_pre_hook(self.choose)
        self.optimizer.register_step_post_hook(self.done)

    def cut(self, parameter: Partitioned, flats: list[torch.Tensor]) -> torch.Tensor:
        at, start, length = self.places[id(parameter)]
        return flats[at].narrow(0, start, length)

    def choose(self, *_: object) -> None:
        """Before a step of torch's optimizer, which DeepSpeed calls for each flat master."""
        self.flats = [group["params"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["params"] = [part for flat in group["params"] for part in self.with_gradients(flat)]

    def with_gradients(self, flat: torch.Tensor) -> list[torch.Tensor]:
        [at] = [at for at, master in enumerate(masters(self.zero)) if master is flat]
        reached = [parameter for parameter in groups(self.zero)[at] if id(parameter) in self.reached]
        if len(reached) == len(groups(self.zero)[at]) and at not in self.apart:
            return [flat]
        self.split(at)
        grads = [master.grad for master in masters(self.zero)]
        for parameter in reached:
            view = self.views[id(parameter)]
            # pyrefly: ignore[bad-argument-type]
            view.grad = self.cut(parameter, grads) if len(view) else torch.zeros_like(view)
        return [self.views[id(parameter)] for parameter in reached]

    def done(self, *_: object) -> None:
        for group, flats in zip(self.optimizer.param_groups, self.flats, strict=True):
            group["params"] = flats
        for at in self.apart:
            for parameter in groups(self.zero)[at]:
                self.views[id(parameter)].grad = None

    def split(self, at: int) -> None:
        """Updates the fragments of this flat master from now on. Each takes its part of the state."""
        if at in self.apart:
            return
        for parameter in groups(self.zero)[at]:
            if state := self.state(parameter):
                self.optimizer.state[self.views[id(parameter)]] = {key: value.clone() for key, value in state.items()}
        self.optimizer.state.pop(masters(self.zero)[at], None)
        self.apart.add(at)

    def join(self, at: int, held: Mapping[str, torch.Tensor]) -> None:
        """The state of the flat master, made of those of its fragments, whose largest step counter it takes. held: the
        tensors of an earlier state of it, which are filled."""
        flat, joined = masters(self.zero)[at], {}
        for parameter in groups(self.zero)[at]:
            _, start, length = self.places[id(parameter)]
            for key, value in self.optimizer.state.pop(self.views[id(parameter)], {}).items():
                if torch.is_tensor(value) and value.dim():
                    if key not in joined:
                        joined[key] = held[key].zero_() if key in held else torch.zeros_like(flat.detach())
                    joined[key].narrow(0, start, length).copy_(value)
                elif torch.is_tensor(value):
                    joined[key] = torch.maximum(joined[key], value) if key in joined else value.clone()
        if joined:
            self.optimizer.state[flat] = joined

    def state(self, parameter: Partitioned) -> dict[str, torch.Tensor]:
        """{key: tensor} of this process's fragment of the parameter."""
        at, start, length = self.places[id(parameter)]
        flat = masters(self.zero)[at]
        state = self.optimizer.state.get(self.views[id(parameter)] if at in self.apart else flat, {})
        return {
            key: value.narrow(0, start, length) if at not in self.apart and value.shape == flat.shape else value
            for key, value in state.items()
            if torch.is_tensor(value)
        }

    def loaded(self) -> None:
        """After DeepSpeed has loaded states of the flat masters."""
        for view in self.views.values():
            self.optimizer.state.pop(view, None)
        self.apart.clear()

    def restore(self, names: dict[int, str], parts: Mapping[str, torch.Tensor]) -> None:
        """Fills the states with those of a checkpoint, and deletes others. names: {id of a parameter: name}."""
        saved = collections.defaultdict(dict)
        for place in parts:
            if tensor_keys.kind(place) == tensor_keys.OPTIMIZER:
                _, name, key = tensor_keys.parsed(place)
                saved[name][key] = place
        fused = self.optimizer.defaults.get("fused")  # its kernel needs the step counters on the device
        for at, group in enumerate(groups(self.zero)):
            earlier_state = self.optimizer.state.pop(masters(self.zero)[at], {})
            self.apart.add(at)
            for parameter in group:
                view, own = self.views[id(parameter)], saved.get(names[id(parameter)], {})
                held, state = self.optimizer.state.pop(view, {}), {}
                for key, place in own.items():
                    value = parts[place]
                    refuse_other_shape(self.optimizer, place, value, view)
                    where = view.device if value.dim() or fused else "cpu"
                    state[key] = filled(held.get(key), value.to(where))
                if state:
                    self.optimizer.state[view] = state
            if self.alike(group):
                tensors = {key: v for key, v in earlier_state.items() if torch.is_tensor(v) and v.dim()}
                self.join(at, tensors)
                self.apart.discard(at)

    def alike(self, group: list[Partitioned]) -> bool:
        """Whether the parameters have the same counters, as after steps in which all had a gradient."""
        states = [self.optimizer.state.get(self.views[id(parameter)], {}) for parameter in group]
        counters = [{key: float(value) for key, value in state.items() if not value.dim()} for state in states]
        return all(map(counters[0].__eq__, counters)) and all(state.keys() == states[0].keys() for state in states)


def restore_engine(
    zero: Zero, trained: list[bool], parameters: list[tuple[str, nn.Parameter]], parts: Mapping[str, torch.Tensor]
) -> None:
    """Fills the engine with what a checkpoint has. trained: which of the parameters have masters."""
    from deepspeed.runtime.zero import GatheredParameters

    for has_master, (name, parameter) in zip(trained, parameters, strict=True):
        if has_master:
            fragment(zero, parameter, masters(zero)).copy_(parts[tensor_keys.weight(name)])
            continue
        with GatheredParameters([parameter], modifier_rank=0):  # gathers only in stage 3
            if dist.get_rank() == 0:
                parameter.copy_(parts[tensor_keys.weight(name)].view_as(parameter))
            dist.broadcast(parameter.data, 0)
    zero.held.fragments.restore({id(parameter): name for name, parameter in parameters}, parts)
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


def gathered(parameter: Partitioned) -> torch.Tensor:
    """The full 16-bit parameter. Under stage 3 every process must call it."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach()
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        return parameter.detach().clone()
