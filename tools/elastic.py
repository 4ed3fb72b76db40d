"""torch's launcher of several processes, as accelerate_launch.py uses it.

Machines meet by torch's own rendezvous: `static`, c10d or etcd. Here it waits as long as the processes do, what it
raises becomes one line, and after an end that is meant it starts nothing again.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed as dist
import torch.distributed.launcher.api
import torch.distributed.run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

from faithful.config.settings import timeout_seconds
from faithful.errors import Alone

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

FINAL = (0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes after which nothing is started again
SPARE = 10  # seconds after which a launcher should have given up by itself
WAITS = ("timeout", "join_timeout", "read_timeout")  # torch's names of the time that launchers wait for each other


class Agent(LocalElasticAgent):
    """torch's launcher, which starts nothing again after an end that is meant."""

    looked = 0.0  # when it saw last how its processes are

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        first, self.looked = not self.looked, time.monotonic()
        if first:
            threading.Thread(target=self.end_in_time, args=(timeout_seconds() + SPARE,), daemon=True).start()
        result = super()._monitor_workers(worker_group)
        if result.is_failed() and code_of(result) in FINAL:
            self._remaining_restarts = 0
        elif result.is_failed() and self._remaining_restarts:
            left = self._remaining_restarts - 1
            print(f"starting the processes again, {left} more times at most (--max_restarts)", flush=True)
        return result

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        for pid in self._pcontext.pids().values() if self._pcontext else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)  # if somebody has stopped it, it would not get the signal
        super()._shutdown(*args, **kwargs)

    def end_in_time(self, seconds: int) -> None:
        """Ends this launcher if its processes have ended and it has not looked for so long: it asks a store whose
        machine, or the link to it, is gone. torch has no time for that, and the kernel's is a quarter of an hour."""
        me = psutil.Process()
        while self._in_exit_barrier or time.monotonic() < self.looked + seconds or running(me):
            time.sleep(1)
        print(f"error: the launchers have lost each other for {seconds} s: this one ends", file=sys.stderr, flush=True)
        os._exit(1)


def running(launcher: psutil.Process) -> bool:
    return any(child.status() != psutil.STATUS_ZOMBIE for child in launcher.children())


def code_of(result: RunResult) -> int:
    """The exit code of a machine whose processes have failed so."""
    code = min(result.failures.values(), key=cause_first).exitcode if result.failures else 1
    return 128 - code if code < 0 else code


def cause_first(failure: "ProcessFailure") -> tuple[bool, int]:
    """A sort key: a process that was killed, then the earliest. Those that have lost it may have ended before torch
    looked; torch itself ends the others by SIGTERM."""
    return failure.exitcode >= 0 or failure.exitcode == -signal.SIGTERM, failure.timestamp


def run(by_torch: Callable[[Namespace], None], args: Namespace) -> None:
    """torch.distributed.run.run. Raises Alone if several machines do not meet."""
    if args.nnodes in ("1", "1:1"):
        return by_torch(args)
    # Accelerate gives c10d no endpoint under same_network, so that each machine would wait for itself.
    args.rdzv_endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    args.node_rank = args.node_rank if args.rdzv_backend == "static" else 0  # torch warns of one that it ignores
    seconds = timeout_seconds()
    args.rdzv_conf = ",".join([f"{name}={seconds}" for name in WAITS] + [args.rdzv_conf] * bool(args.rdzv_conf))
    try:
        by_torch(args)
    except RendezvousClosedError:
        raise Alone("another machine has ended, with an error of its own: this one ends, too") from None
    except (RendezvousError, dist.DistError):
        raise Alone(
            f"the {args.nnodes} machines did not meet at {args.rdzv_endpoint}, or have lost each other: is each one's "
            f"launcher started, with its own --machine_rank, and does the link allow the port? They wait {seconds} s "
            "(COLLECTIVE_TIMEOUT)"
        ) from None


def install() -> None:
    """Makes torch's launcher in this process use these."""
    torch.distributed.launcher.api.LocalElasticAgent = Agent
    torch.distributed.run.run = functools.partial(run, torch.distributed.run.run)
