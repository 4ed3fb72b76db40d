"""Train a diffusion transformer to draw images of a class, by flow matching.

    accelerate launch --config_file accelerate_configs/fsdp_bf16.yml recipes/diffusion.py --dataset photos

What is trained is here; how it is trained (precision, processes, sharding) is in the YAML only.
"""

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from faithful import Accelerator  # noqa: E402
from shared import args as options, data, diffusion, images  # noqa: E402


@dataclass
class Arguments(options.Run):  # inherits output_dir, logging_steps, eval_steps, save_steps and others
    dataset: str = "digits"  # digits, photos, textures, synthetic, a Hub dataset, or a folder with one folder per class
    image_size: int | None = None  # pixels; default: the data's own, or 224
    model: str = "dit_nano"  # dit_nano, dit_tiny, dit_small, dit_base, dit_large, dit_xl
    label_dropout: float = 0.1  # part of the samples that are shown without their class, which guidance needs
    skip_broken: int = 0  # number of unreadable images to skip before it is an error
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"  # of the parameters themselves
    learning_rate: float = 1e-3  # peak, after the warm-up
    weight_decay: float = 0.0  # decoupled in AdamW
    ema_decay: float = 0.995  # of the average of weights that draws, and is saved; 0 means none
    warmup_steps: int = 30  # optimizer steps of linear warm-up
    lr_scheduler_type: options.Schedule = "cosine"  # after the warm-up: to zero, or constant
    max_steps: int = 1500  # optimizer steps
    num_train_epochs: float | None = None  # epochs, in place of max_steps
    per_device_train_batch_size: int = 32  # samples per process and micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches per optimizer step
    max_grad_norm: float = 1.0  # clip the global gradient norm to this; 0 means no clipping
    grad_scaler: str = ""  # for fp16: init_scale=65536,growth_factor=2,backoff_factor=0.5,growth_interval=2000
    seed: int = 0  # of weights, sample order, noise and times
    guidance: float = 2.0  # how much more than without it the class counts; 1 means none


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader, drawn: diffusion.Samples,
             step: int) -> dict[str, float]:  # step: in the name of the picture of samples  # fmt: skip
    """Mean loss over the held-out set, every sample once; and what images that the model draws are worth."""
    seen = []
    model.eval()
    for batch in options.with_bar(loader, accelerator.is_main_process):
        loss = diffusion.held_out_losses(model, batch["pixel_values"], batch["labels"])
        seen.append(accelerator.gather_for_metrics(loss))
    measures = drawn.measures(accelerator, model, step)
    model.train()
    losses = torch.cat(seen).cpu().double()
    assert len(losses) == len(loader.dataset), f"evaluated {len(losses)} samples of {len(loader.dataset)}"
    return {"eval_loss": losses.mean().item()} | measures


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
        train_set, eval_set = images.images(args.dataset, args.image_size, None, args.seed, args.skip_broken)
    dtype = getattr(torch, args.dtype)
    shape = train_set.image_size, train_set.in_chans, train_set.num_classes
    model = diffusion.dit(args.model, *shape).to(dtype)
    average = copy.deepcopy(model).requires_grad_(False) if args.ema_decay else None
    set_seed(args.seed, device_specific=True)  # each process draws its own noise and times

    fused = accelerator.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=args.weight_decay, fused=fused)
    samples = data.global_batch_size(accelerator, args.per_device_train_batch_size, args.gradient_accumulation_steps)
    args.max_steps = data.steps(args.max_steps, args.num_train_epochs, len(train_set) // samples)
    lr_scheduler = data.lr_scheduler(optimizer, args.lr_scheduler_type, args.warmup_steps, args.max_steps)
    progress = data.Progress(options.that_count(args) | {"data": train_set.fingerprint()}, accelerator, args)
    order = data.Order(len(train_set), samples, args.seed, progress)
    loading = data.loading(args.dataloader_num_workers, dtype)
    train_loader = DataLoader(train_set, args.per_device_train_batch_size, sampler=order, **loading)
    eval_loader = DataLoader(eval_set, args.per_device_eval_batch_size, **loading)
    prepared = accelerator.prepare(model, average, optimizer, train_loader, eval_loader)
    model, average, optimizer, train_loader, eval_loader = prepared
    accelerator.register_for_checkpointing(progress, lr_scheduler)
    if args.resume_from_checkpoint:
        accelerator.load_state(None if args.resume_from_checkpoint == "latest" else args.resume_from_checkpoint)
    accelerator.init_trackers("diffusion", options.given(args))
    output_dir = data.describe(accelerator, train_set)
    drawn, best = diffusion.Samples(train_set, output_dir, args.guidance), model if average is None else average

    model.train()
    batches, grad_norm = iter(train_loader), torch.tensor(torch.nan)
    bar = options.bar("training", args.max_steps, accelerator.is_main_process, progress.step, samples)
    while progress.step < args.max_steps:
        if progress.due(args.eval_steps):
            values = evaluate(accelerator, best, eval_loader, drawn, progress.step)
            accelerator.log(progress.judged(values), step=progress.step)
        losses = []
        for _ in range(args.gradient_accumulation_steps):
            batch = next(batches)
            with accelerator.accumulate(model):
                loss = diffusion.train_losses(model, batch, train_set.num_classes, args.label_dropout).mean()
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
        if args.ema_decay:
            diffusion.update(average, model, progress.step, args.ema_decay)
        bar.update()
        if progress.step == args.max_steps or (args.logging_steps and progress.step % args.logging_steps == 0):
            loss = accelerator.gather(torch.stack(losses)).mean().item()
            values = {"loss": loss, "grad_norm": grad_norm.item(), "learning_rate": lr_scheduler.get_last_lr()[0]}
            accelerator.log(values, step=progress.step)
        lr_scheduler.step()
        if args.save_steps and progress.step % args.save_steps == 0:
            accelerator.save_state(f"{output_dir}/checkpoint-{progress.step}")
    bar.close()
    values = evaluate(accelerator, best, eval_loader, drawn, progress.step)
    accelerator.log(progress.judged(values, last=True), step=progress.step)
    if progress.load_best():
        accelerator.log(evaluate(accelerator, best, eval_loader, drawn, progress.step), step=progress.step)
    accelerator.save_model(best, f"{output_dir}/model")
    accelerator.end_training()


if __name__ == "__main__":
    main(options.parse(Arguments))
