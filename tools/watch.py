"""Runs a training script and measures its FP8 layers: the part of tools/diagnose.py that each process executes.

    accelerate launch --config_file CONFIG tools/watch.py --to FOLDER --look 20 --pairs 8 --after 8 SCRIPT [its options]

The script is not changed. It gets an Accelerator that measures. For `--look` steps it compares every FP8 layer with the
same layer in high precision (tools/shadow.py). Then come the pairs. Each takes `--after` steps as the config says and
remembers their batches. Then it restores the weights, optimizer state and random numbers and repeats the same steps on
the same batches: once unchanged, which shows whether steps repeat exactly, then each time with another layer, or block,
in high precision. Training continues from the end of the first of these. The result is FOLDER/watched.json.
"""

import argparse
import contextlib
import inspect
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

os.environ["TQDM_DISABLE"] = "1"  # read with tqdm's import: the script's bars don't know of repeated steps
import accelerate  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate import data_loader  # noqa: E402
from accelerate.utils import gather_object  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from faithful import Refused, accelerator  # noqa: E402
from faithful.disk import replacing  # noqa: E402
from faithful.tensors import random_states  # noqa: E402
from faithful.training import steps  # noqa: E402
from tools import progress  # noqa: E402
from tools.shadow import Looking, Weight, high_precision, layers_of, measured  # noqa: E402

State = tuple[dict[str, torch.Tensor], Any]  # tensors of the model and optimizer, and random numbers
SEPARATE = 24  # above this number, whole blocks are put back to high precision


class Done(SystemExit):
    """Raised when everything is measured, to end the script."""


class Watch:
    accelerator: Any  # None before `begin`
    arm: str | None
    shadows: Sequence[Weight] = ()

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.accelerator, self.phase, self.taken = args, None, "look", 0
        self.batches, self.rates, self.at = [], [], 0  # of the pair's steps; at: the next batch to repeat
        self.arm, self.losses, self.results, self.curve = None, [], [], []
        self.open = contextlib.ExitStack()  # the layers that are in high precision now
        self.shown = contextlib.ExitStack()  # the bar

    def begin(self, running: accelerator.Accelerator, evidence: Any) -> None:
        self.accelerator, self.evidence = running, evidence
        self.layers = layers_of(evidence.model)
        self.groups = groups_of(list(self.layers))
        self.looking = Looking(self.layers, evidence)
        steps_taken = self.args.look + self.args.pairs * self.args.after * (3 + len(self.groups))
        hidden = not running.is_main_process
        self.bar = self.shown.enter_context(progress.waiting("steps", steps_taken, disable=hidden))

    # ---- what the script's own loop calls ----

    def batches_of(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches that the script sees."""
        while True:
            if self.phase == "again" and self.evidence.model.training:
                batch, loader.end_of_dataloader = self.batches[self.at]
                self.at += 1
            else:
                batch = next(batches, None)
                if batch is None:
                    return
                if self.phase == "pair" and self.evidence.model.training:
                    self.batches.append((batch, loader.end_of_dataloader))
            yield batch

    def before_update(self) -> None:
        groups = self.optimizer().param_groups
        if self.phase == "pair":
            self.rates.append([group["lr"] for group in groups])
        elif self.phase == "again":
            for group, rate in zip(groups, self.rates[len(self.losses)], strict=True):
                group["lr"] = rate

    def after_update(self) -> None:
        self.bar.update()
        self.accelerator.steps.settle()
        loss = self.accelerator.steps.loss
        for shadow in self.shadows:
            shadow.step(self.accelerator)
        if self.phase == "look":
            self.taken += 1
            self.curve.append(loss)
            self.looking.stepped()
            if self.taken == self.args.look:
                self.looking.end()
                self.begin_pair()
            return
        self.losses.append(loss)
        if len(self.losses) == self.args.after:
            self.end_arm()

    # ---- pairs ----

    def begin_pair(self) -> None:
        if len(self.results) == self.args.pairs:
            self.finish()
        self.start, self.phase = self.state(), "pair"
        self.batches, self.rates, self.losses, self.result = [], [], [], {}
        self.waiting = ["again", *self.groups, "all"]
        self.arm = "none"

    def end_arm(self) -> None:
        half = self.losses[-max(1, self.args.after // 2) :]
        self.result[self.arm] = sum(half) / len(half)
        self.open.close()
        self.shadows, self.losses = (), []
        if self.arm == "none":
            self.goes_on = self.state()
        if not self.waiting:
            self.results.append(self.result)
            self.restore(self.goes_on)
            return self.begin_pair()
        self.arm, self.phase, self.at = self.waiting.pop(0), "again", 0
        self.restore(self.start)
        names = list(self.layers) if self.arm == "all" else self.groups.get(self.arm, [])
        chosen = [self.layers[name] for name in names]
        self.shadows = self.open.enter_context(high_precision(chosen, self.optimizer()))

    def state(self) -> State:
        running, evidence = self.accelerator, self.evidence
        tensors = running.backend.tensors(running.strategy, evidence.model, evidence.optimizers[0])
        return {name: tensor.clone() for name, tensor in tensors.items()}, random_states.of_process()

    def restore(self, state: State) -> None:
        running, evidence = self.accelerator, self.evidence
        tensors = {name: tensor.clone() for name, tensor in state[0].items()}  # the optimizer keeps what it loads
        running.backend.restore(running.strategy, evidence.model, evidence.optimizers[0], tensors)
        random_states.set_process(state[1])

    def optimizer(self) -> torch.optim.Optimizer:
        return self.accelerator.strategy.torch_optimizer(self.evidence.optimizers[0])

    def finish(self) -> NoReturn:
        self.shown.close()
        running = self.accelerator
        everyone = gather_object([self.looking.rows])
        if running.is_main_process:
            watched = {"recipe": Path(self.args.script[0]).stem,
                       "measured": self.evidence.record["measured"], "skipped": self.evidence.record["linear_skipped"],
                       "skip": running.plan.skip, "plan": vars(running.plan), "look": self.args.look,
                       "after": self.args.after, "loss": self.curve, "groups": self.groups, "pairs": self.results,
                       "layers": measured(everyone)}  # fmt: skip
            replacing.write_json(Path(self.args.to) / "watched.json", watched)
        if dist.is_initialized():
            dist.barrier()
        raise Done(0)


def groups_of(names: list[str]) -> dict[str, list[str]]:
    """{name: [layers]}: each layer or, if there are many, each block, with its name for a skip list."""
    if len(names) <= SEPARATE:
        return {name: [name] for name in names}
    groups = {}
    for name in names:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        group = name if number is None or number == len(parts) - 1 else ".".join(parts[: number + 1]) + ".*"
        groups.setdefault(group, []).append(name)
    return groups


def watching(watch: Watch) -> type[accelerator.Accelerator]:
    """The Accelerator that the script gets."""

    class Accelerator(accelerator.Accelerator):
        def project_folder(self, merged: dict[str, Any]) -> Any:
            merged |= {"project_dir": str(Path(watch.args.to) / "run"), "project_config": None}
            return super().project_folder(merged)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not self.plan.emulated and self.plan.backend != "msamp":
                raise Refused(
                    f"diagnose sees the scales of emulated FP8 and of MS-AMP's levels, not those inside "
                    f"{self.plan.implementation}'s kernels: run it on a CPU"
                )
            self.record.main = False  # steps that are repeated are no run: no process writes a record

        def prepare(self, *args: Any, **kwargs: Any) -> Any:
            prepared = super().prepare(*args, **kwargs)
            if self.evidence and watch.accelerator is None:
                watch.begin(self, self.evidence[0])
            return prepared

        def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
            self.max_norm = max_norm
            return super().clip_grad_norm_(parameters, max_norm, norm_type)

        def before_update(self, optimizer: torch.optim.Optimizer) -> None:
            super().before_update(optimizer)
            watch.before_update()

        def after_update(self, optimizer: torch.optim.Optimizer) -> None:
            super().after_update(optimizer)
            watch.after_update()

        def log(self, *args: object, **kwargs: object) -> None:  # repeated steps do not belong to the run's record
            self.validate_prepared()

        def save_state(self, *args: Any, **kwargs: Any) -> Any:
            pass

    # faithful looks up there what a script passes by position
    Accelerator.__init__.__signature__ = inspect.signature(accelerate.Accelerator.__init__)  # pyrefly: ignore[missing-attribute]
    return Accelerator


def give_batches(watch: Watch, cls: type) -> None:
    """Makes loaders of this class ask `watch` for the next batch."""
    iterate = cls.__iter__
    cls.__iter__ = lambda loader: watch.batches_of(loader, iterate(loader))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", required=True)
    for name, default in (("look", 20), ("pairs", 8), ("after", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("script", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    watch = Watch(args)
    steps.AGREE_SECONDS = 0  # the loss over all processes
    accelerator.Accelerator = accelerate.Accelerator = watching(watch)
    for cls in (data_loader.DataLoaderShard, data_loader.DataLoaderDispatcher):
        give_batches(watch, cls)
    script, *sys.argv[1:] = args.script
    sys.argv[0] = script
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    raise Refused(
        f"the script ended after {watch.taken} steps and {len(watch.results)} pairs: it must be told to take "
        "more steps, or diagnose to look at fewer (--look, --pairs, --after)"
    )


if __name__ == "__main__":
    main()
