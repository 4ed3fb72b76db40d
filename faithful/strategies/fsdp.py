"""FSDP2 and HSDP: each process holds a shard of every parameter. Parameters are gathered block by block when used."""

import contextlib
import weakref
from types import MethodType

import torch

from faithful import averages, batch_norm, patches
from faithful.blocks import block_names, name_blocks
from faithful.errors import Refused
from faithful.strategies import plain
from faithful.tensors import parameters_of

REHEARSED_AS = "MULTI_GPU"  # the only type that AcceleratorState turns into FSDP


def types(plan):
    return ("FSDP",)


def arguments(plan, scaling):
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    if plan.strategy == "hsdp":  # hide a warning about how Accelerate makes its mesh
        patches.ignore_warning("Slicing a flattened dim from root mesh")
    # By default Accelerate reduces gradients in 16 bit, and pins host memory even without an accelerator.
    dtype = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(plan.precision)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else None
    offload = CPUOffloadPolicy(pin_memory=not plan.rehearsal) if plan.offload else None
    by_torch = plan.ckpt and plan.implementation != "transformer_engine"  # TransformerEngine has its own checkpointing
    plugin = FullyShardedDataParallelPlugin(
        mixed_precision_policy=policy, cpu_offload=offload, activation_checkpointing=by_torch
    )
    return {"fsdp_plugin": plugin}


def before_prepare(accelerator, plan, model, optimizer):
    """Names the blocks, which FSDP2 gathers one by one."""
    name_blocks(model)
    batch_norm.in_fp32(model)


def prepare(accelerator, accelerates, args, device_placement):
    """Accelerate's FSDP2 takes one model and its optimizer per call, but scripts may prepare several. So each model is
    prepared with an optimizer that is thrown away, and the script's optimizers then get the sharded parameters."""
    averages.of_shards()
    prepared, rest = list(args), []
    optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
    for at, one in enumerate(args):
        if isinstance(one, torch.nn.Module) and not getattr(one, "_is_accelerate_prepared", False):
            prepared[at] = shard(accelerator, accelerates, one, optimizers)
        elif not isinstance(one, torch.nn.Module | torch.optim.Optimizer):
            rest.append(at)
    for at, one in enumerate(args):
        if isinstance(one, torch.optim.Optimizer) and not getattr(one, "_is_accelerate_prepared", False):
            follow(one)
            prepared[at] = accelerator.prepare_optimizer(one)
            prepared[at]._is_accelerate_prepared = True
    others = accelerates(*(args[at] for at in rest)) if rest else ()
    for at, one in zip(rest, others if len(rest) > 1 else (others,), strict=True) if rest else ():
        prepared[at] = one
    return tuple(prepared)


SHARDS = {}  # {id of an original parameter: weak references to it and to its sharded parameter}


def shard(accelerator, accelerates, model, optimizers):
    plugin, policy = accelerator.state.fsdp_plugin, accelerator.state.fsdp_plugin.auto_wrap_policy
    plugin.transformer_cls_names_to_wrap = plugin.transformer_cls_names_to_wrap or block_names(model) or None
    if plugin.transformer_cls_names_to_wrap is None:
        plugin.auto_wrap_policy = None  # no block is repeated: shard the model as one unit
    before = dict(parameters_of(model, remove_duplicate=False))
    name_of = {id(parameter): name for name, parameter in before.items()}
    places = []  # where optimizers hold this model's parameters, and would keep the full weights alive
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                if id(parameter) in name_of:
                    places.append((group["params"], i, name_of[id(parameter)]))
                    group["params"][i] = parameter.new_empty(0)
    was = {name: (id(parameter), weakref.ref(parameter)) for name, parameter in before.items()}
    with embedding_in_the_root(model):
        model, throwaway = accelerates(model, torch.optim.SGD(before.values(), lr=0.0))
    del before
    accelerator._optimizers.remove(throwaway)
    accelerator._models[:] = [one for one in accelerator._models if one is not model] + [model]
    plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = policy, None  # the next model has other blocks
    now = dict(parameters_of(model, remove_duplicate=False))
    for parameters, i, name in places:
        parameters[i] = now[name]
    for key in [key for key, pair in SHARDS.items() if any(reference() is None for reference in pair)]:
        del SHARDS[key]
    SHARDS.update({key: (old, weakref.ref(now[name])) for name, (key, old) in was.items()})
    model.no_sync = MethodType(no_sync, model)
    model.register_forward_hook(lambda module, *_: None if torch.is_grad_enabled() else reshard(module))
    return model


@contextlib.contextmanager
def embedding_in_the_root(model):
    """Accelerate shards a tied embedding together with the head, as a unit. FSDP2 refuses that if a third module has
    the same weight, as in T5. Then Accelerate is told of no embedding, and the weight belongs to the root's unit."""
    weight = getattr(getattr(model, "get_input_embeddings", lambda: None)(), "weight", None)
    places = sum(one is weight for module in model.modules() for one in module._parameters.values())
    hidden = ("get_input_embeddings", "get_output_embeddings") if weight is not None and places > 2 else ()
    for name in hidden:
        setattr(model, name, lambda: None)
    try:
        yield
    finally:
        for name in hidden:
            delattr(model, name)


@contextlib.contextmanager
def no_sync(model):
    """DDP's method, which some scripts call themselves. FSDP2 has it under another name."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def none():
    """A reference to nothing."""


def follow(optimizer):
    """Replaces parameters that were sharded before this optimizer was prepared by their sharded parameters."""
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            old, now = (reference() for reference in SHARDS.get(id(parameter), (none, none)))
            if old is parameter and now is not None:
                if optimizer.state:
                    raise Refused("an optimizer has state before it is prepared, which FSDP2 cannot shard: prepare it "
                                  "first, then load its state")  # fmt: skip
                group["params"][i] = now


def reshard(model):
    """Frees the gathered root, which FSDP2 keeps in 16 bit after a forward pass without a backward pass."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def tensors(model, optimizer):
    reshard(model)
    return plain.tensors(model, optimizer)


def restore(model, optimizer, parts):
    reshard(model)
    plain.restore(model, optimizer, parts)
