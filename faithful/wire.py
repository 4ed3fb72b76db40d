"""Counts the bytes that a process sends, from the collectives that really run."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from faithful.tensors import size

# Ring algorithm: each of N processes sends 2(N-1)/N of a tensor in an all-reduce, and (N-1)/N of the full size in an
# all-gather, a reduce-scatter or an all-to-all.
FACTORS = {"allreduce_": 2, "allreduce_coalesced_": 2, "all_reduce": 2,
           "_allgather_base_": 1, "allgather_": 1, "allgather_into_tensor_coalesced_": 1, "all_gather_into_tensor": 1,
           "_reduce_scatter_base_": 1, "reduce_scatter_": 1, "reduce_scatter_tensor_coalesced_": 1,
           "reduce_scatter_tensor": 1, "alltoall_base_": 1}  # fmt: skip


class Wire(TorchDispatchMode):
    """Counts in `sent` the logical bytes that this rank sends while the mode is active."""

    def __init__(self):
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor runs first; its collectives come back here
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1]
            flat = torch.utils._pytree.tree_leaves((args, out))
            largest = max((size([t]) for t in flat if isinstance(t, torch.Tensor)), default=0)
            # a collective's arguments have the group before other boxed objects, such as a ReduceOp
            world = next((group.size() for group in map(process_group, flat) if group), dist.get_world_size())
            self.sent += FACTORS.get(name, 0) * largest * (world - 1) / world
        return out


def process_group(value):
    """The process group in a collective's boxed argument, or None."""
    return dist.ProcessGroup.unbox(value) if isinstance(value, torch.ScriptObject) else None
