"""Where a run listens: whoever reaches the store of a run reads and changes it."""

import datetime
import json
import os
import socket
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, launched, train

from faithful.launch import launcher

EVERYWHERE = ("::", "0.0.0.0")


def listens(process, before=()):
    """The addresses at which a process listens, sorted. before: those at which it did, of a process that forked it."""
    found = psutil.Process(process).net_connections("inet")
    now = Counter(connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN)
    return sorted((now - Counter(before)).elements())


def own_address():
    """An address of this machine that others may reach."""
    ours = [a.address for own in psutil.net_if_addrs().values() for a in own if a.family == socket.AF_INET]
    return next((address for address in ours if not launcher.is_loopback(address)), None)


@pytest.mark.parametrize(
    "host, machines, expected",
    [
        ("127.0.0.1", 1, "127.0.0.1"),
        ("localhost", 1, "loopback"),
        (own_address(), 1, own_address()),
        (own_address(), 2, own_address()),
        ("localhost", 2, "everywhere"),  # the others, on other machines, know it by a name that means another address
    ],
)
def test_a_store_listens_at_the_address_where_the_others_look_for_it(host, machines, expected, monkeypatch):
    if host is None:
        pytest.skip("this machine has no address but its loopback")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 // machines))
    before = listens(os.getpid())
    options = {"timeout": datetime.timedelta(seconds=20), "wait_for_workers": False, "multi_tenant": True}
    store = launcher.served(host, 0, options)
    store.set("key", "value")
    new = listens(os.getpid(), before)
    words = {"loopback": launcher.is_loopback(new[0]), "everywhere": new[0] in EVERYWHERE}
    assert len(new) == 1 and words.get(expected, new[0] == expected), new


def says_where_it_listens():
    """What a rank runs."""
    import torch

    from faithful import Accelerator

    before = listens(os.getpid())
    accelerator = Accelerator(project_dir=sys.argv[2])
    model = torch.nn.Linear(4, 4)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.wait_for_everyone()
    said = {"rank": listens(os.getpid(), before), "launcher": listens(os.getppid())}
    Path(sys.argv[2] + f".{accelerator.process_index}.json").write_text(json.dumps(said))
    accelerator.end_training()


def test_without_a_launcher_the_processes_of_one_machine_listen_on_loopback_only(tmp_path):
    one = {"LOCAL_WORLD_SIZE": "2"}
    train("ddp_fp32", tmp_path / "run", script=says_where_it_listens, env=one)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"run.{rank}.json").read_text())["rank"]
        assert found and all(map(launcher.is_loopback, found)), found


def test_under_accelerates_launcher_only_its_own_sockets_listen_everywhere(tmp_path):
    """They are torch's: torchelastic's rendezvous, and its store for the workers, which may share one socket."""
    script = tmp_path / "mine.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(ROOT / 'tests' / 'launch')!r}, {str(ROOT / 'tests')!r}]\n"
        "from test_sockets import says_where_it_listens\n"
        "says_where_it_listens()\n"
    )
    words = ("--config_file", "accelerate_configs/ddp_fp32.yml", "--main_process_port", "0", str(script))
    done = launched("accelerate", "launch", *words, "--output_dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads((tmp_path / f"run.{rank}.json").read_text()) for rank in (0, 1)]
    assert all(map(launcher.is_loopback, said[0]["rank"] + said[1]["rank"])), said
    assert len(said[0]["rank"]) > len(said[1]["rank"]), "rank 0 has a store of its own"
    assert 1 <= len(said[0]["launcher"]) <= 2 and {*said[0]["launcher"]} <= {*EVERYWHERE}
