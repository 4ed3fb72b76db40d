"""The other processes make the calls with the main process that a script makes there alone.

`if accelerator.is_main_process: accelerator.save_state(folder)` is how most example scripts save. Where each process
holds a part of the run this needs them all, and the others would be in their next forward pass. So in a script that has
such calls (scripts/alone.py) the others wait before each batch and its forward pass, in `wait_for_everyone` and
`end_training` and at the end until the main process has come to the same place, and make meanwhile the calls that it
asks for. So the processes stay connected until then.
"""

import collections
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.nn import Module

from faithful import patches
from faithful.launch import launcher

current: "Following | None" = None  # of the newest Accelerator, where its script has such calls
Method = Callable[[], Callable[..., Any] | None]
MEETS = "following/meets/"
CLOSES = 10  # seconds, see `close`
STEP = "step"  # a kind of places; each prepared loader is another: the main process may read one alone, to show batches


class Following:
    """follow: makes a call that the main process asks for. names_of: of shards, see whole_weights.names_of. Both are
    the Accelerator's, and None once it is gone. `serves`: whether this process makes a call that was asked for."""

    def __init__(self, follow: Method, names_of: Method) -> None:
        self.follow, self.names_of, self.asks, self.serves = follow, names_of, 0, False
        self.places = collections.Counter[str]()  # to which this process has come, of each kind
        self.key = f"following/{next(launcher.calls('following'))}"  # in the store, of this Accelerator
        self.made: set[str] = set()  # the calls that the script itself makes on this process

    def meet(self, kind: str) -> None:
        """Every process comes here. The others wait for the main process."""
        import torch.distributed as dist

        self.places[kind] += 1
        if not launcher.is_distributed():
            return
        store, rank, began, told = launcher.store(), dist.get_rank(), time.monotonic(), False
        while store.add(f"{self.key}/{kind}", int(rank == 0)) < self.places[kind]:
            if store.check([f"{self.key}/end"]):
                store.add(f"{self.key}/over", 1)
                time.sleep(1)  # the main process ends first, with its reason
                raise SystemExit(2)
            if self.serve(kind):
                told = False
            elif not told and time.monotonic() > began + 1:  # for calls that it cannot follow
                store.set(f"at/{rank}", f"{MEETS}{kind}/{self.places[kind]}")
                told = True
            time.sleep(0.03 if told else 0.001)  # the main process may work for long, after its training too
        if told:
            store.set(f"at/{rank}", "")

    def passed(self, where: str) -> bool:
        """Whether the main process has come to the place where another one said that it waits."""
        kind, _, number = where.removeprefix(MEETS).partition("/")
        return where.startswith(MEETS) and int(number) <= self.places[kind]

    def ask(self, call: str, what: tuple[Any, ...]) -> None:
        """Asks the others, on the main process, to make a call that is not a collective (rank_sync.py) with it."""
        launcher.store().set(f"{self.key}/{self.asks}", json.dumps([self.places, call, *what]))
        self.asks += 1

    def serve(self, kind: str | None = None) -> bool:
        """Makes the next call that the main process asks for, if there is one and the script has not made it here.
        kind: of the place at which this process waits; None: it waits in a call. Of a call that the main process makes
        after that place the script may make its own here."""
        store, key = launcher.store(), f"{self.key}/{self.asks}"
        if not store.check([key]):
            return False
        places, call, *what = json.loads(store.get(key))
        steps = places.get(STEP, 0) - self.places[STEP]
        if steps > 0 or (kind and steps == 0 and places.get(kind, 0) >= self.places[kind]):
            return False
        self.asks += 1
        if call not in self.made and (follow := self.follow()):
            serves, self.serves = self.serves, True
            try:
                follow(*what)
            finally:
                self.serves = serves
        return True


def start(follow: Method, names_of: Method) -> None:
    """Begins to follow, before each batch of Accelerate's loaders, too."""
    global current
    current = Following(follow, names_of)
    for kind in (DataLoaderShard, DataLoaderDispatcher):
        if not hasattr(kind.__iter__, "meets"):
            patches.replace(f"accelerate.data_loader:{kind.__name__}.__iter__", meeting(kind.__iter__))


def meeting(batches: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    def each(self: Any) -> Iterator[Any]:
        kind = getattr(self, "place", "loader")
        meet(kind)
        for batch in batches(self):
            yield batch
            meet(kind)

    each.meets = True  # pyrefly: ignore[missing-attribute]
    return each


def meet(kind: str = STEP) -> None:
    if current is not None:
        current.meet(kind)


def before_forward(model: Module, *_: object) -> None:
    """A hook of each prepared model that trains."""
    if model.training and torch.is_grad_enabled():
        meet()


def close() -> None:
    """At the end of a script, which may have called no `end_training`: the last place. The main process, which serves
    the store, waits up to CLOSES seconds until the others have come there."""
    global current
    import torch.distributed as dist

    if current is not None and launcher.is_distributed():
        with contextlib.suppress(dist.DistError):  # the main process has ended
            current.meet(STEP)
            store, key, world = launcher.store(), f"{current.key}/closed", dist.get_world_size()
            store.add(key, 1)
            if dist.get_rank() == 0:
                launcher.until(lambda: store.add(key, 0) >= world, time.monotonic() + CLOSES)
    current = None


def end() -> None:
    """Lets the others wait no more, on a main process that ends with an error. It waits a second for them to see it:
    the store may end with it."""
    import torch.distributed as dist

    if current is not None and launcher.is_distributed() and dist.get_rank() == 0:
        store, key, others = launcher.store(), current.key, dist.get_world_size() - 1
        store.set(f"{key}/end", "")
        launcher.until(lambda: store.add(f"{key}/over", 0) >= others, time.monotonic() + 1)


def serves() -> bool:
    return current is not None and current.serves


def names_of(shards: list[Any]) -> list[tuple[int, str]]:
    found = current.names_of() if current is not None else None
    return found(shards) if found else []


def gathering(call: str, shards: list[Any]) -> tuple[Any, ...]:
    """What the others are asked to do where the main process saves these shards by a call; () where they are of no
    model."""
    names = names_of(shards)
    return ("gather_shards", None, call, names) if names else ()
