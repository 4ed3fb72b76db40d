"""How long does it take from an empty folder and an empty environment to the first training step?

    python benchmarks/install.py --output results/install.json
    python benchmarks/install.py --output results/install.json --python 3.12 --cold

Builds the wheel, and for each Python that is here: makes an environment, installs the wheel with [recipes] from the
package index, and runs the demo in an empty folder until it has taken its first optimizer step. With uv, or where there
is none with pip. --cold: with an empty cache, so that everything is downloaded; a run of some keeps the rows of others.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, arguments, command, made, save

VERSIONS = ("3.11", "3.12", "3.13")
FIRST_STEP = " | global batch "  # in the line that a run prints after its first optimizer step
SHOWN = ("torch", "torchvision", "accelerate", "transformers", "torchao", "timm", "datasets")


def interpreters():
    """{version: file} of the Pythons of VERSIONS that are here."""
    found = {}
    for version in VERSIONS:
        known = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        same = sys.version_info[:2] == tuple(map(int, version.split(".")))
        for file in filter(None, [sys._base_executable if same else None, shutil.which(f"python{version}"), *known]):
            asked = [file, "-c", "import sys, venv, ensurepip; print('{}.{}'.format(*sys.version_info))"]
            done = subprocess.run(asked, capture_output=True, text=True)
            if done.stdout.strip() == version:
                found[version] = str(file)
                break
    return found


def build(folder):
    """Builds the wheel of this clone's files in `folder`."""
    source = Path(folder, "source")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "runs", "tests"))
    line = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    subprocess.run([*line, source], check=True)
    shutil.rmtree(source)
    [wheel] = Path(folder).glob("*.whl")
    return wheel


def measured(python, wheel, folder, cold=False):
    """The row of one Python: what three commands took, in an empty folder."""
    uv = shutil.which("uv") or Path(sys.executable).with_name("uv")
    name, at = f"./{wheel.name}[recipes]", Path(folder)
    shutil.copy(wheel, at)
    if Path(uv).exists():
        lines = [
            [uv, "venv", "--python", python, ".venv"],
            [uv, "pip", "install", "--python", ".venv/bin/python", name],
        ]
    else:
        lines = [[python, "-m", "venv", ".venv"], [".venv/bin/python", "-m", "pip", "install", name]]
    env = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    env |= {"UV_CACHE_DIR": str(at / "cache"), "PIP_NO_CACHE_DIR": "1"} if cold else {}
    begun, said = time.monotonic(), ""
    for line in lines:
        done = subprocess.run(line, cwd=at, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said += done.stdout
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, line))}: {done.stdout[-2000:]}")
    row = {"install_seconds": round(time.monotonic() - begun, 1)} | of_environment(at / ".venv", said)
    row["first_step_seconds"] = first_step(at, env)
    row["commands"] = [" ".join([Path(line[0]).name, *line[1:]]).replace(str(python), "PYTHON") for line in lines]
    row["commands"].append(".venv/bin/accelerate-recipes demo")
    row["left"] = sorted(path.name for path in at.iterdir() if path.name not in (".venv", "cache", wheel.name))
    return row


def of_environment(folder, said):
    """What was installed and downloaded, of uv's and pip's own words."""
    [site] = folder.glob("lib/python*/site-packages")
    versions = dict(path.name.removesuffix(".dist-info").rsplit("-", 1) for path in site.glob("*.dist-info"))
    size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
    loads = re.findall(r"Downloading [^\n]*\(([\d.]+) ?(K|M|G)i?B\)", said, re.I)
    loaded = sum(float(number) * {"k": 1e-3, "m": 1, "g": 1e3}[unit.lower()] for number, unit in loads)
    found = {"packages": len(versions), "installed_mb": round(size / 1e6), "downloaded_mb": round(loaded)}
    return found | {"versions": {name: versions[name] for name in SHOWN}}


def first_step(folder, env):
    """Seconds from the demo's start to the line after its first step. The run is ended there."""
    line, begun = [".venv/bin/accelerate-recipes", "demo"], time.monotonic()
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    demo, said = subprocess.Popen(line, cwd=folder, env=env, start_new_session=True, **pipe), []
    try:
        for text in demo.stdout:
            said.append(text)
            if FIRST_STEP in text:
                return round(time.monotonic() - begun, 1)
    finally:
        os.killpg(demo.pid, signal.SIGTERM)
        demo.communicate()
    raise SystemExit(f"no first step: {''.join(said)[-2000:]}")


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--python", nargs="+", choices=VERSIONS, default=VERSIONS)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    before = made(args.output, rows={})
    there, rows = interpreters(), before["rows"]
    for version in args.python:
        if version not in there:
            print(f"Python {version} is not here")
            continue
        with tempfile.TemporaryDirectory() as folder:
            wheel = build(folder)
            row = measured(there[version], wheel, tempfile.mkdtemp(dir=folder), args.cold)
            rows[f"{version}{', nothing cached' if args.cold else ''}"] = {"wheel_bytes": wheel.stat().st_size} | row
        print(version, row, flush=True)
    figures = {"command": command(before.get("command")), "rows": dict(sorted(rows.items()))}
    save(args.output, figures, ("accelerate", "transformers"))


if __name__ == "__main__":
    main()
