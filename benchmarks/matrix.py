"""Trains recipes under every config for a few steps: what each config does with each recipe, or why it refuses it.

    python benchmarks/matrix.py --recipes diffusion sft --output results/matrix.json

Each cell is a launch, `./launch.sh CONFIG RECIPE` with four optimizer steps: its seconds from the command to its end,
the summary line that it printed, or the line with which it was refused. A launch that ends in any other way is an
error. Two launches run beside each other, so the seconds say which is long and not how long it takes alone. What
--output holds already is kept.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from provenance import ROOT, command, save

STEPS = "--max_steps 4 --logging_steps 1 --eval_steps 0 --save_steps 0".split()
OPTIONS = {"sft": "--sequence_length 64 --skip_long --per_device_train_batch_size 4".split()}
WITHOUT_AVERAGE = ["--ema_decay", "0"]  # DeepSpeed trains one model, and the average of weights is a second


def cell(recipe, config, more=()):
    """The row of one launch."""
    with tempfile.TemporaryDirectory() as folder:
        line = ["./launch.sh", config, recipe, *STEPS, *OPTIONS.get(recipe, ()), *more, "--output_dir", f"{folder}/run"]
        began = time.monotonic()
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        row = {"recipe": recipe, "config": config, "options": list(more), "seconds": time.monotonic() - began}
        lines = (done.stdout + done.stderr).splitlines()
        said = [text for text in lines if text.startswith(("refused:", "error:", f"{config}.yml:"))]
        if done.returncode == 0:
            record = json.loads(Path(folder, "run", "run.json").read_text())
            return row | {"status": record["status"], "says": record["evidence"]["truth"]}
        if done.returncode == 2 and said:
            return row | {"status": "refused", "says": said[-1].partition(": ")[2]}
        sys.exit(f"{recipe} under {config} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def cells(recipe, config):
    """The row of a launch and, where only the average of weights is in the way, that of a launch without it."""
    row = cell(recipe, config)
    several = row["status"] == "refused" and "the script prepares several" in row["says"]
    return [row, cell(recipe, config, WITHOUT_AVERAGE)] if several else [row]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=sorted(path.stem for path in (ROOT / "recipes").glob("*.py")))
    parser.add_argument("--configs", nargs="+", default=sorted(p.stem for p in (ROOT / "accelerate_configs").iterdir()))
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    rows = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    known = {(row["recipe"], row["config"]) for row in rows}
    wanted = [(r, c) for r in args.recipes for c in args.configs if (r, c) not in known]
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(lambda pair: cells(*pair), wanted):
            rows += done
            for row in done:
                print(row["recipe"], row["config"], f"{row['seconds']:.0f} s", row["status"], row["says"], flush=True)
            rows.sort(key=lambda row: (row["recipe"], row["config"], row["options"]))
            save(args.output, {"command": command(), "rows": rows}, ("accelerate", "transformers", "timm"))


if __name__ == "__main__":
    main()
