"""Values of a wrong type in a config file: one line that names the key, and no traceback."""

import datetime
import json
import random

import pytest
import yaml

from faithful import Refused
from faithful.config import deepspeed, keys
from faithful.launch import machine
from tools import check

FILES = {
    "ddp": {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "bf16"},
    "fp8": {
        "distributed_type": "MULTI_GPU",
        "num_processes": 2,
        "mixed_precision": "fp8",
        "fp8_config": {"backend": "TE"},
    },
    "fsdp1": {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 1}},
    "fsdp2": {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}},
    "zero": {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {"zero_stage": 2}},
    "cpu": {"distributed_type": "MULTI_CPU", "num_processes": 2, "mpirun_config": {"mpirun_hostfile": "hosts"}},
    "single": {"distributed_type": "NO"},
}
VALUES = [1, 12, -1, 1.5, 2.0, True, None, "x", "", "auto", "2.0", "\u00b2", "1_0", [], ["a"], {}, {1: 2}, float("inf"),
          float("nan"), 10**30, "1e400", datetime.date(2020, 1, 1), b"x"]  # fmt: skip
NAMES = [1, 1.5, True, None, datetime.date(2020, 1, 1), "zz"]
CELLS = [
    (file, section, key, value)
    for file in FILES
    for section, known in keys.TABLE.items()
    if section != "megatron_lm_config"
    for key in [*(row.name for row in known), *NAMES]
    for value in VALUES
]


def checked(path, mapping):
    """The lines that a check prints of a file."""
    path.write_text(yaml.dump(mapping))
    here = machine.without_accelerator()
    lines, not_here, notes, wanted = check.check(path, here, {})
    check.missing_option(path, here, {})
    return [*lines, *not_here, *notes, check.description(wanted) if wanted else ""]


def try_cells(path, cells):
    for file, section, key, value in cells:
        mapping = json.loads(json.dumps(FILES[file]))
        (mapping.setdefault(section, {}) if section else mapping)[key] = value
        try:
            lines = checked(path, mapping)
        except Refused as refused:
            lines = refused.args
        except Exception as error:
            pytest.fail(f"{file}: {section} {key}: {value!r}: {error!r}")
        said = (f"{key} is a", "a number of more than 64 bits")  # of the key, or of the file before it is read
        assert isinstance(key, str) or any(word in line for word in said for line in lines), (file, section, key, lines)


def test_no_value_ends_in_a_traceback(tmp_path):
    try_cells(tmp_path / "mine.yml", random.Random(0).sample(CELLS, 300))


@pytest.mark.slow
def test_no_value_at_all_ends_in_a_traceback(tmp_path):
    try_cells(tmp_path / "mine.yml", CELLS)


@pytest.mark.parametrize(
    ("file", "section", "key", "value", "said"),
    [
        ("ddp", "", 1, "x", "1 is a int to YAML"),
        ("ddp", "", True, "y", "True is a bool to YAML"),
        ("fsdp2", "fsdp_config", None, 1, "fsdp_config None is a NoneType to YAML"),
        ("fsdp1", "fsdp_config", "fsdp_sharding_strategy", 12, "fsdp_sharding_strategy 12 is not one of FULL_SHARD"),
        ("fsdp2", "fsdp_config", "fsdp_transformer_layer_cls_to_wrap", ["A"], "fsdp_transformer_layer_cls_to_wrap is"),
        ("fsdp2", "fsdp_config", "fsdp_min_num_params", "auto", "fsdp_min_num_params is auto: write a whole number"),
        ("zero", "deepspeed_config", "zero_stage", "auto", "zero_stage is auto: write a whole number"),
        ("zero", "deepspeed_config", "zero_stage", 2.0, "zero_stage is 2.0: write a whole number"),
        ("zero", "deepspeed_config", "offload_optimizer_device", "gpu", "is gpu: write one of none, cpu, nvme"),
        ("zero", "deepspeed_config", "gradient_clipping", float("nan"), "gradient_clipping is nan: write a number"),
        ("fp8", "fp8_config", "override_linear_precision", [True], "takes a list of three booleans"),
        ("fp8", "fp8_config", "override_linear_precision", 1, "takes a list of three booleans"),
        ("ddp", "", "mpirun_config", 1, "mpirun_config holds 1, not `key: value` lines"),
        ("ddp", "", "main_process_port", 70000, "main_process_port is 70000: write a whole number from 1 to 65535"),
        ("ddp", "dynamo_config", "dynamo_backend", 12, "dynamo_backend is 12: write one of no"),
        ("ddp", "", "main_process_ip", ["a"], "main_process_ip is ['a']: write one string"),
    ],
)
def test_a_wrong_value_is_named_once(tmp_path, file, section, key, value, said):
    mapping = json.loads(json.dumps(FILES[file]))
    (mapping.setdefault(section, {}) if section else mapping)[key] = value
    assert len([line for line in checked(tmp_path / "mine.yml", mapping) if said in line]) == 1


ZERO = {"zero_optimization": {"stage": 2}}


OF_DEEPSPEED = [
    *[("stage", {"zero_optimization": {"stage": value}}) for value in ("2", [2], True, None, 4)],
    *[
        ("offload_param", {"zero_optimization": {"stage": 3, "offload_param": value}})
        for value in ("cpu", [1], {"device": ["cpu"]})
    ],
    *[(key, {key: value}) for key in ("fp16", "bf16", "optimizer", "scheduler") for value in (True, "Adam", [1])],
    *[("gradient_clipping", {"gradient_clipping": value}) for value in ("x", [1], True, -1, float("inf"), {"a": 1})],
    *[("gradient_acc", {"gradient_accumulation_steps": value}) for value in ("x", 1.5, True, None, 0, "2")],
    ("optimizer", {"optimizer": {"type": 1}}),
]


@pytest.mark.parametrize(("key", "wrong"), OF_DEEPSPEED, ids=json.dumps)
def test_deepspeed_s_file_is_checked_too(tmp_path, key, wrong):
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps(ZERO | wrong))
    problem = deepspeed.of_file(str(file)).problem
    assert key in problem.split("deepspeed.json: ")[1] and len(problem.splitlines()) == 1
