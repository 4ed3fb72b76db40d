"""benchmarks/gpu.py, `./launch.sh gpu-first` and `gpu-report`: on a CPU, and on a pretended GPU as a whole, launchers and all."""

import json
import os
import re
import sys
from pathlib import Path

import gpu
import pytest
import speed
import torch
from conftest import ROOT, launched, record, train

from shared import vision


@pytest.mark.parametrize("level", ["bf16", "O1", "O2", "O3"])
def test_every_timed_step_moves_the_weights(level, monkeypatch):
    made, built = {}, gpu.models.gpt

    def remembered(*args):
        made["model"] = built(*args)
        return made["model"]

    def seconds(step):
        def weights():  # under O3 the masters: one step need not reach the next FP8 value
            each = made["model"].named_parameters()
            whole = {name: getattr(getattr(p, "amp8_linear", None), "master", None) for name, p in each}
            return {
                name: (p if whole[name] is None else whole[name]).detach().clone()
                for name, p in made["model"].named_parameters()
            }

        for _ in range(2):
            before = weights()
            step()
            assert not [name for name, weight in weights().items() if torch.equal(before[name], weight)]
        return 1.0

    monkeypatch.setattr(gpu.models, "gpt", remembered)
    monkeypatch.setattr(gpu, "seconds", seconds)
    assert gpu.optimizer_step(level, True)["seconds"] == 1.0


NVIDIA_SMI = """#!/bin/sh
case "$*" in
    -L) for card in $(seq {count}); do echo "GPU $card: NVIDIA H100 (pretended)"; done ;;
    *compute_cap*) for card in $(seq {count}); do echo "GPU-$card, NVIDIA H100 (pretended), 9.0"; done ;;
    *) echo "NVIDIA H100 (pretended), 580.00, 1980 MHz, 2619 MHz, 1980 MHz, 700.00 W, 30, 4 MiB" ;;
esac
"""
CUSTOMIZE = """
import os, sys
scripts = ("gpu.py", "gpu.py", "gpu.py", "vit.py", "gpt.py", "mine.py")
if any(part.endswith(scripts) for part in sys.orig_argv):
    os.environ.pop("TORCH_CUDA_SANITIZER", None)  # it needs a driver, and streams to watch
    sys.path.append({tests!r})
    import pretend
    pretend.wear(count={count})
"""


@pytest.fixture
def everywhere(gpu, tmp_path, request):
    """The environment in which each Python process of a launch has a pretended GPU, or as many as the test asks for,
    and so has nvidia-smi."""
    count = getattr(request, "param", 1)
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI.format(count=count))
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(CUSTOMIZE.format(tests=str(ROOT / "tests"), count=count))
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(tmp_path)}


@pytest.mark.slow
def test_the_benchmark_on_a_pretended_gpu(everywhere, tmp_path):
    only = ("rates", "optimizer-O3", "products", "level-", "vit_nano-8-fp8_msamp_o2")
    line = [sys.executable, "benchmarks/gpu.py", "--rehearse", "--output", str(tmp_path / "gpu.json"), "--only", *only]
    done = launched(*line, env=everywhere, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    cases = json.loads((tmp_path / "gpu.json").read_text())["cases"]
    assert {name: row["error"] for name, row in cases.items() if "error" in row} == {}
    assert {"rates", "products", "optimizer-O3", "level-O3", "vit_nano-8-fp8_msamp_o2"} <= cases.keys()
    assert cases["vit_nano-8-fp8_msamp_o2"]["measured"].startswith("single | fp8 MS-AMP O2")
    assert max(cases["products"]["relative_difference"].values()) < cases["products"]["rounding_of_bfloat16"]
    for level in ("O1", "O2", "O3"):
        assert cases[f"level-{level}"]["steps_with_equal_scales"] == 20


def test_a_row_of_the_report_has_the_figures_of_a_run(tmp_path, monkeypatch):
    """A row is made from the record that a run leaves, and a config that fails in any way does not end the report."""
    argv = ("--dataset", "synthetic", "--image_size", 32, "--per_device_train_batch_size", 4, "--max_steps", 5,
            "--eval_steps", 0, "--save_steps", 0, "--per_device_eval_batch_size", 64)  # fmt: skip
    run = train("ddp_bf16", tmp_path / "run", *argv)
    monkeypatch.setattr(gpu, "launched", lambda *_, **__: vision.own_run(run))
    row = gpu.tried("ddp_bf16", True, 5)
    assert row["outcome"] == "ran on a CPU" and row["flop_per_second"] > 0, row
    flop = 3 * 4 * gpu.forward_flop("vit_nano", vision.own_run(run)["data"])  # 4 images in each process
    assert row["flop_per_second"] * row["step_seconds"] == pytest.approx(flop)
    assert "| `ddp_bf16` | ran on a CPU |" in gpu.report_page({}, None, {"ddp_bf16": row})

    def fails(*_, **__):
        raise KeyError("a key that is gone")

    monkeypatch.setattr(gpu, "launched", fails)
    assert gpu.tried("ddp_bf16", True, 5)["outcome"] == "failed: KeyError: 'a key that is gone'"
    monkeypatch.undo()
    assert gpu.tried("single_bf16", True, 5, limit=0.5)["outcome"] == "failed: not done after 0.5 s"


def test_the_rates_are_measured_in_a_process_of_their_own():
    rates = gpu.measured("rates", True, 100)
    assert rates["bf16_flop_per_second"] > 0, rates


def test_the_first_minutes_write_a_page_whatever_fails(tmp_path):
    """Each item is a section of the page as soon as it ends: one that is too slow for its limit, too."""
    page, words = tmp_path / "page.md", ("--only", "machine", "races-ddp", "memory", "--minutes", "0.8")
    done = launched("./launch.sh", "gpu-first", "--rehearse", *words, "--output", str(page), timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    text = page.read_text()
    assert f"- torch: {torch.__version__}" in text and "## machine" in text and "- compiler: " in text
    assert text.count("## ") + text.count("Not begun: ") >= 2, text
    assert len([line for line in done.stdout.splitlines() if line.startswith("[")]) == text.count("## ")


def test_a_row_of_the_report_is_of_the_run_s_own_record(tmp_path, monkeypatch):
    model, words = gpu.workload("single_bf16", rehearse=True)
    run = train("single_bf16", tmp_path / "run", *words[1:], "--max_steps", 5, "--save_steps", 0)
    monkeypatch.setattr(gpu, "launched", lambda *_: vision.own_run(run))
    row = gpu.tried("single_bf16", True, 5)
    took = record(run)["throughput"]["step_seconds_median"]
    forward = gpu.forward_flop(model, vision.own_run(run)["data"])
    assert row["outcome"] == "ran on a CPU" and row["flop_per_second"] == pytest.approx(3 * 16 * forward / took)
    page = gpu.report_page({"date": "today"}, None, {"single_bf16": row})
    assert "| `single_bf16` | ran on a CPU |" in page and "- `single_bf16`: single | bf16" in page


@pytest.mark.slow
def test_the_report_on_a_pretended_gpu(everywhere, tmp_path):
    page = tmp_path / "page.md"
    words = ("--rehearse", "--steps", "6", "--output", str(page), "--only", "single_bf16", "single_fp8_msamp_o3",
             "hsdp", "single_fp8_te_mxfp8")  # fmt: skip
    done = launched("./launch.sh", "gpu-report", *words, env=everywhere, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    text = page.read_text()
    rows = {row.split("|")[1].strip(" `"): row.split("|")[2].strip() for row in text.splitlines() if row[:3] == "| `"}
    assert rows["single_bf16"] == rows["single_fp8_msamp_o3"] == "ran on 1", text
    assert rows["hsdp_bf16"].startswith("refused: ") and rows["single_fp8_te_mxfp8"].startswith("refused: ")
    assert "- `single_bf16`: single | bf16 compute" in text and "1 x NVIDIA H100 (pretended)" in text


@pytest.mark.slow
def test_the_first_minutes_on_a_pretended_gpu(everywhere, tmp_path):
    page, only = tmp_path / "page.md", ("machine", "step", "resume", "kernels")
    line = ("./launch.sh", "gpu-first", "--rehearse", "--output", str(page), "--only", *only)
    done = launched(*line, env=everywhere, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    text = page.read_text()
    assert "error" not in text and text.count("single | ") == 4 and "1 x NVIDIA H100 (pretended)" in text, text
    assert "- --deterministic: equal bit for bit" in text and "## kernels" in text


@pytest.mark.slow
@pytest.mark.parametrize("everywhere", [2], indirect=True)
def test_the_first_minutes_on_two_pretended_gpus(everywhere, tmp_path):
    """The items that need two cards, in processes that really shard and really die; the races without torch's
    sanitizer, which has no streams to watch here."""
    page, only = tmp_path / "page.md", ("memory", "failure", "races-ddp_fp8_msamp_o2")
    line = ("./launch.sh", "gpu-first", "--rehearse", "--output", str(page), "--only", *only)
    done = launched(*line, env=everywhere, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    text = page.read_text()
    assert re.findall("^## (.*)$", text, re.MULTILINE) == ["memory", "failure-memory", "failure-kill", *only[2:]], text
    assert "- error" not in text and "2 x NVIDIA H100 (pretended)" in text and "- processes: 2\n" in text, text
    assert "- exit code: 1\n" in text and "- its error: rank 1: OutOfMemoryError: out of memory, as" in text, text
    assert "- exit code: 137\n" in text and "- its error: another process of this run ended\n" in text, text
    assert text.count("- status: failed\n") == 2 and text.count("- status: finished\n") == 1, text


def test_the_first_minutes_have_time_for_the_last_item(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    known = gpu.items(rehearse=False)
    assert {name.split("-")[0] for name in known} == {
        "machine",
        "step",
        "resume",
        "kernels",
        "estimate",
        "memory",
        "failure",
        "races",
    }
    assert sum(seconds for seconds, *_ in known.values()) <= 600 and max(known[name][0] for name in known) <= gpu.MOST


MOST = {  # way -> bytes for each element of x, y and w in a layer's passes, and for each of w in the update
    "O1": ({"x": 8, "y": 8, "w": 13}, 21),
    "O2": ({"x": 8, "y": 8, "w": 13}, 11),  # torch's fused AdamW of fp32: 28
    "O3": ({"x": 8, "y": 8, "w": 9}, 13),
}


@pytest.mark.slow
def test_a_layer_of_a_level_moves_no_byte_in_vain():
    """A transposed copy by torch runs at a tenth of the memory's rate on an H100 (results/fp8_speed.json)."""
    found = speed.part("layers")
    for way, (passes, update) in MOST.items():
        assert found[way]["passes"]["bytes"] == passes and found[way]["update"]["bytes"]["w"] == update, found[way]
        assert found[way]["passes"]["turned"] == 0 and found[way]["update"]["turned"] < 1024, "a transposed copy"
        assert found[way]["passes"]["waits"] == found[way]["update"]["waits"] == 0
        assert found[way]["passes"]["launches"] <= 4 and found[way]["update"]["launches"] <= 17


@pytest.mark.slow
def test_a_compiled_layer_of_a_level_takes_few_kernels():
    """As many again would make a step of small layers wait for its host. None casts a weight's gradient."""
    found = speed.part("compiled")
    assert sum(map(len, found.pop("update").values())) <= 10, "of any number of layers, beside Adam's own"
    for passes in found.values():
        assert len(passes["forward"]) <= 6 and len(passes["backward"]) <= 7, passes


MOST_LAUNCHES = {"llama": 530, "vit": 1200}  # on an H200, at commit e30a4f4: 811 and 2,161 with what libraries add


@pytest.mark.slow
def test_a_compiled_step_of_a_level_takes_few_launches():
    """The host launches each by itself, and a step of small layers waits for it."""
    found = speed.part("launches")
    for model, most in MOST_LAUNCHES.items():
        assert found[model]["all"] <= most and found[model]["garbled"] == 0, found[model]
