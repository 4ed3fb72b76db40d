"""What save_model writes beside the weights, as transformers' Trainer does: the model's config, so that
`from_pretrained` or `timm.create_model` loads the folder. The card is written when the run has ended, see card.py.

A model is known by its library: transformers, timm, or none.
"""

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import init_empty_weights
from torch import nn

from faithful.disk.names import inside
from faithful.disk.readers import value_of
from faithful.disk.replacing import remove, replaced
from faithful.disk.tensor_files import TensorFile
from faithful.tensors.names import unwrapped

CONFIG = "config.json"
# What a recipe writes of its data into the run's folder: sizes, normalization, names of the classes.
FACTS = "data.json"
# timm's transform for images that a recipe prepares itself: it resizes the whole image
PLAIN_IMAGES = {"interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "squash"}


@dataclass(frozen=True)
class Saved:
    """A model that save_model has written. kind: the name of its class. library: its own, or None. task: the Hub's name
    for what it is for, or None."""

    kind: str
    library: str | None = None
    task: str | None = None


def write(prepared: nn.Module, folder: Path, facts: Path) -> Saved:
    """Writes the config of a model whose weights are in `folder`. facts: data.json of the run, which may be absent.
    Raises OSError, TypeError, ValueError."""
    model: Any = unwrapped(prepared)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
    kind = type(model).__name__.removeprefix("FSDP")
    transformers: Any = sys.modules.get("transformers.modeling_utils")  # else the model is none of its
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        model.config.architectures = [kind]
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        return Saved(kind, "transformers", task_of(kind))
    if "timm" in sys.modules and hasattr(model, "pretrained_cfg") and hasattr(model, "num_classes"):
        write_timm(model, folder, value_of(facts, {}) if facts.is_file() else {})
        return Saved(kind, "timm", "image-classification" if model.num_classes else "image-feature-extraction")
    return Saved(kind)


def task_of(kind: str) -> str | None:
    """The Hub's name of the task of a class of transformers' models, as the Trainer's cards have it."""
    from transformers.modelcard import TASK_MAPPING, _get_mapping_values

    return next((task for task, kinds in TASK_MAPPING.items() if kind in _get_mapping_values(kinds)), None)


def write_timm(model: nn.Module, folder: Path, facts: dict[str, Any]) -> None:
    """Writes timm's config of a model that `timm.create_model` has made. A script may have changed its layers since, so
    the config is kept only if it makes a model of the shapes that were saved. It is taken from sys.modules, because an
    import would make timm a package that faithful needs."""
    known = {key: facts[key] for key in ("mean", "std", "interpolation", "crop_pct") if facts.get(key) is not None}
    if facts.get("image_size"):
        known["input_size"] = facts["in_chans"], facts["image_size"], facts["image_size"]
        known = known if "interpolation" in facts else PLAIN_IMAGES | known
    names: dict[str, Any] = {"label_names": facts["classes"]} if facts.get("classes") else {}
    with replaced(folder / CONFIG) as temporary:
        sys.modules["timm"].models._hub.save_config_for_hf(model, str(temporary), names, data_config=known)
        made = json.loads(temporary.read_text())
        # transformers' loader takes the number of classes that stands beside this one, and fails of two.
        made.get("model_args", {}).pop("num_classes", None)
        for key in ("tag", "license"):  # of timm's own weights
            made["pretrained_cfg"].pop(key, None)
        temporary.write_text(json.dumps(made, indent=2) + "\n")
    if shapes_of(made) != shapes_in(folder):
        remove(folder / CONFIG)


def shapes_of(config: dict[str, Any]) -> dict[str, list[int]] | None:
    """{name: shape} of the tensors of the model that timm makes of a config, or None if it cannot."""
    with contextlib.suppress(RuntimeError, TypeError, ValueError), init_empty_weights():
        options = {"num_classes": config["num_classes"]} | config.get("model_args", {})
        model = sys.modules["timm"].create_model(config["architecture"], **options)
        return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


def shapes_in(folder: Path) -> dict[str, list[int]]:
    """{name: shape} of the tensors in the files that save_model has written."""
    files = [TensorFile(inside(folder, path.name)) for path in sorted(folder.glob("model*.safetensors"))]
    return {name: file.shape(name) for file in files for name in file}
