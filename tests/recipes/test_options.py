"""Options of a recipe from a file, in epochs, and the schedule of the learning rate."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import CONFIGS, metrics, record, train
from transformers import get_scheduler

from shared.args import Refused
from tools import compare, estimate, find

VIT = find.recipe("vit")
MORE = ("--save_steps", "0", "--eval_steps", "0", "--logging_steps", "1")


def options(text, folder, name="mine.yml", *words):
    (folder / name).write_text(text)
    return find.parse_options(VIT, ["--config", str(folder / name), *words])


def test_a_file_gives_options_and_the_command_line_wins(tmp_path):
    text = "# mine\nlearning-rate: 1e-4\nmax_steps: 7\ndeterministic: true\ndataset: no\nimage_size: null\npretrained: False\n"
    for name in ("mine.yml", "mine"):
        made = options(text, tmp_path, name, "--max_steps", "9")
        assert (made.learning_rate, made.max_steps, made.deterministic) == (1e-4, 9, True)
        assert (made.dataset, made.image_size, made.pretrained) == ("no", None, False)
    assert (
        options(json.dumps({"max_steps": 7, "dataset": "a b", "image_size": None}), tmp_path, "m.json").dataset == "a b"
    )
    train(
        "single_fp32",
        tmp_path / "run",
        "--config",
        tmp_path / "mine.yml",
        *MORE,
        "--max_steps",
        2,
        "--dataset",
        "digits",
    )
    assert record(tmp_path / "run")["args"]["learning_rate"] == 1e-4 and record(tmp_path / "run")["final"]["step"] == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("learnig_rate: 1", "unrecognized arguments: --learnig_rate in {file}: did you mean --learning_rate?"),
        ("config: a.yml", "unrecognized arguments: --config in {file}"),
        ("max_steps: 0", "max_steps: 0 is not a whole number, 1 or more"),
        ("max_steps: [3]", "--config {file} does not hold `option: value` lines alone"),
        ("- max_steps", "--config {file} does not hold `option: value` lines alone"),
        ("", "--config {file} does not hold `option: value` lines alone"),
        ("seed: 1\nmax_steps: 3\nseed: 2", "--config {file} has seed twice"),
        ("pretrained: perhaps", "ignored explicit argument 'perhaps'"),
        ("max_steps: {", "--config {file} cannot be read: "),
        ("[" * 9000, "--config {file} cannot be read: "),
        ("#" * 70_000, "--config {file} cannot be read: it is longer than 65,536 bytes"),
        ("\x00", "--config {file} cannot be read: "),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, text, why):
    with pytest.raises(Refused) as refused:
        options(text, tmp_path)
    said = str(refused.value)
    assert why.format(file=tmp_path / "mine.yml") in said and "\n" not in said


def test_what_launch_sh_refuses_before_it_starts(tmp_path):
    for words, line in (
        (["--config", str(tmp_path / "none.yml")], "none.yml cannot be read: no such file"),
        (["--max_steps", "5", "--num_train_epochs", "2"], "--num_train_epochs 2.0 and --max_steps 5: give one of them"),
    ):
        with pytest.raises(Refused, match=line):
            find.parse_options(VIT, words)


def test_the_commands_see_what_a_file_gives(tmp_path):
    (tmp_path / "mine.yml").write_text("gradient_accumulation_steps: 4\n")
    words = ["--config", str(tmp_path / "mine.yml")]
    assert estimate.accumulates(VIT, words) and not estimate.accumulates(VIT, [])
    assert not estimate.accumulates(VIT, [*words, "--gradient_accumulation_steps=1"])


@pytest.mark.parametrize("best", [False, True])
def test_compare_saves_only_where_the_best_model_is_wanted(tmp_path, monkeypatch, best):
    lines = []
    monkeypatch.setattr(
        compare.subprocess, "run", lambda line, **_: lines.append(line) or SimpleNamespace(returncode=0)
    )
    launch = compare.Launch("single_bf16", False, 0, None, tmp_path / "run")
    words = ["vit", *["--load_best_model_at_end"] * best]
    compare.execute(launch, compare.Way(CONFIGS / "single_bf16.yml", []), words, {"single_bf16": 32})
    at = lines[0].index(str(VIT)) + 1
    assert find.parse_options(VIT, lines[0][at:]).save_steps == (100 if best else 0)


def test_epochs_are_steps_of_whole_global_batches(tmp_path):
    """1,437 images in batches of 32 on two processes are 22 steps of an epoch."""
    run = train("ddp_fp32", tmp_path / "run", "--num_train_epochs", 0.1, *MORE)
    assert record(run)["args"]["max_steps"] == 3 == record(run)["final"]["step"]
    assert record(run)["args"]["num_train_epochs"] == 0.1


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant_with_warmup"])
def test_the_schedule_is_transformers_own(tmp_path, kind):
    words = ("--lr_scheduler_type", kind, "--max_steps", 5, "--warmup_steps", 2, "--learning_rate", 1)
    run = train("single_fp32", tmp_path / "run", *words, *MORE)
    schedule = get_scheduler(kind, torch.optim.SGD([torch.ones(1)], 1.0), 2, 5)
    rates = []
    for _ in range(5):
        rates += schedule.get_last_lr()
        schedule.optimizer.step(), schedule.step()
    assert [row["learning_rate"] for row in metrics(run) if "loss" in row] == pytest.approx(rates)
