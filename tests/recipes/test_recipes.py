"""Every recipe under the configs, the lines that they share, and the features of each."""

import difflib
import json
import math
import os
import re

import pytest
import torch
import yaml
from conftest import CONFIGS, ROOT, distance, metrics, recipe, record, refusal, resumed, train, weights

from faithful.config import config_file, rules, settings as config_module
from faithful.launch.machine import Machine
from shared import lm, resnets, text, vision
from shared.args import Refused

STEPS = ("--max_steps", 4, "--logging_steps", 1, "--save_steps", 0)
HERE = Machine(packages=["torchao", "deepspeed"])
ALL = [  # that this machine does not refuse
    path.stem
    for path in sorted(CONFIGS.glob("*.yml"))
    if not rules.problems(config_module.read_env(config_module.to_env(yaml.safe_load(path.read_text()))), HERE)
]
CHOSEN = {
    "vit": ("fsdp_bf16_ckpt",),  # the other configs are test_configs.py's and test_fp8.py's
    "resnet": ("fsdp_bf16", "single_fp8_msamp_o2"),
    "gpt": ("fsdp_fp8", "single_fp8_te", "ddp_fp16"),
    "bert": ("ddp_fp8", "fsdp_bf16"),
    "embed": ("fsdp_fp8",),
    "diffusion": ("fsdp_fp8_msamp_o2", "zero2_bf16"),
    "sft": ("fsdp_fp8",),
    "dpo": ("fsdp_fp8",),
}


def matrix():
    for name, chosen in CHOSEN.items():
        for config in ALL:
            yield pytest.param(name, config, marks=() if config in chosen else pytest.mark.slow)


def reviews(folder, count=80):
    """A .csv of short texts in three classes, told apart by a word."""
    words = {"bad": "dull", "good": "bright", "so-so": "grey"}
    rows = [
        (label, f"It was {words[label]} on day {i}, {'and ' * (i % 7)}so on") for i in range(count) for label in words
    ]
    (folder / "reviews.csv").write_text("label,text\n" + "".join(f'{label},"{one}"\n' for label, one in rows))
    return folder / "reviews.csv"


def couples(folder, count=160):
    """A .json file of pairs of texts that share a number and a colour."""
    words = "red blue green grey pink white black brown gold lime teal plum".split()
    rows = [{"query": f"where is {words[i % 12]} {i}", "answer": f"{i} is a {words[i % 12]} one"} for i in range(count)]
    (folder / "couples.json").write_text(json.dumps(rows))
    return folder / "couples.json"


def preferred(folder, count=96):
    """A .json file of prompts with two answers, of which the one in small letters is preferred."""
    words = "red blue green grey pink white black brown gold lime teal plum".split()
    rows = [
        {"prompt": f"Say {word} {i}.", "chosen": f"{word} {i}", "rejected": f"{word.upper()} {i}"}
        for i, word in zip(range(count), words * count, strict=False)
    ]
    (folder / "preferred.json").write_text(json.dumps(rows))
    return folder / "preferred.json"


def questions(folder, count=60):
    """A .json file of conversations: which word comes after another."""
    words = "one two three four five six seven".split()
    rows = [
        {"question": f"What comes after {words[i % 6]} in line {i}?", "answer": words[i % 6 + 1]} for i in range(count)
    ]
    (folder / "questions.json").write_text(json.dumps(rows))
    return folder / "questions.json"


@pytest.mark.parametrize(("name", "config"), list(matrix()))
def test_rehearses(tmp_path, name, config):
    if name == "resnet" and "fp8" in config:  # its one Linear has ten classes
        log = refusal(config, tmp_path / "run", *STEPS, name=name)
        assert re.search(
            r"none of 1 Linear layers can be: fc: |finds no Linear to convert in (FSDP)?ResNet \(fc: ", log
        )
        return
    if config.startswith("zero") and name == "diffusion":  # it trains one model, and the average is a second
        assert "trains one model, the script prepares several" in refusal(config, tmp_path / "run", *STEPS, name=name)
    if "tp_" in config and name not in ("gpt", "sft", "dpo") or "_sp_" in config and name not in ("gpt", "sft"):
        train(config, tmp_path / "run", *STEPS, name=name, code=2)
        why = "has no plan for tensor parallel" if "tp_" in config else "is no ...ForCausalLM of transformers"
        assert f"{why}: use recipes/gpt.py" in (tmp_path / "run.log").read_text()
        return
    small = {
        "gpt": ("--sequence_length", 32, "--dataset", ROOT / "shared"),
        "bert": ("--sequence_length", 32, "--dataset", reviews(tmp_path)),
        "embed": ("--sequence_length", 32, "--dataset", couples(tmp_path)),
        "sft": ("--sequence_length", 80, "--dataset", questions(tmp_path), "--per_device_train_batch_size", 4),
        "dpo": ("--sequence_length", 48, "--dataset", preferred(tmp_path), "--per_device_train_batch_size", 4),
        "diffusion": ("--ema_decay", 0) if config.startswith("zero") else (),
    }.get(name, ())
    run = train(config, tmp_path / "run", *STEPS, *small, name=name)
    made, asked = record(run), config_file.grammar(config)
    assert made["status"] == "finished" and made["recipe"] == name
    assert {key: made["plan"][key] for key in asked if key in made["plan"]} == {
        k: asked[k] for k in asked if k != "recipe"
    }
    losses = [row["loss"] for row in metrics(run) if "loss" in row]
    assert len(losses) == 4 and all(0 < loss < 10 for loss in losses)
    assert made["evidence"]["optimizer_owns_all"]
    assert made["evidence"]["sharded"] is (asked["strategy"] not in ("single", "ddp"))
    assert (made["evidence"]["linear_converted"] > 0) == (asked["precision"] == "fp8")


SIBLINGS = {  # lines of each recipe that may differ from the others: those about what it trains
    "vit": r"learning_rate: float|image|pixel|hits|accuracy|dataset: str|model: str|pretrained: bool|skip_broken|te_blocks|vit|shape|config = |"
    r"loss = F\.cross_entropy\(logits, batch|argmax|from shared import",
    "resnet": r"residual|resnet|[Bb]atch norm|average_statistics",
    "gpt": r"token|vocab_size|gpt|packing|model: str|pretrained: bool|dataset: str|from shared import|perplexity|seen\.append|logits = |"
    r"loss = F\.cross|counts|loss = losses|known = |text\.",
    "bert": r"token|vocab_size|bert|encoder|model: str|pretrained: bool|dataset: str|import.* text |f1|input_ids|found|seen\.append|"
    r"known = |text\.|shape = |F1|mask|learning_rate: float",
    "diffusion": r"diffus|copy|average|best|image_size|dit_|ema_decay|label_dropout|guidance|weight_decay|learning_rate|max_steps: int|seed: int|held_out|loss = |"
    r"measures|cat\(seen\)|eval_loss|samples|images\.images|shape = |noise|fused|gather_for_metrics|what images|judged\(values|import (copy|torch)$|prepared",
    "embed": r"embed|pairs\.|token|text\.|vocab_size|bert|encoder|temperature|dropout: float|freeze|layer_decay|model: str|pretrained: bool|dataset: str|from shared import|queries|groups|"
    r"similarity|own = |recall|seen\.append|known = |shape = |learning_rate: float|per_device_train_batch_size: int|evaluate\(|loss = |eval_loss",
    "sft": r"sft|answer|lora|checkpointing|packing|skip_long|exact|labels|model: str|pretrained: bool|dataset: str|logits|loss|counts|known = |"
    r"token|import|AdamW|Literal|dtype|optimizers? ?[:=]|learning_rate: float|models\.|loading|likeliest|model = ",
}
SIBLINGS["dpo"] = (
    SIBLINGS["sft"]
    + "|"
    + r"prefer|dpo|beta|margin|evaluate\(|chosen|batch_size: int|every_loader|prepared|reference|seed: int|set_seed\(args.seed, device|values|dropout|freeze|layer_decay|accuracy|seen"
)
OFTEN = {  # in vit alone, beside each: what a recipe that neither classifies nor has other optimizers does not have
    "diffusion": r"logits|pretrained|functional|no_grad|weight_decay|freeze|layer_decay|dropout|te_blocks|optimizer|partial|model\b|hits|losses\b",
    "embed": r"logits|freeze|layer_decay|dropout: float|batch_size: int|evaluate\(|losses\)|hits|partial|loss",
    "sft": r"logits|optimizer|partial|dtype|Literal|loss",
    "dpo": r"logits|optimizer|partial|dtype|Literal|loss|hits|freeze|layer_decay|dropout|batch_size: int|evaluate\(|seed: int",
}


@pytest.mark.parametrize("name", ["resnet", "gpt", "bert", "embed", "diffusion", "sft", "dpo"])
def test_siblings_share_their_lines(name):
    """Recipes differ only in lines about what they train; the training loop is the same."""
    pages = [(ROOT / "recipes" / f"{each}.py").read_text().splitlines() for each in ("vit", name)]
    own = [[], []]
    for line in difflib.ndiff(*pages):
        if line[:2] in ("- ", "+ ") and line[2:].strip():
            own["-+".index(line[0])].append(line[2:])
    for each, lines in zip(("vit", name), own, strict=True):
        known = SIBLINGS[each] + ("|" + OFTEN[name] if each == "vit" and name in OFTEN else "")
        drifted = [line for line in lines if not re.search(known, line)]
        assert not drifted, f"only in recipes/{each}.py:\n" + "\n".join(drifted)
    most = {"resnet": 16, "gpt": 50, "bert": 46, "embed": 68, "diffusion": 86, "sft": 82, "dpo": 100}
    assert len(own[0]) + len(own[1]) <= most[name]


def test_each_recipe_is_140_lines_at_most():
    pages = list((ROOT / "recipes").glob("*.py"))
    assert {page.stem for page in pages} >= {"vit", "resnet", "gpt", "bert", "embed", "diffusion", "sft", "dpo"}
    assert all(len(page.read_text().splitlines()) <= 140 for page in pages)


@pytest.fixture(scope="module")
def ragged(tmp_path_factory):
    """Documents of 2 to 90 words, which give sequences of 9 to 48 labels."""
    folder = tmp_path_factory.mktemp("ragged")
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(" ".join(f"w{i * k % 7}" for k in range(2 + i * 37 % 89)))
    return folder


FP64 = ("--model", "gpt_nano", "--dtype", "float64", "--optimizer", "sgd", "--max_steps", 6, "--logging_steps", 1,
        "--save_steps", 0, "--learning_rate", 0.2, "--warmup_steps", 2, "--max_grad_norm", 0.5, "--no-packing",
        "--sequence_length", 48)  # fmt: skip


def batches(per_device, accumulation):
    return ("--per_device_train_batch_size", per_device, "--gradient_accumulation_steps", accumulation)


@pytest.mark.parametrize(
    "others",
    [
        [("ddp_fp32", 2, 4)],
        [("single_fp32", 4, 4), ("ddp_fp32", 8, 1), ("fsdp_fp32", 4, 2), ("single_fp32", 8, 2)],
    ],
)
def test_the_loss_is_the_mean_over_all_tokens_whatever_the_processes(ragged, tmp_path, others):
    counts = text.texts(str(ragged), 48, packing=False)[0].counts
    assert counts.min() < 12 and counts.max() == 48 and len(counts.unique()) > 10
    argv = ("--dataset", ragged, *FP64)
    one = train("single_fp32", tmp_path / "one", *argv, *batches(16, 1), name="gpt")
    for config, per_device, accumulation in others:
        out = tmp_path / f"{config}-{accumulation}"
        other = train(config, out, *argv, *batches(per_device, accumulation), name="gpt")
        assert distance(one, other) < 1e-10, out
        for a, b in zip(metrics(one), metrics(other), strict=True):
            for key in a.keys() & {"loss", "grad_norm", "eval_loss", "perplexity"}:
                assert a[key] == pytest.approx(b[key], rel=1e-10), (out, key)
    assert max(row.get("grad_norm", 0) for row in metrics(one)) > 0.5  # clipping was at work


@pytest.mark.parametrize("packing", [True, False])
def test_every_token_is_a_label_once(packing):
    documents = ["The first.", "", "Second, a longer one: äöü 汉字 \U0001f600.", "x" * 40]
    tokenizer = text.train_tokenizer(documents, 0)
    part = text.cut(documents, tokenizer, 8, packing)
    rows = part.__getitems__(range(len(part)))
    end, seen = tokenizer.eos_token_id, []
    for inputs, labels, count in zip(rows["input_ids"], rows["labels"], part.counts, strict=True):
        kept = labels >= 0
        assert kept.sum() == count > 0 and kept[: int(count)].all()
        assert (inputs[1:][kept[1:]] == labels[:-1][kept[1:]]).all()  # each input is the label before it
        seen += labels[kept].tolist()
    wanted = [tokenizer(d, add_special_tokens=False)["input_ids"] + [end] for d in documents if d]
    assert seen == sum(wanted, [])
    assert tokenizer.decode([t for t in seen if t != end]) == "".join(documents)
    assert part.mean_count(torch.arange(len(part))) * len(part) == pytest.approx(len(seen))


def test_a_tokenizer_is_the_same_each_time_and_gives_the_text_back():
    documents = text.python_docs()[:10]
    a, b = (text.train_tokenizer(documents, 400) for _ in range(2))
    assert a.get_vocab() == b.get_vocab() and len(a) == 400
    ids = a(documents[0], add_special_tokens=False)["input_ids"]
    assert a.decode(ids) == documents[0] and len(ids) < len(documents[0].encode()) / 1.5


def test_python_s_own_documentation_and_source_are_there():
    docs, source = text.python_docs(), text.python_source()
    assert len(docs) >= 100 and sum(map(len, docs)) > 300_000 and any("lambda" in one for one in docs)
    train, held_out = text.documents("python_docs")
    paragraphs = [{p.strip() for one in part["text"] for p in one.split("\n\n")} - {""} for part in (train, held_out)]
    assert len(paragraphs[1]) > 200 and not paragraphs[0] & paragraphs[1]
    assert len(source) > 300 and any("class JSONDecoder" in one for one in source)


@pytest.mark.parametrize(("name", "millions"), [("gpt_nano", 0.96), ("gpt_small", 124.4), ("gpt_medium", 354.8), ("gpt_large", 757.7),
                                                 ("gpt_xl", 1313.6), ("llama_nano", 1.02), ("llama_small", 141.2), ("llama_1b", 1236)])  # fmt: skip
def test_language_models_by_size(name, millions):
    vocabulary = {"nano": 272, "1b": 128256}.get(name.split("_")[1], 50257)
    with torch.device("meta"):
        model = lm.gpt(name, vocabulary, 1024)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)
    assert len(model._no_split_modules) == 1


def test_tied_weights_are_stored_once_and_the_run_s_model_is_transformers_own(ragged, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    argv = ("--dataset", ragged, "--sequence_length", 32, *STEPS)
    for config, kind in (("fsdp_fp32", "gpt_nano"), ("single_fp32", "llama_nano")):
        run = train(config, tmp_path / kind, *argv, "--model", kind, name="gpt")
        names = weights(run).keys()
        assert "lm_head.weight" not in names and any("wte" in n or "embed_tokens" in n for n in names)
        model = AutoModelForCausalLM.from_pretrained(run / "model").eval()
        assert model.lm_head.weight is model.get_input_embeddings().weight
        tokenizer = AutoTokenizer.from_pretrained(run / "model")
        held_out = text.texts(str(ragged), 32)[1]
        assert tokenizer.get_vocab() == held_out.tokenizer.get_vocab()
        rows = held_out.__getitems__(range(len(held_out)))
        with torch.no_grad():
            logits = model(rows["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows["labels"]).item()
        assert record(run)["final"]["metrics"]["eval_loss"] == pytest.approx(loss, rel=1e-5)
        assert record(run)["final"]["metrics"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        assert (run / "sample.txt").read_text().startswith("The ")
        again = train("single_fp32", tmp_path / f"{kind}-again", *argv, "--model", run, "--pretrained",
                      "--learning_rate", 1e-9, name="gpt")  # fmt: skip
        assert record(again)["final"]["metrics"]["eval_loss"] == pytest.approx(loss, rel=1e-4)


def test_deterministic_kernels_are_asked_for_before_cuda_begins(tmp_path):
    def before(rank):
        from faithful import Accelerator

        begins = Accelerator.__init__

        def begun(self, *args, **kwargs):
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
            begins(self, *args, **kwargs)

        def ended(self):
            print("deterministic", torch.are_deterministic_algorithms_enabled())

        Accelerator.__init__, Accelerator.save_model = begun, lambda self, *_: ended(self)

    argv = ("--deterministic", "--max_steps", 1, "--eval_steps", 0)
    train("single_bf16", tmp_path / "run", *argv, before=before)
    assert "deterministic True" in (tmp_path / "run.log").read_text()


def test_all_ranks_write_the_sample_of_rank_0(ragged, tmp_path):
    """On GPUs the ranks' logits may differ in the last bit. A rank that alone drew the end of the text, or found that the
    time is over, would stop, and the others would wait for it in FSDP2's collectives, after the training."""

    def before(rank):
        of_text = text.continuation

        def ends(model, tokenizer, *rest, **options):
            if rank == 1:
                torch.multinomial = lambda *_, **__: torch.tensor([tokenizer.eos_token_id])
            return of_text(model, tokenizer, *rest, **options)

        text.continuation = ends
        if rank == 1:
            text.SAMPLE_SECONDS = -1  # its clock says that the time is over

    argv = ("--dataset", ragged, "--sequence_length", 32, "--max_steps", 1, "--eval_steps", 0)
    run = train("fsdp_fp32", tmp_path / "run", *argv, name="gpt", before=before, env={"COLLECTIVE_TIMEOUT": "10"})
    assert len((run / "sample.txt").read_text()) > len("The ")


def test_a_sample_ends_in_time():
    tokenizer = text.train_tokenizer([], 0)
    model = lm.gpt("llama_nano", 272, 32).eval()
    assert text.continuation(model, tokenizer, "The ", 20, 32, seconds=-1) == "The "
    assert len(text.continuation(model, tokenizer, "The ", 20, 32, seconds=60)) > len("The ")


def test_the_loss_of_a_language_model_is_taken_of_rows(ragged, tmp_path):
    """On a GPU torch takes the softmax of logits of three dimensions with one block of threads for each sequence, and of
    rows with one for each token (aten/src/ATen/native/cuda/SoftMax.cu)."""

    def before(rank):
        import gpt

        of_torch = gpt.F.cross_entropy

        def of_rows(logits, labels, **options):
            assert logits.dim() == 2 and logits.is_contiguous() and labels.dim() == 1
            return of_torch(logits, labels, **options)

        gpt.F.cross_entropy = of_rows

    train("single_fp32", tmp_path / "run", "--dataset", ragged, "--sequence_length", 32, "--max_steps", 1, name="gpt",
          before=before)  # fmt: skip


def test_activation_checkpointing_changes_memory_and_nothing_else(ragged, tmp_path):
    """The gradients of the first step and the whole run are the same bit for bit, with dropout too: a block that is
    computed again draws the same masks."""
    argv = ("--dataset", ragged, "--sequence_length", 32, "--model", "gpt_nano", "--dropout", 0.3, *STEPS)

    def keep_gradients(folder):
        def before(rank):
            from faithful import Accelerator

            clip = Accelerator.clip_grad_norm_

            def clipped(self, parameters, *rest):
                parameters, file = list(parameters), folder / f"gradients{rank}.pt"
                if not file.exists():
                    torch.save([parameter.grad.to_local() for parameter in parameters], file)
                return clip(self, parameters, *rest)

            Accelerator.clip_grad_norm_ = clipped

        folder.mkdir()
        return before

    kept = train("fsdp_bf16", tmp_path / "kept", *argv, name="gpt", before=keep_gradients(tmp_path / "kept"))
    again = train("fsdp_bf16_ckpt", tmp_path / "again", *argv, name="gpt", before=keep_gradients(tmp_path / "again"))
    for rank in (0, 1):
        here, there = (torch.load(run / f"gradients{rank}.pt") for run in (kept, again))
        assert len(here) == len(there) > 50 and all(map(torch.equal, here, there))
    assert distance(kept, again) == 0 and metrics(kept) == metrics(again)
    assert record(again)["plan"]["ckpt"] and not record(kept)["plan"]["ckpt"]
    assert "activations computed again" in (tmp_path / "again.log").read_text()
    file = tmp_path / "on_host.yml"
    file.write_text((CONFIGS / "fsdp_bf16_ckpt.yml").read_text() + "  fsdp_activation_checkpointing_offload: true\n")
    moved = train(file, tmp_path / "moved", *argv, name="gpt")
    assert distance(kept, moved) == 0 and record(moved)["plan"]["ckpt_on_host"]
    assert "computed again from inputs on the host" in (tmp_path / "moved.log").read_text()


def test_gpt2_shape_has_no_linear_for_torchao_but_for_amp8(ragged, tmp_path):
    argv = ("--dataset", ragged, "--sequence_length", 32, "--model", "gpt_nano", *STEPS)
    train("single_fp8", tmp_path / "ao", *argv, name="gpt", code=2)
    assert "none of 17 Linear layers can be: transformer.h.0.attn.c_attn: a Conv1D" in (tmp_path / "ao.log").read_text()
    run = train("single_fp8_msamp_o2", tmp_path / "msamp", *argv, name="gpt")
    evidence = record(run)["evidence"]
    assert (evidence["linear_converted"], evidence["linear_total"]) == (16, 17)
    assert [entry["name"] for entry in evidence["linear_skipped"]] == ["lm_head"]


def test_batch_norm_s_running_averages_are_those_of_all_processes(tmp_path):
    """The saved running averages of batch norm are the mean over all ranks, not rank 0's own.

    The test uses float64 and SGD, with which DDP and FSDP2 differ by rounding alone. AdamW in fp32 divides tiny
    gradients by their own size, so a rounding error (which depends on the CPU) can change a weight by as much as the
    learning rate."""
    argv = (*STEPS, "--dtype", "float64", "--optimizer", "sgd", "--learning_rate", 0.2, "--warmup_steps", 2)

    def keep(rank):
        Accelerator = recipe("resnet").Accelerator
        save_model = Accelerator.save_model

        def kept(self, model, folder):
            own = {n: b.clone() for n, b in model.named_buffers()}
            torch.save(own, tmp_path / f"{'ddp' if 'module' in next(iter(own)) else 'fsdp'}{rank}.pt")
            save_model(self, model, folder)

        Accelerator.save_model = kept

    ddp = train("ddp_fp32", tmp_path / "ddp", *argv, name="resnet", before=keep)
    fsdp = train("fsdp_fp32", tmp_path / "fsdp", *argv, name="resnet", before=keep)
    for run, kind in ((ddp, "ddp"), (fsdp, "fsdp")):
        ranks = [torch.load(tmp_path / f"{kind}{rank}.pt") for rank in range(2)]
        assert all(ranks[0][name].equal(ranks[1][name]) for name in ranks[0])
        saved = weights(run)
        assert all(saved[name.removeprefix("module.")].equal(ranks[0][name]) for name in ranks[0])
    assert distance(ddp, fsdp) < 1e-12


def test_batch_norm_computes_in_fp32_when_its_weight_is_in_16_bit():
    """As FSDP2 and DeepSpeed leave it: weight and bias in bf16, running averages in fp32."""
    from faithful.models import batch_norm

    x = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    model, exact = (torch.nn.Sequential(torch.nn.BatchNorm2d(4)) for _ in range(2))
    batch_norm.in_fp32(model)
    model[0].weight.data, model[0].bias.data = model[0].weight.bfloat16(), model[0].bias.bfloat16()
    for training in (True, False):
        found, wanted = (layer.train(training)(x.to(layer[0].weight.dtype)) for layer in (model, exact))
        assert found.dtype == torch.bfloat16 and found.equal(wanted.bfloat16())
    assert model.state_dict().keys() == exact.state_dict().keys()
    assert all(value.equal(exact.state_dict()[name].to(value.dtype)) for name, value in model.state_dict().items())


def test_resnet_on_small_images_keeps_its_resolution():
    for name in ("resnet_nano", "resnet18", "resnet50"):
        model = resnets.resnet(name, 32, 3, 10).eval()
        assert model.forward_features(torch.zeros(1, 3, 32, 32)).shape[-1] == 4
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert resnets.resnet("resnet18", 224, 3, 10).conv1.stride == (2, 2)


@pytest.mark.parametrize("name", ["gpt", "bert", "embed"])
def test_a_resumed_run_of_texts_is_the_same_run(ragged, tmp_path, name):
    made = {"gpt": lambda _: ragged, "bert": reviews, "embed": couples}[name](tmp_path)
    argv = ("--dataset", made, "--sequence_length", 32, "--dropout", 0.1)
    argv += ("--max_steps", 6, "--logging_steps", 1, "--save_steps", 3)
    whole = train("ddp_bf16", tmp_path / "whole", *argv, "--save_total_limit", 3, name=name)
    resumed("ddp_bf16", whole, *argv, name=name)


def test_texts_with_classes_of_a_table_of_the_hub_and_of_pairs(tmp_path):
    import datasets

    train_set, held_out = text.labelled(str(reviews(tmp_path)), 32)
    assert train_set.classes == ["bad", "good", "so-so"] and (len(train_set), len(held_out)) == (216, 24)
    row = held_out.__getitems__([0])
    kept = row["attention_mask"].bool()
    said = held_out.tokenizer.decode(row["input_ids"][kept])
    assert {"bad": "dull", "good": "bright", "so-so": "grey"}[held_out.classes[row["labels"]]] in said
    assert said.startswith(text.END) and (row["input_ids"][~kept] == held_out.tokenizer.eos_token_id).all()
    classes = datasets.ClassLabel(names=["no", "yes"])
    both = {"sentence1": ["a", "b", "c"], "sentence2": ["d", "e", None], "idx": [1, 2, 3]}
    for split, labels in (("train", [0, 1, 1]), ("validation", [1, 0, 0]), ("test", [-1, -1, -1])):  # as GLUE's
        rows = datasets.Dataset.from_dict(both | {"label": labels}).cast_column("label", classes)
        rows.to_parquet(tmp_path / "glue" / f"{split}-00000-of-00001.parquet")
    train_set, held_out = text.labelled(str(tmp_path / "glue"), 16)
    assert held_out.classes_of.tolist() == [1, 0, 0] and train_set.fingerprint() != held_out.fingerprint()
    row = train_set.__getitems__([0])
    assert train_set.tokenizer.decode(row["input_ids"][row["attention_mask"].bool()]) == f"{text.END}a{text.END}d"
    rows.to_parquet(tmp_path / "glue" / "validation-00000-of-00001.parquet")
    for name, reason in (
        (tmp_path / "glue", "3 labels are out of range"),
        (tmp_path, "reach|data file|label"),
        (ROOT / "results/estimate.json", 'a text and one named "label" are needed'),
    ):
        with pytest.raises(Refused, match=reason):
            text.labelled(str(name), 16)
    for rows, reason in (
        (b"a,caf\xe9\nb,x\n", "can't decode byte 0xe9"),
        (b"a,x\n" * 9, "has 1 class"),
        (b"a,x\nb,y\n,z\n" * 9, "labels are out of range, the first is None at index"),
    ):
        (tmp_path / "one.csv").write_bytes(b"label,text\n" + rows)
        with pytest.raises(Refused, match=f"one.csv.*{reason}"):
            text.labelled(str(tmp_path / "one.csv"), 16)


def test_a_published_encoder_brings_its_tokenizer(tmp_path):
    """A published encoder brings its tokenizer: a model saved as on the Hub, with [CLS] and [SEP] around texts, no end
    of text, and a head of two classes."""
    import transformers

    words = "[PAD] [UNK] [CLS] [SEP] [MASK] it was dull bright grey on day and so , 1 2 3 4".split()
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(tmp_path / "hub")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=24, **sizes)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "hub")
    argv = ("--dataset", reviews(tmp_path), "--model", tmp_path / "hub", "--pretrained", *STEPS)
    train("single_fp32", tmp_path / "long", *argv, name="bert", code=2)
    assert "was made for 24 tokens: lower --sequence_length 128" in (tmp_path / "long.log").read_text()
    run = train("fsdp_bf16", tmp_path / "run", *argv, "--sequence_length", 24, name="bert")
    assert weights(run)["classifier.weight"].shape == (3, 32)
    tokenizer = text.tokenizer_of(str(run / "model"))
    [ids] = text.encode(tokenizer, [["it was dull"]], 24)
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "it", "was", "dull", "[SEP]"]
    with pytest.raises(Refused, match="has no end of text"):
        text.texts(str(ROOT / "shared"), 24, pretrained=str(tmp_path / "hub"))


def test_an_encoder_goes_on_from_a_run_with_another_head(tmp_path):
    argv = ("--dataset", reviews(tmp_path), "--sequence_length", 32, *STEPS)
    run = train("single_fp32", tmp_path / "run", *argv, "--vocab_size", 0, name="bert")
    two = tmp_path / "two.csv"
    two.write_text("label,text\n" + "".join(f"{i % 2},text {i}\n" for i in range(60)))
    argv = ("--dataset", two, *argv[2:], "--model", run, "--pretrained", "--learning_rate", 1e-9)
    found, before = weights(train("single_fp32", tmp_path / "other", *argv, name="bert")), weights(run)
    assert found["classifier.weight"].shape == (2, 128) and before["classifier.weight"].shape == (3, 128)
    assert all(torch.allclose(found[name], before[name], atol=1e-6) for name in before if "classifier" not in name)


def test_the_summary_says_how_little_of_a_resnet_is_fp8(tmp_path):
    def sixteen_classes(rank):
        images = recipe("resnet").images
        load = images.images

        def with_more(*args, **options):
            parts = load(*args, **options)
            for part in parts:
                part.num_classes = 16
            return parts

        images.images = with_more

    run = train("single_fp8_te", tmp_path / "run", *STEPS, name="resnet", before=sixteen_classes)
    said = "1 of 1 Linear in FP8, 0.3% of the parameters, large weights of no Linear layer3.0.conv1.weight (6%), layer3"
    assert said in (tmp_path / "run.log").read_text()
    assert record(run)["evidence"]["share_converted"] == pytest.approx(0.0034, abs=0.0003)


def test_what_fp8_leaves_alone_is_named():
    """The summary line names the layers that FP8 leaves: subclasses with their own forward, odd shapes, and shared
    weights."""
    from torch import nn

    from faithful.backends import linear

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(32, 16)
            self.attention = nn.MultiheadAttention(16, 2)
            self.odd, self.plain, self.head = nn.Linear(16, 10), nn.Linear(16, 16), nn.Linear(16, 32, bias=False)
            self.head.weight = self.embedding.weight

    assert dict(linear.skipped_linears(Model())) == {
        "attention.out_proj": "a NonDynamicallyQuantizableLinear, not torch's own Linear",
        "odd": "10 is not a multiple of 16",
        "head": "its weight is that of embedding",
    }


def test_experts_in_one_parameter_are_named_with_their_share():
    """transformers keeps a mixture's experts in parameters of three dimensions, which no FP8 converts."""
    import torch
    from torch import nn

    import amp8
    from faithful.backends.levels import MSAMP
    from faithful.models.layers import FP8Layers
    from faithful.strategies.base import Strategy

    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
    model.experts = nn.Module()
    model.experts.gate_up_proj = nn.Parameter(torch.zeros(4, 32, 32))
    model.scale = nn.Parameter(torch.zeros(1, 1, 32))
    amp8.initialize(model, None, "O2")
    assert FP8Layers(MSAMP.kinds, model).large_outside(Strategy(None).shape_of) == [
        {"name": "experts.gate_up_proj", "share": 0.7805}
    ]


@pytest.mark.slow
def test_resnet_trains_on_cifar_10_s_format(tmp_path):
    """resnet trains on CIFAR-10's format: columns `img` and `label`, 32x32, in parquet, as `--dataset cifar10` is on
    the Hub."""
    import datasets
    from PIL import Image

    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=[str(i) for i in range(10)])}
    )
    generator = torch.Generator().manual_seed(0)
    (tmp_path / "cifar10").mkdir()
    for split, count in (("train", 80), ("test", 30)):
        labels = [i % 10 for i in range(count)]
        pixels = [torch.randint(20 * n, 20 * n + 60, (32, 32, 3), generator=generator).byte().numpy() for n in labels]
        rows = {"img": [Image.fromarray(p) for p in pixels], "label": labels}
        part = datasets.Dataset.from_dict(rows, features=features)
        part.to_parquet(tmp_path / "cifar10" / f"{split}-00000-of-00001.parquet")
    argv = ("--dataset", tmp_path / "cifar10", "--image_size", 32, "--max_steps", 30, "--save_steps", 0)
    run = train("single_bf16", tmp_path / "run", *argv, "--warmup_steps", 5, name="resnet")
    assert record(run)["final"]["metrics"]["accuracy"] > 0.5  # its ten classes differ in brightness
    assert vision.own_run(run)["data"]["classes"] == [str(i) for i in range(10)]
