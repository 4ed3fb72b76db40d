"""A mistake is one line that says what to do: in data and models, and in scripts of one's own under each strategy."""

import json
import re
import shutil
import sys
import time
from functools import partial

import datasets
import pytest
import torch
from conftest import Ranks, refusal, train
from loop import loop
from test_script import APART, load_state

from shared import data, images, lm, resnets, text, vision
from shared.args import Refused


@pytest.mark.parametrize("name", ["photos", "textures"])
def test_pictures_need_scikit_image(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(
        Refused, match=f"--dataset {name} needs scikit-image and pooch: ./launch.sh setup --extra photos"
    ):
        images.images(name)


def test_columns_that_are_no_images_or_texts_are_named(tmp_path):
    datasets.Dataset.from_dict({"words": ["a", "b"], "size": [1, 2]}).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(Refused, match="has columns {'words'.*; an Image and a ClassLabel of two classes are needed"):
        images.images(str(tmp_path))
    with pytest.raises(Refused, match='has columns words, size; one named "text" is needed'):
        text.texts(str(tmp_path), 8)
    datasets.Dataset.from_dict({"text": ["one text"] * 20}).to_parquet(tmp_path / "train.parquet")
    assert [len(part["text"]) for part in text.documents(str(tmp_path))] == [18, 2]


def test_a_wrong_name_is_refused_at_once_where_the_hub_does_not_answer(monkeypatch):
    """huggingface_hub would try six times, and sleep between."""
    from huggingface_hub import constants

    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    with pytest.raises(Refused, match="--dataset no/such_set: Couldn't reach 'no/such_set' on the Hub"):
        images.images("no/such_set")
    assert not slept and not constants.HF_HUB_OFFLINE


def test_one_sample_is_too_few_to_hold_some_out():
    with pytest.raises(Refused, match="--dataset mine has 1 samples: too few to hold some out"):
        data.split_of({"train": [0]}, "mine")


def test_texts_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Refused, match="gone.txt cannot be read as UTF-8 text .*No such file or directory"):
        text.texts(str(tmp_path), 8)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(Refused, match="python_docs needs pydoc_data, which this Python lacks: try python_source"):
        text.texts("python_docs", 8)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: vision.vit("vit_nano", 30, 1, 10), "image size 30 is not a multiple of the patch size 4"),
        (lambda: vision.vit("vit_nano", 8, 1, 10, True), "--model vit_nano: .*It can be a name of timm"),
        (lambda: vision.vit("/gone/run", 8, 1, 10, True), "--model /gone/run: .*It can be a name of timm"),
        (lambda: resnets.resnet("mobilenetv3_small_050", 64, 3, 10), "not a residual network .*: try resnet18"),
        (lambda: resnets.resnet("resnet18d", 8, 3, 10), "resnet18d has a stem of several layers.*: try resnet18"),
        (lambda: lm.gpt("gpt_tiny", 300, 32), "no model 'gpt_tiny': one of gpt_nano, "),
        (
            lambda: lm.gpt("nobody/nothing", 300, 32, True),
            "nobody/nothing: no pretrained model",
        ),
        (lambda: text.tokenizer_of("nobody/nothing"), "--model nobody/nothing: no tokenizer"),
    ],
)
def test_models_that_cannot_be_made_are_named(make, why):
    with pytest.raises(Refused, match=why):
        make()


def test_a_run_whose_weights_are_damaged_is_named(tmp_path):
    run = train("single_fp32", tmp_path / "run", "--max_steps", 1, "--save_steps", 0, "--eval_steps", 0)
    with pytest.raises(Refused, match="is a run of recipes/vit.py, not of resnet.py"):
        resnets.resnet(str(run), 8, 1, 10, pretrained=True)
    (run / "model" / "model.safetensors").write_bytes(b"half of a file")
    with pytest.raises(Refused, match="its weights cannot be loaded .*; did the run finish?"):
        vision.vit(str(run), 8, 1, 10, pretrained=True)


def one_step(run):
    run.model(torch.ones(8, 16)).sum().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def updates_a_stranger(run):
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def another_model(run):
    second = torch.nn.Linear(2, 2)
    run.accelerator.prepare(second, torch.optim.AdamW(second.parameters()))


def another_optimizer(run):
    run.other = torch.optim.AdamW(run.model.parameters())


@pytest.mark.parametrize(
    ("config", "script", "why"),
    [
        ("fsdp_fp32", partial(loop, *APART, made=one_step), "AdamW has state before it is prepared"),
        ("ddp_fp32", partial(loop, made=updates_a_stranger), "an optimizer updates 1 tensors that are in no prepared model"),
        ("zero2_bf16", partial(loop, prepared=another_model), "zero2 trains one model, the script prepares several"),
        ("single_fp8_msamp_o2", partial(loop, "model optimizer other loader", made=another_optimizer),
         "MS-AMP's levels take one optimizer for a model"),
    ],
)  # fmt: skip
def test_a_script_that_a_strategy_cannot_train_is_told_why(tmp_path, config, script, why):
    log = refusal(config, tmp_path / "run", script=script)
    assert f"refused: {why}" in log


def impatient(rank):
    from faithful.launch import rank_sync

    rank_sync.COMES = 1


@pytest.mark.parametrize(
    ("call", "does"),
    [
        (lambda run: run.accelerator.get_state_dict(run.model), "asks for the weights"),
        (lambda run: run.accelerator.save_state(), "calls save_state"),
    ],
)
def test_the_main_process_alone_cannot_have_what_is_sharded(tmp_path, call, does):
    def alone(run):
        if run.accelerator.is_main_process:
            call(run)
        else:
            time.sleep(3)  # longer than the main process waits in silence

    argv = ["--output_dir", str(tmp_path / "run")]
    env = {"COLLECTIVE_TIMEOUT": "10"}
    ranks = Ranks("fsdp_fp32", argv, script=partial(loop, saved=alone), before=impatient, env=env)
    assert 2 in ranks.wait()
    assert "waiting for rank 1 to call" in ranks.text()
    assert f"refused: the main process alone {does}, but each process holds a part" in ranks.text()


def test_a_process_that_saves_too_late_saves_nothing(tmp_path):
    def late(run):
        if not run.accelerator.is_main_process:
            time.sleep(2)
        print("rank", run.accelerator.process_index, run.accelerator.save_state())

    run = train("ddp_fp32", tmp_path / "run", script=partial(loop, saved=late), before=impatient)
    log = (tmp_path / "run.log").read_text()
    assert all(f"rank {rank} {run / 'checkpoint-4'}" in log for rank in (0, 1))
    assert "note: the main process alone calls save_state: the others' random states are in no checkpoint" in log
    assert [path.name for path in (run / "checkpoint-4").glob("rank*")] == ["rank0.safetensors"]


def a_parameter_more(run):
    run.model.extra = torch.nn.Parameter(torch.ones(2))


def a_model_more(run):
    run.accelerator.prepare(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("config", "script", "note"),
    [
        ("single_fp32", partial(loop, made=a_parameter_more), "1 trainable tensors are in no optimizer: extra, ..."),
        ("ddp_fp32", partial(loop, prepared=a_model_more), "Linear was prepared, but no prepared optimizer updates it"),
    ],
)
def test_what_a_script_leaves_out_is_noted(tmp_path, config, script, note):
    train(config, tmp_path / "run", script=script)
    assert f"note: {note}" in (tmp_path / "run.log").read_text()


def save_last(run):
    run.accelerator.save_state(f"{sys.argv[2]}/checkpoint-8")


@pytest.mark.parametrize("config", ["single_fp32", "single_fp8_msamp_o2"])
def test_a_checkpoint_of_another_model_is_refused(tmp_path, config):
    run = train(config, tmp_path / "run", script=partial(loop, saved=save_last))
    (tmp_path / "run.log").write_text("")
    (run / "run.json").unlink()
    log = refusal(config, run, run / "checkpoint-8", script=partial(loop, prepared=load_state, width=48))
    assert "refused: the checkpoint is of another model: " in log


def no_manifest(rank):
    from faithful.checkpoint import checkpoints

    def full(path, value):
        raise OSError(28, "No space left on device")

    checkpoints.write_json = full


@pytest.mark.parametrize(
    ("before", "why"),
    [(None, ".*checkpoint-1.tmp is somebody else's: move it away"), (no_manifest, "No space left on device")],
)
def test_a_checkpoint_that_cannot_be_written_is_said_and_the_run_goes_on(tmp_path, before, why):
    run = tmp_path / "run"
    run.mkdir()
    if before is None:  # a file where the folder is to be
        (run / "checkpoint-1.tmp").touch()
    train("single_fp32", run, "--max_steps", 2, "--save_steps", 1, "--save_total_limit", 9, "--eval_steps", 0,
          before=before, code=1)  # fmt: skip
    log = (tmp_path / "run.log").read_text()
    assert re.search(rf"checkpoint-1 could not be written \({why}", log.replace("[Errno 28] ", ""))
    assert "training goes on" in log and (run / "model" / "model.safetensors").exists() and "Traceback" not in log
    assert (run / "checkpoint-1.tmp").is_file() == (before is None)


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    stale = tmp_path / "run" / "checkpoint-7.tmp"
    stale.mkdir(parents=True)
    train("single_fp32", tmp_path / "run", "--max_steps", 1, "--save_steps", 0, "--eval_steps", 0)
    assert not stale.exists()


def test_an_error_while_the_record_is_closed_is_shown(tmp_path):
    def before(rank):
        from faithful import ending

        def close(self, error, code):
            raise OSError("the disk is gone")

        ending.Run.close = close

    train(
        "single_fp32", tmp_path / "run", "--max_steps", 1, "--save_steps", 0, "--eval_steps", 0, before=before, code=1
    )
    assert "OSError: the disk is gone" in (tmp_path / "run.log").read_text()


CONFIGS = [  # model, key of its config.json, value that a stranger has written there, what is said
    ("llama_nano", "num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, and no model has more than 1,000"),
    ("llama_nano", "num_attention_heads", 10**9, "num_attention_heads is 1000000000, and no model has more than"),
    ("llama_nano", "num_labels", 10**9, "num_labels is 1000000000, and no model has more than 100,000"),
    ("llama_nano", "max_position_embeddings", 10**12, "max_position_embeddings is 1000000000000, and no model has"),
    ("llama_nano", "text_config", {"n_layer": 10**9}, "n_layer is 1000000000, and no model has more than 1,000"),
    ("llama_nano", "num_hidden_layers", 5, "asks for 5 blocks, not 4 as the weights beside it have"),
    ("llama_nano", "hidden_size", 10**9, r"embed_tokens.weight of \[272, 1000000000\], not \[272, 128\] as the weights"),
    ("llama_nano", "vocab_size", 10**12, r"embed_tokens.weight of \[1000000000000, 128\], not \[272, 128\]"),
    ("llama_nano", "num_hidden_layers", "x", "no pretrained model .*'num_hidden_layers' expected int, got str"),
    ("llama_nano", "hidden_size", None, "no pretrained model .*'hidden_size' expected int, got NoneType"),
    ("llama_nano", "dtype", "evil", "no pretrained model .*no attribute 'evil'"),
    ("bert_nano", "max_position_embeddings", 10**8, r"position_embeddings.weight of \[100000000, 128\], not \[32, 128"),
    ("bert_nano", "hidden_size", 10**9, r"bert.embeddings.LayerNorm.bias of \[1000000000\], not \[128\] as the"),
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for model in (lm.gpt("llama_nano", 272, 32), lm.bert("bert_nano", 272, 32, 3)):
        model.save_pretrained(folder / f"{model.config.model_type}_nano")
    return folder


@pytest.mark.parametrize(("name", "key", "value", "said"), CONFIGS, ids=range(len(CONFIGS)))
def test_a_config_asks_for_the_sizes_of_the_weights_beside_it(saved, tmp_path, name, key, value, said):
    """Else nothing is built: ten billion layers would be built until the memory is full."""
    folder = shutil.copytree(saved / name, tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    build = lm.gpt if name == "llama_nano" else partial(lm.bert, num_classes=3)
    with pytest.raises(Refused, match=said) as error:
        build(str(folder), vocab_size=272, sequence_length=32, pretrained=True)
    assert str(folder) in str(error.value) and len(str(error.value).splitlines()) == 1
    (folder / "config.json").write_text(json.dumps(config))
    build(str(folder), vocab_size=272, sequence_length=32, pretrained=True)


def test_a_new_head_may_have_other_sizes(saved):
    model = lm.bert(str(saved / "bert_nano"), 272, 32, 7, pretrained=True)
    assert model.classifier.weight.shape == (7, 128)


def test_words_that_a_stranger_chose_are_no_sizes():
    labels = {"wooden blocks": 5000, "layer cake": 20000, "headache": 30000}
    lm.refuse_counts({"label2id": labels, "block_size": 2048, "layer_norm_eps": 1e-5}, "config.json")
    with pytest.raises(Refused, match="num_hidden_layers is 5000"):
        lm.refuse_counts({"text_config": {"num_hidden_layers": 5000}}, "config.json")
