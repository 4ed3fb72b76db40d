"""What computes the products of a model. `plain.py` says what each function of a backend does.

A new backend is one new file, with the functions in which it differs from `plain`, and one line of this table.
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
    """Which code computes: on a CPU torchao's layers run under FSDP2 and ZeRO alone, TransformerEngine's nowhere."""
    in_software = backend == "te" or (backend == "ao" and strategy in ("single", "ddp"))
    return "emulated" if rehearsal and in_software else TABLE[backend][1]


def of(plan):
    """The functions of the plan's backend."""
    if plan.implementation == "emulated":
        return functions("backends", "emulated")
    if plan.precision == "fp16" and plan.rehearsal:
        return functions("backends", "fp16_on_cpu")
    return functions("backends", TABLE[plan.backend][0])
