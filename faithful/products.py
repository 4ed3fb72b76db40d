"""Products of 16-bit tensors on a CPU that has no fast kernels for them: computed in fp32, and rounded once.

A kernel for bf16 or fp16 multiplies the 16-bit values, adds up in fp32 and rounds the sum. Where the CPU has no such
instructions, torch's kernels do so 5 to 60 times slower than in fp32. The same values come from the fp32 kernel, given
the same 16-bit inputs: only the order of the sum differs. The kernels are replaced where torch's dispatcher finds them,
below autograd, autocast, DTensor and torch.compile, so that the forward pass, the backward pass and code of others all
use them. Nothing is replaced where the CPU's own kernels are fast, or outside a rehearsal.
"""

import functools
import time

import torch
from accelerate.utils import broadcast_object_list

from faithful import patches

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPERATORS = {  # kind: operators of torch's namespace aten
    "products": ("mm", "mm.out", "addmm", "addmm.out", "addmm_", "bmm", "bmm.out", "baddbmm", "baddbmm.out",
                 "baddbmm_", "convolution", "convolution_backward"),
    "attention": ("_scaled_dot_product_flash_attention_for_cpu",
                  "_scaled_dot_product_flash_attention_for_cpu_backward"),
}  # fmt: skip
active = {}  # what is replaced now: {kind: [names of dtypes]}
TURNS = 5
SLOW = 2  # times fp32's duration. Fast kernels take 0.3 to 1.2 of it, emulated ones 4 to 60


def seconds(function):
    """Of this thread's work, so that other work on the machine counts little."""
    started = time.thread_time()
    function()
    return time.thread_time() - started


def measure():
    """{kind: [names of dtypes in which it is slow here]}, measured in some milliseconds. The dtypes take turns, because
    all runs on a machine must find the same."""
    factors = {name: torch.ones(128, 128, dtype=dtype) for name, dtype in {"fp32": torch.float32, **DTYPES}.items()}
    times = {name: [] for name in factors}
    for turn in range(TURNS + 1):
        for name, factor in factors.items():
            took = seconds(lambda factor=factor: factor.mm(factor))
            times[name] += [took] if turn else []  # the first call of a kernel also prepares it
    slow = [name for name in DTYPES if min(times[name]) > SLOW * min(times["fp32"])]
    # The backward pass of torch's attention is slow in 16 bit on a CPU whose products are fast but which has no AMX.
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return {"products": slow, "attention": [name for name in DTYPES if name in slow or not has.get(f"amx_{name}")]}


def start():
    """Replaces what is slow here, until the run ends. All processes do as the first one finds."""
    if not active:
        [slow] = broadcast_object_list([measure()])
        active.update(slow)
        patches.undo_with("kernels of torch.ops.aten for CPUs", replace(slow))


def of(model):
    """Whether a model has 16-bit parameters, which a run in fp32 may have too."""
    return any(parameter.dtype in DTYPES.values() for parameter in model.parameters())


def through_fp32(precision):
    """What the summary says of 16-bit values of a precision: ` (products in fp32 ...)`, or nothing."""
    kinds = " and ".join(kind for kind, names in active.items() if precision in names)
    return f" ({kinds} in fp32 from {precision} values: this CPU has no fast {precision} kernels)" if kinds else ""


def replace(slow):
    """Replaces the kernels of what `measure` has found. Returns a function that restores them."""
    library = torch.library.Library("aten", "IMPL")
    for kind, names in slow.items():
        dtypes = {DTYPES[name] for name in names}
        for name in OPERATORS[kind] if dtypes else ():
            own = torch.library.get_kernel(f"aten::{name}", "CPU")
            plain = torch.library.get_kernel(f"aten::{name.removesuffix('.out').rstrip('_')}", "CPU")
            library.impl(name, functools.partial(in_fp32, name, own, plain, dtypes), "CPU", with_keyset=True)
    return lambda: (library._destroy(), active.clear())


def in_fp32(name, own, plain, dtypes, keys, *args, **kwargs):
    """A kernel of aten. name: the operator's. own: torch's kernel. plain: torch's kernel that returns a new tensor."""
    dtype = args[0].dtype
    if dtype not in dtypes:
        return own.call_boxed(keys, *args, **kwargs)
    target = kwargs.pop("out", None)
    if name.endswith("_"):
        target = args[0]
    args = [one.float() if isinstance(one, torch.Tensor) else one for one in args]
    kwargs = {key: one.float() if isinstance(one, torch.Tensor) else one for key, one in kwargs.items()}
    made = plain.call_boxed(keys, *args, **kwargs)
    if target is not None:
        return target.resize_(made.shape).copy_(made)
    if isinstance(made, torch.Tensor):
        return made.to(dtype)
    if name == "_scaled_dot_product_flash_attention_for_cpu":  # its second result is in fp32 in any case
        return made[0].to(dtype), made[1]
    return tuple(one if one is None else one.to(dtype) for one in made)
