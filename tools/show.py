"""Prints a finished or running run as a short table: config, results, what was counted on its tensors, files.

./launch.sh show runs/demo-...
"""

import json
import sys
from pathlib import Path


def rows(record):
    evidence, throughput, final = record["evidence"] or {}, record["throughput"], record["final"] or {}
    per_second, memory = throughput["samples_per_second_median"], record["peak_memory_bytes"]
    yield "run", f"{record['recipe']}, {record['config']['name'] or 'no config file'}, {record['status']}"
    plan = record["plan"]
    yield "how", f"{plan['strategy']} x{plan['num_processes']}, {plan['precision']}, on {record['device_name']}"
    curve = record["seen"]["loss_curve"]  # a script of one's own may log nothing
    yield "optimizer steps", final.get("step") or (curve[-1][0] if curve else None)
    yield "training loss", curve and " -> ".join(f"{loss:.4f} (step {step})" for step, loss in (curve[0], curve[-1]))
    for name, value in (final.get("metrics") or {}).items():
        yield name, f"{value:.4f}"
    yield "samples/s (median)", per_second and f"{per_second:.0f} over {throughput['steps_measured']} steps"
    yield "peak memory", memory and f"{memory / 2**20:.0f} MiB per process"
    per_parameter = evidence.get("bytes_per_parameter")
    yield "bytes per parameter", per_parameter and f"{per_parameter['total']:.1f}"
    yield "truth", evidence.get("truth")
    yield from (("note", line) for line in record.get("notes", ()))
    yield "error", record["error"]


def text(folder):
    table = [(name, str(value)) for name, value in rows(json.loads((folder / "run.json").read_text())) if value]
    there = [name for name in ("run.json", "metrics.jsonl", "model/model.safetensors") if (folder / name).exists()]
    table.append(("record", f"{folder}/{', '.join(there)}"))
    width = max(len(name) for name, _ in table)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in table)


def main():
    if len(sys.argv) != 2 or not Path(sys.argv[1], "run.json").is_file():
        sys.exit(f"error: show takes the folder of a run (with its run.json), got {sys.argv[1:]}")
    print(text(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
