"""FSDP2 or HSDP with tensor parallel: groups of processes split each layer, and FSDP2 shards the parts over the groups.
Accelerate's mesh has the dimensions (dp_replicate,) dp_shard, tp; a parameter that is not split is sharded over the
groups alone, and the processes of a group compute the same gradient of it."""

import torch

from faithful import patches
from faithful.strategies.base import Session
from faithful.strategies.fsdp import HSDP
from faithful.strategies.tp import Split


class FSDPTensorParallel(Split, HSDP):
    any_number_of_processes = False  # rows of parts are no rows of a whole

    def started(self, session: Session) -> torch.amp.GradScaler | None:
        patches.hide("torch.distributed.tensor._redistribute", "sequential")  # two dimensions take two
        # of outputs that are views, as torch's to_local makes them: it refuses to change these in place
        patches.ignore_warning("FSDP2-wrapped module")
        return super().started(session)
