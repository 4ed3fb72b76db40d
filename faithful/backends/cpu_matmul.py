"""Products of 16-bit tensors on a CPU that has no fast kernels for them: computed in fp32, and rounded once.

A kernel for bf16 or fp16 multiplies the 16-bit values, adds up in fp32 and rounds the sum. Where the CPU has no such
instructions, torch's kernels do so 5 to 60 times slower than in fp32. The same values come from the fp32 kernel, given
the same 16-bit inputs: only the order of the sum differs. The kernels are replaced where torch's dispatcher finds them,
below autograd, autocast, DTensor and torch.compile, so that the forward pass, the backward pass and code of others all
use them. Nothing is replaced where the CPU's own kernels are fast, or outside a rehearsal.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn

from faithful import patches

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPERATORS = {  # kind: operators of torch's namespace aten
    "products": ("mm", "mm.out", "addmm", "addmm.out", "addmm_", "bmm", "bmm.out", "baddbmm", "baddbmm.out",
                 "baddbmm_", "convolution", "convolution_backward"),
    "attention": ("_scaled_dot_product_flash_attention_for_cpu",
                  "_scaled_dot_product_flash_attention_for_cpu_backward"),
}  # fmt: skip
active: dict[str, list[str]] = {}  # what is replaced now: {kind: [names of dtypes]}


def slow() -> dict[str, list[str]]:
    """{kind: [names of dtypes in which it is slow here]}: where oneDNN has no kernels of that dtype for this CPU. Not
    by a measurement, which other work on the machine would change from one run to the next, and with it the numbers."""
    products = list(DTYPES)
    if torch.backends.mkldnn.is_available():
        products = [name for name in DTYPES if not getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()]
    # The backward pass of torch's attention is slow in 16 bit on a CPU whose products are fast but which has no AMX.
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return {"products": products, "attention": [n for n in DTYPES if n in products or not has.get(f"amx_{n}")]}


def start() -> None:
    """Replaces what is slow here, until the run ends. All processes do as the first one finds."""
    if not active:
        [kinds] = broadcast_object_list([slow()])
        active.update(kinds)
        patches.undo_with("kernels of torch.ops.aten for CPUs", replace(kinds))


def of(model: nn.Module) -> bool:
    """Whether a model has 16-bit parameters, which a run in fp32 may have too."""
    return any(parameter.dtype in DTYPES.values() for parameter in model.parameters())


def through_fp32(precision: str) -> str:
    """What the summary says of 16-bit values of a precision: ` (products in fp32 ...)`, or nothing."""
    kinds = " and ".join(kind for kind, names in active.items() if precision in names)
    return f" ({kinds} in fp32 from {precision} values: this CPU has no fast {precision} kernels)" if kinds else ""


def replace(slow_kinds: dict[str, list[str]]) -> Callable[[], object]:
    """Replaces the kernels of what `slow` returned. Returns a function that restores them."""
    library = torch.library.Library("aten", "IMPL")
    for kind, names in slow_kinds.items():
        dtypes = {DTYPES[name] for name in names}
        for name in OPERATORS[kind] if dtypes else ():
            torchs = torch.library.get_kernel(f"aten::{name}", "CPU")
            plain = torch.library.get_kernel(f"aten::{name.removesuffix('.out').rstrip('_')}", "CPU")
            library.impl(name, functools.partial(in_fp32, name, torchs, plain, dtypes), "CPU", with_keyset=True)
    return lambda: (library._destroy(), active.clear())


def in_fp32(name: str, torchs: Any, plain: Any, dtypes: set[torch.dtype], keys: Any, *args: Any, **kwargs: Any) -> Any:
    """A kernel of aten. name: the operator's. torchs: torch's kernel. plain: torch's, which returns a new tensor."""
    dtype = args[0].dtype
    if dtype not in dtypes:
        return torchs.call_boxed(keys, *args, **kwargs)
    attention = name in OPERATORS["attention"]  # whose tensors are in two dtypes
    if not attention and any(isinstance(x, torch.Tensor) and x.dtype != dtype for x in args):
        # of two dtypes torch's kernel makes an error, as a GPU's does
        return torchs.call_boxed(keys, *args, **kwargs)
    target = kwargs.pop("out", None)
    if name.endswith("_"):
        target = args[0]
    values = [x.float() if isinstance(x, torch.Tensor) else x for x in args]
    kwargs = {key: x.float() if isinstance(x, torch.Tensor) else x for key, x in kwargs.items()}
    result = plain.call_boxed(keys, *values, **kwargs)
    if target is not None:
        return target.resize_(result.shape).copy_(result)
    if isinstance(result, torch.Tensor):
        return result.to(dtype)
    if name == "_scaled_dot_product_flash_attention_for_cpu":  # its second result is in fp32 in any case
        return result[0].to(dtype), result[1]
    return tuple(x if x is None else x.to(dtype) for x in result)
