"""Writes one page about the GPUs of this machine and what every config does on them, to be sent to someone.

    ./launch.sh gpu-report                     every config for 20 steps, into gpu-report.md
    ./launch.sh gpu-report --only fp8 bf16     configs whose name has one of these words
    ./launch.sh gpu-report --rehearse          nano models, for trying this script

Each config trains recipes/vit.py (tensor parallel: recipes/gpt.py) as a user would launch it, on all GPUs of the
machine. The page says whether it ran, was refused or failed, with the reason. The step time is the median after the
warm-up. FLOP are three times those of the matrix products in a forward pass. Their share is relative to the measured
rate of an 8192 x 8192 product in bf16 on one GPU, also for FP8 configs. The page is written after each config.
"""

import json
import platform
import time
from pathlib import Path

import gpu
import torch
from gpu import as_found, forward_flop, launched, measured
from provenance import ROOT, command, device_name

from faithful.training.steps import WARMUP_STEPS
from shared.args import Refused
from tools import cli
from tools.report import table

LEAST = WARMUP_STEPS + 1  # steps with one that is timed
HEADS = ["config", "outcome", "step, ms", "samples/s", "TFLOP/s per GPU", "of the bf16 rate", "peak, GiB", "loss"]


def workload(config, rehearse):
    """Returns (model, recipe and its options) for a config."""
    if config.startswith("tp"):
        model = "llama_nano" if rehearse else "llama_medium"
        words = ["gpt", "--model", model, "--sequence_length", "128" if rehearse else "1024", "--vocab_size", "4096"]
        return model, [*words, "--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "32"]
    model, size, batch = ("vit_nano", 32, 16) if rehearse else ("vit_base", 224, 64)
    words = ["vit", "--model", model, "--dataset", "synthetic", "--image_size", str(size)]
    words += ["--dataloader_num_workers", "2"]  # else a batch is copied and pinned between two steps
    return model, [*words, "--per_device_train_batch_size", str(batch), "--per_device_eval_batch_size", str(batch)]


def tried(config, rehearse, steps, limit=None):
    """Runs a config for at most `limit` seconds and returns its row: the outcome and the figures."""
    model, words = workload(config, rehearse)
    words += ["--max_steps", str(steps), "--logging_steps", str(steps), "--eval_steps", "0"]
    try:
        record = launched(config, words, {"COLLECTIVE_TIMEOUT": "60"}, limit)
        return figures(model, record)
    except SystemExit as problem:
        why = str(problem)
        return {"outcome": why if why.startswith("refused") else f"failed: {why.removeprefix('error: ')}"}
    except Exception as problem:  # of whatever kind: the other configs still run, and the page is written
        return {"outcome": f"failed: {type(problem).__name__}: {problem}"}


def figures(model, record):
    """A row of the page, from a run's record."""
    took, world = record["throughput"]["step_seconds_median"], record["plan"]["num_processes"]
    flop = 3 * record["seen"]["samples_per_step"] * forward_flop(model, record["data"])
    return {
        "outcome": f"ran on {world}" if record["plan"]["device"] == "cuda" else "ran on a CPU",
        "step_seconds": took,
        "samples_per_second": record["throughput"]["samples_per_second_median"],
        "flop_per_second": flop / took / world,
        "peak_memory_bytes": record["peak_memory_bytes"],
        "loss": record["final"]["loss"],
        "truth": record["evidence"]["truth"],
        "versions": record["versions"],
    }


def page(about, rate, rows):
    cells = []
    for config, row in rows.items():
        figures = [""] * 6
        if "step_seconds" in row:
            share = f"{row['flop_per_second'] / rate:.0%}" if rate else ""
            figures = [
                f"{1000 * row['step_seconds']:.1f}",
                f"{row['samples_per_second']:.1f}",
                f"{row['flop_per_second'] / 1e12:.3g}",
                share,
                f"{row['peak_memory_bytes'] / 2**30:.2f}",
                f"{row['loss']:.4f}",
            ]
        cells.append([f"`{config}`", row["outcome"], *figures])
    truths = [f"- `{config}`: {row['truth']}" for config, row in rows.items() if "truth" in row]
    parts = [
        "# What the configs do on this machine",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
        "",
        table(HEADS, cells),
        "",
        "What was counted in each run:",
        "",
        *truths,
        "",
    ]
    return "\n".join(parts)


def main(argv):
    parser = cli.parser("gpu-report", __doc__)
    parser.add_argument("--only", nargs="+", metavar="WORD", default=[""], help="configs whose name has one of these")
    parser.add_argument("--steps", type=int, default=20, help=f"at least {LEAST} (default: 20)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one config")
    parser.add_argument("--rehearse", action="store_true", help="nano models")
    parser.add_argument("--output", type=Path, default=Path("gpu-report.md"))
    args = parser.parse_args(argv)
    if args.steps < LEAST:
        raise Refused(f"--steps {args.steps}: {LEAST} or more, the first {WARMUP_STEPS} are not timed")
    if not torch.cuda.is_available() and not args.rehearse:
        raise Refused("there is no GPU here: --rehearse tries the configs on a CPU, with nano models")
    names = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yml"))
    names = [name for name in names if any(word in name for word in args.only)]
    if not names:
        raise Refused(f"--only {' '.join(args.only)}: no such config, ./launch.sh ls lists them")
    cli.make_folder(args.output.parent)
    row, rows = measured("rates", args.rehearse, args.limit, gpu.__file__), {}  # a process that leaves the GPU free
    device_rates = {key: value for key, value in row.items() if key.endswith("per_second")}
    about = {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "device": f"{torch.cuda.device_count()} x {device_name()}" if torch.cuda.is_available() else device_name(),
        "as found": json.dumps(as_found()),
        "system": platform.platform(),
        "rates": row.get("error") or ", ".join(f"{key} {value:.4g}" for key, value in device_rates.items()),
    }
    for at, config in enumerate(names, 1):
        print(f"[{at}/{len(names)}] {config}", flush=True)
        rows[config] = tried(config, args.rehearse, args.steps, args.limit)
        print(f"  {rows[config]['outcome']}", flush=True)
        if "versions" in rows[config]:
            about["versions"] = json.dumps(rows[config]["versions"])
        args.output.write_text(page(about, device_rates.get("bf16_flop_per_second"), rows))
    print(f"wrote {args.output}: this is the page to send")


if __name__ == "__main__":
    cli.run(main)
