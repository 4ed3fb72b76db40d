"""The strategies: how a model is distributed over processes. `base.py` documents each method.

A new strategy is a subclass of Strategy in a file of its own, and one line of this table. What it accepts and
costs, which is asked before torch is imported, is a class in config/strategies.py.
"""

from typing import TYPE_CHECKING

from faithful.strategies.base import Strategy
from faithful.strategies.deepspeed.zero import ZeRO
from faithful.strategies.fsdp import FSDP, HSDP
from faithful.strategies.replicated import DDP, SingleDevice
from faithful.strategies.tp import TensorParallel

if TYPE_CHECKING:
    from faithful.plan import Plan

STRATEGIES: dict[str, type[Strategy]] = {
    "single": SingleDevice,
    "ddp": DDP,
    "fsdp": FSDP,
    "hsdp": HSDP,
    "tp": TensorParallel,
    "zero1": ZeRO,
    "zero2": ZeRO,
    "zero3": ZeRO,
}


def get_strategy(plan: "Plan") -> Strategy:
    """The Strategy of a plan."""
    return STRATEGIES[plan.strategy](plan)
