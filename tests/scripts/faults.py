"""A plain Accelerate script with one planted fault that breaks training in FP8. tools/diagnose.py must name its layer.

    ./launch.sh diagnose single_fp8_te_current -- tests/scripts/faults.py gradients

gradients  `stem`'s output gradient has one feature so large that the others fall below e5m2's smallest value
outliers   `middle`'s input is 100 times as large in every other batch: it gets the scale of the batch before
updates    `slow` learns in steps of 1e-6, less than half of the last bit that an fp16 weight of 0.03 has, and
           weights are rounded to nearest, as MS-AMP rounds them
neighbours each block of NVFP4 is rounded under the scale of the block beside it; half of `stem`'s input is large
nearest    NVFP4's stochastic rounding is rounding to nearest
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2]))
from faithful import Accelerator  # noqa: E402

FEATURES, CLASSES, BATCH, WIDE = 32, 16, 64, 1024


class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.size = 1 + 40.0 * (torch.arange(FEATURES) < FEATURES // 2)
        self.stem, self.middle = nn.Linear(FEATURES, 64), nn.Linear(64, 64)
        self.late, self.head = nn.Linear(64, 64), nn.Linear(64, CLASSES)
        if fault == "updates":
            self.slow = nn.Linear(WIDE, CLASSES, bias=False)
            with torch.no_grad():  # its sum is 0, and each weight is of a size of its own
                self.slow.weight[:, ::2].uniform_(0.02, 0.04)
                self.slow.weight[:, 1::2] = -self.slow.weight[:, ::2]

    def forward(self, x, gain):
        x = self.stem(x * self.size if self.fault == "neighbours" else x)
        extra = x.new_zeros(())
        if self.fault == "gradients":
            first, x = x[:, 0], torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:]], 1)
            extra = 1e9 * (first - first.detach()).float().mean()  # 0, with a gradient
        x = F.relu(x)
        x = self.middle(x * gain) / gain if self.fault == "outliers" else self.middle(x)
        x = self.head(F.relu(self.late(F.relu(x))))
        if self.fault == "updates":
            x = x + 60 * self.slow(x.new_ones(len(x), WIDE))
        return x, extra


class Samples(torch.utils.data.IterableDataset):
    """Endless samples: the classes of a random teacher, and the gain of each batch."""

    def __init__(self, seed, skewed):
        self.seed, self.skewed = seed, skewed

    def __iter__(self):
        generator, count = torch.Generator().manual_seed(self.seed), 0
        teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(7))
        while True:
            x = torch.randn(FEATURES, generator=generator)
            label = (
                torch.tensor(3) if self.skewed and torch.rand((), generator=generator) < 0.9 else (x @ teacher).argmax()
            )
            yield {"x": x, "label": label, "gain": torch.tensor(100.0 if count // BATCH % 2 else 1.0)}
            count += 1


def train(accelerator, fault, seed, steps):
    """The mean loss of the last quarter of the steps."""
    set_seed(seed)
    model = Net(fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6 if fault == "updates" else 1e-3)
    loader = torch.utils.data.DataLoader(Samples(seed, fault == "updates"), BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if hasattr(optimizer.optimizer, "model_state"):  # MS-AMP's level: it rounds to nearest here, as MS-AMP itself does
        optimizer.optimizer.model_state.stochastic_rounding = False
    model.train()
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            logits, extra = model(batch["x"], batch["gain"][0])
            loss = F.cross_entropy(logits.float(), batch["label"])
            accelerator.backward(loss + extra)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == steps:
            return sum(losses[-steps // 4 :]) / (steps // 4)


def plant(fault):
    """Changes the emulation."""
    from faithful.backends import emulation

    scales, rounded = emulation._nvfp4_scales, emulation._nvfp4
    if fault == "neighbours":
        emulation._nvfp4_scales = lambda amax: scales(amax.roll(1, 2))
    if fault == "nearest":
        emulation._nvfp4 = lambda x, tile, seed=None: rounded(x, tile)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", choices=("gradients", "outliers", "updates", "neighbours", "nearest", "none"))
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--output", help="JSON file for the loss of each seed")
    args = parser.parse_args()
    plant(args.fault)
    accelerator = Accelerator()
    found = [train(accelerator, args.fault, seed, args.steps) for seed in range(args.seeds)]
    if args.output:
        Path(args.output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
