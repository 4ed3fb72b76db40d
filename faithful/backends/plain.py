"""fp32, bf16, and fp16 on a GPU, by torch and Accelerate. Other backends override functions of this file."""

from faithful import machine

KINDS = {}  # {"package.Class": (number of Linear, of LayerNorm in it)} of layers in FP8


def arguments(plan):
    """Arguments that the plan adds to `Accelerator(...)`."""
    return {}


def started(accelerator, plan):
    """Called after Accelerate's `Accelerator.__init__`."""


def convert(accelerator, plan, model, optimizer):
    """Called before `accelerator.prepare`, to convert layers in place. optimizer: the model's, or None if it comes
    later. Returns [(name, reason)] of the Linear layers not converted."""
    return []


def after_prepare(accelerator, plan, model, optimizer):
    """Called with the prepared model and optimizer, to change them. Returns more [(name, reason)] of layers not
    converted, or None."""


def another_optimizer(plan, model, optimizer):
    """Called for a further optimizer of the same model. Raises Refused if the backend does not support it."""


def after_backward(plan, model):
    """Called after the backward pass of each micro-batch."""


def name(plan):
    """The backend's name in the line printed after the first step."""
    if plan.precision == "fp32" and plan.device == "cuda":
        return f"fp32 (TF32 in {' and '.join(found)})" if (found := machine.in_tf32()) else "fp32 (IEEE, no TF32)"
    return {"fp32": "fp32", "bf16": "bf16 compute", "fp16": "fp16 compute, gradient scaler"}[plan.precision]


def eval_precision(plan):
    """The precision of a model in eval()."""
    return "bf16" if plan.precision == "fp8" else plan.precision


def gradients(parameters):
    """Gradient tensors that are kept outside `.grad`."""
    return []


def levels(model, optimizer):
    """amp8's report of dtypes and bytes, or None."""
    return None


def tensors(strategy, model, optimizer):
    """Model and optimizer state for a checkpoint: {name: this rank's shard}, on the CPU."""
    return strategy.tensors(model, optimizer)


def on_any_number_of_processes(plan):
    """Whether `restore` also takes a checkpoint of another number of processes: a list of their mappings."""
    return False


def restore(strategy, model, optimizer, parts):
    """Loads the result of `tensors`, bit for bit."""
    strategy.restore(model, optimizer, parts)
