"""A machine with eight GPUs, as far as its launch can be tried without one: nvidia-smi is a script that lists them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import weakref
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from conftest import CONFIGS, ROOT, Ranks, distance, fake_accelerate, launched, record, train
from torch.distributed.tensor import DTensor

from faithful import __main__
from faithful.checkpoint import checkpoints
from faithful.launch import machine
from tools import check

NVIDIA_SMI = """#!/bin/sh
case "$*" in
    *driver_version*) echo 570.86.15 ;;
    *compute_cap*) for i in 0 1 2 3 4 5 6 7; do echo "GPU-$i, NVIDIA H100 80GB HBM3, 9.0"; done ;;
esac
"""


@pytest.fixture
def node(tmp_path):
    """The environment of a node with eight cards, as its driver lists them."""
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix}


def added(node, config, **env):
    """What launch.sh adds to a launch of `config`."""
    done = launched(sys.executable, "tools/check.py", "--quiet", config, env=node | env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("config", ["hsdp_bf16", "hsdp_fp8_msamp_o2", "tp_bf16"])
def test_a_mesh_keeps_its_number_of_processes(node, config):
    assert added(node, config) == ""


def test_other_files_run_on_all_cards_that_are_visible(node):
    assert added(node, "ddp_bf16") == added(node, "fsdp_bf16") == "--num_processes 8"
    assert added(node, "ddp_bf16", CUDA_VISIBLE_DEVICES="0,1,5") == "--num_processes 3"
    assert added(node, "ddp_bf16", CUDA_VISIBLE_DEVICES="") == ""  # a rehearsal with the file's own number
    assert added(node, "single_bf16") == ""


def test_a_process_that_computes_on_the_host_has_its_share_of_the_cores(node):
    """The optimizer step of offloaded state is the CPU's: Accelerate gives it one thread of all."""
    cores = len(os.sched_getaffinity(0))
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | node
    line = [sys.executable, "tools/check.py", "--quiet"]

    def added(config, *words, **more):
        done = subprocess.run([*line, *words, config], cwd=ROOT, env=env | more, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    one = ["--num_processes", "1"]
    wanted = [*one, "--num_cpu_threads_per_process", str(cores)] if cores > 1 else one
    assert added("fsdp_bf16_offload", CUDA_VISIBLE_DEVICES="0") == wanted
    assert added("fsdp_bf16_offload", "--num_cpu_threads_per_process", "3", CUDA_VISIBLE_DEVICES="0") == one
    assert added("fsdp_bf16_offload", CUDA_VISIBLE_DEVICES="0", OMP_NUM_THREADS="4") == one
    assert added("fsdp_bf16", CUDA_VISIBLE_DEVICES="0") == one
    assert added("fsdp_bf16_offload", CUDA_VISIBLE_DEVICES="") == []  # a rehearsal


@pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason="needs CUDA's torch, and no GPU")
def test_cards_that_torch_does_not_see_are_no_rehearsal(node, tmp_path):
    """A driver that is too old for torch's CUDA: nothing trains on the CPU, unless it is asked to."""
    line = ("--max_steps", "1", "--eval_steps", "0", "--save_steps", "0", "--output_dir", str(tmp_path / "run"))
    done = launched(sys.executable, "recipes/vit.py", *line, env=node)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    [said] = [line for line in done.stderr.splitlines() if line.startswith("refused")]
    assert "8 x NVIDIA H100 80GB HBM3, and torch does not see them: Found no NVIDIA driver" in said
    assert f"The driver is 570.86.15, torch is built for CUDA {torch.version.cuda}: update the driver" in said
    done = launched("./launch.sh", "single_bf16", "vit", *line, env=node | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0 and "rehearsal on a CPU" in done.stdout, done.stderr


def test_fsdp_keeps_no_whole_weights_while_it_shards(tmp_path):
    """fully_shard moves a block's whole weights to the device and frees them with the last reference to them. So after
    each of its calls nothing may refer to what it has sharded: here the whole model would stay on every GPU."""

    def watch(rank):
        import torch.distributed.fsdp as fsdp

        shards, whole, held = fsdp.fully_shard, {}, []

        def watched(modules, **options):
            for module in modules if isinstance(modules, list) else [modules]:
                whole.update({id(one): (weakref.ref(one), one.numel()) for one in module.parameters()
                              if not isinstance(one, DTensor)})  # fmt: skip
            shards(modules, **options)
            held.append(sum(count for alive, count in whole.values() if alive() is not None))
            (tmp_path / f"rank{rank}.json").write_text(json.dumps([held, sum(count for _, count in whole.values())]))

        fsdp.fully_shard = watched

    train("fsdp_bf16", tmp_path / "run", "--max_steps", 1, "--eval_steps", 0, before=watch)
    for rank in (0, 1):
        held, total = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(held) > 4 and total > 10**5  # four blocks, the last norm and head, the rest
        assert max(held) <= 10, held  # Accelerate's loop over the parameters leaves the head's bias in a variable


def test_torchs_launcher_waits_ten_minutes_for_a_checkpoint(tmp_path):
    """Shown with an accelerate that says its launcher's environment: torch's launcher reads it there."""
    fake_accelerate(tmp_path, "def main(): import os; print('waits', os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'])")
    env = {"PYTHONPATH": str(tmp_path)}
    assert "waits 600" in launched("./launch.sh", "single_fp32", "vit", env=env).stdout
    env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "40"
    assert "waits 40" in launched("./launch.sh", "single_fp32", "vit", env=env).stdout


def test_a_checkpoint_that_takes_long_is_written_without_the_launcher(tmp_path):
    """A process whose launcher was killed is killed GRACE seconds later, here 1, but not while it writes: here 2."""
    out = tmp_path / "run"

    def slow(rank):
        from faithful.checkpoint import checkpoints
        from faithful.launch import launcher

        launcher.launches, launcher.GRACE, launcher.SAVING = lambda command: True, 1, 60
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not pytest-timeout's
        save = checkpoints.tensor_files.write
        checkpoints.tensor_files.write = lambda *parts: (time.sleep(2), save(*parts))[1]

    if not (pid := os.fork()):  # stands for the launcher
        ranks = Ranks(
            "single_fp32", ["--output_dir", str(out), "--max_steps", "100000", "--logging_steps", "1"], before=slow
        )
        (tmp_path / "pid").write_text(str(ranks.pids[0]))
        time.sleep(600)
        os._exit(1)
    while not (tmp_path / "run.log").exists() or "step 3:" not in (tmp_path / "run.log").read_text():
        time.sleep(0.05)
    rank = psutil.Process(int((tmp_path / "pid").read_text()))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    psutil.wait_procs([rank], 30)
    assert not rank.is_running() and record(out)["status"] == "preempted"
    assert checkpoints.unsound(checkpoints.list_checkpoints(out)[0]) is None


def test_a_checkpoint_may_take_longer_than_a_collective(tmp_path):
    """Processes wait for one that writes, or verifies, its part longer than COLLECTIVE_TIMEOUT. Each file is read and
    hashed by one process."""
    read = tmp_path / "read"
    read.mkdir()

    def slow(rank):
        from faithful.checkpoint import checkpoints

        save, hashed = checkpoints.tensor_files.write, checkpoints.digest
        if rank == 1:
            checkpoints.tensor_files.write = lambda *parts: (time.sleep(4), save(*parts))[1]

        def counted(path, *kind):
            if "checkpoint-2" == path.parent.name:  # complete: this is the resumed run's
                (read / f"{path.name} {rank}").touch()
                time.sleep(4 * (rank == 1))
            return hashed(path, *kind)

        checkpoints.digest = counted

    argv, env = ("--max_steps", 3, "--save_steps", 2, "--eval_steps", 0), {"COLLECTIVE_TIMEOUT": "3"}
    whole = train("fsdp_fp32", tmp_path / "run", *argv, before=slow, env=env)
    assert not list(read.iterdir())
    argv = (*argv, "--resume_from_checkpoint", whole / "checkpoint-2")
    again = train("fsdp_fp32", tmp_path / "again", *argv, before=slow, env=env)
    assert distance(whole, again) == 0
    found = sorted(path.name for path in read.iterdir())
    assert found == ["rank0.safetensors 0", "rank1.safetensors 1", "trainer_state.json 0"]


def test_a_process_that_dies_while_it_saves_is_not_waited_for(tmp_path):
    def dies(rank):
        from faithful.checkpoint import checkpoints

        if rank == 1:
            checkpoints.tensor_files.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    argv, out = ("--max_steps", "3", "--save_steps", "2", "--eval_steps", "0"), tmp_path / "run"
    ranks, began = Ranks("fsdp_fp32", ["--output_dir", str(out), *argv], before=dies), time.monotonic()
    assert ranks.wait(60) == [1, -signal.SIGKILL] and time.monotonic() - began < 30
    assert "error: another process of this run ended" in ranks.text() and record(out)["status"] == "failed"
    assert not checkpoints.list_checkpoints(out)


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


def test_the_record_has_the_error_of_the_rank_that_failed(tmp_path):
    def fails(rank):
        from faithful.training.steps import Steps

        check = Steps.check

        def failing(self, *rest):
            if rank == 1 and self.taken == 2:
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)
            return check(self, *rest)

        Steps.check = failing

    run = train("ddp_fp32", tmp_path / "run", "--max_steps", 4, "--eval_steps", 0, before=fails, code=1)
    assert record(run)["status"] == "failed"
    assert record(run)["error"] == f"rank 1: OutOfMemoryError: {OUT_OF_MEMORY}"


IN_NCCL = f"""
import os, sys, time
from pathlib import Path
import torch
from accelerate import Accelerator
accelerator = Accelerator(project_dir=sys.argv[1])
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(4):
    if step == 2 and accelerator.process_index == 1:
        raise torch.OutOfMemoryError("{OUT_OF_MEMORY}")
    if step == 2:  # waits in NCCL, where Python sees no signal, until torch's watchdog aborts the process
        while not Path(sys.argv[1], "error-rank1.json").exists():
            time.sleep(0.1)
        os.abort()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
"""


def test_a_main_process_that_nccl_aborts_has_a_record_that_says_failed(tmp_path):
    script, run = tmp_path / "mine.py", tmp_path / "run"
    script.write_text(IN_NCCL)
    done = launched("./launch.sh", "ddp_fp32", str(script), str(run))
    assert done.returncode in (1, 134), done.stderr
    assert record(run)["status"] == "failed" and record(run)["finished"]
    assert record(run)["error"] == f"rank 1: OutOfMemoryError: {OUT_OF_MEMORY}"


def test_configs_that_compile_kernels_need_a_compiler(monkeypatch, tmp_path):
    """A slim image, without gcc and Python's headers: refused before a model is loaded, not in the first backward."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    slim = machine.Machine("cuda", 8, "H100", (9, 0), "13.2", machine.PACKAGES, machine.lacks())
    for name in ("ddp_fp8_msamp_o2", "single_bf16_compile"):
        [said] = check.check(CONFIGS / f"{name}.yml", slim, {})[1]
        assert "a C compiler and Python's headers, and here is no C compiler and no Python.h: install gcc" in said
    assert check.check(CONFIGS / "ddp_bf16.yml", slim, {})[1] == []
    monkeypatch.setenv("CC", "/opt/bin/cc")
    (tmp_path / "Python.h").touch()
    assert machine.lacks() == [] == check.check(CONFIGS / "ddp_fp8_msamp_o2.yml", replace(slim, lacks=[]), {})[1]


LATE = """
import sys, time
import torch
from transformers import TrainingArguments
arguments = TrainingArguments(sys.argv[2])
assert arguments.device and torch.distributed.is_initialized()
from faithful import Accelerator
accelerator = Accelerator()
time.sleep(5 * accelerator.process_index)
torch.distributed.all_reduce(torch.ones(1))
"""


def test_the_group_that_training_arguments_make_has_the_runs_timeout(tmp_path):
    pytest.importorskip("transformers")
    script, env = tmp_path / "mine.py", {"COLLECTIVE_TIMEOUT": "3", "FAITHFUL_PROJECT_DIR": str(tmp_path / "run")}
    script.write_text(LATE)
    (tmp_path / "out").mkdir()
    ranks = Ranks("ddp_fp32", ["--output_dir", str(tmp_path / "out")], script=script, env=env,
                  before=lambda rank: __main__.take_its_place())  # fmt: skip
    assert ranks.wait(60)[0] == 1
    assert "error: no answer from another process in 3 s (COLLECTIVE_TIMEOUT)" in ranks.text(), ranks.text()[-2000:]


@pytest.mark.parametrize(("config", "copies"), [("ddp_bf16", [1, 0]), ("fsdp_bf16", [1, 1])])
def test_only_processes_that_store_tensors_copy_them_to_the_host(tmp_path, config, copies):
    """Under DDP all processes hold the same, and the main one stores it: 12 bytes per parameter are copied once."""

    def count(rank):
        from faithful.strategies.base import Strategy

        copy = Strategy.tensors

        def counted(*rest):
            with open(tmp_path / f"copies{rank}", "a") as file:
                file.write("x")
            return copy(*rest)

        Strategy.tensors = counted

    train(config, tmp_path / "run", "--max_steps", 2, "--save_steps", 2, "--eval_steps", 0, before=count)
    counts = [tmp_path / f"copies{rank}" for rank in (0, 1)]
    assert [len(file.read_text()) if file.exists() else 0 for file in counts] == copies
