"""How the code is laid out: what a strategy or a backend may define."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from types import SimpleNamespace

import pytest
from conftest import ROOT
from safetensors.torch import load_file

from faithful.backends import BACKENDS, imported
from faithful.backends.base import Backend
from faithful.backends.emulation import Emulated
from faithful.config import fp8, strategies as asked
from faithful.strategies import STRATEGIES
from faithful.strategies.base import Strategy
from faithful.training.clipping import GradientsElsewhere

PLAN = SimpleNamespace(strategy="fsdp", precision="fp8", level="o2", fp8_options={}, device="cpu", tp_size=1)
INTERFACES = (Strategy, Backend, GradientsElsewhere)
OWN = {  # public names that only a subclass has, and why
    "initialize": "MSAMP: what `convert` or, under FSDP2, `after_prepare` calls",
    "fully_sharded": "MSAMP: of the plan",
    "by_accelerate": "TorchAO: of the plan",
    "handlers": "TorchAO: what `arguments` hands to Accelerate, which `convert` completes",
    "engine": "ZeRO: of the prepared model",
    "gathered_in_fp8": "TorchAO: of the plan",
    "tf32_before": "Torch: what `started` needs of the time before",
}


def subclasses(base):
    return [found for cls in base.__subclasses__() for found in (cls, *subclasses(cls))]


def unknown(cls):
    """The public names that a class defines or its objects have, and that are not of its interface."""
    interface = {"plan"}.union(*(dir(base) for base in cls.__mro__ if base in INTERFACES))
    return {name for name in vars(cls) | vars(cls(PLAN)) if not name.startswith("_")} - interface


def test_no_name_of_a_strategy_or_backend_is_misspelt():
    """A misspelt method would be ignored: the run would call the base's."""
    named = {*map(imported, [*STRATEGIES.values(), *BACKENDS.values()]), Emulated}
    classes = {cls for cls in subclasses(Strategy) + subclasses(Backend) if cls.__module__.startswith("faithful.")}
    assert classes >= named
    assert set().union(*map(unknown, classes)) == OWN.keys()


def test_what_is_asked_before_torch_agrees_with_what_runs():
    """config/ and strategies/, backends/ have a class each for one name."""
    assert [*asked.STRATEGIES] == [*STRATEGIES] and {*fp8.BACKENDS, None} == {*BACKENDS}
    for name, rules in asked.STRATEGIES.items():
        strategy = imported(STRATEGIES[name])
        assert (rules.name, rules.replicates) == (name, strategy.replicates), name
        assert strategy.fully_shards is isinstance(rules, asked.FSDPRules), name
    assert all(rules.name == name for name, rules in fp8.BACKENDS.items())


def test_a_misspelt_name_is_found():
    class Misspelt(imported(STRATEGIES["zero2"])):
        replicate = True

        def __init__(self, plan):
            super().__init__(plan)
            self.shardedkinds = ()

        def norm_off(self, optimizer):
            return 0

        def clip_grad_norm_(self, accelerator, parameters, max_norm, norm_type):
            return 0

    assert unknown(Misspelt) == {"replicate", "shardedkinds", "norm_off"}


ROOMS = """patches errors disk tensors config launch models checkpoint plan strategies backends evidence training
           saving scripts arguments ending accelerator __main__""".split()  # each may import those before it


def imports(file, types=False):
    """The dotted names that a file imports of faithful, also inside functions. types: those for annotations alone too."""
    tree = ast.parse(file.read_text())
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    annotations = set() if types else {id(node) for block in typing for node in ast.walk(block)}
    for node in [node for node in ast.walk(tree) if id(node) not in annotations]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "faithful":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("faithful."))


def upward(files):
    """`file imports name` for each import of a room above the file's own, or of a name that has no room."""
    for file in files:
        room = file.relative_to(ROOT / "faithful").with_suffix("").parts[0]
        for name in imports(file):
            wanted = name.split(".")[1]
            if room != "__init__" and ROOMS.index(wanted) > ROOMS.index(room):
                yield f"{file.relative_to(ROOT)} imports {name}"


def test_a_room_imports_only_rooms_below_it():
    files = sorted((ROOT / "faithful").rglob("*.py"))
    assert {file.relative_to(ROOT / "faithful").with_suffix("").parts[0] for file in files} == {*ROOMS, "__init__"}
    assert not list(upward(files))
    # `from faithful import Accelerator, Refused` is for scripts, not for the package itself
    assert not [file for file in files for name in imports(file) if name.split(".")[1] not in ROOMS]


def test_an_upward_import_is_found(tmp_path, monkeypatch):
    file = tmp_path / "faithful" / "models" / "new.py"
    file.parent.mkdir(parents=True)
    file.write_text("def f():\n    from faithful.training import steps\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert list(upward([file])) == ["faithful/models/new.py imports faithful.training.steps"]


# Files that import each other, imports for types and those inside functions too. A list may only get shorter.
CIRCLES: list[str] = []


def circles(package):
    """The sets of files of a package, named as in CIRCLES, that reach each other by their imports."""
    files = {str(file.relative_to(package).with_suffix("")).removesuffix("/__init__"): file
             for file in package.rglob("*.py")}  # fmt: skip
    reached = {name: set() for name in files}
    for name, file in files.items():
        for parts in (dotted.split(".")[1:] for dotted in imports(file, types=True)):
            whole = (n for n in range(len(parts), 0, -1) if "/".join(parts[:n]) in files)
            reached[name] |= {"/".join(parts[: next(whole)])} - {name} if parts[0] in ROOMS else set()
    for via in files:
        for name in files:
            if via in reached[name]:
                reached[name] |= reached[via]
    return {frozenset(b for b in reached[a] if a in reached[b]) for a in files} - {frozenset()}


def test_no_more_files_import_each_other():
    assert circles(ROOT / "faithful") == {frozenset(names.split()) for names in CIRCLES}


def test_a_circle_of_types_is_found(tmp_path):
    (tmp_path / "a.py").write_text("if TYPE_CHECKING:\n    from faithful.errors import B\n")
    (tmp_path / "errors.py").write_text("def f():\n    from faithful.plan import A\n")
    (tmp_path / "plan.py").write_text("from faithful import errors\n")
    assert circles(tmp_path) == {frozenset({"errors", "plan"})}


SEES_ALL = {"training/clipping.py instead_of_torch": "torch's functions call its methods"}


def test_a_function_takes_what_it_needs_and_not_the_whole_accelerator():
    found = set()
    for file in (ROOT / "faithful").rglob("*.py"):
        name = str(file.relative_to(ROOT / "faithful"))
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                annotated = " ".join(ast.unparse(each.annotation) for each in given if each.annotation)
                if "Accelerator" in annotated or "accelerator" in [each.arg for each in given]:
                    found.add(f"{name} {node.name}")
    assert found == SEES_ALL.keys()


def test_rooms_are_small_and_say_what_they_hold():
    for init in (ROOT / "faithful").rglob("*/__init__.py"):
        assert len(list(init.parent.glob("[!_]*.py"))) <= 8, init.parent
        assert len(ast.get_docstring(ast.parse(init.read_text())) or "") > 60, init


# {room: lines that its Python files may have}. A number may only go down, or up with the reason beside it.
LINES = {
    "faithful/*.py": 1900,  # scales of fp16; what the others do with the main process where it saves alone; groups of processes that share a batch
    "faithful/backends": 1550,  # FP8 of split layers
    "faithful/checkpoint": 1100,  # cuts of two dimensions
    "faithful/config": 1850,  # rules of zero3_sp
    "faithful/disk": 700,
    "faithful/evidence": 900,
    "faithful/launch": 1950,  # processes that follow the main one; that use different parts of a model; a refusal that a script catches
    "faithful/models": 1050,  # torch.save of shards, to one file, too; hooks that a copy of a model does not have
    "faithful/saving": 1150,  # whole weights for every strategy, under the names of a model's own state_dict
    "faithful/scripts": 250,  # a Trainer's resume under tp; which scripts save on the main process alone
    "faithful/strategies": 3500,  # gradients between micro-batches; right words for what libraries of others do; optimizers that step in a backward pass
    "faithful/tensors": 500,  # states of optimizers of others; random states, which samplers draw from, too
    "faithful/training": 1200,  # states that were saved whole; averages that are prepared; the same random numbers; which samples loaders give; fp16's scale, of several optimizers
    "amp8": 4950,  # gradients rounded several at once; two forward passes of compiled code; a weight that is plain again is refused in one line
    "tools": 6600,
    "shared": 2450,
    "benchmarks": 4750,
    "tests": 36600,  # gradients that wait to be rounded, or for the next micro-batch; saves and averages of image trainers; what scripts do in fp16 and under ZeRO-2, a row each
    "recipes": 1150,  # embed.py, dpo.py
}
SPARE = 100  # more than this under a number, and the number is to be lowered


def lines_of(room):
    files = ROOT.glob(room if room.endswith(".py") else f"{room}/**/*.py")
    return sum(len(file.read_text().splitlines()) for file in files)


def test_rooms_only_get_smaller():
    rooms = {f"faithful/{init.parent.name}" for init in (ROOT / "faithful").glob("*/__init__.py")}
    assert rooms == {room for room in LINES if "faithful/" in room} - {"faithful/*.py"}
    wrong = {room: lines_of(room) for room in LINES if not 0 <= LINES[room] - lines_of(room) <= SPARE}
    assert not wrong, f"write these numbers, rounded up to 50, into LINES, a larger one with its reason: {wrong}"


def words_of(file):
    """The comments and docstrings of a file."""
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""')):
            yield token.string


OTHER_FILES = (
    r"train\.py|version\.py|(pytorch|prototype|commands|utils|triton)/.*"  # files of other packages, and a script
)


def test_a_file_that_a_comment_names_is_there():
    there = "".join(
        f"/{file.relative_to(ROOT)} " for room in LINES for file in ROOT.glob(f"{room.split('/')[0]}/**/*.py")
    )
    for file in (ROOT / "faithful").rglob("*.py"):
        named = {name for text in words_of(file) for name in re.findall(r"(?<![\w./])[\w/]+\.py\b", text)}
        assert not {n for n in named if f"/{n} " not in there and not re.fullmatch(OTHER_FILES, n)}, file


def asserts(folder):
    """Yields (file:line, names of the functions that it calls) of each assert in a folder's code."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Assert):
                called = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
                yield f"{file.relative_to(ROOT)}:{node.lineno}", called


# What makes, moves and deletes: functions of modules, and methods of paths. tempfile's do with `dir` alone: else what
# they make is in no folder of a run.
MOVES = {"mkdir", "makedirs", "rename", "renames", "replace", "unlink", "remove", "rmdir", "removedirs", "link"}
MOVES |= {"symlink", "rmtree", "move", "copytree", "mkdtemp", "TemporaryDirectory"}
OF_PATHS = {"mkdir", "rename", "replace", "unlink", "rmdir", "symlink_to", "hardlink_to", "touch"}
OWNERS = ("faithful/checkpoint/run_folder.py", "faithful/checkpoint/checkpoints.py", "faithful/disk/", "tools/cli.py")
OTHERS = {
    "shared/data.py describe": "the folder of a run under Accelerate alone",
    "shared/data.py write": "a file of such a run, in one step: shared/ does without faithful/",
    "shared/sft.py merge": "the index of a model whose parts are about to be written",
    "tools/compare.py execute": "a run of an earlier comparison is renamed, when none is writing there",
    "tools/diagnose.py main": "what the script has written in a folder that was not there before",
}


def moves(file):
    """Yields the name of the function in which it stands for each call that makes, moves or deletes files or folders."""
    tree, imported = ast.parse(file.read_text()), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            imported |= {(name.asname or name.name): module + name.name for name in node.names}
    calls = [(node, "") for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        calls += [(node, function.name) for node in ast.walk(function) if isinstance(node, ast.Call)]
    for call, where in {call: where for call, where in calls}.items():
        head, _, rest = ast.unparse(call.func).partition(".")
        module, _, name = f"{imported.get(head, head)}.{rest}".rstrip(".").rpartition(".")
        of = getattr(call.func, "value", None)  # None: a name
        of_path = of and not (isinstance(of, ast.Name) and of.id in imported) and name in OF_PATHS
        text = name == "replace" and len(call.args) + len(call.keywords) != 1  # of a string
        in_place = module == "tempfile" and any(word.arg == "dir" for word in call.keywords)
        if ((module in ("os", "shutil") or in_place) and name in MOVES) or (of_path and not text):
            yield where


def test_a_folder_of_a_run_has_one_owner():
    """Nothing else makes, renames, replaces or deletes there, so that one place decides what is a run's own."""
    found = set()
    for room in ("faithful", "recipes", "shared", "tools"):
        for file in sorted((ROOT / room).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            found |= {f"{name} {where}" for where in moves(file) if not name.startswith(OWNERS)}
    assert found == OTHERS.keys()


@pytest.mark.parametrize(
    "line",
    ["import shutil as s; s.rmtree(x)", "from os import replace as r; r(x, y)", "os.path.join(x).replace(y)",
     "x.replace(target=y)", "(x / y).unlink()", "os.makedirs(x)", "import tempfile; tempfile.mkdtemp(dir=x)"],
)  # fmt: skip
def test_a_call_that_moves_is_found(tmp_path, line):
    file = tmp_path / "new.py"
    file.write_text(f"import os\ndef f():\n    {line}\n    'x'.replace('a', 'b')\n")
    assert list(moves(file)) == ["f"]


def test_no_code_depends_on_an_assert():
    """`python -O` drops asserts: what one does or refuses would not be done. Recipes may check a length with one."""
    assert [
        where for folder in ("faithful", "amp8", "shared", "tools", "cluster") for where, _ in asserts(folder)
    ] == []
    assert [(where, called) for where, called in asserts("recipes") if called != {"len"}] == []


SAVES = """
import torch
from pathlib import Path
from faithful.checkpoint import weight_files
pieces = {name: (torch.zeros(4), lambda number=number: torch.full((4,), float(number))) for number, name in enumerate("abc", 1)}
weight_files.stream_weights(pieces, Path(folder), 20, main=True)
"""


def test_python_without_asserts_saves_a_model(tmp_path):
    code = f"folder = {str(tmp_path / 'model')!r}\n{SAVES}"
    done = subprocess.run([sys.executable, "-O", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    tensors = [load_file(file) for file in sorted((tmp_path / "model").glob("*.safetensors"))]
    assert [name for held in tensors for name in held] == ["a", "b", "c"]
    assert [tensor.tolist() for held in tensors for tensor in held.values()] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]


def test_a_backend_without_its_methods_is_not_made():
    class Nameless(Backend):
        pass

    class Unclipped(GradientsElsewhere, imported(STRATEGIES["ddp"])):
        pass

    for cls, missing in ((Nameless, "name"), (Unclipped, "clip_grad_norm_")):
        with pytest.raises(TypeError, match=f"abstract method.* '?{missing}"):
            cls(PLAN)
