"""Files that anyone may have made: whatever is in them, readers and what uses them return, or raise the one error of
theirs, in one line that a terminal can print, and touch nothing outside the folder.

What was found once is kept in tests/corpus/<reader>/ and tried in the default run. The slow tests look for more."""

import contextlib
import json
import shutil
import struct
import time

import hypothesis
import pytest
import torch
from conftest import ROOT, train
from fuzz import changed, damaged
from hypothesis import strategies as some
from safetensors.torch import save_file

from faithful.checkpoint import checkpoints
from faithful.disk import readers
from faithful.errors import Refused
from faithful.launch.machine import Memory
from faithful.saving import state
from shared import args, vision
from tools import accelerate_launch, advise, export, judge, predict, records, show

CORPUS = ROOT / "tests" / "corpus"
CLEAN = (Refused, args.Refused, readers.Damaged, OSError)
INPUTS = 150  # of each reader, in the slow tests


# ---- what uses each file: `fast` for every input, `slow` for one in hundred ----


def attempt(use, *words, **options):
    """Calls it. A clean error is one line that can be printed."""
    try:
        return use(*words, **options)
    except CLEAN as error:
        for line in error.args if isinstance(error, Refused | args.Refused) else [str(error)]:
            assert len(str(line)) < 3000, line
            assert str(line).replace("\n", " ", 9).isprintable(), line  # a comparison names each difference in a line


def of_record(run):
    attempt(export.source_of, run)
    attempt(vision.own_run, str(run))
    said = attempt(believing, show.text, run)
    assert said is None or said.replace("\n", "").isprintable(), said
    compared(run)


def believing(use, run):
    with records.believed(run):
        return use(run)


def compared(run):
    read = records.read(run)
    assert read["problem"] is None or read["problem"].isprintable(), read["problem"]
    attempt(judge.make, [read, records.read(run.parent / "run")], "")


def next_of(run):
    attempt(accelerate_launch.what_next, run)


def of_data(run):
    attempt(vision.own_run, str(run))
    attempt(vision.data_config, str(run))
    attempt(export.record_of, run)


def predicted(run):
    """What predict prepares: the model, and how an image becomes its input."""
    if (loaded := attempt(export.load, run)) is not None:
        attempt(predict.classes, loaded[0], loaded[1], [run.parent / "image.png"])


def of_checkpoint(run):
    """The choice of the newest checkpoint, for export and for a run that goes on, and what that reads of it."""
    attempt(export.source_of, run)
    for folder in checkpoints.candidates(run):
        reason = attempt(checkpoints.unsound, folder)
        assert reason is None or reason.isprintable(), reason
        if reason is None and (values := attempt(checkpoints.read_state, folder)):
            attempt(state.read_values, folder, values, {}, ("registered", "groups", "schedulers", "optimizers"))


def of_state(run):
    """As `of_checkpoint`, with the manifest that an author who means harm writes."""
    folder = run / "checkpoint-4"
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["trainer_state.json"] = checkpoints.entry(folder / "trainer_state.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    of_checkpoint(run)


def of_tensors(run):
    for load in (attempt(export.plain_tensors, [run / "checkpoint-4" / "rank0.safetensors"]) or {}).values():
        attempt(load)


def of_report(run):
    if (comparison := attempt(advise.read_comparison, run)) is not None:
        for name in ("single_bf16", "single_fp8"):
            attempt(advise.known_loss, comparison, name)
            attempt(advise.measured_speed, comparison, name)


def nothing(run):
    pass


READERS = {  # name: (file, fast, slow)
    "record": ("run.json", of_record, next_of),
    "metrics": ("metrics.jsonl", compared, next_of),
    "data": ("data.json", of_data, predicted),
    "report": ("report.json", of_report, nothing),
    "manifest": ("checkpoint-4/manifest.json", of_checkpoint, nothing),
    "trainer_state": ("checkpoint-4/trainer_state.json", of_state, nothing),
    "safetensors": ("checkpoint-4/rank0.safetensors", of_tensors, nothing),
}
TENSORS = {
    "0:model/w": torch.ones(2, 3),
    "0:buffer/b": torch.ones(2),
    "0:shape/w": torch.tensor([3, 2]),
    "0:optimizer/w/step": torch.tensor(1.0),
    "random/torch": torch.ones(4, dtype=torch.uint8),
}
LEVELS = {
    "0:all/level": torch.tensor(3), "0:all/model/w": torch.ones(2), "0:rows/model/l.weight": torch.ones(2, 3),
    "0:all/model/l.weight_scale": torch.tensor(2.0), "0:all/model/l.weight_amax": torch.tensor(2.0),
    "0:rank/master/l": torch.ones(2, 3), "0:rank/master/l.scale": torch.tensor(2.0),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{name of a reader: a run's folder of its own}."""
    folder = tmp_path_factory.mktemp("fuzz")
    run = train("single_fp8", folder / "run", "--max_steps", 4, "--save_steps", 2, "--eval_steps", 2)
    shutil.copy(ROOT / "results" / "compare_digits" / "report.json", run)
    runs = {name: shutil.copytree(run, folder / name) for name in READERS}
    for name in ("manifest", "trainer_state", "safetensors"):  # small files of tensors, and no finished model
        shutil.rmtree(runs[name] / "model")
        for at in runs[name].glob("checkpoint-*"):
            save_file(TENSORS, at / "rank0.safetensors")
            manifest = {path.name: checkpoints.entry(path) for path in at.iterdir() if path.name != "manifest.json"}
            (at / "manifest.json").write_text(json.dumps(manifest))
    from PIL import Image

    Image.new("RGB", (9, 7)).save(folder / "image.png")
    (folder / "secret").write_text("mine")
    before = sorted(path.name for path in folder.iterdir())
    yield runs
    assert sorted(path.name for path in folder.iterdir()) == before and (folder / "secret").read_text() == "mine"


@contextlib.contextmanager
def in_place(run, name, content):
    """The folder with these bytes as the reader's file; afterwards it is as it was."""
    file = run / READERS[name][0]
    others = [path for path in (file, file.parent / "manifest.json") if path.exists()]
    kept = {path: path.read_bytes() for path in others}
    file.write_bytes(content)
    try:
        yield
    finally:
        for path, was in kept.items():
            path.write_bytes(was)


# ---- what is known ----

KEPT = sorted(path for path in CORPUS.glob("*/*") if path.parent.name in READERS)


@pytest.mark.parametrize("use", ["fast", pytest.param("slow", marks=pytest.mark.slow)])
def test_what_was_found_once_is_a_clean_error_or_none(made, use):
    assert len(KEPT) > 10
    for path in KEPT:
        name = path.parent.name
        with in_place(made[name], name, path.read_bytes()):
            READERS[name][1 if use == "fast" else 2](made[name])


# ---- what is found ----


def as_bytes(values):
    return values.map(lambda value: json.dumps(value).encode())


def inputs_of(name, content):
    cut = damaged(some.just(content)) | some.binary(max_size=99)
    if name == "metrics":
        rows = as_bytes(changed([json.loads(line) for line in content.splitlines()]))
        return some.lists(rows, min_size=1, max_size=5).map(b"\n".join) | cut
    if name == "safetensors":
        return some.sampled_from([TENSORS, LEVELS]).flatmap(headers) | cut
    return as_bytes(changed([json.loads(content)])) | cut


@some.composite
def headers(draw, tensors):
    """A file of tensors with another header than it should have, or a header's length that is wrong."""
    from safetensors.torch import save

    content = save(tensors)
    size = struct.unpack("<Q", content[:8])[0]
    text = draw(as_bytes(changed([json.loads(content[8 : 8 + size])])))
    said = draw(some.just(len(text)) | some.sampled_from([0, 2**40, 2**63, 2**64 - 1, 10**8, len(text) - 1]))
    return struct.pack("<Q", said) + text + content[8 + size :]


@pytest.mark.slow
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("name", READERS)
def test_no_file_does_more_than_be_refused(made, name, record_property):
    """Each in five seconds of computing, and in 500 MB. (Hypothesis itself keeps what it has drawn.)"""
    run, (file, fast, slow) = made[name], READERS[name]

    @hypothesis.settings(
        max_examples=INPUTS,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(inputs_of(name, (run / file).read_bytes()), some.integers(0, 99))
    def looks(content, number):
        began, memory = time.process_time(), Memory(torch.device("cpu"))
        with in_place(run, name, content):
            fast(run)
            if number == 71:
                slow(run)
        assert time.process_time() - began < 5 and memory.peak() < 500 << 20

    looks()
    record_property("inputs", INPUTS)
