"""Every way to spread one training over processes, run once each: what each process holds, what it sends, how it ends.

    python benchmarks/strategies.py --max_steps 60       writes results/strategies.json and prints the table

The figures of memory and wire are counted on the tensors and collectives of the run (its `evidence`); time is not
compared: two processes of one machine say nothing of it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ("single_fp32", "single_fp32 --dtype bfloat16", "single_bf16", "single_fp16", "ddp_bf16", "zero1_bf16",
           "zero2_bf16", "fsdp_bf16_noreshard", "zero3_bf16", "zero3_bf16_offload", "fsdp_bf16", "fsdp_bf16_offload",
           "hsdp_bf16", "zero2_fp8", "zero3_fp8", "zero2_fp8_te", "zero3_fp8_te")  # fmt: skip


def run(config, steps, folder):
    out = folder / config.replace(" ", "_")
    config, *options = config.split()
    command = ["./launch.sh", config, "vit", *options, "--max_steps", str(steps), "--save_steps", "0"]
    command += ["--eval_steps", "0"]
    done = subprocess.run([*command, "--output_dir", str(out)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{config}: {done.stderr[-2000:]}")
    made = json.loads((out / "run.json").read_text())
    evidence = made["evidence"]
    row = {
        "command": " ".join(command), "processes": made["plan"]["num_processes"],
        "bytes_per_parameter": evidence["bytes_per_parameter"], "share_per_process": evidence.get("share_per_process"),
        "wire_bytes_per_step": evidence["wire_bytes_per_step"], "final": made["final"],
    }  # fmt: skip
    return row, {key: made[key] for key in ("versions", "device_name", "git_commit")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", help="these alone, into the file that is there; default: all of them")
    parser.add_argument("--max_steps", type=int, default=60, help="optimizer steps of each run")
    args = parser.parse_args()
    result = {"command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d"), "runs": {}}
    if args.configs:
        result = json.loads((ROOT / "results" / "strategies.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        for config in args.configs or CONFIGS:
            result["runs"][config], where = run(config, args.max_steps, Path(folder))
            made = result["runs"][config]
            (made if args.configs else result).update(where)  # each its own commit, where they were not one run
            each = made["share_per_process"] or {"optimizer": 1}
            print(f"| `{config}` | {made['processes']} | {made['bytes_per_parameter']['total']:.1f} | "
                  f"{each['optimizer']:.2f} | {made['wire_bytes_per_step'] / 2**20:.2f} | "
                  f"{made['final']['metrics']['eval_loss']:.3f} |", flush=True)  # fmt: skip
    (ROOT / "results" / "strategies.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
