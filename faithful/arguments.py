"""The arguments of `Accelerator(...)`: those of the script, and those that the config's plan adds.

Where the two contradict each other the run is refused, with both sides named. Nothing is overruled in silence.
"""

import inspect

import accelerate
from accelerate.utils import GradScalerKwargs, InitProcessGroupKwargs

from faithful import backends, strategies
from faithful.config import exported_accumulation
from faithful.errors import Refused
from faithful.plan import patience

FP8_HANDLERS = {"FP8RecipeKwargs", "AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs"}
OF_THE_CONFIG = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin",
                 "parallelism_config", "dynamo_backend", "dynamo_plugin")  # fmt: skip


def given(args, kwargs):
    """What a script passed to `Accelerator(*args, **kwargs)`, by name, without what equals Accelerate's defaults."""
    parameters = list(inspect.signature(accelerate.Accelerator.__init__).parameters.values())[1:]
    named = dict(zip([p.name for p in parameters], args, strict=False)) | kwargs
    defaults = {p.name: p.default for p in parameters}
    return {name: value for name, value in named.items() if value is not defaults.get(name, inspect.Parameter.empty)}


def merged(plan, script):
    """Arguments for accelerate's Accelerator: the script's and the plan's. Raises Refused with all contradictions."""
    script = dict(script)
    lines = contradictions(plan, script)
    if lines:
        raise Refused("\n".join(lines))
    handlers = list(script.pop("kwargs_handlers", None) or [])
    scaling = next((handler for handler in handlers if isinstance(handler, GradScalerKwargs)), None)
    if plan.num_processes > 1 and not any(isinstance(handler, InitProcessGroupKwargs) for handler in handlers):
        handlers.append(InitProcessGroupKwargs(timeout=patience()))
    script.pop("mixed_precision", None)
    script.pop("cpu", None)
    arguments = strategies.of(plan).arguments(plan, scaling) | backends.of(plan).arguments(plan)
    handlers += arguments.pop("kwargs_handlers", [])
    if plan.compile:  # each block is compiled in place: Accelerate would compile DDP's wrapper, hooks and all
        arguments["dynamo_backend"] = "no"
    return {**script, **arguments, "kwargs_handlers": handlers}


def contradictions(plan, script):
    """One line for each thing that the script asks for and the config does not."""
    lines = []
    precision = {"fp32": "no"}.get(plan.precision, plan.precision)
    asked = script.get("mixed_precision")
    if asked is not None and str(asked) != precision:
        lines.append(
            f"the script passes mixed_precision={str(asked)!r}, the config says {precision}: leave it out of the script"
        )
    if script.get("cpu") and not plan.rehearsal:
        lines.append("the script passes cpu=True, the config asks for an accelerator: leave it out of the script")
    for name in OF_THE_CONFIG:
        if script.get(name) is not None:
            lines.append(f"the script passes {name}, which is the config's to say: leave it out of the script")
    handlers = script.get("kwargs_handlers") or []
    for handler in handlers:
        if type(handler).__name__ in FP8_HANDLERS:
            lines.append(f"the script passes {type(handler).__name__}, FP8 is the config's to say: leave it out")
        if isinstance(handler, GradScalerKwargs) and plan.precision != "fp16":
            lines.append(
                f"a gradient scaler (GradScalerKwargs) is for fp16, this run is {plan.precision}: leave it out"
            )
    plugin = script.get("gradient_accumulation_plugin")
    steps = plugin.num_steps if plugin else script.get("gradient_accumulation_steps", 1)
    if (launched := exported_accumulation()) not in (None, steps):  # Accelerate would let the environment win, silently
        lines.append(f"the script passes gradient_accumulation_steps={steps}, the launcher exports {launched}: "
                     "say it in one place")  # fmt: skip
    return lines
