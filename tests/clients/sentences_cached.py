"""sentence-transformers' trainer and the loss that runs small forward and backward passes inside its own."""

import sys

import ended
import tiny
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertModel, set_seed

set_seed(0)
bert = Transformer(tiny.bert(BertModel))
model = SentenceTransformer(modules=[bert, Pooling(bert.get_embedding_dimension())], device="cpu")
data = Dataset.from_dict({"anchor": tiny.SENTENCES, "positive": tiny.SENTENCES[3:] + tiny.SENTENCES[:3]})
arguments = SentenceTransformerTrainingArguments(
    sys.argv[-1], max_steps=4, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=1, save_strategy="no",
    report_to=[], disable_tqdm=True, optim="adamw_torch", seed=0,
)  # fmt: skip
loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)
trainer = SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss)
trainer.train()
ended.tell(trainer.accelerator, trainer.model_wrapped, sys.argv[-1], trainer)
