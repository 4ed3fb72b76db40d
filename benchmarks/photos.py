"""How well do the image recipes learn `photos` on this machine, and how long does it take?

    python benchmarks/photos.py --output results/photos.json

Each recipe trains through `accelerate launch`; finished runs are not repeated. Accuracy is measured on held-out
patches, from parts of the photographs that are not in the training set; balanced accuracy is the mean of the ten
classes' accuracies.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from provenance import save

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "tools")]
from export import load  # noqa: E402

from shared import images  # noqa: E402

RUNS = {"vit": 800, "resnet": 900}  # optimizer steps


def run(recipe, folder, steps, config):
    """Returns the folder of a finished run. Starts the run, or resumes it if this script was stopped before.

    The file `seconds` beside its record has the whole duration; it is missing if the run was stopped in between.
    """
    out = folder / f"photos-{recipe}-{config}-{steps}"
    if not (out / "model" / "model.safetensors").exists():
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        command += [f"accelerate_configs/{config}.yml", f"recipes/{recipe}.py", "--dataset", "photos"]
        command += ["--max_steps", str(steps), "--per_device_train_batch_size", "64", "--eval_steps", "0"]
        command += ["--save_steps", "0", "--output_dir", str(out), "--resume_from_checkpoint", "latest"]
        start, whole = time.time(), not out.exists()
        subprocess.run(command, cwd=ROOT, check=True)
        if whole:
            (out / "seconds").write_text(str(time.time() - start))
    return out


def balanced_accuracy(folder):
    model, _, _ = load(folder)
    _, held_out = images.photos()
    hits = []
    for first in range(0, len(held_out), 256):
        batch = held_out.__getitems__(range(first, min(first + 256, len(held_out))))
        with torch.no_grad():
            hits.append(model(batch["pixel_values"]).argmax(-1) == batch["labels"])
    hits = torch.cat(hits).double()
    return torch.stack([hits[held_out.labels == label].mean() for label in range(10)]).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RUNS))
    parser.add_argument("--config", default="single_fp32")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    rows = []
    for recipe in args.recipes:
        folder = run(recipe, args.runs, RUNS[recipe], args.config)
        record = json.loads((folder / "run.json").read_text())
        row = {
            "recipe": recipe,
            "model": record["args"]["model"],
            "config": args.config,
            "steps": RUNS[recipe],
            "seconds": float((folder / "seconds").read_text()) if (folder / "seconds").exists() else None,
            "step_seconds_median": record["throughput"]["step_seconds_median"],
            "accuracy": record["final"]["metrics"]["accuracy"],
            "balanced_accuracy": balanced_accuracy(folder),
        }
        rows.append(row)
        print(row, flush=True)
    if args.output:
        save(args.output, {"rows": rows}, run=record)


if __name__ == "__main__":
    main()
