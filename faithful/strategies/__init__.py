"""The strategies: how a model is distributed over processes. `plain.py` documents each function of a strategy.

A new strategy is one file with the functions in which it differs from `plain.py`, and one line of this table.
"""

from faithful.tables import functions

TABLE = {
    "single": "plain",
    "ddp": "plain",
    "fsdp": "fsdp",
    "hsdp": "fsdp",
    "tp": "tp",
    "zero1": "zero",
    "zero2": "zero",
    "zero3": "zero",
}


def of(plan):
    """The functions of the plan's strategy, as attributes."""
    return functions("strategies", TABLE[plan.strategy])
