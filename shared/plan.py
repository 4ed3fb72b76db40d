"""The launch: what was asked, what is there, and one Plan.

`accelerate launch` turns a YAML file into environment variables; plain torchrun and python leave them out. Whatever the
door, `asked(environment)` reads them into one mapping, `problems(asked, machine)` names every contradiction, and
`resolve()` refuses or returns a frozen Plan. `tools/check.py` sends a file through the same rules: `exported(config)`
says what `accelerate launch` would export for it. Nothing heavy is imported until a run really starts, so a check
takes a fraction of a second.
"""

import dataclasses
import difflib
import functools
import os
import subprocess
import sys
from pathlib import Path

import yaml

from shared.args import Refused, key_values

PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
TAILS = ("compile", "offload")
# What accelerate 1.15 reads of a file; tests compare it with the installed launcher. Missing on purpose: keys it
# accepts and then does nothing with (FSDP1's under version 2), and engines that these recipes don't use.
KEYS = {
    "": "compute_environment debug distributed_type downcast_bf16 dynamo_config enable_cpu_affinity fsdp_config "
    "gpu_ids machine_rank main_process_ip main_process_port main_training_function mixed_precision num_machines "
    "num_processes rdzv_backend same_network use_cpu",
    "fsdp_config": "fsdp_activation_checkpointing fsdp_activation_checkpointing_offload fsdp_auto_wrap_policy "
    "fsdp_cpu_ram_efficient_loading fsdp_offload_params fsdp_reshard_after_forward fsdp_state_dict_type "
    "fsdp_transformer_layer_cls_to_wrap fsdp_version",
    "dynamo_config": "dynamo_backend dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph "
    "dynamo_use_regional_compilation",
}
DISTRIBUTED_TYPES = {"NO": "single", "MULTI_GPU": "ddp", "FSDP": "fsdp"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How this run trains, resolved. `rehearsal`: on a machine without an accelerator. `emulated`: FP8 in software."""

    config: str | None  # the file's name without .yml, where it can be known
    strategy: str
    num_processes: int
    precision: str
    device: str
    backend: str | None = None
    level: str | None = None
    implementation: str = "torch"
    fp8_options: dict = dataclasses.field(default_factory=dict)
    compile: bool = False
    offload: bool = False
    activation_checkpointing: bool = False
    rehearsal: bool = False
    emulated: bool = False

    def kwargs(self, gradient_accumulation_steps=1, grad_scaler=""):
        """Arguments for `Accelerator(...)`.

        grad_scaler: options of fp16's GradScaler, "init_scale=1024,growth_interval=100": no Accelerate YAML carries
        them.
        """
        import torch
        from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, GradScalerKwargs

        exported = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", gradient_accumulation_steps))
        if exported != gradient_accumulation_steps:  # Accelerate would let the environment win, silently
            raise Refused(
                f"--gradient_accumulation_steps {gradient_accumulation_steps}, but the launcher exports {exported}: "
                "say it in one place"
            )
        kwargs = {
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "dataloader_config": DataLoaderConfiguration(non_blocking=True),
            "kwargs_handlers": [],
        }
        options = {"init_scale": float, "growth_factor": float, "backoff_factor": float, "growth_interval": int}
        if grad_scaler:
            if self.precision != "fp16":
                raise Refused(f"--grad_scaler is for fp16 configs, this run is {self.precision}: leave it out")
            kwargs["kwargs_handlers"].append(GradScalerKwargs(**key_values(grad_scaler, options)))
        if self.strategy == "fsdp":
            from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

            # Accelerate alone would reduce gradients in 16 bit, and pin host memory where there is no accelerator.
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else None
            kwargs["fsdp_plugin"] = FullyShardedDataParallelPlugin(
                mixed_precision_policy=policy,
                cpu_offload=CPUOffloadPolicy(pin_memory=not self.rehearsal) if self.offload else None,
            )
        return kwargs


def on(value):
    """The launcher writes booleans as True, true, 1; YAML as true."""
    return str(value).lower() in ("true", "1", "yes", "on")


def asked(env):
    """What the launcher's environment variables ask for, under one name each."""
    version = env.get("FSDP_VERSION", "1")
    if on(env.get("ACCELERATE_USE_DEEPSPEED")):
        strategy = f"zero{env.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', 2)}"
    elif on(env.get("ACCELERATE_USE_FSDP")):
        strategy = "fsdp" if version == "2" else f"fsdp{version}"
    else:
        strategy = "ddp" if "LOCAL_RANK" in env else "single"
    precision = env.get("ACCELERATE_MIXED_PRECISION", "no")
    return {
        "strategy": strategy,
        "precision": PRECISIONS.get(precision, precision),
        "num_processes": int(env.get("WORLD_SIZE", 1)),
        "local_processes": int(env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE", 1))),
        "compile": env.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no",
        "offload": on(env.get("FSDP_OFFLOAD_PARAMS")),
        "activation_checkpointing": on(env.get("FSDP_ACTIVATION_CHECKPOINTING")),
        "wrap_policy": env.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP"),
        "ram_efficient": on(env.get("FSDP_CPU_RAM_EFFICIENT_LOADING")),
        "use_cpu": on(env.get("ACCELERATE_USE_CPU")),
    }


def exported(config):
    """The environment that `accelerate launch` makes of a config file's mapping, as far as `asked` reads it."""
    sections = {
        name: {
            key if key.startswith(prefix) else prefix + key: value for key, value in (config.get(name) or {}).items()
        }
        for name, prefix in (("fsdp_config", "fsdp_"), ("dynamo_config", "dynamo_"))
    }
    env = {"ACCELERATE_MIXED_PRECISION": str(config.get("mixed_precision", "no"))}
    env["ACCELERATE_DYNAMO_BACKEND"] = str(sections["dynamo_config"].get("dynamo_backend", "no")).upper()
    kind, processes = str(config.get("distributed_type")), config.get("num_processes", 1)
    if kind == "NO":
        env["ACCELERATE_USE_CPU"] = str(config.get("use_cpu", False))
    else:
        local = processes // config.get("num_machines", 1)
        env |= {"LOCAL_RANK": "0", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(local)}
    if kind == "DEEPSPEED":
        env["ACCELERATE_USE_DEEPSPEED"] = "true"
        env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str((config.get("deepspeed_config") or {}).get("zero_stage", 2))
    if kind == "FSDP":
        defaults = {"fsdp_version": 1, "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": False}
        env["ACCELERATE_USE_FSDP"] = "true"
        env |= {key.upper(): str(value) for key, value in (defaults | sections["fsdp_config"]).items()}
    return env


def machine():
    """The accelerators of this machine, asked of the driver: importing torch for it would take seconds."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        rows = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        rows = rows[: len([device for device in visible.split(",") if device.strip() not in ("", "-1")])]
    if not rows:
        return {"device": "cpu", "devices": 0, "name": "CPU", "capability": None}
    name, capability = (part.strip() for part in rows[0].rsplit(",", 1))
    return {"device": "cuda", "devices": len(rows), "name": name, "capability": tuple(map(int, capability.split(".")))}


def machine_of_torch():
    """The same, as the running process sees it (any accelerator that torch knows)."""
    import torch

    if not torch.accelerator.is_available():
        return {"device": "cpu", "devices": 0, "name": "CPU", "capability": None}
    device = torch.accelerator.current_accelerator().type
    cuda = device == "cuda"
    return {
        "device": device,
        "devices": torch.accelerator.device_count(),
        "name": torch.cuda.get_device_name() if cuda else device,
        "capability": torch.cuda.get_device_capability() if cuda else None,
    }


def problems(asked, machine):
    """Every reason why this cannot run as asked on this machine, one line each, with the fix."""
    lines = []
    strategy, precision, gpus = asked["strategy"], asked["precision"], machine["devices"]
    if strategy.startswith("fsdp") and strategy != "fsdp":
        lines.append("FSDP version 1 is not supported here: set fsdp_version: 2 in fsdp_config")
    elif strategy not in DISTRIBUTED_TYPES.values():
        lines.append(f"strategy {strategy} is not one of {', '.join(DISTRIBUTED_TYPES.values())}")
    if precision not in PRECISIONS.values():
        lines.append(f"mixed_precision {precision} is not one of 'no', fp16, bf16: Accelerate would train in fp32")
    if asked["use_cpu"]:
        lines.append("use_cpu: true makes Accelerate run one process, whatever num_processes says: leave it out")
    if strategy == "fsdp" and asked["ram_efficient"]:
        lines.append(
            "fsdp_cpu_ram_efficient_loading (Accelerate's default) fails on models with parameters at their root, as "
            "vision transformers have: set it to false in fsdp_config"
        )
    if strategy == "fsdp" and asked["wrap_policy"].upper() != "TRANSFORMER_BASED_WRAP":
        lines.append(
            f"fsdp_auto_wrap_policy {asked['wrap_policy']} shards the model as one piece or fails: set "
            "TRANSFORMER_BASED_WRAP (every model here names its blocks)"
        )
    if gpus and asked["local_processes"] > gpus:
        lines.append(f"{asked['local_processes']} processes on {gpus} {machine['name']}: pass --num_processes {gpus}")
    if not gpus and precision == "fp16" and strategy == "fsdp":
        lines.append("fsdp in fp16 cannot rehearse on a CPU (FSDP2's gradient scaler needs a GPU): use fsdp_bf16")
    if precision == "bf16" and machine["capability"] and machine["capability"] < (8, 0):
        has = "{}.{}".format(*machine["capability"])
        lines.append(f"bf16 needs compute capability 8.0, {machine['name']} has {has}: use an fp16 config")
    return lines


def grammar(name):
    """What a config's name promises: {"strategy", "precision", "compile", "offload"}; None if it promises nothing.

    <strategy>_<precision>[_<tail>...]; raises Refused where a name begins as ours and goes on in another tongue.
    """
    strategy, *rest = name.split("_")
    if strategy not in DISTRIBUTED_TYPES.values() or not rest:
        return None
    precision, *tails = rest
    unknown = [] if precision in PRECISIONS.values() else [precision]
    unknown += [tail for tail in tails if tail not in TAILS]
    if unknown:
        raise Refused(f"name {name}: {', '.join(unknown)} is not in the grammar <strategy>_<precision>[_<tail>]")
    return {"strategy": strategy, "precision": precision} | {tail: tail in tails for tail in TAILS}


def file_problems(path):
    """(problems, mapping) of a config file: what a running process cannot see, because Accelerate drops it on the way.

    The mapping is None where the file cannot be read as one.
    """
    try:
        config = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        return [f"cannot be read: {getattr(error, 'strerror', None) or error}"], None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        return [f"not YAML{where}: {getattr(error, 'problem', error)}"], None
    if not isinstance(config, dict):
        return [f"holds a {type(config).__name__}, not `key: value` lines"], None
    lines = [
        f"{key}: {str(value).lower()} is a boolean to YAML: write 'no' in quotes"
        for key, value in config.items()
        if key in ("mixed_precision", "distributed_type") and isinstance(value, bool)
    ]
    kind = config.get("distributed_type")
    if kind is None:
        lines.append("distributed_type is missing: one of 'NO', MULTI_GPU, FSDP")
    elif not isinstance(kind, bool) and kind not in (*DISTRIBUTED_TYPES, "DEEPSPEED"):
        lines.append(f"distributed_type {kind} is not one of 'NO', {', '.join(list(DISTRIBUTED_TYPES)[1:])}")
    processes = config.get("num_processes")
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        lines.append(f"num_processes is {processes}: write the number of processes, 1 or more")
        processes = 1
    if kind == "NO" and processes > 1:
        lines.append(f"num_processes {processes} under distributed_type 'NO' runs one process: use a ddp or fsdp file")
    if "gpu_ids" in config and not isinstance(config["gpu_ids"], str):
        lines.append("gpu_ids must be a string: write '0,1' in quotes, or all")
    known = {section: keys.split() for section, keys in KEYS.items()}
    for key, value in config.items():
        if key not in known[""]:
            lines.append(f"{key} {meant(key, known[''])}")
        elif key in known and not isinstance(value, dict):
            lines.append(f"{key} holds {value!r}, not `key: value` lines")
        for name in value if key in known and isinstance(value, dict) else ():
            prefix = key.removesuffix("config")
            if name not in known[key] and prefix + name not in known[key]:
                lines.append(f"{key} {name} {meant(name, known[key])}")
    if "fsdp_config" in config and kind != "FSDP":
        lines.append(f"fsdp_config is ignored under distributed_type {kind}: remove it, or use FSDP")
    config = {key: value if key not in known or isinstance(value, dict) else {} for key, value in config.items()}
    config["num_processes"] = processes
    try:
        promised = grammar(Path(path).stem)
    except Refused as error:
        return [*lines, str(error)], config
    found = asked(exported(config))
    for key, value in (promised or {}).items():
        if found[key] != value:
            lines.append(f"the name says {key} {value}, the file {found[key]}: rename it or change the file")
    return lines, config


def meant(key, known):
    close = difflib.get_close_matches(key, known, 1, 0.6)
    hint = f"did you mean {close[0]}?" if close else f"remove it (known: {', '.join(known)})"
    return f"is a key that Accelerate ignores or refuses here: {hint}"


@functools.cache
def launch_line():
    """(command line of the `accelerate launch` above this process, its config file), or (None, None)."""
    import psutil

    try:
        for parent in psutil.Process().parents():
            line, cwd = parent.cmdline(), parent.cwd()
            if not any("accelerate" in part for part in line[:4]):
                continue
            for flag, value in zip(line, line[1:] + [""], strict=True):
                name, _, inline = flag.partition("=")
                if name in ("--config_file", "--config-file"):
                    return line, Path(cwd, inline or value)
            return line, None
    except psutil.Error:
        pass
    return None, None


def resolve():
    """The Plan of this process; raises Refused with every reason at once. On a CPU, Accelerate is made to follow it."""
    wanted, here = asked(os.environ), machine_of_torch()
    _, file = launch_line()
    lines = []
    if file is not None:
        lines, config = file_problems(file)
        says = asked(exported(config)) if config else wanted
        for key in ("strategy", "precision", "compile", "offload"):  # what the command line or a trap has changed
            if says[key] != wanted[key]:
                lines.append(
                    f"{file.name} says {key} {says[key]}, the launch made it {wanted[key]}: launch it as it is"
                )
    lines += problems(wanted, here)
    if lines:
        raise Refused("\n".join(dict.fromkeys(lines)))
    plan = Plan(
        config=file.stem if file else None,
        device=here["device"],
        rehearsal=not here["devices"],
        **{field.name: wanted[field.name] for field in dataclasses.fields(Plan) if field.name in wanted},
    )
    if plan.rehearsal and plan.strategy != "single":
        rehearse(plan)
    return plan


def rehearse(plan):
    """Start the process group on gloo and make Accelerate take this CPU for a device of `plan.strategy`.

    Accelerate alone would start unrelated copies of "rank 0 of 1" here. The only door to FSDP2 on a CPU is its private
    state, hence the bounded version in pyproject.toml and the tests that look at real shards.
    """
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    if plan.strategy == "fsdp":
        PartialState._shared_state["device"] = torch.device("cpu")
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def describe(plan):
    """`ddp x2 | bf16`, with what else was asked for."""
    parts = [f"{plan.strategy} x{plan.num_processes}" if plan.num_processes > 1 else plan.strategy, plan.precision]
    parts += [word for word in (*TAILS, "activation_checkpointing") if getattr(plan, word)]
    parts += ["rehearsal on a CPU"] if plan.rehearsal else []
    return " | ".join(parts)


def say(text, file=sys.stdout):
    """Print on the main rank only, before there is an Accelerator to ask."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(text, file=file, flush=True)
