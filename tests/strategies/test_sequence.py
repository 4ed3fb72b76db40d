"""Ulysses' sequence parallel with ZeRO-3: two processes, each with a slice of every sequence, train as one does."""

import dataclasses
import functools
import importlib
import json
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from conftest import CONFIGS, assert_exported, distance, metrics, record, resumed, train
from test_tp import STEPS, assert_estimated, in_float64, losses_and_norms
from torch.utils.data import DataLoader
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from faithful import Accelerator, Refused, __main__ as door
from faithful.backends import torchao

pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")  # once, not once in every forked rank
if torch.accelerator.is_available():
    pytest.skip("these are rehearsals, and this machine has an accelerator", allow_module_level=True)

from faithful.strategies.deepspeed import sequence  # noqa: E402

SFT = ("--max_steps", 6, "--logging_steps", 1, "--save_steps", 3, "--warmup_steps", 2, "--sequence_length", 95,
       "--per_device_train_batch_size", 8, "--learning_rate", 3e-3)  # fmt: skip


def config(folder, precision="no", **more):
    """zero3_sp_bf16 in fp32, or another precision that is not shipped. In fp32 only the slices differ from one process."""
    path = folder / f"zero3_sp_{precision.replace('no', 'fp32')}.yml"
    values = yaml.safe_load((CONFIGS / "zero3_sp_bf16.yml").read_text())
    path.write_text(yaml.dump(values | {"mixed_precision": precision} | more))
    return path


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="sdpa", **more)).double()


def batch_of(case):
    """(a batch with labels of the next tokens, the mask of the sequences that its positions show)."""
    length = 30 if case != "uneven" else 31
    ids = torch.randint(0, 64, (3, length), generator=torch.Generator().manual_seed(1))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    labels[:, :11] = -100  # a question: the first slice has fewer labels than the second
    batch = {"input_ids": ids, "labels": labels}
    if case == "padded":
        batch["attention_mask"] = (torch.arange(length) < torch.tensor([[30], [24], [13]])).long()
        labels[batch["attention_mask"] == 0] = -100
        labels[torch.arange(3), batch["attention_mask"].sum(1) - 1] = -100
    if case == "packed":
        batch["position_ids"] = torch.cat([torch.arange(9), torch.arange(14), torch.arange(7)]).expand(3, -1)
    positions = batch.get("position_ids", torch.arange(length).expand(3, -1))
    return batch, sequence.mask_of(positions), positions


def in_slices(folder, level):
    """Writes how far loss and gradients of two slices are from those of whole sequences. level: of torchao's FP8."""
    import deepspeed

    in_float64(0)
    deepspeed.ops.__compatible_ops__ = {}  # else it compiles an all-reduce
    deepspeed.init_distributed("gloo")
    model, found = llama(), {}
    if level:
        how = dataclasses.replace(Float8LinearConfig.from_recipe_name(level), emulate=True)
        convert_to_float8_training(model.model, config=how)
        torchao.complete(model)
    strategy = sequence.SequenceParallel(SimpleNamespace(strategy="zero3_sp", precision="fp32", sp_size=2))
    right = {}

    def loss_of(case):
        batch, mask, positions = batch_of(case)
        logits = model(batch["input_ids"], position_ids=positions, attention_mask=mask).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    for case in ("even", "uneven", "padded", "packed"):
        loss = loss_of(case)
        right[case] = loss.item(), torch.autograd.grad(loss, [*model.parameters()])
    with torch.no_grad():  # each process's own, and in FP8 layers in high precision
        model.eval()
        evaluated = loss_of("packed").item()
    model.train()
    sequence.exchange_heads(model, 2)
    strategy._trained = weakref.ref(model)
    model.register_forward_pre_hook(strategy._place, with_kwargs=True)
    for case, (whole, gradients) in right.items():
        batch = batch_of(case)[0]
        for way in ("", ", masks forgotten"):
            part = sequence.slice_of(batch, dist.get_rank(), 2)
            if way:
                part["position_ids"].packed = False
            kept = ("input_ids", "attention_mask") if case == "even" else (*part.keys() - {"labels"},)
            logits = model(**{name: part[name] for name in part if name in kept}).logits
            counted = (batch["labels"] >= 0).sum() / 2  # of a process, on average
            loss = F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum") / counted
            mine = torch.autograd.grad(loss, [*model.parameters()])
            total = loss.detach().clone()
            for tensor in (total, *mine):
                dist.all_reduce(tensor)
                tensor /= 2
            away = max(((a - b).norm() / b.norm()).item() for a, b in zip(mine, gradients, strict=True))
            found[case + way] = max(abs(total.item() / whole - 1), away)
    model.eval()
    with torch.no_grad():
        found["evaluation"] = abs(loss_of("packed").item() / evaluated - 1)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("level", [None, "rowwise_with_gw_hp"])
def test_in_float64_loss_and_gradients_are_one_process_s(tmp_path, level):
    """Lengths that two processes do not share evenly, padding, packed sequences, unequal numbers of labels. In FP8, too,
    with scales of tokens."""
    train("ddp_fp32", tmp_path / "run", script=functools.partial(in_slices, tmp_path, level),
          env={"DS_ACCELERATOR": "cpu"})  # fmt: skip
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found.pop("packed, masks forgotten") > 1e-3, "conversations that see each other would be seen"
        assert len(found) == 8 and max(found.values()) < 1e-12, found


def test_training_is_one_process_s_and_is_resumed(tmp_path):
    """Packed conversations of 95 tokens; accumulation; clipping; an evaluation; from the middle of an epoch."""
    words = (*SFT, "--gradient_accumulation_steps", 2, "--max_grad_norm", 0.5)
    one = train("single_fp32", tmp_path / "one", *words, name="sft")
    run = train(config(tmp_path), tmp_path / "run", *words, name="sft")
    assert losses_and_norms(run) == pytest.approx(losses_and_norms(one), rel=2e-5)
    [final, of_one] = [metrics(each)[-1]["eval_loss"] for each in (run, one)]
    assert final == pytest.approx(of_one, rel=1e-4) and distance(one, run) < 2e-4
    made = record(run)
    assert made["seen"]["samples_per_step"] == 16 and made["evidence"]["optimizer_owns_all"]
    for kind in ("weight", "master", "optimizer", "gradient"):
        assert made["evidence"]["share_per_process"].get(kind, 0.5) == pytest.approx(0.5, abs=0.02)
    line = "sft | zero3_sp x2 gloo, 50% of the optimizer state each, sequences in 2 slices | fp32"
    assert line in run.with_suffix(".log").read_text()
    resumed(config(tmp_path), run, *words, name="sft")
    assert_exported(run, 6, 2)


@pytest.mark.parametrize(("precision", "most"), [("fp16", 2e-4), ("fp8", 5e-3)])
def test_in_fewer_bits_it_trains_as_zero3_and_resumes(tmp_path, precision, most):
    """In FP8 a scale is that of a process's tokens: of slices here, of half the samples there."""
    scaler = ("--grad_scaler", "init_scale=1024") if precision == "fp16" else ()
    path = config(tmp_path, "fp16") if precision == "fp16" else "zero3_sp_fp8"
    run = train(path, tmp_path / "run", *STEPS, *scaler, name="gpt")
    half = ("--per_device_train_batch_size", 4, "--save_steps", 0)
    other = train(f"zero3_{precision}", tmp_path / "other", *STEPS, *half, *scaler, name="gpt")
    assert losses_and_norms(run) == pytest.approx(losses_and_norms(other), rel=most)
    made, theirs = record(run)["evidence"], record(other)["evidence"]
    for key in ("bytes_per_parameter", "dtypes", "share_per_process", "linear_converted"):
        assert made[key] == theirs[key]
    # in 4 layers, forward and backward, half of q, k, v and the output of 4 rows of 32 tokens, in 16 bit
    exchanged = 4 * 2 * (128 + 64 + 64 + 128) * 4 * 32 * 2 / 2
    assert made["wire_bytes_per_step"] - theirs["wire_bytes_per_step"] == pytest.approx(exchanged, rel=0.02)
    resumed(path, run, *STEPS, *scaler, name="gpt")
    if path == "zero3_sp_fp8":
        assert_estimated(path, run)


def test_groups_of_two_among_four_train_on_batches_of_their_own(tmp_path):
    one = train("single_fp32", tmp_path / "one", *STEPS, "--save_steps", 0, name="gpt")
    sizes = {"parallelism_config": {"parallelism_config_sp_size": 2, "parallelism_config_dp_shard_size": 2}}
    path = config(tmp_path, num_processes=4, **sizes)
    half = ("--per_device_train_batch_size", 4, "--save_steps", 0)
    four = train(path, tmp_path / "four", *STEPS, *half, name="gpt")
    assert losses_and_norms(four) == pytest.approx(losses_and_norms(one), rel=2e-5)
    assert metrics(four)[-1]["eval_loss"] == pytest.approx(metrics(one)[-1]["eval_loss"], rel=1e-4)
    assert record(four)["seen"]["samples_per_step"] == 8


class Rows(torch.utils.data.Dataset):
    """Questions and answers, with the labels of transformers: the tokens themselves."""

    def __len__(self):
        return 12

    def __getitem__(self, at):
        ids = torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": ids, "labels": torch.where(torch.arange(30) < 3 * (at % 5), -100, ids)}


def as_accelerate_s_example(folder, plain):
    """A script as Accelerate's sp-alst.py and transformers' Trainer have it. plain: one that knows nothing of slices."""
    accelerator = Accelerator()
    model = llama().float()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(), 2))
    size, losses = getattr(accelerator.parallelism_config, "sp_size", 1), []
    for batch in loader:
        assert len(batch["input_ids"][0]) == 30 // size
        labels = batch["labels"] if size == 1 else batch["shift_labels"]
        shifted = {"shift_labels": labels} if size > 1 else {}
        how = batch if plain else {"input_ids": batch["input_ids"], "labels": labels, **shifted}
        loss = model(**how).loss
        if size > 1 and not plain:
            from deepspeed.utils import groups

            assert "labels" not in batch, "Accelerate's loader has taken them out"
            of_group = {"group": groups._get_sequence_parallel_group()}
            each = torch.distributed.nn.functional.all_gather(loss, **of_group)
            good = torch.distributed.nn.functional.all_gather((labels != -100).sum(), **of_group)
            loss = sum(a * n for a, n in zip(each, good, strict=True) if n > 0) / sum(good)
        accelerator.backward(loss)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        optimizer.step()
        optimizer.zero_grad()
    assert len(losses) == len(loader) == 6
    accelerator.save_model(model, folder / "model")
    (folder / "losses.json").write_text(json.dumps(losses))


@pytest.mark.parametrize("plain", [False, True])
def test_the_loss_of_accelerate_s_example_trains_as_one_process(tmp_path, plain):
    """Which gathers the losses of a group; labels are weighed by their number. So they are in a model's own loss."""
    for name, path in (("one", "single_fp32"), ("two", config(tmp_path))):
        train(path, tmp_path / name, script=functools.partial(as_accelerate_s_example, tmp_path / name, plain),
              env={"FAITHFUL_PROJECT_DIR": str(tmp_path / name)})  # fmt: skip
    one, two = (json.loads((tmp_path / name / "losses.json").read_text()) for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5) and distance(tmp_path / "one", tmp_path / "two") < 1e-5


def by_trainer(folder):
    """transformers' Trainer over two epochs, with an evaluation after each, in eval(), after which it fetches a batch."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    words = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "learning_rate": 0.1, "optim": "sgd", "seed": 0}
    how = {"max_grad_norm": 0.5, "eval_strategy": "epoch", "logging_steps": 1, "save_strategy": "no", "report_to": []}
    arguments = TrainingArguments(str(folder), **words, **how, disable_tqdm=True)
    trainer = Trainer(llama().float(), arguments, train_dataset=Rows(), eval_dataset=[Rows()[at] for at in range(7)])
    trainer.train()
    if trainer.is_world_process_zero():
        (folder / "losses.json").write_text(json.dumps(trainer.state.log_history))


def test_a_trainer_s_epochs_are_those_of_one_process(tmp_path):
    import transformers.trainer  # noqa: F401  once, not once in every forked rank

    for name, path in (("one", "single_fp32"), ("two", config(tmp_path))):
        train(path, tmp_path / name, script=functools.partial(by_trainer, tmp_path / name),
              env={"FAITHFUL_PROJECT_DIR": str(tmp_path / name)}, before=lambda rank: door.take_its_place())  # fmt: skip
    one, two = (json.loads((tmp_path / name / "losses.json").read_text()) for name in ("one", "two"))
    kept = ("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss")
    rows = [[[row[key] for key in kept if key in row] for row in log] for log in (one, two)]
    assert len(rows[0]) == len(rows[1]) == 12 + 2 + 1
    for a, b in zip(*rows, strict=True):
        assert b == pytest.approx(a, rel=1e-5)


def refused_ones():
    """What a rank runs: each habit that would be silently wrong."""
    accelerator = Accelerator()
    model = llama().float()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.5), DataLoader(Rows(), 2)
    )
    batch, said, held_out = next(iter(loader)), [], accelerator.prepare(DataLoader(Rows(), 2))

    def refuses(function):
        with pytest.raises(Refused) as raised:
            function()
        said.append(str(raised.value))

    ids = batch["input_ids"]
    refuses(lambda: model(ids[:, :-1]))
    refuses(lambda: model(ids, position_ids=torch.arange(15).expand(2, -1)))
    refuses(lambda: model(ids, attention_mask=torch.ones(2, 1, 15, 15, dtype=torch.bool)))
    refuses(lambda: model(ids, labels=ids))
    refuses(lambda: accelerator.gather_for_metrics(ids))
    model.eval()
    refuses(lambda: model(ids))
    with torch.no_grad():
        refuses(lambda: model(ids))
    whole = next(iter(held_out))["input_ids"]
    assert accelerator.gather_for_metrics(whole).shape == (2, 30), "each sample once"
    accelerator.print("\n".join(said))


def asks_for_labels():
    accelerator = Accelerator()
    model = llama().float()
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.5), DataLoader(Rows(), 2))
    next(iter(loader))["labels"]


def test_what_a_slice_cannot_stand_for_is_refused(tmp_path):
    train(config(tmp_path), tmp_path / "labels", script=asks_for_labels, code=2)
    assert "refused: under zero3_sp a batch has labels that are the tokens" in (tmp_path / "labels.log").read_text()
    train(config(tmp_path), tmp_path / "run", script=refused_ones)
    text = (tmp_path / "run.log").read_text()
    for words in ("computes its input_ids, position_ids or attention_mask", "mask is not what the positions say",
                  "would shift labels within its slice",
                  "gather_for_metrics while the model trains", "batches are slices in model.train(), and whole in"):  # fmt: skip
        assert words in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": torch.zeros(2, 30, dtype=torch.long)}, "neither the tokens nor the next tokens"),
        ({"attention_mask": (torch.arange(30) > 4).long().expand(2, -1)}, "pad on the right"),
        ({"weights": torch.ones(2, 7)}, r"weights is \[2, 7\], input_ids \[2, 30\]"),
        ({"labels": None}, "dicts with input_ids and labels"),
    ],
)
def test_batches_that_cannot_be_sliced_are_refused(change, words):
    rows = torch.utils.data.default_collate([Rows()[0], Rows()[1]]) | change
    with pytest.raises(Refused, match=words):
        sequence.slice_of({name: value for name, value in rows.items() if value is not None}, 0, 2)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: llama(), "4 attention heads and 2 of keys and values, which 4 processes do not share"),
        (
            lambda: torch.nn.Linear(2, 2),
            "Linear is no ...ForCausalLM of transformers: use recipes/gpt.py",
        ),
    ],
)
def test_models_whose_heads_cannot_be_exchanged_are_refused(model, words):
    with pytest.raises(Refused, match=words):
        sequence.check(model(), 4)
