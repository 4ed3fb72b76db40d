"""The numerics of torchao and of TransformerEngine in software (amp8/emulate.py), for a rehearsal on a CPU.

An EmulatedLinear in eval() computes without FP8: it looks at its own `training` flag.
"""

from faithful.backends.linear import in_bf16, left_alone, ours, wanted

KINDS = {"amp8.EmulatedLinear": (1, 0)}
arguments = in_bf16


def convert(accelerator, plan, model, optimizer):
    skipped = left_alone(model, plan.skip)
    names = wanted(model, skipped)
    if names:
        options = plan.fp8_options if plan.backend == "te" else {}
        ours("amp8.emulate").convert(model, plan.level, lambda module, name: name in names, **options)
        # Each rank records its own amaxes. DDP would overwrite them with rank 0's before they are reduced.
        model._ddp_params_and_buffers_to_ignore = [name for name, _ in model.named_buffers() if ".fp8_" in name]
    return skipped


def after_backward(plan, model):
    if plan.level == "delayed":  # TransformerEngine updates its scales after every micro-batch
        ours("amp8.emulate").update_scales(model)


def name(plan):
    return f"{ {'ao': 'torchao', 'te': 'TransformerEngine'}[plan.backend] } {plan.level}"
