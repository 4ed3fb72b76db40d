"""Which config for this model? The same training under each of them, over several seeds, judged against noise.

    ./launch.sh compare single_bf16 single_fp8 single_fp8_msamp_o2 -- vit --max_steps 150
    ./launch.sh compare runs/a runs/b ...               over finished runs, nothing is launched

What stands behind `--` is what would stand behind CONFIG in `./launch.sh CONFIG ...`. The first config is the baseline:
its batch is the global batch of all. Every run is a launch of its own, in runs/compare-<recipe>-<hash of what is
trained>/<config>-seed<k>; interrupted, the same command goes on where it stopped, and finished runs are not repeated.

The control is the baseline against itself with other seeds. Its spread (max - min over all the baseline's seeds) is
what chance alone does, and a difference inside it is no measurable difference. Outside it, fewer than 3 seeds still say
nothing. A row with a run that failed, or whose record lacks its evidence, has no numbers: what is left of it would be a
selection. Runs that differ in more than the config are refused, and the difference is named.

Writes report.md, report.csv, report.json and report.html. Everything in them comes from run.json and metrics.jsonl.
Exit code 0; 1 where --assert-close does not hold; 2 where the comparison is refused.
"""

import argparse
import ctypes
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from shared import plan, rules  # noqa: E402
from shared.args import Refused  # noqa: E402
from tools import report  # noqa: E402

SEEDS_TO_SAY = 3  # fewer values of the baseline cannot tell a difference from noise
# Options that may differ: they change nothing that is computed, or are compared as the global batch and the seed.
FREE = {"output_dir", "resume_from_checkpoint", "logging_steps", "eval_steps", "save_steps", "save_total_limit",
        "report_to", "dataloader_num_workers", "per_device_eval_batch_size", "seed", "per_device_train_batch_size",
        "gradient_accumulation_steps"}  # fmt: skip
OWN = ("--seed", "--output_dir", "--resume_from_checkpoint")  # what this tool says to the recipe


# ------------------------------------------------------------------------------------------------ reading finished runs


def read(folder):
    """A run from its folder: its record, its metrics, and why it cannot become a number (or None)."""
    folder = Path(folder)
    try:
        record = json.loads((folder / "run.json").read_text())
        lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
        metrics = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        return {"folder": folder, "record": None, "metrics": [], "problem": f"no record: {error}"}
    return {"folder": folder, "record": record, "metrics": metrics, "problem": problem(record, metrics)}


def problem(record, metrics):
    """What is missing for this run to be a number."""
    if record.get("status") != "finished" or record.get("error"):
        return f"{record.get('status')}: {record.get('error') or 'it did not finish'}"
    evidence, final = record.get("evidence") or {}, record.get("final") or {}
    lacks = [key for key in ("truth", "bytes_per_parameter", "initial_weights") if not evidence.get(key)]
    lacks += [key for key in ("data_fingerprint", "global_batch_size", "code_sha256") if not record.get(key)]
    lacks += ["throughput"] if not (record.get("throughput") or {}).get("step_seconds_median") else []
    lacks += ["final metrics"] if not final.get("metrics") else []
    if lacks:
        return f"lacks evidence: {', '.join(lacks)}"
    if record["plan"]["precision"] == "fp8" and not evidence.get("linear_converted"):
        return "lacks evidence: asked for fp8, no Linear is recorded as converted"
    if final["step"] != record["args"]["max_steps"]:
        return f"lacks evidence: {final['step']} of {record['args']['max_steps']} steps are recorded"
    last = metrics[-1] if metrics else {}
    wrong = [name for name, value in final["metrics"].items() if last.get(name) != value or not math.isfinite(value)]
    return f"run.json and metrics.jsonl disagree on {', '.join(wrong)}" if wrong else None


def label(record, vary=(), processes=False):
    """The row a run belongs to: its config, and what was allowed to vary."""
    how = record["plan"]
    name = record["config"]["name"] or f"{how['strategy']}_{how['precision']}"
    name += f" x{how['num_processes']}" if processes else ""
    return " ".join([name, *(f"{key}={value(record, key)}" for key in vary)])


def value(record, key):
    return record[key] if key == "global_batch_size" else record["args"].get(key)


def fixed(record, vary):
    """Everything that must be equal for two runs to differ in the config only, flat."""
    flat = {key: value for key, value in record["args"].items() if key not in FREE}
    flat |= {f"version of {key}": value for key, value in record["versions"].items()}
    flat |= {key: record.get(key) for key in ("recipe", "global_batch_size", "data_fingerprint", "device_name")}
    flat["code of the recipe, shared/ and amp8/"] = record["code_sha256"]
    return {key: value for key, value in flat.items() if key not in vary}


def check_alike(runs, vary):
    """Refuses runs that differ in more than the config, naming each difference once."""
    if not runs:
        return
    first, lines, texts, weights = runs[0], {}, {}, {}
    wanted = fixed(first["record"], vary)
    for run in runs:
        record = run["record"]
        here = fixed(record, vary)
        for key in dict.fromkeys([*wanted, *here]):
            if here.get(key) != wanted.get(key):
                then, now = short(wanted.get(key)), short(here.get(key))
                lines.setdefault(key, f"{key}: {then} in {first['folder']}, {now} in {run['folder']}")
        row, seed, began = label(record, vary, True), record["seed"], record["evidence"]["initial_weights"]
        if texts.setdefault(row, record["config"]["sha256"]) != record["config"]["sha256"]:
            lines.setdefault(row, f"text of {row}: not the same in all of its runs")
        if weights.setdefault(seed, began) != began and not lines:  # else it follows from what is named
            lines["initial weights"] = f"initial weights of seed {seed}: {run['folder']} began with others"
    if lines:
        raise Refused("these runs differ in more than the config:\n  " + "\n  ".join(lines.values())
                      + "\ncompare runs made alike, or name what may differ: --vary NAME")  # fmt: skip


def short(value):
    return f"{value[:12]}..." if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) else value


# ----------------------------------------------------------------------------------------------------- numbers of a row


def verdict(difference, spread, values):
    """What a difference to the baseline is worth. `values`: how many seeds of the baseline the spread is over."""
    if abs(difference) <= spread:
        return "no measurable difference"
    if values < SEEDS_TO_SAY:
        return f"needs {SEEDS_TO_SAY} seeds of the baseline to say"
    return "higher" if difference > 0 else "lower"


def over_seeds(values):
    return {"values": values, "mean": statistics.mean(values), "spread": max(values) - min(values)}


def measures(run):
    """name -> number: what is compared with a verdict."""
    record = run["record"]
    throughput = record["throughput"]
    return {
        **record["final"]["metrics"],
        "step_seconds": throughput["step_seconds_median"],
        "samples_per_second": throughput["samples_per_second_median"],
        "peak_memory_bytes": record["peak_memory_bytes"],
    }


def curves(runs):
    """name -> [[step, mean, min, max]] over seeds, of the training loss and of every held-out metric."""
    points = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for row in run["metrics"]:
            for name in row.keys() - {"step", "grad_norm", "learning_rate", "samples"}:
                points[name][row["step"]].append(row[name])
    return {
        name: [[step, statistics.mean(v), min(v), max(v)] for step, v in sorted(steps.items()) if len(v) == len(runs)]
        for name, steps in sorted(points.items())
    }


def row_of(name, runs, seeds):
    """A row of the report: what all its runs say, or why they say nothing."""
    row = {"config": name, "control": False, "seeds": sorted(seeds), "error": None}
    missing = sorted(seeds - {run["seed"] for run in runs})
    errors = [f"seed {run['seed']}: {run['problem']}" for run in runs if run["problem"]]
    errors += [f"no run with seed {', '.join(map(str, missing))}"] if missing and not errors else []
    if errors:
        return row | {"error": "; ".join(errors)}
    record = runs[0]["record"]
    evidence = record["evidence"]
    numbers = [measures(run) for run in runs]
    utilization = [run["record"]["gpu_utilization_mean"] for run in runs]
    p90 = [run["record"]["throughput"].get("step_seconds_p90") for run in runs]
    return row | {
        "truth": evidence["truth"],
        "emulated": record["plan"]["emulated"],
        "rehearsal": record["plan"]["rehearsal"],
        "num_processes": record["plan"]["num_processes"],
        "per_device_train_batch_size": record["args"]["per_device_train_batch_size"],
        "gradient_accumulation_steps": record["args"]["gradient_accumulation_steps"],
        "parameters": evidence.get("parameters"),
        "linear_converted": evidence["linear_converted"],
        "linear_total": evidence["linear_total"],
        "measures": {key: over_seeds([n[key] for n in numbers]) for key in numbers[0]},
        "bytes_per_parameter": evidence["bytes_per_parameter"],
        "wire_bytes_per_step": evidence["wire_bytes_per_step"],
        "gpu_utilization": statistics.mean(utilization) if None not in utilization else None,
        "step_seconds_p90": statistics.mean(p90) if None not in p90 else None,
        "estimate": None,
        "curves": curves(runs),
    }


def judge(rows, control):
    """Adds to every row its difference to the baseline (rows[0]) and what that is worth."""
    baseline = rows[0]
    if baseline["error"]:
        return
    for name, found in baseline["measures"].items():
        noise = found["values"] + (control["measures"][name]["values"] if control and not control["error"] else [])
        spread = max(noise) - min(noise)
        for row in rows:
            if row["error"] or row is baseline:
                continue
            here = row["measures"][name]
            here["difference"] = here["mean"] - found["mean"]
            here["relative"] = here["difference"] / found["mean"] if found["mean"] else None
            here["verdict"] = verdict(here["difference"], spread, len(noise))
            here["control_spread"] = spread
            if row["emulated"] and name in ("step_seconds", "samples_per_second"):
                here["verdict"] = "emulated"  # FP8 in software: its time says nothing about FP8
                here["difference"] = here["relative"] = None


def make(runs, command, baseline=None, vary=(), price=None, seeds=None, guess=lambda record: None):
    """The report, from runs that `read` returned. seeds: those of every row; the baseline's others are the control.
    guess: from a record to its memory estimate."""
    check_alike([run for run in runs if not run["problem"]], vary)
    processes = defaultdict(set)
    for run in runs:
        if run["record"]:
            processes[label(run["record"], vary)].add(run["record"]["plan"]["num_processes"])
    groups = {}
    for run in runs:
        record = run["record"]
        if record is None and (launched := re.fullmatch(r"(.*)-seed(\d+)", run["folder"].name)):
            name, run["seed"] = launched[1], int(launched[2])  # it ended before it had a record
        elif record is None:
            name, run["seed"] = str(run["folder"]), None
        else:
            name, run["seed"] = label(record, vary, len(processes[label(record, vary)]) > 1), record["seed"]
        if any(run["seed"] == other["seed"] for other in groups.setdefault(name, [])):
            raise Refused(f"two runs of {name} with seed {run['seed']}: {run['folder']} is one too many")
        groups[name].append(run)
    first = baseline or next(iter(groups))
    if first not in groups:
        raise Refused(f"no runs of the baseline {first}: there are {', '.join(groups)}")
    groups = {first: groups.pop(first)} | groups
    own = {run["seed"] for run in groups[first]}
    others = {run["seed"] for name, group in groups.items() if name != first for run in group} - {None}
    seeds = seeds or others or set(sorted(own - {None})[: max(1, len(own) // 2)])
    split = [run for run in groups[first] if run["seed"] in seeds]
    extra = [run for run in groups[first] if run["seed"] not in seeds]
    rows = [row_of(first, split, seeds)]
    control = row_of(first, extra, own - seeds) | {"control": True} if extra else None
    rows += [control] if control else []
    rows += [row_of(name, group, seeds) for name, group in groups.items() if name != first]
    judge(rows, control)
    sound = next((run["record"] for run in runs if not run["problem"]), None)
    made = {
        "schema_version": 1,
        "command": command,
        "baseline": first,
        "date": max((run["record"]["finished"][:10] for run in runs if not run["problem"]), default=None),
        "device": sound and sound["device_name"],
        "versions": sound and sound["versions"],
        "git_commit": sound and sound["git_commit"],
        "recipe": sound and sound["recipe"],
        "global_batch_size": sound and sound["global_batch_size"],
        "args": sound and {key: value for key, value in sound["args"].items() if key not in FREE and key not in vary},
        "steps_measured": sound and sound["throughput"]["steps_measured"],
        "steps_excluded": sound and sound["throughput"]["steps_excluded"],
        "price_per_hour": price,
        "rows": rows,
    }
    for row in rows:
        if not row["error"]:
            group = groups[first if row["control"] else row["config"]]
            row["estimate"] = guess(group[0]["record"])
        if price and not row["error"] and not row["emulated"]:
            rate = row["measures"]["samples_per_second"]["mean"]
            row["samples_per_unit_of_price"] = rate * 3600 / price
    return made


def estimator(folder):
    """A function from a run's record to what tools/estimate.py says of it, in bytes per process, or None where it can
    say nothing. What it said is kept in `folder`: a trace takes seconds, and says the same each time."""
    file = Path(folder) / "estimates.json"

    def guess(record):
        known = json.loads(file.read_text()) if file.exists() else {}
        recipe, text = ROOT / "recipes" / f"{record['recipe']}.py", record["config"]["text"]
        free = FREE - {"per_device_train_batch_size", "gradient_accumulation_steps"}
        options = {name: value for name, value in record["args"].items() if name not in free and value is not None}
        by = (ROOT / "tools" / "estimate.py").read_text(), record["code_sha256"]
        key = sha256(repr((text, options, record["plan"]["num_processes"], by)).encode()).hexdigest()
        if key not in known and text and recipe.is_file():
            words = [f"--{'' if value is not False else 'no-'}{name}" + ("" if isinstance(value, bool) else f"={value}")
                     for name, value in options.items()]  # fmt: skip
            with tempfile.TemporaryDirectory() as temporary:
                config = Path(temporary, f"{record['config']['name']}.yml")
                config.write_text(text)
                command = [sys.executable, str(ROOT / "tools" / "estimate.py"), "--json", str(config)]
                command += ["--num_processes", str(record["plan"]["num_processes"]), "--", str(recipe), *words]
                said = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
                known[key] = json.loads(said[-1])["configs"].get(config.stem) if said else None
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(known, indent=1) + "\n")
        return known.get(key)

    return guess


def assert_close(made, name, rtol):
    """Lines that say which rows' final metrics are further than rtol from the row `name`'s."""
    rows = {row["config"]: row for row in reversed(made["rows"]) if not row["control"]}
    if name not in rows:
        raise Refused(f"--assert-close {name}: there is no such row, only {', '.join(rows)}")
    if rows[name]["error"]:
        return [f"{name}: {rows[name]['error']}"]
    lines = []
    for other, row in rows.items():
        if row["error"]:
            lines.append(f"{other}: {row['error']}")
            continue
        for key in row["measures"].keys() - {"step_seconds", "samples_per_second", "peak_memory_bytes"}:
            here, wanted = row["measures"][key]["mean"], rows[name]["measures"][key]["mean"]
            if not math.isclose(here, wanted, rel_tol=0, abs_tol=rtol * abs(wanted)):
                lines.append(f"{other}: {key} {here:.6g} is further than {rtol:g} from {name}'s {wanted:.6g}")
    return lines


# ------------------------------------------------------------------------------------------------------------ launching


def split_launch(words):
    """(options of accelerate launch, recipe, its options): as launch.sh reads what stands behind CONFIG."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        alone = "=" in words[at] or words[at].startswith("--no_")
        at += 1 if alone or words[at] in ("--multi_gpu", "--debug", "--quiet", "-q") else 2
    if at >= len(words):
        raise Refused("which recipe? ./launch.sh compare single_bf16 single_fp8 -- vit --max_steps 100")
    return words[:at], words[at], words[at + 1 :]


def option(words, name, default=None):
    """The last value of `--name` in a command line, spelled with underscores or dashes."""
    found = default
    for word, following in zip(words, [*words[1:], None], strict=False):
        flag, _, inline = word.partition("=")
        if flag.replace("-", "_") == f"--{name}".replace("-", "_"):
            found = inline or following
    return found


def replicas(file, options, gpus):
    """Processes of a launch that see different samples."""
    config = yaml.safe_load(file.read_text())
    if str(config.get("distributed_type")) == "NO":
        return 1
    count = int(option(options, "num_processes") or gpus or config.get("num_processes", 1))
    return count // int((config.get("parallelism_config") or {}).get("parallelism_config_tp_size", 1))


def batches(configs, words, gpus):
    """config -> per-device batch, so that all have the baseline's global batch."""
    options, recipe, rest = split_launch(words)
    source = recipe_file(recipe).read_text()
    default = re.search(r"^ +per_device_train_batch_size: int = (\d+)", source, re.M)
    per_device = int(option(rest, "per_device_train_batch_size", default and default.group(1)))
    counts = {name: replicas(file, options, gpus) for name, file in configs.items()}
    total = per_device * next(iter(counts.values()))
    odd = [name for name, count in counts.items() if total % count]
    if odd:
        raise Refused(
            f"the baseline's {total} samples per step don't divide by the {counts[odd[0]]} processes of {odd[0]}: "
            "choose another --per_device_train_batch_size"
        )
    return {name: total // count for name, count in counts.items()}


def recipe_file(name):
    file = Path(name) if Path(name).is_file() else ROOT / "recipes" / f"{name.removesuffix('.py')}.py"
    if not file.is_file():
        raise Refused(f"no recipe {name}: ./launch.sh ls lists them")
    return file


def config_file(name):
    file = Path(name) if Path(name).is_file() else ROOT / "accelerate_configs" / f"{name.removesuffix('.yml')}.yml"
    if not file.is_file():
        raise Refused(f"no config {name}: ./launch.sh ls lists them")
    return file


def matches(run, file, recipe):
    """Whether a finished run is what would be launched now: same config, code and packages."""
    record = run["record"]
    if run["problem"] or record["config"]["sha256"] != sha256(file.read_bytes()).hexdigest():
        return False
    here = {name: metadata.version(name) for name in record["versions"].keys() - {"python", "cuda"}}
    return record["code_sha256"] == plan.code_sha256(recipe) and here.items() <= record["versions"].items()


def die_with_me():
    """In the child, before it becomes the launcher: killed when this process is gone, even by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; the workers see their launcher go


def wait_for_others(folder, seconds=60):
    """A run that an earlier, killed comparison has left may still be writing its last checkpoint there."""
    end = time.monotonic() + seconds
    while left := [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])]:
        if time.monotonic() > end:
            raise Refused(f"process {left[0].pid} still works in {folder}: end it first")
        time.sleep(0.2)


def launch_all(configs, words, folder, seeds, control):
    """Every run that is not there yet, one after another; returns all of them, read back from their folders."""
    options, recipe, rest = split_launch(words)
    file, per_device = recipe_file(recipe), batches(configs, words, rules.machine()["devices"])
    baseline = next(iter(configs))
    wanted = [(name, seed) for seed in range(seeds) for name in configs]  # seeds outside: the machine's drift hits all
    wanted += [(baseline, seed) for seed in range(seeds, seeds + control)]
    missing = [(n, s) for n, s in wanted if not matches(read(folder / f"{n}-seed{s}"), configs[n], file)]
    print(
        f"{len(wanted)} runs, {len(wanted) - len(missing)} of them finished before; in {os.path.relpath(folder)}",
        flush=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"VIRTUAL_ENV": sys.prefix, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    begun = time.monotonic()
    for done, (name, seed) in enumerate(missing):
        out = folder / f"{name}-seed{seed}"
        wait_for_others(out)
        if out.exists():
            out.rename(out.with_name(f"{out.name}.old-{time.time():.0f}"))
        command = [str(ROOT / "launch.sh"), str(configs[name]), *options, str(file), "--save_steps", "0", *rest]
        command += [
            "--per_device_train_batch_size",
            str(per_device[name]),
            "--seed",
            str(seed),
            "--output_dir",
            str(out),
        ]
        started = time.monotonic()
        with open(f"{out}.log", "w") as log:
            code = subprocess.run(command, env=env, stdout=log, stderr=log, preexec_fn=die_with_me).returncode
        if unread := re.search(r"^error: (.*) \(--help lists the options\)$", Path(f"{out}.log").read_text(), re.M):
            raise Refused(f"{recipe}: {unread[1]}; python {os.path.relpath(file)} --help lists the options")
        now = time.monotonic()
        run = read(out)
        left = (now - begun) / (done + 1) * (len(missing) - done - 1)
        said = run["problem"] and f"{last_words(Path(f'{out}.log'), code)}" or ", ".join(
            f"{key} {value:.4f}" for key, value in run["record"]["final"]["metrics"].items())  # fmt: skip
        until = f"; about {left / 60:.0f} min left" if left else ""
        print(f"[{done + 1}/{len(missing)}] {name} seed {seed}: {said} ({now - started:.0f} s{until})", flush=True)
    runs = [read(folder / f"{name}-seed{seed}") for name, seed in wanted]
    for run in runs:
        log = Path(f"{run['folder']}.log")
        if run["record"] is None and log.exists():
            run["problem"] = last_words(log)
    return runs


def last_words(log, code=None):
    """Why a launch ended, from what it said."""
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    said = [line for line in lines if re.match(r"(refused|error): |[\w.]+\.yml: |\w*Error\b", line)]
    return (said or lines or [f"exit code {code}"])[0 if said else -1][:300]


# ----------------------------------------------------------------------------------------------------------------- main


def arguments(argv):
    parser = argparse.ArgumentParser(prog="./launch.sh compare", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("what", nargs="+", metavar="CONFIG or RUN_FOLDER", help="configs, the first is the baseline; or finished runs")
    add("--seeds", type=int, default=3, help="runs of each config, with seeds 0, 1, ... (default: 3)")
    add("--control", type=int, help="further seeds of the baseline, for the control (default: as many as --seeds)")
    add("--baseline", help="over finished runs: the row to compare with (default: that of the first)")
    add("--vary", action="append", default=[], metavar="OPTION", help="over finished runs: an option that may differ")
    add("--price-per-hour", type=float, help="of the machine: adds samples per unit of that price")
    add(
        "--assert-close",
        metavar="BASELINE",
        help="exit code 1 unless every final metric is within --rtol of this row's",
    )
    add("--rtol", type=float, default=0.01, help="relative (default: 0.01)")
    add("--no-estimate", action="store_true", help="leave the memory estimate out")
    add("--output_dir", "--output-dir", type=Path, help="where launched runs go")
    add(
        "--report", type=Path, help="where the reports go (default: beside launched runs; over finished ones, ./report)"
    )
    return parser.parse_args(argv)


def main(argv):
    left, words = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, None)
    args = arguments(left)
    hidden = ("--output_dir", "--output-dir", "--report")  # say where, not what
    shown = [
        word for before, word in zip(["", *argv], argv, strict=False) if word not in hidden and before not in hidden
    ]
    command = shlex.join(["./launch.sh", "compare", *shown])
    if words is None:
        absent = [name for name in args.what if not Path(name).is_dir()]
        if absent:
            raise Refused(
                f"{absent[0]} is no folder of a run; to launch configs: ./launch.sh compare CONFIG... -- RECIPE"
            )
        runs = [read(name) for name in args.what]
        where = args.report or Path("report")
        guess = {} if args.no_estimate else {"guess": estimator(where)}
        made = make(runs, command, baseline=args.baseline, vary=args.vary, price=args.price_per_hour, **guess)
    else:
        taken = [name for name in OWN if option(words, name.lstrip("-"))]
        if taken or args.vary or args.baseline or args.seeds < 1:
            what = ", ".join(taken) or "--vary, --baseline, --seeds 0"
            raise Refused(f"{what}: not here; the seeds are --seeds, 1 or more, the baseline is the first config")
        configs = {config_file(name).stem: config_file(name) for name in args.what}
        recipe = recipe_file(split_launch(words)[1]).stem
        default = ROOT / "runs" / f"compare-{recipe}-{sha256(shlex.join(words).encode()).hexdigest()[:8]}"
        folder = args.output_dir or default
        control = args.seeds if args.control is None else args.control
        runs = launch_all(configs, words, folder, args.seeds, control)
        where = args.report or folder
        guess = {} if args.no_estimate else {"guess": estimator(folder)}
        made = make(runs, command, price=args.price_per_hour, seeds=set(range(args.seeds)), **guess)
    report.write(made, where)
    print(f"wrote {os.path.relpath(where)}/report.html, report.md, report.csv, report.json")
    wrong = assert_close(made, args.assert_close, args.rtol) if args.assert_close else []
    for line in wrong:
        print(f"not close: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refused as refused:
        print(f"refused: {refused}", file=sys.stderr)
        sys.exit(2)
