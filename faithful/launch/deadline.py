"""A run that is told to stop ends in time, whatever its processes are doing.

A main thread that waits in C++, for another process say, runs no handler of a signal. So a thread reads which signals
have come. If the run has not stopped by itself some seconds later, one line says where each process stands, and all
end.
"""

import contextlib
import linecache
import os
import select
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil

from faithful.config import settings
from faithful.errors import Refused
from faithful.launch import launcher, rank_sync

SECONDS = 20  # until a run that was told to stop must: torch's launcher kills its processes after 30
AGAIN = 5  # the same after a second Ctrl-C
ANSWERS = 4  # seconds in which the other processes say where they stand
OTHERS = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[1]), "<")
pipe: int | None = None  # from which the thread reads the signals


class Run(Protocol):
    """What the end of a process asks of its run (ending.py)."""

    steps: Any
    stopping: bool

    def settle(self) -> None: ...
    def explain(self, error: str) -> Refused | None: ...
    def how_to_go_on(self) -> str: ...
    def close(self, error: str | None, code: int) -> int: ...


def watch(asks: Callable[[int], bool], newest: Callable[[], Run | None], end: Callable[[int, float], object]) -> None:
    """Starts the thread, once in a process, from its main thread. asks: whether a signal asks this run to stop. end:
    called with the signal when the time is over, so many seconds later."""
    global pipe
    if pipe is not None:
        return
    pipe, written = os.pipe()
    os.set_blocking(written, False)
    before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    if before != -1:  # of an event loop of the script's, which stays
        signal.set_wakeup_fd(before)
        return
    threading.Thread(target=wait, args=(pipe, asks, newest, end), daemon=True).start()


def forget() -> None:
    """In a forked child: its signals are its own."""
    global pipe
    if pipe is not None:
        pipe = None
        signal.set_wakeup_fd(-1)


def wait(
    pipe: int,
    asks: Callable[[int], bool],
    newest: Callable[[], Run | None],
    end: Callable[[int, float], object],
) -> None:
    number, told, since, again, seconds = 0, 0.0, 0.0, False, float(SECONDS)
    while True:
        came = os.read(pipe, 1)[0] if select.select([pipe], [], [], 0.1 if number else None)[0] else 0
        now, run = time.monotonic(), newest()
        if not number and came and asks(came):
            number, told, since = came, now, now
            seconds = max(SECONDS, 3 * max(run.steps.times[-9:], default=0)) if run else SECONDS  # of steps
        elif number == signal.SIGINT and came in (signal.SIGINT, signal.SIGTERM) and now > told + 1 and not again:
            again, since, seconds = True, now, AGAIN
        if launcher.state["writing"] or (run and run.stopping and not again):
            since = now
        if number and now > min(since + seconds, told + launcher.SAVING):
            if now < told + launcher.SAVING and not again and others_save():
                since = now
            else:
                end(number, now - told)


def others_save() -> bool:
    """Whether another process writes a model, for which this one waits."""
    found: list[int] = []
    within(ANSWERS, lambda: found.append(launcher.count_savers(0)))
    return any(found)


def stand() -> str:
    """Where the main thread is: the line of the script, and the function that it has come to there."""
    inner = frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and frame.f_code.co_filename.startswith(OTHERS):
        frame = frame.f_back
    frame = frame or inner
    if inner is None or frame is None:
        return f"rank {settings.rank()} has ended"
    name, line = frame.f_code.co_filename, frame.f_lineno
    _, called = rank_sync.waits_in()
    waits = "waits" if called else "is"
    deeper = f"in {called.removeprefix(rank_sync.CALL) or inner.f_code.co_name}, called " if inner is not frame else ""
    source = linecache.getline(name, line).strip()[:80]
    return f"rank {settings.rank()} {waits} {deeper}at {os.path.basename(name)}:{line}, {source}"


def stands() -> str | None:
    """Where every process stands, as the main process reads in the store; None if another process prints it."""
    import torch.distributed as dist

    mine = stand()
    if not launcher.is_distributed():
        return mine
    store, rank = launcher.store(), dist.get_rank()
    store.set(f"stands/{rank}", mine)
    keys = [f"stands/{other}" for other in range(dist.get_world_size())]
    come = launcher.until(lambda: store.check(["stands"] if rank else keys), time.monotonic() + ANSWERS)
    if rank:
        return None if come else mine
    each = [store.get(key).decode() if store.check([key]) else None for key in keys]
    store.set("stands", "")
    return "; ".join(said or f"rank {other} does not answer" for other, said in enumerate(each))


def end_the_stopped() -> None:
    """Kills the processes of this run on this machine that somebody has stopped, by SIGSTOP or in a debugger."""
    for pid in launcher.processes_here.values():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                process.kill()


def within(seconds: float, *calls: Callable[[], object]) -> None:
    """Makes the calls in a thread, one after the other, for at most so many seconds: each may wait forever."""

    def makes() -> None:
        for call in calls:
            with contextlib.suppress(Exception):
                call()

    thread = threading.Thread(target=makes, daemon=True)
    thread.start()
    thread.join(seconds)
