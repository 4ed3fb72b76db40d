"""Runs ranks for the amp8 tests. They are forked from a process that has imported torch, and return results."""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist


def run_ranks(world, function, *args, timeout=60):
    """Runs function(rank, world, *args) in `world` gloo processes. Returns a list of the results, or fails with a
    rank's traceback."""
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
    except Exception:
        with open(os.path.join(folder, f"{rank}.txt"), "w") as file:
            file.write(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may abort a process at its ordinary exit
