"""Numbers out of range, and files of settings that harm: one line, before anything is built."""

import os

import pytest
from conftest import ROOT, launched

from faithful.config import deepspeed, keys, settings
from faithful.disk import documents
from faithful.launch import machine
from shared import args
from tools import check, find

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
LONG = "1" * 5000
OPTIONS = [  # (an option of recipes/vit.py, what it may not be, the end of the line)
    ("--max_steps", "0", "0 is not a whole number, 1 or more"),
    ("--max_steps", "-3", "-3 is not a whole number, 1 or more"),
    ("--max_steps", LONG, "111... is not a whole number, 1 or more"),
    ("--max_steps", "3000000000", "3000000000 is not a whole number, 1 or more"),
    ("--max_steps", "2.5", "2.5 is not a whole number, 1 or more"),
    ("--save_steps", "-1", "-1 is not a whole number, 0 or more"),
    ("--eval_steps", "-1", "-1 is not a whole number, 0 or more"),
    ("--logging_steps", "-1", "-1 is not a whole number, 0 or more"),
    ("--save_total_limit", "0", "0 is not a whole number, 1 or more"),
    ("--warmup_steps", "-1", "-1 is not a whole number, 0 or more"),
    ("--freeze", "-1", "-1 is not a whole number, 0 or more"),
    ("--skip_broken", "-1", "-1 is not a whole number, 0 or more"),
    ("--image_size", "0", "0 is not a whole number from 1 to 65536"),
    ("--per_device_train_batch_size", "0", "0 is not a whole number, 1 or more"),
    ("--per_device_eval_batch_size", "0", "0 is not a whole number, 1 or more"),
    ("--gradient_accumulation_steps", "0", "0 is not a whole number, 1 or more"),
    ("--dataloader_num_workers", "-1", "-1 is not a whole number from 0 to 1024"),
    ("--seed", "-1", "-1 is not a whole number from 0 to 2147483647"),
    ("--dropout", "2", "2 is not a number from 0 to 1"),
    ("--dropout", "nan", "nan is not a number from 0 to 1"),
    ("--layer_decay", "1.5", "1.5 is not a number from 0 to 1"),
    ("--learning_rate", "inf", "inf is not a number, 0 or more"),
    ("--learning_rate", "-1", "-1 is not a number, 0 or more"),
    ("--weight_decay", "True", "True is not a number, 0 or more"),
    ("--max_grad_norm", "-1", "-1 is not a number, 0 or more"),
]


@pytest.mark.parametrize(("option", "value", "line"), OPTIONS)
def test_an_option_out_of_range_is_one_line(capsys, option, value, line):
    with pytest.raises(SystemExit) as ended:
        args.parse(find.arguments_of(find.recipe("vit")), [f"{option}={value}"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert "error: argument --" in said and option in said and f"{line} (--help" in said


VARIABLES = [  # of the launcher, whoever has set them
    ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "-7"), ("PARALLELISM_CONFIG_TP_SIZE", "-7"), ("PARALLELISM_CONFIG_TP_SIZE", "auto"),
    ("WORLD_SIZE", LONG), ("WORLD_SIZE", "two"), ("FSDP_MIN_NUM_PARAMS", "-7"), ("COLLECTIVE_TIMEOUT", LONG), ("COLLECTIVE_TIMEOUT", "9" * 30),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), VARIABLES)
def test_a_variable_out_of_range_is_one_line(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    asked = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": str("DEEPSPEED" in name).lower()}
    with pytest.raises(settings.Refused, match="write (a whole number|seconds)") as refused:
        settings.timeout_seconds()
        settings.read_env(os.environ | asked)
    assert name in str(refused.value) and len(str(refused.value)) < 200


def test_digits_of_thousands_in_the_environment_are_no_traceback():
    for name in ("FSDP_VERSION", "ACCELERATE_FP8_MARGIN"):
        asked = {name: LONG, "ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "fp8"}
        assert settings.read_env(asked | {"ACCELERATE_FP8_BACKEND": "TE"})


SCALERS = [
    ("init_scale=0", "0 is not a number, 1e-30 or more"),
    ("init_scale=nan", "nan is not a number, 1e-30 or more"),
    ("growth_factor=1", "1 is not a number, 1.000001 or more"),
    ("backoff_factor=1", "1 is not a number from 1e-30 to 0.999999"),
    ("growth_interval=0", "0 is not a whole number, 1 or more"),
    ("growth=2", "is not one of init_scale=float"),
    ("init_scale", "is not one of init_scale=float"),
]


@pytest.mark.parametrize(("text", "line"), SCALERS)
def test_a_gradient_scaler_out_of_range_is_one_line(capsys, text, line):
    with pytest.raises(SystemExit) as ended:
        args.grad_scaler(text)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and said.startswith("error: --grad_scaler ") and line in said


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_number_of_a_recipe_has_a_range_that_holds_its_default(recipe):
    cls = find.arguments_of(find.recipe(recipe))
    numbers = {name: kind for name, kind in cls.__annotations__.items() if kind in (int, float, int | None)}
    assert numbers and numbers.keys() <= args.RANGES.keys()
    args.parse(cls, [f"--{name}={value}" for name in numbers if (value := getattr(cls, name)) is not None])


VALUES = [  # (section or "", key, value as YAML, what is said of it)
    ("", "main_process_port", "-1", "-1: write a whole number from 1 to 65535, or 0 for any that is free"),
    ("", "main_process_port", "65536", "65536: write a whole number from 1 to 65535"),
    ("", "main_process_port", f"'{LONG[:4000]}'", "111: write a whole number from 1 to 65535"),
    ("", "num_processes", "0", "0: write a whole number from 1 on"),
    ("", "num_processes", "true", "True: write a whole number from 1 on"),
    ("", "num_processes", "1000000000", "1000000000: write a whole number from 1 on"),
    ("", "num_machines", "0", "0: write a whole number from 1 on"),
    ("", "machine_rank", "-1", "-1: write a whole number from 0 on"),
    ("deepspeed_config", "zero_stage", "'1e9'", "1e9: write a whole number from 0 to 3"),
    ("deepspeed_config", "zero_stage", "4", "4: write a whole number from 0 to 3"),
    ("deepspeed_config", "gradient_accumulation_steps", "0", "0: write a whole number from 1 on"),
    ("deepspeed_config", "gradient_clipping", "-0.5", "-0.5: write a number from 0 on"),
    ("deepspeed_config", "gradient_clipping", ".inf", "inf: write a number from 0 on"),
    ("fsdp_config", "fsdp_min_num_params", "-1", "-1: write a whole number from 0 on"),
    ("fsdp_config", "fsdp_min_num_params", "5GB", "5GB: write a whole number from 0 on"),
    ("parallelism_config", "parallelism_config_tp_size", "0", "0: write a whole number from 1 on"),
]
RIGHT = [("", "main_process_port", "0"), ("", "num_processes", "'4'"), ("", "machine_rank", "0"),
         ("", "main_process_port", "null"), ("deepspeed_config", "gradient_clipping", "auto"),
         ("deepspeed_config", "gradient_accumulation_steps", "auto"), ("deepspeed_config", "zero_stage", "'3'"),
         ("fsdp_config", "fsdp_min_num_params", "1e8")]  # fmt: skip


def lines_of(tmp_path, section, key, value):
    """What is said of a key, in a file that is right otherwise."""
    text = f"{section}:\n  {key}: {value}\n" if section else f"{key}: {value}\n"
    kind = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP"}.get(section, "MULTI_GPU")
    (tmp_path / "mine.yml").write_text(f"distributed_type: {kind}\n{text}")
    problems, *_ = check.check(tmp_path / "mine.yml", machine.without_accelerator(), {})
    return [line for line in problems if key in line]


@pytest.mark.parametrize(("section", "key", "value", "said"), VALUES, ids=lambda value: str(value)[:30])
def test_a_value_out_of_range_is_one_line(tmp_path, section, key, value, said):
    [line] = lines_of(tmp_path, section, key, value)
    assert said in line and len(line) < 250


@pytest.mark.parametrize(("section", "key", "value"), RIGHT)
def test_a_value_at_the_end_of_its_range_is_none(tmp_path, section, key, value):
    assert lines_of(tmp_path, section, key, value) == []


@pytest.mark.parametrize("name", ["num_processes", "num_machines", "machine_rank", "main_process_port"])
def test_the_ranges_of_check_s_options_are_those_of_the_keys(name):
    for value, right in (("1", True), ("-1", False), (LONG, False), (str(1 << 21), False)):
        assert (keys.wrong(keys.ROWS[name], value) is None) == right


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGED = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HARMFUL = {  # a file: the bytes, the line
    "bomb.yml": (BOMB, "aliases that make as many"),
    "merged.yml": (MERGED, "aliases that make as many"),
    "merged_often.yml": (
        f"a: &a {{{', '.join(f'k{at}' for at in range(1990))}}}\nb: {{<<: [{'*a,' * 16_000}]}}",
        "aliases that make as many",
    ),
    "itself.yml": ("a: &a [*a]", "nested more than 20 levels deep"),
    "many.json": ("[%s1]" % ("1," * 3000), "more than 2,000 values"),
    "deep.yml": ("[" * 50_000, "nested more than 20 levels deep"),
    "deep_block.yml": ("".join(f"{' ' * n}a:\n" for n in range(300)), "nested more than 20 levels deep"),
    "deep.json": ("[" * 50_000, "nested more than 20 levels deep"),
    "deeper.json": ('{"a":' * 30 + "1" + "}" * 30, "nested more than 20 levels deep"),
    "huge.yml": ("a: 1\n" * 20_000, "longer than 65,536 bytes"),
    "many.yml": ("- 1\n" * 12_000, "more than 2,000 values"),
    "twice.yml": ("num_processes: 2\nnum_processes: 4", "has the key 'num_processes' twice in a section"),
    "twice_inside.yml": ("fsdp_config: {a: 1, 'a': 2}", "has the key 'a' twice in a section"),
    "twice.json": ('{"a": 1, "a": 2}', "has the key 'a' twice in a section"),
    "digits.yml": (f"num_processes: {LONG}", "Exceeds the limit"),
    "digits.json": (f'{{"num_processes": {LONG}}}', "Exceeds the limit"),
    "wide.yml": (f"distributed_type: {'a' * 5000}", "holds a text of 5,000 characters"),
    "hex.yml": (f"num_processes: 0x{LONG}", "a number of more than 64 bits"),
    "sixty.yml": (f"a: {':'.join(['1'] * 400)}.5", "cannot be read: "),
    "bool.yml": ("a: !!bool x", "cannot be read: "),
    "date.yml": ("a: 2020-99-99", "cannot be read: "),
    "escape.yml": ('"\\e[31mnum": 2', "write it on one line, without control characters"),
    "escape.json": ('{"a": ["\\u001b[2J"]}', "write it on one line, without control characters"),
    "raw.yml": ("a: \x1b[31m", "not YAML"),
    "lines.yml": ("mixed_precision: |\n  bf16\n  fp8\n", "write it on one line"),
    "latin.yml": (b"a: caf\xe9", "byte 0xe9 at 6 is not UTF-8"),
    "utf16.yml": ("a: 1".encode("utf-16"), "byte 0xff at 0 is not UTF-8"),
    "object.yml": ("a: !!python/object/apply:os.getcwd []", "not YAML"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_file_that_harms_is_one_line(tmp_path, name):
    content, said = HARMFUL[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(documents.Unreadable) as refused:
        documents.read(path)
    line = str(refused.value)
    assert said in line and line.isprintable() and len(line) < 300


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_not_waited_for(tmp_path, kind):
    path = tmp_path / "mine.json"
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: path.symlink_to(os.devnull)}[kind](path)
    with pytest.raises(documents.Unreadable, match="cannot be read: it is a (folder|special file), not a file"):
        documents.read(path)
    problem, _ = deepspeed.read(str(path))
    assert "mine.json cannot be read: " in problem and problem.isprintable()


def test_a_symlink_of_the_user_s_and_a_shared_section_are_read(tmp_path):
    (tmp_path / "there.yml").write_text("a: &a {x: 1}\nb: {<<: *a, x: 2, x: 2}\nc: [*a, *a]\n")
    (tmp_path / "mine.yml").symlink_to("there.yml")
    assert documents.read(tmp_path / "mine.yml") == {"a": {"x": 1}, "b": {"x": 2}, "c": [{"x": 1}, {"x": 1}]}
    assert documents.of_yaml("a: >-\n  Block,\n  Layer\n") == {"a": "Block, Layer"}


def test_check_ends_with_2_and_one_line(tmp_path):
    (tmp_path / "mine.yml").write_text(BOMB)
    result = launched("./launch.sh", "check", str(tmp_path / "mine.yml"))
    assert result.returncode == 2 and result.stderr == "" and result.stdout.count("\n") == 1
