"""What ordinary scripts do to a model, under each strategy and precision: as in plain torch, refused, or wrong.

    python benchmarks/what_scripts_do.py --output results/what_scripts_do.json

The rows are those of tests/scripts/habits.py, judged as tests/models/test_live.py judges them. --before: what an
earlier run of this script wrote, whose outcomes are kept beside today's.
"""

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

from provenance import ROOT, save

sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("", "models", "scripts"))]
from conftest import Ranks  # noqa: E402
from test_live import CELLS, NEAR, outcomes, rows_of  # noqa: E402

CONFIGS = (
    "single_fp8",
    "ddp_bf16",
    "ddp_fp8_msamp_o2",
    "fsdp_bf16",
    "fsdp_fp8",
    "zero1_bf16",
    "zero2_bf16",
    "zero3_bf16",
)
OPTIONS = {  # of scripts that try several things; the others get none
    "freeze": ["", "thaw", "freeze"],
    "unfreeze": ["--how unfreeze", "--how later", "--how group"],
    "grads": [f"--how {how}" for how in ("edit", "scale", "hook_before", "hook_after", "post")],
    "trains_in_eval": ["", "train"],
    "many_trainers": ["", "--end"],
    "zero_trainer": ["", "both"],
}


def printed(script, options, config):
    """What a script of somebody else ends with and prints of its results, launched as by `python -m faithful`."""
    from faithful.__main__ import take_its_place

    with tempfile.TemporaryDirectory() as folder:
        argv = ["--output_dir", f"{folder}/run"]

        def start(rank):
            sys.argv[1:] = options.split()
            os.chdir(folder)
            take_its_place()

        ranks = Ranks(config, argv, script=script.resolve(), before=start)
        codes, text = ranks.wait(), ranks.text()
    lines = [line for line in text.splitlines() if re.match("RESULT|OUT|refused|models alive|precision|error", line)]
    lines = lines or text.splitlines()[-1:]
    return {
        "exit_codes": sorted(set(codes)),
        "traceback": "Traceback" in text,
        "lines": [line[:300] for line in lines[:8]],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the file to write")
    parser.add_argument("--before", type=Path, help="what this script wrote with earlier code")
    parser.add_argument("--scripts", type=Path, help="a folder with scripts of others, which are launched, too")
    parser.add_argument("--join", nargs="*", type=Path, default=[], help="files of this script, whose cells are kept")
    parser.add_argument("--configs", nargs="*", help="such as zero2_bf16: these alone; with --join, these anew")
    args = parser.parse_args()
    names = args.configs or ([] if args.join else [f"{strategy}_{precision}" for strategy, precision in CELLS])
    joined = [json.loads(file.read_text()) for file in args.join]
    rows, scripts = ([one for other in joined for one in other[kind]] for kind in ("cells", "scripts"))
    rows = [cell for cell in rows if cell["config"] not in names]
    before = {} if args.before is None else json.loads(args.before.read_text())
    earlier = {(cell["row"], cell["config"]): cell["outcome"] for cell in before.get("cells", ())}
    for strategy, precision in (name.split("_") for name in names):
        with tempfile.TemporaryDirectory() as folder:
            for row, what, why in outcomes(rows_of(strategy), strategy, precision, Path(folder)):
                cell = {"row": row, "config": f"{strategy}_{precision}", "outcome": what}
                if isinstance(why, dict):
                    cell |= {key: round(value, 4) for key, value in why.items()}
                else:
                    cell["why"] = why.replace(str(ROOT), ".")[-400:]
                if earlier:
                    cell["before"] = earlier.get((row, cell["config"]))
                rows.append(cell)
                print(json.dumps(cell), flush=True)
    printed_before = {(one["script"], one["config"]): one["now"] for one in before.get("scripts", ())}
    for script in sorted(args.scripts.glob("*.py")) if args.scripts else ():
        for options, config in itertools.product(OPTIONS.get(script.stem, [""]), CONFIGS):
            one = {"script": f"{script.name} {options}".strip(), "config": config}
            if any(one.items() <= other.items() for other in scripts):
                continue  # in a file that is joined
            one["now"] = printed(script, options, config)
            if told := printed_before.get((one["script"], config)):
                one["before"] = told
            scripts.append(one)
            print(json.dumps(one), flush=True)
    counts = Counter(cell["outcome"] for cell in rows)
    print(dict(counts))
    if args.output:
        figures = {"near": NEAR, "counts": dict(counts), "cells": rows, "scripts": scripts}
        if before:
            figures["counts_before"] = before["counts"]
        save(args.output, figures, ["accelerate", "deepspeed", "torchao", "transformers"])


if __name__ == "__main__":
    main()
