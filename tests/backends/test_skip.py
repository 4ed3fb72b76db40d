"""`skip` in a config's fp8_config keeps Linear layers in high precision, with every FP8 backend."""

import pytest
import yaml
from conftest import CONFIGS, record, refusal, train
from test_plan import exported_by_accelerate
from torch import nn

from faithful import Refused
from faithful.backends.linear import refuse_unknown, skipped_by_config, skipped_linears
from faithful.config import config_file
from faithful.config.settings import read_env, to_env

STEPS = ("--max_steps", 2, "--logging_steps", 1, "--save_steps", 0)
BLOCK = [f"blocks.0.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]


def with_skip(folder, name, skip, key="skip"):
    """Writes a shipped config with a skip list to a new file."""
    config = yaml.safe_load((CONFIGS / f"{name}.yml").read_text())
    config["fp8_config"][key] = skip
    path = folder / f"{name}.yml"
    path.write_text(yaml.dump(config))
    return path


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.head = nn.Linear(16, 16), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}) for _ in "ab")


def test_a_layer_of_a_module_that_has_two_names_is_one_layer():
    """The model that an ema_pytorch EMA inside it averages, IP-Adapter's processors: replaced under both names."""
    model = nn.ModuleDict({"policy": nn.Sequential(nn.Linear(16, 16))})
    model["average"] = nn.ModuleDict({"online": model["policy"]})
    assert skipped_linears(model) == []
    model["other"] = nn.ModuleDict({"last": model["policy"][0]})  # it would keep the layer of before
    assert skipped_linears(model) == [("policy.0", "its weight is that of other.last")]


@pytest.mark.parametrize("key", ["skip", "fp8_skip"])
@pytest.mark.parametrize("name", ["single_fp8", "ddp_fp8_te", "single_fp8_msamp_o2", "fsdp_fp8", "zero2_fp8_te"])
def test_the_launcher_hands_it_on(tmp_path, name, key):
    path = with_skip(tmp_path, name, "head, blocks.0.*", key)
    ours, theirs = read_env(to_env(yaml.safe_load(path.read_text()))), read_env(exported_by_accelerate(path))
    assert ours.skip == theirs.skip == ["head", "blocks.0.*"]
    assert config_file.file_problems(path)[0] == []


def test_without_it_each_backend_has_its_own_default(tmp_path):
    for name, default in (("single_fp8", ["first", "last"]), ("single_fp8_te", []), ("single_bf16", [])):
        assert read_env(exported_by_accelerate(CONFIGS / f"{name}.yml")).skip == default
    assert read_env(exported_by_accelerate(with_skip(tmp_path, "single_fp8", ""))).skip == []


def test_names_patterns_and_words():
    model = Model()
    assert skipped_by_config(model, ["first", "last"]) == dict.fromkeys(
        ("patch", "blocks.1.down"), "first or last Linear"
    )
    for share, few in ((1, 1), (15, 1), (17, 2), (34, 3), (100, 6), (900, 6), (0, 0)):
        found = skipped_by_config(model, [f"last {share}%"])
        assert list(found) == ["patch", "head", *(f"blocks.{i}.{n}" for i in (0, 1) for n in ("up", "down"))][6 - few :]
        assert set(found.values()) <= {f"the last {share}% of the Linear layers"}
    assert skipped_by_config(model, ["last 40%", "last"])["blocks.1.down"] == "first or last Linear"
    assert skipped_by_config(model, ["blocks.?.up", "head"]).keys() == {"head", "blocks.0.up", "blocks.1.up"}
    assert skipped_by_config(model, ["blocks", "HEAD"]) == {}
    # what was asked by name comes before what could not be; the default comes after it
    assert dict(skipped_linears(model, ["head"])) == {"head": "skip"}
    assert dict(skipped_linears(model, ["first"])) == {
        "head": "10 is not a multiple of 16",
        "patch": "first or last Linear",
    }
    assert skipped_by_config(nn.ReLU(), ["first"]) == {}
    adapted = nn.ModuleDict(
        {"q": nn.ModuleDict({"base_layer": nn.Linear(16, 16), "lora_A": nn.ModuleDict({"default": nn.Linear(16, 16)})})}
    )
    assert skipped_by_config(adapted, []) == {"q.lora_A.default": "an adapter (LoRA)"}


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("blocks.0", "did you mean blocks.0.*?"),
        ("blocks.0.upp", "did you mean blocks.0.up or "),
        ("transformer.h.*", "it has patch, head, blocks.0.up, ..."),
    ],
)
def test_a_pattern_that_names_nothing_is_refused(pattern, hint):
    names = ["patch", "head", "blocks.0.up", "blocks.0.down", "blocks.1.up"]
    refuse_unknown(["first", "last 15%", "head", "blocks.*.down"], names)
    with pytest.raises(Refused) as refused:
        refuse_unknown(["head", pattern, "another_one"], names)
    first, second = str(refused.value).splitlines()
    assert first.startswith(f"fp8_config skip {pattern}: no Linear layer") and hint in first and "another_one" in second


@pytest.mark.parametrize("name", ["single_fp8", "ddp_fp8_te", "single_fp8_msamp_o1", "ddp_fp8_msamp_o3", "fsdp_fp8"])
def test_a_run_leaves_them_out_and_says_so(tmp_path, name):
    run = train(with_skip(tmp_path, name, "head, blocks.0.*"), tmp_path / "run", *STEPS)
    made = record(run)
    evidence = made["evidence"]
    assert made["plan"]["skip"] == ["head", "blocks.0.*"]
    assert (evidence["linear_converted"], evidence["linear_total"]) == (12, 17)
    assert {entry["name"]: entry["reason"] for entry in evidence["linear_skipped"]} == dict.fromkeys(
        ["head", *BLOCK], "skip"
    )
    log = (tmp_path / "run.log").read_text()
    assert (
        "12 of 17 Linear in FP8, skipped blocks.0.attn.qkv, blocks.0.attn.proj, blocks.0.mlp.fc1 and 2 more (skip)"
        in log
    )
    if "msamp" in name:  # what is left out is at no level: fp32, whole
        kept = [count for dtype, count in evidence["dtypes"]["parameters"].items() if dtype == "float32"]
        assert sum(kept) > 4 * 64 * 64


def test_an_empty_one_puts_torchao_s_first_layer_in_fp8_too(tmp_path):
    made = record(train(with_skip(tmp_path, "single_fp8", ""), tmp_path / "run", *STEPS))["evidence"]
    assert made["linear_converted"] == 16 and [entry["name"] for entry in made["linear_skipped"]] == ["head"]


def test_a_misspelt_one_is_refused_before_the_first_step(tmp_path):
    path = with_skip(tmp_path, "ddp_fp8_te", "blocks.0, blocks.9.*")
    log = refusal(path, tmp_path / "run", *STEPS)
    assert log.count("refused: ") == 2 and not (tmp_path / "run" / "run.json").exists()
    assert "fp8_config skip blocks.0: no Linear layer of the model is called so: did you mean blocks.0.*?" in log
    assert "fp8_config skip blocks.9.*: no Linear layer" in log


def test_a_pattern_may_be_of_another_model_of_the_script(tmp_path):
    """A pattern may match any of the script's models, which are prepared one by one."""
    script = tmp_path / "two.py"
    script.write_text(
        "import torch\n"
        "from faithful import Accelerator\n"
        "accelerator = Accelerator()\n"
        "models = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)) for _ in 'ab']\n"
        "models.append(torch.nn.ModuleDict({'own': models.pop(), 'more': torch.nn.Linear(16, 16)}))\n"
        "for model in models:\n"
        "    optimizer = torch.optim.AdamW(model.parameters())\n"
        "    model, optimizer = accelerator.prepare(model, optimizer)\n"
        "accelerator.validate_prepared()\n"
    )
    path = with_skip(tmp_path, "single_fp8_te", "0, own.1")
    train(path, tmp_path / "run", script=script)
    path = with_skip(tmp_path, "single_fp8_te", "0, own.2")
    assert "skip own.2" in refusal(path, tmp_path / "again", script=script)
