"""How far off is `./launch.sh estimate --time`? Compares its ratios with trainings that others published.

    python benchmarks/step_time.py --output results/step_time.json

Computes nothing on a GPU. Each published training has a model that is traced here on tensors without values, under the
config that is closest to it, and goes through the same functions as the command. A row is the time of a step over that
of the same training in bf16, published and estimated: below 1 is faster. `sign`: both are faster, or both slower.

What is not known of a training is assumed: `assumed` says what. `published` and `estimated` are seconds, of the
training and of its baseline.
"""

import contextlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import ROOT, arguments, save
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tools import costs, step_time
from tools.estimate import read_config
from tools.fake import without_reading
from tools.work import Count, Linear, Work

WITHIN = 0.15
SPEED = "results/fp8_speed.json"
H200 = "results/h200/speed.json"
WAYS = {"bf16": "single_bf16", "ao": "single_fp8", "O2": "single_fp8_msamp_o2"}
NAMES = {"bf16": "bf16", "ao": "torchao", "O2": "MS-AMP's O2"}
TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_778 = "https://github.com/pytorch/torchtitan/pull/778"
TORCHAO = "https://docs.pytorch.org/ao/main/workflows/training.html"
NANOCHAT = "https://github.com/karpathy/nanochat/blob/master/dev/LOG.md"
TE = (
    "https://github.com/NVIDIA/TransformerEngine/blob/main/docs/examples/te_llama/"
    "tutorial_accelerate_hf_llama_with_te.ipynb"
)
FLOAT8_116 = "https://github.com/meta-pytorch/float8_experimental/issues/116"
FLOAT8_273 = "https://github.com/meta-pytorch/float8_experimental/pull/273"
H100 = step_time.find_card("H100")
TITANS = replace(H100, memory=2.4e12)  # as torchtitan's page describes its cards, whose limit is 500 W


# ---------------------------------------------------------------------------------------------------------- the models


class Block(nn.Module):
    """A block of a Llama as torchtitan writes it, or of nanochat's model without `gated`."""

    def __init__(self, width, inner, heads, kv_heads, gated):
        super().__init__()
        self.head, self.repeat = width // heads, heads // kv_heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_heads * self.head, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False) if gated else None

    def forward(self, x, rotation):
        h = self.norms[0](x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.head)) for layer in (self.q, self.k, self.v))
        q, k = (rotated(part, rotation) for part in (q, k))
        k, v = (part.repeat_interleave(self.repeat, 2) if self.repeat > 1 else part for part in (k, v))
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        h = F.silu(self.gate(h)) * self.up(h) if self.gate else F.relu(self.up(h)).square()
        return x + self.down(h)


def rotated(x, rotation):
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).type_as(x)


class Model(nn.Module):
    def __init__(self, vocabulary, layers, width, inner, heads, kv_heads, gated=True):
        super().__init__()
        self.embedding, self.output = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(width, inner, heads, kv_heads, gated) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), width // heads

    def forward(self, tokens):
        rotation = torch.ones(tokens.shape[1], 1, self.head // 2, dtype=torch.complex64)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


MODELS = {
    "Llama-3.1-8B": (128256, 32, 4096, 14336, 32, 8),
    "Llama-3.1-8B, 4 blocks": (32000, 4, 4096, 14336, 32, 8),
    "Llama-2-7B": (32000, 32, 4096, 11008, 32, 32),
    "nanochat d26": (32768, 26, 1664, 6656, 13, 13, False),
}


@contextlib.contextmanager
def in_bf16():
    """Modules that are made have parameters in bf16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def traced(model, batch, length, everything=False):
    """`of_model` of one of MODELS. everything: the last Linear layer is in FP8."""

    def loss(made):
        return made(torch.zeros(batch, length, dtype=torch.long))

    return of_model(lambda: Model(*MODELS[model]), loss, () if everything else ("output",))


def of_model(make, loss, high_precision=()):
    """What tracing says of a model with blocks, in bf16, whose parameters are fp32. make: returns it; loss: of it.
    high_precision: names of Linear layers that FP8 leaves out."""
    count = Count()
    with FakeTensorMode(), without_reading(), in_bf16():
        made = make()
        count.watch(made.named_modules())
        with count:
            loss(made).backward()
        parameters = sum(p.numel() for p in made.parameters())
        blocks = [sum(p.numel() for p in block.parameters()) for block in made.blocks]
        names = [name for name, layer in made.named_modules() if isinstance(layer, nn.Linear)]
    inside = sum(blocks)
    return {
        "work": count.work, "blocks": blocks, "parameters": parameters, "weights": 4 * parameters, "frozen": 0,
        "gradients": {"ordinary": 4 * parameters, "bf16": 0, "fp8": 0}, "master": 0, "optimizer": 8 * parameters,
        "bf16_weights": 0, "bf16_state": 0, "fp8_optimizer": 8 * inside, "fused": True, "tensors": 0,
        "fp8_linear": [name for name in names if name not in high_precision],
    }  # fmt: skip


def settings_of(config, compiled, processes):
    return replace(read_config(ROOT / "accelerate_configs" / f"{config}.yml", processes), compile=compiled)


def time_of(config, figures, card, compiled=False, processes=8, again=0.0, **cost):
    """Seconds of a step. again: the part of the forward pass that is computed again. cost: instead of LinearCost's."""
    settings = settings_of(config, compiled, processes)
    step = step_time.step_of(settings, dict.fromkeys(step_time.keys_of(settings), figures), False)
    step = replace(step, again=again, cost=replace(step.cost, **cost))
    return step_time.seconds(step, card)["total"]


def of_layer(config, shape, card, compiled=True, input_grad=True):
    """Seconds of one Linear layer (M, K, N) alone, forward and backward, whose weight is in bf16."""
    settings = settings_of(config, compiled, 1)
    settings = replace(settings, strategy="fsdp")  # whose layers find their weights in bf16
    cost = costs.backend_of(settings).linear_cost(settings)
    linear = Linear("layer", *shape, input_grad=input_grad)
    plain = step_time.high_precision(settings)
    fp8 = ["layer"] if settings.backend else []
    step = step_time.Step(Work([linear]), cost, costs.backend_of(plain).linear_cost(plain), fp8, compiled=compiled)
    parts = step_time.seconds(step, card)
    return parts["total"] - parts["waits"]  # a benchmark repeats it, so that the host is ahead


# ----------------------------------------------------------------------------------------------------------- the rows


def row(source, what, baseline, published, estimated, assumed="", tokens=None):
    """A published ratio beside an estimated one. published: of the training and of its baseline, in seconds, or in
    tokens/s of one GPU if `tokens` says how many a step has; estimated: both in seconds."""
    theirs = published[1] / published[0] if tokens else published[0] / published[1]
    ours = estimated[0] / estimated[1]
    found = {"source": source, "what": what, "baseline": baseline, "assumed": assumed}
    found |= {"published": [tokens / rate for rate in published] if tokens else list(published)}
    found |= {
        "estimated": list(estimated),
        "published_ratio": theirs,
        "estimated_ratio": ours,
        "training": bool(tokens),
    }
    found |= {"sign": (ours < 1) == (theirs < 1), "within": abs(ours - theirs) <= WITHIN}
    said = f"{what:72} over {baseline:18} published {theirs:5.2f}, estimated {ours:5.2f}"
    print(said, "" if found["sign"] else " SIGN", "" if found["within"] else " OFF", flush=True)
    return found


def torchtitan():
    figures, kept = traced("Llama-3.1-8B", 2, 8192), {"again": 0.5}
    eager, compiled = (time_of("fsdp_bf16", figures, TITANS, c, **kept) for c in (False, True))
    fp8 = time_of("fsdp_fp8", figures, TITANS, True, **kept)
    say, name = "half of the forward pass is computed again", "Llama 8B, 2 x 8,192 tokens"
    yield row(TITAN, f"{name}: compiled", "bf16", (6667, 5762), (compiled, eager), say, 16384)
    yield row(TITAN, f"{name}: FP8 compiled", "bf16", (8532, 5762), (fp8, eager), say, 16384)
    yield row(TITAN, f"{name}: FP8 compiled", "compiled bf16", (8532, 6667), (fp8, compiled), say, 16384)


def only_linear_layers():
    figures = traced("Llama-3.1-8B", 1, 4096)
    eager, compiled = (time_of("fsdp_bf16", figures, TITANS, c) for c in (False, True))
    whole = time_of("fsdp_fp8", figures, TITANS, True)
    layer = settings_of("fsdp_fp8", True, 8)
    alone = asdict(costs.backend_of(layer).linear_cost(layer))
    alone |= {"input": alone["input"] + 2, "shares_casts": False}  # reads its input once more, for the amax
    layers = time_of("fsdp_fp8", figures, TITANS, False, **alone)
    name, say = "Llama 8B, 4,096 tokens", "cards and gather in FP8 as torchtitan's; eight cards, as its table says"
    yield row(TITAN_778, f"{name}: compiled", "bf16", (5033.8, 4495.0), (compiled, eager), say, 4096)
    yield row(TITAN_778, f"{name}: FP8, Linear layers compiled", "bf16", (4726.4, 4495.0), (layers, eager), say, 4096)
    yield row(TITAN_778, f"{name}: FP8, Linear layers compiled", "compiled bf16", (4726.4, 5033.8),
              (layers, compiled), say, 4096)  # fmt: skip
    yield row(TITAN_778, f"{name}: FP8 compiled", "bf16", (5768.6, 4495.0), (whole, eager), say, 4096)
    yield row(TITAN_778, f"{name}: FP8 compiled", "compiled bf16", (5768.6, 5033.8), (whole, compiled), say, 4096)


def torchao():
    figures, kept = traced("Llama-3.1-8B", 1, 8192), {"compiled": True, "again": 0.5}
    bf16 = time_of("fsdp_bf16", figures, TITANS, **kept)
    name = "Llama 8B, 8,192 tokens"
    say = "half of the forward pass is computed again; torchtitan's cards"
    for what, config, tokens in (("tensorwise", "fsdp_fp8", 7689.5), ("rowwise", "fsdp_fp8_ao_rowwise", 6768)):
        fp8 = time_of(config, figures, TITANS, **kept)
        yield row(TORCHAO, f"{name}: {what}", "compiled bf16", (tokens, 6150), (fp8, bf16), say, 8192)


def nanochat():
    figures = traced("nanochat d26", 32, 2048, everything=True)
    bf16 = time_of("ddp_bf16", figures, H100, True)
    say = "AdamW for Muon, full attention in each layer, 65,536 tokens in each GPU's step"
    for what, config, tokens in (("tensorwise", "ddp_fp8", 740e3), ("rowwise", "ddp_fp8_ao_rowwise", 564e3)):
        fp8 = time_of(config, figures, H100, True)
        yield row(
            NANOCHAT, f"nanochat, d26: {what} compiled", "compiled bf16", (tokens, 630e3), (fp8, bf16), say, 524288
        )
    shape, say = (65536, 1664, 6656), "no gradient of the input: with it bf16 would exceed 90% of the data sheet's rate"
    bf16 = of_layer("single_bf16", shape, H100, input_grad=False)
    for what, config, compiled, ms in (
        ("tensorwise compiled", "single_fp8", True, 4.06),
        ("rowwise compiled", "single_fp8_ao_rowwise", True, 4.55),
        ("rowwise, not compiled", "single_fp8_ao_rowwise", False, 21.86),
    ):
        fp8 = of_layer(config, shape, H100, compiled, input_grad=False)
        name = f"one layer {' x '.join(map(str, shape))}: {what}"
        yield row(NANOCHAT, name, "compiled bf16", (ms / 1e3, 4.79e-3), (fp8, bf16), say)


def transformer_engine():
    figures = traced("Llama-2-7B", 8, 256)
    for name in ("weights", "optimizer"):  # it trains bf16 weights
        figures[name] /= 2
    figures |= {"bf16_weights": figures["weights"]}
    figures["gradients"] = {"ordinary": figures["weights"], "bf16": 0, "fp8": 0}
    bf16 = time_of("single_bf16", figures, H100, True, 1)
    fp8 = time_of("single_fp8_te", figures, H100, True, 1, weight=4, weight_gradient=0)
    say = "an H100; TransformerEngine's blocks as compiled ones; all samples have 256 tokens"
    what = "Llama-2-7B, 8 x 256 tokens: TransformerEngine"
    yield row(TE, what, "its blocks in bf16", (2048 / 0.160, 2048 / 0.185), (fp8, bf16), say, 2048)


def single_layers():
    """float8_experimental's benchmark of the layers of Llama-2-70B, split over eight cards."""
    rows = {  # shape: ms in bf16, torch's FP8 compiled, TransformerEngine's; then in bf16, torch's FP8 not compiled
        (16384, 8192, 1280): ((2.14382, 2.31817, 2.02047), (2.157, 3.988)),
        (16384, 1024, 8192): ((1.87812, 1.7287, 1.74152), (1.894, 3.325)),
        (16384, 8192, 7168): ((9.99977, 6.69202, 6.39336), (10.505, 10.818)),
        (16384, 3584, 8192): ((5.22039, 3.75719, 3.69226), None),
    }
    for shape, ((bf16, ao, te), eager) in rows.items():
        name, ours = f"one layer {' x '.join(map(str, shape))}", of_layer("single_bf16", shape, H100)
        say = "scales are dynamic, theirs delayed; a layer's start does not wait for the host, theirs does (its PR 151)"
        for what, config, ms in (("FP8 compiled", "single_fp8", ao), ("TransformerEngine", "single_fp8_te", te)):
            fp8 = of_layer(config, shape, H100)
            yield row(FLOAT8_116, f"{name}: {what}", "bf16", (ms / 1e3, bf16 / 1e3), (fp8, ours), say)
        if eager:
            fp8 = of_layer("single_fp8", shape, H100, compiled=False)
            what = f"{name}: FP8, not compiled"
            yield row(FLOAT8_273, what, "bf16", (eager[1] / 1e3, eager[0] / 1e3), (fp8, ours))


def measured():
    """Our own trainings on an H100, by benchmarks/fp8_speed.py, and on an H200."""
    llama, vit = traced("Llama-3.1-8B, 4 blocks", 4, 2048), vit_huge(16)
    cases = json.loads((ROOT / SPEED).read_text())["cases"]
    for key, figures, what in (("llama", llama, "Llama 8B, 4 blocks, 8,192 tokens"),
                               ("vit", vit, "ViT-Huge, 16 blocks, 64 images")):  # fmt: skip
        both = {}
        for way, config in WAYS.items():
            for compiled in (False, True):
                case = cases[f"{key}-{way}" + compiled * "-compile"]
                if not case.get("shared"):  # another process ran on the card
                    tokens = 8192 / (case["ms"] / 1000)
                    name = NAMES[way] + compiled * " compiled"
                    both[name] = tokens, time_of(config, figures, H100, compiled, 1)
        bf16, compiled = both.pop("bf16"), both.pop("bf16 compiled")
        say = "the head stays in bf16"
        for name, found in both.items():
            for words, other in (("bf16", bf16), ("compiled bf16", compiled)):
                yield row(SPEED, f"{what}: {name}", words, (found[0], other[0]), (found[1], other[1]), say, 8192)
        yield row(SPEED, f"{what}: compiled", "bf16", (compiled[0], bf16[0]), (compiled[1], bf16[1]), say, 8192)
        yield from on_h200(key, figures, what)


def on_h200(key, figures, what):
    cases, card = json.loads((ROOT / H200).read_text())["cases"], step_time.find_card("H200")
    cases = {name: 8192 / (case["ms"] / 1000) for name, case in cases.items()}
    base = cases[f"{key}-bf16-compile"], time_of("single_bf16", figures, card, True, 1)
    for name, tokens in cases.items():
        model, way, *how = name.removesuffix(" (second run)").split("-")
        if model == key and way in ("ao", "O2") and how in ([], ["compile"]):
            again = " again" if name.endswith(")") else ""
            words = f"{what}, H200: {NAMES[way]}{' compiled' if how else ''}{again}"
            ours = time_of(WAYS[way], figures, card, bool(how), 1)
            yield row(H200, words, "compiled bf16", (tokens, base[0]), (ours, base[1]), "the head stays in bf16", 8192)


def vit_huge(blocks=32):
    """`of_model` of ViT-Huge with 64 images in a step; the head is left out of FP8."""
    import timm

    def loss(model):
        return F.cross_entropy(model(torch.zeros(64, 3, 224, 224)).float(), torch.zeros(64, dtype=torch.long))

    return of_model(lambda: timm.create_model("vit_huge_patch14_224", depth=blocks), loss, ("head",))


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, help="a JSON file")
    args = parser.parse_args()
    found = [*torchtitan(), *only_linear_layers(), *torchao(), *nanochat(), *transformer_engine()]
    found += [*single_layers(), *measured()]
    print(f"{sum(r['sign'] for r in found)} of {len(found)} signs, {sum(r['within'] for r in found)} within {WITHIN}")
    if args.output:
        figures = {"within": WITHIN, "reached": step_time.REACHED, "rows": found}
        save(args.output, figures)


if __name__ == "__main__":
    main()
