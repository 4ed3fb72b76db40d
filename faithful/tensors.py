"""Names, parts, sizes and hashes of tensors: each idea once, for evidence, checkpoints and the record."""

from hashlib import sha256

import torch
from torch.distributed.tensor import DTensor


def named(pairs):
    """(name, tensor) as the plain model names them, whatever wraps it: DDP, checkpointed blocks."""
    for name, tensor in pairs:
        yield name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""), tensor


def local(tensor):
    """This rank's part of a tensor, without torchao's wrapper around it; of a weight on MS-AMP's levels its codes."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(part, "_tensor", getattr(part, "codes", part))


def elements(tensors):
    """{dtype name: number of elements}"""
    counts = {}
    for tensor in tensors:
        name = str(tensor.dtype)[6:]
        counts[name] = counts.get(name, 0) + tensor.numel()
    return counts


def size(tensors):
    """Bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def fingerprint(model):
    """A hash of the weights as they are, by name: runs of one seed begin with the same, whatever the config."""
    sums = [(name, torch.hash_tensor(p.detach()).item()) for name, p in model.named_parameters() if p.numel()]
    return sha256(repr(sums).encode()).hexdigest()


@torch.no_grad()
def nudge(model):
    """Moves every weight to the next number of its dtype: a run from there differs by chance alone."""
    for parameter in model.parameters():
        parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))


def sum_of_sample_hashes(tensors):
    """The sum, modulo 2**256, of the sha256 of every sample of a batch.

    tensors: [batch, ...] each; a sample is one row of all of them. The sum is the same however the samples are ordered
    and spread over processes.
    """
    rows = [tensor.detach().cpu().contiguous() for tensor in tensors]
    total = 0
    for sample in zip(*rows, strict=True):
        parts = b"".join(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in sample)
        total += int.from_bytes(sha256(parts).digest(), "big")
    return total % 2**256
