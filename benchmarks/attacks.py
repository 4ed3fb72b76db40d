"""Attacks on what a run reads and writes: how many were tried, and how many did no harm. And thirteen faults that were
found in an earlier version, each tried again on two checkouts.

    git worktree add ../before 0150a8e
    python benchmarks/attacks.py --before ../before --output results/faults.json
    python benchmarks/attacks.py --checkout ../before --only 3 8        prints what these faults do there
    python benchmarks/attacks.py --families pages --output results/faults.json       runs one family again

families      cases that were tried, and those that did no harm: nothing lost, nothing touched outside the folder, one
              line that names the file. tests/faulty_io.py makes those of file operations, the tests that a row names
              make the others, and some of them draw inputs. Those of two machines need root. Of files at their bounds
              a row says what reading takes: seconds of a processor, and bytes of memory; 5 s and 500 MB are the most.
the_thirteen  for each fault: whether it is held off, and what happened, `before` and `now`
"""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from harness import ROOT, arguments, command, made, origin, save

sys.path += [str(ROOT), str(ROOT / "tests")]

FAMILIES = {  # name: what pytest is given
    "names in files": ["tests/checkpoint/test_strangers.py", "-k",
                       "name or symlink or only_a_file or leave_its_folder"],
    "damaged checkpoints": ["tests/checkpoint/test_strangers.py", "tests/checkpoint/test_checkpoint.py", "-k",
                            "unsound or forged or damaged or no_run_writes or not_the_model_s or no_byte"],
    "damaged rows and records": ["tests/checkpoint/test_strangers.py", "-k", "torn or history or record"],
    "configs and options": ["tests/recipes/test_fuzz_inputs.py"],
    "data and files": ["tests/recipes/test_fuzz_files.py"],
    "data of strangers, and of two machines": [
        "tests/recipes/test_data_errors.py",
        "tests/checkpoint/test_own_disks.py::test_data_that_differ_between_machines_are_refused"],
    "numbers of options and keys": ["tests/config/test_ranges.py"],
    "what reaches a terminal": ["tests/launch/test_printing.py"],
    "pages": ["tests/tools/test_page.py", "tests/tools/test_show.py"],
    "two runs in a folder": ["tests/checkpoint/test_run_folder.py"],
    "two machines' disks that differ": ["tests/checkpoint/test_two_disks.py", "tests/checkpoint/test_own_disks.py"],
    "folders elsewhere, and of other runs": ["tests/checkpoint/test_other_places.py"],
}  # fmt: skip
DISKS = "saves of two machines"  # one is killed, or its disk is full, at every file operation
BOUNDS = "files at their bounds"  # as large as those that are accepted can be
MOST_SECONDS, MOST_BYTES = 5, 500_000_000  # of a processor and of memory, to read one of them
STEPS = ["--model", "vit_nano", "--max_steps", "4", "--save_steps", "2", "--eval_steps", "0", "--logging_steps", "1"]
LAUNCH = ["tools/accelerate_launch.py", "--config_file"]
SECONDS = 300  # after which an attack has hung the program, on a machine that has other work, too


class Home:
    """A folder with files of a user's, a run that was downloaded, and a checkout whose code is attacked."""

    def __init__(self, checkout, made, folder):
        self.checkout, self.run, self.folder = checkout, Path(folder, "downloads", "run"), Path(folder)
        self.mine = self.folder / "home" / "secret"
        shutil.copytree(made, self.run)
        self.mine.parent.mkdir()
        self.mine.write_text("mine")

    def start(self, *words, env=None, **options):
        """Starts Python in the checkout. A first word that begins with a new line is a program, else a file."""
        words = [*(["-c"] if "\n" in words[0] else []), *map(str, words)]
        own = {"PYTHONPATH": str(self.checkout), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        env = os.environ | own | (env or {})
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        return subprocess.Popen([sys.executable, *words], cwd=self.checkout, env=env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)  # fmt: skip

    def call(self, *words, **options):
        """Returns (exit code, output)."""
        return ended(self.start(*words, **options))

    def train(self, *words):
        return self.call("recipes/vit.py", *STEPS, *words)

    def checkpoint(self, step=4):
        return self.run / f"checkpoint-{step}"


def ended(process):
    """Waits for the end of a process. Returns (exit code, output); a process that hangs is killed."""
    try:
        text, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        text, _ = process.communicate()
        return "hangs", text
    return process.returncode, text


def in_words(result):
    """(whether a program has ended in one line for the user, what it said last) without folders and colours."""
    code, text = result
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    said = next((line for line in reversed(lines) if re.search("refused|rror", line)), lines[-1])
    said = re.sub(r"(/[\w.-]+)+/", "", ascii(said[:1000])[1:-1])[:160]
    traced = "Traceback" in text
    return code != "hangs" and not traced, f"exit code {code}, {'a traceback, ' if traced else ''}{said}"


# ---- the thirteen. Each returns (whether it is held off, what happened) ----


def manifest(home):
    """the manifest of a checkpoint names a file elsewhere"""
    folder, staged = home.checkpoint(), home.checkpoint() / ".checkpoint.tmp"
    manifest = json.loads((folder / "manifest.json").read_text())
    staged.mkdir()
    for name in (*manifest, "manifest.json"):
        shutil.copy(folder / name, staged / name)
    entry = next(iter(manifest.values()))
    (folder / "manifest.json").write_text(json.dumps(manifest | {"../../../home/secret": entry}))
    shutil.rmtree(home.run / "model")
    home.call("tools/export.py", home.run)
    there = home.mine.exists()
    return there, "the file stays" if there else "the user's file is deleted by export"


def clock(home):
    """the clock is set back between two checkpoints"""
    _, text = home.call("""
import sys, time, torch
from accelerate.utils import ProjectConfiguration
from faithful import Accelerator
real, ahead = time.time, 0
time.time = lambda: real() + ahead
accelerator = Accelerator(project_config=ProjectConfiguration(sys.argv[1], total_limit=2))
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
for step in range(1, 7):
    accelerator.backward(model(torch.ones(2, 4)).sum()), optimizer.step()
    ahead = 5 * 3600 if step <= 2 else 0
    accelerator.save_state()
accelerator.load_state()
print("newest:", accelerator.steps.taken)
""", home.folder / "clock")  # fmt: skip
    kept = sorted(path.name for path in (home.folder / "clock").glob("checkpoint-*"))
    newest = (re.findall(r"newest: (\d+)", text) or [None])[0]
    return newest == "6", f"of steps 1 to 6 it keeps {', '.join(kept)}, resumes at {newest}"


def pipe(home):
    """export --output names a pipe"""
    target = home.folder / "pipe"
    os.mkfifo(target)
    result = home.call("tools/export.py", home.run, "--output", target)
    kept = target.is_fifo()
    return kept, f"{'it stays' if kept else 'it is replaced by a file'}; {in_words(result)[1]}"


def state(home):
    """trainer_state.json of the newest checkpoint is damaged"""
    (home.checkpoint() / "trainer_state.json").write_text("{}")
    shutil.rmtree(home.run / "model")
    _, text = home.call("tools/export.py", home.run)
    said = "skipping" in text
    return said, f"export reads an older one and {'says so' if said else 'says nothing'}"


def torn(home):
    """a row of metrics.jsonl is torn, as after a crash"""
    first, *rest = (home.run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (home.run / "metrics.jsonl").write_text("".join([first, '{"step": 2, "lo', *rest]))
    result = home.train("--output_dir", home.run, "--resume_from_checkpoint", home.checkpoint(2))
    return result[0] == 0 and in_words(result)[0], in_words(result)[1]


def output(home):
    """--output_dir is a file"""
    result = home.train("--output_dir", home.mine)
    return result[0] == 2 and in_words(result)[0], in_words(result)[1]


def interrupts(home):
    """Ctrl-C again while the run ends"""
    result = home.call("""
import os, signal, sys, time, torch
from faithful import Accelerator
try:
    from faithful.launch import process
except ImportError:  # an earlier version
    from faithful import process
signal.signal(signal.SIGINT, signal.default_int_handler)
accelerator = Accelerator(project_dir=sys.argv[1])
name = "as_refusal" if hasattr(process, "as_refusal") else "explained"
does, once = getattr(process, name), iter([True])
def interrupted(*what):
    if next(once, False):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
    return does(*what)
setattr(process, name, interrupted)
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
os.kill(os.getpid(), signal.SIGINT)
""", home.folder / "interrupted")  # fmt: skip
    return result[0] == 130 and in_words(result)[0], in_words(result)[1]


def image(home):
    """a PostScript file is named .png"""
    (home.folder / "gs").write_text(f"#!/bin/sh\ntouch {home.folder}/started\nexit 1\n")
    (home.folder / "gs").chmod(0o755)
    env = {"PATH": f"{home.folder}:{os.environ['PATH']}"}
    home.call("""
import sys
from PIL import Image
from shared import images
Image.new("RGB", (8, 8)).save(sys.argv[1], "EPS")
images.read_image({"path": sys.argv[1], "bytes": None}, 0)
""", home.folder / "a.png", env=env)  # fmt: skip
    started = (home.folder / "started").exists()
    return not started, "Ghostscript is started" if started else "it is not opened"


def ports(home):
    """who can reach the ports of two training processes on one machine (those of the launcher are torch's own)"""
    words = ["--max_steps", 100000, "--output_dir", home.folder / "two"]
    script = ["accelerate_configs/ddp_fp32.yml", "recipes/vit.py"]
    run = home.start(*LAUNCH, *script, *STEPS, *words, start_new_session=True)
    while run.poll() is None and not (home.folder / "two" / "checkpoint-2").exists():
        time.sleep(0.1)
    family = psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []
    found = {c.laddr.ip for process in family for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    everyone = found & {"::", "0.0.0.0"}
    return bool(found) and not everyone, f"they listen on {', '.join(sorted(found)) or 'nothing: the run has failed'}"


def weights(home):
    """weights of a checkpoint are int8, or not finite, with hashes that are right"""
    done = []
    for kind in ("int8", "nan"):
        folder = shutil.copytree(home.run, home.folder / kind) / "checkpoint-2"
        home.call("""
import json, sys
from pathlib import Path
from safetensors.torch import load_file, save_file
try:
    from faithful.checkpoint import checkpoints as checkpoint
except ImportError:  # an earlier version
    from faithful import checkpoint
file = Path(sys.argv[1], "rank0.safetensors")
held = load_file(file)
name = next(key for key in sorted(held) if key.startswith("0:model/"))
held[name] = held[name].char() if sys.argv[2] == "int8" else held[name] * float("nan")
save_file(held, file)
manifest = Path(sys.argv[1], "manifest.json")
manifest.write_text(json.dumps({n: checkpoint.entry(file.with_name(n)) for n in json.loads(manifest.read_text())}))
""", folder, kind)  # fmt: skip
        code, text = home.train("--output_dir", folder.parent, "--resume_from_checkpoint", folder)
        named = re.search("of another model|as they were saved", text)
        said = f"named, exit code {code}" if named else in_words((code, text))[1]
        done.append((bool(named) and "Traceback" not in text, f"{kind}: {said}"))
    return all(held for held, _ in done), "; ".join(said for _, said in done)


def secret(home):
    """--token X of a script stands in run.json"""
    home.call("""
import sys, torch
from faithful import Accelerator
accelerator = Accelerator(project_dir=sys.argv[1])
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
accelerator.backward(model(torch.ones(2, 4)).sum()), optimizer.step()
accelerator.end_training()
""", home.folder / "secret", "--token", "swordfish")  # fmt: skip
    shown = "swordfish" in (home.folder / "secret" / "run.json").read_text()
    return not shown, "the token is in it" if shown else "there is *** in its place"


def options(home):
    """options and configs that cannot be: a batch of 0, port -1, aliases that unfold to megabytes"""
    bomb = home.folder / "bomb.yml"
    levels = "".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 8))
    bomb.write_text(f"distributed_type: 'NO'\nfsdp_config:\n  a0: &a0 [x]\n{levels}num_processes: *a7\n")
    ends = {
        "batch 0": home.train("--output_dir", home.folder / "b", "--per_device_train_batch_size", "0"),
        "port -1, as ./launch.sh checks it": home.call("tools/check.py", "--main_process_port", "-1", "ddp_fp32"),
        "check of the aliases": home.call("tools/check.py", bomb),
    }  # fmt: skip
    held = all(in_words(end)[0] and end[0] == 2 and len(end[1]) < 5000 for end in ends.values())
    return held, "; ".join(f"{name}: {in_words(end)[1]}, {len(end[1]):,} characters" for name, end in ends.items())


def terminal(home):
    """show writes to a closed pipe, and shows what commands a terminal"""
    record = json.loads((home.run / "run.json").read_text())
    (home.run / "run.json").write_text(json.dumps(record | {"device_name": "\x1b]0;mine\x07\x1b[2J"}))
    _, text = home.call("tools/show.py", home.run)
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run([sys.executable, "tools/show.py", str(home.run)], cwd=home.checkout, stdout=writer,
                            stderr=subprocess.PIPE, text=True)  # fmt: skip
    os.close(writer)
    escapes, trace = "\x1b" in text or "\x07" in text, "rror" in closed.stderr
    return not escapes and not trace, (
        f"{'commands reach' if escapes else 'no command reaches'} the terminal; a closed pipe is "
        f"{in_words((closed.returncode, closed.stderr))[1] if trace else 'silent'}"
    )


THIRTEEN = (manifest, clock, pipe, state, torn, output, interrupts, image, ports, weights, secret, options, terminal)
NUMBERS = range(1, len(THIRTEEN) + 1)


def trained(checkout, folder):
    """A run in a new folder, of a checkout."""
    made = Path(folder, "made")
    made.mkdir()
    code, text = Home(checkout, made, Path(folder, "0")).train("--output_dir", made)
    if code:
        raise SystemExit(f"{checkout} does not run at all:\n{text[-2000:]}")
    return made


def thirteen(checkout, only):
    """{number: (held off, what happened)} of the faults with these numbers, on a checkout."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
        made = trained(checkout, folder)
        for number in only:
            attack = THIRTEEN[number - 1]
            found[number] = attack(Home(checkout, made, Path(folder, str(number))))
            held, seen = found[number]
            print(f"{number:2} {attack.__doc__}: {'held off' if held else 'HARM'}: {seen}", flush=True)
    return found


# ---- families ----


def operations(every):
    """The rows of the file operations that fail: by fault and operation, over all scenarios; and kills while saving."""
    import faulty_io

    with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
        found = [row for name in faulty_io.SCENARIOS for row in faulty_io.campaign(folder, [name], every, 3600) or []]
    if not found:
        raise SystemExit("no C compiler: file operations cannot be made to fail")
    for row in found:
        print(*row["wrong"], sep="\n", end="")
    kills = [row for row in found if row["fault"] == "kill" and row["scenario"].startswith("save")]
    kinds = sorted({(row["fault"], row["operation"]) for row in found})
    by_kind = {kind: counted([row for row in found if (row["fault"], row["operation"]) == kind]) for kind in kinds}
    rows = [{"fault": fault, "operation": operation} | row for (fault, operation), row in by_kind.items()]
    return [
        {"family": "every file operation fails once, or the process is killed there"} | counted(found) | {"rows": rows},
        {"family": "of these, kills while saving"} | counted(kills),
    ]


def of_machines(every, scenarios=None, before=()):
    """The row of kills and full disks of two machines with disks of their own: by scenario, fault and operation. Of the
    scenarios whose operations are those of another one, one of four cases. before: rows, which stay those of the
    scenarios that are not named."""
    import faulty_io

    with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
        names = scenarios or faulty_io.MACHINES
        shares = {name: every * 4 if name in faulty_io.SAME else every for name in names}
        found = [row for name, of in shares.items() for row in faulty_io.campaign(folder, [name], of, 7200)]
    for row in found:
        print(*row["wrong"], sep="\n", end="")
    keys = ("scenario", "fault", "operation")
    rows = [row for row in before if row["scenario"] not in shares]
    rows += [{key: each[key] for key in keys} | counted([each]) for each in found]
    print(json.dumps(counted(found)), flush=True)
    return {"family": DISKS} | {key: sum(row[key] for row in rows) for key in ("tried", "survived")} | {"rows": rows}


def at_bounds():
    """The row of files at their bounds: each in the folder of a run, which tools read, and a run that goes on."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
        made, run = trained(ROOT, folder), Path(folder, "run")
        uses = readers_of(made)
        for file, what, content, used in large_files(made):
            shutil.copytree(made, run)
            Path(run, file).write_bytes(content)
            for use in used:
                seconds, memory, refusal = taken(uses[use], run)
                rows.append({"file": file, "of": what, "bytes": len(content), "read_by": use, "seconds": seconds,
                             "memory_bytes": memory, "refusal": refusal})  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
            shutil.rmtree(run)
    held = [row for row in rows if row["seconds"] < MOST_SECONDS and row["memory_bytes"] < MOST_BYTES]
    return {"family": BOUNDS, "tried": len(rows), "survived": len(held), "rows": rows}


def taken(use, run):
    """(seconds of the processor, bytes of memory, what is refused or None) of `use(run)`, in a fork."""
    import torch

    from faithful.launch import machine

    machine.trim_memory()  # of this process: what a fork takes of it again is not seen
    reader, writer = os.pipe()
    if not (child := os.fork()):
        began, memory, refusal = time.process_time(), machine.Memory(torch.device("cpu")), None
        try:
            use(run)
        except Exception as error:
            refusal = re.sub(r"(/[\w.-]+)+/", "", f"{type(error).__name__}: {error}")[:160]
        os.write(writer, json.dumps([round(time.process_time() - began, 2), memory.peak(), refusal]).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        return json.load(file)


def readers_of(made):
    """{who reads files of a run: function of its folder}"""
    from faithful.checkpoint import checkpoints
    from faithful.saving import state
    from tools import advise, export, judge, records, show

    def resume(run):
        """As a run that goes on: a forger's manifest has the right hash."""
        folder = run / "checkpoint-4"
        manifest = json.loads((folder / "manifest.json").read_text())
        for name in ("trainer_state.json", "rank0.safetensors"):
            manifest[name] = checkpoints.entry(folder / name)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        if reason := checkpoints.unsound(folder):
            raise ValueError(reason)
        values, tensors = checkpoints.read_state(folder), checkpoints.tensors_of(folder, 0)
        state.read_values(folder, values, tensors, ("registered", "groups", "schedulers", "optimizers"))

    return {
        "resume": resume,
        "verify": lambda run: checkpoints.unsound(run / "checkpoint-4"),
        "show": show.text,
        "show --html": show.page_of,
        "compare": lambda run: judge.make([records.read(run), records.read(made)], ""),
        "export": lambda run: export.record_of(run) and export.source_of(run),
        "export of a checkpoint": lambda run: export.plain_tensors([run / "checkpoint-4" / "rank0.safetensors"]),
        "estimate --comparison": advise.read_comparison,
    }


def large_files(made):
    """Yields (name in the folder of a run, what it has many of, its bytes, who reads it)."""
    from faithful.disk import readers
    from tools import records

    wide = "\U0001f600"  # one such character, and each of a text takes four bytes

    def changed(file, bounds, change, *path):
        """The file with another value at `path`: `change` of the number of values that the bounds leave."""
        value = json.loads((made / file).read_text())
        inner = functools.reduce(lambda at, key: at[key], path[:-1], value)
        inner[path[-1]] = change(bounds[1] - readers.values_in((made / file).read_bytes()) - 9)
        return json.dumps(value, ensure_ascii=False).encode()

    def text(bounds):
        return lambda number: [wide + "a" * (bounds[0] - 200_000)]

    def keys(number, value=1):
        return {f"key {at}": value for at in range(number)}

    def names(number):
        return [f"name {at}" for at in range(number)]

    def lines(number, rest):
        return "".join(f'{{"step":{at}{rest}}}\n' for at in range(number)).encode()

    of_run, of_rows = ("show", "show --html", "compare", "export"), ("show --html", "compare")
    yield "run.json", "notes, a text", changed("run.json", readers.RECORD, text(readers.RECORD), "notes"), of_run
    for change, *path in (
        (names, "notes"), (keys, "args"), (keys, "final", "metrics"),
        (lambda number: keys(number, "1"), "versions"), (keys, "evidence", "dtypes", "parameters"),
        (names, "evidence", "linear_names"),
        (lambda number: [{"name": str(at), "reason": ""} for at in range(number // 3)], "evidence", "linear_skipped"),
        (lambda number: [[at, 1.5] for at in range(number // 3)], "seen", "loss_curve"),
        (lambda number: [{} for _ in range(number // 2)], "what nobody reads"),
    ):  # fmt: skip
        yield "run.json", ".".join(path), changed("run.json", readers.RECORD, change, *path), of_run
    yield "data.json", "classes", changed("data.json", readers.RECORD, names, "classes"), ("compare", "export")
    measures = "".join(f',"measure {at}":1' for at in range(1990))
    yield "metrics.jsonl", "lines", lines(records.MOST, ""), of_rows
    yield "metrics.jsonl", "lines, too many to show", lines(readers.MOST_ROWS, ""), of_rows
    yield "metrics.jsonl", "numbers", lines(records.MOST // 2, ',"loss":1.5'), of_rows
    yield "metrics.jsonl", "names", lines(records.MOST // 2000, measures), of_rows
    yield "metrics.jsonl", "values", lines(9, ',"x":[' + "{}," * 200_000 + "{}]"), of_rows
    yield "metrics.jsonl", "text", lines(95, f',"x":"{wide}{"a" * (readers.LONGEST_ROW - 99)}"'), of_rows
    curve = "[" + "{}," * (readers.CHECKPOINT[1] // 2 - 99) + "{}]"
    report = f'{{"schema_version":2,"rows":[],"args":{{}},"recipe":"vit","device":"","measure":"loss","x":{curve}}}'
    yield "report.json", "values", report.encode(), ("estimate --comparison",)
    file = "checkpoint-4/trainer_state.json"
    for what, change in (("values", names), ("a text", text(readers.CHECKPOINT))):
        yield file, f"registered, {what}", changed(file, readers.CHECKPOINT, change, "registered"), ("resume",)
    entries = "".join(f',"file {at}":{{"bytes":0,"xxh3_128":"0","keeper":1}}' for at in range(99_990))
    manifest = (made / "checkpoint-4" / "manifest.json").read_text().rstrip()[:-1] + entries + "}"
    yield "checkpoint-4/manifest.json", "files", manifest.encode(), ("verify",)
    tensor = '"0:model/{0}":{{"dtype":"F32","shape":[1],"data_offsets":[{1},{2}]}}'
    tensors = ",".join(tensor.format(at, 4 * at, 4 * at + 4) for at in range(210_000))
    note = json.dumps({"__metadata__": {"x": text(readers.CHECKPOINT)(9)[0]}}, ensure_ascii=False)
    for what, header, size in (("tensors", f"{{{tensors}}}", 4 * 210_000), ("a text", note, 0)):
        content = len(header.encode()).to_bytes(8, "little") + header.encode() + bytes(size)
        yield "checkpoint-4/rank0.safetensors", what, content, ("resume", "export of a checkpoint")


def counted(rows):
    """Cases of faulty_io.campaign: how many, and how many of them left all as it should be."""
    case = re.compile(r".*?, operation \d+")  # of which there may be several lines
    wrong = {(row["fault"], case.match(line)[0]) for row in rows for line in row["wrong"]}
    tried = sum(row["tried"] for row in rows)
    return {"tried": tried, "survived": tried - len(wrong)}


def family(name, words, only=None, before=()):
    """The row of one family: its tests are run, and counted. None if there are no such tests. Of those that draw inputs
    it has each. only: pytest's -k, for some of them; `before` are the rows of the others."""
    files = [word.partition("::")[0] for word in words if ".py" in word]
    if not all((ROOT / file).is_file() for file in files):
        print(f"{name}: there is no {', '.join(files)}, left out")
        return None
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *words, "-m", "slow or not slow"]
        command += ["-k", only] if only else []
        subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, capture_output=True)
        suite = xml.etree.ElementTree.parse(report).getroot().find("testsuite")
    rows = {row["test"]: row for row in before} if only else {}
    for case in suite.iter("testcase"):
        test, ends = f"{case.get('classname').rpartition('.')[2]}::{case.get('name')}", {each.tag for each in case}
        drawn = sum(int(each.get("value")) for each in case.iter("property") if each.get("name") == "inputs")
        if "skipped" not in ends:
            rows[test] = {"test": test, "held": not ends & {"failure", "error"}, "inputs": drawn}
    row = {"family": name, "tests": files, "tried": len(rows), "survived": sum(row["held"] for row in rows.values())}
    print(json.dumps(row), *(test for test, each in rows.items() if not each["held"]), flush=True)
    drawn = sum(each["inputs"] for each in rows.values())  # by tests all of whose inputs passed
    return row | ({"inputs": drawn, "rows": [*rows.values()]} if drawn or only else {})


def again(names, every, scenarios, only, output):
    """Runs these families, and writes their rows in the place of those in the output file. scenarios: of two machines'
    saves, those to run, or all. only: see `family`."""
    here = {key: value for key, value in origin(("accelerate",)).items() if key in ("date", "versions", "device")}
    old = {row["family"]: row for row in made(output)["families"]} if output else {}
    kept = {name: row.get("rows", ()) for name, row in old.items()}
    own = {DISKS: lambda: of_machines(every, scenarios, kept.get(DISKS, ())), BOUNDS: at_bounds}
    tested = {
        name: functools.partial(family, name, words, only, kept.get(name, ())) for name, words in FAMILIES.items()
    }
    rows = {name: (own | tested)[name]() | here for name in names}
    if output:
        before = made(output)
        families = list(({row["family"]: row for row in before["families"]} | rows).values())
        figures = before | {"command": command(before["command"]), "families": families}
        output.write_text(json.dumps(figures, indent=1) + "\n")


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="of the code that is attacked; default: this one")
    parser.add_argument("--before", type=Path, help="checkout of the earlier version")
    parser.add_argument("--only", type=int, nargs="+", choices=NUMBERS, default=NUMBERS, help="of the thirteen")
    parser.add_argument(
        "--families",
        nargs="+",
        choices=[*FAMILIES, DISKS, BOUNDS],
        help="only their rows; the rest is in the output file",
    )
    parser.add_argument("--every", type=int, default=1, help="let one of this many file operations fail")
    parser.add_argument("--scenarios", nargs="+", help=f"of {DISKS}, as tests/faulty_io.py names them: only these")
    parser.add_argument(
        "--only_tests", metavar="EXPR", help="of families that draw inputs, those that pytest's -k takes"
    )
    args = parser.parse_args()
    if args.families:
        return again(args.families, args.every, args.scenarios, args.only_tests, args.output)
    now = thirteen(args.checkout.resolve(), args.only)
    if not args.output:
        return
    if not args.before:
        parser.error("--output needs --before, a checkout of the earlier version")
    before = thirteen(args.before.resolve(), args.only)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=args.before, capture_output=True, text=True)
    sides = {"before": before, "now": now}
    rows = [
        {"number": number, "what": THIRTEEN[number - 1].__doc__}
        | {side: dict(zip(("held", "seen"), found[number], strict=True)) for side, found in sides.items()}
        for number in args.only
    ]
    with ThreadPoolExecutor(2) as both:  # each waits for processes of its own
        tested = both.submit(lambda: [family(*row) for row in FAMILIES.items()])
        families = [*operations(args.every), of_machines(args.every), at_bounds(), *filter(None, tested.result())]
    figures = {"commit_before": commit.stdout.strip(), "families": families, "the_thirteen": rows}
    save(args.output, figures, ("accelerate", "hypothesis"))


if __name__ == "__main__":
    main()
