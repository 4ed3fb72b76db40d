"""FSDP2 or HSDP with tensor parallel: groups of processes split each layer and compute one batch, and FSDP2 shards the
parts over the groups. Accelerate's mesh has the dimensions (dp_replicate,) dp_shard, tp; a parameter that is not split
is sharded over the groups alone, and the processes of a group compute the same gradient of it."""

import torch
from torch import nn

from faithful import patches
from faithful.strategies import tp
from faithful.strategies.base import Session
from faithful.strategies.fsdp import HSDP


class FSDPTensorParallel(HSDP):
    any_number_of_processes = False  # rows of parts are no rows of a whole

    def started(self, session: Session) -> torch.amp.GradScaler | None:
        patches.silence("torch.distributed.tensor._redistribute", unless="sequential")  # two dimensions take two
        super().started(session)
        return tp.scaler(session)

    def before_prepare(self, session: Session, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.need_both(optimizer)
        tp.check(model, self.plan.tp_size)
        super().before_prepare(session, model, optimizer)
        tp.refuse_other_weights(model)

    def after_convert(self, session: Session, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        tp.split(session, model, self.need_both(optimizer))

    def counted(self, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        return tp.counted(parameters)

    def tp_dims(self, model: nn.Module) -> dict[str, int | None]:
        return tp.tp_dims(model)
