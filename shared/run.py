"""A run: its steps, its stops, its checkpoints, its record.

A run leaves `run.json` (what it was and what it was proved to be), `metrics.jsonl`, `checkpoint-<step>/` and
`model/model.safetensors`. Everything random in step k is a function of (seed, k, rank), and so is the order of the
samples: a resumed run is the same run, bit for bit, with no generator state to save.
"""

import contextlib
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list, gather_object
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm

from shared import checkpoint, plan, processes, tp
from shared.args import Refused, parse
from shared.data import Broken, Order
from shared.precision import Wire, inner, local, named
from shared.processes import Alone

WARMUP_STEPS = 3  # not timed: allocation, compilation, the first step's counting; the next one counts wire bytes
AGREE_SECONDS = 0.1  # at most so long, or one step, until all ranks know that one was told to stop
# Options that don't change what is computed; a resumed run may differ in them.
FREE = {"output_dir", "resume_from_checkpoint", "logging_steps", "eval_steps", "save_steps", "save_total_limit",
        "report_to", "dataloader_num_workers", "per_device_eval_batch_size"}  # fmt: skip
PLANNED = ("strategy", "num_processes", "precision", "backend", "level", "fp8_options", "offload", "compile")


class Diverged(Refused):
    """The loss or the gradient is not finite."""

    exit_code = 1


class Stopped(Exception):
    """SIGTERM came, every rank knows, and a checkpoint is written."""

    exit_code = 128 + signal.SIGTERM


class Run:
    current = None  # a process has one run; `launch` closes it however it ends
    told_to_stop = False  # set by the signal handler

    def __init__(self, accelerator, plan_, args):
        self.accelerator, self.plan, self.args = accelerator, plan_, args
        self.recipe = Path(sys.argv[0]).stem
        self.main = accelerator.is_main_process
        name = plan_.config or f"{plan_.strategy}_{plan_.precision}"
        default = f"runs/{self.recipe}-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        [output_dir] = broadcast_object_list([args.output_dir or default])
        self.output_dir = Path(output_dir)
        self.metrics_file = self.output_dir / "metrics.jsonl"
        self.global_batch_size = (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * (plan_.num_processes // plan_.split)
        )
        accelerator.print(f"asked: {self.recipe} | {plan.describe(plan_)} | global batch {self.global_batch_size}")
        self.step = self.batch = 0  # optimizer steps taken; global batches consumed (more, where fp16 skipped a step)
        self.losses, self.times, self.excluded, self.utilization = [], [], 0, []
        self.status, self.error, self.final, self.evidence, self.failed_saves = "running", None, None, None, 0
        self.started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self.checkpoint = self.earlier_state = None
        self.claimed, self.opened, self.stopping, self.peak = False, False, False, None
        self.next_exchange, self.paced = 0, (time.perf_counter(), self.batch)
        reset_peak_memory(accelerator.device)
        self.memory_before = resident_bytes() if accelerator.device.type == "cpu" else 0
        Run.current = self  # from here on `close` finds what it needs
        self.find_checkpoint()

    def find_checkpoint(self):
        args, here = self.args, self.output_dir / "run.json"
        if not args.resume_from_checkpoint:
            if here.exists():
                raise Refused(
                    f"{self.output_dir} already holds a run: choose another --output_dir, or go on with it by "
                    "--resume_from_checkpoint latest"
                )
            return
        if args.resume_from_checkpoint == "latest" and not args.output_dir:
            raise Refused("--resume_from_checkpoint latest needs --output_dir, the folder of the run to go on with")
        if self.main and self.output_dir.exists():
            self.claim()
        self.checkpoint = checkpoint.find(self.accelerator, args.resume_from_checkpoint, self.output_dir)
        if self.checkpoint is None:
            self.accelerator.print(f"no checkpoint in {self.output_dir}: starting at step 0")
            return
        self.earlier_state = checkpoint.read_state(self.checkpoint)
        self.step, self.batch = self.earlier_state["step"], self.earlier_state["batch"]

    def claim(self):
        if not self.claimed:
            processes.claim(self.output_dir)
        self.claimed = True

    def order(self, dataset):
        """The sampler of the training set: from where this run begins, without end."""
        return Order(len(dataset), self.global_batch_size, self.args.seed, first_batch=self.batch)

    def start(self, model, optimizer, lr_scheduler, evidence, dataset):
        """Everything is prepared: go on from the checkpoint, if there is one, and open the record."""
        self.model, self.optimizer, self.lr_scheduler, self.evidence = model, optimizer, lr_scheduler, evidence
        self.parameters = list(model.parameters())  # to look for them at each step takes as long as their norm
        self.data_fingerprint, self.about_data = dataset.fingerprint(), dataset.about()
        self.same = {  # what must be equal for a resumed run to be the same run
            **{key: value for key, value in asdict(self.args).items() if key not in FREE},
            **{key: getattr(self.plan, key) for key in PLANNED},
            "data_fingerprint": self.data_fingerprint,
        }
        if self.checkpoint is not None:
            before = self.earlier_state["same"]
            differs = [
                f"{key} {before.get(key)} -> {value}" for key, value in self.same.items() if before.get(key) != value
            ]
            if differs:
                raise Refused(
                    f"{self.checkpoint} is of another run: {', '.join(differs)}. Resume as it was, or start anew"
                )
            rank = self.accelerator.process_index
            checkpoint.restore(model, optimizer, checkpoint.read_tensors(self.checkpoint, rank, evidence.own_parts))
            lr_scheduler.load_state_dict(self.earlier_state["lr_scheduler"])
            for group, learning_rate in zip(optimizer.param_groups, lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = learning_rate
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.load_state_dict(self.earlier_state["scaler"])
            self.accelerator.print(f"resumed from {self.checkpoint} at step {self.step}")
        if isinstance(self.accelerator.scaler, torch.amp.GradScaler):
            inner(optimizer).register_step_post_hook(self.see_skipped_step)
        if self.main:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self.claim()
            for stale in self.output_dir.glob("checkpoint-*.tmp"):
                shutil.rmtree(stale, ignore_errors=True)
            rows = self.metrics_file.read_text().splitlines() if self.metrics_file.exists() else []
            rows = [row for row in rows if row.endswith("}") and self.keeps(json.loads(row))]
            self.metrics_file.write_text("".join(row + "\n" for row in rows))
            self.write_record()
        self.accelerator.init_trackers(self.recipe, {k: v for k, v in asdict(self.args).items() if v is not None})
        self.opened = True
        self.bar = tqdm(total=self.args.max_steps, initial=self.step, disable=None if self.main else True)
        self.clock = time.perf_counter()

    def see_skipped_step(self, *_):
        """Tells Accelerate that the step was skipped. A fused optimizer, as on a GPU, skips an overflowed step inside
        its kernel, where Accelerate does not see it; the norm that `agree` has read says it without another wait."""
        if not math.isfinite(self.grad_norm):
            self.optimizer._accelerate_step_called = False

    def keeps(self, row):
        """Rows of an earlier part of this run that the resumed part will not write again."""
        return row["step"] < self.step or (row["step"] == self.step and "loss" in row)

    def batches(self, loader):
        """Micro-batches until `max_steps` optimizer steps are done."""
        micro, rank, device = 0, self.accelerator.process_index // self.plan.split, self.accelerator.device
        per_step = self.args.gradient_accumulation_steps
        self.wire = None
        for batch in loader:
            if self.step >= self.args.max_steps:
                break
            if micro == 0:
                self.window_begins = True
                counting = self.plan.num_processes > 1 and not self.plan.compile and self.evidence.counts_wire()
                # A dispatch mode would keep compiled blocks from running as such.
                self.wire = Wire() if counting else None
            seed = (self.args.seed << 40) + (self.batch << 20) + (micro << 14) + rank
            torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.1 ms: it asks every kind of device
            if device.type != "cpu":
                torch.get_device_module(device).manual_seed(seed)
            with self.wire or contextlib.nullcontext():
                yield batch
            micro = (micro + 1) % per_step
        self.window_begins = True

    def due(self, every):
        """Whether, between two optimizer steps, it is time again for what happens `every` steps."""
        return bool(every) and self.window_begins and self.step > 0 and self.step % every == 0

    def share(self, loss):
        """Before each backward. With the last micro-batch the losses of all ranks, and whether one was told to stop, go
        to all while the backward computes: when they are logged, else every AGREE_SECONDS or every step, whichever is
        longer. At each step of 8 ms it would take a tenth of it."""
        self.losses.append(loss.detach())
        if self.accelerator.sync_gradients:
            step, every = self.step + 1, self.args.logging_steps
            logged = step == self.args.max_steps or (every and step % every == 0)
            self.everyone = self.exchange() if logged or self.batch >= self.next_exchange else None

    def exchange(self):
        """Begins to collect losses, whether told to stop, seconds per step of all ranks: (flat tensor, its work)."""
        now, (before, batch) = time.perf_counter(), self.paced
        self.paced = now, self.batch
        rest = torch.tensor([Run.told_to_stop, (now - before) / max(1, self.batch - batch)], dtype=torch.float64)
        losses = torch.stack(self.losses).double()
        mine = torch.cat([losses, to_device(rest, losses.device)])
        if self.plan.num_processes == 1:
            return mine, None
        everyone = mine.new_empty(mine.numel() * self.plan.num_processes)
        return everyone, dist.all_gather_into_tensor(everyone, mine, async_op=True)

    def agree(self, grad_norm):
        """Before the optimizer step, all ranks at once: is everything finite, was anyone told to stop? The norm is that
        of all ranks' gradients, so that each of them sees by it when another's loss is not finite."""
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        norm = to_device(grad_norm.detach().double(), self.losses[0].device)
        if self.everyone is None:
            *losses, norm_value = torch.stack([*self.losses, norm]).tolist()  # the step's one wait for the device
            ranks = [[*losses, 0.0, 0.0]]
            if not math.isfinite(norm_value):
                self.everyone = self.exchange()
        count = len(self.losses)
        self.losses.clear()
        if self.everyone is not None:
            everyone, work = self.everyone
            if work is not None:
                work.wait()
            *values, norm_value = torch.cat([everyone, norm.view(1)]).tolist()  # the same
            ranks = [values[at : at + count + 2] for at in range(0, len(values), count + 2)]
            self.stopping = any(row[-2] for row in ranks)
            timed = self.excluded >= WARMUP_STEPS
            self.next_exchange = self.batch + max(1, int(timed * AGREE_SECONDS / max(row[-1] for row in ranks)))
        losses = [sum(row[:count]) / count for row in ranks]
        self.loss, self.grad_norm = sum(losses) / len(losses), norm_value
        finite = all(map(math.isfinite, losses))
        scaler = self.accelerator.scaler
        if finite and (math.isfinite(norm_value) or (scaler is not None and scaler.get_scale() > 2**-14)):
            return  # with a gradient scaler an overflow is its business: it skips the step and lowers the scale
        what = f"gradient norm {norm_value}" if finite else f"loss {losses} (one per rank)"
        newest = next(iter(checkpoint.list_checkpoints(self.output_dir)), "none")
        raise Diverged(
            f"step {self.step + 1}: {what} is not finite; nothing was updated. Newest checkpoint: {newest}. "
            "Lower --learning_rate, or compare with a bf16 config"
        )

    def stop_if_asked(self):
        """In evaluation, which can be long, every rank calls it now and then."""
        self.stopping = any(gather_object([Run.told_to_stop]))
        if self.stopping:
            self.stop()

    def stop(self):
        self.save()
        self.status = "preempted"
        raise Stopped(f"SIGTERM: stopped after step {self.step}")

    def stepped(self):
        """After the optimizer step: count, time, log, and write the checkpoint that is due."""
        if not self.excluded:  # the first step: from here on there is something to save
            signal.signal(signal.SIGTERM, lambda *_: setattr(Run, "told_to_stop", True))
        if self.wire is not None:  # before a checkpoint sends anything
            self.evidence.record["wire_bytes_per_step"] = round(self.wire.sent)
        self.batch += 1
        self.window_begins = False
        skipped = self.accelerator.optimizer_step_was_skipped
        self.step += not skipped
        if not skipped and self.evidence.record["bytes_per_parameter"] is None:
            self.evidence.complete()
            self.accelerator.print(f"{self.recipe} | {self.evidence.truth()}")
        now = time.perf_counter()
        if self.excluded < WARMUP_STEPS:
            self.excluded += 1
        else:
            self.times.append(now - self.clock)
        every, args = self.args.logging_steps, self.args
        if every and (self.step % every == 0 or self.step == args.max_steps) and not skipped:
            row = {"loss": self.loss, "grad_norm": self.grad_norm, "learning_rate": self.lr_scheduler.get_last_lr()[0]}
            self.log(row | {"samples": self.batch * self.global_batch_size})
        self.bar.update(not skipped)
        if self.stopping:
            self.stop()
        if args.save_steps and self.step % args.save_steps == 0 and not skipped:
            self.save()
        self.clock = time.perf_counter()

    def log(self, row):
        """A line of metrics.jsonl, the trackers, and the progress bar or the log file. Resets the step clock."""
        self.accelerator.log(row, step=self.step)
        if self.main:
            with self.metrics_file.open("a") as file:
                file.write(json.dumps({"step": self.step} | row) + "\n")
            text = ", ".join(f"{k} {v:.4g}" for k, v in row.items() if k != "samples")
            if self.bar.disable:
                print(f"step {self.step}/{self.args.max_steps}: {text}", flush=True)
            else:
                self.bar.write(f"step {self.step}: {text}")
            utilization = gpu_utilization(self.accelerator.device)
            self.utilization += [utilization] if utilization is not None else []
        self.clock = time.perf_counter()

    def save(self):
        """`checkpoint-<step>`, unless this very step has one."""
        folder = self.output_dir / f"checkpoint-{self.step}"
        [there] = broadcast_object_list([folder.exists() and checkpoint.unsound(folder) is None if self.main else None])
        if there:
            return
        scaler = self.accelerator.scaler
        state = {
            "step": self.step,
            "batch": self.batch,
            "same": self.same,
            "lr_scheduler": self.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "cuts": tp.cuts(named(self.model.named_parameters())) if self.plan.split > 1 else {},
        }
        parts = checkpoint.tensors(self.model, self.optimizer)
        keep = self.args.save_total_limit
        done = checkpoint.save(self.accelerator, folder, parts, state, self.evidence.own_parts, keep)
        self.failed_saves += not done

    def finish(self, metrics):
        """The run has done its steps: log the last evaluation, write the plain weights and the record."""
        self.log(metrics)
        self.peak = self.peak_memory()  # of training: writing gathers and copies the weights once more
        weights = {k: v for k, v in self.accelerator.get_state_dict(self.model).items() if torch.is_tensor(v)}
        if self.main:
            folder = self.output_dir / "model"
            folder.mkdir(exist_ok=True)
            temporary = folder / "model.safetensors.tmp"
            weights = {name: local(tensor.detach()).cpu().contiguous() for name, tensor in weights.items()}
            own = {name for name, _ in named(self.model.named_parameters())}  # a tensor under its first name alone
            twice = {name for name, _ in named(self.model.named_parameters(remove_duplicate=False))} - own
            plain = {
                name: weight
                for name, weight in named(weights.items())
                if ".fp8_" not in name and not name.endswith("_extra_state") and name not in twice
            }
            save_file(plain, temporary, metadata={"format": "pt"})
            checkpoint.sync(temporary)
            os.replace(temporary, folder / "model.safetensors")
        self.final = {"step": self.step, "loss": self.loss if self.step else None, "metrics": metrics}
        self.status = "finished"

    def close(self, error=None):
        """Write the record as it ends, finished or not."""
        if error is not None:
            self.status, self.error = "failed", error
        if not self.opened and (error is None or (self.output_dir / "run.json").exists()):
            return  # ended before it began: don't write over the record of the run that is there
        if self.plan.num_processes > 1 and self.plan.device != "cpu" and error is None:
            self.peak = max(gather_object([self.peak or self.peak_memory()]))
        if self.opened:
            self.bar.close()
            self.accelerator.end_training()  # no collective works after it
        if self.main:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self.write_record(finished=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
            print(f"{self.status}: {self.output_dir}", flush=True)

    def peak_memory(self):
        """Bytes: allocated on an accelerator; on a CPU the rise of resident memory since before the model was built."""
        device = self.accelerator.device
        if device.type == "cpu":
            return max(0, peak_resident_bytes() - self.memory_before)
        return torch.accelerator.max_memory_allocated()

    def write_record(self, finished=None):
        line, file = plan.launch_line()
        text = file.read_text() if file and file.exists() else None
        median = statistics.median(self.times) if self.times else None
        p90 = statistics.quantiles(self.times, n=10, method="inclusive")[-1] if len(self.times) > 1 else median
        record = {
            "schema_version": 1,
            "recipe": self.recipe,
            "command": " ".join(line or [sys.executable, *sys.argv]),
            "args": asdict(self.args),
            "seed": self.args.seed,
            "global_batch_size": self.global_batch_size,
            "optimizer": type(inner(self.optimizer)).__name__ if self.opened else self.args.optimizer,
            "data_fingerprint": self.data_fingerprint if self.opened else None,
            "data": self.about_data if self.opened else None,
            "config": {"name": self.plan.config, "text": text, "sha256": text and sha256(text.encode()).hexdigest()},
            "plan": asdict(self.plan),
            "evidence": self.evidence.record if self.opened else None,
            "versions": versions(),
            "device_name": plan.machine_of_torch()["name"] if self.plan.device != "cpu" else cpu_name(),
            **git_state(),
            "code_sha256": plan.code_sha256(sys.argv[0]),
            "started": self.started,
            "finished": finished,
            "throughput": {
                "samples_per_second_median": median and self.global_batch_size / median,
                "step_seconds_median": median,
                "step_seconds_p90": p90,
                "steps_measured": len(self.times),
                "steps_excluded": self.excluded,
            },
            "peak_memory_bytes": self.peak or self.peak_memory(),
            "gpu_utilization_mean": statistics.mean(self.utilization) if self.utilization else None,
            "final": self.final,
            "status": self.status,
            "error": self.error,
        }  # fmt: skip
        checkpoint.write_json(self.output_dir / "run.json", record)


def launch(main, arguments):
    """The whole of a recipe's `__main__`: options, signals, one-line errors, the record, the exit code.

    0 finished; 1 failed; 2 refused; 143 stopped by SIGTERM, with a checkpoint.
    """
    args = parse(arguments)
    processes.end_with_the_launcher()
    error, code = None, 0
    try:
        main(args)
        if Run.current.failed_saves:
            error, code = f"{Run.current.failed_saves} checkpoints could not be written", 1
            plan.say(f"error: {error}", sys.stderr)
    except Refused as refused:
        error, code = str(refused).rsplit("Broken: ", 1)[-1].strip(), refused.exit_code  # of a loader's process too
        for line in error.splitlines() if isinstance(refused, Broken | Alone) or may_speak() else ():
            print(f"{'refused' if code == 2 else 'error'}: {line}", file=sys.stderr, flush=True)
    except Stopped as stopped:
        code = stopped.exit_code
    except (Exception, KeyboardInterrupt) as problem:
        error, code = f"{type(problem).__name__}: {problem}", 130 if isinstance(problem, KeyboardInterrupt) else 1
        # Of gloo, of a loader, of NCCL, of the store that the launcher holds: another process has ended.
        ended = "by peer|signal: Terminated|connectFullMesh|Connection was likely closed|remote process exiting"
        gone = re.search(ended + "|communicator was aborted", error)
        silent = re.search("Timed out waiting|Application timeout|Watchdog caught collective operation", error)
        if gone or silent or isinstance(problem, dist.DistStoreError):
            waited = f"in {plan.patience().total_seconds():.0f} s (COLLECTIVE_TIMEOUT)"
            no_answer = f"no answer from another process {waited}: it, its machine or the link is gone"
            error = "another process of this run ended" if gone else no_answer
            if os.environ.get("LOCAL_RANK", "0") == "0":  # on each machine
                print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
    try:
        if Run.current is not None and not (code == 2 and not Run.current.opened):
            Run.current.close(error)
    except Exception:
        traceback.print_exc()
        code = code or 1
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0 and dist.is_initialized():
        dist.barrier()  # nobody leaves while another still reads what it sent
    os._exit(code)  # torch aborts some interpreter exits after gloo ("terminate called without an active exception")


def may_speak():
    """Whether this rank says why a run is refused: rank 0, or one that waited for rank 0 in vain. The others wait,
    because torch's launcher ends all ranks, those still importing too, as soon as one of them leaves."""
    if int(os.environ.get("RANK", 0)) == 0:
        return True
    patience = time.monotonic() + 20
    while "TORCHELASTIC_RUN_ID" in os.environ and not Run.told_to_stop:
        if time.monotonic() > patience:
            return True
        time.sleep(0.05)
    return False


def to_device(tensor, device):
    """A small tensor of the CPU (or of the device already) on the device. From pinned memory the host does not wait."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def reset_peak_memory(device):
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def resident_bytes():
    return psutil.Process().memory_info().rss


def peak_resident_bytes():
    if sys.platform != "linux":
        return resident_bytes()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def gpu_utilization(device):
    """Percent, of this process's GPU, or None where nobody can say."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device)
    except Exception:  # no nvidia-ml-py, no driver, or NVML's own error for a card that does not count it (MIG, vGPU)
        return None


def cpu_name():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model or 'CPU'}, {os.cpu_count()} cores"


def versions():
    names = "torch accelerate timm transformers datasets torchao transformer-engine deepspeed numpy".split()
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found | {"cuda": torch.version.cuda}


def git_state():
    def git(*words):
        try:
            here = Path(__file__).parent
            return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    changes = git("status", "--porcelain")
    return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": None if changes is None else bool(changes)}
