"""Recipes are plain Accelerate scripts: with Accelerate's own Accelerator they train to the same losses and weights."""

import importlib.util
import re
import sys

import conftest
import pytest
from conftest import ROOT, distance, edited, train
from test_recipes import couples, preferred, questions, reviews

from faithful.backends import cpu_matmul

IMPORT = "from faithful import Accelerator"
STEPS = ("--max_steps", 3, "--logging_steps", 1, "--warmup_steps", 1, "--eval_steps", 2, "--save_steps", 2)
SMALL = {
    "vit": ("--dataset", "digits"),
    "resnet": ("--dataset", "digits", "--per_device_train_batch_size", 8),
    "gpt": ("--sequence_length", 32, "--no-packing", "--gradient_accumulation_steps", 2),
    "bert": ("--sequence_length", 32, "--vocab_size", 0, "--dropout", 0.1),
    "embed": ("--sequence_length", 32, "--per_device_train_batch_size", 8, "--dropout", 0.1),
    "diffusion": ("--per_device_train_batch_size", 8),
    "dpo": ("--sequence_length", 48, "--per_device_train_batch_size", 4),
    "sft": (
        "--sequence_length",
        64,
        "--per_device_train_batch_size",
        4,
        "--gradient_accumulation_steps",
        2,
        "--gradient_checkpointing",
    ),
}
CHOSEN = {("vit", "ddp_fp32"), ("gpt", "single_bf16"), ("bert", "single_fp32"), ("embed", "ddp_fp32"), ("resnet", "ddp_fp32"),
          ("diffusion", "single_bf16"), ("sft", "ddp_fp32"), ("dpo", "ddp_fp32")}  # fmt: skip


def matrix():
    for name in SMALL:
        for config in ("single_fp32", "single_bf16", "ddp_fp32"):
            if name == "diffusion" and config == "ddp_fp32":
                continue  # Accelerate alone fails under DDP on CPUs for a model that is not trained, the average
            yield pytest.param(name, config, marks=() if (name, config) in CHOSEN else pytest.mark.slow)


def plain(name, folder):
    """The module of recipes/<name>.py with `from accelerate import Accelerator` in place of our import."""
    page = (ROOT / "recipes" / f"{name}.py").read_text()
    assert page.count(IMPORT) == 1 == page.count("faithful")
    file = folder / f"plain_{name}.py"
    file.write_text(edited(page, IMPORT, "from accelerate import Accelerator"))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def losses(folder):
    return re.findall(r"step \d+: .*", (folder.parent / f"{folder.name}.log").read_text())


@pytest.mark.parametrize(("name", "config"), list(matrix()))
def test_trains_to_the_same_losses_without_us(tmp_path, monkeypatch, name, config):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(" ".join(f"w{i * k % 7}" for k in range(2 + i * 37 % 50)))
    argv = (*STEPS, *SMALL[name])
    argv += {
        "gpt": ("--dataset", folder, "--per_device_train_batch_size", 16),
        "bert": ("--dataset", reviews(tmp_path)),
        "embed": ("--dataset", couples(tmp_path)),
        "dpo": ("--dataset", preferred(tmp_path)),
        "sft": ("--dataset", questions(tmp_path)),
    }.get(name, ())
    # With torch's own 16-bit kernels, as under Accelerate alone: through fp32 the order of a sum is another.
    monkeypatch.setattr(cpu_matmul, "slow", lambda: dict.fromkeys(cpu_matmul.OPERATORS, []))
    ours = train(config, tmp_path / "ours", *argv, name=name)
    module = plain(name, tmp_path)
    assert module.Accelerator.__module__ == "accelerate.accelerator"
    monkeypatch.setattr(conftest, "recipe", lambda name: module)
    env = {"ACCELERATE_USE_CPU": "true"}  # plain Accelerate forms a group of CPU processes only when told so
    theirs = train(config, tmp_path / "theirs", *argv, name=name, env=env)
    assert not (theirs / "run.json").exists() and (theirs / "checkpoint-2").exists()
    assert len(losses(ours)) == 3 + 2 + (name == "dpo") and losses(theirs) == losses(ours)
    assert distance(ours, theirs) == 0


def test_accelerate_alone_fails_for_an_average_of_weights_under_ddp(tmp_path, monkeypatch):
    """So `copy --plain` refuses diffusion under ddp. If this test fails, Accelerate can do it, and so may --plain."""
    module = plain("diffusion", tmp_path)
    monkeypatch.setattr(conftest, "recipe", lambda name: module)
    argv = (*STEPS, *SMALL["diffusion"])
    train("ddp_fp32", tmp_path / "run", *argv, name="diffusion", env={"ACCELERATE_USE_CPU": "true"}, code=1)
    assert "DistributedDataParallel is not needed when a module doesn't have any" in (tmp_path / "run.log").read_text()


def test_shared_imports_nothing_of_faithful():
    pages = list((ROOT / "shared").glob("*.py"))
    assert {page.stem for page in pages} == {
        "__init__",
        "args",
        "data",
        "diffusion",
        "dpo",
        "images",
        "lm",
        "models",
        "optimizers",
        "pairs",
        "resnets",
        "sft",
        "text",
        "vision",
    }
    for page in pages:
        assert not re.search(r"^\s*(from|import) (faithful|amp8|recipes|tools)", page.read_text(), re.M), page.name
