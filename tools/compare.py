"""Which config for this model? The same training under each of them, over several seeds, judged in pairs.

    ./launch.sh compare single_bf16 single_fp8 single_fp8_msamp_o2 -- vit --max_steps 150
    ./launch.sh compare single_bf16 single_fp8 --seeds auto --margin 1% -- vit      seeds until there is a verdict
    ./launch.sh compare single_bf16 single_fp8 -- train.py --epochs 1 --seed {seed} a script of your own
    ./launch.sh compare runs/a runs/b ...               over finished runs, nothing is launched

The words after `--` are those after CONFIG in `./launch.sh CONFIG ...`. The first config is the baseline, and all
configs use its global batch. Every run is a separate launch, in runs/compare-<recipe>-<hash of what is
trained>/<config>-seed<k>. After an interruption the same command continues where it stopped and keeps finished runs.

Runs with the same seed are a pair: they share weights, samples and order. The verdict on each measure comes from the
mean of the differences within pairs and its 95% interval (tools/paired.py): equal within the margin, higher, lower, or
cannot tell; the last with the smallest difference that would show and the seeds it would take. `--seeds auto` looks
after 8, 16, ... seeds and stops when every config has a verdict on its loss. Its intervals are wider, so that it is
wrong no more often.

There are two controls. The baseline's own seeds show how much chance alone changes a run. The twin is the baseline
started from weights that differ by one rounding; pairing cannot remove the differences that it shows.

If one run of a row failed, or its record lacks evidence, the row has no numbers, because the other runs would be a
selection. Runs that differ in more than the config are refused, and the message names the difference.

A script of your own is any script that is not a recipe. {seed} in its arguments stands for each seed; without it every
config runs once. The last values of accelerator.log are compared, or the training loss if there are none.

Writes report.md, report.csv, report.json and report.html. Everything in them comes from run.json and metrics.jsonl.
The exit code is 0; 1 if --assert-close does not hold; 2 if the comparison is refused.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from faithful import launcher, machine  # noqa: E402
from shared.args import Refused  # noqa: E402
from tools import cli, find, judge, paired, report  # noqa: E402

OWN = ("--seed", "--output_dir", "--resume_from_checkpoint")  # options that this tool sets itself
SEEDS, MOST = 5, 16  # by default; with --seeds auto, at most


# ------------------------------------------------------------------------------------------------------------ launching


def split_launch(words):
    """Splits the words after `--` like launch.sh: (options of accelerate launch, recipe, its options)."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        alone = "=" in words[at] or words[at].startswith("--no_")
        at += 1 if alone or words[at] in ("--multi_gpu", "--debug", "--quiet", "-q") else 2
    if at >= len(words):
        raise Refused("which recipe? ./launch.sh compare single_bf16 single_fp8 -- vit --max_steps 100")
    return words[:at], words[at], words[at + 1 :]


def replicas(file, options, gpus):
    """The number of processes that see different samples."""
    config = yaml.safe_load(file.read_text())
    count = find.option(options, "num_processes")
    if count is not None and not count.isdigit():
        raise Refused(f"--num_processes {count}: write the number of processes, 1 or more")
    if str(config.get("distributed_type")) == "NO":
        return 1
    count = int(count or gpus or config.get("num_processes", 1))
    return count // int((config.get("parallelism_config") or {}).get("parallelism_config_tp_size", 1))


def batches(configs, words, gpus):
    """{config: per-device batch} with which all have the baseline's global batch. Raises Refused for an option that the
    recipe does not have."""
    options, recipe, rest = split_launch(words)
    per_device = find.parsed(find.recipe(recipe), rest).per_device_train_batch_size
    counts = {name: replicas(file, options, gpus) for name, file in configs.items()}
    total = per_device * next(iter(counts.values()))
    odd = [name for name, count in counts.items() if total % count]
    if odd:
        raise Refused(
            f"the baseline's {total} samples per step don't divide by the {counts[odd[0]]} processes of {odd[0]}: "
            "choose another --per_device_train_batch_size"
        )
    return {name: total // count for name, count in counts.items()}


def matches(run, file, recipe, twin):
    """Whether a finished run has the same config, code and packages as a new launch would have."""
    from faithful.record import code_sha256  # imports torch

    record = run["record"]
    if (
        run["problem"]
        or judge.nudged(run) != twin
        or record["config"]["sha256"] != sha256(file.read_bytes()).hexdigest()
    ):
        return False
    here = {name: metadata.version(name) for name in record["versions"].keys() - {"python", "cuda"}}
    return record["code_sha256"] == code_sha256(recipe) and here.items() <= record["versions"].items()


def die_with_me():
    """Called in the child before it becomes the launcher: it is killed when this process ends, even by kill -9."""
    launcher.end_with_the_parent(signal.SIGKILL)  # the workers end with their launcher


def wait_for_others(folder, seconds=60):
    """Waits for a run of an earlier, killed comparison that may still write its last checkpoint there."""
    end = time.monotonic() + seconds
    while left := [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])]:
        if time.monotonic() > end:
            raise Refused(f"process {left[0].pid} still works in {folder}: end it first")
        time.sleep(0.2)


def launch_all(configs, words, folder, seeds, twin):
    """Launches every missing run, one after another. Returns all runs, read from their folders."""
    options, recipe, rest = split_launch(words)
    file = find.recipe(recipe)
    own = not find.is_recipe(file)
    per_device = {} if own else batches(configs, words, machine.of_driver()["devices"])
    rows = [(name, False) for name in configs]
    rows[1:1] = [(rows[0][0], True)] if twin else []
    wanted = [(*row, seed) for seed in range(seeds) for row in rows]  # a slow phase of the machine hits all
    folders = [folder / f"{name}{'-twin' if nudged else ''}-seed{seed}" for name, nudged, seed in wanted]
    missing = [(*one, out) for one, out in zip(wanted, folders, strict=True)
               if not matches(judge.read(out, one[2]), configs[one[0]], file, one[1])]  # fmt: skip
    print(
        f"{len(wanted)} runs, {len(wanted) - len(missing)} of them finished before; in {os.path.relpath(folder)}",
        flush=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"VIRTUAL_ENV": sys.prefix, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env.pop("FAITHFUL_TWIN", None)
    begun = time.monotonic()
    for done, (name, nudged, seed, out) in enumerate(missing):
        wait_for_others(out)
        if out.exists():
            out.rename(out.with_name(f"{out.name}.old-{time.time():.0f}"))
        command = [str(ROOT / "launch.sh"), str(configs[name]), *options, str(file)]
        if own:
            command += [word.replace("{seed}", str(seed)) for word in rest]
        else:
            command += ["--save_steps", "0", *rest, "--per_device_train_batch_size", str(per_device[name])]
            command += ["--seed", str(seed), "--output_dir", str(out)]
        here = env | ({"FAITHFUL_TWIN": "1"} if nudged else {}) | ({"FAITHFUL_PROJECT_DIR": str(out)} if own else {})
        started = time.monotonic()
        with open(f"{out}.log", "w") as log:
            code = subprocess.run(command, env=here, stdout=log, stderr=log, preexec_fn=die_with_me).returncode
        said = Path(f"{out}.log").read_text()
        if own and (unread := re.search(rf"^(?:usage: )?{re.escape(file.name)}: error: (.*)$", said, re.M)):
            raise Refused(f"{recipe}: {unread[1]}; it was given {shlex.join(rest)}")
        now = time.monotonic()
        run = judge.read(out, seed)
        if run["record"] is None and (name, nudged, seed) == wanted[0]:
            raise Refused(f"the baseline's first run has no record: {why(run, code)} ({os.path.relpath(out)}.log)")
        left = (now - begun) / (done + 1) * (len(missing) - done - 1)
        result = run["problem"] and why(run, code) or ", ".join(
            f"{key} {value:.4f}" for key, value in judge.logged(run["record"]).items()) or "finished"  # fmt: skip
        until = f"; about {left / 60:.0f} min left" if left else ""
        row = f"{name}{', twin' if nudged else ''} seed {seed}"
        print(f"[{done + 1}/{len(missing)}] {row}: {result} ({now - started:.0f} s{until})", flush=True)
    runs = [judge.read(out, seed) for out, (_, _, seed) in zip(folders, wanted, strict=True)]
    for run in runs:
        if run["record"] is None and Path(f"{run['folder']}.log").exists():
            run["problem"] = why(run)
    return runs


def why(run, code=None):
    """Why a launch has no numbers: the error in its record, else the end of its output."""
    if run["record"] is not None:
        return run["problem"]
    log = Path(f"{run['folder']}.log")
    if "finished: " in log.read_text() or code == 0:
        return "no record in its folder: does the script name a project_dir of its own? Leave it out"
    return last_words(log, code)


def last_words(log, code=None):
    """Why a launch ended, from its output."""
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    said = [line for line in lines if re.match(r"(refused|error): |[\w.]+\.yml: |\w*Error\b", line)]
    return (said or lines or [f"exit code {code}"])[0 if said else -1][:300]


def estimator(folder):
    """Returns a function: record of a run -> estimate of tools/estimate.py in bytes per process, or None if there is no
    estimate. Estimates are cached in `folder`, because a trace takes seconds."""
    file = Path(folder) / "estimates.json"

    def guess(record):
        known = json.loads(file.read_text()) if file.exists() else {}
        recipe, text = ROOT / "recipes" / f"{record['recipe']}.py", record["config"]["text"]
        free = judge.FREE - {"per_device_train_batch_size", "gradient_accumulation_steps"}
        options = {name: value for name, value in record["args"].items() if name not in free and value is not None}
        by = [(ROOT / "tools" / name).read_text() for name in ("estimate.py", "tracing.py")], record["code_sha256"]
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


# ----------------------------------------------------------------------------------------------------------------- main


def share(text):
    """Parses a share: `1%` or `0.01`."""
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = 0
    if not 0 < found < 1:
        raise argparse.ArgumentTypeError(f"{text}: write it as 1% or 0.01")
    return found


def number_of_seeds(text):
    return text if text == "auto" else cli.count(text)


def arguments(argv):
    parser = cli.parser("compare", __doc__)
    add = parser.add_argument
    add("what", nargs="+", metavar="CONFIG or RUN_FOLDER", help="configs, the first is the baseline; or finished runs")
    more = f"runs of each config, with seeds 0, 1, ..., or `auto`: until every config has a verdict (default: {SEEDS})"
    add("--seeds", type=number_of_seeds, metavar="N", help=more)
    add("--max-seeds", "--max_seeds", type=cli.count, default=MOST, help=f"with --seeds auto (default: {MOST})")
    add("--margin", type=share, default=0.01, help="what counts as equal, of the baseline's value (default: 1%%)")
    add("--no-twin", "--no_twin", action="store_true", help="leave out the control from weights one rounding apart")
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


def over_finished(args, command):
    """Returns (report, folder to write it to) for folders of finished runs."""
    absent = [name for name in args.what if not Path(name).is_dir()]
    if absent:
        raise Refused(f"{absent[0]} is no folder of a run; to launch configs: ./launch.sh compare CONFIG... -- RECIPE")
    if args.seeds is not None:
        raise Refused("--seeds: not here; the seeds are those of the runs")
    where = args.report or Path("report")
    guess = {} if args.no_estimate else {"guess": estimator(where)}
    runs = [judge.read(name) for name in args.what]
    return judge.make(runs, command, args.baseline, args.vary, args.price_per_hour, args.margin, **guess), where


def refuse_options(args, words, file):
    """Raises Refused for options that make no sense where this script is launched."""
    taken = [name for name in OWN if find.is_recipe(file) and find.option(words, name.lstrip("-"))]
    taken += [name for name in ("--vary", "--baseline") if getattr(args, name.lstrip("-"))]
    if taken:
        raise Refused(f"{', '.join(taken)}: not here; the seeds are --seeds, the baseline is the first config")
    if once(file, words) and args.seeds not in (None, 1):
        raise Refused(f"--seeds {args.seeds}: nothing says where {file.name} takes its seed: write {{seed}} there, as "
                      f"in {file.name} --seed {{seed}}")  # fmt: skip


def once(file, words):
    """Whether every config runs once, because nothing says where a script of one's own takes its seed."""
    return not find.is_recipe(file) and not any("{seed}" in word for word in words)


def over_launched(args, words, command):
    """Launches the runs of the configs. Returns (report, folder to write it to)."""
    file = find.recipe(split_launch(words)[1])
    refuse_options(args, words, file)
    files = [find.sound_config(name)[0] for name in args.what]
    configs = {file.stem: file for file in files}
    if args.assert_close and args.assert_close not in configs:
        raise Refused(f"--assert-close {args.assert_close}: there is no such row, only {', '.join(configs)}")
    alone = once(file, words)
    if alone:
        print(
            f"no {{seed}} among the arguments of {file.name}: every config runs once, with the seed it has", flush=True
        )
    default = ROOT / "runs" / f"compare-{file.stem}-{sha256(shlex.join(words).encode()).hexdigest()[:8]}"
    folder = args.output_dir or default
    where = args.report or folder
    cli.make_folder(where)
    counts = [1 if alone else args.seeds or SEEDS]
    counts = paired.looks(args.max_seeds) if args.seeds == "auto" else counts
    for count in counts:
        runs = launch_all(configs, words, folder, count, not args.no_twin and not alone)
        options = {"price": args.price_per_hour, "margin": args.margin, "looks": len(counts)}
        made = judge.make(runs, command, **options)
        left = judge.undecided(made)
        if args.seeds == "auto":
            print(
                f"{count} seeds: " + (f"no verdict yet on {', '.join(left)}" if left else "every config has a verdict")
            )
        if not left:
            break
    if not args.no_estimate:
        made = judge.make(runs, command, **options, guess=estimator(folder))
    return made | {"once": alone}, where


def main(argv):
    left, words = cli.split(argv)
    args = arguments(left)
    hidden = ("--output_dir", "--output-dir", "--report")  # print the folder, not the report
    shown = [
        word for before, word in zip(["", *argv], argv, strict=False) if word not in hidden and before not in hidden
    ]
    command = shlex.join(["./launch.sh", "compare", *shown])
    made, where = over_finished(args, command) if words is None else over_launched(args, words, command)
    report.write(made, where)
    print(f"wrote {os.path.relpath(where)}/report.html, report.md, report.csv, report.json")
    wrong = judge.assert_close(made, args.assert_close, args.rtol) if args.assert_close else []
    for line in wrong:
        print(f"not close: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    cli.run(main)
