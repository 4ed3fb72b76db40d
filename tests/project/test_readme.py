"""README.md and docs/*.md agree with the code: commands parse; paths, links and configs exist; tables are current."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import partial

import pytest
import tables as tables_script
from accelerate.commands.launch import launch_command_parser
from conftest import CONFIGS, ROOT, edited, recipe, train

from faithful.config import config_file, rules
from faithful.config.fp8 import BACKENDS, FP8
from faithful.config.settings import PRECISIONS, TAILS, read_env, to_env
from faithful.config.strategies import STRATEGIES
from faithful.launch.machine import Machine
from shared import args, lm, resnets, vision
from tools import commands as cli, diagnose

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [
    *PAGES,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "amp8/README.md", "faithful/README.md")),
]
TEXT = "\n".join(page.read_text() for page in PAGES)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.M | re.S)  # (language, text)
INLINE = re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", re.sub(r"^```.*?^```$", "", TEXT, flags=re.M | re.S))
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yml"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NO_GPU = Machine(packages=["torchao", "deepspeed"])
OWN = "train.py"  # a reader's own script, in examples
COMMANDS = {*cli.TOOLS, *cli.IN_CLONE, "demo", "help", "launch", "ls", "path", "--version"}
TOOLS = ("advise", "compare", "diagnose", "estimate")  # they take configs, and a recipe behind `--`
# Measured, and on no page as a table: a sentence links the file, or a test alone reads it.
WITHOUT_TABLE = {"compare_digits/report.json"}

# Scripts of the history whose figures the pages have.
GONE = set(
    re.findall(r"`(benchmarks/[\w/]+\.py)`", (ROOT / "benchmarks" / "README.md").read_text().split("## Answered")[1])
)
LEVELS = {backend: rules.levels for backend, rules in BACKENDS.items()}


def page(name):
    return (ROOT / name).read_text()


def commands(start):
    """Every command in the pages that begins with `start`, in shell blocks and in inline code."""
    lines = [line for language, block in BLOCKS if language == "bash" for line in block.splitlines()]
    lines = [part for line in lines for part in re.split(r" && ", line)]
    found = [" ".join(command.split()) for command in [*lines, *INLINE]]  # inline code may go on in the next line
    return [command for command in found if command.startswith(start)]


def tables():
    """The rows of every table, as lists of cells, without the header."""
    for block in re.findall(r"(?:^\|.*\|\n)+", TEXT, re.M):
        rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines()]
        yield rows[0], rows[2:]


def check_recipe(script, options):
    """Checks that a recipe, by name or path, exists and takes these options."""
    name = script.removeprefix(f"{ROOT}/").removeprefix("recipes/").removesuffix(".py")
    assert (ROOT / "recipes" / f"{name}.py").is_file(), script
    args.parse(recipe(name).Arguments, options)  # exits where it does not take one


def check_launch(words):
    words = [word for word in words if word != "--config_wins" or "faithful" in words]  # launch.sh hands it on
    parsed = launch_command_parser().parse_args(words)
    assert parsed.config_file in (None, "my_fsdp.yaml") or (ROOT / parsed.config_file).is_file(), parsed.config_file
    script, options = parsed.training_script, parsed.training_script_args
    if parsed.module and script == "faithful":  # python -m faithful [--config_wins] SCRIPT
        options = options[1:] if options[0] == "--config_wins" else options
        script, parsed.module = options[0], False
    if not parsed.module and script != OWN:
        check_recipe(script, options)


def check_what_runs_over_configs(tool, words):
    """Checks `advise`, `compare` and `estimate`: their own options, configs that exist, and a recipe with its options
    after `--`."""
    left, right = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    source = (ROOT / "tools" / f"{tool}.py").read_text()
    values = {after for before, after in zip(left, left[1:], strict=False) if before.startswith("--")}
    for word in left:
        if word.startswith("--"):
            assert f'"{word}"' in source, word
        elif word not in values and not word.startswith("runs/"):
            assert word.split()[0] in NAMES, word  # a row of compare may have options
    if right and right[0] != OWN:
        check_recipe(right[0], right[1:])
        assert tool != "diagnose" or not {f"--{name}" for name in diagnose.LENGTH} & {*right}, right


def test_accelerate_launch_lines():
    path = r"\$\(accelerate-recipes path (\w+)\)"
    found = [re.sub(path, lambda name: str(cli.path_of(name[1])), line) for line in commands("accelerate launch ")]
    assert any("--config_file accelerate_configs/" in command for command in found)
    for command in found:
        check_launch(shlex.split(command)[2:])


def test_torchrun_and_python_lines():
    found = commands("torchrun") + commands("python ")
    assert len(found) >= 2
    for command in found:
        words = shlex.split(command)
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        script, options = words[at], [word for word in words[at + 1 :] if word != "--help"]
        if script.startswith("recipes/"):
            check_recipe(script, options)
        elif script == "test_copy.py":  # of a copy
            assert not options and f'"{script}"' in (ROOT / "tools" / "copy_recipe.py").read_text()
        elif script in GONE:
            assert any(command in " ".join(file.read_text().split()) for file in (ROOT / "results").rglob("*.md"))
        else:
            source = (ROOT / script).read_text()
            assert all(f'"{option}"' in source for option in options if option.startswith("--")), command


def test_launch_sh_lines():
    found = commands("./launch.sh ")
    assert "./launch.sh demo" in found and "./launch.sh test" in found
    found += [f"./launch.sh {command.split(' ', 1)[1]}" for command in commands("accelerate-recipes ")]
    for command in found:
        first, *rest = shlex.split(command.removeprefix("./launch.sh "))
        first, *rest = rest if first == "launch" else (first, *rest)
        rest = [word for word in rest if word != "--help"]
        if first == "setup":
            rest = [word for word in rest if word != "--cpu"]
            assert rest[::2] == ["--extra"] * len(rest[::2]) and set(rest[1::2]) <= EXTRAS.keys(), command
        elif first == "check":
            named = [word for word in rest if not word.startswith("--") and not word.isdigit()]
            named = [word for word in named if word not in ("10.0.0.1", "my.yml", "my_fsdp.yaml")]
            assert set(named) <= {*NAMES}, command
        elif first == "copy":
            name, config, _, *ways = rest
            assert set(ways) <= {"--plain"} and config in NAMES and (ROOT / "recipes" / f"{name}.py").is_file(), command
        elif first in ("predict", "export", "show") and len(rest) > 1:
            options = [word for word in rest if word.startswith("--")]
            assert all(f'"{o}"' in (ROOT / "tools" / f"{first}.py").read_text() for o in options), command
        elif first in TOOLS and rest:
            check_what_runs_over_configs(first, rest)
        elif first in COMMANDS:
            assert len(rest) <= 1 or first == "test", command
        else:  # CONFIG stands for any
            file = f"accelerate_configs/{'ddp_bf16' if first == 'CONFIG' else first}.yml"
            check_launch(["--config_file", first if first == "my_fsdp.yaml" else file, *rest])


def test_the_help_of_launch_sh_is_of_commands_that_there_are():
    listed = set(re.findall(r"^  ([\w-]+)", cli.HELP, re.M)) - {"CONFIG"}
    assert listed == COMMANDS - {"help"}
    for word in listed:
        assert re.search(rf"\./launch\.sh\s+{word}\b", TEXT), f"no page says what ./launch.sh {word} is for"


def test_paths_exist():
    folders = "accelerate_configs amp8 benchmarks cluster docs faithful recipes results shared tests tools".split()
    found = set(re.findall(rf"(?<![\w/.-])(?:{'|'.join(folders)})/(?:[\w./-]*\w)?", TEXT))
    found |= set(re.findall(r"(?<![\w/.-])(?:launch\.sh|pyproject\.toml|requirements\.txt|LICENSE)\b", TEXT))
    assert len(found) > 20
    assert {path for path in found if not (ROOT / path).exists()} <= GONE


def anchors(file):
    """GitHub's anchors for the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", file.read_text(), flags=re.M | re.S)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)$", text, re.M)}


def broken_links(file, text):
    """Links and pictures of a page that lead nowhere."""
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        there = (file.parent / path).resolve() if path else file
        if "://" not in link and not (there.exists() and (not anchor or anchor in anchors(there))):
            yield link


@pytest.mark.parametrize("file", LINKED, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file):
    assert not list(broken_links(file, file.read_text()))


def test_how_it_works_names_what_is_there():
    """A function or class stands in the file that the page names beside it."""
    text = page("docs/how-it-works.md")
    named = re.findall(r"`(\w+)` in `([\w/]+\.py)`", " ".join(text.split()))
    assert len(named) > 30 and len(text.splitlines()) <= 120
    for name, file in named:
        assert re.search(rf"^( *def {name}\(|class {name}\b|{name}\b.* = )", page(file), re.M), f"{name} in {file}"


def test_a_broken_link_is_found():
    text = "[a](docs/fp8.md) [b](docs/fp8.md#no-such-head) [c](docs/no.md) [d](docs/fp8.md#keep-a-layer-out-of-fp8)"
    assert list(broken_links(ROOT / "README.md", text)) == ["docs/fp8.md#no-such-head", "docs/no.md"]


def test_pages_are_short_and_readme_links_all_of_them():
    assert len(page("README.md").splitlines()) <= 150
    for file in PAGES[1:]:
        assert len(file.read_text().splitlines()) < 200, file.name
        assert f"(docs/{file.name})" in page("README.md"), f"README.md does not link {file.name}"
        assert len(re.findall(r"\bnot\s+run\b", file.read_text())) <= 1, file.name


@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_rehearses_every_config(name):
    lines, mapping = config_file.file_problems(CONFIGS / f"{name}.yml")
    assert not lines and not rules.problems(read_env(to_env(mapping)), NO_GPU)


def gpus(capability):
    return Machine("cuda", 8, "GPU", capability, "13.0", ["torchao", "deepspeed", "transformer_engine"])


def of(strategy, precision, backend=None, level=None):
    """What a config of this strategy and precision asks for, even if there is no file for it."""
    file = next(name for name in NAMES if name.startswith(f"{strategy}_bf16"))
    found = read_env(to_env(config_file.file_problems(CONFIGS / f"{file}.yml")[1]))
    return replace(found, precision=precision, fp8=FP8(backend, level))


def test_the_table_of_strategies_and_precisions_says_what_the_rules_say():
    [(head, rows)] = [(head, rows) for head, rows in tables() if head[0] == "strategy"]
    ways = [re.findall(r"\w+", cell) for cell in head[1:]]
    assert ways == [["fp32"], ["fp16"], ["bf16"], ["fp8", "ao"], ["fp8", "te"], ["fp8", "msamp"]]
    strategies = []
    for row in rows:
        named = [word for word in re.findall(r"`(\w+)`", row[0]) if word in STRATEGIES]
        strategies += named
        for strategy in named:
            for (precision, *backend), cell in zip(ways, row[1:], strict=True):
                levels = LEVELS[backend[0]] if backend else (None,)
                runs = {"cpu": [], "gpu": []}
                for level in levels:
                    wanted = of(strategy, precision, *backend, level)
                    for kind, machine in (("cpu", NO_GPU), ("gpu", gpus((10, 0)))):
                        if not rules.problems(wanted, machine):
                            runs[kind].append(level)
                says = {(True, True): "runs", (False, True): "GPU only", (False, False): "refused"}
                assert cell.split(":")[0] == says[bool(runs["cpu"]), bool(runs["gpu"])], (strategy, precision, backend)
                if ":" in cell:
                    assert set(re.findall(r"`(\w+)`", cell)) == set(runs["gpu"]), (strategy, cell)
                elif cell == "runs":
                    assert len(runs["gpu"]) == len([level for level in levels if level != "mxfp4"]), (strategy, backend)
    assert strategies == list(STRATEGIES)


def test_what_a_gpu_needs_is_what_the_rules_say():
    [rows] = [rows for head, rows in tables() if head == ["precision", "compute capability"]]
    said = {}
    for cell, needs in rows:
        first, *rest = re.findall(r"`(\w+)`", cell)
        for words in [(first, *rest)] if first == "fp8" else [(first,), *((other,) for other in rest)]:
            said[words] = needs

    def least(*way):
        steps = ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0))
        found = next((step for step in steps if not rules.problems(of("single", *way), gpus(step))), None)
        return {(7, 5): "any", None: "none"}.get(found) or "{}.{}".format(*found)

    for precision in ("fp32", "fp16", "bf16"):
        assert said[precision,] == least(precision)
    for backend, levels in LEVELS.items():
        first, *others = (part.strip() for part in said["fp8", backend].split(";"))
        assert first == least("fp8", backend, levels[0])
        for level in levels[1:]:
            own = [part for part in others if f"`{level}`" in part]
            assert least("fp8", backend, level) == (re.match(r"[\d.]+|none", own[0])[0] if own else first), level


def test_grammar_is_the_codes():
    [rows] = [rows for head, rows in tables() if head == ["token", "values"]]
    cells = {token.split(",")[0]: values for token, values in rows}
    assert "`<strategy>_<precision>[_<backend>[_<level>]][_<tail>].yml`" in TEXT

    def ticked(cell):
        return re.findall(r"`(\w+)`", cell)

    assert set(ticked(cells["strategy"])) == set(STRATEGIES)
    assert set(ticked(cells["precision"])) == set(PRECISIONS.values())
    assert set(ticked(cells["tail"])) == set(TAILS)
    assert set(ticked(cells["backend"])) == set(LEVELS)
    levels = dict(part.strip().split(": ", 1) for part in cells["level"].split(";"))
    assert levels.keys() == LEVELS.keys()
    for backend, listed in levels.items():
        for level in ticked(listed):
            promised = config_file.grammar(f"single_fp8_{backend}_{level}")
            more = (f"{promised['level']}_{word}" for word in BACKENDS[backend].recipes)
            assert promised["backend"] == backend and level in (promised["level"], *more)
        assert set(LEVELS[backend]) <= set(ticked(listed))
        for default in re.findall(r"`(\w+)` \(default\)", listed):
            assert default == LEVELS[backend][0] == config_file.grammar(f"single_fp8_{backend}")["level"]


def test_datasets_models_and_extras_are_the_codes():
    listed = page("docs/data.md")
    sizes = (*vision.VIT_SIZES, *resnets.RESNET_SIZES, *lm.GPT_SIZES, *lm.BERT_SIZES)
    for name in (
        "digits",
        "photos",
        "textures",
        "synthetic",
        "python_docs",
        "python_source",
        "python_packages",
        *sizes,
    ):
        assert f"`{name}`" in listed
    assert {"photos", "dev"} <= set(re.findall(r"--extra ([a-z]+)", TEXT)) <= EXTRAS.keys()


def test_what_a_run_leaves_is_what_it_says(tmp_path):
    run = train("single_fp32", tmp_path / "run", "--max_steps", 2, "--save_steps", 1)
    left = {re.sub(r"checkpoint-\d+", "checkpoint-<step>", str(path.relative_to(run))) for path in run.glob("*")}
    assert left == {"run.json", "metrics.jsonl", "data.json", "checkpoint-<step>", "model"}
    assert {path.name for path in (run / "model").iterdir()} == {"model.safetensors", "config.json", "README.md"}
    section = page("docs/runs.md")
    for name in ("`run.json`", "`metrics.jsonl`", "`checkpoint-<step>/`", "`model.safetensors`", "`config.json`"):
        assert name in section


def test_tables_and_picture_are_the_files():
    """Tables and picture are those that `python benchmarks/tables.py` writes; its --check can fail."""
    for name in tables_script.PAGES:
        assert tables_script.written(name) == page(name), f"{name}: python benchmarks/tables.py writes it"
    everything = "".join(map(page, tables_script.PAGES))
    marks = set(re.findall(r"<!-- from (\S+): python benchmarks/tables\.py -->", everything))
    measured = {name for name in tables_script.TABLES if (ROOT / name).is_file()}
    finished = {name for name in marks if name.endswith(".md") and (ROOT / name).is_file()}
    assert marks - finished <= measured and measured - marks == {f"results/{name}" for name in WITHOUT_TABLE}
    for name in tables_script.COMPARISONS:
        drawn = (ROOT / name).with_name(tables_script.PICTURE).read_text()
        assert drawn == tables_script.picture(tables_script.read(name))
    assert "](results/study/memory_and_loss.svg)" in page("README.md")
    text = page("docs/measured.md")
    changed = edited(text, "| vit_nano, fp32, 1 |", "| vit_nano, fp32, 2 |")
    assert text == tables_script.written("docs/measured.md", changed)


def test_examples_in_python_compile():
    found = [block for language, block in BLOCKS if language == "python"]
    assert found
    for block in found:
        compile(block, "example", "exec")


def test_the_first_example_of_amp8_s_readme_runs_as_printed(tmp_path):
    first, second = re.findall(r"^```python\n(.*?)^```$", page("amp8/README.md"), re.M | re.S)
    (tmp_path / "example.py").write_text(first)
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""})  # fmt: skip
    assert done.returncode == 0 and "O2" in done.stdout, done.stderr[-2000:]
    compile(second, "example", "exec")


def test_nothing_is_left_to_fill_in():
    assert not re.findall(r"^[A-Z0-9_]{4,}$|\b(?:TODO|TBD|FIXME|xx\.x+)\b", TEXT, re.M)


@pytest.mark.parametrize(
    ("command", "check"),
    [
        ("--config_file accelerate_configs/ddp_bf17.yml recipes/vit.py", check_launch),
        ("--config_file accelerate_configs/ddp_bf16.yml recipes/vitt.py", check_launch),
        ("--config_file accelerate_configs/ddp_bf16.yml recipes/vit.py --max_step 2", check_launch),
        ("--num_process 2 --config_file accelerate_configs/ddp_bf16.yml recipes/vit.py --max_steps x", check_launch),
        ("--config_file accelerate_configs/ddp_bf16.yml -m faithful trian.py", check_launch),
        ("single_fp8_te_nvfp4 -- gpt --max_steps 300", partial(check_what_runs_over_configs, "diagnose")),
    ],
)
def test_these_tests_can_fail(command, check):
    with pytest.raises((AssertionError, SystemExit)):
        check(command.split())
