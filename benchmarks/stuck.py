"""Runs that are stuck, and how they end: by SIGTERM to the launcher, Ctrl-C, or with their launcher.

    python benchmarks/stuck.py single_bf16 ddp_bf16 fsdp_bf16 zero2_bf16 tp_bf16 --output results/stuck.json

Rows of the file that are not asked for stay. Most of a row is waiting, so two runs are made at a time.

Each run takes some steps. Then its last process sleeps (`sleep`), its first one makes a collective while the others are
in a loop of the script's (`alone`), or its last one is stopped by SIGSTOP (`stopped`). Ctrl-C is sent to the launcher's
process group, as a terminal does it, and in `twice` again after two seconds.

seconds   from the first signal until no process of the run is left, at most 60
orphans   processes that are still there then (they are ended)
said      the line that says where each process is
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import psutil
import yaml
from harness import ROOT, arguments, command, made, marked, save

STATES, ENDS = ("sleep", "alone", "stopped"), ("SIGTERM", "Ctrl-C", "twice", "killed")
LONGEST = 60  # seconds
AT_A_TIME = 2
SCRIPT = """
import pathlib, sys, time, torch
from accelerate import Accelerator
from accelerate.utils import set_seed
set_seed(0)
state, folder = sys.argv[1], pathlib.Path(sys.argv[2])
accelerator = Accelerator(project_dir=folder)
if accelerator.state.deepspeed_plugin:
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 4
{model}
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
def step():
    accelerator.backward(loss(model))
    optimizer.step()
    optimizer.zero_grad()
for _ in range(4):
    step()
first, last = accelerator.is_main_process, accelerator.is_last_process
(folder / f"held-{{accelerator.process_index}}").touch()
if state == "alone" and first:
    torch.distributed.all_reduce(torch.ones(1, device=accelerator.device))
while state == "alone":
    time.sleep(0.1)
if state == "sleep" and last:
    time.sleep(600)
while True:
    step()
    time.sleep(0.01)
"""
SMALL = """
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
loss = lambda model: model(torch.randn(4, 16, device=accelerator.device)).float().square().mean()
"""
LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, vocab_size=64)
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
row = dict.fromkeys(("input_ids", "labels"), torch.arange(32))
batches = iter(accelerator.prepare(torch.utils.data.DataLoader([row] * 10**6)))
loss = lambda model: model(**next(batches)).loss
"""


def workers(launcher, script):
    return [each for each in psutil.Process(launcher.pid).children(recursive=True) if str(script) in each.cmdline()]


def stuck(config, state, end, folder):
    """Lets a run be stuck, ends it, and returns a row."""
    script, log, mark = folder / "train.py", folder / "log", str(folder)
    script.write_text(SCRIPT.format(model=LLAMA if "tp_" in config or "_sp_" in config else SMALL))
    line = ["./launch.sh", config, str(script), state, str(folder)]
    env = os.environ | {"STUCK_RUN": mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as said:
        launcher = subprocess.Popen(line, cwd=ROOT, env=env, stdout=said, stderr=said, start_new_session=True)
    world = yaml.safe_load((ROOT / "accelerate_configs" / f"{config}.yml").read_text())["num_processes"]
    while len(list(folder.glob("held-*"))) < world:
        if launcher.poll() is not None:
            raise SystemExit(f"{config} does not run:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)
    time.sleep(2)  # until each process is where it waits
    if state == "stopped":
        max(workers(launcher, script), key=lambda each: int(each.environ().get("RANK", 0))).send_signal(signal.SIGSTOP)
        time.sleep(1)
    began = time.monotonic()
    if end in ("Ctrl-C", "twice"):
        os.killpg(launcher.pid, signal.SIGINT)
    else:
        launcher.send_signal(signal.SIGTERM if end == "SIGTERM" else signal.SIGKILL)
    if end == "twice":
        time.sleep(2)
        os.killpg(launcher.pid, signal.SIGINT)
    while (left := marked("STUCK_RUN", mark)) and time.monotonic() < began + LONGEST:
        time.sleep(0.2)
        launcher.poll()
    seconds = round(time.monotonic() - began, 1)
    for process in left:
        process.kill()
    said = re.findall(r"did not stop in \d+ s: (.*)|^(interrupted: .*)|(stopped after step .*)", log.read_text(), re.M)
    lines = [re.sub(r"(/[^/\s:]+)+/", "", next(filter(None, each))).split(". To go on")[0] for each in said]
    row = {"config": config, "state": state, "end": end, "seconds": seconds, "orphans": len(left)}
    return row | {"code": launcher.wait(), "said": lines}


def in_a_folder(config, state, end):
    folder = Path(tempfile.mkdtemp(prefix="stuck-"))
    row = stuck(config, state, end, folder)
    shutil.rmtree(folder)
    return row


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--states", nargs="+", choices=STATES, default=STATES)
    parser.add_argument("--ends", nargs="+", choices=ENDS, default=ENDS)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it, and the runs would, too
    before = made(args.output, command=None, rows=[])
    rows = {(row["config"], row["state"], row["end"]): row for row in before["rows"]}
    alone = [config for config in args.configs if config.startswith("single")]  # no other process to wait for
    cases = [
        (config, state, end)
        for config in args.configs
        for state in args.states
        for end in args.ends
        if state != "alone" or config not in alone
    ]
    rows = {case: rows.get(case) for case in dict.fromkeys([*rows, *cases])}  # in this order, whichever ends first
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for done in as_completed([pool.submit(in_a_folder, *case) for case in cases]):
            row = done.result()
            rows[row["config"], row["state"], row["end"]] = row
            print(*row.values(), flush=True)
            found = {"command": command(before["command"]), "rows": list(filter(None, rows.values()))}
            save(args.output, found, ("accelerate", "deepspeed"))


if __name__ == "__main__":
    sys.exit(main())
