"""Which config for this training? Recommends one, with the reason, the command and the facts behind it.

    ./launch.sh advise --memory 80GB --devices 8 -- vit --model vit_huge
    ./launch.sh advise --memory 80GB --comparison runs/compare-vit-1234abcd -- vit --max_steps 150

For every config with this number of devices it says whether the config can run (the rules of ./launch.sh check),
whether it fits and how many bytes per parameter it holds (./launch.sh estimate), how many bytes it sends per step, and
how it changed the loss, if a finished comparison (./launch.sh compare) says so. It lists what nobody has measured. It
never guesses speed: it uses the speeds of a comparison that ran on real hardware, or none.

It recommends the first of these that can run and fits with 25% to spare, because an estimate may be 25% off
(results/estimate.json):

  1. if the comparison measured speeds: the fastest config whose loss is equal or lower
  2. high precision, the simplest first: one device, ddp, fsdp without resharding, fsdp
  3. the same with activation checkpointing
  4. FP8 whose loss the comparison calls equal or lower: what a GPU does not compute slower than bf16, then least memory
  5. offloading to the host
  6. FP8 whose loss nobody has compared, with the command that compares it
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from faithful.config import rules  # noqa: E402
from faithful.config.fp8 import rules_of  # noqa: E402
from faithful.config.settings import Settings  # noqa: E402
from faithful.disk import readers  # noqa: E402
from faithful.launch import machine  # noqa: E402
from shared.args import Refused  # noqa: E402
from tools import cli, costs, find, records, report  # noqa: E402
from tools.estimate import estimates, memory_of, read_config, recipe_of  # noqa: E402

SPARE = 1.25  # an estimate is within 25% of the peak
HIGH = ("bf16", "fp16", "fp32")  # in this order, where all can run


class Candidate(TypedDict):
    """A config that can run."""

    name: str
    asked: Settings
    total: int  # these three as `estimate` returns them
    states: int
    fits: bool
    loss: tuple[str | None, str]  # see `known_loss`
    speed: float | None
    sent: float | None


def bytes_sent(settings: Settings, parameters: float) -> float | None:
    """Bytes that each process sends in one optimizer step, or None if no rule covers the config. A test compares the
    rules with the counts in results/strategies.json."""
    if settings.num_processes == 1:
        return 0
    if not costs.backend_of(settings).sends_ordinary_gradients:
        return None
    return costs.strategy_of(settings).bytes_sent(settings, parameters)


def known_loss(comparison: dict[str, Any] | None, name: str) -> tuple[str | None, str]:
    """The comparison's verdict on this config's loss, as (kind, words); (None, reason) if there is none."""
    if comparison is None:
        return None, "no comparison given"
    row = next((row for row in comparison["rows"] if row["config"] == name and not row["control"]), None)
    if row is None:
        return None, "not in the comparison"
    if row["error"]:
        return None, f"no numbers: {row['error']}"
    if row is comparison["rows"][0]:
        return "equal", "the baseline"
    measure = row.get("measures", {}).get(comparison["measure"]) or {}
    return measure.get("kind"), f"{comparison['measure']} {report.verdict_words(measure)}"


def measured_speed(comparison: dict[str, Any] | None, name: str) -> float | None:
    """Samples per second, if the comparison ran on real hardware and without emulation."""
    for row in comparison["rows"] if comparison else ():
        if row["config"] == name and not row["control"]:
            real = not row["error"] and not row.get("emulated") and not row.get("rehearsal")
            return row.get("measures", {}).get("samples_per_second", {}).get("mean") if real else None
    return None


def rank(config: Candidate) -> tuple[int, *tuple[float, ...]]:
    """Sort key for the order in the module's docstring; the smallest is recommended."""
    settings, loss = config["asked"], config["loss"][0]
    fp8, fine = settings.precision == "fp8", loss in ("equal", "lower")
    if config["speed"] and fine:
        return (1, -config["speed"])
    if loss == "higher":
        return (7, config["total"])
    if fp8:
        slow = bool(list(rules_of(settings.fp8).slower(settings)))
        return (4 if fine else 6, slow, config["total"])
    group = 5 if settings.offload else 3 if settings.ckpt else 2
    precision = HIGH.index(settings.precision)
    return (
        group,
        settings.compile,
        costs.strategy_of(settings).rank - settings.noreshard,  # without resharding, fsdp is between ddp and fsdp
        precision,
    )  # compiled: same loss, unknown speed


def readable_bytes(size: float) -> str:
    """Bytes in GB or MB."""
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    return f"{size / unit:,.1f} {name}"


def reason(config: Candidate, memory: float) -> str:
    """The reason for the recommendation, in one or two sentences."""
    group, settings = rank(config)[0], config["asked"]
    fits = f"It needs about {readable_bytes(config['total'])} of {readable_bytes(memory)} per device"
    if group == 1:
        rate = f"{config['speed']:,.0f} samples per second"
        return f"{fits}, and of the configs that fit with an equal or lower loss it is the fastest measured: {rate}."
    plain = {
        2: "and no config does less to the training",
        3: "with activations computed again; without, none in high precision fits",
        5: "with its state on the host; on the devices, none whose loss is known fits",
    }
    if group in plain:
        full = {
            "bf16": "bf16 needs no loss scaling",
            "fp16": "bf16 cannot run here",
            "fp32": "nothing narrower can run",
        }
        return f"{fits}, {plain[group]}; {full[settings.precision]}."
    if group == 4:
        return f"{fits}, no config in high precision fits on the devices, and its loss is known: {config['loss'][1]}."
    if group == 6:
        return f"{fits}, and nothing in high precision fits. What it does to the loss nobody has measured here."
    return f"{fits}, nothing else fits, and its loss is known to be worse: {config['loss'][1]}."


def read_comparison(folder: str | Path) -> dict[str, Any]:
    """The report.json of a comparison."""
    file = Path(folder) / "report.json" if Path(folder).is_dir() else Path(folder)
    if not file.is_file():
        raise Refused(f"--comparison {folder}: no report.json there; {find.COMMAND} compare writes one")
    try:
        comparison = readers.value_of(file, {}, readers.CHECKPOINT)  # with curves of many runs
        if comparison.get("schema_version") != 2:
            raise Refused(f"{file} is of another version: run its command again, finished runs are not repeated")
        return readers.of_kind(file, comparison, records.COMPARISON)
    except (OSError, ValueError) as error:
        raise Refused(f"--comparison {folder}: {error}") from None


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = cli.parser("advise", __doc__)
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="choose among these (default: all)")
    parser.add_argument("--memory", help="of one device, as 80GB (default: the device in front of you)")
    parser.add_argument("--devices", type=cli.count, help="how many (default: those in front of you, or 1)")
    parser.add_argument("--comparison", help=f"folder of a finished {find.COMMAND} compare")
    return parser.parse_args(argv)


def settings_of(names: list[str], devices: int) -> dict[str, Settings]:
    """{config: what it asks for on so many devices}; without names all configs for one device, or for several."""
    files = {file.stem: file for file in sorted((ROOT / "accelerate_configs").glob("*.yml"))}
    for name in names:
        if name not in files:
            raise Refused(f"no config {name}: {find.suggestion(name, 'config')}")
    settings = {name: read_config(files[name], devices) for name in names or files}
    if names:
        return settings
    return {name: config for name, config in settings.items() if (config.strategy != "single") == (devices > 1)}


def main(argv: list[str]) -> int:
    left, words = cli.split(argv)
    args = arguments(left)
    recipe, options = recipe_of(words, "advise --memory 80GB --devices 8 -- vit --model vit_huge")
    comparison = read_comparison(args.comparison) if args.comparison else None
    here = machine.of_driver()
    devices = args.devices
    if devices is None:
        devices = 1 if args.memory else max(here.devices, 1)
    if args.memory:  # the target machine may be another one, whose abilities are unknown
        here = machine.Machine("cuda", devices, "GPUs", packages=machine.packages())
    wanted = settings_of(args.configs, devices)
    unable = {}
    for name, settings in wanted.items():
        if problems := rules.problems(replace(settings, local_processes=settings.num_processes), here):
            unable[name] = problems[0]
    wanted = {name: settings for name, settings in wanted.items() if name not in unable}
    memory, _, cpu = memory_of(args.memory)
    able: list[Candidate] = []
    parameters = 0
    for name, sizes, count in estimates(wanted, recipe, options, memory, cpu):
        if isinstance(sizes, Refused):
            unable[name] = str(sizes)
            continue
        parameters = count
        able.append(
            {
                "name": name,
                "asked": wanted[name],
                "total": sizes["total"],
                "states": sizes["states"],
                "fits": sizes["fits"],
                "loss": known_loss(comparison, name),
                "speed": measured_speed(comparison, name),
                "sent": bytes_sent(wanted[name], count),
            }
        )
    return advise(able, unable, parameters, words or [], devices, memory / devices if cpu else memory, comparison)


def advise(
    able: list[Candidate],
    unable: dict[str, str],
    parameters: int,
    words: list[str],
    devices: int,
    memory: float,
    comparison: dict[str, Any] | None,
) -> int:
    """Prints the table, the recommendation and what nobody has measured. Returns the exit code. memory: for each
    device; on a CPU all processes share it."""
    fitting = [config for config in able if config["fits"]]
    spare = [config for config in fitting if config["total"] * SPARE <= memory]
    able.sort(key=lambda config: (config not in spare, config not in fitting, rank(config)))
    print_table(able, parameters, devices, memory, fitting, spare, words)
    for name, why in unable.items():
        print(f"  {name}: {why}")
    if not fitting:
        print(
            "\nNothing fits. More devices share the state of fsdp configs; a smaller batch makes activations smaller."
        )
        return 1
    best = min(spare or fitting, key=rank)
    option = ["--num_processes", str(devices)] if devices > 1 else []
    print(f"\nRecommended: {best['name']}\n  {reason(best, memory)}")
    if best not in spare:
        print(f"  It is tight: an estimate is off by up to {SPARE - 1:.0%}.")
    print(f"  {shlex.join([find.COMMAND, best['name'], *option, *words])}")
    for line in unmeasured(best, able, comparison, [*option, *words]):
        print(f"  {line}")
    return 0


def unmeasured(
    best: Candidate, able: list[Candidate], comparison: dict[str, Any] | None, words: Iterable[str]
) -> Iterator[str]:
    """What nobody has measured, one line each."""
    if comparison:
        options = {
            key: comparison["args"][key] for key in ("model", "dataset", "max_steps") if key in comparison["args"]
        }
        what = ", ".join([str(comparison["recipe"]), *(f"{key} {value}" for key, value in options.items())])
        yield f"The comparison was of {what}, on {comparison['device']}; of any other training it is a hint."
    fp8 = [config["name"] for config in able if config["asked"].precision == "fp8" and config["loss"][0] is None]
    if fp8:
        yield f"Nobody has measured what FP8 does to this loss: {', '.join(fp8)}."
        pair = (best["name"], fp8[0])
        if best["name"] in fp8:
            pair = (f"{best['asked'].strategy}_bf16", best["name"])
        yield f"  {find.COMMAND} compare {' '.join(pair)} -- {shlex.join(words)}"
        yield "What each precision did to the loss of small models: docs/study.md."
    if not any(config["speed"] for config in able):
        yield f"Nobody has measured the speed of any of them on these devices. There, {find.COMMAND} compare does."


def print_table(
    able: list[Candidate],
    parameters: int,
    devices: int,
    memory: float,
    fitting: list[Candidate],
    spare: list[Candidate],
    words: list[str],
) -> None:
    size = f"{parameters / 1e6:,.1f}M parameters, " if parameters else ""
    print(f"{words[0]}: {size}{devices} device{'s' * (devices > 1)} of {readable_bytes(memory)}")
    rows = [["config", "fits", "memory per device", "state per device, B/param", "sent per step", "loss"]]
    for config in able:
        fits = "yes" if config in spare else "tight" if config in fitting else "no"
        per = f"{config['states'] / parameters:.2f}"
        sent = "not known" if config["sent"] is None else readable_bytes(config["sent"])
        rows.append([config["name"], fits, readable_bytes(config["total"]), per, sent, config["loss"][1]])
    for line in cli.columns(rows):
        print(f"  {line}")
    print("  state: weights, gradients, master weights and optimizer state, in bytes per parameter")


if __name__ == "__main__":
    cli.run(main)
