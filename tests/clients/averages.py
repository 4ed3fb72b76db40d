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


def weights():
    return [value.detach().clone().float() for value in accelerator.get_state_dict(model).values()]


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
    whole = weights()
    own = [w if o is None else o.lerp(w, 0.5) for o, w in zip(own or [None] * len(whole), whole, strict=True)]
averaged = {"torch": averages["torch"].module.parameters(), "timm": averages["timm"].module.parameters()}
averaged["diffusers"] = averages["diffusers"].shadow_params
before = weights()
copied = averages["diffusers"]
copied.store(plain.parameters())  # put in for an evaluation, and taken out again
copied.copy_to(plain.parameters())
put_in = weights()
copied.restore(plain.parameters())
restored = weights()
if accelerator.is_main_process:  # under FSDP2 it alone has whole weights
    for a, b in zip(averages["torch"].module.parameters(), own, strict=True):  # its first average is the weights
        assert torch.allclose(a.float(), b, rtol=1e-4, atol=1e-6), "torch's average is another"
    for name, parameters in averaged.items():
        for a, b in zip(parameters, whole, strict=True):
            apart = ((a.float() - b).abs().max() / b.abs().max()).item()
            assert apart < 0.5, f"{name}: an average {apart:.3g} from the weights"
    for a, b, average in zip(put_in, before, copied.shadow_params, strict=True):
        assert (a - average).abs().max() <= 0.07 * average.abs().max(), "put in as something else"  # O3's e4m3
        assert not torch.equal(a, b)
    for a, b in zip(restored, before, strict=True):
        assert torch.equal(a, b), "restored to something else"
ended.tell(accelerator, model, sys.argv[-1])
accelerator.end_training()
