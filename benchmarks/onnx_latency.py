"""Latency and size of an exported model: fp32 and fp16, torch and onnxruntime.

    python benchmarks/onnx_latency.py runs/photos-vit-single_fp32-800 runs/photos-resnet-single_fp32-450 \\
        --output results/onnx_latency.json

The latency is that of the fastest of many calls on held-out samples, after warm-up, on one CPU thread, because other
load on the machine affects it least. `apart` is the largest difference of a logit from torch's fp32.
"""

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

import torch
from provenance import save

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from tools.export import held_out, load  # noqa: E402


def milliseconds(call, inputs, calls):
    for _ in range(3):
        call(inputs)
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call(inputs)
        times.append((time.perf_counter() - start) * 1000)
    return round(min(times), 3)


def in_onnxruntime(model, inputs, path):
    """Exports `model` to `path` and returns a function that computes a batch with onnxruntime."""
    import onnxruntime

    torch.onnx.export(
        model,
        (inputs[:2],),
        dynamo=True,
        input_names=["inputs"],
        verbose=False,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    ).save(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda batch: torch.from_numpy(session.run(None, {"inputs": batch.numpy()})[0])


def measure(run, batches, calls):
    model, record, _ = load(run)
    inputs = held_out(run, record, max(batches))["pixel_values"]
    with torch.no_grad():
        wanted = model(inputs)
    for dtype in (torch.float32, torch.float16):
        model, cast = model.to(dtype), inputs.to(dtype)
        weights = sum(t.nbytes for t in model.state_dict().values())
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            path = Path(folder, "model.onnx")
            engines = {"torch": model, "onnxruntime": in_onnxruntime(model, cast, path)}
            for engine, call in engines.items():
                row = {
                    "model": record["args"]["model"],
                    "engine": engine,
                    "dtype": str(dtype)[6:],
                    "bytes": weights if engine == "torch" else path.stat().st_size,
                    "apart": (call(cast).float() - wanted).abs().max().item(),
                }
                row |= {f"milliseconds_batch_{n}": milliseconds(call, cast[:n].contiguous(), calls) for n in batches}
                print(row, flush=True)
                yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs of image recipes")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    rows = [row for run in args.runs for row in measure(run, args.batches, args.calls)]
    if args.output:
        save(args.output, {"threads": 1, "rows": rows}, ("timm", "onnx", "onnxscript", "onnxruntime"))


if __name__ == "__main__":
    main()
