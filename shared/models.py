"""Models by name and size, from timm.

Every model names its blocks in `_no_split_modules`: FSDP2 shards by them, whatever the recipe.
"""

import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from shared.args import Refused

VIT_SIZES = {  # embed_dim, depth, num_heads; all widths are multiples of 16, as FP8 needs
    "vit_nano": (64, 4, 4),
    "vit_tiny": (192, 12, 3),
    "vit_small": (384, 12, 6),
    "vit_base": (768, 12, 12),
    "vit_large": (1024, 24, 16),
    "vit_huge": (1280, 32, 16),  # 632M parameters at 224 pixels
}


def vit(name, image_size, in_chans, num_classes, pretrained=False):
    """A vision transformer: one of VIT_SIZES with random weights, or any timm model by its own name.

    Takes (batch, in_chans, image_size, image_size), gives (batch, num_classes).
    """
    if name in VIT_SIZES and not pretrained:
        embed_dim, depth, num_heads = VIT_SIZES[name]
        patch_size = 16 if image_size >= 128 else 4
        if image_size % patch_size:
            raise Refused(f"image size {image_size} is not a multiple of the patch size {patch_size}")
        model = VisionTransformer(
            img_size=image_size, patch_size=patch_size, in_chans=in_chans, num_classes=num_classes,
            embed_dim=embed_dim, depth=depth, num_heads=num_heads, weight_init="jax",
            # on four patches of a digit a class token only gets in the way
            **({"class_token": False, "global_pool": "avg", "fc_norm": False} if name == "vit_nano" else {}),
        )  # fmt: skip
    elif timm.is_model(name):
        kwargs = {"img_size": image_size} if "vit" in name else {}
        model = timm.create_model(name, pretrained, in_chans=in_chans, num_classes=num_classes, **kwargs)
    elif pretrained:
        raise Refused(f"--pretrained needs a timm name such as vit_base_patch16_224, not {name!r}")
    else:
        raise Refused(f"no model {name!r}: one of {', '.join(VIT_SIZES)}, or a name of timm.list_models()")
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, torch.nn.ModuleList | torch.nn.Sequential) and len(blocks):
        model._no_split_modules = sorted({type(block).__name__ for block in blocks})
    return model
