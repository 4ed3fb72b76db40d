"""The evidence: counts on live tensors that show what a run really does.

An `Evidence` is created when a model and its optimizer are prepared. It is complete after the first optimizer step,
when gradients and optimizer state exist. It raises Refused if the run is not what its config says. Its `record` is the
entry `evidence` of run.json, with counts over the whole model.
"""

import re
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.hooks import RemovableHandle

from faithful.backends import cpu_matmul
from faithful.backends.base import Backend
from faithful.backends.linear import in_fp8
from faithful.errors import Refused
from faithful.models.blocks import by_compiler
from faithful.models.layers import FP8Layers, Hook, linear_names
from faithful.strategies.base import Strategy
from faithful.tensors.names import elements, fingerprint, parameters_of, size, unwrapped

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


class Layers:
    """A model before its conversion: its class, its Linear layers, a hash of its weights, what optimizers own of it.
    owned: ids of the parameters of the optimizers that are known so far. `skipped`: [(name, reason)] of Linear layers
    that stay in high precision."""

    def __init__(self, backend: Backend, model: nn.Module, owned: set[int]) -> None:
        self.model, self.names = type(model).__name__, linear_names(model)
        self.owned = {name for name, parameter in model.named_parameters() if id(parameter) in owned}
        of_te = FP8Layers(backend.kinds, model).counted()[0]  # its blocks contain Linear layers, too
        self.linear = len(self.names) + of_te
        self.initial_weights = fingerprint(model)
        self.skipped: list[tuple[str, str]] = []


class Calls:
    """Which of the converted layers are called before the first update, and not once in FP8. Compiled code is not
    watched, which would compile it again: there it is those that are frozen and in eval()."""

    def __init__(self, layers: dict[str, nn.Module], compiled: bool) -> None:
        self.layers = layers
        self.called: set[nn.Module] = set()
        self.in_fp8: set[nn.Module] = set()
        self.hooks = [] if compiled else [m.register_forward_pre_hook(Hook(self.see)) for m in self.layers.values()]
        self.compiled = compiled

    def see(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.called.add(layer)
        if in_fp8(layer, *inputs):
            self.in_fp8.add(layer)

    def outside(self) -> dict[str, nn.Module]:
        """{name: layer} of those that have computed outside FP8 alone."""
        for hook in self.hooks:
            hook.remove()
        if self.compiled:
            with torch.enable_grad():
                return {name: layer for name, layer in self.layers.items() if not in_fp8(layer)}
        return {name: layer for name, layer in self.layers.items() if layer in self.called - self.in_fp8}


class Evidence:
    """The evidence of one model. optimizers: those that update its parameters; more may come after the first."""

    def __init__(
        self,
        strategy: Strategy,
        backend: Backend,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        layers: Layers,
    ) -> None:
        self.strategy, self.backend, self.model, self.optimizers = strategy, backend, model, optimizers
        self.plan = plan = strategy.plan
        self.parameters = dict(parameters_of(model))
        self.counted = self.strategy.counted(self.parameters)
        trainable = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        self.sharded = self.strategy.sharded(trainable)
        self.stepped: Counter[int] = Counter()  # {id of an optimizer: its steps, while they are counted}
        self.gradients: dict[int, tuple[dict[str, int], int]] = {}  # of one step: (elements by dtype, bytes)
        self.owned_before = layers.owned
        self.fp8 = FP8Layers(backend.kinds, model)
        linear, norms = self.fp8.counted()
        self.record: dict[str, Any] = {
            "model": layers.model,
            "linear_total": layers.linear,
            "linear_converted": linear,
            "linear_names": layers.names,
            "linear_skipped": [{"name": name, "reason": reason} for name, reason in layers.skipped],
            "layernorm_converted": norms,
            "share_converted": self.fp8.share(strategy.shape_of),
            "large_not_converted": self.fp8.large_outside(strategy.shape_of),
            "dtypes": {"parameters": {}, "gradients": {}, "optimizer_state": {}, "linear_output": None},
            "bytes_per_parameter": None,
            "optimizer_owns_all": None,
            "sharded": self.sharded,
            "units": self.strategy.units(model),
            "wire_bytes_per_step": 0 if plan.num_processes == 1 else None,
            "eval_precision": self.backend.eval_precision,
            "initial_weights": layers.initial_weights,
        }
        self.refuse_what_is_not_there(layers)
        self.hook: RemovableHandle | None = None
        self.calls: Calls | None = None
        if plan.precision == "fp8":
            self.calls = Calls(self.fp8.linear, plan.compile)
        if not plan.compile and plan.precision != "fp8":
            # The output of a Linear has the dtype of its products. Not of a model that is a Linear itself: Accelerate
            # returns what it computes in fp32.
            inside = (module for name, module in unwrapped(model).named_modules() if name)
            first_linear = next((module for module in inside if isinstance(module, torch.nn.Linear)), None)
            if first_linear is not None:
                self.hook = first_linear.register_forward_hook(Hook(self.see_output))

    def refuse_what_is_not_there(self, layers: Layers) -> None:
        plan, record, skipped = self.plan, self.record, layers.skipped
        if plan.precision == "fp8" and not record["linear_converted"]:
            why = "; ".join(f"{name or 'it'}: {reason}" for name, reason in skipped[:3]) or f"{layers.model} has none"
            raise Refused(
                f"asked for fp8, but none of {layers.linear} Linear layers can be: {why}. "
                "Use a bf16 config, or see what fp8_config: skip: in the YAML leaves out"
            )
        expected = layers.linear - len(skipped)
        if plan.precision == "fp8" and record["linear_converted"] != expected:
            raise Refused(
                f"{expected} Linear layers should be in FP8, {record['linear_converted']} of {layers.linear} are: name "
                "those that should not under fp8_config: skip: in the YAML"
            )
        if self.strategy.must_shard and plan.num_processes > 1 and not self.sharded:
            raise Refused(
                f"asked for {plan.strategy}, but no parameter is sharded: set the model's "
                "_no_split_modules to the class names of its blocks, or use a ddp config"
            )

    def owned(self) -> set[int]:
        return set().union(*(self.strategy.parameter_ids(optimizer) for optimizer in self.optimizers))

    def left_out(self) -> list[str]:
        """Names of the trainable parameters that no prepared optimizer updates."""
        owned = self.owned()
        return [name for name, p in self.parameters.items() if p.requires_grad and id(p) not in owned]

    def see_output(self, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        self.record["dtypes"]["linear_output"] = str(output.dtype)[6:]

    def waits_for(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this step of the optimizer is to be counted."""
        return optimizer in self.optimizers and not (self.complete and self.stepped[id(optimizer)])

    def before_first_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Counts gradients, between the backward pass and the update."""
        if self.hook:
            self.hook.remove()
        seen, planned = self.record["dtypes"]["linear_output"], DTYPES.get(self.plan.precision)
        if seen and planned and seen != planned:
            raise Refused(
                f"asked for {self.plan.precision}, but Linear layers compute in {seen}: call the model that "
                "accelerator.prepare returned, or compute inside accelerator.autocast()"
            )
        if self.calls:
            self.leave_out(self.calls.outside())
            self.calls = None
        mine = self.updated_by(optimizer)
        held = [shard.tensor for shard in self.strategy.shards(mine, optimizer) if shard.kind == "gradient"]
        held += self.backend.gradients(mine)
        self.gradients[id(optimizer)] = elements(held), size(held)

    def leave_out(self, outside: dict[str, nn.Module]) -> None:
        """Counts as not converted what has computed outside FP8 before the first update. outside: {name: layer}. Raises
        Refused if nothing is left."""
        record = self.record
        record["linear_converted"] -= sum(self.fp8.counts[layer][0] for layer in outside.values())
        record["linear_skipped"] += [{"name": name, "reason": "frozen and in eval()"} for name in outside]
        record["share_converted"] = self.fp8.share(self.strategy.shape_of, set(outside.values()))
        if not record["linear_converted"] and not self.plan.compile:
            raise Refused(
                "asked for fp8, but no Linear layer has computed in FP8 in the first step: those that could are frozen "
                "and in eval(), where no gradient goes through them. Call train() on the model, or use a bf16 config"
            )

    def updated_by(self, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
        """{name: parameter} that `optimizer` updates; parameters of no optimizer count with the first one."""
        if len(self.optimizers) == 1:
            return self.counted
        mine = self.strategy.parameter_ids(optimizer)
        if optimizer is self.optimizers[0]:
            mine = mine | (set(map(id, self.counted.values())) - self.owned())
        return {name: p for name, p in self.counted.items() if id(p) in mine}

    def after_first_update(self, optimizer: torch.optim.Optimizer) -> bool:
        """Counts parameters and optimizer state when each optimizer has stepped, and adds up the shards of all ranks.
        If one of them begins later, as that of a discriminator, it counts when another steps again, and once more when
        that one has begun. Returns whether it has counted. Every rank calls it."""
        self.stepped[id(optimizer)] += 1
        if len(self.stepped) < len(self.optimizers) and self.stepped[id(optimizer)] == 1:
            return False
        self.strategy.refuse_apart(self.model)
        kinds = ("weight", "gradient", "gathered", "master", "optimizer", "counter", "class")
        held: dict[str, list[torch.Tensor]] = {kind: [] for kind in kinds}
        states: dict[str | None, list[torch.Tensor]] = {}  # {key of the optimizer's state: its tensors}
        for optimizer in self.optimizers:
            for held_as, _, key, tensor in self.strategy.shards(self.updated_by(optimizer), optimizer):
                held[held_as].append(tensor)
                if held_as == "optimizer":
                    states.setdefault(key, []).append(tensor)
        gradients, gradient_bytes = zip(*self.gradients.values(), strict=True)
        sizes = {kind: size(held[kind]) for kind in ("weight", "gathered", "master", "optimizer")}
        sizes = {"weight": sizes.pop("weight"), "gradient": sum(gradient_bytes)} | sizes
        counts: dict[str, Any] = {"parameters": elements(held["weight"]), "gradients": summed(list(gradients))}
        counts["optimizer_state"] = {key: elements(tensors) for key, tensors in states.items()}
        counts["linear_output"] = self.record["dtypes"]["linear_output"]
        counts |= {"master": elements(held["master"])} if held["master"] else {}
        total = sum(self.strategy.shape_of(parameter).numel() for parameter in self.parameters.values())
        if report := self.backend.levels(self.model, self.optimizers[0]):
            per_class = report["bytes_per_parameter"]["all"]
            sizes = {key: round(v * report["parameters"]["all"]) for key, v in per_class.items() if key != "total"}
        if self.sharded:
            counts, sizes = self.over_all_ranks(counts, sizes)
        if report:  # of this process
            counts["levels"] = report["dtypes"]
            self.record["bytes_per_linear_parameter"] = report["bytes_per_parameter"]["linear"]
        self.record["dtypes"] = counts
        sizes = {key: value for key, value in sizes.items() if value or key != "gathered"}
        per_parameter = {key: round(value / total, 4) for key, value in sizes.items()}
        self.record["bytes_per_parameter"] = per_parameter | {"total": round(sum(sizes.values()) / total, 4)}
        self.record["parameters"] = total
        self.record["measured"] = self.summary()
        return True

    def over_all_ranks(self, counts: dict[str, Any], sizes: dict[str, int]) -> tuple[dict[str, Any], dict[str, int]]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (counts, sizes))
        everyone = everyone[: len(everyone) // self.plan.replicas]  # hsdp: the other replicas hold the same
        whole_counts, whole = (summed(list(parts)) for parts in zip(*everyone, strict=True))
        sharded = self.strategy.sharded_kinds
        for key in sizes.keys() - set(sharded):  # each process holds these whole
            whole[key] = sizes[key]
        if "weight" not in sharded:
            whole_counts["parameters"] = counts["parameters"]
        most = {key: max(part[1][key] for part in everyone) for key in sizes}
        self.record["share_per_process"] = {key: round(most[key] / whole[key], 4) for key in whole if whole[key]}
        return whole_counts, whole

    @property
    def complete(self) -> bool:
        return self.record["bytes_per_parameter"] is not None

    def summary(self) -> str:
        """The line printed after the first step: what was counted."""
        plan, dtypes = self.plan, self.record["dtypes"]
        named = re.search(rf"\b{plan.device}:(\w+)", dist.get_backend_config() if dist.is_initialized() else "")
        group = f" {named[1]}" if named else ""  # of init_device_mesh, too, for which get_backend() says "undefined"
        where = plan.strategy if plan.strategy == "single" else f"{plan.strategy} x{plan.num_processes}{group}"
        parts = [where + (self.strategy.how_sharded(self.model, self.record) if self.sharded else "")]
        parts += [self.backend.name] if plan.precision != "fp8" else self.fp8_summary()
        parts[-1] += cpu_matmul.through_fp32(plan.precision)
        if plan.compile:
            breaks = by_compiler()["graph_breaks"]
            parts[-1] += ", compiled" + (f" with {breaks} graph breaks" if breaks else "")
        parts[-1] += ", offloaded to the host" if plan.offload else ""
        parts[-1] += ", activations computed again" if plan.ckpt else ""
        parts[-1] += " from inputs on the host" if plan.ckpt_on_host else ""
        parts.append(
            f"parameters {' and '.join(dtypes['parameters'])}, gradients {' and '.join(dtypes['gradients']) or 'none'}"
        )
        share, sizes = self.record.get("share_per_process"), self.record["bytes_per_parameter"]
        parts.append(f"{sizes['total']:.1f} B/param")
        if share:
            each = sum(size * share.get(key, 1) for key, size in sizes.items() if key != "total")
            parts[-1] += f", {each:.1f} in each process"
        if len(self.stepped) < len(self.optimizers):
            parts.append(f"{len(self.stepped)} of {len(self.optimizers)} optimizers have stepped")
        parts += ["rehearsal on a CPU"] if plan.rehearsal else []
        return " | ".join(parts)

    def fp8_summary(self) -> list[str]:
        """Two parts of the line: `fp8 MS-AMP O2 (...), emulated: no FP8 hardware`, `16 of 17 Linear in FP8, ...`."""
        record = self.record
        fp8 = f"fp8 {self.backend.name}"
        fp8 += ", emulated: no FP8 hardware" if self.plan.emulated else ""
        # By the formats that the layers have noted. The emulation and compiled code note none: there by the config.
        gemm = record["dtypes"].get("levels", {}).get("gemm")
        planned = str(self.plan.level).endswith("fp4") or self.plan.fp8_options.get("recipe") == "fp4"
        bits = "FP4" if ("e2m1 x e2m1" in gemm if gemm else planned) else "FP8"
        text = f"{record['linear_converted']} of {record['linear_total']} Linear in {bits}"
        text += f", {record['layernorm_converted']} LayerNorm" if record["layernorm_converted"] else ""
        if record["share_converted"] < 0.5:  # convolutions and embeddings stay in high precision
            text += f", {record['share_converted']:.1%} of the parameters"
        why: dict[str, list[str]] = {}
        for entry in record["linear_skipped"]:
            why.setdefault(entry["reason"], []).append(entry["name"])
        skipped = [f"{some(names)} ({reason})" for reason, names in why.items()]
        text += f", skipped {some(skipped)}" if skipped else ""
        large = [f"{entry['name']} ({entry['share']:.0%})" for entry in record["large_not_converted"]]
        return [fp8, text + (f", large weights of no Linear {some(large)}" if large else "")]


def some(words: list[str]) -> str:
    """The first three words, and the number of the others."""
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")


def refuse_other_launch(strategy: Strategy, kind: DistributedType, processes: int) -> None:
    """Raises Refused unless Accelerate distributes the run as planned. kind, processes: what it says."""
    plan = strategy.plan
    kinds = (*strategy.distributed_types, *(("NO",) if plan.num_processes == 1 else ()))  # DDP of one process
    if kind not in [DistributedType[name] for name in kinds] or processes != plan.num_processes:
        mismatch = f"asked for {plan.strategy} x{plan.num_processes}, Accelerate runs {kind.value} x{processes}"
        raise Refused(f"{mismatch}: start it with accelerate launch, and let Accelerator() come first")


def summed(parts: list[Any]) -> Any:
    """Adds nested dicts of integers and lists key by key. Of other values it takes the first."""
    if isinstance(parts[0], dict):
        keys = dict.fromkeys(key for part in parts for key in part)
        return {key: summed([part[key] for part in parts if key in part]) for key in keys}
    if isinstance(parts[0], list):
        return [value for part in parts for value in part]
    return sum(parts) if isinstance(parts[0], int) else parts[0]
