"""torchao's Float8Linear: dynamic scales, e4m3 forward, e5m2 gradients (tensorwise) or e4m3 (rowwise). And its
MXFP8Linear: a scale for each 32 values, e4m3."""

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from accelerate.utils import AORecipeKwargs
from torch import nn

from faithful.backends.base import Backend
from faithful.backends.linear import (
    in_bf16,
    in_fp8,
    linears_to_convert,
    once_differentiable,
    size_multiple,
    skipped_linears,
    unlike_default,
)
from faithful.config.fp8 import MX
from faithful.config.strategies import STRATEGIES, FSDPRules
from faithful.errors import Refused
from faithful.models.layers import kind
from faithful.strategies.base import Saved, Strategy, torch_optimizer

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

    from faithful.plan import Plan


class TorchAO(Backend):
    """Under FSDP2 Accelerate converts the model to Float8Linear. Its conversion is correct there only, so elsewhere we
    do, and to MXFP8Linear, which it does not know."""

    kinds = {"torchao.Float8Linear": (1, 0), "faithful.Float8Linear": (1, 0), "faithful.MXFP8Linear": (1, 0)}
    eager_in_eval = True
    any_number_of_processes = True

    def __init__(self, plan: "Plan") -> None:
        super().__init__(plan)
        of_fsdp = isinstance(STRATEGIES[plan.strategy], FSDPRules)
        self.by_accelerate = of_fsdp and plan.level not in MX and plan.tp_size == 1
        self.handlers: list[AORecipeKwargs] = []  # Accelerate's, which it converts by
        self.gathered_in_fp8 = plan.fp8_options.get("enable_fsdp_float8_all_gather", False)

    @property
    def name(self) -> str:
        return f"torchao {self.plan.level}{unlike_default(self.plan.fp8_options)}"

    @property
    def eval_precision(self) -> str:
        return "bf16, weights gathered as e4m3" if self.gathered_in_fp8 else "bf16"

    def arguments(self) -> dict[str, Any]:
        self.handlers = [AORecipeKwargs(config=config(self.plan))] if self.by_accelerate else []
        return in_bf16() | {"kwargs_handlers": self.handlers}

    def convert(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[tuple[str, str]]:
        skipped = skipped_linears(model, self.plan.skip, size_multiple(self.plan.level) * self.plan.tp_size)
        names = linears_to_convert(model, skipped)
        if self.gathered_in_fp8:
            refuse_uneven(model, sorted(names), self.plan.num_processes // self.plan.replicas)

        def chosen(module: nn.Module, name: str) -> bool:
            return name in names

        if self.by_accelerate:
            self.handlers[0].module_filter_func = chosen
        elif self.plan.level in MX:
            for name in names:
                to_mx(model.get_submodule(name), self.plan)
        elif names:
            from torchao.float8 import convert_to_float8_training

            convert_to_float8_training(model, config=config(self.plan), module_filter_fn=chosen)
            complete(model)
        return skipped

    def after_prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, prepared: set[int]
    ) -> list[tuple[str, str]]:
        complete(model)
        self.another_optimizer(model, optimizer)
        return []

    def another_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Computes the scales of weights gathered in FP8 after each step, in one all-reduce; else each weight needs its
        own in the forward pass. Accelerate does this only for the optimizer that it gets, see strategies/fsdp.py."""
        if self.gathered_in_fp8:
            torch_optimizer(optimizer).register_step_post_hook(lambda *_: scale(model))

    def restore(
        self, strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer | None, parts: Saved
    ) -> None:
        super().restore(strategy, model, optimizer, parts)
        scale(model)  # changes only weights that are gathered in FP8


def refuse_uneven(model: nn.Module, names: list[str], processes: int) -> None:
    """Raises Refused if FP8 shards of these layers differ in size: torchao does not fill them up, as FSDP2 does."""
    rows = {name: model.get_submodule(name).weight.shape[0] for name in names}  # pyrefly: ignore[bad-index]
    uneven = next((name for name in names if rows[name] % processes), None)
    if uneven:
        raise Refused(
            f"{uneven} has {rows[uneven]} rows for {processes} processes, and torchao gathers weights in FP8 only if "
            "all hold as many: set enable_fsdp_float8_all_gather to false in fp8_config, or launch another number"
        )


def config(plan: "Plan") -> "Float8LinearConfig":
    from torchao.float8 import Float8LinearConfig

    options = {key: plan.fp8_options[key] for key in ("enable_fsdp_float8_all_gather", "pad_inner_dim")}
    return replace(Float8LinearConfig.from_recipe_name(str(plan.level)), emulate=plan.emulated, **options)


def complete(model: nn.Module) -> None:
    for module in model.modules():
        if kind(module) == "torchao.Float8Linear":
            module.__class__ = completed(type(module))


@functools.cache  # one for all layers: compiled blocks are alike only if the classes of their layers are
def completed(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of torchao's layer `cls` that computes an evaluation without FP8, and no rows at all, which an expert
    gets that no token is sent to: torchao takes no amax of them. It knows a CPU's autocast, too."""

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if not x.numel() or not in_fp8(self, x):
            return plain_linear(self, x)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return once_differentiable(cls.forward(self, x))

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": __name__})


def to_mx(layer: nn.Module, plan: "Plan") -> None:
    """Makes torchao's MXFP8Linear of a Linear, in place."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    kernels = KernelPreference.EMULATED if plan.emulated else KernelPreference.AUTO
    if kernels == KernelPreference.AUTO and not has_mx_kernels():
        raise Refused(
            "this torchao has no kernels of MXFP8, or they do not fit torch's CUDA (torchao/_C_mxfp8*.so): install a "
            f"torchao that was built for CUDA {torch.version.cuda}, or use {plan.strategy}_fp8"
        )
    layer.__class__ = mx_linear()
    vars(layer).update(
        kernel_preference=kernels,
        scale_calculation_mode=ScaleCalculationMode(plan.fp8_options["scale_calculation_mode"]),
        wgrad_with_hp=str(plan.level).endswith("_with_gw_hp"),
    )


def has_mx_kernels() -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key("torchao::mxfp8_quantize", "CUDA")
    except RuntimeError:  # there is no such operator
        return False


@functools.cache
def mx_linear() -> type[nn.Module]:
    """A subclass of torchao's MXFP8Linear for what its kernels do not take, as they ask for contiguous bf16 and for a
    number of rows (samples times tokens) that is a multiple of 32: weights in fp32, slices, and other numbers of rows,
    which are filled up with zeros. It computes an evaluation without FP8."""
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear, _to_mxfp8_then_scaled_mm

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not x.numel() or not in_fp8(self, x):
            return plain_linear(self, x)
        cast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if cast else x.dtype
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        missing = -len(rows) % size_multiple("mxfp8")
        filled = F.pad(rows, (0, 0, 0, missing)) if missing else rows.contiguous()
        how = self.kernel_preference, self.scale_calculation_mode, self.wgrad_with_hp
        out = _to_mxfp8_then_scaled_mm(filled, self.weight.to(torch.bfloat16), *how)
        out = once_differentiable(out)[: len(rows)].view(*x.shape[:-1], self.out_features).to(dtype)
        return out if self.bias is None else out + self.bias.to(dtype)

    return type(MXFP8Linear.__name__, (MXFP8Linear,), {"forward": forward, "__module__": __name__})


def plain_linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    for name in ("to_original_precision", "_tensor"):  # a weight gathered in FP8; a wrapped weight
        if hasattr(weight, name):
            weight = getattr(weight, name)
            weight = weight() if callable(weight) else weight
    return F.linear(x, weight if torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype), module.bias)


def scale(model: nn.Module) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
