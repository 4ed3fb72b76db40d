"""shared/data.py and images.py: the order of samples, evaluation, and the datasets."""

from itertools import islice

import pytest
import torch
from conftest import ROOT, recipe, record, train

from shared import data, images, vision
from shared.args import Refused


@pytest.mark.parametrize(("length", "batch"), [(10, 5), (11, 3), (7, 7), (20, 6)])
def test_the_order_of_a_run(length, batch):
    per_epoch = length // batch * batch
    whole = list(islice(data.Order(length, batch, 1, data.Progress({})), 20 * per_epoch))
    for epoch in range(20):
        part = [index - epoch * length for index in whole[epoch * per_epoch : (epoch + 1) * per_epoch]]
        assert len(set(part)) == per_epoch and set(part) <= set(range(length))  # nothing twice
    if length > 7:
        assert whole[:per_epoch] != [index - length for index in whole[per_epoch : 2 * per_epoch]]
    for first in range(1, 9):  # begun later, it goes on as if it had begun at the start
        progress = data.Progress({})
        progress.load_state_dict({"same": {}, "step": first, "batch": first})
        later = data.Order(length, batch, 1, progress)
        assert list(islice(later, 2 * per_epoch)) == whole[first * batch : first * batch + 2 * per_epoch]
    if length == 20:
        assert {index % length for index in whole} == set(range(length))  # what one epoch leaves out, another has


@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_counts_every_sample_once(tmp_path, world):
    """Evaluation counts every sample once: held-out sets of 1 to 17 samples, batches of 1 to 5, on 1 and 2 processes."""

    def before(rank):
        vit = recipe("vit")
        prepare = vit.Accelerator.prepare

        def prepare_and_evaluate(accelerator, *args, **kwargs):
            prepared = prepare(accelerator, *args, **kwargs)
            if len(args) < 4:
                return prepared
            model, whole = args[0], args[3].dataset
            for count in range(1, 18):
                part = images.Images(whole.pixels[:count], whole.labels[:count], 10)
                with torch.no_grad():
                    model.eval()
                    logits = model(part.pixels)
                    want = torch.nn.functional.cross_entropy(logits, part.labels).item()
                for batch in range(1, 6):
                    loader = torch.utils.data.DataLoader(part, batch, collate_fn=data.in_dtype)
                    got = vit.evaluate(accelerator, prepared[0], accelerator.prepare(loader))
                    assert got["eval_loss"] == pytest.approx(want, rel=1e-5), (count, batch, got, want)
                    hits = (logits.argmax(-1) == part.labels).sum().item()
                    assert got["accuracy"] == pytest.approx(hits / count), (count, batch)
            print("all counted", flush=True)
            return prepared

        vit.Accelerator.prepare = prepare_and_evaluate

    config = "single_fp32" if world == 1 else "ddp_fp32"
    train(config, tmp_path / "run", "--max_steps", 1, before=before)
    assert (tmp_path / "run.log").read_text().count("all counted") == world


def test_digits():
    import sklearn.datasets

    train_set, held_out = images.digits()
    assert (len(train_set), len(held_out), train_set.num_classes) == (1438, 359, 10)
    assert train_set.fingerprint() != held_out.fingerprint() == images.digits()[1].fingerprint()
    batch = train_set.__getitems__([3, 5])
    assert batch["pixel_values"].shape == (2, 1, 8, 8) and batch["pixel_values"].abs().max() <= 1
    theirs = sklearn.datasets.load_digits()
    assert torch.equal(train_set.pixels[4, 0], torch.from_numpy(theirs.images[5]).float() / 8 - 1)
    assert torch.equal(held_out.labels, torch.from_numpy(theirs.target[4::5]))


def test_photos_are_balanced_and_apart():
    pytest.importorskip("skimage")
    train_set, held_out = images.photos()
    counts, held = torch.bincount(train_set.labels), torch.bincount(held_out.labels)
    assert len(counts) == len(held) == 10 and counts.max() == 700 and held.max() == 175
    assert counts.min() >= 250 and held.min() >= 60
    pixels = train_set.__getitems__(list(range(64)))["pixel_values"]
    assert pixels.shape == (64, 3, 32, 32) and pixels.dtype == torch.float32 and pixels.abs().max() <= 1
    seen = {patch.numpy().tobytes() for patch in train_set.pixels}
    overlap = sum(patch.numpy().tobytes() in seen for patch in held_out.pixels)
    assert overlap == 0


def test_textures_are_grey_and_each_has_held_out_patches():
    pytest.importorskip("skimage")
    train_set, held_out = images.textures()
    assert train_set.num_classes == 8 and train_set.in_chans == 1
    assert torch.bincount(train_set.labels).min() >= 150 and torch.bincount(held_out.labels, minlength=8).min() >= 30
    as_rgb = images.images("textures", 48, {"in_chans": 3})[1].__getitems__([0, 1])["pixel_values"]
    assert as_rgb.shape == (2, 3, 48, 48) and as_rgb[:, 0].equal(as_rgb[:, 2])


def test_grey_images_for_a_model_of_timm():
    """Grey images keep their one channel and get the mean of timm's three normalizations; a pretrained model gets three
    channels."""
    config = vision.data_config("resnet18")
    batch = images.images("digits", None, config)[0].__getitems__([0, 1])["pixel_values"]
    grey = images.digits()[0].pixels[:2]
    assert batch.shape == (2, 1, 8, 8)
    assert torch.allclose(batch, ((grey + 1) / 2 - sum(config["mean"]) / 3) / (sum(config["std"]) / 3), atol=1e-6)
    pretrained = vision.data_config("resnet18", pretrained=True)
    batch = images.images("digits", 16, pretrained)[0].__getitems__([0, 1])["pixel_values"]
    assert batch.shape == (2, 3, 16, 16) and pretrained["image_size"] == 224


def test_synthetic_costs_nothing_per_sample():
    train_set, _ = images.images("synthetic")
    assert len(train_set) == 1_000_000 and train_set.num_classes == 1000
    batch = train_set.__getitems__(list(range(7, 71)))
    assert batch["pixel_values"].shape == (64, 3, 224, 224)
    assert batch["pixel_values"].untyped_storage().data_ptr() == train_set.pixels.untyped_storage().data_ptr()
    assert len(train_set.__getitems__(list(range(300)))["labels"]) == 300


def make_folder(root):
    from PIL import Image

    for split, count in (("train", 40), ("test", 10)):
        for label, colour in (("red", (200, 30, 30)), ("grey", 90)):
            (root / split / label).mkdir(parents=True)
            for i in range(count // 2):
                mode = "RGB" if label == "red" else "L"  # one channel among three
                Image.new(mode, (40 + i, 50), colour).save(root / split / label / f"{i}.png")


def test_a_folder_of_images_trains(tmp_path):
    make_folder(tmp_path / "set")
    argv = ("--dataset", tmp_path / "set", "--image_size", 32, "--max_steps", 20, "--per_device_train_batch_size", 8)
    run = train("single_fp32", tmp_path / "run", *argv, "--learning_rate", 0.001, "--warmup_steps", 2)
    assert record(run)["final"]["metrics"]["accuracy"] == 1.0
    about = vision.own_run(run)["data"]
    assert about["classes"] == ["grey", "red"] and about["fingerprint"] and about["image_size"] == 32


def test_a_set_in_the_hubs_format_trains(tmp_path):
    """Parquet files under data/, as the Hub stores them, are loaded from a local path without a network."""
    import datasets

    make_folder(tmp_path / "set")
    loaded = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "set"))
    for split, part in loaded.items():
        (tmp_path / "hub" / "data").mkdir(parents=True, exist_ok=True)
        part.to_parquet(tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet")
    train_set, held_out = images.images(str(tmp_path / "hub"), image_size=32)
    assert (len(train_set), len(held_out), train_set.num_classes) == (40, 10, 2)
    batch = held_out.__getitems__([0, 9])
    assert batch["pixel_values"].shape == (2, 3, 32, 32) and batch["labels"].tolist() in ([0, 1], [1, 0])


@pytest.mark.parametrize("name", vision.VIT_SIZES)
def test_models_by_size(name):
    with torch.device("meta"):
        model = vision.vit(name, 224, 3, 1000)
    total = sum(p.numel() for p in model.parameters())
    millions = {
        "vit_nano": 0.327,
        "vit_tiny": 5.7,
        "vit_small": 22,
        "vit_base": 86.6,
        "vit_large": 304.3,
        "vit_huge": 632.2,
    }
    assert total / 1e6 == pytest.approx(millions[name], rel=0.02)
    assert model._no_split_modules == ["Block"]


def test_any_timm_name():
    model = vision.vit("vit_tiny_patch16_224", 64, 1, 7)
    assert model(torch.zeros(2, 1, 64, 64)).shape == (2, 7)
    for name, pretrained in (("vit_gigantic", False), ("vit_nano", True)):
        with pytest.raises(Refused):
            vision.vit(name, 224, 3, 10, pretrained)


def test_the_recipe_stays_on_its_page():
    for path in (ROOT / "recipes").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 142, path.name  # two of them for --load_best_model_at_end
