"""Measures speed, memory and correctness of the recipes on a GPU, one case after another, each in a separate process.

    python benchmarks/gpu.py                                 everything, into results/gpu.json
    python benchmarks/gpu.py --only vit_huge-128 --minutes 9 cases whose name has one of these words, for 9 minutes
    python benchmarks/gpu.py --rehearse --output gpu.json    nano models, few steps: for trying this script on a CPU,
                                                             where level-* compares a CPU with itself: no evidence

rates         the device's own: bf16 and FP8 products of 8192 x 8192, a copy of 4 GiB
optimizer-*   one optimizer step over a Llama of 380M parameters, beside the copy rate: a step must read and write its
              weights, masters and moments and read its gradients
MODEL-BATCH-CONFIG  the recipe under the config, launched as a user would: median step, peak memory, loss
products      this GPU's FP8 products compared with exact products of the same codes
level-*       a Linear under amp8, 20 steps on GPU and CPU: are all scales equal, how far apart are the outputs
digits-CONFIG 200 steps on digits on this GPU and on the CPU: the final loss of each

A recipe waits for the device once per step (for the losses), so the median step time includes the device's work. FLOP
are three times those of the products in a forward pass; activation checkpointing does not add to them. A case that
fails or exceeds its time limit is a row with its error. Results are written after each case, and other cases in the
file are kept. Needs torch, accelerate, timm and transformers; without torchao and TransformerEngine their cases are
refused.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from provenance import ROOT, command, device_name, versions
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(ROOT))
from faithful.checkpoint.checkpoints import write_json  # noqa: E402
from shared import models, vision  # noqa: E402
from tools.report import table  # noqa: E402
from tools.tracing import make_fake, without_storage  # noqa: E402

CONFIGS = ("bf16_compile", "fp8_compile", "bf16", "fp8_ao_rowwise_compile", "fp8_te", "fp8_te_current", "fp8_te_block",
           "fp8_msamp_o1", "fp8_msamp_o2", "fp8_msamp_o3")  # fmt: skip
BATCHES = {"vit_huge": (128, 256, 64), "llama_medium": (16,), "llama_1b": (8,)}
LEVELS = ("bf16", "O1", "O2", "O3")
STEPS, SEQUENCE_LENGTH, IMAGE_SIZE, VOCABULARY = 50, 1024, 224, 16384
FOUND = ("date", "card", "device", "versions", "wall_seconds")  # beside the figures of a case
NVIDIA = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,memory.used"


def cases(rehearse):
    """{name: (function, its arguments)}, the most important first."""
    batches = {"vit_nano": (8,), "llama_nano": (4,)} if rehearse else BATCHES
    steps = 8 if rehearse else STEPS
    calls = {"rates": (rates, rehearse)}
    calls |= {f"optimizer-{level}": (optimizer_step, level, rehearse) for level in LEVELS}
    for turn in range(3):  # first every model at one batch
        for model, sizes in batches.items():
            for batch in sizes[turn : turn + 1]:
                for config in CONFIGS:
                    calls[f"{model}-{batch}-{config}"] = (train, model, batch, config, steps)
    calls |= {"products": (products,)} | {f"level-{level}": (level_on_both, level) for level in LEVELS[1:]}
    calls |= {f"digits-{config}": (digits, config, 20 if rehearse else 200) for config in CONFIGS}
    return calls


# -------------------------------------------------------------------------------------------------------------- a case


def rates(rehearse):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    n, copied = (256, 2**22) if rehearse else (8192, 2**32)
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    a8, b8, unit_scale = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t(), torch.ones((), device=device)
    source = torch.empty(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = functools.partial(torch._scaled_mm, scale_a=unit_scale, scale_b=unit_scale, out_dtype=torch.bfloat16)
    figures = {
        "bf16_flop_per_second": 2 * n**3 / seconds(lambda: a @ b),
        "fp8_flop_per_second": 2 * n**3 / seconds(lambda: product(a8, b8, use_fast_accum=True)),
        "copy_bytes_per_second": 2 * copied / seconds(lambda: target.copy_(source)),  # read and written
    }
    return figures


def seconds(function):
    """The median time of a call, with the device synchronised."""
    return Timer("function()", globals={"function": function}).blocked_autorange(min_run_time=1).median


def optimizer_step(level, rehearse):
    import amp8
    from amp8.gradients import Phase

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = models.gpt("llama_nano" if rehearse else "llama_medium", VOCABULARY, SEQUENCE_LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device == "cuda")
    if level != "bf16":
        model, optimizer = amp8.initialize(model, optimizer, level)
    model.to(device)
    ids = torch.arange(32, device=device).view(1, 32)
    with torch.autocast(device, torch.bfloat16):
        logits = model(ids).logits
    logits.float().square().mean().backward()
    optimizer.step()
    per_parameter = {"weight": 4.0, "gradient": 4.0, "master": 0.0, "optimizer": 8.0, "total": 16.0}
    if level != "bf16":
        per_parameter = amp8.report(model, optimizer)["bytes_per_parameter"]["all"]
    count = sum(parameter.numel() for parameter in model.parameters())
    moved = count * (2 * per_parameter["total"] - per_parameter["gradient"])
    gradients = model.amp8_state.gradients if level != "bf16" else []

    def step():
        for gradient in gradients:
            gradient.phase = Phase.READY  # else the steps after the first would leave the converted weights alone
        optimizer.step()

    took = seconds(step)
    return {"parameters": count, "seconds": took, "bytes": moved, "bytes_per_second": moved / took}


def train(model, batch, config, steps):
    image = model.startswith("vit")
    words = ["vit", "--dataset", "synthetic", "--image_size", str(IMAGE_SIZE), "--dataloader_num_workers", "2"]
    if not image:
        words = ["gpt", "--sequence_length", str(SEQUENCE_LENGTH), "--vocab_size", str(VOCABULARY)]
    words += ["--model", model, "--per_device_train_batch_size", str(batch), "--per_device_eval_batch_size", str(batch)]
    record = launched(
        f"single_{config}", [*words, "--max_steps", str(steps), "--logging_steps", str(steps), "--eval_steps", "0"]
    )
    took, data = record["throughput"]["step_seconds_median"], record["data"]
    flop = 3 * batch * forward_flop(model, data)
    return {
        "command": record["command"],
        "truth": record["evidence"]["truth"],
        **record["throughput"],
        "flop_per_step": flop,
        "flop_per_second": flop / took,
        "peak_memory_bytes": record["peak_memory_bytes"],
        "bytes_per_parameter": record["evidence"]["bytes_per_parameter"]["total"],
        "loss": record["final"]["loss"],
        "gpu_utilization_mean": record["gpu_utilization_mean"],
        "versions": record["versions"],
    }


def forward_flop(model, data):
    """FLOP of the matrix products for one sample in a forward pass, counted without computing them."""
    with without_storage():
        if model.startswith("vit"):
            net = vision.vit(model, data["image_size"], data["in_chans"], data["num_classes"])
            sample = torch.zeros(1, data["in_chans"], data["image_size"], data["image_size"])
        else:
            net = models.gpt(model, data["vocab_size"], data["sequence_length"])
            sample = torch.zeros(1, data["sequence_length"], dtype=torch.int64)
    make_fake(net, torch.optim.SGD(net.parameters()))
    with FlopCounterMode(display=False) as counter:
        net(sample)
    return counter.get_total_flops()


def products():
    """{formats and kind of scaling: largest difference divided by the largest exact value} of FP8 products."""
    from amp8 import scaling

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator, differences = torch.Generator().manual_seed(0), {}
    for one, other in ((scaling.E4M3, scaling.E4M3), (scaling.E5M2, scaling.E4M3)):
        for dims, how in (((None, None), "one scale"), ((1, 0), "a scale per row")):
            codes, scales = [], []
            for shape, dtype, dim in (((256, 1280), one, dims[0]), ((1280, 512), other, dims[1])):
                values = torch.randn(shape, generator=generator)
                scales.append(scaling.power_of_two_scale(scaling.amax(values, dim), dtype))
                codes.append(scaling.quantize(values, scales[-1], dtype))
            exact = scaling.product(*codes, *scales, torch.float32, exact=True)
            there = (tensor.to(device) for tensor in (*codes, *scales))
            apart = scaling.product(*there, torch.bfloat16).cpu().float() - exact
            case = f"{one} x {other}, {how}".replace("torch.", "")
            differences[case] = (apart.abs().max() / exact.abs().max()).item()
    return {"relative_difference": differences, "rounding_of_bfloat16": torch.finfo(torch.bfloat16).eps / 2}


def level_on_both(level):
    import amp8

    sides = []
    for device in ("cpu", "cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        layer, generator, trace = torch.nn.Linear(512, 256), torch.Generator().manual_seed(1), []
        layer, optimizer = amp8.initialize(layer, torch.optim.AdamW(layer.parameters(), 1e-3), level)
        layer.to(device)
        for _ in range(20):
            x, grad = torch.randn(64, 512, generator=generator), torch.randn(64, 256, generator=generator)
            with torch.autocast(device, torch.bfloat16):
                y = layer(x.to(device))
            (y.float() * grad.to(device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            trace.append((torch.stack([layer.weight_scale, *layer.scale]).cpu(), y.detach().float().cpu()))
        sides.append(trace)
    pairs = [(*on_cpu, *on_gpu) for on_cpu, on_gpu in zip(*sides, strict=True)]
    equal = [torch.equal(scales, scales_there) for scales, _, scales_there, _ in pairs]
    apart = [((y - y_there).abs().max() / y.abs().max()).item() for _, y, _, y_there in pairs]
    return {"steps": len(equal), "steps_with_equal_scales": sum(equal), "relative_difference": apart}


def digits(config, steps):
    """The final losses by device; only the CPU's on a machine without a GPU."""
    words = ["vit", "--dataset", "digits", "--max_steps", str(steps), "--eval_steps", "0"]
    metrics = {}
    for hidden in (False, True) if torch.cuda.is_available() else (True,):
        record = launched(f"single_{config}", words, {"CUDA_VISIBLE_DEVICES": ""} if hidden else {})
        metrics["cpu" if hidden else "gpu"] = record["final"]["metrics"] | {"truth": record["evidence"]["truth"]}
    return metrics | {"command": record["command"]}


def launched(config, words, env=None, limit=None):
    """Launches a run and returns its record. Raises SystemExit with the reason: it fails, or takes over `limit` s."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        line = ["./launch.sh", config, *words, "--save_steps", "0", "--output_dir", str(out)]
        env = os.environ | (env or {})
        try:
            done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:  # its processes end with their launcher
            raise SystemExit(f"not done after {limit} s") from None
        if done.returncode:
            lines = (done.stderr + done.stdout).splitlines()
            said = [line for line in lines if line.startswith(("refused", "error"))]
            raised = [line for line in lines if re.match(r"\w[\w.]*Error: ", line) and "CalledProcessError" not in line]
            why = "; ".join(said) or (raised or lines or ["it said nothing"])[-1].strip()
            refused = done.returncode == 2 and not why.startswith("refused")
            raise SystemExit(f"refused: {why.removeprefix('error: ')}" if refused else why)
        return vision.own_run(out) | {"command": " ".join(line[:-2])}


# --------------------------------------------------------------------------------------------------------- one by one


def as_found():
    """The card's state before a case, from nvidia-smi, or None."""
    try:
        line = ["nvidia-smi", f"--query-gpu={NVIDIA}", "--format=csv,noheader"]
        said = subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return None
    return dict(zip(NVIDIA.split(","), (part.strip() for part in said.split(",")), strict=True))


def measured(name, rehearse, limit, file=__file__):
    """Runs a case of a script and returns its row. Kills the case's whole process group at the end."""
    row = {"date": datetime.datetime.now().isoformat(timespec="seconds"), "card": as_found()}
    row |= {"device": row["card"]["name"] if row["card"] else device_name()}
    row |= {"versions": versions(["accelerate", "timm", "transformers"])}
    line = [sys.executable, file, "--one", name, *(["--rehearse"] if rehearse else [])]
    child = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    began = time.monotonic()
    try:
        said, complaint = child.communicate(timeout=limit)
        last = complaint.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        row |= json.loads(said.splitlines()[-1]) if child.returncode == 0 else {"error": last[0]}
    except subprocess.TimeoutExpired:
        row["error"] = f"not done after {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    return row | {"wall_seconds": round(time.monotonic() - began, 1)}


def show(figures):
    """Prints Markdown tables of everything in the file."""
    sound = {name: row for name, row in figures.items() if "error" not in row}
    rate = sound.get("rates", {})
    if rate:
        print(
            f"bf16 {rate['bf16_flop_per_second'] / 1e12:.4g} TFLOP/s, FP8 {rate['fp8_flop_per_second'] / 1e12:.4g} "
            f"TFLOP/s, copy {rate['copy_bytes_per_second'] / 1e12:.3g} TB/s\n"
        )
    steps, optimizers, ends = [], [], []
    for name, row in figures.items():
        if "error" in row:
            steps.append([name, f"no result: {row['error']}", *[""] * 6])
        elif "flop_per_second" in row:
            model, batch, _ = name.split("-")
            base = sound.get(f"{model}-{batch}-bf16_compile")
            share = row["flop_per_second"] / rate["bf16_flop_per_second"] if rate else None
            steps.append(
                [
                    name,
                    f"{1000 * row['step_seconds_median']:.1f}",
                    f"{row['samples_per_second_median']:.1f}",
                    f"{base['step_seconds_median'] / row['step_seconds_median']:.2f}x" if base else "",
                    f"{row['flop_per_second'] / 1e12:.3g}",
                    f"{share:.0%}" if share else "",
                    f"{row['peak_memory_bytes'] / 2**30:.2f}",
                    f"{row['loss']:.4f}",
                ]
            )
        elif name.startswith("optimizer"):
            share = f"{row['bytes_per_second'] / rate['copy_bytes_per_second']:.0%}" if rate else ""
            speed = f"{row['bytes_per_second'] / 1e12:.3g}"
            optimizers.append([name, f"{1000 * row['seconds']:.2f}", f"{row['bytes'] / 1e9:.2f}", speed, share])
        elif name == "products" or name.startswith("level"):
            print(f"{name}: {json.dumps({key: row[key] for key in row if key not in FOUND})}\n")
        elif name.startswith("digits"):
            cells = [f"{row[device]['eval_loss']:.4f}" if device in row else "not run" for device in ("gpu", "cpu")]
            ends.append([name, *cells])
    heads = [
        "case",
        "step, ms",
        "samples/s",
        "against bf16_compile",
        "TFLOP/s",
        "of the bf16 product's rate",
        "peak, GiB",
        "loss",
    ]
    for head, rows in (
        (heads, steps),
        (["case", "step, ms", "GB moved", "TB/s", "of the copy rate"], optimizers),
        (["case", "held-out loss on the GPU", "on the CPU"], ends),
    ):
        if rows:
            print(table(head, rows), end="\n\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", default=[""], help="cases whose name has one of these")
    parser.add_argument("--minutes", type=float, default=600, help="no case begins or goes on after these")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one case")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "gpu.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    known = cases(args.rehearse)
    if args.one:
        function, *rest = known[args.one]
        return print(json.dumps(function(*rest)))
    if not torch.cuda.is_available() and not args.rehearse:
        raise SystemExit("error: there is no GPU here: --rehearse tries the cases on a CPU, with nano models")
    chosen = [name for name in known if any(word in name for word in args.only)]
    if not chosen:
        raise SystemExit(f"error: --only {' '.join(args.only)}: no such case, there are {', '.join(known)}")
    figures = json.loads(args.output.read_text())["cases"] if args.output.exists() else {}
    until = time.monotonic() + 60 * args.minutes
    for at, name in enumerate(chosen, 1):
        left = until - time.monotonic()
        if left < 10:
            print(f"{len(chosen) - at + 1} cases not begun: --minutes {args.minutes:g} are over")
            break
        print(f"[{at}/{len(chosen)}] {name}", flush=True)
        row = measured(name, args.rehearse, min(args.limit, left))
        if "error" in row and "error" not in figures.get(name, row):
            print(f"  {row['error']}; its earlier result stays", flush=True)
        else:
            figures[name] = row
            print(f"  {row.get('error', 'done')}", flush=True)
        write_json(args.output, {"command": command(), "rehearsal": args.rehearse, "cases": figures})
    show(figures)


if __name__ == "__main__":
    main()
