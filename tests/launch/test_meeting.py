"""The rendezvous of ./launch.sh's launchers, on loopback: several in one process. test_machines.py kills real ones."""

import gc
import os
import socket
import threading
import time
from collections import Counter

import pytest
from conftest import free_port, launched
from test_sockets import EVERYWHERE, listens, own_address
from torch.distributed.elastic.rendezvous import RendezvousParameters

from faithful.errors import Refused
from faithful.launch import meeting as launchers


@pytest.fixture
def meeting(monkeypatch):
    """Makes a launcher of machine `rank` of two, with its name."""
    monkeypatch.setattr(launchers, "TWINS", 1.5)
    port, made = free_port(), []

    def make(rank, name, seconds=20, host="127.0.0.1", **config):
        params = RendezvousParameters("machines", f"{host}:{port}", "none", 2, 2, machine_rank=rank,
                                      join_timeout=str(seconds), **config)  # fmt: skip
        made.append(launchers.Meeting(params))
        made[-1].me["name"] = name
        return made[-1]

    yield make
    for each in made:
        gone(each)


def gone(meeting):
    """As if its launcher were killed."""
    meeting.store = None


def meet(*meetings):
    """What each answers, a rank or an error, when all of them come at once."""
    answers = [None] * len(meetings)

    def come(at):
        try:
            answers[at] = meetings[at].next_rendezvous().rank
        except Refused as problem:
            answers[at] = problem

    threads = [threading.Thread(target=come, args=(at,), daemon=True) for at in range(len(meetings))]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join(30)
    return answers


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_machine_has_the_rank_that_it_was_given_whatever_its_name_and_when_it_came(meeting, order):
    assert meet(*[meeting(rank, ("zeta", "alpha")[rank]) for rank in order]) == list(order)


def test_a_machine_that_was_killed_and_started_again_begins_a_new_round(meeting):
    first, second = meeting(0, "zeta"), meeting(1, "alpha")
    assert meet(first, second) == [0, 1] and not first.num_nodes_waiting()
    gone(second)
    again, answers = meeting(1, "beta"), []  # on another machine, perhaps
    thread = threading.Thread(target=lambda: answers.extend(meet(again)), daemon=True)
    thread.start()
    end = time.monotonic() + 10
    while not first.num_nodes_waiting():
        assert time.monotonic() < end, "torch's launcher of the other machine asks this, and starts its processes again"
        time.sleep(0.1)
    assert meet(first) == [0]
    thread.join(10)
    assert answers == [1] and first.round == again.round == 2


def test_one_that_has_given_up_or_was_killed_is_not_met(meeting):
    waits = meeting(1, "alpha", 1)
    serves = meeting(0, "zeta", 1)
    assert meet(serves)[0].exit_code == 1
    [problem] = meet(waits)
    assert "machine 0 did not come" in str(problem) and "(machine 1 is alpha)" in str(problem)
    gone(waits), gone(serves)
    first, again = meeting(0, "zeta"), meeting(1, "alpha")
    assert meet(again, first) == [1, 0]


def test_two_machines_with_one_rank_are_both_refused(meeting):
    first, twin = meeting(0, "zeta"), meeting(0, "alpha")
    one, other = meet(first, twin)
    assert str(one) == str(other) == "--machine_rank 0 was given to zeta and to alpha: give each its own"
    assert one.exit_code == 2


def test_one_that_comes_to_a_run_with_a_rank_that_is_there_does_not_stop_it(meeting):
    first, second = meeting(0, "zeta"), meeting(1, "alpha")
    assert meet(first, second) == [0, 1]
    [problem] = meet(meeting(1, "beta"))
    assert str(problem) == "--machine_rank 1 was given to alpha and to beta: give each its own"
    assert not first.num_nodes_waiting() and not second.num_nodes_waiting()


def test_another_program_at_the_port_is_given_up_too(meeting, capsys, monkeypatch):
    monkeypatch.setattr(launchers, "ANSWERS", 1)
    waits = meeting(1, "alpha", 2)
    with socket.create_server((waits.host, waits.port)):
        [problem] = meet(waits)
    assert "nothing answered at 127.0.0.1" in str(problem) and capsys.readouterr().out == ""


def test_a_machine_that_has_refused_and_comes_back_is_met(meeting):
    first, second = meeting(0, "zeta"), meeting(1, "alpha")
    assert meet(first, second) == [0, 1]
    second.part(2)
    end = time.monotonic() + 5
    while not first.ended and time.monotonic() < end:
        time.sleep(0.1)
    assert first.ended["code"] == 2
    assert meet(meeting(1, "alpha"), first) == [1, 0]
    while first.ended and time.monotonic() < end:
        time.sleep(0.1)
    assert first.ended is None


@pytest.mark.parametrize(
    "code, how, exit_code",
    [(0, "has finished", 1), (1, "has ended with exit code 1", 1), (2, "with exit code 2", 2), (143, "143", 143)],
)
def test_nobody_waits_for_a_machine_that_has_ended(meeting, code, how, exit_code):
    first, second = meeting(0, "zeta", 60), meeting(1, "alpha", 60)
    assert meet(first, second) == [0, 1]
    second.part(code)
    began = time.monotonic()
    [problem] = meet(first)
    assert how in str(problem) and "machine 1 (alpha)" in str(problem) and problem.exit_code == exit_code
    assert time.monotonic() < began + 5


def test_the_one_that_serves_waits_until_the_others_have_ended(meeting):
    first, second = meeting(0, "zeta"), meeting(1, "alpha")
    assert meet(first, second) == [0, 1]
    thread = threading.Thread(target=first.part, args=(1,))
    thread.start()
    time.sleep(1)
    assert thread.is_alive()
    second.part(1)
    thread.join(5)
    assert not thread.is_alive()


def test_it_listens_at_the_address_of_main_process_ip_only(meeting):
    if (address := own_address()) is None:
        pytest.skip("this machine has no address but its loopback")
    gc.collect()  # closes what tests before this one have left
    before = Counter(listens(os.getpid()))
    meeting(0, "zeta", host=address).connect()
    new = Counter(listens(os.getpid())) - before
    assert list(new.elements()) == [address] and address not in EVERYWHERE


@pytest.mark.parametrize(
    "line, starts",
    [
        pytest.param("sys.exit(1)", 2, marks=pytest.mark.slow),
        ("sys.exit(2)", 1),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", 2, marks=pytest.mark.slow),
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)", 1, marks=pytest.mark.slow),
        pytest.param("sys.exit(143)", 1, marks=pytest.mark.slow),
        pytest.param("sys.exit(130)", 1, marks=pytest.mark.slow),
    ],
)
def test_an_end_that_is_meant_is_not_started_again_on_one_machine_either(line, starts, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '1':\n    time.sleep(100)\n"  # torch's launcher ends it
        f"open(sys.argv[1], 'a').write('started ')\n{line}\n"
    )
    words = ("--max_restarts", "1", "--num_processes", "2", str(script), str(tmp_path / "starts"))
    done = launched("./launch.sh", "ddp_fp32", *words)
    assert done.returncode not in (0, None) and "Traceback" not in done.stderr
    assert (tmp_path / "starts").read_text().count("started") == starts, done.stderr[-2000:]
    assert done.stdout.count("starting the processes again, 0 more times at most") == starts - 1
