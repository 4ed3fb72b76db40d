"""What every amp8 benchmark writes beside its figures."""

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
    found = {"python": platform.python_version(), "torch": torch.__version__}
    return found | {package: importlib.metadata.version(package) for package in packages}


def save(name, figures, packages=()):
    """Writes results/<name>.json: the figures, and how, where and when they were measured."""
    record = {
        "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": device_name(),
        "versions": versions(packages),
        **figures,
    }
    path = ROOT / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")
