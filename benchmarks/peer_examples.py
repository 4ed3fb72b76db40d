"""A copy of Accelerate's repository in which its examples run without a network, for benchmarks/peer_tests.py."""

import shutil
from pathlib import Path

METRIC = '''
class Metric:
    """In place of the package evaluate, whose metrics are programs on a hub: accuracy, twice."""

    def __init__(self):
        self.right = []

    def add_batch(self, predictions, references):
        self.right += (predictions == references).float().tolist()

    def compute(self, **values):
        if values:
            self.add_batch(**values)
        right, self.right = self.right, []
        return dict.fromkeys(("accuracy", "f1"), sum(right) / len(right))


def load(*_, **__):
    return Metric()
'''


def prepare(repository, folder):
    """Copies the examples and their data into `folder`, beside small models with random weights, in folders with the
    names that the examples ask a hub for."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    for name in ("examples", "tests"):
        shutil.copytree(Path(repository, name), folder / name)
    words = (folder / "tests" / "test_samples" / "MRPC" / "train.csv").read_text().split()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: at for at, word in enumerate(dict.fromkeys([*special, *words]))}
    split = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    small = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    torch.manual_seed(0)
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**small))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))
    for name, model in (("bert-base-cased", bert), ("HuggingFaceTB/SmolLM-360M", llama)):
        special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[SEP]", "cls_token": "[CLS]"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=split, **special).save_pretrained(folder / name)
        model.save_pretrained(folder / name)
