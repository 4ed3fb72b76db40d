"""fp16 on a CPU, which torch supports. Accelerate would train in fp32 there."""

import torch


def started(accelerator, plan):
    accelerator.native_amp = True
    options = accelerator.scaler_handler.to_kwargs() if accelerator.scaler_handler else {}
    accelerator.scaler = torch.amp.GradScaler("cpu", **options)
