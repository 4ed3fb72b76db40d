"""transformers' Trainer, a tiny Bert that classifies, with accumulation and a linear schedule."""

import sys

import ended
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(0)
config = BertConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                    max_position_embeddings=32, num_labels=2)  # fmt: skip
tokens = torch.randint(0, 128, (64, 16))
samples = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2} for row in tokens]
arguments = TrainingArguments(
    sys.argv[-1], max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-3,
    logging_steps=2, eval_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True, optim="adamw_torch",
    max_grad_norm=1.0, seed=0,
)  # fmt: skip
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=samples)
trainer.train()
ended.tell(trainer.accelerator, trainer.model_wrapped, sys.argv[-1])
