"""How long a model from a safetensors file takes to be there, sharded: from_pretrained and prepare.

    python benchmarks/loading.py --before ../earlier --output results/loading.json

A Llama whose file is in bf16, as the Hub has them, is loaded into fp32 with the key by which only process 0 builds the
model, by 2 and 4 processes, `--rounds` times in turns with the code of an earlier clone, which sends every weight from
process 0. Medians, in seconds: `from_pretrained` of process 0 and of the slowest other process, and `prepare`. `read`
is the number of parameters that the processes read from the file. The file is in the page cache.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from phases import launched
from provenance import ROOT, save

CONFIGS = ("fsdp_fp32", "zero3_bf16")


def inside(file, root, model, folder):
    """Measures in this process, which is one of several. The main one writes the figures to `file`."""
    sys.path.insert(0, root)
    import torch
    import transformers
    from accelerate.utils import gather_object

    from faithful import Accelerator

    llama = transformers.LlamaForCausalLM  # imports it
    accelerator, read = Accelerator(project_dir=folder), []
    if Path(root, "faithful", "loading", "sharded_files.py").exists():
        from faithful.loading import sharded_files

        names_of_equal = sharded_files.names_of_equal

        def counted(*args):
            read.extend(names_of_equal(*args))
            return read

        sharded_files.names_of_equal = counted
    accelerator.wait_for_everyone()
    began = time.perf_counter()
    net = llama.from_pretrained(model, dtype=torch.float32)
    loaded = time.perf_counter()
    accelerator.wait_for_everyone()
    both = time.perf_counter()
    net, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    accelerator.wait_for_everyone()
    times = gather_object([(loaded - began, time.perf_counter() - both)])
    others = max(seconds for seconds, _ in times[1:])
    figures = {"process 0": times[0][0], "others": others, "prepare": times[0][1]}
    if accelerator.is_main_process:
        Path(file).write_text(json.dumps(figures | {"read": len(read)}))
    accelerator.end_training()


def llama(folder, width, layers):
    """Writes a Llama with random weights in bf16. Returns how many parameters it has."""
    import torch
    import transformers

    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "vocab_size": 32_000}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a clone of an earlier commit")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as model:
        parameters = llama(model, args.width, args.layers)
        for config in CONFIGS:
            for processes in args.processes:
                runs = {"before": [], "now": []}
                for _ in range(args.rounds):
                    for code, root in (("before", args.before.resolve()), ("now", ROOT)):
                        runs[code].append(launched(__file__, root, config, processes, model))
                for code, figures in runs.items():
                    medians = {name: statistics.median(one[name] for one in figures) for name in figures[0]}
                    rows.append({"config": config, "processes": processes, "code": code} | medians)
                    print(json.dumps(rows[-1]), flush=True)
    if args.output:
        figures = {"parameters": parameters, "rounds": args.rounds, "rows": rows}
        save(args.output, figures, ("accelerate", "transformers", "safetensors", "deepspeed"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(*sys.argv[2:])
    else:
        main()
