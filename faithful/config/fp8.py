"""FP8: what the keys of fp8_config ask for, where mixed_precision is fp8, and what each backend can.

BackendRules documents the questions that are answered before anything runs; a class answers them for one backend, and
BACKENDS names it. What a backend does is in faithful/backends. This module imports no torch.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from faithful.config.schema import digits, on
from faithful.config.strategies import Memory, StrategyRules, WholeModel, computed, others

if TYPE_CHECKING:
    from faithful.config.settings import Settings
    from faithful.launch.machine import Machine

TE_OPTIONS = ("fp8_format", "margin", "amax_history_len", "amax_compute_algo")
AO_KEYS = "enable_fsdp_float8_all_gather pad_inner_dim"  # of torchao's Float8Linear
MX = ("mxfp8", "mxfp8_with_gw_hp", "mxfp4")  # torchao's levels with one scale for 32 values
MX_SCALES = ("rceil", "floor")  # torchao's names of the rules by which that scale is rounded; the first is the default
SHARE = re.compile(r"last ([0-9]{1,3})%")  # in a skip list, for the last of the Linear layers
NVFP4_KEYS = "disable_rht disable_stochastic_rounding disable_2d_quantization"  # TransformerEngine's names
FP4_KEYS = "disable_gradient_estimator disable_outlier_clamping"  # the parts of MS-AMP's FP4
TE_KEYS = "format margin amax_history_len amax_compute_algo interval override_linear_precision use_autocast_during_eval"
DEFAULTS = {  # what the launcher exports for keys that a file leaves out
    "fp8_amax_compute_algo": "most_recent", "fp8_amax_history_len": 1024, "fp8_enable_fsdp_float8_all_gather": True,
    "fp8_format": "HYBRID", "fp8_interval": 1, "fp8_margin": 0, "fp8_opt_level": "O2", "fp8_pad_inner_dim": True,
    "fp8_use_autocast_during_eval": False,
}  # fmt: skip
Get = Callable[..., str]  # the value of a variable of fp8_config's, by the key's name in capitals, or a default


@dataclass(frozen=True)
class FP8:
    """The section fp8_config."""

    backend: str | None = None  # None: the precision is another one
    level: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the backend
    skip: list[str] = field(default_factory=list)  # patterns of the Linear layers that stay in high precision
    without_effect: list[str] = field(default_factory=list)  # keys that are set, each with the reason
    notes: list[str] = field(default_factory=list)  # what runs otherwise than the keys say, with the same result

    @property
    def rules(self) -> "BackendRules":
        return BACKENDS.get(self.backend, HIGH_PRECISION)


@dataclass(frozen=True)
class LinearCost:
    """What a Linear layer costs a GPU in a step beside its three products, in tools/step_time.py. The first four are
    the bytes that casts, amaxes and transposed copies read and write for each element of a tensor, counted by hand in
    the code of each backend."""

    input: float = 0
    output_gradient: float = 0
    weight: float = 0
    weight_gradient: float = 0
    strided: int = 0  # transposed copies of input, output gradient and weight by torch's own kernel, which is slow
    kernels: tuple[int, int] = (1, 2)  # in forward and backward, those of the products, too
    host: float = 0  # seconds of Python beside the launches of kernels
    shares_casts: bool = False  # whether layers that have the same input cast it once
    speed: float = 1  # of FP8 products, relative to those with one scale for each tensor
    fp8_forward: bool = True  # whether this product is in FP8, too
    fp8_weight_gradient: bool = True  # and this one


class BackendRules:
    """The answers of high precision, which converts nothing."""

    implementation = "torch"  # the package that computes
    levels: tuple[str, ...] = ()  # the first is the default
    level_key = "recipe"  # of fp8_config
    recipes: dict[str, str] = {}  # {word of a config's name: the recipe that it stands for}
    keys = ""  # of fp8_config that the backend reads, beside backend and skip
    skip = ""  # the default of `skip`, as in the backend's own recipes
    compiles: str | None = None  # what compiles kernels without dynamo_config, for a message
    runs_on_cpu = True  # whether its own layers compute on a CPU, in the formats that they have on a GPU
    autocasts = False  # whether other layers compute under autocast, also where a strategy casts weights
    sends_ordinary_gradients = True  # whether what is sent follows from the dtypes of weights and gradients

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    def reads(self, section: Mapping[str, Any]) -> list[str]:
        """The keys that the backend reads where a file says `section`, whose keys are without their prefix."""
        return ["backend", "skip", *self.keys.split()]

    def level(self, get: Get) -> str:
        return get("RECIPE") or self.levels[0]

    def options(self, get: Get, level: str, sharded: bool) -> tuple[dict[str, Any], list[str]]:
        """(options, notes) that the variables ask for. sharded: by FSDP2, which gathers weights."""
        return {}, []

    def traced(self, options: dict[str, Any]) -> dict[str, Any]:
        """Those of the options that change what a step holds."""
        return {}

    def in_software(self, strategy: StrategyRules, level: str | None) -> bool:
        """Whether a CPU computes in high precision what the backend computes in FP8."""
        return not self.runs_on_cpu

    def problems(self, settings: "Settings", machine: "Machine") -> Iterator[str]:
        """Yields every reason why the backend cannot run these settings."""
        yield from ()

    def slower(self, settings: "Settings") -> Iterator[str]:
        """Yields why a step on a GPU takes longer than in bf16, with the config to use."""
        yield from ()

    def adjust_memory(self, memory: Memory, model: WholeModel, settings: "Settings") -> None:
        """Changes the memory of a process where the strategy's rule does not cover this backend."""

    def linear_cost(self, settings: "Settings") -> LinearCost:
        """What one of its layers costs in a step beside its products."""
        if own_bytes(settings) == computed(settings):
            return LinearCost()
        return LinearCost(weight=4 + 2, weight_gradient=2 + 4, kernels=(2, 3))  # fp32 to 16 bits, and back

    def bytes_sent(self, settings: "Settings", fp8: float, rest: float) -> float | None:
        """Bytes that each process sends in a step for so many parameters of FP8 layers, and the rest."""
        return settings.rules.bytes_sent(settings, fp8 + rest)


class TorchAORules(BackendRules):
    implementation = "torchao"
    levels = ("tensorwise", "rowwise", "rowwise_with_gw_hp", *MX)
    keys = "recipe"
    skip = "first, last"

    def reads(self, section: Mapping[str, Any]) -> list[str]:
        more = "scale_calculation_mode" if section.get("recipe") in MX else AO_KEYS
        return [*super().reads(section), *more.split()]

    def options(self, get: Get, level: str, sharded: bool) -> tuple[dict[str, Any], list[str]]:
        if level in MX:  # whose weights are gathered in 16 bit
            return {"scale_calculation_mode": get("SCALE_CALCULATION_MODE") or MX_SCALES[0]}, []
        gathers, notes = on(get("ENABLE_FSDP_FLOAT8_ALL_GATHER", "1")), []
        if gathers and not sharded:
            notes = ["enable_fsdp_float8_all_gather (Accelerate's default) is off outside FSDP2, which alone gathers"]
        pads = on(get("PAD_INNER_DIM", "1"))
        return {"enable_fsdp_float8_all_gather": gathers and sharded, "pad_inner_dim": pads}, notes

    def traced(self, options: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in options.items() if key == "scale_calculation_mode"}

    def in_software(self, strategy: StrategyRules, level: str | None) -> bool:
        return strategy.replicates or level in MX  # torchao's own emulation is for FSDP2 and ZeRO, and slower

    def problems(self, settings: "Settings", machine: "Machine") -> Iterator[str]:
        level, strategy = settings.level or "", settings.strategy
        rule, has = settings.fp8.options.get("scale_calculation_mode", MX_SCALES[0]), machine_has(machine)
        if rule not in MX_SCALES:
            yield f"fp8_config scale_calculation_mode {rule} is not one of {', '.join(MX_SCALES)}"
        if settings.fp8.options.get("enable_fsdp_float8_all_gather") and level.startswith("rowwise"):
            yield (
                f"torchao gathers in FP8 with tensorwise scales only, not {level}: set "
                "enable_fsdp_float8_all_gather to false in fp8_config"
            )
        if settings.ram_efficient and settings.sharded:
            yield "torchao with fsdp_cpu_ram_efficient_loading, which Accelerate refuses: set the key to false"
        if level == "mxfp4" and machine.devices:
            yield (
                "neither torchao nor TransformerEngine trains MXFP4 on NVIDIA's GPUs: rehearse it with "
                f"CUDA_VISIBLE_DEVICES=, or use {strategy}_fp8_te_nvfp4, which needs compute capability 10.0"
            )
        elif old := list(too_old(settings, machine)):
            yield from old
        elif level in MX and machine.capability and machine.capability[0] != 10:  # for which its kernels are built
            yield f"ao {level} needs compute capability 10.x, {machine.name} has {has}: use {strategy}_fp8"
        elif level in MX and machine.capability and numbers(machine.cuda) < (12, 8):
            yield f"ao {level} needs CUDA 12.8, torch was built for {machine.cuda}: use {strategy}_fp8"
        runs = machine.devices or not self.in_software(settings.rules, level)
        if runs and "torchao" not in machine.packages:
            yield "torchao is not installed: pip install torchao"

    def slower(self, settings: "Settings") -> Iterator[str]:
        if settings.compile or settings.level in MX:  # whose casts are kernels in any case, which nobody here has timed
            return
        if settings.deepspeed.runs_as is None and settings.deepspeed.stage is not None:
            use = f"use {settings.strategy}_bf16, as DeepSpeed compiles nothing"
        elif settings.strategy in ("single", "ddp", "fsdp"):
            use = f"use {settings.strategy}_fp8_compile"
        else:
            use = "set dynamo_config, as in single_fp8_compile"
        yield f"on a GPU this step is slower than bf16's, as torchao's casts are not compiled: {use}"

    def linear_cost(self, settings: "Settings") -> LinearCost:
        own = own_bytes(settings)
        weight, weight_gradient = (0, 0) if own == 2 else (4 + 2, 2 + 4)
        of_rows = str(settings.level).startswith("rowwise")  # scales of rows, and of columns for the other product
        cost = LinearCost(
            weight_gradient=weight_gradient,
            speed=0.8 if of_rows else 1,
            fp8_weight_gradient=not str(settings.level).endswith("_with_gw_hp"),
        )
        if settings.level in MX:  # a cast for each product, by a kernel of its own; 16-bit copies of weights in fp32
            x = (2 + 1) * (1 + cost.fp8_weight_gradient)
            return replace(cost, input=x, output_gradient=x, weight=weight + 2 * (2 + 1), kernels=(9, 16), host=3e-4)
        columns = of_rows and cost.fp8_weight_gradient
        if not settings.compile:
            # abs 2 + 2, max 2, times scale 2 + 4, clamp 4 + 4, to FP8 4 + 1, each over a whole tensor
            x, w = 25 * (1 + columns), 25 * (1 + of_rows)
            return replace(cost, input=x, output_gradient=x, weight=weight + w, strided=1, kernels=(26, 30), host=3e-4)
        cost = replace(cost, kernels=(3, 6), shares_casts=True)
        if of_rows:  # amax and cast of a row read it once; of a column, twice
            x, w = 2 + 1 + (2 + 2 + 1) * columns, own + 1 + 2 * own + 1
            return replace(cost, input=x, output_gradient=x, weight=w)
        # The kernel that makes x finds its amax. Each is written twice, the second time transposed.
        w = 2 * own + 1 + 1
        if settings.fp8.options.get("enable_fsdp_float8_all_gather"):  # each process casts its part
            w = (4 + 4 + 1) / settings.shards + 1 + 1
        return replace(cost, input=2 + 1 + 1, output_gradient=2 + 2 + 1 + 1, weight=w)

    def bytes_sent(self, settings: "Settings", fp8: float, rest: float) -> float | None:
        rules, in_fp8 = settings.rules, settings.fp8.options.get("enable_fsdp_float8_all_gather")
        return (rules.bytes_sent(settings, fp8, 1 if in_fp8 else 0) or 0) + (rules.bytes_sent(settings, rest) or 0)


class TransformerEngineRules(BackendRules):
    implementation = "transformer_engine"
    levels = ("delayed", "current", "block", "mxfp8", "nvfp4")
    keys = "recipe use_mxfp8_block_scaling"
    runs_on_cpu = False

    def reads(self, section: Mapping[str, Any]) -> list[str]:
        recipe = section.get("recipe", "delayed")
        more = {"delayed": TE_KEYS, "current": "format", "block": "format", "nvfp4": NVFP4_KEYS}.get(recipe, "")
        return [*super().reads(section), *more.split()]

    def options(self, get: Get, level: str, sharded: bool) -> tuple[dict[str, Any], list[str]]:
        if level == "delayed":
            return of_delayed_scaling(get), []
        if level == "nvfp4":
            return turned_on(NVFP4_KEYS, get), []
        chosen = {"fp8_format": get("FORMAT") or "HYBRID"} if level in ("current", "block") else {}
        return chosen, []

    def traced(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    def problems(self, settings: "Settings", machine: "Machine") -> Iterator[str]:
        yield from of_options(settings.fp8.options)
        level, strategy = settings.level, settings.strategy
        if settings.compile:
            yield f"te {level} does not compile into one graph upstream: use single_fp8_compile (ao) or leave it out"
        if settings.fsdp.checkpoints_on_host:
            yield (
                "fsdp_activation_checkpointing_offload is of torch's checkpointing, TransformerEngine has its own: "
                "leave it out"
            )
        has, capability = machine_has(machine), machine.capability or (0, 0)
        if level == "mxfp8" and machine.capability and not (10, 0) <= capability < (12, 0):  # TE's own limits
            yield f"mxfp8 needs compute capability 10.0 to 11.x, {machine.name} has {has}: use {strategy}_fp8_te"
        elif level == "nvfp4" and machine.capability and capability < (10, 0):
            yield f"nvfp4 needs compute capability 10.0, {machine.name} has {has}: use {strategy}_fp8_te"
        elif old := list(too_old(settings, machine)):
            yield from old
        elif level == "block" and machine.capability and capability < (9, 0):
            yield f"te block needs compute capability 9.0, {machine.name} has {has}: use {strategy}_fp8_te"
        elif level == "block" and machine.capability and numbers(machine.cuda) < (12, 9):
            yield f"te block needs CUDA 12.9, torch was built for {machine.cuda}: use {strategy}_fp8_te"
        if machine.devices and "transformer_engine" not in machine.packages:
            install = "./launch.sh setup --extra te, or pip install 'accelerate-recipes[te]'"
            yield f"TransformerEngine is not installed: {install} (docs/fp8.md says what it needs)"

    def linear_cost(self, settings: "Settings") -> LinearCost:
        fp4 = settings.level == "nvfp4"  # its amaxes are of the tensor itself, and of the rotated one
        amax = 2 if fp4 or settings.level == "current" else 0  # else the kernel that casts finds it, for the next step
        cast = amax + 2 + (0.5 + 0.5 if fp4 else 1 + 1)  # and writes a transposed copy
        weight, weight_gradient = (0, 0) if own_bytes(settings) == 2 else (4 + 2, 2 + 4)
        speed = {"block": 0.8, "nvfp4": 2}.get(str(settings.level), 1)
        return LinearCost(
            cast, cast, weight + cast, weight_gradient, kernels=(5, 7), host=1.5e-4, speed=speed
        )  # its modules are written in Python


class MSAMPRules(BackendRules):
    implementation = "amp8"
    levels = ("o2", "o1", "o3")
    level_key = "opt_level"
    recipes = {"te": "te_delayed", "fp4": "fp4"}  # a level whose layers compute in another way
    keys = "opt_level recipe"
    compiles = "MS-AMP's level"
    autocasts = True
    sends_ordinary_gradients = False  # but in FP8, with scales

    def reads(self, section: Mapping[str, Any]) -> list[str]:
        more = {"te_delayed": TE_KEYS, "fp4": FP4_KEYS}.get(str(section.get("recipe")), "")
        return [*super().reads(section), *more.split()]

    def level(self, get: Get) -> str:
        return get("OPT_LEVEL", "O2").lower()

    def options(self, get: Get, level: str, sharded: bool) -> tuple[dict[str, Any], list[str]]:
        recipe = get("RECIPE")
        options = {"te_delayed": of_delayed_scaling, "fp4": partial(turned_on, FP4_KEYS)}.get(recipe, lambda _: {})(get)
        return {"recipe": recipe} | options if recipe else {}, []

    def traced(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    def problems(self, settings: "Settings", machine: "Machine") -> Iterator[str]:
        strategy, recipe = settings.strategy, settings.fp8.options.get("recipe", "te_delayed")
        yield from of_options(settings.fp8.options)
        if recipe not in self.recipes.values():
            yield f"fp8_config recipe {recipe}: MSAMP combines with {' and '.join(self.recipes.values())} only"
        if settings.fsdp.ignored_modules:
            names = settings.fsdp.ignored_modules
            yield f"fsdp_ignored_modules {names}: MS-AMP's levels shard all weights: leave it out"
        if settings.sharded and settings.level == "o3":
            yield (
                f"MS-AMP's o3 keeps a whole FP8 weight in each process, {strategy} shards it: use fsdp_fp8_msamp_o2, "
                "where a process holds 6/N bytes per parameter, or ddp_fp8_msamp_o3"
            )
        if settings.fsdp.offload:
            yield (
                f"MS-AMP's levels under {strategy} are not offloaded: FSDP2's offloading moves .grad to the host, and "
                "FP8 gradients are no .grad: set fsdp_offload_params to false, or use fsdp_bf16_offload"
            )

    def linear_cost(self, settings: "Settings") -> LinearCost:
        # One kernel casts with the scale of earlier steps, finds the amax and writes a transposed copy; compiled, the
        # kernel that makes x finds it. So for the weight, in forward and again in backward. The weight's gradient comes
        # in bf16: amax 2, to FP8 2 + 1. kernels, host: as on an H100, results/fp8_speed.json.
        held = 1 if settings.level == "o3" or settings.sharded else 2
        x = 2 + 1 + 1
        cost = LinearCost(x, x, 2 * (held + 1 + 1), 2 + 2 + 1, kernels=(9, 15), host=1e-3)
        if settings.fp8.options.get("recipe") == "fp4":  # beside these amp8/fp4.py, counted there and not measured:
            # each of torch's operators reads and writes whole tensors, mostly in fp32
            cost = LinearCost(x + 118, x + 8, 2 * 86 + 5, 5 + 154, kernels=(55, 56), host=1e-3, fp8_forward=False)
        return replace(cost, shares_casts=not settings.compile)

    def bytes_sent(self, settings: "Settings", fp8: float, rest: float) -> float | None:
        rules = settings.rules
        return (rules.bytes_sent(settings, fp8, 1, 1) or 0) + (rules.bytes_sent(settings, rest) or 0)

    def adjust_memory(self, memory: Memory, model: WholeModel, settings: "Settings") -> None:
        n = settings.shards
        if settings.sharded:  # the bucket's codes, what is sent and received of them, and this process's part in fp32
            from amp8 import comm

            whole = (model.elements - sum(model.blocks)) * model.compute
            codes = model.next_blocks * (model.compute - 1)  # gathered in FP8
            memory.communication = whole + codes + min(comm.BUCKET, model.fp8_gradients) * (3 + 4 / n)
            # Codes are traced among the activations. They come as other gradients do, and leave for their owners.
            memory.sent_early = model.fp8_gradients * others(n) / model.gradients
        elif settings.level == "o3":
            memory.optimizer -= model.fp8_optimizer * others(n)
            memory.master /= n
            memory.gradients -= model.fp8_gradients * others(n)


HIGH_PRECISION = BackendRules()
BACKENDS: dict[str | None, BackendRules] = {  # the first is Accelerate's default
    "ao": TorchAORules("ao"),
    "te": TransformerEngineRules("te"),
    "msamp": MSAMPRules("msamp"),
}


def in_words(precision: str, backend: str | None, level: str | None, options: dict[str, Any]) -> str:
    """What a config asks for in the words of its name: `fp8 msamp o2_te`."""
    recipes = BACKENDS.get(backend, HIGH_PRECISION).recipes.items()
    recipe = next((word for word, name in recipes if name == options.get("recipe")), None)
    return " ".join(word for word in (precision, backend, f"{level}_{recipe}" if recipe else level) if word)


def own_bytes(settings: "Settings") -> int:
    """Bytes of a weight in high precision as a layer finds it: a strategy that divides the state casts it."""
    return computed(settings) if settings.rules.divides_state else 4


def key_of(name: str | None) -> str:
    """A backend's name as fp8_config says it."""
    return str(name).upper()


def parse(env: Mapping[str, str], precision: str, sharded: bool) -> FP8:
    """What the launcher's variables ask for. sharded: by FSDP2, which gathers weights."""
    if precision != "fp8":
        return FP8()

    def get(key: str, default: str = "") -> str:
        return env.get(f"ACCELERATE_FP8_{key}", default)

    said = get("BACKEND", key_of(next(iter(BACKENDS))))
    backend = {key_of(name): name for name in BACKENDS}.get(said, said)
    rules, level, options, notes = BACKENDS.get(backend), get("RECIPE"), {}, []
    if rules:
        level = rules.level(get)
        options, notes = rules.options(get, level, sharded)
    override = [get(f"OVERRIDE_{gemm}") for gemm in ("FPROP", "DGRAD", "WGRAD")]
    reasons = {
        "interval": (get("INTERVAL", "1") != "1", "TransformerEngine has removed it: scales are updated every step"),
        "override_linear_precision": (
            any(map(on, override)) or "".join(override).startswith(("tru", "(tr")),  # of a string, its first letters
            "TransformerEngine has removed it",
        ),
        "use_autocast_during_eval": (on(get("USE_AUTOCAST_DURING_EVAL")), "evaluation is always outside FP8"),
        "use_mxfp8_block_scaling": (on(get("USE_MXFP8_BLOCK_SCALING")), "write recipe: mxfp8 instead"),
    }  # fmt: skip
    without_effect = [f"{key}: {reason}" for key, (turned, reason) in reasons.items() if turned]
    skip = get("SKIP", rules.skip if rules else "").split(",")
    return FP8(backend, level, options, [pattern.strip() for pattern in skip if pattern.strip()], without_effect, notes)


def turned_on(keys: str, get: Get) -> dict[str, Any]:
    """Those of the keys that are true."""
    return {name: True for name in keys.split() if on(get(name.upper()))}


def of_delayed_scaling(get: Get) -> dict[str, Any]:
    """The options of TransformerEngine's delayed scaling that are set."""
    given = {name: get(name.removeprefix("fp8_").upper()) for name in TE_OPTIONS}
    return {name: int(text) if digits(text) else text for name, text in given.items() if text}


def environment(section: Mapping[str, Any]) -> dict[str, str]:
    """The variables that the launcher makes of a file's section, with full names of keys."""
    values = DEFAULTS | dict(section)
    override = values.pop("fp8_override_linear_precision", None) or (False, False, False)
    if not isinstance(override, str | list | tuple):  # the launcher indexes it: a list, or a string's letters
        override = [override] * 3
    env = {f"ACCELERATE_{key.upper()}": str(value) for key, value in values.items()}
    gemms = zip(("FPROP", "DGRAD", "WGRAD"), override, strict=False)
    return env | {f"ACCELERATE_FP8_OVERRIDE_{gemm}": str(value) for gemm, value in gemms}


def of_skip(skip: Sequence[str]) -> Iterator[str]:
    """Yields the problems of a skip list that no model is needed for: no name of a layer has a space or a %."""
    for entry in skip:
        share = SHARE.fullmatch(entry)
        if not 0 < int(share[1]) < 100 if share else re.search(r"^[^[].*[ %]", entry):
            yield (
                f"fp8_config skip {entry}: write names of layers with commas between them, or for the last of the "
                "Linear layers their part, as last 15% (from 1% to 99%)"
            )


def problems(settings: "Settings", machine: "Machine") -> Iterator[str]:
    """Yields every reason why FP8 cannot run."""
    backend, level = settings.backend, settings.level
    if backend is None:
        return
    if backend not in BACKENDS:
        yield f"fp8_config backend {backend} is not one of {', '.join(map(key_of, BACKENDS))} (in capitals)"
        return
    if machine.devices and not machine.nvidia:
        yield (f"FP8 is for NVIDIA's GPUs here, {machine.name} has other formats or none: use {settings.strategy}_bf16")
        return
    yield from (f"fp8_config {line}" for line in settings.fp8.without_effect)
    yield from of_skip(settings.fp8.skip)
    rules = settings.fp8.rules
    if level not in rules.levels:
        yield f"fp8_config {rules.level_key} {level} is not one of {', '.join(rules.levels)}, the levels of {backend}"
    yield from rules.problems(settings, machine)


def of_options(options: Mapping[str, Any]) -> Iterator[str]:
    """Yields the problems of delayed scaling's options."""
    if options.get("fp8_format", "HYBRID") not in ("HYBRID", "E4M3"):
        yield f"fp8_config format {options['fp8_format']} is not one of HYBRID, E4M3"
    for key, least in (("margin", 0), ("amax_history_len", 1)):
        value = options.get(key, least)
        if not isinstance(value, int) or value < least:
            yield f"fp8_config {key} {value} is not a whole number from {least} on"
    if options.get("amax_compute_algo", "max") not in ("max", "most_recent"):
        yield f"fp8_config amax_compute_algo {options['amax_compute_algo']} is not one of max, most_recent"


def too_old(settings: "Settings", machine: "Machine") -> Iterator[str]:
    """Yields the problem of a GPU that multiplies no FP8."""
    if machine.capability and machine.capability < (8, 9):
        has = machine_has(machine)
        yield f"FP8 needs compute capability 8.9, {machine.name} has {has}: use {settings.strategy}_bf16"


def machine_has(machine: "Machine") -> str:
    return "{}.{}".format(*machine.capability) if machine.capability else "none"


def numbers(version: str | None) -> tuple[int, ...]:
    return tuple(map(int, version.split("."))) if version else (0,)
