"""Preferences: of two answers to a prompt the first is better than the second.

A model learns them by how much likelier than a frozen reference it makes the one than the other (DPO,
https://arxiv.org/abs/2305.18290). The reference is the model before its first step; with LoRA, without its adapters.
Its log-probabilities are computed once, so that no strategy has to keep or split a second model.
"""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shared import args, data, models, sft, text
from shared.args import Refused

COLUMNS = ("prompt", "chosen", "rejected")
FUNCTIONS = 2500  # that are made into pairs
ROLES = 32  # tokens of bytes that the roles and ends of a prompt and its answer take


class Preferences(torch.utils.data.Dataset):
    """Conversations with the better and the other answer, beside each other in `rows`: input_ids, position_ids and
    labels (n, 2, length), and the log-probabilities of the reference (n, 2), when they are known."""

    def __init__(self, rows: sft.Chat) -> None:
        self.rows, self.fingerprint, self.reference = rows, rows.fingerprint, torch.zeros(len(rows) // 2, 2)
        self.tokenizer, self.sequence_length, self.vocab_size = rows.tokenizer, rows.length, rows.vocab_size

    def __len__(self) -> int:
        return len(self.reference)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        at = torch.as_tensor(indices) % len(self)
        return text.beside(self.rows, at) | {"reference": self.reference[at]}


def preferences(
    name: str, sequence_length: int, skip_long: bool = False, pretrained: str | None = None
) -> tuple[Preferences, Preferences]:
    """Returns (training set, held-out set): python_functions, a .json(l) file or a Hub set with columns prompt, chosen
    and rejected, which are texts or lists of messages. pretrained: as in `sft.chats`."""
    if name == "python_functions":
        parts = functions(sequence_length - ROLES)
    else:
        parts = [conversations(part, name) for part in data.split_of(data.rows(name, "python_functions"), name)]
    tokenizer = sft.tokenizer_for(pretrained)
    sets = [sft.encode(part, tokenizer, sequence_length, name, skip_long, together=2) for part in parts]
    return tuple(Preferences(sft.rows(*part, tokenizer, sequence_length, False)) for part in sets)  # pyrefly: ignore[bad-return]


def conversations(part: "text.Dataset", name: str) -> list[sft.Messages]:
    """Two conversations for each row of a split: with the chosen answer and with the rejected one."""
    if missing := set(COLUMNS) - set(part.features):
        raise Refused(f"--dataset {name} has no column {min(missing)}: {', '.join(COLUMNS)} are needed")
    rows = zip(*(data.column(part, key, name) for key in COLUMNS), strict=True)
    return [messages(prompt, "user") + messages(answer, "assistant") for prompt, *both in rows for answer in both]


def messages(said: Any, role: str) -> sft.Messages:
    return said if isinstance(said, list) else [{"role": role, "content": said}]


def functions(most: int) -> tuple[list[sft.Messages], list[sft.Messages]]:
    """Made here: short functions of Python's standard library, intact and damaged. The prompt is a function's first
    line. most: bytes of a function. Every tenth is held out."""
    parts = [], []
    short = [code for _, code in text.functions() if len(code.encode()) <= most]
    random.Random(0).shuffle(short)
    for i, code in enumerate(short[:FUNCTIONS]):
        first, _, body = code.partition("\n")
        if (other := damaged(body, random.Random(i))) != body:
            for answer in (body, other):
                parts[i % 10 == 9].append(sft.conversation(first, answer))
    return parts


def damaged(code: str, generator: random.Random) -> str:
    """The code with two letters exchanged in up to three of its words."""
    words = list(re.finditer(r"[A-Za-z]{3,}", code))
    for word in generator.sample(words, min(3, len(words))):
        at = generator.randrange(word.start(), word.end() - 1)
        code = code[:at] + code[at + 1] + code[at] + code[at + 2 :]
    return code


def token_log_probs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The log-probability of each token of both answers, (n, 2, length) in at least float32; 0 for other tokens."""
    flat = {key: batch[key].flatten(0, 1) for key in ("input_ids", "position_ids", "labels")}
    logits = models.at_least_float32(sft.logits(model, flat))
    losses = F.cross_entropy(logits.flatten(0, 1), flat["labels"].flatten(), reduction="none")
    return -losses.view_as(batch["labels"])


def log_probs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The log-probability of both answers, (n, 2)."""
    return token_log_probs(model, batch).sum(-1)


def reference(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> Tensor:
    """The log-probabilities of all answers of a loader, in order, on each process. The model is evaluated."""
    seen = []
    model.eval()
    for batch in args.with_bar(loader, accelerator.is_main_process):
        with torch.no_grad():
            seen.append(accelerator.gather_for_metrics(log_probs(model, batch)).cpu())
    model.train()
    return torch.cat(seen)


def leave(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader, folder: Path, scale: float
) -> dict[str, float]:
    """At the end of a run: saves what `from_pretrained` needs and merges adapters into the model. Every rank calls it.
    Returns log_prob_gap: by how much the log-probability of a held-out token as training computes it differs from that
    of the saved model in fp32 (https://arxiv.org/abs/2510.26788), on average over rank 0's part."""
    rows: Any = loader.dataset
    text.leave(accelerator, model, rows.rows, folder)
    plain, gaps, main = None, [], accelerator.is_main_process
    if main:
        if scale:
            sft.merge(Path(folder, "model"), scale)
        kind = transformers.AutoModelForCausalLM
        plain = kind.from_pretrained(Path(folder, "model"), dtype=torch.float32).to(accelerator.device).eval()
    model.train()  # in eval() it would compute in another precision
    with torch.no_grad():
        for batch in loader:
            ours = token_log_probs(model, batch)
            if plain is not None:
                gaps.append((ours - token_log_probs(plain, batch)).abs()[batch["labels"] >= 0].cpu())
    return {"log_prob_gap": broadcast_object_list([torch.cat(gaps).mean().item() if main else None])[0]}
