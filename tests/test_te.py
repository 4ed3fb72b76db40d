"""TransformerEngine by config, against a stand-in for its package: it needs a GPU to be more than imported.

The stand-in has TE 2.20's names and signatures, and computes in plain torch. What it was given is looked at.
"""

import contextlib
import dataclasses
import importlib.machinery
import json
import sys
import types

import pytest
import torch
import yaml
from conftest import CONFIGS, recipe, record, train, weights
from test_plan import CPU, GPU, exported_by_accelerate
from timm.layers import LayerNorm, LayerNorm2d
from torch import nn

from shared import fp8, models, rules
from shared.args import Refused
from shared.plan import Plan

TE_FILES = sorted(CONFIGS.glob("*_fp8_te*.yml"))
DELAYED = "backend: TE, recipe: delayed, format: HYBRID, margin: 0, amax_history_len: 1024, amax_compute_algo: max"
A100 = GPU | {"name": "NVIDIA A100-SXM4-80GB", "capability": (8, 0)}
B200 = GPU | {"name": "NVIDIA B200", "capability": (10, 0)}
RECIPES = {  # the arguments that each of TE's recipes has
    "DelayedScaling": {"margin", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax"},
    "Float8CurrentScaling": {"fp8_format"},
    "Float8BlockScaling": {"fp8_format"},
    "MXFP8BlockScaling": {"fp8_format"},
}


def stand_in():
    """{name: module} of a `transformer_engine`; `calls` of its pytorch part is every autocast that was entered."""

    class Linear(nn.Linear):
        def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
            super().__init__(in_features, out_features, bias, device, params_dtype)

    class LayerNorm(nn.LayerNorm):
        def __init__(self, normalized_shape, eps=1e-5, params_dtype=None, device="cuda"):
            super().__init__(normalized_shape, eps, device=device, dtype=params_dtype)

    class TransformerLayer(nn.Module):
        def __init__(self, hidden_size, ffn_hidden_size, num_attention_heads, **options):
            super().__init__()
            self.given = options | {"sizes": (hidden_size, ffn_hidden_size, num_attention_heads)}

        def forward(self, hidden_states):
            return hidden_states

    @contextlib.contextmanager
    def autocast(enabled=True, calibrating=False, recipe=None, amax_reduction_group=None):
        te.calls.append((enabled, recipe))
        yield

    def recipe_class(name, known):
        def init(self, **given):
            assert given.keys() <= known, f"{name} has no {given.keys() - known}"
            self.given = given

        return type(name, (), {"__init__": init})

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common",
             "transformer_engine.common.recipe")  # fmt: skip
    package, te, common, recipes = modules = [types.ModuleType(name) for name in names]
    for module in modules:
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)  # for those who ask if it is installed
    for kind in (Linear, LayerNorm, TransformerLayer):
        kind.__module__ = f"transformer_engine.pytorch.module.{kind.__name__.lower()}"
        setattr(te, kind.__name__, kind)
    te.autocast, te.calls = autocast, []
    for name, known in RECIPES.items():
        setattr(recipes, name, recipe_class(name, known))
    recipes.Format = types.SimpleNamespace(HYBRID="the format HYBRID", E4M3="the format E4M3", E5M2="the format E5M2")
    package.pytorch, package.common, common.recipe = te, common, recipes
    return dict(zip(names, modules, strict=True))


@pytest.fixture
def te(monkeypatch):
    modules = stand_in()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules["transformer_engine.pytorch"]


def section(text):
    return yaml.safe_load("{" + text + "}")


def config(text, kind="NO", **more):
    """A config file's mapping, with this `fp8_config`."""
    processes = {"num_processes": 1 if kind == "NO" else 2}
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": False}  # fmt: skip
    made = {"distributed_type": kind, "mixed_precision": "fp8", "fp8_config": section(text)} | processes | more
    return made | ({"fsdp_config": fsdp} if kind == "FSDP" else {})


def on_a_gpu(asked):
    fields = {field.name: asked[field.name] for field in dataclasses.fields(Plan) if field.name in asked}
    return Plan(config=None, device="cuda", implementation="transformer_engine", **fields)


def problems(mapping, machine):
    return rules.problems(rules.asked(rules.exported(mapping)), machine)


def test_the_shipped_files_reach_their_recipes(te):
    kinds = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling",
             "mxfp8": "MXFP8BlockScaling"}  # fmt: skip
    seen = set()
    for path in TE_FILES:
        asked = rules.asked(exported_by_accelerate(path))
        made = fp8.te_recipe(on_a_gpu(asked))
        given = {key: value for key, value in yaml.safe_load(path.read_text())["fp8_config"].items()
                 if key not in ("backend", "recipe")}  # fmt: skip
        if "format" in given:
            given["fp8_format"] = f"the format {given.pop('format')}"
        assert type(made).__name__ == kinds[asked["level"]] and made.given == given, path.name
        seen.add(asked["level"])
    assert seen == kinds.keys()


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("format", ["HYBRID", "E4M3"])
def test_every_live_key_arrives_unchanged(te, tmp_path, algo, format):
    """By the environment that the installed launcher makes of the file. Accelerate's own path drops most_recent."""
    text = f"backend: TE, format: {format}, margin: 3, amax_history_len: 17, amax_compute_algo: {algo}"
    path = tmp_path / "single_fp8_te.yml"
    path.write_text(yaml.dump(config(text)))
    assert rules.file_problems(path)[0] == []
    asked = rules.asked(exported_by_accelerate(path))
    assert rules.problems(asked, GPU) == []
    made = fp8.te_recipe(on_a_gpu(asked))
    assert type(made).__name__ == "DelayedScaling"
    assert made.given == {"fp8_format": f"the format {format}", "margin": 3, "amax_history_len": 17,
                          "amax_compute_algo": algo}  # fmt: skip
    assert type(made.given["margin"]) is int and type(made.given["amax_history_len"]) is int


def test_conversion_goes_on_past_an_odd_shape(te):
    model = nn.Sequential(nn.Linear(60, 64), nn.LayerNorm(64), nn.Linear(64, 64, bias=False), nn.Linear(64, 32))
    before = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    same, skipped = fp8.convert(None, on_a_gpu(rules.asked(rules.exported(config(DELAYED)))), model, optimizer)
    assert same is optimizer and skipped == [("0", "60 is not a multiple of 16")]
    assert [type(layer) for layer in model] == [nn.Linear, te.LayerNorm, te.Linear, te.Linear]
    assert fp8.converted(model) == (2, 1)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(any(parameter is one for one in owned) for parameter in model.parameters())
    assert model[2].bias is None and model[1].eps == 1e-5


def test_what_transformer_engine_has_no_layer_for_stays(te):
    plain = nn.LayerNorm(16, elementwise_affine=False)
    model = nn.Sequential(plain, nn.LayerNorm((4, 16)), nn.LayerNorm(16, bias=False), nn.LayerNorm(16, eps=1e-3))
    names = list(model.state_dict())
    fp8.to_transformer_engine(model)
    assert model[0] is plain and [type(layer) for layer in model[1:3]] == [nn.LayerNorm, nn.LayerNorm]
    assert type(model[3]) is te.LayerNorm and model[3].eps == 1e-3
    assert list(model.state_dict()) == names
    timm = nn.Sequential(LayerNorm(16), LayerNorm2d(16))  # both are subclasses; the second normalizes channels
    fp8.to_transformer_engine(timm)
    assert [type(layer) for layer in timm] == [te.LayerNorm, LayerNorm2d]


def test_values_dtype_and_frozen_weights_are_kept(te):
    model = nn.Sequential(nn.Linear(16, 16)).to(torch.bfloat16)
    model[0].weight.requires_grad_(False)
    x = torch.randn(8, 16, dtype=torch.bfloat16)
    before = model(x)
    fp8.to_transformer_engine(model)
    assert type(model[0]) is te.Linear and model(x).equal(before)
    assert not model[0].weight.requires_grad and model[0].bias.requires_grad


@pytest.mark.parametrize(("config", "evaluated"), [("single_fp8_te", 6), ("zero3_fp8_te", 3)])
def test_a_whole_run_is_in_autocast_while_it_trains_only(tmp_path, config, evaluated):
    """The recipe from end to end, on the stand-in instead of this machine's emulation."""
    if config.startswith("zero"):  # where Accelerate's own path drops TE's options
        pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")

    def before(rank):
        modules = stand_in()
        sys.modules.update(modules)
        vit = recipe("vit")
        resolve = vit.resolve
        vit.resolve = lambda: dataclasses.replace(resolve(), implementation="transformer_engine", emulated=False)
        from shared.run import Run

        close, log = Run.close, Run.log

        def logged(self, row):
            modules["transformer_engine.pytorch"].calls.append("evaluated" if "accuracy" in row else "logged")
            log(self, row)

        def report(self, error=None):
            calls = modules["transformer_engine.pytorch"].calls
            text = [call if isinstance(call, str) else [call[0], type(call[1]).__name__, call[1].given["margin"]]
                    for call in calls]  # fmt: skip
            if rank == 0:
                (tmp_path / "calls.json").write_text(json.dumps(text))
            close(self, error)

        Run.close, Run.log = report, logged

    argv = ("--max_steps", 4, "--logging_steps", 1, "--eval_steps", 2, "--save_steps", 0)
    run = train(config, tmp_path / "run", *argv, before=before)
    training, evaluating = [True, "DelayedScaling", 0], [False, "DelayedScaling", 0]
    step, evaluation = [training, "logged"], [*[evaluating] * evaluated, "evaluated"]  # 359 samples by 64
    assert json.loads((tmp_path / "calls.json").read_text()) == [*step * 2, *evaluation, *step * 2, *evaluation]
    evidence = record(run)["evidence"]
    assert (evidence["linear_converted"], evidence["layernorm_converted"]) == (16, 9)
    assert evidence["optimizer_owns_all"] and evidence["eval_precision"] == "bf16"
    truth = "fp8 TransformerEngine delayed | 16 of 17 Linear in FP8, 9 LayerNorm, skipped head (10 is not a multiple"
    assert truth in (tmp_path / "run.log").read_text()
    assert weights(run).keys() == models.vit("vit_nano", 8, 1, 10).state_dict().keys()


@pytest.mark.parametrize(
    ("key", "turned", "default", "reason"),
    [
        ("interval", "2", "1", "TransformerEngine has removed it"),
        ("override_linear_precision", "[false, false, true]", "[false, false, false]", "TransformerEngine has removed"),
        ("use_autocast_during_eval", "true", "false", "evaluation is always outside FP8"),
        ("use_mxfp8_block_scaling", "true", "false", "write recipe: mxfp8 instead"),
    ],
)
def test_a_dead_knob_is_refused_where_it_is_turned(tmp_path, key, turned, default, reason):
    path = tmp_path / "single_fp8_te.yml"
    for value, expected in ((turned, [f"fp8_config {key}: {reason}"]), (default, [])):
        mapping = config(f"{DELAYED}, {key}: {value}")
        path.write_text(yaml.dump(mapping))
        for asked in (rules.asked(rules.exported(mapping)), rules.asked(exported_by_accelerate(path))):
            lines = rules.problems(asked, GPU)
            assert len(lines) == len(expected)
            assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True)), lines


def test_override_of_all_gemms_at_once_is_refused():
    """`true` alone is what a person writes; Accelerate's launcher would end in a TypeError."""
    [line] = problems(config(f"{DELAYED}, override_linear_precision: true"), GPU)
    assert line.startswith("fp8_config override_linear_precision: TransformerEngine has removed it")


INDUCTOR = {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}}
TENSORWISE = "backend: AO, recipe: tensorwise, enable_fsdp_float8_all_gather: false"
NO_TE = GPU | {"packages": ["torchao"]}


@pytest.mark.parametrize(
    ("mapping", "machine", "parts"),
    [
        (config(DELAYED.replace("HYBRID", "E5M2")), GPU, ("format E5M2 is not one of HYBRID, E4M3",)),
        (config(DELAYED.replace(": max", ": mean")), GPU, ("amax_compute_algo mean is not one of max, most_recent",)),
        (config("backend: TE, recipe: delaid"), GPU, ("recipe delaid is not one of delayed, current, block, mxfp8",)),
        (config(DELAYED, **INDUCTOR), GPU, ("te delayed does not compile", "single_fp8_compile")),
        (config("backend: TE, recipe: mxfp8"), GPU, ("mxfp8 needs compute capability 10.0", "NVIDIA H200 has 9.0")),
        (config("backend: TE, recipe: mxfp8"), CPU, ("mxfp8 needs compute capability 10.0", "rehearse on a CPU")),
        (config(DELAYED), A100, (A100["name"], "8.9", "has 8.0", "use single_bf16")),
        (config(DELAYED, "MULTI_GPU"), A100, (A100["name"], "8.9", "has 8.0", "use ddp_bf16")),
        (config(DELAYED, "FSDP"), A100, (A100["name"], "8.9", "has 8.0", "use fsdp_bf16")),
        (config(TENSORWISE), A100, (A100["name"], "8.9", "has 8.0", "use single_bf16")),
        (config(TENSORWISE.replace("false", "true"), "FSDP"), A100, (A100["name"], "8.9", "use fsdp_bf16")),
        (config(DELAYED), NO_TE, ("TransformerEngine is not installed", "./launch.sh setup --extra te")),
        (config(TENSORWISE), GPU | {"packages": []}, ("torchao is not installed", "pip install torchao")),
        (config(TENSORWISE.replace("false", "true")), GPU, ("takes FP8 layers out of the optimizer", "to false")),
        (config("backend: AO, recipe: tensorwise"), GPU, ("takes FP8 layers out of the optimizer", "to false")),
        (config("backend: AO", "MULTI_GPU"), CPU, ("takes FP8 layers out of the optimizer", "to false")),
    ],
)
def test_what_cannot_be_is_refused_with_its_fix(mapping, machine, parts):
    lines = problems(mapping, machine)
    assert len(lines) == 1 and all(part in lines[0] for part in parts), lines


@pytest.mark.parametrize(
    ("mapping", "machine"),
    [
        (config("backend: TE, recipe: mxfp8"), B200),
        (config(DELAYED), GPU | {"name": "NVIDIA L4", "capability": (8, 9)}),
        (config(DELAYED), CPU),
        (config(TENSORWISE), NO_TE),
        (config("backend: MSAMP, opt_level: O2"), A100),  # amp8's savings need no FP8 hardware
    ],
)
def test_what_can_be_is_not_refused(mapping, machine):
    assert problems(mapping, machine) == []


@pytest.mark.parametrize(
    ("text", "foreign"),
    [
        (f"{TENSORWISE}, margin: 0, amax_history_len: 1024", ("margin", "amax_history_len")),
        (f"{TENSORWISE}, opt_level: O2", ("opt_level",)),
        (f"{DELAYED}, opt_level: O2, pad_inner_dim: true", ("opt_level", "pad_inner_dim")),
        ("backend: MSAMP, opt_level: O2, format: HYBRID", ("format",)),
        ("backend: MSAMP, opt_level: O2, enable_fsdp_float8_all_gather: false", ("enable_fsdp_float8_all_gather",)),
        ("backend: MSAMP, opt_level: O2, recipe: te_delayed, margin: 1", ()),
        (DELAYED, ()),
        (TENSORWISE, ()),
    ],
)
def test_keys_of_another_backend_are_named(tmp_path, text, foreign):
    path = tmp_path / "mine.yml"
    path.write_text(yaml.dump(config(text)))
    backend = section(text)["backend"]
    expected = {f"fp8_config {key} means nothing to backend {backend}: remove it" for key in foreign}
    assert set(rules.file_problems(path)[0]) == expected


def test_whole_blocks_as_transformer_layers(te, monkeypatch):
    """Patches of one image see each other, all of them, and no other image: TE's defaults would have it otherwise."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = models.vit("vit_tiny", 32, 3, 10, te_blocks=True)
    assert len(model.blocks) == 12 and {type(block) for block in model.blocks} == {te.TransformerLayer}
    assert model._no_split_modules == ["TransformerLayer"]
    assert model.blocks[3].given == {
        "sizes": (192, 768, 3), "attn_input_format": "bshd", "self_attn_mask_type": "no_mask",
        "layernorm_epsilon": 1e-6, "hidden_dropout": 0.0, "attention_dropout": 0.0, "drop_path_rate": 0.0,
        "fuse_qkv_params": True, "qkv_weight_interleaved": False, "params_dtype": torch.float32,
        "device": torch.device("cpu"),
    }  # fmt: skip
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert type(models.vit("vit_tiny", 32, 3, 10).blocks[0]) is not te.TransformerLayer


def test_whole_blocks_need_the_package_a_gpu_and_random_weights(te, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refused, match="compute on an NVIDIA GPU, and here is none"):
        models.vit("vit_nano", 8, 1, 10, te_blocks=True)
    for name, pretrained in (("resnet18", False), ("vit_tiny", True)):
        with pytest.raises(Refused, match="start from random weights"):
            models.vit(name, 32, 3, 10, pretrained, te_blocks=True)
    for name in list(sys.modules):
        if name.split(".")[0] == "transformer_engine":
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Refused, match="./launch.sh setup --extra te") as refused:
        models.vit("vit_nano", 8, 1, 10, te_blocks=True)
    assert "\n" not in str(refused.value)
