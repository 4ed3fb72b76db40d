"""sentence-transformers' trainer, a tiny Bert made of its modules, pairs of sentences."""

import os
import sys

import ended
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CoSENTLoss
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

set_seed(0)
words = "<pad> a dog cat sees hears the house river".split()
inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
folder = f"{sys.argv[-1]}/bert{os.environ.get('RANK', 0)}"
PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", model_max_length=16).save_pretrained(folder)
BertModel(BertConfig(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                     max_position_embeddings=32)).save_pretrained(folder)  # fmt: skip
bert = Transformer(folder)
model = SentenceTransformer(modules=[bert, Pooling(bert.get_embedding_dimension())], device="cpu")
nouns = [f"a {one} sees the {other}" for one in words[2:] for other in words[2:]]
data = Dataset.from_dict({"one": nouns, "other": nouns[::-1], "score": [i % 5 / 4 for i in range(len(nouns))]})
arguments = SentenceTransformerTrainingArguments(
    sys.argv[-1], max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1, save_strategy="no",
    report_to=[], disable_tqdm=True, optim="adamw_torch", seed=0,
)  # fmt: skip
trainer = SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=CoSENTLoss(model))
trainer.train()
ended.tell(trainer.accelerator, trainer.model_wrapped, sys.argv[-1], trainer)
