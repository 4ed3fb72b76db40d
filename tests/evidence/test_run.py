"""What a run does when training goes wrong, and what it prints."""

import contextlib
import functools
import io
import json
import math
import re
import sys
import time

import pytest
import torch
from conftest import distance, metrics, recipe, record, resumed, train, weights
from torch import nn

from faithful import Accelerator, __main__ as door, ending
from shared import args, lm, resnets, vision

QUICK = ("--max_steps", 6, "--logging_steps", 1, "--save_steps", 2)


def poison(step, rank_hit):
    """Called before the run: the loss of one rank becomes NaN at optimizer step `step`."""

    def before(rank):
        vit, seen = sys.modules["vit"], []
        cross_entropy = vit.F.cross_entropy

        def poisoned(logits, labels, **kwargs):
            loss = cross_entropy(logits, labels, **kwargs)
            seen.append(loss.dim() == 0)
            return loss * math.nan if rank == rank_hit and loss.dim() == 0 and sum(seen) == step else loss

        vit.F = type("F", (), {"cross_entropy": staticmethod(poisoned)})

    return before


@pytest.mark.parametrize("config", ["ddp_fp32", "fsdp_bf16", "ddp_fp16"])
def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_step(tmp_path, config):
    run = train(config, tmp_path / "run", *QUICK, before=poison(5, rank_hit=1), code=1)
    log = (tmp_path / "run.log").read_text()
    assert "error: step 5: loss [" in log and "nan" in log and "checkpoint-4" in log and "Traceback" not in log
    made = record(run)
    assert made["status"] == "failed" and "step 5" in made["error"]
    assert sorted(p.name for p in run.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]
    from safetensors.torch import load_file

    held = load_file(run / "checkpoint-4" / "rank0.safetensors")
    own = [tensor for name, tensor in held.items() if name.startswith(("0:model/", "0:optimizer/"))]
    assert len(own) > 100 and all(tensor.isfinite().all() for tensor in own)


@pytest.mark.parametrize("config", ["ddp_fp32", "zero2_bf16", "ddp_fp8_msamp_o3", "fsdp_fp8_msamp_o2"])
def test_also_between_two_times_that_the_ranks_agree(tmp_path, config):
    def before(rank):
        from faithful.training import steps

        steps.AGREE_SECONDS = 1000
        poison(6, rank_hit=1)(rank)

    run = train(config, tmp_path / "run", *QUICK, "--logging_steps", 0, before=before, code=1)
    log = (tmp_path / "run.log").read_text()
    assert re.search(r"error: step 6: loss \[\d\.\d+, nan\]", log) and "Traceback" not in log
    assert sorted(p.name for p in run.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]


def test_a_gradient_overflow_under_fp16_skips_the_step_everywhere(tmp_path):
    """All ranks skip a step whose gradients overflow in fp16. The first scale is far too high: steps are skipped until
    it fits, and neither the step count nor the schedule advances."""
    argv = ("--grad_scaler", f"init_scale={2.0**40}", *QUICK)
    run = train("single_fp16", tmp_path / "run", *argv)
    rows = [row for row in metrics(run) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert record(run)["evidence"]["bytes_per_parameter"]["gradient"] == 4  # of one step
    assert [row["learning_rate"] for row in rows] == pytest.approx([2e-3 * step / 30 for step in range(6)])
    state = json.loads((run / "checkpoint-6" / "trainer_state.json").read_text())
    skipped = state["steps"]["tried"] - state["steps"]["taken"]
    assert state["steps"]["taken"] == 6 and skipped >= 5
    assert state["scaler"]["scale"] == 2.0 ** (40 - skipped)
    [progress, _] = state["registered"]
    assert progress["step"] == 6 and progress["batch"] == 6 + skipped  # data moved on, steps did not


def test_options_of_the_gradient_scaler_reach_it(tmp_path):
    run = train("ddp_fp16", tmp_path / "run", *QUICK, "--grad_scaler",
                "init_scale=1024,growth_factor=4,backoff_factor=0.25,growth_interval=3")  # fmt: skip
    state = json.loads((run / "checkpoint-6" / "trainer_state.json").read_text())["scaler"]
    assert state["scale"] == 1024 * 4 * 4 and state["growth_interval"] == 3 and state["backoff_factor"] == 0.25


@pytest.mark.parametrize("argv", [("--learning_rate", "fast"), ("--bananas", "7"), ("--optimizer", "adagrad")])
def test_a_bad_option_is_one_line_of_one_rank(argv, capsys, monkeypatch):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as left:
            args.parse(recipe("vit").Arguments, argv)
        said = capsys.readouterr()
        assert left.value.code == 2 and said.out == "" and len(said.err.splitlines()) == lines
        assert not lines or said.err.startswith("error: ")


def test_every_option_has_its_comment_as_help(capsys):
    with pytest.raises(SystemExit):
        args.parse(recipe("vit").Arguments, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in ("peak, after the warm-up (default: 0.002)", "--max-steps", "--max_steps", "{adamw,sgd,adamw_8bit,"):
        assert part in text
    assert " (default" in text and "#" not in text
    parsed = args.parse(recipe("vit").Arguments, ["--max-steps", "7", "--pretrained", "--image_size", "96"])
    assert (parsed.max_steps, parsed.pretrained, parsed.image_size, parsed.output_dir) == (7, True, 96, None)


def test_pure_half_precision_runs_and_is_named(tmp_path):
    run = train("single_fp32", tmp_path / "run", *QUICK, "--dtype", "bfloat16")
    evidence = record(run)["evidence"]
    assert list(evidence["dtypes"]["parameters"]) == ["bfloat16"] and evidence["bytes_per_parameter"]["total"] == 8.0
    assert "parameters bfloat16" in (tmp_path / "run.log").read_text()


def test_the_progress_bar_shows_loss_and_samples_per_second(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    bar = args.bar("training", 10, True, 4, 64)
    for _ in range(6):
        time.sleep(0.12)  # longer than it waits between two drawings
        bar.update()
    bar.close()
    drawn = re.findall(r"(\d+)/10 \[[^]]*, (\d+) samples/s\]", terminal.getvalue())
    assert {step for step, _ in drawn} >= {"5", "10"}
    assert 100 < int(drawn[-1][1]) <= 64 / 0.12 and 100 < int(drawn[len(drawn) // 2][1]) <= 64 / 0.12
    assert args.bar("training", 10, False).disable


def test_a_recipe_tells_its_bar_each_step(tmp_path):

    def before(rank):
        class Bar:
            def __init__(self, what, *given):
                self.what, self.said = what, [given]

            def __enter__(self):
                return self

            def __exit__(self, *_):
                self.close()

            def update(self):
                self.said.append("step")

            def close(self):
                (tmp_path / f"{self.what}{rank}").write_text(json.dumps(self.said))

        args.bar = Bar

    train("ddp_fp32", tmp_path / "run", *QUICK, "--logging_steps", 2, before=before)
    for rank in (0, 1):
        first, *said = json.loads((tmp_path / f"training{rank}").read_text())
        assert first == [6, rank == 0, 0, 64] and said == ["step"] * 6


def test_trackers_get_what_metrics_get(tmp_path):
    pytest.importorskip("tensorboard")
    run = train("single_fp32", tmp_path / "run", *QUICK, "--report_to", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = []
    for events in run.glob("**/events.out.tfevents*"):  # one file of options, one of values
        read = EventAccumulator(str(events))
        read.Reload()
        losses += [scalar.value for scalar in read.Scalars("loss")] if "loss" in read.Tags()["scalars"] else []
    assert losses == pytest.approx([row["loss"] for row in metrics(run) if "loss" in row])


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return train("single_fp32", tmp_path_factory.mktemp("quick") / "run", *QUICK)


def test_workers_change_nothing(quick, tmp_path):
    a = quick
    b = train("single_fp32", tmp_path / "b", *QUICK, "--dataloader_num_workers", 2)
    assert distance(a, b) == 0 and metrics(a) == metrics(b)


def test_dropout_differs_between_ranks_and_weights_do_not(tmp_path):
    """Ranks draw different random numbers at each micro-batch and end with the same weights."""

    def before(rank):
        from faithful import Accelerator

        backward, save, drawn = Accelerator.backward, Accelerator.save_model, []

        def noted(self, loss):
            drawn.append(torch.get_rng_state().sum().item())
            backward(self, loss)

        def last(self, model, folder):
            parts = {name: parameter.detach().tolist() for name, parameter in model.named_parameters()}
            (tmp_path / f"rank{rank}.json").write_text(json.dumps([drawn, parts]))
            save(self, model, folder)

        Accelerator.backward, Accelerator.save_model = noted, last

    argv = ("--max_steps", 2, "--gradient_accumulation_steps", 2, "--dropout", 0.2, "--per_device_train_batch_size", 8)
    train("ddp_fp32", tmp_path / "run", *argv, before=before)
    [(first, weights), (second, others)] = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in (0, 1)]
    assert len(first) == 4 and len({*first, *second}) == 8 and weights == others


def test_dropout_reaches_every_model_and_a_resumed_run_draws_the_same(tmp_path):
    for build, x in (
        (vision.vit, torch.randn(4, 1, 8, 8)),
        (resnets.resnet, torch.randn(4, 1, 8, 8)),
        *((functools.partial(lm.gpt, name, 32), torch.arange(16)[None]) for name in ("gpt_nano", "llama_nano")),
    ):
        shape = (16,) if x.dim() == 2 else (f"{build.__name__}_nano", 8, 1, 10)
        for rate in (0.0, 0.5):
            model = build(*shape, dropout=rate).train()
            torch.nn.init.normal_(getattr(model, "head", torch.nn.Linear(1, 1)).weight)
            first, second = ((out if torch.is_tensor(out) else out.logits) for out in (model(x), model(x)))
            assert first.equal(second) == (rate == 0), build
    argv = (*QUICK, "--dropout", 0.2)
    whole = train("ddp_fp32", tmp_path / "whole", *argv, "--save_total_limit", 3)
    plain = train("ddp_fp32", tmp_path / "plain", *QUICK)
    assert metrics(plain)[2]["loss"] != metrics(whole)[2]["loss"]
    resumed("ddp_fp32", whole, *argv, without="checkpoint-[46]")


def test_the_same_seed_is_the_same_run_and_another_is_not(quick, tmp_path):
    a = quick
    b, c = (train("single_fp32", tmp_path / name, *QUICK, "--seed", seed) for name, seed in (("b", 0), ("c", 1)))
    assert record(a)["args"]["seed"] == 0
    assert distance(a, b) == 0 and distance(a, c) > 1e-3
    assert all(torch.isfinite(tensor).all() for tensor in weights(c).values())


def prepares(model):
    accelerator = Accelerator(project_dir=sys.argv[2])
    if model:
        loss = accelerator.prepare(nn.Linear(2, 2))(torch.ones(1, 2)).sum()
        loss.backward()  # and steps by an optimizer of its own, as fastai's Learner
    if model == "saved":
        accelerator.save_state()
    accelerator.end_training()


@pytest.mark.parametrize("model", [False, True, "saved"])
def test_a_script_of_which_nothing_is_seen_is_told(tmp_path, model):
    """As `-m lm_eval` on one device, which computes in the model's own dtype and prepares no model."""
    train("single_bf16", tmp_path / "run", script=functools.partial(prepares, model))
    log, why = (tmp_path / "run.log").read_text(), ("the script has prepared no", "no prepared optimizer has")
    assert [log.count(f"note: {line}") for line in why] == [not model, bool(model)]


@pytest.mark.parametrize(
    ("body", "told"),
    [("", True), ("exit(0)", True), ("exit(3)", False), ("1/0", False), ("ending.made.append(None)", False)],
)
def test_a_script_that_makes_no_accelerator_is_told(tmp_path, monkeypatch, capsys, body, told):
    """As fastai's Learner in one process: what it trains has nothing of the config."""
    (script := tmp_path / "mine.py").write_text(f"from faithful import ending\n{body}")
    for what, name, value in ((door, "take_its_place", lambda: 1), (ending, "made", []), (sys, "path", sys.path[:])):
        monkeypatch.setattr(what, name, value)
    monkeypatch.setattr(sys, "argv", [])
    with contextlib.suppress(SystemExit, ZeroDivisionError):
        door.main([str(script)])
    assert ("note: the script has made no Accelerator" in capsys.readouterr().out) is told
