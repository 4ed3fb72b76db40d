"""How long a checkpoint stops training, and what it holds: ours, Accelerate's and torch's, of the same model, in turns.

    python benchmarks/saving.py --output results/saving.json

A stack of Linear blocks under FSDP2, trained for one step with AdamW in fp32, is saved and loaded by each way in each
round. Seconds are those of the slowest process: `blocked` until the call returns, `whole` until the files are on the
disk. `memory` is the largest rise of a process's own memory (RssAnon) over the bytes of the state that it holds.
Ours hashes every file, when it is written and before it is loaded; the others do not. At the end the weights alone are
saved by `save_model`, and the memory of the main process and of the others is measured.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peak import Peak
from provenance import ROOT, save

WAYS = ("ours", "ours, waiting", "accelerate", "dcp.save", "dcp.async_save")


def inside(file, layers, width, rounds, folder):
    """Measures in this process, which is one of several. The main one writes the rows to `file`."""
    sys.path.insert(0, str(ROOT))
    import accelerate
    import torch
    import torch.distributed.checkpoint as dcp
    from accelerate.utils import gather_object
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from faithful import Accelerator

    class Block(torch.nn.Linear):
        pass

    accelerator = Accelerator(project_dir=folder)
    model = torch.nn.Sequential(*(Block(width, width, bias=False) for _ in range(layers)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(2, width)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    held = 3 * 4 * layers * width * width // accelerator.num_processes

    def state():
        weights, moments = get_state_dict(model, optimizer.optimizer)
        return {"model": weights, "optimizer": moments}

    def written(way, path):
        """Saves. Returns a function that waits until all is written."""
        os.environ["FAITHFUL_ASYNC_SAVE"] = str(int(way == "ours"))
        if way.startswith("ours"):
            accelerator.save_state(path)
            return accelerator.checkpoints.wait
        if way == "accelerate":
            accelerate.Accelerator.save_state(accelerator, path)
        elif way == "dcp.save":
            dcp.save(state(), checkpoint_id=path)
        else:
            return dcp.async_save(state(), checkpoint_id=path).result
        return lambda: None

    def loaded(way, path):
        if way.startswith("ours"):
            accelerator.load_state(path)
        elif way.startswith("dcp"):
            values = state()
            dcp.load(values, checkpoint_id=path)
            set_state_dict(
                model, optimizer.optimizer, model_state_dict=values["model"], optim_state_dict=values["optimizer"]
            )

    rows = []
    for turn in range(rounds + 1):  # the first one warms up
        for way in WAYS:
            path = f"{folder}/{way.replace(', ', '-')}-{turn}"
            accelerator.wait_for_everyone()
            with Peak() as saves:
                began = time.perf_counter()
                wait = written(way, path)
                blocked = time.perf_counter() - began
                wait()
                whole = time.perf_counter() - began
            accelerator.wait_for_everyone()
            with Peak() as loads:
                began = time.perf_counter()
                loaded(way, path)
                load = time.perf_counter() - began
            mine = {"blocked": blocked, "whole": whole, "memory": saves.most / held}
            if way != "accelerate":
                mine |= {"load": load, "load_memory": loads.most / held}
            each = gather_object([mine])
            if turn:
                rows.append({"way": way} | {key: max(one[key] for one in each) for key in mine})
            if accelerator.is_main_process:
                shutil.rmtree(path)
            accelerator.wait_for_everyone()
    accelerator.wait_for_everyone()
    with Peak() as saves:
        accelerator.save_model(model, f"{folder}/model")
    each = gather_object([saves.most / held])
    rows.append({"way": "save_model", "main": each[0], "others": max(each[1:])})
    accelerator.end_training()
    if accelerator.is_main_process:
        Path(file).write_text(json.dumps(rows))
    os._exit(0)  # threads of dcp.async_save still live, and the process would abort


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows, models = [], []
    for processes in args.processes:
        with tempfile.TemporaryDirectory() as folder:
            line = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", processes]
            line += ["--config_file", ROOT / "accelerate_configs" / "fsdp_fp32.yml", "--main_process_port", 0]
            line += [__file__, "--inside", f"{folder}/rows.json", args.layers, args.width, args.rounds, folder]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(list(map(str, line)), cwd=ROOT, env=env, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stdout[-2000:] + done.stderr[-3000:])
            found = json.loads(Path(folder, "rows.json").read_text())
        models.append({"processes": processes} | found.pop())
        print(models[-1], flush=True)
        for way in WAYS:
            these = [row for row in found if row["way"] == way]
            row = {"processes": processes, "way": way}
            row |= {key: statistics.median(one[key] for one in these) for key in these[0] if key != "way"}
            rows.append(row)
            print(json.dumps(row), flush=True)
    state = 3 * 4 * args.layers * args.width**2
    if args.output:
        save(
            args.output,
            {"bytes": state, "rounds": args.rounds, "rows": rows, "save_model": models},
            ("accelerate", "safetensors"),
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        file, *numbers, folder = sys.argv[2:]
        inside(file, *map(int, numbers), folder)
    else:
        main()
