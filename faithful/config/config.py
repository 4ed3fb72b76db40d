"""What a config asks for, as one mapping, read from the launcher's environment or from a file.

`accelerate launch` turns a YAML file into environment variables. `read_env(env)` reads these into one mapping.
`to_env(config)` returns the variables that a file would become, so that files and launches go through the same rules
(config/rules.py). This module imports neither torch nor Accelerate, so that a check takes a fraction of a second.
"""

import os

from faithful.config import deepspeed_file
from faithful.config.schema import TRUE, full
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
SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")  # dimensions of a device mesh, parallelism_config_<name>_size
FP8_DEFAULTS = {  # what the launcher exports for keys that a file leaves out
    "fp8_amax_compute_algo": "most_recent", "fp8_amax_history_len": 1024, "fp8_enable_fsdp_float8_all_gather": True,
    "fp8_format": "HYBRID", "fp8_interval": 1, "fp8_margin": 0, "fp8_opt_level": "O2", "fp8_pad_inner_dim": True,
    "fp8_use_autocast_during_eval": False,
}  # fmt: skip
SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # FSDP1's 1 to 5
FSDP_DEFAULTS = {
    "fsdp_version": 1, "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": True, "fsdp_min_num_params": 100_000_000,
    "fsdp_sync_module_states": True, "fsdp_use_orig_params": True, "fsdp_forward_prefetch": False,
}  # fmt: skip
STRATEGIES = ("single", "ddp", "fsdp", "hsdp", "tp", "zero1", "zero2", "zero3")


def on(value):
    """Whether a boolean is true, as the launcher (True, true, 1) or YAML (true) writes it."""
    return str(value).lower() in TRUE


def digits(text):
    """Whether it is a whole number of digits alone. Python refuses to read thousands of them."""
    return text.isdecimal() and len(text) < 19


def whole(env, name, default, kind=int):
    """The whole number that a variable of the launcher says. Raises Refused if it says something else. kind: float also
    takes 1e8."""
    try:
        number = int(kind(env.get(name, default)))
    except (ValueError, OverflowError):
        number = -1
    if number < 0 and name in env:
        raise Refused(f"{name}={env[name][:60]}: write a whole number in the config, 0 or more")
    return number


def read_env(env):
    """The mapping of what the launcher's environment variables ask for."""
    sizes = {name: whole(env, f"PARALLELISM_CONFIG_{name.upper()}_SIZE", 1) for name in SIZES}
    world = whole(env, "WORLD_SIZE", 1)
    local = whole(env, "LOCAL_WORLD_SIZE", world)
    fsdp = settings_of_fsdp(env)
    deepspeed = settings_of_deepspeed(env)
    if on(env.get("ACCELERATE_USE_DEEPSPEED")):
        strategy = "ddp" if deepspeed["as_ddp"] else f"zero{deepspeed['stage']}"
    elif fsdp["version"] == 1 and fsdp["sharding"] == "NO_SHARD":
        strategy = "ddp"
    elif fsdp["version"]:
        if fsdp["version"] == 1 and fsdp["sharding"].startswith("HYBRID") and local < world:  # a node has a whole model
            sizes |= {"dp_replicate": world // local, "dp_shard": local}
        strategy = "hsdp" if sizes["dp_replicate"] > 1 else "fsdp"
    elif sizes["tp"] > 1:
        strategy = "tp"
    else:
        strategy = "ddp" if "LOCAL_RANK" in env else "single"
    sharded = strategy in ("fsdp", "hsdp")
    built_once = fsdp["ram_efficient"] if sharded else deepspeed["init"]
    precision = deepspeed["precision"] or env.get("ACCELERATE_MIXED_PRECISION", "no")
    return {
        "strategy": strategy,
        "precision": PRECISIONS.get(precision, precision),
        "num_processes": world,
        "local_processes": local,
        "compile": env.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no",
        "whole_model": not on(env.get("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")),
        "offload": (sharded and on(env.get("FSDP_OFFLOAD_PARAMS"))) or deepspeed["offload"],
        "ckpt": sharded and on(env.get("FSDP_ACTIVATION_CHECKPOINTING")),
        "noreshard": sharded and not fsdp["reshard"],
        "restarts_in_vain": env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        "sizes": sizes,
        "replicas": sizes["dp_replicate"],
        "split": sizes["tp"],
        "deepspeed": deepspeed,
        "clip": deepspeed["clip"],
        **settings_of_fp8(env, precision, sharded),
        "fsdp": fsdp,
        "built_once": built_once,
        "wrap": fsdp["wrap"] if sharded else None,
        "least": fsdp["least"] if sharded else None,
        "layers": fsdp["layers"] if sharded else [],
        "synced": sharded and fsdp["synced"],
        "ram_efficient": world > 1 and built_once and on(env.get(ONCE, "1")),
        "ignored": (fsdp["ignored"] or None) if sharded else None,
        "use_cpu": on(env.get("ACCELERATE_USE_CPU")),
    }


ONCE = "FAITHFUL_RAM_EFFICIENT"  # 0: each process builds models with their weights, whatever the config says
KEEP = "FAITHFUL_KEEP_DTYPE"  # 1: under an fp32 config a model trains in the dtype that it has, 16 bit or not


def settings_of_fsdp(env):
    """The FSDP part of `read_env`. version: 1, 2, or 0 without FSDP. sharding, reshard: as version 1 or 2 says it.
    wrap: which modules are units; least: a unit's parameters under SIZE_BASED_WRAP; layers: the classes that
    TRANSFORMER_BASED_WRAP names. synced: the weights are process 0's. dead: settings that FSDP2 cannot follow."""

    def get(key, default=""):
        value = env.get(f"FSDP_{key}", default)
        return default if value.lower() == "none" else value

    if not on(env.get("ACCELERATE_USE_FSDP")):
        return {"version": 0, "wrap": None, "least": None, "layers": [], "synced": False, "reshard": True, "dead": []}
    version, sharding, reshard = (
        get("VERSION", "1"),
        get("SHARDING_STRATEGY", "FULL_SHARD"),
        get("RESHARD_AFTER_FORWARD"),
    )
    sharding = SHARDINGS[int(sharding) - 1] if sharding in ("1", "2", "3", "4", "5") else sharding.upper()
    ram = on(get("CPU_RAM_EFFICIENT_LOADING", "false"))
    settings = {
        "version": int(version) if digits(version) else version,
        "sharding": sharding,
        "ram_efficient": ram,
        "reshard_says": reshard or "true",
        "ignored": get("IGNORED_MODULES"),
    }
    if version == "1":
        if sharding == "FULL_SHARD":  # the default, and newer files say the strategy in the other key
            sharding = {"FALSE": "SHARD_GRAD_OP", "TRUE": sharding, "": sharding}.get(reshard.upper(), reshard.upper())
        settings["sharding"] = sharding
    turned = {"backward_prefetch": get("BACKWARD_PREFETCH", "NO_PREFETCH").upper() != "NO_PREFETCH",
              "forward_prefetch": on(get("FORWARD_PREFETCH")),
              "use_orig_params": not on(get("USE_ORIG_PARAMS", "true")),
              "state_dict_type": get("STATE_DICT_TYPE") == "LOCAL_STATE_DICT"}  # fmt: skip
    return settings | {
        "dead": [f"fsdp_{key}" for key, is_on in turned.items() if is_on],
        "reshard": on(reshard or "true") if version != "1" else sharding in ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"),
        "wrap": get("AUTO_WRAP_POLICY", "NO_WRAP").upper(),
        "least": whole({"fsdp_min_num_params": get("MIN_NUM_PARAMS", "0")}, "fsdp_min_num_params", 0, float),
        "layers": [name.strip() for name in get("TRANSFORMER_CLS_TO_WRAP").split(",") if name.strip()],
        "synced": ram or (version == "1" and on(get("SYNC_MODULE_STATES", "true"))),
    }


def settings_of_deepspeed(env):
    """The DeepSpeed part of `read_env`, from the launcher's variables or DeepSpeed's own file. clip: the norm to which
    gradients are clipped, or None. precision, steps (of accumulation), optimizer, scheduler: only a file's. as_ddp:
    stage 0, which DDP does. offloads_weights: not only the optimizer's state."""

    def get(key, default="none"):
        return env.get(f"ACCELERATE_DEEPSPEED_{key}", default)

    clip, on_here = env.get("ACCELERATE_GRADIENT_CLIPPING", "none").lower(), on(env.get("ACCELERATE_USE_DEEPSPEED"))
    settings = {"problem": None, "stage": None, "precision": None, "steps": None, "optimizer": None, "scheduler": None,
                "devices": [], "clip": None, "save_16bit": False, "offload": False, "init": False,
                "as_ddp": False}  # fmt: skip
    if on_here and (file := env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")):
        settings |= deepspeed_file.requests(file)
    elif on_here:
        settings |= {
            "stage": whole(env, "ACCELERATE_DEEPSPEED_ZERO_STAGE", 2),
            "devices": [get("OFFLOAD_OPTIMIZER_DEVICE"), get("OFFLOAD_PARAM_DEVICE")],
            "clip": None if clip == "none" else deepspeed_file.norm_of(clip),
            "save_16bit": get("ZERO_STAGE") == "3" and on(get("ZERO3_SAVE_16BIT_MODEL")),
        }
        settings["as_ddp"] = settings["stage"] == 0 and not settings["clip"] and {*settings["devices"]} <= {"none"}
    devices = settings.pop("devices")[: 2 if settings["stage"] == 3 else 1]  # only stage 3 offloads parameters
    settings |= {"offload": bool({"cpu", "nvme"} & {*devices}), "nvme": "nvme" in devices}
    settings["offloads_weights"] = bool({"cpu", "nvme"} & {*devices[1:]})
    return settings | {"init": settings["stage"] == 3 and on(get("ZERO3_INIT", "true"))}


def settings_of_fp8(env, precision, sharded):
    """The FP8 part of `read_env`. `skip`: patterns of the Linear layers that stay in high precision. `dead`: options
    that are set but have no effect any more, each with the reason. `no_gather`: torchao is to gather in FP8 where
    nothing is gathered, which is Accelerate's default."""
    settings = {"backend": None, "level": None, "fp8_options": {}, "skip": [], "dead": [], "no_gather": False}
    if precision != "fp8":
        return settings

    def get(key, default=""):
        return env.get(f"ACCELERATE_FP8_{key}", default)

    backend, recipe = BACKENDS.get(get("BACKEND", "AO"), get("BACKEND")), get("RECIPE")
    level = get("OPT_LEVEL", "O2").lower() if backend == "msamp" else recipe or LEVELS.get(backend, ("",))[0]
    given = {name: get(name.removeprefix("fp8_").upper()) for name in TE_OPTIONS}
    options = {name: int(text) if digits(text) else text for name, text in given.items() if text}
    if backend == "ao":
        gathers = on(get("ENABLE_FSDP_FLOAT8_ALL_GATHER", "1"))
        settings["no_gather"] = gathers and not sharded
        options = {"enable_fsdp_float8_all_gather": gathers and sharded, "pad_inner_dim": on(get("PAD_INNER_DIM", "1"))}
    elif backend == "te" and level != "delayed":
        options = {"fp8_format": options.get("fp8_format", "HYBRID")} if level in ("current", "block") else {}
    elif backend == "msamp":
        delayed = options if recipe == "te_delayed" else {}  # MS-AMP's own scaling has none of these options
        options = {"recipe": recipe} | delayed if recipe else {}
    override = [get(f"OVERRIDE_{gemm}") for gemm in ("FPROP", "DGRAD", "WGRAD")]
    reasons = {
        "interval": (get("INTERVAL", "1") != "1", "TransformerEngine has removed it: scales are updated every step"),
        "override_linear_precision": (
            any(map(on, override)) or "".join(override).startswith(("tru", "(tr")),  # of a string, its first letters
            "TransformerEngine has removed it",
        ),
        "use_autocast_during_eval": (on(get("USE_AUTOCAST_DURING_EVAL")), "evaluation is always outside FP8"),
        "use_mxfp8_block_scaling": (on(get("USE_MXFP8_BLOCK_SCALING")), "write recipe: mxfp8 instead"),
    }  # fmt: skip
    settings["dead"] = [f"{key}: {reason}" for key, (turned, reason) in reasons.items() if turned]
    skip = [pattern.strip() for pattern in get("SKIP", SKIP.get(backend, "")).split(",") if pattern.strip()]
    return settings | {"backend": backend, "level": level, "fp8_options": options, "skip": skip}


def to_env(config):
    """The environment variables that `accelerate launch` makes of a config file, those that `read_env` reads."""
    config = {key: value for key, value in config.items() if value is not None}
    sections = {
        name: {full(name, key): value for key, value in (config.get(name) or {}).items() if value is not None}
        for name in ("fsdp_config", "dynamo_config", "fp8_config", "deepspeed_config", "parallelism_config")
    }
    env = {"ACCELERATE_MIXED_PRECISION": str(config.get("mixed_precision", "no")).lower()}
    env["ACCELERATE_DYNAMO_BACKEND"] = str(sections["dynamo_config"].get("dynamo_backend", "no")).upper()
    regional = sections["dynamo_config"].get("dynamo_use_regional_compilation", False)
    env["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = str(regional)
    if config.get("mixed_precision") == "fp8":
        section = FP8_DEFAULTS | sections["fp8_config"]
        override = section.pop("fp8_override_linear_precision", None) or (False, False, False)
        env |= {f"ACCELERATE_{key.upper()}": str(value) for key, value in section.items()}
        if not isinstance(override, str | list | tuple):  # the launcher indexes it: a list, or a string's letters
            override = [override] * 3
        gemms = zip(("FPROP", "DGRAD", "WGRAD"), override, strict=False)
        env |= {f"ACCELERATE_FP8_OVERRIDE_{gemm}": str(value) for gemm, value in gemms}
    kind, processes = str(config.get("distributed_type")), config.get("num_processes", 1)
    if kind == "NO" or (kind == "MULTI_CPU" and not config.get("mpirun_config")):
        env["ACCELERATE_USE_CPU"] = str(config.get("use_cpu", False))
    else:
        local = processes // config.get("num_machines", 1)
        env |= {"LOCAL_RANK": "0", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(local)}
    if kind == "DEEPSPEED":
        section = sections["deepspeed_config"]
        env |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DYNAMO_BACKEND": "NO"}  # launcher ignores dynamo_config
        env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(section.get("zero_stage", 2))
        names = {"offload_optimizer_device": "OFFLOAD_OPTIMIZER_DEVICE", "offload_param_device": "OFFLOAD_PARAM_DEVICE",
                 "zero3_init_flag": "ZERO3_INIT", "zero3_save_16bit_model": "ZERO3_SAVE_16BIT_MODEL",
                 }  # fmt: skip
        for key in names.keys() & section.keys():
            env[f"ACCELERATE_DEEPSPEED_{names[key]}"] = str(section[key]).lower()
        if "deepspeed_config_file" in section:
            env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(section["deepspeed_config_file"])
        if "gradient_clipping" in section:
            env["ACCELERATE_GRADIENT_CLIPPING"] = str(section["gradient_clipping"]).lower()
    if sections["parallelism_config"] and "LOCAL_RANK" in env:
        section = sections["parallelism_config"]
        env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        for name in SIZES:
            env[f"PARALLELISM_CONFIG_{name.upper()}_SIZE"] = str(section.get(f"parallelism_config_{name}_size", 1))
    if kind == "FSDP":
        env["ACCELERATE_USE_FSDP"] = "true"
        for key, value in (FSDP_DEFAULTS | sections["fsdp_config"]).items():
            env[key.upper().replace("LAYER_CLS", "CLS")] = str(value).lower() if isinstance(value, bool) else str(value)
    return env


def rank():
    """This process's rank, or 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def timeout_seconds():
    """Timeout of collectives, in seconds. torch's defaults: 30 minutes for gloo, 10 for NCCL."""
    seconds = os.environ.get("COLLECTIVE_TIMEOUT", "600")
    if not digits(seconds) or not 0 < int(seconds) < 10**9:
        raise Refused(f"COLLECTIVE_TIMEOUT={seconds[:60]}: write seconds, a whole number from 1 on")
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


def keeps_dtype():
    """Whether trainable 16-bit parameters stay as the script has loaded them (models/dtypes.py)."""
    return on(os.environ.get(KEEP))


def exported_accumulation():
    """The gradient accumulation steps that the launcher exports, or None."""
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    return None if steps is None else whole(os.environ, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1)
