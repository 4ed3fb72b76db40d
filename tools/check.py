"""Checks config files and prints all their problems at once, without launching anything.

    ./launch.sh check                      all files of accelerate_configs/
    ./launch.sh check fsdp_fp16 my.yml     these, and whether this machine can run them
    ./launch.sh check ddp_bf16 --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 --main_process_port 29500
                                           with accelerate launch's options: ranks, rendezvous, port, hostfile

A file may be anybody's. Each gets a line that says what it will be, one for each thing that runs otherwise than the
file's words say (note), and one for each problem. The rules are the same as at launch (config/rules.py). The exit
code is 2 if there is a problem. The list also shows correct configs that cannot run on this machine; that counts as a
problem only if you named the config.
"""

import argparse
import functools
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from faithful.config import config_file, fp8, keys, rules  # noqa: E402
from faithful.config.fsdp import FSDP  # noqa: E402
from faithful.config.settings import TAILS, Settings, read_env, to_env  # noqa: E402
from faithful.disk.documents import Unreadable, text_of  # noqa: E402
from faithful.launch import machine  # noqa: E402
from tools import cli, find  # noqa: E402

# Options of accelerate launch about the number of processes and their rendezvous.
OPTIONS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend",
           "max_restarts")  # fmt: skip


def check(
    path: Path, here: machine.Machine, overrides: dict[str, Any]
) -> tuple[list[str], list[str], list[str], Settings | None]:
    """Returns (problems of the file, reasons why this machine cannot run it, notes, what the file asks for)."""
    lines, mapping = config_file.file_problems(path)
    if mapping is None:
        return lines, [], [], None
    mapping = mapping | overrides
    mapping.setdefault("num_processes", config_file.default_processes(mapping, here.devices))
    wanted = read_env(to_env(mapping))
    here = machine.without_accelerator() if config_file.asks_for_cpu(mapping) else here
    anywhere = machine.Machine("cuda", 1 << 30, "any GPU", (10, 0), "99", machine.PACKAGES)
    unsound = rules.problems(wanted, anywhere)
    if not rules.problems(wanted, machine.without_accelerator()):
        unsound = []  # what no GPU runs may be for a rehearsal
    not_here = [line for line in rules.problems(wanted, here) if line not in unsound]
    not_here += problems_of_machines(mapping, os.environ)
    notes = [*config_file.file_notes(mapping), *rules.notes(wanted, here)]
    if not lines and mapping.get("mixed_precision") is None and wanted.precision == "fp32":
        notes.append("the file says no precision: it is the script's, and fp32 if the script says none either")
    return lines + unsound, not_here, notes, wanted


def problems_of_machines(config: Mapping[str, Any], env: Mapping[str, str]) -> list[str]:
    """Problems of a launch on one or several machines: ranks, rendezvous, port, hostfile. config: the file's mapping,
    updated with the command line's options. env: the launcher's environment."""
    machines, processes = config.get("num_machines") or 1, config.get("num_processes") or 1
    rank, port, lines = config.get("machine_rank") or 0, config.get("main_process_port"), []
    if config.get("mpirun_config") and not (shutil.which("mpirun") or shutil.which("mpiexec")):
        lines.append("mpirun_config needs mpirun, which is not installed: install Open MPI, or set MULTI_GPU")
    elastic = config.get("rdzv_backend") == "c10d" and env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
    if config.get("max_restarts") and not elastic:
        lines.append(rules.IN_VAIN)
    if port and rank == 0 and rules.port_in_use(port):
        lines.append(f"port {port} of this machine is in use: choose another --main_process_port")
    if machines == 1:
        return lines
    if processes % machines:
        lines.append(
            f"{processes} processes cannot be divided over {machines} machines: --num_processes counts those of all "
            f"machines, so it is a multiple of {machines}"
        )
    if not 0 <= rank < machines:
        lines.append(f"machine_rank {rank} is not one of 0 to {machines - 1}: give each machine its own")
    address = str(config.get("main_process_ip") or "")
    if not address:
        lines.append("several machines need --main_process_ip: pass the address of machine 0 on each of them")
    elif address == "localhost" or address.startswith("127."):
        lines.append(f"main_process_ip {address} means each machine itself: give the address of machine 0")
    elif not resolves(address):
        lines.append(
            f"main_process_ip {address} is not an address, or a name that this machine can resolve: give the address "
            "of machine 0"
        )
    if config.get("rdzv_backend") == "c10d" and not port:
        lines.append("several machines need --main_process_port: pass the same free port of machine 0 on each of them")
    if config.get("distributed_type") == "DEEPSPEED":
        lines += problems_of_hostfile(config.get("deepspeed_config") or {}, processes)
    return lines


def problems_of_hostfile(section: Mapping[str, Any], processes: int) -> list[str]:
    """Problems of DeepSpeed's own launchers (pdsh and others). `standard` is torchrun, as for the other strategies."""
    launcher = section.get("deepspeed_multinode_launcher", "pdsh")
    if launcher == "standard":
        return []
    path = section.get("deepspeed_hostfile")
    advice = "set deepspeed_multinode_launcher: standard in deepspeed_config to launch on each machine, as elsewhere"
    if not path:
        return [f"deepspeed_multinode_launcher {launcher} needs a deepspeed_hostfile: {advice}"]
    try:
        rows = [line.split("#")[0].split() for line in text_of(str(path)).splitlines()]
    except Unreadable as error:
        return [f"deepspeed_hostfile {path} {error}: {advice}"]
    slots = [words[1].partition("slots=")[2] if len(words) == 2 else "" for words in rows if words]
    if not slots or not all(map(keys.digits, slots)):
        return [f"deepspeed_hostfile {path}: every line is `name slots=4`"]
    if sum(map(int, slots)) < processes:
        return [f"deepspeed_hostfile {path} has {sum(map(int, slots))} slots for {processes} processes"]
    return []


def resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):  # a name may hold no empty or long part
        return False


def description(wanted: Settings, rehearsal: bool = False) -> str:
    """What a file will be, in a few words: `fsdp x8, bf16, sharded by LlamaDecoderLayer; as FSDP2`. rehearsal: whether
    that is on a CPU here, by the file's word or because there is no GPU."""
    words = [f"{wanted.strategy} x{wanted.num_processes}"]
    words.append(fp8.in_words(wanted.precision, wanted.backend, wanted.level, wanted.fp8.options))
    fsdp = wanted.fsdp if wanted.sharded else FSDP()
    if fsdp.wrap_policy == "NO_WRAP":
        words.append("sharded as a whole")
    elif fsdp.wrap_classes:
        words.append(f"sharded by {', '.join(fsdp.wrap_classes)}")
    words += [tail for tail in TAILS if getattr(wanted, tail)]
    as_fsdp2 = "; as FSDP2" if wanted.sharded and fsdp.version == 1 else ""
    return ", ".join(words) + as_fsdp2 + ("; rehearsal on a CPU" if rehearsal else "")


def missing_option(path: Path, here: machine.Machine, overrides: dict[str, Any]) -> str:
    """The option for accelerate launch that a file leaves out: --num_processes, or "". A file of accelerate_configs/
    runs on all GPUs there are, unless it says the sizes of a device mesh, which are for so many processes."""
    mapping = config_file.read(path)[1] or {}
    ours = here.devices and path.resolve().parent == config_file.OURS and not mapping.get("parallelism_config")
    if "num_processes" in overrides or (mapping.get("num_processes") and not ours):
        return ""
    if mapping.get("distributed_type") in ("NO", "MULTI_CPU"):
        return ""
    return f"--num_processes {here.devices if ours else config_file.default_processes(mapping, here.devices)}"


def threads(wanted: Settings, here: machine.Machine) -> int:
    """The threads of each process where its CPU computes the optimizer step, beside GPUs: its share of the cores.
    Accelerate's own default for several processes is 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // min(here.devices, wanted.num_processes) if here.devices and wanted.offload else 1
    return 1 if "OMP_NUM_THREADS" in os.environ else share


def whole_number(name: str, text: str) -> int:
    """The value of an option, for argparse: a number in the range of the key with its name."""
    key = keys.ROWS.get(name) or keys.Key(name, "int", least=0, most=keys.MANY)
    if said := keys.wrong(key, text):
        raise argparse.ArgumentTypeError(said)
    return int(text)


def main(argv: list[str]) -> int:
    parser = cli.parser("check", __doc__)
    if argv[:1] == ["--quiet"]:  # ./launch.sh asks before a launch
        parser.prog = "accelerate launch"
    parser.add_argument("configs", nargs="*", help="names or paths; default: all of accelerate_configs/")
    for name in OPTIONS:
        kind = str if name in ("main_process_ip", "rdzv_backend") else functools.partial(whole_number, name)
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=kind, help="as accelerate launch's")
    parser.add_argument("-q", "--quiet", action="store_true", help="print problems, and options that the file lacks")
    for option, takes_value in find.launch_options().items():  # whose values the launcher itself checks
        name = option.lstrip("-")
        if name not in (*OPTIONS, "q", "quiet", "help", "h", "config_file"):
            words = {option, f"--{name.replace('_', '-')}"} if option.startswith("--") else {option}
            action = "store" if takes_value else "store_true"
            parser.add_argument(*words, dest=f"other_{name}", help=argparse.SUPPRESS, action=action)
    args = parser.parse_args(argv)
    paths = [find.config(name) for name in args.configs] or sorted((ROOT / "accelerate_configs").glob("*.yml"))
    here = machine.of_driver()
    overrides = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    failed = False
    for path in paths:
        if args.quiet and (option := missing_option(path, here, overrides)):
            overrides["num_processes"] = int(option.split()[1])
            print(option)
        problems, not_here, notes, wanted = check(path, here, overrides)
        said = getattr(args, "other_num_cpu_threads_per_process", None)
        if args.quiet and wanted and not said and (count := threads(wanted, here)) > 1:
            print(f"--num_cpu_threads_per_process {count}")
        failed |= bool(problems) or (bool(args.configs) and bool(not_here))
        if wanted and not (problems or not_here or args.quiet):
            rehearsal = not here.devices or config_file.asks_for_cpu(config_file.read(path)[1] or {})
            print(f"{path.name}: ok ({description(wanted, rehearsal)})")
        for line in () if args.quiet else notes:
            print(f"{path.name}: note: {line}")
        for line in problems:
            print(f"{path.name}: {line}", file=sys.stderr if args.quiet else sys.stdout)
        for line in not_here:
            print(f"{path.name}: not on this machine: {line}", file=sys.stderr if args.quiet else sys.stdout)
    return 2 if failed else 0


if __name__ == "__main__":
    cli.run(main)
