"""Files that a stranger has made, or that are damaged: nothing outside their folder is read, moved, written or deleted,
and what cannot be used is named in one line."""

import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Ranks, refusal, train
from safetensors.torch import load_file, save_file

from faithful.checkpoint import checkpoints, weight_files
from faithful.disk import names, readers, replacing
from faithful.errors import NotSaved, Refused
from shared import images
from tools import export, records, show

STEPS = ("--max_steps", 4, "--save_steps", 2, "--eval_steps", 0, "--logging_steps", 1)
LATEST = ("--resume_from_checkpoint", "latest")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run with checkpoints of the steps 2 and 4."""
    return train("single_fp32", tmp_path_factory.mktemp("made") / "run", *STEPS)


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "downloads" / "run")


@pytest.fixture
def outside(tmp_path):
    """A folder of the user's, with files that nobody may touch."""
    folder = tmp_path / "home"
    (folder / "below").mkdir(parents=True)
    for name in ("secret", ".bashrc", "below/secret"):
        (folder / name).write_text("mine")
    return folder


def untouched(folder):
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return files == [".bashrc", "below/secret", "secret"] and all(
        (folder / name).read_text() == "mine" for name in files
    )


def forge(folder, extra, also=()):
    """Puts a complete checkpoint into `folder`/.checkpoint.tmp whose manifest has the names `extra`, too, as if its
    writer had been killed; the manifest in the folder has the names `also`."""
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = {"bytes": 4, "xxh3_128": "0" * 32}
    staged = folder / ".checkpoint.tmp"
    staged.mkdir()
    for name in manifest:
        shutil.copy(folder / name, staged / name)
    (staged / "manifest.json").write_text(json.dumps(manifest | dict.fromkeys(extra, entry)))
    (folder / "manifest.json").write_text(json.dumps(manifest | dict.fromkeys(also, entry)))


# ---- names ----

NAMES = ["../../../home/secret", "/etc/../{}/secret", "{}/secret", "..", ".", "", "a//b", "a/../b", "a/./b", "a\\b",
         "\x1b[2Jx", "x\ny", "\0", "a" * 300, "a/" * 400, "\ud800", "link", "door/secret", "pipe", "sub"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_name_in_a_file_is_no_way_out_of_its_folder(tmp_path, outside, name):
    folder = tmp_path / "checkpoint-1"
    (folder / "sub").mkdir(parents=True)
    (folder / "link").symlink_to(outside / "secret")
    (folder / "door").symlink_to(outside)
    os.mkfifo(folder / "pipe")
    with pytest.raises(names.Unsafe) as error:
        names.inside(folder, name.format(outside))
    assert str(error.value).isprintable() and len(str(error.value)) < 200
    for plain in ("new.bin", "sub/new", "deep/er/new", "a file.json", "..x", "größe"):
        assert names.inside(folder, plain) == folder / plain


@pytest.mark.parametrize("name", ["../../../home/secret", "{}/.bashrc", "door/below/secret", "door/new", "pipe"])
@pytest.mark.parametrize("use", ["export", "resume", "old manifest"])
def test_a_manifest_that_names_files_elsewhere_moves_and_deletes_nothing(run, outside, use, name):
    """Neither in the manifest of a checkpoint that is to be moved, nor in that of the one whose files go."""
    folder, name = run / "checkpoint-4", name.format(outside)
    (folder / "door").symlink_to(outside)
    os.mkfifo(folder / "pipe")
    forge(folder, *(([], [name]) if use == "old manifest" else ([name],)))
    evil = folder / ".checkpoint.tmp" / name
    if use != "old manifest" and name.startswith("door"):
        evil.parent.mkdir(parents=True)
        evil.write_text("evil")
    shutil.rmtree(run / "model")
    before = sorted(folder.rglob("*"))
    if use == "resume":
        train("single_fp32", run, *STEPS, "--max_steps", 4, *LATEST)
    else:
        export.source_of(run)
    assert untouched(outside)
    if use != "old manifest":
        assert use == "resume" or sorted(folder.rglob("*")) == before


def test_only_what_was_written_is_moved(run):
    """A staged checkpoint with a damaged file stays where it is, and the one that was there is taken."""
    folder = run / "checkpoint-4"
    forge(folder, [])
    staged = folder / ".checkpoint.tmp"
    (staged / "rank0.safetensors").write_bytes(b"evil")
    sound = checkpoints.digest(folder / "rank0.safetensors")
    assert checkpoints.unsound(folder) is None and staged.exists()
    assert checkpoints.digest(folder / "rank0.safetensors") == sound
    shutil.copy(folder / "rank0.safetensors", staged)
    assert checkpoints.unsound(folder) is None and not staged.exists()


@pytest.mark.parametrize("file", ["rank0.safetensors", "trainer_state.json", "manifest.json"])
@pytest.mark.parametrize("kind", ["symlink", "pipe", "folder"])
def test_a_file_of_a_checkpoint_that_is_none_is_named(run, tmp_path, file, kind):
    path, elsewhere = run / "checkpoint-4" / file, tmp_path / "elsewhere"
    shutil.move(path, elsewhere)
    {"symlink": lambda: path.symlink_to(elsewhere), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    assert checkpoints.unsound(run / "checkpoint-4")
    shutil.rmtree(run / "model")
    assert export.source_of(run)[1] == "checkpoint-2"


def test_a_file_that_the_manifest_does_not_name_is_not_exported(run):
    save_file({"0:model/evil": torch.ones(2)}, run / "checkpoint-4" / "rank1.safetensors")
    save_file({"0:model/evil": torch.ones(2)}, run / "checkpoint-4" / "rankx.safetensors")
    shutil.rmtree(run / "model")
    files, source = export.source_of(run)
    assert source == "checkpoint-4" and [path.name for path in files] == ["rank0.safetensors"]


def test_a_checkpoint_s_place_that_is_a_symlink_is_not_written_through(run, outside):
    shutil.rmtree(run / "checkpoint-4")
    (run / "checkpoint-4").symlink_to(outside)
    train("single_fp32", run, *STEPS, "--max_steps", 4, "--resume_from_checkpoint", run / "checkpoint-2", code=2)
    assert untouched(outside)
    said = Path(f"{run}.log").read_text()
    assert "is a symlink" in said and "Traceback" not in said


@pytest.mark.parametrize("keeper", ["../x", 7, -1, True, None, 10**30])
def test_the_rank_in_a_state_is_a_number_of_its_run(run, keeper):
    file = run / "checkpoint-4" / "trainer_state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"keeper": keeper}))
    with pytest.raises(Refused, match=re.escape(f"{file}: keeper is ")):
        checkpoints.read_state(file.parent)


# ---- clocks, and states that are damaged ----


def with_a_clock_that_is_wrong():
    """What a rank runs: steps 1 and 2 are saved five hours ahead, then the clock is set right."""
    import sys
    import time

    from accelerate.utils import ProjectConfiguration

    from faithful import Accelerator

    right, ahead = time.time, [5 * 3600]
    time.time = lambda: right() + ahead[0]
    accelerator = Accelerator(project_config=ProjectConfiguration(sys.argv[2], total_limit=2))
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(1, 7):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        ahead[0] = 5 * 3600 if step <= 2 else 0
        accelerator.save_state()
    accelerator.load_state()
    assert accelerator.steps.taken == 6, accelerator.steps.taken
    accelerator.load_state(Path(sys.argv[2]) / "checkpoint-5")
    accelerator.save_state(Path(sys.argv[2]) / "checkpoint-3")
    accelerator.load_state()
    assert accelerator.steps.taken == 5, "a run that goes on from an older one takes its own newest"
    accelerator.end_training()


def test_a_clock_that_jumps_changes_neither_the_newest_nor_what_is_kept(tmp_path):
    run = train("single_fp32", tmp_path / "run", script=with_a_clock_that_is_wrong)
    assert [path.name for path in checkpoints.list_checkpoints(run)] == ["checkpoint-3", "checkpoint-6"]


def test_checkpoints_whose_counter_is_damaged_are_the_last(tmp_path):
    for step, state in {3: {"counter": 2}, 4: {"counter": 1}, 5: {}, 9: {"counter": "1000"}}.items():
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    assert [checkpoints.number(path) for path in checkpoints.list_checkpoints(tmp_path)] == [3, 4, 9, 5]
    assert checkpoints.next_count(tmp_path) == 3


def test_a_checkpoint_that_cannot_be_read_now_is_not_the_oldest(tmp_path, monkeypatch):
    """Else a save would delete it in place of an older one."""
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        replacing.write_json(tmp_path / f"checkpoint-{step}" / "trainer_state.json", {"counter": step})
    read = readers.bytes_of

    def fails(path, *most):
        if "checkpoint-1" in str(path):
            raise OSError(5, "Input/output error", str(path))
        return read(path, *most)

    monkeypatch.setattr(readers, "bytes_of", fails)
    assert [checkpoints.number(path) for path in checkpoints.list_checkpoints(tmp_path)] == [1, 2]
    assert checkpoints.next_count(tmp_path) == 3


STATES = [
    "",
    "{",
    "[]",
    "null",
    '{"counter": "x"}',
    '{"counter": NaN}',
    "[" * 100_000,
    None,
    b"\xff\xfe",
    '{"counter": -1}',
]


@pytest.mark.parametrize("text", STATES, ids=range(len(STATES)))
def test_a_damaged_state_of_the_newest_checkpoint_is_named(run, text, capsys):
    file = run / "checkpoint-4" / "trainer_state.json"
    file.unlink() if text is None else file.write_bytes(text if isinstance(text, bytes) else text.encode())
    shutil.rmtree(run / "model")
    assert export.source_of(run)[1] == "checkpoint-2"
    assert f"skipping {run}/checkpoint-4: " in capsys.readouterr().err


# ---- what replaces a file ----


def others(folder):
    """{kind: path} of targets that nobody may replace."""
    (folder / "mine").write_text("mine")
    (folder / "link").symlink_to(folder / "mine")
    (folder / "lost").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    return {name: folder / name for name in ("link", "lost", "pipe", "folder")}


@pytest.mark.parametrize("kind", ["link", "lost", "pipe", "folder"])
def test_only_a_file_is_replaced(run, tmp_path, kind):
    target = others(tmp_path)[kind]
    before = os.lstat(target)
    for write in (
        lambda: replacing.write_text(target, "x"),
        lambda: replacing.write_json(target, {}),
        lambda: export.export(run, target),
        lambda: export.written_whole(target).__enter__(),
        lambda: weight_files.write_model(tmp_path, lambda at: (at / kind).write_text("x"), "none"),
    ):
        with pytest.raises((OSError, export.Refused, NotSaved)) as error:
            write()
        assert len(str(error.value).splitlines()) == 1 and kind in str(error.value)
    assert os.lstat(target).st_mode == before.st_mode and os.lstat(target).st_ino == before.st_ino
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "nowhere").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["downloads", "folder", "link", "lost", "mine", "pipe"]


def test_what_is_left_of_a_temporary_file_is_not_written_through(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "a.json.tmp").symlink_to(tmp_path / "mine")
    replacing.write_json(tmp_path / "a.json", [1])
    assert (tmp_path / "mine").read_text() == "mine" and json.loads((tmp_path / "a.json").read_text()) == [1]
    assert not (tmp_path / "a.json.tmp").is_symlink()
    with pytest.raises(ZeroDivisionError), replacing.replaced(tmp_path / "a.json") as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "mine"]
    assert json.loads((tmp_path / "a.json").read_text()) == [1]


def test_the_mode_of_every_file_is_that_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        run = train("single_fp32", tmp_path / "run", "--max_steps", 1, "--save_steps", 1, "--eval_steps", 0)
        export.export(run)
    finally:
        os.umask(before)
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in run.rglob("*") if path.is_file()}
    assert len(modes) > 6 and set(modes.values()) == {"0o640"}, modes


# ---- rows of metrics ----

TORN = [b'{"step": 3, "lo', b'{"step": 3, "loss": 1.0', b'{"step": 3}{"step": 4}', b"\xff\xfe}", b'{"a": "\xed\xa0\x80"}', b"[1]", b"3}", b"[" * 99_999,
        b'"}', b"null"]  # fmt: skip


def test_torn_rows_of_metrics_end_no_run(run):
    """What is whole is kept, with one note. The last line may lack its end, as after a crash."""
    file = run / "metrics.jsonl"
    before = [json.loads(line) for line in file.read_text().splitlines()]
    first, *rest = file.read_bytes().splitlines(keepends=True)
    for last in TORN:
        file.write_bytes(b"\n".join([first, *TORN, b"".join(rest) + last]))
        rows = [row for _, row in readers.rows_of(file)]
        assert [row for row in rows if row is not None] == before and rows.count(None) == len(TORN) + 1
    assert show.main([str(run)]) == 0
    train("single_fp32", run, *STEPS, "--max_steps", 4, "--resume_from_checkpoint", run / "checkpoint-2")
    said = Path(f"{run}.log").read_text()
    assert said.count("metrics.jsonl has 11 lines that are damaged, as after a crash: left out") == 1
    after = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in after] == [row["step"] for row in before] and "Traceback" not in said


def test_a_history_is_rewritten_in_one_step(run, monkeypatch):
    """A kill in between leaves all of it."""
    from faithful.evidence.record import Record

    before = (run / "metrics.jsonl").read_bytes()
    made = Record(SimpleNamespace(device="cpu", config=None), run, run, True)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(replacing.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        made.begin_metrics(2)
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "data.json"])
@pytest.mark.parametrize("kind", ["symlink", "pipe"])
def test_what_a_run_writes_does_not_leave_its_folder(run, outside, name, kind):
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside / ".bashrc") if kind == "symlink" else os.mkfifo(run / name)
    code = 2 if (name, kind) == ("data.json", "pipe") else 0
    train("single_fp32", run, *STEPS, "--max_steps", 4, *LATEST, code=code)
    assert "Traceback" not in Path(f"{run}.log").read_text()
    assert untouched(outside)


@pytest.mark.parametrize("name", ["model", "model/config.json"])
def test_a_model_that_would_be_written_elsewhere_is_refused_at_the_start(run, outside, name):
    shutil.rmtree(run / "model")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(outside / ("below" if name == "model" else ".bashrc"))
    train("single_fp32", run, *STEPS, "--max_steps", 4, *LATEST, code=2)
    assert untouched(outside) and "is a symlink" in Path(f"{run}.log").read_text()


# ---- folders that cannot be written ----


@pytest.mark.parametrize("how", ["a file", "below a file", "full", "read-only"])
def test_a_folder_that_cannot_be_written_is_one_line_at_the_start(tmp_path, how):
    folder = tmp_path / "run"
    if how == "a file":
        folder.touch()
    elif how == "below a file":
        (tmp_path / "file").touch()
        folder = tmp_path / "file" / "run"

    def before(rank):
        import errno

        if how in ("full", "read-only"):  # root may write everywhere
            import shared.data

            number = errno.ENOSPC if how == "full" else errno.EROFS
            real = os.open

            def fails(path, flags, *rest, **options):
                if str(path).startswith(str(folder)) and flags & (os.O_WRONLY | os.O_RDWR):
                    raise OSError(number, os.strerror(number), str(path))
                return real(path, flags, *rest, **options)

            def made(self, *_, **__):
                raise OSError(number, os.strerror(number), str(self))

            os.open = fails
            shared.data.Path.mkdir = made

    log = tmp_path / "log"
    ranks = Ranks("single_fp32", ["--output_dir", str(log), *map(str, (*STEPS, "--output_dir", folder))], before=before)
    assert ranks.wait() == [2], ranks.text()
    said = ranks.text()
    assert said.count("refused: nothing can be written to ") == 1, said
    assert "Traceback" not in said and "goes on" not in said, said


# ---- contents that an author controls ----


def mend(folder):
    """Writes the manifest of what is there, as an author who means harm does."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({name: checkpoints.entry(folder / name) for name in manifest}))
    assert checkpoints.unsound(folder) is None


def changed(state, *path, to):
    *above, last = path
    for key in above:
        state = state[key]
    if to is KeyError:
        del state[last]
    else:
        state[last] = to


CONTENTS = [
    (("plan", "num_processes"), 10**9, "plan.num_processes is 1000000000"),
    (("plan", "num_processes"), True, "plan.num_processes is True"),
    (("plan",), KeyError, "lacks plan"),
    (("steps", "taken"), -1, "steps.taken is -1"),
    (("steps", "taken"), 2.5, "steps.taken is 2.5"),
    (("steps",), [], "steps is a list, not an object"),
    (("steps", "micro"), KeyError, "lacks steps.micro"),
    (("alone",), "no", "alone is 'no'"),
    (("replicas",), 0, "replicas is 0"),
    (("models",), -1, "models is -1"),
    (("loaders",), {}, "loaders is an object, not a list"),
    (("scaler",), 3, "scaler is a number, not an object"),
    (("groups",), [{"!": "tensor", "at": "nowhere"}], "is damaged (KeyError"),
    (("schedulers",), [{"!": "deque", "items": 3, "maxlen": -1}], "is damaged ("),
    (("optimizers",), [{"!": "set", "items": [[]]}], "is damaged (TypeError"),
    (("registered", 0), [], "holds step None and batch None"),
    (("registered", 0, "step"), "2", "holds step '2' and batch 2"),
    (("registered", 0, "batch"), -1, "holds step 2 and batch -1"),
    (("registered", 0, "batch"), 2**62, f"holds step 2 and batch {2**62}"),
    (("registered", 1, "last_epoch"), {}, "does not hold the state of the script's LambdaLR"),
]


@pytest.mark.parametrize(("path", "to", "said"), CONTENTS, ids=range(len(CONTENTS)))
def test_a_state_that_no_run_writes_is_refused_in_one_line(run, path, to, said):
    folder = run / "checkpoint-2"
    state = json.loads((folder / "trainer_state.json").read_text())
    changed(state, *path, to=to)
    (folder / "trainer_state.json").write_text(json.dumps(state))
    mend(folder)
    text = refusal("single_fp32", run, *STEPS, "--resume_from_checkpoint", folder)
    where = "" if "holds step" in said else folder if "state of" in said else f"{folder}/trainer_state.json"
    assert "Traceback" not in text and str(where) in text and said in text, text


def without(tensors, name):
    return {key: tensor for key, tensor in tensors.items() if key != name}


TENSORS = [
    (lambda held, name: held | {name: held[name].to(torch.int8)}, 2, "the checkpoint is of another model: "),
    (lambda held, name: held | {name: held[name].double()}, 2, "the checkpoint is of another model: "),
    (lambda held, name: held | {name: held[name][:-1].clone()}, 2, "the checkpoint is of another model: "),
    (without, 2, "the checkpoint is of another model: "),
    (lambda held, name: held | {name: held[name] * torch.nan}, 1, "is not finite"),
]
MOMENTS = [
    (
        lambda held, name: {key: t for key, t in held.items() if not key.startswith(name.rpartition("/")[0])},
        2,
        "exp_avg",
    ),
    (without, 2, "exp_avg of the optimizer's state is not what was saved"),
    (
        lambda held, name: held | {name: held[name].to(torch.int8)},
        2,
        "exp_avg of the optimizer's state is not what was",
    ),
]


@pytest.mark.parametrize(
    ("place", "change", "code", "said"),
    [*(("model/", *row) for row in TENSORS), *(("optimizer/", *row) for row in MOMENTS)],
    ids=range(8),
)
def test_tensors_that_are_not_the_model_s_are_not_loaded(run, place, change, code, said):
    file = run / "checkpoint-2" / "rank0.safetensors"
    held = load_file(file)
    name = next(key for key in sorted(held) if key.startswith(f"0:{place}") and not key.endswith("/step"))
    save_file(change(held, name), file)
    mend(file.parent)
    train("single_fp32", run, *STEPS, "--resume_from_checkpoint", file.parent, code=code)
    text = Path(f"{run}.log").read_text()
    assert "Traceback" not in text and said in text, text


def torch_state(name, change):
    return lambda held, state: held.update({name: change(held[name])})


def numbers(name, at, to):
    def damage(held, state):
        held[name][at] = to

    return damage


def in_json(*path, to):
    return lambda held, state: changed(state, *path, to=to)


STATE_OF = "does not hold the state of "
VALUES = [  # damage({name: tensor}, trainer_state), what is said
    (lambda held, state: held.pop("random/torch"), f"{STATE_OF}the random generators (KeyError"),
    (torch_state("random/torch", lambda t: t[:10].clone()), "random.torch is [10] torch.uint8 there, and [5056]"),
    (torch_state("random/torch", lambda t: t.float()), "random.torch is [5056] torch.float32 there"),
    (torch_state("random/torch", torch.zeros_like), "Invalid mt19937 state"),
    (torch_state("random/python", lambda t: t[:5].clone()), "random.python is [5] torch.int64 there, and [626]"),
    (numbers("random/python", -1, 10**6), f"{STATE_OF}the random generators (ValueError"),
    (numbers("random/python", 5, -1), f"{STATE_OF}the random generators ("),
    (numbers("random/numpy_rest", 0, 10**6), "numpy's position is 1000000"),  # a segmentation fault in numpy
    (numbers("random/numpy_rest", 0, -5), "numpy's position is -5"),
    (numbers("random/numpy_rest", 0, torch.nan), f"{STATE_OF}the random generators (ValueError"),
    (torch_state("random/numpy", lambda t: t[:3].clone()), "random.numpy is [3] torch.int64 there, and [624]"),
    (torch_state("loader/0/torch", torch.zeros_like), f"{STATE_OF}a data loader (RuntimeError: Invalid mt19937"),
    (torch_state("loader/0/torch", lambda t: t[:10].clone()), f"{STATE_OF}a data loader (ValueError"),
    (torch_state("loader/0/own", lambda t: t.float()), f"{STATE_OF}a data loader (TypeError"),
    (torch_state("loader/0/now", lambda t: t[:1].clone()), f"{STATE_OF}a data loader (RuntimeError"),
    (lambda held, state: held.pop("loader/0/torch"), f"{STATE_OF}a data loader (KeyError"),
    (torch_state("0:optimizer/weight/exp_avg", lambda t: t[:1].clone()), "exp_avg is [1, 4] there, and the parameter"),
    (in_json("loaders", 0, "epoch", to=-1), "loaders.0.epoch is -1"),
    (in_json("loaders", 0, "epoch", to=2**62), f"loaders.0.epoch is {2**62}"),
    (in_json("groups", 0, 0, "lr", to="high"), "param_groups.0.lr is 'high' there, and 0.004"),
    (in_json("groups", 0, 0, "lr", to=None), "param_groups.0.lr is None there"),
    (in_json("groups", 0, 0, "lr", to=float("nan")), "param_groups.0.lr is nan there"),
    (in_json("groups", 0, 0, "lr", to=10**400), f"{STATE_OF}the optimizer (OverflowError"),
    (in_json("groups", 0, 0, "betas", "items", to=[0.9]), "betas is (0.9,) there, and a list of 2 here"),
    (in_json("groups", 0, to=[]), "param_groups is [] there, and a list of 1 here"),
    (in_json("groups", 0, to=3), "param_groups is 3 there"),
    (in_json("groups", 0, 0, "params", to=[]), "params in param_groups would take the place of the model's"),
    (in_json("optimizers", 0, to={"9": {"x": 1}}), f"{STATE_OF}the optimizer (IndexError"),
    (in_json("schedulers", 0, to=[]), f"{STATE_OF}the script's OneCycleLR"),
    (in_json("schedulers", 0, "last_epoch", to="2"), "state.last_epoch is '2' there, and 0 here"),
    (in_json("schedulers", 0, "last_epoch", to=None), "state.last_epoch is None there"),
    (in_json("schedulers", 0, "base_lrs", to=[0.1, 0.1]), "state.base_lrs is [0.1, 0.1] there, and a list of 1 here"),
    (in_json("schedulers", 0, "base_lrs", 0, to=float("nan")), "state.base_lrs.0 is nan there"),
    (in_json("schedulers", 0, "step", to=1), "'step' is none of its values"),
    (in_json("registered", 0, "best", to="low"), f"{STATE_OF}the script's ReduceLROnPlateau"),
]  # fmt: skip


def that_loads_what_is_damaged():
    """What a rank runs: it saves step 1, and loads it once for each of VALUES. Writes what was said to a file."""
    from torch.optim import lr_scheduler

    from faithful import Accelerator
    from faithful.errors import Refused

    folder = Path(sys.argv[2])
    accelerator = Accelerator(project_dir=folder)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    one_cycle = lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    loader = torch.utils.data.DataLoader(torch.ones(8, 4), 2, shuffle=True, generator=torch.Generator())
    model, optimizer, one_cycle, loader = accelerator.prepare(model, optimizer, one_cycle, loader)
    accelerator.register_for_checkpointing(plateau)
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        accelerator.save_state(folder / "sound")
        break
    accelerator.load_state(folder / "sound")  # and waits for it
    said = []
    for damage, _ in VALUES:
        checkpoint = shutil.copytree(folder / "sound", folder / "damaged", dirs_exist_ok=True)
        held, state = (load_file(checkpoint / "rank0.safetensors"), checkpoint / "trainer_state.json")
        values = json.loads(state.read_text())
        damage(held, values)
        save_file(held, checkpoint / "rank0.safetensors")
        state.write_text(json.dumps(values))
        mend(checkpoint)
        try:
            accelerator.load_state(checkpoint)
            said.append("it is loaded")
        except Refused as error:
            said.append(str(error))
    (folder / "said.json").write_text(json.dumps(said))
    accelerator.load_state(folder / "sound")
    accelerator.end_training()


@pytest.fixture(scope="module")
def said_of_values(tmp_path_factory):
    run = train("single_fp32", tmp_path_factory.mktemp("values") / "run", script=that_loads_what_is_damaged)
    return json.loads((run / "said.json").read_text())


@pytest.mark.parametrize("row", range(len(VALUES)))
def test_a_value_that_no_run_writes_is_refused_in_one_line(said_of_values, row):
    """What is loaded has the type, the shape and the length of what is there."""
    assert VALUES[row][1] in said_of_values[row] and len(said_of_values[row].splitlines()) == 1, said_of_values[row]


# ---- images and secrets ----


def test_only_the_formats_of_data_sets_are_opened(tmp_path):
    """By their content: an EPS named .png would start Ghostscript."""
    from PIL import Image

    picture = Image.new("RGB", (8, 8))
    for suffix, kind in (
        ("png", "PNG"),
        ("jpg", "JPEG"),
        ("bmp", "BMP"),
        ("gif", "GIF"),
        ("tif", "TIFF"),
        ("webp", "WEBP"),
    ):
        picture.save(tmp_path / f"a.{suffix}", kind)
        assert images.read_image({"path": str(tmp_path / f"a.{suffix}"), "bytes": None}, 0).size == (8, 8)
    for kind in ("EPS", "PDF", "TGA", "ICO"):
        picture.save(tmp_path / "b.png", kind)
        with pytest.raises(images.Broken, match=re.escape(f"{tmp_path}/b.png (index 3) cannot be read as an image")):
            images.read_image({"path": str(tmp_path / "b.png"), "bytes": None}, 3)


def test_an_image_above_pil_s_limit_is_named(tmp_path, monkeypatch):
    from PIL import Image

    Image.new("RGB", (30, 30)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 899)
    with pytest.warns(Image.DecompressionBombWarning), pytest.raises(images.Broken, match=r"a.png.*30 x 30 pixels"):
        images.read_image({"path": str(tmp_path / "a.png"), "bytes": None}, 0)


def with_secrets():
    from faithful import Accelerator

    accelerator = Accelerator(project_dir=sys.argv[2])
    values = {
        "hub_token": "swordfish",
        "lr": 0.1,
        "pad_token": "<pad>",
        "url": "https://me:swordfish@host/x",
        "max_tokens": 3,
    }
    accelerator.init_trackers("mine", values | {"wandb": {"api_key": "swordfish"}, "note": "hf_swordfishswordfish"})
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    raise ValueError("no answer from https://me:swordfish@host")


def test_secrets_are_not_in_the_record(tmp_path):
    def before(rank):
        from faithful import plan

        plan.launch_line = lambda: (None, None)
        sys.argv += [
            "--token",
            "swordfish",
            "--wandb-api-key=swordfish",
            "--pad_token",
            "<pad>",
            "--password",
            "swordfish",
        ]

    train("single_fp32", tmp_path / "run", script=with_secrets, before=before, code=1)
    text = (tmp_path / "run" / "run.json").read_text()
    assert "swordfish" not in text, re.findall(".*swordfish.*", text)
    made = json.loads(text)
    assert made["args"] | {"x": 0} == {"hub_token": "***", "lr": 0.1, "pad_token": "<pad>", "url": "https://me:***@host/x",
                           "max_tokens": 3, "wandb": {"api_key": "***"}, "note": "***", "x": 0}  # fmt: skip
    assert made["command"].endswith("--token *** --wandb-api-key=*** --pad_token <pad> --password ***")


@pytest.mark.parametrize(
    "path", [("final", "metrics"), ("seen", "loss_curve"), ("plan", "num_processes"), ("evidence",)]
)
@pytest.mark.parametrize("to", [KeyError, -1, "x", [3], {"a": {}}], ids=str)
def test_a_record_that_no_run_writes_is_shown_or_refused(run, path, to):
    """In one line that names the file; a comparison leaves the run out."""
    made = json.loads((run / "run.json").read_text())
    changed(made, *path, to=to)
    (run / "run.json").write_text(json.dumps(made))
    try:
        show.main([str(run)])
    except export.Refused as error:
        assert f"{run}/run.json" in str(error) and len(str(error).splitlines()) == 1
    assert records.read(run)["folder"] == run
