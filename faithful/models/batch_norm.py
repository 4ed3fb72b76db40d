"""Batch norm for FSDP2 and DeepSpeed, which cast its weight to 16 bit and leave its running averages in fp32.

torch's own layers do not accept this mix of dtypes.
"""

import torch
from torch import nn

from faithful.tensors.names import HALVES


def in_fp32(model: nn.Module) -> None:
    """Changes the model's batch norms in place, to compute in fp32 when their weight is in 16 bit. Averages that were
    loaded in 16 bit are put into fp32."""
    for module in model.modules():
        if type(module) in CLASSES and module.affine and module.track_running_stats and module.momentum:
            module.__class__ = CLASSES[type(module)]
            if module.running_mean.dtype in HALVES:
                module.running_mean, module.running_var = module.running_mean.float(), module.running_var.float()


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
