"""Folders of runs that are moved, copied, linked, mounted elsewhere or named otherwise, and what of another run comes
into them. The run goes on from the newest checkpoint, the same on all machines, or is refused in a line; nothing of
another run is lost, and nothing is written where the run has not taken the folder."""

import ctypes
import json
import os
import shutil
import tempfile
from pathlib import Path

import faulty_io
import pytest
from accelerate.state import AcceleratorState, GradientState
from faulty_io import Script, forked, snapshot
from test_two_disks import QUICK, trained

from faithful.checkpoint import checkpoints
from faithful.errors import Refused
from faithful.launch import launcher
from shared import args
from tools import export, show

pytestmark = pytest.mark.skipif(not faulty_io.may_mount(), reason="a disk for each process needs the right to mount")
FSDP = QUICK | faulty_io.FSDP


def at(tmp_path, work, on=(0, 1), env=QUICK):
    """Runs `work(rank, mount)` on machines with the disks tmp_path/disks/<on[rank]>. Returns ([its values], output): of
    a machine that is refused, the line."""

    def refusable(rank):
        launcher.GRACE = -4
        os.environ["WORLD_SIZE"] = str(len(on))
        try:
            return work(rank, mount)
        except Refused as problem:
            return {"refused": str(problem)}

    mount, disks = tmp_path / "mount", [tmp_path / "disks" / str(disk) for disk in on]
    for folder in (mount, *disks):
        folder.mkdir(parents=True, exist_ok=True)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    more = alone if len(on) == 1 else {}
    told, codes, text = forked(refusable, tmp_path / "log", len(on), env | more, disks, mount)
    assert not any(codes), text[-3000:]
    return told, text


def starts(folder):
    return {"weights": trained(None, folder)[-1]}


def goes_on(folder, resume=True):
    script = Script(folder, resume=resume)
    told = {"step": script.accelerator.steps.taken, "weights": script.weights()}
    script.step()
    script.save()
    script.accelerator.end_training()
    return told | {"failed": script.accelerator.record.failed_saves}


def elsewhere(rank, mount):
    """The folder, of which machine 1 has the disk under another path."""
    place = mount.with_name(f"mount{rank}") if rank else mount
    if rank:
        libc = ctypes.CDLL(None)
        place.mkdir(exist_ok=True)
        assert libc.mount(bytes(mount), bytes(place), None, faulty_io.BIND, None) == 0 == libc.umount2(bytes(mount), 2)
    return place / "run"


def working_folder(rank, mount):
    (mount / f"home{rank}").mkdir(exist_ok=True)
    os.chdir(mount / f"home{rank}")
    return Path("run")


def linked(disks):
    (disks / "0" / "large").mkdir(parents=True)
    (disks / "0" / "run").symlink_to("large")


def nothing(disks):
    pass


NAMES = {  # {how the machines have the folder: (what is done to the disks, name of it, disks, what a refusal says)}
    "a symlink on 0 alone": (linked, lambda rank, mount: mount / "run", (0, 1), None),
    "another name on 1": (nothing, lambda rank, mount: mount / f"run{rank}", (0, 1), None),
    "another working folder on 1": (nothing, working_folder, (0, 1), None),
    "one disk, mounted elsewhere on 1": (nothing, elsewhere, (0, 0), "is the folder that the main process has as"),
    "a disk of 1 and 2 that 0 does not see": (
        nothing, lambda rank, mount: mount / "run", (0, 1, 1), "let all machines see one disk, or each its own"),
    "a disk of 0 and 2, and one of 1": (nothing, lambda rank, mount: mount / "run", (0, 1, 0), None),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMES)
def test_what_machines_save_under_names_of_their_own_they_find_again(tmp_path, case):
    change, name, on, refused = NAMES[case]
    change(tmp_path / "disks")
    told, text = at(tmp_path, lambda rank, mount: starts(name(rank, mount)), on)
    if refused:
        assert all(refused in each["refused"] for each in told), text
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != tmp_path]
        return
    before, now = told[0]["weights"], at(tmp_path, lambda rank, mount: goes_on(name(rank, mount)), on)
    assert now[0] == [{"step": 3, "weights": before, "failed": 0}] * len(on), now[1]


def test_a_machine_takes_the_folder_of_the_main_process_s_name(tmp_path):
    """There, not in that of its own name, checkpoints are written: another run's is moved aside."""
    at(tmp_path, lambda rank, mount: trained(rank, mount / "run0", seed=1) and None)
    shutil.rmtree(tmp_path / "disks" / "0")
    theirs = snapshot(tmp_path / "disks" / "1" / "run0")
    _, text = at(tmp_path, lambda rank, mount: starts(mount / f"run{rank}"))
    assert "run0 on node1 holds checkpoints of another run, which are now in run_earlier/" in text
    assert snapshot(tmp_path / "disks" / "1" / "run0" / "run_earlier") == theirs
    lock = launcher.lock_folder(tmp_path / "disks" / "1" / "run0")

    def refused(rank, mount):
        os.close(lock)  # the fork's: the parent holds it still
        return starts(mount / f"run{rank}")

    before = snapshot(tmp_path / "disks")
    told, text = at(tmp_path, refused)
    os.close(lock)
    assert all("another run is writing to" in each["refused"] for each in told), text
    assert snapshot(tmp_path / "disks") == before


MISSING = "rank1.safetensors is missing: copy it from the disk of the machine that wrote it"
NUMBERS = {  # {on which disks a run of two machines goes on: (environment, disks, what is said)}
    "ddp on 0 alone": (QUICK, (0,), "is of another run: num_processes 2 -> 1"),
    "ddp on 1 alone": (QUICK, (1,), "rank0.safetensors is missing, it was written to another machine's disk"),
    "ddp on three": (QUICK, (0, 1, 2), "no readable manifest.json (FileNotFoundError) on node2"),
    "fsdp on 0 alone": (FSDP, (0,), MISSING),
    "fsdp on three": (FSDP, (0, 1, 2), "no readable manifest.json (FileNotFoundError) on node2"),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_another_number_of_machines_is_refused_while_files_are_missing(tmp_path, case):
    env, on, said = NUMBERS[case]
    at(tmp_path, lambda rank, mount: starts(mount / "run"), env=env)
    before = snapshot(tmp_path / "disks")
    told, text = at(tmp_path, lambda rank, mount: goes_on(mount / "run"), on, env)
    assert all(said in each["refused"] for each in told), text
    assert snapshot(tmp_path / "disks") == before


def test_a_read_only_disk_of_one_machine_leaves_what_both_have(tmp_path):
    def read_only(rank, mount):
        if rank:
            assert not ctypes.CDLL(None).mount(None, bytes(mount), None, 0x1000 | 0x20 | 0x1, None)  # bind, remount, ro
        return goes_on(mount / "run")

    at(tmp_path, lambda rank, mount: starts(mount / "run"))
    before = snapshot(tmp_path / "disks")
    told, text = at(tmp_path, read_only)
    assert [(each["step"], each["failed"]) for each in told] == [(3, 1)] * 2, text
    assert "checkpoint-4 could not be written ([Errno 30] Read-only file system" in text
    now = snapshot(tmp_path / "disks")
    assert all(now[name] == before[name] for name in before if "checkpoint-" in name)


# ---- one machine ----


def alone(tmp_path, work, *words, **options):
    """Runs `work(*words)` in a process of its own. Returns (its value or the refusal, output)."""

    def refusable(rank):
        try:
            return work(*words, **options)
        except Refused as problem:
            return {"refused": str(problem)}

    [told], [code], text = forked(refusable, tmp_path / "log", env=QUICK)
    assert code == 0, text[-3000:]
    return told, text


def ended(folder, seed=0, saves=True):
    """A run that takes three steps and finishes."""
    script = Script(folder, resume=False, seed=seed)
    for _ in range(3):
        script.step()
        if saves:
            script.save()
    script.accelerator.end_training()


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777, 0o700, None])
def test_another_user_s_run_stays_whole(tmp_path, mode):
    """Whatever may be written there, and whoever may look. None: nobody else may look at a folder above."""

    def of_nobody():
        ended(tmp_path / "first")  # imports what the user nobody may not read
        AcceleratorState._reset_state(reset_partial_state=True), GradientState._reset_state()
        ctypes.CDLL(None).setfsuid(65534)
        told = goes_on(tmp_path / "a", resume=False)
        ctypes.CDLL(None).setfsuid(0)
        return told

    alone(tmp_path, ended, tmp_path / "a")
    if mode is not None:
        for folder in [tmp_path, *tmp_path.parents]:
            if Path(tempfile.gettempdir()) in folder.parents:
                folder.chmod(0o755)
        (tmp_path / "a").chmod(mode)
    before = snapshot(tmp_path / "a")
    told, text = alone(tmp_path, of_nobody)
    assert told["step"] == 0 and told["failed"] == 1 and "run.json cannot be written" in text, text
    assert snapshot(tmp_path / "a") == before and not [*(tmp_path / "a").glob("run_*")]


# Each changes the folders a, b of two runs. Returns where a run goes on, with which checkpoint, and what must stay.


def moved(a, b):
    os.rename(a, b.with_name("moved"))
    return b.with_name("moved"), True, [b, b.with_name("moved") / "checkpoint-3"]


def copied(a, b):
    shutil.copytree(a, b.with_name("copy"))
    return b.with_name("copy"), True, [a, b, b.with_name("copy") / "checkpoint-3"]


def into(a, b):
    return b, a / "checkpoint-2", [a, b]


def next_number(a, b):
    shutil.copytree(b / "checkpoint-3", a / "checkpoint-4")
    state = a / "checkpoint-4" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"counter": 4}))
    entries = json.loads((a / "checkpoint-4" / "manifest.json").read_text())
    (a / "checkpoint-4" / "manifest.json").write_text(json.dumps(entries | {state.name: checkpoints.entry(state)}))
    return a, True, [*(a / name for name in ("run.json", "metrics.jsonl", "checkpoint-2", "checkpoint-3")), b]


def links(a, b):
    targets = []
    for name in ("rank0.safetensors", "trainer_state.json"):
        targets.append(Path(shutil.move(a / "checkpoint-3" / name, a.with_name(name))))
        (a / "checkpoint-3" / name).symlink_to(a.with_name(name))
    return a, True, [*targets, b, a / "checkpoint-2"]


def no_checkpoint(a, b):
    for path in b.glob("checkpoint-*"):
        shutil.move(path, b.with_name(f"their-{path.name}"))
    return b, True, [a, b]


def somebody_s(a, b):
    (a / "run.json").write_text("mine")
    (a / "metrics.jsonl").write_text('{"mine": 1}\n')
    return a, True, [a / "run.json", a / "metrics.jsonl", a / "checkpoint-3", b]


MIXED = {  # {what has happened: (what is done, whether b has checkpoints, the step from which it goes on)}
    "the folder was moved": (moved, True, 3),
    "the folder was copied": (copied, True, 3),
    "it goes on in a finished run's folder": (into, True, 2),
    "it goes on in a finished run's folder without checkpoints": (into, False, 2),
    "another run's checkpoint under the next number": (next_number, True, 3),
    "the newest one's files are symlinks": (links, True, 2),
    "latest, in a finished run's folder without checkpoints": (no_checkpoint, False, 0),
    "the record is somebody else's": (somebody_s, True, 3),
}


def contents(path):
    return [each.read_bytes() for each in [path, *path.rglob("*")] if each.is_file() and not each.is_symlink()]


@pytest.mark.parametrize("case", MIXED)
def test_what_is_there_of_another_run_is_not_lost(tmp_path, case):
    change, saves, step = MIXED[case]
    a, b = tmp_path / "a", tmp_path / "b"
    alone(tmp_path, ended, a), alone(tmp_path, ended, b, seed=1, saves=saves)
    place, resume, stays = change(a, b)
    before = [content for path in stays for content in contents(path)]
    told, text = alone(tmp_path, goes_on, place, resume)
    assert told["step"] == step, text
    now = contents(tmp_path)
    assert before and all(content in now for content in before), text
    rows = [json.loads(line)["step"] for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert rows == [*range(rows[0], step + 2)] and json.loads((place / "run.json").read_text())["run"], text


def test_tools_read_a_folder_that_is_being_written(tmp_path):
    """Each in a result or a line, and training goes on as if none had looked."""

    def writes_or_reads(rank):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name)
        if not rank:
            script = Script(tmp_path / "run", resume=False)
            script.accelerator.project_configuration.total_limit = 1
            for _ in range(40):
                script.step()
                script.save()
            script.accelerator.end_training()
            (tmp_path / "ended").touch()
            return script.accelerator.record.failed_saves
        said = set()
        while not (tmp_path / "ended").exists():
            for use, *words in ((export.export, tmp_path / "run", tmp_path / "out"), (show.text, tmp_path / "run")):
                try:
                    said.add(use.__name__ if use(*words) else "nothing")
                except (Refused, args.Refused) as problem:
                    said.add("refused" if len(str(problem).splitlines()) == 1 else str(problem))
        return sorted(said)

    [failed, said], codes, text = forked(writes_or_reads, tmp_path / "log", 2, QUICK)
    assert codes == [0, 0] and failed == 0 and "warning" not in text, text[-3000:]
    assert {"export", "text"} <= {*said} <= {"export", "text", "refused"}
    assert checkpoints.unsound(tmp_path / "run" / "checkpoint-40") is None
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-40", "metrics.jsonl", "run.json"]
