"""What a step costs on a GPU in bf16, with torchao's FP8 and with MS-AMP's levels, each compiled and not.

    python benchmarks/fp8_speed.py --output results/fp8_speed.json [--only llama-bf16 llama-O2 ...]

Three models, 8,192 tokens or 64 images in a step, under autocast to bf16, gradients clipped, AdamW:

  llama   4 of the 32 blocks of Llama-3-8B (4096 wide, 14336 inside), a vocabulary of 32,000, sequences of 2,048
  vit     16 of the 32 blocks of ViT-Huge (1280 wide, 5120 inside)
  bert    8 of the 24 blocks of BERT-large (1024 wide, 4096 inside), sequences of 512

A case is MODEL-WAY or MODEL-WAY-compile, WAY one of bf16, ao (torchao, tensorwise), O1, O2, O3. The head stays in bf16.
Figures of a case: `ms`, the median of 8 steps after 3, by CUDA events; `host_ms`, in which the host launches a step;
`optimizer_ms`, clipping and update alone, with the device synchronised; `kernels` and `kernel_ms` of a step by torch's
profiler; `first_s`, the first step, which compiles; `graphs` and `breaks` of torch.compile; `peak_GiB`; `loss` of the
first three steps, on the same batch.
"""

import contextlib
import statistics
import time
from pathlib import Path

import torch
import torch._dynamo.utils
import torch.nn.functional as F
from harness import arguments, save
from torch import nn

import amp8
from tools import cli

WAYS = ("bf16", "ao", "O1", "O2", "O3")


def llama(small):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = (64, 128, 2, 4, 2, 512) if small else (4096, 14336, 4, 32, 8, 32000)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = LlamaConfig(**dict(zip((*names, "vocab_size"), sizes, strict=True)), use_cache=False)
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, config.vocab_size, (2, 32) if small else (4, 2048))

    def loss(model):
        logits = model.lm_head(model.model(ids).last_hidden_state)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())

    return model, model.model.layers, loss


def vit(small):
    import timm

    model = timm.create_model("vit_tiny_patch16_224" if small else "vit_huge_patch14_224", depth=2 if small else 16)
    images = torch.randn(2 if small else 64, 3, 224, 224)
    labels = torch.randint(0, 1000, (len(images),))
    return model, model.blocks, lambda model: F.cross_entropy(model(images).float(), labels)


def bert(small):
    from transformers import BertConfig, BertForMaskedLM

    sizes = (64, 128, 2, 4, 500) if small else (1024, 4096, 8, 16, 30522)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    model = BertForMaskedLM(BertConfig(**dict(zip(names, sizes, strict=True))))
    ids = torch.randint(0, sizes[-1], (2, 32) if small else (16, 512))

    def loss(model):
        return F.cross_entropy(model(ids).logits.flatten(0, 1).float(), ids.flatten())

    return model, model.bert.encoder.layer, loss


MODELS = {"llama": llama, "vit": vit, "bert": bert}


def case(name, device):
    """The figures of a case."""
    model, way, *rest = name.split("-")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    with torch.device(device):
        model, blocks, loss_of = MODELS[model](device == "cpu")
    if way == "ao":
        from torchao.float8 import convert_to_float8_training

        def fits(module, name):
            return isinstance(module, nn.Linear) and not name.startswith(("lm_head", "head", "cls"))

        convert_to_float8_training(model, module_filter_fn=fits)
    optimizer, clip = torch.optim.AdamW(model.parameters(), 1e-4, fused=device == "cuda"), nn.utils.clip_grad_norm_
    if way.startswith("O"):
        head = [name for name, _ in model.named_modules() if name in ("lm_head", "head", "cls")]
        model, optimizer = amp8.initialize(model, optimizer, way, skip=head)
        clip = amp8.clip_grad_norm_
    for block in blocks if rest else ():
        block.compile()
    losses = []

    def backward():
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
        losses.append(loss.detach())

    def update():
        clip(model.parameters(), 1.0)
        optimizer.step()

    def step():
        backward()
        update()
        optimizer.zero_grad()

    first = seconds_of(step, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    took = milliseconds(step, device, 8, 3)
    wait(device)
    began = time.perf_counter()
    step()
    host = time.perf_counter() - began
    figures = {"ms": took, "host_ms": 1000 * host, "first_s": first, **profiled(step, device)}
    updates = []
    for _ in range(3):
        backward()
        updates.append(1000 * seconds_of(update, device))
        optimizer.zero_grad()
    counters = torch._dynamo.utils.counters
    figures |= {"optimizer_ms": statistics.median(updates), "loss": [loss.item() for loss in losses[:3]]}
    figures |= {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}
    return figures | {"peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None}


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(function, device):
    wait(device)
    began = time.perf_counter()
    function()
    wait(device)
    return time.perf_counter() - began


def milliseconds(function, device, times, warmup):
    """The median of some calls, on a GPU by its events."""
    for _ in range(warmup):
        function()
    if device == "cpu":
        return 1000 * statistics.median(seconds_of(function, device) for _ in range(times))
    found = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def profiled(function, device):
    """How many kernels a call launches, and the sum of their times."""
    if device == "cpu":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    ran = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {"kernels": len(ran), "kernel_ms": sum(event.device_time_total for event in ran) / 1000}


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases")
    args = parser.parse_args()
    names = [f"{model}-{way}{tail}" for model in MODELS for way in WAYS for tail in ("", "-compile")]
    unknown = set(args.only or ()) - set(names)
    if unknown:
        parser.error(f"--only {' '.join(sorted(unknown))}: the cases are {', '.join(names)}")
    device, found = "cuda" if torch.cuda.is_available() else "cpu", {}
    for name in args.only or names:
        try:
            found[name] = case(name, device)
        except Exception as problem:  # of whatever kind: the other cases still run
            found[name] = {"error": f"{type(problem).__name__}: {problem}"[:500]}
        with contextlib.suppress(AttributeError):
            torch.cuda.empty_cache()
        print(name, found[name], flush=True)
    if args.output:
        save(args.output, {"cases": found}, ["transformers", "timm", "torchao"])


if __name__ == "__main__":
    cli.run(lambda _: main())
