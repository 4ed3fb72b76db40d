"""Processes take their optimizer steps together. How many backward passes each has had before is its own."""

import functools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from accelerate.utils import set_seed
from conftest import Ranks, metrics, record, train
from torch import nn
from torch.utils.data import DataLoader

from faithful import Accelerator
from faithful.launch import rank_sync


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def batches():
    """[step][process][micro-batch]"""
    torch.manual_seed(1)
    return torch.randn(4, 2, 3, 4, 16)


def loss_of(model, x):
    return (model(x).float() - x).square().mean()


# Each trains a step: (accelerator, model, the micro-batches of this process)


def skips_some(accelerator, model, optimizer, micro_batches):
    """One process has nothing to learn in the second micro-batch."""
    for at, x in enumerate(micro_batches):
        with accelerator.accumulate(model):
            if not left_out(accelerator.process_index, at):
                accelerator.backward(loss_of(model, x))
                optimizer.step()
                optimizer.zero_grad()


def by_itself(accelerator, model, optimizer, micro_batches):
    """Without accumulate(), and with as many backward passes as there are micro-batches to learn from."""
    mine = [x for at, x in enumerate(micro_batches) if not left_out(accelerator.process_index, at)]
    for x in mine[:-1]:
        with accelerator.no_sync(model):
            accelerator.backward(loss_of(model, x) / 3)
    accelerator.backward(loss_of(model, mine[-1]) / 3)
    optimizer.step()
    optimizer.zero_grad()


def averages_itself(accelerator, model, optimizer, micro_batches):
    """One process may have none at all, as the script averages the gradients."""
    with accelerator.no_sync(model):
        for at, x in enumerate(micro_batches):
            if accelerator.process_index == 0 or left_out(0, at):
                continue
            accelerator.backward(loss_of(model, x) / 3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = accelerator.reduce(parameter.grad, "mean")
    optimizer.step()
    optimizer.zero_grad()


def left_out(process, at):
    return process == 1 and at == 1


def learned(way, process, at):
    return process == 1 if way is averages_itself else not left_out(process, at)


def trained(way, poisoned=False):
    """What a rank runs."""
    accelerator = Accelerator(project_dir=sys.argv[2], gradient_accumulation_steps=3 if way is skips_some else 1)
    model = built()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    for step, of_processes in enumerate(batches()):
        mine = of_processes[accelerator.process_index]
        if poisoned and step == 2 and accelerator.process_index == 1:
            mine[2] = torch.nan
        way(accelerator, model, optimizer, mine)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        apart = max((state[name].float() - value).abs().max().item() for name, value in by_torch(way).items())
        print(f"apart: {apart}", flush=True)
    accelerator.end_training()


def by_torch(way):
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for of_processes in batches():
        for process, micro_batches in enumerate(of_processes):
            for at, x in enumerate(micro_batches):
                if learned(way, process, at):
                    (loss_of(model, x) / 3 / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("way", [skips_some, by_itself, averages_itself])
def test_with_other_numbers_of_backward_passes_they_train_as_torch_does(tmp_path, way):
    """Not under FSDP2, where each pass needs all processes."""
    train("ddp_fp32", tmp_path / "run", script=functools.partial(trained, way))
    log = (tmp_path / "run.log").read_text()
    assert float(re.search(r"apart: (\S+)", log).group(1)) < 1e-5


@pytest.mark.parametrize("config", ["fsdp_fp32", "zero2_bf16"])
def test_where_processes_exchange_in_each_pass_one_that_skips_is_refused(tmp_path, monkeypatch, config):
    monkeypatch.setattr(rank_sync, "SKIPS", 2)
    ranks = Ranks(config, ["--output_dir", str(tmp_path / "run")], script=functools.partial(trained, skips_some))
    assert ranks.wait()[1] == 2  # the other one is in a collective until the launcher, or `wait`, ends it
    log = ranks.text()
    assert "refused: this process skips a micro-batch that another one computes" in log and "Traceback" not in log


def test_the_loss_of_each_is_said_when_one_is_not_finite(tmp_path):
    train("ddp_fp32", tmp_path / "run", script=functools.partial(trained, skips_some, poisoned=True), code=1)
    log = (tmp_path / "run.log").read_text()
    assert re.search(r"error: step 3: loss \[\d\.\d+, nan\] \(one per rank\)", log) and "Traceback" not in log


# ---- on a GPU, where the host does not wait ----

ON_A_GPU = """
import os, sys, torch
from accelerate import Accelerator
from faithful.training import steps
accelerator = Accelerator(project_dir=sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
make, wrong, then = sys.argv[3:]
if "kill" in then:
    steps.AGREE_SECONDS = 0  # in each step
model, optimizer = accelerator.prepare(model, eval("torch.optim." + make, {"torch": torch, "all": model.parameters()}))

def weights():
    return [getattr(parameter, "_local_tensor", parameter).detach().clone() for parameter in model.parameters()]

last = accelerator.process_index == accelerator.num_processes - 1
for step in range(1, 11):
    loss = model(torch.randn(4, 32, device=accelerator.device)).float().square().mean()
    if wrong == "loss" and step == 6 and last:
        loss = loss + torch.inf  # its gradient is finite
    accelerator.backward(loss)
    if wrong == "norm" and step == 6:
        next(model.parameters()).grad.mul_(torch.nan)
    before = weights()
    try:
        optimizer.step()
    finally:
        same = all(map(torch.equal, map(torch.Tensor.cpu, before), map(torch.Tensor.cpu, weights())))
        print(f"step {step} changes", "nothing" if same else "weights", flush=True)
    optimizer.zero_grad()
    print("loss:", loss.item(), flush=True)
    if step == 6 and then == "break":
        break
    if step >= 6:
        exec(then)
"""


def on_a_gpu(gpu, tmp_path, config, make, wrong="", then="", code=0):
    """Returns (folder, output)."""
    script = tmp_path / "script.py"
    script.write_text(ON_A_GPU)
    processes = 1 if config.startswith("single") else 2
    codes, text = gpu.run(config, tmp_path / "run", make, wrong, then, script=str(script), processes=processes)
    assert set(codes) == {code}, text[-3000:]
    return tmp_path / "run", text


def read(run, rank):
    """How often the host waited for the sixth step's loss and norm, and how often it read the fifth's."""
    found = json.loads(Path(f"{run}.rank{rank}.json").read_text())[5]
    return [sum("training/steps.py" in str(place) for _, place in found[what]) for what in ("waits", "behind")]


FUSED = ("AdamW(all, 0.1, fused=True)", "SGD(all, 0.1, 0.9, weight_decay=0.1, fused=True)", "Adagrad(all, fused=True)")


@pytest.mark.parametrize(
    ("config", "make", "wrong", "waits"),
    [
        ("single_bf16", FUSED[0], "loss", 0),
        ("single_bf16", FUSED[1], "norm", 0),
        ("single_bf16", FUSED[2], "norm", 0),
        ("single_fp8", FUSED[0], "norm", 0),
        ("ddp_fp32", FUSED[0], "loss", 0),
        ("fsdp_bf16", FUSED[0], "loss", 0),
        ("fsdp_bf16", FUSED[0], "norm", 0),
        ("single_fp32", "AdamW(all, 0.1)", "loss", 1),
        ("single_fp32", "RMSprop(all, 0.1)", "norm", 1),
        ("single_fp16", FUSED[0], "loss", 1),  # a gradient scaler skips a step of which the norm alone is not finite
        ("single_fp8_msamp_o2", FUSED[0], "loss", 0),
        ("fsdp_fp8_msamp_o2", FUSED[0], "norm", 0),
    ],
)
def test_what_is_not_finite_changes_no_weight_and_fused_optimizers_do_not_wait(
    gpu, tmp_path, config, make, wrong, waits
):
    run, text = on_a_gpu(gpu, tmp_path, config, make, wrong, code=1)
    said = re.findall(
        r"error: (step \d): (gradient norm nan|loss \[.*inf\]).* is not finite; nothing was updated", text
    )
    assert said and {step for step, _ in said} == {"step 6"}, text[-2000:]
    moved = re.findall("step ([67]) changes (.*)", text)
    at = {"6"} if waits else {"6", "7"}  # the next one finds it, before it changes anything
    assert {step for step, _ in moved} == at and {what for _, what in moved} == {"nothing"}
    assert record(run)["status"] == "failed" and record(run)["seen"]["loss_curve"][-1][0] <= 5
    for rank in range(1 if config.startswith("single") else 2):
        assert read(run, rank) == [waits, 0 if waits else 1]


@pytest.mark.parametrize(
    "then",
    [
        "accelerator.save_state()",
        "accelerator.log({'loss': float(loss)}, step=6)",
        "accelerator.save_model(model, sys.argv[2] + '/model')",
        "accelerator.end_training()",
        "break",
        "sys.exit()",
    ],
)
def test_nothing_is_written_of_a_step_that_the_host_has_not_looked_at(gpu, tmp_path, then):
    config = "ddp_bf16" if then == "accelerator.save_state()" else "single_bf16"
    run, text = on_a_gpu(gpu, tmp_path, config, FUSED[0], "norm", then, code=1)
    assert "error: step 6: gradient norm nan is not finite" in text and "Traceback" not in text, text[-2000:]
    assert "step 7" not in text and record(run)["status"] == "failed"
    assert not (run / "metrics.jsonl").read_text()
    assert {path.name for path in run.iterdir()} <= {"run.json", "metrics.jsonl", "error-rank1.json"}


def test_each_loss_is_in_the_record_whenever_it_is_read(gpu, tmp_path):
    """The first ones at once, the others a step later, the last one at the end."""
    then = "if step == 6: accelerator.save_state(), accelerator.log({'taken': accelerator.steps.taken})"
    run, text = on_a_gpu(gpu, tmp_path, "single_fp32", FUSED[0], then=then)
    assert metrics(run)[-1]["taken"] == 6 and re.findall("changes (.*)", text) == ["weights"] * 10
    assert (run / "checkpoint-6" / "manifest.json").exists()
    losses = [float(loss) for loss in re.findall("loss: (.*)", text)]
    assert record(run)["seen"]["loss_curve"] == [[at + 1, loss] for at, loss in enumerate(losses)]


@pytest.mark.parametrize(("config", "stops_at"), [("single_bf16", 7), ("ddp_bf16", 8)])
def test_processes_stop_together_though_one_has_read_before(gpu, tmp_path, config, stops_at):
    """One process knows by itself. Several tell each other with the next step, and the main one, which alone logs here,
    may not stop before the others know."""
    then = "last and step == 6 and os.kill(os.getpid(), 15)\nif accelerator.is_main_process: accelerator.log({'a': 1})"
    run, text = on_a_gpu(gpu, tmp_path, config, FUSED[0], then=then, code=143)
    assert {*re.findall("step ([^1-6].*) changes", text)} == {str(step) for step in range(7, stops_at + 1)}
    assert f"SIGTERM: stopped after step {stops_at}" in text and record(run)["status"] == "preempted"


def draws(rate, own):
    """What a rank runs: two steps, with an epoch that shuffles and perhaps dropout. own: a seed for each process."""
    accelerator = Accelerator()
    set_seed(0)
    model, data = nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate), nn.Linear(8, 8)), torch.randn(16, 8)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    set_seed(1, device_specific=own)
    for x in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


@pytest.mark.parametrize(("rate", "own", "said"), [(0.5, False, 1), (0.5, True, 0), (0, False, 0)])
def test_the_same_random_numbers_in_all_processes_are_said(tmp_path, rate, own, said):
    train("ddp_fp32", tmp_path / "run", script=functools.partial(draws, rate, own))
    log = (tmp_path / "run.log").read_text()
    assert log.count("all processes draw the same random numbers, as the same dropout masks or noise") == said, log
