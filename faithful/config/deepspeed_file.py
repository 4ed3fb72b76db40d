"""DeepSpeed's own config, the JSON of deepspeed_config_file: what it asks for. Imports neither torch nor DeepSpeed."""

import base64
import math
import os

from faithful.disk import settings
from faithful.disk.names import short
from faithful.errors import Refused

# Sections that train another way than the script says, or split the model as nothing here counts.
ELSEWHERE = ("tensor_parallel", "compression_training", "curriculum_learning", "data_efficiency", "hybrid_engine",
             "progressive_layer_drop", "sparse_attention", "pipeline", "amp")  # fmt: skip
DEVICES = ("none", "cpu", "nvme")  # of offloaded states and parameters
# Settings of deepspeed_config that Accelerate refuses beside a file, as they are the file's to say.
OF_THE_FILE = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
               "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path",
               "zero3_save_16bit_model")  # fmt: skip


def read(said):
    """(problem or None, mapping) of a path, or of JSON itself, plain or as base64: what the launcher may export."""
    named = f"deepspeed_config_file {said[:200] if said.isprintable() else short(said)}"
    try:
        if os.path.exists(said):
            text = settings.text_of(said)
        else:
            text = said if said.lstrip().startswith("{") else base64.urlsafe_b64decode(said).decode()
        config = settings.of_json(text)
    except settings.Unreadable as error:
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


def enabled(section):
    return bool(section) and (not isinstance(section, dict) or section.get("enabled", True) is not False)


def wrong(config):
    """What is wrong with the type of a value that `requests` reads, or None."""
    for name in ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler"):
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


def norm_of(clip):
    """The norm to which `gradient_clipping` clips, or None: 0 or "auto". Raises Refused if it is no number."""
    try:
        norm = 0.0 if clip == "auto" else float(clip or 0)
    except (TypeError, ValueError):
        norm = math.nan
    if isinstance(clip, bool) or not 0 <= norm < math.inf:
        raise Refused(f"gradient_clipping is {clip!r}: write a number from 0 on, or auto")
    return norm or None


def requests(said):
    """What a file asks for, with the names of `config.settings_of_deepspeed`; `stage`; `precision`, None where it is
    the launcher's; `steps` of gradient accumulation, None where they are the script's."""
    problem, config = read(said)
    zero = config.get("zero_optimization", {})
    devices = [(zero.get(f"offload_{what}") or {}).get("device", "none") for what in ("optimizer", "param")]
    steps = config.get("gradient_accumulation_steps", "auto")
    precision = [name for name in ("fp16", "bf16") if str((config.get(name) or {}).get("enabled")).lower() == "true"]
    stage = zero.get("stage", 0)
    return {
        "problem": problem,
        "stage": stage,
        "devices": devices,
        "save_16bit": stage == 3 and zero.get("stage3_gather_16bit_weights_on_model_save") is True,
        "clip": norm_of(config.get("gradient_clipping", "auto")),
        "precision": precision[0] if precision else None,
        "steps": None if steps == "auto" else steps,
        "optimizer": (config.get("optimizer") or {}).get("type"),
        "scheduler": (config.get("scheduler") or {}).get("type"),
    }


def explicit(section):
    """A section of the file without the values that are left to Accelerate."""
    return {key: value for key, value in section.items() if value != "auto"}
