"""The study: its plan is the protocol's, it goes on where it stopped, joins machines, and sees a planted fault."""

import argparse
import json
import re
import shutil

import pytest
import study
import study_tensors
import torch
from conftest import CONFIGS, ROOT
from study import ABSENT, BASELINE, CONTROL, TASKS, WAYS

from tools import find

DOCS = (ROOT / "docs" / "study.md").read_text()


def row(task, way, seed, value, device="CPU: a", code="1", **changes):
    measure = TASKS[task].measure
    return {"task": task, "way": way, "seed": seed, "config": WAYS[way].config, "command": "./launch.sh", "code": code,
            "perturbed": way == CONTROL, "device": device, "date": "2026-01-01", "seconds": 60.0, "status": "finished",
            "error": None, "measures": {measure: value, "rare_loss": value}, "bytes_per_parameter": {"total": 6.1},
            "parameters": 1_500_000, "linear": [28, 29], "summary": "single", "emulated": True, "first_batch": "b",
            "initial_weights": "w", "versions": {"torch": "2"}, "config_sha256": "c", "loss_curve": [[1, 2.0]],
            } | changes  # fmt: skip


def rows_of(task, way, apart, **changes):
    """Five pairs whose differences to the baseline scatter around `apart`, a share."""
    for seed in range(5):
        yield row(task, BASELINE, seed, 2.0 + seed / 100, **changes)
        yield row(task, way, seed, (2.0 + seed / 100) * (1 + apart + (seed - 2) / 10_000), **changes)


# ------------------------------------------------------------------------------------------------------------ the plan


def test_the_protocol_is_the_plan():
    """The page names every way with its config, and every task with its steps and margin."""
    ways, tasks = DOCS.split("## Trainings")[0], DOCS.split("## Trainings")[1].split("## How it is judged")[0]
    named = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in ways.splitlines() if "|" in line)))
    assert named == set(WAYS)
    assert set(re.findall(r"`([\w-]+)`", "\n".join(line.split("|")[1] for line in tasks.splitlines() if "|" in line))) == {
        "words", "accumulation", "finetune_1e-3", "finetune_1e-6", "vit", "gpt",
    }  # fmt: skip
    for name, task in TASKS.items():
        [line] = [line for line in tasks.splitlines() if line.startswith(f"| `{name.split('_')[0]}")]
        steps = int(find.option(task.options, "max_steps"))
        assert f"{steps:,} of" in line and f"{100 * task.margin:g}%" in line, name
    assert "bitsandbytes" in ABSENT and "nvfp4" in ABSENT and "NVFP4" in ways and "bitsandbytes" in ways
    assert f"fewer than {study.RARE} occurrences" in tasks and study.SEEDS == 5


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_a_launch_that_can_be_typed(way):
    chosen = WAYS[way]
    assert (CONFIGS / f"{chosen.config}.yml").is_file()
    for name, task in TASKS.items():
        if study.applies(way, name):
            find.parse_options(find.recipe(task.recipe), [*chosen.options, *study.options_of(name, 0)])
    assert chosen.script is None or (ROOT / chosen.script).is_file()


# --------------------------------------------------------------------------------------------- going on, and machines


def test_it_goes_on_where_it_stopped():
    chosen = {"tasks": ["words"], "ways": ["bf16", "o2", "ao"], "seeds": 2}
    missing = study.missing([], "CPU: a", "1", **chosen)
    assert missing == [("words", way, seed) for seed in (0, 1) for way in ("bf16", "o2", "ao")]
    rows = [row("words", "bf16", 0, 2.0), row("words", "o2", 0, 2.0)]
    assert study.missing(rows, "CPU: a", "1", **chosen) == missing[2:]
    everything = [row(task, way, seed, 2.0) for task, way, seed in missing]
    assert study.missing(everything, "CPU: a", "1", **chosen) == []


def test_another_machine_does_what_is_missing_with_a_baseline_of_its_own():
    chosen = {"tasks": ["words"], "ways": ["bf16", "o2", "ao"], "seeds": 1}
    rows = [row("words", "bf16", 0, 2.0), row("words", "o2", 0, 2.0)]
    assert study.missing(rows, "CPU: b", "1", **chosen) == [("words", "bf16", 0), ("words", "ao", 0)]
    assert study.missing(rows, "CPU: a", "2", **chosen) == [("words", "bf16", 0), ("words", "ao", 0)], "other code"
    assert len(study.missing(rows, "NVIDIA H100", "1", **chosen)) == 3, "a GPU repeats what CPUs have"


def test_what_a_machine_refuses_is_not_tried_again():
    rows = [row("words", "te_mxfp8", 0, None, status="refused", error="refused: mxfp8 needs ...", measures={})]
    left = study.missing(rows, "CPU: a", "1")
    assert {way for _, way, _ in left} == set(WAYS) - {"te_mxfp8"}


def test_what_another_machine_or_earlier_code_refuses_is_tried():
    refusal = row("words", "te_mxfp8", 0, None, status="refused", error="refused: mxfp8 needs ...", measures={})
    rows = [row("words", "bf16", 0, 2.0), refusal]
    chosen = {"tasks": ["words"], "ways": ["bf16", "te_mxfp8"], "seeds": 1}
    for device, code in (("CPU: b", "1"), ("CPU: a", "2")):
        assert ("words", "te_mxfp8", 0) in study.missing(rows, device, code, **chosen), (device, code)
    later = [row("words", way, 0, 2.0, code="2") for way in ("bf16", "te_mxfp8")]
    found, refused = (study.result_of(some, "CPU", "words", "te_mxfp8") for some in ([*rows, *later], rows))
    assert found["seeds"] == [0] and not found["failed"] and refused["failed"], "it ran elsewhere"


def test_a_pair_has_one_machine_one_code_and_one_start():
    pair = [row("words", "bf16", 0, 2.0), row("words", "o2", 0, 2.1)]
    assert list(study.pairs(pair, "words", "o2")) == [0]
    for change in ({"device": "CPU: b"}, {"code": "2"}, {"initial_weights": "x"}, {"first_batch": "x"}):
        assert not study.pairs([pair[0], pair[1] | change], "words", "o2"), change
    other = [row("words", "bf16", 0, 3.0, device="CPU: b"), row("words", "o2", 0, 3.3, device="CPU: b")]
    assert study.pairs([*pair, *other], "words", "o2")[0][0]["measures"]["weights_loss"] == 2.1, "a seed counts once"
    control = [pair[0], row("words", "control", 0, 2.0, initial_weights="one rounding apart")]
    assert list(study.pairs(control, "words", "control")) == [0]


def test_the_hours_that_are_left_are_estimated_from_the_runs_that_ended():
    [(task, runs, hours, command)] = [line for line in study.left([], "CPU: a", "1") if line[0] == "words"]
    assert runs == 5 * len(WAYS) and command == "python benchmarks/study.py run --tasks words" and hours > 0
    slow = [row("words", way, 0, 2.0, seconds=3600.0) for way in WAYS if way != "planted"]
    [(_, runs, longer, _)] = [line for line in study.left(slow, "CPU: a", "1") if line[0] == "words"]
    assert runs == 4 * len(WAYS) + 1 and longer == pytest.approx(
        (4 * (len(WAYS) - 1) + 5 * 2 * TASKS["words"].seconds / 3600) / 2
    )


# ------------------------------------------------------------------------------------------------------------ verdicts


def test_verdicts_of_losses_and_of_gains():
    def kind(task, apart):
        [result] = [r for r in study.results(list(rows_of(task, "o2", apart))) if r["way"] == "o2"]
        return study.main_measure(result)["kind"]

    assert [kind("words", apart) for apart in (0.0, 0.02, -0.02)] == ["equal", "worse", "better"]
    assert [kind("finetune_1e-6", apart) for apart in (0.0, 0.2, -0.2)] == ["equal", "better", "worse"]
    few = [r for r in rows_of("words", "o2", 0.02) if r["seed"] < 4]
    [result] = [r for r in study.results(few) if r["way"] == "o2"]
    assert study.main_measure(result)["kind"] == "unknown" and "4 of 5 seeds" in study.said(result)


def a_study():
    rows = [*rows_of("words", "o2", 0.0), *rows_of("words", "planted", 0.3), *rows_of("words", "ao", 0.001),
            *rows_of("finetune_1e-6", "o2", -0.5)]  # fmt: skip
    rows = list({(r["task"], r["way"], r["seed"]): r for r in rows}.values())
    rows.append(
        row("words", "te_mxfp8", 0, None, status="refused", error="refused: mxfp8 needs <Blackwell>", measures={})
    )
    return [*rows, row("words", "o3", 0, None, status="failed", error="loss is not finite", measures={})]


def test_the_page_and_the_summary_say_what_was_found(tmp_path):
    study.write(a_study(), [("gpt", 90, 12.5, "python benchmarks/study.py run --tasks gpt")], tmp_path)
    text, found = (tmp_path / "page.html").read_text(), json.loads((tmp_path / "summary.json").read_text())
    kinds = {(r["task"], r["way"]): (study.main_measure(r) or {}).get("kind") for r in found["results"]}
    assert kinds["words", "planted"] == "worse" and kinds["words", "o2"] == "equal", "the planted fault is seen"
    assert kinds["finetune_1e-6", "o2"] == "worse" and kinds["words", "o3"] is None
    assert "mxfp8 needs &lt;Blackwell&gt;" in text and "loss is not finite" in text
    assert "python benchmarks/study.py run --tasks gpt" in text and "12.5" in text
    assert not re.search(r"https?:|<script|<img|src=|xmlns", text)
    picture = (tmp_path / "memory_and_loss.svg").read_text()
    assert "o2" in picture and "planted" not in picture and "prefers-color-scheme: dark" in picture


def test_a_study_that_has_just_begun_has_a_page_without_a_picture(tmp_path):
    study.write([row("words", "bf16", 0, 2.0), row("words", "bf16", 1, 2.0), row("words", "o2", 0, 2.1)], [], tmp_path)
    assert "1 of 5 seeds" in (tmp_path / "page.html").read_text() and not list(tmp_path.glob("*.svg"))


def test_a_killed_run_has_no_row_and_a_refused_one_its_reason(tmp_path):
    folder = tmp_path / "o2-seed0"
    folder.with_name("o2-seed0.log").write_text("asked: x\nrefused: not on this machine\nmore\n")
    assert (
        study.row_of("words", "o2", 0, folder, -9, 1.0) is None
        and study.row_of("words", "o2", 0, folder, 143, 1.0) is None
    )
    refused = study.row_of("words", "o2", 0, folder, 2, 1.0)
    assert (refused["status"], refused["error"]) == ("refused", "refused: not on this machine")
    failed = study.row_of("words", "o2", 0, folder, 1, 1.0)
    assert failed["status"] == "failed" and failed["error"] == "refused: not on this machine"


def test_an_incomplete_line_is_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(row("words", "o2", 0, 2.0)) + '\n{"task": "wo')
    assert len(study.read_rows(tmp_path)) == 1


def test_a_loss_curve_is_thinned_to_means():
    curve = [[step, float(step)] for step in range(1, 3001)]
    thin = study.thinned(curve)
    assert len(thin) <= study.POINTS and thin[-1][0] == 3000 and thin[-1][1] == pytest.approx(3000 - 24.5)
    assert study.thinned(curve[:7]) == curve[:7]


def test_one_run_from_its_launch_to_its_row(monkeypatch, tmp_path):
    """A real launch of each script, two steps, with the measures computed from the saved weights."""
    short = ("--model", "llama_nano", "--sequence_length", "32", "--vocab_size", "300", "--max_steps", "2",
             "--eval_steps", "0", "--save_steps", "0")  # fmt: skip
    task = study.Task("?", "gpt", short, "weights_loss", 0.005, 1, "tiny")
    monkeypatch.setitem(TASKS, "words", task)
    monkeypatch.setitem(study.DATA, "tiny", 30_000)
    monkeypatch.setattr(study, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(study, "RUNS", ROOT / "runs" / f"test-{tmp_path.name}")
    chosen = {"tasks": ["words"], "seeds": 1, "hours": 1, "workers": 1, "threads": 1}
    try:
        study.run(argparse.Namespace(ways=["bf16", "planted", "o2_round_to_nearest"], **chosen))
    finally:
        shutil.rmtree(study.RUNS, ignore_errors=True)
    [bf16, nearest, planted] = sorted(study.read_rows(tmp_path / "results"), key=lambda r: r["way"])
    assert [r["status"] for r in (bf16, nearest, planted)] == ["finished"] * 3
    assert bf16["measures"]["weights_loss"] == pytest.approx(bf16["measures"]["eval_loss"], rel=0.01)
    assert study.pairs([bf16, nearest, planted], "words", "planted")
    assert len({r["measures"]["weights_loss"] for r in (bf16, nearest, planted)}) == 3


def test_how_far_weights_went_along_the_baselines_way():
    start = {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}
    baseline = {"a": torch.tensor([3.0, 0.0]).double(), "b": torch.tensor([4.0]).double()}
    stuck = study_tensors.moved(start, start, baseline, ["a", "b"])
    assert stuck == {"along": 0.0, "distance": 0.0}
    noisy = {"a": torch.tensor([3.0, 5.0]).double(), "b": torch.tensor([4.0]).double()}
    found = study_tensors.moved(start, noisy, baseline, ["a", "b"])
    assert found["along"] == 1.0 and found["distance"] == pytest.approx(2**0.5)
    assert study_tensors.moved(start, noisy, baseline, ["b"]) == {"along": 1.0, "distance": 1.0}


def test_the_results_that_are_here():
    """Rows say where they came from; the summary and the pages are of these rows; the planted fault is seen."""
    rows, found = study.read_rows(), json.loads((study.RESULTS / "summary.json").read_text())
    assert rows and sum(found["runs"].values()) == len(rows)
    for each in rows:
        assert each["command"].startswith("./launch.sh ") and each["date"] and each["device"]
        assert str(ROOT) not in json.dumps(each)
        assert each["status"] != "finished" or (each["loss_curve"] and each["versions"]["torch"])
    assert found["results"] == json.loads(json.dumps(list(study.results(rows))))
    words = {result["way"]: study.main_measure(result) for result in found["results"] if result["task"] == "words"}
    assert words["planted"]["kind"] == "worse" and words["o2"]["kind"] == "equal", "the planted fault is seen"
    # what README.md and docs/study.md say
    [o2] = [result for result in found["results"] if (result["task"], result["way"]) == ("words", "o2")]
    assert o2["bytes_per_parameter"] < 8 and words["bf16_pure"]["kind"] == "worse"
    assert words["adamw_8bit"]["kind"] == words["o2_round_to_nearest"]["kind"] == "equal"
    lost = {
        (result["task"], result["way"]): (measure["kind"], round(100 * measure["relative"]))
        for result in found["results"]
        if result["task"] in ("finetune_1e-5", "finetune_1e-6") and (measure := study.main_measure(result))
    }
    assert lost["finetune_1e-5", "o2"][0] == lost["finetune_1e-6", "o2"][0] == lost["finetune_1e-5", "o3"][0] == "equal"
    assert lost["finetune_1e-5", "o2_round_to_nearest"] == ("worse", -62) and lost[
        "finetune_1e-6", "o2_round_to_nearest"
    ] == (
        "worse",
        -86,
    )
    assert lost["finetune_1e-6", "o3"] == ("worse", -5) and lost["finetune_1e-6", "bf16_pure"][1] < -95
    settled = {
        result["task"]
        for result in found["results"]
        if result["way"] == "o2" and study.main_measure(result)["kind"] != "unknown"
    }
    assert settled == {"words", "finetune_1e-5", "finetune_1e-6"}, "README.md says that the others cannot tell"
    formats = ("ao", "ao_rowwise", "te", "te_current", "te_block", "o1")
    assert all(words[way]["kind"] == "equal" for way in formats) and words["muon"]["kind"] == "better"
    rare = {row[0]: row[-1] for row in study.rare_table(found["results"])[1]}
    assert rare.pop("muon") == "higher by 2%" and not [
        way for way in rare if "higher" in rare[way] and way != "planted"
    ]
    answer = dict(study.answer(found["results"]))
    assert answer["Fine-tuning at a learning rate of 1e-6, worse:"].startswith("bf16_pure (-97")
    rows = {row["way"]: row for row in json.loads((study.RESULTS / "tensors.json").read_text())["rows"]}
    assert rows["o2_round_to_nearest"]["linear"]["along"] < 0.1 and rows["bf16_pure"]["linear"]["along"] < 0.1
    assert min(rows[way]["linear"]["along"] for way in ("o2", "bf16_stochastic")) > 0.9
