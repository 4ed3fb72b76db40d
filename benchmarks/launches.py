"""Counts the kernels that one optimizer step launches, and lists where the host waits for the device.

    python benchmarks/launches.py --output results/launches.json

It counts without a GPU, on the pretended one of tests/pretend.py: each operator that computes or copies is a launch.
For comparison it also counts a handwritten loop with the same model and a fused AdamW. The counted step logs nothing
and writes no checkpoint. The list of places includes DeepSpeed's and FSDP2's own waits. These are counts, not times.

Functions that are compiled on a GPU count as calls, and the operators in them, which a compiler fuses, separately. Of
each such call it also counts the kernels that Inductor's scheduler plans for an H100, for these small models and for
ones 32 times as wide, where a reduction is split. It plans without a GPU, with the sizes of the first call fixed; on a
GPU, with other sizes or another version, it may fuse differently.

For the cast of a bf16 activation to FP8 by amp8 it also counts the bytes read and written per element: operator
by operator, and fused as torch.compile does it, which reads a tensor once for each reduction and once for each result.
"""

import argparse
import importlib
import inspect
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import pretend  # noqa: E402, before torch
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from conftest import PretendedGpu  # noqa: E402
from provenance import save  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_unflatten  # noqa: E402

STEPS, BATCH, SEQUENCE_LENGTH = 6, 16, 32
WIDER = 32  # vit_nano has a width of 64
COUNTED = 4  # the step after the fourth: after the counting of the second, before the log of the last
LEVELS = ("fp8_msamp_o1", "fp8_msamp_o2", "fp8_msamp_o3")
PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "fp8_ao_rowwise", *LEVELS)
CASES = [("vit", f"single_{name}") for name in PRECISIONS]
CASES += [("vit", f"{kind}_{name}") for kind in ("ddp", "fsdp") for name in ("bf16", "fp8")]
CASES += [("vit", f"ddp_{name}") for name in LEVELS] + [("vit", "zero1_bf16"), ("vit", "zero3_bf16")]
CASES += [("gpt", f"single_{name}") for name in ("fp32", "bf16", "fp8_msamp_o2")]
CASES += [("bert", "single_bf16")]


def by_hand(recipe, precision):
    """Runs a training loop with PyTorch alone on the pretended GPU. Returns the counts of a step."""
    from shared import models, vision

    torch.manual_seed(0)
    ids = torch.randint(256, (BATCH, SEQUENCE_LENGTH))
    batch, y = (ids,), torch.randint(10, (BATCH,))
    if recipe == "vit":
        model, batch = vision.vit("vit_nano", 8, 1, 10), (torch.rand(BATCH, 1, 8, 8),)
    elif recipe == "gpt":
        model, y = models.gpt("llama_nano", 256, SEQUENCE_LENGTH), ids
    else:
        model, batch = models.bert("bert_nano", 256, SEQUENCE_LENGTH, 10), (ids, torch.ones_like(ids))
    model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05, fused=True)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    pretend.steps[:] = [pretend.nothing_yet()]
    for _ in range(STEPS):
        *inputs, labels = (part.pin_memory().cuda(non_blocking=True) for part in (*batch, y))
        inputs[1:] = (mask.bool()[:, None, None] for mask in inputs[1:])
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            out = model(*inputs)
        logits = (out if recipe == "vit" else out.logits.flatten(0, -2)).float()
        F.cross_entropy(logits, labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
    return pretend.steps[COUNTED]["launches"]


def recipes(cases):
    """{"recipe config": counts} of the recipes, each forked from a process that has the device."""
    gpu, found = PretendedGpu(), {}
    if gpu.missing:
        raise SystemExit(f"error: {gpu.missing}")
    with tempfile.TemporaryDirectory() as folder:
        for recipe, config in cases:
            out = Path(folder, f"{recipe}-{config}")
            words = ["--max_steps", STEPS, "--logging_steps", 100, "--save_steps", 0, "--eval_steps", 0]
            words += ["--per_device_train_batch_size", BATCH, "--per_device_eval_batch_size", 360]
            words += ["--sequence_length", SEQUENCE_LENGTH] if recipe != "vit" else []
            words += ["--dataset", ROOT / "launch.sh"] if recipe == "gpt" else []
            gpu.train(config, out, *words, name=recipe, processes=None if config.startswith("single") else 2)
            counted = json.loads(Path(f"{out}.rank0.json").read_text())[COUNTED]
            places = Counter(f"{place} ({operator})" for operator, place in counted.pop("waits"))
            found[f"{recipe} {config}"] = counted | {"waits": places.total(), "places": dict(sorted(places.items()))}
            calls = sum(counted["compiled_calls"].values())
            print(recipe, config, counted["launches"], "launches and", calls, "compiled calls", flush=True)
    gpu.server.stdin.close()
    gpu.server.wait()
    return found


def kernels(call, wider=1):
    """How many kernels Inductor makes of a compiled call on the GPU that is pretended: those that its scheduler plans.
    Nothing is compiled or run. wider: by how much each size of 64 or more is larger than in the call."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import NopKernelSchedulerNode
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    name, arguments = json.loads(call)
    module, _, name = name.rpartition(".")
    function = inspect.unwrap(getattr(importlib.import_module(module), name))  # not the compiled one

    def made(value):
        if isinstance(value, dict):
            dtype = getattr(torch, value["dtype"])
            sizes = ([n * wider if n >= 64 else n for n in value.get(key, ())] for key in ("size", "stride"))
            return torch.empty_strided(*sizes, dtype=dtype) if "size" in value else dtype
        return list(map(made, value)) if isinstance(value, list) else value

    card = pretend.properties()
    seen = {"get_device_properties": lambda *_: card, "is_available": lambda *_: True, "current_device": lambda *_: 0}
    with FakeTensorMode() as mode:
        with torch.device("cuda"):
            leaves, form = tree_flatten(made(arguments))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def of_tensors(*given):
            given = iter(given)
            every = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            return function(*tree_unflatten(every, form))

        with patch.object(torch.compiler, "_is_compiling_flag", True):
            functional = torch.func.functionalize(of_tensors, remove="mutations")
            graph = make_fx(functional, select_decomp_table())(*tensors)
        inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        seen_by_inductor = seen | {"is_triton_capable": lambda *_: True}
        there = patch.multiple(torch.cuda, **seen), patch.multiple(CudaInterface, **seen_by_inductor)
        with there[0], there[1], V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            post_grad_passes(graph, is_inference=True)
            lowering = GraphLowering(graph, example_inputs=inputs)
            with V.set_graph_handler(lowering):
                lowering.run(*inputs)
                lowering._update_scheduler()
    return sum(not isinstance(node, NopKernelSchedulerNode) for node in lowering.scheduler.nodes)


def bytes_of_a_cast():
    """Bytes read and written per element of a bf16 activation that amp8 casts to e4m3, on the GPU that is pretended."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from amp8 import linear, scaling

    cast = linear.cast.__wrapped__  # not the compiled one
    with FakeTensorMode(), torch.device("cuda"):
        x, scale, history = torch.empty(512, 1024, dtype=torch.bfloat16), torch.ones(()), torch.zeros(16)
        updates = torch.zeros((), dtype=torch.int32)
        graph = make_fx(lambda *tensors: cast(*tensors, scaling.E4M3, 16))(x, scale, updates, history).graph

    def size(node):  # of a tensor as large as x, else 0
        value = node.meta.get("val")
        return value.nbytes if isinstance(value, torch.Tensor) and value.numel() == x.numel() else 0

    def computes(node):
        return node.op == "call_function" and any(map(size, node.all_input_nodes)) and not node.target.is_view

    [results] = graph.output_node().args
    ends = [node for node in graph.nodes if computes(node) and (node in results or not size(node))]
    apart = sum(size(node) + sum(map(size, node.all_input_nodes)) for node in graph.nodes if computes(node))
    fused = sum(x.nbytes + size(node) for node in ends)
    return {"operator_by_operator": apart / x.numel(), "fused": fused / x.numel()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "launches.json")
    parser.add_argument("--only", nargs="+", metavar="WORD", default=[""], help="cases that have one of these words")
    args = parser.parse_args()
    found = recipes([case for case in CASES if any(word in " ".join(case) for word in args.only)])
    # Both trace before `wear`, whose own mode would hide operators from the tracing.
    calls = sorted({call for counts in found.values() for call in counts["compiled_calls"]})
    functions = {}
    for key, wider in (("compiled_kernels", 1), ("compiled_kernels_wider", WIDER)):
        of_a_call = {call: kernels(call, wider) for call in calls}
        for counts in found.values():
            counts[key] = sum(number * of_a_call[call] for call, number in counts["compiled_calls"].items())
        for call, number in of_a_call.items():
            functions.setdefault(json.loads(call)[0], []).append(number)
    for counts in found.values():
        counts["compiled_calls"] = sum(counts["compiled_calls"].values())
    of_a_function = {name: [min(numbers), max(numbers)] for name, numbers in functions.items()}
    print("kernels of a compiled call, fewest and most:", of_a_function)
    of_a_cast = bytes_of_a_cast()
    print("bytes of a cast, per element:", of_a_cast)
    pretend.wear()
    for name, counts in found.items():
        recipe, config = name.split()
        if config in ("single_fp32", "single_bf16"):
            counts["by_hand"] = by_hand(recipe, config.removeprefix("single_"))
            counts["ratio"] = round(counts["launches"] / counts["by_hand"], 4)
            print(name, "by hand", counts["by_hand"], "ratio", counts["ratio"])
    about = {"device": "a pretended H100: counted, not run", "cases": found}
    about |= {"wider": WIDER, "kernels_of_a_call": of_a_function, "bytes_of_a_cast": of_a_cast}
    save(args.output, about, ["accelerate", "timm", "torchao", "transformers"])


if __name__ == "__main__":
    main()
