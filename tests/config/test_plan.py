"""Plans of configs: what they ask for, and that our copy of Accelerate's rules matches Accelerate."""

import dataclasses
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import yaml
from conftest import CONFIGS, ROOT, launched

from faithful import Refused, arguments, backends, plan, strategies
from faithful.config import config_file, fp8, keys, rules
from faithful.config.settings import read_env, to_env
from faithful.launch import machine
from tools import check, find
from tools.estimate import read_config

FILES = sorted(CONFIGS.glob("*.yml"))
GPU = machine.Machine("cuda", 8, "NVIDIA H200", (9, 0), "13.2", ["torchao", "transformer_engine", "deepspeed"])
CPU = machine.Machine()
DDP = {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_processes": 2}
FSDP = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_efficient_loading": False}
FSDP = DDP | {"distributed_type": "FSDP", "fsdp_config": FSDP}


def parsed_by_accelerate(path, *options):
    from accelerate.commands import launch

    args = launch.launch_command_parser().parse_args(["--config_file", str(path), *options, "script.py"])
    return launch._validate_launch_command(args)[0]


def exported_by_accelerate(path, *options):
    """The environment in which the installed launcher would start the script."""
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    args = parsed_by_accelerate(path, "--main_process_port", "0", *options)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = []  # launch_command fills it, for configs of DeepSpeed's own
        return prepare_deepspeed_cmd_env(args)[1] | {"LOCAL_RANK": "0", "WORLD_SIZE": str(args.num_processes)}
    if args.use_fsdp or args.multi_gpu:
        env = prepare_multi_gpu_env(args)
        return env | {"LOCAL_RANK": "0", "WORLD_SIZE": str(args.num_processes)}  # these are torchrun's
    return prepare_simple_launcher_cmd_env(args)[1]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_name_the_file_and_accelerate_agree(path):
    ours, theirs = read_env(to_env(yaml.safe_load(path.read_text()))), read_env(exported_by_accelerate(path))
    assert ours == replace(theirs, local_processes=ours.local_processes)  # torchrun exports these, not the launcher
    promised = config_file.grammar(path.stem)
    says = {key: theirs.fp8.options.get("recipe") if key == "recipe" else getattr(theirs, key) for key in promised}
    assert promised and promised == says
    assert path.read_text().startswith("# ")
    assert theirs.num_processes == {"single": 1, "hsdp": 4, "fsdp_tp": 4}.get(theirs.strategy, 2)


def test_the_keys_are_those_of_the_installed_launcher():
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    known = {section: {key.name for key in keys.TABLE[section] if key.reader != keys.UNREAD} for section in keys.TABLE}
    old = {key.name for key in keys.TABLE[""] if "converts" in key.reader}
    assert known[""] == {field.name for field in dataclasses.fields(ClusterConfig)} | old
    groups = {
        group.title: {action.dest for action in group._group_actions}
        for group in launch_command_parser()._action_groups
    }
    titles = {"fsdp_config": "FSDP", "deepspeed_config": "DeepSpeed", "fp8_config": "FP8", "mpirun_config": "MPI",
              "parallelism_config": "ParallelismConfig"}  # fmt: skip
    for section, title in titles.items():
        [options] = [options for name, options in groups.items() if name.startswith(title)]
        assert options <= known[section], section
        more = known[section] - options  # of fp8_config the launcher hands on any key
        assert more <= {"fsdp_ignored_modules"} or section == "fp8_config", section
    assert known["dynamo_config"] == {name for name in groups["Resource Selection Arguments"] if "dynamo" in name}


SECTIONS = {"fsdp_config": {"distributed_type": "FSDP"}, "deepspeed_config": {"distributed_type": "DEEPSPEED"},
            "fp8_config": {"mixed_precision": "fp8"}}  # fmt: skip


def another(key):
    """A value of a key that is not its default."""
    if key.kind == "bool":
        return not key.default
    if key.kind in ("int", "exponent", "float"):
        return (key.least or 0) + 2
    return next((word for word in key.values if word.lower() not in ("no", "false", "none", "default")), "other")


@pytest.mark.parametrize("key", [key for key in keys.ROWS.values() if key.variable], ids=lambda key: key.name)
def test_each_key_becomes_the_variable_that_the_installed_launcher_writes(tmp_path, key):
    [section] = [section for section in keys.TABLE if key in keys.TABLE[section]]
    value = {"mixed_precision": "fp16"}.get(key.name) or another(key)
    config = DDP | SECTIONS.get(section, {}) | ({section: {key.name: value}} if section else {key.name: value})
    if config["distributed_type"] == "DEEPSPEED":
        pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    if key.name == "use_cpu":
        config |= {"distributed_type": "NO", "num_processes": 1}
    if key.name == "deepspeed_config_file":
        del config["mixed_precision"]
    if key.name == "fsdp_sync_module_states":  # which the launcher wants for the other
        config[section]["fsdp_cpu_ram_efficient_loading"] = False
    (tmp_path / "mine.yml").write_text(yaml.dump(config))
    ours, theirs = to_env(config)[key.variable], exported_by_accelerate(tmp_path / "mine.yml")[key.variable]
    assert ours.lower() == theirs.lower() == str(value).lower()


def test_each_reader_of_an_fp8_key_is_a_backend_with_a_recipe_of_its_own():
    known = {"Plan", keys.UNREAD}
    for name, backend in fp8.BACKENDS.items():
        recipes = backend.levels if backend.level_key == "recipe" else backend.recipes.values()
        known |= {name.upper(), *(f"{name.upper()} {recipe}" for recipe in recipes)}
    assert {reader for key in keys.TABLE["fp8_config"] for reader in key.reader.split(", ")} <= known


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_file_is_sound(path):
    assert config_file.file_problems(path)[0] == []
    card = replace(GPU, capability=(10, 0)) if path.stem.endswith(("mxfp8", "nvfp4")) else GPU
    card = CPU if path.stem.endswith("ao_mxfp4") else card  # which no GPU trains
    assert rules.problems(read_env(to_env(yaml.safe_load(path.read_text()))), card) == []


def test_a_missing_file_and_a_name_of_ones_own(tmp_path):
    assert config_file.file_problems(tmp_path / "none.yml") == (["cannot be read: No such file or directory"], None)
    (tmp_path / "my_cluster.yml").write_text(yaml.dump(DDP))
    assert config_file.file_problems(tmp_path / "my_cluster.yml")[0] == []


def test_a_hostfile_is_read(tmp_path):
    section = {"deepspeed_hostfile": str(tmp_path / "hosts")}
    assert "cannot be read" in check.problems_of_hostfile(section, 4)[0]
    assert "cannot be read" in check.problems_of_hostfile({"deepspeed_hostfile": "a\0b"}, 4)[0]
    for text, expected in (
        (b"a 4\n", "every line is"),
        (b"a slots=" + b"4" * 5000, "every line is"),
        (b"a slots=\xff", "is not UTF-8"),
        (b"a slots=1\nb slots=2 # c\n", "has 3 slots for 4 processes"),
    ):
        (tmp_path / "hosts").write_bytes(text)
        assert expected in check.problems_of_hostfile(section, 4)[0]
    assert check.problems_of_hostfile(section, 3) == []


def test_check_knows_the_machines_of_a_launch():
    options = "--num_machines 2 --num_processes 3 --machine_rank 2 --main_process_ip 127.0.0.1 --rdzv_backend c10d"
    result = launched(
        "./launch.sh", "check", "ddp_bf16", *options.split(), "--max_restarts", "3", "--monitor_interval", "1"
    )
    lines = result.stdout.splitlines()
    assert result.returncode == 2 and len(lines) == 4, result.stdout + result.stderr
    for line, part in zip(
        lines, ("3 processes", "machine_rank 2", "means each machine itself", "--main_process_port"), strict=True
    ):
        assert part in line


def test_a_port_in_use_is_named():
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        [line] = check.problems_of_machines(DDP | {"main_process_port": taken.getsockname()[1]}, {})
    assert "is in use" in line


def test_every_problem_is_named_at_once(tmp_path):
    bad = FSDP | {"num_processes": 64, "mixed_precision": "bf61", "fsdp_config": {"fsdp_version": 1, "bananas": 7}}
    (tmp_path / "bad.yml").write_text(yaml.dump(bad))
    result = launched(sys.executable, "tools/check.py", str(tmp_path / "bad.yml"))
    assert result.returncode == 2
    for part in ("bananas", "bf61", "FSDP version 1"):
        assert part in result.stdout


def test_check_is_quick_and_needs_no_torch():
    code = "import sys; sys.path.insert(0, '.'); import faithful.config.rules; print(sys.modules.keys() & {'torch', 'accelerate'})"
    assert launched(sys.executable, "-c", code).stdout.strip() == "set()"
    start = time.perf_counter()
    result = launched("./launch.sh", "check")
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(result.stdout.splitlines()) == len(FILES)
    elsewhere = [line for line in result.stdout.splitlines() if "not on this machine" in line]
    assert all("needs DeepSpeed" in line for line in elsewhere) or machine.of_driver().devices, "a CPU rehearses all"
    assert time.perf_counter() - start < 10


def test_a_config_asked_for_by_name_must_run_here(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text((CONFIGS / "tp_bf16.yml").read_text().replace("bf16\n", "fp8\nfp8_config:\n  backend: MSAMP\n"))
    result = launched("./launch.sh", str(file), "gpt")
    assert result.returncode == 2 and "use tp_fp8, or tp_bf16" in result.stderr
    assert "accelerate launch" not in result.stdout


def test_the_grammar_of_names():
    assert config_file.grammar("default_config") is None
    promised = config_file.grammar("fsdp_bf16_offload")
    assert promised == {"strategy": "fsdp", "precision": "bf16", "backend": None, "level": None,
                        "compile": False, "offload": True, "ckpt": False, "noreshard": False}  # fmt: skip
    for name, backend, level in (("fp8", "ao", "tensorwise"), ("fp8_ao_rowwise_with_gw_hp", "ao", "rowwise_with_gw_hp"),
                                 ("fp8_te", "te", "delayed"), ("fp8_msamp_o3", "msamp", "o3")):  # fmt: skip
        promised = config_file.grammar(f"single_{name}_compile")
        assert (promised["backend"], promised["level"], promised["compile"]) == (backend, level, True)
    assert config_file.grammar("ddp_fp8_msamp_o2_te")["recipe"] == "te_delayed"
    assert config_file.grammar("ddp_fp8_msamp_o2_fp4_compile")["recipe"] == "fp4"


def merged(planned, **script):
    """The arguments that Accelerate gets for the script's arguments."""
    return arguments.with_config(planned, script, strategies.get_strategy(planned), backends.get_backend(planned))


SINGLE = plan.Plan(None, "single", 1, "fp32", "cpu", rehearsal=True)


def test_gradient_accumulation_is_said_in_one_place(monkeypatch):
    from accelerate.utils import GradientAccumulationPlugin

    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    for script in (
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2)},
    ):
        with pytest.raises(Refused, match="the launcher exports 8: say it in one place"):
            merged(SINGLE, **script)
    assert merged(SINGLE, gradient_accumulation_steps=8)["gradient_accumulation_steps"] == 8
    assert "gradient_accumulation_steps" not in merged(SINGLE)  # a script that says none takes the launcher's


def test_the_collective_timeout_reaches_the_process_group(monkeypatch):
    monkeypatch.setenv("COLLECTIVE_TIMEOUT", "7")
    two = plan.Plan(None, "ddp", 2, "fp32", "cuda")
    [handler] = merged(two)["kwargs_handlers"]
    assert handler.timeout.total_seconds() == 7
    for text in ("0", "-1", "1.5", "ten"):
        monkeypatch.setenv("COLLECTIVE_TIMEOUT", text)
        with pytest.raises(Refused, match=f"COLLECTIVE_TIMEOUT={text}: write seconds"):
            merged(two)


def test_a_script_that_says_what_the_config_says_is_taken_at_its_word():
    from accelerate.utils import GradScalerKwargs, ProjectConfiguration

    assert "cpu" not in merged(SINGLE, cpu=True, mixed_precision="no")  # the rehearsal is on the CPU already
    scaling = GradScalerKwargs(init_scale=8.0)
    fp16 = plan.Plan(None, "single", 1, "fp16", "cuda")
    made = merged(fp16, kwargs_handlers=[scaling], project_config=ProjectConfiguration("here"), log_with="tensorboard")
    assert made["kwargs_handlers"] == [scaling] and made["log_with"] == "tensorboard"
    assert made["project_config"].project_dir == "here"
    assert arguments.keyword_arguments((), {"mixed_precision": None, "log_with": "wandb"}) == {"log_with": "wandb"}
    assert arguments.keyword_arguments((False,), {"cpu": True}) == {
        "device_placement": False,
        "cpu": True,
    }  # by place or by name


def test_recipes_name_no_precision():
    for path in (ROOT / "recipes").glob("*.py"):
        text = path.read_text()
        for word in ("mixed_precision", "trust_remote_code", "torch.load"):
            assert word not in text, f"{path.name}: {word}"


def test_no_pickle_is_ever_loaded():
    found = subprocess.run(
        ["grep", "-rnE", r"torch\.load\(|pickle\.load|trust_remote_code=True", "shared", "faithful", "amp8", "tools",
         "recipes"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout == ""


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("single_fp8", "use single_fp8_compile"),
        ("fsdp_fp8_ao_rowwise", "use fsdp_fp8_compile"),
        ("zero2_fp8", "use zero2_bf16"),
        ("single_fp8_compile", None),
        ("single_fp8_te", None),
        ("single_fp8_ao_mxfp8", None),
        ("single_fp8_msamp_o2", None),
        ("single_bf16", None),
    ],
)
def test_fp8_that_costs_time_says_on_a_gpu_what_to_use(name, use):
    settings = read_config(ROOT / "accelerate_configs" / f"{name}.yml")
    said = [line for line in rules.notes(settings, GPU) if "slower than bf16's" in line]
    assert len(said) == (use is not None) and all(use in line for line in said)
    assert not any("slower" in line for line in rules.notes(settings, CPU))


def test_the_list_names_fp8_that_is_compiled_first():
    listed = [line.split()[0] for line in find.listing() if line.startswith("  ")]
    for name in ("single_fp8", "ddp_fp8", "fsdp_fp8", "single_fp8_ao_rowwise", "single_fp8_msamp_o2"):
        assert listed.index(f"{name}_compile") == listed.index(name) - 1


def test_the_page_of_keys_is_the_table():
    table = (ROOT / "docs/keys.md").read_text().split("keys -->\n")[1].split("\n<!-- end -->")[0]
    assert table == "\n".join(keys.as_table()), "python -m faithful.config.keys"
