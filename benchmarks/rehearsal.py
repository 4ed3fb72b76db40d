"""What a precision costs in a rehearsal: the step time of each config over that of fp32, on a CPU.

    python benchmarks/rehearsal.py --output results/rehearsal.json
    python benchmarks/rehearsal.py --avx2 --before ../earlier --configs single_bf16 --output results/rehearsal.json
    python benchmarks/rehearsal.py --losses 4 --output results/rehearsal.json
    python benchmarks/rehearsal.py --start 5 --before ../earlier --configs single_bf16 ddp_bf16 --output ...

The recipes run in turns (benchmarks/turns.py), the configs of a strategy beside its fp32 one. A ratio is that of the
median steps of one turn; the report has the median and the quartiles over the turns. --avx2 makes torch and oneDNN use
no instruction beyond AVX2, as on most laptops. --before is a clone of an earlier commit, whose code is measured too.

--losses compares the losses of 50 steps in bf16, products computed in fp32, with those of the CPU's own bf16 kernels,
over pairs of runs with the same seed. As a scale: the distance of a run whose first weights differ in the last bit.

--start measures the seconds from the command to the end of the first optimizer step, so many times, in turns.
"""

import argparse
import functools
import json
import math
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import turns
from provenance import ROOT, command, save

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
MODELS = {"vit_tiny": ("vit", 8), "llama_nano": ("gpt", 8)}  # model: (recipe, global batch); FP8 refuses gpt_nano
CONFIGS = """single_bf16 single_fp16 single_fp8 single_fp8_ao_rowwise single_fp8_te single_fp8_te_current
    single_fp8_te_block single_fp8_msamp_o1 single_fp8_msamp_o2 single_fp8_msamp_o3 ddp_bf16 fsdp_bf16
    fsdp_fp8""".split()


def base(config):
    return f"{config.partition('_')[0]}_fp32"


def start(model, env, before, way, steps, folder, port):
    """Launches a recipe under a config. way: the config, with @before for the earlier code."""
    config, _, earlier = way.partition("@")
    root, (recipe, batch) = Path(before if earlier else ROOT), MODELS[model]
    line = [sys.executable, "-m", "accelerate.commands.launch"]
    line += ["--config_file", root / "accelerate_configs" / f"{config}.yml"]
    line += [] if config.startswith("single") else ["--main_process_port", "0"]
    line += [Path(__file__).resolve(), "--one", folder / f"{way}.json", steps, port, root / "recipes" / f"{recipe}.py"]
    line += ["--model", model, "--max_steps", steps, "--save_steps", 0, "--eval_steps", 0]
    line += ["--per_device_train_batch_size", batch if config.startswith("single") else batch // 2]
    line += ["--output_dir", folder / f"run-{way}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"} | env
    with open(folder / f"{way}.log", "w") as log:
        return subprocess.Popen(list(map(str, line)), cwd=root, env=env, stdout=log, stderr=log)


def one(file, steps, port, recipe, *words):
    """Runs a recipe in this process, and records when its steps end."""
    turns.watch(file, int(steps), int(port))
    sys.argv, sys.path[0] = [recipe, *words], str(Path(recipe).parent)
    runpy.run_path(recipe, run_name="__main__")


def first_step(model, env, before, way):
    """Seconds from the command to the end of the first optimizer step."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        start(model, env, before, way, 3, Path(folder), 0).wait()
        file = Path(folder, f"{way}.json")
        return json.loads(file.read_text())["first_step"] - began if file.exists() else turns.failed(way, Path(folder))


def start_rows(models, configs, env, before, rounds):
    """A row for each model and config: the seconds of each round, of this code and of the earlier one, if any."""
    for model in models:
        for config in configs:
            ways = [config, *([f"{config}@before"] if before else [])]
            found = [{way: first_step(model, env, before, way) for way in ways} for _ in range(rounds)]
            row = {"model": model, "config": config, "instructions": "AVX2" if env else "as it is"}
            row |= {way.partition("@")[2] or "now": [each[way] for each in found] for way in ways}
            print(row, flush=True)
            yield row


def losses(model, seed, products, perturbed=False):
    """The training losses of 50 steps of a run in bf16. products: whether they are computed in fp32."""
    recipe, batch = MODELS[model]
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "accelerate.commands.launch"]
        line += ["--config_file", ROOT / "accelerate_configs" / "single_bf16.yml", Path(__file__).resolve()]
        line += ["--forced", "bf16" if products else "", ROOT / "recipes" / f"{recipe}.py", "--model", model]
        line += ["--seed", seed, "--max_steps", 50, "--logging_steps", 1, "--save_steps", 0, "--eval_steps", 0]
        line += ["--per_device_train_batch_size", batch, "--output_dir", Path(folder, "run")]
        env = os.environ | {"OMP_NUM_THREADS": "1"} | ({"FAITHFUL_PERTURBED": "1"} if perturbed else {})
        subprocess.run(list(map(str, line)), cwd=ROOT, env=env, check=True, capture_output=True)
        rows = [json.loads(row) for row in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    curve = [row["loss"] for row in rows if "loss" in row]
    assert len(curve) == 50
    return curve


def forced(dtype, recipe, *words):
    """Runs a recipe with all products of a dtype in fp32, or none, whatever is fast on this CPU."""
    sys.path.insert(0, str(ROOT))
    from faithful.backends import cpu_matmul

    cpu_matmul.slow = lambda: {kind: [dtype] if dtype else [] for kind in cpu_matmul.OPERATORS}
    sys.argv, sys.path[0] = [recipe, *words], str(Path(recipe).parent)
    runpy.run_path(recipe, run_name="__main__")


def apart(a, b):
    """The root mean square of the differences of two curves of losses."""
    return math.sqrt(statistics.fmean((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def loss_rows(models, seeds):
    for model in models:
        for seed in range(seeds):
            own = losses(model, seed, False)
            row = {"model": model, "seed": seed, "last_loss": own[-1]}
            row["through_fp32"] = apart(losses(model, seed, True), own)
            row["perturbed"] = apart(losses(model, seed, False, perturbed=True), own)
            print(row, flush=True)
            yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--configs", nargs="+", default=CONFIGS)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--before", type=Path, help="a clone of an earlier commit")
    parser.add_argument("--output", type=Path, help="JSON file; what it holds already is kept unless measured again")
    parser.add_argument("--losses", type=int, metavar="SEEDS", help="compare losses instead of times")
    parser.add_argument("--start", type=int, metavar="ROUNDS", help="measure start-up instead of steps")
    args = parser.parse_args()
    env = AVX2 if args.avx2 else {}
    made = json.loads(args.output.read_text()) if args.output and args.output.exists() else {}
    rows, said = made.get("rows", []), made.get("command", "")
    all_of_them = said if command() in said else f"{said} and {command()}".removeprefix(" and ")
    figures = {"rows": rows, "losses": made.get("losses", []), "start": made.get("start", []), "command": all_of_them}
    if args.losses:
        figures["losses"] = list(loss_rows(args.models, args.losses))
        return save(args.output, figures, ("accelerate", "torchao", "deepspeed"))
    if args.start:
        figures["start"] = list(start_rows(args.models, args.configs, env, args.before, args.start))
        return save(args.output, figures, ("accelerate", "torchao", "deepspeed"))
    for model in args.models:
        for fp32 in dict.fromkeys(map(base, args.configs)):
            configs = [config for config in args.configs if base(config) == fp32]
            ways = [fp32, *configs, *(f"{config}@before" for config in configs if args.before)]
            found = turns.in_turns(ways, args.turns, functools.partial(start, model, env, args.before))
            for way in ways[1:]:
                config, _, earlier = way.partition("@")
                cpu = "AVX2" if args.avx2 else "as it is"
                key = {"model": model, "config": config, "instructions": cpu, "code": "before" if earlier else "now"}
                row = key | {"over": fp32, "fp32_seconds": statistics.median(found[fp32]["wall"])}
                row |= {kind: turns.ratio(found[way][kind], found[fp32][kind]) for kind in turns.KINDS}
                rows = [other for other in rows if {name: other[name] for name in key} != key] + [row]
                low, high = row["wall"]["quartiles"]
                print(f"{model} {way} {cpu}: {row['wall']['median']:.2f} of fp32 ({low:.2f} to {high:.2f})", flush=True)
            if args.output:
                figures["rows"] = rows
                save(args.output, figures, ("accelerate", "torchao", "deepspeed"))


if __name__ == "__main__":
    inside = {"--one": one, "--forced": forced}.get(sys.argv[1] if len(sys.argv) > 1 else None)
    inside(*sys.argv[2:]) if inside else main()
