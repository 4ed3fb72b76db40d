"""Scripts of public reports, one row each: a small training, and its truth by plain torch on whole batches.

A row says what is not as in the plainest loop: the model, what a process does with its samples, how a step ends. In plain
torch one process does it with the samples of each process in turn, and divides the losses by their number.
"""

import functools
import itertools
import json
import math
import re
import sys
from collections import UserDict
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

STEPS, SAMPLES, WIDTH, OUT = 6, 32, 64, 16  # SAMPLES: of a step, over all processes
GIVEN_UP, PARTIAL = 2, (2, 4)  # steps


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, **kwargs):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A layer, blocks and a head. The other models have another layer or other blocks."""

    _no_split_modules = ["Block"]
    block = Block

    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(32, WIDTH), nn.ModuleList(self.block() for _ in range(2))
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x, **kwargs):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, **kwargs)
        return self.out(x)

    def out(self, x):
        return self.head(x)


def blocks(name, init, forward):
    """A Net whose blocks have more in `__init__` and another forward pass."""

    def __init__(self):
        super(block, self).__init__()
        init(self)

    block = type(Block)("Block", (Block,), {"__init__": __init__, "forward": forward})
    return type(Net)(name, (Net,), {"block": block})


class Head(torch.autograd.Function):
    """The product of a fused loss, which reads the head's weight and does not call it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.to(x.dtype).t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.to(gradient.dtype), gradient.t() @ x.to(gradient.dtype)


def reading(out):
    """A Net whose forward pass reads the weight of its head."""
    return type(Net)("Reading", (Net,), {"out": lambda self, x: out(self.head, torch.tanh(x)) + self.head.bias})


def spectral(self, x):
    turned = torch.fft.rfft(x.float(), dim=-1) * self.weight
    return x + self.down(torch.tanh(self.up(x))) + torch.fft.irfft(turned, n=WIDTH, dim=-1)


def normed(self, x):
    return x + self.down(torch.tanh(self.up(self.base(x) / self.base.weight.float().norm(dim=1))))


def islanded(self, x):
    with torch.autocast(x.device.type, enabled=False):
        gate = torch.softmax(self.router(self.norm(x.float())), -1)
    assert gate.dtype == self.router.weight.dtype == torch.float32
    return x + self.down(torch.tanh(self.up(x))) * gate[:, :1].to(x.dtype)


def waves(t):
    f = torch.exp(-math.log(10_000) * torch.arange(WIDTH // 2) / (WIDTH // 2))
    return torch.cat([torch.sin(t.float()[:, None] * f), torch.cos(t.float()[:, None] * f)], 1)


def timed(self, x, t, *, angles):
    return x + self.down(torch.tanh(self.up(x + waves(t) + angles.float().sin())))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, which):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (which == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]).to(out.dtype))
        return x + out


class Mixture(Net):
    _no_split_modules = None
    block = Experts

    def __init__(self):
        super().__init__()
        self.tower = nn.Linear(WIDTH // 2, WIDTH)

    def forward(self, x, which, images):
        x = self.first(x)
        if images is not None:
            x = x + self.tower(images).mean(0)
        for block in self.blocks:
            x = block(x, which)
        return self.head(x)


class Nested(Mixture):
    _no_split_modules = ["Experts"]


class Words(Net):
    """Takes numbers of words: the places of the largest inputs."""

    sparse = False

    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(32, WIDTH, sparse=self.sparse)

    def forward(self, x):
        return super().forward(x.argmax(1))


class Sparse(Words):
    sparse = True


class TiedEmbedding(Words):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.first.weight

    def out(self, x):
        return self.head(x)[:, :OUT]


class TiedBlocks(Net):
    def __init__(self):
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight


class UserDicts(Net):
    """Returns no dict but a class like transformers' BatchEncoding, as sentence-transformers' cross-encoders do. FSDP2
    shards it as one piece: a block would return a tensor."""

    _no_split_modules = None

    def __init__(self):
        super().__init__()
        self.blocks = self.blocks[:1]

    def out(self, x):
        return UserDict(out=self.head(x))


class OtherStrides(Net):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, WIDTH, 4), nn.Flatten())
        self.first.to(memory_format=torch.channels_last)
        for block in self.blocks:
            block.up.weight = nn.Parameter(block.up.weight.detach().t().contiguous().t())


# ---- what a process does with its samples, and how a step ends ----


def loss_of(side, samples, **kwargs):
    return (side.model(side.inputs[samples], **kwargs).float() - side.targets[samples]).square().mean()


def one_pass(side, samples, rank):
    side.backward(loss_of(side, samples))


def two_passes(side, samples, rank):
    side.backward(loss_of(side, samples))
    side.backward(0.5 * loss_of(side, (samples + 7) % len(side.inputs)))


def in_a_dict(side, samples, rank):
    side.backward((side.model(side.inputs[samples])["out"].float() - side.targets[samples]).square().mean())


def with_times(side, samples, rank):
    times = 400 + 500 * side.inputs[samples, 0].sigmoid()
    side.backward(loss_of(side, samples, t=times, angles=torch.arange(float(WIDTH)) * 11.7))


def parts_of(how):
    def passes(side, samples, rank):
        which, images = torch.arange(len(samples)) % 4, None
        other = side.step in PARTIAL
        if how == "expert" and other and rank:
            which[which == 3] = 0
        if how == "swap" and other:
            which[which == (2 if rank else 3)] = 3 if rank else 2
        if how == "tower" and (side.step not in (2, 3) or (side.step == 2 and rank == 0)):
            images = side.inputs[:4]
        side.backward(loss_of(side, samples, which=which, images=images))

    return passes


def spiked(side, samples, rank):
    side.backward(loss_of(side, samples) * (5 if side.step == GIVEN_UP else 1))


def update(side):
    side.optimizer.step()
    side.optimizer.zero_grad()


def given_up(side, how):
    """Where a gradient spikes: the script looks at it or not, and goes on without it."""
    if how == "read":
        torch.stack([parameter.grad.norm() for parameter in side.model.parameters()]).norm()
    if how == "clip":
        side.clip(100.0)
    if side.step != GIVEN_UP:
        return update(side)
    if how == "none":
        for parameter in side.model.parameters():
            parameter.grad = None
    else:
        (side.model if how == "model" else side.optimizer).zero_grad()


def infinite(how):
    def passes(side, samples, rank):
        loss = loss_of(side, samples) * (math.inf if side.step == GIVEN_UP else 1)
        if how == "norm" or side.mean(loss.detach()).isfinite():
            side.backward(loss)

    return passes


def guarded(side):
    if side.step == GIVEN_UP and side.by == "loss":
        return
    if not torch.as_tensor(float(side.clip(1.0))).isfinite():
        return side.optimizer.zero_grad()
    update(side)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.0)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def with_complex(block):
    block.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))


def with_base(block):
    block.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)


def with_router(block):
    block.router, block.norm = nn.Linear(WIDTH, 4), nn.LayerNorm(WIDTH)


REPORTS = {
    "nothing": {},
    "two_backwards": {"passes": two_passes},
    **{
        f"discard {how}": {"passes": spiked, "finish": lambda side, how=how: given_up(side, how), "without": True}
        for how in ("plain", "read", "clip", "model", "none")
    },
    **{f"nanguard {how}": {"passes": infinite(how), "finish": guarded, "by": how, "without": True}
       for how in ("loss", "norm")},
    **{f"partial {how}": {"make": Mixture, "passes": parts_of(how)} for how in ("expert", "swap", "tower")},
    **{f"partial {how} nested": {"make": Nested, "passes": parts_of(how)} for how in ("expert", "swap", "tower")},
    "partial tower found": {"make": Mixture, "passes": parts_of("tower"), "found": True},
    "partial swap found": {"make": Mixture, "passes": parts_of("swap"), "found": True},
    "head_read once": {"make": reading(lambda head, x: F.linear(x, head.weight))},
    "head_read chunks": {"make": reading(lambda head, x: torch.cat([F.linear(c, head.weight) for c in x.chunk(2)]))},
    "head_read both": {"make": reading(lambda head, x: (F.linear(x, head.weight) + head(x)) / 2)},
    "head_read custom": {"make": reading(lambda head, x: torch.cat([Head.apply(c, head.weight) for c in x.chunk(2)]))},
    "frozen_read": {"make": blocks("Frozen", with_base, normed)},
    "complex_fno": {"make": blocks("FNO", with_complex, spectral)},
    "island": {"make": blocks("Island", with_router, islanded)},
    "timestep": {"make": blocks("Timed", lambda block: None, timed), "passes": with_times},
    "noncontig": {"make": OtherStrides},
    "user_dict": {"make": UserDicts, "passes": in_a_dict},
    "sparse": {"make": Sparse, "truth": Words, "optimizer": sgd},
    "tied own": {"make": TiedEmbedding},
    "tied rename": {"make": TiedBlocks},
}  # fmt: skip


def side_of(report, make, accelerator=None):
    """A training as a row's functions see it: of the prepared model, or in plain torch."""
    torch.manual_seed(0)
    model = make()
    side = SimpleNamespace(model=model, step=0, by=report.get("by"))
    side.inputs, side.targets = torch.randn(STEPS * SAMPLES, 32), torch.randn(STEPS * SAMPLES, OUT)
    side.optimizer = report.get("optimizer", adam)([p for p in model.parameters() if p.requires_grad])
    if accelerator is not None:
        side.model, side.optimizer = accelerator.prepare(model, side.optimizer)
        side.backward, side.mean = accelerator.backward, lambda loss: accelerator.reduce(loss, "mean")
        side.clip = lambda norm: accelerator.clip_grad_norm_(side.model.parameters(), norm)
    return side


def trained(name, accelerator=None, processes=1):
    """Trains. processes: in plain torch, whose samples are taken in turn. Returns the first weights and the model."""
    report = REPORTS[name]
    make, passes, finish = report.get("make", Net), report.get("passes", one_pass), report.get("finish", update)
    side = side_of(report, make if accelerator else report.get("truth", make), accelerator)
    first = {key: value.clone() for key, value in side.model.state_dict().items()} if accelerator is None else None
    ranks = range(processes) if accelerator is None else [accelerator.process_index]
    for side.step in range(STEPS):
        if accelerator is None and report.get("without") and side.step == GIVEN_UP:
            continue
        if accelerator is None:
            side.backward = lambda loss: (loss / processes).backward()
            side.clip = lambda norm: nn.utils.clip_grad_norm_(side.model.parameters(), norm)
            side.mean = lambda loss: loss
        samples = torch.arange(SAMPLES).chunk(processes if accelerator is None else accelerator.num_processes)
        for rank in ranks:
            passes(side, side.step * SAMPLES + samples[rank], rank)
        finish(side)
    return first, side.model


def main(names):
    """What a rank runs: one training after the other, until one ends it. Each is saved under its number."""
    from accelerate import DistributedDataParallelKwargs

    from faithful import Accelerator

    folder = sys.argv[2]
    for number, name in enumerate(names):
        found = DistributedDataParallelKwargs(find_unused_parameters=REPORTS[name].get("found", False))
        accelerator = Accelerator(project_dir=f"{folder}/{number}", kwargs_handlers=[found])
        _, model = trained(name, accelerator)
        accelerator.load_state(accelerator.save_state(f"{folder}/{number}/checkpoint"))
        accelerator.save_model(model, f"{folder}/{number}/model")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            open(f"{folder}/{number}/trained", "w").close()
        accelerator.free_memory()
    accelerator.end_training()


# ---- scripts that are not a loop of their own ----


def keeps_the_best(folder, resumes=False, **options):
    """What a rank runs: the Trainer, whose first checkpoint is the best. resumes: and goes on from it. options: of its
    arguments."""
    from accelerate.utils import set_seed
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from faithful import __main__ as door

    door.take_its_place()
    set_seed(0)
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, **sizes))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (16, 8))]
    score = itertools.count()
    arguments = TrainingArguments(
        str(folder / "out"), max_steps=2, save_steps=1, eval_steps=1, eval_strategy="steps", save_strategy="steps",
        learning_rate=0.1, metric_for_best_model="score", greater_is_better=True, report_to=[], disable_tqdm=True,
        **{"load_best_model_at_end": True} | options,
    )  # fmt: skip
    score_of = lambda _: {"score": -next(score)}  # noqa: E731
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=score_of)
    trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-1") if resumes else None)
    trainer.save_model()
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}
    torch.save(whole, folder / f"rank{trainer.accelerator.process_index}.pt")


def sharded_by_transformers(size, folder):
    """What a rank runs: the script asks transformers to shard the model that it loads, and the config for another way."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    from faithful import Accelerator

    accelerator = Accelerator(project_dir=sys.argv[2])
    tiny = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=8, num_hidden_layers=1, vocab_size=32))
    if accelerator.is_main_process:
        tiny.save_pretrained(folder / "tiny")
    accelerator.wait_for_everyone()
    sizes = DistributedConfig(**{size: max(2, accelerator.num_processes)})
    model = LlamaForCausalLM.from_pretrained(folder / "tiny", distributed_config=sizes)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    raise SystemExit("it is prepared as if it were whole")


def best_is_saved(folder):
    """0 if the Trainer has saved the weights of its first checkpoint, which are not those of its last."""
    saved, first, last = (
        load_file(folder / "out" / at / "model.safetensors") for at in ("", "checkpoint-1", "checkpoint-2")
    )
    kept = saved.keys() == first.keys() and all(saved[name].equal(first[name]) for name in first)
    return float(not kept or all(first[name].equal(last[name]) for name in first))


ALONE = {
    "best_hf": keeps_the_best,
    "native tp_size": functools.partial(sharded_by_transformers, "tp_size"),
    "native fsdp_size": functools.partial(sharded_by_transformers, "fsdp_size"),
}


# ---- what becomes of them under a config ----


def outcomes(names, config, folder):
    """Yields {name, outcome: right, wrong, refused, ended (in a line, after a wait) or failed; error, or the line}. Rows
    share a launch until one ends it; then the next one begins another."""
    from conftest import Ranks

    left, bound = [name for name in names if name in REPORTS], 0.05 if "fp8" not in config else 0.2
    while left:
        here = folder / str(len(left)) / "run"
        here.mkdir(parents=True)
        ranks = Ranks(config, ["--output_dir", str(here)], script=functools.partial(main, left))
        codes, text = ranks.wait(60 + 3 * len(left)), ranks.text()
        for number, name in enumerate(left):  # noqa: B007
            if not (here / str(number) / "trained").exists():
                break
            saved = load_file(here / str(number) / "model" / "model.safetensors")
            off = error(name, len(codes), saved)
            yield {"name": name, "outcome": "right" if off < bound else "wrong", "error": off}
        else:
            if set(codes) != {0}:
                yield {"name": "the end"} | ended(codes, text, here)
            break
        yield {"name": name} | ended(codes, text, here / str(number))
        left = left[number + 1 :]
    for name in [name for name in names if name in ALONE]:
        here = folder / name
        here.mkdir()
        ranks = Ranks(config, ["--output_dir", str(here / "run")], script=functools.partial(ALONE[name], here))
        codes, text = ranks.wait(90), ranks.text()
        off = best_is_saved(here) if set(codes) == {0} else 1
        right = {"outcome": "wrong" if off else "right", "error": off}
        yield {"name": name} | (right if set(codes) == {0} else ended(codes, text, here / "run"))


def ended(codes, text, run):
    """What a row is that has ended its launch. A refusal of a process that is not the first is in the record."""
    said = re.findall(r"^refused: (.*)", text, re.MULTILINE)
    if not said and 2 in codes and (run / "run.json").exists():
        said = [json.loads((run / "run.json").read_text())["error"]]
    if 2 in codes and 0 not in codes and len(said) == 1 and "Traceback" not in text:
        return {"outcome": "refused", "line": said[0]}
    errors = re.findall(r"^(?:[\w.]*Error|error|  what\(\)): .*", text, re.MULTILINE)
    if len(errors) == 1 and "another process" not in errors[0] and set(codes) == {1} and "Traceback" not in text:
        return {"outcome": "ended", "line": errors[0].removeprefix("error: ")}
    return {"outcome": "failed", "line": f"exit codes {codes}: {'; '.join(errors)[:300] or 'nothing said'}"}


def error(name, processes, saved):
    """How far the saved weights are from plain torch's, by how far these have come. Tensors that plain torch shares are
    saved once."""
    first, model = trained(name, processes=processes)
    right, seen, wrong, way = model.state_dict(), set(), 0.0, 0.0
    for key, value in right.items():
        if value.data_ptr() not in seen or key in saved:
            wrong += (saved[key] - value).abs().square().sum().item()
            way += (first[key] - value).abs().square().sum().item()
        seen.add(value.data_ptr())
    return math.sqrt(wrong / way)
