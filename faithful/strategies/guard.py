"""What the engines of other packages cannot do as torch does, and what is refused of it, in one line each."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NoReturn

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.tensor import DTensor

from faithful.errors import TWO_DTYPES, Refused, explained

# {package: classes of its optimizers that update each element of a weight by itself, or each block in low bits}
ELEMENTWISE = {
    "torch": "SGD Adam AdamW Adagrad RMSprop Adadelta Adamax ASGD NAdam RAdam Rprop",
    "bitsandbytes": "Adam AdamW Lion SGD RMSprop Adagrad AdEMAMix",  # and their forms in 8 and 32 bits
    "timm": "SGDW AdamWLegacy NAdamLegacy NAdamW RAdamLegacy RMSpropTF AdaBelief Adan Adopt LaProp Lion",
}
FORMS = re.compile(r"^Paged|(8|32)bit$")  # of bitsandbytes' classes


def refuse_gradient(does: str) -> NoReturn:
    """DeepSpeed averages gradients into memory of its own, and frees `.grad`. does: reads, sets."""
    raise Refused(
        f"the script {does} .grad between backward and step, which under ZeRO is not there: read it by "
        "deepspeed.utils.safe_get_full_grad(parameter) on all processes, give it up by .grad = None or zero_grad(), or "
        "use a ddp or fsdp config"
    )


def refuse_between_passes(whole: bool, engine: str = "ZeRO") -> None:
    """whole: whether the step's last backward pass is done, before which the engine has not averaged gradients."""
    if not whole:
        raise Refused(
            "the script uses gradients between the micro-batches of a step, or gives them up, but under "
            f"{engine} they are not averaged yet: do so if accelerator.sync_gradients, zero_grad() after step(), or "
            "use a ddp config"
        )


def refuse_released() -> NoReturn:
    """Stage 3 keeps a weight that is not in use as an empty tensor."""
    raise Refused(
        "the script uses a weight that ZeRO-3 has released, outside of a forward pass: do it on all processes within "
        "`with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):`, or use a zero2, ddp or fsdp config"
    )


def not_averaged() -> Refused:
    """Of torch.autograd.grad for weights that an engine of DeepSpeed trains."""
    return Refused(
        "torch.autograd.grad computes gradients that DeepSpeed neither averages nor keeps: call "
        "accelerator.backward(loss), or use a ddp config and average them"
    )


def refuse_options(names: Collection[str]) -> None:
    """names: what a backward pass of DeepSpeed's engine is asked for and does not know."""
    if names:
        raise Refused(
            f"backward({', '.join(f'{name}=...' for name in sorted(names))}): DeepSpeed's engine has no such option, "
            "leave it out, or use a ddp config"
        )


def refuse_own_backward() -> NoReturn:
    """DeepSpeed's engine has nothing to update with, and would leave each weight as it is."""
    raise Refused(
        "the script calls loss.backward(), of which DeepSpeed's engine does not know when it steps: call "
        "accelerator.backward(loss), or use a ddp or fsdp config"
    )


NOT_SCALED = (
    "gradients are not multiplied by fp16's scale: the script calls loss.backward() or torch.autograd.grad, or has a "
    "GradScaler of its own: call accelerator.backward(loss), or use a bf16 config"
)
OWN_SCALER = (
    "the script has a GradScaler of its own, which finds no gradients under ZeRO: call accelerator.backward(loss), and "
    "optimizer.step()"
)


def refuse_step() -> NoReturn:
    """Torch's step would use the gradients of before again, or zeros, which move a weight by its momentum."""
    raise Refused(
        "the script steps without a backward pass since the last step, or since zero_grad(set_to_none=False), and "
        "DeepSpeed frees gradients in both: call backward before it, or use a ddp config"
    )


def refuse_optimizer_state() -> NoReturn:
    """DeepSpeed's own has the form of its checkpoints, and a process's part alone."""
    raise Refused(
        "the script saves or loads the optimizer's state_dict, which under ZeRO is a part of it in each process: call "
        "accelerator.save_state and load_state, or use a ddp config"
    )


def refuse_complex(model: nn.Module, engine: str) -> None:
    """FSDP2 and DeepSpeed hold parameters together in one dtype, under bf16 and fp16 a real one."""
    if names := [name for name, parameter in model.named_parameters() if parameter.is_complex()]:
        raise Refused(
            f"{', '.join(names[:3])}: {engine} holds no complex parameters together with real ones, and rounds "
            "them to real ones in 16 bit: use a ddp config"
        )


def refuse_shards(model: nn.Module, strategy: str) -> None:
    """A config says how a model is distributed, so a script does not."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise Refused(
            f"{type(model).__name__} is sharded before prepare(), by transformers' DistributedConfig or tp_plan, or by "
            f"torch, and the config asks for {strategy}: load it whole, without that, and let a config shard it"
        )


def refuse_sparse(model: nn.Module, engine: str) -> None:
    """FSDP2 and DeepSpeed average gradients in flat, dense pieces."""
    kinds = nn.Embedding | nn.EmbeddingBag
    modules = [(at, module) for at, module in model.named_modules() if isinstance(module, kinds) and module.sparse]
    if names := [at or "the model" for at, module in modules if module.weight.requires_grad]:
        raise Refused(
            f"{', '.join(names[:3])}: {engine} takes no sparse gradients: leave sparse=True out, or use a ddp config"
        )


def refuse_own_parameters(model: nn.Module, engine: str) -> None:
    """FSDP2 and DeepSpeed take for all parameters what a module's `parameters()` returns."""
    for module in model.modules():
        if (kind := type(module)).parameters is not nn.Module.parameters:
            raise Refused(
                f"{kind.__name__} has a method parameters() of its own, which {engine} would take for torch's: give it "
                "another name, or use a single or ddp config"
            )


def refuse_compiled(model: nn.Module) -> None:
    """ZeRO-3 gives each module another dict for its parameters, and torch's wrapper hands it to the module inside."""
    if wrapped := [at or "the model" for at, module in model.named_modules() if "_orig_mod" in module._modules]:
        raise Refused(
            f"{', '.join(wrapped[:3])}: ZeRO-3 takes no module that torch.compile(module) has wrapped: call "
            "module.compile(), which compiles it where it is, or use a zero2 or ddp config"
        )


def make_contiguous(model: nn.Module) -> None:
    """FSDP2 and DeepSpeed hold parameters as flat pieces, so no strides of the script's (transposed, channels_last)."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def refuse_tied_blocks(model: nn.Module, classes: Iterable[str]) -> None:
    """FSDP2 gathers and frees a block's weights with the block. classes: the names of those of the blocks."""
    block_of, blocks, names, first = {}, defaultdict(set), {}, {}
    for at, module in model.named_modules(remove_duplicate=False):  # blocks may share a module, or be one
        block = first.setdefault(id(module), at)
        block_of[at] = block if type(module).__name__ in classes else block_of.get(at.rpartition(".")[0], "")
        for name, parameter in module.named_parameters(recurse=False):
            blocks[id(parameter)] |= {block_of[at]} - {""}
            names.setdefault(id(parameter), f"{at}.{name}")
    if tied := [key for key, of_weight in blocks.items() if len(of_weight) > 1]:
        raise Refused(
            f"{names[tied[0]]} is tied between {' and '.join(sorted(blocks[tied[0]])[:2])}, which FSDP2 gathers one by "
            "one: untie them, say fsdp_auto_wrap_policy: NO_WRAP, or use a ddp config"
        )


def updates_elements(optimizer: torch.optim.Optimizer) -> bool:
    """Whether flat parts of the weights are enough for the optimizer. LAMB, LARS, Muon, Adafactor and those that clip
    each layer look at a whole matrix, Prodigy at the whole model; and timm's option `caution` at a whole tensor."""
    package, name = type(optimizer).__module__.partition(".")[0], type(optimizer).__name__
    name = FORMS.sub("", name) if package == "bitsandbytes" else name
    cautious = any(group.get("caution") for group in optimizer.param_groups)
    return name in ELEMENTWISE.get(package, "").split() and not cautious


def refuse_strangers(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """DeepSpeed knows the parameters of its model alone."""
    own = set(map(id, model.parameters()))
    if strangers := sum(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise Refused(
            f"the optimizer updates {strangers} tensors that are not in the model, perhaps the loss's, and DeepSpeed "
            "cannot: make them parameters of the model, or give them an optimizer of their own under a ddp config"
        )


def refuse_other_order(model: nn.Module, optimizer: torch.optim.Optimizer, engine: str) -> None:
    """Raises Refused if the processes have an optimizer's parameters in different orders. Every process calls it."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    row = ", ".join(name_of.get(id(p), "") for group in optimizer.param_groups for p in group["params"])
    if len(set(gather_object([row]))) > 1:
        raise Refused(
            f"each process has the parameters of {type(optimizer).__name__} in another order, as a set has them, and "
            f"{engine} would take one for another: give it a list, [p for p in model.parameters() if p in the_set]"
        )


def copied(error: str, engine: str) -> Refused | None:
    """What an error says of a copy of a prepared model, or None."""
    text = (
        "the script copies a model after prepare(), AveragedModel(model) perhaps, and {engine} holds it in parts that "
        "cannot be copied: make the copy before prepare(), or use a ddp config"
    )
    return explained(error, {r"does not support deepcopy|cannot pickle '\S*ProcessGroup'": text}, engine=engine)


def in_two_dtypes(error: str, engine: str) -> Refused | None:
    """What an error says of 16-bit weights that meet fp32 tensors, or None."""
    text = (
        "{engine}, and the script computes with fp32 tensors beside them ({line}): with buffers of its own, or where "
        "it switches autocast off, perhaps: use a ddp config"
    )
    return explained(error, {TWO_DTYPES: text}, engine=engine, line=error.partition("\n")[0])


def second_pass(error: str) -> Refused | None:
    """What an error says of a backward pass that finds weights released by stage 3, or gradients averaged, or None."""
    texts = {
        "Multiple gradient reduction is currently not supported": (
            "a backward pass runs several others, as sentence-transformers' cached losses do, and DeepSpeed averages "
            "the gradients of each parameter once: use another loss, or a ddp or fsdp config"
        ),
        r"size of tensor a \(0\) must match": (
            "a backward pass needs a weight that ZeRO-3 has released, perhaps a second one through one graph "
            "(retain_graph=True): add the losses and call backward once, or use a zero2, ddp or fsdp config"
        ),
    }
    return explained(error, texts)
