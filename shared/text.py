"""Text datasets by name: Python's own documentation and source (offline), local files, or any text set of the Hub.

Documents become tokens, and tokens become sequences. With packing, all documents are one stream that is cut into
sequences. Without it, each document has its own sequences, which are padded. Labels of padding are -100 and do not
count in the loss, so batches differ in their number of labels.
"""

import ast
import hashlib
import itertools
import math
import os
import sysconfig
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from shared import data, lm
from shared.args import Refused, short

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from transformers import PreTrainedTokenizerBase as Tokenizer

END = "<|endoftext|>"
SAMPLE = 100  # tokens of the sample at the end of a run
SAMPLE_SECONDS = 60  # after which it ends earlier
SUFFIXES = {".txt", ".md", ".rst", ".py"}  # of a folder's text files


class Text(torch.utils.data.Dataset):
    """Sequences from one array of tokens: (n, length) int64 input_ids and labels, which are the next tokens. tokens:
    all tokens in one array. starts, counts: where each sequence begins and how many labels it has (the rest is
    padding). classes, classes_of: the names of the classes and the class of each sequence, for classification."""

    def __init__(
        self, tokens: Tensor, starts: Tensor, counts: Tensor, length: int, tokenizer: "Tokenizer",
        classes: list[str] | None = None, classes_of: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.tokens, self.starts, self.counts, self.tokenizer = tokens, starts, counts, tokenizer
        self.classes, self.classes_of = classes, torch.empty(0) if classes_of is None else classes_of
        self.length = self.sequence_length = length
        self.vocab_size = -(-len(tokenizer) // 16) * 16  # a multiple of 16, as FP8 needs; the last few are never used

    def __len__(self) -> int:
        return len(self.starts)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        rows = torch.as_tensor(indices) % len(self)
        at = self.starts[rows, None] + torch.arange(self.length + 1)
        tokens = self.tokens[at.clamp(max=len(self.tokens) - 1)].long()
        padding = torch.arange(self.length) >= self.counts[rows, None]
        ids = tokens[:, :-1].masked_fill(padding, self.tokenizer.eos_token_id)
        if self.classes:
            return {"input_ids": ids, "attention_mask": (~padding).long(), "labels": self.classes_of[rows]}
        return {"input_ids": ids, "labels": tokens[:, 1:].masked_fill(padding, -100)}

    def mean_count(self, indices: Tensor) -> float:
        """The mean number of labels of these sequences, without loading them."""
        return self.counts[indices].double().mean().item()

    def labels(self, accelerator: Accelerator, indices: Tensor, samples: int) -> float:
        """The mean number of labels in so many of these sequences; in sequence parallel, in a process's slices."""
        return self.mean_count(indices) * (samples / getattr(accelerator.parallelism_config, "sp_size", 1))

    def fingerprint(self) -> str:
        """sha256 of every token and of where sequences begin."""
        digest = hashlib.sha256(f"{self.length} {self.vocab_size}".encode())
        for part in (self.tokens, self.starts, self.counts, self.classes_of):
            digest.update(part.numpy())  # pyrefly: ignore[bad-argument-type]
        return digest.hexdigest()


def beside(rows: Text, pairs: Tensor) -> dict[str, Tensor]:
    """The two rows of each of these pairs, in tensors (n, 2, ...)."""
    batch = rows.__getitems__(torch.stack([2 * pairs, 2 * pairs + 1], 1).flatten())  # pyrefly: ignore[bad-argument-type]
    return {name: values.unflatten(0, (-1, 2)) for name, values in batch.items()}


def encode(tokenizer: "Tokenizer", columns: list[list[str]], length: int) -> list[list[int]]:
    """Token ids of texts or pairs, with a published encoder's special tokens, or with our END before each text."""
    if tokenizer.cls_token is None:
        columns = [[END + END.join(row) for row in zip(*columns, strict=True)]]
    return tokenizer(*columns, truncation=True, max_length=length)["input_ids"]


def labelled(name: str, sequence_length: int, vocab_size: int = 0, pretrained: str | None = None) -> tuple[Text, ...]:
    """Returns (training set, held-out set) of python_packages, a .csv or .json file, or a Hub dataset ("name:part").
    The class is the column "label". The text is the first column of strings; if there are two, the text is the pair."""
    loaded = python_packages() if name == "python_packages" else data.rows(name, "python_packages")
    part = next(iter(loaded.values()))
    features, columns = part.features, [key for key in data.strings(part) if key != "label"][:2]
    if not hasattr(features.get("label"), "dtype") or not columns:  # an object, or a list, has none
        raise Refused(f'--dataset {name} has columns {features}; a text and one named "label" are needed, both Values')
    if not hasattr(features["label"], "names"):
        loaded = loaded.class_encode_column("label")
    if "test" in loaded and set(loaded["test"]["label"]) == {-1}:
        del loaded["test"]  # GLUE's test sets have no labels
    train, held_out = data.split_of(loaded, name)
    if pretrained:
        tokenizer = tokenizer_of(pretrained)
    else:
        tokenizer = train_tokenizer(itertools.chain(*texts_in(train, columns, name)), vocab_size)
    if tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.pad_token
    for part in (train, held_out):
        data.refuse_labels_out_of_range(name, part, "label")
    return tuple(sequences(part, columns, tokenizer, sequence_length, name) for part in (train, held_out))


def texts_in(part: "Dataset", columns: list[str], name: str) -> list[list[str]]:
    """A list of texts for each of these columns."""
    return [[text or "" for text in data.column(part, column, name)] for column in columns]


def sequences(part: "Dataset", columns: list[str], tokenizer: "Tokenizer", length: int, name: str) -> Text:
    """A Text with one sequence, which has a class, for each row of a labelled split."""
    encoded = encode(tokenizer, texts_in(part, columns, name), length)
    ids = [torch.tensor(tokens, dtype=torch.int32) for tokens in encoded]
    counts = torch.tensor([len(tokens) for tokens in ids])
    starts, labels = counts.cumsum(0) - counts, torch.tensor(part["label"][:])
    return Text(torch.cat(ids), starts, counts, length, tokenizer, part.features["label"].names, labels)


def python_packages(size: int = 400) -> "DatasetDict":
    """Pieces of the source of ten packages of the standard library; the class is the package."""
    import datasets

    names = "asyncio email http importlib json logging multiprocessing unittest urllib xml".split()
    package_of = {}  # each piece once
    for name in names:
        for source in files(Path(sysconfig.get_paths()["stdlib"], name)):
            package_of |= {source[at : at + size]: name for at in range(0, len(source), size)}
    columns = {"text": list(package_of), "label": list(package_of.values())}
    return datasets.DatasetDict(train=datasets.Dataset.from_dict(columns))  # pyrefly: ignore[bad-argument-type]


def texts(
    name: str, sequence_length: int, vocab_size: int = 0, packing: bool = True, pretrained: str | None = None
) -> tuple[Text, ...]:
    """Returns (training set, held-out set): python_docs, python_source, a text file, a folder of them, a Hub dataset.
    vocab_size: of a byte-level BPE trained on the training documents; 0 means bytes. pretrained: a model (Hub name or
    folder) whose tokenizer is used instead."""
    train, held_out = ([text for text in data.column(part, "text", name) if text] for part in documents(name))
    if not train or not held_out:
        raise Refused(f"--dataset {name} has no text to {'train on' if held_out else 'hold out'}")
    tokenizer = tokenizer_of(pretrained) if pretrained else train_tokenizer(train, vocab_size)
    if tokenizer.eos_token_id is None:
        raise Refused(f"--model {pretrained}: its tokenizer has no end of text, which separates documents")
    return tuple(cut(part, tokenizer, sequence_length, packing) for part in (train, held_out))


def documents(name: str) -> "tuple[Dataset, ...]":
    """Returns (training documents, held-out documents), `datasets` with a column "text"."""
    path = Path(name).expanduser()
    if name == "python_docs":
        return hold_out_a_tenth(python_docs())
    if name == "python_source":
        return hold_out_a_tenth(python_source())
    if path.exists() and not list(path.glob("**/*.parquet")):
        return hold_out_a_tenth(files(path))
    train, held_out = data.split_of(data.load(name, "python_docs, python_source", name), name)
    if "text" not in train.features:
        raise Refused(f'--dataset {name} has columns {", ".join(train.features)}; one named "text" is needed')
    return train.select_columns("text"), held_out.select_columns("text")  # pyrefly: ignore[bad-return]


def hold_out_a_tenth(whole: list[str]) -> "tuple[Dataset, ...]":
    """Every tenth of these documents or, of a single one, its last tenth, is held out."""
    import datasets

    held_out = [text for i, text in enumerate(whole) if i % 10 == 9]
    train = [text for i, text in enumerate(whole) if i % 10 != 9]
    if not held_out:
        text = "\n".join(whole)
        train, held_out = [text[: len(text) * 9 // 10]], [text[len(text) * 9 // 10 :]]
    return tuple(datasets.Dataset.from_dict({"text": part}) for part in (train, held_out))


def python_docs(page: int = 4000) -> list[str]:
    """The topics of Python's `help()`, its language reference, in pages of about 4,000 characters. Topics repeat each
    other's paragraphs. Only the first copy of one is kept, so that no held-out text is in the training set."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise Refused("--dataset python_docs needs pydoc_data, which this Python lacks: try python_source") from None
    seen, pages = set(), []
    for name in sorted(topics):
        pages.append("")
        for paragraph in topics[name].split("\n\n"):
            if (words := paragraph.strip()) and words not in seen:
                seen.add(words)
                if len(pages[-1]) > page:
                    pages.append("")
                pages[-1] += paragraph + "\n\n"
    return [text for text in pages if text]


def python_source() -> list[str]:
    """The standard library's modules, without tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (path.relative_to(root) for path in sorted(root.rglob("*.py")))
    kept = [root / p for p in paths if not {"site-packages", "dist-packages", "test", "tests"} & set(p.parts)]
    return [path.read_text(encoding="utf-8", errors="replace") for path in kept]


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


def not_listed(error: OSError) -> NoReturn:
    raise Refused(f"{error.filename} cannot be listed ({error.strerror}): let this user read it, or remove it")


def files(path: Path) -> list[str]:
    """The texts of a file or of a folder's files. Raises Refused with the name of a file that is not UTF-8."""
    below = os.walk(path, onerror=not_listed) if path.exists() else ()  # Path.rglob would find nothing
    every = [path] if not path.is_dir() else sorted(Path(folder, name) for folder, _, names in below for name in names)
    paths = [file for file in every if file == path or file.suffix in SUFFIXES]
    texts = []
    for file in paths:
        if file.exists() and not file.is_file():
            raise Refused(f"{file} is not a regular file: take another, or remove it from the folder")
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"{file} cannot be read as UTF-8 text ({error}): convert it, or remove it") from None
    if not any(texts):
        raise Refused(f"{path} holds no text in files named {', '.join(sorted(SUFFIXES))}")
    return texts


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Trains a byte-level BPE of `vocab_size` tokens on `documents`; 0 means the bytes and an end of text only."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    smallest = 257  # bytes, END
    if 0 < vocab_size <= smallest:
        raise Refused(f"--vocab_size {vocab_size} is too small: 0 means bytes, a BPE has more tokens than {smallest}")
    trained = ByteLevelBPETokenizer()
    options = {"min_frequency": 1, "show_progress": False, "special_tokens": [END]}
    trained.train_from_iterator(documents if vocab_size else [], vocab_size or smallest, **options)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained.to_str()), eos_token=END)


def tokenizer_of(name: str) -> "Tokenizer":
    from transformers import AutoTokenizer

    if Path(name, "config.json").is_file():
        lm.config_of(name)  # it is read for the tokenizer's class
    try:
        return AutoTokenizer.from_pretrained(name)  # pyrefly: ignore[bad-return]
    except Exception as error:  # of files that anyone may have written
        raise Refused(
            f"--model {name}: no tokenizer ({short(str(error).strip() or type(error).__name__, 200)})"
        ) from None


def cut(documents: list[str], tokenizer: "Tokenizer", length: int, packing: bool) -> Text:
    """Cuts `documents` into a Text of sequences with `length` labels each, or fewer at an end."""
    encoded = tokenizer([text for text in documents if text], add_special_tokens=False, verbose=False)["input_ids"]
    # Each document begins and ends with an end of text; when packed, two documents share one.
    ends = [tokenizer.eos_token_id]
    parts = [torch.tensor(ends + (ids if packing else ids + ends), dtype=torch.int32) for ids in encoded]
    sizes = torch.tensor([len(part) for part in parts])
    if packing:
        parts.append(torch.tensor(ends, dtype=torch.int32))
        sizes = torch.tensor([sizes.sum() + 1])
    first = sizes.cumsum(0) - sizes
    starts = torch.cat([torch.arange(0, size - 1, length) + at for at, size in zip(first, sizes, strict=True)])  # pyrefly: ignore[no-matching-overload]
    last = torch.cat([(at + size - 1).expand(-(-(size - 1) // length)) for at, size in zip(first, sizes, strict=True)])  # pyrefly: ignore[no-matching-overload]
    return Text(torch.cat(parts), starts, (last - starts).clamp(max=length), length, tokenizer)


def continuation(
    model: nn.Module, tokenizer: "Tokenizer", prompt: str, length: int, context: int, seed: int = 0,
    seconds: float = math.inf, temperature: float = 0.8,
) -> str:  # fmt: skip
    """`prompt` with up to `length` sampled tokens after it. Under FSDP2 every rank calls it, and each token gathers the
    whole model; so it ends after `seconds`, on the clock of rank 0. temperature: 0 takes the likeliest token."""
    end = time.monotonic() + seconds
    device = next(model.parameters()).device
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # else each length would be compiled again
        for _ in range(length):
            logits = model(ids[:, -context:].to(device)).logits[0, -1, : len(tokenizer)].float().cpu()
            if temperature:
                token = torch.multinomial(logits.div(temperature).softmax(0), 1, generator=generator)
            else:
                token = logits.argmax()[None]
            if time.monotonic() > end:
                token.fill_(tokenizer.eos_token_id)
            if torch.distributed.is_initialized():  # else one rank alone could end: by its clock, or logits' last bit
                drawn = token.to(device)
                torch.distributed.broadcast(drawn, 0)
                token = drawn.cpu()
            if token == tokenizer.eos_token_id:
                break
            ids = torch.cat([ids, token[None]], 1)
    return tokenizer.decode(ids[0])  # pyrefly: ignore[bad-return]


def readable(text: str) -> str:
    """The text with what a terminal would obey, such as escape sequences in a data set, as Python writes it: \\x1b."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def leave(accelerator: Accelerator, model: nn.Module, dataset: Text, folder: Path, prompt: str | None = None) -> None:
    """At the end of a run: prints a sample and saves what `from_pretrained` needs. Every rank calls it."""
    if prompt:
        model.eval()
        sample = continuation(model, dataset.tokenizer, prompt, SAMPLE, dataset.length, seconds=SAMPLE_SECONDS)
        accelerator.print(f"sample: {readable(sample)}", flush=True)
    if accelerator.is_main_process:
        if prompt:
            data.write(Path(folder, "sample.txt"), f"{sample}\n".encode(errors="replace"))  # pyrefly: ignore[unbound-name]
        plain: Any = accelerator.unwrap_model(model)
        if plain.can_generate():
            plain.generation_config.update(eos_token_id=dataset.tokenizer.eos_token_id, use_cache=True)
            plain.generation_config.save_pretrained(Path(folder, "model"))
        plain.config.save_pretrained(Path(folder, "model"))
        dataset.tokenizer.save_pretrained(Path(folder, "model"))
