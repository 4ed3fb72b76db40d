"""Whether the processes of a run wait for each other, so that none can go on.

One process may be alone in a forward pass that gathers weights from all of them, while the others wait in another call.
Nothing tells them, and a collective waits for as long as its timeout. So a thread of each process looks where its main
thread is. Only a process that has waited in one call for a while tells the others, by the store. A process that loads
data or computes waits in none.
"""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from faithful.launch import launcher, rank_sync

LOOKS = 1  # seconds between two looks
STANDS = 15  # seconds in one call after which a process tells the others
COLLECTIVES = "torch.distributed.distributed_c10d"
BETWEEN_TWO = ("send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv")  # these may differ
looking = False


def watch(end: Callable[[], object]) -> None:
    """Starts the thread, once in a process. end: called when no process can go on."""
    global looking
    if not looking and launcher.is_distributed():
        looking = True
        threading.Thread(target=look, args=(end,), daemon=True).start()


def waits_in() -> tuple[object, str]:
    """(the call in which the main thread waits for the others, its name), or (None, "")."""
    if call := rank_sync.waits:
        return call, f"call of {call.split('/')[1]}"
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or frame.f_globals.get("__name__") != COLLECTIVES or frame.f_code.co_name in BETWEEN_TWO:
        return None, ""
    return frame, frame.f_code.co_name


def look(end: Callable[[], object]) -> None:
    before, since, told, seen = None, 0.0, False, 0
    while launcher.is_distributed():
        time.sleep(LOOKS)
        call, name = waits_in()
        with suppress(RuntimeError):  # the main process has ended, which serves the store
            if call is None or call != before:  # a frame is equal to itself alone, as long as it is held here
                if told:
                    tell("")
                before, since, told, seen = call, time.monotonic(), False, 0
            elif time.monotonic() > since + STANDS:
                if not told:
                    tell(name)
                told, seen = True, seen + 1 if apart() else 0
        if seen > 2:
            end()


def tell(name: str) -> None:
    import torch.distributed as dist

    launcher.store().set(f"waits/{dist.get_rank()}", name)


def apart() -> bool:
    """Whether all processes have told that they wait, in different calls. More than two may also wait in different
    groups, for each other's data; so one of them must be in a call that moves no data, and that all have to make."""
    import torch.distributed as dist

    store, keys = launcher.store(), [f"waits/{rank}" for rank in range(dist.get_world_size())]
    names = {store.get(key).decode() for key in keys} if store.check(keys) else {""}
    empty = any(name == "barrier" or name.startswith("call of ") for name in names)
    return len(names) > 1 and "" not in names and (len(keys) == 2 or empty)
