"""What a script calls on the main process alone, as its file shows."""

import ast
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from faithful.saving import saving

if TYPE_CHECKING:
    from faithful.backends.base import Backend
    from faithful.strategies.base import Strategy

UNWRAPS = re.compile(r"\bunwrap_model\(").search


def notes(script: str, strategy: "Strategy", backend: "Backend") -> list[str]:
    """Names the calls on the main process alone that need all processes: before the first step, as a save may come
    after hours."""
    needed = ["save_state"] * saving.in_parts(strategy, backend)
    needed += ["save_model", "get_state_dict", "save_pretrained", "state_dict"] * (not strategy.replicates)
    told = "on the main process alone, but each process holds a part of the run: call it on all of them"
    calls = calls_alone(script) if needed else []
    alone = [(line, name) for line, name in calls if name in needed]
    return [f"{Path(script).name}:{line} calls {name} {told}, or the run ends there" for line, name in alone]


def calls_alone(script: str | Path) -> list[tuple[int, str]]:
    """(line, method) of the calls of an accelerator, of an unwrapped model or of what is made with one, that a script
    makes in `if accelerator.is_main_process` blocks, without those that are given a state_dict."""
    try:
        with warnings.catch_warnings(action="ignore"):  # Python has printed those of this file
            tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    blocks = [node.body for node in ast.walk(tree) if isinstance(node, ast.If) and of_main_alone(node.test)]
    inside = (node for block in blocks for line in block for node in ast.walk(line) if isinstance(node, ast.Call))
    given = (call for call in inside if not any(keyword.arg == "state_dict" for keyword in call.keywords))
    methods = [call.func for call in given if isinstance(call.func, ast.Attribute)]
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and UNWRAPS(ast.unparse(n.value))]
    models = {ast.unparse(target) for node in assigned for target in node.targets}
    wanted = (m for m in methods if (of := ast.unparse(m.value)).endswith("accelerator") or of in models or UNWRAPS(of))
    return sorted({(method.lineno, method.attr) for method in wanted})


def of_main_alone(test: ast.expr) -> bool:
    """Whether the condition of an `if` holds on the main process alone."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and any(map(of_main_alone, test.values))
    return isinstance(test, ast.Attribute) and test.attr == "is_main_process"
