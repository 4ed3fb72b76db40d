"""Does it help to start from a trained model? Trains equally long from pretrained weights and from random ones.

    python benchmarks/finetune.py --output results/finetune_textures.json

A vision transformer is trained on `photos` (ten colour photographs). Then every row trains the same model on `textures`
(eight grey pictures), with the same steps, batches and learning rate and three seeds. The rows differ in the initial
weights only; two more rows differ in --freeze and --layer_decay. From scratch the model takes one channel; pretrained
it takes three, and the grey channel is repeated. Finished runs are not repeated. The script writes a JSON file and a
plot.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from provenance import save

ROOT = Path(__file__).resolve().parents[1]
ROWS = {  # options beside --model
    "from scratch": (),
    "pretrained": ("--pretrained",),
    "pretrained, layer_decay 0.75": ("--pretrained", "--layer_decay", "0.75"),
    "pretrained, first 2 of 4 blocks frozen": ("--pretrained", "--freeze", "2"),
}


def train(out, config, *argv):
    """Returns the record of one run. Starts the run if it has not finished before."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{config}.yml"]
    command += ["recipes/vit.py", *argv, "--save_steps", "0", "--output_dir", str(out)]
    command += ["--resume_from_checkpoint", "latest"]  # of a run that was stopped
    if not (out / "model" / "model.safetensors").exists():
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return json.loads((out / "run.json").read_text())


def accuracies(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["accuracy"]) for row in rows if "accuracy" in row]


def plot(rows, path):
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for row in rows:
        steps = [step for step, _ in row["curves"][0]]
        means = [statistics.mean(curve[i][1] for curve in row["curves"]) for i in range(len(steps))]
        [line] = axes.plot(steps, means, label=row["start"])
        for bound in (min, max):
            values = [bound(curve[i][1] for curve in row["curves"]) for i in range(len(steps))]
            axes.plot(steps, values, color=line.get_color(), alpha=0.3, linewidth=0.8)
    axes.set(
        xlabel="optimizer steps on textures", ylabel="held-out accuracy", title="Mean, least and most of the seeds"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="single_fp32")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    before = args.runs / "photos-vit-single_fp32-800"  # as benchmarks/photos.py names it
    batch = ("--per_device_train_batch_size", "64")
    train(before, "single_fp32", "--dataset", "photos", "--max_steps", "800", *batch, "--eval_steps", "0")
    rows = []
    for name in args.rows:
        model = ("--model", str(before)) if ROWS[name] else ("--image_size", "32")
        records, curves = [], []
        for seed in range(args.seeds):
            out = args.runs / f"textures-{args.steps}-{list(ROWS).index(name)}-{seed}"
            options = ("--dataset", "textures", "--max_steps", str(args.steps), "--seed", str(seed), "--warmup_steps")
            options += ("10", "--learning_rate", "1e-3", "--eval_steps", "20", "--logging_steps", "20", *batch[:1])
            records.append(train(out, args.config, *options, "32", *model, *ROWS[name]))
            curves.append(accuracies(out))
        final = [curve[-1][1] for curve in curves]
        rows.append(
            {
                "start": name,
                "mean": statistics.mean(final),
                "accuracy": final,
                "curves": curves,
                "spread": max(final) - min(final),
                "options": ROWS[name],
            }
        )
        print(f"{name:40} {rows[-1]['mean']:.4f} (max - min {rows[-1]['spread']:.4f})", flush=True)
    if args.output:
        save(args.output, {"steps": args.steps, "rows": rows}, run=records[0])
        plot(rows, args.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
