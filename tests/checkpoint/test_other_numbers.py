"""A run under FSDP2 or ZeRO goes on with another number of processes than saved it."""

import json

import pytest
import torch
from conftest import ROOT, metrics, record, train
from safetensors.torch import load_file, save_file
from test_fsdp_levels import saving_what_was_loaded

from faithful.checkpoint import rows
from faithful.disk.tensor_files import TensorFile
from faithful.errors import Refused

STEPS = ("--max_steps", 6, "--save_steps", 3, "--save_total_limit", 9, "--logging_steps", 1, "--eval_steps", 0)
WHOLE = ("0:buffer/", "0:shape/")  # in each rank's file


def held(folder, ranks):
    """{place: whole tensor} of a checkpoint's models, put together from the ranks that hold them once."""
    parts = [load_file(folder / f"rank{rank}.safetensors") for rank in range(ranks)]
    return {
        key: torch.cat([part[key] for part in parts]) if tensor.dim() and not key.startswith(WHOLE) else tensor
        for key, tensor in parts[0].items()
        if key.startswith("0:")
    }


def test_a_model_with_half_the_rows_is_not_two_copies(tmp_path):
    for rank in range(2):
        save_file({"model/w": torch.arange(8.0).view(4, 2) + 8 * rank}, tmp_path / f"rank{rank}.safetensors")
    parts = [TensorFile(tmp_path / f"rank{rank}.safetensors") for rank in range(2)]
    half, all_rows = (rows.Rows(parts, lambda place, whole=whole: (1, 3, whole)) for whole in (4, 8))
    assert all_rows["model/w"][:, 0].tolist() == [2, 4, 6]
    with pytest.raises(Refused, match="is of another model: model/w has 8 rows there, 4 here"):
        half["model/w"]


CASES = [("fsdp_bf16", "vit", 2, 3), ("fsdp_fp8", "vit", 2, 4), ("fsdp_bf16", "gpt", 4, 1),
         ("fsdp_fp8_te", "gpt", 2, 4), ("zero1_bf16", "vit", 2, 3), ("zero2_bf16", "gpt", 3, 1),
         ("zero3_bf16", "vit", 2, 4), ("zero3_bf16", "gpt", 3, 2)]  # fmt: skip


@pytest.mark.parametrize(("config", "recipe", "saved_by", "ranks"), CASES)
def test_it_goes_on_from_the_same_weights_and_optimizer(tmp_path, config, recipe, saved_by, ranks):
    steps = (*STEPS, "--dataset", ROOT / "LICENSE", "--sequence_length", 32) if recipe == "gpt" else STEPS
    whole = train(config, tmp_path / "whole", *steps, name=recipe, processes=saved_by)
    before = whole / "checkpoint-3"
    argv = (*steps, "--resume_from_checkpoint", before)
    run = train(config, tmp_path / "run", *argv, name=recipe, processes=ranks, before=saving_what_was_loaded)
    log = (tmp_path / "run.log").read_text()
    assert f"{saved_by} processes saved it, {ranks} go on: from the same weights" in log
    loaded, saved = held(run / "checkpoint-1004", ranks), held(before, saved_by)
    assert loaded.keys() == saved.keys() and len(saved) > 100
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    assert record(run)["status"] == "finished" and metrics(run)[-1]["step"] == 6
    assert json.loads((run / "checkpoint-6" / "trainer_state.json").read_text())["steps"]["taken"] == 6
