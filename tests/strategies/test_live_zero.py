"""Under ZeRO the engine's masters train. What a script does to its model counts as in plain torch all the same."""

import contextlib
import functools
import sys

import pytest
import torch
import yaml
from conftest import CONFIGS, record, refusal, train
from safetensors.torch import load_file, save_file
from torch import nn

from faithful import Accelerator

zero = pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed").zero

WIDTH, STEPS = 104, 6  # 104 * 104 elements are more than what stage 3 keeps gathered, their biases are less
MASK = (torch.arange(WIDTH) >= 24).float()


class Block(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what, self.linear = what, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if self.what == "written_in_forward":
            with torch.no_grad():
                weight = self.linear.weight
                weight.copy_(weight / weight.float().norm(dim=1, keepdim=True).to(weight.dtype))
        if self.what == "unused_at_times" and self.skipped:
            return x
        return x + self.linear(x).tanh()


def zero_rows(parameter):
    parameter.grad.mul_(MASK.to(parameter.grad.dtype).view(-1, *[1] * (parameter.grad.dim() - 1)))


class Row:
    """What a script does to one block: before `prepare`, after it, between backward and step, after a step."""

    def before(self, block): ...
    def prepared(self, block): ...
    def begin(self, block, step): ...
    def between(self, block, step): ...
    def after(self, block, step): ...


class Clamped(Row):
    def after(self, block, step):
        for parameter in block.parameters():
            parameter.data.clamp_(-0.03, 0.03)


class Copied(Row):
    def after(self, block, step):
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.copy_(parameter / 2)


class Loaded(Row):
    def after(self, block, step):
        if step == 2:
            block.load_state_dict({name: torch.full_like(value, 0.01) for name, value in block.state_dict().items()})


class Frozen(Row):
    def begin(self, block, step):
        block.requires_grad_(step < 2)


class Thawed(Row):
    def before(self, block):
        block.requires_grad_(False)

    def begin(self, block, step):
        block.requires_grad_(step >= 2)


class Alternating(Row):
    def begin(self, block, step):
        block.linear.weight.requires_grad_(step % 3 != 1)


class NoGradient(Row):
    def between(self, block, step):
        if step % 2:
            for parameter in block.parameters():
                parameter.grad = None


class HookBefore(Row):
    def before(self, block):
        block.linear.weight.register_hook(lambda g: g * MASK.to(g.dtype)[:, None])


class HookAfter(Row):
    prepared = HookBefore.before


class LateHookBefore(Row):
    def before(self, block):
        block.linear.weight.register_post_accumulate_grad_hook(zero_rows)


class LateHookAfter(Row):
    prepared = LateHookBefore.before


class WrittenInForward(Row): ...


class UnusedAtTimes(Row):
    def begin(self, block, step):
        block.skipped = step % 3 == 1


class Penalty(Row):
    def penalty(self, block):
        return sum(parameter.float().square().sum() for parameter in block.parameters()) * 0.1


ROWS = {
    "clamped": Clamped, "copied": Copied, "loaded": Loaded, "frozen": Frozen, "thawed": Thawed,
    "alternating": Alternating, "no_gradient": NoGradient, "hook_before": HookBefore, "hook_after": HookAfter,
    "late_hook_before": LateHookBefore, "late_hook_after": LateHookAfter, "written_in_forward": WrittenInForward,
    "unused_at_times": UnusedAtTimes, "penalty": Penalty,
}  # fmt: skip


def model_of(rows):
    torch.manual_seed(0)
    return nn.ModuleDict({name: Block(name) for name in rows})


class Model(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.blocks = model_of(rows)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


def optimizer_of(model, adam):
    if adam:
        return torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-4, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)


def run(rows, model, optimizer, forward, backward, part, first=0, last=STEPS, whole=contextlib.nullcontext):
    """Trains; `part` is what this process takes of a batch, `whole` what gathers the weights that are written. The same
    for plain torch and for a prepared model."""
    rows = {model.blocks[name]: ROWS[name]() for name in rows}
    generator = torch.Generator().manual_seed(1)
    for step in range(last):
        x, y = torch.randn(16, WIDTH, generator=generator), torch.randn(16, 8, generator=generator)
        if step < first:
            continue
        [row.begin(block, step) for block, row in rows.items()]
        loss = (forward(part(x)).float() - part(y)).square().mean()
        loss = loss + sum(row.penalty(block) for block, row in rows.items() if isinstance(row, Penalty))
        backward(loss)
        [row.between(block, step) for block, row in rows.items()]
        optimizer.step()
        optimizer.zero_grad()
        for block, row in rows.items():
            if type(row).after is not Row.after:
                with whole(list(block.parameters())):
                    row.after(block, step)


def plain(rows, adam):
    """The weights that plain torch ends with, in fp32 in one process."""
    model = Model(rows)
    [ROWS[name]().before(model.blocks[name]) for name in rows]
    optimizer = optimizer_of(model, adam)
    [ROWS[name]().prepared(model.blocks[name]) for name in rows]
    run(rows, model, optimizer, model, torch.Tensor.backward, lambda x: x)
    return model.state_dict()


def prepared(rows, adam, accelerator):
    model = Model(rows)
    [ROWS[name]().before(model.blocks[name]) for name in rows]
    model, optimizer = accelerator.prepare(model, optimizer_of(model, adam))
    inner = accelerator.unwrap_model(model)
    [ROWS[name]().prepared(inner.blocks[name]) for name in rows]
    return model, inner, optimizer


def script(rows, adam, resume=None):
    """What a rank runs."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    model, inner, optimizer = prepared(rows, adam, accelerator)
    first = 0
    if resume:
        accelerator.load_state()
        first = 3
    rank = accelerator.process_index
    part, whole = (lambda x: x[rank * 8 :][:8]), functools.partial(zero.GatheredParameters, modifier_rank=0)
    go = functools.partial(run, rows, inner, optimizer, model, accelerator.backward, part, whole=whole)
    if resume is False:
        go(last=3)
        accelerator.save_state()
        first = 3
    go(first=first)
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        save_file({name: value.float().cpu() for name, value in weights.items()}, f"{sys.argv[2]}.safetensors")
    accelerator.end_training()


def config_of(name, folder):
    stage, precision = name.split("_")
    mapping = yaml.safe_load((CONFIGS / f"{stage}_bf16.yml").read_text())
    mapping["mixed_precision"] = {"fp32": "no"}.get(precision, precision)
    (folder / f"{name}.yml").write_text(yaml.dump(mapping))
    return folder / f"{name}.yml"


CASES = [f"zero{stage}_{precision}" for stage in (1, 2, 3) for precision in ("fp32", "bf16")]


@functools.cache
def by_torch(rows, adam):
    return plain(rows, adam)


def differing(theirs, ours, fp32):
    """{name: (largest difference, bound)} of the weights that are not those of plain torch."""
    found = {}
    for name in theirs:
        bound = 2e-5 if fp32 else 2**-4 * max(theirs[name].abs().max().item(), WIDTH**-0.5)
        difference = (theirs[name] - ours[name]).abs().max().item()
        found |= {name: (difference, bound)} if difference > bound else {}
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_the_script_does_is_what_trains(tmp_path, case):
    fp32, rows = "fp32" in case, tuple(row for row in ROWS if row != "penalty" or "zero3" not in case)
    train(config_of(case, tmp_path), tmp_path / "run", script=functools.partial(script, rows, fp32))
    assert not differing(by_torch(rows, fp32), load_file(tmp_path / "run.safetensors"), fp32)


def test_frozen_and_thawed_it_is_resumed_bit_for_bit(tmp_path):
    """Each parameter's state and step counter are in the checkpoint: those of frozen ones are not there, or stand."""
    rows, config = ("frozen", "thawed", "alternating", "clamped"), config_of("zero3_fp32", tmp_path)
    train(config, tmp_path / "run", script=functools.partial(script, rows, True, resume=False))
    whole = load_file(tmp_path / "run.safetensors")
    train(config, tmp_path / "run", script=functools.partial(script, rows, True, resume=True))
    again = load_file(tmp_path / "run.safetensors")
    assert all(whole[name].equal(again[name]) for name in whole)
    assert not differing(plain(rows, True), again, True)


def gradients():
    """What a rank runs: DeepSpeed's function for gradients, in two backward passes of a step."""
    from deepspeed.utils import safe_get_full_grad

    accelerator = Accelerator(project_dir=sys.argv[2])
    alone = Model(())
    model, inner, optimizer = prepared((), False, accelerator)
    for _ in range(2):
        alone.load_state_dict(accelerator.get_state_dict(model) or alone.state_dict())
        for seed in range(2):
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed))
            (alone(x).square().mean() / 2).backward()
            accelerator.backward(model(x[accelerator.process_index * 8 :][:8]).float().square().mean() / 2)
        found = [safe_get_full_grad(parameter) for parameter in inner.parameters()]
        if accelerator.is_main_process:
            for gradient, parameter in zip(found, alone.parameters(), strict=True):
                assert (gradient - parameter.grad).norm() < 0.02 * parameter.grad.norm()
        optimizer.step()
        optimizer.zero_grad()
        alone.zero_grad()
        assert all(parameter.grad is None for parameter in inner.parameters())
    accelerator.end_training()


@pytest.mark.parametrize("config", ["zero1_bf16", "zero2_bf16", "zero3_bf16", "zero3_bf16_offload"])
def test_deepspeeds_function_gives_the_gradient_of_all_processes(tmp_path, config):
    train(config, tmp_path / "run", script=gradients)


def gives_up():
    """What a rank runs: a backward pass whose gradients it gives up, then that of the step."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    model, _, optimizer = prepared((), False, accelerator)
    for factor in (1000.0, 1.0):
        optimizer.zero_grad()
        accelerator.backward(factor * model(torch.ones(8, WIDTH)).float().square().mean())
    optimizer.step()
    accelerator.end_training()


def test_a_loss_that_is_given_up_is_not_in_the_record(tmp_path):
    run = train("zero2_bf16", tmp_path / "run", script=gives_up)
    torch.manual_seed(0)
    [[step, loss], *_] = record(run)["seen"]["loss_curve"]
    assert step == 1 and loss == pytest.approx(Model(())(torch.ones(8, WIDTH)).square().mean().item(), rel=0.05)


def refused(how):
    """What a rank runs, in which the script does what cannot be."""
    from deepspeed.utils import safe_get_full_grad

    accelerator = Accelerator(project_dir=sys.argv[2], gradient_accumulation_steps=2 if how == "early" else 1)
    model, inner, optimizer = prepared(("copied",), False, accelerator)
    if how == "group":
        optimizer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    if how == "released":
        inner.blocks["copied"].linear.weight.norm()
    if how == "saved":
        inner.head.weight.requires_grad_(False)
    with accelerator.accumulate(model):
        loss = model(torch.randn(8, WIDTH)).float().square().mean()
        accelerator.backward(loss, retain_graph=how == "retain")
        if how == "saved":
            optimizer.step()
            model.save_checkpoint(f"{sys.argv[2]}/deepspeeds")
        if how == "retain":
            accelerator.backward(loss)
        if how == "early":
            safe_get_full_grad(inner.head.weight)
        if how == "set":
            inner.head.weight.grad = torch.zeros(8, WIDTH)
        inner.head.weight.grad.mul_(0)


def with_complex_weights():
    """What a rank runs."""
    model = nn.ModuleList([nn.Linear(WIDTH, 8), nn.ParameterList([torch.ones(8, dtype=torch.cfloat)])])
    Accelerator().prepare(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("config", ["fsdp_bf16", "zero2_bf16"])
def test_complex_weights_are_refused(tmp_path, config):
    log = refusal(config, tmp_path / "run", script=with_complex_weights)
    assert log.count("refused: 1.0: ") == 1 and "no complex parameters" in log and "use a ddp config" in log


REFUSED = [
    ("zero2_bf16", "group", "add_param_group"),
    ("zero2_bf16", "early", "between the micro-batches of a step"),
    ("zero3_bf16", "retain", "retain_graph"),
    ("zero2_bf16", "saved", "has one step counter for all parameters"),
    ("zero1_bf16", "read", "the script reads .grad between backward and step, which under ZeRO is not there"),
    ("zero3_bf16_offload", "set", "the script sets .grad between backward and step"),
    ("zero3_bf16", "released", "the script uses a weight that ZeRO-3 has released"),
]


@pytest.mark.parametrize(("config", "how", "says"), REFUSED)
def test_what_cannot_be_is_refused(tmp_path, config, how, says):
    log = refusal(config, tmp_path / "run", script=functools.partial(refused, how))
    assert log.count("refused: ") == 1 and says in log
