"""What the models of all recipes share. Each lists the class names of its blocks in `_no_split_modules`: FSDP2 shards
the model by them."""

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from shared.args import Refused

Model = TypeVar("Model", bound=torch.nn.Module)


def ready(model: Model, blocks: Iterable[torch.nn.Module], dropout: float) -> Model:
    """Sets the names of the model's blocks, and this rate wherever it has dropout. Returns the model."""
    if blocks:
        model._no_split_modules = sorted({type(block).__name__ for block in blocks})  # pyrefly: ignore[bad-argument-type]
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
        for name in {"attention_dropout", "drop_rate"} & vars(module).keys():  # Llama's attention, ResNet's head
            setattr(module, name, dropout)
    return model


def at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    """Converts 16-bit logits, from FSDP2 or --dtype, to float32 for the loss."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def groups(
    model: torch.nn.Module, learning_rate: float, weight_decay: float, freeze: int = 0, layer_decay: float = 1.0
) -> list[dict[str, Any]]:
    """Parameter groups for the optimizer: all trainable parameters with their learning rate and weight decay. freeze:
    the number of first blocks that stay frozen, with everything before them. layer_decay: each block learns at this
    fraction of the next block's rate; 1 means one rate for all."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [f"{name}." for name, module in model.named_modules() if type(module).__name__ in kinds]
    if freeze > len(blocks):
        raise Refused(f"--freeze {freeze}, but the model has {len(blocks)} blocks")
    head, depth, by_scale = len(blocks) + 1, 0, {}
    for name, parameter in model.named_parameters():
        # what comes before the first block has depth 0, what comes behind it that of the head
        depth = next((i for i, block in enumerate(blocks, 1) if name.startswith(block)), head if depth else 0)
        if freeze and depth <= freeze:
            parameter.requires_grad_(False)
        elif parameter.requires_grad:  # not what LoRA leaves as it was
            by_scale.setdefault(layer_decay ** (head - depth), []).append(parameter)
    return [
        {"params": by_scale[scale], "lr": learning_rate * scale, "weight_decay": weight_decay}
        for scale in sorted(by_scale, reverse=True)  # the logged rate is the first group's
    ]
