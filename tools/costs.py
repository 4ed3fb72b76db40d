"""What each strategy and backend costs: the memory of a process, what it sends in a step, and what casts take.

A class answers for one strategy or backend; STRATEGIES and BACKENDS name it. One that is not named there costs what a
copy of the model in each process and high precision cost. estimate.py and step_time.py add up what these say.
"""

from dataclasses import dataclass, replace
from typing import Any

from faithful.config.fp8 import MX
from faithful.config.settings import Settings
from faithful.config.strategies import BUCKET

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


@dataclass(frozen=True)
class LinearCost:
    """What a Linear layer costs a GPU in a step beside its three products, in step_time.py. The first four are
    the bytes that casts, amaxes and transposed copies read and write for each element of a tensor, counted by hand in
    the code of each backend."""

    input: float = 0
    output_gradient: float = 0
    weight: float = 0
    weight_gradient: float = 0
    strided: int = 0  # transposed copies of input, output gradient and weight by torch's own kernel, which is slow
    kernels: tuple[int, int] = (1, 2)  # in forward and backward, those of the products, too
    host: float = 0  # seconds of Python beside the launches of kernels
    shares_casts: bool = False  # whether layers that have the same input cast it once
    speed: float = 1  # of FP8 products, relative to those with one scale for each tensor
    fp8_forward: bool = True  # whether this product is in FP8, too
    fp8_weight_gradient: bool = True  # and this one


class StrategyCost:
    """The costs of a strategy that copies the model to each process."""

    rank: float  # where several strategies do, the lower is advised
    divides_state = False  # whether each process holds and saves a part of the state
    keeps_fp32 = False  # whether weights and state are fp32, whatever dtype the model has
    splits_layers = False  # whether each process computes a part of each layer
    one_model = False  # whether a second model is refused, also one that is not trained
    hidden_behind = 0.0  # the part of forward and backward during which it can send

    def __init__(self, rank: float) -> None:
        self.rank = rank

    def offloads_weights(self, settings: Settings) -> bool:
        """Whether settings that offload move weights, too."""
        return True

    def memory(self, model: WholeModel, settings: Settings, accumulates: bool) -> Memory:
        """What a process holds of a model. accumulates: a step has several backward passes."""
        gradients = model.gradients + model.fp8_gradients
        return Memory(model.weights + model.frozen, gradients, model.master, model.optimizer)

    def bytes_sent(self, settings: Settings, parameters: float, weight: int = 0, gradient: int = 4) -> float | None:
        """Bytes that each of N processes sends in one step, or None if no rule covers it. weight, gradient: bytes of a
        gathered weight, 0 for one in the dtype of products, and of a gradient.

        A collective sends (N-1)/N of its tensor; an all-reduce sends twice that."""
        return 0


class DDPCost(StrategyCost):
    hidden_behind = 0.6  # the backward pass

    def memory(self, model: WholeModel, settings: Settings, accumulates: bool) -> Memory:
        memory = super().memory(model, settings, accumulates)
        memory.communication = model.gradients  # its buckets
        return memory

    def bytes_sent(self, settings: Settings, parameters: float, weight: int = 0, gradient: int = 4) -> float | None:
        return 2 * gradient * others(settings.num_processes) * parameters


class FSDPCost(StrategyCost):
    divides_state, keeps_fp32 = True, True
    hidden_behind = 0.9  # all but the first gather and the last reduction

    def memory(self, model: WholeModel, settings: Settings, accumulates: bool) -> Memory:
        n = settings.shards
        gradients = (model.gradients + model.fp8_gradients) / n
        if accumulates:  # gradients stay whole until the last micro-batch
            gradients += model.gradients * others(n)
        memory = Memory((model.weights + model.frozen) / n, gradients, model.master, model.optimizer / n)
        memory.communication = model.gathered + max(model.blocks) * (model.compute + 4)
        return memory

    def bytes_sent(self, settings: Settings, parameters: float, weight: int = 0, gradient: int = 4) -> float | None:
        gathers = 1 if settings.noreshard else 2
        return (gathers * (weight or computed(settings)) + gradient) * others(settings.shards) * parameters


class HSDPCost(FSDPCost):
    def bytes_sent(self, settings: Settings, parameters: float, weight: int = 0, gradient: int = 4) -> float | None:
        n = settings.shards
        within = super().bytes_sent(settings, parameters, weight, gradient) or 0
        between = 2 * gradient * others(settings.num_processes // n) * parameters / n  # an all-reduce
        return within + between


class TensorParallelCost(StrategyCost):
    keeps_fp32, splits_layers = True, True

    def memory(self, model: WholeModel, settings: Settings, accumulates: bool) -> Memory:
        n = settings.shards
        gradients = (model.gradients + model.fp8_gradients) / n
        return Memory(model.weights / n + model.frozen, gradients, model.master, model.optimizer / n)

    def bytes_sent(self, settings: Settings, parameters: float, weight: int = 0, gradient: int = 4) -> float | None:
        return None  # activations, whose size depends on the batch


class FSDPTensorParallelCost(FSDPCost):
    splits_layers = True

    def memory(self, model: WholeModel, settings: Settings, accumulates: bool) -> Memory:
        memory = super().memory(model, settings, accumulates)
        memory.communication /= settings.mesh.tp
        return memory

    def bytes_sent(self, settings: Settings, parameters: float, weight: int = 0, gradient: int = 4) -> float | None:
        return None  # activations, whose size depends on the batch


class ZeROCost(StrategyCost):
    divides_state, keeps_fp32, one_model = True, True, True
    hidden_behind = 0.6  # the backward pass

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

    def bytes_sent(self, settings: Settings, parameters: float, weight: int = 0, gradient: int = 4) -> float | None:
        compute = computed(settings)
        # below stage 3 DeepSpeed sums gradients as all-reduce, then gathers weights
        return (3 * compute if self.stage == 3 else 2 * 4 + compute) * others(settings.shards) * parameters


class BackendCost:
    """The costs of high precision, which converts nothing."""

    autocasts = False  # whether other layers compute under autocast, also where a strategy casts weights
    sends_ordinary_gradients = True  # whether what is sent follows from the dtypes of weights and gradients

    def traced(self, options: dict[str, Any]) -> dict[str, Any]:
        """Those of the options that change what a step holds."""
        return {}

    def adjust_memory(self, memory: Memory, model: WholeModel, settings: Settings) -> None:
        """Changes the memory of a process where the strategy's rule does not cover this backend."""

    def linear_cost(self, settings: Settings) -> LinearCost:
        """What one of its layers costs in a step beside its products."""
        if own_bytes(settings) == computed(settings):
            return LinearCost()
        return LinearCost(weight=4 + 2, weight_gradient=2 + 4, kernels=(2, 3))  # fp32 to 16 bits, and back

    def bytes_sent(self, settings: Settings, fp8: float, rest: float) -> float | None:
        """Bytes that each process sends in a step for so many parameters of FP8 layers, and the rest."""
        return strategy_of(settings).bytes_sent(settings, fp8 + rest)


class TorchAOCost(BackendCost):
    def traced(self, options: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in options.items() if key == "scale_calculation_mode"}

    def linear_cost(self, settings: Settings) -> LinearCost:
        own = own_bytes(settings)
        weight, weight_gradient = (0, 0) if own == 2 else (4 + 2, 2 + 4)
        of_rows = str(settings.level).startswith("rowwise")  # scales of rows, and of columns for the other product
        cost = LinearCost(
            weight_gradient=weight_gradient,
            speed=0.8 if of_rows else 1,
            fp8_weight_gradient=not str(settings.level).endswith("_with_gw_hp"),
        )
        if settings.level in MX:  # a cast for each product, by a kernel of its own; 16-bit copies of weights in fp32
            x = (2 + 1) * (1 + cost.fp8_weight_gradient)
            return replace(cost, input=x, output_gradient=x, weight=weight + 2 * (2 + 1), kernels=(9, 16), host=3e-4)
        columns = of_rows and cost.fp8_weight_gradient
        if not settings.compile:
            # abs 2 + 2, max 2, times scale 2 + 4, clamp 4 + 4, to FP8 4 + 1, each over a whole tensor
            x, w = 25 * (1 + columns), 25 * (1 + of_rows)
            return replace(cost, input=x, output_gradient=x, weight=weight + w, strided=1, kernels=(26, 30), host=3e-4)
        cost = replace(cost, kernels=(3, 6), shares_casts=True)
        if of_rows:  # amax and cast of a row read it once; of a column, twice
            x, w = 2 + 1 + (2 + 2 + 1) * columns, own + 1 + 2 * own + 1
            return replace(cost, input=x, output_gradient=x, weight=w)
        # The kernel that makes x finds its amax. Each is written twice, the second time transposed.
        w = 2 * own + 1 + 1
        if settings.fp8.options.get("enable_fsdp_float8_all_gather"):  # each process casts its part
            w = (4 + 4 + 1) / settings.shards + 1 + 1
        return replace(cost, input=2 + 1 + 1, output_gradient=2 + 2 + 1 + 1, weight=w)

    def bytes_sent(self, settings: Settings, fp8: float, rest: float) -> float | None:
        strategy, in_fp8 = strategy_of(settings), settings.fp8.options.get("enable_fsdp_float8_all_gather")
        return (strategy.bytes_sent(settings, fp8, 1 if in_fp8 else 0) or 0) + (
            strategy.bytes_sent(settings, rest) or 0
        )


class TransformerEngineCost(BackendCost):
    def traced(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    def linear_cost(self, settings: Settings) -> LinearCost:
        fp4 = settings.level == "nvfp4"  # its amaxes are of the tensor itself, and of the rotated one
        amax = 2 if fp4 or settings.level == "current" else 0  # else the kernel that casts finds it, for the next step
        cast = amax + 2 + (0.5 + 0.5 if fp4 else 1 + 1)  # and writes a transposed copy
        weight, weight_gradient = (0, 0) if own_bytes(settings) == 2 else (4 + 2, 2 + 4)
        speed = {"block": 0.8, "nvfp4": 2}.get(str(settings.level), 1)
        return LinearCost(
            cast, cast, weight + cast, weight_gradient, kernels=(5, 7), host=1.5e-4, speed=speed
        )  # its modules are written in Python


class MSAMPCost(BackendCost):
    autocasts = True
    sends_ordinary_gradients = False  # but in FP8, with scales

    def traced(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    def linear_cost(self, settings: Settings) -> LinearCost:
        # One kernel casts with the scale of earlier steps, finds the amax and writes a transposed copy; compiled, the
        # kernel that makes x finds it. So for the weight, in forward and again in backward. The weight's gradient comes
        # in bf16: amax 2, to FP8 2 + 1. kernels, host: as on an H100, results/fp8_speed.json.
        held = 1 if settings.level == "o3" or settings.sharded else 2
        x = 2 + 1 + 1
        cost = LinearCost(x, x, 2 * (held + 1 + 1), 2 + 2 + 1, kernels=(9, 15), host=1e-3)
        if settings.fp8.options.get("recipe") == "fp4":  # beside these amp8/fp4.py, counted there and not measured:
            # each of torch's operators reads and writes whole tensors, mostly in fp32
            cost = LinearCost(x + 118, x + 8, 2 * 86 + 5, 5 + 154, kernels=(55, 56), host=1e-3, fp8_forward=False)
        return replace(cost, shares_casts=not settings.compile)

    def bytes_sent(self, settings: Settings, fp8: float, rest: float) -> float | None:
        strategy = strategy_of(settings)
        return (strategy.bytes_sent(settings, fp8, 1, 1) or 0) + (strategy.bytes_sent(settings, rest) or 0)

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
    "ao": TorchAOCost(), "te": TransformerEngineCost(), "msamp": MSAMPCost(),
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


def own_bytes(settings: Settings) -> int:
    """Bytes of a weight in high precision as a layer finds it: a strategy that divides the state casts it."""
    return computed(settings) if strategy_of(settings).divides_state else 4
