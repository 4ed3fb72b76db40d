"""What supervised fine-tuning needs: conversations by a chat template, labels on the answers only, packing, LoRA.

With packing a sequence holds as many whole conversations as fit. They do not see each other: each begins at position 0,
and `logits` lets a token attend to its own conversation only.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from shared import data, text
from shared.args import Refused, short

TEMPLATE = (  # for a tokenizer that has none
    "{% for message in messages %}{{ message['role'] + '\n' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"), ("instruction", "response"))
ASKED = 12  # held-out questions whose answers are written at the end of a run
Messages = list[dict[str, str]]  # of a conversation: {"role", "content"}
Tensors = Mapping[str, Callable[[], Tensor]]  # of each name: a function that returns the tensor


class Chat(text.Text):
    """Sequences of one conversation or, packed, of several. learned: for each token, whether it belongs to an answer.
    positions: of each token in its conversation."""

    def __init__(
        self, tokens: Tensor, starts: Tensor, counts: Tensor, length: int, tokenizer: "text.Tokenizer", learned: Tensor,
        positions: Tensor, conversations: list[Messages],
    ) -> None:  # fmt: skip
        super().__init__(tokens, starts, counts, length, tokenizer)
        self.learned, self.positions, self.conversations = learned, positions, conversations
        before = torch.cat([torch.zeros(1, dtype=torch.long), learned.long().cumsum(0)])
        self.label_counts = before[starts + counts + 1] - before[starts + 1]

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        batch = super().__getitems__(indices)
        at = self.starts[torch.as_tensor(indices) % len(self), None] + torch.arange(self.length + 1)
        at = at.clamp(max=len(self.tokens) - 1)
        padding = batch["labels"] < 0
        positions = torch.where(padding, torch.arange(self.length), self.positions[at[:, :-1]])
        labels = batch["labels"].masked_fill(~self.learned[at[:, 1:]], -100)
        return {"input_ids": batch["input_ids"], "position_ids": positions, "labels": labels}

    def mean_count(self, indices: Tensor) -> float:
        return self.label_counts[indices].double().mean().item()


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's logits, (batch, tokens, vocab_size). A token attends to the earlier ones of its conversation, which
    begins where the position is 0."""
    positions, attention = batch["position_ids"], getattr(model, "module", model).config._attn_implementation  # pyrefly: ignore[missing-attribute]
    conversation = (positions == 0).cumsum(-1)
    mask = (conversation[:, :, None] == conversation[:, None, :]).tril()[:, None]
    if "flash" in attention:  # it takes no such mask, and finds the conversations by their positions
        mask = None
    elif attention == "eager":  # it adds the mask
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, torch.finfo(torch.float32).min)
    return model(input_ids=batch["input_ids"], position_ids=positions, attention_mask=mask).logits


def chats(
    name: str, sequence_length: int, packing: bool = True, skip_long: bool = False, pretrained: str | None = None
) -> tuple[Chat, Chat]:
    """Returns (training set, held-out set): tasks, a .json(l) file or a Hub set of conversations. A set has a column
    "messages" or one of PAIRS. pretrained: a model (Hub name or folder) whose tokenizer and chat template are used;
    else tokens are bytes. The held-out set is not packed: each of its sequences is a question."""
    if name == "tasks":
        parts = tasks()
    else:
        parts = [messages(part, name) for part in data.split_of(data.rows(name, "tasks"), name)]
    tokenizer = tokenizer_for(pretrained)
    train, held_out = (encode(part, tokenizer, sequence_length, name, skip_long) for part in parts)
    return rows(*train, tokenizer, sequence_length, packing), rows(*held_out, tokenizer, sequence_length, False)


def tokenizer_for(pretrained: str | None) -> "text.Tokenizer":
    """The tokenizer of that model, or of bytes, with a chat template."""
    tokenizer = text.tokenizer_of(pretrained) if pretrained else text.train_tokenizer([], 0)
    if tokenizer.eos_token_id is None:
        raise Refused(f"--model {pretrained}: its tokenizer has no end of text, which ends an answer")
    tokenizer.chat_template = tokenizer.chat_template or TEMPLATE
    return tokenizer


def messages(part: "text.Dataset", name: str) -> list[Messages]:
    """The conversations of a split, as lists of messages."""
    if "messages" in part.features:
        return data.column(part, "messages", name)
    pair = next((pair for pair in PAIRS if set(pair) <= set(part.features)), None)
    if pair is None:
        raise Refused(
            f'--dataset {name} has columns {", ".join(map(short, part.features))}; "messages" is needed, or two of '
            + ", ".join(map(" and ".join, PAIRS))
        )
    return [conversation(*both) for both in zip(*(data.column(part, key, name) for key in pair), strict=True)]


def conversation(question: str, answer: str) -> Messages:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def encode(
    conversations: list[Messages],
    tokenizer: "text.Tokenizer",
    length: int,
    name: str,
    skip_long: bool,
    together: int = 1,
) -> tuple[list[list[int]], list[list[bool]], list[Messages]]:
    """Returns ([token ids], [whether each belongs to an answer], conversations), without those that are too long.
    together: so many in a row are kept or left out together."""
    if not conversations:
        raise Refused(f"--dataset {name}: a split holds no conversation: leave it out, or put some in")
    spans = [rendered(each, tokenizer, f"--dataset {name}, conversation {i}") for i, each in enumerate(conversations)]
    encoded = tokenizer([whole for whole, _ in spans], add_special_tokens=False, return_offsets_mapping=True)
    learned = [
        [any(start <= at < end for start, end in answers) for at, _ in offsets]
        for offsets, (_, answers) in zip(encoded["offset_mapping"], spans, strict=True)
    ]
    short = [len(ids) <= length + 1 for ids in encoded["input_ids"]]
    short = [all(short[i - i % together :][:together]) for i in range(len(short))]
    if not all(short) and not skip_long or not any(short):
        longest = max(map(len, encoded["input_ids"])) - 1
        raise Refused(
            f"--dataset {name}: {short.count(False)} of {len(short)} conversations do not fit into --sequence_length "
            f"{length}, the longest has {longest} tokens: raise it, or leave them out with --skip_long"
        )
    return tuple(list(itertools.compress(each, short)) for each in (encoded["input_ids"], learned, conversations))  # pyrefly: ignore[bad-return]


def rendered(conversation: Messages, tokenizer: Any, what: str) -> tuple[str, list[tuple[int, int]]]:
    """Returns (its text by the chat template, [(start, end) of each answer in it]). An answer is what the template adds
    after the prompt for it, so templates need not mark it."""
    try:
        whole, answers = tokenizer.apply_chat_template(conversation, tokenize=False), []
        for i, message in enumerate(conversation):
            if message["role"] == "assistant":
                prompt = tokenizer.apply_chat_template(conversation[:i], tokenize=False, add_generation_prompt=True)
                last = i == len(conversation) - 1
                answered = whole if last else tokenizer.apply_chat_template(conversation[: i + 1], tokenize=False)
                if answered.startswith(prompt) and whole.startswith(answered):
                    answers.append((len(prompt), len(answered)))
        whole.encode()  # half of a surrogate pair is no text
    except Exception as error:  # of the template, which is a program
        said = short(str(error) or type(error).__name__, 200)
        raise Refused(f"{what}: the chat template fails ({said})") from None
    if not answers:
        raise Refused(f'{what} has no answer: a message with the role "assistant" after the question')
    return whole, answers


def rows(
    encoded: list[list[int]], learned: list[list[bool]], conversations: list[Messages], tokenizer: "text.Tokenizer",
    length: int, packing: bool,
) -> Chat:  # fmt: skip
    """A Chat of these conversations, one a sequence, or packed in their order."""
    sizes = [len(ids) for ids in encoded]
    first, filled = [0], 0  # the conversations with which a sequence begins
    for i, size in enumerate(sizes):
        if i and (not packing or filled + size > length + 1):
            first, filled = [*first, i], 0
        filled += size
    ends = torch.tensor(sizes).cumsum(0)
    starts = torch.tensor([0, *ends[:-1].tolist()])[first]
    counts = torch.cat([starts[1:], ends[-1:]]) - starts - 1
    tokens, mask = (torch.tensor(list(itertools.chain(*parts))) for parts in (encoded, learned))
    positions = torch.cat([torch.arange(size) for size in sizes])
    return Chat(tokens.int(), starts, counts, length, tokenizer, mask, positions, conversations)


def tasks(words: int = 1500) -> tuple[list[Messages], list[Messages]]:
    """Made here: questions about words of Python's documentation and about numbers, each with one right answer. Every
    tenth word and number is held out, in all questions."""
    found = sorted(set(re.findall(r"\b[a-z]{3,8}\b", " ".join(text.python_docs()))))
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:words].tolist()
    parts = [], []
    for i, word in enumerate(found[at] for at in order):
        parts[i % 10 == 9].extend([
            conversation(f"Write {word} in capitals.", word.upper()),
            conversation(f"What is the first letter of {word}?", word[0]),
            conversation(f"What is the last letter of {word}?", word[-1]),
            conversation(f"Spell {word}.", "-".join(word)),
            conversation(f"Say {word} twice.", f"{word} {word}"),
        ])  # fmt: skip
    for number in torch.randperm(1000, generator=torch.Generator().manual_seed(0)).tolist():
        parts[number % 10 == 9].append(conversation(f"What comes after {number}?", str(number + 1)))
    return parts


def answer(
    model: nn.Module, tokenizer: Any, messages: Messages, context: int, length: int = text.SAMPLE,
    seconds: float = math.inf,
) -> str:  # fmt: skip
    """The model's answer to these messages, the likeliest token each time. Under FSDP2 every rank calls it."""
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    whole = text.continuation(model, tokenizer, prompt, length, context, seconds=seconds, temperature=0)
    return whole.removeprefix(prompt).strip()


def adapted(model: Any, lora_rank: int = 0, lora_alpha: int = 16, checkpointing: bool = False) -> nn.Module:
    """The model, with lora_rank > 0 with an adapter (LoRA, https://arxiv.org/abs/2106.09685) beside each linear layer
    but the head; then only adapters are trained. checkpointing: its blocks are computed again in the backward pass."""
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not lora_rank:
        return model
    try:
        from peft import LoraConfig, get_peft_model  # pyrefly: ignore[missing-import]
    except ImportError:
        raise Refused("--lora_rank needs peft: ./launch.sh setup --extra lora, or pip install peft") from None
    options = LoraConfig(r=lora_rank, lora_alpha=lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, options)


def merged(tensors: Tensors, scale: float) -> Tensors:
    """The tensors of the plain model from those of one with adapters: weight + scale * B A. scale: alpha / rank.
    Tensors are functions, so that one after the other can be read."""
    plain = {}
    adapters = {name.split(".lora_A.")[0]: name for name in tensors if ".lora_A." in name}
    pairs = {layer: (tensors[name], tensors[name.replace("lora_A", "lora_B")]) for layer, name in adapters.items()}
    # Of GPT-2's layers the weights are transposed. Square ones do not show it, but each such model has others.
    shapes = [(tensors[f"{layer}.base_layer.weight"]().shape, b().shape[0]) for layer, (_, b) in pairs.items()]
    transposed = any(shape[0] != outputs for shape, outputs in shapes)

    def weight(name: str, layer: str) -> Tensor:
        a, b = (each().float() for each in pairs[layer])
        change = scale * (b @ a)
        base = tensors[name]()
        return (base.float() + (change.T if transposed else change)).to(base.dtype)

    for name, load in tensors.items():
        if ".lora_" not in name:
            layer = name.removesuffix(".base_layer.weight")
            short = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            plain[short] = (lambda name=name, layer=layer: weight(name, layer)) if layer in pairs else load
    return plain


def merge(folder: Path, scale: float) -> None:
    """Replaces a saved model with adapters by the plain model, file by file."""
    files = {path: safe_open(path, "pt") for path in sorted(Path(folder).glob("model*.safetensors"))}
    inside = {path: set(file.keys()) for path, file in files.items()}
    tensors = {name: (lambda f=files[path], name=name: f.get_tensor(name)) for path in files for name in inside[path]}
    plain, index = merged(tensors, scale), {}
    for path, names in inside.items():
        shorts = [name.removeprefix("base_model.model.").replace(".base_layer.", ".") for name in sorted(names)]
        index |= dict.fromkeys((short for short in shorts if short in plain), path.name)
    listed = Path(folder, "model.safetensors.index.json")
    listing = json.loads(listed.read_text()) | {"weight_map": index} if listed.exists() else None
    listed.unlink(missing_ok=True)  # after a kill there is no model for a loader, not one that is merged in parts
    for path in files:
        part = {name: plain[name]().contiguous() for name, file in index.items() if file == path.name}
        data.write(path, save(part, {"format": "pt"}))
    if listing:
        data.write(listed, (json.dumps(listing, indent=2) + "\n").encode())


def leave(accelerator: Accelerator, model: nn.Module, held_out: Chat, folder: Path, scale: float) -> None:
    """At the end of a run: writes answers to held-out questions and what `from_pretrained` needs, and merges adapters
    into the model. Every rank calls it."""
    model.eval()
    lines = []
    for i in torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))[:ASKED].tolist():
        *before, last = held_out.conversations[i]
        answered = answer(model, held_out.tokenizer, before, held_out.length, seconds=text.SAMPLE_SECONDS / ASKED)
        lines.append(f"{before[-1]['content']}\n  right: {last['content']}\n  model: {answered}\n")
    accelerator.print(text.readable("".join(lines)), flush=True)
    text.leave(accelerator, model, held_out, folder)
    if accelerator.is_main_process:
        data.write(Path(folder, "answers.txt"), "".join(lines).encode(errors="replace"))
        if scale:
            merge(Path(folder, "model"), scale)
