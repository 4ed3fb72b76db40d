"""The arguments of `Accelerator(...)`: the script's, and those that the config adds.

If the two contradict each other, the run is refused with a message that names both.
"""

import errno
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.accelerator import Accelerator as Original
from accelerate.state import AcceleratorState, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import (
    DeepSpeedPlugin,
    DynamoBackend,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    LoggerType,
    TorchDynamoPlugin,
    broadcast_object_list,
)

from faithful.backends.base import Backend
from faithful.config import settings
from faithful.disk.names import short
from faithful.errors import Gone, Refused, working_folder_is_gone
from faithful.evidence.record import Record, default_folder
from faithful.plan import Plan, resolve, says_precision, timeout
from faithful.strategies.base import Strategy

NEEDLESS = {  # arguments of Accelerate's methods that have nothing to do here: why
    "safe_serialization": "a checkpoint is safetensors and JSON, never a pickle (save_model writes one)",
    "load_kwargs": "nothing is unpickled, and no tensor is converted on its way",
    "map_location": "values go into the tensors that are there, on their device",
    "strict": "a checkpoint is loaded whole, and refused if its names or shapes differ",
}
CURES = {"client_state": ": accelerator.register_for_checkpointing keeps objects of the script's"}
FP8_HANDLERS = {"FP8RecipeKwargs", "AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs"}
SECTIONS = {"fsdp": "fsdp_config", "deepspeed": "deepspeed_config", "dynamo": "dynamo_config",
            "torch": "parallelism_config", "parallelism": "parallelism_config"}  # fmt: skip
PRECISION_OPTIONS = ("precision", "fp16", "bf16", "fp32", "amp")
OF_THE_CONFIG = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin",
                 "parallelism_config", "dynamo_backend", "dynamo_plugin")  # fmt: skip


def keyword_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """{name: value} of what a script passed to `Accelerator(*args, **kwargs)`, without Accelerate's defaults."""
    parameters = list(inspect.signature(Original.__init__).parameters.values())[1:]
    named = dict(zip([p.name for p in parameters], args, strict=False)) | kwargs
    defaults = {p.name: p.default for p in parameters}
    return {name: value for name, value in named.items() if value is not defaults.get(name, inspect.Parameter.empty)}


def precision(script: dict[str, Any]) -> str | None:
    """What the script says of the precision where no config and no launcher does, or None."""
    passed = script.get("mixed_precision")
    return None if passed is None or says_precision() else str(passed)


def plan_for(script: dict[str, Any], earlier: list[Record]) -> Plan:
    """The Plan of this process. earlier: the records of the Accelerators that this script has created before."""
    return earlier[-1].plan if earlier and AcceleratorState._shared_state else resolve(precision(script))


def notes(plan: Plan, script: dict[str, Any]) -> Iterator[str]:
    """Yields the plan's notes, and one for each of the script's arguments that gives way to the config."""
    yield from plan.notes
    for _, both, _ in contradictions(plan, script) if settings.config_wins() else ():
        yield f"{both}: the config wins"
    if is_default(plan, script):
        yield f"the script passes mixed_precision='no', Accelerate's default: the config's {plan.precision} applies"


def is_default(plan: Plan, script: dict[str, Any]) -> bool:
    return (
        str(script.get("mixed_precision")) == "no"
        and says_precision()
        and plan.precision != "fp32"
        and not has_precision_option(sys.argv[1:])
    )


def has_precision_option(words: list[str]) -> bool:
    """Whether a command line has an option for the precision, which argparse lets one shorten."""
    for word in words:
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        if word.startswith("-") and (
            name in PRECISION_OPTIONS or (name[:3] == "mix" and "mixed_precision".startswith(name))
        ):
            return True
    return False


def with_config(plan: Plan, script: dict[str, Any], strategy: Strategy, backend: Backend) -> dict[str, Any]:
    """The script's arguments and the plan's, for Accelerate's Accelerator. Raises Refused with all contradictions."""
    refuse_missing_trackers(script.get("log_with"))
    given_by_script, script = script, dict(script)
    contradicting = list(contradictions(plan, script))
    if contradicting and not settings.config_wins():
        raise Refused("\n".join(f"{both}: {cure}, or launch with --config_wins" for _, both, cure in contradicting))
    for name, _, _ in contradicting:
        if name == "kwargs_handlers":
            script[name] = [
                handler for handler in script[name] if type(handler).__name__ not in {*FP8_HANDLERS, "GradScalerKwargs"}
            ]
        else:
            script.pop(name, None)
    handlers = list(script.pop("kwargs_handlers", None) or [])
    scaling = next((handler for handler in handlers if isinstance(handler, GradScalerKwargs)), None)
    if plan.num_processes > 1 and not any(isinstance(handler, InitProcessGroupKwargs) for handler in handlers):
        handlers.append(InitProcessGroupKwargs(timeout=timeout()))
    for name in ("mixed_precision", "cpu", *OF_THE_CONFIG):
        script.pop(name, None)
    arguments = strategy.arguments(scaling) | backend.arguments()
    if said := precision(given_by_script):
        arguments = {"mixed_precision": said} | arguments
    handlers += arguments.pop("kwargs_handlers", [])
    if AcceleratorState._shared_state:  # a second Accelerator shares the state of the first
        for name in OF_THE_CONFIG:
            arguments.pop(name, None)
    if plan.compile:  # blocks are compiled one by one; Accelerate would compile DDP's wrapper with its hooks
        arguments["dynamo_backend"] = "no"
    return {**script, **arguments, "kwargs_handlers": handlers}


def refuse_missing_trackers(asked: Any) -> None:
    """Raises Refused if a tracker that is asked for by name is none, or is not installed: Accelerate would leave that
    out."""
    asked = asked if isinstance(asked, list | tuple) else [asked]
    known = {*LoggerType.list(), *LOGGER_TYPE_TO_CLASS}  # a script registers its own there
    if unknown := [one for one in asked if isinstance(one, str) and one not in known]:
        names = ", ".join(sorted(map(str, known)))
        raise Refused(
            f"the script logs with {unknown[0]!r}, which Accelerate does not know: one of {names}, or leave it out"
        )
    named = [LoggerType(one) for one in asked if isinstance(one, str | LoggerType) and one in LoggerType]
    if LoggerType.ALL in named:
        return
    if missing := [str(one) for one in named if one not in get_available_trackers()]:
        packages = " ".join(dict.fromkeys(missing))
        with_recipes = " (in a clone: ./launch.sh setup --extra trackers)"
        raise Refused(
            f"the script logs with {', '.join(missing)}, which is not installed: pip install {packages}"
            f"{with_recipes if {*missing} <= {'tensorboard', 'trackio', 'wandb'} else ''}, or leave it out"
        )


def project(
    plan: Plan, merged: dict[str, Any], earlier: list[Record]
) -> tuple[str | Path | None, str | Path, str | Path]:
    """Returns (the script's project folder or None, its default, folder of the record). A run without one gets a new
    folder. earlier: the records of the Accelerators that this script has created before. The records of all are in
    different folders. The script's ProjectConfiguration stays as it is, because the script may give it to several."""
    configuration = merged.get("project_config")
    named = (configuration and configuration.project_dir) or merged.get("project_dir")
    folder = named or settings.default_project_dir()
    other = f"run_{len(earlier) + 1}"
    refuse_impossible(folder or "runs")
    if folder:
        taken = any(record.project == Path(folder).absolute() for record in earlier)
        return named, folder, Path(folder, other) if taken else folder
    if earlier:
        return None, earlier[0].folder / other, earlier[0].folder / other
    handlers = [each for each in merged["kwargs_handlers"] if isinstance(each, InitProcessGroupKwargs)]
    PartialState(**(handlers[0].to_kwargs() if handlers else {}))
    [folder] = broadcast_object_list([default_folder(plan)])
    return None, folder, folder


def refuse_impossible(folder: str | Path) -> None:
    """Raises Refused if nothing can ever be in this folder, or if there is no working folder."""
    if working_folder_is_gone():
        raise Gone
    try:
        os.stat(os.path.join(folder, "a" * 100))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            why = f"nothing can be in the project folder {short(str(folder))} ({error.strerror})"
            raise Refused(f"{why}: choose another") from None


def contradictions(plan: Plan, script: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields (argument, what script and config say, what to do) for each argument that contradicts the config."""
    planned = {"fp32": "no"}.get(plan.precision, plan.precision)
    passed = script.get("mixed_precision")
    if passed is not None and str(passed) != planned and not is_default(plan, script):
        first = AcceleratorState._shared_state and not says_precision()
        who = "first Accelerator" if first else "config"
        both = f"the script passes mixed_precision={str(passed)!r}, the {who} says {plan.precision}"
        yield "mixed_precision", both, "leave it out, or set mixed_precision in the YAML"
    if (script.get("cpu") or PartialState._shared_state.get("_cpu")) and not plan.rehearsal:
        yield "cpu", "the script passes cpu=True, the config asks for an accelerator", "leave it out"
    for name in OF_THE_CONFIG:
        if script.get(name) is not None and not as_planned(plan, script[name]):
            cure = f"leave it out, and set {SECTIONS.get(name.split('_')[0], 'it')} in the YAML"
            cure += " as zero3_sp_bf16.yml does" if getattr(script[name], "sp_size", 1) > 1 else ""
            yield name, f"the script passes {name}, which is the config's to say", cure
    for handler in script.get("kwargs_handlers") or []:
        kind = type(handler).__name__
        if kind in FP8_HANDLERS:
            cure = "leave it out, and set fp8_config in the YAML"
            yield "kwargs_handlers", f"the script passes {kind}, FP8 is the config's to say", cure
        if isinstance(handler, GradScalerKwargs) and plan.precision != "fp16":
            both = f"a gradient scaler (GradScalerKwargs) is for fp16, this run is {plan.precision}"
            yield "kwargs_handlers", both, "leave it out"
    steps, launched = own_accumulation(script), settings.exported_accumulation()
    if None not in (steps, launched) and steps != launched:  # in Accelerate the environment wins without a message
        both = f"the script's gradient_accumulation_steps is {steps}, the launcher exports {launched}"
        yield "gradient_accumulation_steps", both, "say it in one place"


def without_effect(record: Record, method: str, **given: tuple[Any, Any]) -> None:
    """Notes once, or refuses, each argument of one of Accelerate's methods that this class has no use for and that is
    not at its default. given: {name: (value, default)}."""
    for name, (value, default) in given.items():
        if value is default or value == default:
            continue
        said = f"{method}({name}={value!r})"[:200]
        if name not in NEEDLESS:
            raise Refused(f"{said}: it has no effect here, leave it out{CURES.get(name, '')}")
        record.note_once(f"{method} {name}", f"{said} has no effect: {NEEDLESS[name]}")


def own_accumulation(script: dict[str, Any]) -> int | None:
    """The steps of gradient accumulation that the script says, or None."""
    plugin = script.get("gradient_accumulation_plugin")
    return plugin.num_steps if plugin else script.get("gradient_accumulation_steps")


def as_planned(plan: Plan, plugin: Any) -> bool:
    """Whether a plugin agrees with the config. transformers' TrainingArguments make plugins from the environment."""
    if isinstance(plugin, str):  # dynamo_backend
        return plan.compile or plugin.lower() == "no"
    if isinstance(plugin, TorchDynamoPlugin):
        return plan.compile or plugin.backend == DynamoBackend.NO
    if not plan.strategy.startswith(f"zero{getattr(plugin, 'zero_stage', None)}"):
        return False
    return settings_of(plugin) == settings_of(type(plugin)())  # that of the launcher's environment


def settings_of(plugin: DeepSpeedPlugin) -> dict[str, Any]:
    """What a plugin asks for, without the precision, which TrainingArguments fill in, and what is "auto"."""
    settings = {key: value for key, value in plugin.deepspeed_config.items() if key not in ("fp16", "bf16")}
    zero = {key: value for key, value in settings.pop("zero_optimization", {}).items() if value != "auto"}
    return {key: value for key, value in settings.items() if value != "auto"} | {"zero": zero}
