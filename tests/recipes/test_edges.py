"""Branches of faithful/ that no whole run takes on this machine."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import tqdm
import yaml
from conftest import CONFIGS, ROOT
from test_plan import CPU, GPU

from faithful import Refused, backends, plan
from faithful.backends import transformer_engine
from faithful.config import config_file, rules
from faithful.config.settings import read_env, to_env
from faithful.evidence import record
from faithful.launch import launcher, machine, process
from shared import text
from tools import check, export


def of(name, **changes):
    return replace(read_env(to_env(yaml.safe_load((CONFIGS / f"{name}.yml").read_text()))), **changes)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"strategy": "megatron"}, "strategy megatron is not one of single, ddp"),
        ({"restarts_in_vain": True}, "a restarted worker would look for the one that died"),
    ],
)
def test_what_no_config_file_asks_for_is_refused_at_launch(asked, line):
    [said] = rules.problems(of("ddp_bf16", **asked), GPU)
    assert line in said


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("ddp_bf16", {"fp8_config": {"backend": "AO"}}, "fp8_config is not read under mixed_precision bf16"),
        ("zero2_bf16", {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo_config is not read under"),
    ],
)
def test_a_section_that_accelerate_ignores_is_named(tmp_path, name, changes, line):
    file = tmp_path / "a.yml"
    file.write_text(yaml.dump(yaml.safe_load((CONFIGS / f"{name}.yml").read_text()) | changes))
    problems, config = config_file.file_problems(file)
    assert problems == [] and [line in note for note in config_file.file_notes(config)] == [True]


def test_a_hostfile_that_is_not_needed_or_has_enough_slots_is_no_problem(tmp_path):
    assert check.problems_of_hostfile({"deepspeed_multinode_launcher": "standard"}, 8) == []
    (tmp_path / "hosts").write_text("one slots=4\ntwo slots=4  # the second machine\n")
    assert check.problems_of_hostfile({"deepspeed_hostfile": tmp_path / "hosts"}, 8) == []


def test_a_driver_s_gpus_are_read_without_torch(monkeypatch):
    said = SimpleNamespace(stdout="GPU-1a, NVIDIA H100 80GB HBM3, 9.0\nGPU-2b, NVIDIA H100 80GB HBM3, 9.0\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = machine.of_driver()
    assert (found.devices, found.name, found.capability) == (2, "NVIDIA H100 80GB HBM3", (9, 0))
    assert found.cuda is None or found.cuda[0].isdigit()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine.of_driver().devices == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.of_driver().device == "cpu"


CARDS = """GPU-1a, NVIDIA T400, 7.5
Unable to determine the device handle for GPU0000:02:00.0: GPU is lost.
GPU-2b, NVIDIA H100, 9.0
GPU-2c, NVIDIA H100, 9.0
GPU-3d, Tesla K40m, [N/A]
"""


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({}, "2b 2c 1a 3d"),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "1a 2b 2c 3d"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "2c"),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "2b"),
        ({"CUDA_VISIBLE_DEVICES": "2, 0"}, "1a 2b"),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, "2b"),
        ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, "2b"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-3"}, "1a 3d"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2"}, ""),  # of two
        ({"CUDA_VISIBLE_DEVICES": "MIG-6e1b"}, "2b"),
    ],
)
def test_the_cards_are_those_that_cuda_shows(env, seen):
    assert [card.uuid for card in machine.visible(machine.listed(CARDS), env)] == [
        f"GPU-{each}" for each in seen.split()
    ]


def test_a_card_whose_capability_the_driver_does_not_know():
    assert machine.listed(CARDS)[-1].capability is None and len(machine.listed(CARDS)) == 4


def test_a_container_that_forbids_the_reset_of_the_peak_is_noted(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CLEAR_REFS", tmp_path)  # a folder cannot be written to, also by root
    memory = machine.Memory(torch.device("cpu"))
    held = torch.ones(8 << 20)
    assert memory.peak() >= 0 and "cannot be written (Is a directory)" in memory.note and held.nbytes
    monkeypatch.setattr(Path, "read_text", lambda self: "Name: python")  # a /proc without peaks
    assert machine.highest_resident_bytes() > 0


def test_a_package_that_is_not_installed_has_no_version(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert machine.versions().keys() == {"python", "cuda"}


def test_without_git_the_record_says_so(monkeypatch):
    def run(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", run)
    assert record.git_state(Path(__file__)) == (None, None)


def test_the_commit_is_that_of_the_script(tmp_path):
    """Not that of the repository that this package lies in, or of one that ignores the script."""
    project = tmp_path / "mine"
    names = script, installed, elsewhere = project / "a" / "train.py", project / "venv" / "x.py", tmp_path / "alone.py"
    for file in names:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    git = ["git", "-C", str(project), "-c", "user.name=me", "-c", "user.email=me@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert record.git_state(script) == (None, None), "nothing is committed"
    (project / ".gitignore").write_text("venv\n")
    for words in (["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    made = record.commits(script)
    assert (made["git_commit"], made["git_dirty"]) == (commit, False) and made["faithful_commit"] != commit
    script.write_text("changed")
    assert record.git_state(script) == (commit, True)
    missing = tmp_path / "none.py"
    assert [record.git_state(file) for file in (installed, elsewhere, missing)] == [(None, None)] * 3


def test_a_long_loss_curve_loses_every_second_point():
    curve = [[step, 1.0] for step in range(1, record.LONGEST_CURVE + 1)]
    run = SimpleNamespace(seen={"loss_curve": curve}, every=1)
    record.Record.point(run, record.LONGEST_CURVE + 1, 0.5)
    assert run.every == 2 and len(curve) == record.LONGEST_CURVE // 2 and all(step % 2 == 0 for step, _ in curve)


def test_a_process_that_is_gone_is_no_launcher():
    def cmdline():
        raise psutil.NoSuchProcess(1)

    assert launcher.is_launcher(SimpleNamespace(cmdline=cmdline)) is False


@pytest.mark.skipif(sys.platform != "linux", reason="setsid")
def test_a_process_without_its_launcher_says_why_it_ends():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    words = [sys.executable, "-c", "from faithful.launch import launcher; launcher.end_with_the_launcher()"]
    done = subprocess.run(words, env=environment | {"TORCHELASTIC_RUN_ID": "none"}, cwd=ROOT, text=True,
                          capture_output=True, start_new_session=True)  # fmt: skip
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "error: this process has the environment of a launcher that is gone." in done.stderr
    assert "unset TORCHELASTIC_RUN_ID" in done.stderr


def test_a_refusal_stands_on_its_own_line_below_a_bar(capfd, monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    bar = tqdm.tqdm(total=3, disable=False, file=sys.stderr)
    process.print_error_line(Refused("why"), "why", None, print)
    bar.close()
    process.print_error_line(Refused("again"), "again", None, print)
    lines = capfd.readouterr().err.splitlines()
    assert "refused: why" in lines and "refused: again" in lines and "" not in lines[-1:]


def test_a_dead_launcher_ends_its_process(monkeypatch):
    done = []
    monkeypatch.setattr(signal, "alarm", lambda seconds: done.append(("alarm", seconds)))
    monkeypatch.setattr(os, "kill", lambda pid, number: done.append((pid, number)))
    launcher.watch_launcher(SimpleNamespace(is_running=lambda: False))
    assert done == [("alarm", launcher.GRACE), (os.getpid(), signal.SIGTERM)]


def test_a_scripts_own_worker_init_fn_is_called(monkeypatch):
    seen = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(launcher, "end_with_the_parent", lambda number: None)
    launcher.init_loader_worker(seen.append, 3)
    assert seen == [3]


def test_a_file_system_without_locks_does_not_stop_a_run(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert launcher.lock_folder(tmp_path) is None


def test_processes_that_cannot_be_looked_at_are_no_launch(monkeypatch):
    def denied():
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "Process", denied)
    assert plan.launch_line.__wrapped__() == (None, None)


def test_a_module_that_amp8_lacks_is_not_amp8_missing(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr(backends.pkgutil, "resolve_name", missing)
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        backends.imported("amp8")


def test_a_transformer_engine_that_cannot_be_imported_is_one_line(monkeypatch):
    def broken(name):
        raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(transformer_engine.importlib, "import_module", broken)
    with pytest.raises(Refused, match="TransformerEngine cannot be imported .libcudnn.so.9: .*--extra te"):
        transformer_engine.package()


@pytest.mark.parametrize("rows", [(10,), (3, 7), (32,)])
def test_rows_of_zeros_change_no_output_and_no_gradient(rows):
    """TransformerEngine's products need multiples of 16 rows; a plain Linear stands for its layer."""
    linear, x = torch.nn.Linear(8, 4), torch.randn(*rows, 8, requires_grad=True)
    out = transformer_engine.in_whole_rows(linear, 16, x)
    out.square().sum().backward()
    found = out.detach(), x.grad.clone(), linear.weight.grad.clone()
    x.grad = linear.weight.grad = None
    plain = linear(x)
    plain.square().sum().backward()
    for ours, theirs in zip(found, (plain.detach(), x.grad, linear.weight.grad), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("accelerate launch train.py", None),
        ("accelerate launch --config_file a.yml train.py --config_file model.yml", "/home/a.yml"),
        ("accelerate launch --config-file=a.yml -m train", "/home/a.yml"),
        ("python -m accelerate.commands.launch --num_processes 1 train.py --config_file model.yml --cpu", None),
        ("torchrun /home/accelerate/train.py --config_file model.yml", "no launch of Accelerate's"),
    ],
)
def test_the_config_file_of_a_launch_is_not_the_scripts(monkeypatch, line, file):
    above = SimpleNamespace(cmdline=line.split, cwd=lambda: "/home")
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parents=lambda: [above]))
    found = (None, None) if "torchrun" in line else (line.split(), file and Path(file))
    assert plan.launch_line.__wrapped__() == found


def test_a_rule_for_gpus_is_no_rule_for_a_cpu():
    assert rules.problems(of("single_fp8_te"), CPU) == []


def test_a_sample_longer_than_the_context_goes_on_from_its_end():
    class Model(torch.nn.Linear):
        def forward(self, ids):
            seen.append(ids.shape[1])
            return SimpleNamespace(logits=100 * torch.eye(257)[None, [token]])  # one token, always

    seen, token, tokenizer = [], 98, text.train_tokenizer([], 0)
    said = text.continuation(Model(1, 1), tokenizer, "ab", 6, 4)
    assert seen == [2, 3, 4, 4, 4, 4] and said.startswith("ab") and len(said) == 8
    seen, token = [], tokenizer.eos_token_id
    assert text.continuation(Model(1, 1), tokenizer, "ab", 6, 4) == "ab" and seen == [2], "it ends with the text"


def test_a_rank_speaks_for_a_silent_rank_0_after_20_seconds(monkeypatch):
    clock = iter(range(0, 100, 8))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(process.settings, "rank", lambda: 1)
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None))
    assert process.may_print() and next(clock) == 32
    monkeypatch.setattr(process, "stop_asked", True)  # its launcher ends it: rank 0 has spoken
    assert not process.may_print()


@pytest.mark.parametrize(
    ("recipe", "model", "kind"),
    [
        ("gpt", "gpt_nano", "GPT2LMHeadModel"),
        ("bert", "bert_nano", "BertForSequenceClassification"),
        ("resnet", "resnet18", "ResNet"),
    ],
)
def test_the_model_of_a_record(tmp_path, recipe, model, kind):
    """Also of a run that has saved no model yet, of one that went on from another run, and of a published one."""
    about = {"vocab_size": 300, "sequence_length": 16, "classes": ["a", "b"], "image_size": 32, "in_chans": 3}
    made = {"recipe": recipe, "args": {"model": model, "pretrained": True}, "data": about | {"num_classes": 2}}
    assert type(export.as_recorded(made, tmp_path)).__name__ == kind
    if recipe == "resnet":
        (tmp_path / "run.json").write_text(json.dumps({key: made[key] for key in ("recipe", "args")}))
        (tmp_path / "data.json").write_text(json.dumps(made["data"]))
        later = made | {"args": {"model": str(tmp_path), "pretrained": True}}
        assert export.as_recorded(later, tmp_path / "later").conv1.stride == (2, 2), "the published one's stem"


def test_the_standard_library_by_package():
    train, held_out = text.labelled("python_packages", 16)
    assert sorted(train.classes) == train.classes and len(train.classes) == 10 and len(train) > 8 * len(held_out)


def test_a_card_of_rocm_is_no_card_of_nvidia(monkeypatch):
    """torch calls it cuda, and gives it a capability that looks like NVIDIA's."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    found = machine.of_torch()
    assert (found.name, found.devices, found.capability, found.nvidia) == ("AMD Instinct MI300X", 8, None, False)
    monkeypatch.setattr(torch.version, "hip", None)
    assert machine.of_torch().nvidia and machine.of_torch().has_fp8
