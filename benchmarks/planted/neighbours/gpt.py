"""recipes/gpt.py with a defect under NVFP4: each block is rounded under the scale of the block beside it.

Other configs train as recipes/gpt.py does, so `./launch.sh compare` with this script must find the defect.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from faithful.backends import emulation  # noqa: E402
from recipes import gpt  # noqa: E402


def plant():
    sound = emulation._nvfp4_scales
    emulation._nvfp4_scales = lambda amax: sound(amax.roll(1, 2))


if __name__ == "__main__":
    plant()
    gpt.main(gpt.options.parse(gpt.Arguments))
