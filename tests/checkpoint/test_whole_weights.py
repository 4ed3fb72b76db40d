"""What a script saves with `save_pretrained`, and models whose parts FSDP2 needs to know: whole weights, tied ones."""

import json

import pytest
import torch
from conftest import Ranks, record, train
from safetensors.torch import load_file

from faithful import __main__ as door
from faithful.launch import rank_sync
from faithful.models.blocks import block_names, name_blocks

pytest.importorskip("transformers", reason="not installed: transformers")

START = """
import sys
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

folder = sys.argv[2]
accelerator = Accelerator(project_dir=folder)
set_seed(0)
size = {"vocab_size": 32, "bos_token_id": None, "pad_token_id": 0, "eos_token_id": 1}


def llama():
    return LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                        num_attention_heads=2, tie_word_embeddings=True, **size))


def step(model, optimizer, tokens):
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()


def trained(model):
    tokens = torch.randint(2, 32, (4, 8))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    step(model, optimizer, tokens)
    step(model, optimizer, tokens)
    return model, optimizer, tokens


"""
SAVED = """
model, optimizer, tokens = trained(llama())
accelerator.unwrap_model(model).save_pretrained(f"{folder}/saved")
accelerator.save_model(model, f"{folder}/weights")
step(model, optimizer, tokens)  # it is what it was before
"""


def run(folder, body, config, code=0, more=()):
    """Runs `body` as an unchanged Accelerate script, in forked ranks. Returns what it prints."""
    script = folder / "mine.py"
    script.write_text(START + body)
    log = folder / f"{config}.log"
    log.unlink(missing_ok=True)
    train(config, folder / config, *more, script=script, before=lambda rank: door.take_its_place(), code=code)
    return log.read_text()


@pytest.mark.parametrize(
    "config",
    ["fsdp_bf16", "single_fp8_msamp_o2", "fsdp_fp8_msamp_o2", "zero2_bf16", "zero3_bf16"],
)
def test_save_pretrained_writes_whole_weights(tmp_path, config):
    """Without `state_dict`, as most scripts call it: in fp32, as `save_model` writes them."""
    from transformers import LlamaForCausalLM

    run(tmp_path, SAVED, config)
    made, weights = tmp_path / config / "saved", load_file(tmp_path / config / "weights" / "model.safetensors")
    assert json.loads((made / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    saved = load_file(made / "model.safetensors")
    assert saved.keys() == weights.keys() and len(saved) > 10
    assert all(torch.equal(saved[name], weights[name]) for name in saved)
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    loaded = LlamaForCausalLM.from_pretrained(made).state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert record(tmp_path / config)["status"] == "finished"


NESTED = """
class Part(torch.nn.Module):
    _no_split_modules = ["Linear"]

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))

    def save_pretrained(self, out):
        out["part"] = {f"part.{name}": tensor.detach().clone() for name, tensor in self.state_dict().items()}


class Whole(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x):
        return self.part.layers(x)

    def save_pretrained(self, out):
        self.part.save_pretrained(out)
        out["whole"] = {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}


model = Whole()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
for again in range(2):
    accelerator.backward(model(torch.randn(4, 32)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()
    right, out = accelerator.get_state_dict(model), {}
    if again and accelerator.plan.level:  # a second training, which has begun before the first one saves
        other = Accelerator(project_dir=folder)
    accelerator.unwrap_model(model).save_pretrained(out)
    for saved in out.values():
        same = [torch.equal(saved[name], right[name]) for name in right]
        assert saved.keys() == right.keys() and all(same), same
    assert len(out) == 2 or not accelerator.is_main_process
    print("saved", len(right), flush=True)
"""


@pytest.mark.parametrize(
    "config",
    ["single_fp8_msamp_o2", "fsdp_bf16"] + [pytest.param(f"zero{n}_bf16", marks=pytest.mark.slow) for n in (2, 3)],
)
def test_a_model_whose_save_pretrained_calls_that_of_its_part(tmp_path, config):
    """As sentence-transformers' does."""
    assert run(tmp_path, NESTED, config).count("saved 4") >= 2


def test_the_main_process_alone_cannot_save_what_it_has_a_part_of(tmp_path):
    def before(rank):
        door.take_its_place()
        rank_sync.COMES = 1

    alone = """
model, optimizer, tokens = trained(llama())
main = accelerator.is_main_process
if main:  # which does not show that a save is to be followed
    accelerator.unwrap_model(model).save_pretrained(f"{folder}/saved")
step(model, optimizer, tokens)
"""
    (tmp_path / "mine.py").write_text(START + alone)
    argv, env = ["--output_dir", str(tmp_path / "run")], {"COLLECTIVE_TIMEOUT": "10"}
    ranks = Ranks("fsdp_bf16", argv, script=tmp_path / "mine.py", before=before, env=env)
    assert ranks.wait()[0] == 2, "the other sees that it is gone"
    assert "waiting for rank 1 to call get_state_dict" in ranks.text()
    assert "refused: the main process alone asks for the weights" in ranks.text()
    assert not (tmp_path / "run" / "saved").exists()


def test_the_main_process_alone_saves_weights_that_all_have_gathered(tmp_path):
    run(tmp_path, """
model, optimizer, tokens = trained(llama())
weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained(f"{folder}/saved", state_dict=weights)
accelerator.save_model(model, f"{folder}/weights")
""", "fsdp_bf16")  # fmt: skip
    saved, weights = (load_file(tmp_path / "fsdp_bf16" / name / "model.safetensors") for name in ("saved", "weights"))
    assert len(weights) > 10 and all(torch.equal(saved[name], weights[name]) for name in weights)


def test_diffusers_writes_the_models_own_class(tmp_path):
    """FSDP2 gives a sharded module a class with another name."""
    pytest.importorskip("diffusers", reason="not installed: diffusers")
    run(tmp_path, """
from diffusers import AutoencoderKL

model = AutoencoderKL(down_block_types=["DownEncoderBlock2D"], up_block_types=["UpDecoderBlock2D"], latent_channels=2,
                      block_out_channels=[8], layers_per_block=1, norm_num_groups=4)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
accelerator.backward(model(torch.randn(2, 3, 8, 8)).sample.square().mean())
optimizer.step()
model.save_pretrained(f"{folder}/saved")
""", "fsdp_bf16")  # fmt: skip
    made = tmp_path / "fsdp_bf16" / "saved"
    assert json.loads((made / "config.json").read_text())["_class_name"] == "AutoencoderKL"
    assert {weight.dtype for weight in load_file(made / "diffusion_pytorch_model.safetensors").values()} == {
        torch.float32
    }


TIED = """
model = T5ForConditionalGeneration(T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
                                            dropout_rate=0.0, decoder_start_token_id=0, **size))
assert model.shared.weight is model.lm_head.weight is model.encoder.embed_tokens.weight
model, *_ = trained(model)
accelerator.save_model(model, f"{folder}/weights")
"""


def test_a_weight_in_three_places_is_sharded_once(tmp_path):
    """T5's embedding is also its head and both embeddings of encoder and decoder. DDP is the measure."""
    weights = []
    for config in ("ddp_fp32", "fsdp_fp32"):
        run(tmp_path, TIED, config)
        weights.append(load_file(tmp_path / config / "weights" / "model.safetensors"))
    assert record(tmp_path / "fsdp_fp32")["evidence"]["sharded"] and weights[0].keys() == weights[1].keys()
    assert all(torch.allclose(weights[0][name], weights[1][name], rtol=1e-4, atol=1e-5) for name in weights[0])


def test_ddps_no_sync_is_there_under_fsdp2_too(tmp_path):
    """Scripts call it on the prepared model. It gives what two micro-batches give, each with its own reduction."""
    run(tmp_path, """
model = torch.nn.Linear(16, 16, bias=False)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
before = model.weight.full_tensor().clone()
x, each = torch.eye(16), accelerator.process_index + 1.0
with model.no_sync():
    accelerator.backward(model(each * x).sum())
    assert model.weight.grad is None
accelerator.backward(model(each * x).sum())
optimizer.step()
assert torch.allclose(before - model.weight.full_tensor(), torch.full((16, 16), 3.0))
""", "fsdp_fp32")  # fmt: skip


def test_a_block_list_that_cannot_be_set_is_none_to_fsdp2():
    """sentence-transformers' models have a property of this name, without a setter."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

    class Sentences(torch.nn.Module):
        _no_split_modules = property(lambda self: [])

    model = Sentences()
    model.layers = torch.nn.ModuleList([Layer(), Layer()])
    name_blocks(model)
    assert block_names(model) == ["Layer"]


@pytest.mark.parametrize("config", ["single_fp8_msamp_o2", "fsdp_fp8_msamp_o2"])
def test_one_optimizer_of_two_models_is_refused_under_a_level(tmp_path, config):
    log = run(tmp_path, """
models = [torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)]
optimizer = torch.optim.AdamW([parameter for model in models for parameter in model.parameters()])
accelerator.prepare(*models, optimizer)
""", config, code=2)  # fmt: skip
    assert log.count("refused: one optimizer updates two models") == 1 and "Traceback" not in log


@pytest.mark.parametrize(
    "config",
    ["fsdp_bf16", "zero2_bf16", "fsdp_fp8_msamp_o2"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("zero3_bf16", "fsdp_fp8", "ddp_fp8_msamp_o3")],
)
def test_peft_computes_its_prompts_from_whole_weights(tmp_path, config):
    """p-tuning's `save_pretrained` runs its encoder, with `state_dict` too, which only the main process has."""
    run(tmp_path, """
class Prompts(torch.nn.Module):  # what peft's have
    def __init__(self):
        super().__init__()
        self.base, self.encoder = llama(), torch.nn.Sequential(torch.nn.Embedding(16, 32), torch.nn.Linear(32, 32))
        self.base.model.embed_tokens.requires_grad_(False)

    def forward(self, input_ids, labels):
        embeddings = self.base.model.embed_tokens(input_ids) + self.encoder(torch.arange(16)).mean(0)
        return self.base(inputs_embeds=embeddings, labels=labels)

    def get_prompt_embedding_to_save(self):
        return self.encoder(torch.arange(16)).detach()

    def save_pretrained(self, folder, state_dict=None, is_main_process=True):
        prompts = self.get_prompt_embedding_to_save()
        if is_main_process:
            torch.save(prompts, f"{folder}.pt")


model, optimizer, tokens = trained(Prompts())
weights, main = accelerator.get_state_dict(model), accelerator.is_main_process
accelerator.unwrap_model(model).save_pretrained(f"{folder}/given", state_dict=weights, is_main_process=main)
accelerator.unwrap_model(model).save_pretrained(f"{folder}/found", is_main_process=main)
accelerator.save_model(model, f"{folder}/weights")
step(model, optimizer, tokens)  # it is what it was before
""", config)  # fmt: skip
    weights = load_file(tmp_path / config / "weights" / "model.safetensors")
    prompts = weights["encoder.0.weight"] @ weights["encoder.1.weight"].t() + weights["encoder.1.bias"]
    for name in ("given", "found"):
        saved = torch.load(tmp_path / config / f"{name}.pt")
        assert saved.dtype == torch.float32 and (saved - prompts).abs().max() < 1e-5


@pytest.mark.parametrize("config", ["zero2_bf16", pytest.param("zero3_bf16", marks=pytest.mark.slow)])
def test_a_shared_buffer_has_all_its_names_in_the_state_dict(tmp_path, config):
    """peft's VeRA reads its projections, which all layers share, by the name that the whole model has for them."""
    run(tmp_path, """
class Projected(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.base, self.shared = torch.nn.Linear(32, 32), llama(), torch.nn.Module()
        self.shared.register_buffer("down", torch.randn(32, 32))
        self.shared.register_buffer("derived", torch.ones(32), persistent=False)
        self.layer.shared = self.shared

    def forward(self, input_ids, labels):
        embeddings = self.layer(self.base.model.embed_tokens(input_ids)) @ self.shared.down.to(torch.bfloat16)
        return self.base(inputs_embeds=embeddings * 0.1, labels=labels)


model, *_ = trained(Projected())
weights = accelerator.get_state_dict(model)
names = ["layer.shared.down", "shared.down"] if accelerator.is_main_process else []
assert sorted(name for name in weights if "shared" in name) == names, weights.keys()
accelerator.save_model(model, f"{folder}/weights")
""", config)  # fmt: skip
    assert "layer.shared.down" in load_file(tmp_path / config / "weights" / "model.safetensors")


def test_ddps_no_sync_is_refused_where_deepspeed_has_none(tmp_path):
    log = run(tmp_path, "model, *_ = trained(llama())\nwith model.no_sync():\n    pass\n", "zero2_bf16", code=2)
    assert log.count("refused: the script calls model.no_sync") == 1 and "Traceback" not in log


def in_odd_sizes():
    """What a rank runs: each size is refused before anything is written, and one that can be read is taken."""
    import sys
    from pathlib import Path

    from faithful import Accelerator
    from faithful.errors import Refused

    folder = Path(sys.argv[2])
    accelerator = Accelerator(project_dir=folder)
    model = torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(2, 64)).sum())
    optimizer.step()
    for size in ("300B", "abc", "", "nanGB", "infGB"):
        with pytest.raises(Refused, match="save_model: max_shard_size is .* write bytes, or a number with KB"):
            accelerator.save_model(model, folder / "model", max_shard_size=size)
        assert not (folder / "model").exists()
    accelerator.save_model(model, folder / "model", max_shard_size="10KB")
    accelerator.end_training()


def test_a_shard_size_that_cannot_be_read_is_one_line(tmp_path):
    run = train("single_fp32", tmp_path / "run", script=in_odd_sizes)
    assert len([*(run / "model").glob("model-*.safetensors")]) == 2


OWN_NAMES = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, x):
        return x + self.linear(x).relu()


class Wrapped(torch.nn.Module):
    "As trl's models with a value head, which save under the names of what they wrap."

    def __init__(self):
        super().__init__()
        self.inner, self.frozen = torch.nn.Sequential(Block(), Block()), torch.nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x):
        return self.inner(self.frozen(x))

    def state_dict(self):
        own = super().state_dict()
        return {name.removeprefix("inner."): value for name, value in own.items() if "frozen" not in name}


model = Wrapped()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.inner.parameters(), 1e-2))
accelerator.backward(model(torch.randn(4, 32)).square().mean())
optimizer.step()
got = accelerator.get_state_dict(model)
accelerator.save_model(model, f"{folder}/weights")
if accelerator.is_main_process:
    print("names", sorted(got), flush=True)
accelerator.end_training()
"""


@pytest.mark.parametrize(
    "config",
    ["single_fp32", "fsdp_bf16", "zero2_bf16", *(pytest.param(c, marks=[pytest.mark.slow, pytest.mark.ci]) for c in
                                                 ("fsdp_fp8", "zero3_bf16", "fsdp_fp8_msamp_o2", "ddp_fp8_msamp_o3"))],
)  # fmt: skip
def test_a_model_is_saved_under_the_names_of_its_own_state_dict(tmp_path, config):
    log = run(tmp_path, OWN_NAMES, config)
    names = [f"{block}.linear.{kind}" for block in (0, 1) for kind in ("bias", "weight")]
    assert f"names {names}" in log
    saved = load_file(tmp_path / config / "weights" / "model.safetensors")
    assert sorted(saved) == names and all(value.isfinite().all() and value.any() for value in saved.values())
