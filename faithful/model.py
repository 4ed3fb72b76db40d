"""One object for each model that the script has prepared: what is known of it, from `prepare` to `free_memory`."""

from torch import nn

from faithful.evidence import Evidence
from faithful.tensors import unwrapped


class PreparedModel:
    """`model` is what `prepare` returned. `layers`: it before its conversion, and `skipped`: [(name, reason)] of Linear
    layers that stay in high precision; both for models with trainable parameters. `evidence` begins with the first
    prepared optimizer that updates the model, and stays None for frozen models."""

    def __init__(self, model, layers=None, skipped=()):
        self.model, self.layers, self.skipped = model, layers, list(skipped)
        self.optimizers, self.evidence = [], None
        self.parameters = set(map(id, model.parameters()))

    def is_of(self, model):
        return unwrapped(model) is unwrapped(self.model)

    def attach_optimizer(self, accelerator, optimizer):
        """Takes note of a prepared optimizer. If it updates this model, backend and strategy may change both."""
        strategy, backend = accelerator.strategy, accelerator.backend
        if optimizer in self.optimizers or not strategy.parameter_ids(optimizer) & self.parameters:
            return
        self.optimizers.append(optimizer)
        if self.evidence:
            backend.another_optimizer(self.model, optimizer)
        elif self.layers:
            strategy.after_prepare(accelerator, self.model, optimizer)
            self.skipped += backend.after_prepare(accelerator, self.model, optimizer)
            self.parameters = set(map(id, self.model.parameters()))
            self.evidence = Evidence(accelerator, self.model, self.optimizers, self.layers, self.skipped)


def trains(argument):
    """Whether an argument of `prepare` is a model that is not prepared yet and has trainable parameters."""
    fresh = isinstance(argument, nn.Module) and not getattr(argument, "_is_accelerate_prepared", False)
    return fresh and any(parameter.requires_grad for parameter in argument.parameters())
