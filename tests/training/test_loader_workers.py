"""Workers of data loaders that cannot hand over a batch: the run ends, with one line where the user can do something."""

import errno
import multiprocessing.synchronize
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, Ranks, launched

FULL = "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
ITS_OWN = multiprocessing.Queue()
DO = "refused: /dev/shm is too small for the batches of the data loaders' workers"


class Item(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.ones(4)


class NotHandedOver:
    """A batch whose pickling fails, as torch's does in a small /dev/shm."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


def killed(_):
    os.kill(os.getpid(), signal.SIGBUS)


def in_a_queue_of_its_own(batch):
    ITS_OWN.put((lambda: 0, 1))  # cannot be pickled
    return torch.utils.data.default_collate(batch)


def no_semaphore(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


FAULTS = {
    "the batch does not fit": (lambda _: NotHandedOver(RuntimeError(FULL)), 2, DO),
    "a bus error": (killed, 2, DO),
    "no room for a semaphore": (None, 2, DO),
    "the batch cannot be pickled": (lambda _: NotHandedOver(TypeError("cannot pickle it")), 1, "cannot pickle it"),
    "something else cannot be pickled": (in_a_queue_of_its_own, 0, "Can't pickle"),
}


def training(fault):
    def script():
        from faithful import Accelerator

        if fault == "no room for a semaphore":
            multiprocessing.synchronize.SemLock.__init__ = no_semaphore
        accelerator = Accelerator(project_dir=sys.argv[2])
        model = torch.nn.Linear(4, 4)
        loader = torch.utils.data.DataLoader(Item(), 2, num_workers=1, collate_fn=FAULTS[fault][0])
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
        accelerator.end_training()

    return script


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_that_hands_over_no_batch_ends_the_run(fault, tmp_path):
    _, code, line = FAULTS[fault]
    ranks = Ranks("single_fp32", ["--output_dir", str(tmp_path / "run")], script=training(fault))
    assert ranks.wait(60) == [code], ranks.text()
    said = ranks.text()
    assert line in said and (code != 2 or "Traceback" not in said and said.count("/dev/shm") == 1), said


def test_a_small_shared_memory_ends_a_run_of_two_processes(tmp_path):
    """The real one, in a mount namespace of its own."""
    mount = "mount -t tmpfs -o size=140k tmpfs /dev/shm"
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode
    ):
        pytest.skip("mount namespaces need root and util-linux")
    words = [ROOT / "launch.sh", "ddp_fp32", "vit", "--max_steps", "50", "--per_device_train_batch_size", "256",
             "--dataloader_num_workers", "2", "--output_dir", tmp_path / "run"]  # fmt: skip
    done = launched("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *map(str, words))
    assert done.returncode == 2 and DO in done.stderr and "Traceback" not in done.stderr, done.stderr
