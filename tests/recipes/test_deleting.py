"""Who copies a recipe deletes the options that they do not need: its line, and what reads it in the recipe."""

import ast
import functools
import re
import shutil
import sys

import pytest
from conftest import ROOT, edited, record, train
from test_recipes import couples, preferred, questions, reviews

from shared import args as options
from tools import find

RECIPES = find.names("recipe")
INHERITED = set(options.Run.__annotations__)
BEST = {"load_best_model_at_end", "metric_for_best_model", "greater_is_better"}  # Progress reads them: they go together
KEPT = {"output_dir", "max_steps", "dataset", "sequence_length", "skip_long"}  # with which a training is short


@functools.cache
def own(page):
    """{option: (first line, last line, its default as code)} of the recipe's Arguments, or of Run."""
    [cls] = [node for node in ast.parse(page).body if getattr(node, "name", "") in ("Arguments", "Run")]
    fields = [node for node in cls.body if isinstance(node, ast.AnnAssign)]
    return {node.target.id: (node.lineno, node.end_lineno, ast.unparse(node.value)) for node in fields}


@functools.cache
def without(page, names):
    """The recipe, or shared/args.py, without these options: `args.NAME` is the default instead."""
    lines, fields = page.splitlines(), own(page)
    for name in fields.keys() & names:
        first, last, _ = fields[name]
        lines[first - 1 : last] = [None] * (last - first + 1)
    return "\n".join(line for line in lines if line is not None) + "\n"


def in_place(page, defaults):
    for name, default in defaults.items():
        page = re.sub(rf"\bargs\.{name} = .*\n", "pass\n", page)
        page = re.sub(rf"\bargs\.{name}\b", f"({default})", page)
    return page


def deleted(recipe, names):
    """(the recipe, shared/args.py) of a copy from which these options are deleted."""
    page, base = find.recipe(recipe).read_text(), (ROOT / "shared" / "args.py").read_text()
    defaults = {name: field[2] for part in (page, base) for name, field in own(part).items() if name in names}
    assert defaults.keys() == set(names)
    if names & BEST:
        page = edited(page, ", accelerator, args)\n", ", accelerator)\n")
    return in_place(without(page, frozenset(names)), defaults), without(base, frozenset(names))


def reads(tree):
    """The options that code reads of `args`, of `options` or of their dictionary `values`, where none may be missing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("args", "self.args", "options"):
            yield node.attr
        elif (
            isinstance(node, ast.Subscript)
            and ast.unparse(node.value) == "values"
            and isinstance(node.slice, ast.Constant)
        ):
            yield node.slice.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) == 2:
            yield ast.unparse(node.args[1]).strip("'")


def test_shared_reads_no_option_behind_a_recipe():
    """Its functions take plain values. What is read there of Run is read only where it was asked for: the file that
    --config names, and the steps at which the best model may be found."""
    of_recipes = {name for recipe in RECIPES for name in own(find.recipe(recipe).read_text())}
    found = {}
    for file in (ROOT / "shared").glob("*.py"):
        for name in set(reads(ast.parse(file.read_text()))) & (of_recipes | INHERITED):
            found.setdefault(file.name, set()).add(name)
    assert found == {"data.py": BEST | {"save_steps"}, "args.py": {"config", "eval_steps", "save_steps"}}, found
    planted = "def f(args):\n    return args.dropout + getattr(args, 'freeze') + getattr(args, 'seed', 0)"
    assert set(reads(ast.parse(planted))) == {"dropout", "freeze"}


@functools.cache
def runs(base):
    exec(compile(base, "args.py", "exec"), {"__file__": "args.py"})


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_option_goes_alone(recipe):
    """The copy parses, knows all others, and nothing in the recipe asks for it."""
    fields = own(find.recipe(recipe).read_text())
    for name in fields.keys() | INHERITED:
        page, base = deleted(recipe, {name} if name not in BEST else BEST)
        runs(base)
        assert name not in own(page) | own(base) and len(own(page)) + len(own(base)) < len(fields) + len(INHERITED)
        assert name not in {node.attr for node in ast.walk(ast.parse(page)) if isinstance(node, ast.Attribute)
                            and ast.unparse(node.value) == "args"}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_without_its_options_trains(tmp_path, recipe):
    """All but KEPT are deleted at once, of Run too."""
    mine, names = tmp_path / "mine", (own(find.recipe(recipe).read_text()).keys() | INHERITED) - KEPT
    shutil.copytree(ROOT / "shared", mine / "shared", ignore=shutil.ignore_patterns("__pycache__"))
    (mine / "recipes").mkdir()
    page, base = deleted(recipe, names)
    (mine / "recipes" / f"{recipe}.py").write_text(page)
    (mine / "shared" / "args.py").write_text(base)
    small = {"gpt": lambda _: ROOT / "recipes", "bert": reviews, "embed": couples, "sft": questions, "dpo": preferred}
    words = ("--dataset", small[recipe](tmp_path), "--sequence_length", 80) if recipe in small else ()

    def as_python_finds_them(rank):
        for name in [name for name in sys.modules if name.split(".")[0] == "shared"]:
            del sys.modules[name]
        sys.path.insert(0, str(mine))

    page = mine / "recipes" / f"{recipe}.py"
    run = train("single_fp32", tmp_path / "run", "--max_steps", 1, *words, script=page, before=as_python_finds_them)
    made = record(run)
    assert made["final"]["step"] == 1 and made["args"].keys() <= KEPT
