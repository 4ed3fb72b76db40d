"""What scripts do to a model that FSDP2 shards, beside the rows of tests/scripts/habits.py."""

import functools
import itertools
import sys

import pytest
import torch
from amp8_helpers import run_ranks
from conftest import train
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from faithful import Accelerator, Refused
from faithful.checkpoint import checkpoints
from faithful.models import shards
from faithful.tensors.names import local

STEPS, ROWS, WIDTH = 4, 8, 16  # ROWS: of all processes together


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.fc(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)  # its rows are not shared evenly
        self.scale = nn.Parameter(torch.tensor(0.5))  # as CLIP's logit_scale

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale.exp()


def built():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)


def loss_of(model, rows):
    return (model(rows[:, :WIDTH]).float() - rows[:, WIDTH:]).square().mean()


def apart(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in b)


def clamps_its_scale():
    """What a rank runs, as CLIP does: the parameter has no dimensions."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    model, optimizer = accelerator.prepare(*built())
    scale = accelerator.unwrap_model(model).scale
    for _ in range(2):
        step(accelerator, model, optimizer, torch.randn(ROWS, WIDTH + 5))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert not 0.1 <= scale.item() <= 0.11
        with torch.no_grad():
            scale.clamp_(0.1, 0.11)
        assert 0.1 <= scale.item() <= 0.11
    saved = accelerator.get_state_dict(model)
    assert not accelerator.is_main_process or saved["scale"].item() == scale.item()
    accelerator.end_training()


@pytest.mark.parametrize("config", ["ddp_fp32", "fsdp_fp32", "fsdp_bf16"])
def test_a_parameter_without_dimensions_is_clamped(tmp_path, config):
    train(config, tmp_path / "run", script=clamps_its_scale)


def compiled(ways):
    """What a rank runs: models that the script compiles itself."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    for way in ways:
        model, optimizer = built()
        names = set(model.state_dict())
        if way == "before":
            model = torch.compile(model, backend="eager")
        if way == "a layer":
            model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        model, optimizer = accelerator.prepare(model, optimizer)
        if way == "after":
            model = torch.compile(model, backend="eager")
        if way == "in place":
            model.compile(backend="eager")
        accelerator.backward(loss_of(model, torch.randn(4, WIDTH + 5)))
        optimizer.step()
        optimizer.zero_grad()
        weights = accelerator.get_state_dict(model)
        assert not accelerator.is_main_process or weights.keys() == names
        accelerator.save_model(model, f"{accelerator.project_dir}/{way}")
        accelerator.save_state(f"{accelerator.project_dir}/checkpoint-{way}")
        before = local(next(model.parameters())).clone()
        with torch.no_grad():
            next(model.parameters()).mul_(0)
        accelerator.load_state(f"{accelerator.project_dir}/checkpoint-{way}")
        assert torch.equal(local(next(model.parameters())), before)
        accelerator.free_memory()
    accelerator.end_training()


@pytest.mark.parametrize("config", ["single_fp32", "ddp_fp32", "fsdp_bf16"])
def test_a_compiled_model_is_saved_with_its_own_names(tmp_path, config):
    ways = ["before", "after", "in place", "a layer"]
    run = train(config, tmp_path / "run", script=functools.partial(compiled, ways))
    for way in ways:
        assert load_file(run / way / "model.safetensors").keys() == Net().state_dict().keys()
        assert not any("_orig_mod" in name for name in checkpoints.tensors_of(run / f"checkpoint-{way}", 0))


def step(accelerator, model, optimizer, rows):
    for _ in range(3):
        accelerator.backward(loss_of(model, rows))
        optimizer.step()
        optimizer.zero_grad()


def evaluates_first():
    """What a rank runs: an evaluation, a step, a checkpoint, which it loads again."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    model, _ = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = torch.randn(8, WIDTH + 5)
    with torch.inference_mode():
        first = loss_of(model, rows).item()
    step(accelerator, model, optimizer, rows)
    with torch.inference_mode():
        last = loss_of(model, rows).item()
    assert last < 0.9 * first
    accelerator.save_state(f"{accelerator.project_dir}/checkpoint-3")
    step(accelerator, model, optimizer, rows)
    accelerator.load_state(f"{accelerator.project_dir}/checkpoint-3")
    with torch.inference_mode():
        assert loss_of(model, rows).item() == last
    accelerator.save_model(model, f"{accelerator.project_dir}/model")
    accelerator.end_training()


@pytest.mark.parametrize("config", ["ddp_bf16", "fsdp_bf16", "fsdp_bf16_offload", "fsdp_fp8_msamp_o2", "hsdp_bf16"])
def test_the_first_pass_may_be_an_evaluation_in_inference_mode(tmp_path, config):
    run = train(config, tmp_path / "run", script=evaluates_first)
    saved = load_file(run / "model" / "model.safetensors")
    assert {name: value.shape for name, value in saved.items()} == {n: v.shape for n, v in Net().state_dict().items()}


def hooked():
    """What a rank runs: hooks that set the gradients of two layers to zero."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    model, _ = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    model.blocks[0].fc.weight.register_hook(torch.zeros_like)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.unwrap_model(model).blocks[1].fc.weight.register_hook(torch.zeros_like)
    names = [f"blocks.{at}.fc.weight" for at in range(3)]
    before = accelerator.get_state_dict(model)
    step(accelerator, model, optimizer, torch.randn(8, WIDTH + 5))
    after = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert [torch.equal(before[name], after[name]) for name in names] == [True, True, False]
    accelerator.end_training()


@pytest.mark.parametrize("config", ["ddp_fp8_msamp_o2", "fsdp_fp8_msamp_o2", "fsdp_bf16_noreshard"])
def test_hooks_of_weights_are_called_for_other_gradients_too(tmp_path, config):
    train(config, tmp_path / "run", script=hooked)


def split():
    """What a rank runs under tensor parallel."""
    from transformers import LlamaConfig, LlamaForCausalLM

    accelerator = Accelerator(project_dir=sys.argv[2])
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=4, tie_word_embeddings=False, **sizes))
    weights = [layer.mlp.up_proj.weight for layer in model.model.layers]
    names = [name for name, parameter in model.named_parameters() if any(parameter is weight for weight in weights)]
    model.model.layers[0].mlp.up_proj.weight.register_hook(torch.zeros_like)
    model.model.layers[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    layers = accelerator.unwrap_model(model).model.layers
    layers[2].mlp.up_proj.weight.register_hook(torch.zeros_like)
    whole = [accelerator.get_state_dict(model)]
    for step in range(3):
        tokens = torch.arange(32).view(2, 16)
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        if step == 1:
            layers[3].mlp.up_proj.weight.grad.mul_(0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            layers[1].requires_grad_(True)
        if step == 2:
            layers[0].mlp.up_proj.weight.data = layers[0].mlp.up_proj.weight.data * 0
        whole.append(accelerator.get_state_dict(model))
    if accelerator.is_main_process:
        moved = [
            [(after[name] - before[name]).abs().amax(1) > 0 for before, after in itertools.pairwise(whole)]
            for name in names
        ]
        assert [[bool(rows.any()) for rows in steps] for steps in moved[:3]] == [
            [False, False, True],
            [False, False, True],
            [False, False, False],
        ]
        assert not whole[-1][names[0]].any()
        assert moved[3][0].all() and not moved[3][1].any() and moved[3][2].all()
    accelerator.end_training()


def test_under_tensor_parallel(tmp_path):
    train("tp_bf16", tmp_path / "run", script=split)


def against_each_other(accelerator=None):
    """A generator and a discriminator, which is frozen while the generator trains. Returns the weights of both."""
    torch.manual_seed(0)
    models = [Net(), Net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    share, backward = slice(None), torch.Tensor.backward
    if accelerator:
        *models, optimizers[0], optimizers[1] = accelerator.prepare(*models, *optimizers)
        share, backward = slice(accelerator.process_index, None, accelerator.num_processes), accelerator.backward
    (generator, discriminator), noise = models, torch.randn(STEPS, ROWS, WIDTH)
    for rows in noise:
        rows = rows[share]
        made = generator(rows) @ torch.ones(5, WIDTH)
        discriminator.requires_grad_(True)
        backward((discriminator(made.detach()) - 1).square().mean() + discriminator(rows).square().mean())
        optimizers[1].step()
        optimizers[1].zero_grad()
        discriminator.requires_grad_(False)
        backward(discriminator(made).square().mean())
        optimizers[0].step()
        optimizers[0].zero_grad()
    get = accelerator.get_state_dict if accelerator else nn.Module.state_dict
    return [{name: value.clone() for name, value in get(model).items()} for model in models]


def game():
    """What a rank runs."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    found = against_each_other(accelerator)
    if accelerator.is_main_process:
        assert max(map(apart, found, against_each_other())) < 1e-5
    accelerator.end_training()


@pytest.mark.parametrize("config", ["ddp_fp32", "fsdp_fp32"])
def test_a_discriminator_is_frozen_and_thawed_in_each_step(tmp_path, config):
    train(config, tmp_path / "run", script=game)


WRITTEN = {  # what scripts write to a part of a gradient of 16 rows, or by a whole tensor: what the line says
    "rows": (lambda gradient: gradient.__setitem__(slice(7), 0), "a part of a sharded tensor by an index"),
    "a row": (lambda gradient: gradient[2].mul_(3), "a part of a sharded tensor by mul_"),
    "rows by a mask": (lambda gradient: gradient.__setitem__(torch.arange(WIDTH) > 1, 0), "by an index"),
    "a mask": (
        lambda gradient: gradient.mul_((torch.arange(WIDTH) > 1)[:, None]),
        "sharded weights and whole tensors together",
    ),
}


def writes_a_part(name):
    """What a rank runs."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    model, optimizer = accelerator.prepare(*built())
    accelerator.backward(loss_of(model, torch.randn(ROWS, WIDTH + 5)))
    WRITTEN[name][0](accelerator.unwrap_model(model).blocks[0].fc.weight.grad)
    accelerator.end_training()


@pytest.mark.parametrize("name", WRITTEN)
def test_a_part_of_a_sharded_gradient_is_refused_in_one_line(tmp_path, name):
    train("fsdp_fp32", tmp_path / "run", script=functools.partial(writes_a_part, name), code=2)
    log = (tmp_path / "run.log").read_text()
    assert log.count("refused: ") == 1 and WRITTEN[name][1] in log and "Traceback" not in log, log[-2000:]
    assert name != "a mask" or "(at test_live_fsdp.py:" in log  # it is torch's error: the script's line is named


PARTS = {  # what scripts do to a part of a weight or gradient; 8 rows of 4
    "index": lambda x: x[:4].zero_(),
    "index of an index": lambda x: x[:4][0].zero_(),
    "columns": lambda x: x[:, 1].zero_(),
    "narrow": lambda x: x.narrow(0, 0, 4).zero_(),
    "chunk": lambda x: [part.mul_(i) for i, part in enumerate(x.chunk(2))],
    "split": lambda x: x.split(3)[1].zero_(),
    "select": lambda x: x.select(0, 1).fill_(2),
    "view": lambda x: x.view(-1)[:8].zero_(),
    "index of a view": lambda x: x.view(-1).__setitem__(slice(0, 4), 7.0),
    "reshape": lambda x: x.reshape(-1)[3:9].zero_(),
    "transposed": lambda x: x.T[:2].zero_(),
    "diagonal": lambda x: x.diagonal().zero_(),
    "mask": lambda x: x.__setitem__(x > 3, 0),
    "nn.init of a part": lambda x: nn.init.constant_(x.narrow(0, 0, 4), 3.0),
}


def parts_of_shards(rank, world):
    shards.take_writes()
    mesh, wrong = init_device_mesh("cpu", (world,)), []
    for (name, change), dim in itertools.product(PARTS.items(), (0, 1)):
        plain = torch.arange(32.0).view(8, 4)
        sharded = distribute_tensor(plain.clone(), mesh, [Shard(dim)])
        change(plain)
        try:
            change(sharded)
            wrong += [] if torch.equal(sharded.full_tensor(), plain) else [(name, dim)]
        except Refused as error:
            assert "use a ddp config" in str(error)
            assert torch.equal(sharded.full_tensor(), torch.arange(32.0).view(8, 4))
    return wrong


def test_a_part_of_a_sharded_tensor_changes_it_or_is_refused():
    """torch's DTensor copies many parts, and what is written to the copy would be lost."""
    assert run_ranks(2, parts_of_shards) == [[], []]


def loads_a_whole_state():
    """What a rank runs, as k-diffusion does: all save the optimizer's state by one call, and load what it wrote."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    model, _ = built()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(2):
        accelerator.backward(loss_of(model, torch.randn(4, WIDTH + 5)))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            accelerator.save(optimizer.state_dict(), f"{sys.argv[2]}.pt")
            accelerator.wait_for_everyone()
            before = optimizer.state_dict()["state"]
            optimizer.load_state_dict(torch.load(f"{sys.argv[2]}.pt"))
            after = optimizer.state_dict()["state"]
            for a, b in ((before[at][key], after[at][key]) for at in before for key in before[at]):
                assert type(a) is type(b) and torch.equal(local(a), local(b))
    accelerator.end_training()


@pytest.mark.parametrize("config", ["fsdp_bf16", "fsdp_fp8_msamp_o2"])
def test_a_state_that_was_saved_whole_is_loaded_in_parts(tmp_path, config):
    train(config, tmp_path / "run", script=loads_a_whole_state)
