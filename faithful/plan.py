"""The plan: how this run trains on this machine, resolved once per process.

`resolve()` reads the environment, as `accelerate launch` or torchrun may have set it, looks at the machine, and returns
a frozen Plan, or raises Refused with every reason at once (faithful/rules.py). On a machine without an accelerator it
makes Accelerate run the same strategy on the CPU.
"""

import dataclasses
import functools
import os
from datetime import timedelta
from pathlib import Path

from faithful import backends, launcher, machine, patches, strategies
from faithful.config import TAILS, asked, exported, of_script, seconds_of_patience
from faithful.errors import Refused
from faithful.rules import file_problems, problems


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
    fp8_options: dict = dataclasses.field(default_factory=dict)
    skip: list = dataclasses.field(default_factory=list)  # patterns of the Linear layers that stay in high precision
    compile: bool = False
    offload: bool = False
    ckpt: bool = False  # activation checkpointing: the backward pass computes each block's activations again
    noreshard: bool = False  # FSDP2 that keeps parameters gathered between forward and backward: ZeRO-2
    replicas: int = 1  # hsdp: groups of processes that each hold the whole model
    split: int = 1  # tp: processes that compute one batch together
    rehearsal: bool = False
    emulated: bool = False


# Fields of the config that options of `accelerate launch` must not change.
LAUNCHED_AS = ("strategy", "precision", "backend", "level", "skip", "compile", "offload", "ckpt")


def resolve(precision=None):
    """The Plan of this process. precision: the script's, where no launcher says one. Raises Refused with every reason
    at once."""
    return resolved(precision, os.getpid())  # a script may fork the processes that train, as debug_launcher does


@functools.cache
def resolved(precision, process):
    debugged = in_debug_launcher()
    launcher.take_part()
    here = machine.without_accelerator() if debugged else machine.of_torch()
    wanted = asked(os.environ | of_script(precision))
    _, file = (None, None) if debugged else launch_line()
    lines = []
    if file is not None:
        lines, config = file_problems(file)
        says = asked(exported(config)) if config else wanted
        lines += [
            f"{file.name} says {key} {says[key]}, the launch made it {wanted[key]}: launch it as it is"
            for key in LAUNCHED_AS
            if says[key] != wanted[key]
        ]
    lines += problems(wanted, here)
    if lines:
        raise Refused("\n".join(dict.fromkeys(lines)))
    rehearsal = not here["devices"]
    plan = Plan(
        config=file.stem if file else None,
        device=here["device"],
        rehearsal=rehearsal,
        implementation=backends.implementation(wanted["backend"], wanted["strategy"], rehearsal),
        emulated=wanted["backend"] is not None and (here["capability"] or (0, 0)) < (8, 9),
        **{field.name: wanted[field.name] for field in dataclasses.fields(Plan) if field.name in wanted},
    )
    if rehearsal:  # else DeepSpeed, if installed, prints in every run that there is no GPU
        patches.set_environment("DS_ACCELERATOR", os.environ.get("DS_ACCELERATOR", "cpu"))
    if plan.num_processes > 1:
        meet(os.getpid())
    if rehearsal and plan.strategy != "single":
        rehearse(plan)
    return plan


def in_debug_launcher():
    """Whether Accelerate's debug_launcher forked this process, to run the script on CPUs. It makes the process group,
    and leaves out what other launchers export. Its own precision is no choice of the user's."""
    if "ACCELERATE_DEBUG_RDV_FILE" not in os.environ:
        return False
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
        os.environ.pop(name, None)
    return True


@functools.cache
def meet(process):
    """Waits once for all processes of this run."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        patches.replace(f"torch.distributed.distributed_c10d:{name}", patience())
    launcher.meet(patience())


def patience():
    return timedelta(seconds=seconds_of_patience())


def rehearse(plan):
    """Makes Accelerate run `plan.strategy` on the CPU, with gloo.

    Without an accelerator PartialState._prepare_backend returns no backend, and each process would train alone as rank
    0 of 1. This replaces that private method, so pyproject.toml bounds Accelerate's version; tests check for shards.
    """
    from accelerate.utils import DistributedType

    kind = DistributedType[strategies.of(plan).REHEARSED_AS]
    patches.set_environment("ACCELERATE_USE_CPU", None)
    patches.set_environment("ACCELERATE_TORCH_DEVICE", "cpu")
    patches.replace("accelerate.state:PartialState._prepare_backend", lambda self, *_, **__: ("gloo", kind))
    if prepare := getattr(strategies.of(plan), "before_rehearsal", None):
        prepare()


@functools.cache
def launch_line():
    """(command line of the `accelerate launch` above this process, its config file), or (None, None)."""
    import psutil

    try:
        for parent in psutil.Process().parents():
            line, cwd = parent.cmdline(), parent.cwd()
            if not launcher.launches(line) or not any("accelerate" in part for part in line[:4]):
                continue
            for flag, value in zip(line, line[1:] + [""], strict=True):
                name, _, inline = flag.partition("=")
                if name in ("--config_file", "--config-file"):
                    return line, Path(cwd, inline or value)
            return line, None
    except psutil.Error:
        pass
    return None, None


def says_precision():
    """Whether the config or an option of the launcher says the precision. torchrun and plain python do not; where
    nobody does, `accelerate launch` exports its default."""
    exported = os.environ.get("ACCELERATE_MIXED_PRECISION")
    line, file = launch_line()
    if exported != "no" or line is None or file is not None:
        return exported is not None
    from accelerate.commands.config.config_args import default_config_file
    from accelerate.commands.launch import launch_command_parser

    words = line[next(at for at, word in enumerate(line) if "launch" in os.path.basename(word)) + 1 :]
    options, _ = launch_command_parser().parse_known_args(words)
    return options.mixed_precision is not None or os.path.isfile(default_config_file)


def describe(plan):
    """The plan in one line: `ddp x2 | bf16`, then its other options."""
    parts = [f"{plan.strategy} x{plan.num_processes}" if plan.num_processes > 1 else plan.strategy]
    parts.append(" ".join(word for word in (plan.precision, plan.backend, plan.level) if word))
    parts += [word for word in TAILS if getattr(plan, word)]
    parts += ["rehearsal on a CPU"] if plan.rehearsal else []
    return " | ".join(parts)
