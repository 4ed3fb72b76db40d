"""What one of two machines alone has lost, got or kept on its disk, and two runs in one folder. The run goes on from the
newest checkpoint that both have, with the same weights, or is refused; what was complete stays."""

import errno
import json
import os
import shutil
import socket
import time
from pathlib import Path

import faulty_io
import pytest
from faulty_io import Script, forked, snapshot

from faithful.checkpoint import checkpoints
from faithful.disk import readers
from faithful.errors import Refused
from faithful.launch import launcher

pytestmark = pytest.mark.skipif(not faulty_io.may_mount(), reason="a disk for each process needs the right to mount")
QUICK = {"FAITHFUL_ASYNC_SAVE": "0", "COLLECTIVE_TIMEOUT": "30"}


def machines(home, work):
    """Runs `work(rank, folder)` on two machines with the disks `home`/0 and /1. Returns ([its values], output)."""
    run = home.with_name("run")
    run.mkdir(exist_ok=True)
    disks = [home / "0", home / "1"]
    for disk in disks:
        disk.mkdir(parents=True, exist_ok=True)
    values, codes, text = forked(lambda rank: work(rank, run), home.with_suffix(".log"), 2, QUICK, disks, run)
    assert codes == [0, 0], text[-3000:]
    return values, text


def trained(rank, folder, seed=0):
    """Takes three steps, and returns the weights after each."""
    script, weights = Script(folder, resume=False, seed=seed), []
    for _ in range(3):
        script.step()
        script.save()
        weights.append(script.weights())
    return weights


def saved_again(rank, folder):
    """Goes back to step 2, takes the third step otherwise, and saves it in the place of the other one."""
    script = Script(folder, resume=folder / "checkpoint-2")
    script.optimizer.param_groups[0]["lr"] = 0.5
    script.step()
    script.save()
    return script.weights()


def goes_on(rank, folder):
    try:
        script = Script(folder)
    except Refused as problem:
        return {"refused": str(problem)}
    told = {"step": script.accelerator.steps.taken, "weights": script.weights()}
    script.step()
    script.save()
    return told | {"then": script.weights(), "failed": script.accelerator.record.failed_saves}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the disks `run`, `other` of another run, and `before`: those of `run` when its step 3 was another
    one; and [the weights of `run` after each step]."""
    folder = tmp_path_factory.mktemp("made")
    weights, _ = machines(folder / "run", trained)
    machines(folder / "other", lambda rank, run: trained(rank, run, seed=1))
    shutil.copytree(folder / "run", folder / "before")
    [again, same], _ = machines(folder / "run", saved_again)
    assert weights[0] == weights[1] and again == same != weights[0][2]
    return folder, [*weights[0][:2], again]


def swap(path, of):
    """Puts `of` in the place of a checkpoint's folder or file."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(of, path) if of.is_dir() else shutil.copy(of, path)


def half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def as_file(path):
    shutil.rmtree(path)
    path.write_text("mine")


def linked(path, target):
    shutil.rmtree(path)
    path.symlink_to(target)


def swapped(disks):
    os.rename(disks / "0", disks / "2"), os.rename(disks / "1", disks / "0"), os.rename(disks / "2", disks / "1")


def alone(disks, run):
    """A run on machine 1 alone has gone on."""
    shutil.copytree(disks / "1" / "checkpoint-3", disks / "1" / "checkpoint-4")
    state = disks / "1" / "checkpoint-4" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"counter": 9, "save": "alone"}))
    manifest = state.with_name("manifest.json")
    entries = json.loads(manifest.read_text()) | {state.name: checkpoints.entry(state)}
    manifest.write_text(json.dumps(entries))


def clocks(disks, run):
    for at, path in enumerate(sorted(disks.rglob("checkpoint-*"))):
        os.utime(path, (time.time() - 9**at % 70000,) * 2)


# {what has happened: (what to do with the disks, the step from which it goes on or what the refusal says)}
CASES = {
    "nothing": (lambda disks, made: None, 3),
    "an older save of the step on 1": (
        lambda disks, made: swap(disks / "1/checkpoint-3", made / "before/1/checkpoint-3"), 2),
    "an older save of the step on 0": (
        lambda disks, made: swap(disks / "0/checkpoint-3", made / "before/0/checkpoint-3"), 2),
    "the whole disk of an earlier day on 1": (lambda disks, made: swap(disks / "1", made / "before/1"), 2),
    "checkpoint-3 of another run on 1": (
        lambda disks, made: swap(disks / "1/checkpoint-3", made / "other/1/checkpoint-3"), 2),
    "all checkpoints of another run on 1": (lambda disks, made: swap(disks / "1", made / "other/1"), "has another one"),
    "the state of another run on 1": (
        lambda disks, made: swap(disks / "1/checkpoint-3/trainer_state.json",
                                 made / "other/1/checkpoint-3/trainer_state.json"), 2),
    "the weights of another run on 0": (
        lambda disks, made: swap(disks / "0/checkpoint-3/rank0.safetensors",
                                 made / "other/0/checkpoint-3/rank0.safetensors"), 2),
    "checkpoint-3 is gone on 1": (lambda disks, made: shutil.rmtree(disks / "1/checkpoint-3"), 2),
    "checkpoint-3 is gone on 0": (lambda disks, made: shutil.rmtree(disks / "0/checkpoint-3"), 2),
    "checkpoint-3 is a file on 1": (lambda disks, made: as_file(disks / "1/checkpoint-3"), 2),
    "checkpoint-3 is a symlink to checkpoint-2 on 1": (lambda disks, made: linked(disks / "1/checkpoint-3", "checkpoint-2"), 2),
    "copied to 1 before the manifest was written": (
        lambda disks, made: (disks / "1/checkpoint-3/manifest.json").unlink(), 2),
    "copied to 1 while its file was written": (
        lambda disks, made: half(disks / "1/checkpoint-3/rank1.safetensors"), 2),
    "the manifest of 0 on 1": (
        lambda disks, made: swap(disks / "1/checkpoint-3/manifest.json", disks / "0/checkpoint-3/manifest.json"), 2),
    "the folders are swapped": (lambda disks, made: swapped(disks), "rank0.safetensors is missing"),
    "the folder of 1 on 0, too": (lambda disks, made: swap(disks / "0", disks / "1"), "rank0.safetensors is missing"),
    "1 went on alone": (alone, 3),
    "the checkpoints are younger or older than they were": (clocks, 3),
    "a copy with a larger number on 1": (
        lambda disks, made: shutil.copytree(disks / "1/checkpoint-3", disks / "1/checkpoint-30"), 3),
}  # fmt: skip
IN_THE_WAY = ("checkpoint-3 is a file on 1", "checkpoint-3 is a symlink to checkpoint-2 on 1")  # of the next save
FAST = (
    "an older save of the step on 1",
    "checkpoint-3 of another run on 1",
    "all checkpoints of another run on 1",
    "0 has completed the save, 1 has not",
)


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_two_machines_go_on_with_the_same_or_are_refused(made, tmp_path, case):
    made, weights = made
    change, expected = CASES[case]
    disks = shutil.copytree(made / "run", tmp_path / "disks")
    change(disks, made)
    before = snapshot(disks)
    told, text = machines(disks, goes_on)
    now = snapshot(disks)
    if isinstance(expected, str):
        assert all(expected in each["refused"] for each in told) and now == before, text
        return
    assert [(each["step"], each["weights"]) for each in told] == [(expected, weights[expected - 1])] * 2, text
    stays = {name for name in before if name.split("/")[1] == f"checkpoint-{expected}"}
    assert stays and all(now[name] == before[name] for name in stays)
    assert told[0]["then"] == told[1]["then"] and {each["failed"] for each in told} == {int(case in IN_THE_WAY)}, text
    if case in IN_THE_WAY:
        return
    new = [disks / rank / f"checkpoint-{expected + 1}" for rank in "01"]
    assert not any(checkpoints.unsound(path, rank, 2) for rank, path in enumerate(new))
    assert checkpoints.identity(new[0]) == checkpoints.identity(new[1])


@pytest.mark.slow
def test_what_is_linked_elsewhere_stays_when_it_is_pruned_and_saved_over(made, tmp_path):
    disks, kept = shutil.copytree(made[0] / "run", tmp_path / "disks"), tmp_path / "kept"
    shutil.copytree(disks, kept, copy_function=os.link)
    before = snapshot(kept)
    for work in (saved_again, goes_on, goes_on):
        machines(disks, work)
    assert snapshot(kept) == before and not (disks / "1" / "checkpoint-2").exists()


def clock_ahead(rank):
    real = time.time
    time.time = lambda: real() + 5 * 3600 * rank


@pytest.mark.slow
@pytest.mark.parametrize("differ", [clock_ahead, lambda rank: socket.sethostname("localhost")], ids=["clock", "name"])
def test_a_clock_five_hours_ahead_on_one_machine_and_machines_of_one_name(made, tmp_path, differ):
    """Images of machines that were cloned are all called localhost, say."""
    disks = shutil.copytree(made[0] / "run", tmp_path / "disks")
    for step in (3, 4):
        told, text = machines(disks, lambda rank, folder: differ(rank) or goes_on(rank, folder))
        assert [(each["step"], each["failed"]) for each in told] == [(step, 0)] * 2, text
        assert told[0]["weights"] == told[1]["weights"], text


@pytest.mark.slow
def test_of_two_runs_that_start_at_once_in_one_folder_one_is_refused(tmp_path):
    def starts(rank):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name)
        launcher.GRACE = -4
        try:
            trained(rank, tmp_path / "run", seed=rank)
            time.sleep(2)  # the other one may be late
        except Refused as problem:
            return str(problem)

    told, codes, text = forked(starts, tmp_path / "log", 2, QUICK)
    assert codes == [0, 0] and told.count(None) == 1, text
    assert "another run is writing to" in next(filter(None, told))
    found = checkpoints.list_checkpoints(tmp_path / "run")
    assert len(found) == 2 and len({checkpoints.identity(path)["run"] for path in found}) == 1
    rows = [row for _, row in readers.rows_of(tmp_path / "run" / "metrics.jsonl")]
    assert len(rows) == 3 and None not in rows


def killed(rank, folder, of, call, name):
    """Goes on at step 2 and saves over checkpoint-3. The process `of` is killed when it is about to call os.<call> for
    `name`."""
    script = Script(folder, resume=folder / "checkpoint-2")
    script.step()
    if rank == of:
        real = getattr(os, call)

        def kills(*paths, **options):
            if str(paths[-1]).endswith(name):
                os.kill(os.getpid(), 9)
            return real(*paths, **options)

        setattr(os, call, kills)
    script.save()


KILLS = {  # {when a machine is killed: (machine, call, name, the step from which both go on)}
    "0 has completed the save, 1 has not": (1, "replace", "checkpoint-3/.checkpoint.tmp/manifest.json", "old"),
    "1 has completed the save, 0 has not": (0, "replace", "checkpoint-3/.checkpoint.tmp/manifest.json", "old"),
    "0 has moved the save to its place, 1 has not": (1, "replace", "checkpoint-3/rank1.safetensors", "new"),
    "1 has moved half of the save to its place": (1, "replace", "checkpoint-3/trainer_state.json", "new"),
    "0 has moved nearly all of the save to its place": (0, "replace", "checkpoint-3/manifest.json", "new"),
}


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in KILLS]
)
def test_a_save_over_an_older_one_is_on_both_machines_or_on_none(made, tmp_path, case):
    (made, _), (of, call, name, which) = made, KILLS[case]
    disks = shutil.copytree(made / "run", tmp_path / "disks")
    before = checkpoints.identity(disks / "0" / "checkpoint-3")
    with pytest.raises(AssertionError):  # a machine was killed
        machines(disks, lambda rank, run: killed(rank, run, of, call, name))
    told, text = machines(disks, goes_on)
    assert [each["step"] for each in told] == [3, 3] and told[0]["weights"] == told[1]["weights"], text
    now = [checkpoints.identity(disks / rank / "checkpoint-3") for rank in "01"]
    assert now[0] == now[1] and (now[0] == before) == (which == "old")
    assert which == "old" or not list(
        disks.rglob("*.tmp")
    )  # the next save there, or pruning, deletes what is not complete


@pytest.mark.slow
def test_a_folder_that_one_machine_cannot_list(made, tmp_path):
    def unreadable(rank, folder):
        script, real = Script(folder), os.listdir

        def fails(path="."):
            if rank and Path(path) == folder:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(path)

        os.listdir = fails
        script.step()
        script.save()
        return script.accelerator.record.failed_saves

    disks = shutil.copytree(made[0] / "run", tmp_path / "disks")
    before = snapshot(disks)
    told, text = machines(disks, unreadable)
    assert told == [1, 1] and "checkpoint-4 could not be written ([Errno 5] Input/output error)" in text, text
    now = snapshot(disks)
    assert all(now[name] == before[name] for name in before if "checkpoint" in name)
