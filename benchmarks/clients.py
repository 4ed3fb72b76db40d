"""Runs Accelerate scripts that were not written for this project under our configs: which run, and which are refused.

    python benchmarks/clients.py --output results/clients.json
    python benchmarks/clients.py causal gan --configs ddp_bf16 fsdp_bf16 --output clients.json

Each script of tests/clients is launched by `accelerate launch --config_file CONFIG -m faithful SCRIPT`. Three of them
use the trainers of packages: transformers, trl, denoising_diffusion_pytorch. Two outcomes are right:

ran      the run's record says what it was, all processes belong to one run, and under DDP they have equal weights
refused  one line says why, and no traceback of the script

For single_fp32 each script also runs under Accelerate alone, and its weights must be the same bit for bit.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from provenance import ROOT, save

CONFIGS = """single_fp32 single_bf16 ddp_bf16 fsdp_bf16 hsdp_bf16 zero2_bf16 ddp_fp8 single_fp8_msamp_o2
    ddp_fp8_msamp_o3""".split()
CLIENTS = sorted(path.stem for path in (ROOT / "tests" / "clients").glob("*.py") if path.stem != "ended")
WINS = {"diffusion"}  # scripts that pass mixed_precision="no"


def launch(client, config, folder, ours=True):
    out, script = folder / f"{client}-{config}-{ours}", ROOT / "tests" / "clients" / f"{client}.py"
    out.mkdir()
    words = ["-m", "faithful", *(["--config_wins"] if client in WINS else [])] if ours else []
    port = [] if config.startswith("single") else ["--main_process_port", "0"]
    file = ROOT / "accelerate_configs" / f"{config}.yml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, *port, *words, script, out]
    env = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "FAITHFUL_PROJECT_DIR": str(out / "run"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        list(map(str, command)), env=os.environ | env, cwd=folder, capture_output=True, text=True, timeout=600
    )
    return out, done


def outcome(client, config, folder):
    """A row of the table."""
    row = {"client": client, "config": config}
    try:
        out, done = launch(client, config, folder)
    except subprocess.TimeoutExpired:
        return row | {"outcome": "failed", "why": "no end in 600 s"}
    refused = re.findall(r"^refused: (.*)$", done.stderr, re.M)
    file = next(iter(sorted(out.rglob("run.json"))), None)
    made = json.loads(file.read_text()) if file else None
    of_the_script = re.split("torch/distributed/elastic|subprocess.CalledProcessError", done.stderr)[0]
    if done.returncode and refused and "Error:" not in of_the_script:  # the rest is the launcher's own
        return row | {"outcome": "refused", "why": refused[0]}
    ranks = [json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))]
    if done.returncode or not made or made["status"] != "finished" or not ranks:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if re.search("[Ee]rror", line)]
        return row | {"outcome": "failed", "why": (refused or lines or ["?"])[-1][:300]}
    evidence, asked = made["evidence"], made["plan"]["num_processes"]
    equal = len({rank["weights"] for rank in ranks}) == 1
    right = len(ranks) == asked and all(rank["processes"] == asked for rank in ranks)
    right = right and (equal or evidence["sharded"] or made["plan"]["level"] == "o3")
    row |= {"outcome": "ran" if right else "failed", "processes": len(ranks), "equal_weights": equal}
    row |= {key: evidence[key] for key in ("sharded", "linear_converted", "linear_total", "truth")}
    row |= {"bytes_per_parameter": evidence["bytes_per_parameter"]["total"], "notes": made["notes"]}
    if config == "single_fp32":
        alone, plain = launch(client, config, folder, ours=False)
        same = plain.returncode == 0 and (alone / "rank0.json").read_text() == (out / "rank0.json").read_text()
        row |= {"same_weights_as_under_accelerate": same}
        row["outcome"] = row["outcome"] if same else "failed"
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", default=CLIENTS)
    parser.add_argument("--configs", nargs="+", default=CONFIGS)
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    folder, rows = Path(tempfile.mkdtemp(prefix="clients-")), []
    if args.output.exists():  # with clients or configs named, their rows alone are measured anew
        before = json.loads(args.output.read_text())["rows"]
        rows = [row for row in before if row["client"] not in args.clients or row["config"] not in args.configs]
    for client in args.clients:
        for config in args.configs:
            rows.append(outcome(client, config, folder))
            print(json.dumps(rows[-1]), flush=True)
            save(
                args.output,
                {"rows": rows},
                ("accelerate", "transformers", "trl", "denoising-diffusion-pytorch", "diffusers"),
            )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
