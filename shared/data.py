"""Which samples a step sees, what a run writes about its data, and data sets that `datasets` loads.

Each epoch of a run is a new permutation that depends on (seed, epoch) only, cut to whole global batches. So step k sees
the same samples on any number of processes and after any resume. A data set here returns whole batches (`__getitems__`)
and takes the indices of epoch e from e * len(set) on; it has `fingerprint()` and some of what `about` names.
"""

import functools
import itertools
import json
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from shared.args import Refused

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


def loading(num_workers: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Options of the DataLoaders; images arrive in `dtype`."""
    return {
        "collate_fn": functools.partial(in_dtype, dtype=dtype),
        "num_workers": num_workers,
        "pin_memory": torch.cuda.is_available(),
        "generator": torch.Generator(),  # the loader must not draw from the generator that dropout uses
    }


def in_dtype(batch: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The collate function: the datasets above return whole batches, which only change their dtype."""
    return {name: values.to(dtype) if values.is_floating_point() else values for name, values in batch.items()}


class Progress:
    """How far a run is: optimizer steps taken and global batches used, which are more if fp16 skipped a step. same:
    {name: value} that a resumed run must have, too. Register the object for checkpointing.

    best: for --load_best_model_at_end, what is best so far of the evaluations whose step has a checkpoint, as {"step",
    "value", and the metric's name and direction}. It is in each checkpoint, which is written before its evaluation: a
    run that resumes evaluates that step again."""

    def __init__(self, same: dict[str, Any], accelerator: Any = None, args: Any = None) -> None:
        if accelerator and len(ids := dict(gather_object([(str(same.get("data"))[:12], socket.gethostname())]))) > 1:
            raise Refused(f"--dataset is not the same everywhere: {', '.join(map(' on '.join, ids.items()))}. Copy one")
        self.same, self.step, self.batch, self.last_due = same, 0, 0, 0
        self.accelerator, self.args, self.best, self.elsewhere = accelerator, args, {}, -1

    def due(self, every: int) -> bool:
        """Whether something that happens every `every` steps is due before the next step. True once per step."""
        last, self.last_due = self.last_due, self.step
        return bool(every) and self.step > 0 and self.step % every == 0 and last != self.step

    def state_dict(self) -> dict[str, Any]:
        return {"same": self.same, "step": self.step, "batch": self.batch, "best": self.best}

    def load_state_dict(self, state: Any) -> None:
        was, step, batch = (state.get(key) if isinstance(state, dict) else None for key in ("same", "step", "batch"))
        right = isinstance(was, dict) and isinstance(step, int) and isinstance(batch, int)
        if not right or not 0 <= step <= batch < 1 << 40:
            raise Refused(f"the checkpoint holds step {step!r:.60} and batch {batch!r:.60}: take another checkpoint")
        if differs := [f"{key} {was.get(key)} -> {value}" for key, value in self.same.items() if was.get(key) != value]:
            raise Refused(f"the checkpoint is of another run: {', '.join(differs)}. Resume as it was, or start anew")
        self.step, self.batch = step, batch
        if self.args and self.args.load_best_model_at_end:
            best = state.get("best")  # of no use if it is of another metric, in another folder, or damaged
            numbers = isinstance(best, dict) and [type(best.get(key)) for key in ("step", "value")] == [int, float]
            if numbers and best.items() >= self.wanted().items() and self.checkpoint(best["step"]).is_dir():
                self.keep(best)
            self.elsewhere = -1 if self.checkpoint(self.step).is_dir() else self.step

    def wanted(self) -> dict[str, Any]:
        """The metric that says which model is best, and whether more of it is better."""
        name, more = self.args.metric_for_best_model or "eval_loss", self.args.greater_is_better
        return {"metric": name, "greater": not name.endswith(("loss", "perplexity")) if more is None else more}

    def checkpoint(self, step: int) -> Path:
        return Path(self.accelerator.project_dir or "runs/latest") / f"checkpoint-{step}"

    def keep(self, best: dict[str, Any]) -> None:
        """Tells faithful which checkpoint is not to be deleted."""
        self.best, path = best, self.checkpoint(best["step"])
        self.accelerator.project_configuration.best_model_checkpoint = path

    def judged(self, values: dict[str, float], last: bool = False) -> dict[str, float]:
        """The values of an evaluation of this step, when it is noted whether they are the best. last: of the last step,
        which needs no checkpoint. Every rank calls it."""
        if not self.args or not self.args.load_best_model_at_end:
            return values
        new = self.wanted()
        name = next((name for name in (new["metric"], f"eval_{new['metric']}") if name in values), None)
        if name is None:
            raise Refused(f"--metric_for_best_model {new['metric']}: an evaluation has {', '.join(values)}")
        new |= {"step": self.step, "value": float(values[name])}
        saved = self.step % self.args.save_steps == 0 and self.step != self.elsewhere
        if math.isfinite(new["value"]) and (saved or last):
            gain = (new["value"] - self.best["value"]) * (1 if new["greater"] else -1) if self.best else 1
            self.keep(*broadcast_object_list([new if gain > 0 else self.best]))
        return values

    def load_best(self) -> bool:
        """Loads the best checkpoint, unless that is the model as it is. Every rank calls it. Returns whether it did."""
        if self.best.get("step", self.step) == self.step:
            return False
        self.accelerator.print("the best {metric} is that of step {step}: {value:.4g}".format(**self.best))
        self.accelerator.load_state(self.checkpoint(self.best["step"]))
        return True


class Order(torch.utils.data.Sampler):
    """An endless sampler over all epochs of a run, which starts where `progress` is. length: samples in the set.
    global_batch_size: samples per optimizer step, over all processes and micro-batches. Each epoch leaves out the few
    samples that do not fill a global batch; they differ from epoch to epoch. The indices of epoch e begin at
    e * length, because random crops depend on the epoch."""

    def __init__(self, length: int, global_batch_size: int, seed: int, progress: Progress) -> None:
        self.length, self.global_batch_size, self.seed, self.progress = length, global_batch_size, seed, progress
        self.batches_per_epoch, self.epoch, self.permutation = length // global_batch_size, -1, torch.empty(0)
        if not self.batches_per_epoch:
            raise Refused(
                f"the training set has {length} samples, less than one global batch of {global_batch_size}: lower "
                "--per_device_train_batch_size, --gradient_accumulation_steps or the number of processes"
            )

    def batch(self, number: int) -> torch.Tensor:
        """The indices of global batch `number`, counted from the start of the run, without epochs."""
        epoch, at = divmod(number, self.batches_per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self.epoch, self.permutation = epoch, torch.randperm(self.length, generator=generator)
        return self.permutation[at * self.global_batch_size : (at + 1) * self.global_batch_size]

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count(self.progress.batch):
            yield from (self.batch(number) + self.epoch * self.length).tolist()


def global_batch_size(accelerator: Accelerator, batch_size: int, accumulation: int) -> int:
    """Samples per optimizer step. Processes of tensor or sequence parallel share a batch."""
    sharing = getattr(accelerator.parallelism_config, "non_data_parallel_size", 1)
    return batch_size * accumulation * (accelerator.num_processes // sharing)


def lr_scheduler(
    optimizer: torch.optim.Optimizer, kind: str, warmup_steps: int, max_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    from transformers import get_scheduler

    return get_scheduler(kind, optimizer, warmup_steps, max_steps)


def steps(max_steps: int, epochs: float | None, steps_per_epoch: int) -> int:
    """Optimizer steps of the training: those of so many epochs, if they are given."""
    return max_steps if epochs is None else math.ceil(epochs * steps_per_epoch) or 1


def about(dataset: object) -> dict[str, Any]:
    """The facts about the data that inference needs, for JSON."""
    keys = "image_size in_chans num_classes mean std interpolation crop_pct left_out sequence_length vocab_size classes"
    return {key: getattr(dataset, key) for key in keys.split() if hasattr(dataset, key)}


def describe(accelerator: Any, dataset: Any) -> Path:
    """Writes data.json into the run's folder, for predict and export. Returns the folder."""
    folder = Path(accelerator.project_dir or "runs/latest")
    if accelerator.is_main_process:
        if links := [path for path in (folder / "model", *(folder / "model").glob("*")) if path.is_symlink()]:
            raise Refused(f"{links[0]} is a symlink, and would be written through: remove it")  # a stranger's folder
    try:
        if hasattr(accelerator, "record"):  # faithful's: it locks the folder first, on each machine's disk
            accelerator.record.begin(accelerator.resumed, ("data.json", "model"), together=True)
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            description = about(dataset) | {"fingerprint": dataset.fingerprint()}
            write(folder / "data.json", (json.dumps(description, indent=1) + "\n").encode())
    except OSError as error:
        raise Refused(f"nothing can be written to {folder} ({error.strerror or error}): choose another") from None
    return folder


def write(path: Path, content: bytes) -> None:
    """Puts a file of these bytes in the place of another, or of nothing, in one step. A symlink goes, not the file that
    it leads to. Raises OSError, also if there is a folder, a pipe or a device."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no file")
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def rows(name: str, offline: str) -> "DatasetDict":
    """The splits of a .csv or .json(l) file, or of a set of the Hub, "name" or "name:part". offline: as in `load`."""
    file_format = Path(name).suffix[1:].removesuffix("l")  # jsonl is json to `datasets`
    if file_format in ("csv", "json"):
        return load(name, offline, file_format, data_files=name)
    return load(name, offline, *name.split(":"))


def load(name: str, offline: str, *args: Any, **kwargs: Any) -> "DatasetDict":
    """`datasets.load_dataset`, with all its types of errors as one line. offline: names that need no network."""
    import datasets
    from huggingface_hub import constants, get_session

    path = Path(name.split(":")[0]).expanduser()
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError("it is a pipe or a device, not a file or a folder")
        for file in (path, *path.glob("**/*.json*")):
            if file.suffix in (".json", ".jsonl") and file.is_file() and depth_of(file) > 200:
                raise ValueError(f"{file.name} holds lists in lists more than 200 deep")
        if not path.exists():
            try:
                get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            except Exception:  # each release has errors of another client
                constants.HF_HUB_OFFLINE = True  # the cache alone, without six tries for each file
        return datasets.load_dataset(*args, **kwargs)
    except Exception as error:
        error = error.__cause__ if "while generating" in str(error) and error.__cause__ else error
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise Refused(f"--dataset {name}: {reason} (known offline: {offline}; else a folder or a Hub name)") from None
    finally:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE  # as it was at the start, for --push_to_hub


def depth_of(file: Path) -> int:
    """How deep lists and objects in a JSON file are in one another. At 10,000 the parser of `datasets` would crash."""
    others = bytes(set(range(256)) - set(b"[]{}"))
    with file.open("rb") as lines:
        parts = (line.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"') for line in lines)  # each second is text
        brackets = itertools.chain.from_iterable(b"".join(part[::2]).translate(None, others) for part in parts)
        return max(itertools.accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)


def column(split: "Dataset", key: str, name: str) -> list[Any]:
    """All values of a column. `datasets` finds text that is not UTF-8 only here."""
    try:
        return split[key][:]
    except UnicodeDecodeError as error:
        raise Refused(f"--dataset {name}: column {key} holds text that is not UTF-8 ({error})") from None


def strings(split: "Dataset") -> list[str]:
    """The names of the columns of text."""
    return [key for key, feature in split.features.items() if "string" in str(getattr(feature, "dtype", ""))]


def split_of(loaded: "DatasetDict", name: str) -> "tuple[Dataset, Dataset]":
    """Returns (training split, held-out split). A tenth of the training split is held out if there is no other."""
    train = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    held_out = next((loaded[split] for split in ("test", "validation") if split in loaded), None)
    if held_out is None:
        if len(train) < 2:
            raise Refused(f"--dataset {name} has {len(train)} samples: too few to hold some out")
        train, held_out = train.train_test_split(test_size=0.1, seed=0).values()  # pyrefly: ignore[missing-attribute]
    return train, held_out


def refuse_labels_out_of_range(name: str, split: "Dataset", column: str) -> None:
    """Raises Refused for labels out of range. Hub sets use -1 for samples without a label, which a loss cannot take."""
    labels, count = np.array(split[column][:], float), split.features[column].num_classes  # None becomes nan
    if count < 2:
        raise Refused(f"--dataset {name} has {count} class: classification needs two or more")
    if len(wrong := np.flatnonzero(~((labels >= 0) & (labels < count)))):
        raise Refused(
            f"--dataset {name}: {len(wrong)} labels are out of range, the first is {split[column][int(wrong[0])]} at "
            f"index {wrong[0]} of {split.split or 'a split'}; there are classes 0 to {count - 1}"
        )
