"""A checkpoint is written while training goes on: what is in it, who waits for it, and what a crash loses."""

import importlib
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Ranks, distance, metrics, record, train

from faithful import __main__ as door
from faithful.checkpoint import checkpoints
from faithful.disk import tensor_files

STEPS = ("--max_steps", 9, "--save_steps", 3, "--save_total_limit", 9, "--logging_steps", 1, "--eval_steps", 0)
LATEST = ("--resume_from_checkpoint", "latest")


def wait_for(path, ranks):
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, ranks.text()
        time.sleep(0.01)


def slow(*ranks, seconds, begun=None):
    """Makes these ranks write slowly. begun: a file that says that the sixth step's checkpoint is being written."""

    def before(rank):
        from faithful.disk import tensor_files

        write = tensor_files.write

        def late(tensors, path, *more):
            if begun and "checkpoint-6" in str(path):
                begun.touch()
            time.sleep(seconds if rank in ranks else 0)
            return write(tensors, path, *more)

        tensor_files.write = late

    return before


@pytest.mark.parametrize("config", ["single_bf16", "fsdp_fp8_msamp_o2", "ddp_fp8_msamp_o3"])
def test_training_goes_on_and_the_checkpoint_is_of_its_step(tmp_path, config):
    """Rank 0 writes the first one when it has taken two more steps. What is written is of the step of the call."""

    def before(rank):
        from faithful.disk import tensor_files

        write = tensor_files.write

        def late(tensors, path, *more):
            log, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 60
            while rank == 0 and "checkpoint-3" in str(path) and '"step": 5' not in log.read_text():
                assert time.monotonic() < end, "training has waited for the checkpoint"
                time.sleep(0.01)
            return write(tensors, path, *more)

        tensor_files.write = late

    run = train(config, tmp_path / "run", *STEPS, before=before)
    again = tmp_path / "again"
    shutil.copytree(run / "checkpoint-3", again / "checkpoint-3")
    train(config, again, *STEPS, *LATEST)
    assert metrics(again) == [row for row in metrics(run) if row["step"] > 3] and distance(again, run) == 0
    assert [path.name for path in checkpoints.list_checkpoints(run)] == ["checkpoint-9", "checkpoint-6", "checkpoint-3"]


def test_a_checkpoint_before_the_first_step_is_not_taken_for_a_leftover(tmp_path):
    def before(rank):
        from faithful import Accelerator

        slow(0, seconds=1)(rank)
        register = Accelerator.register_for_checkpointing

        def saved(self, *objects):
            register(self, *objects)
            self.save_state(f"{self.project_dir}/checkpoint-0")

        Accelerator.register_for_checkpointing = saved

    run = train("single_bf16", tmp_path / "run", *STEPS, "--max_steps", 2, before=before)
    assert checkpoints.unsound(run / "checkpoint-0") is None and record(run)["status"] == "finished"


def test_a_folder_that_cannot_be_made_is_a_warning_and_training_goes_on(tmp_path):
    """The last part but one of the checkpoint's path is a file."""

    def before(rank):
        from faithful import Accelerator

        save = Accelerator.save_state
        Accelerator.save_state = lambda self, folder: save(self, f"{tmp_path}/notes.txt/checkpoint")

    (tmp_path / "notes.txt").write_text("mine")
    run = train("ddp_bf16", tmp_path / "run", *STEPS, "--max_steps", 4, before=before, code=1)
    log = (tmp_path / "run.log").read_text()
    assert "notes.txt/checkpoint could not be written ([Errno 20] Not a directory" in log
    assert "step 4: eval_loss" in log and record(run)["error"] == "1 checkpoints could not be written"
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_end_and_a_signal_wait_for_it(tmp_path):
    run = train(
        "ddp_fp32", tmp_path / "end", "--max_steps", 3, "--save_steps", 3, "--eval_steps", 0, before=slow(1, seconds=1)
    )
    assert checkpoints.unsound(run / "checkpoint-3") is None and record(run)["status"] == "finished"
    begun = tmp_path / "begun"
    ranks = Ranks("ddp_fp32", ["--output_dir", str(tmp_path / "stopped"), "--max_steps", "100000", "--save_steps", "3",
                               "--eval_steps", "0", "--save_total_limit", "9"],
                  before=slow(1, seconds=1, begun=begun))  # fmt: skip
    wait_for(begun, ranks)
    os.kill(ranks.pids[0], signal.SIGTERM)
    assert set(ranks.wait()) == {143}
    newest, *older = checkpoints.list_checkpoints(tmp_path / "stopped")
    assert older and not any(map(checkpoints.unsound, [newest, *older]))


def test_a_crash_loses_only_the_one_that_is_being_written(tmp_path):
    begun, out = tmp_path / "begun", tmp_path / "run"
    whole = train("fsdp_fp32", tmp_path / "whole", *STEPS)
    shutil.copytree(whole / "checkpoint-3", out / "checkpoint-3")
    argv = ["--output_dir", str(out), *map(str, STEPS), *LATEST]
    ranks = Ranks("fsdp_fp32", argv, before=slow(0, 1, seconds=60, begun=begun))
    wait_for(begun, ranks)
    for pid in ranks.pids:
        os.kill(pid, signal.SIGKILL)
    ranks.wait()
    assert [path.name for path in checkpoints.list_checkpoints(out)] == ["checkpoint-3"]
    train("fsdp_fp32", out, *STEPS, *LATEST)
    assert distance(out, whole) == 0 and not list(out.glob("*.tmp"))


def save_and_look(package):
    """What a rank runs: it saves slowly, and says whether the folder is there when save_state returns."""
    write = tensor_files.write
    tensor_files.write = lambda *parts: (time.sleep(1), write(*parts))[1]
    accelerator = importlib.import_module(package).Accelerator(project_dir=sys.argv[2])
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).sum())
    optimizer.step()
    folder = Path(sys.argv[2]) / "mine"
    accelerator.save_state(str(folder))
    print("there:", folder.exists())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "notes.txt").write_text("mine")
    accelerator.end_training()


@pytest.mark.parametrize(
    ("package", "asked", "there"),
    [
        ("faithful", None, False),
        ("faithful", "0", True),
        ("accelerate", None, True),  # by `-m faithful`: the script may read what it has just saved
        ("accelerate", "1", False),
    ],
)
def test_who_waits_and_a_script_may_write_into_the_folder(tmp_path, package, asked, there):
    env = {"FAITHFUL_ASYNC_SAVE": asked} if asked else {}
    before = (lambda rank: door.take_its_place()) if package == "accelerate" else None
    train("single_fp32", tmp_path / "run", script=partial(save_and_look, package), env=env, before=before)
    said = (tmp_path / "run.log").read_text()
    assert f"there: {there}" in said, said
    folder = tmp_path / "run" / "mine"
    assert checkpoints.unsound(folder) is None and (folder / "notes.txt").read_text() == "mine"
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_without_room_for_a_copy_it_waits(tmp_path):
    def before(rank):
        from faithful.checkpoint import checkpoints
        from faithful.saving import saving

        saving.psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=0))
        checkpoints.Save.behind = lambda *_: os._exit(9)

    run = train("single_fp32", tmp_path / "run", "--max_steps", 2, "--save_steps", 2, "--eval_steps", 0, before=before)
    assert checkpoints.unsound(run / "checkpoint-2") is None


def test_a_setting_that_is_none_is_refused(tmp_path):
    env = {"FAITHFUL_ASYNC_SAVE": "yes"}
    train("single_fp32", tmp_path / "run", "--max_steps", 2, "--save_steps", 2, "--eval_steps", 0, env=env, code=2)
    assert "refused: FAITHFUL_ASYNC_SAVE=yes: set 1" in (tmp_path / "run.log").read_text()


DTYPES = [*tensor_files.NAMES]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_a_file_of_tensors_is_what_safetensors_reads(tmp_path, dtype):
    from safetensors.torch import load_file

    bits = torch.arange(96, dtype=torch.uint8).view(dtype)
    tensors = {"b": bits, "a": torch.tensor(2.5), "empty": bits[:0], "turned": torch.randn(3, 4).T}
    written = tensor_files.write(tensors, tmp_path / "x")
    assert written == checkpoints.entry(tmp_path / "x")
    found, lazily = load_file(tmp_path / "x"), tensor_files.TensorFile(tmp_path / "x")
    for name, tensor in tensors.items():
        for other in (found[name], lazily[name]):
            assert other.dtype == tensor.dtype and other.shape == tensor.shape
            assert torch.equal(
                other.contiguous().reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
            )


STAGED = """
import pretend, torch
from faithful.saving import state
state.STAGED = 64  # bytes: several pieces of most tensors
dtypes = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int64, torch.bool
parts = {str(dtype): torch.randint(0, 9, (101,)).to(dtype).to("cuda") for dtype in dtypes}
parts |= {"number": torch.ones((), device="cuda"), "empty": torch.ones(0, 3, device="cuda"), "host": torch.ones(2),
          "turned": torch.arange(6.0).view(2, 3).to("cuda").t(), "cut": torch.arange(99.0).to("cuda")[7:80]}
right = {name: part.cpu().clone() for name, part in parts.items()}
pretend.steps[:] = [pretend.nothing_yet()]
copies = state.host_copy(parts)
waits = [what for what, _ in pretend.steps[0]["waits"]]
for name, part in parts.items():
    part.zero_()
    assert copies[name].device.type == "cpu" and copies[name].dtype == part.dtype
    assert torch.equal(copies[name].double(), right[name].double()) and copies[name].shape == part.shape, name
    assert not copies[name].is_pinned(), name
assert set(waits) == {"synchronize", "_to_copy"} and waits.count("_to_copy") == 1, waits
"""


def test_tensors_leave_a_gpu_through_pinned_memory(gpu, tmp_path):
    """One that is not contiguous is copied by itself; the pieces of all others are read after an event."""
    (tmp_path / "script.py").write_text(STAGED)
    gpu.train("single_bf16", tmp_path / "run", script=str(tmp_path / "script.py"))
