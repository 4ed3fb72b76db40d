"""What do the slopes of MS-AMP's FP4 do where nothing is rounded to FP4?

    ./launch.sh compare single_bf16 'single_bf16 --slopes own' 'single_bf16 --slopes first' \\
        'single_bf16 --slopes random' single_fp8_msamp_o2_fp4 --seeds 5 --margin 0.5% --no-twin -- \\
        benchmarks/slopes.py --seed {seed} --model llama_nano --sequence_length 32 --per_device_train_batch_size 8 \\
        --max_steps 100 --eval_steps 0 --logging_steps 50

recipes/gpt.py, in which the gradient of each Linear weight but the head's is multiplied by f' of amp8/fp4.py:

own       f' of the weight as it is
first     of the weight as it was at the start
random    of the weight as it is, dealt out to the layer's weights anew in each step
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]
import gpt  # noqa: E402
from amp8 import fp4  # noqa: E402


@dataclass
class Arguments(gpt.Arguments):
    slopes: Literal["none", "own", "first", "random"] = "none"


def slopes(weight):
    return fp4.slope((weight.detach() * fp4.scale_of(weight.detach().abs().amax(1, keepdim=True))).float().contiguous())


def hook(how, first, generator):
    def multiply(parameter):
        if how == "first":
            return parameter.grad.mul_(first)
        found = slopes(parameter)
        if how == "random":
            found = found.flatten()[torch.randperm(found.numel(), generator=generator)].view_as(found)
        parameter.grad.mul_(found)

    return multiply


if __name__ == "__main__":
    args, made = gpt.options.parse(Arguments), gpt.lm.gpt

    def model(*words):
        net = made(*words)
        generator = torch.Generator().manual_seed(args.seed)
        for name, module in net.named_modules():
            if args.slopes != "none" and isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.register_post_accumulate_grad_hook(hook(args.slopes, slopes(module.weight), generator))
        return net

    gpt.lm.gpt = model
    gpt.main(args)
