"""The canary says which of our changes to other packages a new release breaks."""

import sys

import canary
import pytest

from faithful import patches

OLD = "def kept(a):\n    return a\ndef moved(a):\n    return a\ndef gone(a):\n    return a\ndef inside(a):\n    return a\nclass A:\n    def named(self, a):\n        return a\n"
NEW = "def kept(a):\n    return a\ndef moved(a, b=1):\n    return a\ndef inside(a):\n    return a + 0\nclass A:\n    def named(self, a):\n        return a\n"
ROWS = {f"canary_fake:{name}": "why" for name in ("kept", "moved", "gone", "inside", "A.named")}
BROKEN = {"kept": False, "moved": True, "gone": True, "inside": False, "A.named": True}  # the last by a failing test


def looked(tmp_path, monkeypatch, text):
    (tmp_path / "canary_fake.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return canary.look(sys.executable)


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.setattr(patches, "TABLE", ROWS | {"prose, which names no function": "why"})
    before, now = (looked(tmp_path, monkeypatch, text) for text in (OLD, NEW))
    failed = {
        "tests/a.py::test_b": "AttributeError: 'A' object has no attribute 'named'",
        "tests/a.py::test_c": "unnamed, knamed",
    }
    return {row["patch"].partition(":")[2]: row for row in canary.judged(before, now, failed)}


def test_what_a_release_has_changed_is_told_apart(rows):
    assert {name: canary.broken(row) for name, row in rows.items()} == BROKEN
    assert rows["gone"]["there"] is False and "gone" in rows["gone"]["why"]
    assert rows["moved"]["same_signature"] is False and rows["kept"]["same_source"] is True
    assert (rows["inside"]["same_signature"], rows["inside"]["same_source"]) == (True, False), "a source may change"
    assert rows["A.named"]["failing"] == ["tests/a.py::test_b"]


def test_the_table_has_a_line_for_each(rows):
    lines = list(canary.table({"patches": list(rows.values())}))
    assert len(lines) == 2 + len(ROWS)
    assert "| `canary_fake:gone` | NO | - | - | - |" in lines and "| `canary_fake:moved` | yes | NO | NO | - |" in lines


def test_failing_tests_are_counted_with_what_they_said(tmp_path):
    (tmp_path / "test_x.py").write_text("def test_a():\n    pass\ndef test_b():\n    assert 1 == 2, 'so it is'\n")
    (tmp_path / "reports").mkdir()
    count, failed = canary.run_tests(sys.executable, [str(tmp_path / "test_x.py")], tmp_path / "reports")
    [(name, said)] = failed.items()
    assert count == 2 and name.endswith("::test_b") and "so it is" in said


def test_all_that_faithful_replaces_is_there_with_the_pins():
    found = canary.look(sys.executable)
    assert len(found) > 15 and not {row: of["why"] for row, of in found.items() if not of["there"]}


def test_the_newest_releases_are_asked_for():
    wanted = canary.requirements()
    assert wanted[: len(canary.PACKAGES)] == canary.PACKAGES
    assert not [line for line in wanted[len(canary.PACKAGES) :] if line.split(">")[0].split("=")[0] in canary.PACKAGES]
