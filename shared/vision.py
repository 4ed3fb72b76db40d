"""Vision transformers by name, from timm, with random weights, published weights or those of a run."""

import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from shared.args import Refused, short
from shared.models import ready

Builder = Callable[[str, int, int, int], torch.nn.Module]  # of a name, image size, channels and classes
VIT_SIZES = {  # embed_dim, depth, num_heads; all widths are multiples of 16, as FP8 needs
    "vit_nano": (64, 4, 4),
    "vit_tiny": (192, 12, 3),
    "vit_small": (384, 12, 6),
    "vit_base": (768, 12, 12),
    "vit_large": (1024, 24, 16),
    "vit_huge": (1280, 32, 16),  # 632M parameters at 224 pixels
}
FACTS = {"image_size": int, "in_chans": int, "num_classes": int, "mean": list, "std": list, "interpolation": str,
         "crop_pct": int | float}  # of a run's data.json  # fmt: skip


def te_block(
    dim: int, num_heads: int, mlp_ratio: float = 4.0, drop_path: float = 0.0, device: torch.device | None = None,
    dtype: torch.dtype | None = None, **_: object,
) -> torch.nn.Module:  # fmt: skip
    """A block of a vision transformer as a te.TransformerLayer, for timm's `block_fn`: (batch, tokens, dim) in and out.
    TE's defaults are for language models: `sbhd` would attend across the batch, and the causal mask would hide later
    patches, both without an error. Unlike timm's block, its GELU is the tanh approximation."""
    try:
        te = importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:  # the last two where a CUDA library is missing
        raise Refused(f"TransformerEngine cannot be imported ({error}): ./launch.sh setup --extra te") from None
    if not torch.cuda.is_available():
        raise Refused("TransformerEngine's blocks compute on an NVIDIA GPU, and here is none: train without them")
    return te.TransformerLayer(
        dim, int(dim * mlp_ratio), num_heads, attn_input_format="bshd", self_attn_mask_type="no_mask",
        layernorm_epsilon=1e-6, hidden_dropout=0.0, attention_dropout=0.0, drop_path_rate=drop_path,
        fuse_qkv_params=True, qkv_weight_interleaved=False, params_dtype=dtype or torch.get_default_dtype(),
        device=device or torch.get_default_device(),
    )  # fmt: skip


def vit(
    name: str, image_size: int, in_chans: int, num_classes: int, pretrained: bool = False, dropout: float = 0.0,
    te_blocks: bool = False,
) -> torch.nn.Module:  # fmt: skip
    """A vision transformer: one of VIT_SIZES with random weights, or any timm model by its own name. Input (batch,
    in_chans, image_size, image_size), output (batch, num_classes). te_blocks: each block is TE's."""
    if te_blocks and (pretrained or name not in VIT_SIZES):
        raise Refused(f"TransformerEngine's blocks start from random weights: one of {', '.join(VIT_SIZES)}")
    if own_run(name):
        model = trained(name, pretrained, image_size, in_chans, num_classes, vit)
    elif name in VIT_SIZES and not pretrained:
        embed_dim, depth, num_heads = VIT_SIZES[name]
        patch_size = 16 if image_size >= 128 else 4
        if image_size % patch_size:
            raise Refused(f"image size {image_size} is not a multiple of the patch size {patch_size}")
        more: dict[str, Any] = {"block_fn": te_block} if te_blocks else {}
        # a class token does not help with the four patches of a digit
        more |= {"class_token": False, "global_pool": "avg", "fc_norm": False} if name == "vit_nano" else {}
        model = timm.create_model(  # a name for timm's config, the sizes are these
            "vit_tiny_patch16_224", img_size=image_size, patch_size=patch_size, in_chans=in_chans,
            num_classes=num_classes, embed_dim=embed_dim, depth=depth, num_heads=num_heads, weight_init="jax", **more,
        )  # fmt: skip
    else:
        kwargs = {"img_size": image_size} if "vit" in name else {}
        model = of_timm(name, pretrained, VIT_SIZES, in_chans=in_chans, num_classes=num_classes, **kwargs)
    return ready(model, getattr(model, "blocks", ()), dropout)


def own_run(name: str | Path) -> dict[str, Any] | None:
    """The record of a run, with its data.json as "data", if `name` is the folder of a recipe's run; else None. Raises
    Refused if they do not hold what a recipe writes: they may be anyone's."""
    if not Path(name, "data.json").is_file():
        return None
    try:
        record, facts = (json.loads(Path(name, file).read_bytes()) for file in ("run.json", "data.json"))
        if wrong := [key for key, kind in FACTS.items() if not isinstance(facts.get(key), kind | None)]:
            raise TypeError(f"{wrong[0]} is {facts[wrong[0]]!a:.60}")
        colours = [*map(float, facts.get("mean") or ()), *map(float, facts.get("std") or ())]
        if len(colours) > 128 or not isinstance(record["recipe"] + record["args"]["model"], str):
            raise TypeError("colours, recipe or model")
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise Refused(f"{name} is not the folder of a recipe's run ({short(str(error), 200)})") from None
    return record | {"data": facts}


def of_timm(name: str, pretrained: bool, sizes: Iterable[str], **options: Any) -> torch.nn.Module:
    try:
        return timm.create_model(name, pretrained, **options)
    except (RuntimeError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise Refused(
            f"--model {name}: {reason}. It can be a name of timm.list_models(), the folder of a run with --pretrained, "
            f"or without it {', '.join(sizes)}"
        ) from None


def as_recorded(record: dict[str, Any], build: Builder) -> torch.nn.Module:
    """The model of a run with random weights. record: own_run(folder). build: `vit`, or of another recipe."""
    args, facts = record["args"], record["data"]
    if before := own_run(args["model"]):
        return as_recorded(before | {"data": facts}, build)
    image_size = 224 if args["pretrained"] and record["recipe"] == "resnet" else facts["image_size"]  # keeps its stem
    return build(args["model"], image_size, facts["in_chans"], facts["num_classes"])


def trained(
    run: str, pretrained: bool, image_size: int, in_chans: int, num_classes: int, build: Builder
) -> torch.nn.Module:
    """The model of a finished run with its weights. The head is new if `num_classes` differs."""
    if not pretrained:
        raise Refused(f"--model {run} is a run: add --pretrained to start from its weights")
    record = own_run(run) or {}
    if record["recipe"] != build.__name__:
        raise Refused(f"--model {run} is a run of recipes/{short(record['recipe'])}.py, not of {build.__name__}.py")
    try:
        weights = load_file(Path(run, "model", "model.safetensors"))
        with torch.device("meta"):  # the sizes may be anyone's: nothing is made that the weights do not fill
            as_recorded(record, build).load_state_dict(weights, assign=True)
        model = as_recorded(record, build)
        model.load_state_dict(weights)
    except (OSError, SafetensorError, RuntimeError, LookupError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise Refused(f"--model {run}: its weights cannot be loaded ({reason}); did the run finish?") from None
    before = record["data"]
    if (image_size, in_chans) != (before["image_size"], before["in_chans"]):
        raise Refused(
            f"--model {run} takes {before['in_chans']} x {before['image_size']} x {before['image_size']}, images are "
            f"{in_chans} x {image_size} x {image_size}: leave out --image_size, or use another run"
        )
    if num_classes != before["num_classes"]:
        model.reset_classifier(num_classes)  # pyrefly: ignore[not-callable]
    return model


def data_config(name: str, pretrained: bool = False) -> dict[str, Any]:
    """What an image model expects as input: mean, std, interpolation, crop_pct; if pretrained, also size, channels."""
    if run := own_run(name):
        keys = ("mean", "std", "interpolation", "crop_pct", "image_size", "in_chans")
        return {key: run["data"][key] for key in keys if key in run["data"]}
    if not timm.is_model(name):
        return {}
    config = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())  # pyrefly: ignore[missing-attribute]
    config = {key: config[key] for key in ("mean", "std", "interpolation", "crop_pct", "input_size")}
    channels, _, image_size = config.pop("input_size")
    return config | ({"image_size": image_size, "in_chans": channels} if pretrained else {})
