"""Shows a run, finished or not: its config and results, what was counted on its tensors, and its files.

./launch.sh show runs/demo-...           as a short table
./launch.sh show runs/demo-... --html    as a page, run.html in the run's folder: curves, memory, layers in FP8
"""

import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from faithful.disk.names import printable  # noqa: E402
from tools import cli, find, records  # noqa: E402

MOST_CURVES, MOST_POINTS, MOST_CELLS = 20, 1000, 1000  # of a page: more takes minutes, and nobody sees it


def rows(record: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    evidence, throughput, final = record["evidence"] or {}, record["throughput"], record["final"] or {}
    per_second, memory = throughput["samples_per_second_median"], record["peak_memory_bytes"]
    yield "run", f"{record['recipe']}, {record['config']['name'] or 'no config file'}, {record['status']}"
    plan = record["plan"]
    yield "how", f"{plan['strategy']} x{plan['num_processes']}, {plan['precision']}, on {record['device_name']}"
    curve, taken, resumed = record["seen"]["loss_curve"], records.steps_of(record), record["seen"].get("resumed_at")
    yield "optimizer steps", taken and f"{taken}" + (f", resumed at step {resumed}" if resumed else "")
    yield "training loss", curve and " -> ".join(f"{loss:.4f} (step {step})" for step, loss in (curve[0], curve[-1]))
    judged = record["args"].get("load_best_model_at_end") and record["status"] == "finished"
    best = f", the best {record['args'].get('metric_for_best_model', 'eval_loss')}" if judged else ""
    yield "model", final and (best or final["step"] != taken) and f"of step {final['step']}{best}"
    for name, value in (final.get("metrics") or {}).items():
        yield name, f"{value:.4f}" if records.number(value) else records.readers.short(value)
    yield "samples/s (median)", per_second and f"{per_second:.0f} over {throughput['steps_measured']} steps"
    yield "peak memory", memory and f"{memory / 2**20:.0f} MiB per process"
    per_parameter = evidence.get("bytes_per_parameter")
    yield "bytes per parameter", per_parameter and f"{per_parameter['total']:.1f}, of weights, gradients and optimizer"
    yield "measured", evidence.get("measured")
    yield from (("note", line) for line in record["notes"])
    yield "error", record["error"]


def text(folder: Path, printed: Collection[str] = ()) -> str:
    """The table. printed: the rows that the run itself has printed."""
    named = [(name, value) for name, value in rows(records.record_of(folder)) if value and name not in printed]
    table = [(name, printable(str(value))) for name, value in named]
    files = [name for name in ("run.json", "metrics.jsonl", "model/model.safetensors") if (folder / name).exists()]
    table.append(("record", f"{folder}/{', '.join(files)}"))
    return "\n".join(f"  {line}" for line in cli.columns(table))


# ------------------------------------------------------------------------------------------------------------ as a page


def curves(record: dict[str, Any], logged: list[dict[str, Any]]) -> tuple[dict[str, list[list[float]]], int]:
    """{name: [[step, value]]}: the training loss of every step, then what was logged, over the steps. Of very many
    points some, evenly spread, and of very many measures some, with the number of those that are left out."""
    names = dict.fromkeys(name for row in logged for name in row if name not in ("step", "epoch", "loss"))
    losses = [name for name in names if "loss" in name][:MOST_CURVES]
    others = sorted(names.keys() - set(losses), key=lambda name: (name in records.ASIDE, name))
    drawn = {*losses, *[name for name in others if "loss" not in name][:MOST_CURVES]}
    points_of = {"loss": record["seen"]["loss_curve"]} | {name: [] for name in names if name in drawn}
    for row in logged:
        for name in drawn & row.keys():
            points_of[name].append([row["step"], row[name]])
    some = {name: points[:: -(-len(points) // MOST_POINTS)] for name, points in points_of.items() if points}
    whole = {name: [[*point, point[1], point[1]] for point in points] for name, points in some.items()}
    return whole, len(names) - len(drawn)


def drawn_curves(points_of: dict[str, list[list[float]]], more: int = 0) -> Iterator[str]:
    """One picture with all losses, then one picture for each other measure. more: the number of those left out."""
    from tools import drawings, page, report

    losses = [name for name in points_of if "loss" in name]
    others = sorted(points_of.keys() - set(losses), key=lambda name: (name in records.ASIDE, name))
    for group in ([losses] if losses else []) + [[name] for name in others]:
        series = [(name, page.colour(i), points_of[name]) for i, name in enumerate(group)]
        what = {"loss": "of the training batches", "grad_norm": "before clipping", "learning_rate": "of each step"}
        caption = "; ".join(f"{name}: {what.get(name, 'over the held-out set')}" for name in group) + "."
        key = page.legend([(name, at) for name, at, _ in series])
        drawn = page.picture(page.lines(series, falls="loss" in group[0]), caption, key)
        numbers = {name: points_of[name] for name in group if name not in what}  # of each step they are too long
        yield page.section(
            group[0].replace("_", " ").capitalize(),
            drawn,
            drawings.in_numbers(numbers, report.number) if numbers else "",
        )
    if more:
        yield page.words(f"{more:,} more measures are in metrics.jsonl.")


def drawn_memory(record: dict[str, Any]) -> str:
    """A bar chart of the model states by class, for the whole model and for each process."""
    from tools import page, report

    evidence, mib = record["evidence"], 2**20
    per_parameter = {name: size for name, size in evidence["bytes_per_parameter"].items() if size and name != "total"}
    sizes = {name: size * evidence["parameters"] / mib for name, size in per_parameter.items()}
    rows_of = {"the whole model": sizes}
    if share := evidence.get("share_per_process"):
        rows_of["in each process"] = {name: size * share.get(name, 1) for name, size in sizes.items()}
    colour_of = {name: page.colour(i) for i, name in enumerate(sizes)}
    bars, cells = [], []
    for title, row in rows_of.items():
        total = report.number(sum(row.values()))
        bars.append((title, [(size, colour_of[name]) for name, size in row.items()], f"{total} MiB", False))
        cells.append([title, *map(report.number, row.values()), total])
    caption = f"Model states, counted on live tensors: {sum(per_parameter.values()):.2f} bytes per parameter."
    picture = page.picture(page.bars(bars, "MiB"), caption, page.legend(list(colour_of.items())))
    table, peak = page.table(["", *sizes, "MiB"], cells), record["peak_memory_bytes"]
    if not peak:
        return page.section("Memory", picture, table, "")
    said = f"With activations and everything else the peak was {peak / mib:,.0f} MiB in a process."
    return page.section("Memory", picture, table, page.words(said))


def drawn_layers(evidence: dict[str, Any]) -> str:
    """A strip with every Linear layer in the order of the model, in FP8 or not, and a table with the reasons."""
    from tools import page

    skipped = {entry["name"]: entry["reason"] for entry in evidence["linear_skipped"]}
    names = evidence["linear_names"]
    colours = {True: page.colour(0), False: page.colour(1)}
    key = page.legend([("in FP8", colours[True])] + [("in high precision", colours[False])] * bool(skipped))
    caption = f"Linear layers in the order of the model, from {names[0]} to {names[-1]}."
    drawn = page.words(f"{len(names):,} Linear layers are too many to draw.")
    if len(names) <= MOST_CELLS:
        drawn = page.picture(page.strip([colours[name not in skipped] for name in names]), caption, key)
    why = page.table(["in high precision", "why"], list(skipped.items())) if skipped else ""
    return page.section("Layers in FP8", drawn, why)


def in_words(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what was counted in sentences: (what, sentence)."""
    plan, evidence = record["plan"], record["evidence"]
    processes, parts = plan["num_processes"], evidence["measured"].split(" | ")
    yield "how", parts[0] + (": a rehearsal on a CPU" if plan["rehearsal"] else "")
    yield "precision", parts[1]
    if plan["precision"] == "fp8":
        yield (
            "in FP8",
            (
                f"{evidence['linear_converted']} of {evidence['linear_total']} Linear layers, which hold "
                f"{evidence['share_converted']:.0%} of the parameters"
            ),
        )
        yield "evaluation", evidence["eval_precision"]
    kinds = evidence["dtypes"]
    for name, counts in (
        ("parameters", kinds["parameters"]),
        ("gradients", kinds["gradients"]),
        *kinds["optimizer_state"].items(),
    ):
        yield name, ", ".join(f"{count:,} elements in {kind}" for kind, count in counts.items())
    owned = "updates every trainable parameter" if evidence["optimizer_owns_all"] else "does not update all parameters"
    yield "optimizer", f"{record['seen']['optimizer']['class']}, {owned}"
    if processes > 1 and evidence["wire_bytes_per_step"] is not None:
        yield "sent", f"{evidence['wire_bytes_per_step']:,} bytes by each process in an optimizer step"


def typed(command: str) -> str:
    """The line that a user types, for the launcher's own line that it became."""
    before, launcher, line = command.partition("tools/accelerate_launch.py --config_file ")
    if not launcher:
        return command
    root = re.escape(before.split()[-1]) if before.split() else ""
    line = re.sub(rf"(?:{root})(?:accelerate_configs|recipes)/(\w+)\.(?:yml|py)(?= |$)", r"\1", line)
    return f"{find.COMMAND} " + line.replace(" --main_process_port 0", "").replace(" -m faithful ", " ")


def page_of(folder: Path) -> str:
    from tools import page

    record, logged = records.record_of(folder), records.over_time(records.rows_of(folder))
    evidence = record["evidence"]
    table = {name: str(value) for name, value in rows(record) if value and name not in ("measured", "note")}
    parts = [*drawn_curves(*curves(record, logged))]
    if evidence and evidence["bytes_per_parameter"]:  # counted after the first step
        parts.insert(0, page.section("What was counted on the live tensors", page.pairs(in_words(record))))
        parts.append(drawn_memory(record))
        if record["plan"]["precision"] == "fp8" and evidence["linear_names"]:
            parts.append(drawn_layers(evidence))
    if record["args"]:
        options = page.table(["option", "value"], record["args"].items())
        parts.append(page.section("Options", page.details("All options of the run", options)))
    title = f"{record['recipe']}, {record['config']['name'] or 'no config file'}"
    return page.whole(title, typed(record["command"]), list(table.items()), parts, record["notes"])


def main(argv: list[str]) -> int:
    parser = cli.parser("show", __doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--html", action="store_true", help="write run.html into it")
    args = parser.parse_args(argv)
    with records.believed(args.run):
        shown = page_of(args.run) if args.html else text(args.run)
    if args.html:
        cli.write(args.run / "run.html", shown)
        shown = args.run / "run.html"
    print(shown)
    return 0


if __name__ == "__main__":
    cli.run(main)
