"""recipes/gpt.py with a defect: MS-AMP's second moments lose their smallest values. benchmarks/study.py must find it.

After each step a second moment below 2**-17 of the largest one beside it becomes 0, as if it were stored with too
few exponents. A row whose gradients are small then has only its newest gradient in the denominator of Adam's step,
which is too large.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from amp8 import optimizer  # noqa: E402
from recipes import gpt  # noqa: E402

LEAST = 2.0**-17
sound = optimizer.adam_slice


def lossy(weight, gradient, m, v, *rest):
    largest = sound(weight, gradient, m, v, *rest)
    values = v.float()
    v.copy_(torch.where(values < values.amax() * LEAST, 0.0, values))
    return largest


if __name__ == "__main__":
    optimizer.adam_slice = lossy
    gpt.main(gpt.options.parse(gpt.Arguments))
