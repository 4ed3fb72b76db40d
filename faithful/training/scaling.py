"""fp16's gradient scaler, where a script has several optimizers or clips gradients with torch's functions.

torch's scaler remembers whose gradients it has divided by the scale, until the update that comes after the steps of all
optimizers. Accelerate updates it after each step, so that the gradients of the others are divided once more. And where
one model's gradients are to be clipped, Accelerate divides those of all, which fails the second time.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from faithful.errors import Refused
from faithful.strategies import guard
from faithful.strategies.base import parameter_ids, torch_optimizer


def scales(scaler: Any) -> bool:
    """Whether it is torch's, and enabled: a script may set another one on its Accelerator."""
    return isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()


def can_step(scaler: Any, optimizer: torch.optim.Optimizer, closure: object) -> bool:
    """Whether torch's scaler can step. If there is no gradient it cannot, and nothing is to be updated."""
    if not scales(scaler):
        return True
    if closure is not None:
        raise Refused("fp16's gradient scaler takes no closure of optimizer.step: use a bf16 or fp32 config")
    if scaler._scale is None and has_gradients(optimizer):
        raise Refused(guard.NOT_SCALED)
    return has_gradients(optimizer)


def divide(scaler: Any, optimizers: Iterable[Any]) -> None:
    """Divides the gradients of these optimizers by the scale, once in a step."""
    for each in undivided(scaler, optimizers):
        scaler.unscale_(each)


def undivided(scaler: Any, optimizers: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """torch's optimizers inside these whose gradients are still multiplied by the scale."""
    if not scales(scaler) or scaler._scale is None:
        return []
    return [each for each in map(torch_optimizer, optimizers) if has_gradients(each) and ready(scaler, each)]


def of_parameters(optimizers: Iterable[Any], parameters: Iterable[torch.Tensor]) -> list[Any]:
    """Those of the optimizers that update one of these parameters."""
    ids = set(map(id, parameters))
    return [each for each in optimizers if not ids.isdisjoint(parameter_ids(each))]


@contextlib.contextmanager
def alone(scaler: Any, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A step of this optimizer and the scaler's update after it, which forgets nothing of the others."""
    if not scales(scaler):
        yield
        return
    states = scaler._per_optimizer_states
    others = {key: states.pop(key) for key in list(states) if key != id(optimizer)}
    yield
    scaler._per_optimizer_states.update(others)  # a new dictionary by now


def forget(scaler: Any, optimizers: Iterable[Any]) -> None:
    """Forgets that the gradients of these optimizers were divided, which the script has given up since."""
    if scales(scaler):
        for each in map(torch_optimizer, optimizers):
            scaler._per_optimizer_states.pop(id(each), None)


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def ready(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the scaler has not divided the optimizer's gradients yet."""
    state = scaler._per_optimizer_states.get(id(optimizer))
    return state is None or state["stage"] is OptState.READY
