"""Averages of the weights by torch, timm and diffusers, beside one computed from the finished weights of each step."""

import sys

import ended
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers.training_utils import EMAModel
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

accelerator = Accelerator()
set_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
averages = {
    "torch": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)),
    "timm": ModelEmaV3(model, decay=0.5),
    "diffusers": EMAModel(model.parameters(), decay=0.5, min_decay=0.5),
}
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
loader = torch.utils.data.DataLoader(torch.randn(64, 32), 4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
own = None
for step, x in enumerate(loader):
    if step == 6:
        break
    accelerator.backward((model(x).float() - x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    plain = accelerator.unwrap_model(model)
    averages["torch"].update_parameters(plain)
    averages["timm"].update(plain)
    averages["diffusers"].step(plain.parameters())
    whole = [value.detach().clone().float() for value in plain.state_dict().values()]
    own = [None] * len(whole) if own is None else own
    own = [w if o is None else o.lerp(w, 0.5) for o, w in zip(own, whole, strict=True)]
averaged = {"torch": averages["torch"].module, "timm": averages["timm"].module}
for name, one in averaged.items():
    for a, b in zip(one.parameters(), whole, strict=True):
        apart = ((a.float() - b).abs().max() / b.abs().max()).item()
        assert apart < 0.5, f"{name}: an average {apart:.3g} from the weights"
for a, b in zip(averages["diffusers"].shadow_params, whole, strict=True):
    assert (a.float() - b).abs().max() / b.abs().max() < 0.5, "diffusers"
copied = averages["diffusers"]
copied.store(plain.parameters())  # put in for an evaluation, and taken out again
before = [value.detach().clone() for value in plain.state_dict().values()]
copied.copy_to(plain.parameters())
copied.restore(plain.parameters())
for a, b in zip(plain.state_dict().values(), before, strict=True):
    assert torch.allclose(a, b, rtol=1e-3), "restored to something else"
ended.tell(accelerator, model, sys.argv[-1])
accelerator.end_training()
