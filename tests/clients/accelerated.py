"""pytorch-accelerated's Trainer, with accumulation."""

import sys

import ended
import torch
from accelerate.utils import set_seed
from pytorch_accelerated import Trainer
from torch import nn

set_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
inputs = torch.randn(64, 16)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1).clamp(0, 31).long())
trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), 1e-2))
trainer.train(data, num_epochs=2, eval_dataset=data, per_device_batch_size=8, gradient_accumulation_steps=2)
ended.tell(trainer._accelerator, trainer.model, sys.argv[-1])
