"""FSDP2, and HSDP: each process holds a shard of every parameter, gathered block by block for its use."""

import warnings

import torch

from faithful.strategies import plain

REHEARSED_AS = "MULTI_GPU"  # the only type that Accelerate's AcceleratorState turns into FSDP


def types(plan):
    return ("FSDP",)


def arguments(plan, scaling):
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    if plan.strategy == "hsdp":  # Accelerate's own way to its mesh; once per process on the console
        warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh")
    # Accelerate alone would reduce gradients in 16 bit, and pin host memory where there is no accelerator.
    dtype = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(plan.precision)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else None
    offload = CPUOffloadPolicy(pin_memory=not plan.rehearsal) if plan.offload else None
    by_torch = plan.ckpt and plan.implementation != "transformer_engine"  # which has its own, in its backend
    plugin = FullyShardedDataParallelPlugin(
        mixed_precision_policy=policy, cpu_offload=offload, activation_checkpointing=by_torch
    )
    return {"fsdp_plugin": plugin}


def reshard(model):
    """FSDP2 leaves its root gathered, in 16 bit, after a forward without a backward: an evaluation."""
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
