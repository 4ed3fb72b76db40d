"""A plain Accelerate loop in which only the import of Accelerator is ours. Tests add to it at the places it names."""

import sys
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, TensorDataset

from faithful import Accelerator


def nothing(run):
    pass


def by_accelerator(run):
    run.accelerator.backward(run.loss)


def loop(
    *calls,
    make=Accelerator,
    width=32,
    made=nothing,
    prepared=nothing,
    backward=by_accelerator,
    stepped=nothing,
    saved=nothing,
    **arguments,
):
    """Trains a small model and saves it. calls: the names that each call of prepare gets, by default all in one call.
    made, prepared, backward, stepped, saved: what is called at that place, with the loop's names. arguments: of make."""
    run = SimpleNamespace(accelerator=make(**{"project_dir": sys.argv[2]} | arguments))
    torch.manual_seed(0)
    run.model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, 16))
    run.optimizer = torch.optim.AdamW(run.model.parameters(), 1e-2)
    x = torch.randn(64, 16)
    run.loader = DataLoader(TensorDataset(x, x.flip(1)), 8)
    made(run)
    for names in map(str.split, calls or ("model optimizer loader",)):
        parts = run.accelerator.prepare(*(getattr(run, name) for name in names))
        vars(run).update(zip(names, parts if len(names) > 1 else [parts], strict=True))
    prepared(run)
    for x, y in run.loader:
        run.loss = (run.model(x) - y).square().mean()
        backward(run)
        run.optimizer.step()
        run.optimizer.zero_grad()
        stepped(run)
    run.accelerator.save_model(run.model, f"{sys.argv[2]}/model")
    saved(run)
    run.accelerator.end_training()


if __name__ == "__main__":
    loop()
