"""What the study of all precisions (docs/study.md) says of a config, and how far a model is from those it trained."""

import functools
import json
from pathlib import Path
from typing import Any

from faithful.config.settings import Settings
from tools import report
from tools.estimate import read_config

ROOT = Path(__file__).resolve().parents[1]
NOT_A_CONFIG_S = ("control", "planted", "o2_round_to_nearest")  # ways that no config asks for
FILE = ROOT / "results" / "study" / "summary.json"


@functools.cache
def read() -> Any:
    """results/study/summary.json, or None where nobody has run the study."""
    return json.loads(FILE.read_text()) if FILE.is_file() else None


def precision(asked: Settings) -> tuple[str, str | None, str | None]:
    return asked.precision, asked.backend, asked.level


@functools.cache
def precision_of(config: str) -> tuple[str, str | None, str | None]:
    return precision(read_config(ROOT / "accelerate_configs" / f"{config}.yml", 1))


def of(asked: Settings, recipe: str, pretrained: bool) -> list[dict[str, Any]]:
    """The study's results for what a config asks for: of its trainings of this recipe, or else of all, either from
    random weights or fine-tuned. Ways with options of their own, such as another optimizer, are not the config's."""
    study = read()
    results = [] if study is None else [
        result for result in study["results"]
        if result["measures"] and not result["options"] and result["way"] not in NOT_A_CONFIG_S
        and result["task"].startswith("finetune") == pretrained and precision_of(result["config"]) == precision(asked)
    ]  # fmt: skip
    return [result for result in results if study["tasks"][result["task"]]["recipe"] == recipe] or results


def verdict(results: list[dict[str, Any]]) -> tuple[str | None, str]:
    """(kind, words) of several results, the worst first; (None, "") without a verdict. kind: worse, unknown, equal,
    better."""
    said = {}
    for result in results:
        measure = result["measures"][read()["tasks"][result["task"]]["measure"]]
        if measure["pairs"] >= 5 and result["way"] != "bf16":
            said.setdefault(measure["kind"], []).append(f"{report.percent(measure['relative'])} in {result['task']}")
    if not said:
        return None, ""
    kinds = [kind for kind in ("worse", "unknown", "better", "equal") if kind in said]
    names = {"unknown": "cannot tell"}
    return kinds[0], "; ".join(f"{names.get(kind, kind)} ({', '.join(said[kind])})" for kind in kinds)


def distance(results: list[dict[str, Any]], parameters: float) -> str:
    """One sentence: how far a model is from what the study trained."""
    study, sizes = read(), sorted({result["parameters"] for result in results})
    trained = " to ".join(dict.fromkeys(f"{size / 1e6:.1f}M" for size in (sizes[0], sizes[-1])))
    times = parameters / sizes[-1]
    far = f"{times:,.0f} times the largest of them" if times >= 2 else f"{times:.2g} of the largest of them"
    return (
        f"The study (docs/study.md) trained models of {trained} parameters on {study['device']}; this one has "
        f"{parameters / 1e6:,.1f}M, {far}: of it the study is a hint."
    )
