"""The states of a process's random generators, as tensors of a checkpoint."""

import math
import random
from collections.abc import Mapping

import numpy as np
import torch

from faithful.tensors.serialization import check_like

States = dict[str, torch.Tensor]  # {name of the generator, or of a part of its state: value}


def of_host() -> States:
    """Of Python's generator, numpy's, and torch's for the CPU: those from which a sampler may draw."""
    version, numbers, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    return {
        "python": torch.tensor([version, *numbers], dtype=torch.int64),
        "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
        "numpy_rest": torch.tensor([numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }


def of_process() -> States:
    """Those of the host, and of torch for the accelerator."""
    if not torch.accelerator.is_available():
        return of_host()
    return of_host() | {"device": torch.get_device_module().get_rng_state().cpu()}


def set_host(states: Mapping[str, torch.Tensor]) -> None:
    """Sets what `of_host` has returned. Raises errors of Python's, numpy's and torch's for what that cannot be."""
    here = of_host()
    check_like(here, {name: states[name] for name in here}, "random")
    version, *numbers = states["python"].tolist()
    gauss = states["python_gauss"].item()
    random.setstate((version, tuple(numbers), None if math.isnan(gauss) else gauss))
    position, has_gauss, gauss = states["numpy_rest"].tolist()
    if not 0 <= position <= len(states["numpy"]):  # numpy would read memory that is not its own
        raise ValueError(f"numpy's position is {position}")
    key = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, int(position), int(has_gauss), gauss))
    torch.set_rng_state(states["torch"])


def set_process(states: Mapping[str, torch.Tensor]) -> None:
    set_host(states)
    if "device" in states and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(states["device"])
