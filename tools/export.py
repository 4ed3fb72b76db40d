"""Writes the weights of any run as one plain state dict (fp32, safetensors, names of the plain model), or as ONNX.

    ./launch.sh export runs/vit-fsdp_fp8-...                      the finished model, else the newest sound checkpoint
    ./launch.sh export RUN --checkpoint 200 --output vit.safetensors
    ./launch.sh export RUN --to onnx                              RUN/export.onnx, for onnxruntime and others

Loading the file needs neither torchao nor TransformerEngine nor amp8:

    model = timm.create_model(...)
    model.load_state_dict(safetensors.torch.load_file("vit.safetensors"), strict=True)

source                        stored as                                             exported as
finished model                plain values                                          the same, in fp32
checkpoint, one file          parameters and buffers under their names              the same, without FP8's histories
checkpoint, FSDP2, HSDP       a piece of dimension 0 on each rank, maybe empty      the pieces, one after another
checkpoint, ZeRO              a flat piece of the fp32 masters on each rank         the same, in its shape
checkpoint, MS-AMP's levels   codes and scales, under FSDP2 a piece on each rank;   codes / scale; under O3 the master's
                              under O3 FP16 masters on the owner

Under O3 the two sources differ by the rounding to e4m3. A finished model holds the FP8 weights, with which the run
trained and was evaluated. A checkpoint holds the FP16 master weights: use these to continue training elsewhere. A model
of TransformerEngine's own blocks gets timm's names; its GELU was the tanh approximation (timm's act_layer="gelu_tanh").

The ONNX file takes any batch size and, for a language model, any length. It is written only if onnx's checker accepts
it and onnxruntime's logits on held-out samples are within 1e-4 of torch's.
"""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import progress  # noqa: E402

with progress.waiting("imports torch"):
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors import SafetensorError
from faithful.checkpoint import checkpoints, tensor_keys, weight_files  # noqa: E402
from faithful.config.strategies import STRATEGIES  # noqa: E402
from faithful.disk import names, replacing, tensor_files  # noqa: E402
from faithful.errors import NotSaved  # noqa: E402
from shared.args import Refused  # noqa: E402
from tools import cli, find, records  # noqa: E402

# Buffers of amp8 beside a converted weight. Only the codes and `weight_scale` are needed for the value.
AMP8_BUFFERS = ("weight_scale", "weight_amax", "amax_history", "scale", "updates")
# Names of tensors in a TransformerEngine block (vision.te_block) -> timm's names. The more specific names come first,
# because a fused LayerNorm's name contains its Linear's.
TE_BLOCK = {
    ".self_attention.layernorm_qkv.layer_norm_": ".norm1.",
    ".self_attention.layernorm_qkv.": ".attn.qkv.",
    ".self_attention.proj.": ".attn.proj.",
    ".layernorm_mlp.layer_norm_": ".norm2.",
    ".layernorm_mlp.fc1_": ".mlp.fc1.",
    ".layernorm_mlp.fc2_": ".mlp.fc2.",
}
# What data.json must have for a recipe's model, and to prepare its inputs.
NEEDED = {"vit": ("image_size", "in_chans", "num_classes"), "bert": ("sequence_length", "classes")}
NEEDED |= dict.fromkeys(("gpt", "sft", "dpo", "embed"), ("sequence_length", "vocab_size"))

Part = Mapping[str, torch.Tensor]  # the tensors of a file
Load = Callable[[], torch.Tensor]  # reads a tensor
Loads = Mapping[str, Load]  # of each name: how its tensor is read


def part_of(path: Path) -> Part:
    """The tensors in a file of a finished model, whose names have no prefix, or those of a checkpoint's only model."""
    if any(name.startswith(tensor_keys.of_model(1)) for name in tensor_files.TensorFile(path)):
        raise Refused("checkpoints of several models cannot be exported: let the run finish, it saves each by itself")
    return tensor_files.TensorFile(path, tensor_keys.of_model(0)) or tensor_files.TensorFile(path)


def record_of(run: Path) -> dict[str, Any]:
    """The run.json of a run, with its data.json, if there is one, as "data"."""
    record = records.record_of(run)
    return record | {"data": records.data_of(run)} if (run / "data.json").exists() else record


def checkpoint_of(run: Path, name: str) -> Path:
    """The run's checkpoint that --checkpoint names: by its step, or by its folder, as the script has called it."""
    folders = [folder for folder in checkpoints.candidates(run) if folder.name == f"checkpoint-{name}"]
    inside = [path for path in (run / name, Path(name)) if path.resolve().is_relative_to(run.resolve())]  # of its plan
    folders += [folder for folder in inside if os.path.isfile(folder / checkpoints.MANIFEST)]
    if not folders:
        steps = [folder.name.removeprefix("checkpoint-") for folder in checkpoints.candidates(run)]
        raise Refused(f"{run} has no checkpoint {name}: there are {', '.join(steps + of_other_names(run)) or 'none'}")
    return folders[0]


def of_other_names(run: Path) -> list[str]:
    """Checkpoints whose folders are not called checkpoint-STEP."""
    found = [path.parent for at in ("*", "*/*") for path in run.glob(f"{at}/{checkpoints.MANIFEST}")]
    return sorted(str(folder.relative_to(run)) for folder in set(found) - set(checkpoints.list_checkpoints(run)))


def source_of(run: Path, step: int | str | None = None) -> tuple[list[Path], str]:
    """Returns (files to read, their source): the finished model, or a checkpoint whose hashes were all verified."""
    record = record_of(run)
    status, strategy = record["status"], record["plan"]["strategy"]
    model = sorted((run / "model").glob("model*.safetensors"))  # in several files if it is large
    try:
        model = [names.inside(run, f"model/{path.name}") for path in model]
    except names.Unsafe as error:
        raise Refused(f"{run}: {error}; copy the folder with cp -rL") from None
    if step is None and status == "finished" and model:
        return model, "the finished model"
    if strategy not in STRATEGIES:
        raise Refused(f"checkpoints of {strategy} cannot be exported: let the run finish, then export its model")
    for folder in checkpoints.candidates(run) if step is None else [checkpoint_of(run, str(step))]:
        reason, files = checkpoints.unsound(folder), {}
        try:
            files = {} if reason else checkpoints.files_of_ranks(folder)
        except FileNotFoundError:
            reason = "the run that still trains has removed it"
        missing = next((n for n in range(checkpoints.ranks_that_saved(folder)) if n not in files), None)
        if STRATEGIES[strategy].replicates and record["plan"]["level"] != "o3":
            missing = None  # each process had the same weights
        if reason is None and missing is not None:
            reason = f"rank{missing}.safetensors is missing, copy it from the disk of the machine that wrote it"
        if reason is None and not files:
            reason = "it has no file of tensors"
        if reason is None:
            files = [files[rank] for rank in sorted(files)]
            replicas = min(record["plan"]["replicas"], len(files))  # hsdp: the first group has all of it
            return [file for file in files[: len(files) // replicas] if has_part(file)], folder.name
        if step is not None:
            raise Refused(f"{folder}: {reason}")
        print(f"skipping {folder}: {reason}", file=sys.stderr)
    others = of_other_names(run)
    what = f"--checkpoint takes one of {', '.join(others)}" if others else "there is nothing to export"
    raise Refused(f"{run} is {status}, with neither a finished model nor a sound checkpoint-STEP: {what}")


def has_part(path: Path) -> bool:
    """Whether this rank's file holds tensors of the model, not only random state."""
    return any("model/" in name for name in part_of(path))


def plain_tensors(files: list[Path]) -> Loads:
    """{name: function that returns the CPU tensor} of the unconverted model, so that it can be written tensor by
    tensor. files: all files of one source, in order of rank."""
    parts, folder = [part_of(path) for path in files], files[0].parent
    cuts = checkpoints.cuts_of(folder) if (folder / checkpoints.STATE).is_file() else ({}, 1)
    if "all/level" in parts[0]:
        tensors = from_levels(parts)
    elif any(tensor_keys.kind(name) == tensor_keys.WEIGHT for name in parts[0]):
        tensors = from_checkpoint(parts, *cuts)
    else:
        tensors = {name: partial(part.__getitem__, name) for part in parts for name in part}
    return {
        timm_name(name): partial(as_fp32, tensor, folder, name)
        for name, tensor in tensors.items()
        # without the scales and histories of FP8 layers; without rotary frequencies, which transformers computes itself
        if ".fp8_" not in f".{name}" and not name.endswith(("_extra_state", "inv_freq"))
    }


def without_adapters(tensors: Loads, record: dict[str, Any]) -> Loads:
    """`tensors` with the adapters (LoRA) of a run of recipes/sft.py or dpo.py merged into the weights."""
    if record["recipe"] not in ("sft", "dpo") or not any(".lora_A." in name for name in tensors):
        return tensors
    from shared import sft

    try:
        return sft.merged(tensors, record["args"]["lora_alpha"] / record["args"]["lora_rank"])
    except (LookupError, TypeError, ArithmeticError) as error:
        raise Refused(f"the adapters cannot be merged ({type(error).__name__}: {names.short(str(error))})") from None


def as_fp32(load: Load, folder: Path, name: str) -> torch.Tensor:
    try:
        tensor = load()
    except (LookupError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
        why = names.printable(str(error).strip().splitlines()[0][:200])
        raise Refused(f"{folder}: {names.short(name)} cannot be put together from the files ({why})") from None
    return tensor.float().contiguous() if tensor.is_floating_point() else tensor.contiguous()


def timm_name(name: str) -> str:
    for theirs, ours in TE_BLOCK.items():
        name = name.replace(theirs, ours)
    return name


def from_checkpoint(parts: list[Part], tp_dims: dict[str, int | None], of_group: int) -> Loads:
    """Joins the tensors of a checkpoint. A single file holds whole tensors. Several files hold one of these:

    - FSDP2's shards, torch.chunk along dimension 0: the last ones are smaller, or empty if there are fewer rows than
      ranks;
    - slices of tensor parallel, in groups of `of_group` ranks: `tp_dims` has the dimension, or None for tensors that
      are the same on every rank of a group, as buffers. With several groups FSDP2 shards each slice over them;
    - ZeRO's flat slices, stored with the tensor's shape.
    """
    tensors = {}
    for key in parts[0]:
        kind, name, _ = tensor_keys.parsed(key)
        if kind in (tensor_keys.BUFFER, tensor_keys.WEIGHT):
            at = tp_dims.get(name) if kind == tensor_keys.WEIGHT else None
            sharded = kind == tensor_keys.WEIGHT and len(parts) > of_group
            slices = [parts[rank::of_group][: None if sharded else 1] for rank in range(1 if at is None else of_group)]
            tensors[name] = partial(joined, slices, key, at or 0, tensor_keys.shape(name))
    return tensors


def joined(slices: list[list[Part]], key: str, dim: int, shape: str) -> torch.Tensor:
    """The tensor of the checkpoint's files. slices: along `dim`, for each the files that have shards of it. shape: the
    key of its shape, if it was stored flat."""
    tensor = put_together([put_together([part[key] for part in parts], 0) for parts in slices], dim)
    first = slices[0][0]
    return tensor.view(first[shape].tolist()) if shape in first else tensor


def put_together(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(tensors, dim) if len(tensors) > 1 else tensors[0]  # which may have no dimensions


def from_levels(parts: list[Part]) -> Loads:
    """Plain weights from amp8's exact state: `all/model/<name>` is the same in every file, `rank/master/<layer>` is in
    one file, and every file holds some rows of `rows/model/<name>`."""
    kinds = ("all/model/", "rows/model/", "rank/master/")
    of_key = {key: part for part in parts for key in part if key.startswith(kinds)}

    def read(key: str | None) -> torch.Tensor:
        if key is None:
            raise LookupError("its codes or its scale are missing")
        return torch.cat([part[key] for part in parts]) if key.startswith("rows/") else of_key[key][key]

    def decoded(codes: str | None, scale: str | None) -> torch.Tensor:
        values, scales = read(codes), read(scale)
        if torch.broadcast_shapes(values.shape, scales.shape) != values.shape:  # what a stranger has made larger
            raise ValueError(f"{tuple(values.shape)} codes, {tuple(scales.shape)} scales")
        return values.float() / scales

    keys = {key.split("/", 2)[2]: key for key in of_key if key.startswith(kinds[:2])}
    tensors = {name: partial(read, key) for name, key in keys.items()}
    for layer in [name.removesuffix(".weight_amax") for name in keys if name.endswith(".weight_amax")]:
        codes, scale = keys.get(f"{layer}.weight"), keys.get(f"{layer}.weight_scale")
        if f"rank/master/{layer}" in of_key:
            codes, scale = f"rank/master/{layer}", f"rank/master/{layer}.scale"
        tensors[f"{layer}.weight"] = partial(decoded, codes, scale)
        for entry in AMP8_BUFFERS:
            tensors.pop(f"{layer}.{entry}", None)
    return tensors


@contextlib.contextmanager
def written_whole(output: Path) -> Iterator[Path]:
    """Yields the path of a temporary file that becomes `output` at the end: a reader sees all of it or nothing."""
    cli.make_folder(output.parent)
    try:
        with replacing.replaced(output) as temporary:
            yield temporary
    except OSError as error:
        raise Refused(f"{output} cannot be written: {error}") from None


def refuse_other_than_a_file(output: Path) -> None:
    """Raises Refused before the work if the output is there and is no regular file."""
    try:
        replacing.check_target(output)
    except OSError as error:
        raise Refused(f"--output {error}") from None


def export(run: Path, output: Path | None = None, step: int | str | None = None, max_shard_size: str = "10GB") -> str:
    """Writes `output` (default: RUN/export.safetensors), above `max_shard_size` in several files with an index. Returns
    a line that says what was written."""
    files, source = source_of(run, step)
    output = output or run / "export.safetensors"
    if output.resolve().parent == files[0].resolve().parent:
        raise Refused(f"--output {output} is in the folder that is read, and would damage it: choose another")
    refuse_other_than_a_file(output)
    tensors = without_adapters(plain_tensors(files), record_of(run))
    shapes = {name: torch.empty_like(load(), device="meta") for name, load in tensors.items()}
    pattern = f"{output.stem}{{suffix}}{output.suffix}"
    try:
        split = split_torch_state_dict_into_shards(shapes, filename_pattern=pattern, max_shard_size=max_shard_size)
    except (ArithmeticError, ValueError) as error:  # of infGB
        raise Refused(f"--max_shard_size {max_shard_size}: {error}") from None
    # One tensor after the other: the model may be larger than the memory.
    write = partial(weight_files.write_split, split, shapes, lambda name: tensors[name](), name=output.name)
    earlier = rf"{re.escape(output.stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(output.suffix)}(\.index\.json)?"
    try:
        weight_files.write_model(output.parent, write, earlier)
    except NotSaved as error:
        raise Refused(str(error)) from None
    written = [output.with_name(name) for name in split.filename_to_tensors]
    values, size = sum(tensor.numel() for tensor in shapes.values()), sum(path.stat().st_size for path in written)
    what = f"{output.name}.index.json and {len(written)} files in {output.parent}" if split.is_sharded else output
    read_from = f"{len(files)} files" if len(files) > 1 else files[0].name
    return f"{what}: {len(tensors)} tensors, {values:,} values, {size:,} bytes, fp32, from {source} ({read_from})"


def load(run: Path, step: int | str | None = None) -> tuple[torch.nn.Module, dict[str, Any], str]:
    """Returns (the plain model with a run's weights, in eval mode and fp32; the run's record; what was read)."""
    record = record_of(run)
    if "data" not in record:
        raise Refused(
            f"{run} has no data.json, as the run of a script of your own: its model is known to the script "
            f"alone. {find.COMMAND} export RUN writes the weights as safetensors"
        )
    if missing := [key for key in NEEDED.get(record["recipe"], NEEDED["vit"]) if record["data"].get(key) is None]:
        raise Refused(f"{run}/data.json lacks {missing[0]}")
    files, source = source_of(run, step)
    tensors = {name: load() for name, load in without_adapters(plain_tensors(files), record).items()}

    try:
        with torch.device("meta"):  # the sizes may be anyone's: nothing is made that the file's tensors do not fill
            wanted = {name: tensor.shape for name, tensor in as_recorded(record, run).named_parameters()}
        if other := [name for name in wanted.keys() & tensors.keys() if tensors[name].shape != wanted[name]]:
            raise Refused(f"{run}: {min(other)} has another shape than in the model of run.json and data.json")
        if more := sorted(wanted.keys() - tensors.keys()):
            raise Refused(f"{run}: weights and model differ: {', '.join(more[:3])}, ...")
        model = as_recorded(record, run)
        shared_weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        shared_weights -= {name for name, _ in model.named_parameters()}
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise Refused(f"{run}: no model for these weights ({str(error).strip().splitlines()[0]})") from None
    if set(missing) - shared_weights or unexpected:
        raise Refused(f"{run}: weights and model differ: {', '.join([*missing, *unexpected][:3])}, ...")
    return model.eval().float(), record, source


def as_recorded(record: dict[str, Any], run: Path) -> torch.nn.Module:
    """The model of the run in this folder with random weights. record: record_of(run)."""
    import transformers

    from shared import diffusion, lm, pairs, resnets, vision

    recipe, name, facts = record["recipe"], record["args"]["model"], record["data"]
    if recipe == "diffusion":
        return diffusion.dit(name, *(facts[key] for key in NEEDED["vit"]))
    if recipe == "vit" or recipe not in NEEDED:
        return vision.as_recorded(record, vision.vit if recipe == "vit" else resnets.resnet)
    if (run / "model" / "config.json").is_file():
        kinds = {"bert": transformers.AutoModelForSequenceClassification, "embed": transformers.AutoModel}
        model = kinds.get(recipe, transformers.AutoModelForCausalLM).from_config(lm.config_of(run / "model"))
        return pairs.without_pooler(model) if recipe == "embed" else model
    sizes = facts["vocab_size"], facts["sequence_length"]
    if recipe == "bert":
        return lm.bert(name, *sizes, len(facts["classes"]))
    return pairs.encoder(name, *sizes) if recipe == "embed" else lm.gpt(name, *sizes)


def held_out(run: Path, record: dict[str, Any], count: int) -> dict[str, torch.Tensor]:
    """{name: tensor} of the model's inputs for some held-out samples of the run's dataset."""
    from shared import dpo, images, pairs, sft, text, vision

    args, recipe = record["args"], record["recipe"]
    tokenizer = str(run / "model") if (run / "model" / "tokenizer.json").is_file() else None
    if recipe in find.PROMPTS:
        readers: dict[str, tuple[Any, ...]] = {
            "gpt": (text.texts, "vocab_size", "packing"),
            "sft": (sft.chats, "packing", "skip_long"),
            "dpo": (dpo.preferences, "skip_long"),
            "bert": (text.labelled, "vocab_size"),
            "embed": (pairs.pairs, "vocab_size"),
        }
        reader, *more = readers[recipe]
        _, part = reader(args["dataset"], args["sequence_length"], *(args[name] for name in more), tokenizer)
    else:
        config = None if recipe == "diffusion" else vision.data_config(args["model"], args["pretrained"])
        _, part = images.images(args["dataset"], args.get("image_size"), config, args["seed"], args["skip_broken"])
    rows = part.__getitems__(range(min(count, len(part))))
    if recipe == "diffusion":
        times = torch.linspace(0, 1, len(rows["labels"]))
        return {"images": rows["pixel_values"], "times": times, "labels": rows["labels"]}
    if recipe in ("embed", "dpo"):  # the first of each pair
        rows = {name: values[:, 0] for name, values in rows.items() if name in ("input_ids", "attention_mask")}
    names = ["pixel_values"] if recipe not in find.PROMPTS else ["input_ids"]
    names += ["attention_mask"] if recipe in ("bert", "embed") else []
    return {name: rows[name] for name in names}


class Logits(torch.nn.Module):
    """Wraps a model of transformers: returns its first output, logits or an encoder's, for tokens and, for an encoder,
    the mask."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        more = {"use_cache": False} if attention_mask is None else {"attention_mask": attention_mask}
        return self.model(input_ids=input_ids, **more)[0]


def to_onnx(run: Path, output: Path | None = None, step: int | str | None = None, samples: int = 16) -> str:
    """Writes `output` (default: RUN/export.onnx). Returns a line that says what was written and how it compares."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  torch's exporter needs it
    except ImportError as error:
        install = "./launch.sh setup --extra onnx" if find.CLONE else "pip install 'accelerate-recipes[onnx]'"
        raise Refused(f"ONNX needs the package {error.name}: {install}") from None
    output = output or run / "export.onnx"
    refuse_other_than_a_file(output)
    model, record, source = load(run, step)
    inputs = held_out(run, record, samples)
    sizes, shorter = {0: torch.export.Dim("batch")}, None
    if record["recipe"] in find.PROMPTS:
        model, length = Logits(model).eval(), inputs["input_ids"].shape[1]
        sizes[1], shorter = torch.export.Dim("tokens", max=length), length // 2
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    program: Any = torch.onnx.export(
        model,
        tuple(tensor[:2] for tensor in inputs.values()),
        dynamo=True,
        verbose=False,
        input_names=list(inputs),
        dynamic_shapes=(sizes,) * len(inputs),
        output_names=["logits"],
    )
    with written_whole(output) as file:
        program.save(file, include_initializers=True)
        onnx.checker.check_model(file)
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        worst = largest_difference(model, session, inputs, shorter)
        if not worst <= 1e-4:  # also where it is nan
            raise Refused(f"onnxruntime's logits are {worst:.1e} away from torch's: {output} is not written")
    count = len(next(iter(inputs.values())))
    return (
        f"{output}: {output.stat().st_size:,} bytes, from {source}; checked on {count} held-out samples: "
        f"onnxruntime's logits are within {worst:.1e} of torch's"
    )


def largest_difference(
    model: torch.nn.Module, session: Any, inputs: dict[str, torch.Tensor], shorter: int | None
) -> float:
    """The largest difference of onnxruntime's logits to torch's: for all samples, one, and all but it. shorter: the
    number of tokens of the last, for another length than the export saw; None for images."""
    worst = 0.0
    for rows, columns in ((slice(None), None), (slice(1), None), (slice(1, None), shorter)):
        part = {name: tensor[rows, :columns] for name, tensor in inputs.items()}
        with torch.no_grad():
            wanted = model(*part.values())
        [logits] = session.run(None, {name: tensor.numpy() for name, tensor in part.items()})
        worst = max(worst, (torch.from_numpy(logits) - wanted).abs().max().item())
    return worst


def main(argv: list[str]) -> None:
    parser = cli.parser("export", __doc__)
    parser.add_argument("run", type=Path, help="the folder of a run, with its run.json")
    parser.add_argument("--to", choices=["safetensors", "onnx"], default="safetensors", help="the format")
    parser.add_argument("--output", type=Path, help="the file to write; default: RUN/export.safetensors, .onnx")
    parser.add_argument(
        "--checkpoint", metavar="STEP", help="this checkpoint, by its step or folder, not the finished model"
    )
    parser.add_argument("--max_shard_size", default="10GB", help="safetensors: of one file; more are written, an index")
    args = parser.parse_args(argv)
    with progress.waiting("exports"):
        if args.to == "onnx":
            said = to_onnx(args.run, args.output, args.checkpoint)
        else:
            said = export(args.run, args.output, args.checkpoint, args.max_shard_size)
    print(said)


if __name__ == "__main__":
    cli.run(main)
