"""Data loaders: a run resumed in the middle of an epoch goes on with the remaining samples of that epoch.

A loader draws its order, and the seed of its workers, when an epoch begins. A checkpoint holds the states of the random
generators at that time, and the number of the epoch. The first epoch after `load_state` draws from these, and then
restores those of the checkpoint; a sampler's own draws on, as samplers also do after their first batch. Persistent
workers draw a seed once, in their loader's first epoch: those of a resumed run get that seed again, and draw none. A
torchdata StatefulDataLoader saves its own place in the data.
"""

import contextlib
import errno
import itertools
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from faithful.errors import OutOfSharedMemory, Refused
from faithful.tensors import random_states
from faithful.tensors.random_states import States
from faithful.tensors.serialization import pack, unpack

Prepared = DataLoaderShard | DataLoaderDispatcher
AGAIN = (
    "the run was resumed in the middle of an epoch, and the script begins it anew, with the batches that it has "
    "trained on: for the rest alone call accelerator.skip_first_batches(loader, n)"
)
FORGOTTEN = ("slice_fn", "torch_device_mesh", "submesh_tp", "_non_blocking", "_drop_last", "place")  # accelerate#4295


class Epoch:
    """The epoch of a prepared loader, also after `skip_first_batches`. `began`: {name: state} of its random generators
    when the epoch began; `again`: states to begin the next epoch with, or None. In both, `workers` is there if the
    epoch goes on with persistent workers. `anew`: the pass over such an epoch that begins with its first batch, or
    None. `workers`: the state from which these drew their seed, or None. note: prints and keeps a line of a kind, once;
    None where processes may make different numbers of passes."""

    def __init__(self, note: Callable[[str, str], None] | None = None) -> None:
        self.note = note
        self.loaders: list[Prepared] = []
        self.began: States | None = None
        self.again: States | None = None
        self.anew: _BaseDataLoaderIter | None = None
        self.workers: torch.Tensor | None = None

    def watch(self, prepared: Any) -> Any:
        """Watches `prepared`, Accelerate's loader around torch's, and returns it."""
        inside = getattr(prepared, "base_dataloader", None)
        self.loaders = [*self.loaders[:1], prepared]  # the first and the newest: a script may make one per epoch
        if type(inside) is DataLoader:
            inside.__class__, inside.epoch = Watched, weakref.ref(self)  # a cycle would keep its workers alive
        return prepared

    def running(self, between_batches: bool) -> bool:
        """Whether an epoch is under way. between_batches: whether the newest batch is not trained on yet."""
        for loader in self.loaders:
            if any(other is loader for other in loader.gradient_state.dataloader_references):
                return between_batches or not loader.end_of_dataloader
        return False

    @property
    def first(self) -> DataLoader | Prepared:
        """torch's loader inside the prepared one."""
        return getattr(self.loaders[0], "base_dataloader", self.loaders[0])

    def generator(self) -> torch.Generator | None:
        """The generator of the loader's sampler, or None."""
        return sampler_generator(self.first)

    def number(self, running: bool) -> int:
        """The number of the epoch under way, or of the next one, as Accelerate counts them. running: see `running`."""
        newest = self.loaders[-1]
        in_last_batch = not running and any(other is newest for other in newest.gradient_state.dataloader_references)
        return newest.iteration + in_last_batch  # Accelerate counts on after the last batch

    def forget_workers(self) -> None:
        """Ends persistent workers: the next epoch starts others."""
        for loader in self.loaders:
            if isinstance(inside := getattr(loader, "base_dataloader", None), Watched):
                inside._iterator = None

    def stateful(self) -> Prepared | None:
        """The loader, if it saves its own place in the data, or None."""
        return self.loaders[0] if getattr(self.loaders[0], "use_stateful_dataloader", False) else None


def look_at(loader: DataLoader, groups: int, dispatches: bool, note: Callable[[str, str], None]) -> None:
    """Looks at a loader before Accelerate divides its batches. groups: of processes, which get batches of their own.
    dispatches: the main process is to read them for all. Raises Refused for a loader without a batch sampler, which
    Accelerate does not divide."""
    indices = type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)
    if indices and loader.batch_sampler is None and not dispatches:
        raise Refused(
            "a loader has batch_size=None and a data set with indices, which Accelerate does not share out: give it a "
            "batch size or a batch_sampler, or make the data set an IterableDataset"
        )
    if groups > 1 and (what := divided_before(loader)):
        again = f"{what} has divided the data over the processes, and prepare divides it again: an epoch reads only "
        note("divided", again + f"1/{groups} of it. Leave one of the two out")


def divided_before(loader: DataLoader) -> str | None:
    """What has divided a loader's data over the processes, which `prepare` does again; None where nothing has."""
    samplers = getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for sampler in samplers:
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            return type(sampler).__name__
    of_datasets = getattr(getattr(loader, "dataset", None), "_distributed", None)
    return "split_dataset_by_node" if getattr(of_datasets, "world_size", 1) > 1 else None


def refuse_one_batch_for_all(prepared: Any, groups: int) -> None:
    """Raises Refused where the main process reads the batches, and Accelerate gives one to all groups of processes."""
    if isinstance(prepared, DataLoaderDispatcher) and prepared.submesh_tp and groups > 1:
        raise Refused(
            f"Accelerate gives the {groups} groups of tensor parallel processes one and the same batch of an "
            "IterableDataset: let each process read it, by DataLoaderConfiguration(dispatch_batches=False)"
        )


def no_epoch() -> None:
    """In a copy of a loader, or one from a pickle, which no Accelerator watches."""


class Watched(DataLoader):
    epoch: Callable[[], Epoch | None]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"epoch": no_epoch}

    def __iter__(self) -> _BaseDataLoaderIter:
        epoch, generator = self.epoch(), sampler_generator(self)
        if epoch is None:  # its Accelerator is gone
            return super().__iter__()
        if epoch.note and (numbers := uneven(self)):
            gives = "a loader with even_batches=False gives some processes {} batches and others {}: a pass that needs "
            epoch.note("uneven", gives.format(*numbers) + "all, in training or with sharded weights, fails at the last")
        again, epoch.again, later = epoch.again, None, random_states.of_host()
        if again is not None:
            set_generators(generator, again)
        workers = self.persistent(epoch, again)
        epoch.began = generators(generator) | ({"workers": workers} if workers is not None else {})
        iterator = super().__iter__()
        if again is not None:
            if hasattr(iterator, "_sampler_iter"):  # the sampler draws the order with its first batch
                batches = iterator._sampler_iter
                first = list(itertools.islice(batches, 1))
                iterator._sampler_iter = itertools.chain(first, batches)
            random_states.set_host(later)
        epoch.anew = iterator if again is not None and self is epoch.first and begins_anew(self) else None
        return iterator

    def persistent(self, epoch: Epoch, again: States | None) -> torch.Tensor | None:
        """The state from which this epoch's workers drew their seed earlier, or None if they are to draw it now."""
        goes_on = self is epoch.first if again is None else "workers" in again
        return epoch.workers if self.persistent_workers and (goes_on or self._iterator is not None) else None

    def _get_iterator(self) -> _BaseDataLoaderIter:
        """Starts the workers."""
        epoch, own = self.epoch(), self.generator
        if epoch is None:
            return super()._get_iterator()
        if self.persistent_workers and epoch.began and "workers" in epoch.began:
            self.generator = torch.Generator()
            self.generator.set_state(epoch.began["workers"])
        elif self.persistent_workers and self is epoch.first:
            epoch.workers = torch.get_rng_state() if own is None else own.get_state()
        try:
            return super()._get_iterator()
        except OSError as error:  # of a semaphore
            if error.errno == errno.ENOSPC:
                raise OutOfSharedMemory from None
            raise
        finally:
            self.generator = own


def refuse_other_rest(epochs: list[Epoch], active: Any) -> None:
    """Raises Refused where a resumed run trains on the rest of an epoch that nobody watches, in another order. active:
    the loader under way, or None."""
    if active is not None and not any(active is loader for epoch in epochs for loader in epoch.loaders):
        if any(epoch.again is not None and active.dataset is epoch.first.dataset for epoch in epochs):
            raise Refused(
                "the run was resumed in the middle of an epoch, whose order Accelerate's function skip_first_batches "
                "draws anew: call the method, accelerator.skip_first_batches(loader, n)"
            )


def trains_again(epochs: list[Epoch], passes: int) -> bool:
    """Whether a run that was resumed in the middle of an epoch trains on its first batches again. passes: the backward
    passes so far; a script that leaves out batches itself has drawn more."""
    drawn = [epoch.anew._num_yielded for epoch in epochs if epoch.anew is not None]
    for epoch in epochs:
        epoch.anew = None
    return any(batches - 1 <= passes for batches in drawn)  # Accelerate draws one before it is needed


def as_before(rest: Any, loader: Any) -> Any:
    """`rest`, made by Accelerate's skip_first_batches, with what that does not copy: without the mesh the processes of
    tensor parallel would get different batches."""
    for name in FORGOTTEN:
        if hasattr(loader, name):
            setattr(rest, name, getattr(loader, name))
    return rest


def uneven(loader: DataLoader) -> tuple[int, int] | None:
    """The largest and the smallest number of batches that a process gets; None if all get as many, or it is unknown."""
    shard = loader.batch_sampler
    if isinstance(shard, BatchSamplerShard) and not (shard.even_batches or shard.split_batches or shard.drop_last):
        with contextlib.suppress(TypeError):  # a sampler without a length
            least, rest = divmod(len(shard.batch_sampler), shard.num_processes)
            return (least + 1, least) if rest else None
    return None


def samplers(loader: DataLoader | Prepared) -> Iterator[Any]:
    """Samplers wrap samplers: Accelerate's shards, skipped batches, torch's batches."""
    seen, sampler = 0, loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None and seen < 8:
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler, seen = getattr(sampler, "sampler", None) if inner is None else inner, seen + 1


def sampler_generator(loader: DataLoader | Prepared) -> torch.Generator | None:
    """The generator of a loader's sampler, or None if it uses torch's global one."""
    found = (getattr(sampler, "generator", None) for sampler in samplers(loader))
    return next((generator for generator in found if isinstance(generator, torch.Generator)), None)


def begins_anew(loader: DataLoader | Prepared) -> bool:
    """Whether each pass begins with the first sample: a sampler of the script's own may go on where it was."""
    return type([None, *samplers(loader)][-1]) in (SequentialSampler, RandomSampler, SeedableRandomSampler)


def generators(of_sampler: torch.Generator | None) -> States:
    return random_states.of_host() | ({"own": of_sampler.get_state()} if of_sampler is not None else {})


def set_generators(of_sampler: torch.Generator | None, states: States) -> None:
    random_states.set_host(random_states.of_host() | states)
    if of_sampler is not None and "own" in states:
        of_sampler.set_state(states["own"])


def state_dict(epochs: list[Epoch], between_batches: bool) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """({name: tensor} of this process, JSON values of each loader: whether it is in the middle of an epoch, and the
    number of the epoch)."""
    parts: dict[str, torch.Tensor] = {}
    states: list[dict[str, Any]] = []
    for i, epoch in enumerate(epochs):
        running, generator = epoch.running(between_batches), epoch.generator()
        states.append({"running": running and epoch.began is not None, "epoch": epoch.number(running)})
        parts |= {f"loader/{i}/workers": epoch.workers} if epoch.workers is not None else {}
        parts |= {f"loader/{i}/now": generator.get_state()} if generator is not None else {}
        if running and epoch.began is not None:
            states[i]["same_workers"] = "workers" in epoch.began
            parts |= {f"loader/{i}/{name}": state for name, state in epoch.began.items()}
        if (loader := epoch.stateful()) is not None:  # differs from process to process; a loader may have no length
            text = json.dumps(pack(loader.state_dict(), parts, f"loader/{i}/stateful."))
            parts[f"loader/{i}/stateful"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return parts, states


def load_state_dict(epochs: list[Epoch], parts: Mapping[str, torch.Tensor], states: list[dict[str, Any]]) -> None:
    """Loads what `state_dict` returned."""
    for i, (epoch, state) in enumerate(zip(epochs, states, strict=False)):
        generator = epoch.generator()
        epoch.loaders[0].set_epoch(state["epoch"])
        if generator is not None and f"loader/{i}/now" in parts:
            generator.set_state(parts[f"loader/{i}/now"])
        epoch.forget_workers()
        host = random_states.of_host()
        names = [
            n for n in (*host, "own", "workers") if f"loader/{i}/{n}" in parts or (n == "torch" and state["running"])
        ]
        saved = {name: parts[f"loader/{i}/{name}"].clone() for name in names}
        for name in {"own", "workers"} & saved.keys():  # they are set later, when an epoch begins: an error is due now
            torch.Generator(generator.device if name == "own" and generator is not None else "cpu").set_state(
                saved[name]
            )
        try:
            random_states.set_host(host | saved)
        finally:
            random_states.set_host(host)
        epoch.workers = saved.get("workers")
        if state["running"]:
            epoch.again = saved if state.get("same_workers") else {k: v for k, v in saved.items() if k != "workers"}
        if (loader := epoch.stateful()) is not None and f"loader/{i}/stateful" in parts:
            text = bytes(parts[f"loader/{i}/stateful"].tolist()).decode()
            loader.load_state_dict(unpack(json.loads(text), parts))
