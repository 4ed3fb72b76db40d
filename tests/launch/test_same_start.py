"""What all processes of a run have to be started with: they compare it where they meet."""

import os
import sys

import pytest
from conftest import Ranks, train

from faithful import Accelerator
from faithful.launch import same_start


@pytest.mark.parametrize(
    "one, other, differs",
    [
        ("--learning_rate 0.001", "--learning_rate 0.03", ["--learning_rate"]),
        ("--learning_rate 0.001", "--learning-rate=1e-3", []),
        ("--learning_rate 1e-3", "", ["--learning_rate"]),
        ("--seed 1", "--seed 2", ["--seed"]),
        ("--shift -1", "--shift -2", ["--shift"]),
        ("--pretrained", "", ["--pretrained"]),
        ("--layers 1 2", "--layers 1 3", ["--layers"]),
        ("train", "test", ["argument 1"]),
        ("--model_name_or_path org/a", "--model_name_or_path org/b", ["--model_name_or_path"]),
        # may differ from machine to machine
        ("--output_dir runs/a", "--output_dir runs/b", []),
        ("--output_dir runs/a", "", ["--output_dir"]),
        ("--data /disk0/mine", "--data ~/mine", []),
        ("--resume_from_checkpoint latest", "", ["--resume_from_checkpoint"]),
        ("--local_rank 0", "--local-rank=1", []),
        ("--dataloader_num_workers 4", "", []),
        ("--hub_token a", "--hub_token b", []),
    ],
)
def test_arguments_that_count(one, other, differs):
    one, other = same_start.arguments(one.split()), same_start.arguments(other.split())
    assert [name for name in {**one, **other} if one.get(name) != other.get(name)] == differs


def test_a_file_of_settings_is_compared_by_its_content(tmp_path):
    words = []
    for machine, text in enumerate(("lr: 1", "lr: 1", "lr: 2")):
        file = tmp_path / str(machine) / "mine.yaml"
        file.parent.mkdir()
        file.write_text(text)
        words.append(same_start.arguments(["--config", str(file)]))
    assert words[0] == words[1] != words[2]


def started(**changes):
    made = {kind: {} for kind in same_start.KINDS} | {"arguments": {"--seed": "1"}, "packages": {"torch": "2.15"}}
    return made | changes


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, None),
        ({"plan": {"precision": "bf16"}}, "precision is not given on a and 1 more, bf16 on c"),
        ({"arguments": {"--seed": "2"}}, "--seed is 1 on a and 1 more, 2 on c"),
        ({"exported": {"ACCELERATE_X": "1"}}, "ACCELERATE_X is not given on a and 1 more, 1 on c"),
        ({"packages": {"torch": "2.14", "timm": "1"}}, "torch is 2.15 on a and 1 more, 2.14 on c"),
        ({"packages": {}}, None),  # a package that the run needs is refused by the plan
        ({"code": {"shared/data.py": "1"}}, None),  # imported by one process alone
        ({"arguments": {f"--{i}": "2" for i in range(9)}}, "; and 6 more: start all with the same command"),
    ],
)
def test_the_line_names_what_differs_and_where(changes, expected):
    line = same_start.difference([started(), started(), started(**changes)], ["a", "b", "c"])
    assert expected in line if expected else line == ""


def test_ranks_of_one_machine_are_named_by_their_number():
    code = [started(code={"shared/data.py": value}) for value in "112"]
    assert "shared/data.py is one file on a and 1 more, another on c" in same_start.difference(code, ["a", "b", "c"])
    assert "one file on rank 0 and 1 more, another on rank 2" in same_start.difference(code, ["a", "a", "a"])


def test_processes_that_were_started_differently_train_nothing(tmp_path):
    def other_seed(rank):
        sys.argv += ["--seed", str(rank)]

    log = tmp_path / "run.log"
    train("ddp_fp32", tmp_path / "run", "--max_steps", 2, before=other_seed, code=2)
    said = "refused: the processes were started differently: --seed is 0 on rank 0, 1 on rank 1: start all with"
    assert log.read_text().count(said) == 1 and "asked" not in log.read_text()
    assert not (tmp_path / "run").exists()


def compares_again():
    accelerator = Accelerator(project_dir=sys.argv[2])
    same_start.compare({"precision": str(accelerator.process_index)}, 2)
    accelerator.end_training()


def test_only_the_first_accelerator_of_a_process_is_compared(tmp_path):
    """Tests make Accelerators of several precisions, one after another, whose ranks are not at the same one."""
    train("ddp_fp32", tmp_path / "run", script=compares_again)


def test_each_machine_prints_what_differs(tmp_path):
    def on_its_own_machine(rank):
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        sys.argv += ["--seed", str(rank)]

    ranks = Ranks("ddp_fp32", ["--output_dir", str(tmp_path / "run")], before=on_its_own_machine)
    assert ranks.wait() == [2, 2] and ranks.text().count("refused: the processes were started differently") == 2
