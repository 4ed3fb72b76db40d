"""Train a language model to predict the next token.

    accelerate launch --config_file accelerate_configs/ddp_bf16.yml recipes/gpt.py
    accelerate launch --config_file accelerate_configs/fsdp_bf16.yml recipes/gpt.py --model gpt_small
    torchrun --nproc_per_node 2 recipes/gpt.py
    python recipes/gpt.py --max_steps 20

What is trained is here; how it is trained (precision, processes, sharding) is in the YAML and nowhere else.
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
from shared import data, models, text  # noqa: E402
from shared.fp8 import evaluation  # noqa: E402
from shared.plan import resolve  # noqa: E402
from shared.precision import prepare  # noqa: E402
from shared.run import Run, launch  # noqa: E402


@dataclass
class Arguments:
    # what is trained
    dataset: str = "python_docs"  # python_docs, python_source, a text file, a folder of them, or a Hub dataset
    sequence_length: int = 128  # tokens
    vocab_size: int = 0  # of a byte-level BPE trained on the dataset; 0 means bytes
    packing: bool = True  # documents one after another fill each sequence; else one document, padded
    model: str = "llama_nano"  # gpt_nano, gpt_small, gpt_medium, gpt_large, gpt_xl, llama_nano, llama_small, llama_1b
    pretrained: bool = False  # start from the weights and tokenizer of --model, a Hub name or the folder of a run
    freeze: int = 0  # so many first blocks, and what is before them, stay as they are
    layer_decay: float = 1.0  # each block learns at this fraction of the next one's rate
    dropout: float = 0.0  # while training, wherever the model has dropout
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
    """Mean loss and perplexity over the tokens of the held-out set, every sequence counted once."""
    seen = []
    for batch in loader:
        with torch.no_grad(), evaluation(model):
            logits = model(batch["input_ids"]).logits
        loss = F.cross_entropy(at_least_float32(logits).transpose(1, 2), batch["labels"], reduction="none").sum(1)
        seen.append(run.accelerator.gather_for_metrics((loss, (batch["labels"] >= 0).sum(1))))
        run.stop_if_asked()
    losses, counts = (torch.cat(values) for values in zip(*seen, strict=True))
    assert len(counts) == len(loader.dataset), f"evaluated {len(counts)} samples of {len(loader.dataset)}"
    loss = (losses.double().sum() / counts.sum()).item()
    return {"eval_loss": loss, "perplexity": math.exp(loss)}


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
        known = models.model_folder(args.model) if args.pretrained else None
        train_set, eval_set = text.texts(args.dataset, args.sequence_length, args.vocab_size, args.packing, known)
    dtype = getattr(torch, args.dtype)
    model = models.gpt(args.model, train_set.vocab_size, args.sequence_length, args.pretrained, args.dropout).to(dtype)

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
            logits = at_least_float32(model(batch["input_ids"]).logits)
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            # The mean over all tokens of the optimizer step: Accelerate and DDP divide by its number of batches.
            tokens = train_set.count(order.batch(run.batch))
            loss = loss * (run.global_batch_size // args.per_device_train_batch_size) / tokens
            run.share(loss)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                grad_norm = accelerator.clip_grad_norm_(run.parameters, args.max_grad_norm or math.inf)
                run.agree(grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            if not accelerator.optimizer_step_was_skipped:
                lr_scheduler.step()
            run.stepped()
    run.finish(evaluate(run, model, eval_loader))
    text.leave(run, model, train_set)


if __name__ == "__main__":
    launch(main, Arguments)
