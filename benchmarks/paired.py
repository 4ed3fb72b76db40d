"""How often are the verdicts of ./launch.sh compare wrong? Resamples real runs.

    python benchmarks/paired.py results/compare_digits results/compare_text --output results/paired.json

Makes new comparisons from the runs of finished ones, in which the true difference is known:

  no difference   the mean difference is removed, and the two runs of each pair are swapped at random, so neither config
                  is better; as many pairs as there are seeds are drawn again and again. Also the baseline against
                  itself, with different seeds.
  a difference    the same, with twice the stated resolution of the row added to one side.

`wrong` counts verdicts of higher and lower without a difference, which should be at most 5%. `misses zero` counts the
intervals that do not contain zero, inside the margin or not. `found` counts verdicts with a difference, which should be
at least 90%. `several looks` is --seeds auto, where the first verdict counts. `fewest` are comparisons with the
smallest number of pairs that can get a verdict.
"""

import json
from pathlib import Path

import numpy as np
from harness import arguments, save

from tools import paired
from tools.judge import COSTS


def pools(made):
    """(config, measure, [(value of the baseline, value of the config)], the resolution stated) of a report."""
    baseline = made["rows"][0]["measures"]
    for name, found in baseline.items():
        if name in COSTS:
            continue
        values = found["values"]
        yield "other seeds", name, [(a, b) for a in values for b in values if a is not b], None
        for row in made["rows"][1:]:
            here = row.get("measures", {}).get(name)
            if here:
                yield row["config"], name, level(values, here["values"]), here["resolution"]


def level(baseline, values):
    """Pairs without their mean difference. Removing it shrinks the deviations, which is corrected."""
    differences = np.subtract(values, baseline)
    rest = (differences - differences.mean()) * (len(values) / (len(values) - 1)) ** 0.5
    return list(zip(baseline, (np.array(baseline) + rest).tolist(), strict=True))


def drawn(generator, pairs, count, planted=0.0):
    """(baseline, values) of this many pairs in which neither side is better, except for the planted difference."""
    chosen = np.array(pairs)[generator.integers(len(pairs), size=count)]
    swap = generator.integers(2, size=count).astype(bool)
    chosen[swap] = chosen[swap][:, ::-1]
    base, values = chosen[:, 0], chosen[:, 1]
    return base.tolist(), (values + planted * base.mean()).tolist()


def first_verdict(base, values, margin, looks):
    """The verdict of a comparison that looks several times and stops at the first verdict."""
    for count in looks:
        kind = paired.judge(base[:count], values[:count], margin, paired.level(len(looks)))["kind"]
        if kind != "unknown":
            return kind
    return "unknown"


def rates(pairs, resolution, margin, times, generator):
    """The rates over `times` comparisons."""
    found = dict.fromkeys(("wrong", "misses_zero", "wrong_fewest", "wrong_several_looks", "planted_found"), 0)
    looks = paired.looks(16)
    count = max(paired.FEWEST, round(len(pairs) ** 0.5) if resolution is None else len(pairs))
    for _ in range(times):
        base, values = drawn(generator, pairs, count)
        found["wrong"] += paired.judge(base, values, margin)["kind"] in ("higher", "lower")
        found["misses_zero"] += paired.judge(base, values, 0)["kind"] in ("higher", "lower")
        base, values = drawn(generator, pairs, paired.FEWEST)
        found["wrong_fewest"] += paired.judge(base, values, margin)["kind"] in ("higher", "lower")
        base, values = drawn(generator, pairs, looks[-1])
        found["wrong_several_looks"] += first_verdict(base, values, margin, looks) in ("higher", "lower")
        if resolution:
            base, values = drawn(generator, pairs, count, 2 * resolution)
            found["planted_found"] += paired.judge(base, values, 0)["kind"] == "higher"
    shares = {name: number / times for name, number in found.items()}
    shares["planted_found"] = shares["planted_found"] if resolution else None
    return {"pairs": count, "comparisons": times, "resolution": resolution} | shares


def main():
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("reports", nargs="+", type=Path, help="folders of finished comparisons")
    parser.add_argument("--times", type=int, default=1000, help="comparisons of each config and measure")
    args = parser.parse_args()
    generator, rows = np.random.default_rng(0), []
    for folder in args.reports:
        figures = json.loads((folder / "report.json").read_text())
        for config, name, pairs, resolution in pools(figures):
            found = rates(pairs, resolution, figures["margin"], args.times, generator)
            rows.append({"comparison": folder.name, "config": config, "measure": name, **found})
            print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    planted = [row["planted_found"] for row in rows if row["planted_found"] is not None]
    total = {
        key: float(np.mean([row[key] for row in rows]))
        for key in ("wrong", "misses_zero", "wrong_fewest", "wrong_several_looks")
    }
    total |= {"planted_found": float(np.mean(planted)), "comparisons": args.times * len(rows)}
    total |= {"fewest": paired.FEWEST, "looks": paired.looks(16)}
    print(total)
    if args.output:
        save(args.output, {"total": total, "rows": rows}, packages=("numpy", "scipy"))


if __name__ == "__main__":
    main()
