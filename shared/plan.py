"""The launch: what was asked, what is there, and one Plan.

`resolve()` reads what `accelerate launch` (or torchrun, or nothing) has left in the environment, looks at the machine,
and refuses with every reason at once (shared/rules.py), or returns a frozen Plan. Where there is no accelerator it
makes Accelerate run the same strategy on the CPU.
"""

import dataclasses
import datetime
import functools
import os
import sys
import warnings
from hashlib import sha256
from pathlib import Path

from shared import processes
from shared.args import Refused, key_values
from shared.rules import TAILS, asked, exported, file_problems, fp8_packages, problems


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
    ckpt: bool = False  # activation checkpointing: each block's activations are computed again, not kept
    noreshard: bool = False  # FSDP2 that keeps parameters gathered between forward and backward: ZeRO-2
    replicas: int = 1  # hsdp: groups of processes that each hold the whole model
    split: int = 1  # tp: processes that compute one batch together
    rehearsal: bool = False
    emulated: bool = False

    def kwargs(self, gradient_accumulation_steps=1, grad_scaler=""):
        """Arguments for `Accelerator(...)`.

        grad_scaler: options of fp16's GradScaler, "init_scale=1024,growth_interval=100": no Accelerate YAML carries
        them.
        """
        import torch
        from accelerate.utils import (
            DataLoaderConfiguration,
            FullyShardedDataParallelPlugin,
            GradScalerKwargs,
            InitProcessGroupKwargs,
        )

        exported = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", gradient_accumulation_steps))
        if exported != gradient_accumulation_steps:  # Accelerate would let the environment win, silently
            raise Refused(
                f"--gradient_accumulation_steps {gradient_accumulation_steps}, but the launcher exports {exported}: "
                "say it in one place"
            )
        kwargs = {
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "dataloader_config": DataLoaderConfiguration(non_blocking=True),
            "kwargs_handlers": [InitProcessGroupKwargs(timeout=patience())] if self.num_processes > 1 else [],
        }
        options = {"init_scale": float, "growth_factor": float, "backoff_factor": float, "growth_interval": int}
        scaling = key_values(grad_scaler, options)
        if grad_scaler:
            if self.precision != "fp16":
                raise Refused(f"--grad_scaler is for fp16 configs, this run is {self.precision}: leave it out")
            kwargs["kwargs_handlers"].append(GradScalerKwargs(**scaling))
        if self.compile:  # precision.prepare does it: Accelerate would compile DDP's wrapper, hooks and all
            kwargs["dynamo_backend"] = "no"
        if self.precision == "fp8":  # the rest is shared/fp8.py's: Accelerate's own FP8 paths are unsound
            kwargs["mixed_precision"] = "bf16"
            os.environ.pop("ACCELERATE_FP8_BACKEND", None)  # it would convert all the same
        sharded = self.strategy in ("fsdp", "hsdp")
        if self.implementation == "torchao" and sharded:  # here Accelerate's path is sound, and it alone can
            from accelerate.utils import AORecipeKwargs

            from shared.fp8 import torchao_config

            kwargs["kwargs_handlers"].append(AORecipeKwargs(config=torchao_config(self)))
        if self.strategy.startswith("zero"):
            from shared import zero

            kwargs["deepspeed_plugin"] = zero.plugin(self, scaling)
        if self.strategy == "hsdp":  # Accelerate's own way to its mesh; once per process on the console
            warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh")
        if sharded:
            from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

            # Accelerate alone would reduce gradients in 16 bit, and pin host memory where there is no accelerator.
            dtype = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else None
            kwargs["fsdp_plugin"] = FullyShardedDataParallelPlugin(
                mixed_precision_policy=policy,
                cpu_offload=CPUOffloadPolicy(pin_memory=not self.rehearsal) if self.offload else None,
                activation_checkpointing=self.ckpt and self.implementation != "transformer_engine",  # shared/te.py
            )
        return kwargs


def machine_of_torch():
    """The same, as the running process sees it (any accelerator that torch knows)."""
    import torch

    if not torch.accelerator.is_available():
        return {"device": "cpu", "devices": 0, "name": "CPU", "capability": None, "packages": fp8_packages()}
    device = torch.accelerator.current_accelerator().type
    cuda = device == "cuda"
    return {
        "device": device,
        "devices": torch.accelerator.device_count(),
        "name": torch.cuda.get_device_name() if cuda else device,
        "capability": torch.cuda.get_device_capability() if cuda else None,
        "cuda": torch.version.cuda,
        "packages": fp8_packages(),
    }


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
        for key in (
            "strategy",
            "precision",
            "backend",
            "level",
            "compile",
            "offload",
            "ckpt",
        ):  # what the command line or a trap has changed
            if says[key] != wanted[key]:
                lines.append(
                    f"{file.name} says {key} {says[key]}, the launch made it {wanted[key]}: launch it as it is"
                )
    lines += problems(wanted, here)
    if lines:
        raise Refused("\n".join(dict.fromkeys(lines)))
    cpu, backend = not here["devices"], wanted["backend"]
    real = {"ao": "torchao", "te": "transformer_engine", "msamp": "amp8", None: "torch"}[backend]
    in_software = (backend == "ao" and wanted["strategy"] in ("single", "ddp")) or backend == "te"
    plan = Plan(
        config=file.stem if file else None,
        device=here["device"],
        rehearsal=cpu,
        implementation="emulated" if cpu and in_software else real,
        emulated=backend is not None and (here["capability"] or (0, 0)) < (8, 9),
        **{field.name: wanted[field.name] for field in dataclasses.fields(Plan) if field.name in wanted},
    )
    if cpu:  # DeepSpeed, where it is installed, would tell every run that there is no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if plan.num_processes > 1:  # the groups that FSDP2 and DeepSpeed make of processes take the defaults
        from torch.distributed import distributed_c10d

        distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = patience()
        processes.meet(patience())
    if plan.rehearsal and plan.strategy != "single":
        rehearse(plan)
    return plan


def patience():
    """How long a collective waits for a process that does not answer. Torch's own: gloo 30 minutes, NCCL 10."""
    seconds = os.environ.get("COLLECTIVE_TIMEOUT", "600")
    if not seconds.isdigit() or not int(seconds):
        raise Refused(f"COLLECTIVE_TIMEOUT={seconds}: seconds, a whole number from 1 on")
    return datetime.timedelta(seconds=int(seconds))


def rehearse(plan):
    """Start the process group on gloo and make Accelerate take this CPU for a device of `plan.strategy`.

    Accelerate alone would start unrelated copies of "rank 0 of 1" here. The only door to FSDP2 on a CPU is its private
    state, hence the bounded version in pyproject.toml and the tests that look at real shards.
    """
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if plan.strategy.startswith("zero"):
        from shared import zero

        return zero.rehearse(patience())
    PartialState(cpu=True, timeout=patience())
    if plan.strategy in ("fsdp", "hsdp", "tp"):
        PartialState._shared_state["device"] = torch.device("cpu")
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def code_sha256(recipe):
    """One hash over the recipe's file, shared/ and amp8/: whether two runs were computed by the same lines."""
    root = Path(__file__).resolve().parents[1]
    files = [Path(recipe), *sorted(root.glob("shared/*.py")), *sorted(root.glob("amp8/*.py"))]
    text = b"".join(file.name.encode() + b"\0" + file.read_bytes() for file in files if file.is_file())
    return sha256(text).hexdigest()


def describe(plan):
    """`ddp x2 | bf16`, with what else was asked for."""
    parts = [f"{plan.strategy} x{plan.num_processes}" if plan.num_processes > 1 else plan.strategy]
    parts.append(" ".join(word for word in (plan.precision, plan.backend, plan.level) if word))
    parts += [word for word in TAILS if getattr(plan, word)]
    parts += ["rehearsal on a CPU"] if plan.rehearsal else []
    return " | ".join(parts)


def say(text, file=sys.stdout):
    """Print on the main rank only, before there is an Accelerator to ask."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(text, file=file, flush=True)
