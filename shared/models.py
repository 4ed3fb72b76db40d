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


def te_block(dim, num_heads, mlp_ratio=4.0, drop_path=0.0, device=None, dtype=None, **_):
    """A block of a vision transformer as one te.TransformerLayer, for timm's `block_fn`; (batch, tokens, dim) each way.

    TE fuses LayerNorm into the products behind it and picks its own attention kernels, on a GPU alone. Its defaults are
    a language model's: `sbhd` would attend across the batch, and the causal mask would hide later patches from earlier
    ones, both without an error. Kept as timm's: 1e-6, no dropout, q, k and v one after another in one weight. Not as
    timm's: GELU is the tanh approximation. timm's other options stand at their defaults and are not passed on.
    """
    try:
        import transformer_engine.pytorch as te
    except ImportError as error:
        raise Refused(
            f"TransformerEngine's blocks need its package and a GPU ({error}): ./launch.sh setup --extra te"
        ) from None
    if not torch.cuda.is_available():
        raise Refused("TransformerEngine's blocks compute on an NVIDIA GPU, and here is none: train without them")
    return te.TransformerLayer(
        dim, int(dim * mlp_ratio), num_heads,
        attn_input_format="bshd", self_attn_mask_type="no_mask", layernorm_epsilon=1e-6,
        hidden_dropout=0.0, attention_dropout=0.0, drop_path_rate=drop_path,
        fuse_qkv_params=True, qkv_weight_interleaved=False,
        params_dtype=dtype or torch.get_default_dtype(), device=device or torch.get_default_device(),
    )  # fmt: skip


def vit(name, image_size, in_chans, num_classes, pretrained=False, te_blocks=False):
    """A vision transformer: one of VIT_SIZES with random weights, or any timm model by its own name.

    Takes (batch, in_chans, image_size, image_size), gives (batch, num_classes). te_blocks: each block is TE's.
    """
    if te_blocks and (pretrained or name not in VIT_SIZES):
        raise Refused(f"TransformerEngine's blocks start from random weights: one of {', '.join(VIT_SIZES)}")
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
            **({"block_fn": te_block} if te_blocks else {}),
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
