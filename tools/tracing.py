"""Runs one optimizer step of a recipe on fake tensors and counts the memory it would take at each moment.

The recipe's own `main` runs with another `Accelerator`. Its `prepare` makes the model's tensors fake and converts the
model to FP8 as in a rehearsal. Its `accumulate` counts tensors as they are made and freed, and ends the run after the
first step. A user's own script runs as it is: counting starts at `prepare`, and the optimizer's step ends the run.
"""

import contextlib
import importlib.util
import io
import re
import runpy
import sys
import tempfile
import weakref
from pathlib import Path
from unittest import mock

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import faithful
from faithful import arguments, backends
from faithful.backends.linear import linear_names, refuse_unknown
from faithful.evidence import converted
from faithful.plan import Plan
from faithful.strategies import tp, zero
from shared import args as options
from shared import data, text
from shared.args import Refused

ORIGINAL = accelerate.Accelerator


class Enough(Exception):
    """Raised after the optimizer step, when everything is known."""


class Memory:
    """Counts the bytes of tensors that were made while `watch` is active and are still in use.

    moments: (gradients, others) of every moment that no other moment exceeds in both.
    """

    def __init__(self):
        self.sizes, self.gradients, self.live, self.of_gradients, self.moments = {}, set(), 0, 0, []
        self.on = True

    def born(self, storage):
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self.died, key)
            self.note()

    def died(self, key):
        size = self.sizes.pop(key)
        self.live -= size
        if key in self.gradients:
            self.gradients.remove(key)
            self.of_gradients -= size

    def is_gradient(self, parameter):
        """Hook that runs after a gradient was accumulated into `parameter`."""
        key = parameter.grad.untyped_storage()._cdata
        if key in self.sizes and key not in self.gradients:
            self.gradients.add(key)
            self.of_gradients += self.sizes[key]
            self.note()

    def note(self):
        g, o = self.of_gradients, self.live - self.of_gradients
        if not any(g <= g_ and o <= o_ for g_, o_ in self.moments):
            self.moments = [(g_, o_) for g_, o_ in self.moments if g_ > g or o_ > o] + [(g, o)]

    def watch(self):
        memory = self

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                if not memory.on:
                    return out
                known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
                for tensor in tree_leaves(out):  # a view, or the result of an operation in place, is not born
                    if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                        memory.born(tensor.untyped_storage())
                return out

        return Watch()


@contextlib.contextmanager
def without_storage():
    """Puts every parameter that a module registers on `meta`, so that a model of any size can be built."""

    def register(module, name, parameter):
        if parameter is not None and parameter.device.type != "meta":
            return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(register)
    looks_at_values, nn.init._no_grad_trunc_normal_ = nn.init._no_grad_trunc_normal_, lambda tensor, *_, **__: tensor
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = looks_at_values
        hook.remove()
        torch.set_grad_enabled(True)


def make_fake(model, optimizer, dtype=None):
    """Replaces parameters on `meta` by fake tensors on the CPU, for which autocast and kernels choose as for real ones.
    dtype: of the parameters, if not the model's own."""
    mode, made = FakeTensorMode(allow_non_fake_inputs=True), {}  # the batch and the buffers are real
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and id(old) not in made:  # else it is tied to one that came before
                with mode:
                    fake = torch.empty_like(old, device="cpu", dtype=dtype or old.dtype)
                    made[id(old)] = nn.Parameter(fake, requires_grad=old.requires_grad)
            module._parameters[name] = old if old is None else made[id(old)]
    for group in optimizer.param_groups:
        group["params"] = [made[id(old)] for old in group["params"]]


@contextlib.contextmanager
def without_values():
    """Makes amp8 allocate tensors of the right size without computing their values.

    It rounds and steps in small pieces, to be fast: for a large model that is a million operations, each of which takes
    a fake tensor as long as a real one of a few thousand elements.
    """
    try:
        from amp8 import emulate, gradients, optimizer, scaling
    except ModuleNotFoundError:  # a copied project without FP8
        yield
        return

    def rounded(x, *_):
        return x.new_empty(x.shape, dtype=torch.bfloat16)

    def operand(x, scale, dtype):  # as on a GPU
        return x if x.dtype == dtype else x.new_empty(x.shape, dtype=dtype)

    def amax(x, dim=None):
        return x.new_zeros((), dtype=torch.float32)

    with (
        mock.patch.object(scaling, "amax", amax),
        mock.patch.object(scaling, "round_codes", rounded),
        mock.patch.object(scaling, "operand", operand),
        mock.patch.object(scaling, "in_pieces", lambda function, x: operand(x, None, scaling.E4M3)),
        mock.patch.object(emulate, "_rounded", rounded),
        mock.patch.object(gradients, "norms", lambda codes: torch.ones(len(codes))),
        mock.patch.object(optimizer, "adam_slice", lambda *_: torch.ones(3)),
        mock.patch.object(optimizer, "SLICE", 1 << 62),
    ):
        yield


@contextlib.contextmanager
def without_reading():
    """Lets a script read a value that does not exist, for example its loss in order to log it: it reads 0. A script
    that moves its model to a device moves nothing."""
    item, number, truth = torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__bool__

    def instead(real, value):
        return lambda tensor: value if isinstance(tensor, FakeTensor) else real(tensor)

    move = nn.Module.to

    def stay(module, *args, **kwargs):
        if not any(parameter.is_meta for parameter in module.parameters()):
            return move(module, *args, **kwargs)
        dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
        return module if dtype is None else move(module, dtype)

    with (
        mock.patch.object(nn.Module, "to", stay),
        mock.patch.object(torch.Tensor, "item", instead(item, 0.0)),
        mock.patch.object(torch.Tensor, "__float__", instead(number, 0.0)),
        mock.patch.object(torch.Tensor, "__bool__", instead(truth, False)),
    ):
        yield


class Script:
    """A user's own script."""

    def __init__(self, path):
        self.path = self.__file__ = path

    def run(self, argv, accelerator):
        """Runs the script with `argv`, and with `accelerator` in place of Accelerate's class."""
        for name, module in list(sys.modules.items()):
            if getattr(module, "Accelerator", None) is ORIGINAL and not name.startswith(("faithful", "tools")):
                module.Accelerator = accelerator
        before, faithful.Accelerator = (sys.argv, sys.path[0]), accelerator
        sys.argv, sys.path[0] = [str(self.path), *argv], str(self.path.resolve().parent)
        try:
            runpy.run_path(str(self.path), run_name="__main__")
        except (Enough, Refused, faithful.Refused):
            raise
        except (Exception, SystemExit) as problem:
            what = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
            raise Refused(f"{self.path.name} cannot be run on tensors without values ({what})") from None
        finally:
            sys.argv, sys.path[0] = before
            del faithful.Accelerator  # its own comes with the next import
            for module in list(sys.modules.values()):
                if getattr(module, "Accelerator", None) is accelerator:  # changed, or imported by the script
                    module.Accelerator = ORIGINAL


def load(recipe):
    """Loads a recipe as a module, or a user's own script as a Script."""
    if not re.search(r"^class Arguments\b", recipe.read_text(), re.M):
        return Script(recipe)
    spec = importlib.util.spec_from_file_location(f"traced_{recipe.stem}", recipe)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for part, name in ((data, "images"), (text, "texts")):  # each trace begins as a run does, and reads the same data
        if not hasattr(getattr(part, name), "remembers"):
            setattr(part, name, remembered(getattr(part, name)))
    missing = [name for name in ("Accelerator", "Arguments", "main") if not hasattr(module, name)]
    if missing:
        raise Refused(f"{recipe.name} has no {', '.join(missing)}: it is not written as the recipes here are")
    return module


def remembered(function):
    """Wraps `function` so that it is called once for each set of arguments."""
    found = {}

    def call(*args, **kwargs):
        key = repr((args, kwargs))
        if key not in found:
            found[key] = function(*args, **kwargs)
        return found[key]

    call.remembers = True
    return call


def trace(
    module,
    argv,
    precision,
    backend=None,
    level=None,
    fp8_options=None,
    checkpointed=False,
    skip=(),
    split=1,
    dtype=None,
):
    """Runs the first steps of a recipe on fake tensors in one process and returns what they hold, in bytes. split: the
    number of processes that would compute one batch together (tensor parallel), or 1."""
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
        implementation=backends.implementation(backend, "single", rehearsal=True),
    )
    fp8 = backends.of(plan) if backend else None
    memory, found, watching = Memory(), {}, contextlib.ExitStack()
    script = isinstance(module, Script)

    class Accelerator(accelerate.Accelerator):
        """Accelerate's own class on the CPU, which stops at the end of the first optimizer step."""

        def __init__(self, *args, **kwargs):
            kwargs = {
                name: value
                for name, value in arguments.given(args, kwargs).items()
                if name not in (*arguments.OF_THE_CONFIG, "project_dir")
            }
            kwargs |= {"cpu": True, "mixed_precision": "no" if precision == "fp32" else "bf16"}
            super().__init__(**kwargs | {"log_with": None, "project_config": ProjectConfiguration(folder)})

        def prepared_parameters(self):
            return set()  # the ids of the parameters of other prepared models

        def prepare(self, *args, **kwargs):
            models = [one for one in args if isinstance(one, nn.Module)]
            optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
            rest = [one for one in args if not isinstance(one, nn.Module | torch.optim.Optimizer)]
            if len(models) > 1 or len(models) != len(optimizers) or (models and "blocks" in found):
                raise Refused(
                    f"{Path(module.__file__).name} prepares {len(models)} models and {len(optimizers)} "
                    "optimizers in one call: estimate wants one of each, once"
                )
            made = {id(one): one for one in rest}
            if models:
                made |= zip((id(models[0]), id(optimizers[0])), self.pair(models[0], optimizers[0]), strict=True)
            if script:  # a recipe's loaders and schedulers do nothing that matters here
                for one in rest:
                    made[id(one)] = super().prepare(one)
            prepared = tuple(made[id(one)] for one in args)
            return prepared if len(prepared) > 1 else prepared[0]

        def pair(self, model, optimizer):
            names = set(getattr(model, "_no_split_modules", None) or ())
            blocks = [module for module in model.modules() if type(module).__name__ in names]
            make_fake(model, optimizer, script and dtype and getattr(torch, dtype))
            if script and dtype:
                zero.cast_inputs(model, getattr(torch, dtype))
            if split > 1:
                tp.check(model, split)  # raises Refused where it cannot be
            names_of_linear = linear_names(model)
            found["blocks"] = [sum(p.numel() for p in block.parameters()) for block in blocks]
            if fp8:
                fp8.convert(self, model, optimizer)
                refuse_unknown(plan.skip, names_of_linear)
                if not converted(fp8, model)[0]:
                    raise Refused("none of its Linear layers can be FP8")
            if checkpointed:
                apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ in names)
            self.model = self.prepare_model(model, device_placement=False)
            self.optimizer = self.prepare_optimizer(optimizer, device_placement=False)
            if fp8:
                fp8.after_prepare(self, model, self.optimizer)
            self.optimizer.optimizer.register_step_pre_hook(self.before_step)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(memory.is_gradient)
            if script:
                self.optimizer.optimizer.register_step_post_hook(self.enough)
                watching.enter_context(memory.watch())
            return self.model, self.optimizer

        def load_state(self, *args, **kwargs):
            pass

        @contextlib.contextmanager
        def accumulate(self, *models):
            with super().accumulate(*models), contextlib.nullcontext() if script else memory.watch():
                yield
            if self.sync_gradients:
                self.enough()

        def enough(self, *_):
            found.update(counted(self.model, self.optimizer.optimizer))
            raise Enough

        def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
            if fp8 and fp8.gradients_elsewhere:
                return fp8.clip_grad_norm_(self, list(parameters), max_norm, 2)
            return super().clip_grad_norm_(parameters, max_norm, norm_type)

        def before_step(self, *_):
            memory.on = False
            found["gradients"] = gradients(self.model)
            if checkpointed:
                raise Enough

    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    if not script:
        args, module.Accelerator = options.parse(module.Arguments, argv), Accelerator
    said = io.StringIO()  # of the recipe; its progress bar writes to stderr
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            without_storage(),
            without_values(),
            without_reading(),
            watching,
        ):
            module.run(argv, Accelerator) if script else module.main(args)
    except Enough:
        return found | {"moments": memory.moments, "precision": precision}
    finally:
        reset()
    raise Refused(f"{Path(module.__file__).name} came to its end without an optimizer step")


def gradients(model):
    """Bytes of the ordinary gradients, and of the FP8 gradients that amp8 keeps beside their parameters."""
    plain = [p for p in model.parameters() if not hasattr(p, "amp8_linear")]
    ordinary = sum(p.grad.nbytes for p in plain if p.grad is not None)
    beside = [p.amp8_linear.gradient.codes for p in model.parameters() if hasattr(p, "amp8_linear")]
    return {"ordinary": ordinary, "fp8": sum(codes.nbytes for codes in beside if codes is not None)}


def counted(model, optimizer):
    """Bytes that stay in memory between steps. `levels`: the part that belongs to an MS-AMP level's layers."""
    moments = {
        id(p): sum(v.nbytes for k, v in s.items() if k != "step" and hasattr(v, "nbytes"))
        for p, s in optimizer.state.items()
    }
    layers = [(p, p.amp8_linear) for p in model.parameters() if hasattr(p, "amp8_linear")]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": sum(p.nbytes for p in model.parameters()),
        "optimizer": sum(moments.values()),
        "master": sum(layer.master.nbytes for _, layer in layers if layer.master is not None),
        "levels": {"optimizer": sum(moments.get(id(p), 0) for p, _ in layers)},
    }
