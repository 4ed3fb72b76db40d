"""tools/paired.py: verdicts on pairs, and how often they are wrong."""

import numpy as np
import pytest
from scipy import stats

from tools import paired

BASE = [0.30, 0.20, 0.25, 0.28, 0.22, 0.26, 0.24, 0.25]  # other seeds differ by 13%


def moved(by, noise=0.0):
    signs = (1, -1, 1, -1, 1, -1, 1, -1)
    return [value + 0.25 * (by + noise * sign) for value, sign in zip(BASE, signs, strict=True)]


def test_the_interval_is_scipys():
    values = moved(0.01, 0.02)
    found = paired.judge(BASE, values)
    differences = np.subtract(values, BASE)
    low, high = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert found["interval"] == pytest.approx([low / np.mean(BASE), high / np.mean(BASE)])
    assert found["resolution"] == pytest.approx((high - low) / 2 / np.mean(BASE))
    assert found["relative"] == pytest.approx(0.01) and found["difference"] == pytest.approx(0.0025)


def test_the_four_verdicts():
    assert paired.judge(BASE, moved(0.001, 0.005))["verdict"] == "equal within 1%"
    assert paired.judge(BASE, moved(0.03, 0.02))["verdict"] == "higher by 3%"
    assert paired.judge(BASE, moved(-0.03, 0.02))["verdict"] == "lower by 3%"
    found = paired.judge(BASE, moved(0.0, 0.05))
    assert found["kind"] == "unknown"
    assert found["verdict"] == "cannot tell: a difference below 4.5% does not show with 8 seeds"


def test_small_but_certain_is_equal_and_a_narrower_margin_tells():
    values = moved(0.005, 0.001)
    assert paired.judge(BASE, values)["kind"] == "equal"
    assert paired.judge(BASE, values, margin=0.002)["verdict"] == "higher by 0.5%"


def test_pairs_see_what_unlike_seeds_hide():
    found = paired.judge(BASE, moved(0.03, 0.02))
    low, high = paired.chance(BASE)["interval"]
    assert found["kind"] == "higher" and low < -0.1 and high > 0.1


def test_few_pairs_and_a_baseline_of_zero_are_no_verdict():
    assert paired.judge(BASE[:1], [0.31])["verdict"] == "cannot tell: 5 seeds are needed, there is 1"
    found = paired.judge(BASE[:2], [0.31, 0.21])
    assert found["verdict"] == "cannot tell: 5 seeds are needed, there are 2" and found["interval"] is not None
    assert paired.judge([0.0] * 4, [1.0] * 4)["kind"] == "unknown"
    assert paired.chance([1.0])["deviation"] is None


def test_the_seeds_it_says_are_enough_and_one_fewer_is_not():
    for deviation, margin in ((0.03, 0.01), (0.01, 0.01), (0.2, 0.05)):
        count = paired.seeds_for(deviation, margin)
        assert paired.half_width(deviation, count, 0.95) <= margin < paired.half_width(deviation, count - 1, 0.95)
    assert paired.seeds_for(0.0, 0.01) == paired.FEWEST and paired.seeds_for(100.0, 0.01) is None


def test_what_it_takes_in_words():
    found = paired.judge(BASE, moved(0.0, 0.05))
    assert paired.needs(found, 0.01) == f"4.5%; {found['more_seeds']} more seeds for 1%" and found["more_seeds"] > 90
    assert paired.needs(paired.judge(BASE, moved(0.0, 0.005)), 0.01) == "0.45%"


def test_no_difference_is_called_one_in_at_most_five_percent_and_looking_again_changes_nothing():
    """Without a difference at most 5% of 400 comparisons find one, also with looks after 8 and 16 seeds and a stop at
    the first verdict."""
    generator, wrong, stopped = np.random.default_rng(0), 0, 0
    looks = paired.looks(16)
    assert looks == [8, 16] and paired.looks(40) == [8, 16, 32, 40] and paired.looks(6) == [6]
    for _ in range(400):
        base = generator.normal(1, 0.2, 16)
        values = base + generator.normal(0, 0.03, 16)
        wrong += paired.judge(list(base[:8]), list(values[:8]))["kind"] in ("higher", "lower")
        kinds = [paired.judge(list(base[:n]), list(values[:n]), 0.01, paired.level(2))["kind"] for n in looks]
        stopped += next((kind for kind in kinds if kind != "unknown"), None) in ("higher", "lower")
    assert 0 < wrong / 400 <= 0.07 and stopped / 400 <= 0.05


def test_twice_the_resolution_is_found():
    """A difference of twice the stated resolution is found, in the same runs and in new ones."""
    generator, own, found, usual = np.random.default_rng(1), 0, 0, 0.0
    for at in range(600):
        base = generator.normal(1, 0.2, 8)
        values = base + generator.normal(0, 0.03, 8)
        if at < 300:
            shows = paired.judge(list(base), list(values))["resolution"]
            usual += shows / 300
            own += paired.judge(list(base), list(values + 2 * shows * base.mean()))["kind"] == "higher"
        else:
            found += paired.judge(list(base), list(values + 2 * usual))["kind"] == "higher"
    assert own / 300 >= 0.95 and found / 300 >= 0.9
