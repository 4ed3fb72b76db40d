"""A run's folder is its own: what others have put there stays, and no run touches another's."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, metrics, refusal, train
from faulty_io import snapshot
from loop import loop

from faithful import arguments
from faithful.checkpoint import checkpoints
from faithful.disk import readers
from faithful.errors import Gone, Refused
from faithful.evidence import record as records
from faithful.launch import launcher, process
from faithful.plan import Plan

STEPS = ("--save_steps", 1, "--save_total_limit", 2, "--eval_steps", 0, "--logging_steps", 1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train("single_fp32", tmp_path_factory.mktemp("finished") / "run", "--max_steps", 3, *STEPS)


TRAINERS = {"trainer_state.json": '{"global_step": 3}', "optimizer.pt": "p", "rng_state.pth": "r"}  # transformers'


def put(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


THEIRS = {
    "checkpoint-1.tmp/notes.txt": "mine",
    "checkpoint-2/manifest.json": '{"name": "a web page"}',
    "checkpoint-3/trainer_state.json": TRAINERS["trainer_state.json"],
    "checkpoint-500/trainer_state.json": '{"best_metric": null, "global_step": 500}',  # of transformers' Trainer
    "checkpoint-500/optimizer.pt": "p",
    "checkpoint-9999/notes.txt": "mine",
    "checkpoint_3/notes.txt": "mine",
    "checkpoint-7.tmp/notes.txt": "mine",
    "checkpoint-good.tmp/rank0.safetensors": "mine",
    "error-rank.json": "mine",
    "error-rank-mine.json": "mine",
}


def test_what_others_have_put_there_stays(tmp_path):
    run = tmp_path / "run"
    for name, text in THEIRS.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    left = run / "checkpoint-8.tmp" / "rank0.safetensors"  # of a killed process of ours
    left.parent.mkdir()
    left.touch()
    before = {name: (run / name).read_bytes() for name in THEIRS}
    train("single_fp32", run, "--max_steps", 5, *STEPS, code=1)
    assert snapshot(run).items() >= before.items() and not left.parent.exists()
    ours = [path.name for path in checkpoints.list_checkpoints(run) if checkpoints.identity(path)]
    assert ours == ["checkpoint-5", "checkpoint-4"] and len({row["step"] for row in metrics(run)}) == 5
    why = (f"{run}/checkpoint-1.tmp is somebody else's", "its manifest.json is another", "its trainer_state.json is")
    for step, said in enumerate(why, 1):
        assert f"warning: {run}/checkpoint-{step} could not be written ({said}" in (tmp_path / "run.log").read_text()


def test_a_staged_checkpoint_does_not_replace_what_is_not_of_a_checkpoint(finished, tmp_path):
    folder = shutil.copytree(finished / "checkpoint-3", tmp_path / "checkpoint-3" / ".checkpoint.tmp").parent
    put(folder, TRAINERS)
    before = snapshot(tmp_path)
    assert checkpoints.unsound(folder) and snapshot(tmp_path) == before
    (folder / "trainer_state.json").unlink()
    assert checkpoints.unsound(folder) is None and (folder / "optimizer.pt").read_text() == "p"


def test_a_run_that_is_stopped_saves_beside_the_trainers_checkpoint(tmp_path):
    def stopped(run):
        put(Path(sys.argv[2], f"checkpoint-{run.accelerator.steps.taken}"), TRAINERS)
        if run.accelerator.steps.taken == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    def resume(run):
        run.accelerator.load_state()

    run = tmp_path / "run"
    train("single_fp32", run, script=functools.partial(loop, stepped=stopped), code=143)
    assert {path.name: path.read_text() for path in (run / "checkpoint-4").iterdir()} == TRAINERS
    assert f"saved {run}/checkpoint_4. To go on" in (tmp_path / "run.log").read_text()
    train("single_fp32", run, script=functools.partial(loop, prepared=resume))
    assert f"resumed from {run}/checkpoint_4 at step 4" in (tmp_path / "run.log").read_text()


def test_a_new_run_moves_all_that_a_finished_one_left(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    train("single_fp32", run, "--max_steps", 4, *STEPS, "--learning_rate", 0.01)
    [aside] = run.glob("run_*")
    assert snapshot(aside) == snapshot(finished)
    assert "its record is now in run_" in (tmp_path / "run.log").read_text()
    ids = {checkpoints.identity(path)["run"] for path in checkpoints.list_checkpoints(run)}
    assert len(ids) == 1 and ids != {checkpoints.identity(aside / "checkpoint-3")["run"]}


def test_a_run_that_goes_on_prunes_what_it_wrote_before(finished, tmp_path):
    """Its damaged checkpoint is written anew, and what somebody has put into the one that goes stays."""
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "checkpoint-3" / "manifest.json").write_text("{")
    put(run / "checkpoint-2", {"notes.txt": "mine"})
    latest = ("--resume_from_checkpoint", "latest")
    train("single_fp32", run, "--max_steps", 3, *STEPS, "--save_total_limit", 1, *latest)
    whole = ["manifest.json", "rank0.safetensors", "trainer_state.json"]
    kept = {path.name: sorted(file.name for file in path.iterdir()) for path in run.glob("checkpoint-*")}
    assert kept == {"checkpoint-2": ["notes.txt"], "checkpoint-3": whole}
    assert metrics(run) == metrics(finished) and not list(run.glob("run_*"))


@pytest.mark.parametrize("script", [None, loop], ids=["recipe", "script"])
def test_a_run_that_is_refused_because_another_one_trains_there_changes_nothing(finished, tmp_path, script):
    run = shutil.copytree(finished, tmp_path / "run")
    lock = launcher.lock_folder(run)

    def before(rank):
        os.close(lock)  # the fork's: the parent holds it still
        launcher.GRACE = -4

    argv = () if script else ("--max_steps", 4, *STEPS)
    train("single_fp32", run, *argv, before=before, code=2, **({"script": functools.partial(script)} if script else {}))
    os.close(lock)
    assert "refused: another run is writing to" in (tmp_path / "run.log").read_text()
    assert snapshot(run) == snapshot(finished)


def test_two_runs_of_one_second_have_two_folders(monkeypatch):
    monkeypatch.setattr(records.time, "strftime", lambda *_: "20260101-000000")
    plan = type("Plan", (), {"config": "ddp_bf16"})
    assert records.default_folder(plan) != records.default_folder(plan)


def test_a_run_of_a_package_has_its_name(monkeypatch):
    """`-m lm_eval` runs lm_eval/__main__.py."""
    monkeypatch.setattr(sys, "argv", ["/packages/lm_eval/__main__.py"])
    plan = type("Plan", (), {"config": "ddp_bf16"})
    assert records.default_folder(plan).startswith("runs/lm_eval-ddp_bf16-")


def test_a_file_of_very_many_values_is_refused_before_they_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "DECODER", None)
    many = tmp_path / "many.json"
    for (largest, most), shown in (
        (readers.RECORD, ("8 MiB", "250,000")),
        (readers.CHECKPOINT, ("32 MiB", "1,500,000")),
    ):
        many.write_bytes(b"[" + b"{}," * (most // 2) + b"{}]")
        with pytest.raises(readers.Damaged, match=f"many.json holds more than {shown[1]} values"):
            readers.value_of(many, list, (largest, most))
        many.write_bytes(b'"' + b"a" * largest + b'"')
        with pytest.raises(OSError, match=f"larger than {shown[0]}"):
            readers.value_of(many, str, (largest, most))


def header(text):
    return len(text).to_bytes(8, "little") + text


TENSOR = b'"%d":{"dtype":"F32","shape":[%s],"data_offsets":[0,0]}'
LARGE = {  # {what is too large: (the file, its content, what is said)}
    "a header": ("rank0.safetensors", lambda: header(b"{}" + b" " * readers.CHECKPOINT[0]), "is larger than 32 MiB"),
    "a header of many tensors": ("rank0.safetensors", lambda: header(
        b"{" + b",".join(TENSOR % (number, b"0") for number in range(240_000)) + b"}"), "holds more than 1,500,000"),
    "a header of many dimensions": ("rank0.safetensors", lambda: header(
        b"{" + b",".join(TENSOR % (number, b"0" + b",0" * 500) for number in range(4_000)) + b"}"), "holds more than"),
    "a manifest": ("manifest.json", lambda: b"{" + b",".join(
        b'"%d":{"bytes":1,"xxh3_128":"x"}' % number for number in range(100_001)) + b"}", "more than 100,000 files"),
}  # fmt: skip


@pytest.mark.parametrize("case", LARGE)
def test_what_takes_too_long_to_read_is_refused_at_once(tmp_path, case):
    name, content, said = LARGE[case]
    (tmp_path / name).write_bytes(content())
    with pytest.raises((Refused, readers.Damaged), match=said):
        checkpoints.tensors_of(tmp_path, 0) if name.endswith("safetensors") else checkpoints.manifest_of(tmp_path)


def test_rows_that_are_too_many_or_too_long_are_not_read(tmp_path, monkeypatch):
    """With a thousandth of the numbers, which would take seconds to read."""
    assert (readers.MOST_ROWS, readers.MOST_LOGGED) == (1_000_000, 4_000_000)
    monkeypatch.setattr(readers, "MOST_ROWS", 1000), monkeypatch.setattr(readers, "MOST_LOGGED", 4000)
    many = tmp_path / "metrics.jsonl"
    many.write_bytes(b"\n{}" * (readers.MOST_ROWS + 1))
    with pytest.raises(OSError, match="more than 1,000 lines"):
        sum(1 for _ in readers.rows_of(many))
    many.write_bytes(b'{"a":1}\n{"a":"' + b"a" * readers.LONGEST_ROW + b'"}\n{"a":2}')
    assert [row for _, row in readers.rows_of(many)] == [{"a": 1}, None, {"a": 2}]
    many.write_bytes((b"[" + b"{}," * 300 + b"{}]\n") * 11)
    with pytest.raises(OSError, match="more than 4,000 values"):
        sum(1 for _ in readers.rows_of(many))
    with many.open("r+b") as file:
        file.truncate(readers.LONGEST_LOG + 1)
    with pytest.raises(OSError, match="larger than 96 MiB"):
        next(readers.rows_of(many))


def test_a_metrics_file_that_lies_elsewhere_too_is_not_appended_to(finished, tmp_path):
    """A folder in the way of its temporary file, so that it cannot be written anew when the run goes on."""
    run, mine = shutil.copytree(finished, tmp_path / "run"), tmp_path / "mine"
    mine.write_text("mine")
    (run / "metrics.jsonl").unlink()
    os.link(mine, run / "metrics.jsonl")
    (run / "metrics.jsonl.tmp").mkdir()
    train("single_fp32", run, "--max_steps", 3, *STEPS, "--resume_from_checkpoint", run / "checkpoint-2")
    assert mine.read_text() == "mine" and (run / "metrics.jsonl").read_text() == "mine"
    assert (tmp_path / "run.log").read_text().count("metrics.jsonl cannot be written") == 1
    (run / "metrics.jsonl.tmp").rmdir()
    records.append(run / "metrics.jsonl", "{}")
    assert mine.read_text() == "mine" and (run / "metrics.jsonl").read_text() == "mine{}\n"


def test_a_folder_in_which_nothing_can_be_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for folder in (tmp_path / "loop", tmp_path / "loop" / "run", "a" * 300, "/".join(["a" * 99] * 50)):
        with pytest.raises(Refused, match="nothing can be in the project folder .*: choose another"):
            arguments.refuse_impossible(folder)
    arguments.refuse_impossible(tmp_path / "new" / "run")


def test_a_working_folder_that_was_removed_is_one_line(tmp_path, monkeypatch):
    def leave(rank=0):
        (tmp_path / "gone").mkdir(exist_ok=True)
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()

    said = refusal("single_fp32", tmp_path / "run", "--max_steps", 1, *STEPS, before=leave)
    assert "refused: the working folder was removed: go into one that is there" in said
    made = records.Record(Plan(None, "single", 1, "fp32", "cpu"), tmp_path, "run", False)
    monkeypatch.chdir(tmp_path)
    leave()
    assert made.shown == made.folder
    with pytest.raises(FileNotFoundError) as error:
        os.getcwd()
    assert isinstance(process.as_refusal(error.value, made), Gone)


@pytest.mark.parametrize("words", ["single_fp32 vit --max_steps 1", "export /nowhere", "predict /nowhere", "demo",
                                   "estimate single_fp32 -- vit", "compare single_fp32 -- vit"])  # fmt: skip
def test_no_command_begins_in_a_working_folder_that_was_removed(tmp_path, words):
    """torch cannot be imported there: MKL does not find its libraries."""
    code = 'cd "$1" && rmdir "$1" && exec "$2/launch.sh" $3'
    done = subprocess.run(["bash", "-c", code, "bash", tmp_path, ROOT, words], capture_output=True, text=True)
    *of_bash, said = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout and all("getcwd" in line for line in of_bash), done.stderr
    assert said == "error: the working folder was removed: go into one that is there, and start again"


@pytest.mark.parametrize("counter", [(1 << 40) + 1, 2**63 - 1])
def test_a_counter_that_no_run_reaches_makes_no_other_checkpoint_the_oldest(finished, tmp_path, counter):
    run = shutil.copytree(finished, tmp_path / "run")
    state = run / "checkpoint-2" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"counter": counter}))
    manifest = run / "checkpoint-2" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {state.name: checkpoints.entry(state)}))
    assert [path.name for path in checkpoints.list_checkpoints(run)] == ["checkpoint-3", "checkpoint-2"]
    assert checkpoints.next_count(run) == 4
    train("single_fp32", run, "--max_steps", 3, *STEPS, "--resume_from_checkpoint", "latest")
    said = (tmp_path / "run.log").read_text()
    assert f"skipping {run}/checkpoint-2: {state}: counter is {counter}, which it cannot be" in said
    assert f"resumed from {run}/checkpoint-3 at step 3" in said
