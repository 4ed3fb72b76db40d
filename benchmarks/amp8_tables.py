"""The tables of amp8/README.md, which benchmarks/tables.py writes."""

import statistics

from benchmarks.provenance import came_from
from tools import paired, report


def memory(figures):
    rows = [[row["level"], f"{row['peak'] / 1e9:.2f}", f"{row['ratio']:.2f}x", f"{row['bytes_per_parameter']:.1f}"]
            for row in figures["rows"]]  # fmt: skip
    heads = ["level", "peak, GB", "of bf16 AMP with fp32 masters", "B/param"]
    return f"{came_from(figures)}:\n\n{report.table(heads, rows)}"


def parity(figures):
    vit, gpt = (figures["tasks"][task]["levels"] for task in ("digits_vit", "byte_gpt"))
    rows = [
        [level, f"{vit[level]['mean']:.4f}", f"{row['mean']:.4f}", f"{row['difference_percent']:+.2f}%"]
        for level, row in gpt.items()
    ]
    spread = (f"bf16's own seeds are spread by {vit['bf16']['spread_percent']:.0f}% on the ViT and "
              f"{gpt['bf16']['spread_percent']:.2f}% on the GPT.")  # fmt: skip
    heads = ["level", "digits ViT", "byte-level GPT", "GPT against bf16"]
    return f"{came_from(figures)}:\n\n{report.table(heads, rows)}\n\n{spread}"


def comm(figures):
    names = {"amp8": "amp8", "msamp": "MS-AMP's FP8 sum, 1/sqrt(N)", "floor": "rounding once", "bf16": "bf16 sum"}
    errors, wire = figures["simulated_8"], figures["wire_4"]
    rows = [[name, *(f"{errors[key][at]:.1%}" for at in ("0.0", "0.9", "1.0"))] for key, name in names.items()]
    rest = (f"On 4 gloo processes {figures['processes_4']['0.9']:.1%} at 0.9. Bytes sent per step: "
            f"{wire['of_bf16_hook']:.2f}x of a bf16 hook, {wire['of_fp32_ddp']:.2f}x of fp32 DDP.")  # fmt: skip
    return f"{came_from(figures)}:\n\n{report.table(['scheme', '0', '0.9', '1'], rows)}\n\n{rest}"


def drift(figures):
    marks = list(figures["rows"][0]["moved"][0])
    rows = [[f"{row['betas'][0]}, {row['betas'][1]}", row["way"],
             *(f"{statistics.mean(one[mark] for one in row['moved']):,.1f}" for mark in marks)]
            for row in figures["rows"]]  # fmt: skip
    heads = ["betas", "way", *(f"step {int(mark):,}" for mark in marks)]
    text = f"{came_from(figures)}:\n\n{report.table(heads, rows)}"
    if figures["words"]:
        rows = [[row["way"], f"{statistics.mean(row['losses']):.4f}", f"{max(row['losses']) - min(row['losses']):.4f}",
                 f"{statistics.mean(row['rare_words_moved']):.1f}"] for row in figures["words"]]  # fmt: skip
        heads = ["way", "held-out loss, mean", "max - min", "rare words moved", "loss over fp32's, paired"]
        fp32 = figures["words"][0]["losses"]
        for row, way in zip(rows, figures["words"], strict=True):
            shares = [100 * (loss / own - 1) for loss, own in zip(way["losses"], fp32, strict=True)]
            mean, low, high = paired.interval(shares)
            row.append("" if way["way"] == "fp32" else f"{mean:+.2f}% ({low:+.2f} to {high:+.2f})")
        text += (f"\n\nA word-level language model after {figures['word_steps']} steps at betas (0.9, 0.95), "
                 f"{len(figures['words'][0]['losses'])} seeds:\n\n{report.table(heads, rows)}")  # fmt: skip
    times = figures["seconds_per_step_of_2_million"]
    return text + "\n\nAn optimizer step of 2 million parameters on this CPU: " + ", ".join(
        f"{way} {1000 * seconds:.0f} ms" for way, seconds in times.items()) + "."  # fmt: skip


def finetune(figures):
    rows = [[f"{row['steps']:,}", f"{row['lr']:g}", row["way"], f"{statistics.mean(row['gains']):.4f}",
             f"{statistics.mean(row['shares_of_fp32']):.1%}", f"{min(row['shares_of_fp32']):.1%}"]
            for row in figures["rows"]]  # fmt: skip
    heads = ["steps", "learning rate", "way", "gain in held-out loss", "of fp32's, mean", "smallest of the seeds"]
    return f"{came_from(figures)}:\n\n{report.table(heads, rows)}"


def accumulation(figures):
    def worst(data, n, way):
        runs = next(row["runs"] for row in figures["rows"]
                    if (row["data"], row["micro_batches"], row["way"]) == (data, n, way))  # fmt: skip
        return f"{max(run['error'] for run in runs):.1%}"

    kinds = list(dict.fromkeys(row["data"] for row in figures["rows"]))
    ways = list(dict.fromkeys(row["way"] for row in figures["rows"]))
    counts = list(dict.fromkeys(row["micro_batches"] for row in figures["rows"]))
    rows = [[data, way, *(worst(data, n, way) for n in counts)] for data in kinds for way in ways]
    heads = ["data", "sums", *(f"{n} backward passes" for n in counts)]
    seeds = len(figures["rows"][0]["runs"])
    return f"{came_from(figures)}; the largest error of {seeds} seeds:\n\n{report.table(heads, rows)}"


def fsdp(figures):
    errors = [
        [name, *(f"{row[at]:.1%}" for at in ("0.0", "0.5", "0.9", "1.0"))] for name, row in figures["error"].items()
    ]
    rows = [
        [ranks, f"FSDP2 {way}" if way in ("fp32", "bf16") else f"amp8 {way}", f"{row['bytes']:.2f}",
         f"{row['wire'] / 1e6:.2f}", f"{row['wire_of_fp32']:.2f}x",
         f"{row['converted_of_fp32']:.2f}x" if row["converted"] else ""]
        for ranks, ways in figures["ways"].items() for way, row in ways.items()
    ]  # fmt: skip
    heads = ["ranks", "way", "B per Linear parameter", "sent per step, MB", "of fp32", "converted layers"]
    text = "Relative error of the mean gradient, by correlation between ranks:"
    return (f"{came_from(figures)}, per rank:\n\n{report.table(heads, rows)}\n\n{text}\n\n"
            + report.table(["ranks", "0", "0.5", "0.9", "1"], errors))  # fmt: skip


def optimizers(figures):
    rows = [
        [name, f"{row['bytes_per_parameter']['total']:.1f}", f"{row['seconds']['median_step'] * 1e3:.0f}",
         f"{row['validation_loss']:.4f}"]
        for name, row in figures["rows"].items()
    ]  # fmt: skip
    heads = ["optimizer", "B/param", "median step, ms", "validation loss"]
    return f"{came_from(figures)}:\n\n{report.table(heads, rows)}"
