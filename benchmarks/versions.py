"""Do the oldest and the newest versions that pyproject.toml allows train as the pinned ones do?

    python benchmarks/versions.py lowest                        all configs of CONFIGS
    python benchmarks/versions.py torch==2.11.* torch==2.13.*   other sets, one after the other
    python benchmarks/versions.py lowest --ci                   ten configs; exits with 1 if a loss differs
    python benchmarks/versions.py --suites avx2 sse41           the default tests on what older CPUs have

A set is `lowest`, the lowest versions of all requirements that can be installed together (uv's lowest-direct), or one
requirement beside the newest of all others. It is installed into an environment in a temporary folder, which is removed
at the end. There each config trains a recipe for 6 steps by `accelerate launch`, as it does in the environment of this
script, which has the pins. Compared are the losses of all steps and of the evaluation. Adds to results/versions.json:
for each set its versions and, for each config, the largest relative difference of a loss, or the last line of what the
run said. A suite is the default tests with torch and oneDNN held down to an instruction set: how many pass, and which
fail.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

from harness import ROOT, arguments, command, furthest, losses, made, save

STEPS = ["--max_steps", "6", "--logging_steps", "1"]
CI = [
    "single_bf16/vit", "ddp_bf16/vit", "fsdp_bf16/vit", "fsdp_fp8/vit", "fsdp_fp8_msamp_o2/vit", "hsdp_bf16/vit",
    "tp_bf16/gpt", "zero2_bf16/vit", "zero3_bf16/vit", "ddp_fp8_msamp_o2/vit",
]  # fmt: skip
CONFIGS = CI + [
    "single_fp32/vit", "zero1_bf16/vit", "single_fp8/vit", "single_fp8_te/vit", "single_fp8_msamp_o1/vit",
    "single_fp8_msamp_o3/vit", "zero3_fp8/vit", "single_bf16/gpt", "single_bf16/bert", "single_bf16/diffusion",
    "single_bf16/embed", "single_bf16/dpo",
    "single_bf16/resnet", "single_bf16_compile/vit", "single_fp8_msamp_o2_compile/vit", "fsdp_fp8_msamp_o2_compile/vit",
]  # fmt: skip
PACKAGES = ("torch", "torchvision", "transformers", "timm", "datasets", "torchao", "safetensors", "deepspeed", "numpy")
SUITES = {  # what torch and oneDNN may use
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "sse41": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
RESULT = ROOT / "results" / "versions.json"
LOOK = f"import importlib.metadata as m, json, platform; print(json.dumps({{'python': platform.python_version()}} | {{n: m.version(n) for n in {PACKAGES}}}))"  # noqa: E501


def install(folder, which):
    """Makes the environment. Returns its Python."""
    subprocess.run([sys.executable, "-m", "uv", "venv", "-q", "-p", sys.executable, folder], check=True)
    python = folder / "bin" / "python"
    needed = ["-r", ROOT / "pyproject.toml", "--extra", "recipes", "--extra", "deepspeed"]
    how = ["--resolution", "lowest-direct"]
    if which != "lowest":
        (folder / "which.txt").write_text(which)
        how = ["--constraint", folder / "which.txt"]
    subprocess.run([sys.executable, "-m", "uv", "pip", "install", "-q", "-p", python, *how, *needed], check=True)
    return python


def train(python, name):
    """The losses of a config's run in that environment, or a line."""
    config, recipe = name.split("/")
    env = {"PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    return losses(python, ["--config_file", f"accelerate_configs/{config}.yml"], [recipe, *STEPS], env)


def suite(environment):
    """How many of the default tests pass, and the names of those that fail."""
    with tempfile.TemporaryDirectory() as folder:
        file, began = Path(folder, "suite.xml"), time.monotonic()
        subprocess.run([ROOT / "launch.sh", "test", "-q", f"--junitxml={file}"], cwd=ROOT, env=os.environ | environment)
        cases = list(ElementTree.parse(file).iter("testcase"))
    outcomes = [{inner.tag for inner in case} & {"failure", "error", "skipped"} for case in cases]
    failed = [f"{case.get('classname')}::{case.get('name')}" for case, how in zip(cases, outcomes, strict=True)
              if how & {"failure", "error"}]  # fmt: skip
    counts = {"passed": sum(not how for how in outcomes), "skipped": sum(how == {"skipped"} for how in outcomes)}
    return {"environment": environment} | counts | {"failed": failed, "seconds": round(time.monotonic() - began)}


def main():
    parser = arguments(__doc__)
    parser.add_argument("sets", nargs="*", metavar="SET")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=[])
    parser.add_argument("--ci", action="store_true", help="ten configs, and nothing is written")
    parser.add_argument("--configs", nargs="+", default=CONFIGS, metavar="CONFIG/RECIPE")
    args = parser.parse_args()
    configs, failed, found = CI if args.ci else args.configs, [], {"suites": {}} | made(RESULT, sets={}, command=None)

    def keep():
        kept = {key: found[key] for key in ("sets", "suites")}
        save(RESULT, {"command": command(found["command"])} | kept, PACKAGES)

    for name in args.suites:
        found["suites"][name] = suite(SUITES[name])
        print(name, found["suites"][name], flush=True)
    if args.suites:
        keep()  # not before: a test compares the pages with the file
    with tempfile.TemporaryDirectory() as folder:
        pinned = {}
        for which in args.sets:
            python = install(Path(folder) / f"environment-{args.sets.index(which)}", which)
            row = {"versions": json.loads(subprocess.check_output([python, "-c", LOOK], text=True)), "configs": {}}
            print(which, row["versions"], flush=True)
            row["configs"], found["sets"][which] = found["sets"].get(which, row)["configs"], row
            for name in configs:
                with ThreadPoolExecutor() as pool:  # both at once: a launch waits as often as it computes
                    theirs = pool.submit(train, python, name)
                    if name not in pinned:
                        pinned[name] = train(sys.executable, name)
                    row["configs"][name] = value = furthest(theirs.result(), pinned[name])
                failed += [name] * (isinstance(value, str) or value > 0)
                print(f"{name:32}", value, flush=True)
                if not args.ci:
                    keep()
    if args.ci and failed:
        sys.exit(f"trains otherwise than with the pinned versions, or not at all: {', '.join(failed)}")


if __name__ == "__main__":
    main()
