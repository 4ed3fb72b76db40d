"""FP8: what the keys of fp8_config ask for, where mixed_precision is fp8, and what each backend can.

BackendRules documents the questions that are answered before anything runs; a class answers them for one backend, and
BACKENDS names it. What a backend does is in faithful/backends. This module imports no torch.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from faithful.config import keys
from faithful.config.keys import digits, flag, listed, on, text
from faithful.config.strategies import FP8, Settings, StrategyRules

if TYPE_CHECKING:
    from faithful.launch.machine import Machine

TE_OPTIONS = ("fp8_format", "margin", "amax_history_len", "amax_compute_algo")
MX = ("mxfp8", "mxfp8_with_gw_hp", "mxfp4")  # torchao's levels with one scale for 32 values
MX_SCALES = ("rceil", "floor")  # torchao's names of the rules by which that scale is rounded; the first is the default
SHARE = re.compile(r"last ([0-9]{1,3})%")  # in a skip list, for the last of the Linear layers
OVERRIDES = [f"ACCELERATE_FP8_OVERRIDE_{product}" for product in ("FPROP", "DGRAD", "WGRAD")]
Env = Mapping[str, str]


class BackendRules:
    """The answers of high precision, which converts nothing."""

    implementation = "torch"  # the package that computes
    levels: tuple[str, ...] = ()  # the first is the default
    level_key = "recipe"  # of fp8_config
    recipes: dict[str, str] = {}  # {word of a config's name: the recipe that it stands for}
    skip = ""  # the default of `skip`, as in the backend's own recipes
    compiles: str | None = None  # what compiles kernels without dynamo_config, for a message
    runs_on_cpu = True  # whether its own layers compute on a CPU, in the formats that they have on a GPU

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    def reads(self, section: Mapping[str, Any]) -> list[str]:
        """The keys that the backend reads where a file says `section`, by the table. All without their prefix."""
        recipe = section.get("recipe") or (self.levels[0] if self.level_key == "recipe" else "")
        readers = {"Plan", key_of(self.name), f"{key_of(self.name)} {recipe}"}
        rows = [key for key in keys.TABLE["fp8_config"] if readers & {*key.reader.split(", ")}]
        return [key.name.removeprefix("fp8_") for key in rows]

    def level(self, env: Env) -> str:
        return text(env, "fp8_recipe", self.levels[0])

    def options(self, env: Env, level: str, sharded: bool) -> tuple[dict[str, Any], list[str]]:
        """(options, notes) that the variables ask for. sharded: by FSDP2, which gathers weights."""
        return {}, []

    def in_software(self, strategy: StrategyRules, level: str | None) -> bool:
        """Whether a CPU computes in high precision what the backend computes in FP8."""
        return not self.runs_on_cpu

    def problems(self, settings: Settings, machine: "Machine") -> Iterator[str]:
        """Yields every reason why the backend cannot run these settings."""
        yield from ()

    def slower(self, settings: Settings) -> Iterator[str]:
        """Yields why a step on a GPU takes longer than in bf16, with the config to use."""
        yield from ()


class TorchAORules(BackendRules):
    implementation = "torchao"
    levels = (*keys.FLOAT8, *MX)
    skip = "first, last"

    def options(self, env: Env, level: str, sharded: bool) -> tuple[dict[str, Any], list[str]]:
        if level in MX:  # whose weights are gathered in 16 bit
            return {"scale_calculation_mode": text(env, "fp8_scale_calculation_mode", MX_SCALES[0])}, []
        gathers, notes = flag(env, "fp8_enable_fsdp_float8_all_gather", True), []
        if gathers and not sharded:
            notes = ["enable_fsdp_float8_all_gather (Accelerate's default) is off: only FSDP2 without tp gathers so"]
        pads = flag(env, "fp8_pad_inner_dim", True)
        return {"enable_fsdp_float8_all_gather": gathers and sharded, "pad_inner_dim": pads}, notes

    def in_software(self, strategy: StrategyRules, level: str | None) -> bool:
        return strategy.replicates or level in MX  # torchao's own emulation is for FSDP2 and ZeRO, and slower

    def problems(self, settings: Settings, machine: "Machine") -> Iterator[str]:
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

    def slower(self, settings: Settings) -> Iterator[str]:
        if settings.compile or settings.level in MX:  # whose casts are kernels in any case, which nobody here has timed
            return
        if settings.deepspeed.runs_as is None and settings.deepspeed.stage is not None:
            use = f"use {settings.strategy}_bf16, as DeepSpeed compiles nothing"
        elif settings.strategy in ("single", "ddp", "fsdp"):
            use = f"use {settings.strategy}_fp8_compile"
        else:
            use = "set dynamo_config, as in single_fp8_compile"
        yield f"on a GPU this step is slower than bf16's, as torchao's casts are not compiled: {use}"


class TransformerEngineRules(BackendRules):
    implementation = "transformer_engine"
    levels = ("delayed", "current", "block", "mxfp8", "nvfp4")
    runs_on_cpu = False

    def options(self, env: Env, level: str, sharded: bool) -> tuple[dict[str, Any], list[str]]:
        if level == "delayed":
            return of_delayed_scaling(env), []
        if level == "nvfp4":
            return turned_on("TE nvfp4", env), []
        chosen = {"fp8_format": text(env, "fp8_format", "HYBRID")} if level in ("current", "block") else {}
        return chosen, []

    def problems(self, settings: Settings, machine: "Machine") -> Iterator[str]:
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


class MSAMPRules(BackendRules):
    implementation = "amp8"
    levels = ("o2", "o1", "o3")
    level_key = "opt_level"
    recipes = {"te": "te_delayed", "fp4": "fp4"}  # a level whose layers compute in another way
    compiles = "MS-AMP's level"

    def level(self, env: Env) -> str:
        return text(env, "fp8_opt_level", "O2").lower()

    def options(self, env: Env, level: str, sharded: bool) -> tuple[dict[str, Any], list[str]]:
        recipe = text(env, "fp8_recipe")
        of_recipe = {"te_delayed": of_delayed_scaling, "fp4": partial(turned_on, "MSAMP fp4")}
        return {"recipe": recipe} | of_recipe.get(recipe, lambda _: {})(env) if recipe else {}, []

    def problems(self, settings: Settings, machine: "Machine") -> Iterator[str]:
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


def rules_of(fp8: FP8) -> BackendRules:
    """The answers of the backend that a section names."""
    return BACKENDS.get(fp8.backend, HIGH_PRECISION)


def key_of(name: str | None) -> str:
    """A backend's name as fp8_config says it."""
    return str(name).upper()


def parse(env: Mapping[str, str], precision: str, sharded: bool) -> FP8:
    """What the launcher's variables ask for. sharded: by FSDP2, which gathers weights."""
    if precision != "fp8":
        return FP8()
    said = text(env, "fp8_backend", key_of(next(iter(BACKENDS))))
    backend = {key_of(name): name for name in BACKENDS}.get(said, said)
    rules, level, options, notes = BACKENDS.get(backend), text(env, "fp8_recipe"), {}, []
    if rules:
        level = rules.level(env)
        options, notes = rules.options(env, level, sharded)
    override = [env.get(name, "") for name in OVERRIDES]
    reasons = {
        "interval": (
            text(env, "fp8_interval", "1") != "1",
            "TransformerEngine has removed it: scales are updated every step",
        ),
        "override_linear_precision": (
            any(map(on, override)) or "".join(override).startswith(("tru", "(tr")),  # of a string, its first letters
            "TransformerEngine has removed it",
        ),
        "use_autocast_during_eval": (flag(env, "fp8_use_autocast_during_eval"), "evaluation is always outside FP8"),
        "use_mxfp8_block_scaling": (flag(env, "fp8_use_mxfp8_block_scaling"), "write recipe: mxfp8 instead"),
    }  # fmt: skip
    without_effect = [f"{key}: {reason}" for key, (turned, reason) in reasons.items() if turned]
    skip = listed(env, "fp8_skip", rules.skip if rules else "")
    return FP8(backend, level, options, skip, without_effect, notes)


def turned_on(reader: str, env: Env) -> dict[str, Any]:
    """Those of the reader's keys that are true."""
    names = [key.name for key in keys.TABLE["fp8_config"] if key.reader == reader]
    return {name.removeprefix("fp8_"): True for name in names if flag(env, name)}


def of_delayed_scaling(env: Env) -> dict[str, Any]:
    """The options of TransformerEngine's delayed scaling that are set."""
    given = {name: text(env, f"fp8_{name.removeprefix('fp8_')}") for name in TE_OPTIONS}
    return {name: int(said) if digits(said) else said for name, said in given.items() if said}


def environment(section: Mapping[str, Any]) -> dict[str, str]:
    """The variables that the launcher makes of a file's section, with full names of keys."""
    override = section.get("fp8_override_linear_precision") or (False, False, False)
    if not isinstance(override, str | list | tuple):  # the launcher indexes it: a list, or a string's letters
        override = [override] * 3
    return keys.environment("fp8_config", section) | dict(zip(OVERRIDES, map(str, override), strict=False))


def of_skip(skip: Sequence[str]) -> Iterator[str]:
    """Yields the problems of a skip list that no model is needed for: no name of a layer has a space or a %."""
    for entry in skip:
        share = SHARE.fullmatch(entry)
        if not 0 < int(share[1]) < 100 if share else re.search(r"^[^[].*[ %]", entry):
            yield (
                f"fp8_config skip {entry}: write names of layers with commas between them, or for the last of the "
                "Linear layers their part, as last 15% (from 1% to 99%)"
            )


def problems(settings: Settings, machine: "Machine") -> Iterator[str]:
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
    rules = rules_of(settings.fp8)
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


def too_old(settings: Settings, machine: "Machine") -> Iterator[str]:
    """Yields the problem of a GPU that multiplies no FP8."""
    if machine.capability and machine.capability < (8, 9):
        has = machine_has(machine)
        yield f"FP8 needs compute capability 8.9, {machine.name} has {has}: use {settings.strategy}_bf16"


def machine_has(machine: "Machine") -> str:
    return "{}.{}".format(*machine.capability) if machine.capability else "none"


def numbers(version: str | None) -> tuple[int, ...]:
    return tuple(map(int, version.split("."))) if version else (0,)
