"""An Accelerate `Accelerator` that does what its config says, or refuses to train. See README.md in this folder."""

from typing import TYPE_CHECKING

from faithful.errors import Diverged, Refused, Stopped

if TYPE_CHECKING:
    from faithful.accelerator import Accelerator

__all__ = ["Accelerator", "Diverged", "Refused", "Stopped", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> "type[Accelerator]":  # importing faithful.config.rules must not import torch
    if name == "Accelerator":
        from faithful.accelerator import Accelerator

        return Accelerator
    raise AttributeError(f"module 'faithful' has no attribute {name!r}")
