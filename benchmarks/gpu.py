"""What a GPU does with the recipes: whether they run there, how fast, in how much memory, and how right. In three ways.

    ./launch.sh gpu-first              the first ten minutes, what tells most first, into gpu-first.md
    ./launch.sh gpu-report             every config for 20 steps, into gpu-report.md
    python benchmarks/gpu.py           speed, memory and agreement with the CPU, into results/gpu.json

Each takes --only WORD ..., what has one of these words in its name, and --rehearse, nano models and few steps, to
try it on a CPU. The two pages are to be sent to someone. The file is written after each part.

first: each item is a process of its own, which is killed at its limit: the seconds that are its own, or up to 90 where
the items before it left some. All of these seconds fit into ten minutes, so that the last item begins, too.
  machine   driver, torch's CUDA and NCCL, the C compiler: what a run would be refused for
  step-*    30 steps of recipes/vit.py with a config: the step's time, the summary line, how often torch compiled again
  resume    is a resumed run equal bit for bit, and is it with --deterministic
  estimate  what `./launch.sh estimate --time` says of these steps, beside each
  kernels   five steps of recipes/gpt.py under torch's profiler: the kernels that take most of the time
  memory    two or more GPUs: what prepare() leaves and needed under FSDP2, for each parameter
  failure-* two or more GPUs: one process runs out of memory, or is killed: exit code, seconds, what run.json says
  races-*   two or more GPUs: three steps of MS-AMP's levels under torch's sanitizer of CUDA streams

report: each config trains recipes/vit.py (tensor parallel: recipes/gpt.py) as a user would launch it, on all GPUs of
the machine. The page says whether it ran, was refused or failed, with the reason. The share of FLOP is relative to the
measured rate of an 8192 x 8192 product in bf16 on one GPU, also for FP8 configs.

cases: each is a process of its own. One that fails or exceeds --limit is a row with its error; other cases in the file
are kept. `--only vit_huge-128 --minutes 9` measures some of them for nine minutes.
  rates         the device's own: bf16 and FP8 products of 8192 x 8192, a copy of 4 GiB
  optimizer-*   one optimizer step over a Llama of 380M parameters, beside the copy rate: a step must read and write its
                weights, masters and moments and read its gradients
  MODEL-BATCH-CONFIG  the recipe under the config, launched as a user would: median step, peak memory, loss
  products      this GPU's FP8 products compared with exact products of the same codes
  level-*       a Linear under amp8, 20 steps on GPU and CPU: are all scales equal, how far apart are the outputs (with
                --rehearse a CPU is compared with itself: no evidence)
  digits-CONFIG 200 steps on digits on this GPU and on the CPU: the final loss of each

A recipe waits in each step for the losses of that step or of the one before, so the median step time is the device's.
FLOP are three times those of the products in a forward pass; activation checkpointing does not add to them.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import ROOT, command, device_name, versions
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from faithful.checkpoint.checkpoints import write_json
from faithful.training.steps import WARMUP_STEPS
from shared import models, vision
from shared.args import Refused
from tools import cli, find, step_time
from tools.report import table
from tools.tracing import make_fake, without_storage

CONFIGS = ("bf16_compile", "fp8_compile", "bf16", "fp8_ao_rowwise_compile", "fp8_te", "fp8_te_current", "fp8_te_block",
           "fp8_msamp_o1", "fp8_msamp_o2", "fp8_msamp_o3")  # fmt: skip
BATCHES = {"vit_huge": (128, 256, 64), "llama_medium": (16,), "llama_1b": (8,)}
LEVELS = ("bf16", "O1", "O2", "O3")
STEPS, SEQUENCE_LENGTH, IMAGE_SIZE, VOCABULARY = 50, 1024, 224, 16384
FOUND = ("date", "card", "device", "versions", "wall_seconds")  # beside the figures of a case
LAUNCH = (sys.executable, ROOT / "tools" / "commands.py")
NVIDIA = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,memory.used"


# -------------------------------------------------------------------------------------------- launches and processes


def launched(config, words, env=None, limit=None):
    """Launches a run and returns its record. Raises SystemExit with the reason: it fails, or takes over `limit` s."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        line = [find.COMMAND, config, *words, "--save_steps", "0", "--output_dir", str(out)]
        env = os.environ | (env or {})
        try:
            done = subprocess.run([*LAUNCH, *line[1:]], env=env, capture_output=True, text=True, timeout=limit)
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


def as_found():
    """The card's state before a case, from nvidia-smi, or None."""
    try:
        line = ["nvidia-smi", f"--query-gpu={NVIDIA}", "--format=csv,noheader"]
        said = subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return None
    return dict(zip(NVIDIA.split(","), (part.strip() for part in said.split(",")), strict=True))


def measured(name, rehearse, limit, what="cases"):
    """Runs a case or an item and returns its row. Kills the case's whole process group at the end."""
    row = {"date": datetime.datetime.now().isoformat(timespec="seconds"), "card": as_found()}
    row |= {"device": row["card"]["name"] if row["card"] else device_name()}
    row |= {"versions": versions(["accelerate", "timm", "transformers"])}
    line = [sys.executable, __file__, what, "--one", name, *(["--rehearse"] if rehearse else [])]
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


# ------------------------------------------------------------------------------------------------------------- cases


def cases(rehearse):
    """{name: (None, function, its arguments)}, the most important first."""
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
    return {name: (None, *call) for name, call in calls.items()}


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
        "measured": record["evidence"]["measured"],
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
        metrics["cpu" if hidden else "gpu"] = record["final"]["metrics"] | {"measured": record["evidence"]["measured"]}
    return metrics | {"command": record["command"]}


def show(figures):
    """Prints Markdown tables of everything in the file."""
    sound = {name: row for name, row in figures.items() if "error" not in row}
    rate = sound.get("rates", {})
    if rate:
        bf16, fp8, copied = (rate[f"{name}_per_second"] / 1e12 for name in ("bf16_flop", "fp8_flop", "copy_bytes"))
        print(f"bf16 {bf16:.4g} TFLOP/s, FP8 {fp8:.4g} TFLOP/s, copy {copied:.3g} TB/s\n")
    steps, optimizers, ends = [], [], []
    for name, row in figures.items():
        if "error" in row:
            steps.append([name, f"no result: {row['error']}", *[""] * 6])
        elif "flop_per_second" in row:
            steps.append([name, *step_cells(name, row, sound, rate)])
        elif name.startswith("optimizer"):
            share = f"{row['bytes_per_second'] / rate['copy_bytes_per_second']:.0%}" if rate else ""
            speed = f"{row['bytes_per_second'] / 1e12:.3g}"
            optimizers.append([name, f"{1000 * row['seconds']:.2f}", f"{row['bytes'] / 1e9:.2f}", speed, share])
        elif name == "products" or name.startswith("level"):
            print(f"{name}: {json.dumps({key: row[key] for key in row if key not in FOUND})}\n")
        elif name.startswith("digits"):
            cells = [f"{row[device]['eval_loss']:.4f}" if device in row else "not run" for device in ("gpu", "cpu")]
            ends.append([name, *cells])
    heads = "case; step, ms; samples/s; against bf16_compile; TFLOP/s; of the bf16 product's rate; peak, GiB; loss"
    for head, rows in (
        (heads.split("; "), steps),
        (["case", "step, ms", "GB moved", "TB/s", "of the copy rate"], optimizers),
        (["case", "held-out loss on the GPU", "on the CPU"], ends),
    ):
        if rows:
            print(table(head, rows), end="\n\n")


def step_cells(name, row, sound, rate):
    base = sound.get(f"{name.rpartition('-')[0]}-bf16_compile")
    return [
        f"{1000 * row['step_seconds_median']:.1f}",
        f"{row['samples_per_second_median']:.1f}",
        f"{base['step_seconds_median'] / row['step_seconds_median']:.2f}x" if base else "",
        f"{row['flop_per_second'] / 1e12:.3g}",
        f"{row['flop_per_second'] / rate['bf16_flop_per_second']:.0%}" if rate else "",
        f"{row['peak_memory_bytes'] / 2**30:.2f}",
        f"{row['loss']:.4f}",
    ]


# ------------------------------------------------------------------------------------------------- the first minutes


MOST = 90  # seconds of an item
STEP = {"single_bf16": 40, "single_bf16_compile": 60, "single_fp8_compile": 70, "single_fp8_msamp_o2": 70}
RACES = ("ddp_fp8_msamp_o2", "ddp_fp8_msamp_o3", "fsdp_fp8_msamp_o2")
TWO = ["--num_processes", "2"]


def items(rehearse):
    """{name: (seconds of its own, function, its arguments)} in their order."""
    one = {"machine": (15, machine)}
    one |= {f"step-{config}": (seconds, step, config, rehearse) for config, seconds in STEP.items()}
    one |= {"resume": (60, resume), "kernels": (40, kernels, rehearse), "estimate": (20, estimate, rehearse)}
    several = {"memory": (45, memory, rehearse)}
    several |= {f"failure-{how}": (45, failure, how) for how in ("memory", "kill")}
    several |= {f"races-{config}": (30, races, config) for config in RACES}
    return one | (several if torch.cuda.device_count() > 1 or rehearse else {})


def machine():
    found = {"torch": torch.__version__, "CUDA of torch": torch.version.cuda, "GPUs": torch.cuda.device_count()}
    found["nvidia-smi"] = said(["nvidia-smi", "--query-gpu=name,driver_version,compute_mode", "--format=csv,noheader"])
    try:
        torch.cuda.init()
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    except (AssertionError, AttributeError, RuntimeError) as error:
        found["torch.cuda.init"] = str(error)
    found["compiler"] = said([os.environ.get("CC") or "gcc", "--version"])
    return found


def said(line):
    """What a command prints, its first eight lines, or why it does not."""
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=20)
        return "; ".join((done.stdout or done.stderr).splitlines()[:8])
    except (OSError, subprocess.SubprocessError) as problem:
        return f"{type(problem).__name__}: {problem}"


def images(rehearse):
    size = ["vit_nano", "--image_size", "32"] if rehearse else ["vit_base", "--image_size", "224"]
    return ["vit", "--dataset", "synthetic", "--model", *size, "--dataloader_num_workers", "0" if rehearse else "4",
            "--eval_steps", "0", "--per_device_eval_batch_size", "64"]  # fmt: skip


def step(config, rehearse):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = [*images(rehearse), "--max_steps", "8" if rehearse else "30", "--output_dir", str(run)]
        done = launch([config, *words, "--save_steps", "0"], {"TORCH_LOGS": "recompiles"})
        record = of(run)
    figures = {key: record["throughput"][key] for key in ("step_seconds_median", "step_seconds_p90")}
    again = len(re.findall("Recompiling function", done["text"]))
    return figures | {"seconds": done["seconds"], "recompilations": again, "measured": record["evidence"]["measured"],
                      "peak_memory_bytes": record["peak_memory_bytes"], "loss": record["final"]["loss"]}  # fmt: skip


def estimate(rehearse):
    """{config: estimated seconds of the step that step-config measures, or why there are none}."""
    here = step_time.CARDS[0].name if rehearse else device_name()
    card = next((card for card in step_time.CARDS if card.name in here), None)
    if card is None:
        return {"none": f"no data sheet of {here}: there are {', '.join(card.name for card in step_time.CARDS)}"}
    line = [
        sys.executable,
        ROOT / "tools" / "estimate.py",
        "--time",
        card.name,
        "--json",
        *STEP,
        "--",
        *images(rehearse),
    ]
    done = subprocess.run(line, capture_output=True, text=True)  # it forks, which a process with a GPU must not
    if done.returncode:
        return {"none": done.stderr[-300:]}
    found = json.loads(done.stdout)
    return {config: parts["total"] for config, parts in found["configs"].items()} | found["refused"]


def resume():
    found = {}
    for word in ("--no-deterministic", "--deterministic"):
        with tempfile.TemporaryDirectory() as folder:
            whole, part = Path(folder, "whole"), Path(folder, "part")
            words = ["single_bf16", "vit", "--max_steps", "6", "--logging_steps", "1", "--eval_steps", "0", word]
            launch([*words, "--save_steps", "3", "--output_dir", str(whole)])
            launch([*words, "--resume_from_checkpoint", str(whole / "checkpoint-3"), "--output_dir", str(part)])
            rows = [(run / "metrics.jsonl").read_text().splitlines()[-4:] for run in (whole, part)]
        found[word] = "equal bit for bit" if rows[0] == rows[1] else f"{rows[0][-2]} against {rows[1][-2]}"
    return found


def kernels(rehearse):
    """{kernel: its share of the device's time} of the ten that take most."""
    from torch.profiler import ProfilerActivity, profile

    model = ["llama_nano", "--sequence_length", "128"] if rehearse else ["llama_medium", "--sequence_length", "1024"]
    on_gpu = torch.cuda.is_available()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    sys.path.insert(0, str(ROOT / "recipes"))
    import gpt

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["gpt.py", "--dataset", str(ROOT / "LICENSE"), "--model", *model, "--max_steps", "5",
                    "--eval_steps", "0", "--save_steps", "0", "--per_device_train_batch_size", "4",
                    "--output_dir", folder]  # fmt: skip
        gpt.text.SAMPLE = 1
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
            gpt.main(gpt.options.parse(gpt.Arguments))
    taken = {one.key: one.self_device_time_total if on_gpu else one.self_cpu_time_total for one in seen.key_averages()}
    total = sum(taken.values()) or 1
    most = sorted(taken, key=taken.get, reverse=True)[:10]
    return {"of": " ".join(model), **{name[:80]: f"{taken[name] / total:.1%}" for name in most}}


MEMORY = """
import json, sys, torch
sys.path.insert(0, {root!r})
from faithful import Accelerator
from shared import models
accelerator = Accelerator(project_dir=sys.argv[1])
model = models.gpt({model!r}, 16384, 1024)
count, cuda = sum(p.numel() for p in model.parameters()), accelerator.device.type == "cuda"
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=cuda))
left, most = (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) if cuda else (0, 0)
found = {{"parameters": count, "processes": accelerator.num_processes, "bytes left for each": left / count,
          "bytes at most for each": most / count}}
accelerator.print("found", json.dumps(found), flush=True)
"""


def memory(rehearse):
    """Bytes on the first GPU for each parameter, after prepare(): 4 / N are the shards, 4 more would be the model."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "mine.py")
        script.write_text(MEMORY.format(root=str(ROOT), model="llama_nano" if rehearse else "llama_1b"))
        text = launch(["fsdp_bf16", str(script), folder])["text"]
    return json.loads(re.search("^found (.*)$", text, re.MULTILINE)[1])


def races(config):
    watched = {"TORCH_CUDA_SANITIZER": "1"} if torch.cuda.is_available() else {}
    record = launched(config, [*TWO, "vit", "--max_steps", "3", "--eval_steps", "0"], watched)
    return {"status": record["status"], "loss": record["final"]["loss"]}  # the sanitizer raises where it sees a race


FAILING = """
import os, signal, sys, torch
sys.path.insert(0, {root!r})
from faithful import Accelerator
accelerator = Accelerator(project_dir=sys.argv[1])
model = torch.nn.Linear(64, 64)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(40):
    if step == 20 and accelerator.process_index == 1:
        if {how!r} == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise torch.OutOfMemoryError("out of memory, as this test says")
    accelerator.backward(model(torch.ones(2, 64, device=accelerator.device)).mean())
    optimizer.step()
    optimizer.zero_grad()
"""


def failure(how):
    with tempfile.TemporaryDirectory() as folder:
        script, run = Path(folder, "mine.py"), Path(folder, "run")
        script.write_text(FAILING.format(root=str(ROOT), how=how))
        done = launch(["ddp_fp32", *TWO, str(script), str(run)], fails=True)
        if not (run / "run.json").exists():
            raise SystemExit(f"it did not begin: {'; '.join(done['text'].strip().splitlines()[-3:])}")
        record = of(run)
    found = {"exit code": done["code"], "seconds": done["seconds"]}
    return found | {"status": record["status"], "its error": record["error"]}


def launch(words, env=None, fails=False):
    """{code, seconds, text} of a launch. Raises SystemExit with its last words if it fails. fails: it is to fail."""
    began = time.monotonic()
    done = subprocess.run([*LAUNCH, *words], env=os.environ | (env or {}), capture_output=True, text=True)
    text = done.stdout + done.stderr
    if done.returncode and not fails:
        raise SystemExit("; ".join((done.stderr or done.stdout).strip().splitlines()[-3:]))
    return {"code": done.returncode, "seconds": round(time.monotonic() - began, 1), "text": text}


def of(run):
    return json.loads((run / "run.json").read_text())


def first_page(about, rows, left):
    parts = ["# The first minutes on this machine", "", *(f"- {key}: {value}" for key, value in about.items())]
    for name, row in rows.items():
        shown = {key: value for key, value in row.items() if key not in ("date", "card", "device", "versions")}
        parts += ["", f"## {name}", "", *(f"- {key}: {value}" for key, value in shown.items())]
    return "\n".join([*parts, *(["", f"Not begun: {', '.join(left)}"] if left else []), ""])


# ------------------------------------------------------------------------------------------------------ every config


LEAST = WARMUP_STEPS + 1  # steps with one that is timed
HEADS = ["config", "outcome", "step, ms", "samples/s", "TFLOP/s per GPU", "of the bf16 rate", "peak, GiB", "loss"]


def workload(config, rehearse):
    """Returns (model, recipe and its options) for a config."""
    if "tp_" in config or "_sp_" in config:
        model = "llama_nano" if rehearse else "llama_medium"
        words = ["gpt", "--model", model, "--sequence_length", "128" if rehearse else "1024", "--vocab_size", "4096"]
        return model, [*words, "--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "32"]
    model, size, batch = ("vit_nano", 32, 16) if rehearse else ("vit_base", 224, 64)
    words = ["vit", "--model", model, "--dataset", "synthetic", "--image_size", str(size)]
    words += ["--dataloader_num_workers", "2"]  # else a batch is copied and pinned between two steps
    return model, [*words, "--per_device_train_batch_size", str(batch), "--per_device_eval_batch_size", str(batch)]


def tried(config, rehearse, steps, limit=None):
    """Runs a config for at most `limit` seconds and returns its row: the outcome and the figures."""
    model, words = workload(config, rehearse)
    words += ["--max_steps", str(steps), "--logging_steps", str(steps), "--eval_steps", "0"]
    try:
        record = launched(config, words, {"COLLECTIVE_TIMEOUT": "60"}, limit)
        return report_row(model, record)
    except SystemExit as problem:
        why = str(problem)
        return {"outcome": why if why.startswith("refused") else f"failed: {why.removeprefix('error: ')}"}
    except Exception as problem:  # of whatever kind: the other configs still run, and the page is written
        return {"outcome": f"failed: {type(problem).__name__}: {problem}"}


def report_row(model, record):
    """A row of the page, from a run's record."""
    took, world = record["throughput"]["step_seconds_median"], record["plan"]["num_processes"]
    flop = 3 * record["seen"]["samples_per_step"] * forward_flop(model, record["data"])
    return {
        "outcome": f"ran on {world}" if record["plan"]["device"] == "cuda" else "ran on a CPU",
        "step_seconds": took,
        "samples_per_second": record["throughput"]["samples_per_second_median"],
        "flop_per_second": flop / took / world,
        "peak_memory_bytes": record["peak_memory_bytes"],
        "loss": record["final"]["loss"],
        "measured": record["evidence"]["measured"],
        "versions": record["versions"],
    }


def report_page(about, rate, rows):
    cells = []
    for config, row in rows.items():
        figures = [""] * 6
        if "step_seconds" in row:
            share = f"{row['flop_per_second'] / rate:.0%}" if rate else ""
            figures = [
                f"{1000 * row['step_seconds']:.1f}",
                f"{row['samples_per_second']:.1f}",
                f"{row['flop_per_second'] / 1e12:.3g}",
                share,
                f"{row['peak_memory_bytes'] / 2**30:.2f}",
                f"{row['loss']:.4f}",
            ]
        cells.append([f"`{config}`", row["outcome"], *figures])
    lines = [f"- `{config}`: {row['measured']}" for config, row in rows.items() if "measured" in row]
    parts = ["# What the configs do on this machine", "", *(f"- {key}: {value}" for key, value in about.items())]
    parts += ["", table(HEADS, cells), "", "What was counted in each run:", "", *lines, ""]
    return "\n".join(parts)


# ------------------------------------------------------------------------------------------------------- all of them


def about_this():
    """What both pages begin with."""
    here = device_name()
    return {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "device": f"{torch.cuda.device_count()} x {here}" if torch.cuda.is_available() else here,
        "as found": json.dumps(as_found()),
        "system": platform.platform(),
    }


def one_by_one(names, minutes):
    """Yields (number of the name, the name, seconds left) until the minutes are over."""
    until = time.monotonic() + 60 * minutes
    for at, name in enumerate(names, 1):
        left = until - time.monotonic()
        if left < 5:
            print(f"{len(names) - at + 1} not begun: --minutes {minutes:g} are over")
            return
        print(f"[{at}/{len(names)}] {name}", flush=True)
        yield at, name, left


def all_cases(args, names, known):
    figures = json.loads(args.output.read_text())["cases"] if args.output.exists() else {}
    for _, name, left in one_by_one(names, args.minutes):
        row = measured(name, args.rehearse, min(args.limit, left))
        if "error" in row and "error" not in figures.get(name, row):
            print(f"  {row['error']}; its earlier result stays", flush=True)
        else:
            figures[name] = row
            print(f"  {row.get('error', 'done')}", flush=True)
        write_json(args.output, {"command": command(), "rehearsal": args.rehearse, "cases": figures})
    show(figures)


def all_items(args, names, known):
    rows, about = {}, about_this()
    for at, name, left in one_by_one(names, args.minutes):
        own, *later = (known[other][0] for other in names[at - 1 :])
        slower = 4 if args.rehearse else 1  # a CPU
        limit = min(slower * MOST, max(slower * own, left - slower * sum(later)))
        rows[name] = measured(name, args.rehearse, min(limit, left), "first")
        print(f"  {rows[name].get('error', 'done')}", flush=True)
        for config in STEP.keys() & rows.get("estimate", {}).keys():
            rows.get(f"step-{config}", {})["step_seconds_estimated"] = rows["estimate"][config]
        args.output.write_text(first_page(about, rows, names[at:]))
    print(f"wrote {args.output}: this is the page to send")


def all_configs(args, names, known):
    row = measured("rates", args.rehearse, args.limit)  # a process that leaves the GPU free
    device_rates = {key: value for key, value in row.items() if key.endswith("per_second")}
    about, rows = about_this(), {}
    about["rates"] = row.get("error") or ", ".join(f"{key} {value:.4g}" for key, value in device_rates.items())
    for _, config, _ in one_by_one(names, args.minutes):
        rows[config] = tried(config, args.rehearse, args.steps, args.limit)
        print(f"  {rows[config]['outcome']}", flush=True)
        if "versions" in rows[config]:
            about["versions"] = json.dumps(rows[config]["versions"])
        args.output.write_text(report_page(about, device_rates.get("bf16_flop_per_second"), rows))
    print(f"wrote {args.output}: this is the page to send")


def configs(rehearse):
    return dict.fromkeys(sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yml")))


WHAT = {  # what it goes through, the function that does, minutes, seconds for one, the file
    "cases": (cases, all_cases, 600, 240, ROOT / "results" / "gpu.json"),
    "first": (items, all_items, 10, MOST, Path("gpu-first.md")),
    "report": (configs, all_configs, 600, 300, Path("gpu-report.md")),
}


def main(argv):
    formatter = argparse.RawDescriptionHelpFormatter
    text = __doc__.replace("./launch.sh", find.COMMAND)
    parser = cli.Parser("python benchmarks/gpu.py", description=text, allow_abbrev=False, formatter_class=formatter)
    parser.add_argument("what", nargs="?", choices=WHAT, default="cases")
    parser.add_argument("--only", nargs="+", metavar="WORD", default=[""], help="those whose name has one of these")
    parser.add_argument("--minutes", type=float, help="none begins or goes on after these")
    parser.add_argument("--limit", type=float, help="seconds for one case or config")
    parser.add_argument("--steps", type=int, default=20, help=f"of a config, at least {LEAST} (default: 20)")
    parser.add_argument("--rehearse", action="store_true", help="nano models, on a CPU too")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    through, function, minutes, limit, output = WHAT[args.what]
    args.minutes, args.limit, args.output = args.minutes or minutes, args.limit or limit, args.output or output
    known = through(args.rehearse)
    if args.one:
        _, call, *rest = known[args.one]
        return print("\n" + json.dumps(call(*rest)))
    if args.steps < LEAST:
        raise Refused(f"--steps {args.steps}: {LEAST} or more, the first {WARMUP_STEPS} are not timed")
    if not torch.cuda.is_available() and not args.rehearse:
        raise Refused("there is no GPU here: --rehearse tries it on a CPU, with nano models")
    names = [name for name in known if any(word in name for word in args.only)]
    if not names:
        kind = {"cases": "case", "first": "item", "report": "config"}[args.what]
        raise Refused(f"--only {' '.join(args.only)}: no such {kind}, there are {', '.join(known)}")
    cli.make_folder(args.output.parent)
    function(args, names, known)


if __name__ == "__main__":
    cli.run(main)
