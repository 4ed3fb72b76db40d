"""How the processes of a run find each other, and how they end with their launcher.

Before the first step there is nothing to save, and SIGTERM ends a process at once, even while it waits for the others
in C++, where Python cannot handle signals. Later SIGTERM makes all processes write a checkpoint (launch/process.py).

If the launcher dies, even by SIGKILL, its processes get SIGTERM, and those that still run GRACE seconds later are
killed, or SAVING seconds later while they write a checkpoint. A new launch of the same run waits until they have left
its folder.
"""

import contextlib
import ctypes
import datetime
import fcntl
import functools
import ipaddress
import itertools
import json
import multiprocessing.queues
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil

from faithful.config import settings
from faithful.config.rules import port_in_use
from faithful.errors import Alone, Refused
from faithful.launch import printing

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

GRACE = 25  # seconds that a process may live on without its launcher
LONGEST = 3600  # seconds that processes wait for one that writes or verifies its part of a checkpoint
# Seconds that it may take to write a checkpoint then. torch's launcher reads the same variable: it kills processes so
# long after it has sent them SIGTERM, and its default is 30.
SAVING = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 600))
LOOPBACK = "127.0.0.1"
print_the_error = multiprocessing.queues.Queue._on_queue_feeder_error  # pyrefly: ignore[missing-attribute]
LAUNCHERS = ("accelerate", "accelerate-launch", "accelerate_launch.py", "torchrun", "deepspeed")  # programs
MODULES = ("accelerate.", "torch.distributed.", "deepspeed.")  # prefixes of the launchers that `python -m` runs

MPI = {  # torchrun's variable: those of Intel MPI, Open MPI and MVAPICH
    "RANK": ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
    "WORLD_SIZE": ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
    "LOCAL_RANK": ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "LOCAL_WORLD_SIZE": ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
}


def end_with_the_launcher() -> None:
    """Makes this process end when its launcher dies. Call it before anything waits for other processes."""
    parents = psutil.Process().parents()
    above = [parent for parent in parents if is_launcher(parent)]
    if above:
        threading.Thread(target=watch_launcher, args=(above[0],), daemon=True).start()
    if above and above[0] == parents[0]:
        end_with_the_parent(signal.SIGTERM)  # at once; `watch` looks every second
    if not above and started_by_a_launcher() and is_orphan():
        line = "error: this process has the environment of a launcher that is gone. To run it without a launcher: "
        printing.at_once(f"{line}unset TORCHELASTIC_RUN_ID and ACCELERATE_DYNAMO_BACKEND\n")
        os._exit(128 + signal.SIGTERM)  # the launcher died while this process was importing torch


def is_launcher(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return launches(process.cmdline())
    return False


def launches(command: Sequence[str]) -> bool:
    """Whether a command line is that of a launcher: `accelerate ...`, `python .../accelerate ...`, `python -m
    accelerate...`, torchrun, deepspeed, or tools/accelerate_launch.py, which ./launch.sh starts."""
    if "-m" in command[1:-1] and command[command.index("-m") + 1].startswith(MODULES):
        return True
    return any(os.path.basename(part) in LAUNCHERS for part in command[:2])


def started_by_a_launcher() -> bool:
    """Whether the environment is a launcher's: torchrun sets the first variable, Accelerate the second."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_DYNAMO_BACKEND" in os.environ


def is_orphan() -> bool:
    """Whether the parent died, so that init or a process of another session took over."""
    parent = os.getppid()
    return parent == 1 or os.getsid(parent) != os.getsid(0)


def end_with_the_parent(number: int) -> None:
    """Makes the kernel send signal `number` when the parent dies, one for each thread that asks for it."""
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def init_loader_worker(own: Callable[[int], object] | None, worker_id: int) -> None:
    """The worker_init_fn of data loaders. own: the script's, or None. Slurm, Docker and Ctrl-C signal every process,
    but the training process still needs data for its step. So a worker ignores the signal, and ends with its parent."""
    # pyrefly: ignore[missing-attribute]
    multiprocessing.queues.Queue._on_queue_feeder_error = send_worker_error
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_the_parent(signal.SIGKILL)
    if own is not None:
        own(worker_id)


def send_worker_error(queue: "multiprocessing.queues.Queue[Any]", error: Exception, batch: object) -> None:
    """Sends the error of a worker that cannot send its batch. multiprocessing would print it, and the training process
    would wait for that batch forever."""
    from torch._utils import ExceptionWrapper

    index = batch[0] if isinstance(batch, tuple) and batch else None
    if type(index) is not int:  # of a queue of the script's
        return print_the_error(error, batch)
    queue.put((index, ExceptionWrapper((type(error), error, error.__traceback__), "in a DataLoader worker process")))


def end_loader_processes() -> None:
    """Kills the daemonic children that ignore SIGTERM. At exit multiprocessing sends them SIGTERM and waits for their
    end, which would take forever."""
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            # SigIgn is a mask in hexadecimal: bit n - 1 stands for signal n.
            ignored = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{child.pid}/status").read_text())[0]
            if child.daemon and int(ignored, 16) & 1 << signal.SIGTERM - 1:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error for a killed worker
                child.kill()


def watch_launcher(launcher: psutil.Process) -> None:
    """Waits until the launcher dies, then sends SIGTERM to this process, and GRACE seconds later SIGALRM, which ends it
    even if its main thread cannot handle signals."""
    end_with_the_parent(signal.SIGCONT)  # of this thread: the process may be stopped, and gets both signals
    with contextlib.suppress(psutil.NoSuchProcess):
        while launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE:
            time.sleep(1)
    set_alarm(orphan=True)
    os.kill(os.getpid(), signal.SIGTERM)


processes_here: dict[int, int] = {}  # {rank: process id} of this run on this machine, as `rendezvous` has seen them
state, turn = {"orphan": False, "writing": False}, threading.Lock()


def set_alarm(**changes: bool) -> None:
    """Sets the time that is left to a process whose launcher is dead. changes: of `state`."""
    with turn:
        state.update(changes)
        # A process has one alarm: this one replaces the one before, so the time begins anew.
        if state["orphan"]:
            signal.alarm(SAVING if state["writing"] else GRACE)


@contextlib.contextmanager
def saving_may_outlive_launcher() -> Iterator[None]:
    """Around the writing of a checkpoint, for which a process may live on longer without its launcher."""
    set_alarm(writing=True)
    try:
        yield
    finally:
        set_alarm(writing=False)


@contextlib.contextmanager
def saving_for_all() -> Iterator[None]:
    """The same around the writing of a model. The processes that do not write wait for it, and know it by the store."""
    with saving_may_outlive_launcher():
        count_savers(1)
        try:
            yield
        finally:
            count_savers(-1)


def count_savers(more: int) -> int:
    """How many processes write a model, with `more` of them."""
    if is_distributed():
        with contextlib.suppress(RuntimeError):  # the main process has ended, which serves the store
            return store().add("saving", more)
    return 0


def lock_folder(folder: Path, mark: Path | None = None) -> int | None:
    """Locks `folder` against other runs while this process lives. Waits for the processes of a killed run to end.
    Raises Refused if another run still holds the lock after that. Returns the descriptor that holds the lock
    until it is closed, or None on a file system without locks. mark: a file by which another machine of this run, which
    has the lock, is known."""
    # The kernel releases the lock when no process has the descriptor open any more, also after SIGKILL.
    try:
        descriptor, end = os.open(folder, os.O_RDONLY), None
    except OSError:  # who writes there says so
        return None
    while end is None or time.monotonic() < end:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if mark and mark.name in os.listdir(folder):
                several = f"{folder} is on a disk that several machines see, but not the main process's"
                raise Refused(f"{several}: let all machines see one disk, or each its own") from None
            if end is None:
                print(f"waiting for the processes of another run to leave {folder}", flush=True)
                end = time.monotonic() + GRACE + 5
            time.sleep(0.1)
        except OSError:  # a file system without locks
            os.close(descriptor)
            return None
    raise Refused(f"another run is writing to {folder}: let it end, or choose another folder")


def adopt_mpi() -> None:
    """Sets the variables that torchrun sets, if mpirun started this process, as MULTI_CPU files with mpirun_config do.
    Accelerate reads those of the MPI programs itself."""
    theirs = {name: next((os.environ[n] for n in names if n in os.environ), None) for name, names in MPI.items()}
    if "LOCAL_RANK" not in os.environ and None not in theirs.values() and theirs["WORLD_SIZE"] != "1":
        os.environ |= cast(dict[str, str], theirs)


def adopt_process_group() -> None:
    """Sets the variables that torchrun sets, if the script has made the process group without them. Accelerate's
    debug_launcher does this. It also asks for the CPU, which would be refused, and is all there is in a rehearsal."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or "LOCAL_RANK" in os.environ:
        return
    if (world := str(dist.get_world_size())) != "1":  # a single process trains without DDP, in Accelerate too
        rank = str(dist.get_rank())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    if not torch.accelerator.is_available():
        os.environ.pop("ACCELERATE_USE_CPU", None)


def rendezvous(timeout: datetime.timedelta) -> None:
    """Waits at most `timeout` for all processes of this run. Raises Alone and names the missing ranks,
    which torch does not."""
    import torch.distributed as dist

    if dist.is_initialized():  # by the script
        return
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise Refused(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} are not set: start the "
            "processes with accelerate launch or torchrun, or set them"
        )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    end = time.monotonic() + timeout.total_seconds()
    within = f"within {timeout.total_seconds():.0f} s (COLLECTIVE_TIMEOUT)"
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not by_launcher
    if serves and port_in_use(port):
        raise Alone(f"port {port} of this machine is in use, by another run perhaps: choose another one")
    if not serves and not until(lambda: is_listening(address, port), end):
        raise Alone(f"rank {rank}: nothing answered at {address}:{port} {within}: is rank 0, or its launcher, there?")
    # multi_tenant: torch's init_process_group makes a store at the same address, and both are served by one server.
    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False, "multi_tenant": True}
    store = served(address, port, options) if serves else dist.TCPStore(address, port, is_master=False, **options)
    # init_process_group joins it
    rendezvous.store = store  # pyrefly: ignore[missing-attribute]
    if not by_launcher and store.check([f"came/{rank}"]):  # a launcher may start its processes anew
        raise Alone(f"rank {rank}: {address}:{port} is of another run, which has a rank {rank}: choose another port")
    store.set(f"came/{rank}", f"{os.getpid()} {pid_namespace()}")
    store.add("came", 1)
    # Adding 0 reads the counter at once. get() would wait for a key, with a message that names no rank.
    if not until(lambda: store.add("came", 0) >= world, end):
        missing = [str(other) for other in range(world) if not store.check([f"came/{other}"])]
        raise Alone(f"rank {rank}: of {world} processes, rank {', '.join(missing)} did not come {within}")
    first = rank - int(os.environ["LOCAL_RANK"])
    for other in range(first, min(world, first + int(os.environ.get("LOCAL_WORLD_SIZE", world)))):
        pid, _, where = store.get(f"came/{other}").decode().partition(" ")
        if where == pid_namespace():
            processes_here[other] = int(pid)
    if by_launcher:
        # pyrefly: ignore[missing-attribute]
        rendezvous.store = store_of_our_own(store, rank, address, port, options)


def store_of_our_own(launchers: "TCPStore", rank: int, address: str, port: int, options: dict[str, Any]) -> "TCPStore":
    """A store that rank 0 serves. The launcher's ends with the launcher, and after that a checkpoint is still saved.
    launchers: its store, at address:port. Rank 0 may be on another machine than the launcher's store."""
    import torch.distributed as dist

    if rank == 0:
        with socket.create_connection((address, port)) as connection:  # others reach rank 0 as it reaches them
            host = LOOPBACK if on_one_machine() else connection.getsockname()[0]
        store = served(host, 0, options)
        launchers.set("ours", f"{host} {store.port}")
    else:
        host, _, serves_at = launchers.get("ours").decode().partition(" ")
        host = address if is_loopback(host) and not on_one_machine() else host
        store = dist.TCPStore(host, int(serves_at), is_master=False, **options)
    return store


def served(host: str, port: int, options: dict[str, Any]) -> "TCPStore":
    """A store that this process serves at `host`, as the name resolves here, and at no other address of this machine:
    torch would serve it on all of them. It does where the others know the address only by a name that means something
    else here: a loopback address, though they are on other machines, or an address that no interface has."""
    import torch.distributed as dist

    listens = None
    with contextlib.suppress(OSError):
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if on_one_machine() or not is_loopback(str(where[0])):
            server = socket.create_server(where, family=family)
            port, listens = server.getsockname()[1], server.detach()
    return dist.TCPStore(host, port, is_master=True, master_listen_fd=listens, **options)


def on_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE")


def several_machines() -> bool:
    return is_distributed() and not on_one_machine()


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def store() -> "Store":
    """The store in which the processes tell each other where they are."""
    from torch.distributed.distributed_c10d import _get_default_store

    return getattr(rendezvous, "store", None) or _get_default_store()


def keep_timeout() -> None:
    """Gives COLLECTIVE_TIMEOUT, if it is set, to a process group that the script has made: with TrainingArguments, say,
    whose ddp_timeout is 30 minutes."""
    import torch.distributed as dist

    if "COLLECTIVE_TIMEOUT" in os.environ and dist.is_available() and dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=settings.timeout_seconds()))


def is_distributed() -> bool:
    import torch.distributed as dist

    return dist.is_initialized() and dist.get_world_size() > 1


@functools.cache
def calls(what: str) -> Iterator[int]:
    """A counter of calls per name `what`: in the store each call needs a name of its own."""
    return itertools.count()


def wait_for_all(what: str, value: Any = None, world: int | None = None) -> list[Any]:
    """Waits until every process is here, in any thread. Returns the `value` of each, JSON. A collective would end the
    run after COLLECTIVE_TIMEOUT, and NCCL with an abort: this waits LONGEST seconds, for work that takes one process
    much longer than others, and raises Alone then, or ConnectionError if a process of this machine ends before. world:
    the number of processes, where there is no process group yet."""
    import torch.distributed as dist

    if not (world or is_distributed()):
        return [value]
    rank, world, end = settings.rank(), world or dist.get_world_size(), time.monotonic() + LONGEST
    call = f"here/{what}/{next(calls(f'here/{what}'))}"
    store().set(f"{call}/{rank}", json.dumps(value))
    if store().add(f"{call}/come", 1) == world:  # the last one collects the values, so that each reads one key
        values = [json.loads(store().get(f"{call}/{other}")) for other in range(world)]
        store().set(f"{call}/all", json.dumps(values))
    if not until(lambda: store().check([f"{call}/all"]), end, lambda: ended_without(call)):
        if time.monotonic() > end:
            raise Alone(f"rank {rank}: the other processes did not come in {LONGEST} s to {what}")
        raise ConnectionError("Connection was likely closed by peer")  # as gloo says it
    values = json.loads(store().get(f"{call}/all"))
    with contextlib.suppress(dist.DistError):  # the main process has ended
        store().set(f"{call}/{rank}/read", "")
        store().add(f"{call}/read", 1)
    if rank == 0:  # it serves the store, which ends with it, and the others may not have read yet

        def unread() -> int:
            return world - store().add(f"{call}/read", 0)

        until(lambda: unread() <= 0, end, lambda: unread() <= ended_without(call, "/read"))
    return values


def until(done: Callable[[], bool], end: float, gives_up: Callable[[], object] = lambda: False) -> bool:
    """Waits until `done`, or until the time `end`, or `gives_up`, which is asked once in a second. Returns `done`."""
    asked = time.monotonic()
    while not done() and time.monotonic() < end:
        if time.monotonic() > asked + 1:
            asked = time.monotonic()
            if gives_up():
                break
        time.sleep(0.01)
    return done()


def ended_without(call: str, what: str = "") -> int:
    """How many processes of this machine have ended and have not set their key of `call`."""
    return sum(not store().check([f"{call}/{rank}{what}"]) and has_ended(rank) for rank in processes_here)


def pid_namespace() -> str:
    """The machine and, in containers, the namespace in which process ids are those of this process."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(namespace) if namespace.is_symlink() else ''}"


def has_ended(rank: int) -> bool:
    """Whether the process of this rank is known to have ended: it was on this machine, as `rendezvous` has seen."""
    with contextlib.suppress(psutil.NoSuchProcess):
        pid = processes_here.get(rank)
        return pid is not None and psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def is_listening(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False
