"""What is shown while one waits, on stderr: on a terminal a bar whose time goes on, in a log a line every few seconds.

    with progress.waiting("imports torch"):
        ...
    with progress.waiting("traces", total=12) as bar:
        bar.update()

It imports neither torch nor accelerate: what takes long begins with it.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
from tqdm import tqdm

from shared.args import QUIET, Lines

FORGET = 600
# When ./launch.sh began, which becomes this process, unless the clock was set since. Nothing has been printed since.
BEGAN = Lines.logged = time.monotonic() - min(max(0, time.time() - psutil.Process().create_time()), 60)


@contextlib.contextmanager
def waiting(what: str, total: int | None = None, **how: Any) -> Iterator[tqdm]:
    """A bar over `total` things, or the time alone, while the block runs. how: arguments of tqdm."""
    terminal = sys.stderr.isatty()
    style = "{desc}, {elapsed}" if total is None else "{desc} {n_fmt}/{total_fmt}, {elapsed}"
    how |= {"leave": False, "bar_format": style, "file": sys.stderr if terminal else Lines()}
    Lines.logged = max(Lines.logged, time.monotonic() - QUIET / 2)  # a line may just have been printed by `print`
    with tqdm(desc=what, total=total, **how) as bar:
        with every(min(1, QUIET), bar.refresh):
            yield bar


def write(line: str) -> None:
    """Prints a line above the bar that is shown."""
    Lines.logged = time.monotonic()
    tqdm.write(line)
    sys.stdout.flush()


@contextlib.contextmanager
def phases(of_now: Callable[[], str | None]) -> Iterator[None]:
    """While the block runs: a line every few seconds with what `of_now` says and how long it has been so, on a terminal
    too, where other processes print. After FORGET seconds it says no more: nobody knows what it waits for."""
    what, since, said = of_now(), BEGAN, Lines.logged

    def say() -> None:
        nonlocal what, since, said
        now, before = time.monotonic(), what
        if (what := of_now()) != before:
            since = said = now
        elif what and now - said >= QUIET and now - since < FORGET:
            said = now
            print(f"{what}, {now - since:.0f} s", file=sys.stderr, flush=True)

    with contextlib.nullcontext() if os.environ.get("TQDM_DISABLE") else every(1, say):
        yield


@contextlib.contextmanager
def every(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Calls `call` every so many seconds, from a thread, while the block runs."""
    ended = threading.Event()

    def calls() -> None:
        while not ended.wait(seconds):
            call()

    thread = threading.Thread(target=calls, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
