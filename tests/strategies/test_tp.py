"""Tensor parallel: layers are split, training equals that of one process, and a batch is counted once."""

import contextlib
import dataclasses
import functools
import io
import json
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import CONFIGS, Ranks, assert_exported, distance, metrics, record, resumed, signalled, train, weights
from test_kept import run
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate

from faithful import Refused
from faithful.checkpoint import checkpoints
from faithful.strategies import base, tp
from shared import lm, vision
from tools import estimate

TEXT = Path(textwrap.__file__)  # some text that nobody here edits
DATA = ("--dataset", TEXT, "--sequence_length", 32, "--per_device_eval_batch_size", 48)
STEPS = (*DATA, "--max_steps", 6, "--logging_steps", 1, "--save_steps", 3, "--warmup_steps", 2,
         "--per_device_train_batch_size", 8)  # fmt: skip
FP64 = (*STEPS, "--dtype", "float64", "--optimizer", "sgd", "--learning_rate", 0.2, "--max_grad_norm", 0.5,
        "--save_steps", 0, "--max_steps", 4)  # fmt: skip


def in_float64(rank):
    """transformers' RMSNorm computes in fp32, where a difference of 1e-16 can flip a rounding and become 1e-7."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    LlamaRMSNorm.forward = forward


def fp32(folder, name="tp", **more):
    """A tp config in fp32, which is not shipped. With it, only the split differs from one process."""
    config = yaml.safe_load((CONFIGS / f"{name}_bf16.yml").read_text()) | {"mixed_precision": "no"} | more
    path = folder / f"{name}_fp32{'_compile' if more else ''}.yml"
    path.write_text(yaml.dump(config))
    return path


def watch(folder):
    """Called before the run: each rank writes its random state in each step, and at the end what it holds."""

    def before(rank):
        from faithful import Accelerator
        from faithful.tensors.names import local

        update, save_model, random = Accelerator.before_update, Accelerator.save_model, []

        def first(self, optimizer):
            random.append(torch.get_rng_state())
            update(self, optimizer)

        def last(self, model, save_directory):
            parts = {name: local(p.detach()).clone() for name, p in model.named_parameters()}
            held = {"parts": parts, "random": random, "evaluation": self.record.final}
            torch.save(held, folder / f"rank{rank}.pt")
            save_model(self, model, save_directory)

        Accelerator.before_update, Accelerator.save_model = first, last

    return before


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of the shipped config, and what its ranks held."""
    folder = tmp_path_factory.mktemp("whole")
    run = train("tp_bf16", folder / "run", *STEPS, name="gpt", before=watch(folder))
    return run, [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def test_each_process_has_its_part_of_the_layers(whole):
    run, ranks = whole
    made, final = record(run), weights(run)
    evidence, total = made["evidence"], sum(tensor.numel() for tensor in final.values())
    assert made["status"] == "finished" and made["plan"]["strategy"] == "tp" and made["plan"]["tp_size"] == 2
    split = 0
    for name, tensor in final.items():
        parts = [rank["parts"][name] for rank in ranks]
        if name.endswith("norm.weight"):
            assert all(part.equal(tensor) for part in parts), name  # the same on all, to the last bit
        else:
            at = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            assert torch.cat(parts, at).equal(tensor) and parts[0].shape == parts[1].shape, name
            split += tensor.numel()
    assert split / total == pytest.approx(1, abs=2e-3)
    share = split / 2 / total + (total - split) / total
    assert evidence["sharded"] and evidence["optimizer_owns_all"] and evidence["parameters"] == total
    assert evidence["share_per_process"] == pytest.approx(
        dict.fromkeys(("weight", "gradient", "optimizer"), share), abs=1e-4
    )
    assert evidence["bytes_per_parameter"]["total"] == 16.0  # what each has whole is counted once
    fp32 = {"float32": total}
    assert evidence["dtypes"] == {"parameters": fp32, "gradients": fp32, "linear_output": "bfloat16",
                                  "optimizer_state": {"exp_avg": fp32, "exp_avg_sq": fp32}}  # fmt: skip
    assert "gpt | tp x2 gloo, sharded | bf16 compute" in run.with_suffix(".log").read_text()


def test_the_processes_share_each_batch(whole):
    run, ranks = whole
    assert record(run)["seen"]["samples_per_step"] == 8
    each = list(zip(*(rank["random"] for rank in ranks), strict=True))
    assert len(each) == 6 and all(a.equal(b) for a, b in each)  # dropout, of one batch
    assert ranks[0]["evaluation"] == ranks[1]["evaluation"] and "eval_loss" in ranks[0]["evaluation"]


def test_what_goes_over_the_wire(whole):
    """The counted bytes match the collectives: transformers all-reduces the output of each split layer in forward and
    the gradient of its input in backward. With two processes each sends the size of the tensor in an all-reduce, and
    half of it in an all-gather."""
    width, layers, tokens, vocabulary = 128, 4, 8 * 32, weights(whole[0])["model.embed_tokens.weight"].shape[0]
    forwards = (2 * layers * 2 + 4) * width  # attention and MLP in bf16, the embedding in fp32
    backwards = (5 * layers + 1) * 4 * width  # q, k, v, gate, up; the head
    expected = tokens * (forwards + backwards + vocabulary * 2 / 2)  # the logits are gathered
    assert record(whole[0])["evidence"]["wire_bytes_per_step"] == pytest.approx(expected, rel=1e-3)


def test_in_float64_it_is_one_process_s_run(tmp_path):
    """In float64 a tensor-parallel run equals one process's: losses, gradient norms (each parameter counted once),
    clipping, accumulation, evaluation and weights."""
    two_each = ("--gradient_accumulation_steps", 2)
    one = train("single_fp32", tmp_path / "one", *FP64, *two_each, name="gpt", before=in_float64)
    two = train(fp32(tmp_path), tmp_path / "two", *FP64, *two_each, name="gpt", before=in_float64)
    assert distance(one, two) < 1e-12
    assert record(one)["evidence"]["initial_weights"] == record(two)["evidence"]["initial_weights"]
    assert_same_training(one, two)


def assert_same_training(one, other):
    """The same samples, losses, norms and evaluations."""
    [a, b] = [record(run)["seen"] for run in (one, other)]
    assert a["samples_per_step"] == b["samples_per_step"] == 16 and a["first_batch"] == b["first_batch"]
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=1e-12), key
    assert max(row.get("grad_norm", 0) for row in metrics(one)) > 0.5  # clipping was at work


@pytest.mark.slow
def test_compiled_it_is_one_process_s_compiled_run(tmp_path):
    dynamo = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    words = {"name": "gpt", "before": in_float64}
    one = train(fp32(tmp_path, "single", dynamo_config=dynamo), tmp_path / "one", *FP64, **words)
    two = train(fp32(tmp_path, "tp", dynamo_config=dynamo), tmp_path / "two", *FP64, **words)
    assert distance(one, two) < 1e-12 and record(two)["plan"]["compile"]


def test_stopped_by_sigterm_and_resumed_it_is_the_same_run(whole, tmp_path):
    run, _ = whole

    again = train("tp_bf16", tmp_path / "again", *STEPS, name="gpt", before=signalled(5, 1), code=143)
    assert [path.name for path in checkpoints.list_checkpoints(again)] == ["checkpoint-5", "checkpoint-3"]
    manifest = json.loads((again / "checkpoint-5" / checkpoints.MANIFEST).read_text())
    sizes = [entry["bytes"] for name, entry in manifest.items() if name.startswith("rank")]
    assert len(sizes) == 2 and max(sizes) < 0.51 * sum(sizes)  # each wrote its own part
    train("tp_bf16", again, *STEPS, "--resume_from_checkpoint", "latest", name="gpt")
    assert "checkpoint-5 at step 5" in (tmp_path / "again.log").read_text()
    assert metrics(again) == metrics(run) and distance(again, run) == 0


@pytest.mark.parametrize("hit", ["mlp.down_proj.weight", "norm.weight"])
def test_an_overflow_in_fp16_is_that_of_all_processes(tmp_path, hit):
    """An infinity in one process's part of a split gradient skips the step everywhere and halves the scale. So does one
    in a whole gradient, which is the same on all. A scale that is far too high is found, and resuming is the same run."""

    def poisoned(rank):
        from faithful.strategies.tp import Scaler
        from faithful.tensors.names import local

        unscale, calls = Scaler._unscale_grads_, []

        def first(self, optimizer, *args):
            calls.append(optimizer)
            if len(calls) == 2:
                of_kind = {"norm.weight": torch.Tensor, "mlp.down_proj.weight": tp.DTensor}[hit]
                gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
                gradient = next(g for g in gradients if type(g) is of_kind)
                if rank == 1 or type(gradient) is torch.Tensor:
                    local(gradient).view(-1)[0] = float("inf")
            return unscale(self, optimizer, *args)

        Scaler._unscale_grads_ = first

    scaler = ("--grad_scaler", "init_scale=1024", "--max_grad_norm", 0)
    run = train("tp_fp16", tmp_path / "run", *STEPS, *scaler, name="gpt", before=poisoned)
    state = json.loads((run / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["steps"]["tried"] == 7 and state["scaler"]["scale"] == 512
    made = record(run)
    assert made["evidence"]["dtypes"]["linear_output"] == "float16"
    assert "fp16 compute, gradient scaler" in run.with_suffix(".log").read_text()
    resumed("tp_fp16", run, *STEPS, *scaler, name="gpt")


def losses_and_norms(run):
    return [row[key] for row in metrics(run) for key in ("loss", "grad_norm") if key in row]


def test_its_losses_in_fp16_are_those_of_one_process(tmp_path):
    words = (*STEPS, "--save_steps", 0, "--max_grad_norm", 0.5)
    one, two = (train(f"{name}_fp16", tmp_path / name, *words, name="gpt") for name in ("single", "tp"))
    assert losses_and_norms(two) == pytest.approx(losses_and_norms(one), rel=2e-3)


def test_its_fp8_trains_as_one_process_s_and_resumes(tmp_path):
    run, one = (train(f"{name}_fp8", tmp_path / name, *STEPS, name="gpt") for name in ("tp", "single"))
    assert losses_and_norms(run) == pytest.approx(losses_and_norms(one), rel=1e-2)
    made, skipped = record(run)["evidence"], record(one)["evidence"]["linear_skipped"]
    left_out = [[layer["name"] for layer in each] for each in (made["linear_skipped"], skipped)]
    assert made["linear_converted"] == 27 and left_out[0] == left_out[1]
    assert made["sharded"] and made["optimizer_owns_all"] and made["bytes_per_parameter"]["total"] == 16.0
    assert "skipped lm_head (272 is not a multiple of 32)" in run.with_suffix(".log").read_text()
    resumed("tp_fp8", run, *STEPS, name="gpt")
    assert_exported(run, 6, 2)


def in_fp8(folder, level):
    """Writes the largest relative distance of a split FP8 layer's output and gradients to a whole one's, with amaxes of
    whole tensors, and with those of each process's part. Of four processes two shard each part."""
    import torch.distributed as dist
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, float8_utils
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    from faithful.backends import torchao

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp_shard", "tp"))
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(level), emulate=True)

    def computed(style):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 96))
        x, gradient = torch.randn(4, 16, 64), torch.randn(4, 16, 96)
        convert_to_float8_training(model, config=config)
        torchao.complete(model)
        if style:
            apply_tensor_parallelism(model, mesh["tp"], dict.fromkeys(("0", "0.weight", "0.bias"), style))
        if style and mesh["dp_shard"].size() > 1:
            fully_shard(model, mesh=mesh["dp_shard"])
        out = model(x.requires_grad_())
        out.backward(gradient)
        return [out.detach(), x.grad, *(base.whole_tensor(parameter.grad) for parameter in model.parameters())]

    def furthest():
        whole, ways = computed(None), [computed(style) for style in ("colwise_gather_output", "rowwise_split_input")]
        return max(((a - b).norm() / a.norm()).item() for split in ways for a, b in zip(whole, split, strict=True))

    of_tensor, found = float8_utils.tensor_to_amax, furthest()

    def of_part(x, *args, **kwargs):
        if not isinstance(x, tp.DTensor):
            return of_tensor(x, *args, **kwargs)
        return tp.DTensor.from_local(of_tensor(x.to_local(), *args, **kwargs), mesh["tp"], [Replicate()])

    float8_utils.tensor_to_amax = of_part
    of_parts = furthest() if level == "tensorwise" else None
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps([found, of_parts]))


@pytest.mark.parametrize("config", ["tp_fp8", "fsdp_tp_fp8"])
@pytest.mark.parametrize("level", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_its_fp8_is_that_of_whole_layers(tmp_path, config, level):
    """A split operand is rounded with the amax over all processes, so that its FP8 values are those of the whole one.
    What differs is the order of fp32 sums."""
    ranks = Ranks(config, ["--output_dir", str(tmp_path / "run")], script=lambda: in_fp8(tmp_path, level))
    assert {*ranks.wait()} == {0}, ranks.text()
    for rank in range(2):
        away, of_parts = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert away < 1e-5
        assert level != "tensorwise" or of_parts > 1e-3, "scales of parts would be seen"


def test_its_checkpoint_is_exported_whole(whole):
    assert_exported(whole[0], 6, 2)


def test_the_finished_model_is_transformers_own_and_plain(whole):
    from transformers import AutoModelForCausalLM

    from shared import text

    model = AutoModelForCausalLM.from_pretrained(whole[0] / "model").eval()
    held_out = text.texts(str(TEXT), 32)[1]
    rows = held_out.__getitems__(range(len(held_out)))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(rows["input_ids"]).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows["labels"]).item()
    assert record(whole[0])["final"]["metrics"]["eval_loss"] == pytest.approx(loss, rel=1e-3)
    assert (whole[0] / "sample.txt").read_text().startswith("The ")


GROUP = """
from transformers import LlamaConfig, LlamaForCausalLM
class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (torch.full((8,), i) for i in range(64))
accelerator = Accelerator(project_dir=folder)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4))
optimizer, loader = torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(Streamed(), 4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
ids = next(iter(accelerator.skip_first_batches(loader, 2))) + accelerator.process_index * {own}
with accelerator.split_between_processes(ids) if {own} == 2 else torch.enable_grad():
    pass
accelerator.backward(model(input_ids=ids, labels=ids).loss)
optimizer.step()
accelerator.end_training()
"""


@pytest.mark.parametrize(
    ("config", "own", "line"),
    [
        ("tp_bf16", 0, None),  # Accelerate's skip_first_batches would give each its own
        (
            "tp_bf16",
            1,
            "refused: the processes of tensor parallel compute one batch together, but the script gives each",
        ),
        ("tp_bf16", 2, "refused: split_between_processes: tensor parallel computes one batch in all processes"),
        (
            "fsdp_tp_bf16",
            0,
            "refused: Accelerate gives the 2 groups of tensor parallel processes one and the same batch",
        ),
    ],
)
def test_a_group_computes_one_batch_and_each_group_its_own(tmp_path, config, own, line):
    log = run(tmp_path, GROUP.replace("{own}", str(own)), config=config, code=2 if line else 0)
    assert log.count(line or "refused") == bool(line) and "Traceback" not in log


def test_models_that_cannot_be_split_are_refused_by_name(tmp_path, monkeypatch):
    with torch.device("meta"):
        gpt2, llama = lm.gpt("gpt_nano", 272, 32), lm.gpt("llama_nano", 272, 32)
        vit, small = vision.vit("vit_nano", 8, 1, 10), lm.gpt("llama_small", 272, 32)
    tp.check(llama, 2)
    for model, size, expected in (
        (vit, 2, "VisionTransformer has no plan for tensor parallel: use recipes/gpt.py with llama_nano"),
        (gpt2, 2, "GPT2LMHeadModel has no plan for tensor parallel"),
        (llama, 4, "LlamaForCausalLM has 4 attention heads and 2 of keys and values, which 4 processes"),
        (small, 2, "LlamaForCausalLM has 12 attention heads and 3 of keys and values, which 2 processes"),
    ):
        with pytest.raises(Refused, match=expected):
            tp.check(model, size)
    llama.tp_plan = llama.tp_plan | {"model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce"}
    with pytest.raises(Refused, match="is split by replicated_with_grad_allreduce, which is not tested here"):
        tp.check(llama, 2)
    llama.model.layers[0].self_attn.q_proj.base_layer = torch.nn.Linear(2, 2)  # as peft has it
    with pytest.raises(Refused, match="LlamaForCausalLM has no plan for tensor parallel of adapters"):
        tp.check(llama, 2)
    monkeypatch.setattr("transformers.distributed.tensor_parallel.apply_tensor_parallelism", lambda *_: None)
    with pytest.raises(Refused, match="names none of its layers"):
        tp.split(small, torch.optim.SGD(small.parameters()), SimpleNamespace(size=lambda: 3), torch.device("cpu"))

    def other_seeds(rank):
        module = sys.modules["gpt"]
        module.set_seed = lambda seed, **_: torch.manual_seed(seed + rank)

    train("tp_bf16", tmp_path / "seeds", *STEPS, name="gpt", before=other_seeds, code=2)
    assert "refused: the processes built models with different weights" in (tmp_path / "seeds.log").read_text()


def test_torch_s_kernels_for_many_tensors_take_no_mixture():
    """torch's fused and foreach optimizers do not take DTensors and plain tensors together, so `split` turns
    them off."""
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        pair = [
            torch.nn.Parameter(torch.ones(2)),
            torch.nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()])),
        ]
        for parameter in pair:
            parameter.grad = parameter.detach().clone()
        for option in ("fused", "foreach"):
            optimizer = torch.optim.AdamW(pair, **{option: True})
            with pytest.raises(RuntimeError, match="got mixed torch.Tensor and DTensor"):
                optimizer.step()
            optimizer.param_groups[0] |= {"fused": False, "foreach": False}
            optimizer.step()
    finally:
        dist.destroy_process_group()


def estimated(*words):
    """(the exit code, what is printed) of the command."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        return estimate.main(["--memory", "8GB", *words]), said.getvalue()


def assert_estimated(config, run):
    """The state that a process holds."""
    _, said = estimated("--json", config, "--", "gpt", "--dataset", str(TEXT), "--sequence_length", "32")
    guess, made = json.loads(said)["configs"][config], record(run)
    for ours, theirs in {"weights": "weight", "gradients": "gradient", "optimizer": "optimizer"}.items():
        counted = made["evidence"]["bytes_per_parameter"][theirs] * made["evidence"]["parameters"]
        assert guess[ours] == pytest.approx(counted / made["plan"]["num_processes"], rel=0.01), ours


def test_the_estimate_divides_the_state_and_refuses_what_has_no_plan(whole):
    assert_estimated("tp_bf16", whole[0])
    code, said = estimated("tp_bf16", "--", "vit")
    assert code == 1 and "tp_bf16: VisionTransformer has no plan for tensor parallel" in said
    code, said = estimated("--num_processes", "8", "tp_bf16", "--", "vit")
    assert code == 1 and "tp 2 is for 2 processes, not 8" in said


def loads_a_model(folder, by_transformers):
    """What a rank runs: the script trains a model that it has loaded, whole, or split by transformers."""
    from accelerate.utils import set_seed
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    from faithful import Accelerator

    accelerator = Accelerator(project_dir=sys.argv[2])
    set_seed(0)
    if accelerator.is_main_process:
        lm.gpt("llama_nano", 256, 32).save_pretrained(folder)
    accelerator.wait_for_everyone()
    split = {"distributed_config": DistributedConfig(tp_size=2)} if by_transformers else {}
    model = LlamaForCausalLM.from_pretrained(folder, **split)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    ids = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_model(model, f"{sys.argv[2]}/model")
    accelerator.end_training()


def test_a_model_that_transformers_has_split_trains_as_one_that_the_config_splits(tmp_path):
    runs = []
    for by_transformers in (True, False):
        script = functools.partial(loads_a_model, tmp_path / "tiny", by_transformers)
        runs.append(train("tp_bf16", tmp_path / f"run{by_transformers}", script=script))
    assert distance(*runs) == 0
    [a, b] = [record(run)["evidence"] for run in runs]
    assert a == b and a["sharded"] and a["optimizer_owns_all"]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["tp_fp8", "fsdp_bf16"])
def test_where_it_does_not_match_the_config_it_is_refused(tmp_path, config):
    train(config, tmp_path / "run", script=functools.partial(loads_a_model, tmp_path / "tiny", True), code=2)
    [line] = [line for line in (tmp_path / "run.log").read_text().splitlines() if line.startswith("refused: ")]
    assert "is sharded before prepare()" in line and f"the config asks for {config.split('_')[0]}" in line
