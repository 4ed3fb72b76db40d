"""A config file, read as `accelerate launch` reads it: its problems and notes that processes cannot see.

A file of accelerate_configs/ keeps a grammar of names; a file from elsewhere may have any name. Nothing here imports
torch or Accelerate.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from faithful.config import fp8, keys
from faithful.config.deepspeed import OF_THE_FILE
from faithful.config.keys import on
from faithful.config.settings import PRECISIONS, TAILS, read_env, to_env
from faithful.config.strategies import STRATEGIES
from faithful.disk import documents
from faithful.errors import Refused

BESIDE = Path(__file__).resolve().parents[2]  # this package; pip puts the recipes, shared/ and the configs in a folder
HOME = BESIDE if (BESIDE / "accelerate_configs").is_dir() else BESIDE / "accelerate_recipes"
OURS = HOME / "accelerate_configs"
DDP = ("MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON")
TYPES = ("NO", *DDP, "MULTI_CPU", "FSDP", "DEEPSPEED")
ELSEWHERE = {  # distributed_type: what it needs
    "XLA": "a TPU", "TPU": "a TPU", "MEGATRON_LM": "Megatron-LM, which trains models of its own",
}  # fmt: skip
SECTION_OF = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM",
              "mpirun_config": "MULTI_CPU"}  # fmt: skip


def read(path: Path) -> tuple[list[str], dict[str, Any] | None]:
    """(problems, mapping) of a file, with the keys of earlier versions converted as Accelerate does, and without values
    of the wrong type. The mapping is None if the file does not hold `key: value` lines, or is for a machine that no run
    here can have."""
    try:
        config = documents.read(path)
    except documents.Unreadable as error:
        return [str(error)], None
    if not isinstance(config, dict):
        return [f"holds a {type(config).__name__}, not `key: value` lines"], None
    if "zero_optimization" in config and "distributed_type" not in config:
        return [
            "is a file of DeepSpeed's, not of Accelerate's: name it as deepspeed_config_file in the "
            "deepspeed_config of a YAML with distributed_type DEEPSPEED"
        ], None
    if config.get("compute_environment") == "AMAZON_SAGEMAKER":
        return [
            "compute_environment AMAZON_SAGEMAKER starts the script on Amazon's machines: set LOCAL_MACHINE to run "
            "it here"
        ], None
    if (needs := ELSEWHERE.get(str(config.get("distributed_type")))) is not None:
        return [f"distributed_type {config['distributed_type']} needs {needs}, not supported here: use FSDP"], None
    if config.get("distributed_type") is False:  # NO without quotes is a boolean to YAML
        config["distributed_type"] = "NO"
    if str(config.get("num_processes")) == "-1":  # nobody says it
        del config["num_processes"]
    if config.pop("fp16", False) and "mixed_precision" not in config:
        config["mixed_precision"] = "fp16"
    if "dynamo_backend" in config:
        config["dynamo_config"] = {"dynamo_backend": config.pop("dynamo_backend")}
    lines = list(keys.problems(config))
    for key in keys.TABLE[""]:
        if key.kind == "int" and isinstance(config.get(key.name), str) and config[key.name].isdecimal():
            config[key.name] = int(config[key.name])
    return lines, config


def file_problems(path: Path) -> tuple[list[str], dict[str, Any] | None]:
    """(problems, mapping) of a config file. The mapping is None if `read` returns none; without num_processes it has
    none either, unless the file runs one process."""
    lines, config = read(path)
    if config is None:
        return lines, None
    if isinstance(config.get("mixed_precision"), bool):
        shown = str(config["mixed_precision"]).lower()
        lines.append(f"mixed_precision: {shown} is a boolean to YAML: write 'no' in quotes")
        config["mixed_precision"] = "no"
    kind, processes = config.get("distributed_type"), config.get("num_processes")
    if kind is None:
        lines.append(f"distributed_type is missing: one of {', '.join(TYPES)}")
    elif kind not in TYPES:
        lines.append(f"distributed_type {str(kind)} is not one of {', '.join(TYPES)}")
    for key in ("num_machines", "machine_rank"):
        if key in config and config[key] is None:
            del config[key]
            lines.append(f"{key} is null: write a number, or leave it out for one machine")
    if kind == "MULTI_CPU" and (processes or 1) > 1 and not (config.get("mpirun_config") or {}).get("mpirun_hostfile"):
        lines.append(
            f"MULTI_CPU with {processes} processes needs mpirun_config, else Accelerate starts one: set "
            "MULTI_GPU, which is rehearsed with all of them where there is no GPU"
        )
    if config.get("gpu_ids") is not None and not isinstance(config["gpu_ids"], str):
        lines.append("gpu_ids must be a string: write '0,1' in quotes, or all")
    elif kind in DDP and (config.get("num_machines") or 1) == 1 and one_device(config.get("gpu_ids")):
        lines.append(f"gpu_ids '{config['gpu_ids']}' is one device, which Accelerate refuses under {kind}: write all")
    config = {
        key: value if key not in keys.SECTIONS or isinstance(value, dict) else {} for key, value in config.items()
    }
    section = {keys.full("fsdp_config", key): value for key, value in (config.get("fsdp_config") or {}).items()}
    loads, sends = (on(section.get(f"fsdp_{key}", True)) for key in ("cpu_ram_efficient_loading", "sync_module_states"))
    if kind == "FSDP" and loads and not sends:
        lines.append(
            "fsdp_cpu_ram_efficient_loading without fsdp_sync_module_states, which the launcher refuses: set "
            "both to true, or both to false"
        )
    section = config.get("deepspeed_config") or {}
    if kind == "DEEPSPEED" and section.get("deepspeed_config_file"):
        both = [key for key in OF_THE_FILE if key in section]
        both += ["mixed_precision"] if config.get("mixed_precision") is not None else []
        if both:
            lines.append(
                f"{', '.join(both)} beside deepspeed_config_file, which Accelerate refuses: say it in that file"
            )
    if config.get("mixed_precision") == "fp8":
        lines += problems_of_fp8(config.get("fp8_config") or {})
    return lines + list(named_otherwise(path, config)), config


def one_device(ids: object) -> bool:
    return isinstance(ids, str) and ids != "all" and "," not in ids


def problems_of_fp8(section: Mapping[str, Any]) -> Iterator[str]:
    """Problems of fp8_config that the launcher's environment does not show."""
    section = {keys.full("fp8_config", key): value for key, value in section.items()}
    override = section.get("fp8_override_linear_precision") or [False] * 3
    three = isinstance(override, list) and [type(each) for each in override] == [bool] * 3
    if not (three or isinstance(override, str)):
        yield f"fp8_config override_linear_precision {override}: the launcher takes a list of three booleans"
    if not isinstance(section.get("fp8_skip", ""), str):
        yield (
            f'fp8_config skip {section["fp8_skip"]}: write names or patterns in one string, as skip: "head, blocks.0.*"'
        )
    for old, (said, key, effective) in said_in_vain(section).items():
        if (old, said) != ("fp8_amax_compute_algorithm", "max"):  # whoever runs `accelerate config` has this by default
            yield (
                f"fp8_config {old[4:]} {said} is not read by Accelerate, which takes {effective}: did you mean "
                f"{key[4:]}?"
            )
    yield from keys_of_another_backend(section)


def said_in_vain(section: Mapping[str, Any]) -> dict[str, tuple[Any, str, Any]]:
    """{key that `accelerate config` writes: (its value, the key that the launcher reads instead, the value of that)},
    where the two values differ."""
    differing = {}
    for old, key in (
        ("fp8_optimization_level", "fp8_opt_level"),
        ("fp8_amax_history_length", "fp8_amax_history_len"),
        ("fp8_amax_compute_algorithm", "fp8_amax_compute_algo"),
    ):
        effective = section.get(key, keys.ROWS[key].default)
        if str(section.get(old, effective)) != str(effective):
            differing[old] = section[old], key, effective
    return differing


def keys_of_another_backend(section: Mapping[str, Any]) -> Iterator[str]:
    """Keys of fp8_config that its backend does not read, at a value that is not their default."""
    section = {key.removeprefix("fp8_"): value for key, value in section.items()}
    backends = {fp8.key_of(name): rules for name, rules in fp8.BACKENDS.items()}
    said = section.get("backend", next(iter(backends)))
    reads = backends[said].reads(section) if said in backends else section
    known = [key.name.removeprefix("fp8_") for key in keys.TABLE["fp8_config"] if key.reader]
    which = f"{said} with recipe {section['recipe']}" if section.get("recipe") else said
    for key in section:
        if key in known and key not in reads:
            yield f"fp8_config {key} is not read by backend {which}: remove it"


def file_notes(config: Mapping[str, Any]) -> Iterator[str]:
    """What the launcher does not read of a file: one line each."""
    kind, precision = config.get("distributed_type"), config.get("mixed_precision") or "no"
    if kind == "NO" and (config.get("num_processes") or 1) > 1:
        yield f"num_processes {config['num_processes']} under distributed_type NO: one process runs"
    for section, reader in SECTION_OF.items():
        if config.get(section) and kind != reader:
            yield f"{section} is not read under distributed_type {kind}"
    if config.get("fp8_config") and precision != "fp8":
        yield f"fp8_config is not read under mixed_precision {precision}"
    backend = (config.get("dynamo_config") or {}).get("dynamo_backend", "no")
    if kind == "DEEPSPEED" and str(backend).lower() != "no":
        yield "dynamo_config is not read under distributed_type DEEPSPEED: nothing is compiled"
    for section in [name for name in keys.TABLE if name and name in config]:
        held = {keys.full(section, key): value for key, value in (config[section] or {}).items()}
        for key in config[section] or ():
            name = keys.full(section, key)
            said, _, effective = said_in_vain(held).get(name, (None, None, None))
            other = f" {said} is not read by Accelerate, which takes {effective}" if said else ""
            if name in keys.ROWS and keys.ROWS[name].reader == keys.UNREAD:
                yield f"{section} {key}{other or ' is not read by Accelerate'}"


def asks_for_cpu(config: Mapping[str, Any]) -> bool:
    """Whether a file asks for the CPU, which the launcher tells the processes only if there is one."""
    return config.get("distributed_type") == "MULTI_CPU" or on(config.get("use_cpu"))


def default_processes(config: Mapping[str, Any], devices: int) -> int:
    """The number of processes where nobody says one: those of the mesh, or the GPUs there are, or 2 in a rehearsal."""
    if config.get("distributed_type") in ("NO", "MULTI_CPU"):
        return config.get("num_processes") or 1
    mesh = 1
    for size in (config.get("parallelism_config") or {}).values():
        mesh *= size if isinstance(size, int) and not isinstance(size, bool) else 1
    here = 2 if asks_for_cpu(config) else devices or 2
    return mesh if mesh > 1 else here * (config.get("num_machines") or 1)


def default_file(env: Mapping[str, str]) -> Path | None:
    """The file that `accelerate launch` reads without --config_file: the one that `accelerate config` writes, or
    None."""
    cache = env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    file = Path(cache, "accelerate/default_config.yaml").expanduser()
    return file if file.is_file() else None


def named_otherwise(path: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a file of accelerate_configs/ does otherwise than its name says."""
    if Path(path).resolve().parent != OURS:
        return
    try:
        promised = grammar(Path(path).stem)
    except Refused as error:
        yield str(error)
        return
    wanted = read_env(to_env(config))
    for key, value in (promised or {}).items():
        says = wanted.fp8.options.get("recipe") if key == "recipe" else getattr(wanted, key)
        if says != value:
            yield f"the name says {key} {value}, the file {says}: rename it or change the file"


def grammar(name: str) -> dict[str, str | bool | None] | None:
    """Parses a config's name: {"strategy", "precision", "backend", "level", tails}, or None if it is not of this form.

    The form is <strategy>_<precision>[_<backend>[_<level>]][_<tail>]. Raises Refused if a name begins with a strategy
    and goes on with an unknown word.
    """
    strategy = max((each for each in STRATEGIES if name.startswith(f"{each}_")), key=len, default=None)
    if strategy is None:
        return None
    precision, *rest = name.removeprefix(f"{strategy}_").split("_")
    promised = {"strategy": strategy, "precision": precision, "backend": None, "level": None}
    unknown = [] if precision in PRECISIONS.values() else [precision]
    if precision == "fp8":
        backend = rest.pop(0) if rest and rest[0] in fp8.BACKENDS else next(iter(fp8.BACKENDS))
        rules, words = fp8.BACKENDS[backend], "_".join(rest)
        level = next((x for x in sorted(rules.levels, key=len, reverse=True) if f"{words}_".startswith(f"{x}_")), None)
        rest = rest[level.count("_") + 1 :] if level else rest
        promised |= {"backend": backend, "level": level or rules.levels[0]}
        if rest and rest[0] in rules.recipes:
            promised["recipe"] = rules.recipes[rest.pop(0)]
    unknown += [tail for tail in rest if tail not in TAILS]
    if unknown:
        form = "<strategy>_<precision>[_<backend>[_<level>]][_<tail>]"
        raise Refused(f"config name {name}: {', '.join(unknown)} is not a part of {form}")
    return promised | {tail: tail in rest for tail in TAILS}
