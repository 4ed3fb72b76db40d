"""What a config that shards needs of the host's memory, before, after and between the training steps.

P is the number of the model's parameters, as in estimate.py. Each process needs, in bytes,

  build           4 P, and then its part beside it; with fsdp_cpu_ram_efficient_loading or zero3_init_flag process 0
                  alone, and the others one parameter at a time
  train           on a CPU all of it, on a GPU what is offloaded
  save            what it holds, and a second copy of it while training goes on; none with FAITHFUL_ASYNC_SAVE=0
  load            as build: a script builds the model before it loads, and files are read tensor by tensor
  end             what it holds, and the largest block whole, or twice the largest parameter, as it is gathered
"""

import os
from collections.abc import Sequence
from typing import Any

from faithful.config.settings import Settings


def phases(
    settings: Settings,
    state: float,
    held: float,
    runtime: float,
    plain: dict[str, Any],
    largest: int,
    training: float | None,
) -> dict[str, dict[str, int]]:
    """{phase: {main, others, node: bytes of process 0, of each other process, and of all of a machine at one moment}}.

    state: bytes of a checkpoint. held: what training holds on the host between two steps, with `runtime`; all of it on
    a CPU, on a GPU only what is offloaded. largest: the parameters of the largest block. training: what it needs, or
    None if it needs nothing.
    """
    part = runtime + 4 * plain["parameters"] / settings.shards if held else 0
    whole, block = 4 * plain["parameters"], 4 * largest
    copy = 0 if os.environ.get("FAITHFUL_ASYNC_SAVE") == "0" else state
    sent = 4 * plain["largest"] if settings.ram_efficient else 0  # each process holds it whole
    gathered = 2 * 4 * plain["largest"]  # each process holds it twice for a moment
    build = whole + part + sent, (sent or whole) + part
    needs: dict[str, Sequence[float]] = {
        "build": build,
        "save": (held + copy, held + copy),
        "load": [max(size, held) for size in build],
        "end": (held + max(2 * block, gathered), held + max(block, gathered)),
    }
    if training is not None:
        needs["train"] = training, training
    n = settings.num_processes
    found = {}
    for name, (main, others) in needs.items():
        node = main + (n - 1) * others
        if settings.ram_efficient and name in ("build", "load"):
            # The others hold only what is being sent while process 0 holds most.
            node = max(main + (n - 1) * (runtime + sent), n * others)
        found[name] = {"main": round(main), "others": round(others), "node": round(node)}
    return found
