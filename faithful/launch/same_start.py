"""What has to be the same in all processes of a run, wherever they were started: the plan, the arguments of the script,
what the launcher exports, the code and the packages. Each process tells its own where they meet, before a model is
built, and if they differ all of them end with one line that names what does.

Not compared is what may differ from machine to machine: the options PER_MACHINE, secrets, and paths. An argument is a
path if it begins like one, or if the name of its option ends like one; of a file of settings the content is compared.
"""

import json
import os
import re
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from faithful.config import settings
from faithful.disk import secrets
from faithful.errors import Different
from faithful.launch import launcher, machine

PER_MACHINE = {"local_rank", "node_rank", "machine_rank", "dataloader_num_workers", "num_workers", "report_to"}
OF_PATHS = re.compile(r"(?!.*_or_path$)(.*_)?(dir|folder|file|path)|resume_from_checkpoint")  # names of options
NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?", re.IGNORECASE)
SETTINGS = (".yaml", ".yml", ".json", ".toml")  # files of settings, by their suffix
EXPORTED = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")  # by accelerate launch, from the config
MOST = 4  # differences that the line names
compared: set[int] = set()  # processes that have compared; a fork begins anew
Started = dict[str, dict[str, str]]  # {kind: {name: value}}, with the kinds below
# {kind: whether all processes have to have what one has}
KINDS = {"plan": True, "arguments": True, "exported": True, "packages": False, "code": False}


def here(plan: Mapping[str, object]) -> Started:
    """What this process was started with."""
    versions = {name: str(version) for name, version in machine.versions().items() if version}
    versions["python"] = versions["python"].rpartition(".")[0]
    exported = {name: value_of(value) for name, value in os.environ.items() if name.startswith(EXPORTED)}
    return {
        "plan": {"script": Path(sys.argv[0]).name} | {name: str(value) for name, value in plan.items()},
        "arguments": arguments(sys.argv[1:]),
        "exported": exported,
        "packages": versions,
        "code": dict(code()),
    }


def arguments(words: Sequence[str]) -> dict[str, str]:
    """{option: value} of a command line, spelled one way; {argument n: value} of words without an option."""
    found: dict[str, list[str]] = {}
    option = ""
    for word in words:
        if word.startswith("-") and len(word) > 1 and not NUMBER.fullmatch(word):
            name, equals, value = word.partition("=")
            option = "--" + name.lstrip("-").replace("-", "_")
            found.setdefault(option, []).extend([value] if equals else [])
        else:
            found.setdefault(option or f"argument {len(found) + 1}", []).append(word)
    return {
        name: " ".join(value_of(value, name.lstrip("-")) for value in values) or "given"
        for name, values in found.items()
        if not (name.lstrip("-") in PER_MACHINE or secrets.is_secret(name))
    }


def value_of(text: str, option: str = "") -> str:
    """A value as it is compared: numbers in one spelling, and no path."""
    if text.endswith(SETTINGS) and Path(text).is_file():
        return f"{Path(text).name} with the hash {hash_of(Path(text))}"
    if text.startswith(("/", "~", "./", "../")) or (OF_PATHS.fullmatch(option) and text != "latest"):
        return "a path"
    try:
        return repr(float(text)).removesuffix(".0") if NUMBER.fullmatch(text) else text
    except ValueError:
        return text


def code() -> Iterator[tuple[str, str]]:
    """(file, hash) of the script and of the modules that are imported, without those of installed packages and Python's
    own."""
    script, python = Path(sys.argv[0]), sysconfig.get_path("stdlib")
    if script.is_file():
        yield script.name, hash_of(script)
    for name, module in sorted(sys.modules.items()):
        file = str(getattr(module, "__file__", None) or "")
        installed = file.startswith(python) or "site-packages" in file or "dist-packages" in file
        ours = name.partition(".")[0] in ("faithful", "amp8")
        if file.endswith(".py") and name != "__main__" and (ours or not installed):
            with_suffix = name.replace(".", "/") + ".py"
            if Path(file).is_file():
                yield with_suffix, hash_of(Path(file))


def hash_of(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()[:12]


def compare(plan: Mapping[str, object], world: int) -> None:
    """Waits for what all processes were started with. Raises Different, in all of them, if it is not the same. Once in
    a process: its later Accelerators may ask for something else."""
    if os.getpid() in compared:
        return
    compared.add(os.getpid())
    store, rank = launcher.store(), settings.rank()
    store.set(f"started/{rank}", json.dumps([socket.gethostname(), here(plan)]))
    line = ""
    if rank == 0:
        told = [json.loads(store.get(f"started/{other}")) for other in range(world)]
        line = difference([started for _, started in told], [host for host, _ in told])
    line, *_ = launcher.wait_for_all("start", line, world)
    if line:
        raise Different(line)


def difference(started: Sequence[Started], hosts: Sequence[str]) -> str:
    """The line that names what differs, or "". started, hosts: of each rank."""
    lines = []
    for kind, by_all in KINDS.items():
        if kind == "exported" and lines:  # in the plan's words already
            continue
        for name in dict.fromkeys(name for each in started for name in each[kind]):
            values: dict[str, list[int]] = {}
            for rank, each in enumerate(started):
                if by_all or name in each[kind]:
                    values.setdefault(each[kind].get(name, "not given"), []).append(rank)
            if len(values) > 1:
                where = [who(ranks, list(values.values()), hosts) for ranks in values.values()]
                if kind == "code":
                    lines.append(f"{name} is one file on {', another on '.join(where)}")
                else:
                    said = (value if len(value) <= 60 else f"{value[:57]}..." for value in values)
                    at = ", ".join(f"{value} on {place}" for value, place in zip(said, where, strict=True))
                    lines.append(f"{name} is {at}")
    if not lines:
        return ""
    more = f"; and {len(lines) - MOST} more" if len(lines) > MOST else ""
    return (
        f"the processes were started differently: {'; '.join(lines[:MOST])}{more}: start all with the same command, "
        "config, code and packages"
    )


def who(ranks: Sequence[int], groups: Sequence[Sequence[int]], hosts: Sequence[str]) -> str:
    """Where these ranks are: their machine, and how many others. The rank, where a machine is in two groups."""
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    others = {hosts[rank] for group in groups if group is not ranks for rank in group}
    first, more = (f"rank {ranks[0]}", len(ranks) - 1) if others & {*names} else (names[0], len(names) - 1)
    return f"{first} and {more} more" if more else first
