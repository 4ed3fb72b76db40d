"""Does FP8 train as well as bf16? Trains each config on digits with the same seeds, through `accelerate launch`.

    python benchmarks/convergence.py --output results/fp8_digits.json

A config agrees with bf16 if the mean of its final held-out loss is within 1% of bf16's, or no further from it than the
range of bf16's own seeds (max - min). If you start it again, it does not repeat finished runs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from provenance import save

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = (
    "single_fp8 single_fp8_ao_rowwise single_fp8_ao_rowwise_with_gw_hp single_fp8_te single_fp8_te_current "
    "single_fp8_te_block single_fp8_msamp_o1 single_fp8_msamp_o2 single_fp8_msamp_o3"
)


def run(config, seed, folder, steps):
    """Returns the record of one run. Starts the run if it has not finished before."""
    out = folder / f"{config}-{seed}"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [f"accelerate_configs/{config}.yml", "recipes/vit.py", "--seed", str(seed), "--max_steps", str(steps)]
    command += ["--eval_steps", "0", "--save_steps", "0", "--logging_steps", str(steps), "--output_dir", str(out)]
    for attempt in range(2):
        if (out / "run.json").exists():
            record = json.loads((out / "run.json").read_text())
            if record["status"] == "finished":
                return record
            out.rename(out.with_name(f"{out.name}.{record['status']}-{time.time():.0f}"))
        if attempt == 0:
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=DEFAULT.split())
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "convergence")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    rows, baseline = [], None
    for config in ["single_bf16", *args.configs]:
        records = [run(config, seed, args.runs, args.steps) for seed in range(args.seeds)]
        losses = [record["final"]["metrics"]["eval_loss"] for record in records]
        row = {
            "config": config,
            "eval_loss": losses,
            "mean": statistics.mean(losses),
            "spread": max(losses) - min(losses),
            "accuracy": statistics.mean(record["final"]["metrics"]["accuracy"] for record in records),
            "linear_converted": records[0]["evidence"]["linear_converted"],
            "bytes_per_parameter": records[0]["evidence"]["bytes_per_parameter"]["total"],
        }
        baseline = baseline or row
        away = abs(row["mean"] - baseline["mean"])
        row["agrees_with_bf16"] = away <= max(0.01 * baseline["mean"], baseline["spread"])
        rows.append(row)
        print(
            f"{config:34} loss {row['mean']:.4f} (spread {row['spread']:.4f})  accuracy {row['accuracy']:.4f}  "
            f"{'agrees' if row['agrees_with_bf16'] else 'DIFFERS'}",
            flush=True,
        )
    if args.output:
        save(args.output, {"steps": args.steps, "rows": rows}, run=records[0])


if __name__ == "__main__":
    main()
