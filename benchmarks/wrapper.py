"""What does `-m faithful` cost a script? The same script under plain Accelerate and under it, in turns.

    python benchmarks/wrapper.py --output results/wrapper.json

The script is a plain Accelerate loop: a transformer, AdamW, `backward`, `clip_grad_norm_`, a prepared schedule, nothing
logged, in fp32 on one device. All ways are there at once; in turns one of them does 20 steps while the others wait, so
that the machine is equally fast for all. A step lasts from one optimizer step to the next, by the same hook in torch.
The first 3 steps of a turn and the first turn are not timed. A ratio is that of the median steps of one turn; reported
are the median over the turns and their quartiles. `same` is plain Accelerate against itself: what lies within its
quartiles is no difference. The last losses must be equal.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from provenance import ROOT, save

CONFIG = ROOT / "accelerate_configs" / "single_fp32.yml"
TURN, WARMUP_STEPS = 20, 3
WAYS = ("plain", "same", "faithful")
SIZES = {"small": (64, 2, 16), "medium": (256, 4, 64)}  # width, blocks, tokens of a sample


def train(size, steps, file, port):
    """The script itself, which knows nothing of the ways."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.optim.optimizer import register_optimizer_step_post_hook

    width, blocks, tokens = SIZES[size]
    accelerator = Accelerator()
    set_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
    loader = torch.utils.data.DataLoader(torch.randn(16 * 8, tokens, width), 16, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    turns, ends = socket.create_connection(("127.0.0.1", port)), []

    def after_step(*_):
        ends.append(time.perf_counter())
        if len(ends) % TURN == 0:
            turns.sendall(b".")
            turns.recv(1)

    register_optimizer_step_post_hook(after_step)
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
    file.write_text(json.dumps({"ends": ends, "loss": loss.item()}))


def start(way, words, folder):
    """Launches one way; its output goes into `folder`."""
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FAITHFUL_PROJECT_DIR": str(folder / f"run-{way}")}
    launcher = ["-m", "accelerate.commands.launch", "--config_file", CONFIG]
    command = [sys.executable, *launcher, *(["-m", "faithful"] if way == "faithful" else [])]
    command += [ROOT / "benchmarks" / "wrapper.py", "--one", *words, folder / f"{way}.json"]
    with open(folder / f"{way}.log", "w") as log:
        return subprocess.Popen(list(map(str, command)), cwd=folder, env=os.environ | env, stdout=log, stderr=log)


def failed(way, folder):
    raise SystemExit(f"{way} did not get to its last step:\n{(folder / f'{way}.log').read_text()[-3000:]}")


def side_by_side(size, turns):
    """way -> {seconds: median step of each turn; loss: the last one}. The first turn is a warm-up."""
    steps = TURN * (turns + 1)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(300)
        ways = {}
        for way in WAYS:  # one after another, so that it is known who connects
            child = start(way, [size, steps, server.getsockname()[1]], folder)
            stack.callback(child.terminate)
            try:
                ways[way] = child, stack.enter_context(server.accept()[0])
            except TimeoutError:
                failed(way, folder)
        for turn in range(turns + 1):
            for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
                _, connection = ways[way]
                if turn:
                    connection.sendall(b".")
                connection.recv(1) or failed(way, folder)
        found = {}
        for way, (child, connection) in ways.items():
            connection.close()
            if child.wait(60) or not (folder / f"{way}.json").exists():
                failed(way, folder)
            made = json.loads((folder / f"{way}.json").read_text())
            seconds = []
            for first in range(TURN, steps, TURN):
                ends = made["ends"][first + WARMUP_STEPS - 1 : first + TURN]
                seconds.append(statistics.median(b - a for a, b in zip(ends, ends[1:], strict=False)))
            found[way] = {"seconds": seconds, "loss": made["loss"]}
    return found


def ratio(found, way):
    """Of a turn's median step to plain Accelerate's: median over the turns and quartiles."""
    ratios = [a / b for a, b in zip(found[way]["seconds"], found["plain"]["seconds"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": median, "quartiles": [low, high]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["small=60", "medium=20"], help="size=turns")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    rows = []
    for size, turns in (pair.split("=") for pair in args.sizes):
        found = side_by_side(size, int(turns))
        losses = {way: found[way]["loss"] for way in WAYS}
        if len(set(losses.values())) > 1:
            raise SystemExit(f"not the same training: last losses {losses}")
        row = {"config": CONFIG.stem, "size": size, "turns": int(turns), "steps_of_a_turn": TURN - WARMUP_STEPS}
        row |= {"step_seconds_plain": statistics.median(found["plain"]["seconds"])}
        rows.append(row | {way: ratio(found, way) for way in WAYS[1:]})
        print(json.dumps(rows[-1]), flush=True)
        save(args.output, {"rows": rows}, ("accelerate",))


if __name__ == "__main__":
    if "--one" in sys.argv:
        size, steps, port, file = sys.argv[sys.argv.index("--one") + 1 :]
        train(size, int(steps), Path(file), int(port))
    else:
        main()
