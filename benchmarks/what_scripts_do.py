"""What ordinary scripts do to a model, under each strategy and precision: as in plain torch, refused, or wrong.

    python benchmarks/what_scripts_do.py --output results/what_scripts_do.json

The rows are those of tests/scripts/habits.py, judged as tests/test_live.py judges them. --before: what an earlier run
of this script wrote, whose outcomes are kept beside today's.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from provenance import ROOT, save

sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "scripts")]
from habits import NEED_BLOCKS, ROWS  # noqa: E402
from test_live import CELLS, NEAR, outcome  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the file to write")
    parser.add_argument("--before", type=Path, help="what this script wrote with earlier code")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), help="these rows alone")
    args = parser.parse_args()
    rows = []
    before = {} if args.before is None else json.loads(args.before.read_text())
    earlier = {(cell["row"], cell["config"]): cell["outcome"] for cell in before.get("cells", ())}
    for row in args.rows:
        for strategy, precision in CELLS:
            if strategy == "tp" and row in NEED_BLOCKS:
                continue
            with tempfile.TemporaryDirectory() as folder:
                what, why = outcome(row, strategy, precision, Path(folder))
            cell = {"row": row, "config": f"{strategy}_{precision}", "outcome": what}
            if isinstance(why, dict):
                cell |= {key: round(value, 4) for key, value in why.items()}
            else:
                cell["why"] = why.replace(str(ROOT), ".")[-400:]
            if earlier:
                cell["before"] = earlier.get((row, cell["config"]))
            rows.append(cell)
            print(json.dumps(cell), flush=True)
    counts = Counter(cell["outcome"] for cell in rows)
    print(dict(counts))
    if args.output:
        figures = {"near": NEAR, "counts": dict(counts), "cells": rows}
        if before:
            figures["counts_before"] = before["counts"]
        save(args.output, figures, ["accelerate", "deepspeed", "torchao", "transformers"])


if __name__ == "__main__":
    main()
