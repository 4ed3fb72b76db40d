"""fp32, bf16, and fp16 on a GPU: torch and Accelerate do it. The FP8 backends differ from this."""

KINDS = {}  # {"package.Class": (Linear, LayerNorm) layers in one such layer} of what computes in FP8


def arguments(plan):
    """What the plan adds to the arguments of `Accelerator(...)`."""
    return {}


def started(accelerator, plan):
    """What is done right after `Accelerator(...)`."""


def convert(accelerator, plan, model, optimizer):
    """Before `accelerator.prepare`: makes the model's layers what the plan says. optimizer: its own, or None if it is
    prepared later. Returns [(name, reason)] of the Linear layers left alone."""
    return []


def after_prepare(accelerator, plan, model, optimizer):
    """What is done to the prepared model and optimizer. Returns what `convert` could not know yet: more layers left
    alone, or nothing."""


def another_optimizer(plan, model, optimizer):
    """Called where a second optimizer updates a part of a model that already has one. Raises Refused if it must not."""


def after_backward(plan, model):
    """What is done after the backward pass of each micro-batch."""


def name(plan):
    """For the truth line."""
    return {"fp32": "fp32", "bf16": "bf16 compute", "fp16": "fp16 compute, gradient scaler"}[plan.precision]


def eval_precision(plan):
    """What a model in eval() computes in."""
    return "bf16" if plan.precision == "fp8" else plan.precision


def gradients(parameters):
    """Gradients that are kept beside `.grad`."""
    return []


def levels(model, optimizer):
    """amp8's own count of bytes, or None."""
    return None


def tensors(strategy, model, optimizer):
    """What a checkpoint holds of model and optimizer: {name: this rank's part}, on the CPU."""
    return strategy.tensors(model, optimizer)


def on_any_number_of_processes(plan):
    """Whether `restore` also takes what another number of processes saved: a list, of each the mapping."""
    return False


def restore(strategy, model, optimizer, parts):
    """Puts `tensors` back in place, bit for bit."""
    strategy.restore(model, optimizer, parts)
