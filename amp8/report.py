"""Reports what a converted model consists of, counted on its live tensors."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .convert import State, state_of
from .scaling import E2M1, Number
from .state import at_rest, root_of
from .tensors import local


def report(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Returns a dict for JSON. Call it after an optimizer step: before the first, gradients and moments are missing.

    converted: names. skipped: [name, reason]. parameters: {linear, all}, numbers of them.
    bytes_per_parameter: {linear, all} -> {weight, gradient, master, optimizer, total}, on this rank; gradients of
    converted layers as they were at the last step, others as they are.
    dtypes: {gemm, wire, weight, master, weight_gradient, exp_avg, exp_avg_sq} of converted layers, each a sorted list
    of what was found, empty where nothing was (gemm: products that ran outside compiled code). shards: the ranks that
    share the model under fully_shard, 1 without; replicas: the ranks that hold the same.
    wire_bytes: sent so far by this rank. fp8_hardware: whether products run on FP8 tensor cores. notes: what a user
    should know.
    """
    state, root = state_of(model), at_rest(root_of(model))
    layers = state.layers.values()
    weights = [layer.parameter for layer in layers]
    ids = {id(weight) for weight in weights}
    others = [parameter for parameter in nn.Module.parameters(root) if id(parameter) not in ids]
    in_fp32 = sum(gradient.fp32_bytes() for gradient in state.gradients)
    masters = [tensor for layer in layers if layer.master is not None for tensor in (layer.master, layer.master_scale)]
    linear: dict[str, float] = {
        "weight": sum(layer.codes.nbytes + layer.weight_scale.nbytes for layer in layers),
        "gradient": state.gradient_bytes + in_fp32,
        "master": sum(tensor.nbytes for tensor in masters),
        "optimizer": moments(optimizer, weights),
    }
    rest: dict[str, float] = {
        "weight": sum(local(parameter).nbytes for parameter in others),
        "gradient": sum(local(parameter.grad).nbytes for parameter in others if parameter.grad is not None),
        "master": 0,
        "optimizer": moments(optimizer, others),
    }
    count = {"linear": sum(w.numel() for w in weights), "all": sum(p.numel() for p in nn.Module.parameters(root))}
    sizes = {"linear": linear, "all": {key: linear[key] + rest[key] for key in linear}}
    for key, classes in sizes.items():
        classes["total"] = sum(classes.values())
        sizes[key] = {name: round(size / count[key], 3) for name, size in classes.items()}
    hardware = any(w.is_cuda and torch.cuda.get_device_capability(w.device) >= (8, 9) for w in weights)
    seen = {
        "gemm": {pair for layer in layers for pair in layer.operands},
        "wire": set() if state.comm is None else state.comm.wire,
        "weight": {layer.codes.dtype for layer in layers},
        "master": {layer.master.dtype for layer in layers if layer.master is not None},
        "weight_gradient": state.gradient_dtypes,
    }
    for key in ("exp_avg", "exp_avg_sq"):
        states = [optimizer.state[w] for w in weights if w in optimizer.state] if optimizer is not None else []
        seen[key] = {values[key].dtype for values in states}
    return {
        "level": state.level,
        "recipe": state.recipe.name,
        "world": state.world * state.replicas,
        "shards": 1 if state.fsdp_group is None else state.world,
        "replicas": state.world if state.fsdp_group is None else state.replicas,
        "converted": list(state.layers),
        "skipped": [list(pair) for pair in state.skipped],
        "parameters": count,
        "bytes_per_parameter": sizes,
        "dtypes": {key: sorted(name_of(dtype) for dtype in dtypes) for key, dtypes in seen.items()},
        "wire_bytes": 0 if state.comm is None else state.comm.sent,
        "fp8_hardware": hardware,
        "notes": notes(state, root, hardware, in_fp32 / count["linear"]),
    }


def notes(state: State, root: nn.Module, hardware: bool, in_fp32: float) -> list[str]:
    """What a user should know, a line each. in_fp32: bytes per parameter of gradients that are accumulated in fp32."""
    found = []
    if not hardware:
        found.append("no FP8 tensor cores: products run on dequantised values; memory and wire are as on FP8 hardware")
    if state.recipe.name == "fp4":
        found.append("FP4 is emulated: the forward product runs in bf16 on its values, no faster than bf16")
    if state.level == "O3" and state.world == 1:
        found.append("O3 on one process takes 7 bytes per parameter where O2 takes 6: it pays with more ranks")
    if in_fp32:
        found.append(f"accumulating gradients in fp32 holds {in_fp32:.1f} more bytes per parameter")
    size = sum(parameter.numel() for parameter in nn.Module.parameters(root))
    large = {name: p.numel() for name, p in root.named_parameters() if p.dim() > 2 and p.numel() > size / 20}
    if large:  # experts of a mixture, or another layer's weights: convolutions too
        shares = ", ".join(f"{name} ({numel / size:.0%})" for name, numel in large.items())
        found.append(f"weights with more than two dimensions are in no Linear layer and on no level: {shares}")
    if not state.stochastic_rounding:
        found.append("weights and moments are rounded to nearest: moments stop decaying, and small updates are lost")
    return found


def moments(optimizer: torch.optim.Optimizer | None, parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of the optimizer's state of these parameters, but for the step counters."""
    if optimizer is None:
        return 0
    states = [optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state]
    return sum(value.nbytes for values in states for key, value in values.items() if key != "step")


def name_of(dtype: Number | tuple[Number, Number]) -> str:
    """float8_e4m3fn -> e4m3; a pair of operands -> e5m2 x e4m3."""
    if dtype == E2M1:
        return "e2m1"
    if isinstance(dtype, tuple):
        # pyrefly: ignore[bad-argument-type]
        return " x ".join(name_of(one) for one in dtype)
    names = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.float16: "fp16"}
    return names.get(dtype) or {"float32": "fp32", "bfloat16": "bf16"}.get(str(dtype)[6:], str(dtype)[6:])
