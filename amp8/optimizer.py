"""Adam and AdamW over scaled low-precision tensors, in fp32 arithmetic.

The first moment is e4m3 and the second fp16, each with a power-of-two scale per tensor (FP8-LM, arXiv:2310.18313,
section 2.2). e4m3 is enough for m, because only a few powers of two of m matter. It is not enough for v: the square
root of an e4m3 v spans 2**9 where m spans 2**18, so v would become 0 for elements whose m does not. The update is
computed from the new moments before they are rounded.

Weights, masters and moments are rounded stochastically. Rounded to nearest, a moment of e4m3 stops decaying (0.9 times
its smallest number is rounded back to it) while the second one goes on, so that weights without gradient drift away;
and a weight of fp16 loses every update that is smaller than half of its last bit.

Each tensor is read once and written once. That needs the new scales *before* the pass, so they come from bounds instead
of the new values: |m'| <= beta1 |m| + (1 - beta1) |g|, likewise v', and Adam changes no weight by more than lr times a
constant. A bound costs at most one or two powers of two of the format's range, and no precision.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim.adam import adam

from . import kernels, scaling
from .coded import CodesRead
from .compiled import compiled_on_cuda
from .rounding import above, random_noise, store
from .tensors import amaxes_of, flat, linear_of, local, own_rows, without_waiting

if TYPE_CHECKING:
    from .convert import State
    from .gradients import WeightGradient
    from .linear import FP8Linear

# Smaller tensors, such as biases and norms, keep fp32 moments and torch's own Adam: they are well under 1% of a model's
# bytes, and one kernel launch for each would cost more than it saves. MS-AMP quantises them all.
SMALLEST = 4096

LARGEST = 1e19  # a gradient of which the square is finite in fp32
MOMENTS = "exp_avg", "exp_avg_sq"
SLICE = 1 << 17  # elements that a CPU updates at one time: their fp32 copies stay in a core's cache

# The numbers of a parameter's step: factors of the stored w, g, m and v; Adam's; factors of what is stored afterwards.
(W_IN, G_IN, M_IN, V_IN, ADD_M, ADD_V, LEAST_V, ROOT_BIAS_V, EPS, STEP, KEEP_W, DECAY,
 W_OUT, M_OUT, V_OUT, COPY_OUT) = range(16)  # fmt: skip


Flat = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]  # see Adam.slices
Scales = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # see Adam.update


class Adam(torch.optim.Optimizer):
    """torch.optim.Adam or AdamW over a model's converted and other parameters.

    It shares the param_groups of the optimizer given to `amp8.initialize`, so schedulers continue to work. A group's
    `lr` may be a tensor. `amp8.initialize` makes it. `replaced`: the class of that optimizer.

    State of a quantised parameter: `step`, `exp_avg` and `exp_avg_sq` (codes) with `exp_avg_scale` and
    `exp_avg_sq_scale`, and `amax` [2], the largest magnitudes of the unrounded moments.
    """

    # GradScaler then calls step() with `grad_scale` set, and step() can refuse; otherwise it would unscale the ordinary
    # gradients and leave the FP8 ones scaled.
    _step_supports_amp_scaling = True
    # Fp32 on the GPU, or None: where it is 1, step() changes no weight and no moment, though it counts the step. For
    # whoever stops then, having read it later: see `can_mask`.
    found_inf: torch.Tensor | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, state: "State") -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups  # the list too, not only the dicts
        self.model_state, self.replaced = state, type(optimizer)
        # Of the parameters, for their random numbers: {id(parameter): place in the groups}.
        self.numbers: dict[int, int] = {}
        for parameter, values in optimizer.state.items():
            self.adopt(parameter, values)
        optimizer.state.clear()
        # A scheduler made before knows only that optimizer, whose step() will not be called: it would warn.
        optimizer._opt_called = True  # pyrefly: ignore[missing-attribute]

    def quantises(self, parameter: torch.Tensor) -> bool:
        """Whether the moments of this parameter are e4m3 and fp16."""
        if self.model_state.level == "O1" or parameter.dtype == torch.float64 or parameter.is_complex():
            return False
        if linear_of(parameter) is not None:
            return True
        return parameter.numel() >= SMALLEST and flat(local(parameter)) is not None

    def can_mask(self) -> bool:
        """Whether `found_inf` is heeded: all parameters are on a GPU, where kernels read it, ours and torch's fused."""
        parameters = [local(parameter) for group in self.param_groups for parameter in group["params"]]
        fused = all(group.get("fused") for group in self.param_groups)
        return fused and all(kernels.fits(parameter.device) for parameter in parameters)

    def moments(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The parameter's state, made on first use."""
        state = self.state[parameter]
        if not state:
            low, linear = self.quantises(parameter), linear_of(parameter)
            like = local(parameter) if linear is None else linear.codes
            ours = low or linear is not None
            on_device = not ours and (group.get("fused") or group.get("capturable"))
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
            plain = like.dtype if linear is None else torch.float32
            for name, dtype in (("exp_avg", scaling.E4M3), ("exp_avg_sq", torch.float16)):
                dtype = dtype if low else plain
                state[name] = torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)
            if low:
                one = torch.ones((), device=parameter.device)
                state["exp_avg_scale"], state["exp_avg_sq_scale"] = one, one.clone()
                state["amax"] = torch.zeros(2, device=parameter.device)
        return state

    @torch.no_grad()
    # pyrefly: ignore[bad-override]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step. First waits for the gradients' communication; under O3 then sends the new weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if hasattr(self, "grad_scale"):
            raise RuntimeError("GradScaler does not reach FP8 gradients, which carry their own scale: train without it")
        self.model_state.finish()
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        self.numbers = {id(parameter): number for number, parameter in enumerate(everything)}
        for group in self.param_groups:
            converted, others, plain = [], [], []
            for parameter in group["params"]:
                linear = linear_of(parameter)
                if linear is not None:
                    if linear.gradient.pending:
                        if linear.parameter is not parameter or linear.gradient.linear is not linear:
                            raise CodesRead("a converted layer has another weight now: call amp8.initialize last")
                        converted.append(parameter)
                elif parameter.grad is not None:
                    if parameter.grad.is_sparse:
                        raise RuntimeError("Adam does not support sparse gradients")
                    (others if self.quantises(parameter) else plain).append(parameter)
            if converted:
                self.step_converted(group, converted)
            if others:
                self.step_others(group, others)
            if plain:
                self.step_plain(group, plain)
        self.model_state.stepped(self.gradients())
        return loss

    def gradients(self) -> "list[WeightGradient]":
        """The WeightGradients of the converted layers that this optimizer updates."""
        linears = [linear_of(parameter) for group in self.param_groups for parameter in group["params"]]
        return [linear.gradient for linear in linears if linear is not None]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "amp8's optimizer can't be copied or pickled, as it belongs to its model: save its "
            "state_dict() or amp8.exact_state(model, optimizer)"
        )

    def step_plain(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Runs torch's own Adam, with moments in the parameter's dtype."""
        states = [self.moments(parameter, group) for parameter in parameters]
        weights = [local(parameter).detach() for parameter in parameters]
        gradients: list[Any] = [local(parameter.grad) for parameter in parameters]  # pyrefly: ignore[bad-argument-type]
        m, v, steps = ([state[key] for state in states] for key in (*MOMENTS, "step"))
        options = {key: group[key] for key in ("lr", "weight_decay", "eps", "maximize", "decoupled_weight_decay")}
        options |= {key: group.get(key) for key in ("foreach", "fused")} | {"amsgrad": False}
        options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True)) | {"found_inf": self.found_inf}
        adam(weights, gradients, m, v, [], steps, has_complex=any(map(torch.is_complex, weights)), **options)

    def step_others(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Updates parameters outside converted layers: plain weight and gradient, quantised moments."""
        states = [self.moments(parameter, group) for parameter in parameters]
        weights = [local(p).detach() for p in parameters]
        gradients = [local(p.grad) for p in parameters]  # pyrefly: ignore[bad-argument-type]
        g_amax = self.model_state.largest(amaxes_of(gradients))
        coupled = group["weight_decay"] and not group["decoupled_weight_decay"]  # the decay is part of the gradient
        w_amax = self.model_state.largest(amaxes_of(weights)) if coupled else None
        starts = [start_of(parameter) for parameter in parameters]
        numbers = [self.numbers[id(parameter)] for parameter in parameters]
        self.update(group, weights, states, gradients, None, (w_amax, g_amax), None, starts, numbers)

    def step_converted(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Updates converted weights. Under O3 it updates the master and makes the FP8 weight from it."""
        linears: list[FP8Linear] = [linear_of(parameter) for parameter in parameters]  # pyrefly: ignore[bad-assignment]
        has_master = self.model_state.level == "O3"
        for linear in linears:
            expected, there = scaling.E4M3 if has_master else torch.float16, linear.codes.dtype
            if there != expected or linear.cast:
                there = linear.cast or there
                raise CodesRead(f"a converted weight is {there}, not {expected}: don't cast the model")
            if has_master and linear.master is not None and linear.master.device != linear.weight.device:
                linear.master = linear.master.to(linear.weight.device)
                linear.master_scale = linear.master_scale.to(linear.weight.device)
        states = [self.moments(parameter, group) for parameter in parameters]
        # pyrefly: ignore[bad-assignment]
        targets: list[torch.Tensor] = [linear.master if has_master else linear.codes for linear in linears]
        scales, copy_scale, g_scales, w_amax = stacked(
            [linear.master_scale if has_master else linear.weight_scale for linear in linears],
            [linear.weight_scale for linear in linears],
            [linear.gradient.scale for linear in linears],
            [linear.weight_amax for linear in linears],
        )
        copies = [linear.codes if has_master else None for linear in linears]  # in FP8, of the masters
        gradients: list[torch.Tensor] = [linear.gradient.codes for linear in linears]  # pyrefly: ignore[bad-assignment]
        # Under fully_shard a gradient that somebody has changed may have a scale of its own on each rank.
        amaxes = (w_amax, self.model_state.largest(torch.tensor(scaling.dtype_max(scaling.E4M3)) / g_scales))
        starts = [0 if linear.sharding is None else linear.sharding.piece.start for linear in linears]
        numbers = [self.numbers[id(parameter)] for parameter in parameters]
        new, copy_scales, w_amax = self.update(
            group, targets, states, gradients, (scales, g_scales, copy_scale), amaxes, copies, starts, numbers
        )
        kept = [*(linear.weight_amax for linear in linears), *(linear.weight_scale for linear in linears)]
        values = [*w_amax.unbind(), *(copy_scales if has_master else new).unbind()]
        if has_master:
            kept += [linear.master_scale for linear in linears]
            values += new.unbind()
        torch._foreach_copy_(kept, values)

    def update(
        self,
        group: dict[str, Any],
        weights: list[torch.Tensor],
        states: list[dict[str, torch.Tensor]],
        gradients: list[torch.Tensor],
        scales: Scales | None,
        amaxes: tuple[torch.Tensor | None, torch.Tensor],
        copies: list[torch.Tensor | None] | None,
        starts: list[int],
        parameter_numbers: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One step of `weights`, in place. scales: of the weights, of the gradients and of the weights' FP8 copies,
        [number of weights] each; amaxes: of the weights, where they are needed, and of the gradients. scales and copies
        are None for ordinary parameters, which have no scale. starts: under fully_shard, where in the whole weight each
        begins. parameter_numbers: which parameters of the optimizer they are. Returns the weights' new scales, those of
        their FP8 copies, and the weights' new largest magnitudes. Where `found_inf` is 1 these and the moments' are the
        old ones."""
        torch._foreach_add_([state["step"] for state in states], 1)
        keys, of_moments = ("exp_avg_scale", "exp_avg_sq_scale", "amax"), None
        kept = [[state[key] for state in states] for key in keys] if "amax" in states[0] else []
        if kept:
            of_moments = *stacked(*kept[:2]), torch.stack(kept[2])
        numbers = numbers_of_step(group, states, scales, amaxes, of_moments, self.found_inf)
        copies = [None if copy is None else flat(copy) for copy in copies or [None] * len(weights)]
        # pyrefly: ignore[bad-assignment]
        flats: list[Flat] = [
            (flat(w), flat(g, like=w), flat(s["exp_avg"]), flat(s["exp_avg_sq"]), copy)
            for w, g, s, copy in zip(weights, gradients, states, copies, strict=True)
        ]
        steps = zip(states, parameter_numbers, strict=True)
        seeds = [int(state["step"].item()) * 1_000_003 + number * 7919 for state, number in steps]
        found = self.slices(flats, numbers, seeds, starts, bool(group["decoupled_weight_decay"]))
        found = self.model_state.largest(found)
        if self.found_inf is not None:
            old_w = found[:, :1] if amaxes[0] is None else amaxes[0][:, None]
            old = torch.cat([old_w, found[:, 1:] if of_moments is None else of_moments[2]], 1)
            found = torch.where(self.found_inf.reshape(()) != 0, old, found)
        new_w, new_m, new_v, new_copy = numbers[:, W_OUT:].unbind(1)
        if kept:
            values = *new_m.unbind(), *new_v.unbind(), *found[:, 1:].unbind()
            torch._foreach_copy_([*kept[0], *kept[1], *kept[2]], list(values))
        return new_w, new_copy, found[:, 0]

    def slices(
        self, flats: list[Flat], numbers: torch.Tensor, seeds: list[int], starts: list[int], decoupled: bool
    ) -> torch.Tensor:
        """Adam on each of `flats`, in place: (w, g, m, v, copy or None), 1-d. numbers: [tensors, 16]. Returns the
        largest magnitudes of the new w, m and v of each: fp32 [tensors, 3]. On a GPU in one kernel, on a CPU a slice of
        a tensor at a time."""
        device, noisy = numbers.device, self.model_state.stochastic_rounding
        if kernels.fits(device):
            return kernels.adam(flats, numbers, seeds, starts, decoupled, noisy, self.found_inf)
        found = [torch.zeros(3, device=device)] * len(flats)
        for i in (i for i, (weight, *_) in enumerate(flats) if len(weight)):  # a shard may have none of its rows
            found_in, row = [], numbers[i].unbind()
            for first in range(0, flats[i][0].numel(), SLICE):
                parts = [None if t is None else t[first : first + SLICE] for t in flats[i]]
                place = (seeds[i], starts[i] + first) if noisy else None
                # pyrefly: ignore[bad-argument-count, bad-argument-type]
                found_in.append(adam_slice(*parts, row, place, decoupled))
            found[i] = found_in[0] if len(found_in) == 1 else torch.stack(found_in).amax(0)
        return torch.stack(found)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ordinary and FP8 gradients."""
        for gradient in self.gradients():
            gradient.clear()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As torch's Adam has it, so it loads into that one: moments are true values, and under fully_shard DTensors.
        Their scales are beside them, with which `load_state_dict` finds the same codes."""
        if self.model_state.sharded and self.model_state.world > 1:
            raise CodesRead(
                "under O3 optimizer.state_dict() is a part of it in each process: save on all of them with "
                "accelerator.save_state or amp8.exact_state, or use O2"
            )
        found = super().state_dict()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        found["state"] = {at: true_moments(parameters[at], values) for at, values in found["state"].items()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the `state_dict()` of this optimizer, or of torch's Adam or AdamW with the same groups.

        Moments are converted to our dtypes: fp32 moments are quantised. The param_group dicts stay the same objects.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = state_dict["param_groups"]
        sizes, saved = [len(group["params"]) for group in self.param_groups], [len(group["params"]) for group in groups]
        if sizes != saved:
            raise ValueError(f"the state_dict has groups of {saved} parameters, this optimizer of {sizes}")
        self.state.clear()
        for group, other in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in other.items() if key != "params"})
            for parameter, key in zip(group["params"], other["params"], strict=True):
                if key in state_dict["state"]:
                    self.adopt(parameter, state_dict["state"][key])
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @torch.no_grad()
    def adopt(self, parameter: torch.Tensor, values: dict[str, Any]) -> None:
        """Loads the state of one parameter: ours with its scales, other moments rounded to this level's formats."""
        if "max_exp_avg_sq" in values:
            raise ValueError("amsgrad is not supported: its third moment has no place in MS-AMP's levels")
        linear = linear_of(parameter)
        if self.model_state.sharded and linear is not None and linear.gradient.owner != self.model_state.rank:
            return  # its moments are its owner's
        group = next(group for group in self.param_groups if any(p is parameter for p in group["params"]))
        state = self.moments(parameter, group)
        state["step"].fill_(float(values["step"]))
        ours = "amax" in values
        for i, name in enumerate(MOMENTS):
            value = local(values[name]).to(parameter.device).reshape(state[name].shape)
            coded = ours and value.dtype != torch.float32  # as exact_state has them
            if "amax" not in state:
                state[name].copy_(scaling.dequantize(value, values[f"{name}_scale"]) if coded else value)
                continue
            amax = local(values["amax"])[i] if ours else self.model_state.largest(scaling.amax(value.float()))
            scale = values[f"{name}_scale"] if ours else scaling.power_of_two_scale(amax, state[name].dtype)
            scale = local(scale).to(parameter.device)
            state[name].copy_(value if coded else scaling.quantize(value, scale, state[name].dtype))
            state[f"{name}_scale"].copy_(scale)
            state["amax"][i] = amax


def true_moments(parameter: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter for a state_dict."""
    moments = {name: state[name] for name in MOMENTS if name in state}
    if "amax" in state:
        moments = {name: scaling.dequantize(codes, state[f"{name}_scale"]) for name, codes in moments.items()}
    moments = {name: moment.reshape(local(parameter).shape) for name, moment in moments.items()}
    if local(parameter) is not parameter:
        from torch.distributed.tensor import DTensor

        whole = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
        place = parameter.device_mesh, parameter.placements
        moments = {name: DTensor.from_local(moment, *place, **whole) for name, moment in moments.items()}
    return state | moments


def stacked(*lists: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """torch.stack of each of these lists of 0-d tensors, which are of one length, in one kernel."""
    return torch.stack([tensor for each in lists for tensor in each]).view(len(lists), -1).unbind()


def numbers_of_step(
    group: dict[str, Any],
    states: list[dict[str, torch.Tensor]],
    scales: Scales | None,
    amaxes: tuple[torch.Tensor | None, torch.Tensor],
    of_moments: tuple[torch.Tensor, ...] | None,
    found_inf: torch.Tensor | None,
) -> torch.Tensor:
    """The numbers of the parameters' step, fp32 [parameters, 16]: see the columns above. scales, amaxes: as `update`
    takes them; weights with scales are codes, and get new ones. of_moments: None where they are plain, else their
    scales [parameters] each and their amaxes [parameters, 2]."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr, decay = group["lr"], group["weight_decay"]
    if on_device := isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
        lr = lr.to(torch.float32)
    constants = [beta1, beta2, 1 - beta1, 1 - beta2, largest_move(beta1, beta2), group["eps"], decay]
    constants.append(0 if on_device else float(lr))
    steps = [state["step"].item() for state in states]
    rows = [[1 - beta1**t, math.sqrt(1 - beta2**t), *constants] for t in steps]
    of_step = without_waiting(torch.tensor(rows, dtype=torch.float32), amaxes[1].device)
    coupled = bool(decay and not group["decoupled_weight_decay"])
    return numbers_of(of_step, lr if on_device else None, scales, amaxes, of_moments, found_inf,
                      coupled, bool(group["maximize"]))  # fmt: skip


@compiled_on_cuda
def numbers_of(
    of_step: torch.Tensor,
    lr: torch.Tensor | None,
    scales: Scales | None,
    amaxes: tuple[torch.Tensor | None, torch.Tensor],
    of_moments: tuple[torch.Tensor, ...] | None,
    found_inf: torch.Tensor | None,
    coupled: bool,
    maximize: bool,
) -> torch.Tensor:
    """`numbers_of_step` from tensors: of_step [parameters, 10], the constants of Adam; lr: None where they have it."""
    w_amax, g_amax = amaxes
    one = torch.ones_like(g_amax)
    w_scale, g_scale, copy_scale = scales or (one, one, one)
    w_amax = torch.zeros_like(g_amax) if w_amax is None else w_amax
    bias_m, root_bias_v, beta1, beta2, add_m, add_v, largest, eps, decay, rate = of_step.unbind(1)
    lr = rate if lr is None else one * lr

    # A square that overflows fp32 would make v infinite for ever: such a gradient is scaled down as a whole.
    excess = (g_amax / LARGEST).clamp(min=1.0)
    g_scale, g_amax = g_scale * excess, g_amax / excess
    if coupled:
        g_amax = g_amax + decay * w_amax
    w_bound = above(w_amax + lr * root_bias_v / bias_m * largest, torch.float16)
    new_w = scaling.power_of_two_scale(w_bound, torch.float16, previous=w_scale) if scales else w_scale
    new_copy = scaling.power_of_two_scale(above(w_bound, scaling.E4M3), scaling.E4M3)
    m_scale = v_scale = new_m = new_v = one
    if of_moments is not None:
        m_scale, v_scale, amax = of_moments
        m_amax, v_amax = amax.unbind(1)
        m_bound = above(beta1 * m_amax + add_m * g_amax, scaling.E4M3)
        v_bound = above(beta2 * v_amax + add_v * g_amax.square(), torch.float16)
        new_m = scaling.power_of_two_scale(m_bound, scaling.E4M3, previous=m_scale)
        new_v = scaling.power_of_two_scale(v_bound, torch.float16, previous=v_scale)
    new = [new_w, new_m, new_v, new_copy]
    if found_inf is not None:
        old = [w_scale, m_scale, v_scale, copy_scale]
        new = [torch.where(found_inf.reshape(()) != 0, was, now) for was, now in zip(old, new, strict=True)]
    numbers = [1 / w_scale, (-1 if maximize else 1) / g_scale, beta1 / m_scale, beta2 / v_scale, add_m, add_v,
               2.0**-25 / new[2], root_bias_v, eps, lr / bias_m, 1 - lr * decay, decay, *new]  # fmt: skip
    return torch.stack(numbers, 1)


def largest_move(beta1: float, beta2: float) -> float:
    """The largest |m| / sqrt(v): how far a step of Adam can move an element, in units of lr, without bias correction.

    By Cauchy and Schwarz (1 - beta1) / sqrt((1 - beta2) (1 - beta1**2 / beta2)). Times 3, because the rounded moments
    of the step before may be off: an e4m3 subnormal by a factor of 2.
    """
    ratio = beta1**2 / beta2 if beta2 else 1.0
    if ratio >= 1:
        return 100.0  # no bound exists; the weights would saturate, which takes more than 100 lr in one step
    return 3 * (1 - beta1) / math.sqrt(max(1 - beta2, 1e-12) * (1 - ratio))


def start_of(parameter: torch.Tensor) -> int:
    """Where in the whole parameter this rank's rows begin, in elements."""
    rows = own_rows(parameter)
    return 0 if rows is None else rows[0] * (parameter.numel() // max(1, len(parameter)))


def adam_slice(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    copy: torch.Tensor | None,
    numbers: Sequence[torch.Tensor] | torch.Tensor,
    place: tuple[int, int] | None,
    decoupled: bool,
) -> torch.Tensor:
    """Adam on 1-d tensors of one length, in place. Returns the largest magnitudes of the new w, m and v: fp32 [3].

    weight, m, v: fp32, or codes; gradient likewise; copy: None, or e4m3 codes to be made of the new weight. numbers
    [16]: see the columns above; tensors, because torch converts a Python number in each operation. place: the seed of
    this tensor's random numbers and where in it these elements begin, or None to round to nearest.
    """
    w = scaling.decode(weight) * numbers[W_IN]
    g = scaling.decode(gradient) * numbers[G_IN]
    if not decoupled:
        g.add_(w * numbers[DECAY])
    first = (scaling.decode(m) * numbers[M_IN]).add_(g * numbers[ADD_M])
    second = (scaling.decode(v) * numbers[V_IN]).add_(g.square().mul_(numbers[ADD_V]))
    # A v so small that it will be stored as 0 counts as half of the smallest that will not. Otherwise an m that
    # outlives its v would be divided by eps alone, next time.
    counted = torch.maximum(second, numbers[LEAST_V]) if v.dtype == torch.float16 else second
    step = first / counted.sqrt().div_(numbers[ROOT_BIAS_V]).add_(numbers[EPS])
    new_weight = (w.mul_(numbers[KEEP_W]) if decoupled else w).sub_(step.mul_(numbers[STEP]))
    noise = {}
    if place is not None:
        seed, start = place
        noise[scaling.E4M3] = random_noise(len(w), seed, start, w.device)
        noise[torch.float16] = random_noise(len(w), seed + 1, start, w.device)
    store(weight, new_weight, numbers[W_OUT], noise.get(weight.dtype))
    store(m, first, numbers[M_OUT], noise.get(m.dtype))
    store(v, second, numbers[V_OUT], noise.get(v.dtype))
    if copy is not None:
        copy.copy_(scaling.quantize(new_weight, numbers[COPY_OUT], copy.dtype))
    return torch.stack([new_weight.abs().amax(), first.abs().amax(), second.amax()])
