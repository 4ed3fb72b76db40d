"""The files of cluster/, as far as they can be checked without a cluster. test_machines.py starts a Slurm."""

import re
import shlex
import subprocess

import pytest
import yaml
from conftest import CONFIGS, ROOT, edited, launched, recipe

from shared import args


def test_the_scripts_parse():
    for name in ("slurm.sbatch", "slurm_here.sh"):
        subprocess.run(["bash", "-n", f"cluster/{name}"], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    "words", ["ddp_bf16", "ddp_bf16 --num_processes 4 vit", "--nodes 4 ddp_bf16 vit", "ddp_bf16 -m mine"]
)
def test_a_job_whose_options_stand_in_the_wrong_place_is_refused(words, tmp_path):
    env = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_NNODES": "2", "SLURM_JOB_ID": "1"}
    done = launched("bash", "cluster/slurm.sbatch", *words.split(), env=env)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and not done.stdout


def test_the_trainjob_is_one_to_kubeflows_own_models():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    job = yaml.safe_load((ROOT / "cluster" / "trainjob.yaml").read_text())
    read = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert read.to_dict() == job  # a key that the models don't know would be missing
    assert models.TrainerV1alpha1TrainJob.from_dict(job | {"sepc": {}}).to_dict() == job  # and this is how


def test_the_trainjobs_line_is_a_launch():
    job = yaml.safe_load((ROOT / "cluster" / "trainjob.yaml").read_text())["spec"]["trainer"]
    [line] = job["args"]
    env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "10.0.0.1",
           "PET_MASTER_PORT": "29500"}  # fmt: skip
    assert set(re.findall(r"PET_\w+", line)) == set(env)
    shown = launched("bash", "-c", edited(line, "cd /srv/recipes && exec ./launch.sh", "printf '%s\\n'"), env=env)
    config, *words = shlex.split(shown.stdout)
    assert (CONFIGS / f"{config}.yml").is_file()
    at = words.index("vit")
    options = dict(zip(words[:at:2], words[1:at:2], strict=True))
    assert options["--num_processes"] == "16" and options["--rdzv_conf"] == "is_host=0"
    args.parse(recipe("vit").Arguments, words[at + 1 :])
    checked = launched("./launch.sh", "check", config, *words[:at])
    assert "16 processes" not in checked.stdout and checked.returncode == 0, checked.stdout
