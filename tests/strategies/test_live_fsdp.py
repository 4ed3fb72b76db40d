"""What a script does to its model has the effect that it has in plain torch: on one device, under DDP and FSDP2.

Each case is a small training. It runs under a config, and by torch alone on the batches of all processes together.
"""

import functools
import itertools
import json
import sys

import pytest
import torch
from accelerate import DDPCommunicationHookType, DistributedDataParallelKwargs
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
        self.in_forward = None

    def forward(self, x):
        if self.in_forward:
            self.in_forward(self.fc)
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


class Case:
    """What a script does, and when. The methods get the model as the script sees it, not wrapped."""

    accumulates = 1

    def __init__(self, act=True):
        self.act = act  # False: nothing is done, to know the effect

    def before(self, model):
        """Before `prepare`."""

    def prepared(self, model, optimizer):
        """After `prepare`."""

    def begin(self, model, optimizer, step):
        """Before the forward pass."""

    def backward(self, model, step):
        """Between the backward pass and the update."""

    def end(self, model, step):
        """After the update."""


def half_of_rows(gradient):
    mask = torch.ones(len(gradient), 1)
    mask[: len(gradient) // 2] = 0
    return gradient * mask


class HookBefore(Case):
    def before(self, model):
        for weight in (model.blocks[0].fc.weight, model.head.weight):
            weight.register_hook(half_of_rows)


class HookAfter(Case):
    def prepared(self, model, optimizer):
        for weight in (model.blocks[0].fc.weight, model.head.weight):
            weight.register_hook(half_of_rows)


class HookWhileAccumulating(HookBefore):
    accumulates = 2


class HookInPlace(Case):
    def before(self, model):
        model.blocks[1].fc.weight.register_hook(self.scale)

    def scale(self, gradient):
        gradient.mul_(-1)


class HookRemoved(Case):
    def before(self, model):
        self.handle = model.head.weight.register_hook(half_of_rows)

    def begin(self, model, optimizer, step):
        if step == 2:
            self.handle.remove()


class HookBetween(Case):
    """Between forward and backward, when some weights are gathered and others are not."""

    def prepared(self, model, optimizer):
        self.weights = [model.blocks[0].fc.weight, model.head.weight]
        model.register_forward_hook(self.register)

    def register(self, *_):
        for weight in self.weights:
            weight.register_hook(half_of_rows)
        self.weights = []


class PostHookBefore(Case):
    def before(self, model):
        model.blocks[0].fc.weight.register_post_accumulate_grad_hook(self.zero)

    def zero(self, weight):
        weight.grad.mul_(0)


class PostHookAfter(PostHookBefore):
    before = Case.before

    def prepared(self, model, optimizer):
        super().before(model)


class NormalizedInForward(Case):
    """As EDM2 does: the weight that is normalized is the one that is trained on."""

    def before(self, model):
        for block in model.blocks:
            block.in_forward = self.normalize

    @torch.no_grad()
    def normalize(self, layer):
        layer.weight.copy_(layer.weight / layer.weight.norm(dim=1, keepdim=True))


class ClampedInForward(Case):
    """By `.data`, of which autograd knows nothing, and without an effect in the first steps."""

    def before(self, model):
        model.blocks[1].in_forward = self.clamp
        self.calls = 0

    def clamp(self, layer):
        self.calls += 1
        limit = 1.0 if self.calls <= 2 else 0.1
        layer.weight.data.clamp_(-limit, limit)


class SetInForward(Case):
    def before(self, model):
        model.head.register_forward_pre_hook(self.shrink)

    def shrink(self, layer, _):
        layer.weight.data = layer.weight.data * 0.75


class Clamped(Case):
    def end(self, model, step):
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)


class Assigned(Case):
    def end(self, model, step):
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.8


class Loaded(Case):
    def end(self, model, step):
        model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})


class LoadedWhole(Case):
    """The weights from before `prepare`."""

    def before(self, model):
        self.weights = {name: 0.5 * value.detach() for name, value in model.state_dict().items()}

    def end(self, model, step):
        if step == 1:
            model.load_state_dict(self.weights)


class GradientScaled(Case):
    accumulates = 2

    def backward(self, model, step):
        for parameter in model.head.parameters():
            parameter.grad.mul_(0)
        for parameter in model.blocks[0].parameters():
            parameter.grad = parameter.grad * 0.5
        for parameter in model.blocks[1].parameters():
            parameter.grad.data.add_(0.1)


class GradientNone(Case):
    def backward(self, model, step):
        for parameter in model.blocks[step % 3].parameters():
            parameter.grad = None


class Thawed(Case):
    def before(self, model):
        model.blocks[1].requires_grad_(False)

    def begin(self, model, optimizer, step):
        if step == 2:
            model.blocks[1].requires_grad_(True)


class ThawedLater(Thawed):
    """The optimizer gets them when they are thawed."""

    def begin(self, model, optimizer, step):
        super().begin(model, optimizer, step)
        if step == 2:
            parameters = set(optimizer.param_groups[0]["params"])
            new = [parameter for parameter in model.blocks[1].parameters() if parameter not in parameters]
            optimizer.add_param_group({"params": new})


class Frozen(Case):
    def begin(self, model, optimizer, step):
        if step == 2:
            model.blocks[1].requires_grad_(False)


class ScaleClamped(Case):
    """What CLIP does with its logit_scale."""

    def backward(self, model, step):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def end(self, model, step):
        with torch.no_grad():
            model.scale.clamp_(0, 0.25)
        assert model.scale.item() <= 0.25


class InTurn(Case):
    """Each step trains another block."""

    accumulates = 2

    def begin(self, model, optimizer, step):
        for at, block in enumerate(model.blocks):
            block.requires_grad_(at == step % 3)


CASES = {
    case.__name__: case
    for case in (
        HookBefore, HookAfter, HookWhileAccumulating, HookInPlace, HookRemoved, HookBetween, PostHookBefore,
        PostHookAfter, NormalizedInForward, ClampedInForward, SetInForward, Clamped, Assigned, Loaded, LoadedWhole,
        GradientScaled, GradientNone, Thawed, ThawedLater, Frozen, InTurn, ScaleClamped,
    )
}  # fmt: skip


def built(case):
    torch.manual_seed(0)
    model = Net()
    if case.act:
        case.before(model)
    parameters = model.parameters()
    if isinstance(case, ThawedLater):
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
    return model, torch.optim.SGD(parameters, lr=0.3, momentum=0.5)


def batches(case):
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        yield step, [torch.randn(ROWS, WIDTH + 5, generator=generator) for _ in range(case.accumulates)]


def loss_of(model, rows):
    return (model(rows[:, :WIDTH]).float() - rows[:, WIDTH:]).square().mean()


def by_torch(case):
    """{name: weight} after a training in plain torch."""
    model, optimizer = built(case)
    act = case if case.act else Case()
    act.prepared(model, optimizer)
    for step, micro_batches in batches(case):
        act.begin(model, optimizer, step)
        for rows in micro_batches:
            (loss_of(model, rows) / case.accumulates).backward()
        act.backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        act.end(model, step)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def under_config(case, accelerator):
    """{name: whole weight} after the same training by the Accelerator, on process 0."""
    model, optimizer = built(case)
    accelerator.gradient_accumulation_steps = case.accumulates
    model, optimizer = accelerator.prepare(model, optimizer)
    inner, torchs = accelerator.unwrap_model(model), optimizer.optimizer
    case.prepared(inner, torchs)
    share = slice(accelerator.process_index, None, accelerator.num_processes)
    for step, micro_batches in batches(case):
        case.begin(inner, torchs, step)
        for at, rows in enumerate(micro_batches):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, rows[share]))
                if at == case.accumulates - 1:
                    case.backward(inner, step)
                optimizer.step()
                optimizer.zero_grad()
        case.end(inner, step)
    return {name: value.float().clone() for name, value in accelerator.get_state_dict(model).items()}


def apart(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in b)


def all_cases(names, **options):
    """What a rank runs. options: of DDP."""
    handlers = [DistributedDataParallelKwargs(**options)] if options else []
    accelerator = Accelerator(project_dir=sys.argv[2], kwargs_handlers=handlers)
    found = {}
    for name in names:
        weights = under_config(CASES[name](), accelerator)
        if accelerator.is_main_process:
            right, untouched = by_torch(CASES[name]()), by_torch(CASES[name](act=False))
            found[name] = {"apart": apart(weights, right), "effect": apart(untouched, right)}
            print(name, found[name], flush=True)
        accelerator.free_memory()
    if accelerator.is_main_process:
        with open(f"{accelerator.project_dir}/found.json", "w") as file:
            json.dump(found, file)
    accelerator.end_training()


@functools.cache
def results(config, folder):
    run = train(config, folder / config, script=functools.partial(all_cases, list(CASES)))
    return json.loads((run / "found.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("live")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("config", ["single_fp32", "ddp_fp32", "fsdp_fp32", "fsdp_bf16"])
def test_it_has_the_effect_that_it_has_in_torch(folder, config, case):
    found = results(config, folder)[case]
    assert found["effect"] > 0.05, "the case does something"
    assert found["apart"] < (1e-5 if config.endswith("fp32") else found["effect"] / 4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("config", ["ddp_bf16", "fsdp_bf16_ckpt"])
def test_also_in_other_configs(folder, config, case):
    test_it_has_the_effect_that_it_has_in_torch(folder, config, case)


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"comm_hook": DDPCommunicationHookType.BF16},
    ],
    ids=" ".join,
)
def test_ddp_keeps_its_options_when_parameters_are_thawed(tmp_path, options):
    names = ["Thawed", "Frozen", *([] if "static_graph" in options else ["InTurn"])]  # torch's does not accumulate
    run = train("ddp_fp32", tmp_path / "run", script=functools.partial(all_cases, names, **options))
    for found in json.loads((run / "found.json").read_text()).values():
        rounded = "comm_hook" in options  # gradients in bf16
        assert (1e-5 < found["apart"] < found["effect"] / 4) if rounded else found["apart"] < 1e-5


def compiled(ways):
    """What a rank runs: models that the script compiles itself."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    for way in ways:
        model, optimizer = built(Case())
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
    model, _ = built(Case())
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
    model, _ = built(Case())
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
    model, optimizer = accelerator.prepare(*built(Case()))
    accelerator.backward(loss_of(model, torch.randn(ROWS, WIDTH + 5)))
    WRITTEN[name][0](accelerator.unwrap_model(model).blocks[0].fc.weight.grad)
    accelerator.end_training()


@pytest.mark.parametrize("name", WRITTEN)
def test_a_part_of_a_sharded_gradient_is_refused_in_one_line(tmp_path, name):
    train("fsdp_fp32", tmp_path / "run", script=functools.partial(writes_a_part, name), code=2)
    log = (tmp_path / "run.log").read_text()
    assert log.count("refused: ") == 1 and WRITTEN[name][1] in log and "Traceback" not in log, log[-2000:]


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
