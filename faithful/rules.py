"""Every reason why a config cannot run, one line each, with the fix. The same rules check files and launches.

`problems(asked, machine)` finds the contradictions in the mapping of faithful/config.py. `file_problems(path)` finds
problems that only the file shows, because the launcher does not pass them on. Nothing here imports torch or Accelerate.
"""

import difflib
import socket
from pathlib import Path

import yaml

from faithful.config import (
    BACKENDS,
    DISTRIBUTED_TYPES,
    KEYS,
    LEVELS,
    PRECISIONS,
    PREFIXED,
    STRATEGIES,
    TAILS,
    asked,
    exported,
)
from faithful.errors import Refused

# torch 2.15 keeps one store over all restarts, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and the rendezvous is c10d.
IN_VAIN = (
    "--max_restarts: a restarted worker would look for the one that died: add --rdzv_backend c10d and set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment (./launch.sh does both)"
)


def problems(asked, machine):
    """Every reason why the config cannot run on this machine, one line each, with the fix."""
    lines = []
    strategy, precision, gpus = asked["strategy"], asked["precision"], machine["devices"]
    if strategy.startswith("fsdp") and strategy != "fsdp":
        lines.append("FSDP version 1 is not supported here: set fsdp_version: 2 in fsdp_config")
    elif strategy not in STRATEGIES:
        lines.append(f"strategy {strategy} is not one of {', '.join(STRATEGIES)}")
    if precision not in PRECISIONS.values():
        lines.append(f"mixed_precision {precision} is not one of 'no', fp16, bf16, fp8: Accelerate would train in fp32")
    if asked["use_cpu"]:
        lines.append("use_cpu: true makes Accelerate run one process, whatever num_processes says: leave it out")
    if asked["compile"] and asked["whole_model"]:
        lines.append(
            "blocks are compiled one by one here, not the whole model: set dynamo_use_regional_compilation: true in "
            "dynamo_config"
        )
    if strategy in ("fsdp", "hsdp") and asked["ram_efficient"]:
        lines.append(
            "fsdp_cpu_ram_efficient_loading (Accelerate's default) fails on models with parameters at their root, as "
            "vision transformers have: set it to false in fsdp_config"
        )
    if strategy in ("fsdp", "hsdp") and asked["wrap_policy"].upper() != "TRANSFORMER_BASED_WRAP":
        lines.append(
            f"fsdp_auto_wrap_policy {asked['wrap_policy']} shards the model as one piece or fails: set "
            "TRANSFORMER_BASED_WRAP (every model here names its blocks)"
        )
    if asked["restarts_in_vain"]:
        lines.append(IN_VAIN)
    if gpus and asked["local_processes"] > gpus:
        lines.append(f"{asked['local_processes']} processes on {gpus} {machine['name']}: pass --num_processes {gpus}")
    if not gpus and precision == "fp16" and strategy in ("fsdp", "hsdp"):
        lines.append(
            f"{strategy} in fp16 cannot rehearse on a CPU (FSDP2's gradient scaler needs a GPU): use {strategy}_bf16"
        )
    if not gpus and precision == "fp16" and strategy.startswith("zero"):
        lines.append(f"{strategy} in fp16 cannot rehearse on a CPU (DeepSpeed's fp16 needs a GPU): use {strategy}_bf16")
    lines += problems_of_meshes(asked) + (problems_of_deepspeed(asked, machine) if strategy.startswith("zero") else [])
    if precision == "bf16" and machine["capability"] and machine["capability"] < (8, 0):
        has = "{}.{}".format(*machine["capability"])
        lines.append(f"bf16 needs compute capability 8.0, {machine['name']} has {has}: use an fp16 config")
    return lines + (problems_of_fp8(asked, machine) if precision == "fp8" else [])


def problems_of_meshes(asked):
    """Problems of parallelism_config: the sizes of the device mesh."""
    strategy, processes = asked["strategy"], asked["num_processes"]
    sizes = {name: size for name, size in asked["sizes"].items() if size > 1}
    words = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if "tp" in sizes and strategy in ("fsdp", "hsdp"):
        return [f"tensor parallel with FSDP2 ({words}) fails between Accelerate 1.15 and transformers 5: use hsdp_bf16"]
    if strategy == "tp" and len(sizes) > 1:
        return [f"tensor parallel beside data parallel ({words}): without FSDP2 Accelerate refuses it, or sums no "
                "gradients. Set parallelism_config_tp_size alone, or use hsdp_bf16"]  # fmt: skip
    if strategy == "tp" and asked["precision"] == "fp16":
        return ["tp in fp16: torch's gradient scaler does not take split and whole gradients together, use tp_bf16"]
    if strategy == "tp" and asked["precision"] == "fp8":  # torchao fails, amp8 converts none, emulated TE is in bf16
        return ["tp in fp8: no FP8 layer here takes a weight that is split: use tp_bf16, or fsdp_fp8"]
    if sizes.keys() & {"cp", "sp"}:
        return [f"parallelism_config {words}: context and sequence parallel are not supported here, use hsdp"]
    if sizes and strategy not in ("fsdp", "hsdp", "tp"):
        return [f"parallelism_config is for hsdp and tp files, this one is {strategy}: remove it"]
    if strategy == "hsdp" and "dp_shard" not in sizes:
        return ["hsdp without parallelism_config_dp_shard_size shards nothing: set it, or use a ddp file"]
    product = 1
    for size in sizes.values():
        product *= size
    if sizes and product != processes:
        return [f"parallelism_config {words} is for {product} processes, not {processes}: --num_processes {product}, "
                "or change its sizes"]  # fmt: skip
    return []


def problems_of_deepspeed(asked, machine):
    strategy, extra = asked["strategy"], asked["deepspeed"]
    lines = []
    if "deepspeed" not in machine["packages"]:
        lines.append(f"{strategy} needs DeepSpeed, which is not installed: ./launch.sh setup --extra deepspeed")
    if extra["file"]:
        lines.append(
            "deepspeed_config_file is not read here: set its options in deepspeed_config and remove it "
            "(docs/machines.md)"
        )
    if extra["init"]:
        lines.append("zero3_init_flag (Accelerate's default) builds transformers' models in pieces before the seed "
                     "is set: set it to false in deepspeed_config")  # fmt: skip
    if extra["nvme"]:
        lines.append("offloading to nvme is not supported here: set offload_optimizer_device and "
                     "offload_param_device to cpu")  # fmt: skip
    if asked["offload"] and strategy == "zero1":
        lines.append("zero1 does not offload: use zero3_bf16_offload")
    return lines


def problems_of_machines(config, env):
    """Problems of a launch on one or several machines: ranks, rendezvous, port, hostfile. config: the file's mapping,
    updated with the command line's options. env: the launcher's environment."""
    machines, processes = config.get("num_machines") or 1, config.get("num_processes") or 1
    rank, port, lines = config.get("machine_rank") or 0, config.get("main_process_port"), []
    elastic = config.get("rdzv_backend") == "c10d" and env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
    if config.get("max_restarts") and not elastic:
        lines.append(IN_VAIN)
    if port and rank == 0 and port_in_use(port):
        lines.append(f"port {port} of this machine is in use: choose another --main_process_port")
    if machines == 1:
        return lines
    if processes % machines:
        lines.append(
            f"{processes} processes cannot be divided over {machines} machines: --num_processes counts those of all "
            f"machines, so it is a multiple of {machines}"
        )
    if not 0 <= rank < machines:
        lines.append(f"machine_rank {rank} is not one of 0 to {machines - 1}: give each machine its own")
    address = config.get("main_process_ip")
    if not address:
        lines.append("several machines need --main_process_ip: pass the address of machine 0 on each of them")
    elif address == "localhost" or address.startswith("127."):
        lines.append(f"main_process_ip {address} means each machine itself: give the address of machine 0")
    elif not known(address):
        lines.append(
            f"main_process_ip {address} is not an address, or a name that this machine can resolve: give the address "
            "of machine 0"
        )
    if config.get("rdzv_backend") == "c10d" and not port:
        lines.append("several machines need --main_process_port: pass the same free port of machine 0 on each of them")
    if config.get("distributed_type") == "DEEPSPEED":
        lines += problems_of_hostfile(config.get("deepspeed_config") or {}, processes)
    return lines


def problems_of_hostfile(section, processes):
    """Problems of DeepSpeed's own launchers (pdsh and others). `standard` is torchrun, as for the other strategies."""
    launcher = section.get("deepspeed_multinode_launcher", "pdsh")
    if launcher == "standard":
        return []
    path = section.get("deepspeed_hostfile")
    advice = "set deepspeed_multinode_launcher: standard in deepspeed_config to launch on each machine, as elsewhere"
    if not path:
        return [f"deepspeed_multinode_launcher {launcher} needs a deepspeed_hostfile: {advice}"]
    try:
        rows = [line.split("#")[0].split() for line in Path(path).read_text().splitlines()]
    except OSError as error:
        return [f"deepspeed_hostfile {path} cannot be read ({error.strerror}): {advice}"]
    slots = [words[1].partition("slots=")[2] if len(words) == 2 else "" for words in rows if words]
    if not slots or not all(count.isdigit() for count in slots):
        return [f"deepspeed_hostfile {path}: every line is `name slots=4`"]
    if sum(map(int, slots)) < processes:
        return [f"deepspeed_hostfile {path} has {sum(map(int, slots))} slots for {processes} processes"]
    return []


def known(name):
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def port_in_use(port):
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return True
    return False


def problems_of_fp8(asked, machine):
    strategy, backend, level, options = (asked[key] for key in ("strategy", "backend", "level", "fp8_options"))
    if backend not in LEVELS:
        return [f"fp8_config backend {backend} is not one of {', '.join(BACKENDS)} (in capitals)"]
    lines = [f"fp8_config {line}" for line in asked["dead"]]
    if level not in LEVELS[backend]:
        key = "opt_level" if backend == "msamp" else "recipe"
        lines.append(f"fp8_config {key} {level} is not one of {', '.join(LEVELS[backend])}, the levels of {backend}")
    gather = options.get("enable_fsdp_float8_all_gather")
    if gather and strategy not in ("fsdp", "hsdp"):
        lines.append(
            "enable_fsdp_float8_all_gather (Accelerate's default) outside FSDP2 takes FP8 layers out of the optimizer, "
            "so that they never train: set it to false in fp8_config"
        )
    elif gather and level.startswith("rowwise"):
        lines.append(f"torchao gathers in FP8 with tensorwise scales only, not {level}: set "
                     "enable_fsdp_float8_all_gather to false in fp8_config")  # fmt: skip
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
        own = "" if strategy == "zero3" else ", or ddp_fp8_msamp_o3, which is what MS-AMP's own ZeRO was"
        lines.append(
            f"MS-AMP's levels do not combine with {strategy}: DeepSpeed keeps masters of its own and reduces .grad "
            f"alone, not FP8 gradients: use fsdp_fp8_msamp_o2, which shards all of it{own}"
        )
    if backend == "msamp" and strategy in ("fsdp", "hsdp"):
        if level == "o3":
            lines.append(
                f"MS-AMP's o3 keeps a whole FP8 weight in each process, {strategy} shards it: use fsdp_fp8_msamp_o2, "
                "where a process holds 6/N bytes per parameter, or ddp_fp8_msamp_o3"
            )
        if asked["offload"]:
            lines.append(
                f"MS-AMP's levels under {strategy} are not offloaded: FSDP2's offloading moves .grad to the host, and "
                "FP8 gradients are no .grad: set fsdp_offload_params to false, or use fsdp_bf16_offload"
            )
    if backend == "msamp" and asked["compile"]:
        lines.append(
            "MS-AMP's levels are not combined with a compiled model here: use the config without dynamo_config"
        )
    if backend == "te" and asked["compile"]:
        lines.append(
            f"te {level} does not compile into one graph upstream: use single_fp8_compile (ao) or leave it out"
        )
    has = "{}.{}".format(*(machine["capability"] or ("", "")))
    if level == "mxfp8" and not (10, 0) <= (machine["capability"] or (0, 0)) < (12, 0):  # TE's own limits
        there = f"{machine['name']} has {has}" if machine["capability"] else "its kernels don't rehearse on a CPU"
        lines.append(f"mxfp8 needs compute capability 10.0 to 11.x, {there}: use {strategy}_fp8_te")
    elif backend != "msamp" and machine["capability"] and machine["capability"] < (8, 9):
        lines.append(f"FP8 needs compute capability 8.9, {machine['name']} has {has}: use {strategy}_bf16")
    elif level == "block" and machine["capability"] and machine["capability"] < (9, 0):
        lines.append(f"te block needs compute capability 9.0, {machine['name']} has {has}: use {strategy}_fp8_te")
    elif level == "block" and machine["capability"] and numbers(machine["cuda"]) < (12, 9):
        lines.append(f"te block needs CUDA 12.9, torch was built for {machine['cuda']}: use {strategy}_fp8_te")
    if machine["devices"] and backend == "te" and "transformer_engine" not in machine["packages"]:
        lines.append(
            "TransformerEngine is not installed: ./launch.sh setup --extra te (docs/fp8.md says what it needs)"
        )
    real = machine["devices"] or strategy not in ("single", "ddp")  # else its numerics are emulated
    if backend == "ao" and real and "torchao" not in machine["packages"]:
        lines.append("torchao is not installed: pip install torchao")
    return lines


def numbers(version):
    return tuple(map(int, version.split("."))) if version else (0,)


def grammar(name):
    """Parses a config's name: {"strategy", "precision", "backend", "level", tails}, or None if it is not of this form.

    The form is <strategy>_<precision>[_<backend>[_<level>]][_<tail>]. Raises Refused if a name begins with a strategy
    and goes on with an unknown word.
    """
    strategy, *rest = name.split("_")
    if strategy not in STRATEGIES or not rest:
        return None
    precision, *rest = rest
    promised = {"strategy": strategy, "precision": precision, "backend": None, "level": None}
    unknown = [] if precision in PRECISIONS.values() else [precision]
    if precision == "fp8":
        backend = rest.pop(0) if rest and rest[0] in LEVELS else "ao"
        words = "_".join(rest)
        level = next(
            (x for x in sorted(LEVELS[backend], key=len, reverse=True) if f"{words}_".startswith(f"{x}_")), None
        )
        rest = rest[level.count("_") + 1 :] if level else rest
        promised |= {"backend": backend, "level": level or LEVELS[backend][0]}
        if backend == "msamp" and rest[:1] == ["te"]:  # with TE's delayed scaling
            promised["recipe"] = rest.pop(0) + "_delayed"
    unknown += [tail for tail in rest if tail not in TAILS]
    if unknown:
        form = "<strategy>_<precision>[_<backend>[_<level>]][_<tail>]"
        raise Refused(f"config name {name}: {', '.join(unknown)} is not a part of {form}")
    return promised | {tail: tail in rest for tail in TAILS}


def file_problems(path):
    """(problems, mapping) of a config file: problems that processes cannot see, as Accelerate does not pass them on.

    The mapping is None if the file cannot be read as YAML with `key: value` lines.
    """
    try:
        config = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        return [f"cannot be read: {getattr(error, 'strerror', None) or error}"], None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        return [f"not YAML{where}: {getattr(error, 'problem', error)}"], None
    if not isinstance(config, dict):
        return [f"holds a {type(config).__name__}, not `key: value` lines"], None
    lines = [
        f"{key}: {str(value).lower()} is a boolean to YAML: write 'no' in quotes"
        for key, value in config.items()
        if key in ("mixed_precision", "distributed_type") and isinstance(value, bool)
    ]
    kind = config.get("distributed_type")
    if kind is None:
        lines.append("distributed_type is missing: one of 'NO', MULTI_GPU, FSDP, DEEPSPEED")
    elif not isinstance(kind, bool) and kind not in DISTRIBUTED_TYPES:
        lines.append(f"distributed_type {kind} is not one of 'NO', {', '.join(DISTRIBUTED_TYPES[1:])}")
    processes = config.get("num_processes")
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        lines.append(f"num_processes is {processes}: write the number of processes, 1 or more")
        processes = 1
    if kind == "NO" and processes > 1:
        lines.append(f"num_processes {processes} under distributed_type 'NO' runs one process: use a ddp or fsdp file")
    if "gpu_ids" in config and not isinstance(config["gpu_ids"], str):
        lines.append("gpu_ids must be a string: write '0,1' in quotes, or all")
    known = {section: keys.split() for section, keys in KEYS.items()}
    for key, value in config.items():
        if key not in known[""]:
            lines.append(f"{key} {meant(key, known[''])}")
        elif key in known and not isinstance(value, dict):
            lines.append(f"{key} holds {value!r}, not `key: value` lines")
        for name in value if key in known and isinstance(value, dict) else ():
            prefix = key.removesuffix("config") if key in PREFIXED else ""
            if name not in known[key] and prefix + name not in known[key]:
                lines.append(f"{key} {name} {meant(name, known[key])}")
    if "fp8_config" in config and config.get("mixed_precision") != "fp8":
        lines.append(
            f"fp8_config is ignored under mixed_precision {config.get('mixed_precision')}: remove it, or use fp8"
        )
    elif isinstance(config.get("fp8_config"), dict):
        override = config["fp8_config"].get("override_linear_precision", [])
        if not isinstance(override, list):
            lines.append(
                f"fp8_config override_linear_precision {override}: the launcher takes a list of three booleans"
            )
        for key in ("skip", "fp8_skip"):
            if not isinstance(config["fp8_config"].get(key, ""), str):
                lines.append(f"fp8_config {key} {config['fp8_config'][key]}: write names or patterns in one string, as "
                             "skip: \"head, blocks.0.*\"")  # fmt: skip
        lines += keys_of_another_backend(config["fp8_config"])
    for section, reader in (("fsdp_config", "FSDP"), ("deepspeed_config", "DEEPSPEED")):
        if section in config and kind != reader:
            lines.append(f"{section} is ignored under distributed_type {kind}: remove it, or use {reader}")
    if "dynamo_config" in config and kind == "DEEPSPEED":
        lines.append("dynamo_config is ignored under distributed_type DEEPSPEED: remove it, or use fsdp_bf16_noreshard")
    config = {key: value if key not in known or isinstance(value, dict) else {} for key, value in config.items()}
    config["num_processes"] = processes
    try:
        promised = grammar(Path(path).stem)
    except Refused as error:
        return [*lines, str(error)], config
    found = asked(exported(config))
    found["recipe"] = found["fp8_options"].get("recipe")
    for key, value in (promised or {}).items():
        if found[key] != value:
            lines.append(f"the name says {key} {value}, the file {found[key]}: rename it or change the file")
    return lines, config


def keys_of_another_backend(section):
    """Keys of fp8_config that its backend does not read."""
    section = {key.removeprefix("fp8_"): value for key, value in section.items()}
    te = "format margin amax_history_len amax_compute_algo interval override_linear_precision use_autocast_during_eval"
    reads = {
        "AO": "backend recipe enable_fsdp_float8_all_gather pad_inner_dim",
        "TE": f"backend recipe use_mxfp8_block_scaling {te if section.get('recipe', 'delayed') == 'delayed' else ''}"
        + (" format" if section.get("recipe") in ("current", "block") else ""),
        "MSAMP": f"backend opt_level recipe {te if section.get('recipe') else ''}",
    }.get(section.get("backend", "AO"), "")
    known = [key.removeprefix("fp8_") for key in KEYS["fp8_config"].split()]
    return [f"fp8_config {key} is not read by backend {section.get('backend', 'AO')}: remove it"
            for key in section if reads and key in known and key not in [*reads.split(), "skip"]]  # fmt: skip


def meant(key, known):
    close = difflib.get_close_matches(key, known, 1, 0.6)
    hint = f"did you mean {close[0]}?" if close else f"remove it (known: {', '.join(known)})"
    return f"is a key that Accelerate ignores or refuses here: {hint}"
