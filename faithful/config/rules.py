"""Every reason why a config cannot run, one line each, with the fix. The same rules check files and launches.

`problems(asked, machine)` finds the contradictions in the mapping of config/config.py, and `notes(asked)` what runs
otherwise than Accelerate would run it, with the same result. config_file.py finds what only a file shows. Nothing here
imports torch or Accelerate.
"""

import shutil
import socket

from faithful.config.config import BACKENDS, LEVELS, ONCE, PRECISIONS, SHARDINGS, STRATEGIES, digits
from faithful.config.schema import FALSE, TRUE
from faithful.disk.settings import Unreadable, text_of

WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
# torch 2.15 keeps one store over all restarts, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and the rendezvous is c10d.
IN_VAIN = (
    "--max_restarts: a restarted worker would look for the one that died: add --rdzv_backend c10d and set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment (./launch.sh does both)"
)


def problems(settings, machine):
    """Every reason why the config cannot run on this machine, one line each, with the fix."""
    lines = []
    strategy, precision, gpus = settings["strategy"], settings["precision"], machine["devices"]
    if strategy == "zero0":
        lines.append(
            "zero_stage 0 runs as DDP, which has no gradient_clipping, offloading or deepspeed_config_file: "
            "use zero_stage 1, or distributed_type MULTI_GPU and clip in the script"
        )
    elif strategy not in STRATEGIES:
        lines.append(f"strategy {strategy} is not one of {', '.join(STRATEGIES)}")
    if precision not in PRECISIONS.values():
        lines.append(f"mixed_precision {precision} is not one of 'no', fp16, bf16, fp8: Accelerate would train in fp32")
    if settings["restarts_in_vain"]:
        lines.append(IN_VAIN)
    if gpus and settings["local_processes"] > gpus:
        lines.append(
            f"{settings['local_processes']} processes on {gpus} {machine['name']}: pass --num_processes {gpus}"
        )
    if not gpus and precision == "fp16" and strategy in ("fsdp", "hsdp"):
        lines.append(
            f"{strategy} in fp16 cannot rehearse on a CPU (FSDP2's gradient scaler needs a GPU): use {strategy}_bf16"
        )
    if not gpus and precision == "fp16" and strategy.startswith("zero"):
        lines.append(f"{strategy} in fp16 cannot rehearse on a CPU (DeepSpeed's fp16 needs a GPU): use {strategy}_bf16")
    lines += problems_of_fsdp(settings) + problems_of_meshes(settings)
    lines += problems_of_deepspeed(settings, machine) if settings["deepspeed"]["stage"] is not None else []
    if precision == "bf16" and machine["capability"] and machine["capability"] < (8, 0):
        has = "{}.{}".format(*machine["capability"])
        lines.append(f"bf16 needs compute capability 8.0, {machine['name']} has {has}: use an fp16 config")
    compiles = settings["compile"] or (precision == "fp8" and settings["backend"] == "msamp")
    if machine["devices"] and compiles and machine.get("lacks"):
        what = "dynamo_config" if settings["compile"] else "MS-AMP's level"
        lines.append(
            f"{what} compiles kernels on the GPU, which needs a C compiler and Python's headers, and here is "
            f"no {' and no '.join(machine['lacks'])}: install gcc and python3-dev, or use "
            f"{strategy}_bf16"
        )
    return lines + (problems_of_fp8(settings, machine) if precision == "fp8" else [])


def notes(settings):
    """What runs otherwise than the config's words say, with the same result: one line each."""
    lines, fsdp, strategy = [], settings["fsdp"], settings["strategy"]
    several = settings["num_processes"] > 1
    if fsdp["version"] == 1:
        runs = {"ddp": "DDP, which it is", "hsdp": "FSDP2 within each machine (HSDP)"}.get(strategy, "FSDP2")
        lines.append(f"FSDP version 1 with {fsdp['sharding']} runs as {runs}, as `accelerate to-fsdp2` converts it")
    if fsdp["dead"]:
        lines.append(f"{', '.join(fsdp['dead'])} cannot have an effect: FSDP2 has nothing of this kind")
    if settings["built_once"] and several and not settings["ram_efficient"]:
        key = "zero3_init_flag" if settings["deepspeed"]["init"] else "fsdp_cpu_ram_efficient_loading"
        lines.append(
            f"{key} is off with -m faithful: each process builds the whole model before it is sharded. "
            f"{ONCE}=1 turns it on, for a script that uses no weights before prepare()"
        )
    if fsdp["version"] == 2 and fsdp["sharding"] != "FULL_SHARD":
        lines.append(
            f"fsdp_sharding_strategy {fsdp['sharding']} is a key of FSDP version 1, which version 2 does not "
            "read: fsdp_reshard_after_forward and parallelism_config say it"
        )
    if settings["compile"] and settings["whole_model"]:
        lines.append("the model's blocks are compiled one by one, as dynamo_use_regional_compilation: true says it")
    if settings["deepspeed"]["as_ddp"]:
        lines.append("zero_stage 0 partitions nothing: it runs as DDP")
    if settings["ignored"]:
        lines.append(
            f"fsdp_ignored_modules {settings['ignored']}: each process keeps the whole of them, and none of them "
            "may be trained, as their gradients are not averaged"
        )
    if settings["deepspeed"]["save_16bit"]:
        lines.append("zero3_save_16bit_model: the weights are gathered and saved in fp32")
    if settings["deepspeed"]["optimizer"] or settings["deepspeed"]["scheduler"]:
        lines.append(
            "the optimizer and the scheduler of deepspeed_config_file are for a script with DummyOptim and "
            "DummyScheduler"
        )
    if settings["no_gather"]:
        lines.append("enable_fsdp_float8_all_gather (Accelerate's default) is off outside FSDP2, which alone gathers")
    return lines


def problems_of_fsdp(settings):
    fsdp, lines = settings["fsdp"], []
    if not fsdp["version"]:
        return lines
    if fsdp["version"] not in (1, 2):
        return [f"fsdp_version {fsdp['version']} is not 1 or 2"]
    if fsdp["version"] == 1 and fsdp["sharding"] not in SHARDINGS:
        lines.append(f"fsdp_sharding_strategy {fsdp['sharding']} is not one of {', '.join(SHARDINGS)}")
    if fsdp["version"] == 2 and fsdp["reshard_says"].lower() not in TRUE + FALSE:
        lines.append(
            f"fsdp_reshard_after_forward {fsdp['reshard_says'].upper()} is a strategy of FSDP version 1: set "
            "true or false, or fsdp_version: 1"
        )
    if fsdp["wrap"] not in WRAPS:
        lines.append(f"fsdp_auto_wrap_policy {fsdp['wrap']} is not one of {', '.join(WRAPS)}")
    if fsdp["wrap"] == "NO_WRAP" and settings["ckpt"] and settings["strategy"] in ("fsdp", "hsdp"):
        lines.append(
            "fsdp_activation_checkpointing computes each unit's activations again, and NO_WRAP makes one: set "
            "TRANSFORMER_BASED_WRAP"
        )
    if settings["ignored"] and settings["backend"] == "msamp":
        lines.append(f"fsdp_ignored_modules {settings['ignored']}: MS-AMP's levels shard all weights: leave it out")
    return lines


def problems_of_meshes(settings):
    """Problems of parallelism_config: the sizes of the device mesh."""
    strategy, processes = settings["strategy"], settings["num_processes"]
    sizes = {name: size for name, size in settings["sizes"].items() if size > 1}
    words = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if "tp" in sizes and strategy in ("fsdp", "hsdp"):
        return [f"tensor parallel with FSDP2 ({words}) fails between Accelerate 1.15 and transformers 5: use hsdp_bf16"]
    if strategy == "tp" and len(sizes) > 1:
        return [
            f"tensor parallel beside data parallel ({words}): without FSDP2 Accelerate refuses it, or sums no "
            "gradients. Set parallelism_config_tp_size alone, or use hsdp_bf16"
        ]
    if strategy == "tp" and settings["precision"] == "fp16":
        return ["tp in fp16: torch's gradient scaler does not take split and whole gradients together, use tp_bf16"]
    if strategy == "tp" and settings["precision"] == "fp8":  # torchao fails, amp8 converts none, emulated TE is in bf16
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
        return [
            f"parallelism_config {words} is for {product} processes, not {processes}: --num_processes {product}, "
            "or change its sizes"
        ]
    return []


def problems_of_deepspeed(settings, machine):
    strategy, extra = settings["strategy"], settings["deepspeed"]
    lines = []
    if "deepspeed" not in machine["packages"]:
        stage = f"zero{extra['stage']}"
        lines.append(f"{stage} needs DeepSpeed, which is not installed: ./launch.sh setup --extra deepspeed")
    if extra["problem"]:
        lines.append(extra["problem"])
    if extra["nvme"]:
        lines.append(
            "offloading to nvme: checkpoints here and the counts of run.json cannot reach what is there: set "
            "offload_optimizer_device and offload_param_device to cpu"
        )
    if settings["offload"] and strategy == "zero1":
        lines.append("zero1 does not offload: use zero3_bf16_offload")
    return lines


def problems_of_machines(config, env):
    """Problems of a launch on one or several machines: ranks, rendezvous, port, hostfile. config: the file's mapping,
    updated with the command line's options. env: the launcher's environment."""
    machines, processes = config.get("num_machines") or 1, config.get("num_processes") or 1
    rank, port, lines = config.get("machine_rank") or 0, config.get("main_process_port"), []
    if config.get("mpirun_config") and not (shutil.which("mpirun") or shutil.which("mpiexec")):
        lines.append("mpirun_config needs mpirun, which is not installed: install Open MPI, or set MULTI_GPU")
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
    address = str(config.get("main_process_ip") or "")
    if not address:
        lines.append("several machines need --main_process_ip: pass the address of machine 0 on each of them")
    elif address == "localhost" or address.startswith("127."):
        lines.append(f"main_process_ip {address} means each machine itself: give the address of machine 0")
    elif not resolves(address):
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
        rows = [line.split("#")[0].split() for line in text_of(str(path)).splitlines()]
    except Unreadable as error:
        return [f"deepspeed_hostfile {path} {error}: {advice}"]
    slots = [words[1].partition("slots=")[2] if len(words) == 2 else "" for words in rows if words]
    if not slots or not all(map(digits, slots)):
        return [f"deepspeed_hostfile {path}: every line is `name slots=4`"]
    if sum(map(int, slots)) < processes:
        return [f"deepspeed_hostfile {path} has {sum(map(int, slots))} slots for {processes} processes"]
    return []


def resolves(name):
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):  # a name may hold no empty or long part
        return False


def port_in_use(port):
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return True
    return False


def problems_of_fp8(settings, machine):
    strategy, backend, level, options = (settings[key] for key in ("strategy", "backend", "level", "fp8_options"))
    if backend not in LEVELS:
        return [f"fp8_config backend {backend} is not one of {', '.join(BACKENDS)} (in capitals)"]
    lines = [f"fp8_config {line}" for line in settings["dead"]]
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
        if settings["offload"]:
            lines.append(
                f"MS-AMP's levels under {strategy} are not offloaded: FSDP2's offloading moves .grad to the host, and "
                "FP8 gradients are no .grad: set fsdp_offload_params to false, or use fsdp_bf16_offload"
            )
    if backend == "msamp" and settings["compile"]:
        lines.append(
            "MS-AMP's levels are not combined with a compiled model here: use the config without dynamo_config"
        )
    if backend == "te" and settings["compile"]:
        lines.append(
            f"te {level} does not compile into one graph upstream: use single_fp8_compile (ao) or leave it out"
        )
    has = "{}.{}".format(*(machine["capability"] or ("", "")))
    if level == "mxfp8" and not (10, 0) <= (machine["capability"] or (0, 0)) < (12, 0):  # TE's own limits
        lacks = f"{machine['name']} has {has}" if machine["capability"] else "its kernels don't rehearse on a CPU"
        lines.append(f"mxfp8 needs compute capability 10.0 to 11.x, {lacks}: use {strategy}_fp8_te")
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
