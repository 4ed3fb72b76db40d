"""Exports the weights of any run, for programs that know nothing of FP8."""

import functools
import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, record, resumed, train, weights, write_record
from safetensors.torch import load_file, save_file

from faithful.checkpoint import checkpoints, weight_files
from shared import vision
from shared.args import Refused
from tools import cli, export as tool

CONFIGS = ("single_fp8", "fsdp_fp8", "ddp_fp8_te", "ddp_fp8_msamp_o2", "ddp_fp8_msamp_o3", "fsdp_fp8_msamp_o2")
STEPS = ("--max_steps", 6, "--save_steps", 3, "--warmup_steps", 1)
# A run evaluates the very weights that are exported, but for two, which differ from them by e4m3's rounding: FSDP2
# gathers weights in FP8, and O3's checkpoint gives the masters instead of the FP8 weights.
ROUNDED = {"fsdp_fp8-model", "fsdp_fp8-checkpoint", "ddp_fp8_msamp_o3-checkpoint"}

EVALUATE = """
import sys
for name in ("torchao", "transformer_engine", "amp8"):
    sys.modules[name] = None  # importing it raises
import json, torch
from safetensors.torch import load_file
sys.path.append(".")
from shared import images, models, vision
from faithful.backends import cpu_matmul as products
restore = products.replace(products.slow())  # a rehearsal computes with these, until `restore` is gone
torch.set_num_threads(1)
train_set, held_out = images.images("digits")
for path in sys.argv[1:]:
    model = vision.vit("vit_nano", train_set.image_size, train_set.in_chans, train_set.num_classes).eval()
    model.load_state_dict(load_file(path), strict=True)
    batch = held_out.__getitems__(list(range(len(held_out))))
    if "fsdp_fp8_msamp" in path:  # FSDP2 evaluates with norms and embeddings in bf16, too
        model, batch["pixel_values"] = model.bfloat16(), batch["pixel_values"].bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # as runs evaluate, and their record says
        # in batches as large as theirs, because the order of a sum depends on the batch
        logits = torch.cat([model(part) for part in batch["pixel_values"].split(64)])
    loss = torch.nn.functional.cross_entropy(logits.float(), batch["labels"]).item()
    print(json.dumps([loss, (logits.argmax(-1) == batch["labels"]).double().mean().item()]))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return functools.cache(lambda config: train(config, folder / config, *STEPS))


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of a run, which the test may damage."""
    return lambda config: shutil.copytree(trained(config), tmp_path / config)


@pytest.fixture
def run_tool(monkeypatch, capsys):
    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["export.py", *map(str, argv)])
        with pytest.raises(SystemExit) as end:
            cli.run(tool.main)
        return end.value.code or 0, *capsys.readouterr()

    return call


def plain_state_dict(files):
    return {name: load() for name, load in tool.plain_tensors(files).items()}


def e4m3_apart(exact, rounded, scale):
    """Whether `rounded` is `exact` in e4m3 under `scale`: three bits of mantissa, subnormals 2**-9 apart. The FP8
    weight and its FP16 master are each rounded from the same fp32 value, hence a little more than half a step."""
    step = torch.maximum(exact.abs() * 2**-3, torch.tensor(2**-9) / scale)
    return ((exact - rounded).abs() <= step * 0.501).all()


@pytest.mark.parametrize("config", CONFIGS)
def test_model_and_checkpoint_give_the_same_weights(trained, tmp_path, config):
    run = trained(config)
    line = tool.export(run, tmp_path / "model.safetensors")
    assert "from the finished model (model.safetensors)" in line and "55 tensors, 202,058 values" in line
    line = tool.export(run, tmp_path / "checkpoint.safetensors", step=6)
    files = "2 files" if config.startswith("fsdp") or "msamp" in config else "rank0.safetensors"
    assert f"from checkpoint-6 ({files})" in line
    assert not list(tmp_path.glob("*.tmp"))
    model, saved = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "checkpoint.safetensors")
    plain = vision.vit("vit_nano", 8, 1, 10).state_dict()
    for tensors in (model, saved):
        assert {name: tensor.shape for name, tensor in tensors.items()} == {n: t.shape for n, t in plain.items()}
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    for name, value in weights(run).items():
        assert model[name].equal(value)
    if config != "ddp_fp8_msamp_o3":
        assert all(model[name].equal(saved[name]) for name in model)
        return
    stored = load_file(run / "checkpoint-6" / "rank0.safetensors")
    codes = {
        key.removeprefix("0:all/model/"): tensor
        for key, tensor in stored.items()
        if tensor.dtype == torch.float8_e4m3fn
    }
    in_fp8 = {name for name in codes if name in model}
    assert len(in_fp8) == 16
    for name in model:
        if name in in_fp8:
            assert not model[name].equal(saved[name])
            assert e4m3_apart(saved[name], model[name], stored[f"0:all/model/{name}_scale"])
        else:
            assert model[name].equal(saved[name])


def test_its_logits_are_the_run_s_where_no_fp8_package_can_be_imported(trained, tmp_path):
    names, paths = [], []
    for config in CONFIGS:
        for kind, step in (("model", None), ("checkpoint", 6)):
            names.append(f"{config}-{kind}")
            paths.append(str(tmp_path / f"{names[-1]}.safetensors"))
            tool.export(trained(config), tmp_path / f"{names[-1]}.safetensors", step)
    process = subprocess.run([sys.executable, "-c", EVALUATE, *paths], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    found = dict(zip(names, map(json.loads, process.stdout.splitlines()), strict=True))
    for config in CONFIGS:
        made = record(trained(config))
        assert made["evidence"]["eval_precision"].startswith("bf16")
        wanted = made["final"]["metrics"]
        for kind in ("model", "checkpoint"):
            loss, accuracy = found[f"{config}-{kind}"]
            loose = f"{config}-{kind}" in ROUNDED
            # 359 held-out samples: rounding moves some over the edge between two classes, at most 5 with any of AVX2,
            # AVX512 and AMX, and changes the loss by at most 2e-3.
            assert loss == pytest.approx(wanted["eval_loss"], abs=5e-3 if loose else 1e-5), config
            assert accuracy == pytest.approx(wanted["accuracy"], abs=15 / 359 if loose else 1e-9), config


def test_hsdp_is_resumed_bit_for_bit_and_one_group_of_its_ranks_is_the_whole_model(tmp_path):
    run = train("hsdp_bf16", tmp_path / "run", *STEPS)
    again = resumed("hsdp_bf16", run, *STEPS)
    assert "checkpoint-3 at step 3" in again.with_suffix(".log").read_text()
    assert len(list((again / "checkpoint-6").glob("rank*.safetensors"))) == 4
    line = tool.export(again, tmp_path / "checkpoint.safetensors", step=6)
    assert "from checkpoint-6 (2 files)" in line and "55 tensors, 202,058 values" in line
    saved = load_file(tmp_path / "checkpoint.safetensors")
    assert all(saved[name].equal(value) for name, value in weights(run).items())


def test_a_stopped_run_gives_its_newest_sound_checkpoint(copied, run_tool):
    run = copied("fsdp_fp8")
    made = record(run) | {"status": "preempted"}
    (run / "run.json").write_text(json.dumps(made))
    code, out, _ = run_tool(run, "--to", "safetensors")
    assert code == 0 and out.startswith(f"{run}/export.safetensors: 55 tensors") and "checkpoint-6 (2 files)" in out
    newest = load_file(run / "export.safetensors")
    part = run / "checkpoint-6" / "rank1.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + bytes([part.read_bytes()[-1] ^ 1]))
    code, out, err = run_tool(run)
    assert code == 0 and "from checkpoint-3" in out
    assert err == f"skipping {run}/checkpoint-6: rank1.safetensors is not what was written by rank 1\n"
    older = load_file(run / "export.safetensors")
    assert older.keys() == newest.keys() and not older["head.weight"].equal(newest["head.weight"])
    shutil.rmtree(run / "checkpoint-3")
    (run / "export.safetensors").unlink()
    code, out, err = run_tool(run)
    assert code == 2 and err.splitlines()[-1].startswith(f"refused: {run} is preempted, with neither") and out == ""
    assert not (run / "export.safetensors").exists()


def test_a_checkpoint_by_the_name_that_the_script_has_given_it(copied, run_tool):
    run = copied("single_fp8")
    named = (run / "checkpoint-6").rename(run / "checkpoint-6-epoch-0")  # as parler-tts does
    shutil.rmtree(run / "checkpoint-3"), shutil.rmtree(run / "model")
    code, _, err = run_tool(run)
    assert code == 2 and f"--checkpoint takes one of {named.name}" in err, err
    for name in (named, named.name):
        code, out, err = run_tool(run, "--checkpoint", name)
        assert code == 0 and f"from {named.name}" in out, err
    other = shutil.copytree(named, run.parent / "of-another-run")  # which may have another plan
    code, _, err = run_tool(run, "--checkpoint", other)
    assert code == 2 and f"has no checkpoint {other}: there are {named.name}" in err, err


def test_what_cannot_be_exported_is_refused_in_one_line(copied, run_tool):
    run = copied("single_fp8")
    part = run / "checkpoint-3" / "rank0.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    for argv, expected in (
        ((run, "--checkpoint", 3), "rank0.safetensors is not what was written"),
        ((run, "--checkpoint", 5), "has no checkpoint 5: there are 6, 3"),
        ((run, "--output", run / "model" / "model.safetensors"), "would damage it"),
        ((run, "--output", run / "run.json" / "x.safetensors"), "could not be written (File exists)"),
        ((run, "--checkpoint", 6, "--output", run / "checkpoint-6" / "x"), "would damage it"),
    ):
        code, out, err = run_tool(*argv)
        assert code == 2 and out == "" and err.startswith("refused: ") and len(err.splitlines()) == 1, err
        assert expected in err
    (run / "data.json").unlink()
    code, _, err = run_tool(run, "--to", "onnx")
    assert code == 2 and err.startswith(f"refused: {run} has no data.json") and len(err.splitlines()) == 1, err
    assert checkpoints.unsound(run / "checkpoint-6") is None
    model = run / "model" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-100])
    code, _, err = run_tool(run)
    assert code == 2 and "model.safetensors cannot be read as safetensors" in err
    (run / "run.json").write_text(json.dumps(record(run) | {"plan": record(run)["plan"] | {"strategy": "pp"}}))
    with pytest.raises(Refused, match="checkpoints of pp cannot be exported"):
        tool.export(run, step=6)


def test_shards_of_any_shape_are_put_together(tmp_path):
    """Shards of any shape are joined: FSDP2 cuts dimension 0 like torch.chunk, so four rows on three ranks are 2, 2
    and 0."""
    torch.manual_seed(0)
    whole = {
        "blocks.0.a": torch.randn(7, 3),
        "even": torch.randn(6),
        "few": torch.randn(4, 2),
        "one": torch.randn(1, 5),
    }
    counts, none = torch.tensor(3), torch.zeros(0, 4)
    files = []
    for rank in range(3):
        parts = {"0:buffer/batches": counts.clone(), "0:model/none": none.clone(), "random/torch": torch.zeros(3)}
        for name, tensor in whole.items():
            chunks = tensor.chunk(3)
            empty = tensor.new_empty(0, *tensor.shape[1:])
            parts[f"0:model/{name}"] = chunks[rank].contiguous() if rank < len(chunks) else empty
            parts[f"0:optimizer/{name}/exp_avg"] = torch.zeros_like(parts[f"0:model/{name}"])
        files.append(tmp_path / f"rank{rank}.safetensors")
        save_file(parts, files[-1])
    made = plain_state_dict(files)
    assert made.keys() == {*whole, "batches", "none"}
    assert all(made[name].equal(tensor) for name, tensor in whole.items())
    assert made["batches"].dtype == torch.int64 and made["none"].shape == (0, 4)


def test_only_the_model_s_own_entries_are_exported(tmp_path):
    own = {"head.weight": torch.ones(2, 2, dtype=torch.bfloat16), "norm.num_batches_tracked": torch.tensor(4)}
    others = {"head._extra_state": torch.zeros(9, dtype=torch.uint8), "head.fp8_scale": torch.ones(3)}
    save_file(own | others, tmp_path / "model.safetensors")
    made = plain_state_dict([tmp_path / "model.safetensors"])
    assert made.keys() == own.keys() and made["head.weight"].dtype == torch.float32
    save_file({f"0:model/{name}": tensor for name, tensor in (own | others).items()}, tmp_path / "rank0.safetensors")
    assert plain_state_dict([tmp_path / "rank0.safetensors"]).keys() == own.keys()
    save_file({"0:model/a": torch.ones(1), "1:model/a": torch.ones(1)}, tmp_path / "rank0.safetensors")
    with pytest.raises(Refused, match="checkpoints of several models cannot be exported"):
        plain_state_dict([tmp_path / "rank0.safetensors"])


def test_blocks_of_transformer_engine_s_own_get_timm_s_names(tmp_path):
    plain = vision.vit("vit_nano", 8, 1, 10).state_dict()
    theirs = {}
    for name, tensor in plain.items():
        for ours, te in (("norm1.", "self_attention.layernorm_qkv.layer_norm_"), ("norm2.", "layernorm_mlp.layer_norm_"),
                         ("attn.qkv.", "self_attention.layernorm_qkv."), ("attn.proj.", "self_attention.proj."),
                         ("mlp.fc1.", "layernorm_mlp.fc1_"), ("mlp.fc2.", "layernorm_mlp.fc2_")):  # fmt: skip
            name = name.replace(ours, te)
        theirs[name] = tensor
    assert len(theirs.keys() - plain.keys()) == 4 * 12
    save_file(theirs, tmp_path / "model.safetensors")
    made = plain_state_dict([tmp_path / "model.safetensors"])
    assert made.keys() == plain.keys() and all(made[name].equal(plain[name]) for name in plain)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_levels_give_what_amp8_says_they_mean(tmp_path, level):
    """An export at MS-AMP's levels equals amp8's own `master_state_dict`, also for a frozen layer, which has no master,
    and a BatchNorm."""
    import amp8

    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 16), torch.nn.Linear(16, 10)]
    model = torch.nn.Sequential(*layers)
    model[2].weight.requires_grad_(False)
    plain = model.state_dict().keys()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = amp8.initialize(model, torch.optim.AdamW(trained, 1e-2), level)
    for _ in range(3):
        model(torch.randn(16, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = amp8.exact_state(model, optimizer)
    save_file({f"0:{name}": tensor.clone() for name, tensor in state.items()}, tmp_path / "rank0.safetensors")
    made, wanted = plain_state_dict([tmp_path / "rank0.safetensors"]), amp8.state.master_state_dict(model)
    assert made.keys() == plain and any(name.startswith("rank/master/") for name in state) == (level == "O3")
    assert all(made[name].equal(wanted[name]) for name in made)


def test_a_finished_model_in_several_files_is_one_file(tmp_path):
    model = {f"blocks.{i}.weight": torch.randn(64, 32, dtype=torch.bfloat16) for i in range(4)}
    write_record(tmp_path, status="finished", recipe="gpt")
    weight_files.write_weights(model, tmp_path / "model", "5KB", True)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 4
    assert "from the finished model (4 files)" in tool.export(tmp_path)
    exported = load_file(tmp_path / "export.safetensors")
    assert exported.keys() == model.keys()
    assert all(torch.equal(exported[name], model[name].float()) for name in model)


def test_a_large_export_is_several_files_with_an_index(tmp_path, run_tool):
    """transformers' own loader finds every tensor by the index; a later export in one file leaves none of them."""
    model = {f"blocks.{i}.weight": torch.randn(64, 32, dtype=torch.bfloat16) for i in range(4)}
    write_record(tmp_path, status="finished", recipe="gpt")
    weight_files.write_weights(model, tmp_path / "model", "10GB", True)
    code, out, _ = run_tool(tmp_path, "--max_shard_size", "20KB", "--output", tmp_path / "out" / "whole.safetensors")
    assert code == 0 and out.startswith(f"whole.safetensors.index.json and 2 files in {tmp_path}/out: 4 tensors, 8,192")
    index = json.loads((tmp_path / "out" / "whole.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 8192 and index["weight_map"].keys() == model.keys()
    for name, file in index["weight_map"].items():
        assert load_file(tmp_path / "out" / file)[name].equal(model[name].float())
    (tmp_path / "out" / "other.safetensors").touch()
    tool.export(tmp_path, tmp_path / "out" / "whole.safetensors")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["other.safetensors", "whole.safetensors"]
    code, _, err = run_tool(tmp_path, "--max_shard_size", "huge")
    assert code == 2 and err.startswith("refused: --max_shard_size huge: ")
