"""Compiled blocks, and functions that torch compiles no more."""

import json
import subprocess
import sys

import idioms
import pytest
import torch
from conftest import ROOT, record, train
from torch import nn
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from faithful import Accelerator, patches
from faithful.models.blocks import compile_blocks, repeated


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        return self.linear(x).relu()


@pytest.fixture
def replaced(monkeypatch):
    """What a test replaces in torch ends with it."""
    monkeypatch.setattr(patches, "undos", [])
    yield
    while patches.undos:
        patches.undos.pop()()


@torch._dynamo.config.patch(recompile_limit=8)
@pytest.mark.parametrize("sizes", [(8,) * 12, (8, 8, 16, 32, 64, 128)])
def test_each_kind_of_block_stays_compiled_in_training_evaluation_and_the_last_batch(monkeypatch, replaced, sizes):
    """The stages of a ResNet, say: torch counts by class."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    torch._dynamo.reset()
    model = nn.Sequential(*map(Block, sizes))
    compile_blocks(model)
    counters.clear()
    for training, batch in ((True, 4), (False, 4), (False, 3), (True, 4)):
        model.train(training)
        with torch.set_grad_enabled(training):
            for block, size in zip(model, sizes, strict=True):
                block(torch.randn(batch, size))
    assert not counters["unimplemented"] and counters["stats"]["unique_graphs"] == 3 * len(set(sizes))


@torch._dynamo.config.patch(recompile_limit=8)
@pytest.mark.parametrize("given", [{}, {"use_cache": True}])
def test_the_blocks_of_a_decoder_share_one_compiled_graph(monkeypatch, replaced, given):
    """Each has its own place in a cache of keys and values, which transformers makes in training, too."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    torch._dynamo.reset()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 16}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=10, num_key_value_heads=2, **sizes))
    ids = torch.zeros(2, 4, dtype=torch.long)
    expected = model(ids, labels=ids).loss
    compile_blocks(model)
    counters.clear()
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            found = model(ids, labels=ids, **given)
        assert found.loss.equal(expected) and bool(given) == (found.past_key_values is not None)
    assert (counters["stats"]["unique_graphs"] == 2) == (not given), "torch compiles 8 of the 10, and no evaluation"
    assert model(ids).past_key_values is not None, "a script that generates by itself"


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x):
        x = x + self.linear(x)
        return x + self.linear(self.norm(x))


def test_compiled_blocks_compute_what_they_do_uncompiled_on_a_transposed_input(monkeypatch, replaced):
    """The first block of a ViT gets its patches so. On CPUs with AVX-512 it was NaN."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(Residual(), Residual()), torch.randn(4, 64, 64).transpose(1, 2)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(x)
        compile_blocks(model)
        torch.testing.assert_close(model(x), expected, atol=0.05, rtol=0.05)


def of_many_shapes():
    torch._dynamo.config.recompile_limit = 8  # torch's own, also if an earlier test of this process has raised it
    accelerator = Accelerator(project_dir=sys.argv[2])
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    half = torch.compile(lambda x: x / 2, backend="eager", dynamic=False)
    for batch in range(1, 13):
        accelerator.backward(model(torch.ones(batch, 4)).square().mean())
        optimizer.step()
        half(torch.ones(batch))
    accelerator.end_training()


def test_a_run_says_once_that_a_function_is_not_compiled_any_more(tmp_path):
    train("ddp_fp32", tmp_path / "run", script=of_many_shapes)
    [note] = [note for note in record(tmp_path / "run")["notes"] if "compiled" in note]
    assert note.startswith("'<lambda>' (test_compiled.py:") and "size mismatch at index 0" in note, note
    assert (
        "is not compiled any more, what is new runs as it is, slower: torch._dynamo.config.recompile_limit (8)" in note
    )
    log = (tmp_path / "run.log").read_text()
    assert log.count("not compiled any more") == 1 and "TORCH_LOGS" not in log


FOR_AN_H100 = """
import json, sys
sys.path[:0] = [f"{sys.argv[1]}/{name}" for name in ("tests", "benchmarks", ".")]
import pretend, speed, torch
torch._C._ensureCUDADeviceGuardSet()
torch.ones(1, requires_grad=True).sum().backward()
pretend.DRIVER.set_devices(100)
torch.autograd.set_multithreading_enabled(False)
from faithful import patches
from faithful.models.blocks import compare_to_find_the_least

def found(level, **more):
    speed.GARBLED.clear()
    speed.generated(level, **more)
    return len(speed.GARBLED)

wrong = {"O2": found("O2"), "O3": found("O3"), "after a ReLU": found("O2", after=torch.relu)}
compare_to_find_the_least()
wrong["after a ReLU, as configs compile"] = found("O2", after=torch.relu)
patches.release(0)
print(json.dumps(wrong | {"afterwards": found("O2", after=torch.relu)}))
"""


def test_code_for_a_gpu_has_no_nan_instruction_beside_codes_in_two_layouts():
    """ptxas 12.9 writes garbage there (triton#11111). Levels alone have none; beside those of a model, ReLU's say,
    compiled configs have none, and what torch has is found."""
    pytest.importorskip("triton")
    command = [sys.executable, "-c", FOR_AN_H100, str(ROOT)]
    wrong = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    nan = int(wrong["after a ReLU"] > 0)  # torch 2.14 and 2.15 have it
    assert wrong == {"O2": 0, "O3": 0, "after a ReLU": nan, "after a ReLU, as configs compile": 0, "afterwards": nan}


class CallsItself(Block):
    """As transformers' GradientCheckpointingLayer had it."""

    def __call__(self, x):
        return super().__call__(x)


def test_a_layer_that_runs_no_hooks_is_no_block():
    """FSDP2 gathers weights in hooks, and a `__call__` of one's own may run none."""
    of_both = nn.ModuleList(kind for _ in range(2) for kind in (idioms.Called(), CallsItself(2)))
    assert repeated(nn.ModuleDict({"layers": of_both})) == ["CallsItself"]
