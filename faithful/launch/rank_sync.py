"""Where the processes of a run are: whether all of them make a call that a script may also make on one process.

No collective is allowed before all processes are known to make the call, because the others may be in another
collective. So each process tells the store where it is: how many training forward passes, epochs or collectives of the
script it has begun, the call in which it waits, or that it has ended.
"""

import collections
import contextlib
import time

from faithful.config.config import timeout_seconds
from faithful.launch import launcher

COMES = 10  # seconds that the main process waits for others of which nothing is known, see `all_ranks_called`
SKIPS = 60  # seconds that a process waits for others to skip a micro-batch, too
# begun: how many forward passes, epochs and collectives of the script this process has begun. Only the main process
# fills the other two. judged: the calls that it has answered; impatient: kinds of calls to which others did not come.
here = {"begun": collections.Counter(), "judged": set(), "impatient": set()}


def tell(where):
    """Tells the main process, without waiting for an answer, where this process is."""
    import torch.distributed as dist

    if launcher.several() and dist.get_rank():
        with contextlib.suppress(dist.DistError):  # the main process has ended
            launcher.store().set(f"at/{dist.get_rank()}", str(where))


def passes(*_):
    """A hook of each prepared model that trains, before its forward pass."""
    import torch

    if torch.is_grad_enabled():
        begins("forward")


def passes_begun():
    """How many training forward passes of prepared models this process has begun."""
    return here["begun"]["forward"]


def begins(kind):
    """Tells where this process is: it begins a `kind` of thing that all processes do."""
    here["begun"][kind] += 1
    tell(f"{kind}:{here['begun'][kind]}")


def all_ranks_called(what, needed=False):
    """Whether all processes make this call, which is no collective. The others wait for the main process's answer. The
    main process waits until each is there, or one has gone on without it: has begun a later forward pass, epoch,
    collective or call, or has ended. Where neither shows it waits COMES seconds (1 second when that was in vain
    before), and a process that comes later gets False. needed: the main process cannot go on alone, so it waits for a
    slow process as long as for a collective."""
    import torch.distributed as dist

    if not launcher.several():
        return True
    store, call = launcher.store(), f"all_ranks_called/{what}/{next(launcher.calls(what))}"
    if dist.get_rank():
        tell(call)
    else:
        here["judged"].add(call)
        store.set(f"{call}/verdict", "all" if others_come(call, what, needed) else "alone")
    while not store.check([f"{call}/verdict"]):  # get() would keep this process's other threads from the store
        time.sleep(0.005)
    return store.get(f"{call}/verdict") == b"all"


def all_skip():
    """Whether every process skips the micro-batch that this one skips. No collective, as the others may be in one: each
    waits SKIPS seconds for the others."""
    import torch.distributed as dist

    store, call = launcher.store(), f"all_skip/{next(launcher.calls('all_skip'))}"
    come, end = store.add(call, 1), time.monotonic() + SKIPS
    while come < dist.get_world_size() and time.monotonic() < end:
        time.sleep(0.05)
        come = store.add(call, 0)
    return come >= dist.get_world_size()


def others_come(call, what, needed):
    import torch.distributed as dist

    store, began, said, kind = launcher.store(), time.monotonic(), False, what.split("/")[0]
    longest = 1 if kind in here["impatient"] else COMES
    if needed:
        longest = timeout_seconds()
    while True:
        keys = {rank: f"at/{rank}" for rank in range(1, dist.get_world_size())}
        at = {rank: store.get(key).decode() if store.check([key]) else "forward:0" for rank, key in keys.items()}
        if all(where == call for where in at.values()):
            return True
        if any(elsewhere(where, call) for where in at.values()):
            return False
        waited = time.monotonic() - began
        if waited > longest:
            here["impatient"].add(kind)
            return False
        if needed and waited > COMES and not said:
            late = ", ".join(str(rank) for rank, where in at.items() if where != call)
            print(f"waiting for rank {late} to call {kind}", flush=True)
            said = True
        time.sleep(0.01)


def elsewhere(where, call):
    """Whether a process that is at `where` has passed the main process's `call` without making it."""
    kind, _, number = where.partition(":")
    if number:
        return int(number) > here["begun"][kind]
    return where == "ended" or where not in (call, *here["judged"])
