"""ZeRO with the real DeepSpeed: what is partitioned, the same training as with DDP, resume and export bit for bit."""

import functools
import importlib
import importlib.util
import json
import math
import shutil
import textwrap
from pathlib import Path
from types import SimpleNamespace

import of_matrices as own
import pytest
import torch
import yaml
from conftest import (
    CONFIGS,
    ROOT,
    distance,
    launched,
    losses,
    metrics,
    record,
    refusal,
    resumed,
    signalled,
    train,
    weights,
)
from safetensors.torch import load_file

from faithful import Accelerator
from faithful.checkpoint import checkpoints
from faithful.config.settings import to_env
from faithful.strategies import guard
from faithful.strategies.deepspeed import zero as zero_strategy

pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # once, not once in every forked rank
if torch.accelerator.is_available():
    pytest.skip("these are rehearsals, and this machine has an accelerator", allow_module_level=True)

spec = importlib.util.spec_from_file_location("export", ROOT / "tools" / "export.py")
export = importlib.util.module_from_spec(spec)
spec.loader.exec_module(export)

STEPS = ("--max_steps", 8, "--save_steps", 4, "--logging_steps", 1, "--warmup_steps", 2)
LATEST = ("--resume_from_checkpoint", "latest")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return functools.cache(lambda config: train(config, folder / config, *STEPS))


def fp32(stage, folder):
    """A ZeRO config in fp32, which is not shipped. With it, training equals DDP's in the same precision."""
    config = yaml.safe_load((CONFIGS / f"zero{stage}_bf16.yml").read_text()) | {"mixed_precision": "no"}
    (folder / f"zero{stage}_fp32.yml").write_text(yaml.dump(config))
    return folder / f"zero{stage}_fp32.yml"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_process_holds_its_part(whole, stage):
    made = record(whole(f"zero{stage}_bf16"))
    evidence, total = made["evidence"], sum(tensor.numel() for tensor in weights(whole("zero2_bf16")).values())
    assert made["plan"]["strategy"] == f"zero{stage}" and made["seen"]["optimizer"]["class"] == "AdamW"
    share = evidence["share_per_process"]
    for kind in ("master", "optimizer", "gradient", *(["weight"] if stage == 3 else [])):
        assert share[kind] == pytest.approx(0.5, abs=0.01), kind
    assert stage == 3 or share["weight"] == 1
    log = whole(f"zero{stage}_bf16").with_suffix(".log").read_text()
    assert f"zero{stage} x2 gloo, 50% of the optimizer state each | bf16" in log
    kept = evidence["bytes_per_parameter"].pop("gathered", 0)
    assert 0.1 < kept < 0.3 if stage == 3 else kept == 0  # biases and norms stay whole under stage 3
    gradient = 2.0 if stage == 1 else 4.0
    expected = {"weight": 2.0, "gradient": gradient, "master": 4.0, "optimizer": 8.0}
    assert evidence["bytes_per_parameter"] == expected | {"total": pytest.approx(14 + gradient + kept)}
    fp32 = {"float32": total}
    assert evidence["dtypes"] == {
        "parameters": {"bfloat16": total},
        "gradients": {"bfloat16" if stage == 1 else "float32": pytest.approx(total, rel=1e-4)},  # as they are summed
        "master": fp32,
        "optimizer_state": {"exp_avg": fp32, "exp_avg_sq": fp32},
        "linear_output": "bfloat16",
    }
    # two processes, ring accounting: sums of gradients in fp32, updated or gathered weights in bf16
    each = {1: 4 + 1, 2: 4 + 1, 3: 2 + 1}[stage]
    assert evidence["wire_bytes_per_step"] == pytest.approx(each * total, rel=0.02)
    assert losses(whole(f"zero{stage}_bf16")) == pytest.approx(losses(whole("ddp_bf16")), rel=0.01)


RESUMED = [*(f"zero{stage}_bf16" for stage in (1, 2, 3)),
           *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero3_bf16_offload", "zero2_fp8", "zero3_fp8", "zero3_fp8_te"))]  # fmt: skip


@pytest.mark.parametrize("config", RESUMED)
def test_stopped_and_resumed_is_the_same_run_and_exports_its_masters(whole, tmp_path, config):
    run = whole(config)
    again = train(config, tmp_path / "again", *STEPS, "--save_steps", 0, before=signalled(5, 1), code=143)
    assert record(again)["status"] == "preempted" and record(again)["error"] is None
    assert [path.name for path in checkpoints.list_checkpoints(again)] == ["checkpoint-5"]
    train(config, again, *STEPS, *LATEST)
    assert "checkpoint-5 at step 5" in (tmp_path / "again.log").read_text()
    assert metrics(again) == metrics(run) and distance(again, run) == 0
    line = export.export(again, tmp_path / "out.safetensors", step=8)
    assert "from checkpoint-8 (2 files)" in line
    made, final = load_file(tmp_path / "out.safetensors"), weights(run)
    assert made.keys() == final.keys()
    assert all(made[name].equal(final[name]) and made[name].dtype == torch.float32 for name in made)
    sizes = [
        entry["bytes"]
        for name, entry in json.loads((run / "checkpoint-8" / checkpoints.MANIFEST).read_text()).items()
        if name.startswith("rank")
    ]
    assert max(sizes) < 0.6 * sum(sizes)


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_weights_are_those_of_the_checkpoint(whole, tmp_path, stage):
    """Frozen weights are restored from the checkpoint, even if the run that they came from has trained on since."""
    argv = ("--max_steps", 4, "--save_steps", 2, "--logging_steps", 1, "--freeze", 2, "--pretrained")
    start = shutil.copytree(whole("zero2_bf16"), tmp_path / "start")
    run = train(f"zero{stage}_bf16", tmp_path / "run", *argv, "--model", start)
    shutil.copy(whole("ddp_bf16") / "model" / "model.safetensors", start / "model")
    resumed(f"zero{stage}_bf16", run, *argv, "--model", start, without="checkpoint-4")
    before, frozen = weights(whole("zero2_bf16")), "blocks.1.mlp.fc1.weight"
    assert weights(run)[frozen].equal(before[frozen].bfloat16()) and not weights(start)[frozen].equal(before[frozen])


def test_batch_norm_s_averages_are_those_of_the_checkpoint(tmp_path):
    argv = ("--max_steps", 4, "--save_steps", 2, "--logging_steps", 1)
    run = train("zero3_bf16", tmp_path / "run", *argv, name="resnet")
    resumed("zero3_bf16", run, *argv, without="checkpoint-4", name="resnet")
    assert any(name.endswith("running_mean") for name in weights(run))


def save_as_deepspeed_does(folder):
    """Called before the run: at its end the engine writes a checkpoint of its own, too."""

    def before(rank):
        from faithful import Accelerator

        save_model = Accelerator.save_model

        def patched(self, model, save_directory):
            model.save_checkpoint(str(folder), tag="end")
            save_model(self, model, save_directory)

        Accelerator.save_model = patched

    return before


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    argv = ("--max_steps", 4, "--logging_steps", 1, "--save_steps", 0, "--per_device_train_batch_size", 32)
    return train("ddp_fp32", tmp_path_factory.mktemp("ddp") / "run", *argv)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_fp32_it_is_ddp_and_zero_to_fp32_says_the_same(ddp, tmp_path, stage):
    argv = ("--max_steps", 4, "--logging_steps", 1, "--save_steps", 0, "--per_device_train_batch_size", 16,
            "--gradient_accumulation_steps", 2)  # fmt: skip
    run = train(fp32(stage, tmp_path), tmp_path / "run", *argv, before=save_as_deepspeed_does(tmp_path / "theirs"))
    assert distance(run, ddp) < 5e-6
    for a, b in zip(metrics(run), metrics(ddp), strict=True):
        for key in a.keys() - {"step"}:
            assert a[key] == pytest.approx(b[key], rel=1e-4), key
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    theirs, ours = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "theirs"), "end"), weights(run)
    assert theirs.keys() == ours.keys() and all(theirs[name].equal(ours[name]) for name in ours)


def test_offloaded_it_is_the_same_training(whole, tmp_path):
    run = train("zero3_bf16_offload", tmp_path / "run", *STEPS)
    assert losses(run) == pytest.approx(losses(whole("zero3_bf16")), rel=1e-3)  # its gradient norm is rounded elsewhere


def test_transformers_models_start_from_the_same_weights(tmp_path):
    """transformers' models start from the same weights. If transformers knew of stage 3, it would build them in parts,
    and offloaded they would compute in fp32."""
    importlib.import_module("transformers.models.llama.modeling_llama")
    argv = ("--dataset", textwrap.__file__, "--sequence_length", 32, *STEPS, "--max_steps", 3)
    runs = [train(config, tmp_path / config, *argv, name="gpt") for config in ("ddp_bf16", "zero3_bf16_offload")]
    assert len({record(run)["evidence"]["initial_weights"] for run in runs}) == 1
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=0.01)


@pytest.mark.parametrize(("config", "converted"), [("zero2_fp8", 15), ("zero3_fp8", 15), ("zero3_fp8_te", 16)])
def test_fp8_under_zero(whole, tmp_path, config, converted):
    run = train(config, tmp_path / "run", *STEPS)
    evidence = record(run)["evidence"]
    assert evidence["linear_converted"] == converted and evidence["share_per_process"]["optimizer"] < 0.51
    assert losses(run) == pytest.approx(losses(whole("ddp_bf16")), rel=0.05)
    assert losses(run) != losses(whole("zero2_bf16"))


@pytest.mark.parametrize(
    ("config", "dtype"), [("zero2_fp16", "float16"), ("zero3_fp16", "float16"), ("fsdp_fp16", "float32")]
)
def test_the_loss_scale_of_fp16(tmp_path, config, dtype):
    """Overflows in fp16 skip the step on all processes and lower the scale, DeepSpeed's or torch's. A resumed run goes
    on with it."""
    words = (*STEPS, "--grad_scaler", f"init_scale={2.0**32}")
    run = train(config, tmp_path / "run", *words)
    state = json.loads((run / "checkpoint-8" / "trainer_state.json").read_text())
    skipped = state["steps"]["tried"] - 8
    scaler = state["scaler"]
    assert skipped >= 5 and scaler.get("cur_scale", scaler.get("scale")) == 2.0 ** (32 - skipped)
    assert all(math.isfinite(loss) for loss in losses(run))
    assert record(run)["evidence"]["dtypes"]["parameters"].keys() == {dtype}
    again = train(config, tmp_path / "again", *words, "--resume_from_checkpoint", run / "checkpoint-4")
    assert losses(again) == losses(run)[4:] and distance(again, run) == 0
    saved = json.loads((again / "checkpoint-8" / "trainer_state.json").read_text())
    assert (saved["steps"], saved["scaler"]) == (state["steps"], scaler)


def test_accelerate_launch_itself(whole, tmp_path):
    command = ["accelerate", "launch", "--config_file", "accelerate_configs/zero2_bf16.yml", "--main_process_port", "0"]
    result = launched(*command, "recipes/vit.py", "--output_dir", str(tmp_path / "run"), *map(str, STEPS))
    assert result.returncode == 0, result.stdout + result.stderr
    assert distance(tmp_path / "run", whole("zero2_bf16")) == 0
    assert record(tmp_path / "run")["evidence"] == record(whole("zero2_bf16"))["evidence"]


def test_what_is_offloaded_from_a_gpu_is_in_pinned_memory(monkeypatch):
    """DeepSpeed copies from and to the host asynchronously then. On a CPU there is no memory to pin."""
    mapping = yaml.safe_load((CONFIGS / "zero3_bf16_offload.yml").read_text())
    for name, value in to_env(mapping).items():
        monkeypatch.setenv(name, value)
    for change in (
        "quiet",
        "compile_nothing",
        "leave_precision_to_the_config",
        "leave_gradients_to_the_engine",
    ):  # which would last for later tests of this process
        monkeypatch.setattr(zero_strategy, change, lambda: None)
    for rehearsal, pinned in ((False, True), (True, None)):
        plan = SimpleNamespace(strategy="zero3", precision="bf16", rehearsal=rehearsal, clip=None)
        made = zero_strategy.ZeRO(plan).arguments(None)["deepspeed_plugin"].deepspeed_config["zero_optimization"]
        assert made["offload_optimizer"] == made["offload_param"]
        assert made["offload_optimizer"].get("pin_memory") is pinned and made["offload_param"]["device"] == "cpu"


def parameters(at_least=0):
    shapes = [(12, 16), (12,), (4, 3, 2, 2)]
    return [torch.nn.Parameter(torch.ones(shape)) for shape in shapes if len(shape) >= at_least]


def by_timm(name, **options):
    return lambda parameters: importlib.import_module("timm.optim").create_optimizer_v2(parameters, name, **options)


ELEMENTWISE = {
    **{name: functools.partial(getattr(torch.optim, name), lr=0.1) for name in guard.ELEMENTWISE["torch"].split()},
    "momentum": lambda of: torch.optim.SGD(of, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "fused": lambda of: torch.optim.AdamW(of, 0.1, amsgrad=True, fused=True),
    **{name: by_timm(name, lr=0.1, weight_decay=0.1) for name in
       ("lion", "adan", "nadamw", "laprop", "adopt", "adabelief", "sgdw", "rmsproptf", "adamwlegacy", "nadamlegacy",
        "radamlegacy")},
}  # fmt: skip
OF_MATRICES = {
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda of: torch.optim.Muon([p for p in of if p.dim() == 2]),
    "transformers' Adafactor": lambda of: importlib.import_module("transformers").Adafactor(of),
    **{name: by_timm(name, lr=0.1, weight_decay=0.1) for name in
       ("muon", "lamb", "lars", "adafactor", "adafactorbv", "adamp", "sgdp", "novograd", "kron", "cadamw", "clion",
        "mars")},
    "own LARS": own.Lars,
    "clipped by layer": functools.partial(own.ClippedByLayer, lr=0.1),
    "own rate": own.OwnRate,
    "averaged": lambda of: importlib.import_module("timm.optim").Lookahead(own.Lars(of)),
    "wrapped": own.Slow,
}  # fmt: skip


def moved(make, pieces):
    """Weights after six steps, and what the optimizer keeps of them, whole or in two flat pieces each."""
    torch.manual_seed(0)
    starts = [torch.randn(shape) for shape in ((128, 40), (64,), (8, 4, 2, 2))]
    slopes = [[torch.randn_like(start) * scale for start in starts] for scale in (1.0, 1.0, 30.0, 0.01, 1.0, 3.0)]
    cut = (lambda tensor: tensor.flatten().chunk(2)) if pieces else (lambda tensor: [tensor])
    parameters = [torch.nn.Parameter(part.clone()) for start in starts for part in cut(start)]
    optimizer = make(parameters)
    for step in slopes:
        for parameter, slope in zip(parameters, [part for whole in step for part in cut(whole)], strict=True):
            parameter.grad = slope.clone()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_optimizer_of_the_list_moves_two_halves_as_it_moves_the_whole(name):
    assert guard.updates_elements(ELEMENTWISE[name](parameters()))
    torch.testing.assert_close(moved(ELEMENTWISE[name], True), moved(ELEMENTWISE[name], False), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OF_MATRICES)
def test_an_optimizer_of_matrices_is_not_in_the_list(name):
    assert not guard.updates_elements(OF_MATRICES[name](parameters()))


@pytest.mark.parametrize("name", ["Adam", "PagedAdamW8bit", "AdamW32bit", "Lion8bit"])
def test_optimizers_of_bitsandbytes_are_in_the_list(name):
    made = type(name, (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.adamw"})(parameters())
    assert guard.updates_elements(made) and not guard.updates_elements(
        type("LARS8bit", (type(made),), {})(parameters())
    )


def with_optimizer(make, closure=None, hook=False, *options):
    """What a rank runs: two steps with the optimizer that `make` makes of the parameters."""
    accelerator = Accelerator()
    model = torch.nn.Linear(16, 16)
    optimizer = make(model.parameters(), *options)
    if hook:
        optimizer.register_step_post_hook(lambda *_: None)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(model(torch.ones(4, 16)).float().square().mean())
        optimizer.step(closure)
        optimizer.zero_grad()
    accelerator.end_training()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (functools.partial(with_optimizer, own.Lars), "Lars is not known to update each element by itself"),
        (functools.partial(with_optimizer, own.ScheduleFree), "ScheduleFree.eval() writes into the whole ones"),
        (functools.partial(with_optimizer, torch.optim.LBFGS), "LBFGS is not known to update each element by itself"),
        (functools.partial(with_optimizer, torch.optim.AdamW, hook=True), "which a hook of AdamW's step would see"),
        (functools.partial(with_optimizer, torch.optim.AdamW, sum), "DeepSpeed calls no closure of optimizer.step"),
    ],
)
def test_an_optimizer_that_needs_more_than_flat_parts_is_refused(tmp_path, script, says):
    log = refusal("zero2_bf16", tmp_path / "run", script=script)
    assert log.count("refused: ") == 1 and says in log and "use a ddp or fsdp config" in log


def test_the_recipes_muon_is_refused(tmp_path):
    train("zero3_bf16", tmp_path / "run", *STEPS, "--optimizer", "muon", code=2)
    says = "under zero3 each process updates a flat part of the weights, and Muon is not known to update each"
    assert says in (tmp_path / "run.log").read_text()


def of_deepspeed(folder, **sections):
    """A config with a file of DeepSpeed's that leaves everything to the script but `sections`."""
    auto = {key: "auto" for key in ("gradient_clipping", "train_micro_batch_size_per_gpu", "train_batch_size")}
    auto |= {"gradient_accumulation_steps": "auto", "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    (folder / "deepspeed.json").write_text(json.dumps(auto | sections))
    config = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "deepspeed_config": {"deepspeed_config_file": str(folder / "deepspeed.json")},
    }
    (folder / "file.yml").write_text(yaml.dump(config))
    return folder / "file.yml"


def test_a_users_file_lets_an_optimizer_be_tried(tmp_path, monkeypatch):
    config = of_deepspeed(tmp_path, zero_allow_untested_optimizer=True, train_micro_batch_size_per_gpu=4)
    script = functools.partial(with_optimizer, own.ClippedByLayer, None, False, 0.1)
    monkeypatch.setenv("FAITHFUL_PROJECT_DIR", str(tmp_path / "run"))
    train(config, tmp_path / "run", script=script)
    (_, first), (_, last) = record(tmp_path / "run")["seen"]["loss_curve"]
    assert last < first


def with_trainer(folder, **options):
    """What a rank runs: transformers' Trainer, which evaluates with another batch than it trains with."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from faithful import __main__ as door

    class Clipping(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **_):
            print("clipped at", getattr(trainer.optimizer.optimizer, "clip_grad", None), "step", state.global_step + 1)

    door.take_its_place()
    model = own.Regression(temperature=False)
    data = [{"x": torch.ones(16), "labels": torch.ones(16)}] * 32
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    made = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "max_steps": 2} | evaluates | options
    arguments = TrainingArguments(str(folder / "out"), per_device_train_batch_size=4, **made)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=[Clipping()])
    trainer.train()
    print("steps", trainer.state.global_step)


@pytest.mark.parametrize("config", ["fsdp_bf16", "zero2_bf16"])
def test_a_trainer_that_asks_for_the_cpu_is_the_rehearsal(tmp_path, config):
    train(config, tmp_path / "run", script=functools.partial(with_trainer, tmp_path, use_cpu=True))
    assert "steps 2" in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize(
    ("sections", "options", "clipped"),
    [
        ({}, {}, 1.0),
        ({}, {"max_grad_norm": 0.0}, 0.0),
        ({"train_micro_batch_size_per_gpu": 4}, {}, 1.0),
        (None, {}, 1.0),
    ],
)
def test_transformers_trainer_evaluates_and_says_what_a_file_leaves_to_it(tmp_path, sections, options, clipped):
    """sections: of a file of DeepSpeed's, or None without a file."""
    config = "zero2_bf16" if sections is None else of_deepspeed(tmp_path, **sections)
    train(config, tmp_path / "run", script=functools.partial(with_trainer, tmp_path, **options))
    text = (tmp_path / "run.log").read_text()
    assert "steps 2" in text and all(f"clipped at {clipped} step {step}\n" in text for step in (1, 2))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from torch.arange(8.0)[:, None, None].expand(8, 4, 16)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((16,), float(i))


def loaders(kind):
    if kind == "batch sampler":
        order = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(range(8)), 2, False)
        return torch.utils.data.DataLoader(Samples(), batch_sampler=order)
    return torch.utils.data.DataLoader(Stream() if kind == "a stream of batches" else Samples(), batch_size=None)


def with_loader(kind, temperature=False):
    """What a rank runs: a loader that has no batch size."""
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = own.Regression(temperature)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loaders(kind))
    for x in loader:
        accelerator.backward(model(x, x)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    accelerator.print("ends with", {name: round(value.double().sum().item(), 3) for name, value in state.items()})
    accelerator.end_training()


def starts_exactly():
    """What a rank runs: it compares the weights that would be saved before the first step with those of the script."""
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Linear(33, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    saved = accelerator.get_state_dict(model)
    accelerator.print("other values:", [name for name in before if not saved or not saved[name].equal(before[name])])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_start_from_the_weights_in_fp32(tmp_path, stage):
    run = train(f"zero{stage}_bf16", tmp_path / "run", script=starts_exactly)
    assert "other values: []" in run.with_suffix(".log").read_text()


@pytest.mark.parametrize("kind", ["batch sampler", "a stream of batches"])
def test_loaders_without_a_batch_size(tmp_path, kind):
    ends = set()
    for config in ("ddp_fp32", fp32(2, tmp_path)):
        run = train(config, tmp_path / Path(config).stem, script=functools.partial(with_loader, kind))
        ends |= {line for line in run.with_suffix(".log").read_text().splitlines() if line.startswith("ends with")}
    assert len(ends) == 1, ends


def test_a_parameter_without_dimensions_is_refused(tmp_path):
    train("zero2_bf16", tmp_path / "run", script=functools.partial(with_loader, "batch sampler", True), code=2)
    says = "refused: temperature: DeepSpeed takes no parameter without dimensions, give it one, as torch.ones(1) has"
    assert says in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize("config", ["ddp_fp32", "zero2_bf16"])
def test_batches_that_nobody_shares_out_are_refused(tmp_path, config):
    train(config, tmp_path / "run", script=functools.partial(with_loader, "a list of batches"), code=2)
    says = "refused: a loader has batch_size=None and a data set with indices, which Accelerate does not share out"
    assert says in (tmp_path / "run.log").read_text()
