"""How far weights without gradient move: fp32 AdamW and the levels, rounding stochastically and to nearest, as before.

- rows: of an Embedding and of a Linear, which get a gradient in the first five steps alone, while other rows go on.
  Their mean movement from the start, in learning rates.
- words: a word-level language model of 4,096 words, at betas (0.9, 0.95). Its held-out loss, and the mean movement of
  the rows of words that occur at most three times, in learning rates.
- seconds: CPU time of one optimizer step of 2 million parameters, in turns.

    python benchmarks/amp8_drift.py --output results/amp8_drift.json
"""

import argparse
import collections
import json
import re
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent))

from pydoc_data import topics  # noqa: E402

from provenance import command, save  # noqa: E402
from small_gpt import GPT, evaluate, loss_of, sample  # noqa: E402

import amp8  # noqa: E402

BETAS = ((0.9, 0.95), (0.95, 0.999), (0.9, 0.999))
WAYS = {"fp32": None, "O1": ("O1", True), "O2": ("O2", True), "O3": ("O3", True), "O2 to nearest": ("O2", False)}
LR = 1e-3


def start(model, way, betas):
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas, weight_decay=0.0)
    if WAYS[way] is None:
        return model, optimizer
    level, stochastic = WAYS[way]
    return amp8.initialize(model, optimizer, level, stochastic_rounding=stochastic)


def weights(model, way):
    return amp8.master_state_dict(model) if WAYS[way] else model.state_dict()


def rows(way, betas, seed, steps, marks):
    """{step: mean movement in learning rates} of the rows without gradient."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"embedding": nn.Embedding(64, 64), "linear": nn.Linear(64, 64, bias=False)})
    model, optimizer = start(model, way, betas)
    before = {name: value.clone() for name, value in weights(model, way).items()}
    resting, found = torch.ones(64, 1), {}
    resting[32:] = 0
    generator = torch.Generator().manual_seed(100 + seed)
    for step in range(1, steps + 1):
        gradient = torch.randn(64, 64, generator=generator) * (1 if step <= 5 else resting)
        for layer in model.values():
            layer.weight.grad = gradient.clone()
        optimizer.step()
        if step in marks:
            now = weights(model, way)
            found[step] = sum((now[name] - before[name])[32:].abs().mean().item() for name in now) / len(now) / LR
    return found


def words(way, seed, steps):
    """(held-out loss, movement of rare words in learning rates)"""
    texts = re.findall(r"\w+|[^\w\s]", "\n".join(topics.topics.values()).lower())
    common = [word for word, _ in collections.Counter(texts).most_common(4095)]
    index = {word: i + 1 for i, word in enumerate(common)}
    data = torch.tensor([index.get(word, 0) for word in texts])
    cut = int(len(data) * 0.9)
    counts = torch.bincount(data[:cut], minlength=4096)
    torch.manual_seed(seed)
    model = GPT(4096, width=64, layers=1, context=32)
    model, optimizer = start(model, way, (0.9, 0.95))
    before = model.tokens.weight.detach().clone()
    clip = nn.utils.clip_grad_norm_ if WAYS[way] is None else amp8.clip_grad_norm_
    generator = torch.Generator().manual_seed(100 + seed)
    for _ in range(steps):
        loss_of(model, *sample(data[:cut], 8, 32, generator)).backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    rare = (counts <= 3) & (counts > 0)
    moved = (model.tokens.weight.detach() - before).abs().mean(1)[rare].mean().item() / LR
    return evaluate(model, data[cut:], 16), moved


def seconds(rounds):
    """{way: median CPU seconds of a step}"""
    ways = {way: start(nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(2)]), way, BETAS[0])
            for way in WAYS}  # fmt: skip
    found = {way: [] for way in ways}
    for _ in range(rounds + 2):
        for way, (model, optimizer) in ways.items():
            for layer in model:
                layer.weight.grad = torch.randn(1024, 1024)
            if WAYS[way]:
                model.amp8_state.finish()
            begin = time.process_time()
            optimizer.step()
            found[way].append(time.process_time() - begin)
    return {way: round(statistics.median(times[2:]), 4) for way, times in found.items()}


def measure_rows(args):
    """How far weights without gradient move, and the seconds of a step."""
    marks = [mark for mark in (200, 1_000, 3_000, 10_000) if mark <= args.steps]
    figures = {"rows": [], "words": [], "steps": args.steps, "word_steps": args.word_steps}
    figures["seconds_per_step_of_2_million"] = seconds(20)
    print(figures, flush=True)
    for betas in BETAS:
        for way in (way for way in WAYS if way != "O1"):  # its moments are fp32
            found = [rows(way, betas, seed, args.steps, marks) for seed in range(args.row_seeds)]
            figures["rows"].append({"betas": betas, "way": way, "moved": found})
            print(figures["rows"][-1], flush=True)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--word_steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--row_seeds", type=int, default=1)
    parser.add_argument("--words_alone", action="store_true", help="keep the rest of what --output holds")
    parser.add_argument("--output", default="results/amp8_drift.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.words_alone:
        figures = json.loads(Path(args.output).read_text())
        said = f"{figures['command']}, the words by {command()}"
        figures = {key: figures[key] for key in ("rows", "steps", "seconds_per_step_of_2_million")}
        figures |= {"words": [], "word_steps": args.word_steps, "command": said}
    else:
        figures = measure_rows(args)
        save(args.output, figures)
    for way in WAYS:
        found = [words(way, seed, args.word_steps) for seed in range(args.seeds)]
        losses, moved = ([pair[i] for pair in found] for i in range(2))
        figures["words"].append({"way": way, "losses": losses, "rare_words_moved": moved})
        print(figures["words"][-1], flush=True)
    save(args.output, figures)


if __name__ == "__main__":
    main()
