"""FP8: what the keys of fp8_config ask for, where mixed_precision is fp8."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from faithful.config.schema import digits, on

if TYPE_CHECKING:
    from faithful.launch.machine import Machine

BACKENDS = {"AO": "ao", "TE": "te", "MSAMP": "msamp"}
LEVELS = {  # the first is the default
    "ao": ("tensorwise", "rowwise", "rowwise_with_gw_hp"),
    "te": ("delayed", "current", "block", "mxfp8"),
    "msamp": ("o2", "o1", "o3"),
}
SKIP = {"ao": "first, last"}  # the default of `skip`, as in the backend's own recipes
TE_OPTIONS = ("fp8_format", "margin", "amax_history_len", "amax_compute_algo")
DEFAULTS = {  # what the launcher exports for keys that a file leaves out
    "fp8_amax_compute_algo": "most_recent", "fp8_amax_history_len": 1024, "fp8_enable_fsdp_float8_all_gather": True,
    "fp8_format": "HYBRID", "fp8_interval": 1, "fp8_margin": 0, "fp8_opt_level": "O2", "fp8_pad_inner_dim": True,
    "fp8_use_autocast_during_eval": False,
}  # fmt: skip


@dataclass(frozen=True)
class FP8:
    """The section fp8_config."""

    backend: str | None = None  # None: the precision is another one
    level: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the backend
    skip: list[str] = field(default_factory=list)  # patterns of the Linear layers that stay in high precision
    without_effect: list[str] = field(default_factory=list)  # keys that are set, each with the reason
    gathers_nothing: bool = False  # torchao is to gather in FP8, Accelerate's default, where nothing is gathered


def parse(env: Mapping[str, str], precision: str, sharded: bool) -> FP8:
    """What the launcher's variables ask for. sharded: by FSDP2, which gathers weights."""
    if precision != "fp8":
        return FP8()

    def get(key: str, default: str = "") -> str:
        return env.get(f"ACCELERATE_FP8_{key}", default)

    gathers_nothing = False
    backend, recipe = BACKENDS.get(get("BACKEND", "AO"), get("BACKEND")), get("RECIPE")
    level = get("OPT_LEVEL", "O2").lower() if backend == "msamp" else recipe or LEVELS.get(backend, ("",))[0]
    given = {name: get(name.removeprefix("fp8_").upper()) for name in TE_OPTIONS}
    options = {name: int(text) if digits(text) else text for name, text in given.items() if text}
    if backend == "ao":
        gathers = on(get("ENABLE_FSDP_FLOAT8_ALL_GATHER", "1"))
        gathers_nothing = gathers and not sharded
        options = {"enable_fsdp_float8_all_gather": gathers and sharded, "pad_inner_dim": on(get("PAD_INNER_DIM", "1"))}
    elif backend == "te" and level != "delayed":
        options = {"fp8_format": options.get("fp8_format", "HYBRID")} if level in ("current", "block") else {}
    elif backend == "msamp":
        delayed = options if recipe == "te_delayed" else {}  # MS-AMP's own scaling has none of these options
        options = {"recipe": recipe} | delayed if recipe else {}
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
    skip = [pattern.strip() for pattern in get("SKIP", SKIP.get(backend, "")).split(",") if pattern.strip()]
    return FP8(backend, level, options, skip, without_effect, gathers_nothing)


def environment(section: Mapping[str, Any]) -> dict[str, str]:
    """The variables that the launcher makes of a file's section, with full names of keys."""
    values = DEFAULTS | dict(section)
    override = values.pop("fp8_override_linear_precision", None) or (False, False, False)
    if not isinstance(override, str | list | tuple):  # the launcher indexes it: a list, or a string's letters
        override = [override] * 3
    env = {f"ACCELERATE_{key.upper()}": str(value) for key, value in values.items()}
    gemms = zip(("FPROP", "DGRAD", "WGRAD"), override, strict=False)
    return env | {f"ACCELERATE_FP8_OVERRIDE_{gemm}": str(value) for gemm, value in gemms}


def problems(fp8: FP8, strategy: str, offload: bool, compiled: bool, machine: "Machine") -> list[str]:
    """Every reason why this cannot run."""
    backend, level, options = fp8.backend, fp8.level or "", fp8.options
    if backend is None:
        return []
    if backend not in LEVELS:
        return [f"fp8_config backend {backend} is not one of {', '.join(BACKENDS)} (in capitals)"]
    lines = [f"fp8_config {line}" for line in fp8.without_effect]
    if level not in LEVELS[backend]:
        key = "opt_level" if backend == "msamp" else "recipe"
        lines.append(f"fp8_config {key} {level} is not one of {', '.join(LEVELS[backend])}, the levels of {backend}")
    gather = options.get("enable_fsdp_float8_all_gather")
    if gather and level.startswith("rowwise"):
        lines.append(
            f"torchao gathers in FP8 with tensorwise scales only, not {level}: set "
            "enable_fsdp_float8_all_gather to false in fp8_config"
        )
    if options.get("fp8_format", "HYBRID") not in ("HYBRID", "E4M3"):
        lines.append(f"fp8_config format {options['fp8_format']} is not one of HYBRID, E4M3")
    for key, least in (("margin", 0), ("amax_history_len", 1)):
        value = options.get(key, least)
        if not isinstance(value, int) or value < least:
            lines.append(f"fp8_config {key} {value} is not a whole number from {least} on")
    if options.get("amax_compute_algo", "max") not in ("max", "most_recent"):
        lines.append(f"fp8_config amax_compute_algo {options['amax_compute_algo']} is not one of max, most_recent")
    if options.get("recipe", "te_delayed") != "te_delayed":
        lines.append(f"fp8_config recipe {options['recipe']}: MSAMP combines with te_delayed only")
    if backend == "msamp" and strategy.startswith("zero"):
        partitions = "" if strategy == "zero3" else ", or ddp_fp8_msamp_o3, which is what MS-AMP's own ZeRO was"
        lines.append(
            f"MS-AMP's levels do not combine with {strategy}: DeepSpeed keeps masters of its own and reduces .grad "
            f"alone, not FP8 gradients: use fsdp_fp8_msamp_o2, which shards all of it{partitions}"
        )
    if backend == "msamp" and strategy in ("fsdp", "hsdp"):
        if level == "o3":
            lines.append(
                f"MS-AMP's o3 keeps a whole FP8 weight in each process, {strategy} shards it: use fsdp_fp8_msamp_o2, "
                "where a process holds 6/N bytes per parameter, or ddp_fp8_msamp_o3"
            )
        if offload:
            lines.append(
                f"MS-AMP's levels under {strategy} are not offloaded: FSDP2's offloading moves .grad to the host, and "
                "FP8 gradients are no .grad: set fsdp_offload_params to false, or use fsdp_bf16_offload"
            )
    if backend == "msamp" and compiled:
        lines.append(
            "MS-AMP's levels are not combined with a compiled model here: use the config without dynamo_config"
        )
    if backend == "te" and compiled:
        lines.append(
            f"te {level} does not compile into one graph upstream: use single_fp8_compile (ao) or leave it out"
        )
    has = "{}.{}".format(*(machine.capability or ("", "")))
    if level == "mxfp8" and not (10, 0) <= (machine.capability or (0, 0)) < (12, 0):  # TE's own limits
        lacks = f"{machine.name} has {has}" if machine.capability else "its kernels don't rehearse on a CPU"
        lines.append(f"mxfp8 needs compute capability 10.0 to 11.x, {lacks}: use {strategy}_fp8_te")
    elif backend != "msamp" and machine.capability and machine.capability < (8, 9):
        lines.append(f"FP8 needs compute capability 8.9, {machine.name} has {has}: use {strategy}_bf16")
    elif level == "block" and machine.capability and machine.capability < (9, 0):
        lines.append(f"te block needs compute capability 9.0, {machine.name} has {has}: use {strategy}_fp8_te")
    elif level == "block" and machine.capability and numbers(machine.cuda) < (12, 9):
        lines.append(f"te block needs CUDA 12.9, torch was built for {machine.cuda}: use {strategy}_fp8_te")
    if machine.devices and backend == "te" and "transformer_engine" not in machine.packages:
        lines.append(
            "TransformerEngine is not installed: ./launch.sh setup --extra te (docs/fp8.md says what it needs)"
        )
    real = machine.devices or strategy not in ("single", "ddp")  # else its numerics are emulated
    if backend == "ao" and real and "torchao" not in machine.packages:
        lines.append("torchao is not installed: pip install torchao")
    return lines


def notes(fp8: FP8) -> list[str]:
    """What runs otherwise than the section's words say, with the same result."""
    if not fp8.gathers_nothing:
        return []
    return ["enable_fsdp_float8_all_gather (Accelerate's default) is off outside FSDP2, which alone gathers"]


def numbers(version: str | None) -> tuple[int, ...]:
    return tuple(map(int, version.split("."))) if version else (0,)
