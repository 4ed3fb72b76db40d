"""Pairs of texts, whose embeddings are to be close: functions of Python's standard library, files, sets of the Hub.

A text's embedding is the mean of the encoder's outputs over its tokens, with length 1. Negatives are the second texts
of the other pairs of a batch, over all processes (in-batch negatives, https://arxiv.org/abs/1705.00652).
"""

import ast
import functools
import itertools
import sysconfig
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from torch import Tensor, nn

from shared import data, models, text
from shared.args import Refused, short

WORDS = r"[A-Za-z][a-z]+|[0-9]+"  # of TF-IDF: the parts of a name in snake or camel case too


class Pairs(torch.utils.data.Dataset):
    """Two sequences a sample, which stand beside each other in `rows`: input_ids and attention_mask (n, 2, length)."""

    def __init__(self, rows: text.Text, texts: list[tuple[str, str]], known: list[tuple[str, str]]) -> None:
        self.rows, self.texts, self.known, self.fingerprint = rows, texts, known, rows.fingerprint
        self.tokenizer, self.sequence_length, self.vocab_size = rows.tokenizer, rows.length, rows.vocab_size

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        batch = beside(self.rows, torch.as_tensor(indices) % len(self))
        return {"input_ids": batch["input_ids"], "attention_mask": (batch["labels"] >= 0).long()}


def beside(rows: text.Text, pairs: Tensor) -> dict[str, Tensor]:
    """The two rows of each of these pairs, in tensors (n, 2, ...)."""
    batch = rows.__getitems__(torch.stack([2 * pairs, 2 * pairs + 1], 1).flatten())  # pyrefly: ignore[bad-argument-type]
    return {name: values.unflatten(0, (-1, 2)) for name, values in batch.items()}


def recall(similarity: Tensor, most: int = 10) -> float:
    """The part of the rows whose own column is among the `most` most similar ones."""
    own = torch.arange(len(similarity))[:, None]
    return (similarity.topk(min(most, len(similarity))).indices == own).any(1).double().mean().item()


@functools.lru_cache(1)
def to_beat(part: Any) -> dict[str, float]:
    """Recall at 10 of TF-IDF, which has counted the words of the training set, on these Pairs."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    counts: Any = TfidfVectorizer(token_pattern=WORDS, sublinear_tf=True).fit(itertools.chain(*part.known))
    first, second = (counts.transform(column) for column in zip(*part.texts, strict=True))
    return {"tfidf_recall_at_10": recall(torch.tensor((first @ second.T).toarray()))}


def pairs(name: str, length: int, vocab_size: int = 0, pretrained: str | None = None) -> tuple[Pairs, Pairs]:
    """Returns (training set, held-out set) of python_functions, a .csv or .json file, or a Hub dataset ("name:part").
    The first two columns of strings are the pairs. Longer texts are cut."""
    file_format = Path(name).suffix[1:].removesuffix("l")  # jsonl is json to `datasets`
    if name == "python_functions":
        loaded = python_functions()
    elif file_format in ("csv", "json"):
        loaded = data.load(name, "python_functions", file_format, data_files=name)
    else:
        loaded = data.load(name, "python_functions", *name.split(":"))
    features = next(iter(loaded.values())).features
    columns = [key for key, feature in features.items() if "string" in str(getattr(feature, "dtype", ""))][:2]
    if len(columns) < 2:
        raise Refused(f"--dataset {name} has columns {', '.join(map(short, features))}; two of strings are needed")
    parts = [list(zip(*text.texts_in(part, columns, name), strict=True)) for part in data.split_of(loaded, name)]
    if not all(parts):
        raise Refused(f"--dataset {name}: a split holds no pair: leave it out, or put some in")
    if pretrained:
        tokenizer = text.tokenizer_of(pretrained)
        tokenizer.eos_token = tokenizer.eos_token or tokenizer.pad_token
    else:
        tokenizer = text.train_tokenizer(itertools.chain(*parts[0]), vocab_size)
    return tuple(Pairs(rows_of(part, tokenizer, length), part, parts[0]) for part in parts)  # pyrefly: ignore[bad-return]


def rows_of(texts: list[tuple[str, str]], tokenizer: "text.Tokenizer", length: int) -> text.Text:
    """A Text with a sequence for each text, those of a pair beside each other."""
    encoded = text.encode(tokenizer, [list(itertools.chain(*texts))], length)
    ids = [torch.tensor(tokens, dtype=torch.int32) for tokens in encoded]
    counts = torch.tensor([len(tokens) for tokens in ids])
    return text.Text(torch.cat(ids), counts.cumsum(0) - counts, counts, length, tokenizer)


def functions() -> list[tuple[str, str]]:
    """[(first paragraph of its docstring, "" if it has none, the code without the docstring)] of the functions of the
    standard library, without tests. Each code is there once."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), {}
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        if {"site-packages", "dist-packages", "test", "tests"} & set(path.parts[len(root.parts) :]):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and len(node.body) > bool(ast.get_docstring(node)):
                words, doc = ast.get_docstring(node) or "", node.body[0]
                kept = lines[node.lineno - 1 : node.end_lineno]
                if words:
                    kept = lines[node.lineno - 1 : doc.lineno - 1] + lines[doc.end_lineno : node.end_lineno]
                found.setdefault(textwrap.dedent("\n".join(kept)), words.split("\n\n")[0])
    return [(words, code) for code, words in found.items()]


def python_functions() -> "text.DatasetDict":
    """The docstrings of the standard library's functions and their code; each docstring once."""
    import datasets

    code_of: dict[str, str] = {}
    for words, code in functions():
        if words:
            code_of.setdefault(words, code)
    columns = {"docstring": list(code_of), "code": list(code_of.values())}
    return datasets.DatasetDict(train=datasets.Dataset.from_dict(columns))  # pyrefly: ignore[bad-argument-type]


def encoder(
    name: str, vocab_size: int, sequence_length: int, pretrained: bool = False, dropout: float = 0.0
) -> "transformers.PreTrainedModel":
    """An encoder of transformers without a head: one of BERT_SIZES, a published model, or a run's. The output's
    `last_hidden_state` is (batch, tokens, width)."""
    kind = transformers.AutoModel
    if pretrained:
        model = models.published(kind, name, sequence_length)
    else:
        model = kind.from_config(models.sized(name, models.BERT_SIZES, vocab_size, sequence_length))
    return models.ready(without_pooler(model), models.first_list(model), dropout)


def without_pooler(model: models.Model) -> models.Model:
    """The encoder without the layer behind the output of its first token, which would get no gradient."""
    if hasattr(model, "pooler"):
        model.pooler = None  # pyrefly: ignore[bad-argument-type]
    return model


def as_recorded(record: dict[str, Any], folder: Path) -> nn.Module:
    """The encoder of the run in `folder` with random weights. record: its run.json, with its data.json as "data"."""
    if Path(folder, "model", "config.json").is_file():
        return without_pooler(transformers.AutoModel.from_config(models.config_of(Path(folder, "model"))))
    return encoder(record["args"]["model"], record["data"]["vocab_size"], record["data"]["sequence_length"])


def embeddings(model: nn.Module, batch: dict[str, Tensor], waits: bool = False) -> Tensor:
    """The embeddings of both texts of each pair, (2, n, width). waits: gives a model of others the mask as it is, of
    which transformers waits for the device to read."""
    mask = batch["attention_mask"].flatten(0, 1)
    outputs = model(batch["input_ids"].flatten(0, 1), mask if waits else mask.bool()[:, None, None])
    outputs = models.at_least_float32(outputs.last_hidden_state)
    mean = (outputs * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return F.normalize(mean, dim=-1).unflatten(0, (-1, 2)).transpose(0, 1)


@torch.no_grad()
def nearest(model: nn.Module, part: Pairs, asked: str, device: torch.device, most: int = 3) -> list[str]:
    """A line for each of the most similar second texts: the similarity and the text's beginning."""
    texts = [(asked, second) for _, second in part.texts]
    rows = Pairs(rows_of(texts, part.tokenizer, part.sequence_length), texts, [])
    found = []
    for first in range(0, len(rows), 64):
        batch = rows.__getitems__(range(first, min(first + 64, len(rows))))
        queries, answers = embeddings(model, {name: values.to(device) for name, values in batch.items()}, waits=True)
        found.append((queries * answers).sum(-1).cpu())
    best = torch.cat(found).topk(min(most, len(rows)))
    return [f"{value:.3f}  {texts[at][1][:200]}" for value, at in zip(*map(Tensor.tolist, best), strict=True)]


class Gathered(torch.autograd.Function):
    """The rows of all processes, in their order. Each process gets the sum of all gradients for its rows. (torch's own
    such functions have other names in each release.)"""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        everyone = rows.new_empty(len(rows) * torch.distributed.get_world_size(), *rows.shape[1:])
        torch.distributed.all_gather_into_tensor(everyone, rows.contiguous())
        return everyone

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        [gradient] = gradients
        own = gradient.new_empty(len(gradient) // torch.distributed.get_world_size(), *gradient.shape[1:])
        torch.distributed.reduce_scatter_tensor(own, gradient.contiguous())
        return own


def gathered(accelerator: Accelerator, rows: Tensor) -> Tensor:
    """The rows of all processes, with gradients. DDP, FSDP2 and ZeRO then average gradients over processes, so that a
    mean of each process's rows has the gradient of the mean over all rows."""
    if getattr(accelerator.parallelism_config, "non_data_parallel_size", 1) > 1:
        raise Refused("processes that share a batch would be each other's negatives: take a config without tp")
    return Gathered.apply(rows) if accelerator.num_processes > 1 else rows  # pyrefly: ignore[bad-return]
