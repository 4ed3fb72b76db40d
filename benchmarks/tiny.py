"""Small data and small random models for the scripts of benchmarks/others.py, which load theirs from the Hub.

    python benchmarks/tiny.py FOLDER

A script that runs in FOLDER finds them under the names that it asks for, such as bert-base-cased and nyu-mll/glue:
transformers, datasets and diffusers look for a folder of that name first. The package evaluate, whose metrics are
scripts on the Hub, is replaced by a module of this folder that computes an accuracy.
"""

import json
import random
import sys
from pathlib import Path

import torch

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
        return {"accuracy": score, "f1": score}


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
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    size = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    models = {
        "bert-base-cased": BertForSequenceClassification(BertConfig(**size, pad_token_id=0)),
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


def texts(folder):
    """Files of text as the scripts expect them: pairs of sentences, prompts, dialogues, plain lines."""
    from datasets import ClassLabel, Dataset, Features, Value

    dice = random.Random(0)
    features = Features({"sentence1": Value("string"), "sentence2": Value("string"), "idx": Value("int32"),
                         "label": ClassLabel(names=["not_equivalent", "equivalent"])})  # fmt: skip

    def pairs(count):
        rows = [{"sentence1": sentence(dice), "sentence2": sentence(dice), "idx": i, "label": i % 2} for i in
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
    phrases = folder / "temp" / "data" / "FinancialPhraseBank-v1.0"
    phrases.mkdir(parents=True)
    for split, count in (("train", 64), ("val", 16)):
        rows = [json.dumps({"sentence": sentence(dice), "label": dice.choice(WORDS)}) for _ in range(count)]
        (phrases / f"financial_phrase_bank_{split}.jsonl").write_text("\n".join(rows))


def images(folder):
    """Digits of scikit-learn as folders of pictures: with a text for each, alone, and with a second picture each."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
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
    folder = Path(folder)
    torch.manual_seed(0)
    language_models(folder)
    texts(folder)
    images(folder)
    stable_diffusion(folder)
    (folder / "evaluate.py").write_text(EVALUATE)
    (folder / "rewards.py").write_text(REWARDS)


if __name__ == "__main__":
    make(sys.argv[1])
