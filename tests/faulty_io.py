"""Lets every file operation of a save, a resume, a record and others fail once, and looks at what is left.

    python tests/faulty_io.py save resume --every 5

`campaign` does it in a process of its own, in which tests/faulty_io.c is preloaded: it sees what C and Rust write, too.
A first pass without a fault lists the operations on files in the run's folder. Then each of them fails in a fork: with
an error, with half of the bytes written, with every later one failing too as on a full disk, or the process is killed
there. Another fork, as another process of the user's, resumes from what is left, and saves again."""

import argparse
import contextlib
import ctypes
import errno
import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHANGES = ("create", "write", "fsync", "mkdir", "rename", "link", "truncate")
# How an operation fails: (its errno, or -1 for a kill and -2 for half of a write; whether all later ones fail too; which).
FAULTS = {
    "EIO": (errno.EIO, 0, (*CHANGES, "chmod", "unlink", "open", "opendir", "read")),
    "EACCES": (errno.EACCES, 0, ("create", "mkdir", "rename", "link", "chmod", "unlink", "open", "opendir")),
    "ENOSPC": (errno.ENOSPC, 0, CHANGES),
    "full": (errno.ENOSPC, 1, CHANGES),
    "half": (-2, 0, ("write",)),
    "kill": (-1, 0, (*CHANGES, "chmod", "unlink")),
}
TEMPORARY = ("*.tmp", ".model.tmp-*")
STAYS = ("checkpoint-1", "checkpoint-2", "weights")  # made before the fault
NEW_NAMES, NEW_MOUNTS, PRIVATE, BIND = 0x04000000, 0x00020000, 0x44000, 0x1000  # of Linux's sched.h and mount.h
WAIT = 60  # seconds for a process that should have ended


# ---- what the user's script does: set up, then the operations that fail ----


class Script:
    """A tiny run in `folder`, which goes on from the newest checkpoint there, or from the one that is named."""

    def __init__(self, folder, steps=0, resume=True, seed=0):
        import torch
        from accelerate.utils import ProjectConfiguration

        from faithful import Accelerator

        self.folder = Path(folder)
        torch.manual_seed(seed)
        self.accelerator = Accelerator(project_config=ProjectConfiguration(str(folder), total_limit=2))
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
        if resume:
            self.accelerator.load_state(None if resume is True else str(resume))
        for _ in range(steps):
            self.step()

    def step(self):
        import torch

        self.accelerator.backward(self.model(torch.ones(2, 8)).pow(2).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.accelerator.log({"loss": 1.0})

    def weights(self):
        """A hash of the weights as the step has left them: those of this process where they are sharded."""
        state = {name: getattr(part, "_local_tensor", part) for name, part in self.model.state_dict().items()}
        state = {name.removeprefix("module."): part for name, part in state.items()}
        return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()

    def save(self, folder=None):
        self.accelerator.save_state(folder)
        self.accelerator.checkpoints.wait()

    def save_over(self):
        self.save(self.folder / "checkpoint-2")

    def resume(self):
        self.accelerator.load_state()

    def record(self):
        self.step()
        self.accelerator.end_training()

    def weights_file(self):
        self.accelerator.save_model(self.model, self.folder / "weights")

    def shards(self):
        self.accelerator.save_model(self.model, self.folder / "weights", max_shard_size=300)

    def export(self):
        from tools import cli, export

        sys.argv = ["export", str(self.folder)]
        cli.run(export.main)


# name: (steps before it, whether it resumes before, environment, what it does, number of processes)
SCENARIOS = {
    "save": (1, True, {"FAITHFUL_ASYNC_SAVE": "0"}, Script.save, 1),
    "save behind training": (1, True, {"FAITHFUL_ASYNC_SAVE": "1"}, Script.save, 1),
    "resume": (0, False, {}, Script.resume, 1),
    "record": (0, True, {}, Script.record, 1),
    "save_model": (1, True, {}, Script.weights_file, 1),
    "save_model in shards": (1, True, {}, Script.shards, 1),
    "save_model in shards again": (1, True, {}, Script.shards, 1),  # in several files before, too
    "export": (0, False, {}, Script.export, 1),
    "save of two processes": (1, True, {"FAITHFUL_ASYNC_SAVE": "0"}, Script.save, 2),
    "resume of two processes": (0, False, {}, Script.resume, 2),
    "save over an older one": (1, True, {"FAITHFUL_ASYNC_SAVE": "0"}, Script.save_over, 1),
}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}
# Each process is a machine with a name and, where the run's folder is, a disk of its own. It needs root. A machine is
# killed, or its disk is full.
MACHINES = {
    "save of two machines": (1, True, {"FAITHFUL_ASYNC_SAVE": "0"}, Script.save, 2),
    "save of two machines over an older one": (1, True, {"FAITHFUL_ASYNC_SAVE": "0"}, Script.save_over, 2),
    "save of two machines behind training": (1, True, {"FAITHFUL_ASYNC_SAVE": "1"}, Script.save, 2),
    "save of two machines in shards": (1, True, {"FAITHFUL_ASYNC_SAVE": "0"} | FSDP, Script.save, 2),
}
SAME = ("save of two machines behind training", "save of two machines in shards")  # operations as those of the first


# ---- one case ----


def disk_of_its_own(rank, run, disk):
    """Makes this process a machine with a name of its own, on which `disk` is where others have the folder `run`."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(NEW_NAMES | NEW_MOUNTS) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(f"node{rank}")
    assert libc.mount(b"none", b"/", None, PRIVATE, None) == 0
    assert libc.mount(bytes(disk), bytes(run), None, BIND, None) == 0, os.strerror(ctypes.get_errno())


def may_mount():
    """Whether a child of this process may have mounts of its own."""
    child = os.fork()
    if not child:
        os._exit(ctypes.CDLL(None).unshare(NEW_NAMES | NEW_MOUNTS) and 1)
    return not os.waitpid(child, 0)[1]


def forked(work, log, processes=1, env=None, disks=None, run=None):
    """Runs `work(rank)` in forks and returns ([its value or None], [exit code], output). A code of None: it hangs.
    disks: with one for each process, they are machines, which have these folders where `run` is."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pids, files = [], [Path(f"{log}.{rank}.json") for rank in range(processes)]
    for rank, file in enumerate(files):
        file.unlink(missing_ok=True)
        if pid := os.fork():
            pids.append(pid)
            continue
        try:
            os.environ.update(env or {})
            if processes > 1:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes),
                                  LOCAL_WORLD_SIZE=str(processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                                  ACCELERATE_USE_CPU="true")  # fmt: skip
            if disks:
                os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
                disk_of_its_own(rank, run, disks[rank])
            with open(log, "a") as output:
                os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
            sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)
            value = work(rank)
            file.write_text(json.dumps(value))
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(1)
    codes, end = {}, time.monotonic() + WAIT
    while len(codes) < len(pids) and time.monotonic() < end:
        for pid in set(pids) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    end = min(end, time.monotonic() + (1 if disks else WAIT / 2))  # a launcher ends the others
        time.sleep(0.001)
    for pid in set(pids) - codes.keys():
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    values = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return values, [codes.get(pid) for pid in pids], Path(log).read_text()


class Campaign:
    def __init__(self, folder, name):
        self.home, self.name = Path(folder), name
        self.steps, self.resumes, self.env, self.act, self.processes = (SCENARIOS | MACHINES)[name]
        self.over, self.machines = "over" in name, name in MACHINES
        self.run, self.made, self.log = self.home / "run", self.home.with_name(self.home.name + "-made"), None
        self.shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self.shim.operations.restype = self.shim.failed.restype = ctypes.c_char_p
        shutil.rmtree(self.home, ignore_errors=True), shutil.rmtree(self.made, ignore_errors=True)
        self.run.mkdir(parents=True)
        self.disks = [self.home / f"disk{rank}" for rank in range(self.processes)] if self.machines else None
        for disk in self.disks or []:
            disk.mkdir()
        (self.home / "mine").write_text("mine")
        self.log = self.made.with_suffix(".log")
        self.expected = self.fork(self.first)[0]
        shutil.copytree(self.home, self.made)
        self.sound = set()  # contents of the folder from which another process has gone on
        self.files = self.snapshots()

    def fork(self, work, env=None):
        self.log.write_text("")
        return forked(work, self.log, self.processes, env or self.env, self.disks, self.run)

    def first(self, rank):
        """Makes the folder, and returns the weights after each step."""
        script, weights = Script(self.run, resume=False), {}
        for step in (1, 2):
            script.step()
            weights[step] = script.weights()
            script.save()
        script.shards() if self.name == "save_model in shards again" else script.weights_file()
        script.step()
        return weights | {3: script.weights()}

    def restore(self):
        shutil.rmtree(self.home)
        shutil.copytree(self.made, self.home)

    def faulty(self, rank, of=0, number=-1, fault="EIO"):
        """The user's script, in which the operation `number` of the process `of` fails."""
        from faithful.errors import Refused

        script = Script(self.run, self.steps, self.resumes) if self.name != "export" else _Only(self.run)
        script.accelerator and script.accelerator.wait_for_everyone()
        uuid.uuid4 = lambda: uuid.UUID(int=3)  # so that what is left is the same after many faults
        code, forever, _ = FAULTS[fault]
        error = None
        if rank == of:
            self.shim.arm(f"{self.home}/".encode(), number, code, forever)
        try:
            self.act(script)
        except SystemExit as problem:  # of export, which prints a line
            error = "Refused: " + self.log.read_text().split("refused: ")[-1].strip() if problem.code else None
        except Refused as problem:
            error = f"{type(problem).__name__}: {problem}"
        except Exception as problem:
            error = f"bare {type(problem).__name__}: {problem}"
        self.shim.disarm()
        accelerator = script.accelerator
        return {
            "error": error,
            "operations": self.shim.operations().decode().splitlines() if number < 0 else None,
            "failed": self.shim.failed().decode() if rank == of else "",
            "failed_saves": accelerator.record.failed_saves if accelerator else 0,
            "newest": accelerator.checkpoints.newest[0] if accelerator and accelerator.checkpoints.newest else None,
            "step": accelerator.steps.taken if accelerator else None,
        }

    def again(self, rank):
        """Another process goes on with what is left, and does the same again."""
        script = Script(self.run)
        told = {"step": script.accelerator.steps.taken, "weights": script.weights()}
        script.step()
        script.save()
        if "save_model" in self.name or self.over:
            self.act(script)
        script.accelerator.end_training()
        if self.name == "export":
            with contextlib.suppress(SystemExit):
                script.export()
        return told | {"failed_saves": script.accelerator.record.failed_saves}

    def cases(self):
        """[(process, number, fault, operation and name)] of all that can fail."""
        found = []
        for of in range(self.processes):
            self.restore()
            values, codes, text = self.fork(lambda rank, of=of: self.faulty(rank, of), self.env)
            if any(codes) or any(value["error"] for value in values):
                raise SystemExit(f"{self.name} fails without a fault: {codes} {values}\n{text}")
            for number, line in enumerate(values[of]["operations"]):
                faults = ("kill", "full") if self.machines else FAULTS
                found += [(of, number, fault, line) for fault in faults if line.split("\t")[0] in FAULTS[fault][2]]
        return found

    def case(self, of, number, fault):
        """(what failed, what is wrong afterwards as a list of lines)."""
        self.restore()
        values, codes, text = self.fork(lambda rank: self.faulty(rank, of, number, fault), self.env)
        wrong, told = [], values[of]
        if None in codes and not (self.machines and fault == "kill" and codes[of]):
            wrong.append("a process hangs")
        if self.machines and fault != "kill" and len({value and bool(value["failed_saves"]) for value in values}) > 1:
            wrong.append("one machine says that it could not be saved, another one does not")
        if fault != "kill":
            wrong += [f"process {rank} ends with {code}" for rank, code in enumerate(codes) if code and rank == of]
            if told and told["error"] and not in_order(told["error"], self.home):  # the others lose their peer
                wrong.append(f"{told['error']} in several lines, or without a file")
        if "Traceback" in text and fault != "kill":
            wrong.append("a traceback")
        said = told and (told["error"] or told["failed_saves"])
        if told and not told["error"] and told["step"] == 0:
            wrong.append("starts at step 0, although there are checkpoints")
        if (
            sorted(path.name for path in self.home.iterdir()) != sorted(path.name for path in self.made.iterdir())
            or (self.home / "mine").read_text() != "mine"
        ):
            wrong.append("something outside the folder")
        wrong += self.wrong_with_files(told, said)
        same = contents(self.home)
        if same in self.sound:
            return (told or {}).get("failed"), wrong, text  # another process has gone on from the same files
        newest = self.newest()
        again, codes, output = self.fork(self.again)
        if any(codes):
            wrong.append(f"another process cannot go on: {output[-1500:]}")
        else:
            steps = {told["step"] for told in again}
            if steps != {newest}:
                wrong.append(f"went on from step {steps}, the newest complete one is {newest}")
            elif any(told["weights"] != of[str(newest)] for told, of in zip(again, self.expected, strict=True)):
                wrong.append(f"went on with other weights than those of step {newest}")
            if any(told["failed_saves"] for told in again):
                wrong.append("the next save fails")
            left = [str(path.relative_to(self.home)) for kind in TEMPORARY for path in self.home.rglob(kind)]
            wrong += [f"left for ever: {', '.join(left)}"] if left else []
            wrong += self.wrong_with_record()
        if not wrong:
            self.sound.add(same)
        return (told or {}).get("failed"), wrong, text

    def newest(self):
        """The step of the newest checkpoint that is complete, on all disks the same one, or 0."""
        from faithful.checkpoint import checkpoints

        found, held = {0: 0}, self.disks or [self.run]
        for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3"):
            with tempfile.TemporaryDirectory() as copy:  # nothing is moved to its place before another process looks
                there = [Path(copy, str(at), name) for at in range(len(held))]
                for disk, folder in zip(held, there, strict=True):
                    folder.mkdir(parents=True)
                    if (disk / name).is_dir():
                        shutil.copytree(disk / name, folder, dirs_exist_ok=True)
                saves = [[checkpoints.identity(folder, staged) for staged in (False, True)] for folder in there]
                for folder, (_, staged) in zip(there, saves, strict=True):
                    if staged and all(staged in save for save in saves):
                        checkpoints.settle(folder, everywhere=True)
                if not any(checkpoints.unsound(folder, rank, len(held)) for rank, folder in enumerate(there)):
                    [which, *others] = [checkpoints.identity(folder) for folder in there]
                    if others in ([], [which]):
                        found[which["counter"]] = checkpoints.read_state(there[0])["steps"]["taken"]
        return found[max(found)]

    def snapshots(self):
        """{name: {file: bytes}} of what was made before the fault."""
        held = self.disks or [self.run]
        return {
            name: {(n, f): b for n, disk in enumerate(held) for f, b in snapshot(disk / name).items()} for name in STAYS
        }

    def wrong_with_files(self, told, said):
        saves = self.name.startswith("save ") or self.name == "save"
        newest, now = self.newest(), self.snapshots()
        stays = {name for name in STAYS if self.files[name].items() <= now[name].items()}
        if "checkpoint-2" not in stays and not (self.over and newest == 3):
            yield "checkpoint-2 is not as it was"
        if "checkpoint-1" not in stays and not (saves and newest == 3):
            yield "checkpoint-1 is not as it was"
        if saves and told and not said and not (newest == told["newest"] == 3):
            yield "a checkpoint is reported that is not complete"
        if "save_model" in self.name:
            held, allowed = weights_in(self.run / "weights"), {self.expected[0]["3"]}
            if said or not told:  # several files that were being moved have no index
                allowed |= {self.expected[0]["2"]} | ({None} if self.name.endswith("again") else set())
            if held not in allowed:
                yield f"the weights are neither the old ones nor the new ones ({held and 'a mixture'})"
        elif "weights" not in stays:
            yield "the weights are not as they were"

    def wrong_with_record(self):
        from faithful.disk import readers

        run = self.disks[0] if self.machines else self.run
        rows = [row for _, row in readers.rows_of(run / "metrics.jsonl")]
        damaged = rows.count(None)
        if damaged or not rows:
            yield f"metrics.jsonl has {damaged} damaged lines, {len(rows) - damaged} whole ones"
        if readers.value_of(run / "run.json", {})["status"] != "finished":
            yield "run.json is not that of a finished run"


def in_order(error, home):
    """Whether an error is one of ours, in one line that names a file."""
    return not error.startswith("bare") and "\n" not in error and str(home) in error


def weights_in(folder):
    """A hash of the weights in a folder, as Script.weights makes it, or None if no loader would take them."""
    from safetensors.torch import load_file

    try:
        files = [folder / "model.safetensors"]
        if not files[0].exists():
            index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
            files = [folder / name for name in sorted(set(index.values()))]
        state = {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, ValueError):
        return None
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


class _Only:
    """A script that only reads the run's folder."""

    def __init__(self, folder):
        self.folder, self.accelerator = folder, None


def snapshot(path):
    """{name: bytes} of the files in a folder."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def contents(folder):
    """A hash of all names and bytes in a folder, but for the record's, which has times."""
    files = [
        (str(path), path.read_bytes() if path.is_file() and path.name != "run.json" else b"")
        for path in sorted(folder.rglob("*"))
    ]
    return hashlib.sha256(repr(files).encode()).hexdigest()


def campaign(folder, scenarios=tuple(SCENARIOS), every=1, seconds=550):
    """[{scenario, fault, operation, tried, wrong: [lines]}]; of `every` cases one. Returns None without a C compiler."""
    library = Path(folder) / "faulty_io.so"
    source = str(Path(__file__).with_suffix(".c"))
    try:
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    line = [sys.executable, __file__, *scenarios, "--every", str(every), "--folder", str(folder)]
    env = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--every", type=int, default=1, help="try one of this many cases")
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import gc

    import torch
    import torch._dynamo  # or each fork imports it

    from faithful.evidence import record
    from faithful.launch import machine

    torch.set_num_threads(1)
    torch.ones(1, requires_grad=True).sum().backward()  # or forks cannot
    versions = machine.versions()
    commits = dict.fromkeys(record.commits(Path(__file__)))
    record.commits, machine.versions = lambda script: commits, lambda: versions  # these would take most of the time
    record.code_sha256 = lambda script: ""
    gc.freeze()
    rows = []
    for name in args.scenarios:
        began, made = time.monotonic(), Campaign(args.folder / name.replace(" ", "-") / "home", name)
        cases, counts = made.cases(), {}
        sample = sorted(random.Random(name).sample(cases, len(cases) // args.every))
        for of, number, fault, line in sample:
            failed, wrong, text = made.case(of, number, fault)
            row = counts.setdefault((fault, line.split("\t")[0]), {"tried": 0, "wrong": []})
            row["tried"] += 1
            row["wrong"] += [f"{name}, process {of}, operation {number} ({line}), {fault}: {each}" for each in wrong]
            if wrong:
                print(*row["wrong"][-len(wrong) :], text[-2000:], sep="\n", file=sys.stderr, flush=True)
        rows += [
            {"scenario": name, "fault": fault, "operation": operation} | row
            for (fault, operation), row in sorted(counts.items())
        ]
        print(f"{name}: {sum(row['tried'] for row in counts.values())} of {len(cases)} cases, "
              f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
