"""Are the losses of a rehearsal those of the card?

    python benchmarks/card.py results/h200/launched.json        every config that trained there
    python benchmarks/card.py results/h200/launched.json --only single_bf16 ddp_fp8

The file has what a GPU said of each config: its losses, or why it was refused. Each that trained there is launched
here with the same words, on one process without a GPU. Adds to results/card.json, for each config, the largest relative
difference of a loss, or why it did not train here.
"""

import json
import sys
from pathlib import Path

from harness import ROOT, arguments, command, furthest, losses, made, save

RESULT = ROOT / "results" / "card.json"
WORDS = ["vit", "--max_steps", "20", "--logging_steps", "1", "--seed", "0"]


def main():
    parser = arguments(__doc__)
    parser.add_argument("launched", metavar="FILE")
    parser.add_argument("--only", nargs="+", metavar="CONFIG")
    args = parser.parse_args()
    there = json.loads(Path(args.launched).read_text())
    before = made(RESULT, configs={}, command=None)
    found = before["configs"]
    about = {name: there[name] for name in ("device", "versions", "date", "commit", "command")}
    for config, run in there["runs"].items():
        if not run.get("loss") or args.only and config not in args.only:
            continue
        launch = ["--config_file", f"accelerate_configs/{config}.yml", "--num_processes", "1"]
        here = losses(sys.executable, launch, WORDS, {"CUDA_VISIBLE_DEVICES": ""})
        here = here if isinstance(here, str) else here[: len(run["loss"])]  # the evaluation comes after the last step
        found[config] = furthest(here, run["loss"])
        print(f"{config:36}", found[config], flush=True)
        figures = {"command": command(before["command"]), "card": about, "configs": found}
        save(RESULT, figures, ("accelerate", "torchao"))


if __name__ == "__main__":
    main()
