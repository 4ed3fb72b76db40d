"""The model card: README.md beside the weights, made of the run's record. Names and texts in the record may be
anyone's: they stand in code spans and code blocks, and in YAML that a library writes."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from faithful.disk.names import printable
from faithful.disk.readers import RECORD, bytes_of, number
from faithful.disk.replacing import write_text
from faithful.saving.beside import CONFIG, Saved

NAME = "README.md"
MARK = "<!-- Written by faithful at the end of a run, and replaced by the next one. Remove this line to keep it. -->"
HUB_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)


def write(folder: Path, record: dict[str, Any], saved: Saved, repository: str | None) -> None:
    """Writes the card of the model in `folder`, unless a card is there that is not ours. record: run.json. repository:
    where the model will be on the Hub. Raises OSError."""
    file = folder / NAME
    if not file.exists() or MARK.encode() in bytes_of(file, RECORD[0]):
        write_text(file, text(record, saved if (folder / CONFIG).is_file() else Saved(saved.kind), repository))


def text(record: dict[str, Any], saved: Saved, repository: str | None = None) -> str:
    """The card of a finished run."""
    plan, how = record["plan"], record["config"]["name"] or "no config file"
    parts = [
        f"---\n{front_matter(record, saved, repository)}\n---\n\n{MARK}\n\n# {code(record['recipe'])}, {code(how)}",
        f"{code(saved.kind)}, trained with [Accelerate](https://huggingface.co/docs/accelerate) under {code(how)}: "
        f"{code(plan['strategy'])} in {plan['num_processes']} processes, precision {code(plan['precision'])}."
        + (" There was no GPU: this was a rehearsal on a CPU." if plan["rehearsal"] else ""),
        "## Use",
        use(saved, repository),
        "## Results",
        table("metric", (final_metrics(record) or {"none": "was logged"}).items()),
        "## Training",
        table("", training(record)),
        *(f"- {code(without_paths(line))}" for line in record["notes"]),
        block("bash", without_paths(record["command"])),
        *([block("yaml", without_paths(record["config"]["text"]))] if record["config"]["text"] else []),
        "`measured` is counted on live tensors after the first optimizer step.",
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(record: dict[str, Any], saved: Saved, repository: str | None) -> str:
    """The YAML that the Hub reads."""
    plan, args, metrics = record["plan"], record["args"], final_metrics(record)
    dataset, model = str(args.get("dataset") or "unknown"), str(args.get("model") or "")
    results = [
        EvalResult(saved.task or "other", printable(dataset), printable(dataset), printable(name), value)
        for name, value in metrics.items()
    ]
    return ModelCardData(
        library_name=saved.library,
        pipeline_tag=saved.task,
        base_model=model if args.get("pretrained") and on_hub(model) else None,
        datasets=[dataset] if on_hub(dataset) else None,
        metrics=[printable(name) for name in metrics if "loss" not in name] or None,
        tags=["accelerate", *(plan[key] for key in ("strategy", "precision", "level") if plan[key])],
        model_name=printable((repository or record["recipe"]).rpartition("/")[2]),
        eval_results=results or None,
    ).to_yaml()


def on_hub(name: str) -> bool:
    """Whether this can be an owner's model or data set on the Hub, and is no folder here."""
    return bool(HUB_NAME.fullmatch(name)) and not Path(name).exists()


def final_metrics(record: dict[str, Any]) -> dict[str, float]:
    """{name: number} of what the run has logged last."""
    final = record["final"] or {}
    return {name: value for name, value in (final.get("metrics") or {}).items() if number(value)}


def training(record: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """The rows that say how the model was trained, and on what."""
    seen, evidence, args = record["seen"], record["evidence"] or {}, record["args"]
    yield "measured", evidence.get("measured")
    for name in ("dataset", "model", "learning_rate"):
        yield name, args.get(name) if name != "dataset" else without_paths(str(args.get(name) or ""))
    yield "optimizer", (seen["optimizer"] or {}).get("class")
    yield "optimizer steps", (record["final"] or {}).get("step")
    yield "global batch", seen["samples_per_step"]
    curve = [f"{loss:.4g}" for _, loss in seen["loss_curve"] if number(loss)]
    yield "training loss", curve and f"{curve[0]} to {curve[-1]}"
    yield "parameters", evidence.get("parameters")
    per_parameter = evidence.get("bytes_per_parameter")
    yield "bytes per parameter", per_parameter and f"{per_parameter['total']:.1f}, of weights, gradients and optimizer"
    yield "device", record["device_name"]
    yield "finished", record["finished"]
    yield "versions", ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    yield "commit", record["git_commit"] and record["git_commit"] + (", changed since" if record["git_dirty"] else "")


def use(saved: Saved, repository: str | None) -> str:
    """How to load the model: a block of code."""
    if saved.library == "transformers":
        import transformers

        auto = f"AutoModel{saved.kind[saved.kind.find('For') :] if 'For' in saved.kind else ''}"
        auto = auto if hasattr(transformers, auto) else "AutoModel"
        lines = f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("{repository or "model"}")'
    elif saved.library == "timm":
        where = f"hf-hub:{repository}" if repository else "local-dir:model"
        lines = f'import timm\n\nmodel = timm.create_model("{where}", pretrained=True)'
    else:
        lines = 'from safetensors.torch import load_file\n\nmodel.load_state_dict(load_file("model.safetensors"))'
    return block("python", lines)


def table(head: str, rows: Iterable[tuple[str, object]]) -> str:
    """A table of two columns. Rows without a value are left out."""
    lines = [f"| {head} | |", "|---|---|"]
    for name, value in rows:
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        lines += [f"| {code(name)} | {code(shown)} |"] if value not in (None, "", []) else []
    return "\n".join(lines)


def code(words: object) -> str:
    """Text as a code span that also stands in a table. What it holds is no Markdown."""
    words = printable(str(words))[:500].replace("|", "\\|") or " "
    fence = "`" * (max(map(len, re.findall("`+", words)), default=0) + 1)
    return f"{fence} {words} {fence}" if "`" in words else f"{fence}{words}{fence}"


def block(language: str, words: str) -> str:
    """Lines as a code block, whatever they hold."""
    words = "\n".join(map(printable, words.rstrip("\n").split("\n")))
    fence = "`" * max(max(map(len, re.findall("`+", words)), default=0) + 1, 3)
    return f"{fence}{language}\n{words}\n{fence}"


def without_paths(words: str) -> str:
    """Text with the last part alone of each absolute path: the rest names the user's machine."""
    return re.sub(r"(?<![\w./~:])~?/(?:[^\s/'\"]+/)*([^\s/'\"]+)", r"\1", words)
