"""What is refused, as one row each: what is started, what of it is wrong, how it ends, and the line that is said.

A way of starting has its rows, by subject, and a test that reads them. What needs more than a row (a run that is there, a
GPU, processes that differ) is tested where it belongs.
"""

import importlib
import re
import sys
from dataclasses import replace

import accelerate.utils
import pytest
import yaml
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from conftest import CONFIGS, ROOT, launched, train, write_record
from test_other_configs import DDP, FSDP2, fsdp, zero
from test_plan import CPU, GPU

from faithful import Refused, arguments, backends, plan, strategies
from faithful.config import config_file
from shared import args
from tools import check, cli, tracing

UNKNOWN = "vit: unrecognized arguments: --max_step 4: did you mean --max_steps?; python recipes/vit.py --help lists the options"
PLAIN = "--plain is for single and ddp in fp32 and bf16, where Accelerate alone trains the same;"
TOOLS = [  # (tool, its words, its exit code, the line); {tmp} has the files of the fixture
    ("advise", "--memory 80GB", 2, "which recipe? ./launch.sh advise"),
    ("advise", "--memory 80GB -- vitt", 2, "no recipe vitt: did you mean vit?"),
    ("advise", "single_bf17 --memory 80GB -- vit", 2, "no config single_bf17: did you mean single_bf16?"),
    ("advise", "--memory many -- vit", 2, "--memory many: write it as 80GB or 24GiB"),
    ("advise", "--devices 0 -- vit", 2, "argument --devices: 0 is not a whole number, 1 or more"),
    ("advise", "-- vit --max_step 4", 2, UNKNOWN),
    ("advise", "--comparison {tmp}/file -- vit", 2, "{tmp}/file is not JSON"),
    ("advise", "--comparison {tmp}/nowhere -- vit", 2, "no report.json there; ./launch.sh compare writes one"),
    ("check", "single_bf17", 2, "no config single_bf17: did you mean single_bf16?"),
    ("check", "--num_machines two", 2, "argument --num_machines/--num-machines: is two: write a whole number from 1 on"),
    ("compare", "single_bf16 -- vit --seed 3", 2, "--seed: not here; the seeds are --seeds"),
    ("compare", "single_bf16 -- vit --config {tmp}/train.yml", 2, "--seed, --resume_from_checkpoint: not here; the seeds are --seeds"),
    ("compare", "single_bf17 -- vit", 2, "no config single_bf17: did you mean single_bf16?"),
    ("compare", "single_bf16 -- vitt", 2, "no recipe vitt: did you mean vit?"),
    ("compare", "single_bf16 --", 2, "which recipe? ./launch.sh compare"),
    ("compare", "{tmp}/nowhere", 2, "{tmp}/nowhere is no folder of a run"),
    ("compare", "single_bf16 --seeds 0 -- vit", 2, "argument --seeds: 0 is not a whole number, 1 or more"),
    ("compare", "single_bf16 --margin 2 -- vit", 2, "argument --margin: 2: write it as 1% or 0.01"),
    ("compare", "single_bf16 --vary seed -- vit", 2, "--vary: not here"),
    ("compare", "single_bf16 {tmp}/share.yml -- vit", 2, "share.yml: fp8_config skip last 0%: write names of layers"),
    ("compare", "single_bf16 -- vit --max_step 4", 2, UNKNOWN),
    ("compare", "single_bf16 -- --num_processes two vit", 2, "--num_processes two is not a whole number, 1 or more"),
    ("compare", "single_bf16 ddp_bf16 -- --num_processes=3 vit", 2, "don't divide by the 3 processes of ddp"),
    ("compare", "single_bf16 --assert-close single_fp32 -- vit", 2, "--assert-close single_fp32: there is no such"),
    ("compare", "single_bf16 {tmp}/bad.yml -- vit", 2, "bad.yml: mixed_precison is a key that Accelerate does not have"),
    ("compare", "single_bf16 --report {tmp}/file/report -- vit", 2, "nothing can be written to {tmp}/file/report"),
    ("compare", "single_fp32 single_bf16 --seeds 3 -- {tmp}/own.py", 2, "--seeds 3: nothing says where own.py takes its seed: write {{seed}} there"),
    ("copy_recipe", "vitt ddp_bf16 {tmp}/new", 2, "no recipe vitt: did you mean vit?"),
    ("copy_recipe", "vit ddp_bf17 {tmp}/new", 2, "no config ddp_bf17: did you mean ddp_bf16?"),
    ("copy_recipe", "vit ddp_bf16 {tmp}", 2, "{tmp} is there and not empty: choose a new folder"),
    ("copy_recipe", "vit {tmp}/bad.yml {tmp}/new", 2, "did you mean mixed_precision"),
    ("copy_recipe", "vit ddp_bf16 {tmp}/file/new", 2, "Not a directory"),
    ("copy_recipe", "vit fsdp_bf16 {tmp}/new --plain", 2, f"{PLAIN} fsdp_bf16.yml is fsdp bf16: leave --plain out"),
    ("copy_recipe", "vit single_fp8 {tmp}/new --plain", 2, f"{PLAIN} single_fp8.yml is single fp8: leave --plain out"),
    ("copy_recipe", "vit single_bf16_compile {tmp}/new --plain", 2, f"{PLAIN} single_bf16_compile.yml is single bf16 compiled: leave --plain out"),
    ("copy_recipe", "vit zero2_bf16 {tmp}/new --plain", 2, f"{PLAIN} zero2_bf16.yml is zero2 bf16: leave --plain out"),
    ("copy_recipe", "diffusion ddp_fp32 {tmp}/new --plain", 2, "--plain does not take diffusion with ddp_fp32.yml: on a CPU Accelerate alone fails under ddp for a model that is not trained, as its average of weights: take a single config"),
    ("diagnose", "single_bf16 -- vit", 2, "single_bf16.yml asks for no FP8: there is nothing to diagnose"),
    ("diagnose", "single_fp9 -- vit", 2, "no config single_fp9"),
    ("diagnose", "single_fp8 -- wit", 2, "no recipe wit"),
    ("diagnose", "single_fp8", 2, "which recipe? ./launch.sh diagnose"),
    ("diagnose", "fsdp_fp8 -- vit", 2, "diagnose needs whole weights on every process, fsdp splits them: use ddp"),
    ("diagnose", "single_fp8_compile -- vit", 2, "which a compiled block hides"),
    ("diagnose", "single_fp8 --pairs 1 -- vit", 2, "--pairs 1: 2 or more"),
    ("diagnose", "single_fp8 --look 0 -- vit", 2, "argument --look: 0 is not a whole number, 1 or more"),
    ("diagnose", "single_fp8 -- recipes/vit.py --max_steps 20", 2, "--max_steps: not here; diagnose trains vit"),
    ("diagnose", "single_fp8 -- vit --config {tmp}/train.yml", 2, "--max_steps: not here; diagnose trains vit"),
    ("diagnose", "single_fp8 -- vit --max_step 4", 2, UNKNOWN),
    ("diagnose", "single_fp8 -- vit --epochs 3", 2, "unrecognized arguments: --epochs 3: did you mean --num_train_epochs?"),
    ("diagnose", "single_fp8 -- tests/scripts/faults.py --max_steps=8", 2, "diagnose takes 276 steps or more"),
    ("diagnose", "single_fp8 --output {tmp}/theirs -- vit", 2, "{tmp}/theirs holds run, of a diagnosis or somebody's: choose another --output"),
    ("diagnose", "single_fp8 --output {tmp}/file/out -- vit", 2, "nothing can be written to {tmp}/file/out"),
    ("estimate", "single_bf16", 2, "which recipe? ./launch.sh estimate"),
    ("estimate", "single_bf17 -- vit", 2, "no config single_bf17: did you mean single_bf16?"),
    ("estimate", "single_bf16 --memory lots -- vit", 2, "--memory lots: write it as 80GB or 24GiB"),
    ("estimate", "--num_processes 0 -- vit", 2, "0 is not a whole number, 1 or more"),
    ("estimate", "single_bf16 -- vit --max_step 4", 2, UNKNOWN),
    ("export", "{tmp}/nowhere", 2, "{tmp}/nowhere is not the folder of a run: no readable run.json (No such file"),
    ("export", "{tmp}/own --to onnx", 2, "{tmp}/own has no data.json, as the run of a script of your own"),
    ("export", "{tmp}/own --to pickle", 2, "argument --to: invalid choice: 'pickle'"),
    ("predict", "{tmp}/damaged a.png", 2, "{tmp}/damaged is not the folder of a run"),
    ("predict", "{tmp}/gpt", 2, "{tmp}/gpt was trained on texts: give it --prompt TEXT and no files"),
    ("predict", "{tmp}/gpt --prompt x a.png", 2, "{tmp}/gpt was trained on texts"),
    ("predict", "{tmp}/own", 2, "{tmp}/own classifies images: give it image files or folders that hold some"),
    ("predict", "{tmp}/own {tmp}/none.png", 2, "no file {tmp}/none.png"),
    ("predict", "{tmp}/gpt --prompt x --tokens 0", 2, "argument --tokens: 0 is not a whole number, 1 or more"),
    ("predict", "{tmp}/own --prompt x", 2, "{tmp}/own classifies images: give it image files or folders that hold some"),
    ("predict", "{tmp}/nowhere a.png", 2, "{tmp}/nowhere is not the folder of a run"),
    ("show", "{tmp}/nowhere", 2, "{tmp}/nowhere is not the folder of a run: no readable run.json"),
    ("show", "{tmp}/damaged", 2, "{tmp}/damaged is not the folder of a run: no readable run.json"),
]  # fmt: skip
LAUNCH_SH = [  # (the script, its words, its exit code, the line)
    ("./launch.sh", "ddp_bf17 vit", 2, "no config ddp_bf17: did you mean ddp_bf16?"),
    ("./launch.sh", "DDP-bf16 vit", 2, "did you mean ddp_bf16?"),
    ("./launch.sh", "vit", 2, "vit is a recipe: ./launch.sh CONFIG RECIPE"),
    ("./launch.sh", "bananas vit", 2, "no config bananas: ./launch.sh ls lists them"),
    ("./launch.sh", "diagnose single_f8 -- vit", 2, "did you mean single_fp8?"),
    ("./launch.sh", "ddp_bf16", 2, "which recipe?"),
    ("./launch.sh", "ddp_bf16 vitt", 2, "no recipe vitt: did you mean vit?"),
    ("./launch.sh", "ddp_bf16 gone.py", 2, f"no file gone.py in {ROOT}, and no recipe gone.py: ./launch.sh ls lists them"),
    ("./launch.sh", "./gone.yml vit", 2, f"no file ./gone.yml in {ROOT}, and no config ./gone.yml"),
    ("./launch.sh", "ddp_bf16 vit --max_step 4", 2, UNKNOWN),
    ("./launch.sh", "ddp_bf16 vit --max_steps many", 2, "max_steps: many is not a whole number, 1 or more"),
    ("./launch.sh", "--bananas", 2, "unknown option"),
    ("./launch.sh", "ddp_bf16 --num_processes", 2, "needs a value"),
    ("./launch.sh", "ddp_bf16 --num_processes vit", 2, "--num_processes needs a value before vit"),
    ("./launch.sh", "ddp_bf16 --num_processes recipes/vit.py --max_steps 2", 2, "--num_processes needs a value before recipes/vit.py"),
    ("./launch.sh", "ddp_bf16 --num_procs 2 vit", 2, "unrecognized arguments: --num_procs 2: did you mean --num_processes? (accelerate launch --help"),
    ("./launch.sh", "setup fast", 2, "setup takes --cpu and --extra"),
    ("./launch.sh", "show /nowhere", 2, "/nowhere is not the folder of a run"),
]  # fmt: skip
RECIPES = [  # (config, options of recipes/vit.py, the exit code of each process, the line)
    ("single_bf16", "--grad_scaler init_scale=8", 2, "a gradient scaler (GradScalerKwargs) is for fp16, this run is bf16: leave it out"),
    ("single_bf16", "--dtype float16", 2, "parameters are in float16, which bf16 needs in fp32: leave it out, or use an fp32 config"),
    ("single_fp32", "--per_device_train_batch_size 5000", 2, "less than one global batch of 5000"),
    ("single_fp32", "--model vit_enormous", 2, "--model vit_enormous: Unknown model"),
    ("single_fp32", "--report_to wandbb", 2, "the script logs with 'wandbb', which Accelerate does not know: one of aim, all, "),
    ("single_fp32", "--dataset /nowhere/at/all", 2, "known offline: digits, photos, synthetic"),
    ("tp_bf16", "--max_steps 2", 2, "VisionTransformer has no plan for tensor parallel"),
]  # fmt: skip

ANYWHERE, H200 = None, GPU
O3 = {"mixed_precision": "fp8", "fp8_config": {"backend": "MSAMP", "opt_level": "O3"}}
T4 = replace(H200, name="Tesla T4", capability=(7, 5))
A100 = replace(H200, name="NVIDIA A100", capability=(8, 0))
B200 = replace(H200, name="NVIDIA B200", capability=(10, 0))
RTX5090 = replace(H200, name="NVIDIA RTX 5090", capability=(12, 0))
BARE = replace(H200, packages=[])
MI300 = replace(H200, name="AMD Instinct MI300X", capability=None, nvidia=False)
WIZARDS = {"wizard_ddp": DDP, "wizard_fsdp1": fsdp(), "wizard_fsdp2": fsdp(FSDP2), "wizard_zero3": zero()}
CONFIG = [  # (a shipped config, one of WIZARDS, or a file's text; other keys or another name; on what machine; the line)
    # what is no config
    ("a: b: c", {}, ANYWHERE, "not YAML at line 1, column 5"),
    ("", {}, ANYWHERE, "holds a NoneType, not `key: value` lines"),
    ("- 1", {}, ANYWHERE, "holds a list, not `key: value` lines"),
    ("{\n 'a': 1}", "broken.json", ANYWHERE, "not JSON at line 2, column 2"),
    ("\ufeff{}", "marked.json", ANYWHERE, "begins with a byte order mark, which Accelerate refuses in JSON"),
    ("zero_optimization: {stage: 2}", {}, ANYWHERE, "is a file of DeepSpeed's, not of Accelerate's"),
    ("{distributed_type: DEEPSPEED, num_processes: 2, deepspeed_config: {deepspeed_config_file: gone.json}}", {}, ANYWHERE, "deepspeed_config_file gone.json cannot be read: it is not in"),
    ("{compute_environment: AMAZON_SAGEMAKER, distributed_type: false, ec2_instance_type: a}", {}, ANYWHERE, "compute_environment AMAZON_SAGEMAKER starts the script on Amazon's machines"),
    # names of ours
    ("ddp_bf16", "ddp_fp16.yml", ANYWHERE, "the name says precision fp16, the file bf16"),
    ("ddp_bf16", "single_bf16.yml", ANYWHERE, "the name says strategy single, the file ddp"),
    ("ddp_bf16", "ddp_bf16_compile.yml", ANYWHERE, "the name says compile True, the file False"),
    ("ddp_bf16", "ddp_bf17.yml", ANYWHERE, "config name ddp_bf17: bf17 is not a part of"),
    ("ddp_bf16", "ddp_fp12.yml", ANYWHERE, "config name ddp_fp12: fp12 is not a part of"),
    ("ddp_bf16", "ddp_fp8_msamp_o4.yml", ANYWHERE, "config name ddp_fp8_msamp_o4: o4 is not a part of"),
    # keys
    ("ddp_bf16", {"learning_rate": 1}, ANYWHERE, "learning_rate is a key that Accelerate does not have"),
    ("wizard_ddp", {"num_procesess": 2}, ANYWHERE, "did you mean num_processes?"),
    ("wizard_fsdp1", {"fsdp_config": {"fsdp_shading_strategy": "FULL_SHARD"}}, ANYWHERE, "did you mean fsdp_sharding_strategy?"),
    ("fsdp_bf16", {"fsdp_config": {"fsdp_reshard_after_foward": True}}, ANYWHERE, "did you mean fsdp_reshard_after_forward?"),
    ("wizard_ddp", {"ipex_config": {"ipex": False}}, ANYWHERE, "which Accelerate refuses by now: remove it"),
    ("ddp_bf16", {"dynamo_config": "inductor"}, ANYWHERE, "dynamo_config holds 'inductor'"),
    ("single_bf16", {"": ["a", "b"]}, ANYWHERE, " is a key that Accelerate does not have: remove it"),
    ("single_bf16", {"dynamo_config": {"dynamo_backend": False}}, ANYWHERE, "dynamo_backend is False: write one of no"),
    ("single_bf16_compile", {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "reduce-overhead"}}, ANYWHERE, "dynamo_mode: reduce-overhead captures each block in CUDA graphs"),
    ("fsdp_bf16", {"fsdp_config": {"fsdp_offload_params": "perhaps"}}, ANYWHERE, "fsdp_config fsdp_offload_params is perhaps: write true or false"),
    ("wizard_zero3", {"deepspeed_config": {"zero_stage": "three"}}, ANYWHERE, "deepspeed_config zero_stage is three: write a whole number"),
    # the kind of run
    ("mixed_precision: bf16\nnum_processes: 2", {}, ANYWHERE, "distributed_type is missing"),
    ("mixed_precision: bf16\ndistributed_type: yes\nnum_processes: 1", {}, ANYWHERE, "distributed_type True is not one of"),
    ("ddp_bf16", {"distributed_type": "DDP"}, ANYWHERE, "distributed_type DDP is not one of"),
    ("ddp_bf16", {"distributed_type": "MULTI_CPU"}, ANYWHERE, "MULTI_CPU with 2 processes needs mpirun_config"),
    ("wizard_ddp", {"distributed_type": "XLA", "tpu_use_cluster": True}, ANYWHERE, "distributed_type XLA needs a TPU"),
    ("wizard_ddp", {"distributed_type": "MEGATRON_LM"}, ANYWHERE, "distributed_type MEGATRON_LM needs Megatron-LM"),
    # processes and machines
    ("ddp_bf16", {"num_processes": "two"}, ANYWHERE, "num_processes is two"),
    ("ddp_bf16", {"num_processes": 0}, ANYWHERE, "num_processes is 0"),
    ("ddp_bf16", {"num_processes": 16}, H200, "16 processes on 8 NVIDIA H200: pass --num_processes 8, or set CUDA_VISIBLE_DEVICES= to rehearse on the CPU"),
    ("ddp_bf16", {"gpu_ids": 0}, ANYWHERE, "gpu_ids must be a string"),
    ("wizard_ddp", {"gpu_ids": "0"}, ANYWHERE, "gpu_ids '0' is one device, which Accelerate refuses"),
    # precisions
    ("mixed_precision: no\ndistributed_type: 'NO'\nnum_processes: 1", {}, ANYWHERE, "mixed_precision: false is a boolean"),
    ("ddp_bf16", {"mixed_precision": "bf61"}, ANYWHERE, "mixed_precision bf61 is not one of"),
    ("ddp_bf16", {}, T4, "Tesla T4 has 7.5: use an fp16 config"),
    # FSDP
    ("fsdp_bf16", {"fsdp_config": {"fsdp_version": 3}}, ANYWHERE, "fsdp_version 3 is not 1 or 2"),
    ("fsdp_bf16", {"fsdp_config": {"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}}, ANYWHERE, "fsdp_reshard_after_forward SHARD_GRAD_OP is a strategy of FSDP version 1"),
    ("{distributed_type: FSDP, mixed_precision: bf16, num_processes: 2, fsdp_config: {fsdp_sharding_strategy: SOME_SHARD}}", {}, ANYWHERE, "SOME_SHARD is not one of FULL_SHARD"),
    ("{distributed_type: FSDP, mixed_precision: bf16, num_processes: 2, fsdp_config: {fsdp_sharding_strategy: NO_SHARD, fsdp_auto_wrap_policy: TRANSFOMER_BASED_WRAP}}", {}, ANYWHERE, "fsdp_auto_wrap_policy TRANSFOMER_BASED_WRAP is not one of"),
    ("fsdp_bf16", {"fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFOMER_BASED_WRAP"}}, ANYWHERE, "fsdp_auto_wrap_policy TRANSFOMER_BASED_WRAP is not one of"),
    ("{distributed_type: FSDP, mixed_precision: bf16, num_processes: 2, fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}}", {}, ANYWHERE, "NO_WRAP makes one"),
    ("fsdp_bf16", {"fsdp_config": {"fsdp_activation_checkpointing_offload": True}}, ANYWHERE, "set fsdp_activation_checkpointing, too"),
    ("fsdp_fp8_te", {"fsdp_config": {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True}}, ANYWHERE, "TransformerEngine has its own: leave it out"),
    ("wizard_fsdp1", {"fsdp_config": {"fsdp_sync_module_states": False}}, ANYWHERE, "fsdp_cpu_ram_efficient_loading without fsdp_sync_module_states, which the launcher refuses: set both to true"),
    ("fsdp_bf16", {"fsdp_config": {"fsdp_ignored_modules": "head", "fsdp_cpu_ram_efficient_loading": True}}, ANYWHERE, "fsdp_ignored_modules head with fsdp_cpu_ram_efficient_loading"),
    ("fsdp_fp8", {"fsdp_config": {"fsdp_cpu_ram_efficient_loading": True}}, ANYWHERE, "torchao with fsdp_cpu_ram_efficient_loading, which Accelerate refuses"),
    # meshes
    ("tp_bf16", {"num_processes": 4}, ANYWHERE, "tp 2 is for 2 processes, not 4: --num_processes 2"),
    ("tp_bf16", {"num_processes": 4, "parallelism_config": {"parallelism_config_dp_replicate_size": 2}}, ANYWHERE, "tensor parallel beside data parallel (dp_replicate 2 x tp 2): without FSDP2 Accelerate refuses it"),
    ("tp_bf16", {"mixed_precision": "fp8", "fp8_config": {"backend": "TE"}}, ANYWHERE, "tp in fp8 te delayed: of the FP8 layers here torchao's"),
    ("tp_bf16", {"mixed_precision": "fp8", "fp8_config": {"backend": "MSAMP", "opt_level": "O2"}}, ANYWHERE, "take a weight that is split: use tp_fp8, or tp_bf16"),
    ("tp_bf16", {"mixed_precision": "fp8", "fp8_config": {"backend": "AO", "recipe": "mxfp8"}}, ANYWHERE, "tp in fp8 ao mxfp8"),
    ("zero2_bf16", {"parallelism_config": {"parallelism_config_tp_size": 2}}, ANYWHERE, "for hsdp and tp files, this one is zero2"),
    ("ddp_bf16", {"parallelism_config": {"parallelism_config_dp_shard_size": 2}}, ANYWHERE, "parallelism_config is for hsdp and tp files, this one is ddp"),
    ("fsdp_bf16", {"parallelism_config": {"parallelism_config_tp_size": 2}}, ANYWHERE, "FSDP2 with tp 2 has no processes to shard over"),
    ("fsdp_tp_bf16", {"num_processes": 8}, ANYWHERE, "dp_shard 2 x tp 2 is for 4 processes, not 8"),
    ("fsdp_tp_bf16", {"mixed_precision": "fp8", "fp8_config": {"backend": "TE"}}, ANYWHERE, "fsdp_tp in fp8 te delayed: of the FP8 layers here torchao's, with one scale for a tensor or a row, take a weight that is split: use fsdp_tp_fp8"),
    ("fsdp_tp_bf16", {"fsdp_config": {"fsdp_ignored_modules": "lm_head"}}, ANYWHERE, "fsdp_ignored_modules is not for tensor parallel, which splits them, too: leave it out"),
    ("hsdp_bf16", {"num_processes": 6}, ANYWHERE, "is for 4 processes, not 6: --num_processes 4"),
    ("fsdp_bf16", {"parallelism_config": {"parallelism_config_dp_replicate_size": 2}}, ANYWHERE, "hsdp without"),
    ("wizard_fsdp2", {"parallelism_config": {"parallelism_config_cp_size": 2}}, ANYWHERE, "cp 2: ring attention (cp) has CUDA kernels alone, for long sequences use zero3_sp_bf16"),
    ("wizard_fsdp2", {"parallelism_config": {"parallelism_config_sp_size": 2}}, ANYWHERE, "sp 2: Ulysses (sp) is DeepSpeed's, for long sequences use zero3_sp_bf16"),
    ("zero2_bf16", {"parallelism_config": {"parallelism_config_sp_size": 2}}, ANYWHERE, "sequence parallel with zero_stage 2: DeepSpeed averages the gradients of a group's slices in stage 3 and adds them up in 1 and 2: use zero3_sp_bf16"),
    ("zero3_sp_bf16", {"mixed_precision": "fp8", "fp8_config": {"backend": "MSAMP", "opt_level": "O2"}}, ANYWHERE, "sequence parallel with MS-AMP's o2: its levels run as FSDP2 or DDP, and Ulysses (sp) is in DeepSpeed's engine: use zero3_sp_fp8"),
    ("zero3_sp_bf16", {"num_processes": 4}, ANYWHERE, "parallelism_config sp 2 is for 2 processes, not 4"),
    ("zero3_sp_bf16", {"parallelism_config": {"parallelism_config_tp_size": 2}}, ANYWHERE, "sequence parallel beside tp (tp 2 x sp 2)"),
    # DeepSpeed
    ("zero2_bf16", {}, BARE, "zero2 needs DeepSpeed, which is not installed: ./launch.sh setup --extra deepspeed"),
    ("zero3_bf16", {}, CPU, "zero3 needs DeepSpeed, which is not installed: ./launch.sh setup --extra deepspeed"),
    ("wizard_zero3", {"deepspeed_config": {"zero_stage": 0, "gradient_clipping": 1.0}}, ANYWHERE, "zero_stage 0 runs as DDP, which has no"),
    ("zero2_bf16", {"deepspeed_config": {"offload_optimizer_device": "nvme"}}, ANYWHERE, "offloading to nvme"),
    ("zero1_bf16", {"deepspeed_config": {"offload_optimizer_device": "cpu"}}, ANYWHERE, "zero1 does not offload"),
    ("zero2_bf16", O3 | {"deepspeed_config": {"gradient_clipping": 1.0}}, ANYWHERE, "gradient_clipping: only DeepSpeed's engine does it, and MS-AMP's o3 runs as ddp: leave it out, and clip in the script"),
    ("zero3_bf16_offload", O3, ANYWHERE, "offloading: only DeepSpeed's engine does it, and MS-AMP's o3 runs as fsdp: leave it out"),
    # FP8
    ("single_fp8_te", {"fp8_config": {"format": "E5M2"}}, ANYWHERE, "format E5M2 is not one of HYBRID, E4M3"),
    ("single_fp8_te", {"fp8_config": {"amax_compute_algo": "mean"}}, ANYWHERE, "amax_compute_algo mean is not one of max, most_recent"),
    ("single_fp8_te", {"fp8_config": {"amax_history_len": 0}}, ANYWHERE, "amax_history_len is 0: write a whole number from 1 on"),
    ("distributed_type: 'NO'\nmixed_precision: fp8\nnum_processes: 1\nfp8_config: {backend: TE, recipe: delaid}", {}, ANYWHERE, "recipe delaid is not one of delayed, current, block, mxfp8, nvfp4"),
    ("single_fp8_te", {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}}, ANYWHERE, "te delayed does not compile into one graph upstream: use single_fp8_compile"),
    ("single_fp8_te_mxfp8", {}, H200, "mxfp8 needs compute capability 10.0 to 11.x, NVIDIA H200 has 9.0"),
    ("single_fp8_te_mxfp8", {}, RTX5090, "mxfp8 needs compute capability 10.0 to 11.x, NVIDIA RTX 5090 has 12.0"),
    *((f"{strategy}_fp8_te_nvfp4", {}, H200, f"nvfp4 needs compute capability 10.0, NVIDIA H200 has 9.0: use {strategy}_fp8_te")
      for strategy in ("single", "ddp", "fsdp")),
    ("single_fp8_te_nvfp4", {}, A100, "nvfp4 needs compute capability 10.0, NVIDIA A100 has 8.0"),
    ("single_fp8_te", {"fp8_config": {"disable_rth": True}}, ANYWHERE, "disable_rth is a key that Accelerate does not have: did you mean disable_rht?"),
    ("single_fp8_te", {"fp8_config": {"fp8_disable_rth": True}}, ANYWHERE, "did you mean fp8_disable_rht?"),
    *((f"single_fp8{level}", {"fp8_config": {"skip": skip}}, ANYWHERE, f"fp8_config skip {skip.split(',')[0]}: write names of layers")
      for level, skip in (("_te", "last 0%"), ("_te", "last 101%"), ("_te", "last abc%"), ("", "last -5%"),
                          ("_te", "last 15.5%"), ("_msamp_o2", "last 15"), ("_te", "first 5%,head"), ("", "head first"))),
    ("single_fp8_te", {"fp8_config": {"disable_rht": "sometimes"}}, ANYWHERE, "disable_rht is sometimes: write true or false"),
    *((f"{strategy}_fp8_ao_mxfp8", {}, card, f"ao mxfp8 needs compute capability 10.x, {card.name} has {has}: use {strategy}_fp8")
      for strategy, card, has in (("single", H200, "9.0"), ("ddp", RTX5090, "12.0"), ("fsdp", H200, "9.0"))),
    ("single_fp8_ao_mxfp8", {}, A100, "FP8 needs compute capability 8.9, NVIDIA A100 has 8.0: use single_bf16"),
    ("single_fp8_ao_mxfp8", {}, replace(B200, cuda="12.6"), "ao mxfp8 needs CUDA 12.8, torch was built for 12.6: use single_fp8"),
    *(("single_fp8_ao_mxfp4", {}, card, "neither torchao nor TransformerEngine trains MXFP4 on NVIDIA's GPUs: rehearse it with CUDA_VISIBLE_DEVICES=, or use single_fp8_te_nvfp4")
      for card in (H200, B200)),
    ("single_fp8_ao_mxfp8", {"fp8_config": {"scale_calculation_mode": "even"}}, ANYWHERE, "fp8_config scale_calculation_mode even is not one of rceil, floor"),
    ("single_fp8", {"fp8_config": {"scale_calculation_mode": "floor"}}, ANYWHERE, "scale_calculation_mode is not read by backend AO with recipe tensorwise: remove it"),
    ("fsdp_fp8_ao_mxfp8", {"fp8_config": {"enable_fsdp_float8_all_gather": True}}, ANYWHERE, "enable_fsdp_float8_all_gather is not read by backend AO with recipe mxfp8: remove it"),
    ("single_fp8_msamp_o2_fp4", {"fp8_config": {"disable_outlier_clamping": "maybe"}}, ANYWHERE, "disable_outlier_clamping is maybe: write true or false"),
    ("single_fp8_msamp_o2_fp4", {"fp8_config": {"disable_clamping": True}}, ANYWHERE, "disable_clamping is a key that Accelerate does not have"),
    ("single_fp8_te_block", {}, replace(H200, cuda="12.8"), "te block needs CUDA 12.9, torch was built for 12.8: use single_fp8_te"),
    ("single_fp8_te", {}, A100, "FP8 needs compute capability 8.9, NVIDIA A100 has 8.0: use single_bf16"),
    ("ddp_fp8_te", {}, A100, "FP8 needs compute capability 8.9, NVIDIA A100 has 8.0: use ddp_bf16"),
    ("fsdp_fp8_te", {}, A100, "FP8 needs compute capability 8.9, NVIDIA A100 has 8.0: use fsdp_bf16"),
    ("single_fp8", {}, A100, "FP8 needs compute capability 8.9, NVIDIA A100 has 8.0: use single_bf16"),
    ("fsdp_fp8", {}, A100, "FP8 needs compute capability 8.9, NVIDIA A100 has 8.0: use fsdp_bf16"),
    *((name, {}, MI300, f"FP8 is for NVIDIA's GPUs here, AMD Instinct MI300X has other formats or none: use {name.split('_')[0]}_bf16")
      for name in ("single_fp8", "fsdp_fp8", "single_fp8_te", "single_fp8_te_mxfp8", "ddp_fp8_msamp_o2")),
    ("single_fp8_te", {}, replace(H200, packages=["torchao"]), "TransformerEngine is not installed: ./launch.sh setup --extra te"),
    ("single_fp8", {}, BARE, "torchao is not installed: pip install torchao"),
    ("fsdp_fp8", {"fp8_config": {"recipe": "rowwise"}}, ANYWHERE, "torchao gathers in FP8 with tensorwise scales only, not rowwise"),
    ("single_fp8", {"fp8_config": {"skip": ["head", "blocks.0.*"]}}, ANYWHERE, "write names or patterns in one string"),
    ("single_fp8", {"fp8_config": {"skip": None}}, ANYWHERE, "write names or patterns in one string"),
    ("single_fp8", {"fp8_config": {"skip": True}}, ANYWHERE, "write names or patterns in one string"),
    ("ddp_fp8_msamp_o2", {"fp8_config": {"backend": "mslinear", "opt_level": None}}, ANYWHERE, "fp8_config backend mslinear is not one of"),
    ("ddp_fp8_msamp_o2", {"fp8_config": {"recipe": "current"}}, ANYWHERE, "recipe current: MSAMP combines with te_delayed and fp4 only"),
    ("fsdp_fp8_msamp_o2", {"fp8_config": {"opt_level": "O3"}}, ANYWHERE, "o3 keeps a whole FP8 weight in each process, fsdp shards it: use fsdp_fp8_msamp_o2"),
    ("fsdp_fp8_msamp_o2", {"fsdp_config": {"fsdp_offload_params": True}}, ANYWHERE, "levels under fsdp are not offloaded"),
    ("wizard_ddp", {"mixed_precision": "fp8", "fp8_config": {"backend": "MSAMP", "optimization_level": "O1"}}, ANYWHERE, "optimization_level O1 is not read by Accelerate, which takes O2: did you mean opt_level?"),
]  # fmt: skip
TWO_MACHINES = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 29500}
MACHINES = [  # (config, options of accelerate launch on machine 1 of 2, on what machine, the line)
    ("ddp_bf16", {"main_process_ip": None}, H200, "several machines need --main_process_ip"),
    ("ddp_bf16", {"main_process_ip": "127.0.0.1"}, H200, "main_process_ip 127.0.0.1 means each machine itself"),
    ("ddp_bf16", {"main_process_ip": "no.such.name.invalid"}, H200, "not an address, or a name that this machine can resolve"),
    ("ddp_bf16", {"num_processes": 3}, H200, "3 processes cannot be divided over 2 machines: --num_processes counts those of all machines"),
    ("ddp_bf16", {"machine_rank": 2}, H200, "machine_rank 2 is not one of 0 to 1"),
    ("ddp_bf16", {"rdzv_backend": "c10d", "main_process_port": None}, H200, "several machines need --main_process_port"),
    ("ddp_bf16", {"max_restarts": 1}, H200, "a restarted worker would look for the one that died"),
    ("zero2_bf16", {"deepspeed_config": {"zero_stage": 2}}, H200, "needs a deepspeed_hostfile: set deepspeed_multinode_launcher: standard"),
]  # fmt: skip
SCRIPT = [  # (config, the script's arguments of Accelerator, how it ends, the line)
    ("ddp_bf16", {"mixed_precision": "fp16"}, Refused, "passes mixed_precision='fp16', the config says bf16"),
    ("ddp_bf16", {"cpu": True}, Refused, "passes cpu=True, the config asks for an accelerator"),
    ("ddp_bf16", {"fsdp_plugin": accelerate.utils.FullyShardedDataParallelPlugin()}, Refused, "passes fsdp_plugin, which is the config"),
    ("ddp_bf16", {"dynamo_backend": "inductor"}, Refused, "passes dynamo_backend, which is the config's to say"),
    ("zero3_bf16", {"parallelism_config": accelerate.utils.ParallelismConfig(sp_backend="deepspeed", sp_size=4)}, Refused, "set parallelism_config in the YAML as zero3_sp_bf16.yml does"),
    ("ddp_bf16", {"kwargs_handlers": [accelerate.utils.AORecipeKwargs()]}, Refused, "passes AORecipeKwargs, FP8 is the config's"),
    ("ddp_bf16", {"kwargs_handlers": [accelerate.utils.GradScalerKwargs()]}, Refused, "is for fp16, this run is bf16"),
]  # fmt: skip


def rows(table):
    """The marks of a test that reads the table: a row is found by `-k` with what is started and words of its line."""
    names = [f"{what}: {line}" for what, _, _, line in table]
    return pytest.mark.parametrize(("what", "change", "end", "line"), table, ids=names)


@pytest.fixture
def tmp(tmp_path, monkeypatch):
    """A file, a script, a config with a typing error, and the folders of three runs."""
    (tmp_path / "file").write_text("not JSON")
    (tmp_path / "own.py").write_text("from faithful import Accelerator\n")
    (tmp_path / "theirs" / "run").mkdir(parents=True)
    (tmp_path / "train.yml").write_text("seed: 3\nresume_from_checkpoint: latest\nmax_steps: 20\n")
    (tmp_path / "bad.yml").write_text((CONFIGS / "ddp_bf16.yml").read_text() + "mixed_precison: bf16\n")
    (tmp_path / "share.yml").write_text((CONFIGS / "single_fp8_te_nvfp4.yml").read_text().replace("15%", "0%"))
    for name, command in (("own", "python own.py"), ("gpt", "python recipes/gpt.py"), ("damaged", "")):
        (tmp_path / name).mkdir()
        write_record(tmp_path / name, status="finished", recipe=name, command=command)
    (tmp_path / "damaged" / "run.json").write_text("{")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tracing, "load", None)
    return tmp_path


@rows(TOOLS)
def test_a_mistake_is_refused_in_one_line_before_anything_begins(what, change, end, line, tmp, monkeypatch, capsys):
    there = sorted(path.relative_to(tmp) for path in tmp.rglob("*"))
    main = importlib.import_module(f"tools.{what}").main
    capsys.readouterr()  # what torch says when it is imported
    monkeypatch.setattr(args, "QUIET", 600)  # on a busy machine the line is not the first that is printed
    words = change.format(tmp=tmp).split()
    if what == "compare" and "--report" not in words and "--" in words:
        words = ["--output_dir", f"{tmp}/out", *words]
    monkeypatch.setattr(sys, "argv", [f"{what}.py", *words])
    with pytest.raises(SystemExit) as left:
        cli.run(main)
    out, err = capsys.readouterr()
    assert (left.value.code, out) == (end, "") and len(err.splitlines()) == 1, err
    assert err.startswith("refused: ") and line.format(tmp=tmp) in err
    assert {path.relative_to(tmp) for path in tmp.rglob("*") if path != tmp / "out"} == set(there)


@rows(LAUNCH_SH)
def test_launch_sh_says_a_mistake_in_one_line(what, change, end, line):
    done = launched(what, *change.split())
    assert done.returncode == end and line in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@rows(RECIPES)
def test_a_users_mistake_is_one_line_of_the_run(what, change, end, line, tmp_path):
    train(what, tmp_path / "run", *change.split(), code=end)
    log = (tmp_path / "run.log").read_text()
    assert log.count("refused: ") == 1 and line in log and "Traceback" not in log


def written(folder, what, change):
    """The path of a config file: of this text or, if `what` is a name, of that file's keys. change: another name, or
    other keys, those of a section beside its own."""
    name, keys = (change, {}) if isinstance(change, str) else ("mine.yml", change)
    if what in WIZARDS or (CONFIGS / f"{what}.yml").is_file():
        mapping = WIZARDS.get(what) or yaml.safe_load((CONFIGS / f"{what}.yml").read_text())
        sections = {key: mapping.get(key, {}) | value for key, value in keys.items() if isinstance(value, dict)}
        what = yaml.dump(mapping | keys | sections)
    (folder / name).write_text(what)
    return folder / name


def found(path, where, options=()):
    """What `./launch.sh check` finds wrong with a file anywhere, or else on this machine alone. Fails if both are."""
    anywhere, here, _, _ = check.check(path, where or B200, dict(options))
    assert not (here if where is ANYWHERE else anywhere)
    return anywhere + here


@rows(CONFIG)
def test_a_config_that_cannot_be_is_refused_with_its_fix(what, change, end, line, tmp_path, monkeypatch):
    monkeypatch.setattr(config_file, "OURS", tmp_path)  # whose files keep the grammar of names
    [said] = found(written(tmp_path, what, change), end)
    assert line in said


@rows(MACHINES)
def test_machines_that_cannot_meet_are_named(what, change, end, line):
    assert found(CONFIGS / f"{what}.yml", end, TWO_MACHINES) == []
    [said] = found(CONFIGS / f"{what}.yml", end, TWO_MACHINES | change)
    assert line in said


def merged(config, script):
    """What Accelerate gets on a machine with GPUs for the script's arguments."""
    strategy, precision = config.split("_")
    asked = plan.Plan(None, strategy, 2, precision, "cuda")
    return arguments.with_config(asked, script, strategies.get_strategy(asked), backends.get_backend(asked))


@rows(SCRIPT)
def test_a_script_that_contradicts_its_config_is_refused_by_name(what, change, end, line):
    assert merged(what, {})
    with pytest.raises(end, match=re.escape(line)) as refused:
        merged(what, change)
    assert "\n" not in str(refused.value)


def test_all_contradictions_of_a_script_are_named_at_once():
    script = {key: value for _, change, _, _ in SCRIPT for key, value in change.items()}
    with pytest.raises(Refused) as refused:
        merged("ddp_bf16", script)
    assert len(str(refused.value).splitlines()) == 6


def test_a_tracker_that_a_script_registers_is_known_by_its_name(monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mine", GeneralTracker)
    arguments.refuse_missing_trackers("mine")
    with pytest.raises(Refused, match="logs with 'other', which Accelerate does not know: one of .*, mine, "):
        arguments.refuse_missing_trackers(["mine", "other"])
