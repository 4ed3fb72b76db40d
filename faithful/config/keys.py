"""The keys of a config file: one table, a row for each, by which a file is checked, and the launcher's environment is
written and read.

`accelerate launch` takes a YAML file and starts processes, which see environment variables alone. So a key has a name
in the file and a variable. `problems` judges names and values, `environment` writes variables as the launcher would,
and `text`, `flag`, `listed` and `whole` read one by the name of its key.
"""

import contextlib
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from faithful.errors import Refused

MANY = 1 << 20  # processes, machines: more than there are anywhere
PREFIXED = ("fsdp_config", "fp8_config", "dynamo_config")  # their keys may omit `fsdp_`, `fp8_`, `dynamo_`
REMOVED = ("ipex_config",)  # which Accelerate refuses by now
TRUE, FALSE = ("true", "1", "yes", "on", "y", "t"), ("false", "0", "no", "off", "n", "f")  # Accelerate's str_to_bool
COMPILERS = ("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi",
             "fx2trt", "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm",
             "hpu_backend")  # fmt: skip


@dataclass(frozen=True)
class Key:
    """name: in full, with its section's prefix. kind: bool, int, float or text; an `exponent` is an int that may be
    1e8, a `list` a text that may be several. variable: in the environment, none if the launcher keeps it. default:
    what it exports where a file leaves the key out, None for nothing. reader: who reads it, none if nobody does."""

    name: str
    kind: str = "text"
    variable: str = ""
    default: str | int | bool | None = None
    reader: str = "the launcher"
    least: int | None = None
    most: int | None = None
    values: tuple[str, ...] = ()  # texts that have a meaning, where another would end in an error, or have no effect
    auto: bool = False  # whether it may be left to Accelerate


def launcher(names: str, kind: str = "text", reader: str = "the launcher") -> tuple[Key, ...]:
    """Rows of keys that make no variable which is read here."""
    return tuple(Key(name, kind, reader=reader) for name in names.split())


def fsdp(
    name: str, kind: str = "text", default: str | int | bool | None = None, reader: str = "Plan", **more: Any
) -> Key:
    return Key(f"fsdp_{name}", kind, f"FSDP_{name.upper().replace('LAYER_CLS', 'CLS')}", default, reader, **more)


def fp8(name: str, kind: str = "text", default: str | int | bool | None = None, reader: str = "AO", **more: Any) -> Key:
    return Key(f"fp8_{name}", kind, f"ACCELERATE_FP8_{name.upper()}", default, reader, **more)


def deepspeed(name: str, kind: str = "text", variable: str = "", **more: Any) -> Key:
    return Key(name, kind, f"ACCELERATE_{variable or f'DEEPSPEED_{name.upper()}'}", reader="Plan", **more)


def mesh(name: str) -> Key:
    return Key(f"parallelism_config_{name}_size", "int", f"PARALLELISM_CONFIG_{name.upper()}_SIZE", 1, "Plan", 1, MANY)


FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")  # torchao's levels with one scale for a tensor or a row
OF_FLOAT8 = ", ".join(f"AO {level}" for level in FLOAT8)  # readers: backends, with the recipe that reads it
DELAYED = "TE delayed, MSAMP te_delayed"
UNREAD = ""  # the reader of keys of earlier versions, or that `accelerate config` itself writes
DEVICES = ("none", "cpu", "nvme")
TABLE: dict[str, tuple[Key, ...]] = {
    "": (
        Key("distributed_type", reader="the launcher and Plan"),
        Key("mixed_precision", "text", "ACCELERATE_MIXED_PRECISION", "no", "Plan"),
        Key("use_cpu", "bool", "ACCELERATE_USE_CPU", False, "Plan"),
        Key("num_processes", "int", "WORLD_SIZE", 1, "Plan", 1, MANY),
        Key("num_machines", "int", least=1, most=MANY),
        Key("machine_rank", "int", least=0, most=MANY),
        Key("main_process_port", "int", least=0, most=65535),
        *launcher("compute_environment main_process_ip rdzv_backend main_training_function"),
        *launcher("debug same_network enable_cpu_affinity", "bool"),
        *launcher("gpu_ids", "list"),
        *launcher("downcast_bf16 tpu_use_cluster tpu_use_sudo", "bool", "a TPU"),
        *launcher("tpu_name tpu_zone command_file", "text", "a TPU"),
        *launcher("commands tpu_vm tpu_env", "list", "a TPU"),
        *launcher("fsdp_config fp8_config dynamo_config deepspeed_config parallelism_config mpirun_config", "section"),
        *launcher("megatron_lm_config", "section", "Megatron-LM"),
        *launcher("fp16 dynamo_backend", "text", "the launcher, which converts them"),  # of earlier versions
    ),
    "fsdp_config": (
        fsdp("version", default=1),
        fsdp("sharding_strategy", default="FULL_SHARD"),
        fsdp("reshard_after_forward", default=True),  # a boolean, or a strategy of version 1
        fsdp("auto_wrap_policy"),
        fsdp("transformer_layer_cls_to_wrap"),
        fsdp("min_num_params", "exponent", 100_000_000, least=0),
        fsdp("ignored_modules"),
        fsdp("offload_params", "bool", False),
        fsdp("activation_checkpointing", "bool", False),
        fsdp("activation_checkpointing_offload", "bool", False),
        fsdp("cpu_ram_efficient_loading", "bool", True),
        fsdp("sync_module_states", "bool", True, "a check: process 0 sends its weights in any case"),
        fsdp("use_orig_params", "bool", True, "a note"),
        fsdp("forward_prefetch", "bool", False, "a note"),
        fsdp("backward_prefetch", reader="a note"),
        fsdp("state_dict_type", reader="a note"),
        *launcher("fsdp_backward_prefetch_policy fsdp_limit_all_gathers", reader=UNREAD),
    ),
    "fp8_config": (
        fp8("backend", reader="Plan"),
        fp8("recipe", reader="AO, TE, MSAMP"),  # ours, as are all that are not Accelerate's: it hands on any key
        fp8("skip", "list", reader="Plan"),
        fp8("opt_level", default="O2", reader="MSAMP"),
        fp8("enable_fsdp_float8_all_gather", "bool", True, OF_FLOAT8),
        fp8("pad_inner_dim", "bool", True, OF_FLOAT8),
        fp8("scale_calculation_mode", reader="AO mxfp8, AO mxfp8_with_gw_hp, AO mxfp4"),  # torchao's MXFP8Linear
        fp8("format", default="HYBRID", reader=f"{DELAYED}, TE current, TE block"),
        fp8("margin", "int", 0, DELAYED, least=0),
        fp8("amax_history_len", "int", 1024, DELAYED, least=1, most=MANY),
        fp8("amax_compute_algo", default="most_recent", reader=DELAYED),
        fp8("disable_rht", "bool", reader="TE nvfp4"),  # these three are of its NVFP4BlockScaling
        fp8("disable_stochastic_rounding", "bool", reader="TE nvfp4"),
        fp8("disable_2d_quantization", "bool", reader="TE nvfp4"),
        fp8("disable_gradient_estimator", "bool", reader="MSAMP fp4"),  # parts of its FP4
        fp8("disable_outlier_clamping", "bool", reader="MSAMP fp4"),
        fp8("interval", "int", 1, DELAYED, least=1),  # this and the next ones are refused if they change something
        fp8("use_autocast_during_eval", "bool", False, DELAYED),
        fp8("use_mxfp8_block_scaling", reader="TE"),
        *launcher("fp8_override_linear_precision", "list", DELAYED),  # a variable for each product
        *launcher("fp8_optimization_level fp8_amax_history_length fp8_amax_compute_algorithm", reader=UNREAD),
    ),
    "dynamo_config": (
        Key("dynamo_backend", "text", "ACCELERATE_DYNAMO_BACKEND", "no", "Plan",
            values=(*COMPILERS, *map(str.upper, COMPILERS))),
        Key("dynamo_mode", "text", "ACCELERATE_DYNAMO_MODE", "default", "Plan",
            values=("default", "reduce-overhead", "max-autotune")),
        Key("dynamo_use_regional_compilation", "bool", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", False, "a note"),
        Key("dynamo_use_fullgraph", "bool", "ACCELERATE_DYNAMO_USE_FULLGRAPH", False, "Accelerate"),
        Key("dynamo_use_dynamic", "bool", "ACCELERATE_DYNAMO_USE_DYNAMIC", False, "Accelerate"),
    ),
    "deepspeed_config": (
        deepspeed("zero_stage", "int", default=2, least=0, most=3),
        deepspeed("deepspeed_config_file", variable="DEEPSPEED_CONFIG_FILE"),
        deepspeed("offload_optimizer_device", values=DEVICES),
        deepspeed("offload_param_device", values=DEVICES),
        deepspeed("gradient_accumulation_steps", "int", "GRADIENT_ACCUMULATION_STEPS", least=1, auto=True),
        deepspeed("gradient_clipping", "float", "GRADIENT_CLIPPING", least=0, auto=True),
        deepspeed("zero3_init_flag", "bool", "DEEPSPEED_ZERO3_INIT"),
        deepspeed("zero3_save_16bit_model", "bool"),
        *launcher("deepspeed_hostfile deepspeed_multinode_launcher"),
        *launcher("deepspeed_exclusion_filter deepspeed_inclusion_filter"),
        *launcher("deepspeed_moe_layer_cls_names", reader="DeepSpeed"),
        *launcher("offload_optimizer_nvme_path offload_param_nvme_path", reader="DeepSpeed"),
        *launcher("seq_parallel_communication_data_type", reader=UNREAD),  # trl's file for Ulysses has it
    ),
    "parallelism_config": (
        *map(mesh, ("dp_replicate", "dp_shard", "tp", "cp", "sp")),
        *launcher("parallelism_config_cp_backend parallelism_config_cp_comm_strategy parallelism_config_sp_backend "
                  "parallelism_config_sp_seq_length parallelism_config_sp_attn_implementation", reader="Accelerate"),
        *launcher("parallelism_config_sp_seq_length_is_variable", "bool", "Accelerate"),
    ),
    "mpirun_config": (*launcher("mpirun_hostfile"), *launcher("mpirun_ccl", reader=UNREAD)),
}  # fmt: skip
SECTIONS = tuple(key.name for key in TABLE[""] if key.kind == "section")
ROWS = {key.name: key for keys in TABLE.values() for key in keys}


# ------------------------------------------------------------------------------------------------------- the variables


def environment(section: str, said: Mapping[str, Any]) -> dict[str, str]:
    """The variables that the launcher makes of a section, whose keys have their full names."""
    values = {key.variable: said.get(key.name, key.default) for key in TABLE[section] if key.variable}
    return {name: written(value) for name, value in values.items() if value is not None}


def written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def text(env: Mapping[str, str], key: str, unset: str = "") -> str:
    """What the environment says of a key. unset: what holds where no launcher has set the variable, or to none."""
    value = env.get(ROWS[key].variable, unset)
    return unset if value.lower() == "none" else value


def flag(env: Mapping[str, str], key: str, unset: bool = False) -> bool:
    return on(text(env, key, str(unset)))


def listed(env: Mapping[str, str], key: str, unset: str = "") -> list[str]:
    """The names that a key lists with commas between them."""
    return [name.strip() for name in text(env, key, unset).split(",") if name.strip()]


def whole(env: Mapping[str, str], key: str, unset: int) -> int:
    """The whole number that the environment says of a key. Raises Refused if it says something else."""
    row = ROWS[key]
    return whole_number(env, row.variable, unset, float if row.kind == "exponent" else int)


def on(value: object) -> bool:
    """Whether a boolean is true, as the launcher (True, true, 1) or YAML (true) writes it."""
    return str(value).lower() in TRUE


def digits(text: str) -> bool:
    """Whether it is a whole number of digits alone. Python refuses to read thousands of them."""
    return text.isdecimal() and len(text) < 19


def whole_number(env: Mapping[str, str], name: str, unset: int, kind: type = int) -> int:
    """The whole number that a variable says. Raises Refused if it says something else. kind: float also takes 1e8."""
    try:
        number = int(kind(env.get(name, unset)))
    except (ValueError, OverflowError):
        number = -1
    if number < 0 and name in env:
        raise Refused(f"{name}={env[name][:60]}: write a whole number in the config, 0 or more")
    return number


# ------------------------------------------------------------------------------------------------------------ the file


def full(section: str, key: str) -> str:
    """The key with its section's prefix."""
    prefix = prefix_of(section)
    return key if key.startswith(prefix) else prefix + key


def prefix_of(section: str) -> str:
    return section.removesuffix("config") if section in PREFIXED else ""


def names_of(section: str) -> list[str]:
    return [key.name for key in TABLE[section]]


def problems(config: dict[Any, Any], section: str = "") -> Iterator[str]:
    """Yields a line for each key that Accelerate does not have, and each value of the wrong type, which it takes out of
    `config`. section: the one that `config` is, or none for a file."""
    where, names = f"{section} " * bool(section), names_of(section)
    for key, value in list(config.items()):
        if not isinstance(key, str):
            del config[key]
            named = f"{where}{key} is a {type(key).__name__} to YAML"
            yield f"{named}, not the name of a setting: write a name, or quote it"
        elif key in TABLE and isinstance(value, dict):
            yield from problems(value, key)
        elif full(section, key) not in names:
            yield f"{where}{key} {meant(key, section)}"
        elif said := wrong(ROWS[full(section, key)], value):
            del config[key]
            yield f"{where}{key} {said}"


def wrong(key: Key, value: object) -> str | None:
    """What is wrong with the type of a value, or None."""
    shown, text, kind = str(value)[:100], str(value).lower(), key.kind
    if value is None or (kind == "list" and isinstance(value, list)):
        return None
    if kind == "section":
        return None if isinstance(value, dict) else f"holds {value!r}, not `key: value` lines"
    wanted = {"bool": "true or false", "int": "a whole number", "exponent": "a whole number", "float": "a number"}
    if not isinstance(value, bool | int | float | str):
        return f"is {shown}: write {wanted.get(kind, 'one string')}"
    if kind == "bool" and text not in TRUE + FALSE:
        return f"is {shown}: write true or false"
    if kind in ("int", "exponent", "float") and not (text == "auto" and key.auto):
        number: float | None = None
        if len(text) < 30 and kind != "int":
            with contextlib.suppress(ValueError):
                number = float(text)
        elif len(text) < 30 and text.removeprefix("-").isdecimal():
            number = int(text)
        if number is None or isinstance(value, bool) or not in_range(number, key):
            return f"is {shown}: write {wanted[kind]}{range_of(key)}"
    if key.values and str(value) not in key.values:
        return f"is {shown}: write one of {', '.join(word for word in key.values if word.islower())}"
    return None


def in_range(number: float, key: Key) -> bool:
    least, most = -math.inf if key.least is None else key.least, 2**63 - 1 if key.most is None else key.most
    return least <= number <= most and (key.kind == "float" or not number % 1) and math.isfinite(number)


def range_of(key: Key) -> str:
    """The range of a number, for a message."""
    if key.name == "main_process_port":
        return " from 1 to 65535, or 0 for any that is free"
    if key.least is None:
        return ""
    return f" from {key.least} on" if key.most in (None, MANY) else f" from {key.least} to {key.most}"


def meant(key: str, section: str) -> str:
    if key in REMOVED:
        return "is a key of earlier versions, which Accelerate refuses by now: remove it"
    names = names_of(section)
    close = difflib.get_close_matches(key, names, 1, 0.6) or difflib.get_close_matches(
        full(section, key), names, 1, 0.6
    )
    known_here = f" (known: {', '.join(names)})" if section else ""
    close = [name if key.startswith(prefix_of(section)) else name.removeprefix(prefix_of(section)) for name in close]
    hint = f"did you mean {close[0]}?" if close else f"remove it{known_here}"
    return f"is a key that Accelerate does not have: {hint}"


def as_table() -> Iterator[str]:
    """The table of docs/keys.md, which `python -m faithful.config.keys` prints."""
    yield "| section | key | value | variable | default | read by |\n| --- | --- | --- | --- | --- | --- |"
    for section, rows in TABLE.items():
        for key in rows:
            default = "" if key.default is None else f"`{written(key.default)}`"
            variable = f"`{key.variable}`" if key.variable else ""
            yield f"| {section} | `{key.name}` | {key.kind} | {variable} | {default} | {key.reader or 'nobody'} |"


if __name__ == "__main__":
    print("\n".join(as_table()))
