"""save_model of a model that no process holds whole: one tensor after the other, into files with an index."""

import json
import sys
import weakref

import pytest
import torch
from conftest import Ranks, train
from safetensors import safe_open
from safetensors.torch import load_file

from faithful import Accelerator
from faithful.tensors.names import local


def saves_at_its_end(rank):
    """The recipe saves its model in three ways before it ends."""
    end = Accelerator.end_training

    def save(accelerator):
        folder, [model] = accelerator.project_dir, accelerator._models
        accelerator.save_model(model, f"{folder}/small", max_shard_size="60KB")
        whole = accelerator.get_state_dict(model)
        accelerator.save_model(model, f"{folder}/one")
        if accelerator.is_main_process:
            torch.save({name: tensor.cpu() for name, tensor in whole.items()}, f"{folder}/whole.pt")
        end(accelerator)

    Accelerator.end_training = save


@pytest.mark.parametrize("config", ["fsdp_bf16", "fsdp_fp8", "fsdp_fp8_msamp_o2", "hsdp_bf16", "zero3_bf16"])
def test_the_files_hold_what_get_state_dict_returns(tmp_path, config):
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    run = train(config, tmp_path / "run", "--max_steps", 2, "--eval_steps", 0, before=saves_at_its_end)
    whole, one = torch.load(run / "whole.pt"), load_file(run / "one" / "model.safetensors")
    index = json.loads((run / "small" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 5 and index["metadata"]["total_size"] > 0
    small = {name: safe_open(run / "small" / file, "pt").get_tensor(name) for name, file in index["weight_map"].items()}
    assert whole.keys() == one.keys() == small.keys()
    for name, tensor in whole.items():
        for saved in (one[name], small[name]):
            assert saved.dtype == tensor.dtype and torch.equal(saved, tensor), name
    assert safe_open(run / "one" / "model.safetensors", "pt").metadata() == {"format": "pt"}
    assert sorted(path.name for path in (run / "one").iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_a_level_decodes_one_weight_at_a_time(tmp_path):
    """Each process decodes its shard of a weight when this is written, and drops it: not all of them at the start."""

    def counts(rank):
        from amp8 import fsdp

        values, decoded = fsdp.Sharding.values, []

        def counted(sharding):
            tensor = values(sharding)
            decoded.append(weakref.ref(tensor))
            alive = sum(each() is not None for each in decoded)
            with open(tmp_path / f"alive-{rank}", "a") as file:
                file.write(f"{alive} ")
            return tensor

        fsdp.Sharding.values = counted

    argv = ("--max_steps", 1, "--eval_steps", 0, "--save_steps", 0)
    train("fsdp_fp8_msamp_o2", tmp_path / "run", *argv, before=counts)
    for rank in (0, 1):
        alive = list(map(int, (tmp_path / f"alive-{rank}").read_text().split()))
        assert len(alive) >= 16 and max(alive) <= 2, alive


def test_a_disk_that_is_full_is_an_error_on_the_main_process_and_holds_up_no_other(tmp_path):
    def full(rank):
        from faithful.disk import tensor_files

        def fails(tensors, path, load, metadata):
            load(tensor_files.in_order(tensors)[0])
            raise OSError(28, "No space left on device")

        tensor_files.write = fails

    argv = ["--output_dir", str(tmp_path / "run"), "--max_steps", "2", "--eval_steps", "0", "--save_steps", "0"]
    ranks = Ranks("fsdp_fp32", argv, before=full)
    codes = ranks.wait(90)
    assert codes[0] == 1 and "the weights could not be written (No space left on device)" in ranks.text()
    assert not list((tmp_path / "run" / "model").iterdir())


def save_and_load():
    """What a rank runs: it loads the state of its optimizer in place of the state after another step."""
    folder = sys.argv[2]
    accelerator = Accelerator(project_dir=folder)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    inner = accelerator.strategy.torch_optimizer(optimizer)

    def step():
        accelerator.backward(model(torch.ones(4, 64, dtype=next(model.parameters()).dtype)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def held():
        states = [state[key] for state in inner.state.values() for key in sorted(state)]
        return [local(value) for value in states if torch.is_tensor(value)]

    step()
    saved, places = [tensor.clone() for tensor in held()], [tensor.data_ptr() for tensor in held() if tensor.dim()]
    accelerator.save_state(f"{folder}/checkpoint")
    step()
    assert not all(map(torch.equal, held(), saved))
    accelerator.load_state(f"{folder}/checkpoint")
    assert len(saved) >= 3 and all(map(torch.equal, held(), saved))
    assert [tensor.data_ptr() for tensor in held() if tensor.dim()] == places
    accelerator.end_training()


@pytest.mark.parametrize("config", ["single_bf16", "fsdp_bf16", "zero3_bf16"])
def test_loading_fills_the_optimizer_state_that_is_there(tmp_path, config):
    """A second copy of it in each process is what a model that barely fits has no room for."""
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    train(config, tmp_path / "run", script=save_and_load)
