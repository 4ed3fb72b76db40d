"""tools/diagnose.py: its measurements match the layers, pairs start from one state, and it names planted faults."""

import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import CONFIGS, ROOT, Ranks, launched

import amp8
from amp8 import scaling
from faithful.backends import emulation
from tools import diagnose, shadow

LEFT = ["diagnose.json", "watched.json"]
OPTIONS = ("--look", 6, "--pairs", 2, "--after", 2)  # the head begins at 0: no gradient reaches a layer at first


def run(config, folder, *words, options=OPTIONS, code=0):
    command = [sys.executable, "tools/diagnose.py", config, *options, "--output", folder, "--", *words]
    result = launched(*map(str, command))
    assert result.returncode == code, result.stdout + result.stderr
    if code:
        return result.stderr
    return json.loads((folder / "diagnose.json").read_text()), result.stdout


@pytest.fixture
def in_forks(tmp_path, monkeypatch, capsys):
    """As `run`, in forked ranks in place of `accelerate launch`."""
    printed = []

    def launch(command, **_):
        script = command.index(str(ROOT / "tools" / "watch.py"))
        argv = [*command[script + 1 :], "--output_dir", str(tmp_path / "ranks")]  # the last two are for their log alone
        before = lambda rank: sys.argv.__delitem__(slice(-2, None))  # noqa: E731
        ranks = Ranks(command[command.index("--config_file") + 1], argv, script=command[script], before=before)
        codes = ranks.wait()
        printed.append(ranks.text())
        return SimpleNamespace(returncode=max(codes))

    def run(config, *words, options=OPTIONS):
        words = (config, *options, "--output", tmp_path / "out", "--", *words)
        assert diagnose.main([str(word) for word in words]) == 0, printed
        return json.loads((tmp_path / "out" / "diagnose.json").read_text()), capsys.readouterr().out + "".join(printed)

    monkeypatch.setattr(diagnose, "subprocess", SimpleNamespace(run=launch))
    return run


def sides(layer, x):
    """Output and weight gradient of a layer, from the layer itself and from tools/shadow.py."""
    low = {
        which: shadow.rounded(layer, which, value, "fprop")[0]
        for which, value in ((0, x), (1, shadow.true_weight(layer)))
    }
    y = layer(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    g8, x8 = shadow.rounded(layer, 2, g, "wgrad")[0], shadow.rounded(layer, 0, x, "wgrad")[0]
    (y * g).sum().backward()
    return y.detach(), low[0] @ low[1].t(), g8.t() @ x8


@pytest.mark.parametrize("rule", [None, "floor"])
@pytest.mark.parametrize("recipe", emulation.RECIPES)
def test_the_shadow_rounds_as_an_emulated_layer_does(recipe, rule):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False).bfloat16().float())
    emulation.convert(model, recipe, scale_calculation_mode=rule)
    y, product, gradient = sides(model[0], torch.randn(32, 64))
    torch.testing.assert_close(product, y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, model[0].weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("recipe", emulation.RECIPES)
def test_values_that_are_clipped_are_counted(recipe, rule):
    """Only OCP's rule for MX scales clips what its own block has; delayed scaling begins with a scale of 1."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 96))
    emulation.convert(model, recipe, scale_calculation_mode=rule)
    counted, x = SimpleNamespace(now={"0": {}}), torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    shadow.Looking.tensor(counted, "0", "input", x, *shadow.rounded(model[0], 0, x, "fprop"))
    clipped, top = counted.now["0"]["input_overflows"], scaling.dtype_max(model[0].rounding.formats[0])
    if rule == "floor" and "mxfp" in recipe:
        codes = x.view(-1, 32) * 2 ** (math.log2(top) // 1 - x.view(-1, 32).abs().amax(1, keepdim=True).log2().floor())
        assert clipped == (codes.abs() > (7 if recipe == "mxfp4" else top)).sum() > 0
    else:
        assert clipped == 0


STRAIGHT_THROUGH = {"recipe": "fp4", "recipe_options": {"disable_gradient_estimator": True}}


@pytest.mark.parametrize("level, recipe", [("O1", {}), ("O2", {}), ("O3", {}), ("O2", STRAIGHT_THROUGH)])
def test_the_shadow_rounds_as_a_layer_of_a_level_does(level, recipe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False))
    model, optimizer = amp8.initialize(model, torch.optim.AdamW(model.parameters()), level, **recipe)
    kept = []
    model[0].ports[torch.float32].register_hook(lambda gradient: kept.append(gradient.clone()))
    y, product, gradient = sides(model[0], torch.randn(32, 64))
    torch.testing.assert_close(product, y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, kept[0], rtol=1e-5, atol=1e-5)


def test_a_layer_back_in_high_precision_steps_as_torch_would():
    """An O2 layer put back to high precision steps like a plain Linear with AdamW, and is an FP8 layer again later."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 48))
    model = torch.nn.Sequential(torch.nn.Linear(64, 48))
    model.load_state_dict({name: value.half().float() for name, value in plain.state_dict().items()})
    plain.load_state_dict(model.state_dict())
    options = {"lr": 1e-2, "weight_decay": 0.1}
    model, optimizer = amp8.initialize(model, torch.optim.AdamW(model.parameters(), **options), "O2")
    mine = torch.optim.AdamW(plain.parameters(), **options)
    running = type("Running", (), {"steps": type("Steps", (), {"norm": 1.0})})
    with shadow.high_precision([model[0]], optimizer) as [weight]:
        for _ in range(5):
            x = torch.randn(32, 64)
            for net in (model, plain):
                net(x).square().mean().backward()
            optimizer.step(), weight.step(running), mine.step()
            optimizer.zero_grad(), mine.zero_grad()
        torch.testing.assert_close(weight.parameter.data, plain[0].weight.data, rtol=1e-4, atol=1e-6)
    assert "forward" not in vars(model[0]) and model[0](x).dtype == torch.float32


@pytest.mark.parametrize(
    "name", ["single_fp8_te", "single_fp8_msamp_o1", "single_fp8_msamp_o3", "ddp_fp8", "ddp_fp8_msamp_o3"]
)
def test_the_same_steps_again_are_the_same(in_forks, name):
    """Repeated steps give the same loss bit for bit if nothing changed, and another loss if a layer changed."""
    made, said = in_forks(name, "vit")
    assert made["again"] == 0
    assert len(made["pairs"]) == 2 and len(made["groups"]) == (15 if name == "ddp_fp8" else 16)
    for group in (*made["groups"], "all"):  # in one pair of steps a loss may be the same by chance
        assert any(pair[group] != pair["none"] for pair in made["pairs"])
        assert all(abs(pair[group] / pair["none"] - 1) < 0.2 for pair in made["pairs"])
    for layer in made["layers"].values():
        # TransformerEngine begins with a scale of 1: the first gradients are lost
        assert -60 < layer["fprop_error_db"] < -20 and -60 < layer["wgrad_error_db"] < 0
        assert len(layer["input_amax"]) == 6 and (layer["updates_lost%"] is None) == ("msamp" not in name)
    assert "cost, % of the loss" in said


@pytest.mark.parametrize(
    ("fault", "config", "changes", "layer", "symptom"),
    [
        ("gradients", "single_fp8_te_current", {}, "stem", "output gradient underflows"),
        ("outliers", "single_fp8_te", {"amax_history_len": 1}, "middle", "input overflows"),
        ("updates", "single_fp8_msamp_o2", {}, "slow", "weight updates lost"),
    ],
)
def test_a_planted_fault_is_named_first(tmp_path, in_forks, fault, config, changes, layer, symptom):
    mapping = yaml.safe_load((CONFIGS / f"{config}.yml").read_text())
    mapping["fp8_config"] |= changes
    path = tmp_path / "mine.yml"
    path.write_text(yaml.dump(mapping))
    made, said = in_forks(path, ROOT / "tests" / "scripts" / "faults.py", fault, options=())
    assert not re.search("^(record|failed|finished): ", said, re.M), "repeated steps are no run"
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == LEFT
    assert made["costs"][0]["name"] == layer and made["costs"][0]["sure"]
    assert symptom in made["answer"][0] and made["answer"][0].startswith(f"{layer} costs ")
    assert layer in made["skip_line"] and made["skip_line"] in said


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("none", None),
        (
            "nearest",
            "The output gradient of stem, middle, late is rounded to nearest, where the recipe says stochastic",
        ),
        ("neighbours", "Values of stem, middle, late are clipped, which the scale of their own block never does"),
    ],
    ids=["none", "nearest", "neighbours"],
)
def test_what_is_not_nvfp4s_recipe_is_named_first(in_forks, fault, named):
    made, _ = in_forks("single_fp8_te_nvfp4", ROOT / "tests" / "scripts" / "faults.py", fault)
    assert made["answer"][0].startswith(named or ("No layer costs", "The same steps", "stem ", "middle ", "late "))
    for layer in made["layers"].values():
        share, clipped = layer["gradient_up_or_down%"], layer["input_overflows%"]
        assert share == 0 if fault == "nearest" else 10 < share < 40
        assert clipped > 1 if fault == "neighbours" else clipped == 0


def test_a_script_of_ones_own_that_evaluates_on_its_way(tmp_path, monkeypatch):
    """A script that evaluates between steps keeps its held-out batches; if it ends too early, the tool says so."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "mine.py"
    script.write_text((ROOT / "recipes" / "vit.py").read_text())
    made, _ = run("single_fp8_te", tmp_path / "out", script, "--max_steps", 90, "--eval_steps", 7)
    assert made["again"] == 0 and len(made["pairs"]) == 2
    said = run("single_fp8_te", tmp_path / "short", script, "--max_steps", 30, "--eval_steps", 0, code=2)
    assert "refused: the script ended after 6 steps and 0 pairs" in said and "Traceback" not in said


def test_costs_and_the_line_for_the_config():
    pairs = [
        {"none": 1.0, "again": 1.0, "a": 0.99 - i / 1000, "b": 1.0 + (-1) ** i / 100, "all": 0.98} for i in range(8)
    ]
    layer = dict.fromkeys(
        ("input_underflows%", "input_overflows%", "weight_underflows%", "weight_overflows%", "gradient_overflows%"), 0.0
    )
    layer |= {"gradient_underflows%": 97.0, "updates_lost%": None, "exp_avg_underflows%": None}
    layer |= {"exp_avg_sq_underflows%": None}
    watched = {
        "pairs": pairs,
        "groups": {"b": ["b"], "a": ["a"]},
        "skip": ["first", "last"],
        "layers": {"a": layer, "b": layer},
    }
    made = diagnose.diagnosis_of(watched, "command")
    assert [row["name"] for row in made["costs"]] == ["a", "b"] and made["skip_line"] == 'skip: "first, last, a"'
    assert made["costs"][0]["mean"] == pytest.approx(1.35) and not made["costs"][1]["sure"]
    assert made["answer"] == [made["answer"][0]] and "output gradient underflows 97%" in made["answer"][0]
    for pair in pairs:
        pair["a"] = pair["b"]
    made = diagnose.diagnosis_of(watched, "command")
    assert made["skip_line"] is None and "the smallest cost that 8 pairs can show" in made["answer"][0]


def test_many_layers_are_grouped_by_their_blocks():
    from tools.watch import groups_of

    names = [f"blocks.{i}.{part}" for i in range(12) for part in ("attn.qkv", "mlp.fc1", "mlp.fc2")] + ["head"]
    groups = groups_of(names)
    assert list(groups) == [f"blocks.{i}.*" for i in range(12)] + ["head"] and len(groups["blocks.3.*"]) == 3
    assert groups_of(names[:4]) == {name: [name] for name in names[:4]}
