"""What faithful changes in other packages stands in one table, lasts for a run, and is undone."""

import functools
import importlib
import os
import signal
import subprocess
import sys
import types

import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT, train

import faithful
from faithful import Refused, __main__ as door, ending, patches
from faithful.launch import machine

PACKAGES = ("accelerate", "torch", "transformers", "deepspeed", "diffusers", "datasets", "torchao", "timm")


def replaced():
    """The names of functions and methods of other packages in whose place a function of faithful stands."""
    found = set()
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] in PACKAGES and isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                found |= {f"{module_name}.{name}"} if is_ours(value) else set()
                if isinstance(value, type) and value.__module__ == module_name:
                    methods = [f"{module_name}.{name}.{key}" for key, one in vars(value).items() if is_ours(one)]
                    found |= set(methods)
    return {name for name in found if not name.endswith(".Accelerator")}  # it stays while the script runs


def is_ours(value):
    if isinstance(value, functools.partial):
        return is_ours(value.func)
    if isinstance(value, types.FunctionType) and any(is_ours(cell) for cell in map(contents, value.__closure__ or ())):
        return True
    if isinstance(value, types.FunctionType):  # functools.wraps keeps the name of the module of the original
        return value.__globals__.get("__name__", "").split(".")[0] == "faithful"
    return callable(value) and str(getattr(value, "__module__", "")).split(".")[0] == "faithful"


def contents(cell):
    try:
        return cell.cell_contents if isinstance(cell.cell_contents, functools.partial) else None
    except ValueError:  # an empty cell
        return None


def process():
    """What a program might set for its process."""
    return {
        "environment": dict(os.environ),
        "excepthook": sys.excepthook,
        "exit": sys.exit,
        "handlers": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
    }


def test_importing_changes_nothing():
    code = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tests/own_scripts")!r}]
import signal, accelerate, torch
signal.signal(signal.SIGTERM, lambda *_: None)
from test_patches import process, replaced
before = process()
from faithful import Accelerator
assert process() == before, process()
assert not replaced(), replaced()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def one_step(*modules):
    """What a rank runs, after it has imported these modules: it prints what stands replaced in a run and after it."""
    for name in modules:
        importlib.import_module(name)
    accelerator = Accelerator(project_dir=sys.argv[2])
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(4, 16)).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    accelerator.print("changed:", *sorted(replaced()))
    accelerator.end_training()
    accelerator.print("left:", *sorted(replaced()))


@pytest.mark.parametrize(
    ("config", "modules", "expected"),
    [
        ("ddp_fp8_msamp_o3", [], {"torch.nn.utils.clip_grad.clip_grad_norm_", "accelerate.optimizer.is_lomo_available",
                                  "accelerate.state.PartialState._prepare_backend"}),
        pytest.param("zero2_bf16", ["transformers.integrations.deepspeed"],
                     {"transformers.integrations.deepspeed.HfTrainerDeepSpeedConfig.fill_match"},
                     marks=pytest.mark.slow),
        ("fsdp_bf16", ["torch.optim.swa_utils"],
         {"torch.optim.swa_utils.AveragedModel.update_parameters"}),
    ],
)  # fmt: skip
def test_every_change_is_undone_at_the_end(tmp_path, config, modules, expected):
    train(
        config,
        tmp_path / "run",
        script=functools.partial(one_step, *modules),
        before=lambda rank: door.take_its_place(),
    )
    log = (tmp_path / "run.log").read_text()
    changed, left = (part.splitlines()[0].split() for part in log.split("changed:")[1].split("left:"))
    for_good = {"save", "save_file", "safe_save_file"}  # a sharded model outlives its training
    assert expected <= set(changed) and for_good.issuperset(name.rpartition(".")[2] for name in left)
    assert bool(left) == config.startswith("fsdp")


def refused_then_one_step():
    """What a rank runs: a refused Accelerator leaves nothing, and after one that trains all is undone."""
    global Accelerator
    Accelerator, clean = faithful.Accelerator, process()["environment"]
    before, imported = list(patches.undos), replaced()  # what the import has changed, see faithful/scripts/trainer.py
    for arguments in ({"mixed_precision": "fp16"}, {"dynamo_backend": "inductor"}, {"no": "such argument"}):
        with pytest.raises((Refused, TypeError)):
            faithful.Accelerator(project_dir=sys.argv[2], **arguments)
        assert process()["environment"] == clean and replaced() == imported
        assert not patches.users and patches.undos == before
    with pytest.MonkeyPatch.context() as patch:  # the last line of the launch fails
        patch.setattr(faithful.Accelerator, "note", property(lambda self: 1 / 0))
        patch.setattr(machine, "CLEAR_REFS", machine.Path("/"))
        with pytest.raises(ZeroDivisionError):
            faithful.Accelerator(project_dir=sys.argv[2])
    assert replaced() == imported and not patches.users and patches.undos == before and not ending.made
    one_step()


def test_a_refused_accelerator_changes_nothing(tmp_path):
    train("single_fp8_msamp_o2", tmp_path / "run", script=refused_then_one_step)
    assert (tmp_path / "run.log").read_text().rstrip().endswith("left:")


def test_a_change_outside_the_table_is_an_error():
    with pytest.raises(KeyError):
        patches.replace("torch:hub", None)
    assert torch.hub is not None and all(patches.TABLE.values())
