"""fp16 on a CPU: Accelerate would train in plain fp32 there, torch itself can do it."""

import torch


def started(accelerator, plan):
    accelerator.native_amp = True
    options = accelerator.scaler_handler.to_kwargs() if accelerator.scaler_handler else {}
    accelerator.scaler = torch.amp.GradScaler("cpu", **options)
