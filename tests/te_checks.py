"""TransformerEngine's own Python on a pretended GPU, with kernels pretended by fake_tex.py. tests/backends/test_te.py runs this
file in a process of its own, because neither may leak into other tests:

    PYTHONPATH=tests python -m pytest -p pretend tests/te_checks.py
"""

import copy
import dataclasses
import functools
import pickle

import fake_tex
import pretend
import pytest
import torch
import torch.nn.functional as F
import yaml
from test_emulation import mx_values
from test_plan import exported_by_accelerate
from test_te import DELAYED, TE_FILES, config, on_a_gpu, settings_of
from timm.layers import LayerNorm, LayerNorm2d
from torch import nn

from faithful import Refused
from faithful.backends import emulation, transformer_engine as ours
from faithful.config import rules
from faithful.config.settings import read_env as read
from faithful.launch.machine import Machine
from faithful.models.layers import FP8Layers
from shared import vision
from tools.export import timm_name

if reason := (pretend.DRIVER if isinstance(pretend.DRIVER, str) else fake_tex.missing()):
    pytest.skip(reason, allow_module_level=True)
fake_tex.install()
pretend.wear()
import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.common import recipe as recipes  # noqa: E402
from transformer_engine.pytorch.cpp_extensions import general_gemm  # noqa: E402
from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef, cast_from_fp4x2  # noqa: E402
from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats  # noqa: E402
from transformer_engine.pytorch.quantization import FP8GlobalStateManager  # noqa: E402
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer  # noqa: E402

NAMES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling",
         "mxfp8": "MXFP8BlockScaling", "nvfp4": "NVFP4BlockScaling"}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_left():
    """TransformerEngine keeps every layer's amaxes in one place of the process."""
    FP8GlobalStateManager.reset()


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plan(text=DELAYED, **more):
    return dataclasses.replace(on_a_gpu(settings_of(config(text))), **more)


# What it is given


def test_the_shipped_files_reach_their_recipes():
    seen = set()
    for path in TE_FILES:
        asked = read(exported_by_accelerate(path))
        made = ours.recipe(on_a_gpu(asked))
        given = {
            key: value
            for key, value in yaml.safe_load(path.read_text())["fp8_config"].items()
            if key not in ("backend", "recipe", "skip")
        }
        if "format" in given:
            given["fp8_format"] = recipes.Format[given.pop("format")]
        assert type(made).__name__ == NAMES[asked.level], path.name
        known = {field.name for field in dataclasses.fields(made)}  # it takes unknown arguments and drops them
        assert given.keys() <= known and {key: getattr(made, key) for key in given} == given, path.name
        seen.add(asked.level)
    assert seen == NAMES.keys()


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("format", ["HYBRID", "E4M3"])
def test_every_live_key_arrives_unchanged(tmp_path, algo, format):
    """By the environment that the installed launcher makes of the file. Accelerate's own path drops most_recent."""
    path = tmp_path / "single_fp8_te.yml"
    text = f"backend: TE, format: {format}, margin: 3, amax_history_len: 17, amax_compute_algo: {algo}"
    path.write_text(yaml.dump(config(text)))
    made = ours.recipe(on_a_gpu(read(exported_by_accelerate(path))))
    assert type(made) is recipes.DelayedScaling
    assert (made.fp8_format, made.margin, made.amax_history_len) == (recipes.Format[format], 3, 17)
    assert made.amax_compute_algo == algo


@pytest.mark.parametrize("level", NAMES)
def test_the_rules_of_cards_are_its_own(level, monkeypatch):
    """Which card and which CUDA a recipe needs: faithful/config/rules.py's answer is TransformerEngine's."""
    from transformer_engine.pytorch import quantization

    made = ours.recipe(plan(f"backend: TE, recipe: {level}"))
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)):
        for cuda in ("12.8", "12.9", "13.2"):
            machine = Machine("cuda", 1, "a card", capability, cuda, ["transformer_engine"])
            monkeypatch.setattr(quantization, "get_device_compute_capability", lambda now=capability: now)
            monkeypatch.setattr(torch.version, "cuda", cuda)
            for name in ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_NVFP4_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT"):
                monkeypatch.setattr(quantization, name, None)
            try:
                with te.autocast(recipe=made):
                    theirs = True
            except (AssertionError, RuntimeError):
                theirs = False
            mine = rules.problems(settings_of(config(f"backend: TE, recipe: {level}")), machine) == []
            assert mine == theirs, (level, capability, cuda)


# What is converted


def converted(model, **more):
    optimizer = torch.optim.AdamW(model.parameters())
    return optimizer, ours.TransformerEngine(plan(**more)).convert(model, optimizer)


def test_conversion_goes_on_past_an_odd_shape():
    model = nn.Sequential(nn.Linear(60, 64), nn.LayerNorm(64), nn.Linear(64, 64, bias=False), nn.Linear(64, 32))
    before = dict(model.named_parameters())
    optimizer, skipped = converted(model)
    assert skipped == [("0", "60 is not a multiple of 16")]
    assert [type(layer) for layer in model] == [nn.Linear, te.LayerNorm, te.Linear, te.Linear]
    assert FP8Layers(ours.TransformerEngine.kinds, model).counted() == (2, 1)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(any(parameter is one for one in owned) for parameter in model.parameters())
    assert model[1].eps == 1e-5 and not model[2].use_bias and model[3].use_bias


@pytest.mark.parametrize("level", ["mxfp8", "nvfp4"])
def test_small_blocks_take_multiples_of_32(level):
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64), nn.Linear(64, 96))
    _, skipped = converted(model, text=f"backend: TE, recipe: {level}")
    assert skipped == [("0", "48 is not a multiple of 32"), ("1", "48 is not a multiple of 32")]
    assert type(model[2]) is te.Linear


def test_what_transformer_engine_has_no_layer_for_stays():
    plain = nn.LayerNorm(16, elementwise_affine=False)
    model = nn.Sequential(plain, nn.LayerNorm((4, 16)), nn.LayerNorm(16, bias=False), nn.LayerNorm(16, eps=1e-3))
    names = list(model.state_dict())
    ours.TransformerEngine(plan()).convert(model, None)
    assert model[0] is plain and [type(layer) for layer in model[1:3]] == [nn.LayerNorm, nn.LayerNorm]
    assert type(model[3]) is te.LayerNorm and model[3].eps == 1e-3
    assert list(model.state_dict()) == names
    timm = nn.Sequential(LayerNorm(16), LayerNorm2d(16))  # both are subclasses; the second normalizes channels
    ours.TransformerEngine(plan()).convert(timm, None)
    assert [type(layer) for layer in timm] == [te.LayerNorm, LayerNorm2d]


@pytest.mark.parametrize("bias", [True, False])
def test_values_dtype_and_frozen_weights_are_kept(bias):
    model = nn.Sequential(nn.Linear(16, 32, bias=bias), nn.LayerNorm(32)).to(torch.bfloat16)
    model[0].weight.requires_grad_(False)
    x = seeded(8, 16).to(torch.bfloat16)
    before = model(x)
    ours.TransformerEngine(plan()).convert(model, None)
    assert [type(layer) for layer in model] == [te.Linear, te.LayerNorm]
    with torch.no_grad():
        after = model.eval().to("cuda")(x.to("cuda")).cpu()
    assert (after.float() - before.float()).abs().max() <= 2**-7 * before.float().abs().max()  # a place of bf16
    assert not model[0].weight.requires_grad and model[1].weight.requires_grad
    assert [(n, p.shape) for n, p in model[0].named_parameters()] == [("weight", (32, 16)), ("bias", (32,))][: 1 + bias]


def test_a_layer_keeps_its_hooks_and_its_mode():
    model, seen = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), []
    for layer in model.eval():
        handle = layer.register_forward_hook(lambda *call: seen.append(call[0]))
    ours.TransformerEngine(plan()).convert(model, None)
    assert not model[0].training and not model[1].training
    model.to("cuda")(seeded(16, 16).to("cuda"))
    assert seen == list(model)
    handle.remove()
    model(seeded(16, 16).to("cuda"))
    assert seen == [*model, model[0]]


def test_an_expert_that_gets_no_token_trains_on():
    theirs, _ = pair(bias=True)
    out = theirs(torch.zeros(0, 64, device="cuda"))
    out.sum().backward()
    assert out.shape == (0, 48) and not theirs[0].weight.grad.any() and not theirs[0].bias.grad.any()


# What it computes


def pair(text=DELAYED, bias=False, inputs=64, outputs=48, dtype=torch.float32):
    """One Linear as TransformerEngine's, with its recipe, and the same one emulated."""
    torch.manual_seed(0)
    asked = plan(text)
    theirs, mine = nn.Sequential(nn.Linear(inputs, outputs, bias=bias, dtype=dtype)), nn.Sequential()
    mine = copy.deepcopy(theirs)
    emulation.convert(mine, asked.level, **asked.fp8_options)
    ours.TransformerEngine(asked).convert(theirs, None)
    return theirs.to("cuda"), mine


def results(model, x, grad):
    """[output, gradient of x, of each parameter], on the CPU, in fp32."""
    x = x.detach().clone().requires_grad_()
    out = model(x)
    out.backward(grad)
    found = [out, x.grad, *(p.grad for p in model.parameters())]
    for parameter in model.parameters():
        parameter.grad = None
    return [tensor.detach().cpu().float() for tensor in found]


def history(model):
    """Amaxes and scales of input, weight and gradient of the output, of TransformerEngine's one layer."""
    state = {name.split(".", 1)[1]: tensor.cpu() for name, tensor in ours.state(model).items()}
    amaxes = torch.cat([state["scaling_fwd.amax_history"][:, :2], state["scaling_bwd.amax_history"][:, :1]], 1)
    return amaxes, torch.cat([state["scaling_fwd.scale"][:2], state["scaling_bwd.scale"][:1]])


def same(theirs, mine, what, rounding=0.0, bias=0.0):
    """Products of the same FP8 values: a sum of 64 terms in fp32 is off by a rounding of each at most. Where results
    are bf16, each is `rounding` of itself off, and the output of its two parts: the emulation adds a rounded `bias` to
    a rounded product."""
    for a, b in zip(theirs, mine, strict=True):
        assert a.shape == b.shape and a.isfinite().all()
        assert ((a - b).abs() <= rounding * (b.abs() + bias) + 128 * 2**-24 * b.abs().max()).all(), what
        bias = 0.0  # the output is the first


@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_delayed_scaling_is_the_emulation_step_by_step(fp8_format, algo, dtype):
    """Amaxes and scales are equal to the last bit; so then are the FP8 operands, and the products up to their sums."""
    text = f"backend: TE, format: {fp8_format}, margin: 1, amax_history_len: 3, amax_compute_algo: {algo}"
    theirs, mine = pair(text, bias=dtype == torch.bfloat16, dtype=dtype)
    seen = []
    for step, size in enumerate([1.0, 8.0, 0.5, 0.25, 0.0, 0.125, 2.0]):
        x, grad = (seeded(16, 64, seed=step) * size).to(dtype), (seeded(16, 48, seed=10 + step) * size).to(dtype)
        bounds = (2**-6, mine[0].bias.abs().max().item()) if dtype == torch.bfloat16 else ()  # 3 roundings of 2**-8
        same(results(theirs, x.to("cuda"), grad.to("cuda")), results(mine, x, grad), step, *bounds)
        emulation.update_scales(mine)
        amaxes, scales = history(theirs)
        assert torch.equal(amaxes, mine[0].fp8_amax_history) and torch.equal(scales, mine[0].fp8_scale), step
        seen.append(scales)
        with torch.no_grad():  # as an optimizer would, the same on both
            for a, b in zip(theirs.parameters(), mine.parameters(), strict=True):
                change = seeded(*b.shape, seed=20 + step).to(dtype) * size / 8
                a.add_(change.to("cuda"))
                b.add_(change)
    assert torch.equal(seen[4][::2], seen[3][::2])  # from zeros nothing is learned
    assert len({scale[0].item() for scale in seen}) >= 3


@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
def test_current_scaling_is_the_emulation(fp8_format):
    theirs, mine = pair(f"backend: TE, recipe: current, format: {fp8_format}")
    for step in range(3):
        x, grad = seeded(16, 64, seed=step) * 10**step, seeded(16, 48, seed=10 + step) / 10**step
        same(results(theirs, x.to("cuda"), grad.to("cuda")), results(mine, x, grad), step)


@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
def test_block_scaling_is_the_emulation(fp8_format):
    """Sizes that are no multiple of a block of 128, too."""
    theirs, mine = pair(f"backend: TE, recipe: block, format: {fp8_format}", inputs=192, outputs=144)
    for step in range(3):
        x, grad = seeded(160, 192, seed=step) * 10**step, seeded(160, 144, seed=10 + step) / 10**step
        same(results(theirs, x.to("cuda"), grad.to("cuda")), results(mine, x, grad), step)


def test_mxfp8_is_the_emulation(monkeypatch):
    """A scale for 32 values of a row, and another for 32 of a column: the emulation's."""
    from transformer_engine.pytorch import quantization

    monkeypatch.setattr(quantization, "get_device_compute_capability", lambda: (10, 0))
    monkeypatch.setattr(quantization, "_MXFP8_SUPPORT", None)
    asked = plan("backend: TE, recipe: mxfp8")
    torch.manual_seed(0)
    mine = nn.Sequential(nn.Linear(64, 96, bias=False))
    theirs = copy.deepcopy(mine)
    emulation.convert(mine, "mxfp8")
    ours.TransformerEngine(asked).convert(theirs, None)
    theirs.to("cuda")
    for step in range(3):
        x, grad = seeded(40, 64, seed=step) * 10**step, seeded(40, 96, seed=10 + step) / 10**step
        same(results(theirs, x.to("cuda"), grad.to("cuda")), results(mine, x, grad), step)


def reference(parts, role=None):
    """TransformerEngine's own quantizer in Python, which rounds to nearest, for a weight or another tensor."""
    weight = role is not None and role.tensor_type == "weight"
    tile = (16, 16) if weight and parts.square else (1, 16)
    return NVFP4QuantizerRef(Fp4Formats.E2M1, quant_tile_shape=tile, with_rht=parts.hadamard and not weight)


def nvfp4_values(kind):
    x = mx_values(kind)
    if kind == "subnormal":
        return seeded(64, 128) * 2.0**-130
    return x[:, : x.shape[1] // 32 * 32] if x.shape[0] % 16 == 0 else F.pad(x, (0, 0, 0, -x.shape[0] % 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["every bf16", "every finite bf16 beside others", "one outlier", "zeros", "a million",
                                  "subnormal", "not finite", "odd sizes"])  # fmt: skip
def test_nvfp4_has_the_values_of_its_python_reference(kind, dtype):
    """The numbers times the E4M3 scales of their blocks, along rows, along columns, of 16 x 16, and after the rotation;
    and the scale of the tensor. Where an amax is infinite or NaN, both products are not finite: only that is compared."""
    x = seeded(200, 144)[:, :80] if kind == "odd sizes" else nvfp4_values(kind)
    if kind == "every bf16":
        x = x[x.isfinite().all(1)]
        x = F.pad(x, (0, 0, 0, -x.shape[0] % 16))
    x = x.to(dtype)

    def theirs(square, hadamard):
        made = NVFP4QuantizerRef(
            Fp4Formats.E2M1, quant_tile_shape=(16, 16) if square else (1, 16), with_rht=hadamard
        ).quantize(x)
        for data, scale, amax in ((made.data, made.scale, made.global_amax_row),
                                  (made.data_t, made.scale_t, made.global_amax_col)):  # fmt: skip
            codes = cast_from_fp4x2(data, torch.float32)
            yield codes * scale.float().repeat_interleave(16, 1)[: len(codes), : codes.shape[1]], amax[0]

    mine = emulation._nvfp4
    rows, columns = (x, (1, 16)), (x, (16, 1))
    found = [mine(*rows), mine(*columns), mine(x, (16, 16)), mine(x, (16, 16))]
    expected = [*theirs(False, False), *theirs(True, False)]
    if x.shape[0] % 16 == 0:
        found.append(mine(emulation._hadamard(x), (16, 1)))
        expected.append([*theirs(False, True)][1])
    for at, ((codes, scale), (values, amax)) in enumerate(zip(found, expected, strict=True)):
        if not amax.isfinite():
            assert not (codes.float() / scale).isfinite().any()
            continue
        assert torch.equal(codes.float() if at in (0, 2) else codes.float().t(), values)
        assert scale == (torch.tensor(448.0 * 6) / amax).clamp(max=torch.finfo(torch.float32).max)


@pytest.mark.parametrize("left_out", ["", "disable_rht: true", "disable_2d_quantization: true"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_nvfp4_is_the_emulation(left_out, dtype, monkeypatch):
    """TransformerEngine's Linear with its own reference of quantizer and product, which rounds to nearest: which operand
    of which product is rounded how. A number of rows that is no multiple of 32, too."""
    words = ", ".join(filter(None, ["backend: TE, recipe: nvfp4, disable_stochastic_rounding: true", left_out]))
    made = ours.recipe(plan(words))
    parts = emulation.NVFP4(hadamard=not made.disable_rht, stochastic=False, square=not made.disable_2d_quantization)
    custom = recipes.CustomRecipe(qfactory=functools.partial(reference, parts))
    monkeypatch.setattr(ours, "recipe", lambda plan: custom)
    theirs, mine = pair(words, outputs=96, dtype=dtype)
    for step in range(3):
        x, grad = (
            (seeded(40, 64, seed=step) * 10**step).to(dtype),
            (seeded(40, 96, seed=10 + step) / 10**step).to(dtype),
        )
        bound = 2**-6 if dtype == torch.bfloat16 else 0.0
        same(results(theirs, x.to("cuda"), grad.to("cuda")), results(mine, x, grad), step, bound)


def test_nvfp4_on_a_card_is_the_emulation(monkeypatch):
    """The layer that a run on a card has, with the recipe that its file makes."""
    from transformer_engine.pytorch import quantization

    monkeypatch.setattr(quantization, "get_device_compute_capability", lambda: (10, 0))
    monkeypatch.setattr(quantization, "_NVFP4_SUPPORT", None)
    words = "backend: TE, recipe: nvfp4, disable_stochastic_rounding: true"  # a kernel's random numbers are its own
    theirs, mine = pair(words, outputs=96, dtype=torch.bfloat16)
    for step in range(3):
        x, grad = seeded(40, 64, seed=step).bfloat16() * 10**step, seeded(40, 96, seed=10 + step).bfloat16()
        same(results(theirs, x.to("cuda"), grad.to("cuda")), results(mine, x, grad), step, 2**-6)


def test_what_a_key_leaves_out_is_what_its_recipe_leaves_out():
    for key in (None, "disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"):
        asked = plan("backend: TE, recipe: nvfp4" + (f", {key}: true" if key else ""))
        made, linear = ours.recipe(asked), nn.Sequential(nn.Linear(32, 32))
        emulation.convert(linear, "nvfp4", **asked.fp8_options)
        kinds = made.fp4_quant_fwd_inp, made.fp4_quant_fwd_weight, made.fp4_quant_bwd_grad
        _, hadamard, stochastic, square = dataclasses.astuple(linear[0].rounding)
        assert [kind.random_hadamard_transform for kind in kinds] == [hadamard, False, hadamard], key
        assert [kind.stochastic_rounding for kind in kinds] == [False, False, stochastic], key
        assert [kind.fp4_2d_quantization for kind in kinds] == [False, square, False], key


@pytest.mark.parametrize("rows", [1, 10, 24, 40])
def test_any_number_of_rows(rows):
    """In FP8 the layer itself takes multiples of 8, and cuBLASLt of 16 in the weight's gradient: zeros are added."""
    theirs, mine = pair()
    for step in range(3):
        x, grad = seeded(rows, 64, seed=step), seeded(rows, 48, seed=10 + step)
        same(results(theirs, x.to("cuda"), grad.to("cuda")), results(mine, x, grad), step)
        emulation.update_scales(mine)
        assert all(map(torch.equal, history(theirs), (mine[0].fp8_amax_history, mine[0].fp8_scale)))
    del theirs[0].forward
    if rows % 8:
        with pytest.raises(Refused, match="multiples of 16.*batch size"):
            theirs(seeded(rows, 64).to("cuda"))
    else:
        out = theirs(seeded(rows, 64).to("cuda"))
        with pytest.raises(RuntimeError, match="CUBLAS_STATUS_NOT_SUPPORTED"):
            out.sum().backward()


def test_what_cublaslt_refuses_is_refused():
    """By the stand-in of its products. Without these rules the tests above could not fail on a card's."""

    def fp8(dtype, rows=32, columns=32):
        quantizer = Float8CurrentScalingQuantizer(dtype, torch.device("cuda"))
        return quantizer(seeded(rows, columns).to("cuda"))

    e4m3, e5m2 = fake_tex.DType.kFloat8E4M3, fake_tex.DType.kFloat8E5M2
    for a, b, said in (
        (fp8(e5m2), fp8(e5m2), "at most one e5m2 operand"),
        (fp8(e4m3), seeded(32, 32).to("cuda"), "two FP8 operands or none"),
        (seeded(32, 32), seeded(32, 32), "device memory only"),
        (fp8(e4m3, 24), fp8(e4m3), "multiples of 16"),
        (fp8(e4m3, 32, 24), fp8(e4m3, 32, 24), "multiples of 16"),
    ):
        with pytest.raises(RuntimeError, match=said):
            general_gemm(a, b, out_dtype=torch.bfloat16)
    general_gemm(fp8(e4m3), fp8(e5m2), out_dtype=torch.bfloat16)


def test_leading_dimensions_come_back():
    theirs, _ = pair()
    assert theirs(seeded(3, 5, 64).to("cuda")).shape == (3, 5, 48)


def test_fp8_is_for_training():
    theirs, mine = pair()
    x = seeded(16, 64)
    before = {name: tensor.clone() for name, tensor in ours.state(theirs).items()}
    with torch.no_grad():
        out = theirs.eval()(x.to("cuda")).cpu()
    assert (out - F.linear(x, mine[0].weight)).abs().max() < 1e-5
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state(theirs).items())
    trained = theirs.train()(x.to("cuda")).cpu()
    assert not torch.equal(trained, out) and not FP8GlobalStateManager.is_fp8_enabled()


def test_a_model_in_eval_that_trains_does_so_in_fp8():
    x, grad = seeded(16, 64).to("cuda"), seeded(16, 48).to("cuda")
    (theirs, _), (other, _) = pair(), pair()
    assert all(map(torch.equal, results(theirs.eval(), x, grad), results(other, x, grad)))


def test_a_second_derivative_is_refused():
    theirs, _ = pair()
    x = seeded(16, 64).to("cuda").requires_grad_()
    with pytest.raises(Refused, match="has no derivative .create_graph=True, a gradient penalty"):
        torch.autograd.grad(theirs(x).sum(), x, create_graph=True)


def test_a_frozen_layer_in_eval_computes_outside_fp8():
    """In a model in train(), whose autocast is on."""
    model, x, seen = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 16)), seeded(16, 64), []
    plain = model[0](x)
    ours.TransformerEngine(plan(DELAYED)).convert(model, None)
    model[0].requires_grad_(False).eval()
    model[0].register_forward_hook(lambda *call: seen.append(call[2].detach().cpu()))
    model.to("cuda")(x.to("cuda")).sum().backward()
    assert (seen[0] - plain).abs().max() < 1e-5 and model[1].weight.grad.any()


# What it keeps


def test_the_state_is_all_that_its_own_checkpoint_holds():
    theirs, _ = pair()
    assert {tuple(tensor.shape) for tensor in ours.state(theirs).values()} == {(3,), (2,), (1024, 3), (1024, 2)}
    for step in range(2):
        results(theirs, seeded(16, 64, seed=step).to("cuda"), seeded(16, 48, seed=step).to("cuda"))
    pickled = pickle.loads(theirs[0].get_extra_state().numpy().tobytes())
    own = ours.state(theirs)
    tensors = {key: value for key, value in pickled.items() if torch.is_tensor(value)}
    assert len(tensors) == len(own) == 4
    for key, tensor in tensors.items():
        kind, way = key.rsplit("_", 1)
        assert torch.equal(tensor, own[f"0.scaling_{way}.{kind}"].cpu()), key
    with torch.no_grad():
        theirs.eval()(seeded(16, 64).to("cuda"))
    assert theirs[0].get_extra_state().numel() == 0  # its own is empty after an evaluation
    assert ours.state(theirs).keys() == own.keys()


def test_a_restored_state_goes_on_as_if_it_had_never_stopped():
    first, _ = pair()
    steps = [(seeded(16, 64, seed=i).to("cuda") * 3**i, seeded(16, 48, seed=9 + i).to("cuda") / 2**i) for i in range(5)]
    expected = [results(first, *step) for step in steps]
    FP8GlobalStateManager.reset()
    second, _ = pair()
    for step in steps[:3]:
        results(second, *step)
    saved = {name: tensor.cpu().clone() for name, tensor in ours.state(second).items()}
    FP8GlobalStateManager.reset()
    third, forgetful = pair()[0], pair()[0]
    for name, tensor in ours.state(third).items():
        tensor.copy_(saved[name])
    for number, step in enumerate(steps[3:], 3):
        found = results(third, *step)
        assert all(map(torch.equal, found, expected[number])), number
        assert not all(map(torch.equal, results(forgetful, *step), expected[number]))  # so it had to be saved


# Whole models


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks(**more):
    torch.manual_seed(0)
    model, asked = nn.Sequential(*(Block() for _ in range(3))), plan(**more)
    model._no_split_modules = ["Block"]
    ours.TransformerEngine(asked).convert(model, None)
    return model.to("cuda")


@pytest.mark.parametrize("level", ["delayed", "current", "block"])
def test_activations_computed_again_are_the_same(level):
    """As the run does it: under bf16 autocast, for some steps, so that scales have changed since the first pass."""
    kept, again, calls = blocks(text=f"backend: TE, recipe: {level}"), None, []
    again = blocks(text=f"backend: TE, recipe: {level}", ckpt=True)
    again[0].up.register_forward_hook(lambda *_: calls.append(FP8GlobalStateManager.is_fp8_enabled()))
    for step in range(4):
        x, grad = seeded(16, 64, seed=step).to("cuda") * 2**step, seeded(16, 64, seed=9 + step).to("cuda")
        found = []
        for model in (kept, again):
            with torch.autocast("cuda", torch.bfloat16):
                found.append(results(model, x, grad))
        assert all(map(torch.equal, *found)), step
        states = ours.state(kept), ours.state(again)
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][name].cpu(), states[1][name].cpu()) for name in states[0]), step
    assert calls == [True] * 8  # twice a step, in FP8 both times


def test_whole_blocks_as_transformer_layers():
    """Patches of one image see each other, all of them, and no other image: TE's defaults would have it otherwise."""
    model = vision.vit("vit_tiny", 32, 3, 10, te_blocks=True)
    assert len(model.blocks) == 12 and {type(block) for block in model.blocks} == {te.TransformerLayer}
    assert model._no_split_modules == ["TransformerLayer"]
    block = model.blocks[3]
    attention = block.self_attention
    assert attention.qkv_format == "bshd" and block.self_attn_mask_type == "no_mask"
    assert attention.layernorm_qkv.eps == block.layernorm_mlp.eps == 1e-6 and block.hidden_dropout == 0
    assert {name: tuple(p.shape) for name, p in attention.named_parameters()} == {
        "layernorm_qkv.layer_norm_weight": (192,), "layernorm_qkv.layer_norm_bias": (192,),
        "layernorm_qkv.weight": (576, 192), "layernorm_qkv.bias": (576,), "proj.weight": (192, 192), "proj.bias": (192,),
    }  # fmt: skip
    assert FP8Layers(ours.TransformerEngine.kinds, model).counted() == (4 * 12, 2 * 12)


def small_vit_of_te_blocks():
    torch.manual_seed(0)
    model = vision.vit("vit_nano", 8, 1, 10, te_blocks=True)
    nn.init.normal_(model.head.weight, std=0.1)  # timm begins with zeros, through which no gradient comes
    return model


def test_a_transformer_layer_computes_what_timms_block_does():
    """With the same weights, under the names that an export gives them: the same function, but for GELU's tanh."""
    model = small_vit_of_te_blocks()
    plain = vision.vit("vit_nano", 8, 1, 10)
    plain.load_state_dict({timm_name(name): p.detach().cpu() for name, p in model.named_parameters()})
    for block in plain.blocks:
        block.mlp.act = nn.GELU(approximate="tanh")
    ours.TransformerEngine(plan()).convert(model, None)
    x, model = seeded(16, 1, 8, 8), model.to("cuda")
    with torch.no_grad():
        expected = plain.eval()(x)
        difference = (model.eval()(x.to("cuda")).cpu() - expected).abs().max()
    assert difference < 1e-5 * expected.abs().max(), difference


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_a_transformer_layer_trains_in_fp8(recipe):
    model = small_vit_of_te_blocks()
    exact = copy.deepcopy(model).to("cuda")
    ours.TransformerEngine(plan(f"backend: TE, recipe: {recipe}")).convert(model, None)
    assert FP8Layers(ours.TransformerEngine.kinds, model).counted() == (4 * 4, 2 * 4 + 1)
    x, grad = seeded(16, 1, 8, 8).to("cuda"), seeded(16, 10, seed=1).to("cuda")
    model.to("cuda")
    for _ in range(2):  # the scales of delayed scaling begin with 1
        found = dict(zip(["out", "x", *dict(model.named_parameters())], results(model, x, grad), strict=True))
    exact = dict(zip(["out", "x", *dict(exact.named_parameters())], results(exact, x, grad), strict=True))
    for name, value in exact.items():
        apart = (found[name] - value).norm() / value.norm()
        assert apart < 0.3 and (apart > 1e-4 or "blocks" not in name), (name, apart)
    with pytest.raises(Refused, match="multiples of 16.*batch size"):
        model(seeded(3, 1, 8, 8).to("cuda"))


def test_a_transformer_layer_computes_again_what_it_did():
    kept = small_vit_of_te_blocks()
    again = copy.deepcopy(kept)
    for model, asked in ((kept, plan()), (again, plan(ckpt=True))):
        ours.TransformerEngine(asked).convert(model, None)
        model.to("cuda")
    for step in range(3):
        x, grad = seeded(16, 1, 8, 8, seed=step).to("cuda"), seeded(16, 10, seed=9 + step).to("cuda")
        assert all(map(torch.equal, results(kept, x, grad), results(again, x, grad))), step
