"""Runs Accelerate scripts that were not written for this project under our configs: which run, and which are refused.

    python benchmarks/clients.py --checkouts FOLDER --output results/clients.json
    python benchmarks/clients.py causal trl_dpo --configs ddp_bf16 fsdp_bf16 --output clients.json

The scripts are those of tests/clients, some of which use trainers of packages, and OTHERS: parts of installed packages,
or read from a folder of checkouts, FOLDER/owner/name:

    git clone https://github.com/huggingface/diffusers FOLDER/huggingface/diffusers

Each is launched by `accelerate launch --config_file CONFIG -m faithful SCRIPT` in a folder with small data and small
random models under the names that it asks the Hub for, such as bert-base-cased and nyu-mll/glue: transformers, datasets
and diffusers look for a folder first. A module computes an accuracy in place of the package evaluate, whose metrics are
on the Hub. Two outcomes are right:

ran      the run's record says what it was, all processes belong to one run, under DDP they have equal weights, and
         what the script saved has been trained: each tensor that moves in fp32 on as many processes (as_far_as; in rows
         without it under single_fp32) moves 0.5 to 2 times as far (moved: the least and the most, with their names),
         and the library that it belongs to loads the folder; for a script that saves nothing at its end the witness
         calls save_model where the script calls free_memory or end_training (saved_by)
refused  one line says why, and no traceback of the script

Where a script's tensors start is what it saves in a run whose learning rate is STAY times its own. Accelerate's
examples warm up for 100 steps, of which they make a few here, to a rate of 2e-5, which is less than FP16 weights hold:
the witness multiplies it by RATE, in each of their runs (rate). In fp32 each script also runs under Accelerate alone,
on as many processes, and its losses and weights must be the same. What each optimizer step did is written by witness()
in the processes of the run, for both in the same way.
"""

import datetime
import functools
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness import ROOT, arguments, made, save

CONFIGS = """single_fp32 ddp_fp32 single_bf16 ddp_bf16 fsdp_bf16 hsdp_bf16 zero2_bf16 ddp_fp8 single_fp8_msamp_o2
    ddp_fp8_msamp_o3 fsdp_fp8_msamp_o2""".split()
OURS = sorted(path.stem for path in (ROOT / "tests" / "clients").glob("*.py") if path.stem not in ("ended", "tiny"))
WINS = {"diffusion"}  # scripts that pass mixed_precision="no"
PACKAGES = """accelerate transformers trl peft diffusers sentence-transformers pytorch-accelerated
    denoising-diffusion-pytorch""".split()
PATIENCE = 400  # seconds; the longest needs about 40 of them where nothing else runs
AS_FAR = (0.5, 2)  # of what a tensor moves in fp32
NOISE = 0.01
RATE = 1000
STAY = 1e-4  # not zero: a script may check that its weights have changed


# ------------------------------------------------------------------------------------------------- scripts of others

TRAINER = """--max_steps 3 --per_device_train_batch_size 4 --logging_steps 1 --save_strategy no --report_to none
    --learning_rate 1e-3 --dataset_name {} --seed 3 --no_gradient_checkpointing
    --model_name_or_path HuggingFaceTB/SmolLM-360M --dtype float32 --bf16 False --output_dir OUT"""
GENERATED = " --num_generations 2 --max_completion_length 6 --reward_funcs rewards.letters"
DIFFUSION = """--pretrained_model_name_or_path stable-diffusion --resolution 64 --train_batch_size 2 --max_train_steps 3
    --learning_rate 1e-3 --lr_warmup_steps 0 --seed 3 --output_dir OUT """


def module(name, words):
    return {"module": name, "words": words.split()}


def example(owner, path, words=""):
    return {"repository": f"huggingface/{owner}", "path": f"examples/{path}.py", "words": words.split()}


def by_feature(name, words=""):
    """The example saves nothing, or the state of its epochs alone."""
    return example("accelerate", f"by_feature/{name}", words) | {"saves": False, "rate": RATE}


def no_trainer(path, words):
    """An example of transformers, from a repository that has all of its examples and is small enough to copy. Those of
    language models and of summaries name what Accelerate and transformers no longer have."""
    common = """--per_device_train_batch_size 4 --max_train_steps 4 --learning_rate 1e-3 --num_warmup_steps 0 --seed 3
        --checkpointing_steps 2 --output_dir OUT """
    path = f"examples/pytorch/{path}_no_trainer.py"
    return {"repository": "PerforatedAI/PerforatedAI-Transformers", "path": path, "words": (common + words).split()}


def diffusion(path, words):
    return example("diffusers", path, DIFFUSION + words)


OTHERS = {
    "trl_dpo": module("trl.scripts.dpo", TRAINER.format("answers")),
    "trl_kto": module("trl.scripts.kto", TRAINER.format("answers")),
    "trl_grpo": module("trl.scripts.grpo", TRAINER.format("prompts") + GENERATED),
    "trl_reward": module("trl.scripts.reward", TRAINER.format("answers")),
    "gradient_accumulation": by_feature("gradient_accumulation", "--gradient_accumulation_steps 2"),
    "checkpointing": by_feature("checkpointing", "--checkpointing_steps epoch --output_dir OUT"),
    "cross_validation": by_feature("cross_validation", "--num_folds 2"),
    "memory": by_feature("memory"),
    "tracking": by_feature("tracking", "--project_dir OUT"),
    "local_sgd": by_feature("local_sgd", "--local_sgd_steps 2"),
    "ddp_comm_hook": by_feature("ddp_comm_hook", "--ddp_comm_hook bf16"),
    "autoregressive_accumulation": by_feature(
        "gradient_accumulation_for_autoregressive_models", "--gradient_accumulation_steps 2"),
    "complete_nlp": example("accelerate", "complete_nlp_example",
                    "--checkpointing_steps epoch --with_tracking --output_dir OUT --project_dir OUT/logs")
                    | {"saves": False, "rate": RATE},
    "text_to_image": diffusion("text_to_image/train_text_to_image", """--train_data_dir digits/train --use_ema
        --checkpointing_steps 2 --gradient_accumulation_steps 2"""),
    "text_to_image_lora": diffusion(
        "text_to_image/train_text_to_image_lora", "--train_data_dir digits/train --rank 4 --checkpointing_steps 2"),
    "unconditional": example("diffusers", "unconditional_image_generation/train_unconditional",
        """--train_data_dir digits/train --model_config_name_or_path small-unet --resolution 32 --train_batch_size 4
        --num_epochs 1 --save_images_epochs 9 --use_ema --ddpm_num_inference_steps 2 --ddpm_num_steps 20
        --eval_batch_size 2 --lr_warmup_steps 0 --learning_rate 3e-3 --output_dir OUT"""),
    "dreambooth": diffusion("dreambooth/train_dreambooth", """--instance_data_dir instances/train
        --instance_prompt thedog --train_text_encoder --checkpointing_steps 2"""),
    "textual_inversion": diffusion("textual_inversion/textual_inversion", """--train_data_dir instances/train
        --placeholder_token <it> --initializer_token a --learnable_property object"""),
    "controlnet": diffusion("controlnet/train_controlnet", "--train_data_dir pairs --checkpointing_steps 2"),
    "peft_prompts": example("peft", "sequence_classification/peft_no_lora_accelerate",
        """--model_name_or_path bert-base-cased --peft_type p_tuning --num_train_epochs 1 --seed 3
        --num_virtual_tokens 4 --num_warmup_steps 0 --output_dir OUT"""),
    "peft_seq2seq": example("peft", "conditional_generation/peft_lora_seq2seq_accelerate_fsdp"),
    # run_clm_no_trainer.py of transformers, with more of DeepSpeed
    "clm": example("accelerate", "by_feature/deepspeed_with_config_support", """--train_file train.txt
        --validation_file validation.txt --model_name_or_path gpt2 --block_size 32 --max_train_steps 4
        --gradient_accumulation_steps 2 --per_device_train_batch_size 4 --seed 3 --learning_rate 1e-3
        --checkpointing_steps 2 --with_tracking --report_to tensorboard --output_dir OUT"""),
    "tf_glue": no_trainer("text-classification/run_glue", "--task_name mrpc --model_name_or_path bert-base-cased"),
    "tf_ner": no_trainer("token-classification/run_ner", """--train_file tags.json --validation_file tags.json
        --gradient_accumulation_steps 2 --model_name_or_path bert-base-cased"""),
    "tf_swag": no_trainer("multiple-choice/run_swag", """--train_file endings.json --validation_file endings.json
        --model_name_or_path bert-base-uncased --gradient_accumulation_steps 2""") | {"still": ("classifier.bias",)},
    "tf_qa": no_trainer("question-answering/run_qa", """--train_file answers.json --validation_file answers.json
        --model_name_or_path bert-base-cased --max_seq_length 32 --doc_stride 8""")
        | {"still": ("encoder.layer.1.output.LayerNorm.bias", "qa_outputs.bias")},
    "tf_translation": no_trainer("translation/run_translation", """--train_file texts.json --validation_file texts.json
        --source_lang en --target_lang ro --model_name_or_path t5-base --max_source_length 24 --max_target_length 12
        --val_max_target_length 12 --num_beams 2 --gradient_accumulation_steps 2 --learning_rate 1e-2"""),
    "tf_images": no_trainer("image-classification/run_image_classification", """--dataset_name classes
        --model_name_or_path small-vit --ignore_mismatched_sizes"""),
}  # fmt: skip


def meant_for(name, config):
    """Whether the script can run with what the config's strategy makes of a model, under Accelerate too."""
    return name != "peft_seq2seq" or not config.startswith("ddp")  # it calls save_pretrained of DDP, which has none


def saves(name):
    """Whether the script saves what it has trained."""
    return OTHERS.get(name, {}).get("saves", True)


def command(name, checkouts):
    """What `python` starts: a path, or `-m` and a module. Raises FileNotFoundError for a checkout that is not there."""
    entry = OTHERS[name]
    if "module" in entry:
        return ["-m", entry["module"]]
    path = checkouts / entry["repository"] / entry["path"]
    if not path.is_file():
        raise FileNotFoundError(path)
    return [path]


def origin(name, checkouts):
    """For the row of results: which script of whom it was."""
    entry = OTHERS[name]
    if "module" in entry:
        return {"module": entry["module"]}
    folder = checkouts / entry["repository"]
    commit = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    digest = hashlib.sha256((folder / entry["path"]).read_bytes()).hexdigest()
    return {"repository": entry["repository"], "path": entry["path"], "commit": commit, "sha256": digest}


# --------------------------------------------------------------------------------------- small data and small models

WORDS = "the a dog cat bird sees hears likes old new red blue tree house river on under by of and".split()
EVALUATE = '''"""In place of the package of this name, whose metrics are on the Hub. Each is the accuracy here."""


class Metric:
    def __init__(self):
        self.equal, self.count = 0, 0

    def add_batch(self, predictions=(), references=()):
        pairs = list(zip(predictions, references, strict=True))
        self.equal, self.count = self.equal + sum(bool(a == b) for a, b in pairs), self.count + len(pairs)

    def compute(self, predictions=(), references=(), **options):
        self.add_batch(predictions, references)
        score, self.equal, self.count = self.equal / max(self.count, 1), 0, 0
        parts = [f"overall_{name}" for name in ("precision", "recall", "f1", "accuracy")]
        return dict.fromkeys(["accuracy", "f1", "score", *parts], score)


def load(*names, **options):
    return Metric()
'''
REWARDS = """def letters(completions, **others):
    return [float(sum(map(ord, completion[0]["content"])) % 7) for completion in completions]
"""


def sentence(dice):
    return " ".join(dice.choices(WORDS, k=dice.randint(4, 9)))


def tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names + WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", eos_token="[SEP]", bos_token="[CLS]", model_max_length=64,
    )  # fmt: skip
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    made.save_pretrained(folder)


def language_models(folder):
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BertModel,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
        ViTConfig,
        ViTForImageClassification,
        ViTImageProcessor,
    )

    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    size = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    models = {
        "bert-base-cased": BertForSequenceClassification(BertConfig(**size, pad_token_id=0)),
        "bert-base-uncased": BertModel(BertConfig(**size, pad_token_id=0)),
        "HuggingFaceTB/SmolLM-360M": LlamaForCausalLM(LlamaConfig(**size, **special, tie_word_embeddings=True)),
        "gpt2": GPT2LMHeadModel(
            GPT2Config(vocab_size=32, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=3)
        ),
        "t5-base": T5ForConditionalGeneration(
            T5Config(vocab_size=32, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0,
                     pad_token_id=0, eos_token_id=3)
        ),
    }  # fmt: skip
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer(folder / name)
    sizes = {name: size[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    vit = ViTConfig(**sizes, num_attention_heads=2, image_size=32, patch_size=8, encoder_stride=8)
    ViTForImageClassification(vit).save_pretrained(folder / "small-vit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "small-vit")


def texts(folder):
    """Files of text as the scripts expect them: pairs of sentences, prompts, dialogues, plain lines."""
    from datasets import ClassLabel, Dataset, Features, Value

    dice = random.Random(0)
    features = Features({"sentence1": Value("string"), "sentence2": Value("string"), "idx": Value("int32"),
                         "label": ClassLabel(names=["not_equivalent", "equivalent"])})  # fmt: skip

    def pairs(count):
        """Three of four have the same label, so that all weights have a way to go."""
        rows = [{"sentence1": sentence(dice), "sentence2": sentence(dice), "idx": i, "label": int(i % 4 > 0)} for i in
                range(count)]  # fmt: skip
        return Dataset.from_list(rows, features=features)

    def lines(count):
        return Dataset.from_list([{"text": sentence(dice) if i < 64 else ""} for i in range(count)])

    def answers(count):
        rows = [(sentence(dice), sentence(dice), sentence(dice)) for _ in range(count)]
        return Dataset.from_list([{"prompt": a, "chosen": b, "rejected": c} for a, b, c in rows])

    def prompts(count):
        return Dataset.from_list([{"prompt": [{"role": "user", "content": sentence(dice)}]} for _ in range(count)])

    sizes = {"train": 64, "validation": 64, "test": 16}
    folders = [("nyu-mll/glue", "mrpc", pairs, 1), ("glue", "mrpc", pairs, 1), ("answers", "default", answers, 1),
               ("prompts", "default", prompts, 1), ("Salesforce/wikitext", "wikitext-2-v1", lines, 8)]  # fmt: skip
    for name, config, make, scale in folders:
        (folder / name / config).mkdir(parents=True)
        files = []
        for split, count in sizes.items():
            make(count * scale).to_parquet(folder / name / config / f"{split}.parquet")
            files.append({"split": split, "path": f"{config}/{split}.parquet"})
        card = json.dumps({"configs": [{"config_name": config, "data_files": files}]})  # JSON is YAML
        (folder / name / "README.md").write_text(f"---\n{card}\n---\n")
    for split in ("train", "validation"):
        (folder / f"{split}.txt").write_text("\n".join(sentence(dice) for _ in range(200)))
    of_examples(folder, dice)
    phrases = folder / "temp" / "data" / "FinancialPhraseBank-v1.0"
    phrases.mkdir(parents=True)
    for split, count in (("train", 64), ("val", 16)):
        rows = [json.dumps({"sentence": sentence(dice), "label": dice.choice(WORDS)}) for _ in range(count)]
        (phrases / f"financial_phrase_bank_{split}.jsonl").write_text("\n".join(rows))


def of_examples(folder, dice):
    """Files for examples of transformers: words with tags, endings, questions, texts and their translation."""

    def question(i):
        words = sentence(dice)
        said = {"text": [words.split()[1]], "answer_start": [len(words.split()[0]) + 1]}
        return {"id": str(i), "title": "", "context": words, "question": sentence(dice), "answers": said}

    def ending(i):
        return {f"ending{at}": sentence(dice) for at in range(4)} | {"label": int(i % 4 > 0)}

    def tags():
        words = sentence(dice).split()
        return {"tokens": words, "ner_tags": ["B-X" if len(word) > 3 else "O" for word in words]}

    def text():
        whole = sentence(dice)
        return {"translation": {"en": whole, "ro": whole[::-1]}}

    rows = {
        "tags": [tags() for _ in range(64)],
        "endings": [{"sent1": sentence(dice), "sent2": "the"} | ending(i) for i in range(64)],
        "texts": [text() for _ in range(64)],
    }
    for name, each in rows.items():
        (folder / f"{name}.json").write_text("\n".join(map(json.dumps, each)))
    (folder / "answers.json").write_text(json.dumps({"data": [question(i) for i in range(64)]}))


def images(folder):
    """Digits of scikit-learn as folders of pictures: with a text for each, alone, and with a second picture each."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for i in range(64):
        picture = Image.fromarray((digits.images[i] * 15).astype("uint8")).resize((32, 32)).convert("RGB")
        place = folder / "classes" / "train" / str(digits.target[i])
        place.mkdir(parents=True, exist_ok=True)
        picture.save(place / f"{i}.png")
    for name in ("digits", "pairs", "instances"):
        rows = []
        (folder / name / "train").mkdir(parents=True)
        for i in range(16):
            picture = Image.fromarray((digits.images[i] * 15).astype("uint8")).resize((32, 32)).convert("RGB")
            picture.save(folder / name / "train" / f"{i}.png")
            rows.append({"file_name": f"{i}.png", "text": f"the {WORDS[digits.target[i]]}"})
            if name == "pairs":
                picture.transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(folder / name / "train" / f"{i}_hint.png")
                rows[-1]["conditioning_image_file_name"] = f"{i}_hint.png"
        if name != "instances":
            text = "\n".join(map(json.dumps, rows))
            (folder / name / "train" / "metadata.jsonl").write_text(text)


def stable_diffusion(folder):
    """A pipeline of the parts of Stable Diffusion, each with random weights."""
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel, UNet2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = [chr(i) for i in range(ord("a"), ord("z") + 1)] + list("<>|*")
    words = letters + [f"{letter}</w>" for letter in letters] + ["<|startoftext|>", "<|endoftext|>"]
    parts = folder / "clip_words"
    parts.mkdir()
    (parts / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (parts / "merges.txt").write_text("#version: 0.2\n")
    text = CLIPTextConfig(vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                          num_attention_heads=2, max_position_embeddings=77, projection_dim=32,
                          bos_token_id=len(words) - 2, eos_token_id=len(words) - 1, pad_token_id=1)  # fmt: skip
    kinds = {"block_out_channels": (32, 64), "norm_num_groups": 8}
    deep = {"block_out_channels": (8, 8, 16, 16), "norm_num_groups": 8}  # 8 times smaller, as ControlNet expects it
    pipeline = StableDiffusionPipeline(
        vae=AutoencoderKL(down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
                          latent_channels=4, sample_size=64, **deep),
        unet=UNet2DConditionModel(
            sample_size=8, layers_per_block=1, cross_attention_dim=32, attention_head_dim=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **kinds),
        text_encoder=CLIPTextModel(text), tokenizer=CLIPTokenizer.from_pretrained(parts, model_max_length=77),
        scheduler=DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.save_pretrained(folder / "stable-diffusion")
    alone = UNet2DModel(sample_size=32, layers_per_block=1, attention_head_dim=8, **kinds,
                        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                        up_block_types=("AttnUpBlock2D", "UpBlock2D"))  # fmt: skip
    alone.save_config(folder / "small-unet")


def make(folder):
    import torch

    torch.manual_seed(0)
    language_models(folder)
    texts(folder)
    images(folder)
    stable_diffusion(folder)
    (folder / "evaluate.py").write_text(EVALUATE)
    (folder / "rewards.py").write_text(REWARDS)


# ------------------------------------------------------------------------------------------------------- the witness

# Python imports a module of this name at its start.
SITECUSTOMIZE = f"""import os, sys
if os.environ.get("WITNESS") and "ACCELERATE_MIXED_PRECISION" in os.environ and "torch" not in sys.modules:
    sys.path.append({str(ROOT / "benchmarks")!r})
    from clients import witness
    sys.path.pop()
    witness()
"""


def witness():
    """From now on writes what each optimizer step of this process did to the file $WITNESS/rank<N>.json: the losses,
    and for each optimizer after each of its steps one number, the norm of all its weights, and a hash of their bits.
    Sets a seed, for scripts that set none."""
    import numpy
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    losses, optimizers, rates = [], {}, {}
    file = Path(os.environ["WITNESS"], f"rank{os.environ.get('RANK', '0')}.json")
    backward = torch.Tensor.backward

    def kept(loss, *args, **kwargs):
        losses.append(loss.detach().double().item() if loss.numel() == 1 else None)
        return backward(loss, *args, **kwargs)

    def stepped(optimizer, args, kwargs):
        digest, square = hashlib.sha256(), 0.0
        for group in optimizer.param_groups:
            for weight in group["params"]:
                part = getattr(weight, "_local_tensor", weight)
                part = getattr(part, "codes", part).detach()  # of amp8's weights
                digest.update(part.contiguous().flatten().view(torch.uint8).numpy().tobytes())
                square += part.double().square().sum().item()
        mine = optimizers.setdefault(id(optimizer), {"norms": [], "hash": None})
        mine["norms"].append(square**0.5)
        mine["hash"] = digest.hexdigest()
        made = {"processes": int(os.environ.get("WORLD_SIZE", "1")), "losses": losses}
        file.write_text(json.dumps(made | {"optimizers": list(optimizers.values())}))

    def change(optimizer, args, kwargs):
        rates[optimizer] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * float(os.environ["WITNESS_RATE"])

    def change_back(optimizer, args, kwargs):
        for group, rate in zip(optimizer.param_groups, rates[optimizer], strict=True):
            group["lr"] = rate

    if "WITNESS_SAVES" in os.environ:
        save_at_the_end(Path(os.environ["WITNESS_SAVES"]))
    torch.Tensor.backward = kept
    register_optimizer_step_post_hook(stepped)
    if "WITNESS_RATE" in os.environ:
        register_optimizer_step_pre_hook(change)
        register_optimizer_step_post_hook(change_back)
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)


def save_at_the_end(folder):
    """From now on the prepared models are saved as `folder`/1, 2, ... when the script is done with them."""
    import accelerate

    begin, numbers = accelerate.Accelerator.__init__, itertools.count(1)

    def ended(accelerator, go_on, *objects):
        for model in accelerator._models:
            accelerator.save_model(model, folder / str(next(numbers)))
        return go_on(*objects)

    def begun(accelerator, *args, **kwargs):
        begin(accelerator, *args, **kwargs)
        for name in ("free_memory", "end_training"):
            setattr(accelerator, name, functools.partial(ended, accelerator, getattr(accelerator, name)))

    accelerate.Accelerator.__init__ = begun


# ---------------------------------------------------------------------------------------------- a launch and its row


def small(folder):
    """The small data and models in `folder`, made once."""
    made = folder / "tiny"
    if not made.is_dir():
        (folder / "making").mkdir()
        make(folder / "making")
        (folder / "making").rename(made)
    return made


def launch(client, config, folder, checkouts, ours=True, stay=False, processes=None):
    """(folder of what it wrote, exit code or None after PATIENCE, what it printed). stay: at STAY of its rate.
    processes: in place of the config's."""
    work = folder / f"{client}-{config}-{'stay' if stay else 'ours' if ours else 'plain'}{processes or ''}"
    shutil.rmtree(work, ignore_errors=True)
    out = work / "out"
    shutil.copytree(small(folder), work, ignore=shutil.ignore_patterns("clip_words"))
    (out / "witness").mkdir(parents=True)
    if client in OTHERS:
        words = [word.replace("OUT", str(out)) for word in OTHERS[client]["words"]]
        script = [*command(client, checkouts), *words]
    else:
        script = [ROOT / "tests" / "clients" / f"{client}.py", out]
    words = ["-m", "faithful", *(["--config_wins"] if client in WINS else [])] if ours else []
    port = [] if config.startswith("single") else ["--main_process_port", "0"]
    file = ROOT / "accelerate_configs" / f"{config}.yml"
    port += ["--num_processes", processes] if processes else []
    line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, *port, *words, *script]
    (work / "sitecustomize.py").write_text(SITECUSTOMIZE)
    paths = [ROOT, work, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {
        "PYTHONPATH": ":".join(map(str, paths)),
        "WITNESS": str(out / "witness"),
        "OMP_NUM_THREADS": "1",
        "FAITHFUL_PROJECT_DIR": str(out / "run"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(work / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    rate = OTHERS.get(client, {}).get("rate", 1) * (STAY if stay else 1)
    env |= {} if rate == 1 else {"WITNESS_RATE": str(rate)}
    env |= {} if saves(client) else {"WITNESS_SAVES": str(out / "ended")}
    given = {path.name for path in work.iterdir()} | {"cache", "__pycache__"}
    if not ours:
        env |= {"ACCELERATE_USE_CPU": "true"}  # else Accelerate makes two runs of one process each
    with (out / "printed.txt").open("w") as printed:
        quiet = {"stdout": printed, "stderr": printed, "start_new_session": True}
        process = subprocess.Popen(list(map(str, line)), env=env, cwd=work, **quiet)
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = None
            process.wait()
    for path in [path for path in work.iterdir() if path.name not in given]:  # a script may save where it is started
        path.rename(out / path.name)
    return out, code, (out / "printed.txt").read_text(errors="replace")


def witnessed(out):
    return [json.loads(path.read_text()) for path in sorted((out / "witness").glob("rank*.json"))]


def beside_accelerate(client, config, folder, checkouts, ranks):
    """How far losses and weights are from those under Accelerate alone, relative to them."""
    out, code, printed = launch(client, config, folder, checkouts, ours=False)
    alone = witnessed(out)
    if code or not alone:
        return {"accelerate_alone": f"exit code {code}: {last_error(printed)}"}

    def norms(rank):
        return [norm for optimizer in rank["optimizers"] for norm in optimizer["norms"]]

    row = {"same_weights_as_under_accelerate": list(map(hashes, ranks)) == list(map(hashes, alone))}
    for what, of in (("losses", lambda rank: rank["losses"]), ("norms", norms)):
        mine, its = [of(rank) for rank in ranks], [of(rank) for rank in alone]
        row[f"{what}_apart"] = f"{list(map(len, mine))} of them, {list(map(len, its))} under Accelerate"
        if list(map(len, mine)) == list(map(len, its)):
            pairs = zip(sum(mine, []), sum(its, []), strict=True)
            row[f"{what}_apart"] = max((abs(a - b) / max(abs(b), 1e-9) for a, b in pairs), default=0)
    return row


def saved(out):
    """{file and name: value} of the tensors that a script saved at its end."""
    from safetensors.torch import load_file

    files = [file for file in sorted(out.rglob("*.safetensors")) if not AMONG.search(str(file.relative_to(out)))]
    return {
        f"{file.relative_to(out)}:{name}": value.double()
        for file in files
        for name, value in load_file(file).items()
        if value.is_floating_point()
    }


def reference_of(client, processes):
    many = "ddp_fp32" if meant_for(client, "ddp_fp32") else "fsdp_fp32"
    return many if processes > 1 else "single_fp32"


@functools.cache
def learned(client, processes, folder, checkouts):
    """({name: value} at the start, {name: how far} in fp32 on as many processes, where an epoch has as many steps). A
    tensor whose elements move less than NOISE of the others' is moved by rounding alone: the bias of an attention's
    keys, say, whose gradient is zero. Adam may move such a one as far as others: `still` names those, which
    add the same to all that a softmax compares."""
    of_many = reference_of(client, 2)
    both, end = [], {1: ("single_fp32", "ours"), 2: (of_many, "ours"), 4: (of_many, "ours4")}[processes]
    for config, which in (("single_fp32", "stay"), end):
        made = folder / f"{client}-{config}-{which}" / "out"
        if not made.exists():
            launch(client, config, folder, checkouts, stay=which == "stay", processes=4 if which == "ours4" else None)
        both.append(saved(made))
    start, end = both
    names = sorted(start.keys() & end.keys())
    far = {name: (end[name] - start[name]).norm().item() for name in names}
    each = {name: far[name] / start[name].numel() ** 0.5 for name in names if far[name]}
    noise = NOISE * statistics.median(each.values()) if each else 0
    still = OTHERS.get(client, {}).get("still", ())
    return start, {name: far[name] for name, by in each.items() if by > noise and not name.endswith(still)}


def moved(client, processes, folder, checkouts, out):
    """How far the saved tensors have moved, of what they move in fp32: the least, the most, and which."""
    start, far = learned(client, processes, folder, checkouts)
    mine = saved(out)
    ratios = {
        name: (mine[name] - start[name]).norm().item() / distance if name in mine else 0.0
        for name, distance in far.items()
    }
    ends = [min(ratios, key=ratios.get), max(ratios, key=ratios.get)] if ratios else []
    count, ratios = len(ratios), [round(ratios[name], 3) for name in ends]
    reference = reference_of(client, processes) + (f" x {processes}" if processes > 1 else "")
    return {"as_far_as": reference, "tensors": count, "moved": ratios, "least_and_most": ends}


def not_loaded(out):
    """Why a library does not load what was saved with its config; None if all is loaded."""
    import diffusers
    import transformers

    for file in sorted(out.rglob("*.json")):
        if AMONG.search(str(file.relative_to(out))) or file.name not in (
            "config.json",
            "modules.json",
            "model_index.json",
        ):
            continue
        try:
            if file.name == "modules.json":
                from sentence_transformers import SentenceTransformer

                SentenceTransformer(str(file.parent), device="cpu")
            elif file.name == "model_index.json":
                diffusers.DiffusionPipeline.from_pretrained(file.parent)
            elif kinds := json.loads(file.read_text()).get("architectures"):
                kind = getattr(transformers, kinds[0])
                _, about = kind.from_pretrained(file.parent, output_loading_info=True)
                if missing := sorted(about["missing_keys"]):
                    return f"{file.parent.relative_to(out)} is without {missing[0]}"
        except Exception as error:
            return f"{file.parent.relative_to(out)} is not loaded: {str(error).splitlines()[0]}"
    return None


def judged(row, folder, checkouts, out):
    """A row of a run that has ended well, with what it saved."""
    row, why = row | moved(row["client"], row["processes"], folder, checkouts, out), not_loaded(out)
    row |= {} if saves(row["client"]) else {"saved_by": "the witness"}
    if not row["moved"]:
        why = f"nothing that it saves moves under {row['as_far_as']}"
    elif not AS_FAR[0] <= row["moved"][0] <= row["moved"][1] <= AS_FAR[1]:
        why = "{} or {} moves {} to {} times as far as under {}"
        why = why.format(*row["least_and_most"], *row["moved"], row["as_far_as"])
    return row | ({"outcome": "failed", "why": why} if why else {})


def judged_again(rows, folder, checkouts):
    """The rows, with what was saved by those runs whose folder is still there."""
    for row in rows:
        out = folder / f"{row['client']}-{row['config']}-ours" / "out"
        if out.exists() and "processes" in row:
            if "moves" in row.pop("why", ""):
                row["outcome"] = "ran"
            row = judged(row, folder, checkouts, out)
        yield row


def hashes(rank):
    return [optimizer["hash"] for optimizer in rank["optimizers"]]


def last_error(printed):
    begins = re.compile(r"(\[rank\d\]: ?)?(refused|error|[\w.]*Error)\b")
    lines = [line for line in printed.splitlines() if begins.match(line)]
    return (lines or printed.splitlines()[-1:] or ["?"])[-1][:400]


# not what a script saves at its end
AMONG = re.compile(r"(^|/)((checkpoint|step|epoch)[-_]?\d|best_checkpoint/)|^(run|bert\d|cache)/")


def outcome(client, config, folder, checkouts=None):
    """A row of the table."""
    row, began = {"client": client, "config": config, "date": datetime.date.today().isoformat()}, time.monotonic()
    if client in OTHERS:
        row["script"] = origin(client, checkouts)
        row |= {"rate": OTHERS[client]["rate"]} if "rate" in OTHERS[client] else {}
    out, code, printed = launch(client, config, folder, checkouts)
    row["seconds"] = round(time.monotonic() - began)
    if code is None:
        return row | {"outcome": "failed", "why": f"no end in {PATIENCE} s"}
    refused = re.findall(r"refused: (.*)$", printed, re.M)  # after a progress bar, too
    file = next(iter(sorted(out.rglob("run.json"))), None)  # a script may name a folder of its own
    made = json.loads(file.read_text()) if file else None
    launchers = r"Traceback[^\n]*\n(?: [^\n]*\n)*? [^\n]*(?:torch/distributed/elastic|accelerate/commands/launch\.py)"
    if code and refused and "Traceback" not in re.sub(launchers, "", printed):
        return row | {"outcome": "refused", "why": refused[0]}
    ranks = witnessed(out)
    if code or not made or made["status"] != "finished" or not ranks:
        return row | {"outcome": "failed", "why": (refused or [last_error(printed)])[-1]}
    evidence, asked = made["evidence"], made["plan"]["num_processes"]
    equal = all(hashes(rank) == hashes(ranks[0]) for rank in ranks)
    right = len(ranks) == asked and all(rank["processes"] == asked for rank in ranks)
    right = right and (equal or evidence["sharded"] or made["plan"]["level"] == "o3")
    row |= {"outcome": "ran" if right else "failed", "processes": len(ranks), "equal_weights": equal}
    row |= {"steps": [len(optimizer["norms"]) for optimizer in ranks[0]["optimizers"]]}
    row |= {key: evidence[key] for key in ("sharded", "linear_converted", "linear_total", "measured")}
    row |= {"bytes_per_parameter": evidence["bytes_per_parameter"]["total"], "notes": made["notes"]}
    row = judged(row, folder, checkouts, out)
    if config in ("single_fp32", "ddp_fp32"):
        row |= beside_accelerate(client, config, folder, checkouts, ranks)
        row["outcome"] = row["outcome"] if row.get("same_weights_as_under_accelerate") else "failed"
    return row


def installed(package):
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    parser.add_argument("clients", nargs="*", default=OURS, help="names; by default all, of others with --checkouts")
    parser.add_argument("--configs", nargs="+", default=CONFIGS)
    parser.add_argument("--checkouts", type=Path, help="folder of repositories, see above")
    parser.add_argument("--folder", type=Path, help="keep what the runs write here")
    parser.add_argument("--judge", action="store_true", help="run nothing: judge again what the runs in --folder saved")
    args = parser.parse_args()
    if args.clients is OURS and args.checkouts:
        args.clients = [*OURS, *OTHERS]
    folder = args.folder or Path(tempfile.mkdtemp(prefix="clients-"))
    folder.mkdir(exist_ok=True)
    if args.judge:
        before = made(args.output, rows=[])
        return save(args.output, before | {"rows": [*judged_again(before["rows"], folder, args.checkouts)]})
    for client in args.clients:
        for config in [config for config in args.configs if meant_for(client, config)]:
            for old in folder.glob(f"{client}-{config}-*"):
                shutil.rmtree(old)
            row = outcome(client, config, folder, args.checkouts)
            print(json.dumps(row), flush=True)
            before = made(args.output, rows=[])["rows"]  # read again: another process may add rows of other scripts
            rows = [each for each in before if (each["client"], each["config"]) != (client, config)] + [row]
            save(args.output, {"rows": rows}, [name for name in PACKAGES if installed(name)])
    if not args.folder:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
