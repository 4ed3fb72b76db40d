"""Image datasets by name: small real ones that work offline, synthetic images, a folder, or any set of the Hub."""

import hashlib
import importlib.metadata
import io
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from shared import data
from shared.args import Refused

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # by content: others, as EPS, start programs
OFFLINE = "digits, photos, synthetic, textures"


class Broken(Refused):
    """An image that cannot be read."""

    of_one_process = True  # only the process that draws the image sees the error


class Images(torch.utils.data.Dataset):
    """Images in memory, (n, channels, height, width) uint8 or float32, with labels (n,) int64. A batch is indexed at
    once, which costs one gather per batch, not one Python call per sample. Indices of epoch e begin at e * len(set)."""

    classes, left_out = None, ()

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor, num_classes: int) -> None:
        self.pixels, self.labels, self.num_classes = pixels, labels, num_classes
        self.in_chans, self.image_size = pixels.shape[1], pixels.shape[-1]
        self.mean = self.std = (0.5,)

    def fitted(self, image_size: int | None, config: dict[str, Any]) -> "Images":
        """Prepares these images for a model: its image size, channels (grey becomes RGB) and normalization."""
        self.image_size = image_size or self.image_size
        self.in_chans = config.get("in_chans", self.in_chans)
        self.mean, self.std = (tuple(config.get(key, (0.5,))) for key in ("mean", "std"))
        if self.in_chans == 1:  # grey images get the mean over the colours
            self.mean, self.std = ((sum(values) / len(values),) for values in (self.mean, self.std))
        return self

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        at = torch.as_tensor(indices) % len(self.labels)
        pixels = self.pixels[at]
        if pixels.dtype == torch.uint8:
            pixels = pixels.float().div_(127.5).sub_(1)
        if pixels.shape[-1] != self.image_size:
            pixels = interpolate(pixels, (self.image_size,) * 2, mode="bilinear", antialias=True)
        if pixels.shape[1] != self.in_chans:
            pixels = pixels.expand(-1, self.in_chans, -1, -1)
        if self.mean != (0.5,) or self.std != (0.5,):
            mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
            pixels = ((pixels + 1) / 2 - mean) / std
        return {"pixel_values": pixels, "labels": self.labels[at]}

    def fingerprint(self) -> str:
        """sha256 of every pixel and label."""
        digest = hashlib.sha256(repr((tuple(self.pixels.shape), str(self.pixels.dtype))).encode())
        for part in (self.pixels, self.labels):
            digest.update(part.numpy())  # pyrefly: ignore[bad-argument-type]
        return digest.hexdigest()


class Synthetic(Images):
    """One million random 3x224x224 images of 1000 classes, which cost no time to load. A batch is a view into a fixed
    pool of images, so that the loader does not limit a speed measurement."""

    def __init__(self, image_size: int = 224, length: int = 1_000_000, pool: int = 256) -> None:
        pixels = torch.randn(pool, 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
        super().__init__(pixels, torch.arange(pool) * 997 % 1000, num_classes=1000)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        count, pool = len(indices), len(self.labels)
        if count > pool:
            return super().__getitems__(indices)
        start = indices[0] % (pool - count + 1)
        return {"pixel_values": self.pixels[start : start + count], "labels": self.labels[start : start + count]}


class HubImages(torch.utils.data.Dataset):
    """A split of a `datasets` dataset with an image and a label column, with timm's transforms for the model. split:
    its image column is not decoded, so that an error can name the image. config: mean, std, interpolation and crop_pct
    of the model. Training images get a random resized crop and a random flip, which depend on (seed, epoch, index)
    only: they are the same on any number of processes and workers, and after a resume."""

    def __init__(
        self, split: "Dataset", columns: tuple[str, str], image_size: int, config: dict[str, Any], train: bool,
        seed: int = 0, left_out: Sequence[str] = (),
    ) -> None:  # fmt: skip
        from timm.data import create_transform

        self.split, (self.image_column, self.label_column), self.seed = split, columns, seed
        self.classes, self.left_out = split.features[self.label_column].names, left_out
        self.num_classes, self.image_size, self.in_chans = len(self.classes), image_size, 3
        self.mean, self.std = (tuple(config.get(key, (0.5,) * 3)) for key in ("mean", "std"))
        self.interpolation, self.crop_pct = config.get("interpolation", "bicubic"), config.get("crop_pct", 1.0)
        scale = (0.08, 1.0) if image_size >= 128 else (0.5, 1.0)  # 8% of a 32 x 32 image shows nothing
        self.transform: Any = create_transform(
            (3, image_size, image_size), is_training=train, color_jitter=None,  # pyrefly: ignore[bad-argument-type]
            mean=self.mean, std=self.std, interpolation=self.interpolation, crop_pct=self.crop_pct, scale=scale,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.split)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        drawn = [divmod(index, len(self)) for index in indices]
        rows, pixels = self.split[[index for _, index in drawn]], []
        before = random.getstate()
        with torch.random.fork_rng(devices=[]):  # leaves Python's and torch's random states as they were
            for (epoch, index), entry in zip(drawn, rows[self.image_column], strict=True):
                image = read_image(entry, index)
                random.seed(f"{self.seed} {epoch} {index}")
                torch.default_generator.manual_seed(random.getrandbits(60))  # not the GPU's, which dropout uses
                pixels.append(self.transform(image))
        random.setstate(before)
        return {"pixel_values": torch.stack(pixels), "labels": torch.tensor(rows[self.label_column])}

    def fingerprint(self) -> str:
        """The fingerprint of `datasets`, which changes with the data and with every transform of it."""
        return self.split._fingerprint


def read_image(entry: dict[str, Any], index: int) -> "Image":
    """Reads {"path", "bytes"} as an RGB image; grey and palette images are converted. Raises Broken with its name."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(entry["bytes"]) if entry["bytes"] else entry["path"], formats=FORMATS)
        if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):  # PIL itself warns only
            raise ValueError(f"{image.width} x {image.height} pixels, PIL's limit is {Image.MAX_IMAGE_PIXELS:,}")
        return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        name, reason = entry["path"] or "an image without a name", str(error).splitlines()[0].split(" <_io")[0]
        raise Broken(
            f"{name} (index {index}) cannot be read as an image ({reason}): mend or remove it, or let --skip_broken N "
            "leave out up to N such images"
        ) from None


def images(
    name: str, image_size: int | None = None, config: dict[str, Any] | None = None, seed: int = 0, skip_broken: int = 0
) -> tuple[Images | HubImages, ...]:
    """Returns (training set, held-out set) by name: digits, photos, textures, synthetic, a Hub dataset or a folder.
    image_size: pixels; None means the data's own, or the model's. config: from vision.data_config. seed: of the random
    crops and flips. skip_broken: leave out up to this many images that cannot be read."""
    config = config or {}
    image_size = image_size or config.get("image_size")
    offline = {"digits": digits, "photos": photos, "textures": textures}
    if name in offline:
        return tuple(part.fitted(image_size, config) for part in offline[name]())
    if name == "synthetic":
        return Synthetic(image_size or 224), Synthetic(image_size or 224, length=1024)
    return hub_images(name, image_size or 224, config, seed, skip_broken)


def digits() -> tuple[Images, Images]:
    """scikit-learn's 1,797 handwritten digits, 1x8x8; every fifth sample is held out. Reads the file that `load_digits`
    reads, because importing scikit-learn takes more than a second in each process."""
    path = importlib.metadata.distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = torch.from_numpy(np.loadtxt(str(path), dtype=np.uint8, delimiter=","))
    pixels, labels = rows[:, :-1].float().view(-1, 1, 8, 8).div(8).sub(1), rows[:, -1].long()
    held_out = torch.arange(len(labels)) % 5 == 4
    return (Images(pixels[~held_out], labels[~held_out], 10), Images(pixels[held_out], labels[held_out], 10))


def photos() -> tuple[Images, Images]:
    """32x32 colour patches of ten photographs; the class is the photograph."""
    from sklearn.datasets import load_sample_image

    pictures = shipped("photos", "astronaut chelsea coffee hubble_deep_field immunohistochemistry retina rocket")
    pictures += [shipped("photos", "stereo_motorcycle")[0][0]]
    return patches_of([*pictures, load_sample_image("china.jpg"), load_sample_image("flower.jpg")])


def textures() -> tuple[Images, Images]:
    """32x32 grey patches of eight grey pictures, from bricks to the moon; the class is the picture."""
    return patches_of(shipped("textures", "brick camera coins grass gravel moon page text"))


def shipped(dataset: str, names: str) -> list[np.ndarray]:
    """Loads pictures that come with scikit-image."""
    try:
        import skimage.data

        return [getattr(skimage.data, name)() for name in names.split()]
    except ImportError:  # also of pooch, with which it loads them
        raise Refused(
            f"--dataset {dataset} needs scikit-image and pooch: ./launch.sh setup --extra photos, or pip install "
            "scikit-image pooch"
        ) from None


def patches_of(
    pictures: list[np.ndarray], size: int = 32, stride: int = 16, per_class: int = 700
) -> tuple[Images, Images]:
    """Cuts `pictures`, uint8 (height, width[, channels]), into patches. Returns (training set, held-out set): of the
    left three quarters of each picture and of the right quarter, and no patch crosses the border. Each picture gives at
    most `per_class` training patches and a quarter of that held out, so that no picture dominates."""
    numbers, train, held_out = np.random.default_rng(0), [], []
    for label, picture in enumerate(pictures):
        pixels = torch.from_numpy(np.atleast_3d(picture)[:, :, :3].copy()).permute(2, 0, 1)
        border = pixels.shape[2] * 3 // 4
        halves = (train, pixels[:, :, :border], per_class), (held_out, pixels[:, :, border:], per_class // 4)
        for part, half, most in halves:
            patches = half.unfold(1, size, stride).unfold(2, size, stride).permute(1, 2, 0, 3, 4).flatten(0, 1)
            span = patches.amax((1, 2, 3)).int() - patches.amin((1, 2, 3)).int()
            patches = patches[span > 32]  # leaves out uniform patches, such as the black around the retina
            chosen = torch.from_numpy(numbers.permutation(len(patches))[:most])
            part.append((patches[chosen], torch.full((len(chosen),), label)))
    (pixels, labels), held = ([torch.cat(values) for values in zip(*part, strict=True)] for part in (train, held_out))
    return Images(pixels, labels, len(pictures)), Images(*held, num_classes=len(pictures))


def hub_images(
    name: str, image_size: int, config: dict[str, Any], seed: int = 0, skip_broken: int = 0
) -> tuple[HubImages, ...]:
    """Loads any image classification set that `datasets` can load: a Hub name, or a folder with a folder per class."""
    import datasets

    folder = Path(name).expanduser()
    of_files = folder.is_dir() and not list(folder.glob("**/*.parquet"))
    if of_files:
        refuse_empty_classes(folder)
    loaded = data.load(name, OFFLINE, *(("imagefolder", None, str(folder)) if of_files else (name,)))
    features = next(iter(loaded.values())).features
    columns = {type(feature).__name__: column for column, feature in features.items()}
    if "Image" not in columns or "ClassLabel" not in columns:
        raise Refused(f"--dataset {name} has columns {features}; an Image and a ClassLabel of two classes are needed")
    columns, sets, left_out = (columns["Image"], columns["ClassLabel"]), [], []  # one list for both splits
    for train, split in zip((True, False), data.split_of(loaded, name), strict=True):
        split = split.cast_column(columns[0], datasets.Image(decode=False))
        data.refuse_labels_out_of_range(name, split, columns[1])
        if skip_broken:
            split = without_broken(name, split, columns[0], skip_broken, left_out)
        sets.append(HubImages(split, columns, image_size, config, train, seed, left_out))
    return tuple(sets)


def refuse_empty_classes(folder: Path) -> None:
    """Raises Refused if a class has no images, which `datasets` would ignore, or if splits differ in classes."""
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
    from torchvision.datasets import DatasetFolder

    names = ("train", "test", "validation", "val", "valid")
    splits, classes = [folder / name for name in names if (folder / name).is_dir()] or [folder], {}
    for split in splits:
        try:
            classes[split] = set(DatasetFolder(split, None, tuple(ImageFolder.EXTENSIONS)).classes)  # pyrefly: ignore[bad-argument-type]
        except FileNotFoundError as error:
            raise Refused(f"{split}: {str(error).split(' Supported')[0]} Put images in, or remove the folder") from None
        if differing := sorted(classes[split] ^ classes[splits[0]]):
            raise Refused(f"{split} and {splits[0]} differ in classes: {', '.join(differing[:3])}")


def without_broken(name: str, split: "Dataset", column: str, most: int, left_out: list[str]) -> "Dataset":
    """The split without broken images, whose names go to `left_out`. Reads every image once, before training."""
    kept, before = [], len(left_out)
    for index, entry in enumerate(split[column]):
        try:
            read_image(entry, index)
            kept.append(index)
        except Broken as error:
            left_out.append(str(error).split(": ")[0])
    if len(left_out) > most:
        broken, allowed = left_out[before:], most - before
        said = f"{len(broken)} images are broken, --skip_broken allows {allowed} more: {broken[0]}"
        raise Refused(f"--dataset {name}: {said}")
    return split.select(kept)  # pyrefly: ignore[bad-return]
