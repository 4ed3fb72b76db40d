"""Flow matching with a diffusion transformer (DiT, https://arxiv.org/abs/2212.09748) from timm's parts.

A model learns the velocity on the straight way from noise, at time 0, to an image, at time 1
(https://arxiv.org/abs/2210.02747). From noise it draws images by following its velocity.
"""

import io
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from accelerate import Accelerator
from timm.layers import Mlp
from timm.models.vision_transformer import Attention
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from shared import data
from shared.args import Refused
from shared.images import HubImages, Images

DIT_SIZES = {  # width, depth, heads; from small on the paper's. All widths are multiples of 16, as FP8 needs
    "dit_nano": (128, 6, 4),
    "dit_tiny": (192, 12, 3),
    "dit_small": (384, 12, 6),
    "dit_base": (768, 12, 12),
    "dit_large": (1024, 24, 16),
    "dit_xl": (1152, 28, 16),
}
EACH = 8  # images of each class that are drawn


class Block(nn.Module):
    """A transformer block whose norms get shift, scale and gate from the condition. tokens (batch, tokens, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attn = Attention(width, heads, qkv_bias=True)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = Mlp(width, 4 * width)
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)  # each block begins as the identity
        nn.init.zeros_(self.modulation.bias)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition))[:, None].chunk(6, -1)
        tokens = tokens + gate1 * self.attn(self.norm1(tokens) * (1 + scale1) + shift1)
        return tokens + gate2 * self.mlp(self.norm2(tokens) * (1 + scale2) + shift2)


class DiffusionTransformer(nn.Module):
    """images (batch, channels, size, size), times (batch,) in [0, 1], labels (batch,) -> velocities like images. The
    label `num_classes` means no class."""

    _no_split_modules = ["Block"]

    def __init__(
        self, image_size: int, channels: int, num_classes: int, width: int, depth: int, heads: int, patch_size: int
    ) -> None:
        super().__init__()
        self.patch_size, self.width, self.num_classes = patch_size, width, num_classes
        self.side = image_size // patch_size
        self.patches = nn.Conv2d(channels, width, patch_size, patch_size)
        self.positions = nn.Parameter(0.02 * torch.randn(1, self.side**2, width))
        self.time = Mlp(width, width, act_layer=nn.SiLU)
        self.classes = nn.Embedding(num_classes + 1, width)
        nn.init.normal_(self.classes.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, patch_size**2 * channels)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        condition = self.time(waves(times, self.width).to(tokens.dtype)) + self.classes(labels)
        for block in self.blocks:
            tokens = block(tokens, condition)
        pixels = self.head(self.norm(tokens)).unflatten(1, (self.side, self.side))
        pixels = pixels.unflatten(-1, (-1, self.patch_size, self.patch_size))
        return pixels.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def waves(times: Tensor, width: int) -> Tensor:
    """Cosines and sines of times in [0, 1] at width / 2 frequencies from 1000 down to 0.1, (batch, width)."""
    frequencies = 1000 * torch.exp(-math.log(1e4) * torch.arange(width // 2, device=times.device) / (width // 2))
    angles = times[:, None].float() * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1)


def dit(name: str, image_size: int, in_chans: int, num_classes: int) -> DiffusionTransformer:
    """A diffusion transformer, one of DIT_SIZES, with random weights."""
    if name not in DIT_SIZES:
        raise Refused(f"no model {name!r}: one of {', '.join(DIT_SIZES)}")
    patch_size = 2 if image_size < 32 else 4 if image_size < 128 else 8
    if image_size % patch_size:
        raise Refused(f"image size {image_size} is not a multiple of the patch size {patch_size}")
    return DiffusionTransformer(image_size, in_chans, num_classes, *DIT_SIZES[name], patch_size)


def losses(model: nn.Module, images: Tensor, labels: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """The squared error of the velocity, (batch,) float32."""
    at = times.view(-1, 1, 1, 1)
    velocities = model((1 - at) * noise + at * images, times, labels)
    return (velocities.float() - (images - noise).float()).square().mean((1, 2, 3))


def train_losses(model: nn.Module, batch: dict[str, Tensor], num_classes: int, label_dropout: float) -> Tensor:
    """`losses` with random noise and times. A part of the labels becomes "no class", as guidance needs."""
    images, labels = batch["pixel_values"], batch["labels"]
    times = torch.rand(len(images), device=images.device).to(images.dtype)
    no_class = torch.rand(len(images), device=images.device) < label_dropout
    return losses(model, images, labels.masked_fill(no_class, num_classes), torch.randn_like(images), times)


@torch.no_grad()
def held_out_losses(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """`losses` as the mean over four times, each with one noise: the same for an image in whichever batch it is."""
    generator, seen = torch.Generator().manual_seed(0), []
    for time in (0.125, 0.375, 0.625, 0.875):
        noise = torch.randn(images.shape[1:], generator=generator).to(images).expand_as(images)
        seen.append(losses(model, images, labels, noise, torch.full_like(images[:, 0, 0, 0], time)))
    return torch.stack(seen).mean(0)


@torch.no_grad()
def sample(
    model: nn.Module, noise: Tensor, labels: Tensor, num_classes: int, guidance: float = 1.0, steps: int = 25
) -> Tensor:
    """Images of these classes, in the shape of `noise`, by Euler's method with equal steps. guidance: how many times
    the step from the velocity without a class to that with it (https://arxiv.org/abs/2207.12598); 1 means none."""
    images, no_class = noise, torch.full_like(labels, num_classes)
    for step in range(steps):
        times = torch.full_like(noise[:, 0, 0, 0], step / steps)
        velocities = model(images, times, labels)
        if guidance != 1:
            plain = model(images, times, no_class)
            velocities = plain + guidance * (velocities - plain)
        images = images + velocities.to(images.dtype) / steps
    return images


def draw(
    model: nn.Module, about: dict[str, Any], device: torch.device, guidance: float, classes: list[int], seed: int = 0
) -> tuple[Tensor, Tensor]:
    """EACH images of each of these classes in [-1, 1]. about: data.about of the data set. Returns (images, labels)."""
    labels = torch.tensor(classes).repeat_interleave(EACH)
    shape = len(labels), about["in_chans"], about["image_size"], about["image_size"]
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    images = sample(model, noise.to(device), labels.to(device), about["num_classes"], guidance)
    return images.float().cpu(), labels


class Samples:
    """Draws images of up to ten classes, writes them as a picture into `folder`, and measures them. Nothing has to be
    trained for the measures: they compare with up to 2,000 images of the training set."""

    def __init__(self, train_set: Images | HubImages, folder: Path, guidance: float) -> None:
        self.about, self.folder, self.guidance = data.about(train_set), folder, guidance
        count = min(2000, 2**26 // (train_set.in_chans * train_set.image_size**2))
        chosen = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(0))[:count]
        self.real = train_set.__getitems__(chosen.tolist())

    def measures(self, accelerator: Accelerator, model: nn.Module, step: int) -> dict[str, float]:
        """accuracy: the part whose nearest real image is of the class that was asked for. diversity: how far two images
        of a class are apart, over the same of real ones; 0 is always the same image. Every rank calls it."""
        classes = list(range(min(self.about["num_classes"], 10)))
        images, labels = draw(model, self.about, accelerator.device, self.guidance, classes)
        if accelerator.is_main_process:
            save_picture(images, f"{self.folder}/samples-{step}.png")
        real, of = self.real["pixel_values"].float().flatten(1), self.real["labels"]
        images = images.flatten(1)
        right = of[torch.cdist(images, real).argmin(1)] == labels
        several = [label for label in classes if (of == label).sum() > 1]
        apart = [F.pdist(images[labels == label]).mean() / F.pdist(real[of == label]).mean() for label in several]
        diversity = {"diversity": torch.stack(apart).mean().item()} if apart else {}
        return {"accuracy": right.double().mean().item()} | diversity


def save_picture(images: Tensor, file: str | Path) -> None:
    """Writes images in [-1, 1] as a PNG, a row for each class; small ones are enlarged."""
    times = max(1, 32 // images.shape[-1])
    images = images.repeat_interleave(times, 2).repeat_interleave(times, 3)
    picture = io.BytesIO()
    torchvision.utils.save_image(images, picture, "png", nrow=EACH, normalize=True, value_range=(-1, 1))
    data.write(Path(file), picture.getvalue())


@torch.no_grad()
def update(average: nn.Module, model: nn.Module, step: int, decay: float) -> None:
    """Moves the average of weights (EMA) towards the model's. The first steps count more, as its start is random."""
    decay = min(decay, (1 + step) / (10 + step))
    get_ema_multi_avg_fn(decay)(list(average.parameters()), list(model.parameters()), None)
