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

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from harness import QUIET, ROOT, arguments, made, origin, save

from tools.cli import die_with_me
from tools.estimate import estimate, read_config, tracings_of
from tools.tracing import load

LIMITS = {"states": 0.10, "total": 0.25}
RUNTIME = {"single": "single_bf16", "several": "ddp_bf16"}  # measured with vit_nano
PAIRS = {  # model, dataset, batch per process: configs
    ("vit_tiny", "photos", 32): ["single_fp32"],
    ("vit_small", "photos", 16): ["single_fp32"],
    ("vit_small", "digits", 256): ["single_fp32", "single_bf16", "single_fp8", "single_fp8_msamp_o2"],
    ("vit_base", "digits", 32): ["single_bf16", "single_fp8_te"] + [f"single_fp8_msamp_o{n}" for n in (1, 2, 3)],
    ("vit_small", "digits", 128): ["ddp_bf16", "fsdp_bf16", "fsdp_bf16_ckpt"],
    ("vit_base", "digits", 16): """ddp_bf16 ddp_fp8_msamp_o2 ddp_fp8_msamp_o3 fsdp_fp32 fsdp_bf16 fsdp_fp8
        fsdp_bf16_noreshard fsdp_bf16_offload fsdp_fp8_msamp_o1 fsdp_fp8_msamp_o2 zero1_bf16 zero2_bf16 zero3_bf16
        zero3_bf16_offload""".split(),
    ("vit_base", "digits", 8): ["hsdp_bf16", "hsdp_fp8_msamp_o2"],
}
SMALL = ("vit_nano", "digits", 8)


def options(model, dataset, batch):
    return ["--model", model, "--dataset", dataset, "--per_device_train_batch_size", str(batch)]


def measured(config, size, folder, give_back=True):
    """Returns run.json of the run. Starts the run if it has not finished before."""
    out = folder / ("-".join([config, *map(str, size)]) + ("" if give_back else "-by-default"))
    line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{config}.yml"]
    line += ["recipes/vit.py", *options(*size), "--max_steps", "4"]
    line += ["--eval_steps", "0", "--save_steps", "0", "--output_dir", str(out)]
    if made(out / "run.json", status=None)["status"] != "finished":
        if out.exists():
            out.rename(out.with_name(f"{out.name}.old-{time.time():.0f}"))
        print(f"running {out.name}", flush=True)
        env = os.environ | ({"MALLOC_MMAP_THRESHOLD_": "65536"} if give_back else {})
        subprocess.run(line, cwd=ROOT, env=env, check=True, preexec_fn=die_with_me, **QUIET)
    return made(out / "run.json")


def estimated(configs, size):
    module, seen, estimates = load(ROOT / "recipes" / "vit.py"), {}, {}
    for config in configs:
        asked = read_config(ROOT / "accelerate_configs" / f"{config}.yml")
        sizes = estimate(asked, *tracings_of(module, options(*size), asked, seen), cpu=True)
        total = sizes["phases"]["train"]["main"] if sizes["phases"] else sizes["total"]
        estimates[config] = sizes | {"total": total - sizes["runtime"]}  # which is measured here
    return estimates


def row_of(config, size, guess, record, by_default, runtime):
    evidence, processes = record["evidence"], record["plan"]["num_processes"]
    share = evidence.get("share_per_process", {})  # of a class that every process has whole, 1
    states = {key: each for key, each in evidence["bytes_per_parameter"].items() if key not in ("total", "gathered")}
    states = sum(each * share.get(key, 1) for key, each in states.items()) * evidence["parameters"]
    total = guess["total"] + runtime["single" if processes == 1 else "several"]
    row = {"config": config, **dict(zip(("model", "dataset", "per_device_train_batch_size"), size, strict=True))}
    row |= {
        "num_processes": processes,
        "states_estimated": guess["states"],
        "states_measured": round(states),
        "states_off": guess["states"] / states - 1,
        "activations_estimated": guess["activations"],
        "communication_estimated": guess["communication"],
        "total_estimated": total,
        "peak_measured": record["peak_memory_bytes"],
        "peak_by_default": by_default["peak_memory_bytes"],
        "total_off": total / record["peak_memory_bytes"] - 1,
    }
    row["within"] = all(abs(row[f"{key}_off"]) <= limit for key, limit in LIMITS.items())
    said = f"states {row['states_off']:+6.1%} of {states / 2**20:6.0f} MiB, total {row['total_off']:+6.1%} of "
    said += f"{row['peak_measured'] / 2**20:6.0f} MiB {'' if row['within'] else ' OFF'}"
    print(f"{config:24}{size}  {said}", flush=True)
    return row


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "estimate")
    parser.add_argument("--configs", nargs="+", default=(), help="only their rows; the rest is in the output file")
    args = parser.parse_args()
    before = made(args.output) if args.configs else {}
    runtime = before.get("runtime", {})
    for kind, config in RUNTIME.items() if not before else ():
        guess = estimated([config], SMALL)[config]
        runtime[kind] = measured(config, SMALL, args.runs)["peak_memory_bytes"] - guess["total"]
        print(f"runtime, {kind}: {runtime[kind] / 2**20:.0f} MiB", flush=True)
    rows = []
    for size, configs in PAIRS.items():
        configs = [config for config in configs if not args.configs or config in args.configs]
        guesses = estimated(configs, size)
        for config in configs:
            record, by_default = (measured(config, size, args.runs, give_back) for give_back in (True, False))
            rows.append(row_of(config, size, guesses[config], record, by_default, runtime))
    print(f"{sum(row['within'] for row in rows)} of {len(rows)} within {LIMITS}")
    if before:
        now = origin(run=record)
        rows = [row | {key: now[key] for key in ("date", "versions", "device")} for row in rows]
        kept = [row for row in before["rows"] if row["config"] not in args.configs]
        args.output.write_text(json.dumps(before | {"rows": kept + rows}, indent=1) + "\n")
    elif args.output:
        save(args.output, {"limits": LIMITS, "runtime": runtime, "rows": rows}, run=record)


if __name__ == "__main__":
    main()
