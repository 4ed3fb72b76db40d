"""Runs Accelerate scripts that were not written for this project under our configs: which run, and which are refused.

    python benchmarks/clients.py --checkouts FOLDER --output results/clients.json
    python benchmarks/clients.py causal trl_dpo --configs ddp_bf16 fsdp_bf16 --output clients.json

The scripts are those of tests/clients, some of which use trainers of packages, and those of benchmarks/others.py, which
others wrote. Each is launched by `accelerate launch --config_file CONFIG -m faithful SCRIPT`. Two outcomes are right:

ran      the run's record says what it was, all processes belong to one run, and under DDP they have equal weights
refused  one line says why, and no traceback of the script

In fp32 each script also runs under Accelerate alone, on as many processes, and its losses and weights must be the same.
What each optimizer step did is written by benchmarks/witness/sitecustomize.py, for both in the same way.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tiny
from others import OTHERS, command, meant_for, origin
from provenance import ROOT, save

CONFIGS = """single_fp32 ddp_fp32 single_bf16 ddp_bf16 fsdp_bf16 hsdp_bf16 zero2_bf16 ddp_fp8 single_fp8_msamp_o2
    ddp_fp8_msamp_o3 fsdp_fp8_msamp_o2""".split()
OURS = sorted(path.stem for path in (ROOT / "tests" / "clients").glob("*.py") if path.stem != "ended")
WINS = {"diffusion"}  # scripts that pass mixed_precision="no"
PACKAGES = """accelerate transformers trl peft diffusers sentence-transformers pytorch-accelerated
    denoising-diffusion-pytorch""".split()
PATIENCE = 180  # seconds; the longest needs about 40 of them


def small(folder):
    """The data and models of benchmarks/tiny.py in `folder`, made once."""
    made = folder / "tiny"
    if not made.is_dir():
        (folder / "making").mkdir()
        tiny.make(folder / "making")
        (folder / "making").rename(made)
    return made


def launch(client, config, folder, checkouts, ours=True):
    """(folder of what it wrote, exit code or None after PATIENCE, what it printed)"""
    work = folder / f"{client}-{config}-{'ours' if ours else 'plain'}"
    out = work / "out"
    shutil.copytree(small(folder), work, ignore=shutil.ignore_patterns("clip_words"))
    (out / "witness").mkdir(parents=True)
    if client in OTHERS:
        words = [word.replace("OUT", str(out)) for word in OTHERS[client]["words"]]
        script = [*command(client, checkouts), *words]
    else:
        script = [ROOT / "tests" / "clients" / f"{client}.py", out]
    words = ["-m", "faithful", *(["--config_wins"] if client in WINS else [])] if ours else []
    port = [] if config.startswith("single") else ["--main_process_port", "0"]
    file = ROOT / "accelerate_configs" / f"{config}.yml"
    line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, *port, *words, *script]
    paths = [ROOT / "benchmarks" / "witness", ROOT, work, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {
        "PYTHONPATH": ":".join(map(str, paths)),
        "WITNESS": str(out / "witness"),
        "OMP_NUM_THREADS": "1",
        "FAITHFUL_PROJECT_DIR": str(out / "run"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(work / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not ours:
        env |= {"ACCELERATE_USE_CPU": "true"}  # else Accelerate makes two runs of one process each
    with (out / "printed.txt").open("w") as printed:
        process = subprocess.Popen(
            list(map(str, line)), env=env, cwd=work, stdout=printed, stderr=printed, start_new_session=True
        )
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = None
            process.wait()
    return out, code, (out / "printed.txt").read_text(errors="replace")


def witnessed(out):
    return [json.loads(path.read_text()) for path in sorted((out / "witness").glob("rank*.json"))]


def beside_accelerate(client, config, folder, checkouts, ranks):
    """How far losses and weights are from those under Accelerate alone, relative to them."""
    out, code, printed = launch(client, config, folder, checkouts, ours=False)
    alone = witnessed(out)
    if code or not alone:
        return {"accelerate_alone": f"exit code {code}: {last_error(printed)}"}

    def norms(rank):
        return [norm for optimizer in rank["optimizers"] for norm in optimizer["norms"]]

    row = {"same_weights_as_under_accelerate": list(map(hashes, ranks)) == list(map(hashes, alone))}
    for what, of in (("losses", lambda rank: rank["losses"]), ("norms", norms)):
        mine, its = [of(rank) for rank in ranks], [of(rank) for rank in alone]
        row[f"{what}_apart"] = f"{list(map(len, mine))} of them, {list(map(len, its))} under Accelerate"
        if list(map(len, mine)) == list(map(len, its)):
            pairs = zip(sum(mine, []), sum(its, []), strict=True)
            row[f"{what}_apart"] = max((abs(a - b) / max(abs(b), 1e-9) for a, b in pairs), default=0)
    return row


def hashes(rank):
    return [optimizer["hash"] for optimizer in rank["optimizers"]]


def last_error(printed):
    begins = re.compile(r"(\[rank\d\]: ?)?(refused|error|[\w.]*Error)\b")
    lines = [line for line in printed.splitlines() if begins.match(line)]
    return (lines or printed.splitlines()[-1:] or ["?"])[-1][:400]


def outcome(client, config, folder, checkouts=None):
    """A row of the table."""
    row, began = {"client": client, "config": config}, time.monotonic()
    if client in OTHERS:
        row["script"] = origin(client, checkouts)
    out, code, printed = launch(client, config, folder, checkouts)
    row["seconds"] = round(time.monotonic() - began)
    if code is None:
        return row | {"outcome": "failed", "why": f"no end in {PATIENCE} s"}
    refused = re.findall(r"refused: (.*)$", printed, re.M)  # after a progress bar, too
    file = next(iter(sorted(out.rglob("run.json"))), None)  # a script may name a folder of its own
    made = json.loads(file.read_text()) if file else None
    launchers = r"Traceback[^\n]*\n(?: [^\n]*\n)*? [^\n]*(?:torch/distributed/elastic|accelerate/commands/launch\.py)"
    if code and refused and "Traceback" not in re.sub(launchers, "", printed):
        return row | {"outcome": "refused", "why": refused[0]}
    ranks = witnessed(out)
    if code or not made or made["status"] != "finished" or not ranks:
        return row | {"outcome": "failed", "why": (refused or [last_error(printed)])[-1]}
    evidence, asked = made["evidence"], made["plan"]["num_processes"]
    equal = all(hashes(rank) == hashes(ranks[0]) for rank in ranks)
    right = len(ranks) == asked and all(rank["processes"] == asked for rank in ranks)
    right = right and (equal or evidence["sharded"] or made["plan"]["level"] == "o3")
    row |= {"outcome": "ran" if right else "failed", "processes": len(ranks), "equal_weights": equal}
    row |= {"steps": [len(optimizer["norms"]) for optimizer in ranks[0]["optimizers"]]}
    row |= {key: evidence[key] for key in ("sharded", "linear_converted", "linear_total", "truth")}
    row |= {"bytes_per_parameter": evidence["bytes_per_parameter"]["total"], "notes": made["notes"]}
    if config in ("single_fp32", "ddp_fp32"):
        row |= beside_accelerate(client, config, folder, checkouts, ranks)
        row["outcome"] = row["outcome"] if row.get("same_weights_as_under_accelerate") else "failed"
    return row


def installed(package):
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", default=OURS, help="names; by default all, of others with --checkouts")
    parser.add_argument("--configs", nargs="+", default=CONFIGS)
    parser.add_argument("--checkouts", type=Path, help="folder of repositories, see benchmarks/others.py")
    parser.add_argument("--folder", type=Path, help="keep what the runs write here")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    if args.clients is OURS and args.checkouts:
        args.clients = [*OURS, *OTHERS]
    folder, rows = args.folder or Path(tempfile.mkdtemp(prefix="clients-")), []
    folder.mkdir(exist_ok=True)
    if args.output.exists():  # with clients or configs named, their rows alone are measured anew
        before = json.loads(args.output.read_text())["rows"]
        again = {(client, config) for client in args.clients for config in args.configs}
        rows = [row for row in before if (row["client"], row["config"]) not in again]
    for client in args.clients:
        for config in [config for config in args.configs if meant_for(client, config)]:
            for old in folder.glob(f"{client}-{config}-*"):
                shutil.rmtree(old)
            rows.append(outcome(client, config, folder, args.checkouts))
            print(json.dumps(rows[-1]), flush=True)
            save(args.output, {"rows": rows}, [name for name in PACKAGES if installed(name)])
    if not args.folder:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
