"""How the processes of a run find each other, and that none of them outlives its launcher."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import (
    ROOT,
    Ranks,
    activated,
    alive,
    fake_accelerate,
    free_port,
    launched,
    record,
    started,
    until,
    until_gone,
)
from test_kept import run

from faithful.checkpoint import checkpoints
from faithful.launch import process
from faithful.launch.launcher import launches

# Stands for the recipe. Its rank 1 stops for good at one point; rank 0 then waits for it, in C++ mostly.
HELD = """
import os, pathlib, signal, sys, time
sys.path[:0] = [{root!r}, {root!r} + "/recipes"]
phase = {phase!r}
if phase == "imports":  # these end some time
    pathlib.Path({held!r}).touch()
    time.sleep(4)

import torch.distributed, vit
from faithful import Accelerator
from faithful.checkpoint import checkpoints as checkpoint
from faithful.launch import launcher
from faithful.training import steps
from shared import images

def hold(*_, **__):
    pathlib.Path({held!r}).touch()
    time.sleep(600)

def stubborn():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hold()

def once(method):
    return lambda self, *rest: stubborn() if self.taken == 3 else method(self, *rest)

launcher.GRACE = launcher.SAVING = 3
if os.environ["RANK"] == "1":
    if phase == "process group":
        torch.distributed.init_process_group = hold
    elif phase == "data":
        images.images = hold
    elif phase == "first step":
        steps.Steps.check = hold
    elif phase == "training":
        steps.Steps.check = once(steps.Steps.check)
    elif phase == "evaluation":
        steps.Steps.anyone_told_to_stop = hold
    elif phase == "saving":
        checkpoint.Save.write = hold
    elif phase == "end":
        Accelerator.end_training = hold
sys.argv[0] = {root!r} + "/recipes/vit.py"
vit.Arguments.__module__ = "vit"
vit.main(vit.options.parse(vit.Arguments))
"""


def test_a_launcher_is_known_by_its_program_or_module():
    for line in ("accelerate launch train.py", "/opt/venv/bin/python /opt/venv/bin/accelerate launch train.py",
                 "python -m accelerate.commands.launch --config_file a.yml train.py", "python -u -m torch.distributed.run x.py",
                 "/usr/bin/torchrun --nproc_per_node 2 train.py", "accelerate-launch train.py",
                 "python /home/me/recipes/tools/accelerate_launch.py --config_file a.yml train.py"):  # fmt: skip
        assert launches(line.split()), line
    for line in ("vim accelerate_configs/ddp_bf16.yml", "bash -c accelerate", "/home/accelerate/venv/bin/python -m pytest",
                 "python train.py --out runs/accelerate", "", "python -m faithful train.py"):  # fmt: skip
        assert not launches(line.split()), line


SLOW = [
    pytest.param(phase, marks=pytest.mark.slow)
    for phase in ("imports", "data", "first step", "evaluation", "saving", "end")
]


@pytest.mark.parametrize("phase", ["process group", "training", *SLOW])
def test_nobody_outlives_the_launcher(tmp_path, phase):
    """No process outlives a launcher that is killed without warning, as by the kernel when memory runs out. It is
    ./launch.sh's launcher while training, and Accelerate's own in the other phases."""
    out, held, script = tmp_path / "run", tmp_path / "held", tmp_path / "held.py"
    script.write_text(HELD.format(root=str(ROOT), phase=phase, held=str(held)))
    program = ["tools/accelerate_launch.py"] if phase == "training" else ["-m", "accelerate.commands.launch"]
    command = [sys.executable, *program, "--config_file", "accelerate_configs/ddp_fp32.yml"]
    command += ["--main_process_port", str(free_port()), str(script), "--output_dir", str(out), "--max_steps", "5"]
    command += ["--save_steps", "4", "--eval_steps", "0", "--dataloader_num_workers", "1"]
    launcher = started(tmp_path / "log", *command)
    until(held.exists, tmp_path / "log", launcher)
    time.sleep(1)  # for rank 0 to come to where it waits
    assert len(alive(str(out))) >= 3
    launcher.kill()
    launcher.wait()
    until_gone(out)


def together(commands):
    """The output of launches that start at the same moment. Each must succeed."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    all_of_them = [subprocess.Popen(command, cwd=ROOT, env=activated(), **pipes) for command in commands]
    said = [process.communicate(timeout=300)[0] for process in all_of_them]
    assert not any(process.returncode for process in all_of_them), "\n\n".join(text[-1500:] for text in said)
    return said


@pytest.mark.parametrize(
    ("count", "words"), [(4, ["ddp_bf16"]), (2, ["zero2_bf16"]), (2, ["ddp_bf16", "--max_restarts", "1"])]
)
def test_launches_at_the_same_moment_all_finish(tmp_path, count, words):
    runs = [tmp_path / str(number) for number in range(count)]
    steps = ("--max_steps", "3", "--save_steps", "0")
    together(["./launch.sh", *words, "vit", "--output_dir", str(run), *steps] for run in runs)
    assert [record(run)["status"] for run in runs] == ["finished"] * count
    assert len({record(run)["final"]["loss"] for run in runs}) == 1


@pytest.mark.parametrize(
    ("words", "free"),
    [
        (["ddp_bf16"], True),
        (["zero2_bf16"], True),
        (["ddp_bf16", "--main_process_port", "29400"], False),
        (["ddp_bf16", "--num_machines", "2", "--main_process_ip", "10.0.0.1", "--main_process_port", "29400"], False),
        (["single_bf16"], False),
    ],
)
def test_launch_sh_takes_a_free_port_unless_one_is_named(tmp_path, words, free):
    """launch.sh takes a free port unless one is named, shown with an accelerate that exits at once."""
    fake_accelerate(tmp_path, "def main(): pass")
    said = launched("./launch.sh", *words, "vit", env={"PYTHONPATH": str(tmp_path)})
    assert said.returncode == 0 and ("--main_process_port 0 " in said.stdout) == free, said


def exit_codes_and_errors(tmp_path, before, seconds, leaves=False):
    argv = ["--output_dir", str(tmp_path / "run"), "--max_steps", "2"]
    ranks = Ranks("ddp_fp32", argv, before=before, env={"COLLECTIVE_TIMEOUT": str(seconds)})
    began = time.time()
    codes, text = ranks.wait(), ranks.text()
    assert "Traceback" not in text, text
    assert time.time() - began < seconds + 15 and (tmp_path / "run").exists() is leaves
    return codes, sorted(line for line in text.splitlines() if line.startswith("error: "))


def test_a_dead_address_is_named_on_every_rank(tmp_path):
    """On the rank that serves another address, as a process that never comes."""
    dead = free_port()

    def before(rank):
        if rank == 1:
            os.environ["MASTER_PORT"] = str(dead)

    codes, errors = exit_codes_and_errors(tmp_path, before, 2)
    assert codes == [1, 1]
    assert errors == [
        "error: rank 0: of 2 processes, rank 1 did not come within 2 s (COLLECTIVE_TIMEOUT)",
        f"error: rank 1: nothing answered at 127.0.0.1:{dead} within 2 s (COLLECTIVE_TIMEOUT): is rank 0, or "
        "its launcher, there?",
    ]


def test_the_port_of_another_run_is_named(tmp_path):
    """To the rank that would serve it, and to one that would take the place of a process of that run."""
    another = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    another.set("came/1", "its process")
    codes, errors = exit_codes_and_errors(tmp_path, lambda rank: os.environ.update(MASTER_PORT=str(another.port)), 3)
    assert codes == [1, 1] and another.get("came/1") == b"its process"
    assert errors == [
        f"error: port {another.port} of this machine is in use, by another run perhaps: choose another one",
        f"error: rank 1: 127.0.0.1:{another.port} is of another run, which has a rank 1: choose another port",
    ]


def test_a_process_that_ends_between_the_meeting_and_the_process_group(tmp_path):
    """If a process ends between the rendezvous and the process group, the others, which wait for it, end too."""

    def before(rank):
        from faithful.launch import launcher

        rendezvous = launcher.rendezvous
        if rank == 1:
            launcher.rendezvous = lambda timeout: (rendezvous(timeout), os._exit(5))

    codes, errors = exit_codes_and_errors(tmp_path, before, 2)
    assert codes == [1, 5]
    assert errors == [
        "error: no answer from another process in 2 s (COLLECTIVE_TIMEOUT): it, its machine or the link is gone"
    ]


def test_what_fails_while_a_run_is_being_made_is_one_line(tmp_path):
    """An error after the process group was made and before the run began is one line, and is in the record."""

    def before(rank):
        from faithful import accelerator

        if rank == 1:
            accelerator.Steps = lambda *_: os._exit(5)

    codes, errors = exit_codes_and_errors(tmp_path, before, 3, leaves=True)
    assert codes == [1, 5] and errors == ["error: another process of this run ended"]
    assert record(tmp_path / "run")["status"] == "failed" and record(tmp_path / "run")["error"] in errors[0]


def test_who_ends_after_the_main_process_says_nothing(tmp_path):
    """The main process serves the store: torch printed a page of C++ for a run that told it more than once of its end."""
    log = run(
        tmp_path,
        """
import time
from faithful.launch import launcher
Accelerator(project_dir=folder)
accelerator = Accelerator(project_dir=folder)
model = accelerator.prepare(linear())
time.sleep(2 * accelerator.process_index)  # it asks for the first time when the main process is gone
while accelerator.process_index and not launcher.has_ended(0):
    time.sleep(0.1)
raise ValueError("of the script")
""",
        config="ddp_fp32",
        code=1,
    )
    assert log.count("ValueError: of the script") == 2 and "c10" not in log


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    """Two runs cannot write to one folder. The second waits as long as a killed run may need to end, here a second, and
    changes nothing."""
    argv = ["--output_dir", str(tmp_path / "run"), "--max_steps", "100000", "--save_steps", "0", "--eval_steps", "0"]

    def impatient(rank):
        from faithful.launch import launcher

        launcher.GRACE = -4

    first = Ranks("single_fp32", argv)
    while "step 20:" not in first.text():
        time.sleep(0.02)
    argv += ["--resume_from_checkpoint", "latest"]
    second = Ranks("single_fp32", argv, before=impatient)
    assert second.wait(60) == [2]
    assert f"refused: another run is writing to {tmp_path / 'run'}" in second.text()
    third = Ranks("single_fp32", argv)
    while "waiting for" not in third.text():
        time.sleep(0.02)
    first.kill(signal.SIGTERM)
    assert first.wait(60) == [143]
    while "resumed from" not in third.text():
        time.sleep(0.02)
    third.kill()
    third.wait()


def test_sigterm_before_the_first_step_ends_a_process_at_once(tmp_path):
    def before(rank):
        from faithful.training.steps import Steps

        Steps.check = lambda *_: (print("held", flush=True), time.sleep(600))

    ranks = Ranks("single_fp32", ["--output_dir", str(tmp_path / "run"), "--max_steps", "3"], before=before)
    while "held" not in ranks.text():
        time.sleep(0.02)
    ranks.kill(signal.SIGTERM)
    assert ranks.wait(20) == [-signal.SIGTERM]
    assert not checkpoints.list_checkpoints(tmp_path / "run")


@pytest.mark.parametrize(
    ("config", "send", "number", "code"),
    [
        ("ddp_fp32", os.killpg, signal.SIGINT, 130),  # Ctrl-C in a terminal
        ("single_fp32", os.kill, signal.SIGTERM, 143),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("single_fp32", os.killpg, signal.SIGINT, 130), ("single_fp32", os.kill, signal.SIGINT, 130),
            ("ddp_fp32", os.kill, signal.SIGINT, 130), ("ddp_fp32", os.kill, signal.SIGTERM, 143),
            ("zero2_bf16", os.killpg, signal.SIGINT, 130))),
    ],
)  # fmt: skip
def test_a_stopped_launch_says_what_was_saved_and_how_to_go_on(tmp_path, config, send, number, code):
    """The launcher waits for the checkpoint, and ends with the workers' exit code and their line."""
    out = tmp_path / "run"
    command = ["./launch.sh", config, "vit", "--output_dir", str(out), "--max_steps", "100000", "--save_steps", "0",
               "--eval_steps", "0", "--dataloader_num_workers", "1"]  # fmt: skip
    launcher = started(tmp_path / "log", *command)
    until(lambda: "step 10:" in (tmp_path / "log").read_text(), tmp_path / "log", launcher)
    send(launcher.pid, number)
    assert launcher.wait(60) == code, (tmp_path / "log").read_text()
    assert not alive(str(out))
    text = (tmp_path / "log").read_text()
    [saved] = checkpoints.list_checkpoints(out)
    assert checkpoints.unsound(saved) is None and record(out)["status"] == "preempted"
    why, step = "Ctrl-C" if code == 130 else "SIGTERM", checkpoints.number(saved)
    assert (
        f"{why}: stopped after step {step}; saved {saved}. To go on: the same command with --output_dir {out} " in text
    )
    assert "Traceback" not in text and "SignalException" not in text and "KeyboardInterrupt" not in text, text


def test_ctrl_c_before_the_first_step_and_a_second_one(tmp_path):
    """Before there is a step there is nothing to save; the second Ctrl-C does not wait for the end of a step."""

    def before(rank):
        from faithful.training.steps import Steps

        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell has started pytest with `&`
        check = Steps.check
        Steps.check = lambda self, *rest: hold() if self.taken == held else check(self, *rest)

    def hold():
        print("held", flush=True)
        time.sleep(600)

    for held in (0, 3):
        out = tmp_path / str(held)
        ranks = Ranks("single_fp32", ["--output_dir", str(out), "--max_steps", "5", "--save_steps", "2"], before=before)
        while "held" not in ranks.text():
            time.sleep(0.02)
        ranks.kill(signal.SIGINT)
        if held:
            time.sleep(1.5)
            assert "Ctrl-C again stops at once" in ranks.text() and "interrupted" not in ranks.text()
            ranks.kill(signal.SIGINT)
        assert ranks.wait(20) == [130]
        saved = f"saved {out / 'checkpoint-2'}. To go on: " if held else "no checkpoint was saved"
        assert f"interrupted: {saved}" in ranks.text() and "Traceback" not in ranks.text()
        assert record(out)["status"] == "failed" and record(out)["error"] == "interrupted"


SIGNALS = [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_stuck_run_ends_in_time_and_says_where_each_process_is(tmp_path, number):
    """Rank 0 is in a collective alone, where Python handles no signal, and rank 1 in a loop of the script's."""

    def script():
        import torch.distributed as dist

        from faithful import Accelerator
        from faithful.launch import deadline

        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell has started pytest with `&`
        deadline.SECONDS, deadline.AGAIN = (1, 600) if number == signal.SIGTERM else (600, 1)
        accelerator = Accelerator(project_dir=sys.argv[2])
        model = torch.nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        print("held", flush=True)
        if accelerator.is_main_process:
            dist.all_reduce(torch.ones(1))
        while True:
            time.sleep(0.1)

    ranks = Ranks("ddp_fp32", ["--output_dir", str(tmp_path / "run")], script=script)
    while ranks.text().count("held") < 2:
        time.sleep(0.02)
    time.sleep(0.5)  # for them to come to where they wait
    ranks.kill(number)
    if number == signal.SIGINT:
        time.sleep(1.5)
        ranks.kill(number)
    assert set(ranks.wait(20)) == {128 + number}, ranks.text()
    if number == signal.SIGTERM:  # a loop in Python ends at once by a second Ctrl-C
        [line] = [line for line in ranks.text().splitlines() if "did not stop" in line]
        assert line.startswith("error: SIGTERM: the run did not stop in 1 s: rank 0 waits in all_reduce, called at ")
        assert "dist.all_reduce(torch.ones(1)); rank 1 is at test_processes.py:" in line, line
        assert line.endswith(", time.sleep(0.1); no checkpoint was saved"), line
        assert (record(tmp_path / "run")["status"], record(tmp_path / "run")["error"]) == ("failed", line[7:])


@pytest.mark.parametrize("config", ["ddp_fp32", pytest.param("fsdp_fp32", marks=pytest.mark.slow)])
def test_a_model_that_is_being_written_is_no_stuck_run(tmp_path, config):
    """SIGTERM comes while the main process writes, and the other one waits for it, for longer than a run may be stuck."""

    def script():
        from faithful import Accelerator
        from faithful.checkpoint import weight_files
        from faithful.launch import deadline

        deadline.SECONDS, write = 2, weight_files.write_model
        accelerator = Accelerator(project_dir=sys.argv[2])
        accelerator.model_card = False  # it imports transformers
        model = torch.nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()

        def slowly(*args):
            print("held", flush=True)
            time.sleep(5)
            write(*args)

        weight_files.write_model = slowly
        accelerator.save_model(model, f"{sys.argv[2]}/model")
        accelerator.wait_for_everyone()
        accelerator.end_training()

    ranks = Ranks(config, ["--output_dir", str(tmp_path / "run")], script=script)
    while "held" not in ranks.text():
        time.sleep(0.02)
    ranks.kill(signal.SIGTERM)
    assert set(ranks.wait(40)) == {0}, ranks.text()
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file() and "did not stop" not in ranks.text()


MORE = [("fsdp_bf16", "barrier"), ("fsdp_bf16", "item"), ("fsdp_bf16", "all_gather_"), ("zero3_bf16", "end_training")]
ALONE = [
    ("fsdp_bf16", "end_training"),
    ("fsdp_bf16", "no step"),
    ("fsdp_bf16", "saved elsewhere"),
    ("ddp_bf16", "hook"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE),
]


@pytest.mark.parametrize(("config", "other"), ALONE)
def test_processes_that_wait_for_each_other_end_and_say_so(tmp_path, config, other):
    """Rank 0 is alone in a forward pass, or in an update of an average, and rank 1 in another call. But before that each
    waits for the other, which sleeps, for much longer than this takes; or no step has been made yet."""

    def script():
        from faithful import Accelerator
        from faithful.launch import rank_sync

        rank_sync.LOOKS, rank_sync.STANDS = 0.1, 1
        accelerator = Accelerator(project_dir=sys.argv[2])
        if accelerator.state.deepspeed_plugin:
            accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        model = torch.nn.Linear(512, 512)  # ZeRO-3 keeps small ones whole
        average = torch.optim.swa_utils.AveragedModel(model)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for late in (None, 0, 1) if other != "no step" else ():
            if accelerator.process_index == late:
                time.sleep(3)
            accelerator.backward(model(torch.ones(1, 512)).sum())
            optimizer.step()
        print("held", flush=True)
        if other == "saved elsewhere":  # as open-muse does
            accelerator.save_state(f"{sys.argv[2]}-own")
        if other == "hook":  # as finetrainers has it
            hook = lambda *_: accelerator.is_main_process and accelerator.wait_for_everyone()  # noqa: E731
            accelerator.register_save_state_pre_hook(hook)
            accelerator.save_state()
        if accelerator.is_main_process and other == "item":
            model.weight.norm().item()
        elif accelerator.is_main_process:
            average.update_parameters(model) if other == "all_gather_" else model(torch.ones(1, 512))
        if other in ("barrier", "no step", "saved elsewhere"):
            accelerator.wait_for_everyone()
        if other in ("all_gather_", "item"):
            model(torch.ones(1, 512))
        accelerator.end_training()

    ranks = Ranks(config, ["--output_dir", str(tmp_path / "run")], script=script)
    assert ranks.wait(90) == [1, 1], ranks.text()
    assert ranks.text().count("held") == 2
    [line] = [line for line in ranks.text().splitlines() if "none can go on" in line]
    assert line.startswith("error: the processes wait for each other, and none can go on: rank 0 waits in ")
    called = {"item": "all_gather", "no step": "barrier", "saved elsewhere": "barrier", "hook": "save_state"}
    kept = f"saved {tmp_path}/run-own. To go on: accelerator.load_state('{tmp_path}/run-own')"
    kept = kept if other == "saved elsewhere" else "no checkpoint was saved"
    assert f"; rank 1 waits in {called.get(other, other)}" in line and f"{kept}; make each such call on" in line, line
    assert record(tmp_path / "run")["error"] == line[7:]


def test_a_save_by_the_main_process_alone_is_refused_when_the_others_wait_elsewhere(tmp_path):
    def script():
        from faithful import Accelerator
        from faithful.launch import rank_sync

        rank_sync.LOOKS, rank_sync.STANDS = 0.1, 1
        accelerator = Accelerator(project_dir=sys.argv[2])
        model = torch.nn.Linear(512, 512)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        accelerator.backward(model(torch.ones(1, 512)).sum())
        optimizer.step()
        if accelerator.is_main_process:
            accelerator.save_state()
        model(torch.ones(1, 512))

    ranks, end = Ranks("fsdp_bf16", ["--output_dir", str(tmp_path / "run")], script=script), time.time() + 60
    while record(tmp_path / "run").get("error") is None if (tmp_path / "run/run.json").is_file() else True:
        assert time.time() < end, ranks.text()
        time.sleep(0.05)
    ranks.kill()  # as the launcher does with the others
    ranks.wait()
    says = "refused: the main process alone calls save_state, but each process holds a part of the run: call it on all"
    assert says in ranks.text() and "none can go on" not in ranks.text()


def test_a_process_that_waits_in_a_backward_pass_is_seen(tmp_path):
    """Process 0 alone uses a part of the model, whose gradient DDP averages there; process 1 is in another call."""

    def script():
        from faithful import Accelerator
        from faithful.launch import rank_sync

        rank_sync.LOOKS, rank_sync.STANDS = 0.1, 1
        accelerator = Accelerator(project_dir=sys.argv[2])
        two = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(2))
        two.forward = lambda x, parts: sum(two[part](x).sum() for part in parts)
        model, optimizer = accelerator.prepare(two, torch.optim.SGD(two.parameters(), 0.1))
        for parts in ((0, 1), (0, 1) if accelerator.is_main_process else (0,)):
            accelerator.backward(model(torch.ones(1, 512), parts))
            if accelerator.is_main_process or len(parts) == 2:
                optimizer.step()
        accelerator.wait_for_everyone()

    ranks = Ranks("ddp_fp32", ["--output_dir", str(tmp_path / "run")], script=script)
    assert ranks.wait(60) == [1, 1], ranks.text()
    [line] = [line for line in ranks.text().splitlines() if "none can go on" in line]
    assert "rank 0 is in _engine_run_backward" in line and "; rank 1 waits in barrier" in line


@pytest.mark.parametrize("where", ["as_refusal", "close_record", "finished"])
def test_a_second_ctrl_c_while_the_process_ends(tmp_path, where):
    """It ends with 130 and its line, whatever it is doing at that moment."""

    def script():
        from faithful import Accelerator

        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell has started pytest with `&`
        accelerator = Accelerator(project_dir=sys.argv[2])
        once = iter([True])
        name = "as_refusal" if where == "as_refusal" else "close_record"
        does = getattr(process, name)

        def interrupted(*what):
            if next(once, False):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
            return does(*what)

        setattr(process, name, interrupted)
        model = torch.nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        if where != "finished":
            os.kill(os.getpid(), signal.SIGINT)

    ranks = Ranks("single_fp32", ["--output_dir", str(tmp_path / "run")], script=script)
    assert ranks.wait(60) == [130], ranks.text()
    assert "Traceback" not in ranks.text() and ranks.text().count("interrupted: ") >= 1, ranks.text()


def test_a_signal_after_the_workers_have_ended_is_none_of_the_launcher_s():
    text = (
        "import os, signal; from tools import accelerate_launch as ours; ours.launch.main = lambda: None; ours.run(); "
        "[os.kill(os.getpid(), number) for number in (signal.SIGINT, signal.SIGTERM)]; print('goes on')"
    )
    done = launched(sys.executable, "-c", text)
    assert done.returncode == 0 and done.stdout == "goes on\n", done.stderr
