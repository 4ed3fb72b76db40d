"""How much memory will this training need, per process, before anything is trained?

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
  tp              4 P/N           4 P/N           -               8 P/N         its activations are counted whole
  zero1           2 P (fp32 4 P)  2 P/N (4 P/N)   4 P/N           8 P/N         its buckets
  zero2           2 P (4 P)       4 P/N           4 P/N           8 P/N         its buckets
  zero3           2 P/N (4 P/N)   4 P/N           4 P/N           8 P/N         2 P gathered, its buckets
  msamp o1 | o2   2 P             1 P             -               8 P | 3 P     of converted weights; the rest as above
  msamp o3        1 P             1 P/N           2 P/N           3 P/N
  ..., fsdp       2 P/N           1 P/N           -               8 or 3 P/N    blocks gathered in FP8, a bucket

FSDP2 that accumulates over micro-batches keeps the whole gradients in fp32 until it reduces them: 4 P in each process.
A CPU process builds the whole model in fp32 before FSDP2 takes its part: where that is more than training, it is the
total. fp16, bf16, ao and te keep fp32 parameters, as fp32 does. On a CPU the libraries take memory when first
used (`runtime`), whatever the model. How far off all this is, is measured: results/estimate.json, which
benchmarks/estimate.py writes.
"""

import argparse
import contextlib
import json
import multiprocessing
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
import faithful  # noqa: E402
from faithful import config, files, rules  # noqa: E402
from shared.args import Refused  # noqa: E402
from tools import find  # noqa: E402

CLASSES = ("weights", "gradients", "master", "optimizer", "activations", "communication", "runtime")
STATES = CLASSES[:4]
# What a CPU process takes however small its model is: torch's compiler, which the first optimizer step imports, oneDNN,
# gloo. Bytes, of benchmarks/estimate.py; a test compares.
RUNTIME = {"single": 191818004, "several": 210514924}
LIVE = 1_000_000_000  # elements that DeepSpeed's stage 3 keeps gathered if they are soon used again, its default


def of_config(file, num_processes=None):
    """What a config asks for, and into how many parts it divides the state."""
    mapping = files.read(file)[1] or {}
    mapping.setdefault("num_processes", files.default_processes(mapping, 0))
    if num_processes and str(mapping.get("distributed_type")) != "NO":
        mapping["num_processes"] = num_processes
    asked = config.asked(config.exported(mapping))
    shards = asked["sizes"]["dp_shard"] if asked["strategy"] == "hsdp" else asked["num_processes"]
    return asked | {"shards": shards if asked["strategy"] != "single" else 1}


def accumulates(words):
    """Whether a command line asks for several micro-batches in a step."""
    found = re.search(r"--gradient[_-]accumulation[_-]steps[ =](\d+)", " ".join(words))
    return found is not None and int(found[1]) > 1


def tracings(asked):
    """The two tracings that a config needs, as it is and with checkpoints: `tracing.trace`'s arguments, hashable.

    Neither the strategy nor whether 16 bits are fp16 or bf16 makes another one, but sharded parameters are gathered in
    the dtype they compute in, and a model that is split must be one that can be."""
    cast = asked["strategy"] in ("fsdp", "hsdp", "zero1", "zero2", "zero3") and asked["precision"] != "fp32"
    cast = cast and asked["backend"] != "msamp"
    precision = "fp32" if cast else {"fp16": "bf16"}.get(asked["precision"], asked["precision"])
    split = asked["shards"] if asked["strategy"] == "tp" else 1
    high = {"precision": precision if precision != "fp8" else "bf16", "dtype": "bfloat16" if cast else None}
    plain = high | {"split": split}
    if precision == "fp8":
        options = asked["fp8_options"] if asked["backend"] in ("te", "msamp") else {}
        plain |= {"precision": "fp8", "backend": asked["backend"], "level": asked["level"],
                  "skip": tuple(asked["skip"]), "fp8_options": tuple(options.items())}  # fmt: skip
    return tuple(plain.items()), tuple((high | {"checkpointed": True}).items())


def traced_once(module, argv, key):
    """What `tracing.trace` finds, or the error that says why it finds nothing."""
    from tools.tracing import Script, trace

    options = dict(key)
    dtype = options["dtype"]
    options["fp8_options"] = dict(options.get("fp8_options", ()))
    recipes = [] if not dtype or isinstance(module, Script) else ["--dtype", dtype]  # else it is cast in `prepare`
    try:
        return trace(module, [*argv, *recipes], **options)
    except (Refused, faithful.Refused, ValueError) as reason:  # nothing in the model that FP8 could be
        return Refused(str(reason).splitlines()[0])


def traced(module, argv, asked, seen):
    """The two tracings of a config; `seen` holds those that were made before, or are being made."""
    found = []
    for key in tracings(asked):
        if key not in seen:
            seen[key] = traced_once(module, argv, key)
        found.append(seen[key].get() if hasattr(seen[key], "ready") else seen[key])
        if isinstance(found[-1], Refused):
            raise found[-1]
    return found


def estimate(asked, plain, checkpointed, cpu):
    """Bytes per process by class."""
    strategy, n = asked["strategy"], asked["shards"]
    compute = 4 if asked["precision"] == "fp32" else 2
    from faithful.strategies.zero import BUCKET

    elements, blocks = plain["parameters"], plain["blocks"]
    levels = asked["backend"] == "msamp"
    itemsize = plain["weights"] / elements  # of the parameters as traced: --dtype, or the cast to the compute dtype
    fp32 = 4 / itemsize if itemsize == 2 and strategy not in ("single", "ddp") and not levels else 1
    weights, optimizer = plain["weights"] * fp32, plain["optimizer"] * fp32
    gradient, in_fp8 = plain["gradients"]["ordinary"] * fp32, plain["gradients"]["fp8"]
    master = plain["master"]
    largest = max(blocks, default=elements)
    gathered = (elements - sum(blocks) + 2 * largest) * compute  # this block and the next, and what is in no block
    communication = 0
    left = gradient + in_fp8  # of the gradients, on this rank
    if strategy == "ddp":
        communication = gradient
        if asked["level"] == "o3" and levels:
            of_levels = plain["levels"]["optimizer"]
            optimizer += of_levels / n - of_levels
            master, left = master / n, gradient + in_fp8 / n
    elif strategy in ("fsdp", "hsdp", "tp"):
        weights, optimizer, left = weights / n, optimizer / n, (gradient + in_fp8) / n
        communication = gathered + largest * (compute + 4) if strategy != "tp" else 0
        if asked.get("accumulates") and strategy != "tp":
            left += gradient * (1 - 1 / n)
        if levels:  # the bucket's codes, what is sent and received of them, and this rank's part in fp32
            from amp8 import comm

            communication = gathered - 2 * largest + min(comm.BUCKET, in_fp8) * (3 + 4 / n)
    elif strategy.startswith("zero"):
        own = {"zero1": 1, "zero2": 1, "zero3": n}[strategy]
        master, optimizer, weights = 4 * elements / n, optimizer / n, compute * elements / own
        left = (compute if strategy == "zero1" else 4) * elements / n
        # Of gradients on their way: the bucket's buffer, what it is cast to, and what is cut from that.
        bucket, cast = min(BUCKET, elements), 4 if compute == 2 else 0
        each = 8 + 4 / n if strategy == "zero3" else 2 * compute + cast
        communication = bucket * each + (compute * min(LIVE, elements) if strategy == "zero3" else 0)
    if asked["offload"]:
        weights, left, optimizer = (weights, left, optimizer) if cpu else (0, 0, 0)

    found = checkpointed if asked["ckpt"] else plain
    share = left / (gradient + in_fp8)
    # Codes of FP8 gradients are traced among the activations. They come as the others do, and leave for their owners.
    away = in_fp8 * (1 - 1 / n) / gradient if levels and strategy in ("fsdp", "hsdp") else 0
    worst = max(g * fp32 * share + o - g * away for g, o in found["moments"])  # gradients come as activations go
    sizes = {
        "weights": weights,
        "gradients": left,
        "master": master,
        "optimizer": optimizer,
        "activations": max(o for _, o in found["moments"]),
        "communication": communication,
        "runtime": RUNTIME["single" if asked["num_processes"] == 1 else "several"] if cpu else 0,
    }
    sizes = {key: round(size) for key, size in sizes.items()}
    building = 4 * elements * (1 + 1 / n) + sizes["runtime"] if cpu and strategy in ("fsdp", "hsdp") else 0
    training = sum(sizes.values()) - sizes["gradients"] - sizes["activations"] + round(worst)
    return sizes | {
        "total": max(training, round(building)),
        "activations_checkpointed": max(o for _, o in checkpointed["moments"]),
        "states": sum(sizes[key] for key in STATES),
    }


# ---------------------------------------------------------------------------------------------------------- the command


def in_bytes(text):
    found = re.fullmatch(r"(?i)\s*([\d.]+)\s*([kmgt]?)(i?)b?\s*", text)
    if not found:
        raise Refused(f"--memory {text}: write it as 80GB or 24GiB")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" kmgt".index(prefix.lower() or " ")))


def memory_here():
    """(bytes of one device, its name): of a GPU, or of this machine for all processes together."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name()
    import psutil

    return psutil.virtual_memory().available, "this machine's free memory"


def shown(size, unit):
    return f"{size / unit:,.2f}" if size else "-"


class Rows:
    """The table, a row as soon as it is known. Its columns have their widths, and their unit, from the first on."""

    HEADS = ["config", "x", *CLASSES, "total", "activations if checkpointed", "fits"]

    def __init__(self, names, device, memory, quiet):
        self.width, self.device, self.memory, self.quiet = max(map(len, names), default=6), device, memory, quiet
        self.unit = None

    def show(self, recipe, name, found, parameters):
        if self.quiet:
            return
        if self.unit is None:
            large = found["total"] >= 2**30
            self.unit = 2 ** (30 if large else 20)
            says = f"{'GiB' if large else 'MiB'} per process, estimated; {self.device}: {shown(self.memory, self.unit)}"
            print(f"{recipe}: {parameters / 1e6:,.1f}M parameters; {says}")
            self.line(self.HEADS)
        cells = [shown(found[key], self.unit) for key in (*CLASSES, "total", "activations_checkpointed")]
        self.line([name, str(found["num_processes"]), *cells, "yes" if found["fits"] else "no"])

    def line(self, cells):
        widths = [self.width, 2, *(max(len(head), 8) for head in self.HEADS[2:])]
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print("  " + line.rstrip(), flush=True)


@contextlib.contextmanager
def two_at_a_time(module, argv, keys):
    """{key: its tracing, which is being made} by two processes; {} where there are few to make."""
    if len(keys) < 3:
        yield {}
        return
    of_the_fork.update(module=module, argv=argv)  # a module cannot be sent
    with multiprocessing.get_context("fork").Pool(2) as pool:
        yield {key: pool.apply_async(in_the_fork, (key,)) for key in keys}


of_the_fork = {}


def in_the_fork(key):
    import torch

    torch.set_num_threads(1)
    return traced_once(of_the_fork["module"], of_the_fork["argv"], key)


def main(argv):
    left, words = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(prog="./launch.sh estimate", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="names or paths (default: all)")
    parser.add_argument("--num_processes", "--num-processes", type=int, help="of configs that are not for one process")
    parser.add_argument("--memory", help="of one device, as 80GB (default: the device in front of you)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, in bytes")
    args = parser.parse_args(left)
    if not words:
        raise Refused("which recipe? ./launch.sh estimate fsdp_bf16 -- vit --model vit_huge")
    folder = ROOT / "accelerate_configs"
    files, recipe = [find.config(name) for name in args.configs], find.recipe(words[0])
    from tools.tracing import load  # imports torch

    memory, device = (in_bytes(args.memory), f"{args.memory} per device") if args.memory else memory_here()
    cpu = not args.memory and device.startswith("this machine")
    module, made = load(recipe), {}
    more = {"accumulates": accumulates(words)}
    wanted = {file.stem: of_config(file, args.num_processes) | more for file in files or sorted(folder.glob("*.yml"))}
    refused = {name: lines[0] for name, asked in wanted.items() if (lines := rules.problems_of_meshes(asked))}
    wanted = {name: asked for name, asked in wanted.items() if name not in refused}
    keys = dict.fromkeys(key for asked in wanted.values() for key in tracings(asked))
    with two_at_a_time(module, words[1:], keys) as seen:
        rows = Rows(wanted, device, memory, quiet=args.json)
        for name, asked in wanted.items():
            try:
                traces = traced(module, words[1:], asked, seen)
            except Refused as reason:
                refused[name] = str(reason)
                continue
            made[name] = estimate(asked, *traces, cpu)
            needed = made[name]["total"] * (asked["num_processes"] if cpu else 1)
            made[name] |= {"num_processes": asked["num_processes"], "fits": needed <= memory}
            rows.show(recipe.stem, name, made[name], traces[0]["parameters"])
    if args.json:
        print(
            json.dumps({"recipe": recipe.stem, "command": words, "memory": memory, "configs": made, "refused": refused})
        )
        return 0
    for name, reason in refused.items():
        print(f"  {name}: {reason}")
    fitting = [name for name, found in made.items() if found["fits"]]
    print(f"fits: {', '.join(fitting) or 'none of them'}")
    return 0 if fitting else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refused as refused:
        print(f"refused: {refused}", file=sys.stderr)
        sys.exit(2)
