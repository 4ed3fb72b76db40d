"""The tables of checkpoints and of models that are sharded, for benchmarks/tables.py."""

from benchmarks.provenance import came_from
from tools import report

KILLS = ("orphans", "failed_starts", "lost", "unequal")
SAVING = ("blocked", "whole", "memory", "load", "load_memory")  # of a row of results/saving.json


def kills(figures):
    """Counts of one campaign: in which phase of a run the kills hit, and what went wrong."""
    phases = (("launcher", "imports and rendezvous", "model and first step"), ("training", "end"), ("saving",))
    rows = []
    for row in figures["rows"]:
        cells = [row["kills"], *(sum(row["phase"].get(name, 0) for name in group) for group in phases)]
        rows.append([f"`{row['config']}`", *cells, *(row[key] for key in KILLS)])
    rows.append(["all", *map(sum, zip(*(row[1:] for row in rows), strict=True))])
    heads = ["config", "kills", "while starting", "training", "saving", *(key.replace("_", " ") for key in KILLS)]
    return f"{came_from(figures)}:\n\n{report.table(heads, [[str(cell) for cell in row] for row in rows])}"


def phases(figures):
    """MiB that a process holds at the peak of each phase."""
    names = list(figures["rows"][0]["main"])
    rows = [
        [f"`{row['config']}`", str(row["processes"]), row["code"],
         *(f"{row['main'][name]:,.0f}, {row['others'][name]:,.0f}" for name in names)]
        for row in figures["rows"]
    ]  # fmt: skip
    text = f"{came_from(figures)}; one copy of the weights in fp32 is {figures['whole']:,.0f} MiB:"
    return f"{text}\n\n{report.table(['config', 'processes', 'code', *names], rows)}"


def saving(figures):
    """Seconds that a checkpoint takes by each way, and the memory that a process needs for it."""
    heads = ["processes", "way", "training stands still, s", "until written, s", "memory over the state held",
             "load, s", "memory of loading"]  # fmt: skip
    rows = [
        [str(row["processes"]), row["way"], *(f"{row[key]:.2f}" if key in row else "" for key in SAVING)]
        for row in figures["rows"]
    ]
    text = f"{came_from(figures)}; {figures['bytes'] / 1e9:.2f} GB in all, medians of {figures['rounds']} rounds:"
    return f"{text}\n\n{report.table(heads, rows)}"


def loading(figures):
    """Seconds until a model from a safetensors file is sharded, with an earlier version and now."""
    heads = ["config", "processes", "code", "from_pretrained, process 0", "from_pretrained, slowest other", "prepare",
             "parameters read"]  # fmt: skip
    rows = [
        [f"`{row['config']}`", str(row["processes"]), row["code"],
         *(f"{row[key]:.2f}" for key in ("process 0", "others", "prepare")), f"{row['read']:.0f}"]
        for row in figures["rows"]
    ]  # fmt: skip
    text = f"{came_from(figures)}; {figures['parameters'] / 1e6:,.0f} million parameters, seconds, medians of "
    return f"{text}{figures['rounds']} rounds:\n\n{report.table(heads, rows)}"


def large(figures):
    """MiB that a process and the machine hold at the peak of each phase, beside what estimate says."""
    rows = [
        [phase, *(f"{held[key]:,} ({held[f'{key}_estimated']:,})" for key in ("main", "others", "node"))]
        for phase, held in figures["phases"].items()
    ]
    rows.append(["export", f"{figures['export']:,}", "", ""])
    text = f"{came_from(figures)}; {figures['parameters'] / 1e6:,.0f} million parameters, {figures['processes']} "
    text += f"processes, a checkpoint of {figures['checkpoint_bytes'] / 1e9:.1f} GB:"
    heads = ["phase", "process 0, MiB (estimated)", "largest other", "all together at one moment"]
    return f"{text}\n\n{report.table(heads, rows)}"
