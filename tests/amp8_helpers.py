"""Puts models on a level, trains them, and runs ranks, for the tests of amp8."""

import functools
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import amp8


def seeded(*shape, seed=0):
    """Returns normally distributed values, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded_model(build, *args, seed=0, **options):
    """Returns build(*args, **options), which draws its weights from this seed."""
    torch.manual_seed(seed)
    return build(*args, **options)


def linears(*sizes, bias=True):
    """Returns a Sequential of Linears that leads from each size to the next one."""
    return seeded_model(
        lambda: nn.Sequential(*(nn.Linear(*pair, bias) for pair in zip(sizes, sizes[1:], strict=False)))
    )


def start(model, level="O2", adam=torch.optim.AdamW, ddp=False, **options):
    """Puts a model on a level. Returns the model, which DistributedDataParallel wraps if `ddp`, and its optimizer. The
    options are amp8.initialize's and the optimizer's."""
    names = inspect.signature(amp8.initialize).parameters
    optimizer = adam(model.parameters(), **{"lr": 1e-2} | {k: v for k, v in options.items() if k not in names})
    options = {key: value for key, value in options.items() if key in names}
    model, optimizer = amp8.initialize(model, optimizer, level, **options)
    return amp8.attach(DistributedDataParallel(model)) if ddp else model, optimizer


def train(model, optimizer, loss_of, steps, max_norm=None, **options):
    """Trains on loss_of(model, step, **options) in each of the steps. Returns the losses, and the norms before
    clipping."""
    losses, norms = [], []
    for step in steps:
        loss = loss_of(model, step, **options)
        loss.backward()
        if max_norm:
            norms.append(amp8.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def relative_error(value, exact):
    return (value - exact).norm() / exact.norm()


def assert_equal(first, second):
    """Asserts that two dictionaries of tensors, of FP8 too, are equal."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype and torch.equal(value.double(), second[name].double()), name


def on_ranks(world):
    """Decorates a test(rank, world, ...), which then runs on each of `world` ranks."""

    def decorate(function):
        def test(**arguments):
            run_ranks(world, functools.partial(function, **arguments))

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        test.__signature__ = inspect.Signature(list(inspect.signature(function).parameters.values())[2:])
        return test

    return decorate


def run_ranks(world, function, *args, timeout=60):
    """Runs function(rank, world, *args) in `world` gloo processes, which are forked from this one, where torch is
    imported. Returns a list of the results, or fails with a rank's traceback."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=_rank, args=(r, world, folder, function, args)) for r in range(world)]
        for process in ranks:
            process.start()
        end = time.monotonic() + timeout
        for process in ranks:
            process.join(max(0, end - time.monotonic()))
        late = [r for r, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
            process.join()
        results = []
        for rank in range(world):
            error, result = os.path.join(folder, f"{rank}.txt"), os.path.join(folder, f"{rank}.pt")
            if os.path.exists(error):
                raise AssertionError(f"rank {rank}:\n" + open(error).read())
            if not os.path.exists(result):
                raise AssertionError(f"rank {rank} returned nothing; still running after {timeout} s: {late}")
            results.append(torch.load(result, weights_only=True))
        return results


def _rank(rank, world, folder, function, args):
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(os.path.join(folder, "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        result = function(rank, world, *args)
        path = os.path.join(folder, f"{rank}.pt")
        torch.save(result, path + ".part")
        os.rename(path + ".part", path)
        dist.barrier()
    except BaseException:  # a failed pytest.raises is no Exception
        with open(os.path.join(folder, f"{rank}.txt"), "w") as file:
            file.write(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may abort a process at its ordinary exit


def on_nodes(rank, world, each, told, function, *args):
    """Runs function(rank, world, *args) on nodes of `each` ranks, as torchrun would, or not `told` that there are nodes.
    Returns a dictionary: its result, how many process groups there are, and the bytes that amp8 has sent from this rank
    to other nodes; an all_gather sends to the next rank."""
    if told:
        os.environ["GROUP_RANK"] = str(rank // each)
    left = []

    def noted(collective, bytes_to_each):
        def counting(*args, group=None, **options):
            if len(args) > 1:  # FSDP2 names them
                ranks = dist.get_process_group_ranks(group)
                to_each = bytes_to_each(args, ranks.index(rank), len(ranks))
                left.append(sum(n for r, n in zip(ranks, to_each, strict=True) if r // each != rank // each))
            return collective(*args, group=group, **options)

        return counting

    def to_the_next(args, mine, world):
        return [(r == (mine + 1) % world) * (args[0].nbytes - args[1].nbytes) for r in range(world)]

    dist.all_to_all_single = noted(dist.all_to_all_single, lambda args, *_: args[3])
    dist.all_gather_into_tensor = noted(dist.all_gather_into_tensor, to_the_next)
    return {"result": function(rank, world, *args), "left": sum(left), "groups": dist.get_pg_count()}


def leaving(world, each, collectives):
    """Returns the bytes per element of the gradient that collectives of FP8 send from a node of `each` ranks, per rank:
    (in one hop, in two). On a ring of all ranks a node's last one alone sends to another node."""
    nodes = world // each
    flat = {"all_to_all": (world - each) / world, "all_gather": (world - 1) / world / each}
    hops = {"all_to_all": 2 * (nodes - 1) / nodes / each, "all_gather": (nodes - 1) / nodes / each}
    return sum(flat[name] for name in collectives), sum(hops[name] for name in collectives)
