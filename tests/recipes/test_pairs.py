"""recipes/embed.py and recipes/dpo.py: pairs, negatives of all processes, recall; preferences, the reference."""

import json
import math
import random
import types

import pytest
import torch
from conftest import distance, metrics, resumed, train, weights
from test_recipes import couples, preferred

from shared import dpo, lm, pairs, text
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
    model = pairs.encoder("bert_nano", short.vocab_size, 60).double().eval()
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
    capsys.readouterr()  # DeepSpeed says a line when a test imports it first
    predict.main([str(run), "--prompt", "teal and plum"])
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_functions_of_the_standard_library_are_pairs():
    found = text.functions()
    codes = {code for _, code in found}
    assert len(found) == len(codes) > 5000 and sum(bool(words) for words, _ in found) > 2000
    [(words, code)] = [each for each in found if each[1].startswith("def pformat(object, indent=1")]
    assert words == "Format a Python object into a pretty-printed representation." and words not in code


def test_what_is_no_pair_is_refused(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps([{"a": "x", "b": 1}] * 9))
    with pytest.raises(Refused, match="has columns a, b; two of strings are needed"):
        pairs.pairs(str(tmp_path / "one.json"), 16)


# ---- recipes/dpo.py ----


DPO = ("--sequence_length", 48, "--per_device_train_batch_size", 4, "--max_steps", 6, "--eval_steps", 3, "--save_steps", 3,
       "--logging_steps", 1, "--warmup_steps", 1)  # fmt: skip


def test_a_log_probability_is_that_of_the_answer_alone(tmp_path):
    """Compared with the model's own loss of the answer's tokens behind its prompt, without padding."""
    torch.manual_seed(0)
    part = dpo.preferences(str(preferred(tmp_path)), 48)[1]
    model, tokenizer = lm.gpt("llama_nano", part.vocab_size, 48).double().eval(), part.tokenizer
    with torch.no_grad():
        found = dpo.log_probs(model, part.__getitems__([2]))[0]
        for i in (0, 1):
            question, answer = part.rows.conversations[4 + i]
            prompt = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
            before, ids = (tokenizer(said)["input_ids"] for said in (prompt, prompt + answer["content"] + text.END))
            logs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            wanted = sum(logs[at - 1, ids[at]] for at in range(len(before), len(ids)))
            assert found[i].item() == pytest.approx(wanted.item(), rel=1e-9)


def test_the_reference_is_the_model_before_its_first_step_after_a_resume_too(tmp_path):
    """Without a step's change all margins are 0; a resumed run goes on with the same reference."""
    argv = ("--dataset", preferred(tmp_path), *DPO)
    whole = train("ddp_bf16", tmp_path / "whole", *argv, "--save_total_limit", 3, name="dpo")
    resumed("ddp_bf16", whole, *argv, name="dpo")
    first, last = (next(row for row in rows if key in row) for rows, key in
                   ((metrics(whole), "loss"), (metrics(whole)[::-1], "log_prob_gap")))  # fmt: skip
    assert first["loss"] == pytest.approx(math.log(2), abs=0.02), "in bf16 by another kernel than the evaluation"
    assert 0 < last["log_prob_gap"] < 0.1 and last["accuracy"] > 0


def test_processes_train_to_the_weights_of_one(tmp_path):
    """Under SGD in fp32: AdamW would divide a rounding error by its own size."""

    def sgd(rank):
        import dpo as script

        optim = types.SimpleNamespace(AdamW=lambda groups, fused=False: torch.optim.SGD(groups, 0.1))
        script.torch = types.SimpleNamespace(**vars(torch) | {"optim": optim})

    argv = ("--dataset", preferred(tmp_path), *DPO, "--eval_steps", 0)
    one = train("single_fp32", tmp_path / "one", *argv, "--per_device_train_batch_size", 8, name="dpo", before=sgd)
    two = train("fsdp_fp32", tmp_path / "two", *argv, "--per_device_eval_batch_size", 5, name="dpo", before=sgd)
    assert distance(one, two) < 1e-4 * max(value.abs().max().item() for value in weights(one).values())
    assert metrics(one)[-1]["log_prob_gap"] < 1e-5, "fp32 is compared with itself"
    assert metrics(one)[-1]["reward_margin"] == pytest.approx(metrics(two)[-1]["reward_margin"], rel=1e-2)


def test_it_learns_to_prefer(tmp_path):
    argv = ("--dataset", preferred(tmp_path), *DPO, "--max_steps", 30, "--eval_steps", 0, "--save_steps", 0)
    last = metrics(train("single_fp8_msamp_o2", tmp_path / "run", *argv, name="dpo"))[-1]
    assert last["accuracy"] == 1 and last["reward_margin"] > 0.1 and last["log_prob_gap"] > 1e-4, last


@pytest.mark.parametrize("config", ["single_bf16", "fsdp_bf16", "zero3_bf16", "single_fp8_msamp_o2"])
def test_adapters_are_trained_and_merged(tmp_path, config):
    """The merged model in fp32 is close to the adapted one as it trained: log_prob_gap is small."""
    pytest.importorskip("peft", reason="not installed: peft")
    argv = ("--dataset", preferred(tmp_path), *DPO, "--lora_rank", 8, "--learning_rate", 0.01)
    run = train(config, tmp_path / "run", *argv, name="dpo")
    assert not [name for name in weights(run) if "lora" in name]
    assert metrics(run)[-1]["log_prob_gap"] < 0.2


def test_damaged_code_has_the_letters_of_the_code():
    code = "    return self.width + other"
    other = dpo.damaged(code, random.Random(0))
    assert other != code and sorted(other) == sorted(code) and len(other.split()) == len(code.split())
    train_set, held_out = dpo.functions(96)
    assert len(train_set) > 2000 and len(held_out) > 200
    questions = {each[0]["content"] + each[1]["content"] for each in train_set[::2]}
    assert not questions & {each[0]["content"] + each[1]["content"] for each in held_out[::2]}


def test_preferences_in_messages_and_what_is_none(tmp_path):
    said = lambda word: [{"role": "assistant", "content": word}]  # noqa: E731
    turns = [{"role": "user", "content": "a"}, *said("b"), {"role": "user", "content": "c"}]
    rows = [{"prompt": turns, "chosen": said("yes"), "rejected": said("no, never")}] * 9
    (tmp_path / "turns.json").write_text(json.dumps(rows))
    part = dpo.preferences(str(tmp_path / "turns.json"), 96)[0]
    assert [each[-1]["content"] for each in part.rows.conversations[:2]] == ["yes", "no, never"]
    with pytest.raises(Refused, match="16 of 16 conversations do not fit"):  # the pair of each that is too long
        dpo.preferences(str(tmp_path / "turns.json"), 42)
    (tmp_path / "none.json").write_text(json.dumps([{"prompt": "x", "chosen": "y"}] * 9))
    with pytest.raises(Refused, match="has no column rejected: prompt, chosen, rejected are needed"):
        dpo.preferences(str(tmp_path / "none.json"), 48)
