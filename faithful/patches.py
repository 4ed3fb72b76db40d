"""Every change that faithful makes to code of others, in one table: what it is, and why it is needed.

A change lasts from the first `Accelerator()` (or `python -m faithful`; what TrainingArguments ask, from the import of
`faithful.Accelerator`) to `end_training`, which undoes them. Those of
the first two rows end with the process, or are undone where launch/process.py says so.
Classes and functions of others are changed only here. What is set on the script's own objects (a method of its
optimizer, hooks of its model) is no change of a library and ends with the object.
"""

import contextlib
import logging
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator

TABLE = {  # what is changed: why
    "accelerate.Accelerator, in every module that has imported it":
        "only by `python -m faithful`, while the script runs: that is what it is for",
    "sys.excepthook, sys.exit, exit, quit, handlers of SIGTERM and Ctrl-C":
        "launch/process.py: errors in one line, the record's last words, a checkpoint when a run is stopped",
    "accelerate.state:PartialState._prepare_backend":
        "without an accelerator it returns no backend, and each process would train alone as rank 0 of 1",
    "accelerate.state:PartialState.__init__":
        "with cpu=True, as TrainingArguments(use_cpu=True) has it, it makes no process group for FSDP and DeepSpeed",
    "accelerate.optimizer:is_lomo_available":
        "it searches sys.path for a package twice in every optimizer step; here its answer is kept",
    "accelerate.utils.other:is_deepspeed_available":
        "where the package is installed, unwrapping any model imports it, which takes a second per process; here the "
        "answer is whether it is loaded, without which no model is an engine of DeepSpeed",
    "torch.distributed.distributed_c10d:default_pg_timeout":
        "FSDP2 and DeepSpeed make process groups with the default timeout instead of the run's",
    "torch.distributed.distributed_c10d:default_pg_nccl_timeout": "the same for NCCL",
    "clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_ of torch.nn.utils":
        "they clip .grad alone, but MS-AMP's levels and DeepSpeed keep gradients elsewhere; and they fail on DTensors "
        "beside tensors, and in fp16 would clip what is multiplied by the scale. Scripts import them under any name, "
        "so the functions in their no_grad wrappers are replaced",
    "DTensor.__setitem__, data, item, methods that change it":
        "models/shards.py: writes to rows of a sharded tensor, and to its data, would go into a copy, and item() would "
        "give the number of a part",
    "torch.distributed.fsdp.FSDPModule.zero_grad":
        "between the micro-batches of a step FSDP2 has gradients that .grad does not show: it would not give them up",
    "save of torch, save_file of safetensors.torch":
        "models/shards.py: of a sharded tensor they write this process's part, and the others' would be lost. In every "
        "module that has imported them, as scripts do so by name",
    "torch.nn.Parameter.grad, register_post_accumulate_grad_hook, ds_status":
        "deepspeed/seen.py: under ZeRO .grad is empty after a backward pass, and so is a weight of stage 3 that is not "
        "in use; to use them raises an error",
    "torch.nn.Module.register_parameter, _apply":
        "models/meta_init.py: with fsdp_cpu_ram_efficient_loading or zero3_init_flag only process 0 holds the "
        "weights of a new model",
    "kernels of torch.ops.aten for meta": "the other processes draw the same random numbers for its parameters",
    "methods of averages of weights":
        "those that models/averages.py names: a copy from before `prepare` is whole and in fp32, the model is not",
    "deepspeed.ops:__compatible_ops__":
        "on a CPU DeepSpeed would compile an all-reduce for processes of a host, which takes a compiler and a minute",
    "deepspeed.accelerator.cpu_accelerator:CPU_Accelerator.is_fp16_supported":
        "on a CPU without fast fp16 kernels it refuses fp16, which a rehearsal computes through fp32 (cpu_matmul)",
    "accelerate.accelerator:prepare_data_loader":
        "deepspeed/sequence.py: in sequence parallel a group of processes shares a batch, as in tensor parallel",
    "accelerate.accelerator:skip_first_batches": "and the rest of an epoch, too",
    "accelerate.data_loader:DataLoaderShard.__iter__":
        "of which each process of the group trains on a slice; and launch/following.py: the processes wait for the "
        "main one, which may save alone",
    "accelerate.data_loader:DataLoaderDispatcher.__iter__": "the same",
    "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPDataLoaderAdapter":
        "it cannot be resumed within an epoch, and slices batches of an evaluation, whose attention does not exchange",
    "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF.register_with_transformers":
        "it puts Ulysses into all models of the process, and takes masks away, of evaluations too",
    "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS":
        "under zero3_sp the attention of the prepared model exchanges slices for heads while it trains",
    "deepspeed.runtime.lr_schedules:VALID_LR_SCHEDULES":
        "the names of schedulers that DeepSpeed's engine steps; a DummyScheduler's function may make others",
    "transformers.integrations.deepspeed:HfTrainerDeepSpeedConfig.fill_match":
        "it compares the precision of TrainingArguments, which scripts leave to the config, with DeepSpeed's",
    "transformers.training_args:TrainingArguments.n_gpu":
        "under a single config it counts all GPUs of the machine, and the Trainer would put the model into "
        "nn.DataParallel; one process has one GPU",
    "transformers.training_args:is_torch_bf16_gpu_available":
        "TrainingArguments(bf16=True), trl's default, raise an error on a CPU, where the run is rehearsed",
    "transformers.training_args:TrainingArguments.__post_init__":
        "with deepspeed= it sets DeepSpeed up, before an Accelerator can say that this is the config's",
    "transformers.trainer:Trainer._has_mixed_mesh_grads":
        "it looks for DTensors in .grad, which under ZeRO is not there",
    "transformers.trainer:Trainer.set_initial_training_values":
        "it counts on Accelerate's loader for sequence parallel, which makes more batches",
    "transformers.trainer:Trainer.save_model":
        "with FSDP's sharded checkpoints, Accelerate's default, it saves no model, and under tensor parallel it asks "
        "the main process alone for weights that each process has a part of",
    "transformers.trainer:Trainer._load_optimizer_and_scheduler":
        "under tensor parallel every process would go on with the main process's part of the optimizer: refused",
    "TF32 in torch.backends":
        "under fp32 torch computes products in IEEE's fp32 and convolutions in TF32, and Accelerate makes compiled "
        "products TF32, too: here both are what the script has set for products, IEEE's by default",
    "kernels of torch.ops.aten for CPUs":
        "backends/cpu_matmul.py: on CPUs without fast 16-bit kernels, products of 16-bit values are computed in fp32",
    "layer_norm and group_norm of torch.ops.aten under autocast on a CPU":
        "models/batch_norm.py: they refuse fp32 inputs beside 16-bit weights, which autocast on a GPU puts into fp32",
    "logger DeepSpeed": "it prints in every run; its errors stay",
    "logger torch._dynamo.convert_frame":
        "that a function is not compiled any more is five lines of each process; here it is a note in the record, too",
    "torch._dynamo.config:recompile_limit":
        "the blocks of a class share it, however many kinds of them there are: see models/blocks.py",
    "torch._inductor.config:cpp.simdlen":
        "with AVX-512 the compiler's code for CPUs is wrong where a transposed fp32 tensor meets a bf16 one, as in the "
        "first block of a ViT (NaN; torch 2.11 to 2.15): a rehearsal compiles for AVX2",
    "torch._inductor.codegen.triton:TritonOverrides.minimum, maximum":
        "since torch 2.14 they are instructions that hand on NaN, beside which ptxas 12.9 writes garbage where a "
        "kernel stores FP8 codes in both layouts, as those of FP8 layers do (triton#11111)",
    "logger torch.utils._pytree": "torchao registers enums in a way that makes torch warn in every process",
    "warnings":
        "torch warns about the way in which Accelerate makes the mesh of HSDP; and in a rehearsal, for every loader of "
        "every process, that there is no GPU to pin memory for",
    "os.environ":
        "ACCELERATE_USE_CPU would make every strategy DDP, ACCELERATE_FP8_BACKEND would convert the model again; "
        "ACCELERATE_TORCH_DEVICE, DS_ACCELERATOR and CUDA_VISIBLE_DEVICES say that there is no accelerator; the "
        "launcher's variables of FSDP version 1 are set to those of version 2 (config/fsdp.py: as_version_2)",
}  # fmt: skip

undos: list[Callable[[], object]] = []  # functions that restore what was there, the newest last
users: set[int] = set()  # ids of the Accelerators that have not ended


def replace(row: str, value: object, owner: object = None, name: str = "") -> None:
    """Sets an attribute of another package's module, class or closure. row: of TABLE; `package.module:Class.attribute`
    says which attribute, else owner and name do."""
    if owner is None:
        path, _, name = row.replace(":", ".").rpartition(".")
        owner = pkgutil.resolve_name(path)
    if row not in TABLE:
        raise KeyError(row)
    before = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
    undos.append(lambda: setattr(owner, name, before))
    setattr(owner, name, value)


def replace_everywhere(row: str, before: object, value: object) -> None:
    """Sets what is `before` in every module that has it, under any name, for good: a model outlives its training."""
    if row not in TABLE:
        raise KeyError(row)
    for module in list(sys.modules.values()):
        for name in [name for name, each in list(getattr(module, "__dict__", {}).items()) if each is before]:
            setattr(module, name, value)


def undo_with(row: str, function: Callable[[], object]) -> None:
    """Keeps what restores a change that its caller has made. row: of TABLE."""
    if row not in TABLE:
        raise KeyError(row)
    undos.append(function)


def set_environment(name: str, value: str | None) -> None:
    """Sets an environment variable for this process and those that it starts, or removes it (None)."""
    before = os.environ.get(name)
    if value == before:
        return
    undos.append(lambda: put(name, before))
    put(name, value)


def put(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def silence(name: str, level: int) -> None:
    """Raises the level of a logger."""
    logger = logging.getLogger(name)
    undos.append(lambda before=logger.level: logger.setLevel(before))
    logger.setLevel(level)


def silence_torchao() -> None:
    """Before torchao is imported, which transformers does too."""
    hide("torch.utils._pytree", "is an Enum subclass")


def hide(name: str, text: str) -> None:
    """Drops the messages of a logger that contain `text`."""
    say_instead(name, text, lambda message: None)


def say_instead(name: str, text: str, say: Callable[[str], object]) -> None:
    """Calls `say` with the messages of a logger that contain `text`, in their place."""

    def taken(record: logging.LogRecord) -> bool:
        if text not in record.msg:
            return True
        say(record.getMessage())
        return False

    logger = logging.getLogger(name)
    undos.append(lambda: logger.removeFilter(taken))
    logger.addFilter(taken)


def ignore_warning(message: str) -> None:
    warnings.filterwarnings("ignore", message)
    entry = warnings.filters[0]
    undos.append(lambda: entry in warnings.filters and warnings.filters.remove(entry))  # pyrefly: ignore[missing-attribute]


@contextlib.contextmanager
def kept_for(user: int) -> Iterator[None]:
    """Keeps the changes that are made in this context until `release(user)`, or undoes them after an error."""
    before = len(undos)
    users.add(user)
    try:
        yield
    except BaseException:
        users.discard(user)
        while len(undos) > before:
            undos.pop()()
        raise


def release(user: int) -> None:
    """Restores everything, the newest change first, when the last Accelerator ends. user: its id."""
    users.discard(user)
    while undos and not users:
        undos.pop()()
