"""How far off is `./launch.sh estimate`? Compares estimated with measured memory; each run is a separate launch.

    python benchmarks/estimate.py --output results/estimate.json

`states` are weights, gradients, master weights and optimizer state: estimated, and counted on the live tensors of the
run (bytes per parameter in its run.json). `total` is compared with the run's measured peak: on a CPU, the growth of
resident memory since before the model was built. Of a config that shards it is that of training, because these runs
save nothing on the way; benchmarks/large.py measures the other phases. The libraries' memory on first use does not
depend on the model. It is measured as the peak of a run with a tiny model (vit_nano) minus its estimate, and added to
every other row. glibc keeps much of the freed memory, unlike a GPU's allocator, whose peak counts only memory in use.
So each pair runs twice: with glibc set to return large blocks (`peak`, which is compared), and with its defaults
(`peak_by_default`). Finished runs are not repeated. With --configs only these rows are measured, each with its date;
the others and the libraries' memory stay as they are in the output file.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from provenance import save

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from tools.cli import die_with_me  # noqa: E402
from tools.estimate import estimate, read_config, tracings_of  # noqa: E402
from tools.tracing import load  # noqa: E402

LIMITS = {"states": 0.10, "total": 0.25}
RUNTIME = {"single": "single_bf16", "several": "ddp_bf16"}  # measured with vit_nano
PAIRS = [  # config, model, dataset, batch per process
    ("single_fp32", "vit_tiny", "photos", 32),
    ("single_fp32", "vit_small", "photos", 16),
    ("single_fp32", "vit_small", "digits", 256),
    ("single_bf16", "vit_small", "digits", 256),
    ("single_bf16", "vit_base", "digits", 32),
    ("single_fp8", "vit_small", "digits", 256),
    ("single_fp8_te", "vit_base", "digits", 32),
    ("single_fp8_msamp_o1", "vit_base", "digits", 32),
    ("single_fp8_msamp_o2", "vit_base", "digits", 32),
    ("single_fp8_msamp_o2", "vit_small", "digits", 256),
    ("single_fp8_msamp_o3", "vit_base", "digits", 32),
    ("ddp_bf16", "vit_small", "digits", 128),
    ("ddp_bf16", "vit_base", "digits", 16),
    ("ddp_fp8_msamp_o2", "vit_base", "digits", 16),
    ("ddp_fp8_msamp_o3", "vit_base", "digits", 16),
    ("fsdp_fp32", "vit_base", "digits", 16),
    ("fsdp_bf16", "vit_base", "digits", 16),
    ("fsdp_bf16", "vit_small", "digits", 128),
    ("fsdp_fp8", "vit_base", "digits", 16),
    ("fsdp_bf16_noreshard", "vit_base", "digits", 16),
    ("fsdp_bf16_ckpt", "vit_small", "digits", 128),
    ("fsdp_bf16_offload", "vit_base", "digits", 16),
    ("fsdp_fp8_msamp_o1", "vit_base", "digits", 16),
    ("fsdp_fp8_msamp_o2", "vit_base", "digits", 16),
    ("hsdp_bf16", "vit_base", "digits", 8),
    ("hsdp_fp8_msamp_o2", "vit_base", "digits", 8),
    ("zero1_bf16", "vit_base", "digits", 16),
    ("zero2_bf16", "vit_base", "digits", 16),
    ("zero3_bf16", "vit_base", "digits", 16),
    ("zero3_bf16_offload", "vit_base", "digits", 16),
]


def name_of(*pair):
    return "-".join(map(str, pair))


def options(model, dataset, batch):
    return ["--model", model, "--dataset", dataset, "--per_device_train_batch_size", str(batch)]


def measured(config, model, dataset, batch, folder, give_back=True):
    """Returns run.json of the run. Starts the run if it has not finished before."""
    out = folder / (name_of(config, model, dataset, batch) + ("" if give_back else "-by-default"))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [
        f"accelerate_configs/{config}.yml",
        "recipes/vit.py",
        *options(model, dataset, batch),
        "--max_steps",
        "4",
    ]
    command += ["--eval_steps", "0", "--save_steps", "0", "--output_dir", str(out)]
    if not (out / "run.json").exists() or json.loads((out / "run.json").read_text())["status"] != "finished":
        if out.exists():
            out.rename(out.with_name(f"{out.name}.old-{time.time():.0f}"))
        print(f"running {out.name}", flush=True)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        env = os.environ | ({"MALLOC_MMAP_THRESHOLD_": "65536"} if give_back else {})
        subprocess.run(command, cwd=ROOT, env=env, check=True, preexec_fn=die_with_me, **quiet)
    return json.loads((out / "run.json").read_text())


def estimated(configs, model, dataset, batch):
    module, seen, estimates = load(ROOT / "recipes" / "vit.py"), {}, {}
    for config in configs:
        asked = read_config(ROOT / "accelerate_configs" / f"{config}.yml")
        traces = tracings_of(module, options(model, dataset, batch), asked, seen)
        sizes = estimate(asked, *traces, cpu=True)
        total = sizes["phases"]["train"]["main"] if sizes["phases"] else sizes["total"]
        estimates[config] = sizes | {"total": total - sizes["runtime"]}  # which is measured here
    return estimates


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "estimate")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--measure", action="store_true", help="only run what has not run yet")
    parser.add_argument("--configs", nargs="+", default=(), help="only their rows; the rest is in the output file")
    args = parser.parse_args()
    before = json.loads(args.output.read_text()) if args.configs else None
    pairs = [pair for pair in PAIRS if not args.configs or pair[0] in args.configs]
    if args.measure:
        for pair in [*((config, "vit_nano", "digits", 8) for config in RUNTIME.values() if not before), *pairs]:
            measured(*pair, args.runs)
            measured(*pair, args.runs, give_back=False)
        return
    runtime = before["runtime"] if before else {}
    for kind, config in RUNTIME.items() if not before else ():
        found = measured(config, "vit_nano", "digits", 8, args.runs)
        guess = estimated([config], "vit_nano", "digits", 8)[config]
        runtime[kind] = found["peak_memory_bytes"] - guess["total"]
        print(f"runtime, {kind}: {runtime[kind] / 2**20:.0f} MiB", flush=True)
    groups, rows = {}, []
    for config, *rest in pairs:
        groups.setdefault(tuple(rest), []).append(config)
    records = {pair: measured(*pair, args.runs) for pair in pairs}
    by_default = {pair: measured(*pair, args.runs, give_back=False) for pair in pairs}
    guesses = {rest: estimated(configs, *rest) for rest, configs in groups.items()}
    for config, *rest in pairs:
        record, guess = records[config, *rest], guesses[tuple(rest)][config]
        evidence, processes = record["evidence"], record["plan"]["num_processes"]
        share = evidence.get("share_per_process", {})  # of a class that every process has whole, 1
        states = {
            key: each for key, each in evidence["bytes_per_parameter"].items() if key not in ("total", "gathered")
        }
        states = sum(each * share.get(key, 1) for key, each in states.items()) * evidence["parameters"]
        total = guess["total"] + runtime["single" if processes == 1 else "several"]
        row = {
            "config": config,
            "model": rest[0],
            "dataset": rest[1],
            "per_device_train_batch_size": rest[2],
            "num_processes": processes,
            "states_estimated": guess["states"],
            "states_measured": round(states),
            "states_off": guess["states"] / states - 1,
            "activations_estimated": guess["activations"],
            "communication_estimated": guess["communication"],
            "total_estimated": total,
            "peak_measured": record["peak_memory_bytes"],
            "peak_by_default": by_default[config, *rest]["peak_memory_bytes"],
            "total_off": total / record["peak_memory_bytes"] - 1,
        }
        row["within"] = all(abs(row[f"{key}_off"]) <= limit for key, limit in LIMITS.items())
        rows.append(row)
        said = f"states {row['states_off']:+6.1%} of {states / 2**20:6.0f} MiB, total {row['total_off']:+6.1%} of "
        said += f"{row['peak_measured'] / 2**20:6.0f} MiB {'' if row['within'] else ' OFF'}"
        print(f"{config:24}{rest[0]:11}{rest[1]:8}{rest[2]:4}  {said}", flush=True)
    print(f"{sum(row['within'] for row in rows)} of {len(rows)} within {LIMITS}")
    if before:
        made = {"date": datetime.date.today().isoformat(), "versions": record["versions"]}
        made["device"] = record["device_name"]
        added = [row | made for row in rows]
        kept = [row for row in before["rows"] if row["config"] not in args.configs]
        args.output.write_text(json.dumps(before | {"rows": kept + added}, indent=1) + "\n")
    elif args.output:
        save(args.output, {"limits": LIMITS, "runtime": runtime, "rows": rows}, run=record)


if __name__ == "__main__":
    main()
