"""What do 8 and 4 bits per value do to a loss, and which part of NVIDIA's NVFP4 recipe, and of MS-AMP's FP4, matters?

    python benchmarks/four_bits.py                     all runs that results/four_bits.json has not
    python benchmarks/four_bits.py --tasks words --seeds 5 --minutes 30

Each run is recipes/gpt.py under a config in a process forked from this one, which has imported everything. All runs of
a seed have the same weights, samples and order, so two of them are a pair (tools/paired.py). The file is written after
each run, and a run that is there with the same steps and config is not run again.
"""

import functools
import gc
import importlib
import itertools
import os
import statistics
import sys
import time

import torch
import yaml
from harness import ROOT, arguments, command, made, save
from planted.neighbours import gpt as neighbours
from study import RUNS, written_data

from amp8 import fp4
from faithful.config.settings import to_env
from recipes import gpt
from shared import text
from tools import paired

FILE = ROOT / "results" / "four_bits.json"
BASELINE = "bf16"
MARGIN = 0.005  # two losses that differ by less are equal, as in benchmarks/study.py
SMALL = ("--model", "llama_nano", "--sequence_length", "32", "--per_device_train_batch_size", "8", "--eval_steps", "0",
         "--save_steps", "0", "--logging_steps", "50")  # fmt: skip
TOKENS = 8 * 32  # of a step
TASKS = {  # {name: (options, steps)}; of the text that benchmarks/study.py calls `code`
    "gpt": ((), 100),
    "words": (("--vocab_size", "2048"), 100),
}


def of_other_weights():
    """A control: the gradient is multiplied by the estimator's slopes, but by those of another channel's weights."""
    sound = fp4.slope
    fp4.slope = lambda x: sound(x).roll(1, 0)


WAYS = {  # {name: (config, keys of fp8_config in place of its own, what is changed in the emulation, in words)}
    "bf16": ("single_bf16", {}, None, "the baseline"),
    "control": ("single_bf16", {}, None, "bf16 from weights one rounding apart: chance alone"),
    "mxfp8": ("single_fp8_te_mxfp8", {}, None, "MXFP8, scales rounded up"),
    "nvfp4": ("single_fp8_te_nvfp4", {}, None, "NVFP4 with all parts"),
    "no_hadamard": ("single_fp8_te_nvfp4", {"disable_rht": True}, None, "NVFP4 without the Hadamard transform"),
    "no_stochastic": ("single_fp8_te_nvfp4", {"disable_stochastic_rounding": True}, None,
                      "NVFP4 with gradients rounded to nearest"),
    "no_square": ("single_fp8_te_nvfp4", {"disable_2d_quantization": True}, None, "NVFP4 with 1 x 16 weight blocks"),
    "no_skip": ("single_fp8_te_nvfp4", {"skip": ""}, None, "NVFP4 in the last 15% of the layers too"),
    "planted": ("single_fp8_te_nvfp4", {}, neighbours.plant,
                "a planted fault: NVFP4 under the neighbouring block's scales"),
    "mxfp4": ("single_fp8_ao_mxfp4", {}, None, "MXFP4, rounded to nearest, last 15% in bf16"),
    "mxfp8_floor": ("single_fp8_ao_mxfp8", {"skip": "", "scale_calculation_mode": "floor"}, None,
                    "MXFP8, scales rounded down (OCP)"),
    "msamp_o2": ("single_fp8_msamp_o2", {}, None, "MS-AMP's O2, FP8"),
    "msamp_fp4": ("single_fp8_msamp_o2_fp4", {}, None, "MS-AMP's O2 with its FP4, both parts"),
    "no_estimator": ("single_fp8_msamp_o2_fp4", {"disable_gradient_estimator": True}, None,
                     "MS-AMP's FP4 with the straight-through gradient"),
    "other_slopes": ("single_fp8_msamp_o2_fp4", {}, of_other_weights,
                     "a control: MS-AMP's FP4 with the slopes of another channel's weights"),
    "no_clamping": ("single_fp8_msamp_o2_fp4", {"disable_outlier_clamping": True}, None,
                    "MS-AMP's FP4 without the clamping of outliers"),
}  # fmt: skip

WHOLE = dict.fromkeys(("no_hadamard", "no_stochastic", "no_square", "no_skip", "planted"), "nvfp4") | dict.fromkeys(
    ("no_estimator", "other_slopes", "no_clamping"), "msamp_fp4"
)  # {way: the way that has all parts}


def options_of(task, seed):
    options, steps = TASKS[task]
    data = RUNS.relative_to(ROOT) / "data" / "code"
    return [*SMALL, *options, "--max_steps", str(steps), "--seed", str(seed), "--dataset", str(data)]


def started(task, way, seed):
    """Starts a run. Returns (its process, its folder, when); its output is beside its folder."""
    config, keys, change, _ = WAYS[way]
    mapping = yaml.safe_load((ROOT / "accelerate_configs" / f"{config}.yml").read_text())
    if keys:
        mapping["fp8_config"] |= keys
    folder = ROOT / "runs" / "four_bits" / f"{task}-{way}-seed{seed}-{time.time():.0f}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    gc.freeze()
    child = os.fork()
    if not child:
        code = 1
        try:
            torch.set_num_threads(1)
            os.environ.update(to_env(mapping) | ({"FAITHFUL_PERTURBED": "1"} if way == "control" else {}))
            with open(f"{folder}.log", "w") as log:
                os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
            sys.argv = [str(ROOT / "recipes" / "gpt.py"), *options_of(task, seed), "--output_dir", str(folder)]
            if change:
                change()
            gpt.main(gpt.options.parse(gpt.Arguments))
            code = 0
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    gc.unfreeze()
    return child, folder, began


def row_of(task, way, seed, folder, began, status):
    """The row of a run that has ended, or None if it failed."""
    config, keys, *_ = WAYS[way]
    record = made(folder / "run.json")
    if status or record.get("status") != "finished":
        print(f"{task} {way} seed {seed}: failed, see {folder}.log", flush=True)
        return None
    evidence = record["evidence"]
    return {
        "task": task, "way": way, "seed": seed, "config": config, "fp8_config": keys, "steps": TASKS[task][1],
        "eval_loss": record["final"]["metrics"]["eval_loss"], "linear": [evidence["linear_converted"],
        evidence["linear_total"]], "summary": evidence["measured"], "initial_weights": evidence["initial_weights"],
        "first_batch": record["seen"]["first_batch"], "step_seconds": record["throughput"]["step_seconds_median"],
        "seconds": round(time.monotonic() - began, 1), "threads": 1,
    }  # fmt: skip


def against(rows, task, way, base):
    """tools.paired's verdict on a way's losses against those of another, over the seeds that both have."""
    losses = {
        name: {row["seed"]: row for row in rows if (row["task"], row["way"]) == (task, name)} for name in (way, base)
    }
    seeds = sorted(losses[way].keys() & losses[base].keys())
    for key in ("initial_weights", "first_batch"):
        alike = way == "control" or all(losses[way][seed][key] == losses[base][seed][key] for seed in seeds)
        assert alike or key == "first_batch" and way == "control", (task, way, key)
    values, baseline = ([losses[name][seed]["eval_loss"] for seed in seeds] for name in (way, base))
    return (
        {"seeds": seeds, "mean": statistics.fmean(values)} | paired.judge(baseline, values, MARGIN) if seeds else None
    )


def results(rows):
    for task in TASKS:
        for way in WAYS:
            if way != BASELINE and (found := against(rows, task, way, BASELINE)):
                yield {"task": task, "way": way, "against": BASELINE} | found
        for way, whole in WHOLE.items():
            if found := against(rows, task, way, whole):
                yield {"task": task, "way": way, "against": whole} | found


def main():
    parser = arguments(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2, help="runs at a time, of one thread each")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a fork has no other thread's locks
    importlib.import_module("transformers.models.llama.modeling_llama"), importlib.import_module("datasets")
    written_data("code")
    os.chdir(ROOT)
    text.texts = functools.cache(text.texts)
    rows, end, running = made(FILE, rows=[])["rows"], time.monotonic() + 60 * args.minutes, {}
    there = {
        (row["task"], row["way"], row["seed"])
        for row in rows
        if (row["steps"], row["config"], row["fp8_config"]) == (TASKS[row["task"]][1], *WAYS[row["way"]][:2])
    }
    wanted = [run for run in itertools.product(args.tasks, range(args.seeds), args.ways)]
    left = [(task, way, seed) for task, seed, way in wanted if (task, way, seed) not in there]
    while running or (left and time.monotonic() < end):
        if left and len(running) < args.workers and time.monotonic() < end:
            child, *more = started(*left[0])
            running[child] = (*left.pop(0), *more)
            continue
        child, status = os.waitpid(-1, 0)
        task, way, seed, *more = running.pop(child)
        row = row_of(task, way, seed, *more, status)
        if row:
            rows = [other for other in rows if (other["task"], other["way"], other["seed"]) != (task, way, seed)] + [
                row
            ]
            write(rows)
            print(f"{task} {way} seed {seed}: {row['eval_loss']:.4f} ({row['seconds']:.0f} s)", flush=True)


def write(rows):
    tasks = {name: {"options": [*SMALL, *more], "steps": steps} for name, (more, steps) in TASKS.items()}
    figures = {
        "command": command(made(FILE).get("command")),
        "margin": MARGIN,
        "tokens": TOKENS,
        "tasks": tasks,
        "ways": {name: way[3] for name, way in WAYS.items()},
    }
    rows = sorted(rows, key=lambda row: (row["task"], row["seed"], list(WAYS).index(row["way"])))
    save(FILE, figures | {"results": list(results(rows)), "rows": rows},
         ("accelerate", "transformers", "transformer_engine", "torchao"))  # fmt: skip


if __name__ == "__main__":
    main()
