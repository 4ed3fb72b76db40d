"""Attacks on what a run reads and writes: how many were tried, and how many did no harm.

    python benchmarks/attacks.py --output results/faults.json                        all of them, in hours
    python benchmarks/attacks.py --families pages --output results/faults.json       runs one family again

A family is a number of cases that were tried, and of those that did no harm: nothing lost, nothing touched outside the
folder, one line that names the file. tests/faulty_io.py makes those of file operations, the tests that a row names make
the others, and some of them draw inputs. Those of two machines need root. Of files at their bounds a row says what
reading takes: seconds of a processor, and bytes of memory; 5 s and 500 MB are the most.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path

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
OPERATIONS = "every file operation fails once, or the process is killed there"
DISKS = "saves of two machines"  # one is killed, or its disk is full, at every file operation
BOUNDS = "files at their bounds"  # as large as those that are accepted can be
MOST_SECONDS, MOST_BYTES = 5, 500_000_000  # of a processor and of memory, to read one of them
STEPS = ["--model", "vit_nano", "--max_steps", "4", "--save_steps", "2", "--eval_steps", "0", "--logging_steps", "1"]


def trained(folder):
    """A run in a new folder."""
    made = Path(folder, "made")
    line = [sys.executable, "recipes/vit.py", *STEPS, "--output_dir", str(made)]
    done = subprocess.run(line, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"it does not train at all:\n{(done.stdout + done.stderr)[-2000:]}")
    return made


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
        {"family": OPERATIONS} | counted(found) | {"rows": rows},
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
        made, run = trained(folder), Path(folder, "run")
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
    """The row of one family: its tests are run, and counted. Of those that draw inputs it has each. only: pytest's -k,
    for some of them; `before` are the rows of the others."""
    files = [word.partition("::")[0] for word in words if ".py" in word]
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


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, help="a JSON file; the rows of other families in it stay")
    every = (OPERATIONS, DISKS, BOUNDS, *FAMILIES)
    parser.add_argument("--families", nargs="+", choices=every, default=every, help="only these")
    parser.add_argument("--every", type=int, default=1, help="let one of this many file operations fail")
    parser.add_argument("--scenarios", nargs="+", help=f"of {DISKS}, as tests/faulty_io.py names them: only these")
    parser.add_argument("--only_tests", metavar="EXPR", help="of families that draw inputs, what pytest's -k takes")
    args = parser.parse_args()
    before, here = made(args.output, families=[]), origin(("accelerate", "hypothesis"))
    about = {key: before.get(key, here[key]) for key in ("date", "device", "versions")}
    rows = {row["family"]: row for row in before["families"]}
    for name in args.families:
        kept = rows.get(name, {}).get("rows", ())
        if name == OPERATIONS:
            new = operations(args.every)
        elif name == DISKS:
            new = [of_machines(args.every, args.scenarios, kept)]
        else:
            new = [at_bounds() if name == BOUNDS else family(name, FAMILIES[name], args.only_tests, kept)]
        rows |= {row["family"]: row | {key: here[key] for key in about} for row in new}
        if args.output:
            figures = {"command": command(before.get("command")), "families": [*rows.values()]}
            save(args.output, about | figures)


if __name__ == "__main__":
    main()
