"""Which lines of faithful/, shared/ and amp8/ no test executes, and why.

    coverage run -m pytest -m "" && coverage combine -q && coverage json -q -o coverage.json
    python benchmarks/uncovered.py coverage.json --tests "all of them" --output results/uncovered.json

All tests take hours on two cores. `-m "not slow or ci"` and some of the other slow ones will do, if they execute
all that has no reason: the tests that did not run can only make the list shorter.

Statements that follow one another and were not executed are one entry, and REASONS says by the first of them why. An
entry without a reason is an error, and so is a reason that no entry needs any more.
"""

import argparse
import json
from pathlib import Path

from provenance import ROOT, save

TRACED = "torch.compile traces it, so it runs where coverage does not look: test_compiles_* compare its results"
REASONS = {  # file -> {first line: why no test can execute it here}
    "amp8/convert.py": {"return": TRACED},
    "amp8/fsdp.py": {
        "groups = [state._fsdp_param_group] if state._fsdp_param_group else []": "torch 2.11 keeps its groups so",
        'raise RuntimeError("a converted weight is plain again: don\'t cast or move the model after amp8.initialize")':
            "a second guard: the forward pass refuses a cast model before it",
    },
    "amp8/scaling.py": {"return rounded(x).to(torch.bfloat16)  # one fused loop": TRACED},
    "faithful/backends/emulation.py": {
        "out = scaling.round_to_grid(blocks.to(torch.float32, copy=True), smallest, dtype).to(torch.bfloat16)": TRACED,
    },
    "faithful/backends/transformer_engine.py": {
        "raise": "a ValueError of the model's own inside TransformerEngine's blocks, which goes on as it is",
        'raise Refused(f"the checkpoint is of another model: it has no FP8 state of {name}")':
            "a second guard: a checkpoint with another recipe or other layers is refused before it",
    },
    "faithful/launch/machine.py": {"return max(0, resident_bytes() - self.before)": "a system that is not Linux"},
}  # fmt: skip


def entries(data):
    """[file, [line numbers]] of statements that follow one another and were not executed."""
    for file, found in sorted(data["files"].items()):
        missing, run = set(found["missing_lines"]), []
        for line in sorted(missing | set(found["executed_lines"])):
            if line in missing:
                run.append(line)
            elif run:
                yield file, run
                run = []
        if run:
            yield file, run


def explained(data, reasons, root=ROOT):
    """(the rows of the list, what is wrong with it, a line each)."""
    rows, wrong, used = [], [], set()
    for file, lines in entries(data):
        text = (root / file).read_text().splitlines()[lines[0] - 1].strip()
        reason = reasons.get(file, {}).get(text)
        used.add((file, text))
        rows.append({"file": file, "lines": lines, "first": text, "reason": reason})
        if reason is None:
            wrong.append(f"{file}:{lines[0]}: no test executes `{text}`: write one, or a reason into REASONS")
    for file, texts in reasons.items():
        wrong += [
            f"{file}: `{text}` is executed now, or gone: remove its reason"
            for text in texts
            if (file, text) not in used
        ]
    return rows, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("coverage", type=Path, help="what `coverage json` wrote")
    parser.add_argument("--tests", required=True, help="which tests ran under coverage, for the record")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "uncovered.json")
    args = parser.parse_args()
    data = json.loads(args.coverage.read_text())
    rows, wrong = explained(data, REASONS)
    if wrong:
        raise SystemExit("\n".join(wrong))
    statements = data["totals"]["num_statements"]
    save(
        args.output,
        {
            "tests": args.tests,
            "statements": statements,
            "not_executed": data["totals"]["missing_lines"],
            "entries": rows,
        },
        ["coverage"],
    )


if __name__ == "__main__":
    main()
