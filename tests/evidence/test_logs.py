"""Folders, the record and what is logged: a script finds what it gets from Accelerate, and the record never stops it."""

import json
import math
import os
import resource
import signal

import pytest
import torch
from conftest import edited, metrics, record
from test_kept import run

from faithful import Refused, plan
from faithful.evidence.record import Record
from faithful.launch import launcher
from faithful.training.steps import Steps

PREPARED = """
model = linear()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
"""


def rows(folder):
    """metrics.jsonl, read as strict JSON, which has no NaN."""

    def fail(name):
        raise ValueError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=fail) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def notes(text):
    return [line for line in text.splitlines() if line.startswith("note: ")]


# ---- folders ----


def test_all_accelerators_keep_the_folder_that_the_script_names(tmp_path):
    """Saves and loads go there. Only the records are in different folders."""
    run(
        tmp_path,
        f"""
shared = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
before = dict(vars(shared))
accelerator = first = Accelerator(project_config=shared)
{PREPARED}
step(model, optimizer)
assert first.save_state() == str(folder / "checkpoints/checkpoint_0")
accelerator = second = Accelerator(project_config=shared)
{PREPARED}
step(model, optimizer)
assert second.save_state() == str(folder / "checkpoints/checkpoint_1")
assert vars(shared) == before | {{"iteration": 2}}
assert {{first.project_dir, second.project_dir, first.logging_dir, second.logging_dir}} == {{str(folder)}}
third = Accelerator(project_dir=folder / ".." / folder.name)
assert third.project_dir == folder / ".." / folder.name
weight = model.weight.detach().clone()
model.weight.data.zero_()
second.load_state()
assert model.weight.equal(weight), "the newest checkpoint of the folder"
for one in (first, second):
    one.end_training()
""",
    )
    folder = tmp_path / "run"
    assert record(folder)["status"] == record(folder / "run_2")["status"] == "finished"
    assert not (tmp_path / "run-2").exists()


def test_folders_that_a_script_does_not_name(tmp_path):
    """A second Accelerator has its record beside the first's. Its ProjectConfiguration gets no folder."""
    run(
        tmp_path,
        f"""
import os
os.chdir(folder.parent)
none = ProjectConfiguration(total_limit=3, logging_dir="mine")
accelerator = first = Accelerator(project_config=none)
{PREPARED}
os.chdir("/")
step(model, optimizer)
saved = first.save_state()
assert none.project_dir is None and first.logging_dir == "mine"
assert saved == f"{{first.project_dir}}/checkpoint-1" and saved.startswith(str(folder.parent / "runs"))
second = Accelerator()
assert second.project_dir == f"{{first.project_dir}}/run_2" == second.logging_dir
""",
    )
    [made] = (tmp_path / "runs").glob("*/run.json")
    assert record(made.parent)["status"] == "finished"


@pytest.mark.parametrize("named", ["project_dir='mine'", "project_config=ProjectConfiguration('mine', 'logs')"])
def test_a_script_that_changes_its_working_directory(tmp_path, named):
    """Its relative folder is where it is then, as in Accelerate; the record stays where it began."""
    run(
        tmp_path,
        f"""
import os
os.chdir(folder.parent)
accelerator = Accelerator({named})
{PREPARED}
step(model, optimizer)
Path("there").mkdir()
os.chdir("there")
assert accelerator.save_state() == "mine/checkpoint-1" and Path("mine/checkpoint-1/manifest.json").exists()
accelerator.log({{"a": 1}})
step(model, optimizer)
assert accelerator.project_dir == "mine"
accelerator.end_training()
""",
    )
    assert record(tmp_path / "mine")["status"] == "finished" and len(metrics(tmp_path / "mine")) == 1


ONCE = f"""
accelerator = Accelerator(project_dir=folder)
{PREPARED}
step(model, optimizer)
accelerator.log({{"a": 1}}, step=1)
accelerator.end_training()
"""


def opened(folder):
    """The record of a new run in `folder`."""
    made = Record(plan.Plan(None, "single", 1, "fp32", "cpu"), folder, folder, True)
    made.open(False, 0)
    made.own.release()
    return made


def test_the_record_has_the_config_as_it_was_launched(tmp_path, monkeypatch):
    file = tmp_path / "mine.yml"
    file.write_text("mixed_precision: bf16\n")
    monkeypatch.setattr(plan, "launch_line", lambda: (["accelerate", "launch"], file))
    made = opened(tmp_path)
    file.write_text("mixed_precision: fp16\n")  # for the next run, while this one lasts
    made.write(Steps(1), [], None)
    assert json.loads((tmp_path / "run.json").read_text())["config"]["text"] == "mixed_precision: bf16\n"


@pytest.mark.parametrize(
    ("status", "how"), [("finished", "is finished"), ("running", "was killed"), (None, "is of unknown state")]
)
def test_a_second_run_in_a_folder_keeps_the_record_of_the_first(tmp_path, capsys, status, how):
    earlier = json.dumps({"status": status, "started": "2026-11-22T08:30:00+0000"}) if status else "{half"
    for again in range(2):
        (tmp_path / "run.json").write_text(earlier)
        (tmp_path / "metrics.jsonl").write_text(f"{again}\n")
        said = f"note: {opened(tmp_path).notes[0]}\nrecord: {tmp_path}\n"
        assert capsys.readouterr().out == said
        assert not (tmp_path / "run.json").exists() and rows(tmp_path) == []
    name = "run_20261122T083000" if status else "run_earlier"
    for again, aside in enumerate((tmp_path / name, tmp_path / f"{name}_2")):
        assert (aside / "run.json").read_text() == earlier and (aside / "metrics.jsonl").read_text() == f"{again}\n"
    (tmp_path / "run.json").write_text(earlier)
    assert f"{tmp_path} holds an earlier run, which {how}: its record is now in {name}_3/" in opened(tmp_path).notes[0]


def test_a_file_of_the_script_with_the_same_name_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine\n")
    opened(tmp_path)
    assert (tmp_path / "run_earlier" / "metrics.jsonl").read_text() == "mine\n" and rows(tmp_path) == []


@pytest.mark.parametrize("locks", [True, False])
def test_a_folder_in_which_a_run_is_running_is_refused(tmp_path, monkeypatch, locks):
    (tmp_path / "run.json").write_text(json.dumps({"status": "running", "started": "2026"}))
    monkeypatch.setattr(launcher, "GRACE", -5)
    held = launcher.lock_folder(tmp_path)
    if not locks:
        monkeypatch.setattr(launcher, "lock_folder", lambda *_: None)
    why = "another run is writing to" if locks else "holds a run that may still be running"
    with pytest.raises(Refused, match=why):
        opened(tmp_path)
    os.close(held)
    assert record(tmp_path)["status"] == "running"
    monkeypatch.undo()
    opened(tmp_path)


def test_a_run_that_has_ended_lets_another_use_its_folder_while_it_lives(tmp_path):
    text = run(
        tmp_path,
        f"""{ONCE}
import subprocess
other = "import os; from faithful.launch import launcher; launcher.GRACE = -5; print('locked', launcher.lock_folder(os.sys.argv[1]))"
print(subprocess.run([sys.executable, "-c", other, folder], capture_output=True, text=True).stdout)
""",
    )
    assert "locked " in text and "locked None" not in text


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path):
    """Accelerate writes nothing there before a script saves something."""
    (tmp_path / "file").touch()
    text = run(
        tmp_path,
        f"""
accelerator = Accelerator(project_dir=folder.parent / "file" / "run")
{PREPARED}
accelerator.init_trackers("mine", {{"a": 1}})
step(model, optimizer)
accelerator.log({{"a": 1}})
step(model, optimizer)
accelerator.end_training()
print("came to its end")
""",
    )
    assert "came to its end" in text and "Traceback" not in text
    assert [line.split("run/")[1] for line in notes(text)] == [
        f"{name} cannot be written (Not a directory): the run goes on without it"
        for name in ("run.json", "metrics.jsonl")
    ]


def test_a_full_disk_costs_whole_lines_of_the_metrics(tmp_path, capsys, monkeypatch):
    made = opened(tmp_path)
    made.log({"a": 1}, 1, 1, torch.device("cpu"))
    size = (tmp_path / "metrics.jsonl").stat().st_size
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    capsys.readouterr()
    for more in (5, 0):  # a part of the next line fits, or nothing
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + more, limits[1]))
        monkeypatch.setattr("builtins.print", lambda *_, **__: None)  # pytest's capture is a file, too
        made.log({"a": 2}, 2, 2, torch.device("cpu"))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    made.log({"a": 3}, 3, 3, torch.device("cpu"))
    assert rows(tmp_path) == [{"step": 1, "a": 1}, {"step": 3, "a": 3}] and len(made.notes) == 1
    assert "metrics.jsonl cannot be written (" in made.notes[0]


# ---- what is logged ----


def test_what_a_tracker_takes_is_logged(tmp_path):
    """metrics.jsonl holds what JSON can, run.json too. A tracker gets the objects themselves."""
    text = run(
        tmp_path,
        f"""
import numpy as np, collections, datetime, enum, argparse
from accelerate.tracking import GeneralTracker

class Mine(GeneralTracker):
    name, requires_logging_directory, tracker = "mine", False, None
    def __init__(self):
        super().__init__()
        self.got, self.configs = [], []
    def store_init_configuration(self, values): self.configs.append(values)
    def log(self, values, step=None, **kwargs): self.got.append((values, step, kwargs))

class Table: pass

one, two = Mine(), Mine()
accelerator = Accelerator(project_dir=folder, log_with=[one, two])
asked = {{"path": folder, "dtype": torch.bfloat16, "rate": np.float32(0.5), "nan": float("nan"), 3: None, "l": [1, "a"]}}
accelerator.init_trackers("mine", asked)
accelerator.log({{"before": torch.tensor(1.5, dtype=torch.bfloat16)}}, step=0)
{PREPARED}
step(model, optimizer)
big, table = np.zeros(1000), Table()
accelerator.log({{"hist": np.ones(3), "big": big, "table": table, "nested": {{"a": np.float32(1), "t": table}}}})
accelerator.log({{np.int64(7): torch.ones(2, requires_grad=True), "one": torch.ones(1, 1), "parameter": model.bias[0]}})
accelerator.log({{"nan": float("nan"), "inf": np.float64("inf"), "t": torch.tensor(-float("inf")), "none": None}}, step=None)
accelerator.log(collections.UserDict(text="hi", flag=np.bool_(True), half=np.float16(0.5), big=2**70), step=np.int64(5))
accelerator.log({{"when": datetime.date.today(), "list": [1, table], "image": [np.zeros((64, 64))], "z": 1j}}, step="x")
accelerator.log({{"step": 3, "meta": torch.ones(2, device="meta")}}, log_kwargs={{"mine": {{"commit": True}}}})
accelerator.log({{}}, step=torch.tensor(9))
accelerator.log("no mapping")
accelerator.end_training()
accelerator.log({{"after": 1}})
assert one.got[1][0]["big"] is big and one.got[1][0]["table"] is table and one.got[0][1] == 0
assert one.configs[0] is asked and len(two.got) == len(one.got) and one.got[6][2] == {{"commit": True}}
""",
    )
    nested = {"a": 1.0}
    assert rows(tmp_path / "run") == [
        {"step": 0, "before": 1.5},
        {"step": 1, "hist": [1.0, 1.0, 1.0], "nested": nested},
        {"step": 1, "7": [1.0, 1.0], "one": 1.0, "parameter": rows(tmp_path / "run")[2]["parameter"]},
        {"step": 1, "nan": "nan", "inf": "inf", "t": "-inf", "none": None},
        {"step": 5, "text": "hi", "flag": True, "half": 0.5, "big": 2**70},
        {"step": 1},
        {"step": 3},
        {"step": 9},
        {"step": 1, "values": "no mapping"},
        {"step": 1, "after": 1},
    ]
    assert len(notes(text)) == 1, "one note for all"
    assert "leaves out big (ndarray), table (Table), nested.t (Table): JSON has no such values" in text
    made = record(tmp_path / "run")
    args = {
        "path": str(tmp_path / "run"),
        "dtype": "torch.bfloat16",
        "rate": 0.5,
        "nan": "nan",
        "3": None,
        "l": [1, "a"],
    }
    assert made["args"] == args and made["final"]["metrics"] == {"after": 1} and made["status"] == "finished"


@pytest.mark.parametrize("asked", ["'wandb'", "['tensorboard', 'wandb']", "LoggerType.WANDB", "'all'", "None"])
def test_a_tracker_that_is_not_installed_is_refused_in_one_line(tmp_path, asked):
    """Accelerate leaves it out, and the run would end without a file of it."""
    named = asked not in ("'all'", "None")
    log = run(tmp_path, f"""
import accelerate.tracking
from accelerate.utils import LoggerType
accelerate.tracking._available_trackers[:] = [LoggerType.TENSORBOARD]
accelerator = Accelerator(log_with={asked}, project_dir=folder)
{PREPARED}
step(model, optimizer)
accelerator.end_training()
""", code=2 if named else 0)  # fmt: skip
    line = "refused: the script logs with wandb, which is not installed: pip install wandb (in a clone: ./launch"
    assert log.count(line) == log.count("refused") == named and "Traceback" not in log


def test_a_tracker_that_needs_a_folder_in_a_run_that_names_none(tmp_path):
    pytest.importorskip("tensorboard")
    run(
        tmp_path,
        f"""
import os
os.chdir(folder.parent)
accelerator = Accelerator(log_with="tensorboard")
accelerator.init_trackers("mine", {{"a": 1}})
{PREPARED}
step(model, optimizer)
accelerator.log({{"a": 1.0}}, step=1)
accelerator.end_training()
assert list(Path(accelerator.logging_dir).glob("mine/events*"))
""",
    )


@pytest.mark.parametrize("config", ["ddp_fp32", "zero2_bf16"])
@pytest.mark.parametrize("who", ["Accelerate divides", "the script divides", "two losses"])
def test_the_loss_of_a_step_is_of_all_its_backward_passes(tmp_path, config, who):
    """As transformers' Trainer prints it, which divides the loss of each micro-batch before Accelerate sees it."""
    steps = 2 if who == "Accelerate divides" else 1
    divisor = 2 if who == "the script divides" else 1
    run(tmp_path, f"""
accelerator = Accelerator(project_dir=folder, gradient_accumulation_steps={steps})
{PREPARED}
for number in range(4):
    accelerator.gradient_state._set_sync_gradients(number % 2 == 1)
    constant = 4.0 + number % 2 - (model(torch.zeros(1, 16)).float() * 0).sum()
    accelerator.backward(constant / {divisor})
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
""", config=config)  # fmt: skip
    want = 4.0 + 5.0 if who == "two losses" else 4.5
    assert [loss for _, loss in record(tmp_path / "run")["seen"]["loss_curve"]] == [want] * 2


def test_a_number_that_is_not_finite_is_not_a_result(tmp_path):
    from tools.records import logged

    run(tmp_path, edited(ONCE, '"a": 1', '"eval_loss": float("nan")'))
    made = record(tmp_path / "run")
    assert math.isnan(logged(made)["eval_loss"])
    assert rows(tmp_path / "run") == [{"step": 1, "eval_loss": "nan"}]


# ---- save_model ----

SAVE = """
from safetensors.torch import load_file
import os
accelerator = Accelerator(project_dir=folder)
model = torch.nn.Sequential(linear(), linear())
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
step(model, optimizer)
weights = accelerator.get_state_dict(model)

def same(folder, ours=weights):
    found = {name: tensor for file in sorted(Path(folder).glob("model*.safetensors")) for name, tensor in load_file(file).items()}
    return found.keys() == ours.keys() and all(found[name].equal(ours[name]) for name in found)

"""


def test_save_model_to_any_folder(tmp_path):
    """The working directory, its root, one with other files, in another number of files than before."""
    run(
        tmp_path,
        f"""{SAVE}
here = folder / "here"
here.mkdir(parents=True)
os.chdir(here)
Path("mine.txt").write_text("x")
Path("model-card.safetensors").write_text("x")
accelerator.save_model(model, ".", max_shard_size="1KB")
assert len(list(here.glob("model-0*"))) > 1
Path("model-card.safetensors").unlink()
assert same(here) and Path("model.safetensors.index.json").exists()
accelerator.save_model(model, "")
assert same(here) and sorted(os.listdir()) == ["mine.txt", "model.safetensors"]
accelerator.save_model(model, here, max_shard_size="1KB")
assert same(here) and not Path("model.safetensors").exists()
accelerator.save_model(model, here, safe_serialization=False)
assert same(here) and Path("pytorch_model.bin").exists() and Path("model.safetensors.index.json").exists()
accelerator.save_model(model, folder / "new" / "deep")
os.symlink(folder / "new", folder / "link")
accelerator.save_model(model, str(folder / "link"))
assert same(folder / "new/deep") and same(folder / "new")
""",
    )


def test_save_model_of_offloaded_weights(tmp_path):
    """Accelerate's own leaves out the parameters of the outermost module."""
    text = run(tmp_path, f"""{SAVE}
from accelerate import cpu_offload, disk_offload

class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.inner = torch.nn.Parameter(torch.ones(3)), linear()
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("left", torch.ones(1), persistent=False)
    def forward(self, x):
        return self.inner(x)

for offload in (cpu_offload, lambda one: disk_offload(one, folder / "disk")):
    outer = Outer()
    whole = {{name: tensor.clone() for name, tensor in outer.state_dict().items()}}
    offload(outer)
    assert outer.inner.weight.is_meta
    accelerator.save_model(outer, folder / "outer")
    assert same(folder / "outer", whole)
accelerator.save_model(torch.nn.Linear(2, 2, device="meta"), folder / "w")
""", code=2)  # fmt: skip
    assert "refused: save_model: 2 parameters are on the meta device, so they have no values" in text
    assert "Traceback" not in text and not (tmp_path / "run" / "w").exists()


def test_save_model_to_a_file_is_said_and_the_run_goes_on(tmp_path):
    text = run(tmp_path, f"""{SAVE}
(folder / "w").write_text("x")
accelerator.save_model(model, folder / "w")
accelerator.end_training()
print("goes on")
""", code=1)  # fmt: skip
    assert "w is a file, save_model writes to a folder: nothing was saved" in text and "goes on" in text
    assert "Traceback" not in text and (tmp_path / "run" / "w").read_text() == "x"


@pytest.mark.parametrize("caught", [True, False])
def test_save_model_on_a_full_disk_keeps_what_was_there(tmp_path, caught):
    """A script may catch the error. Otherwise it ends the run in one line."""
    save = 'accelerator.save_model(model, folder / "w")\n'
    call = f"try:\n    {save}except OSError as problem:\n    print('caught', problem)\n" if caught else save
    text = run(tmp_path, f"""{SAVE}
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
accelerator.save_model(model, folder / "w")
Path(folder / "w/model.safetensors").rename(folder / "w/model-00001-of-00001.safetensors")
from faithful.checkpoint import weight_files
write = weight_files.save_torch_state_dict
def limited(*args, **kwargs):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        write(*args, **kwargs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
weight_files.save_torch_state_dict = limited
{call}
""", code=0 if caught else 1)  # fmt: skip
    assert os.listdir(tmp_path / "run" / "w") == ["model-00001-of-00001.safetensors"] and "Traceback" not in text
    assert ("caught" if caught else "error:") + f" {tmp_path}/run/w: the weights could not be written (" in text
