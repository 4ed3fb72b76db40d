"""What the study found: summary.json, page.html and the picture, from the rows of all machines."""

import datetime
import json
import statistics
from collections import defaultdict

from harness import came_from
from matplotlib.ticker import MaxNLocator
from study import ABSENT, BASELINE, CONTROL, PICTURE, SEEDS, TASKS, WAYS, kind_of

from tools import page, paired, report

NO_WAY_OF_ITS_OWN = (BASELINE, CONTROL, "planted")  # not for a reader to choose


# -------------------------------------------------------------------------------------------------------- the verdicts


def alike(run, base, way):
    """Whether two runs of one seed are a pair. The control starts from other weights, and so does --dtype."""
    same_weights = way == CONTROL or "--dtype" in WAYS[way].options or run["initial_weights"] == base["initial_weights"]
    return same_weights and run["first_batch"] == base["first_batch"]


def pairs(rows, task, way):
    """{seed: (run, baseline)}; of several machines that have a seed the first, so that each seed counts once."""
    finished = [row for row in rows if row["task"] == task and row["status"] == "finished"]
    bases = {(row["seed"], row["device"], row["code"]): row for row in finished if row["way"] == BASELINE}
    found = {}
    for run in finished:
        base = bases.get((run["seed"], run["device"], run["code"]))
        if run["way"] == way and base and alike(run, base, way):
            found.setdefault(run["seed"], (run, base))
    return dict(sorted(found.items()))


def judged(found, measure, margin):
    """tools.paired's verdict over the pairs, with the means and whether a difference is for the better or the worse."""
    values, baseline = ([run["measures"][measure] for run in runs] for runs in zip(*found.values(), strict=True))
    result = paired.judge(baseline, values, margin)
    worse = "lower" if measure == "gain" else "higher"
    kinds = {"equal": "equal", "unknown": "unknown", worse: "worse"}
    return result | {
        "mean": statistics.fmean(values),
        "baseline_mean": statistics.fmean(baseline),
        "kind": kinds.get(result["kind"], "better"),
    }


def result_of(rows, kind, task, way):
    """All that is known of one way in one task on one kind of machine, or None if it never ran."""
    own = [row for row in rows if row["task"] == task and row["way"] == way]
    failed = [row for row in own if row["status"] != "finished"]
    found = pairs(rows, task, way)
    if not found and not failed:
        return None
    runs = [run for run, _ in found.values()]
    result = {"kind": kind, "task": task, "way": way, "config": WAYS[way].config, "options": list(WAYS[way].options)}
    failed = [{key: row[key] for key in ("seed", "device", "status", "error")} for row in failed]
    result |= {"seeds": list(found), "failed": failed, "measures": {}}
    if not runs:
        return result
    names = [TASKS[task].measure, *(name for name in ("rare_loss", "accuracy") if name in runs[0]["measures"])]
    return result | {
        "bytes_per_parameter": statistics.fmean(run["bytes_per_parameter"]["total"] for run in runs),
        "parameters": runs[0]["parameters"],
        "linear": runs[0]["linear"],
        "emulated": any(run["emulated"] for run in runs),
        "summary": runs[0]["summary"],
        "measures": {name: judged(found, name, TASKS[task].margin) for name in names},
    }


def results(rows):
    for kind in ("GPU", "CPU"):
        here = [row for row in rows if kind_of(row["device"]) == kind]
        for task in TASKS:
            for way in WAYS:
                if result := result_of(here, kind, task, way):
                    yield result


def summary(rows, left):
    """What summary.json holds."""
    devices = defaultdict(int)
    for row in rows:
        devices[row["device"]] += 1
    return {
        "schema_version": 1,
        "command": "python benchmarks/study.py page",
        "date": max(row["date"] for row in rows),
        "written": datetime.date.today().isoformat(),
        "device": ", ".join(devices),
        "runs": dict(devices),
        "versions": rows[-1]["versions"],
        "tasks": {name: {"question": task.question, "measure": task.measure, "margin": task.margin,
                         "recipe": task.recipe} for name, task in TASKS.items()},
        "results": list(results(rows)),
        "left": [dict(zip(("task", "runs", "hours", "command"), line, strict=True)) for line in left],
        "absent": ABSENT,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------- words and tables


def main_measure(result):
    return result["measures"].get(TASKS[result["task"]].measure)


def said(result):
    """One cell: the difference with its interval, and the verdict in a word."""
    measure = main_measure(result)
    if measure is None:
        return result["failed"][0]["status"]
    if result["way"] == BASELINE:
        return f"{TASKS[result['task']].measure} {measure['mean']:.4g}"
    words = {"equal": "equal", "better": "better", "worse": "worse"}.get(measure["kind"])
    if words is None:
        words = "cannot tell" if measure["pairs"] >= paired.FEWEST else f"{measure['pairs']} of {SEEDS} seeds"
    lost = f"; {len(result['failed'])} failed" if result["failed"] else ""
    return f"{report.difference(measure)}: {words}{lost}"


def by_way(found):
    """[(way, {task: result})], in the order of the plan."""
    grouped = defaultdict(dict)
    for result in found:
        grouped[result["way"]][result["task"]] = result
    return [(way, grouped[way]) for way in WAYS if way in grouped]


def size_of(of_tasks):
    """Bytes per parameter: `6.2`, or `6.2 to 7.7` where the tasks' models have other shares of Linear layers."""
    sizes = sorted(f"{r['bytes_per_parameter']:.1f}" for r in of_tasks.values() if "bytes_per_parameter" in r)
    sizes.sort(key=float)
    if not sizes:
        return "-"
    return sizes[0] if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"


def table(found):
    """(heads, rows): a row for each way, a column for each task."""
    tasks = [task for task in TASKS if any(result["task"] == task for result in found)]
    rows = []
    for way, of_tasks in by_way(found):
        cells = [said(of_tasks[task]) if task in of_tasks else "-" for task in tasks]
        rows.append([way, size_of(of_tasks), *cells])
    return ["way", "B/param", *tasks], rows


def rare_table(found):
    """(heads, rows) of the ways with enough pairs, or None where there is none."""
    rows = []
    for result in found:
        rare = result["measures"].get("rare_loss")
        if rare and rare["pairs"] >= paired.FEWEST:
            verdict = "baseline" if result["way"] == BASELINE else rare["verdict"]
            rows.append([result["way"], f"{rare['mean']:.4g}", report.difference(rare), verdict])
    return (["way", "loss over rare tokens", "against bf16", "verdict"], rows) if rows else None


def failures(found):
    return [[one["way"], one["task"], failed["seed"], failed["error"]] for one in found for failed in one["failed"]]


def seen(found):
    """Whether the study sees what is planted: [(way, words)]."""
    words = {result["way"]: said(result) for result in found if result["task"] == "words"}
    return [(way, words[way]) for way in ("planted", "o2_nearest", "o2") if way in words]


def answer(found):
    """The study in a few lines: [(verdict, ways)] of the task that the picture shows, then what is worse in others."""
    shown = [result for result in found if result["task"] == PICTURE and main_measure(result)]
    whole = next(result["bytes_per_parameter"] for result in shown if result["way"] == BASELINE)
    judged_ways = [result for result in shown if main_measure(result)["pairs"] >= paired.FEWEST]

    def named(*kinds):
        ways = [result for result in judged_ways if main_measure(result)["kind"] in kinds]
        ways = [result for result in ways if result["way"] not in NO_WAY_OF_ITS_OWN]
        ways.sort(key=lambda result: result["bytes_per_parameter"])
        sizes = (f"{result['way']} ({result['bytes_per_parameter']:.1f} bytes per parameter" for result in ways)
        apart = (f"{report.percent(main_measure(result)['relative'])})" for result in ways)
        return ", ".join(map(", ".join, zip(sizes, apart, strict=True)))

    lines = [
        (f"Loss equal to bf16's ({whole:.0f} bytes per parameter) within the margin:", named("equal")),
        ("Lower:", named("better")),
        ("Higher:", named("worse")),
        ("Cannot tell:", named("unknown")),
        *((f"{TASKS[task].question}, worse:", ways) for task, ways in worse_elsewhere(found)),
    ]
    return [(what, ways) for what, ways in lines if ways]


def worse_elsewhere(found):
    """Yields (task, its ways that are judged worse) of the tasks that the picture does not show."""
    for task in TASKS:
        ways = [result for result in found if result["task"] == task != PICTURE and main_measure(result)]
        ways = [result for result in ways if main_measure(result).get("kind") == "worse"]
        ways.sort(key=lambda result: -abs(main_measure(result)["relative"]))
        named = (f"{result['way']} ({report.percent(main_measure(result)['relative'])})" for result in ways)
        yield task, ", ".join(named)


# ----------------------------------------------------------------------------------------------------------- pictures


def cost_and_saving(found):
    """The study in one picture: how much memory a way takes, and beside it what it does to the held-out loss."""
    rows = sorted(found, key=lambda result: (result["bytes_per_parameter"], main_measure(result)["relative"]))
    margin = 100 * TASKS[rows[0]["task"]].margin
    colours = {"equal": page.colour(2), "better": page.colour(0), "worse": page.colour(1), "unknown": page.DIM}

    def draw(figure, narrow):
        page.height(figure, 60 + (44 if narrow else 27) * len(rows))
        left, right = figure.subplots(1, 2, width_ratios=(2, 3))
        size = [result["bytes_per_parameter"] for result in rows]
        left.barh(range(len(rows)), size, 0.4 if narrow else 0.62, color=page.colour(0), alpha=0.55, lw=0)
        for i, value in enumerate(size):
            left.text(value + 0.2, i, f"{value:.1f}", va="center", color=page.DIM, fontsize=10)
        left.set_xlim(0, max(size) * 1.2)
        left.xaxis.set_major_locator(MaxNLocator(3 if narrow else 5))
        left.set_xlabel("bytes/param" if narrow else "bytes per parameter: weights, gradients, optimizer")
        page.named(left, [result["way"] for result in rows], narrow)
        ends = [[100 * value for value in main_measure(result)["interval"]] for result in rows]
        edge = 1.05 * max(4 * margin, *(abs(end) for pair in ends for end in pair if abs(end) < 8 * margin))
        right.axvspan(-margin, margin, color=page.RULE, alpha=0.6, lw=0)
        right.axvline(0, color=page.DIM, lw=1)
        for i, (result, (low, high)) in enumerate(zip(rows, ends, strict=True)):
            measure = main_measure(result)
            at, mean = colours[measure["kind"]], 100 * measure["relative"]
            if abs(mean) > edge:
                sign = 1 if mean > 0 else -1
                right.plot(sign * edge, i, ">" if mean > 0 else "<", color=at, ms=8, clip_on=False)
                right.text(sign * edge * 0.93, i, f"{mean:+.1f}%", ha="right" if mean > 0 else "left", va="center",
                           color=at, fontsize=10)  # fmt: skip
                continue
            right.plot([max(low, -edge), min(high, edge)], [i, i], color=at, lw=3, solid_capstyle="butt")
            right.plot(mean, i, "o", color=at, ms=7)
        right.set_xlim(-edge, edge)
        right.xaxis.set_major_locator(MaxNLocator(4 if narrow else 9))
        right.set_xlabel("loss, %" if narrow else "held-out loss against bf16, %, with 95% interval")
        page.named(right, [""] * len(rows), False)
        right.set_ylim(left.get_ylim())

    return draw


LEGEND = [("equal within the margin", page.colour(2)), ("better", page.colour(0)), ("worse", page.colour(1)),
          ("cannot tell", page.DIM)]  # fmt: skip
CAPTION = (
    "Memory of each way to train (left) and what it does to the held-out loss (right), mean over pairs of one seed "
    "with its 95% interval; shaded: the margin of {margin}. Task {task}: {question}."
)


def caption_of(task):
    margin = paired.percent(TASKS[task].margin)
    return CAPTION.format(margin=margin, task=task, question=TASKS[task].question.lower())


def task_sections(found):
    """A section for each task: a picture of the intervals, and the numbers."""
    for task in TASKS:
        own = [result for result in found if result["task"] == task and result["way"] != BASELINE]
        drawn = []
        for result in own:
            measure = main_measure(result)
            if measure and measure["interval"]:
                at = page.DIM if result["way"] == CONTROL else page.colour(0)
                ends = [100 * end for end in (measure["relative"], *measure["interval"])]
                star = "*" if abs(ends[0]) > 800 * TASKS[task].margin else ""
                drawn.append((result["way"] + star, *ends, at))
        if not own:
            continue
        parts = [page.words(f"{TASKS[task].question}. Measure: {TASKS[task].measure}.")]
        if drawn:
            caption = f"{task}: difference of {TASKS[task].measure} to bf16, 95% interval; shaded: the margin."
            parts.append(page.picture(page.intervals(drawn, 100 * TASKS[task].margin), caption))
        rows = [[result["way"], len(result["seeds"]), said(result), (main_measure(result) or {}).get("verdict", "-")]
                for result in own]  # fmt: skip
        yield page.section(task, *parts, page.table(["way", "pairs", "difference", "verdict"], rows))


def whole_page(report_):
    found = [result for result in report_["results"] if result["kind"] == shown_kind(report_)]
    parts = []
    if at_picture(found):
        drawn = page.picture(cost_and_saving(at_picture(found)), caption_of(PICTURE), page.legend(LEGEND))
        parts.append(page.section("Memory and loss", drawn))
    parts.append(page.section("Every way in every task", page.table(*table(found))))
    parts.append(page.section("Does it see a fault?", page.pairs(seen(found))))
    parts += task_sections(found)
    if rare := rare_table(found):
        parts.append(page.section("Rare words", page.table(*rare)))
    if failures(found):
        rows = page.table(["way", "task", "seed", "error"], failures(found))
        parts.append(page.section("Refused, or ended with an error", rows))
    left = [[line["task"], line["runs"], f"{line['hours']:.1f}", line["command"]] for line in report_["left"]]
    if left:
        heads = ["task", "runs", "hours on two cores", "command"]
        parts.append(page.section("Not run", page.table(heads, left)))
    notes = [
        "Every run of a seed has the weights, samples and order of bf16's run of that seed; the two are a pair.",
        "Equal: the whole interval is inside the margin. Better or worse: it is on one side of zero. Cannot tell: "
        "neither. For `gain`, what a fine-tuned model gains, less is worse.",
        "FP8 is emulated on a CPU: its values are those of FP8, its speed says nothing and is not shown.",
        f"{report_['device']}; {', '.join(f'{name} {v}' for name, v in report_['versions'].items() if v)}; "
        f"{report_['date']}.",
    ]
    return page.whole("What is each precision worth?", report_["command"], answer(found), parts, notes)


def shown_kind(report_):
    """GPUs if any ran there, else CPUs: a page is of one kind of machine."""
    return report_["results"][0]["kind"]


def at_picture(found):
    """The results that the one picture shows: ways that one may choose, with enough pairs for a verdict."""
    ways = [result for result in found if result["task"] == PICTURE and result["way"] not in NO_WAY_OF_ITS_OWN]
    return [result for result in ways if (main_measure(result) or {}).get("pairs", 0) >= paired.FEWEST]


def in_docs(figures):
    """The tables of docs/study.md."""
    found = [result for result in figures["results"] if result["kind"] == shown_kind(figures)]
    heads, rows = table(found)
    rows = [[f"`{way}`", *cells] for way, *cells in rows]
    parts = [f"{came_from(figures)}; {sum(figures['runs'].values())} runs:", report.table(heads, rows)]
    if rare := rare_table(found):
        heads, rows = rare
        shown = [[f"`{way}`", *cells] for way, *cells in rows if not cells[-1].startswith("equal")]
        equal = ", ".join(f"`{way}`" for way, *cells in rows if cells[-1].startswith("equal"))
        parts += [f"Rare words, of the task `words`; equal to bf16 within the margin: {equal}."]
        parts += [report.table(heads, shown)]
    if failed := failures(found):
        rows = [[f"`{way}`", f"`{task}`", str(seed), error] for way, task, seed, error in failed]
        parts += ["Refused, or ended with an error:", report.table(["way", "task", "seed", "error"], rows)]
    rows = [[f"`{line['task']}`", str(line["runs"]), f"{line['hours']:.1f}", f"`{line['command']}`"]
            for line in figures["left"]]  # fmt: skip
    if rows:
        parts += ["Not run:", report.table(["task", "runs", "hours on two cores, estimated", "command"], rows)]
    return "\n\n".join(parts)


def tensors(figures):
    """The table of benchmarks/study_tensors.py for docs/study.md."""
    heads = ["task", "way", "Linear weights: along bf16's way", "distance", "other weights: along", "distance"]
    rows = []
    for row in figures["rows"]:
        if row["way"] != BASELINE:
            numbers = [row[part][key] for part in ("linear", "others") for key in ("along", "distance")]
            rows.append([f"`{row['task']}`", f"`{row['way']}`", *(f"{value:.2f}" for value in numbers)])
    return f"{came_from(figures)}; seed 0:\n\n{report.table(heads, rows)}"


def write(rows, left, folder):
    if not rows:
        raise SystemExit(f"no rows in {folder.name}: python benchmarks/study.py run")
    report_ = summary(rows, left)
    (folder / "summary.json").write_text(json.dumps(report_, indent=1) + "\n")
    (folder / "page.html").write_text(whole_page(report_))
    found = [result for result in report_["results"] if result["kind"] == shown_kind(report_)]
    if at_picture(found):
        picture = page.standalone(cost_and_saving(at_picture(found)), caption_of(PICTURE))
        (folder / "memory_and_loss.svg").write_text(picture)
    print(f"wrote {', '.join(sorted(path.name for path in folder.iterdir()))}")
