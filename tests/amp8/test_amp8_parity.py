"""The levels reach bf16's loss, and the committed figures of what they hold and send."""

import json
import math
import pathlib

import pytest
import torch
import torch.nn.functional as F

import amp8

ROOT = pathlib.Path(__file__).resolve().parents[2]


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

    return model, batch, (images[held], labels[held])


def run(level, steps):
    """Trains and returns the final validation loss, computed in FP8 if training was."""
    torch.manual_seed(0)
    model, batch, (images, labels) = digits_vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1, (t + 1) / 50) * (0.1 + 0.45 * (1 + math.cos(math.pi * t / steps)))
    )
    if level != "bf16":
        model, optimizer = amp8.initialize(model, optimizer, level)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = batch(generator)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        F.cross_entropy(out.float(), y).backward()
        assert torch.isfinite(amp8.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(images).float(), labels).item()


def test_a_level_follows_bf16_over_the_first_steps():
    losses = {level: run(level, 25) for level in ("bf16", "O2", "O3")}
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
