"""Atomic checkpoints.

`checkpoint-<optimizer step>/` holds the tensors as safetensors (one file per rank), the rest as `trainer_state.json`,
and `manifest.json` with size and hash of every file, written last. The folder is written as `checkpoint-<step>.tmp`,
fsynced and renamed, so a folder with the final name is complete. No file is a pickle.

The tensors of prepared model number i, in Accelerate's order, have these names in a rank's file:
    i:model/<name>               a parameter, or what the rank holds of it; under ZeRO its fp32 master
    i:buffer/<name>              a persistent buffer
    i:optimizer/<name>/<state>   the optimizer's state of a parameter
    i:shape/<name>               ZeRO: the shape of the parameter of which model/<name> is a flat fragment
    i:te/<layer>                 TransformerEngine's scales and histories
    i:all/..., i:rows/...        what amp8.exact_state returns, in place of the others, under MS-AMP's levels
Beside them are random/<generator>, and the tensors of JSON values in trainer_state.json (values.py).

A folder that exists keeps what is in it. There the files are written to a folder inside, `.checkpoint.tmp`, and moved
when they are complete. A process that is killed while it moves them leaves `.checkpoint.tmp` with its manifest, and
whoever looks at the checkpoint next moves the rest (`settle`).
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections import deque
from pathlib import Path

import torch
import xxhash
from accelerate.utils import broadcast_object_list, gather_object
from accelerate.utils.modeling import get_state_dict_offloaded_model
from huggingface_hub import save_torch_state_dict, split_torch_state_dict_into_shards
from safetensors import SafetensorError

from faithful import launcher, tensor_files
from faithful.errors import NotSaved, Refused
from faithful.tensors import local

STATE, MANIFEST = "trainer_state.json", "manifest.json"
STAGED = ".checkpoint.tmp"  # in a folder that existed before
WEIGHTS = {  # file names of save_model, with safe_serialization and without
    True: r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?",
    False: r"pytorch_model(-\d{5}-of-\d{5})?\.bin(\.index\.json)?",
}
# Formats of trainer_state.json. 1 had no number and no random states, 2 no skip list, 3 no models without an optimizer.
FORMAT, READABLE = 4, (3, 4)


def digest(path, kind="xxh3_128"):
    """The hash of a file. xxh3_128 finds every damage by accident, and sha256 takes ten times as long as reading."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128 if kind == "xxh3_128" else kind).hexdigest()


def sync(path):
    """Writes a file, or a folder's entries, from the page cache to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path, value):
    """Writes a file atomically: a reader sees the old content or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    sync(temporary)
    os.replace(temporary, path)


def entry(path):
    return {"bytes": path.stat().st_size, "xxh3_128": digest(path)}


def known(entry):
    """(bytes, name of the hash, hash) of an entry of a manifest. Raises LookupError or TypeError if it is damaged."""
    kind = "xxh3_128" if "xxh3_128" in entry else "sha256"  # as earlier versions wrote it
    return entry["bytes"], kind, entry[kind]


class Save:
    """A checkpoint that is being written to `folder`. Every rank makes one, or if state["alone"] the main process.

    state: JSON values, of rank 0. keep: number of complete checkpoints to keep, with the new one, which is written
    before older ones are deleted; None keeps all. After an error on any rank (a full disk, say) the earlier checkpoints
    are still there.
    """

    def __init__(self, accelerator, folder, state, keep=None):
        self.rank, self.main, self.alone = accelerator.process_index, accelerator.is_main_process, state["alone"]
        self.state, self.keep, self.error, self.thread = state, keep, None, None
        folder = folder.resolve()
        existed = folder.exists()
        if not self.alone:  # a script may give each process a temporary folder of its own: the main process's is used
            folder, existed = broadcast_object_list([folder, existed])
        self.folder, self.temporary = folder, folder / STAGED if existed else folder.with_name(folder.name + ".tmp")
        if self.main:
            settle(folder)
            shutil.rmtree(self.temporary, ignore_errors=True)
            try:
                self.temporary.mkdir(parents=True)
            except OSError as problem:
                self.error = str(problem)
        self.together("make the checkpoint's folder")

    def together(self, what, value=None):
        """Waits for the other ranks, and returns what each says."""
        return [value] if self.alone else launcher.wait_for_all(what, value)

    def write(self, parts):
        """Writes {name: tensor} of this rank, and completes the checkpoint when all ranks have. Sets `error` to the
        first error of any rank, as text, or None. No collective is called: this may run in a thread."""
        written, path = {}, self.temporary / f"rank{self.rank}.safetensors"
        try:
            written = {path.name: tensor_files.write(parts, path)}
        except OSError as problem:
            self.error = self.error or str(problem)
        outcomes = self.together("write their part of the checkpoint", [self.error, written])
        self.error = next((error for error, _ in outcomes if error), None)
        if self.main and not self.error:
            try:
                self.complete({name: of_file for _, files in outcomes for name, of_file in files.items()})
            except OSError as problem:
                self.error = str(problem)
        [self.error, *_] = self.together("complete the checkpoint", self.error)
        if self.main and self.error:
            shutil.rmtree(self.temporary, ignore_errors=True)
        elif self.main and self.keep:
            older = [path for path in list_checkpoints(self.folder.parent) if path != self.folder]
            for old in older[self.keep - 1 :]:
                shutil.rmtree(old, ignore_errors=True)

    def complete(self, files):
        """Writes the manifest, and moves the files to their place. files: {name: size and hash} of the ranks' files."""
        write_json(self.temporary / STATE, self.state)
        for path in sorted(path for path in self.temporary.rglob("*") if path.is_file()):
            name = str(path.relative_to(self.temporary))
            files[name] = files.get(name) or entry(path)
        write_json(self.temporary / MANIFEST, files)
        sync(self.temporary)
        if self.folder.exists():  # the script may have made it in the meantime
            os.rename(self.temporary, self.folder / STAGED)
            settle(self.folder)
        else:
            os.rename(self.temporary, self.folder)
            sync(self.folder.parent)

    def behind(self, parts):
        """Writes in a thread, while training goes on. parts: tensors that training does not change."""

        def run():
            try:
                with launcher.writing():
                    self.write(parts)
            except Exception as problem:  # another process has ended: this one ends of it in its next collective
                self.error = str(problem)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def finished(self):
        return self.thread is None or not self.thread.is_alive()

    def wait(self, seconds=None):
        if self.thread is not None:
            self.thread.join(seconds)


def settle(folder):
    """Moves a complete checkpoint from `folder`/.checkpoint.tmp to `folder`, and deletes the files of the one that was
    there. Other files stay. Several processes may call it at once."""
    staged = folder / STAGED
    try:
        new = json.loads((staged / MANIFEST).read_text())
    except (OSError, ValueError):
        return  # nothing there, or not complete
    with contextlib.suppress(OSError, ValueError):
        for name in json.loads((folder / MANIFEST).read_text()).keys() - new.keys():
            (folder / name).unlink(missing_ok=True)
    for name in (*new, MANIFEST):  # the manifest last: until then this function can be called again
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # moved already
            os.replace(staged / name, folder / name)
    sync(folder)
    shutil.rmtree(staged, ignore_errors=True)


def number(folder):
    """The number in `checkpoint-<number>`, or in Accelerate's automatic name `checkpoint_<number>`; else None."""
    match = re.fullmatch(r"checkpoint[-_](\d+)", folder.name)
    return match and int(match[1])


def list_checkpoints(output_dir):
    """The checkpoint folders in `output_dir`, newest first: by the time when they were written, because a run that goes
    on from an older one writes smaller numbers than those of the steps that it gave up. Then by number."""

    def age(folder):
        try:
            return json.loads((folder / STATE).read_text()).get("saved", 0), number(folder)
        except (OSError, ValueError, AttributeError):
            return 0, number(folder)  # incomplete, damaged, or from before the time was saved

    found = [path for path in Path(output_dir).glob("checkpoint*") if number(path) is not None]
    return sorted(found, key=age, reverse=True)


def unsound(folder, rank=0, processes=1):
    """Why a checkpoint is incomplete or damaged, or None. Files of others are ignored. Reads every byte; of several
    processes each reads the files of its rank, and the first one those of no rank too."""
    try:
        settle(folder)
        manifest = {name: known(wanted) for name, wanted in json.loads((folder / MANIFEST).read_text()).items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"no readable {MANIFEST} ({type(error).__name__})"
    if missing := sorted(name for name in manifest if not (folder / name).is_file()):
        return f"files {missing} are missing"
    for name, (size, kind, value) in manifest.items():
        own = re.fullmatch(r"rank(\d+)\.safetensors", name)
        reads = (int(own[1]) if own else 0) % processes == rank
        if (folder / name).stat().st_size != size or (reads and digest(folder / name, kind) != value):
            return f"{name} is not what was written"
    return None


def find(accelerator, wanted, output_dir):
    """The checkpoint to resume from, the same on all ranks: the folder `wanted`, or if it is None the newest intact one
    in output_dir, or None if there is none. It may be one of Accelerate's. Raises Refused if `wanted` is damaged."""
    candidates = list_checkpoints(output_dir) if wanted is None else [Path(wanted)]
    [candidates] = broadcast_object_list([candidates])
    for folder in candidates:
        here = accelerator.process_index, accelerator.num_processes
        reason = None if is_accelerates(folder) else unsound(folder, *here)
        launcher.wait_for_all("verify the checkpoint")
        reasons = [reason for reason in gather_object([reason]) if reason]
        if not reasons:
            return folder
        if wanted is not None:
            raise Refused(
                f"the checkpoint {folder} cannot be resumed: {reasons[0]}. Take another one, or none: "
                "then the newest complete one of the project folder is loaded"
            )
        accelerator.print(f"skipping {folder}: {reasons[0]}")
    return None


def is_accelerates(folder):
    """Whether Accelerate itself wrote the checkpoint `folder`."""
    return not (folder / MANIFEST).exists() and any(folder.glob("random_states_*.pkl"))


def read_state(folder):
    """`trainer_state.json` of a checkpoint that `find` has verified."""
    try:
        state = json.loads((folder / STATE).read_text())
    except ValueError as error:
        raise Refused(f"{folder / STATE} is not JSON ({error}): take another checkpoint") from None
    if state.get("format") not in READABLE:
        raise Refused(
            f"{folder} was written in format {state.get('format', 1)}, this version reads {READABLE[0]} and "
            f"{READABLE[1]}: resume it with the version that wrote it, or export its weights and start from them"
        )
    return state


def tensors_of(folder, rank, prefix=""):
    """The tensors in one rank's file whose names begin with `prefix`."""
    return tensor_files.TensorFile(folder / f"rank{rank}.safetensors", prefix)


def write_weights(weights, folder, max_shard_size, safe_serialization):
    """Writes {name: tensor} as `model.safetensors`, in several files above `max_shard_size`."""
    plain = {name: alone(weight) for name, weight in weights.items()}
    options = {"max_shard_size": max_shard_size, "safe_serialization": safe_serialization}
    write_model(folder, lambda temporary: save_torch_state_dict(plain, temporary, **options), safe_serialization)


def stream_weights(pieces, folder, max_shard_size, main):
    """As `write_weights`, of a model that no process holds whole: one tensor after the other. Every rank calls it.

    pieces: {name: (a tensor of its shape and dtype, function that returns the whole tensor)}; every rank calls these
    functions, in one order. main: whether this process writes."""
    like = {name: torch.empty_like(tensor, device="meta") for name, (tensor, _) in pieces.items()}
    split = split_torch_state_dict_into_shards(like, max_shard_size=max_shard_size)
    files = {file: {name: like[name] for name in names} for file, names in split.filename_to_tensors.items()}
    left = deque(name for tensors in files.values() for name in tensor_files.in_order(tensors))

    def load(name):
        assert left.popleft() == name
        return pieces[name][1]()

    def write(temporary):
        for file, tensors in files.items():
            tensor_files.write(tensors, temporary / file, load, {"format": "pt"})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            write_json(temporary / "model.safetensors.index.json", index)

    try:
        if main:
            write_model(folder, write, safe_serialization=True)
    finally:
        while left:  # the others' share of the work, or after an error what the other ranks wait for
            load(left[0])
        launcher.wait_for_all("write the weights")


def write_model(folder, write, safe_serialization):
    """Calls `write(temporary folder)` and moves the files that it writes to `folder`. Of the files there, only those of
    an earlier save are replaced. Raises NotSaved; then they are still there."""
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".model-", dir=folder))
        write(temporary)
        new = sorted(path.name for path in temporary.iterdir())
        for name in new:
            sync(temporary / name)
        for name in new:
            os.replace(temporary / name, folder / name)
        sync(folder)
        for old in folder.iterdir():  # of a save in another number of files, which a loader could prefer
            if re.fullmatch(WEIGHTS[safe_serialization], old.name) and old.name not in new:
                old.unlink()
    except (OSError, RuntimeError, SafetensorError) as problem:
        why = getattr(problem, "strerror", None) or str(problem).splitlines()[0]
        raise NotSaved(
            f"{folder}: the weights could not be written ({why}): free its disk, or save to another folder"
        ) from None
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


def offloaded_weights(model):
    """{name: tensor} on the CPU of a model that Accelerate's hooks have offloaded to the CPU or a disk. Accelerate's
    own function leaves out the outermost module's parameters."""
    own = {name: tensor for name, tensor in model.state_dict().items() if "." not in name}
    hook = getattr(model, "_hf_hook", None)
    kept = next((one.weights_map for one in getattr(hook, "hooks", [hook]) if getattr(one, "weights_map", None)), {})
    own = {name: kept[name] if tensor.is_meta else tensor for name, tensor in own.items()}
    return get_state_dict_offloaded_model(model) | own


def alone(tensor):
    """The tensor on the CPU, in memory of its own: FSDP2 gathers several tensors into one storage."""
    tensor = local(tensor.detach()).cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
