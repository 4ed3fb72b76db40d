"""How much slower are the recipes than a handwritten loop? Runs the same training in four ways, in turns.

    python benchmarks/overhead.py --output results/overhead.json

  hand     a loop with PyTorch alone: DataLoader, autocast, DistributedDataParallel
  recipe   recipes/vit.py
  fabric   the handwritten loop with Lightning Fabric
  trainer  transformers' Trainer

All four have the same model, data, sample order, batch, AdamW, schedule and clipping, and log the loss every 10 steps.
They run in turns of 20 steps (harness.py). A step includes loading, moving, logging and checks, but neither
evaluation nor saving. A ratio compares the median steps of one turn; the report has the median and quartiles over the
turns. In one process the final fp32 losses must agree, or the trainings differ.

One difference remains: after a wait the recipe's ranks exchange losses once more than they would otherwise.

Start-up is the time from the command to the end of the first optimizer step. Needs the extra `bench`.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import KINDS, ROOT, TURN, WARMUP_STEPS, arguments, command, failed, in_turns, made, ratio, save, watch

WAYS = ("hand", "recipe", "fabric", "trainer")
BATCH, SEED = 32, 0  # the batch is the global one


# ----------------------------------------------------------------------------------------------------- inside a process


def ingredients(model, steps):
    """Model, optimizer, schedule and data like in recipes/vit.py, for the other three ways."""
    import torch
    from transformers import get_cosine_schedule_with_warmup

    from shared import images, vision

    torch.manual_seed(SEED)
    train_set, _ = images.images("digits", None)
    net = vision.vit(model, train_set.image_size, train_set.in_chans, train_set.num_classes)
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=0.05)
    return net, optimizer, get_cosine_schedule_with_warmup(optimizer, 30, steps), train_set


def order(train_set, steps):
    """The samples of this many global batches, in the recipe's order."""
    from shared.data import Order, Progress

    return list(itertools.islice(Order(len(train_set), BATCH, SEED, Progress({})), steps * BATCH))


def share(samples, rank, world):
    """A rank's samples: each rank takes one slice of each global batch."""
    return [sample for at, sample in enumerate(samples) if at % BATCH // (BATCH // world) == rank]


def hand(model, precision, steps):
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    net, optimizer, lr_scheduler, train_set = ingredients(model, steps)
    if world > 1:
        dist.init_process_group("gloo")
        net = DistributedDataParallel(net)
    samples = share(order(train_set, steps), rank, world)
    loader = DataLoader(train_set, BATCH // world, sampler=samples, collate_fn=as_is)
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
    engine = Fabric(
        accelerator="cpu", devices=world, precision={"bf16": "bf16-mixed", "fp32": "32-true"}[precision], **strategy
    )
    engine.launch()
    net, optimizer, lr_scheduler, train_set = ingredients(model, steps)
    net, optimizer = engine.setup(net, optimizer)
    samples = share(order(train_set, steps), engine.global_rank, world)
    loader = DataLoader(train_set, BATCH // world, sampler=samples, collate_fn=as_is)
    loader = engine.setup_dataloaders(loader, use_distributed_sampler=False)
    net.train()
    for step, batch in enumerate(loader, 1):
        logits = net(batch["pixel_values"])
        loss = F.cross_entropy(logits.float(), batch["labels"])
        engine.backward(loss)
        engine.clip_gradients(net, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
        if step % 10 == 0:
            engine.print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if step == steps:
            return loss.item()


def trainer(model, precision, steps):
    import torch.nn.functional as F
    from transformers import Trainer, TrainingArguments

    class Images(Trainer):
        def compute_loss(self, net, inputs, return_outputs=False, num_items_in_batch=None):
            return F.cross_entropy(net(inputs["pixel_values"]).float(), inputs["labels"])

        def _get_train_sampler(self, dataset):  # of all samples: Accelerate deals the batches out
            return order(dataset, steps)

    net, optimizer, lr_scheduler, train_set = ingredients(model, steps)
    world = int(os.environ.get("WORLD_SIZE", 1))
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_steps": steps, "per_device_train_batch_size": BATCH // world, "seed": SEED}
        options |= {"max_grad_norm": 1.0, "logging_steps": 10, "report_to": [], "save_strategy": "no"}
        options |= {"remove_unused_columns": False, "dataloader_pin_memory": False, "ddp_find_unused_parameters": False}
        settings = TrainingArguments(folder, bf16=precision == "bf16", use_cpu=True, **options)
        optimizers = (optimizer, lr_scheduler)
        made = Images(net, settings, data_collator=as_is, train_dataset=train_set, optimizers=optimizers)
        made.train()
    return None


def recipe(model, precision, steps):
    """Runs recipes/vit.py as __main__."""
    import runpy

    world = int(os.environ.get("WORLD_SIZE", 1))
    out = tempfile.mkdtemp()
    sys.argv = [str(ROOT / "recipes" / "vit.py"), "--model", model, "--max_steps", str(steps), "--save_steps", "0"]
    sys.argv += ["--eval_steps", "0", "--output_dir", f"{out}/run"]
    sys.argv += ["--per_device_train_batch_size", str(BATCH // world)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def as_is(batch):
    """The dataset returns whole batches, so there is nothing to collate."""
    return batch


# ------------------------------------------------------------------------------------------------------------ measuring


def start(model, precision, processes, way, steps, folder, port=0, command=None):
    """Starts a process, or a launcher with two. Its output and times go into `folder`."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    env["ACCELERATE_MIXED_PRECISION"] = {"fp32": "no"}.get(precision, precision)
    launcher = [sys.executable]
    if processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    this = [str(ROOT / "benchmarks" / "overhead.py"), "--one", way, "--model", model, "--precision", precision]
    this += ["--steps", str(steps), "--file", str(folder / f"{way}.json"), "--port", str(port)]
    with open(folder / f"{way}.log", "w") as log:
        return subprocess.Popen([*(command or launcher), *this], cwd=ROOT, env=env, stdout=log, stderr=log)


def first_step(way, processes, command):
    """Seconds from the command to the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        start("vit_nano", "fp32", processes, way, 5, Path(folder), command=command).wait()
        file = Path(folder, f"{way}.json")
        return json.loads(file.read_text())["first_step"] - began if file.exists() else failed(way, Path(folder))


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--models", nargs="*", default=["vit_nano=24", "vit_tiny=8"], help="model=turns")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--start", type=int, default=0, metavar="ROUNDS", help="measure start-up too, so many times")
    args = parser.parse_args()
    result = made(args.output, rows=[], start=[])
    for model, turns in (pair.split("=") for pair in args.models):
        for precision in args.precisions:
            for processes in args.processes:
                setting = {"model": model, "precision": precision, "processes": processes}
                figures = in_turns(WAYS, int(turns), functools.partial(start, model, precision, processes))
                by_hand = statistics.median(figures["hand"]["wall"])
                row = setting | {"turns": int(turns), "steps_of_a_turn": TURN - WARMUP_STEPS}
                row |= {"step_seconds_by_hand": by_hand}
                for way in WAYS[1:]:
                    row[way] = {key: ratio(figures[way][key], figures["hand"][key]) for key in KINDS}
                ends = {way: figures[way]["losses"][-1] for way in WAYS[:3]}  # the Trainer logs means of 10 steps
                if processes == 1 and precision == "fp32" and max(ends.values()) - min(ends.values()) > 1e-3:
                    raise SystemExit(f"not the same training: final losses {ends}")
                result["rows"] = [r for r in result["rows"] if {k: r[k] for k in setting} != setting] + [row]
                print(f"{model} {precision} x{processes}: {1000 * by_hand:.1f} ms by hand", flush=True)
                for way in WAYS[1:]:
                    wall, (low, high) = row[way]["wall"]["median"], row[way]["wall"]["quartiles"]
                    cpu, fastest = (row[way][key]["median"] for key in ("cpu", "fastest"))
                    print(f"  {way:8} {wall:.3f} ({low:.3f} to {high:.3f}), CPU {cpu:.3f}, fastest {fastest:.3f}")
                keep(args.output, result)
    if args.start:
        result["start"] = start_up(args)
        for row in result["start"]:
            print(
                f"start-up, {row['way']} x{row['processes']}: {row['seconds']:.1f} s, {row['of_hand']:.2f} of by hand"
            )
    keep(args.output, result)


def start_up(args):
    """{way of starting: seconds from the command to the end of the first optimizer step}."""
    config = {1: "single_fp32", 2: "ddp_fp32"}
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file"]
    ways = {
        "by hand": ("hand", lambda n: None),
        "recipe, python or torchrun": ("recipe", lambda n: None),
        "recipe, ./launch.sh": ("recipe", lambda n: ["./launch.sh", config[n]]),
        "recipe, accelerate launch": ("recipe", lambda n: [*launcher, f"accelerate_configs/{config[n]}.yml"]),
    }
    rows = []
    for processes in args.processes:
        turns = [
            {name: first_step(way, processes, how(processes)) for name, (way, how) in ways.items()}
            for _ in range(args.start)
        ]
        for name in ways:
            times, of_hand = [t[name] for t in turns], [t[name] / t["by hand"] for t in turns]
            row = {"way": name, "processes": processes, "seconds": statistics.median(times)}
            rows.append(row | {"of_hand": statistics.median(of_hand), "min": min(of_hand), "max": max(of_hand)})
    return rows


def keep(file, result):
    """Writes the results. If several commands write to one file, it names all of them."""
    if file is None:
        return
    kept = {name: result[name] for name in ("rows", "start")}
    packages = ("accelerate", "timm", "transformers", "lightning-fabric")
    save(file, kept | {"command": command(result.get("command")), "batch": BATCH}, packages)


if __name__ == "__main__":
    if "--one" in sys.argv:
        inside = argparse.ArgumentParser()
        kinds = {"one": str, "model": str, "precision": str, "steps": int, "file": Path, "port": int}
        for name, kind in kinds.items():
            inside.add_argument(f"--{name}", type=kind)
        one = inside.parse_args()
        watch(one.file, one.steps, one.port)
        print(f"loss {globals()[one.one](one.model, one.precision, one.steps)}", flush=True)
        os._exit(0)  # gloo's threads may abort a process at its ordinary exit
    main()
