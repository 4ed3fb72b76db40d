"""Batch norm for FSDP2 and DeepSpeed, which cast its weight to 16 bit and leave its running averages in fp32.

torch's own layer does not accept this mix of dtypes.
"""

import torch


def in_fp32(model):
    """Changes the model's BatchNorm2d layers in place, to compute in fp32 when their weight is in 16 bit. Averages that
    were loaded in 16 bit are put into fp32."""
    for module in model.modules():
        if type(module) is torch.nn.BatchNorm2d and module.affine and module.track_running_stats and module.momentum:
            module.__class__ = BatchNorm
            module.running_mean, module.running_var = module.running_mean.float(), module.running_var.float()


class BatchNorm(torch.nn.BatchNorm2d):
    def forward(self, x):
        if self.weight.dtype == self.running_mean.dtype:
            return super().forward(x)
        if self.training:
            self.num_batches_tracked.add_(1)
        running, affine = (self.running_mean, self.running_var), (self.weight.float(), self.bias.float())
        out = torch.nn.functional.batch_norm(x.float(), *running, *affine, self.training, self.momentum, self.eps)
        return out.to(x.dtype)
