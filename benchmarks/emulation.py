"""How much time FP8 emulation costs: a training step of a ViT with emulated FP8 compared with its bf16-autocast step.

    python benchmarks/emulation.py [--output results/emulation.json]

The steps alternate, so that other load on the machine affects all of them equally. A ratio is the median over rounds of
a step's time divided by the bf16 step's time in the same round. `torchao` is torchao's Float8Linear with its own CPU
path, in a bf16 model, because it ignores CPU autocast; its ratio is to the same bf16-autocast step.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from provenance import save

sys.path.append(str(Path(__file__).resolve().parents[1]))
from faithful.backends import emulation as emulate  # noqa: E402


def make_step(kind, args):
    """Returns a function that does one training step of `kind`: bf16, an emulated recipe, or torchao:<recipe>."""
    torch.manual_seed(0)
    model = timm.create_model(args.model, num_classes=1000, img_size=args.img_size)
    images, labels = torch.randn(args.batch_size, 3, args.img_size, args.img_size), torch.arange(args.batch_size)
    backend, _, recipe = kind.rpartition(":")
    if backend == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model, images = model.bfloat16(), images.bfloat16()
        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "head")
    elif kind != "bf16":
        emulate.convert(model, kind, lambda module, name: name != "head")
    if args.compile:
        for block in model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=backend != "torchao"):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        emulate.update_scales(model)

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--img_size", type=int, default=224)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", action="store_true", help="compile each block, of every kind")
    kinds = [*emulate.TORCHAO, *emulate.TRANSFORMER_ENGINE, "torchao:tensorwise", "torchao:rowwise"]
    parser.add_argument("--kinds", nargs="*", default=kinds, metavar="KIND", help=f"of {' '.join(kinds)}")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    kinds = ["bf16", *args.kinds]
    steps = {kind: make_step(kind, args) for kind in kinds}
    seconds = {kind: [] for kind in kinds}
    for _ in range(args.rounds + 1):
        for kind, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[kind].append(time.perf_counter() - start)
    rows = []
    for kind, times in seconds.items():
        ratios = [a / b for a, b in zip(times[1:], seconds["bf16"][1:], strict=True)]  # the first step warms up
        rows.append(
            {
                "kind": kind,
                "median_s": round(statistics.median(times[1:]), 4),
                "min_s": round(min(times[1:]), 4),
                "median_ratio": round(statistics.median(ratios), 3),
                "min_ratio": round(min(times[1:]) / min(seconds["bf16"][1:]), 3),
            }
        )
        print(
            "{kind:20} {median_s:8.3f} s   {median_ratio:6.2f}x bf16 (of the fastest: {min_ratio:.2f}x)".format(
                **rows[-1]
            )
        )
    if args.output:
        save(args.output, {"rows": rows}, ("torchao", "timm"))


if __name__ == "__main__":
    main()
