"""DeepSpeed's own config, the JSON of deepspeed_config_file: what it asks for. Imports neither torch nor DeepSpeed."""

import base64
import json
import os

# Sections that train another way than the script says, or split the model as nothing here counts.
ELSEWHERE = ("tensor_parallel", "compression_training", "curriculum_learning", "data_efficiency", "hybrid_engine",
             "progressive_layer_drop", "sparse_attention", "pipeline", "amp")  # fmt: skip
# Settings of deepspeed_config that Accelerate refuses beside a file, as they are the file's to say.
OF_THE_FILE = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
               "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path",
               "zero3_save_16bit_model")  # fmt: skip


def read(said):
    """(problem or None, mapping) of a path, or of JSON itself, plain or as base64: what the launcher may export."""
    try:
        if os.path.exists(said):
            with open(said, encoding="utf-8") as file:
                config = json.load(file)
        else:
            config = json.loads(said if said.lstrip().startswith("{") else base64.urlsafe_b64decode(said))
    except (OSError, ValueError) as error:
        missing = f"it is not in {os.getcwd()}, where the launch looks for it" if not os.path.exists(said) else error
        return f"deepspeed_config_file {said[:200]} cannot be read: {missing}", {}
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        return f"deepspeed_config_file {said[:200]} has no section zero_optimization: set its stage", {}
    if unsupported := [name for name in ELSEWHERE if enabled(config.get(name))]:
        return f"{', '.join(unsupported)} in deepspeed_config_file: not supported here, leave it out", config
    return None, config


def enabled(section):
    return bool(section) and (not isinstance(section, dict) or section.get("enabled", True) is not False)


def requests(said):
    """What a file asks for, with the names of `config.settings_of_deepspeed`; `stage`; `precision`, None where it is
    the launcher's; `steps` of gradient accumulation, None where they are the script's."""
    problem, config = read(said)
    zero = config.get("zero_optimization", {})
    devices = [(zero.get(f"offload_{what}") or {}).get("device", "none") for what in ("optimizer", "param")]
    clip, steps = config.get("gradient_clipping", "auto"), config.get("gradient_accumulation_steps", "auto")
    precision = [name for name in ("fp16", "bf16") if str((config.get(name) or {}).get("enabled")).lower() == "true"]
    stage = zero.get("stage", 0)
    return {
        "problem": problem,
        "stage": stage,
        "devices": devices,
        "save_16bit": stage == 3 and zero.get("stage3_gather_16bit_weights_on_model_save") is True,
        "clip": None if clip == "auto" or not clip else float(clip),
        "precision": precision[0] if precision else None,
        "steps": None if steps == "auto" else int(steps),
        "optimizer": (config.get("optimizer") or {}).get("type"),
        "scheduler": (config.get("scheduler") or {}).get("type"),
    }


def explicit(section):
    """A section of the file without the values that are left to Accelerate."""
    return {key: value for key, value in section.items() if value != "auto"}
