"""What each strategy and backend costs: the memory of a process, and what it sends in a step.

A class answers for one strategy or backend; STRATEGIES and BACKENDS name it. One that is not named there costs what a
copy of the model in each process and high precision cost. estimate.py adds up what these say.
"""

from dataclasses import dataclass
from typing import Any

from faithful.config.settings import Settings
from faithful.config.strategies import BUCKET

GRADIENT = 4  # bytes of one that is sent
LIVE = 1_000_000_000  # elements that DeepSpeed's stage 3 keeps gathered if they are soon used again, its default


@dataclass(frozen=True)
class WholeModel:
    """What one process needs that holds all of a model, in bytes if nothing else is said."""

    elements: int  # parameters that are trained
    blocks: list[int]  # parameters of each repeated block, or of the whole model if it has none
    compute: int  # of a value in a matrix product
    weights: float
    frozen: float  # weights of models that are not trained
    gradients: float  # those in `.grad`
    fp8_gradients: float  # those that a level keeps beside
    master: float
    optimizer: float
    fp8_optimizer: float  # the part of `optimizer` that belongs to weights in FP8

    @property
    def gathered(self) -> float:
        """Weights of two blocks, this one and the next, and of what is in no block."""
        return (self.elements - sum(self.blocks)) * self.compute + self.next_blocks * self.compute

    @property
    def next_blocks(self) -> int:
        """Parameters of two blocks, or of one if there are no more."""
        return min(len(self.blocks), 2) * max(self.blocks)


@dataclass
class Memory:
    """Bytes that one process holds."""

    weights: float
    gradients: float
    master: float
    optimizer: float
    communication: float = 0
    sent_early: float = 0  # the share of FP8 gradients that is sent to its owners while the backward pass goes on


class StrategyCost:
    """The costs of a strategy that copies the model to each process."""

    rank: float  # where several strategies do, the lower is advised
    divides_state = False  # whether each process holds and saves a part of the state
    keeps_fp32 = False  # whether weights and state are fp32, whatever dtype the model has
    splits_layers = False  # whether each process computes a part of each layer
    one_model = False  # whether a second model is refused, also one that is not trained

    def __init__(self, rank: float) -> None:
        self.rank = rank

    def offloads_weights(self, settings: Settings) -> bool:
        """Whether settings that offload move weights, too."""
        return True

    def memory(self, model: WholeModel, settings: Settings, accumulates: bool) -> Memory:
        """What a process holds of a model. accumulates: a step has several backward passes."""
        gradients = model.gradients + model.fp8_gradients
        return Memory(model.weights + model.frozen, gradients, model.master, model.optimizer)

    def bytes_sent(self, settings: Settings, parameters: float) -> float | None:
        """Bytes that each of N processes sends in one step, or None if no rule covers it.
        A collective sends (N-1)/N of its tensor; an all-reduce sends twice that."""
        return 0


class DDPCost(StrategyCost):
    def memory(self, model: WholeModel, settings: Settings, accumulates: bool) -> Memory:
        memory = super().memory(model, settings, accumulates)
        memory.communication = model.gradients  # its buckets
        return memory

    def bytes_sent(self, settings: Settings, parameters: float) -> float | None:
        return 2 * GRADIENT * others(settings.num_processes) * parameters


class FSDPCost(StrategyCost):
    divides_state, keeps_fp32 = True, True

    def memory(self, model: WholeModel, settings: Settings, accumulates: bool) -> Memory:
        n = settings.shards
        gradients = (model.gradients + model.fp8_gradients) / n
        if accumulates:  # gradients stay whole until the last micro-batch
            gradients += model.gradients * others(n)
        memory = Memory((model.weights + model.frozen) / n, gradients, model.master, model.optimizer / n)
        memory.communication = model.gathered + max(model.blocks) * (model.compute + 4)
        return memory

    def bytes_sent(self, settings: Settings, parameters: float) -> float | None:
        gathers = 1 if settings.noreshard else 2
        return (gathers * computed(settings) + GRADIENT) * others(settings.shards) * parameters


class HSDPCost(FSDPCost):
    def bytes_sent(self, settings: Settings, parameters: float) -> float | None:
        n = settings.shards
        within = super().bytes_sent(settings, parameters) or 0
        between = 2 * GRADIENT * others(settings.num_processes // n) * parameters / n  # an all-reduce
        return within + between


class TensorParallelCost(StrategyCost):
    keeps_fp32, splits_layers = True, True

    def memory(self, model: WholeModel, settings: Settings, accumulates: bool) -> Memory:
        n = settings.shards
        gradients = (model.gradients + model.fp8_gradients) / n
        return Memory(model.weights / n + model.frozen, gradients, model.master, model.optimizer / n)

    def bytes_sent(self, settings: Settings, parameters: float) -> float | None:
        return None  # activations, whose size depends on the batch


class FSDPTensorParallelCost(FSDPCost):
    splits_layers = True

    def memory(self, model: WholeModel, settings: Settings, accumulates: bool) -> Memory:
        memory = super().memory(model, settings, accumulates)
        memory.communication /= settings.mesh.tp
        return memory

    def bytes_sent(self, settings: Settings, parameters: float) -> float | None:
        return None  # activations, whose size depends on the batch


class ZeROCost(StrategyCost):
    divides_state, keeps_fp32, one_model = True, True, True

    def __init__(self, stage: int) -> None:
        super().__init__(3 + stage)
        self.stage = stage

    def offloads_weights(self, settings: Settings) -> bool:
        return settings.deepspeed.offloads_weights

    def memory(self, model: WholeModel, settings: Settings, accumulates: bool) -> Memory:
        n, elements, compute = settings.shards, model.elements, model.compute
        memory = Memory(
            weights=compute * elements / (n if self.stage == 3 else 1) + model.frozen,
            gradients=(compute if self.stage == 1 else 4) * elements / n,
            master=4 * elements / n,
            optimizer=model.optimizer / n,
        )
        # Of gradients on their way: the bucket's buffer, what it is cast to, and what is cut from that.
        bucket, cast = min(BUCKET, elements), 4 if compute == 2 else 0
        memory.communication = bucket * (8 + 4 / n if self.stage == 3 else 2 * compute + cast)
        memory.communication += compute * min(LIVE, elements) if self.stage == 3 else 0
        return memory

    def bytes_sent(self, settings: Settings, parameters: float) -> float | None:
        compute = computed(settings)
        # below stage 3 DeepSpeed sums gradients as all-reduce, then gathers weights
        return (3 * compute if self.stage == 3 else 2 * GRADIENT + compute) * others(settings.shards) * parameters


class BackendCost:
    """The costs of high precision, which converts nothing."""

    autocasts = False  # whether other layers compute under autocast, also where a strategy casts weights
    sends_ordinary_gradients = True  # whether what is sent follows from the dtypes of weights and gradients

    def traced(self, options: dict[str, Any]) -> dict[str, Any]:
        """Those of the options that change what a step holds."""
        return options

    def adjust_memory(self, memory: Memory, model: WholeModel, settings: Settings) -> None:
        """Changes the memory of a process where the strategy's rule does not cover this backend."""


class TorchAOCost(BackendCost):
    def traced(self, options: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in options.items() if key == "scale_calculation_mode"}


class MSAMPCost(BackendCost):
    autocasts = True
    sends_ordinary_gradients = False  # but in FP8, with scales

    def adjust_memory(self, memory: Memory, model: WholeModel, settings: Settings) -> None:
        n = settings.shards
        if settings.sharded:  # the bucket's codes, what is sent and received of them, and this process's part in fp32
            from amp8 import comm

            whole = (model.elements - sum(model.blocks)) * model.compute
            codes = model.next_blocks * (model.compute - 1)  # gathered in FP8
            memory.communication = whole + codes + min(comm.BUCKET, model.fp8_gradients) * (3 + 4 / n)
            # Codes are traced among the activations. They come as other gradients do, and leave for their owners.
            memory.sent_early = model.fp8_gradients * others(n) / model.gradients
        elif settings.level == "o3":
            memory.optimizer -= model.fp8_optimizer * others(n)
            memory.master /= n
            memory.gradients -= model.fp8_gradients * others(n)


STRATEGIES = {
    "single": StrategyCost(0), "ddp": DDPCost(1), "fsdp": FSDPCost(3), "hsdp": HSDPCost(8),
    "tp": TensorParallelCost(9), "fsdp_tp": FSDPTensorParallelCost(10),
    "zero1": ZeROCost(1), "zero2": ZeROCost(2), "zero3": ZeROCost(3), "zero3_sp": ZeROCost(3),
}  # fmt: skip
BACKENDS: dict[str | None, BackendCost] = {
    "ao": TorchAOCost(), "msamp": MSAMPCost(),
}  # fmt: skip


def strategy_of(settings: Settings) -> StrategyCost:
    return STRATEGIES.get(settings.strategy) or STRATEGIES["single"]


def backend_of(settings: Settings) -> BackendCost:
    return BACKENDS.get(settings.backend) or BackendCost()


def others(processes: int) -> float:
    """The part of a divided tensor that the other processes have."""
    return (processes - 1) / processes


def computed(settings: Settings) -> int:
    """Bytes of a value in a matrix product, and of a gathered weight."""
    return 4 if settings.precision == "fp32" else 2
