"""What the gradient of a converted weight can be."""

import enum


class Phase(enum.Enum):
    """What a WeightGradient is now, and so which of its tensors there are."""

    NONE = "there is no gradient"
    SUM = "`fp32`, this rank's sum of micro-batches, not to be sent yet"
    READY = "`codes`, to be sent, or to be used where there is one rank"
    MEAN = "`codes`, the mean over ranks"
    CHANGED = "`fp32`, the mean over ranks, as somebody has set or changed it"
    RUNNING = "`accumulated` alone: under fully_shard the mean of this step's backward passes so far"
    ELSEWHERE = "under O3 the owner has the mean"
    CONSUMED = "a step has used it; it can still be read, and the next backward pass drops it"


AVERAGED = {Phase.MEAN, Phase.CHANGED, Phase.RUNNING, Phase.ELSEWHERE}
