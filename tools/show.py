"""Shows a run, finished or not: its config and results, what was counted on its tensors, and its files.

./launch.sh show runs/demo-...
"""

import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from faithful.disk.names import printable  # noqa: E402
from tools import cli, records  # noqa: E402


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


def main(argv: list[str]) -> int:
    parser = cli.parser("show", __doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    args = parser.parse_args(argv)
    with records.believed(args.run):
        print(text(args.run))
    return 0


if __name__ == "__main__":
    cli.run(main)
