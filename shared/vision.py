"""Vision models by name, from timm, with random weights, published weights or those of a run."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from accelerate.utils import reduce
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models.resnet import ResNet

from shared import args as options
from shared.args import Refused
from shared.models import bert, config_of, gpt, ready

VIT_SIZES = {  # embed_dim, depth, num_heads; all widths are multiples of 16, as FP8 needs
    "vit_nano": (64, 4, 4),
    "vit_tiny": (192, 12, 3),
    "vit_small": (384, 12, 6),
    "vit_base": (768, 12, 12),
    "vit_large": (1024, 24, 16),
    "vit_huge": (1280, 32, 16),  # 632M parameters at 224 pixels
}
RESNET_SIZES = {"resnet_nano": {"layers": (1,) * 4, "channels": (32, 64, 128, 256)}}  # stages; 1.2M parameters


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
        model = trained(name, pretrained, image_size, in_chans, num_classes)
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


def resnet(
    name: str, image_size: int, in_chans: int, num_classes: int, pretrained: bool = False, dropout: float = 0.0
) -> ResNet:
    """A residual network: one of RESNET_SIZES, or timm's resnet18, resnet50, or any other of that family. Input (batch,
    in_chans, image_size, image_size), output (batch, num_classes). For images under 64 pixels the stem has stride 1 and
    does not pool, because ImageNet's stem would leave one pixel of CIFAR's 32 before the head."""
    if own_run(name):
        model = trained(name, pretrained, image_size, in_chans, num_classes)
    elif name in RESNET_SIZES and not pretrained:
        model = timm.create_model("resnet18", num_classes=num_classes, in_chans=in_chans, **RESNET_SIZES[name])
    else:
        model = of_timm(name, pretrained, RESNET_SIZES, in_chans=in_chans, num_classes=num_classes)
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


def own_run(name: str | Path) -> dict[str, Any] | None:
    """The record of a run, with its data.json as "data", if `name` is the folder of a recipe's run; else None. Raises
    Refused if they do not hold what a recipe writes."""
    if not Path(name, "data.json").is_file():
        return None
    record, facts = options.read_object(Path(name, "run.json")), options.read_object(Path(name, "data.json"))
    for key, right in options.DATA_FORM.items():
        if key in facts and not right(facts[key]):
            raise Refused(f"{name}/data.json: {key} is {facts[key]!a:.60}, which it cannot be")
    args = record.get("args")
    if not (isinstance(record.get("recipe"), str) and isinstance(args, dict) and isinstance(args.get("model"), str)):
        raise Refused(f"{name}/run.json is not the record of a recipe's run")
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


def as_recorded(record: dict[str, Any], folder: str | Path) -> torch.nn.Module:
    """The model of the run in `folder` with random weights. record: own_run(folder)."""
    args, facts, recipe = record["args"], record["data"], record["recipe"]
    saved = Path(folder, "model", "config.json")
    if recipe in ("gpt", "sft", "dpo") and saved.is_file():
        return transformers.AutoModelForCausalLM.from_config(config_of(saved.parent))
    if recipe == "bert" and saved.is_file():
        return transformers.AutoModelForSequenceClassification.from_config(config_of(saved.parent))
    if recipe in ("gpt", "sft", "dpo"):
        return gpt(args["model"], facts["vocab_size"], facts["sequence_length"])
    if recipe == "bert":
        return bert(args["model"], facts["vocab_size"], facts["sequence_length"], len(facts["classes"]))
    if before := own_run(args["model"]):
        return as_recorded(before | {"data": facts}, args["model"])
    image_size, channels, classes = facts["image_size"], facts["in_chans"], facts["num_classes"]
    if recipe == "vit":
        return vit(args["model"], image_size, channels, classes)
    return resnet(args["model"], 224 if args["pretrained"] else image_size, channels, classes)  # 224: keeps its stem


def trained(run: str, pretrained: bool, image_size: int, in_chans: int, num_classes: int) -> torch.nn.Module:
    """The model of a finished run with its weights. The head is new if `num_classes` differs."""
    if not pretrained:
        raise Refused(f"--model {run} is a run: add --pretrained to start from its weights")
    record = own_run(run) or {}
    try:
        model = as_recorded(record, run)
        model.load_state_dict(load_file(Path(run, "model", "model.safetensors")))
    except (OSError, SafetensorError, RuntimeError, KeyError) as error:
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
