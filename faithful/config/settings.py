"""What a config asks for, read from the launcher's environment or from a file.

`accelerate launch` turns a YAML file into environment variables. `read_env(env)` reads these into Settings.
`to_env(config)` returns the variables that a file would become, so that files and launches go through the same rules
(rules.py). This module imports neither torch nor Accelerate, so that a check takes a fraction of a second.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from faithful.config import deepspeed, fp8, fsdp
from faithful.config.deepspeed import DeepSpeed
from faithful.config.fp8 import FP8
from faithful.config.fsdp import FSDP
from faithful.config.schema import digits, full, on, whole_number
from faithful.config.strategies import STRATEGIES, FSDPRules, StrategyRules
from faithful.errors import Refused

PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
TAILS = ("compile", "offload", "ckpt", "noreshard")  # of a config's name
ONCE = "FAITHFUL_RAM_EFFICIENT"  # 0: each process builds models with their weights, whatever the config says
KEEP = "FAITHFUL_KEEP_DTYPE"  # 1: under an fp32 config a model trains in the dtype that it has, 16 bit or not


@dataclass(frozen=True)
class Mesh:
    """The section parallelism_config: the sizes of the device mesh. A product of 1 is no mesh."""

    dp_replicate: int = 1  # groups of processes that each hold the whole model
    dp_shard: int = 1
    tp: int = 1  # processes that compute one batch together
    cp: int = 1
    sp: int = 1

    @classmethod
    def parse(cls, env: Mapping[str, str]) -> "Mesh":
        """What the launcher's variables ask for."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: whole_number(env, f"PARALLELISM_CONFIG_{name.upper()}_SIZE", 1) for name in names})

    @property
    def sizes(self) -> dict[str, int]:
        """Those larger than 1."""
        return {name: size for name, size in asdict(self).items() if size > 1}

    def environment(self) -> dict[str, str]:
        """The launcher's variables."""
        sizes = {f"PARALLELISM_CONFIG_{name.upper()}_SIZE": str(size) for name, size in asdict(self).items()}
        return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"} | sizes

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items())


@dataclass(frozen=True)
class Settings:
    """What a config asks for. A section that is not there has its defaults."""

    strategy: str
    precision: str
    num_processes: int
    local_processes: int  # of this machine
    compile: bool
    compile_mode: str  # of torch.compile
    whole_model: bool  # that the model is compiled as a whole; here its blocks are
    restarts_in_vain: bool  # a restarted worker would find the store of the one that died
    use_cpu: bool
    ram_efficient: bool  # only process 0 builds models with their weights
    fsdp: FSDP
    deepspeed: DeepSpeed
    fp8: FP8
    mesh: Mesh

    @property
    def rules(self) -> StrategyRules:
        return STRATEGIES.get(self.strategy) or StrategyRules(self.strategy)

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 shards the model."""
        return isinstance(self.rules, FSDPRules)

    @property
    def shards(self) -> int:
        """The processes over which the strategy divides what it divides."""
        return self.mesh.dp_shard * self.mesh.tp if self.strategy in ("hsdp", "fsdp_tp") else self.num_processes

    @property
    def offload(self) -> bool:
        return self.fsdp.offload or self.deepspeed.offload

    @property
    def ckpt(self) -> bool:
        return self.fsdp.activation_checkpointing

    @property
    def noreshard(self) -> bool:
        return self.sharded and not self.fsdp.reshard

    @property
    def built_once(self) -> bool:
        """Whether the config says that only process 0 builds models with their weights."""
        return self.fsdp.ram_efficient or self.deepspeed.init

    @property
    def backend(self) -> str | None:
        return self.fp8.backend

    @property
    def level(self) -> str | None:
        return self.fp8.level

    @property
    def skip(self) -> list[str]:
        return self.fp8.skip


def read_env(env: Mapping[str, str]) -> Settings:
    """What the launcher's environment variables ask for."""
    sizes, of_fsdp, of_deepspeed = Mesh.parse(env), fsdp.parse(env), deepspeed.parse(env)
    world = whole_number(env, "WORLD_SIZE", 1)
    local = whole_number(env, "LOCAL_WORLD_SIZE", world)
    precision = of_deepspeed.precision or env.get("ACCELERATE_MIXED_PRECISION", "no")
    of_fp8 = fp8.parse(env, precision, bool(of_fsdp.version) and not of_fsdp.replicates)
    if of_deepspeed.stage is not None:
        if of_fp8.backend == "msamp" and of_fp8.level and not of_deepspeed.replicates:
            of_deepspeed = of_deepspeed.with_level(of_fp8.level)
        strategy = of_deepspeed.runs_as or f"zero{of_deepspeed.stage}"
        if strategy == "fsdp":
            of_fsdp = FSDP(2, reshard=of_deepspeed.stage == 3, wrap_policy="TRANSFORMER_BASED_WRAP", min_num_params=0)
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
        compile=env.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no",
        compile_mode=env.get("ACCELERATE_DYNAMO_MODE", "default"),
        whole_model=not on(env.get("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")),
        restarts_in_vain=store and env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0",
        use_cpu=on(env.get("ACCELERATE_USE_CPU")),
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
        for name in ("fsdp_config", "dynamo_config", "fp8_config", "deepspeed_config", "parallelism_config")
    }
    env = {"ACCELERATE_MIXED_PRECISION": str(config.get("mixed_precision", "no")).lower()}
    env["ACCELERATE_DYNAMO_BACKEND"] = str(sections["dynamo_config"].get("dynamo_backend", "no")).upper()
    env["ACCELERATE_DYNAMO_MODE"] = str(sections["dynamo_config"].get("dynamo_mode", "default"))
    regional = sections["dynamo_config"].get("dynamo_use_regional_compilation", False)
    env["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = str(regional)
    if config.get("mixed_precision") == "fp8":
        env |= fp8.environment(sections["fp8_config"])
    kind, processes = str(config.get("distributed_type")), config.get("num_processes", 1)
    if kind == "NO" or (kind == "MULTI_CPU" and not config.get("mpirun_config")):
        env["ACCELERATE_USE_CPU"] = str(config.get("use_cpu", False))
    else:
        local = processes // config.get("num_machines", 1)
        env |= {"LOCAL_RANK": "0", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(local)}
    if kind == "DEEPSPEED":
        env |= {"ACCELERATE_DYNAMO_BACKEND": "NO"} | deepspeed.environment(sections["deepspeed_config"])
    if sections["parallelism_config"] and "LOCAL_RANK" in env:
        named = {field.name: f"parallelism_config_{field.name}_size" for field in fields(Mesh)}
        sizes = {name: sections["parallelism_config"].get(key, 1) for name, key in named.items()}
        env |= Mesh(**sizes).environment()
    if kind == "FSDP":
        env |= fsdp.environment(sections["fsdp_config"])
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
