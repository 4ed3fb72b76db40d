"""Train a language model to answer questions, in full or by LoRA: supervised fine-tuning.

    accelerate launch --config_file accelerate_configs/fsdp_bf16.yml recipes/sft.py --model Qwen/Qwen3-0.6B --pretrained

What is trained is here; how it is trained (precision, processes, sharding) is in the YAML only.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from faithful import Accelerator  # noqa: E402
from shared import args as options, data, lm, models, sft  # noqa: E402


@dataclass
class Arguments(options.Run):  # inherits output_dir, logging_steps, eval_steps, save_steps and others
    dataset: str = "tasks"  # tasks (made here), a .json file or a Hub dataset of messages or of questions and answers
    sequence_length: int = 128  # tokens
    packing: bool = True  # fill each sequence with several conversations, which do not see each other
    skip_long: bool = False  # leave out conversations that do not fit into a sequence
    model: str = "llama_nano"  # gpt_nano, gpt_small, gpt_medium, gpt_large, gpt_xl, llama_nano, llama_small, llama_1b
    pretrained: bool = False  # start from the weights and tokenizer of --model, a Hub name or the folder of a run
    lora_rank: int = 0  # train adapters of this rank (LoRA) beside the linear layers; 0 trains all weights
    lora_alpha: int = 16  # adapters count by this over their rank
    gradient_checkpointing: bool = False  # compute each block again in the backward pass, to save memory
    freeze: int = 0  # number of first blocks to freeze, with all layers before them
    layer_decay: float = 1.0  # a block's learning rate is this fraction of the next block's
    dropout: float = 0.0  # probability, in every dropout layer of the model
    learning_rate: float = 1e-3  # peak, after the warm-up
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
    """Mean loss over the tokens of the held-out answers, and the part that the likeliest tokens give exactly."""
    seen = []
    model.eval()
    for batch in options.with_bar(loader, accelerator.is_main_process):
        with torch.no_grad():
            logits, labels = models.at_least_float32(sft.logits(model, batch)), batch["labels"]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels).sum(1)
        exact = ((logits.argmax(-1) == labels) | (labels < 0)).all(1)
        seen.append(accelerator.gather_for_metrics((loss, (labels >= 0).sum(1), exact)))
    model.train()
    losses, counts, exact = (torch.cat(values).cpu().double() for values in zip(*seen, strict=True))
    assert len(losses) == len(loader.dataset), f"evaluated {len(losses)} samples of {len(loader.dataset)}"
    return {"eval_loss": (losses.sum() / counts.sum()).item(), "exact_match": exact.mean().item()}


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
        known = lm.model_folder(args.model) if args.pretrained else None
        train_set, eval_set = sft.chats(args.dataset, args.sequence_length, args.packing, args.skip_long, known)
    model = lm.gpt(args.model, train_set.vocab_size, args.sequence_length, args.pretrained, args.dropout)
    model = sft.adapted(model, args.lora_rank, args.lora_alpha, args.gradient_checkpointing)
    set_seed(args.seed, device_specific=True)  # each process draws its own dropout masks

    groups = models.groups(model, args.learning_rate, args.weight_decay, args.freeze, args.layer_decay)
    optimizer = torch.optim.AdamW(groups, fused=accelerator.device.type == "cuda")
    samples = data.global_batch_size(accelerator, args.per_device_train_batch_size, args.gradient_accumulation_steps)
    args.max_steps = data.steps(args.max_steps, args.num_train_epochs, len(train_set) // samples)
    lr_scheduler = data.lr_scheduler(optimizer, args.lr_scheduler_type, args.warmup_steps, args.max_steps)
    progress = data.Progress(options.that_count(args) | {"data": train_set.fingerprint()}, accelerator, args)
    order = data.Order(len(train_set), samples, args.seed, progress)
    loading = data.loading(args.dataloader_num_workers)
    train_loader = DataLoader(train_set, args.per_device_train_batch_size, sampler=order, **loading)
    eval_loader = DataLoader(eval_set, args.per_device_eval_batch_size, **loading)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    accelerator.register_for_checkpointing(progress, lr_scheduler)
    if args.resume_from_checkpoint:
        accelerator.load_state(None if args.resume_from_checkpoint == "latest" else args.resume_from_checkpoint)
    accelerator.init_trackers("sft", options.given(args))
    output_dir = data.describe(accelerator, train_set)

    model.train()
    batches, grad_norm = iter(train_loader), torch.tensor(torch.nan)
    bar = options.bar("training", args.max_steps, accelerator.is_main_process, progress.step, samples)
    while progress.step < args.max_steps:
        if progress.due(args.eval_steps):
            accelerator.log(progress.judged(evaluate(accelerator, model, eval_loader)), step=progress.step)
        # Accelerate and DDP average over batches. Dividing by this makes the loss a mean over all tokens of the step.
        tokens_per_batch = train_set.labels(accelerator, order.batch(progress.batch), args.per_device_train_batch_size)
        losses = []
        for _ in range(args.gradient_accumulation_steps):
            batch = next(batches)
            with accelerator.accumulate(model):
                logits = models.at_least_float32(sft.logits(model, batch).flatten(0, 1))
                loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / tokens_per_batch
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
    sft.leave(accelerator, model, eval_set, output_dir, args.lora_rank and args.lora_alpha / args.lora_rank)
    accelerator.end_training()


if __name__ == "__main__":
    main(options.parse(Arguments))
