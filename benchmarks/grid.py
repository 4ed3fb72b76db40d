"""Every shipped config with 1, 2, 3 and 4 processes on a CPU: trains as its reference, and resumes, or is refused. The
cells of README's table without a shipped config, too, with the processes of the strategy's bf16 config.

    python benchmarks/grid.py                           writes results/grid.json, a cell at a time
    python benchmarks/grid.py tp_bf16 'zero*'           these configs again; other cells of the file stay
    python benchmarks/grid.py --not-shipped             the cells of README's table without a config, again
    python benchmarks/grid.py --reports                 writes results/reports.json: tests/scripts/reports.py's rows
    python benchmarks/grid.py --reports --rows 'partial*'   these rows again

A cell is six optimizer steps of a small Llama, and three more from the checkpoint of step 3. Its reference is one
process of the same precision and level with the same global batch. As that is rounded elsewhere, each loss and gradient
norm may be off by the largest of three figures: three times what another order of sums makes in the reference, measured
with the same samples in 2, 3 and 4 micro-batches; twice the reference's own distance to fp32, as either may be as far
off; four units of the 16-bit format's rounding, as FSDP2 and DeepSpeed round each activation, and autocast the inputs
of matrix products alone. `mistakes` has what a wrong training is off by, in fp32.

outcome   trains; refused (line: why); wrong (another loss, another resume); failed (line: a traceback's last line, or
          a hang)
losses    of the steps, with their gradient norms
furthest  the largest relative difference of one of these to the reference's; bound: what it may be
resumed   whether losses, weights and checkpoint of step 6 are those of the run that did not stop, bit for bit
spread    of a reference: what another order of sums makes
bytes     per parameter; sent: those that process 0 sends in an optimizer step, null if it is compiled
"""

import fnmatch
import itertools
import json
import re
import sys
import tempfile
from pathlib import Path

import yaml
from harness import ROOT, arguments, command, furthest, made, save

sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "scripts")]
import reports  # noqa: E402
from conftest import CONFIGS, Ranks, metrics, record  # noqa: E402  forks ranks from a process that has imported torch

from faithful.config import config_file  # noqa: E402
from faithful.config.settings import read_env, to_env  # noqa: E402
from shared import lm  # noqa: E402

OF_REPORTS = ("single_bf16", "ddp_bf16", "fsdp_bf16", "hsdp_bf16", "zero1_bf16", "zero2_bf16", "zero3_bf16",
              "single_fp8_msamp_o2", "ddp_fp8_msamp_o2", "ddp_fp8_msamp_o3", "fsdp_fp8_msamp_o2",
              "fsdp_fp8")  # fmt: skip
TABLE = ("fsdp", "hsdp", "tp", "fsdp_tp", "zero1", "zero2", "zero3", "zero3_sp")  # strategies of several processes
KINDS = ("fp32", "fp16", "fp8", "fp8_ao_rowwise", "fp8_ao_rowwise_with_gw_hp", "fp8_te", "fp8_msamp_o1", "fp8_msamp_o2",
         "fp8_msamp_o3")  # fmt: skip
FILES = {path.stem: path for path in CONFIGS.glob("*.yml")}  # and those that `write_others` makes
SHIPPED = frozenset(FILES)
STEPS, SAMPLES = 6, 12  # optimizer steps, and samples of each, over all processes
TAILS = ("_ckpt", "_noreshard", "_offload", "_compile")  # of a config that computes what the one without does


def write_others(folder):
    """Writes the configs of README's table that are not shipped: a strategy's for bf16, in another precision."""
    for strategy, kind in itertools.product(TABLE, KINDS):
        if f"{strategy}_{kind}" not in SHIPPED:
            other, asked = (config_file.read(FILES[name])[1] for name in (f"{strategy}_bf16", f"single_{kind}"))
            other |= {key: asked[key] for key in ("mixed_precision", "fp8_config") if key in asked}
            FILES[f"{strategy}_{kind}"] = Path(folder, f"{strategy}_{kind}.yml")
            FILES[f"{strategy}_{kind}"].write_text(yaml.safe_dump(other))


def run(config, processes, folder, *options, micro=1):
    """Trains. Returns {step: [loss, norm]} or, if it did not end well, what it said."""
    groups = processes // (mesh_of(config).tp * mesh_of(config).sp)  # each process of a group has the same samples
    words = {
        "--output_dir": folder, "--dataset": ROOT / "LICENSE", "--sequence_length": 32, "--model": "llama_grid",
        "--max_steps": STEPS, "--logging_steps": 1, "--eval_steps": 0, "--save_steps": STEPS // 2, "--warmup_steps": 0,
        "--per_device_train_batch_size": SAMPLES // max(1, groups) // micro,
        "--gradient_accumulation_steps": micro,
    }  # fmt: skip
    argv = [str(word) for pair in words.items() for word in pair]
    ranks = Ranks(FILES[config], [*argv, *map(str, options)], name="gpt", processes=processes)
    codes, text = ranks.wait(900 if "compile" in config else 100), ranks.text()
    return figures(folder) if set(codes) == {0} else ended(codes, text)


def figures(folder):
    return {row["step"]: [row["loss"], row["grad_norm"]] for row in metrics(folder) if "loss" in row}


def ended(codes, text):
    """(refused or failed, the line) of a run that did not end well."""
    said = [line for line in text.splitlines() if line.startswith("refused: ")]
    if set(codes) == {2} and said and "Traceback" not in text:
        return "refused", "; ".join(line.removeprefix("refused: ") for line in said)  # a line for each reason
    errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|refused|Exception|error): .*", text, re.MULTILINE)
    return "failed", f"exit codes {codes}: {(said or errors or text.splitlines() or ['nothing said'])[-1][:300]}"


def saved(folder):
    """{name: bytes} of the weights and of the tensors of the last checkpoint."""
    files = [*folder.glob("model/*.safetensors"), *folder.glob(f"checkpoint-{STEPS}/**/*.safetensors")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def mesh_of(config):
    return read_env(to_env(config_file.read(FILES[config])[1])).mesh


def reference_of(config):
    name = "single_" + config.removeprefix(f"{config_file.grammar(config)['strategy']}_")
    for tail in TAILS:
        name = name.removesuffix(tail)
    return name if (CONFIGS / f"{name}.yml").exists() else name.removesuffix("_te")


def cell(config, processes):
    row = {"config": config, "processes": processes}
    with tempfile.TemporaryDirectory() as folder:
        whole, part = Path(folder, "whole"), Path(folder, "part")
        found = run(config, processes, whole)
        if isinstance(found, tuple):
            return row | dict(zip(("outcome", "line"), found, strict=True))
        row["losses"], evidence = list(found.values()), record(whole)["evidence"]
        row |= {"bytes": evidence["bytes_per_parameter"]["total"], "sent": evidence["wire_bytes_per_step"]}
        again = run(config, processes, part, "--resume_from_checkpoint", whole / f"checkpoint-{STEPS // 2}")
        if isinstance(again, tuple):
            return row | {"outcome": "failed", "resumed": False, "line": f"resumed: {again[1]}"}
        last = list(found)[STEPS // 2 :]
        row["resumed"] = again == {step: found[step] for step in last} and saved(part) == saved(whole)
        if config == reference_of(config):
            ways = [run(config, 1, Path(folder, f"run{micro}"), micro=micro) for micro in (2, 3, 4)]
            row["spread"] = max(away(list(way.values()), row["losses"]) for way in ways)
    return row


def away(losses, right):
    return furthest([each for pair in losses for each in pair], [each for pair in right for each in pair])


def judged(row, rows):
    """The row with its distance to its reference, once that is among the rows, and what this makes it."""
    right = rows.get((reference_of(row["config"]), 1), {})
    if "losses" not in row or "spread" not in right or "line" in row:
        return row
    of_format = 0 if "fp32" in row["config"] else 4 * 2.0 ** (-12 if "fp16" in row["config"] else -9)
    bound = max(3 * right["spread"], 2 * away(right["losses"], rows["single_fp32", 1]["losses"]), of_format)
    row = row | {"reference": right["config"], "furthest": away(row["losses"], right["losses"]), "bound": bound}
    return row | {"outcome": "trains" if row["furthest"] <= bound and row["resumed"] else "wrong"}


def mistakes():
    """{what is wrong: how far losses and norms are off}, under single_fp32."""
    ways = {
        "right": (),
        "two thirds of the samples": ("--per_device_train_batch_size", SAMPLES * 2 // 3),
        "a rate 10% lower": ("--learning_rate", 1.8e-3),
    }
    with tempfile.TemporaryDirectory() as folder:
        found = {way: [*run("single_fp32", 1, Path(folder, way), *words).values()] for way, words in ways.items()}
    return {way: away(losses, found["right"]) for way, losses in found.items() if way != "right"}


def all_cells(names, before):
    """Yields what the file holds after each cell."""
    names.sort(key=lambda name: (name != "single_fp32", "compile" in name, reference_of(name) != name, name))
    rows = {(row["config"], row["processes"]): row for row in before["cells"]}
    wrong = before.get("mistakes") or mistakes()
    for config in names:
        for processes in numbers(config):
            rows[config, processes] = cell(config, processes)
            rows = {key: judged(rows[key], rows) for key in sorted(rows)}
            print(json.dumps(rows[config, processes] | {"losses": None}), flush=True)
            yield {"mistakes": wrong, "cells": [*rows.values()]}


def numbers(config):
    """Of processes, with which a config is launched."""
    if config in SHIPPED:
        return (1,) if config.startswith("single") else (1, 2, 3, 4)
    return (config_file.read(FILES[config])[1]["num_processes"],)


def all_reports(names, before, pattern):
    """The same for the scripts of reports whose names match."""
    scripts = fnmatch.filter([*reports.REPORTS, *reports.ALONE], pattern)
    rows = {(row["config"], row["name"]): row for row in before["cells"]}
    for config in filter(names.__contains__, OF_REPORTS):
        with tempfile.TemporaryDirectory() as folder:
            for row in reports.outcomes(scripts, config, Path(folder)):
                rows[config, row["name"]] = {"config": config} | row
                print(json.dumps(rows[config, row["name"]]), flush=True)
                yield {"cells": [*rows.values()]}


def main():
    parser = arguments(__doc__)
    parser.add_argument("configs", nargs="*", default=["*"], help="names, or patterns; default: all")
    parser.add_argument("--reports", action="store_true", help="the scripts of reports, in place of the grid")
    parser.add_argument("--rows", default="*", help="those scripts alone whose names match")
    parser.add_argument("--not-shipped", action="store_true", help="README's cells without a config alone")
    args = parser.parse_args()
    import deepspeed  # noqa: F401  once, and not in each rank
    import torchao  # noqa: F401

    lm.GPT_SIZES["llama_grid"] = ("llama", 64, 2, 4)  # for the forked ranks
    file = ROOT / "results" / ("reports.json" if args.reports else "grid.json")
    before = made(file, command=None, cells=[])
    with tempfile.TemporaryDirectory() as folder:
        write_others(folder)
        names = FILES.keys() - SHIPPED if args.not_shipped else FILES.keys()
        names = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in args.configs)]
        for found in all_reports(names, before, args.rows) if args.reports else all_cells(names, before):
            save(file, {"command": command(before["command"])} | found, ("accelerate", "deepspeed", "torchao"))


if __name__ == "__main__":
    main()
