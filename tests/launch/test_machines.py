"""Several machines: two network namespaces with their own names and addresses, joined by a link that can be cut."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, alive, distance, metrics, record, train

from faithful.checkpoint import checkpoints

OPTIONS = ("--logging_steps", "1", "--save_steps", "10", "--eval_steps", "0", "--resume_from_checkpoint", "latest")
ADDRESSES = ("10.79.0.1", "10.79.0.2")
ELASTIC = {"--rdzv_backend": "c10d", "--max_restarts": 3, "--monitor_interval": 1}


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


class Machines:
    """Two machines, which find each other by name, as machines of a cluster do. hosts: their names."""

    def __init__(self, folder, hosts=("node0", "node1")):
        self.folder, self.hosts, self.running = folder, hosts, [None, None]
        self.names = [f"r{os.getpid()}n{i}" for i in (0, 1)]
        self.cables = [f"v{os.getpid()}n{i}" for i in (0, 1)]

    def __enter__(self):
        if not shutil.which("ip") or os.geteuid():
            pytest.skip("network namespaces need iproute2 and root")
        try:
            for name in self.names:
                ip("netns", "add", name)
            ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
        except subprocess.CalledProcessError as error:
            self.__exit__()
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        for name, cable, address in zip(self.names, self.cables, ADDRESSES, strict=True):
            hosts = Path("/etc/netns", name, "hosts")  # `ip netns exec` puts it in the place of /etc/hosts
            hosts.parent.mkdir(parents=True)
            lines = map(" ".join, zip(ADDRESSES, self.hosts, strict=True))
            hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{line}\n" for line in lines))
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_):
        for rank in (0, 1):
            if self.running[rank]:
                self.kill(rank)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    def launch(self, rank, config, *argv, options=(), by="accelerate", env=None, elastic=ELASTIC):
        """Runs a launcher on one machine, as in the docs; its output goes to node<rank>.log. by: `accelerate` or
        `./launch.sh`. options: of the launcher, over those below."""
        said = {"--num_machines": 2, "--num_processes": 2, "--machine_rank": rank, "--main_process_ip": ADDRESSES[0],
                "--main_process_port": 29500} | elastic | dict(zip(options[::2], options[1::2], strict=True))  # fmt: skip
        words = [str(word) for pair in said.items() for word in pair]
        start = {"accelerate": [sys.executable, "-m", "accelerate.commands.launch", "--config_file",
                                f"accelerate_configs/{config}.yml"], "./launch.sh": ["./launch.sh", config]}  # fmt: skip
        command = ["ip", "netns", "exec", self.names[rank], "unshare", "--uts", "sh", "-c", 'hostname $0 && exec "$@"',
                   self.hosts[rank], *start[by], *words, "recipes/vit.py", *map(str, argv)]  # fmt: skip
        ours = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1", "VIRTUAL_ENV": sys.prefix,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # fmt: skip
        with open(self.folder / f"node{rank}.log", "a") as log:
            made = subprocess.Popen(command, cwd=ROOT, env=os.environ | ours | (env or {}), stdout=log, stderr=log)
        self.running[rank] = made

    def kill(self, rank):
        """Kills the launcher and its workers at once, like a power cut."""
        try:
            launcher = psutil.Process(self.running[rank].pid)
            for process in [launcher, *launcher.children(recursive=True)]:
                process.kill()
        except psutil.NoSuchProcess:
            pass
        self.running[rank].wait()

    def cable(self, state):
        ip("-n", self.names[0], "link", "set", self.cables[0], state)

    def log(self, rank):
        return (self.folder / f"node{rank}.log").read_text(errors="replace")

    def wait(self, timeout=180):
        return [process.wait(timeout) for process in self.running]


def until_step(run, step, timeout=120):
    end = time.time() + timeout
    while not (run / "metrics.jsonl").exists() or not any(row["step"] >= step for row in metrics(run)):
        assert time.time() < end, f"no step {step} in {run}"
        time.sleep(0.05)


@pytest.fixture
def machines(tmp_path):
    with Machines(tmp_path) as made:
        yield made


@pytest.mark.parametrize("config", ["ddp_fp32", pytest.param("zero2_bf16", marks=pytest.mark.slow)])
def test_two_machines_are_two_processes_and_a_killed_one_comes_back(machines, tmp_path, config):
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    steps = ("--max_steps", "80", *OPTIONS)
    one = train(config, tmp_path / "one", *steps)
    run = tmp_path / "run"
    for rank in (0, 1):
        machines.launch(rank, config, "--output_dir", str(run), *steps)
    until_step(run, 25)
    machines.kill(1)
    machines.launch(1, config, "--output_dir", str(run), *steps)
    assert machines.wait() == [0, 0], machines.log(0)[-3000:]
    # Of step 20, if it was written when the kill came and the next was not: saving goes on behind training.
    assert re.search(r"resumed from .* at step [1-3]0\b", machines.log(0))
    made = record(run)
    assert made["status"] == "finished" and made["plan"]["num_processes"] == 2
    assert metrics(run) == metrics(one) and distance(run, one) == 0
    assert not alive(str(run))


@pytest.mark.slow
def test_a_link_that_is_down_for_20_seconds_is_waited_for(machines, tmp_path):
    """If the link is down for 20 seconds, the run waits: TCP resends, nothing restarts, the result is the same."""
    steps = ("--max_steps", "200", *OPTIONS)
    one = train("ddp_fp32", tmp_path / "one", *steps)
    run = tmp_path / "run"
    for rank in (0, 1):
        machines.launch(rank, "ddp_fp32", "--output_dir", str(run), *steps)
    until_step(run, 15)
    machines.cable("down")
    time.sleep(1)
    before = metrics(run)[-1]["step"]
    time.sleep(19)
    assert metrics(run)[-1]["step"] == before < 200  # it was really cut
    machines.cable("up")
    assert machines.wait() == [0, 0], machines.log(0)[-3000:]
    assert machines.log(0).count("asked: ") == 1
    assert metrics(run) == metrics(one) and distance(run, one) == 0


@pytest.mark.slow
def test_a_link_that_stays_cut_ends_both_machines_in_bounded_time(machines, tmp_path, monkeypatch):
    """If the link stays cut, both machines end in bounded time. The workers end after COLLECTIVE_TIMEOUT. Then machine
    0's launcher ends after waiting join_timeout for the other, and the other's when its kernel gives up the connection,
    here after six attempts."""
    monkeypatch.setenv("COLLECTIVE_TIMEOUT", "10")
    steps = ("--max_steps", "200", *OPTIONS)
    one = train("ddp_fp32", tmp_path / "one", *steps)
    run = tmp_path / "run"
    for rank, name in enumerate(machines.names):
        ip("netns", "exec", name, "sysctl", "-w", "net.ipv4.tcp_retries2=6")
        machines.launch(rank, "ddp_fp32", "--output_dir", str(run), *steps, options=("--rdzv_conf", "join_timeout=20"))
    until_step(run, 25)
    machines.cable("down")
    codes = machines.wait(90)
    assert codes == [1, 1], [machines.log(rank)[-3000:] for rank in (0, 1)]
    for rank in (0, 1):
        assert machines.log(rank).count("error: no answer from another process in 10 s (COLLECTIVE_TIMEOUT)") == 1
        assert 'recipes/vit.py", line' not in machines.log(rank)  # no traceback of a worker
    made = record(run)
    assert made["status"] == "failed" and "no answer" in made["error"]
    folders = checkpoints.list_checkpoints(run)
    assert len(folders) == 2 and not any(map(checkpoints.unsound, folders)) and not list(run.glob("*.tmp"))
    machines.cable("up")
    for rank in (0, 1):
        machines.launch(rank, "ddp_fp32", "--output_dir", str(run), *steps)
    assert machines.wait() == [0, 0], machines.log(0)[-3000:]
    assert metrics(run) == metrics(one) and distance(run, one) == 0


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp_fp32", "fsdp_bf16", "hsdp_bf16", "zero3_bf16"])
def test_a_process_that_falls_silent_is_waited_for_as_long_as_was_said(tmp_path, config):
    """Processes wait COLLECTIVE_TIMEOUT for one that stops responding, also in the groups that FSDP2 and DeepSpeed make
    themselves, whose default is 30 minutes."""
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")

    def silent(rank):
        from shared.data import Progress

        due = Progress.due
        Progress.due = lambda self, every: time.sleep(15 * (rank == 1 and self.step == 3)) or due(self, every)

    argv = ("--max_steps", 8, "--save_steps", 2)
    run = train(config, tmp_path / "run", *argv, before=silent, env={"COLLECTIVE_TIMEOUT": "5"}, code=1)
    log = (tmp_path / "run.log").read_text()
    assert log.count("error: no answer from another process in 5 s (COLLECTIVE_TIMEOUT)") == 1, log[-3000:]
    assert "Traceback" not in log and record(run)["final"] is None
    assert [path.name for path in checkpoints.list_checkpoints(run)] == ["checkpoint-2"]


@pytest.mark.slow
def test_a_killed_worker_comes_back_on_one_machine(tmp_path):
    run, steps = tmp_path / "run", ("--max_steps", "80", *OPTIONS)
    one = train("ddp_fp32", tmp_path / "one", *steps)
    command = ["./launch.sh", "ddp_fp32", "--max_restarts", "1", "--monitor_interval", "1", "vit",
               "--output_dir", str(run), *steps]  # fmt: skip
    env = os.environ | {"VIRTUAL_ENV": sys.prefix, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    log = open(tmp_path / "log", "w+")
    launcher = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
    until_step(run, 25)
    workers = [
        child for child in psutil.Process(launcher.pid).children(recursive=True) if "vit.py" in str(child.cmdline())
    ]
    workers[-1].kill()
    assert launcher.wait(180) == 0, (tmp_path / "log").read_text()[-3000:]
    assert "resumed from" in (tmp_path / "log").read_text()
    assert metrics(run) == metrics(one) and distance(run, one) == 0


SUBMIT = """
set -e
job=$(sbatch --parsable --output "$1/job.log" cluster/slurm.sbatch ddp_fp32 vit --output_dir "$1/run" "${@:2}")
for _ in $(seq 600); do grep -q '"step": 25,' "$1/run/metrics.jsonl" 2>/dev/null && break; sleep 0.2; done
scontrol requeue "$job"
while true; do
    state=$(scontrol show job "$job" | grep -o 'JobState=[A-Z]*')
    case $state in
        *PENDING) scontrol update jobid="$job" starttime=now ;;  # else it waits for two minutes
        *COMPLETED) break ;;
        *FAILED | *CANCELLED | *TIMEOUT) exit 1 ;;
    esac
    sleep 1
done
scontrol show job "$job" | grep -o 'Restarts=[0-9]*'
"""


@pytest.mark.slow
def test_a_slurm_job_that_is_requeued_is_the_same_run(tmp_path):
    """A Slurm job that is requeued in the middle is the same run, with two node daemons of the real Slurm."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
    if missing or os.geteuid():
        pytest.skip(f"needs root and Debian's slurm-wlm and munge (missing: {', '.join(missing) or 'root'})")
    steps = ("--max_steps", "80", *OPTIONS[:6])
    one = train("ddp_fp32", tmp_path / "one", *steps)
    env = os.environ | {"VIRTUAL_ENV": sys.prefix, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["cluster/slurm_here.sh", str(tmp_path / "slurm"), "bash", "-c", SUBMIT, "bash", str(tmp_path), *steps]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    log = (tmp_path / "job.log").read_text(errors="replace")
    assert done.returncode == 0, done.stdout + done.stderr + log[-3000:]
    assert "Restarts=1" in done.stdout and log.count("asked: ") == 2 * 2 and "resumed from" in log
    assert metrics(tmp_path / "run") == metrics(one) and distance(tmp_path / "run", one) == 0
