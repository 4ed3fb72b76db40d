"""Does the language model learn more than frequencies of three bytes? Compares gpt with a 3-gram with back-off.

    python benchmarks/ngram.py --output results/gpt_python_docs.json

Both train on the same bytes and are evaluated on the same held-out labels, in mean nats per byte. The 3-gram backs off
by Witten and Bell's rule (1991): after a context seen c times with d different successors, the next shorter context has
the weight d / (c + d). Its probabilities add up to one, so the losses are comparable. recipes/gpt.py runs through
`accelerate launch`; a finished run is not repeated.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from provenance import save

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from shared import text  # noqa: E402


def witten_bell(stream, size, order):
    """Probabilities p[context..., next] for sequences of `order` tokens below `size`, from a stream of tokens."""
    lower = np.full((1, size), 1 / size)  # the shortest context of all knows nothing
    for length in range(1, order + 1):
        index = np.zeros(len(stream) - length + 1, np.int64)
        for i in range(length):
            index = index * size + stream[i : len(stream) - length + 1 + i]
        counts = np.bincount(index, minlength=size**length).reshape(-1, size).astype(np.float32)
        total, different = counts.sum(1, keepdims=True), (counts > 0).sum(1, keepdims=True)
        shorter = np.tile(lower, (len(counts) // len(lower), 1))  # the row of a context without its first token
        counts += different * shorter
        unseen = (total == 0).squeeze(1)
        counts[unseen] = shorter[unseen]
        counts /= np.where(total + different == 0, 1, total + different)
        lower = counts
    return lower


def ngram_loss(train, held_out, size, order):
    """Mean negative log-likelihood over the held-out labels, each from the tokens before it in its own stream."""
    table = witten_bell(train.tokens.numpy().astype(np.int64), size, order)
    assert np.allclose(table.sum(1), 1, atol=1e-4)
    stream = held_out.tokens.numpy().astype(np.int64)
    index = np.zeros(len(stream) - order + 1, np.int64)
    for i in range(order - 1):
        index = index * size + stream[i : len(stream) - order + 1 + i]
    return float(-np.log(table[index, stream[order - 1 :]]).mean()), len(index)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="python_docs")
    parser.add_argument("--config", default="single_fp32")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--order", type=int, default=3)
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "ngram-gpt")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    train, held_out = text.texts(args.dataset, 128)
    losses = {n: ngram_loss(train, held_out, len(train.tokenizer), n)[0] for n in range(1, args.order + 1)}
    print({n: round(loss, 4) for n, loss in losses.items()}, flush=True)
    command = ["accelerate", "launch", "--config_file", f"accelerate_configs/{args.config}.yml", "recipes/gpt.py"]
    command += ["--dataset", args.dataset, "--max_steps", str(args.steps), "--save_steps", "0", "--eval_steps", "100"]
    command += ["--output_dir", str(args.run), "--logging_steps", "50"]
    command += ["--resume_from_checkpoint", "latest"]
    if not (args.run / "model" / "model.safetensors").exists():
        command[:2] = [sys.executable, "-m", "accelerate.commands.launch"]
        subprocess.run(command, cwd=ROOT, check=True)
    record = json.loads((args.run / "run.json").read_text())
    loss = record["final"]["metrics"]["eval_loss"]
    print(f"gpt {loss:.4f}, {args.order}-gram {losses[args.order]:.4f} nats per byte")
    if args.output:
        figures = {
            "dataset": args.dataset,
            "training_bytes": len(train.tokens),
            "held_out_bytes": int(held_out.counts.sum()),
            "ngram_loss": losses,
            "gpt": {
                "loss": loss,
                "args": {key: record["args"][key] for key in ("model", "max_steps", "learning_rate")},
                "train_seconds_about": record["throughput"]["step_seconds_median"] * record["args"]["max_steps"],
            },
        }
        save(args.output, figures, run=record)


if __name__ == "__main__":
    main()
