"""Compares FP8 layers with high precision: the rounding error of each tensor and product, and a layer without rounding.

The names follow TransformerEngine's debug features where they fit: underflows% is the share of nonzero values that
become 0, overflows% the share of values clipped to the format's largest value.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from amp8 import fp4, linear as levels, optimizer as adam, recipes, scaling
from faithful.backends import emulation
from faithful.models.layers import kind
from faithful.strategies.base import torch_optimizer
from faithful.tensors.names import plain_names, unwrapped

if TYPE_CHECKING:
    from faithful.accelerator import Accelerator
    from faithful.evidence.evidence import Evidence

TENSORS = ("input", "weight", "gradient")
GEMMS = ("fprop", "dgrad", "wgrad")

Layer = emulation.EmulatedLinear | levels.FP8Linear
Rounded = tuple[torch.Tensor, torch.Tensor | None, scaling.Number]  # see `rounded`
Rows = dict[str, list[float]]  # of a layer: {what: its value at each step}


def layers_of(model: nn.Module) -> dict[str, Layer]:
    """{name: layer} of all FP8 layers, with the names of the unconverted model."""
    kinds = ("faithful.EmulatedLinear", "amp8.FP8Linear", "amp8.FP8Conv1D")
    modules = plain_names(unwrapped(model).named_modules())
    return {name: layer for name, layer in modules if kind(layer) in kinds}  # pyrefly: ignore[bad-return]


def rounded(layer: Layer, which: int, x: torch.Tensor, for_gemm: str) -> Rounded:
    """Rounds `x` [rows, columns] like the layer does. Returns the values in fp32, the scale, of blocks one for each
    value, or None of what is not rounded, and the format. which: 0 input, 1 weight, 2 output gradient."""
    if isinstance(layer, levels.FP8Linear):
        if of_fp4(layer) and (which, for_gemm) != (0, "wgrad"):
            return rounded_to_fp4(layer, which, x)
        if which == 1:
            codes = levels.fp8_weight(layer.codes, layer.weight_scale, False)
            scale = levels.scale_of_operand(layer.codes, layer.weight_scale)
            value = scaling.dequantize(codes, scale)
            return value.t() if layer.transposed else value, scale, scaling.E4M3
        slot = which // 2
        dtype = (scaling.E4M3, layer.recipe.gradient_format)[slot]
        scale = levels.cast_scale(scaling.amax(x), layer.scale[slot], layer.updates[slot], dtype, layer.recipe.window)
        return scaling.dequantize(scaling.quantize(x, scale, dtype), scale), scale, dtype
    how, state = layer.rounding, layer.state()
    dtype = how.formats[which]
    if layer.recipe == "delayed":  # whose operand() would record the amax once more
        scale = layer.fp8_scale[which].clone()
        codes = scaling.round_codes(x, scale, dtype)  # pyrefly: ignore[bad-argument-type]
        return codes.float() / scale, scale, dtype
    codes, scale = how.operand(which, for_gemm, x, *state)
    values = codes.float() if scale is None else codes.float() / scale
    if isinstance(how, emulation.Tiled | emulation.NVFP4):
        x, tile, *_ = how.block(which, for_gemm, x, *state)
        scale = None if tile is None else of_each(x, tile, functools.partial(how.scales, which))
    return values, scale, dtype


def of_fp4(layer: Layer) -> bool:
    return isinstance(layer, levels.FP8Linear) and isinstance(layer.recipe, recipes.FP4)


def rounded_to_fp4(layer: levels.FP8Linear, which: int, x: torch.Tensor) -> Rounded:
    """`rounded` of a layer whose recipe is MS-AMP's FP4. Its output gradient is divided by the weight's scales before
    it is rounded to FP8."""
    w4, w_scale, *_ = fp4.of_weight(layer.codes, layer.weight_scale, layer.transposed)
    if which == 1:
        value = w4.float() / w_scale
        return value.t() if layer.transposed else value, None, scaling.E2M1
    if which == 0:
        a, scale = fp4.of_input(x, layer.recipe.clamped)  # pyrefly: ignore[missing-attribute]
        return a.float() / scale, None, scaling.E2M1
    columns, dtype, window = w_scale.view(1, -1), layer.recipe.gradient_format, layer.recipe.window
    x = x / columns
    scale = levels.cast_scale(scaling.amax(x), layer.scale[1], layer.updates[1], dtype, window)
    return scaling.dequantize(scaling.quantize(x, scale, dtype), scale) * columns, None, dtype


def of_each(x: torch.Tensor, tile: emulation.Tile, scales: Callable[..., torch.Tensor]) -> torch.Tensor:
    """What each value of `x` is multiplied by before it is rounded."""
    blocks = emulation._blocks(x, tile)
    return (
        scales(tile, scaling.amax(blocks, (1, 3)))
        .expand(blocks.shape)
        .reshape(-1, blocks.shape[2] * blocks.shape[3])[: x.shape[0], : x.shape[1]]
    )


class Looking:
    """Measures each layer while the script trains, on this process's share of the batch. `rows`: one per step."""

    def __init__(self, layers: dict[str, Layer], evidence: "Evidence") -> None:
        self.layers, self.evidence, self.hooks = layers, evidence, []
        self.rows: dict[str, Rows] = {name: {} for name in layers}
        self.now: dict[str, dict[str, float]] = {name: {} for name in layers}
        for name, layer in layers.items():
            self.hooks.append(layer.register_forward_hook(self.forward_of(name, layer)))
        self.targets: dict[int, str] = {}
        self.undo = contextlib.ExitStack()
        if hasattr(torch_optimizer(evidence.optimizers[0]), "model_state"):
            self.undo.enter_context(watched_adam(self.updated))

    def forward_of(self, name: str, layer: Layer) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if not (module.training and torch.is_grad_enabled() and output.requires_grad):
                return
            x = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).to(output.dtype)
            weight = true_weight(layer)
            parts = {which: rounded(layer, which, value, "fprop") for which, value in ((0, x), (1, weight))}
            self.tensor(name, "input", x, *parts[0])
            self.tensor(name, "weight", weight, *parts[1])
            self.product(name, "fprop", parts[0][0] @ parts[1][0].t(), x.float() @ weight.t())
            tiled = of_fp4(layer) or isinstance(layer, emulation.EmulatedLinear) and not layer.rounding.once(0)
            output.register_hook(lambda g: self.backward(name, layer, g, x, weight, None if tiled else parts))

        return hook

    @torch.no_grad()
    def backward(
        self,
        name: str,
        layer: Layer,
        g: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        parts: dict[int, Rounded] | None,
    ) -> None:
        g = g.detach().reshape(-1, g.shape[-1])
        low = rounded(layer, 2, g, "dgrad")
        self.tensor(name, "gradient", g, *low)
        how = getattr(layer, "rounding", None)
        if isinstance(how, emulation.NVFP4) and how.stochastic:
            codes, scale = how.operand(2, "dgrad", g, None)  # to nearest
            between = g != 0
            other = between & (codes.float() / cast(torch.Tensor, scale) != low[0])
            add(self.now[name], "gradient_up_or_down", other.sum().item())
            add(self.now[name], "gradient_up_or_down_of", between.sum().item())
        w8 = parts[1] if parts else rounded(layer, 1, weight, "dgrad")
        self.product(name, "dgrad", low[0] @ w8[0], g.float() @ weight)
        x8, g8 = (parts[0], low) if parts else (rounded(layer, 0, x, "wgrad"), rounded(layer, 2, g, "wgrad"))
        self.product(name, "wgrad", g8[0].t() @ x8[0], g.float().t() @ x.float())

    def tensor(
        self,
        name: str,
        which: str,
        x: torch.Tensor,
        low: torch.Tensor,
        scale: torch.Tensor | None,
        dtype: scaling.Number,
    ) -> None:
        nonzero, row = x != 0, self.now[name]
        add(row, f"{which}_elements", x.numel())
        add(row, f"{which}_underflows", (nonzero & (low == 0)).sum().item())
        # A scale of 3 bits may leave FP4's largest value at 6.4. Clipped is what would round to more than 6.
        top = 7.0 if dtype == scaling.E2M1 else scaling.dtype_max(dtype)
        add(row, f"{which}_overflows", 0 if scale is None else (x.float().abs() * scale > top).sum().item())
        row[f"{which}_amax"] = max(row.get(f"{which}_amax", 0.0), scaling.amax(x).item())
        if scale is not None and not scale.dim():
            row[f"{which}_reach"] = top / scale.item()

    def product(self, name: str, gemm: str, low: torch.Tensor, high: torch.Tensor) -> None:
        add(self.now[name], f"{gemm}_error", (low - high).square().sum().item())
        add(self.now[name], f"{gemm}_signal", high.square().sum().item())

    def updated(self, storage: int, counts: dict[str, float]) -> None:
        """Of a piece of one weight's update."""
        if not self.targets:
            for name, layer in self.layers.items():
                if isinstance(layer, levels.FP8Linear):
                    target = layer.codes if layer.master is None else layer.master
                    self.targets[target.untyped_storage().data_ptr()] = name
        name = self.targets.get(storage)
        if name:
            for key, count in counts.items():
                add(self.now[name], key, count)

    def stepped(self) -> None:
        for name, row in self.now.items():
            for key, value in row.items():
                self.rows[name].setdefault(key, []).append(value)
        self.now, self.targets = {name: {} for name in self.layers}, {}

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.undo.close()


def measured(everyone: list[dict[str, Rows]]) -> dict[str, dict[str, Any]]:
    """{layer: its summary} from all processes' rows. Each has a share of the batch and, under O3, of the weights."""
    summaries = {}
    for name in everyone[0]:
        rows: Rows = {}
        for part in everyone:
            for key, values in part[name].items():
                join: Callable[[float, float], float] = max if key.endswith(("_amax", "_reach")) else lambda a, b: a + b
                before = rows.get(key)
                rows[key] = values if before is None else list(map(join, before, values))
        summaries[name] = summary(rows)
    return summaries


def add(row: dict[str, float], key: str, value: float) -> None:
    row[key] = row.get(key, 0) + value


def summary(rows: Rows) -> dict[str, Any]:
    """Summarizes a layer's rows over all steps: shares in percent, errors in dB, and the amaxes at each step."""
    figures: dict[str, Any] = {}
    for which in TENSORS:
        total = sum(rows.get(f"{which}_elements", [0])) or 1
        for what in ("underflows", "overflows"):
            figures[f"{which}_{what}%"] = 100 * sum(rows.get(f"{which}_{what}", [0])) / total
        for what in ("amax", "reach"):
            if f"{which}_{what}" in rows:
                figures[f"{which}_{what}"] = rows[f"{which}_{what}"]
    for gemm in GEMMS:
        signal, error = sum(rows.get(f"{gemm}_signal", [0])), sum(rows.get(f"{gemm}_error", [0]))
        figures[f"{gemm}_error_db"] = 10 * math.log10(error / signal) if signal and error else None
    for what in ("updates_lost", "exp_avg_underflows", "exp_avg_sq_underflows", "gradient_up_or_down"):
        total = sum(rows.get(f"{what}_of", [0]))
        figures[f"{what}%"] = 100 * sum(rows[what]) / total if total else None
    return figures


def true_weight(layer: Layer) -> torch.Tensor:
    """The layer's weight [out, in] in fp32, from the most precise copy there is."""
    if not isinstance(layer, levels.FP8Linear):
        return layer.weight.detach().float()
    if layer.master is not None:
        value = scaling.dequantize(layer.master, layer.master_scale)
    else:
        value = layer.true_weight()
    return value.t() if layer.transposed else value


@contextlib.contextmanager
def watched_adam(report: Callable[[int, dict[str, float]], None]) -> Iterator[None]:
    """Within it, amp8's Adam calls report(storage of the weight, {what: count}) for each piece that it updates."""
    amp8s_slice, amp8s_store = adam.adam_slice, adam.store
    values: list[torch.Tensor] = []

    def store(target: torch.Tensor, value: torch.Tensor, *rest: Any) -> None:
        values.append(value)
        amp8s_store(target, value, *rest)

    def adam_slice(
        weight: torch.Tensor,
        gradient: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        copy: torch.Tensor | None,
        numbers: Any,
        place: Any,
        *rest: Any,
    ) -> torch.Tensor:
        old = weight.float() * numbers[adam.W_IN]
        values.clear()
        amax = amp8s_slice(weight, gradient, m, v, copy, numbers, place, *rest)
        new, moved = weight.float() / numbers[adam.W_OUT], values[0] != old
        lost = moved & (new == old) if place is None else moved.new_zeros(())
        counts = {"updates_lost": lost.sum().item(), "updates_lost_of": moved.sum().item()}
        for name, stored, value in (("exp_avg", m, values[1]), ("exp_avg_sq", v, values[2])):
            nonzero = value != 0
            counts |= {
                f"{name}_underflows": (nonzero & (stored.float() == 0)).sum().item(),
                f"{name}_underflows_of": nonzero.sum().item(),
            }
        report(weight.untyped_storage().data_ptr(), counts)
        return amax

    no_kernel = SimpleNamespace(fits=lambda device: False)
    with mock.patch.multiple(adam, adam_slice=adam_slice, store=store, kernels=no_kernel):
        yield


# ------------------------------------------------------------------------------------------- a layer without rounding


@contextlib.contextmanager
def high_precision(layers: Iterable[Layer], optimizer: torch.optim.Optimizer) -> Iterator[list["Weight"]]:
    """Within it, these layers compute without FP8, as if they were in a skip list. Yields the objects whose `step` must
    be called after each update: a weight converted by MS-AMP's levels then has an fp32 copy with its own fp32 Adam."""
    shadows = [Weight(layer, optimizer) for layer in layers if isinstance(layer, levels.FP8Linear)]
    plain = [layer for layer in layers if not isinstance(layer, levels.FP8Linear)]
    for layer in plain:
        layer.fp8 = False
    try:
        yield shadows
    finally:
        for layer in plain:
            layer.fp8 = True
        for shadow in shadows:
            shadow.end()


class Weight:
    """An amp8 layer's weight in fp32, with an fp32 Adam that starts from the layer's own moments."""

    def __init__(self, layer: levels.FP8Linear, optimizer: torch.optim.Optimizer) -> None:
        self.layer = layer
        self.gradient: torch.Tensor | None = None
        state, group = optimizer.state.get(layer.parameter, {}), next(
            group for group in optimizer.param_groups if any(p is layer.parameter for p in group["params"])
        )  # fmt: skip
        value = true_weight(layer)
        parts = [value.t().contiguous() if layer.transposed else value.clone()]
        for key in ("exp_avg", "exp_avg_sq"):
            codes = state.get(key)
            low = codes is not None and f"{key}_scale" in state
            moment = torch.zeros_like(parts[0]) if codes is None else codes.float().clone()
            parts.append(moment / state[f"{key}_scale"] if low else moment)
        shared = layer.gradient.state
        taken = torch.as_tensor(float(state.get("step", 0.0)))
        if shared.sharded and shared.world > 1:  # O3: only the owner has them
            owner = dist.get_global_rank(shared.group, layer.gradient.owner)  # pyrefly: ignore[bad-argument-type]
            for part in (*parts, taken):
                dist.broadcast(part, owner, group=shared.group)
        self.parameter, self.group, self.shared = nn.Parameter(parts[0]), group, shared
        options = {
            key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")
        }
        self.adam = torch.optim.Adam([self.parameter], **options)
        self.adam.state[self.parameter] = {"step": taken, "exp_avg": parts[1], "exp_avg_sq": parts[2]}
        self.hook = layer.ports[torch.float32].register_hook(self.receive)
        layer.forward = self.forward

    def receive(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient.clone() if self.gradient is None else self.gradient + gradient

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        layer, device = self.layer, input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        weight = (self.parameter.detach() + layer.ports[torch.float32]).to(dtype)
        bias = None if layer.bias is None else layer.bias.to(dtype)
        return F.linear(input.to(dtype), weight.t() if layer.transposed else weight, bias)

    def step(self, accelerator: "Accelerator") -> None:
        if self.gradient is None:
            return
        if self.shared.world > 1:
            dist.all_reduce(self.gradient, group=self.shared.group)
            self.gradient /= self.shared.world
        norm, most = accelerator.steps.norm, getattr(accelerator, "max_norm", math.inf)
        self.parameter.grad = self.gradient * min(1.0, most / (norm + 1e-6))  # pyrefly: ignore[unsupported-operation]
        self.adam.param_groups[0]["lr"] = self.group["lr"]
        self.adam.step()
        self.parameter.grad = self.gradient = None

    def end(self) -> None:
        self.hook.remove()
        self.layer.__dict__.pop("forward", None)
