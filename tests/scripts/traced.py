"""A script that knows Accelerate alone, reads its loss, and asks for a precision. The last word may make it untraceable."""

import sys

import torch
from accelerate import Accelerator

if __name__ == "__main__":
    width, fault = int(sys.argv[3]), sys.argv[4] if sys.argv[4:] else None
    accelerator = Accelerator(mixed_precision="no", project_dir=sys.argv[2])
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    if fault == "in 16 bit":  # as from a file
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = torch.utils.data.DataLoader(torch.randn(64, 64), 8)
    if fault == "no optimizer":
        model = accelerator.prepare(model)
    optimizer, loader, model = accelerator.prepare(optimizer, loader, model)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LinearLR(optimizer))
    for x in loader:
        loss = model(x.to(accelerator.device)).float().square().mean()
        if fault == "values":
            loss.detach().numpy()
        accelerator.backward(loss)
        if loss.item() > 1e9 or float(loss) > 1e9 or torch.isnan(loss):
            sys.exit("diverged")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if fault != "no step":
            optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.end_training()
