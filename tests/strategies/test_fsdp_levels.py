"""MS-AMP's levels under FSDP2, through the recipes: counting, saving, resuming on other numbers of ranks, exporting."""

import functools
import json

import pytest
import torch
import yaml
from conftest import (
    CONFIGS,
    ROOT,
    assert_exported,
    distance,
    losses,
    metrics,
    record,
    refusal,
    signalled,
    train,
    weights,
)
from safetensors.torch import load_file

from faithful.checkpoint import checkpoints
from tools import export

O2 = "fsdp_fp8_msamp_o2"
STEPS = ("--max_steps", 8, "--save_steps", 4, "--logging_steps", 1, "--warmup_steps", 2)
LATEST = ("--resume_from_checkpoint", "latest")
GPT = ("--dataset", ROOT / "LICENSE", "--sequence_length", 32, "--model", "gpt_nano", *STEPS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return functools.cache(lambda config: train(config, folder / config, *STEPS))


def with_tail(folder, tail, **keys):
    """The O2 config with other keys of FSDP2."""
    config = yaml.safe_load((CONFIGS / f"{O2}.yml").read_text())
    config["fsdp_config"] |= keys
    path = folder / f"{O2}_{tail}.yml"
    path.write_text(yaml.dump(config))
    return path


def test_the_summary_line_counts_shards_bytes_and_wire(whole):
    made = record(whole(O2))
    evidence = made["evidence"]
    assert evidence["measured"].startswith(
        "fsdp x2 gloo, sharded by Block | fp8 MS-AMP O2 (amp8, not Microsoft's package)"
    )
    assert "16 of 17 Linear in FP8, skipped head" in evidence["measured"]
    assert "parameters float32 and float16, gradients float32 and float8_e4m3fn" in evidence["measured"]
    assert "6.3 B/param, 3.1 in each process" in evidence["measured"]
    inside = round(evidence["share_converted"] * evidence["parameters"])
    dtypes = evidence["dtypes"]
    assert dtypes["parameters"] == {"float16": 196608, "float32": evidence["parameters"] - 196608}
    assert inside > 196608 and dtypes["gradients"]["float8_e4m3fn"] == 196608  # the first counts biases, too
    assert dtypes["optimizer_state"]["exp_avg"]["float8_e4m3fn"] == 196608
    assert dtypes["optimizer_state"]["exp_avg_sq"]["float16"] == 196608
    assert 3.0 <= evidence["bytes_per_linear_parameter"]["total"] <= 3.3
    # gathered twice and reduced once as one byte, half of it from each of two ranks; the rest as FSDP2 does
    assert evidence["wire_bytes_per_step"] == pytest.approx(1.5 * evidence["parameters"], rel=0.06)
    fp32 = 6 * evidence["parameters"]  # test_configs.py counts as much
    assert evidence["wire_bytes_per_step"] <= 0.30 * fp32
    assert losses(whole(O2)) == pytest.approx(losses(whole("ddp_fp8_msamp_o2")), rel=0.01)


def test_stopped_and_resumed_it_is_the_same_run_and_exports_its_weights(whole, tmp_path):
    run = whole(O2)
    again = train(O2, tmp_path / "again", *STEPS, "--save_steps", 0, before=signalled(5, 1), code=143)
    assert record(again)["status"] == "preempted"
    assert [path.name for path in checkpoints.list_checkpoints(again)] == ["checkpoint-5"]
    train(O2, again, *STEPS, *LATEST)
    assert metrics(again) == metrics(run) and distance(again, run) == 0
    assert_exported(again, 8, 2)
    parts = [load_file(run / "checkpoint-8" / f"rank{rank}.safetensors") for rank in (0, 1)]
    name = "0:rows/model/blocks.0.mlp.fc1.weight"
    assert [part[name].shape for part in parts] == [torch.Size([128, 64])] * 2
    assert not parts[0][name].equal(parts[1][name])


def saving_what_was_loaded(rank):
    """Called before the run: writes a checkpoint right after one was loaded."""
    from faithful import Accelerator

    load = Accelerator.load_state

    def patched(self, folder=None):
        load(self, folder)
        self.save_state(f"{self.project_dir}/checkpoint-1004")

    Accelerator.load_state = patched


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_goes_on_with_another_number_of_processes(whole, tmp_path, ranks):
    before = whole(O2) / "checkpoint-4"
    argv = (*STEPS, "--per_device_train_batch_size", 32, "--resume_from_checkpoint", before)
    run = train(O2, tmp_path / "run", *argv, processes=ranks, before=saving_what_was_loaded)
    log = (tmp_path / "run.log").read_text()
    assert f"2 processes saved it, {ranks} go on" in log and log.count("go on: from") == 1
    sides = []
    for folder, count in ((before, 2), (run / "checkpoint-1004", ranks)):
        parts = [load_file(folder / f"rank{rank}.safetensors") for rank in range(count)]
        found = {}
        for key, tensor in parts[0].items():
            if key.startswith("0:rows/"):
                found[key] = torch.cat([part[key].float() for part in parts])
            elif key.startswith("0:all/") and key != "0:all/world":
                found[key] = tensor
        sides.append(found)
    assert sides[0].keys() == sides[1].keys() and len(sides[0]) > 200
    assert all(sides[0][key].equal(sides[1][key]) for key in sides[0])
    states = [json.loads((folder / "trainer_state.json").read_text()) for folder in (before, run / "checkpoint-1004")]
    assert states[0]["groups"] == states[1]["groups"] and states[0]["steps"] == states[1]["steps"]
    made = record(run)
    assert made["status"] == "finished" and made["final"]["step"] == 8
    assert made["evidence"]["sharded"] is (ranks > 1)
    assert losses(run) == pytest.approx(losses(whole(O2))[4:], rel=0.05)


def test_checkpointed_and_kept_blocks_change_no_number(whole, tmp_path):
    checkpointed = with_tail(tmp_path, "ckpt", fsdp_activation_checkpointing=True)
    run = train(checkpointed, tmp_path / "ckpt", *STEPS)
    assert metrics(run) == metrics(whole(O2)) and distance(run, whole(O2)) == 0
    assert "activations computed again" in record(run)["evidence"]["measured"]
    own, other = (load_file(each / "checkpoint-8" / "rank1.safetensors") for each in (run, whole(O2)))
    assert own.keys() == other.keys(), "a checkpoint has the names of the model without wrappers"
    kept = train(with_tail(tmp_path, "noreshard", fsdp_reshard_after_forward=False), tmp_path / "kept", *STEPS)
    assert metrics(kept) == metrics(whole(O2))
    saved = record(whole(O2))["evidence"]["wire_bytes_per_step"] - record(kept)["evidence"]["wire_bytes_per_step"]
    assert saved >= 196608 / 2  # what is gathered once, not twice


@pytest.mark.slow
def test_frozen_and_tied_weights(tmp_path):
    """Frozen and tied weights work: GPT-2, whose head is its embedding and whose layers are transformers' Conv1D, with
    the first block frozen."""
    run = train(O2, tmp_path / "run", *GPT, "--freeze", 1, name="gpt")
    made = record(run)["evidence"]
    assert "lm_head" in made["measured"] and made["linear_converted"] == made["linear_total"] - 1
    frozen = [name for name in weights(run) if ".h.0." in name]
    first, last = (export_of(run, step, tmp_path) for step in (4, 8))
    assert frozen and all(first[name].equal(last[name]) for name in frozen)
    assert not first["transformer.h.1.mlp.c_fc.weight"].equal(last["transformer.h.1.mlp.c_fc.weight"])
    again = train(
        O2, tmp_path / "again", *GPT, "--freeze", 1, "--resume_from_checkpoint", run / "checkpoint-4", name="gpt"
    )
    assert metrics(again) == metrics(run)[-len(metrics(again)) :] and distance(again, run) == 0


def export_of(run, step, folder):
    export.export(run, folder / f"{step}.safetensors", step=step)
    return load_file(folder / f"{step}.safetensors")


def test_another_optimizer_is_refused_in_one_line(tmp_path):
    log = refusal(O2, tmp_path / "run", *STEPS, "--optimizer", "sgd")
    assert "refused: " in log and "record: " not in log, "a folder is named when it is there"
    assert not (tmp_path / "run").exists()
    log = (tmp_path / "run.log").read_text()
    assert "asked for fp8: amp8 needs torch.optim.AdamW or Adam itself, not SGD" in log
