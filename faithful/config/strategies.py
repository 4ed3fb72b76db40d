"""What each strategy accepts, holds and sends, known before anything runs. This module imports no torch.

StrategyRules documents the questions; a class answers them for one strategy, and STRATEGIES names it. What a strategy
does is in faithful/strategies, in the same order.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faithful.config.settings import Settings

BUCKET = 50_000_000  # gradient elements per reduction of ZeRO. DeepSpeed's default is ten times that: gigabytes
SPLIT = [("ao", level) for level in ("tensorwise", "rowwise", "rowwise_with_gw_hp")]  # FP8 in tensor parallel
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


class StrategyRules:
    """The answers of a strategy that copies the model to each process."""

    title: str  # for a list
    family: str  # the first word of its configs' names
    rank: float  # where several do, the lower is advised
    package: str | None = None  # that it needs beside torch
    rehearsed_as = "NO"  # the DistributedType with which Accelerate is started on a machine without an accelerator
    replicates = True  # whether each process holds the whole model in plain torch
    divides_state = False  # whether each process holds and saves a part of the state
    keeps_fp32 = False  # whether weights and state are fp32, whatever dtype the model has
    splits_layers = False  # whether each process computes a part of each layer
    one_model = False  # whether a second model is refused, also one that is not trained
    hidden_behind = 0.0  # the part of forward and backward during which it can send

    def __init__(self, name: str) -> None:
        self.name = name

    def problems(self, settings: "Settings") -> Iterator[str]:
        """Yields every reason why the strategy cannot run these settings."""
        if settings.mesh.sizes.keys() & {"cp", "sp"}:
            yield self.no_context_parallel(settings)
        elif settings.mesh.sizes:
            yield f"parallelism_config is for hsdp and tp files, this one is {self.name}: remove it"

    def no_context_parallel(self, settings: "Settings") -> str:
        return (
            f"parallelism_config {settings.mesh}: context and sequence parallel are not supported here: for long "
            "sequences use fsdp_bf16_ckpt with fsdp_activation_checkpointing_offload"
        )

    def offloads_weights(self, settings: "Settings") -> bool:
        """Whether settings that offload move weights, too."""
        return True

    def memory(self, model: WholeModel, settings: "Settings", accumulates: bool) -> Memory:
        """What a process holds of a model. accumulates: a step has several backward passes."""
        gradients = model.gradients + model.fp8_gradients
        return Memory(model.weights + model.frozen, gradients, model.master, model.optimizer)

    def bytes_sent(self, settings: "Settings", parameters: float, weight: int = 0, gradient: int = 4) -> float | None:
        """Bytes that each of N processes sends in one step, or None if no rule covers it. weight, gradient: bytes of a
        gathered weight, 0 for one in the dtype of products, and of a gradient.

        A collective sends (N-1)/N of its tensor; an all-reduce sends twice that."""
        return 0


class SingleRules(StrategyRules):
    title, family, rank = "One device", "single", 0


class DDPRules(StrategyRules):
    title = "DDP: every process holds the whole model (--num_processes 8 for eight devices)"
    family, rank, rehearsed_as = "ddp", 1, "MULTI_CPU"
    hidden_behind = 0.6  # the backward pass

    def memory(self, model: WholeModel, settings: "Settings", accumulates: bool) -> Memory:
        memory = super().memory(model, settings, accumulates)
        memory.communication = model.gradients  # its buckets
        return memory

    def bytes_sent(self, settings: "Settings", parameters: float, weight: int = 0, gradient: int = 4) -> float | None:
        return 2 * gradient * others(settings.num_processes) * parameters


class FSDPRules(StrategyRules):
    title = "FSDP2: parameters, gradients and optimizer state are sharded over the processes"
    family, rank = "fsdp", 3
    rehearsed_as = "MULTI_GPU"  # the only type that AcceleratorState turns into FSDP
    replicates, divides_state, keeps_fp32 = False, True, True
    hidden_behind = 0.9  # all but the first gather and the last reduction

    def problems(self, settings: "Settings") -> Iterator[str]:
        if settings.mesh.sizes.keys() & {"cp", "sp"}:
            yield self.no_context_parallel(settings)
        elif problem := self.problem_of_sizes(settings) or wrong_product(settings):
            yield problem

    def problem_of_sizes(self, settings: "Settings") -> str | None:
        return None

    def memory(self, model: WholeModel, settings: "Settings", accumulates: bool) -> Memory:
        n = settings.shards
        gradients = (model.gradients + model.fp8_gradients) / n
        if accumulates:  # gradients stay whole until the last micro-batch
            gradients += model.gradients * others(n)
        memory = Memory((model.weights + model.frozen) / n, gradients, model.master, model.optimizer / n)
        memory.communication = model.gathered + max(model.blocks) * (model.compute + 4)
        return memory

    def bytes_sent(self, settings: "Settings", parameters: float, weight: int = 0, gradient: int = 4) -> float | None:
        gathers = 1 if settings.noreshard else 2
        return (gathers * (weight or computed(settings)) + gradient) * others(settings.shards) * parameters


class HSDPRules(FSDPRules):
    title, family, rank = "HSDP: FSDP2 within groups of processes", "hsdp", 8

    def problem_of_sizes(self, settings: "Settings") -> str | None:
        if settings.mesh.dp_shard > 1:
            return None
        return "hsdp without parallelism_config_dp_shard_size shards nothing: set it, or use a ddp file"

    def bytes_sent(self, settings: "Settings", parameters: float, weight: int = 0, gradient: int = 4) -> float | None:
        n = settings.shards
        within = super().bytes_sent(settings, parameters, weight, gradient) or 0
        between = 2 * gradient * others(settings.num_processes // n) * parameters / n  # an all-reduce
        return within + between


class FSDPTensorParallelRules(FSDPRules):
    title = "FSDP2 or HSDP with tensor parallel: the parts of split layers are sharded over groups of processes"
    family, rank, splits_layers = "fsdp", 10, True

    def problem_of_sizes(self, settings: "Settings") -> str | None:
        if settings.precision == "fp8":
            return f"FP8 with FSDP2 and tensor parallel ({settings.mesh}): use tp_fp8, fsdp_fp8, or fsdp_tp_bf16"
        if settings.fsdp.offload or settings.fsdp.ignored_modules:
            return "fsdp_offload_params and fsdp_ignored_modules are not for tensor parallel: leave them out"
        if settings.mesh.dp_shard > 1:
            return None
        return (
            f"FSDP2 with {settings.mesh} has no processes to shard over: set parallelism_config_dp_shard_size, or use "
            "tp_bf16"
        )

    def memory(self, model: WholeModel, settings: "Settings", accumulates: bool) -> Memory:
        memory = super().memory(model, settings, accumulates)
        memory.communication /= settings.mesh.tp
        return memory

    def bytes_sent(self, settings: "Settings", parameters: float, weight: int = 0, gradient: int = 4) -> float | None:
        return None  # activations, whose size depends on the batch


class TensorParallelRules(StrategyRules):
    title, family, rank = "Tensor parallel: each layer is split over the processes", "tp", 9
    rehearsed_as = "MULTI_GPU"
    replicates, keeps_fp32, splits_layers = False, True, True

    def problems(self, settings: "Settings") -> Iterator[str]:
        if len(settings.mesh.sizes) > 1:
            yield (
                f"tensor parallel beside data parallel ({settings.mesh}): without FSDP2 Accelerate refuses it, or sums "
                "no gradients. Use fsdp_tp_bf16, or set parallelism_config_tp_size alone"
            )
        elif settings.precision == "fp8" and (settings.backend, settings.level) not in SPLIT:
            yield (
                f"tp in fp8 {settings.backend} {settings.level}: of the FP8 layers here torchao's, with one scale for "
                "a tensor or a row, take a weight that is split: use tp_fp8, or tp_bf16"
            )
        elif problem := wrong_product(settings):
            yield problem

    def memory(self, model: WholeModel, settings: "Settings", accumulates: bool) -> Memory:
        n = settings.shards
        gradients = (model.gradients + model.fp8_gradients) / n
        return Memory(model.weights / n + model.frozen, gradients, model.master, model.optimizer / n)

    def bytes_sent(self, settings: "Settings", parameters: float, weight: int = 0, gradient: int = 4) -> float | None:
        return None  # activations, whose size depends on the batch


class ZeRORules(StrategyRules):
    """name: zero and the stage."""

    title = "DeepSpeed ZeRO: optimizer state (1), gradients (2) and parameters (3) are partitioned"
    family, package = "zero", "deepspeed"
    rehearsed_as = "NO"  # Accelerate changes it to DEEPSPEED
    replicates, divides_state, keeps_fp32, one_model = False, True, True, True
    hidden_behind = 0.6  # the backward pass

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.stage = int(name.removeprefix("zero"))
        self.rank = 3 + self.stage

    def offloads_weights(self, settings: "Settings") -> bool:
        return settings.deepspeed.offloads_weights

    def memory(self, model: WholeModel, settings: "Settings", accumulates: bool) -> Memory:
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

    def bytes_sent(self, settings: "Settings", parameters: float, weight: int = 0, gradient: int = 4) -> float | None:
        compute = computed(settings)
        # below stage 3 DeepSpeed sums gradients as all-reduce, then gathers weights
        return (3 * compute if self.stage == 3 else 2 * 4 + compute) * others(settings.shards) * parameters


STRATEGIES: dict[str, StrategyRules] = {
    "single": SingleRules("single"),
    "ddp": DDPRules("ddp"),
    "fsdp": FSDPRules("fsdp"),
    "hsdp": HSDPRules("hsdp"),
    "tp": TensorParallelRules("tp"),
    "fsdp_tp": FSDPTensorParallelRules("fsdp_tp"),
    "zero1": ZeRORules("zero1"),
    "zero2": ZeRORules("zero2"),
    "zero3": ZeRORules("zero3"),
}


def others(processes: int) -> float:
    """The part of a divided tensor that the other processes have."""
    return (processes - 1) / processes


def computed(settings: "Settings") -> int:
    """Bytes of a value in a matrix product, and of a gathered weight."""
    return 4 if settings.precision == "fp32" else 2


def wrong_product(settings: "Settings") -> str | None:
    """The problem of a mesh that is for another number of processes, or None."""
    product = math.prod(asdict(settings.mesh).values())
    if not settings.mesh.sizes or product == settings.num_processes:
        return None
    return (
        f"parallelism_config {settings.mesh} is for {product} processes, not {settings.num_processes}: "
        f"--num_processes {product}, or change its sizes"
    )
