"""Runs one optimizer step of a recipe on fake tensors and counts the memory it would take at each moment.

The recipe's own `main` runs with another `Accelerator`. Its `prepare` makes the model's tensors fake and converts the
model to FP8 as in a rehearsal. Its `accumulate` counts tensors as they are made and freed, and ends the run after the
first step. A user's own script runs as it is: counting starts at `prepare`, and the optimizer's step ends the run.
"""

import contextlib
import importlib.util
import io
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import faithful
from faithful import arguments, backends
from faithful.backends.linear import refuse_unknown
from faithful.config.fp8 import rules_of
from faithful.config.strategies import FP8, STRATEGIES
from faithful.models import batch_norm
from faithful.models.blocks import block_names, name_blocks
from faithful.models.layers import FP8Layers, linear_names
from faithful.plan import Plan
from faithful.strategies import tp
from faithful.training.clipping import GradientsElsewhere
from faithful.training.model import trains
from shared import args as options, dpo, images, pairs, sft, text
from shared.args import Refused
from tools.fake import Memory, Watch, make_fake, without_reading, without_storage, without_values

ORIGINAL = accelerate.Accelerator


class Enough(Exception):
    """Raised after the optimizer step, when everything is known."""


class Script:
    """A user's own script."""

    def __init__(self, path: Path) -> None:
        self.path = self.__file__ = path

    def run(self, argv: list[str], accelerator: "type[Traced]") -> None:
        """Runs the script with `argv`, and with `accelerator` in place of Accelerate's class."""
        modules: dict[str, Any] = sys.modules
        for name, module in list(modules.items()):
            if getattr(module, "Accelerator", None) is ORIGINAL and not name.startswith(("faithful", "tools")):
                module.Accelerator = accelerator
        before, faithful.Accelerator = (sys.argv, sys.path[:]), accelerator  # pyrefly: ignore[bad-assignment]
        sys.argv = [str(self.path), *argv]
        sys.path.insert(0, str(self.path.resolve().parent))
        try:
            runpy.run_path(str(self.path), run_name="__main__")
        except (Enough, Refused, faithful.Refused):
            raise
        except (Exception, SystemExit) as problem:
            what = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
            raise Refused(f"{self.path.name} cannot be run on tensors without values ({what})") from None
        finally:
            sys.argv, sys.path[:] = before
            del faithful.Accelerator  # its own comes with the next import
            for module in list(modules.values()):
                if getattr(module, "Accelerator", None) is accelerator:  # changed, or imported by the script
                    module.Accelerator = ORIGINAL


def load(recipe: Path) -> ModuleType | Script:
    """Loads a recipe as a module, or a user's own script as a Script."""
    if not re.search(r"^class Arguments\b", recipe.read_text(errors="replace"), re.M):
        return Script(recipe)
    spec: Any = importlib.util.spec_from_file_location(f"traced_{recipe.stem}", recipe)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    missing = [name for name in ("Accelerator", "Arguments", "main") if not hasattr(module, name)]
    if missing:
        raise Refused(f"{recipe.name} has no {', '.join(missing)}: it is not written as the recipes here are")
    return module


def zeros(accelerator: accelerate.Accelerator, model: nn.Module, loader: Any) -> torch.Tensor:
    """In place of the log-probabilities of a whole training set."""
    return loader.dataset.reference


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function` so that it is called once for each set of arguments."""
    results: dict[str, Any] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        key = repr((args, kwargs))
        if key not in results:
            results[key] = function(*args, **kwargs)
        return results[key]

    return call


# In place of what a recipe calls, while a trace runs: the data is read once for all traces.
READERS = ((images, "images"), (text, "texts"), (sft, "chats"), (pairs, "pairs"), (dpo, "preferences"))
INSTEAD: dict[Any, Any] = {(part, name): remembered(getattr(part, name)) for part, name in READERS}
INSTEAD[dpo, "reference"] = zeros


class Traced(accelerate.Accelerator):
    """Accelerate's own class on the CPU, which stops at the end of the first optimizer step."""

    trace: "Trace"  # of a subclass
    model: nn.Module
    optimizer: AcceleratedOptimizer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = arguments.keyword_arguments(args, kwargs)
        kept: dict[str, Any] = {
            name: given[name] for name in given if name not in (*arguments.OF_THE_CONFIG, "project_dir")
        }
        precision = "no" if self.trace.plan.precision == "fp32" else "bf16"
        nowhere: dict[str, Any] = {"log_with": None, "project_config": ProjectConfiguration(self.trace.folder)}
        super().__init__(**kept | {"cpu": True, "mixed_precision": precision} | nowhere)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        modules = [argument for argument in args if isinstance(argument, nn.Module)]
        models = list(filter(trains, modules))
        frozen = [module for module in modules if not trains(module)]  # a teacher, or an average of weights
        optimizers = [argument for argument in args if isinstance(argument, torch.optim.Optimizer)]
        if len(models) > 1 or len(models) != len(optimizers) or (models and self.trace.blocks is not None):
            raise Refused(
                f"{self.trace.name} prepares {len(models)} models and {len(optimizers)} optimizers in one call: "
                "estimate wants one of each, once"
            )
        prepared = {id(module): self.frozen(module) for module in frozen}
        if models:
            self.convert(models[0], optimizers[0])
            prepared |= {id(models[0]): self.model, id(optimizers[0]): self.optimizer}
        # A recipe's loaders and schedulers do nothing that matters here.
        for argument in args if self.trace.script else ():
            if id(argument) not in prepared:
                prepared[id(argument)] = super().prepare(argument)
        prepared = tuple(prepared.get(id(argument), argument) for argument in args)
        return prepared if len(prepared) > 1 else prepared[0]

    def frozen(self, model: nn.Module) -> nn.Module:
        """Makes a model that is not trained fake, and counts it."""
        make_fake(model)
        self.trace.frozen += sum(parameter.nbytes for parameter in model.parameters())
        return self.prepare_model(model, device_placement=False, evaluation_mode=True)

    def convert(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Makes the model fake and converts it. Sets `model` and `optimizer` to the prepared ones."""
        trace, fp8 = self.trace, self.trace.backend
        name_blocks(model)
        names = block_names(model) or []
        blocks = [module for module in model.modules() if type(module).__name__ in names]
        dtype = getattr(torch, trace.dtype) if trace.dtype else None
        make_fake(model, optimizer, dtype)
        if dtype:
            batch_norm.in_fp32(model)
        if trace.split > 1:
            tp.check(model, trace.split)  # raises Refused where it cannot be
        linear = linear_names(model)
        trace.blocks = [sum(p.numel() for p in block.parameters()) for block in blocks]
        if fp8:
            fp8.convert(model, optimizer)
            refuse_unknown(trace.plan.skip, linear)
            if not FP8Layers(fp8.kinds, model).linear:
                raise Refused("none of its Linear layers can be FP8")
        if trace.checkpointed:
            apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ in names)
        self.model = self.prepare_model(model, device_placement=False)
        self.optimizer = self.prepare_optimizer(  # pyrefly: ignore[bad-assignment]
            optimizer, device_placement=False
        )
        if fp8:
            fp8.after_prepare(model, self.optimizer, set())
        self.optimizer.optimizer.register_step_pre_hook(self.before_step)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(trace.memory.is_gradient)
        if trace.script:
            self.optimizer.optimizer.register_step_post_hook(self.enough)
            trace.watching.enter_context(Watch(trace.memory))

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        pass

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        with super().accumulate(*models), contextlib.nullcontext() if self.trace.script else Watch(self.trace.memory):
            yield
        if self.sync_gradients:
            self.enough()

    def enough(self, *_: object) -> NoReturn:
        self.trace.held = held(self.model, self.optimizer.optimizer) | {"frozen": self.trace.frozen}
        raise Enough

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        fp8 = self.trace.backend
        if isinstance(fp8, GradientsElsewhere):
            return fp8.clip_grad_norm_(list(parameters), max_norm)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def before_step(self, *_: object) -> None:
        self.trace.memory.on = False
        self.trace.gradients = gradients(self.model)
        if self.trace.checkpointed:
            raise Enough


class Trace:
    """The first steps of a recipe on fake tensors, in one process.

    split: the number of processes that would compute one batch together (tensor parallel), or 1. dtype: of the
    parameters, if not the model's; a recipe that has the option --dtype gets it instead.
    """

    def __init__(
        self,
        module: ModuleType | Script,
        plan: Plan,
        checkpointed: bool = False,
        split: int = 1,
        dtype: str | None = None,
    ) -> None:
        self.module: Any = module
        self.plan, self.checkpointed, self.split, self.dtype = plan, checkpointed, split, dtype
        self.name, self.script = Path(str(module.__file__)).name, isinstance(module, Script)
        self.backend = backends.get_backend(plan) if plan.backend else None
        self.memory, self.watching = Memory(), contextlib.ExitStack()
        self.blocks: list[int] | None = None  # parameters of each block
        self.gradients: dict[str, int] | None = None  # bytes, see `gradients`
        self.held: dict[str, Any] = {}  # see `held`
        self.frozen = 0  # bytes of models that are prepared and not trained

    def run(self, argv: list[str]) -> NoReturn:
        """Raises Enough at the end of the first optimizer step, and Refused for a script that has none."""
        accelerator = type("Accelerator", (Traced,), {"trace": self})
        self.watching.enter_context(mock.patch.dict(os.environ))  # `parse` says in it that --dtype is meant
        for (part, name), function in INSTEAD.items():
            self.watching.enter_context(mock.patch.object(part, name, function))
        if not self.script:
            args, self.module.Accelerator = options.parse(self.module.Arguments, argv), accelerator
        said = io.StringIO()  # of the recipe; its progress bar writes to stderr
        with (
            tempfile.TemporaryDirectory() as self.folder,
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            without_storage(),
            without_values(),
            without_reading(),
            self.watching,
        ):
            if self.script:
                self.module.run(argv, accelerator)
            else:
                self.module.main(args)  # pyrefly: ignore[unbound-name]
        raise Refused(f"{self.name} came to its end without an optimizer step")


def trace(
    module: ModuleType | Script,
    argv: list[str],
    precision: str,
    backend: str | None = None,
    level: str | None = None,
    fp8_options: dict[str, Any] | None = None,
    skip: Iterable[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """Runs the first steps of a recipe on fake tensors in one process and returns what they hold, in bytes. options: of
    Trace."""
    rules = rules_of(FP8(backend))
    plan = Plan(
        config=None,
        strategy="single",
        num_processes=1,
        precision=precision,
        device="cpu",
        backend=backend,
        level=level,
        fp8_options=fp8_options or {},
        skip=list(skip),
        rehearsal=True,
        emulated=bool(backend),
        implementation="emulated" if rules.in_software(STRATEGIES["single"], level) else rules.implementation,
    )
    traced = Trace(module, plan, **options)
    reset()
    try:
        traced.run(argv)
    except Enough:
        figures = {"blocks": traced.blocks, "gradients": traced.gradients, "moments": traced.memory.moments}
        return (
            {key: value for key, value in figures.items() if value is not None} | traced.held | {"precision": precision}
        )
    finally:
        reset()


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def gradients(model: nn.Module) -> dict[str, int]:
    """Bytes of the ordinary gradients, of those in bf16, and of the FP8 gradients that amp8 keeps beside parameters."""
    plain = [p for p in model.parameters() if not hasattr(p, "amp8_linear")]
    ordinary = [p.grad for p in plain if p.grad is not None]
    beside = [p.amp8_linear.gradient.codes for p in model.parameters() if hasattr(p, "amp8_linear")]
    return {
        "ordinary": sum(gradient.nbytes for gradient in ordinary),
        "bf16": sum(gradient.nbytes for gradient in ordinary if gradient.dtype == torch.bfloat16),
        "fp8": sum(codes.nbytes for codes in beside if codes is not None),
    }


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Bytes that stay in memory between steps. `fp8_optimizer`: the part that belongs to an MS-AMP level's layers."""
    moments = {
        id(p): sum(v.nbytes for k, v in s.items() if k != "step" and hasattr(v, "nbytes"))
        for p, s in optimizer.state.items()
    }
    states = [v for s in optimizer.state.values() for v in s.values() if getattr(v, "dtype", None) == torch.bfloat16]
    layers = [(p, p.amp8_linear) for p in model.parameters() if hasattr(p, "amp8_linear")]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "largest": max(p.numel() for p in model.parameters()),
        "weights": sum(p.nbytes for p in model.parameters()),
        "optimizer": sum(moments.values()),
        "bf16_weights": sum(
            p.nbytes for p in model.parameters() if p.dtype == torch.bfloat16 and not hasattr(p, "amp8_linear")
        ),
        "bf16_state": sum(state.nbytes for state in states),  # of the optimizer's
        "master": sum(layer.master.nbytes for _, layer in layers if layer.master is not None),
        "fp8_optimizer": sum(moments.get(id(p), 0) for p, _ in layers),
    }
