"""What the model saw in its first optimizer step: how many samples, and which."""

import torch
from accelerate.utils import gather_object
from torch.utils._pytree import tree_leaves

from faithful.tensors import sum_of_sample_hashes


class FirstBatch:
    """Watches the forwards of a prepared model until `result` is asked for."""

    def __init__(self, model):
        self.samples = self.hashes = 0
        self.hook = model.register_forward_pre_hook(self.see, prepend=True, with_kwargs=True)

    def see(self, model, args, kwargs):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf) and leaf.dim()]
        if not tensors or not torch.is_grad_enabled():
            return
        samples = len(tensors[0])
        self.samples += samples
        self.hashes += sum_of_sample_hashes([tensor for tensor in tensors if len(tensor) == samples])

    def result(self, plan):
        """(samples per optimizer step, one hash of all of them) over all processes, which all must call it."""
        self.hook.remove()
        seen = gather_object([(self.samples, self.hashes)])[:: plan.split]  # tp: several compute one batch
        return sum(samples for samples, _ in seen), f"{sum(hashes for _, hashes in seen) % 2**256:064x}"
