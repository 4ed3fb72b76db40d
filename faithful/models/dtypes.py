"""The dtype of the weights themselves: what an optimizer updates is held in fp32.

A step that is smaller than half of a 16-bit weight's last bit is lost when the weight is rounded, and most steps are.
Models are often loaded in the dtype of their file, which is bf16. So `prepare` puts trainable 16-bit parameters into
fp32, in place, one after the other: an optimizer that was made before has the same parameters. Frozen parameters,
quantized ones and float64 stay as they are. FAITHFUL_KEEP_DTYPE=1 trains a model under an fp32 config as it is.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from faithful.config import settings
from faithful.errors import TWO_DTYPES, Refused, explained
from faithful.tensors.names import HALVES

if TYPE_CHECKING:
    from faithful.strategies.base import Strategy


def dtypes_of(parameters: Iterable[torch.Tensor]) -> list[torch.dtype]:
    """The dtypes of parameters, of MS-AMP's levels those of the codes, which is cheap: 6 microseconds for a hundred."""
    with torch._C.DisableTorchFunctionSubclass():
        return [parameter.dtype for parameter in parameters]


def in_16_bit(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those that would be trained in 16 bit, without masters or scales of MS-AMP's levels."""
    return [p for p in parameters if p.requires_grad and p.dtype in HALVES and not hasattr(p, "amp8_linear")]


def names_of(dtypes: Iterable[torch.dtype]) -> str:
    """The names of dtypes for a line: `bfloat16 and float16`."""
    return " and ".join(dict.fromkeys(str(dtype)[6:] for dtype in dtypes))


def train_in_fp32(strategy: "Strategy", models: Iterable[nn.Module], optimized: bool) -> str | None:
    """Puts what would train in 16 bit into fp32. Returns a note of it, or None. Raises Refused if the config cannot
    train it as it is and the launch says to keep it. optimized: whether an optimizer is prepared with the models."""
    plan, models = strategy.plan, list(models)
    trained = [parameter for model in models for parameter in nn.Module.parameters(model) if parameter.requires_grad]
    if torch.float64 in dtypes_of(trained) and plan.precision != "fp32":
        raise Refused(
            f"the model's parameters are in float64, and {plan.precision} needs them in fp32: build the model in fp32, "
            "or use an fp32 config"
        )
    found = [(model, in_16_bit(nn.Module.parameters(model))) for model in models]
    parameters = [parameter for _, of_model in found for parameter in of_model]
    if not parameters or strategy.keeps_masters:
        return None
    if settings.keeps_dtype():
        if plan.precision != "fp32":
            raise Refused(
                f"{settings.KEEP}=1, and {len(parameters)} trainable parameters are in "
                f"{names_of(dtypes_of(parameters))}, which {plan.precision} needs in fp32: leave it out, or use an "
                "fp32 config"
            )
        return None
    before = names_of(dtypes_of(parameters))
    more = sum(map(in_fp32, parameters))
    if plan.precision == "fp32" or not strategy.fully_shards:  # FSDP2's computes with 16-bit weights
        more += sum(buffers_in_fp32(model, set(map(id, of_model))) for model, of_model in found)
    teacher = "" if optimized else ". A model that is not trained keeps its dtype after requires_grad_(False)"
    return (
        f"{len(parameters)} trainable parameters in {before} are put into fp32, which takes {more:,} bytes more: in 16 "
        f"bit most small steps are lost. {settings.KEEP}=1 and an fp32 config train them as they are{teacher}"
    )


def in_fp32(tensor: torch.Tensor) -> int:
    """Puts a parameter and its gradient, or a buffer, into fp32, in place. Returns the bytes that it takes more."""
    before, gradient = tensor.nbytes, tensor.grad
    tensor.data = tensor.data.float()
    if gradient is not None:
        tensor.grad = gradient.float()
    return tensor.nbytes - before


def buffers_in_fp32(model: nn.Module, changed: set[int]) -> int:
    """Puts 16-bit buffers of modules with changed parameters, which compute with both, into fp32: all buffers if the
    model has no other parameters in 16 bit. changed: ids. Returns the bytes that they take more."""
    if not changed:
        return 0
    some = any(parameter.dtype in HALVES for parameter in nn.Module.parameters(model))
    modules = [m for m in model.modules() if not some or changed & set(map(id, m._parameters.values()))]
    buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
    return sum(in_fp32(buffer) for buffer in buffers if buffer.dtype in HALVES)


def thawed(strategy: "Strategy", model: nn.Module, parameters: Iterable[nn.Parameter]) -> str | None:
    """Called when `parameters` of a prepared model begin to train: those in 16 bit as in `train_in_fp32`, where plain
    torch trains them. Raises Refused where a strategy has fixed their dtype."""
    parameters = in_16_bit(parameters)
    if not parameters or strategy.keeps_masters or settings.keeps_dtype():
        return None
    if not strategy.replicates:
        raise Refused(
            f"the script trains {len(parameters)} parameters in {names_of(dtypes_of(parameters))} that were frozen in "
            f"prepare(), and {strategy.plan.strategy} cannot put them into fp32 any more: let them require a "
            "gradient before prepare(), or load the model in fp32"
        )
    before = names_of(dtypes_of(parameters))
    more = sum(map(in_fp32, parameters)) + buffers_in_fp32(model, set(map(id, parameters)))
    return (
        f"{len(parameters)} parameters in {before} are trained from now on, and put into fp32, which takes {more:,} "
        "bytes more"
    )


def refuse_cast(
    strategy: "Strategy", parameters: Sequence[nn.Parameter], before: list[torch.dtype]
) -> list[torch.dtype]:
    """Raises Refused if the script has changed the dtype of a prepared model's parameters, unless it has plain torch's
    effect. before: their dtypes when they were prepared. Returns their dtypes."""
    now = dtypes_of(parameters)
    if now == before:
        return now
    changed = [p for p, dtype in zip(parameters, before, strict=True) if p.dtype != dtype]
    changed = [parameter for parameter in changed if not hasattr(parameter, "amp8_linear")]  # amp8 looks after its own
    plan = strategy.plan
    trained = [parameter for parameter in changed if parameter.requires_grad]
    as_in_torch = not in_16_bit(trained) or settings.keeps_dtype()
    if not changed:
        return now
    if strategy.replicates and (not trained or (plan.num_processes == 1 and plan.precision == "fp32" and as_in_torch)):
        return now
    raise Refused(
        f"the script has put {len(changed)} parameters into {names_of(dtypes_of(changed))} after prepare(), and "
        f"{plan.strategy} {plan.precision} trains them as prepare() has seen them: cast before prepare(), or a copy"
    )


def explain(error: str) -> Refused | None:
    """A Refused for torch's error where weights that were put into fp32 meet 16-bit tensors, else None."""
    text = (
        "what is trained was put into fp32, and meets 16-bit tensors of the script, or frozen ones ({error}): load all "
        f"of the model in fp32, or use a bf16 config, which computes with both, or set {settings.KEEP}=1"
    )
    return explained(error, {TWO_DTYPES: text})
