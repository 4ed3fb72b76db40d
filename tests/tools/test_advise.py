"""tools/advise.py: what it recommends and why, and that its bytes per step are those that were counted."""

import json

import pytest
from conftest import CONFIGS, ROOT

from shared.args import Refused
from tools import advise
from tools.estimate import read_config

GB = 10**9
WORDS = ["vit", "--model", "vit_huge"]


def test_what_it_says_is_sent_is_what_was_counted():
    runs = json.loads((ROOT / "results" / "strategies.json").read_text())["runs"]
    parameters = runs["ddp_bf16"]["wire_bytes_per_step"] / 4
    checked = set()
    for name, run in runs.items():
        if (CONFIGS / f"{name}.yml").is_file():
            said = advise.bytes_sent(read_config(CONFIGS / f"{name}.yml", run["processes"]), parameters)
            assert said == pytest.approx(run["wire_bytes_per_step"], rel=0.01), name
            checked.add(name.split("_")[0] + "_noreshard" * name.endswith("noreshard"))
    assert checked == {"single", "ddp", "fsdp_noreshard", "fsdp", "zero1", "zero2", "zero3", "hsdp"}
    assert advise.bytes_sent(read_config(CONFIGS / "tp_bf16.yml"), 1e6) is None, "no rule, so no number"


def advised(monkeypatch, capsys, sizes, *argv, memory=80):
    """What it prints where these configs take so many GB; and its exit code."""

    def estimates(wanted, *_):
        for name in wanted:
            size = sizes[name]
            yield name, {"total": size * GB, "states": size * GB // 2, "fits": size <= memory}, GB

    monkeypatch.setattr(advise, "estimates", estimates)
    code = advise.main([*sizes, "--memory", f"{memory}GB", *argv, "--", *WORDS])
    return capsys.readouterr().out, code


def best(text):
    return text.split("Recommended: ")[1].split("\n")[0]


def test_the_least_that_fits_in_high_precision(monkeypatch, capsys):
    sizes = {"fsdp_bf16": 10, "ddp_bf16": 40, "ddp_fp32": 50, "fsdp_bf16_noreshard": 12, "fsdp_fp8": 9}
    text, code = advised(monkeypatch, capsys, sizes, "--devices", "8")
    assert code == 0 and best(text) == "ddp_bf16"
    assert "./launch.sh ddp_bf16 --num_processes 8 vit --model vit_huge\n" in text
    assert "about 40.0 GB of 80.0 GB" in text and "bf16 needs no loss scaling" in text
    assert "Nobody has measured what FP8 does to this loss: fsdp_fp8" in text
    assert "Nobody has measured the speed" in text
    text, _ = advised(monkeypatch, capsys, sizes | {"ddp_bf16": 75}, "--devices", "8")
    assert best(text) == "ddp_fp32", "75 GB is tight, ddp in fp32 is not"
    text, _ = advised(monkeypatch, capsys, sizes | {"ddp_bf16": 90, "ddp_fp32": 120}, "--devices", "8")
    assert best(text) == "fsdp_bf16_noreshard"


def test_what_comes_where_nothing_plain_fits(monkeypatch, capsys):
    sizes = {"fsdp_bf16": 90, "fsdp_bf16_ckpt": 50, "fsdp_bf16_offload": 30, "fsdp_fp8": 60}
    assert best(advised(monkeypatch, capsys, sizes, "--devices", "8")[0]) == "fsdp_bf16_ckpt"
    sizes |= {"fsdp_bf16_ckpt": 85}
    assert best(advised(monkeypatch, capsys, sizes, "--devices", "8")[0]) == "fsdp_bf16_offload"
    text, code = advised(monkeypatch, capsys, {"fsdp_bf16": 90, "fsdp_fp8": 60}, "--devices", "8")
    assert best(text) == "fsdp_fp8" and "nobody has measured here" in text and code == 0
    assert "./launch.sh compare fsdp_bf16 fsdp_fp8 -- --num_processes 8 vit --model vit_huge" in text
    text, code = advised(monkeypatch, capsys, {"fsdp_bf16": 90}, "--devices", "8")
    assert code == 1 and "Nothing fits" in text


def test_a_comparison_counts(monkeypatch, capsys, tmp_path):
    def row(config, kind=None, rate=100, emulated=True):
        loss = {"relative": 0.002, "interval": [0.001, 0.003], "verdict": "equal within 1%", "kind": kind}
        loss |= {"verdict": "higher by 4%"} if kind == "higher" else {}
        return {"config": config, "control": False, "error": None, "emulated": emulated, "rehearsal": emulated,
                "measures": {"eval_loss": loss if kind else {}, "samples_per_second": {"mean": rate}}}  # fmt: skip

    made = {"schema_version": 2, "measure": "eval_loss", "recipe": "vit", "args": {"dataset": "digits"}, "device": "CPU",
            "rows": [row("single_bf16"), row("single_fp8_msamp_o2", "equal"), row("single_fp8", "higher")]}  # fmt: skip
    sizes = {"single_bf16": 90, "single_fp8_msamp_o2": 50, "single_fp8": 40}
    (tmp_path / "report.json").write_text(json.dumps(made))
    text, _ = advised(monkeypatch, capsys, sizes, "--comparison", str(tmp_path))
    assert best(text) == "single_fp8_msamp_o2" and "equal within 1%" in text and "vit, dataset digits, on CPU" in text
    assert "Nobody has measured the speed" in text, "emulated speed is none"
    made["rows"] = [
        row("single_bf16", rate=100, emulated=False),
        row("single_fp8", "equal", 150, False),
        row("single_fp8_msamp_o2", "higher", 300, False),
    ]
    (tmp_path / "report.json").write_text(json.dumps(made))
    text, _ = advised(monkeypatch, capsys, sizes | {"single_bf16": 40}, "--comparison", str(tmp_path))
    assert best(text) == "single_fp8" and "fastest measured: 150 samples per second" in text
    (tmp_path / "report.json").write_text(json.dumps(made | {"schema_version": 1}))
    with pytest.raises(Refused, match="of another version"):
        advised(monkeypatch, capsys, sizes, "--comparison", str(tmp_path))


def test_it_names_what_cannot_run(monkeypatch, capsys):
    text, _ = advised(monkeypatch, capsys, {"ddp_bf16": 9, "hsdp_bf16": 5}, "--devices", "3")
    assert best(text) == "ddp_bf16" and "hsdp_bf16: parallelism_config" in text, "why a config cannot run"
