"""Writes the generated tables of the READMEs and docs/*.md, and README.md's picture, from the files in results/.

    python benchmarks/tables.py            write them
    python benchmarks/tables.py --check    exit code 1 where a page says something else

A table stands between `<!-- from results/...: python benchmarks/tables.py -->` and `<!-- end -->`.
"""

import json
import re
import statistics
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from benchmarks import amp8_tables, checkpoint_tables, recipe_tables, study_page  # noqa: E402
from benchmarks.provenance import came_from  # noqa: E402
from tools import drawings, page, paired, report  # noqa: E402

COMPARISONS = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("results/compare_*/report.json"))
PICTURE = "differences.svg"  # beside a comparison


def read(name):
    return json.loads((ROOT / name).read_text())


def comparison(file, figures):
    """The verdict on every config's loss, with its interval."""
    name, folder = figures["measure"], Path(file).parent
    others = [key for key in report.metric_names(figures) if key != name]
    apart = f"against {figures['baseline']}, {100 * figures['confidence']:.3g}% interval"
    heads = ["config", "Linear in FP8", name, apart, "verdict", "resolution", *others, "B/param"]
    rows = []
    for row in figures["rows"]:
        m, measure = row["measures"], row["measures"][name]
        rows.append([
            f"`{row['config']}`", f"{row['linear_converted']} of {row['linear_total']}", report.number(measure["mean"]),
            report.difference(measure), measure.get("verdict", "baseline"), paired.needs(measure, figures["margin"]),
            *(report.number(m[key]["mean"]) for key in others), f"{row['bytes_per_parameter']['total']:.1f}",
        ])  # fmt: skip
    seeds, apart = len(figures["rows"][0]["seeds"]), report.chance(figures, name)
    text = f"{came_from(figures)}; {seeds} seeds; from one seed to the next {name} of the baseline differs by {apart} "
    text += f"(standard deviation). All of it: [{folder}/report.html]({folder}/report.html), one file to open."
    picture = f"![{name}: mean paired difference of each config to the baseline, with its interval]({folder}/{PICTURE})"
    return f"{text}\n\n{picture}\n\n{report.table(heads, rows)}"


def overhead(figures):
    heads = ["model, precision, processes", "step by hand, ms", "recipe", "Lightning Fabric", "transformers' Trainer"]
    rows = []
    for row in figures["rows"]:
        cells = [f"{row['model']}, {row['precision']}, {row['processes']}", f"{1000 * row['step_seconds_by_hand']:.1f}"]
        for way in ("recipe", "fabric", "trainer"):
            cells.append(ratios(row[way]))
        rows.append(cells)
    text = (
        f"{came_from(figures)}; step time over that of the loop by hand: median of the turns (quartiles), the same of "
    )
    text += "CPU time, and of each turn's fastest step, which other work on the machine disturbs least:"
    text += "\n\n" + report.table(heads, rows)
    if figures.get("start"):
        text += "\n\nFrom the command to the end of the first step:\n\n"
        starts = [
            [row["way"], str(row["processes"]), f"{row['seconds']:.1f}", f"{row['of_hand']:.2f}"]
            for row in figures["start"]
        ]
        text += report.table(["started by", "processes", "seconds", "over by hand"], starts)
    return text


def ratios(found):
    (low, high), cpu, fastest = found["wall"]["quartiles"], found["cpu"]["median"], found["fastest"]["median"]
    return f"{found['wall']['median']:.2f} ({low:.2f} to {high:.2f}), CPU {cpu:.2f}, fastest {fastest:.2f}"


def launches(figures):
    cases, wider, rows, ratios_of_o2 = figures["cases"], figures["wider"], [], []
    for case, counts in cases.items():
        recipe, config = case.split()
        count, calls = counts["launches"], counts["compiled_calls"]
        of_calls = f"{calls} in {counts['compiled_kernels']}, {counts['compiled_kernels_wider']}" if calls else ""
        by_hand = f"{counts['by_hand']}, {counts['ratio']:.2f}x" if "by_hand" in counts else ""
        rows.append([f"`{config}`, `{recipe}`", str(count), of_calls, by_hand, str(counts["waits"])])
        if config == "single_fp8_msamp_o2":
            base = cases[f"{recipe} single_bf16"]["launches"]
            alone, as_calls, small, wide = (
                f"{(count + more) / base:.2f}x"
                for more in (0, calls, counts["compiled_kernels"], counts["compiled_kernels_wider"])
            )
            ratios_of_o2.append(
                f"`{recipe}` under `{config}` launches {alone} the kernels of `single_bf16` beside its compiled calls, "
                f"{as_calls} if each call counts as one, {small} with the kernels of the calls, and {wide} with those "
                f"of a model {wider} times as wide"
            )
    heads = ["config, recipe", "kernels launched", "compiled calls, in how many kernels", "by hand, ratio",
             "waits for the device"]  # fmt: skip
    (least, most), cast = figures["kernels_of_a_call"]["amp8.linear.cast"], figures["bytes_of_a_cast"]
    text = (
        f"Compiled calls: their number, and how many kernels Inductor plans for them, at these sizes and {wider} times "
        "as wide, where it splits a reduction into two kernels. " + "; ".join(ratios_of_o2) + ". Inductor planned "
        "without a GPU, for an H100's properties, and each size was fixed: on a GPU it may fuse differently.\n\n"
        f"The cast of a bf16 activation to FP8 by `amp8`, in {least} to {most} kernels, reads and writes "
        f"{cast['fused']:.0f} bytes per element where it is compiled, as on a GPU, and "
        f"{cast['operator_by_operator']:.0f} operator by operator: the tensor is read once for its largest value and "
        "once for the cast, whose scale depends on that value."
    )
    return f"{came_from(figures)}:\n\n{report.table(heads, rows)}\n\n{text}"


def estimates(figures):
    heads = ["config", "model, data, batch", "states: estimated, counted", "off", "in all: estimated, peak", "off",
             "peak as glibc leaves it"]  # fmt: skip
    keys = ("states_estimated", "states_measured", "total_estimated", "peak_measured", "peak_by_default")
    rows = []
    for row in figures["rows"]:
        what = f"{row['model']}, {row['dataset']}, {row['per_device_train_batch_size']}"
        states, counted, total, peak, by_default = (f"{row[key] / 2**20:,.0f}" for key in keys)
        later = "*" if "device" in row else ""
        rows.append([f"`{row['config']}`{later}", what, f"{states}, {counted}", f"{row['states_off']:+.1%}",
                     f"{total}, {peak}", f"{row['total_off']:+.1%}", by_default])  # fmt: skip
    within = sum(row["within"] for row in figures["rows"])
    text = f"{came_from(figures)}; MiB per process, {within} of {len(rows)} within 10% for states and 25% in all"
    later = [row for row in figures["rows"] if "device" in row]  # measured by --configs
    command = " ".join([figures["command"], "--configs", *dict.fromkeys(row["config"] for row in later)])
    text += f". *: {came_from(later[0] | {'command': command})}" if later else ""
    return f"{text}:\n\n{report.table(heads, rows)}"


def emulation(figures):
    rows = [
        [f"`{row['kind']}`" + (", its own CPU path" if ":" in row["kind"] else ""), f"{row['median_ratio']:.2f}x"]
        for row in figures["rows"]
        if row["kind"] != "bf16"
    ]
    return f"{came_from(figures)}:\n\n{report.table(['recipe', 'step, relative to bf16'], rows)}"


def fp8_digits(figures):
    rows = [
        [f"`{row['config']}`", f"{row['mean']:.4f}", f"{row['spread']:.4f}", f"{row['accuracy']:.4f}",
         str(row["linear_converted"]), f"{row['bytes_per_parameter']:.1f}"]
        for row in figures["rows"]
    ]  # fmt: skip
    heads = ["config", "loss, mean", "max - min", "accuracy", "Linear in FP8", "B/param"]
    return f"{came_from(figures)}:\n\n{report.table(heads, rows)}"


def fsdp_levels(figures):
    rows = []
    for task, found in figures["parity"].items():
        for other, apart in found["against"].items():
            percent = 100 / (apart["difference"] / apart["of_loss"]) if apart["of_loss"] else 0
            middle, half = apart["difference"] * percent, apart["half_interval"] * percent
            rows.append([task, f"`{other}`", f"{middle:+.2f}% ({middle - half:+.2f} to {middle + half:+.2f})"])
    heads = ["recipe", "held-out loss of `fsdp_fp8_msamp_o2` against", "mean paired difference, 95% interval"]
    text = f"{came_from(figures)}; two processes, {len(figures['seeds'])} seeds:\n\n{report.table(heads, rows)}\n\n"
    text += "`vit_large` on two processes, four steps; a CPU's peak includes the activations:\n\n"
    heads = ["config", "B/param in each process", "sent per step and process, MB", "peak of a process, GiB"]
    rows = [
        [f"`{row['config']}`", f"{row['bytes_per_parameter_in_each_process']:.2f}",
         f"{row['wire_bytes_per_step'] / 1e6:,.0f}", f"{row['peak'] / 2**30:.2f}"]
        for row in figures["vit_large"]
    ]  # fmt: skip
    return text + report.table(heads, rows)


def clients(figures):
    """One line per script, one column per config."""
    rows, configs = {}, list(dict.fromkeys(row["config"] for row in figures["rows"]))
    for row in figures["rows"]:
        cell = row["outcome"]
        if cell == "ran":
            cell = f"{row['processes']}{' sharded' * row['sharded']}, {row['linear_converted']}/{row['linear_total']}, "
            cell += f"{row['bytes_per_parameter']:.1f}"
        rows.setdefault(row["client"], {})[row["config"]] = cell
    table = [[f"`{client}`", *(cells.get(config, "-") for config in configs)] for client, cells in rows.items()]
    refused = [f"- `{row['client']}`, `{row['config']}`: {row['why']}" for row in figures["rows"] if "why" in row]
    text = f"{came_from(figures)}. A cell: processes, Linear layers in FP8, bytes per parameter:\n\n"
    text += report.table(["script", *(f"`{config}`" for config in configs)], table)
    return text + ("\n\n" + "\n".join(refused) if refused else "")


def other_configs(figures):
    """What became of config files of others, and the losses of those that were launched."""
    rows = []
    for name, scripts in figures["launches"].items():
        for script, run in scripts.items():
            says = run.get("failed", "equal" if run.get("equal") else "not equal")
            far = f"{run['apart']:.1g}" if run.get("apart") else "0" if "apart" in run else "-"
            rows.append([name, script, f"`{run['ours']}`" if "ours" in run else "-", says, far])
    heads = ["file", "script", "our config", "first loss", "both losses apart"]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(figures["verdicts"].items()))
    refused = [f"- `{name}`: {row['problems'][0]}" for name, row in figures["table"].items() if row["problems"]]
    text = f"{came_from(figures)}. {figures['files']} files: {counts}. {figures['launched']} of them launched:\n\n"
    return text + report.table(heads, rows) + "\n\nRefused:\n\n" + "\n".join(refused)


def peers(figures):
    """How many of Accelerate's tests pass, and why others do not."""
    heads = ["what", "pass, of those that pass with Accelerate's class"]
    rows = [["tests", figures["passed"]["tests"]], ["checks of its test scripts", figures["passed"]["checks"]]]
    text = f"{came_from(figures)}:\n\n{report.table(heads, rows)}\n\nThe others:\n\n"
    return text + "\n".join(f"- `{row['test']}`: {row['reason'] or row['why']}" for row in figures["differences"])


def rehearsal(figures):
    """The step time of each config over that of fp32, a column for each model, kind of CPU and code."""
    cells = {}
    for row in figures["rows"]:
        low, high = row["wall"]["quartiles"]
        column = f"{row['model']}, {row['instructions']}" + (", before" if row["code"] == "before" else "")
        cells.setdefault(column, {})[row["config"]] = f"{row['wall']['median']:.2f} ({low:.2f} to {high:.2f})"
    configs = dict.fromkeys(row["config"] for row in figures["rows"])
    rows = [[f"`{config}`", *(cells[column].get(config, "-") for column in sorted(cells))] for config in configs]
    text = f"{came_from(figures)}; ratios as above:\n\n" + report.table(["config", *sorted(cells)], rows)
    if figures.get("start"):
        heads, rows = ["model", "config", "seconds to the first step, median", "before"], []
        for row in figures["start"]:
            times = [f"{statistics.median(row[code]):.1f}" for code in ("now", "before")]
            rows.append([row["model"], f"`{row['config']}`", *times])
        text += f"\n\nFrom the command to the end of the first optimizer step:\n\n{report.table(heads, rows)}"
    if figures.get("losses"):
        heads, rows = ["model", "seeds", "products in fp32", "first weights off by their last bit"], []
        for model in dict.fromkeys(row["model"] for row in figures["losses"]):
            of_model = [row for row in figures["losses"] if row["model"] == model]
            apart = [statistics.mean(row[way] for row in of_model) for way in ("through_fp32", "perturbed")]
            rows.append([model, str(len(of_model)), *(f"{distance:.4f}" for distance in apart)])
        text += "\n\nLosses of 50 steps in bf16, as it is: the root mean square of the difference to a run with the "
        text += f"CPU's own bf16 kernels, mean over pairs of one seed:\n\n{report.table(heads, rows)}"
    return text


def wrapper(figures):
    rows = []
    for row in figures["rows"]:
        cells = [row["size"], f"{1000 * row['step_seconds_plain']:.1f}", ratios(row["faithful"]), ratios(row["same"])]
        rows.append(cells)
    heads = ["model", "step under Accelerate, ms", "`-m faithful` over Accelerate", "Accelerate over itself"]
    return f"{came_from(figures)}; ratios as above:\n\n" + report.table(heads, rows)


def diagnose(figures):
    """What was found first in each recipe, and whether the planted faults were found and fixed."""
    heads = ["planted", "config", "named first", "loss with the proposed `skip`, paired"]
    rows = []
    for fault, diagnosis in figures["faults"].items():
        gain = diagnosis["paired_gain_percent"]
        share = f"{-gain['mean']:+.1f}% ({-gain['high']:+.1f} to {-gain['low']:+.1f})"
        planted = f"{fault}: layer `{diagnosis['planted']}`"
        rows.append([planted, f"`{diagnosis['config']}`", f"`{diagnosis['named_first']}`", share])
    text = f"{came_from(figures)}:\n\n{report.table(heads, rows)}\n\nThe shipped recipes:\n\n"
    rows = [[row["recipe"], f"`{row['config']}`", row["answer"][0]] for row in figures["recipes"]]
    return text + report.table(["recipe", "config", "found first"], rows)


def demo(figures):
    rows = [[f"`{row['command']}`", str(row["steps"]), f"{row['accuracy']:.4f}", f"{row['seconds']:.1f}"]
            for row in figures["rows"]]  # fmt: skip
    heads = ["command", "steps", "held-out accuracy", "seconds, from command to end"]
    return f"{came_from(figures)}:\n\n{report.table(heads, rows)}"


def photos(figures):
    rows = [
        [f"`{row['recipe']}`", str(row["steps"]), f"{row['accuracy']:.4f}", f"{row['balanced_accuracy']:.4f}",
         f"{row['seconds']:.0f}"]
        for row in figures["rows"]
    ]  # fmt: skip
    heads = ["recipe", "steps", "accuracy", "mean of the classes' accuracies", "seconds"]
    return f"`photos`, held-out patches: {came_from(figures)}:\n\n{report.table(heads, rows)}"


def gpt(figures):
    order, loss = max(figures["ngram_loss"].items(), key=lambda item: int(item[0]))
    return (f"`gpt`, {figures['gpt']['args']['max_steps']} steps on `{figures['dataset']}`: held-out loss "
            f"{figures['gpt']['loss']:.4f} nats per byte; a {order}-gram with back-off on the same split {loss:.4f}. "
            + came_from(figures))  # fmt: skip


def finetune(figures):
    rows = [[row["start"], f"{row['mean']:.4f}", f"{row['spread']:.4f}"] for row in figures["rows"]]
    picture = "![Held-out accuracy over the steps, each start, three seeds](results/finetune_textures.svg)"
    text = f"Fine-tuning: `textures` from a `vit_nano` trained on `photos`, {figures['steps']} steps, three seeds: "
    text += f"{came_from(figures)}:\n\n{report.table(['start', 'accuracy, mean', 'max - min'], rows)}"
    return f"{text}\n\n{picture}"


def onnx_latency(figures):
    rows = [
        [f"`{row['model']}`", row["engine"], row["dtype"], f"{row['bytes'] / 1e6:.2f}", f"{row['apart']:.0e}",
         f"{row['milliseconds_batch_1']:.2f}", f"{row['milliseconds_batch_32']:.1f}"]
        for row in figures["rows"]
    ]  # fmt: skip
    heads = ["model", "engine", "dtype", "MB", "logits apart from torch's fp32", "ms, batch 1", "ms, batch 32"]
    text = f"Fastest of 50 calls: {came_from(figures)}:"
    return f"{text}\n\n{report.table(heads, rows)}"


TECHNIQUES = (  # what it was called, and the config that it is here
    ("fp32, apex O0", "single_fp32"),
    ("AMP in fp16, apex O1", "single_fp16"),
    ("AMP in bf16", "single_bf16"),
    ("apex O2, naive AMP: fp16 weights, fp32 masters (GPU only)", "zero1_fp16"),
    ("half precision throughout, apex O3; in fp16 it ends in nan, and the run stops", "single_fp32 --dtype bfloat16"),
    ("nn.DataParallel, DDP by spawn, launch or torchrun", "ddp_bf16"),
    ("DDP with ZeroRedundancyOptimizer, ZeRO-1", "zero1_bf16"),
    ("ZeRO-2", "zero2_bf16"),
    ("ZeRO-2 without DeepSpeed", "fsdp_bf16_noreshard"),
    ("ZeRO-3", "zero3_bf16"),
    ("ZeRO-3, offloaded", "zero3_bf16_offload"),
    ("FSDP (version 1), fairscale", "fsdp_bf16"),
    ("FSDP with CPU offload", "fsdp_bf16_offload"),
    ("FSDP, HYBRID_SHARD", "hsdp_bf16"),
    ("ZeRO with FP8", "zero2_fp8"),
    ("the same", "zero3_fp8"),
    ("the same", "zero2_fp8_te"),
    ("the same", "zero3_fp8_te"),
)


def strategies(figures):
    heads = ["technique", "config", "processes", "bytes per parameter, all processes", "optimizer state per process",
             "MiB sent per step and process", "held-out loss"]  # fmt: skip
    rows = []
    for technique, config in TECHNIQUES:
        row = figures["runs"].get(config)
        cells = ["-"] * 5  # on this machine it could not run
        if row:
            share, loss = row["share_per_process"] or {"optimizer": 1}, row["final"]["metrics"]["eval_loss"]
            cells = [str(row["processes"]), f"{row['bytes_per_parameter']['total']:.1f}", f"{share['optimizer']:.2f}",
                     f"{row['wire_bytes_per_step'] / 2**20:.2f}", f"{loss:.3f}"]  # fmt: skip
        rows.append([technique, f"`{config}`", *cells])
    return f"{came_from(figures)}:\n\n{report.table(heads, rows)}"


TABLES = {
    **{file: partial(comparison, file) for file in COMPARISONS},
    "results/overhead.json": overhead,
    "results/launches.json": launches,
    "results/estimate.json": estimates,
    "results/strategies.json": strategies,
    "results/demo.json": demo,
    "results/kills.json": checkpoint_tables.kills,
    "results/kills_before.json": checkpoint_tables.kills,
    "results/kills_saving.json": checkpoint_tables.kills,
    "results/kills_async.json": checkpoint_tables.kills,
    "results/photos.json": photos,
    "results/gpt_python_docs.json": gpt,
    "results/finetune_textures.json": finetune,
    "results/onnx_latency.json": onnx_latency,
    "results/emulation.json": emulation,
    "results/fp8_digits.json": fp8_digits,
    "results/amp8_memory.json": amp8_tables.memory,
    "results/amp8_parity.json": amp8_tables.parity,
    "results/amp8_comm.json": amp8_tables.comm,
    "results/amp8_optimizers.json": amp8_tables.optimizers,
    "results/amp8_fsdp.json": amp8_tables.fsdp,
    "results/amp8_drift.json": amp8_tables.drift,
    "results/amp8_finetune.json": amp8_tables.finetune,
    "results/amp8_accumulation.json": amp8_tables.accumulation,
    "results/fsdp_levels.json": fsdp_levels,
    "results/clients.json": clients,
    "results/other_configs.json": other_configs,
    "results/peer_tests.json": peers,
    "results/rehearsal.json": rehearsal,
    "results/diagnose.json": diagnose,
    "results/wrapper.json": wrapper,
    "results/saving.json": checkpoint_tables.saving,
    "results/phases.json": checkpoint_tables.phases,
    "results/large.json": checkpoint_tables.large,
    "results/loading.json": checkpoint_tables.loading,
    "results/gallery.json": recipe_tables.gallery,
    "results/matrix.json": recipe_tables.matrix,
    "results/study/summary.json": study_page.in_docs,
    "results/study/tensors.json": study_page.tensors,
}
PAGES = ("README.md", "amp8/README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))


def picture(figures):
    """The paired differences of a comparison as an SVG file that follows the reader's light or dark mode."""
    rows = drawings.interval_rows(figures, figures["measure"])
    return page.standalone(page.intervals(rows, 100 * figures["margin"]), f"Difference in {figures['measure']}")


def written(page, text=None):
    """A page's text with all tables made from their files, and links into results/ relative to the page."""
    up = "../" * page.count("/")

    def fill(match):
        name = match.group(1)
        table = TABLES[name](read(name)).replace("](results/", f"]({up}results/")
        return f"{match.group(0).splitlines()[0]}\n{table}\n<!-- end -->"

    text = (ROOT / page).read_text() if text is None else text
    return re.sub(r"<!-- from (\S+): python benchmarks/tables\.py -->\n.*?<!-- end -->", fill, text, flags=re.S)


def main():
    texts = {ROOT / page: written(page) for page in PAGES}
    texts |= {(ROOT / name).with_name(PICTURE): picture(read(name)) for name in COMPARISONS}
    if "--check" in sys.argv:
        stale = [path.name for path, text in texts.items() if not path.exists() or path.read_text() != text]
        sys.exit(f"not as results/ says: {', '.join(stale)}: run python benchmarks/tables.py" if stale else 0)
    for path, text in texts.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
