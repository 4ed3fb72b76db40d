"""Gives config files that others wrote to `./launch.sh check`, and launches some of them.

    python benchmarks/other_configs.py --clones DIR --output results/other_configs.json
    python benchmarks/other_configs.py --clones DIR --checkouts DIR --launch 21 --output results/other_configs.json

The files are those of trl's package, those that Accelerate itself writes (`accelerate config default`,
write_basic_config), and all with a distributed_type in the clones of repositories under DIR. They are read where they
are. A file is `accepted`, `noted` (it runs, and a note says what runs otherwise than its words say) or `refused`, for
the reasons given. What this machine alone cannot do is listed beside them.

--launch trains two scripts in two processes (one where the file says so): recipes/gpt.py, and a script of others, the
clm of benchmarks/others.py, which is read from --checkouts. The losses of the first two steps are compared with those
of our own config of the same meaning. This is in fp32, where the first is equal to the last digit: the file is launched
with mixed_precision 'no' (fp16 and bf16 off in a file of DeepSpeed's) and num_processes 2, and is otherwise as it was.
Accumulation is the file's. Files with the same words are launched once, and all kinds of files before a second one of
a kind.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import others
import tiny
import yaml
from provenance import ROOT, save

sys.path.insert(0, str(ROOT))
from faithful.config import config_file
from faithful.launch import machine  # noqa: E402
from tools import check  # noqa: E402

MINE = {"single": "single_fp32", "ddp": "ddp_fp32", "fsdp": "fsdp_fp32", "zero1": "zero1_bf16", "zero2": "zero2_bf16",
        "zero3": "zero3_bf16"}  # fmt: skip
OF_GPT = "--max_steps 2 --logging_steps 1 --save_steps 0 --output_dir OUT"
OF_CLM = """--train_file train.txt --validation_file validation.txt --model_name_or_path gpt2 --block_size 32
    --max_train_steps 2 --per_device_train_batch_size 4 --seed 3 --learning_rate 1e-3 --output_dir OUT"""


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
        mapping = yaml.safe_load(text) if "distributed_type" in text else None
    except (UnicodeDecodeError, yaml.YAMLError):
        return False
    return isinstance(mapping, dict) and "distributed_type" in mapping


def judged(path, here):
    """One row of the table. A DeepSpeed file is named relative to the folder that one launches from: the YAML's."""
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        problems, not_here, notes, wanted = check.check(path, here, {})
    finally:
        os.chdir(before)
    row = {"is": check.description(wanted) if wanted and not problems else None, "problems": problems, "notes": notes}
    verdict = "refused" if problems else "noted" if notes else "accepted"
    return {"verdict": verdict} | row | {"not_on_this_machine": not_here}, wanted


def in_fp32(path, folder):
    """The file as it is launched, written to `folder`: in fp32, with two processes."""
    folder.mkdir()
    mapping = yaml.safe_load(path.read_text())  # a JSON file is YAML, too
    changed = {"mixed_precision": "no"} | ({} if mapping["distributed_type"] in ("NO", False) else {"num_processes": 2})
    section = dict(mapping.get("deepspeed_config") or {})
    of_deepspeed = path.parent / str(section.get("deepspeed_config_file"))
    if of_deepspeed.is_file():
        inner = json.loads(of_deepspeed.read_text())
        (folder / "deepspeed.json").write_text(
            json.dumps({key: value for key, value in inner.items() if key not in ("fp16", "bf16")})
        )
        del changed["mixed_precision"]  # Accelerate refuses it beside such a file
        changed["deepspeed_config"] = section | {"deepspeed_config_file": str(folder / "deepspeed.json")}
    (folder / "config.yaml").write_text(yaml.dump(mapping | changed))
    return folder / "config.yaml"


def own(wanted, folder):
    """Our own config of the same meaning, in fp32, written to `folder`, and its name."""
    name = MINE[wanted.strategy]
    mapping = yaml.safe_load((ROOT / f"accelerate_configs/{name}.yml").read_text())
    changed = {"mixed_precision": "no"} | ({} if mapping["distributed_type"] == "NO" else {"num_processes": 2})
    if wanted.deepspeed.clip:
        changed["deepspeed_config"] = mapping["deepspeed_config"] | {"gradient_clipping": wanted.deepspeed.clip}
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.dump(mapping | changed))
    return folder / "config.yaml", f"{name}.yml"


def launched(config, script, words, work, out):
    """What a launch of `script` in the folder `work` under a config says of itself and its losses, a list for each step
    or one number, or why it failed."""
    (out / "witness").mkdir(parents=True)
    command = ["accelerate", "launch", "--config_file", str(config), "--main_process_port", "0", "-m", "faithful"]
    command += [str(script), *(word.replace("OUT", str(out / "run")) for word in words)]
    paths = [ROOT / "benchmarks/witness", ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": ":".join(map(str, paths)),
        "WITNESS": str(out / "witness"),
        "TOKENIZERS_PARALLELISM": "false",
        "FAITHFUL_PROJECT_DIR": str(out / "run"),
        "HF_DATASETS_CACHE": str(work / "cache"),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env, cwd=work)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "refused" in line or "rror" in line] or ["?"]
        return {"failed": lines[0][-300:]}
    run = json.loads((out / "run/run.json").read_text())
    metrics, ranks = out / "run/metrics.jsonl", sorted((out / "witness").glob("rank*.json"))
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    losses = [row["loss"] for row in rows if "loss" in row]
    losses = losses or list(zip(*(json.loads(rank.read_text())["losses"] for rank in ranks), strict=True))
    return {"truth": run["evidence"]["truth"], "units": run["evidence"]["units"], "losses": losses}


def launches(chosen, checkouts, folder):
    """Yields {name: {script: its run, our config of the same meaning and its losses, whether the first is equal, how
    far all are apart, relative to ours}}, growing. chosen: {name: (config, what it asks for)}."""
    rows, mine, work = {}, {}, folder / "work"
    work.mkdir()
    tiny.language_models(work)
    tiny.texts(work)
    scripts = {"gpt": (ROOT / "recipes/gpt.py", OF_GPT.split())}
    if checkouts:
        scripts["clm"] = (*others.command("clm", checkouts), OF_CLM.split())
    for number, (name, (config, wanted)) in enumerate(chosen.items()):
        steps = str(wanted.deepspeed.steps or accumulation(config))
        key = f"{wanted.strategy}-{steps}-{wanted.deepspeed.clip}"
        twin, called = own(wanted, folder / key)
        rows[name] = {}
        for script, (path, words) in scripts.items():
            words = [*words, "--gradient_accumulation_steps", steps]
            run = launched(config, path, words, work, folder / f"{number}-{script}")
            if "losses" in run:
                if (key, script) not in mine:
                    mine[key, script] = launched(twin, path, words, work, folder / f"{key}-{script}")["losses"]
                ours = mine[key, script]
                run |= {"ours": called, "losses_of_ours": ours, "equal": run["losses"][0] == ours[0]}
                pairs = list(zip(flat(run["losses"]), flat(ours), strict=True))
                run["apart"] = max(abs(one - other) / abs(other) for one, other in pairs)
            rows[name][script] = run
            print(name, script, run, flush=True)
            yield rows


def accumulation(config):
    steps = (yaml.safe_load(config.read_text()).get("deepspeed_config") or {}).get("gradient_accumulation_steps", 1)
    return 1 if steps == "auto" else steps


def flat(losses):
    return [one for step in losses for one in (step if isinstance(step, list | tuple) else [step])]


def kind(mapping, wanted):
    """What a file's launch shows: files of one kind differ in less."""
    in_json = "deepspeed_config_file" in (mapping.get("deepspeed_config") or {})
    fsdp = wanted.fsdp.version, wanted.fsdp.wrap_policy
    return mapping["distributed_type"], wanted.strategy, fsdp, wanted.offload, wanted.deepspeed.clip, in_json


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clones", type=Path, required=True, nargs="+", help="folders with clones of repositories")
    parser.add_argument("--checkouts", type=Path, help="folder of the script of others, see benchmarks/others.py")
    parser.add_argument("--launch", type=int, default=0, help="how many files to launch")
    parser.add_argument("--only", nargs="+", default=(), help="launch these files, keep the other launches of --output")
    parser.add_argument("--output", default="results/other_configs.json")
    args = parser.parse_args()
    here, table, seen, kinds = machine.of_driver(), {}, [], {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for number, (name, path) in enumerate(collected(folder, args.clones).items()):
            table[name], wanted = judged(path, here)
            if table[name]["verdict"] == "refused" or wanted.precision == "fp8" or wanted.fsdp.wrap_classes:
                continue  # layers: classes of a model that is not the scripts'
            config = in_fp32(path, folder / f"file{number}")
            row, wanted = judged(config, here)
            mapping = config_file.read(config)[1]
            words = {key: value for key, value in mapping.items() if value not in (None, {}, [])}
            words["deepspeed_config"] = json.dumps(words.get("deepspeed_config")).replace(str(config.parent), "")
            if not row["not_on_this_machine"] and words not in seen:
                seen.append(words)
                kinds.setdefault(kind(mapping, wanted), []).append((name, (config, wanted)))
        in_turn = [one for turn in zip_longest(*kinds.values()) for one in turn if one]
        chosen = {name: one for name, one in in_turn if name in args.only} or dict(in_turn[: args.launch])
        before = json.loads(Path(args.output).read_text())["launches"] if args.only else {}
        write(args, table, before)
        for figures in launches(chosen, args.checkouts, folder):
            write(args, table, before | figures)


def write(args, table, made):
    verdicts = Counter(row["verdict"] for row in table.values())
    figures = {"files": len(table), "verdicts": verdicts, "share_that_runs": 1 - verdicts["refused"] / len(table)}
    figures["launched"] = len(made)
    for script in ("gpt", "clm"):
        runs = [scripts[script] for scripts in made.values() if script in scripts]
        apart = [run["apart"] for run in runs if "apart" in run]
        figures[script] = {
            "launched": len(runs),
            "equal_to_ours": sum(run.get("equal", False) for run in runs),
            "largest_apart": max(apart, default=None),
        }
    if args.checkouts:
        figures["script_of_others"] = others.origin("clm", args.checkouts)
    save(args.output, figures | {"table": table, "launches": made}, ("accelerate", "trl", "transformers", "deepspeed"))


if __name__ == "__main__":
    main()
