"""The blocks of a model: what is compiled one by one."""

from accelerate.utils import TorchDynamoPlugin

from faithful.errors import Refused


def compile_blocks(model, eager_in_eval):
    """Compiles each block in place, as the file's dynamo_config says; the first one's code serves them all. In place,
    because DDP, FSDP2 and checkpointing go on finding the modules they know. eager_in_eval: a block in eval() runs as
    it is written."""
    options, names = TorchDynamoPlugin().to_kwargs(), getattr(model, "_no_split_modules", None) or ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise Refused("asked for compiled blocks, but the model names none: set _no_split_modules to their class names")
    for block in blocks:
        block.compile(**options)
        if eager_in_eval:
            block._compiled_call_impl = while_training(block, block._compiled_call_impl)


def while_training(block, compiled):
    return lambda *args, **kwargs: (compiled if block.training else block._call_impl)(*args, **kwargs)
