"""FSDP: what the keys of fsdp_config ask for. Version 1's run as FSDP2, as `accelerate to-fsdp2` converts them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from faithful.config.keys import FALSE, TRUE, digits, flag, listed, on, text, whole

SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # version 1's 1 to 5
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


@dataclass(frozen=True)
class FSDP:
    """The section fsdp_config."""

    version: int | str = 0  # 1 or 2, or 0 without FSDP; a text is a problem
    sharding: str = "FULL_SHARD"  # as version 1 says it
    reshard: bool = True  # after the forward pass
    reshard_text: str = "true"  # as the file says it
    wrap_policy: str | None = None  # says which modules are units, gathered as a whole
    by_size: int | None = None  # what SIZE_BASED_WRAP has as the parameters of a unit
    wrap_classes: list[str] = field(default_factory=list)  # of units, that TRANSFORMER_BASED_WRAP names
    ignored_modules: str | None = None  # a regular expression of names: these are not sharded
    offload: bool = False
    activation_checkpointing: bool = False
    checkpoints_on_host: bool = False  # what blocks compute again from waits in the host's memory
    ram_efficient: bool = False  # only process 0 builds models with their weights
    without_effect: list[str] = field(default_factory=list)  # keys that are set, and that FSDP2 has nothing for

    @property
    def replicates(self) -> bool:
        """Whether this is DDP in version 1's words."""
        return self.version == 1 and self.sharding == "NO_SHARD"

    @property
    def hybrid(self) -> bool:
        """Whether each machine holds a whole model, in version 1's words."""
        return self.version == 1 and self.sharding.startswith("HYBRID")

    def unread(self) -> "FSDP":
        """The section of a run that FSDP2 does not shard: only what `problems` and `notes` judge."""
        judged = ("version", "sharding", "reshard_text", "wrap_policy", "without_effect")
        return FSDP(**{name: getattr(self, name) for name in judged})


def parse(env: Mapping[str, str]) -> FSDP:
    """What the launcher's variables ask for."""
    if not on(env.get("ACCELERATE_USE_FSDP")):
        return FSDP()
    version, sharding = text(env, "fsdp_version", "1"), text(env, "fsdp_sharding_strategy", "FULL_SHARD")
    sharding = SHARDINGS[int(sharding) - 1] if sharding in ("1", "2", "3", "4", "5") else sharding.upper()
    reshard, ram_efficient = text(env, "fsdp_reshard_after_forward"), flag(env, "fsdp_cpu_ram_efficient_loading")
    if version == "1" and sharding == "FULL_SHARD":  # the default, and newer files say the strategy in the other key
        sharding = {"FALSE": "SHARD_GRAD_OP", "TRUE": sharding, "": sharding}.get(reshard.upper(), reshard.upper())
    policy, least = text(env, "fsdp_auto_wrap_policy", "NO_WRAP").upper(), whole(env, "fsdp_min_num_params", 0)
    without_effect = {
        "fsdp_backward_prefetch": text(env, "fsdp_backward_prefetch", "NO_PREFETCH").upper() != "NO_PREFETCH",
        "fsdp_forward_prefetch": flag(env, "fsdp_forward_prefetch"),
        "fsdp_use_orig_params": not flag(env, "fsdp_use_orig_params", True),
        "fsdp_state_dict_type": text(env, "fsdp_state_dict_type") == "LOCAL_STATE_DICT",
    }
    return FSDP(
        version=int(version) if digits(version) else version,
        sharding=sharding,
        reshard=on(reshard or "true") if version != "1" else sharding in ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"),
        reshard_text=reshard or "true",
        wrap_policy="TRANSFORMER_BASED_WRAP" if policy == "SIZE_BASED_WRAP" else policy,
        by_size=least if policy == "SIZE_BASED_WRAP" else None,
        wrap_classes=listed(env, "fsdp_transformer_layer_cls_to_wrap"),
        ignored_modules=text(env, "fsdp_ignored_modules") or None,
        offload=flag(env, "fsdp_offload_params"),
        activation_checkpointing=flag(env, "fsdp_activation_checkpointing"),
        checkpoints_on_host=flag(env, "fsdp_activation_checkpointing_offload"),
        ram_efficient=ram_efficient,
        without_effect=[key for key, is_on in without_effect.items() if is_on],
    )


def as_version_2(fsdp: FSDP, env: Mapping[str, str]) -> dict[str, str | None]:
    """{variable: value, None to remove it} with which Accelerate shards as the plan says, whatever the file's words."""
    names = {name: None for name, value in env.items() if name.startswith("FSDP_") and value == "none"}
    if env.get("FSDP_STATE_DICT_TYPE") in ("LOCAL_STATE_DICT", "None"):
        names["FSDP_STATE_DICT_TYPE"] = None
    return {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": fsdp.wrap_policy,
        "FSDP_RESHARD_AFTER_FORWARD": str(fsdp.reshard).lower(),
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        "FSDP_BACKWARD_PREFETCH": None,
        "FSDP_IGNORED_MODULES": fsdp.ignored_modules,
        "FSDP_TRANSFORMER_CLS_TO_WRAP": ",".join(fsdp.wrap_classes) or None,
    } | names


def problems(fsdp: FSDP) -> Iterator[str]:
    """Yields every reason why this cannot run."""
    if fsdp.version == 0:
        return
    if fsdp.version not in (1, 2):
        yield f"fsdp_version {fsdp.version} is not 1 or 2"
        return
    if fsdp.version == 1 and fsdp.sharding not in SHARDINGS:
        yield f"fsdp_sharding_strategy {fsdp.sharding} is not one of {', '.join(SHARDINGS)}"
    if fsdp.version == 2 and fsdp.reshard_text.lower() not in TRUE + FALSE:
        yield (
            f"fsdp_reshard_after_forward {fsdp.reshard_text.upper()} is a strategy of FSDP version 1: set "
            "true or false, or fsdp_version: 1"
        )
    if fsdp.wrap_policy not in WRAP_POLICIES:
        yield f"fsdp_auto_wrap_policy {fsdp.wrap_policy} is not one of {', '.join(WRAP_POLICIES)}"
    if fsdp.checkpoints_on_host and not fsdp.activation_checkpointing:
        yield (
            "fsdp_activation_checkpointing_offload moves what activation checkpointing keeps: set "
            "fsdp_activation_checkpointing, too"
        )
    if fsdp.wrap_policy == "NO_WRAP" and fsdp.activation_checkpointing:
        yield (
            "fsdp_activation_checkpointing computes each unit's activations again, and NO_WRAP makes one: set "
            "TRANSFORMER_BASED_WRAP"
        )


def notes(fsdp: FSDP, runs_as: str) -> Iterator[str]:
    """Yields what runs otherwise than the section's words say, with the same result. runs_as: ddp, fsdp or hsdp."""
    if fsdp.version == 1:
        runs = {"ddp": "DDP, which it is", "hsdp": "FSDP2 within each machine (HSDP)"}.get(runs_as, "FSDP2")
        yield f"FSDP version 1 with {fsdp.sharding} runs as {runs}, as `accelerate to-fsdp2` converts it"
    if fsdp.without_effect:
        yield f"{', '.join(fsdp.without_effect)}: ignored, FSDP2 has no such setting"
    if fsdp.version == 2 and fsdp.sharding != "FULL_SHARD":
        yield (
            f"fsdp_sharding_strategy {fsdp.sharding} is a key of FSDP version 1, which version 2 does not "
            "read: fsdp_reshard_after_forward and parallelism_config say it"
        )
    if fsdp.by_size is not None:
        yield f"SIZE_BASED_WRAP, units of {fsdp.by_size} parameters: here the model's repeated blocks are the units"
    if fsdp.ignored_modules:
        yield (
            f"fsdp_ignored_modules {fsdp.ignored_modules}: each process keeps the whole of them, and none of them "
            "may be trained, as their gradients are not averaged"
        )
