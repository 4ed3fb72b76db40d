"""No argument of Accelerate's own methods is ignored in silence."""

import ast
import inspect
import textwrap
from types import SimpleNamespace

import accelerate
import accelerate.optimizer
import pytest
import torch
from conftest import train

from faithful import Accelerator, Refused, arguments
from faithful.training.optimizer import Optimizer

PAIRS = [(Accelerator, accelerate.Accelerator), (Optimizer, accelerate.optimizer.AcceleratedOptimizer)]
METHODS = [
    (ours, theirs, name)
    for ours, theirs in PAIRS
    for name, method in vars(ours).items()
    if inspect.isfunction(method) and name in vars(theirs)
]
# (method, an argument, a value) that has nothing to do in this class, and how it ends: a note, or None for a refusal.
ROWS = [
    ("save_state", {"safe_serialization": False}, "never a pickle"),
    ("save_state", {"client_state": {"epoch": 1}}, None),
    ("save_state", {"tag": "best"}, None),
    ("load_state", {"load_kwargs": {"weights_only": False}}, "nothing is unpickled"),
    ("load_state", {"map_location": "cpu"}, "on their device"),
    ("load_state", {"strict": False}, "refused if its names"),
    ("load_state", {"load_optimizer_states": False}, None),
    ("load_state", {"load_module_only": True}, None),
]


def original(method):
    """The method in its decorators, those of Accelerate's that do not name it, too."""
    method = inspect.unwrap(method)
    held = [cell.cell_contents for cell in method.__closure__ or ()]
    return next((inner for inner in held if inspect.isfunction(inner)), method)


@pytest.mark.parametrize(("ours", "theirs", "name"), METHODS, ids=lambda value: getattr(value, "__name__", value))
def test_every_argument_is_taken_and_used(ours, theirs, name):
    """A method takes what Accelerate's takes, in that order, and its code reads every argument."""
    method = original(vars(ours)[name])
    mine = list(inspect.signature(method).parameters.values())
    wanted = list(inspect.signature(original(vars(theirs)[name])).parameters.values())
    anything = {parameter.kind for parameter in mine} >= {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }
    for own, other in zip(mine, wanted, strict=False) if not anything else ():
        assert own.name == other.name or own.kind == other.kind == inspect.Parameter.VAR_KEYWORD
        assert own.default == other.default
    assert anything or len(mine) == len(wanted)
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert {parameter.name for parameter in mine} - {"self"} <= read


def give_arguments():
    """What a rank runs: each argument twice, with one note."""
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model := torch.nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(2, 2)).sum())
    optimizer.step()
    folder = accelerator.save_state(safe_serialization=True)
    accelerator.load_state(folder, load_kwargs={}, strict=True, map_location=None)
    assert not accelerator.record.notes
    for name, given, said in ROWS:
        before, arguments = len(accelerator.record.notes), {"load_state": [folder]}.get(name, [])
        if said is None:
            with pytest.raises(Refused, match=f"{name}.{next(iter(given))}=.*has no effect here, leave it out"):
                getattr(accelerator, name)(*arguments, **given)
            continue
        for _ in range(2):
            getattr(accelerator, name)(*arguments, **given)
        [note] = accelerator.record.notes[before:]
        assert note.startswith(f"{name}({next(iter(given))}=") and said in note
    accelerator.end_training()


def test_an_argument_without_an_effect_is_noted_or_refused(tmp_path):
    train("single_fp32", tmp_path / "run", script=give_arguments)


@pytest.mark.parametrize(
    ("said", "agrees"),
    [({}, True), ({"zero_stage": 2}, True), ({"zero_stage": 3}, False), ({"gradient_clipping": 1.0}, False),
     ({"gradient_accumulation_steps": 4}, False), ({"offload_optimizer_device": "cpu"}, False)],
)  # fmt: skip
def test_a_plugin_of_the_script_is_left_out_only_if_it_says_what_the_config_says(monkeypatch, said, agrees):
    pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    plugin = accelerate.utils.DeepSpeedPlugin(**said)
    plugin.set_mixed_precision("bf16")  # as TrainingArguments do
    assert arguments.as_planned(SimpleNamespace(strategy="zero2", compile=False), plugin) is agrees
