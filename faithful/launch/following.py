"""The other processes make the calls with the main process that a script makes there alone.

`if accelerator.is_main_process: accelerator.save_state(folder)` is how most example scripts save. Where each process
holds a part of the run this needs them all, and the others would be in their next forward pass. So in a script that has
such calls (scripts/alone.py) the others wait before each batch and its forward pass, in `wait_for_everyone` and in
`end_training` until the main process has come to the same place, and make meanwhile the calls that it asks for.
"""

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
OVER = 1 << 40  # more than the places that a run comes to
Method = Callable[[], Callable[..., Any] | None]
MEETS = "following/meets/"


class Following:
    """follow: makes a call that the main process asks for. names_of: of shards, see whole_weights.names_of. Both are
    the Accelerator's, and None once it is gone. `serves`: whether this process makes a call that was asked for."""

    def __init__(self, follow: Method, names_of: Method) -> None:
        self.follow, self.names_of, self.places, self.asks, self.serves = follow, names_of, 0, 0, False
        self.key = f"following/{next(launcher.calls('following'))}"  # in the store, of this Accelerator
        self.made: set[str] = set()  # the calls that the script itself makes on this process

    def meet(self) -> None:
        """Every process comes here. The others wait for the main process."""
        import torch.distributed as dist

        self.places += 1
        if not launcher.is_distributed():
            return
        store, rank, began, told = launcher.store(), dist.get_rank(), time.monotonic(), False
        while (place := store.add(self.key, int(rank == 0))) < self.places:
            if self.serve(self.places - 1):
                told = False
            elif not told and time.monotonic() > began + 1:  # for calls that it cannot follow
                store.set(f"at/{rank}", f"{MEETS}{self.places}")
                told = True
            time.sleep(0.001)
        if place >= OVER:
            store.add(f"{self.key}/over", 1)
            time.sleep(1)  # the main process ends first, with its reason
            raise SystemExit(2)
        if told:
            store.set(f"at/{rank}", "")

    def passed(self, where: str) -> bool:
        """Whether the main process has come to the place where another one said that it waits."""
        return where.startswith(MEETS) and int(where.removeprefix(MEETS)) <= self.places

    def ask(self, call: str, what: tuple[Any, ...]) -> None:
        """Asks the others, on the main process, to make a call that is not a collective (rank_sync.py) with it."""
        launcher.store().set(f"{self.key}/{self.asks}", json.dumps([self.places, call, *what]))
        self.asks += 1

    def serve(self, places: int) -> bool:
        """Makes the next call that the main process asks for, if there is one and the script has not made it here.
        places: those that the main process had come to at most. Of a later call the script may make its own here."""
        store, key = launcher.store(), f"{self.key}/{self.asks}"
        if not store.check([key]):
            return False
        place, call, *what = json.loads(store.get(key))
        if place > places:
            return False
        self.asks += 1
        if call not in self.made and (follow := self.follow()):
            before, self.serves = self.serves, True
            try:
                follow(*what)
            finally:
                self.serves = before
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
        meet()
        for batch in batches(self):
            yield batch
            meet()

    each.meets = True  # pyrefly: ignore[missing-attribute]
    return each


def meet() -> None:
    if current is not None:
        current.meet()


def before_forward(model: Module, *_: object) -> None:
    """A hook of each prepared model that trains."""
    if model.training and torch.is_grad_enabled():
        meet()


def end() -> None:
    """Lets the others wait no more, on a main process that ends with an error. It waits a second for them to see it:
    the store may end with it."""
    import torch.distributed as dist

    if current is not None and launcher.is_distributed() and dist.get_rank() == 0:
        store, key, others = launcher.store(), current.key, dist.get_world_size() - 1
        store.add(key, OVER)
        launcher.until(lambda: store.add(f"{key}/over", 0) >= others, time.monotonic() + 1)


def serves() -> bool:
    return current is not None and current.serves


def names_of(shards: list[Any]) -> list[tuple[int, str]]:
    found = current.names_of() if current is not None else None
    return found(shards) if found else []
