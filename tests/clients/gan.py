"""Two models, two optimizers, each prepared by itself; a frozen third model."""

import sys

import ended
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

accelerator = Accelerator()
set_seed(0)
generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))
discriminator = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
teacher = nn.Linear(32, 16).requires_grad_(False)
optimizers = [torch.optim.AdamW(model.parameters(), 1e-3) for model in (generator, discriminator)]
loader = torch.utils.data.DataLoader(torch.randn(64, 32), 4, shuffle=True)
generator = accelerator.prepare(generator)
discriminator, teacher = accelerator.prepare(discriminator), teacher.to(accelerator.device)
of_generator, of_discriminator, loader = accelerator.prepare(*optimizers, loader)
for step, real in enumerate(loader):
    if step == 6:
        break
    fake = generator(torch.randn(len(real), 16, device=accelerator.device)).float()
    accelerator.backward((discriminator(fake.detach()).float().mean() - discriminator(real).float().mean()).square())
    of_discriminator.step()
    of_discriminator.zero_grad()
    accelerator.backward((discriminator(fake).float() - teacher(fake).float()).square().mean())
    of_generator.step()
    of_generator.zero_grad()
    of_discriminator.zero_grad()
ended.tell(accelerator, generator, sys.argv[-1])
accelerator.end_training()
