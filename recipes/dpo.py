"""Train a language model to prefer one answer to another, in full or by LoRA: direct preference optimization.

    accelerate launch --config_file accelerate_configs/fsdp_bf16.yml recipes/dpo.py --model Qwen/Qwen3-0.6B --pretrained

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
from shared import args as options, data, dpo, lm, models, sft  # noqa: E402


@dataclass
class Arguments(options.Run):  # inherits output_dir, logging_steps, eval_steps, save_steps and others
    dataset: str = "python_functions"  # python_functions, a .json file or a Hub dataset of prompt, chosen, rejected
    sequence_length: int = 128  # tokens
    skip_long: bool = False  # leave out pairs of which an answer does not fit into a sequence
    model: str = "llama_nano"  # gpt_nano, gpt_small, gpt_medium, gpt_large, gpt_xl, llama_nano, llama_small, llama_1b
    pretrained: bool = False  # start from the weights and tokenizer of --model, a Hub name or the folder of a run
    lora_rank: int = 0  # train adapters of this rank (LoRA) beside the linear layers; 0 trains all weights
    lora_alpha: int = 16  # adapters count by this over their rank
    gradient_checkpointing: bool = False  # compute each block again in the backward pass, to save memory
    beta: float = 0.1  # rewards are this times the log of how much likelier than the reference
    learning_rate: float = 1e-3  # peak, after the warm-up; about 1e-6 with --pretrained, 1e-5 with LoRA
    weight_decay: float = 0.05  # decoupled in AdamW
    warmup_steps: int = 30  # optimizer steps of linear warm-up
    lr_scheduler_type: options.Schedule = "cosine"  # after the warm-up: to zero, or constant
    max_steps: int = 300  # optimizer steps
    num_train_epochs: float | None = None  # epochs, in place of max_steps
    per_device_train_batch_size: int = 16  # samples per process and micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches per optimizer step
    max_grad_norm: float = 1.0  # clip the global gradient norm to this; 0 means no clipping
    grad_scaler: str = ""  # for fp16: init_scale=65536,growth_factor=2,backoff_factor=0.5,growth_interval=2000
    seed: int = 0  # of weights and sample order


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader, beta: float) -> dict[str, float]:
    """Mean loss and reward margin over the held-out pairs, and the part in which the chosen answer has more reward."""
    seen = []
    model.eval()
    for batch in options.with_bar(loader, accelerator.is_main_process):
        with torch.no_grad():
            chosen, rejected = (dpo.log_probs(model, batch) - batch["reference"]).T
        seen.append(accelerator.gather_for_metrics(beta * (chosen - rejected)))
    model.train()
    margin = torch.cat(seen).cpu().double()
    assert len(margin) == len(loader.dataset), f"evaluated {len(margin)} samples of {len(loader.dataset)}"
    loss, accuracy = -F.logsigmoid(margin).mean(), (margin > 0).double().mean()
    return {"eval_loss": loss.item(), "reward_margin": margin.mean().item(), "accuracy": accuracy.item()}


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
        train_set, eval_set = dpo.preferences(args.dataset, args.sequence_length, args.skip_long, known)
    model = lm.gpt(args.model, train_set.vocab_size, args.sequence_length, args.pretrained)
    model = sft.adapted(model, args.lora_rank, args.lora_alpha, args.gradient_checkpointing)
    set_seed(args.seed, device_specific=True)

    groups = models.groups(model, args.learning_rate, args.weight_decay)
    optimizer = torch.optim.AdamW(groups, fused=accelerator.device.type == "cuda")
    samples = data.global_batch_size(accelerator, args.per_device_train_batch_size, args.gradient_accumulation_steps)
    args.max_steps = data.steps(args.max_steps, args.num_train_epochs, len(train_set) // samples)
    lr_scheduler = data.lr_scheduler(optimizer, args.lr_scheduler_type, args.warmup_steps, args.max_steps)
    progress = data.Progress(options.that_count(args) | {"data": train_set.fingerprint()}, accelerator, args)
    order = data.Order(len(train_set), samples, args.seed, progress)
    loading = data.loading(args.dataloader_num_workers)
    train_loader = DataLoader(train_set, args.per_device_train_batch_size, sampler=order, **loading)
    eval_loader = DataLoader(eval_set, args.per_device_eval_batch_size, **loading)
    every_loader = DataLoader(train_set, args.per_device_eval_batch_size, **loading)  # in order, for the reference
    prepared = accelerator.prepare(model, optimizer, train_loader, eval_loader, every_loader)
    model, optimizer, train_loader, eval_loader, every_loader = prepared
    train_set.reference = dpo.reference(accelerator, model, every_loader)  # before a checkpoint is loaded
    eval_set.reference = dpo.reference(accelerator, model, eval_loader)
    accelerator.register_for_checkpointing(progress, lr_scheduler)
    if args.resume_from_checkpoint:
        accelerator.load_state(None if args.resume_from_checkpoint == "latest" else args.resume_from_checkpoint)
    accelerator.init_trackers("dpo", options.given(args))
    output_dir = data.describe(accelerator, train_set)

    model.train()
    batches, grad_norm = iter(train_loader), torch.tensor(torch.nan)
    bar = options.bar("training", args.max_steps, accelerator.is_main_process, progress.step, samples)
    while progress.step < args.max_steps:
        if progress.due(args.eval_steps):
            accelerator.log(progress.judged(evaluate(accelerator, model, eval_loader, args.beta)), step=progress.step)
        losses = []
        for _ in range(args.gradient_accumulation_steps):
            batch = next(batches)
            with accelerator.accumulate(model):
                chosen, rejected = (dpo.log_probs(model, batch) - batch["reference"]).T
                loss = -F.logsigmoid(args.beta * (chosen - rejected)).mean()
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
    values = progress.judged(evaluate(accelerator, model, eval_loader, args.beta), last=True)
    accelerator.log(values, step=progress.step)
    if progress.load_best():
        values = evaluate(accelerator, model, eval_loader, args.beta)
    accelerator.save_model(model, f"{output_dir}/model")
    scale = args.lora_rank and args.lora_alpha / args.lora_rank
    accelerator.log(values | dpo.leave(accelerator, model, eval_loader, output_dir, scale), step=progress.step)
    accelerator.end_training()


if __name__ == "__main__":
    main(options.parse(Arguments))
