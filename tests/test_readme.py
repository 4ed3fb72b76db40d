"""What README.md says exists, parses and agrees with the code: its commands, paths, configs, grammar and tables."""

import re
import shlex
import tomllib

import pytest
from accelerate.commands.launch import launch_command_parser
from conftest import CONFIGS, ROOT, recipe, train

from benchmarks import tables as tables_script
from faithful import rules
from faithful.config import LEVELS, PRECISIONS, STRATEGIES, TAILS, asked, exported
from shared import args, models
from tools import formats

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.M | re.S)  # (language, text)
INLINE = re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", re.sub(r"^```.*?^```$", "", TEXT, flags=re.M | re.S))
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yml"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
WORDS = set(re.findall(r"[a-z-]+", " ".join(re.findall(r"^    ([a-z |-]+)\)", (ROOT / "launch.sh").read_text(), re.M))))


def commands(start):
    """Every command of the README that begins with `start`: lines of its shell blocks, and inline code."""
    lines = [line for language, block in BLOCKS if language == "bash" for line in block.splitlines()]
    lines = [part for line in lines for part in re.split(r" && ", line)]
    return [command for command in map(str.strip, [*lines, *INLINE]) if command.startswith(start)]


def tables():
    """Rows of every table, as lists of cells, below their head."""
    for block in re.findall(r"(?:^\|.*\|\n)+", TEXT, re.M):
        rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines()]
        yield rows[0], rows[2:]


def check_recipe(script, options):
    """A recipe, by name or path, that takes these options."""
    name = script.removeprefix("recipes/").removesuffix(".py")
    assert (ROOT / "recipes" / f"{name}.py").is_file(), script
    args.parse(recipe(name).Arguments, options)  # exits where it does not take one


def check_launch(words):
    parsed = launch_command_parser().parse_args(words)
    assert (ROOT / parsed.config_file).is_file(), parsed.config_file
    check_recipe(parsed.training_script, parsed.training_script_args)


def check_what_runs_over_configs(tool, words):
    """`compare` and `estimate`: their own options, configs that exist, and behind `--` a recipe with its options."""
    left, right = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    source = (ROOT / "tools" / f"{tool}.py").read_text()
    values = {after for before, after in zip(left, left[1:], strict=False) if before.startswith("--")}
    for word in left:
        if word.startswith("--"):
            assert f'"{word}"' in source, word
        elif word not in values and not re.match(r"runs/|\[?(CONFIG)?\.{3}\]?$", word):
            assert not word or word in NAMES, word
    if right and right[0]:
        check_recipe(right[0], [word for word in right[1:] if not word.startswith("[") and not word.endswith("]")])


def test_accelerate_launch_lines():
    found = commands("accelerate launch ")
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
        else:
            source = (ROOT / script).read_text()
            assert all(f'"{option}"' in source for option in options if option.startswith("--")), command


def test_launch_sh_lines():
    found = commands("./launch.sh ")
    assert "./launch.sh demo" in found and "./launch.sh test" in found
    for command in found:
        first, *rest = shlex.split(command.removeprefix("./launch.sh "))
        rest = [re.sub(r"^(CONFIG|RUN_FOLDER|RECIPE)$", "", word) for word in rest]
        if first == "setup":
            assert rest[::2] == ["--extra"] * len(rest[::2]) and set(rest[1::2]) <= EXTRAS.keys(), command
        elif first == "check":
            named = [word for word in rest if not word.startswith("--") and not word.isdigit()]
            assert set(named) <= {*NAMES, ""}, command
        elif first == "copy":
            name, config, _ = rest
            assert config in ("", *NAMES) and (not name or (ROOT / "recipes" / f"{name}.py").is_file()), command
        elif first in ("predict", "export") and len(rest) > 1:
            options = [word for word in rest if word.startswith("--")]
            assert all(f'"{o}"' in (ROOT / "tools" / f"{first}.py").read_text() for o in options), command
        elif first == "formats":
            args.parse(formats.Arguments, rest)
        elif first in ("compare", "estimate"):
            check_what_runs_over_configs(first, rest)
        elif first in WORDS:
            assert len(rest) <= 1 or first == "test", command
        else:  # CONFIG stands for any
            check_launch(
                ["--config_file", f"accelerate_configs/{'ddp_bf16' if first == 'CONFIG' else first}.yml", *rest]
            )


def test_its_list_of_commands_is_launch_shs_help():
    [listed] = [block for _, block in BLOCKS if "./launch.sh ls " in block]
    listed = [line.strip() for line in listed.splitlines()]
    source = (ROOT / "launch.sh").read_text().splitlines()
    assert listed == [line.removeprefix("#").strip() for line in source[3:] if line.startswith("#   ")][: len(listed)]
    assert {line.split()[1] for line in listed if line.startswith("./")} - {"CONFIG"} <= WORDS
    for line in listed:
        for config, script in re.findall(r"e\.g\. \./launch\.sh (\w+) .*? (\w+) --max_steps", line):
            assert config in NAMES and (ROOT / "recipes" / f"{script}.py").is_file()


def test_paths_exist():
    folders = "accelerate_configs amp8 benchmarks cluster faithful recipes results shared tests tools".split()
    found = set(re.findall(rf"(?<![\w/.-])(?:{'|'.join(folders)})/(?:[\w./-]*\w)?", TEXT))
    found |= set(re.findall(r"(?<![\w/.-])(?:launch\.sh|pyproject\.toml|requirements\.txt|LICENSE)\b", TEXT))
    found |= {link for link in re.findall(r"\]\(([^)#]+)", TEXT) if "://" not in link}
    assert len(found) > 5
    assert not sorted(path for path in found if not (ROOT / path).exists())


def test_every_config_has_its_row_and_it_says_what_the_rules_say():
    [rows] = [rows for head, rows in tables() if head[:2] == ["config", "on a CPU"]]
    assert sorted(row[0].strip("`") for row in rows) == NAMES
    here = {"device": "cpu", "devices": 0, "name": "CPU", "capability": None, "packages": ["torchao", "deepspeed"]}
    for name, cpu, gpu in rows:
        lines, mapping = rules.file_problems(CONFIGS / f"{name.strip('`')}.yml")
        assert not lines
        found = asked(exported(mapping))
        assert cpu.startswith("refused: " if rules.problems(found, here) else "ran"), name
        assert ("emulated" in cpu) == (found["precision"] == "fp8" and cpu.startswith("ran")), name
        assert ("TransformerEngine" in gpu) == (found["backend"] == "te"), name


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
            promised = rules.grammar(f"single_fp8_{backend}_{level}")
            assert promised["backend"] == backend and level in (promised["level"], f"{promised['level']}_te")
        assert set(LEVELS[backend]) <= set(ticked(listed))
        for default in re.findall(r"`(\w+)` \(default\)", listed):
            assert default == LEVELS[backend][0] == rules.grammar(f"single_fp8_{backend}")["level"]


def test_datasets_models_and_extras_are_the_codes():
    listed = TEXT[TEXT.index("## Data and models") :]
    sizes = (*models.VIT_SIZES, *models.RESNET_SIZES, *models.GPT_SIZES, *models.BERT_SIZES)
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
    assert [path.name for path in (run / "model").iterdir()] == ["model.safetensors"]
    section = TEXT[TEXT.index("## What a run leaves behind") :]
    for name in ("`run.json`", "`metrics.jsonl`", "`checkpoint-<step>/`", "`model/model.safetensors`"):
        assert name in section


def test_tables_and_picture_are_the_files():
    """`python benchmarks/tables.py --check`, and it can fail."""
    for name in tables_script.READMES:
        text = (ROOT / name).read_text()
        assert tables_script.written(text) == text, f"{name}: python benchmarks/tables.py writes it"
    both = TEXT + (ROOT / "amp8" / "README.md").read_text()
    assert all(f"<!-- from {name}: python benchmarks/tables.py -->" in both for name in tables_script.TABLES)
    assert tables_script.PICTURE.read_text() == tables_script.picture(tables_script.read(tables_script.COMPARISON))
    assert tables_script.written(TEXT.replace("other seeds |", "other |")) != TEXT.replace("other seeds |", "other |")


def test_nothing_is_left_to_fill_in():
    assert not re.findall(r"^[A-Z0-9_]{4,}$|\b(?:TODO|TBD|FIXME|xx\.x+)\b", TEXT, re.M)


@pytest.mark.parametrize(
    ("command", "check"),
    [
        ("--config_file accelerate_configs/ddp_bf17.yml recipes/vit.py", check_launch),
        ("--config_file accelerate_configs/ddp_bf16.yml recipes/vitt.py", check_launch),
        ("--config_file accelerate_configs/ddp_bf16.yml recipes/vit.py --max_step 2", check_launch),
        ("--num_process 2 --config_file accelerate_configs/ddp_bf16.yml recipes/vit.py --max_steps x", check_launch),
    ],
)
def test_these_tests_can_fail(command, check):
    with pytest.raises((AssertionError, SystemExit)):
        check(command.split())
