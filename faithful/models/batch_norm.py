"""Norms for FSDP2 and DeepSpeed, which cast weights to 16 bit and leave inputs and running averages in fp32.

torch's own do not accept this mix of dtypes: batch norm nowhere, layer and group norm not on a CPU. On a GPU autocast
computes these two in fp32.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from faithful import patches
from faithful.tensors.names import HALVES

ROW = "layer_norm and group_norm of torch.ops.aten under autocast on a CPU"
changed: list[torch.library.Library] = []  # one, while they are changed


def in_fp32(model: nn.Module) -> None:
    """Changes the model's batch norms in place, to compute in fp32 when their weight is in 16 bit. Averages that were
    loaded in 16 bit are put into fp32."""
    layers_and_groups()
    for module in model.modules():
        if type(module) in CLASSES and module.affine and module.track_running_stats and module.momentum:
            module.__class__ = CLASSES[type(module)]
            if module.running_mean.dtype in HALVES:
                module.running_mean, module.running_var = module.running_mean.float(), module.running_var.float()


def layers_and_groups() -> None:
    """Lets autocast compute layer and group norms of fp32 inputs with 16-bit weights on a CPU."""
    if changed:
        return
    library, aten = torch.library.Library("aten", "IMPL"), torch.ops.aten
    changed.append(library)

    def alike(input: torch.Tensor, *affine: torch.Tensor | None) -> Iterator[torch.Tensor | None]:
        return (x.float() if x is not None and input.dtype == torch.float32 else x for x in affine)

    def layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: bool) -> Any:
        return aten.native_layer_norm(x, shape, *alike(x, weight, bias), eps)[0]

    def group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: bool) -> Any:
        sizes = x.shape[0], x.shape[1], math.prod(x.shape[2:])
        return aten.native_group_norm(x.contiguous(), *alike(x, weight, bias), *sizes, groups, eps)[0]

    library.impl("layer_norm", layer_norm, "AutocastCPU")
    library.impl("group_norm", group_norm, "AutocastCPU")
    patches.undo_with(ROW, lambda: (changed.clear(), library._destroy()))


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        mean = self.running_mean
        if mean is None or self.weight.dtype == mean.dtype:
            return super().forward(input)
        self._check_input_dim(input)
        if self.training and (count := self.num_batches_tracked) is not None:
            count.add_(1)
        running, affine = (mean, self.running_var), (self.weight.float(), self.bias.float())
        out = nn.functional.batch_norm(input.float(), *running, *affine, self.training, self.momentum or 0, self.eps)
        return out.to(input.dtype)


class BatchNorm1d(BatchNorm, nn.BatchNorm1d):
    pass


class BatchNorm2d(BatchNorm, nn.BatchNorm2d):
    pass


class BatchNorm3d(BatchNorm, nn.BatchNorm3d):
    pass


CLASSES: dict[type, type] = {nn.BatchNorm1d: BatchNorm1d, nn.BatchNorm2d: BatchNorm2d, nn.BatchNorm3d: BatchNorm3d}
