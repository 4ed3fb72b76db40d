"""Puts the measured tables into README.md and amp8/README.md, from the files in results/.

    python benchmarks/readme.py

A table stands between `<!-- name -->` and `<!-- end -->`; what is between them is written here and nowhere else, and a
test compares. A number in a README so has its command, versions, device and date beside it, and can't drift.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def measured(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def source(name):
    """`python benchmarks/emulation.py ...`, device, torch version, date: where a table comes from."""
    record = measured(name)
    torch = record["versions"]["torch"].split("+")[0]
    return f"`{record['command']}`, {record['device']}, torch {torch}, {record['date'][:10]}; `results/{name}.json`"


def table(head, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows])


def emulation():
    rows = [
        [f"`{row['kind']}`" + (", its own CPU path" if ":" in row["kind"] else ""), f"{row['median_ratio']:.2f}x"]
        for row in measured("emulation")["rows"]
        if row["kind"] != "bf16"
    ]
    return f"{table(['recipe', 'step, relative to bf16'], rows)}\n\n({source('emulation')})"


def fp8_digits():
    rows = [
        [f"`{row['config']}`", f"{row['mean']:.4f}", f"{row['spread']:.4f}", f"{row['accuracy']:.4f}",
         row["linear_converted"], f"{row['bytes_per_parameter']:.1f}"]
        for row in measured("fp8_digits")["rows"]
    ]  # fmt: skip
    head = ["config", "loss, mean", "max - min", "accuracy", "Linear in FP8", "B/param"]
    return f"{table(head, rows)}\n\n({source('fp8_digits')})"


def amp8_memory():
    rows = [[row["level"], f"{row['peak'] / 1e9:.2f}", f"{row['ratio']:.2f}x", f"{row['bytes_per_parameter']:.1f}"]
            for row in measured("amp8_memory")["rows"]]  # fmt: skip
    head = ["level", "peak, GB", "of bf16 AMP with fp32 masters", "B/param"]
    return f"{table(head, rows)}\n\n({source('amp8_memory')})"


def amp8_parity():
    tasks = measured("amp8_parity")["tasks"]
    vit, gpt = tasks["digits_vit"]["levels"], tasks["byte_gpt"]["levels"]
    rows = [
        [level, f"{vit[level]['mean']:.4f}", f"{row['mean']:.4f}", f"{row['difference_percent']:+.2f}%"]
        for level, row in gpt.items()
    ]
    spread = (f"bf16's own seeds are spread by {vit['bf16']['spread_percent']:.0f}% on the ViT and "
              f"{gpt['bf16']['spread_percent']:.2f}% on the GPT.")  # fmt: skip
    head = ["level", "digits ViT", "byte-level GPT", "GPT against bf16"]
    return f"{table(head, rows)}\n\n{spread}\n({source('amp8_parity')})"


def amp8_comm():
    record, names = measured("amp8_comm"), {"amp8": "amp8", "msamp": "MS-AMP's FP8 sum, 1/sqrt(N)",
                                            "floor": "rounding once", "bf16": "bf16 sum"}  # fmt: skip
    errors, wire = record["simulated_8"], record["wire_4"]
    rows = [[name, *(f"{errors[key][at]:.1%}" for at in ("0.0", "0.9", "1.0"))] for key, name in names.items()]
    rest = (f"On 4 gloo processes {record['processes_4']['0.9']:.1%} at 0.9. Bytes sent per step: "
            f"{wire['of_bf16_hook']:.2f}x of a bf16 hook, {wire['of_fp32_ddp']:.2f}x of fp32 DDP.")  # fmt: skip
    return f"{table(['scheme', '0', '0.9', '1'], rows)}\n\n{rest}\n({source('amp8_comm')})"


def amp8_optimizers():
    rows = [
        [name, f"{row['bytes_per_parameter']['total']:.1f}", f"{row['seconds']['median_step'] * 1e3:.0f}",
         f"{row['validation_loss']:.4f}"]
        for name, row in measured("amp8_optimizers")["rows"].items()
    ]  # fmt: skip
    head = ["optimizer", "B/param", "median step, ms", "validation loss"]
    return f"{table(head, rows)}\n\n({source('amp8_optimizers')})"


def filled(text):
    """`text` with every marked table made anew."""

    def fresh(match):
        return f"<!-- {match[1]} -->\n{globals()[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", fresh, text, flags=re.S)


if __name__ == "__main__":
    for path in (ROOT / "README.md", ROOT / "amp8" / "README.md"):
        path.write_text(filled(path.read_text()))
