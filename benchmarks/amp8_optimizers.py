"""Compares torchao's low-bit AdamW with amp8's: bytes per parameter, time of an optimizer step, and loss, one run each.

    OMP_NUM_THREADS=1 python benchmarks/amp8_optimizers.py

The model is the byte-level GPT of amp8_parity.py, but wider, under bf16 autocast. torchao's optimizers store both
moments in 8 bits with one scale per block of 256, and leave weights and gradients in fp32; amp8's levels change those
too. Bytes are counted on the live tensors of all parameters. The step time is the median after torchao's compilations,
on a CPU: it says little about a GPU. Writes results/amp8_optimizers.json.
"""

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from amp8_parity import GPT, byte_gpt
from provenance import ROOT, save

sys.path.insert(0, str(ROOT))

import amp8  # noqa: E402

ROWS = ("torch AdamW", "torchao AdamW8bit", "torchao AdamWFp8", "amp8 O1", "amp8 O2", "amp8 O3")


def stored(tensor):
    """Bytes of a tensor, or of the plain tensors inside one of torchao's."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(stored(getattr(tensor, name)) for name in names)


def make(row, parameters):
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if not row.startswith("torchao"):
        return torch.optim.AdamW(parameters, **options)
    import torchao.optim

    return getattr(torchao.optim, row.split()[1])(parameters, **options)


def run(row, steps, width):
    torch.manual_seed(0)
    _, batch, held = byte_gpt()
    model = GPT(width=width)
    optimizer = make(row, model.parameters())
    if row.startswith("amp8"):
        model, optimizer = amp8.initialize(model, optimizer, row.split()[1])
    generator, times = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x, y = batch(generator)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        F.cross_entropy(out.flatten(0, 1).float(), y.flatten()).backward()
        amp8.clip_grad_norm_(model.parameters(), 1.0)
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
        ordinary = [p for p in model.parameters() if not hasattr(p, "amp8_linear")]  # the report counts the others
        gradients = sum(p.grad.nbytes for p in ordinary if p.grad is not None)
        optimizer.zero_grad()
    count = sum(p.numel() for p in model.parameters())
    if row.startswith("amp8"):
        sizes = amp8.report(model, optimizer)["bytes_per_parameter"]["all"]
        sizes["gradient"] += gradients / count  # zero_grad() came before the report
        sizes["total"] += gradients / count
    else:
        state = [value for values in optimizer.state.values() for key, value in values.items() if key != "step"]
        sizes = {
            "weight": sum(p.nbytes for p in model.parameters()) / count,
            "gradient": gradients / count,
            "optimizer": sum(stored(value) for value in state) / count,
        }
        sizes["total"] = sum(sizes.values())
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        loss = statistics.mean(F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten()).item() for x, y in held)
    return {
        "bytes_per_parameter": {key: round(value, 3) for key, value in sizes.items()},
        "seconds": {
            "first_step": round(times[0], 3),
            "median_step": round(statistics.median(times[5:]), 4),
        },
        "validation_loss": round(loss, 4),
        "parameters": count,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    rows = {}
    for row in ROWS:
        rows[row] = found = run(row, args.steps, args.width)
        sizes, seconds = found["bytes_per_parameter"], found["seconds"]
        parts = " + ".join(f"{key} {size:.2f}" for key, size in sizes.items() if key != "total")
        print(f"{row:18} {sizes['total']:6.2f} B/param ({parts})  {1e3 * seconds['median_step']:6.1f} ms  ", end="")
        print(f"loss {found['validation_loss']:.4f}", flush=True)
    save(
        ROOT / "results" / "amp8_optimizers.json", {"steps": args.steps, "width": args.width, "rows": rows}, ["torchao"]
    )


if __name__ == "__main__":
    main()
