"""A backend is two classes, what it accepts and what it does, and a third for what it costs. The one here has a level, an option,
a problem and an estimate of its own, and trains under every strategy that it accepts."""

import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import CONFIGS, record, train, weights
from torch import nn

from faithful import backends, strategies
from faithful.backends.base import Backend
from faithful.backends.high_precision import Torch
from faithful.backends.linear import in_bf16, in_fp8, linears_to_convert, skipped_linears
from faithful.config import config_file, fp8, keys, rules
from faithful.config.settings import read_env, to_env
from faithful.launch.machine import Machine
from faithful.tensors.names import local
from tools import costs, estimate, tracing


class RoundedRules(fp8.BackendRules):
    """FP8 by rounding: the largest value of a weight, or of each of its rows, becomes 448 / 2**margin."""

    implementation = "rounded"
    levels = ("tensor", "row")

    def reads(self, section):
        return ["backend", "skip", "recipe", "margin"]

    def options(self, env, level, sharded):
        return {"margin": keys.whole(env, "fp8_margin", 0)}, []

    def problems(self, settings, machine):
        if settings.compile:
            yield "ROUNDED does not compile: leave dynamo_config out"


class RoundedCost(costs.BackendCost):
    def traced(self, options):
        return options

    def adjust_memory(self, memory, model, settings):
        memory.weights += model.elements  # a copy of each weight, in 1 byte


class RoundedLinear(nn.Linear):
    def forward(self, x):
        if not in_fp8(self, x):
            return super().forward(x)
        dim = {"dim": 1, "keepdim": True} if self.level == "row" else {}
        scale = 448 / 2**self.margin / torch.amax(self.weight.detach().abs(), **dim)
        rounded = (self.weight.detach() * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale.to(x.dtype)
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


class Rounded(Backend):
    kinds = {"test_new_backend.RoundedLinear": (1, 0)}
    any_number_of_processes = True

    @property
    def name(self):
        return f"rounded {self.plan.level}, margin {self.plan.fp8_options['margin']}"

    def arguments(self):
        return in_bf16()

    def convert(self, model, optimizer):
        skipped = skipped_linears(model, self.plan.skip)
        names = linears_to_convert(model, skipped)
        for name, module in model.named_modules():
            if name in names:
                module.__class__ = RoundedLinear
                module.level, module.margin = self.plan.level, self.plan.fp8_options["margin"]
        return skipped


@pytest.fixture(autouse=True)
def three_lines(monkeypatch):
    """All that the rest of the code is told."""
    monkeypatch.setitem(fp8.BACKENDS, "rounded", RoundedRules("rounded"))
    monkeypatch.setitem(backends.BACKENDS, "rounded", f"{__name__}:Rounded")
    monkeypatch.setitem(costs.BACKENDS, "rounded", RoundedCost())


def mapping(strategy="single", **section):
    config = yaml.safe_load((CONFIGS / f"{strategy}_bf16.yml").read_text())
    return config | {"mixed_precision": "fp8", "fp8_config": {"backend": "ROUNDED", "margin": 1} | section}


@pytest.mark.parametrize(("strategy", "level"), [("single", "tensor"), ("ddp", "row"), ("fsdp", "tensor")])
def test_it_trains_with_its_level_and_option(tmp_path, strategy, level):
    file = tmp_path / "rounded.yml"
    file.write_text(yaml.safe_dump(mapping(strategy, recipe=level)))
    run = train(file, tmp_path / "run", "--max_steps", 3, "--save_steps", 0)
    assert f"fp8 rounded {level}, margin 1" in record(run)["evidence"]["measured"]
    assert record(run)["evidence"]["linear_converted"] == 16 and record(run)["plan"]["implementation"] == "rounded"


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({}, None),
        ({"recipe": "column"}, "fp8_config recipe column is not one of tensor, row, the levels of rounded"),
        ({"fp8_format": "E4M3"}, "fp8_config format is not read by backend ROUNDED: remove it"),
    ],
)
def test_its_keys_and_levels_are_judged(tmp_path, section, line):
    file = tmp_path / "rounded.yml"
    file.write_text(yaml.safe_dump(mapping(**section)))
    lines, config = config_file.file_problems(file)
    lines += rules.problems(read_env(to_env(config)), Machine())
    assert lines == ([line] if line else [])


def test_its_problem_is_told():
    config = mapping() | {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}
    lines = rules.problems(read_env(to_env(config)), Machine())
    assert lines == ["ROUNDED does not compile: leave dynamo_config out"]


def test_its_name_is_a_part_of_a_config_name():
    assert config_file.grammar("fsdp_fp8_rounded_row_ckpt") == {
        "strategy": "fsdp", "precision": "fp8", "backend": "rounded", "level": "row", "compile": False,
        "offload": False, "ckpt": True, "noreshard": False,
    }  # fmt: skip


def test_its_memory_is_estimated():
    words, found = ["--max_steps", "2"], {}
    module = tracing.load(estimate.find.recipe("vit"))
    for name, config in (("rounded", mapping()), ("bf16", yaml.safe_load((CONFIGS / "single_bf16.yml").read_text()))):
        settings = read_env(to_env(config))
        pair = estimate.tracings_of(module, words, settings, {})
        found[name] = estimate.estimate(settings, *pair, cpu=True)
    parameters = found["bf16"]["weights"] / 4
    assert found["rounded"]["weights"] == found["bf16"]["weights"] + parameters


class RoundedWeights(Torch):
    """High precision whose weights are rounded to bf16 after each step."""

    @property
    def name(self):
        return f"{super().name}, weights rounded to bf16"

    def after_prepare(self, model, optimizer, prepared):
        updated = strategies.get_strategy(self.plan).torch_optimizer(optimizer)
        updated.register_step_post_hook(lambda *_: round_all(updated))
        return []


@torch.no_grad()
def round_all(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local(parameter).copy_(local(parameter).bfloat16())


def install(rank):
    backends.BACKENDS[None] = f"{__name__}:RoundedWeights"


CASES = ["ddp_bf16", "fsdp_bf16", "zero1_bf16", "zero3_bf16"]
CASES += [pytest.param(name, marks=pytest.mark.slow) for name in ("tp_bf16", "hsdp_bf16", "zero2_bf16")]


@pytest.mark.parametrize("config", CASES)
def test_a_new_backend_trains_under_every_strategy(tmp_path, config):
    recipe = {"name": "gpt"} if "tp_" in config or "_sp_" in config else {}
    run = train(config, tmp_path / "run", "--max_steps", 3, "--save_steps", 0, before=install, **recipe)
    assert "weights rounded to bf16" in record(run)["evidence"]["measured"]
    assert all(weight.equal(weight.bfloat16().float()) for weight in weights(run).values())
