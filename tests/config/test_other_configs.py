"""Configs that others wrote: what is accepted in silence or with a note (test_refusals.py: or refused); and that each runs as it says."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands import launch
from accelerate.commands.config import config_args
from accelerate.commands.config.default import write_basic_config
from accelerate.utils import set_seed
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from conftest import CONFIGS, ROOT, SCRIPTS, Ranks, distance, free_port, launched, losses, record
from test_plan import CPU, GPU, exported_by_accelerate, parsed_by_accelerate

from faithful import __main__ as door, plan
from faithful.config import config_file, rules
from faithful.config.settings import read_env, to_env
from tools import check

# The lines that `accelerate config` always writes.
WIZARD = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no", "enable_cpu_affinity": False,
    "machine_rank": 0, "main_training_function": "main", "mixed_precision": "no", "num_machines": 1, "num_processes": 2,
    "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False,
    "use_cpu": False,
}  # fmt: skip
DDP = WIZARD | {"distributed_type": "MULTI_GPU"}
FSDP1 = {
    "fsdp_activation_checkpointing": False, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_cpu_ram_efficient_loading": True, "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False, "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True, "fsdp_use_orig_params": True,
}  # fmt: skip
FSDP2 = {
    "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False, "fsdp_reshard_after_forward": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}  # fmt: skip
ZERO3 = {
    "deepspeed_multinode_launcher": "standard", "offload_optimizer_device": "none", "offload_param_device": "none",
    "zero3_init_flag": True, "zero3_save_16bit_model": True, "zero_stage": 3,
}  # fmt: skip


def fsdp(*sections, **keys):
    section = {key: value for part in (sections or (FSDP1,)) for key, value in part.items()}
    return WIZARD | {"distributed_type": "FSDP", "fsdp_config": section | keys}


def zero(**keys):
    return WIZARD | {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO3 | keys}


def level(name, **keys):
    return zero(**keys) | {"mixed_precision": "fp8", "fp8_config": {"backend": "MSAMP", "opt_level": name}}


SILENT = {
    "the lines of accelerate config": DDP,
    "empty sections": DDP | {"fsdp_config": {}, "deepspeed_config": None, "megatron_lm_config": {}, "commands": None},
    "keys of a TPU that is not there": DDP | {"tpu_name": "a", "tpu_zone": "b", "command_file": "c.sh"},
    "another vendor's devices": DDP | {"distributed_type": "MULTI_XPU"},
    "NO without quotes": WIZARD | {"distributed_type": False, "num_processes": 1},
    "the keys of earlier versions": WIZARD
    | {"distributed_type": "NO", "num_processes": 1, "dynamo_backend": "NO", "mixed_precision": "fp16"},
    "one process on the CPU": WIZARD | {"distributed_type": "NO", "use_cpu": True, "num_processes": 1},
    "words for numbers, capitals": DDP | {"num_processes": "2", "main_process_port": "29999", "mixed_precision": "BF16"},
    "no num_processes": {"distributed_type": "NO", "mixed_precision": "bf16"},
    "FSDP2 in one unit": fsdp(FSDP2, fsdp_cpu_ram_efficient_loading=False, fsdp_auto_wrap_policy="NO_WRAP"),
    "FSDP2 with RAM-efficient loading": fsdp(FSDP2),
    "FSDP2 with nulls": fsdp(FSDP2, fsdp_cpu_ram_efficient_loading=False, fsdp_ignored_modules=None,
                             fsdp_transformer_layer_cls_to_wrap=None),
    "ZeRO's accumulation and clipping": zero(
        zero_stage=2, zero3_save_16bit_model=False, gradient_accumulation_steps=1, gradient_clipping=1.0
    ),
    "FP8 for TransformerEngine, as an old test of Accelerate's has it": DDP
    | {"mixed_precision": "fp8",
       "fp8_config": {"backend": "TE", "fp8_format": "E4M3", "override_linear_precision": "(false, false, false)"}},
}  # fmt: skip
NOTED = {
    "several processes under NO": (WIZARD | {"distributed_type": "NO", "num_processes": 8}, ["one process runs"]),
    "FSDP1": (fsdp(), ["FSDP version 1 with FULL_SHARD runs as FSDP2", "fsdp_backward_prefetch: ignored"]),
    "FSDP1's own words": (
        fsdp(fsdp_use_orig_params=False, fsdp_forward_prefetch=True, fsdp_cpu_ram_efficient_loading=False),
        ["runs as FSDP2", "fsdp_backward_prefetch, fsdp_forward_prefetch, fsdp_use_orig_params: ignored"],
    ),
    "FSDP2 with a key of FSDP1": (
        fsdp(FSDP2, fsdp_sharding_strategy="HYBRID_SHARD", fsdp_cpu_ram_efficient_loading=False),
        ["which version 2 does not read"],
    ),
    "ZeRO stage 0": (zero(zero_stage=0, zero3_init_flag=False), ["zero_stage 0 partitions nothing: it runs as DDP"]),
    "ZeRO-2 with MS-AMP's O3": (level("O3", zero_stage=2), ["runs as ddp_fp8_msamp_o3, whose masters"]),
    "ZeRO-3 with MS-AMP's O3": (level("O3"), ["zero_stage 3 with MS-AMP's o3 runs as o2, which FSDP2 shards"]),
    "ZeRO-1 with MS-AMP's O1": (level("O1", zero_stage=1), ["runs as o1 under FSDP2, and keeps gathered weights"]),
    "ZeRO-3 with MS-AMP's O2": (level("O2"), ["zero_stage 3 with MS-AMP's o2 runs as o2 under FSDP2"]),
    "modules that are not sharded": (
        fsdp(FSDP2, fsdp_cpu_ram_efficient_loading=False, fsdp_ignored_modules=r".*\.router"),
        ["none of them may be trained"],
    ),
    "the default answers of accelerate config for TransformerEngine": (
        DDP | {"mixed_precision": "fp8",
               "fp8_config": {"backend": "TE", "fp8_format": "HYBRID", "interval": 1, "margin": 0,
                              "amax_history_length": 1024, "amax_compute_algorithm": "max",
                              "override_linear_precision": [False] * 3, "use_autocast_during_eval": False}},
        ["max is not read by Accelerate, which takes most_recent", "amax_history_length is not read by Accelerate"],
    ),
    "ZeRO-3's defaults": (zero(), ["saved in fp32"]),
    "trl's file for Ulysses": (
        zero(zero3_init_flag=False, zero3_save_16bit_model=False, seq_parallel_communication_data_type="bf16")
        | {"mixed_precision": "bf16", "num_processes": 4,
           "parallelism_config": {
               "parallelism_config_dp_replicate_size": 1, "parallelism_config_dp_shard_size": 2,
               "parallelism_config_tp_size": 1, "parallelism_config_sp_size": 2,
               "parallelism_config_sp_backend": "deepspeed", "parallelism_config_sp_seq_length_is_variable": True,
               "parallelism_config_sp_attn_implementation": "flash_attention_2"}},
        ["seq_parallel_communication_data_type is not read"],
    ),
    "a section of another type": (DDP | {"fsdp_config": FSDP2}, ["fsdp_config is not read under distributed_type"]),
    "fp8_config without fp8": (DDP | {"fp8_config": {"backend": "TE"}}, ["fp8_config is not read under mixed_precision"]),
    "no precision": (DDP | {"mixed_precision": None}, ["it is the script's, and fp32 if the script says none"]),
    "a whole model compiled": (DDP | {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, ["compiled one by one"]),
    "compiling under DeepSpeed": (
        zero(zero_stage=2, zero3_save_16bit_model=False) | {"dynamo_config": {"dynamo_backend": "INDUCTOR"}},
        ["dynamo_config is not read"],
    ),
    "torchao's default outside FSDP2": (
        DDP | {"mixed_precision": "fp8", "fp8_config": {"backend": "AO"}},
        ["slower than bf16's, as torchao's casts are not compiled: use ddp_fp8_compile", "is off: only FSDP2 without tp gathers so"],
    ),
    "an option of an earlier version": (
        fsdp(FSDP2, fsdp_cpu_ram_efficient_loading=False, fsdp_backward_prefetch_policy="BACKWARD_PRE"),
        ["fsdp_backward_prefetch_policy is not read"],
    ),
}  # fmt: skip


def checked(path):
    """(problems, notes, what it asks for), as ./launch.sh check finds them, on a machine with everything."""
    sys.path.insert(0, str(ROOT))

    problems, _, notes, wanted = check.check(path, GPU, {})
    return problems, notes, wanted


def written(tmp_path, config, name="someone's.yaml"):
    (tmp_path / name).write_text(json.dumps(config) if name.endswith("json") else yaml.dump(config))
    return tmp_path / name


@pytest.mark.parametrize("name", SILENT)
def test_what_changes_nothing_is_accepted_in_silence(tmp_path, name):
    problems, notes, _ = checked(written(tmp_path, SILENT[name]))
    assert problems == [] and notes == []


@pytest.mark.parametrize("name", NOTED)
def test_what_cannot_have_its_effect_is_noted(tmp_path, name):
    config, expected = NOTED[name]
    problems, notes, _ = checked(written(tmp_path, config))
    assert problems == [] and len(notes) == len(expected), notes
    for note, words in zip(notes, expected, strict=True):
        assert words in note


@pytest.mark.parametrize("name", [*SILENT, *NOTED])
def test_a_file_becomes_what_the_installed_launcher_exports(tmp_path, name):
    config = SILENT.get(name) or NOTED[name][0]
    if config["distributed_type"] == "DEEPSPEED":
        pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    path = written(tmp_path, config)
    _, mapping = config_file.file_problems(path)
    ours, theirs = read_env(to_env(mapping)), read_env(exported_by_accelerate(path))
    assert ours == replace(theirs, local_processes=ours.local_processes)


def test_a_name_from_elsewhere_keeps_no_grammar(tmp_path):
    for name in ("single_accelerator.yaml", "fsdp_config.yaml", "ddp_fp16.yml", "zero3.json"):
        assert config_file.file_problems(written(tmp_path, DDP, name))[0] == []
    (tmp_path / "windows.yaml").write_bytes(b"\xef\xbb\xbf" + yaml.dump(DDP).replace("\n", "\r\n").encode())
    assert config_file.file_problems(tmp_path / "windows.yaml")[0] == []


@pytest.mark.parametrize(
    ("sharding", "local", "expected"),
    [
        ("FULL_SHARD", 2, ("fsdp", False, 1)),
        (1, 2, ("fsdp", False, 1)),
        ("SHARD_GRAD_OP", 2, ("fsdp", True, 1)),
        ("NO_SHARD", 2, ("ddp", False, 1)),
        ("HYBRID_SHARD", 4, ("fsdp", False, 1)),  # one machine: there is nothing to replicate
        ("HYBRID_SHARD", 2, ("hsdp", False, 2)),
        ("HYBRID_SHARD_ZERO2", 2, ("hsdp", True, 2)),
    ],
)
def test_the_strategies_of_fsdp1_are_those_of_fsdp2(sharding, local, expected):
    config = fsdp(fsdp_sharding_strategy=sharding) | {"num_processes": 4, "num_machines": 4 // local}
    found = read_env(to_env(config))
    assert (found.strategy, found.noreshard, found.mesh.dp_replicate) == expected
    assert rules.problems(found, GPU) == [] == rules.problems(found, CPU)
    newer = fsdp(fsdp_sharding_strategy=None, fsdp_reshard_after_forward="SHARD_GRAD_OP", fsdp_version=1)
    assert read_env(to_env(newer)).noreshard


def test_the_number_of_processes_where_nobody_says_it():
    config = {"distributed_type": "FSDP", "fsdp_config": FSDP1}
    assert config_file.default_processes(config, 8) == 8 and config_file.default_processes(config, 0) == 2
    assert config_file.default_processes(config | {"use_cpu": True}, 8) == 2
    mesh = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
    assert config_file.default_processes(config | {"parallelism_config": mesh}, 0) == 4
    assert config_file.default_processes({"distributed_type": "NO"}, 8) == 1


def test_minus_one_process_is_nobodys_choice(tmp_path):
    assert "num_processes" not in config_file.file_problems(written(tmp_path, DDP | {"num_processes": -1}))[1]


def test_check_says_what_a_file_will_be(tmp_path):
    path = written(tmp_path, fsdp(fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer") | {"mixed_precision": "bf16"})
    lines = launched("./launch.sh", "check", str(path)).stdout.splitlines()
    words = "fsdp x2, bf16, sharded by LlamaDecoderLayer; as FSDP2; rehearsal on a CPU"
    assert lines[0] == f"{path.name}: ok ({words})"  # also where the file says `use_cpu: false`
    assert [line.split(": ")[1] for line in lines[1:]] == ["note"] * 2
    path = written(tmp_path, DDP | {"mixed_precision": "fp8", "fp8_config": TE_LEVEL})
    assert launched("./launch.sh", "check", str(path)).stdout.endswith(
        "ok (ddp x2, fp8 msamp o2_te; rehearsal on a CPU)\n"
    )


TE_LEVEL = {"backend": "MSAMP", "opt_level": "O2", "recipe": "te_delayed"}
STEPS = ("--max_steps", "2", "--logging_steps", "1", "--save_steps", "0",
         "--dataset", str(ROOT / "LICENSE"), "--sequence_length", "32")  # fmt: skip


def trained(out, *words, env=None):
    """The record of a launch of a script with two or one processes, and its output."""
    script = SCRIPTS / ("accelerates.py" if words[-1] == "faithful" else "loop.py")
    result = launched(*words, script, "--output_dir", str(out), env={"PYTHONPATH": str(ROOT)} | (env or {}))
    assert result.returncode == 0, result.stdout + result.stderr
    made = record(out)
    assert made["status"] == "finished" and made["seen"]["loss_curve"][-1][0] == 8 / made["plan"]["num_processes"]
    return made, result.stdout


def ended(path, out, *argv, options=(), code=0, **more):
    """The output of forked ranks that end with `code`. They have the environment that the installed launcher exports for
    the file and these options of its command line. more: what Ranks takes."""
    env = exported_by_accelerate(path, *options)
    ranks = Ranks(path, ["--output_dir", str(out), *argv], env=env, processes=int(env["WORLD_SIZE"]), **more)
    assert set(ranks.wait()) == {code}, ranks.text()
    return ranks.text()


def forked(path, out, **more):
    """The first losses, in full, the record and the output of a run of gpt in forked ranks."""
    said = ended(path, out, *STEPS, name="gpt", **more)
    return losses(out), record(out), said


def of_a_script(path, out, script, *argv, **more):
    """The output of a script that imports Accelerate alone, as with `-m faithful`, in the folder of `out`."""

    def before(rank):
        os.chdir(out.parent)
        door.take_its_place()

    return ended(path, out, *argv, script=script, before=before, **more)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("config", "units"),
    [
        pytest.param(fsdp(), None, marks=SLOW),
        pytest.param(fsdp(fsdp_sharding_strategy="SHARD_GRAD_OP"), None, marks=SLOW),
        pytest.param(fsdp(fsdp_sharding_strategy="NO_SHARD"), None, marks=SLOW),
        pytest.param(fsdp(fsdp_auto_wrap_policy="NO_WRAP"), 1, marks=SLOW),
        (fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=20_000), None),
    ],
    ids=["full", "grad_op", "no_shard", "no_wrap", "by_size"],
)
def test_fsdp1_files_train_as_our_own_config(tmp_path, ours, config, units):
    path = written(tmp_path, config)
    losses, made, said = forked(path, tmp_path / "run")
    assert losses[0] == ours[0] and losses[1] == pytest.approx(ours[1], rel=1e-6)
    assert "note: FSDP version 1" in said and made["config"]["name"] == path.stem
    sharded = config["fsdp_config"]["fsdp_sharding_strategy"] != "NO_SHARD"
    assert made["plan"]["strategy"] == ("fsdp" if sharded else "ddp") and made["evidence"]["sharded"] is sharded
    assert made["evidence"]["units"] == units or units is None
    truth = "sharded by LlamaDecoderLayer" if sharded else "ddp x2"
    by_size = config["fsdp_config"]["fsdp_auto_wrap_policy"] == "SIZE_BASED_WRAP"
    assert ("note: SIZE_BASED_WRAP, units of 20000 parameters: here the model's repeated blocks are" in said) is by_size
    assert ("sharded as one piece" if units == 1 else truth) in made["evidence"]["measured"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return forked(CONFIGS / "fsdp_fp32.yml", tmp_path_factory.mktemp("ours") / "run")[0]


def test_processes_that_built_different_weights_start_with_those_of_the_first(tmp_path):
    """As under DDP, also where fsdp_sync_module_states, of version 1, does not say it."""

    def unseeded():
        accelerator = Accelerator()
        torch.manual_seed(accelerator.process_index)
        layers = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(3))
        model = torch.nn.Sequential(*layers)
        own = model[0][0].weight.detach().clone()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        whole = model[0][0].weight.full_tensor()
        accelerator.print("equal", torch.equal(whole, own))
        accelerator.end_training()

    said = of_a_script(written(tmp_path, fsdp()), tmp_path / "run", unseeded)
    assert "equal True" in said, said


def as_launched_without_a_file(out, file, env, *options):
    """The output of a script in a forked process with the environment and the command line of a plain `accelerate
    launch -m faithful`, whose default file is `file`."""
    words = [*options, "-m", "faithful", str(SCRIPTS / "accelerates.py"), "--output_dir", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        for module in (launch, config_args):
            patch.setattr(module, "default_config_file", str(file))
        asked = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))[0]
    launcher = SimpleNamespace(cmdline=lambda: ["/usr/bin/accelerate", "launch", *words], cwd=lambda: str(out.parent))
    find = plan.launch_line.__wrapped__

    def before(rank):
        psutil.Process.parents = lambda self: [launcher]
        plan.launch_line = find
        door.take_its_place()

    env = prepare_simple_launcher_cmd_env(asked)[1] | env
    ranks = Ranks("single_fp32", ["--output_dir", str(out)], script=words[-3], env=env, before=before)
    assert ranks.wait() == [0], ranks.text()
    return ranks.text()


@pytest.mark.parametrize("how", ["forked", "launched"])
def test_the_default_config_of_a_fresh_home(tmp_path, how):
    """`accelerate config default`, by its own function, then a plain `accelerate launch`."""
    file, out = tmp_path / "home" / "accelerate" / "default_config.yaml", tmp_path / "run"
    env = {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    assert write_basic_config("bf16", file)
    if how == "forked":
        said, made = as_launched_without_a_file(out, file, env), record(out)
    else:
        made, said = trained(out, "accelerate", "launch", "-m", "faithful", env=env)
    assert made["status"] == "finished"
    assert made["config"]["name"] == "default_config" and made["plan"]["precision"] == "bf16"
    assert made["plan"]["strategy"] == "single" and "note:" not in said


def test_the_cpu_asked_for_by_name(tmp_path, monkeypatch):
    as_launched_without_a_file(tmp_path / "one", tmp_path / "home" / "none.yaml", {}, "--cpu")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    ended(written(tmp_path, DDP), tmp_path / "two", script=SCRIPTS / "loop.py")
    for name, strategy in (("one", "single"), ("two", "ddp")):
        made = record(tmp_path / name)
        assert made["status"] == "finished" and made["plan"]["rehearsal"] and made["plan"]["strategy"] == strategy
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert read_env(os.environ).use_cpu
    for said in (["--num_processes", "2"], ["--num-processes=2"]):
        line = ["accelerate", "launch", "--cpu", *said, "train.py", "--num_processes", "1"]
        assert "--num_processes 2: with --cpu, without a GPU or" in plan.one_alone(line, read_env(os.environ))[0]
    assert not plan.one_alone(["accelerate", "launch", "--cpu", "train.py", *said], read_env(os.environ))


def test_an_option_says_what_the_file_does_not(tmp_path):
    """The processes and the precision. Accelerate's own launcher refuses a file without processes, ./launch.sh adds
    them. The precision of a file that says one stays."""
    path, options = written(tmp_path, {"distributed_type": "MULTI_GPU"}), ("--mixed_precision", "bf16")
    with pytest.raises(ValueError, match="manually pass in `--num_processes`"):
        parsed_by_accelerate(path, *options)
    ended(path, tmp_path / "run", script=SCRIPTS / "loop.py", options=(*options, "--num_processes", "2"))
    made = record(tmp_path / "run")
    assert made["plan"]["precision"] == "bf16" and made["plan"]["num_processes"] == 2
    written(tmp_path, DDP)
    said = ended(path, tmp_path / "refused", *STEPS, name="gpt", options=options, code=2)
    assert "someone's.yaml says precision fp32, the launch made it bf16: launch it as it is" in said


def test_stage_0_trains_as_ddp(tmp_path, ours):
    pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    losses, made, said = forked(written(tmp_path, zero(zero_stage=0)), tmp_path / "run")
    assert losses[0] == ours[0] and losses[1] == pytest.approx(ours[1], rel=1e-6)
    assert made["plan"]["strategy"] == "ddp" and "zero_stage 0 partitions nothing" in said


@pytest.mark.parametrize(
    "stage, name, config",
    [(1, "O3", "ddp_fp8_msamp_o3"), (3, "O2", "fsdp_fp8_msamp_o2"), (3, "O3", "fsdp_fp8_msamp_o2")],
)
def test_a_level_under_zero_trains_as_the_strategy_that_the_note_names(tmp_path, stage, name, config):
    pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    losses, made, said = forked(written(tmp_path, level(name, zero_stage=stage)), tmp_path / "run")
    expected, other, _ = forked(CONFIGS / f"{config}.yml", tmp_path / "expected")
    assert distance(tmp_path / "run", tmp_path / "expected") == 0
    assert losses == expected and f"note: zero_stage {stage} with MS-AMP's {name.lower()} runs as" in said
    assert made["evidence"] == other["evidence"] and made["plan"]["strategy"] == other["plan"]["strategy"]


def with_a_frozen_layer():
    """What a rank runs. With the word `trained` the layer is not frozen."""
    accelerator = Accelerator()
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].requires_grad_("trained" in sys.argv)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print("seen", loss.item(), type(model[1].weight).__name__ == "Parameter")
    accelerator.save_state("saved")
    accelerator.load_state("saved")
    accelerator.print("whole", [tuple(one.shape) for one in accelerator.get_state_dict(model).values()])
    accelerator.end_training()


def test_frozen_modules_that_are_not_sharded(tmp_path):
    """And trained ones are refused: their gradients would not be averaged."""
    seen = []
    for at, (name, words) in enumerate((("1", ()), (None, ()), ("1", ("trained",)))):
        config = fsdp(FSDP2, fsdp_cpu_ram_efficient_loading=False, fsdp_ignored_modules=name)
        said = of_a_script(
            written(tmp_path, config), tmp_path / f"run{at}", with_a_frozen_layer, *words, code=2 if words else 0
        )
        seen.append([line.split()[1:] for line in said.splitlines() if line.startswith(("seen", "whole"))])
    assert [row[1] for row in seen[0][:-1]] == ["True"] * 4 and [row[1] for row in seen[1][:-1]] == ["False"] * 4
    assert [row[0] for row in seen[0][:-1]] == [row[0] for row in seen[1][:-1]] and seen[0][-1] == seen[1][-1]
    assert "would train its own copy of 1.weight, 1.bias" in said, said


def test_launch_sh_says_the_processes_that_a_file_leaves_out(tmp_path):
    path = written(tmp_path, {"distributed_type": "MULTI_GPU", "mixed_precision": "no"})
    made, said = trained(tmp_path / "run", "./launch.sh", str(path))
    assert "--num_processes 2" in said and made["plan"]["num_processes"] == 2


def deepspeed_file(tmp_path, **sections):
    """A YAML that names DeepSpeed's own file, as `accelerate config` writes it."""
    base = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto", "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
            "bf16": {"enabled": "auto"}}  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(base | sections))
    named = {"deepspeed_config_file": str(tmp_path / "ds.json"), "zero3_init_flag": False}
    lines = {key: value for key, value in WIZARD.items() if key != "mixed_precision"}
    return lines | {"distributed_type": "DEEPSPEED", "deepspeed_config": named}


def test_a_file_of_deepspeeds_is_read(tmp_path):
    zero3 = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "stage3_gather_16bit_weights_on_model_save": "auto"}
    config = deepspeed_file(tmp_path, bf16={"enabled": True}, gradient_clipping=0.5, zero_optimization=zero3,
                            optimizer={"type": "AdamW"}, gradient_accumulation_steps=4)  # fmt: skip
    problems, notes, wanted = checked(written(tmp_path, config))
    assert problems == [] and len(notes) == 1 and "DummyOptim" in notes[0]
    assert (wanted.strategy, wanted.precision, wanted.offload) == ("zero3", "bf16", True)
    assert (wanted.deepspeed.clip, wanted.deepspeed.steps) == (0.5, 4)
    [problem] = checked(written(tmp_path, config | {"mixed_precision": "bf16"}))[0]
    assert "mixed_precision beside deepspeed_config_file, which Accelerate refuses" in problem
    lost = config | {"deepspeed_config": {"deepspeed_config_file": "lost.json"}}
    assert any(
        "deepspeed_config_file lost.json cannot be read: it is not in" in line
        for line in checked(written(tmp_path, lost))[0]
    )
    strange = deepspeed_file(tmp_path, tensor_parallel={"autotp_size": 2})
    assert "tensor_parallel in deepspeed_config_file: not supported" in checked(written(tmp_path, strange))[0][0]


@pytest.mark.parametrize("sections, said", [
    ({"amp": {"enabled": False}}, "Apex AMP integration has been removed"),
    ({"bf16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}}, "loss_scale, hysteresis: Extra inputs"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "cannot be simultaneously enabled"),
    ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}}, "reduce_bucket_size: Input should be a valid"),
])  # fmt: skip
def test_what_deepspeed_refuses_in_its_file_is_one_line_before_the_launch(tmp_path, sections, said):
    """Of 20 files of others, five have keys that an older version of DeepSpeed read."""
    pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    [line] = checked(written(tmp_path, deepspeed_file(tmp_path, **sections)))[0]
    assert "ds.json: DeepSpeed " in line and "refuses it: " in line and said in line and line.isprintable()


def test_a_file_of_an_older_deepspeed_keeps_its_precision(tmp_path):
    """DeepSpeed reads bfloat16 as bf16, and Accelerate does not: fp32 would be trained."""
    pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    old = deepspeed_file(tmp_path, bf16=None, bfloat16={"enabled": True}, train_batch_size=32)
    problems, _, wanted = checked(written(tmp_path, old))
    assert problems == [] and wanted.precision == "bf16"


def seen(tmp_path, config, *words, code=0):
    """[[loss, learning rate]] of the script's steps under `config`, or what it prints if it is refused."""
    pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    result = launched("accelerate", "launch", "--config_file", str(written(tmp_path, config)), "--main_process_port",
                      "0", "-m", "faithful", str(SCRIPTS / "dummies.py"), *words, cwd=tmp_path,
                      env={"PYTHONPATH": str(ROOT)})  # fmt: skip
    assert result.returncode == code, result.stdout + result.stderr
    assert "times per optimizer step" not in result.stdout  # DeepSpeed's engine steps its schedulers once
    lines = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("seen")]
    return result.stderr if code else [list(map(float, line)) for line in lines]


@pytest.mark.slow
def test_the_optimizer_and_the_scheduler_of_a_file_of_deepspeeds(tmp_path):
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
    warmup = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
    scheduler = {"type": "WarmupLR", "params": warmup}
    config = deepspeed_file(tmp_path, optimizer=optimizer, scheduler=scheduler)
    steps = seen(tmp_path, config, "dummy", "schedule")
    assert [rate for _, rate in steps] == pytest.approx([0, 0.0025, 0.005, 0.0075])  # DeepSpeed's, once in each step
    decays = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}
    config = deepspeed_file(tmp_path, optimizer=optimizer, scheduler=decays)
    assert "leaves total_num_steps to the script" in seen(tmp_path, config, "dummy", "schedule", code=1)


def with_micro_batches():
    """What a rank runs. Without the word `accumulate` it steps after each batch."""
    accelerator = Accelerator()
    set_seed(0)
    model = torch.nn.Linear(8, 1)
    loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
    for batch in loader:
        with accelerator.accumulate(model) if "accumulate" in sys.argv else torch.enable_grad():
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print("sync", accelerator.sync_gradients)
    accelerator.end_training()


def test_a_script_that_says_no_accumulation_takes_the_configs(tmp_path):
    """As in Accelerate. One that never accumulates would step after each micro-batch, and is refused."""
    pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    path = written(tmp_path, zero(zero_stage=2, gradient_accumulation_steps=2))
    said = of_a_script(path, tmp_path / "run", with_micro_batches, "accumulate")
    assert [line.split()[1] for line in said.splitlines() if line.startswith("sync")] == ["False", "True"] * 2
    said = of_a_script(path, tmp_path / "never", with_micro_batches, code=2)
    assert "exports gradient_accumulation_steps 2, and the script steps after each" in said, said


@pytest.mark.slow
def test_the_scheduler_of_a_function_of_the_script(tmp_path):
    """Alone, and before one of the file, as in DeepSpeed."""
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    config = deepspeed_file(tmp_path, optimizer=optimizer)
    steps = seen(tmp_path, config, "dummy", "callable")
    assert [rate for _, rate in steps] == pytest.approx([0.005, 0.0025, 0.00125, 0.000625])
    assert "is for a script that makes a DummyOptim" in seen(tmp_path, zero(zero_stage=2), "callable", code=1)


@pytest.mark.slow
def test_the_optimizer_of_a_file_is_the_one_that_the_script_would_make(tmp_path):
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    config = deepspeed_file(tmp_path, optimizer=optimizer)
    assert seen(tmp_path, config, "dummy") == seen(tmp_path, zero(zero_stage=2))
    assert "says the optimizer AdamW, the script makes AdamW: leave the file's out" in seen(tmp_path, config, code=1)


def test_clipping_in_the_config_contradicts_a_script_that_clips_otherwise(tmp_path):
    """recipes/gpt.py clips at 1.0."""
    pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    path = written(tmp_path, zero(zero_stage=2, gradient_clipping=0.3))
    said = ended(path, tmp_path / "run", *STEPS, name="gpt", code=2)
    assert "the script clips gradients at 1.0, gradient_clipping in the config at 0.3: say it in one" in said


@pytest.mark.slow
def test_mpirun_starts_the_processes_of_multi_cpu(tmp_path):
    """mpirun is not there, so a script takes its place: it starts the processes with Open MPI's variables."""
    path = written(
        tmp_path,
        WIZARD | {"distributed_type": "MULTI_CPU", "use_cpu": True, "mpirun_config": {"mpirun_hostfile": "hosts"}},
    )
    assert check.problems_of_machines(config_file.file_problems(path)[1], {})  # no mpirun
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        '#!/bin/bash\n[ "$1" = --version ] && { echo Open MPI; exit; }\nshift 8\nexport OMPI_COMM_WORLD_SIZE=2\n'
        "export OMPI_COMM_WORLD_LOCAL_SIZE=2\nfor rank in 1 0; do\n"
        'OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank "$@" &\ndone\nwait\n'
    )
    mpirun.chmod(0o755)
    here = f"{tmp_path}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    result = subprocess.run(
        ["accelerate", "launch", "--config_file", str(path), "--main_process_port", str(free_port()), "recipes/gpt.py",
         "--output_dir", str(tmp_path / "run"), *STEPS],
        cwd=ROOT, env=os.environ | {"PATH": here}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    made = record(tmp_path / "run")
    assert made["plan"]["strategy"] == "ddp" and made["plan"]["num_processes"] == 2
