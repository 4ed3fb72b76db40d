"""What MS-AMP's levels hold and send, as amp8 has them: formats, bytes, and gradients in FP8. No accuracy: study.py.

    OMP_NUM_THREADS=1 python benchmarks/amp8_levels.py table comm fsdp

Each part writes results/amp8_PART.json.

table   dtypes and bytes of the 48 converted layers of a ViT-small on two gloo ranks, counted on live tensors. gemm: the
        formats of the operands of their products, found from the values: e4m3 if e4m3 can hold all of them exactly,
        times a power of two, else e5m2 if that can, else their dtype (without FP8 hardware codes are multiplied as
        bf16). wire: of DistributedDataParallel the dtype of its buckets. TE: delayed scaling, emulated.
comm    the error of a mean of gradients, by how much the ranks' gradients correlate, in 8 simulated ranks and in 4 real
        ones that run amp8's code: amp8's way (all_to_all of e4m3, mean in fp32, rounded once more); MS-AMP's (e4m3 with
        a pre-scale of 1/sqrt(N), added in FP8 around a ring and rounded at each hop), which is here only; one rounding
        of the exact mean; a bf16 sum. And the bytes sent, beside those of a ring all-reduce.
fsdp    O1 and O2 under fully_shard beside FSDP2's own fp32 and bf16, per rank, for a decoder of 6 blocks of width 256:
        bytes of weights, gradients and moments per parameter of its Linear layers; bytes of the third step's
        collectives, counted where torch.distributed is called; the error of the mean gradient.
"""

import json
import math
import os
import sys
import tempfile

import torch
import torch._dynamo  # fully_shard imports it: once here, not in each of the forked ranks
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import ROOT, arguments, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import amp8
import amp8.fsdp
from amp8 import scaling
from amp8.comm import Comm
from amp8.gradients import WeightGradient
from amp8.report import name_of
from faithful.backends import emulation as emulate

LEVELS = ("O1", "O2", "O3")
CORRELATIONS = (0.0, 0.5, 0.9, 1.0)
SHAPES = [(384, 512), (512, 384), (128, 128)]
LIMITS = {
    "comm": {"error_at_0.9": 0.03, "of_bf16_hook": 0.55, "of_fp32_ddp": 0.28},
    "fsdp": {"bytes_over_6_by_shards": 1.1, "wire_of_fp32": 0.30, "error": 0.036},
}


def process(rank, world, folder, function, words):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    torch.save(function(rank, world, *words), f"{folder}/{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process at its ordinary exit


def ranks(world, function, *words):
    """What function(rank, world, *words) returns in each of `world` gloo processes."""
    with tempfile.TemporaryDirectory() as folder:
        given = (world, folder, function, words)
        mp.start_processes(process, given, world, join=False, start_method="fork").join(timeout=900)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(world)]


def gradients(count, correlation):
    """Gradients [ranks, *shape] of each shape, with element-wise correlation between ranks."""
    g, found = torch.Generator().manual_seed(0), []
    for shape in SHAPES:
        common, own = torch.randn(1, *shape, generator=g), torch.randn(count, *shape, generator=g)
        found.append(1e-3 * (math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own))
    return found


def received(stored, values, rank):
    """Gives each stored gradient its part of the values, as a backward pass does."""
    for gradient, value in reversed(list(zip(stored, values, strict=True))):
        port = torch.zeros(value.shape[1:], requires_grad=True)
        port.grad = value[rank].clone()
        gradient.receive(port)


# -------------------------------------------------------------------------------------------------------------- table

CLASSES = 1000  # not a multiple of 16: the head is not converted, and its products are told by this dimension


def format_of(operand):
    values = operand.float()
    for dtype in (scaling.E4M3, scaling.E5M2):
        room = torch.finfo(dtype).max / values.abs().max().clamp(min=1e-30)
        scaled = values * 2.0 ** room.log2().floor()  # all scales are powers of two, and this is the largest one
        if torch.equal(scaled.to(dtype).float(), scaled):
            return name_of(dtype)
    return name_of(operand.dtype)


class Products(TorchDispatchMode):
    """Notes the operands of each matrix product."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            a, b = args[-2:]
            if CLASSES not in (*a.shape, *b.shape):
                self.seen.add(" x ".join(sorted((format_of(a), format_of(b)), reverse=True)))
        return function(*args, **(kwargs or {}))


def averaged_by(wrapped):
    """The dtypes of the buckets that DistributedDataParallel reduces, growing."""
    buckets = set()

    def hook(state, bucket):
        buckets.add(name_of(bucket.buffer().dtype))
        dist.all_reduce(bucket.buffer())
        future = torch.futures.Future()
        future.set_result(bucket.buffer() / dist.get_world_size())
        return future

    wrapped.register_comm_hook(None, hook)
    return buckets


def three_steps(rank, world, row):
    """Trains the ViT-small, and returns the row of a level, of TransformerEngine or of AMP."""
    import timm

    torch.manual_seed(0)
    level, dtype = row.startswith("O"), torch.float16 if row == "fp16 AMP" else torch.bfloat16
    model = timm.create_model("vit_small_patch16_224", num_classes=CLASSES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    layers = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "head"]
    if row == "TE":
        emulate.convert(model, "delayed", lambda module, name: name != "head")
    elif level:
        model, optimizer = amp8.initialize(model, optimizer, row)
    wrapped = DistributedDataParallel(model)
    buckets = averaged_by(wrapped)
    if level:
        amp8.attach(wrapped)
    scaler, products = torch.amp.GradScaler("cpu", enabled=row == "fp16 AMP"), Products()
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        x, y = torch.randn(8, 3, 224, 224, generator=generator), torch.randint(CLASSES, (8,), generator=generator)
        with torch.autocast("cpu", dtype):
            loss = nn.functional.cross_entropy(wrapped(x), y)
        if step < 2:
            scaler.scale(loss).backward()
        else:
            with products:  # once more to look at: the autograd thread is this one on a CPU
                scaler.scale(loss).backward()
            with products, torch.no_grad(), torch.autocast("cpu", dtype):
                model(x[:1].repeat(8, 1, 1, 1))
        scaler.step(optimizer)
        scaler.update()
        if row == "TE":
            emulate.update_scales(model)
        if step < 2:
            optimizer.zero_grad()
    if level:
        found = amp8.report(wrapped, optimizer)
        return {**found["dtypes"], "gemm": sorted(products.seen), "bytes": found["bytes_per_parameter"]["linear"]}
    return {"gemm": sorted(products.seen), "wire": sorted(buckets)} | counted([m.weight for m in layers], optimizer)


def counted(weights, optimizer):
    """Dtypes and bytes of plain weights, gradients and moments."""
    count, states = sum(w.numel() for w in weights), [optimizer.state[w] for w in weights]
    kinds = {"weight": weights, "weight_gradient": [w.grad for w in weights]}
    kinds |= {key: [state[key] for state in states] for key in ("exp_avg", "exp_avg_sq")}
    each = {name: sum(tensor.nbytes for tensor in tensors) / count for name, tensors in kinds.items()}
    sizes = {"weight": each["weight"], "gradient": each["weight_gradient"], "master": 0}
    sizes["optimizer"] = each["exp_avg"] + each["exp_avg_sq"]
    dtypes = {name: sorted({name_of(tensor.dtype) for tensor in tensors}) for name, tensors in kinds.items()}
    return dtypes | {"master": [], "bytes": sizes | {"total": sum(sizes.values())}}


def table():
    rows = {}
    for row in ("fp16 AMP", "bf16 AMP", "TE", *LEVELS):
        rows[row] = ranks(2, three_steps, row)[0]
        print(row, rows[row], flush=True)
    return {"ranks": 2, "rows": rows}, []


# --------------------------------------------------------------------------------------------------------------- comm


def rounded(x, dtype=scaling.E4M3):
    scale = scaling.power_of_two_scale(scaling.amax(x), dtype)
    return scaling.dequantize(scaling.quantize(x, scale, dtype), scale)


def amp8_mean(values):
    """What amp8's ranks compute, in one process: each element has an owner, whose own gradient is not rounded."""
    codes = torch.stack([rounded(value) for value in values]).flatten(1)
    own = values.flatten(1)
    for rank, part in enumerate(torch.arange(own.shape[1]).tensor_split(len(values))):
        codes[rank, part] = own[rank, part]
    scale = min(scaling.power_of_two_scale(scaling.amax(value), scaling.E4M3) for value in values)
    return scaling.dequantize(scaling.quantize(codes.mean(0), scale, scaling.E4M3), scale).view(values.shape[1:])


def msamp_mean(values):
    """FP8 sum around a ring: one scale for all ranks, each hop adds and rounds to e4m3."""
    count = len(values)
    scale = scaling.power_of_two_scale(scaling.amax(values), scaling.E4M3) / math.sqrt(count)
    total = scaling.quantize(values[0], scale, scaling.E4M3)
    for value in values[1:]:
        added = total.float() + scaling.quantize(value, scale, scaling.E4M3).float()
        total = scaling.quantize(added, torch.ones(()), scaling.E4M3)
    return total.float() / scale / count


SCHEMES = {
    "amp8": amp8_mean,
    "msamp": msamp_mean,
    "floor": lambda values: rounded(values.mean(0)),
    "bf16": lambda values: (sum(value.bfloat16() for value in values) / len(values)).float(),
}


def error(found, values):
    """Relative error of the mean over all tensors."""
    wrong = sum((f - v.mean(0)).square().sum() for f, v in zip(found, values, strict=True))
    return (wrong / sum(v.mean(0).square().sum() for v in values)).sqrt().item()


class Layer:
    def __init__(self, shape):
        self.weight = nn.Parameter(torch.zeros(shape))


class State:
    """The part of a model's state that WeightGradient uses."""

    accumulate, sharded = "high", False

    def last_micro_batch(self):
        return True


def means(rank, world):
    """({correlation: error of amp8's mean}, the bytes that this rank sent)"""
    errors = {}
    for correlation in CORRELATIONS:
        values, state = gradients(world, correlation), State()
        stored = [WeightGradient(Layer(shape), 0, state) for shape in SHAPES]
        state.comm = Comm(stored, None, sharded=False)
        received(stored, values, rank)
        state.comm.finish()
        errors[correlation] = error([gradient.value() for gradient in stored], values)
    return errors, state.comm.sent


def comm():
    real = ranks(4, means)
    values = {correlation: gradients(8, correlation) for correlation in CORRELATIONS}
    simulated = {
        name: {c: error([scheme(value) for value in values[c]], values[c]) for c in CORRELATIONS}
        for name, scheme in SCHEMES.items()
    }
    elements = 2 * 3 / 4 * sum(math.prod(shape) for shape in SHAPES)  # that a rank sends in a ring of 4
    sent = max(sent for _, sent in real)
    wire = {"amp8": sent, "of_bf16_hook": sent / (2 * elements), "of_fp32_ddp": sent / (4 * elements)}
    processes = {c: max(errors[c] for errors, _ in real) for c in CORRELATIONS}
    print(json.dumps({"simulated": simulated, "processes": processes, "wire": wire}, indent=1))
    limits, worst = LIMITS["comm"], max(simulated["amp8"][0.9], processes[0.9])
    over = [key for key in ("of_bf16_hook", "of_fp32_ddp") if wire[key] > limits[key]]
    over += ["error_at_0.9"] if worst > limits["error_at_0.9"] else []
    return {"simulated_8": simulated, "processes_4": processes, "wire_4": wire}, over


# --------------------------------------------------------------------------------------------------------------- fsdp

WIDTH, BLOCKS, VOCABULARY, LENGTH = 256, 6, 1000, 64
WORLDS = {"2": (2, 1), "4": (4, 1), "2 x 2": (4, 2)}  # ranks, replicas


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
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.position = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])

    def forward(self, ids):
        return self.norm(self.blocks(self.embed(ids) + self.position)) @ self.embed.weight.t()


def mesh_of(world, replicas):
    if replicas == 1:
        return None
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def count_collectives():
    """Counts what this process passes to torch.distributed from now on, as a ring sends it. Returns [count]."""
    sent = [0]

    def wrap(name, factor):
        function = getattr(dist, name, None)
        if function is None:  # all_gather_single and reduce_scatter_single are newer than torch 2.11
            return

        def counting(*args, **kwargs):
            n = dist.get_world_size(kwargs.get("group"))
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            sent[0] += factor * (n - 1) / n * max(tensor.nbytes for tensor in tensors)
            return function(*args, **kwargs)

        setattr(dist, name, counting)

    for name in ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"):
        wrap(name, 1)
    wrap("all_to_all_single", 1)
    wrap("all_reduce", 2)
    return sent


def sharded(rank, world, replicas, way):
    """Bytes per Linear parameter, bytes sent, and those of converted layers among them, on this rank."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Decoder()
    mixed = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if way == "bf16" else {}
    mesh = mesh_of(world, replicas)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**mixed))
    model.to_empty(device="cpu")
    for parameter in model.parameters():  # the same random numbers on each rank will do
        values = parameter.to_local()
        nn.init.ones_(values) if values.dim() == 1 else nn.init.normal_(values, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if way.startswith("O"):
        model, optimizer = amp8.initialize(model, optimizer, way)
    sent = count_collectives()
    for step in range(3):
        before = sent[0]
        ids = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(10 * step + rank))
        nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()
        optimizer.step()
        held = {name: p.grad.to_local().nbytes for name, p in model.named_parameters() if p.grad is not None}
        optimizer.zero_grad()
    found = {"wire": sent[0] - before, "converted": 0}
    if way.startswith("O"):
        found["converted"] = amp8.wire_bytes(model) / 3
        return found | {"bytes": amp8.report(model, optimizer)["bytes_per_parameter"]["linear"]["total"]}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    weights = {name: p for name, p in model.named_parameters() if name in linear}
    for name, weight in weights.items():
        tensors = (weight, optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"])
        held[name] += sum(tensor.to_local().nbytes for tensor in tensors)
    return found | {"bytes": sum(held[name] for name in weights) / sum(w.numel() for w in weights.values())}


def sharded_means(rank, world, replicas):
    """{correlation: relative error of the mean gradient}, each rank having its rows of it."""
    found = {}
    for correlation in CORRELATIONS:
        layers = nn.Sequential(*[nn.Linear(k, n, bias=False) for n, k in SHAPES])
        fully_shard(layers, mesh=mesh_of(world, replicas))
        layers, _ = amp8.initialize(layers, torch.optim.AdamW(layers.parameters()), "O2")
        values, stored = gradients(world, correlation), layers.amp8_state.gradients
        received(stored, values, rank)
        layers.amp8_state.finish()
        sums = torch.zeros(2)
        for gradient, value in zip(stored, values, strict=True):
            mean = value.double().mean(0)[gradient.sharding.first : gradient.sharding.last]
            sums += torch.stack([(gradient.value() - mean).square().sum(), mean.square().sum()])
        dist.all_reduce(sums)
        found[correlation] = (sums[0] / sums[1]).sqrt().item()
    return found


def fsdp():
    errors = {name: ranks(world, sharded_means, replicas)[0] for name, (world, replicas) in WORLDS.items()}
    print(errors, flush=True)
    ways, limits = {name: {} for name in WORLDS}, LIMITS["fsdp"]
    over = [f"error, {name}" for name, row in errors.items() if max(row.values()) > limits["error"]]
    for name, (world, replicas) in WORLDS.items():
        for way in ("fp32", "bf16", "O1", "O2"):
            found = ranks(world, sharded, replicas, way)
            row = ways[name][way] = {key: max(each[key] for each in found) for key in found[0]}
            row |= {"shards": world // replicas, "wire_of_fp32": row["wire"] / ways[name]["fp32"]["wire"]}
            if row["converted"]:  # the other layers send the same in both
                row["converted_of_fp32"] = row["converted"] / (
                    ways[name]["fp32"]["wire"] - row["wire"] + row["converted"]
                )
            print(name, way, row, flush=True)
        if row["bytes"] * row["shards"] / 6 > limits["bytes_over_6_by_shards"]:
            over.append(f"bytes, {name}")
        if row["converted_of_fp32"] > limits["wire_of_fp32"]:
            over.append(f"wire, {name}")
    return {"error": errors, "ways": ways}, over


PARTS = {"table": (table, ["timm"]), "comm": (comm, []), "fsdp": (fsdp, [])}


def main():
    parser = arguments(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    args = parser.parse_args()
    for part in args.parts or PARTS:
        measure, packages = PARTS[part]
        figures, over = measure()
        save(ROOT / "results" / f"amp8_{part}.json", {"limits": LIMITS.get(part)} | figures, packages)
        if over:
            raise SystemExit(f"over a limit: {'; '.join(over)}")


if __name__ == "__main__":
    main()
