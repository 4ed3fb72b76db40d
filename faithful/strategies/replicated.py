"""One device, and DDP: every process holds the whole model."""

import sys

from faithful import patches
from faithful.errors import Refused
from faithful.strategies.base import Strategy


class SingleDevice(Strategy):
    distributed_types = ("NO",)
    replicates = True

    def arguments(self, scaling):
        """None. Makes transformers' Trainer count one GPU: with several it would put the model into nn.DataParallel."""
        if "transformers.training_args" in sys.modules:
            count = sys.modules["transformers.training_args"].TrainingArguments.n_gpu.fget
            at_most_one = property(lambda arguments: min(1, count(arguments)))
            patches.replace("transformers.training_args:TrainingArguments.n_gpu", at_most_one)
        return {}


class DDP(Strategy):
    distributed_types = ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU")
    rehearsed_as = "MULTI_CPU"
    replicates = True

    def explain(self, error):
        if "Expected to have finished reduction in the prior iteration" not in error:
            return None
        return Refused(
            "a parameter got no gradient in the last backward pass, and DDP waits for those of all: keep it out of the "
            "loss for good (requires_grad_(False) before prepare), do not replace it after prepare (a tied weight), or "
            "pass kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]"
        )
