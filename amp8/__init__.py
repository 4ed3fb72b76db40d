"""MS-AMP's levels, O1, O2 and O3, on stock PyTorch.

    model, optimizer = amp8.initialize(model, optimizer, opt_level="O2")

Linear layers compute in FP8 and save FP8 tensors for their backward pass. Weights are stored as FP16 with a scale (O3:
as FP8, with an FP16 master on one rank). Weight gradients are stored and sent as FP8. Adam's moments are stored as FP8
and FP16 (O2, O3). From FP8-LM: Training FP8 Large Language Models (arXiv:2310.18313). README.md has the measured table.
"""

from .convert import attach, high_precision, initialize, no_sync, optimizer_of, wire_bytes
from .gradients import clip_grad_norm_
from .linear import FP8Linear
from .report import report
from .state import exact_state, load_exact_state, master_state_dict

__all__ = [
    "FP8Linear",
    "attach",
    "clip_grad_norm_",
    "exact_state",
    "high_precision",
    "initialize",
    "load_exact_state",
    "master_state_dict",
    "no_sync",
    "optimizer_of",
    "report",
    "wire_bytes",
]
