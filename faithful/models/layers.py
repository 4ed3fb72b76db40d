"""The layers of a model by what computes them: its Linear layers, and those that a backend computes in FP8."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from faithful.tensors.names import parameters_of, plain_names, unwrapped

ShapeOf = Callable[[nn.Parameter], torch.Size]  # the shape of a whole parameter, of which a process may hold a shard


class Hook:
    """A forward hook of ours. A copy or a pickle of its module has one that does nothing: else `copy.deepcopy(model)`,
    for an average of its weights, would copy what the hook is a method of: optimizers, trackers, DDP."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.method(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (nothing,)


def nothing(*args: Any, **kwargs: Any) -> None:
    pass


def kind(module: nn.Module) -> str:
    """`<package>.<class>` of a module, such as torchao.Float8Linear. Skips the class FSDP<Name> that FSDP2 adds."""
    cls = next(cls for cls in type(module).__mro__ if not cls.__name__.startswith("FSDP"))
    return f"{cls.__module__.split('.')[0]}.{cls.__name__}"


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is torch's Linear or transformers' Conv1D (GPT-2), a Linear with transposed weight."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def linear_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_linear(module)]


class FP8Layers:
    """The layers of a model that compute in FP8, by their classes. kinds: those of the backend, {"package.Class":
    (number of Linear, of LayerNorm in it)}."""

    def __init__(self, kinds: Mapping[str, tuple[int, int]], model: nn.Module) -> None:
        self.model, self.any = model, bool(kinds)
        found = [(name, module, kind(module)) for name, module in plain_names(unwrapped(model).named_modules())]
        self.counts = {module: kinds[of] for _, module, of in found if of in kinds}
        self.linear = {name: module for name, module, of in found if kinds.get(of, (0, 0))[0]}

    def counted(self) -> tuple[int, int]:
        """(number of Linear, number of LayerNorm) layers."""
        return sum(linear for linear, _ in self.counts.values()), sum(norm for _, norm in self.counts.values())

    def parameters(self, outside: Collection[nn.Module] = ()) -> set[nn.Parameter]:
        """Those of the layers. outside: layers that are left out."""
        return {p for layer in self.counts if layer not in outside for p in layer.parameters(recurse=False)}

    def share(self, shape_of: ShapeOf, outside: Collection[nn.Module] = ()) -> float:
        """The fraction of the model's parameters that is in the layers. outside: layers that are left out."""
        inside = self.parameters(outside)
        sizes = {p: shape_of(p).numel() for p in nn.Module.parameters(self.model)}
        return sum(sizes[p] for p in inside) / max(1, sum(sizes.values()))

    def large_outside(self, shape_of: ShapeOf) -> list[dict[str, Any]]:
        """[{name, share}] of weights with more than two dimensions that are over a twentieth of an FP8 model's
        parameters and in none of the layers: experts of a mixture, which transformers keeps in one parameter;
        convolutions."""
        inside = self.parameters()
        shapes = {name: shape_of(p) for name, p in parameters_of(self.model) if self.any and p not in inside}
        whole = sum(shape_of(p).numel() for p in nn.Module.parameters(self.model))
        large = {name: shape for name, shape in shapes.items() if len(shape) > 2 and shape.numel() > whole / 20}
        return [{"name": name, "share": round(shape.numel() / whole, 4)} for name, shape in large.items()]
