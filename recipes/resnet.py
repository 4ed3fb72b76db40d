"""Train a residual network to classify images.

    accelerate launch --config_file accelerate_configs/ddp_bf16.yml recipes/resnet.py
    accelerate launch --config_file accelerate_configs/fsdp_bf16.yml recipes/resnet.py --dataset photos --model resnet18
    torchrun --nproc_per_node 2 recipes/resnet.py
    python recipes/resnet.py --max_steps 20

What is trained is here; how it is trained (precision, processes, sharding) is in the YAML and nowhere else.
Batch norm normalizes each process's micro-batch by itself, as DDP does; its running averages are of all processes.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))
from shared import data, models  # noqa: E402
from shared.fp8 import evaluation  # noqa: E402
from shared.plan import resolve  # noqa: E402
from shared.precision import prepare  # noqa: E402
from shared.run import Run, launch  # noqa: E402


@dataclass
class Arguments:
    # what is trained
    dataset: str = "digits"  # digits, photos, textures, synthetic, a Hub dataset, or a folder of one per class
    image_size: int | None = None  # pixels; default: the data's own, a pretrained model's, or 224
    model: str = "resnet_nano"  # resnet_nano, resnet18, resnet50, any ResNet of timm, a run
    pretrained: bool = False  # start from timm's weights of that name, or where --model is a run's folder, from its
    freeze: int = 0  # so many first blocks, and what is before them, stay as they are
    layer_decay: float = 1.0  # each block learns at this fraction of the next one's rate
    dropout: float = 0.0  # while training, wherever the model has dropout
    skip_broken: int = 0  # leave out up to so many images that cannot be read
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"  # of the parameters themselves
    # optimization
    optimizer: Literal["adamw", "sgd"] = "adamw"  # sgd has momentum 0.9
    learning_rate: float = 2e-3  # peak, after the warm-up
    weight_decay: float = 0.05  # decoupled in AdamW
    warmup_steps: int = 30  # optimizer steps of linear warm-up; cosine decay to zero after it
    max_steps: int = 300  # optimizer steps
    per_device_train_batch_size: int = 32  # samples per process and micro-batch
    per_device_eval_batch_size: int = 64  # samples per process
    gradient_accumulation_steps: int = 1  # micro-batches per optimizer step
    max_grad_norm: float = 1.0  # clip the global gradient norm; 0 means don't
    grad_scaler: str = ""  # for fp16: init_scale=65536,growth_factor=2,backoff_factor=0.5,growth_interval=2000
    seed: int = 0  # of weights, sample order and dropout
    # the run
    output_dir: str | None = None  # default: runs/<recipe>-<config>-<time>
    logging_steps: int = 10  # optimizer steps
    eval_steps: int = 100  # optimizer steps; 0 means only at the end
    save_steps: int = 100  # optimizer steps; 0 means only when stopped by SIGTERM
    save_total_limit: int = 2  # complete checkpoints kept
    resume_from_checkpoint: str | None = None  # latest (in output_dir), or a checkpoint folder
    report_to: str | None = None  # tensorboard, trackio or wandb; metrics.jsonl is always written
    dataloader_num_workers: int = 0  # processes that load data, per training process


def evaluate(run, model, loader):
    """Mean loss and accuracy over the held-out set, every sample counted once."""
    losses, hits, dtype = [], [], getattr(torch, run.args.dtype)
    for batch in loader:
        with torch.no_grad(), evaluation(model):
            logits = model(batch["pixel_values"].to(dtype))
        loss = F.cross_entropy(at_least_float32(logits), batch["labels"], reduction="none")
        hit = logits.argmax(-1) == batch["labels"]
        loss, hit = run.accelerator.gather_for_metrics((loss, hit))
        losses.append(loss)
        hits.append(hit)
        run.stop_if_asked()
    losses, hits = torch.cat(losses), torch.cat(hits)
    assert len(hits) == len(loader.dataset), f"evaluated {len(hits)} samples of {len(loader.dataset)}"
    return {"eval_loss": losses.double().mean().item(), "accuracy": hits.double().mean().item()}


def at_least_float32(logits):
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def warmup_cosine(step, warmup_steps, max_steps):
    progress = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    return (step + 1) / warmup_steps if step < warmup_steps else 0.5 * (1 + math.cos(math.pi * min(1, progress)))


def main(args):
    plan = resolve()
    accelerator = Accelerator(
        **plan.kwargs(args.gradient_accumulation_steps, args.grad_scaler),
        log_with=args.report_to,
        project_dir=args.output_dir if args.report_to else None,
    )
    run = Run(accelerator, plan, args)
    set_seed(args.seed)
    with accelerator.main_process_first():
        config = models.data_config(args.model, args.pretrained)
        train_set, eval_set = data.images(args.dataset, args.image_size, config, args.seed, args.skip_broken)
    dtype = getattr(torch, args.dtype)
    shape = train_set.image_size, train_set.in_chans, train_set.num_classes
    model = models.resnet(args.model, *shape, args.pretrained, args.dropout).to(dtype)

    fused = accelerator.device.type == "cuda"
    groups = models.groups(model, args)
    if args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, args.learning_rate, weight_decay=args.weight_decay, fused=fused)
    else:
        optimizer = torch.optim.SGD(groups, args.learning_rate, 0.9, weight_decay=args.weight_decay, fused=fused)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, args.warmup_steps, args.max_steps)
    )
    loading = data.loading(args.dataloader_num_workers, pin_memory=fused)
    order = run.order(train_set)
    train_loader = DataLoader(train_set, args.per_device_train_batch_size, sampler=order, **loading)
    eval_loader = DataLoader(eval_set, args.per_device_eval_batch_size, **loading)
    model, optimizer, train_loader, eval_loader, evidence = prepare(
        accelerator, plan, model, optimizer, train_loader, eval_loader
    )
    run.start(model, optimizer, lr_scheduler, evidence, train_set)

    model.train()
    for batch in run.batches(train_loader):
        if run.due(args.eval_steps):
            run.log(evaluate(run, model, eval_loader))
        with accelerator.accumulate(model):
            logits = model(batch["pixel_values"].to(dtype))
            loss = F.cross_entropy(at_least_float32(logits), batch["labels"])
            run.share(loss)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                grad_norm = accelerator.clip_grad_norm_(run.parameters, args.max_grad_norm or math.inf)
                run.agree(grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            models.average_statistics(model)
        if accelerator.sync_gradients:
            if not accelerator.optimizer_step_was_skipped:
                lr_scheduler.step()
            run.stepped()
    run.finish(evaluate(run, model, eval_loader))


if __name__ == "__main__":
    launch(main, Arguments)
