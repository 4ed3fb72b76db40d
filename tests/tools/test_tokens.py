"""tools/tokens.py: what a difference of losses costs in tokens, and how often its interval is wrong."""

import math

import numpy as np
import pytest

from tools import report, tokens

BUDGETS = (1, 2, 4)


def power_law(budget):
    """A loss that falls as of a language model: with an irreducible part (arXiv:2203.15556)."""
    return 1.5 + 2 * np.asarray(budget, float) ** -0.3


def straight(budget):
    return 5 - 0.7 * np.log(budget)


def drawn(generator, law, share, at, seeds=5, noise=0.004, budgets=BUDGETS):
    """(baseline, values) of a config that needs `share` more tokens; a seed moves all its losses by 20%."""
    luck = 1 + 0.2 * generator.normal(size=seeds)
    baseline = [law(budget) * luck + noise * generator.normal(size=seeds) for budget in budgets]
    return baseline, law(budgets[at] / (1 + share)) * luck + noise * generator.normal(size=seeds)


@pytest.mark.parametrize("share", [-0.2, 0.0, 0.014, 0.3])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_without_noise_the_share_is_found(share, at):
    baseline, values = drawn(np.random.default_rng(0), straight, share, at, noise=0)
    found = tokens.cost(BUDGETS, baseline, values, at)
    assert found["share"] == pytest.approx(share, abs=1e-4)
    assert found["interval"] == [pytest.approx(share, abs=1e-3)] * 2
    baseline, values = drawn(np.random.default_rng(0), power_law, share, at, noise=0)
    assert tokens.cost(BUDGETS, baseline, values, at)["share"] == pytest.approx(share, abs=0.015)


def test_for_a_line_it_is_fiellers_interval():
    """Written from Fieller's formula, for the ratio of the mean difference and the mean slope."""
    baseline, values = drawn(np.random.default_rng(1), straight, 0.05, 1, seeds=8, noise=0.01, budgets=(1, 2))
    low, high = tokens.cost((1, 2), baseline, values, 1)["interval"]
    differences, slopes = values - baseline[1], (baseline[0] - baseline[1]) / math.log(2)
    (vd, c), (_, vs) = np.cov(differences, slopes) / 8
    d, s, t2 = differences.mean(), slopes.mean(), 2.364624**2  # t of 7 degrees of freedom
    roots = np.roots([s * s - t2 * vs, -2 * (d * s - t2 * c), d * d - t2 * vd])
    assert sorted(np.exp(roots) - 1) == [pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4)]


@pytest.mark.parametrize("law", [straight, power_law])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("share", [0.0, 0.014, 0.1])
def test_its_intervals_are_wrong_in_five_percent(law, at, share):
    generator, times = np.random.default_rng(7), 2000
    holds = 0
    for _ in range(times):
        low, high = tokens.cost(BUDGETS, *drawn(generator, law, share, at), at)["interval"]
        holds += (low is None or low <= share) and (high is None or share <= high)
    assert 0.93 < holds / times < 0.97, holds / times


def test_ten_percent_lost_tokens_are_found():
    generator, times = np.random.default_rng(3), 200
    lows = [tokens.cost(BUDGETS, *drawn(generator, power_law, 1 / 0.9 - 1, 2), 2)["interval"][0] for _ in range(times)]
    assert sum(low is not None and low > 0 for low in lows) > 0.95 * times


def test_what_the_losses_do_not_say_is_open():
    generator = np.random.default_rng(4)
    baseline, values = drawn(generator, straight, 0.0, 2, seeds=4)
    found = tokens.cost(BUDGETS, baseline, values, 2)
    assert found["interval"] == [None, None] and found["why"] == "5 seeds are needed" and abs(found["share"]) < 0.05
    baseline, values = drawn(generator, straight, 0.0, 2, noise=0.8)
    assert None in tokens.cost(BUDGETS, baseline, values, 2)["interval"]
    baseline, values = drawn(generator, straight, 0.0, 2, noise=0)
    assert tokens.cost(BUDGETS, baseline, values + 3, 2)["why"] == "above +500%"
    assert tokens.cost(BUDGETS, baseline, values - 3, 2)["why"] == "below -33%"
    rising = tokens.cost(BUDGETS, baseline[::-1], values, 2)
    assert rising["share"] is None and rising["why"] == "the baseline's loss does not fall with more tokens"
    assert report.token_words({"share": 0.014, "interval": [0.006, None], "why": None}) == "+1.4% (+0.6% to open)"
