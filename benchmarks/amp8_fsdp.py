"""Compares amp8's O1 and O2 under fully_shard with FSDP2's own fp32 and bf16: memory, bytes sent, error of the mean.

    OMP_NUM_THREADS=1 python benchmarks/amp8_fsdp.py

Runs 2 and 4 gloo processes on one machine, and HSDP as 2 replicas of 2 shards. The model is a decoder of 6 blocks,
width 256, each block sharded by itself. Measured per rank:
  bytes per parameter  live tensors of weights, gradients and moments of the 24 Linear layers after a step, over the
                       number of those parameters in the whole model
  wire                 bytes handed to collectives during the third step, counted where torch.distributed is called:
                       of all_gather, reduce_scatter and all_to_all what a ring sends, of all_reduce twice that
  of fp32              the wire divided by that of fp32; for the converted layers alone, amp8's count divided by the
                       wire of fp32 less that of the other layers, which is the same in both
  bf16                 FSDP2's MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)
The error of the mean gradient is measured on synthetic gradients, whose elements correlate between ranks as the column
says. Writes results/amp8_fsdp.json.
"""

import argparse
import math
import os
import sys
import tempfile

import torch
import torch._dynamo  # fully_shard imports it: once here, not in each of the forked ranks
import torch.distributed as dist
import torch.multiprocessing as mp
from provenance import ROOT, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(ROOT))

import amp8  # noqa: E402
import amp8.fsdp  # noqa: E402

WIDTH, BLOCKS, VOCABULARY, LENGTH = 256, 6, 1000, 64
CORRELATIONS = (0.0, 0.5, 0.9, 1.0)
SHAPES = [(384, 512), (512, 384), (128, 128)]
WORLDS = {"2": (2, 1), "4": (4, 1), "2 x 2": (4, 2)}  # ranks, replicas
LIMITS = {"bytes_over_6_by_shards": 1.1, "wire_of_fp32": 0.30, "error": 0.036}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (8, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.embed.weight.data *= 0.02

    def forward(self, ids):
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.t()


def mesh_of(world, replicas):
    if replicas == 1:
        return None
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def count_collectives():
    """Counts what this process passes to torch.distributed from now on. Returns the list of counts."""
    sent = [0]

    def wrap(name, cost):
        function = getattr(dist, name, None)
        if function is None:  # all_gather_single and reduce_scatter_single are newer than torch 2.11
            return

        def counted(*args, **kwargs):
            n = dist.get_world_size(kwargs.get("group"))
            sent[0] += cost(n, *[*args, *kwargs.values()])
            return function(*args, **kwargs)

        setattr(dist, name, counted)

    def larger(n, *tensors):
        return (n - 1) / n * max(t.nbytes for t in tensors if isinstance(t, torch.Tensor))

    for name in ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"):
        wrap(name, larger)
    wrap("all_to_all_single", larger)
    wrap("all_reduce", lambda n, *tensors: 2 * larger(n, *tensors))
    return sent


def training(rank, world, replicas, way):
    """Bytes per Linear parameter and bytes sent on this rank."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Decoder()
    policy = MixedPrecisionPolicy()
    if way == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = mesh_of(world, replicas)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    for parameter in model.parameters():  # the same random numbers on each rank will do
        values = parameter.to_local()
        nn.init.ones_(values) if values.dim() == 1 else nn.init.normal_(values, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if way.startswith("O"):
        model, optimizer = amp8.initialize(model, optimizer, way)
    sent = count_collectives()
    for step in range(3):
        start = sent[0]
        ids = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
        loss.backward()
        optimizer.step()
        gradients = {name: p.grad.to_local().nbytes for name, p in model.named_parameters() if p.grad is not None}
        optimizer.zero_grad()
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    weights = {name: p for name, p in model.named_parameters() if name in linear}
    count = sum(weight.numel() for weight in weights.values())
    if way.startswith("O"):
        per_parameter = amp8.report(model, optimizer)["bytes_per_parameter"]["linear"]["total"]
    else:
        moments = [optimizer.state[weight][key] for weight in weights.values() for key in ("exp_avg", "exp_avg_sq")]
        held = sum(weight.to_local().nbytes + gradients[name] for name, weight in weights.items())
        per_parameter = (held + sum(moment.to_local().nbytes for moment in moments)) / count
    counted = amp8.wire_bytes(model) / 3 if way.startswith("O") else 0
    return {
        "bytes": per_parameter,
        "wire": sent[0] - start,
        "converted": counted,  # bytes of the wire that are of converted layers
        "parameters": count,
        "loss": loss.item(),
    }


def errors(rank, world, replicas, _):
    """Relative error of the mean gradient of this rank's rows, by correlation: squares of error and of mean."""
    found = {}
    for correlation in CORRELATIONS:
        layers = nn.Sequential(*[nn.Linear(k, n, bias=False) for n, k in SHAPES])
        fully_shard(layers, mesh=mesh_of(world, replicas))
        layers, _ = amp8.initialize(layers, torch.optim.AdamW(layers.parameters()), "O2")
        g = torch.Generator().manual_seed(0)
        values = []
        for shape in SHAPES:
            common, own = torch.randn(1, *shape, generator=g), torch.randn(world, *shape, generator=g)
            values.append(1e-3 * (math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own))
        stored = layers.amp8_state.gradients
        for gradient, value in reversed(list(zip(stored, values, strict=True))):
            port = torch.zeros(value.shape[1:], requires_grad=True)
            port.grad = value[rank].clone()
            gradient.receive(port)
        layers.amp8_state.finish()
        sums = torch.zeros(2)
        for gradient, value in zip(stored, values, strict=True):
            mean = value.double().mean(0)[gradient.sharding.first : gradient.sharding.last]
            sums += torch.stack([(gradient.value() - mean).square().sum(), mean.square().sum()])
        dist.all_reduce(sums)
        found[correlation] = (sums[0] / sums[1]).sqrt().item()
    return found


def process(rank, world, replicas, function, way, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    result = globals()[function](rank, world, replicas, way)
    torch.save(result, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process at its ordinary exit


def real(world, replicas, function, way=None):
    """Results of `world` gloo processes."""
    with tempfile.TemporaryDirectory() as folder:
        given = (world, replicas, function, way, folder)
        context = mp.start_processes(process, given, world, join=False, start_method="fork")
        context.join(timeout=600)
        return [torch.load(os.path.join(folder, f"{rank}.pt"), weights_only=True) for rank in range(world)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only-errors", action="store_true", help="print the errors and write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    error = {name: real(*ranks, "errors")[0] for name, ranks in WORLDS.items()}
    print("error of the mean, %, by correlation  " + "  ".join(f"{c:>5}" for c in CORRELATIONS))
    for name, row in error.items():
        print(f"{name:37}  " + "  ".join(f"{100 * row[c]:5.2f}" for c in CORRELATIONS))
    if options.only_errors:
        return
    ways = {}
    for name, (world, replicas) in WORLDS.items():
        for way in ("fp32", "bf16", "O1", "O2"):
            ranks = real(world, replicas, "training", way)
            row = {key: max(rank[key] for rank in ranks) for key in ("bytes", "wire", "converted", "parameters")}
            row["shards"] = world // replicas
            ways.setdefault(name, {})[way] = row
            row["wire_of_fp32"] = row["wire"] / ways[name]["fp32"]["wire"]
            sent = f"{row['wire'] / 1e6:6.2f} MB sent ({row['wire_of_fp32']:.3f} of fp32)"
            if row["converted"]:
                plain = ways[name]["fp32"]["wire"] - (row["wire"] - row["converted"])
                row["converted_of_fp32"] = row["converted"] / plain
                sent += f", converted layers {row['converted_of_fp32']:.3f}"
            print(f"{name:6} {way:5} {row['bytes']:6.3f} B/param  {sent}", flush=True)
    save(ROOT / "results" / "amp8_fsdp.json", {"limits": LIMITS, "error": error, "ways": ways})
    over = [f"error, {name}, {c}" for name, row in error.items() for c in CORRELATIONS if row[c] > LIMITS["error"]]
    for name, rows in ways.items():
        o2 = rows["O2"]
        if o2["bytes"] * o2["shards"] / 6 > LIMITS["bytes_over_6_by_shards"]:
            over.append(f"bytes, {name}")
        if o2["converted_of_fp32"] > LIMITS["wire_of_fp32"]:
            over.append(f"wire, {name}")
    if over:
        raise SystemExit("over a limit: " + "; ".join(over))


if __name__ == "__main__":
    main()
