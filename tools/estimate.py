"""How much memory will this training need, per process, before anything is trained? And how long will a step take?

    ./launch.sh estimate single_bf16 fsdp_fp8 -- vit --model vit_huge --dataset synthetic
    ./launch.sh estimate --memory 80GB --num_processes 8 -- vit --model vit_huge      which of all configs would fit
    ./launch.sh estimate single_bf16 single_fp8 -- train.py --epochs 1                a script of your own

The recipe's own `main` runs through one optimizer step on fake tensors (shapes and dtypes, no storage), on the batch
it would begin with, converted to FP8 as in a rehearsal. So model, loss and optimizer are the recipe's, whatever they
are, and a tracing takes seconds for a model of any size. What forward and backward held at once at their worst moment,
beside gradients, is `activations`: saved tensors, 16-bit copies of the weights, temporary results. It is traced twice,
as it is and with every block checkpointed (FP8 configs: as bf16). Gradients come as activations go, so the total is
less than the sum of all columns.

Weights, gradients, master weights and optimizer state of one process are counted on the same fake tensors and divided
by rule; N processes share the state, P is the number of parameters, Adam's moments are the optimizer state meant:

  strategy        weights         gradients       master          optimizer     communication
  single          4 P             4 P             -               8 P           -
  ddp             4 P             4 P             -               8 P           4 P, its buckets
  fsdp, hsdp      4 P/N           4 P/N           -               8 P/N         gathered blocks, gradients on their way
  tp, fsdp_tp     4 P/N           4 P/N           -               8 P/N         its activations are counted whole
  zero1           2 P (fp32 4 P)  2 P/N (4 P/N)   4 P/N           8 P/N         its buckets
  zero2           2 P (4 P)       4 P/N           4 P/N           8 P/N         its buckets
  zero3           2 P/N (4 P/N)   4 P/N           4 P/N           8 P/N         2 P gathered, its buckets
  zero3_sp        as zero3: its activations are counted whole, though each process has those of a slice
  msamp o1 | o2   2 P             1 P             -               8 P | 3 P     of converted weights; the rest as above
  msamp o3        1 P             1 P/N           2 P/N           3 P/N
  ..., fsdp       2 P/N           1 P/N           -               8 or 3 P/N    blocks gathered in FP8, a bucket

FSDP2 that accumulates over micro-batches keeps the whole gradients in fp32 until it reduces them: 4 P in each process.
Around training a config that shards needs the host's memory, too: tools/host.py.

On a CPU `total` is the most of all phases; on a GPU it is that of training. fp16, bf16, ao and te keep fp32
parameters, as fp32 does. On a CPU the libraries take memory when first used (`runtime`), whatever the model. How far
off all this is, is measured: results/estimate.json, which benchmarks/estimate.py writes.
"""

import contextlib
import json
import multiprocessing
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import faithful  # noqa: E402
from faithful.config import config_file  # noqa: E402
from faithful.config.settings import Settings, read_env, to_env  # noqa: E402
from shared.args import Refused, short  # noqa: E402
from tools import cli, costs, find, host, progress  # noqa: E402

if TYPE_CHECKING:
    from tools.tracing import Script

Key = tuple[tuple[str, Any], ...]  # `tracing.trace`'s arguments, hashable

CLASSES = ("weights", "gradients", "master", "optimizer", "activations", "communication", "runtime")
STATES = CLASSES[:4]
# What a CPU process takes however small its model is: torch's compiler, which the first optimizer step imports, oneDNN,
# gloo. Bytes, of benchmarks/estimate.py; a test compares.
RUNTIME = {"single": 191818004, "several": 210514924}


def read_config(file: Path, num_processes: int | None = None) -> Settings:
    """What a config asks for."""
    mapping = config_file.read(file)[1] or {}
    mapping.setdefault("num_processes", config_file.default_processes(mapping, 0))
    if num_processes and str(mapping.get("distributed_type")) != "NO":
        mapping["num_processes"] = num_processes
    return read_env(to_env(mapping))


def accumulates(recipe: Path, words: list[str]) -> bool:
    """Whether a command line asks for several micro-batches in a step."""
    told = find.option(find.with_file(recipe, words), "gradient_accumulation_steps") or ""
    return told.isdigit() and int(told) > 1


def tracing_keys(settings: Settings) -> tuple[Key, Key]:
    """The two tracings that a config needs, as it is and with checkpoints.

    Neither the strategy nor whether 16 bits are fp16 or bf16 makes another one, but sharded parameters are gathered in
    the dtype they compute in, and a model that is split must be one that can be."""
    strategy, backend = costs.strategy_of(settings), costs.backend_of(settings)
    cast = strategy.divides_state and settings.precision != "fp32"
    as_bf16 = cast and not backend.autocasts  # FP8 layers too
    high = {"fp16": "bf16", "fp8": "bf16"}.get(settings.precision, settings.precision)
    by_cast = {"precision": high, "dtype": "bfloat16" if cast else None}
    plain = by_cast | {"split": settings.mesh.tp}
    if settings.backend and not as_bf16:
        plain |= {
            "precision": settings.precision,
            "backend": settings.backend,
            "level": settings.level,
            "skip": tuple(settings.skip),
            "fp8_options": tuple(backend.traced(settings.fp8.options).items()),
        }
    return tuple(plain.items()), tuple((by_cast | {"checkpointed": True}).items())


def trace_or_reason(module: "ModuleType | Script", argv: list[str], key: Key) -> dict[str, Any] | Refused:
    """What `tracing.trace` finds, or the error that says why it finds nothing."""
    from tools.tracing import Script, trace

    options = dict(key)
    options["fp8_options"] = dict(options.get("fp8_options", ()))
    if options["dtype"] and not isinstance(module, Script) and hasattr(module.Arguments, "dtype"):
        argv = [*argv, "--dtype", options.pop("dtype")]  # else it is cast in `prepare`
    try:
        return trace(module, argv, **options)
    except (Refused, faithful.Refused, ValueError) as reason:  # nothing in the model that FP8 could be
        return Refused(str(reason).splitlines()[0])


def tracings_of(
    module: "ModuleType | Script", argv: list[str], settings: Settings, tracings: dict[Key, Any]
) -> list[dict[str, Any]]:
    """The two tracings of a config. tracings: {key: its tracing} of those that were made before or are being made."""
    pair = []
    for key in tracing_keys(settings):
        if key not in tracings:
            tracings[key] = trace_or_reason(module, argv, key)
        tracing = tracings[key].get() if hasattr(tracings[key], "ready") else tracings[key]  # of another process
        if isinstance(tracing, Refused):
            raise tracing
        pair.append(tracing)
    if pair[0]["frozen"] and costs.strategy_of(settings).one_model:
        raise Refused(f"{settings.strategy} trains one model, the script prepares several")
    return pair


def estimate(
    settings: Settings, plain: dict[str, Any], checkpointed: dict[str, Any], cpu: bool, accumulates: bool = False
) -> dict[str, Any]:
    """Bytes per process by class. accumulates: over micro-batches."""
    strategy = costs.strategy_of(settings)
    model = whole_model(settings, plain)
    memory = strategy.memory(model, settings, accumulates)
    costs.backend_of(settings).adjust_memory(memory, model, settings)
    state, on_host = memory.weights + memory.master + memory.optimizer, 0.0
    if settings.offload and not cpu:
        on_host = memory.gradients + memory.master + memory.optimizer
        memory.gradients = memory.master = memory.optimizer = 0
        if strategy.offloads_weights(settings):
            on_host, memory.weights = on_host + memory.weights, 0

    activations = checkpointed if settings.ckpt else plain
    # gradients come as activations go
    kept = memory.gradients / (model.gradients + model.fp8_gradients) - memory.sent_early
    worst = max(g * model.gradients / plain["gradients"]["ordinary"] * kept + o for g, o in activations["moments"])
    sizes = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "master": memory.master,
        "optimizer": memory.optimizer,
        "activations": max(o for _, o in activations["moments"]),
        "communication": memory.communication,
        "runtime": RUNTIME["single" if settings.num_processes == 1 else "several"] if cpu else 0,
    }
    sizes = {key: round(size) for key, size in sizes.items()}
    training = sum(sizes.values()) - sizes["gradients"] - sizes["activations"] + round(worst)
    held = state + sizes["runtime"] if cpu else on_host
    in_training = (training if cpu else round(on_host)) if cpu or on_host else None
    phases = {}
    if strategy.divides_state and settings.shards > 1:
        phases = host.phases(settings, state, held, sizes["runtime"], plain, max(model.blocks), in_training)
    return sizes | {
        "phases": phases,
        "total": max(training, *(phase["main"] for phase in phases.values() if cpu), 0),
        "activations_checkpointed": max(o for _, o in checkpointed["moments"]),
        "states": sum(sizes[key] for key in STATES),
    }


def whole_model(settings: Settings, plain: dict[str, Any]) -> costs.WholeModel:
    """What one process would hold of a traced model. A strategy may keep weights and state in fp32 that were traced in
    bf16, those outside a level."""
    in_fp32 = 2 if costs.strategy_of(settings).keeps_fp32 else 1
    gradients, elements = plain["gradients"], plain["parameters"]
    return costs.WholeModel(
        elements=elements,
        blocks=plain["blocks"] or [elements],  # a model without repeated blocks is gathered as one
        compute=costs.computed(settings),
        weights=plain["weights"] + plain["bf16_weights"] * (in_fp32 - 1),
        frozen=plain["frozen"],
        gradients=gradients["ordinary"] + gradients["bf16"] * (in_fp32 - 1),
        fp8_gradients=gradients["fp8"],
        master=plain["master"],
        optimizer=plain["optimizer"] + plain["bf16_state"] * (in_fp32 - 1),
        fp8_optimizer=plain["fp8_optimizer"],
    )


# ---------------------------------------------------------------------------------------------------------- the command


def parse_bytes(text: str) -> int:
    match = re.fullmatch(r"(?ia)\s*(\d{1,15}(?:\.\d{0,9})?|\.\d{1,9})\s*([kmgt]?)(i?)b?\s*", text)
    if not match:
        raise Refused(f"--memory {short(text)}: write it as 80GB or 24GiB")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" kmgt".index(prefix.lower() or " ")))


def memory_here() -> tuple[int, str]:
    """(bytes of one device, its name): of a GPU, or of this machine for all processes together."""
    with progress.waiting("imports torch"):
        import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name()
    import psutil

    return psutil.virtual_memory().available, "this machine's free memory"


def memory_of(memory: str | None) -> tuple[int, str, bool]:
    """(bytes of one device, what it is, whether all processes share it). memory: as --memory gives it, or None."""
    if memory:
        return parse_bytes(memory), f"{memory} per device", False
    size, device = memory_here()
    return size, device, device.startswith("this machine")


@contextlib.contextmanager
def two_at_a_time(module: "ModuleType | Script", argv: list[str], keys: Collection[Key]) -> Iterator[dict[Key, Any]]:
    """{key: its tracing, which is being made} by two processes; {} where there are few to make."""
    if len(keys) < 3:
        yield {}
        return
    of_the_fork.update(module=module, argv=argv)  # a module cannot be sent
    with multiprocessing.get_context("fork").Pool(2) as pool:
        yield {key: pool.apply_async(in_the_fork, (key,)) for key in keys}


of_the_fork: dict[str, Any] = {}


def in_the_fork(key: Key) -> dict[str, Any] | Refused:
    import torch

    torch.set_num_threads(1)
    return trace_or_reason(of_the_fork["module"], of_the_fork["argv"], key)


def estimates(
    wanted: dict[str, Settings], recipe: Path, words: list[str], memory: int, cpu: bool
) -> Iterator[tuple[str, dict[str, Any] | Refused, int]]:
    """Yields (config, its sizes, the number of parameters) as soon as they are known; for a config that cannot be
    estimated (config, the reason as Refused, 0). wanted: {config: what it asks for}. memory, cpu: of `memory_of`."""
    reasons = {name: lines[0] for name, asked in wanted.items() if (lines := list(asked.rules.problems(asked)))}
    for name, reason in reasons.items():
        yield name, Refused(reason), 0
    wanted = {name: settings for name, settings in wanted.items() if name not in reasons}
    with progress.waiting(f"loading {recipe.stem}"):
        from tools.tracing import load  # imports torch

        module = load(recipe)
    keys = dict.fromkeys(key for settings in wanted.values() for key in tracing_keys(settings))
    with two_at_a_time(module, words, keys) as seen, progress.waiting("configs traced:", len(wanted)) as bar:
        for name, settings in wanted.items():
            bar.update()
            try:
                plain, checkpointed = tracings_of(module, words, settings, seen)
            except Refused as reason:
                yield name, reason, 0
                continue
            sizes = estimate(settings, plain, checkpointed, cpu, accumulates(recipe, words))
            needed = sizes["total"] * (settings.num_processes if cpu else 1)
            sizes |= {"num_processes": settings.num_processes, "fits": needed <= memory}
            yield name, sizes, plain["parameters"]


def recipe_of(words: list[str] | None, example: str) -> tuple[Path, list[str]]:
    """(recipe, its options) of the words after `--`. Raises Refused for an option that a recipe does not have.
    example: a command line, for whoever named none."""
    if not words:
        raise Refused(f"which recipe? {find.COMMAND} {example}")
    recipe = find.recipe(words[0])
    if find.is_recipe(recipe):
        find.parse_options(recipe, words[1:])
    return recipe, words[1:]


def cell(size: float, unit: int) -> str:
    return f"{size / unit:,.2f}" if size else "-"


class Rows:
    """The table, a row as soon as it is known. Its columns have their widths, and their unit, from the first on."""

    HEADS = ["config", "processes", *CLASSES, "total", "activations if checkpointed", "fits"]

    def __init__(self, names: Collection[str], device: str, memory: int) -> None:
        self.width, self.device, self.memory = max(map(len, names), default=6), device, memory
        self.unit = 0  # bytes; 0 before the first row

    def show(self, recipe: str, name: str, sizes: dict[str, Any], parameters: int) -> None:
        if not self.unit:
            large = sizes["total"] >= 2**30
            self.unit = 2 ** (30 if large else 20)
            says = f"{'GiB' if large else 'MiB'} per process, estimated; {self.device}: {cell(self.memory, self.unit)}"
            progress.write(f"{recipe}: {parameters / 1e6:,.1f}M parameters; {says}")
            self.line(self.HEADS)
        cells = [cell(sizes[key], self.unit) for key in (*CLASSES, "total", "activations_checkpointed")]
        self.line([name, str(sizes["num_processes"]), *cells, "yes" if sizes["fits"] else "no"])

    def line(self, cells: list[str]) -> None:
        widths = [self.width, *(max(len(head), 8) for head in self.HEADS[1:])]
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        progress.write("  " + line.rstrip())


def around_training(phases: dict[str, dict[str, int]], unit: int) -> str:
    """What the phases need of the host's memory, as a line."""
    words = {"build": "building", "save": "saving", "load": "loading", "train": "training", "end": "ending"}
    each = [f"{words[name]} {cell(size['main'], unit)} ({cell(size['others'], unit)})" for name, size in phases.items()]
    node = cell(max(size["node"] for size in phases.values()), unit)
    return f"host memory of process 0 (of each other process) while {', '.join(each)}; of all processes at most {node}"


def main(argv: list[str]) -> int:
    left, words = cli.split(argv)
    parser = cli.parser("estimate", __doc__)
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="names or paths (default: all)")
    processes = "of configs that are not for one process"
    parser.add_argument("--num_processes", "--num-processes", type=cli.count, help=processes)
    parser.add_argument("--memory", help="of one device, as 80GB (default: the device in front of you)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, in bytes")
    args = parser.parse_args(left)
    files = [find.config(name) for name in args.configs] or sorted((ROOT / "accelerate_configs").glob("*.yml"))
    recipe, options = recipe_of(words, "estimate fsdp_bf16 -- vit --model vit_huge")
    memory, device, cpu = memory_of(args.memory)
    wanted = {file.stem: read_config(file, args.num_processes) for file in files}
    rows, estimated, refused = Rows(wanted, device, memory), {}, {}
    for name, sizes, parameters in estimates(wanted, recipe, options, memory, cpu):
        if isinstance(sizes, Refused):
            refused[name] = str(sizes)
            continue
        estimated[name] = sizes
        if not args.json:
            rows.show(recipe.stem, name, sizes, parameters)
    if args.json:
        figures = {"recipe": recipe.stem, "command": words, "memory": memory, "configs": estimated, "refused": refused}
        print(json.dumps(figures))
        return 0
    for name, reason in refused.items():
        print(f"  {name}: {reason}")
    for name, sizes in estimated.items() if args.configs else ():
        if sizes["phases"]:
            print(f"  {name}: {around_training(sizes['phases'], rows.unit)}")
    fitting = [name for name, sizes in estimated.items() if sizes["fits"]]
    print(f"fits: {', '.join(fitting) or 'none of them'}")
    return 0 if fitting else 1


if __name__ == "__main__":
    cli.run(main)
