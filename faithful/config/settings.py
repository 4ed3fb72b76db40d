"""What a config asks for, read from the launcher's environment or from a file.

`accelerate launch` turns a YAML file into environment variables. `read_env(env)` reads these into Settings.
`to_env(config)` returns the variables that a file would become, so that files and launches go through the same rules
(rules.py). This module imports neither torch nor Accelerate, so that a check takes a fraction of a second.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from faithful.config import deepspeed, fp8, fsdp, keys
from faithful.config.fsdp import FSDP
from faithful.config.keys import digits, flag, full, on, whole_number
from faithful.config.strategies import STRATEGIES, FSDPRules, Mesh, Settings
from faithful.errors import Refused

PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
TAILS = ("compile", "offload", "ckpt", "noreshard")  # of a config's name
ONCE = "FAITHFUL_RAM_EFFICIENT"  # 0: each process builds models with their weights, whatever the config says
KEEP = "FAITHFUL_KEEP_DTYPE"  # 1: under an fp32 config a model trains in the dtype that it has, 16 bit or not


def read_env(env: Mapping[str, str]) -> Settings:
    """What the launcher's environment variables ask for."""
    sizes, of_fsdp, of_deepspeed = Mesh.parse(env), fsdp.parse(env), deepspeed.parse(env)
    world = keys.whole(env, "num_processes", 1)
    local = whole_number(env, "LOCAL_WORLD_SIZE", world)
    precision = of_deepspeed.precision or keys.text(env, "mixed_precision", "no")
    of_fp8 = fp8.parse(env, precision, bool(of_fsdp.version) and not of_fsdp.replicates and sizes.tp == 1)
    if of_deepspeed.stage is not None:
        if of_fp8.backend == "msamp" and of_fp8.level and not of_deepspeed.replicates and sizes.sp == 1:
            of_deepspeed = of_deepspeed.with_level(of_fp8.level)
        strategy = of_deepspeed.runs_as or ("zero3_sp" if sizes.sp > 1 else f"zero{of_deepspeed.stage}")
        if strategy == "fsdp":
            of_fsdp = FSDP(2, reshard=of_deepspeed.stage == 3, wrap_policy="TRANSFORMER_BASED_WRAP")
            of_fp8 = replace(of_fp8, level="o2" if of_fp8.level == "o3" else of_fp8.level)
    elif of_fsdp.replicates:
        strategy = "ddp"
    elif of_fsdp.version:
        if of_fsdp.hybrid and local < world:  # a machine has a whole model
            sizes = Mesh(dp_replicate=world // local, dp_shard=local)
        strategy = "fsdp_tp" if sizes.tp > 1 else "hsdp" if sizes.dp_replicate > 1 else "fsdp"
    elif sizes.tp > 1:
        strategy = "tp"
    else:
        strategy = "ddp" if "LOCAL_RANK" in env else "single"
    if not isinstance(STRATEGIES.get(strategy), FSDPRules):
        of_fsdp = of_fsdp.unread()
    store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    once = (of_fsdp.ram_efficient and sizes.tp == 1) or of_deepspeed.init
    return Settings(
        strategy=strategy,
        precision=PRECISIONS.get(precision, precision),
        num_processes=world,
        local_processes=local,
        compile=keys.text(env, "dynamo_backend", "no").lower() != "no",
        compile_mode=keys.text(env, "dynamo_mode", "default"),
        whole_model=not flag(env, "dynamo_use_regional_compilation"),
        restarts_in_vain=store and env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0",
        use_cpu=flag(env, "use_cpu"),
        ram_efficient=world > 1 and once and on(env.get(ONCE, "1")),
        fsdp=of_fsdp,
        deepspeed=of_deepspeed,
        fp8=of_fp8,
        mesh=sizes,
    )


def to_env(config: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that `accelerate launch` makes of a config file, those that `read_env` reads."""
    config = {key: value for key, value in config.items() if value is not None}
    sections = {
        name: {full(name, key): value for key, value in (config.get(name) or {}).items() if value is not None}
        for name in keys.TABLE
        if name
    }
    config["mixed_precision"] = str(config.get("mixed_precision", "no")).lower()
    env = keys.environment("", config) | keys.environment("dynamo_config", sections["dynamo_config"])
    if config["mixed_precision"] == "fp8":
        env |= fp8.environment(sections["fp8_config"])
    kind, processes = str(config.get("distributed_type")), config.get("num_processes", 1)
    if kind == "NO" or (kind == "MULTI_CPU" and not config.get("mpirun_config")):
        del env["WORLD_SIZE"]  # one process, which no launcher of several has started
    else:
        del env["ACCELERATE_USE_CPU"]
        env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(processes // config.get("num_machines", 1))}
        if sizes := sections["parallelism_config"]:
            env |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"} | keys.environment("parallelism_config", sizes)
    if kind == "FSDP":
        env |= {"ACCELERATE_USE_FSDP": "true"} | keys.environment("fsdp_config", sections["fsdp_config"])
    if kind == "DEEPSPEED":
        env |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DYNAMO_BACKEND": "no"}
        env |= keys.environment("deepspeed_config", sections["deepspeed_config"])
    return env


def rank() -> int:
    """This process's rank, or 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def timeout_seconds() -> int:
    """Timeout of collectives, in seconds. torch's defaults: 30 minutes for gloo, 10 for NCCL."""
    seconds = os.environ.get("COLLECTIVE_TIMEOUT", "600")
    if not digits(seconds) or not 0 < int(seconds) < 10**9:
        raise Refused(f"COLLECTIVE_TIMEOUT={seconds[:60]}: write seconds, a whole number from 1 on")
    return int(seconds)


def default_project_dir() -> str | None:
    """The project folder for scripts that name none, as `./launch.sh compare` sets it, or None."""
    return os.environ.get("FAITHFUL_PROJECT_DIR")


def tell_folder() -> str | None:
    """The file into which a run writes its folder, so that ./launch.sh can print the run's table, or None."""
    return os.environ.get("FAITHFUL_TELL_FOLDER")


def tell_launcher(name: str, text: str) -> None:
    """Leaves a file beside that of `tell_folder`."""
    if file := tell_folder():
        with contextlib.suppress(OSError):
            Path(file).with_name(name).write_text(text)


def of_script(precision: str | None) -> dict[str, str]:
    """The launcher's variables for a precision that the script says. FP8 is then torchao's, with a gather in FP8 only
    where there is one."""
    gathers = str(on(os.environ.get("ACCELERATE_USE_FSDP")))
    fp8 = {"ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": gathers} if precision == "fp8" else {}
    return {} if precision is None else {"ACCELERATE_MIXED_PRECISION": precision} | fp8


def config_wins() -> bool:
    """Whether script arguments that contradict the config are dropped with a note, instead of refused."""
    return "FAITHFUL_CONFIG_WINS" in os.environ


def keeps_dtype() -> bool:
    """Whether trainable 16-bit parameters stay as the script has loaded them (models/dtypes.py)."""
    return on(os.environ.get(KEEP))


def exported_accumulation() -> int | None:
    """The gradient accumulation steps that the launcher exports, or None."""
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    return None if steps is None else whole_number(os.environ, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1)
