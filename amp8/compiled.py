"""Helpers for torch.compile: small tensor functions compiled on a GPU, and outputs that keep their gradient."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.fx.experimental._config

Result = TypeVar("Result")


def compiled_on_cuda(function: Callable[..., Result]) -> Callable[..., Result]:
    """Wraps `function`: it runs as written if its first tensor is on a CPU, and through torch.compile on a GPU.

    A chain of elementwise steps then reads and writes memory once instead of once per step. Shapes are dynamic, so
    that layers of different sizes share one kernel. The first argument is a tensor or a list of tensors.
    """

    @functools.cache
    def compiled() -> Callable[..., Result]:  # not before it is needed: torch.compile imports a compiler
        return torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(first: torch.Tensor | list[torch.Tensor], *rest: Any) -> Result:
        tensor = first[0] if isinstance(first, list) else first
        if torch.compiler.is_compiling() or not tensor.is_cuda:  # a part of what is compiled around it
            return function(first, *rest)
        with sizes_apart() if isinstance(first, list) else contextlib.nullcontext():
            return compiled()(first, *rest)

    return call


def sizes_apart() -> contextlib.AbstractContextManager[Any]:
    """A context in which torch.compile gives the size of each tensor in a list a symbol of its own. By default equal
    sizes share one, and each new order of large and small layers in a list would be compiled again."""
    return torch.fx.experimental._config.patch(use_duck_shape=False)  # pyrefly: ignore[missing-attribute]


def output(y: torch.Tensor) -> torch.Tensor:
    """`y`, a copy of it inside compiled code: what an autograd Function's forward returns.

    torch 2.11's Dynamo hands out every intermediate beside the output. An output that is one of them, after a cast
    that had nothing to do, silently loses its gradient. The compiler drops the copy.
    """
    return y.clone() if torch.compiler.is_compiling() else y
