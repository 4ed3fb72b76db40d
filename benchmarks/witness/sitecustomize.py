"""Python imports this at its start when this folder is on PYTHONPATH. In the processes of a launched run it writes what
each optimizer step did to the file $WITNESS/rank<N>.json: it is the same for faithful's Accelerator and Accelerate's.

In the file: the losses of this process, and for each optimizer after each of its steps one number, the norm of all its
weights, and a hash of their bits. A seed is set for scripts that set none.
"""

import os
import sys

if os.environ.get("WITNESS") and "ACCELERATE_MIXED_PRECISION" in os.environ and "torch" not in sys.modules:
    import hashlib
    import json
    import random
    from pathlib import Path

    import numpy
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    losses, optimizers = [], {}
    folder, rank = Path(os.environ["WITNESS"]), os.environ.get("RANK", "0")
    backward = torch.Tensor.backward

    def kept(loss, *args, **kwargs):
        losses.append(loss.detach().double().item() if loss.numel() == 1 else None)
        return backward(loss, *args, **kwargs)

    def stepped(optimizer, args, kwargs):
        digest, square = hashlib.sha256(), 0.0
        for group in optimizer.param_groups:
            for weight in group["params"]:
                part = getattr(weight, "_local_tensor", weight)
                part = getattr(part, "codes", part).detach()  # of amp8's weights
                digest.update(part.contiguous().flatten().view(torch.uint8).numpy().tobytes())
                square += part.double().square().sum().item()
        mine = optimizers.setdefault(id(optimizer), {"norms": [], "hash": None})
        mine["norms"].append(square**0.5)
        mine["hash"] = digest.hexdigest()
        made = {"processes": int(os.environ.get("WORLD_SIZE", "1")), "losses": losses}
        (folder / f"rank{rank}.json").write_text(json.dumps(made | {"optimizers": list(optimizers.values())}))

    torch.Tensor.backward = kept
    register_optimizer_step_post_hook(stepped)
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)
