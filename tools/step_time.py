"""How long would an optimizer step take on a card that is not here? The part of ./launch.sh estimate behind --time.

A roofline. On tensors without values the step is traced as for its memory, and tools/work.py counts what it computes:
the (M, K, N) of each Linear layer, other products, attention, and the bytes of everything elementwise. Then

  a product       2 M K N / the card's rate, and half of the time that its result takes to be written, which nothing
                  hides; less than one wave of tiles leaves multiprocessors idle
  casts           bytes that `linear_cost` in costs.py counts, by the memory's bandwidth
  the rest        its bytes by the memory's bandwidth; attention by a rate of its own
  optimizer       weights, masters and moments read and written, gradients read
  communication   bytes that costs.py counts, by the link's bandwidth, but what computation hides
  the host        launches of kernels: forward and backward take the longer of host and card. Then the loss is read, and
                  the card waits until the update is prepared

Rates are those of NVIDIA's data sheets, dense, times the shares in REACHED, which hold for large shapes on an H100.
How far off all this is: results/step_time.json compares it with published trainings.
"""

import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from faithful.config.fp8 import rules_of
from faithful.config.settings import Settings
from faithful.config.strategies import FP8
from faithful.launch.machine import PACKAGES, Machine
from shared.args import Refused
from tools import cli, costs, estimate, progress
from tools.work import Linear, Work


@dataclass(frozen=True)
class Card:
    """A GPU, by NVIDIA's data sheet: dense FLOP/s, bytes/s."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    bf16: float
    fp8: float  # 0: it has none
    fp32: float
    memory: float
    link: float  # to the other cards of the machine, one direction


CARDS = (
    Card("H100", (9, 0), 132, 989e12, 1979e12, 67e12, 3.35e12, 450e9),  # SXM, 80 GB
    Card("H200", (9, 0), 132, 989e12, 1979e12, 67e12, 4.8e12, 450e9),
    Card("B200", (10, 0), 148, 2250e12, 4500e12, 75e12, 8e12, 900e9),
    Card("A100", (8, 0), 108, 312e12, 0, 19.5e12, 2.04e12, 300e9),  # SXM, 80 GB
    Card("RTX 4090", (8, 9), 128, 165e12, 330e12, 82.6e12, 1.01e12, 32e9),  # PCIe 4
)
REACHED = {  # the share of the data sheet's rate in a training
    "bf16": 0.67,
    "fp8": 0.61,  # fast accumulation: the forward product
    "fp8_precise": 0.51,
    "fp32": 0.85,
    "attention": 0.40,  # of bf16's rate
    "memory": 0.80,
    "strided": 0.04,  # elements/s of a transposed copy by torch, for each byte/s (pytorch/pytorch#113560)
    "link": 0.73,
}
TILE = 128  # rows and columns of a result that a multiprocessor computes
EAGER, COMPILED = 9e-6, 4e-6  # seconds of the host for each kernel
PER_TENSOR = 4e-6  # seconds in which the host prepares the update of a parameter, while the card waits
FUSED_BYTES, FUSED_KERNELS = 0.4, 0.25  # of elementwise operators that are left when a block is compiled
CONTENTION = 0.1  # of what is sent while it computes, by which that computes longer
UNFUSED_OPTIMIZER = 2.5  # passes over the state that torch's foreach optimizers make, where a fused one makes one
PER_MACHINE = 8  # cards
NARROW = 1280  # inputs or outputs up to which layers have gained less than is estimated here, where it was measured


@dataclass(frozen=True)
class Step:
    """One optimizer step of one process."""

    work: Work
    cost: costs.LinearCost  # of the layers in FP8
    plain: costs.LinearCost  # of the others
    fp8: Collection[str] = ()  # the Linear layers' names
    rate: str = "bf16"  # of the other products
    compiled: bool = False
    again: float = 0  # the part of the forward pass that the backward pass computes again
    optimizer: float = 0  # bytes read and written
    tensors: int = 0  # that the optimizer updates
    sent: float = 0  # bytes
    hidden_behind: float = 0  # the part of forward and backward during which it can send

    @property
    def narrow(self) -> bool:
        """Whether most of the products in FP8 are of narrow layers."""
        inside = [linear for linear in self.work.linears if linear.name in self.fp8]
        narrow = (linear.flop for linear in inside if min(linear.inputs, linear.outputs) <= NARROW)
        return 2 * sum(narrow) > sum(linear.flop for linear in inside)


def find_card(text: str) -> Card:
    """A card by its name, in any case and with or without `RTX`. Raises Refused with the names that there are."""
    names = {re.sub(r"\W|_", "", card.name).lower(): card for card in CARDS}
    wanted = re.sub(r"\W|_", "", text).lower()
    for name in (wanted, f"rtx{wanted}"):
        if name in names:
            return names[name]
    close = difflib.get_close_matches(wanted, names, 1)
    hint = f"did you mean {names[close[0]].name}? " if close else ""
    raise Refused(f"--time {text}: {hint}The cards are {', '.join(card.name for card in CARDS)}")


# --------------------------------------------------------------------------------------------------------- the roofline


def product(m: int, k: int, n: int, rate: float, card: Card, size: int = 2) -> float:
    """Seconds of one product [m, k] x [k, n] at FLOP/s `rate`. size: bytes of an operand's element."""
    waves = math.ceil(m / TILE) * math.ceil(n / TILE) / card.multiprocessors
    idle = min(math.ceil(waves) / waves, 2)  # of few tiles, a library splits the sum
    memory = card.memory * REACHED["memory"]
    written = 2 * m * n / memory
    return max(2 * m * k * n / rate * idle + written / 2, (m * k + k * n) * size / memory + written)


def products(linear: Linear, step: Step, card: Card) -> tuple[float, float]:
    """Seconds of a Linear layer's products, in forward and in backward."""
    m, k, n = linear.rows, linear.inputs, linear.outputs
    high = getattr(card, step.rate) * REACHED[step.rate]
    fast = precise = third = high
    size = plain = 2 if step.rate == "bf16" else 4
    if linear.name in step.fp8:
        fast, precise = (card.fp8 * REACHED[name] * step.cost.speed for name in ("fp8", "fp8_precise"))
        third, size = precise if step.cost.fp8_weight_gradient else high, 1
    first = product(m, k, n, fast, card, size) if step.cost.fp8_forward else product(m, k, n, high, card, plain)
    backward = linear.input_grad * product(m, n, k, precise, card, size)
    return first, backward + linear.weight_grad * product(n, m, k, third, card, size)


def casts(linear: Linear, step: Step, card: Card) -> tuple[float, float]:
    """Seconds of what a Linear layer does beside its products. The weight's casts are half in each pass."""
    cost = step.cost if linear.name in step.fp8 else step.plain
    x, y, w = linear.rows * linear.inputs, linear.rows * linear.outputs, linear.inputs * linear.outputs
    memory, strided = card.memory * REACHED["memory"], card.memory * REACHED["strided"]
    shared = cost.shares_casts and linear.same_input
    forward = 0 if shared else cost.input * x / memory
    backward = (cost.output_gradient * y + cost.weight_gradient * w * linear.weight_grad) / memory
    backward += cost.strided * (y + (x + w)) / strided
    weight = cost.weight * w / memory / 2
    return forward + weight, backward + weight


def seconds(step: Step, card: Card) -> dict[str, float]:
    """Seconds of a step in parts, which make `total`. `waits`: the card waits for the host, or for other cards."""
    parts = dict.fromkeys(("products", "attention", "casts", "rest", "optimizer", "waits"), 0.0)
    memory, compiled = card.memory * REACHED["memory"], step.compiled
    high = getattr(card, step.rate) * REACHED[step.rate]
    host = 0.0
    times = (1 + step.again, 1)  # of the passes
    for linear in step.work.linears:
        cost = step.cost if linear.name in step.fp8 else step.plain
        trained = linear.backward_products / 2
        for name, found in (("products", products(linear, step, card)), ("casts", casts(linear, step, card))):
            parts[name] += found[0] * times[0] + (found[1] if trained else 0)
        kernels = cost.kernels[0] * times[0] + cost.kernels[1] * trained
        host += kernels * (COMPILED if compiled else EAGER) + cost.host * (not compiled)
    of_attention = (card.bf16 if step.rate == "bf16" else high) * REACHED["attention"]
    for part, often in zip((step.work.forward, step.work.backward), times, strict=True):
        parts["products"] += often * max(part.flop, 0) / high
        parts["attention"] += often * part.attention / of_attention
        parts["rest"] += often * part.bytes * (FUSED_BYTES if compiled else 1) / memory
        host += often * part.kernels * (FUSED_KERNELS * COMPILED if compiled else EAGER)
    parts["rest"] += step.work.over_gradients / memory
    parts["optimizer"] = step.optimizer / memory
    passes = sum(parts.values()) - parts["optimizer"]

    sending = step.sent / (card.link * REACHED["link"])
    parts["rest"] += 2 * step.sent / memory  # what is sent is packed, what comes is unpacked
    hidden = min(sending, step.hidden_behind * passes)
    parts["waits"] = sending - hidden + CONTENTION * hidden
    parts["waits"] += max(host - passes, 0) + step.tensors * PER_TENSOR
    return parts | {"total": sum(parts.values())}


# ----------------------------------------------------------------------------------------------------- steps of configs


def high_precision(settings: Settings, compile: bool = False) -> Settings:
    """The same training in bf16."""
    return replace(settings, precision="bf16", fp8=FP8(), compile=compile)


def work_key(settings: Settings) -> estimate.Key:
    """The tracing that counts what a step computes. FP8 computes the same as bf16."""
    counted = settings if settings.precision == "fp32" else high_precision(settings)
    return estimate.tracing_keys(counted)[0]


def keys_of(settings: Settings) -> tuple[estimate.Key, estimate.Key, estimate.Key]:
    """The tracings that a config needs: its memory, its work, and which of its layers are in FP8."""
    single = replace(settings, strategy="single", num_processes=1)
    return estimate.tracing_keys(settings)[0], work_key(settings), estimate.tracing_keys(single)[0]


def step_of(settings: Settings, tracings: Mapping[estimate.Key, Any], accumulates: bool) -> Step:
    """The step of a config. tracings: those that `keys_of` names."""
    held, counted, converted = (tracings[key] for key in keys_of(settings))
    for tracing in (held, counted, converted):
        if isinstance(tracing, Refused):
            raise tracing
    work: Work = counted["work"]
    model = estimate.whole_model(settings, held)
    memory = costs.strategy_of(settings).memory(model, settings, accumulates)
    costs.backend_of(settings).adjust_memory(memory, model, settings)
    state = 2 * (memory.weights - model.frozen + memory.master + memory.optimizer) + memory.gradients
    fp8 = converted["fp8_linear"] if settings.precision == "fp8" else []
    inside = sum(
        {linear.name: linear.inputs * linear.outputs for linear in work.linears if linear.name in fp8}.values()
    )
    sent = costs.backend_of(settings).bytes_sent(settings, inside, model.elements - inside)
    if sent is None:
        raise Refused(f"{settings.strategy}: what it sends depends on the batch, no rule counts it")
    in_16_bit = counted["bf16_weights"] > counted["weights"] / 2  # as a script, or `prepare`, has left them
    work = replace(work, over_gradients=work.over_gradients * memory.gradients / counted["gradients"]["ordinary"])
    return Step(
        work=work,
        cost=costs.backend_of(settings).linear_cost(settings),
        plain=costs.LinearCost() if in_16_bit else costs.BackendCost().linear_cost(settings),
        fp8=frozenset(fp8),
        rate="fp32" if settings.precision == "fp32" and not in_16_bit else "bf16",
        compiled=settings.compile,
        again=float(settings.ckpt),
        optimizer=state * (1 if counted["fused"] or settings.precision == "fp8" else UNFUSED_OPTIMIZER),
        tensors=held["tensors"],
        sent=sent,
        hidden_behind=costs.strategy_of(settings).hidden_behind,
    )


def problem(settings: Settings, card: Card) -> str | None:
    """Why there is no time of a config on a card, or None."""
    if lines := list(settings.rules.problems(settings)):
        return lines[0]
    if settings.precision == "fp8" and not card.fp8:
        return f"{card.name} multiplies no FP8: use {settings.strategy}_bf16"
    if settings.offload:
        return "offloads to the host, whose speed nobody here knows"
    if settings.num_processes > PER_MACHINE:
        return f"{settings.num_processes} processes are several machines, whose network nobody here knows"
    machine = Machine("cuda", 1, card.name, card.capability, "13.0", PACKAGES)
    return next(rules_of(settings.fp8).problems(settings, machine), None)


def times(
    wanted: dict[str, Settings], recipe: Path, words: list[str], card: Card
) -> Iterator[tuple[str, dict[str, float] | Refused]]:
    """Yields (config, its seconds as `seconds` returns them); (config, the reason as Refused) where there are none.
    `bf16`, `bf16_compiled`: the seconds of the same strategy in bf16."""
    with progress.waiting(f"loading {recipe.stem}"):
        from tools.tracing import load  # imports torch

        module = load(recipe)
    reasons = {name: why for name, settings in wanted.items() if (why := problem(settings, card))}
    able = {name: settings for name, settings in wanted.items() if name not in reasons}
    keys = dict.fromkeys(
        key for asked in able.values() for each in (asked, high_precision(asked)) for key in keys_of(each)
    )
    yield from ((name, Refused(why)) for name, why in reasons.items())
    tracings = {}
    with estimate.two_at_a_time(module, words, keys) as made, progress.waiting("steps traced:", len(keys)) as bar:
        for key in keys:
            tracings[key] = made[key].get() if made else estimate.trace_or_reason(module, words, key)
            bar.update()
    accumulates = estimate.accumulates(recipe, words)
    for name, settings in able.items():
        try:
            step = step_of(settings, tracings, accumulates)
            found = seconds(step, card)
            for key, compiled in (("bf16", False), ("bf16_compiled", True)):
                reference = step_of(high_precision(settings, compiled), tracings, accumulates)
                found[key] = seconds(reference, card)["total"]
            if step.narrow and found["total"] < found["bf16_compiled"]:
                raise Refused(
                    f"no estimate: most of its products are of layers at most {NARROW:,} wide, which have gained less "
                    "where it was measured than is estimated here: time it on the card"
                )
            yield name, found | {"num_processes": settings.num_processes}
        except Refused as reason:
            yield name, reason


# ------------------------------------------------------------------------------------------------------------ the table


def verdict(fp8: bool, found: Mapping[str, float]) -> str:
    """What to say of an FP8 config."""
    if fp8 and found["total"] > found["bf16"]:
        return "FP8 makes this model slower"
    if fp8 and found["total"] > found["bf16_compiled"]:
        return "slower than compiled bf16"
    return ""


def show(recipe: str, card: Card, wanted: dict[str, Settings], found: dict[str, dict[str, float] | Refused]) -> None:
    shown = ("products", "attention", "casts", "rest", "optimizer", "waits")
    rows = [["config", "x", "ms", "/ bf16", "/ compiled", *shown, ""]]
    for name, parts in found.items():
        if not isinstance(parts, Refused):
            total = parts["total"]
            ratios = [f"{total / parts[key]:.2f}" for key in ("bf16", "bf16_compiled")]
            cells = [f"{1000 * parts[part]:,.1f}" for part in ("total", *shown)]
            said = verdict(wanted[name].precision == "fp8", parts)
            rows.append([name, str(wanted[name].num_processes), cells[0], *ratios, *cells[1:], said])
    print(
        f"{recipe} on {card.name}: ms of an optimizer step, estimated; / bf16 is the ratio to the same strategy in bf16"
    )
    for line in cli.columns(rows):
        print(f"  {line}")
    for name, reason in found.items():
        if isinstance(reason, Refused):
            print(f"  {name}: {reason}")
