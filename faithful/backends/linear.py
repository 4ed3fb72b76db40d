"""Functions that the FP8 backends share: which layers are Linear, and which of them can be in FP8."""

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from faithful import patches
from faithful.config.fp8 import MX, MX_SCALES, SHARE
from faithful.errors import Refused
from faithful.models.layers import is_linear, linear_names
from faithful.tensors.names import of_fp8

ENDS = ("first", "last")  # in a skip list: the first and the last Linear in the order of model.modules()


def in_bf16() -> dict[str, Any]:
    """Makes Accelerate run in bf16, without its own FP8 code. That would take torchao's weights out of the optimizer
    outside FSDP2, stop TransformerEngine's conversion at the first shape that does not fit and drop its options, and
    scale MS-AMP's loss without unscaling the gradients."""
    patches.set_environment("ACCELERATE_FP8_BACKEND", None)
    return {"mixed_precision": "bf16"}


def keep_state_apart(layer: nn.Module) -> None:
    """Leaves the FP8 state of a layer out of the model's state_dict: it is the run's, and checkpoints have it. What a
    script saves of the model itself, as by save_pretrained, has the names from before the conversion, and loads."""
    layer.register_state_dict_post_hook(leave_out)
    layer.register_load_state_dict_post_hook(not_missing)


def leave_out(layer: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    for key in filter(of_fp8, (*layer._buffers, "_extra_state")):
        state.pop(f"{prefix}{key}", None)


def not_missing(layer: nn.Module, found: Any) -> None:
    found.missing_keys[:] = [name for name in found.missing_keys if not of_fp8(name)]


def skipped_by_config(model: nn.Module, skip: Sequence[str]) -> dict[str, str]:
    """{name: reason} of the Linear layers that the config's `skip` excludes, and of peft's adapters: FP8 makes products
    of so low a rank no faster, and they are all that is trained. skip: patterns of their names (fnmatch's `*`, `?` and
    `[...]`), and the words `first`, `last` and, for the last 15% of them, rounded up, `last 15%`."""
    names = linear_names(model)
    ends = (names[:1] if "first" in skip else []) + (names[-1:] if "last" in skip else [])
    lasts = {}
    for share in filter(None, map(SHARE.fullmatch, skip)):
        few = math.ceil(len(names) * int(share[1]) / 100)
        lasts |= dict.fromkeys(names[len(names) - few :], f"the {share[0]} of the Linear layers")
    adapters = [name for name in names if ".lora_A." in name or ".lora_B." in name]
    return (
        dict.fromkeys(adapters, "an adapter (LoRA)")
        | lasts
        | dict.fromkeys(ends, "first or last Linear")
        | {name: "skip" for name in names if any(matches(name, pattern) for pattern in skip)}
    )


def matches(name: str, pattern: str) -> bool:
    return not a_place(pattern) and fnmatch.fnmatchcase(name, pattern)


def a_place(pattern: str) -> bool:
    """Whether an entry of a skip list is no layer's name, but says where layers are."""
    return pattern in ENDS or bool(SHARE.fullmatch(pattern))


def refuse_unknown(skip: Sequence[str], names: list[str]) -> None:
    """Raises Refused if a pattern of `skip` matches none of the Linear layers `names`."""
    lines = []
    for pattern in skip:
        if a_place(pattern) or any(matches(name, pattern) for name in names):
            continue
        inside = [f"{pattern}.*"] if any(name.startswith(f"{pattern}.") for name in names) else []
        close = inside or difflib.get_close_matches(pattern, names, 3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(names[:3])}, ..."
        lines.append(f"fp8_config skip {pattern}: no Linear layer of the model is called so: {hint}")
    if lines:
        raise Refused("\n".join(lines))


def unlike_default(options: Mapping[str, Any]) -> str:
    """The parts of an FP4 recipe that a config leaves out, and another rule for MX's scales, for the summary line."""
    rule = options.get("scale_calculation_mode", MX_SCALES[0])
    words = [key for key in options if key.startswith("disable_")]
    words += [f"scale_calculation_mode {rule}"] if rule != MX_SCALES[0] else []
    return "".join(f", {word}" for word in words)


def in_fp8(module: nn.Module, *inputs: object) -> bool:
    """Whether a layer, or a block of layers, computes in FP8 in this forward pass: in train(), and in eval() too where
    a gradient goes through it, to its parameters or its inputs. An evaluation, in eval() without gradients, does not.
    The rule for all backends."""
    if module.training:
        return True
    if not torch.is_grad_enabled():
        return False
    weight_trains = getattr(module, "weight_trains", None)  # of amp8, whose weights compiled code cannot ask
    trains = weight_trains() if weight_trains else any(parameter.requires_grad for parameter in module.parameters())
    return trains or any(x.requires_grad for x in inputs if isinstance(x, torch.Tensor))


def once_differentiable(output: torch.Tensor) -> torch.Tensor:
    """The output of a layer of another package that has computed in FP8, whose backward pass raises Refused if its
    gradients are to be differentiated. amp8's layers raise an error of their own."""
    if output.requires_grad and not torch.compiler.is_compiling():
        output.register_hook(refuse_a_derivative)
    return output


def refuse_a_derivative(gradient: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise Refused(
            "a gradient of FP8 products has no derivative (create_graph=True, a gradient penalty or a Hessian): leave "
            "the layers out that it goes through (fp8_config: skip), or use a bf16 config"
        )


# errors where a script does what another package's FP8 layers do not allow
ERRORS = {
    "modified inplace.*inside a custom Function": (
        "the script changes the output of an FP8 layer in place (out += ..., as peft's AdaLoRA does), which torchao's "
        "layers do not allow: write out = out + ..., leave the layers out (fp8_config: skip), or use a bf16 config"
    ),
    "Cannot set version_counter for inference tensor": (
        "the script calls the model in train() within torch.inference_mode(), where torchao cannot gather weights in "
        "FP8: call model.eval() before, or use torch.no_grad()"
    ),
}


def size_multiple(level: str | None) -> int:
    """The sizes of a Linear must be multiples of this. MX formats have one scale per 32 values, along both dimensions,
    and products of FP4 read 16 bytes at a time."""
    return 32 if level in (*MX, "nvfp4") else 16


def skipped_linears(model: nn.Module, skip: Sequence[str] = (), multiple: int = 16) -> list[tuple[str, str]]:
    """[(name, reason)] of the Linear layers that the config excludes (`skip`), or that torchao and TransformerEngine
    cannot convert: wrong size, a subclass, a weight that is shared or computed. multiple: of the sizes."""
    users, listed = {}, skipped_by_config(model, skip)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer = name.rpartition(".")[0]
        within, _, last = layer.rpartition(".")  # a module of two names, as ema_pytorch's model, has it once
        users.setdefault(parameter, {}).setdefault((model.get_submodule(within), last), layer)
    skipped = []
    for name, module in model.named_modules():
        if not is_linear(module):
            continue
        odd = [size for size in module.weight.shape if size % multiple]
        # weight_norm, spectral_norm, pruning: a weight or bias that is computed in each forward pass is no parameter.
        computed = [entry for entry in ("weight", "bias") if entry not in module._parameters]
        others = [] if computed else [user for user in users[module.weight].values() if user != name]
        if listed.get(name) == "skip":
            skipped.append((name, "skip"))
        elif computed:
            skipped.append((name, f"its {computed[0]} is computed from other parameters"))
        elif type(module) is not nn.Linear:  # a subclass has its own forward, which would be lost
            skipped.append((name, f"a {type(module).__name__}, not torch's own Linear"))
        elif odd:
            skipped.append((name, f"{odd[0]} is not a multiple of {multiple}"))
        elif others:
            skipped.append((name, f"its weight is that of {others[0]}"))
    return skipped + [(name, reason) for name, reason in listed.items() if name not in dict(skipped)]


def linears_to_convert(model: nn.Module, skipped: list[tuple[str, str]]) -> set[str]:
    """The names of the Linear layers that are not skipped."""
    return set(linear_names(model)) - dict(skipped).keys()
