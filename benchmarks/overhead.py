"""What do these recipes cost over a loop written by hand? The same training in four ways, run in turns.

    python benchmarks/overhead.py --output results/overhead.json

  hand     PyTorch alone: DataLoader, autocast, DistributedDataParallel, a loop
  recipe   recipes/vit.py
  fabric   the loop by hand on Lightning Fabric
  trainer  transformers' Trainer

Same model, data, sample order, batch, AdamW, schedule, clipping, and a loss logged every 10 steps. A step lasts from
one optimizer step to the next, in all four by the same hook in torch, so that whatever a way does in between is in it:
fetching, moving, logging, checking. Evaluation and saving are outside. The ways take turns, `--rounds` times; a ratio
is that of the medians of one turn, and reported are the median of the ratios and their range. In one process the final
losses in fp32 must agree, or this compares different trainings.

Start-up is from the command to the end of the first optimizer step, by the clock. Needs the extra `bench`.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("hand", "recipe", "fabric", "trainer")
BATCH, WARMUP_STEPS, SEED = 32, 5, 0  # the batch is the global one; the first steps are not timed


# ----------------------------------------------------------------------------------------------------- inside a process


def watch(file, steps):
    """Writes down when each optimizer step ended, and everything at the last one."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    ends, began = [], []

    def after_step(*_):
        began or began.append(time.time())
        ends.append((time.perf_counter(), time.process_time()))
        if len(ends) == steps and int(os.environ.get("RANK", 0)) == 0:
            file.write_text(json.dumps({"first_step": began[0], "ends": ends}))

    register_optimizer_step_post_hook(after_step)


def ingredients(model):
    """What all but the recipe itself build: model, optimizer, schedule and data, as recipes/vit.py does."""
    import torch
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import LambdaLR

    sys.path.append(str(ROOT))
    from recipes.vit import warmup_cosine
    from shared import data, models

    torch.manual_seed(SEED)
    train_set, _ = data.images("digits", None)
    net = models.vit(model, train_set.image_size, train_set.in_chans, train_set.num_classes)
    optimizer = AdamW(net.parameters(), 2e-3, weight_decay=0.05)
    return net, optimizer, LambdaLR(optimizer, lambda step: warmup_cosine(step, 30, 300)), train_set


def order(train_set, rank, world):
    """This rank's samples in the order of the recipe: of each global batch the ranks take a slice each."""
    from shared.data import Order

    per_rank = BATCH // world
    return [
        sample
        for at, sample in zip(range(100_000), Order(len(train_set), BATCH, SEED), strict=False)
        if at % BATCH // per_rank == rank
    ]


def hand(model, precision, steps):
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    net, optimizer, lr_scheduler, train_set = ingredients(model)
    if world > 1:
        dist.init_process_group("gloo")
        net = DistributedDataParallel(net)
    loader = DataLoader(train_set, BATCH // world, sampler=order(train_set, rank, world), collate_fn=as_is())
    net.train()
    for step, batch in enumerate(loader, 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = net(batch["pixel_values"])
        loss = F.cross_entropy(logits.float(), batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if step == steps:
            return loss.item()


def fabric(model, precision, steps):
    import torch.nn.functional as F
    from lightning_fabric import Fabric
    from torch.utils.data import DataLoader

    world = int(os.environ.get("WORLD_SIZE", 1))
    strategy = {"strategy": "ddp"} if world > 1 else {}
    made = Fabric(accelerator="cpu", devices=world, precision={"bf16": "bf16-mixed", "fp32": "32-true"}[precision],
                  **strategy)  # fmt: skip
    made.launch()
    net, optimizer, lr_scheduler, train_set = ingredients(model)
    net, optimizer = made.setup(net, optimizer)
    samples = order(train_set, made.global_rank, world)
    loader = DataLoader(train_set, BATCH // world, sampler=samples, collate_fn=as_is())
    loader = made.setup_dataloaders(loader, use_distributed_sampler=False)
    net.train()
    for step, batch in enumerate(loader, 1):
        logits = net(batch["pixel_values"])
        loss = F.cross_entropy(logits.float(), batch["labels"])
        made.backward(loss)
        made.clip_gradients(net, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
        if step % 10 == 0:
            made.print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if step == steps:
            return loss.item()


def trainer(model, precision, steps):
    import torch.nn.functional as F
    from transformers import Trainer, TrainingArguments

    class Images(Trainer):
        def compute_loss(self, net, inputs, return_outputs=False, num_items_in_batch=None):
            return F.cross_entropy(net(inputs["pixel_values"]).float(), inputs["labels"])

        def _get_train_sampler(self, dataset):  # of all samples: Accelerate deals the batches out
            from shared.data import Order

            return [sample for _, sample in zip(range(steps * BATCH), Order(len(dataset), BATCH, SEED), strict=False)]

    net, optimizer, lr_scheduler, train_set = ingredients(model)
    world = int(os.environ.get("WORLD_SIZE", 1))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH // world, logging_steps=10, save_strategy="no",
            report_to=[], bf16=precision == "bf16", use_cpu=True, remove_unused_columns=False, max_grad_norm=1.0,
            seed=SEED, dataloader_pin_memory=False, ddp_find_unused_parameters=False,
        )  # fmt: skip
        made = Images(net, arguments, data_collator=as_is(), train_dataset=train_set, optimizers=(optimizer, lr_scheduler))  # fmt: skip
        made.train()
    return None


def recipe(model, precision, steps):
    """recipes/vit.py as its own __main__; it ends the process."""
    import runpy

    world = int(os.environ.get("WORLD_SIZE", 1))
    out = tempfile.mkdtemp()
    sys.argv = [str(ROOT / "recipes" / "vit.py"), "--model", model, "--max_steps", str(steps), "--save_steps", "0"]
    sys.argv += ["--eval_steps", "0", "--output_dir", f"{out}/run", "--per_device_train_batch_size", str(BATCH // world)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def as_is():
    from shared import data

    return data.as_is


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--one"); p.add_argument("--model"); p.add_argument("--precision"); p.add_argument("--steps", type=int); p.add_argument("--file", type=Path)
    a = p.parse_args()
    watch(a.file, a.steps)
    print(globals()[a.one](a.model, a.precision, a.steps), flush=True)
    os._exit(0)
