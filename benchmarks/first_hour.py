"""What a newcomer waits for: each first command in a log, and when it printed what.

    python benchmarks/first_hour.py --output results/first_hour.json
    python benchmarks/first_hour.py --output results/first_hour.json --cases demo advise --root ../before --name before

Per case: seconds until the first line behind the command itself, until the first step was counted and until a result;
the longest time without a line; bytes; lines that are warnings or that stood there before. --root: another checkout of
this repository, whose figures stand under --name.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, arguments, command, made, save

CASES = {
    "demo": "./launch.sh demo --max_steps 60",
    "own script": "./launch.sh ddp_bf16 tests/clients/own_loop.py {folder}/out",
    "Trainer script": "./launch.sh ddp_bf16 tests/clients/causal.py {folder}/out",
    "SFT script": "./launch.sh ddp_bf16 tests/clients/sft.py {folder}/out",
    "copy": "./launch.sh copy vit ddp_fp8_msamp_o2 {folder}/mine",
    "compare": "./launch.sh compare single_bf16 single_fp8 --seeds 1 --output_dir {folder}/out -- vit --max_steps 20",
    "advise": "./launch.sh advise --memory 24GB -- vit",
    "estimate": "./launch.sh estimate -- vit",
}
STEP = re.compile(r"B/param|^step \d|'loss'")
RESULT = re.compile(r"eval_loss|^finished|^ended|^Recommended|^fits: |report\.html|Next: its README")
NOISE = re.compile(r"warn|deprecat", re.I)


def timed(line_typed, root, environment):
    """The figures of a command, whose output goes to a pipe."""
    begun = time.monotonic()
    process = subprocess.Popen(["bash", "-c", line_typed], cwd=root, env=environment, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)  # fmt: skip
    lines, times = [], []
    for line in process.stdout:
        times.append(round(time.monotonic() - begun, 1))
        lines.append(line.decode(errors="replace").strip())
    code, end = process.wait(), round(time.monotonic() - begun, 1)

    def first(matches):
        return next((at for at, line in zip(times, lines, strict=True) if matches(line)), None)

    ends = [0, *times, end]
    seen, again = set(), 0
    for line in filter(None, lines):
        again += line in seen
        seen.add(line)
    return {
        "command": line_typed, "exit_code": code, "seconds": end,
        "first_line": first(lambda line: line and not line.startswith("accelerate launch ")),
        "first_step": first(STEP.search), "first_result": first(RESULT.search),
        "longest_silence": round(max(after - before for before, after in zip(ends, ends[1:], strict=False)), 1),
        "lines": len(lines), "bytes": sum(map(len, lines)), "warnings": sum(bool(NOISE.search(line)) for line in lines),
        "repeated": again,
    }  # fmt: skip


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--name", default="now")
    args = parser.parse_args()
    earlier = made(args.output, figures={}, command=None)
    figures = earlier["figures"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "VIRTUAL_ENV": sys.prefix, "HF_HUB_OFFLINE": "1"}
    for name in ("PYTHONPATH", "TQDM_DISABLE"):
        environment.pop(name, None)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=args.root, capture_output=True, text=True
    ).stdout
    for case in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            row = timed(CASES[case].format(folder=folder), args.root, environment)
        row["command"] = CASES[case].format(folder="FOLDER")
        load = round(os.getloadavg()[0], 1)  # a machine on which others work, too, has longer silences
        figures.setdefault(case, {})[args.name] = row | {"commit": commit.strip(), "load": load}
        print(case, row, flush=True)
        save(args.output, {"command": command(earlier["command"]), "figures": figures}, ("accelerate", "trl"))


if __name__ == "__main__":
    main()
