"""A copied recipe runs where nothing else of the project can be imported."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ROOT, edited, launched, record

import faithful
from shared.args import Refused
from tools import copy_recipe as tool


def alone(folder, recipe, *argv):
    """Runs the recipe with `python -I`: neither PYTHONPATH nor the current folder is on the path."""
    command = [sys.executable, "-I", f"recipes/{recipe}.py", *map(str, argv)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


def install(folder):
    """Puts the packages of the copy's wheel beside its recipe, where it finds them."""
    [wheel] = folder.glob("*.whl")
    assert wheel.name == f"accelerate_recipes-{faithful.__version__}-py3-none-any.whl"
    assert f"./{wheel.name}" in (folder / "requirements.txt").read_text().splitlines()
    zipfile.ZipFile(wheel).extractall(folder)


BUILD = tool.wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    return folder / BUILD(folder)


@pytest.fixture(autouse=True)
def one_wheel(built, monkeypatch):
    """All copies get the same wheel, which takes seconds to build."""
    monkeypatch.setattr(tool, "wheel", lambda folder: Path(shutil.copy(built, folder)).name)


def test_it_is_written_whole_and_without_us(tmp_path):
    written = tool.copy("gpt", "single_bf16", tmp_path / "mine")
    assert not any({"faithful", "amp8"} & set(path.parts) for path in written)
    assert sorted(p.relative_to(tmp_path / "mine") for p in (tmp_path / "mine").rglob("*") if p.is_file()) == written


ARGV = {
    "gpt": ("--dataset", ROOT / "shared", "--sequence_length", 16),
    "bert": ("--sequence_length", 16),
    "embed": ("--sequence_length", 16),
    "sft": ("--skip_long", "--sequence_length", 48),
    "dpo": ("--sequence_length", 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "resnet", "gpt", "bert", "embed", "diffusion", "sft", "dpo"])
def test_it_runs_with_accelerate_s_own_accelerator(tmp_path, name):
    """--plain: nothing of ours but the recipe and its part of shared/; tests/recipes/test_plain.py compares the losses."""
    written = tool.copy(name, "single_fp32", tmp_path / "mine", plain=True)
    pages = [(tmp_path / "mine" / path).read_text() for path in written]
    assert not [page for page in pages if "import faithful" in page or "from faithful" in page]
    argv = ("--max_steps", 2, "--per_device_train_batch_size", 8, *ARGV.get(name, ()))
    argv += ("--eval_steps", 1, "--save_steps", 1, "--load_best_model_at_end", "--greater_is_better")
    done = alone(tmp_path / "mine", name, *argv, "--output_dir", tmp_path / "run")
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "step 2: eval_loss" in said, done.stderr[-2000:]
    assert "the best eval_loss is that of step 1" in said and said.count("step 1: eval_loss") == 2
    assert (tmp_path / "run" / "model").is_dir() and not (tmp_path / "run" / "run.json").exists()


def test_plain_under_accelerate_without_a_gpu_trains_once_in_two_processes(tmp_path):
    """The README's command. Accelerate writes the random state of each process that it knows into a checkpoint, and the
    main process alone prints. Two runs that do not know of each other print twice, and have process 0 only."""
    tool.copy("vit", "ddp_bf16", tmp_path / "mine", plain=True)
    readme = (tmp_path / "mine" / "README.md").read_text()
    [line] = [line for line in readme.splitlines() if "without a GPU" in line]
    command = line.split("  #")[0].strip()
    assert command in (ROOT / "docs" / "copy.md").read_text().splitlines()
    command = edited(command, " --config_file", " --main_process_port 0 --config_file")
    command += f" --max_steps 2 --logging_steps 1 --save_steps 2 --eval_steps 0 --output_dir {tmp_path / 'run'}"
    done = launched("bash", "-c", command, cwd=tmp_path / "mine", env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    states = {path.name for path in (tmp_path / "run" / "checkpoint-2").glob("random_states_*")}
    assert states == {"random_states_0.pkl", "random_states_1.pkl"}
    assert (done.stdout + done.stderr).count("step 2: loss") == 1


def test_plain_under_a_single_config_needs_no_variable(tmp_path):
    tool.copy("vit", "single_bf16", tmp_path / "mine", plain=True)
    assert "ACCELERATE_USE_CPU" not in (tmp_path / "mine" / "README.md").read_text()


def test_a_wheel_that_cannot_be_built_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "wheel", BUILD)
    monkeypatch.setattr(tool.sys, "executable", "/bin/false")
    with pytest.raises(Refused, match="wheel of faithful and amp8 cannot be built .*: install setuptools>=77$"):
        tool.copy("vit", "single_bf16", tmp_path / "mine")


@pytest.mark.parametrize(
    ("name", "config", "plain"),
    [("vit", "ddp_fp8_msamp_o2", False), pytest.param("vit", "ddp_bf16", True, marks=pytest.mark.slow),
     *(pytest.param(n, "single_bf16", False, marks=pytest.mark.slow) for n in ("resnet", "gpt", "bert", "embed", "diffusion", "sft", "dpo"))],
)  # fmt: skip
def test_a_copy_has_a_test_of_its_own(tmp_path, name, config, plain):
    tool.copy(name, config, tmp_path / "mine", plain=plain)
    if not plain:
        install(tmp_path / "mine")
    done = launched(sys.executable, "-I", "test_copy.py", cwd=tmp_path / "mine", env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr


def lend(folder):
    """Links to the installed torch and the libraries of CUDA that it needs, 5 GB, as if pip had installed them here."""
    folder.mkdir()
    for dist in metadata.distributions():
        if re.match(r"(torch|triton|nvidia|cuda)(-|$)", dist.name):
            for file in dist.files:
                top = Path(file.parts[0])
                if top.name != ".." and not (folder / top).exists():
                    (folder / top).symlink_to(dist.locate_file(top))


def test_its_requirements_are_enough(tmp_path):
    """As its README says, in an environment of its own and with pip alone."""
    mine, tried = tmp_path / "mine", {"cwd": tmp_path / "mine", "capture_output": True, "text": True}
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    tool.copy("vit", "ddp_fp8_msamp_o2", mine)
    subprocess.run([sys.executable, "-m", "venv", ".venv"], check=True, env=env, **tried)
    [site] = (mine / ".venv").glob("lib/python*/site-packages")
    lend(mine / "lent")
    (site / "lent.pth").write_text(f"{mine}/lent\n")
    python = mine / ".venv" / "bin" / "python"
    done = subprocess.run([python, "-m", "pip", "install", "--no-compile", "-r", "requirements.txt"], env=env, **tried)
    assert done.returncode == 0, done.stdout + done.stderr
    [torch] = re.findall("^torch==.*", (mine / "requirements.txt").read_text(), re.M)
    assert f"Requirement already satisfied: {torch} in ./lent" in done.stdout, "it is the pinned one"
    readme = (mine / "README.md").read_text()
    assert len(readme.splitlines()) <= 12 and "\n    pip install -r requirements.txt\n" in readme
    [command] = [line.split() for line in readme.splitlines() if "accelerate launch" in line]
    command = [python.parent / command[0], command[1], "--main_process_port", "0", *command[2:]]
    done = subprocess.run([*command, "--max_steps", "2", "--output_dir", tmp_path / "run"], env=env, **tried)
    assert done.returncode == 0, done.stdout + done.stderr
    assert record(tmp_path / "run")["evidence"]["linear_converted"] == 16
    done = subprocess.run([python, "test_copy.py"], env=env, **tried)
    assert done.returncode == 0 and "ddp x2 gloo | fp8 MS-AMP O2" in done.stdout, done.stdout + done.stderr
    page = mine / "recipes" / "vit.py"
    page.write_text(edited(page.read_text(), 'f"{output_dir}/model"', 'f"{output_dir}/mode"'))
    done = subprocess.run([python, "test_copy.py"], env=env, **tried)
    assert done.returncode != 0, "a recipe that leaves no model is noticed"
    where = [python, "-c", "import faithful, timm, torch; print(faithful.__file__, timm.__file__, torch.__file__)"]
    done = subprocess.run(where, env=env, **tried)
    assert done.stdout.split()[:2] == [f"{site}/{name}/__init__.py" for name in ("faithful", "timm")]


# With the recipe's 140 lines. 90 lines are for options from a file, epochs and schedules, the copy's own test, and for
# bars that are lines in a log; 55 for --load_best_model_at_end, which has to know after each resume which checkpoint is
# the best.
@pytest.mark.parametrize("name", ["vit", "resnet", "gpt", "bert", "embed", "diffusion", "sft", "dpo"])
def test_there_is_little_to_read(tmp_path, name, capsys):
    assert not tool.main([name, "ddp_fp8_msamp_o2", str(tmp_path / "mine")])
    files, lines = re.search(r": (\d+) files, ([\d,]+) lines and \S+\.whl\. Next", capsys.readouterr().out).groups()
    # A language model's copy has 45 lines that keep a stranger's config.json from being built as it says (lm.py).
    # embed has pairs.py; sft has conversations and adapters, and dpo stands on it.
    most = {"vit": 1320, "resnet": 1370, "diffusion": 1260, "embed": 1530, "sft": 1610, "dpo": 1750}.get(name, 1390)
    assert int(files) <= 11 + (name in ("resnet", "embed", "dpo")) and int(lines.replace(",", "")) <= most


def test_a_module_left_out_is_noticed(tmp_path):
    """A copy without one of the files does not run, so the tests above can fail."""
    tool.copy("vit", "single_bf16", tmp_path / "mine")
    install(tmp_path / "mine")
    (tmp_path / "mine" / "faithful" / "training" / "steps.py").unlink()
    done = alone(tmp_path / "mine", "vit", "--help")
    assert done.returncode != 0 and "No module named 'faithful.training.steps'" in done.stderr


def test_every_import_is_pinned_or_copied(tmp_path):
    for recipe in (path.stem for path in (ROOT / "recipes").glob("*.py")):
        folder = tmp_path / recipe
        tool.copy(recipe, "fsdp_fp8", folder)
        install(folder)
        pinned = (folder / "requirements.txt").read_text()
        assert all("==" in line for line in pinned.splitlines()[:-1]) and "torch==" in pinned
        assert (
            ("torchvision==" in pinned) == ("timm==" in pinned) == (recipe not in ("sft", "dpo"))
        )  # timm needs torchvision
        for path in [
            path for name in ("recipes", "shared", "faithful", "amp8") for path in (folder / name).rglob("*.py")
        ]:
            for name in tool.imports(path):
                top, *rest = name.split(".")
                if top in ("shared", "faithful", "amp8"):
                    for file in (f"{top}/__init__.py", *(f"{top}/{word}.py" for word in rest[:1])):
                        assert (folder / file).is_file() or not (ROOT / file).is_file(), f"{path}: {name}"
                elif top not in sys.stdlib_module_names and top not in tool.OPTIONAL:
                    packages = tool.PACKAGES.get(top, [top])
                    assert all(f"{package}==" in pinned for package in packages), f"{path}: {name}"


def test_a_zero_config_brings_its_engine(tmp_path):
    for config, there in (("zero2_bf16", True), ("ddp_bf16", False)):
        tool.copy("vit", config, tmp_path / config)
        assert ("deepspeed>=" in (tmp_path / config / "requirements.txt").read_text()) == there


CHANGES = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "copy.md").read_text(), re.S)


def test_the_changes_in_the_docs_train(tmp_path):
    tool.copy("vit", "fsdp_bf16", tmp_path / "mine")
    install(tmp_path / "mine")
    for change in CHANGES:
        apply = ["git", "apply", "--unidiff-zero", "-"]
        done = subprocess.run(apply, input=change, cwd=tmp_path / "mine", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    argv = ("--max_steps", 60, "--dataset", "stripes", "--output_dir", tmp_path / "run")
    done = alone(tmp_path / "mine", "vit", *argv)
    assert done.returncode == 0, done.stderr[-2000:]
    assert '"confidence"' in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert record(tmp_path / "run")["final"]["metrics"]["accuracy"] > 0.6
