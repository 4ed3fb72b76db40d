"""Runs one training under every distributed strategy: what each process holds and sends, and the final loss.

    python benchmarks/strategies.py --max_steps 60       writes results/strategies.json

Memory and bytes sent are counted on the tensors and collectives of the run (its `evidence`). Time is not compared,
because two processes on one machine say nothing about it.
"""

import json
import subprocess
import tempfile
from pathlib import Path

from harness import ROOT, arguments, save

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
    record = json.loads((out / "run.json").read_text())
    evidence = record["evidence"]
    row = {
        "command": " ".join(command),
        "processes": record["plan"]["num_processes"],
        "bytes_per_parameter": evidence["bytes_per_parameter"],
        "share_per_process": evidence.get("share_per_process"),
        "wire_bytes_per_step": evidence["wire_bytes_per_step"],
        "final": record["final"],
    }
    return row, record


def main():
    parser = arguments(__doc__)
    parser.add_argument("--max_steps", type=int, default=60, help="optimizer steps of each run")
    args = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for config in CONFIGS:
            rows[config], record = run(config, args.max_steps, Path(folder))
            print(config, rows[config], flush=True)
    save(ROOT / "results" / "strategies.json", {"git_commit": record["git_commit"], "runs": rows}, run=record)


if __name__ == "__main__":
    main()
