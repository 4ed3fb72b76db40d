"""How a model is spread over processes. `plain.py` says what each function of a strategy does.

A new strategy is one new file, with the functions in which it differs from `plain`, and one line of this table.
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
    """The functions of the plan's strategy."""
    return functions("strategies", TABLE[plan.strategy])
