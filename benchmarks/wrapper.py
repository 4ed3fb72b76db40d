"""What does `-m faithful` cost a script? The same script under plain Accelerate and under it, in turns.

    python benchmarks/wrapper.py --output results/wrapper.json

The script is a plain Accelerate loop: a transformer, AdamW, `backward`, `clip_grad_norm_`, a prepared schedule, nothing
logged, in fp32 on one device. The ways run in turns of 20 steps (harness.py). A ratio compares the median
steps of one turn; the report has the median and quartiles over the turns. `same` is plain Accelerate against itself and
shows how far chance alone moves a ratio. The last losses must be equal.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from harness import KINDS, ROOT, TURN, WARMUP_STEPS, arguments, in_turns, ratio, save, watch

CONFIG = ROOT / "accelerate_configs" / "single_fp32.yml"
WAYS = ("plain", "same", "faithful")
SIZES = {"small": (64, 2, 16), "medium": (256, 4, 64)}  # width, blocks, tokens of a sample


def train(size, steps):
    """The script itself. It does not know which way it runs."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    width, blocks, tokens = SIZES[size]
    accelerator = Accelerator()
    set_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
    loader = torch.utils.data.DataLoader(torch.randn(16 * 8, tokens, width), 16, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    step = 0
    while step < steps:
        for x in loader:
            loss = (model(x) - x).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step == steps:
                break
    print(f"loss {loss.item():.17g}", flush=True)


def start(size, way, steps, folder, port):
    """Launches one way; its output goes into `folder`."""
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FAITHFUL_PROJECT_DIR": str(folder / f"run-{way}")}
    launcher = ["-m", "accelerate.commands.launch", "--config_file", CONFIG]
    command = [sys.executable, *launcher, *(["-m", "faithful"] if way == "faithful" else [])]
    command += [ROOT / "benchmarks" / "wrapper.py", "--one", size, steps, folder / f"{way}.json", port]
    with open(folder / f"{way}.log", "w") as log:
        return subprocess.Popen(list(map(str, command)), cwd=folder, env=os.environ | env, stdout=log, stderr=log)


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    parser.add_argument("--sizes", nargs="+", default=["small=120", "medium=8"], help="size=turns")
    args = parser.parse_args()
    rows = []
    for size, turns in (pair.split("=") for pair in args.sizes):
        found = in_turns(WAYS, int(turns), functools.partial(start, size))
        losses = {way: found[way]["losses"][-1] for way in WAYS}
        if len(set(losses.values())) > 1:
            raise SystemExit(f"not the same training: last losses {losses}")
        row = {"config": CONFIG.stem, "size": size, "turns": int(turns), "steps_of_a_turn": TURN - WARMUP_STEPS}
        row |= {"step_seconds_plain": statistics.median(found["plain"]["wall"])}
        for way in WAYS[1:]:
            row[way] = {kind: ratio(found[way][kind], found["plain"][kind]) for kind in KINDS}
        rows.append(row)
        print(json.dumps(rows[-1]), flush=True)
        save(args.output, {"rows": rows}, ("accelerate",))


if __name__ == "__main__":
    if "--one" in sys.argv:
        size, steps, file, port = sys.argv[sys.argv.index("--one") + 1 :]
        watch(file, int(steps), int(port))
        train(size, int(steps))
    else:
        main()
