"""Whether a script saves on the main process alone, as its files show."""

import ast
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

OURS = Path(__file__).parents[1]
UNWRAPS = re.compile(r"\bunwrap_model\(").search
MAIN = re.compile(r"([\w.()]*\.)?(is_(local_)?main_process|(local_)?process_index == 0)").fullmatch


def saves() -> bool:
    """Whether the script, or a module beside it, saves in a block of `if accelerator.is_main_process`."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    return script is not None and any(map(saves_alone, files(Path(script).absolute())))


def files(script: Path) -> Iterator[Path]:
    """The script, and what it has imported from its own folder and from the working directory."""
    yield script
    for module in list(sys.modules.values()):
        file = Path(getattr(module, "__file__", None) or "/")
        in_folder = Path.cwd() in file.parents and "site-packages" not in file.parts
        if (in_folder or script.parent in file.parents) and OURS not in file.parents:
            yield file


def saves_alone(file: Path) -> bool:
    """Whether it calls, in such a block, a method of an accelerator that saves, or a method or function that saves an
    unwrapped model, or what is made with one, and is given no state_dict."""
    try:
        text = file.read_bytes()
        with warnings.catch_warnings(action="ignore"):  # Python has printed those of this file
            tree = ast.parse(text if b"main_process" in text or b"process_index" in text else "")
    except (OSError, SyntaxError, ValueError):
        return False
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and UNWRAPS(ast.unparse(n.value))]
    models = {ast.unparse(target) for node in assigned for target in node.targets}
    blocks = [node.body for node in ast.walk(tree) if isinstance(node, ast.If | ast.FunctionDef) and main_alone(node)]
    inside = (node for block in blocks for line in block for node in ast.walk(line) if isinstance(node, ast.Call))
    return any(saves_model(call, models) for call in inside)


def saves_model(call: ast.Call, models: set[str]) -> bool:
    owner, _, name = ast.unparse(call.func).rpartition(".")
    if name in ("save_state", "save_model", "get_state_dict") or (name == "save" and owner.endswith("accelerator")):
        return True
    given = [ast.unparse(value) for value in (*call.args, *(keyword.value for keyword in call.keywords))]
    of_model = any(text in models or UNWRAPS(text) for text in (owner, *given))
    has_weights = any(keyword.arg == "state_dict" for keyword in call.keywords)
    return of_model and not has_weights and ("save" in name or "state_dict" in name)


def main_alone(node: ast.If | ast.FunctionDef) -> bool:
    """Whether it is an `if`, or a function with Accelerate's decorator, that the main process alone comes into."""
    if isinstance(node, ast.FunctionDef):
        return any(ast.unparse(decorator).endswith("on_main_process") for decorator in node.decorator_list)
    return of_main_alone(node.test)


def of_main_alone(test: ast.expr) -> bool:
    """Whether a condition holds on the main process alone, of a run or of a machine, if not on all under ZeRO."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        others = [each for each in test.values if not of_main_alone(each)]
        return len(others) < len(test.values) and all("distributed_type" in ast.unparse(each) for each in others)
    if isinstance(test, ast.BoolOp):
        return any(map(of_main_alone, test.values))
    return MAIN(ast.unparse(test)) is not None
