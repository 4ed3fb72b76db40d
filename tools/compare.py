"""Which config for this model? The same training under each of them, over several seeds, judged in pairs.

    ./launch.sh compare single_bf16 single_fp8 single_fp8_msamp_o2 -- vit --max_steps 150
    ./launch.sh compare single_bf16 single_fp8 --seeds auto --margin 1% -- vit      seeds until there is a verdict
    ./launch.sh compare single_bf16 single_fp8 --budgets 1,2,4 -- gpt --max_steps 150    what it costs in tokens
    ./launch.sh compare single_bf16 "single_bf16 --optimizer adamw_8bit" -- gpt      options of one row, in quotes
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

`--budgets 1,2,4` trains every row for 1, 2 and 4 times --max_steps (or epochs), each with a whole schedule. How much
the baseline's loss falls with more tokens turns a difference of losses into tokens: "1.4% more for the same loss", with
its interval (tools/tokens.py). All else is of the largest budget. Where rows ran on real hardware the page also says
the time to the same loss: tokens by the time of a step.

There are two controls. The baseline's own seeds show how much chance alone changes a run. The twin repeats the baseline
with each weight changed by one bit. A smaller difference than the twin's is noise.

If one run of a row failed, or its record lacks evidence, the row has no numbers, because the other runs would be a
selection. Runs that differ in more than the config are refused, and the message names the difference.

A script of your own is any script that is not a recipe. {seed} in its arguments stands for each seed; without it every
config runs once. {budget} stands for each of --budgets. The last values of accelerator.log are compared, or the
training loss if there are none.

Writes report.md, report.json and report.html. Everything in them comes from run.json and metrics.jsonl.
The exit code is 0; 1 if --assert-close does not hold; 2 if the comparison is refused.
"""

import argparse
import itertools
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from faithful.launch import machine  # noqa: E402
from shared.args import Refused  # noqa: E402
from tools import check, cli, find, judge, paired, progress, records, report  # noqa: E402

OWN = ("--seed", "--output_dir", "--resume_from_checkpoint")  # options that this tool sets itself
SEEDS, MOST = 5, 16  # by default; with --seeds auto, at most
STARTS = 8  # seconds from a launch to its record


# ------------------------------------------------------------------------------------------------------------ launching


def split_launch(words: list[str]) -> tuple[list[str], str, list[str]]:
    """Splits the words after `--` like a launch: (options of accelerate launch, recipe, its options)."""
    at, flags = 0, find.flags()
    while at < len(words) and words[at].startswith("-"):
        at += 1 if "=" in words[at] or words[at] in flags else 2
    if at >= len(words):
        raise Refused(f"which recipe? {find.COMMAND} compare single_bf16 single_fp8 -- vit --max_steps 100")
    return words[:at], words[at], words[at + 1 :]


def replicas(file: Path, options: list[str], here: machine.Machine) -> int:
    """The number of processes that see different samples."""
    config, count = find.sound_config(file)[1], find.option(options, "num_processes")
    try:
        count = count and cli.count(count)
    except argparse.ArgumentTypeError as error:
        raise Refused(f"--num_processes {error}") from None
    if str(config.get("distributed_type")) == "NO":
        return 1
    added = check.missing_option(file, here, {"num_processes": count} if count else {})  # as the launch adds it
    count = int(count or added.removeprefix("--num_processes ") or config.get("num_processes") or 1)
    sizes = config.get("parallelism_config") or {}
    return count // math.prod(int(sizes.get(f"parallelism_config_{name}_size") or 1) for name in ("tp", "sp"))


class Way(NamedTuple):
    """A row of the comparison: a config, and options that only its runs have."""

    file: Path
    options: list[str]

    @property
    def vary(self) -> list[str]:
        return [word.partition("=")[0].lstrip("-").replace("-", "_") for word in self.options if word.startswith("--")]


def ways_of(words: list[str]) -> dict[str, Way]:
    """{row: its Way} from `single_bf16` or `single_bf16 --optimizer adamw_8bit`, each one word."""
    ways = {}
    for word in words:
        try:
            name, *options = shlex.split(word)
        except ValueError:
            raise Refused(f"{word}: its quotes are not closed") from None
        file = find.sound_config(name)[0]
        ways[" ".join([file.stem, *options])] = Way(file, options)
    return ways


def batches(ways: dict[str, Way], words: list[str], here: machine.Machine) -> dict[str, int]:
    """{row: per-device batch} with which all have the baseline's global batch. Raises Refused for an option that the
    recipe does not have."""
    options, recipe, rest = split_launch(words)
    given: Any = [find.parse_options(find.recipe(recipe), [*rest, *way.options]) for way in ways.values()]
    per_device = given[0].per_device_train_batch_size
    counts = {name: replicas(way.file, options, here) for name, way in ways.items()}
    total = per_device * next(iter(counts.values()))
    odd = [name for name, count in counts.items() if total % count]
    if odd:
        raise Refused(
            f"the baseline's {total} samples per step don't divide by the {counts[odd[0]]} processes of {odd[0]}: "
            "choose another --per_device_train_batch_size"
        )
    return {name: total // count for name, count in counts.items()}


class Launch(NamedTuple):
    """A run that the comparison wants. control: from weights one rounding apart. budget: times the steps, or None."""

    row: str
    control: bool
    seed: int
    budget: float | None
    folder: Path


def matches(run: dict[str, Any], launch: Launch, file: Path, recipe: Path) -> bool:
    """Whether a finished run has the same config, code and packages as a new launch would have."""
    from faithful.evidence.record import code_sha256  # imports torch

    record = run["record"]
    if run["problem"] or records.nudged(run) != launch.control:
        return False
    if record["config"]["sha256"] != sha256(file.read_bytes()).hexdigest():
        return False
    installed = {name: metadata.version(name) for name in record["versions"].keys() - {"python", "cuda"}}
    return record["code_sha256"] == code_sha256(recipe) and installed.items() <= record["versions"].items()


def wait_for_others(folder: Path, seconds: float = 60) -> None:
    """Waits for a run of an earlier, killed comparison that may still write its last checkpoint there."""
    end = time.monotonic() + seconds
    while left := [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])]:
        if time.monotonic() > end:
            raise Refused(f"process {left[0].pid} still works in {folder}: end it first")
        time.sleep(0.2)


def launch_all(
    ways: dict[str, Way], words: list[str], folder: Path, seeds: int, control: bool, budgets: Sequence[float | None]
) -> dict[float | None, list[dict[str, Any]]]:
    """Launches every missing run, one after another. Returns {budget: its runs}, read from their folders."""
    _, recipe, options = split_launch(words)
    file = find.recipe(recipe)
    per_device = batches(ways, words, machine.of_driver()) if find.is_recipe(file) else None
    for way in ways.values():  # what no machine can run is refused now, not when the others have trained
        if problems := check.check(way.file, machine.of_driver(), {})[0]:
            raise Refused(*(f"{way.file.name}: {line}" for line in problems))
    rows = [(name, False) for name in ways]
    if control:
        rows.insert(1, (rows[0][0], True))
    wanted, missing = [], []
    for seed in range(seeds):  # seed by seed: a slow phase of the machine hits all configs
        for budget in budgets:
            for name, nudged in rows:
                if nudged and budget != budgets[-1]:
                    continue
                out = folder if budget is None else folder / f"x{budget:g}"
                out /= f"{re.sub('[^A-Za-z0-9_.]+', '-', name)}{'-twin' if nudged else ''}-seed{seed}"
                wanted.append(Launch(name, nudged, seed, budget, out))
                if not matches(records.read(out, seed), wanted[-1], ways[name].file, file):
                    missing.append(wanted[-1])
    finished = len(wanted) - len(missing)
    before = f", {finished} of them finished before" if finished else ""
    print(f"{len(wanted)} runs of {file.stem}{before}; in {os.path.relpath(folder)}")
    print(how_long([launch.budget or 1 for launch in missing], file, options, folder), flush=True)
    for each in dict.fromkeys([folder, *(launch.folder.parent for launch in wanted)]):
        cli.make_folder(each)
    begun = time.monotonic()
    for number, launch in enumerate(missing, 1):
        started = time.monotonic()
        row = f"{launch.row}{', twin' if launch.control else ''} seed {launch.seed}"
        row += f" x{launch.budget:g}" if launch.budget else ""
        with progress.waiting(f"[{number}/{len(missing)}] {row}"):
            code = execute(launch, ways[launch.row], words, per_device)
        run, now = records.read(launch.folder, launch.seed), time.monotonic()
        refuse_unread(launch, file, recipe, options)
        if run["record"] is None and launch == wanted[0]:
            log = f"{os.path.relpath(launch.folder)}.log"
            raise Refused(f"the baseline's first run has no record: {reason_of(run, code)} ({log})")
        part = sum(each.budget or 1 for each in missing[:number]) / sum(each.budget or 1 for each in missing)
        remaining = (now - begun) * (1 / part - 1)
        until = f"; about {minutes(remaining)} left" if remaining else ""
        print(f"[{number}/{len(missing)}] {row}: {outcome(run, code)} ({now - started:.0f} s{until})", flush=True)
    runs = {budget: [] for budget in budgets}
    for launch in wanted:
        run = records.read(launch.folder, launch.seed)
        if run["record"] is None and log_of(run["folder"]).exists():
            run["problem"] = reason_of(run)
        runs[launch.budget].append(run | {"row": f"{launch.row}{', twin' if launch.control else ''}"})
    return runs


def how_long(missing: list[float], file: Path, options: list[str], folder: Path) -> str:
    """How long runs of so many times the steps will take, judged by the newest finished run of the same training."""
    given: Any = find.parse_options(file, options) if find.is_recipe(file) else None
    alike = ("model", "dataset", "gradient_accumulation_steps")
    files = [found for at in (folder, find.RUNS) for found in at.glob("*/run.json")] if given and missing else []
    for found in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        record = records.read(found.parent)["record"]
        if not record or record["status"] != "finished" or record["recipe"] != file.stem or not record["final"]:
            continue
        if all(record["args"].get(name) == getattr(given, name) for name in alike):
            began, ended = (
                time.mktime(time.strptime(record[key][:19], "%Y-%m-%dT%H:%M:%S")) for key in ("started", "finished")
            )
            seconds = (ended - began) * given.max_steps / max(1, records.steps_of(record))
            at = os.path.relpath(found.parent)
            return (
                f"about {minutes(sum(missing) * seconds + len(missing) * STARTS)} in all, if a run takes what {at} took"
            )
    return "how long: the first run will tell" if missing else "nothing is left to run"


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def budgeted(file: Path, rest: list[str], budget: float | None) -> list[str]:
    """The script's options with the steps or epochs of this budget."""
    if budget is None:
        return rest
    if not find.is_recipe(file):
        return [word.replace("{budget}", f"{budget:g}") for word in rest]
    given: Any = find.parse_options(file, rest)
    if given.num_train_epochs is not None:
        return [*rest, "--num_train_epochs", f"{given.num_train_epochs * budget:g}"]
    return [*rest, "--max_steps", str(round(given.max_steps * budget))]


def execute(launch: Launch, way: Way, words: list[str], per_device: dict[str, int] | None) -> int:
    """Launches one run, with its output beside the run's folder, and returns its exit code. per_device: the
    batch of each row, or None for a script of one's own."""
    options, recipe, rest = split_launch(words)
    rest = [*budgeted(find.recipe(recipe), rest, launch.budget), *way.options]
    wait_for_others(launch.folder)
    if launch.folder.exists():
        launch.folder.rename(launch.folder.with_name(f"{launch.folder.name}.old-{time.time():.0f}"))
    command = [sys.executable, str(ROOT / "tools" / "commands.py"), str(way.file), *options, str(find.recipe(recipe))]
    env = dict(os.environ)
    env.pop("FAITHFUL_PERTURBED", None)
    if launch.control:
        env["FAITHFUL_PERTURBED"] = "1"
    if per_device is None:
        command += [word.replace("{seed}", str(launch.seed)) for word in rest]
        env["FAITHFUL_PROJECT_DIR"] = str(launch.folder)
    else:
        best = find.parse_options(find.recipe(recipe), rest).load_best_model_at_end  # which needs checkpoints
        command += [*([] if best else ["--save_steps", "0"]), *rest]
        command += ["--per_device_train_batch_size", str(per_device[launch.row])]
        command += ["--seed", str(launch.seed), "--output_dir", str(launch.folder)]
    with log_of(launch.folder).open("w") as log:
        return subprocess.run(command, env=env, stdout=log, stderr=log, preexec_fn=cli.die_with_me).returncode


def log_of(folder: Path) -> Path:
    """The output of the launch of this run."""
    return folder.with_name(f"{folder.name}.log")


def refuse_unread(launch: Launch, file: Path, recipe: str, options: list[str]) -> None:
    """Raises Refused if a script of one's own ended because argparse did not take its options."""
    line = re.search(rf"^(?:usage: )?{re.escape(file.name)}: error: (.*)$", log_of(launch.folder).read_text(), re.M)
    if line and not find.is_recipe(file):
        raise Refused(f"{recipe}: {line[1]}; it was given {shlex.join(options)}")


def outcome(run: dict[str, Any], code: int) -> str:
    """A run's last metrics in words, or why it has none."""
    if run["problem"]:
        return reason_of(run, code)
    return ", ".join(f"{key} {value:.4f}" for key, value in records.logged(run["record"]).items()) or "finished"


def reason_of(run: dict[str, Any], code: int | None = None) -> str:
    """Why a launch has no numbers: the error in its record, else the end of its output."""
    if run["record"] is not None:
        return run["problem"]
    said = log_of(run["folder"]).read_text()
    if "finished: " in said or code == 0:
        return "no record in its folder: does the script name a project_dir of its own? Leave it out"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(refused|error): |[\w.]+\.yml: |\w*Error\b", line)]
    if errors:
        return errors[0][:300]
    return lines[-1][:300] if lines else f"exit code {code}"


# ----------------------------------------------------------------------------------------------------------------- main


def share(text: str) -> float:
    """Parses a share: `1%` or `0.01`."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: write it as 1% or 0.01")
    return value


def budgets(text: str) -> list[float]:
    """Parses `1,2,4`: at least two positive numbers, ascending."""
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if len(values) < 2 or not 0 < values[0] or not all(a < b < math.inf for a, b in itertools.pairwise(values)):
        raise argparse.ArgumentTypeError(f"{text}: write two or more multiples of the steps, ascending: 1,2,4")
    return values


def number_of_seeds(text: str) -> float | str:
    return text if text == "auto" else cli.count(text)


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = cli.parser("compare", __doc__)
    add = parser.add_argument
    add("what", nargs="+", metavar="CONFIG or RUN_FOLDER", help="configs, the first is the baseline; or finished runs")
    more = f"runs of each config, with seeds 0, 1, ..., or `auto`: until every config has a verdict (default: {SEEDS})"
    add("--seeds", type=number_of_seeds, metavar="N", help=more)
    add(
        "--budgets",
        type=budgets,
        metavar="1,2,4",
        help="train for so many times the steps; says how many more tokens each needs for the baseline's loss",
    )
    add("--max-seeds", "--max_seeds", type=cli.count, default=MOST, help=f"with --seeds auto (default: {MOST})")
    add("--margin", type=share, default=0.01, help="what counts as equal, of the baseline's value (default: 1%%)")
    add(
        "--no-twin",
        "--no_twin",
        action="store_true",
        help="leave out the twin, the baseline with each weight changed by one bit",
    )
    add("--vary", action="append", default=[], metavar="OPTION", help="over finished runs: an option that may differ")
    add(
        "--assert-close",
        metavar="BASELINE",
        help="exit code 1 unless every final metric is within --rtol of this row's",
    )
    add("--rtol", type=cli.number(float, 0), default=0.01, help="relative (default: 0.01)")
    add("--no-estimate", action="store_true", help="changes nothing: earlier versions estimated")
    add("--output_dir", "--output-dir", type=Path, help="where launched runs go")
    add(
        "--report", type=Path, help="where the reports go (default: beside launched runs; over finished ones, ./report)"
    )
    return parser.parse_args(argv)


def over_finished(args: argparse.Namespace, command: str) -> tuple[dict[str, Any], Path]:
    """Returns (report, folder to write it to) for folders of finished runs."""
    absent = [name for name in args.what if not Path(name).is_dir()]
    if absent:
        raise Refused(
            f"{absent[0]} is no folder of a run; to launch configs: {find.COMMAND} compare CONFIG... -- RECIPE"
        )
    for name in ("seeds", "budgets"):
        if getattr(args, name) is not None:
            raise Refused(f"--{name}: not here; the {name} are those of the runs")
    runs = [records.read(name) for name in args.what]
    return judge.make(runs, command, args.vary, args.margin), args.report or Path("report")


def refuse_options(args: argparse.Namespace, words: list[str], file: Path, ways: dict[str, Way]) -> None:
    """Raises Refused for options that make no sense where this script is launched."""
    given = find.with_file(file, split_launch(words)[2])
    taken = [name for name in OWN if find.is_recipe(file) and find.option(given, name.lstrip("-"))]
    own = [word for way in ways.values() for word in way.options]
    taken += [f"{name} of one row" for name in (*OWN, "--max_steps") if find.option(own, name.lstrip("-"))]
    taken += ["--vary"] if args.vary else []
    if taken:
        raise Refused(f"{', '.join(taken)}: not here; the seeds are --seeds, the baseline is the first config")
    if args.budgets and not find.is_recipe(file) and not any("{budget}" in word for word in words):
        raise Refused(
            f"--budgets: nothing says where {file.name} takes its steps or epochs: write {{budget}} there, as in "
            f"{file.name} --epochs {{budget}}"
        )
    if runs_once(file, words) and args.seeds not in (None, 1):
        raise Refused(
            f"--seeds {args.seeds}: nothing says where {file.name} takes its seed: write {{seed}} there, as "
            f"in {file.name} --seed {{seed}}"
        )


def runs_once(file: Path, words: list[str]) -> bool:
    """Whether every config runs once, because nothing says where a script of one's own takes its seed."""
    return not find.is_recipe(file) and not any("{seed}" in word for word in words)


def over_launched(args: argparse.Namespace, words: list[str], command: str) -> tuple[dict[str, Any], Path]:
    """Launches the runs of the configs. Returns (report, folder to write it to)."""
    file = find.recipe(split_launch(words)[1])
    ways = ways_of(args.what)
    refuse_options(args, words, file, ways)
    if args.assert_close and args.assert_close not in ways:
        raise Refused(f"--assert-close {args.assert_close}: there is no such row, only {', '.join(ways)}")
    single = runs_once(file, words)
    if single:
        reason = f"no {{seed}} among the arguments of {file.name}"
        print(f"{reason}: every config runs once, with the seed it has", flush=True)
    default = find.RUNS / f"compare-{file.stem}-{sha256(shlex.join(words).encode()).hexdigest()[:8]}"
    folder = args.output_dir or default
    where = args.report or folder
    cli.make_folder(where)
    counts = [1 if single else args.seeds or SEEDS]
    counts = paired.looks(args.max_seeds) if args.seeds == "auto" else counts
    if counts[-1] < paired.FEWEST and not single:
        seeds = f"{counts[-1]} seed{'s' * (counts[-1] > 1)}"
        print(f"note: {seeds} can decide nothing: below {paired.FEWEST} every verdict is `cannot tell`", flush=True)
    for count in counts:
        runs = launch_all(ways, words, folder, count, not args.no_twin and not single, args.budgets or [None])
        options: dict[str, Any] = {"margin": args.margin, "looks": len(counts)}
        options["vary"] = list(dict.fromkeys(name for way in ways.values() for name in way.vary))
        made = {budget: judge.make(those, command, **options) for budget, those in runs.items()}
        *_, comparison = made.values()
        if args.budgets:
            judge.tokens_of(made)
        undecided = judge.undecided(comparison)
        if args.seeds == "auto":
            state = f"no verdict yet on {', '.join(undecided)}" if undecided else "every config has a verdict"
            print(f"{count} seeds: {state}")
        if not undecided:
            break
    _, recipe, rest = split_launch(words)
    advice = [find.COMMAND, "advise", "--memory", "80GB", "--devices", "8", "--comparison", os.path.relpath(where)]
    return comparison | {"once": single, "advise": shlex.join([*advice, "--", recipe, *rest])}, where


def main(argv: list[str]) -> int:
    left, words = cli.split(argv)
    args = arguments(left)
    command = shlex.join([find.COMMAND, "compare", *without_folders(argv)])
    if words is None:
        comparison, where = over_finished(args, command)
    else:
        comparison, where = over_launched(args, words, command)
    with progress.waiting("drawing the report"):
        report.write(comparison, where)
    print(report.text(comparison))
    print(f"wrote {os.path.relpath(where)}/report.html, report.md, report.json")
    wrong = judge.assert_close(comparison, args.assert_close, args.rtol) if args.assert_close else []
    for line in wrong:
        print(f"not close: {line}", file=sys.stderr)
    return 1 if wrong else 0


def without_folders(argv: list[str]) -> list[str]:
    """The command line for the report, without the options that say where files go."""
    hidden = ("--output_dir", "--output-dir", "--report")
    return [
        word for before, word in zip(["", *argv], argv, strict=False) if word not in hidden and before not in hidden
    ]


if __name__ == "__main__":
    cli.run(main)
