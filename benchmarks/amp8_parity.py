"""Final validation loss of O1, O2, O3 and bf16 AMP: a ViT on digits and a byte-level GPT, three seeds each.

    OMP_NUM_THREADS=1 python benchmarks/amp8_parity.py

A level passes a task if its mean over the seeds is within 0.5% of bf16's mean, or no further from it than the range of
bf16's own seeds (max - min). All runs have the same data order, initial weights, optimizer and schedule.
Data: scikit-learn's digits; the text of Python's own help (pydoc_data.topics). Writes results/amp8_parity.json.
"""

import argparse
import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from provenance import ROOT, save
from small_gpt import Block
from torch import nn

sys.path.insert(0, str(ROOT))

import amp8  # noqa: E402

LEVELS = ("bf16", "O1", "O2", "O3")
STEPS = {"digits_vit": 300, "byte_gpt": 400}
PEAK_LR = {"digits_vit": 2e-3, "byte_gpt": 2e-3}


class GPT(nn.Module):
    def __init__(self, width=96, depth=3, heads=4, length=96):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def byte_gpt():
    """(model, batch(generator) -> inputs and targets, validation batches)."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics)).encode()
    data = torch.tensor(list(text))
    cut, length = int(len(data) * 0.95), 96

    def batch(generator, low=0, high=cut, size=8):
        starts = torch.randint(low, high - length - 1, (size,), generator=generator)
        windows = torch.stack([data[i : i + length + 1] for i in starts])
        return windows[:, :-1], windows[:, 1:]

    g = torch.Generator().manual_seed(99)
    return GPT(), batch, [batch(g, cut, len(data)) for _ in range(30)]


def digits_vit():
    import timm
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held = order[:1297], order[1297:]
    model = timm.models.VisionTransformer(
        img_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=3, num_heads=4
    )

    def batch(generator):
        pick = train[torch.randint(len(train), (64,), generator=generator)]
        return images[pick], labels[pick]

    return model, batch, [(images[held], labels[held])]


TASKS = {"digits_vit": digits_vit, "byte_gpt": byte_gpt}


def run(task, level, seed, steps):
    """Trains and returns the final validation loss, computed in FP8 if training was."""
    torch.manual_seed(seed)
    model, batch, held = TASKS[task]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR[task], betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1, (t + 1) / 50) * (0.1 + 0.45 * (1 + math.cos(math.pi * t / steps)))
    )
    if level != "bf16":
        model, optimizer = amp8.initialize(model, optimizer, level)
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(steps):
        x, y = batch(generator)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        F.cross_entropy(out.flatten(0, -2).float(), y.flatten()).backward()
        norm = amp8.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            raise SystemExit(f"{task} {level} seed {seed}: the gradient is not finite")
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        losses = [F.cross_entropy(model(x).flatten(0, -2).float(), y.flatten()).item() for x, y in held]
    return statistics.mean(losses)


def compare(task, steps, seeds, levels=LEVELS):
    """{level: {losses, mean, difference from bf16 in %, passes}}."""
    rows = {}
    for level in levels:
        start = time.perf_counter()
        losses = [run(task, level, seed, steps) for seed in seeds]
        row = rows[level] = {"losses": [round(loss, 5) for loss in losses], "mean": statistics.mean(losses)}
        base = rows["bf16"]["losses"]
        mean, spread = rows["bf16"]["mean"], max(base) - min(base)
        row["difference_percent"] = round(100 * (row["mean"] / mean - 1), 3)
        row["passes"] = abs(row["mean"] - mean) <= max(0.005 * mean, spread)
        row["seconds"] = round(time.perf_counter() - start, 1)
        difference = f"{row['difference_percent']:+.2f}%"
        print(f"{task:10} {level:5} mean {row['mean']:.4f} {difference:>8}  {row['losses']}", flush=True)
    rows["bf16"]["spread_percent"] = round(100 * spread / mean, 3)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    tasks = {task: {"steps": STEPS[task], "levels": compare(task, STEPS[task], args.seeds)} for task in args.tasks}
    if args.tasks == list(TASKS) and len(args.seeds) >= 3:
        save(ROOT / "results" / "amp8_parity.json", {"seeds": args.seeds, "tasks": tasks}, ["timm", "scikit-learn"])
    if not all(row["passes"] for task in tasks.values() for row in task["levels"].values()):
        raise SystemExit("a level is further from bf16 than bf16's own seeds")


if __name__ == "__main__":
    main()
