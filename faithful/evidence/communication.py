"""Counts the bytes that a process sends in one optimizer step, from the collectives that really run."""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import GradientState
from torch._ops import OpOverload
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from faithful.evidence.evidence import Evidence
from faithful.tensors.names import size

# Ring algorithm: each of N processes sends 2(N-1)/N of a tensor in an all-reduce, and (N-1)/N of the full size in an
# all-gather, a reduce-scatter or an all-to-all.
FACTORS = {"allreduce_": 2, "allreduce_coalesced_": 2, "all_reduce": 2,
           "_allgather_base_": 1, "allgather_": 1, "allgather_into_tensor_coalesced_": 1, "all_gather_into_tensor": 1,
           "_reduce_scatter_base_": 1, "reduce_scatter_": 1, "reduce_scatter_tensor_coalesced_": 1,
           "reduce_scatter_tensor": 1, "alltoall_base_": 1, "dim_zero_all_to_all": 1}  # fmt: skip


class OneStep:
    """Counts the bytes of one optimizer step of a model: the second one, because the first allocates."""

    def __init__(self) -> None:
        self.counting: BytesSent | None = None  # of the step's micro-batches so far

    @contextlib.contextmanager
    def counted(self, evidence: Evidence | None, state: GradientState) -> Iterator[None]:
        """Around a micro-batch. When a step is counted, its bytes are in the record of the model's evidence."""
        if self.counting is None and evidence and due(evidence):
            self.counting = BytesSent()
        with self.counting or contextlib.nullcontext():
            yield
        if self.counting is not None and evidence and state.sync_gradients:
            evidence.record["wire_bytes_per_step"] = round(self.counting.sent)
            self.counting = None


def due(evidence: Evidence) -> bool:
    """Whether to count the next step. A dispatch mode, which counts, would switch compiled blocks off."""
    return not evidence.plan.compile and evidence.complete and evidence.record["wire_bytes_per_step"] is None


class BytesSent(TorchDispatchMode):
    """Counts in `sent` the logical bytes that this rank sends while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """torch.compile compiles inside of it; with fullgraph, as in torchao's optimizers, it would fail otherwise."""
        return True

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor runs first; its collectives come back here
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "deepspeed"):  # whose operator hides torch's inside
            name = func._schema.name.split("::")[1]
            flat = torch.utils._pytree.tree_leaves((args, out))
            largest = max((size([t]) for t in flat if isinstance(t, torch.Tensor)), default=0)
            # a collective's arguments have the group before other boxed objects, such as a ReduceOp
            groups = map(process_group, func._schema.arguments, args)
            world = next((group.size() for group in groups if group), dist.get_world_size())
            self.sent += FACTORS.get(name, 0) * largest * (world - 1) / world
        return out


def process_group(argument: torch.Argument, value: Any) -> dist.ProcessGroup | None:
    """The process group that a collective's argument names, or has in a box, or None."""
    if argument.name == "group_name":
        return _resolve_process_group(value)
    return dist.ProcessGroup.unbox(value) if isinstance(value, torch.ScriptObject) else None
