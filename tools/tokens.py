"""What a config costs in tokens: how many more of them it needs to reach the baseline's loss.

The baseline is trained at several budgets, each with a schedule of its own. A curve through its losses says after how
many tokens T' it has the loss that a config has after T. The config then needs T / T' as many tokens: 1.014 is 1.4%
more. Two configs whose losses differ by 0.1% may differ by 5% in tokens, or by 0.5%: it depends on how fast the loss
falls at that point.

Each seed has a curve, the parabola in the logarithm of the tokens that fits the baseline's losses of that seed (a line
for two budgets). For each T' in question, the config's loss less the curve's value at T' is one number per seed. T'
lies in the interval unless Student's t says that their mean is not zero. So pairs stay pairs, and the noise of the
baseline's own losses counts. For a straight line this is Fieller's interval ("Some problems in interval estimation",
JRSS B 16, 1954); like it, it is open where the losses say nothing.

The interval holds the chance of the runs. The form of the curve is not in it: in results/tokens.json 90% of the steps,
11.1% more tokens, are found as 12.0%.

A curve is believed from the smallest budget over 1.5 to the largest times 1.5, where it falls.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tools import paired

BEYOND = 1.5  # as far beyond the budgets a curve is believed
POINTS = 801


def curve(budgets: Sequence[float], points: "np.ndarray") -> "np.ndarray":
    """Weights (points, budgets): the curve's value at each point is their product with the losses at the budgets."""
    powers = range(min(len(budgets), 3))
    middle = np.log(budgets).mean()
    known, wanted = (np.stack([(x - middle) ** power for power in powers], -1) for x in (np.log(budgets), points))
    return wanted @ np.linalg.pinv(known)


def cost(
    budgets: Sequence[float],
    baseline: Sequence[Sequence[float]],
    values: Sequence[float],
    at: int,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """How many more tokens a config needs than the baseline for the same loss.

    budgets: tokens, steps or any multiple of them, at least two, ascending. baseline: the losses at each budget, a list
    with one number per seed. values: the config's losses at budgets[at], of the same seeds in the same order.

    Returns share, 0.014 for 1.4% more, None where the curve does not reach the config's loss; interval, [low, high],
    None for an end that is open or without enough seeds; why, a reason for what is None, or None."""
    seeds = len(values)
    points = np.linspace(math.log(budgets[0] / BEYOND), math.log(budgets[-1] * BEYOND), POINTS)
    curves = curve(budgets, points) @ np.asarray(baseline, float)  # (points, seeds)
    falls = np.diff(curves.mean(1)) < 0
    here = int(np.abs(points - math.log(budgets[at])).argmin())
    if not falls[min(here, len(falls) - 1)]:
        return {"share": None, "interval": [None, None], "why": "the baseline's loss does not fall with more tokens"}
    rises = np.flatnonzero(~falls)  # of the part around `here` that falls
    first = int(rises[rises < here].max(initial=-1)) + 1
    last = int(rises[rises > here].min(initial=len(falls)))
    points, curves = points[first : last + 1], curves[first : last + 1]
    shares = np.exp(math.log(budgets[at]) - points) - 1  # falls from the fewest tokens of the baseline to the most
    residuals = np.asarray(values, float) - curves
    mean = residuals.mean(1)
    share, why = crossing(mean, shares), None
    if share is None:
        why = f"above {shares[0]:+.0%}" if mean[0] > 0 else f"below {shares[-1]:+.0%}"
    if seeds < paired.FEWEST:
        return {"share": share, "interval": [None, None], "why": why or f"{paired.FEWEST} seeds are needed"}
    half = paired.quantile(confidence, seeds - 1) * residuals.std(1, ddof=1) / math.sqrt(seeds)
    # Where even the upper end is below zero, the baseline has a higher loss: it has seen fewer tokens than the config.
    high, low = crossing(mean + half, shares), crossing((half - mean)[::-1], shares[::-1])
    return {"share": share, "interval": [low, high], "why": why}


def crossing(values: "np.ndarray", shares: "np.ndarray") -> float | None:
    """The share at which the values first become positive; None where they begin so, or never are."""
    above = np.flatnonzero(values > 0)
    if not len(above) or above[0] == 0:
        return None
    at = int(above[0])
    part = -values[at - 1] / (values[at] - values[at - 1])
    return float(shares[at - 1] + part * (shares[at] - shares[at - 1]))
