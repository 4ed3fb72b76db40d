"""The numerics of torchao's Float8Linear and MXFP8Linear and of TransformerEngine's te.Linear in software, written from
their definitions, for a rehearsal on a CPU.

Every operand of every product is rounded to exactly the values that FP8 has under its scale.
bf16 can hold each of these values, so one bf16 product does the arithmetic. Its sum is rounded before the scale and
after it, a GPU's once, which differs where the scale is no power of two. FP4 has three parts, described at NVFP4.

recipe               scales: input and grad_output, weight   formats                    power of two
tensorwise (torchao) one, from its own amax                  e4m3, gradients e5m2       no
rowwise (torchao)    one per row of each product             e4m3                       yes
rowwise_with_gw_hp   the same; weight gradient in bf16       e4m3                       yes
delayed (TE)         one, from a history of amaxes           HYBRID or E4M3             no
current (TE)         one, from its own amax                  HYBRID or E4M3             no
block (TE)           1 x 128 values, 128 x 128 values        E4M3 (TE's own) or HYBRID  yes
mxfp8 (TE, torchao)  1 x 32 values along each product's sum  E4M3                       yes, E8M0
mxfp8_with_gw_hp     the same; weight gradient in bf16       E4M3                       yes, E8M0
mxfp4 (torchao)      as mxfp8                                E2M1                       yes, E8M0
nvfp4 (TE)           1 x 16 values, and one; weight 16 x 16  E2M1                       no, E4M3 and fp32

Sources: torchao 0.18 (float8, prototype/moe_training/mxfp8_linear.py, prototype/mx_formats), TransformerEngine 2.20
(DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling and its kernel in
common/CuTeDSL/cast/mxfp8, NVFP4BlockScaling and pytorch/custom_recipes/reference_nvfp4.py).
The FP8 numbers themselves are amp8's.
"""

import abc
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from amp8 import rounding, scaling
from amp8.coded import refuse_a_derivative, refuse_transformed
from amp8.compiled import output
from amp8.scaling import E2M1, E4M3, E5M2
from faithful.backends.base import Backend
from faithful.backends.linear import (
    in_bf16,
    in_fp8,
    keep_state_apart,
    linears_to_convert,
    size_multiple,
    skipped_linears,
    unlike_default,
)
from faithful.config import fp8
from faithful.config.keys import FLOAT8

Tile = tuple[int | None, int | None]
Codes = tuple[torch.Tensor, torch.Tensor | None]  # (codes, scale), see Rounding.operand


class Tiles(NamedTuple):
    """The block of values (rows, columns) that shares a scale; None means the whole dimension. Each product sums over
    another dimension and needs scales that fit it, so an operand is rounded separately for each product."""

    input: Tile  # of input [tokens, in] for the output, and of grad_output [tokens, out] for grad_input
    weight: Tile  # of weight [out, in] for the output
    weight_for_grad_input: Tile
    grad_weight: Tile | None  # of input and grad_output for grad_weight; None: that product is not FP8

    def of(self, which: int, product: str) -> Tile | None:
        """See Rounding."""
        if product == "wgrad":
            return self.grad_weight
        return self.input if which != 1 else self.weight if product == "fprop" else self.weight_for_grad_input


MX = 32  # the values of a block whose scale is an E8M0 exponent (OCP Microscaling Formats)
TILES = {
    "rowwise": Tiles((1, None), (1, None), (None, 1), (None, 1)),
    "rowwise_with_gw_hp": Tiles((1, None), (1, None), (None, None), None),
    "block": Tiles((1, 128), (128, 128), (128, 128), (128, 1)),
    "mxfp8": Tiles((1, MX), (1, MX), (MX, 1), (MX, 1)),
    "mxfp8_with_gw_hp": Tiles((1, MX), (1, MX), (MX, 1), None),
    "mxfp4": Tiles((1, MX), (1, MX), (MX, 1), (MX, 1)),
}
NV = 16  # the values of a block whose scale is E4M3
RECIPES = tuple(dict.fromkeys((*fp8.TorchAORules.levels, *fp8.TransformerEngineRules.levels)))
FORMATS = {"HYBRID": E5M2, "E4M3": E4M3}  # of the gradients
GRAD_DTYPES: dict[str, scaling.Number] = {  # where none is chosen
    "tensorwise": E5M2, "rowwise": E4M3, "rowwise_with_gw_hp": E4M3, "mxfp8": E4M3, "mxfp8_with_gw_hp": E4M3,
    "mxfp4": E2M1,
}  # fmt: skip
PACKAGES: dict[str | None, str] = {"ao": "torchao", "te": "TransformerEngine"}


Formats = tuple[scaling.Number, scaling.Number, scaling.Number]  # of input, weight and grad_output


@dataclass(frozen=True, kw_only=True)
class Rounding(abc.ABC):
    """How a layer rounds the operands of its products: `which` is 0 for the input, 1 for the weight, 2 for grad_output;
    product: fprop, dgrad or wgrad. Each operand is in two of them."""

    formats: Formats

    def once(self, which: int) -> bool:
        """Whether both products of an operand have the same codes."""
        return False

    @abc.abstractmethod
    def operand(self, which: int, product: str, x: torch.Tensor, *state: Any) -> Codes:
        """(codes, scale) of `x` [rows, columns], with the values codes / scale. scale: 0-d, or None if the codes are
        the values. state: see EmulatedLinear.state."""


@dataclass(frozen=True, kw_only=True)
class Tensorwise(Rounding):
    """One scale per tensor: from the history if there is one (delayed), else from the tensor itself."""

    tiny: float  # the least amax

    def once(self, which: int) -> bool:
        return True

    def operand(self, which: int, product: str, x: torch.Tensor, *state: torch.Tensor) -> Codes:
        amax, dtype = scaling.amax(x), cast(torch.dtype, self.formats[which])
        if state:
            history, scales = state
            scale = scales[which].clone()  # a copy: the backward pass needs this value after the buffer changed
            scaling.record_(history, amax, which)
        else:
            scale = torch.full_like(amax, scaling.dtype_max(dtype)) / amax.clamp(min=self.tiny)
            scale = scale.clamp(max=scaling.FP32_MAX)
        return scaling.round_codes(x, scale, dtype), scale


@dataclass(frozen=True, kw_only=True)
class Tiled(Rounding):
    """One power-of-two scale per tile. Then dequantised values are bf16 values too, and the product needs no scale."""

    tiny: float
    tiles: Tiles
    floor: bool = False  # MX scales by OCP's rule
    weight_in_bf16: bool = False  # rounded from its bf16 values, as torchao's MX layers do

    def once(self, which: int) -> bool:
        return which == 1 and self.tiles.weight == self.tiles.weight_for_grad_input

    def operand(self, which: int, product: str, x: torch.Tensor, *state: Any) -> Codes:
        x, tile = self.block(which, product, x)
        return (_rounded(x, self.formats[which], tile, self.tiny, self.floor) if tile else x), None

    def block(self, which: int, product: str, x: torch.Tensor) -> tuple[torch.Tensor, Tile | None]:
        """(what is rounded, its tile) of an operand."""
        if self.weight_in_bf16 and which == 1:
            x = x.to(torch.bfloat16)
        return x, self.tiles.of(which, product)

    def scales(self, which: int, tile: Tile, amax: torch.Tensor) -> torch.Tensor:
        """What values are multiplied by, for the amaxes of their tiles."""
        return _scales(amax, self.formats[which], tile, self.tiny, self.floor)


@dataclass(frozen=True, kw_only=True)
class NVFP4(Rounding):
    """TransformerEngine's NVFP4BlockScaling. Only grad_output is rounded stochastically, and only the operands of wgrad
    are rotated."""

    formats: Formats = (E2M1, E2M1, E2M1)
    hadamard: bool = True  # input and grad_output of grad_weight are rotated, in blocks of 16 tokens
    stochastic: bool = True  # grad_output is rounded up or down by chance, so that its mean stays
    square: bool = True  # a scale for 16 x 16 values of the weight, so that both products have the same weight

    def once(self, which: int) -> bool:
        return which == 1 and self.square

    def operand(self, which: int, product: str, x: torch.Tensor, *state: Any) -> Codes:
        return _nvfp4(*self.block(which, product, x, *state))

    def block(
        self, which: int, product: str, x: torch.Tensor, seed: int | None
    ) -> tuple[torch.Tensor, Tile, int | None]:
        """(what is rounded, its tile, its seed) of an operand."""
        if which == 1:
            return x, (NV, NV) if self.square else (1, NV) if product == "fprop" else (NV, 1), None
        seed = seed if which == 2 else None
        if product != "wgrad":
            return x, (1, NV), seed
        return _hadamard(x) if self.hadamard else x, (NV, 1), None if seed is None else rounding.mixed(seed)

    def scales(self, which: int, tile: Tile, amax: torch.Tensor) -> torch.Tensor:
        """What values are multiplied by, for the amaxes of their tiles."""
        return _nvfp4_scales(amax)[2]


class Emulated(Backend):
    kinds = {"faithful.EmulatedLinear": (1, 0)}
    any_number_of_processes = True  # delayed scaling has the largest values of all of them

    @property
    def name(self) -> str:
        return f"{PACKAGES[self.plan.backend]} {self.plan.level}{unlike_default(self.plan.fp8_options)}"

    @property
    def eager_in_eval(self) -> bool:  # pyrefly: ignore[bad-override]
        return self.plan.backend == "ao"

    def arguments(self) -> dict[str, Any]:
        return in_bf16()

    def convert(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[tuple[str, str]]:
        plan = self.plan
        skipped = skipped_linears(model, plan.skip, size_multiple(plan.level))
        names = linears_to_convert(model, skipped)
        if names:
            options = {} if plan.level in FLOAT8 else plan.fp8_options
            convert(model, str(plan.level), names, **options)
            # Each rank records its own amaxes. DDP would overwrite them with rank 0's before they are reduced.
            # pyrefly: ignore[bad-argument-type]
            model._ddp_params_and_buffers_to_ignore = [name for name, _ in model.named_buffers() if ".fp8_" in name]
        return skipped

    def after_backward(self, model: nn.Module) -> None:
        if self.plan.level in ("delayed", "nvfp4"):  # TransformerEngine updates its scales after every micro-batch
            update_scales(model)


def convert(
    model: nn.Module,
    recipe: str,
    names: Collection[str] | None = None,
    *,
    fp8_format: str = "HYBRID",
    margin: int = 0,
    amax_history_len: int = 1024,
    amax_compute_algo: str = "max",
    disable_rht: bool = False,
    disable_stochastic_rounding: bool = False,
    disable_2d_quantization: bool = False,
    scale_calculation_mode: str | None = None,
) -> None:
    """Turns nn.Linear layers into EmulatedLinear, in place: each stays the same object with the same Parameters, so
    optimizers, tied weights, hooks and state_dict keys are untouched.

    recipe: a name from the table above. names: of the layers, or None for all. `fp8_format` is for TE's recipes but
    mxfp8 and nvfp4; the next three for "delayed", and three for "nvfp4". scale_calculation_mode: torchao's, for MX
    recipes: "rceil" or "floor", which is OCP's rule; None is TE's mxfp8, which rounds a weight from its own values,
    where torchao rounds it from those of the input's dtype. config/fp8.py has refused what there is not.
    """
    dtype = E2M1 if recipe == "mxfp4" else E4M3
    formats = (dtype, dtype, GRAD_DTYPES.get(recipe, FORMATS[fp8_format]))
    tiny = 1e-12 if recipe in FLOAT8 else 0.0  # torchao takes no amax for smaller
    how: Rounding = Tensorwise(formats=formats, tiny=tiny)
    if recipe in TILES:
        floor, of_torchao = scale_calculation_mode == "floor", scale_calculation_mode is not None
        how = Tiled(formats=formats, tiny=tiny, tiles=TILES[recipe], floor=floor, weight_in_bf16=of_torchao)
    elif recipe == "nvfp4":
        how = NVFP4(
            hadamard=not disable_rht, stochastic=not disable_stochastic_rounding, square=not disable_2d_quantization
        )
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or (names is not None and name not in names):
            continue
        module.__class__ = EmulatedLinear  # in place: the module and its parameters stay the same objects
        module = cast(EmulatedLinear, module)
        module.recipe, module.rounding, module.fp8 = recipe, how, True
        keep_state_apart(module)
        if recipe == "nvfp4":
            module.number = zlib.crc32(name.encode())
            module.register_buffer("fp8_backwards", torch.zeros((), dtype=torch.int64))
        if recipe == "delayed":
            module.margin, module.amax_compute_algo = margin, amax_compute_algo
            zeros = torch.zeros(amax_history_len, 3, device=module.weight.device)
            module.register_buffer("fp8_amax_history", zeros)
            module.register_buffer("fp8_scale", torch.ones_like(zeros[0]))


class EmulatedLinear(nn.Linear):
    """A Linear whose three products take FP8 operands. Made by `convert`, never by its constructor.

    Input [..., in_features], output [..., out_features], in the autocast dtype where autocast is on. FP8 is for
    training: where `in_fp8` says so, and while `fp8` is set. Elsewhere this is F.linear. Any number of tokens is
    allowed: hardware takes multiples of 8, 16 or 32, but padding with rows of zeros changes nothing.

    Delayed scaling keeps its state in the buffers `fp8_amax_history` [amax_history_len, 3] and `fp8_scale` [3], for
    input, weight and grad_output. Checkpoints hold them, so that a resumed run is the same run; `state_dict` does not.
    NVFP4 counts the backward passes in `fp8_backwards` for its random numbers: see `seed`.
    """

    recipe: str
    rounding: Rounding
    fp8: bool
    number: int  # a hash of the layer's name
    fp8_backwards: torch.Tensor
    margin: int
    amax_compute_algo: str
    fp8_amax_history: torch.Tensor
    fp8_scale: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.fp8 and in_fp8(self, input)):
            return F.linear(input, self.weight, self.bias)
        refuse_transformed(f"a layer {tuple(self.weight.shape)}", input, self.weight)
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        tokens = input.reshape(-1, self.in_features)
        out = _Products.apply(tokens, self.weight, self.bias, self.rounding, *self.state())
        return out.view(*input.shape[:-1], self.out_features)

    def state(self) -> tuple[Any, ...]:
        """What changes from step to step, for Rounding.operand."""
        if self.recipe == "delayed":
            return self.fp8_amax_history, self.fp8_scale
        return (self.seed(),) if self.recipe == "nvfp4" else ()

    def seed(self) -> int | None:
        """Of the random numbers of the next backward pass, or None if there are none: a hash of the seed that this
        process has given to torch, its rank, the layer and the number of backward passes. Checkpoints hold the first
        and the last, so a resumed run has the same numbers; and no other random number changes."""
        if not cast(NVFP4, self.rounding).stochastic:
            return None
        hashed: int = 0
        there = torch.distributed.is_available() and torch.distributed.is_initialized()
        seed = torch.initial_seed() + (torch.distributed.get_rank() << 32 if there else 0)
        for number in (seed, seed >> 32, self.number, int(self.fp8_backwards)):
            hashed = rounding.mixed((hashed + number) & rounding.MASK)
        return hashed

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "EmulatedLinear":
        """Moves with the model, but stays fp32: `model.bfloat16()` must not round the scales."""
        kept = {name: buffer for name, buffer in self._buffers.items() if name.startswith("fp8_")}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            # pyrefly: ignore[missing-attribute]
            self._buffers[name] = buffer.to(self._buffers[name].device)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, emulated FP8 {self.recipe}"


@torch.no_grad()
def update_scales(model: nn.Module) -> None:
    """Updates delayed scaling: stores the new amaxes of all layers in their histories and computes the next scales.
    Call it after each backward, as TE itself does, or after each optimizer step. NVFP4 counts these calls. With other
    recipes it does nothing.

    If torch.distributed is initialised, the amaxes are the maximum over all ranks, by one all-reduce of 12 bytes per
    layer.
    """
    counts = [m.fp8_backwards for m in model.modules() if isinstance(m, EmulatedLinear) and m.recipe == "nvfp4"]
    if counts:
        torch._foreach_add_(counts, 1)
    layers = [m for m in model.modules() if isinstance(m, EmulatedLinear) and m.recipe == "delayed"]
    if not layers:
        return
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        amaxes = torch.stack([m.fp8_amax_history[0] for m in layers])
        torch.distributed.all_reduce(amaxes, torch.distributed.ReduceOp.MAX)
        torch._foreach_copy_([m.fp8_amax_history[0] for m in layers], list(amaxes.unbind()))
    # All in one go: each is a dozen operators on few numbers. `convert` has given all layers the same options.
    first, histories, scales = layers[0], [m.fp8_amax_history for m in layers], [m.fp8_scale for m in layers]
    history, scale = torch.stack(histories, 1), torch.stack(scales)
    fp8_max = scale.new_tensor([scaling.dtype_max(dtype) for dtype in first.rounding.formats])
    scaling.update_delayed_(history, scale, fp8_max, first.margin, first.amax_compute_algo)
    torch._foreach_copy_(histories, list(history.unbind(1)))
    torch._foreach_copy_(scales, list(scale.unbind()))


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: Rounding, *state: Any
    ) -> torch.Tensor:
        x8, x_scale = how.operand(0, "fprop", x, *state)
        w8, w_scale = how.operand(1, "fprop", weight, *state)
        kept_x, kept_w = (x8, x_scale) if how.once(0) else (x, None), (w8, w_scale) if how.once(1) else (weight, None)
        ctx.save_for_backward(*kept_x, *kept_w)
        ctx.state = state  # not saved for backward, because delayed scaling's may change before it
        ctx.rest = how, weight.dtype, bias.dtype if bias is not None else None
        out = _multiply(x8, w8.t(), x_scale, w_scale, x.dtype)
        return output(out if bias is None else out.add_(bias.to(out.dtype)))

    @staticmethod
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_a_derivative()
        x, x_scale, weight, w_scale = ctx.saved_tensors
        how, weight_dtype, bias_dtype = ctx.rest

        def operand(which: int, product: str, kept: Codes) -> Codes:
            return kept if how.once(which) else how.operand(which, product, kept[0], *ctx.state)

        kept = how.operand(2, "dgrad", grad, *ctx.state) if how.once(2) else (grad, None)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            (g8, g_scale), (w8, w_scale) = operand(2, "dgrad", kept), operand(1, "dgrad", (weight, w_scale))
            dx = _multiply(g8, w8, g_scale, w_scale, grad.dtype)
        if ctx.needs_input_grad[1]:
            (g8, g_scale), (x8, x_scale) = operand(2, "wgrad", kept), operand(0, "wgrad", (x, x_scale))
            dw = _multiply(g8.t(), x8, g_scale, x_scale, grad.dtype).to(weight_dtype)
        if ctx.needs_input_grad[2]:
            db = grad.sum(0).to(bias_dtype)
        return dx, dw, db, None, *(None for _ in ctx.state)


def _rounded(x: torch.Tensor, dtype: scaling.Number, tile: Tile, tiny: float, floor: bool = False) -> torch.Tensor:
    """Rounds `x` [rows, columns] to the values of `dtype` under one scale per tile. Returns bf16."""
    if not x.numel():  # an expert that gets no token
        return x.to(torch.bfloat16)
    blocks, info, mx = _blocks(x, tile), scaling.info(dtype), MX in tile
    scale = _scales(scaling.amax(blocks, (1, 3)), dtype, tile, tiny, floor)

    def rounded(piece: torch.Tensor, scale: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        y = piece.to(torch.float32, copy=True).mul_(scale)
        if mx:
            y.clamp_(-info.max, info.max)  # an infinity; but for OCP's rule nothing else saturates
        return scaling.round_to_grid(y, info.smallest_normal, dtype).mul_(inverse)

    return _piece_by_piece(rounded, x, blocks, scale, scale.reciprocal())


def _scales(amax: torch.Tensor, dtype: scaling.Number, tile: Tile, tiny: float, floor: bool) -> torch.Tensor:
    """What the values of each tile are multiplied by, for its amax."""
    if MX in tile:
        return scaling.e8m0_scale(amax, dtype, floor)
    return scaling.power_of_two_scale(amax.clamp(min=tiny), dtype)


def _blocks(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """`x` [rows, columns] as [tiles, rows of a tile, tiles, columns of a tile], filled up with zeros."""
    rows, columns = (size or full for size, full in zip(tile, x.shape, strict=True))
    m, n = x.shape
    padded = F.pad(x, (0, -n % columns, 0, -m % rows)) if m % rows or n % columns else x
    return padded.reshape(-1, rows, padded.shape[1] // columns, columns)


def _piece_by_piece(
    rounded: Callable[..., torch.Tensor], x: torch.Tensor, blocks: torch.Tensor, *others: torch.Tensor
) -> torch.Tensor:
    """rounded(blocks, *others), elementwise, as bf16 in the shape of `x`, in pieces that stay in the cache. others:
    broadcastable to the blocks."""
    if torch.compiler.is_compiling():
        out = rounded(blocks, *others).to(torch.bfloat16)
    else:
        out = torch.empty(blocks.shape, dtype=torch.bfloat16, device=x.device)
        dim, pieces = int(len(blocks) == 1), max(1, blocks.numel() // scaling.PIECE)
        parts = (t.expand(blocks.shape).chunk(pieces, dim) for t in (blocks, *others, out))
        for piece, *rest, codes in zip(*parts, strict=True):
            codes.copy_(rounded(piece, *rest))
    m, n = x.shape
    return out.view(-1, blocks.shape[2] * blocks.shape[3])[:m, :n]


def _nvfp4(x: torch.Tensor, tile: Tile, seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [rows, columns] in NVFP4: (codes, scale), with the values codes / scale. codes: FP4's numbers times the E4M3
    scale of their tile, as bf16, which holds each such product exactly. scale: 0-d, of the whole tensor. seed: of the
    random numbers if it is rounded stochastically."""
    if not x.numel():
        return x.to(torch.bfloat16), x.new_ones((), dtype=torch.float32)
    blocks = _blocks(x, tile)
    scale, block, inverse = _nvfp4_scales(scaling.amax(blocks, (1, 3)))
    noise = () if seed is None else (rounding.random_noise(blocks.numel(), seed, device=x.device).view(blocks.shape),)

    def rounded(piece: torch.Tensor, block: torch.Tensor, inverse: torch.Tensor, *noise: torch.Tensor) -> torch.Tensor:
        y = piece.to(torch.float32, copy=True).mul_(inverse)
        if noise:
            y = rounding.round_stochastically(y, E2M1, *noise)
        else:
            y = scaling.round_to_grid(y.clamp_(-E2M1.max, E2M1.max), E2M1.smallest_normal, E2M1)
        return y.mul_(block)

    return _piece_by_piece(rounded, x, blocks, block, inverse, *noise), scale


def _nvfp4_scales(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scale of the tensor, scales of its tiles, what a value is multiplied by) for the amaxes of the tiles, rounded
    where TransformerEngine rounds."""
    top = scaling.dtype_max(E4M3)
    scale = torch.full_like(amax.amax(), top * E2M1.max) / amax.amax()
    finite = torch.where(scale == 0, 1.0, scale.clamp(max=scaling.FP32_MAX))  # of an infinity, of zeros
    block = (amax * (finite * (1 / E2M1.max))).clamp_(max=top)
    block = scaling.round_to_grid(block, scaling.info(E4M3).smallest_normal, E4M3)
    return (
        scale.clamp(max=scaling.FP32_MAX),
        block,
        (block * finite.reciprocal()).reciprocal_().clamp_(max=scaling.FP32_MAX),
    )


SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # random once, in TransformerEngine
# Sylvester's matrix of 16 x 16 with these signs, and of length 1: a row for each value that goes in
HADAMARD = [[sign * (-1) ** (i & j).bit_count() / 4 for j in range(NV)] for i, sign in enumerate(SIGNS)]


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, columns], filled up with zeros to blocks of 16 tokens, each of them rotated by a Hadamard matrix
    with random signs. An outlier becomes 16 values of its quarter, and a product that sums over the tokens stays."""
    blocks = F.pad(x, (0, 0, 0, -x.shape[0] % NV)).view(-1, NV, x.shape[1])
    with torch.autocast(x.device.type, enabled=False):
        return (x.new_tensor(HADAMARD).t() @ blocks).view(-1, x.shape[1])


def _multiply(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor | None, b_scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The product of operands. None: the codes are the values."""
    if a_scale is not None and b_scale is not None:
        return scaling.product(a, b, a_scale, b_scale, dtype, pad_inner=True)
    operand = torch.float32 if dtype == torch.float32 else torch.bfloat16
    with torch.autocast(a.device.type, enabled=False):
        return (a.to(operand) @ b.to(operand)).to(dtype)
