"""tools/show.py: a run as a table and as a page."""

import json
import re
import shutil
import sys

import pytest
from conftest import launched, metrics, record, train

from tools import page, show

STEPS = ("--max_steps", 4, "--eval_steps", 2, "--logging_steps", 2, "--save_steps", 0, "--warmup_steps", 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train("fsdp_fp8", tmp_path_factory.mktemp("show") / "run", *STEPS)


def test_the_page_shows_the_run(run):
    done = launched("./launch.sh", "show", run, "--html")
    assert done.returncode == 0 and done.stdout == f"{run}/run.html\n", done.stderr
    text, made = (run / "run.html").read_text(), record(run)
    assert not re.search(r"https?:|<script|<img|@import|src=", text), "one file that asks nobody"
    heads = re.findall("<h2>(.*?)</h2>", text)
    curves = ["Loss", "Accuracy", "Grad norm", "Learning rate"]
    assert heads == ["What was counted on the live tensors", *curves, "Memory", "Layers in FP8", "Options"]
    assert re.search(r"<pre>\./launch\.sh fsdp_fp8 .*vit .*</pre>", text) or "tools/accelerate_launch" not in text
    final = made["final"]["metrics"]
    assert f"<b>accuracy</b> {final['accuracy']:.4f}" in text and f"<b>eval_loss</b> {final['eval_loss']:.4f}" in text
    assert "<b>precision</b> fp8 torchao tensorwise, emulated: no FP8 hardware" in text
    assert "<b>in FP8</b> 15 of 17 Linear layers" in text and "<b>how</b> fsdp x2 gloo, sharded by Block" in text
    assert f"{made['evidence']['wire_bytes_per_step']:,} bytes by each process" in text
    [evals] = [[row["step"] for row in metrics(run) if "accuracy" in row]]
    assert evals == [2, 4] and all(f"<td>{step}</td>" in text for step in evals)


def test_the_memory_is_that_of_the_model_and_of_each_process(run):
    made = record(run)
    text, evidence = show.drawn_memory(made), made["evidence"]
    whole = 16.0 * evidence["parameters"] / 2**20
    share = evidence["share_per_process"]
    each = (4 * share["weight"] + 4 * share["gradient"] + 8 * share["optimizer"]) * evidence["parameters"] / 2**20
    totals = [float(row.split("<td>")[-1]) for row in re.findall("<tr><td>(.*?)</td></tr>", text)]
    assert totals == pytest.approx([whole, each], rel=1e-3) and each < 0.51 * whole


def test_the_strip_has_a_cell_for_each_layer(run):
    evidence = record(run)["evidence"]
    assert len(evidence["linear_names"]) == 17 and evidence["linear_names"][-1] == "head"
    text = show.drawn_layers(evidence)
    wide = re.search("<svg.*?</svg>", text, re.S)[0]
    blue, other = (wide.count(f"fill: var(--{page.VARIABLES[page.colour(i)]})") for i in (0, 1))
    assert (blue, other) == (15, 2)
    assert '<td>head</td><td class="words">10 is not a multiple of 16</td>' in text


def test_very_many_measures_points_and_layers_are_not_all_drawn(run):
    logged = [{"step": at} | {f"measure {number}": at for number in range(at and 30)} for at in range(2500)]
    curves, more = show.curves(record(run), [*logged, {"step": 2500, "eval_loss": 1}])
    assert {len(points) for name, points in curves.items() if "measure" in name} == {833}
    drawn = list(show.drawn_curves({name: points[:2] for name, points in curves.items()}, more))
    assert len(drawn) == 2 + show.MOST_CURVES and drawn[-1] == "<p>10 more measures are in metrics.jsonl.</p>"
    many = {"linear_names": [*map(str, range(show.MOST_CELLS + 1))], "linear_skipped": []}
    assert "<p>1,001 Linear layers are too many to draw.</p>" in show.drawn_layers(many)


def test_a_run_that_failed_before_a_step_has_a_page_too(run, tmp_path):
    made = record(run) | {"evidence": None, "final": None, "status": "failed", "error": "no <luck>", "args": {}}
    made["seen"] = made["seen"] | {"loss_curve": []}
    (tmp_path / "run.json").write_text(json.dumps(made))
    text = show.page_of(tmp_path)
    assert "<b>error</b> no &lt;luck&gt;" in text and "<h2>" not in text
    assert "failed" in show.text(tmp_path)


@pytest.mark.slow
def test_the_page_in_a_browser(run):
    """No error on its console, no request to anybody, in light, dark and on a phone."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        pytest.skip("no chromium on the path")
    assert launched(sys.executable, "tools/show.py", run, "--html").returncode == 0
    file = (run / "run.html").as_uri()
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        papers = set()
        for scheme, width in (("light", 1200), ("dark", 1200), ("light", 390)):
            page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
            asked, said = [], []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            page.goto(file)
            assert [url for url in asked if not url.startswith("data:")] == [file] and said == []
            assert page.locator("svg:visible").count() == 6
            assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
            papers.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        browser.close()
    assert len(papers) == 2
