"""Which tensors fail where a way of the study gains less than bf16? Writes results/study/tensors.json.

    python benchmarks/study_tensors.py

For each fine-tuned run of seed 0 whose folder is still here: how far its weights went along bf16's way, and how far in
all. A way that loses updates to rounding stays where it began; one that rounds at random goes as far along and, by the
noise of its rounding, further in all. Weights of Linear layers, which MS-AMP's levels store in few bits, and the others
stand apart.
"""

from pathlib import Path

import torch
from harness import ROOT, arguments, save
from study import BASELINE, TASKS, WAYS

from tools import export


def weights(folder):
    """({name: fp64 tensor}, names of the weights of Linear layers) of a finished run."""
    model = export.load(folder)[0]
    tied = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    linear = {f"{name}.weight" for name, module in model.named_modules()
              if isinstance(module, torch.nn.Linear) and id(module.weight) not in tied}  # fmt: skip
    return {name: value.detach().double() for name, value in model.named_parameters()}, linear


def moved(start, end, baseline, names):
    """{"along", "distance"} of the weights `names`, both over the length of the baseline's way: 1 is as far as it."""
    steps = torch.cat([(end[name] - start[name]).flatten() for name in names])
    way = torch.cat([(baseline[name] - start[name]).flatten() for name in names])
    return {"along": (steps @ way / (way @ way)).item(), "distance": (steps.norm() / way.norm()).item()}


def rows_of(task, runs):
    folders = {way: runs / task / f"{way}-seed0" for way in WAYS}
    here = [way for way, folder in folders.items() if (folder / "model" / "model.safetensors").exists()]
    if BASELINE not in here:
        return
    start, linear = weights(runs / "start" / TASKS[task].start)
    baseline = weights(folders[BASELINE])[0]
    others = [name for name in start if name not in linear]
    for way in here:
        end = weights(folders[way])[0]
        parts = {"linear": sorted(linear), "others": others}
        yield {"task": task, "way": way, **{part: moved(start, end, baseline, names) for part, names in parts.items()}}


def main():
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "study", help="where benchmarks/study.py ran")
    args = parser.parse_args()
    rows = [row for name, task in TASKS.items() if task.start for row in rows_of(name, args.runs)]
    save(ROOT / "results" / "study" / "tensors.json", {"rows": rows}, ("accelerate", "transformers"))


if __name__ == "__main__":
    main()
