"""FP8 by config: which Linear layers become what, and what keeps them right while they train.

backend  on a GPU                on a CPU                                     converted
ao       torchao's Float8Linear  its numerics (amp8/emulate.py); under FSDP2  Linear but the first and the last
                                 torchao's own layers
te       te.Linear, te.LayerNorm TE's scaling (amp8/emulate.py)               Linear, on a GPU LayerNorm too
msamp    amp8's levels           the same, product on dequantised values      Linear

Accelerate is asked for bf16 and, but for torchao under FSDP2, knows nothing of it: alone it would orphan torchao's
weights outside FSDP2, stop TE's conversion at the first odd shape, drop TE's options, and scale MS-AMP's loss without
scaling it back.
"""

import contextlib
import logging

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shared import te
from shared.args import Refused

# torchao registers an enum in a way that torch warns of, in every process. Nothing depends on it, no user can mend it.
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "KernelPreference" not in record.getMessage())


def convert(accelerator, plan, model, optimizer):
    """Converts `model` in place as the plan says. Returns (optimizer, [(name, reason)] of Linear layers left alone).

    The optimizer goes on owning the parameters; msamp returns another one that shares its param_groups.
    """
    linear = [name for name, module in model.named_modules() if is_linear(module)]
    if plan.backend == "msamp":
        amp8 = ours("amp8")
        options = {key: value for key, value in plan.fp8_options.items() if key != "recipe"}
        recipe = {"recipe": "te_delayed", "recipe_options": options} if options else {}
        try:
            model, optimizer = amp8.initialize(model, optimizer, plan.level.upper(), **recipe)
        except (TypeError, ValueError) as error:  # one line, that says what to do
            raise Refused(f"asked for fp8: {error}") from None
        skipped = [tuple(entry) for entry in amp8.report(model)["skipped"]]
    elif plan.implementation == "transformer_engine":
        skipped = left_alone(model, te.multiple(plan))
        te.convert(model, plan, dict(skipped))
    else:
        skipped = left_alone(model)
        if plan.backend == "ao":
            skipped += [(name, "first or last Linear") for name in {linear[0], linear[-1]} - dict(skipped).keys()]
        wanted = set(linear) - dict(skipped).keys()
        if not wanted:
            pass  # Evidence refuses it, with the reasons
        elif plan.implementation == "torchao":
            chosen = {"module_filter_fn": lambda module, name: name in wanted}
            if accelerator.ao_recipe_handler is not None:  # under FSDP2 Accelerate converts, between its own steps
                accelerator.ao_recipe_handler.module_filter_func = chosen["module_filter_fn"]
            else:
                from torchao.float8 import convert_to_float8_training

                convert_to_float8_training(model, config=torchao_config(plan), **chosen)
        else:
            emulate = ours("amp8.emulate")
            options = plan.fp8_options if plan.backend == "te" else {}
            emulate.convert(model, plan.level, lambda module, name: name in wanted, **options)
            # Each rank records amaxes of its own; DDP would overwrite them with rank 0's before they are reduced.
            scales = [name for name, _ in model.named_buffers() if ".fp8_" in name]
            model._ddp_params_and_buffers_to_ignore = scales
    return optimizer, skipped


# What computes in FP8: (Linear, LayerNorm) in one such layer. TE's blocks are made of the last two.
KINDS = {
    "torchao.Float8Linear": (1, 0),
    "amp8.EmulatedLinear": (1, 0),
    "amp8.FP8Linear": (1, 0),
    "amp8.FP8Conv1D": (1, 0),
    "transformer_engine.Linear": (1, 0),
    "transformer_engine.LayerNorm": (0, 1),
    "transformer_engine.LayerNormLinear": (1, 1),
    "transformer_engine.LayerNormMLP": (2, 1),
}


def kind(module):
    """`package.Class`; of a module that FSDP2 shards, whose class is FSDP2's own subclass, the one it was."""
    own = next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))
    return f"{own.__module__.split('.')[0]}.{own.__name__}"


def converted(model):
    """(Linear, LayerNorm) layers of the live model that compute in FP8, by their classes."""
    counts = [KINDS[kind(module)] for module in model.modules() if kind(module) in KINDS]
    return sum(linear for linear, _ in counts), sum(norm for _, norm in counts)


def share(model):
    """Which part of the model's parameters is in layers that compute in FP8."""
    inside = {p for m in model.modules() if kind(m) in KINDS for p in m.parameters(recurse=False)}

    def elements(parameters):  # DeepSpeed's stage 3 has released them: their own size is 0
        return sum(getattr(p, "ds_numel", p.numel()) for p in parameters)

    return elements(inside) / elements(model.parameters())


def ours(name):
    """The folder `amp8`, which a copied project has only if it needs it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("amp8"):
            raise
        raise Refused(
            "this config needs the folder amp8/ beside shared/: copy it from where this recipe is from"
        ) from None


def is_linear(module):
    """torch's Linear, or transformers' Conv1D (GPT-2), which is one with its weight transposed."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def left_alone(model, multiple=16):
    """[(name, reason)] of the Linear layers that torchao and TransformerEngine cannot take or must not."""
    users = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name.removesuffix(".weight"))
    skipped = []
    for name, module in model.named_modules():
        if not is_linear(module):
            continue
        odd = [size for size in module.weight.shape if size % multiple]
        others = [user for user in users[module.weight] if user != name]
        if type(module) is not nn.Linear:  # a subclass has a forward of its own, which would be lost
            skipped.append((name, f"a {type(module).__name__}, not torch's own Linear"))
        elif odd:
            skipped.append((name, f"{odd[0]} is not a multiple of {multiple}"))
        elif others:
            skipped.append((name, f"its weight is that of {others[0]}"))
    return skipped


def torchao_config(plan):
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig

    options = {key: plan.fp8_options[key] for key in ("enable_fsdp_float8_all_gather", "pad_inner_dim")}
    return replace(Float8LinearConfig.from_recipe_name(plan.level), emulate=plan.emulated, **options)


def keep_right(accelerator, plan, model, optimizer):
    """After Accelerate has prepared everything: what has to happen at each step. `optimizer` is torch's own."""
    if plan.backend == "msamp":
        amp8 = ours("amp8")
        amp8.attach(model, last_micro_batch=lambda: accelerator.sync_gradients)
        accelerator.clip_grad_norm_ = amp8.clip_grad_norm_  # one norm over FP8 and ordinary gradients
    elif plan.implementation == "emulated" and plan.level == "delayed":
        emulate, backward = ours("amp8.emulate"), accelerator.backward

        def backward_and_update(loss, **kwargs):
            backward(loss, **kwargs)
            emulate.update_scales(model)  # TransformerEngine does it at every micro-batch

        accelerator.backward = backward_and_update


@contextlib.contextmanager
def evaluation(model):
    """Evaluation mode, outside FP8 whatever the backend: plain products of the weights as they are."""
    with contextlib.ExitStack() as stack:
        if any(type(module).__module__.startswith("amp8") for module in model.modules()):
            root = next((m for m in model.modules() if hasattr(m, "amp8_state")), None)
            if root is not None:
                stack.enter_context(ours("amp8").high_precision(root))
        layers = [module for module in model.modules() if kind(module) == "torchao.Float8Linear"]
        if layers:  # compiled blocks were compiled for FP8 weights
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in layers:
            module.forward = lambda x, module=module: plain_linear(module, x)
            stack.callback(delattr, module, "forward")
        model.eval()
        try:
            yield
        finally:
            model.train()


def plain_linear(module, x):
    weight = module.weight
    for name in ("to_original_precision", "_tensor"):  # gathered in FP8 by FSDP2; wrapped, but not gathered
        if hasattr(weight, name):
            weight = getattr(weight, name)
            weight = weight() if callable(weight) else weight
    return F.linear(x, weight if torch.is_autocast_enabled(x.device.type) else weight.to(x.dtype), module.bias)
