"""Accumulation by hand with no_sync, clipping, a prepared schedule, save_state by the main process alone, autocast."""

import sys

import ended
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

accelerator = Accelerator(project_dir=sys.argv[-1])
set_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        return x + self.inner(x)


model = nn.Sequential(Block(), Block(), nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
loader = torch.utils.data.DataLoader(torch.randn(128, 32), 4, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for step, x in enumerate(loader):
    if step == 12:
        break
    last = step % 2 == 1
    if not last:
        with accelerator.no_sync(model), accelerator.autocast():
            accelerator.backward((model(x).float() - x).square().mean() / 2)
        continue
    accelerator.backward((model(x).float() - x).square().mean() / 2)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step == 7:
        accelerator.save_state(f"{sys.argv[-1]}/checkpoint-4")
ended.tell(accelerator, model, sys.argv[-1])
