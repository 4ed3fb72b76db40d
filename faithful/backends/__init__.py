"""The backends: what computes a model's matrix products. `plain.py` documents each function of a backend.

A new backend is one file with the functions in which it differs from `plain.py`, and one line of this table.
"""

from faithful.tables import functions

# backend of the config -> (module, its name in the record)
TABLE = {
    None: ("plain", "torch"),
    "ao": ("torchao", "torchao"),
    "te": ("transformer_engine", "transformer_engine"),
    "msamp": ("levels", "amp8"),
}


def implementation(backend, strategy, rehearsal):
    """The code that computes. On a CPU torchao's layers run only under FSDP2 and ZeRO, TransformerEngine's never."""
    in_software = backend == "te" or (backend == "ao" and strategy in ("single", "ddp"))
    return "emulated" if rehearsal and in_software else TABLE[backend][1]


def of(plan):
    """The functions of the plan's backend, as attributes."""
    if plan.implementation == "emulated":
        return functions("backends", "emulated")
    if plan.precision == "fp16" and plan.rehearsal:
        return functions("backends", "fp16_on_cpu")
    return functions("backends", TABLE[plan.backend][0])
