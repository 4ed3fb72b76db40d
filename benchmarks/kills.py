"""Kills runs with SIGKILL at random moments, starts each again at once, and counts what went wrong.

    python benchmarks/kills.py ddp_bf16 --kills 8 --seed 1 --output results/kills.json
    python benchmarks/kills.py single_bf16 ddp_bf16 fsdp_fp8 ddp_fp8_msamp_o3 zero2_bf16 tp_bf16 --kills 100 \
        --output results/kills.json
    python benchmarks/kills.py fsdp_fp8 --moments step save --kills 8 --output kills.json
    python benchmarks/kills.py ddp_bf16 --recipe "resnet --max_steps 60 --save_steps 6" --kills 8 --output kills.json

A kill hits the launcher alone, one worker, or every process of the launch, while the run starts, trains or writes a
checkpoint. Then the same command is started again immediately, as a supervisor does.

orphans         processes that are still there 30 seconds after their launcher was killed (they are ended then)
failed_starts   launches that ended with an error without having been killed, or took no step in 200 seconds (on a busy
                machine: in ten times as long as the first launch needed for it)
lost            launches that went on from an older checkpoint than the newest complete one
unequal         runs that ended with other weights or logged values than the run that was never killed
"""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from harness import ROOT, arguments, marked, save

OUTLIVE, NO_STEP = 30, 200  # seconds
VICTIMS = ("launcher", "worker", "everything")
MOMENTS = {"start": 5, "step": 2, "save": 3}  # how often each is drawn
VIT = "vit --max_steps 60 --save_steps 6 --eval_steps 20"
GPT = f"gpt --model llama_nano --dataset {ROOT / 'faithful' / 'config' / 'rules.py'} --sequence_length 32 "
GPT += "--max_steps 24 --save_steps 4 --eval_steps 12"


class Launch:
    """One launch of a run. Its processes are found by an environment variable."""

    def __init__(self, config, words, out, number):
        self.out, self.log = out, out.with_name(f"{out.name}-{number}.log")
        self.mark = "KILLS_LAUNCH", f"{out}-{number}"
        self.began, self.killed_at, self.resumable = time.time(), None, newest(out)
        recipe, *options = words
        line = ["./launch.sh", config, recipe, *options, "--output_dir", str(out), "--logging_steps", "1"]
        line += ["--resume_from_checkpoint", "latest"]
        env = os.environ | dict([self.mark]) | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.log.open("w") as log:
            self.launcher = subprocess.Popen(line, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)

    def text(self):
        return self.log.read_text(errors="replace")

    def last_words(self):
        """The last line of output with an error, else the last line, without the folders of this machine."""
        lines = [line for line in self.text().splitlines() if line.strip()]
        said = [line for line in lines if re.search("error", line, re.I)] or lines or [""]
        return re.sub(r"(/[^/\s:]+)+/", "", said[-1])[:300]

    def steps(self):
        """Optimizer steps that this launch has logged."""
        return len(re.findall(r"^step \d+(?:/\d+)?: loss", self.text(), re.M))

    def processes(self):
        """The ids of all processes of this launch, including the launcher."""
        return [process.pid for process in marked(*self.mark)]

    def workers(self):
        try:
            children = psutil.Process(self.launcher.pid).children()
            return [child.pid for child in children if "recipes/" in " ".join(child.cmdline())]
        except psutil.Error:
            return []

    def phase(self):
        text = self.text()
        if not self.workers():
            return "launcher"
        if "asked: " not in text:
            return "imports and rendezvous"
        if "B/param" not in text:
            return "model and first step"
        if list(self.out.glob("checkpoint-*.tmp")):
            return "saving"
        return "end" if "eval_loss" in text.splitlines()[-1] else "training"

    def kill(self, victim, chance):
        """Kills, and returns which processes were killed and what the run was doing."""
        phase, workers = self.phase(), self.workers()
        if victim == "worker" and not workers:
            victim = "launcher"
        targets = {"launcher": [self.launcher.pid], "worker": workers and [chance.choice(workers)]}
        for pid in targets.get(victim) or self.processes():
            end(pid)
        self.killed_at = time.time()
        return victim, phase


def end(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def newest(out):
    """The step of the newest complete checkpoint, or 0."""
    names = [path.name for path in out.glob("checkpoint-*")] if out.exists() else []
    return max((int(name[11:]) for name in names if name[11:].isdigit()), default=0)


def result(out):
    """The result that must be equal at the end: (bytes of the weights' file, logged values)."""
    return (out / "model" / "model.safetensors").read_bytes(), (out / "metrics.jsonl").read_text()


class Campaign:
    def __init__(self, config, words, folder, chance, moments):
        self.config, self.words, self.folder, self.chance, self.moments = config, words, folder, chance, moments
        self.launches, self.runs, self.events, self.ended = 0, 0, [], []
        self.counts = Counter(launches=0, runs=0, orphans=0, failed_starts=0, lost=0, unequal=0)
        began = time.time()
        launch = Launch(config, words, folder / "whole", 0)
        while not launch.steps() and launch.launcher.poll() is None:
            time.sleep(0.05)
        self.start_up = time.time() - began
        if launch.launcher.wait():
            raise SystemExit(f"{config} does not run at all:\n{launch.text()[-3000:]}")
        self.expected = result(launch.out)

    def launch(self, out):
        self.counts["launches"] += 1
        return Launch(self.config, self.words, out, self.counts["launches"])

    def look_after(self, wait=False):
        """Counts and kills the processes of killed launches that should have ended by now."""
        for launch in list(self.ended):
            left = launch.processes()
            if left and time.time() < launch.killed_at + OUTLIVE and not wait:
                continue
            while left and time.time() < launch.killed_at + OUTLIVE:
                time.sleep(0.2)
                left = launch.processes()
            self.counts["orphans"] += len(left)
            if left:
                self.events.append({"orphans": len(left), "last_words": launch.last_words()})
            for pid in left:
                end(pid)
            self.ended.remove(launch)
            launch.launcher.wait()

    def until(self, launch, reached):
        """Waits until `reached()` and returns "reached", or returns "finished" or "failed" if the run ends before."""
        looked = time.time()
        while not reached():
            if launch.launcher.poll() is not None:
                return "finished" if launch.launcher.returncode == 0 else "failed"
            if not launch.steps() and time.time() > launch.began + max(NO_STEP, 10 * self.start_up):
                return "failed"
            if time.time() > looked + 1:
                self.look_after()
                looked = time.time()
            time.sleep(0.005)
        return "reached"

    def moment(self, launch):
        """Returns a function that says whether it is time to kill. It is called again and again."""
        weights = [MOMENTS[name] for name in self.moments]
        kind, draw = self.chance.choices(self.moments, weights)[0], self.chance.random()
        if kind == "start":
            return lambda: time.time() > launch.began + draw * self.start_up
        if kind == "step":
            return lambda: launch.steps() > 1 + 8 * draw
        return lambda: launch.steps() and any(launch.out.glob("checkpoint-*.tmp"))

    def check(self, launch):
        """Checks that the launch resumed from the newest checkpoint."""
        resumed = re.search(r"resumed from \S+ at step (\d+)", launch.text())
        started = re.search(r"starting at step 0", launch.text())
        step = int(resumed[1]) if resumed else 0 if started else None
        if step is not None and step < launch.resumable:
            self.counts["lost"] += 1
            self.events.append({"lost": f"checkpoint-{launch.resumable}, but went on from step {step}"})

    def run(self, kills):
        out, victims = None, []
        while True:
            if out is None:
                self.counts["runs"] += 1
                out = self.folder / f"run-{self.counts['runs']}"
            launch = self.launch(out)
            strike = self.moment(launch) if kills else lambda: False
            outcome = self.until(launch, strike)
            self.check(launch)
            if outcome == "reached":
                victims = victims or self.chance.sample(VICTIMS, 3)  # each as often as the others
                victim, phase = launch.kill(victims.pop(), self.chance)
                kills -= 1
                self.events.append({"killed": victim, "phase": phase, "seconds": round(time.time() - launch.began, 2)})
                print(f"{self.config}: {victim} killed, {phase}; {kills} to go", flush=True)
            elif outcome == "failed":
                self.counts["failed_starts"] += 1
                self.events.append({"failed_start": launch.last_words()})
                print(f"{self.config}: a start failed\n{launch.text()[-600:]}", flush=True)
                if self.counts["failed_starts"] > 20:
                    raise SystemExit("more than 20 starts failed")
                for pid in launch.processes():
                    end(pid)
            elif result(out) != self.expected:
                self.counts["unequal"] += 1
                self.events.append({"unequal": out.name})
            if outcome != "finished":
                launch.killed_at = launch.killed_at or time.time()
                self.ended.append(launch)
            elif kills:
                out = None
            else:
                break
        self.look_after(wait=True)
        killed = [event for event in self.events if "killed" in event]
        row = {"config": self.config, "recipe": self.words[0], "kills": len(killed)} | self.counts
        row |= {key: dict(Counter(event[key] for event in killed)) for key in ("killed", "phase")}
        return row | {"events": self.events}


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--recipe", type=shlex.split, help=f"and its options; default: {VIT!r}, for tp gpt")
    parser.add_argument("--kills", type=int, default=8, help="in all, shared out among the configs")
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=list(MOMENTS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = []
    for at, config in enumerate(args.configs):
        words = args.recipe or (GPT if "tp_" in config or "_sp_" in config else VIT).split()
        kills = args.kills // len(args.configs) + (at < args.kills % len(args.configs))
        folder = Path(tempfile.mkdtemp(prefix="kills-"))
        chance = random.Random(f"{args.seed} {config}")
        rows.append(Campaign(config, words, folder, chance, args.moments).run(kills))
        shutil.rmtree(folder)
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "events"}), flush=True)
        save(args.output, {"seed": args.seed, "rows": rows}, ("accelerate",))


if __name__ == "__main__":
    main()
