"""Datasets by name: real and offline by default, synthetic for speed, or any image set of the Hub or a folder.

A training run sees one sequence of samples: epoch after epoch, each a fresh permutation that depends on (seed, epoch)
alone, cut to whole global batches. So step k sees the same samples on any number of processes and after any resume.
"""

import hashlib
import io
import itertools
import random
import signal
from pathlib import Path

import numpy as np
import torch

from shared import processes
from shared.args import Refused

OFFLINE = "digits, photos, synthetic, textures"


class Broken(Refused):
    """An image that cannot be read. The process that draws it is the only one to know, and says so."""


class Images(torch.utils.data.Dataset):
    """Images in memory, (n, channels, height, width) uint8 or float32, with labels (n,) int64.

    Whole batches are indexed at once, so the loader costs one gather per batch, not one Python call per sample.
    """

    def __init__(self, pixels, labels, num_classes):
        self.pixels, self.labels, self.num_classes = pixels, labels, num_classes
        self.in_chans, self.image_size = pixels.shape[1], pixels.shape[-1]
        self.mean = self.std = (0.5,)

    def fitted(self, image_size, config):
        """These images as a model wants them: its size, its channels (grey becomes RGB), its normalization."""
        self.image_size = image_size or self.image_size
        self.in_chans = config.get("in_chans", self.in_chans)
        self.mean, self.std = (tuple(config.get(key, (0.5,))) for key in ("mean", "std"))
        if self.in_chans == 1:  # a model of grey images, normalized as its colours would be on average
            self.mean, self.std = ((sum(values) / len(values),) for values in (self.mean, self.std))
        return self

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):
        pixels = self.pixels[indices]
        if pixels.dtype == torch.uint8:
            pixels = pixels.float().div_(127.5).sub_(1)
        if pixels.shape[-1] != self.image_size:
            pixels = torch.nn.functional.interpolate(pixels, (self.image_size,) * 2, mode="bilinear", antialias=True)
        if pixels.shape[1] != self.in_chans:
            pixels = pixels.expand(-1, self.in_chans, -1, -1)
        if self.mean != (0.5,) or self.std != (0.5,):
            mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
            pixels = ((pixels + 1) / 2 - mean) / std
        return {"pixel_values": pixels, "labels": self.labels[indices]}

    def about(self):
        """What `run.json` says of the data, and inference needs."""
        shape = {"image_size": self.image_size, "in_chans": self.in_chans, "num_classes": self.num_classes}
        return shape | {"mean": self.mean, "std": self.std, "classes": None, "left_out": []}

    def fingerprint(self):
        """sha256 of every pixel and label."""
        digest = hashlib.sha256(repr((tuple(self.pixels.shape), str(self.pixels.dtype))).encode())
        digest.update(self.pixels.numpy())
        digest.update(self.labels.numpy())
        return digest.hexdigest()


class Synthetic(Images):
    """One million random 3x224x224 images of 1000 classes, without the cost of making them.

    A batch is a view into a pool made once: the loader is never what is measured.
    """

    def __init__(self, image_size=224, pool=256, length=1_000_000):
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(pool, 3, image_size, image_size, generator=generator)
        super().__init__(pixels, torch.arange(pool) * 997 % 1000, num_classes=1000)
        self.length = length

    def __len__(self):
        return self.length

    def __getitems__(self, indices):
        count, pool = len(indices), len(self.labels)
        if count > pool:
            return super().__getitems__([i % pool for i in indices])
        start = indices[0] % (pool - count + 1)
        return {"pixel_values": self.pixels[start : start + count], "labels": self.labels[start : start + count]}


class HubImages(torch.utils.data.Dataset):
    """A split of a `datasets` dataset with an image and a label column, through timm's transforms for the model.

    split: its image column not decoded, so that an image that cannot be read has a name. config: mean, std,
    interpolation and crop_pct of the model. Training images get a random crop, resized, and a random flip, drawn from
    (seed, epoch, index) alone: the same on any number of processes and workers, and after a resume.
    """

    def __init__(self, split, columns, image_size, config, train, seed=0, left_out=()):
        from timm.data import create_transform

        self.split, (self.image_column, self.label_column), self.seed, self.train = split, columns, seed, train
        self.classes = split.features[self.label_column].names
        self.num_classes, self.image_size, self.in_chans = len(self.classes), image_size, 3
        self.config = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic", "crop_pct": 1.0} | {
            key: config[key] for key in ("mean", "std", "interpolation", "crop_pct") if key in config
        }
        self.left_out = left_out
        self.transform = create_transform(
            (3, image_size, image_size), is_training=train, color_jitter=None,
            scale=(0.08, 1.0) if image_size >= 128 else (0.5, 1.0),  # a twelfth of 32 pixels shows nothing
            **self.config,
        )  # fmt: skip

    def __len__(self):
        return len(self.split)

    def __getitems__(self, indices):
        rows = self.split[[int(index) for index in indices]]
        pixels = []
        for index, entry in zip(indices, rows[self.image_column], strict=True):
            image = read_image(entry, int(index))
            if self.train:  # nothing else draws from these generators between here and the step, which seeds anew
                random.seed(f"{self.seed} {getattr(index, 'epoch', 0)} {int(index)}")
                torch.manual_seed(random.getrandbits(60))
            pixels.append(self.transform(image))
        return {"pixel_values": torch.stack(pixels), "labels": torch.tensor(rows[self.label_column])}

    def fingerprint(self):
        """The fingerprint that `datasets` itself keeps: it changes with the data and with every transform of it."""
        return self.split._fingerprint

    def about(self):
        shape = {"image_size": self.image_size, "in_chans": self.in_chans, "num_classes": self.num_classes}
        return shape | self.config | {"classes": self.classes, "left_out": self.left_out}


def read_image(entry, index):
    """An RGB image from {"path", "bytes"}, grey and palette ones too; raises Broken with its name."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(entry["bytes"]) if entry["bytes"] else entry["path"]).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        name, reason = entry["path"] or "an image without a name", str(error).splitlines()[0].split(" <_io")[0]
        raise Broken(
            f"{name} (index {index}) cannot be read as an image ({reason}): mend or remove it, or let --skip_broken N "
            "leave out up to N such images"
        ) from None


def loading(num_workers, pin_memory):
    """Options of the DataLoaders."""
    return {
        "collate_fn": as_is,
        "num_workers": num_workers,
        "pin_memory": pin_memory,
        "worker_init_fn": outlive_sigterm,
    }


def as_is(batch):
    """The datasets above return whole batches: nothing is left to collate."""
    return batch


def outlive_sigterm(worker_id):
    """Slurm and Docker tell every process to stop. The training process then writes a checkpoint, in steps that still
    need data; a loader's process ends when that one does."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.end_with_the_parent(signal.SIGKILL)


def images(name, image_size=None, config=None, seed=0, skip_broken=0):
    """(training set, held-out set) by name: digits, photos, textures, synthetic, a Hub dataset, or a local folder.

    image_size: pixels; None means the data's own, or the model's. config: what a model wants of its images
    (shared/models.py). seed: of augmentations. skip_broken: leave out up to so many images that cannot be read.
    """
    config = config or {}
    image_size = image_size or config.get("image_size")
    offline = {"digits": digits, "photos": photos, "textures": textures}
    if name in offline:
        return tuple(part.fitted(image_size, config) for part in offline[name]())
    if name == "synthetic":
        return Synthetic(image_size or 224), Synthetic(image_size or 224, length=1024)
    return hub(name, image_size or 224, config, seed, skip_broken)


def digits():
    """scikit-learn's 1,797 handwritten digits, 1x8x8; every fifth sample is held out."""
    from sklearn.datasets import load_digits

    source = load_digits()
    pixels = torch.from_numpy(source.images).float().unsqueeze(1).div(8).sub(1)
    labels = torch.from_numpy(source.target).long()
    held_out = torch.arange(len(labels)) % 5 == 4
    return (Images(pixels[~held_out], labels[~held_out], 10), Images(pixels[held_out], labels[held_out], 10))


def photos():
    """32x32 colour patches of ten photographs; the class is the photograph."""
    skimage, load_sample_image = photographs("photos")
    shipped = "astronaut chelsea coffee hubble_deep_field immunohistochemistry retina rocket".split()
    pictures = [getattr(skimage.data, name)() for name in shipped]
    pictures += [skimage.data.stereo_motorcycle()[0], load_sample_image("china.jpg"), load_sample_image("flower.jpg")]
    return patches_of([picture[:, :, :3] for picture in pictures])


def textures():
    """32x32 grey patches of eight grey pictures, from bricks to the moon; the class is the picture."""
    skimage, _ = photographs("textures")
    shipped = "brick camera coins grass gravel moon page text".split()
    return patches_of([np.atleast_3d(getattr(skimage.data, name)()) for name in shipped])


def photographs(dataset):
    try:
        import skimage.data
    except ImportError:
        raise Refused(
            f"--dataset {dataset} needs scikit-image: ./launch.sh setup --extra photos, or pip install scikit-image"
        ) from None
    from sklearn.datasets import load_sample_image

    return skimage, load_sample_image


def patches_of(pictures, size=32, stride=16, per_class=700):
    """(training set, held-out set) of patches of `pictures`, uint8 (height, width, channels).

    The left three quarters of each picture are for training, the right quarter is held out, and no patch crosses the
    line: the held-out patches show places never seen. At most `per_class` training patches (a quarter of that held out)
    of each, so that no picture dominates.
    """
    order = np.random.default_rng(0)
    parts = {True: ([], []), False: ([], [])}
    for label, picture in enumerate(pictures):
        border = picture.shape[1] * 3 // 4
        for train, columns in ((True, slice(0, border)), (False, slice(border, None))):
            part = np.ascontiguousarray(picture[:, columns])
            channels = part.shape[2]
            patches = np.lib.stride_tricks.sliding_window_view(part, (size, size, channels))[::stride, ::stride, 0]
            patches = patches.reshape(-1, size, size, channels)
            patches = patches[np.ptp(patches, axis=(1, 2, 3)) > 32]  # the black around a retina is no place
            chosen = order.permutation(len(patches))[: per_class if train else per_class // 4]
            parts[train][0].append(patches[chosen])
            parts[train][1].append(np.full(len(chosen), label))

    def pack(pixels, labels):
        pixels = torch.from_numpy(np.concatenate(pixels)).permute(0, 3, 1, 2).contiguous()
        return Images(pixels, torch.from_numpy(np.concatenate(labels)).long(), len(pictures))

    return pack(*parts[True]), pack(*parts[False])


def hub(name, image_size, config, seed=0, skip_broken=0):
    """Any image classification set that `datasets` can load: a Hub name, or a folder of one folder per class."""
    import datasets

    folder = Path(name).expanduser()
    if folder.is_dir() and not list(folder.glob("**/*.parquet")):
        no_class_is_empty(folder)
        loaded = load(name, OFFLINE, "imagefolder", data_dir=str(folder))
    else:
        loaded = load(name, OFFLINE, name)
    columns = {type(feature).__name__: column for column, feature in next(iter(loaded.values())).features.items()}
    if "Image" not in columns or "ClassLabel" not in columns:
        features = next(iter(loaded.values())).features
        raise Refused(f"--dataset {name} has columns {features}; an Image and a ClassLabel are needed")
    columns = columns["Image"], columns["ClassLabel"]
    parts, left_out = [], []
    for train, split in zip((True, False), split_of(loaded, name), strict=True):
        split = split.cast_column(columns[0], datasets.Image(decode=False))
        labels_in_range(name, split, columns[1])
        if skip_broken:
            split, broken = without_broken(name, split, columns[0], skip_broken - len(left_out))
            left_out += broken  # one list, of both splits, which both record
        parts.append(HubImages(split, columns, image_size, config, train, seed, left_out))
    return tuple(parts)


def load(name, offline, *args, **kwargs):
    """`datasets.load_dataset`, whose dozen types of error become one line. offline: names that need no network."""
    import datasets

    try:
        return datasets.load_dataset(*args, **kwargs)
    except Exception as error:
        error = error.__cause__ if "while generating" in str(error) and error.__cause__ else error
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise Refused(f"--dataset {name}: {reason} (known offline: {offline}; else a folder or a Hub name)") from None


def split_of(loaded, name):
    """(training split, held-out split); a tenth of the training split is held out where there is no other."""
    train = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    held_out = next((loaded[split] for split in ("test", "validation") if split in loaded), None)
    if held_out is None:
        if len(train) < 2:
            raise Refused(f"--dataset {name} has {len(train)} samples: too few to hold some out")
        both = train.train_test_split(test_size=0.1, seed=0)
        train, held_out = both["train"], both["test"]
    return train, held_out


def no_class_is_empty(folder):
    """`datasets` passes over a class without images, and trains on the others."""
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    named = {path.name: path for path in folder.iterdir() if path.is_dir()}
    splits = [named[name] for name in ("train", "test", "validation", "val", "valid") if name in named]
    for split in splits or [folder]:
        folders = sorted(path for path in split.iterdir() if path.is_dir())
        if len(folders) < 2:
            raise Refused(f"{split} has {len(folders)} folders of one class each: at least two are needed")
        for one in folders:
            if not any(path.suffix.lower() in ImageFolder.EXTENSIONS for path in one.rglob("*")):
                raise Refused(f"{one} is a class without images: put some in, or remove the folder")
    if len(splits) > 1:
        classes = [{path.name for path in split.iterdir() if path.is_dir()} for split in splits]
        for split, found in zip(splits, classes, strict=True):
            if missing := sorted(classes[0] ^ found):
                raise Refused(f"{split} and {splits[0]} differ in classes: {', '.join(missing[:3])}")


def labels_in_range(name, split, column):
    """Hub sets mark unlabelled test images by -1; a loss would index with it."""
    labels, count = np.array(split[column][:], float), split.features[column].num_classes  # None becomes nan
    wrong = np.flatnonzero(~((labels >= 0) & (labels < count)))
    if count < 2:
        raise Refused(f"--dataset {name} has {count} class: nothing is to be told apart")
    if len(wrong):
        first = split[column][int(wrong[0])]
        raise Refused(
            f"--dataset {name}: {len(wrong)} labels are out of range, the first is {first} at index {wrong[0]} of "
            f"{split.split or 'a split'}; there are classes 0 to {count - 1}"
        )


def without_broken(name, split, column, most):
    """(the split without images that cannot be read, their names). Reads every image once, before training."""

    def reason(entry, index):
        try:
            read_image(entry, index)
        except Refused as error:
            return str(error).split(": ")[0]

    reasons = [reason(entry, index) for index, entry in enumerate(split[column])]
    left_out = list(filter(None, reasons))
    if len(left_out) > most:
        raise Refused(
            f"--dataset {name}: {len(left_out)} images are broken, --skip_broken allows {most} more: {left_out[0]}"
        )
    return split.select([index for index, why in enumerate(reasons) if not why]), left_out


class Drawn(int):
    """An index into the training set that knows the epoch it was drawn in: augmentations depend on it."""

    epoch = 0


class Order(torch.utils.data.Sampler):
    """The sample indices of a whole run, from `first_batch` on, without end.

    length: samples in the set. global_batch_size: samples per optimizer step, over all processes and micro-batches.
    What does not fill a global batch is left out of its epoch (another few samples each time).
    """

    def __init__(self, length, global_batch_size, seed, first_batch=0):
        self.length, self.global_batch_size, self.seed, self.first_batch = length, global_batch_size, seed, first_batch
        self.batches_per_epoch = length // global_batch_size
        self.epoch = self.permutation = None
        if not self.batches_per_epoch:
            raise Refused(
                f"the training set has {length} samples, less than one global batch of {global_batch_size}: lower "
                "--per_device_train_batch_size, --gradient_accumulation_steps or the number of processes"
            )

    def batch(self, number):
        """The indices of global batch `number`, of the whole run; every process can ask for any."""
        epoch, at = divmod(number, self.batches_per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self.epoch, self.permutation = epoch, torch.randperm(self.length, generator=generator)
        return self.permutation[at * self.global_batch_size : (at + 1) * self.global_batch_size]

    def __iter__(self):
        for number in itertools.count(self.first_batch):
            for index in self.batch(number).tolist():
                drawn = Drawn(index)
                drawn.epoch = number // self.batches_per_epoch
                yield drawn
