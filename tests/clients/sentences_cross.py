"""sentence-transformers' trainer of cross-encoders, a tiny Bert with one score for each pair of sentences."""

import sys

import ended
import tiny
from datasets import Dataset
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from transformers import BertForSequenceClassification, set_seed

set_seed(0)
model = CrossEncoder(tiny.bert(BertForSequenceClassification), num_labels=1, device="cpu")
labels = [float(i % 2) for i in range(len(tiny.SENTENCES))]
data = Dataset.from_dict({"one": tiny.SENTENCES, "other": tiny.SENTENCES[::-1], "label": labels})
arguments = CrossEncoderTrainingArguments(
    sys.argv[-1], max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1, save_strategy="no",
    report_to=[], disable_tqdm=True, optim="adamw_torch", seed=0,
    ddp_find_unused_parameters=False,  # DDP finds no tensor in what the model returns, under plain Accelerate either
)  # fmt: skip
trainer = CrossEncoderTrainer(model, arguments, train_dataset=data, loss=BinaryCrossEntropyLoss(model))
trainer.train()
ended.tell(trainer.accelerator, trainer.model_wrapped, sys.argv[-1], trainer)
