"""Two machines whose folders of the same name are on disks of their own."""

import errno
import functools
import json
import os
import shutil
from pathlib import Path

import faulty_io
import pytest
from conftest import Ranks, distance, metrics, record, train
from loop import loop

from faithful.checkpoint import checkpoints
from faithful.launch import launcher, process
from shared.args import Refused
from tools import export

STEPS = ("--max_steps", 6, "--save_steps", 3, "--save_total_limit", 9, "--logging_steps", 1, "--eval_steps", 0)

pytestmark = pytest.mark.skipif(not faulty_io.may_mount(), reason="a disk for each process needs the right to mount")


def machine_of_its_own(run, disks):
    """Called in each rank before the run: rank 1 is alone on a machine, with disks/1 where others have `run`."""

    def before(rank):
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        disk = Path(disks, str(rank))
        disk.mkdir(parents=True, exist_ok=True)
        faulty_io.disk_of_its_own(rank, run, disk)

    return before


def trained(config, run, disks, *argv, also=lambda rank: None, **kwargs):
    run.mkdir(exist_ok=True)
    own = machine_of_its_own(run, disks)
    return train(config, run, *STEPS, *argv, before=lambda rank: (own(rank), also(rank)), **kwargs)


LATEST = ("--resume_from_checkpoint", "latest")


CONFIGS = ["fsdp_bf16", "ddp_bf16", "ddp_fp8_msamp_o3", pytest.param("zero2_bf16", marks=pytest.mark.slow)]


@pytest.mark.parametrize("config", CONFIGS)
def test_each_disk_has_what_its_processes_wrote_and_the_run_goes_on(tmp_path, config):
    whole = train(config, tmp_path / "whole", *STEPS)
    run, disks = tmp_path / "run", tmp_path / "disks"
    trained(config, run, disks)
    kept = [{path.name for path in (disks / str(rank) / "checkpoint-3").iterdir()} for rank in (0, 1)]
    common = {"manifest.json", "trainer_state.json"}
    assert kept == [{"rank0.safetensors", *common}, {"rank1.safetensors", *common}]
    assert not list(disks.glob("*/*.tmp"))
    for rank in (0, 1):
        shutil.rmtree(disks / str(rank) / "checkpoint-6")
    trained(config, run, disks, "--resume_from_checkpoint", "latest")
    assert record(disks / "0")["status"] == "finished" and "at step 3" in (tmp_path / "run.log").read_text()
    assert metrics(disks / "0") == metrics(whole) and distance(disks / "0", whole) == 0


def test_who_lacks_a_file_is_named(tmp_path):
    run, disks = tmp_path / "run", tmp_path / "disks"
    trained("fsdp_bf16", run, disks)
    with pytest.raises(Refused, match="checkpoint-6: rank1.safetensors is missing, copy it from the disk"):
        export.export(disks / "0", step=6)
    newest = disks / "1" / "checkpoint-6"
    shutil.rmtree(newest)
    trained("fsdp_bf16", run, disks, "--resume_from_checkpoint", run / "checkpoint-6", code=2)
    log = (tmp_path / "run.log").read_text()
    assert f"refused: the checkpoint {run}/checkpoint-6 cannot be resumed: no readable manifest.json" in log
    assert "(FileNotFoundError) on node1" in log

    shutil.copytree(disks / "0" / "checkpoint-6", newest)  # of the other machine
    trained("fsdp_bf16", run, disks, "--resume_from_checkpoint", "latest")
    log = (tmp_path / "run.log").read_text()
    said = "rank1.safetensors is missing, it was written to another machine's disk on node1"
    assert f"skipping {run}/checkpoint-6: {said}" in log
    assert f"resumed from {run}/checkpoint-3 at step 3" in log
    assert json.loads((newest / "trainer_state.json").read_text())["steps"]["taken"] == 6


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("checkpoint-*/*")}


@pytest.fixture(scope="module")
def disks(tmp_path_factory):
    """The disks of a run of two machines, in "run"."""
    folder = tmp_path_factory.mktemp("disks")
    trained("fsdp_bf16", folder / "mount", folder / "run")
    return folder


def test_a_new_run_overwrites_no_checkpoint_of_an_earlier_one_on_any_disk(disks, tmp_path):
    new = shutil.copytree(disks / "run", tmp_path / "new")
    trained("ddp_bf16", tmp_path / "run", new)
    for rank in (0, 1):
        [aside] = (new / str(rank)).glob("run_*")
        assert contents(aside) == contents(disks / "run" / str(rank)) != {}
        now = [checkpoints.identity(new / str(rank) / f"checkpoint-{step}") for step in (3, 6)]
        assert len({told["run"] for told in now} - {checkpoints.identity(aside / "checkpoint-6")["run"]}) == 1
        assert not [path for path in (new / str(rank)).iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("argv", [(), pytest.param(LATEST, marks=pytest.mark.slow)], ids=["new", "latest"])
def test_a_run_is_refused_on_all_machines_while_another_one_trains_on_one_disk(disks, tmp_path, argv):
    new = shutil.copytree(disks / "run", tmp_path / "new")
    before, lock = faulty_io.snapshot(new), launcher.lock_folder(new / "1")

    def impatient(rank):
        os.close(lock)  # the fork's: the parent holds it still
        launcher.GRACE = -4

    trained("fsdp_bf16", tmp_path / "run", new, *argv, also=impatient, code=2)
    os.close(lock)
    said = f"refused: another run is writing to {tmp_path}/run: let it end, or choose another folder (node1)"
    assert said in (tmp_path / "run.log").read_text() and faulty_io.snapshot(new) == before


@pytest.mark.slow
def test_a_checkpoint_that_the_main_process_alone_saves_first_is_no_dead_end(disks, tmp_path):
    """The other machine takes its folder when all take the first step."""

    def save(run):
        if run.accelerator.is_main_process:
            run.accelerator.save_state()

    new = shutil.copytree(disks / "run", tmp_path / "new")
    trained("ddp_bf16", tmp_path / "run", new, script=functools.partial(loop, prepared=save))
    for rank in (0, 1):
        [aside] = (new / str(rank)).glob("run_*")
        assert contents(aside) == contents(disks / "run" / str(rank)) != {}
    assert [path.name for path in checkpoints.list_checkpoints(new / "0")] == ["checkpoint-0"]


@pytest.mark.parametrize("lost", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_machine_that_lost_its_disk_does_not_start_anew_and_nothing_is_deleted(disks, tmp_path, lost):
    left = shutil.copytree(disks / "run", tmp_path / "left")
    shutil.rmtree(left / lost)
    before = contents(left)
    trained("fsdp_bf16", tmp_path / "run", left, *LATEST, "--save_total_limit", 1, code=2)
    log = (tmp_path / "run.log").read_text()
    assert f"refused: no checkpoint can be resumed, {tmp_path}/run/checkpoint-6: no readable manifest.json" in log
    assert f"on node{lost}" in log and contents(left) == before


def test_a_disk_that_is_full_on_one_machine_leaves_the_older_checkpoint_on_both(tmp_path):
    def full(rank):
        write = checkpoints.write_json

        def fails(path, value):
            if rank == 1 and path.name == "manifest.json" and "checkpoint-6" in str(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(path, value)

        checkpoints.write_json = fails

    run, disks = tmp_path / "run", tmp_path / "disks"
    trained("fsdp_bf16", run, disks, also=full, code=1)
    assert "checkpoint-6 could not be written" in (tmp_path / "run.log").read_text()
    for rank in (0, 1):
        assert [path.name for path in (disks / str(rank)).glob("checkpoint-*")] == ["checkpoint-3"]


@pytest.mark.slow
def test_all_files_in_one_folder_are_one_checkpoint(disks, tmp_path):
    """As docs/machines.md says, of export and of a run on one machine; the manifest of either machine is whole."""
    whole = shutil.copytree(disks / "run" / "0", tmp_path / "whole")
    shutil.copytree(disks / "run" / "1", whole, dirs_exist_ok=True)
    export.export(whole, step=3)
    shutil.rmtree(whole / "checkpoint-6")
    train("fsdp_bf16", whole, *STEPS, *LATEST)
    assert metrics(whole) == metrics(disks / "run" / "0") and distance(whole, disks / "run" / "0") == 0


LINES = "".join(f"line {number} of the first machine\n" for number in range(400))
ROWS = "".join(f'{{"text": "words {number}", "label": "{"ab"[number % 2]}"}}\n' for number in range(64))
OTHER = "--dataset is not the same everywhere"
DATA = {  # {what machine 1 has: (recipe, name of the file, what machine 0 has there, what machine 1 has, the line)}
    "another text of the same length": ("gpt", "text.txt", LINES, LINES.replace("first", "other"), OTHER),
    "a shorter text": ("gpt", "text.txt", LINES, LINES[: len(LINES) // 2], OTHER),
    "other labels": ("bert", "rows.jsonl", ROWS, ROWS.replace('"a"', '"c"'), OTHER),
    "the rows in another order": (
        "bert", "rows.jsonl", ROWS, "".join(reversed(ROWS.splitlines(keepends=True))), OTHER),
    "a pipe": ("gpt", "text.txt", LINES, os.mkfifo, "text.txt is not a regular file: take another"),
    "nothing": ("gpt", "text.txt", LINES, lambda file: None, "text.txt"),
    "a label nested 100,000 deep": (
        "bert", "rows.jsonl", ROWS, ROWS + '{"text": "", "label": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
        "holds lists in lists more than 200 deep"),
    "one class": ("bert", "rows.jsonl", ROWS, ROWS.replace('"b"', '"a"'), "has 1 class: classification needs two"),
}  # fmt: skip


@pytest.mark.parametrize("case", DATA)
def test_data_that_differ_between_machines_are_refused(tmp_path, monkeypatch, case):
    monkeypatch.setattr(process, "SPEAKS", 3)
    recipe, name, *have, said = DATA[case]
    for rank, content in enumerate(have):
        file = tmp_path / "disks" / str(rank) / name
        file.parent.mkdir(parents=True)
        content(file) if callable(content) else file.write_text(content)
    (tmp_path / "run").mkdir()
    ranks = Ranks(
        "ddp_fp32",
        ["--output_dir", str(tmp_path / "run" / "out"), *map(str, STEPS), "--dataset", str(tmp_path / "run" / name)],
        name=recipe,
        env={"TORCHELASTIC_RUN_ID": "none"},  # as under a launcher: who is not the main process waits for its line
        before=machine_of_its_own(tmp_path / "run", tmp_path / "disks"),
    )
    codes, text = ranks.wait(), ranks.text()
    assert 2 in codes and 0 not in codes and "Traceback" not in text, (codes, text)
    assert [line for line in text.splitlines() if line.startswith("refused: ") and said in line], text
    assert {path.name for path in tmp_path.glob("disks/*/out/*")} <= {"run.json"}  # of a run that has failed
