"""predict and export to ONNX: the saved model gives the same answers as the run, in torch and in onnxruntime."""

import functools
import sys

import pytest
import torch
from conftest import ROOT, record, refusal, train, weights
from PIL import Image

from shared import data, images, text, vision
from shared.args import Refused
from tools import cli, export, predict

CONFIGS = ("single_bf16", "ddp_fp8", "ddp_fp8_te", "single_fp8_msamp_o2")
SLOW = "single_fp8_msamp_o3", "fsdp_fp8", "zero3_fp8"
RUNS = [  # of a resnet FP8 touches the head alone, and that only where its classes are a multiple of 16
    *(("vit", config) for config in CONFIGS),
    ("resnet", "ddp_bf16"),
    *(pytest.param("vit", config, marks=pytest.mark.slow) for config in SLOW),
    *(pytest.param("resnet", config, marks=pytest.mark.slow) for config in ("fsdp_bf16", "zero3_bf16", "hsdp_bf16")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of images, some of one channel: 12 x 12 blocks of two colours, in four classes of their angles."""
    root, generator = tmp_path_factory.mktemp("set"), torch.Generator().manual_seed(0)
    for split, count in (("train", 32), ("test", 12)):
        for label in range(4):
            (root / split / f"class{label}").mkdir(parents=True)
            for i in range(count):
                across = torch.arange(40)[None] * (label % 2) + torch.arange(40)[:, None] * (label // 2)
                pixels = (across // 5 % 2 * 60 + 90)[..., None] + torch.randint(
                    -60, 60, (40, 40, 3), generator=generator
                )
                image = Image.fromarray(pixels.to(torch.uint8).numpy())
                (image.convert("L") if i % 3 == 0 else image).save(root / split / f"class{label}" / f"{i:02}.png")
    return root


def keep_predictions(folder, name, rank):
    """Called before a run: every rank writes down the classes that its last evaluation computed, batch by batch."""
    module = sys.modules[name]
    evaluate, cross_entropy = module.evaluate, module.F.cross_entropy

    def kept(*args):
        seen = []

        def noted(logits, labels, **kwargs):
            seen.append((logits.argmax(-1), labels))
            return cross_entropy(logits, labels, **kwargs)

        module.F.cross_entropy = noted
        try:
            return evaluate(*args)
        finally:
            module.F.cross_entropy = cross_entropy
            torch.save(seen, f"{folder}/seen{rank}.pt")

    module.evaluate = kept


@pytest.fixture(scope="module")
def trained(tmp_path_factory, folder):
    """Returns a function: (config, recipe) -> (run, the class that its evaluation gave each held-out sample)."""
    root = tmp_path_factory.mktemp("runs")

    @functools.cache
    def of(config, name):
        out = root / f"{name}-{config}"
        kept = root / f"{name}-{config}-kept"
        kept.mkdir()
        argv = ("--dataset", folder, "--image_size", 32, "--max_steps", 25, "--save_steps", 0, "--warmup_steps", 5)
        argv += ("--per_device_train_batch_size", 16, "--per_device_eval_batch_size", 8, "--learning_rate", 0.002)
        train(config, out, *argv, name=name, before=functools.partial(keep_predictions, kept, name))
        batches = [torch.load(kept / f"seen{rank}.pt") for rank in range(record(out)["plan"]["num_processes"])]
        in_turn = [batch for together in zip(*batches, strict=True) for batch in together]
        return out, torch.cat([found for found, _ in in_turn])[:48].tolist()

    return lambda config, name="vit": of(config, name)  # one key in the cache, however it is asked


@pytest.mark.parametrize(("name", "config"), RUNS)
def test_every_held_out_sample_gets_the_class_that_evaluation_gave_it(trained, folder, name, config):
    run, evaluated = trained(config, name)
    model, made, _ = export.load(run)
    paths = sorted((folder / "test").rglob("*.png"))  # as `datasets` orders them
    found = predict.classes(model, made, paths)
    assert [int(name.removeprefix("class")) for _, name, _ in found] == evaluated
    right = [path.parent.name == name for path, name, _ in found]
    assert sum(right) / len(right) == pytest.approx(made["final"]["metrics"]["accuracy"])
    assert 0.3 < sum(right) / 48 and len(set(evaluated)) > 1  # it has learned something, and errs


@pytest.fixture
def ort():
    pytest.importorskip("onnxscript")
    return pytest.importorskip("onnxruntime")


def assert_the_same(ort, file, model, **inputs):
    """onnxruntime computes the model's logits, which are returned."""
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0])
    with torch.no_grad():
        wanted = model(*inputs.values())
    assert (found - getattr(wanted, "logits", wanted)).abs().max() < 1e-4
    return found


@pytest.mark.parametrize(("name", "config"), RUNS)
def test_onnx_gives_the_plain_model_s_logits(trained, tmp_path, ort, name, config):
    run, _ = trained(config, name)
    output = tmp_path / "model.onnx"
    line = export.to_onnx(run, output)
    assert "checked on 16 held-out samples" in line and list(tmp_path.iterdir()) == [output]
    model, _, _ = export.load(run)
    inputs = export.held_out(run, record(run), 40)["pixel_values"]
    for batch in (1, 7, 40):
        logits = assert_the_same(ort, output, model, pixel_values=inputs[:batch])
    assert logits.std() > 0.05  # not all the same


def test_onnx_that_differs_is_not_written(trained, tmp_path, ort, monkeypatch):
    run, _ = trained("single_bf16")

    class Forgetful(torch.nn.Module):
        """Computes something else when it is exported than when it is run."""

        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x) + (1e-3 if torch.compiler.is_exporting() else 0)

    load = export.load
    monkeypatch.setattr(export, "load", lambda *args: (Forgetful(load(*args)[0]).eval(), *load(*args)[1:]))
    with pytest.raises(Refused, match="1.0e-03 away from torch's: .* is not written"):
        export.to_onnx(run, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "config"),
    [("gpt_nano", "single_fp8_msamp_o2"), ("llama_nano", "fsdp_fp8_msamp_o2")],
)
def test_a_language_model_goes_on_the_same_and_exports(tmp_path, ort, capsys, kind, config):
    argv = ("--dataset", ROOT / "shared", "--sequence_length", 32, "--max_steps", 8, "--save_steps", 4)
    run = train(config, tmp_path / "run", *argv, "--model", kind, name="gpt")
    model, made, _ = export.load(run)
    line = export.to_onnx(run)
    assert "checked on 16" in line
    assert_the_same(
        ort, run / "export.onnx", model, input_ids=export.held_out(run, record(run), 3)["input_ids"][:, :20]
    )
    outs = []
    for _ in range(2):
        predict.main([str(run), "--prompt", "import ", "--tokens", "12"])
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] and outs[0].startswith("import ") and len(outs[0]) > 10
    tokenizer = text.tokenizer_of(str(run / "model"))
    with predict.precision_of("evaluated", model, made, torch.device("cpu")):
        assert outs[0] == text.continuation(model, tokenizer, "import ", 12, 32) + "\n"
    early, _, source = export.load(run, 4)
    assert source == "checkpoint-4" and not early.lm_head.weight.equal(model.lm_head.weight)
    assert early.lm_head.weight is early.get_input_embeddings().weight


def test_an_encoder_says_the_class_that_evaluation_gave_and_exports(tmp_path, ort, capsys):
    words = ("dull", "bright", "grey")
    (tmp_path / "set.csv").write_text("label,text\n" + "".join(f"{i % 3},{words[i % 3]} {i}\n" for i in range(240)))
    argv = ("--dataset", tmp_path / "set.csv", "--sequence_length", 16, "--vocab_size", 0, "--max_steps", 12)
    run = train("single_fp8_msamp_o2", tmp_path / "run", *argv, "--warmup_steps", 2, name="bert")
    model, made, _ = export.load(run)
    _, held_out = text.labelled(str(tmp_path / "set.csv"), 16)
    rows = held_out.__getitems__(range(len(held_out)))
    ids, mask = rows["input_ids"], rows["attention_mask"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, mask).logits
    right = (logits.argmax(-1) == rows["labels"]).double().mean()
    assert made["final"]["metrics"]["accuracy"] == right.item() > 0.5
    for index in (0, 1, 2):
        prompt = held_out.tokenizer.decode(ids[index][mask[index].bool()]).removeprefix(text.END)
        predict.main([str(run), "--prompt", prompt])
        assert capsys.readouterr().out.split("\t")[0] == held_out.classes[logits[index].argmax()]
    assert "checked on 16" in export.to_onnx(run)
    assert_the_same(ort, run / "export.onnx", model, input_ids=ids[:5], attention_mask=mask[:5])


def test_files_folders_and_what_is_refused(trained, folder, tmp_path, monkeypatch, capsys):
    run, evaluated = trained("single_bf16")

    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["predict.py", *map(str, argv)])
        with pytest.raises(SystemExit) as end:
            cli.run(predict.main)
        return end.value.code or 0, *capsys.readouterr()

    one = folder / "test" / "class1" / "05.png"
    code, out, _ = call(run, one, folder / "test" / "class0", "--precision", "plain")
    rows = [line.split("\t") for line in out.splitlines()]
    assert code == 0 and len(rows) == 13 and rows[0][0] == str(one)
    assert all(0.25 <= float(row[2]) <= 1 and row[1].startswith("class") for row in rows)
    found = [[line.split("\t")[1] for line in call(run, path)[1].splitlines()] for path in (folder / "test", one)]
    assert found == [[f"class{label}" for label in evaluated], [f"class{evaluated[12 + 5]}"]]
    (tmp_path / "broken.png").write_bytes(b"no image")
    code, out, err = call(run, tmp_path / "broken.png")
    assert code == 2 and err.startswith("refused: ") and "broken.png" in err and len(err.splitlines()) == 1
    assert "classifies images, leave it out" in err and "skip_broken" not in err


def test_digits_and_photos_are_read_from_files_as_they_were_in_memory(tmp_path):
    """A held-out patch saved as PNG and read by predict has exactly the pixels that evaluation saw."""
    pytest.importorskip("skimage")
    held_out = images.photos()[1]
    Image.fromarray(held_out.pixels[7].permute(1, 2, 0).numpy()).save(tmp_path / "a.png")
    pixels = predict.transform_of(data.about(held_out))(Image.open(tmp_path / "a.png"))
    assert pixels.equal(held_out.__getitems__([7])["pixel_values"][0])


def test_a_run_s_own_weights_are_where_another_begins(trained, folder, tmp_path):
    """Fine-tuning starts from the run's weights, but for a new head; frozen blocks stay, later blocks learn faster."""
    run, _ = trained("single_bf16")
    argv = ("--max_steps", 3, "--save_steps", 0, "--pretrained", "--model", run, "--warmup_steps", 1)
    again = train("single_fp32", tmp_path / "same", *argv, "--dataset", folder, "--learning_rate", 1e-12)
    before, after = weights(run), weights(again)
    assert all(torch.allclose(before[name], after[name], atol=1e-9) for name in before)
    other = train("ddp_bf16", tmp_path / "other", *argv, "--dataset", "digits", "--freeze", 2, "--layer_decay", 0.1)
    found = weights(other)
    assert found["head.weight"].shape == (10, 64) and before["head.weight"].shape == (4, 64)
    about = vision.own_run(other)["data"]
    assert (about["image_size"], about["in_chans"]) == (32, 3)  # digits, as the model wants them
    still = [name for name in before if "head" not in name and found[name].equal(before[name])]
    assert set(still) == {n for n in before if n.startswith(("patch_embed", "pos_embed", "blocks.0.", "blocks.1."))}
    moved = [(found[f"blocks.{i}.mlp.fc1.weight"] - before[f"blocks.{i}.mlp.fc1.weight"]).abs().mean() for i in (2, 3)]
    assert 5 < moved[1] / moved[0] < 20
    assert "is a run: add --pretrained" in refusal("single_fp32", tmp_path / "bare", "--model", run)
    train("single_fp32", tmp_path / "size", *argv, "--dataset", "digits", "--image_size", 16, code=2)
    assert "takes 3 x 32 x 32, images are 3 x 16 x 16: leave out" in (tmp_path / "size.log").read_text()
    train("single_fp32", tmp_path / "deep", *argv, "--dataset", folder, "--freeze", 9, code=2)
    assert "--freeze 9, but the model has 4 blocks" in (tmp_path / "deep.log").read_text()


@pytest.mark.parametrize(
    "config",
    ["single_fp8_msamp_o2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp_bf16", "fsdp_fp8"))],
)
def test_frozen_and_decayed_under_every_kind_of_sharding(trained, tmp_path, config):
    run, _ = trained("single_bf16")
    argv = ("--max_steps", 3, "--save_steps", 0, "--pretrained", "--model", run, "--dataset", "digits", "--freeze", 1)
    argv += ("--warmup_steps", 1, "--learning_rate", 0.01)
    found, before = weights(train(config, tmp_path / "run", *argv, "--layer_decay", 0.5)), weights(run)
    still = {
        name
        for name in before
        if "head" not in name and torch.allclose(found[name], before[name], atol=1e-3, rtol=2e-3)
    }
    assert {n for n in before if n.startswith(("patch_embed", "pos_embed", "blocks.0."))} <= still
    assert "blocks.3.mlp.fc1.weight" not in still
