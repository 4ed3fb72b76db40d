"""What a step of a model computes: the shapes of its Linear layers, other products, attention, and the bytes and
kernels of everything else. Counted operator by operator, on tensors with or without values."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from faithful.models.layers import is_linear

aten = torch.ops.aten
FREE = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view,
        aten.promote_types, aten._local_scalar_dense)  # fmt: skip


@dataclass(frozen=True)
class Linear:
    """One call of a Linear layer: y [rows, outputs] = x [rows, inputs] w^T."""

    name: str
    rows: int
    inputs: int
    outputs: int
    input_grad: bool = True  # whether its backward pass computes the gradient of x
    weight_grad: bool = True
    same_input: bool = False  # as the Linear layer called before it: q, k and v have one x

    @property
    def flop(self) -> int:
        """Of one of its products."""
        return 2 * self.rows * self.inputs * self.outputs

    @property
    def backward_products(self) -> int:
        return self.input_grad + self.weight_grad


@dataclass
class Part:
    """A pass over the model without the products of its Linear layers. Casts of their weights, and of the gradients of
    these, are not in it: they depend on the precision."""

    flop: float = 0  # of other products
    attention: float = 0  # FLOP
    bytes: float = 0  # that elementwise operators and reductions read and write
    kernels: int = 0


@dataclass
class Work:
    """What the passes of one optimizer step compute."""

    linears: list[Linear] = field(default_factory=list)
    forward: Part = field(default_factory=Part)
    backward: Part = field(default_factory=Part)
    over_gradients: float = 0  # bytes that are read and written to clip gradients


class Count(TorchDispatchMode):
    """Counts the work of what runs while it is active, of the Linear layers of `watch`, too."""

    def __init__(self) -> None:
        super().__init__()
        self.work, self.on = Work(), True
        self.weights: set[int] = set()  # storages of Linear layers' weights
        self.shapes: set[torch.Size] = set()
        self.before: Callable[[], torch.Tensor | None] = lambda: None  # the input of the Linear called last

    def watch(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Notes each call of the Linear layers among (name, module)."""
        for name, module in modules:
            if is_linear(module):
                self.weights.add(module.weight.untyped_storage()._cdata)
                self.shapes |= {module.weight.shape, module.weight.shape[::-1]}
                module.register_forward_hook(lambda layer, args, out, name=name: self.called(name, layer, args[0], out))

    def called(self, name: str, layer: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        if not self.on:
            return
        inputs, grad = x.shape[-1], torch.is_grad_enabled()
        call = Linear(name, x.numel() // inputs, inputs, out.shape[-1], grad and x.requires_grad,
                      grad and layer.weight.requires_grad, self.before() is x)  # fmt: skip
        self.before = weakref.ref(x)
        self.work.linears.append(call)
        for part, products in ((self.work.forward, 1), (self.work.backward, call.backward_products)):
            part.flop -= products * call.flop  # which `__torch_dispatch__` counts with the others
            part.kernels -= products

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.on:
            self.count(func, args, kwargs or {}, out)
        return out

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        packet = func.overloadpacket
        if func.namespace != "aten" or func.is_view or packet in FREE:
            return
        in_backward = torch._C._current_graph_task_id() != -1
        part = self.work.backward if in_backward else self.work.forward
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        if packet in flop_registry:
            part.kernels += 1
            flop = flop_registry[packet](*args, **kwargs, out_val=out)
            if "attention" not in packet.__name__:
                part.flop += flop
            else:
                part.attention += flop / (2 if causal(func, args, kwargs) else 1)
        elif self.work.backward.kernels > 0 and not in_backward and not torch.is_grad_enabled():
            self.work.over_gradients += sum(map(moved, tensors))
        elif packet is not aten._to_copy or not self.casts_weight(tensors[0], in_backward):
            part.bytes += sum(map(moved, tensors))
            part.kernels += 1

    def casts_weight(self, tensor: torch.Tensor, in_backward: bool) -> bool:
        """Whether a cast is that of a Linear layer's weight, or of its gradient."""
        if in_backward:
            return tensor.shape in self.shapes
        return tensor.untyped_storage()._cdata in self.weights


def moved(tensor: torch.Tensor) -> int:
    """The bytes of a tensor, those that it repeats once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention operator computes half of its matrix."""
    names = [argument.name for argument in func._schema.arguments]
    return bool((dict(zip(names, args, strict=False)) | kwargs).get("is_causal"))
