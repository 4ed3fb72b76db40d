"""Where does FP8 hurt this training, and what does it cost the loss?

    ./launch.sh diagnose single_fp8_te -- vit --dataset textures
    ./launch.sh diagnose my.yml --num_processes 2 -- my_script.py its options

The tool runs real training steps under that config on this machine (tools/watch.py runs the script, unchanged). First
it compares each FP8 layer with the same layer in high precision: underflows and overflows of input, weight and output
gradient, the error of the three products, and at MS-AMP's levels the weight updates that were lost to rounding. Then it
repeats the same steps from the same state, each time with one layer in high precision (or one block, if there are many
layers). The change of the loss is what FP8 costs in that layer: a mean over pairs with its 95% t interval. The last
line of the output goes into the config: it skips the layers whose cost is significant.

It writes diagnose.json, with all figures, into the folder that it prints.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from faithful import Refused  # noqa: E402
from faithful.config import config_file  # noqa: E402
from faithful.config.settings import read_env, to_env  # noqa: E402
from faithful.launch import machine  # noqa: E402
from tools import cli, find, paired  # noqa: E402
from tools.find import option  # noqa: E402

OPTIONS = {"look": 20, "pairs": 8, "after": 8}
# Options of a recipe that say how long it trains
LENGTH = ("max_steps", "num_train_epochs", "eval_steps", "save_steps")
PRODUCTS = {"fprop": "output", "dgrad": "input gradient", "wgrad": "weight gradient"}  # what each product computes
TENSORS = {"input": "input", "weight": "weight", "gradient": "output gradient"}


def costs(watched: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The cost of each layer in percent of the loss, [{name, mean, low, high, sure}], largest lower bound first; then
    the cost of all FP8 layers together. `sure`: above 0 with a Bonferroni correction for the number of layers."""
    rows, confidence = [], 1 - 0.05 / max(1, len(watched["groups"]))
    for name in [*watched["groups"], "all"]:
        values = [100 * (pair["none"] - pair[name]) / abs(pair["none"]) for pair in watched["pairs"]]
        mean, low, high = paired.interval(values)
        _, corrected_low, _ = paired.interval(values, confidence)
        sure = corrected_low is not None and corrected_low > 0
        rows.append({"name": name, "mean": mean, "low": low, "high": high, "sure": sure, "pairs": values})
    *rows, everything = rows
    return sorted(rows, key=lambda row: row["low"], reverse=True), everything


def symptoms(layer: dict[str, Any]) -> list[str]:
    """The measurements of a layer that are 1% or more, the worst first."""
    shares = []
    for key, words in TENSORS.items():
        shares += [(layer[f"{key}_{what}%"], f"{words} {what} {{:.3g}}%") for what in ("underflows", "overflows")]
    if to_nearest(layer):
        return ["the output gradient is rounded to nearest, not stochastically"]
    shares.append((layer["updates_lost%"] or 0, "weight updates lost {:.3g}%"))
    shares += [(layer[f"{key}_underflows%"] or 0, f"{key} underflows {{:.3g}}%") for key in ("exp_avg", "exp_avg_sq")]
    return [words.format(share) for share, words in sorted(shares, reverse=True) if share >= 1]


def to_nearest(layer: dict[str, Any]) -> bool:
    """Whether a layer that should round its gradient stochastically rounded every value to the nearest number."""
    return layer.get("gradient_up_or_down%") == 0


def unlike_the_recipe(watched: dict[str, Any]) -> Iterator[str]:
    """Yields what NVFP4's layers do that its recipe does not."""
    if watched.get("plan", {}).get("level") != "nvfp4":
        return
    layers = watched["layers"]
    if wrong := [name for name, layer in layers.items() if to_nearest(layer)]:
        yield f"The output gradient of {some(wrong)} is rounded to nearest, where the recipe says stochastically"
    if wrong := [name for name, layer in layers.items() if any(layer[f"{key}_overflows%"] for key in TENSORS)]:
        yield f"Values of {some(wrong)} are clipped, which the scale of their own block never does"


def some(layers: list[str]) -> str:
    return ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")


def skip_line(watched: dict[str, Any], rows: list[dict[str, Any]]) -> str | None:
    """The line for fp8_config, or None if no layer has a significant cost."""
    worst = [row["name"] for row in rows if row["sure"]]
    return f'skip: "{", ".join([*watched["skip"], *worst])}"' if worst else None


def sentence(row: dict[str, Any], everything: dict[str, Any], watched: dict[str, Any]) -> str:
    first = watched["groups"][row["name"]][0]
    seen = symptoms(watched["layers"][first])
    words = f"{row['name']} costs {row['mean']:.2g}% of the loss ({row['low']:+.2g}% to {row['high']:+.2g}%)"
    together = f"{everything['mean']:.2g}% ({everything['low']:+.2g}% to {everything['high']:+.2g}%)"
    return f"{words}, all FP8 layers together {together}" + (f": {', '.join(seen[:2])}" if seen else "")


def diagnosis_of(watched: dict[str, Any], command: str) -> dict[str, Any]:
    """The result, for diagnose.json. watched: what tools/watch.py measured."""
    rows, everything = costs(watched)
    sure = [row for row in rows if row["sure"]]
    answer = [sentence(row, everything, watched) for row in sure]
    if not sure:
        least = statistics.median((row["high"] - row["low"]) / 2 for row in rows)
        together = f"{everything['mean']:+.2g}% ({everything['low']:+.2g}% to {everything['high']:+.2g}%)"
        answer.append(
            f"No layer costs more than about {least:.2g}% of the loss, the smallest cost that {len(watched['pairs'])} "
            f"pairs can show; all FP8 layers together: {together}"
        )
    answer = [*unlike_the_recipe(watched), *answer]
    apart = max(abs(100 * (pair["none"] - pair["again"]) / pair["none"]) for pair in watched["pairs"])
    if apart:
        answer.append(f"The same steps, repeated unchanged, differ by up to {apart:.2g}%: a smaller cost is noise")
    result = {"command": command, "answer": answer, "again": apart, "skip_line": skip_line(watched, rows)}
    return result | {"costs": rows, "all": everything} | watched


def cost_table(diagnosis: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    heads = ["layer", "cost, % of the loss", "95% interval", "significant", "worst seen"]
    rows = []
    for row in [*diagnosis["costs"], diagnosis["all"] | {"name": "all of them"}]:
        layers = diagnosis["groups"].get(row["name"], [])
        seen = symptoms(diagnosis["layers"][layers[0]])[:2] if layers else []
        ends, sure = f"{row['low']:+.3f} to {row['high']:+.3f}", "yes" if row["sure"] else "no"
        rows.append([row["name"], f"{row['mean']:+.3f}", ends, sure, ", ".join(seen)])
    return heads, rows


def layer_table(diagnosis: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    shares = [f"{tensor}_{what}%" for tensor in TENSORS for what in ("underflows", "overflows")]
    columns = {key: key.replace("_", " ") for key in shares}
    columns |= {f"{gemm}_error_db": f"{result} error, dB" for gemm, result in PRODUCTS.items()}
    columns["updates_lost%"] = "updates lost%"
    columns |= {f"{moment}_underflows%": f"{moment} underflows%" for moment in ("exp_avg", "exp_avg_sq")}
    rows = []
    for name, layer in diagnosis["layers"].items():
        rows.append([name, *("-" if layer[key] is None else f"{layer[key]:.2f}" for key in columns)])
    return ["layer", *columns.values()], rows


def text(diagnosis: dict[str, Any]) -> str:
    lines = [*diagnosis["answer"], ""]
    for heads, rows in (cost_table(diagnosis), layer_table(diagnosis)):
        lines += [*cli.columns([heads, *rows]), ""]
    lines += notes(diagnosis)
    if diagnosis["skip_line"]:
        lines += ["", f"fp8_config:\n  {diagnosis['skip_line']}"]
    return "\n".join(lines)


def notes(diagnosis: dict[str, Any]) -> list[str]:
    """How to read the tables, one sentence or two for each thing."""
    return [
        "A pair: the same weights, optimizer state, random numbers and batches; the loss is the mean of the last half "
        f"of {diagnosis['after']} steps. A positive cost: the loss is lower with this layer in high precision.",
        "Significant: above 0 even though this many layers were asked about at once (Bonferroni).",
        "Underflows: values that are not 0 and become 0. Overflows: values clipped to the largest of the format.",
        "Error, dB: of a layer's output or gradient, against the same computed in high precision; -20 dB is 10% of it, "
        "-40 dB is 1%.",
    ]


def refuse_unfit(name: str, mapping: dict[str, Any]) -> None:
    """Raises Refused for a config in which no layer could be looked at."""
    settings = read_env(to_env(mapping))
    here = machine.without_accelerator() if config_file.asks_for_cpu(mapping) else machine.of_driver()
    if settings.precision != "fp8":
        raise Refused(f"{name} asks for no FP8: there is nothing to diagnose")
    if not settings.rules.replicates:
        whole = "ddp" if settings.num_processes > 1 else "single"
        raise Refused(
            f"diagnose needs whole weights on every process, {settings.strategy} splits them: use {whole} "
            "with the same backend"
        )
    if settings.compile:
        raise Refused(
            "diagnose looks inside layers, which a compiled block hides: use the config without dynamo_config"
        )
    if settings.backend != "msamp" and here.has_fp8:
        raise Refused(
            f"diagnose sees the scales of emulated FP8 and of MS-AMP's levels, not those inside the kernels "
            f"for {here.name}: run it on a CPU"
        )


def with_length(script: Path, options: list[str], args: argparse.Namespace) -> list[str]:
    """The script's options, with enough steps if it is a recipe; its learning rates follow the longer schedule."""
    if script.parent == ROOT / "recipes":
        given = find.with_file(script, options)
        taken = [name for name in LENGTH if option(given, name) is not None]
        if taken:
            raise Refused(
                f"--{taken[0]}: not here; diagnose trains {script.stem} for as long as it takes: --look, "
                "--pairs and --after say how many steps it looks at"
            )
        find.parse_options(script, options)
        enough = args.look + args.pairs * args.after * 400
        return [*options, "--max_steps", str(enough), "--eval_steps", "0", "--save_steps", "0"]
    told = option(options, "max_steps") or ""
    least = args.look + args.pairs * args.after * 4  # a pair: as the config says, again, without one layer, without all
    if told.isdigit() and int(told) < least:
        raise Refused(
            f"--max_steps {told}: diagnose takes {least} steps or more (--look {args.look}, --pairs "
            f"{args.pairs}, --after {args.after}): raise it, or look at fewer"
        )
    return options


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = cli.parser("diagnose", __doc__)
    parser.add_argument("config", help="name or path of a config")
    helps = ("steps to look at", "pairs to judge by", "steps of each pair")
    for (name, default), help in zip(OPTIONS.items(), helps, strict=True):
        parser.add_argument(f"--{name}", type=cli.count, default=default, help=f"{help} (default: {default})")
    parser.add_argument("--output", type=Path, help="folder (default: runs/diagnose-<config>-<time>)")
    parser.add_argument("--num_processes", "--num-processes", type=cli.count, help="as accelerate launch's")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    left, words = cli.split(argv)
    args = arguments(left)
    if args.pairs < 2:
        raise Refused(f"--pairs {args.pairs}: 2 or more")
    out = args.output or find.RUNS / f"diagnose-{Path(args.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if there := next((name for name in ("watched.json", "run") if os.path.lexists(out / name)), None):
        raise Refused(f"{out} holds {there}, of a diagnosis or somebody's: choose another --output")
    file, mapping = find.sound_config(args.config)
    if not words:
        raise Refused(f"which recipe? {find.COMMAND} diagnose single_fp8_te -- vit")
    script = find.recipe(words[0]).resolve()
    refuse_unfit(file.name, mapping)
    script_options = with_length(script, words[1:], args)
    cli.make_folder(out)
    command = [sys.executable, str(ROOT / "tools" / "accelerate_launch.py"), "--config_file", str(file)]
    if str(mapping.get("distributed_type")) != "NO":
        command += ["--main_process_port", "0"]
    command += ["--num_processes", str(args.num_processes)] if args.num_processes else []
    command += [str(ROOT / "tools" / "watch.py"), "--to", str(out)]
    command += [word for name in OPTIONS for word in (f"--{name}", str(getattr(args, name)))]
    code = subprocess.run([*command, str(script), *script_options], preexec_fn=cli.die_with_me).returncode
    shutil.rmtree(out / "run", ignore_errors=True)  # what the script wrote beside its record, of which there is none
    if not (out / "watched.json").exists():
        return code or 1
    watched = json.loads((out / "watched.json").read_text())
    diagnosis = diagnosis_of(watched, f"{find.COMMAND} diagnose {shlex.join(argv)}")
    cli.write(out / "diagnose.json", json.dumps(diagnosis, indent=1))
    print(text(diagnosis))
    print(f"{out}/diagnose.json")
    return 0


if __name__ == "__main__":
    cli.run(main)
