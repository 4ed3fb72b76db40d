"""Does tools/diagnose.py name a planted fault first, and does its skip line fix it? And what does it find in recipes?

There are three faults (benchmarks/faults.py), each with a config that it breaks. For each fault the script records the
diagnosis and the loss of runs with the same seeds under that config and under the config with the proposed skip line.
Recipes that are already in the output file are not diagnosed again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from provenance import save

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from tools.diagnose import ends_with_this  # noqa: E402
from tools.paired import interval  # noqa: E402

FAULTS = {  # fault: (config, what it changes of it, the layer that has to be named first)
    "gradients": ("single_fp8_te_current", {}, "stem"),
    "outliers": ("single_fp8_te", {"amax_history_len": 1}, "middle"),
    "updates": ("single_fp8_msamp_o2", {}, "slow"),
}
RECIPES = [("single_fp8_te", "vit"), ("single_fp8_msamp_o2", "vit"), ("single_fp8", "gpt"), ("single_fp8_te", "gpt")]
SEEDS, STEPS = 8, 80


def config_of(name, changes, path):
    mapping = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yml").read_text())
    mapping["fp8_config"] |= changes
    path.write_text(yaml.dump(mapping))
    return path


def diagnosed(config, folder, *words, pairs=8):
    command = [sys.executable, "tools/diagnose.py", str(config), "--pairs", str(pairs), "--output", str(folder), "--"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([*command, *words], cwd=ROOT, check=True, preexec_fn=ends_with_this, **quiet)
    diagnosis = json.loads((folder / "diagnose.json").read_text())
    diagnosis["command"] = f"./launch.sh diagnose {Path(config).stem} --pairs {pairs} -- {' '.join(words)}"
    return diagnosis


def losses(config, fault, folder):
    out = folder / f"{config.stem}.json"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), "benchmarks/faults.py"]
    command += [fault, "--steps", str(STEPS), "--seeds", str(SEEDS), "--output", str(out)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, cwd=ROOT, check=True, **quiet)
    return json.loads(out.read_text())


def short(diagnosis):
    """The part of a diagnosis that goes into the results."""
    layers = {
        row["name"]: diagnosis["layers"].get(diagnosis["groups"][row["name"]][0]) for row in diagnosis["costs"][:3]
    }
    for layer in layers.values():
        for key in [key for key in layer if key.endswith(("_amax", "_reach"))]:
            layer[key] = layer[key][:8]
    keys = ("command", "truth", "answer", "skip_line", "costs", "all", "look", "after")
    return {key: diagnosis[key] for key in keys} | {"worst_layers": layers}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--only", help="faults or recipes")
    args = parser.parse_args()
    results = {"faults": {}, "recipes": []}
    if args.output and args.output.exists():
        results |= {key: json.loads(args.output.read_text())[key] for key in results}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for fault, (name, changes, layer) in FAULTS.items() if args.only != "recipes" else ():
            sick = config_of(name, changes, folder / f"{fault}.yml")
            figures = diagnosed(sick, folder / fault, "benchmarks/faults.py", fault)
            line = yaml.safe_load(figures["skip_line"] or "{}")
            before = losses(sick, fault, folder)
            after = losses(config_of(name, changes | line, folder / f"{fault}_cured.yml"), fault, folder)
            mean, low, high = interval([100 * (b - a) / b for b, a in zip(before, after, strict=True)])
            results["faults"][fault] = {
                "config": name,
                "changes": changes,
                "planted": layer,
                "named_first": figures["costs"][0]["name"],
                "seeds": SEEDS,
                "steps": STEPS,
                "loss_before": before,
                "loss_after": after,
                "paired_gain_percent": {"mean": mean, "low": low, "high": high},
                "diagnosis": short(figures),
            }
            print(
                f"{fault}: planted {layer}, {figures['answer'][0]}; {figures['skip_line']}: loss {mean:+.1f}% lower "
                f"({low:+.1f} to {high:+.1f})",
                flush=True,
            )
        for config, recipe in RECIPES if args.only != "faults" else ():
            if any(one["config"] == config and one["recipe"] == recipe for one in results["recipes"]):
                continue  # of an earlier call
            figures = diagnosed(config, folder / f"{config}-{recipe}", recipe)
            results["recipes"].append({"config": config, "recipe": recipe} | short(figures))
            print(f"{config} {recipe}: {figures['answer']} {figures['skip_line']}", flush=True)
            if args.output:
                save(args.output, results)
    if args.output:
        save(args.output, results)


if __name__ == "__main__":
    main()
