"""A script of Accelerate's that says its precision and its gradient scaler itself."""

from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from loop import loop

if __name__ == "__main__":
    loop(make=Accelerator, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
