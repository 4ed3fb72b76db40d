"""The recipes of a level: how its layers scale and multiply. Weights, gradients, their communication, optimizer and
checkpoints are the level's."""

from collections.abc import Mapping
from typing import Any

import torch

from . import fp4, linear, scaling

WINDOW = 16  # FP8-LM's history of amaxes


class Recipe:
    """MS-AMP's own: FP8 products, whose scales of activations and output gradients are powers of two from a window of
    16 steps, in-time in the first ones."""

    name = "msamp"
    defaults: dict[str, Any] = {}
    window = history = WINDOW
    gradient_format = scaling.E5M2
    products: type[torch.autograd.Function] = linear.Products

    def __init__(self, options: Mapping[str, Any]) -> None:
        unknown = ", ".join(options.keys() - self.defaults.keys())
        if unknown and not self.defaults:
            raise ValueError(f"the recipe {self.name!r} has no options, got {unknown}")
        if unknown:
            raise ValueError(f"the recipe {self.name!r} knows {', '.join(self.defaults)}, not {unknown}")
        self.options = self.defaults | dict(options)
        self.settings: tuple[Any, ...] = self.window, self.gradient_format  # what `products` needs of the recipe

    def cast(self, x: torch.Tensor, delayed: linear.Delayed, *how: bool) -> tuple[torch.Tensor | None, ...]:
        """What `products` takes of the input x [M, in]. delayed, how: see `linear.cast`."""
        return linear.cast(x, delayed, linear.INPUT, scaling.E4M3, self.window, *how)


class TEDelayed(Recipe):
    """The same with TransformerEngine's DelayedScaling, updated once per step. fp8_format: "HYBRID" or "E4M3"."""

    name = "te_delayed"
    defaults = {
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "margin": 0,
        "fp8_format": "HYBRID",
        "reduce_amax": True,
    }
    window = 0

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        formats = {"HYBRID": scaling.E5M2, "E4M3": scaling.E4M3}
        if self.options["fp8_format"] not in formats:
            raise ValueError(f"fp8_format is HYBRID or E4M3, not {self.options['fp8_format']!r}")
        self.gradient_format, self.history = formats[self.options["fp8_format"]], self.options["amax_history_len"]
        self.settings = self.window, self.gradient_format


class FP4(Recipe):
    """MS-AMP's FP4 (amp8/fp4.py). Each option leaves out one part."""

    name = "fp4"
    defaults = {"disable_gradient_estimator": False, "disable_outlier_clamping": False}
    products = fp4.Products

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        estimated, self.clamped = (not self.options[key] for key in self.defaults)
        self.settings = estimated, self.clamped, *self.settings

    def cast(self, x: torch.Tensor, delayed: linear.Delayed, *how: bool) -> tuple[torch.Tensor | None, ...]:
        _, x8_turned, x_scale, _ = super().cast(x, delayed, *how)
        return *fp4.of_input(x, self.clamped), x8_turned, x_scale


RECIPES = {recipe.name: recipe for recipe in (Recipe, TEDelayed, FP4)}


def recipe_of(name: str, options: Mapping[str, Any]) -> Recipe:
    if name not in RECIPES:
        raise ValueError(f"recipe is one of {', '.join(RECIPES)}, not {name!r}")
    return RECIPES[name](options)
