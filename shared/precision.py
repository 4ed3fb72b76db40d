"""Makes model and optimizer what the Plan says, then proves it by counting live tensors.

`prepare` stands where `accelerator.prepare` would. The Evidence it returns is complete after the first optimizer step,
when gradients and optimizer state exist. A run that is not what its config says raises Refused.
"""

import functools
from hashlib import sha256

import accelerate.optimizer
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, TorchDynamoPlugin
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shared import fp8, te, tp, zero
from shared.args import Refused

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def prepare(accelerator, plan, model, optimizer, *loaders):
    """(model, optimizer, *loaders, evidence): `accelerator.prepare` of everything at once, checked against the plan."""
    if plan.precision == "fp16" and plan.rehearsal:  # Accelerate runs plain fp32 here; torch itself can do it
        accelerator.native_amp = True
        options = accelerator.scaler_handler.to_kwargs() if accelerator.scaler_handler else {}
        accelerator.scaler = torch.amp.GradScaler("cpu", **options)
    own = next(model.parameters()).dtype
    if own != torch.float32 and plan.precision != "fp32":
        raise Refused(
            f"--dtype {str(own)[6:]} keeps parameters in that dtype: use an fp32 config, not {plan.precision}"
        )
    beginning = fingerprint(model)
    if plan.strategy.startswith("zero"):
        if own != torch.float32:
            raise Refused(f"--dtype {str(own)[6:]}: DeepSpeed wants fp32 parameters to begin with, leave it out")
        if plan.precision != "fp32":
            zero.cast_inputs(model, DTYPES.get(plan.precision, torch.bfloat16))
    if plan.strategy == "tp":
        tp.split(accelerator, model, optimizer, beginning)
    linear = sum(map(fp8.is_linear, model.modules())) + fp8.converted(model)[0]  # TE's blocks are both
    skipped = []
    if plan.precision == "fp8":
        optimizer, skipped = fp8.convert(accelerator, plan, model, optimizer)
    if plan.implementation == "transformer_engine":
        te.wrap_forward(plan, model)
    if plan.compile:
        compile_blocks(model)
    # Accelerate searches the whole path for this package twice in every optimizer step.
    accelerate.optimizer.is_lomo_available = functools.cache(accelerate.utils.is_lomo_available)
    watched = next((module for module in model.modules() if isinstance(module, torch.nn.Linear)), None)
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    if zero.of(optimizer) is not None:
        zero.keep_right(accelerator, model, optimizer)
    if plan.precision == "fp8":
        fp8.keep_right(accelerator, plan, model, inner(optimizer))
    unwatched = plan.compile or plan.precision == "fp8"
    evidence = Evidence(accelerator, plan, model, optimizer, linear, skipped, None if unwatched else watched)
    evidence.record["initial_weights"] = beginning
    return model, optimizer, *loaders, evidence


def compile_blocks(model):
    """Compiles each block in place, as the file's dynamo_config says; the first one's code serves them all. In place,
    because DDP, FSDP2 and checkpointing go on finding the modules they know."""
    options, names = TorchDynamoPlugin().to_kwargs(), getattr(model, "_no_split_modules", None) or ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise Refused("asked for compiled blocks, but the model names none: set _no_split_modules to their class names")
    for block in blocks:
        block.compile(**options)


def fingerprint(model):
    """A hash of the weights as they are, by name: runs of one seed begin with the same, whatever the config."""
    sums = [(name, torch.hash_tensor(p.detach()).item()) for name, p in model.named_parameters() if p.numel()]
    return sha256(repr(sums).encode()).hexdigest()


def named(pairs):
    """(name, tensor) as the plain model names them, whatever wraps it: DDP, checkpointed blocks."""
    for name, tensor in pairs:
        yield name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""), tensor


def local(tensor):
    """This rank's part of a tensor, without torchao's wrapper around it."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(part, "_tensor", part)


class Evidence:
    """What this run really is, counted. `record` is the `evidence` of run.json; counts are over the whole model."""

    def __init__(self, accelerator, plan, model, optimizer, linear, skipped, watched):
        self.plan, self.model, self.optimizer = plan, model, inner(optimizer)
        converted, norms = fp8.converted(model)
        self.parameters = dict(named(model.named_parameters()))
        self.zero = zero.of(optimizer)
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owned = owned if self.zero is None else zero.owned(self.zero)
        trainable = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        orphans = [name for name, parameter in trainable.items() if id(parameter) not in owned]
        self.sharded = any(isinstance(p, DTensor) and local(p).numel() < p.numel() for p in trainable.values())
        self.counted = self.parameters  # what each process has whole, one of them counts
        if plan.split > 1 and accelerator.process_index % plan.split:
            self.counted = {name: p for name, p in self.parameters.items() if isinstance(p, DTensor)}
        self.sharded = self.sharded or (self.zero is not None and plan.num_processes > 1)
        self.own_parts = self.sharded or (plan.backend == "msamp" and plan.num_processes > 1)  # in a checkpoint
        self.record = {
            "linear_total": linear,
            "linear_converted": converted,
            "linear_skipped": [{"name": name, "reason": reason} for name, reason in skipped],
            "layernorm_converted": norms,
            "share_converted": fp8.share(model),
            "dtypes": {"parameters": {}, "gradients": {}, "optimizer_state": {}, "linear_output": None},
            "bytes_per_parameter": None,
            "optimizer_owns_all": not orphans,
            "sharded": self.sharded,
            "wire_bytes_per_step": 0 if plan.num_processes == 1 else None,
            "eval_precision": "bf16" if plan.precision == "fp8" else plan.precision,
        }
        several = ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU")
        kinds = {"single": ("NO",), "ddp": several, "fsdp": ("FSDP",), "hsdp": ("FSDP",), "tp": several}
        kinds = kinds.get(plan.strategy, ("DEEPSPEED",))
        kinds += ("NO",) if plan.num_processes == 1 else ()  # DDP of one process
        kind, processes = accelerator.distributed_type, accelerator.num_processes
        if kind not in [DistributedType[name] for name in kinds] or processes != plan.num_processes:
            raise Refused(f"asked for {plan.strategy} x{plan.num_processes}, Accelerate runs {kind.value} x{processes}")
        if plan.fp8_options.get("enable_fsdp_float8_all_gather"):
            self.record["eval_precision"] = "bf16, weights gathered as e4m3"
        if plan.precision == "fp8" and not converted:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped[:3])
            raise Refused(f"asked for fp8, but none of {linear} Linear layers can be: {reasons or 'there is none'}")
        if plan.precision == "fp8" and converted != linear - len(skipped):
            raise Refused(f"{linear - len(skipped)} Linear layers should be in FP8, {converted} of {linear} are")
        if orphans:
            raise Refused(f"{len(orphans)} trainable tensors are not in the optimizer: {', '.join(orphans[:4])}, ...")
        if plan.strategy in ("fsdp", "hsdp", "tp") and plan.num_processes > 1 and not self.sharded:
            raise Refused(f"asked for {plan.strategy}, but no parameter is sharded: does the model name its blocks?")
        if self.zero is None:
            self.hooks = [
                inner(optimizer).register_step_pre_hook(self.before_first_step),
                inner(optimizer).register_step_post_hook(self.after_first_step),
            ]
        else:  # the engine frees `.grad` at once, and steps torch's optimizer once per flat tensor
            self.hooks = [p.register_hook(self.see_gradient) for p in trainable.values()]
            optimizer.before_first_step.append(self.before_first_zero_step)
        if watched is not None:
            self.hooks.append(watched.register_forward_hook(self.see_output))

    def see_output(self, module, inputs, output):
        self.record["dtypes"]["linear_output"] = str(output.dtype)[6:]

    def see_gradient(self, gradient):
        counts = self.record["dtypes"]["gradients"]
        counts[str(gradient.dtype)[6:]] = counts.get(str(gradient.dtype)[6:], 0) + gradient.numel()

    def before_first_zero_step(self):
        for hook in self.hooks:
            hook.remove()
        self.check_compute()
        self.gradient_bytes = size(zero.gradients(self.zero))

    def count_zero(self):
        """What `after_first_step` counts, of the engine's fragments; padding is not counted."""
        counts = zero.counts(self.parameters, self.zero)
        self.record["dtypes"] |= {key: elements(counts[key]) for key in ("parameters", "master")}
        self.record["dtypes"]["optimizer_state"] = {key: elements(part) for key, part in counts["optimizer"].items()}
        gradient = {"gradient": self.gradient_bytes, "gathered": size(counts["gathered"])}
        self.bytes = {"weight": size(counts["parameters"]), **gradient, "master": size(counts["master"])}
        self.bytes["optimizer"] = sum(map(size, counts["optimizer"].values()))

    def before_first_step(self, optimizer, args, kwargs):
        gradients = [local(p.grad) for p in self.counted.values() if p.grad is not None]
        if self.plan.backend == "msamp":  # amp8 keeps FP8 gradients beside the parameter
            beside = [p.amp8_linear.gradient.codes for p in self.parameters.values() if hasattr(p, "amp8_linear")]
            gradients += [codes for codes in beside if codes is not None]
        self.record["dtypes"]["gradients"] = elements(gradients)
        self.gradient_bytes = size(gradients)
        self.check_compute()

    def check_compute(self):
        seen, asked = self.record["dtypes"]["linear_output"], self.plan.precision
        if seen is not None and asked in ("bf16", "fp16") and seen != str(DTYPES[asked])[6:]:
            raise Refused(f"asked for {asked}, but Linear layers compute in {seen}")

    def after_first_step(self, optimizer, args, kwargs):
        parameters = [local(parameter) for parameter in self.counted.values()]
        states = {}
        for parameter in self.counted.values():
            for key, value in optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value) and value.dim():  # the step counters are not worth a line
                    states.setdefault(key, []).append(local(value))
        self.record["dtypes"]["parameters"] = elements(parameters)
        self.record["dtypes"]["optimizer_state"] = {key: elements(values) for key, values in states.items()}
        self.bytes = {
            "weight": size(parameters),
            "gradient": self.gradient_bytes,
            "master": 0,  # the parameters are the full-precision copy
            "optimizer": sum(size(values) for values in states.values()),
        }

        if self.plan.backend == "msamp":
            report = fp8.ours("amp8").report(self.model, self.optimizer)
            total = report["parameters"]["all"]
            self.bytes = {k: round(v * total) for k, v in report["bytes_per_parameter"]["all"].items() if k != "total"}
            self.record["dtypes"]["levels"] = report["dtypes"]
            self.record["bytes_per_linear_parameter"] = report["bytes_per_parameter"]["linear"]

    def complete(self):
        """Adds up the shards of all ranks. Every rank calls it once, after its first optimizer step."""
        for hook in self.hooks:  # not in a hook: torch would miss those after it
            hook.remove()
        if self.zero is not None:
            self.count_zero()
        counts, sizes = self.record["dtypes"], self.bytes
        if self.sharded:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, (counts, sizes))
            everyone = everyone[: len(everyone) // self.plan.replicas]  # hsdp: the other groups hold the same
            whole = [add(list(parts)) for parts in zip(*everyone, strict=True)]
            if self.zero is not None:  # some of it every process has whole, and the gradients were counted as they came
                for key in sizes.keys() - set(zero.partitioned(self.zero)):
                    whole[1][key] = sizes[key]
                if "weight" not in zero.partitioned(self.zero):
                    whole[0]["parameters"] = counts["parameters"]
                whole[0]["gradients"] = counts["gradients"]
            most = {key: max(part[1][key] for part in everyone) for key in sizes}
            counts, sizes = whole
            self.record["share_per_process"] = {key: round(most[key] / sizes[key], 4) for key in sizes if sizes[key]}
        self.record["dtypes"] = counts
        total = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in self.parameters.values())
        per_parameter = {key: round(value / total, 4) for key, value in sizes.items()}
        self.record["bytes_per_parameter"] = per_parameter | {"total": round(sum(sizes.values()) / total, 4)}
        self.record["parameters"] = total
        self.record["truth"] = self.truth()

    def counts_wire(self):
        """Whether this is the step whose collectives are counted: the first one after everything exists."""
        return self.record["wire_bytes_per_step"] is None and self.record["bytes_per_parameter"] is not None

    def truth(self):
        """The line that says what was counted."""
        plan, dtypes = self.plan, self.record["dtypes"]
        group = f" {dist.get_backend()}" if dist.is_initialized() else ""
        what = {"fp32": "fp32", "bf16": "bf16 compute", "fp16": "fp16 compute, gradient scaler"}.get(plan.precision)
        what = what or self.fp8_truth()
        where = plan.strategy if plan.strategy == "single" else f"{plan.strategy} x{plan.num_processes}{group}"
        share = self.record.get("share_per_process", {}).get("optimizer", 1)
        how = f", {share:.0%} of the optimizer state each" if self.zero is not None else ", sharded"
        parts = [where + (how if self.sharded else ""), what]
        parts[-1] += ", compiled" if plan.compile else ""
        parts[-1] += ", offloaded to the host" if plan.offload else ""
        parts[-1] += ", activations computed again" if plan.ckpt else ""
        parts.append(
            "parameters " + " and ".join(dtypes["parameters"]) + ", gradients " + " and ".join(dtypes["gradients"])
        )
        parts.append(f"{self.record['bytes_per_parameter']['total']:.1f} B/param")
        parts += ["rehearsal on a CPU"] if plan.rehearsal else []
        return " | ".join(parts)

    def fp8_truth(self):
        """`fp8 MS-AMP O2 (amp8, not Microsoft's package), emulated: no FP8 hardware | 16 of 17 Linear in FP8, ...`"""
        plan, record = self.plan, self.record
        name = {
            "ao": f"torchao {plan.level}",
            "te": f"TransformerEngine {plan.level}",
            "msamp": f"MS-AMP {plan.level.upper()} (amp8, not Microsoft's package)",
        }[plan.backend]
        if plan.fp8_options.get("recipe"):
            name += " with TE's delayed scaling"
        text = f"fp8 {name}" + (", emulated: no FP8 hardware" if plan.emulated else "")
        text += f" | {record['linear_converted']} of {record['linear_total']} Linear in FP8"
        text += f", {record['layernorm_converted']} LayerNorm" if record["layernorm_converted"] else ""
        if record["share_converted"] < 0.5:  # convolutions and embeddings stay in high precision
            text += f", {record['share_converted']:.1%} of the parameters"
        skipped = [f"{entry['name']} ({entry['reason']})" for entry in record["linear_skipped"]]
        more = f" and {len(skipped) - 3} more" if len(skipped) > 3 else ""
        return text + (f", skipped {', '.join(skipped[:3])}{more}" if skipped else "")


def inner(optimizer):
    """The torch optimizer inside Accelerate's, and inside DeepSpeed's."""
    return getattr(zero.of(optimizer) or optimizer, "optimizer", optimizer)


def elements(tensors):
    counts = {}
    for tensor in tensors:
        name = str(tensor.dtype)[6:]
        counts[name] = counts.get(name, 0) + tensor.numel()
    return counts


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def add(parts):
    """Sums nested dicts of numbers key by key; what is not a number is the same everywhere."""
    if isinstance(parts[0], dict):
        keys = dict.fromkeys(key for part in parts for key in part)
        return {key: add([part[key] for part in parts if key in part]) for key in keys}
    return sum(parts) if isinstance(parts[0], int) else parts[0]


class Wire(TorchDispatchMode):
    """Counts logical bytes sent by this rank while active, from the collectives that really run, ring accounting.

    all-reduce 2(N-1)/N of the tensor, all-gather and reduce-scatter and all-to-all (N-1)/N of the full size, broadcast
    from the root once.
    """

    FACTORS = {"allreduce_": 2, "_allgather_base_": 1, "allgather_": 1, "_reduce_scatter_base_": 1,
               "reduce_scatter_": 1, "alltoall_base_": 1, "allreduce_coalesced_": 2,
               "allgather_into_tensor_coalesced_": 1, "reduce_scatter_tensor_coalesced_": 1,
               "all_reduce": 2, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}  # fmt: skip

    def __init__(self):
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it goes first: its collectives come by here
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1]
            flat = torch.utils._pytree.tree_leaves((args, out))
            largest = max((size([t]) for t in flat if isinstance(t, torch.Tensor)), default=0)
            world = next((group.size() for group in map(process_group, flat) if group), dist.get_world_size())
            self.sent += self.FACTORS.get(name, 0) * largest * (world - 1) / world
        return out


def process_group(value):
    """The group that a collective's boxed argument stands for, or None."""
    try:
        return dist.ProcessGroup.unbox(value) if isinstance(value, torch.ScriptObject) else None
    except RuntimeError:
        return None  # a reduction's operator, say
