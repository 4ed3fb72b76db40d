"""Ordinary idioms of training scripts, one function each, for tests/models/test_idioms.py.

Each takes an Accelerator, ours or a stand-in of plain torch, and returns the model that it has trained. The data is the
same: a process takes its part of the global batch.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

STEPS, LR = 4, 0.02


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))


def batch(accelerator, step, size=8):
    """This process's part of a step's samples: (inputs, targets)."""
    values = torch.randn(2, size, 16, generator=torch.Generator().manual_seed(step))
    part = size // accelerator.num_processes
    at = accelerator.process_index * part
    return values[:, at : at + part].unbind()


def adam(parameters, lr=LR):
    """With so large an eps updates are almost in proportion to gradients: rounding errors stay small."""
    return torch.optim.AdamW(parameters, lr=lr, eps=0.03, weight_decay=0.0)


def start(accelerator, make=adam, model=None):
    model = model or network()
    return accelerator.prepare(model, make(model.parameters()))


def loss_of(accelerator, model, step):
    inputs, targets = batch(accelerator, step)
    return F.mse_loss(model(inputs), targets)


def one_step(accelerator, model, optimizer, step):
    optimizer.zero_grad()
    accelerator.backward(loss_of(accelerator, model, step))
    optimizer.step()


def steps(accelerator, model, optimizer, loss=loss_of, before=None, between=None, after=None):
    """STEPS steps. before, between the gradients and their update, after: functions of the number of a step."""
    for step in range(STEPS):
        if before:
            before(step)
        optimizer.zero_grad()
        accelerator.backward(loss(accelerator, model, step))
        if between:
            between(step)
        optimizer.step()
        if after:
            after(step)
    return model


def accumulated(accelerator, model, optimizer, parts=2):
    """STEPS steps of two backward passes each. parts: by which the script divides the loss."""
    for step in range(2 * STEPS):
        accelerator.backward(loss_of(accelerator, model, step) / parts)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


def accumulation_said_later(accelerator):
    """The number of micro-batches, by which Accelerate divides the loss, is known after `prepare`."""
    model, optimizer = start(accelerator)
    accelerator.gradient_accumulation_steps = 2
    return accumulated(accelerator, model, optimizer, parts=1)


def clipped_by_torch(accelerator):
    """By the function of torch, not by the Accelerator's."""
    model, optimizer = start(accelerator)
    clip = nn.utils.clip_grad_norm_
    return steps(accelerator, model, optimizer, between=lambda step: clip(model.parameters(), 0.05))


def two_optimizers_clipped(accelerator):
    model = network()
    first, second = adam(model[:3].parameters()), adam(model[3:].parameters(), LR / 2)
    model, first, second = accelerator.prepare(model, first, second)
    for step in range(STEPS):
        first.zero_grad()
        second.zero_grad()
        accelerator.backward(loss_of(accelerator, model, step))
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        first.step()
        second.step()
    return model


def two_models_clipped(accelerator):
    """Each has its backward pass before the first steps, and one of them gives up most of its gradients."""
    one, other = network(0), network(1)
    one, other, first, second = accelerator.prepare(one, other, adam(one.parameters()), adam(other.parameters()))
    for step in range(STEPS):
        first.zero_grad()
        second.zero_grad(set_to_none=False) if step % 2 else other.zero_grad()
        accelerator.backward(loss_of(accelerator, one, step))
        accelerator.backward(loss_of(accelerator, other, step))
        nn.utils.clip_grad_norm_(one.parameters(), 0.05)
        nn.utils.clip_grad_norm_(other.parameters(), 100.0)  # which none of them has
        first.step()
        if step == 3:
            second.step()
    return nn.ModuleList([accelerator.unwrap_model(one), accelerator.unwrap_model(other)])


class SharedWeight(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.inner = nn.Embedding(16, 32), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.embedding.weight = nn.Parameter(self.embedding.weight.detach() / 4)

    def forward(self, inputs):
        return self.head(self.inner(self.embedding(inputs.argmax(-1)) + inputs @ self.embedding.weight))


def shared_weight(accelerator):
    """A language model's head is its embedding: one tensor, under both names."""
    return steps(accelerator, *start(accelerator, model=SharedWeight()))


def wgan(accelerator):
    """A critic with clipped weights is trained three times for each step of the generator."""
    critic, of_critic = start(accelerator)
    generator, of_generator = start(accelerator, model=network(1))
    for step in range(2 * STEPS):
        noise, real = batch(accelerator, step)
        of_critic.zero_grad()
        accelerator.backward(critic(generator(noise).detach()).mean() - critic(real).mean())
        of_critic.step()
        for parameter in critic.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        if step % 3 == 0:
            of_generator.zero_grad()
            accelerator.backward(-critic(generator(noise)).mean())
            of_generator.step()
    return critic


def average(accelerator):
    """An average of the weights, made before `prepare`, that the model takes at the end."""
    model = network()
    ema = copy.deepcopy(model)
    model, optimizer = start(accelerator, model=model)
    for step in range(STEPS):
        one_step(accelerator, model, optimizer, step)
        with torch.no_grad():
            for mean, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                mean.mul_(0.5).add_(parameter.detach(), alpha=0.5)
    with torch.no_grad():
        for mean, parameter in zip(ema.parameters(), model.parameters(), strict=True):
            parameter.copy_(mean)
    return model


def prepared_average(accelerator):
    """An average of the weights that is prepared beside the model, as in k-diffusion and U-ViT. It is what is wanted."""
    model = network()
    model, mean, optimizer = accelerator.prepare(model, copy.deepcopy(model), adam(model.parameters()))
    for step in range(STEPS):
        one_step(accelerator, model, optimizer, step)
        with torch.no_grad():
            for ours, parameter in zip(mean.parameters(), model.parameters(), strict=True):
                ours.copy_(ours.detach() * 0.75 + parameter.detach() * 0.25)
    return mean


def sharpness_aware(accelerator):
    """SAM: to the worst weights nearby, their gradient, and back."""
    model, optimizer = start(accelerator)
    for step in range(STEPS):
        accelerator.backward(loss_of(accelerator, model, step))
        with torch.no_grad():
            moves = [0.1 * parameter.grad for parameter in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        accelerator.backward(loss_of(accelerator, model, step))
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
    return model


def gradient_penalty(accelerator):
    def loss(accelerator, model, step):
        inputs, targets = batch(accelerator, step)
        inputs.requires_grad_()
        out = model(inputs)
        [slope] = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        return F.mse_loss(out, targets) + slope.square().sum(1).mean()

    return steps(accelerator, *start(accelerator), loss)


def lbfgs(accelerator):
    model, optimizer = start(accelerator, lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(accelerator, model, 0)
        accelerator.backward(loss)
        return loss

    for _ in range(STEPS // 2):
        optimizer.step(closure)
    return model


def closures(accelerator):
    model, optimizer = start(accelerator)
    for step in range(STEPS):

        def closure():
            optimizer.zero_grad()
            loss = loss_of(accelerator, model, step)  # noqa: B023
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)
    return model


def retained_graph(accelerator):
    """Two losses of one forward pass, each with a backward pass."""
    model, optimizer = start(accelerator)
    for step in range(STEPS):
        inputs, targets = batch(accelerator, step)
        optimizer.zero_grad()
        out = model(inputs)
        accelerator.backward(F.mse_loss(out, targets), retain_graph=True)
        accelerator.backward(out.square().mean())
        optimizer.step()
    return model


def own_scaler(accelerator):
    model, optimizer = start(accelerator)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(accelerator, model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


def zeroed_gradients(accelerator):
    model, optimizer = start(accelerator)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        accelerator.backward(loss_of(accelerator, model, step))
        optimizer.step()
    return model


def scheduler_first(accelerator):
    model = network()
    optimizer = adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return steps(accelerator, *accelerator.prepare(model, optimizer), between=lambda step: scheduler.step())


def frozen_norm(accelerator):
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 16))
    torch.manual_seed(0)
    for at in (0, 3, 4):
        model[at].reset_parameters()
    model[1].running_mean.fill_(0.1)
    for parameter in model[1].parameters():
        parameter.requires_grad = False
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, adam(trained))
    for step in range(STEPS):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        one_step(accelerator, model, optimizer, step)
    return model


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, inputs):
        return self.last(torch.tanh(self.first(inputs)) + torch.tanh(self.second(2 * inputs)))


def tied_later(accelerator):
    """A weight that the script ties to another one after `prepare`."""
    model, optimizer = start(accelerator, model=Tied())
    inner = accelerator.unwrap_model(model)
    inner.second.weight = inner.first.weight
    return steps(accelerator, model, optimizer)


def unused_layer(accelerator):
    """A layer that the loss does not use, and two backward passes for each step."""
    model, optimizer = start(accelerator, model=Tied())
    accelerator.unwrap_model(model).second.forward = lambda inputs: 0.5 * inputs.repeat(1, 2)
    return accumulated(accelerator, model, optimizer)


def thawed_by_a_group(accelerator):
    """A layer is frozen first, then thawed and given to the optimizer."""
    model = network()
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, adam(trained))
    for step in range(STEPS):
        if step == 2:
            layer = accelerator.unwrap_model(model)[0]
            for parameter in layer.parameters():
                parameter.requires_grad = True
            getattr(optimizer, "optimizer", optimizer).add_param_group({"params": list(layer.parameters())})
        one_step(accelerator, model, optimizer, step)
    return model


def cleared_state(accelerator):
    model, optimizer = start(accelerator)
    return steps(accelerator, model, optimizer, before=lambda step: optimizer.state.clear() if step == 2 else None)


def earlier_state(accelerator):
    """The optimizer's state of an earlier step, loaded in between."""
    model, optimizer = start(accelerator)
    for step in range(STEPS):
        if step == 1:
            saved = copy.deepcopy(optimizer.state_dict())
        if step == 3:
            optimizer.load_state_dict(saved)
        one_step(accelerator, model, optimizer, step)
    return model


def new_optimizer(accelerator):
    """Another optimizer for the second half."""
    model, optimizer = start(accelerator)
    for step in range(STEPS):
        if step == 2:
            optimizer = accelerator.prepare(adam(model.parameters(), LR / 2))
        one_step(accelerator, model, optimizer, step)
    return model


def without_an_optimizer(accelerator):
    """The update is the script's own. The optimizer steps once, with a rate of 0."""
    model, optimizer = start(accelerator, lambda parameters: adam(parameters, 0.0))

    @torch.no_grad()
    def update(step):
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad

    return steps(accelerator, model, optimizer, between=update)


def rate_of_a_layer(accelerator):
    """Groups with rates of their own."""
    model = network()
    groups = [{"params": model[0].parameters(), "lr": LR / 10}, {"params": model[2:].parameters()}]
    model, optimizer = accelerator.prepare(model, adam(groups))
    return steps(accelerator, model, optimizer)


def clipping_by_hand(accelerator):
    """The norm of all gradients is a number of Python's."""
    model, optimizer = start(accelerator)

    def clip(step):
        norm = sum(parameter.grad.norm().item() ** 2 for parameter in model.parameters()) ** 0.5
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, 0.1 / norm))

    return steps(accelerator, model, optimizer, between=clip)


class Called(nn.Module):
    """A layer with a `__call__` of its own, as IP-Adapter's attention processors, which runs no hooks."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def __call__(self, x):
        return x + self.down(self.up(x).tanh())


class Processors(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.ModuleList(Called() for _ in range(2))

    def forward(self, x):
        return self.each[1](self.each[0](x))


def own_call(accelerator):
    torch.manual_seed(0)
    model, optimizer = start(accelerator, model=Processors())
    return steps(accelerator, model, optimizer)


IDIOMS = {
    name: function
    for name, function in list(globals().items())
    if callable(function)
    and getattr(function, "__code__", None)
    and function.__code__.co_varnames[:1] == ("accelerator",)
    and function.__code__.co_argcount - len(function.__defaults__ or ()) == 1
    and name not in ("batch", "start", "steps")
}
