"""What is each way to train worth? Runs the study that docs/study.md fixes, in pieces, and goes on where it stopped.

    python benchmarks/study.py run --hours 2                       all that is missing, the most telling first
    python benchmarks/study.py run --tasks words --ways bf16 o2    a part of it
    python benchmarks/study.py left                                what was not run: commands and estimated hours
    python benchmarks/study.py page                                summary.json, page.html and the pictures

Each run is one `./launch.sh CONFIG RECIPE`. Its row, one line of JSON, goes into results/study/MACHINE.jsonl, so files
of several machines stand beside each other and are judged together: a pair is two runs of one seed on one machine.
A finished row is not run again; a killed run has no row. The folders of the runs are in runs/study.
"""

import concurrent.futures
import contextlib
import datetime
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import ROOT, arguments, came_from, device_name

from shared.args import Refused
from tools import cli, find, page, paired, report

RESULTS, RUNS = ROOT / "results" / "study", ROOT / "runs" / "study"
POINTS = 60  # of a loss curve that a row keeps


# ------------------------------------------------------------------------------- the plan, as docs/study.md fixes it

BASELINE, CONTROL = "bf16", "control"
SEEDS = 5
PICTURE = "words"  # the task that the one picture shows
RARE = 50  # a token is rare with fewer occurrences in the training text


@dataclass
class Way:
    """A way to train: config and options. script: in place of the task's recipe. note: what it is, for a picture."""

    config: str
    options: tuple = ()
    script: str | None = None
    note: str = ""


WAYS = {
    "bf16": Way("single_bf16", note="bf16 compute, fp32 weights and AdamW"),
    "control": Way("single_bf16", note="bf16, one rounding apart at the start"),
    "o2": Way("single_fp8_msamp_o2", note="MS-AMP O2"),
    "planted": Way("single_fp8_msamp_o2", script="benchmarks/planted/lossy/gpt.py", note="O2 with a planted defect"),
    "o2_round_to_nearest": Way("single_fp8_msamp_o2", script="benchmarks/planted/nearest/gpt.py",
                               note="MS-AMP O2"),
    "fp32": Way("single_fp32", note="fp32 compute"),
    "ao": Way("single_fp8", note="FP8, torchao"),
    "o1": Way("single_fp8_msamp_o1", note="MS-AMP O1"),
    "o3": Way("single_fp8_msamp_o3", note="MS-AMP O3"),
    "bf16_pure": Way("single_fp32", ("--dtype", "bfloat16"), note="bf16 weights, plain AdamW"),
    "bf16_stochastic": Way("single_fp32", ("--dtype", "bfloat16", "--optimizer", "adamw_bf16"),
                           note="bf16 weights"),
    "adamw_8bit": Way("single_bf16", ("--optimizer", "adamw_8bit"), note="8-bit moments"),
    "adafactor": Way("single_bf16", ("--optimizer", "adafactor"), note="Adafactor for AdamW"),
    "muon": Way("single_bf16", ("--optimizer", "muon"), note="Muon for AdamW"),
    "ao_rowwise": Way("single_fp8_ao_rowwise", note="FP8, torchao"),
    "te": Way("single_fp8_te", note="FP8, TransformerEngine"),
    "te_current": Way("single_fp8_te_current", note="FP8, TransformerEngine"),
    "te_block": Way("single_fp8_te_block", note="FP8, TransformerEngine"),
    "fp16": Way("single_fp16", note="fp16 compute, loss scaling"),
    "te_mxfp8": Way("single_fp8_te_mxfp8", note="FP8, TransformerEngine"),
}  # fmt: skip
EARLIER = {"o2_nearest": "o2_round_to_nearest"}  # names in rows of before
ABSENT = {
    "nvfp4": "benchmarks/four_bits.py has it",
    "bitsandbytes": "its 8-bit Adam needs a GPU, and no recipe has it",
}


@dataclass
class Task:
    """A training. measure: the main one. margin: two values that differ by less are equal. seconds: of one bf16 run on
    one core of the machine that planned it, for `left`."""

    question: str
    recipe: str
    options: tuple
    measure: str
    margin: float
    seconds: int
    data: str | None = None  # a name in DATA
    start: str | None = None  # a name in STARTS: the run that is fine-tuned


def language(*options):
    return ("--eval_steps", "0", "--save_steps", "0", "--logging_steps", "10", *options)


SMALL = ("--model", "llama_nano", "--sequence_length", "64", "--per_device_train_batch_size", "8")
TASKS = {
    "words": Task(
        "A vocabulary with rare words", "gpt",
        language(*SMALL, "--vocab_size", "4096", "--max_steps", "600"), "weights_loss", 0.005, 60, "source"),
    "accumulation": Task(
        "32 micro-batches in each step", "gpt",
        language("--model", "llama_nano", "--sequence_length", "64", "--per_device_train_batch_size", "4",
                 "--gradient_accumulation_steps", "32", "--max_steps", "60"), "weights_loss", 0.005, 60, "source"),
    **{
        f"finetune_{rate}": Task(
            f"Fine-tuning at a learning rate of {rate}", "gpt",
            language("--pretrained", *SMALL[2:], "--max_steps", "300", "--warmup_steps", "10", "--learning_rate", rate),
            "gain", 0.05, 25, "code", "prose")
        for rate in ("1e-3", "1e-4", "1e-5", "1e-6")
    },
    "vit": Task(
        "Pre-training on photos", "vit",
        ("--dataset", "photos", "--model", "vit_nano", "--per_device_train_batch_size", "16", "--max_steps", "1000",
         "--eval_steps", "0", "--save_steps", "0"), "eval_loss", 0.005, 45),
    "gpt": Task(
        "A longer pre-training: 4.0M parameters, 3,000 steps", "gpt",
        language("--model", "llama_tiny", *SMALL[2:], "--max_steps", "3000"), "weights_loss", 0.005, 300, "source"),
}  # fmt: skip
# Text of Python's standard library: {name: characters}.
DATA = {"source": 2_000_000, "code": 300_000}
STARTS = {"prose": ("single_fp32", "gpt", language(*SMALL, "--dataset", "python_docs", "--max_steps", "3000"))}


# ------------------------------------------------------------------------------------------------------------ the runs


def written_data(name):
    """A folder with modules of the standard library, up to DATA[name] characters. `code` takes them from the end."""
    folder, left = RUNS / "data" / name, DATA[name]
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), reverse=name == "code")
    folder.mkdir(parents=True, exist_ok=True)
    for path in modules:
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) <= left:
            left -= len(text)
            (folder / path.name).write_text(text, encoding="utf-8")
    return folder


def launch(config, script, options, folder, threads, perturbed=False):
    """Runs one training, with its output beside the folder. Returns (its exit code, seconds)."""
    command = ["./launch.sh", config, script, *options, "--output_dir", str(folder.relative_to(ROOT))]
    env = os.environ | {"VIRTUAL_ENV": sys.prefix, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env.pop("FAITHFUL_PERTURBED", None)
    env |= {"OMP_NUM_THREADS": str(threads)} | ({"FAITHFUL_PERTURBED": "1"} if perturbed else {})
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.old-{time.time():.0f}"))
    began = time.monotonic()
    with folder.with_name(f"{folder.name}.log").open("w") as log:
        code = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log, preexec_fn=cli.die_with_me).returncode
    return code, time.monotonic() - began


def started(name, threads):
    """The folder of the run that others are fine-tuned from; it is made once on each machine."""
    folder = RUNS / "start" / name
    if not (folder / "model" / "model.safetensors").exists():
        config, recipe, options = STARTS[name]
        code, _ = launch(config, recipe, options, folder, threads)
        if code:
            raise Refused(f"{config} {recipe} for {name} ended with {code}: see {folder}.log")
    return folder


def options_of(task, seed):
    task = TASKS[task]
    options = [*task.options, "--seed", str(seed)]
    if task.data:
        options += ["--dataset", str((RUNS / "data" / task.data).relative_to(ROOT))]
    if task.start:
        options += ["--model", str((RUNS / "start" / task.start).relative_to(ROOT))]
    return options


def token_losses(model, part):
    """(losses, labels) of all labels of a Text, fp32 and int64 [labels], without FP8."""
    losses, labels = [], []
    for at in range(0, len(part), 64):
        batch = part.__getitems__(range(at, min(at + 64, len(part))))
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits.flatten(0, 1).float()
        loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="none")
        counts = batch["labels"].flatten() >= 0
        losses.append(loss[counts])
        labels.append(batch["labels"].flatten()[counts])
    return torch.cat(losses), torch.cat(labels)


def measured(task, folder, record):
    """{name: number} of a finished run: what it logged, and what its saved weights give in fp32."""
    logged = {name: value for name, value in record["final"]["metrics"].items() if name in ("eval_loss", "accuracy")}
    if TASKS[task].recipe != "gpt":
        return logged
    from shared import text
    from tools import export

    arguments = record["args"]
    what = arguments["dataset"], arguments["sequence_length"], arguments["vocab_size"], arguments["packing"]
    train, held_out = text.texts(*what, str(folder / "model"))
    losses, labels = token_losses(export.load(folder)[0], held_out)
    found = logged | {"weights_loss": losses.double().mean().item()}
    if arguments["vocab_size"]:
        seldom = torch.bincount(train.tokens.long(), minlength=train.vocab_size)[labels] < RARE
        found |= {"rare_loss": losses[seldom].double().mean().item(), "rare_share": seldom.double().mean().item()}
    if TASKS[task].start:
        before, _ = token_losses(export.load(RUNS / "start" / TASKS[task].start)[0], held_out)
        found["gain"] = before.double().mean().item() - found["weights_loss"]
    return found


def code_of_study():
    """A hash of all code that a run executes."""
    folders = ("recipes", "shared", "faithful", "amp8", "benchmarks/planted")
    files = [path for folder in folders for path in sorted((ROOT / folder).glob("**/*.py"))]
    return sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def thinned(curve):
    """At most POINTS points of a loss curve, the last among them; each the mean since the one before."""
    size = -(-len(curve) // POINTS)
    pieces = [curve[max(0, end - size) : end] for end in range(len(curve), 0, -size)][::-1]
    return [[piece[-1][0], round(sum(loss for _, loss in piece) / len(piece), 5)] for piece in pieces]


def row_of(task, way, seed, folder, code, seconds):
    """The row of a run that has ended, or None if it was killed."""
    if code not in (0, 1, 2):
        return None
    path = folder / "run.json"
    record = json.loads(path.read_text()) if path.exists() else None
    chosen = WAYS[way]
    options = [*chosen.options, *options_of(task, seed)]
    command = ["./launch.sh", chosen.config, chosen.script or TASKS[task].recipe, *options]
    row = {"task": task, "way": way, "seed": seed, "config": chosen.config, "command": shlex.join(command),
           "perturbed": way == CONTROL, "device": this_device(), "date": datetime.date.today().isoformat(),
           "seconds": round(seconds, 1), "code": code_of_study(), "status": "finished", "error": None}  # fmt: skip
    if code or record is None or record["status"] != "finished":
        lines = folder.with_name(f"{folder.name}.log").read_text().strip().splitlines()
        said = [line for line in lines if re.match(r"(refused|error): ", line)] or lines[-1:]
        return row | {"status": "refused" if code == 2 else "failed", "error": (record or {}).get("error") or said[0]}
    evidence = record["evidence"]
    return row | {
        "measures": measured(task, folder, record),
        "bytes_per_parameter": evidence["bytes_per_parameter"],
        "parameters": evidence["parameters"],
        "linear": [evidence["linear_converted"], evidence["linear_total"]],
        "summary": evidence["measured"],
        "emulated": record["plan"]["emulated"],
        "initial_weights": evidence["initial_weights"],
        "first_batch": record["seen"]["first_batch"],
        "versions": record["versions"],
        "config_sha256": record["config"]["sha256"],
        "loss_curve": thinned(record["seen"]["loss_curve"]),
    }


# ------------------------------------------------------------------------------------------------- what is there, left


def read_rows(folder=None):
    """All rows of all machines. A line that a killed process has left incomplete is skipped."""
    rows = []
    for path in sorted((folder or RESULTS).glob("*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return [row | {"way": EARLIER.get(row["way"], row["way"])} for row in rows]


def wanted(tasks=TASKS, ways=WAYS, seeds=SEEDS):
    """Every (task, way, seed) of the protocol. Seed by seed: a study that stops has all ways of its seeds."""
    for task, seed, way in itertools.product(tasks, range(seeds), ways):
        if applies(way, task):
            yield task, way, seed


def applies(way, task):
    """Whether the protocol has this way for this task: the planted fault is for `words`, other scripts train a gpt."""
    if way == "planted":
        return task == "words"
    return WAYS[way].script is None or TASKS[task].recipe == "gpt"


def of_one_machine(row):
    """Runs with equal values may be a pair: the machine and the code."""
    return row["device"], row["code"]


def missing(rows, device, code, **chosen):
    """What `wanted` has and no machine has as a pair with its baseline. A way that this machine refuses with this code
    is refused for every task and seed; another machine's refusal, or earlier code's, does not count."""
    kind = kind_of(device)
    rows = [row for row in rows if kind_of(row["device"]) == kind]
    bases = {(row["task"], row["seed"], *of_one_machine(row)) for row in rows if row["way"] == BASELINE}
    ended = [row for row in rows if row["status"] != "refused"]
    pairs = {run_of(row) for row in ended if (row["task"], row["seed"], *of_one_machine(row)) in bases}
    mine = {run_of(row) for row in rows if of_one_machine(row) == (device, code)}
    refused = {row["way"] for row in rows if row["status"] == "refused" and of_one_machine(row) == (device, code)}
    runs = [run for run in wanted(**chosen) if run not in pairs | mine and run[1] not in refused]
    needed = dict.fromkeys((task, BASELINE, seed) for task, _, seed in runs)
    runs = [*needed, *(run for run in runs if run not in needed)]
    order = list(TASKS)
    runs.sort(key=lambda run: (order.index(run[0]), run[2]))
    return [run for run in runs if run not in mine]


def run_of(row):
    return row["task"], row["way"], row["seed"]


def kind_of(device):
    """Runs on CPUs are judged together, and runs on GPUs."""
    return "CPU" if device.startswith("CPU") else "GPU"


def this_device():
    return device_name().split(",")[0]


def machine_file():
    return RESULTS / (re.sub(r"\W+", "-", this_device().lower()).strip("-") + ".jsonl")


def run(args):
    file, lock = machine_file(), threading.Lock()
    RESULTS.mkdir(parents=True, exist_ok=True)
    runs = missing(read_rows(), this_device(), code_of_study(), tasks=args.tasks, ways=args.ways, seeds=args.seeds)
    for task in {task for task, _, _ in runs}:
        if TASKS[task].data:
            written_data(TASKS[task].data)
        if TASKS[task].start:
            started(TASKS[task].start, args.threads)
    end = time.monotonic() + 3600 * args.hours
    print(f"{len(runs)} runs are missing; {args.workers} at a time, with {args.threads} threads each", flush=True)

    def one(task, way, seed):
        if time.monotonic() > end or any(row["way"] == way and row["status"] == "refused" for row in done):
            return
        chosen, folder = WAYS[way], RUNS / task / f"{way}-seed{seed}"
        options = (*chosen.options, *options_of(task, seed))
        script = chosen.script or str(find.recipe(TASKS[task].recipe))
        code, seconds = launch(chosen.config, script, options, folder, args.threads, way == CONTROL)
        with lock:  # datasets and transformers import lazily, which two threads must not do at once
            row = row_of(task, way, seed, folder, code, seconds)
            if row is None:
                return
            done.append(row)
            with file.open("a") as rows:
                rows.write(json.dumps(row) + "\n")
        said = row["error"] or ", ".join(f"{name} {value:.5g}" for name, value in row["measures"].items())
        print(f"{task} {way} seed {seed}: {said} ({seconds:.0f} s)", flush=True)

    done = []
    with concurrent.futures.ThreadPoolExecutor(args.workers) as workers:
        for finished in concurrent.futures.as_completed([workers.submit(one, *ids) for ids in runs]):
            finished.result()


def left(rows, device, code, cores=2):
    """[(task, runs that are missing, estimated hours on `cores` cores, command)]."""
    took = {}
    for row in rows:
        if row["status"] == "finished":
            took.setdefault((row["task"], row["way"]), []).append(row["seconds"])
    lines = []
    for task in TASKS:
        runs = missing(rows, device, code, tasks=[task])
        seconds = 0
        for _, way, _ in runs:
            here = took.get((task, way))
            factor = [sum(took[other, way]) / len(took[other, way]) / TASKS[other].seconds
                      for other in TASKS if (other, way) in took]  # fmt: skip
            usual = TASKS[task].seconds * (sum(factor) / len(factor) if factor else 2)
            seconds += sum(here) / len(here) if here else usual
        if runs:
            lines.append((task, len(runs), seconds / 3600 / cores, f"python benchmarks/study.py run --tasks {task}"))
    return lines


# ----------------------------------------------------------- what was found: summary.json, page.html and the picture

NO_WAY_OF_ITS_OWN = (BASELINE, CONTROL, "planted")  # not for a reader to choose


# -------------------------------------------------------------------------------------------------------- the verdicts


def alike(run, base, way):
    """Whether two runs of one seed are a pair. The control starts from other weights, and so does --dtype."""
    same_weights = way == CONTROL or "--dtype" in WAYS[way].options or run["initial_weights"] == base["initial_weights"]
    return same_weights and run["first_batch"] == base["first_batch"]


def pairs(rows, task, way):
    """{seed: (run, baseline)}; of several machines that have a seed the first, so that each seed counts once."""
    finished = [row for row in rows if row["task"] == task and row["status"] == "finished"]
    bases = {(row["seed"], row["device"], row["code"]): row for row in finished if row["way"] == BASELINE}
    found = {}
    for run in finished:
        base = bases.get((run["seed"], run["device"], run["code"]))
        if run["way"] == way and base and alike(run, base, way):
            found.setdefault(run["seed"], (run, base))
    return dict(sorted(found.items()))


def judged(found, measure, margin):
    """tools.paired's verdict over the pairs, with the means and whether a difference is for the better or the worse."""
    values, baseline = ([run["measures"][measure] for run in runs] for runs in zip(*found.values(), strict=True))
    result = paired.judge(baseline, values, margin)
    worse = "lower" if measure == "gain" else "higher"
    kinds = {"equal": "equal", "unknown": "unknown", worse: "worse"}
    return result | {
        "mean": statistics.fmean(values),
        "baseline_mean": statistics.fmean(baseline),
        "kind": kinds.get(result["kind"], "better"),
    }


def result_of(rows, kind, task, way):
    """All that is known of one way in one task on one kind of machine, or None if it never ran."""
    own = [row for row in rows if row["task"] == task and row["way"] == way]
    found = pairs(rows, task, way)
    failed = [row for row in own if row["status"] == "failed" or (row["status"] == "refused" and not found)]
    if not found and not failed:
        return None
    runs = [run for run, _ in found.values()]
    result = {"kind": kind, "task": task, "way": way, "config": WAYS[way].config, "options": list(WAYS[way].options)}
    failed = [{key: row[key] for key in ("seed", "device", "status", "error")} for row in failed]
    result |= {"seeds": list(found), "failed": failed, "measures": {}}
    if not runs:
        return result
    names = [TASKS[task].measure, *(name for name in ("rare_loss", "accuracy") if name in runs[0]["measures"])]
    return result | {
        "bytes_per_parameter": statistics.fmean(run["bytes_per_parameter"]["total"] for run in runs),
        "parameters": runs[0]["parameters"],
        "linear": runs[0]["linear"],
        "emulated": any(run["emulated"] for run in runs),
        "summary": runs[0]["summary"],
        "measures": {name: judged(found, name, TASKS[task].margin) for name in names},
    }


def results(rows):
    for kind in ("GPU", "CPU"):
        here = [row for row in rows if kind_of(row["device"]) == kind]
        for task in TASKS:
            for way in WAYS:
                if result := result_of(here, kind, task, way):
                    yield result


def summary(rows, left):
    """What summary.json holds."""
    devices = defaultdict(int)
    for row in rows:
        devices[row["device"]] += 1
    return {
        "schema_version": 1,
        "command": "python benchmarks/study.py page",
        "date": max(row["date"] for row in rows),
        "written": datetime.date.today().isoformat(),
        "device": ", ".join(devices),
        "runs": dict(devices),
        "versions": rows[-1]["versions"],
        "tasks": {name: {"question": task.question, "measure": task.measure, "margin": task.margin,
                         "recipe": task.recipe} for name, task in TASKS.items()},
        "results": list(results(rows)),
        "left": [dict(zip(("task", "runs", "hours", "command"), line, strict=True)) for line in left],
        "absent": ABSENT,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------- words and tables


def main_measure(result):
    return result["measures"].get(TASKS[result["task"]].measure)


def said(result):
    """One cell: the difference with its interval, and the verdict in a word."""
    measure = main_measure(result)
    if measure is None:
        return result["failed"][0]["status"]
    if result["way"] == BASELINE:
        return f"{TASKS[result['task']].measure} {measure['mean']:.4g}"
    words = {"equal": "equal", "better": "better", "worse": "worse"}.get(measure["kind"])
    if words is None:
        words = "cannot tell" if measure["pairs"] >= paired.FEWEST else f"{measure['pairs']} of {SEEDS} seeds"
    lost = f"; {len(result['failed'])} failed" if result["failed"] else ""
    return f"{report.difference(measure)}: {words}{lost}"


def by_way(found):
    """[(way, {task: result})], in the order of the plan."""
    grouped = defaultdict(dict)
    for result in found:
        grouped[result["way"]][result["task"]] = result
    return [(way, grouped[way]) for way in WAYS if way in grouped]


def size_of(of_tasks):
    """Bytes per parameter: `6.2`, or `6.2 to 7.7` where the tasks' models have other shares of Linear layers."""
    sizes = sorted(f"{r['bytes_per_parameter']:.1f}" for r in of_tasks.values() if "bytes_per_parameter" in r)
    sizes.sort(key=float)
    if not sizes:
        return "-"
    return sizes[0] if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"


def table(found):
    """(heads, rows): a row for each way, a column for each task."""
    tasks = [task for task in TASKS if any(result["task"] == task for result in found)]
    rows = []
    for way, of_tasks in by_way(found):
        cells = [said(of_tasks[task]) if task in of_tasks else "-" for task in tasks]
        rows.append([way, size_of(of_tasks), *cells])
    return ["way", "B/param", *tasks], rows


def rare_table(found):
    """(heads, rows) of the ways with enough pairs, or None where there is none."""
    rows = []
    for result in found:
        rare = result["measures"].get("rare_loss")
        if rare and rare["pairs"] >= paired.FEWEST:
            verdict = "baseline" if result["way"] == BASELINE else rare["verdict"]
            rows.append([result["way"], f"{rare['mean']:.4g}", report.difference(rare), verdict])
    return (["way", "loss over rare tokens", "against bf16", "verdict"], rows) if rows else None


def failures(found):
    return [[one["way"], one["task"], failed["seed"], failed["error"]] for one in found for failed in one["failed"]]


def seen(found):
    """Whether the study sees what is planted: [(way, words)]."""
    words = {result["way"]: said(result) for result in found if result["task"] == "words"}
    return [(way, words[way]) for way in ("planted", "o2_round_to_nearest", "o2") if way in words]


def answer(found):
    """The study in a few lines: [(verdict, ways)] of the task that the picture shows, then what is worse in others."""
    shown = [result for result in found if result["task"] == PICTURE and main_measure(result)]
    whole = next(result["bytes_per_parameter"] for result in shown if result["way"] == BASELINE)
    judged_ways = [result for result in shown if main_measure(result)["pairs"] >= paired.FEWEST]

    def named(*kinds):
        ways = [result for result in judged_ways if main_measure(result)["kind"] in kinds]
        ways = [result for result in ways if result["way"] not in NO_WAY_OF_ITS_OWN]
        ways.sort(key=lambda result: result["bytes_per_parameter"])
        sizes = (f"{result['way']} ({result['bytes_per_parameter']:.1f} bytes per parameter" for result in ways)
        apart = (f"{report.percent(main_measure(result)['relative'])})" for result in ways)
        return ", ".join(map(", ".join, zip(sizes, apart, strict=True)))

    lines = [
        (f"Loss equal to bf16's ({whole:.0f} bytes per parameter) within the margin:", named("equal")),
        ("Lower:", named("better")),
        ("Higher:", named("worse")),
        ("Cannot tell:", named("unknown")),
        *((f"{TASKS[task].question}, worse:", ways) for task, ways in worse_elsewhere(found)),
    ]
    return [(what, ways) for what, ways in lines if ways]


def worse_elsewhere(found):
    """Yields (task, its ways that are judged worse) of the tasks that the picture does not show."""
    for task in TASKS:
        ways = [result for result in found if result["task"] == task != PICTURE and main_measure(result)]
        ways = [result for result in ways if main_measure(result).get("kind") == "worse"]
        ways.sort(key=lambda result: -abs(main_measure(result)["relative"]))
        named = (f"{result['way']} ({report.percent(main_measure(result)['relative'])})" for result in ways)
        yield task, ", ".join(named)


# ----------------------------------------------------------------------------------------------------------- pictures


def cost_and_saving(found):
    """The study in one picture: how much memory a way takes, and beside it what it does to the held-out loss."""
    from matplotlib.ticker import MaxNLocator

    rows = sorted(found, key=lambda result: (result["bytes_per_parameter"], main_measure(result)["relative"]))
    margin = 100 * TASKS[rows[0]["task"]].margin
    colours = {"equal": page.colour(2), "better": page.colour(0), "worse": page.colour(1), "unknown": page.DIM}

    def draw(figure, narrow):
        page.height(figure, 100 + (44 if narrow else 27) * len(rows))
        left, right = figure.subplots(1, 2, width_ratios=(1, 2))
        size = [result["bytes_per_parameter"] for result in rows]
        left.barh(range(len(rows)), size, 0.4 if narrow else 0.62, color=page.colour(0), alpha=0.55, lw=0)
        for i, value in enumerate(size):
            left.text(value + 0.2, i, f"{value:.1f}", va="center", color=page.DIM, fontsize=10)
        left.set_xlim(0, max(size) * 1.2)
        left.xaxis.set_major_locator(MaxNLocator(3))
        left.set_xlabel("bytes/param" if narrow else "bytes per parameter")
        page.named(left, [f"{result['way']}: {WAYS[result['way']].note}" for result in rows], narrow)
        ends = [[100 * value for value in main_measure(result)["interval"]] for result in rows]
        edge = 1.05 * max(4 * margin, *(abs(end) for pair in ends for end in pair if abs(end) < 8 * margin))
        right.axvspan(-margin, margin, color=page.RULE, alpha=0.6, lw=0)
        right.axvline(0, color=page.DIM, lw=1)
        for i, (result, (low, high)) in enumerate(zip(rows, ends, strict=True)):
            measure = main_measure(result)
            at, mean = colours[measure["kind"]], 100 * measure["relative"]
            if abs(mean) > edge:
                sign = 1 if mean > 0 else -1
                right.plot(sign * edge, i, ">" if mean > 0 else "<", color=at, ms=8, clip_on=False)
                right.text(sign * edge * 0.93, i, f"{mean:+.1f}%", ha="right" if mean > 0 else "left", va="center",
                           color=at, fontsize=10)  # fmt: skip
                continue
            right.plot([max(low, -edge), min(high, edge)], [i, i], color=at, lw=3, solid_capstyle="butt")
            right.plot(mean, i, "o", color=at, ms=7)
        right.set_xlim(-edge, edge)
        right.xaxis.set_major_locator(MaxNLocator(4 if narrow else 9))
        right.set_xlabel(
            "loss, %" if narrow else "held-out loss against bf16, %, with 95% interval; shaded: the margin"
        )
        page.named(right, [""] * len(rows), False)
        right.set_ylim(left.get_ylim())
        for name, at in LEGEND:
            right.plot([], [], "o-", color=at, lw=3, ms=7, label=name)
        figure.legend(loc="outside upper right", ncols=2 if narrow else 4, frameon=False, fontsize=11)

    return draw


LEGEND = [("equal within the margin", page.colour(2)), ("better", page.colour(0)), ("worse", page.colour(1)),
          ("cannot tell", page.DIM)]  # fmt: skip
CAPTION = (
    "Memory of each way to train, of weights, gradients and optimizer state (left), and what it does to the held-out "
    "loss (right), mean over pairs of one seed with its 95% interval; shaded: the margin of {margin}. Task {task}: "
    "{question}."
)


def caption_of(task):
    margin = paired.percent(TASKS[task].margin)
    return CAPTION.format(margin=margin, task=task, question=TASKS[task].question.lower())


def task_sections(found):
    """A section for each task: a picture of the intervals, and the numbers."""
    for task in TASKS:
        own = [result for result in found if result["task"] == task and result["way"] != BASELINE]
        drawn = []
        for result in own:
            measure = main_measure(result)
            if measure and measure["interval"]:
                at = page.DIM if result["way"] == CONTROL else page.colour(0)
                ends = [100 * end for end in (measure["relative"], *measure["interval"])]
                star = "*" if abs(ends[0]) > 800 * TASKS[task].margin else ""
                drawn.append((result["way"] + star, *ends, at))
        if not own:
            continue
        parts = [page.words(f"{TASKS[task].question}. Measure: {TASKS[task].measure}.")]
        if drawn:
            caption = f"{task}: difference of {TASKS[task].measure} to bf16, 95% interval; shaded: the margin."
            parts.append(page.picture(page.intervals(drawn, 100 * TASKS[task].margin), caption))
        rows = [[result["way"], len(result["seeds"]), said(result), (main_measure(result) or {}).get("verdict", "-")]
                for result in own]  # fmt: skip
        yield page.section(task, *parts, page.table(["way", "pairs", "difference", "verdict"], rows))


def whole_page(report_):
    found = [result for result in report_["results"] if result["kind"] == shown_kind(report_)]
    parts = []
    if at_picture(found):
        drawn = page.picture(cost_and_saving(at_picture(found)), caption_of(PICTURE))
        parts.append(page.section("Memory and loss", drawn))
    parts.append(page.section("Every way in every task", page.table(*table(found))))
    parts.append(page.section("Does it see a fault?", page.pairs(seen(found))))
    parts += task_sections(found)
    if rare := rare_table(found):
        parts.append(page.section("Rare words", page.table(*rare)))
    if failures(found):
        rows = page.table(["way", "task", "seed", "error"], failures(found))
        parts.append(page.section("Refused, or ended with an error", rows))
    left = [[line["task"], line["runs"], f"{line['hours']:.1f}", line["command"]] for line in report_["left"]]
    if left:
        heads = ["task", "runs", "hours on two cores", "command"]
        parts.append(page.section("Not run", page.table(heads, left)))
    notes = [
        "Every run of a seed has the weights, samples and order of bf16's run of that seed; the two are a pair.",
        "Equal: the whole interval is inside the margin. Better or worse: it is on one side of zero. Cannot tell: "
        "neither. For `gain`, what a fine-tuned model gains, less is worse.",
        "FP8 is emulated on a CPU: its values are those of FP8, its speed says nothing and is not shown.",
        f"{report_['device']}; {', '.join(f'{name} {v}' for name, v in report_['versions'].items() if v)}; "
        f"{report_['date']}.",
    ]
    return page.whole("What is each precision worth?", report_["command"], answer(found), parts, notes)


def shown_kind(report_):
    """GPUs if any ran there, else CPUs: a page is of one kind of machine."""
    return report_["results"][0]["kind"]


def at_picture(found):
    """The results that the one picture shows: ways that one may choose, with enough pairs for a verdict."""
    ways = [result for result in found if result["task"] == PICTURE and result["way"] not in NO_WAY_OF_ITS_OWN]
    return [result for result in ways if (main_measure(result) or {}).get("pairs", 0) >= paired.FEWEST]


def in_docs(figures):
    """The tables of docs/study.md."""
    found = [result for result in figures["results"] if result["kind"] == shown_kind(figures)]
    heads, rows = table(found)
    rows = [[f"`{way}`", *cells] for way, *cells in rows]
    parts = [f"{came_from(figures)}; {sum(figures['runs'].values())} runs:", report.table(heads, rows)]
    if rare := rare_table(found):
        heads, rows = rare
        shown = [[f"`{way}`", *cells] for way, *cells in rows if not cells[-1].startswith("equal")]
        equal = ", ".join(f"`{way}`" for way, *cells in rows if cells[-1].startswith("equal"))
        parts += [f"Rare words, of the task `words`; equal to bf16 within the margin: {equal}."]
        parts += [report.table(heads, shown)]
    if failed := failures(found):
        rows = [[f"`{way}`", f"`{task}`", str(seed), error] for way, task, seed, error in failed]
        parts += ["Refused, or ended with an error:", report.table(["way", "task", "seed", "error"], rows)]
    rows = [[f"`{line['task']}`", str(line["runs"]), f"{line['hours']:.1f}", f"`{line['command']}`"]
            for line in figures["left"]]  # fmt: skip
    if rows:
        parts += ["Not run:", report.table(["task", "runs", "hours on two cores, estimated", "command"], rows)]
    return "\n\n".join(parts)


def tensors(figures):
    """The table of benchmarks/study_tensors.py for docs/study.md."""
    heads = ["task", "way", "Linear weights: along bf16's way", "distance", "other weights: along", "distance"]
    rows = []
    for row in figures["rows"]:
        if row["way"] != BASELINE:
            numbers = [row[part][key] for part in ("linear", "others") for key in ("along", "distance")]
            rows.append([f"`{row['task']}`", f"`{row['way']}`", *(f"{value:.2f}" for value in numbers)])
    return f"{came_from(figures)}; seed 0:\n\n{report.table(heads, rows)}"


def write(rows, left, folder):
    if not rows:
        raise SystemExit(f"no rows in {folder.name}: python benchmarks/study.py run")
    report_ = summary(rows, left)
    (folder / "summary.json").write_text(json.dumps(report_, indent=1) + "\n")
    (folder / "page.html").write_text(whole_page(report_))
    found = [result for result in report_["results"] if result["kind"] == shown_kind(report_)]
    if at_picture(found):
        picture = page.standalone(cost_and_saving(at_picture(found)), caption_of(PICTURE))
        (folder / "memory_and_loss.svg").write_text(picture)
    print(f"wrote {', '.join(sorted(path.name for path in folder.iterdir()))}")


def main():
    parser = arguments(__doc__)
    parser.add_argument("what", choices=("run", "left", "page"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--hours", type=float, default=float("inf"), help="begin no run after so long")
    workers = 1 if torch.cuda.is_available() else os.cpu_count() or 2
    parser.add_argument("--workers", type=int, default=workers, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="of each run, on a CPU")
    args = parser.parse_args()
    if args.what == "run":
        return run(args)
    if args.what == "page":
        rows = read_rows()
        return write(rows, left(rows, this_device(), code_of_study()), RESULTS)
    for task, count, hours, command in left(read_rows(), this_device(), code_of_study()):
        print(f"{task}: {count} runs, about {hours:.1f} hours on two cores: {command}")
    for way, why in ABSENT.items():
        print(f"{way}: {why}")


if __name__ == "__main__":
    main()
