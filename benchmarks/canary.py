"""What do the newest releases of other packages break here?

    python benchmarks/canary.py                       all tests that are not slow
    python benchmarks/canary.py tests/own_scripts     these alone

Installs the newest releases of PACKAGES, with all that the tests need, into an environment in a temporary folder, which
is removed at the end. There it looks at each function that faithful replaces (faithful/patches.py): is it still there,
with the same signature and the same source (of a value: its type) as in the environment of this script, which has the
pins? Then it runs the tests in the new environment, and those that fail there once more here: a test that fails with
the pins too is not theirs. Writes results/canary.json and a table. It exits with 1 if anything is broken.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

from harness import ROOT, arguments, save

from faithful import patches

PACKAGES = ["accelerate", "transformers", "torch", "torchao", "deepspeed", "trl"]
RESULT = ROOT / "results" / "canary.json"
TARGET = re.compile(r"[\w.]+:[\w.]+")  # rows of the table of patches that name one function
LOOK = """
import hashlib, importlib, inspect, json, pkgutil, sys
found = {}
for row in json.load(sys.stdin):
    try:
        module, _, name = row.partition(":")
        value = importlib.import_module(module)
        for part in name.split("."):
            try:
                value = inspect.getattr_static(value, part)
            except AttributeError:  # torch's config modules make theirs when asked
                value = getattr(value, part)
        value = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
    except Exception as error:
        found[row] = {"there": False, "why": f"{type(error).__name__}: {error}"[:200]}
        continue
    try:
        source = hashlib.sha256(inspect.getsource(value).encode()).hexdigest()
        of = {"signature": str(inspect.signature(value)), "source": source}
    except (TypeError, ValueError, OSError):
        of = {"signature": type(value).__name__, "source": None}  # a value
    found[row] = {"there": True} | of
print("LOOKED" + json.dumps(found))
"""


def requirements():
    """What the tests need, PACKAGES without versions: their newest releases are wanted."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["recipes"], *extras["dev"]]
    rest = [line for line in wanted if re.match(r"[\w-]+", line)[0] not in PACKAGES]
    return PACKAGES + rest


def run(command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=ROOT, **options)


def install(folder):
    """Makes the environment. Returns (its python, seconds, bytes on the disk)."""
    began = time.monotonic()
    uv = [sys.executable, "-m", "uv"]
    packages = [*uv, "pip", "install", "-q", "--upgrade", "--python", folder / "bin/python", *requirements()]
    for command in ([*uv, "venv", "-q", "--python", sys.executable, folder], packages):
        done = run(command)
        if done.returncode:
            sys.exit(f"error: {' '.join(map(str, command[2:5]))} failed: {done.stderr.strip()[-2000:]}")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    return folder / "bin/python", time.monotonic() - began, size


def versions(python):
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    return json.loads(run([python, "-c", code, *PACKAGES]).stdout)


def look(python):
    """{row: what is there} of the functions that faithful replaces."""
    rows = [row for row in patches.TABLE if TARGET.fullmatch(row)]
    done = run([python, "-c", LOOK], input=json.dumps(rows))
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOOKED")]
    if not lines:
        sys.exit(f"error: the functions cannot be looked at: {done.stderr.strip()[-2000:]}")
    return json.loads(lines[0].removeprefix("LOOKED"))


def run_tests(python, tests, folder):
    """(number that ran, {test: what it said} of those that failed)."""
    report = Path(folder, f"{len(os.listdir(folder))}.xml")
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}
    done = run(
        [python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}", *tests], env=env
    )
    if not report.exists():
        sys.exit(f"error: pytest did not run: {(done.stdout + done.stderr).strip()[-2000:]}")
    cases, failed = list(ET.parse(report).iter("testcase")), {}
    for case in cases:
        said = "".join(f"{part.get('message')}\n{part.text}" for part in case if part.tag in ("failure", "error"))
        if said:
            file = case.get("file") or case.get("classname", "").replace(".", "/") + ".py"
            failed[f"{file}::{case.get('name')}"] = said
    return len(cases), failed


def judged(before, now, failed):
    """A row for each function: what changed, and the failing tests whose report names it."""
    for row, was in before.items():
        new, name = now[row], row.rpartition(".")[2].rpartition(":")[2]
        tests = [test for test, said in failed.items() if re.search(rf"\b{name}\b", said)]
        same = [
            None if not (was["there"] and new["there"]) else was[key] == new[key] for key in ("signature", "source")
        ]
        yield {"patch": row, "there": new["there"], "was_there": was["there"], "same_signature": same[0],
               "same_source": same[1], "failing": tests, "why": new.get("why")}  # fmt: skip


def broken(row):
    return row["was_there"] and (not row["there"] or row["same_signature"] is False or bool(row["failing"]))


def table(figures):
    words = {True: "yes", False: "NO", None: "-"}
    yield "| what faithful replaces | there | same signature | same source | failing tests that name it |"
    yield "|---|---|---|---|---|"
    for row in figures["patches"]:
        cells = [words[row[key]] for key in ("there", "same_signature", "same_source")]
        yield f"| `{row['patch']}` | {' | '.join(cells)} | {', '.join(row['failing']) or '-'} |"


def main(argv=None):
    parser = arguments(__doc__)
    parser.add_argument("tests", nargs="*", help="files and options for pytest; default: all that are not slow")
    parser.add_argument("--output", type=Path, default=RESULT)
    args, more = parser.parse_known_args(argv)
    tests = args.tests + more
    with tempfile.TemporaryDirectory(prefix="canary-") as folder, tempfile.TemporaryDirectory() as reports:
        python, seconds, size = install(Path(folder, "env"))
        newest, pinned = versions(python), versions(sys.executable)
        print(f"installed in {seconds:.0f} s, {size / 1e9:.1f} GB: " + ", ".join(f"{n} {v}" for n, v in newest.items()))
        before, now = look(sys.executable), look(python)
        count, failed = run_tests(python, tests, reports)
        here = run_tests(sys.executable, list(failed), reports)[1] if failed else {}
    theirs = {test: said for test, said in failed.items() if test not in here}
    rows = list(judged(before, now, theirs))
    figures = {
        "pinned": pinned, "newest": newest, "install_seconds": round(seconds), "install_bytes": size, "tests": count,
        "failing": sorted(theirs), "failing_with_the_pins_too": sorted(here), "patches": rows,
        "said": {test: said.strip().splitlines()[0][:300] for test, said in theirs.items()},
    }  # fmt: skip
    save(args.output, figures, ("accelerate", "transformers"))
    print("\n".join(table(figures)))
    named = {test for row in rows for test in row["failing"]}
    print(f"{count} tests, {len(theirs)} fail with the newest releases alone:", *sorted(theirs) or ["none"])
    print("no patch is named by:", *sorted(theirs.keys() - named) or ["none"])
    return int(bool(theirs) or any(map(broken, rows)))


if __name__ == "__main__":
    sys.exit(main())
