"""TransformerEngine's Linear and LayerNorm, on a GPU. They take over the Parameters, so the optimizer need not change.

The recipe gets every option of the config, unchanged. A model computes in FP8 inside TransformerEngine's autocast, but
not in an evaluation. Delayed scaling keeps a scale and an amax history per tensor, which are not buffers of the
modules. TransformerEngine saves them as a pickle; this file saves them as tensors.
"""

import functools
import importlib
import types
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import nn

from faithful.backends.base import Backend
from faithful.backends.linear import (
    in_bf16,
    in_fp8,
    keep_state_apart,
    once_differentiable,
    size_multiple,
    skipped_linears,
    unlike_default,
)
from faithful.checkpoint import tensor_keys
from faithful.errors import Refused
from faithful.models.blocks import block_names
from faithful.tensors.names import plain_names, unwrapped

if TYPE_CHECKING:
    from faithful.plan import Plan
    from faithful.strategies.base import Saved, Strategy

ROWS = 16  # TransformerEngine needs multiples of 8, or of 16 where cuBLASLt sums over the rows


class TransformerEngine(Backend):
    kinds = {
        "transformer_engine.Linear": (1, 0),
        "transformer_engine.LayerNorm": (0, 1),
        "transformer_engine.LayerNormLinear": (1, 1),  # in models that use these classes themselves
        "transformer_engine.LayerNormMLP": (2, 1),
    }

    @property
    def name(self) -> str:
        return f"TransformerEngine {self.plan.level}{unlike_default(self.plan.fp8_options)}"

    def arguments(self) -> dict[str, Any]:
        return in_bf16()

    def convert(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[tuple[str, str]]:
        plan = self.plan
        multiple = size_multiple(plan.level)
        te, skipped = package(), skipped_linears(model, plan.skip, multiple)
        for parent_name, parent in list(model.named_modules()):
            for child_name, child in list(parent.named_children()):
                name = f"{parent_name}.{child_name}".lstrip(".")
                if type(child) is nn.Linear and name not in dict(skipped):
                    new = te.Linear(
                        child.in_features,
                        child.out_features,
                        bias=child.bias is not None,
                        params_dtype=child.weight.dtype,
                        device=child.weight.device,
                    )
                    new.forward = functools.partial(in_whole_rows, new, max(ROWS, multiple))
                    adopt(parent, child_name, child, new)
                elif last_dimension_norm(child):
                    new = te.LayerNorm(
                        child.normalized_shape[0],
                        eps=child.eps,
                        params_dtype=child.weight.dtype,
                        device=child.weight.device,
                    )
                    adopt(parent, child_name, child, new)
        for module in model.modules():
            if type(module).__module__.startswith("transformer_engine."):
                keep_state_apart(module)
        compute_in_fp8(te, plan, model)
        return skipped

    def tensors(
        self, strategy: "Strategy", model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> dict[str, torch.Tensor]:
        scales = {
            tensor_keys.scales(name): tensor.detach() for name, tensor in plain_names(state(unwrapped(model)).items())
        }
        return super().tensors(strategy, model, optimizer) | scales

    @torch.no_grad()
    def restore(
        self, strategy: "Strategy", model: nn.Module, optimizer: torch.optim.Optimizer | None, parts: "Saved"
    ) -> None:
        saved = cast("Mapping[str, torch.Tensor]", parts)
        rest = {place: part for place, part in saved.items() if tensor_keys.kind(place) != tensor_keys.SCALES}
        super().restore(strategy, model, optimizer, rest)
        for name, tensor in plain_names(state(unwrapped(model)).items()):
            if tensor_keys.scales(name) not in saved:
                raise Refused(f"the checkpoint is of another model: it has no FP8 state of {name}")
            tensor.copy_(saved[tensor_keys.scales(name)])


def package() -> ModuleType:
    """The module `transformer_engine.pytorch`. Raises Refused if it cannot be imported."""
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:  # the last two if a CUDA library is missing
        install = "./launch.sh setup --extra te, or pip install 'accelerate-recipes[te]'"
        raise Refused(f"TransformerEngine cannot be imported ({error}): {install} (docs/fp8.md)") from None


def in_whole_rows(layer: nn.Module, rows: int, x: torch.Tensor) -> torch.Tensor:
    """`layer(x)` for any number of rows (samples times tokens). FP8 products need multiples of `rows`, so rows of zeros
    are appended and removed again. They change no amax, no other row and no gradient. A layer that computes outside FP8
    leaves the model's autocast for it: a frozen part in eval() of a model in train()."""
    forward = functools.partial(type(layer).forward, layer)
    if not in_fp8(layer, x):
        with package().autocast(enabled=False):
            return forward(x)
    there = x.shape[:-1].numel()
    missing = -there % rows if there else rows
    if not missing:
        return once_differentiable(forward(x))
    out = once_differentiable(forward(F.pad(x.reshape(-1, x.shape[-1]), (0, 0, 0, missing))))
    return out[:-missing].view(*x.shape[:-1], out.shape[-1])


def last_dimension_norm(module: nn.Module) -> TypeGuard[nn.LayerNorm]:
    """Whether a module is torch's LayerNorm, or timm's of that name, with weight and bias over the last dimension, as
    te.LayerNorm is. Other subclasses (LayerNorm2d) normalize other dimensions."""
    named = isinstance(module, nn.LayerNorm) and type(module).__name__ == "LayerNorm"
    return named and module.bias is not None and len(module.normalized_shape) == 1


def adopt(parent: nn.Module, name: str, old: nn.Module, new: nn.Module) -> None:
    """Puts `new` in the place of `old`, with its parameters, its hooks and its mode."""
    for key, parameter in old.named_parameters():
        setattr(new, key, parameter)
    for key, value in vars(old).items():
        if "hooks" in key and isinstance(value, dict) and isinstance(vars(new).get(key), dict):
            value.update(vars(new)[key])
            vars(new)[key] = value  # itself, from which handles remove hooks
    setattr(parent, name, new.train(old.training))


def recipe(plan: "Plan") -> Any:
    """TransformerEngine's recipe object, with every option of the config, unchanged."""
    from transformer_engine.common import recipe

    options = dict(plan.fp8_options)
    if "fp8_format" in options:
        options["fp8_format"] = getattr(recipe.Format, options["fp8_format"])
    kinds: dict[str | None, str] = {
        "delayed": "DelayedScaling",
        "current": "Float8CurrentScaling",
        "block": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
        "nvfp4": "NVFP4BlockScaling",
    }
    return getattr(recipe, kinds[plan.level])(**options)


def compute_in_fp8(te: ModuleType, plan: "Plan", model: nn.Module) -> None:
    """Wraps `model.forward` in TransformerEngine's autocast, with FP8 if any part of the model computes in FP8.

    Activation checkpointing computes activations again outside of it. TransformerEngine's own checkpointing enters the
    autocast again, with the scales of the first pass; torch's, which Accelerate would use, does not.
    """
    fp8_recipe = recipe(plan)
    products = {te.Linear: 1, te.LayerNormLinear: 1, te.LayerNormMLP: 2}
    if plan.level == "delayed":
        for module in model.modules():
            if type(module) in products:  # as TransformerEngine does in the first forward pass
                # pyrefly: ignore[bad-argument-type, unsupported-operation]
                module.fp8_meta |= {"recipe": fp8_recipe, "num_gemms": products[type(module)]}
                module.init_fp8_meta_tensors(fp8_recipe)  # pyrefly: ignore[not-callable]
    if plan.ckpt:
        for block in model.modules():
            if type(block).__name__ in (block_names(model) or ()):
                block.forward = functools.partial(te.checkpoint, block.forward, use_reentrant=False)
    forward = model.forward.__func__  # pyrefly: ignore[missing-attribute]

    def in_fp8(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            with te.autocast(enabled=any_in_fp8(self, *args, *kwargs.values()), recipe=fp8_recipe):
                return forward(self, *args, **kwargs)
        except ValueError as error:
            if "FP8 execution requires" not in str(error):
                raise
            raise Refused(
                f"TransformerEngine's blocks take samples x tokens in multiples of {ROWS} in FP8: choose another "
                f"batch size ({error})"
            ) from None

    model.forward = types.MethodType(in_fp8, model)  # a method, so that it is bound anew in a copy of the model


def any_in_fp8(model: nn.Module, *inputs: object) -> bool:
    """Whether any part of the model computes in FP8. A part in train() does in a model in eval(), too."""
    return in_fp8(model, *inputs) or any(part.training for part in model.modules())


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """{name: live tensor} of delayed scaling: the scales of the next step and the amax histories behind them."""
    return {
        f"{name}.{way}.{kind}": getattr(module.fp8_meta[way], kind)  # pyrefly: ignore[bad-index]
        for name, module in model.named_modules()
        for way in ("scaling_fwd", "scaling_bwd")
        for kind in ("scale", "amax_history")
        if hasattr(getattr(module, "fp8_meta", {}).get(way), kind)
    }
