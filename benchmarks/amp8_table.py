"""MS-AMP's table of formats, measured: a ViT-small trains three steps on two gloo ranks in each precision.

    OMP_NUM_THREADS=1 python benchmarks/amp8_table.py

gemm: the formats of the operands of the converted layers' matrix products, found from the values: e4m3 if e4m3 can hold
all of them exactly, times a power of two, else e5m2 if that can, else their dtype (without FP8 hardware FP8 codes are
multiplied as bf16).
wire: for DistributedDataParallel the dtype of the buckets it reduces. The rest: dtypes and bytes of live tensors of
the same 48 layers, on one of two ranks. TE: TransformerEngine's delayed scaling as amp8/emulate.py computes it.
Writes results/amp8_table.json.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from provenance import ROOT, save
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(ROOT))

import amp8  # noqa: E402
from amp8 import scaling  # noqa: E402
from amp8.report import name_of  # noqa: E402
from faithful.backends import emulation as emulate  # noqa: E402

ROWS = ("fp16 AMP", "bf16 AMP", "TE", "O1", "O2", "O3")
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


def train(row):
    import timm

    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224", num_classes=CLASSES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    layers = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "head"]
    if row == "TE":
        emulate.convert(model, "delayed", lambda module, name: name != "head")
    elif row.startswith("O"):
        model, optimizer = amp8.initialize(model, optimizer, row)
    wrapped, buckets = DistributedDataParallel(model), set()

    def hook(state, bucket):
        buckets.add(name_of(bucket.buffer().dtype))
        dist.all_reduce(bucket.buffer())
        future = torch.futures.Future()
        future.set_result(bucket.buffer() / dist.get_world_size())
        return future

    wrapped.register_comm_hook(None, hook)
    if row.startswith("O"):
        amp8.attach(wrapped)
    scaler = torch.amp.GradScaler("cpu", enabled=row == "fp16 AMP")
    products = Products()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        x, y = torch.randn(8, 3, 224, 224, generator=generator), torch.randint(CLASSES, (8,), generator=generator)
        with torch.autocast("cpu", torch.float16 if row == "fp16 AMP" else torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(wrapped(x), y)
        if step < 2:
            scaler.scale(loss).backward()
        else:
            with products:  # once more to look at: the autograd thread is this one on a CPU
                scaler.scale(loss).backward()
            with products, torch.no_grad(), torch.autocast("cpu", torch.float16 if "fp16" in row else torch.bfloat16):
                model(x[:1].repeat(8, 1, 1, 1))
        scaler.step(optimizer)
        scaler.update()
        if row == "TE":
            emulate.update_scales(model)
        if step < 2:
            optimizer.zero_grad()
    if row.startswith("O"):
        found = amp8.report(wrapped, optimizer)
        return {**found["dtypes"], "gemm": sorted(products.seen), "bytes": found["bytes_per_parameter"]["linear"]}
    weights = [layer.weight for layer in layers]
    count = sum(w.numel() for w in weights)
    states = [optimizer.state[w] for w in weights]
    sizes = {
        "weight": sum(w.nbytes for w in weights) / count,
        "gradient": sum(w.grad.nbytes for w in weights) / count,
        "master": 0,
        "optimizer": sum(s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes for s in states) / count,
    }
    sizes["total"] = sum(sizes.values())
    return {
        "gemm": sorted(products.seen),
        "wire": sorted(buckets),
        "weight": sorted({name_of(w.dtype) for w in weights}),
        "master": [],
        "weight_gradient": sorted({name_of(w.grad.dtype) for w in weights}),
        "exp_avg": sorted({name_of(s["exp_avg"].dtype) for s in states}),
        "exp_avg_sq": sorted({name_of(s["exp_avg_sq"].dtype) for s in states}),
        "bytes": sizes,
    }


def rank(index, world, folder, row):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=index, world_size=world)
    found = train(row)
    if index == 0:
        torch.save(found, os.path.join(folder, "found.pt"))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process at its ordinary exit


def main():
    table = {}
    for row in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank, args=(2, folder, row), nprocs=2, join=False).join(timeout=900)
            table[row] = torch.load(os.path.join(folder, "found.pt"), weights_only=True)
        cells = [", ".join(value) or "-" for key, value in table[row].items() if key != "bytes"]
        print(f"{row:9} | " + " | ".join(cells) + f" | {table[row]['bytes']['total']:.2f}", flush=True)
    save(ROOT / "results" / "amp8_table.json", {"ranks": 2, "rows": table}, ["timm"])


if __name__ == "__main__":
    main()
