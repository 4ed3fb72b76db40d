"""How much of fp32 AdamW's gain in fine-tuning is left on a level, at small learning rates.

A small GPT is trained on the texts of Python's help and fine-tuned on source code of its standard library, Linear
weights alone, by fp32 AdamW and by the levels, rounding stochastically and to nearest, as before. The gain is what the
held-out loss falls by; the share is the gain as part of fp32's of the same seed. Held-out losses are of the true
weights (O3: its masters), without FP8.

    python benchmarks/amp8_finetune.py --output results/amp8_finetune.json
    python benchmarks/amp8_finetune.py --steps 5000 --seeds 1 --ways fp32 O2 O3 --output results/amp8_finetune.json

What the file holds of other numbers of steps is kept.
"""

import argparse
import ast
import inspect
import json
import subprocess
import sys
import typing
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

from pydoc_data import topics  # noqa: E402

from provenance import command, save  # noqa: E402
from small_gpt import GPT, evaluate, loss_of, sample  # noqa: E402

import amp8  # noqa: E402

CHARACTERS = 112
WAYS = {"fp32": None, "O2": ("O2", True), "O3": ("O3", True), "O2 to nearest": ("O2", False)}


def encode(text):
    return torch.tensor([0 if c == "\n" else min(max(ord(c) - 20, 0), CHARACTERS - 1) for c in text])


def pretrained(steps):
    torch.manual_seed(0)
    model, data = GPT(CHARACTERS), encode("\n".join(topics.topics.values()))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        loss_of(model, *sample(data, 8, 64, generator)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.state_dict()


def held_out(model, way, data):
    plain = GPT(CHARACTERS)
    plain.load_state_dict(amp8.master_state_dict(model) if WAYS[way] else model.state_dict())
    return evaluate(plain, data, 24)


def gain(way, weights, data, lr, steps, seed):
    cut = int(len(data) * 0.9)
    model = GPT(CHARACTERS)
    model.load_state_dict(weights)
    linear = [layer.weight for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    model.requires_grad_(False)
    for weight in linear:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(linear, lr, weight_decay=0.01)
    before = evaluate(model, data[cut:], 24)
    if WAYS[way]:
        level, stochastic = WAYS[way]
        model, optimizer = amp8.initialize(model, optimizer, level, stochastic_rounding=stochastic)
    generator = torch.Generator().manual_seed(100 + seed)
    for _ in range(steps):
        loss_of(model, *sample(data[:cut], 8, 64, generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return before - held_out(model, way, data[cut:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="fp32 is needed")
    parser.add_argument("--pretraining", type=int, default=1_000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", default="results/amp8_finetune.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    code = encode("\n".join(inspect.getsource(module) for module in (argparse, ast, inspect, typing, subprocess)))
    output = Path(args.output)
    kept = json.loads(output.read_text()) if output.exists() else {"rows": []}
    rows = [row for row in kept["rows"] if row["steps"] != args.steps]
    weights, commands = pretrained(args.pretraining), [kept.get("command"), command()]
    for lr in args.lrs:
        gains = {}
        for way in args.ways:
            gains[way] = [gain(way, weights, code, lr, args.steps, seed) for seed in range(args.seeds)]
        for way, found in gains.items():
            shares = [one / other for one, other in zip(found, gains["fp32"], strict=True)]
            rows.append({"steps": args.steps, "lr": lr, "way": way, "gains": found, "shares_of_fp32": shares})
            print(rows[-1], flush=True)
        rows.sort(key=lambda row: (row["steps"], row["lr"]))
        save(output, {"command": " and ".join(filter(None, commands)), "pretraining": args.pretraining, "rows": rows})


if __name__ == "__main__":
    main()
