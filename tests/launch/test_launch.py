"""launch.sh: what it adds to a launch, its commands, and the set-up of an environment."""

import dataclasses
import re
import sys
import time

import pytest
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT, fake_accelerate, launched, recipe, record

import faithful
from tools import check, compare, find


def test_without_arguments_it_helps():
    result = launched("./launch.sh")
    assert result.returncode == 0
    for word in ("demo", "setup", "check", "ls", "test", "CONFIG"):
        assert word in result.stdout


def test_ls_names_everything():
    result = launched("./launch.sh", "ls")
    for path in [*ROOT.glob("accelerate_configs/*.yml"), *ROOT.glob("recipes/*.py")]:
        assert result.stdout.count(f"\n  {path.stem} ") == 1
    assert max(map(len, result.stdout.splitlines())) <= 100
    groups = [block.splitlines() for block in result.stdout.split("\n\n")]
    named = {lines[0].split(":")[0]: [line.split()[0] for line in lines[1:] if line[2] != " "] for lines in groups}
    assert named["FSDP2"][:3] == ["fsdp_fp32", "fsdp_fp16", "fsdp_bf16"], "by strategy, then by precision"
    assert named["Recipes"] == ["bert", "diffusion", "dpo", "embed", "gpt", "resnet", "sft", "vit"]


def test_it_prints_the_line_and_becomes_it(tmp_path):
    out = tmp_path / "run"
    result = launched("./launch.sh", "single_bf16", "vit", "--max_steps", "2", "--output_dir", str(out))
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if line.startswith("accelerate launch"))
    assert "--config_file" in line and "recipes/vit.py --max_steps 2" in line
    assert record(out)["status"] == "finished"
    lines = result.stdout.splitlines()
    assert lines[1].startswith("asked: ") and lines[2] == f"record: {out}"
    at = lines.index(f"finished: {out}")
    assert lines[at + 1].startswith("  run ") and "single_bf16, finished" in lines[at + 1]
    [after] = [i for i, line in enumerate(lines) if line == "next:"]
    commands = [line.split("  ")[1] for line in lines[after + 1 :]]
    assert commands == [f"./launch.sh predict {out} FILE", f"./launch.sh export {out}",
                        "./launch.sh compare single_bf16 single_fp8 -- vit"]  # fmt: skip
    shown = launched("./launch.sh", "show", str(out))
    assert "single_bf16, finished" in shown.stdout and "accuracy" in shown.stdout
    rest = [line for line in shown.stdout.splitlines() if not line.startswith(("  measured ", "  note "))]
    assert rest == lines[at + 1 : after], "the table at the end of a run is the same, without what was printed before"
    assert result.stdout.count(record(out)["evidence"]["measured"].removesuffix(" | rehearsal on a CPU")) == 1


@pytest.mark.parametrize("name", ["vit", "resnet", "gpt", "bert", "embed", "diffusion", "sft", "dpo"])
def test_help_of_a_recipe_starts_nothing(tmp_path, name):
    """With a torch that cannot be imported: what is printed comes from the lines of the recipe."""
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
    result = launched("./launch.sh", "ddp_bf16", name, "--help", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0 and result.stderr == "", result.stderr
    fields = {field.name: field.default for field in dataclasses.fields(recipe(name).Arguments)}
    text = " ".join(result.stdout.split())
    for option, default in fields.items():
        assert f"--{option}" in text
        assert f"(default: {default})" in text, option
    assert text.startswith(f"usage: {name}.py") and "Train " in text


def test_the_version_is_said_in_one_place():
    version = re.search('__version__ = "(.*)"', (ROOT / "faithful" / "__init__.py").read_text())[1]
    assert faithful.__version__ == version
    assert launched("./launch.sh", "--version").stdout == f"accelerate-recipes {version}\n"
    for option, begins in (("--version", f"faithful {version}\n"), ("--help", "Runs an unchanged Accelerate script")):
        done = launched(sys.executable, "-m", "faithful", option)
        assert done.returncode == 0 and done.stdout.startswith(begins), done.stderr


def test_a_clones_amp8_is_there_for_a_script_elsewhere(tmp_path):
    """`python -m` from the clone looks for amp8 in the folder where it starts, and the script's takes its place."""
    (tmp_path / "own.py").write_text("import sys\nimport amp8\nprint(sys.path[0], amp8.__file__)\n")
    done = launched(sys.executable, "-m", "faithful", tmp_path / "own.py", env={"PYTHONPATH": ""})
    assert done.stdout == f"{tmp_path} {ROOT / 'amp8' / '__init__.py'}\n", done.stderr


def test_each_option_of_the_launcher_keeps_its_value(monkeypatch, capsys):
    """The named config is checked, whatever option of `accelerate launch` stands before the recipe."""
    parser = launch_command_parser()
    actions = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    assert {word for action in actions for word in action.option_strings if action.nargs == 0} == find.flags() - {
        "-h",
        "--help",
    }
    monkeypatch.setattr(check, "check", lambda path, here, overrides: ([path.name], [], [], None))
    for action in actions:
        for word in action.option_strings:
            words = [word] if action.nargs == 0 else [word, "1"]
            assert compare.split_launch([*words, "vit", "--its"]) == (words, "vit", ["--its"])
            if action.dest != "config_file":
                assert check.main([*words, "single_fp32"]) == 2
                assert capsys.readouterr() == ("single_fp32.yml: single_fp32.yml\n", "") or action.dest == "quiet", word


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--monitor_interval 1 --debug", "typo.yml: mixed_precison is a key"),
        ("--cpu --main-training-function f", "typo.yml: mixed_precison is a key"),
        ("--monitor_intervall 1", "unrecognized arguments: --monitor_intervall"),
        ("--num_procs 2", ": did you mean --num_processes?"),
        ("--config_file other.yml", "unrecognized arguments: --config_file"),
    ],
)
def test_launch_sh_checks_the_named_config(tmp_path, options, said):
    (tmp_path / "typo.yml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precison: bf16\n")
    result = launched("./launch.sh", str(tmp_path / "typo.yml"), *options.split(), "vit")
    assert result.returncode == 2 and said in result.stderr, result.stdout + result.stderr
    assert result.stdout == "" and len(result.stderr.splitlines()) == 1, result.stderr


SLOW = pytest.mark.slow


@pytest.mark.parametrize("config", ["single_bf16", "ddp_bf16", pytest.param("zero2_bf16", marks=SLOW)])
def test_a_refusal_ends_with_its_line_and_2(config):
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    result = launched("./launch.sh", config, "vit", "--grad_scaler", "init_scale=8", env={"OMP_NUM_THREADS": "1"})
    lines = [line for line in result.stderr.splitlines() if "Setting accelerator to CPU" not in line]
    assert result.returncode == 2
    assert lines == [
        "refused: a gradient scaler (GradScalerKwargs) is for fp16, this run is bf16: leave it out, or "
        "launch with --config_wins"
    ]


FAILING = """
import os, signal, sys
if os.environ.get("RANK", "1") == "1":
    {what}
import time
from pathlib import Path
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("config", "what", "code", "said"),
    [
        ("ddp_fp32", "os.kill(os.getpid(), signal.SIGKILL)", 137,
         ["error: rank 1 was ended by SIGKILL, perhaps because memory ran out"]),
        pytest.param("ddp_fp32", "raise ValueError('mine')", 1, ["ValueError: mine"], marks=SLOW),
        pytest.param("single_fp32", "raise ValueError('mine')", 1, ["ValueError: mine"], marks=SLOW),
        pytest.param("single_fp32", "sys.exit(7)", 7, ["error: the training process ended with exit code 7"], marks=SLOW),
    ],
)  # fmt: skip
def test_what_fails_says_why_and_the_exit_code_is_the_workers(tmp_path, config, what, code, said):
    (tmp_path / "mine.py").write_text(FAILING.format(what=what))
    result = launched("./launch.sh", config, str(tmp_path / "mine.py"))
    assert result.returncode == code, result.stderr
    assert result.stderr.splitlines()[-1:] == said, result.stderr
    for noise in ("ChildFailedError", "CalledProcessError", "closing signal", "exitcode"):
        assert noise not in result.stderr


def test_launch_sh_adds_under_a_second(tmp_path):
    """launch.sh adds less than a second before `accelerate launch`, measured with an accelerate that exits at once."""
    fake_accelerate(tmp_path, "def main():\n    raise SystemExit(7)")
    env = {"PYTHONPATH": str(tmp_path)}
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert launched("./launch.sh", "ddp_bf16", "vit", env=env).returncode == 7
        times.append(time.perf_counter() - start)
    assert min(times) < 1.5  # measured: 0.5 s; the bound leaves room for a busy machine


def test_the_pins_name_no_registry():
    text = (ROOT / "requirements.txt").read_text()
    assert "://" not in text and "--index" not in text and text.count("--hash=sha256:") > 100
