"""How the launchers of several machines meet, wait for each other and part. ./launch.sh uses it.

torch's rendezvous gives the machines ranks by their names, says nothing while it waits, and ends with the machine that
serves it. Here a machine has the rank of its --machine_rank. The launchers meet in a store, in rounds: in each, every
machine starts its processes once. The machine of --main_process_ip serves the store. If it is killed and started again,
the others find its new store, and begin there with a new round.
"""

import contextlib
import datetime
import functools
import json
import os
import signal
import socket
import threading
import time
import uuid
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.launcher.api
import torch.distributed.run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from faithful.config.settings import timeout_seconds
from faithful.errors import Alone, Refused
from faithful.launch import launcher, printing

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

BACKEND = "machines"  # the name of this rendezvous
COMES = 10  # seconds after which a machine says for which one it waits
ANSWERS = 10  # seconds in which the store answers, if its machine and the link are there
FINISHES = 300  # seconds that a machine which has finished serves the store to the others
TWINS = 3  # seconds in which a launcher that lives says so
PARTS = 15  # seconds that one which has failed does so
FINAL = (0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes after which nothing is started again


class Lost(Exception):
    """The store does not answer."""


class Ended(Refused):
    """Another machine has ended, so that this one has nobody to go on with."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__(line)
        self.exit_code = code if code in FINAL and code else 1


def answer(call: Callable[[], Any], seconds: float = ANSWERS) -> Any:
    """What a call to a store returns. Raises Lost if nothing comes in time: torch would wait for as long as the kernel
    keeps the connection, a quarter of an hour."""
    answers: list[Any] = []

    def calls() -> None:
        with contextlib.suppress(dist.DistError, OSError, RuntimeError):
            answers.append(call())

    thread = threading.Thread(target=calls, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise Lost
    return answers[0]


class Meeting(RendezvousHandler):
    """The meeting of the launchers, as one of them takes part in it."""

    def __init__(self, params: RendezvousParameters) -> None:
        self.rank, self.machines = int(params.config["machine_rank"]), params.max_nodes
        self.host, self.port = parse_rendezvous_endpoint(params.endpoint, default_port=29500)
        self.at = f"{self.host}:{self.port}"
        self.is_host, self.run_id = params.get_as_bool("is_host"), params.run_id
        seconds = params.get_as_int("join_timeout")
        self.seconds = seconds or timeout_seconds()
        self.within = f"within {self.seconds} s ({'join_timeout' if seconds else 'COLLECTIVE_TIMEOUT'})"
        self.me = {"name": socket.gethostname(), "token": uuid.uuid4().hex}
        self.store: dist.TCPStore | None = None
        self.serves = self.watched = self.parted = False
        self.watcher: threading.Thread | None = None
        self.origin = b""  # of the store: a new one has another
        self.round = self.newest = 0  # in which this machine is, and that which was begun last
        self.present: list[int] = []  # the machines that have come to it
        self.ended: dict[str, Any] | None = None  # the first machine that has ended with an error
        self.since = 0.0  # when that was seen
        self.began = self.end = 0.0  # of the waiting for the others
        self.said = ""  # what was printed last

    # ---- what torch's launcher calls ----

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether the processes use the launchers' store. Theirs is of one round, and served by rank 0."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until all machines are in one round. Raises Alone after so many seconds, Ended, or Refused if two
        machines have one rank."""
        self.began = time.monotonic()
        self.end, self.said = self.began + self.seconds, ""
        while True:
            try:
                return self.meet()
            except (Lost, OSError):
                self.lose()

    def meet(self) -> RendezvousInfo:
        launchers = self.connect()
        self.join()
        store = dist.PrefixStore(f"round {self.round}", launchers)
        # Others reach this machine as it reaches them.
        with socket.create_connection((self.host, self.port), timeout=ANSWERS) as connection:
            address = connection.getsockname()[0]
        address = self.host if launcher.is_loopback(address) else address  # a name may mean a loopback address here
        where = answer(lambda: RendezvousStoreInfo.build(self.rank, store, address), 2 * ANSWERS)
        return RendezvousInfo(store, self.rank, self.machines, where)

    def say(self, line: str) -> None:
        """Prints for whom this machine waits, when it has waited for a while, and once."""
        if time.monotonic() > self.began + COMES and line != self.said:
            print(printing.plain(line), flush=True)  # other machines have told their names
            self.said = line

    def num_nodes_waiting(self) -> int:
        """How many machines wait for a new round, as far as is known: nothing here waits for the store."""
        return int(self.newest > self.round)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True

    # ---- the store ----

    def ask(self, call: Callable[[dist.TCPStore], Any]) -> Any:
        """What the store answers to a call. Raises Lost if it doesn't."""
        store = self.store
        if store is None:
            raise Lost
        return answer(lambda: call(store))

    def connect(self) -> dist.TCPStore:
        """Connects to the store, or serves it if this machine has its address."""
        timeout = datetime.timedelta(seconds=2 * ANSWERS)
        options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False, "multi_tenant": True}
        while self.store is None:
            if self.may_serve():
                self.store, self.serves = self.serve(options), True
            elif launcher.is_listening(self.host, self.port):
                self.store = answer(lambda: dist.TCPStore(self.host, self.port, is_master=False, **options))
            else:
                self.give_up_in_time()
                time.sleep(0.5)
        store = self.store
        if not self.watched:
            token = self.me["token"]
            origin = self.ask(lambda store: store.compare_set("origin", "", token))
            self.round = self.round if origin == self.origin else 0
            self.origin, self.newest, self.watched = origin, self.round, True
            self.watcher = threading.Thread(target=self.watch, args=(store,), daemon=True)
            self.watcher.start()
        return store

    def serve(self, options: dict[str, Any]) -> dist.TCPStore:
        try:
            return launcher.served(self.host, self.port, options)
        except (OSError, RuntimeError):
            raise Alone(f"port {self.port} of this machine is in use: choose another --main_process_port") from None

    def may_serve(self) -> bool:
        """Whether the store's address is this machine's, and nobody serves there."""
        if self.is_host is not None:
            return self.is_host
        with contextlib.suppress(OSError):
            family, _, _, _, where = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            with socket.create_server(where, family=family):
                return True
        return False

    def give_up_in_time(self) -> None:
        """Raises Alone if nobody has served the store for too long."""
        if time.monotonic() > self.end:
            raise Alone(
                f"nothing answered at {self.at} {self.within}: is the launcher of the machine with this address "
                "started, and does the link allow the port?"
            )
        if not self.origin:
            self.say(f"waiting for the launcher at {self.at}")

    def lose(self) -> None:
        if self.watched:
            print(f"the launcher at {self.at} does not answer: waiting until it does, or is started again", flush=True)
        self.store, self.watched = None, False
        self.give_up_in_time()
        time.sleep(0.5)

    def watch(self, store: dist.TCPStore) -> None:
        """Says that this machine lives, and looks what the others do, while the store answers."""
        while self.store is store:
            try:
                store.add(f"alive/{self.me['token']}", 1)
                if store.check(["round"]):
                    self.newest = int(store.get("round"))
                ended = json.loads(store.get("ended")) if store.check(["ended"]) else None
                if ended != self.ended:
                    self.ended, self.since = ended, time.monotonic()
            except dist.DistStoreError:  # no answer in time
                pass
            except (dist.DistError, RuntimeError):  # the other end is closed
                return
            time.sleep(1)

    # ---- rounds ----

    def join(self) -> None:
        """Comes to the newest round, or begins one, and waits for the others there."""
        self.forget_my_end()
        current = self.ask(lambda store: int(store.compare_set("round", "", "1")))
        known = self.in_round(current)
        mine = known.get(self.rank, self.me)
        if mine != self.me:
            self.refuse_twins(mine)
        if current == self.round or (len(known) == self.machines and mine != self.me):
            current = self.ask(lambda store: int(store.compare_set("round", f"{current}", f"{current + 1}")))
        self.ask(lambda store: store.set(f"{current}/{self.rank}", json.dumps(self.me)))
        self.round = current
        while True:
            if self.ask(lambda store: int(store.get("round"))) > current:  # a machine was started again meanwhile
                return self.join()
            if self.ask(lambda store: store.check(["twins"])):
                raise Refused(self.ask(lambda store: store.get("twins").decode()))
            known = self.in_round(current)
            self.present = [*known]
            missing = [rank for rank in range(self.machines) if rank not in known]
            if not missing:
                return None
            self.end_with(missing)
            waits = f"machine {', '.join(map(str, missing))}"
            here = ", ".join(f"machine {rank} is {each['name']}" for rank, each in known.items())
            if time.monotonic() > self.end:
                self.ask(lambda store: store.delete_key(f"{current}/{self.rank}"))  # who comes later meets nobody
                raise Alone(f"{waits} did not come to {self.at} {self.within} ({here}): is it started, with this rank?")
            self.say(f"waiting for {waits} at {self.at} ({here})")
            time.sleep(0.2)

    def in_round(self, number: int) -> dict[int, dict[str, str]]:
        """{rank: name and token} of the machines that have come to a round."""

        def reads(store: dist.TCPStore) -> dict[int, dict[str, str]]:
            ranks = [rank for rank in range(self.machines) if store.check([f"{number}/{rank}"])]
            return {rank: json.loads(store.get(f"{number}/{rank}")) for rank in ranks}

        return self.ask(reads)

    def refuse_twins(self, other: dict[str, str]) -> None:
        """Raises Refused if the launcher that has this one's rank is alive. Else it was killed, and this one comes in
        its place."""
        alive = f"alive/{other['token']}"
        before = self.ask(lambda store: store.add(alive, 0))
        time.sleep(TWINS)
        if self.ask(lambda store: store.add(alive, 0)) == before:
            return
        line = f"--machine_rank {self.rank} was given to {other['name']} and to {self.me['name']}: give each its own"
        if len(self.in_round(self.ask(lambda store: int(store.get("round"))))) < self.machines:
            self.ask(lambda store: store.set("twins", line))
        self.parted = True  # the other one has this rank
        raise Refused(line)

    # ---- the end ----

    def end_with(self, others: list[int]) -> None:
        """Raises Ended if one of these machines has ended, by itself or with an error."""

        def over(store: dist.TCPStore) -> bytes | None:
            keys = [f"over/{rank}" for rank in others]
            return next((store.get(key) for key in keys if store.check([key])), None)

        if word := self.ask(over):
            raise ended(json.loads(word))

    def forget_my_end(self) -> None:
        """A machine that has ended may be started again, while the others still live."""

        def forget(store: dist.TCPStore) -> None:
            store.delete_key(f"over/{self.rank}")
            if store.check(["ended"]) and json.loads(store.get("ended"))["rank"] == self.rank:
                store.delete_key("ended")

        self.ask(forget)

    def others_ended(self) -> bool:
        """Whether another machine has ended with an error, so long ago that the processes of this one would have ended
        if they had met it."""
        return self.ended is not None and time.monotonic() > self.since + launcher.GRACE

    def part(self, code: int) -> None:
        """Tells the others with which exit code this machine ends. If it serves the store it waits for them."""
        if not self.parted:
            self.parted = True
            word = json.dumps({"rank": self.rank, "name": self.me["name"], "code": code})
            end = time.monotonic() + (PARTS if code else FINISHES)
            every = [f"over/{rank}" for rank in self.present]
            with contextlib.suppress(Lost):
                self.ask(lambda store: store.set(f"over/{self.rank}", word))
                if code:
                    self.ask(lambda store: store.compare_set("ended", "", word))
                while self.serves and time.monotonic() < end and not self.ask(lambda store: store.check(every)):
                    time.sleep(0.1)
        self.store = None
        if self.watcher:  # Python aborts if it ends while a thread comes back from C++
            self.watcher.join(ANSWERS)


def ended(other: dict[str, Any]) -> Ended:
    how = f"has ended with exit code {other['code']}" if other["code"] else "has finished"
    return Ended(f"machine {other['rank']} ({other['name']}) {how}: this one ends, too", other["code"])


class Agent(LocalElasticAgent):
    """torch's launcher, which starts nothing again after an end that is meant."""

    @property
    def meeting(self) -> Meeting | None:
        handler = self._rdzv_handler
        return handler if isinstance(handler, Meeting) else None

    def run(self, role: str = "default") -> RunResult:
        code = 1
        try:
            result = super().run(role)
            code = code_of(result)
            return result
        except SignalException as told:
            code = 128 + told.sigval
            raise
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 1
            raise
        except Refused as problem:
            code = problem.exit_code
            raise
        finally:
            if self.meeting:
                self.meeting.part(code)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                return super()._rendezvous(worker_group)
            except dist.DistError:  # the store ended while the processes got their ranks
                if not self.meeting:
                    raise
                self.meeting.lose()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.is_failed() and code_of(result) in FINAL:
            self._remaining_restarts = 0
        elif result.is_failed() and self._remaining_restarts:
            left = self._remaining_restarts - 1
            print(f"starting the processes again, {left} more times at most (--max_restarts)", flush=True)
        meeting = self.meeting
        if meeting and meeting.ended and result.state == WorkerState.HEALTHY and meeting.others_ended():
            raise ended(meeting.ended)
        return result

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        for pid in self._pcontext.pids().values() if self._pcontext else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)  # if somebody has stopped it, it would not get the signal
        super()._shutdown(*args, **kwargs)

    def _exit_barrier(self) -> None:
        if not self.meeting:
            return super()._exit_barrier()
        self.meeting.part(0)


def code_of(result: RunResult) -> int:
    """The exit code of a machine whose processes have ended so."""
    if not result.is_failed():
        return 0
    code = min(result.failures.values(), key=cause_first).exitcode if result.failures else 1
    return 128 - code if code < 0 else code


def cause_first(failure: "ProcessFailure") -> tuple[bool, int]:
    """A sort key: a process that was killed, then the earliest. Those that have lost it may have ended before torch
    looked; torch itself ends the others by SIGTERM."""
    return failure.exitcode >= 0 or failure.exitcode == -signal.SIGTERM, failure.timestamp


def run(by_torch: Callable[[Namespace], None], args: Namespace) -> None:
    """torch.distributed.run.run, whose several machines meet here. A rendezvous of another kind (etcd) stays."""
    if str(args.nnodes).isdecimal() and int(args.nnodes) > 1 and args.rdzv_backend in ("static", "c10d"):
        args.rdzv_endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
        args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, f"machine_rank={args.node_rank}"]))
        args.rdzv_backend, args.node_rank = BACKEND, 0  # torch warns of a rank that its own c10d would ignore
    by_torch(args)


def install() -> None:
    """Makes torch's launcher in this process use these."""
    rendezvous_handler_registry.register(BACKEND, Meeting)
    torch.distributed.launcher.api.LocalElasticAgent = Agent
    torch.distributed.run.run = functools.partial(run, torch.distributed.run.run)
