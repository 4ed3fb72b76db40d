"""What each strategy accepts, holds and sends, known before anything runs. This module imports no torch.

StrategyRules documents the questions; a class answers them for one strategy, and STRATEGIES names it. What a strategy
does is in faithful/strategies, in the same order.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from faithful.config import keys
from faithful.config.deepspeed import DeepSpeed
from faithful.config.fsdp import FSDP

BUCKET = 50_000_000  # gradient elements per reduction of ZeRO. DeepSpeed's default is ten times that: gigabytes


@dataclass(frozen=True)
class FP8:
    """The section fp8_config. fp8.py reads it."""

    backend: str | None = None  # None: the precision is another one
    level: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the backend
    skip: list[str] = field(default_factory=list)  # patterns of the Linear layers that stay in high precision
    without_effect: list[str] = field(default_factory=list)  # keys that are set, each with the reason
    notes: list[str] = field(default_factory=list)  # what runs otherwise than the keys say, with the same result


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
        return cls(**{each.name: keys.whole(env, key_of_size(each.name), 1) for each in fields(cls)})

    @property
    def sizes(self) -> dict[str, int]:
        """Those larger than 1."""
        return {name: size for name, size in asdict(self).items() if size > 1}

    def environment(self) -> dict[str, str]:
        """The launcher's variables."""
        sizes = {key_of_size(name): size for name, size in asdict(self).items()}
        return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"} | keys.environment("parallelism_config", sizes)

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
    def rules(self) -> "StrategyRules":
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


class StrategyRules:
    """The answers of a strategy that copies the model to each process."""

    title: str  # for a list
    family: str  # the first word of its configs' names
    package: str | None = None  # that it needs beside torch
    rehearsed_as = "NO"  # the DistributedType with which Accelerate is started on a machine without an accelerator
    replicates = True  # whether each process holds the whole model in plain torch

    def __init__(self, name: str) -> None:
        self.name = name

    def problems(self, settings: Settings) -> Iterator[str]:
        """Yields every reason why the strategy cannot run these settings."""
        if settings.mesh.sizes.keys() & {"cp", "sp"}:
            yield self.no_context_parallel(settings)
        elif problem := self.problem_of_sizes(settings):
            yield problem

    def problem_of_sizes(self, settings: Settings) -> str | None:
        if settings.mesh.sizes:
            return f"parallelism_config is for hsdp and tp files, this one is {self.name}: remove it"
        return None

    def no_context_parallel(self, settings: Settings) -> str:
        why = "ring attention (cp) has CUDA kernels alone" if settings.mesh.cp > 1 else "Ulysses (sp) is DeepSpeed's"
        return (
            f"parallelism_config {settings.mesh}: {why}, for long sequences use zero3_sp_bf16, zero3_sp_fp8, or "
            "fsdp_bf16_ckpt with fsdp_activation_checkpointing_offload"
        )

    def no_split(self, settings: Settings) -> str | None:
        """The problem of an FP8 layer that takes no weight that is split, or None."""
        takes_split = settings.backend == "ao" and settings.level in keys.FLOAT8
        if settings.precision != "fp8" or takes_split:
            return None
        return (
            f"{self.name} in fp8 {settings.backend} {settings.level}: of the FP8 layers here torchao's, with one scale "
            f"for a tensor or a row, take a weight that is split: use {self.name}_fp8, or {self.name}_bf16"
        )


class SingleRules(StrategyRules):
    title, family = "One device", "single"


class DDPRules(StrategyRules):
    title = "DDP: every process holds the whole model (--num_processes 8 for eight devices)"
    family, rehearsed_as = "ddp", "MULTI_CPU"


class FSDPRules(StrategyRules):
    title = "FSDP2: parameters, gradients and optimizer state are sharded over the processes"
    family = "fsdp"
    rehearsed_as = "MULTI_GPU"  # the only type that AcceleratorState turns into FSDP
    replicates = False

    def problem_of_sizes(self, settings: Settings) -> str | None:
        return wrong_product(settings)


class HSDPRules(FSDPRules):
    title, family = "HSDP: FSDP2 within groups of processes", "hsdp"

    def problem_of_sizes(self, settings: Settings) -> str | None:
        if settings.mesh.dp_shard > 1:
            return wrong_product(settings)
        return "hsdp without parallelism_config_dp_shard_size shards nothing: set it, or use a ddp file"


class FSDPTensorParallelRules(FSDPRules):
    title = "FSDP2 or HSDP with tensor parallel: the parts of split layers are sharded over groups of processes"
    family = "fsdp"

    def problem_of_sizes(self, settings: Settings) -> str | None:
        if settings.fsdp.ignored_modules:
            return "fsdp_ignored_modules is not for tensor parallel, which splits them, too: leave it out"
        if settings.mesh.dp_shard > 1:
            return self.no_split(settings) or wrong_product(settings)
        return (
            f"FSDP2 with {settings.mesh} has no processes to shard over: set parallelism_config_dp_shard_size, or use "
            "tp_bf16"
        )


class TensorParallelRules(StrategyRules):
    title, family = "Tensor parallel: each layer is split over the processes", "tp"
    rehearsed_as = "MULTI_GPU"
    replicates = False

    def problems(self, settings: Settings) -> Iterator[str]:
        if len(settings.mesh.sizes) > 1:
            yield (
                f"tensor parallel beside data parallel ({settings.mesh}): without FSDP2 Accelerate refuses it, or sums "
                "no gradients. Use fsdp_tp_bf16, or set parallelism_config_tp_size alone"
            )
        elif problem := self.no_split(settings) or wrong_product(settings):
            yield problem


class ZeRORules(StrategyRules):
    title = "DeepSpeed ZeRO: optimizer state (1), gradients (2) and parameters (3) are partitioned"
    family, package = "zero", "deepspeed"
    rehearsed_as = "NO"  # Accelerate changes it to DEEPSPEED
    replicates = False


class SequenceParallelRules(ZeRORules):
    title = "ZeRO-3 with Ulysses: groups of processes compute one batch, each a slice of its sequences"

    def problems(self, settings: Settings) -> Iterator[str]:
        sizes, stage = settings.mesh.sizes, settings.deepspeed.stage
        if others := sizes.keys() - {"sp", "dp_shard"}:
            yield f"sequence parallel beside {', '.join(sorted(others))} ({settings.mesh}): use zero3_sp_bf16"
        elif stage != 3:
            yield (
                f"sequence parallel with zero_stage {stage}: DeepSpeed averages the gradients of a group's slices in "
                "stage 3 and adds them up in 1 and 2: use zero3_sp_bf16"
            )
        elif settings.backend == "msamp":
            yield (
                f"sequence parallel with MS-AMP's {settings.level}: its levels run as FSDP2 or DDP, and Ulysses (sp) "
                "is in DeepSpeed's engine: use zero3_sp_fp8"
            )
        elif problem := wrong_product(settings):
            yield problem


STRATEGIES: dict[str, StrategyRules] = {
    "single": SingleRules("single"),
    "ddp": DDPRules("ddp"),
    "fsdp": FSDPRules("fsdp"),
    "hsdp": HSDPRules("hsdp"),
    "tp": TensorParallelRules("tp"),
    "fsdp_tp": FSDPTensorParallelRules("fsdp_tp"),
    "zero1": ZeRORules("zero1"),
    "zero2": ZeRORules("zero2"),
    "zero3": ZeRORules("zero3"),
    "zero3_sp": SequenceParallelRules("zero3_sp"),
}


def key_of_size(name: str) -> str:
    return f"parallelism_config_{name}_size"


def wrong_product(settings: Settings) -> str | None:
    """The problem of a mesh that is for another number of processes, or None."""
    product = math.prod(asdict(settings.mesh).values())
    if not settings.mesh.sizes or product == settings.num_processes:
        return None
    return (
        f"parallelism_config {settings.mesh} is for {product} processes, not {settings.num_processes}: "
        f"--num_processes {product}, or change its sizes"
    )
