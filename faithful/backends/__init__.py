"""The backends: what computes a model's matrix products. `base.py` documents each method.

A new backend is a subclass of Backend in a file of its own, which is imported when a plan names it, and one line of
this table. What it accepts, which is asked before torch is imported, is a class in config/fp8.py.
"""

import contextlib
import os
import pkgutil
from typing import TYPE_CHECKING, Any

from faithful.errors import Refused

if TYPE_CHECKING:
    from faithful.backends.base import Backend
    from faithful.plan import Plan

BACKENDS: dict[str | None, str] = {  # by their names in config/fp8.py
    None: "faithful.backends.high_precision:Torch",
    "ao": "faithful.backends.torchao:TorchAO",
    "te": "faithful.backends.transformer_engine:TransformerEngine",
    "msamp": "faithful.backends.levels:MSAMP",
}


def get_backend(plan: "Plan") -> "Backend":
    """The Backend of a plan."""
    name = BACKENDS[plan.backend]
    if plan.implementation == "emulated":
        name = "faithful.backends.emulation:Emulated"
    elif plan.precision == "fp16" and plan.rehearsal:
        name = "faithful.backends.high_precision:FP16OnCPU"
    return imported(name)(plan)


def imported(name: str) -> Any:
    """A module or `module:object`. Raises Refused if it needs amp8's folder, which a copied project may not have."""
    try:
        return pkgutil.resolve_name(name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("amp8"):
            raise
        raise Refused(
            "this config needs the folder amp8/ beside faithful/: copy it from where this recipe is from"
        ) from None


if os.environ.get("ACCELERATE_FP8_BACKEND", "").upper() == "MSAMP":  # before a script takes a Function's `apply`
    with contextlib.suppress(Refused):  # the plan says it in one line
        imported("amp8")
