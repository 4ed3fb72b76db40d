"""FSDP2 with tensor parallel: two groups of two processes train as one process does."""

import json

import pytest
import torch
import yaml
from conftest import CONFIGS, assert_exported, distance, edited, launched, record, refusal, resumed, train, weights
from test_tp import FP64, STEPS, assert_estimated, assert_same_training, in_float64, losses_and_norms

from faithful import Accelerator
from faithful.strategies.tp import DTensor, Scaler
from faithful.tensors.names import local

HALF = ("--per_device_train_batch_size", 4)  # in each of two groups


def config(folder, precision):
    """fsdp_tp_bf16 in another precision, which is not shipped."""
    path = folder / f"fsdp_tp_{precision}.yml"
    values = yaml.safe_load((CONFIGS / "fsdp_tp_bf16.yml").read_text())
    path.write_text(yaml.dump(values | {"mixed_precision": precision}))
    return path


def test_in_float64_it_is_one_process_s_run(tmp_path):
    """Losses, gradient norms, clipping, accumulation, an evaluation whose samples the groups do not share evenly, and
    weights."""
    two_each = ("--gradient_accumulation_steps", 2, "--per_device_eval_batch_size", 5)
    one = train("single_fp32", tmp_path / "one", *FP64, *two_each, name="gpt", before=in_float64)
    path = config(tmp_path, "no")
    four = train(path, tmp_path / "four", *FP64, *two_each, *HALF, name="gpt", before=in_float64)
    assert distance(one, four) < 1e-12
    assert_same_training(one, four)


def test_what_each_process_holds_and_that_it_resumes(tmp_path):
    run = train("fsdp_tp_bf16", tmp_path / "run", *STEPS, *HALF, name="gpt")
    made, final = record(run)["evidence"], weights(run)
    total = sum(tensor.numel() for tensor in final.values())
    whole = sum(tensor.numel() for name, tensor in final.items() if name.endswith("norm.weight"))
    assert made["sharded"] and made["optimizer_owns_all"] and made["parameters"] == total
    assert made["bytes_per_parameter"]["total"] == 16.0
    share = (total - whole) / 4 / total + whole / 2 / total  # norms: over the groups
    assert made["share_per_process"] == pytest.approx(
        dict.fromkeys(("weight", "gradient", "optimizer"), share), abs=1e-4
    )
    assert "gpt | fsdp_tp x4 gloo, sharded by LlamaDecoderLayer | bf16 compute" in (tmp_path / "run.log").read_text()
    assert_estimated("fsdp_tp_bf16", run)
    one = train("single_bf16", tmp_path / "one", *STEPS, "--save_steps", 0, name="gpt")
    assert losses_and_norms(run) == pytest.approx(losses_and_norms(one), rel=1e-2)
    resumed("fsdp_tp_bf16", run, *STEPS, *HALF, name="gpt")
    assert_exported(run, 6, 4)


def test_its_fp8_trains_as_fsdp_s_and_resumes(tmp_path):
    """Whose weights are gathered in 16 bit, too, and whose scales are those of the same samples."""
    path = tmp_path / "fsdp_fp8.yml"
    path.write_text(edited((CONFIGS / path.name).read_text(), "float8_all_gather: true", "float8_all_gather: false"))
    run, other = (
        train(name, tmp_path / f"{i}", *STEPS, *HALF, name="gpt") for i, name in enumerate(["fsdp_tp_fp8", path])
    )
    assert losses_and_norms(run) == pytest.approx(losses_and_norms(other), rel=1e-2)
    made, theirs = (record(each)["evidence"] for each in (run, other))
    skipped = [[layer["name"] for layer in each["linear_skipped"]] for each in (made, theirs)]
    assert made["linear_converted"] == theirs["linear_converted"] == 27 and skipped[0] == skipped[1]
    assert made["sharded"] and made["optimizer_owns_all"] and made["bytes_per_parameter"]["total"] == 16.0
    assert made["share_per_process"]["weight"] == pytest.approx(0.25, abs=2e-3)
    resumed("fsdp_tp_fp8", run, *STEPS, *HALF, name="gpt")


def gathers_objects():
    """What a rank runs."""
    accelerator = Accelerator()
    rows = accelerator.gather_for_metrics(torch.full((2,), accelerator.process_index))
    assert rows.tolist() == [0, 0, 2, 2], "each group's once"
    accelerator.gather_for_metrics(["a text"])


def test_objects_for_metrics_which_a_group_has_twice_are_refused(tmp_path):
    assert "refused: gather_for_metrics of objects" in refusal("fsdp_tp_bf16", tmp_path / "run", script=gathers_objects)


@pytest.mark.parametrize("hit", ["split", "norm"])
def test_an_overflow_in_fp16_is_that_of_all_processes(tmp_path, hit):
    """Also of a part that one process alone has, and of a norm's shard, which two have."""

    def poisoned(rank):
        unscale, calls = Scaler._unscale_grads_, []

        def first(self, optimizer, *args):
            calls.append(optimizer)
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            assert all(isinstance(gradient, DTensor) for gradient in gradients)
            gradient = next(g for g in gradients if g.device_mesh.ndim == (2 if hit == "split" else 1))
            if len(calls) == 2 and rank in ((3,) if hit == "split" else (2, 3)):
                local(gradient).view(-1)[0] = float("inf")
            return unscale(self, optimizer, *args)

        Scaler._unscale_grads_ = first

    words = ("--grad_scaler", "init_scale=1024", "--max_grad_norm", 0, *HALF)
    run = train(config(tmp_path, "fp16"), tmp_path / "run", *STEPS, *words, name="gpt", before=poisoned)
    state = json.loads((run / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["steps"]["tried"] == 7 and state["scaler"]["scale"] == 512
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())


def test_accelerates_example_of_three_dimensions_is_one_process_s_run(tmp_path):
    """The keys of its tp_hsdp.yaml: two copies of two groups of two. In bf16 it is accepted as it is."""
    path, fsdp = tmp_path / "tp_hsdp.yaml", {
        "fsdp_activation_checkpointing": False, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": False, "fsdp_offload_params": False, "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_version": 2,
    }  # fmt: skip
    sizes = {
        f"parallelism_config_{name}_size": size
        for name, size in (("cp", 1), ("dp_replicate", 2), ("dp_shard", 2), ("tp", 2))
    }
    values = {
        "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "FSDP", "downcast_bf16": "no",
        "enable_cpu_affinity": False, "fsdp_config": fsdp, "machine_rank": 0, "main_training_function": "main",
        "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8, "parallelism_config": sizes,
        "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False,
        "tpu_use_sudo": False, "use_cpu": False,
    }  # fmt: skip
    path.write_text(yaml.dump(values))
    checked = launched("./launch.sh", "check", str(path))
    assert checked.returncode == 0 and "ok (fsdp_tp x8, bf16; rehearsal on a CPU)" in checked.stdout
    path.write_text(yaml.dump(values | {"mixed_precision": "no"}))
    words = (*FP64, "--save_steps", 2)
    one = train("single_fp32", tmp_path / "one", *words, name="gpt", before=in_float64)
    quarter = ("--per_device_train_batch_size", 2)
    run = train(path, tmp_path / "run", *words, *quarter, name="gpt", before=in_float64)
    assert distance(one, run) < 1e-12
    assert losses_and_norms(run) == pytest.approx(losses_and_norms(one), rel=1e-12)
    made = record(run)["evidence"]
    assert made["share_per_process"]["weight"] == pytest.approx(0.25, abs=2e-3)
    assert_exported(run, 4, 4)
