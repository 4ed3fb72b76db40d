"""Scripts that are not recipes: plain Accelerate loops in which only `from faithful import Accelerator` is ours."""

import collections
import json
import os
import random
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.utils import ProjectConfiguration
from conftest import CONFIGS, ROOT, SCRIPTS, Ranks, distance, free_port, launched, metrics, record, refusal, train
from loop import by_accelerator, loop
from safetensors.torch import load_file

from faithful import Accelerator, Refused
from faithful.checkpoint import checkpoints
from faithful.tensors import random_states, serialization
from tools import export, show


def load_state(run):
    run.accelerator.load_state(sys.argv[3])


def save_state(run):
    run.accelerator.save_state()


def test_a_ten_line_loop_by_accelerate_launch(tmp_path):
    script, out = SCRIPTS / "loop.py", tmp_path / "run"
    result = launched(sys.executable, "-m", "accelerate.commands.launch", "--config_file", CONFIGS / "ddp_bf16.yml",
                      "--main_process_port", str(free_port()), script, "--output_dir", out,
                      cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    made = record(out)
    assert (made["recipe"], made["status"], made["schema_version"]) == ("loop", "finished", 3)
    assert made["final"] is None and made["args"] == {}  # it logs nothing and starts no tracker
    seen, evidence = made["seen"], made["evidence"]
    assert seen["samples_per_step"] == 16 and seen["optimizer"]["class"] == "AdamW"
    assert seen["optimizer"]["groups"][0]["lr"] == 1e-2
    assert [step for step, _ in seen["loss_curve"]] == [1, 2, 3, 4]
    assert seen["loss_curve"][-1][1] < seen["loss_curve"][0][1]
    assert evidence["optimizer_owns_all"] and evidence["bytes_per_parameter"]["total"] == 16
    assert evidence["dtypes"]["linear_output"] == "bfloat16" and evidence["parameters"] == 16 * 32 * 2 + 32 + 16
    assert result.stdout.count("asked: loop | ddp x2 | bf16 | rehearsal on a CPU") == 1
    assert f"loop | {evidence['measured']} | global batch 16" in result.stdout
    twin = train("ddp_bf16", tmp_path / "twin", script=script)
    assert record(twin)["seen"] == seen


APART = ("model", "optimizer loader")


@pytest.mark.parametrize(
    ("config", "calls"),
    [
        ("ddp_fp32", ("loader", "model optimizer")),
        ("single_fp8_te", ("optimizer model", "loader")),
        ("single_fp8_te", APART),
        ("fsdp_bf16", APART),
        ("ddp_fp8_msamp_o3", APART),
        ("ddp_fp8_msamp_o2", ("loader", "optimizer model")),
    ],
)
def test_in_several_calls_and_any_order_prepare_does_the_same(tmp_path, config, calls):
    a = train(config, tmp_path / "a", script=loop)
    b = train(config, tmp_path / "b", script=partial(loop, *calls))
    assert record(a)["evidence"] == record(b)["evidence"] and record(a)["seen"] == record(b)["seen"]


@pytest.mark.parametrize(
    ("config", "calls", "line"),
    [
        ("zero2_bf16", APART, "needs a model and its optimizer in one call"),
        ("fsdp_bf16", ("optimizer", "model loader"), "prepare both in one call, or the model first"),
    ],
)
def test_where_model_and_optimizer_must_come_together_it_says_so(tmp_path, config, calls, line):
    log = refusal(config, tmp_path / "run", script=partial(loop, *calls))
    assert line in log
    assert not (tmp_path / "run").exists()


def test_a_script_that_contradicts_its_config_does_not_train(tmp_path):
    contradicts = partial(loop, mixed_precision="fp16", dynamo_backend="inductor")
    log = refusal("single_bf16", tmp_path / "run", script=contradicts)
    assert "refused: the script passes mixed_precision='fp16', the config says bf16" in log
    assert "refused: the script passes dynamo_backend" in log
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("config", "code"), [("ddp_fp32", 0), ("fsdp_fp32", 2), ("single_fp8", 2)])
def test_an_optimizer_that_is_not_prepared_is_noted_where_its_steps_are_right(tmp_path, config, code):
    """Under DDP the gradients are averaged. FSDP2 would leave it with whole weights that nobody uses."""
    run = train(config, tmp_path / "run", script=partial(loop, "model loader"), code=code)
    log = (tmp_path / "run.log").read_text()
    if code:
        assert log.count("refused: no model and optimizer were prepared") == 1
    else:
        assert log.count("note: no prepared optimizer updates a prepared model: steps are neither checked") == 1
        assert record(run)["status"] == "finished" and record(run)["evidence"] is None


def poisoned(run):
    if run.accelerator.is_main_process and run.optimizer.state and run.accelerator.steps.taken == 2:
        run.loss = run.loss * torch.nan
    by_accelerator(run)


@pytest.mark.parametrize("config", ["single_bf16", "ddp_fp32"])
def test_a_loss_that_is_not_finite_stops_a_loop_that_neither_clips_nor_logs(tmp_path, config):
    """A NaN loss stops a loop that neither clips nor logs, before it changes the weights. It is rank 0's third loss."""
    run = train(config, tmp_path / "run", script=partial(loop, backward=poisoned), code=1)
    log = (tmp_path / "run.log").read_text()
    assert "error: step 3: loss [nan" in log and "Newest checkpoint: none" in log and "Traceback" not in log
    assert record(run)["status"] == "failed" and [step for step, _ in record(run)["seen"]["loss_curve"]] == [1, 2]


def test_the_first_batch_is_the_same_on_any_number_of_processes(tmp_path):
    """The hash of the first batch depends on its samples and thus on the seed, not on their order, the number of
    processes or micro-batches."""
    argv = ("--max_steps", 1, "--save_steps", 0, "--per_device_train_batch_size")
    one = train("single_fp32", tmp_path / "one", *argv, 16)
    two = train("ddp_fp32", tmp_path / "two", *argv, 4, "--gradient_accumulation_steps", 2)
    other = train("single_fp32", tmp_path / "other", *argv, 16, "--seed", 1)
    a, b, c = (record(run)["seen"] for run in (one, two, other))
    assert a["samples_per_step"] == b["samples_per_step"] == 16
    assert len(a["first_batch"]) == 64 and a["first_batch"] == b["first_batch"] != c["first_batch"]
    assert a["loss_curve"][0][1] == pytest.approx(b["loss_curve"][0][1], rel=1e-6)
    assert a["optimizer"] == b["optimizer"] and a["optimizer"]["class"] == "AdamW"
    assert metrics(one)[0]["loss"] == pytest.approx(a["loss_curve"][0][1], rel=1e-6)


class Cursor:
    """An object that a script might register."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_what_a_script_registers_is_kept_without_a_pickle():
    value = {
        "step": 3, "rate": 0.25, "name": "a", "nothing": None, "on": True, "list": [1, [2.5]], "tuple": (1, ("b", 2)),
        "tensor": torch.arange(6).view(2, 3), "numbers": np.array([1.5, 2.5]), 7: "seven", ("a", 1): [torch.ones(2)],
        "!": "a key that the format itself uses", "inner": {"!": 1}, "set": {1, "b"}, "float32": np.float32(2.5),
        "last losses": collections.deque([1, 2], maxlen=2), "a.b": torch.zeros(1), "a": {"b": torch.ones(1)},
        "counter": collections.Counter("aab"), "ordered": collections.OrderedDict(b=1, a=2),
        "lists": collections.defaultdict(list, {3: [1]}),
    }  # fmt: skip
    tensors = {}
    text = json.dumps(serialization.pack(value, tensors, "registered"))
    back = serialization.unpack(json.loads(text), tensors)
    assert back.keys() == value.keys() and type(back["tuple"]) is tuple
    for key in value.keys() - {"tensor", "numbers", ("a", 1)}:
        assert back[key] == value[key] and type(back[key]) is type(value[key]), key
    assert back["last losses"].maxlen == 2 and back["counter"]["none"] == 0 and back["lists"]["none"] == []
    assert back["tensor"].equal(value["tensor"]) and (back["numbers"] == value["numbers"]).all()
    assert back[("a", 1)][0].equal(torch.ones(2))
    for thing in (Cursor(), {Cursor()}, {"deep": [Cursor()]}, np.array(["a"], dtype=object)):
        with pytest.raises(Refused, match="which a checkpoint without a pickle cannot hold"):
            serialization.pack({"it": thing}, {}, "registered")


def test_every_generator_goes_on_where_it_was():
    def drawn():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()

    random.gauss(0, 1), np.random.randn()  # each keeps a second number for the next call
    held = {name: tensor.clone() for name, tensor in random_states.of_process().items()}
    first, second = drawn(), drawn()
    random_states.set_process(held)
    assert drawn() == first != second


def with_a_schedule(run):
    run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2)
    run.model.insert(0, torch.nn.Dropout())


def go_on_after_four(run):
    if sys.argv[3:]:
        load_state(run)
        run.loader = run.accelerator.skip_first_batches(run.loader, 4)


def schedule_and_save(run):
    run.scheduler.step()
    if run.accelerator.steps.taken == 4:
        run.accelerator.save_state(f"{sys.argv[2]}/checkpoint-4")


def test_a_loop_of_ones_own_resumes_as_the_same_run(tmp_path):
    """A loop with Accelerate's own calls resumes as the same run: a prepared scheduler, dropout, save_state,
    load_state, skip_first_batches."""
    script = partial(
        loop,
        "model optimizer loader scheduler",
        made=with_a_schedule,
        prepared=go_on_after_four,
        stepped=schedule_and_save,
    )
    whole = train("single_bf16", tmp_path / "whole", script=script)
    assert checkpoints.unsound(whole / "checkpoint-4") is None
    ranks = Ranks("single_bf16", ["--output_dir", str(tmp_path / "part"), str(whole / "checkpoint-4")], script=script)
    assert ranks.wait() == [0], ranks.text()
    a, b = (record(run)["seen"]["loss_curve"] for run in (whole, tmp_path / "part"))
    assert a[4:] == b and len(b) == 4 and distance(whole, tmp_path / "part") == 0
    assert "optimizer steps" in (table := show.text(tmp_path / "part")) and "8, resumed at step 4" in table
    assert Ranks("single_bf16", ["--output_dir", str(whole), str(whole / "checkpoint-4")], script=script).wait() == [0]
    assert record(whole)["seen"]["loss_curve"] == a, "resumed in its own folder it is one curve"


def test_a_folder_that_is_saved_to_again_is_never_without_a_checkpoint(tmp_path):
    """The process is killed in the middle of the second save: before it is complete, and while its files are moved to
    their places. The script's own file in the folder stays."""

    def saving(run):
        run.accelerator.save_state(f"{sys.argv[2]}/last")

    def resume(run):
        run.accelerator.load_state(f"{sys.argv[2]}/last")

    for at, nth, step in (("manifest.json", 2, 1), ("trainer_state.json", 3, 2)):

        def killed(rank, at=at, nth=nth):
            replace, times = os.replace, []

            def counted(a, b):
                times.extend([a] if os.path.basename(b) == at else [])
                return os._exit(9) if len(times) == nth else replace(a, b)

            os.replace = counted

        run = tmp_path / at
        train("single_fp32", run, script=partial(loop, stepped=saving), before=killed, code=9)
        (run / "last" / "notes.txt").write_text("the script's own")
        assert (run / "last" / ".checkpoint.tmp").exists()
        ranks = Ranks("single_fp32", ["--output_dir", str(run)], script=partial(loop, prepared=resume))
        assert ranks.wait() == [0] and f"resumed from {run}/last at step {step}" in ranks.text()
        assert (run / "last" / "notes.txt").exists()


def test_accelerates_automatic_names_are_pruned_and_gone_on_with(tmp_path):
    """With automatic naming, checkpoints/checkpoint_<n>, at most total_limit are kept, and a resumed run overwrites
    none."""

    def resume(run):
        if sys.argv[3:]:
            run.accelerator.load_state()

    def save(run):
        if run.accelerator.steps.taken % 3 == 0:
            save_state(run)

    project = ProjectConfiguration(str(tmp_path / "run"), automatic_checkpoint_naming=True, total_limit=2)
    script = partial(loop, project_dir=None, project_config=project, prepared=resume, stepped=save)
    run = train("single_fp32", tmp_path / "run", script=script)
    first = checkpoints.list_checkpoints(run / "checkpoints")
    assert [path.name for path in first] == ["checkpoint_1", "checkpoint_0"]
    again = train("single_fp32", run, "again", script=script)
    assert "checkpoint_1 at step 6" in (tmp_path / "run.log").read_text()
    assert [path.name for path in checkpoints.list_checkpoints(again / "checkpoints")] == [
        "checkpoint_3",
        "checkpoint_2",
    ]


def rolls_back():
    """What a rank runs: it goes back to its first checkpoint once, and saves on."""
    project = ProjectConfiguration(sys.argv[2], automatic_checkpoint_naming=True)
    accelerator, model = Accelerator(project_config=project), torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(4):
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
        if step == 2:
            accelerator.load_state(f"{sys.argv[2]}/checkpoints/checkpoint_0")


def test_a_run_that_goes_back_does_not_meet_its_own_checkpoints(tmp_path):
    run = train("single_fp32", tmp_path / "run", script=rolls_back)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"checkpoint_{n}" for n in range(4)]


@pytest.mark.parametrize("words", [["accelerates.py"], ["-m", "accelerates"]])
def test_an_unchanged_script_under_a_config_that_wins(tmp_path, monkeypatch, words):
    """`python -m faithful --config_wins SCRIPT` or `-m MODULE`: the script's own precision and handlers are dropped."""
    monkeypatch.chdir(SCRIPTS)
    argv = ["--config_wins", *words, "--output_dir", str(tmp_path / "run"), "stubborn"]
    ranks = Ranks("ddp_bf16", argv, script=ROOT / "faithful" / "__main__.py")
    assert ranks.wait() == [0, 0], ranks.text()
    made = record(tmp_path / "run")
    assert made["plan"]["precision"] == "bf16" and made["evidence"]["dtypes"]["linear_output"] == "bfloat16"
    assert "note: the script passes mixed_precision='fp16', the config says bf16: the config wins" in ranks.text()
    assert "GradScalerKwargs) is for fp16, this run is bf16: the config wins" in ranks.text()
    assert [line.partition(": the config")[1:] for line in made["notes"][:2]] == 2 * [(": the config", " wins")]


class Both:
    """Two optimizers as one."""

    def __init__(self, *each):
        self.each = each

    def step(self):
        [one.step() for one in self.each]

    def zero_grad(self):
        [one.zero_grad() for one in self.each]


def one_for_each_layer(run):
    run.one, run.two = (torch.optim.AdamW(part.parameters(), 1e-2) for part in (run.model[0], run.model[2]))


def with_hooks(run):
    run.optimizer = Both(run.one, run.two)
    run.accelerator.register_save_state_pre_hook(lambda m, w, folder: Path(folder, "mine.txt").write_text("kept"))
    run.accelerator.register_load_state_pre_hook(lambda m, folder: print("mine:", Path(folder, "mine.txt").read_text()))
    if sys.argv[3:]:
        load_state(run)


def test_two_optimizers_of_one_model_count_once_and_come_back(tmp_path):
    """Each optimizer has its own parameters, hooks of the script's write and read files of its own, and it calls
    backward itself."""
    script = partial(
        loop,
        "model one two loader",
        made=one_for_each_layer,
        prepared=with_hooks,
        backward=lambda run: run.loss.backward(),
    )
    run = train("single_bf16", tmp_path / "run", script=partial(script, saved=save_state))
    evidence = record(run)["evidence"]
    assert evidence["optimizer_owns_all"] and evidence["bytes_per_parameter"]["total"] == 16.0
    assert (run / "checkpoint-8" / "mine.txt").read_text() == "kept"
    train("single_bf16", tmp_path / "again", run / "checkpoint-8", script=script)
    log = (tmp_path / "again.log").read_text()
    assert "mine: kept" in log and "resumed from" in log and "at step 8" in log


def on_a_base(run, takes, times=1):
    run.model[0].requires_grad_(False).weight.data.mul_(times)
    if takes:
        run.accelerator.register_save_state_pre_hook(lambda _, w, folder: run.accelerator.is_main_process and w.pop())


def resumed(run):
    if sys.argv[3:]:
        load_state(run)


@pytest.mark.parametrize("config", ["single_bf16", "ddp_fp32", "fsdp_fp32"])
def test_a_frozen_base_that_a_hook_takes_out_is_in_no_checkpoint(tmp_path, config):
    """As of scripts that train a LoRA: it is as large as the model. A run that resumes must have built the same."""
    out, ends = "model.safetensors", []
    for takes in (True, False):
        script, folder = partial(loop, prepared=resumed, saved=save_state), tmp_path / str(takes)
        run = train(config, folder, script=partial(script, made=partial(on_a_base, takes=takes)))
        state = next(run.glob("checkpoint-*"))
        names = {name for file in state.glob("rank*") for name in load_file(file) if name.startswith("0:model/")}
        assert ("0:model/0.weight" in names) == (not takes or config == "fsdp_fp32") and "0:model/2.weight" in names
        same, other = (partial(script, made=partial(on_a_base, takes=takes, times=times)) for times in (1, 2))
        again = train(config, tmp_path / f"{takes}2", state, script=same)
        ends.append(load_file(again / "model" / out))
        if takes and config != "fsdp_fp32":
            train(config, tmp_path / "other", state, script=other, code=2)
            assert "has no frozen weights (a hook left them out), and" in (tmp_path / "other.log").read_text()
            with pytest.raises(Refused, match="has no frozen weights, a hook of the script left them out"):
                export.export(run, tmp_path / "out.safetensors", int(state.name.removeprefix("checkpoint-")))
    assert ends[0].keys() == ends[1].keys() and all(ends[0][name].equal(ends[1][name]) for name in ends[0])


def twice():
    loop()
    loop()


def test_a_second_accelerator_has_a_folder_of_its_own(tmp_path):
    run = train("single_fp32", tmp_path / "run", script=twice)
    assert record(run)["seen"]["loss_curve"] == record(run / "run_2")["seen"]["loss_curve"]
    assert not (tmp_path / "run-2").exists() and (run / "model").exists()


def test_another_number_of_registered_objects_is_refused(tmp_path):
    def registered(run):
        run.accelerator.register_for_checkpointing(torch.nn.Linear(2, 2))

    run = train("single_fp32", tmp_path / "run", script=partial(loop, prepared=registered, saved=save_state))
    train("single_fp32", tmp_path / "again", run / "checkpoint-8", script=partial(loop, prepared=load_state), code=2)
    assert "holds 1 registered objects, the script has 0: resume with" in (tmp_path / "again.log").read_text()


def test_zero_takes_the_model_without_its_loader(tmp_path):
    a = train("zero2_bf16", tmp_path / "a", script=loop)
    b = train("zero2_bf16", tmp_path / "b", script=partial(loop, "model optimizer", "loader"))
    assert record(a)["seen"] == record(b)["seen"]


def clip_another(run):
    by_accelerator(run)
    other = torch.nn.Linear(2, 2, bias=False)
    other(torch.ones(1, 2)).sum().backward()
    assert torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0) == 2
    torch.nn.utils.clip_grad_value_(other.parameters(), 0.1)
    assert other.weight.grad.unique().allclose(torch.tensor(0.1))


def test_torchs_clipping_of_another_model_is_torchs(tmp_path):
    """The clipping functions are replaced for parameters of prepared models only."""
    train("single_fp8_msamp_o2", tmp_path / "run", script=partial(loop, backward=clip_another))
