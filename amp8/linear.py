"""A Linear layer that computes its three products in FP8 and saves FP8 tensors for its backward pass; on a CPU the
same values in bf16.

    forward    y  = x w^T     e4m3 x e4m3   (fast accumulation)
    backward   dx = dy w      e5m2 x e4m3   (precise accumulation)
               dw = dy^T x    e5m2 x e4m3   (precise accumulation)

dy is e5m2 because gradients need range more than precision; x and w are e4m3 (FP8-LM, arXiv:2310.18313, section 2.1).
x and dy have delayed scales; w has the scale it is stored with.
"""

import copy
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from . import kernels, scaling
from .coded import CodedWeight, CodesRead, codes_of, innermost, refuse_a_derivative, refuse_transformed
from .compiled import output

if TYPE_CHECKING:
    from .convert import State
    from .fsdp import Sharding
    from .gradients import WeightGradient
    from .recipes import Recipe

INPUT, OUTPUT_GRADIENT = 0, 1  # the two slots of a layer's delayed scaling

# FP16 codes reach 65504, and 65504 * 2**-8 = 255.9 fits in e4m3's 448: a weight's FP8 copy needs no amax of its own.
FP16_TO_E4M3 = kernels.FP16_TO_E4M3


class InputCast(NamedTuple):
    """The last cast of an input, kept while the input exists: q, k and v have the same input and need one cast. Layers
    with equal `casts` have cast the same inputs since they were converted, so their scales are equal."""

    input: "weakref.ref[torch.Tensor]"
    version: int  # of the input: a script may change it in place between two layers
    casts: int | tuple[float, ...] | None  # `casts` of the layer that made it, before this cast
    new_casts: int | tuple[float, ...] | None  # and after it
    how: tuple[bool, ...]  # recording, transposed
    state: torch.Tensor  # of that layer
    made: tuple[torch.Tensor | None, ...]


CAST_NUMBERS = itertools.count(1)
Delayed = tuple[torch.Tensor | None, torch.Tensor | None]
Operands = set[tuple[scaling.Number, scaling.Number]]


class FP8Linear(nn.Linear):
    """An nn.Linear, converted in place: same object, same parameters, same names and hooks.

    weight: Parameter [out, in] of *codes*, fp16 or e4m3; the values are `codes / weight_scale`. Reading the weight, or
    `state_dict()`, gives values (amp8/coded.py). A deep copy is a plain layer with these values.
    """

    transposed = False  # the weight is [out, in]
    sharding: "Sharding | None" = None  # under fully_shard: where the weight's rows are
    SCALING = ("weight_scale", "weight_amax", "scaling_state")
    FP8_ATTRS = ("name", "plain_class", "recipe", "exact", "high_precision", "gradient", "operands",
            "keeps_master", "master", "master_scale", "replaced", "ports", "held", "trained", "own",
            "plain_dtype", "cast", "casts", "address")  # fmt: skip
    name: str
    recipe: "Recipe"
    plain_class: type[nn.Module]
    gradient: "WeightGradient"  # soon after `start`
    master: torch.Tensor | None
    master_scale: torch.Tensor  # if there is a master
    held: torch.Tensor  # but under fully_shard
    own: CodedWeight
    ports: dict[torch.dtype, torch.Tensor]
    cast: torch.dtype | None  # to which somebody has cast the layer
    scaling_state: torch.Tensor  # of the delayed scaling of both slots, see scaling.py
    # Of that, for compiled code: a tensor that it changes, in backward too, it would copy there and back.
    address: torch.Tensor | None
    replaced: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor] | None  # see replace

    def start(self, state: "State", exact: bool, keeps_master: bool) -> None:
        """Turns the layer's plain weight into codes and adds its scaling state. Called once, right after the class
        changed."""
        plain = type(self.weight) is nn.Parameter and type(self.weight.data) is torch.Tensor  # estimates have fakes
        device = self.weight.device
        self.recipe, self.exact = state.recipe, exact
        self.high_precision = False
        self.gradient = None  # pyrefly: ignore[bad-assignment]
        self.operands: Operands = set()  # formats of the operands its products had
        self.keeps_master = keeps_master
        # O3, on the rank that owns the weight: fp16 codes and their scale
        self.master = self.master_scale = None  # pyrefly: ignore[bad-assignment]
        # Not buffers: a model has exactly the buffers of the unconverted one, for whoever pairs them with another's.
        self.weight_scale, self.weight_amax = torch.ones((), device=device), torch.zeros((), device=device)
        self.scaling_state = torch.zeros(scaling.HISTORY + state.recipe.history, 2, device=device)
        self.scale.fill_(1)
        self.plain_dtype, self.cast = self.weight.dtype, None
        # Stands for all inputs that the layer has cast: equal for layers that have cast the same. None: compiled code
        # casts, which does not count.
        self.casts: int | tuple[float, ...] | None = 0
        self.weight.grad = None
        if self.sharding is not None:
            value = self.sharding.rows_of(self.weight.detach()).float()
            self.sharding.hold(value.half())
        else:
            value = self.weight.detach().float()
            # The dtype; then the values. O3 keeps a frozen weight, which has no master, as FP16.
            dtype = scaling.E4M3 if state.level == "O3" and self.weight.requires_grad else torch.float16
            self.weight.data = value.to(dtype)
        self.weight.amp8_linear = self  # pyrefly: ignore[missing-attribute]
        self.__dict__["own"] = self.weight  # as a Module's attribute it would be registered once more
        # Forward computes with this tensor, because torch.compile can't trace a parameter with __torch_function__.
        # pyrefly: ignore[bad-assignment]
        self.held, self.trained = None if self.sharding else self.weight.data, self.weight.requires_grad
        self.write(value)
        if self.sharding is None and plain:
            self.weight.__class__ = CodedWeight

    @property
    def parameter(self) -> torch.Tensor:
        """The optimizer's parameter. Under fully_shard a forward pass sees another tensor."""
        return self.weight if self.sharding is None else self.sharding.parameter

    @property
    def codes(self) -> torch.Tensor:
        """This rank's codes of the weight, without autograd."""
        return self.held if self.sharding is None else self.sharding.codes

    def open_ports(self) -> None:
        """Creates the ports, leaf tensors that receive the weight's gradient from autograd: one for each dtype of it.

        The parameter itself cannot receive it, because autograd would cast the gradient to the parameter's fp16 or FP8
        first. A port is a leaf with the weight's shape and one element of memory. There are several, not one with
        `grad_dtype = None`, because compiled code would cast to the dtype of that one.
        """
        self.address, device = None, self.weight.device
        on_gpu = torch.cuda.is_available() and kernels.fits(device)
        if on_gpu or device.type == "cpu":
            kernels.register() if on_gpu else scaling.register()  # before torch.compile traces a call of them
            self.address = torch.tensor([self.scaling_state.data_ptr()], device=device)
        self.ports = {}
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            with torch.no_grad():
                port = torch.zeros((), dtype=dtype, device=self.weight.device).expand(self.weight.shape)
            port.requires_grad_()
            port.register_post_accumulate_grad_hook(self.gradient.receive)
            if self.sharding is not None:
                port.register_post_accumulate_grad_hook(self.gradient.backward_runs)
            self.ports[dtype] = port

    def port_for(self, dtype: torch.dtype) -> torch.Tensor:
        """The port for a gradient in this dtype."""
        return self.ports.get(dtype, self.ports[torch.float32])

    @torch.no_grad()
    def write(self, value: torch.Tensor) -> None:
        """Sets the weight to true values [the weight's shape, or this rank's rows], any float dtype, with a fresh
        power-of-two scale. Under fully_shard every rank calls it."""
        value = value.to(self.weight.device).float()
        amax = scaling.amax(value)
        if self.sharding is not None:
            amax = self.sharding.state.largest(amax)
        scale = scaling.power_of_two_scale(amax, torch.float16)
        codes = scaling.quantize(value, scale, torch.float16)
        if self.codes.dtype == scaling.E4M3:
            if self.keeps_master:
                self.master, self.master_scale = codes, scale
            scale = scaling.power_of_two_scale(amax, scaling.E4M3)
            codes = scaling.quantize(value, scale, scaling.E4M3)
        self.codes.copy_(codes)
        self.weight_scale.copy_(scale)
        self.weight_amax.copy_(amax)
        self.replaced = None

    def weight_trains(self) -> bool:
        """Whether the weight requires a gradient, for compiled code too."""
        return self.trained if self.sharding is None else self.weight.requires_grad

    def train_weight(self, trained: bool) -> None:
        """Called when the weight's requires_grad changes. Under O3 a weight that was frozen becomes FP8, on every rank,
        and its owner keeps what it was as the master."""
        self.trained = trained
        if trained:
            self.gradient.refuse_others()
        state = self.gradient.state
        if trained and state.level == "O3" and self.held.dtype == torch.float16:
            master, scale, value = self.held, self.weight_scale.clone(), self.true_weight()
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                self.own.data = self.held = value.to(scaling.E4M3)
            self.keeps_master = self.gradient.owner == state.rank
            self.write(value)
            if self.keeps_master:
                self.master, self.master_scale = master, scale

    @torch.no_grad()
    def replace(self, value: torch.Tensor) -> None:
        """Sets the weight like `write`, perhaps for a while: an evaluation with averaged weights stores the values,
        replaces them, and then puts the stored ones back. Under O3 a stored value is the master rounded to e4m3. So the
        first call keeps the master until the next gradient, and a call with the old value brings it back."""
        if self.codes.dtype != scaling.E4M3:
            return self.write(value)
        own = self.master, self.master_scale
        before = self.replaced or (self.codes.clone(), self.weight_scale.clone(), self.weight_amax.clone(), *own)
        codes, scale, amax, master, master_scale = before
        value = value.to(codes.device).float()
        old = scaling.dequantize(codes, scale)
        if self.replaced is None or not torch.equal(value, old):
            self.write(value)
            self.keep_unchanged(value, old, master, master_scale)
            self.replaced = before
            return
        self.codes.copy_(codes)
        self.weight_scale.copy_(scale)
        self.weight_amax.copy_(amax)
        self.master, self.master_scale = master, master_scale
        self.replaced = None

    def keep_unchanged(
        self, value: torch.Tensor, old: torch.Tensor, master: torch.Tensor | None, master_scale: torch.Tensor
    ) -> None:
        """After `write(value)` under O3: elements that are as they were, `old`, keep their master. Else clamp_ in each
        step would round all masters to e4m3, and what a step adds, less than half of a last bit, would be lost."""
        self.weight_amax.mul_(1.125)  # on every rank: a master is at most so much larger than its rounded value
        if master is not None:
            value = torch.where(value == old, scaling.dequantize(master, master_scale), value)
            self.master_scale = scaling.power_of_two_scale(scaling.amax(value), torch.float16)
            self.master = scaling.quantize(value, self.master_scale, torch.float16)

    def true_weight(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values the codes stand for, [the weight's shape]. Exact in fp32. Under fully_shard every rank must call
        it."""
        codes = self.codes if self.sharding is None else self.sharding.gather()
        return scaling.dequantize(codes, self.weight_scale, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], in autocast's dtype where autocast is on, else in the dtype of `input`."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        if self.high_precision or self.replaced_weight() is not None:
            # Another weight, of functional_call, a parametrization or an assignment, is used as it is.
            weight = self.true_weight(dtype) if self.replaced_weight() is None else self.weight.to(dtype)
            bias = None if self.bias is None else self.bias.to(dtype)
            return F.linear(input.to(dtype), weight.t() if self.transposed else weight, bias)
        if not torch.compiler.is_compiling():  # which would compile a layer for each name
            refuse_transformed(self.name, input)
        if not input.is_floating_point():
            raise CodesRead(f"{self.name} gets an input in {str(input.dtype)[6:]}: a Linear takes floats")
        # Evaluation does not update the history, training in eval() does. Recomputing under checkpointing records the
        # same maximum again.
        recording = torch.is_grad_enabled() and (self.training or input.requires_grad or self.weight_trains())
        if input.element_size() == 1:
            raise CodesRead(
                f"{self.name} gets an input in {str(input.dtype)[6:]}. Does the script cast it to the weight's "
                "dtype? That is the dtype of MS-AMP's codes: leave the layer out (fp8_config: skip: "
                f"{self.name}), or cast to autocast's dtype"
            )
        port = None
        codes, weight_scale = self.held, self.weight_scale
        if self.weight_trains() and torch.is_grad_enabled():
            port = self.port_for(dtype)
        if self.sharding is not None:
            if codes is None or codes.dtype != scaling.E4M3:
                raise CodesRead(
                    f"{self.name} has not gathered its weight: call the layer in the model's forward pass, not its "
                    "forward() past FSDP2's hooks, and don't cast the model or assign a weight now"
                )
            weight_scale = weight_scale * FP16_TO_E4M3
        rows = input.reshape(-1, input.shape[-1])
        with torch.no_grad():
            x8 = self.cast_input(input, rows.detach(), recording, port is not None)
        y = self.recipe.products.apply(
            rows,
            port,
            self.bias,
            codes,
            weight_scale,
            *x8,
            self.delayed,
            (*self.recipe.settings, self.transposed, self.exact, dtype),
            self.operands,
        )
        return y.view(*input.shape[:-1], y.shape[-1])

    def cast_input(self, input: torch.Tensor, rows: torch.Tensor, *how: bool) -> tuple[torch.Tensor | None, ...]:
        """The recipe's cast of the input, whose rows are `rows`, or what it was for another layer. how: recording,
        transposed."""
        if torch.compiler.is_compiling():  # the compiler makes one kernel of the casts of one input
            self.casts = None
            return self.recipe.cast(rows, self.delayed, *how)
        state, recording = self.gradient.state, how[0]
        last = state.last_cast
        if last is not None and last.input() is input and self.casts is not None:
            if (input._version, self.casts, how) == (last.version, last.casts, last.how):
                if recording:
                    self.casts = last.new_casts
                    self.scaling_state[scaling.HISTORY, INPUT].copy_(last.state[scaling.HISTORY, INPUT])
                return last.made
        made, before = self.recipe.cast(rows, self.delayed, *how), self.casts
        if recording and before is not None:
            self.casts = next(CAST_NUMBERS)
        if not input.is_inference():  # which has no version
            reference = weakref.ref(input, state.forget_cast)
            state.last_cast = InputCast(reference, input._version, before, self.casts, how, self.scaling_state, made)
        return made

    def saved_casts(self) -> tuple[float, ...]:
        """What `casts` is after the scaling state was loaded: layers with equal ones have equal scales."""
        return tuple(self.scaling_state[:, INPUT].tolist())

    @property
    def delayed(self) -> Delayed:
        """What `cast` takes of the layer: compiled code on a GPU finds the state by its address alone."""
        by_address = torch.compiler.is_compiling() and self.address is not None and self.scaling_state.is_cuda
        return None if by_address else self.scaling_state, self.address

    scale, updates, amax_history = (
        property(lambda self, at=at: scaling.parts(self.scaling_state)[at]) for at in range(3)
    )

    def replaced_weight(self) -> torch.Tensor | None:
        """The weight that somebody has put in place of the converted one, or None."""
        if self.sharding is not None or torch.compiler.is_compiling():
            return None
        weight: Any = self._parameters.get("weight")
        if weight is self.own:
            return None
        if isinstance(innermost(weight), CodedWeight):
            refuse_transformed(self.name, weight)
        if isinstance(weight, CodedWeight) and weight.amp8_linear is not self:
            raise CodesRead(f"{self.name} has the converted weight of another layer now: call amp8.initialize last")
        return self.weight

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.replaced_weight() is not None:
            return
        destination[prefix + "weight"] = self.true_weight() if self.sharding is None else self.sharding.values()

    # pyrefly: ignore[bad-override]
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        if self.replaced_weight() is not None:
            return super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        value = state_dict.get(prefix + "weight")
        if value is not None and value.shape == self.weight.shape:  # else the parent says what is wrong
            self.write(value if self.sharding is None else self.sharding.rows_of(value))
            state_dict = {**state_dict, prefix + "weight": codes_of(self.weight)}
        # assign=True would put in a new parameter, unknown to the optimizer.
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        with torch._C.DisableTorchFunctionSubclass():
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "FP8Linear":
        probe = fn(torch.empty(0, device=self.weight_scale.device))
        if probe.dtype != torch.float32:  # the optimizer refuses to train it: codes and scales keep their dtypes
            self.cast = probe.dtype

        def move(tensor: torch.Tensor) -> torch.Tensor:
            """What `fn` does to a tensor of integers, which no cast changes: for codes and scales."""
            integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
            return fn(tensor.view(integers)).view(tensor.dtype)

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return move(tensor.data) if tensor is self.own and self.sharding is None else fn(tensor)

        with torch._C.DisableTorchFunctionSubclass():  # codes move to a device as codes
            super()._apply(moved, recurse)
        for name in self.SCALING:
            setattr(self, name, move(getattr(self, name)))
        # pyrefly: ignore[bad-assignment]
        self.held = codes_of(self.own) if self.sharding is None else None
        self.open_ports()  # not in forward, where torch.compile may be tracing
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied = memo[id(self)] = self.plain_class.__new__(self.plain_class)
        own = {key: value for key, value in self.__dict__.items() if key not in self.FP8_ATTRS + self.SCALING}
        copied.__dict__.update(copy.deepcopy(own, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return copy.copy, (copy.deepcopy(self),)  # a pickle holds plain layers, as a copy does


class FP8Conv1D(FP8Linear):
    """transformers' Conv1D (GPT-2), converted: a Linear whose weight is [in, out]."""

    transposed = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyrefly: ignore[bad-override-param-name]
        return super().forward(x)  # Conv1D's own name for it


def cast(
    x: torch.Tensor,
    delayed: Delayed,
    slot: int,
    dtype: torch.dtype,
    window: int,
    recording: bool = True,
    transposed: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(operand of products in `dtype` [M, N], the same transposed [N, M], their scale, its reciprocal) of x [M, N]. A
    GPU gets each in rows of its own, because its products read rows of both operands. delayed: the state of the layer's
    delayed scaling, in which the amax is recorded if `recording`, and its address: see FP8Linear.delayed. transposed:
    whether to make that too, else None."""
    state, address = delayed
    if kernels.fits(x.device) and x.numel():  # an expert may get no row
        found = address if state is None else state
        return kernels.cast_delayed(x, dtype, found, slot, window, recording, transposed)  # pyrefly: ignore[bad-argument-type]
    if state is None:  # of no rows, which any scale fits
        state = torch.ones(scaling.HISTORY + 1, 2, device=x.device)
    scales, updates, history = scaling.parts(state)
    amax = scaling.amax(x)
    if recording and address is not None and torch.compiler.is_compiling():
        amax = torch.ops.amp8.record(amax, address, slot)  # used below, or the compiler would drop the call
    elif recording:
        scaling.record_(history[:, slot], amax)
    scale = cast_scale(amax, scales[slot], updates[slot], dtype, window)
    codes = scaling.operand(x, scale, dtype)
    return codes, turned(codes) if transposed else None, scale, scale.reciprocal()


def turned(codes: torch.Tensor) -> torch.Tensor:
    """A matrix transposed: in rows of its own in code that is compiled for a GPU."""
    return codes.t().contiguous() if codes.is_cuda and torch.compiler.is_compiling() else codes.t()


def cast_scale(
    amax: torch.Tensor, scale: torch.Tensor, updates: torch.Tensor, dtype: torch.dtype, window: int
) -> torch.Tensor:
    """The scale for a tensor about to be cast, 0-d. `window` 0 means TransformerEngine's, from the last update alone.

    NaN if the tensor holds NaN or infinity: the cast saturates, and a finite result would hide them.
    """
    if window and (amax.is_cuda or torch.compiler.is_compiling() or updates.item() < window):
        scale = scaling.window_scale(amax, scale, updates, dtype, window)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def scale_of_operand(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The scale of `fp8_weight` of codes with this one."""
    return scale * FP16_TO_E4M3 if weight.is_cuda and weight.dtype != scaling.E4M3 else scale


def fp8_weight(weight: torch.Tensor, scale: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The e4m3 operand of products of a weight stored as fp16 or e4m3 codes with this scale, or of its transpose."""
    if weight.dtype == scaling.E4M3:
        codes = scaling.operand(weight, scale, scaling.E4M3)
    elif weight.is_cuda:
        codes = fp16_to_e4m3(weight, scale)
    else:
        # On a CPU the operand keeps the units of the FP16 codes, in which e4m3's smallest normal number is another.
        smallest = torch.finfo(scaling.E4M3).smallest_normal / FP16_TO_E4M3
        codes = scaling.in_pieces(lambda x: scaling.round_to_grid(x.float(), smallest, scaling.E4M3), weight)
    return turned(codes) if transposed else codes


def weight_operand(
    weight: torch.Tensor,
    scale: torch.Tensor,
    transposed: bool,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    after: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(`fp8_weight`, the reciprocal of its scale, the bias in `dtype`): each by itself would be a small kernel. after:
    made in the backward pass, so that compiled code casts there, and keeps nothing from the forward pass."""
    if kernels.fits(weight.device) and (transposed or weight.dtype != scaling.E4M3):
        return kernels.cast_weight(weight, scale, transposed, bias, dtype, after)
    return fp8_weight(weight, scale, transposed), scale_of_operand(weight, scale).reciprocal(), bias


def fp16_to_e4m3(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The FP8 copy of a weight's fp16 codes, which have this scale."""
    if kernels.fits(codes.device):
        return kernels.cast_weight(codes, scale, False)[0]
    return (codes.float() * FP16_TO_E4M3).to(scaling.E4M3)


def note(operands: Operands, a: scaling.Number, b: scaling.Number) -> None:
    """Records the formats of a product for the report. Not in compiled code, where it would be a side effect."""
    if not torch.compiler.is_compiling():
        operands.add((a, b))


class Products(torch.autograd.Function):
    """x [M, in], its operand x8 and that transposed, codes of w [out, in] (or [in, out]), bias [out] -> y [M, out]. The
    gradient of w leaves through `port`, in the dtype of y."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, port: torch.Tensor | None, bias: torch.Tensor | None, weight: torch.Tensor,
        weight_scale: torch.Tensor, x8: torch.Tensor, x8_turned: torch.Tensor | None, x_scale: torch.Tensor,
        x_factor: torch.Tensor, delayed: Delayed, settings: tuple[int, torch.dtype, bool, bool, torch.dtype],
        operands: Operands,
    ) -> torch.Tensor:  # fmt: skip
        _, _, transposed, exact, dtype = settings
        ctx.delayed, ctx.settings, ctx.operands = delayed, settings, operands
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        w8, w_factor, bias = weight_operand(weight, weight_scale, transposed, bias, dtype)
        reciprocals = x_factor, w_factor
        note(operands, scaling.E4M3, scaling.E4M3)
        # Backward makes the weight's FP8 copy again: keeping one per layer would cost a byte per parameter.
        ctx.save_for_backward(x8_turned, x_scale, weight, weight_scale, *reciprocals)
        y = scaling.product(
            x8, w8.t(), x_scale, None, dtype, bias=bias, exact=exact, use_fast_accum=True, reciprocals=reciprocals
        )
        return output(y)

    @staticmethod
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_a_derivative()
        x8_turned, x_scale, weight, weight_scale, x_factor, w_factor = ctx.saved_tensors
        # Not saved with save_for_backward: a layer called twice updates the history between its two backward passes.
        window, gradient_format, transposed, exact, _ = ctx.settings
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        cast_as = gradient_format, window, True, of_weight
        dy8, dy8_turned, dy_scale, dy_factor = cast(dy, ctx.delayed, OUTPUT_GRADIENT, *cast_as)
        dx = dw = None
        if of_x:
            w8, *_ = weight_operand(weight, weight_scale, not transposed, after=dy_factor)
            factors = dy_factor, w_factor
            note(ctx.operands, gradient_format, scaling.E4M3)
            dx = scaling.product(dy8, w8.t(), dy_scale, None, dy.dtype, exact=exact, reciprocals=factors)
            dx = dx.to(ctx.x_dtype)
        if of_weight:
            pair = (dy8_turned, dy_scale, dy_factor), (x8_turned, x_scale, x_factor)
            dw = weight_gradient(ctx, *pair, dy.dtype)
        db = dy.sum(0).to(ctx.bias_dtype) if of_bias else None
        return dx, dw, db, None, None, None, None, None, None, None, None, None


def weight_gradient(ctx: Any, gradient: tuple[Any, ...], input: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
    """dy^T x [out, in] or x^T dy [in, out], of (operand transposed, its scale, the scale's reciprocal) of each."""
    gradient_format, transposed, exact, _ = ctx.settings[-4:]
    # a [n, M] b [M, k]: this product sums over the rows, so their number is padded with zeros.
    (a, a_scale, a_factor), (b, b_scale, b_factor) = (input, gradient) if transposed else (gradient, input)
    note(ctx.operands, *((scaling.E4M3, gradient_format) if transposed else (gradient_format, scaling.E4M3)))
    factors = a_factor, b_factor
    return scaling.product(a, b.t(), a_scale, b_scale, dtype, exact=exact, pad_inner=True, reciprocals=factors)
