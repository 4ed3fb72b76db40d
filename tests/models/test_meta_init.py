"""fsdp_cpu_ram_efficient_loading and zero3_init_flag: only process 0 builds models with their weights."""

import json
import os
import sys
import threading
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import yaml
from conftest import CONFIGS, ROOT, Ranks, distance, record, train, weights
from safetensors.torch import load_file
from torch import nn

from faithful import Accelerator, __main__, patches
from faithful.launch import machine
from faithful.models import meta_init
from tools import export

CLIENTS = ROOT / "tests" / "clients"

ON = {"fsdp_cpu_ram_efficient_loading": True, "zero3_init_flag": True}
ARGV = ("--max_steps", 2, "--eval_steps", 0, "--save_steps", 0)


def efficient(folder, config):
    """A config file with the key on, under the same name."""
    mapping = yaml.safe_load((CONFIGS / f"{config}.yml").read_text())
    for section in ("fsdp_config", "deepspeed_config"):
        keys = mapping.get(section, {})
        keys.update({key: value for key, value in ON.items() if key in keys})
    assert any(key in str(mapping) for key in ON)
    path = folder / f"{config}.yml"
    path.write_text(yaml.safe_dump(mapping))
    return path


def seen(folder):
    """Writes how many bytes of weights each rank has before `prepare`, and what its generator draws next."""

    def before(rank):
        import torch

        from faithful import Accelerator

        prepare = Accelerator.prepare

        def looked(self, model, *rest):
            sizes = [(p.nbytes, p.is_meta) for p in model.parameters()]
            held = {"held": sum(size for size, meta in sizes if not meta), "all": sum(size for size, _ in sizes)}
            (folder / f"rank{rank}.json").write_text(json.dumps(held | {"drawn": torch.rand(3).tolist()}))
            return prepare(self, model, *rest)

        Accelerator.prepare = looked

    folder.mkdir()
    return before


CASES = [("fsdp_bf16", "vit", 2), ("fsdp_fp8_msamp_o2", "gpt", 2), ("hsdp_bf16", "vit", 4),
         ("fsdp_fp8_te", "vit", 2), ("fsdp_bf16", "resnet", 2), ("fsdp_bf16_offload", "vit", 2),
         ("fsdp_bf16_ckpt", "bert", 2), ("zero3_fp8", "vit", 3)]  # fmt: skip


@pytest.mark.parametrize(("config", "recipe", "processes"), CASES)
def test_the_run_is_the_same_to_the_last_bit(tmp_path, config, recipe, processes):
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    of = {"name": recipe, "processes": processes}
    argv = (*ARGV, "--dataset", ROOT / "LICENSE", "--sequence_length", 32) if recipe == "gpt" else ARGV
    whole = train(config, tmp_path / "whole", *argv, before=seen(tmp_path / "a"), **of)
    spare = train(efficient(tmp_path, config), tmp_path / "spare", *argv, before=seen(tmp_path / "b"), **of)
    assert distance(whole, spare) == 0
    assert len({record(run)["evidence"]["initial_weights"] for run in (whole, spare)}) == 1
    for rank in range(processes):
        here, there = (json.loads((tmp_path / way / f"rank{rank}.json").read_text()) for way in "ba")
        assert here["held"] == (there["held"] if rank == 0 else 0) and here["all"] == there["all"] == there["held"]
        assert here["drawn"] == there["drawn"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs of one step of a small gpt with a learning rate of 0, so that they end with the weights that they began with,
    gathered from all processes. made(config, way, processes): way says where the weights come from."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "texts").mkdir()
    for i in range(20):
        (folder / "texts" / f"{i}.txt").write_text(" ".join(f"w{i * k % 7}" for k in range(60)))
    argv = ("--dataset", folder / "texts", "--sequence_length", 16, "--per_device_train_batch_size", 2,
            "--max_steps", 1, "--eval_steps", 0, "--save_steps", 1)  # fmt: skip

    @cache
    def saved():
        return train("single_fp32", folder / "saved", *argv, "--seed", 5, name="gpt")

    @cache
    def one(config, way, processes=None):
        run, settings = folder / f"{config}-{way}-{processes}", {}
        more = ("--pretrained", "--model", saved()) if way == "pretrained" else ()
        if processes:
            settings = {"processes": processes, "before": seen(folder / f"seen-{run.name}")}
            config = efficient(folder, config)
        train(config, run, *argv, *more, "--learning_rate", 0, name="gpt", **settings)
        held = [json.loads((folder / f"seen-{run.name}" / f"rank{r}.json").read_text()) for r in range(processes or 0)]
        assert not [rank for rank in held[1:] if rank["held"]]
        return run

    one.saved = saved
    return one


@pytest.mark.parametrize(
    ("config", "processes", "way"),
    [("fsdp_bf16", 2, "pretrained"), ("fsdp_bf16", 4, "constructor"), ("hsdp_bf16", 4, "constructor"),
     ("zero3_bf16", 2, "constructor"), ("zero3_bf16", 4, "pretrained"), ("fsdp_fp8_msamp_o2", 2, "constructor"),
     ("fsdp_fp8_msamp_o2", 4, "pretrained")],
)  # fmt: skip
def test_the_initial_weights_are_those_of_one_process_to_the_last_bit(made, config, processes, way, tmp_path):
    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    spare, alone = made(config, way, processes), made(f"single_{config.partition('_')[2]}", way)
    hashes = [record(run)["evidence"]["initial_weights"] for run in (spare, alone)]
    assert hashes[0] == hashes[1] is not None
    export.export(spare, tmp_path / "held", step=1)  # of what each process holds
    held, wanted = load_file(tmp_path / "held"), weights(alone)
    assert held.keys() == wanted.keys() and all(held[name].equal(wanted[name]) for name in wanted)
    if config.endswith("bf16"):  # the level's own dtypes round
        assert (distance(alone, made.saved()) == 0) == (way == "pretrained")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.root = nn.Parameter(torch.randn(16))
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight  # tied after it was registered
        shared = nn.Parameter(torch.randn(16))
        self.first, self.second = nn.Module(), nn.Module()
        self.first.scale = self.second.scale = shared  # and before
        self.normed = nn.utils.spectral_norm(nn.Linear(16, 16))  # a buffer that is computed from a weight
        self.register_buffer("mask", torch.rand(16) > 0.5)
        self.register_buffer("phase", torch.rand(16), persistent=False)

    def forward(self, x):
        x = x * self.root * self.mask + self.phase
        for block in self.blocks:
            x = x + block(x).relu()
        return self.normed(x * self.first.scale + self.second.scale)


def to_the_device(accelerator, model):
    model.to(accelerator.device)


def own(middle, model=None):
    """What a rank runs: three steps of the model. middle(accelerator, model): called before prepare."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    if model is None:
        torch.manual_seed(1)
        model = Model()
    middle(accelerator, model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(3):
        loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_model(model, accelerator.project_dir + "/model")
    if accelerator.is_local_main_process:
        print("phase", model.phase.sum().item())
    elif model.phase.is_meta:
        sys.exit(3)
    accelerator.end_training()


def test_tied_and_root_parameters_and_buffers_of_a_model_of_ones_own(tmp_path):
    runs = [tmp_path / "whole", tmp_path / "spare"]
    for config, run in zip(("fsdp_fp32", efficient(tmp_path, "fsdp_fp32")), runs, strict=True):
        train(config, run, script=partial(own, to_the_device))
    whole, spare = (load_file(run / "model" / "model.safetensors") for run in runs)
    assert whole.keys() == spare.keys() and len(whole) > 8
    assert all(torch.equal(whole[name], spare[name]) for name in whole)
    assert "blocks.2.weight" not in whole and "blocks.2.bias" in whole


def test_a_model_that_was_built_before_has_the_weights_of_process_0(tmp_path):
    def before_the_accelerator(differs):
        torch.manual_seed(1 + differs * int(os.environ["RANK"]))
        own(to_the_device, Model())

    models = []
    for config, differs in (("fsdp_fp32", False), (efficient(tmp_path, "fsdp_fp32"), True)):
        run = train(config, tmp_path / f"run{len(models)}", script=partial(before_the_accelerator, differs))
        models.append(load_file(run / "model" / "model.safetensors"))
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def averaged(accelerator):
    """An average of a model, made before `prepare`: a copy without values on the other processes."""
    torch.manual_seed(1)
    model = Model()
    average = torch.optim.swa_utils.AveragedModel(model)
    model = accelerator.prepare(model)
    average.update_parameters(model)


def norms(accelerator):
    print(sum(p.square().sum().item() for p in Model().parameters()))


@pytest.mark.parametrize("uses", [norms, averaged])
def test_weights_that_are_used_too_early_are_named_with_the_key(tmp_path, uses):
    argv = ["--output_dir", str(tmp_path / "run")]
    script = lambda: uses(Accelerator(project_dir=sys.argv[2]))  # noqa: E731
    ranks = Ranks(efficient(tmp_path, "fsdp_fp32"), argv, script=script)
    assert ranks.wait(60)[1] == 2
    assert "refused: with fsdp_cpu_ram_efficient_loading only process 0 has the weights of a model" in ranks.text()


def other_models():
    accelerator = Accelerator(project_dir=sys.argv[2])
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 + accelerator.process_index)])
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))


def test_another_model_than_process_0_has_is_refused_by_name(tmp_path):
    """Its processes would wait for each other for ever."""
    ranks = Ranks(efficient(tmp_path, "fsdp_fp32"), ["--output_dir", str(tmp_path / "run")], script=other_models)
    assert set(ranks.wait(60)) <= {1, 2}
    assert "refused: process 1 is to get process 0's weights, but 2.bias, 2.weight are in" in ranks.text()


def changed():
    """Process 0's weights count, also those that it changes, or that another file has."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    model = nn.Linear(4, 4)
    if accelerator.is_main_process:
        nn.init.constant_(model.weight, 3)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.save_model(model, accelerator.project_dir + "/model")
    accelerator.end_training()


def test_weights_that_process_0_alone_has_changed_are_sent(tmp_path):
    run = train(efficient(tmp_path, "fsdp_fp32"), tmp_path / "run", script=changed)
    assert set(load_file(run / "model" / "model.safetensors")["weight"].flatten().tolist()) == {3}


LARGE = {"vocab_size": 4000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 48}  # 640 MB


def most_held(config):
    """Writes the most anonymous memory that a rank has taken from before its model was built until it was sharded, in
    parts of the model. DeepSpeed's engine, with masters and gradients, comes after that."""
    import transformers
    from transformers.models.llama import modeling_llama  # noqa: F401

    def anonymous():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    accelerator = Accelerator(project_dir=sys.argv[2])
    began, seen, ended = anonymous(), [], threading.Event()
    watch = lambda: [seen.append(anonymous() - began) for _ in iter(lambda: ended.wait(0.002), True)]  # noqa: E731
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    partition = meta_init.partition
    meta_init.partition = lambda *args: (partition(*args), ended.set())
    if config is None:
        model = transformers.LlamaForCausalLM.from_pretrained(os.environ["MODEL"])
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    size = sum(parameter.nbytes for parameter in model.parameters())
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    ended.set(), watcher.join()
    Path(f"{sys.argv[2]}.{accelerator.process_index}").write_text(f"{max(seen) / size}")
    accelerator.end_training()


@pytest.mark.parametrize(("config", "way"), [("fsdp_bf16", "pretrained"), ("zero3_bf16", "constructor")])
def test_no_process_but_the_first_holds_as_much_as_the_model(tmp_path, config, way):
    import transformers

    if config.startswith("zero"):
        pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    if way == "pretrained":
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**LARGE)).save_pretrained(tmp_path / "model")
        machine.trim_memory()  # the ranks are forked, and would use what is free here
    script = partial(most_held, LARGE if way == "constructor" else None)
    env = {"MODEL": str(tmp_path / "model")}
    train(efficient(tmp_path, config), tmp_path / "run", script=script, processes=4, env=env)
    main, *others = (float((tmp_path / f"run.{rank}").read_text()) for rank in range(4))
    part = 0.25 if config.startswith("fsdp") else 0.125  # in 16 bit
    assert part <= min(others) <= max(others) < 1, (main, others)  # 0.38 to 0.82, what is freed comes back late
    assert way == "pretrained" or main > 0.9  # else its weights are the file's pages


def test_everything_is_as_before_when_the_run_ends():
    register, apply = nn.Module.register_parameter, nn.Module._apply
    meta_init.start(main=False)
    torch.manual_seed(0)
    linear = nn.Linear(8, 4)
    drawn = torch.rand(2)
    assert linear.weight.is_meta and linear.to("cpu", torch.bfloat16).weight.dtype == torch.bfloat16
    patches.release(None)
    assert (nn.Module.register_parameter, nn.Module._apply) == (register, apply)
    torch.manual_seed(0)
    assert not nn.Linear(8, 4).weight.is_meta and torch.equal(torch.rand(2), drawn)
    assert torch.empty(3, device="meta").normal_().is_meta


def test_from_pretrained_draws_no_other_numbers(tmp_path):
    """It builds the model on meta, where process 0 draws none."""
    import transformers

    small = {name: 16 for name in LARGE} | {"num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).save_pretrained(tmp_path)

    def loaded():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        return {parameter.is_meta for parameter in model.parameters()}, torch.rand(3).tolist()

    whole = loaded()
    try:
        meta_init.start(main=False)
        assert loaded() == ({True}, whole[1])
    finally:
        patches.release(None)


@pytest.mark.parametrize("asked", ["", "1"])
def test_a_script_that_knows_nothing_of_us_has_whole_weights_unless_asked(tmp_path, monkeypatch, asked):
    """Its frozen teacher, say, is never prepared."""
    monkeypatch.syspath_prepend(CLIENTS)
    env = {"FAITHFUL_PROJECT_DIR": str(tmp_path / "run")} | ({"FAITHFUL_RAM_EFFICIENT": asked} if asked else {})
    (tmp_path / "out").mkdir()
    ranks = Ranks(efficient(tmp_path, "fsdp_bf16"), ["--output_dir", str(tmp_path / "out")], env=env,
                  script=CLIENTS / "gan.py", before=lambda rank: __main__.take_its_place())  # fmt: skip
    codes, text = ranks.wait(60), ranks.text()
    if asked:
        assert set(codes) != {0} and "only process 0 has the weights of a model before prepare()" in text
    else:
        assert codes == [0, 0] and "note: fsdp_cpu_ram_efficient_loading is off with -m faithful" in text


HOST_UNTIL_SPLIT = """
import os, runpy, sys
from deepspeed.runtime.zero.partition_parameters import Init

convert = Init._convert_to_zero_parameters

def noted(self, params):
    params = list(params)
    if os.environ["RANK"] == "0":
        print("on the device:", sum(p.is_cuda for p in params), "of", len(params), flush=True)
    convert(self, params)

Init._convert_to_zero_parameters = noted
sys.argv[0] = "{recipe}"
runpy.run_path("{recipe}", run_name="__main__")
"""


def test_zero3_moves_no_whole_model_to_the_device(gpu, tmp_path):
    """With the key, process 0's parameters stay on the host until DeepSpeed splits them, one after the other."""
    pytest.importorskip("deepspeed", reason="./launch.sh setup --extra deepspeed")
    script = tmp_path / "noted.py"
    script.write_text(HOST_UNTIL_SPLIT.format(recipe=ROOT / "recipes" / "vit.py"))
    whole = gpu.train("zero3_bf16", tmp_path / "whole", *ARGV, processes=2)
    run, job = tmp_path / "run", {"script": str(script), "processes": 2, "env": {"FAITHFUL_RAM_EFFICIENT": "1"}}
    codes, text = gpu.run(efficient(tmp_path, "zero3_bf16"), run, *ARGV, **job)
    said = [line for line in text.splitlines() if line.startswith("on the device")]
    assert set(codes) == {0} and said, text
    assert not [line for line in said if not line.startswith("on the device: 0 of")], said
    assert distance(run, whole) == 0
