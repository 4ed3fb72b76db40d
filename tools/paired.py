"""Statistics of pairs: is the difference between two configs significant?

Runs with the same seed are a pair: they share the weights, the samples and their order. The difference within a pair
varies far less than the runs themselves. The mean of these differences over several seeds gets a t interval (Student
1908), and the interval gives the verdict:

    equal within 1%      the whole interval lies inside the margin, as in two one-sided tests (Schuirmann 1987)
    higher by 2.3%       the whole interval lies on one side of zero, but not inside the margin
    cannot tell: ...     neither; the resolution is half the interval's width: smaller differences do not show

Everything is relative to the mean of the baseline over the same seeds.

If you look several times and stop at the first verdict, the verdict is wrong more often than a single look would be. So
with several looks each interval has the level 1 - 0.05 / looks (Bonferroni). These are repeated confidence intervals
(Jennison and Turnbull, "Interim analyses: the repeated confidence interval approach", JRSS B 51, 1989): all of them
hold together in 95% of comparisons, whenever you stop. Each look gets the same part of the error, so this also holds
for t intervals of few seeds.
"""

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any

ERROR = 0.05  # how often a verdict may be wrong, over all looks
FEWEST = 5  # pairs; with fewer, the differences of real runs are too far from normal (results/paired.json)
MOST = 10_000  # the largest number of seeds that is suggested


def level(looks: int = 1) -> float:
    """The confidence level of each interval if there are this many looks."""
    return 1 - ERROR / looks


def looks(most: int) -> list[int]:
    """The numbers of seeds after which to look: 8, 16, 32, ... up to `most`."""
    counts = [8 * 2**i for i in range(20) if 8 * 2**i < most]
    return [*counts, most]


@functools.cache
def quantile(confidence: float, freedom: int) -> float:
    from scipy import stats  # takes a second, too long before an error message

    return float(stats.t.ppf((1 + confidence) / 2, freedom))


def half_width(deviation: float, pairs: int, confidence: float) -> float:
    return quantile(confidence, pairs - 1) * deviation / math.sqrt(pairs)


def interval(differences: Sequence[float], confidence: float = 0.95) -> tuple[float, float | None, float | None]:
    """(mean, low, high) of paired differences; (mean, None, None) for a single pair, which has no interval."""
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, None, None
    half = half_width(statistics.stdev(differences), len(differences), confidence)
    return mean, mean - half, mean + half


def seeds_for(deviation: float, margin: float, confidence: float = 0.95) -> int | None:
    """The number of seeds with which a difference of `margin` shows, at this standard deviation; None: too many."""
    if half_width(deviation, MOST, confidence) > margin:
        return None
    low, high = FEWEST - 1, MOST  # the answer is above low and at most high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if half_width(deviation, middle, confidence) <= margin else (middle, high)
    return high


def judge(
    baseline: Sequence[float], values: Sequence[float], margin: float = 0.01, confidence: float = 0.95
) -> dict[str, Any]:
    """The verdict on `values` against `baseline`; both have one number per seed, in the same order."""
    pairs, mean = len(values), statistics.fmean(baseline)
    differences = [value - before for value, before in zip(values, baseline, strict=True)]
    difference, low, high = interval(differences, confidence)
    result: dict[str, Any] = {
        "pairs": pairs,
        "difference": difference,
        "relative": None,
        "interval": None,
        "deviation": None,
        "resolution": None,
        "more_seeds": None,
        "kind": "unknown",
    }
    if not mean or not math.isfinite(mean):
        return result | {"verdict": "cannot tell: the baseline is zero" if not mean else "cannot tell: not finite"}
    scale = abs(mean)
    result["relative"] = difference / scale
    if low is not None and high is not None:
        result |= {"interval": [low / scale, high / scale], "resolution": (high - low) / 2 / scale}
        result["deviation"] = statistics.stdev(differences) / scale
    if pairs < FEWEST:
        return result | {
            "verdict": f"cannot tell: {FEWEST} seeds are needed, there {'are' if pairs > 1 else 'is'} {pairs}"
        }
    needed = seeds_for(result["deviation"], margin, confidence)
    result["more_seeds"] = max(0, needed - pairs) if needed is not None else None
    low, high = result["interval"]
    if -margin <= low and high <= margin:
        return result | {"kind": "equal", "verdict": f"equal within {percent(margin)}"}
    if low > 0 or high < 0:
        kind = "higher" if low > 0 else "lower"
        return result | {"kind": kind, "verdict": f"{kind} by {percent(abs(result['relative']))}"}
    words = f"cannot tell: a difference below {percent(result['resolution'])} does not show with {pairs} seeds"
    return result | {"verdict": words}


def chance(values: Sequence[float]) -> dict[str, Any]:
    """How much the seed alone changes a result: the standard deviation of `values` over seeds, over their mean."""
    mean = statistics.fmean(values)
    if len(values) < 2 or not mean:
        return {"values": len(values), "deviation": None, "interval": None}
    deviation = statistics.stdev(values) / abs(mean)
    # The resolution of a comparison without pairs: two groups of this many different seeds.
    half = quantile(level(), 2 * len(values) - 2) * deviation * math.sqrt(2 / len(values))
    return {"values": len(values), "deviation": deviation, "interval": [-half, half]}


def percent(share: float) -> str:
    """A share with two significant digits: 1%, 0.34%, 12%."""
    value = 100 * share
    if value == 0:
        return "0%"
    return f"{value:.0f}%" if value >= 10 else f"{value:.2g}%"


def needs(result: dict[str, Any], margin: float) -> str:
    """A sentence: how many seeds would show a difference of the margin."""
    if result.get("resolution") is None:
        return "-"
    shows = percent(result["resolution"])
    if result["pairs"] < FEWEST:
        return shows
    if result["more_seeds"] is None:
        return f"{shows}; more than {MOST:,} seeds for {percent(margin)}"
    return f"{shows}; {more(result['more_seeds'], margin)}" if result["more_seeds"] else shows


def more(seeds: int, margin: float) -> str:
    return f"{seeds} more seed{'s' * (seeds > 1)} for {percent(margin)}"
