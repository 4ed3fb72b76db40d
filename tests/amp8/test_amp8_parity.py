"""The levels reach bf16's loss, and the committed figures of what they hold and send."""

import json
import math
import pathlib
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp8

ROOT = pathlib.Path(__file__).resolve().parents[2]
LEVELS = ("bf16", "O1", "O2", "O3")
STEPS = {"digits_vit": 300, "byte_gpt": 400}
PEAK_LR = {"digits_vit": 2e-3, "byte_gpt": 2e-3}


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
    def __init__(self, width=96, depth=3, heads=4, length=96):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def byte_gpt():
    """(model, batch(generator) -> inputs and targets, validation batches)."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics)).encode()
    data = torch.tensor(list(text))
    cut, length = int(len(data) * 0.95), 96

    def batch(generator, low=0, high=cut, size=8):
        starts = torch.randint(low, high - length - 1, (size,), generator=generator)
        windows = torch.stack([data[i : i + length + 1] for i in starts])
        return windows[:, :-1], windows[:, 1:]

    g = torch.Generator().manual_seed(99)
    return GPT(), batch, [batch(g, cut, len(data)) for _ in range(30)]


def digits_vit():
    import timm
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held = order[:1297], order[1297:]
    model = timm.models.VisionTransformer(
        img_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=3, num_heads=4
    )

    def batch(generator):
        pick = train[torch.randint(len(train), (64,), generator=generator)]
        return images[pick], labels[pick]

    return model, batch, [(images[held], labels[held])]


TASKS = {"digits_vit": digits_vit, "byte_gpt": byte_gpt}


def run(task, level, seed, steps):
    """Trains and returns the final validation loss, computed in FP8 if training was."""
    torch.manual_seed(seed)
    model, batch, held = TASKS[task]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR[task], betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1, (t + 1) / 50) * (0.1 + 0.45 * (1 + math.cos(math.pi * t / steps)))
    )
    if level != "bf16":
        model, optimizer = amp8.initialize(model, optimizer, level)
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(steps):
        x, y = batch(generator)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        F.cross_entropy(out.flatten(0, -2).float(), y.flatten()).backward()
        norm = amp8.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            raise ArithmeticError(f"{task} {level} seed {seed}: the gradient is not finite")
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        losses = [F.cross_entropy(model(x).flatten(0, -2).float(), y.flatten()).item() for x, y in held]
    return statistics.mean(losses)


def compare(task, steps, seeds, levels=LEVELS):
    """{level: {losses, mean, difference from bf16 in %, passes}}."""
    rows = {}
    for level in levels:
        losses = [run(task, level, seed, steps) for seed in seeds]
        row = rows[level] = {"losses": [round(loss, 5) for loss in losses], "mean": statistics.mean(losses)}
        base = rows["bf16"]["losses"]
        mean, spread = rows["bf16"]["mean"], max(base) - min(base)
        row["difference_percent"] = round(100 * (row["mean"] / mean - 1), 3)
        row["passes"] = abs(row["mean"] - mean) <= max(0.005 * mean, spread)
    rows["bf16"]["spread_percent"] = round(100 * spread / mean, 3)
    return rows


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("task", ["digits_vit", "byte_gpt"])
def test_levels_end_where_bf16_ends(task):
    rows = compare(task, STEPS[task], (0, 1, 2))
    untrained = {"digits_vit": 2.3, "byte_gpt": 5.5}[task]
    for level, row in rows.items():
        assert row["passes"], (level, row)
        assert row["mean"] < 0.6 * untrained


def test_a_level_follows_bf16_over_the_first_steps():
    losses = {level: run("digits_vit", level, 0, 25) for level in ("bf16", "O2", "O3")}
    assert losses["bf16"] < 2.25
    for level in ("O2", "O3"):
        assert losses[level] == pytest.approx(losses["bf16"], rel=0.02)
        assert losses[level] != losses["bf16"]


def figures(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def test_committed_figures_keep_the_limits():
    memory = {row["level"]: row for row in figures("amp8_memory")["rows"]}
    assert memory["O1"]["ratio"] <= 0.75 and memory["O2"]["ratio"] <= 0.50
    assert memory["O2"]["peak"] / memory["bf16"]["peak"] == pytest.approx(memory["O2"]["ratio"], abs=1e-3)
    comm = figures("amp8_comm")
    assert max(comm["simulated_8"]["amp8"]["0.9"], comm["processes_4"]["0.9"]) <= 0.03
    assert comm["simulated_8"]["msamp"]["0.9"] > 0.05
    assert comm["wire_4"]["of_bf16_hook"] <= 0.55 and comm["wire_4"]["of_fp32_ddp"] <= 0.28
    rows = figures("amp8_table")["rows"]
    assert rows["bf16 AMP"]["bytes"]["total"] == 16 and rows["TE"]["gemm"] == ["e4m3 x e4m3", "e5m2 x e4m3"]
    for level, limit in (("O1", 11.5), ("O2", 6.5), ("O3", 2.5 + 5.5 / 2)):
        assert rows[level]["bytes"]["total"] <= limit and rows[level]["wire"] == ["e4m3"]
    for name in ("amp8_memory", "amp8_comm", "amp8_table"):
        assert {"command", "date", "device", "versions"} <= figures(name).keys()
