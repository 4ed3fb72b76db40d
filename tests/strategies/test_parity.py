"""Training is the same for any number of processes, sharding and accumulation. fp64 SGD shows any real difference."""

import pytest
from conftest import distance, metrics, record, train, weights

FP64 = ("--dtype", "float64", "--optimizer", "sgd", "--max_steps", 12, "--logging_steps", 1, "--save_steps", 0,
        "--learning_rate", 0.2, "--warmup_steps", 3, "--max_grad_norm", 0.5)  # fmt: skip


def batches(per_device, accumulation):
    return ("--per_device_train_batch_size", per_device, "--gradient_accumulation_steps", accumulation)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return train("single_fp32", tmp_path_factory.mktemp("one") / "run", *FP64, *batches(32, 1))


@pytest.mark.parametrize(
    ("config", "per_device", "accumulation"),
    [("single_fp32", 8, 4), ("ddp_fp32", 16, 1), ("ddp_fp32", 4, 4), ("fsdp_fp32", 16, 1), ("fsdp_fp32", 4, 4)],
)
def test_fp64_sgd_ends_with_the_same_weights(one, tmp_path, config, per_device, accumulation):
    other = train(config, tmp_path / "run", *FP64, *batches(per_device, accumulation))
    assert distance(one, other) < 1e-12
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert a["step"] == b["step"]
        for key in a.keys() & {"loss", "grad_norm", "learning_rate", "eval_loss", "accuracy"}:
            assert a[key] == pytest.approx(b[key], rel=1e-12), key


def test_the_oracle_can_fail(one, tmp_path):
    """Half the global batch trains to other weights, so the parity test can fail."""
    other = train("single_fp32", tmp_path / "run", *FP64, *batches(16, 1))
    assert distance(one, other) > 1e-6


def test_clipping_was_at_work(one):
    norms = [row["grad_norm"] for row in metrics(one) if "grad_norm" in row]
    assert max(norms) > 0.5


@pytest.mark.parametrize("config", ["ddp_fp32", "fsdp_fp32"])
def test_fp32_adamw_agrees_with_one_process(tmp_path, config):
    steps = ("--max_steps", 8, "--save_steps", 0)
    one = train("single_fp32", tmp_path / "one", *steps, *batches(32, 1))
    two = train(config, tmp_path / "two", *steps, *batches(16, 1))
    assert distance(one, two) < 2e-5  # AdamW divides by sqrt(v): rounding of tiny gradients shows
    assert all(tensor.abs().sum() > 0 for name, tensor in weights(two).items() if "weight" in name)
    if config == "fsdp_fp32":
        evidence = record(two)["evidence"]
        assert evidence["sharded"] is True
        assert evidence["bytes_per_parameter"] == {
            "weight": 4.0, "gradient": 4.0, "master": 0.0, "optimizer": 8.0, "total": 16.0
        }  # fmt: skip


@pytest.mark.parametrize(
    "config", ["ddp_fp32", *(pytest.param(f"ddp_fp8_msamp_o{n}", marks=pytest.mark.slow) for n in (2, 3))]
)
def test_three_processes_resume_bit_for_bit(tmp_path, config):
    """They sum gradients in another order before DDP has seen in which one they come. Two numbers have one sum."""
    words = ("--max_steps", 4, "--save_steps", 2, "--logging_steps", 1, *batches(4, 1))
    whole = train(config, tmp_path / "whole", *words, processes=3)
    part = train(config, tmp_path / "part", *words, "--resume_from_checkpoint", whole / "checkpoint-2", processes=3)
    assert distance(whole, part) == 0 and metrics(part) == metrics(whole)[2:]
