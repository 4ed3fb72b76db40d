"""What does each way to train of the study cost in tokens, and in time on an H200?

    python benchmarks/tokens.py --output results/tokens.json

The ways of results/study have ended 600 steps of its task `words` (docs/study.md). This trains bf16, their baseline,
for half and for twice as many steps with the same seeds, and says how many more tokens each way needs for bf16's loss
(tools/tokens.py). Planted is bf16 with 90% of the steps, as if a tenth of the tokens were lost. Finished runs in
runs/tokens are not run again.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path

from harness import ROOT, arguments, save

from shared.args import Refused
from tools import cli, tokens

RUNS = ROOT / "runs" / "tokens"
STEPS, LOST = 600, 540
BUDGETS = (STEPS // 2, STEPS, 2 * STEPS)
CHARACTERS = 2_000_000  # of Python's standard library: the study's data
# Of results/h200/speed.json, four Llama blocks: compiled, but TransformerEngine's modules, which torch.compile leaves
# as they are.
STEP = {"ao": "llama-ao-compile", "te": "llama-te", "o2": "llama-O2-compile", "o3": "llama-O3-compile"}


def data(folder):
    """Modules of the standard library, as the study had them."""
    folder.mkdir(parents=True, exist_ok=True)
    left = CHARACTERS
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) <= left:
            left -= len(text)
            (folder / path.name).write_text(text, encoding="utf-8")
    return folder


def trained(row, steps):
    """The record of the run of this row of the study, with other steps. Raises Refused if it did not begin alike."""
    folder = RUNS / f"{steps}-seed{row['seed']}"
    file = folder / "run.json"
    if not file.exists() or json.loads(file.read_text())["status"] != "finished":
        _, config, recipe, *options = shlex.split(row["command"])
        options[options.index("--max_steps") + 1] = str(steps)
        options[options.index("--dataset") + 1] = os.path.relpath(RUNS / "data", ROOT)
        command = [sys.executable, "tools/commands.py", config, recipe, *options, "--output_dir", str(folder)]
        with folder.with_suffix(".log").open("w") as log:
            subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=True, preexec_fn=cli.die_with_me)
    record = json.loads(file.read_text())
    began = record["evidence"]["initial_weights"], record["seen"]["first_batch"]
    if began != (row["initial_weights"], row["first_batch"]):
        raise Refused(f"{folder}: not the weights and the first batch of the study's run: {row['command']}")
    return record


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--study", type=Path, default=ROOT / "results" / "study" / "cpu-amd-epyc.jsonl")
    args = parser.parse_args()
    data(RUNS / "data")
    ways = defaultdict(dict)  # {way: {seed: its row}}
    for row in map(json.loads, args.study.read_text().splitlines()):
        if row["task"] == "words" and row["status"] == "finished":
            ways[row["way"]][row["seed"]] = row
    base = ways.pop("bf16")
    losses = defaultdict(list, {STEPS: [base[seed]["measures"]["eval_loss"] for seed in sorted(base)]})
    for seed in sorted(base):
        for steps in (BUDGETS[0], LOST, BUDGETS[2]):
            record = trained(base[seed], steps)
            losses[steps].append(record["final"]["metrics"]["eval_loss"])
            print(f"seed {seed}, {steps} steps: {losses[steps][-1]:.4f}", flush=True)
    curve = [losses[steps] for steps in BUDGETS]
    cases = json.loads((ROOT / "results" / "h200" / "speed.json").read_text())["cases"]
    rows = [{"way": "bf16", "loss": statistics.fmean(losses[STEPS]), "bytes_per_parameter": 16.0}]
    ways["lost"] = {
        seed: {"measures": {"eval_loss": loss}} for seed, loss in zip(sorted(base), losses[LOST], strict=True)
    }
    for way, of_seed in ways.items():
        values = [of_seed[seed]["measures"]["eval_loss"] for seed in sorted(base)]
        found = {"way": way, "loss": statistics.fmean(values)} | tokens.cost(BUDGETS, curve, values, 1)
        found["bytes_per_parameter"] = of_seed[0].get("bytes_per_parameter", {"total": 16.0})["total"]
        if way in STEP:
            found["step"] = cases[STEP[way]]["ms"] / cases["llama-bf16-compile"]["ms"]
        rows.append(found)
        print(found, flush=True)
    if args.output:
        save(args.output, {"budgets": {steps: losses[steps] for steps in BUDGETS}, "rows": rows}, run=record)


if __name__ == "__main__":
    main()
