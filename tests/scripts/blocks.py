"""A network of blocks, and its training."""

import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    _no_split_modules = ["Block"]

    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


if __name__ == "__main__":
    from accelerate import Accelerator

    accelerator = Accelerator(project_dir="run")
    width, batch = map(int, sys.argv[1:])
    model = Net(width)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    loader = torch.utils.data.DataLoader(torch.randn(batch, width), batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        accelerator.backward(model(x))
        optimizer.step()
        optimizer.zero_grad()
