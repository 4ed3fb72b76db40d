"""Does every config train on a GPU, and are the losses of a rehearsal those of the card?

    python benchmarks/card.py --launch launched.json                on a GPU: writes the file
    python benchmarks/card.py results/h200/launched.json            anywhere: compares it with a rehearsal
    python benchmarks/card.py results/h200/launched.json --only single_bf16 ddp_fp8

--launch trains recipes/vit.py for 20 steps under each config (tensor parallel: recipes/gpt.py), as README launches it,
on all GPUs of the machine, one config after the other. The file has for each its exit code, seconds, losses, median
step, peak memory and what was counted, or what it said in their place. It is what to send to somebody.

Without it each config that trained there is launched once more with the same words, without a GPU. Adds to
results/card.json, for each config, the largest relative difference of a loss, or why it did not train here.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, arguments, command, furthest, losses, made, save

RESULT = ROOT / "results" / "card.json"
WORDS = ["--max_steps", "20", "--logging_steps", "1", "--seed", "0"]
GPT = ["gpt", "--model", "llama_nano", "--dataset", "python_source", "--sequence_length", "128", *WORDS]
LIMIT = 300  # seconds of a config


def recipe_of(config):
    return GPT if "tp_" in config else ["vit", *WORDS]


def launched(config):
    """What a launch on this machine's GPUs says of itself."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        line = ["./launch.sh", config, *recipe_of(config), "--save_steps", "0", "--output_dir", str(run)]
        env = os.environ | {"COLLECTIVE_TIMEOUT": "60"}
        try:
            done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:  # its processes end with their launcher
            return {"exit": None, "said": f"not done after {LIMIT} s"}
        row = {"exit": done.returncode, "seconds": round(time.monotonic() - began, 1)}
        if done.returncode:
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()] or ["it said nothing"]
            said = [line for line in lines if re.match(r"(refused|error)\b|\w[\w.]*Error: ", line)] or lines[-1:]
            return row | {"said": said[0]}
        record = json.loads((run / "run.json").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {key: [each[key] for each in rows if key in each] for key in ("loss", "grad_norm", "eval_loss")}
    row |= {"processes": record["plan"]["num_processes"], "measured": record["evidence"]["measured"]}
    row |= {"peak_memory_bytes": record["peak_memory_bytes"]}
    return row | {"step_seconds": record["throughput"]["step_seconds_median"]} | found


def launch(output, only):
    names = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yml"))
    runs = {}
    for config in only or names:
        runs[config] = launched(config)
        print(f"{config:36}", runs[config].get("said") or runs[config]["measured"], flush=True)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        save(output, {"commit": commit.stdout.strip(), "runs": runs}, ("accelerate", "transformers", "torchao"))


def compare(file, only):
    there, before = json.loads(Path(file).read_text()), made(RESULT, configs={}, command=None)
    found = before["configs"]
    about = {name: there[name] for name in ("device", "versions", "date", "commit", "command")}
    for config, run in there["runs"].items():
        if not run.get("loss") or only and config not in only:
            continue
        line = ["--config_file", f"accelerate_configs/{config}.yml", "--num_processes", str(run.get("processes", 1))]
        here = losses(sys.executable, line, recipe_of(config), {"CUDA_VISIBLE_DEVICES": ""})
        here = here if isinstance(here, str) else here[: len(run["loss"])]  # the evaluation comes after the last step
        found[config] = furthest(here, run["loss"])
        print(f"{config:36}", found[config], flush=True)
        figures = {"command": command(before["command"]), "card": about, "configs": found}
        save(RESULT, figures, ("accelerate", "torchao"))


def main():
    parser = arguments(__doc__)
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--launch", action="store_true", help="on a GPU: write the file")
    parser.add_argument("--only", nargs="+", metavar="CONFIG", help="default: all")
    args = parser.parse_args()
    (launch if args.launch else compare)(args.file, args.only)


if __name__ == "__main__":
    main()
