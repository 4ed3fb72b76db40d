"""transformers' generate() of a prepared model: each process gets its own text, as long as it asks for, and trains on."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from conftest import CONFIGS, record, train

from faithful import Accelerator

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 31}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=0))


def t5():
    """Whose generate() calls the encoder outside of the model's forward pass."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 32, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=31,
                                               tie_word_embeddings=False, initializer_factor=9.0))  # fmt: skip


def generates(make):
    """What a rank runs. Writes what it generates before `prepare`, after it, and after a step."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    torch.manual_seed(0)
    model, at = make().eval(), accelerator.process_index
    words = torch.randint(2, 30, (2, 6), generator=torch.Generator().manual_seed(at))
    how = {"do_sample": False, "num_beams": 2}
    how |= dict.fromkeys(("min_new_tokens", "max_new_tokens"), 3 + 5 * at)  # process 1 goes on when process 0 is done
    found = [model.generate(words, **how).tolist()]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for _ in range(2):
        model.eval()
        found.append(accelerator.unwrap_model(model).generate(words, **how).tolist())
        model.train()
        accelerator.backward(model(input_ids=words, labels=words).loss)
        optimizer.step()
        optimizer.zero_grad()
    Path(f"{sys.argv[2]}-{at}.json").write_text(json.dumps(found))
    accelerator.end_training()


@pytest.mark.parametrize("make", [llama, t5])
@pytest.mark.parametrize("config", ["ddp_fp32", "fsdp_bf16", "zero2_bf16", "zero3_bf16"])
def test_each_process_generates_as_before_prepare(tmp_path, config, make):
    path = tmp_path / f"{config}.yml"
    path.write_text(yaml.dump(yaml.safe_load((CONFIGS / f"{config}.yml").read_text()) | {"mixed_precision": "no"}))
    run = train(path, tmp_path / "run", script=partial(generates, make))
    assert record(run)["evidence"]["measured"].startswith(config.split("_")[0])
    for at in range(2):
        before, prepared, trained = json.loads(Path(f"{run}-{at}.json").read_text())
        assert prepared == before and trained != before


def hears():
    """What a rank runs: Whisper, whose generate() gives the encoder's convolutions a spectrogram in fp32."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    accelerator = Accelerator(project_dir=sys.argv[2])
    torch.manual_seed(0)
    sizes = {f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in (("layers", 2), ("ffn_dim", 64))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "begin_suppress_tokens": None}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=64, d_model=32, max_source_positions=20, num_mel_bins=16, **sizes, **heads, **special))  # fmt: skip
    sounds, labels = torch.randn(2, 16, 40), torch.randint(3, 60, (2, 6))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        model.eval()
        found = accelerator.unwrap_model(model).generate(sounds, min_new_tokens=4, max_new_tokens=4)
        assert found.shape[0] == 2 and found.shape[1] in (4, 5)
        model.train()
        accelerator.backward(model(input_features=sounds, labels=labels).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


@pytest.mark.parametrize("config", ["ddp_bf16", "fsdp_bf16"])
def test_generation_in_16_bit_takes_inputs_in_fp32(tmp_path, config):
    train(config, tmp_path / "run", script=hears)
