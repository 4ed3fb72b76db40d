"""trl's SFTTrainer, a tiny Llama, a tokenizer of ten words."""

import sys

import ended
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(0)
words = "<pad> <eos> one two three four five six seven eight".split()
inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
config = LlamaConfig(vocab_size=16, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=4, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1,
                     bos_token_id=None)  # fmt: skip
data = Dataset.from_dict({"text": [f"one two three {word} five six" for word in words[2:]] * 8})
arguments = SFTConfig(
    sys.argv[-1], max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=2, save_strategy="no",
    report_to=[], disable_tqdm=True, optim="adamw_torch", max_length=16, bf16=False, gradient_checkpointing=False, seed=0,
)  # fmt: skip
trainer = SFTTrainer(LlamaForCausalLM(config), arguments, train_dataset=data, processing_class=tokenizer)
trainer.train()
ended.tell(trainer.accelerator, trainer.model_wrapped, sys.argv[-1], trainer)
