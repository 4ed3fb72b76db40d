"""tools/step_time.py and tools/work.py: what is counted of a step, its time on a card, and where FP8 is slower."""

import json
from dataclasses import replace

import pytest
import step_time as benchmark  # benchmarks/step_time.py
import torch
from conftest import CONFIGS, ROOT, SCRIPTS
from torch import nn

from shared.args import Refused
from tools import costs, estimate, step_time, tracing
from tools.work import Count, Linear, Work

H100, A100, RTX = (step_time.find_card(name) for name in ("H100", "A100", "RTX 4090"))


def settings(config, processes=None, **changed):
    return replace(estimate.read_config(CONFIGS / f"{config}.yml", processes), **changed)


def step(config, shapes, compiled=False, **more):
    """A step of Linear layers (M, K, N) alone under a config, all of them in FP8 if the config is."""
    asked = settings(config, compile=compiled)
    linears = [Linear(f"layer{number}", *shape) for number, shape in enumerate(shapes)]
    fp8 = [linear.name for linear in linears] if asked.backend else []
    plain = costs.BackendCost().linear_cost(asked)
    return step_time.Step(
        Work(linears), costs.backend_of(asked).linear_cost(asked), plain, fp8, compiled=compiled, **more
    )


def time(config, shapes, card=H100, compiled=False, **more):
    return step_time.seconds(step(config, shapes, compiled, **more), card)["total"]


LARGE, TINY = [(16384, 4096, 14336)] * 4, [(256, 192, 768)] * 4


@pytest.mark.parametrize(
    ("config", "shapes", "compiled", "faster"),
    [
        ("single_fp8", LARGE, True, True),
        ("single_fp8", LARGE, False, False),
        ("single_fp8", TINY, True, False),
        ("single_fp8", TINY, False, False),
        ("single_fp8_te", LARGE, False, True),
        ("single_fp8_te", TINY, False, False),
        ("single_fp8_msamp_o2", LARGE, False, True),
        ("single_fp8_msamp_o2", TINY, False, False),
        ("single_fp8_ao_rowwise", [(65536, 1664, 6656)], False, False),
        ("single_fp8_ao_mxfp8", LARGE, False, True),
        ("single_fp8_ao_mxfp8", TINY, False, False),
    ],
)
@pytest.mark.parametrize("card", ["H100", "H200", "B200"])
def test_fp8_is_faster_where_products_are_large_and_casts_are_fused(config, shapes, compiled, faster, card):
    card = step_time.find_card(card)
    assert (time(config, shapes, card, compiled) < time("single_bf16", shapes, card, compiled)) == faster


@pytest.mark.parametrize("card", step_time.CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize("dimension", range(3))
@pytest.mark.parametrize("config", ["single_bf16", "single_fp32", "single_fp8", "single_fp8_msamp_o2", "single_fp8_te"])
def test_a_larger_layer_takes_longer(config, card, dimension):
    card = card if card.fp8 else replace(card, fp8=card.bf16)
    times = []
    for size in (128, 512, 1024, 4096, 16384):
        shape = [4096, 4096, 4096]
        shape[dimension] = size
        times.append(time(config, [tuple(shape)], card))
    assert times == sorted(times)


def test_a_better_card_is_faster_and_more_work_takes_longer():
    assert time("single_bf16", LARGE, A100) > time("single_bf16", LARGE) > time("single_bf16", LARGE, RTX) / 10
    plain = time("single_bf16", LARGE)
    for more in ({"again": 1}, {"optimizer": 1e10}, {"sent": 1e11}, {"tensors": 1000}):
        assert time("single_bf16", LARGE, **more) > plain
    hidden, exposed = (time("single_bf16", LARGE, sent=1e9, hidden_behind=part) for part in (0.9, 0))
    assert plain < hidden < exposed


@pytest.mark.parametrize(("config", "compiled"), [("single_fp8", True), ("single_fp8_msamp_o2", False)])
def test_layers_of_the_same_input_share_its_cast(config, compiled):
    alone = step(config, LARGE, compiled)
    shared = Work([replace(linear, same_input=True) for linear in alone.work.linears])
    first, second = (step_time.seconds(replace(alone, work=work), H100)["casts"] for work in (alone.work, shared))
    assert second < first
    assert not step(config, LARGE, not compiled).cost.shares_casts


@pytest.mark.parametrize(("text", "name"), [("h100", "H100"), ("RTX 4090", "RTX 4090"), ("4090", "RTX 4090")])
def test_cards_by_name(text, name):
    assert step_time.find_card(text).name == name


def test_a_card_that_is_not_known():
    with pytest.raises(
        Refused, match="--time H10: did you mean H100\\? The cards are H100, H200, B200, A100, RTX 4090"
    ):
        step_time.find_card("H10")


@pytest.mark.parametrize(
    ("config", "card", "why"),
    [
        ("single_fp8_msamp_o2", A100, "A100 multiplies no FP8: use single_bf16"),
        ("fsdp_bf16_offload", H100, "offloads to the host"),
        ("single_fp8_te_mxfp8", H100, "mxfp8 needs compute capability 10.0 to 11.x, H100 has 9.0"),
        ("single_fp8_ao_mxfp8", H100, "ao mxfp8 needs compute capability 10.x, H100 has 9.0"),
        ("single_fp8_ao_mxfp4", step_time.find_card("B200"), "neither torchao nor TransformerEngine trains MXFP4"),
        ("single_fp8_te_block", RTX, "te block needs compute capability 9.0"),
    ],
)
def test_what_has_no_time(config, card, why):
    assert why in step_time.problem(settings(config), card)
    assert step_time.problem(settings("fsdp_bf16", 16), H100).startswith("16 processes are several machines")
    assert step_time.problem(settings("single_bf16"), card) is None


def test_bytes_that_msamps_levels_send_are_those_that_were_counted():
    comm = json.loads((ROOT / "results" / "amp8_comm.json").read_text())["wire_4"]["of_fp32_ddp"]
    fsdp = json.loads((ROOT / "results" / "amp8_fsdp.json").read_text())["ways"]["4"]["O2"]["converted_of_fp32"]
    for strategy, counted in (("ddp", comm), ("fsdp", fsdp)):
        levels, fp32 = (settings(f"{strategy}_{name}", 4) for name in ("fp8_msamp_o2", "fp32"))
        sent = costs.backend_of(levels).bytes_sent(levels, 1e6, 0) / costs.backend_of(fp32).bytes_sent(fp32, 0, 1e6)
        assert sent == pytest.approx(counted, rel=1e-3)
    gathers, plain = (settings(f"fsdp_{name}", 4) for name in ("fp8", "bf16"))  # 2 gathers in FP8, a reduction in fp32
    both = costs.backend_of(gathers).bytes_sent(gathers, 1e6, 1e6)
    assert both - costs.strategy_of(plain).bytes_sent(plain, 1e6) == pytest.approx((2 * 1 + 4) * 1e6 * 3 / 4)


# -------------------------------------------------------------------------------------------------------- what is counted


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False), nn.Linear(64, 16)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        scores = q @ k.transpose(-1, -2)
        return self.out((scores @ k).relu())


def counted(*shape, cast=False):
    model, count, x = Net(), Count(), torch.randn(*shape, 32)
    count.watch(model.named_modules())
    with count, torch.autocast("cpu", torch.bfloat16, enabled=cast):
        model(x).sum().backward()
    return count.work


def test_each_linear_layer_is_counted_with_its_shape():
    work = counted(2, 8)
    assert work.linears == [
        Linear("q", 16, 32, 64, input_grad=False),
        Linear("k", 16, 32, 64, input_grad=False, same_input=True),
        Linear("out", 16, 64, 16),
    ]
    assert work.forward.flop == 2 * (2 * 8 * 64 * 8) * 2 and work.backward.flop == 2 * work.forward.flop, "two products"
    relu, sum, ones = 2 * (16 * 64 * 4), 16 * 16 * 4 + 4, 4 + 4
    assert work.forward.bytes == relu + sum + ones, "what each reads and writes; `backward` begins with ones"


def test_casts_of_weights_are_left_to_the_rule_of_the_precision():
    plain, cast = counted(2, 8), counted(2, 8, cast=True)
    assert cast.linears == plain.linears and cast.forward.flop == plain.forward.flop
    weights = (32 * 64 * 2 + 64 * 16) * (4 + 2)
    x = 2 * 16 * 32 * (4 + 2)  # each of q and k casts it
    assert cast.forward.bytes < plain.forward.bytes + x + weights / 2


# ----------------------------------------------------------------------------------------------------------- the command


def said(capsys, *argv):
    code = estimate.main(list(argv))
    return code, capsys.readouterr().out


def test_the_command_on_a_recipe(capsys):
    configs = ["single_bf16", "single_fp8", "single_fp8_msamp_o2"]
    code, text = said(capsys, "--time", "h100", *configs, "--", "vit", "--dataset", "synthetic")
    assert code == 0 and "vit on H100: ms of an optimizer step" in text
    lines = {line.split()[0]: line for line in text.splitlines()[2:]}
    assert [*lines] == configs and " 1.00 " in lines["single_bf16"]
    assert all("FP8 makes this model slower" in lines[name] for name in configs[1:])
    code, text = said(capsys, "--time", "A100", "single_fp8", "--", "vit", "--dataset", "synthetic")
    assert code == 1 and "single_fp8: A100 multiplies no FP8: use single_bf16" in text


def test_the_command_on_a_script_of_ones_own(capsys, tmp_path):
    words = [str(SCRIPTS / "traced.py"), "--output_dir", str(tmp_path / "run")]
    found = {}
    for width in (256, 16384):
        code, text = said(
            capsys, "--time", "H100", "--json", "single_bf16", "single_fp8_msamp_o2", "--", *words, str(width)
        )
        assert code == 0
        found[width] = json.loads(text)["configs"]
    small, large = (found[width]["single_fp8_msamp_o2"] for width in found)
    assert small["total"] > small["bf16"] and large["total"] < large["bf16"], "8 rows: the optimizer is all there is"
    assert large["bf16"] == found[16384]["single_bf16"]["total"]


def test_no_gain_is_estimated_in_narrow_layers(capsys):
    words = ["single_bf16_compile", "single_fp8_compile", "--", "vit", "--dataset", "synthetic", "--model", "vit_huge"]
    code, text = said(capsys, "--time", "H200", *words)
    assert code == 0 and "single_fp8_compile: no estimate: most of its products are of layers" in text


def test_msamps_optimizer_moves_what_its_formats_hold():
    """O2 reads and writes a weight of 2, moments of 1 and 2 bytes, and reads a gradient of 1; outside its layers a
    weight of 4 and a gradient of 4."""
    asked, recipe = settings("single_fp8_msamp_o2"), tracing.load(estimate.find.recipe("vit"))
    words = ["--dataset", "synthetic"]
    tracings = {key: estimate.trace_or_reason(recipe, words, key) for key in step_time.keys_of(asked)}
    made = step_time.step_of(asked, tracings, False)
    inside = sum(linear.inputs * linear.outputs for linear in made.work.linears if linear.name in made.fp8)
    whole = tracings[step_time.work_key(asked)]["parameters"]
    assert len(made.fp8) > 10
    assert made.optimizer == pytest.approx(11 * inside + 18 * (whole - inside), rel=0.02)


# --------------------------------------------------------------------------------------------------- against what others saw


def test_published_ratios():
    rows = json.loads((ROOT / "results" / "step_time.json").read_text())["rows"]
    wrong = [(row["what"], row["source"].split("/")[-1]) for row in rows if not row["sign"]]
    assert wrong == [
        ("one layer 65536 x 1664 x 6656: rowwise compiled", "LOG.md"),
        ("one layer 16384 x 8192 x 1280: FP8 compiled", "116"),
        ("Llama 8B, 4 blocks, 8,192 tokens: MS-AMP's O2", "fp8_speed.json"),  # 1.00 measured, 0.97 estimated
        ("ViT-Huge, 16 blocks, 64 images: torchao compiled", "fp8_speed.json"),  # 1.08, 0.87: narrow layers
        ("ViT-Huge, 16 blocks, 64 images: MS-AMP's O2 compiled", "fp8_speed.json"),  # over bf16 and compiled bf16:
        ("ViT-Huge, 16 blocks, 64 images: MS-AMP's O2 compiled", "fp8_speed.json"),  # the host was slow there
        ("ViT-Huge, 16 blocks, 64 images, H200: MS-AMP's O2 compiled", "speed.json"),
        ("ViT-Huge, 16 blocks, 64 images, H200: torchao compiled", "speed.json"),
    ]
    ours = [row for row in rows if row["source"] == "results/fp8_speed.json"]
    far = [row["what"].split(": ")[1] for row in ours if not row["within"]]
    # Not compiled: 1.79 measured, 1.27 estimated.
    h200 = [row for row in rows if row["source"] == "results/h200/speed.json"]
    assert len(h200) == 6 and all(row["within"] and row["sign"] for row in h200 if "Llama" in row["what"])
    assert len(ours) == 12 and far == ["torchao"] * 2 + ["torchao compiled"] * 2 + ["MS-AMP's O2 compiled"] * 2
    rows = [row for row in rows if row not in ours and row not in h200]
    trainings = [row for row in rows if row["training"]]
    assert len(trainings) == 13 and all(row["sign"] and row["within"] for row in trainings)
    assert sum(row["within"] for row in rows) > 0.7 * len(rows)
    for row in rows:
        for name in ("published", "estimated"):
            assert row[f"{name}_ratio"] == pytest.approx(row[name][0] / row[name][1])
        assert row["source"].startswith("https://")


def test_the_committed_rows_are_those_of_todays_rates():
    """After a change of a rate or a rule: python benchmarks/step_time.py --output results/step_time.json"""
    made = json.loads((ROOT / "results" / "step_time.json").read_text())
    assert made["reached"] == step_time.REACHED
    committed = {row["what"]: row["estimated_ratio"] for row in made["rows"]}
    for row in benchmark.single_layers():
        assert committed[row["what"]] == pytest.approx(row["estimated_ratio"])


@pytest.mark.parametrize(
    ("fp8", "total", "said"),
    [
        (True, 1.1, "FP8 makes this model slower"),
        (True, 0.9, "slower than compiled bf16"),
        (True, 0.7, ""),
        (False, 1.1, ""),
    ],
)
def test_the_verdict_on_a_config(fp8, total, said):
    found = {"total": total, "bf16": 1.0, "bf16_compiled": 0.8}
    assert step_time.verdict(fp8, found) == said


def test_published_steps_that_fp8_slowed_against_the_estimate_are_of_narrow_layers():
    """Why narrow layers get no estimate of a gain. The one row of wide layers is within 0.03 of 1."""
    rows = json.loads((ROOT / "results" / "step_time.json").read_text())["rows"]
    wrong = [row for row in rows if row["published_ratio"] > 1.02 and row["estimated_ratio"] < 1]
    assert wrong and all("ViT-Huge" in row["what"] or "x 1280" in row["what"] for row in wrong), wrong
