"""What every benchmark writes with its figures: command, date, machine and versions."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent


def device_name():
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    name = model[0] if model else platform.machine()
    return f"CPU: {name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def versions(packages=()):
    of_packages = {"python": platform.python_version(), "torch": torch.__version__}
    return of_packages | {package: importlib.metadata.version(package) for package in packages}


def command():
    """The command line; of a folder outside of this repository only the name."""
    words = [f"../{pathlib.Path(word).name}" if os.path.isabs(word) else word for word in sys.argv[1:]]
    return " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *words])


def save(file, figures, packages=(), run=None):
    """Writes the figures to a JSON file; what they hold of the four already is kept.

    run: the run.json of a run that they are of, if another process computed; else `packages` are named beside torch.
    """
    origin = {"command": command(), "date": datetime.date.today().isoformat()}
    if run is None:
        origin |= {"device": device_name(), "versions": versions(packages)}
    else:
        origin |= {"device": run["device_name"], "versions": run["versions"]}
    file = pathlib.Path(file)
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text(json.dumps(origin | figures, indent=1) + "\n")
    print(f"wrote {file}")


def came_from(figures):
    """The command, the machine and the main versions; the file has all versions."""
    versions = [f"{name} {version}" for name, version in figures["versions"].items() if version and name != "cuda"]
    shown = ", ".join(versions[:4])
    return f"`{figures['command']}` ({figures['device']}; {shown}; {figures['date']})"
