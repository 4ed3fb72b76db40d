"""Datasets by name: real and offline by default, synthetic for speed, or any image set of the Hub or a folder.

A training run sees one sequence of samples: epoch after epoch, each a fresh permutation that depends on (seed, epoch)
alone, cut to whole global batches. So step k sees the same samples on any number of processes and after any resume.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch

from shared.args import Refused


class Images(torch.utils.data.Dataset):
    """Images in memory, (n, channels, height, width) uint8 or float32, with labels (n,) int64.

    Whole batches are indexed at once, so the loader costs one gather per batch, not one Python call per sample.
    """

    def __init__(self, pixels, labels, num_classes):
        self.pixels, self.labels, self.num_classes = pixels, labels, num_classes
        self.in_chans, self.image_size = pixels.shape[1], pixels.shape[-1]

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):
        pixels = self.pixels[indices]
        if pixels.dtype == torch.uint8:
            pixels = pixels.float().div_(127.5).sub_(1)
        return {"pixel_values": pixels, "labels": self.labels[indices]}

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
    """A split of a `datasets` dataset with an image and a label column, resized to (3, image_size, image_size)."""

    def __init__(self, split, image_column, label_column, num_classes, image_size):
        self.split, self.image_column, self.label_column = split, image_column, label_column
        self.num_classes, self.image_size, self.in_chans = num_classes, image_size, 3

    def __len__(self):
        return len(self.split)

    def __getitems__(self, indices):
        rows = self.split[list(indices)]
        size = (self.image_size, self.image_size)
        pixels = np.stack([np.asarray(im.convert("RGB").resize(size, 2)) for im in rows[self.image_column]])
        pixels = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
        return {"pixel_values": pixels, "labels": torch.tensor(rows[self.label_column])}

    def fingerprint(self):
        """The fingerprint that `datasets` itself keeps: it changes with the data and with every transform of it."""
        return self.split._fingerprint


def as_is(batch):
    """The datasets above return whole batches: nothing is left to collate."""
    return batch


def images(name, image_size=None):
    """(training set, held-out set) by name: digits, photos, synthetic, a Hub dataset, or a local folder."""
    if name == "digits":
        return digits()
    if name == "photos":
        return photos()
    if name == "synthetic":
        return Synthetic(image_size or 224), Synthetic(image_size or 224, length=1024)
    return hub(name, image_size or 224)


def digits():
    """scikit-learn's 1,797 handwritten digits, 1x8x8; every fifth sample is held out."""
    from sklearn.datasets import load_digits

    source = load_digits()
    pixels = torch.from_numpy(source.images).float().unsqueeze(1).div(8).sub(1)
    labels = torch.from_numpy(source.target).long()
    held_out = torch.arange(len(labels)) % 5 == 4
    return (Images(pixels[~held_out], labels[~held_out], 10), Images(pixels[held_out], labels[held_out], 10))


def photos(size=32, stride=16, per_class=700):
    """32x32 colour patches of ten photographs; the class is the photograph.

    The left three quarters of each photograph are for training, the right quarter is held out, and no patch crosses the
    line: the held-out patches show places never seen. At most `per_class` training patches (a quarter of that held out)
    of each, so that no photograph dominates.
    """
    try:
        import skimage.data
    except ImportError:
        raise Refused(
            "--dataset photos needs scikit-image: ./launch.sh setup --extra photos, or pip install scikit-image"
        ) from None
    from sklearn.datasets import load_sample_image

    shipped = "astronaut chelsea coffee hubble_deep_field immunohistochemistry retina rocket".split()
    pictures = [getattr(skimage.data, name)() for name in shipped]
    pictures += [skimage.data.stereo_motorcycle()[0], load_sample_image("china.jpg"), load_sample_image("flower.jpg")]
    order = np.random.default_rng(0)
    parts = {True: ([], []), False: ([], [])}
    for label, picture in enumerate(pictures):
        border = picture.shape[1] * 3 // 4
        for train, columns in ((True, slice(0, border)), (False, slice(border, None))):
            part = np.ascontiguousarray(picture[:, columns, :3])
            patches = np.lib.stride_tricks.sliding_window_view(part, (size, size, 3))[::stride, ::stride, 0]
            patches = patches.reshape(-1, size, size, 3)
            patches = patches[np.ptp(patches, axis=(1, 2, 3)) > 32]  # the black around a retina is no place
            chosen = order.permutation(len(patches))[: per_class if train else per_class // 4]
            parts[train][0].append(patches[chosen])
            parts[train][1].append(np.full(len(chosen), label))

    def pack(pixels, labels):
        pixels = torch.from_numpy(np.concatenate(pixels)).permute(0, 3, 1, 2).contiguous()
        return Images(pixels, torch.from_numpy(np.concatenate(labels)).long(), len(pictures))

    return pack(*parts[True]), pack(*parts[False])


def hub(name, image_size):
    """Any image classification set that `datasets` can load: a Hub name, or a folder of one folder per class."""
    import datasets

    folder = Path(name).expanduser()
    try:
        if folder.is_dir() and not list(folder.glob("**/*.parquet")):
            loaded = datasets.load_dataset("imagefolder", data_dir=str(folder))
        else:
            loaded = datasets.load_dataset(name)
    except Exception as error:  # `datasets` raises a dozen types, some without a message
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise Refused(
            f"--dataset {name}: {reason} (known offline: digits, photos, synthetic; else a folder or a Hub name)"
        ) from None
    train = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    held_out = next((loaded[split] for split in ("test", "validation") if split in loaded), None)
    if held_out is None:
        both = train.train_test_split(test_size=0.1, seed=0)
        train, held_out = both["train"], both["test"]
    columns = {type(feature).__name__: column for column, feature in train.features.items()}
    if "Image" not in columns or "ClassLabel" not in columns:
        raise Refused(f"--dataset {name} has columns {train.features}; an Image and a ClassLabel are needed")
    image, label = columns["Image"], columns["ClassLabel"]
    num_classes = train.features[label].num_classes
    return tuple(HubImages(part, image, label, num_classes, image_size) for part in (train, held_out))


class Order(torch.utils.data.Sampler):
    """The sample indices of a whole run, from `first_batch` on, without end.

    length: samples in the set. global_batch_size: samples per optimizer step, over all processes and micro-batches.
    What does not fill a global batch is left out of its epoch (another few samples each time).
    """

    def __init__(self, length, global_batch_size, seed, first_batch=0):
        self.length, self.global_batch_size, self.seed, self.first_batch = length, global_batch_size, seed, first_batch
        self.batches_per_epoch = length // global_batch_size
        if not self.batches_per_epoch:
            raise Refused(
                f"the training set has {length} samples, less than one global batch of {global_batch_size}: lower "
                "--per_device_train_batch_size, --gradient_accumulation_steps or the number of processes"
            )

    def __iter__(self):
        epoch, batch = divmod(self.first_batch, self.batches_per_epoch)
        while True:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(self.length, generator=generator)
            first = batch * self.global_batch_size
            yield from order[first : self.batches_per_epoch * self.global_batch_size].tolist()
            epoch, batch = epoch + 1, 0
