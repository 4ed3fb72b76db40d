"""What does a training step cost the host, without a card?

    python benchmarks/host.py --output results/host.json

Where layers are narrow a GPU waits for the host. Here it has a GPU that computes nothing (null_gpu.c): a library in the
place of CUDA's runtime, its driver and cuBLAS. Python, torch's dispatcher, autograd and Triton's launcher are the real
ones, so their time is what it is beside a card; what CUDA's own functions take comes on top. The numbers that a
training computes are zeros.

A Llama of four narrow blocks is trained with clipping and AdamW under each config, in turns (harness.py). `plain` is
single_bf16 under plain Accelerate, with which the others are compared. The time is CPU time of all threads; kernels,
products and waits are counted. Needs a C compiler, nm, and a torch built with CUDA.
"""

import ctypes
import functools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import ROOT, arguments, in_turns, ratio, save, watch

PLAIN = "plain"
WAYS = [PLAIN, *(f"single_{way}" for way in ("bf16", "fp8", "fp8_msamp_o1", "fp8_msamp_o2", "fp8_msamp_o3"))]
WAYS += [f"single_{way}_compile" for way in ("bf16", "fp8", "fp8_msamp_o2")]
CONFIGS = ROOT / "accelerate_configs"
COUNTS = ("kernels", "products", "waits")
PREFIXES = re.compile(r"(__)?cuda[A-Z_]|cublas[A-Z]|cu[A-Z]")
TYPES = """
#define CUDARTAPI
#define __host__
#define __device_builtin__
#define __cudart_builtin__
#define __device__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
"""  # what the header of CUDA's compiler says, which no wheel of torch brings


def build(folder):
    """The path of the library. Raises SystemExit if it cannot be built here."""
    import torch

    compiler, site = shutil.which("cc") or shutil.which("gcc"), Path(torch.__file__).parents[1]
    include = next(site.glob("nvidia/cu*/include/cuda_runtime_api.h"), Path()).parent
    if not compiler or not shutil.which("nm") or include == Path():
        raise SystemExit("needs a C compiler, nm, and a torch built with CUDA: uv pip install torch")
    source = (ROOT / "benchmarks" / "null_gpu.c").read_text()
    libraries = [path for path in site.glob("torch/lib/*.so") if "cuda" in path.name or "python" in path.name]
    listed = subprocess.run(["nm", "-D", "-u", *libraries], capture_output=True, text=True).stdout
    names = {word.split("@")[0] for word in listed.split() if PREFIXES.match(word)}
    header = (include / "cuda.h").read_text()
    driver, version = re.findall(r"CUDAAPI\s+(cu\w+)\s*\(", header), re.search(r"define CUDA_VERSION (\d+)", header)[1]
    names |= {name.removesuffix("_v2") + more for name in driver for more in ("", "_v2")}
    names -= set(re.findall(r"^[\w ]+ \**(\w+)\(", source, re.M))
    names = {name for name in names if not name.startswith("cuFile")}  # of a library that torch brings
    (folder / "crt").mkdir()
    for name in ("host_defines.h", "host_config.h"):
        (folder / "crt" / name).write_text(TYPES)
    rest = "".join(f'int {name}_() __asm__("{name}"); int {name}_() {{ return 0; }}\n' for name in sorted(names))
    (folder / "all.c").write_text(f"{source}\n{rest}")
    library = folder / "libcuda.so.1"
    line = [compiler, "-w", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{folder}", f"-I{include}"]
    line += [f"-DVERSION={version}"]
    subprocess.run([*line, "-o", library, folder / "all.c", "-ldl"], check=True)
    (folder / "libcuda.so").symlink_to(library)
    return library


def train(steps, file):
    """Trains, and writes into `file` what was counted in the last step."""
    import torch
    from accelerate.utils import set_seed
    from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

    if Path(file).stem == PLAIN:
        from accelerate import Accelerator
    else:
        from faithful import Accelerator

    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN looks for a card of its own
    accelerator = Accelerator()
    assert accelerator.device.type == "cuda", "the library is not in CUDA's place: what is timed would be a CPU's"
    set_seed(0)
    # It would read from positions, all zeros here, that sequences are packed.
    masking_utils.find_packed_sequence_indices = lambda positions: None
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=4, use_cache=False, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.zeros(2, 64, dtype=torch.long, device=accelerator.device)
    library, counted = ctypes.CDLL("libcuda.so.1"), []
    for _ in range(steps):
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        counted.append([ctypes.c_long.in_dll(library, f"null_{name}").value for name in COUNTS])
    last = (b - a for a, b in zip(counted[-2], counted[-1], strict=True))
    Path(file).write_text(json.dumps(dict(zip(COUNTS, last, strict=True))))
    os._exit(0)  # without the end of what torch has loaded


def counts_of(library, way):
    return library.parent / f"{way}.json"


def start(library, way, steps, folder, port):
    """Launches one config; its output goes into `folder`."""
    env = {"LD_PRELOAD": library, "OMP_NUM_THREADS": 1, "FAITHFUL_PROJECT_DIR": folder / f"run-{way}"}
    env |= dict.fromkeys(("LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH"), library.parent)
    env |= {f"{name}_CACHE_DIR": library.parent / name for name in ("TRITON", "TORCHINDUCTOR")} | {"PYTHONPATH": ROOT}
    config = CONFIGS / f"{'single_bf16' if way == PLAIN else way}.yml"
    words = ["-m", "accelerate.commands.launch", "--config_file", config]
    words += [ROOT / "benchmarks" / "host.py", "--one", steps, folder / f"{way}.json", port, counts_of(library, way)]
    with open(folder / f"{way}.log", "w") as log:
        env = os.environ | {name: str(value) for name, value in env.items()}
        return subprocess.Popen([sys.executable, *map(str, words)], cwd=folder, env=env, stdout=log, stderr=log)


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    parser.add_argument("--configs", nargs="+", default=WAYS, help="`plain` or configs, compared with the first")
    parser.add_argument("--turns", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        found = in_turns(args.configs, args.turns, functools.partial(start, library))
        counts = {way: json.loads(counts_of(library, way).read_text()) for way in args.configs}
    rows = []
    for way in args.configs:
        seconds = found[way]["cpu"]
        row = {"config": way, "milliseconds": 1e3 * statistics.median(seconds)} | counts[way]
        rows.append(row | {"ratio": ratio(seconds, found[args.configs[0]]["cpu"])})
        print(json.dumps(rows[-1]), flush=True)
    save(args.output, {"rows": rows}, ("accelerate", "transformers", "triton", "torchao"))


if __name__ == "__main__":
    if "--one" in sys.argv:
        steps, file, port, counts = sys.argv[sys.argv.index("--one") + 1 :]
        watch(file, int(steps), int(port))
        train(int(steps), counts)
    else:
        main()
