"""Gives config files that others wrote to `./launch.sh check`, and launches some of them.

    python benchmarks/other_configs.py --clones DIR --output results/other_configs.json
    python benchmarks/other_configs.py --clones DIR --launch 20 --output results/other_configs.json

The files are those of trl's package, those that Accelerate itself writes (`accelerate config default`,
write_basic_config), and all with a distributed_type in the clones of repositories under DIR. They are read where they
are. A file is `accepted`, `noted` (it runs, and a note says what runs otherwise than its words say) or `refused`, for
the reasons given. What this machine alone cannot do is listed beside them.

--launch trains recipes/gpt.py in two processes (one where the file says so) and compares the losses of the first two
steps with those of our own config of the same meaning. This is in fp32, where the first is equal to the last digit: the
file is launched with mixed_precision 'no' and num_processes 2, and is otherwise as it was. Files with the same words
are launched once.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import yaml
from provenance import ROOT, save

sys.path.insert(0, str(ROOT))
from faithful import files, machine  # noqa: E402
from tools import check  # noqa: E402

MINE = {"single": "single_fp32", "ddp": "ddp_fp32", "fsdp": "fsdp_fp32", "zero1": "zero1_bf16", "zero2": "zero2_bf16",
        "zero3": "zero3_bf16"}  # fmt: skip
STEPS = ("--max_steps", "2", "--logging_steps", "1", "--save_steps", "0")


def collected(folder, clones):
    """{name to show: path} of all files. folder: where Accelerate writes its own. clones: folders."""
    trl = Path(sys.prefix).glob("lib/python*/site-packages/trl/accelerate_configs/*.yaml")
    found = {f"trl/accelerate_configs/{path.name}": path for path in sorted(trl)}
    for name, code in (
        ("default", "from accelerate.commands.config.default import write_basic_config as w; w(save_location=PATH)"),
        ("bf16", "from accelerate.utils import write_basic_config as w; w('bf16', PATH)"),
    ):
        path = folder / f"{name}.yaml"
        subprocess.run([sys.executable, "-c", code.replace("PATH", repr(str(path)))], check=True)
        found[f"accelerate config default: {name}"] = path
    for top in map(Path.resolve, clones):
        for path in sorted(one for kind in ("yaml", "yml", "json") for one in top.rglob(f"*.{kind}")):
            if path.is_file() and is_config(path):
                found[str(path.relative_to(top))] = path
    return found


def is_config(path):
    try:
        text = path.read_text()
        made = yaml.safe_load(text) if "distributed_type" in text else None
    except (UnicodeDecodeError, yaml.YAMLError):
        return False
    return isinstance(made, dict) and "distributed_type" in made


def judged(path, here):
    """One row of the table. A DeepSpeed file is named relative to the folder that one launches from: the YAML's."""
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        problems, not_here, notes, wanted = check.check(path, here, {})
    finally:
        os.chdir(before)
    row = {"is": check.described(wanted) if wanted and not problems else None, "problems": problems, "notes": notes}
    verdict = "refused" if problems else "noted" if notes else "accepted"
    return {"verdict": verdict} | row | {"not_on_this_machine": not_here}, wanted


def launched(mapping, folder):
    """The first losses of gpt under a config in fp32, and what the run says of itself, or why it failed."""
    config = folder / "config.yaml"
    folder.mkdir()
    changed = {"mixed_precision": "no"} | ({} if mapping["distributed_type"] == "NO" else {"num_processes": 2})
    config.write_text(yaml.dump(mapping | changed))
    command = ["accelerate", "launch", "--config_file", str(config), "--main_process_port", "0"]
    command += [str(ROOT / "recipes/gpt.py"), "--output_dir", str(folder / "run"), *STEPS]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "refused" in line or "rror" in line] or ["?"]
        return {"failed": lines[0][-300:]}
    run = json.loads((folder / "run/run.json").read_text())
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return {"truth": run["evidence"]["truth"], "units": run["evidence"]["units"], "strategy": run["plan"]["strategy"],
            "losses": [row["loss"] for row in rows if "loss" in row]}  # fmt: skip


def launches(configs, folder):
    """Yields {name: its run, our config of the same meaning and its losses, whether the first is equal}, growing."""
    made, mine = {}, {}
    for number, (name, mapping) in enumerate(configs.items()):
        made[name] = launched(mapping, folder / str(number))
        twin = MINE.get(made[name].get("strategy"))
        if twin and twin not in mine:
            own = yaml.safe_load((ROOT / f"accelerate_configs/{twin}.yml").read_text())
            mine[twin] = launched(own, folder / twin)["losses"]
        if twin:
            made[name] |= {"ours": f"{twin}.yml", "losses_of_ours": mine[twin]}
            made[name]["equal"] = mine[twin][0] == made[name]["losses"][0]
        print(name, made[name], flush=True)
        yield made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clones", type=Path, required=True, nargs="+", help="folders with clones of repositories")
    parser.add_argument("--launch", type=int, default=0, help="how many files to launch")
    parser.add_argument("--output", default="results/other_configs.json")
    args = parser.parse_args()
    here, table, configs = machine.of_driver(), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, path in collected(Path(folder), args.clones).items():
            table[name], wanted = judged(path, here)
            mapping = files.read(path)[1]
            runs = table[name]["verdict"] != "refused" and not table[name]["not_on_this_machine"]
            of_json = runs and "deepspeed_config_file" in (mapping.get("deepspeed_config") or {})
            if runs and not of_json and wanted["precision"] != "fp8" and mapping not in configs.values():
                configs[name] = mapping
        write(args.output, table, {})
        for made in launches(dict(list(configs.items())[: args.launch]), Path(folder)):
            write(args.output, table, made)


def write(output, table, made):
    verdicts = Counter(row["verdict"] for row in table.values())
    figures = {"files": len(table), "verdicts": verdicts, "share_that_runs": 1 - verdicts["refused"] / len(table)}
    figures |= {"launched": len(made), "equal_to_ours": sum(run.get("equal", False) for run in made.values())}
    save(output, figures | {"table": table, "launches": made}, ("accelerate", "trl", "transformers", "deepspeed"))


if __name__ == "__main__":
    main()
