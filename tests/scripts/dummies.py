"""A script that leaves its optimizer and its scheduler to a file of DeepSpeed's, as its words say."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from torch.optim.lr_scheduler import StepLR

accelerator = Accelerator()
set_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
kind = DummyOptim if "dummy" in sys.argv else torch.optim.AdamW
optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1)
loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4)
parts = [model, optimizer, loader]
if "schedule" in sys.argv:
    parts.append(DummyScheduler(optimizer, warmup_num_steps=4))
if "callable" in sys.argv:
    parts.append(DummyScheduler(optimizer, lr_scheduler_callable=lambda inner: StepLR(inner, 1, 0.5)))
model, optimizer, loader, *scheduler = accelerator.prepare(*parts)
for batch in loader:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    for one in scheduler:
        one.step()
    optimizer.zero_grad()
    accelerator.print("seen", loss.item(), optimizer.param_groups[0]["lr"])
accelerator.end_training()
