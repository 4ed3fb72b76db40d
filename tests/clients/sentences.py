"""sentence-transformers' trainer, a tiny Bert made of its modules, pairs of sentences."""

import sys

import ended
import tiny
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CoSENTLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertModel, set_seed

set_seed(0)
bert = Transformer(tiny.bert(BertModel))
model = SentenceTransformer(modules=[bert, Pooling(bert.get_embedding_dimension())], device="cpu")
scores = [i % 5 / 4 for i in range(len(tiny.SENTENCES))]
data = Dataset.from_dict({"one": tiny.SENTENCES, "other": tiny.SENTENCES[::-1], "score": scores})
arguments = SentenceTransformerTrainingArguments(
    sys.argv[-1], max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1, save_strategy="no",
    report_to=[], disable_tqdm=True, optim="adamw_torch", seed=0,
)  # fmt: skip
trainer = SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=CoSENTLoss(model))
trainer.train()
ended.tell(trainer.accelerator, trainer.model_wrapped, sys.argv[-1], trainer)
