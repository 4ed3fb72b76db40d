"""Trains with every config of the folder on this machine."""

import functools
import sys

import pytest
import torch
from conftest import CONFIGS, ROOT, distance, free_port, launched, losses, record, train, weights

from faithful.config import config_file
from faithful.evidence import evidence
from faithful.tensors import names

NAMES = [path.stem for path in sorted(CONFIGS.glob("*.yml"))]
NAMES = [  # test_fp8.py, test_zero.py, test_tp.py and test_fsdp_tp.py have the others
    name for name in NAMES if "fp8" not in name and not name.startswith("zero") and "tp_" not in name
]
STEPS = ("--max_steps", 5, "--logging_steps", 1, "--save_steps", 0)
CPU_ONLY = not torch.accelerator.is_available()


def write_local_share(folder, rank):
    """Called before the run: each rank writes down how many parameter elements it holds."""
    count = evidence.Evidence.after_first_update

    def patched(self, optimizer):
        held = sum(names.local(p).numel() for p in self.parameters.values())
        (folder / f"held{rank}").write_text(f"{held} {sum(p.numel() for p in self.parameters.values())}")
        return count(self, optimizer)

    evidence.Evidence.after_first_update = patched


@pytest.mark.parametrize("name", [n for n in NAMES if "compile" not in n])
def test_rehearses(tmp_path, name):
    run = train(name, tmp_path / "run", *STEPS, before=functools.partial(write_local_share, tmp_path))
    made, asked = record(run), config_file.grammar(name)
    assert made["status"] == "finished" and made["error"] is None and made["schema_version"] == 3
    assert made["config"]["name"] == name and made["config"]["sha256"]
    assert {key: made["plan"][key] for key in asked} == asked
    assert made["plan"]["rehearsal"] is CPU_ONLY
    assert len(losses(run)) == 5 and all(0 < loss < 10 for loss in losses(run))
    seen, processes = made["evidence"], made["plan"]["num_processes"]
    assert seen["optimizer_owns_all"] and seen["bytes_per_parameter"]["total"] == 16.0
    compute = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[asked["precision"]]
    assert seen["dtypes"]["linear_output"] == compute
    total = sum(tensor.numel() for tensor in weights(run).values())
    assert seen["dtypes"]["parameters"] == {"float32": total}
    assert seen["dtypes"]["gradients"] == {"float32": total}
    assert seen["dtypes"]["optimizer_state"] == {"exp_avg": {"float32": total}, "exp_avg_sq": {"float32": total}}
    assert made["final"]["step"] == 5 and 0 <= made["final"]["metrics"]["accuracy"] <= 1
    assert made["throughput"]["steps_measured"] == 2 and made["peak_memory_bytes"] > 0
    assert made["seen"]["samples_per_step"] == 32 * processes
    log = (tmp_path / "run.log").read_text()
    assert len(log.split("asked: ")) == 2, "one rank speaks"
    assert len(log.split("vit | ")) == 3 and f"{seen['measured']} | global batch {32 * processes}\n" in log
    # ring accounting: fp32 gradients all-reduced; under FSDP2 gathered twice and reduced once
    sixteen = asked["precision"] != "fp32"
    bytes_each = {"single": 0, "ddp": 4, "fsdp": 4 if sixteen else 6, "hsdp": 6}[
        asked["strategy"]
    ]  # two ranks: half of each
    bytes_each -= asked["noreshard"]  # gathered once; hsdp: reduced among the copies, too
    assert seen["wire_bytes_per_step"] == pytest.approx(bytes_each * total, rel=0.02)
    for rank in range(processes):
        held, whole = map(int, (tmp_path / f"held{rank}").read_text().split())
        assert whole == total
        share = held / whole
        assert 0.4 < share < 0.6 if asked["strategy"] in ("fsdp", "hsdp") else share == 1
    assert seen["sharded"] is (asked["strategy"] in ("fsdp", "hsdp"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NAMES if "compile" in n])
def test_compiles(tmp_path, name):
    run = train(name, tmp_path / "run", *STEPS)
    made = record(run)
    assert made["plan"]["compile"] and made["status"] == "finished"
    assert made["compiled"]["graphs"] > 0 == made["compiled"]["graph_breaks"]
    eager = train(name.replace("_compile", ""), tmp_path / "eager", *STEPS)
    assert distance(run, eager) < 1e-3


@pytest.mark.parametrize("name", ["single_bf16", "ddp_fp32", "fsdp_bf16", "tp_bf16"])
def test_accelerate_launch_itself(tmp_path, name):
    """A run by `accelerate launch` is the same as a forked run of the other tests, once per strategy."""
    out, recipe, steps = tmp_path / "run", "vit", STEPS
    if name == "tp_bf16":  # for models of transformers
        recipe, steps = "gpt", (*STEPS, "--dataset", ROOT / "shared", "--sequence_length", 32, "--model", "llama_nano")
    command = ["accelerate", "launch", "--config_file", f"accelerate_configs/{name}.yml", "--main_process_port", "0"]
    result = launched(*command, f"recipes/{recipe}.py", "--output_dir", str(out), *map(str, steps))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(f"asked: {recipe}") == 1
    made = record(out)
    assert made["config"]["name"] == name and "accelerate" in made["command"]
    twin = train(name, tmp_path / "twin", *steps, name=recipe)
    assert distance(out, twin) == 0
    assert made["plan"] == record(twin)["plan"] and made["evidence"] == record(twin)["evidence"]


def test_torchrun_and_python(tmp_path):
    out = str(tmp_path / "two")
    result = launched("torchrun", "--nproc_per_node", "2", "--master_port", str(free_port()), "recipes/vit.py",
                      "--output_dir", out, *map(str, STEPS))  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert record(out)["plan"]["strategy"] == "ddp" and record(out)["plan"]["num_processes"] == 2
    assert "vit | ddp x2 gloo | fp32" in result.stdout
    out = str(tmp_path / "one")
    result = launched(sys.executable, "recipes/vit.py", "--output_dir", out, *map(str, STEPS))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "vit | single | fp32" in result.stdout and record(out)["config"]["name"] is None


@pytest.mark.parametrize("options", [("--cpu",), ("--cpu", "--num_processes", "2"), ("--mixed_precision", "fp16")])
def test_two_processes_never_become_copies_of_one(tmp_path, options):
    """Configs that Accelerate would run as something else, with exit code 0, are refused."""
    config = tmp_path / "ddp_bf16.yml"
    config.write_text((CONFIGS / "ddp_bf16.yml").read_text())
    # Rank 0 alone prints, and the launcher kills it when another rank refuses first: it must get to speak, however late.
    late = "import os, time\ntime.sleep(5 * (os.environ.get('RANK') == '0'))\n"
    (tmp_path / "sitecustomize.py").write_text(late)
    result = launched("accelerate", "launch", "--config_file", str(config), *options, "tests/scripts/loop.py",
                      "--output_dir", str(tmp_path / "run"), env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})  # fmt: skip
    assert result.returncode == 1  # accelerate's, whatever the worker's
    assert "refused: ddp_bf16.yml says" in result.stderr
    assert not (tmp_path / "run").exists()
