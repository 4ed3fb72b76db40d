"""results/docs_run.json: every command of README and docs/ was run, or there is a reason; the pages say what it prints."""

import json

import docs_run
import pytest
from conftest import ROOT

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
# What a page says, what was printed, and the lines of the page that are missing.
SAID = {
    "as it is": (["step 10: loss 2.249", "done"], ["step 10: loss 2.249", "done"], []),
    "other numbers, times and folders": (
        ["record: runs/demo-20261122-093703", "step 10: loss 2.249, learning_rate 5e-06"],
        ["record: runs/demo-20261126-122435", "step 10: loss 3.1, learning_rate 0.002"], []),
    "lines between": (["a", "[...]", "z"], ["a", "b", "c", "z"], []),
    "another word": (["accuracy 0.9"], ["precision 0.9"], ["accuracy 0.9"]),
    "another order": (["a", "b"], ["b", "a"], ["b"]),
    "a CPU without fast kernels": (
        ["bf16 compute | 16.0 B/param"], ["bf16 compute (attention in fp32: this CPU has no fast bf16 kernels) | 16.0 B/param"],
        []),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_a_page_is_held_against_what_was_printed(name):
    said, printed, missing = SAID[name]
    assert docs_run.missing(said, printed) == missing


def test_every_command_was_run_and_prints_what_its_page_says():
    found = json.loads((ROOT / "results" / "docs_run.json").read_text())
    rows = found["rows"]
    commands = [(page, line[1]) for page in PAGES for line in docs_run.blocks(ROOT / page)]
    assert "README.md" in PAGES and len(commands) >= 40
    ran = [(row["page"], row["command"]) for row in rows]
    assert ran == commands, "python benchmarks/docs_run.py --output results/docs_run.json --pages PAGE"
    for row in rows:
        assert row.get("not_run") or docs_run.as_said(row), row
