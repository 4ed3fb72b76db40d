"""Tensors without values: they build and train a model of any size, and the memory that it would take is counted."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from faithful.config import settings
from faithful.models import dtypes


class Memory:
    """Counts the bytes of tensors that were made while a Watch is active and are still in use.

    moments: (gradients, others) of every moment that no other moment exceeds in both.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.gradients: set[int] = set()
        self.moments: list[tuple[int, int]] = []
        self.live, self.of_gradients, self.on = 0, 0, True

    def born(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self.died, key)
            self.note()

    def died(self, key: int) -> None:
        size = self.sizes.pop(key)
        self.live -= size
        if key in self.gradients:
            self.gradients.remove(key)
            self.of_gradients -= size

    def is_gradient(self, parameter: torch.Tensor) -> None:
        """Hook that runs after a gradient was accumulated into `parameter`."""
        key = parameter.grad.untyped_storage()._cdata  # pyrefly: ignore[missing-attribute]
        if key in self.sizes and key not in self.gradients:
            self.gradients.add(key)
            self.of_gradients += self.sizes[key]
            self.note()

    def note(self) -> None:
        g, o = self.of_gradients, self.live - self.of_gradients
        if not any(g <= g_ and o <= o_ for g_, o_ in self.moments):
            self.moments = [(g_, o_) for g_, o_ in self.moments if g_ > g or o_ > o] + [(g, o)]


class Watch(TorchDispatchMode):
    """Tells a Memory of each tensor that an operator makes."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.memory.on:
            return out
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):  # a view, or the result of an operation in place, is not born
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in inputs:
                self.memory.born(tensor.untyped_storage())
        return out


@contextlib.contextmanager
def without_storage() -> Iterator[None]:
    """Puts every parameter that a module registers on `meta`, so that a model of any size can be built."""

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is not None and parameter.device.type != "meta":
            return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(register)  # pyrefly: ignore[bad-argument-type]
    looks_at_values, nn.init._no_grad_trunc_normal_ = nn.init._no_grad_trunc_normal_, lambda tensor, *_, **__: tensor
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = looks_at_values
        hook.remove()
        torch.set_grad_enabled(True)


def make_fake(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, dtype: torch.dtype | None = None
) -> None:
    """Replaces parameters on `meta` by fake tensors on the CPU, for which autocast and kernels choose as for real ones.
    dtype: of the parameters, if not the model's own, or the one in which `prepare` leaves what is trained."""
    mode, fakes = FakeTensorMode(allow_non_fake_inputs=True), {}  # the batch and the buffers are real
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and id(old) not in fakes:  # else it is tied to one that came before
                with mode:
                    in_fp32 = dtypes.in_16_bit([old]) and not settings.keeps_dtype()
                    own = torch.float32 if in_fp32 else old.dtype
                    fake = torch.empty_like(old, device="cpu", dtype=dtype or own)
                    fakes[id(old)] = nn.Parameter(fake, requires_grad=old.requires_grad)
            module._parameters[name] = old if old is None else fakes[id(old)]
    for group in optimizer.param_groups if optimizer else ():
        group["params"] = [fakes[id(old)] for old in group["params"]]


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Makes amp8 allocate tensors of the right size without computing their values.

    It rounds and steps in small pieces, to be fast: for a large model that is a million operations, each of which takes
    a fake tensor as long as a real one of a few thousand elements.
    """
    try:
        from amp8 import gradients, optimizer, scaling
        from faithful.backends import emulation
    except ModuleNotFoundError:  # a copied project without FP8
        yield
        return

    def rounded(x: torch.Tensor, *_: object) -> torch.Tensor:
        return x.new_empty(x.shape, dtype=torch.bfloat16)

    def operand(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:  # as on a GPU
        return x if x.dtype == dtype else x.new_empty(x.shape, dtype=dtype)

    def amax(x: torch.Tensor, dim: object = None) -> torch.Tensor:
        return x.new_zeros((), dtype=torch.float32)

    with (
        mock.patch.object(scaling, "amax", amax),
        mock.patch.object(scaling, "round_codes", rounded),
        mock.patch.object(scaling, "operand", operand),
        mock.patch.object(scaling, "in_pieces", lambda function, x, *_, dtype=scaling.E4M3: operand(x, None, dtype)),
        mock.patch.object(emulation, "_rounded", rounded),
        mock.patch.object(emulation, "_nvfp4", lambda x, *_: (rounded(x), x.new_ones((), dtype=torch.float32))),
        mock.patch.object(gradients, "squares", lambda codes: torch.ones(len(codes))),
        mock.patch.object(optimizer, "adam_slice", lambda *_: torch.ones(3)),
        mock.patch.object(optimizer, "SLICE", 1 << 62),
    ):
        yield


@contextlib.contextmanager
def without_reading() -> Iterator[None]:
    """Lets a script read a value that does not exist, for example its loss in order to log it: it reads 0. A script
    that moves its model to a device moves nothing."""
    item, number, as_bool = torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__bool__

    def instead(real: Callable[[torch.Tensor], float], value: float) -> Callable[[torch.Tensor], float]:
        return lambda tensor: value if isinstance(tensor, FakeTensor) else real(tensor)

    move = nn.Module.to

    def stay(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if not any(parameter.is_meta for parameter in module.parameters()):
            return move(module, *args, **kwargs)
        dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
        return module if dtype is None else move(module, dtype)

    with (
        mock.patch.object(nn.Module, "to", stay),
        mock.patch.object(torch.Tensor, "item", instead(item, 0.0)),
        mock.patch.object(torch.Tensor, "__float__", instead(number, 0.0)),
        mock.patch.object(torch.Tensor, "__bool__", instead(as_bool, False)),
    ):
        yield
