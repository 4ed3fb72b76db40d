"""TransformerEngine configs: their rules. te_checks.py runs TransformerEngine's own Python on a pretended GPU."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import fake_tex
import pytest
import torch
import yaml
from conftest import CONFIGS, ROOT
from test_plan import CPU, GPU, exported_by_accelerate

from faithful.config import config_file, fp8, rules
from faithful.config.settings import read_env, to_env
from faithful.plan import made_of
from shared import vision
from shared.args import Refused

TE_FILES = sorted(CONFIGS.glob("*_fp8_te*.yml"))
DELAYED = "backend: TE, recipe: delayed, format: HYBRID, margin: 0, amax_history_len: 1024, amax_compute_algo: max"
A100 = replace(GPU, name="NVIDIA A100-SXM4-80GB", capability=(8, 0))
B200 = replace(GPU, name="NVIDIA B200", capability=(10, 0))
RTX5090 = replace(GPU, name="NVIDIA GeForce RTX 5090", capability=(12, 0))
needs_te = pytest.mark.skipif(fake_tex.missing() is not None, reason=str(fake_tex.missing()))


def section(text):
    return yaml.safe_load("{" + text + "}")


def config(text, kind="NO", **more):
    """The mapping of a config file with this `fp8_config`."""
    processes = {"num_processes": 1 if kind == "NO" else 2}
    fsdp = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": False,
    }
    made = {"distributed_type": kind, "mixed_precision": "fp8", "fp8_config": section(text)} | processes | more
    return made | ({"fsdp_config": fsdp} if kind == "FSDP" else {})


def settings_of(mapping):
    return read_env(to_env(mapping))


def on_a_gpu(asked):
    return made_of(asked, GPU, None, [])


def problems(mapping, machine):
    return rules.problems(settings_of(mapping), machine)


@needs_te
def test_transformer_engine_itself():
    """TransformerEngine's own Python passes te_checks.py, in a separate process."""
    line = [sys.executable, "-m", "pytest", "-p", "pretend", "-p", "no:cacheprovider", ROOT / "tests" / "te_checks.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    if done.returncode == 5:  # nothing was collected
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("key", "turned", "default", "reason"),
    [
        ("interval", "2", "1", "TransformerEngine has removed it"),
        ("override_linear_precision", "[false, false, true]", "[false, false, false]", "TransformerEngine has removed"),
        ("use_autocast_during_eval", "true", "false", "evaluation is always outside FP8"),
        ("use_mxfp8_block_scaling", "true", "false", "write recipe: mxfp8 instead"),
    ],
)
def test_a_dead_knob_is_refused_where_it_is_turned(tmp_path, key, turned, default, reason):
    path = tmp_path / "single_fp8_te.yml"
    for value, expected in ((turned, [f"fp8_config {key}: {reason}"]), (default, [])):
        mapping = config(f"{DELAYED}, {key}: {value}")
        path.write_text(yaml.dump(mapping))
        for found in (settings_of(mapping), read_env(exported_by_accelerate(path))):
            lines = rules.problems(found, GPU)
            assert len(lines) == len(expected)
            assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True)), lines


def test_override_of_all_gemms_at_once_is_refused():
    """A single `true` for all GEMMs is refused with a line, where Accelerate's launcher would raise a TypeError."""
    [line] = problems(config(f"{DELAYED}, override_linear_precision: true"), GPU)
    assert line.startswith("fp8_config override_linear_precision: TransformerEngine has removed it")


TENSORWISE = "backend: AO, recipe: tensorwise, enable_fsdp_float8_all_gather: false"
NO_TE = replace(GPU, packages=["torchao"])


@pytest.mark.parametrize(
    ("mapping", "machine"),
    [
        (config("backend: TE, recipe: mxfp8"), B200),
        (config("backend: TE, recipe: mxfp8"), replace(GPU, name="NVIDIA Thor", capability=(11, 0))),
        (config("backend: TE, recipe: mxfp8"), CPU),
        *((config("backend: TE, recipe: nvfp4, disable_rht: true"), card) for card in (B200, RTX5090, CPU)),
        (config("backend: TE, recipe: block"), replace(GPU, cuda="12.9")),
        (config("backend: TE, recipe: block"), RTX5090),
        (config(DELAYED), replace(GPU, cuda="12.8")),
        (config(DELAYED), replace(GPU, name="NVIDIA L4", capability=(8, 9))),
        (config(DELAYED), CPU),
        (config(TENSORWISE), NO_TE),
        *((config("backend: AO, recipe: mxfp8, scale_calculation_mode: floor"), card) for card in (B200, CPU)),
        (config("backend: AO, recipe: mxfp8_with_gw_hp"), replace(B200, name="NVIDIA GB300", capability=(10, 3))),
        (config("backend: AO, recipe: mxfp4"), CPU),
        (config("backend: MSAMP, opt_level: O2"), A100),  # amp8's savings need no FP8 hardware
        (config("backend: MSAMP, opt_level: O3, recipe: fp4, disable_gradient_estimator: true"), A100),
    ],
)
def test_what_can_be_is_not_refused(mapping, machine):
    assert problems(mapping, machine) == []


@pytest.mark.parametrize(
    ("text", "foreign"),
    [
        (f"{TENSORWISE}, margin: 0, amax_history_len: 1024", ("margin", "amax_history_len")),
        (f"{TENSORWISE}, opt_level: O2", ("opt_level",)),
        (f"{DELAYED}, opt_level: O2, pad_inner_dim: true", ("opt_level", "pad_inner_dim")),
        ("backend: MSAMP, opt_level: O2, format: HYBRID", ("format",)),
        ("backend: MSAMP, opt_level: O2, enable_fsdp_float8_all_gather: false", ("enable_fsdp_float8_all_gather",)),
        ("backend: MSAMP, opt_level: O2, recipe: te_delayed, margin: 1", ()),
        ("backend: AO, scale_calculation_mode: floor", ("scale_calculation_mode",)),
        ("backend: TE, recipe: mxfp8, scale_calculation_mode: floor", ("scale_calculation_mode",)),
        *((f"backend: AO, recipe: {level}, scale_calculation_mode: floor", ()) for level in fp8.MX),
        ("backend: MSAMP, opt_level: O2, recipe: fp4, disable_outlier_clamping: true, margin: 1", ("margin",)),
        ("backend: MSAMP, opt_level: O2, disable_gradient_estimator: true", ("disable_gradient_estimator",)),
        (DELAYED, ()),
        (TENSORWISE, ()),
    ],
)
def test_keys_of_another_backend_are_named(tmp_path, text, foreign):
    path = tmp_path / "mine.yml"
    path.write_text(yaml.dump(config(text)))
    said = section(text)
    which = f"{said['backend']} with recipe {said['recipe']}" if "recipe" in said else said["backend"]
    expected = {f"fp8_config {key} is not read by backend {which}: remove it" for key in foreign}
    assert set(config_file.file_problems(path)[0]) == expected


def test_whole_blocks_need_the_package_a_gpu_and_random_weights(monkeypatch):
    for name, pretrained in (("resnet18", False), ("vit_tiny", True)):
        with pytest.raises(Refused, match="start from random weights"):
            vision.vit(name, 32, 3, 10, pretrained, te_blocks=True)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(Refused, match="./launch.sh setup --extra te") as refused:
        vision.vit("vit_nano", 8, 1, 10, te_blocks=True)
    assert "\n" not in str(refused.value)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", torch)  # importable
    with pytest.raises(Refused, match="compute on an NVIDIA GPU, and here is none"):
        vision.vit("vit_nano", 8, 1, 10, te_blocks=True)


@needs_te
def test_the_extra_names_every_library_that_is_loaded():
    """The extra te names every library that TransformerEngine's __init__ loads; torch's wheels bring all but one."""
    [folder] = importlib.util.find_spec("transformer_engine").submodule_search_locations
    source = Path(folder, "common", "__init__.py").read_text()
    loaded = set(re.findall(r'= _load_cuda_library\("(\w+)"\)', source))
    assert {"cudnn", "nvrtc", "curand"} <= loaded
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = (ROOT / "requirements.txt").read_text()
    for extra in ("te", "te-python"):
        missing = [name for name in loaded if name not in pinned and not any(name in line for line in extras[extra])]
        assert missing == [], extra
