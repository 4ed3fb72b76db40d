"""One object for each model that the script has prepared: what is known of it, from `prepare` to `free_memory`. And
what is refused or noted of all of them together."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import PartialState
from torch import nn
from torch.nn.parameter import is_lazy

from faithful.backends.base import Backend
from faithful.backends.linear import in_fp8, refuse_unknown
from faithful.errors import Refused
from faithful.evidence.batch import FirstBatch
from faithful.evidence.evidence import Evidence, Layers
from faithful.models import dtypes
from faithful.models.blocks import compile_blocks
from faithful.models.live import Live
from faithful.strategies import guard
from faithful.strategies.base import Engine, Session, Strategy, parameter_ids
from faithful.tensors.names import unwrapped


class PreparedModel:
    """`model` is what `prepare` returned. `layers`: it before its conversion, for models with trainable parameters.
    `evidence` begins with the first prepared optimizer that updates the model, and stays None for frozen models.
    `evaluation`: prepared by `prepare_model(model, evaluation_mode=True)`."""

    def __init__(self, model: nn.Module, layers: Layers | None = None, evaluation: bool = False) -> None:
        self.model, self.layers, self.evaluation = model, layers, evaluation
        self.optimizers: list[torch.optim.Optimizer] = []
        self.evidence: Evidence | None = None
        self.live: Live | None = None  # with `evidence`
        self.first_batch: FirstBatch | None = None  # of the first model of a run
        self.parameters = set(map(id, nn.Module.parameters(model)))
        self.dtypes = dtypes.dtypes_of(nn.Module.parameters(model))

    def is_of(self, model: nn.Module) -> bool:
        return unwrapped(model) is unwrapped(self.model)

    def attach_optimizer(
        self, strategy: Strategy, backend: Backend, optimizer: Any, prepared: set[int], note: Callable[[str], None]
    ) -> Engine | None:
        """Takes note of a prepared optimizer. If it updates this model, backend and strategy may change both. prepared:
        the ids of the parameters of all models. note: keeps a line. Returns what takes its steps, if it does not."""
        if optimizer in self.optimizers or not strategy.parameter_ids(optimizer) & self.parameters:
            return None
        if backend.codes and not self.layers and any(p.requires_grad for p in nn.Module.parameters(self.model)):
            raise Refused(
                "an optimizer updates a model that was prepared with other optimizers before, and is not in FP8: give "
                "the model and its optimizer to one call of accelerator.prepare"
            )
        self.optimizers.append(optimizer)
        strategy.refuse_order(self.model, optimizer)
        engine = None
        if self.evidence:
            backend.another_optimizer(self.model, optimizer)
        elif self.layers:
            dtypes.refuse_cast(strategy, list(nn.Module.parameters(self.model)), self.dtypes)
            engine = strategy.after_prepare(self.model, optimizer)
            self.layers.skipped += backend.after_prepare(self.model, optimizer, prepared)
            self.parameters = set(map(id, nn.Module.parameters(self.model)))
            self.evidence = Evidence(strategy, backend, self.model, self.optimizers, self.layers)
            self.live = Live(strategy, self.model, note)
        return engine


def trains(argument: object) -> TypeGuard[nn.Module]:
    """Whether an argument of `prepare` is a model that is not prepared yet and has trainable parameters."""
    if not isinstance(argument, nn.Module) or getattr(argument, "_is_accelerate_prepared", False):
        return False
    return any(parameter.requires_grad for parameter in nn.Module.parameters(argument))


def to_convert(
    args: Sequence[Any], optimizers: list[torch.optim.Optimizer], codes: bool
) -> Iterator[tuple[int, nn.Module]]:
    """Yields (position, model) of those to convert. codes: whether the weights become codes, in which an average of
    weights, that is prepared beside the model and its optimizer, is not to be held."""
    updated = set().union(*map(parameter_ids, optimizers))
    for at, model in enumerate(args):
        if trains(model):
            of_model = map(id, nn.Module.parameters(model))
            if not (codes and optimizers) or not updated.isdisjoint(of_model):
                yield at, model


def convert(
    session: Session, strategy: Strategy, backend: Backend, model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> Layers:
    """Converts a model in place as planned. Returns its Layers before the conversion."""
    if any(map(is_lazy, nn.Module.parameters(model))):
        raise Refused(
            "a layer has no weights before its first input, as LazyLinear: call the model once before prepare()"
        )
    if not strategy.has_split(model):
        guard.refuse_shards(model, session.plan.strategy)
    of_model = set(map(id, nn.Module.parameters(model)))
    optimizer = next((candidate for candidate in optimizers if parameter_ids(candidate) & of_model), None)
    layers = Layers(backend, model, set().union(*map(parameter_ids, optimizers)))
    strategy.before_prepare(session, model, optimizer)
    layers.skipped += backend.convert(model, optimizer)
    strategy.after_convert(session, model, optimizer)
    if session.plan.compile:
        compile_blocks(model, in_fp8 if backend.eager_in_eval else None)
    return layers


def prepared_parameters(models: "Iterable[PreparedModel]") -> set[int]:
    """The ids of the parameters of all of them that are prepared for training."""
    return set().union(*(model.parameters for model in models if not model.evaluation))


def refuse_untrained(strategy: Strategy, models: list[PreparedModel], optimizers: list[torch.optim.Optimizer]) -> None:
    """Raises Refused for what shows when all is prepared: that some of it would not train as script and config ask."""
    trained, processes = [model.evidence for model in models if model.evidence], PartialState().num_processes
    # torch alone trains right in one process, or under DDP with a prepared model; both without FP8
    right = strategy.replicates and (models or processes == 1)
    if not trained and (strategy.plan.level or not right):
        if any(not model.evaluation for model in models) and optimizers:
            raise Refused(
                "the prepared optimizer updates no parameter of the prepared model: prepare both in one call, or the "
                "model first, as prepare may give it other parameters"
            )
        raise Refused("no model and optimizer were prepared: call accelerator.prepare(model, optimizer, ...) first")
    refuse_unknown(strategy.plan.skip, [name for model in models if model.layers for name in model.layers.names])
    prepared = prepared_parameters(models)
    if processes > 1 and (strangers := sum(len(strategy.not_averaged(each, prepared)) for each in optimizers)):
        raise Refused(
            f"an optimizer updates {strangers} tensors that are in no prepared model: each process would "
            "change them in its own way. Prepare their model, too, in the optimizer's call or before"
        )
    for evidence in trained:
        if lost := [name for name in evidence.left_out() if name in evidence.owned_before]:  # in its conversion
            raise Refused(
                f"{len(lost)} trainable tensors are not in the optimizer any more: {', '.join(lost[:4])}, ... Give the "
                "model and its optimizer to one call of accelerator.prepare"
            )


def notes(models: list[PreparedModel], schedulers: list[AcceleratedScheduler]) -> Iterator[str]:
    """Yields notes about the prepared objects, one line each."""
    trained = any(model.evidence for model in models)
    if not trained:
        yield "no prepared optimizer updates a prepared model: steps are neither checked nor counted"
    for prepared in models:
        if prepared.evidence and (names := prepared.evidence.left_out()):
            yield f"{len(names)} trainable tensors are in no optimizer: {', '.join(names[:3])}, ..."
        elif prepared.layers and not prepared.evidence and trained:
            line = f"{type(unwrapped(prepared.model)).__name__} was prepared, but no prepared optimizer updates it"
            if any(hasattr(parameter, "amp8_linear") for parameter in nn.Module.parameters(prepared.model)):
                line += (
                    ". Its weights are codes of MS-AMP, in which small changes are lost: prepare an average of weights "
                    "in one call with the optimizer"
                )
            yield line
    processes = PartialState().num_processes
    own = [each for each in schedulers if type(each) is AcceleratedScheduler]  # not those that DeepSpeed steps once
    if processes > 1 and any(each.step_with_optimizer and not each.split_batches for each in own):
        yield (
            f"Accelerate steps a prepared scheduler {processes} times per optimizer step, once for each process: a "
            "schedule counted in optimizer steps ends that much earlier"
        )
