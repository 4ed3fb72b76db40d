"""Several machines: two network namespaces with their own names and addresses, joined by a link that can be cut."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, activated, alive, distance, launched, metrics, record, started, train

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

    def launch(self, rank, config, *argv, options=(), env=None, elastic=ELASTIC, recipe="vit"):
        """Runs ./launch.sh on one machine, as in the docs. options: of the launcher, over those below."""
        said = {"--num_machines": 2, "--num_processes": 2, "--machine_rank": rank, "--main_process_ip": ADDRESSES[0],
                "--main_process_port": 29500} | elastic | dict(zip(options[::2], options[1::2], strict=True))  # fmt: skip
        self.start(rank, ["./launch.sh", config, *sum(said.items(), ()), f"recipes/{recipe}.py", *argv], env or {})

    def start(self, rank, command, env):
        """Runs a command on one machine; its output goes to node<rank>.log."""
        here = ["ip", "netns", "exec", self.names[rank], "unshare", "--uts", "sh", "-c", 'hostname $0 && exec "$@"']
        ours = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1"}
        line = map(str, [*here, self.hosts[rank], *command])
        with open(self.folder / f"node{rank}.log", "a") as log:
            self.running[rank] = subprocess.Popen([*line], cwd=ROOT, env=activated(ours | env), stdout=log, stderr=log)

    def launch_both(self, config, run, steps, **more):
        for rank in (0, 1):
            self.launch(rank, config, "--output_dir", str(run), *steps, **more)

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
        """What one machine has printed, without torch's line about names that no DNS of these namespaces knows."""
        lines = (self.folder / f"node{rank}.log").read_text(errors="replace").splitlines(keepends=True)
        return "".join(line for line in lines if "The hostname of the client socket cannot be retrieved" not in line)

    def wait(self, timeout=180):
        return [process.wait(timeout) for process in self.running]


def until_step(run, step, timeout=120):
    end = time.time() + timeout
    while not (run / "metrics.jsonl").exists() or not any(row["step"] >= step for row in metrics(run)):
        assert time.time() < end, f"no step {step} in {run}"
        time.sleep(0.05)


@pytest.fixture
def machines(tmp_path):
    """torch's c10d gives them ranks by their names."""
    with Machines(tmp_path, ("alpha", "zeta")) as made:
        yield made


OF_GPT = ("--dataset", str(ROOT / "LICENSE"), "--sequence_length", "32", "--per_device_train_batch_size", "4")


@pytest.mark.parametrize(
    ("config", "recipe", "processes"),
    [
        ("ddp_fp32", "vit", 2),
        pytest.param("zero2_bf16", "vit", 2, marks=pytest.mark.slow),
        pytest.param("fsdp_tp_bf16", "gpt", 4, marks=pytest.mark.slow),  # a group in each machine
    ],
)
def test_machines_train_as_one_and_a_killed_one_comes_back(machines, tmp_path, config, recipe, processes):
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    steps = ("--max_steps", "80", *OPTIONS, *(OF_GPT if recipe == "gpt" else ()))
    one = train(config, tmp_path / "one", *steps, name=recipe)
    run, more = tmp_path / "run", {"options": ("--num_processes", processes), "recipe": recipe}
    machines.launch_both(config, run, steps, **more)
    until_step(run, 25)
    machines.kill(1)
    machines.launch(1, config, "--output_dir", str(run), *steps, **more)
    assert machines.wait() == [0, 0], machines.log(0)[-3000:]
    # Of step 20, if it was written when the kill came and the next was not: saving goes on behind training.
    assert re.search(r"resumed from .* at step [1-3]0\b", machines.log(0))
    made = record(run)
    assert made["status"] == "finished" and made["plan"]["num_processes"] == processes
    assert metrics(run) == metrics(one) and distance(run, one) == 0
    assert "Traceback" not in machines.log(0) + machines.log(1) and "node_rank is only" not in machines.log(1)
    assert "step 1:" in machines.log(0) and "step 1:" not in machines.log(1)
    assert not alive(str(run))


@pytest.mark.slow
def test_where_the_machine_of_the_rendezvous_is_killed_all_end_and_go_on_when_they_are_started_again(
    machines, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLLECTIVE_TIMEOUT", "20")
    steps = ("--max_steps", "80", *OPTIONS)
    one = train("ddp_fp32", tmp_path / "one", *steps)
    run = tmp_path / "run"
    machines.launch_both("ddp_fp32", run, steps)
    until_step(run, 25)
    machines.kill(0)
    assert machines.running[1].wait(90) == 1
    assert machines.log(1).count("or have lost each other") == 1 and "Traceback" not in machines.log(1)
    machines.launch_both("ddp_fp32", run, steps)
    assert machines.wait() == [0, 0], machines.log(0)[-3000:]
    assert metrics(run) == metrics(one) and distance(run, one) == 0


@pytest.mark.slow
def test_under_static_ranks_are_those_of_machine_rank_whatever_the_names(tmp_path):
    with Machines(tmp_path, ("zeta", "alpha")) as machines:
        for rank in (1, 0):
            machines.launch(rank, "ddp_fp32", "--output_dir", str(tmp_path / f"disk{rank}"), *SHORT, elastic={})
        assert machines.wait() == [0, 0], machines.log(0)[-3000:]
        assert record(tmp_path / "disk0")["plan"]["num_processes"] == 2 and not (tmp_path / "disk1").exists()


@pytest.mark.slow
def test_the_record_is_on_machine_0_with_processes_of_unequal_numbers(machines, tmp_path):
    """Each machine has a disk, a clock and hash seeds of its own. --num_processes of a machine counts all, as if each
    machine had as many as this one."""
    for rank, processes in ((0, 2), (1, 4)):
        words = ("--output_dir", str(tmp_path / f"disk{rank}"), "--max_steps", "8", "--eval_steps", "0")
        env = {"PYTHONHASHSEED": str(rank), "TZ": f"UTC{rank}"}
        machines.launch(rank, "ddp_fp32", *words, options=("--num_processes", processes), env=env, elastic={})
    assert machines.wait() == [0, 0], machines.log(0)[-3000:]
    assert record(tmp_path / "disk0")["plan"]["num_processes"] == 3 and not (tmp_path / "disk1").exists()


SHORT = ("--max_steps", "4", "--eval_steps", "0")


@pytest.mark.parametrize(
    "second, said",
    [
        ({"argv": ("--learning_rate", "0.03")}, "--learning_rate is not given on alpha, 0.03 on zeta"),
        pytest.param({"argv": ("--seed", "2")}, "--seed is not given on alpha, 2 on zeta", marks=pytest.mark.slow),
        pytest.param({"config": "ddp_bf16"}, "precision is fp32 on alpha, bf16 on zeta", marks=pytest.mark.slow),
        pytest.param({"config": "fsdp_fp32"}, "strategy is ddp on alpha, fsdp on zeta", marks=pytest.mark.slow),
    ],
)
def test_machines_that_were_started_differently_are_refused_in_one_line_on_each(machines, tmp_path, second, said):
    """And are not started again: --max_restarts is 3 here."""
    run = ("--output_dir", str(tmp_path / "run"), *SHORT)
    machines.launch(0, "ddp_fp32", *run)
    other = {"argv": (), "options": (), "config": "ddp_fp32"} | second
    machines.launch(1, other["config"], *run, *other["argv"], options=other["options"])
    assert machines.wait(60) == [2, 2], machines.log(0)[-3000:]
    for rank in (0, 1):
        assert machines.log(rank).count("refused: ") == machines.log(rank).count(said) == 1, machines.log(rank)
        assert len(machines.log(rank).splitlines()) == 2, machines.log(rank)  # the command, and this
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("elastic", [{}, pytest.param(ELASTIC, marks=pytest.mark.slow)], ids=["static", "c10d"])
@pytest.mark.parametrize("comes", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_machine_that_never_comes_is_given_up_in_one_line(machines, tmp_path, comes, elastic):
    env = {"COLLECTIVE_TIMEOUT": "6", "TQDM_DISABLE": "1"}
    machines.launch(comes, "ddp_fp32", "--output_dir", str(tmp_path / "run"), *SHORT, env=env, elastic=elastic)
    assert machines.running[comes].wait(60) == 1
    _, line = machines.log(comes).splitlines()
    assert line.startswith("error: the 2 machines did not meet at 10.79.0.1:29500") and "wait 6 s (COLLECTIVE_T" in line


@pytest.mark.parametrize(
    "machine, worker, number, codes",
    [
        (0, False, signal.SIGTERM, [143, 143]),
        pytest.param(1, False, signal.SIGTERM, [143, 143], marks=pytest.mark.slow),
        pytest.param(1, True, signal.SIGTERM, [143, 143], marks=pytest.mark.slow),
        pytest.param(0, False, signal.SIGINT, [130, 143], marks=pytest.mark.slow),
    ],
)
def test_an_end_that_is_meant_ends_both_machines_with_one_checkpoint(
    machines, tmp_path, machine, worker, number, codes
):
    """A signal to a launcher or to a worker, with --max_restarts: nothing starts again."""
    run = tmp_path / "run"
    for rank in (0, 1):
        machines.launch(rank, "ddp_fp32", "--output_dir", str(run), "--max_steps", "5000", *OPTIONS)
    until_step(run, 15)
    process = psutil.Process(machines.running[machine].pid)
    (workers(process)[0] if worker else process).send_signal(number)
    assert machines.wait(60) == codes, machines.log(1)[-3000:]
    assert all(machines.log(rank).count("asked: ") == 1 for rank in (0, 1))
    stopped = checkpoints.list_checkpoints(run)[-1]
    assert record(run)["status"] in ("preempted", "interrupted") and not checkpoints.unsound(stopped)
    assert not alive(str(run))


@pytest.mark.slow
@pytest.mark.parametrize(("line", "restarts", "code"), [("raise SystemExit(2)", 3, 2), ("raise RuntimeError", 0, 1)])
def test_a_machine_that_ends_before_it_meets_the_others_ends_them(machines, tmp_path, line, restarts, code):
    """They wait for COLLECTIVE_TIMEOUT."""
    (tmp_path / "timm.py").write_text(line)
    job = "ddp_fp32", "--output_dir", str(tmp_path / "run"), *SHORT
    for rank, env in enumerate(({}, {"PYTHONPATH": str(tmp_path)})):
        limit = {"COLLECTIVE_TIMEOUT": "10"}
        machines.launch(rank, *job, options=("--max_restarts", restarts), env=env | limit)
    assert machines.wait(120) == [1, code], machines.log(0)[-3000:]
    assert "did not come within 10 s" in machines.log(0)


def workers(launcher):
    found = launcher.children(recursive=True)
    return [child for child in found if child.cmdline()[2:3] == ["recipes/vit.py"]]


@pytest.mark.slow
def test_a_link_that_is_down_for_20_seconds_is_waited_for(machines, tmp_path):
    """If the link is down for 20 seconds, the run waits: TCP resends, nothing restarts, the result is the same."""
    steps = ("--max_steps", "200", *OPTIONS)
    one = train("ddp_fp32", tmp_path / "one", *steps)
    run = tmp_path / "run"
    machines.launch_both("ddp_fp32", run, steps)
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
    """If the link stays cut, both machines end in bounded time. The workers end after COLLECTIVE_TIMEOUT, and then the
    launchers, which have lost each other."""
    monkeypatch.setenv("COLLECTIVE_TIMEOUT", "10")
    steps = ("--max_steps", "200", *OPTIONS)
    one = train("ddp_fp32", tmp_path / "one", *steps)
    run = tmp_path / "run"
    machines.launch_both("ddp_fp32", run, steps)
    until_step(run, 25)
    machines.cable("down")
    codes = machines.wait(90)
    assert codes == [1, 1], [machines.log(rank)[-3000:] for rank in (0, 1)]
    for rank in (0, 1):
        assert machines.log(rank).count("error: no answer from another process in 10 s (COLLECTIVE_TIMEOUT)") == 1
        assert "Traceback" not in machines.log(rank)
    made = record(run)
    assert made["status"] == "failed" and "no answer" in made["error"]
    folders = checkpoints.list_checkpoints(run)
    assert len(folders) == 2 and not any(map(checkpoints.unsound, folders)) and not list(run.glob("*.tmp"))
    machines.cable("up")
    machines.launch_both("ddp_fp32", run, steps)
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
    launcher = started(tmp_path / "log", *map(str, command))
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
    command = ["cluster/slurm_here.sh", str(tmp_path / "slurm"), "bash", "-c", SUBMIT, "bash", str(tmp_path), *steps]
    done = launched(*command, timeout=400)
    log = (tmp_path / "job.log").read_text(errors="replace")
    assert done.returncode == 0, done.stdout + done.stderr + log[-3000:]
    assert "Restarts=1" in done.stdout and log.count("asked: ") == 2 * 2 and "resumed from" in log
    assert metrics(tmp_path / "run") == metrics(one) and distance(tmp_path / "run", one) == 0
