"""Models that are loaded in 16 bit: what is trained is trained in fp32, or the launch says that it is not."""

import itertools
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import distance, record, refusal, train
from torch import nn
from torch.nn import functional as F

from faithful import Accelerator
from faithful.errors import Refused
from faithful.models import dtypes

HALF = torch.bfloat16


class Adapted(nn.Module):
    """A frozen layer with a trainable one beside it, as LoRA has it."""

    def __init__(self, size):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(size, size), nn.Linear(size, 16), nn.Linear(16, size)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)) + self.up(self.down(x.to(self.down.weight.dtype)))


class Head(nn.Linear):
    def forward(self, x):
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Whole(nn.Module):
    """Tied weights, running averages, a parameter used without a layer, a module with a forward of its own."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(32, 32), nn.BatchNorm2d(32)
        self.body, self.gain = (
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
            nn.Parameter(torch.ones(32)),
        )
        self.head, self.out = nn.Linear(32, 32, bias=False), Head(32, 16)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((32,), 0.3))

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens)[..., None, None])[..., 0, 0]
        return self.out(self.head(self.body((x * self.scale).to(x.dtype))) * self.gain)


class Mixed(nn.Module):
    """Frozen layers, adapters, a head."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(Adapted(32), nn.GELU(), Adapted(32)), Head(32, 16)
        self.register_buffer("inputs", torch.randn(32, 32))

    def forward(self, tokens):
        return self.head(self.body(self.inputs[tokens]))


def whole(model):
    return model.to(HALF)


def first_in_fp32(model):
    """An fp32 weight comes first, the others are in 16 bit."""
    model.to(HALF)
    next(iter(model.parameters())).data = next(iter(model.parameters())).data.float()
    return model


CASES = {"whole": (Whole, whole), "first": (Whole, first_in_fp32), "adapters": (Mixed, whole)}


def model_of(case, loaded):
    """loaded: in 16 bit; else with the same values, and what is trained in fp32."""
    torch.manual_seed(0)
    make, cast = CASES[case]
    model = cast(make())
    if not loaded:
        model = model if case == "adapters" else model.float()
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.data = parameter.data.float()
    return model


def learn(accelerator, model, optimizer, steps=3, write=lambda at: None):
    """write: called in each step, before it, and between its backward pass and its update."""
    for at in range(steps):
        tokens = torch.randint(32, (16,))
        write(f"before {at}")
        accelerator.backward((model(tokens).float() - F.one_hot(tokens % 16, 16)).square().mean())
        write(f"between {at}")
        optimizer.step()
        optimizer.zero_grad()


def loop(case, loaded):
    """What a rank runs."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    model = model_of(case, loaded)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(accelerator.process_index)
    learn(accelerator, model, optimizer)
    accelerator.save_model(model, f"{sys.argv[2]}/model")
    accelerator.end_training()


CONFIGS = ["single_bf16", "single_fp32", "ddp_bf16", "fsdp_bf16", "fsdp_fp32", "zero2_bf16", "zero3_bf16", "single_fp8",
           "single_fp8_msamp_o2"]  # fmt: skip


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def rows(quick, *columns):
    """`quick`, and as slow tests all other combinations of the columns."""
    return quick + [slow(*row) for row in itertools.product(*columns) if row not in quick]


@pytest.mark.parametrize(
    ("case", "config"),
    rows([("whole", "single_bf16"), ("whole", "zero2_bf16"), ("whole", "single_fp8_msamp_o2"),
          ("first", "single_fp32"), ("adapters", "ddp_bf16"), ("adapters", "fsdp_bf16")], CASES, CONFIGS),
)  # fmt: skip
def test_it_trains_as_the_same_weights_in_fp32(tmp_path, config, case):
    loaded = train(config, tmp_path / "loaded", script=partial(loop, case, True))
    wanted = train(config, tmp_path / "wanted", script=partial(loop, case, False))
    assert distance(loaded, wanted) == 0
    a, b = record(loaded), record(wanted)
    of_a, of_b = ([note for note in made["notes"] if "in the optimizer are frozen" not in note] for made in (a, b))
    assert a["evidence"]["dtypes"] == b["evidence"]["dtypes"] and not of_b
    assert a["evidence"]["initial_weights"] == b["evidence"]["initial_weights"]
    assert len(of_a) == (0 if config.startswith("zero") else 1)  # ZeRO's masters are in fp32
    assert a["seen"]["optimizer"]["class"] == "AdamW"  # the script's, under MS-AMP's levels too
    if "msamp" in config and case == "whole":
        assert a["evidence"]["dtypes"]["parameters"]["float16"] == 2 * 32 * 64  # the masters of `body`
        assert "parameters float32 and float16, " in a["evidence"]["measured"]


def resumed(loaded):
    """The optimizer has state before it is prepared, as of a checkpoint that the script loads itself."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    model = model_of("whole", True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model(torch.arange(16)).square().mean().backward()
    optimizer.step()
    if not loaded:
        model.float()
        for values in optimizer.state.values():
            values |= {key: value.float() for key, value in values.items()}
    model, optimizer = accelerator.prepare(model, optimizer)
    learn(accelerator, model, optimizer)
    accelerator.save_model(model, f"{sys.argv[2]}/model")
    accelerator.end_training()


@pytest.mark.parametrize("config", ["single_bf16", *(slow(name) for name in ("ddp_bf16", "single_fp8_msamp_o2"))])
def test_an_optimizers_state_from_before_follows(tmp_path, config):
    loaded, wanted = (train(config, tmp_path / f"{half}", script=partial(resumed, half)) for half in (True, False))
    assert distance(loaded, wanted) == 0
    states = record(loaded)["evidence"]["dtypes"]["optimizer_state"]
    assert states == record(wanted)["evidence"]["dtypes"]["optimizer_state"] and "bfloat16" not in str(states)


@pytest.mark.parametrize("config", ["fsdp_bf16", "zero2_bf16"])
def test_an_optimizers_state_that_cannot_follow_is_refused(tmp_path, config):
    train(config, tmp_path / "run", code=2, script=partial(resumed, True))
    assert (tmp_path / "run.log").read_text().count("refused: AdamW has state before it is prepared") == 1


def kept():
    accelerator = Accelerator(project_dir=sys.argv[2])
    model = model_of("whole", True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    learn(accelerator, model, optimizer)
    accelerator.end_training()


@pytest.mark.parametrize(("config", "code"), [("single_fp32", 0), ("single_bf16", 2)])
def test_the_launch_may_keep_the_dtype_where_it_says_fp32(tmp_path, config, code):
    train(config, tmp_path / "run", code=code, script=kept, env={"FAITHFUL_KEEP_DTYPE": "1"})
    log = (tmp_path / "run.log").read_text()
    assert ("parameters bfloat16, gradients bfloat16" in log) == (code == 0) and "note: " not in log
    assert log.count("refused: FAITHFUL_KEEP_DTYPE=1, and 10 trainable parameters are in bfloat16") == (code > 0)


def partly_frozen():
    """The layers have no casts of their own."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16)).to(HALF)
    model[0].requires_grad_(False)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    accelerator.backward(model(torch.randn(8, 32, dtype=HALF)).float().square().mean())
    optimizer.step()
    accelerator.end_training()


@pytest.mark.parametrize(
    ("config", "keep", "code"), [("single_bf16", "0", 0), ("single_fp32", "0", 2), ("single_fp32", "1", 0)]
)
def test_frozen_16_bit_layers_need_autocast_beside_trained_ones(tmp_path, config, keep, code):
    train(config, tmp_path / "run", code=code, script=partly_frozen, env={"FAITHFUL_KEEP_DTYPE": keep})
    log = (tmp_path / "run.log").read_text()
    assert log.count("refused: what is trained was put into fp32, and meets 16-bit tensors") == (code > 0)


def thaw(loaded):
    accelerator = Accelerator(project_dir=sys.argv[2])
    model = model_of("adapters", False)
    if not loaded:
        model.float()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(1)
    learn(accelerator, model, optimizer, 2)
    accelerator.unwrap_model(model).body[0].base.requires_grad_(True)
    learn(accelerator, model, optimizer, 2)
    accelerator.save_model(model, f"{sys.argv[2]}/model")
    accelerator.end_training()


def test_what_is_thawed_is_trained_in_fp32_from_then_on(tmp_path):
    loaded, wanted = (train("single_bf16", tmp_path / f"{half}", script=partial(thaw, half)) for half in (True, False))
    assert distance(loaded, wanted) == 0 and "trained from now on" in record(loaded)["notes"][0]


def test_what_is_thawed_where_its_dtype_is_fixed_is_refused(tmp_path):
    log = refusal("fsdp_bf16", tmp_path / "run", script=partial(thaw, True))
    assert log.count("refused: the script trains 2 parameters in bfloat16 that were frozen") == 1


def all_in(dtype, model):
    model.to(dtype)


def one_in_half(model):
    weight = list(model.parameters())[-1]
    weight.data = weight.data.half()


def casts(cast, when):
    accelerator = Accelerator(project_dir=sys.argv[2])
    model = model_of("whole", False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    learn(accelerator, model, optimizer, write=lambda at: cast(model) if at == when else None)
    accelerator.end_training()


CASTS = {"half": partial(all_in, torch.float16), "to": partial(all_in, HALF), "data": one_in_half}


@pytest.mark.parametrize(
    ("config", "cast", "when"),
    rows([("single_bf16", "data", "between 1"), ("ddp_bf16", "to", "before 1"), ("fsdp_bf16", "to", "between 1"),
          ("zero2_bf16", "data", "before 1"), ("single_fp8_msamp_o2", "half", "before 1")],
         CONFIGS, CASTS, ("before 1", "between 1")),
)  # fmt: skip
def test_a_cast_after_prepare_is_refused_in_one_line(tmp_path, config, cast, when):
    # ZeRO's weights are in bf16 already, and have fp32 masters. Between the passes torch's `to` reads `.grad`.
    done = cast == "to" and config.startswith("zero") and when == "before 1"
    train(config, tmp_path / "run", code=0 if done else 2, script=partial(casts, CASTS[cast], when))
    log = (tmp_path / "run.log").read_text()
    assert log.count("refused: ") == (not done) and "Traceback" not in log, log


def casts_what_is_frozen():
    accelerator = Accelerator(project_dir=sys.argv[2])
    model = model_of("adapters", False).float()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.unwrap_model(model).body[0].base.to(HALF)
    learn(accelerator, model, optimizer)
    accelerator.end_training()


@pytest.mark.parametrize(
    ("config", "code"), [("single_bf16", 0), ("fsdp_bf16", 2), slow("ddp_bf16", 0), slow("zero2_bf16", 0)]
)
def test_a_cast_of_frozen_weights_after_prepare(tmp_path, config, code):
    """Plain torch's effect, where each process has whole weights."""
    train(config, tmp_path / "run", code=code, script=casts_what_is_frozen)
    assert (tmp_path / "run.log").read_text().count("refused: ") == (code > 0)


def test_float64_is_refused_where_it_cannot_be():
    strategy = SimpleNamespace(plan=SimpleNamespace(device="cpu", precision="bf16"))
    with pytest.raises(Refused, match="are in float64, and bf16"):
        dtypes.train_in_fp32(strategy, [nn.Linear(2, 2, dtype=torch.float64)], True)


def test_a_model_without_an_optimizer_is_told_how_it_keeps_its_dtype():
    """A teacher, for one: what is prepared with no optimizer may get its own in a later call."""
    plan = SimpleNamespace(device="cpu", precision="bf16")
    strategy = SimpleNamespace(plan=plan, keeps_masters=False, fully_shards=False)
    for optimized in (True, False):
        model = nn.Linear(2, 2, dtype=HALF)
        said = dtypes.train_in_fp32(strategy, [model], optimized)
        assert ("keeps its dtype after requires_grad_(False)" in said) is not optimized
        assert model.weight.dtype == torch.float32
    frozen = nn.Linear(2, 2, dtype=HALF).requires_grad_(False)
    assert dtypes.train_in_fp32(strategy, [frozen], False) is None and frozen.weight.dtype == HALF
