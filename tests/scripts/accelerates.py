"""The loop as a script that knows Accelerate alone. A stubborn one says its precision and its gradient scaler itself."""

import sys

from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from loop import loop

STUBBORN = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=8.0)]}

if __name__ == "__main__":
    loop(make=Accelerator, **(STUBBORN if sys.argv[3:] == ["stubborn"] else {}))
