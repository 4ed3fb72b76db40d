"""Runs every command of README.md and docs/ in order, in a clean clone, and compares what it prints with the page.

    python benchmarks/docs_run.py --output results/docs_run.json
    python benchmarks/docs_run.py --output results/docs_run.json --pages README.md docs/copy.md

A command is a line of a ```bash block; an unlabelled block below it, in the same section, is what it prints. Numbers,
times and names of folders may differ, `[...]` stands for any lines. A command that takes long is limited by options of
its own (SHORTER), one that cannot run here is listed with the reason (CANNOT). The environment of this process is the
active one. A run of some pages keeps the rows of the others.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, arguments, made, save

LONGEST = 600  # seconds of a command
CANNOT = {
    r"^git clone": "the clone is made before",
    r"^pip install .*\[recipes\]|accelerate-recipes (?!&&)": "of an installed wheel: benchmarks/install.py, and a test",
    r"\bsetup\b|^python3 -m venv|^source ": "the active environment has the packages: an installation downloads 3 GB",
    r"launch\.sh test": "the tests have a run of their own, in CI",
    r"glue:mrpc|trl\.scripts": "needs the Hugging Face Hub",
    r"10\.0\.0\.1.* vit": "needs two machines",
    r"^accelerate launch -m faithful": "needs the file that `accelerate config` has saved",
}
# What is run in place of a part of a command: (pattern, text).
SHORTER = [
    (r"^(\./launch\.sh compare) (.*) -- (vit|gpt).*", r"\1 --no-twin --seeds 1 \2 -- \3 --max_steps 10"),
    (r" --seeds auto", " --max-seeds 1 --seeds auto"),
    (r"--seeds 1 (.*--seeds auto)", r"\1"),
    (r"compare (.*) -- train.py", r"compare --seeds 1 --no-twin \1 -- train.py"),
    (r"diagnose (\S+) -- (vit|gpt).*", r"diagnose \1 --look 5 --pairs 2 --after 2 -- \2"),
    (r"--max_steps (800|100)\b", "--max_steps 20"),
    (r"(single_bf16 (diffusion|sft)|tp_bf16 gpt|--layer_decay 0.75)(?!.*--max_steps)(.*)", r"\1\3 --max_steps 10"),
    (r"runs/mine --save_steps 100", "runs/mine --max_steps 20 --save_steps 10"),
    (r"--checkpoint 200", "--checkpoint 20"),
    (r"^pip install -r requirements.txt", "pip install --quiet --no-deps --target site *.whl"),
    (r"^python test_copy.py", "PYTHONPATH=site python test_copy.py"),
    (r"^(accelerate launch.*msamp_o2.yml recipes/vit.py)", r"PYTHONPATH=site \1 --max_steps 10"),
    (r"^(ACCELERATE_USE_CPU=true accelerate .*)", r"\1 --max_steps 10"),
    (r"copy vit ddp_bf16 ../mine --plain", "copy vit ddp_bf16 ../plain --plain"),
    (r"runs/a runs/b", "$(ls -d runs/compare-vit-*/single_*-seed0 | head -2)"),
    (r"my_fsdp.yaml", "fsdp1.yaml"),
    (r"RUN_FOLDER", "runs/mine"),
]
# The folder of a command, where the page does not say it.
BEFORE = {r"^ACCELERATE_USE_CPU": "cd ../plain"}
SCRIPT = """
import argparse
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
accelerator = Accelerator()
set_seed(args.seed)
block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
model = torch.nn.Sequential(torch.nn.Linear(32, 64), block(), block(), block(), torch.nn.Linear(64, 16))
x = torch.randn(256, 32)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :16].argmax(1)), 16)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for epoch in range(args.epochs):
    for step, (inputs, labels) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
"""
FSDP1 = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
  fsdp_version: 1
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 8
use_cpu: false
"""


def blocks(page):
    """Returns [[line number, command, what the page says that it prints or None, whether it begins a block]]."""
    found, text = [], page.read_text()
    for block in re.finditer(r"^```(\w*)\n(.*?)^```$|^#+ ", text, re.M | re.S):
        if block[2] is None:  # a heading: what is printed below belongs to no command above
            found.append(None)
        elif block[1] == "bash":
            at = text[: block.start()].count("\n") + 2
            found += [[at + i, line, None, i == 0] for i, line in enumerate(block[2].splitlines())]
        elif not block[1] and found and found[-1]:
            command = next((one for one in reversed(found) if one and "check" in one[1]), found[-1])
            command = found[-1] if "asked:" in block[2] else command
            command[2] = block[2].splitlines()
    return [command for command in found if command]


def shape(line):
    """A line without what differs from run to run, and from machine to machine."""
    line = re.sub(r" \([^()]*: this CPU has no [^()]*\)", "", line)  # as on another CPU
    line = re.sub(r"\b(runs|/tmp|/home)/[\w./-]+", "FOLDER", line)
    return re.sub(r"\s+", " ", re.sub(r"[-+]?\d[\d.,:e-]*", "#", line)).strip()


def missing(said, printed):
    """The lines of the page that were not printed, in their order."""
    rest, absent = [shape(line) for line in printed], []
    for line in said or ():
        if line.strip() == "[...]":
            continue
        if shape(line) in rest:
            rest = rest[rest.index(shape(line)) + 1 :]
        else:
            absent.append(line)
    return absent


def prepare(clone):
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    Path(clone, "train.py").write_text(SCRIPT)
    Path(clone, "fsdp1.yaml").write_text(FSDP1)
    from skimage import data
    from skimage.io import imsave

    imsave(clone / "photo.jpg", data.astronaut())


def run(command, at, environment):
    """Runs a line in the folder `at`. Returns (the row's figures, what was printed, the folder that it ends in)."""
    script = f"{command}\ncode=$?; pwd > {environment['DOCS_AT']}; exit $code"
    begun = time.monotonic()
    try:
        done = subprocess.run(["bash", "-c", script], cwd=at, env=environment, text=True, timeout=LONGEST,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        code, printed = done.returncode, done.stdout.splitlines()
    except subprocess.TimeoutExpired as late:
        code, printed = f"took more than {LONGEST} s", (late.stdout or b"").decode().splitlines()
    file = Path(environment["DOCS_AT"])
    at = Path(file.read_text().strip()) if file.exists() and code == 0 else at
    return {"seconds": round(time.monotonic() - begun, 1), "exit_code": code}, printed, at


def as_said(row):
    """Whether a command ended and printed as its page says."""
    return row["exit_code"] == 0 and not row["missing"]


def rows_of(page, clone, environment):
    at = clone
    for line, command, said, begins in blocks(ROOT / page):
        at = clone if begins else at
        row = {"page": page, "line": line, "command": command}
        if reason := next((why for pattern, why in CANNOT.items() if re.search(pattern, command)), None):
            yield row | {"not_run": reason}
            continue
        as_run = command
        for pattern, shorter in SHORTER:
            as_run = re.sub(pattern, shorter, as_run)
        folder = next((to for pattern, to in BEFORE.items() if re.search(pattern, command)), None)
        figures, printed, at = run(f"{folder} && {as_run}" if folder else as_run, at, environment)
        row |= {"as_run": as_run} if as_run != command else {}
        row |= figures | {"said": len(said or ()), "missing": missing(said, printed)}
        if not as_said(row):
            row["printed"] = [text.replace(str(clone.parent), "") for text in printed[-12:]]
        yield row


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pages", nargs="+", help="default: all of them")
    args = parser.parse_args()
    every = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    pages = args.pages or every
    rows = [row for row in made(args.output, rows=[])["rows"] if row["page"] not in pages]
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "accelerate-recipes")
        prepare(clone)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "VIRTUAL_ENV": sys.prefix, "HF_HUB_OFFLINE": "1",
                                    "DOCS_AT": f"{folder}/at"}  # fmt: skip
        environment.pop("PYTHONPATH", None)
        for page in pages:
            for row in rows_of(page, clone, environment):
                rows.append(row)
                state = row.get("not_run") or f"{row['exit_code']}, {row['seconds']} s, missing {row['missing']}"
                print(f"{page}:{row['line']}: {row.get('as_run', row['command'])}: {state}", flush=True)
    rows.sort(key=lambda row: (every.index(row["page"]), row["line"]))
    ran = [row for row in rows if "not_run" not in row]
    counts = {"commands": len(rows), "ran": len(ran), "as_said": sum(map(as_said, ran))}
    counts["command"] = "python benchmarks/docs_run.py --output results/docs_run.json"  # of all pages, in parts or not
    save(args.output, counts | {"pages": sorted({row["page"] for row in rows}), "rows": rows}, ("accelerate", "timm"))


if __name__ == "__main__":
    main()
