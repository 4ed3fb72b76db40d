"""Tensor parallel: every process has a shard of each large layer, and all compute the same batch together.

transformers says how its models are split (`tp_plan`) and runs the collectives. We split a model after it is built, so
that it starts with the same weights as any other run of the seed. Parameters that are not split (norms) stay equal on
all processes, because outputs and gradients of split layers are summed over all of them.
"""

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.tensor import DTensor

from faithful.errors import Refused
from faithful.models import shards
from faithful.strategies.base import OF_SHARDS, Pieces, Session, Strategy, compile_for_this_rank, whole_tensor
from faithful.tensors.names import by_mesh, fingerprint, parameters_of, plain_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The kinds of split that tests/strategies/test_tp.py compares with one process: losses, gradients and norms.
KNOWN = {"embedding_rowwise", "colwise", "rowwise", "colwise_gather_output"}


class Split(Strategy):
    """What each strategy does whose layers are split over groups of processes. A group computes one batch."""

    def started(self, session: Session) -> torch.amp.GradScaler | None:
        super().started(session)
        compile_for_this_rank(session)
        if self.plan.precision != "fp16":
            return None
        return Scaler(session.device.type, **(session.scaling.to_kwargs() if session.scaling else {}))

    def before_prepare(self, session: Session, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.need_both(optimizer)
        check(model, self.plan.tp_size)
        super().before_prepare(session, model, optimizer)
        if len(set(gather_object([fingerprint(model)]))) > 1:  # each process takes its shard from its own copy
            raise Refused(
                "the processes built models with different weights: call set_seed, with the same seed, "
                "before building the model"
            )

    def after_convert(self, session: Session, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Splits the model, and gives the optimizer the split parameters."""
        shards.take_writes()
        mesh = mesh_of_group()
        split(model, self.need_both(optimizer), mesh, session.device)
        first = session.rank - mesh.get_local_rank()
        torch.manual_seed(gather_object([torch.initial_seed()])[first])  # a group has one dropout mask

    def copies(self) -> int:
        return shards.copies

    def counted(self, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        first = mesh_of_group().get_local_rank() == 0  # counts what all of a group have, too
        return {name: parameter for name, parameter in parameters.items() if first or is_split(parameter)}

    def tp_dims(self, model: nn.Module) -> dict[str, int | None]:
        # pyrefly: ignore[missing-attribute]
        return {name: p.placements[-1].dim if is_split(p) else None for name, p in parameters_of(model)}


class TensorParallel(Split):
    distributed_types = ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU")
    must_shard = True
    same_batch = True
    mixes_dtensors = True
    exchanges_in_passes = True
    errors = OF_SHARDS

    def after_convert(self, session: Session, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        super().after_convert(session, model, optimizer)
        if session.device.type != "cpu":
            shards.step_in_turn(self.need_both(optimizer))

    def has_split(self, model: nn.Module) -> bool:
        """By transformers' DistributedConfig, as it is loaded. Its layers are not converted to FP8 afterwards."""
        meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
        same = [(mesh.mesh_dim_names, mesh.size()) for mesh in meshes] == [(("tp",), self.plan.tp_size)]
        return same and self.plan.precision != "fp8"

    def not_averaged(self, optimizer: torch.optim.Optimizer, prepared: set[int]) -> set[int]:
        return set()  # all compute the same batch, and so the same gradients

    def pieces(self, model: nn.Module) -> Pieces:
        like = functools.partial(torch.empty, device="meta")
        state = plain_names(model.state_dict().items())
        return {name: (like(t.shape, dtype=t.dtype), functools.partial(whole_tensor, t)) for name, t in state}


class Scaler(torch.amp.GradScaler):
    """torch's, which takes no mixture of DTensors and tensors in one call. Of split gradients a call finds an infinity
    of any process; whole ones are the same on all."""

    # pyrefly: ignore[bad-override]
    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = {}
        for part in by_mesh(p for group in optimizer.param_groups for p in group["params"]):
            of_part = super()._unscale_grads_(cast(Any, SimpleNamespace(param_groups=[{"params": part}])), *args)
            found |= {device: torch.maximum(inf, found.get(device, inf)) for device, inf in of_part.items()}
        return found


def mesh_of_group() -> "DeviceMesh":
    """The processes that compute one batch with this one."""
    return AcceleratorState().device_mesh["tp"]  # pyrefly: ignore[unsupported-operation]


def is_split(parameter: torch.Tensor) -> bool:
    """Whether a group splits it. The mesh's last dimension is then the group's."""
    return isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())


def split(model: Any, optimizer: torch.optim.Optimizer, mesh: "DeviceMesh", device: torch.device) -> None:
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    whole, modules = dict(model.named_parameters()), dict(model.named_modules())
    if any(map(is_split, whole.values())):
        pass  # transformers has split it
    elif hasattr(model, "_resolve_parallel_plans"):
        splits = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))[0]
        kept = {name: splits[name] for name in splits if name in whole or name in modules}
        apply_tensor_parallelism(model, mesh, kept)
    else:  # transformers before 5.23
        apply_tensor_parallelism(model, mesh)  # pyrefly: ignore[missing-argument]
    if not any(map(is_split, model.parameters())):
        raise Refused(
            f"the plan of {type(model).__name__} for tensor parallel names none of its layers, perhaps as they are in "
            "a wrapper: prepare the model without it, or use fsdp_bf16"
        )
    model.tie_weights(recompute_mapping=False)  # a head tied to the embedding gets the embedding's shard
    for tensor in (*model.parameters(), *model.buffers()):  # Accelerate does not move a model that has DTensors
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)
    model._tp_size = mesh.size()  # transformers sets it when it splits while loading; Accelerate reads it
    for name, part in model.named_parameters():
        if part is not whole[name]:
            shards.move_hooks(shards.hooks_of(whole[name]), part)
    now = {id(whole[name]): part for name, part in model.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [now[id(parameter)] for parameter in group["params"]]
        if device.type == "cpu":
            group |= {"fused": False, "foreach": False}  # these kernels don't take DTensors and tensors together


def check(model: Any, size: int) -> None:
    """Raises Refused if `model` cannot be split over `size` processes."""
    name, plan = type(model).__name__, getattr(model, "tp_plan", None)
    adapters = " of adapters (peft)" if any(hasattr(module, "base_layer") for module in model.modules()) else ""
    if not plan or adapters:
        raise Refused(
            f"{name} has no plan for tensor parallel{adapters}: use recipes/gpt.py with llama_nano, or fsdp_bf16"
        )
    if unknown := sorted(set(plan.values()) - KNOWN):
        raise Refused(f"{name} is split by {', '.join(unknown)}, which is not tested here: use fsdp_bf16")
    heads = model.config.num_attention_heads
    pairs = getattr(model.config, "num_key_value_heads", heads)
    if heads % size or pairs % size:
        raise Refused(
            f"{name} has {heads} attention heads and {pairs} of keys and values, which {size} processes do "
            "not share evenly: another --model, or another parallelism_config_tp_size"
        )
