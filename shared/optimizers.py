"""The optimizers of the recipes, by name.

    adamw       torch's: 8 bytes per parameter for its two moments
    sgd         torch's, with momentum 0.9
    adamw_8bit  torchao's: moments of 8 bits, 2 bytes per parameter (Dettmers et al., arXiv:2110.02861)
    adamw_bf16  torchao's, for --dtype bfloat16: weights are rounded stochastically, so small steps are not lost
    adafactor   transformers', set as its Trainer sets it: a factored second moment, no first (arXiv:1804.04235)
    muon        timm's, for the matrices of the blocks, with steps of AdamW's size (arXiv:2502.16982); else AdamW

torchao compiles its step, which needs a C++ compiler where there is no GPU.
"""

from typing import Any

import torch
import transformers

from shared.args import Refused


def optimizer(
    name: str, parameters: list[dict[str, Any]], model: torch.nn.Module, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer of this name. parameters: groups of the model's. device: torch.device of the training."""
    fused, bfloat16 = device.type == "cuda", next(model.parameters()).dtype == torch.bfloat16
    if name == "adamw":
        return torch.optim.AdamW(parameters, fused=fused)
    if name == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9, fused=fused)
    if name == "adafactor":
        return transformers.Adafactor(parameters, scale_parameter=False, relative_step=False)
    if name == "muon":
        from timm.optim import Muon

        return Muon([part for group in parameters for part in in_and_outside_blocks(model, group)])
    try:
        from torchao import optim
    except ImportError:
        raise Refused(f"--optimizer {name} needs torchao: pip install torchao") from None
    if name == "adamw_8bit":
        return optim.AdamW8bit(parameters, bf16_stochastic_round=bfloat16)
    if not bfloat16:
        raise Refused("--optimizer adamw_bf16 rounds bf16 weights stochastically: it needs --dtype bfloat16")
    return optim._AdamW(parameters, bf16_stochastic_round=True)  # its README names it so


def in_and_outside_blocks(model: torch.nn.Module, group: dict[str, Any]) -> list[dict[str, Any]]:
    """Splits a parameter group in two: the matrices of the model's blocks, for Muon, and the rest, for AdamW, with the
    embeddings and the head (Jordan et al., "Muon", 2024)."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in kinds]
    inside = {id(p) for block in blocks for p in block.parameters() if p.ndim >= 2}
    matrices = [p for p in group["params"] if id(p) in inside]
    rest = [p for p in group["params"] if id(p) not in inside]
    return [group | {"params": matrices}, group | {"params": rest, "use_fallback": True}]
