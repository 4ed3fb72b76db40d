"""A small GPT on Python's own texts, which every machine has: used by the benchmarks of amp8's rounding."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """ids [batch, length] -> logits [batch, length, vocabulary]; the vocabulary is a multiple of 16."""

    def __init__(self, vocabulary, width=64, layers=2, heads=4, context=64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.7 / math.sqrt(module.in_features))
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sample(data, batch, length, generator):
    starts = torch.randint(0, len(data) - length - 1, (batch,), generator=generator)
    rows = torch.stack([data[start : start + length + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model, ids, targets):
    return F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def evaluate(model, data, batches):
    generator = torch.Generator().manual_seed(99)
    model.eval()
    length = model.positions.num_embeddings
    found = sum(loss_of(model, *sample(data, 16, length, generator)).item() for _ in range(batches)) / batches
    model.train()
    return found
