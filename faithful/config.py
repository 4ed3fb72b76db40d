"""What a config asks for, as one mapping, read from the launcher's environment or from a file.

`accelerate launch` turns a YAML file into environment variables. `asked(env)` reads these into one mapping.
`exported(config)` returns the variables that a file would become, so that files and launches go through the same rules
(faithful/rules.py). This module imports neither torch nor Accelerate, so that a check takes a fraction of a second.
"""

import os

from faithful.errors import Refused

PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
TAILS = ("compile", "offload", "ckpt", "noreshard")  # ckpt: activation checkpointing
BACKENDS = {"AO": "ao", "TE": "te", "MSAMP": "msamp"}
LEVELS = {  # the first is the default
    "ao": ("tensorwise", "rowwise", "rowwise_with_gw_hp"),
    "te": ("delayed", "current", "block", "mxfp8"),
    "msamp": ("o2", "o1", "o3"),
}
SKIP = {"ao": "first, last"}  # the default of `skip`, as in the backend's own recipes
TE_OPTIONS = ("fp8_format", "margin", "amax_history_len", "amax_compute_algo")
# The keys of a config file that accelerate 1.15 reads; tests compare them with the installed launcher. Left out: keys
# that it accepts and ignores (FSDP1's under version 2), and engines that these recipes don't use.
KEYS = {
    "": "compute_environment debug distributed_type downcast_bf16 dynamo_config enable_cpu_affinity fp8_config "
    "fsdp_config gpu_ids machine_rank main_process_ip main_process_port main_training_function mixed_precision "
    "num_machines num_processes rdzv_backend same_network use_cpu deepspeed_config parallelism_config",
    "fsdp_config": "fsdp_activation_checkpointing fsdp_activation_checkpointing_offload fsdp_auto_wrap_policy "
    "fsdp_cpu_ram_efficient_loading fsdp_offload_params fsdp_reshard_after_forward fsdp_state_dict_type "
    "fsdp_transformer_layer_cls_to_wrap fsdp_version",
    # fp8_recipe and fp8_skip are ours: the launcher exports any key of this section
    "fp8_config": "fp8_amax_compute_algo fp8_amax_history_len fp8_backend fp8_enable_fsdp_float8_all_gather fp8_format "
    "fp8_interval fp8_margin fp8_opt_level fp8_override_linear_precision fp8_pad_inner_dim fp8_recipe "
    "fp8_skip fp8_use_autocast_during_eval fp8_use_mxfp8_block_scaling",
    "dynamo_config": "dynamo_backend dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph "
    "dynamo_use_regional_compilation",
    "deepspeed_config": "deepspeed_hostfile deepspeed_multinode_launcher offload_optimizer_device offload_param_device "
    "zero3_init_flag zero_stage",
    "parallelism_config": "parallelism_config_dp_replicate_size parallelism_config_dp_shard_size "
    "parallelism_config_tp_size parallelism_config_cp_size parallelism_config_sp_size",
}
PREFIXED = ("fsdp_config", "fp8_config", "dynamo_config")  # their keys may omit `fsdp_`, `fp8_`, `dynamo_`
SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")  # dimensions of a device mesh, parallelism_config_<name>_size
FP8_DEFAULTS = {  # what the launcher exports for keys that a file leaves out
    "fp8_amax_compute_algo": "most_recent", "fp8_amax_history_len": 1024, "fp8_enable_fsdp_float8_all_gather": True,
    "fp8_format": "HYBRID", "fp8_interval": 1, "fp8_margin": 0, "fp8_opt_level": "O2", "fp8_pad_inner_dim": True,
    "fp8_use_autocast_during_eval": False,
}  # fmt: skip
DISTRIBUTED_TYPES = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")
STRATEGIES = ("single", "ddp", "fsdp", "hsdp", "tp", "zero1", "zero2", "zero3")


def on(value):
    """Whether a boolean is true, as the launcher (True, true, 1) or YAML (true) writes it."""
    return str(value).lower() in ("true", "1", "yes", "on")


def asked(env):
    """The mapping of what the launcher's environment variables ask for."""
    version = env.get("FSDP_VERSION", "1")
    sizes = {name: int(env.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", 1)) for name in SIZES}
    if on(env.get("ACCELERATE_USE_DEEPSPEED")):
        strategy = f"zero{env.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', 2)}"
    elif on(env.get("ACCELERATE_USE_FSDP")):
        strategy = ("hsdp" if sizes["dp_replicate"] > 1 else "fsdp") if version == "2" else f"fsdp{version}"
    elif sizes["tp"] > 1:
        strategy = "tp"
    else:
        strategy = "ddp" if "LOCAL_RANK" in env else "single"
    host = {"cpu", "nvme"} & {env.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_DEVICE") for what in ("OPTIMIZER", "PARAM")}
    precision = env.get("ACCELERATE_MIXED_PRECISION", "no")
    return {
        "strategy": strategy,
        "precision": PRECISIONS.get(precision, precision),
        "num_processes": int(env.get("WORLD_SIZE", 1)),
        "local_processes": int(env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE", 1))),
        "compile": env.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no",
        "whole_model": not on(env.get("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")),
        "offload": on(env.get("FSDP_OFFLOAD_PARAMS")) or bool(host),
        "ckpt": on(env.get("FSDP_ACTIVATION_CHECKPOINTING")),
        "noreshard": strategy in ("fsdp", "hsdp") and not on(env.get("FSDP_RESHARD_AFTER_FORWARD", "true")),
        "restarts_in_vain": env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        "sizes": sizes,
        "replicas": sizes["dp_replicate"],
        "split": sizes["tp"],
        "deepspeed": {
            "nvme": "nvme" in host,
            "file": env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"),
            "init": strategy == "zero3" and on(env.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true")),
        },
        **asked_of_fp8(env, precision),
        "wrap_policy": env.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP"),
        "ram_efficient": on(env.get("FSDP_CPU_RAM_EFFICIENT_LOADING")),
        "use_cpu": on(env.get("ACCELERATE_USE_CPU")),
    }


def asked_of_fp8(env, precision):
    """The FP8 part of `asked`. `skip`: patterns of the Linear layers that stay in high precision. `dead`: options that
    are set but have no effect any more, each with the reason."""
    asked = {"backend": None, "level": None, "fp8_options": {}, "skip": [], "dead": []}
    if precision != "fp8":
        return asked

    def get(key, default=""):
        return env.get(f"ACCELERATE_FP8_{key}", default)

    backend, recipe = BACKENDS.get(get("BACKEND", "AO"), get("BACKEND")), get("RECIPE")
    level = get("OPT_LEVEL", "O2").lower() if backend == "msamp" else recipe or LEVELS.get(backend, ("",))[0]
    given = {name: get(name.removeprefix("fp8_").upper()) for name in TE_OPTIONS}
    options = {name: int(text) if text.isdigit() else text for name, text in given.items() if text}
    if backend == "ao":
        options = {"enable_fsdp_float8_all_gather": on(get("ENABLE_FSDP_FLOAT8_ALL_GATHER", "1")),
                   "pad_inner_dim": on(get("PAD_INNER_DIM", "1"))}  # fmt: skip
    elif backend == "te" and level != "delayed":
        options = {"fp8_format": options.get("fp8_format", "HYBRID")} if level in ("current", "block") else {}
    elif backend == "msamp":
        options = {"recipe": recipe} | (options if recipe == "te_delayed" else {}) if recipe else {}
    reasons = {
        "interval": (get("INTERVAL", "1") != "1", "TransformerEngine has removed it: scales are updated every step"),
        "override_linear_precision": (
            any(on(get(f"OVERRIDE_{gemm}")) or get(f"OVERRIDE_{gemm}") in "tr(" and get(f"OVERRIDE_{gemm}")
                for gemm in ("FPROP", "DGRAD", "WGRAD")),
            "TransformerEngine has removed it",
        ),
        "use_autocast_during_eval": (on(get("USE_AUTOCAST_DURING_EVAL")), "evaluation is always outside FP8"),
        "use_mxfp8_block_scaling": (on(get("USE_MXFP8_BLOCK_SCALING")), "write recipe: mxfp8 instead"),
    }  # fmt: skip
    asked["dead"] = [f"{key}: {reason}" for key, (turned, reason) in reasons.items() if turned]
    skip = [pattern.strip() for pattern in get("SKIP", SKIP.get(backend, "")).split(",") if pattern.strip()]
    return asked | {"backend": backend, "level": level, "fp8_options": options, "skip": skip}


def exported(config):
    """The environment variables that `accelerate launch` makes of a config file's mapping: those that `asked` reads."""
    sections = {
        name: {
            key if key.startswith(prefix) else prefix + key: value for key, value in (config.get(name) or {}).items()
        }
        for name, prefix in (("fsdp_config", "fsdp_"), ("dynamo_config", "dynamo_"), ("fp8_config", "fp8_"))
    }
    env = {"ACCELERATE_MIXED_PRECISION": str(config.get("mixed_precision", "no"))}
    env["ACCELERATE_DYNAMO_BACKEND"] = str(sections["dynamo_config"].get("dynamo_backend", "no")).upper()
    regional = sections["dynamo_config"].get("dynamo_use_regional_compilation", False)
    env["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = str(regional)
    if config.get("mixed_precision") == "fp8":
        section = FP8_DEFAULTS | sections["fp8_config"]
        override = section.pop("fp8_override_linear_precision", (False, False, False))
        env |= {f"ACCELERATE_{key.upper()}": str(value) for key, value in section.items()}
        if isinstance(override, bool):  # the launcher indexes it: a list, or the letters of a string
            override = [override] * 3
        gemms = zip(("FPROP", "DGRAD", "WGRAD"), override, strict=False)
        env |= {f"ACCELERATE_FP8_OVERRIDE_{gemm}": str(value) for gemm, value in gemms}
    kind, processes = str(config.get("distributed_type")), config.get("num_processes", 1)
    if kind == "NO":
        env["ACCELERATE_USE_CPU"] = str(config.get("use_cpu", False))
    else:
        local = processes // config.get("num_machines", 1)
        env |= {"LOCAL_RANK": "0", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(local)}
    if kind == "DEEPSPEED":
        section = config.get("deepspeed_config") or {}
        env |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DYNAMO_BACKEND": "NO"}  # launcher ignores dynamo_config
        env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(section.get("zero_stage", 2))
        names = {"offload_optimizer_device": "OFFLOAD_OPTIMIZER_DEVICE", "offload_param_device": "OFFLOAD_PARAM_DEVICE",
                 "zero3_init_flag": "ZERO3_INIT"}  # fmt: skip
        for key in names.keys() & section.keys():
            env[f"ACCELERATE_DEEPSPEED_{names[key]}"] = str(section[key]).lower()
    if config.get("parallelism_config"):
        section = config["parallelism_config"]
        env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        for name in SIZES:
            env[f"PARALLELISM_CONFIG_{name.upper()}_SIZE"] = str(section.get(f"parallelism_config_{name}_size", 1))
    if kind == "FSDP":
        defaults = {"fsdp_version": 1, "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": False}
        env["ACCELERATE_USE_FSDP"] = "true"
        env |= {key.upper(): str(value) for key, value in (defaults | sections["fsdp_config"]).items()}
    return env


def rank():
    """This process's rank, or 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def seconds_of_patience():
    """Timeout of collectives, in seconds. torch's defaults: 30 minutes for gloo, 10 for NCCL."""
    seconds = os.environ.get("COLLECTIVE_TIMEOUT", "600")
    if not seconds.isdigit() or not int(seconds):
        raise Refused(f"COLLECTIVE_TIMEOUT={seconds}: write seconds, a whole number from 1 on")
    return int(seconds)


def default_project_dir():
    """The project folder for scripts that name none, as `./launch.sh compare` sets it, or None."""
    return os.environ.get("FAITHFUL_PROJECT_DIR")


def tell_folder():
    """The file into which a run writes its folder, so that ./launch.sh can print the run's table, or None."""
    return os.environ.get("FAITHFUL_TELL_FOLDER")


def of_script(precision):
    """The launcher's variables for a precision that the script says. FP8 is then torchao's, with a gather in FP8 only
    where there is one."""
    gathers = str(on(os.environ.get("ACCELERATE_USE_FSDP")))
    fp8 = {"ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": gathers} if precision == "fp8" else {}
    return {} if precision is None else {"ACCELERATE_MIXED_PRECISION": precision} | fp8


def config_wins():
    """Whether script arguments that contradict the config are dropped with a note, instead of refused."""
    return "FAITHFUL_CONFIG_WINS" in os.environ


def exported_accumulation():
    """The gradient accumulation steps that the launcher exports, or None."""
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    return None if steps is None else int(steps)
