"""Where does FP8 hurt this training, and what does it cost the loss?

    ./launch.sh diagnose single_fp8_te -- vit --dataset textures
    ./launch.sh diagnose my.yml --num_processes 2 -- my_script.py its options
    ./launch.sh diagnose runs/vit-single_fp8_te-...          a run's config, recipe and options

The tool runs real training steps under that config on this machine (tools/watch.py runs the script, unchanged). First
it compares each FP8 layer with the same layer in high precision: underflows and overflows of input, weight and output
gradient, the error of the three products, and at MS-AMP's levels the weight updates that were lost to rounding. Then it
repeats the same steps from the same state, each time with one layer in high precision (or one block, if there are many
layers). The change of the loss is what FP8 costs in that layer: a mean over pairs with its 95% t interval. The last
line of the output goes into the config: it skips the layers whose cost is significant.

It writes diagnose.json and diagnose.html into the folder that it prints.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from faithful import Refused, config, files, launcher, machine  # noqa: E402
from tools import cli, find  # noqa: E402
from tools.find import option  # noqa: E402

OPTIONS = {"look": 20, "pairs": 8, "after": 8}
LENGTH = ("max_steps", "eval_steps", "save_steps")  # options of a recipe that say how long it trains
TENSORS = {"input": "input", "weight": "weight", "gradient": "output gradient"}


def interval(values, level=0.95):
    """The mean and its confidence interval by Student's t: (mean, low, high)."""
    from scipy import stats

    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = float(stats.t.ppf(0.5 + level / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def costs(watched):
    """The cost of each layer in percent of the loss, [{name, mean, low, high, sure}], largest lower bound first; then
    the cost of all FP8 layers together. `sure`: above 0 with a Bonferroni correction for the number of layers."""
    pairs, rows = watched["pairs"], []
    level = 1 - 0.05 / max(1, len(watched["groups"]))
    for name in [*watched["groups"], "all"]:
        values = [100 * (pair["none"] - pair[name]) / abs(pair["none"]) for pair in pairs]
        mean, low, high = interval(values)
        sure = interval(values, level)[1] > 0
        rows.append({"name": name, "mean": mean, "low": low, "high": high, "sure": sure, "pairs": values})
    *rows, everything = rows
    return sorted(rows, key=lambda row: row["low"], reverse=True), everything


def symptoms(layer):
    """The measurements of a layer that are 1% or more, the worst first."""
    found = []
    for key, words in TENSORS.items():
        found += [(layer[f"{key}_{what}%"], f"{words} {what} {{:.3g}}%") for what in ("underflows", "overflows")]
    found.append((layer["updates_lost%"] or 0, "weight updates lost {:.3g}%"))
    found += [(layer[f"{key}_underflows%"] or 0, f"{key} underflows {{:.3g}}%") for key in ("exp_avg", "exp_avg_sq")]
    return [words.format(share) for share, words in sorted(found, reverse=True) if share >= 1]


def skip_line(watched, rows):
    """The line for fp8_config, or None if no layer has a significant cost."""
    worst = [row["name"] for row in rows if row["sure"]]
    return f'skip: "{", ".join([*watched["skip"], *worst])}"' if worst else None


def sentence(row, everything, watched):
    first = watched["groups"][row["name"]][0]
    seen = symptoms(watched["layers"][first])
    words = f"{row['name']} costs {row['mean']:.2g}% of the loss ({row['low']:+.2g}% to {row['high']:+.2g}%)"
    words += (
        f", all FP8 layers together {everything['mean']:.2g}% ({everything['low']:+.2g}% to {everything['high']:+.2g}%)"
    )
    return words + (f": {', '.join(seen[:2])}" if seen else "")


def found(watched, command):
    """The result, for diagnose.json."""
    rows, everything = costs(watched)
    sure = [row for row in rows if row["sure"]]
    answer = [sentence(row, everything, watched) for row in sure]
    if not sure:
        least = statistics.median((row["high"] - row["low"]) / 2 for row in rows)
        answer = [f"no layer's cost can be told from 0 by {len(watched['pairs'])} pairs, which show about {least:.2g}% "
                  f"of the loss; all FP8 layers together: {everything['mean']:+.2g}% "
                  f"({everything['low']:+.2g}% to {everything['high']:+.2g}%)"]  # fmt: skip
    apart = max(abs(100 * (pair["none"] - pair["again"]) / pair["none"]) for pair in watched["pairs"])
    if apart:
        answer.append(f"the same steps taken again differ by up to {apart:.2g}%: no smaller cost is one")
    return {"command": command, "answer": answer, "again": apart, "skip_line": skip_line(watched, rows), "costs": rows,
            "all": everything, **watched}  # fmt: skip


def cell(value, form="{:.2f}"):
    return "-" if value is None else form.format(value)


def cost_table(made):
    heads = ["layer", "costs % of the loss", "95% interval", "beyond doubt", "worst seen"]
    rows = []
    for row in [*made["costs"], made["all"] | {"name": "all of them"}]:
        first = made["groups"].get(row["name"], [None])[0]
        seen = symptoms(made["layers"][first])[:2] if first else []
        rows.append([row["name"], f"{row['mean']:+.3f}", f"{row['low']:+.3f} to {row['high']:+.3f}",
                     "yes" if row["sure"] else "no", ", ".join(seen)])  # fmt: skip
    return heads, rows


def layer_table(made):
    heads = ["layer"] + [f"{key} {what}%" for key in TENSORS for what in ("underflows", "overflows")]
    heads += ["fprop dB", "dgrad dB", "wgrad dB", "updates lost %", "exp_avg underflows%", "exp_avg_sq underflows%"]
    keys = [f"{key}_{what}%" for key in TENSORS for what in ("underflows", "overflows")]
    keys += [f"{gemm}_error_db" for gemm in ("fprop", "dgrad", "wgrad")]
    keys += ["updates_lost%", "exp_avg_underflows%", "exp_avg_sq_underflows%"]
    return heads, [[name, *(cell(layer[key]) for key in keys)] for name, layer in made["layers"].items()]


def text(made):
    lines = [*made["answer"], ""]
    for heads, rows in (cost_table(made), layer_table(made)):
        lines += [*cli.columns([heads, *rows]), ""]
    if made["skip_line"]:
        lines.append(f"fp8_config:\n  {made['skip_line']}")
    return "\n".join(lines)


def page_of(made):
    from tools import page

    rows = [(row["name"], row["mean"], row["low"], row["high"], page.colour(0 if row["sure"] else 7))
            for row in made["costs"]]  # fmt: skip
    all_ = made["all"]
    rows.append(("all of them", all_["mean"], all_["low"], all_["high"], page.colour(1)))
    said = f"What each layer alone costs the loss, over {len(made['pairs'])} pairs, with its 95% interval."
    parts = [page.section("What it costs", page.picture(page.intervals(rows, None, "cost, % of the loss"), said),
                          page.table(*cost_table(made))),
             page.section("Layer by layer", page.table(*layer_table(made)))]  # fmt: skip
    lag = [(name, key) for row in made["costs"][:3] for name in made["groups"][row["name"]][:1] for key in TENSORS
           if len(set(made["layers"][name].get(f"{key}_reach", [0]))) > 1]  # fmt: skip
    for name, key in lag:
        layer = made["layers"][name]
        series = []
        for i, (label, what) in enumerate((("amax", "amax"), ("the largest value its scale holds", "reach"))):
            values = layer[f"{key}_{what}"]
            series.append(
                (label, page.colour(i), [[step, value, value, value] for step, value in enumerate(values, 1)])
            )
        parts.append(page.section(f"{name}, {TENSORS[key]}: amax over the steps",
                                  page.picture(page.lines(series), "Above what the scale holds, values are clipped.",
                                               page.legend([(label, at) for label, at, _ in series]))))  # fmt: skip
    answer = [("", line) for line in made["answer"]]
    if made["skip_line"]:
        answer.append(("for fp8_config:", made["skip_line"]))
    notes = [
        "A pair: the same weights, optimizer state, random numbers and batches; the loss is the mean of the last half "
        f"of {made['after']} steps. A positive cost says that the loss is lower with this layer in high precision.",
        "Underflows: values that are not 0 and become 0. Overflows: values clipped to the format's largest. dB: the "
        "error of a product against its high-precision shadow, -20 dB is 10% of it.",
        "Beyond doubt: above 0 also when one asks this many layers at once (Bonferroni).",
    ]
    return page.whole(f"Where FP8 hurts: {made['truth']}", made["command"], answer, parts, notes)


def of_run(folder):
    """The config's name and text, the recipe and its options, of a run's folder."""
    try:
        record = json.loads((folder / "run.json").read_text())
        line, config = shlex.split(record["command"]), record["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"{folder} has no readable run.json ({type(error).__name__})") from None
    scripts = [i for i, word in enumerate(line) if word.endswith(".py") and "accelerate" not in Path(word).name]
    if not config["name"] or not scripts:
        raise Refused(f"{folder} was not launched with a config file: name config and recipe")
    taken = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("output_dir", *LENGTH):  # diagnose sets them itself
        taken.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    _, words = taken.parse_known_args(line[scripts[0] + 1 :])
    return config["name"], config["text"], [line[scripts[0]], *words]


def ends_with_this():
    """Called in the child before it becomes the launcher: it ends when this process is killed."""
    launcher.end_with_the_parent(signal.SIGTERM)


def refuse_unfit(name, mapping):
    """Raises Refused for a config in which no layer could be looked at."""
    asked = config.asked(config.exported(mapping))
    here = machine.without_accelerator() if files.asks_for_cpu(mapping) else machine.of_driver()
    if asked["precision"] != "fp8":
        raise Refused(f"{name} asks for no FP8: there is nothing to diagnose")
    if asked["strategy"] not in ("single", "ddp"):
        whole = "ddp" if asked["num_processes"] > 1 else "single"
        raise Refused(f"diagnose needs whole weights on every process, {asked['strategy']} splits them: use {whole} "
                      "with the same backend")  # fmt: skip
    if asked["compile"]:
        raise Refused(
            "diagnose looks inside layers, which a compiled block hides: use the config without dynamo_config"
        )
    if asked["backend"] != "msamp" and (here["capability"] or (0, 0)) >= (8, 9):
        raise Refused(f"diagnose sees the scales of emulated FP8 and of MS-AMP's levels, not those inside the kernels "
                      f"for {here['name']}: run it on a CPU")  # fmt: skip


def with_length(script, options, args):
    """The script's options, with enough steps if it is a recipe; its learning rates follow the longer schedule."""
    if script.parent == ROOT / "recipes":
        taken = [name for name in LENGTH if option(options, name) is not None]
        if taken:
            raise Refused(f"--{taken[0]}: not here; diagnose trains {script.stem} for as long as it takes: --look, "
                          "--pairs and --after say how many steps it looks at")  # fmt: skip
        find.parsed(script, options)
        enough = args.look + args.pairs * args.after * 400
        return [*options, "--max_steps", str(enough), "--eval_steps", "0", "--save_steps", "0"]
    own = option(options, "max_steps") or ""
    least = args.look + args.pairs * args.after * 4  # a pair: as the config says, again, without one layer, without all
    if own.isdigit() and int(own) < least:
        raise Refused(f"--max_steps {own}: diagnose takes {least} steps or more (--look {args.look}, --pairs "
                      f"{args.pairs}, --after {args.after}): raise it, or look at fewer")  # fmt: skip
    return options


def arguments(argv):
    parser = cli.parser("diagnose", __doc__)
    parser.add_argument("config", help="name or path of a config, or the folder of a run")
    helps = ("steps to look at", "pairs to judge by", "steps of each pair")
    for (name, default), help in zip(OPTIONS.items(), helps, strict=True):
        parser.add_argument(f"--{name}", type=cli.count, default=default, help=f"{help} (default: {default})")
    parser.add_argument("--output", type=Path, help="folder (default: runs/diagnose-<config>-<time>)")
    parser.add_argument("--num_processes", "--num-processes", type=cli.count, help="as accelerate launch's")
    return parser.parse_args(argv)


def main(argv):
    left, words = cli.split(argv)
    args = arguments(left)
    if args.pairs < 2:
        raise Refused(f"--pairs {args.pairs}: 2 or more")
    out = args.output or ROOT / "runs" / f"diagnose-{Path(args.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if (out / "watched.json").exists():
        raise Refused(f"{out} holds a diagnosis already: choose another --output")
    if (Path(args.config) / "run.json").is_file() and not words:
        name, stored, words = of_run(Path(args.config))
        cli.make_folder(out)
        args.config = f"{out / name}.yml"
        Path(args.config).write_text(stored)
    file, mapping = find.sound_config(args.config)
    if not words:
        raise Refused("which recipe? ./launch.sh diagnose single_fp8_te -- vit")
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
    env = os.environ | {"TQDM_DISABLE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    code = subprocess.run([*command, str(script), *script_options], env=env, preexec_fn=ends_with_this).returncode
    if not (out / "watched.json").exists():
        return code or 1
    shutil.rmtree(out / "run", ignore_errors=True)  # the record of repeated steps describes no real run
    made = found(json.loads((out / "watched.json").read_text()), f"./launch.sh diagnose {shlex.join(argv)}")
    (out / "diagnose.json").write_text(json.dumps(made, indent=1))
    (out / "diagnose.html").write_text(page_of(made))
    print(text(made))
    print(f"{out}/diagnose.html")
    return 0


if __name__ == "__main__":
    cli.run(main)
