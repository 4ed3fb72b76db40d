"""A finished or running run as a table: what it was, what it was proved to be, where it lies.

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
    yield "optimizer steps", final.get("step")
    for name, value in (final.get("metrics") or {}).items():
        yield name, f"{value:.4f}"
    yield "samples/s (median)", per_second and f"{per_second:.0f} over {throughput['steps_measured']} steps"
    yield "peak memory", memory and f"{memory / 2**20:.0f} MiB per process"
    per_parameter = evidence.get("bytes_per_parameter")
    yield "bytes per parameter", per_parameter and f"{per_parameter['total']:.1f}"
    yield "error", record["error"]


def main():
    if len(sys.argv) != 2 or not Path(sys.argv[1], "run.json").is_file():
        sys.exit(f"error: show takes the folder of a run (with its run.json), got {sys.argv[1:]}")
    folder = Path(sys.argv[1])
    table = [(name, str(value)) for name, value in rows(json.loads((folder / "run.json").read_text())) if value]
    table.append(("record", f"{folder}/run.json, metrics.jsonl, model/model.safetensors"))
    width = max(len(name) for name, _ in table)
    print("\n".join(f"  {name:<{width}}  {value}" for name, value in table))


if __name__ == "__main__":
    main()
