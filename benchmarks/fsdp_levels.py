"""Compares MS-AMP's O2 under FSDP2 with bf16 under FSDP2 and O2 under DDP: held-out loss in pairs, and memory.

    OMP_NUM_THREADS=1 python benchmarks/fsdp_levels.py --output results/fsdp_levels.json

Loss: the recipes vit (digits) and gpt (Python's docs) on two processes. Runs with the same seed are a pair: the script
checks that they have the same initial weights and samples. The figure is the mean of the paired differences of the
held-out loss, with its 95% interval (Student's t). Memory: four steps of vit_large on two processes; the figure is the
growth of the larger process's resident memory since before the model was built, with glibc set to return large blocks,
as in benchmarks/estimate.py. This needs 24 GB. Finished runs are not repeated.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from provenance import ROOT, save
from scipy.stats import t

sys.path.append(str(ROOT))
from tools.cli import die_with_me  # noqa: E402

OURS, BESIDE = "fsdp_fp8_msamp_o2", ("fsdp_bf16", "ddp_fp8_msamp_o2")
TASKS = {
    "vit": ("--max_steps", "150", "--per_device_train_batch_size", "16"),
    "gpt": ("--max_steps", "80", "--per_device_train_batch_size", "8", "--sequence_length", "32"),
}
SEEDS = range(6)
LARGE = ("--model", "vit_large", "--per_device_train_batch_size", "4", "--max_steps", "4")


def train(out, recipe, config, *argv):
    """Returns run.json of a run. Starts the run if it has not finished before."""
    record = out / "run.json"
    if not record.exists() or json.loads(record.read_text())["status"] != "finished":
        shutil.rmtree(out, ignore_errors=True)
        print(f"running {out.name}", flush=True)
        command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
        command += [f"accelerate_configs/{config}.yml", f"recipes/{recipe}.py", *argv]
        command += ["--eval_steps", "0", "--save_steps", "0", "--output_dir", str(out)]
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "TQDM_DISABLE": "1"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command, cwd=ROOT, env=env, check=True, preexec_fn=die_with_me, **quiet)
    return json.loads(record.read_text())


def interval(differences):
    """(mean, half the width of its 95% interval)."""
    n = len(differences)
    return statistics.mean(differences), t.ppf(0.975, n - 1) * statistics.stdev(differences) / math.sqrt(n)


def parity(folder, task):
    losses = {config: [] for config in (OURS, *BESIDE)}
    for seed in SEEDS:
        records = {
            config: train(folder / f"{task}-{config}-{seed}", task, config, *TASKS[task], "--seed", str(seed))
            for config in losses
        }
        assert len({record["evidence"]["initial_weights"] for record in records.values()}) == 1
        assert len({json.dumps(record["seen"]["first_batch"]) for record in records.values()}) == 1
        for config, record in records.items():
            losses[config].append(record["final"]["metrics"]["eval_loss"])
    found = {"steps": int(TASKS[task][1]), "losses": losses, "against": {}}
    for other in BESIDE:
        mean, half = interval([a - b for a, b in zip(losses[OURS], losses[other], strict=True)])
        base = statistics.mean(losses[other])
        found["against"][other] = {"difference": mean, "half_interval": half, "of_loss": mean / base}
        print(f"{task}: {OURS} less {other}: {mean:+.5f} +- {half:.5f}, {mean / base:+.2%} of {base:.4f}", flush=True)
    return found, record


def memory(folder):
    rows = []
    for config in (*BESIDE, OURS):
        record = train(folder / f"large-{config}", "vit", config, *LARGE)
        evidence = record["evidence"]
        share = evidence.get("share_per_process", {})
        sizes = {key: size for key, size in evidence["bytes_per_parameter"].items() if key not in ("total", "gathered")}
        each = sum(size * share.get(key, 1) for key, size in sizes.items())
        rows.append(
            {
                "config": config,
                "parameters": evidence["parameters"],
                "peak": record["peak_memory_bytes"],
                "bytes_per_parameter_in_each_process": round(each, 3),
                "wire_bytes_per_step": evidence["wire_bytes_per_step"],
            }
        )
        print(
            f"vit_large, {config}: peak {rows[-1]['peak'] / 2**30:.2f} GiB, {each:.2f} B/param in each process",
            flush=True,
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "fsdp_levels")
    parser.add_argument("--only", choices=("parity", "memory"), help="runs those alone, and writes nothing")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    rows = memory(args.runs) if args.only != "parity" else None
    tasks = {task: parity(args.runs, task) for task in TASKS} if args.only != "memory" else None
    if args.output and not args.only:
        record = tasks["gpt"][1]
        found = {"seeds": list(SEEDS), "parity": {task: found for task, (found, _) in tasks.items()}, "vit_large": rows}
        save(args.output, found, run=record)


if __name__ == "__main__":
    main()
