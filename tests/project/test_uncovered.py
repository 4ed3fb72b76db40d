"""benchmarks/uncovered.py: each line that no test executes has a reason, and each reason such a line."""

import json
import sys

from conftest import MOVED, ROOT

sys.path.append(str(ROOT / "benchmarks"))
import uncovered  # noqa: E402


def test_a_line_without_a_reason_is_an_error_and_so_is_a_reason_without_a_line(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\nif x > 1:\n    x = 2\n\n    x = 3\nx = 4\nx = 5\n")
    data = {"files": {"a.py": {"executed_lines": [1, 2, 6], "missing_lines": [3, 5, 7]}}}
    rows, wrong = uncovered.explained(data, {"a.py": {"x = 2": "never", "x = 5": "later"}}, tmp_path)
    assert [(row["lines"], row["reason"]) for row in rows] == [([3, 5], "never"), ([7], "later")] and wrong == []
    _, wrong = uncovered.explained(data, {"a.py": {"x = 2": "never", "x = 4": "later"}}, tmp_path)
    assert len(wrong) == 2 and wrong[0].startswith("a.py:7: no test executes `x = 5`") and "`x = 4`" in wrong[1]


def test_each_reason_is_of_a_line_that_is_there():
    for file, texts in uncovered.REASONS.items():
        lines = {line.strip() for line in (ROOT / file).read_text().splitlines()}
        assert texts.keys() <= lines, (file, texts.keys() - lines)
        assert all(texts.values())


def test_the_committed_list_has_these_reasons():
    made = json.loads((ROOT / "results" / "uncovered.json").read_text())
    found = {}
    for entry in made["entries"]:
        found.setdefault(MOVED.get(entry["file"], entry["file"]), {})[entry["first"]] = entry["reason"]
    assert found == uncovered.REASONS
    assert made["not_executed"] == sum(len(entry["lines"]) for entry in made["entries"]) and made["statements"] > 5000
