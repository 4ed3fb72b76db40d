"""Every reason why a config cannot run, one line each, with the fix. The same rules check files and launches.

`problems(settings, machine)` finds the contradictions, `notes(settings, machine)` what runs otherwise than Accelerate
would run it, with the same result, or slower than it could. Those of a strategy or a backend are in its class
(strategies.py, fp8.py), those of a section beside its keys (fsdp.py, deepspeed.py), what only a file shows in
config_file.py. Nothing here imports torch or
Accelerate.
"""

import socket
from typing import TYPE_CHECKING

from faithful.config import deepspeed, fp8, fsdp
from faithful.config.settings import ONCE, PRECISIONS, Settings
from faithful.config.strategies import STRATEGIES

if TYPE_CHECKING:
    from faithful.launch.machine import Machine

# torch 2.15 keeps one store over all restarts, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and the rendezvous is c10d.
IN_VAIN = (
    "--max_restarts: a restarted worker would look for the one that died: add --rdzv_backend c10d and set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment (./launch.sh and accelerate-recipes do both)"
)

CAPTURES = ("reduce-overhead", "max-autotune")  # the modes of torch.compile that use CUDA graphs


def problems(settings: Settings, machine: "Machine") -> list[str]:
    """Every reason why the config cannot run on this machine, one line each, with the fix."""
    lines = []
    strategy, precision, gpus = settings.strategy, settings.precision, machine.devices
    if strategy not in STRATEGIES and not settings.deepspeed.stage == 0:
        lines.append(f"strategy {strategy} is not one of {', '.join(STRATEGIES)}")
    if precision not in PRECISIONS.values():
        lines.append(f"mixed_precision {precision} is not one of 'no', fp16, bf16, fp8: Accelerate would train in fp32")
    if settings.restarts_in_vain:
        lines.append(IN_VAIN)
    if gpus and settings.local_processes > gpus:
        cpu = ", or set CUDA_VISIBLE_DEVICES= to rehearse on the CPU" if machine.device == "cuda" else ""
        lines.append(f"{settings.local_processes} processes on {gpus} {machine.name}: pass --num_processes {gpus}{cpu}")
    if settings.ram_efficient and settings.fsdp.ignored_modules:
        lines.append(
            f"fsdp_ignored_modules {settings.fsdp.ignored_modules} with fsdp_cpu_ram_efficient_loading, which sends "
            "shards, and they are none: set the key to false"
        )
    if settings.compile and settings.compile_mode in CAPTURES:
        lines.append(
            f"dynamo_mode: {settings.compile_mode} captures each block in CUDA graphs, which on a GPU write over "
            "gradients that several backward passes should add up (pytorch/pytorch#96693): use dynamo_mode: default"
        )
    lines += fsdp.problems(settings.fsdp)
    lines += settings.rules.problems(settings)
    lines += deepspeed.problems(settings.deepspeed, "deepspeed" in machine.packages)
    if precision == "bf16" and machine.capability and machine.capability < (8, 0):
        has = "{}.{}".format(*machine.capability)
        lines.append(f"bf16 needs compute capability 8.0, {machine.name} has {has}: use an fp16 config")
    compiles = "dynamo_config" if settings.compile else fp8.rules_of(settings.fp8).compiles
    if gpus and compiles and machine.lacks:
        lines.append(
            f"{compiles} compiles kernels on the GPU, which needs a C compiler and Python's headers, and here is "
            f"no {' and no '.join(machine.lacks)}: install gcc and python3-dev, or use "
            f"{strategy}_bf16"
        )
    return [*lines, *fp8.problems(settings, machine)]


def notes(settings: Settings, machine: "Machine") -> list[str]:
    """What runs otherwise than the config's words say, with the same result, or slower than it could on this machine:
    one line each."""
    lines = list(fsdp.notes(settings.fsdp, settings.strategy))
    if settings.sharded and settings.fsdp.ram_efficient and settings.mesh.tp > 1:
        lines.append("fsdp_cpu_ram_efficient_loading: ignored, each process splits the layers that it has built")
    elif settings.built_once and settings.num_processes > 1 and not settings.ram_efficient:
        key = "zero3_init_flag" if settings.deepspeed.init else "fsdp_cpu_ram_efficient_loading"
        lines.append(
            f"{key} is off with -m faithful: each process builds the whole model before it is sharded. "
            f"{ONCE}=1 turns it on, for a script that uses no weights before prepare()"
        )
    if settings.compile and settings.whole_model:
        lines.append("the model's blocks are compiled one by one, as dynamo_use_regional_compilation: true says it")
    if machine.devices:
        lines += fp8.rules_of(settings.fp8).slower(settings)
    return [*lines, *deepspeed.notes(settings.deepspeed), *settings.fp8.notes]


def port_in_use(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return True
    return False
