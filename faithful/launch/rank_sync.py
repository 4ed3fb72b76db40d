"""Whether all processes make a call that a script may also make on one process, or wait for each other in several.

No collective is allowed before all processes are known to make the call, because the others may be in another
collective. So each process tells the store in which call it waits, or that it has ended. Nothing is told in a step.

One process may also be alone in a forward pass that gathers weights from all of them, while the others wait in another
call: then none can go on, for as long as a collective may take. So a thread of each process looks where its main thread
is, and a process that has waited in one call for a while tells the others. One that loads data waits in none. In a
backward pass DDP waits where no call is seen: a process that uses no CPU time there waits, unless it uses a GPU.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from faithful.config.settings import timeout_seconds
from faithful.launch import following, launcher

COMES = 10  # seconds that the main process waits for others of which nothing is known, see `all_ranks_called`
SKIPS = 60  # seconds that a process waits for others to skip a micro-batch, too
judged: set[str] = set()  # the calls that the main process has answered
impatient: set[str] = set()  # kinds of calls to which others did not come
waits: str | None = None  # the call in which this process waits for the others
LOOKS = 1  # seconds between two looks
STANDS = 15  # seconds in one call after which a process tells the others
COLLECTIVES = "torch.distributed.distributed_c10d"
FUNCTIONAL = "_c10d_functional."  # torch's operators of tensor parallelism
FSDP = "torch.distributed.fsdp._fully_shard."  # it waits in the functions that start a block's passes
ZERO = "deepspeed.runtime.zero."  # it waits in a handle, in a function that DeepSpeed wraps
BETWEEN_TWO = ("send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv")  # these may differ
BACKWARD = ("torch.autograd.graph", "_engine_run_backward")
IDLE = 0.05  # of the time between two looks: a process that computes for less waits
CALL = "call of "  # begins the name of a call that moves no data, see rank_sync.py
watcher: threading.Thread | None = None
over = threading.Event()  # the watcher is to end


def tell(where: str) -> None:
    """Tells the main process, without waiting for an answer, the call in which this process is, or `ended`."""
    import torch.distributed as dist

    if launcher.is_distributed() and dist.get_rank():
        with contextlib.suppress(dist.DistError):  # the main process, which serves the store, has ended
            if not launcher.has_ended(0):  # else torch prints forty lines of C++
                launcher.store().set(f"at/{dist.get_rank()}", where)


def all_ranks_called(what: str, needed: bool = False, asks: tuple[Any, ...] = ()) -> bool:
    """Whether all processes make this call, which is no collective. The others wait for the main process's answer. The
    main process waits COMES seconds for them (1 second when that was in vain before), or until one has ended or waits
    in another call; a process that comes later gets False. needed: the main process cannot go on alone, so it waits for
    a slow one, which does not wait elsewhere, nearly as long as for a collective, and says which one is missing. asks:
    what the others are asked to call where they follow it (following.py)."""
    global waits
    import torch.distributed as dist

    if not launcher.is_distributed():
        return os.environ.get("WORLD_SIZE", "1") == "1"  # after end_training() several cannot tell each other
    store, call = launcher.store(), (waits := f"all_ranks_called/{what}/{next(launcher.calls(what))}")
    follows = following.current if asks else None
    try:
        if dist.get_rank():
            tell(call)
            if follows is not None:
                follows.made.add(call)
        else:
            judged.add(call)
            if follows is not None:
                follows.ask(call, asks)
            store.set(f"{call}/verdict", "all" if others_come(call, what, needed, follows is not None) else "alone")
        while not store.check([f"{call}/verdict"]):  # get() would keep this process's other threads from the store
            if following.current is not None and following.current.serve():
                tell(waits := call)
            time.sleep(0.005)
    finally:
        waits = None
    return store.get(f"{call}/verdict") == b"all"


def all_skip() -> bool:
    """Whether every process skips the micro-batch that this one skips. No collective, as the others may be in one: each
    waits SKIPS seconds for the others."""
    import torch.distributed as dist

    store, call = launcher.store(), f"all_skip/{next(launcher.calls('all_skip'))}"
    store.add(call, 1)
    return launcher.until(lambda: store.add(call, 0) >= dist.get_world_size(), time.monotonic() + SKIPS)


def others_come(call: str, what: str, needed: bool, followed: bool) -> bool:
    """Whether all other processes come to the call of this one, the main process. followed: they also do so from
    another call, in which they wait."""
    import torch.distributed as dist

    store, began, said, kind = launcher.store(), time.monotonic(), False, what.split("/")[0]
    keys = {rank: f"at/{rank}" for rank in range(1, dist.get_world_size())}
    # where a collective times out, every process fails, and nobody knows why: this one gives up before
    longest = 0.9 * timeout_seconds() if needed else 1 if kind in impatient else COMES
    while True:
        at = {rank: store.get(key).decode() if store.check([key]) else "" for rank, key in keys.items()}
        if all(where == call for where in at.values()):
            return True
        elsewhere = [where for where in at.values() if where and where != call and where not in judged]
        if following.current is not None:
            elsewhere = [where for where in elsewhere if not following.current.passed(where)]
        if "ended" in elsewhere or (elsewhere and not followed):  # in another call
            return False
        waited = time.monotonic() - began
        if waited > longest or (needed and waited > STANDS and apart()):
            impatient.add(kind)
            return False
        if needed and waited > COMES and not said:
            late = ", ".join(str(rank) for rank, where in at.items() if where != call)
            print(f"waiting for rank {late} to call {kind}", flush=True)
            said = True
        time.sleep(0.01)


def watch(end: Callable[[], object]) -> None:
    """Starts the thread, once in a process. end: called when no process can go on."""
    global watcher
    if watcher is None and launcher.is_distributed():
        watcher = threading.Thread(target=look, args=(end,), daemon=True)
        watcher.start()


def stop() -> None:
    """Ends the thread: a process aborts whose Python shuts down while a thread is in a call of the store."""
    over.set()
    if watcher is not None:
        watcher.join(5)


def waits_in(idle: bool = False) -> tuple[object, str]:
    """(the call in which the main thread waits for the others, its name), or (None, ""). idle: this process computes
    nothing."""
    if call := waits:
        return call, CALL + call.split("/")[1]
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return None, ""
    module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    caller = frame.f_back and (frame.f_back.f_globals.get("__name__", ""), frame.f_back.f_code.co_name)
    if module == COLLECTIVES and name not in BETWEEN_TWO:
        return frame, name
    if module.startswith(FSDP):  # its frames hold models, which may be dropped
        from torch.distributed import Work

        return next(((each, name) for each in frame.f_locals.values() if isinstance(each, Work)), (None, ""))
    if module == "torch._ops" and str(frame.f_locals.get("self")).startswith(FUNCTIONAL):
        return frame, str(frame.f_locals["self"])
    if module == "deepspeed.utils.nvtx" and caller and caller[0].startswith(ZERO) and caller[1] == "wait":
        return frame, "wait"
    if idle and (module, name) == BACKWARD:
        return frame, "backward"
    return None, ""


def look(end: Callable[[], object]) -> None:
    import torch

    before, since, told, seen, used = None, 0.0, False, 0, time.process_time()
    while launcher.is_distributed() and not over.wait(LOOKS):
        used, earlier = time.process_time(), used
        call, name = waits_in(used - earlier < IDLE * LOOKS and not torch.cuda.is_initialized())
        with contextlib.suppress(RuntimeError):  # the main process has ended, which serves the store
            if call is None or call != before:  # a frame is equal to itself alone, as long as it is held here
                if told:
                    tell_wait("")
                before, since, told, seen = call, time.monotonic(), False, 0
            elif time.monotonic() > since + STANDS:
                if not told:
                    tell_wait(name)
                told, seen = True, seen + 1 if apart() else 0
        if seen > 2:
            end()


def tell_wait(name: str) -> None:
    import torch.distributed as dist

    launcher.store().set(f"waits/{dist.get_rank()}", name)


def apart() -> bool:
    """Whether all processes have told that they wait, in different calls. More than two may also wait in different
    groups, for each other's data; so one of them must be in a call that moves no data, and that all have to make."""
    import torch.distributed as dist

    store, keys = launcher.store(), [f"waits/{rank}" for rank in range(dist.get_world_size())]
    names = {store.get(key).decode() for key in keys} if store.check(keys) else {""}
    empty = any(name == "barrier" or name.startswith(CALL) for name in names)
    return len(names) > 1 and "" not in names and (len(keys) == 2 or empty)
