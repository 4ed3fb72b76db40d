"""The keys of a config file, read from the source of the installed Accelerate without importing it.

`accelerate launch` takes the fields of its class ClusterConfig at the top level. It copies each key of a section onto
the option of its command line that has the same name. So the class and the command line's parser say which keys there
are, and the type of each.
"""

import argparse
import ast
import contextlib
import difflib
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from faithful.errors import Refused

SECTIONS = ("fsdp_config", "fp8_config", "dynamo_config", "deepspeed_config", "parallelism_config",
            "megatron_lm_config", "mpirun_config")  # fmt: skip
PREFIXED = ("fsdp_config", "fp8_config", "dynamo_config")  # their keys may omit `fsdp_`, `fp8_`, `dynamo_`
# The launcher hands on any key of fp8_config: two are ours, TERecipeKwargs reads another without an option, three are
# those of TransformerEngine's NVFP4BlockScaling, one is that of torchao's MXFP8Linear, and two leave out a part of
# MS-AMP's FP4.
FP8 = {
    "fp8_recipe": "any", "fp8_skip": "any", "fp8_use_mxfp8_block_scaling": "any", "fp8_disable_rht": "bool",
    "fp8_disable_stochastic_rounding": "bool", "fp8_disable_2d_quantization": "bool",
    "fp8_scale_calculation_mode": "any", "fp8_disable_gradient_estimator": "bool",
    "fp8_disable_outlier_clamping": "bool",
}  # fmt: skip
OLD = ("fp16", "dynamo_backend")  # keys of earlier versions that Accelerate converts
# Keys of earlier versions, or that `accelerate config` itself writes, which nothing reads any more.
UNREAD = {
    "fsdp_config": ("fsdp_backward_prefetch_policy", "fsdp_limit_all_gathers"),
    "fp8_config": ("fp8_optimization_level", "fp8_amax_history_length", "fp8_amax_compute_algorithm"),
    "mpirun_config": ("mpirun_ccl",),
}
AUTO = ("gradient_accumulation_steps", "gradient_clipping")  # whole numbers and numbers that may be left to Accelerate
LISTS = ("commands", "fp8_override_linear_precision", "fp8_skip", "gpu_ids", "tpu_env", "tpu_vm")  # may be lists
BACKENDS = ("no", "false", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi",
            "fx2trt", "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm",
            "hpu_backend")  # fmt: skip
VALUES = {  # texts that have a meaning, where another one would end in an error of Accelerate's, or have no effect
    "dynamo_backend": (*BACKENDS, *map(str.upper, BACKENDS), "False"),
    "offload_optimizer_device": ("none", "cpu", "nvme"), "offload_param_device": ("none", "cpu", "nvme"),
    "dynamo_mode": ("default", "reduce-overhead", "max-autotune"),
}  # fmt: skip
MANY = 1 << 20  # processes, machines: more than there are anywhere
RANGES: dict[str, tuple[int, int | None]] = {  # key: the least and the greatest number, None for no bound
    "num_processes": (1, MANY), "num_machines": (1, MANY), "machine_rank": (0, MANY), "main_process_port": (0, 65535),
    "max_restarts": (0, MANY), "fsdp_min_num_params": (0, None), "fp8_margin": (0, None), "fp8_interval": (1, None),
    "fp8_amax_history_len": (1, MANY), "zero_stage": (0, 3), "gradient_accumulation_steps": (1, None),
    "gradient_clipping": (0, None),
    **{f"parallelism_config_{name}_size": (1, MANY) for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")},
}  # fmt: skip
REMOVED = ("ipex_config",)  # which Accelerate refuses by now
TRUE, FALSE = ("true", "1", "yes", "on", "y", "t"), ("false", "0", "no", "off", "n", "f")  # Accelerate's str_to_bool


def on(value: object) -> bool:
    """Whether a boolean is true, as the launcher (True, true, 1) or YAML (true) writes it."""
    return str(value).lower() in TRUE


def digits(text: str) -> bool:
    """Whether it is a whole number of digits alone. Python refuses to read thousands of them."""
    return text.isdecimal() and len(text) < 19


def whole_number(env: Mapping[str, str], name: str, default: int, kind: type = int) -> int:
    """The whole number that a variable of the launcher says. Raises Refused if it says something else. kind: float also
    takes 1e8."""
    try:
        number = int(kind(env.get(name, default)))
    except (ValueError, OverflowError):
        number = -1
    if number < 0 and name in env:
        raise Refused(f"{name}={env[name][:60]}: write a whole number in the config, 0 or more")
    return number


@functools.cache
def all_keys() -> dict[str, dict[str, str]]:
    """{section, or "" for the top level: {key: its type, a word}} of the installed Accelerate."""
    # pyrefly: ignore[missing-attribute]
    folder = Path(importlib.util.find_spec("accelerate").submodule_search_locations[0])
    keys = {"": fields(folder / "commands/config/config_args.py") | dict.fromkeys(OLD, "any")}
    keys |= {section: {} for section in SECTIONS}
    for group, option, kind in options(folder / "commands/launch.py"):
        section = "dynamo_config" if option.startswith("dynamo_") else group.removesuffix("_config") + "_config"
        if section in keys:
            keys[section][option] = kind
    for name in handed_on(folder / "utils/launch.py"):  # some keys have no option
        if name.startswith("fsdp_"):
            keys["fsdp_config"].setdefault(name, "str")
    keys["fp8_config"] |= FP8 | {"fp8_override_linear_precision": "any"}
    keys["fsdp_config"]["fsdp_reshard_after_forward"] = "any"  # a boolean, or a strategy of version 1
    return keys


def fields(file: Path) -> dict[str, str]:
    """{name: type} of the fields of ClusterConfig and its base class."""
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    lines = [line for node in classes if node.name in ("BaseConfig", "ClusterConfig") for line in node.body]
    annotated = [line for line in lines if isinstance(line, ast.AnnAssign)]
    types = {ast.unparse(line.target): ast.unparse(line.annotation) for line in annotated}
    kinds = {"int": "int", "Optional[int]": "int", "bool": "bool", "Optional[bool]": "bool"}
    return {name: kinds.get(kind, "any") for name, kind in types.items()}


def arguments(file: Path) -> Iterator[tuple[str, list[str], dict[str | None, str]]]:
    """Yields (group without `_args`, strings, keywords as source) of the arguments of the launcher's parser."""
    for call in ast.walk(ast.parse(file.read_text())):
        if not (
            isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        ):
            continue
        strings = [word.value for word in call.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        if not isinstance(call.func.value, ast.Name) or len(strings) < len(call.args):
            continue
        words = {word.arg: ast.unparse(word.value).strip("'") for word in call.keywords}
        yield call.func.value.id.removesuffix("_args"), strings, words


def launch_options() -> dict[str, bool]:
    """{option of `accelerate launch`, with underscores: whether the next word is its value}. The launcher takes
    hyphens, too."""
    # pyrefly: ignore[missing-attribute]
    folder = Path(importlib.util.find_spec("accelerate").submodule_search_locations[0])
    rows = [(strings, words) for _, strings, words in arguments(folder / "commands/launch.py")]
    return {
        string: not words.get("action", "store").startswith(("store_", "help"))
        for strings, words in rows
        for string in strings
        if string.startswith("-")
    }


def options(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yields (group without `_args`, name, type) of the options of the launcher's parser."""
    for group, strings, words in arguments(file):
        name = words.get("dest") or strings[-1].lstrip("-")
        said = words.get("action", "").startswith("store_") or "(true|false)" in words.get("help", "")
        said |= words.get("type") in ("bool", "str_to_bool") or words.get("default") in ("true", "false")
        kind = "bool" if said else words.get("type", "str")
        yield group, name, kind


def handed_on(file: Path) -> Iterator[str]:
    """Names of the launcher's options that become environment variables: `getattr(args, NAME, None)`."""
    for call in ast.walk(ast.parse(file.read_text())):
        if isinstance(call, ast.Call) and ast.unparse(call).startswith("getattr(args, '"):
            yield ast.literal_eval(call.args[1])


def full(section: str, key: str) -> str:
    """The key with its section's prefix."""
    prefix = section.removesuffix("config") if section in PREFIXED else ""
    return key if key.startswith(prefix) else prefix + key


def problems(config: dict[Any, Any]) -> Iterator[str]:
    """Yields a line for each key that Accelerate does not have, and each value of the wrong type, which it takes out of
    `config`."""
    for key, value in list(config.items()):
        if not isinstance(key, str):
            yield not_text(key, config)
        elif key not in all_keys()[""]:
            yield f"{key} {meant(key, '')}"
        elif key in SECTIONS and value is not None and not isinstance(value, dict):
            yield f"{key} holds {config.pop(key)!r}, not `key: value` lines"
        elif key in SECTIONS:
            yield from problems_of_section(key, value or {})
        elif said := wrong(key, all_keys()[""][key], value):
            del config[key]
            yield f"{key} {said}"


def problems_of_section(section: str, config: dict[Any, Any]) -> Iterator[str]:
    for key, value in list(config.items()):
        if not isinstance(key, str):
            yield f"{section} {not_text(key, config)}"
            continue
        kind = all_keys()[section].get(full(section, key))
        if kind is None and full(section, key) not in UNREAD.get(section, ()):
            yield f"{section} {key} {meant(key, section)}"
        elif said := wrong(full(section, key), kind or "any", value):
            del config[key]
            yield f"{section} {key} {said}"


def not_text(key: object, config: dict[Any, Any]) -> str:
    """Takes a key out of `config` that YAML reads as a number, a boolean, a date or nothing."""
    del config[key]
    return f"{key} is a {type(key).__name__} to YAML, not the name of a setting: write a name, or quote it"


def wrong(key: str, kind: str, value: object) -> str | None:
    """What is wrong with the type of a value, or None. key: with its section's prefix."""
    shown, text = str(value)[:100], str(value).lower()
    if value is None or (key in LISTS and isinstance(value, list)):
        return None
    if not isinstance(value, bool | int | float | str):
        wanted = {"bool": "true or false", "int": "a whole number", "float": "a number"}.get(kind, "one string")
        return f"is {shown}: write {wanted}"
    if kind == "bool" and text not in TRUE + FALSE:
        return f"is {shown}: write true or false"
    if kind in ("int", "float") and not (text == "auto" and key in AUTO):
        number: float | None = None
        if len(text) < 30 and (key == "fsdp_min_num_params" or kind == "float"):
            with contextlib.suppress(ValueError):
                number = float(text)
        elif len(text) < 30 and text.removeprefix("-").isdecimal():
            number = int(text)
        if number is None or isinstance(value, bool) or not math.isfinite(number) or (kind == "int" and number % 1):
            return f"is {shown}: write a {'whole ' * (kind == 'int')}number{in_words(key)}"
        least, most = RANGES.get(key, (None, None))
        if (least is not None and number < least) or number > (2**63 - 1 if most is None else most):
            return f"is {shown}: write a {'whole ' * (kind == 'int')}number{in_words(key)}"
    if key in VALUES and str(value) not in VALUES[key]:
        return f"is {shown}: write one of {', '.join(word for word in VALUES[key] if word.islower())}"
    return None


def in_words(key: str) -> str:
    """The range of a number, for a message."""
    least, most = RANGES.get(key, (None, None))
    if key == "main_process_port":
        return " from 1 to 65535, or 0 for any that is free"
    return "" if least is None else f" from {least} on" if most in (None, MANY) else f" from {least} to {most}"


def option(name: str) -> Callable[[str], int]:
    """The `type` of an option with the name of a key, for argparse: a number in the range of that key."""

    def parsed(text: str) -> int:
        if said := wrong(name, "int", text):
            raise argparse.ArgumentTypeError(said)
        return int(text)

    return parsed


def meant(key: str, section: str) -> str:
    if key in REMOVED:
        return "is a key of earlier versions, which Accelerate refuses by now: remove it"
    names = [*all_keys()[section], *UNREAD.get(section, ())]
    close = difflib.get_close_matches(key, names, 1, 0.6) or difflib.get_close_matches(
        full(section, key), names, 1, 0.6
    )
    known_here = f" (known: {', '.join(names)})" if section else ""
    prefix = section.removesuffix("config") if section in PREFIXED else ""
    close = [name if key.startswith(prefix) else name.removeprefix(prefix) for name in close]
    hint = f"did you mean {close[0]}?" if close else f"remove it{known_here}"
    return f"is a key that Accelerate does not have: {hint}"
