"""What a difference between two configs is worth: statistics of pairs.

Runs of one seed are a pair: the same weights, the same samples, the same order. Their difference has far less chance in
it than the runs themselves. Over several seeds the mean of these differences gets a t interval (Student 1908), and the
interval gives the verdict:

    equal within 1%      the whole interval lies inside the margin: as two one-sided tests (Schuirmann 1987)
    higher by 2.3%       the whole interval lies on one side of zero, and not inside the margin
    cannot tell: ...     neither; the resolution is half the interval's width: a difference below it does not show

Everything is relative to the mean of the baseline over the same seeds.

Who looks several times and stops at the first verdict errs more often than each look does. So with several looks each
interval has the level 1 - 0.05 / looks (Bonferroni): these are repeated confidence intervals (Jennison and Turnbull,
"Interim analyses: the repeated confidence interval approach", JRSS B 51, 1989), which all hold together in 95% of
comparisons, whenever one stops. It spends the error in equal parts, so it holds for t intervals of few seeds too.
"""

import functools
import math
import statistics

from scipy import stats

ERROR = 0.05  # how often a verdict may be wrong, over all looks
FEWEST = 5  # pairs: of fewer, real runs' differences are too far from normal for t (results/paired.json)
MOST = 10_000  # seeds that anybody would be told to run


def level(looks=1):
    """Of each interval, where there are so many looks."""
    return 1 - ERROR / looks


def looks(most):
    """Numbers of seeds after which is looked: 8, 16, 32, ... up to `most`."""
    found = [8 * 2**i for i in range(20) if 8 * 2**i < most]
    return [*found, most]


@functools.cache
def quantile(confidence, freedom):
    return float(stats.t.ppf((1 + confidence) / 2, freedom))


def half_width(deviation, pairs, confidence):
    return quantile(confidence, pairs - 1) * deviation / math.sqrt(pairs)


def interval(differences, confidence=0.95):
    """(mean, low, high) of paired differences; of a single one there is no interval: (mean, None, None)."""
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, None, None
    half = half_width(statistics.stdev(differences), len(differences), confidence)
    return mean, mean - half, mean + half


def seeds_for(deviation, margin, confidence=0.95):
    """How many seeds make a difference of `margin` show, where differences deviate like this; None: too many."""
    if half_width(deviation, MOST, confidence) > margin:
        return None
    low, high = FEWEST - 1, MOST  # the least count is above low, and at most high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if half_width(deviation, middle, confidence) <= margin else (middle, high)
    return high


def judge(baseline, values, margin=0.01, confidence=0.95):
    """The verdict on `values` against `baseline`, numbers of the same seeds in the same order."""
    pairs, mean = len(values), statistics.fmean(baseline)
    differences = [value - before for value, before in zip(values, baseline, strict=True)]
    difference, low, high = interval(differences, confidence)
    found = {"pairs": pairs, "difference": difference, "relative": None, "interval": None, "deviation": None,
             "resolution": None, "more_seeds": None, "kind": "unknown"}  # fmt: skip
    if not mean or not math.isfinite(mean):
        return found | {"verdict": "cannot tell: the baseline is zero" if not mean else "cannot tell: not finite"}
    scale = abs(mean)
    found["relative"] = difference / scale
    if low is not None:
        found |= {"interval": [low / scale, high / scale], "resolution": (high - low) / 2 / scale}
        found["deviation"] = statistics.stdev(differences) / scale
    if pairs < FEWEST:
        return found | {
            "verdict": f"cannot tell: {FEWEST} seeds are needed, there {'are' if pairs > 1 else 'is'} {pairs}"
        }
    needed = seeds_for(found["deviation"], margin, confidence)
    found["more_seeds"] = max(0, needed - pairs) if needed is not None else None
    low, high = found["interval"]
    if -margin <= low and high <= margin:
        return found | {"kind": "equal", "verdict": f"equal within {percent(margin)}"}
    if low > 0 or high < 0:
        kind = "higher" if low > 0 else "lower"
        return found | {"kind": kind, "verdict": f"{kind} by {percent(abs(found['relative']))}"}
    words = f"cannot tell: a difference below {percent(found['resolution'])} does not show with {pairs} seeds"
    return found | {"verdict": words}


def chance(values):
    """What another seed does to a run: its standard deviation over `values` of unlike seeds, relative to their mean."""
    mean = statistics.fmean(values)
    if len(values) < 2 or not mean:
        return {"values": len(values), "deviation": None, "interval": None}
    deviation = statistics.stdev(values) / abs(mean)
    # Two groups of so many unlike seeds, as if they were two configs: what a comparison without pairs could see.
    half = quantile(level(), 2 * len(values) - 2) * deviation * math.sqrt(2 / len(values))
    return {"values": len(values), "deviation": deviation, "interval": [-half, half]}


def percent(share):
    """A share as few digits as say it: 1%, 0.34%, 12%."""
    value = 100 * share
    if value == 0:
        return "0%"
    return f"{value:.0f}%" if value >= 10 else f"{value:.2g}%"


def needs(found, margin):
    """What it would take to see a difference of the margin, in words."""
    if found.get("resolution") is None:
        return "-"
    shows = percent(found["resolution"])
    if found["pairs"] < FEWEST:
        return shows
    if found["more_seeds"] is None:
        return f"{shows}; more than {MOST:,} seeds for {percent(margin)}"
    return f"{shows}; {more(found['more_seeds'], margin)}" if found["more_seeds"] else shows


def more(seeds, margin):
    return f"{seeds} more seed{'s' * (seeds > 1)} for {percent(margin)}"
