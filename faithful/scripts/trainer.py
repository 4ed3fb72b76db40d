"""TrainingArguments(bf16=True), and trl's, which are so by default: made on a machine without an accelerator.

transformers raises an error there, although its Trainer only hands the precision on to `Accelerator(mixed_precision=)`.
A script may make its arguments before Accelerator() and before it imports transformers, which takes a second to import.
So the function that they ask is replaced when transformers' module is loaded.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from faithful import patches

MODULE = "transformers.training_args"
ROW = "transformers.training_args:is_torch_bf16_gpu_available"


def allow_bf16() -> None:
    """TrainingArguments take bf16 on a machine without an accelerator, until the run ends."""
    if MODULE in sys.modules:
        replace(sys.modules[MODULE])
    elif not any(isinstance(finder, WhenLoaded) for finder in sys.meta_path):
        finder = WhenLoaded()
        sys.meta_path.insert(0, finder)
        patches.undo_with(ROW, lambda: finder in sys.meta_path and sys.meta_path.remove(finder))


def replace(module: ModuleType) -> None:
    found = module.is_torch_bf16_gpu_available
    if getattr(found, "__module__", None) == __name__:  # by an earlier Accelerator
        return

    def is_torch_bf16_gpu_available() -> bool:
        return found() or not torch.accelerator.is_available()

    patches.replace(ROW, is_torch_bf16_gpu_available, module, "is_torch_bf16_gpu_available")


class WhenLoaded(MetaPathFinder):
    """An entry of sys.meta_path that replaces the function once its module is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                replace(module)

            spec.loader.exec_module = execute_and_replace
        return spec
