"""recipes/sft.py: conversations, packing, labels on the answers, adapters and their merging, answers."""

import json
import os

import pytest
import torch
from conftest import distance, metrics, resumed, train, weights
from safetensors.torch import load_file, save_file
from test_recipes import questions

from shared import lm, sft, text
from shared.args import Refused
from tools import export, predict

STEPS = ("--max_steps", 6, "--eval_steps", 3, "--save_steps", 3, "--logging_steps", 1, "--warmup_steps", 1)
SMALL = ("--sequence_length", 96, "--per_device_train_batch_size", 4)


def argv_of(folder, *more):
    return ("--dataset", questions(folder), *SMALL, *STEPS, *more)


@pytest.fixture
def packed(tmp_path):
    return sft.chats(str(questions(tmp_path)), 150)[0]


@pytest.mark.parametrize("attention", ["causal", "sdpa", "eager"])  # the last one adds masks
@pytest.mark.parametrize("name", ["llama_nano", "gpt_nano"])
def test_packed_conversations_do_not_see_each_other(packed, name, attention):
    torch.manual_seed(0)
    model, batch = lm.gpt(name, packed.vocab_size, 150).eval(), packed.__getitems__([0])
    model.set_attn_implementation(attention)
    starts = batch["position_ids"][0].eq(0).nonzero().flatten().tolist()
    ends = [*starts[1:], int(packed.counts[0])]
    assert len(starts) >= 2
    with torch.no_grad():
        together = sft.logits(model, batch)[0]
        for start, end in zip(starts, ends, strict=True):
            alone = model(input_ids=batch["input_ids"][:, start:end]).logits[0]
            torch.testing.assert_close(together[start:end], alone, rtol=1e-4, atol=1e-4)
        mixed = model(input_ids=batch["input_ids"]).logits[0]
    assert (mixed - together)[starts[1] :].abs().max() > 0.01, "without the mask they do"


def test_labels_are_the_answers_and_their_end(packed):
    batch, tokenizer = packed.__getitems__([0]), packed.tokenizer
    labels = batch["labels"][0]
    said = tokenizer.decode(labels[labels >= 0])
    answers = [each[-1]["content"] for each in packed.conversations[: said.count(text.END)]]
    assert said == "".join(answer + text.END for answer in answers) and len(answers) >= 2
    counts = (packed.__getitems__(range(len(packed)))["labels"] >= 0).sum(1).double()
    assert packed.mean_count(torch.arange(len(packed))) == pytest.approx(counts.mean().item())
    assert packed.fingerprint() != sft.chats("tasks", 150)[0].fingerprint()


def test_packing_loses_nothing(tmp_path):
    """Packed or not, the same labels are learned."""
    file = str(questions(tmp_path))
    learned = []
    for packing in (True, False):
        train_set, held_out = sft.chats(file, 150, packing)
        labels = train_set.__getitems__(range(len(train_set)))["labels"]
        learned.append(labels[labels >= 0])
        assert len(held_out) == len(held_out.conversations) == 6
    assert learned[0].equal(learned[1])


TEMPLATES = {  # as published models have them: special tokens around a turn; a system prompt that is always there
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "with a system prompt": "{{ 'Be kind.\n' }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_answers_are_found_in_any_template_and_in_several_turns(tmp_path, template):
    tokenizer = text.train_tokenizer([], 0)
    tokenizer.chat_template = TEMPLATES[template]
    tokenizer.save_pretrained(tmp_path / "known")
    turns = [{"role": role, "content": f"{role} {i}"} for i in range(3) for role in ("user", "assistant")]
    (tmp_path / "turns.json").write_text(json.dumps([{"messages": turns}] * 20))
    train_set, _ = sft.chats(str(tmp_path / "turns.json"), 250, pretrained=str(tmp_path / "known"))
    labels = train_set.__getitems__([0])["labels"]
    end = "<|im_end|>\n" if template == "chatml" else text.END
    assert tokenizer.decode(labels[labels >= 0]).startswith("".join(f"assistant {i}{end}" for i in range(3)))


def test_what_cannot_be_trained_on_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"tasks: \d+ of 7650 conversations do not fit into --sequence_length 48"):
        sft.chats("tasks", 48)
    assert len(sft.chats("tasks", 48, skip_long=True)[0].conversations) < 7650
    for name, rows, reason in (
        ("columns", [{"a": "x", "b": "y"}] * 9, '"messages" is needed, or two of prompt and completion'),
        ("answer", [{"messages": [{"role": "user", "content": "x"}]}] * 9, "conversation 0 has no answer"),
        ("content", [{"messages": [{"role": "user"}, {"role": "assistant"}]}] * 9, "conversation 0: the chat template"),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
        with pytest.raises(Refused, match=reason):
            sft.chats(str(tmp_path / f"{name}.json"), 128)


def test_a_run_goes_on_the_same_answers_and_exports(tmp_path, capsys):
    whole = train("ddp_bf16", tmp_path / "whole", *argv_of(tmp_path, "--save_total_limit", 3), name="sft")
    resumed("ddp_bf16", whole, *argv_of(tmp_path), name="sft")
    assert "right: " in (whole / "answers.txt").read_text()
    predict.main([str(whole), "--prompt", "What comes after two in line 1?", "--tokens", "5"])
    assert len(capsys.readouterr().out) >= 1
    export.main([str(whole)])
    again = train("single_fp32", tmp_path / "again", *argv_of(tmp_path, "--model", whole, "--pretrained"), name="sft")
    assert metrics(again)[0]["loss"] < metrics(whole)[0]["loss"], "it starts from the run"


def test_it_learns_to_answer(tmp_path):
    argv = ("--dataset", questions(tmp_path, 240), "--sequence_length", 64, "--per_device_train_batch_size", 6,
            "--max_steps", 120, "--warmup_steps", 20, "--learning_rate", 3e-3)  # fmt: skip
    run = train("single_fp32", tmp_path / "run", *argv, "--eval_steps", 0, "--save_steps", 0, name="sft")
    assert metrics(run)[-1]["exact_match"] > 0.9
    answers = (run / "answers.txt").read_text().splitlines()
    right = sum(a.split(": ")[1:] == b.split(": ")[1:] for a, b in zip(answers[1::3], answers[2::3], strict=True))
    assert right > 0.8 * len(answers) / 3, "exact_match does not say what the model answers"


def test_checkpointing_changes_memory_and_nothing_else(tmp_path):
    runs = [
        train("single_fp32", tmp_path / name, *argv_of(tmp_path, *more), name="sft")
        for name, more in (("plain", ()), ("again", ("--gradient_checkpointing",)))
    ]
    assert distance(*runs) == 0 and metrics(runs[0]) == metrics(runs[1])


@pytest.mark.parametrize("transposed", [False, True])
def test_adapters_are_merged_file_by_file(tmp_path, transposed):
    """Linear's weights, and GPT-2's, which are transposed; square ones too."""
    torch.manual_seed(0)
    expected, files = {"model.norm.weight": torch.randn(8)}, ({}, {})
    files[0]["base_model.model.model.norm.weight"] = expected["model.norm.weight"]
    for name, (outputs, inputs) in {"model.q": (8, 8), "model.up": (16, 8)}.items():
        base, a, b = torch.randn(outputs, inputs), torch.randn(2, inputs), torch.randn(outputs, 2)
        expected[f"{name}.weight"] = base + 4.0 * b @ a
        files[0][f"base_model.model.{name}.base_layer.weight"] = base
        files[1].update(
            {
                f"base_model.model.{name}.lora_A.default.weight": a,
                f"base_model.model.{name}.lora_B.default.weight": b,
            }
        )
        if transposed:
            expected[f"{name}.weight"] = expected[f"{name}.weight"].T
            files[0][f"base_model.model.{name}.base_layer.weight"] = base.T.contiguous()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, tmp_path / name)
    index = {name: file for file, tensors in zip(names, files, strict=True) for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    sft.merge(tmp_path, 4.0)
    found = {key: value for name in names for key, value in load_file(tmp_path / name).items()}
    assert (
        found.keys()
        == expected.keys()
        == json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].keys()
    )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_adapters_that_cannot_be_merged_leave_no_model_that_is_merged_in_parts(tmp_path, monkeypatch):
    """A disk that is full at the second of two files; and the mode is the umask's."""
    layer = lambda name: {f"base_model.model.{name}.base_layer.weight": torch.ones(4, 4),  # noqa: E731
                          f"base_model.model.{name}.lora_A.default.weight": torch.ones(2, 4),
                          f"base_model.model.{name}.lora_B.default.weight": torch.ones(4, 2)}  # fmt: skip
    names, index = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)], tmp_path / "model.safetensors.index.json"
    for name, tensors in zip(names, (layer("a"), layer("b")), strict=True):
        save_file(tensors, tmp_path / name)
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(layer("a"), names[0])}))

    def full(number, disk=iter((None, OSError(28, "No space left on device")))):
        if error := next(disk):
            raise error

    monkeypatch.setattr(os, "fsync", full)
    before = os.umask(0o027)
    try:
        with pytest.raises(OSError, match="No space"):
            sft.merge(tmp_path, 1.0)
    finally:
        os.umask(before)
    assert sorted(path.name for path in tmp_path.iterdir()) == names, "an index of a model in parts, or half a file"
    assert (tmp_path / names[0]).stat().st_mode & 0o777 == 0o640


LORA = ["single_bf16", "ddp_fp8", "fsdp_bf16", "zero3_bf16", "zero3_sp_bf16", "single_fp8_msamp_o2",
        "fsdp_fp8_msamp_o2"]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "config"),
    [*(("llama_nano", config) for config in LORA), ("gpt_nano", "ddp_bf16"), ("gpt_nano", "single_fp8_msamp_o2")],
)
def test_lora_trains_and_is_merged(tmp_path, config, model):
    """The finished model is a plain one that answers as the adapted one did; so is the export of a checkpoint."""
    pytest.importorskip("peft", reason="not installed: peft")
    argv = argv_of(tmp_path, "--lora_rank", 16, "--model", model, "--learning_rate", 0.01)
    run = train(config, tmp_path / "run", *argv, name="sft")
    plain = lm.gpt(model, 272, 96)
    missing, unexpected = plain.load_state_dict(weights(run), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    export.main([str(run), "--checkpoint", "6", "--output", str(tmp_path / "checkpoint.safetensors")])
    exported = load_file(tmp_path / "checkpoint.safetensors")
    for name, value in weights(run).items():
        torch.testing.assert_close(exported[name], value.float(), rtol=0.02, atol=0.02)
    start = lm.gpt(model, 272, 96)
    moved = [name for name, value in weights(run).items() if not value.equal(start.state_dict()[name])]
    assert moved, "nothing was merged"


def test_lora_without_peft_is_one_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(Refused, match="--lora_rank needs peft: ./launch.sh setup --extra lora"):
        sft.adapted(lm.gpt("llama_nano", 272, 16), lora_rank=4)
