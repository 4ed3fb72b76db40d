"""Copies: what pickle makes of our objects, and the processes that a script forks by Accelerate's debug_launcher."""

import pytest
import torch
from conftest import train, weights

from faithful import __main__ as door

SCRIPT = """
import copy, pickle, sys
import torch
from accelerate import Accelerator, debug_launcher
torch.set_num_threads(1)

def main(folder):
    accelerator = Accelerator(project_dir=folder)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(torch.randn(12, 3), 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model, optimizer, loader
"""
PICKLED = """
Accelerator(project_dir=sys.argv[2] + "-earlier").nobody_pickles_it = lambda: 0
made = main(sys.argv[2])
for again in (lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy):
    for one in made:
        assert type(again(one)) is type(one)
    optimizer = again(made[2])
    optimizer.step()
    assert optimizer.state_dict()["param_groups"] == made[2].state_dict()["param_groups"]
    assert not hasattr(optimizer.accelerator, "record")
print("copied")
"""
DEBUGGED = """
def forked(folder):
    accelerator, model, *_ = main(folder)
    accelerator.save_model(model, folder + "/model")
    print(f"process {accelerator.process_index} of {accelerator.num_processes}", flush=True)
    accelerator.end_training()

debug_launcher(forked, (sys.argv[2],), num_processes=2)
print("launched")
"""


@pytest.fixture
def run(tmp_path):
    def run(more, ours=True):
        (tmp_path / "mine.py").write_text(SCRIPT + more)
        out = tmp_path / f"out-{ours}"
        before = (lambda rank: door.take_its_place()) if ours else None
        train("single_fp32", out, script=tmp_path / "mine.py", before=before)
        return out, (tmp_path / f"out-{ours}.log").read_text()

    return run


def test_what_accelerate_pickles_and_copies_can_be_pickled_and_copied(run):
    _, text = run(PICKLED)
    assert "copied" in text


def test_debug_launcher_trains_one_run_in_two_processes(run):
    out, text = run(DEBUGGED)
    assert "process 0 of 2" in text and "process 1 of 2" in text and "ddp x2" in text
    assert "launched" in text
    plain, _ = run(DEBUGGED, ours=False)
    ours, theirs = weights(out), weights(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
