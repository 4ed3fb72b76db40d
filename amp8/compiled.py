"""Helpers for torch.compile: small tensor functions compiled on a GPU, and outputs that keep their gradient."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def compiled_on_cuda(function: Callable[..., Result]) -> Callable[..., Result]:
    """Wraps `function`: it runs as written if its first tensor is on a CPU, and through torch.compile on a GPU.

    A chain of elementwise steps then reads and writes memory once instead of once per step. Shapes are dynamic, so
    that layers of different sizes share one kernel.
    """

    @functools.cache
    def compiled() -> Callable[..., Result]:  # not before it is needed: torch.compile imports a compiler
        return torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(first: torch.Tensor, *rest: Any) -> Result:
        if torch.compiler.is_compiling() or not first.is_cuda:  # a part of what is compiled around it
            return function(first, *rest)
        return compiled()(first, *rest)

    return call


def output(y: torch.Tensor) -> torch.Tensor:
    """`y`, a copy of it inside compiled code: what an autograd Function's forward returns.

    torch 2.11's Dynamo hands out every intermediate beside the output. An output that is one of them, after a cast
    that had nothing to do, silently loses its gradient. The compiler drops the copy.
    """
    return y.clone() if torch.compiler.is_compiling() else y
