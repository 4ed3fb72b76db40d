"""The Dockerfiles: what they copy and run is there. They are not built here: that needs a daemon and a registry."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

FILES = sorted((ROOT / "cluster").glob("*.Dockerfile"))
KNOWN = {"FROM", "RUN", "WORKDIR", "COPY", "STOPSIGNAL", "ENTRYPOINT", "CMD", "ARG", "ENV"}
BY_SYSTEM = {"apt-get", "rm"}  # of the base images


def instructions(file):
    """[(instruction, its text)] of a Dockerfile: lines that end with a backslash are joined, comments left out."""
    text = re.sub(r"\\\n", " ", "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#")))
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def commands(text):
    """The words of each command of a RUN, without variables set before it."""
    for part in text.split("&&"):
        words = shlex.split(part)
        while words and re.match(r"\w+=", words[0]):
            words.pop(0)
        yield words


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_a_dockerfile_names_is_there(file):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = instructions(file)
    assert lines[0][0] == "FROM" and not lines[0][1].endswith(("latest", ":")) and ":" in lines[0][1]
    copied = set()
    for name, text in lines:
        assert name in KNOWN, name
        if name == "COPY":
            *sources, target = text.split()
            assert not [source for source in sources if not (ROOT / source).exists()]
            assert len(sources) == 1 or target.endswith("/")
            copied |= {*sources}
        elif name == "RUN":
            for words in commands(text):
                assert words[0] in BY_SYSTEM or (words[0] == "./launch.sh" and "launch.sh" in copied), words
                if words[0] == "./launch.sh":
                    assert words[1] == "setup" and {"requirements.txt", "pyproject.toml"} <= copied
                    named = words[3::2]
                    assert words[2::2] == ["--extra"] * len(named) and set(named) <= extras.keys()
        elif name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in yaml.safe_load(text))
    needed = {"LICENSE", "README.md", "accelerate_configs", "amp8", "cluster", "faithful", "recipes", "shared", "tools"}
    assert needed <= copied, "what ./launch.sh runs is copied"
    parsed = subprocess.run(["bash", "-n", "-c", "\n".join(text for name, text in lines if name == "RUN")])
    assert parsed.returncode == 0


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_hadolint_finds_nothing(file):
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("./launch.sh setup --extra dev")
    found = subprocess.run([hadolint, file], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_the_gpu_image_has_the_cuda_of_the_pinned_torch_and_builds_transformer_engine():
    text = (ROOT / "cluster" / "cuda.Dockerfile").read_text()
    cuda = re.search(r"^FROM nvidia/cuda:(\d+\.\d+)", text, re.M)[1]
    pinned = (ROOT / "requirements.txt").read_text()
    assert re.search(rf"^nvidia-cuda-runtime(?:-cu\d+)?=={re.escape(cuda)}\.", pinned, re.M), cuda
    assert "--extra te " in text and "devel" in text


def test_a_line_of_a_dockerfile_that_names_nothing_is_found(tmp_path):
    for before, after in (
        ("COPY shared shared/", "COPY shard shared/"),
        ("--extra onnx", "--extra onx"),
        ("rm -rf /root", "rn -rf /root"),
    ):
        text = (ROOT / "cluster" / "cpu.Dockerfile").read_text()
        assert before in text
        (tmp_path / "cpu.Dockerfile").write_text(text.replace(before, after))
        with pytest.raises(AssertionError):
            test_what_a_dockerfile_names_is_there(tmp_path / "cpu.Dockerfile")


def test_github_runs_what_ci_runs():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["checks"]["steps"]
    assert steps[-1]["run"] == "bash .ci/run" and (ROOT / ".ci" / "run").is_file()
    assert workflow["permissions"] == {"contents": "read"} and {"push", "pull_request"} <= workflow[True].keys()
