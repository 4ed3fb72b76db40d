"""The recipes on a pretended GPU (tests/pretend.py): the plan a Hopper card gets, its branches executed with values.

A run takes four optimizer steps with two checkpoints and an evaluation. A second one goes on from the first checkpoint,
and its losses, norms and metrics must be those of the first, bit for bit. Whatever the device refuses fails both.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import CONFIGS, ROOT, distance, metrics, record, train, weights
from safetensors.torch import load_file
from test_te import TE_FILES, needs_te

from shared import vision

SHORT = ("--max_steps", 4, "--logging_steps", 2, "--save_steps", 2, "--eval_steps", 0, "--warmup_steps", 2,
         "--per_device_train_batch_size", 16, "--per_device_eval_batch_size", 360, "--save_total_limit", 9)  # fmt: skip
MSAMP = "(amp8, not Microsoft's package) | 16 of 17 Linear in FP8"
FP4 = "(amp8, not Microsoft's package) with FP4 forward products emulated in bf16 | 16 of 17 Linear in FP4"
TRUTH = {  # config -> how its summary line begins
    "single_bf16": "single | bf16 compute |",
    "single_fp8": "single | fp8 torchao tensorwise | 15 of 17 Linear in FP8",
    "single_fp8_msamp_o2": f"single | fp8 MS-AMP O2 {MSAMP}",
    "ddp_fp8_msamp_o3": f"ddp x2 nccl | fp8 MS-AMP O3 {MSAMP}",
    "fsdp_fp8": "fsdp x2 nccl, sharded by Block | fp8 torchao tensorwise | 15 of 17 Linear in FP8",
    "fsdp_fp8_msamp_o2": f"fsdp x2 nccl, sharded by Block | fp8 MS-AMP O2 {MSAMP}",
}
MORE = {
    "single_fp32": "single | fp32 (IEEE, no TF32) |",
    "single_fp16": "single | fp16 compute, gradient scaler |",
    "single_fp8_ao_rowwise": "single | fp8 torchao rowwise | 15 of 17 Linear in FP8",
    "single_fp8_ao_rowwise_with_gw_hp": "single | fp8 torchao rowwise_with_gw_hp | 15 of 17 Linear in FP8",
    "single_fp8_msamp_o1": f"single | fp8 MS-AMP O1 {MSAMP}",
    "single_fp8_msamp_o3": f"single | fp8 MS-AMP O3 {MSAMP}",
    "single_bf16_compile": "single | bf16 compute, compiled |",
    "single_fp8_compile": "single | fp8 torchao tensorwise | 15 of 17 Linear in FP8",
    "single_fp8_msamp_o2_compile": f"single | fp8 MS-AMP O2 {MSAMP}",
    "single_fp8_ao_rowwise_compile": "single | fp8 torchao rowwise | 15 of 17 Linear in FP8",
    "ddp_fp32": "ddp x2 nccl | fp32 (IEEE, no TF32) |",
    "ddp_bf16": "ddp x2 nccl | bf16 compute |",
    "ddp_fp16": "ddp x2 nccl | fp16 compute, gradient scaler |",
    "ddp_fp8": "ddp x2 nccl | fp8 torchao tensorwise | 15 of 17 Linear in FP8",
    "ddp_fp8_ao_rowwise": "ddp x2 nccl | fp8 torchao rowwise | 15 of 17 Linear in FP8",
    "ddp_fp8_compile": "ddp x2 nccl | fp8 torchao tensorwise | 15 of 17 Linear in FP8",
    "ddp_fp8_msamp_o1": f"ddp x2 nccl | fp8 MS-AMP O1 {MSAMP}",
    "ddp_fp8_msamp_o2": f"ddp x2 nccl | fp8 MS-AMP O2 {MSAMP}",
    "ddp_fp8_msamp_o2_compile": f"ddp x2 nccl | fp8 MS-AMP O2 {MSAMP}",
    "ddp_fp8_msamp_o2_te": "ddp x2 nccl | fp8 MS-AMP O2 (amp8, not Microsoft's package) with TE's delayed scaling | 16 of",
    "single_fp8_msamp_o2_fp4": f"single | fp8 MS-AMP O2 {FP4}",
    "ddp_fp8_msamp_o2_fp4": f"ddp x2 nccl | fp8 MS-AMP O2 {FP4}",
    "fsdp_fp8_msamp_o2_fp4": f"fsdp x2 nccl, sharded by Block | fp8 MS-AMP O2 {FP4}",
    "fsdp_fp32": "fsdp x2 nccl, sharded by Block | fp32 (IEEE, no TF32) |",
    "fsdp_bf16": "fsdp x2 nccl, sharded by Block | bf16 compute |",
    "fsdp_fp16": "fsdp x2 nccl, sharded by Block | fp16 compute, gradient scaler |",
    "fsdp_bf16_ckpt": "fsdp x2 nccl, sharded by Block | bf16 compute, activations computed again |",
    "fsdp_bf16_noreshard": "fsdp x2 nccl, sharded by Block | bf16 compute",
    "fsdp_bf16_offload": "fsdp x2 cuda:nccl,cpu:gloo, sharded by Block | bf16 compute, offloaded to the host |",
    "fsdp_fp8_compile": "fsdp x2 nccl, sharded by Block | fp8 torchao tensorwise | 15 of 17 Linear in FP8",
    "fsdp_fp8_msamp_o1": f"fsdp x2 nccl, sharded by Block | fp8 MS-AMP O1 {MSAMP}",
    "fsdp_fp8_msamp_o2_compile": f"fsdp x2 nccl, sharded by Block | fp8 MS-AMP O2 {MSAMP}",
    "hsdp_bf16": "hsdp x4 nccl, sharded by Block | bf16 compute |",
    "hsdp_fp8_msamp_o2": f"hsdp x4 nccl, sharded by Block | fp8 MS-AMP O2 {MSAMP}",
    "single_fp8_ao_mxfp8": "single | fp8 torchao mxfp8 | 15 of 17 Linear in FP8",
    "ddp_fp8_ao_mxfp8": "ddp x2 nccl | fp8 torchao mxfp8 | 15 of 17 Linear in FP8",
    "fsdp_fp8_ao_mxfp8": "fsdp x2 nccl, sharded by Block | fp8 torchao mxfp8 | 15 of 17 Linear in FP8",
    "fsdp_fp8_ao_rowwise": "fsdp x2 nccl, sharded by Block | fp8 torchao rowwise | 15 of 17 Linear in FP8",
    "zero1_bf16": "zero1 x2 nccl, 50% of the optimizer state each | bf16 compute |",
    "zero2_bf16": "zero2 x2 nccl, 50% of the optimizer state each | bf16 compute |",
    "zero3_bf16": "zero3 x2 nccl, 50% of the optimizer state each | bf16 compute |",
    "zero3_bf16_offload": "zero3 x2 nccl, 50% of the optimizer state each | bf16 compute, offloaded to the host |",
    "zero1_fp16": "zero1 x2 nccl, 50% of the optimizer state each | fp16 compute, gradient scaler |",
    "zero2_fp16": "zero2 x2 nccl, 50% of the optimizer state each | fp16 compute, gradient scaler |",
    "zero3_fp16": "zero3 x2 nccl, 50% of the optimizer state each | fp16 compute, gradient scaler |",
    "zero2_fp8": "zero2 x2 nccl, 50% of the optimizer state each | fp8 torchao tensorwise |",
    "zero3_fp8": "zero3 x2 nccl, 50% of the optimizer state each | fp8 torchao tensorwise |",
}


def most_waits(config):
    """How often the host may wait for the device in an optimizer step. Once, for the losses and the norm, where there
    is a gradient scaler. DeepSpeed's engine waits by itself, and for each parameter on the
    host; FSDP2 waits for each gradient that it sends there."""
    if Path(config).stem.endswith("offload"):
        return 70
    return 9 if config.startswith("zero") else int("fp16" in Path(config).stem)


def processes(config):
    return {} if config.startswith("single") else {"processes": 4 if config.startswith(("hsdp", "fsdp_tp")) else 2}


B200_HERE = {"capability": (10, 0), "name": "NVIDIA B200 (pretended)"}


def card(config):
    """Of a config of torchao's: what else a job says, and the card's name."""
    if not config.endswith("ao_mxfp8"):
        return {}, "NVIDIA H100 (pretended)"
    return {"wear": B200_HERE, "imports": ["fake_mx"]}, B200_HERE["name"]


def waits(run, rank=0):
    """Where the host waited for the device from the third optimizer step, which is neither logged nor saved, to the fourth."""
    found = json.loads(Path(f"{run}.rank{rank}.json").read_text())[3]["waits"]
    return [wait for wait in found if not str(wait[1]).startswith("tests/")]  # fake_tex.py's, in the place of a kernel


def resumed(gpu, config, folder, *argv, **job):
    """A run, and one that goes on from its middle. Returns the first one's folder."""
    whole = gpu.train(config, folder / "whole", *SHORT, *argv, **job)
    part = gpu.train(config, folder / "part", *SHORT, *argv, "--resume_from_checkpoint", whole / "checkpoint-2", **job)
    rows = [row for row in metrics(whole) if row["step"] > 2]
    assert len(rows) == 2 and metrics(part) == rows and distance(whole, part) == 0
    for rank in range(record(whole)["plan"]["num_processes"]):
        assert len(waits(whole, rank)) <= most_waits(config), waits(whole, rank)
    return whole


@pytest.mark.parametrize("config", [*TRUTH, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_vit(gpu, config, tmp_path):
    job, name = card(config)
    run = resumed(gpu, config, tmp_path, **processes(config), **job)
    made = record(run)
    assert made["status"] == "finished" and made["device_name"] == name
    assert made["plan"]["device"] == "cuda" and not made["plan"]["rehearsal"] and not made["plan"]["emulated"]
    assert made["evidence"]["measured"].startswith((TRUTH | MORE)[config])
    assert made["final"]["metrics"]["eval_loss"] < 2.29  # ten classes by chance: 2.303
    traced = [kind for step in json.loads(Path(f"{run}.rank0.json").read_text()) for kind in step["traced"]]
    assert traced == ["Block"] * config.endswith("compile"), "the blocks, by torch's own compiler, in one graph"


GPT = ("--dataset", ROOT / "LICENSE", "--sequence_length", 32)
GPT_CONFIGS = ("single_bf16", "single_fp16", "single_fp8", "single_fp8_msamp_o1", "single_fp8_msamp_o2",
               "single_fp8_msamp_o3", "ddp_bf16", "ddp_fp8", "ddp_fp8_msamp_o2", "ddp_fp8_msamp_o3", "fsdp_bf16",
               "fsdp_fp8", "fsdp_fp8_msamp_o2", "tp_bf16", "tp_fp16", "tp_fp8", "fsdp_tp_bf16",
               "fsdp_tp_fp8", "zero3_sp_bf16", "zero3_sp_fp8")  # fmt: skip


def test_every_config_is_run_here():
    """Those of TransformerEngine are in TE_FILES, and no card trains MXFP4."""
    configs = {path.stem for path in CONFIGS.glob("*.yml") if "_fp8_te" not in path.stem}
    assert configs == {*TRUTH, *MORE, *GPT_CONFIGS, "single_fp8_ao_mxfp4"}


@pytest.mark.slow
@pytest.mark.parametrize("config", GPT_CONFIGS)
def test_gpt(gpu, config, tmp_path):
    run = resumed(gpu, config, tmp_path, *GPT, name="gpt", **processes(config))
    assert record(run)["final"]["loss"] < 5.2  # 256 bytes by chance: 5.545


def test_a_trainer_under_a_single_config_takes_one_card_of_eight(gpu, tmp_path):
    """transformers' Trainer puts the model into nn.DataParallel over all cards that it sees. Here it sees one."""
    pytest.importorskip("transformers")
    script = str(ROOT / "tests" / "clients" / "causal.py")
    (tmp_path / "out").mkdir()
    run = tmp_path / "run"
    gpu.train("single_bf16", tmp_path / "out", script=script, env={"FAITHFUL_PROJECT_DIR": str(run)}, wear={"count": 8})
    assert record(run)["status"] == "finished" and record(run)["plan"]["device"] == "cuda"
    assert record(run)["evidence"]["measured"].startswith("single | bf16 compute |")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "embed", "diffusion", "sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_no_step_of_a_recipe_waits(gpu, tmp_path, name):
    """`test_vit` and `test_gpt` see it of theirs."""
    longer = ("--sequence_length", 64) if name != "diffusion" else ()
    run = gpu.train("single_bf16", tmp_path / "run", *SHORT, *longer, "--save_steps", 0, name=name)
    assert waits(run) == []


@pytest.mark.parametrize(
    "name", ["vit", "gpt", "bert", pytest.param("embed", marks=pytest.mark.slow), "diffusion", "sft"]
)
def test_a_device_needs_no_fp64(gpu, tmp_path, name):
    """MPS has none: nothing of a run, its evaluation included, makes such a tensor on the device. (This one has no
    batch normalisation, as resnet needs it.)"""
    argv = (*SHORT, "--max_steps", 2, *(GPT if name == "gpt" else ()))
    if name in ("bert", "embed", "sft", "dpo"):
        argv = (*argv, "--sequence_length", 64)
    run = gpu.train("single_fp32", tmp_path / "run", *argv, name=name, wear={"fp64": False})
    assert record(run)["final"]["metrics"]["eval_loss"] > 0


def test_a_card_that_does_not_count_its_utilization(gpu, tmp_path):
    """NVML raises an error of its own for a slice of a card; one that counts is recorded."""
    short = (*SHORT, "--max_steps", 1, "--save_steps", 0)
    counted = gpu.train("single_fp32", tmp_path / "card", *short, wear={"utilization": 50})
    assert record(counted)["gpu_utilization_mean"] == 50
    assert record(gpu.train("single_fp32", tmp_path / "slice", *short))["gpu_utilization_mean"] is None


def test_an_evaluated_batch_waits_once_and_for_the_batch_before(gpu, tmp_path):
    argv = (
        *SHORT,
        "--save_steps",
        0,
        "--max_steps",
        2,
        "--per_device_eval_batch_size",
        36,
    )  # five batches for each rank
    run = gpu.train("ddp_bf16", tmp_path / "run", *argv, processes=2)
    found = json.loads(Path(f"{run}.rank1.json").read_text())[-1]["waits"]
    assert len([place for _, place in found if str(place).startswith("faithful/training/steps.py")]) <= 4, found


def test_workers_that_load_data_add_no_wait(gpu, tmp_path):
    """A DataLoader with workers pins its batches in a thread of its own; the run is the same, and so are its waits."""
    argv = (*SHORT, "--max_steps", 3, "--save_steps", 0, "--dataset", "synthetic", "--image_size", 32)
    run = gpu.train("single_bf16", tmp_path / "run", *argv, "--dataloader_num_workers", 1)
    without = gpu.train("single_bf16", tmp_path / "without", *argv)
    assert metrics(run) == metrics(without) and waits(run) == waits(without)


def test_tensor_parallel_steps_lists_of_parameters(gpu, tmp_path):
    """DTensors and tensors each in lists, by a fused kernel: tensor by tensor each takes launches of its own."""
    run = gpu.train("tp_bf16", tmp_path / "run", *SHORT, *GPT, "--save_steps", 0, name="gpt", processes=2)
    single = gpu.train("single_bf16", tmp_path / "single", *SHORT, *GPT, "--save_steps", 0, name="gpt")
    taken, other = (json.loads(Path(f"{one}.rank0.json").read_text())[3]["launches"] for one in (run, single))
    assert taken < 1.1 * other, (taken, other)  # tensor by tensor: 1.36


TF32 = """
import sys
import torch
from accelerate import Accelerator
torch.set_float32_matmul_precision(sys.argv[3])
before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Conv1d(2, 2, 1), torch.nn.Linear(4, 4))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 2, 4, device=accelerator.device)).sum())
print("during", torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
optimizer.step()
accelerator.end_training()
assert before == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
"""


@pytest.mark.parametrize(
    ("asked", "is_tf32", "named"),
    [("highest", False, "fp32 (IEEE, no TF32)"), ("high", True, "fp32 (TF32 in products and convolutions)")],
)
def test_fp32_is_one_format_in_products_and_convolutions(gpu, tmp_path, asked, is_tf32, named):
    """torch's own default is IEEE's fp32 in products, and TF32, with 10 bits of mantissa, in convolutions."""
    (tmp_path / "mine.py").write_text(TF32)
    env = {"FAITHFUL_PROJECT_DIR": str(tmp_path / "run")}
    codes, said = gpu.run("single_fp32", tmp_path / "out", asked, script=str(tmp_path / "mine.py"), env=env)
    assert codes == [0] and f"during {is_tf32} {is_tf32}" in said, said
    assert record(tmp_path / "run")["evidence"]["measured"].startswith(f"single | {named} |")


def test_fp16_counts_the_steps_that_were_taken(gpu, tmp_path):
    """A fused optimizer skips an overflowed step inside its kernel: it is no step of ours, nor of the schedule."""
    shrinking = ("--grad_scaler", "init_scale=1e30,backoff_factor=0.0001", "--max_steps", 3)
    here = gpu.train("single_fp16", tmp_path / "gpu", *SHORT, *shrinking)
    rehearsed = train("single_fp16", tmp_path / "cpu", *SHORT, *shrinking)
    for made, other in zip(metrics(here), metrics(rehearsed), strict=True):
        assert made["step"] == other["step"] and made.get("learning_rate") == other.get("learning_rate")
    tried, other = (
        json.loads((run / "checkpoint-2" / "trainer_state.json").read_text())["steps"]["tried"]
        for run in (here, rehearsed)
    )
    assert tried == other > 2 and metrics(here)[1]["loss"] < 2.303  # ten classes by chance


def test_levels_on_a_card_without_fp8(gpu, tmp_path):
    """An A100: MS-AMP's levels multiply in bf16 there, and say so."""
    a100 = {"capability": (8, 0), "name": "NVIDIA A100 (pretended)"}
    run = gpu.train("single_fp8_msamp_o2", tmp_path / "run", *SHORT, "--max_steps", 1, wear=a100)
    assert "emulated: no FP8 hardware" in record(run)["evidence"]["measured"]


AMD = {"capability": (9, 4), "name": "AMD Instinct MI300X (pretended)", "hip": "7.0"}


@pytest.mark.parametrize("config", ["single_fp8", "single_fp8_te", "single_fp8_msamp_o2"])
def test_fp8_is_refused_on_a_card_that_is_not_of_nvidia(gpu, tmp_path, config):
    """torch calls it cuda, and its capability is above an H100's."""
    codes, text = gpu.run(config, tmp_path / "run", *SHORT, wear=AMD)
    assert codes == [2] and len(text.splitlines()) == 1 and "MI300X" in text, (codes, text)


def test_bf16_trains_on_a_card_that_is_not_of_nvidia(gpu, tmp_path):
    run = gpu.train("single_bf16", tmp_path / "run", *SHORT, "--max_steps", 1, wear=AMD)
    assert record(run)["device_name"] == AMD["name"]


TE_CASES = [
    pytest.param(path.stem, marks=() if path.stem == "single_fp8_te" else pytest.mark.slow) for path in TE_FILES
]


@needs_te
@pytest.mark.parametrize("config", TE_CASES)
def test_every_file_trains_and_goes_on(gpu, config, tmp_path):
    """The recipe from end to end; the second half, from its checkpoint, bit for bit. A checkpoint holds no pickle.

    Delayed scaling's scales are in it, once: amaxes are the largest of all processes. Other recipes have no state.
    """
    job = processes(config) | ({"wear": B200_HERE} if config.endswith(("mxfp8", "nvfp4")) else {})
    run = resumed(gpu, config, tmp_path, imports=["fake_tex"], **job)
    evidence, plan = record(run)["evidence"], record(run)["plan"]
    fp4 = plan["level"] == "nvfp4"  # whose file leaves the last 15% of 17 in bf16
    assert (evidence["linear_converted"], evidence["layernorm_converted"]) == (14 if fp4 else 16, 9)
    assert evidence["optimizer_owns_all"] and evidence["eval_precision"] == "bf16"
    assert evidence["sharded"] == (plan["strategy"] not in ("single", "ddp"))
    converted = "14 of 17 Linear in FP4" if fp4 else "16 of 17 Linear in FP8"
    truth = f"fp8 TransformerEngine {plan['level']} | {converted}, 9 LayerNorm, skipped head (10 is not a"
    assert truth in evidence["measured"] and record(run)["final"]["metrics"]["eval_loss"] < 2.29  # by chance: 2.303
    assert weights(run).keys() == vision.vit("vit_nano", 8, 1, 10).state_dict().keys()
    held = load_file(run / "checkpoint-2" / "rank0.safetensors")
    scales = {name: tensor for name, tensor in held.items() if name.startswith("0:te/")}
    assert len(scales) == (4 * 16 if plan["level"] == "delayed" else 0)
    assert not any("extra_state" in name for name in held)
    if scales:
        assert (scales["0:te/blocks.0.attn.qkv.scaling_fwd.scale"][:2] != 1).all()
    if plan["strategy"] == "ddp":
        other = load_file(run / "checkpoint-2" / "rank1.safetensors")  # nothing of the model
        assert all(name.startswith(("random/", "loader/")) for name in other)


@needs_te
@pytest.mark.slow
def test_whole_blocks_train_and_go_on(gpu, tmp_path):
    run = resumed(gpu, "single_fp8_te", tmp_path, "--te_blocks", imports=["fake_tex"])
    evidence = record(run)["evidence"]
    assert (evidence["linear_converted"], evidence["layernorm_converted"]) == (16, 9)
    assert record(run)["final"]["metrics"]["eval_loss"] < 2.29
    held = load_file(run / "checkpoint-2" / "rank0.safetensors")
    # four tensors each of attention's two Linear and of the MLP, and of attention itself, which has none in use
    assert len([name for name in held if name.startswith("0:te/")]) == 4 * 4 * 4


@needs_te
@pytest.mark.slow
def test_whole_blocks_name_a_batch_that_they_cannot_take(gpu, tmp_path):
    batch = ("--per_device_train_batch_size", 9)  # of four tokens each
    job = {"imports": ["fake_tex"]}
    codes, said = gpu.run("single_fp8_te", tmp_path / "run", *SHORT, *batch, "--te_blocks", **job)
    assert codes == [2] and "refused: TransformerEngine's blocks take samples x tokens in multiples of 16" in said


@needs_te
@pytest.mark.slow
def test_fsdp_offloaded_to_the_host(gpu, tmp_path):
    mapping = yaml.safe_load((CONFIGS / "fsdp_fp8_te.yml").read_text())
    mapping["fsdp_config"]["fsdp_offload_params"] = True
    path = tmp_path / "fsdp_fp8_te_offload.yml"
    path.write_text(yaml.dump(mapping))
    run = resumed(gpu, str(path), tmp_path, imports=["fake_tex"], processes=2)
    assert "offloaded to the host" in record(run)["evidence"]["measured"]


@pytest.mark.slow
def test_fsdp_with_tensor_parallel_offloaded_to_the_host(gpu, tmp_path):
    mapping = yaml.safe_load((CONFIGS / "fsdp_tp_bf16.yml").read_text())
    mapping["fsdp_config"]["fsdp_offload_params"] = True
    path = tmp_path / "fsdp_tp_bf16_offload.yml"
    path.write_text(yaml.dump(mapping))
    run = resumed(gpu, str(path), tmp_path, *GPT, name="gpt", processes=4)
    assert "offloaded to the host" in record(run)["evidence"]["measured"]
    kept = gpu.train("fsdp_tp_bf16", tmp_path / "kept", *SHORT, *GPT, "--save_steps", 0, name="gpt", processes=4)
    assert metrics(run) == metrics(kept) and distance(run, kept) == 0


@needs_te
@pytest.mark.slow
def test_fsdp_with_activations_computed_again(gpu, tmp_path):
    """Activation checkpointing under FSDP2 gives the same run bit for bit, resumed too. The last LayerNorm, which FSDP2
    shards by itself, is counted."""
    mapping = yaml.safe_load((CONFIGS / "fsdp_fp8_te.yml").read_text())
    mapping["fsdp_config"]["fsdp_activation_checkpointing"] = True
    path = tmp_path / "fsdp_fp8_te_ckpt.yml"
    path.write_text(yaml.dump(mapping))
    job = {"imports": ["fake_tex"], "processes": 2}
    again = resumed(gpu, str(path), tmp_path, **job)
    kept = gpu.train("fsdp_fp8_te", tmp_path / "kept", *SHORT, **job)
    assert metrics(again) == metrics(kept)
    for run in (again, kept):
        evidence = record(run)["evidence"]
        assert (evidence["linear_converted"], evidence["layernorm_converted"]) == (16, 9) and evidence["sharded"]
    assert "activations computed again" in record(again)["evidence"]["measured"]


@needs_te
def test_the_rehearsal_does_as_the_card(gpu, tmp_path):
    """The rehearsal computes what the pretended card computes, with a number of rows that is no multiple of 8 (10
    images of 5 tokens) and scales updated at each of two micro-batches."""
    argv = ("--model", "vit_tiny", "--per_device_train_batch_size", 10, "--gradient_accumulation_steps", 2,
            "--max_steps", 2, "--warmup_steps", 0, "--eval_steps", 0, "--save_steps", 2)  # fmt: skip
    card = gpu.train("single_fp8_te", tmp_path / "card", *argv, imports=["fake_tex"])
    rehearsal = train("single_fp8_te", tmp_path / "rehearsal", *argv)
    assert record(card)["evidence"]["linear_converted"] == record(rehearsal)["evidence"]["linear_converted"] == 48
    theirs, mine = (load_file(run / "checkpoint-2" / "rank0.safetensors") for run in (card, rehearsal))
    layer = "blocks.11.mlp.fc2"  # the head begins with zeros, so the first step has no gradient here
    amaxes = [
        theirs[f"0:te/{layer}.scaling_fwd.amax_history"][:, :2],
        theirs[f"0:te/{layer}.scaling_bwd.amax_history"][:, :1],
    ]
    theirs, mine = torch.cat(amaxes, 1), mine[f"0:buffer/{layer}.fp8_amax_history"]
    assert (theirs != 0).sum(0).tolist() == (mine != 0).sum(0).tolist() == [4, 4, 2]  # of input, weight, gradient
    assert torch.equal(theirs[-4:-2, 1], mine[-4:-2, 1])  # of the first weights


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_an_mx_rehearsal_does_as_the_card(gpu, tmp_path, rule):
    """By the kernels' own layout of scales, for a number of rows (10 images of 5 tokens) that is no multiple of 32."""
    file = tmp_path / "mine.yml"
    file.write_text((CONFIGS / "single_fp8_ao_mxfp8.yml").read_text() + f"  scale_calculation_mode: {rule}\n")
    argv = ("--model", "vit_tiny", "--per_device_train_batch_size", 10, "--max_steps", 2, "--warmup_steps", 0,
            "--eval_steps", 0, "--save_steps", 0, "--logging_steps", 1)  # fmt: skip
    card_s = gpu.train(str(file), tmp_path / "card", *argv, wear=B200_HERE, imports=["fake_mx"])
    rehearsal = train(str(file), tmp_path / "rehearsal", *argv)
    assert record(card_s)["evidence"]["linear_converted"] == record(rehearsal)["evidence"]["linear_converted"] == 47
    theirs, mine = metrics(card_s)[:2], metrics(rehearsal)[:2]
    for key, order_of_a_sum in (("loss", 1e-5), ("grad_norm", 1e-3)):  # the other rule's: 1e-3 and more
        assert [row[key] for row in theirs] == pytest.approx([row[key] for row in mine], rel=order_of_a_sum)


def test_zero_s_own_scale_takes_no_other_factor(gpu, tmp_path):
    codes, said = gpu.run("zero2_fp16", tmp_path / "run", *SHORT, "--grad_scaler", "growth_factor=3", processes=2)
    assert 2 in codes and 0 not in codes, (codes, said)  # the second may still wait for the first, which has ended
    assert "refused: the gradient scaler under ZeRO: DeepSpeed's scale is a power of 2" in said


LOST = {  # what NCCL and torch's watchdog say (texts of torch's library) -> the line a user reads
    "NCCL error: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.": "error: another process of this run ended",
    "NCCL communicator was aborted on rank 0.": "error: another process of this run ended",
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)": "error: no answer from another process",
}


@pytest.mark.slow
@pytest.mark.parametrize("said", LOST)
def test_a_lost_process_is_one_line_and_a_record(gpu, said, tmp_path):
    """As far as NCCL raises it. A process that its watchdog aborts says nothing more, and its record stays `running`."""
    out = tmp_path / "run"
    codes, text = gpu.run("ddp_bf16", out, *SHORT, processes=2, wear={"lost": said})
    assert codes == [1, 1] and "Traceback" not in text
    assert [line for line in text.splitlines() if line.startswith("error")][0].startswith(LOST[said])
    assert record(out)["status"] == "failed" and record(out)["error"].startswith(LOST[said].removeprefix("error: "))


@pytest.mark.slow
def test_levels_with_accumulation(gpu, tmp_path):
    gpu.train("ddp_fp8_msamp_o3", tmp_path / "run", *SHORT, "--gradient_accumulation_steps", 2, processes=2)


# What the device refuses. Each program is one that a GPU would not run, or not run right, and that a CPU runs.

HEAD = """
import sys
sys.path.insert(0, sys.argv[1])
import pretend, os, torch, torch.distributed as dist
from amp8.scaling import product as of_amp8
from torch.optim.adam import adam as torch_adam
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
for CASES, card in %r:  # a process for each card
    if not os.fork():
        break
    os.wait()
else:
    os._exit(0)
pretend.wear(**card)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
here = dict(device="cuda")
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
one = torch.ones((), **here)
def fp8(rows, columns, dtype=E4M3):
    return torch.randn(rows, columns, **here).to(dtype)
def product(a, b, scale_a=one, scale_b=one, **more):
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, **({"out_dtype": torch.bfloat16} | more))
def adam(step_device):
    weight, grad, m, v = (torch.ones(4, **here) for _ in range(4))
    torch_adam([weight], [grad], [m], [v], [], [torch.zeros((), device=step_device)], fused=True, amsgrad=False,
                          beta1=0.9, beta2=0.99, lr=0.1, weight_decay=0.0, eps=1e-8, maximize=False)
def sgd(momentum):
    torch._fused_sgd_([torch.ones(4, **here)], [torch.ones(4, **here)], [momentum], weight_decay=0.0, momentum=0.9, lr=0.1,
                      dampening=0.0, nesterov=False, maximize=False, is_first_step=False)
for name, program in CASES.items():
    try:
        exec(program)
        print(name, "| ran")
    except (pretend.Refused, RuntimeError, TypeError, AssertionError) as error:
        print(name, "|", (str(error) or "asserted").splitlines()[0])
sys.stdout.flush()
os._exit(0)
"""
BAD = {  # program -> a part of what the device says
    "torch.ones(4, **here) + torch.ones(4)": "on the CPU are float32 [4]",
    "torch.stack([torch.ones((), **here), torch.ones(())])": "on the CPU are float32 []",
    "torch.zeros(()).add_(torch.ones((), **here))": "on the CPU are float32 []",
    "torch.ones(4, **here)[torch.tensor([0, 1])] = torch.ones(2)": "on the CPU are float32 [2]",
    "torch.nn.Linear(4, 4)(torch.ones(2, 4, **here))": "on the CPU are",
    "torch.ones(2, device='cuda:1')": "the process of cuda:0 uses cuda:1",
    "torch.ones(2, **here).numpy()": "can't convert cuda:0 device type tensor to numpy",
    "adam('cpu')": "a fused optimizer reads device memory",
    "sgd(torch.ones(4))": "a fused optimizer reads device memory",
    "product(fp8(16, 32), fp8(32, 16))": "mat2 must be col_major",
    "product(fp8(32, 16).t(), fp8(16, 32).t())": "self must be row_major",
    "product(fp8(16, 24), fp8(16, 24).t())": "divisible by 16",
    "product(fp8(16, 32), fp8(24, 32).t())": "divisible by 16",
    "product(fp8(16, 32, E5M2), fp8(16, 32, E5M2).t())": "two e5m2 operands",
    "product(fp8(16, 32), torch.ones(16, 32, **here).t())": "operands are FP8",
    "product(fp8(16, 32), fp8(16, 32).t(), scale_a=torch.ones(()))": "all operands on the device",
    "product(fp8(16, 32), fp8(16, 32).t(), scale_a=one.double())": "fp32",
    "product(fp8(16, 32), fp8(16, 32).t(), torch.ones(16, 1, **here), torch.ones(1, 16, **here), out_dtype=torch.float32)": "scales per row give bf16 only",
    "dist.all_reduce(torch.ones(2))": "tensors must be CUDA and dense",
    "dist.all_reduce(torch.ones(2, 3, **here).t())": "tensors must be contiguous",
    "dist.broadcast(torch.ones(2, dtype=torch.int16, **here), 0)": "data type not supported by NCCL: int16",
    "dist.all_reduce(fp8(4, 4))": "NCCL does not reduce FP8",
    "w = torch.ones(4, **here); w.untyped_storage().resize_(0); assert w.isfinite().all(), 'it was freed'": "it was freed",
}
GOOD = (
    "torch.ones(4, **here) + torch.ones(())",
    "torch.ones(4, **here)[torch.tensor([0])]",
    "adam('cuda')",
    "sgd(torch.ones(4, **here))",
    "product(fp8(16, 32), fp8(16, 32).t())",
    "product(fp8(17, 32, E5M2), fp8(16, 32).t(), use_fast_accum=True)",
    "product(fp8(16, 32), fp8(16, 32).t(), torch.ones(16, 1, **here), torch.ones(1, 16, **here))",
    # amp8's products: rows that are no multiple of 16 are padded, and scales per row become a vector each
    "x, g = fp8(24, 32), fp8(24, 16); assert of_amp8(g.t(), x, one, one, pad_inner=True).equal("
    "of_amp8(g.t(), x, one, one, exact=True, pad_inner=True))",
    "x, w, rows = fp8(8, 32), fp8(16, 32), torch.full((8, 1), 2.0, **here); assert of_amp8(x, w.t(), rows, one, "
    "torch.float32).allclose(of_amp8(x, w.t(), rows, one, torch.float32, exact=True), rtol=2**-8)",
    "dist.all_reduce(torch.ones(2, **here))",
    "dist.all_gather_into_tensor(torch.empty(4, 4, **here).to(E4M3), fp8(4, 4))",
)


LATE = """
w = torch.ones(4, **here)
host = w.to("cpu", non_blocking=True)
assert host.isnan().all()
torch.cuda.synchronize()
assert host.equal(torch.ones(4))
"""
IN_FP8 = "product(fp8(16, 32), fp8(16, 32).t())"
IN_MX = "product(fp8(32, 64), fp8(32, 64).t(), *[torch.full((512,), 127, dtype=torch.uint8, **here).view(E8M0)] * 2)"
BAD_MX = {  # on a card that has such products
    IN_MX.replace("512", "64"): "scale_a should have 512 elements, got 64",
    IN_MX.replace("64)", "48)"): "MX scales need columns in multiples of 32",
}
CARDS = (  # (programs, arguments of `wear`)
    ([*BAD, *GOOD, LATE, IN_MX], {}),
    ([IN_FP8], {"capability": (8, 0)}),
    ([IN_MX, *BAD_MX], {"capability": (10, 0)}),
)


def said_on(*cards):
    """What HEAD prints of each program on each card: [{program: what became of it}]."""
    named = [{f"case {at}.{i}": one for i, one in enumerate(programs)} for at, (programs, _) in enumerate(cards)]
    worn = [(names, wear) for names, (_, wear) in zip(named, cards, strict=True)]
    said = subprocess.run([sys.executable, "-c", HEAD % (worn,), str(ROOT / "tests")], capture_output=True, text=True)
    rows = dict(row.split(" | ", 1) for row in said.stdout.splitlines() if row.startswith("case "))
    assert rows.keys() == set().union(*named), said.stderr[-2000:]
    return [{program: rows[name] for name, program in names.items()} for names in named]


@pytest.fixture(scope="module")
def outcomes(gpu):
    return said_on(*CARDS)


def test_what_a_gpu_refuses_is_refused(outcomes):
    found, without, with_mx = outcomes
    for program, part in BAD.items():
        assert part in found[program], (program, found[program])
    assert {found[program] for program in GOOD} == {"ran"}, found
    assert "compute capability 8.9" in without[IN_FP8]
    assert "compute capability 10.0" in found[IN_MX] and with_mx[IN_MX] == "ran"
    assert all(part in with_mx[program] for program, part in BAD_MX.items()), with_mx


def test_a_copy_that_nobody_waits_for_holds_no_values(outcomes):
    assert outcomes[0][LATE] == "ran", outcomes[0][LATE]


COUNTED = {  # program -> waits for the device
    "w.sum().item()": 1,
    "w.tolist()": 1,
    "bool(w.sum() > 0)": 1,
    "w.cpu()": 1,
    "w.to('cpu', non_blocking=True)": 0,
    "w[w > 0]": 1,
    "w.nonzero()": 1,
    "torch.ones(4).to('cuda')": 1,
    "torch.ones(4).to('cuda', non_blocking=True)": 1,
    "torch.ones(4).pin_memory().to('cuda')": 1,
    "torch.ones(4).pin_memory().to('cuda', non_blocking=True)": 0,
    "torch.cuda.synchronize()": 1,
    "w * 2 + w.sum()": 0,
    "e = torch.cuda.Event(); e.record(); e.synchronize()": 1,
    "e = torch.cuda.Event(); e.record(); steps.append(pretend.nothing_yet()); e.synchronize()": 0,  # a step later
}


LAUNCHES = {  # program -> launches
    "w * 2": 1,
    "w.view(2, 2)": 0,
    "torch._foreach_mul_(list(m.unbind()), 2)": 1,
    "torch._foreach_mul_(list(m.unbind(1)), 2)": 4,
    "torch._foreach_copy_(list(m.unbind()), list(n.unbind()))": 1,
    "torch._foreach_copy_(list(m.unbind()), list(n.unbind(1)))": 4,  # the second have strides
}


BYTES = {  # program -> bytes that are read and written, with w of 16 and m, n of 64 bytes
    "w * 2": 32,
    "w.mul_(2)": 32,
    "w.view(2, 2)": 0,
    "w.expand(4, 4) + m": 16 + 64 + 64,
    "m[0] + 1": 32,
    "torch._foreach_mul_([w, m], 2)": 32 + 128,
    "torch.compile(lambda x: (x * 2).relu() + 1)(w)": 32,
    "torch.compile(lambda x, y: x.copy_(y * 2))(w, m[0])": 48,
}
TURNED = {  # program -> bytes of copies that transpose
    "m.clone()": 0,
    "m.contiguous()": 0,
    "m[:, :2].contiguous()": 0,
    "m.t()": 0,
    "m.t().contiguous()": 128,
    "m.copy_(n.t())": 128,
    "m.t().to(torch.bfloat16, memory_format=torch.contiguous_format)": 96,
    "torch.compile(lambda x: x.t().contiguous())(m)": 0,  # in a kernel with what is around it
}


@pytest.mark.parametrize(
    ("programs", "what"), [(COUNTED, "len(steps[0]['waits'])"), (LAUNCHES, "steps[0]['launches']"),
     (BYTES, "steps[0]['bytes']"), (TURNED, "steps[0]['turned']")]
)  # fmt: skip
def test_waits_launches_and_bytes_are_counted(gpu, programs, what):
    made = "w, m, n = torch.ones(4, **here), torch.ones(4, 4, **here), torch.ones(4, 4, **here); "
    lines = [
        f"{made}steps = pretend.steps; steps[:] = [pretend.nothing_yet()]; {program}; assert 0, {what}"
        for program in programs
    ]
    [found] = said_on((lines, {}))
    assert dict(zip(programs, found.values(), strict=True)) == {
        program: str(count) for program, count in programs.items()
    }


UPDATED = (
    "import amp8; from amp8.convert import state_of; layers = [torch.nn.Linear(32, 32) for _ in range({})]; "
    "net = torch.nn.Sequential(*layers); optimizer = torch.optim.AdamW(net.parameters(), fused=True); "
    "net, optimizer = amp8.initialize(net, optimizer, '{}', recipe='{}'); net.cuda(); state = state_of(net); "
    "net(torch.ones(4, 32, **here)).sum().backward(); optimizer.found_inf = torch.zeros((), **here); optimizer.step(); "
    "net(torch.ones(4, 32, **here)).sum().backward(); "
    "steps = pretend.steps; steps[:] = [pretend.nothing_yet()]; {}; assert 0, steps[0]['launches']"
)
UPDATES = [
    (level, recipe, what)
    for level, recipe in (("O1", "msamp"), ("O2", "msamp"), ("O3", "msamp"), ("O2", "te_delayed"), ("O2", "fp4"))
    for what in ("state.update_scales()", "optimizer.step()")
]


def test_an_update_of_many_layers_takes_as_many_launches_as_of_two(gpu):
    """A masked one, as in training."""
    programs = {update: [UPDATED.format(layers, *update) for layers in (2, 7)] for update in UPDATES}
    [found] = said_on((sum(programs.values(), []), {}))
    for update, (of_two, of_seven) in programs.items():
        assert found[of_two] == found[of_seven] and found[of_two].isdecimal(), (update, found[of_two], found[of_seven])


WAITED = (
    "import amp8; net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)); "
    "optimizer = torch.optim.AdamW(net.parameters()); net, optimizer = amp8.initialize(net, optimizer, 'O2')[:2]; "
    "net = net.cuda(); held = amp8.convert.state_of(net).gradients; net(torch.ones(4, 32, **here)).sum().backward(); steps = pretend.steps; "
    "steps[:] = [pretend.nothing_yet()]; {}; optimizer.step(); assert 0, sum(len(step['waits']) for step in steps)"
)
EDITS = ("0", "[each.grad().mul_(0.5) for each in held]", "[each.grad().view(-1) for each in held]")


def test_a_changed_gradient_of_a_level_adds_no_wait(gpu):
    [found] = said_on(([WAITED.format(edit) for edit in EDITS], {}))
    assert set(found.values()) == {found[WAITED.format("0")]} and found[WAITED.format("0")].isdecimal(), found
