"""What each recipe makes in some minutes on this machine: its accuracy, a picture or a text, and the command.

    python benchmarks/gallery.py --output results/gallery.json

Runs the commands one after the other, the run of `sft` from that of `gpt`, and writes what they made into the folder
beside the output: the pictures of `diffusion`, the sample of `gpt`, and the answers of `sft` beside those of the model
that it started from. A recipe that the file holds already is not run again.
"""

import datetime
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from harness import ROOT, arguments, command, made, save

RUNS = {  # recipe: config, options
    "vit": ("single_bf16", "--max_steps 300"),
    "resnet": ("single_fp32", "--dataset photos --max_steps 300"),
    "gpt": ("single_bf16", "--max_steps 800"),
    "bert": ("single_bf16", "--max_steps 300"),
    "embed": ("single_bf16", "--max_steps 400"),
    "diffusion": ("single_bf16", "--max_steps 1500"),
    "dpo": ("single_bf16", "--max_steps 300"),
    "sft": ("single_bf16", "--model {gpt} --pretrained --max_steps 1500 --per_device_train_batch_size 16"),
}
LEFT = {"gpt": "sample.txt", "diffusion": "samples-1500.png", "sft": "answers.txt"}  # what a run leaves to look at


def launch(*words):
    done = subprocess.run(["./launch.sh", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done.stdout.strip()


def both(answers, base):
    """The text of the answers, with those of the model `base`, a run of gpt, beside them."""
    out = []
    for question, right, model in zip(*[iter(answers.splitlines())] * 3, strict=True):
        prompt = f"user\n{question}<|endoftext|>assistant\n"
        before = launch("predict", str(base), "--prompt", prompt, "--tokens", "20").removeprefix(prompt)
        before = f"  before: {' '.join(before.split()) or '(nothing)'}"
        out += [question, right, before, model.replace("model", "after")]
    return "\n".join(out) + "\n"


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="where the runs go")
    parser.add_argument("--recipes", nargs="+", default=list(RUNS), help="others are kept as the file holds them")
    args = parser.parse_args()
    before = made(args.output, command=None, rows=[])
    rows = [{"date": before["date"]} | row for row in before["rows"]]
    known, record = {row["recipe"] for row in rows}, None
    shown = args.output.with_suffix("")
    shown.mkdir(parents=True, exist_ok=True)
    for recipe in args.recipes:
        if recipe in known:
            continue
        config, options = RUNS[recipe]
        folder, base = args.runs / f"gallery-{recipe}", args.runs / "gallery-gpt"
        shutil.rmtree(folder, ignore_errors=True)
        words = [config, recipe, *options.format(gpt=base).split()]
        began = time.monotonic()
        launch(*words, "--output_dir", str(folder))
        seconds = time.monotonic() - began
        record = json.loads((folder / "run.json").read_text())
        words = " ".join(["./launch.sh", config, recipe, *options.format(gpt="runs/gallery-gpt").split()])
        row = {"date": datetime.date.today().isoformat(), "recipe": recipe, "command": words, "seconds": seconds}
        row["metrics"] = record["final"]["metrics"]
        if recipe in LEFT:
            row["left"] = f"{recipe}{Path(LEFT[recipe]).suffix}"
            shutil.copy(folder / LEFT[recipe], shown / row["left"])
        if recipe == "sft":
            (shown / row["left"]).write_text(both((folder / LEFT[recipe]).read_text(), base))
        rows.append(row)
        print(json.dumps(row), flush=True)
        rows.sort(key=lambda row: list(RUNS).index(row["recipe"]))
        save(args.output, {"command": command(before["command"]), "rows": rows}, ("accelerate", "transformers", "timm"))


if __name__ == "__main__":
    main()
