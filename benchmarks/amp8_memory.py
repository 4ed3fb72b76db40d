"""Peak resident memory of training a ViT-huge on a CPU, batch 1: fp32 AdamW under bf16 autocast, and the levels.

    OMP_NUM_THREADS=2 python benchmarks/amp8_memory.py

Each row is a separate process, which builds the model and trains two steps, the second with all optimizer state in
place. `peak` is the peak of resident memory (VmHWM) minus the resident memory before the model was built. The first row
needs 12 GB. Writes results/amp8_memory.json.
"""

import argparse
import json
import subprocess
import sys
import time

import torch
from harness import ROOT, arguments, save

LIMITS = {"O1": 0.75, "O2": 0.50}


def resident(key):
    """VmHWM or VmRSS of this process in bytes."""
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024


def train(level, depth, steps):
    import timm

    import amp8

    before = resident("VmRSS")
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(patch_size=16, embed_dim=1280, depth=depth, num_heads=16, num_classes=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if level != "bf16":
        model, optimizer = amp8.initialize(model, optimizer, level)
    built = resident("VmHWM")
    x = torch.randn(1, 3, 224, 224)
    for _ in range(steps):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), torch.tensor([3]))
        loss.backward()
        norm = amp8.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if level == "bf16":
            size = 4 * 4.0
        else:
            size = amp8.report(model, optimizer)["bytes_per_parameter"]["all"]["total"]
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
    if not torch.isfinite(norm):
        raise SystemExit("the gradient is not finite")
    return {
        "level": level,
        "parameters": sum(p.numel() for p in model.parameters()),
        "peak": resident("VmHWM") - before,
        "peak_of_process": resident("VmHWM"),
        "peak_before_training": built - before,
        "bytes_per_parameter": size,
        "seconds_of_last_step": round(seconds, 2),
        "loss": loss.item(),
    }


def main():
    parser = arguments(__doc__)
    parser.add_argument("--levels", nargs="+", default=["bf16", "O1", "O2", "O3"])
    parser.add_argument("--depth", type=int, default=32, help="32 is ViT-huge; less for a quick look, not saved")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(train(args.one, args.depth, args.steps)))
        return
    rows = []
    for level in args.levels:
        command = [sys.executable, __file__, "--one", level, "--depth", str(args.depth), "--steps", str(args.steps)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        row["ratio"] = round(row["peak"] / rows[0]["peak"], 3)
        print(f"{level:5} peak {row['peak'] / 2**30:6.2f} GiB  {row['ratio']:.3f} of {rows[0]['level']}", flush=True)
    if args.depth == 32 and rows[0]["level"] == "bf16":
        save(ROOT / "results" / "amp8_memory.json", {"limits": LIMITS, "rows": rows}, ["timm"])


if __name__ == "__main__":
    main()
