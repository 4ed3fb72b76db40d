"""denoising_diffusion_pytorch's own Trainer, which keeps an average of the weights (EMA)."""

import sys

import ended
import torch
from accelerate.utils import set_seed
from denoising_diffusion_pytorch import Dataset1D, GaussianDiffusion1D, Trainer1D, Unet1D

set_seed(0)
model = Unet1D(dim=16, dim_mults=(1, 2), channels=16)
diffusion = GaussianDiffusion1D(model, seq_length=16, timesteps=10)
data = Dataset1D(torch.rand(64, 16, 16))
trainer = Trainer1D(
    diffusion, data, train_batch_size=4, train_lr=1e-3, train_num_steps=6, gradient_accumulate_every=2,
    ema_update_every=1, ema_decay=0.9, save_and_sample_every=1000, results_folder=sys.argv[-1],
)  # fmt: skip
trainer.train()
ended.tell(trainer.accelerator, trainer.model, sys.argv[-1])
if trainer.accelerator.is_main_process:
    torch.save(trainer.ema.ema_model.state_dict(), f"{sys.argv[-1]}/ema.pt")
