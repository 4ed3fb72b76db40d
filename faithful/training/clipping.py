"""Gradient clipping, also for scripts that call torch.nn.utils.clip_grad_norm_ instead of the Accelerator's.

torch clips only `.grad`. MS-AMP's levels keep FP8 gradients elsewhere, and DeepSpeed keeps all gradients elsewhere, so
torch would clip a part of them, or none. Under tensor parallel torch fails on a mix of DTensors and tensors.
"""

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from faithful import patches
from faithful.errors import Refused
from faithful.strategies.base import GradientsElsewhere

if TYPE_CHECKING:
    from faithful.accelerator import Accelerator

Parameters = torch.Tensor | Iterable[torch.Tensor]  # what torch's functions take


def gradient_keeper(accelerator: "Accelerator") -> GradientsElsewhere | None:
    """The run's backend or strategy if it keeps gradients outside `.grad`, else None."""
    both = accelerator.backend, accelerator.strategy
    return next((keeper for keeper in both if isinstance(keeper, GradientsElsewhere)), None)


def clip(accelerator: "Accelerator", parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    """Clips the gradients of parameters, and returns their norm over all processes before."""
    elsewhere = gradient_keeper(accelerator)
    if elsewhere is None:
        accelerator.unscale_gradients()
    elif norm_type != 2:
        raise Refused(
            f"clip_grad_norm_(norm_type={norm_type}): {elsewhere.gradients_elsewhere} are clipped by their "
            "2-norm, leave norm_type out"
        )
    norm = (elsewhere or accelerator.strategy).clip_grad_norm_(accelerator, parameters, max_norm, norm_type)
    norm = whole_norm(norm)
    accelerator.norms.keep(parameters, norm)
    return norm


class Norms:
    """The norms of the gradients that a script has clipped. Each step needs to know that all gradients of its optimizer
    are finite, whatever was clipped: those of another model alone, a part of them, or none."""

    def __init__(self) -> None:
        # {id of a parameter: (parameter, version of its gradient, norm of the call)}
        self.clipped: dict[int, tuple[torch.Tensor, tuple[int, int] | None, torch.Tensor]] = {}

    def keep(self, parameters: list[torch.Tensor], norm: torch.Tensor) -> None:
        """Remembers that these parameters were clipped together."""
        self.clipped |= {id(p): (p, version(p.grad), norm) for p in parameters}

    def clear(self) -> None:
        """Forgets all norms, because gradients change."""
        self.clipped.clear()

    def unchanged(self, key: int) -> torch.Tensor | None:
        """The norm with which the parameter of this id was clipped, or None if it was not, or has changed since."""
        if (found := self.clipped.get(key)) is None:
            return None
        parameter, before, norm = found
        return norm if before == version(parameter.grad) else None

    def of(self, accelerator: "Accelerator", optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """The norm over all gradients of a prepared optimizer. Clipping calls may have computed it, or a
        part of it, if no gradient has changed since; theirs may include gradients of others."""
        norm_of = {key: self.unchanged(key) for key in accelerator.strategy.parameter_ids(optimizer)}
        norms = list({id(norm): norm for norm in norm_of.values() if norm is not None}.values())
        if None not in norm_of.values() and len(norms) == 1:
            return norms[0]
        if elsewhere := gradient_keeper(accelerator):
            return elsewhere.norm_of(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        rest = [parameter for parameter in parameters if norm_of[id(parameter)] is None]
        norms += [whole_norm(total_norm(gradients)) for gradients in by_kind(rest)]
        return norms[0] if len(norms) == 1 else combined(norms)


def combined(norms: list[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def version(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    """Identifies a gradient and its values."""
    return None if gradient is None else (id(gradient), gradient._version)


def by_kind(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Splits gradients into DTensors and others: torch does not compute with both in one call."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sharded = [isinstance(gradient, DTensor) for gradient in gradients]
    kinds = [[g for g, is_kind in zip(gradients, sharded, strict=True) if is_kind is kind] for kind in (True, False)]
    return [kind for kind in kinds if kind]


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    values = [g.coalesce().values() if g.layout is torch.sparse_coo else g for g in gradients]
    return torch.nn.utils.get_total_norm(values)


def whole_norm(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def refuse_by_value(accelerator: "Accelerator") -> None:
    """Raises Refused where gradients cannot be clipped by value."""
    if elsewhere := gradient_keeper(accelerator):
        raise Refused(
            f"clip_grad_value_: {elsewhere.gradients_elsewhere} cannot be clipped by value, use "
            "accelerator.clip_grad_norm_"
        )


def instead_of_torch(accelerator: "Accelerator", current: Callable[[], "Accelerator"]) -> None:
    """Makes torch's clipping functions call those of current(), the newest Accelerator, for parameters of its models.

    A script may have imported them under any name, so the function inside torch's `no_grad` wrapper is replaced.
    """
    if not gradient_keeper(accelerator) and not accelerator.strategy.mixes_dtensors:
        return
    for function, ours in (
        (torch.nn.utils.clip_grad_norm_, clip_grad_norm_),
        (torch.nn.utils.clip_grad_value_, clip_grad_value_),
        (torch.nn.utils.clip_grads_with_norm_, clip_grads_with_norm_),
    ):
        [inside] = function.__closure__  # pyrefly: ignore[not-iterable]
        if not isinstance(inside.cell_contents, functools.partial):
            ours = functools.partial(ours, current, inside.cell_contents)
            row = "clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_ of torch.nn.utils"
            patches.replace(row, ours, inside, "cell_contents")


def clip_grad_norm_(
    current: Callable[[], "Accelerator"],
    torchs: Callable[..., torch.Tensor],
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    accelerator, parameters = current(), as_list(parameters)
    mixed = len({isinstance(parameter.grad, DTensor) for parameter in parameters if parameter.grad is not None}) > 1
    if is_own(accelerator, parameters) or mixed:
        return accelerator.clip_grad_norm_(parameters, max_norm, norm_type)
    return torchs(parameters, max_norm, norm_type, *args, **kwargs)


def clip_grads_with_norm_(
    current: Callable[[], "Accelerator"], torchs: Callable[..., None], parameters: Parameters, *args: Any, **kwargs: Any
) -> None:
    parameters = as_list(parameters)
    if is_own(current(), parameters) and (elsewhere := gradient_keeper(current())):
        raise Refused(
            f"clip_grads_with_norm_: {elsewhere.gradients_elsewhere} are not in .grad, use accelerator.clip_grad_norm_"
        )
    return torchs(parameters, *args, **kwargs)


def clip_grad_value_(
    current: Callable[[], "Accelerator"], torchs: Callable[..., None], parameters: Parameters, *args: Any, **kwargs: Any
) -> None:
    accelerator, parameters = current(), as_list(parameters)
    if is_own(accelerator, parameters):
        refuse_by_value(accelerator)
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    for kind in {isinstance(p.grad, DTensor) for p in trained}:  # torch takes DTensors or tensors, not both in a call
        torchs([p for p in trained if isinstance(p.grad, DTensor) is kind], *args, **kwargs)


def is_own(accelerator: "Accelerator", parameters: list[torch.Tensor]) -> bool:
    prepared = accelerator.prepared_parameters() if gradient_keeper(accelerator) else set()
    return any(id(parameter) in prepared for parameter in parameters)


def as_list(parameters: Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
