"""Starts two machines in sixteen cases in which something differs, dies or never comes, and sees how that ends.

    python benchmarks/machines.py --output results/machines.json
    python benchmarks/machines.py --by accelerate --cases learning_rate killed_1 --output machines.json

The machines are two network namespaces with names and disks of their own (it needs root). Each case runs under
./launch.sh, with recipes/vit.py, and under `accelerate launch` and torchrun, as they are, with the loop `plain` below:
Accelerate's own Accelerator, which saves every 10 steps and goes on from the newest checkpoint. In the cases of disks a
run has ended at step 40, and is started again with the machine's disk as the case says.

seconds     from the start, or from the kill or the signal, until both launchers have ended; null: not within LIMIT
exit_codes  of the two machines; null: still there after LIMIT
lines       printed by each machine, without those of a step
orphans     processes that are there 30 seconds after the launchers
lost        what the user has lost, and does not know of where the exit codes are 0
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
from harness import ROOT, arguments, command, made, marked, origin, save

LIMIT, STEPS = 120, 80
ADDRESS = "10.79.0.1"
HOSTS = ("zeta", "alpha")  # torch sorts them the other way
CASES = {  # {case: what the second machine gets instead, or what happens at step 25}
    "nothing": {},
    "learning_rate": {"argv": ["--learning_rate", "0.03"]},
    "seed": {"argv": ["--seed", "2"]},
    "precision": {"precision": "bf16"},
    "strategy": {"config": "fsdp_fp32"},
    "two_of_rank_0": {"rank": 0},
    "1_never_comes": {"comes": [0]},
    "0_never_comes": {"comes": [1]},
    "1_killed_and_back": {"kill": 1},
    "0_killed_and_back": {"kill": 0},
    "sigterm_to_launcher_0": {"signal": 0},
    "sigterm_to_a_worker": {"signal": 1, "worker": True},
    "link_cut": {"cut": True},
    "0_lost_its_disk": {"disk": 0},
    "1_lost_its_disk": {"disk": 1},
    "1_has_a_save_of_another_run": {"disk": 1, "other": True},
}
SHARED = ("1_killed_and_back", "0_killed_and_back", "sigterm_to_launcher_0", "sigterm_to_a_worker", "link_cut")
LAUNCHERS = ("./launch.sh", "accelerate", "torchrun")


def plain(output: str, learning_rate: float, seed: int, steps: int) -> None:
    """What a script does that knows nothing of this project. Saves as Accelerate does."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration, set_seed

    each = "DISK" in os.environ  # the machines have disks of their own
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(save_on_each_node=each))
    set_seed(seed)
    data = [(i, torch.randn(64)) for i in range(4096)]
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    order = torch.randperm(len(data)).tolist()  # by the seed, as in the recipes
    loader = torch.utils.data.DataLoader([data[at] for at in order], batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    folder, seen, step = Path(output), [], 0
    saved = sorted(folder.glob("checkpoint-*/done"), key=lambda file: int(file.parent.name.split("-")[1]))
    if saved:
        accelerator.load_state(str(saved[-1].parent))
        step = int(saved[-1].parent.name.split("-")[1])
    for numbers, values in loader:
        step += 1
        loss = model(values).square().mean()
        accelerator.backward(loss)
        optimizer.step(), optimizer.zero_grad()
        seen += numbers.tolist()
        time.sleep(0.05)
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
        if step % 10 == 0:
            accelerator.save_state(str(folder / f"checkpoint-{step}"))
            accelerator.wait_for_everyone()
            if accelerator.is_local_main_process if each else accelerator.is_main_process:
                (folder / f"checkpoint-{step}" / "done").touch()
        if step >= steps:
            break
    results = {"precision": accelerator.mixed_precision, "seen": seen,
            "weights": accelerator.unwrap_model(model).weight.double().sum().item()}  # fmt: skip
    (folder.parent / f"made-{os.environ['MACHINE']}.json").write_text(json.dumps(results))
    accelerator.end_training()


def line_of(by, case, machine, folder, steps=STEPS, own=()):
    """The command line of one machine, and its environment. own: more options."""
    there = CASES[case] if machine else {}
    rank = there.get("rank", machine)
    output = folder / ("run" if case in SHARED or "disk" in CASES[case] else f"disk{machine}/run")
    options = ["--output_dir", output, "--max_steps", 5000 if "signal" in CASES[case] else steps, *own]
    options += there.get("argv", [])
    env = {"MACHINE": str(machine), "MARK": str(folder), "OMP_NUM_THREADS": "1"}
    if by == "./launch.sh":
        config = there.get("config", f"ddp_{there.get('precision', 'fp32')}")
        words = ["--num_machines", 2, "--num_processes", 2, "--machine_rank", rank, "--main_process_ip", ADDRESS,
                 "--main_process_port", 29500, "--max_restarts", 3, "--monitor_interval", 1]  # fmt: skip
        own = ["--logging_steps", 1, "--save_steps", 10, "--eval_steps", 0, "--resume_from_checkpoint", "latest"]
        return [by, config, *words, "vit", *own, *options], env | {"COLLECTIVE_TIMEOUT": "20"}
    script = [ROOT / "benchmarks" / "machines.py", "train", *options]
    if by == "accelerate":
        words = ["--multi_gpu", "--num_machines", 2, "--num_processes", 2, "--machine_rank", rank, "--main_process_ip",
                 ADDRESS, "--main_process_port", 29500, "--rdzv_backend", "c10d", "--max_restarts", 3,
                 "--mixed_precision", there.get("precision", "no"), "--monitor_interval", 1]  # fmt: skip
        return ["accelerate", "launch", *words, *script], env
    words = ["--nnodes", 2, "--nproc_per_node", 1, "--node_rank", rank, "--rdzv_backend", "c10d", "--max_restarts", 3,
             "--rdzv_endpoint", f"{ADDRESS}:29500", "--monitor_interval", 1]  # fmt: skip
    return ["torchrun", *words, *script], env | {"ACCELERATE_MIXED_PRECISION": there.get("precision", "no")}


def start(machines, by, case, machine, folder, disk=None, **more):
    """Starts one machine. disk: it is where its processes see the run's folder."""
    line, env = line_of(by, case, machine, folder, **more)
    if disk:
        disk.mkdir(exist_ok=True), (folder / "run").mkdir(exist_ok=True)
        bind = 'mount --make-rprivate / && mount --bind "$0" "$1" && shift && exec "$@"'
        line, env = ["unshare", "--mount", "sh", "-c", bind, disk, folder / "run", *line], env | {"DISK": str(disk)}
    machines.start(machine, line, env)


def before(machines, by, case, folder):
    """A run that has ended, after which a machine has lost its disk, or has got a checkpoint of another run. Returns
    [the disk of each machine]."""
    disks = [folder / f"disk{machine}" for machine in (0, 1)]
    other = [folder / f"other{machine}" for machine in (0, 1)]
    for seed, where in enumerate([disks, other] if "other" in CASES[case] else [disks]):
        for machine in (0, 1):
            start(machines, by, case, machine, folder, where[machine], steps=STEPS // 2, own=["--seed", seed])
        if codes := [code for code in machines.wait() if code]:
            raise SystemExit(f"{by} {case}: the first run ends with {codes}\n{machines.log(0)[-2000:]}")
    at, newest = CASES[case]["disk"], f"checkpoint-{STEPS // 2}"
    if "other" in CASES[case]:
        shutil.rmtree(disks[at] / newest)
        shutil.copytree(other[at] / newest, disks[at] / newest)
    else:
        shutil.rmtree(disks[at])
    for file in [*folder.glob("**/made-*.json"), *folder.glob("node*.log")]:
        file.unlink()
    return disks


def measure(by, case, folder):
    sys.path[:0] = [str(ROOT / "tests" / "launch"), str(ROOT / "tests")]
    from test_machines import Machines

    what = CASES[case]
    comes = what.get("comes", [0, 1])
    with Machines(folder, HOSTS) as machines:
        disks = before(machines, by, case, folder) if "disk" in what else [None, None]
        there = complete(disks)
        steps = STEPS // 2 if "other" in what else STEPS  # goes on from step 30: a schedule of other steps is refused
        for machine in comes:
            start(machines, by, case, machine, folder, disks[machine], steps=steps)
        began = time.monotonic()
        if case in SHARED:
            until_step(folder / "run", 25)
            began = time.monotonic()
        if "kill" in what:
            machines.kill(what["kill"])
            start(machines, by, case, what["kill"], folder)
        elif "signal" in what:
            process = psutil.Process(machines.running[what["signal"]].pid)
            if "worker" in what:  # only the launcher's workers have a rank
                [process] = [child for child in process.children(recursive=True) if "RANK" in child.environ()]
            process.send_signal(signal.SIGTERM)
        elif "cut" in what:
            machines.cable("down")
        end = began + LIMIT
        while time.monotonic() < end and any(machines.running[machine].poll() is None for machine in comes):
            time.sleep(0.1)
        codes = [machines.running[machine].poll() if machine in comes else "absent" for machine in (0, 1)]
        seconds = None if None in codes else round(time.monotonic() - began, 1)
        for machine in comes:
            if codes[machine] is None:
                machines.running[machine].kill()
        orphans = left_behind(folder)
        lines = [len([line for line in log_of(machines, at) if not line.startswith("step ")]) for at in (0, 1)]
        gone = len(there - complete(disks))
        words = f"{gone} checkpoints" if gone and any(codes) else lost(case, codes, folder)
        return {"launcher": by, "case": case, "seconds": seconds, "exit_codes": codes, "lines": lines,
                "orphans": orphans, "lost": words}  # fmt: skip


def complete(disks):
    """The checkpoints on the machines' own disks."""
    return {path for disk in disks if disk for path in disk.glob("checkpoint-*[0-9]")}


def log_of(machines, at):
    file = machines.folder / f"node{at}.log"
    return machines.log(at).splitlines() if file.exists() else []


def rows(run):
    try:
        return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return []


def until_step(run, step):
    end = time.monotonic() + 120
    while max(rows(run), default=0) < step:
        if time.monotonic() > end:
            raise SystemExit(f"no step {step} in {run}")
        time.sleep(0.05)


def left_behind(folder):
    """Processes of this case that are there after 30 seconds. They are ended then."""
    end = time.monotonic() + 30
    while (found := marked("MARK", str(folder))) and time.monotonic() < end:
        time.sleep(0.5)
    for process in found:
        process.kill()
    return len(found)


def lost(case, codes, folder):
    """In words. Of a run that has ended, what is there of it tells."""
    run = folder / ("run" if case in SHARED else "disk0" if "disk" in CASES[case] else "disk0/run")
    left = [json.loads(file.read_text()) for file in sorted(folder.glob("**/made-*.json"))]
    kept = sorted(int(path.name.split("-")[1]) for path in run.glob("checkpoint-*[0-9]"))
    if codes == [0, 0]:
        words = ["the signal: it was started again, and trained on"] if "signal" in CASES[case] else []
        if not rows(run):
            words.append("the metrics and the model are on machine 1")
        if len(left) == 2:
            if left[0]["precision"] != left[1]["precision"]:
                words.append("each machine trained in another precision")
            if abs(left[0]["weights"] - left[1]["weights"]) > 1e-9:
                words.append("the replicas differ")
            if twice := len({*left[0]["seen"]} & {*left[1]["seen"]}):
                words.append(f"{twice} samples came twice")
        return ", ".join(words) or "nothing"
    if None in codes:
        return "the time until somebody looks"
    if "disk" in CASES[case] and codes == [2, 2]:
        return "nothing: it was refused"
    if kept and {*codes} == {143}:
        return f"nothing: saved at step {kept[-1]}"
    return f"the run after step {kept[-1]}" if kept else "the run" if case in SHARED else "nothing: it had not begun"


def main(argv):
    parser = arguments(__doc__)
    parser.add_argument("--by", nargs="+", default=LAUNCHERS, choices=LAUNCHERS)
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--output", default="results/machines.json", help="rows of cases that are left out are kept")
    args = parser.parse_args(argv)
    file = Path(args.output)
    nothing = {"rows": [], "command": ""}
    before = nothing if args.by == LAUNCHERS and args.cases == [*CASES] else made(file, **nothing)
    kept, commands = before["rows"], " && ".join(filter(None, [before["command"], command()]))
    origins = ("date", "device", "versions")
    old = {key: before[key] for key in origins if key in before}
    here = {key: value for key, value in origin(("accelerate",)).items() if key in origins} if old else {}
    for by in args.by:
        for case in args.cases:
            if case == "strategy" and by != "./launch.sh":
                continue  # plain Accelerate has no FSDP without a GPU
            folder = Path(tempfile.mkdtemp())
            row = measure(by, case, folder) | here  # of the rows that are there the file has it once
            print(json.dumps(row), flush=True)
            kept = [other for other in kept if (other["launcher"], other["case"]) != (by, case)] + [row]
            save(file, old | {"command": commands, "limit_seconds": LIMIT, "rows": kept}, ("accelerate",))
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        parser = arguments(__doc__)
        parser.add_argument("--output_dir")
        parser.add_argument("--learning_rate", type=float, default=0.001)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--max_steps", type=int)
        args = parser.parse_args(sys.argv[2:])
        plain(args.output_dir, args.learning_rate, args.seed, args.max_steps)
    else:
        main(sys.argv[1:])
