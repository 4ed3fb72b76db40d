"""The best checkpoint, as --load_best_model_at_end keeps and loads it."""

import os
import shutil
import signal
from types import SimpleNamespace

import pytest
from conftest import Ranks, metrics, record, refusal, train, weights
from safetensors.torch import load_file

from faithful.checkpoint import checkpoints
from shared import data
from shared.args import Refused
from tools import find, records, show

VIT = find.recipe("vit")
EARLIEST = ("--load_best_model_at_end", "--greater_is_better")  # the largest loss, that of the first checkpoint
STEPS = ("--max_steps", 25, "--eval_steps", 5, "--save_steps", 10, "--logging_steps", 5)
LATEST = ("--resume_from_checkpoint", "latest")


def evaluations(run):
    """{step: loss} of a run's evaluations while it trained, and the row of the last one."""
    rows = [row for row in metrics(run) if "eval_loss" in row]
    return {row["step"]: row["eval_loss"] for row in rows if "last_step" not in row}, rows[-1]


@pytest.mark.parametrize(
    "config",
    ["single_bf16", "fsdp_fp8", "ddp_fp8_msamp_o2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("ddp_bf16", "zero2_bf16"))],
)  # fmt: skip
def test_the_model_and_the_record_are_of_the_best_step(tmp_path, config):
    """Rotation keeps its checkpoint, whatever its age. An evaluation of a step without a checkpoint does not count."""
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    run = train(config, tmp_path / "run", *STEPS, *EARLIEST, "--save_total_limit", 1)
    seen, last = evaluations(run)
    assert list(seen) == [5, 10, 15, 20, 25] and max(seen, key=seen.get) == 5 and max(10, 20, 25, key=seen.get) == 10
    made = record(run)
    assert made["final"]["step"] == 10 == last["step"] and made["final"]["metrics"]["eval_loss"] == seen[10]
    assert last["last_step"] == made["seen"]["last_step"] == 25 and made["status"] == "finished"
    assert made["final"]["loss"] == dict(made["seen"]["loss_curve"]).get(10)
    assert [path.name for path in checkpoints.list_checkpoints(run)] == ["checkpoint-20", "checkpoint-10"]
    if config in ("single_bf16", "ddp_bf16"):  # their checkpoints hold the weights under the model's names
        held = load_file(run / "checkpoint-10" / "rank0.safetensors")
        assert all(held[f"0:model/{name}"].equal(value) for name, value in weights(run).items())
    assert records.read(run)["problem"] is None and records.read(run)["metrics"][-1]["step"] == 25
    table = dict(show.rows(records.record_of(run)))
    assert table["model"] == "of step 10, the best eval_loss" and table["optimizer steps"] == "25"


def test_a_last_step_that_is_the_best_needs_no_checkpoint(tmp_path):
    run = train("single_bf16", tmp_path / "run", *STEPS, "--load_best_model_at_end", "--metric_for_best_model", "loss")
    seen, last = evaluations(run)
    assert min(seen, key=seen.get) == 25 == last["step"] == record(run)["final"]["step"] and len(metrics(run)) == 10
    assert "last_step" not in record(run)["seen"] and "went back" not in (tmp_path / "run.log").read_text()
    assert dict(show.rows(records.record_of(run)))["model"] == "of step 25, the best loss"


def killed(moment):
    """Kills all processes of the run: at the first batch of the evaluation after this step, or before it saves the
    model that it has loaded."""

    def before(rank):
        from faithful import Accelerator

        def strikes(name, when):
            method = getattr(Accelerator, name)

            def replaced(self, *args, **kwargs):
                if when(self):
                    os.kill(os.getpid(), signal.SIGKILL)
                return method(self, *args, **kwargs)

            setattr(Accelerator, name, replaced)

        if moment == "loaded":
            strikes("save_model", lambda self: True)
        else:
            strikes("gather_for_metrics", lambda self: self.steps.taken == moment)

    return before


@pytest.mark.parametrize("config", ["single_bf16", "ddp_fp8_msamp_o2"])
def test_a_killed_run_still_knows_the_best(tmp_path, config):
    """Killed after saving and before evaluating that step, with and without an earlier best one; in the last
    evaluation; and when the best model is loaded, but not saved. The last two take no step any more."""
    argv = (*map(str, STEPS), *EARLIEST, "--save_steps", "5")
    whole, run = train(config, tmp_path / "whole", *argv), tmp_path / "run"
    for moment in (5, 15, 25, "loaded"):
        words = ["--output_dir", str(run), *argv, *LATEST]
        ranks = Ranks(config, words, before=killed(moment), env={"FAITHFUL_ASYNC_SAVE": "0"})
        assert set(ranks.wait()) == {-9}, ranks.text()
    train(config, run, *argv, *LATEST)
    assert metrics(run) == metrics(whole)
    assert all(value.equal(weights(whole)[name]) for name, value in weights(run).items())
    made, wanted = record(run), record(whole)
    assert made["status"] == "finished" and made["final"]["step"] == 5 and made["seen"]["last_step"] == 25
    assert made["final"]["metrics"] == wanted["final"]["metrics"] and made["evidence"] is not None
    for folder in (run, whole):
        assert [path.name for path in checkpoints.list_checkpoints(folder)] == ["checkpoint-25", "checkpoint-5"]


@pytest.mark.parametrize("load", [True, False])
def test_a_run_killed_in_its_last_evaluation_has_its_record_when_it_is_resumed(tmp_path, load):
    """It takes no step any more, so it is evaluated only: the record of its steps stays, and gets the end."""
    argv = ("--max_steps", "6", "--save_steps", "6", "--eval_steps", "6", "--logging_steps", "2")
    argv += ("--load_best_model_at_end",) * load
    whole, run = train("single_bf16", tmp_path / "whole", *argv), tmp_path / "run"
    ranks = Ranks("single_bf16", ["--output_dir", str(run), *argv], before=killed(6), env={"FAITHFUL_ASYNC_SAVE": "0"})
    assert ranks.wait() == [-9] and record(run)["status"] == "running"
    for _ in range(2):  # a run that has finished may be resumed, too
        train("single_bf16", run, *argv, *LATEST)
        made, wanted = record(run), record(whole)
        assert made["status"] == "finished" and made["finished"] and made["final"] == wanted["final"]
        assert made["evidence"] and made["throughput"]["steps_measured"] == 3 and metrics(run) == metrics(whole)


def test_only_a_checkpoint_that_is_there_is_the_best(tmp_path):
    """A run that goes on elsewhere, or without the best checkpoint, chooses among those that it has."""
    argv = (*STEPS, *EARLIEST)
    whole = train("single_bf16", tmp_path / "whole", *argv)
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "checkpoint-10")
    train("single_bf16", run, *argv, *LATEST)
    assert record(run)["final"]["step"] == 20
    other = train("single_bf16", tmp_path / "other", *argv, "--resume_from_checkpoint", whole / "checkpoint-20")
    assert record(other)["final"]["step"] == 25


MINE = {"metric": "eval_loss", "greater": False}


@pytest.mark.parametrize(
    ("best", "taken"),
    [
        (MINE | {"step": 3, "value": 1.5}, True),
        (MINE | {"step": 4, "value": 1.5}, False),  # there is none
        (MINE | {"step": 3, "value": 1.5, "metric": "accuracy"}, False),
        (MINE | {"step": "../checkpoint-3", "value": 1.5}, False),
        (MINE | {"step": 3, "value": "nan"}, False),
        (MINE, False), ([3], False), (None, False),
    ],
)  # fmt: skip
def test_a_best_checkpoint_that_a_file_names_is_a_step_of_this_folder(tmp_path, best, taken):
    (tmp_path / "checkpoint-3").mkdir()
    args = find.parse_options(VIT, ["--load_best_model_at_end"])
    accelerator = SimpleNamespace(project_dir=str(tmp_path), project_configuration=SimpleNamespace())
    progress = data.Progress({}, args=args)
    progress.accelerator = accelerator
    progress.load_state_dict({"same": {}, "step": 3, "batch": 3, "best": best})
    kept = getattr(accelerator.project_configuration, "best_model_checkpoint", None)
    assert (progress.best == best) == taken and kept == (tmp_path / "checkpoint-3" if taken else None)


WRONG = [
    (("--save_steps", "15", "--eval_steps", "10"), "--save_steps 15 is no multiple of --eval_steps 10"),
    (("--save_steps", "10", "--eval_steps", "0"), "--save_steps 10 is no multiple of --eval_steps 0"),
    (("--save_steps", "0"), "--save_steps 0 is no multiple of --eval_steps 100"),
]


@pytest.mark.parametrize(("words", "why"), WRONG)
def test_steps_that_do_not_fit_are_refused_in_one_line(words, why):
    with pytest.raises(Refused, match=why) as refused:
        find.parse_options(VIT, ["--load_best_model_at_end", *words])
    assert "\n" not in str(refused.value)
    find.parse_options(VIT, list(words))


def test_runs_whose_last_model_was_chosen_otherwise_are_not_compared():
    made = {"versions": {}, "recipe": "vit", "device_name": "", "seen": {"samples_per_step": 1}, "data": {}}
    made["code_sha256"] = ""
    last, best = (records.fixed(made | {"args": {"load_best_model_at_end": on, "eval_steps": 5}}, ()) for on in (0, 1))
    assert last != best and "eval_steps" not in best


def test_options_of_the_best_model_without_it_are_refused():
    for words in (["--metric_for_best_model", "accuracy"], ["--no-greater_is_better"]):
        with pytest.raises(Refused, match="need --load_best_model_at_end"):
            find.parse_options(VIT, words)


def test_a_metric_that_no_evaluation_has_is_refused_with_those_that_it_has(tmp_path):
    words = ("--max_steps", 2, "--load_best_model_at_end", "--metric_for_best_model", "f1")
    said = refusal("single_bf16", tmp_path / "run", *words)
    assert "refused: --metric_for_best_model f1: an evaluation has eval_loss, accuracy" in said
