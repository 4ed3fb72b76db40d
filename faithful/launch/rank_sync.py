"""Whether all processes make a call that a script may also make on one process.

No collective is allowed before all processes are known to make the call, because the others may be in another
collective. So each process tells the store in which call it waits, or that it has ended. Nothing is told in a step.
"""

import contextlib
import time

from faithful.config.settings import timeout_seconds
from faithful.launch import launcher

COMES = 10  # seconds that the main process waits for others of which nothing is known, see `all_ranks_called`
SKIPS = 60  # seconds that a process waits for others to skip a micro-batch, too
judged: set[str] = set()  # the calls that the main process has answered
impatient: set[str] = set()  # kinds of calls to which others did not come
waits: str | None = None  # the call in which this process waits for the others


def tell(where: str) -> None:
    """Tells the main process, without waiting for an answer, the call in which this process is, or `ended`."""
    import torch.distributed as dist

    if launcher.is_distributed() and dist.get_rank():
        with contextlib.suppress(dist.DistError):  # the main process has ended
            launcher.store().set(f"at/{dist.get_rank()}", where)


def all_ranks_called(what: str, needed: bool = False) -> bool:
    """Whether all processes make this call, which is no collective. The others wait for the main process's answer. The
    main process waits COMES seconds for them (1 second when that was in vain before), or until one has ended or waits
    in another call; a process that comes later gets False. needed: the main process cannot go on alone, so it waits for
    a slow process nearly as long as for a collective, and says which one is missing."""
    global waits
    import torch.distributed as dist

    if not launcher.is_distributed():
        return True
    store, call = launcher.store(), f"all_ranks_called/{what}/{next(launcher.calls(what))}"
    waits = call
    try:
        if dist.get_rank():
            tell(call)
        else:
            judged.add(call)
            store.set(f"{call}/verdict", "all" if others_come(call, what, needed) else "alone")
        while not store.check([f"{call}/verdict"]):  # get() would keep this process's other threads from the store
            time.sleep(0.005)
    finally:
        waits = None
    return store.get(f"{call}/verdict") == b"all"


def all_skip() -> bool:
    """Whether every process skips the micro-batch that this one skips. No collective, as the others may be in one: each
    waits SKIPS seconds for the others."""
    import torch.distributed as dist

    store, call = launcher.store(), f"all_skip/{next(launcher.calls('all_skip'))}"
    come, end = store.add(call, 1), time.monotonic() + SKIPS
    while come < dist.get_world_size() and time.monotonic() < end:
        time.sleep(0.05)
        come = store.add(call, 0)
    return come >= dist.get_world_size()


def others_come(call: str, what: str, needed: bool) -> bool:
    """Whether all other processes come to the call of this one, the main process."""
    import torch.distributed as dist

    store, began, said, kind = launcher.store(), time.monotonic(), False, what.split("/")[0]
    keys = {rank: f"at/{rank}" for rank in range(1, dist.get_world_size())}
    # where a collective times out, every process fails, and nobody knows why: this one gives up before
    longest = 0.9 * timeout_seconds() if needed else 1 if kind in impatient else COMES
    while True:
        at = {rank: store.get(key).decode() if store.check([key]) else "" for rank, key in keys.items()}
        if all(where == call for where in at.values()):
            return True
        if any(where and where != call and where not in judged for where in at.values()):  # ended, or in another call
            return False
        waited = time.monotonic() - began
        if waited > longest:
            impatient.add(kind)
            return False
        if needed and waited > COMES and not said:
            late = ", ".join(str(rank) for rank, where in at.items() if where != call)
            print(f"waiting for rank {late} to call {kind}", flush=True)
            said = True
        time.sleep(0.01)
