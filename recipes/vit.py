"""Train a vision transformer to classify images.

    accelerate launch --config_file accelerate_configs/fsdp_bf16.yml recipes/vit.py --dataset photos --model vit_tiny

What is trained is here; how it is trained (precision, processes, sharding) is in the YAML only.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from faithful import Accelerator  # noqa: E402
from shared import args as options, data, images, models, optimizers, vision  # noqa: E402


@dataclass
class Arguments(options.Run):  # inherits output_dir, logging_steps, eval_steps, save_steps and others
    dataset: str = "digits"  # digits, photos, textures, synthetic, a Hub dataset, or a folder with one folder per class
    image_size: int | None = None  # pixels; default: the data's own, a pretrained model's, or 224
    model: str = "vit_nano"  # vit_nano, vit_tiny, vit_small, vit_base, vit_large, vit_huge, any timm name, a run
    pretrained: bool = False  # start from timm's weights for --model, or from the run whose folder it is
    freeze: int = 0  # number of first blocks to freeze, with all layers before them
    layer_decay: float = 1.0  # a block's learning rate is this fraction of the next block's
    dropout: float = 0.0  # probability, in every dropout layer of the model
    skip_broken: int = 0  # number of unreadable images to skip before it is an error
    te_blocks: bool = False  # each block one te.TransformerLayer, on a GPU with TransformerEngine
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"  # of the parameters themselves
    optimizer: Literal["adamw", "sgd", "adamw_8bit", "adamw_bf16", "adafactor", "muon"] = "adamw"  # sgd: momentum 0.9
    learning_rate: float = 2e-3  # peak, after the warm-up
    weight_decay: float = 0.05  # decoupled in AdamW
    warmup_steps: int = 30  # optimizer steps of linear warm-up
    lr_scheduler_type: options.Schedule = "cosine"  # after the warm-up: to zero, or constant
    max_steps: int = 300  # optimizer steps
    num_train_epochs: float | None = None  # epochs, in place of max_steps
    per_device_train_batch_size: int = 32  # samples per process and micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches per optimizer step
    max_grad_norm: float = 1.0  # clip the global gradient norm to this; 0 means no clipping
    grad_scaler: str = ""  # for fp16: init_scale=65536,growth_factor=2,backoff_factor=0.5,growth_interval=2000
    seed: int = 0  # of weights, sample order and dropout


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> dict[str, float]:
    """Mean loss and accuracy over the held-out set. Every sample counts once."""
    seen = []
    model.eval()
    for batch in options.with_bar(loader, accelerator.is_main_process):
        with torch.no_grad():
            logits = models.at_least_float32(model(batch["pixel_values"]))
        loss = F.cross_entropy(logits, batch["labels"], reduction="none")
        seen.append(accelerator.gather_for_metrics((loss, logits.argmax(-1) == batch["labels"])))
    model.train()
    losses, hits = (torch.cat(values).cpu().double() for values in zip(*seen, strict=True))
    assert len(losses) == len(loader.dataset), f"evaluated {len(losses)} samples of {len(loader.dataset)}"
    return {"eval_loss": losses.mean().item(), "accuracy": hits.mean().item()}


def main(args: Arguments) -> None:
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=options.trackers(args.report_to),
        project_config=ProjectConfiguration(args.output_dir, total_limit=args.save_total_limit),
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
        kwargs_handlers=options.grad_scaler(args.grad_scaler),
    )
    set_seed(args.seed, deterministic=args.deterministic)
    with accelerator.main_process_first():
        config = vision.data_config(args.model, args.pretrained)
        train_set, eval_set = images.images(args.dataset, args.image_size, config, args.seed, args.skip_broken)
    dtype = getattr(torch, args.dtype)
    shape = train_set.image_size, train_set.in_chans, train_set.num_classes
    model = vision.vit(args.model, *shape, args.pretrained, args.dropout, args.te_blocks).to(dtype)
    set_seed(args.seed, device_specific=True)  # each process draws its own dropout masks

    groups = models.groups(model, args.learning_rate, args.weight_decay, args.freeze, args.layer_decay)
    optimizer = optimizers.optimizer(args.optimizer, groups, model, accelerator.device)
    samples = data.global_batch_size(accelerator, args.per_device_train_batch_size, args.gradient_accumulation_steps)
    args.max_steps = data.steps(args.max_steps, args.num_train_epochs, len(train_set) // samples)
    lr_scheduler = data.lr_scheduler(optimizer, args.lr_scheduler_type, args.warmup_steps, args.max_steps)
    progress = data.Progress(options.that_count(args) | {"data": train_set.fingerprint()}, accelerator, args)
    order = data.Order(len(train_set), samples, args.seed, progress)
    loading = data.loading(args.dataloader_num_workers, dtype)
    train_loader = DataLoader(train_set, args.per_device_train_batch_size, sampler=order, **loading)
    eval_loader = DataLoader(eval_set, args.per_device_eval_batch_size, **loading)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    accelerator.register_for_checkpointing(progress, lr_scheduler)
    if args.resume_from_checkpoint:
        accelerator.load_state(None if args.resume_from_checkpoint == "latest" else args.resume_from_checkpoint)
    accelerator.init_trackers("vit", options.given(args))
    output_dir = data.describe(accelerator, train_set)

    model.train()
    batches, grad_norm = iter(train_loader), torch.tensor(torch.nan)
    bar = options.bar("training", args.max_steps, accelerator.is_main_process, progress.step, samples)
    while progress.step < args.max_steps:
        if progress.due(args.eval_steps):
            accelerator.log(progress.judged(evaluate(accelerator, model, eval_loader)), step=progress.step)
        losses = []
        for _ in range(args.gradient_accumulation_steps):
            batch = next(batches)
            with accelerator.accumulate(model):
                logits = models.at_least_float32(model(batch["pixel_values"]))
                loss = F.cross_entropy(logits, batch["labels"])
                accelerator.backward(loss)
                losses.append(loss.detach())
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or torch.inf)
                optimizer.step()
                optimizer.zero_grad()
        progress.batch += 1
        if accelerator.optimizer_step_was_skipped:  # fp16's gradient scaler saw an overflow
            continue
        progress.step += 1
        bar.update()
        if progress.step == args.max_steps or (args.logging_steps and progress.step % args.logging_steps == 0):
            loss = accelerator.gather(torch.stack(losses)).mean().item()
            values = {"loss": loss, "grad_norm": grad_norm.item(), "learning_rate": lr_scheduler.get_last_lr()[0]}
            accelerator.log(values, step=progress.step)
        lr_scheduler.step()
        if args.save_steps and progress.step % args.save_steps == 0:
            accelerator.save_state(f"{output_dir}/checkpoint-{progress.step}")
    bar.close()
    accelerator.log(progress.judged(evaluate(accelerator, model, eval_loader), last=True), step=progress.step)
    if progress.load_best():
        accelerator.log(evaluate(accelerator, model, eval_loader), step=progress.step)
    accelerator.save_model(model, f"{output_dir}/model")
    accelerator.end_training()


if __name__ == "__main__":
    main(options.parse(Arguments))
