"""Weights from safetensors files, where only process 0 builds the model: each process reads its own part."""

import functools
import json
import shutil
import sys
import types

import pytest
import torch
from conftest import ROOT, Ranks, train, weights
from safetensors.torch import load_file, save_file
from test_building import efficient

from faithful import patches
from faithful.loading import meta_init, sharded_files

CHANGED = "model.embed_tokens.weight"  # changed by the script, after it was loaded
ARGV = ("--dataset", ROOT / "LICENSE", "--sequence_length", 16, "--per_device_train_batch_size", 2, "--eval_steps", 0)
ONCE = (*ARGV, "--max_steps", 1, "--save_steps", 0, "--learning_rate", 0)  # ends with the weights that it began with


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a small Llama."""
    run = train("single_fp32", tmp_path_factory.mktemp("saved") / "run", *ONCE, "--seed", 5, name="gpt")
    return run / "model"


def rewritten(saved, folder, change):
    """A copy of the model with `change({name: tensor})` in its file."""
    shutil.copytree(saved, folder)
    save_file(change(load_file(saved / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def noting(folder, changed=None, other=None):
    """For `before` of a rank: writes the names of what it has read to read<rank>.json. changed(model): called on
    process 0 before `prepare`. other: process 1 loads this folder's model."""

    def before(rank):
        from faithful import Accelerator
        from faithful.loading import sharded_files

        read, prepare = sharded_files.read, Accelerator.prepare

        @functools.wraps(read)
        def noted(*args):
            parts = read(*args)
            (folder / f"read{rank}.json").write_text(json.dumps(sorted(parts)))
            return parts

        def prepared(self, model, *rest):
            if changed and rank == 0:
                with torch.no_grad():
                    changed(model)
            return prepare(self, model, *rest)

        sharded_files.read, Accelerator.prepare = noted, prepared
        if other and rank == 1:
            sys.argv[sys.argv.index("--model") + 1] = str(other)

    return before


def start(config, saved, folder, processes=2, **options):
    """Trains from a saved model. Returns the run, and the names that every process has read."""
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    more = {"name": "gpt", "processes": processes, "before": noting(folder, **options)}
    run = train(efficient(folder, config), folder / "run", *ONCE, "--pretrained", "--model", saved, **more)
    read = [json.loads((folder / f"read{rank}.json").read_text()) for rank in range(processes)]
    assert all(names == read[0] for names in read)
    return run, set(read[0])


@pytest.mark.parametrize(
    ("config", "processes"),
    [("fsdp_fp32", 2), ("fsdp_fp8", 2), ("fsdp_bf16_offload", 2), ("hsdp_bf16", 4), ("zero3_bf16", 3),
     ("zero3_bf16_offload", 2)],
)  # fmt: skip
def test_nothing_is_sent_that_is_in_the_file(saved, tmp_path, config, processes):
    run, read = start(config, saved, tmp_path, processes)
    wanted = load_file(saved / "model.safetensors")
    assert read == set(wanted)
    if config.startswith("fsdp"):
        held = weights(run)
        assert held.keys() == wanted.keys() and all(torch.equal(held[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("config", ["fsdp_fp32", "zero3_bf16"])
def test_weights_that_the_script_has_changed_are_sent(saved, tmp_path, config):
    """Here it exchanges the rows of one, which have the same values then, in another order, and scales another."""

    def changed(model):
        weight = dict(model.named_parameters())[CHANGED]
        weight.copy_(weight.flip(0))
        model.model.norm.weight.mul_(2)

    run, read = start(config, saved, tmp_path, changed=changed)
    wanted = load_file(saved / "model.safetensors")
    assert set(wanted) - read == {CHANGED, "model.norm.weight"}
    wanted |= {CHANGED: wanted[CHANGED].flip(0), "model.norm.weight": wanted["model.norm.weight"] * 2}
    held = weights(run)
    assert held.keys() == wanted.keys() and all(torch.equal(held[name], wanted[name]) for name in wanted)


def test_another_file_on_one_machine_is_not_believed(saved, tmp_path):
    """Process 0's weights count, as they do where they are sent."""
    stale = rewritten(saved, tmp_path / "stale", lambda tensors: tensors | {CHANGED: tensors[CHANGED] + 1})
    run, read = start("fsdp_fp32", saved, tmp_path, other=stale)
    wanted, held = load_file(saved / "model.safetensors"), weights(run)
    assert set(wanted) - read == {CHANGED} and all(torch.equal(held[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("way", "change"),
    [
        ("bf16", lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()}),
        ("base", lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()}),
    ],
)
def test_files_in_another_dtype_and_of_the_model_without_its_head(saved, tmp_path, way, change):
    """As the Hub has them: Llama's weights in bf16, GPT-2's without the `transformer.` that the language model adds."""
    other = rewritten(saved, tmp_path / way, change)
    run, read = start("fsdp_fp32", other, tmp_path)
    wanted, held = load_file(saved / "model.safetensors"), weights(run)
    assert read == set(wanted)
    if way == "bf16":
        wanted = {name: tensor.bfloat16().float() for name, tensor in wanted.items()}
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("same", [True, False])
def test_a_file_that_holds_both_of_two_tied_weights(saved, tmp_path, same):
    """transformers ties them where the file's two are equal. The processes without values cannot compare them."""
    head = "lm_head.weight"
    both = rewritten(saved, tmp_path / "both", lambda t: t | {head: t[CHANGED].clone() if same else t[CHANGED] + 1})
    run, read = start("fsdp_fp32", both, tmp_path)
    held = weights(run)
    assert (head in held) != same and held.keys() == read


def test_another_model_than_process_0_has_is_refused_by_name(saved, tmp_path):
    """Its processes would wait for each other for ever."""
    short = rewritten(saved, tmp_path / "short", lambda tensors: tensors)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] - 1}))
    argv = [*map(str, ONCE), "--pretrained", "--model", str(saved), "--output_dir", str(tmp_path / "run")]
    before = noting(tmp_path, other=short)
    ranks = Ranks(efficient(tmp_path, "fsdp_fp32"), argv, "gpt", 2, before=before)
    assert set(ranks.wait(60)) <= {1, 2}
    assert "refused: process 1 is to get process 0's weights, but model.layers.3." in ranks.text()


def test_the_other_processes_read_nothing_in_from_pretrained_and_draw_no_more_numbers(saved):
    """It builds the model on meta, where process 0 draws none."""
    import transformers
    from transformers import core_model_loading

    def loaded():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_pretrained(saved)
        return {parameter.is_meta for parameter in model.parameters()}, torch.rand(3).tolist()

    whole = loaded()
    seen, read = [], core_model_loading._materialize_copy
    core_model_loading._materialize_copy = lambda *args, **kwargs: seen.append(args) or read(*args, **kwargs)
    try:
        meta_init.start(main=False)
        assert loaded() == ({True}, whole[1]) and not seen and sharded_files.opened
    finally:
        patches.release(None)
        core_model_loading._materialize_copy = read


@pytest.mark.parametrize(("quantizer", "reads"), [(None, False), ("bitsandbytes", True)])
def test_but_a_quantizer_gets_the_values(quantizer, reads):
    reader = types.SimpleNamespace(_materialize_copy=lambda tensor, device=None, dtype=None: tensor)
    load = sharded_files.without_reading(lambda load_config: reader._materialize_copy(torch.ones(2)), reader)
    assert load(load_config=types.SimpleNamespace(hf_quantizer=quantizer)).is_meta != reads


def test_a_model_in_several_files_with_an_index(saved, tmp_path):
    import transformers

    folder = tmp_path / "several"
    shutil.copytree(saved, folder)
    (folder / "model.safetensors").unlink()
    transformers.AutoModelForCausalLM.from_pretrained(saved).save_pretrained(folder, max_shard_size="300KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    run, read = start("fsdp_fp32", folder, tmp_path)
    wanted, held = load_file(saved / "model.safetensors"), weights(run)
    assert read == set(wanted) and all(torch.equal(held[name], wanted[name]) for name in wanted)
