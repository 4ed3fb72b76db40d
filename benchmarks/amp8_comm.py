"""Compares amp8's and MS-AMP's ways to average gradients in FP8: the error and the bytes sent, on the same tensors.

    OMP_NUM_THREADS=1 python benchmarks/amp8_comm.py

Rows: how much the ranks' gradients correlate. Schemes:
  amp8             all_to_all of e4m3, mean in fp32, rounded once more to e4m3, all_gather
  msamp            MS-AMP's DistributedDataParallel: e4m3 with a pre-scale of 1/sqrt(N), added in FP8 around a ring,
                   rounded (and saturated) at each hop. Implemented here only, for the comparison.
  msamp, no scale  its DeepSpeed path: the same without the pre-scale
  floor            one rounding of the exact mean to e4m3
  bf16             a bf16 all-reduce
8 ranks are simulated in one process; 4 are real gloo processes that run amp8's own code. Wire bytes are what amp8's
processes count, for DistributedDataParallel what its hooks hand to a ring all-reduce. Writes results/amp8_comm.json.
"""

import math
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from provenance import ROOT, save

sys.path.insert(0, str(ROOT))

from amp8 import scaling  # noqa: E402
from amp8.comm import Comm  # noqa: E402
from amp8.gradients import WeightGradient  # noqa: E402

E4M3 = scaling.E4M3
CORRELATIONS = (0.0, 0.5, 0.9, 1.0)
SHAPES = [(384, 512), (512, 384), (128, 128)]
LIMITS = {"error_at_0.9": 0.03, "of_bf16_hook": 0.55, "of_fp32_ddp": 0.28}


def gradients(ranks, correlation, seed=0):
    """Per-rank gradients [ranks, *shape] of each shape, with element-wise correlation between ranks."""
    g = torch.Generator().manual_seed(seed)
    own, common = math.sqrt(1 - correlation), math.sqrt(correlation)
    return [
        1e-3 * (common * torch.randn(1, *shape, generator=g) + own * torch.randn(ranks, *shape, generator=g))
        for shape in SHAPES
    ]


def rounded(x, dtype=E4M3):
    scale = scaling.power_of_two_scale(scaling.amax(x), dtype)
    return scaling.dequantize(scaling.quantize(x, scale, dtype), scale)


def amp8_mean(values):
    """What amp8's ranks compute, in one process: each element has an owner, whose own gradient is not rounded."""
    n = len(values)
    codes = torch.stack([rounded(value) for value in values]).flatten(1)
    own = values.flatten(1)
    for rank, part in enumerate(torch.arange(own.shape[1]).tensor_split(n)):
        codes[rank, part] = own[rank, part]
    scale = min(scaling.power_of_two_scale(scaling.amax(value), E4M3) for value in values)
    return scaling.dequantize(scaling.quantize(codes.mean(0), scale, E4M3), scale).view(values.shape[1:])


def msamp_mean(values, prescale):
    """FP8 sum around a ring: one scale for all ranks, each hop adds and rounds to e4m3."""
    n = len(values)
    scale = scaling.power_of_two_scale(scaling.amax(values), E4M3) * prescale
    total = scaling.quantize(values[0], scale, E4M3)
    for value in values[1:]:
        total = scaling.quantize(total.float() + scaling.quantize(value, scale, E4M3).float(), torch.ones(()), E4M3)
    return total.float() / scale / n


SCHEMES = {
    "amp8": amp8_mean,
    "msamp": lambda values: msamp_mean(values, 1 / math.sqrt(len(values))),
    "msamp, no scale": lambda values: msamp_mean(values, 1.0),
    "floor": lambda values: rounded(values.mean(0)),
    "bf16": lambda values: (sum(value.bfloat16() for value in values) / len(values)).float(),
}


def error(found, values):
    """Relative error of the mean over all tensors."""
    wrong = sum((f - v.mean(0)).square().sum() for f, v in zip(found, values, strict=True))
    return (wrong / sum(v.mean(0).square().sum() for v in values)).sqrt().item()


class Layer:
    def __init__(self, shape):
        self.weight = torch.nn.Parameter(torch.zeros(shape))


class State:
    """The part of a model's state that WeightGradient uses."""

    accumulate, sharded = "high", False

    def last_micro_batch(self):
        return True


def process(rank, world, folder):
    """Runs in one real rank: the error of amp8's mean at each correlation, and the bytes it sent."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    errors, sent = {}, 0
    for correlation in CORRELATIONS:
        values = gradients(world, correlation)
        state = State()
        stored = [WeightGradient(Layer(shape), 0, state) for shape in SHAPES]
        state.comm = Comm(stored, None, sharded=False)
        for gradient, value in reversed(list(zip(stored, values, strict=True))):
            port = torch.zeros(gradient.shape, requires_grad=True)
            port.grad = value[rank].clone()
            gradient.receive(port)
        state.comm.finish()
        errors[correlation] = error([gradient.value() for gradient in stored], values)
        sent = state.comm.sent
    torch.save({"errors": errors, "sent": sent}, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process at its ordinary exit


def real(world):
    """Results of `world` gloo processes."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(process, args=(world, folder), nprocs=world, join=False)
        context.join(timeout=120)
        return [torch.load(os.path.join(folder, f"{rank}.pt"), weights_only=True) for rank in range(world)]


def main():
    torch.set_num_threads(1)
    simulated = {name: {} for name in SCHEMES}
    for correlation in CORRELATIONS:
        values = gradients(8, correlation)
        for name, scheme in SCHEMES.items():
            simulated[name][correlation] = error([scheme(value) for value in values], values)
    ranks = real(4)
    elements = sum(math.prod(shape) for shape in SHAPES)
    ring = 2 * 3 / 4 * elements  # elements sent per rank by a ring all-reduce of 4 ranks
    sent = max(rank["sent"] for rank in ranks)
    wire = {"amp8": sent, "bf16_hook": int(2 * ring), "fp32_ddp": int(4 * ring)}
    wire |= {"of_bf16_hook": sent / wire["bf16_hook"], "of_fp32_ddp": sent / wire["fp32_ddp"]}
    processes = {c: max(rank["errors"][c] for rank in ranks) for c in CORRELATIONS}
    print("relative error of the mean, %    " + "  ".join(f"{c:>5}" for c in CORRELATIONS))
    for name, row in [*((f"8 simulated, {n}", r) for n, r in simulated.items()), ("4 processes, amp8", processes)]:
        print(f"{name:32} " + "  ".join(f"{100 * row[c]:5.2f}" for c in CORRELATIONS))
    print(f"wire: {wire['of_bf16_hook']:.3f} of a bf16 hook, {wire['of_fp32_ddp']:.3f} of fp32 DDP")
    save(
        ROOT / "results" / "amp8_comm.json",
        {"limits": LIMITS, "simulated_8": simulated, "processes_4": processes, "wire_4": wire},
    )
    worst = max(simulated["amp8"][0.9], processes[0.9])
    if worst > LIMITS["error_at_0.9"] or any(wire[key] > LIMITS[key] for key in ("of_bf16_hook", "of_fp32_ddp")):
        raise SystemExit("over a limit")


if __name__ == "__main__":
    main()
