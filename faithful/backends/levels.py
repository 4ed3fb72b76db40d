"""MS-AMP's levels O1, O2 and O3, by amp8."""

from faithful.backends.linear import asked_to_skip, in_bf16, ours
from faithful.errors import Refused
from faithful.strategies.plain import inner

KINDS = {"amp8.FP8Linear": (1, 0), "amp8.FP8Conv1D": (1, 0)}
arguments = in_bf16


def convert(accelerator, plan, model, optimizer):
    amp8 = ours("amp8")
    options = {key: value for key, value in plan.fp8_options.items() if key != "recipe"}
    recipe = {"recipe": "te_delayed", "recipe_options": options} if options else {}
    asked = asked_to_skip(model, plan.skip)

    def skip(name, module):
        return name in asked

    try:
        model, optimizer = amp8.initialize(model, optimizer, plan.level.upper(), skip=skip, **recipe)
    except (TypeError, ValueError) as error:  # one line, that says what to do
        raise Refused(f"asked for fp8: {error}") from None
    for module in model.modules():
        if type(module).__name__ in ("FP8Linear", "FP8Conv1D"):
            module.register_forward_pre_hook(out_of_fp8_in_eval)
    return optimizer, [(name, asked.get(name, reason)) for name, reason in amp8.report(model)["skipped"]]


def out_of_fp8_in_eval(module, _):
    module.high_precision = not module.training


def after_prepare(accelerator, plan, model, optimizer):
    ours("amp8").attach(model, last_micro_batch=lambda: accelerator.sync_gradients)


def clip_grad_norm_(parameters, max_norm, optimizer):
    """One norm over FP8 and ordinary gradients."""
    return ours("amp8").clip_grad_norm_(parameters, max_norm)


def name(plan):
    scaling = " with TE's delayed scaling" if plan.fp8_options.get("recipe") else ""
    return f"MS-AMP {plan.level.upper()} (amp8, not Microsoft's package){scaling}"


def gradients(parameters):
    """amp8 keeps FP8 gradients beside the parameter."""
    codes = [p.amp8_linear.gradient.codes for p in parameters.values() if hasattr(p, "amp8_linear")]
    return [tensor for tensor in codes if tensor is not None]


def levels(model, optimizer):
    return ours("amp8").report(model, inner(optimizer))


def tensors(strategy, model, optimizer):
    """Codes, scales and histories are amp8's own business."""
    exact = ours("amp8").exact_state(model, inner(optimizer))
    return {name: tensor.cpu().clone() for name, tensor in exact.items()}


def restore(strategy, model, optimizer, parts):
    try:
        ours("amp8").load_exact_state(model, inner(optimizer), parts)
    except (KeyError, ValueError) as error:
        raise Refused(f"the checkpoint is of another model: {error}") from None
