"""The backends: what computes a model's matrix products. `base.py` documents each method.

A new backend is a subclass of Backend in a file of its own, and one line of this table.
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

# backend of the config: (class, name of the code that computes in the record)
BACKENDS: dict[str | None, tuple[type[Backend], str]] = {
    None: (Torch, "torch"),
    "ao": (TorchAO, "torchao"),
    "te": (TransformerEngine, "transformer_engine"),
    "msamp": (MSAMP, "amp8"),
}


def implementation(backend: str | None, strategy: str, rehearsal: bool) -> str:
    """The code that computes. On a CPU torchao's layers run only under FSDP2 and ZeRO, TransformerEngine's never."""
    in_software = backend == "te" or (backend == "ao" and strategy in ("single", "ddp"))
    return "emulated" if rehearsal and in_software else BACKENDS[backend][1]


def get_backend(plan: "Plan") -> Backend:
    """The Backend of a plan."""
    if plan.implementation == "emulated":
        return import_amp8("faithful.backends.emulation").Emulated(plan)
    if plan.precision == "fp16" and plan.rehearsal:
        return FP16OnCPU(plan)
    return BACKENDS[plan.backend][0](plan)
