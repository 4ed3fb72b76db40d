"""The first ten minutes on a GPU: what tells most first, each item bounded in time, on one page to be sent to someone.

    ./launch.sh gpu-first                      all items, into gpu-first.md
    ./launch.sh gpu-first --only machine step  items whose name has one of these words
    ./launch.sh gpu-first --rehearse           nano models, for trying this script

machine   driver, torch's CUDA and NCCL, the C compiler: what a run would be refused for
step-*    30 steps of recipes/vit.py with a config: the step's time, the summary line, how often torch compiled again
resume    is a resumed run equal bit for bit, and is it with --deterministic
kernels   five steps of recipes/gpt.py under torch's profiler: the kernels that take most of the time
memory    two or more GPUs: what prepare() leaves and needed under FSDP2, for each parameter
failure-* two or more GPUs: one process runs out of memory, or is killed: exit code, seconds, what run.json says
races-*   two or more GPUs: three steps of MS-AMP's levels under torch's sanitizer of CUDA streams

Each item is a process of its own, which is killed at its limit: the seconds that are its own, or up to 90 where the
items before it left some. All of these seconds fit into ten minutes, so that the last item begins, too. The page is
written after each.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from gpu import as_found, launched, measured
from provenance import ROOT, command, device_name

MOST = 90  # seconds of an item
STEP = {"single_bf16": 40, "single_bf16_compile": 60, "single_fp8_compile": 70, "single_fp8_msamp_o2": 70}
RACES = ("ddp_fp8_msamp_o2", "ddp_fp8_msamp_o3", "fsdp_fp8_msamp_o2")
TWO = ["--num_processes", "2"]


def items(rehearse):
    """{name: (seconds of its own, function, its arguments)} in their order."""
    one = {"machine": (15, machine)}
    one |= {f"step-{config}": (seconds, step, config, rehearse) for config, seconds in STEP.items()}
    one |= {"resume": (60, resume), "kernels": (40, kernels, rehearse)}
    several = {"memory": (45, memory, rehearse)}
    several |= {f"failure-{how}": (45, failure, how) for how in ("memory", "kill")}
    several |= {f"races-{config}": (35, races, config) for config in RACES}
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
    return figures | {"seconds": done["seconds"], "recompilations": again, "truth": record["evidence"]["truth"],
                      "peak_memory_bytes": record["peak_memory_bytes"], "loss": record["final"]["loss"]}  # fmt: skip


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
        sys.argv = ["gpt.py", "--dataset", str(ROOT / "launch.sh"), "--model", *model, "--max_steps", "5",
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
sys.path.append({root!r})
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
sys.path.append({root!r})
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
    return {
        "exit code": done["code"],
        "seconds": done["seconds"],
        "status": record["status"],
        "its error": record["error"],
    }


def launch(words, env=None, fails=False):
    """{code, seconds, text} of ./launch.sh. Raises SystemExit with its last words if it fails. fails: it is to fail."""
    began = time.monotonic()
    line, env = ["./launch.sh", *words], os.environ | (env or {})
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)
    text = done.stdout + done.stderr
    if done.returncode and not fails:
        raise SystemExit("; ".join((done.stderr or done.stdout).strip().splitlines()[-3:]))
    return {"code": done.returncode, "seconds": round(time.monotonic() - began, 1), "text": text}


def of(run):
    return json.loads((run / "run.json").read_text())


def page(about, rows, left):
    parts = ["# The first minutes on this machine", "", *(f"- {key}: {value}" for key, value in about.items())]
    for name, row in rows.items():
        shown = {key: value for key, value in row.items() if key not in ("date", "card", "device", "versions")}
        parts += ["", f"## {name}", "", *(f"- {key}: {value}" for key, value in shown.items())]
    return "\n".join([*parts, *(["", f"Not begun: {', '.join(left)}"] if left else []), ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", default=[""], help="items whose name has one of these")
    parser.add_argument("--minutes", type=float, default=10, help="no item begins or goes on after these")
    parser.add_argument("--rehearse", action="store_true", help="nano models, on a CPU too")
    parser.add_argument("--output", type=Path, default=Path("gpu-first.md"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    known = items(args.rehearse)
    if args.one:
        _, function, *rest = known[args.one]
        return print("\n" + json.dumps(function(*rest)))
    if not torch.cuda.is_available() and not args.rehearse:
        raise SystemExit("error: torch sees no GPU here: --rehearse tries the items on a CPU, with nano models")
    names = [name for name in known if any(word in name for word in args.only)]
    if not names:
        raise SystemExit(f"error: --only {' '.join(args.only)}: no such item, there are {', '.join(known)}")
    about = {"command": command(), "date": time.strftime("%Y-%m-%d"), "as found": json.dumps(as_found())}
    about["device"] = f"{torch.cuda.device_count()} x {device_name()}" if torch.cuda.is_available() else device_name()
    rows, until = {}, time.monotonic() + 60 * args.minutes
    for at, name in enumerate(names, 1):
        left = until - time.monotonic()
        if left < 5:
            break
        print(f"[{at}/{len(names)}] {name}", flush=True)
        own, *later = (known[other][0] for other in names[at - 1 :])
        slower = 4 if args.rehearse else 1  # a CPU
        limit = min(slower * MOST, max(slower * own, left - slower * sum(later)))
        rows[name] = measured(name, args.rehearse, min(limit, left), __file__)
        print(f"  {rows[name].get('error', 'done')}", flush=True)
        args.output.write_text(page(about, rows, names[at:]))
    print(f"wrote {args.output}: this is the page to send")


if __name__ == "__main__":
    main()
