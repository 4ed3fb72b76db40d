"""Who says the precision: the config, and where there is none, the script."""

import re
import sys

import accelerate.state
import pytest
import torch
import yaml
from accelerate.commands import launch
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from conftest import Ranks
from test_kept import run

from faithful import Refused, arguments, plan

STEP = """
model = torch.nn.Sequential(linear(), linear(), linear())
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
step(model, optimizer)
print("native", accelerator.mixed_precision, accelerator.native_amp)
"""


def said(planned="bf16", words=(), monkeypatch=None, **script):
    """(contradictions, notes) of a script under a config."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", planned)
    monkeypatch.setattr(sys, "argv", ["mine.py", *words])
    made = plan.Plan(None, "single", 1, planned, "cpu", rehearsal=True)
    return list(arguments.contradictions(made, script)), list(arguments.notes(made, script))


def test_the_default_that_nobody_typed_leaves_it_to_the_config(monkeypatch):
    found, notes = said(mixed_precision="no", words=["--output_dir", "x"], monkeypatch=monkeypatch)
    assert not found
    assert notes == ["the script passes mixed_precision='no', Accelerate's default: the config's bf16 applies"]
    assert said("fp32", mixed_precision="no", monkeypatch=monkeypatch) == ([], [])
    assert said(monkeypatch=monkeypatch) == ([], [])


@pytest.mark.parametrize(
    "words",
    [["--mixed_precision", "no"], ["--mixed-precision=no"], ["--mixed", "no"], ["--precision", "no"], ["-fp16"]],
)
def test_what_somebody_typed_stays_a_contradiction(monkeypatch, words):
    [(name, both, _)], notes = said(mixed_precision="no", words=words, monkeypatch=monkeypatch)
    assert name == "mixed_precision" and "passes mixed_precision='no', the config says bf16" in both and not notes
    for other in ("fp16", "fp8"):
        [(_, both, _)], _ = said(mixed_precision=other, monkeypatch=monkeypatch)
        assert f"mixed_precision='{other}', the config says bf16" in both


@pytest.mark.parametrize("words", [["no"], ["--mix_ratio", "1"], ["--mixup"], ["--model", "mixed_precision"], []])
def test_what_is_no_option_for_the_precision(words):
    assert not arguments.has_precision_option(words)


def test_no_dynamo_backend_is_none(monkeypatch):
    assert said(dynamo_backend="no", monkeypatch=monkeypatch)[0] == []
    assert "dynamo_backend" in said(dynamo_backend="inductor", monkeypatch=monkeypatch)[0][0][1]


def test_the_launchers_default_precision_applies_with_a_note(tmp_path):
    text = run(tmp_path, f"accelerator = Accelerator(mixed_precision='no', project_dir=folder)\n{STEP}", "single_bf16")
    assert "native bf16 True" in text and re.search(r"\| bf16 compute( \([^()]* in fp32 [^()]*\))? \|", text)
    assert text.count("note: the script passes mixed_precision='no', Accelerate's default: the config's bf16") == 1


NO_LAUNCHER = """
import os
from faithful import plan
for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
    del os.environ[name]
plan.launch_line = lambda: (None, None)
"""


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8", "no"])
def test_without_a_launcher_the_scripts_precision_is_the_runs(tmp_path, precision):
    text = run(tmp_path, f"""{NO_LAUNCHER}
accelerator = Accelerator(mixed_precision="{precision}", project_dir=folder)
{STEP}
Accelerator(mixed_precision=accelerator.state.mixed_precision if "{precision}" != "fp8" else "fp8")
Accelerator()
Accelerator(mixed_precision="{"fp16" if precision == "bf16" else "bf16"}")
""", code=2)  # fmt: skip
    planned = {"no": "fp32", "fp8": "fp8 ao tensorwise"}.get(precision, precision)
    assert text.count(f"asked: mine | single | {planned} | rehearsal on a CPU") == 3, text
    other, asked = ("fp16" if precision == "bf16" else "bf16"), {"no": "fp32"}.get(precision, precision)
    assert f"refused: the script passes mixed_precision='{other}', the first Accelerator says {asked}" in text
    dtype = {"bf16": "bf16 compute", "fp16": "fp16 compute, gradient scaler", "no": "fp32"}.get(
        precision, "fp8 torchao"
    )
    assert f"mine | single | {dtype}" in text and "Traceback" not in text


def test_two_processes_without_accelerates_launcher(tmp_path):
    """torchrun alone says no precision."""
    text = run(
        tmp_path,
        f"{NO_LAUNCHER}\naccelerator = Accelerator(mixed_precision='bf16', project_dir=folder)\n{STEP}",
        "ddp_fp32",
    )
    assert "asked: mine | ddp x2 | bf16" in text and text.count("native bf16 True") == 2


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--mixed_precision", "no"], 2)])
def test_the_launchers_own_default_is_nobodys_choice(tmp_path, monkeypatch, options, code):
    """Without a config file and without the option, `accelerate launch` exports `no`, and Accelerate takes the
    script's. The forked process has the environment and the command line of such a launch."""
    script = tmp_path / "mine.py"
    script.write_text("from faithful import Accelerator\nprint(Accelerator(mixed_precision='bf16').mixed_precision)\n")
    words = [*options, "--num_processes", "1", "--num_machines", "1", str(script)]
    monkeypatch.setattr(launch, "default_config_file", str(tmp_path / "nothing.yaml"))
    asked = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))[0]
    env = prepare_simple_launcher_cmd_env(asked)[1]
    assert env["ACCELERATE_MIXED_PRECISION"] == "no"

    def before(rank):
        plan.launch_line = lambda: (["python", "/usr/bin/accelerate", "launch", *words], None)

    ranks = Ranks("single_fp32", ["--output_dir", str(tmp_path / "run")], script=script, env=env, before=before)
    assert ranks.wait() == [code], ranks.text()
    assert ("asked: mine | single | bf16" in ranks.text() and "\nbf16\n" in ranks.text()) == (code == 0)
    assert ("mixed_precision='bf16', the config says fp32" in ranks.text()) == (code == 2)


@pytest.mark.parametrize(("said", "code"), [({}, 0), ({"mixed_precision": "no"}, 2)])
def test_a_file_that_says_no_precision_leaves_it_to_the_script(tmp_path, said, code):
    script, file = tmp_path / "mine.py", tmp_path / "theirs.yml"
    script.write_text("from faithful import Accelerator\nprint(Accelerator(mixed_precision='bf16').mixed_precision)\n")
    file.write_text(yaml.dump({"distributed_type": "MULTI_GPU", "num_machines": 1, "num_processes": 2} | said))
    ranks = Ranks(file, ["--output_dir", str(tmp_path / "run")], script=script)
    assert set(ranks.wait()) == {code}, ranks.text()
    assert ("asked: mine | ddp x2 | bf16" in ranks.text()) == (code == 0)
    assert ("mixed_precision='bf16', the config says fp32" in ranks.text()) == (code == 2)


def test_a_precision_that_there_is_not_is_refused(monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    assert not plan.says_precision() and torch.float32 and not accelerate.state.AcceleratorState._shared_state
    with pytest.raises(Refused, match="mixed_precision bf8 is not one of 'no', fp16, bf16, fp8"):
        plan.resolve("bf8")
