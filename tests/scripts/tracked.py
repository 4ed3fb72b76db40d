"""Prints the peak of memory of two steps of blocks.py under FSDP2 and autocast, as torch's own tracker counts it."""

import sys
from pathlib import Path

import torch
from blocks import Net
from torch.distributed import init_process_group
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.append(str(Path(__file__).parents[2]))
from faithful.models import batch_norm  # noqa: E402

batch_norm.layers_and_groups()
width, batch, processes = map(int, sys.argv[1:])
init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
mesh = init_device_mesh("cpu", (processes,))
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
model, x = Net(width), torch.randn(batch, width)
for module in (*model.blocks, model):
    fully_shard(module, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
tracker = FSDPMemTracker(model, optimizer)
tracker.track_inputs((x,))
with tracker:
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:  # the optimizer's state exists from now on
            tracker.reset_mod_stats()
[peak] = tracker.get_tracker_snapshot("peak").values()
print(peak["Total"])
