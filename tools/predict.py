"""Predicts with a trained model: the class of images or of a text, the continuation of a text, an answer, what is
similar to a text, a picture.

    ./launch.sh predict runs/vit-... photo.jpg folder/      one line each: file, class, probability
    ./launch.sh predict runs/gpt-... --prompt "import "
    ./launch.sh predict runs/sft-... --prompt "Spell tree."
    ./launch.sh predict runs/embed-... --prompt "Return the size of a file."    what of the held-out set is most similar
    ./launch.sh predict runs/diffusion-... --classes 3 7    a row of images of each class, as RUN/predict.png

Images are prepared like the run's held-out images: size, channels, normalization. The weights are those of the finished
model or, if there is none, of the newest complete checkpoint. `--precision evaluated`, the default, computes like the
run's own evaluation: under bf16 autocast for bf16 and FP8 configs (evaluation does not use FP8), and with weights
rounded to e4m3 if FSDP2 gathered them in FP8. `--precision plain` computes in fp32.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import progress  # noqa: E402

with progress.waiting("imports torch"):
    import torch

    from tools.export import load, record_of
from faithful.disk.names import files_below, printable  # noqa: E402
from shared import images  # noqa: E402
from shared.args import Refused  # noqa: E402
from tools import cli, find  # noqa: E402

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"}


def precision_of(
    precision: str, model: torch.nn.Module, record: dict[str, Any], device: torch.device
) -> contextlib.AbstractContextManager:
    """The context to compute in: of --precision plain, nothing; else the autocast of the run's evaluation, and the
    weights are rounded in place if the evaluation used rounded ones."""
    if precision == "plain":
        return contextlib.nullcontext()
    if record["evidence"] is None:
        raise Refused("run.json does not say in which precision the run was evaluated: add --precision plain")
    evaluated = record["evidence"]["eval_precision"]
    if "gathered as e4m3" in evaluated:
        round_weights(model, record)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(evaluated.split(",")[0])
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


def round_weights(model: torch.nn.Module, record: dict[str, Any]) -> None:
    """Rounds the weights of FP8 layers to e4m3 with one scale per tensor, like torchao's FP8 all-gather."""
    left = {entry["name"] for entry in record["evidence"]["linear_skipped"]}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name not in left:
            scale = 448.0 / module.weight.detach().abs().max().double().clamp(min=1e-12)
            codes = (module.weight.detach() * scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            module.weight.data = codes.float() / scale.float()


def files_of(inputs: Iterable[Path]) -> Iterator[Path]:
    for path in inputs:
        if path.is_dir():
            yield from (path / name for name in files_below(path) if Path(name).suffix.lower() in SUFFIXES)
        else:
            yield path


def transform_of(about: dict[str, Any]) -> "Callable[[Image], torch.Tensor]":
    """Returns the transform of the run's held-out images: RGB image -> (channels, image_size, image_size) float32."""
    if "interpolation" in about:
        from timm.data import create_transform

        keys = ("mean", "std", "interpolation", "crop_pct")
        try:
            return create_transform((3, about["image_size"], about["image_size"]), **{key: about[key] for key in keys})  # pyrefly: ignore[bad-return]
        except (LookupError, TypeError, ValueError) as error:
            raise Refused(
                f"data.json does not say how images were prepared ({type(error).__name__}: {error})"
            ) from None

    def transform(image: "Image") -> torch.Tensor:
        import numpy as np

        image = image.convert("L" if about["in_chans"] == 1 else "RGB")
        pixels = torch.from_numpy(np.array(image)).view(image.height, image.width, -1).permute(2, 0, 1)[None]
        size = (about["image_size"],) * 2
        if pixels.shape[2:] != size:
            pixels = torch.nn.functional.interpolate(pixels.float(), size, mode="bilinear", antialias=True).byte()
        prepared = images.Images(pixels, torch.zeros(1, dtype=torch.long), 1).fitted(None, about)
        return prepared.__getitems__([0])["pixel_values"][0]

    return transform


def classes(
    model: torch.nn.Module,
    record: dict[str, Any],
    paths: list[Path],
    precision: str = "evaluated",
    batch_size: int = 64,
    device: str | torch.device = "cpu",
) -> list[tuple[Path, str, float]]:
    """[(path, class, probability)] for image files."""
    device, about = torch.device(device), record["data"]
    class_names = about.get("classes") or [str(label) for label in range(about["num_classes"])]
    transform = transform_of(about)
    context = precision_of(precision, model, record, device)
    model, rows = model.to(device), []
    for first in range(0, len(paths), batch_size):
        part = paths[first : first + batch_size]
        pixels = torch.stack(
            [transform(images.read_image({"path": str(path), "bytes": None}, i)) for i, path in enumerate(part, first)]
        )
        with torch.no_grad(), context:
            probabilities = model(pixels.to(device)).float().softmax(-1)
        for path, row in zip(part, probabilities, strict=True):
            rows.append((path, class_names[row.argmax()], row.max().item()))
    return rows


def of_text(args: argparse.Namespace, device: torch.device) -> str:
    """What the model makes of --prompt: how it goes on or, from an encoder, its class and probability, or
    what is most similar to it."""
    if args.prompt is None or args.inputs:
        raise Refused(f"{args.run} was trained on texts: give it --prompt TEXT and no files")
    from shared import pairs, sft, text

    model, record, _ = load(args.run, args.checkpoint)
    tokenizer, length = text.tokenizer_of(str(args.run / "model")), record["data"]["sequence_length"]
    with precision_of(args.precision, model, record, device):
        model = model.to(device)
        if record["recipe"] == "gpt":
            return text.continuation(model, tokenizer, args.prompt, args.tokens, length, args.seed)
        if record["recipe"] in ("sft", "dpo"):
            return sft.answer(model, tokenizer, [{"role": "user", "content": args.prompt}], length, args.tokens)
        if record["recipe"] == "embed":
            known = record["args"]["dataset"], length, record["args"]["vocab_size"], str(args.run / "model")
            return "\n".join(map(printable, nearest(model, pairs.pairs(*known)[1], args.prompt, device)))
        ids = torch.tensor(text.encode(tokenizer, [[args.prompt]], length), device=device)
        with torch.no_grad():
            row = model(ids).logits[0].float().softmax(-1)
    return f"{record['data']['classes'][row.argmax()]}\t{row.max():.4f}"


@torch.no_grad()
def nearest(model: torch.nn.Module, part: Any, asked: str, device: torch.device, most: int = 3) -> list[str]:
    """A line for each of the most similar second texts: the similarity and the text's beginning."""
    from shared import pairs

    texts = [(asked, second) for _, second in part.texts]
    rows = pairs.Pairs(pairs.rows_of(texts, part.tokenizer, part.sequence_length), texts, [])
    found = []
    for first in range(0, len(rows), 64):
        batch = rows.__getitems__(range(first, min(first + 64, len(rows))))
        queries, answers = pairs.embeddings(
            model, {name: values.to(device) for name, values in batch.items()}, pretrained=True
        )
        found.append((queries * answers).sum(-1).cpu())
    best = torch.cat(found).topk(min(most, len(rows)))
    return [f"{value:.3f}  {texts[at][1][:200]}" for value, at in zip(*map(torch.Tensor.tolist, best), strict=True)]


def of_images(args: argparse.Namespace, device: torch.device) -> str:
    """A line for each image: file, class, probability."""
    paths = list(files_of(args.inputs))
    if not paths or args.prompt is not None:
        raise Refused(f"{args.run} classifies images: give it image files or folders that hold some, no --prompt")
    for path in paths:
        if not path.is_file():
            raise Refused(f"no file {path}")
    model, record, _ = load(args.run, args.checkpoint)
    try:
        rows = classes(model, record, paths, args.precision, device=device)
    except images.Broken as broken:  # it ends with advice for training
        raise Refused(f"{str(broken).rpartition(': ')[0]}: {args.run} classifies images, leave it out") from None
    return "\n".join(
        f"{printable(str(path))}\t{printable(str(name))}\t{probability:.4f}" for path, name, probability in rows
    )


def drawn(args: argparse.Namespace, device: torch.device) -> str:
    """Draws a picture of the classes of a diffusion model, and returns a line about it."""
    if args.inputs or args.prompt is not None:
        raise Refused(f"{args.run} draws images: give it no files and no --prompt, but --classes")
    from shared import diffusion

    model, record, _ = load(args.run, args.checkpoint)
    about = record["data"]
    names = about.get("classes") or [str(label) for label in range(about["num_classes"])]
    if missing := [name for name in args.classes or () if name not in names]:
        raise Refused(f"{args.run} has no class {missing[0]}: it has {', '.join(names[:20])}")
    classes = [names.index(name) for name in args.classes or names[:10]]
    with precision_of(args.precision, model, record, device):
        images, _ = diffusion.draw(model.to(device), about, device, record["args"]["guidance"], classes, args.seed)
    file = args.run / "predict.png"
    diffusion.save_picture(images, file)
    return f"{file}: {diffusion.EACH} images of each of {', '.join(names[label] for label in classes)}"


def main(argv: list[str]) -> None:
    parser = cli.parser("predict", __doc__)
    parser.add_argument("run", type=Path, help="the folder of a run, with its run.json")
    parser.add_argument("inputs", type=Path, nargs="*", help="image files, and folders of them")
    parser.add_argument("--prompt", help="the text to go on with, or to find the class of")
    parser.add_argument("--tokens", type=cli.count, default=100, help="how many to add to the prompt")
    parser.add_argument("--classes", nargs="+", metavar="CLASS", help="draw images of these; default: the first ten")
    parser.add_argument(
        "--seed", type=cli.number(int, *cli.RANGES["seed"]), default=0, help="of the tokens or images drawn"
    )
    parser.add_argument("--precision", choices=["evaluated", "plain"], default="evaluated")
    parser.add_argument(
        "--checkpoint", metavar="STEP", help="this checkpoint, by its step or folder, not the finished model"
    )
    args = parser.parse_intermixed_args(argv)
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator() or device
    with progress.waiting("predicts"):
        recipe = record_of(args.run)["recipe"]
        way = of_text if recipe in find.PROMPTS else drawn if recipe == "diffusion" else of_images
        said = way(args, device)
    print(said)


if __name__ == "__main__":
    cli.run(main)
