"""Checkpoints that are whole or not there.

`checkpoint-<optimizer step>/` holds the tensors as safetensors (one file per rank that has parts of its own), the rest
as `trainer_state.json`, and `manifest.json` with size and sha256 of every file, written last. It is written as
`checkpoint-<step>.tmp`, fsynced and renamed: what has its name is complete. Nothing here is a pickle.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shared import fp8, te, zero
from shared.args import Refused
from shared.precision import inner, local, named

STATE, MANIFEST = "trainer_state.json", "manifest.json"


def stored(model):
    """{"model/<name>", "buffer/<name>" or "te/<name>": live tensor} of everything a model is."""
    for module in model.modules():
        if isinstance(module, FSDPModule):  # an evaluation leaves some of them gathered, as copies in 16 bit
            module.reshard()
    parts = {f"model/{name}": parameter for name, parameter in named(model.named_parameters())}
    derived = {f"{at}.{name}".lstrip(".") for at, m in model.named_modules() for name in m._non_persistent_buffers_set}
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name not in derived]
    parts |= {f"buffer/{name}": buffer for name, buffer in named(buffers)}
    return parts | {f"te/{name}": tensor for name, tensor in named(te.state(model).items())}


def levels(model):
    """amp8, where the model is on one of its levels: codes, scales and histories are its own business."""
    converted = any(hasattr(parameter, "amp8_linear") for parameter in model.parameters())
    return fp8.ours("amp8") if converted else None


def tensors(model, optimizer):
    """{"model/<name>" and "optimizer/<name>/<state>": this rank's part}, on the CPU."""
    if amp8 := levels(model):
        return {name: tensor.cpu().clone() for name, tensor in amp8.exact_state(model, inner(optimizer)).items()}
    parts = stored(model)
    if engine := zero.of(optimizer):
        parts = {name: tensor for name, tensor in parts.items() if not name.startswith("model/")}
        parts |= zero.tensors(named(model.named_parameters()), engine)
        return {name: tensor.detach().cpu().clone() for name, tensor in parts.items()}
    for name, parameter in named(model.named_parameters()):
        for key, value in inner(optimizer).state.get(parameter, {}).items():
            parts[f"optimizer/{name}/{key}"] = value
    return {name: local(tensor.detach()).cpu().contiguous() for name, tensor in parts.items()}


def restore(model, optimizer, parts):
    """Puts `tensors` back in place, bit for bit. Raises Refused where names or shapes are another model's."""
    if amp8 := levels(model):
        try:
            return amp8.load_exact_state(model, inner(optimizer), parts)
        except (KeyError, ValueError) as error:
            raise Refused(f"the checkpoint is of another model: {error}") from None
    own, engine = stored(model), zero.of(optimizer)
    if engine:
        own = {name: part for name, part in tensors(model, optimizer).items() if not name.startswith("optimizer/")}
    found = {name for name in parts if not name.startswith("optimizer/")}
    wrong = sorted(own.keys() ^ found) or [n for n in own if local(own[n]).shape != parts[n].shape]
    if wrong:
        raise Refused(f"the checkpoint is of another model: {', '.join(wrong[:3])}, ... differ")
    if engine:
        zero.restore(named(model.named_parameters()), engine, parts)
        own = {name: tensor for name, tensor in stored(model).items() if not name.startswith("model/")}
    with torch.no_grad():
        for name, tensor in own.items():
            local(tensor).copy_(parts[name])
    if engine:
        return
    torch_optimizer = inner(optimizer)
    index = {id(p): i for i, p in enumerate(p for group in torch_optimizer.param_groups for p in group["params"])}
    state = {}
    for name, parameter in named(model.named_parameters()):
        prefix = f"optimizer/{name}/"
        values = {key.removeprefix(prefix): value for key, value in parts.items() if key.startswith(prefix)}
        if isinstance(parameter, DTensor):
            mesh = {"device_mesh": parameter.device_mesh, "placements": parameter.placements}
            mesh |= {"shape": parameter.shape, "stride": parameter.stride()}
            values = {
                key: DTensor.from_local(v.to(local(parameter).device), **mesh) if v.dim() else v
                for key, v in values.items()
            }
        if values:
            state[index[id(parameter)]] = values
    torch_optimizer.load_state_dict({"state": state, "param_groups": torch_optimizer.state_dict()["param_groups"]})


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path):
    """Past the page cache: a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path, value):
    """Whole or not at all, also for whoever reads it meanwhile."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    sync(temporary)
    os.replace(temporary, path)


def save(accelerator, folder, parts, state, every_rank, keep):
    """Write `folder`; True on every rank if it is there and whole. Called by all ranks.

    parts: {name: tensor} of this rank, written by rank 0 alone unless `every_rank` has its own. state: JSON values.
    keep: how many complete checkpoints stay beside each other, the new one included; older ones go only afterwards.
    A failure (a full disk, say) on any rank leaves the earlier checkpoints as they were.
    """
    main, temporary = accelerator.is_main_process, folder.with_name(folder.name + ".tmp")
    error, entry = None, {}
    if main:
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
        except OSError as problem:
            error = str(problem)
    accelerator.wait_for_everyone()
    if main or every_rank:
        try:
            path = temporary / f"rank{accelerator.process_index}.safetensors"
            save_file(parts, path)
            sync(path)
            entry = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}}
        except (OSError, SafetensorError) as problem:
            error = error or str(problem)
    outcomes = gather_object([(error, entry)])
    error = next((problem for problem, _ in outcomes if problem), None)
    if main and not error:
        try:
            write_json(temporary / STATE, state)
            files = {name: value for _, each in outcomes for name, value in each.items()}
            path = temporary / STATE
            files[STATE] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
            write_json(temporary / MANIFEST, files)
            sync(temporary)
            shutil.rmtree(folder, ignore_errors=True)  # an unsound one of the same step; a sound one is never redone
            os.rename(temporary, folder)
            sync(folder.parent)
        except OSError as problem:
            error = str(problem)
    [error] = broadcast_object_list([error])
    if main and error:
        shutil.rmtree(temporary, ignore_errors=True)
        print(f"warning: {folder} could not be written ({error}); training goes on", flush=True)
    elif main:
        for old in list_checkpoints(folder.parent)[max(keep, 1) :]:
            shutil.rmtree(old, ignore_errors=True)
    return not error


def list_checkpoints(output_dir):
    """Folders named checkpoint-<step>, newest first."""
    matches = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in Path(output_dir).glob("checkpoint-*")]
    return [path for match, path in sorted(matches, key=lambda m: -int(m[0][1]) if m[0] else 0) if match]


def unsound(folder):
    """Why a checkpoint cannot be trusted, or None. Reads every byte."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        names = {path.name for path in folder.iterdir()}
    except (OSError, ValueError) as error:
        return f"no readable {MANIFEST} ({type(error).__name__})"
    if names != {*manifest, MANIFEST}:
        return f"files {sorted(names ^ {*manifest, MANIFEST})} are missing or were added"
    for name, entry in manifest.items():
        if (folder / name).stat().st_size != entry["bytes"] or sha256(folder / name) != entry["sha256"]:
            return f"{name} is not what was written"
    return None


def find(accelerator, wanted, output_dir):
    """The checkpoint to resume from (`latest`, or a folder), agreed by all ranks; None where `latest` finds none.

    `latest` passes over unsound checkpoints and says so; a folder asked for by name must be sound.
    """
    candidates = list_checkpoints(output_dir) if wanted == "latest" else [Path(wanted)]
    [candidates] = broadcast_object_list([candidates])
    for folder in candidates:
        reasons = [reason for reason in gather_object([unsound(folder)]) if reason]
        if not reasons:
            return folder
        if wanted != "latest":
            raise Refused(f"--resume_from_checkpoint {folder}: {reasons[0]}")
        accelerator.print(f"skipping {folder}: {reasons[0]}")
    return None


def read_state(folder):
    """`trainer_state.json` of a checkpoint that `find` has verified."""
    try:
        return json.loads((folder / STATE).read_text())
    except ValueError as error:
        raise Refused(f"{folder / STATE} is not JSON: {error}") from None


def read_tensors(folder, rank, every_rank):
    path = folder / f"rank{rank if every_rank else 0}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise Refused(f"{path} cannot be read as safetensors: {error}") from None
