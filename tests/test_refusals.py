"""What the tools refuse: with exit code 2 and one line, before anything is launched, traced or read."""

import importlib
import json
import sys

import pytest
from conftest import CONFIGS, ROOT

from tools import cli, tracing

VIT = ("--", "vit")
UNKNOWN = "vit: unrecognized arguments: --max_step 4; python recipes/vit.py --help lists the options"
TABLE = [  # (tool, its command line, what the line says); {tmp} has the files of the fixture
    ("advise", ["--memory", "80GB"], "which recipe? ./launch.sh advise"),
    ("advise", ["--memory", "80GB", "--", "vitt"], "no recipe vitt: did you mean vit?"),
    ("advise", ["single_bf17", "--memory", "80GB", *VIT], "no config single_bf17: did you mean single_bf16?"),
    ("advise", ["--memory", "many", *VIT], "--memory many: write it as 80GB or 24GiB"),
    ("advise", ["--devices", "0", *VIT], "argument --devices: 0 is not a whole number, 1 or more"),
    ("advise", [*VIT, "--max_step", "4"], UNKNOWN),
    ("advise", ["--comparison", "{tmp}/file", *VIT], "{tmp}/file is not JSON"),
    ("advise", ["--comparison", "{tmp}/nowhere", *VIT], "no report.json there; ./launch.sh compare writes one"),
    ("check", ["single_bf17"], "no config single_bf17: did you mean single_bf16?"),
    ("check", ["--num_machines", "two"], "argument --num_machines/--num-machines: invalid int value: 'two'"),
    ("compare", ["single_bf16", *VIT, "--seed", "3"], "--seed: not here; the seeds are --seeds"),
    ("compare", ["single_bf17", *VIT], "no config single_bf17"),
    ("compare", ["single_bf16", "--", "vitt"], "no recipe vitt"),
    ("compare", ["single_bf16", "--"], "which recipe? ./launch.sh compare"),
    ("compare", ["{tmp}/nowhere"], "{tmp}/nowhere is no folder of a run"),
    ("compare", ["single_bf16", "--seeds", "0", *VIT], "argument --seeds: 0 is not a whole number, 1 or more"),
    ("compare", ["single_bf16", "--margin", "2", *VIT], "argument --margin: 2: write it as 1% or 0.01"),
    ("compare", ["single_bf16", "--baseline", "x", *VIT], "--baseline: not here"),
    ("compare", ["single_bf16", *VIT, "--max_step", "4"], UNKNOWN),
    ("compare", ["single_bf16", "--", "--num_processes", "two", "vit"], "--num_processes two: write the number"),
    (
        "compare",
        ["single_bf16", "ddp_bf16", "--", "--num_processes=3", "vit"],
        "don't divide by the 3 processes of ddp",
    ),
    ("compare", ["single_bf16", "--assert-close", "single_fp32", *VIT], "--assert-close single_fp32: there is no such"),
    (
        "compare",
        ["single_bf16", "{tmp}/bad.yml", *VIT],
        "bad.yml: mixed_precison is a key that Accelerate does not have",
    ),
    ("compare", ["single_bf16", "--report", "{tmp}/file/report", *VIT], "nothing can be written to {tmp}/file/report"),
    ("copy_recipe", ["vitt", "ddp_bf16", "{tmp}/new"], "no recipe vitt: did you mean vit?"),
    ("copy_recipe", ["vit", "ddp_bf17", "{tmp}/new"], "no config ddp_bf17: did you mean ddp_bf16?"),
    ("copy_recipe", ["vit", "ddp_bf16", "{tmp}"], "{tmp} is there and not empty: choose a new folder"),
    ("copy_recipe", ["vit", "{tmp}/bad.yml", "{tmp}/new"], "did you mean mixed_precision"),
    ("copy_recipe", ["vit", "ddp_bf16", "{tmp}/file/new"], "Not a directory"),
    ("diagnose", ["single_bf16", *VIT], "single_bf16.yml asks for no FP8: there is nothing to diagnose"),
    ("diagnose", ["single_fp9", *VIT], "no config single_fp9"),
    ("diagnose", ["single_fp8", "--", "wit"], "no recipe wit"),
    ("diagnose", ["single_fp8"], "which recipe? ./launch.sh diagnose"),
    ("diagnose", ["fsdp_fp8", *VIT], "diagnose needs whole weights on every process, fsdp splits them: use ddp"),
    ("diagnose", ["single_fp8_compile", *VIT], "which a compiled block hides"),
    ("diagnose", ["single_fp8", "--pairs", "1", *VIT], "--pairs 1: 2 or more"),
    ("diagnose", ["single_fp8", "--look", "0", *VIT], "argument --look: 0 is not a whole number, 1 or more"),
    (
        "diagnose",
        ["single_fp8", "--", "recipes/vit.py", "--max_steps", "20"],
        "--max_steps: not here; diagnose trains vit",
    ),
    ("diagnose", ["single_fp8", *VIT, "--max_step", "4"], UNKNOWN),
    ("diagnose", ["single_fp8", "--", "benchmarks/faults.py", "--max_steps=8"], "diagnose takes 276 steps or more"),
    ("diagnose", ["{tmp}/own"], "{tmp}/own was not launched with a config file: name config and recipe"),
    ("diagnose", ["{tmp}/damaged"], "{tmp}/damaged has no readable run.json (JSONDecodeError)"),
    ("diagnose", ["single_fp8", "--output", "{tmp}/file/out", *VIT], "nothing can be written to {tmp}/file/out"),
    ("estimate", ["single_bf16"], "which recipe? ./launch.sh estimate"),
    ("estimate", ["single_bf17", *VIT], "no config single_bf17: did you mean single_bf16?"),
    ("estimate", ["single_bf16", "--memory", "lots", *VIT], "--memory lots: write it as 80GB or 24GiB"),
    ("estimate", ["--num_processes", "0", *VIT], "0 is not a whole number, 1 or more"),
    ("estimate", ["single_bf16", *VIT, "--max_step", "4"], UNKNOWN),
    ("export", ["{tmp}/nowhere"], "{tmp}/nowhere is not the folder of a run: no readable run.json (FileNotFoundError)"),
    ("export", ["{tmp}/own", "--to", "onnx"], "{tmp}/own has no data.json, as the run of a script of your own"),
    ("export", ["{tmp}/own", "--to", "pickle"], "argument --to: invalid choice: 'pickle'"),
    ("predict", ["{tmp}/damaged", "a.png"], "{tmp}/damaged is not the folder of a run"),
    ("predict", ["{tmp}/gpt"], "{tmp}/gpt was trained on texts: give it --prompt TEXT and no files"),
    ("predict", ["{tmp}/gpt", "--prompt", "x", "a.png"], "{tmp}/gpt was trained on texts"),
    ("predict", ["{tmp}/own"], "{tmp}/own classifies images: give it image files or folders that hold some"),
    ("predict", ["{tmp}/own", "{tmp}/none.png"], "no file {tmp}/none.png"),
    (
        "predict",
        ["{tmp}/gpt", "--prompt", "x", "--tokens", "0"],
        "argument --tokens: 0 is not a whole number, 1 or more",
    ),
    ("show", ["{tmp}/nowhere"], "show takes the folder of a run (with its run.json), got {tmp}/nowhere"),
    ("show", ["{tmp}/damaged"], "show takes the folder of a run (with its run.json), got {tmp}/damaged"),
]


@pytest.fixture
def tmp(tmp_path, monkeypatch):
    """A file, a config with a typing error, and the folders of three runs."""
    (tmp_path / "file").write_text("not JSON")
    (tmp_path / "bad.yml").write_text((CONFIGS / "ddp_bf16.yml").read_text() + "mixed_precison: bf16\n")
    record = {"status": "finished", "plan": {"strategy": "single"}, "config": {"name": None, "text": None}}
    for name, text in (
        ("own", json.dumps(record | {"recipe": "own", "command": "python own.py"})),
        ("gpt", json.dumps(record | {"recipe": "gpt", "command": "python recipes/gpt.py"})),
        ("damaged", "{"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tracing, "load", None)
    return tmp_path


@pytest.mark.parametrize(("tool", "argv", "line"), TABLE, ids=[f"{tool}-{' '.join(argv)}" for tool, argv, _ in TABLE])
def test_a_mistake_is_refused_in_one_line_before_anything_begins(tool, argv, line, tmp, monkeypatch, capsys):
    files = sorted(path.relative_to(tmp) for path in tmp.rglob("*"))
    main = importlib.import_module(f"tools.{tool}").main
    words = [word.format(tmp=tmp) for word in argv]
    if tool == "compare" and "--report" not in words and "--" in words:
        words = ["--output_dir", f"{tmp}/out", *words]
    monkeypatch.setattr(sys, "argv", [f"{tool}.py", *words])
    with pytest.raises(SystemExit) as end:
        cli.run(main)
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "") and len(err.splitlines()) == 1, err
    assert err.startswith("refused: ") and line.format(tmp=tmp) in err
    assert {path.relative_to(tmp) for path in tmp.rglob("*") if path != tmp / "out"} == set(files)
