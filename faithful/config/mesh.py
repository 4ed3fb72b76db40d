"""The device mesh: the sizes of parallelism_config."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from faithful.config.schema import whole_number


@dataclass(frozen=True)
class Mesh:
    """The section parallelism_config. A product of 1 is no mesh."""

    dp_replicate: int = 1  # groups of processes that each hold the whole model
    dp_shard: int = 1
    tp: int = 1  # processes that compute one batch together
    cp: int = 1
    sp: int = 1


def parse(env: Mapping[str, str]) -> Mesh:
    """What the launcher's variables ask for."""
    names = [field.name for field in fields(Mesh)]
    return Mesh(**{name: whole_number(env, f"PARALLELISM_CONFIG_{name.upper()}_SIZE", 1) for name in names})


def environment(section: Mapping[str, Any]) -> dict[str, str]:
    """The variables that the launcher makes of a file's section."""
    names = [field.name for field in fields(Mesh)]
    return variables(Mesh(**{name: section.get(f"parallelism_config_{name}_size", 1) for name in names}))


def variables(mesh: Mesh) -> dict[str, str]:
    sizes = {f"PARALLELISM_CONFIG_{name.upper()}_SIZE": str(size) for name, size in asdict(mesh).items()}
    return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"} | sizes


def problems(mesh: Mesh, strategy: str, precision: str, processes: int) -> list[str]:
    """Every reason why this cannot run."""
    sizes = {name: size for name, size in asdict(mesh).items() if size > 1}
    words = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if "tp" in sizes and strategy in ("fsdp", "hsdp"):
        return [f"tensor parallel with FSDP2 ({words}) fails between Accelerate 1.15 and transformers 5: use hsdp_bf16"]
    if strategy == "tp" and len(sizes) > 1:
        return [
            f"tensor parallel beside data parallel ({words}): without FSDP2 Accelerate refuses it, or sums no "
            "gradients. Set parallelism_config_tp_size alone, or use hsdp_bf16"
        ]
    if strategy == "tp" and precision == "fp16":
        return ["tp in fp16: torch's gradient scaler does not take split and whole gradients together, use tp_bf16"]
    if strategy == "tp" and precision == "fp8":  # torchao fails, amp8 converts none, emulated TE is in bf16
        return ["tp in fp8: no FP8 layer here takes a weight that is split: use tp_bf16, or fsdp_fp8"]
    if sizes.keys() & {"cp", "sp"}:
        return [f"parallelism_config {words}: context and sequence parallel are not supported here, use hsdp"]
    if sizes and strategy not in ("fsdp", "hsdp", "tp"):
        return [f"parallelism_config is for hsdp and tp files, this one is {strategy}: remove it"]
    if strategy == "hsdp" and "dp_shard" not in sizes:
        return ["hsdp without parallelism_config_dp_shard_size shards nothing: set it, or use a ddp file"]
    product = math.prod(sizes.values())
    if sizes and product != processes:
        return [
            f"parallelism_config {words} is for {product} processes, not {processes}: --num_processes {product}, "
            "or change its sizes"
        ]
    return []
