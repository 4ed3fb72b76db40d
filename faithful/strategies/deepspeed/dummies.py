"""The optimizer and the scheduler of DeepSpeed's own file, for scripts with DummyOptim and DummyScheduler.

Such a script leaves both to the file. Here they become real objects before anything is prepared, so that a run is the
same as if the script had made them. An `auto` value is the dummy's.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler  # accelerate.utils has them only with DeepSpeed

from faithful import patches
from faithful.config import deepspeed
from faithful.errors import Refused


def real(config: dict[str, Any], processes: int, args: Iterable[Any]) -> tuple[Any, ...]:
    """`args` with the optimizer and the scheduler that deepspeed_config_file describes, in place of the script's
    DummyOptim and DummyScheduler. config: the plugin's mapping, from which they are taken out. processes: that have
    batches of their own."""
    args = list(args)
    for argument in args:
        for kind, dummy in (("optimizer", DummyOptim), ("scheduler", DummyScheduler)):
            its = torch.optim.Optimizer if kind == "optimizer" else torch.optim.lr_scheduler.LRScheduler
            if isinstance(argument, its) and kind in config:
                raise Refused(
                    f"deepspeed_config_file says the {kind} {config[kind].get('type')}, the script makes "
                    f"{type(argument).__name__}: leave the file's out, or make a {dummy.__name__}"
                )
            if isinstance(argument, dummy) and kind not in config and not callable_of(argument):
                raise Refused(
                    f"the script makes a {dummy.__name__}, and no deepspeed_config_file says the {kind}: add it"
                )
    dummy_optimizer = next((argument for argument in args if isinstance(argument, DummyOptim)), None)
    if dummy_optimizer is None and any(callable_of(argument) for argument in args):
        raise Refused(
            "DummyScheduler with lr_scheduler_callable is for a script that makes a DummyOptim: make the "
            "scheduler itself beside an optimizer of torch"
        )
    if dummy_optimizer is None:
        return tuple(args)
    optimizer = optimizer_of(config.pop("optimizer"), dummy_optimizer)
    for at, argument in enumerate(args):
        if isinstance(argument, DummyScheduler):
            args[at] = scheduler_of(config.pop("scheduler", None), argument, dummy_optimizer, optimizer, processes)
        elif argument is dummy_optimizer:
            args[at] = optimizer
    config.pop("scheduler", None)
    return tuple(args)


def callable_of(dummy: object) -> Callable[..., Any] | None:
    """The function with which a DummyScheduler makes the scheduler itself, or None."""
    return dummy.lr_scheduler_callable if isinstance(dummy, DummyScheduler) else None


def optimizer_of(section: dict[str, Any], dummy: DummyOptim) -> torch.optim.Optimizer:
    kind, said = section["type"], dict(section.get("params", {}))
    decoupled = said.pop("adam_w_mode", True) or kind == "AdamW"
    makes = {
        "AdamW": torch.optim.AdamW,
        "Adam": torch.optim.AdamW if decoupled else torch.optim.Adam,
        "SGD": torch.optim.SGD,
    }
    if kind not in makes:
        raise Refused(
            f"optimizer {kind} of deepspeed_config_file is not one of {', '.join(makes)}: make it in the script"
        )
    values: dict[str, Any] = {"lr": dummy.lr, "weight_decay": dummy.weight_decay} | deepspeed.explicit(said)
    values = {key: value for key, value in values.items() if key not in ("torch_adam", "bias_correction")}
    return makes[kind](list(dummy.params), **values)


def scheduler_of(
    section: dict[str, Any],
    dummy: DummyScheduler,
    dummy_optimizer: DummyOptim,
    optimizer: torch.optim.Optimizer,
    processes: int,
) -> Any:
    """The scheduler, which DeepSpeed's engine steps once in each optimizer step: that of the script's function, which
    comes before the file's, as in DeepSpeed, or the file's."""
    from deepspeed.runtime import lr_schedules

    if makes := callable_of(dummy):
        scheduler = makes(optimizer)
        # Accelerate hands the engine only schedulers of these names.
        names = [*lr_schedules.VALID_LR_SCHEDULES, type(scheduler).__name__]
        patches.replace("deepspeed.runtime.lr_schedules:VALID_LR_SCHEDULES", names)
        return scheduler
    if section["type"] not in lr_schedules.VALID_LR_SCHEDULES:
        raise Refused(
            f"scheduler {section['type']} of deepspeed_config_file is not one of "
            f"{', '.join(lr_schedules.VALID_LR_SCHEDULES)}: make it in the script"
        )
    total = dummy.total_num_steps
    auto = {
        "warmup_min_lr": 0,
        "warmup_max_lr": dummy_optimizer.lr,
        "warmup_num_steps": max(1, dummy.warmup_num_steps),
        "total_num_steps": total and math.ceil(total / processes),
    }
    values = {key: auto.get(key) if value == "auto" else value for key, value in section.get("params", {}).items()}
    if missing := [key for key, value in values.items() if value is None and section["params"][key] == "auto"]:
        raise Refused(
            f"scheduler {section['type']} of deepspeed_config_file leaves {', '.join(missing)} to the "
            "script: pass DummyScheduler a number, or write it in the file"
        )
    return getattr(lr_schedules, section["type"])(optimizer, **values)
