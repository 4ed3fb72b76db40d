"""The content of a checkpoint: all state that a resumed run needs to be the same run.

Of each rank: its shards of model and optimizer, its random state. Once: the optimizer's param_groups, schedulers, the
gradient scaler, registered objects, and the plan. Tensors are stored as safetensors, other values as JSON.
"""

import math
import random

import numpy as np
import torch

from faithful import backends, checkpoint, loaders, strategies
from faithful.errors import Refused
from faithful.strategies import tp

PLANNED = ("strategy", "num_processes", "precision", "backend", "level", "fp8_options", "skip", "offload", "compile")


def collect(accelerator, alone=False):
    """({name: tensor} of this rank, JSON values of the run). Every rank calls it, or with `alone` the main process."""
    plan, main = accelerator.plan, accelerator.is_main_process
    strategy, backend = strategies.of(plan), backends.of(plan)
    parts, half_way = loaders.collect(accelerator.epochs, accelerator.stopping)
    parts |= random_state()
    for index, evidence in enumerate(accelerator.evidence):
        own = {}
        for optimizer in evidence.optimizers:
            own |= backend.tensors(strategy, evidence.model, optimizer)
        if main or holds_own_parts(accelerator):
            parts |= {f"{index}:{name}": tensor for name, tensor in own.items()}
    tensors = {}
    groups = [
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in map(strategy.inner, accelerator._optimizers)
    ]
    scaler = accelerator.scaler
    state = {
        "format": checkpoint.FORMAT,
        "plan": {key: getattr(plan, key) for key in PLANNED},
        "steps": {"taken": accelerator.steps.taken, "tried": accelerator.steps.tried, "micro": accelerator.step},
        "groups": pack(groups, tensors, "groups"),
        "schedulers": pack([scheduler.state_dict() for scheduler in accelerator._schedulers], tensors, "schedulers"),
        "scaler": None if scaler is None else scaler.state_dict(),
        "loaders": half_way,
        "alone": alone,
        "registered": pack([one.state_dict() for one in accelerator._custom_objects], tensors, "registered"),
        "cuts": tp.cuts(accelerator.evidence[0].model) if plan.split > 1 else {},
    }
    return parts | (tensors if main else {}), state


def put_back(accelerator, folder):
    """Restores a checkpoint that `checkpoint.find` has verified. Every rank calls it. Returns the number of processes
    that saved it."""
    plan, rank = accelerator.plan, accelerator.process_index
    strategy, backend = strategies.of(plan), backends.of(plan)
    state = checkpoint.read_state(folder)
    saved_by = state["plan"]["num_processes"]
    fixed = [key for key in PLANNED if key != "num_processes" or not backend.on_any_number_of_processes(plan)]
    differs = [
        f"{key} {state['plan'][key]} -> {getattr(plan, key)}"
        for key in fixed
        if state["plan"][key] != getattr(plan, key)
    ]
    if differs:
        raise Refused(f"{folder} is of another run: {', '.join(differs)}. Resume as it was, or start anew")
    mine = checkpoint.read_tensors(folder, 0 if state["alone"] else min(rank, saved_by - 1))
    first = mine if rank == 0 else checkpoint.read_tensors(folder, 0)
    registered = unpack(state["registered"], first)
    if len(registered) != len(accelerator._custom_objects):
        raise Refused(
            f"{folder} holds {len(registered)} registered objects, the script registers "
            f"{len(accelerator._custom_objects)}: resume with the script as it was"
        )
    for target, value in zip(accelerator._custom_objects, registered, strict=True):
        target.load_state_dict(value)  # first, so that an error here leaves the run unchanged
    parts = mine if holds_own_parts(accelerator) else first
    for index, evidence in enumerate(accelerator.evidence):
        own = {n.removeprefix(f"{index}:"): tensor for n, tensor in parts.items() if n.startswith(f"{index}:")}
        if saved_by != plan.num_processes:
            own = [checkpoint.Part(folder, one, f"{index}:") for one in range(saved_by)]
        for optimizer in evidence.optimizers:
            backend.restore(strategy, evidence.model, optimizer, own)
    for optimizer, groups in zip(accelerator._optimizers, unpack(state["groups"], first), strict=True):
        for group, saved in zip(strategy.inner(optimizer).param_groups, groups, strict=True):
            group.update(saved)
    for scheduler, saved in zip(accelerator._schedulers, unpack(state["schedulers"], first), strict=True):
        scheduler.load_state_dict(saved)
    if accelerator.scaler is not None and state["scaler"]:
        accelerator.scaler.load_state_dict(state["scaler"])
    steps = state["steps"]
    accelerator.steps.taken, accelerator.steps.tried, accelerator.step = steps["taken"], steps["tried"], steps["micro"]
    if rank < saved_by:
        loaders.put_back(accelerator.epochs, mine, state["loaders"])
    if rank < (1 if state["alone"] else saved_by):  # other ranks keep their own random state
        set_random_state(mine)
    return saved_by


def holds_own_parts(accelerator):
    """Whether ranks hold different tensors: shards, or FP8 histories."""
    sharded = any(evidence.sharded for evidence in accelerator.evidence)
    return sharded or (accelerator.plan.backend == "msamp" and accelerator.num_processes > 1)


def random_state():
    """{name: state} of this process's random generators: Python's, numpy's, torch's for CPU and accelerator."""
    version, numbers, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    state = {
        "random/python": torch.tensor([version, *numbers], dtype=torch.int64),
        "random/python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
        "random/numpy": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
        "random/numpy_rest": torch.tensor(
            [numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]], dtype=torch.float64
        ),
        "random/torch": torch.get_rng_state(),
    }
    if torch.accelerator.is_available():
        state["random/device"] = torch.get_device_module().get_rng_state().cpu()
    return state


def set_random_state(parts):
    version, *numbers = parts["random/python"].tolist()
    gauss = parts["random/python_gauss"].item()
    random.setstate((version, tuple(numbers), None if math.isnan(gauss) else gauss))
    position, has_gauss, gauss = parts["random/numpy_rest"].tolist()
    key = parts["random/numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, int(position), int(has_gauss), gauss))
    torch.set_rng_state(parts["random/torch"])
    if "random/device" in parts and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(parts["random/device"])


def pack(value, tensors, at):
    """`value` as JSON. Its tensors go to `tensors`, under names that begin with `at`. Types that JSON lacks become
    {"!": kind, ...}. Raises Refused for types that only a pickle could hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if torch.is_tensor(value):
        tensors[at] = local_copy(value)
        return {"!": "tensor", "at": at}
    if isinstance(value, np.ndarray | np.generic):
        tensors[at] = torch.from_numpy(np.array(value))
        return {"!": "array", "at": at}
    if isinstance(value, dict):
        if "!" not in value and all(isinstance(key, str) for key in value):
            return {key: pack(one, tensors, f"{at}.{key}") for key, one in value.items()}
        items = [[pack(k, tensors, f"{at}.{i}.key"), pack(v, tensors, f"{at}.{i}")] for i, (k, v) in
                 enumerate(value.items())]  # fmt: skip
        return {"!": "dict", "items": items}
    if isinstance(value, list | tuple):
        items = [pack(one, tensors, f"{at}.{i}") for i, one in enumerate(value)]
        return items if type(value) is list else {"!": "tuple", "items": items}
    raise Refused(f"save_state: {at} is a {type(value).__name__}, which a checkpoint without a pickle cannot hold")


def local_copy(tensor):
    return tensor.detach().cpu().contiguous().clone()


def unpack(value, tensors):
    """The inverse of `pack`."""
    if isinstance(value, list):
        return [unpack(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("!")
    if kind is None:
        return {key: unpack(one, tensors) for key, one in value.items()}
    if kind == "tensor":
        return tensors[value["at"]]
    if kind == "array":
        return tensors[value["at"]].numpy()
    if kind == "tuple":
        return tuple(unpack(one, tensors) for one in value["items"])
    return {unpack(key, tensors): unpack(one, tensors) for key, one in value["items"]}
