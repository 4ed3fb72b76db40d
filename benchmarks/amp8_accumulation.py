"""How far an accumulated gradient is off: an ordinary loop of one process, `backward` n times and nothing said.

Against the sum, in fp32, of the same micro-batches' FP8 products before any rounding of weight gradients. "each sum
rounded" is accumulate="fp8", which an ordinary loop came to before sums were kept in fp32 from the second pass on.

    python benchmarks/amp8_accumulation.py --output results/amp8_accumulation.json
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent))

from provenance import save  # noqa: E402

import amp8  # noqa: E402

DATA = ("random targets", "identical micro-batches")
WAYS = {"fp32 from the second backward on": "high", "each sum rounded": "fp8"}


def run(way, data, n, seed):
    """{error, norm}: relative error of the accumulated gradient, and its norm over the true one; bytes_more: per
    parameter, held between the passes."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    model, optimizer = amp8.initialize(model, torch.optim.AdamW(model.parameters()), "O2", accumulate=WAYS[way])
    layers, exact = (model[0], model[2]), [0, 0]
    for i, layer in enumerate(layers):

        def before_rounding(gradient, i=i):
            exact[i] = exact[i] + gradient.clone()

        layer.weight.register_hook(before_rounding)
    for micro in range(n):
        generator = torch.Generator().manual_seed(1000 * seed + (0 if data == DATA[1] else micro))
        x, y = (torch.randn(16, 128, generator=generator) for _ in range(2))
        (F.mse_loss(model(x), y) / n).backward()
    held = sum(layer.gradient.fp32.nbytes for layer in layers if layer.gradient.fp32 is not None)
    model.amp8_state.finish()  # as a step does it
    found = torch.cat([layer.gradient.value().flatten() for layer in layers])
    exact = torch.cat([one.flatten() for one in exact])
    return {"error": ((found - exact).norm() / exact.norm()).item(), "norm": (found.norm() / exact.norm()).item(),
            "bytes_more": held / exact.numel()}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", default="results/amp8_accumulation.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for data in DATA:
        for n in (1, 4, 16, 64, 256):
            for way in WAYS:
                found = [run(way, data, n, seed) for seed in range(args.seeds)]
                rows.append({"data": data, "micro_batches": n, "way": way, "runs": found})
                print(rows[-1], flush=True)
    save(args.output, {"rows": rows})


if __name__ == "__main__":
    main()
