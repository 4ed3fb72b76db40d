"""What scripts do with Accelerate, habit by habit, by `python -m faithful`: kept as it is, or refused in one line."""

import json
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.local_sgd import LocalSGD
from accelerate.tracking import GeneralTracker
from accelerate.utils import GradientAccumulationPlugin, set_seed
from conftest import Ranks, distance, record, refusal, train, weights
from torch.nn.utils import clip_grad_norm_ as clip, clip_grad_value_ as by_value, clip_grads_with_norm_ as by_norm

from faithful import __main__ as door
from faithful.checkpoint import checkpoints


def step(accelerator, model, optimizer, x):
    accelerator.backward((model(x) - x).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def each(accelerator, model, optimizer, loader):
    for x in loader:
        step(accelerator, model, optimizer, x)


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def loop(epoch=each, batch=16, dtype=torch.float64, optimizer=SGD, **arguments):
    """What a rank runs: an epoch of 64 samples, in batches of so many on each process."""
    accelerator = Accelerator(project_dir=sys.argv[2], **arguments)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)).to(dtype)
    loader = torch.utils.data.DataLoader(torch.randn(64, 16, dtype=dtype), batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer(model.parameters()), loader)
    epoch(accelerator, model, optimizer, loader)
    accelerator.save_model(model, f"{sys.argv[2]}/model")
    accelerator.end_training()


def as_with_m_faithful(function, *args, **kwargs):
    """What Ranks takes for a function that knows Accelerate alone."""
    return {"script": partial(function, *args, **kwargs), "before": lambda rank: door.take_its_place()}


def accumulate(accelerator, model, optimizer, loader):
    for x in loader:
        with accelerator.accumulate(model):
            step(accelerator, model, optimizer, x)


def accumulate_by_hand(accelerator, model, optimizer, loader):
    for at, x in enumerate(loader):
        with nullcontext() if at % 2 else accelerator.no_sync(model):
            accelerator.backward((model(x) - x).square().mean() / 2)
        if at % 2:
            optimizer.step()
            optimizer.zero_grad()


HABITS = {
    "accumulate": {"epoch": accumulate, "batch": 4, "gradient_accumulation_steps": 2},
    "plugin": {
        "epoch": accumulate,
        "batch": 4,
        "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2),
    },
    "no_sync": {"epoch": accumulate_by_hand, "batch": 4},
    "split_batches": {"dataloader_config": DataLoaderConfiguration(split_batches=True)},
    "dispatch_batches": {"batch": 8, "dataloader_config": DataLoaderConfiguration(dispatch_batches=True)},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process, whole batches of 16."""
    folder = tmp_path_factory.mktemp("alone")
    return train("single_fp32", folder / "run", **as_with_m_faithful(loop))


@pytest.mark.parametrize("config", ["ddp_fp32", pytest.param("fsdp_fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_ends_with_the_weights_of_one_process(tmp_path, alone, habit, config):
    """In float64, so that no rounding hides a sample that was left out or counted twice."""
    run = train(config, tmp_path / "run", **as_with_m_faithful(loop, **HABITS[habit]))
    assert distance(alone, run) < 1e-12 and record(run)["seen"]["samples_per_step"] == 16


FLOATS = {"batch": 8, "dtype": torch.float32, "optimizer": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)}


def clipping(call):
    """An epoch with `call(accelerator, model)` before each step of the optimizer."""

    def epoch(accelerator, model, optimizer, loader):
        for x in loader:
            accelerator.backward(100 * (model(x) - x).square().mean())
            call(accelerator, model)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def clipped(folder, config, call, code=0, **changes):
    return train(config, folder, code=code, **as_with_m_faithful(loop, clipping(call), **(FLOATS | changes)))


@pytest.mark.parametrize(
    "config",
    ["single_fp8_msamp_o2", "zero2_bf16"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("ddp_fp8_msamp_o3", "fsdp_fp8_msamp_o2", "fsdp_bf16")],
)
def test_torchs_own_clipping_clips_what_the_accelerators_does(tmp_path, config):
    """Gradients that are FP8 or in parts: torch alone would see some of them, or none."""
    calls = {
        "torch": lambda accelerator, model: clip(model.parameters(), 0.01),
        "ours": lambda accelerator, model: accelerator.clip_grad_norm_(model.parameters(), 0.01),
        "none": lambda accelerator, model: None,
    }
    runs = {name: clipped(tmp_path / name, config, call) for name, call in calls.items()}
    assert distance(runs["torch"], runs["ours"]) == 0 < distance(runs["ours"], runs["none"])


def test_torchs_own_clipping_of_shards_is_that_of_whole_gradients(tmp_path):
    for name, call in (
        ("norm", lambda accelerator, model: clip(model.parameters(), 0.01)),
        ("value", lambda accelerator, model: by_value(model.parameters(), 1e-4)),
        ("ours", lambda accelerator, model: accelerator.clip_grad_value_(model.parameters(), 1e-4)),
    ):
        a, b = (
            clipped(tmp_path / f"{name}_{config}", config, call, dtype=torch.float64, optimizer=SGD)
            for config in ("ddp_fp32", "fsdp_fp32")
        )
        assert distance(a, b) < 1e-12
    assert distance(tmp_path / "value_ddp_fp32", tmp_path / "ours_fsdp_fp32") < 1e-12
    assert distance(tmp_path / "value_ddp_fp32", tmp_path / "norm_ddp_fp32") > 1e-4


@pytest.mark.parametrize(
    ("config", "call", "line"),
    [
        ("single_fp8_msamp_o2", lambda accelerator, model: by_value(model.parameters(), 0.1),
         "MS-AMP's FP8 gradients cannot be clipped by value"),
        ("zero2_bf16", lambda accelerator, model: accelerator.clip_grad_value_(model.parameters(), 0.1),
         "DeepSpeed's gradients cannot be clipped by"),
        ("single_fp8_msamp_o2", lambda accelerator, model: clip(model.parameters(), 0.1, norm_type=1),
         "are clipped by their 2-norm"),
        ("zero2_bf16", lambda accelerator, model: clip(list(model.parameters())[:2], 0.1),
         "zero2 clips all by one norm: pass model.parameters()"),
        ("single_fp8_msamp_o2", lambda accelerator, model: by_norm(model.parameters(), 0.1, torch.ones(())),
         "clip_grads_with_norm_: MS-AMP's FP8 gradients are not in .grad"),
    ],
)  # fmt: skip
def test_what_cannot_be_clipped_is_refused_in_one_line(tmp_path, config, call, line):
    clipped(tmp_path / "run", config, call, code=2)
    log = (tmp_path / "run.log").read_text()
    assert log.count("refused: ") == 1 and line in log and "Traceback" not in log


def local_sgd(accelerator, model, optimizer, loader):
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        for x in loader:
            accelerator.backward((model(x) - x).square().mean())
            optimizer.step()
            local.step()
            optimizer.zero_grad()


def joined(accelerator, model, optimizer, loader, even=None):
    with accelerator.join_uneven_inputs([model], even_batches=even):
        each(accelerator, model, optimizer, loader)


uneven = partial(joined, even=False)


def then_an_uneven_evaluation(accelerator, model, optimizer, loader):
    each(accelerator, model, optimizer, loader)
    with torch.no_grad(), accelerator.join_uneven_inputs([model], even_batches=False):
        seen = sum(len(model(x)) for x in loader)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        accelerator.print("seen", seen, "without a step")


@pytest.mark.parametrize(
    ("config", "habit", "line"),
    [
        ("ddp_fp32", local_sgd, "the gradients were not averaged over the processes"),
        ("ddp_fp8_msamp_o2", local_sgd, "the gradients were not averaged"),  # before LocalSGD's __exit__ fails, too
        ("fsdp_fp32", local_sgd, "LocalSGD lets each process train a model of its own"),
        pytest.param("zero2_bf16", local_sgd, "LocalSGD lets each process train a model", marks=pytest.mark.slow),
        ("ddp_fp32", uneven, "join_uneven_inputs without even batches: a process that has none left would miss"),
    ],
)
def test_what_would_train_a_model_in_each_process_is_refused(tmp_path, config, habit, line):
    log = refusal(config, tmp_path / "run", **as_with_m_faithful(loop, habit, **FLOATS))
    assert log.count("refused: ") == 1 and line in log


def test_uneven_batches_in_an_evaluation(tmp_path):
    """They are refused only where they train."""
    train("ddp_fp32", tmp_path / "run", **as_with_m_faithful(loop, then_an_uneven_evaluation, **FLOATS))
    assert "seen 32 without a step" in (tmp_path / "run.log").read_text()


def begins_an_uneven_evaluation(accelerator, model, optimizer, loader):
    each(accelerator, model, optimizer, loader)
    loader.batch_sampler.even_batches = False  # as pytorch-accelerated's Trainer does
    with torch.no_grad():
        model(next(iter(loader)))


@pytest.mark.parametrize("config", ["ddp_fp32", "fsdp_fp32"])
def test_uneven_batches_are_named_where_a_process_cannot_evaluate_alone(tmp_path, config):
    """Before FSDP2 waits in the last one for who has none."""
    train(config, tmp_path / "run", **as_with_m_faithful(loop, begins_an_uneven_evaluation, **FLOATS | {"batch": 24}))
    line = "note: a loader with even_batches=False gives some processes 2 batches and others 1: a pass that needs all"
    assert ((tmp_path / "run.log").read_text().count(line) == 1) == (config == "fsdp_fp32")


def test_in_one_process_the_same_habits_run(tmp_path, alone):
    """Accelerate's LocalSGD does nothing there; with even batches nobody waits for anybody."""
    local = train("single_fp32", tmp_path / "local", **as_with_m_faithful(loop, local_sgd))
    even = train("ddp_fp32", tmp_path / "even", **as_with_m_faithful(loop, joined, batch=8))
    assert distance(alone, local) == 0 and distance(alone, even) < 1e-12


class Lines(GeneralTracker):
    name, requires_logging_directory, tracker = "lines", False, None

    def store_init_configuration(self, values):
        open(f"{sys.argv[2]}.tracked", "a").write(json.dumps(values) + "\n")

    def log(self, values, step=None, **kwargs):
        open(f"{sys.argv[2]}.tracked", "a").write(json.dumps(values) + "\n")


class Cursor:
    at = 0

    def state_dict(self):
        return {"at": self.at, "mean": torch.full((2,), float(self.at))}

    def load_state_dict(self, state):
        self.at, self.mean = state["at"], state["mean"]


def all_habits_at_once():
    out, again = sys.argv[2], sys.argv[3:]
    accelerator = Accelerator(project_dir=out, log_with=Lines())
    set_seed(0)
    accelerator.init_trackers("mine", {"rate": 0.1})
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = torch.utils.data.DataLoader(torch.randn(64, 16), 4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    cursor = Cursor()
    accelerator.register_for_checkpointing(cursor)
    if again:
        accelerator.load_state(again[0])
        assert cursor.at == 4 and cursor.mean.tolist() == [4, 4], cursor.at
        loader = accelerator.skip_first_batches(loader, cursor.at)
    for x in loader:
        loss = (model(x).float() - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        cursor.at += 1
        accelerator.log({"loss": loss.item()}, step=cursor.at)
        if cursor.at == 4 and not again:
            accelerator.save_state(f"{out}/checkpoint-4")
            accelerator.prepare(torch.utils.data.DataLoader(x))  # a second prepare says no note again
        if cursor.at == 6 and accelerator.process_index == accelerator.num_processes - 1:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    assert cursor.at == 6, "all processes end with the one that asked for it"
    whole = accelerator.get_state_dict(model)
    accelerator.save_model(model, f"{out}/model")
    if accelerator.is_main_process:
        torch.save({name: value.clone() for name, value in whole.items()}, f"{out}/whole.pt")
    accelerator.end_training()


@pytest.mark.parametrize(
    "config", ["ddp_fp32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp_bf16", "zero2_bf16"))]
)
def test_what_is_registered_tracked_triggered_and_saved(tmp_path, config):
    here = as_with_m_faithful(all_habits_at_once)
    run = train(config, tmp_path / "whole", **here)
    assert checkpoints.unsound(run / "checkpoint-4") is None
    whole, saved = torch.load(run / "whole.pt"), weights(run)
    assert whole.keys() == saved.keys() and all(whole[name].equal(saved[name]) for name in saved)
    tracked = [json.loads(line) for line in (tmp_path / "whole.tracked").read_text().splitlines()]
    logged = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert tracked[0] == {"rate": 0.1} and [line["loss"] for line in tracked[1:]] == logged and len(logged) == 6
    assert record(run)["args"] == {"rate": 0.1}
    said = [line for line in record(run)["notes"] if "steps a prepared scheduler 2 times" in line]
    assert len(said) == 1 == (tmp_path / "whole.log").read_text().count("note: ")
    ranks = Ranks(config, ["--output_dir", str(tmp_path / "part"), str(run / "checkpoint-4")], **here)
    assert set(ranks.wait()) == {0}, ranks.text()
    assert distance(run, tmp_path / "part") == 0
