"""transformers' Trainer, a tiny Llama, random tokens."""

import sys

import ended
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=4, tie_word_embeddings=False)  # fmt: skip
tokens = torch.randint(0, 128, (64, 16))
samples = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    sys.argv[-1], max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, lr_scheduler_type="constant",
    logging_steps=2, eval_strategy="steps", eval_steps=3, save_strategy="no", report_to=[], disable_tqdm=True,
    optim="adamw_torch", seed=0,
)  # fmt: skip
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=samples, eval_dataset=samples[:8])
trainer.train()
ended.tell(trainer.accelerator, trainer.model_wrapped, sys.argv[-1], trainer)
