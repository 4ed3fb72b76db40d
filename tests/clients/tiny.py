"""A tiny Bert and sentences of its few words, for the scripts that train with sentence-transformers."""

import os
import sys

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, PreTrainedTokenizerFast

WORDS = "<pad> a dog cat sees hears the house river".split()
SENTENCES = [f"a {one} sees the {other}" for one in WORDS[2:] for other in WORDS[2:]]


def bert(kind):
    """The folder of a model of this class of transformers with its tokenizer, one for each process."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = f"{sys.argv[-1]}/bert{os.environ.get('RANK', 0)}"
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", model_max_length=16).save_pretrained(folder)
    config = BertConfig(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                        max_position_embeddings=32, num_labels=1)  # fmt: skip
    kind(config).save_pretrained(folder)
    return folder
