"""What scripts do to their model: one row each, in a training of a few steps, with plain torch or with an Accelerator.

A row is a function of (moment, run). Moments: `built`, before `prepare`; `prepared`; in each step `begun`, `loss`,
`backward`, between backward and step, and `stepped`; `forward`, in the forward pass of a block. Rows change the weight that `run.weight`
returns. What they read of it goes to `run.seen`.
"""

import copy
import math
import sys
from types import SimpleNamespace

import torch
from torch import nn

STEPS, SAMPLES, WIDTH, OUT = 4, 32, 64, 16
BLOCK = 1  # whose weight is the one that rows change


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.in_forward = None  # what a row does here

    def forward(self, x):
        if self.in_forward and self.training:
            self.in_forward(self.fc.weight)
        return x + torch.tanh(self.fc(x))


class Net(nn.Module):
    _no_split_modules = ["Block"]
    weight = f"blocks.{BLOCK}.fc.weight"

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def llama():
    """A model that can be split by tensor parallel; it takes vectors in place of tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=OUT, tie_word_embeddings=False))
    model.model.embed_tokens.weight.requires_grad_(False)
    model.weight = f"model.layers.{BLOCK}.mlp.up_proj.weight"
    return model


def output(model, x):
    return (
        model(inputs_embeds=x[:, None]).logits[:, 0] if hasattr(getattr(model, "module", model), "config") else model(x)
    )


# ---- the rows ----


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def at(*moments, steps=range(STEPS)):
    """A row from a function of `run` that is called at these moments only, in these steps."""
    return lambda function: lambda moment, run: function(run) if moment in moments and run.step in steps else None


def without_gradients(function):
    return torch.no_grad()(function)


def freeze(run):
    run.weight().requires_grad_(False)


def thaw(run):
    run.weight().requires_grad_(True)


def clamp(run):
    run.weight().data.clamp_(-0.02, 0.02)


def zero_rows(gradient):
    gradient[: WIDTH // 2] = 0


def load_first(run, moment):
    state = run.model.state_dict()
    if moment == "prepared":
        run.saved = {name: tensor.detach().clone() for name, tensor in state.items()}
    elif moment == "stepped" and run.step == 1:
        run.model.load_state_dict(run.saved)


def frozen_for_a_while(moment, run):
    if moment == "stepped" and run.step in (0, 1):
        run.weight().requires_grad_(run.step == 1)


def thawed(moment, run):
    if moment == "built" or (moment == "stepped" and run.step == 1):
        run.weight().requires_grad_(moment != "built")


def only_where_large(run):
    weight = run.weight()
    with torch.no_grad():
        weight.mul_((weight.abs() > 0.06).to(weight.dtype))


def unit_rows(run):
    weight = run.weight()
    with torch.no_grad():
        weight.div_(weight.norm(dim=1, keepdim=True))


def halve(run):
    with torch.no_grad():
        run.weight().copy_(run.weight() * 0.5)


def written_in_forward(write):
    def row(moment, run):
        if moment == "built" and hasattr(run.model, "blocks"):
            run.model.blocks[BLOCK].in_forward = write

    return row


def halved_in_forward(weight):
    with torch.no_grad():
        weight.copy_(weight * 0.5)


def clamped_in_forward(weight):
    weight.data.clamp_(-0.02, 0.02)


def block_of(run):
    return run.name.split(".fc.")[0].split(".mlp.")[0]


def in_eval(moment, run):
    if moment == "built":
        run.model.eval()


def block_in_eval(moment, run):
    if moment == "built":
        run.model.get_submodule(block_of(run)).eval()


def dtypes_in_and_out(moment, run):
    def see(module, args, kwargs, out):
        values = [*args, *kwargs.values(), getattr(out, "logits", out)]
        run.seen.extend(float(v.dtype.itemsize**2) for v in values if torch.is_tensor(v) and v.is_floating_point())

    if moment == "built":
        run.model.register_forward_hook(see, with_kwargs=True)
        run.model.get_submodule(block_of(run)).register_forward_hook(see, with_kwargs=True)


def in_bf16(moment, run):
    if moment == "built":
        run.model.bfloat16()


def weight_in_bf16(moment, run):
    if moment == "built":
        run.weight().data = run.weight().data.bfloat16().to(run.weight().dtype)


def set_gradient(value):
    def row(run):
        weight = run.weight()
        if weight.grad is not None:
            weight.grad = value(weight.grad)

    return row


def with_gradient(change):
    """Where there is a gradient, as scripts write it."""

    def row(run):
        if run.weight().grad is not None:
            change(run.weight().grad)

    return row


def post_accumulate(parameter):
    parameter.grad.mul_(0)


def slower(moment, run):
    if moment == "stepped" and run.step == 1:
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0


def penalty(moment, run):
    if moment == "loss":
        run.loss = run.loss + 0.1 * sum(parameter.float().square().sum() for parameter in run.model.parameters())


def negated_in_place(gradient):
    gradient.mul_(-1)


def hook_for_a_while(moment, run):
    if moment == "built":
        run.handle = run.weight().register_hook(torch.zeros_like)
    elif moment == "stepped" and run.step == 1:
        run.handle.remove()


def with_less_data(factor):
    def write(weight):
        weight.data = weight.data * factor

    return write


def with_two_passes(row):
    return lambda moment, run: (row(moment, run), at("begun")(another_pass(factor=1.0))(moment, run))


def another_pass(give_up=lambda run: None, factor=-2.0):
    """A backward pass before the step's own, of a loss that would turn its gradient round."""

    def row(run):
        run.backward(factor * run.loss_of())
        give_up(run)

    return row


def set_all_to_none(run):
    for parameter in run.model.parameters():
        parameter.grad = None


def evaluated(run):
    with torch.no_grad():
        run.loss_of()


def evaluated_after(run):
    """A backward pass of torch's own, after which the script evaluates."""

    def backward(loss):
        loss.backward()
        evaluated(run)

    return backward


def swapped_for_an_evaluation(run):
    weight = run.weight()
    kept = weight.data.clone()
    weight.data.mul_(0.5)
    evaluated(run)
    weight.data.copy_(kept)


def of_two_passes(run):
    run.loss = run.loss_of() + run.loss_of()


def another_parameter(run):
    block = run.model.get_submodule(run.name.rpartition(".")[0])
    block.weight = nn.Parameter(run.weight().detach() * 0.5)


def optimizer_of_before(moment, run):
    if moment == "stepped" and run.step == 0:
        run.saved = copy.deepcopy(run.optimizer.state_dict())
    elif moment == "stepped" and run.step == 2:
        run.optimizer.load_state_dict(run.saved)


def block_hook(register, function):
    """A hook on the module whose weight rows change."""

    def row(run):
        block = run.model.get_submodule(run.name.rpartition(".")[0])
        getattr(block, register)(function)

    return row


def with_gradient_argument(run):
    run.backward(run.loss_of(), gradient=torch.tensor(-2.0, dtype=run.dtype))


def no_decay(run):
    for group in run.optimizer.param_groups:
        group["weight_decay"], group["betas"] = 20.0, (0.5, 0.9)


ROWS = {
    "nothing": lambda moment, run: None,
    "p.data.clamp_ before prepare": at("built")(clamp),
    "p.data.clamp_ after prepare": at("prepared")(clamp),
    "p.data.clamp_ between backward and step": at("backward")(clamp),
    "p.data.clamp_ after each step": at("stepped")(clamp),
    "p.copy_ after a step": at("stepped", steps=(1,))(halve),
    "p.div_(norm) after each step": at("stepped")(unit_rows),
    "p.mul_(mask) after a step": at("stepped", steps=(1,))(only_where_large),
    "nn.init after prepare": at("prepared")(lambda run: nn.init.constant_(run.weight(), 0.01)),
    "load_state_dict after a step": lambda moment, run: load_first(run, moment),
    "p.copy_ in forward": written_in_forward(halved_in_forward),
    "p.data.clamp_ in forward": written_in_forward(clamped_in_forward),
    "p.data = after each step": at("stepped")(lambda run: with_less_data(0.8)(run.weight())),
    "p.data = in forward": written_in_forward(with_less_data(0.5)),
    "p.grad.mul_(0)": at("backward")(with_gradient(lambda gradient: gradient.mul_(0))),
    "p.grad[:n] = 0": at("backward")(with_gradient(zero_rows)),
    "p.grad = None": at("backward")(lambda run: setattr(run.weight(), "grad", None)),
    "p.grad = -p.grad": at("backward")(set_gradient(lambda gradient: -gradient)),
    "p.grad is read": at("backward")(with_gradient(lambda gradient: None)),
    "frozen before prepare": at("built")(freeze),
    "frozen after a step": at("stepped", steps=(1,))(freeze),
    "thawed after a step": thawed,
    "frozen, then thawed": frozen_for_a_while,
    "register_hook before prepare": at("built")(lambda run: run.weight().register_hook(lambda gradient: gradient * 0)),
    "register_hook after prepare": at("prepared")(lambda run: run.weight().register_hook(lambda gradient: gradient * 0)),
    "register_hook between forward and backward":
        at("loss", steps=(0,))(lambda run: run.weight().register_hook(lambda gradient: gradient * 0)),
    "register_hook in place": at("built")(lambda run: run.weight().register_hook(negated_in_place)),
    "register_hook, then removed": hook_for_a_while,
    "register_hook and two backward passes":
        with_two_passes(at("built")(lambda run: run.weight().register_hook(lambda gradient: gradient * 0))),
    "post_accumulate hook before prepare":
        at("built")(lambda run: run.weight().register_post_accumulate_grad_hook(post_accumulate)),
    "post_accumulate hook after prepare":
        at("prepared")(lambda run: run.weight().register_post_accumulate_grad_hook(post_accumulate)),
    "model.eval()": in_eval,
    "a block in eval()": block_in_eval,
    "dtypes of inputs and outputs": dtypes_in_and_out,
    "model.bfloat16() before prepare": in_bf16,
    "model.to(device) after a step": at("stepped", steps=(0,))(lambda run: run.prepared.to(run.weight().device)),
    "lr = 0 after a step": slower,
    "a penalty over model.parameters()": penalty,
    "two backward passes": at("begun")(another_pass()),
    "optimizer.zero_grad gives up": at("begun")(another_pass(lambda run: run.optimizer.zero_grad())),
    "model.zero_grad gives up": at("begun")(another_pass(lambda run: run.prepared.zero_grad())),
    "p.grad = None gives up": at("begun")(another_pass(set_all_to_none)),
    "an infinite loss is given up": at("begun", steps=(1, 2))(another_pass(lambda run: run.prepared.zero_grad(), math.inf)),
    "weights swapped for an evaluation": at("stepped")(swapped_for_an_evaluation),
    "an evaluation between backward and step": at("backward")(evaluated),
    "two forward passes, one backward pass": at("loss")(of_two_passes),
    "optimizer.state.clear()": at("stepped", steps=(1,))(lambda run: run.optimizer.state.clear()),
    "optimizer.load_state_dict": optimizer_of_before,
    "weight_decay and betas after a step": at("stepped", steps=(0,))(no_decay),
    "another Parameter after prepare": at("prepared")(another_parameter),
    "a forward hook that returns another output":
        at("prepared")(block_hook("register_forward_hook", lambda module, args, out: -out)),
    "a backward hook that returns another gradient":
        at("prepared")(block_hook("register_full_backward_pre_hook", lambda module, gradients: (-gradients[0],))),
    "all of p.grad = None before a step": at("backward", steps=(1, 2))(set_all_to_none),
    "optimizer.zero_grad before a step": at("backward", steps=(1, 2))(lambda run: run.optimizer.zero_grad()),
    "model.zero_grad(set_to_none=False) before a step":
        at("backward", steps=(1,))(lambda run: run.prepared.zero_grad(set_to_none=False)),
    "optimizer.zero_grad(set_to_none=False) before a step":
        at("backward", steps=(1,))(lambda run: run.optimizer.zero_grad(set_to_none=False)),
    "clip_grad_norm_ of no parameter": at("backward")(lambda run: nn.utils.clip_grad_norm_([], 1e-3)),
    "backward(loss, gradient)": at("begun")(with_gradient_argument),
    "loss.backward() alone": at("prepared")(lambda run: setattr(run, "backward", torch.Tensor.backward)),
    "loss.backward() alone, and an evaluation": at("prepared")(lambda run: setattr(run, "backward", evaluated_after(run))),
    "loss.backward()": at("begun")(lambda run: (-2.0 * run.loss_of()).backward()),
}  # fmt: skip
NEED_BLOCKS = {"p.copy_ in forward", "p.data.clamp_ in forward", "p.data = in forward"}  # rows for Net alone
WITHOUT_EFFECT = {  # on the weights, which in torch are those of training without the row, or nearly
    "nothing", "p.grad is read", "model.eval()", "a block in eval()", "dtypes of inputs and outputs", "model.bfloat16() before prepare",
    "model.to(device) after a step", "optimizer.zero_grad gives up", "model.zero_grad gives up", "p.grad = None gives up",
    "an infinite loss is given up", "weights swapped for an evaluation", "an evaluation between backward and step",
    "two forward passes, one backward pass", "optimizer.state.clear()", "optimizer.load_state_dict",
    "model.zero_grad(set_to_none=False) before a step", "optimizer.zero_grad(set_to_none=False) before a step",
    "clip_grad_norm_ of no parameter", "loss.backward() alone",
    "loss.backward() alone, and an evaluation",
}  # fmt: skip


def trained(row, accelerator=None, dtype=torch.float32, make=Net, lr=1e-2):
    """Trains with a row. Returns {name: tensor} of the first weights, of the last ones, and what was seen."""
    torch.manual_seed(0)
    model = make().to(dtype)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs, targets = torch.randn(STEPS, SAMPLES, WIDTH, dtype=dtype), torch.randn(STEPS, SAMPLES, OUT, dtype=dtype)
    run = SimpleNamespace(model=model, name=model.weight, step=0, seen=[], loss=None, dtype=dtype)
    run.weight = lambda: run.model.get_parameter(run.name)
    ROWS[row]("built", run)
    if accelerator is None and row == "model.bfloat16() before prepare":
        model.to(dtype)  # the right way to train such weights: in fp32
    run.optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.1)
    share = slice(None)
    if accelerator is not None:
        model, run.optimizer = accelerator.prepare(model, run.optimizer)
        run.model = accelerator.unwrap_model(model)
        of_group = accelerator.plan.tp_size  # processes that compute one batch
        share = slice(accelerator.process_index // of_group, None, accelerator.num_processes // of_group)
    run.prepared, run.backward = model, torch.Tensor.backward if accelerator is None else accelerator.backward

    def loss_of():
        return (output(model, inputs[run.step, share]).to(dtype) - targets[run.step, share]).square().mean()

    run.loss_of = loss_of
    ROWS[row]("prepared", run)
    for run.step in range(STEPS):
        ROWS[row]("begun", run)
        run.loss = run.loss_of()
        ROWS[row]("loss", run)
        run.backward(run.loss)
        ROWS[row]("backward", run)
        if row == "p.grad is read":
            run.seen.append(whole(run.weight().grad.detach()).norm().item())
        run.optimizer.step()
        run.optimizer.zero_grad()
        ROWS[row]("stepped", run)
        if row == "nothing":
            run.seen.append(whole(run.weight().detach()).float().norm().item())
            state = whole(run.model.state_dict()[run.name].detach())
            run.seen.append(state.float().norm().item())
    last = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    last = {name: tensor.detach().cpu().clone() for name, tensor in last.items()}
    return first, last, run.seen


def main(rows, dtypes, make, **options):
    """What a rank runs: one training after the other, until one ends it. What each has found is in a file of its number.
    dtypes: one for each row. options: of DDP."""
    from accelerate import DistributedDataParallelKwargs

    from faithful import Accelerator

    folder, handlers = sys.argv[2], [DistributedDataParallelKwargs(**options)] if options else []
    for number, (row, dtype) in enumerate(zip(rows, dtypes, strict=True)):
        accelerator = Accelerator(project_dir=f"{folder}/{number}", kwargs_handlers=handlers)
        _, last, seen = trained(row, accelerator, dtype, make)
        if accelerator.is_main_process:
            torch.save((last, seen), f"{folder}/{number}.pt")
        accelerator.free_memory()
    accelerator.end_training()
