"""amp8.initialize converts some layers and leaves others. A converted model has a report and state dicts."""

import copy

import pytest
import torch
from amp8_helpers import assert_equal, seeded, seeded_model, start, train
from torch import nn

import amp8
from amp8 import scaling
from amp8.linear import FP8Linear

LEVELS = ("O1", "O2", "O3")


def net(seed=0):
    return seeded_model(
        lambda: nn.Sequential(nn.Embedding(80, 64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64, bias=False)),
        seed=seed,
    )


def loss_of(model, step):
    return (model(torch.arange(40) + step) - 1).square().mean()


# What converts -------------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.body = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "odd": nn.Linear(32, 20)})
        self.attention = nn.MultiheadAttention(32, 2)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64)
        self.twice = self.body["a"]  # the same module: converted once
        self.tied = nn.Linear(32, 64, bias=False)
        self.tied.weight = self.embed.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.doubling = Doubling(32, 32)


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_what_is_skipped_says_why():
    model, _ = start(Everything(), skip=["body.b"])
    report = amp8.report(model)
    assert report["converted"] == ["body.a"]
    reasons = dict(report["skipped"])
    assert reasons.pop("body.b") == "asked to be skipped"
    assert reasons.pop("body.odd") == "its weight is 20 x 32: not multiples of 16"
    assert reasons.pop("tied") == "its weight is shared with embed.weight"
    assert reasons.pop("doubling") == "Doubling has a forward of its own"
    assert reasons.pop("normed") == "its weight is not an ordinary parameter"
    for name in ("attention.out_proj", "layer.self_attn.out_proj", "layer.linear1", "layer.linear2"):
        assert reasons.pop(name) == "the module around it reads its weight directly"
    assert not reasons
    assert model.twice is model.body["a"] and type(model.body["b"]) is nn.Linear


def test_large_weights_of_no_linear_layer_are_named():
    """Newer transformers keep the experts of a mixture in one parameter of three dimensions."""
    model = nn.Sequential(nn.Linear(32, 32))
    model.experts = nn.Parameter(torch.zeros(4, 32, 32))
    model, optimizer = start(model)
    assert any("on no level: experts (80%)" in note for note in amp8.report(model, optimizer)["notes"])


def test_skip_by_predicate_prefix_and_string():
    assert amp8.report(start(Everything(), skip=lambda n, m: n == "body.a")[0])["converted"] == ["body.b"]
    with pytest.raises(ValueError, match="finds no Linear to convert"):
        start(Everything(), skip="body")
    with pytest.raises(ValueError, match="skip names 'head'"):
        start(Everything(), skip=["head"])


def test_refusals():
    delayed = {"recipe": "te_delayed"}
    with torch.device("meta"):
        on_meta = net()
    for model, options, message in (
        (net(), {"level": "O4"}, "opt_level is one of O1, O2, O3, not 'O4'"),
        (net(), {"accumulate": "fp32"}, "accumulate is"),
        (net(), delayed | {"recipe_options": {"interval": 1}}, "the recipe 'te_delayed' knows .* not interval"),
        (net(), {"recipe": "te"}, "recipe is one of msamp, te_delayed, fp4, not 'te'"),
        (net(), {"recipe_options": {"margin": 1}}, "has no options"),
        (net(), delayed | {"recipe_options": {"fp8_format": "E5M2"}}, "fp8_format"),
        (nn.Sequential(nn.LayerNorm(16)), {}, "to convert in Sequential"),
        (start(net())[0], {}, "on a level already"),
        (on_meta, {}, "meta device"),
    ):
        with pytest.raises(ValueError, match=message):
            start(model, **options)
    with pytest.raises(ValueError, match="on no level"):
        amp8.report(net())


def test_objects_names_and_hooks_stay():
    model = net()
    parameters, names = list(model.parameters()), [name for name, _ in model.named_parameters()]
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append("forward"))
    model[1].register_full_backward_hook(lambda *_: calls.append("backward"))
    linear = model[1]
    same, optimizer = start(model)
    assert same is model and model[1] is linear and isinstance(linear, nn.Linear) and type(linear) is FP8Linear
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert [name for name, _ in model.named_parameters()] == names
    train(model, optimizer, loss_of, range(1), max_norm=1.0)
    assert calls == ["forward", "backward"]
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert linear.codes.dtype == torch.float16 and linear.weight.dtype == model[0].weight.dtype == torch.float32


def test_bf16_models_convert():
    model, optimizer = start(net().to(torch.bfloat16), lr=1e-3)
    losses, _ = train(model, optimizer, loss_of, range(20), max_norm=1.0)
    assert losses[-1] < 0.9 * losses[0]


def test_weights_that_are_all_zero_train():
    model = net()
    nn.init.zeros_(model[3].weight)
    model, optimizer = start(model, lr=1e-3)
    train(model, optimizer, loss_of, range(3), max_norm=1.0)
    assert model[3].true_weight().abs().mean() > 2e-3


# State dicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_state_dict_is_true_values_in_plain_fp32_and_loads_both_ways(level, tmp_path):
    from safetensors.torch import load_file, save_file

    plain = net()
    model, optimizer = start(copy.deepcopy(plain), level)
    for name, value in model.state_dict().items():
        exact = plain.state_dict()[name]
        assert value.dtype == torch.float32
        assert (value - exact).norm() <= (0.04 if level == "O3" else 3e-4) * exact.norm()
    train(model, optimizer, loss_of, range(3))
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    saved = load_file(tmp_path / "m.safetensors")
    back = net(1)
    assert back.load_state_dict(saved, strict=True)
    ids = torch.arange(40)
    with amp8.high_precision(model), torch.no_grad():
        assert torch.allclose(back(ids), model(ids), atol=1e-6)
    other, _ = start(net(2), level)
    other.load_state_dict(saved, strict=True)
    other.load_state_dict(saved, strict=True, assign=True)
    assert isinstance(other[1].weight, nn.Parameter) and other[1].weight.amp8_linear is other[1]
    assert_equal(other.state_dict(), saved)
    with torch.no_grad():
        assert torch.allclose(other(ids), model(ids), atol=1e-5)


def test_loading_what_does_not_fit_is_an_error():
    model, _ = start(net())
    saved = model.state_dict()
    saved["1.weight"] = torch.zeros(32, 64)
    with pytest.raises(RuntimeError, match="size mismatch for 1.weight"):
        model.load_state_dict(saved)
    del saved["1.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(saved)


def test_loading_weights_into_o3_sets_its_masters():
    model, optimizer = start(net(), "O3", lr=1e-3)
    values = net(5).state_dict()
    model.load_state_dict(values)
    masters = amp8.master_state_dict(model)
    assert torch.allclose(masters["1.weight"], values["1.weight"], rtol=2**-11, atol=1e-7)
    assert not torch.allclose(model.state_dict()["1.weight"], values["1.weight"], rtol=2**-11, atol=1e-7)
    before = amp8.master_state_dict(model)["1.weight"]
    train(model, optimizer, loss_of, range(1), max_norm=1.0)
    assert 1e-4 < (amp8.master_state_dict(model)["1.weight"] - before).abs().max() < 2e-3


@pytest.mark.parametrize("options", [{}, {"stochastic_rounding": False}, {"recipe": "te_delayed"}, {"recipe": "fp4"}])
@pytest.mark.parametrize("level", LEVELS)
def test_resumes_bit_for_bit(level, options, tmp_path):
    from safetensors.torch import load_file, save_file

    model, optimizer = start(net(), level, **options)
    train(model, optimizer, loss_of, range(20), max_norm=1.0)
    save_file(amp8.exact_state(model, optimizer), tmp_path / "s.safetensors")
    going_on = train(model, optimizer, loss_of, range(20, 25), max_norm=1.0)
    other, fresh = start(net(3), level, **options)
    fresh.param_groups[0]["lr"] = 1.0
    amp8.load_exact_state(other, fresh, load_file(tmp_path / "s.safetensors"))
    assert train(other, fresh, loss_of, range(20, 25), max_norm=1.0) == going_on
    assert_equal(amp8.exact_state(model, optimizer), amp8.exact_state(other, fresh))


def test_an_exact_state_of_something_else_is_refused():
    model, optimizer = start(net(), "O2")
    train(model, optimizer, loss_of, range(1))
    saved = amp8.exact_state(model, optimizer)
    with pytest.raises(ValueError, match="O2 on 1 ranks, the model is O3"):
        amp8.load_exact_state(*start(net(), "O3"), saved)
    with pytest.raises(ValueError, match="another model: 1 entries differ"):
        amp8.load_exact_state(model, optimizer, {k: v for k, v in saved.items() if k != "all/model/1.bias"})
    with pytest.raises(ValueError, match=r"1.bias is torch.float32 \[3\] in the saved state"):
        amp8.load_exact_state(model, optimizer, {**saved, "all/model/1.bias": torch.zeros(3)})


# The report, on a live model -----------------------------------------------------------------------------------------

TABLE = {  # MS-AMP's documented table
    "O1": {"weight": ["fp16"], "master": [], "exp_avg": ["fp32"], "exp_avg_sq": ["fp32"]},
    "O2": {"weight": ["fp16"], "master": [], "exp_avg": ["e4m3"], "exp_avg_sq": ["fp16"]},
    "O3": {"weight": ["e4m3"], "master": ["fp16"], "exp_avg": ["e4m3"], "exp_avg_sq": ["fp16"]},
}


@pytest.mark.parametrize("level", LEVELS)
def test_formats_and_bytes_of_a_live_vit_small(level):
    timm = pytest.importorskip("timm")
    model, optimizer = start(seeded_model(timm.create_model, "vit_small_patch16_224", depth=4), level)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(seeded(1, 3, 224, 224)).float().logsumexp(1).sum()
    loss.backward()
    optimizer.step()
    report = amp8.report(model, optimizer)
    assert len(report["converted"]) == 16
    assert dict(report["skipped"]) == {"head": "its weight is 1000 x 384: not multiples of 16"}
    dtypes = report["dtypes"]
    assert dtypes["gemm"] == ["e4m3 x e4m3", "e5m2 x e4m3"] and dtypes["weight_gradient"] == ["e4m3"]
    assert {key: dtypes[key] for key in TABLE[level]} == TABLE[level]
    limit = {"O1": 11.5, "O2": 6.5, "O3": 2.5 + 5.5}[level]
    total = report["bytes_per_parameter"]["linear"]["total"]
    assert limit - 1.5 < total <= limit
    # the same count without the report
    qkv = model.blocks[0].attn.qkv
    state = optimizer.state[qkv.weight]
    tensors = [qkv.weight, qkv.gradient.codes, qkv.master, state["exp_avg"], state["exp_avg_sq"]]
    assert sum(t.nbytes for t in tensors if t is not None) / qkv.weight.numel() == pytest.approx(total, abs=0.01)


def test_gpt2_of_transformers_trains_with_its_tied_head():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=96, n_positions=32, n_embd=64, n_layer=2, n_head=2)
    model, optimizer = start(seeded_model(transformers.GPT2LMHeadModel, config), lr=1e-3)
    report = amp8.report(model)
    assert len(report["converted"]) == 8
    assert report["skipped"] == [["lm_head", "its weight is shared with transformer.wte.weight"]]
    assert model.lm_head.weight is model.transformer.wte.weight
    ids = torch.randint(96, (4, 32), generator=torch.Generator().manual_seed(0))
    before = model.lm_head.weight.detach().clone()
    losses, _ = train(model, optimizer, lambda model, _: model(input_ids=ids, labels=ids).loss, range(30), max_norm=1.0)
    assert losses[-1] < losses[0] - 0.5
    assert (model.lm_head.weight - before).abs().max() > 1e-3 and model.lm_head.weight is model.transformer.wte.weight
    model.eval()
    with torch.no_grad():
        assert model.generate(ids[:, :4], max_new_tokens=4, do_sample=False).shape == (4, 8)


def test_scaling_state_stays_out_of_the_state_dict_and_moves_with_the_model():
    model, _ = start(net())
    assert model.state_dict().keys() == net().state_dict().keys()
    assert not dict(model[1].named_buffers()) and all(hasattr(model[1], name) for name in FP8Linear.SCALING)
    assert model[1].weight_scale == scaling.power_of_two_scale(net()[1].weight.abs().max(), torch.float16)
