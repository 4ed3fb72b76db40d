"""MS-AMP's levels O1, O2 and O3, computed by amp8."""

import contextlib

from faithful.backends.linear import asked_to_skip, in_bf16, ours
from faithful.errors import Refused
from faithful.strategies.plain import inner, owned
from faithful.tensors import named

KINDS = {"amp8.FP8Linear": (1, 0), "amp8.FP8Conv1D": (1, 0)}
arguments = in_bf16


def fully_sharded(plan):
    return plan.strategy in ("fsdp", "hsdp")


def convert(accelerator, plan, model, optimizer):
    """Converts the layers before DDP wraps the model. Under FSDP2 amp8 converts the shards, in `after_prepare`."""
    return [] if fully_sharded(plan) else on_its_level(plan, model, optimizer)


def on_its_level(plan, model, optimizer):
    """Converts the model. Returns [(name, reason)] of the Linear layers not converted. optimizer: read only."""
    amp8 = ours("amp8")
    options = {key: value for key, value in plan.fp8_options.items() if key != "recipe"}
    recipe = {"recipe": "te_delayed", "recipe_options": options} if options else {}
    asked = asked_to_skip(model, plan.skip)

    def skip(name, module):
        return name in asked

    with refusals():
        amp8.initialize(model, optimizer, plan.level.upper(), skip=skip, **recipe)
    for module in model.modules():
        if isinstance(module, amp8.FP8Linear):
            module.register_forward_pre_hook(out_of_fp8_in_eval)
    return [(name, asked.get(name, reason)) for name, reason in named(amp8.report(model)["skipped"])]


@contextlib.contextmanager
def refusals():
    """Turns amp8's errors into Refused."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise Refused(f"asked for fp8: {error}") from None


def out_of_fp8_in_eval(module, _):
    module.high_precision = not module.training


def after_prepare(accelerator, plan, model, optimizer):
    """Replaces the optimizer inside Accelerate's wrapper by amp8's."""
    own = set(map(id, model.parameters()))
    if (owned(optimizer) - own) & accelerator.known():
        raise Refused(f"one optimizer updates two models, and MS-AMP's {plan.level.upper()} needs one for each: make "
                      "an optimizer for each, or use a config without a level")  # fmt: skip
    skipped = on_its_level(plan, model, inner(optimizer)) if fully_sharded(plan) else []
    with refusals():
        optimizer.optimizer = ours("amp8").optimizer_of(model, inner(optimizer))
    ours("amp8").attach(model, last_micro_batch=lambda: accelerator.sync_gradients)
    return skipped


def another_optimizer(plan, model, optimizer):
    raise Refused("MS-AMP's levels take one optimizer for a model, the script has several: use one torch.optim.AdamW "
                  "with parameter groups")  # fmt: skip


def clip_grad_norm_(parameters, max_norm, optimizer):
    """Clips FP8 gradients and `.grad` by one norm, and returns it."""
    return ours("amp8").clip_grad_norm_(parameters, max_norm)


def name(plan):
    scaling = " with TE's delayed scaling" if plan.fp8_options.get("recipe") else ""
    return f"MS-AMP {plan.level.upper()} (amp8, not Microsoft's package){scaling}"


def gradients(parameters):
    """The FP8 gradients, which amp8 keeps outside `.grad`."""
    layers = [layer for layer in map(ours("amp8.comm").linear_of, parameters.values()) if layer is not None]
    return [layer.gradient.codes for layer in layers if layer.gradient.codes is not None]


def levels(model, optimizer):
    return ours("amp8").report(model, inner(optimizer))


def converted(model):
    return any(getattr(module, "amp8_state", None) is not None for module in model.modules())


def tensors(strategy, model, optimizer):
    """amp8's state: FP8 codes, scales and histories, weights and optimizer state."""
    if not converted(model):
        return strategy.tensors(model, optimizer)
    exact = ours("amp8").exact_state(model, optimizer and inner(optimizer))
    return {name: tensor.cpu().clone() for name, tensor in exact.items()}


def on_any_number_of_processes(plan):
    """True under FSDP2: all shards have the same scales, so rows can be sharded again."""
    return fully_sharded(plan)


def restore(strategy, model, optimizer, parts):
    if not converted(model):
        if isinstance(parts, list):
            raise Refused("a model that has no FP8 layer resumes on as many processes as saved it: launch that many")
        return strategy.restore(model, optimizer, parts)
    if isinstance(parts, list):  # one per process that saved; under hsdp the first replica has all
        parts = parts[: int(parts[0]["all/world"])]
    try:
        ours("amp8").load_exact_state(model, optimizer and inner(optimizer), parts)
    except (KeyError, ValueError) as error:
        raise Refused(f"the checkpoint is of another model: {error}. Build the model as it was") from None
