"""A model larger than a process: trains three steps, saves, is killed, goes on, ends and is exported; and its memory.

    python benchmarks/large.py --output results/large.json

`llama_1b` in MS-AMP's level O2 under FSDP2, four processes on one machine, with the key by which only process 0 builds
the model. Its vocabulary is that of a BPE trained on random words. The launcher is killed (SIGKILL) as soon as the
checkpoint of step 3 is complete; the same command with --resume_from_checkpoint goes on to step 4 and writes the model,
which `./launch.sh export` turns into fp32. MiB of a process's own memory (RssAnon) over what it has after its imports,
the most in each phase: of process 0, of the others, and of all together at one moment. `estimated` is what
`./launch.sh estimate` says of the phase. glibc is set to return freed blocks of 256 KiB and more to the system; by
default it keeps those up to 32 MiB for the next phase. Training waits for the checkpoint (FAITHFUL_ASYNC_SAVE=0): a
machine of 24 GB may have no room for a second copy of what is held.
"""

import contextlib
import json
import os
import random
import shutil
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from harness import ROOT, arguments, command, save
from safetensors import safe_open

from tools.cli import die_with_me

MIB = 2**20
PROCESSES = 4
VOCABULARY = 128_256  # tokens, those of Llama 3
WORDS = 72_000  # with different letters: enough to train that vocabulary on
RECIPE, EXPORT = "recipes/gpt.py", "tools/export.py"


def write_texts(folder):
    """Ten files of random words, of which the recipe trains on nine and holds out the last, a short one."""
    folder.mkdir()
    generator = random.Random(0)
    words = ["".join(generator.choices(string.ascii_lowercase, k=8)) for _ in range(WORDS)]
    for i in range(9):
        (folder / f"{i}.txt").write_text(" ".join(words[i::9]))
    (folder / "9.txt").write_text(" ".join(words[:50]))


def options(model, texts):
    words = f"--model {model} --dataset {texts} --vocab_size {VOCABULARY} --sequence_length 32 --eval_steps 0"
    batches = "--per_device_train_batch_size 1 --per_device_eval_batch_size 1"
    return [*words.split(), *batches.split(), *"--max_steps 4 --save_steps 3".split()]


def own_memory(process):
    """RssAnon in bytes, or None if the process has ended."""
    try:
        text = Path(f"/proc/{process.pid}/status").read_text()
        return 1024 * int(next(line for line in text.splitlines() if line.startswith("RssAnon")).split()[1])
    except (OSError, StopIteration):
        return None


def ranks(launcher, script):
    """{local rank: process} of the processes of the launch that run the script."""
    found = {}
    with contextlib.suppress(psutil.Error):
        launcher = psutil.Process(launcher.pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            environment = process.environ()
            if script in " ".join(process.cmdline()) and ("LOCAL_RANK" in environment or script == EXPORT):
                found.setdefault(int(environment.get("LOCAL_RANK", 0)), process)
    return found


class Phases:
    """The most that process 0, another process, and all of them held in each phase, in bytes."""

    def __init__(self):
        self.most = {}

    def add(self, phase, held):
        main, others = held.get(0, 0), max((size for rank, size in held.items() if rank), default=0)
        now = {"main": main, "others": others, "node": sum(held.values())}
        before = self.most.get(phase, now)
        self.most[phase] = {key: max(now[key], before[key]) for key in now}


def watched(line, folder, phases, phase_of, script=RECIPE, until=lambda: False):
    """Runs the launch and samples its processes until it ends, or kills it when `until` is true. Returns its seconds.

    phase_of: of the text that it has printed, the name of its phase; None before the imports are done. script: which
    of its processes are watched.
    """
    log, began = folder / "log", time.monotonic()
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB // 4), "OMP_NUM_THREADS": "1"}
    with open(log, "w") as out:
        launcher = subprocess.Popen(
            line, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, preexec_fn=die_with_me
        )
    processes, imported = {}, {}
    while launcher.poll() is None:
        text = log.read_text()
        phase = phase_of(text)
        if len(processes) < PROCESSES:
            processes = ranks(launcher, script)
        sizes = {rank: size for rank, process in processes.items() if (size := own_memory(process)) is not None}
        if phase is None:
            imported = sizes
        else:
            phases.add(phase, {rank: size - imported.get(rank, 0) for rank, size in sizes.items()})
        if until():
            launcher.kill()
            launcher.wait()
            psutil.wait_procs(list(processes.values()), timeout=60)
            return time.monotonic() - began
        time.sleep(0.1)
    if launcher.returncode:
        sys.exit(text[-3000:])
    return time.monotonic() - began


def add_estimates(phases, config, words):
    """Adds to each phase what `./launch.sh estimate` says of it."""
    line = ["./launch.sh", "estimate", "--json", str(config), "--", "gpt", *words]
    said = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    estimated = json.loads(said.splitlines()[-1])["configs"][config.stem]["phases"]
    for phase, held in phases.items():
        held |= {f"{key}_estimated": round(size / MIB) for key, size in estimated[phase].items()}
        print(phase, held, flush=True)


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--model", default="llama_1b")
    args = parser.parse_args()
    os.environ["FAITHFUL_ASYNC_SAVE"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        text = (ROOT / "accelerate_configs" / "fsdp_fp8_msamp_o2.yml").read_text()
        text = text.replace("fsdp_cpu_ram_efficient_loading: false", "fsdp_cpu_ram_efficient_loading: true")
        config, run = folder / "fsdp_fp8_msamp_o2.yml", folder / "run"
        config.write_text(text.replace("num_processes: 2", f"num_processes: {PROCESSES}"))
        write_texts(folder / "texts")
        words = options(args.model, folder / "texts")
        line = ["./launch.sh", str(config), "gpt", *words, "--output_dir", str(run)]
        phases, seconds = Phases(), {}
        checkpoint = run / "checkpoint-3"

        def first(text):
            if not (run / "data.json").exists():  # it is written between preparing and the first step
                return "build" if "asked: " in text else None
            return "save" if checkpoint.with_name("checkpoint-3.tmp").exists() else "train"

        seconds["until it was killed"] = watched(line, folder, phases, first, until=checkpoint.exists)
        saved = sum(file.stat().st_size for file in checkpoint.iterdir())

        def second(text):
            if "resumed from " not in text:
                return "load" if "asked: " in text else None
            return "end" if "step 4: " in text else "train"

        seconds["going on"] = watched([*line, "--resume_from_checkpoint", "latest"], folder, phases, second)
        exported = Phases()
        line = ["./launch.sh", "export", str(run)]
        seconds["export"] = watched(line, folder, exported, lambda text: "export", script=EXPORT)
        parameters = json.loads((run / "run.json").read_text())["evidence"]["parameters"]
        with safe_open(run / "export.safetensors", "pt") as file:
            tensors = len(list(file.keys()))
        for phase, held in phases.most.items():
            phases.most[phase] = {key: round(size / MIB) for key, size in held.items()}
        add_estimates(phases.most, config, words)
        if args.output:
            figures = {"command": command(), "model": args.model, "parameters": parameters, "processes": PROCESSES,
                       "checkpoint_bytes": saved, "tensors_exported": tensors, "phases": phases.most,
                       "export": round(exported.most["export"]["main"] / MIB), "seconds": seconds}  # fmt: skip
            save(args.output, figures, ("accelerate", "transformers"))
        shutil.rmtree(run)


if __name__ == "__main__":
    main()
