"""Finds configs and recipes by name, and suggests one for a mistyped name. Imports no torch, so it is quick."""

import ast
import difflib
import importlib.util
import os
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

ROOT = Path(__file__).resolve().parents[1]
CLONE = (ROOT / "launch.sh").is_file()  # else pip installed this, and nothing is written here
COMMAND = "./launch.sh" if CLONE else "accelerate-recipes"
RUNS = (ROOT if CLONE else Path()) / "runs"
sys.path.insert(0, str(ROOT))
from faithful.config.strategies import STRATEGIES  # noqa: E402
from shared import args  # noqa: E402

FOLDERS = {"config": (ROOT / "accelerate_configs", ".yml"), "recipe": (ROOT / "recipes", ".py")}
GROUPS: dict[str, str] = {}  # {first word of a name: title}
for rules in STRATEGIES.values():
    GROUPS.setdefault(rules.family, rules.title)
PROMPTS = {"gpt": "The ", "sft": "QUESTION", "dpo": "QUESTION", "bert": "TEXT", "embed": "TEXT"}  # recipes of texts
PRECISIONS = ("fp32", "fp16", "bf16", "fp8")


def names(kind: str) -> list[str]:
    folder, suffix = FOLDERS[kind]
    return sorted(path.stem for path in folder.glob(f"*{suffix}"))


def suggestion(name: str, *kinds: str) -> str:
    """The advice for a name that does not exist: the closest name, or where to look."""
    stem = Path(name).stem.lower().replace("-", "_")
    if closest := difflib.get_close_matches(stem, [known for kind in kinds for known in names(kind)], n=1):
        return f"did you mean {closest[0]}?"
    other = "config" if "recipe" in kinds else "recipe"
    return f"{stem} is a {other}: {COMMAND} CONFIG RECIPE" if stem in names(other) else f"{COMMAND} ls lists them"


def file_of(name: str | Path, kind: str) -> Path:
    """The file of a config or recipe: a path, or a name with or without its suffix."""
    name, (folder, suffix) = str(name), FOLDERS[kind]
    for file in (Path(name), folder / f"{name.removesuffix(suffix)}{suffix}"):
        if file.is_file():
            return file
    here = f"no file {name} in {os.getcwd()}, and " if Path(name).suffix or "/" in name else ""
    raise args.Refused(f"{here}no {kind} {name}: {suggestion(name, kind)}")


def config(name: str | Path) -> Path:
    return file_of(name, "config")


def recipe(name: str | Path) -> Path:
    """A recipe, or any script by its path."""
    return file_of(name, "recipe")


def sound_config(name: str | Path) -> tuple[Path, dict[str, Any]]:
    """(file, mapping) of a config. Raises Refused with all problems of the file, one for each line."""
    from faithful.config.config_file import file_problems

    file = config(name)
    lines, mapping = file_problems(file)
    if lines:
        raise args.Refused(*(f"{file.name}: {line}" for line in lines))
    return file, mapping or {}


def description(name: str) -> str:
    """The description in a config's first line, without what the config needs and what its group's title says."""
    line = config(name).read_text().splitlines()[0].removeprefix("# ")
    sentence = line.split(". ")[0].rstrip(".").split("; ")[-1]
    return re.sub(r"^(One device|DistributedDataParallel|FSDP2|DeepSpeed ZeRO-\d)[,:] ", "", sentence)


def listing() -> Iterator[str]:
    """Configs by strategy, each group in the order of PRECISIONS, then recipes; at most 100 columns."""
    for first, title in GROUPS.items():
        group = [name for name in names("config") if name.startswith(first)]
        group.sort(key=order)
        yield from block(title, {name: description(name) for name in group})
    yield from block(
        "Recipes",
        {
            name: (ast.get_docstring(ast.parse(recipe(name).read_text())) or "").splitlines()[0]
            for name in names("recipe")
        },
    )
    page = "docs/configs.md" if CLONE else ROOT / "docs" / "configs.md"
    yield f"{COMMAND} CONFIG RECIPE launches one. {page} says what each config needs."


def order(name: str) -> tuple[str, int, str, bool]:
    """Sort key of a config's name. FP8 that is compiled comes before the same that is not, which is slower."""
    precision = next(word for word in name.split("_") if word in PRECISIONS)
    strategy = name.partition(f"_{precision}")[0]
    same = name.removesuffix("_compile") if precision == "fp8" else name
    return strategy, PRECISIONS.index(precision), same, same == name


def block(title: str, lines: dict[str, str]) -> Iterator[str]:
    yield title
    width = max(map(len, lines)) + 4
    for name, words in lines.items():
        yield textwrap.fill(words, 100, initial_indent=f"  {name}".ljust(width), subsequent_indent=" " * width)
    yield ""


def option(words: list[str], name: str, default: str | None = None) -> str | None:
    """The last value of `--name`, with underscores or dashes, in a command line."""
    value = default
    for word, following in zip(words, [*words[1:], None], strict=False):
        flag, _, inline = word.partition("=")
        if flag.replace("-", "_") == f"--{name}".replace("-", "_"):
            value = inline or following
    return value


def with_file(file: str | Path, words: list[str]) -> list[str]:
    """A recipe's command line, behind the options of the file that its --config names: `option` finds these, too."""
    named = option(words, "config") if is_recipe(file) else None
    return [*args.words_of(named, args.parser_of(arguments_of(file), Quiet)), *words] if named else words


def launch_options() -> dict[str, bool]:
    """{option of `accelerate launch`, with underscores: whether the next word is its value}. The launcher takes
    hyphens, too. They are read from its source, without importing it."""
    # pyrefly: ignore[missing-attribute]
    folder = Path(importlib.util.find_spec("accelerate").submodule_search_locations[0])
    found = {}
    for call in ast.walk(ast.parse((folder / "commands/launch.py").read_text())):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", None) == "add_argument":
            action = next((ast.literal_eval(word.value) for word in call.keywords if word.arg == "action"), "store")
            names = [word.value for word in call.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            takes_value = not action.startswith(("store_", "help"))
            found |= dict.fromkeys([name for name in names if name.startswith("-")], takes_value)
    return found


def flags() -> set[str]:
    """The options of `accelerate launch` without a value: the word after one is the next option, or the recipe."""
    single = [option for option, takes_value in launch_options().items() if not takes_value]
    return {*single, *(f"--{option[2:].replace('_', '-')}" for option in single if option.startswith("--"))}


def is_recipe(file: str | Path) -> bool:
    """Whether a script has the options that all recipes share."""
    return re.search(r"\boptions\.Run\b", Path(file).read_text(errors="replace")) is not None


def arguments_of(file: str | Path) -> type[args.Run]:
    """The dataclass of a recipe's options. Read without importing the recipe, as torch takes seconds."""
    tree = ast.parse(Path(file).read_text())
    kept: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Arguments"]
    if not kept:
        raise args.Refused(f"{file} has no dataclass Arguments, which recipes have: python {file} --help")
    module = types.ModuleType("recipe", ast.get_docstring(tree))
    module.__file__ = str(file)
    module.__dict__.update(dataclass=dataclass, Literal=Literal, options=args)
    sys.modules["recipe"] = module  # dataclasses and inspect look here for its source
    exec(compile(ast.Module(kept, []), file, "exec"), module.__dict__)
    return module.Arguments


class Quiet(args.Parser):
    """Raises Refused for a bad option, where the recipe itself would exit."""

    def error(self, message: str) -> NoReturn:
        raise args.Refused(args.short(args.with_hint(self, message), 2000))


def parse_options(file: str | Path, words: list[str]) -> args.Run:
    """The options of a recipe from a command line, before anything is launched. Raises Refused for a bad one."""
    try:
        cls = arguments_of(file)
        return cls(**args.values_of(args.parser_of(cls, Quiet), words))
    except args.Refused as refused:
        name = os.path.relpath(file)
        raise args.Refused(f"{Path(file).stem}: {refused}; python {name} --help lists the options") from None
