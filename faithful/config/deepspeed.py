"""DeepSpeed: what deepspeed_config asks for, or the JSON that it names as deepspeed_config_file. Imports neither torch
nor, without such a file, DeepSpeed."""

import base64
import contextlib
import importlib.metadata
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from faithful.config.keys import DEVICES, flag, on, text, whole
from faithful.disk import documents
from faithful.disk.names import printable, short
from faithful.errors import Refused

# Sections that train another way than the script says, or split the model as nothing here counts.
ELSEWHERE = ("tensor_parallel", "compression_training", "curriculum_learning", "data_efficiency", "hybrid_engine",
             "progressive_layer_drop", "sparse_attention", "pipeline", "amp")  # fmt: skip
# Settings of deepspeed_config that Accelerate refuses beside a file, as they are the file's to say.
OF_THE_FILE = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
               "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path",
               "zero3_save_16bit_model")  # fmt: skip


@dataclass(frozen=True)
class DeepSpeed:
    """The section deepspeed_config."""

    stage: int | None = None  # of ZeRO, or None without DeepSpeed
    problem: str | None = None  # of its file
    optimizer_device: str = "none"  # to which the optimizer's state is offloaded
    param_device: str = "none"  # to which parameters are, under stage 3
    clip: float | None = None  # the norm to which gradients are clipped
    save_16bit: bool = False
    init: bool = False  # zero3_init_flag: only process 0 builds models with their weights
    precision: str | None = None  # in the launcher's words; None where the launcher says it
    steps: int | None = None  # of gradient accumulation; None where the script says them
    optimizer: str | None = None  # the type that the file names
    scheduler: str | None = None
    file: str | None = None  # deepspeed_config_file
    trains_level: str | None = None  # of MS-AMP, which another strategy trains

    @property
    def offload(self) -> bool:
        return bool({"cpu", "nvme"} & {self.optimizer_device, self.param_device})

    @property
    def offloads_weights(self) -> bool:
        """Not only the optimizer's state."""
        return self.param_device in ("cpu", "nvme")

    @property
    def replicates(self) -> bool:
        """Whether this is stage 0 and nothing else, which DDP does."""
        return self.stage == 0 and not (self.file or self.clip or self.offload)

    @property
    def runs_as(self) -> str | None:
        """The strategy that trains in its place, or None: DeepSpeed's engine does. It has masters of its own and
        reduces `.grad` alone. O3 divides masters and moments over the processes of DDP, as MS-AMP's own ZeRO does
        (arXiv:2310.18313, section 2.3); a level that is sharded divides them under FSDP2."""
        if self.replicates:
            return "ddp"
        if self.trains_level is None:
            return None
        return "ddp" if self.trains_level == "o3" and self.stage != 3 else "fsdp"

    def with_level(self, level: str) -> "DeepSpeed":
        """The section of a run that trains one of MS-AMP's levels."""
        return replace(self, trains_level=level, init=False, save_16bit=False)


def parse(env: Mapping[str, str]) -> DeepSpeed:
    """What the launcher's variables ask for, or the file that they name."""
    if not on(env.get("ACCELERATE_USE_DEEPSPEED")):
        return DeepSpeed()
    init = flag(env, "zero3_init_flag", True)
    if file := text(env, "deepspeed_config_file"):
        return of_file(file, init)
    stage = whole(env, "zero_stage", 2)
    param_device = text(env, "offload_param_device", "none") if stage in (0, 3) else "none"  # else DeepSpeed ignores it
    return DeepSpeed(
        stage=stage,
        optimizer_device=text(env, "offload_optimizer_device", "none"),
        param_device=param_device,
        clip=norm_of(text(env, "gradient_clipping").lower()),
        save_16bit=stage == 3 and flag(env, "zero3_save_16bit_model"),
        init=stage == 3 and init,
    )


def problems(deepspeed: DeepSpeed, installed: bool) -> Iterator[str]:
    """Yields every reason why this cannot run."""
    if deepspeed.stage is None:
        return
    if not installed:
        install = "./launch.sh setup --extra deepspeed, or pip install 'accelerate-recipes[deepspeed]'"
        yield f"zero{deepspeed.stage} needs DeepSpeed, which is not installed: {install}"
    if problem := deepspeed.problem:
        yield problem
    elif installed and deepspeed.file and not deepspeed.runs_as and (problem := refused_by_deepspeed(deepspeed.file)):
        yield problem
    if "nvme" in (deepspeed.optimizer_device, deepspeed.param_device):
        yield (
            "offloading to nvme: checkpoints here and the counts of run.json cannot reach what is there: set "
            "offload_optimizer_device and offload_param_device to cpu"
        )
    if deepspeed.trains_level and (asks := of_the_engine(deepspeed)):
        yield (
            f"{', '.join(asks)}: only DeepSpeed's engine does it, and MS-AMP's {deepspeed.trains_level} runs as "
            f"{deepspeed.runs_as}: leave it out{', and clip in the script' if deepspeed.clip else ''}"
        )
    if deepspeed.offload and deepspeed.stage == 1:
        yield "zero1 does not offload: use zero3_bf16_offload"
    if deepspeed.stage == 0 and not (deepspeed.replicates or deepspeed.problem):
        yield (
            "zero_stage 0 runs as DDP, which has no gradient_clipping, offloading or deepspeed_config_file: "
            "use zero_stage 1, or distributed_type MULTI_GPU and clip in the script"
        )


def notes(deepspeed: DeepSpeed) -> Iterator[str]:
    """Yields what runs otherwise than the section's words say, with the same result."""
    if deepspeed.trains_level:
        yield of_level(deepspeed)
    elif deepspeed.replicates:
        yield "zero_stage 0 partitions nothing: it runs as DDP"
    if deepspeed.save_16bit:
        yield "zero3_save_16bit_model: the weights are gathered and saved in fp32"
    if deepspeed.optimizer or deepspeed.scheduler:
        yield (
            "the optimizer and the scheduler of deepspeed_config_file are for a script with DummyOptim and "
            "DummyScheduler"
        )


def of_the_engine(deepspeed: DeepSpeed) -> list[str]:
    """The settings that no other strategy has."""
    asks = {
        "gradient_clipping": deepspeed.clip, "offloading": deepspeed.offload, "optimizer": deepspeed.optimizer,
        "scheduler": deepspeed.scheduler,
    }  # fmt: skip
    return [name for name, value in asks.items() if value]


def of_level(deepspeed: DeepSpeed) -> str:
    """The note of a run that trains one of MS-AMP's levels."""
    said = f"zero_stage {deepspeed.stage} with MS-AMP's {deepspeed.trains_level} runs as"
    if deepspeed.runs_as == "ddp":
        return f"{said} ddp_fp8_msamp_o3, whose masters and moments are divided over the processes"
    level = "o2, which FSDP2 shards" if deepspeed.trains_level == "o3" else f"{deepspeed.trains_level} under FSDP2"
    kept = "" if deepspeed.stage == 3 else ", and keeps gathered weights until the backward pass"
    return f"{said} {level}{kept}"


def refused_by_deepspeed(said: str) -> str | None:
    """What DeepSpeed says against a file of its own, or None: which keys it has differs between its versions. Also None
    where it is not installed: `check` may ask for another machine. The script says the sizes of batches."""
    config = {key: explicit(part) if isinstance(part, dict) else part for key, part in read(said)[1].items()}
    sizes = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    try:
        with contextlib.redirect_stdout(sys.stderr):  # to which DeepSpeed logs from its import on
            from deepspeed.runtime.config import DeepSpeedConfig
        DeepSpeedConfig(explicit(config) | sizes)
    except ModuleNotFoundError:
        return None
    except Exception as error:  # its own, pydantic's, those of assert
        details = error.errors() if hasattr(error, "errors") else []  # pyrefly: ignore[not-callable]
        keys = ", ".join(".".join(map(str, each["loc"])) for each in details)
        reason = f"{error.title}: {keys}: {details[0]['msg']}" if details else str(error)  # pyrefly: ignore[missing-attribute]
        by = f"DeepSpeed {importlib.metadata.version('deepspeed')}"
        return f"deepspeed_config_file {name_of(said)}: {by} refuses it: {printable(reason)[:300]}"
    return None


def name_of(said: str) -> str:
    return said[:200] if said.isprintable() else short(said)


def read(said: str) -> tuple[str | None, dict[str, Any]]:
    """(problem or None, mapping) of a path, or of JSON itself, plain or as base64: what the launcher may export."""
    named = f"deepspeed_config_file {name_of(said)}"
    try:
        if os.path.exists(said):
            text = documents.text_of(said)
        else:
            text = said if said.lstrip().startswith("{") else base64.urlsafe_b64decode(said).decode()
        config = documents.of_json(text)
    except documents.Unreadable as error:
        return f"{named} {error}", {}
    except ValueError:
        return f"{named} cannot be read: it is not in {os.getcwd()}, where the launch looks for it", {}
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        return f"{named} has no section zero_optimization: set its stage", {}
    if what := wrong(config):
        return f"{named}: {what}", {}
    if unsupported := [name for name in ELSEWHERE if enabled(config.get(name))]:
        return f"{', '.join(unsupported)} in deepspeed_config_file: not supported here, leave it out", config
    return None, config


def enabled(section: Any) -> bool:
    return bool(section) and (not isinstance(section, dict) or section.get("enabled", True) is not False)


def wrong(config: dict[str, Any]) -> str | None:
    """What is wrong with the type of a value that `of_file` reads, or None."""
    for name in ("zero_optimization", "fp16", "bf16", "bfloat16", "optimizer", "scheduler"):
        if not isinstance(config.get(name) or {}, dict):
            return f"{name} is {config[name]!r}: write a section"
    zero = config["zero_optimization"]
    for name in ("offload_optimizer", "offload_param"):
        if not isinstance(section := zero.get(name) or {}, dict):
            return f"{name} is {section!r}: write a section"
        if (device := section.get("device", "none")) not in DEVICES:
            return f"{name} device is {device!r}: write one of {', '.join(DEVICES)}"
    stage, steps = zero.get("stage", 0), config.get("gradient_accumulation_steps", "auto")
    if type(stage) is not int or stage not in range(4):
        return f"stage is {stage!r}: write 0, 1, 2 or 3"
    if steps != "auto" and (type(steps) is not int or steps < 1):
        return f"gradient_accumulation_steps is {steps!r}: write a whole number from 1 on, or auto"
    try:
        norm_of(config.get("gradient_clipping", "auto"))
    except Refused as refused:
        return str(refused)
    for name in ("optimizer", "scheduler"):
        if not isinstance(kind := (config.get(name) or {}).get("type"), str | None):
            return f"{name} type is {kind!r}: write a name"
    return None


def norm_of(clip: Any) -> float | None:
    """The norm to which `gradient_clipping` clips, or None: 0 or "auto". Raises Refused if it is no number."""
    try:
        norm = 0.0 if clip == "auto" else float(clip or 0)
    except (TypeError, ValueError):
        norm = math.nan
    if isinstance(clip, bool) or not 0 <= norm < math.inf:
        raise Refused(f"gradient_clipping is {clip!r}: write a number from 0 on, or auto")
    return norm or None


def of_file(said: str, init: bool = True) -> DeepSpeed:
    """What a file asks for. init: what zero3_init_flag says, which stands beside it."""
    problem, config = read(said)
    zero = config.get("zero_optimization", {})
    devices = [(zero.get(f"offload_{what}") or {}).get("device", "none") for what in ("optimizer", "param")]
    steps, stage = config.get("gradient_accumulation_steps", "auto"), zero.get("stage", 0)
    asks = {name: config.get(name) or {} for name in ("fp16", "bf16")}
    asks["bf16"] = asks["bf16"] or config.get("bfloat16") or {}  # the older name, which DeepSpeed still reads
    precision = [name for name, section in asks.items() if str(section.get("enabled")).lower() == "true"]
    return DeepSpeed(
        stage=stage,
        problem=problem,
        optimizer_device=devices[0],
        param_device=devices[1] if stage == 3 else "none",
        clip=norm_of(config.get("gradient_clipping", "auto")),
        save_16bit=stage == 3 and zero.get("stage3_gather_16bit_weights_on_model_save") is True,
        init=stage == 3 and init,
        precision=precision[0] if precision else None,
        steps=None if steps == "auto" else steps,
        optimizer=(config.get("optimizer") or {}).get("type"),
        scheduler=(config.get("scheduler") or {}).get("type"),
        file=said,
    )


def explicit(section: dict[str, Any]) -> dict[str, Any]:
    """A section of the file without the values that are left to Accelerate."""
    return {key: value for key, value in section.items() if value != "auto"}
