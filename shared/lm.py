"""Language models by name, from transformers, with random or published weights."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from shared.args import Refused, short
from shared.models import ready

GPT_SIZES = {  # shape, width, depth, heads; GPT-2's shape in GPT-3's sizes, Llama's in those of Llama 3.2
    "gpt_nano": ("gpt2", 128, 4, 4),
    "gpt_small": ("gpt2", 768, 12, 12),
    "gpt_medium": ("gpt2", 1024, 24, 16),
    "gpt_large": ("gpt2", 1536, 24, 16),
    "gpt_xl": ("gpt2", 2048, 24, 16),  # 1.3B parameters
    "llama_nano": ("llama", 128, 4, 4),
    "llama_tiny": ("llama", 256, 4, 4),  # 4.0M parameters with a vocabulary of bytes
    "llama_small": ("llama", 768, 12, 12),
    "llama_medium": ("llama", 1024, 24, 16),  # 380M parameters with a vocabulary of 16,384
    "llama_1b": ("llama", 2048, 16, 32),  # 1.2B parameters with a vocabulary of 128,256
}
BERT_SIZES = {"bert_nano": ("bert", 128, 4, 4), "bert_small": ("bert", 512, 4, 8), "bert_base": ("bert", 768, 12, 12)}
MOST = {"layer": 1000, "blocks": 1000, "head": 10**4, "expert": 10**4, "label": 10**5, "position": 10**8}  # in a config


def gpt(
    name: str, vocab_size: int, sequence_length: int, pretrained: bool = False, dropout: float = 0.0
) -> "transformers.PreTrainedModel":
    """A causal language model: one of GPT_SIZES with random weights, a published model, or a run's. Input (batch,
    tokens) int64; the output's `logits` are (batch, tokens, vocab_size). The head shares the embedding's weight."""
    options = {"use_cache": False, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}
    if name.startswith("gpt"):
        options |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    kind = transformers.AutoModelForCausalLM
    if pretrained:
        model = published(kind, name, sequence_length)
        model.config.use_cache = False
    else:
        # torch's attention with its causal mask. Under the name sdpa, transformers would check in each forward whether
        # the positions show packed sequences, and would wait for the device.
        transformers.AttentionInterface.register("causal", sdpa_attention_forward)
        config = sized(name, GPT_SIZES, vocab_size, sequence_length, **options)
        model = kind.from_config(config, attn_implementation="causal")
    return ready(model, first_list(model), dropout)


def bert(
    name: str, vocab_size: int, sequence_length: int, num_classes: int, pretrained: bool = False, dropout: float = 0.0
) -> "transformers.PreTrainedModel":
    """An encoder of transformers with a classification head: one of BERT_SIZES, a published model, or a run's. Input
    (batch, tokens) int64 input_ids and attention_mask; the `logits` of the output are (batch, num_classes)."""
    kind = transformers.AutoModelForSequenceClassification
    if pretrained:  # a head for other classes is replaced by a new one
        model = published(kind, name, sequence_length, ignore_mismatched_sizes=True, num_labels=num_classes)
    else:
        model = kind.from_config(sized(name, BERT_SIZES, vocab_size, sequence_length, num_labels=num_classes))
    return ready(model, first_list(model), dropout)


def sized(
    name: str, sizes: dict[str, tuple[str, int, int, int]], vocab_size: int, sequence_length: int, **options: Any
) -> "transformers.PreTrainedConfig":
    """transformers' configuration for one of our sizes."""
    if name not in sizes:
        raise Refused(f"no model {name!r}: one of {', '.join(sizes)}, or a Hub name or run folder with --pretrained")
    kind, width, depth, heads = sizes[name]
    if kind != "gpt2":
        options["intermediate_size"] = 4 * width
    if kind == "llama":
        options["num_key_value_heads"] = max(heads // 4, 2)
    return transformers.AutoConfig.for_model(
        kind, vocab_size=vocab_size, max_position_embeddings=sequence_length, hidden_size=width,
        num_hidden_layers=depth, num_attention_heads=heads, **options,
    )  # fmt: skip


def published(kind: Any, name: str, sequence_length: int, **options: Any) -> "transformers.PreTrainedModel":
    """A model with the weights of the Hub's `name`, or of the run in that folder, for this sequence length."""
    folder = model_folder(name)
    refuse_other_sizes(kind, folder, config_of(folder))
    try:
        model = kind.from_pretrained(folder, dtype=torch.float32, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise Refused(f"--model {name}: no pretrained weights ({str(error).strip().splitlines()[0]})") from None
    longest = getattr(model.config, "max_position_embeddings", sequence_length)
    if longest < sequence_length:
        raise Refused(f"--model {name} was made for {longest} tokens: lower --sequence_length {sequence_length}")
    return model


def config_of(folder: str | Path) -> "transformers.PreTrainedConfig":
    """The config.json of a folder or of the Hub's model. Anyone may have written it: numbers that no model has are
    refused before transformers makes lists of them."""
    try:
        refuse_counts(transformers.PreTrainedConfig.get_config_dict(folder)[0], f"{folder}/config.json")
        return transformers.AutoConfig.from_pretrained(folder)
    except Refused:
        raise
    except Exception as error:  # those of huggingface_hub have no kind in common, and say why in their second line
        said = [line.strip() for line in str(error).splitlines() if not line.endswith(":")] or [type(error).__name__]
        raise Refused(f"{folder}: no pretrained model ({short(said[0], 200)})") from None


def refuse_counts(values: object, where: str) -> None:
    """Raises Refused if a config, or one inside it, asks for more layers, heads, ... than MOST."""
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values if isinstance(values, list) else ())
    for key, value in pairs:
        most = next((MOST[word] for word in MOST if word in str(key)), None)
        if most and isinstance(value, int) and value > most:
            raise Refused(f"{where}: {short(str(key))} is {short(str(value))}, and no model has more than {most:,}")
        if key not in ("label2id", "id2label"):  # whose keys are anybody's words
            refuse_counts(value, where)


def refuse_other_sizes(kind: Any, folder: str, config: "transformers.PreTrainedConfig") -> None:
    """Raises Refused if the config in a folder asks for other sizes than the weights beside it have, or for more
    blocks. The model is built without memory for weights. Its head may differ: a new one is made."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files or is_deepspeed_zero3_enabled():
        return
    try:
        weights = {name: file for file in (safe_open(path, "pt") for path in files) for name in file.keys()}
        there = {name: file.get_slice(name).get_shape() for name, file in weights.items()}
        with torch.device("meta"):
            model = kind.from_config(config)
    except Exception as error:  # of the model's own code, for sizes that do not fit together
        raise Refused(f"--model {folder}: it cannot be built ({short(str(error).strip(), 200)})") from None
    wanted = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    inner = [name for name in wanted.keys() & there.keys() if name.startswith(f"{model.base_model_prefix}.")]
    other = [f"{name} of {wanted[name]}, not {there[name]}" for name in sorted(inner) if wanted[name] != there[name]]
    blocks, saved = (
        max((int(at) for name in names for at in re.findall(r"\.(\d{1,9})\.", name)[:1]), default=-1)
        for names in (wanted, there)
    )
    if other or blocks > saved:
        asked = other[0] if other else f"{blocks + 1} blocks, not {saved + 1}"
        raise Refused(f"--model {folder}: config.json asks for {asked} as the weights beside it have")


def mask(attention_mask: torch.Tensor, pretrained: bool) -> torch.Tensor:
    """The mask (batch, tokens) as our encoders take it: of a 2-D one, which published models may need, transformers
    waits for the device to read it."""
    return attention_mask if pretrained else attention_mask.bool()[:, None, None]


def first_list(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The blocks of a model of transformers."""
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))


def model_folder(name: str) -> str:
    """The folder of the weights of a recipe's run, if `name` is one; else `name`."""
    return str(Path(name, "model")) if Path(name, "data.json").is_file() else name
