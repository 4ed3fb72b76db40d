"""What a script saves on the main process alone, where each process holds a part: as if all had called it."""

import sys
import time
from functools import partial
from pathlib import Path

import accelerate
import pytest
import timm.utils
import torch
from conftest import Ranks
from safetensors.torch import load_file, save_file
from torch import save
from torch.nn.functional import mse_loss

from faithful import Accelerator
from faithful.launch import following
from faithful.scripts import alone


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(16, 16), torch.nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.linear(x)).relu()


def script(by_all, resume=None):
    """Two epochs of four steps. Checkpoints in the middle of the first, and in the last step of it."""
    folder = Path(sys.argv[2])
    accelerate.utils.set_seed(3)
    accelerator = Accelerator(project_dir=folder)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), Block(), Block(), torch.nn.Linear(16, 4))
    samples = 16 * accelerator.num_processes
    data = torch.utils.data.TensorDataset(torch.randn(samples, 8), torch.randn(samples, 4))
    average = timm.utils.ModelEmaV2(model)
    optimizer, loader = torch.optim.AdamW(model.parameters(), 1e-2), torch.utils.data.DataLoader(data, 4, shuffle=True)
    shown = torch.utils.data.DataLoader(data, 4, generator=torch.Generator())
    model, optimizer, loader, shown = accelerator.prepare(model, optimizer, loader, shown)
    saves, averages = accelerator.is_main_process or by_all, accelerator.distributed_type != "DEEPSPEED"
    step = 0
    if accelerator.is_main_process:  # it alone reads batches
        assert len(list(shown)) == 4
    if resume:
        accelerator.load_state(resume)
        step = int(resume.name.partition("-")[2])
    for _ in range(step // 4, 2):
        rest = accelerator.skip_first_batches(loader, step % 4) if step % 4 else loader
        for x, y in rest:
            if step == 2 and saves:  # before the step, with its batch drawn
                accelerator.save_state(folder / "early")
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step in (3, 4) and saves:
                accelerator.save_state(folder / f"checkpoint-{step}")
        if averages:
            average.update(model)
    accelerator.wait_for_everyone()
    if saves:
        accelerator.save_model(model, folder / "model")
        whole = accelerator.get_state_dict(model)
        if averages:
            average.set(model)
        if accelerator.is_main_process and averages:
            torch.save(average.module.state_dict(), folder / "average.pt")
    if accelerator.is_main_process and accelerator.distributed_type == "FSDP" and accelerator.plan.level is None:
        state = accelerator.unwrap_model(model).state_dict()
        save({"model": state}, folder / "state.pt")
        save_file({f"net.{name}": shard for name, shard in state.items()}, folder / "part.safetensors")
        taken = [torch.load(folder / "state.pt")["model"], load_file(folder / "part.safetensors")]
        assert all(torch.equal(taken[0][name], whole[name]) for name in whole)
        assert all(torch.equal(taken[1][f"net.{name}"], whole[name]) for name in whole)
    accelerator.end_training()
    if accelerator.is_main_process and accelerator.distributed_type == "FSDP" and accelerator.plan.level is None:
        save(accelerator.unwrap_model(model).state_dict(), folder / "after.pt")  # as sd-scripts' trainings do
        taken = torch.load(folder / "after.pt"), accelerator.get_state_dict(model)
        assert all(
            torch.equal(taken[0][name], whole[name]) and torch.equal(taken[1][name], whole[name]) for name in whole
        )


def run(config, folder, *args, before=None):
    ranks = Ranks(config, ["--output_dir", str(folder)], script=partial(script, *args), before=before)
    codes = ranks.wait()
    assert set(codes) == {0}, ranks.text()
    return ranks.text()


def tensors(folder):
    """{file: {name: tensor}} of all that was written."""
    found = {str(path.relative_to(folder)): load_file(path) for path in folder.rglob("*.safetensors")}
    return found | {path.name: torch.load(path) for path in folder.glob("average.pt")}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for file, each in a.items():
        assert each.keys() == b[file].keys()
        assert not [n for n in each if not torch.allclose(each[n], b[file][n], 0, 0, equal_nan=True)], file


@pytest.mark.parametrize(
    "config",
    [
        "fsdp_bf16",
        *(
            pytest.param(config, marks=[pytest.mark.slow, pytest.mark.ci])
            for config in ("fsdp_fp8", "zero2_bf16", "zero3_bf16", "ddp_fp8_msamp_o3", "fsdp_fp8_msamp_o2")
        ),
        pytest.param("hsdp_bf16", marks=pytest.mark.slow),
    ],
)
def test_a_save_on_the_main_process_alone_is_that_of_all(tmp_path, monkeypatch, config):
    monkeypatch.setattr(alone, "saves", lambda: True)
    run(config, tmp_path / "all", True)
    log = run(config, tmp_path / "alone", False)
    assert "refused" not in log and "waiting" not in log
    whole = tensors(tmp_path / "alone")
    assert_equal(whole, tensors(tmp_path / "all") | {n: whole[n] for n in whole if n == "part.safetensors"})
    assert len(list(tmp_path.glob("alone/checkpoint-*/manifest.json"))) == 2
    for step in (3, 4):
        run(config, tmp_path / f"from{step}", False, tmp_path / "alone" / f"checkpoint-{step}")
        for name, value in tensors(tmp_path / f"from{step}")["model/model.safetensors"].items():
            assert torch.equal(value, whole["model/model.safetensors"][name]), (step, name)


def main_is_later_to_come_and_first_to_go(rank):
    """It comes to a place, and goes on to its next call, while the other process looks what it asks for."""
    name, seconds = ("serve", 0.2) if rank else ("meet", 0.1)
    method = getattr(following.Following, name)
    setattr(following.Following, name, lambda *args: time.sleep(seconds) or method(*args))


def test_a_call_by_all_is_not_made_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(alone, "saves", lambda: True)
    run("fsdp_bf16", tmp_path / "all", True)
    run("fsdp_bf16", tmp_path / "late", True, before=main_is_later_to_come_and_first_to_go)
    assert_equal(tensors(tmp_path / "all"), tensors(tmp_path / "late"))


def fails_alone():
    accelerator = Accelerator(project_dir=sys.argv[2])
    model = torch.nn.Linear(16, 16)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.randn(4, 16)).square().mean())
    optimizer.step()
    if accelerator.is_main_process:
        raise OSError("no space")
    accelerator.wait_for_everyone()


def test_where_the_main_process_fails_alone_the_others_end_without_a_word(tmp_path, monkeypatch):
    monkeypatch.setattr(alone, "saves", lambda: True)
    ranks = Ranks("fsdp_bf16", ["--output_dir", str(tmp_path / "run")], script=fails_alone)
    assert ranks.wait() == [1, 2]
    assert "OSError: no space" in ranks.text() and "frame #" not in ranks.text()


def two_accelerators():
    for name in ("first", "second"):
        accelerator = Accelerator(project_dir=Path(sys.argv[2], name))
        model, data = torch.nn.Linear(16, 16), torch.utils.data.TensorDataset(torch.randn(32, 16))
        optimizer, loader = torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(data, 4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for step, (x,) in enumerate(loader):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step % 2 and accelerator.is_main_process:
                accelerator.save_state(Path(sys.argv[2], name, f"checkpoint-{step}"))
        accelerator.free_memory()
    model = accelerator.prepare(torch.nn.Linear(16, 16))
    if accelerator.is_main_process:  # and no call of end_training after it
        save(accelerator.unwrap_model(model).state_dict(), Path(sys.argv[2], "last.pt"))


def test_the_second_accelerator_of_a_script_is_followed_too(tmp_path, monkeypatch):
    monkeypatch.setattr(alone, "saves", lambda: True)
    ranks = Ranks("fsdp_bf16", ["--output_dir", str(tmp_path / "run")], script=two_accelerators)
    assert ranks.wait() == [0, 0], ranks.text()
    for name in ("first", "second"):
        assert len(list(tmp_path.glob(f"run/{name}/checkpoint-*/rank1.safetensors"))) == 2
    assert torch.load(tmp_path / "run/last.pt")["weight"].shape == (16, 16)
