"""The plan: how this run trains on this machine, resolved once per process.

`resolve()` reads the environment, as `accelerate launch` or torchrun may have set it, looks at the machine, and returns
a frozen Plan, or raises Refused with every reason at once (config/rules.py). On a machine without an accelerator it
makes Accelerate run the same strategy on the CPU.
"""

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from faithful import patches
from faithful.config import config_file, deepspeed, fp8, fsdp, rules
from faithful.config.settings import TAILS, Settings, of_script, read_env, timeout_seconds, to_env
from faithful.config.strategies import STRATEGIES
from faithful.errors import Refused
from faithful.launch import launcher, machine, same_start
from faithful.launch.machine import Machine


@dataclasses.dataclass(frozen=True)
class Plan:
    """How this run trains. `rehearsal`: the machine has no accelerator. `emulated`: FP8 is computed in software."""

    config: str | None  # the file's name without .yml, if known
    strategy: str
    num_processes: int
    precision: str
    device: str
    backend: str | None = None
    level: str | None = None
    implementation: str = "torch"
    fp8_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    skip: list[str] = dataclasses.field(
        default_factory=list
    )  # patterns of the Linear layers that stay in high precision
    compile: bool = False
    offload: bool = False
    ckpt: bool = False  # activation checkpointing: the backward pass computes each block's activations again
    ckpt_on_host: bool = False  # and what it computes them from waits in the host's memory
    noreshard: bool = False  # FSDP2 that keeps parameters gathered between forward and backward: ZeRO-2
    replicas: int = 1  # hsdp: groups of processes that each hold the whole model
    tp_size: int = 1  # tp: processes that compute one batch together
    sp_size: int = 1  # zero3_sp: processes that compute one batch together, each a slice of its sequences
    rehearsal: bool = False
    emulated: bool = False
    wrap_policy: str | None = None  # fsdp, hsdp: says which modules are gathered as a unit
    wrap_classes: list[str] = dataclasses.field(default_factory=list)  # TRANSFORMER_BASED_WRAP: of units, if named
    ignored_modules: str | None = None  # fsdp, hsdp: those that are not sharded, as a regular expression
    clip: float | None = None  # zero: the norm to which the config clips gradients
    ram_efficient: bool = False  # fsdp, hsdp, zero3: only process 0 builds models with their weights
    notes: list[str] = dataclasses.field(default_factory=list)  # what runs otherwise than the config's words say

    @property
    def group_size(self) -> int:
        """Processes that compute one batch together."""
        return self.tp_size * self.sp_size


LAUNCHES = ("launch", "accelerate-launch", "accelerate_launch.py", "accelerate.commands.launch")
# Fields of the config that options of `accelerate launch` must not change.
LAUNCHED_AS = ("strategy", "precision", "backend", "level", "skip", "compile", "offload", "ckpt")
OF_THE_FILE = ("config", "notes")  # fields that may differ from machine to machine
OF_PRECISION = ("precision", "backend", "level", "skip")  # the launcher's option says them where the file does not


def resolve(precision: str | None = None) -> Plan:
    """The Plan of this process. precision: the script's, where no launcher says one. Raises Refused with every reason
    at once."""
    return resolved(precision, os.getpid())  # a script may fork the processes that train, as debug_launcher does


@functools.cache
def resolved(precision: str | None, process: int) -> Plan:
    debugged = in_debug_launcher()
    launcher.adopt_process_group()
    launcher.adopt_mpi()
    settings = read_env(os.environ | of_script(precision))
    line, file = (None, None) if debugged else launch_line()
    lines, notes, asks_for_cpu = [], [], settings.use_cpu
    if file is not None:
        lines, config = config_file.file_problems(file)
        config = config or {}
        if config:
            lines += launched_otherwise(file, config, settings)
        notes += config_file.file_notes(config)
        asks_for_cpu |= config_file.asks_for_cpu(config)
    if asks_for_cpu:  # a rehearsal, asked for by name
        patches.set_environment("CUDA_VISIBLE_DEVICES", "")
    lines += one_alone(line, settings)
    on_cpu = debugged or asks_for_cpu
    here = machine.without_accelerator() if on_cpu else machine.of_torch()
    if not (on_cpu or here.devices) and (why := machine.unseen()):
        raise Refused(why)  # not a rehearsal: the machine has GPUs
    lines += rules.problems(settings, here)
    if lines:
        raise Refused("\n".join(dict.fromkeys(lines)))
    plan = made_of(settings, here, file.stem if file else None, notes + rules.notes(settings, here))
    if plan.rehearsal:  # else DeepSpeed, if installed, prints in every run that there is no GPU
        patches.set_environment("DS_ACCELERATOR", os.environ.get("DS_ACCELERATOR", "cpu"))
    for name, value in variables_for_accelerate(settings).items():
        patches.set_environment(name, value)
    if plan.num_processes > 1:
        rendezvous(os.getpid())
        asks = {key: value for key, value in vars(plan).items() if key not in OF_THE_FILE}
        same_start.compare(asks, plan.num_processes)
    if plan.rehearsal and plan.strategy != "single":
        rehearse(plan)
    return plan


def made_of(settings: Settings, here: Machine, config: str | None, notes: list[str]) -> Plan:
    """The Plan of settings that have no problem on the machine `here`."""
    fsdp, backend, rehearsal = settings.fsdp, fp8.rules_of(settings.fp8), not here.devices
    emulated = rehearsal and backend.in_software(settings.rules, settings.level)
    return Plan(
        config=config,
        strategy=settings.strategy,
        num_processes=settings.num_processes,
        precision=settings.precision,
        device=here.device,
        backend=settings.backend,
        level=settings.level,
        implementation="emulated" if emulated else backend.implementation,
        fp8_options=settings.fp8.options,
        skip=settings.skip,
        compile=settings.compile,
        offload=settings.offload,
        ckpt=settings.ckpt,
        ckpt_on_host=fsdp.checkpoints_on_host,
        noreshard=settings.noreshard,
        replicas=settings.mesh.dp_replicate,
        tp_size=settings.mesh.tp,
        sp_size=settings.mesh.sp,
        rehearsal=rehearsal,
        emulated=settings.backend is not None and not here.has_fp8,
        wrap_policy=fsdp.wrap_policy if settings.sharded else None,
        wrap_classes=fsdp.wrap_classes,
        ignored_modules=fsdp.ignored_modules,
        clip=settings.deepspeed.clip,
        ram_efficient=settings.ram_efficient,
        notes=notes,
    )


def launched_otherwise(file: Path, config: dict[str, Any], settings: Settings) -> list[str]:
    """Problems where an option of the launcher has changed what the file says."""
    says = read_env(to_env({"num_processes": settings.num_processes} | config))
    said = config.get("mixed_precision") is not None or settings.deepspeed.precision
    return [
        f"{file.name} says {key} {getattr(says, key)}, the launch made it {getattr(settings, key)}: launch it as it is"
        for key in LAUNCHED_AS
        if getattr(says, key) != getattr(settings, key) and (key not in OF_PRECISION or said)
    ]


def one_alone(line: list[str] | None, settings: Settings) -> list[str]:
    """A problem if `accelerate launch` was told to start several processes, and has started one: on a CPU without
    mpirun, and of a file that says one."""
    options = options_of(line or [])
    asked = options.num_processes if options else None
    if settings.strategy != "single" or asked in (None, 1):
        return []
    return [
        f"--num_processes {asked}: with --cpu, without a GPU or of a file for one process accelerate launch starts one "
        "alone: take a ddp config, or leave --cpu out and pass --multi_gpu, which is rehearsed where there is no GPU"
    ]


def variables_for_accelerate(settings: Settings) -> dict[str, str | None]:
    """{variable: value, None to remove it} as Accelerate has to read them for this plan, where the config's words are
    those of FSDP version 1, or of what is not done here (rules.notes)."""
    values: dict[str, str | None] = {}
    if settings.sharded:
        values |= fsdp.as_version_2(settings.fsdp, os.environ)
    elif settings.fsdp.version:
        values["ACCELERATE_USE_FSDP"] = None
    if settings.strategy == "hsdp":
        values |= settings.mesh.environment()
    if settings.deepspeed.runs_as:
        values["ACCELERATE_USE_DEEPSPEED"] = None
    if settings.deepspeed.init:
        values["ACCELERATE_DEEPSPEED_ZERO3_INIT"] = "false"
    if settings.deepspeed.steps:
        values["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(settings.deepspeed.steps)
    elif os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") == "auto":
        values["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = None
    return values


def in_debug_launcher() -> bool:
    """Whether Accelerate's debug_launcher forked this process, to run the script on CPUs. It makes the process group,
    and leaves out what other launchers export. Its own precision is no choice of the user's."""
    if "ACCELERATE_DEBUG_RDV_FILE" not in os.environ:
        return False
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
        os.environ.pop(name, None)
    return True


@functools.cache
def rendezvous(process: int) -> None:
    """Waits once for all processes of this run."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        patches.replace(f"torch.distributed.distributed_c10d:{name}", timeout())
    launcher.rendezvous(timeout())


def timeout() -> timedelta:
    return timedelta(seconds=timeout_seconds())


def rehearse(plan: Plan) -> None:
    """Makes Accelerate run `plan.strategy` on the CPU, with gloo.

    Without an accelerator PartialState._prepare_backend returns no backend, and each process would train alone as rank
    0 of 1. This replaces that private method, so pyproject.toml bounds Accelerate's version; tests check for shards.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    kind = DistributedType[STRATEGIES[plan.strategy].rehearsed_as]
    patches.set_environment("ACCELERATE_USE_CPU", None)
    patches.set_environment("ACCELERATE_TORCH_DEVICE", "cpu")
    patches.replace("accelerate.state:PartialState._prepare_backend", lambda self, *_, **__: ("gloo", kind))
    patches.replace("accelerate.state:PartialState.__init__", without_cpu(PartialState.__init__))


def without_cpu(starts: Callable[..., None]) -> Callable[..., None]:
    """PartialState's __init__, `starts`, without its argument `cpu`, with which it makes no process group of FSDP's and
    DeepSpeed's. A rehearsal is on the CPU anyway."""

    def init(self: object, cpu: bool = False, **kwargs: Any) -> None:
        starts(self, **kwargs)

    return init


@functools.cache
def launch_line() -> tuple[list[str] | None, Path | None]:
    """(command line of the `accelerate launch` above this process, its config file), or (None, None)."""
    import psutil

    try:
        for parent in psutil.Process().parents():
            line, cwd = parent.cmdline(), parent.cwd()
            if not launcher.launches(line) or not (options := options_of(line)):
                continue
            if options.config_file:
                return line, Path(cwd, options.config_file)
            return line, None if options.cpu else config_file.default_file(os.environ)
    except psutil.Error:
        pass
    return None, None


def options_of(line: list[str]) -> argparse.Namespace | None:
    """What the command line of an `accelerate launch` says to the launcher; None for another command. The script may
    have options of its own by the same names."""
    from accelerate.commands.launch import launch_command_parser

    at = next((at for at, word in enumerate(line[:4]) if os.path.basename(word) in LAUNCHES), None)
    words = [] if at is None else [*line[at + 1 :], "a script, which is required"]
    return launch_command_parser().parse_known_args(words)[0] if words else None


def says_precision() -> bool:
    """Whether the config or an option of the launcher says the precision. torchrun and plain python do not, nor need a
    file; where nobody does, `accelerate launch` exports its default."""
    exported = os.environ.get("ACCELERATE_MIXED_PRECISION")
    line, file = launch_line()
    if exported != "no" or line is None or (file is not None and file_says_precision(file)):
        return exported is not None
    options = options_of(line)
    return bool(options and options.mixed_precision)


@functools.cache
def file_says_precision(file: Path) -> bool:
    """Whether a config file, or the file of DeepSpeed's that it names, says the precision."""
    config = config_file.file_problems(file)[1] or {}
    of_deepspeed = (config.get("deepspeed_config") or {}).get("deepspeed_config_file")
    return config.get("mixed_precision") is not None or bool(of_deepspeed and deepspeed.of_file(of_deepspeed).precision)


def describe(plan: Plan) -> str:
    """The plan in one line: `ddp x2 | bf16`, then its other options."""
    parts = [f"{plan.strategy} x{plan.num_processes}" if plan.num_processes > 1 else plan.strategy]
    parts.append(fp8.in_words(plan.precision, plan.backend, plan.level, plan.fp8_options))
    parts += [word for word in TAILS if getattr(plan, word)]
    parts += ["rehearsal on a CPU"] if plan.rehearsal else []
    return " | ".join(parts)
