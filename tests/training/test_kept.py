"""What Accelerate keeps is kept here: folders, models, loaders, gradients that are not finite, freed memory."""

import json
import os
import re
import shutil

import datasets
import datasets.distributed
import pytest
import torch
from conftest import record, train
from safetensors.torch import load_file

from faithful import __main__ as door
from faithful.checkpoint import checkpoints
from faithful.training import loaders

START = """
import sys
import torch
from pathlib import Path
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, DataLoaderConfiguration, set_seed

folder = Path(sys.argv[2])
set_seed(0)


def linear(*sizes):
    return torch.nn.Linear(*(sizes or (16, 16)))


def step(model, optimizer, clip=None):
    accelerator.backward(model(torch.randn(4, 16)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


"""


def run(folder, body, config="single_fp32", code=0):
    """Runs `body` as an unchanged Accelerate script, in forked ranks. Returns what it prints."""
    script = folder / "mine.py"
    script.write_text(START + body)
    output = folder / "run"
    (folder / "run.log").unlink(missing_ok=True)
    train(config, output, script=script, before=lambda rank: door.take_its_place(), code=code)
    return (folder / "run.log").read_text()


# ---- folders ----


def test_a_folder_that_is_saved_to_keeps_its_files(tmp_path):
    """Also the project's folder itself, with its checkpoints and its record, and the working directory."""
    run(tmp_path, """
import os
import re
accelerator = Accelerator(project_dir=folder)
model = linear()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
out = folder / "out"
(out / "epoch_0").mkdir(parents=True)
(out / "precious.txt").write_text("x")
(out / "epoch_0" / "weights").write_text("y")
step(model, optimizer)
accelerator.save_state(out)
accelerator.save_state()
accelerator.save_state(folder)
step(model, optimizer)
accelerator.save_state(folder)
os.chdir(out)
accelerator.save_state(".")
assert os.path.exists("manifest.json"), "the working directory is still the folder"
before = model.weight.detach().clone()
step(model, optimizer)
accelerator.load_state(".")
assert model.weight.equal(before)
""")  # fmt: skip
    folder = tmp_path / "run"
    assert (folder / "out/precious.txt").read_text() == "x" and (folder / "out/epoch_0/weights").read_text() == "y"
    assert record(folder)["status"] == "finished" and (folder / "metrics.jsonl").exists()
    for saved in (folder, folder / "out", folder / "checkpoint-1"):
        assert checkpoints.unsound(saved) is None and not (saved / ".checkpoint.tmp").exists()


def test_pruning_keeps_the_newest_checkpoints_of_a_run_that_went_back(tmp_path):
    """It resumes the checkpoint of step 1 and saves step 2, while those of the steps 3, 5 and 7 are there."""
    run(tmp_path, """
accelerator = Accelerator(project_config=ProjectConfiguration(folder, total_limit=2))
model = linear()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
accelerator.project_configuration.total_limit = None
for number in range(1, 8):
    step(model, optimizer)
    if number % 2:
        accelerator.save_state()
accelerator.load_state(folder / "checkpoint-1")
accelerator.project_configuration.total_limit = 2
step(model, optimizer)
saved = accelerator.save_state()
assert Path(saved).name == "checkpoint-2" and Path(saved).exists(), saved
accelerator.load_state()
assert accelerator.steps.taken == 2, "the newest checkpoint is the one written last"
""")  # fmt: skip
    names = [path.name for path in checkpoints.list_checkpoints(tmp_path / "run")]
    assert names == ["checkpoint-2", "checkpoint-7"]


# ---- what a checkpoint holds ----

MODELS = """
accelerator = Accelerator(project_dir=folder)
model, teacher = torch.nn.Sequential(linear(), linear(), linear()), linear().requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
if "late" in sys.argv:
    model, optimizer = accelerator.prepare(model, optimizer)
    teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
else:
    model, teacher, optimizer = accelerator.prepare(model, teacher, optimizer)
step(model, optimizer)
accelerator.save_state(folder / "saved")
before = accelerator.get_state_dict(teacher)
with torch.no_grad():
    for parameter in teacher.parameters():
        parameter.zero_()
accelerator.load_state(folder / "saved")
after = accelerator.get_state_dict(teacher)
assert before.keys() == after.keys() and (before or not accelerator.is_main_process)
assert all(before[name].equal(after[name]) and after[name].any() for name in after)
accelerator.end_training()
"""


@pytest.mark.parametrize("config", ["single_fp32 late", "ddp_fp8", "fsdp_bf16", "single_fp8_msamp_o2", "zero3_bf16 late",
                                    pytest.param("fsdp_fp8_msamp_o2", marks=pytest.mark.slow),
                                    pytest.param("ddp_fp8_msamp_o3", marks=pytest.mark.slow)])  # fmt: skip
def test_a_model_without_an_optimizer_is_in_the_checkpoint(tmp_path, config):
    config, *late = config.split()
    script = tmp_path / "mine.py"
    script.write_text(START + MODELS)
    train(config, tmp_path / "run", *late, script=script, before=lambda rank: door.take_its_place())


def test_a_script_that_evaluates_loads_its_model_alone(tmp_path):
    """Accelerate reads what the script has prepared. What the checkpoint lacks is an error."""
    run(tmp_path, """
accelerator = Accelerator(project_dir=folder)
model = linear()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
step(model, optimizer)
accelerator.save_state(folder / "saved")
weight = model.weight.detach().clone()
accelerator.free_memory()
model = accelerator.prepare(linear())
accelerator.load_state(folder / "saved")
assert model.weight.equal(weight)
""")  # fmt: skip
    notes = record(tmp_path / "run")["notes"]
    assert any("also holds 1 optimizers that the script has not prepared" in note for note in notes)
    log = run(tmp_path, """
accelerator = Accelerator(project_dir=folder / "new")
a, b = linear(), linear()
a, b, optimizer = accelerator.prepare(a, b, torch.optim.AdamW(a.parameters(), 0.1))
accelerator.load_state(folder / "saved")
""", code=2)  # fmt: skip
    assert "saved holds 1 models, the script has 2: resume with the script as it was" in log and "Traceback" not in log


def test_optimizer_state_that_is_no_tensor_or_of_no_model_is_kept(tmp_path):
    """LBFGS keeps lists. A tensor of the script's own may be in the optimizer beside the model's."""
    run(tmp_path, """
accelerator = Accelerator(project_dir=folder)
model, scale = linear(), torch.nn.Parameter(torch.ones(3))
adam = torch.optim.AdamW([*model.parameters(), scale], 0.1)
second = torch.nn.Linear(4, 4)
lbfgs = torch.optim.LBFGS(second.parameters(), max_iter=4)
model, adam, second, lbfgs = accelerator.prepare(model, adam, second, lbfgs)
accelerator.backward(model(torch.randn(4, 16)).square().mean() + scale.square().sum())
adam.step()


def closure():
    lbfgs.zero_grad()
    loss = (second(torch.eye(4)) - 1).square().mean()
    accelerator.backward(loss)
    return loss


lbfgs.step(closure)
accelerator.save_state(folder / "saved")
was = [len(one.state) for one in (adam, lbfgs)], adam.state[scale]["exp_avg"].clone()
lists = {k: v for k, v in lbfgs.state[lbfgs.param_groups[0]["params"][0]].items()}
adam.optimizer.state.clear(), lbfgs.optimizer.state.clear()
accelerator.load_state(folder / "saved")
assert [len(one.state) for one in (adam, lbfgs)] == was[0] == [3, 1]
assert adam.state[scale]["exp_avg"].equal(was[1])
again = lbfgs.state[lbfgs.param_groups[0]["params"][0]]
assert again.keys() == lists.keys() and again["n_iter"] == lists["n_iter"]
assert all(a.equal(b) for a, b in zip(again["old_dirs"], lists["old_dirs"], strict=True)) and lists["old_dirs"]
""")  # fmt: skip


def test_the_epoch_s_number_is_kept(tmp_path):
    """Accelerate's seedable sampler draws the order of an epoch from its number."""
    run(tmp_path, """
accelerator = Accelerator(project_dir=folder, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))


def prepared():
    model = linear()
    loader = torch.utils.data.DataLoader(torch.arange(8), shuffle=True)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1), loader)


model, optimizer, loader = prepared()
step(model, optimizer)
epochs = []
for epoch in range(3):
    if epoch == 2:
        accelerator.save_state(folder / "saved")
    epochs.append([int(x) for x in loader])
loader.set_epoch(0)
accelerator.load_state(folder / "saved")
assert [int(x) for x in loader] == epochs[2] != epochs[0]
""")  # fmt: skip


def test_the_batch_of_a_gan_is_counted(tmp_path):
    """Its discriminator steps first, when the generator, which is prepared first, has computed nothing."""
    log = run(tmp_path, """
accelerator = Accelerator(project_dir=folder)
made = [linear(), linear()]
*models, g, d = accelerator.prepare(*made, *(torch.optim.SGD(model.parameters(), 0.1) for model in made))
step(models[1], d), step(models[0], g)
accelerator.end_training()
""")  # fmt: skip
    assert log.count("| global batch 4") == 1 and record(tmp_path / "run")["seen"]["samples_per_step"] == 4


@pytest.mark.parametrize("config", ["single_fp32", "fsdp_fp32"])
def test_an_optimizer_that_begins_later_is_counted_then(tmp_path, config):
    """As magvit2's discriminator; gradients of several steps before it are counted once."""
    log = run(tmp_path, """
accelerator = Accelerator(project_dir=folder)
made = torch.nn.Sequential(*map(linear, (16, 16), (16, 16)))
optimizers = [torch.optim.AdamW(part.parameters(), 0.1) for part in made]
model, g, d = accelerator.prepare(made, *optimizers)
for optimizer in (d, d, d, g, g, d):
    step(model, optimizer)
accelerator.end_training()
""", config=config)  # fmt: skip
    lines = [line for line in log.splitlines() if "B/param" in line]
    assert [re.search(r"([\d.]+) B/param", line)[1] for line in lines] == ["10.0", "16.0"]
    assert ["| 1 of 2 optimizers have stepped" in line for line in lines] == [True, False]
    assert record(tmp_path / "run")["evidence"]["bytes_per_parameter"]["gradient"] == 4


def test_data_that_is_divided_twice_is_told(tmp_path):
    """Half of each epoch is never read: the script divides the data, and then Accelerate does."""
    log = run(tmp_path, """
from torch.utils.data import DataLoader, DistributedSampler
accelerator = Accelerator(project_dir=folder)
model, data = linear(), torch.randn(32, 16)
loader = DataLoader(data, 4, sampler=DistributedSampler(data))
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
assert sum(map(len, loader)) == 8
step(model, optimizer)  # with the same samples in both processes
accelerator.end_training()
""", config="ddp_fp32")  # fmt: skip
    assert (
        log.count("note: DistributedSampler has divided the data over the processes, and prepare divides it again") == 1
    )
    assert log.count("note: all processes have computed the same samples in the first step: prepare the loader") == 1
    whole = datasets.IterableDataset.from_generator(iter, gen_kwargs={"object": [{"x": 1}]})
    both = [
        torch.utils.data.DataLoader(data) for data in (whole, datasets.distributed.split_dataset_by_node(whole, 0, 2))
    ]
    assert list(map(loaders.divided_before, both)) == [None, "split_dataset_by_node"]


WORKERS = """
class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        worker = torch.utils.data.get_worker_info()
        return torch.tensor([index, worker.seed if worker else 0])


def prepared(workers, persistent):
    set_seed(0)
    model, data = linear(), Numbered()
    loader = torch.utils.data.DataLoader(data, 2, True, num_workers=workers, persistent_workers=persistent)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)


def rest(model, optimizer, loader, at=(0, 0), skip=True, save=()):
    seen = []  # what is left of three epochs from (epoch, batch) on; saves after the batches `save`
    for epoch in range(at[0], 3):
        skipped = at[1] if epoch == at[0] else 0
        left = accelerator.skip_first_batches(loader, skipped) if skip and skipped else loader
        for number, batch in enumerate(left, 0 if left is loader else skipped):
            if number >= skipped:
                accelerator.backward(model(torch.ones(1, 16)).sum())
                optimizer.step()
                seen.append((epoch, number, batch.tolist()))
                if (epoch, number + 1) in save:
                    accelerator.save_state(folder / f"{epoch}-{number + 1}")
    return seen


"""


def test_an_epoch_goes_on_with_its_order_and_its_workers_seeds(tmp_path):
    """Persistent workers begin their first epoch alone as others do."""
    said = run(tmp_path, WORKERS + """
accelerator = Accelerator(project_dir=folder)
n = 8 // accelerator.num_processes
saves = [(0, 2), (1, n), (2, 1)]
for workers, persistent in [(0, False), (1, True)]:
    whole = rest(*prepared(workers, persistent), save=saves)
    for save, skip in [(save, skip) for save in saves for skip in (True, False)[:save[1]]]:
        accelerator.free_memory()
        objects = prepared(workers, persistent)
        for _ in range(2):  # a new process's loader, and one whose workers run already
            accelerator.load_state(folder / f"{save[0]}-{save[1]}")
            left = rest(*objects, at=save if save[1] < n else (save[0] + 1, 0), skip=skip)
            assert left == whole[save[0] * n + save[1]:], (workers, persistent, save, skip, left, whole)
    accelerator.free_memory()
print("no note before", flush=True)
objects = prepared(0, False)
accelerator.load_state(folder / "0-2")
rest(*objects)
""", config="ddp_fp32")  # fmt: skip
    before, _, after = said.partition("no note before")
    assert "begins it anew" in after and "begins it anew" not in before


DRAWS = {
    "random": "order = list(range(8)); random.shuffle(order)",
    "numpy": "order = numpy.random.permutation(8).tolist()",
    "torch": "order = torch.randperm(8).tolist()",
}


@pytest.mark.parametrize("draws", DRAWS)
def test_an_epoch_goes_on_with_the_order_of_a_sampler_of_ones_own(tmp_path, draws):
    script = (
        WORKERS
        + f"""
import random
import numpy
import accelerate


class Own(torch.utils.data.Sampler):
    def __iter__(self):
        {DRAWS[draws]}
        return iter(order)

    def __len__(self):
        return 8


accelerator = Accelerator(project_dir=folder)
model = linear()
loader = torch.utils.data.DataLoader(Numbered(), 2, sampler=Own())
objects = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
whole = rest(*objects, save=[(1, 2)])
accelerator.load_state(folder / "1-2")
after = rest(*objects, at=(1, 2))
assert after == whole[6:], (after, whole)
accelerator.load_state(folder / "1-2")
for batch in accelerate.skip_first_batches(objects[2], 2):
    accelerator.backward(objects[0](torch.ones(1, 16)).sum())
    objects[1].step()
"""
    )
    said = run(tmp_path, script, code=2)
    assert "whose order Accelerate's function skip_first_batches draws anew: call the method, accelerator.s" in said
    assert "begins it anew" not in said, "a sampler of one's own may go on"


NET = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.{layer}
        {more}

    def forward(self, adjacency, x):
        return torch.sparse.mm(adjacency, self.layer(x)) @ self.frozen.float()


class Registered:
    def state_dict(self):
        return {{"registered": torch.zeros(2, dtype=torch.{dtype})}}

    def load_state_dict(self, state):
        pass


accelerator, adjacency = Accelerator(project_dir=folder), torch.eye(4).to_sparse()
accelerator.register_for_checkpointing(Registered())
model = Net()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, 0.1))
for _ in range(2):
    accelerator.backward(model(adjacency, torch.randn(4, 3)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.load_state(accelerator.save_state())
accelerator.save_model(model, folder / "saved")
accelerator.end_training()
"""
FP8 = "self.frozen = torch.nn.Parameter(torch.eye(4).to(torch.float8_e4m3fn), requires_grad=False)"
FP32 = "self.register_buffer('frozen', torch.eye(4))"
LACKS = ", which safetensors does not have: let state_dict() give another dtype, or make a buffer persistent=False"
OTHER_TENSORS = {  # config, layer, more of the model, dtype of a registered tensor, and the refusal or None
    "FP8 weights, a sparse input": ("single_fp32", "Linear(3, 4)", FP8, "complex64", None),
    "a dtype that safetensors lacks": ("ddp_fp32", "Linear(3, 4)", FP32, "complex128", f"save_state: registered.0.registered is torch.complex128{LACKS}"),
    "a sparse buffer": ("single_fp32", "Linear(3, 4)", f"{FP32}; self.register_buffer('sparse', adjacency)", "int8", f"save_state: 0:buffer/sparse is torch.sparse_coo{LACKS}"),
    "a lazy layer": ("ddp_fp32", "LazyLinear(4)", FP32, "int8", "a layer has no weights before its first input, as LazyLinear: call the model once before"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_tensors_of_other_kinds_are_trained_and_saved_or_refused(tmp_path, name):
    config, layer, more, dtype, line = OTHER_TENSORS[name]
    said = run(tmp_path, NET.format(layer=layer, more=more, dtype=dtype), config=config, code=2 if line else 0)
    assert (f"refused: {line}" in said) if line else "finished: " in said, said


def test_a_run_that_is_stopped_in_a_later_epoch_goes_on_with_persistent_workers(tmp_path):
    body = (
        WORKERS
        + """
import os, signal
accelerator = Accelerator(project_dir=folder)
objects = prepared(1, True)
accelerator.load_state()
begun = accelerator.steps.taken


def told_to_stop(*_):
    if accelerator.steps.taken == stop_after:
        os.kill(os.getpid(), signal.SIGTERM)
        accelerator.steps.next_exchange = 0


objects[1].optimizer.register_step_post_hook(told_to_stop)
seen = rest(*objects, at=divmod(begun, 8))
print("seen", [batch for *_, batch in seen], flush=True)
accelerator.end_training()
"""
    )
    whole = run(tmp_path, f"stop_after = -1{body}").partition("seen ")[2].splitlines()[0]
    shutil.rmtree(tmp_path / "run")
    run(tmp_path, f"stop_after = 10{body}", code=143)
    left = run(tmp_path, f"stop_after = -1{body}").partition("seen ")[2].splitlines()[0]
    whole, left = json.loads(whole), json.loads(left)
    assert 8 < 24 - len(left) < 16 and left == whole[24 - len(left) :]


def test_a_stateful_loader_goes_on_where_it_was(tmp_path):
    pytest.importorskip("torchdata", reason="torchdata is not installed (setup --extra dev)")
    run(tmp_path, """
config = DataLoaderConfiguration(use_stateful_dataloader=True)
accelerator = Accelerator(project_dir=folder, dataloader_config=config)
model = linear()
loader = torch.utils.data.DataLoader(torch.arange(10.0), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1), loader)
left = []
for at, x in enumerate(loader):
    if at == 2:
        step(model, optimizer)
        accelerator.save_state(folder / "saved")
    elif at > 2:
        left.append(int(x))
accelerator.load_state(folder / "saved")
assert [int(x) for x in loader] == left and len(left) == (10 // accelerator.num_processes - 3), left
""", config="ddp_fp32")  # fmt: skip


def test_a_stateful_loader_of_a_stream_goes_on_too(tmp_path):
    """An IterableDataset has no length."""
    pytest.importorskip("torchdata", reason="torchdata is not installed (setup --extra dev)")
    run(tmp_path, """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from torch.arange(10.0)

config = DataLoaderConfiguration(use_stateful_dataloader=True)
accelerator = Accelerator(project_dir=folder, dataloader_config=config)
loader = accelerator.prepare(torch.utils.data.DataLoader(Stream(), batch_size=2))
batches = iter(loader)
next(batches), next(batches)
accelerator.save_state(folder / "saved")
accelerator.load_state(folder / "saved")
assert [x.tolist() for x in loader] == [[4, 5], [6, 7], [8, 9]]
""")  # fmt: skip


@pytest.mark.parametrize("config", ["ddp_fp32", "fsdp_bf16", "zero3_bf16", "single_fp8_msamp_o2"])
def test_what_a_module_s_state_dict_adds_is_kept(tmp_path, config):
    run(tmp_path, """
class Counts(torch.nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += self.training
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls, "by": torch.full((2,), float(self.calls))}

    def set_extra_state(self, state):
        self.calls = int(state["by"].sum()) // 2


accelerator = Accelerator(project_dir=folder)
model = torch.nn.Sequential(Counts(16, 16), linear())
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
step(model, optimizer)
step(model, optimizer)
accelerator.save_state(folder / "state")
step(model, optimizer)
accelerator.load_state(folder / "state")
assert accelerator.unwrap_model(model)[0].calls == 2
""", config)  # fmt: skip


@pytest.mark.parametrize("config", ["ddp_fp32", "fsdp_bf16"])
def test_a_weight_s_own_name_is_kept(tmp_path, config):
    """A model may have a layer called `module`, as DDP has."""
    run(tmp_path, """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.module, self.head = linear(), linear()

    def forward(self, x):
        return self.head(self.module(x))


accelerator = Accelerator(project_dir=folder)
model = Net()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
step(model, optimizer)
accelerator.save_state()
accelerator.load_state()
accelerator.save_model(model, folder / "model")
accelerator.end_training()
""", config=config)  # fmt: skip
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert sorted(saved) == ["head.bias", "head.weight", "module.bias", "module.weight"]


@pytest.fixture(scope="module")
def accelerates(tmp_path_factory):
    """A checkpoint that Accelerate's own class wrote."""
    folder = tmp_path_factory.mktemp("accelerates") / "checkpoint-3"
    if (pid := os.fork()) == 0:
        from accelerate.accelerator import Accelerator

        accelerator = Accelerator()
        model = torch.nn.Linear(16, 16)
        torch.nn.init.constant_(model.weight, 0.5)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.save_state(folder)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return folder


@pytest.mark.parametrize("config", ["single_fp8_msamp_o2", "ddp_fp32", "fsdp_bf16", "zero2_bf16"])
def test_the_weights_of_accelerate_s_own_checkpoint_are_loaded(tmp_path, accelerates, config):
    """What is a pickle is named and not read."""
    refused = config == "zero2_bf16"
    log = run(tmp_path, f"""
accelerator = Accelerator(project_dir=folder)
model = linear()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
accelerator.load_state({str(accelerates)!r})
weights = accelerator.get_state_dict(model)
assert not accelerator.is_main_process or weights["weight"].eq(0.5).all()
step(model, optimizer)
accelerator.end_training()
""", config=config, code=2 * refused)  # fmt: skip
    assert "optimizer.bin, random_states_0.pkl" in log or refused
    assert ("loads whole weights only before" in log) is refused and "Traceback" not in log


# ---- gradients that are not finite ----


@pytest.mark.parametrize("config", ["ddp_fp32", "fsdp_bf16", "single_fp8_msamp_o2"])
@pytest.mark.parametrize("clipped", ["both", "part", "before"])
def test_no_gradient_that_is_not_finite_reaches_the_weights(tmp_path, config, clipped):
    """Whatever is clipped: two models one after the other, a part of a model, or gradients that change afterwards."""
    log = run(tmp_path, f"""
accelerator = Accelerator(project_dir=folder)
g, d = (torch.nn.Sequential(linear(), torch.nn.LayerNorm(16), linear()) for _ in "gd")
opt_g, opt_d = (torch.optim.AdamW(one.parameters(), 0.1) for one in (g, d))
g, d, opt_g, opt_d = accelerator.prepare(g, d, opt_g, opt_d)
norms = [[p for n, p in one.named_parameters() if "1." in n] for one in (g, d)]  # in no config coded or in FP8
accelerator.backward(g(torch.randn(4, 16)).square().mean())
accelerator.backward(d(torch.randn(4, 16)).square().mean())
clipped = {clipped!r}
if clipped == "before":
    accelerator.clip_grad_norm_(g.parameters(), 1.0)
norms[0][0].grad.mul_(float("nan"))
if clipped == "both":
    accelerator.clip_grad_norm_(g.parameters(), 1.0)
    accelerator.clip_grad_norm_(d.parameters(), 1.0)
elif clipped == "part":
    accelerator.clip_grad_norm_(norms[0][1:], 1.0)
try:
    opt_g.step()
finally:
    finite = [bool(getattr(p, "_local_tensor", p).isfinite().all()) for p in norms[0]]
    accelerator.print("finite weights:", finite)
""", config=config, code=1)  # fmt: skip
    assert "finite weights: [True, True]" in log and "gradient norm nan is not finite; nothing was updated" in log


@pytest.mark.parametrize("config", ["single_fp32", "single_fp8_msamp_o2", "fsdp_bf16"])
def test_a_step_that_the_script_leaves_out_is_its_own(tmp_path, config):
    log = run(tmp_path, """
accelerator = Accelerator(project_dir=folder)
model = torch.nn.Sequential(linear(), torch.nn.LayerNorm(16), linear())
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
for scale in (1.0, float("inf"), 1.0):
    accelerator.backward(model(torch.randn(4, 16)).square().mean() * scale)
    if accelerator.clip_grad_norm_(model.parameters(), 1.0).isfinite():
        optimizer.step()
    optimizer.zero_grad()
accelerator.print("steps", accelerator.steps.taken, "loss", accelerator.steps.loss)
""", config=config)  # fmt: skip
    assert re.search(r"steps 2 loss \d", log)


def test_gradients_of_an_embedding_may_be_sparse(tmp_path):
    run(tmp_path, """
accelerator = Accelerator(project_dir=folder)
model = torch.nn.Embedding(8, 4, sparse=True)
model, optimizer = accelerator.prepare(model, torch.optim.SparseAdam(model.parameters(), 0.1))
accelerator.backward(model(torch.arange(4)).square().mean())
optimizer.step()
accelerator.end_training()
""")  # fmt: skip
    assert record(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize("config", ["single_bf16", "ddp_fp32"])
def test_a_loss_may_have_one_element_and_a_dimension(tmp_path, config):
    run(tmp_path, """
accelerator = Accelerator(project_dir=folder)
model = linear()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
for number in range(40):
    accelerator.backward(model(torch.randn(4, 16)).square().mean().view(1) + 1)
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
""", config=config)  # fmt: skip
    curve = record(tmp_path / "run")["seen"]["loss_curve"]
    assert len(curve) > 1 and all(1 < loss < 10 for _, loss in curve)


# ---- parameters that are not trained ----

ADAPTER = """
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = linear().to(torch.bfloat16).requires_grad_(False)
        self.down, self.up = linear(16, 4), linear(4, 16)

    def forward(self, x):  # casts as peft does
        return self.base(x.to(self.base.weight.dtype)) + self.up(self.down(x.to(self.down.weight.dtype)))


accelerator = Accelerator(project_dir=folder)
model = torch.nn.Sequential(Layer(), Layer(), linear())
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1)
model, optimizer = accelerator.prepare(model, optimizer)
base = {name: weight.clone() for name, weight in accelerator.get_state_dict(model).items() if "base" in name}
for number in range(2):
    accelerator.backward(model(torch.randn(4, 16)).float().square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
accelerator.load_state(accelerator.save_state())
after = accelerator.get_state_dict(model)
assert all(after[name].equal(weight) for name, weight in base.items()) and (base or not accelerator.is_main_process)
accelerator.end_training()
"""


@pytest.mark.parametrize("config", ["ddp_bf16", "fsdp_bf16", "zero2_bf16", "single_fp8_msamp_o2", "fsdp_fp8_msamp_o2"])
def test_frozen_parameters_may_be_in_16_bit(tmp_path, config):
    """As a large model with adapters has them, which are trained in fp32."""
    run(tmp_path, ADAPTER, config=config)
    made = record(tmp_path / "run")
    assert made["status"] == "finished" and made["evidence"]["optimizer_owns_all"]


# ---- freed memory ----


@pytest.mark.parametrize("config", ["ddp_bf16", "fsdp_bf16", "single_fp8", "single_fp8_msamp_o2", "zero2_bf16"])
def test_after_free_memory_the_run_goes_on_and_old_models_are_gone(tmp_path, config):
    """The next training may accumulate over other steps."""
    run(tmp_path, """
import gc, time, weakref
accelerator, old = Accelerator(project_dir=folder), []
for fold in range(3):
    model = torch.nn.Sequential(linear(), linear(), linear())
    old.append(weakref.ref(model))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
    accelerator.gradient_accumulation_steps = fold + 1
    for number in range(2 * fold + 2):
        with accelerator.accumulate([model]):  # as some scripts have it
            accelerator.backward(model(torch.randn(4, 16)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.steps.taken == 2 * fold + 2
    saved = accelerator.save_state()
    accelerator.load_state(saved)
    model, optimizer = accelerator.free_memory(model, optimizer)
    end = time.monotonic() + 30
    while any(one() is not None for one in old) and time.monotonic() < end:
        time.sleep(0.1)  # the thread that looks for deadlocks may hold a frame until it looks again
        gc.collect()
    accelerator.print("alive:", [one() is not None for one in old])
    assert not any(one() is not None for one in old), gc.get_referrers(old[0]() or old[-1]())
accelerator.end_training()
""", config=config)  # fmt: skip
    made = record(tmp_path / "run")
    assert made["status"] == "finished" and len(made["evidence_of_other_models"]) == 2
    assert made["evidence"]["optimizer_owns_all"] and len(made["seen"]["loss_curve"]) > 1
    assert made["seen"]["samples_per_step"] == 12 * made["plan"]["num_processes"]


TRAININGS = """
import gc, json, tempfile, time, weakref


def train(ends):
    global accelerator
    accelerator = Accelerator(project_dir=tempfile.mkdtemp(dir=folder.parent))
    model = torch.nn.Sequential(linear(), linear())
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(torch.randn(8, 16), 2)
    )
    for _ in range(2):
        step(model, optimizer)
    if ends:
        accelerator.end_training()
    refs = [weakref.ref(one) for one in (accelerator, accelerator.unwrap_model(model), optimizer.optimizer, loader)]
    accelerator = None
    return refs


old = []
for number in range(3):
    old += train(ends=number == 1 and not torch.distributed.is_initialized())  # it would end the process group
    gc.collect()
end = time.monotonic() + 30
while any(one() is not None for one in old) and time.monotonic() < end:
    time.sleep(0.1)  # the thread that looks for deadlocks may hold a frame until it looks again
    gc.collect()  # DeepSpeed's engine, which the Accelerator held
print("alive:", [type(one()).__name__ for one in old if one() is not None], flush=True)
"""


@pytest.mark.parametrize(
    "config", ["single_fp32", "single_fp8_msamp_o2", "ddp_fp8_msamp_o2", "ddp_bf16", "fsdp_bf16", "zero2_bf16"]
)
def test_a_training_that_the_script_has_dropped_is_freed_and_its_record_closed(tmp_path, config):
    log = run(tmp_path, TRAININGS, config=config)
    assert set(re.findall("alive: .*", log)) == {"alive: []"}, log
    made = [record(file.parent) for file in tmp_path.glob("*/run.json")]
    assert [one["status"] for one in made] == ["finished"] * 3
    assert all(one["evidence"]["measured"] and len(one["seen"]["loss_curve"]) == 2 and one["finished"] for one in made)


def test_the_record_of_a_dropped_training_says_how_the_script_failed(tmp_path):
    run(tmp_path, TRAININGS + "raise ValueError('later')", code=1)
    made = [record(file.parent) for file in tmp_path.glob("*/run.json")]
    assert sorted(one["status"] for one in made) == ["failed", "failed", "finished"]  # one of them had ended
