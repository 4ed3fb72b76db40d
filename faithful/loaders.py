"""Data loaders: a run that is resumed in the middle of an epoch goes on with the samples that are left.

A loader draws its order, and a seed for its processes, when an epoch begins. A checkpoint holds the generators as they
were then; the first epoch after `load_state` begins from them, and then goes on with the generators of the checkpoint.
"""

import itertools

import torch
from torch.utils.data import DataLoader


class Epoch:
    """Of one prepared loader, and of what is left of it after `skip_first_batches`. `began`: its generators before the
    epoch was drawn, {name: state}; `again`: those that the next one begins with."""

    def __init__(self):
        self.loaders, self.began, self.again = [], None, None

    def watch(self, prepared):
        """prepared: Accelerate's loader, which has torch's inside."""
        inside = getattr(prepared, "base_dataloader", None)
        self.loaders = [*self.loaders[:1], prepared]  # the whole one and the newest, which a script may make each epoch
        if type(inside) is DataLoader:
            inside.__class__, inside.epoch = Watched, self
        return prepared

    def running(self, between_batches):
        """Whether it is in the middle of an epoch. between_batches: the batch at hand is still to be trained on."""
        for loader in self.loaders:
            if any(one is loader for one in loader.gradient_state.dataloader_references):
                return between_batches or not loader.end_of_dataloader
        return False

    def generator(self):
        """Of its sampler, or None."""
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
            if hasattr(iterator, "_sampler_iter"):  # the order is drawn with the first batch
                batches = iterator._sampler_iter
                first = list(itertools.islice(batches, 1))
                iterator._sampler_iter = itertools.chain(first, batches)
            set_generators(own, later)
        return iterator


def sampler_generator(loader):
    """The generator of a loader's sampler, or None where it uses torch's."""
    seen, sampler = 0, loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None and seen < 8:  # samplers of samplers: Accelerate's shards, skipped batches
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
    """({name: tensor} of this process, which loaders are in the middle of an epoch)."""
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
