"""An Accelerate `Accelerator` that does what its config says, or refuses to train. See README.md in this folder."""

from faithful.errors import Diverged, Refused, Stopped

__all__ = ["Accelerator", "Diverged", "Refused", "Stopped"]


def __getattr__(name):  # importing faithful.config.rules must not import torch
    if name == "Accelerator":
        from faithful.accelerator import Accelerator

        return Accelerator
    raise AttributeError(f"module 'faithful' has no attribute {name!r}")
