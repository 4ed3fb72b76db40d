"""The tables of what the recipes make and of what each config does with them, for benchmarks/tables.py."""

from pathlib import Path

from benchmarks.provenance import came_from
from tools import report

ROOT = Path(__file__).resolve().parents[1]
SHORT = {"eval_loss": "held-out loss", "exact_match": "exact answers"}


def gallery(figures):
    """A row for each recipe, and below what there is to look at."""
    rows, seen = [], []
    for row in figures["rows"]:
        measures = [f"{SHORT.get(name, name)} {value:.3g}" for name, value in row["metrics"].items()]
        rows.append([f"`{row['recipe']}`", f"`{row['command']}`", f"{row['seconds'] / 60:.1f}", ", ".join(measures)])
        if "left" in row:
            file = f"results/gallery/{row['left']}"
            shown = (ROOT / file).read_text().strip() if file.endswith(".txt") else None
            seen.append(f"**{row['recipe']}**\n\n" + (f"```text\n{shown}\n```" if shown else f"![drawn](../{file})"))
    table = report.table(["recipe", "command", "minutes", "at the end"], rows)
    return "\n\n".join([f"{came_from(figures)}:", table, *seen])


def matrix(figures):
    """A row for each config: for each recipe its seconds and what the run says of itself, or why it is refused."""
    recipes = sorted({row["recipe"] for row in figures["rows"]})
    cells = {}  # of (config, recipe): one text, or two where the second was tried with other options
    for row in figures["rows"]:
        says = row["says"].removesuffix(" | rehearsal on a CPU").replace(" | ", "; ")
        told = f"refused: {says}" if row["status"] == "refused" else f"{row['seconds']:.0f} s: {says}"
        options = f"with `{' '.join(row['options'])}` " if row["options"] else ""
        cells.setdefault((row["config"], row["recipe"]), []).append(options + told)
    configs = dict.fromkeys(row["config"] for row in sorted(figures["rows"], key=lambda row: row["config"]))
    rows = [[f"`{c}`", *("; ".join(cells.get((c, recipe), ["-"])) for recipe in recipes)] for c in configs]
    return f"{came_from(figures)}:\n\n{report.table(['config', *recipes], rows)}"
