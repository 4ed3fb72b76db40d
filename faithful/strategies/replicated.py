"""One device, and DDP: every process holds the whole model."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from faithful import patches
from faithful.errors import Refused
from faithful.strategies.base import SAME_NORM, Strategy
from faithful.tensors.names import parameters_of

if TYPE_CHECKING:
    from accelerate.utils import GradScalerKwargs

EARLY = (
    "an optimizer steps in a hook of a backward pass, before DDP has averaged gradients: step after backward, or use "
    "an fsdp config"
)


class SingleDevice(Strategy):
    distributed_types = ("NO",)
    replicates = True
    errors = {
        "We tried to initialize torch.distributed for you": (
            "the script lets transformers shard a model (DistributedConfig or tp_plan), and the config asks for one "
            "process: load it without that, or use a tp or fsdp config, without it too"
        )
    }

    def arguments(self, scaling: "GradScalerKwargs | None") -> dict[str, Any]:
        """None. Makes transformers' Trainer count one GPU: with several it would put the model into nn.DataParallel."""
        if "transformers.training_args" in sys.modules:
            count = sys.modules["transformers.training_args"].TrainingArguments.n_gpu.fget
            at_most_one = property(lambda arguments: min(1, count(arguments)))
            patches.replace("transformers.training_args:TrainingArguments.n_gpu", at_most_one)
        return {}


class DDP(Strategy):
    distributed_types = ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU")
    replicates = True
    errors = {
        "Expected to mark a variable ready only once": (
            "DDP has counted a parameter as unused, and then came its gradient: the model returns no tensor, "
            "tuple, list or dict, in which find_unused_parameters looks (leave that out; for transformers' Trainer "
            "say ddp_find_unused_parameters=False), or a block is computed again (use_reentrant=False is for it)"
        ),
        "Expected to have finished reduction in the prior iteration": (
            "a parameter got no gradient in the last backward pass of this process, and DDP waits for those of all: "
            "pass kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] if a part of the model "
            "is not used in each step, keep it out of the loss for good (requires_grad_(False) before prepare), or do "
            "not replace it after prepare (a tied weight)"
        ),
    }

    def after_prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.averaged = trainable(model)  # pyrefly: ignore[bad-argument-type]

    def requires_grad_changed(self, model: nn.Module) -> None:
        """DDP averages the gradients of the parameters that were trainable when it was built, and waits for all of
        them. A model that is frozen altogether, as a discriminator is in a generator's step, keeps what it has."""
        now = trainable(model)
        if isinstance(model, DistributedDataParallel) and now not in (set(), model.averaged):
            build_reducer(model)
            model.averaged = now  # pyrefly: ignore[bad-argument-type]

    def refuse_apart(self, model: nn.Module) -> None:
        """DDP sends the first process's weights when it is built, and never again. A model that is not trained it does
        not hold: that one may be each process's own, as a random target is."""
        if not isinstance(model, DistributedDataParallel):
            return
        weights = [shard.tensor for shard in self.shards(dict(parameters_of(model)), None) if shard.kind == "weight"]
        each = [(weight if weight.is_complex() else weight.float()).norm().cpu() for weight in weights]
        norms = gather_object([torch.stack(each).norm().item()])
        if max(norms) > SAME_NORM * min(norms):
            said = ", ".join(f"{norm:.6g}" for norm in norms)
            raise Refused(
                f"the processes hold different weights, their norms are {said}: one of them alone has written into the "
                "model after prepare(), by load_state_dict perhaps, or the script calls the model, not what prepare() "
                "returned: write in all processes, or before prepare(), and call what it returned"
            )

    @contextmanager
    def in_backward(self, models: list[nn.Module]) -> Iterator[None]:
        """Looks at the weights, as an optimizer need not be prepared to step in a hook."""
        averaged = [parameter for model in models if isinstance(model, DistributedDataParallel)
                    for parameter in model.parameters()]  # fmt: skip
        before = [parameter._version for parameter in averaged]
        yield
        if before != [parameter._version for parameter in averaged]:
            raise Refused(EARLY)

    def order(self, model: nn.Module) -> list[int]:
        if not isinstance(model, DistributedDataParallel):
            return []
        model.logger.set_runtime_stats_and_log()  # pyrefly: ignore[missing-attribute]
        said = str(model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", ""))  # such as "4 3, 2 1 0"
        found = [int(number) for number in said.replace(",", " ").split()]
        before = getattr(model, "summed_in", None) or range(len(found))
        return [before[number] for number in found]

    def restore_order(self, model: nn.Module, order: list[int]) -> None:
        """DDP sums in one order before its first backward pass, and from then on in the one in which gradients came."""
        if isinstance(model, DistributedDataParallel):
            build_reducer(model, order)

    def take_written(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Looks before the processes exchange anything else whether this one's gradients are averaged."""
        if isinstance(model, DistributedDataParallel):
            if torch._C._current_graph_task_id() >= 0:
                raise Refused(EARLY)
            model._check_reducer_finalized()


def trainable(model: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in model.parameters() if parameter.requires_grad}


def build_reducer(model: DistributedDataParallel, order: list[int] | None = None) -> None:
    """Builds DDP's reducer for the parameters that are trainable now, as DDP does for a model from a pickle. Every
    process calls it before the same forward pass, as each of them has to average the same gradients. order: of the
    gradients in its buckets, as `DDP.order` found it; else that of the next backward pass."""
    model.reducer._remove_autograd_hooks()
    parameters, sparse = model._build_params_for_reducer()
    if not order or sorted(order) != [*range(len(parameters))]:  # others are trainable now
        order = None
    else:
        parameters, sparse = [parameters[at] for at in order], [sparse[at] for at in order]
    model.summed_in = order  # pyrefly: ignore[bad-argument-type]
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    for hook, state in model._comm_hooks:
        dist._register_comm_hook(model.reducer, state, hook)
    if model.static_graph:
        model._static_graph_delay_allreduce_enqueued = False
        model.reducer._set_static_graph()
        model.logger._set_static_graph()  # pyrefly: ignore[missing-attribute]
    if order:
        model.reducer._push_all_rebuilt_params()
        model.reducer._rebuild_buckets()
