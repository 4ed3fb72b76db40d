"""What a process holds in each phase of a run whose model is sharded: how models larger than a process fit.

    python benchmarks/phases.py --output results/phases.json
    python benchmarks/phases.py --processes 4 --before ../earlier --configs fsdp_bf16 zero3_bf16 --output ...

A stack of Linear blocks is built, prepared, trained for two steps, saved, loaded and written with `save_model`, by 2, 4
and 8 processes. MiB of a process's own memory (RssAnon) over what it has after its imports: the peak of each phase, of
process 0 and the largest of the others; `held` is what is left between two steps. `whole` is one copy of the weights in
fp32. A checkpoint that is written behind training is copied to the host first, which on a CPU is the same memory. With
--before the phases of an earlier clone are measured, too. What --output holds already is kept.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from peak import Peak, own_memory
from provenance import ROOT, command, save

CONFIGS = ("fsdp_bf16", "fsdp_fp8_msamp_o2", "zero3_bf16")
KEYS = {"fsdp_cpu_ram_efficient_loading: false": "fsdp_cpu_ram_efficient_loading: true",
        "zero3_init_flag: false": "zero3_init_flag: true"}  # fmt: skip
MIB = 2**20


def inside(file, root, layers, width, folder):
    """Measures in this process, which is one of several. The main one writes the row to `file`."""
    sys.path.insert(0, root)
    import torch
    from accelerate.utils import gather_object

    from faithful import Accelerator

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(width, width)

        def forward(self, x):
            return x + torch.nn.functional.gelu(self.linear(x))

    accelerator = Accelerator(project_dir=folder)
    start, row = own_memory(), {}

    def phase(name):
        peak, before = Peak(), own_memory() - start
        row[name] = lambda: (before + peak.most) / MIB
        return peak

    with phase("build"):
        model = torch.nn.Sequential(*(Block() for _ in range(layers)))
    with phase("prepare"):
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with phase("train"):
        for _ in range(2):
            accelerator.backward(model(torch.randn(4, width)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    held = (own_memory() - start) / MIB
    for name, behind in (("save_state, waiting", "0"), ("save_state, behind training", "1")):
        os.environ["FAITHFUL_ASYNC_SAVE"] = behind
        with phase(name):
            accelerator.save_state(f"{folder}/checkpoint")
            accelerator.checkpoints.wait()  # waits until it is written
    with phase("load_state"):
        accelerator.load_state(f"{folder}/checkpoint")
    with phase("save_model"):
        accelerator.save_model(model, f"{folder}/model")
    each = gather_object([{name: peak() for name, peak in row.items()} | {"held": held}])
    main, others = each[0], {name: max(other[name] for other in each[1:]) for name in each[0]}
    accelerator.end_training()
    if accelerator.is_main_process:
        Path(file).write_text(json.dumps({"main": main, "others": others}))


def key(row):
    return row["config"], row["processes"], row["code"]


def launched(script, root, config, processes, *words, efficient=True):
    """What `script --inside FILE root *words FOLDER`, launched with a config of a clone, writes to FILE as JSON.
    efficient: with the key by which only process 0 builds the model."""
    with tempfile.TemporaryDirectory() as folder:
        text = (root / "accelerate_configs" / f"{config}.yml").read_text()
        for off, on in KEYS.items() if efficient else ():
            text = text.replace(off, on)
        Path(folder, "config.yml").write_text(text)
        line = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", processes]
        line += ["--config_file", f"{folder}/config.yml", "--main_process_port", 0]
        line += [script, "--inside", f"{folder}/row.json", root, *words, f"{folder}/run"]
        done = subprocess.run(list(map(str, line)), cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"},
                              capture_output=True, text=True)  # fmt: skip
        if done.returncode:
            sys.exit(done.stdout[-2000:] + done.stderr[-3000:])
        return json.loads(Path(folder, "row.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--configs", nargs="+", default=CONFIGS)
    parser.add_argument("--before", type=Path, help="a clone of an earlier commit")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows, commands = {}, [command()]
    if args.output and args.output.exists():
        kept = json.loads(args.output.read_text())
        rows, commands = {key(row): row for row in kept["rows"]}, [kept["command"], *commands]
    for config in args.configs:
        for processes in args.processes:
            for code in ("before", "now") if args.before else ("now",):
                root = args.before.resolve() if code == "before" else ROOT
                row = {"config": config, "processes": processes, "code": code}
                row |= launched(__file__, root, config, processes, args.layers, args.width, efficient=code == "now")
                rows[key(row)] = row
                print(json.dumps(row), flush=True)
    if args.output:
        whole = 4 * args.layers * (args.width**2 + args.width) / MIB
        figures = {"command": " and ".join(commands), "whole": whole, "rows": [rows[at] for at in sorted(rows)]}
        save(args.output, figures, ("accelerate", "deepspeed"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        file, root, layers, width, folder = sys.argv[2:]
        inside(file, root, int(layers), int(width), folder)
    else:
        main()
