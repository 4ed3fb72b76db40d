"""tools/compare.py: what it refuses, what it calls noise, what it writes, and that kill -9 costs no finished run."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, alive, metrics, record, train

from shared.args import Refused
from tools import compare, judge, report

SHORT = ("--max_steps", 60, "--warmup_steps", 5, "--save_steps", 0, "--eval_steps", 30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Real runs: bf16 with six seeds, MS-AMP's O2 with three, and bf16 with a learning rate ten times too high."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(6):
        train("single_bf16", folder / f"bf16-{seed}", "--seed", seed, *SHORT)
    for seed in range(3):
        train("single_fp8_msamp_o2", folder / f"o2-{seed}", "--seed", seed, *SHORT)
        train("single_bf16", folder / f"hot-{seed}", "--seed", seed, "--learning_rate", 2e-2, *SHORT)
    return folder


def compared(tmp_path, *argv):
    """report.json of a comparison over finished runs."""
    code = compare.main([*map(str, argv), "--no-estimate", "--report", str(tmp_path / "report")])
    assert code == 0
    return json.loads((tmp_path / "report" / "report.json").read_text())


def changed(run, to, **changes):
    """A copy of a run whose record differs; dots go into the nested record."""
    shutil.copytree(run, to)
    made = record(to)
    for key, value in changes.items():
        *path, last = key.split("__")
        inner = made
        for part in path:
            inner = inner[part]
        inner[last] = value
    (to / "run.json").write_text(json.dumps(made))
    return to


def test_two_seeds_of_one_config_are_no_measurable_difference(runs, tmp_path):
    made = compared(tmp_path, runs / "bf16-0", runs / "bf16-1")
    baseline, control = made["rows"]
    assert control["control"] and not baseline["control"]
    for name in ("eval_loss", "accuracy"):
        assert control["measures"][name]["mean"] != baseline["measures"][name]["mean"]
        assert control["measures"][name]["verdict"] == "no measurable difference"


def test_a_learning_rate_ten_times_too_high_is_not(runs, tmp_path):
    groups = [*sorted(runs.glob("bf16-?")), *sorted(runs.glob("hot-?"))]
    with pytest.raises(Refused, match=r"learning_rate: 0\.002 in \S+bf16-0, 0\.02 in \S+hot-0"):
        compared(tmp_path, *groups)
    made = compared(tmp_path, *groups, "--vary", "learning_rate")
    assert [row["config"] for row in made["rows"]] == ["single_bf16 learning_rate=0.002"] * 2 + ["single_bf16 learning_rate=0.02"]  # fmt: skip
    baseline, control, hot = (row["measures"]["eval_loss"] for row in made["rows"])
    assert control["verdict"] == "no measurable difference" and hot["verdict"] in ("higher", "lower")
    values = baseline["values"] + control["values"]
    assert hot["control_spread"] == max(values) - min(values) and len(values) == 6
    assert abs(hot["difference"]) > hot["control_spread"]


def test_outside_the_spread_of_fewer_than_three_seeds_nothing_is_said():
    assert judge.verdict(0.5, 0.1, 2) == "needs 3 seeds of the baseline to say"
    assert judge.verdict(0.5, 0.1, 3) == "higher" and judge.verdict(-0.5, 0.1, 3) == "lower"
    assert judge.verdict(-0.1, 0.1, 1) == "no measurable difference"


def test_another_batch_optimizer_dataset_and_step_count_are_refused_by_name(runs, tmp_path):
    other = train("single_fp8_msamp_o2", tmp_path / "other", "--dataset", "photos", "--per_device_train_batch_size", 16,
                  "--optimizer", "adamw", "--weight_decay", 0, "--max_steps", 4, "--save_steps", 0)  # fmt: skip
    with pytest.raises(Refused) as refused:
        compared(tmp_path, runs / "bf16-0", other)
    for line in ("dataset: digits in", "max_steps: 60 in", "weight_decay: 0.05 in", "global_batch_size: 32 in"):
        assert line in str(refused.value), refused.value
    assert "16 in" in str(refused.value) and re.search(r"\bdata: [0-9a-f]{12}\.\.\. in", str(refused.value))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"args__optimizer": "sgd"}, "optimizer: adamw in"),
        ({"versions__torch": "2.11.0"}, "version of torch: "),
        ({"device_name": "another"}, "device_name: "),
        ({"code_sha256": "0" * 64}, "code of the recipe, shared/, faithful/ and amp8/: "),
        ({"recipe": "resnet"}, "recipe: vit in"),
        ({"evidence__initial_weights": "0" * 64}, "initial weights of seed 0: "),
        ({"seen__first_batch": "0" * 64}, "first batch of seed 0: "),
        ({"seen__samples_per_step": 64}, "global_batch_size: 32 in"),
    ],
)
def test_what_else_may_not_differ(runs, tmp_path, change, named):
    other = changed(runs / "o2-0", tmp_path / "other", **change)
    with pytest.raises(Refused, match=re.escape(named)):
        compared(tmp_path, runs / "bf16-0", other)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"status": "failed", "error": "step 5: loss is not finite"}, "failed: step 5: loss is not finite"),
        ({"status": "running"}, "running: it did not finish"),
        ({"evidence": None}, "lacks evidence: truth, bytes_per_parameter, initial_weights"),
        ({"evidence__truth": None}, "lacks evidence: truth"),
        ({"seen__first_batch": None}, "lacks evidence: first_batch"),
        ({"schema_version": 1}, "schema_version 1, this version reads 2: run it again"),
        ({"evidence__linear_converted": 0}, "no Linear is recorded as converted"),
        ({"final": None}, "lacks evidence: final metrics"),
        ({"final__metrics__eval_loss": 0.001}, "run.json and metrics.jsonl disagree on eval_loss"),
        ({"final__step": 59}, "59 of 60 steps"),
    ],
)
def test_a_run_that_failed_or_lacks_evidence_is_no_number(runs, tmp_path, change, why):
    other = changed(runs / "o2-0", tmp_path / "o2", **change)
    made = compared(tmp_path, runs / "bf16-0", runs / "bf16-1", runs / "bf16-2", other, runs / "o2-1", runs / "o2-2")
    baseline, row = made["rows"]
    assert baseline["error"] is None and why in row["error"] and "seed 0" in row["error"]
    assert "measures" not in row and "curves" not in row
    assert why in (tmp_path / "report" / "report.md").read_text()


def test_a_folder_without_a_record_is_no_number(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    made = compared(tmp_path, runs / "bf16-0", tmp_path / "empty")
    assert "no record" in made["rows"][1]["error"]


@pytest.fixture(scope="module")
def full(runs, tmp_path_factory):
    """A report with everything in it: its folder and its JSON."""
    folder = tmp_path_factory.mktemp("full")
    groups = [*sorted(runs.glob("bf16-?")), *sorted(runs.glob("o2-?"))]
    return folder / "report", compared(folder, *groups, "--price-per-hour", 2)


def test_the_numbers_are_the_records(runs, full):
    rows = {("control" if row["control"] else row["config"]): row for row in full[1]["rows"]}
    assert list(rows) == ["single_bf16", "control", "single_fp8_msamp_o2"]
    o2, made = rows["single_fp8_msamp_o2"], [record(runs / f"o2-{seed}") for seed in range(3)]
    losses = [one["final"]["metrics"]["eval_loss"] for one in made]
    assert o2["measures"]["eval_loss"]["values"] == losses and o2["seeds"] == [0, 1, 2]
    assert o2["measures"]["eval_loss"]["mean"] == pytest.approx(sum(losses) / 3)
    assert o2["measures"]["eval_loss"]["spread"] == max(losses) - min(losses)
    assert o2["truth"] == made[0]["evidence"]["truth"] and "16 of 17 Linear in FP8" in o2["truth"]
    assert rows["control"]["seeds"] == [3, 4, 5]
    at_60 = [
        next(row["loss"] for row in metrics(runs / f"o2-{s}") if row["step"] == 60 and "loss" in row) for s in range(3)
    ]
    assert o2["curves"]["loss"][-1] == [60, pytest.approx(sum(at_60) / 3), min(at_60), max(at_60)]
    assert o2["bytes_per_parameter"]["total"] < 7 < rows["single_bf16"]["bytes_per_parameter"]["total"]
    rate = rows["single_bf16"]["measures"]["samples_per_second"]["mean"]
    assert rows["single_bf16"]["samples_per_unit_of_price"] == pytest.approx(rate * 1800)
    times = [one["throughput"] for one in made]
    assert all(0 < one["step_seconds_median"] <= one["step_seconds_p90"] for one in times)
    assert o2["step_seconds_p90"] == pytest.approx(sum(one["step_seconds_p90"] for one in times) / 3)


def test_emulated_speed_is_marked_and_not_ranked(full):
    folder, made = full
    found = made["rows"][-1]["measures"]["samples_per_second"]
    assert made["rows"][-1]["emulated"] and found["verdict"] == "emulated" and found["relative"] is None
    assert "samples_per_unit_of_price" not in made["rows"][-1]
    for name in ("report.md", "report.html"):
        assert "emulated, not ranked" in (folder / name).read_text()


def test_one_html_file_that_asks_nobody(full):
    text = (full[0] / "report.html").read_text()
    assert not re.search(r"https?://|<script|<img|@import|url\(|src=|<iframe", text)
    assert re.findall(r'href="([^"]*)"', text) == ["data:,"]
    assert "prefers-color-scheme: dark" in text and text.count("<svg") == 5
    assert text.count("<code>./launch.sh compare") == text.count("<figure>") == 5, "each picture says what made it"


def test_every_number_of_a_picture_is_in_a_table(full):
    text = (full[0] / "report.html").read_text()
    cells = set(re.findall(r"<td[^>]*>([^<]*)</td>", text))
    pictures = re.findall(r"<svg.*?</svg>", text, re.S)
    labels = [label for picture in pictures[-2:] for label in re.findall(r'class="tick">([\d.,]+)', picture)]
    assert len(labels) == 5 and set(labels) <= cells  # three speeds, two sizes
    for row in full[1]["rows"]:
        if not row["control"]:
            for points in row["curves"].values():
                assert {report.number(value) for point in points for value in point[1:]} <= cells


def test_the_files_say_the_same(full):
    folder, made = full
    with (folder / "report.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["config"] for line in lines] == [row["config"] for row in made["rows"]]
    assert float(lines[-1]["eval_loss_mean"]) == made["rows"][-1]["measures"]["eval_loss"]["mean"]
    markdown = (folder / "report.md").read_text()
    for _, _, rows in report.tables(made):
        for row in rows:
            assert all(str(cell).replace("|", "\\|") in markdown for cell in row)


def test_assert_close_gives_an_exit_code(runs, tmp_path, capsys):
    argv = [str(path) for name in ("bf16-[0-2]", "o2-?") for path in sorted(runs.glob(name))]
    argv += ["--no-estimate", "--report", str(tmp_path), "--assert-close", "single_bf16", "--rtol"]
    assert compare.main([*argv, "0.5"]) == 0
    assert compare.main([*argv, "1e-9"]) == 1
    assert "not close: single_fp8_msamp_o2: eval_loss" in capsys.readouterr().err


def test_every_config_gets_the_baselines_global_batch():
    configs = {name: compare.config_file(name) for name in ("single_bf16", "ddp_bf16", "fsdp_fp8", "tp_bf16")}
    words = ["vit", "--max_steps", "5"]
    assert compare.batches(configs, words, 0) == {"single_bf16": 32, "ddp_bf16": 16, "fsdp_fp8": 16, "tp_bf16": 32}
    assert compare.batches(configs, ["--num_processes", "4", *words], 0)["ddp_bf16"] == 8
    assert compare.batches(configs, [*words, "--per-device-train-batch-size=8"], 2)["ddp_bf16"] == 4
    with pytest.raises(Refused, match="don't divide by the 3 processes of ddp_bf16"):
        compare.batches(configs, ["--num_processes=3", *words], 0)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["single_bf16", "--", "vit", "--seed", "3"], "--seed: not here"),
        (["single_bf17", "--", "vit"], "no config single_bf17"),
        (["single_bf16", "--", "vitt"], "no recipe vitt"),
        (["single_bf16", "--"], "which recipe"),
        (["runs/nowhere"], "runs/nowhere is no folder of a run"),
    ],
)
def test_mistakes_are_one_line(argv, why):
    with pytest.raises(Refused, match=re.escape(why)):
        compare.main(argv)


def test_options_that_the_recipe_does_not_take_end_it_at_once(tmp_path):
    argv = ["single_bf16", "single_fp32", "--output_dir", str(tmp_path), "--", "vit", "--max_step", "4"]
    with pytest.raises(Refused, match="vit: unrecognized arguments: --max_step 4; python recipes/vit.py --help"):
        compare.main(argv)
    assert [path.name for path in tmp_path.iterdir()] == ["single_bf16-seed0.log"]


def start(folder):
    env = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix}
    words = ["./launch.sh", "compare", "single_fp32", "single_bf16", "fsdp_fp16", "--seeds", "1", "--control", "0",
             "--no-estimate", "--output_dir", str(folder), "--", "vit", "--max_steps", "4", "--logging_steps", "1"]  # fmt: skip
    with open(f"{folder}.log", "a") as log:
        return subprocess.Popen(words, cwd=ROOT, env=env, stdout=log, stderr=log)


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_killed_in_the_middle_it_goes_on_and_the_report_is_the_same(tmp_path):
    """kill -9 as soon as the second run trains; one config can't run here, and is a row with its reason."""
    folder = tmp_path / "comparison"
    first, second = folder / "single_fp32-seed0", folder / "single_bf16-seed0"
    process = start(folder)
    until(lambda: second.exists())
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not alive(str(second)))  # the run went with it
    before = (first / "run.json").stat().st_mtime_ns, (first / "run.json").read_text()
    assert record(first)["status"] == "finished" and not (folder / "report.json").exists()
    assert start(folder).wait() == 0
    assert ((first / "run.json").stat().st_mtime_ns, (first / "run.json").read_text()) == before
    reports = {name: (folder / name).read_text() for name in ("report.json", "report.md", "report.csv", "report.html")}
    assert start(folder).wait() == 0
    assert {name: (folder / name).read_text() for name in reports} == reports
    log = (tmp_path / "comparison.log").read_text()
    assert "3 runs, 1 of them finished before" in log and "3 runs, 2 of them finished before" in log
    rows = {row["config"]: row for row in json.loads(reports["report.json"])["rows"]}
    assert "fsdp in fp16 cannot rehearse on a CPU" in rows["fsdp_fp16"]["error"]
    undisturbed = train("single_bf16", tmp_path / "undisturbed", "--max_steps", 4)
    final = record(undisturbed)["final"]["metrics"]["eval_loss"]
    assert rows["single_bf16"]["measures"]["eval_loss"]["values"] == [pytest.approx(final, rel=1e-5)]


def test_the_page_in_a_browser(full, tmp_path):
    """No error on its console, no request to anybody, in light and in dark."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        pytest.skip("no chromium on the path")
    page_file = full[0] / "report.html"
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        colours = {}
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme)
            asked, said = [], []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            page.goto(page_file.as_uri())
            assert [url for url in asked if not url.startswith("data:")] == [page_file.as_uri()] and said == []
            colours[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert page.locator("svg").count() == 5 and page.locator("svg").first.bounding_box()["width"] > 400
        browser.close()
    assert colours["light"] != colours["dark"]
