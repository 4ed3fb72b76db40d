"""Pairs of texts, whose embeddings are to be close: functions of Python's standard library, files, sets of the Hub.

A text's embedding is the mean of the encoder's outputs over its tokens, with length 1. Negatives are the second texts
of the other pairs of a batch, over all processes (in-batch negatives, https://arxiv.org/abs/1705.00652).
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from torch import Tensor, nn

from shared import data, lm, models, text
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
        batch = text.beside(self.rows, torch.as_tensor(indices) % len(self))
        return {"input_ids": batch["input_ids"], "attention_mask": (batch["labels"] >= 0).long()}


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
    loaded = python_functions() if name == "python_functions" else data.rows(name, "python_functions")
    part = next(iter(loaded.values()))
    if len(columns := data.strings(part)[:2]) < 2:
        raise Refused(f"--dataset {name} has columns {', '.join(map(short, part.features))}; two of strings are needed")
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


def python_functions() -> "text.DatasetDict":
    """The docstrings of the standard library's functions and their code; each docstring once."""
    import datasets

    code_of: dict[str, str] = {}
    for words, code in text.functions():
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
        model = lm.published(kind, name, sequence_length)
    else:
        model = kind.from_config(lm.sized(name, lm.BERT_SIZES, vocab_size, sequence_length))
    return models.ready(without_pooler(model), lm.first_list(model), dropout)


def without_pooler(model: models.Model) -> models.Model:
    """The encoder without the layer behind the output of its first token, which would get no gradient."""
    if hasattr(model, "pooler"):
        model.pooler = None  # pyrefly: ignore[bad-argument-type]
    return model


def embeddings(model: nn.Module, batch: dict[str, Tensor], pretrained: bool = False) -> Tensor:
    """The embeddings of both texts of each pair, (2, n, width)."""
    mask = batch["attention_mask"].flatten(0, 1)
    outputs = model(batch["input_ids"].flatten(0, 1), lm.mask(mask, pretrained)).last_hidden_state
    outputs = models.at_least_float32(outputs)
    mean = (outputs * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return F.normalize(mean, dim=-1).unflatten(0, (-1, 2)).transpose(0, 1)


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
