"""A run that was killed or stopped, or whose checkpoint was damaged, resumes as the same run or refuses."""

import functools
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import sys
import time

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from conftest import Ranks, free_port, launched, metrics, record, refusal, started, train, until, until_gone, weights
from loop import loop
from safetensors.torch import load_file, save_file

from faithful.checkpoint import checkpoints

STEPS = ("--max_steps", "60", "--logging_steps", "1", "--save_steps", "7", "--eval_steps", "20")
LATEST = ("--resume_from_checkpoint", "latest")


@functools.cache
def whole(config, folder):
    return train(config, folder, *STEPS)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return lambda config: whole(config, folder / config)


def same_run(a, b):
    rows = {row["step"]: row for row in metrics(a) if "loss" in row}
    assert metrics(a) == metrics(b) and len(rows) == 60
    a, b = weights(a), weights(b)
    assert all(a[name].equal(b[name]) for name in a.keys() | b.keys())


@pytest.mark.parametrize(("config", "kills"), [("single_bf16", 4), ("ddp_fp16", 3), ("fsdp_fp16", 3)])
def test_killed_and_resumed_is_the_same_run(uninterrupted, tmp_path, config, kills):
    """A run that is killed by kill -9 at random moments and resumed is the same run. Ten kills over three strategies;
    each resumed run is killed again. An epoch has 44 or 22 steps, so most moments are mid-epoch."""
    out, chance, survived = tmp_path / "run", random.Random(config), 0
    while survived < kills:
        ranks = Ranks(config, ["--output_dir", str(out), *STEPS, *LATEST])
        wanted = chance.randint(4, 16)  # let it get on by so many log lines, then strike
        seen = len(ranks.text().splitlines())
        end = time.time() + 120
        while len(ranks.text().splitlines()) < seen + wanted and time.time() < end:
            time.sleep(0.01)
        time.sleep(chance.random() / 10)
        ranks.kill(signal.SIGKILL)
        codes = ranks.wait()
        assert codes == [-9] * len(codes), ranks.text()[-3000:]
        survived += 1
    assert record(out)["status"] == "running"
    train(config, out, *STEPS, *LATEST)
    assert "resumed from" in (tmp_path / "run.log").read_text()
    same_run(out, uninterrupted(config))
    assert record(out)["status"] == "finished" and record(out)["seen"]["resumed_at"]
    whole = dict(record(uninterrupted(config))["seen"]["loss_curve"])  # processes compare losses every 0.1 s
    curve = record(out)["seen"]["loss_curve"]
    assert curve[0][0] <= 10 and all(whole.get(step, loss) == loss for step, loss in curve)


@pytest.mark.parametrize(("config", "victim"), [("single_fp32", 0), ("ddp_fp16", 1)])
def test_sigterm_to_one_worker(uninterrupted, tmp_path, config, victim):
    out = tmp_path / "run"
    ranks = Ranks(config, ["--output_dir", str(out), *STEPS, "--save_steps", "0"])
    while "step 11: loss" not in ranks.text():
        time.sleep(0.02)
    os.kill(ranks.pids[victim], signal.SIGTERM)
    assert set(ranks.wait()) == {143}
    assert record(out)["status"] == "preempted" and record(out)["error"] is None
    [only] = checkpoints.list_checkpoints(out)
    assert checkpoints.unsound(only) is None
    train(config, out, *STEPS, *LATEST)
    same_run(out, uninterrupted(config))


@pytest.mark.parametrize("config", ["single_fp32", "ddp_fp32"])
@pytest.mark.parametrize(
    ("send", "number"), [(os.kill, signal.SIGTERM), (os.kill, signal.SIGKILL), (os.killpg, signal.SIGTERM)]
)
def test_a_signal_to_the_launcher(tmp_path, config, send, number):
    """If the launcher gets a signal, alone or with all its processes (as from Slurm), the workers write one complete
    checkpoint, also with data loader processes, and no process survives."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{config}.yml"]
    command += ["--main_process_port", str(free_port()), "recipes/vit.py", "--output_dir", str(out)]
    command += ["--max_steps", "100000", "--save_steps", "0", "--logging_steps", "1", "--eval_steps", "0"]
    command += ["--dataloader_num_workers", "1"]
    launcher = started(tmp_path / "log", *command)
    until(lambda: (out / "metrics.jsonl").exists() and len(metrics(out)) >= 3, tmp_path / "log", launcher)
    send(launcher.pid, number)
    launcher.wait(60)
    until_gone(out)
    [only] = checkpoints.list_checkpoints(out)
    assert checkpoints.unsound(only) is None
    assert not list(out.glob("*.tmp")) and record(out)["status"] == "preempted"


@pytest.mark.parametrize("config", ["single_fp32", "fsdp_bf16"])
def test_sigterm_during_evaluation(tmp_path, config):
    """SIGTERM during a long evaluation is noticed, and the checkpoint is one of training, although FSDP2 holds some
    parameters whole and in 16 bit at that moment."""
    out = tmp_path / "run"

    def slow_evaluation(rank):
        from faithful import Accelerator

        gather = Accelerator.gather_for_metrics
        Accelerator.gather_for_metrics = lambda *seen: (
            print("evaluating", flush=True),
            time.sleep(0.2),
            gather(*seen),
        )[-1]

    argv = ("--max_steps", "10", "--eval_steps", "5", "--save_steps", "0", "--logging_steps", "1")
    few = ("--output_dir", str(out), "--per_device_eval_batch_size", "4")
    ranks = Ranks(config, [*few, *argv], before=slow_evaluation)
    while "evaluating" not in ranks.text():
        time.sleep(0.02)
    os.kill(ranks.pids[0], signal.SIGTERM)
    assert set(ranks.wait()) == {143}
    assert [path.name for path in checkpoints.list_checkpoints(out)] == ["checkpoint-5"]
    assert len(ranks.text().split("evaluating")) < 20 * len(ranks.pids)  # it did not wait for all 45 batches or 90
    train(config, out, *argv, *LATEST)
    whole = train(config, tmp_path / "whole", *argv)
    assert metrics(out) == metrics(whole)
    a, b = weights(out), weights(whole)
    assert all(a[name].equal(b[name]) for name in a.keys() | b.keys())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with two checkpoints, at steps 4 and 8."""
    argv = ("--max_steps", 8, "--save_steps", 4, "--logging_steps", 4)
    return train("ddp_fp32", tmp_path_factory.mktemp("finished") / "run", *argv)


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


FILES = ("rank0.safetensors", "rank1.safetensors", "trainer_state.json", "manifest.json")


def spoil(folder, how, marker):
    name = how.split()[-1]
    path = folder / name
    if how.startswith("cut"):
        path.write_bytes(path.read_bytes()[:-7])
    elif how.startswith("flip"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how.startswith("remove"):
        path.unlink()
    elif how.startswith("pickle"):
        path.write_bytes(pickle.dumps(Payload(str(marker))))
    elif how.startswith("forged pickle"):  # by someone who also mends the manifest
        path.write_bytes(pickle.dumps(Payload(str(marker))))
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest[name] = {"bytes": path.stat().st_size, "xxh3_128": checkpoints.digest(path)}
        (folder / "manifest.json").write_text(json.dumps(manifest))


HOWS = [f"{verb} {name}" for verb in ("cut", "flip", "remove", "pickle") for name in FILES]


@pytest.mark.parametrize("how", HOWS)
def test_an_unsound_checkpoint_is_known(finished, tmp_path, how):
    folder = tmp_path / "checkpoint-8"
    shutil.copytree(finished / "checkpoint-8", folder)
    assert checkpoints.unsound(folder) is None
    spoil(folder, how, tmp_path / "ran")
    assert checkpoints.unsound(folder) is not None
    assert not (tmp_path / "ran").exists()


def test_no_byte_of_a_manifest_can_change_unseen(tmp_path):
    (tmp_path / "trainer_state.json").write_text('{"counter": 1}')
    text = json.dumps({"trainer_state.json": checkpoints.entry(tmp_path / "trainer_state.json")}).encode()
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(text)
    assert checkpoints.unsound(tmp_path) is None
    for at, bit in itertools.product(range(len(text)), (1, 2, 64)):
        manifest.write_bytes(text[:at] + bytes([text[at] ^ bit]) + text[at + 1 :])
        assert checkpoints.unsound(tmp_path) is not None, manifest.read_bytes()


def test_files_of_others_in_a_checkpoint_are_never_read(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    spoil(tmp_path / "run" / "checkpoint-8", "pickle random_states_0.pkl", tmp_path / "ran")
    train("ddp_fp32", tmp_path / "run", "--max_steps", 8, *LATEST)
    assert "checkpoint-8 at step 8" in (tmp_path / "run.log").read_text() and not (tmp_path / "ran").exists()


def test_the_newest_sound_checkpoint_is_used(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    spoil(tmp_path / "run" / "checkpoint-8", "cut rank0.safetensors", None)
    argv = ("--max_steps", 8, "--save_steps", 4, "--logging_steps", 4)
    run = train("ddp_fp32", tmp_path / "run", *argv, *LATEST)
    log = (tmp_path / "run.log").read_text()
    assert "checkpoint-8: rank0.safetensors is not what was written" in log and "checkpoint-4 at step 4" in log
    a, b = weights(run), weights(finished)
    assert all(a[name].equal(b[name]) for name in a)
    assert checkpoints.unsound(run / "checkpoint-8") is None  # written anew


def says_what_it_opens(rank):
    from faithful.disk import tensor_files

    opened = tensor_files.TensorFile.__init__

    def noted(self, path, *rest):
        print(f"rank {rank} opens {path.parent.name}/{path.name}", flush=True)
        opened(self, path, *rest)

    tensor_files.TensorFile.__init__ = noted


def test_a_flipped_byte_in_one_rank_s_shard_is_named_before_anything_is_loaded(tmp_path):
    """The run goes on from the older checkpoint, as if it had been stopped there; without one it ends with the error,
    and so does one that was told to take the damaged one."""
    argv = ("--max_steps", 4, "--save_steps", 2, "--logging_steps", 1, "--eval_steps", 0)
    whole = train("fsdp_bf16", tmp_path / "whole", *argv)
    run = shutil.copytree(whole, tmp_path / "run")
    spoil(run / "checkpoint-4", "flip rank1.safetensors", None)
    alone = shutil.copytree(run, tmp_path / "alone", ignore=shutil.ignore_patterns("checkpoint-2"))
    train("fsdp_bf16", run, *argv, *LATEST, before=says_what_it_opens)
    log = (tmp_path / "run.log").read_text()
    said = "rank1.safetensors is not what was written by rank 1"
    assert f"skipping {run}/checkpoint-4: {said}" in log and f"resumed from {run}/checkpoint-2 at step 2" in log
    assert "opens checkpoint-4" not in log.split("step 4: loss")[0]
    for rank in (0, 1):
        assert log.index(said) < log.index(f"rank {rank} opens checkpoint-2/rank{rank}.safetensors")
    a, b = weights(run), weights(whole)
    assert all(a[name].equal(b[name]) for name in a) and checkpoints.unsound(run / "checkpoint-4") is None
    for wanted, line in (
        (
            "latest",
            f"refused: no checkpoint can be resumed, {alone}/checkpoint-4: {said}: move it elsewhere to start at",
        ),
        (
            alone / "checkpoint-4",
            f"refused: the checkpoint {alone}/checkpoint-4 cannot be resumed: {said}. Take another",
        ),
    ):
        log = refusal("fsdp_bf16", alone, *argv, "--resume_from_checkpoint", wanted, before=says_what_it_opens)
        assert log.count(line) == 1 and " opens " not in log


def test_a_checkpoint_that_was_never_complete_is_not_an_error(tmp_path):
    """As after a kill in a folder that the script had made itself."""
    (tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    train("single_fp32", tmp_path / "run", "--max_steps", 1, "--save_steps", 0, *LATEST)
    assert "checkpoint-1: no readable manifest.json" in (tmp_path / "run.log").read_text()
    assert record(tmp_path / "run")["final"]["step"] == 1


@pytest.mark.parametrize("name", ["rank0.safetensors", "trainer_state.json"])
def test_a_forged_checkpoint_is_refused_and_its_payload_never_runs(finished, tmp_path, name):
    shutil.copytree(finished, tmp_path / "run")
    for step in (4, 8):
        spoil(tmp_path / "run" / f"checkpoint-{step}", f"forged pickle {name}", tmp_path / "ran")
    argv = ("--max_steps", 8, "--save_steps", 4, "--logging_steps", 4)
    train("ddp_fp32", tmp_path / "run", *argv, *LATEST, code=2)
    assert not (tmp_path / "ran").exists()
    log = (tmp_path / "run.log").read_text()
    assert log.count("refused: ") == 1 and "Traceback" not in log
    pickle.loads(pickle.dumps(Payload(str(tmp_path / "ran"))))
    assert (tmp_path / "ran").exists()  # the payload was a real one


def test_another_run_is_refused_by_name(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    argv = ("--max_steps", 8, "--learning_rate", 0.5)
    assert "learning_rate 0.002 -> 0.5" in refusal("ddp_fp32", tmp_path / "run", *argv, *LATEST)
    log = refusal("single_fp32", tmp_path / "run", "--max_steps", 8, *LATEST)
    assert "strategy ddp -> single" in log and "num_processes 2 -> 1" in log


def test_a_record_is_never_written_over(finished, tmp_path):
    """A new run in the folder of one that has ended keeps that one's record."""
    run = shutil.copytree(finished, tmp_path / "run")
    train("ddp_fp32", run, "--max_steps", 8, "--save_steps", 0, "--logging_steps", 4)
    [aside] = run.glob("run_*")
    for name in ("run.json", "metrics.jsonl"):
        assert (aside / name).read_bytes() == (finished / name).read_bytes()
    assert f"note: {run} holds an earlier run, which is finished" in (tmp_path / "run.log").read_text()
    assert record(run)["started"] != record(aside)["started"] and len(metrics(run)) == len(metrics(aside))


def test_pruning_keeps_the_newest(tmp_path):
    run = train("single_fp32", tmp_path / "run", "--max_steps", 12, "--save_steps", 2, "--save_total_limit", 3)
    assert [path.name for path in checkpoints.list_checkpoints(run)] == [f"checkpoint-{n}" for n in (12, 10, 8)]
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoint-10", "checkpoint-12", "checkpoint-8", "data.json", "metrics.jsonl", "model", "run.json"
    ]  # fmt: skip
    files = {path.name for path in (run / "checkpoint-12").iterdir()}
    assert files == {"rank0.safetensors", "trainer_state.json", "manifest.json"}
    held = load_file(run / "checkpoint-12" / "rank0.safetensors")
    own = {key.removeprefix("0:model/"): tensor for key, tensor in held.items() if key.startswith("0:model/")}
    final = load_file(run / "model" / "model.safetensors")
    assert final.keys() == own.keys() and all(final[name].equal(own[name]) for name in final)


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ("fsdp_fp32", (0, 1)),
        *(pytest.param(name, (1,), marks=pytest.mark.slow) for name in ("zero3_bf16", "fsdp_fp8_msamp_o2")),
    ],
)
def test_a_full_disk_costs_neither_the_run_nor_the_last_checkpoint(tmp_path, config, ranks):
    """A full disk, simulated by a limit on file size, ends neither the run nor the last checkpoint. The second
    checkpoint cannot be written, by all ranks or by one."""
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")

    def fill(rank):
        import resource

        write = checkpoints.Save.write

        def limited(save, *parts):
            if save.folder.name != "checkpoint-3" and rank in ranks:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            try:
                return write(save, *parts)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        checkpoints.Save.write = limited

    argv = ("--max_steps", 7, "--save_steps", 3, "--save_total_limit", 1)
    run = train(config, tmp_path / "run", *argv, before=fill, code=1)
    log = (tmp_path / "run.log").read_text()
    assert "checkpoint-6 could not be written" in log and "1 checkpoints could not be written" in log
    [only] = checkpoints.list_checkpoints(run)
    assert only.name == "checkpoint-3" and checkpoints.unsound(only) is None
    made = record(run)
    assert not list(run.glob("*.tmp")) and made["final"]["step"] == 7
    assert made["status"] == "failed" and made["error"] == "1 checkpoints could not be written"


def test_a_checkpoint_of_another_format_is_refused_with_what_to_do(tmp_path):
    folder = tmp_path / "run" / "checkpoint-3"
    folder.mkdir(parents=True)
    save_file({"0:model/head.bias": torch.zeros(10)}, folder / "rank0.safetensors")
    state = {"format": 5, "counter": 1, "what": "another version needs"}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / "manifest.json").write_text(json.dumps({p.name: checkpoints.entry(p) for p in folder.iterdir()}))
    assert checkpoints.unsound(folder) is None
    for wanted in ("latest", folder):
        train("single_fp32", tmp_path / "run", "--max_steps", 4, "--resume_from_checkpoint", wanted, code=2)
    log = (tmp_path / "run.log").read_text()
    line = f"refused: {folder} was written in format 5, this version reads 4: use the version that wrote it"
    assert log.splitlines().count(line) == 2 and "Traceback" not in log
    assert not (tmp_path / "run" / "run.json").exists()
    (folder / "trainer_state.json").write_text(json.dumps(state | {"counter": 2}))
    assert checkpoints.unsound(folder) == "trainer_state.json is not what was written"


def test_latest_without_any_starts_and_says_so(tmp_path):
    train("single_fp32", tmp_path / "run", "--max_steps", 2, *LATEST)
    assert "starting at step 0" in (tmp_path / "run.log").read_text()
    result = launched(sys.executable, "recipes/vit.py", *LATEST)
    assert result.returncode == 2 and "needs --output_dir" in result.stderr and "Traceback" not in result.stderr


def test_a_project_configuration_that_the_script_sets_later_counts(tmp_path):
    def saved(run):
        run.accelerator.project_configuration = ProjectConfiguration(str(tmp_path / "other"))
        run.accelerator.save_state()

    train("single_fp32", tmp_path / "run", script=functools.partial(loop, saved=saved))
    assert [path.name for path in (tmp_path / "other").glob("checkpoint-*")] == ["checkpoint-8"]
