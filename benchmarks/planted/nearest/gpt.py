"""recipes/gpt.py whose MS-AMP level rounds weights and moments to nearest, as Microsoft's package does."""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import amp8  # noqa: E402
from recipes import gpt  # noqa: E402

if __name__ == "__main__":
    amp8.initialize = functools.partial(amp8.initialize, stochastic_rounding=False)
    gpt.main(gpt.options.parse(gpt.Arguments))
