"""`initialize`: an ordinary model and its Adam become a model and an Adam at one of MS-AMP's levels."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from . import scaling
from .comm import BUCKET, Comm, partition
from .gradients import WeightGradient
from .linear import FP8Conv1D, FP8Linear
from .optimizer import Adam

LEVELS = ("O1", "O2", "O3")
WINDOW = 16  # FP8-LM's history of amaxes
TE_DEFAULTS = {
    "amax_history_len": 1024,
    "amax_compute_algo": "max",
    "margin": 0,
    "fp8_format": "HYBRID",
    "reduce_amax": True,
}
# These read a child's weight themselves instead of calling it, at least in evaluation, and would read codes.
READ_DIRECTLY = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def initialize(
    model,
    optimizer,
    opt_level="O2",
    *,
    skip=(),
    accumulate="high",
    stochastic_rounding=False,
    recipe="msamp",
    recipe_options=None,
    process_group=None,
    exact=False,
    bucket_bytes=BUCKET,
):
    """Puts `model` and its `optimizer` on one of MS-AMP's levels; returns (model, optimizer).

    The model stays the same object, converted in place, as do its parameters. The returned optimizer takes over the
    one given, shares its param_groups, and is the one to step from now on. Call it before DistributedDataParallel
    wraps the model, on every rank, then `attach` the wrapped model.

    optimizer: torch.optim.Adam or AdamW. opt_level: "O1", "O2", "O3".
    skip: names of modules that stay as they are, with all that is in them, or a predicate (name, module) -> bool.
    accumulate: "high" keeps gradients in fp32 between micro-batches, 4 bytes per parameter; "fp8" rounds each sum.
    stochastic_rounding: of fp16 weights and masters; for learning rates whose updates are below a weight's last bit.
    recipe: scaling of activations and output gradients: "msamp", a window of 16 with in-time warm-up, or "te_delayed",
    TransformerEngine's DelayedScaling with `recipe_options`: amax_history_len, amax_compute_algo, margin, fp8_format
    ("HYBRID" or "E4M3"), reduce_amax.
    process_group: whose ranks average gradients; None means all ranks, in a group of our own.
    exact: products in fp32 on dequantised values, for comparisons bit for bit. bucket_bytes: gradients sent at once.

    Raises TypeError for another optimizer, ValueError for what cannot be, as a model with nothing to convert.
    Levels: FP8-LM (arXiv:2310.18313), section 2.
    """
    check(model, optimizer, opt_level, accumulate)
    state = State(opt_level, accumulate, stochastic_rounding, recipe, recipe_options)
    candidates, state.skipped = candidates_in(model, skip)
    if not candidates:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in state.skipped[:3])
        raise ValueError(f"amp8 finds no Linear to convert ({reasons or 'the model has none'})")
    if dist.is_available() and dist.is_initialized():
        state.join(process_group)
    for name, module in candidates:
        if state.world > 1:  # DistributedDataParallel will not see these weights, so it can't make them equal
            broadcast(module.weight, state.group)
        module.__class__ = FP8Conv1D if type(module).__name__ == "Conv1D" else FP8Linear
        module.start(opt_level, state.window, state.gradient_format, state.history, exact)
        module.gradient = WeightGradient(module, state)
        module.weight.amp8_linear = module
        module.open_port()
        module.weight.register_post_accumulate_grad_hook(misused(name))
        state.linears[name] = module
    model.amp8_state = state
    state.gradients = [linear.gradient for linear in state.linears.values()]
    if opt_level == "O3":
        trained = [gradient for gradient in state.gradients if gradient.linear.weight.requires_grad]
        state.owners = partition(trained, state.world)
        for gradient in trained:
            gradient.linear.master = None
    if state.world > 1:
        state.comm = Comm(state.gradients, state.group, state.owners, bucket_bytes)
        ignored = [f"{name}.{entry}" for name in state.linears for entry in ("weight", *FP8Linear.BUFFERS)]
        model._ddp_params_and_buffers_to_ignore = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *ignored]
    return model, Adam(optimizer, state)
