"""How long the README's first two commands take, and the accuracy they reach.

    python benchmarks/demo.py --output results/demo.json

Each command runs twice and the second run is reported, so that Python's byte code is cached. Run nothing else with it.
"""

import argparse
import json
import re
import shutil
import subprocess
import time
from pathlib import Path

from provenance import ROOT, save

COMMANDS = (
    "./launch.sh demo",
    "accelerate launch --config_file accelerate_configs/fsdp_fp8.yml recipes/vit.py --max_steps 20",
)


def timed(command):
    """(seconds, run.json) of the second of two runs."""
    for _ in range(2):
        began = time.perf_counter()
        done = subprocess.run(command.split(), cwd=ROOT, check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        out = Path(ROOT, re.search(r"^finished: (.*)$", done.stdout, re.M).group(1))
        record = json.loads((out / "run.json").read_text())
        shutil.rmtree(out)
    return seconds, record


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    rows = []
    for command in COMMANDS:
        seconds, record = timed(command)
        accuracy = record["final"]["metrics"]["accuracy"]
        rows.append({"command": command, "seconds": seconds, "steps": record["final"]["step"], "accuracy": accuracy})
        print(f"{command}: {seconds:.1f} s, accuracy {accuracy:.4f}", flush=True)
    save(args.output, {"rows": rows}, run=record)


if __name__ == "__main__":
    main()
