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
  4. FP8 whose loss the comparison calls equal or lower, least memory first
  5. offloading to the host
  6. FP8 whose loss nobody has compared, with the command that compares it
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from faithful import machine, rules  # noqa: E402
from shared.args import Refused  # noqa: E402
from tools import find, report  # noqa: E402
from tools.estimate import in_bytes, of_config  # noqa: E402

SPARE = 1.25  # an estimate is within 25% of the peak
ORDER = ("single", "ddp", "fsdp noreshard", "fsdp", "zero1", "zero2", "zero3", "hsdp", "tp")
HIGH = ("bf16", "fp16", "fp32")  # in this order, where all can run


def sent(asked, parameters):
    """Bytes that each process sends in one optimizer step, or None if no rule here covers the config.

    A collective over N processes sends (N-1)/N of its tensor; an all-reduce sends twice that. A test compares these
    rules with the counts in results/strategies.json.
    """
    n, strategy, compute = asked["shards"], asked["strategy"], 4 if asked["precision"] == "fp32" else 2
    if asked["num_processes"] == 1:
        return 0
    if strategy == "tp" or asked["backend"] == "msamp":
        return None  # tp sends activations, whose size depends on the batch; msamp sends FP8 gradients with scales
    share = (n - 1) / n * parameters
    if strategy == "ddp":
        return 2 * 4 * share
    if strategy in ("zero1", "zero2"):  # DeepSpeed sums gradients as all-reduce, then gathers weights
        return (2 * 4 + compute) * share
    if strategy == "zero3":
        return 3 * compute * share
    gathers = 1 if asked["noreshard"] else 2
    whole = (gathers * compute + 4) * share
    if strategy == "hsdp":  # then an all-reduce between the groups
        groups = asked["num_processes"] // n
        whole += 2 * 4 * (groups - 1) / groups * parameters / n
    return whole


def estimated(names, devices, memory, words):
    """The estimates of tools/estimate.py for these configs."""
    command = [sys.executable, str(ROOT / "tools" / "estimate.py"), "--json", "--num_processes", str(devices)]
    command += (["--memory", memory] if memory else []) + [*names, "--", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not done.stdout.strip():
        raise Refused(f"nothing was estimated: {shlex.join(['./launch.sh', 'estimate', *command[2:]])} says why")
    return json.loads(done.stdout.splitlines()[-1])


def how(asked):
    """The strategy's name in ORDER."""
    return "fsdp noreshard" if asked["strategy"] == "fsdp" and asked["noreshard"] else asked["strategy"]


def known_loss(made, name):
    """The comparison's verdict on this config's loss, as (kind, words); (None, reason) if there is none."""
    if made is None:
        return None, "no comparison given"
    row = next((row for row in made["rows"] if row["config"] == name and not row["control"]), None)
    if row is None:
        return None, "not in the comparison"
    if row["error"]:
        return None, f"no numbers: {row['error']}"
    if row is made["rows"][0]:
        return "equal", "the baseline"
    found = row["measures"].get(made["measure"]) or {}
    return found.get("kind"), f"{made['measure']} {report.judged(found)}"


def measured_speed(made, name):
    """Samples per second, if the comparison ran on real hardware and without emulation."""
    row = next((r for r in made["rows"] if r["config"] == name and not r["control"]), None) if made else None
    real = row and not row["error"] and not row["emulated"] and not row["rehearsal"]
    return row["measures"]["samples_per_second"]["mean"] if real else None


def rank(one):
    """Sort key for the order in the module's docstring; the smallest is recommended."""
    asked, loss = one["asked"], one["loss"][0]
    fp8, fine = asked["precision"] == "fp8", loss in ("equal", "lower")
    if one["speed"] and fine:
        return (1, -one["speed"])
    if loss == "higher":
        return (7, one["total"])
    if fp8:
        return (4 if fine else 6, one["total"])
    group = 5 if asked["offload"] else 3 if asked["ckpt"] else 2
    precision = HIGH.index(asked["precision"])
    return (group, asked["compile"], ORDER.index(how(asked)), precision)  # compiled: same loss, unknown speed


def amount(size):
    """Bytes in GB or MB."""
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    return f"{size / unit:,.1f} {name}"


def reason(one, memory):
    """The reason for the recommendation, in one or two sentences."""
    group, asked = rank(one)[0], one["asked"]
    fits = f"It needs about {amount(one['total'])} of {amount(memory)} per device"
    if group == 1:
        return f"{fits}, and of the configs that fit with an equal or lower loss it is the fastest measured: " \
               f"{one['speed']:,.0f} samples per second."  # fmt: skip
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
        return f"{fits}, {plain[group]}; {full[asked['precision']]}."
    if group == 4:
        return f"{fits}, no config in high precision fits on the devices, and its loss is known: {one['loss'][1]}."
    if group == 6:
        return f"{fits}, and nothing in high precision fits. What it does to the loss nobody has measured here."
    return f"{fits}, nothing else fits, and its loss is known to be worse: {one['loss'][1]}."


def candidates(names, files, devices, here, found, made):
    """Returns (configs that can run, {config: why it cannot}). found: the estimates."""
    able, unable = [], dict(found["refused"])
    plain = found["configs"].get("single_fp32" if "single_fp32" in found["configs"] else "single_bf16")
    parameters = plain and plain["weights"] / 4
    for name in names:
        asked = of_config(files[name], devices)
        lines = rules.problems(asked | {"local_processes": asked["num_processes"]}, here)
        if lines:
            unable[name] = lines[0]
        elif name in found["configs"]:
            one = found["configs"][name]
            able.append({"name": name, "asked": asked, "total": one["total"], "states": one["states"],
                         "fits": one["fits"], "loss": known_loss(made, name), "speed": measured_speed(made, name),
                         "sent": parameters and sent(asked, parameters)})  # fmt: skip
    return able, unable, parameters


def read(folder):
    file = Path(folder) / "report.json" if Path(folder).is_dir() else Path(folder)
    if not file.is_file():
        raise Refused(f"--comparison {folder}: no report.json there; ./launch.sh compare writes one")
    made = json.loads(file.read_text())
    if made.get("schema_version") != 2:
        raise Refused(f"{file} is of another version: run its command again, finished runs are not repeated")
    return made


def main(argv):
    left, words = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(prog="./launch.sh advise", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="choose among these (default: all)")
    parser.add_argument("--memory", help="of one device, as 80GB (default: the device in front of you)")
    parser.add_argument("--devices", type=int, help="how many (default: those in front of you, or 1)")
    parser.add_argument("--comparison", help="folder of a finished ./launch.sh compare")
    args = parser.parse_args(left)
    if not words:
        raise Refused("which recipe? ./launch.sh advise --memory 80GB --devices 8 -- vit --model vit_huge")
    here = machine.of_driver()
    if args.memory:  # the target machine may be another one, whose abilities are unknown
        in_bytes(args.memory)
        count = args.devices or 1
        here |= {"device": "cuda", "devices": count, "name": "GPUs", "capability": None, "packages": machine.packages()}
    devices = args.devices or here["devices"] or 1
    made = args.comparison and read(args.comparison)
    folder = ROOT / "accelerate_configs"
    files = {file.stem: file for file in sorted(folder.glob("*.yml"))}
    for name in args.configs:
        if name not in files:
            raise Refused(f"no config {name}: {find.close(name, 'config')}")
    several = {name: of_config(file, devices)["strategy"] != "single" for name, file in files.items()}
    names = args.configs or [name for name in files if several[name] == (devices > 1)]
    found = estimated(dict.fromkeys(["single_bf16", *names]), devices, args.memory, words)
    able, unable, parameters = candidates(names, files, devices, here, found, made)
    memory, fitting = found["memory"], [one for one in able if one["fits"]]
    each = memory if args.memory or here["devices"] else memory / devices  # on a CPU all processes share it
    spare = [one for one in fitting if one["total"] * SPARE <= each]
    able.sort(key=lambda one: (one not in spare, one not in fitting, rank(one)))
    print_table(able, parameters, devices, each, fitting, spare, words)
    for name, why in unable.items():
        print(f"  {name}: {why}")
    if not fitting:
        print(
            "\nNothing fits. More devices share the state of fsdp configs; a smaller batch makes activations smaller."
        )
        return 1
    best = min(spare or fitting, key=rank)
    option = ["--num_processes", str(devices)] if devices > 1 else []
    print(f"\nRecommended: {best['name']}\n  {reason(best, each)}")
    if best not in spare:
        print(f"  It is tight: an estimate is off by up to {SPARE - 1:.0%}.")
    print(f"  {shlex.join(['./launch.sh', best['name'], *option, *words])}")
    for line in unknown(best, able, made, words, option):
        print(f"  {line}")
    return 0


def unknown(best, able, made, words, option):
    """What nobody has measured, one line each."""
    if made:
        shown = {key: made["args"][key] for key in ("model", "dataset", "max_steps") if key in made["args"]}
        what = ", ".join([str(made["recipe"]), *(f"{key} {value}" for key, value in shown.items())])
        yield f"The comparison was of {what}, on {made['device']}; of any other training it is a hint."
    fp8 = [one["name"] for one in able if one["asked"]["precision"] == "fp8" and one["loss"][0] is None]
    if fp8:
        yield f"Nobody has measured what FP8 does to this loss: {', '.join(fp8)}."
        pair = (best["name"], fp8[0])
        if best["name"] in fp8:
            pair = (f"{best['asked']['strategy']}_bf16", best["name"])
        yield f"  ./launch.sh compare {' '.join(pair)} -- {shlex.join([*option, *words])}"
    if not any(one["speed"] for one in able):
        yield "Nobody has measured the speed of any of them on these devices: ./launch.sh compare does, where they are."


def print_table(able, parameters, devices, memory, fitting, spare, words):
    size = f"{parameters / 1e6:,.1f}M parameters, " if parameters else ""
    print(f"{words[0]}: {size}{devices} device{'s' * (devices > 1)} of {amount(memory)}")
    heads = ["config", "fits", "memory per device", "state, B/param and device", "sent per step", "loss"]
    rows = []
    for one in able:
        fits = "yes" if one in spare else "tight" if one in fitting else "no"
        per = f"{one['states'] / parameters:.2f}" if parameters else "-"
        wire = "not known" if one["sent"] is None else amount(one["sent"])
        rows.append([one["name"], fits, amount(one["total"]), per, wire, one["loss"][1]])
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refused as refused:
        print(f"refused: {refused}", file=sys.stderr)
        sys.exit(2)
