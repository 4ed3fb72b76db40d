"""The strategies: how a model is distributed over processes. `base.py` documents each method.

A new strategy is a subclass of Strategy in a file of its own, which is imported when a plan names it, and one line of
this table. What it accepts and costs, which is asked before torch is imported, is a class in config/strategies.py.
"""

import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faithful.plan import Plan
    from faithful.strategies.base import Strategy

STRATEGIES = {
    "single": "faithful.strategies.replicated:SingleDevice",
    "ddp": "faithful.strategies.replicated:DDP",
    "fsdp": "faithful.strategies.fsdp:FSDP",
    "hsdp": "faithful.strategies.fsdp:HSDP",
    "tp": "faithful.strategies.tp:TensorParallel",
    "fsdp_tp": "faithful.strategies.fsdp_tp:FSDPTensorParallel",
    "zero1": "faithful.strategies.deepspeed.zero:ZeRO",
    "zero2": "faithful.strategies.deepspeed.zero:ZeRO",
    "zero3": "faithful.strategies.deepspeed.zero:ZeRO",
    "zero3_sp": "faithful.strategies.deepspeed.sequence:SequenceParallel",
}


def get_strategy(plan: "Plan") -> "Strategy":
    """The Strategy of a plan."""
    return pkgutil.resolve_name(STRATEGIES[plan.strategy])(plan)
