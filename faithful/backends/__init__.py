"""The backends: what computes a model's matrix products. `base.py` documents each method.

A new backend is a subclass of Backend in a file of its own, and one line of this table. What it accepts and costs,
which is asked before torch is imported, is a class in config/fp8.py.
"""

from typing import TYPE_CHECKING

from faithful.backends.base import Backend
from faithful.backends.high_precision import FP16OnCPU, Torch
from faithful.backends.levels import MSAMP
from faithful.backends.linear import import_amp8
from faithful.backends.torchao import TorchAO
from faithful.backends.transformer_engine import TransformerEngine

if TYPE_CHECKING:
    from faithful.plan import Plan

BACKENDS: dict[str | None, type[Backend]] = {  # by their names in config/fp8.py
    None: Torch,
    "ao": TorchAO,
    "te": TransformerEngine,
    "msamp": MSAMP,
}


def get_backend(plan: "Plan") -> Backend:
    """The Backend of a plan."""
    if plan.implementation == "emulated":
        return import_amp8("faithful.backends.emulation").Emulated(plan)
    if plan.precision == "fp16" and plan.rehearsal:
        return FP16OnCPU(plan)
    return BACKENDS[plan.backend](plan)
