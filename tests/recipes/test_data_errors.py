"""An error in the user's data is one line that names the file or the index, without a traceback."""

import os

import pytest
import torch
from conftest import Ranks, distance, record, refusal, resumed, train
from PIL import Image

from shared import data, images, sft, text, vision
from shared.args import Refused
from tools import predict

STEPS = ("--max_steps", 3, "--save_steps", 0, "--per_device_train_batch_size", 8, "--image_size", 32)


def make(root, counts=(("train", 24), ("test", 8)), classes=("red", "grey")):
    generator = torch.Generator().manual_seed(0)
    for split, count in counts:
        for label in classes:
            (root / split / label).mkdir(parents=True)
            for i in range(count // len(classes)):
                shape = (40, 50, 3) if label == "red" else (50 + i, 40)
                pixels = torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator).numpy()
                Image.fromarray(pixels).save(root / split / label / f"{i:02}.png")
    return root


def test_of_two_processes_one_speaks(tmp_path):
    """Only one of two processes reports an error in the data. Rank 0 reads the data first; rank 1 adds no traceback."""
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    ranks = Ranks("ddp_fp32", ["--output_dir", str(tmp_path / "run"), "--dataset", str(tmp_path)], name="gpt")
    assert set(ranks.wait()) <= {1, 2}
    assert ranks.text().count("b.txt cannot be read as UTF-8") == 1 and "Traceback" not in ranks.text()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_process_that_draws_a_broken_image_says_so(tmp_path, workers):
    """The rank that draws a broken image reports it. The image is in rank 1's half of the first batch."""
    root = make(tmp_path / "set", counts=(("train", 32), ("test", 4)))
    drawn = data.Order(32, 16, 0, data.Progress({})).batch(0)[8:].tolist()
    paths = [path for label in ("grey", "red") for path in sorted((root / "train" / label).iterdir())]
    for index in drawn:
        paths[index].write_bytes(b"no image")
    argv = ["--output_dir", str(tmp_path / "run"), "--dataset", str(root), *map(str, STEPS)]
    ranks = Ranks("ddp_fp32", [*argv, "--dataloader_num_workers", str(workers)])
    assert ranks.wait() == [1, 2]
    [line] = [line for line in ranks.text().splitlines() if line.startswith("refused: ")]
    assert f"{paths[drawn[0]]} (index {drawn[0]})" in line and "Traceback" not in ranks.text()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_is_named(tmp_path, workers):
    broken = make(tmp_path / "set") / "train" / "red" / "03.png"
    broken.write_bytes(broken.read_bytes()[:100])
    argv = ("--dataset", tmp_path / "set", *STEPS, "--dataloader_num_workers", workers)
    run = train("single_fp32", tmp_path / "run", *argv, code=2)
    log = (tmp_path / "run.log").read_text()
    [line] = [line for line in log.splitlines() if line.startswith("refused: ")]
    assert str(broken) in line and "index" in line and "--skip_broken" in line and "Traceback" not in log
    assert record(run)["status"] == "failed" and str(broken) in record(run)["error"]


def test_broken_images_are_left_out_up_to_a_cap_and_counted(tmp_path):
    root = make(tmp_path / "set")
    for name in ("train/red/03.png", "test/grey/01.png"):
        (root / name).write_bytes(b"not an image")
    run = train("single_fp32", tmp_path / "run", "--dataset", root, *STEPS, "--skip_broken", 2)
    of_train, of_held_out = vision.own_run(run)["data"]["left_out"]
    assert "train/red/03.png" in of_train and "test/grey/01.png" in of_held_out
    train_set, held_out = images.images(str(root), 32, skip_broken=2)
    assert (len(train_set), len(held_out)) == (23, 7) and train_set.left_out == held_out.left_out
    with pytest.raises(Refused, match="1 images are broken, --skip_broken allows 0 more: .*test/grey/01.png"):
        images.images(str(root), 32, skip_broken=1)


def test_an_empty_class_is_named(tmp_path):
    root = make(tmp_path / "set")
    (root / "train" / "blue").mkdir()
    (root / "train" / "blue" / "notes.txt").write_text("no image")
    with pytest.raises(Refused, match=r"set/train: Found no valid file for the classes blue"):
        images.images(str(root), 32)
    (root / "train" / "blue" / "notes.txt").unlink()
    (root / "train" / "blue").rmdir()
    with pytest.raises(Refused, match=r"set/train/red: Couldn't find any class folder"):
        images.images(str(root / "train" / "red"), 32)
    (root / "test" / "violet").mkdir()
    Image.new("L", (9, 9)).save(root / "test" / "violet" / "a.png")
    with pytest.raises(Refused, match="differ in classes: violet"):
        images.images(str(root), 32)


@pytest.mark.parametrize("wrong", [-1, 2])
def test_a_label_out_of_range_is_named(tmp_path, wrong):
    import datasets

    root = make(tmp_path / "set")
    loaded = datasets.load_dataset("imagefolder", data_dir=str(root))
    test = loaded["test"].add_column("other", [wrong if i == 5 else 0 for i in range(8)])
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    if wrong == -1:  # a ClassLabel may hold -1, for "not known"
        test = test.remove_columns("label").rename_column("other", "label").cast(features)
        (tmp_path / "hub" / "data").mkdir(parents=True)
        loaded["train"].cast(features).to_parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
        test.to_parquet(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet")
        with pytest.raises(Refused, match="1 labels are out of range, the first is -1 at index 5 of test"):
            images.images(str(tmp_path / "hub"), 32)
    else:
        from types import SimpleNamespace

        column = SimpleNamespace(num_classes=2)

        class Split(dict):
            features, split = {"label": column}, "test"

        with pytest.raises(Refused, match="the first is 2 at index 5 of test; there are classes 0 to 1"):
            data.refuse_labels_out_of_range("set", Split(label=test["other"]), "label")


def test_a_set_shorter_than_a_batch_and_one_too_short_to_divide(tmp_path):
    root = make(tmp_path / "set", counts=(("train", 6), ("test", 4)))
    log = refusal("single_fp32", tmp_path / "run", "--dataset", root, *STEPS)
    assert "refused: the training set has 6 samples, less than one global batch of 8" in log
    (tmp_path / "short.txt").write_text("too short")
    argv = ("--dataset", tmp_path / "short.txt", "--max_steps", 2)
    assert "refused: the training set has 1 samples" in refusal("single_fp32", tmp_path / "gpt", *argv, name="gpt")


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    """Its texts would be missing without a word. (Root may list all of them.)"""
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.txt").write_text("fine")
    lists = os.scandir

    def denied(path):
        if str(path).endswith("inner"):
            raise PermissionError(13, "Permission denied", str(path))
        return lists(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(Refused, match=r"inner cannot be listed \(Permission denied\)"):
        text.files(tmp_path)
    with pytest.raises(PermissionError):
        list(predict.files_of([tmp_path]))


def test_text_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 in Latin-1")
    with pytest.raises(
        Refused, match=r"b\.txt cannot be read as UTF-8 text \('utf-8' codec can't decode byte 0xe9 in position 3"
    ):
        text.texts(str(tmp_path), 16)
    with pytest.raises(Refused, match="none cannot be read as UTF-8 text .*No such file"):
        text.files(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused, match="holds no text"):
        text.files(tmp_path / "empty")
    (tmp_path / "c.txt").write_text("x")
    with pytest.raises(Refused, match=r"c\.txt has no text to train on"):
        text.texts(str(tmp_path / "c.txt"), 16)
    with pytest.raises(Refused, match="is too small: 0 means bytes"):
        text.train_tokenizer(["abc"], 200)


def test_the_image_pipeline_gives_the_same_images_whatever_the_workers_and_after_a_resume(tmp_path):
    """Random crops and flips depend on (seed, epoch, index) only, so the weights are equal for any number of workers
    and after a resume."""
    root = make(tmp_path / "set")
    argv = ("--dataset", root, "--image_size", 32, "--max_steps", 6, "--save_steps", 3, "--save_total_limit", 2)
    argv += ("--logging_steps", 1, "--eval_steps", 2)
    one = train("single_fp32", tmp_path / "one", *argv, "--per_device_train_batch_size", 8)
    two = train("ddp_fp32", tmp_path / "two", *argv, "--per_device_train_batch_size", 4, "--dataloader_num_workers", 2)
    assert distance(one, two) < 2e-5
    resumed("single_fp32", one, *argv, "--per_device_train_batch_size", 8, "--dataloader_num_workers", 1)
    a, b = (images.images(str(root), 32, seed=seed)[0] for seed in (0, 1))
    first, again, later = (a.__getitems__([i])["pixel_values"] for i in (3, 3, 3 + len(a)))  # the last: a later epoch
    assert first.equal(again) and not first.equal(later)
    assert not first.equal(b.__getitems__([3])["pixel_values"])


def test_held_out_images_are_as_the_model_wants_them(tmp_path):
    """Held-out images are resized and cropped without randomness, made RGB, and normalized with the model's own mean
    and std."""
    root = make(tmp_path / "set")
    config = vision.data_config("vit_base_patch16_clip_224.openai")
    assert config["mean"] != (0.5,) * 3
    plain, normalized = (images.images(str(root), 32, c)[1] for c in ({}, {k: config[k] for k in ("mean", "std")}))
    a, b = (part.__getitems__([0, 7])["pixel_values"] for part in (plain, normalized))
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    assert a.shape == (2, 3, 32, 32) and torch.allclose(((a + 1) / 2 - mean) / std, b, atol=1e-5)
    grey = next(i for i, label in enumerate(plain.split["label"]) if plain.classes[label] == "grey")
    channels = plain.__getitems__([grey])["pixel_values"][0]
    assert channels[0].equal(channels[1]) and channels[0].equal(channels[2])


FILES = {  # of conversations or labelled texts: (what reads it, its bytes, the line)
    "latin.jsonl": (sft.chats, b'{"question":"a","answer":"caf\xe9"}\n{"question":"a","answer":"b"}\n', "column answer holds text that is not UTF-8 ('utf-8' codec can't decode byte 0xe9 in position 3"),
    "numbers.jsonl": (sft.chats, b'{"question":1,"answer":2}\n' * 3, "conversation 0: the chat template fails"),
    "null.jsonl": (sft.chats, b'{"question":"a","answer":null}\n' * 3, "conversation 0: the chat template fails"),
    "number.jsonl": (sft.chats, b'{"messages":1}\n' * 3, "conversation 0: the chat template fails"),
    "roles.jsonl": (sft.chats, b'{"messages":[{"role":1,"content":[]}]}\n' * 3, "conversation 0: the chat template fails"),
    "none.jsonl": (sft.chats, b'{"messages":[]}\n' * 3, "conversation 0: the chat template fails"),
    "empty.json": (sft.chats, b"", "empty.json: "),
    "half.jsonl": (sft.chats, b'{"question":"\\ud800","answer":"b"}\n' * 3, "The surrogate pair in string is invalid"),
    "names.jsonl": (sft.chats, b'{"a\\u001b[31m":"a"}\n' * 3, r"has columns 'a\x1b[31m'; "),
    "latin.csv": (text.labelled, b"text,label\na,b\n\xe9,c\n", "can't decode byte 0xe9"),
    "object.jsonl": (text.labelled, b'{"text":"a","label":{"b":1}}\n' * 20, 'a text and one named "label" are needed, both Values'),
    "list.jsonl": (text.labelled, b'{"text":"a","label":[1]}\n' * 20, 'a text and one named "label" are needed, both Values'),
    "deep.jsonl": (text.labelled, b'{"text":"]}","label":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "deep.jsonl holds lists in lists more than 200 deep"),
    "deep.json": (sft.chats, b'{"messages":' + b'{"\\"}":\n' * 50_000 + b"1" + b"}" * 50_000 + b"}\n", "deep.json holds lists in lists more than 200 deep"),
    "null.json": (text.labelled, b'{"text":"a","label":null}\n' * 20, "has 0 class: classification needs two or more"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_rows_that_nothing_can_be_learned_from_are_one_line(tmp_path, name):
    read, content, line = FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused) as refused:
        read(str(tmp_path / name), 64)
    assert line in str(refused.value) and str(refused.value).isprintable()


def test_a_pipe_among_texts_is_not_waited_for(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(Refused, match=r"b\.txt is not a regular file: take another, or remove"):
        text.files(tmp_path)


@pytest.mark.parametrize("read", [images.images, text.labelled, text.texts, sft.chats])
def test_a_pipe_as_data_set_is_called_so(tmp_path, read):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(Refused, match=r"a\.jsonl: it is a pipe or a device|a\.jsonl is not a regular file"):
        read(str(tmp_path / "a.jsonl"), 64)


def test_images_of_one_class_are_refused_with_what_is_needed(tmp_path):
    (tmp_path / "cats").mkdir()
    for name in "abc":
        Image.new("RGB", (8, 8)).save(tmp_path / "cats" / f"{name}.png")
    with pytest.raises(Refused, match="an Image and a ClassLabel of two classes are needed"):
        images.images(str(tmp_path))
