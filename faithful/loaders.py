"""Data loaders: a run resumed in the middle of an epoch goes on with the remaining samples of that epoch.

A loader draws its order, and the seed of its workers, when an epoch begins. A checkpoint holds the states of the random
generators at that time. The first epoch after `load_state` draws from these, and then restores those of the checkpoint.
"""

import itertools

import torch
from torch.utils.data import DataLoader


class Epoch:
    """The epoch of a prepared loader, also after `skip_first_batches`. `began`: {name: state} of its random generators
    when the epoch began; `again`: states to begin the next epoch with, or None."""

    def __init__(self):
        self.loaders, self.began, self.again = [], None, None

    def watch(self, prepared):
        """Watches `prepared`, Accelerate's loader around torch's, and returns it."""
        inside = getattr(prepared, "base_dataloader", None)
        self.loaders = [*self.loaders[:1], prepared]  # the first and the newest: a script may make one per epoch
        if type(inside) is DataLoader:
            inside.__class__, inside.epoch = Watched, self
        return prepared

    def running(self, between_batches):
        """Whether an epoch is under way. between_batches: whether the newest batch is not trained on yet."""
        for loader in self.loaders:
            if any(one is loader for one in loader.gradient_state.dataloader_references):
                return between_batches or not loader.end_of_dataloader
        return False

    def generator(self):
        """The generator of the loader's sampler, or None."""
        return sampler_generator(getattr(self.loaders[0], "base_dataloader", self.loaders[0]))


class Watched(DataLoader):
    def _get_iterator(self):
        epoch, own = self.epoch, sampler_generator(self)
        again, epoch.again, later = epoch.again, None, generators(own)
        if again is not None:
            set_generators(own, again)
        epoch.began = generators(own)
        iterator = super()._get_iterator()
        if again is not None:
            if hasattr(iterator, "_sampler_iter"):  # the sampler draws the order with its first batch
                batches = iterator._sampler_iter
                first = list(itertools.islice(batches, 1))
                iterator._sampler_iter = itertools.chain(first, batches)
            set_generators(own, later)
        return iterator


def sampler_generator(loader):
    """The generator of a loader's sampler, or None if it uses torch's global one."""
    seen, sampler = 0, loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None and seen < 8:  # samplers wrap samplers: Accelerate's shards, skipped batches
        if isinstance(getattr(sampler, "generator", None), torch.Generator):
            return sampler.generator
        inner = getattr(sampler, "batch_sampler", None)
        sampler, seen = getattr(sampler, "sampler", None) if inner is None else inner, seen + 1
    return None


def generators(own):
    return {"torch": torch.get_rng_state()} | ({"own": own.get_state()} if own is not None else {})


def set_generators(own, states):
    torch.set_rng_state(states["torch"])
    if own is not None and "own" in states:
        own.set_state(states["own"])


def collect(epochs, between_batches):
    """({name: generator state} of this process, [whether each loader is in the middle of an epoch])."""
    parts, running = {}, [epoch.running(between_batches) and epoch.began is not None for epoch in epochs]
    for i, epoch in enumerate(epochs):
        own = epoch.generator()
        parts |= {f"loader/{i}/now": own.get_state()} if own is not None else {}
        parts |= {f"loader/{i}/{name}": state for name, state in epoch.began.items()} if running[i] else {}
    return parts, running


def put_back(epochs, parts, running):
    for i, (epoch, half_way) in enumerate(zip(epochs, running, strict=False)):
        own = epoch.generator()
        if own is not None and f"loader/{i}/now" in parts:
            own.set_state(parts[f"loader/{i}/now"])
        if half_way:
            names = [name for name in ("torch", "own") if f"loader/{i}/{name}" in parts]
            epoch.again = {name: parts[f"loader/{i}/{name}"] for name in names}
