"""fp32, bf16 and fp16, by torch and Accelerate."""

import torch

from faithful.backends.base import Backend


class Torch(Backend):
    @property
    def name(self):
        return {"fp32": "fp32", "bf16": "bf16 compute", "fp16": "fp16 compute, gradient scaler"}[self.plan.precision]


class FP16OnCPU(Torch):
    """fp16 on a CPU, which torch supports. Accelerate would train in fp32 there."""

    def started(self, accelerator):
        accelerator.native_amp = True
        options = accelerator.scaler_handler.to_kwargs() if accelerator.scaler_handler else {}
        accelerator.scaler = torch.amp.GradScaler("cpu", **options)
