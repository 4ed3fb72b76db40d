"""Gradient clipping, also for scripts that call torch.nn.utils.clip_grad_norm_ instead of the Accelerator's.

torch clips only `.grad`. MS-AMP's levels keep FP8 gradients elsewhere, and DeepSpeed keeps all gradients elsewhere, so
torch would clip a part of them, or none. Under tensor parallel torch fails on a mix of DTensors and tensors. In fp16 it
would clip gradients that are multiplied by the scale.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import torch

from faithful import patches
from faithful.backends.base import Backend
from faithful.errors import Refused
from faithful.strategies.base import GradientsElsewhere, Strategy
from faithful.tensors.names import by_mesh, whole_of

Parameters = torch.Tensor | Iterable[torch.Tensor]  # what torch's functions take


class Norms:
    """The norms of the gradients that a script has clipped. Each step needs to know that all gradients of its optimizer
    are finite, whatever was clipped: those of another model alone, a part of them, or none. `elsewhere`: the backend or
    strategy if it keeps gradients outside `.grad`, else None."""

    def __init__(self, strategy: Strategy, backend: Backend) -> None:
        self.strategy, both = strategy, (backend, strategy)
        self.elsewhere = next((keeper for keeper in both if isinstance(keeper, GradientsElsewhere)), None)
        # {id of a parameter: (parameter, version of its gradient, norm of the call)}
        self.clipped: dict[int, tuple[torch.Tensor, tuple[int, int] | None, torch.Tensor]] = {}

    def keep(self, parameters: list[torch.Tensor], norm: torch.Tensor) -> torch.Tensor:
        """Remembers that these parameters were clipped together. Returns their norm over all processes."""
        norm = whole_of(norm)
        self.clipped |= {id(p): (p, self.version(p), norm) for p in parameters}
        return norm

    def clear(self) -> None:
        """Forgets all norms, because gradients change."""
        self.clipped.clear()

    def unchanged(self, key: int) -> torch.Tensor | None:
        """The norm with which the parameter of this id was clipped, or None if it was not, or has changed since."""
        if (found := self.clipped.get(key)) is None:
            return None
        parameter, before, norm = found
        return norm if before == self.version(parameter) else None

    def version(self, parameter: torch.Tensor) -> tuple[int, int] | None:
        """Identifies a gradient in `.grad`, and its values."""
        gradient = None if self.elsewhere is self.strategy else parameter.grad
        return None if gradient is None else (id(gradient), gradient._version)

    def of(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """The norm over all gradients of a prepared optimizer. Clipping calls may have computed it, or a
        part of it, if no gradient has changed since; theirs may include gradients of others."""
        norm_of = {key: self.unchanged(key) for key in self.strategy.parameter_ids(optimizer)}
        norms = list({id(norm): norm for norm in norm_of.values() if norm is not None}.values())
        if len(norms) == 1 and all(norm is not None for norm in norm_of.values()):  # `in` would compare tensors
            return norms[0]
        if self.elsewhere:
            return self.elsewhere.norm_of(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        rest = [parameter for parameter in parameters if norm_of[id(parameter)] is None]
        norms += [whole_of(total_norm(gradients)) for gradients in by_kind(rest)]
        return norms[0] if len(norms) == 1 else combined(norms)

    def refuse_by_value(self) -> None:
        """Raises Refused where gradients cannot be clipped by value."""
        if self.elsewhere:
            raise Refused(
                f"clip_grad_value_: {self.elsewhere.gradients_elsewhere} cannot be clipped by value, use "
                "accelerator.clip_grad_norm_"
            )

    def refuse_by_other(self, norm_type: float) -> None:
        """Raises Refused where gradients can be clipped by their 2-norm alone, and this is another."""
        if self.elsewhere and norm_type != 2:
            raise Refused(
                f"clip_grad_norm_(norm_type={norm_type}): {self.elsewhere.gradients_elsewhere} are clipped by their "
                "2-norm, leave norm_type out"
            )


def combined(norms: list[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def by_kind(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Gradients that torch computes with in one call."""
    return by_mesh(parameter.grad for parameter in parameters if parameter.grad is not None)


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    values = [g.coalesce().values() if g.layout is torch.sparse_coo else g for g in gradients]
    return torch.nn.utils.get_total_norm(values)


class Clips(Protocol):
    """What is called of the Accelerator whose models' gradients are clipped."""

    norms: Norms

    def clip_grad_norm_(self, parameters: Parameters, max_norm: float, norm_type: float = 2) -> torch.Tensor: ...
    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None: ...
    def prepared_parameters(self) -> set[int]: ...
    def are_scaled(self, parameters: list[torch.Tensor]) -> bool: ...
    def refuse_between_passes(self, clips: bool = False) -> None: ...


newest: weakref.ref[Clips] | None = None  # of this process, while the script holds it


def instead_of_torch(accelerator: Clips) -> None:
    """Makes torch's clipping functions call those of the newest Accelerator, for parameters of its models.

    A script may have imported them under any name, so the function inside torch's `no_grad` wrapper is replaced.
    """
    global newest
    newest = weakref.ref(accelerator)
    norms = accelerator.norms
    if not norms.elsewhere and not norms.strategy.mixes_dtensors and norms.strategy.plan.precision != "fp16":
        return
    for function, ours in (
        (torch.nn.utils.clip_grad_norm_, clip_grad_norm_),
        (torch.nn.utils.clip_grad_value_, clip_grad_value_),
        (torch.nn.utils.clip_grads_with_norm_, clip_grads_with_norm_),
    ):
        [inside] = function.__closure__  # pyrefly: ignore[not-iterable]
        if not isinstance(inside.cell_contents, functools.partial):
            ours = functools.partial(ours, inside.cell_contents)
            row = "clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_ of torch.nn.utils"
            patches.replace(row, ours, inside, "cell_contents")


def clip_grad_norm_(
    torchs: Callable[..., torch.Tensor],
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    accelerator, parameters = newest() if newest else None, as_list(parameters)
    if accelerator and not accelerator.prepared_parameters().isdisjoint(map(id, parameters)):
        accelerator.refuse_between_passes(True)
    if accelerator and (owner(parameters) or len(by_kind(parameters)) > 1 or accelerator.are_scaled(parameters)):
        return accelerator.clip_grad_norm_(parameters, max_norm, norm_type)
    return torchs(parameters, max_norm, norm_type, *args, **kwargs)


def clip_grads_with_norm_(torchs: Callable[..., None], parameters: Parameters, *args: Any, **kwargs: Any) -> None:
    parameters = as_list(parameters)
    if norms := owner(parameters):
        elsewhere = cast(GradientsElsewhere, norms.elsewhere).gradients_elsewhere
        raise Refused(f"clip_grads_with_norm_: {elsewhere} are not in .grad, use accelerator.clip_grad_norm_")
    return torchs(parameters, *args, **kwargs)


def clip_grad_value_(torchs: Callable[..., None], parameters: Parameters, *args: Any, **kwargs: Any) -> None:
    accelerator, parameters = newest() if newest else None, as_list(parameters)
    if norms := owner(parameters):
        norms.refuse_by_value()
    if accelerator and not accelerator.prepared_parameters().isdisjoint(map(id, parameters)):
        accelerator.refuse_between_passes(True)
    if accelerator and accelerator.are_scaled(parameters):
        return accelerator.clip_grad_value_(parameters, *args, **kwargs)
    for kind in by_mesh(parameter for parameter in parameters if parameter.grad is not None):
        torchs(kind, *args, **kwargs)


def owner(parameters: list[torch.Tensor]) -> Norms | None:
    """The norms of the newest Accelerator if it keeps gradients of these parameters outside `.grad`, else None."""
    accelerator = newest() if newest else None
    if accelerator is None or not accelerator.norms.elsewhere:
        return None
    prepared = accelerator.prepared_parameters()
    return accelerator.norms if any(id(parameter) in prepared for parameter in parameters) else None


def as_list(parameters: Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
