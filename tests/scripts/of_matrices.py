"""Optimizers of a script, of which some look at more than one element of the weights at a time."""

import collections

import torch


class Lars(torch.optim.Optimizer):
    """The step of each matrix has the size of its weights."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / (p.grad.norm() + 1e-12)))


class ClippedByLayer(torch.optim.SGD):
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad.mul_((1 / (p.grad.norm() + 1e-6)).clamp(max=1))
        return super().step(closure)


class OwnRate(torch.optim.Optimizer):
    """As Prodigy it finds its rate from all weights, after the first step."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr, "d": 1e-6, "above": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        pairs = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, group in pairs:
            start = self.state[p].setdefault("start", p.clone())
            group["above"] += float((p.grad * (start - p)).sum())
        d = max(group["d"] * 2 + max(group["above"], 0.0) for group in self.param_groups)
        for p, group in pairs:
            group["d"] = d
            p.sub_(p.grad.sign() * (d * group["lr"]))


class ScheduleFree(torch.optim.Optimizer):
    """Counts its steps in its groups, and wants to be told that it trains."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    def train(self):
        for group in self.param_groups:
            group["train_mode"] = True

    def eval(self):
        for group in self.param_groups:
            group["train_mode"] = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() first")
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    z.sub_(p.grad, alpha=group["lr"])
                    p.lerp_(z, 1 / group["k"])


class Flat(torch.optim.Optimizer):
    """Keeps the first weights flat, as Prodigy does, their sum over columns, and a number that belongs to none."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            flat = self.state[p].setdefault("flat", p.flatten().clone())
            self.state[p].setdefault("mask", torch.arange(3.0))
            rate = self.param_groups[0]["lr"] / self.state["steps"] + 1e-3 * self.state[p]["mask"].sum()
            p.sub_((p.grad.flatten() + 0.1 * flat).view(p.shape), alpha=float(rate))


class Counting(torch.optim.SGD):
    """Adds a number to its state_dict, as Ranger21 does."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        return super().step(closure)

    def state_dict(self):
        return super().state_dict() | {"steps": self.steps}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.steps = state["steps"]


class Slow(torch.optim.Optimizer):
    """A Lookahead with slow weights of its own and the optimizer inside, both in a state_dict of another form."""

    def __init__(self, params):
        self.inner, self.state, self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = (
            torch.optim.AdamW(params, lr=0.1), collections.defaultdict(dict), {}, {}
        )  # fmt: skip
        self.defaults = self.inner.defaults

    @property
    def param_groups(self):
        return self.inner.param_groups

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "slow": dict(enumerate(self.state.values()))}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            p.lerp_(self.state[p].setdefault("slow", p.clone()), 0.5)


class Both(torch.optim.Optimizer):
    """An optimizer for matrices and one for the rest, as Muon's are joined."""

    def __init__(self, params):
        params = list(params)
        matrices, rest = ([p for p in params if (p.dim() > 1) is matrix] for matrix in (True, False))
        super().__init__(params, {})
        self.each = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.1)]
        self.param_groups = [group for each in self.each for group in each.param_groups]

    def step(self, closure=None):
        for each in self.each:
            each.step()


class Regression(torch.nn.Module):
    """A layer. temperature: its output is multiplied by a parameter without dimensions."""

    def __init__(self, temperature):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
        self.temperature = torch.nn.Parameter(torch.tensor(0.5)) if temperature else 0.5

    def forward(self, x, labels):
        output = self.layer(x) * self.temperature
        return {"loss": (output - labels).float().square().mean(), "output": output}
