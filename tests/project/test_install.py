"""The wheel: `pip install .` installs faithful, amp8, and the command accelerate-recipes with all that it reads."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import install
import pytest
from conftest import CONFIGS, ROOT, launched, record
from test_readme import broken_links

from faithful.evidence.record import code_sha256
from shared.args import Refused
from tools import commands, copy_recipe, find

SCRIPT = """
import torch
from faithful import Accelerator

accelerator, model = Accelerator(project_dir="run"), torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
for _ in range(3):
    x = torch.randn(8, 16, device=accelerator.device)
    accelerator.backward((model(x) - x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
"""
NO_FILES = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "runs", "tests")


def run(*words, **kwargs):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, out = tmp_path_factory.mktemp("source") / "clone", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, source, ignore=NO_FILES)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)
    [made] = out.glob("*.whl")
    return made


class Installed:
    """An environment with the wheel, and all packages of this one."""

    def __init__(self, folder, wheel):
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        self.python, self.folder = folder / "bin" / "python", folder
        install = ("install", "--no-deps", "--no-index", "--ignore-installed", wheel)  # a build leaves its name in ROOT
        run(sys.executable, "-m", "pip", "--python", self.python, *install)
        [site] = folder.glob("lib/python*/site-packages")
        (site / "others.pth").write_text(sysconfig.get_path("purelib"))
        self.root = site / "accelerate_recipes"

    def __call__(self, *words, cwd, **kwargs):
        env = {"PYTHONPATH": "", "VIRTUAL_ENV": str(self.folder), "PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        full = os.environ | env
        return subprocess.run(
            [*map(str, words)], cwd=cwd, env=full, capture_output=True, text=True, timeout=240, **kwargs
        )

    def files(self):
        return {path for path in self.root.parent.rglob("*") if path.suffix != ".pyc" and path.name != "__pycache__"}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("environment"), wheel)


def names_in(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_what_a_user_runs_and_nothing_else(wheel):
    packages = {str(file.relative_to(ROOT)) for name in ("faithful", "amp8") for file in (ROOT / name).rglob("*.py")}
    folders = ("recipes", "shared", "tools", "accelerate_configs", "docs")
    whole = {str(file.relative_to(ROOT)) for name in folders for file in (ROOT / name).glob("*.*")}
    whole -= {"docs/hooks.py"}  # of the site, which is built in a clone
    whole |= {"requirements.txt", "pyproject.toml", "LICENSE"}
    whole |= {*(str(file.relative_to(ROOT)) for file in ROOT.glob("*.md"))}
    rest = {name.removeprefix("accelerate_recipes/") for name in names_in(wheel) - packages} - whole
    assert names_in(wheel) >= packages | {f"accelerate_recipes/{name}" for name in whole}
    text = "".join(page.read_text() for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")])
    linked = {f"results/{name}" for name in re.findall(r"\]\((?:\.\./)?results/([^)#]+)\)", text)}
    pages = {name for name in rest if name.endswith("/README.md")}
    pictures = {name for name in rest if name.endswith(".svg")}
    assert rest - pages - pictures <= linked, "results that no page links"
    assert Path(wheel).stat().st_size < 2_000_000


def test_the_links_of_the_pages_lead_somewhere_where_pip_put_them(installed):
    for page in [installed.root / "README.md", *sorted((installed.root / "docs").glob("*.md"))]:
        assert not list(broken_links(page, page.read_text())), page


@pytest.mark.parametrize("config", ["ddp_bf16", "single_fp8_msamp_o2"])
def test_a_script_of_ones_own_trains_with_the_installed_packages(installed, tmp_path, config):
    (tmp_path / "own.py").write_text(SCRIPT)
    out = installed(installed.python, "-m", "accelerate.commands.launch", "--config_file", CONFIGS / f"{config}.yml",
                    "own.py", cwd=tmp_path)  # fmt: skip
    assert out.returncode == 0, out.stderr[-3000:]
    assert f"asked: own | {config.split('_')[0]}" in out.stdout and "global batch" in out.stdout, out.stdout
    made = record(tmp_path / "run")
    assert made["status"] == "finished" and made["final"] is None and made["seen"]["loss_curve"][-1][0] == 3
    assert made["evidence"]["linear_converted"] == (2 if "fp8" in config else 0)


def test_the_help_leaves_out_what_only_a_clone_has(monkeypatch):
    assert "setup" in commands.help_text() and ".venv" in commands.help_text()
    monkeypatch.setattr(find, "CLONE", False)
    text = commands.help_text()
    assert not [word for word in ("setup", ".venv", "--cpu", "the test suite") if word in text] and "CONFIG" in text


SAME = (
    """
help | --version | ls | path | path vit | path fsdp_fp8.yml | path docs/fp8.md | path vitt
check | check ddp_bf17 | ddp_bf17 vit | DDP-bf16 vit | vit | launch | ddp_bf16
launch ddp_bf16 | ddp_bf16 gone.py | ddp_bf16 vit --max_step 4 | launch ddp_bf16 --num_processes vit
ddp_bf16 --num_procs 2 vit | ddp_bf16 vit --help | --bananas | demo --output_dir x
advise --help | check --help | compare --help | copy --help | diagnose --help | estimate --help | show --help
compare single_bf16 | advise single_bf17 -- vit | show nowhere
""".replace("\n", " | ")
    .strip(" |")
    .split(" | ")
)
WITH_TORCH = ("export --help", "predict --help")


def alike(text, root, cwd):
    """What a command printed, without what is of its place alone."""
    text = re.sub(r"^W\d+ .*\n", "", text, flags=re.M)  # torch's warnings have the time
    for place in (os.path.relpath(root, cwd), str(root)):
        text = text.replace(place, "ROOT")
    text = text.replace("./launch.sh", "accelerate-recipes")
    text = re.sub(r"^  (?:setup|test) .*\n(   .*\n)*", "", text, flags=re.M)
    text = re.sub(r"ROOT/docs/configs.md|(?<!/)docs/configs.md", "PAGE", text)
    return " ".join(text.split())


@pytest.mark.parametrize("words", [*SAME, *(pytest.param(words, marks=pytest.mark.slow) for words in WITH_TORCH)])
def test_the_command_says_what_launch_sh_says(installed, tmp_path, words):
    here = launched(str(ROOT / "launch.sh"), *words.split(), cwd=tmp_path, env={"PYTHONPATH": ""})
    there = installed("accelerate-recipes", *words.split(), cwd=tmp_path)
    assert there.returncode == here.returncode
    for stream in ("stdout", "stderr"):
        ours = alike(getattr(here, stream), ROOT, tmp_path)
        assert alike(getattr(there, stream), installed.root, tmp_path) == ours
    assert here.stdout or here.stderr
    assert "Traceback" not in here.stderr and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("command", ["setup", "test"])
def test_what_is_for_a_clone_says_so(installed, tmp_path, command):
    done = installed("accelerate-recipes", command, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {command} is for a clone of the repository")
    assert command not in re.findall(r"^  ([\w-]+)", installed("accelerate-recipes", cwd=tmp_path).stdout, re.M)


def test_accelerate_launches_by_path_and_writes_into_the_current_folder(installed, tmp_path):
    before = installed.files()
    line = f"""{installed.python} -m accelerate.commands.launch --config_file "$(accelerate-recipes path fsdp_fp8)" \
        --main_process_port 0 "$(accelerate-recipes path vit)" --max_steps 2 --save_steps 0"""
    done = installed("bash", "-c", line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    [made] = (tmp_path / "runs").iterdir()
    assert record(made)["status"] == "finished" and record(made)["evidence"]["linear_converted"] == 15
    assert record(made)["code_sha256"] == code_sha256(ROOT / "recipes" / "vit.py"), "the same code as in a clone"
    assert installed.files() == before, "nothing is written beside the packages"


@pytest.mark.slow
def test_every_command_does_its_work_where_pip_put_it(installed, tmp_path):
    def recipes(*words, says):
        done = installed("accelerate-recipes", *words, cwd=tmp_path)
        assert done.returncode == 0 and says in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]

    from PIL import Image

    before = installed.files()
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    recipes("compare", "single_fp8", "--seeds", "1", "--no-twin", "--", "vit", "--max_steps", "6", says="single_fp8")
    [made] = (tmp_path / "runs").glob("compare-vit-*/single_fp8-seed0")
    assert (made.parent / "report.html").exists()
    recipes("show", made, says="finished")
    recipes("export", made, says="export.safetensors")
    recipes("predict", made, "a.png", says="a.png")
    recipes("copy", "vit", "ddp_fp8_msamp_o2", "mine", says="mine: ")
    assert installed.files() == before
    here = copy_recipe.copy("vit", "ddp_fp8_msamp_o2", tmp_path / "here")
    assert sorted(path.relative_to(tmp_path / "mine") for path in (tmp_path / "mine").rglob("*.*")) == here
    for path in here:
        ours, theirs = tmp_path / "here" / path, tmp_path / "mine" / path
        if path.suffix == ".whl":
            assert names_in(ours) == names_in(theirs)
        elif path.name != "README.md":  # it begins with the folder's name
            assert ours.read_bytes() == theirs.read_bytes()


def test_a_clone_runs_its_own_code_in_an_environment_with_another(tmp_path):
    """As with a wheel in the active environment, or PYTHONPATH: each script puts its own folder first."""
    (tmp_path / "faithful").mkdir()
    (tmp_path / "faithful" / "__init__.py").write_text("raise SystemExit('the other')")
    for words in (("tools/commands.py", "ls"), ("recipes/vit.py", "--help")):
        assert run(sys.executable, *words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)})


def test_what_a_recipe_lacks_is_one_line(monkeypatch):
    lines = [
        "torch>=2.11",
        "pytest-timeout; extra == 'recipes'",
        "no-such-package>=1; extra == 'recipes'",
        "gone; extra == 'dev'",
    ]
    monkeypatch.setattr(commands.importlib.metadata, "requires", lambda name: lines)
    monkeypatch.setattr(commands.find, "CLONE", False)
    with pytest.raises(Refused, match=r"recipes need no-such-package: pip install 'accelerate-recipes\[recipes\]'"):
        commands.run(["compare", "single_bf16", "single_fp8", "--", "vit"])


def test_a_tool_asks_for_what_it_imports_alone(monkeypatch, capsys):
    """A copy's environment has what its recipe imports, and neither matplotlib nor another recipe's packages."""
    monkeypatch.setattr(commands.importlib.metadata, "requires", lambda name: ["no-such-package; extra == 'recipes'"])
    monkeypatch.setattr(commands.find, "CLONE", False)
    for command in ("show", "export", "predict"):
        with pytest.raises(SystemExit, match="0"):
            commands.run([command, "--help"])
        assert f" {command} [-h]" in capsys.readouterr().out
    monkeypatch.setattr("tools.show.main", lambda words: importlib.import_module("no_such_package.pages"))
    with pytest.raises(Refused, match=r"this show needs no_such_package: pip install 'accelerate-recipes\[recipes\]'"):
        commands.run(["show", "runs/1"])


WITHOUT_POSIX = """
import os, signal, sys
sys.modules.update(fcntl=None, resource=None, pwd=None)
del os.fork, os.sched_getaffinity, signal.SIGKILL, signal.SIGPIPE
sys.argv = ["commands.py", *sys.argv[1:]]
import runpy
runpy.run_path("tools/commands.py", run_name="__main__")
"""


@pytest.mark.parametrize("words", ["help", "--version", "ls", "path vit"])
def test_lists_and_paths_need_no_posix(words):
    assert run(sys.executable, "-c", WITHOUT_POSIX, *words.split(), cwd=ROOT)


def test_windows_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(commands.os, "name", "nt")
    for words in (["ddp_bf16", "vit"], ["demo"], ["compare"]):
        with pytest.raises(Refused, match=f"^{words[0]} needs Linux, here ls, path and --version work: use WSL$"):
            commands.run(words)


@pytest.mark.slow
@pytest.mark.parametrize("version", install.VERSIONS)
def test_three_commands_from_an_empty_folder_and_environment_to_the_first_step(wheel, tmp_path, version):
    there = install.interpreters()
    if version not in there:
        pytest.skip(f"no Python {version} here, only {', '.join(there)}")
    try:
        row = install.measured(there[version], wheel, tmp_path)
    finally:
        shutil.rmtree(tmp_path / ".venv", ignore_errors=True)  # gigabytes
    assert row["first_step_seconds"] > 0 and len(row["commands"]) == 3 and row["left"] == ["runs"]
