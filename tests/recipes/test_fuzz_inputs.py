"""Readers of what a user gives, tried with anything: each returns, or refuses in printable lines, and touches no file.

The slow tests draw 20,000 inputs for each reader. What they have found is in tests/corpus, which the default run tries.
"""

import contextlib
import json
import os
import socket
from pathlib import Path

import fuzz
import pytest
import yaml
from conftest import CONFIGS, ROOT
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from faithful import Refused
from faithful.config import deepspeed
from faithful.config.settings import read_env
from faithful.launch import machine
from shared import args, sft, text
from tools import check, find

CORPUS = ROOT / "tests" / "corpus"
CPU = machine.without_accelerator()
MANY = settings(max_examples=20_000, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck))  # fmt: skip
SHIPPED = [yaml.safe_load(path.read_text()) for path in sorted(CONFIGS.glob("*.yml"))]
MACHINES = {"num_machines": 2, "num_processes": 4, "machine_rank": 1, "main_process_ip": "10.0.0.1",
            "main_process_port": 29500, "rdzv_backend": "c10d", "same_network": True}  # fmt: skip
HOSTS = {"deepspeed_hostfile": "hosts", "deepspeed_multinode_launcher": "pdsh", "gradient_clipping": 1.0,
         "gradient_accumulation_steps": "auto"}  # fmt: skip
WRITTEN = SHIPPED + [each | MACHINES for each in SHIPPED[::4]]
WRITTEN += [
    each | {"deepspeed_config": each["deepspeed_config"] | HOSTS} for each in WRITTEN if "deepspeed_config" in each
]
OF_DEEPSPEED = [
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "nvme"},
                           "stage3_gather_16bit_weights_on_model_save": True}, "fp16": {"enabled": True},
     "bf16": {"enabled": "auto"}, "gradient_accumulation_steps": "auto", "gradient_clipping": 1.0,
     "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "scheduler": {"type": "WarmupLR", "params": {}}},
    {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4, "tensor_parallel": {"enabled": False},
     "train_micro_batch_size_per_gpu": 8, "amp": {"enabled": False}},
]  # fmt: skip
TURN = [{"role": "user", "content": "one and one?"}, {"role": "assistant", "content": "two"}]
ROWS = [
    {"messages": [TURN, [{"role": "system", "content": "be brief"}, *TURN, *TURN]]},
    {"question": ["a", "b"], "answer": ["c", "d"]},
    {"prompt": ["a"], "completion": ["b"], "source": ["x"]},
]
RECIPE = {path.stem: find.arguments_of(path) for path in sorted((ROOT / "recipes").glob("*.py"))}
LINES = [["vit", "--max_steps", "3", "--learning-rate=1e-3", "--pretrained", "--dtype", "float32", "--seed", "7"],
         *([name, *(word for key, value in vars(of).items() if key in of.__annotations__ and value is not None
                    and not isinstance(value, bool) for word in (f"--{key}", str(value)))] for name, of in RECIPE.items())]  # fmt: skip


def clean(lines):
    """Each is one printable line."""
    for line in lines:
        assert isinstance(line, str) and line and line.isprintable() and len(line) < 5000, ascii(line)


def refused(call, *kinds):
    """What the call returns, or None if it refuses in a clean way."""
    try:
        return call()
    except kinds as error:
        clean(error.args)


def of_config(path):
    problems, not_here, notes, wanted = check.check(path, CPU, {})
    check.missing_option(path, CPU, {})
    clean([*problems, *not_here, *notes, *([check.description(wanted)] if wanted else [])])


def of_deepspeed(path):
    asked = deepspeed.of_file(str(path))
    clean([asked.problem] if asked.problem else [])
    read_env({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)})


class Split(dict):
    @property
    def features(self):
        return self


def of_sft(path):
    """As `shared.sft.chats` does it, after `datasets` has read the file."""
    try:
        columns = json.loads(path.read_bytes())
    except ValueError:
        return
    if not isinstance(columns, dict) or not all(isinstance(column, list) for column in columns.values()):
        return
    if len({len(column) for column in columns.values()}) != 1:
        return
    for packing in (False, True):
        conversations = sft.messages(Split(columns), "mine.json")
        sft.rows(*sft.encode(conversations, TOKENIZER, 128, "mine.json", packing), TOKENIZER, 128, packing)


TOKENIZER = text.train_tokenizer([], 0)
TOKENIZER.chat_template = sft.TEMPLATE


PARSERS = {name: args.parser_of(of, find.Quiet) for name, of in RECIPE.items()}


def of_options(path):
    """The first line names the recipe, each other one is a word."""
    name, *words = path.read_bytes().decode(errors="surrogateescape").split("\n")
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None):  # of --help
        PARSERS.get(name, PARSERS["vit"]).parse_args(words)


def as_yaml(value):
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).encode(errors="surrogatepass")


def as_json(value):
    return json.dumps(value).encode()


def as_words(value):
    return "\n".join(map(str, value) if isinstance(value, list) else [str(value)]).encode(errors="surrogatepass")


READERS = {  # name: what reads, the error with which it may refuse, the names of its files, valid values, their bytes
    "config": (of_config, Refused, ("mine.yml", "mine.json"), WRITTEN, (as_yaml, as_json)),
    "deepspeed": (of_deepspeed, Refused, ("mine.json",), OF_DEEPSPEED, (as_json,)),
    "sft": (of_sft, args.Refused, ("mine.json",), ROWS, (as_json,)),
    "options": (of_options, args.Refused, ("words",), LINES, (as_words,)),
}


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An empty folder to work in, and no network: a name is looked up by its form alone."""

    def lookup(name, *_):
        name.encode("idna")
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tried(reader, folder, name, content):
    read, error, *_ = READERS[reader]
    path = folder / name
    path.write_bytes(content)
    refused(lambda: read(path), error)
    assert os.listdir(folder) == [name]
    path.unlink()


KEPT = sorted(path for path in CORPUS.glob("*/*") if path.parent.name in READERS)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_found_before(alone, path):
    reader = path.parent.name
    name = next((name for name in READERS[reader][2] if Path(name).suffix == path.suffix), "words")
    tried(reader, alone, name, path.read_bytes())


@pytest.mark.parametrize("reader", READERS)
def test_the_seeds_are_valid(alone, reader):
    read, _, names, valid, dumps = READERS[reader]
    for value in valid:
        for name, dump in zip(names, dumps, strict=True):
            (alone / name).write_bytes(dump(value))
            read(alone / name)


@pytest.mark.slow
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("reader", READERS)
def test_nothing_but_a_clean_refusal(alone, reader, record_property):
    _, _, names, valid, dumps = READERS[reader]
    values = fuzz.changed(valid)
    inputs = st.one_of(
        *(
            st.tuples(st.just(name), strategy)
            for name, dump in zip(names, dumps, strict=True)
            for strategy in (values.map(dump), fuzz.damaged(values.map(dump)))
        )
    )
    tries = 0

    @MANY
    @given(inputs)
    def run(drawn):
        nonlocal tries
        tries += 1
        tried(reader, alone, *drawn)

    run()
    assert tries >= 20_000
    record_property("inputs", tries)
