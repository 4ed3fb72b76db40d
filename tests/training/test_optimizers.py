"""The recipes' optimizers: each trains, resumes to the last bit, and its state is counted."""

import functools
import sys

import of_matrices as own
import pytest
import timm.optim
import torch
from conftest import distance, launched, metrics, record, train
from torch import nn

from faithful import Accelerator
from faithful.tensors import optimizer_states as states
from shared import models, optimizers
from shared.args import Refused

STEPS = ("--max_steps", 4, "--save_steps", 2, "--eval_steps", 0, "--logging_steps", 1, "--model", "vit_nano")


class Small(nn.Module):
    _no_split_modules = ["Linear"]

    def __init__(self):
        super().__init__()
        self.embedding, self.block, self.norm = nn.Embedding(32, 16), nn.Linear(16, 16), nn.LayerNorm(16)


def optimizer(name, model):
    return optimizers.optimizer(name, models.groups(model, 1e-3, 0.1), model, torch.device("cpu"))


CASES = [
    pytest.param("single_fp32", "muon", (), 16 - 4 * 0.7, id="muon"),
    pytest.param("single_fp32", "adafactor", (), 8.2, id="adafactor"),
    pytest.param("single_fp32", "adamw_bf16", ("--dtype", "bfloat16"), 8, id="adamw_bf16"),
    pytest.param("single_fp32", "adamw_8bit", (), 10.5, id="adamw_8bit"),
    pytest.param("fsdp_fp32", "adamw_8bit", (), 11, id="adamw_8bit, fsdp"),
    pytest.param("fsdp_fp32", "muon", (), 16 - 4 * 0.7, id="muon, fsdp"),
]


def not_compiled(rank):
    torch.compile = lambda function, **options: function


def run(config, folder, *argv, **others):
    """The folder of a run. torchao would compile its step, which takes longer than all else here."""
    return train(config, folder, *STEPS, *argv, before=not_compiled, **others)


@pytest.mark.parametrize("config, name, more, largest", CASES)
def test_a_resumed_run_ends_with_the_same_weights(tmp_path, config, name, more, largest):
    """largest: bytes per parameter that a run holds at most."""
    whole = run(config, tmp_path / "whole", "--optimizer", name, *more)
    again = ("--resume_from_checkpoint", whole / "checkpoint-2")
    resumed = run(config, tmp_path / "resumed", "--optimizer", name, *more, *again)
    assert distance(whole, resumed) == 0
    assert metrics(whole)[-1] == metrics(resumed)[-1]
    held = record(whole)["evidence"]["bytes_per_parameter"]["total"]
    assert largest - 2 < held <= largest, held


@pytest.mark.slow
@pytest.mark.parametrize("name, more", [("adamw_8bit", ()), ("adamw_bf16", ("--dtype", "bfloat16"))])
def test_a_compiled_one_resumes_the_same(tmp_path, name, more):
    """As torchao has it: compiled, in a process that is not forked."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}  # which the second run reads

    def launch(folder, *argv):
        words = [str(word) for word in (*STEPS, "--optimizer", name, *more, *argv, "--output_dir", tmp_path / folder)]
        done = launched("./launch.sh", "single_fp32", "vit", *words, env=env)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return tmp_path / folder

    whole = launch("whole")
    assert distance(whole, launch("resumed", "--resume_from_checkpoint", whole / "checkpoint-2")) == 0


def test_a_low_bit_state_is_put_together_again():
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    plain = torch.zeros(3)
    for kind in (OptimState4bit, OptimState8bit, OptimStateFp8):
        state = kind.zeros((16, 32), block_size=128) if kind is OptimStateFp8 else kind.zeros((16, 32), True, 128)
        state.copy_(torch.randn(16, 32))
        parts = states.parts_of("exp_avg", state)
        assert all(type(part) is torch.Tensor for part in parts.values()) and len(parts) >= 2
        again = states.put_together(
            parts | {"exp_avg.class": states.form_of(state, plain), "step": torch.tensor(2.0)}, plain
        )
        assert again.keys() == {"exp_avg", "step"} and type(again["exp_avg"]) is kind
        assert torch.equal(again["exp_avg"].dequantize(), state.dequantize()) and again["exp_avg"].dtype == state.dtype
    assert states.parts_of("exp_avg", plain) == {"exp_avg": plain} and states.form_of(plain, plain) is None


def test_a_class_that_is_not_torchaos_is_not_made():
    text = torch.tensor(list(b'["subprocess", "Popen", [["true"]]]'), dtype=torch.uint8)
    with pytest.raises(states.Refused, match="exp_avg is a subprocess.Popen, which cannot be made here"):
        states.put_together({"exp_avg.class": text}, text)
    for damaged in (b"[1", b'["torchao.optim"]', b"7"):
        with pytest.raises(states.Refused, match="the checkpoint's optimizer state is damaged"):
            states.put_together({"exp_avg.class": torch.tensor(list(damaged), dtype=torch.uint8)}, text)


def test_low_bit_states_are_not_cut_for_another_number_of_processes(tmp_path):
    first = run("fsdp_fp32", tmp_path / "run", "--optimizer", "adamw_8bit")
    argv = ("--optimizer", "adamw_8bit", "--resume_from_checkpoint", first / "checkpoint-2")
    run("fsdp_fp32", tmp_path / "other", *argv, processes=3, code=2)
    says = "has optimizer states of 2 processes, in low bits or split otherwise than their weights, which cannot be cut anew"
    assert says in (tmp_path / "other.log").read_text()


def test_muon_is_for_the_matrices_of_blocks():
    model = Small()
    groups = optimizer("muon", model).param_groups
    by = {id(p): bool(group.get("use_fallback")) for group in groups for p in group["params"]}
    assert by == {
        id(model.embedding.weight): True,
        id(model.block.weight): False,
        id(model.block.bias): True,
        id(model.norm.weight): True,
        id(model.norm.bias): True,
    }


def test_stochastic_rounding_needs_bf16_weights():
    with pytest.raises(Refused, match="it needs --dtype bfloat16"):
        optimizer("adamw_bf16", Small())
    assert optimizer("adamw_bf16", Small().bfloat16())


def test_torchao_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(Refused, match="--optimizer adamw_8bit needs torchao"):
        optimizer("adamw_8bit", Small())


def as_torch_alone(make):
    """What a rank runs: whether FSDP2 ends where the same optimizer ends on the whole weights. All see equal data."""
    accelerator = Accelerator()
    ends = []
    for prepare in (lambda *both: both, accelerator.prepare):
        torch.manual_seed(0)
        model, data = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16)), torch.randn(8, 16)
        model, optimizer = prepare(model, make(model.parameters()))
        for _ in range(4):
            loss = (model(data) - data).square().mean()
            loss.backward() if not ends else accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(accelerator.get_state_dict(model) if ends else model.state_dict())
    if accelerator.is_main_process:
        print("apart", max((ends[0][name] - ends[1][name]).abs().max().item() for name in ends[0]) < 1e-5)
    accelerator.end_training()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (torch.optim.RMSprop, "apart True"),
        (own.Lars, "apart True"),
        (functools.partial(own.ClippedByLayer, lr=0.1), "apart True"),
        (own.OwnRate, "apart True"),
        (torch.optim.Adafactor, "refused: the script, or its optimizer, computes with sharded weights in a way that"),
        (torch.optim.Adagrad, "refused: Adagrad has state before it is prepared, which fsdp cannot shard"),
    ],
)
def test_an_optimizer_under_fsdp2_is_torchs_or_refused(tmp_path, make, says):
    refused = says.startswith("refused")
    train("fsdp_fp32", tmp_path / "run", script=functools.partial(as_torch_alone, make), code=2 if refused else 0)
    log = (tmp_path / "run.log").read_text()
    assert says in log and "Traceback" not in log


def goes_back(make, folder):
    """What a rank runs: whether an optimizer of the script's takes the same two steps again from a checkpoint."""
    accelerator, ends = Accelerator(), []
    for again in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16))
        model, optimizer = accelerator.prepare(model, make(model.parameters()))
        for step in range(2 * again, 4):
            if step == 2:
                accelerator.load_state(folder) if again else accelerator.save_state(folder)
            data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            accelerator.backward((model(data) - data).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        ends.append({name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()})
        model, optimizer = accelerator.free_memory(model, optimizer)
    if accelerator.is_main_process:
        print("apart", max((ends[0][name] - ends[1][name]).abs().max().item() for name in ends[0]))
    accelerator.end_training()


def timm_lookahead(parameters):
    return timm.optim.Lookahead(torch.optim.AdamW(parameters, lr=0.1), k=2)


@pytest.mark.parametrize(
    ("config", "make"),
    [
        ("single_fp32", timm_lookahead),
        ("fsdp_fp32", timm_lookahead),
        ("ddp_fp32", own.Slow),
        ("fsdp_fp32", own.Both),
        ("ddp_fp32", own.Counting),
        ("fsdp_fp32", own.Counting),
        ("fsdp_fp32", own.Flat),
    ],
)
def test_a_checkpoint_holds_all_that_an_optimizer_of_the_scripts_keeps(tmp_path, config, make):
    """In an optimizer inside, by a key of its own, in another form than the weights'."""
    train(config, tmp_path / "run", script=functools.partial(goes_back, make, str(tmp_path / "saved")))
    assert "apart 0.0\n" in (tmp_path / "run.log").read_text()


def loaded_before():
    """As lerobot resumes: the optimizer has its state before `prepare`. The step counter and the moments go on."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        moments = {"exp_avg": torch.full_like(parameter, 0.5), "exp_avg_sq": torch.full_like(parameter, 0.25)}
        optimizer.state[parameter] = {"step": torch.tensor(1000.0)} | moments
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.randn(8, 64)).square().mean())
    optimizer.step()
    expected = 0.9 * 0.5 / (0.25 * 0.999 / (1 - 0.999**1001)) ** 0.5  # of lr; the gradient is small beside that
    for name, weight in accelerator.get_state_dict(model).items():
        moved = (before[name] * (1 - 1e-5) - weight) / 1e-3
        assert abs(moved.mean() - expected) < 0.05, (name, moved.mean(), expected)
    accelerator.end_training()


@pytest.mark.parametrize(
    "config", ["single_fp32", "single_fp8_msamp_o2", pytest.param("ddp_fp8_msamp_o1", marks=pytest.mark.slow)]
)
def test_a_state_that_is_loaded_before_prepare_counts(tmp_path, config):
    train(config, tmp_path / "run", script=loaded_before)
