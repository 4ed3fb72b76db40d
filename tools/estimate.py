"""How much memory will this training need, per process, before anything is trained?

    ./launch.sh estimate single_bf16 fsdp_fp8 -- vit --model vit_huge --dataset synthetic
    ./launch.sh estimate --memory 80GB --num_processes 8 -- vit --model vit_huge      which of all configs would fit

The recipe's own `main` runs through one optimizer step on fake tensors (shapes and dtypes, no storage), on the batch
it would begin with, converted to FP8 as in a rehearsal. So model, loss and optimizer are the recipe's, whatever they
are, and a model of any size takes seconds. What forward and backward held at once at their worst moment, beside
gradients, is `activations`: saved tensors, 16-bit copies of the weights, temporary results. It is traced twice,
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

fp16, bf16, ao and te keep fp32 parameters, as fp32 does. On a CPU the libraries take memory of their own when first
used (`runtime`), whatever the model. How far off all this is, is measured: results/estimate.json, which
benchmarks/estimate.py writes.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
import sys
import weakref
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from shared import rules  # noqa: E402
from shared.args import Refused  # noqa: E402

CLASSES = ("weights", "gradients", "master", "optimizer", "activations", "communication", "runtime")
STATES = CLASSES[:4]
# What a CPU process takes however small its model is: torch's compiler, which the first optimizer step imports, oneDNN,
# gloo. Bytes, of benchmarks/estimate.py; a test compares.
RUNTIME = {"single": 191818004, "several": 210514924}
LIVE = 1_000_000_000  # elements that DeepSpeed's stage 3 keeps gathered if they are soon used again, its default


class Enough(Exception):
    """The optimizer step is done: everything is known."""


# -------------------------------------------------------------------------------------------------------------- tracing


class Memory:
    """Bytes alive at each moment, of what is born while `watch` is active.

    moments: (gradients, others) of every moment that no other moment exceeds in both.
    """

    def __init__(self):
        self.sizes, self.gradients, self.live, self.of_gradients, self.moments = {}, set(), 0, 0, []
        self.on = True

    def born(self, storage):
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self.died, key)
            self.note()

    def died(self, key):
        size = self.sizes.pop(key)
        self.live -= size
        if key in self.gradients:
            self.gradients.remove(key)
            self.of_gradients -= size

    def is_gradient(self, parameter):
        """After a gradient was accumulated into `parameter`."""
        key = parameter.grad.untyped_storage()._cdata
        if key in self.sizes and key not in self.gradients:
            self.gradients.add(key)
            self.of_gradients += self.sizes[key]
            self.note()

    def note(self):
        g, o = self.of_gradients, self.live - self.of_gradients
        if not any(g <= g_ and o <= o_ for g_, o_ in self.moments):
            self.moments = [(g_, o_) for g_, o_ in self.moments if g_ > g or o_ > o] + [(g, o)]

    def watch(self):
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        memory = self

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                if not memory.on:
                    return out
                known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
                for tensor in tree_leaves(out):  # a view, or the result of an operation in place, is not born
                    if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                        memory.born(tensor.untyped_storage())
                return out

        return Watch()


@contextlib.contextmanager
def without_storage():
    """Inside, every parameter that a module registers goes to `meta`: no model is too large to build."""
    import torch
    from torch import nn
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def register(module, name, parameter):
        if parameter is not None and parameter.device.type != "meta":
            return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(register)
    looks_at_values, nn.init._no_grad_trunc_normal_ = nn.init._no_grad_trunc_normal_, lambda tensor, *_, **__: tensor
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = looks_at_values
        hook.remove()
        torch.set_grad_enabled(True)


def make_fake(model, optimizer):
    """From `meta` to fake tensors of this CPU: autocast and kernels choose as they would for real ones."""
    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode, made = FakeTensorMode(allow_non_fake_inputs=True), {}  # the batch and the buffers are real
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and id(old) not in made:  # else it is tied to one that came before
                with mode:
                    made[id(old)] = nn.Parameter(torch.empty_like(old, device="cpu"), requires_grad=old.requires_grad)
            module._parameters[name] = old if old is None else made[id(old)]
    for group in optimizer.param_groups:
        group["params"] = [made[id(old)] for old in group["params"]]


def load(recipe):
    """The module of a recipe's file."""
    spec = importlib.util.spec_from_file_location(f"traced_{recipe.stem}", recipe)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    missing = [name for name in ("resolve", "prepare", "Run", "main", "Arguments") if not hasattr(module, name)]
    if missing:
        raise Refused(f"{recipe.name} has no {', '.join(missing)}: it is not written as the recipes here are")
    return module


def trace(module, argv, precision, backend=None, level=None, options=None, checkpointed=False):
    """What the first steps of a recipe hold, on fake tensors, in one process. All sizes in bytes."""
    from accelerate.state import AcceleratorState, GradientState
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    from shared import fp8, tp
    from shared.args import parse
    from shared.plan import Plan
    from shared.run import Run

    plan = Plan(config=None, strategy="single", num_processes=1, precision=precision, device="cpu", backend=backend,
                level=level, fp8_options=options or {}, rehearsal=True, emulated=bool(backend),
                implementation={"msamp": "amp8", None: "torch"}.get(backend, "emulated"))  # fmt: skip
    memory, found = Memory(), {}

    def prepare(accelerator, plan, model, optimizer, *loaders):
        names = set(getattr(model, "_no_split_modules", None) or ())
        blocks = [m for m in model.modules() if type(m).__name__ in names]
        make_fake(model, optimizer)
        found["splits"] = lambda size: tp.check(model, size)
        found["blocks"] = [sum(p.numel() for p in block.parameters()) for block in blocks]
        found["trainable"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if backend:
            optimizer, _ = fp8.convert(accelerator, plan, model, optimizer)
            if not fp8.converted(model)[0]:
                raise Refused("none of its Linear layers can be FP8")
        if checkpointed:
            apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__ in names)
        model = accelerator.prepare_model(model, device_placement=False)
        optimizer = accelerator.prepare_optimizer(optimizer, device_placement=False)
        if backend:
            fp8.keep_right(accelerator, plan, model, optimizer.optimizer)
        optimizer.optimizer.register_step_pre_hook(lambda *_: before_step(model))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(memory.is_gradient)
        return model, optimizer, *loaders, None

    def before_step(model):
        memory.on = False
        found["gradients"] = gradients(model)
        if checkpointed:
            raise Enough

    class Traced(Run):
        def find_checkpoint(self):
            pass

        def start(self, model, optimizer, lr_scheduler, evidence, dataset):
            self.model, self.optimizer, self.parameters = model, optimizer.optimizer, list(model.parameters())

        def batches(self, loader):
            batches, per_step = iter(loader), self.args.gradient_accumulation_steps
            for _ in range(per_step):
                batch = next(batches)
                with memory.watch():
                    yield batch
            found.update(counted(self.model, self.optimizer))
            raise Enough

        def due(self, every):
            return False

        def share(self, loss):
            pass

        def agree(self, grad_norm):
            pass

        def stepped(self):
            pass

    def reset():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    before, words, sys.argv = dict(os.environ), sys.argv, [module.__file__, *argv]
    os.environ |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": {"fp32": "no"}.get(precision, "bf16")}
    module.resolve, module.prepare, module.Run = lambda: plan, prepare, Traced
    try:
        args = parse(module.Arguments)
        with contextlib.redirect_stdout(io.StringIO()), without_storage():
            module.main(args)
    except Enough:
        return found | {"moments": memory.moments, "precision": precision}
    finally:
        sys.argv, Run.current = words, None
        os.environ.clear()
        os.environ.update(before)
        reset()
    raise Refused(f"{Path(module.__file__).name} came to its end without an optimizer step")


def gradients(model):
    """Bytes of all gradients, and of those that amp8 keeps in FP8 beside their parameters."""
    ordinary = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    beside = [p.amp8_linear.gradient.codes for p in model.parameters() if hasattr(p, "amp8_linear")]
    return {"ordinary": ordinary, "fp8": sum(codes.nbytes for codes in beside if codes is not None)}


def counted(model, optimizer):
    """Bytes of what stays between steps; `levels`: the part of it that an MS-AMP level changed."""
    moments = {id(p): sum(v.nbytes for k, v in s.items() if k != "step" and hasattr(v, "nbytes"))
               for p, s in optimizer.state.items()}  # fmt: skip
    layers = [(p, p.amp8_linear) for p in model.parameters() if hasattr(p, "amp8_linear")]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": sum(p.nbytes for p in model.parameters()),
        "optimizer": sum(moments.values()),
        "master": sum(layer.master.nbytes for _, layer in layers if layer.master is not None),
        "levels": {"optimizer": sum(moments.get(id(p), 0) for p, _ in layers)},
    }


# ------------------------------------------------------------------------------------------------------------ the rules


def of_config(file, num_processes=None):
    """What a config asks for, and into how many parts it divides the state."""
    config = yaml.safe_load(file.read_text()) or {}
    if num_processes and str(config.get("distributed_type")) != "NO":
        config["num_processes"] = num_processes
    asked = rules.asked(rules.exported(config))
    shards = (config.get("parallelism_config") or {}).get("parallelism_config_dp_shard_size")
    return asked | {"shards": int(shards or asked["num_processes"]) if asked["strategy"] != "single" else 1}


def traced(module, argv, asked, seen):
    """The trace a config needs, made once: sharded parameters are gathered in the dtype they compute in."""
    cast = asked["strategy"] in ("fsdp", "hsdp", "zero1", "zero2", "zero3") and asked["precision"] != "fp32"
    key = ("fp32", None, None, "bfloat16") if cast else (
        asked["precision"], asked["backend"], asked["level"], None)  # fmt: skip
    plain = (key[0] if key[0] != "fp8" else "bf16", None, None, key[3])  # FP8 inside checkpoints takes long to trace
    for wanted, checkpointed in ((key, False), (plain, True)):
        if (wanted, checkpointed) not in seen:
            precision, backend, level, dtype = wanted
            words = [*argv, "--dtype", dtype] if dtype else argv
            options = asked["fp8_options"] if backend in ("te", "msamp") else {}
            what = [precision, backend, level, dtype and f"cast to {dtype}", checkpointed and "checkpointed"]
            print("tracing", *filter(None, what), file=sys.stderr, flush=True)  # of a large model, a minute each
            seen[wanted, checkpointed] = trace(module, words, precision, backend, level, options, checkpointed)
    return seen[key, False], seen[plain, True]


def estimate(asked, plain, checkpointed, cpu):
    """Bytes per process by class."""
    strategy, n = asked["strategy"], asked["shards"]
    compute = 4 if asked["precision"] == "fp32" else 2
    from shared.zero import BUCKET

    elements, blocks = plain["parameters"], plain["blocks"]
    itemsize = plain["weights"] / elements  # of the parameters as traced: --dtype, or the cast to the compute dtype
    fp32 = 4 / itemsize if itemsize == 2 and strategy not in ("single", "ddp") else 1
    weights, optimizer = plain["weights"] * fp32, plain["optimizer"] * fp32
    gradient, in_fp8 = plain["gradients"]["ordinary"] * fp32, plain["gradients"]["fp8"]
    master = plain["master"]
    largest = max(blocks, default=elements)
    gathered = (elements - sum(blocks) + 2 * largest) * compute  # this block and the next, and what is in no block
    communication = 0
    left = gradient + in_fp8  # of the gradients, on this rank
    if strategy == "ddp":
        communication = gradient
        if asked["level"] == "o3" and asked["backend"] == "msamp":
            levels = plain["levels"]["optimizer"]
            optimizer += levels / n - levels
            master, left = master / n, gradient + in_fp8 / n
    elif strategy in ("fsdp", "hsdp", "tp"):
        if strategy == "tp":
            plain["splits"](n)  # raises Refused where the model cannot be
        weights, optimizer, left = weights / n, optimizer / n, gradient / n
        communication = gathered + largest * (compute + 4) if strategy != "tp" else 0
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
    worst = max(g * fp32 * share + o for g, o in found["moments"])  # gradients come as activations go
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
    return sizes | {
        "total": sum(sizes.values()) - sizes["gradients"] - sizes["activations"] + round(worst),
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
    files = [
        Path(name) if Path(name).is_file() else folder / f"{name.removesuffix('.yml')}.yml" for name in args.configs
    ]
    recipe = Path(words[0]) if Path(words[0]).is_file() else ROOT / "recipes" / f"{words[0].removesuffix('.py')}.py"
    for file in [*files, recipe]:
        if not file.is_file():
            raise Refused(f"no {file}: ./launch.sh ls lists what there is")
    memory, device = (in_bytes(args.memory), f"{args.memory} per device") if args.memory else memory_here()
    cpu = not args.memory and device.startswith("this machine")
    module, seen, made, refused = load(recipe), {}, {}, {}
    for file in files or sorted(folder.glob("*.yml")):
        asked = of_config(file, args.num_processes)
        try:
            if lines := rules.problems_of_meshes(asked):
                raise Refused(lines[0])
            made[file.stem] = estimate(asked, *traced(module, words[1:], asked, seen), cpu)
        except (Refused, ValueError) as reason:  # nothing in the model that FP8 could be
            refused[file.stem] = str(reason).splitlines()[0]
            continue
        needed = made[file.stem]["total"] * (asked["num_processes"] if cpu else 1)
        made[file.stem] |= {"num_processes": asked["num_processes"], "fits": needed <= memory}
    if args.json:
        print(
            json.dumps({"recipe": recipe.stem, "command": words, "memory": memory, "configs": made, "refused": refused})
        )
        return 0
    parameters = next(iter(seen.values()))["parameters"] if seen else 0
    heads = ["config", "x", *CLASSES, "total", "activations if checkpointed", "fits"]
    large = max((found["total"] for found in made.values()), default=0) >= 2**30
    unit, rows = 2 ** (30 if large else 20), []
    for name, found in made.items():
        cells = [shown(found[key], unit) for key in (*CLASSES, "total", "activations_checkpointed")]
        rows.append([name, str(found["num_processes"]), *cells, "yes" if found["fits"] else "no"])
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    says = f"{'GiB' if large else 'MiB'} per process, estimated; {device}: {shown(memory, unit)}"
    print(f"{recipe.stem}: {parameters / 1e6:,.1f}M parameters; {says}")
    for row in (heads, *rows):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
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
