"""What plain torch trains and an engine cannot: each is refused in one line, with its own reason, or trains."""

import abc
import copy
import faulthandler
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import DistributedDataParallelKwargs
from accelerate.utils import gather_object, set_seed
from conftest import Ranks, distance, record, train, weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.optim.swa_utils import AveragedModel

from faithful import Accelerator

WIDTH, STEPS = 32, 3


class Block(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.island, self.linear, self.gate = what == "island", nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.times = torch.mul if what != "input" else torch.Tensor.mul_

    def forward(self, x):
        x = self.times(x, 1)
        with torch.autocast("cpu", enabled=not self.island and torch.is_autocast_enabled("cpu")):
            gate = self.gate(x.float() if self.island else x).sigmoid()
        return x + self.linear(x).tanh() * gate.to(x.dtype)


class Blocks(nn.ModuleList):
    def forward(self, x):
        for block in self:
            x = block(x)
        return x


class StableLayerNorm(Blocks):
    """As the encoder of transformers' wav2vec 2.0, which is no norm and changes what it gets in place."""

    def __init__(self, blocks):
        super().__init__(blocks)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return super().forward(x.mul_(1)) * self.scale


class Net(nn.Module):
    _no_split_modules = ["Block"]

    def __init__(self, what):
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH, sparse=what == "sparse")
        self.conv = nn.Conv2d(2, WIDTH, 4)
        self.blocks = (StableLayerNorm if what == "named_norm" else Blocks)(Block(what) for _ in range(2))
        self.in_place = what == "in_place"  # as peft's AdaLoRA adds to the output of a layer
        self.tower = nn.Linear(WIDTH, WIDTH, bias=not self.in_place)  # torchao's output with a bias may be changed
        self.other, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.other.requires_grad_(what == "swapped")

    def forward(self, ids, tower):
        x = self.embed(ids)
        x = x + self.conv(x.view(-1, 2, 4, 4)).flatten(1)
        x = self.blocks(x)
        if self.in_place:
            out = self.tower(x)
            out += x
            return self.head(out)
        return self.head(x + (self.tower if tower else self.other)(x) if tower is not None else x)


class WithoutTokens(Net):
    def get_input_embeddings(self):
        """As transformers' Segformer."""
        raise NotImplementedError


class OwnParameters(Net):
    def parameters(self):
        """As magvit2-pytorch's, which leaves out what another optimizer trains."""
        return list(self.head.parameters())


class LayoutOfABC(abc.ABC, Net):
    """As GLiNER's classes: Python does not let it become a class with another first base."""


def built(what):
    set_seed(0)
    model = {"abc": LayoutOfABC, "no_tokens": WithoutTokens, "own": OwnParameters}.get(what, Net)(what)
    if what == "other_strides":
        model.conv.to(memory_format=torch.channels_last)
        model.tower.weight = nn.Parameter(model.tower.weight.detach().t().contiguous().t())
        assert not model.conv.weight.is_contiguous() and not model.tower.weight.is_contiguous()
    if what == "tied_blocks":
        model.blocks[1].linear.weight = model.blocks[0].linear.weight
    if what == "shared_module":  # as lucidrains' rotary embeddings
        model.blocks[1].gate = model.blocks[0].gate
    return model


def script(what):
    """What a rank runs: some steps in which something is done that not every engine has a way for."""
    kwargs = DistributedDataParallelKwargs(find_unused_parameters=what in ("parts_found", "swapped"))
    accelerator = Accelerator(project_dir=sys.argv[2], kwargs_handlers=[kwargs])
    model, weight = built(what), nn.Parameter(torch.zeros(1))
    if what == "seeds":  # as k-diffusion, whose processes have a seed each
        nn.init.normal_(model.head.weight, std=0.1, generator=torch.Generator().manual_seed(accelerator.process_index))
        first = model.head.weight.detach().clone()
    trained = [*nn.Module.parameters(model), *([weight] if what == "loss" else [])]
    if what in ("set", "set_of_matrices") and accelerator.process_index:  # each process has its own order of a set
        trained.reverse()
    # MS-AMP's levels take no other
    optimizer = torch.optim.AdamW(trained) if accelerator.plan.level else torch.optim.SGD(trained, lr=0.1)
    if what == "set_of_matrices":
        optimizer = torch.optim.Muon([parameter for parameter in trained if parameter.ndim == 2])
    if what == "transformers_shards":
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.distributed import DistributedConfig

        tiny = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=8, num_hidden_layers=1))
        tiny.save_pretrained(f"{sys.argv[2]}-tiny")
        LlamaForCausalLM.from_pretrained(f"{sys.argv[2]}-tiny", distributed_config=DistributedConfig(tp_size=2))
    if what == "compiled":
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    if what == "sharded":
        model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.data, init_device_mesh("cpu", (2,))))
    if what == "apart":  # as the optimizers of pytorch-custom-utils
        accelerator.prepare(optimizer)
    if what == "second":  # as k-diffusion's average of the weights
        accelerator.prepare(model, copy.deepcopy(model), optimizer)
    mean = AveragedModel(model) if what == "mean" else None
    if what == "convs":  # as TiTok's discriminator
        critic = nn.Conv2d(2, 1, 2)
        accelerator.prepare(critic, torch.optim.AdamW(critic.parameters()))
    if what == "frozen":  # as sd-scripts' UNet
        accelerator.prepare(copy.deepcopy(model).requires_grad_(False))
    if what == "criterion":
        accelerator.prepare(nn.MSELoss())
    if what == "target":  # as random network distillation has one, and a loss without weights
        accelerator.prepare(nn.Linear(4, 4 + accelerator.process_index).requires_grad_(False), nn.MSELoss())
    others = [nn.MSELoss()] if what == "criterion" else [copy.deepcopy(model)] if what == "shared" else []
    if what == "shared":  # as the encoder of distil-whisper's teacher and student
        others[0].blocks = model.blocks
        others[0].requires_grad_(False)
    optimizers = [optimizer, torch.optim.SGD(model.head.parameters())] if what == "optimizers" else [optimizer]
    if what == "in_backward":  # as sd-scripts' fused groups
        alone = model.blocks[0].linear.weight
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in ([p for p in trained if p is not alone], [alone])]
    model, optimizer, *more = accelerator.prepare(model, *optimizers, *others)
    if what == "in_backward":
        alone = accelerator.unwrap_model(model).blocks[0].linear.weight
        alone.register_post_accumulate_grad_hook(lambda _: more[0].step())
        alone.register_post_accumulate_grad_hook(lambda _: more[0].zero_grad())
    if what == "own_in_backward":  # as torch's tutorial and sd-scripts' --fused_backward_pass: of no use to prepare()
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            own = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.zero_grad())
    if what == "seeds":
        assert torch.equal(model.head.weight.full_tensor(), gather_object([first])[0]), "every group of HSDP's"
    if what == "loaded" and accelerator.is_main_process:
        accelerator.unwrap_model(model).load_state_dict({k: v * 2 for k, v in built(what).state_dict().items()})
    if what == "averaged":
        AveragedModel(model)
    if what == "inference":  # as voicebox-pytorch's validation
        with torch.inference_mode():
            model(torch.arange(8), True)
    if what == "wrapper":  # as muse-maskgit-pytorch's trainers, in several processes
        model.module.train()
    if what == "copied":  # as pytorch-accelerated's ModelEmaCallback does
        copy.deepcopy(accelerator.unwrap_model(model))(torch.arange(8), True)
    if what == "prepared_twice":
        model, optimizer = accelerator.prepare(model, optimizer)
    if what == "scaler_off":  # as imagen-pytorch's trainer
        accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
    if what in ("clip_each", "clip_values", "zero_first", "model_zero"):
        accelerator.gradient_accumulation_steps = 2
    if what == "one_cycle":
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        inside = accelerator.strategy.torch_optimizer(optimizer)
        assert [(group["lr"], group["momentum"]) for group in inside.param_groups] == [(pytest.approx(0.1 / 25), 0.95)]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0) if "plateau" in what else None
    for step in range(STEPS):
        if accelerator.gradient_accumulation_steps > 1:
            with accelerator.accumulate(model):
                if what == "zero_first":
                    optimizer.zero_grad()
                accelerator.backward(model(torch.arange(8), True).float().square().mean())
                if what == "clip_each":
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                if what == "clip_values":
                    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
                if what == "model_zero" and not accelerator.sync_gradients:
                    model.zero_grad()
                optimizer.step()
            continue
        ids = torch.arange(8) + 8 * (step + accelerator.process_index)
        tower = what != "swapped" or accelerator.is_main_process
        if what in ("parts", "parts_found") and accelerator.process_index and step:
            tower = None
        called = accelerator.unwrap_model(model) if what == "inside" else model  # as open-instruct's get_reward
        called = model.forward if what == "forward" else called  # as lerobot
        if what == "layer_forward":  # as sd-scripts' LoRA calls the layers that it has replaced
            accelerator.unwrap_model(model).tower.forward(torch.randn(8, WIDTH))
        loss = (called(ids, tower).float() - ids.view(-1, 1) / 64).square().mean()
        if what == "orthogonal":  # as AdaLoRA asks of its parts
            weight = accelerator.unwrap_model(model).blocks[0].linear.weight
            square = weight @ weight.T
            loss = loss + (square - torch.eye(*square.size(), out=torch.empty_like(square))).square().mean()
        if what == "by_hand":
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
        else:
            accelerator.backward(loss, retain_graph=what == "twice")
        if what == "own_in_backward":
            continue
        if what == "reduced":  # as sd-scripts' all_reduce_network
            for parameter in filter(lambda p: p.grad is not None, model.parameters()):
                parameter.grad = accelerator.reduce(parameter.grad, "mean")
        if what == "twice":
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if mean:
            mean.update_parameters(accelerator.unwrap_model(model))
        if plateau:  # as each process sees it
            worse = torch.tensor(float(step * (2 * accelerator.process_index - 1)))
            plateau.step(accelerator.reduce(worse, "mean") if what == "plateau_of_all" else worse)
    if what == "written" and accelerator.is_main_process:
        accelerator.unwrap_model(model).head.weight.data.zero_()
    if what in ("written", "target"):
        accelerator.save_state(f"{sys.argv[2]}-state")
    state, file = accelerator.unwrap_model(model).state_dict(), f"{sys.argv[2]}-saved.pt"
    if what == "moments":
        optimizer.state_dict()
    if what == "saved":  # as k-diffusion does
        accelerator.save({"model": state, "steps": STEPS}, file)
        saved, whole = accelerator.is_main_process and torch.load(file)["model"], accelerator.get_state_dict(model)
        assert not saved or all(torch.equal(saved[name], whole[name]) for name in whole)
    if what in ("saved_by_each", "saved_by_all") or (what == "saved_alone" and accelerator.is_main_process):
        folder = Path(f"{sys.argv[2]}-saved", str(accelerator.process_index * (what == "saved_by_each")))
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / "part.pt")
    accelerator.save_model(model, f"{sys.argv[2]}/model")
    accelerator.end_training()
    if what == "saved_at_last" and accelerator.is_main_process:
        torch.save(state, file)
    if what == "at_last" and accelerator.is_main_process:  # as sd-scripts' save_state_on_train_end
        state = Path(accelerator.save_state(f"{sys.argv[2]}-state"))
        accelerator.checkpoints.wait()
        assert (state / "manifest.json").exists()


ISLAND, COPY = "autocast off, perhaps: use a ddp config", "the script copies a model after prepare()"
WAITS = "the script uses gradients between the micro-batches of a step, or gives them up"
TRAINS = None
ROWS = [
    ("ddp_fp32", "parts", "DistributedDataParallelKwargs(find_unused_parameters=True)"),
    ("ddp_fp32", "parts_found", TRAINS),
    ("ddp_fp32", "swapped", TRAINS),
    ("fsdp_bf16", "swapped", "different parts of the model"),
    ("zero2_bf16", "swapped", "different parts of the model"),
    ("zero1_bf16", "swapped", "different parts of the model"),
    ("ddp_fp32", "twice", "more backward passes than forward passes"),
    ("ddp_fp32", "inside", "calls the model inside DDP"),
    *((config, "inside", TRAINS) for config in ("fsdp_bf16", "zero2_bf16", "zero3_bf16")),
    ("ddp_fp32", "by_hand", "steps without accelerator.backward"),
    ("single_fp8_msamp_o2", "by_hand", "torch.autograd.grad asks for the gradient of a converted weight"),
    ("single_fp8", "by_hand", TRAINS),
    ("fsdp_bf16", "by_hand", "torch.autograd.grad asks for gradients of shards"),
    *((f"zero{stage}_bf16", "by_hand", "gradients that DeepSpeed neither averages nor keeps") for stage in (1, 2, 3)),
    ("ddp_fp32", "sharded", "Net is sharded before prepare()"),
    ("fsdp_bf16", "sharded", "Net is sharded before prepare()"),
    ("single_bf16", "transformers_shards", "the script lets transformers shard a model"),
    ("ddp_fp32", "sparse", TRAINS),
    ("fsdp_bf16", "sparse", "embed: FSDP2 takes no sparse gradients"),
    ("zero2_bf16", "sparse", "embed: DeepSpeed takes no sparse gradients"),
    ("fsdp_bf16", "tied_blocks", "blocks.0.linear.weight is tied between blocks.0 and blocks.1"),
    ("zero3_bf16", "compiled", "blocks.0: ZeRO-3 takes no module that torch.compile(module) has wrapped"),
    ("fsdp_bf16", "compiled", TRAINS),
    ("zero2_bf16", "compiled", TRAINS),
    ("ddp_fp32", "plateau", "the processes have different learning rates"),
    ("fsdp_bf16", "plateau", "the processes have different learning rates"),
    ("zero2_bf16", "plateau", "the processes have different learning rates"),
    ("ddp_fp32", "plateau_of_all", TRAINS),
    ("ddp_bf16", "loaded", "the processes hold different weights, their norms are"),
    ("fsdp_bf16", "loaded", "some of the processes alone have written whole tensors into the sharded model"),
    ("ddp_bf16", "target", TRAINS),
    ("ddp_bf16", "written", "the processes hold different weights, their norms are"),
    ("ddp_bf16", "island", TRAINS),
    ("fsdp_bf16", "island", ISLAND),
    ("zero2_bf16", "island", ISLAND),
    ("fsdp_bf16", "averaged", COPY),
    ("zero2_bf16", "averaged", COPY),
    ("zero3_bf16", "averaged", COPY),
    ("ddp_bf16", "forward", TRAINS),
    ("fsdp_bf16", "forward", "as generate() or model.forward(x), and not the model itself"),
    ("ddp_fp8_msamp_o2", "moments", TRAINS),
    ("ddp_fp8_msamp_o3", "moments", "under O3 optimizer.state_dict() is a part of it in each process"),
    ("ddp_bf16", "copied", TRAINS),
    ("ddp_fp8", "copied", TRAINS),
    ("fsdp_bf16", "abc", "FSDP2 gives LayoutOfABC a class of its own, for which Python needs nn.Module as the first"),
    ("ddp_bf16", "abc", TRAINS),
    ("fsdp_bf16", "no_tokens", TRAINS),
    *((config, "seeds", TRAINS) for config in ("fsdp_bf16", "hsdp_bf16")),
    ("single_fp8_msamp_o2", "own", TRAINS),
    ("fsdp_bf16", "own", "OwnParameters has a method parameters() of its own, which FSDP2 would take for torch's"),
    ("zero2_bf16", "own", "OwnParameters has a method parameters() of its own, which DeepSpeed would take for torch's"),
    ("fsdp_bf16", "saved", TRAINS),
    ("fsdp_fp8_msamp_o2", "saved", TRAINS),
    ("ddp_bf16", "shared", TRAINS),
    ("fsdp_fp8", "shared", "Net shares blocks.0.linear.weight with another prepared model"),
    ("fsdp_bf16", "saved_by_each", TRAINS),
    ("fsdp_bf16", "saved_by_all", "several processes write their parts of sharded tensors to"),  # as T2I-Adapter's hook
    ("fsdp_bf16", "saved_alone", "the main process alone calls torch.save or save_file with sharded tensors"),
    ("zero2_bf16", "one_cycle", TRAINS),
    ("zero3_bf16", "one_cycle", TRAINS),
    ("zero2_bf16", "apart", "zero2 bf16 needs a model and its optimizer in one call"),
    ("zero2_bf16", "copied", COPY),
    ("zero2_bf16", "mean", "in 16 bit, and AveragedModel.update_parameters would average these"),
    ("fsdp_bf16", "mean", TRAINS),
    ("single_fp8", "convs", "none of 0 Linear layers can be: Conv2d has none"),
    ("single_fp8_msamp_o2", "convs", "finds no Linear to convert in Conv2d (it has none): train it in bf16"),
    ("zero2_bf16", "frozen", "zero2 trains one model, the script prepares a frozen one"),
    ("fsdp_bf16", "frozen", TRAINS),
    ("ddp_bf16", "at_last", TRAINS),
    ("zero2_bf16", "second", "zero2 trains one model, the script prepares several"),
    ("ddp_fp32", "orthogonal", TRAINS),
    ("ddp_fp8_msamp_o3", "other_strides", TRAINS),
    ("fsdp_fp32", "orthogonal", "that torch's shards do not have (aten.eye"),
    ("fsdp_fp8_msamp_o2", "in_place", TRAINS),
    ("ddp_fp8", "in_place", TRAINS),
    ("fsdp_fp8", "inference", "the script calls the model in train() within torch.inference_mode()"),
    ("fsdp_bf16", "inference", TRAINS),
    ("fsdp_fp8", "in_place", "changes the output of an FP8 layer in place"),
    *((config, "input", "a layer changes what it gets in place") for config in ("fsdp_bf16", "fsdp_fp8")),
    ("zero3_bf16", "input", TRAINS),
    ("fsdp_bf16", "named_norm", TRAINS),
    ("fsdp_bf16", "criterion", TRAINS),
    ("fsdp_fp8_msamp_o2", "criterion", TRAINS),
    *((config, "criterion", TRAINS) for config in ("zero2_bf16", "zero3_bf16")),
    *(
        ("ddp_fp32", what, "an optimizer steps in a hook of a backward pass, before DDP has averaged")
        for what in ("in_backward", "own_in_backward")
    ),
    *((config, what, TRAINS) for config in ("single_bf16", "fsdp_bf16") for what in ("in_backward", "own_in_backward")),
    ("zero2_bf16", "optimizers", "under zero2 one optimizer updates the model, the script prepares 2"),
    ("ddp_bf16", "wrapper", TRAINS),
    ("zero2_bf16", "wrapper", TRAINS),
    ("fsdp_bf16", "wrapper", "the script uses model.module, the inside of DDP's wrapper"),
    ("fsdp_bf16", "set", TRAINS),
    ("fsdp_bf16", "set_of_matrices", "each process has the parameters of Muon in another order, as a set has them"),
    ("ddp_fp8_msamp_o2", "set", "each process has the parameters of AdamW in another order, as a set has them"),
    ("fsdp_fp8_msamp_o2", "set", "each process has the parameters of AdamW in another order, as a set has them"),
    ("zero1_bf16", "set", "each process has the parameters of SGD in another order, as a set has them"),
    ("zero3_bf16", "set", "each process has the parameters of SGD in another order, as a set has them"),
    ("zero2_bf16", "loss", "1 tensors that are not in the model"),
    ("fsdp_bf16", "shared_module", "blocks.0.gate.weight is tied between blocks.0 and blocks.1"),
    ("ddp_fp32", "shared_module", TRAINS),
    ("fsdp_bf16", "reduced", "the script exchanges a sharded tensor over the processes"),
    ("ddp_fp32", "reduced", TRAINS),
    *((config, "clip_each", WAITS) for config in ("fsdp_bf16", "fsdp_fp8_msamp_o2", "zero2_bf16")),
    *(("fsdp_fp32", what, WAITS) for what in ("clip_values", "zero_first", "model_zero")),
    *(("ddp_bf16", what, TRAINS) for what in ("clip_each", "clip_values", "zero_first", "model_zero")),
    ("zero2_bf16", "zero_first", TRAINS),
    *((config, "prepared_twice", TRAINS) for config in ("zero2_bf16", "zero3_bf16", "fsdp_bf16")),
    ("single_fp32", "scaler_off", TRAINS),
    ("fsdp_fp8_msamp_o2", "layer_forward", "tower has not gathered its weight: call the layer in the model's forward"),
    ("ddp_bf16", "saved_at_last", TRAINS),
]
QUICK = {
    ("ddp_fp32", "parts"),
    ("ddp_fp32", "twice"),
    ("fsdp_bf16", "tied_blocks"),
    ("zero2_bf16", "island"),
    ("zero1_bf16", "set"),
    ("fsdp_bf16", "clip_each"),
}


@pytest.mark.parametrize(
    ("config", "what", "line"),
    [pytest.param(*row, marks=[] if row[:2] in QUICK else [pytest.mark.slow, pytest.mark.ci]) for row in ROWS],
)
def test_what_plain_torch_trains_is_trained_or_refused_in_a_line(tmp_path, config, what, line):
    run = tmp_path / "run"
    ranks = Ranks(config, ["--output_dir", str(run)], script=partial(script, what))
    codes, log = ranks.wait(), ranks.text()
    assert set(codes) == {0} if line is TRAINS else 2 in codes and 0 not in codes, log
    # a refusal of one process that is not the first: the record has it
    alone = codes[0] != 2 and line is not TRAINS
    said = record(run)["error"] if alone else log
    assert "Traceback" not in log and log.count("refused: ") == (line is not TRAINS and not alone), log
    assert line is TRAINS or line in said, log
    assert line is TRAINS or not (run / "run.json").exists() or line in record(run)["error"]
    assert any(run.iterdir()) if run.exists() else line is not TRAINS, "a refused run leaves no empty folder"
    if line is TRAINS:
        saved, first = weights(run), dict(built(what).named_parameters())
        moved = [name for name, value in saved.items() if name in first and not value.float().equal(first[name])]
        assert len(moved) > 1 and all(value.isfinite().all() for value in saved.values()), moved


def test_a_part_is_not_saved_after_the_end(tmp_path):
    """The processes do not exchange any more. A script that its files show is followed: launch/test_following.py."""
    ranks = Ranks("fsdp_bf16", ["--output_dir", str(tmp_path / "run")], script=partial(script, "saved_at_last"))
    assert ranks.wait() == [2, 0] and not list(tmp_path.glob("*.pt")), ranks.text()
    assert "refused: torch.save or save_file after end_training(), when no process has" in ranks.text()


@pytest.mark.parametrize("config", ["fsdp_bf16", pytest.param("zero2_bf16", marks=pytest.mark.slow)])
def test_gloo_ends_a_process_that_gets_data_of_another_size(tmp_path, config):
    """Of another part of the model. The launcher says what it may be (tools/accelerate_launch.py), the others that they
    are alone."""
    quiet = lambda rank: faulthandler.disable()  # noqa: E731  pytest's, which prints its own stack
    ranks = Ranks(config, ["--output_dir", str(tmp_path / "run")], before=quiet, script=partial(script, "parts"))
    codes, log = ranks.wait(), ranks.text()
    assert sorted(codes) == [-signal.SIGABRT, 1] and "Traceback" not in log, log
    assert log.count("error: another process of this run ended") == (codes[0] == 1), log


@pytest.mark.parametrize("config", ["fsdp_fp32", pytest.param("zero3_bf16", marks=pytest.mark.slow)])
def test_weights_in_another_order_in_memory_train_as_others(tmp_path, config):
    runs = {what: train(config, tmp_path / what, script=partial(script, what)) for what in ("plain", "other_strides")}
    assert distance(*runs.values()) < 1e-6
