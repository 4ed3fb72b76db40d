"""Residual networks by name, from timm, and their batch norm on several processes."""

from typing import Any

import timm
import torch
from accelerate.utils import reduce
from timm.models.resnet import ResNet

from shared import vision
from shared.args import Refused
from shared.models import ready

RESNET_SIZES = {"resnet_nano": {"layers": (1,) * 4, "channels": (32, 64, 128, 256)}}  # stages; 1.2M parameters


def resnet(
    name: str, image_size: int, in_chans: int, num_classes: int, pretrained: bool = False, dropout: float = 0.0
) -> ResNet:
    """A residual network: one of RESNET_SIZES, or timm's resnet18, resnet50, or any other of that family. Input (batch,
    in_chans, image_size, image_size), output (batch, num_classes). For images under 64 pixels the stem has stride 1 and
    does not pool, because ImageNet's stem would leave one pixel of CIFAR's 32 before the head."""
    if vision.own_run(name):
        model = vision.trained(name, pretrained, image_size, in_chans, num_classes, resnet)
    elif name in RESNET_SIZES and not pretrained:
        model = timm.create_model("resnet18", num_classes=num_classes, in_chans=in_chans, **RESNET_SIZES[name])
    else:
        model = vision.of_timm(name, pretrained, RESNET_SIZES, in_chans=in_chans, num_classes=num_classes)
    if not isinstance(model, ResNet):
        raise Refused(f"{name} is not a residual network of timm's ResNet: try resnet18, resnet50, or recipes/vit.py")
    if image_size < 64 and not pretrained:
        first = model.conv1
        if not isinstance(first, torch.nn.Conv2d):
            raise Refused(f"{name} has a stem of several layers, for images of 64 pixels or more: try resnet18")
        model.conv1 = torch.nn.Conv2d(in_chans, first.out_channels, 3, stride=1, padding=1, bias=False)
        model.maxpool = torch.nn.Identity()  # pyrefly: ignore[bad-assignment]
    stages: Any = model.layer1, model.layer2, model.layer3, model.layer4
    return ready(model, [block for stage in stages for block in stage], dropout)


def average_statistics(model: torch.nn.Module) -> None:
    """Averages the running statistics of batch norm over the processes. Every rank calls it after its optimizer step.
    In training each process normalizes its own micro-batch, as DDP does by default. Without this function the saved
    model would have the statistics of rank 0, which has seen only a part of the data."""
    running = [buffer for name, buffer in model.named_buffers() if name.endswith(("running_mean", "running_var"))]
    mean = reduce(torch.cat([buffer.flatten() for buffer in running]), "mean")
    for buffer, values in zip(running, mean.split([buffer.numel() for buffer in running]), strict=True):
        buffer.copy_(values.view_as(buffer))
