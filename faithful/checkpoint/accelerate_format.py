"""Checkpoints that Accelerate itself wrote: their weights are loaded, their pickles are not.

Accelerate's save_state writes model.safetensors, model_1.safetensors, ... for one device and DDP. Optimizers,
schedulers, samplers, random states and registered objects are pickles, as are its sharded weights (FSDP, DeepSpeed).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, load_model
from torch import nn

from faithful.disk.tensor_files import check_header
from faithful.errors import Refused

if TYPE_CHECKING:
    from faithful.strategies.base import Strategy

PICKLES = ("*.bin", "*.pkl", "*.pt", "pytorch_model*/")


def load(strategy: "Strategy", codes: bool, models: list[nn.Module], folder: Path) -> str:
    """Loads the weights of all prepared models, as Accelerate lists them. codes: whether weights are codes. Every rank
    calls it. Returns a note of the files that are not read."""
    files = [folder / ("model.safetensors" if i == 0 else f"model_{i}.safetensors") for i in range(len(models))]
    pickles = sorted({path.name for pattern in PICKLES for path in folder.glob(pattern)})
    if missing := [file.name for file in files if not file.is_file()]:
        raise Refused(
            f"{folder} was written by Accelerate without {', '.join(missing)}; {', '.join(pickles)} are "
            "pickles, which are not read here: save the weights with Accelerate's save_model, and load them "
            "into the model before accelerator.prepare"
        )
    plan = strategy.plan
    if not (strategy.replicates or (strategy.fully_shards and not codes)):
        how = f"load {files[0].name} there (safetensors.torch.load_model)"
        raise Refused(
            f"{folder} was written by Accelerate, and {plan.strategy} {plan.precision} loads whole weights "
            f"only before accelerator.prepare: {how}"
        )
    for model, file in zip(models, files, strict=True):
        check_header(file)
        if strategy.replicates:
            missing, unexpected = load_model(model, file, strict=False)
        else:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

            options = StateDictOptions(full_state_dict=True, strict=False)
            missing, unexpected = set_model_state_dict(model, dict[str, Any](load_file(file)), options=options)
        if wrong := [*missing, *unexpected]:
            raise Refused(
                f"{file} is of another model: {', '.join(sorted(wrong)[:3])}, ... differ. Build the model as it was"
            )
    return (
        f"{folder} was written by Accelerate: its weights are loaded. Not read, because they are pickles: "
        f"{', '.join(pickles)}. Optimizers, schedulers, data and random numbers begin anew"
    )
