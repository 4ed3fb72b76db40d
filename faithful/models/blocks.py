"""The blocks of a model: the layers that FSDP2 gathers, and torch.compile compiles, one by one."""

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import TorchDynamoPlugin
from torch import nn

from faithful import patches
from faithful.errors import Refused

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
COMPILED = 8  # torch's recompile_limit
LEAST = "torch._inductor.codegen.triton:TritonOverrides.minimum, maximum"


def name_blocks(model: nn.Module) -> None:
    """Sets `model._no_split_modules` to the names of its block classes: those that the model lists there itself, or its
    repeated layers if it lists none. `block_names` reads them: sentence-transformers has a property of this name."""
    classes = {type(module).__name__ for module in model.modules()}
    named = [name for name in getattr(model, "_no_split_modules", None) or () if name in classes]
    # Accelerate shards the embedding separately: a block that contains it (BertEmbeddings) would be sharded twice.
    embedding = embedding_of(model)
    holders = {type(m).__name__ for m in model.modules() if embedding is not None and embedding in m.modules()}
    vars(model)["_no_split_modules"] = [name for name in named if name not in holders] or repeated(model)


def embedding_of(model: nn.Module) -> nn.Module | None:
    """The model's embedding of tokens, or None. Some of transformers' models of images, as Segformer, raise instead."""
    try:
        return getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:
        return None


def block_names(model: nn.Module) -> list[str] | None:
    """What `name_blocks` has set, or None."""
    return vars(model).get("_no_split_modules")


def repeated(model: nn.Module) -> list[str]:
    """Names of the layer classes that occur at least twice in the model's lists. Does not look inside such layers.
    A class whose `__call__` is not nn.Module's and does not call it, as IP-Adapter's attention processors, runs no
    hooks, which FSDP2 needs."""
    counts: Counter[str] = Counter()

    def look(module: nn.Module, listed: bool) -> None:
        for child in module.children():
            call: Any = type(child).__call__
            code = getattr(call, "__code__", None)  # not of a partial method, say
            hooked = call is nn.Module.__call__ or code is None or "__call__" in code.co_names
            if isinstance(child, CONTAINERS):
                look(child, True)
            elif listed and hooked and any(child.children()) and any(True for _ in child.parameters()):
                counts[type(child).__name__] += 1
            else:
                look(child, False)

    look(model, isinstance(model, CONTAINERS))
    return sorted(name for name, count in counts.items() if count > 1)


def compile_blocks(model: nn.Module, compiled_if: Callable[..., bool] | None = None) -> None:
    """Compiles each block as dynamo_config says; blocks of one class share the compiled code. Compiling in place keeps
    the modules that DDP, FSDP2 and checkpointing look for. compiled_if(block, *args): says of each call whether it is
    compiled; None: all are."""
    name_blocks(model)
    options, names = TorchDynamoPlugin().to_kwargs(), block_names(model) or ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise Refused(
            "asked for compiled blocks, but the model names none and repeats none: set _no_split_modules to "
            "the names of their classes"
        )
    allow_each_kind(blocks)
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        patches.replace("torch._inductor.config:cpp.simdlen", 256)
    compare_to_find_the_least()
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):  # transformers'
            names = [*inspect.signature(type(module).forward).parameters]
            if "use_cache" in names:
                hook = functools.partial(without_cache, names.index("use_cache") - 1)
                module.register_forward_pre_hook(hook, with_kwargs=True)
    for block in blocks:
        block.compile(**options)
        if compiled_if:
            compiled: Any = block._compiled_call_impl
            block._compiled_call_impl = compiled_or_eager(block, compiled, compiled_if)


def without_cache(at: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """A hook: where a loss is computed and nobody asks for a cache of keys and values, the model makes none. Each block
    has its own place in it, so torch would compile each one anew, and leave the ninth and all later ones as they are.
    at: the position of `use_cache` among the arguments."""
    names = ("use_cache", "cache", "past_key_values")  # the last one was the second's name before transformers 5.24
    asked = len(args) > at or any(kwargs.get(name) is not None for name in names)
    if asked or not (model.training or kwargs.get("labels") is not None):
        return None
    return args, kwargs | {"use_cache": False}


def compare_to_find_the_least() -> None:
    """Lets torch's compiler write minimum and maximum as comparisons, with the same results, as torchao does."""
    from torch._inductor.codegen.triton import TritonOverrides

    for name, sign in (("minimum", "<"), ("maximum", ">")):
        if "PropagateNan" in getattr(TritonOverrides, name)("a", "b"):

            def compared(a: object, b: object, sign: str = sign) -> str:
                return f"tl.where(({a} {sign} {b}) | ({a} != {a}), {a}, {b})"

            patches.replace(LEAST, staticmethod(compared), TritonOverrides, name)


def allow_each_kind(blocks: list[nn.Module]) -> None:
    """Lets torch compile each kind of block COMPILED times: for training, evaluation, a smaller last batch. It counts
    by class, and with its own limit the blocks of a ResNet, each stage of another size, leave none for evaluation."""
    named = [(type(b), (*b.named_parameters(), *b.named_buffers())) for b in blocks]
    kinds = {(kind, *((name, tensor.shape) for name, tensor in tensors)) for kind, tensors in named}
    most = COMPILED * max(Counter(kind for kind, *_ in kinds).values())
    if most > torch._dynamo.config.recompile_limit:
        patches.replace("torch._dynamo.config:recompile_limit", most)


def by_compiler() -> dict[str, int]:
    """What torch.compile has done in this process: graphs, breaks in them, which run as Python, and how often it has
    compiled a function again, for another shape, say."""
    from torch._dynamo import convert_frame, utils

    again = sum(count - 1 for count in convert_frame.FRAME_COMPILE_COUNTER.values())
    breaks = sum(utils.counters["graph_break"].values())
    return {"graphs": utils.counters["stats"]["unique_graphs"], "graph_breaks": breaks, "recompilations": again}


def compiled_or_eager(
    block: nn.Module, compiled: Callable[..., Any], compiled_if: Callable[..., bool]
) -> Callable[..., Any]:
    return lambda *args, **kwargs: (compiled if compiled_if(block, *args) else block._call_impl)(*args, **kwargs)
