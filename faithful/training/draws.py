"""Whether the processes draw the same random numbers in training: dropout masks, noise, augmentations."""

import zlib
from typing import Any

import torch
from accelerate.utils import gather_object

from faithful.training.loaders import Epoch

ALIKE = (
    "all processes draw the same random numbers, as the same dropout masks or noise: set_seed(seed, "
    "device_specific=True), after the model is built, lets each draw its own"
)


class Draws:
    """Looks once, from the first update to the second: an epoch draws its order and the seed of its workers when it
    begins, on purpose alike."""

    def __init__(self) -> None:
        self.first: tuple[int, list[Any]] | None = None

    def alike(self, epochs: list[Epoch]) -> bool:
        """Called after the first and after the second update, on all processes. Whether all have drawn the same."""
        states = [torch.get_rng_state()]
        if torch.accelerator.is_available():
            states.append(torch.get_device_module().get_rng_state().cpu())
        now = zlib.crc32(b"".join(state.numpy().tobytes() for state in states)), [epoch.began for epoch in epochs]
        if self.first is None:
            self.first = now
            return False
        (before, began), drawn = self.first, now[0]
        begins = any(then is not epoch.began for then, epoch in zip(began, epochs, strict=False))
        return len(set(gather_object([(before, drawn, begins)]))) == 1 and drawn != before and not begins
