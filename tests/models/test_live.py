"""What a script sees of its model is what trains: each row of tests/scripts/habits.py, under each strategy and precision,
is as in plain torch, or refused in one line. The cells that are not QUICK are slow."""

import functools
import re

import pytest
import torch
import yaml
from accelerate import DDPCommunicationHookType
from conftest import CONFIGS, Ranks
from habits import NEED_BLOCKS, ROWS, WITHOUT_EFFECT, Net, llama, main, trained

PRECISIONS = {
    "fp32": {"mixed_precision": "no"},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16"},
    "ao": {"mixed_precision": "fp8", "fp8_config": {"backend": "AO", "recipe": "tensorwise"}},
    "te": {"mixed_precision": "fp8", "fp8_config": {"backend": "TE", "recipe": "delayed", "amax_history_len": 4}},
} | {
    level: {"mixed_precision": "fp8", "fp8_config": {"backend": "MSAMP", "opt_level": level.upper()}}
    for level in ("o1", "o2", "o3")
}
STRATEGIES = {"single": "o1 o2 o3", "ddp": "o1 o2 o3", "fsdp": "o1 o2", "hsdp": "o1 o2", "tp": "", "fsdp_tp": "",
              "zero1": "", "zero2": "", "zero3": ""}  # fmt: skip
SPLIT = ("tp", "fsdp_tp")
CELLS = [  # (strategy, precision) that run on a CPU
    (strategy, precision)
    for strategy, levels in STRATEGIES.items()
    for precision in ["fp32", "bf16", "fp16"] + ([] if strategy in SPLIT else ["ao", "te", *levels.split()])
]
IN_FP64 = {("single", "fp32"), ("ddp", "fp32"), ("fsdp", "fp32"), ("hsdp", "fp32")}
EXACT = 1e-9  # relative, in fp64: sums of other orders, over four steps of AdamW
# The part of its effect in torch, and of the whole way that training goes, by which a row may be off elsewhere. A row that
# is ignored is off by 1. Training in FP8 is off by a fifth: where a gradient is small AdamW makes a whole step of its sign.
NEAR = 0.5


def config(folder, strategy, precision):
    """The path of a config. Those of bf16 are shipped, the others made from them."""
    values = yaml.safe_load((CONFIGS / f"{strategy}_bf16.yml").read_text()) | PRECISIONS[precision]
    path = folder / f"{strategy}_{precision}.yml"
    path.write_text(yaml.safe_dump(values))
    return path


@functools.cache
def plain(row, dtype, make):
    return trained(row, dtype=dtype, make=make)


def away(ours, right, names=None):
    """The norm of the difference of two models' weights."""
    names = right.keys() if names is None else names
    return sum((ours[name].double() - right[name].double()).square().sum().item() for name in names) ** 0.5


def dtype_of(row, strategy, precision):
    exact = (strategy, precision) in IN_FP64 and row != "model.bfloat16() before prepare"
    return torch.float64 if exact else torch.float32


def outcomes(rows, strategy, precision, folder, **options):
    """Yields (row, "right", figures), (row, "refused", line) or (row, "wrong", why). The rows share a launch until one of
    them ends it; the next one begins another. options: of DDP."""
    make, left = llama if strategy in SPLIT else Net, list(rows)
    while left:
        here = folder / str(len(left)) / "run"
        here.mkdir(parents=True)
        dtypes = [dtype_of(row, strategy, precision) for row in left]
        ranks = Ranks(
            config(folder, strategy, precision),
            ["--output_dir", str(here)],
            script=functools.partial(main, left, dtypes, make, **options),
        )
        codes, text = ranks.wait(), ranks.text()
        done = len(list(here.glob("*.pt")))
        for number, row in enumerate(left[:done]):
            yield row, *judged(row, dtypes[number], make, torch.load(here / f"{number}.pt"))
        left = left[done:]
        if left:
            yield left.pop(0), *ended(codes, text)
        elif set(codes) != {0}:
            yield "the end", "wrong", f"exit codes {codes}: {text[-1500:]}"


def ended(codes, text):
    """What a row is that has ended its launch."""
    refusal = re.findall(r"^refused: (.*)", text, re.MULTILINE)
    if set(codes) == {2} and len(refusal) == 1 and "Traceback" not in text:
        return "refused", refusal[0]
    return "wrong", f"exit codes {codes}: {text[-1500:]}"


def judged(row, dtype, make, found):
    (first, right, seen), (ours, mine) = plain(row, dtype, make), found
    _, ignored, _ = plain("nothing", dtype, make)
    weight = make().weight
    figures = {"of_its_way": away(ours, right) / away(right, first), "of_its_effect": 0}
    if row not in WITHOUT_EFFECT:
        figures["of_its_effect"] = away(ours, right, [weight]) / away(right, ignored, [weight])
    figures["of_what_it_reads"] = max((abs(a - b) / b for a, b in zip(mine, seen, strict=True)), default=0)
    bound = EXACT if dtype == torch.float64 else NEAR
    return ("right" if max(figures.values()) < bound else "wrong"), figures


OF_ENGINE = ["loss.backward() alone", "loss.backward() alone, and an evaluation", "p.grad.mul_(0)", "p.grad[:n] = 0",
             "p.grad = -p.grad", "p.grad is read", "optimizer.load_state_dict",
             "model.zero_grad(set_to_none=False) before a step",
             "optimizer.zero_grad(set_to_none=False) before a step"]  # fmt: skip
RELEASED = ["p.data.clamp_ after prepare", "p.data.clamp_ between backward and step", "nn.init after prepare",
            "load_state_dict after a step", "a penalty over model.parameters()", "another Parameter after prepare"]  # fmt: skip
# What a gradient scaler multiplies, or does not, in torch as here.
OF_THE_SCALE = ["p.grad is read", *(row for row in ROWS if row.startswith("loss.backward()"))]
# What strategies/guard.py refuses, each time with the end of a launch.
GUARDED = {"zero1": OF_ENGINE, "zero2": OF_ENGINE, "zero3": OF_ENGINE + RELEASED} | dict.fromkeys(
    ("fsdp", "hsdp", *SPLIT), ["p.grad[:n] = 0", "a penalty over model.parameters()"]
)


def rows_of(strategy, precision):
    left_out = GUARDED.get(strategy, []) + (list(NEED_BLOCKS) if strategy in SPLIT else [])
    left_out += OF_THE_SCALE if precision == "fp16" else []
    return [row for row in ROWS if row not in left_out]


# where most was lost; CI runs those that slow.txt names, too
QUICK = {("zero1", "bf16"), ("zero2", "bf16"), ("fsdp", "bf16")}


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [pytest.param(*cell, marks=[] if cell in QUICK else [pytest.mark.slow]) for cell in CELLS],
)
def test_what_a_script_does_has_torchs_effect_or_is_refused(tmp_path, strategy, precision):
    rows = rows_of(strategy, precision)
    found = list(outcomes(rows, strategy, precision, tmp_path))
    assert [row for row, *_ in found] == rows
    assert not [one for one in found if one[1] == "wrong"]
    assert strategy not in GUARDED or precision not in ("fp32", "bf16") or {end for _, end, _ in found} == {"right"}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", GUARDED)
def test_what_another_engine_cannot_do_as_torch_is_refused(tmp_path, strategy):
    found = list(outcomes(GUARDED[strategy], strategy, "bf16", tmp_path))
    assert [(row, end) for row, end, _ in found] == [(row, "refused") for row in GUARDED[strategy]]


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, "fp32"),
        ({"static_graph": True}, "fp32"),
        ({"comm_hook": DDPCommunicationHookType.BF16}, "bf16"),  # which is not compared in fp64
    ],
)
def test_ddp_keeps_its_options_when_parameters_are_thawed(tmp_path, options, precision):
    rows = ["thawed after a step", "frozen after a step"]
    assert [end for _, end, _ in outcomes(rows, "ddp", precision, tmp_path, **options)] == ["right", "right"]


@pytest.mark.parametrize("make", [Net, llama])
def test_in_torch_each_row_has_an_effect_that_is_larger_than_what_fp8_rounds(make):
    first, ignored, _ = plain("nothing", torch.float32, make)
    weight = make().weight
    for row in ROWS.keys() - WITHOUT_EFFECT - (NEED_BLOCKS if make is llama else set()):
        _, right, _ = plain(row, torch.float32, make)
        assert away(right, ignored, [weight]) > 0.4 * away(ignored, first, [weight]), row
