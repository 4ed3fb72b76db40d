"""What `./launch.sh setup` installs is enough: a recipe needs no package of the extras, which tests have by chance."""

import re
import subprocess
import sys
import tomllib

from conftest import ROOT, record

MODULES = {  # of packages whose module has another name
    "scikit-image": "skimage", "transformer-engine": "transformer_engine", "sentence-transformers": "sentence_transformers",
    "pytorch-accelerated": "pytorch_accelerated", "lightning-fabric": "lightning_fabric", "nvidia-ml-py": "pynvml",
    "pre-commit": "pre_commit", "denoising-diffusion-pytorch": "denoising_diffusion_pytorch", "pytest-xdist": "xdist",
    "kubeflow-trainer-api": "kubeflow_trainer_api", "pytest-timeout": "pytest_timeout",
}  # fmt: skip
HIDE = """
import importlib.util, runpy, sys
hidden, find = {hidden}, importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] in hidden else find(name, *rest)
sys.modules.update(dict.fromkeys(hidden))  # importing one raises
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def extras():
    """The modules of the packages of the extras that the pinned requirements do not have."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements.txt").read_text(), re.M))
    names = {
        re.match(r"[\w.-]+", line).group() for name, lines in extras.items() if name != "recipes" for line in lines
    }
    return sorted(MODULES.get(name, name) for name in names - pinned)


def test_a_recipe_needs_no_package_of_the_extras(tmp_path):
    hidden = extras()
    assert {"deepspeed", "skimage", "peft", "tensorboard"} <= set(hidden)
    argv = ["recipes/vit.py", "--max_steps", "2", "--save_steps", "0", "--output_dir", str(tmp_path / "run")]
    line = [sys.executable, "-c", HIDE.format(hidden=hidden), *argv]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert record(tmp_path / "run")["status"] == "finished"
