"""tools/compare.py: what it refuses, its verdicts on pairs, what it writes, and that kill -9 loses no finished run."""

import json
import math
import re
import shutil
import signal
import statistics
from functools import partial

import pytest
from conftest import ROOT, SCRIPTS, metrics, record, started, train, until, until_gone

from faithful.launch import machine
from shared.args import Refused
from tools import compare, find, judge, page, paired, report, tokens
from tools.records import read

PICTURES = 9  # differences in two metrics, of the loss over the steps twice, three curves, speed, memory
SHORT = ("--max_steps", 24, "--warmup_steps", 5, "--save_steps", 0, "--eval_steps", 12, "--logging_steps", 6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Real runs of one seed: bf16, its twin, MS-AMP's O2. Runs of other seeds are copies of them whose metrics were
    changed as if by a seed (20%) and by a config (2%, and 3% more in O2): bf16 and O2 with seeds 0 to 5, and bf16 with
    a learning rate ten times too high."""
    folder = tmp_path_factory.mktemp("runs")
    train("single_bf16", folder / "real", *SHORT)
    train("single_bf16", folder / "twin-0", *SHORT, env={"FAITHFUL_PERTURBED": "1"})
    train("single_fp8_msamp_o2", folder / "real-o2", *SHORT)
    for seed in range(6):
        luck = 1 + 0.2 * (-1) ** seed * (1 + seed / 9)
        own = 1 + 0.02 * (-1) ** (seed // 2)
        seeded(folder / "real", folder / f"bf16-{seed}", seed, luck)
        seeded(folder / "real-o2", folder / f"o2-{seed}", seed, luck * own * 1.03)
        seeded(folder / "real", folder / f"hot-{seed}", seed, luck * own * 1.5, args__learning_rate=2e-2)
    return folder


@pytest.fixture(autouse=True)
def nothing_is_drawn(monkeypatch):
    """A report takes a second to draw. The one of `full`, made before a test begins, has its pictures."""
    monkeypatch.setattr(page, "svg", lambda *_: "")


def seeded(run, to, seed, factor, **changes):
    """A copy of a run with another seed and with all its metrics times `factor`."""
    both = {"evidence__initial_weights": f"weights {seed}", "seen__first_batch": f"batch {seed}", "args__seed": seed}
    changed(run, to, **both, **changes)
    rows = [
        {k: v * factor if k not in ("step", "learning_rate") else v for k, v in row.items()} for row in metrics(run)
    ]
    (to / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = record(to)
    made["final"]["metrics"] = {key: rows[-1][key] for key in made["final"]["metrics"]}
    (to / "run.json").write_text(json.dumps(made))


def compared(tmp_path, *argv):
    """report.json of a comparison over finished runs."""
    code = compare.main([*map(str, argv), "--report", str(tmp_path / "report")])
    assert code == 0
    return json.loads((tmp_path / "report" / "report.json").read_text())


def changed(run, to, **changes):
    """A copy of a run with changes in its record; dots in a key go into nested dicts."""
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


def test_seeds_of_one_config_alone_say_what_chance_does(runs, tmp_path):
    made = compared(tmp_path, *sorted(runs.glob("bf16-?")))
    assert [row["config"] for row in made["rows"]] == ["single_bf16"]
    values = made["rows"][0]["measures"]["eval_loss"]["values"]
    assert made["chance"]["eval_loss"]["deviation"] == pytest.approx(statistics.stdev(values) / statistics.mean(values))
    assert "one seed to the next: 2" in (tmp_path / "report" / "report.md").read_text()


def test_a_learning_rate_ten_times_too_high_is_higher(runs, tmp_path):
    groups = [*sorted(runs.glob("bf16-?")), *sorted(runs.glob("hot-?"))]
    with pytest.raises(Refused, match=r"learning_rate: 0\.002 in \S+bf16-0, 0\.02 in \S+hot-0"):
        compared(tmp_path, *groups)
    made = compared(tmp_path, *groups, "--vary", "learning_rate")
    assert [row["config"] for row in made["rows"]] == [
        "single_bf16 learning_rate=0.002",
        "single_bf16 learning_rate=0.02",
    ]
    hot = made["rows"][1]["measures"]["eval_loss"]
    assert hot["kind"] == "higher" and re.fullmatch(r"higher by \d\d%", hot["verdict"])


def test_a_difference_of_three_percent_shows_behind_seeds_that_differ_by_twenty(runs, tmp_path):
    groups = [*sorted(runs.glob("bf16-?")), *sorted(runs.glob("o2-?"))]
    made = compared(tmp_path, *groups, "--margin", "2%")
    base, o2 = (row["measures"]["eval_loss"] for row in made["rows"])
    expected = paired.judge(base["values"], o2["values"], 0.02)
    assert {key: o2[key] for key in expected} == expected and o2["pairs"] == 6
    assert made["chance"]["eval_loss"]["deviation"] > 0.15 > o2["resolution"]
    text = (tmp_path / "report" / "report.md").read_text()
    assert paired.needs(o2, 0.02) in text and o2["verdict"] in text


def test_the_twin_is_a_control_from_weights_one_rounding_apart(runs, tmp_path):
    made = compared(tmp_path, runs / "real", runs / "real-o2", runs / "twin-0")
    assert [(row["config"], row["control"]) for row in made["rows"]] == [
        ("single_bf16", False),
        ("single_bf16, twin", True),
        ("single_fp8_msamp_o2", False),
    ]
    assert record(runs / "twin-0")["seen"]["nudged"] and "nudged" not in record(runs / "real")["seen"]
    weights = [record(runs / name)["evidence"]["initial_weights"] for name in ("real", "twin-0", "real-o2")]
    assert weights[0] == weights[2] != weights[1]
    twin = made["rows"][1]["measures"]["eval_loss"]
    assert twin["mean"] != made["rows"][0]["measures"]["eval_loss"]["mean"] and abs(twin["relative"]) < 0.05
    assert twin["verdict"] == "cannot tell: 5 seeds are needed, there is 1"


def test_runs_without_numbers_are_refused_and_what_differs_is_named(runs, tmp_path):
    """A run without numbers is refused, such as one of three steps, too few for a step time; the message names what
    differs."""
    no_times = {"throughput__step_seconds_median": None}
    one = changed(runs / "bf16-0", tmp_path / "one", **no_times)
    with pytest.raises(
        Refused, match="no run has numbers to compare:\n  one: lacks evidence: throughput\n  two: lacks"
    ):
        compared(tmp_path, one, changed(runs / "o2-0", tmp_path / "two", **no_times))
    small = changed(runs / "o2-0", tmp_path / "small", seen__samples_per_step=8, args__max_steps=3, **no_times)
    with pytest.raises(
        Refused, match=r"max_steps: 24 in \S+one, 3 in \S+small\n  global_batch_size: 32 in \S+one, 8 in"
    ):
        compared(tmp_path, one, small)
    with pytest.raises(Refused, match="global_batch_size: 32 in"):
        compared(tmp_path, runs / "bf16-0", small)


def test_without_metrics_the_training_loss_is_compared_and_that_is_said(runs, tmp_path):
    names = [f"{kind}-{seed}" for kind in ("bf16", "o2") for seed in range(3)]
    copies = [changed(runs / name, tmp_path / name, final=None) for name in names]
    made = compared(tmp_path, *copies)
    curve = record(copies[0])["seen"]["loss_curve"]
    assert made["fallback"] and made["measure"] == judge.TRAINING_LOSS and len(curve) == 24
    assert made["rows"][0]["measures"][judge.TRAINING_LOSS]["values"][0] == statistics.fmean(v for _, v in curve[-2:])
    assert "logged no metric with accelerator.log" in (tmp_path / "report" / "report.html").read_text()
    made = compared(tmp_path, runs / "bf16-0", runs / "bf16-1", *copies[3:5])
    assert "lacks evidence: final metrics" in made["rows"][1]["error"], "others have them"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"args__optimizer": "sgd"}, "optimizer: adamw in"),
        ({"args__dataset": "photos"}, "dataset: digits in"),
        ({"args__weight_decay": 0}, "weight_decay: 0.05 in"),
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


def test_other_data_of_the_same_name_are_refused(runs, tmp_path):
    other = changed(runs / "o2-0", tmp_path / "other")
    about = json.loads((other / "data.json").read_text())
    (other / "data.json").write_text(json.dumps(about | {"fingerprint": "0" * 64}))
    with pytest.raises(Refused, match=r"\bdata: [0-9a-f]{12}\.\.\. in"):
        compared(tmp_path, runs / "bf16-0", other)


def test_the_first_batch_of_slices_is_not_compared(runs, tmp_path):
    """Of sequences that a group shares, a process sees a slice of each."""
    change = {"seen__first_batch": "0" * 64, "plan__strategy": "zero3_sp"}
    made = compared(tmp_path, runs / "bf16-0", changed(runs / "o2-0", tmp_path / "other", **change))
    assert [row["error"] for row in made["rows"]] == [None, None]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"status": "failed", "error": "step 5: loss is not finite"}, "failed: step 5: loss is not finite"),
        ({"status": "running"}, "running: it did not finish"),
        ({"evidence": None}, "lacks evidence: measured, bytes_per_parameter, initial_weights"),
        ({"evidence__measured": None}, "lacks evidence: measured"),
        ({"seen__first_batch": None}, "lacks evidence: first_batch"),
        ({"schema_version": 2}, "schema_version 2, this version reads 3: run it again"),
        ({"evidence__linear_converted": 0}, "no Linear is recorded as converted"),
        ({"final": None, "seen__loss_curve": []}, "lacks evidence: final metrics"),
        ({"final__metrics__eval_loss": 0.001}, "run.json and metrics.jsonl disagree on eval_loss"),
        ({"final__step": 23}, "23 of 24 steps"),
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
    groups = [*sorted(runs.glob("bf16-?")), *sorted(runs.glob("o2-[0-2]"))]
    twins = [seeded(runs / "twin-0", folder / f"twin-{s}", s, 1 + 0.2 * (-1) ** s * (1 + s / 9)) for s in range(3)]
    twins = [folder / f"twin-{s}" for s in range(len(twins))]
    return folder / "report", compared(folder, *groups, *twins)


def test_the_numbers_are_the_records(runs, full):
    rows = {row["config"]: row for row in full[1]["rows"]}
    assert list(rows) == ["single_bf16", "single_bf16, twin", "single_fp8_msamp_o2"]
    o2, made = rows["single_fp8_msamp_o2"], [record(runs / f"o2-{seed}") for seed in range(3)]
    losses = [one["final"]["metrics"]["eval_loss"] for one in made]
    assert o2["measures"]["eval_loss"]["values"] == losses and o2["seeds"] == [0, 1, 2]
    assert o2["measures"]["eval_loss"]["mean"] == pytest.approx(sum(losses) / 3)
    assert full[1]["chance"]["eval_loss"]["values"] == 6, "chance is over all seeds of the baseline"
    last = [
        [row["loss"] for row in metrics(runs / f"{kind}-{s}") if "loss" in row][-1]
        for kind in ("bf16", "o2")
        for s in range(3)
    ]
    assert o2["curves"]["loss"][-1] == [24, pytest.approx(sum(last[3:]) / 3), min(last[3:]), max(last[3:])]
    step, mean, low, high = o2["difference_curves"]["loss"][-1]
    found = paired.judge(last[:3], last[3:])
    assert [mean, low, high] == pytest.approx([found["relative"], *found["interval"]]) and step == 24
    assert o2["bytes_per_parameter"]["total"] < 7 < rows["single_bf16"]["bytes_per_parameter"]["total"]
    times = [one["throughput"] for one in made]
    assert all(0 < one["step_seconds_median"] <= one["step_seconds_p90"] for one in times)
    assert o2["step_seconds_p90"] == pytest.approx(sum(one["step_seconds_p90"] for one in times) / 3)


def test_emulated_speed_is_marked_and_not_ranked(full):
    folder, made = full
    found = made["rows"][-1]["measures"]["samples_per_second"]
    assert made["rows"][-1]["emulated"] and found["kind"] == "emulated" and found["relative"] is None
    for name in ("report.md", "report.html"):
        assert "emulated, not ranked" in (folder / name).read_text()


def test_one_html_file_that_asks_nobody(full):
    text = (full[0] / "report.html").read_text()
    assert not re.search(r"https?://|<script|<img|@import|url\((?!#)|src=|<iframe", text)
    assert [link for link in re.findall(r'href="([^"]*)"', text) if not link.startswith("#")] == ["data:,"]
    assert "prefers-color-scheme: dark" in text and text.count("<svg") == 2 * PICTURES
    assert text.count("<figure>") == PICTURES and text.count("./launch.sh compare") == 1, (
        "what made it stands there once"
    )


def test_the_answer_stands_first(full):
    text, made = (full[0] / "report.html").read_text(), full[1]
    [(config, said)] = report.answer(made)
    assert config == "single_fp8_msamp_o2" and made["rows"][2]["measures"]["eval_loss"]["verdict"] in said
    assert text.index(said) < text.index("<svg") < text.index("<table")
    assert (
        text.index("Difference in eval_loss")
        < text.index("Difference over the steps: eval_loss")
        < text.index("Training loss</h2>")
    )
    assert said in (full[0] / "report.md").read_text() and f"{config}: {said}" in report.text(made)


def test_every_number_of_a_picture_is_in_a_table(full):
    text = (full[0] / "report.html").read_text()
    cells = set(re.findall(r"<td[^>]*>([^<]*)</td>", text))
    figures = re.findall(r"<figure>.*?</figure>", text, re.S)
    wanted = {
        label.removesuffix(", emulated")
        for figure in figures[-2:]
        for label in re.findall(r"font-size: 11px[^>]*>([\d.,]+(?:, emulated)?)</text>", figure)
    }
    assert len(wanted) >= 4 and wanted <= cells  # three speeds, two sizes
    assert {
        report.difference(row["measures"][name]) for row in full[1]["rows"][1:] for name in ("eval_loss", "accuracy")
    } <= cells
    for row in full[1]["rows"]:
        if not row["control"]:
            for points in row["curves"].values():
                assert {report.number(value) for point in points for value in point[1:]} <= {
                    number for cell in cells for number in re.split(r" \(| to |\)", cell)
                }


def test_the_files_say_the_same(full):
    folder, made = full
    assert json.loads((folder / "report.json").read_text()) == json.loads(json.dumps(made))
    markdown = (folder / "report.md").read_text()
    for _, _, rows in report.tables(made):
        for row in rows:
            assert all(str(cell).replace("|", "\\|") in markdown for cell in row)


def test_assert_close_gives_an_exit_code(runs, tmp_path, capsys):
    argv = [str(path) for name in ("bf16-[0-2]", "o2-[0-2]") for path in sorted(runs.glob(name))]
    argv += ["--report", str(tmp_path), "--assert-close", "single_bf16", "--rtol"]
    assert compare.main([*argv, "0.5"]) == 0
    assert compare.main([*argv, "1e-9"]) == 1
    assert "not close: single_fp8_msamp_o2: eval_loss" in capsys.readouterr().err


def test_every_config_gets_the_baselines_global_batch():
    wanted = {"single_bf16": 32, "ddp_bf16": 16, "fsdp_fp8": 16, "tp_bf16": 32, "fsdp_tp_bf16": 16, "zero3_sp_bf16": 32}
    ways = compare.ways_of([*wanted])
    words = ["vit", "--max_steps", "5"]
    cpu, gpus = machine.Machine(), machine.Machine("cuda", 8, "H100", (9, 0), "13.0", machine.PACKAGES)
    assert compare.batches(ways, words, cpu) == wanted
    assert compare.batches(ways, ["--num_processes", "4", *words], cpu)["ddp_bf16"] == 8
    assert compare.batches(ways, [*words, "--per-device-train-batch-size=8"], cpu)["ddp_bf16"] == 4
    on_8 = compare.batches(ways, words, gpus)  # a file that says a mesh starts the processes that it says
    assert (on_8["ddp_bf16"], on_8["fsdp_fp8"], on_8["tp_bf16"], on_8["fsdp_tp_bf16"]) == (4, 4, 32, 16)


def start(folder):
    words = ["./launch.sh", "compare", "single_fp32", "single_bf16", "tp_bf16", "--seeds", "1", "--no-twin",
             "--output_dir", str(folder), "--", "vit", "--max_steps", "20", "--logging_steps", "1"]  # fmt: skip
    return started(f"{folder}.log", *words)


def test_killed_in_the_middle_it_goes_on_and_the_report_is_the_same(tmp_path):
    """After kill -9 during the second run, the comparison continues and the report is the same. One config can't run
    here and is a row with the reason."""
    folder = tmp_path / "comparison"
    first, second = folder / "single_fp32-seed0", folder / "single_bf16-seed0"
    process = start(folder)
    until(second.exists, f"{folder}.log", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until_gone(second)  # the run went with it
    before = (first / "run.json").stat().st_mtime_ns, (first / "run.json").read_text()
    assert record(first)["status"] == "finished" and not (folder / "report.json").exists()
    assert start(folder).wait() == 0
    assert ((first / "run.json").stat().st_mtime_ns, (first / "run.json").read_text()) == before
    reports = {name: (folder / name).read_text() for name in ("report.json", "report.md", "report.html")}
    assert start(folder).wait() == 0
    assert {name: (folder / name).read_text() for name in reports} == reports
    log = (tmp_path / "comparison.log").read_text()
    assert "3 runs of vit, 1 of them finished before" in log and "3 runs of vit, 2 of them finished before" in log
    rows = {row["config"]: row for row in json.loads(reports["report.json"])["rows"]}
    assert "has no plan for tensor parallel" in rows["tp_bf16"]["error"]
    undisturbed = train("single_bf16", tmp_path / "undisturbed", "--max_steps", 20)
    final = record(undisturbed)["final"]["metrics"]["eval_loss"]
    assert rows["single_bf16"]["measures"]["eval_loss"]["values"] == [pytest.approx(final, rel=1e-5)]


def test_the_page_in_a_browser(full):
    """The page has no error on the console and makes no request, in light and in dark mode."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        pytest.skip("no chromium on the path")
    page_file = full[0] / "report.html"
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        colours, drawn = {}, {}
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme)
            asked, said = [], []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            page.goto(page_file.as_uri())
            assert [url for url in asked if not url.startswith("data:")] == [page_file.as_uri()] and said == []
            colours[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            drawn[scheme] = page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
            assert page.locator("svg:visible").count() == PICTURES
            assert page.locator("svg").first.bounding_box()["width"] > 400
        phone = browser.new_page(viewport={"width": 390, "height": 800})
        phone.goto(page_file.as_uri())
        assert phone.evaluate("document.documentElement.scrollWidth") <= 390, "nothing sticks out"
        box = phone.locator("svg:visible").first.bounding_box()
        assert phone.locator("svg:visible").count() == PICTURES and 300 < box["width"] <= 390
        browser.close()
    assert colours["light"] != colours["dark"] and drawn["light"] != drawn["dark"]


def test_seeds_auto_stops_at_the_first_look_with_a_verdict(runs, tmp_path, monkeypatch, capsys):
    """--seeds auto stops at the first look with a verdict. Existing runs stand in for launches: O2 within 3% of bf16 on
    either side, then far from it."""
    real = record(runs / "real-o2")["final"]["metrics"]["eval_loss"]
    for seed in range(6):
        same = record(runs / f"bf16-{seed}")["final"]["metrics"]["eval_loss"] / real
        seeded(runs / "real-o2", tmp_path / f"near-{seed}", seed, same * (1 + 0.03 * (-1) ** (seed // 2)))
        seeded(runs / "real-o2", tmp_path / f"far-{seed}", seed, same * (2 + 0.03 * (-1) ** (seed // 2)))
    asked, argv = [], ["single_bf16", "single_fp8_msamp_o2", "--seeds", "auto", "--max-seeds", "20",
                       "--report", str(tmp_path), "--", "vit"]  # fmt: skip

    def launched(kind, ways, words, folder, seeds, twin, budgets):
        asked.append(seeds)
        return {None: [read(file) for s in range(6) for file in (runs / f"bf16-{s}", tmp_path / f"{kind}-{s}")]}

    looks = paired.looks(20)
    monkeypatch.setattr(compare, "launch_all", partial(launched, "near"))
    assert compare.main(argv) == 0 and asked == looks
    made = json.loads((tmp_path / "report.json").read_text())
    assert made["looks"] == len(looks) and made["confidence"] == pytest.approx(1 - 0.05 / len(looks))
    assert "no verdict yet on single_fp8_msamp_o2" in capsys.readouterr().out
    assert f"with {len(looks)} looks at most" in (tmp_path / "report.md").read_text()
    asked.clear()
    monkeypatch.setattr(compare, "launch_all", partial(launched, "far"))
    assert compare.main(argv) == 0 and asked == looks[:1]
    assert "every config has a verdict" in capsys.readouterr().out


def test_budgets_turn_losses_into_tokens(runs, tmp_path, monkeypatch):
    """Existing runs stand in for launches, with losses 10% higher at half the budget."""
    half = {}
    for seed in range(6):
        half[seed] = [
            seeded_again(runs / f"{kind}-{seed}", tmp_path / f"{kind}-{seed}", 1.1) for kind in ("bf16", "o2")
        ]

    def launched(ways, words, folder, seeds, twin, budgets):
        assert budgets == [1, 2] and [way.options for way in ways.values()] == [[], ["--label_smoothing=0"]]
        whole = [read(runs / f"{kind}-{seed}") for seed in range(6) for kind in ("bf16", "o2")]
        return {1: [read(folder) for folders in half.values() for folder in folders], 2: whole}

    monkeypatch.setattr(compare, "launch_all", launched)
    where = tmp_path / "report"
    argv = ["single_bf16", "single_fp8_msamp_o2 --label_smoothing=0", "--budgets", "1,2", "--seeds", "6"]
    assert compare.main([*argv, "--report", str(where), "--", "vit"]) == 0
    made = json.loads((where / "report.json").read_text())
    base, o2 = made["rows"]
    losses = [each["values"] for each in base["tokens"]]
    assert losses[0] == pytest.approx([1.1 * loss for loss in losses[1]]) and "share" not in base["tokens"][0]
    here = o2["tokens"][1]
    values = o2["measures"]["eval_loss"]["values"]
    wanted = tokens.cost([1, 2], losses, values, 1, 0.95)
    assert here == {"budget": 2, "samples": made["samples"], "values": values} | wanted
    # O2's loss is 3% higher, and half the budget raises the baseline's by 10%.
    assert 0.1 < here["share"] < 0.4 and None not in here["interval"]
    [(_, said)] = report.answer(made)
    assert f"tokens for the same loss {report.token_words(here)}; " in said and "bytes per parameter for 16.0" in said
    for file in ("report.md", "report.html"):
        assert "Tokens for the base" in (where / file).read_text()
    assert "advise --memory 80GB --devices 8 --comparison" in (where / "report.md").read_text()


def seeded_again(run, to, factor):
    return seeded(run, to, record(run)["args"]["seed"], factor) or to


def test_a_metric_and_its_logarithm_get_one_verdict():
    """Perplexities 30 times as large as their logarithms would be told apart from noise in other cases."""
    loss = [[3.0, 3.2, 3.1, 3.3, 3.05], [3.0, 3.21, 3.08, 3.31, 3.06]]
    base, other = (
        {"config": name, "error": None, "emulated": False,
         "measures": {"perplexity": judge.over_seeds([*map(math.exp, values)]), "eval_loss": judge.over_seeds(values)}}
        for name, values in zip("ab", loss, strict=True)
    )  # fmt: skip
    judge.judge([base, other], 0.01, 0.95)
    found = other["measures"]
    assert found["eval_loss"]["verdict"] == found["perplexity"]["verdict"] == "equal within 1%"
    assert found["perplexity"]["interval"][1] > 0.01, "alone it would be no verdict"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["--budgets", "2,1", "--", "vit"],
            "--budgets: 2,1: write two or more multiples of the steps, ascending: 1,2,4",
        ),
        (["--budgets", "1", "--", "vit"], "--budgets: 1: write two or more"),
        (["--budgets", "1,inf", "--", "vit"], "--budgets: 1,inf: write two or more"),
        (
            ["--budgets", "1,2", "--", str(SCRIPTS / "loop.py")],
            "write {budget} there, as in loop.py --epochs {budget}",
        ),
        (["--budgets", "1,2"], "--budgets: not here; the budgets are those of the runs"),
        (["single_fp8 --max_steps 3", "--", "vit"], "--max_steps of one row: not here"),
        (["single_fp8 --seed=3", "--", "vit"], "--seed of one row: not here"),
        (["single_fp8 --max_step 3", "--", "vit"], "vit: .*--max_step"),
        (["single_fp8 '--x", "--", "vit"], "single_fp8 '--x: its quotes are not closed"),
    ],
)
def test_what_a_budget_and_a_row_may_not_be(tmp_path, argv, said):
    with pytest.raises((Refused, SystemExit), match=re.escape(said).replace(r"\.\*", ".*")):
        compare.main([str(tmp_path) if "--" not in argv else "single_bf16", *argv])


def test_each_budget_is_a_share_of_the_steps_or_epochs():
    vit = find.recipe("vit")
    assert compare.budgeted(vit, ["--max_steps", "150"], 0.9)[-2:] == ["--max_steps", "135"]
    assert compare.budgeted(vit, ["--num_train_epochs", "3"], 0.5)[-2:] == ["--num_train_epochs", "1.5"]
    assert compare.budgeted(SCRIPTS / "loop.py", ["--epochs", "{budget}"], 2.0) == ["--epochs", "2"]
    assert compare.ways_of(["single_bf16", "single_bf16 --a-b 1 --c=2"])["single_bf16 --a-b 1 --c=2"].vary == [
        "a_b",
        "c",
    ]


OWN = f"""
import argparse, os, sys, torch
sys.path.insert(0, {str(ROOT)!r})
from faithful import Accelerator
parser = argparse.ArgumentParser()
parser.add_argument("--luck", type=int, default=0)
parser.add_argument("--steps", type=int, default=12)
luck, steps = parser.parse_args().luck, parser.parse_args().steps
torch.manual_seed(luck)
accelerator = Accelerator(project_dir=os.environ["FAITHFUL_PROJECT_DIR"])
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
accelerator.init_trackers("own", {{"luck": luck}})
for _ in range(steps):
    x = torch.randn(8, 16, device=accelerator.device)
    accelerator.backward((model(x) - x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_of_ones_own_and_what_it_is_refused(tmp_path):
    """A script of your own runs once per config if {seed} is not in its arguments, and the report says so."""
    script = tmp_path / "own.py"
    script.write_text(OWN)
    assert not find.is_recipe(script) and all(map(find.is_recipe, (ROOT / "recipes").glob("*.py")))
    where = ["--output_dir", str(tmp_path / "runs")]
    with pytest.raises(Refused, match="own.py: unrecognized arguments: --seed 0; it was given --seed '{seed}'"):
        compare.main(["single_fp32", *where, "--", str(script), "--seed", "{seed}"])


@pytest.mark.slow
def test_a_script_of_ones_own_at_two_budgets(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(OWN)
    argv = ["single_fp32", "single_bf16", "--budgets", "1,2", "--seeds", "1", "--output_dir", str(tmp_path / "runs")]
    assert compare.main([*argv, "--", str(script), "--luck", "{seed}", "--steps", "{budget}0"]) == 0
    made = json.loads((tmp_path / "runs" / "report.json").read_text())
    assert [[each["samples"] for each in row["tokens"]] for row in made["rows"]] == [[80, 160], [160], [80, 160]]
    assert {path.name for path in (tmp_path / "runs" / "x2").glob("*-seed0")} == {
        "single_fp32-seed0", "single_fp32-twin-seed0", "single_bf16-seed0"}  # fmt: skip


@pytest.mark.slow
def test_a_script_of_ones_own(tmp_path, capsys):
    script = tmp_path / "own.py"
    script.write_text(OWN)
    where = ["--output_dir", str(tmp_path / "runs")]
    words = ["single_fp32", "single_bf16", "--seeds", "3", *where, "--", str(script), "--luck", "{seed}"]
    assert compare.main(words) == 0
    made = json.loads((tmp_path / "runs" / "report.json").read_text())
    assert [row["config"] for row in made["rows"]] == ["single_fp32", "single_fp32, twin", "single_bf16"]
    assert made["fallback"] and made["rows"][2]["measures"][judge.TRAINING_LOSS]["pairs"] == 3
    assert made["rows"][0]["seeds"] == [0, 1, 2] and "{seed}" in made["command"]
    assert compare.main(["single_fp32", "single_bf16", *where[:-1], str(tmp_path / "once"), "--", str(script)]) == 0
    assert "every config runs once" in capsys.readouterr().out
    assert "has no {seed}" in (tmp_path / "once" / "report.md").read_text()
