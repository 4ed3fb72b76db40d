"""recipes/embed.py: pairs, negatives of all processes, recall."""

import json

import pytest
import torch
from conftest import distance, metrics, train
from test_recipes import couples

from shared import models, pairs, text
from shared.args import Refused
from tools import predict

WORDS = "red blue green grey pink white black brown gold lime teal plum".split()
FP64 = ("--sequence_length", 24, "--vocab_size", 0, "--dtype", "float64", "--optimizer", "sgd", "--learning_rate", 0.05,
        "--max_steps", 3, "--logging_steps", 1, "--warmup_steps", 1, "--save_steps", 0, "--max_grad_norm", 0.5, "--dropout", 0)  # fmt: skip


def batches(per_device, accumulation=1):
    return ("--per_device_train_batch_size", per_device, "--gradient_accumulation_steps", accumulation)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    runs = {}
    for accumulation in (1, 2):
        argv = ("--dataset", couples(folder), *FP64, *batches(16, accumulation))
        runs[accumulation] = train("single_fp32", folder / f"run{accumulation}", *argv, name="embed")
    return runs


@pytest.mark.parametrize(
    ("config", "accumulation", "processes"),
    [("ddp_fp32", 1, 2), ("ddp_fp32", 2, 2), ("fsdp_fp32", 2, 2), ("ddp_fp32", 1, 4)],
)
def test_negatives_of_all_processes_make_the_loss_of_one(one, tmp_path, config, accumulation, processes):
    """With the same texts in a micro-batch over all processes; an evaluation's last batch is uneven."""
    argv = ("--dataset", couples(tmp_path), *FP64, *batches(16 // processes, accumulation))
    argv += ("--per_device_eval_batch_size", 3)
    many = train(config, tmp_path / "run", *argv, name="embed", processes=processes)
    assert distance(one[accumulation], many) < 1e-12
    for a, b in zip(metrics(one[accumulation]), metrics(many), strict=True):
        for key in a.keys() & {"loss", "grad_norm", "eval_loss", "recall_at_10"}:
            assert a[key] == pytest.approx(b[key], rel=1e-12), key
    assert max(row.get("grad_norm", 0) for row in metrics(many)) > 0.5  # clipping was at work


def test_the_parity_can_fail(one, tmp_path):
    """Negatives without their gradient, as `accelerator.gather` gives them, train to other weights."""

    def without_gradients(rank):
        pairs.gathered = lambda accelerator, rows: accelerator.gather(rows)

    argv = ("--dataset", couples(tmp_path), *FP64, *batches(8))
    two = train("ddp_fp32", tmp_path / "run", *argv, name="embed", before=without_gradients)
    assert distance(one[1], two) > 1e-6


def test_processes_that_share_a_batch_are_no_negatives():
    class Shared:
        class parallelism_config:
            non_data_parallel_size = 2

    with pytest.raises(Refused, match="processes that share a batch would be each other's negatives"):
        pairs.gathered(Shared(), torch.ones(2, 3))


def test_an_embedding_does_not_depend_on_the_padding(tmp_path):
    """Of 24 tokens or of 60: a text's embedding is the mean over its own tokens."""
    short, long = (pairs.pairs(str(couples(tmp_path)), length)[1] for length in (24, 60))
    torch.manual_seed(0)
    model = models.encoder("bert_nano", short.vocab_size, 60).double().eval()
    with torch.no_grad():
        found = [
            pairs.embeddings(model, part.__getitems__(range(8)), waits) for part in (short, long) for waits in (0, 1)
        ]
    assert found[0].shape == (2, 8, 128) and found[0].norm(dim=-1).allclose(torch.ones(2, 8).double())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-12)
    row = short.__getitems__([3])
    kept = row["attention_mask"][0].bool()
    said = [short.tokenizer.decode(ids[mask]) for ids, mask in zip(row["input_ids"][0], kept, strict=True)]
    assert said == [text.END + each for each in short.texts[3]]


def test_recall_counts_rows_whose_own_column_is_near():
    similarity = torch.eye(30)
    assert pairs.recall(similarity) == 1
    similarity[:15] = -similarity[:15]  # of these rows the own column is the last
    assert pairs.recall(similarity) == 0.5 and pairs.recall(similarity, 30) == 1


def test_it_learns_and_finds(tmp_path, capsys):
    """More than TF-IDF, to which the numbers and colours of a pair are spelled alike, so that it finds all: here the
    second text is in other words."""
    other = {word: f"w{i}" for i, word in enumerate(WORDS)}
    rows = [
        {"query": f"{a} and {b} {i}", "answer": f"{other[a]}{other[b]}"} for i in range(4) for a in WORDS for b in WORDS
    ]
    (tmp_path / "other.json").write_text(json.dumps(rows))
    argv = ("--dataset", tmp_path / "other.json", "--sequence_length", 12, "--vocab_size", 400, *batches(32))
    argv += ("--max_steps", 60, "--warmup_steps", 5, "--learning_rate", 2e-3, "--eval_steps", 0, "--save_steps", 0)
    run = train("single_fp32", tmp_path / "run", *argv, name="embed")
    last = metrics(run)[-1]
    assert last["recall_at_10"] > 2 * last["tfidf_recall_at_10"] and last["recall_at_10"] > 0.5, last
    predict.main([str(run), "--prompt", "teal and plum"])
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_functions_of_the_standard_library_are_pairs():
    found = pairs.functions()
    codes = {code for _, code in found}
    assert len(found) == len(codes) > 5000 and sum(bool(words) for words, _ in found) > 2000
    [(words, code)] = [each for each in found if each[1].startswith("def pformat(object, indent=1")]
    assert words == "Format a Python object into a pretty-printed representation." and words not in code


def test_what_is_no_pair_is_refused(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps([{"a": "x", "b": 1}] * 9))
    with pytest.raises(Refused, match="has columns a, b; two of strings are needed"):
        pairs.pairs(str(tmp_path / "one.json"), 16)
