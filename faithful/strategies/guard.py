"""What the engines of other packages cannot do as torch does, and what is refused of it, in one line each."""

from torch import nn

from faithful.errors import Refused


def refuse_gradients_in_two_places(offloaded: bool) -> None:
    """The script has used `.grad`, and makes another backward pass before its step. offloaded: the engine adds up
    gradients in the host's memory, where what was written to `.grad` is not."""
    if offloaded:
        raise Refused(
            "the script uses .grad, or sets it, between two backward passes of a step, which DeepSpeed adds up in the "
            "host's memory: use .grad after the last one, call optimizer.zero_grad() to give gradients up, or use a "
            "zero config without offloading"
        )


def refuse_complex(model: nn.Module, engine: str) -> None:
    """FSDP2 and DeepSpeed hold parameters together in one dtype, under bf16 and fp16 a real one."""
    if names := [name for name, parameter in model.named_parameters() if parameter.is_complex()]:
        raise Refused(
            f"{', '.join(names[:3])}: {engine} holds no complex parameters together with real ones, and rounds "
            "them to real ones in 16 bit: use a ddp config"
        )


def second_pass(error: str) -> Refused | None:
    """What an error says of a backward pass that finds weights released by stage 3, or None."""
    if "size of tensor a (0) must match" not in error:
        return None
    return Refused(
        "a backward pass needs a weight that ZeRO-3 has released, perhaps a second one through one graph "
        "(retain_graph=True): add the losses and call backward once, or use a zero2, ddp or fsdp config"
    )
