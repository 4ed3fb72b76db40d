"""Ordinary idioms of training scripts train what they train in plain torch, or are refused in one line."""

import functools
import sys

import idioms
import pytest
import torch
from conftest import Ranks
from safetensors.torch import load_file, save_file

from faithful import Accelerator

BOUNDS = {"single_fp32": 1e-4, "single_fp16": 0.05, "ddp_bf16": 0.05, "fsdp_bf16": 0.05, "zero2_bf16": 0.05,
          "single_fp8": 0.12, "single_fp8_msamp_o2": 0.17}  # fmt: skip
# They use .grad themselves, which in fp16, as in torch, is multiplied by the scale until accelerator.unscale_gradients().
BY_HAND = ("sharpness_aware", "clipping_by_hand", "without_an_optimizer")
ONE_OPTIMIZER = "MS-AMP's levels take one optimizer for a model"
READS = "the script reads .grad between backward and step, which under ZeRO is not there"
CODES = "holds MS-AMP's codes: it can't be changed by"
REFUSED = {  # (idiom, config): what the line says
    ("retained_graph", "ddp_bf16"): "the gradients were not averaged over the processes",
    ("tied_later", "ddp_bf16"): "or do not replace it after prepare (a tied weight)",
    ("unused_layer", "ddp_bf16"): "a parameter got no gradient in the last backward pass",
    ("gradient_penalty", "fsdp_bf16"): "a second derivative (create_graph=True, a gradient penalty) needs weights that",
    ("tied_later", "single_fp8_msamp_o2"): "second has the converted weight of another layer now",
    ("average", "fsdp_bf16"): "computes with sharded weights and whole tensors together",
    ("lbfgs", "single_fp8_msamp_o2"): "amp8 needs torch.optim.AdamW or Adam itself, not LBFGS",
    ("gradient_penalty", "single_fp8"): "a gradient of FP8 products has no derivative",
    ("gradient_penalty", "single_fp8_msamp_o2"): "a gradient of FP8 products has no derivative",
    ("new_optimizer", "single_fp8_msamp_o2"): ONE_OPTIMIZER,
    ("two_optimizers_clipped", "single_fp8_msamp_o2"): ONE_OPTIMIZER,
    ("lbfgs", "single_fp16"): "fp16's gradient scaler takes no closure of optimizer.step",
    ("closures", "single_fp16"): "fp16's gradient scaler takes no closure of optimizer.step",
    ("own_scaler", "single_fp16"): "gradients are not multiplied by fp16's scale",
    ("own_scaler", "zero2_bf16"): "the script has a GradScaler of its own",
    **dict.fromkeys(
        [(idiom, "zero2_bf16") for idiom in ("wgan", "two_models_clipped", "prepared_average")],
        "zero2 trains one model, the script prepares several",
    ),
    ("two_optimizers_clipped", "zero2_bf16"): "one optimizer updates the model, the script prepares 2",
    ("gradient_penalty", "zero2_bf16"): "DeepSpeed's engine takes no second derivative",
    ("lbfgs", "zero2_bf16"): "LBFGS is not known to update each element by itself",
    ("closures", "zero2_bf16"): "DeepSpeed calls no closure of optimizer.step",
    ("earlier_state", "zero2_bf16"): "the script saves or loads the optimizer's state_dict",
    ("thawed_by_a_group", "zero2_bf16"): "add_param_group after prepare",
    **dict.fromkeys([(idiom, "zero2_bf16") for idiom in (*BY_HAND, "new_optimizer")], READS),
    ("sharpness_aware", "single_fp8_msamp_o2"): CODES,
    ("without_an_optimizer", "single_fp8_msamp_o2"): CODES,
}
QUICK = [("unused_layer", "ddp_bf16"), ("two_models_clipped", "single_fp16"), ("own_scaler", "single_fp16"),
         ("accumulation_said_later", "zero2_bf16"), ("shared_weight", "zero2_bf16"), ("sharpness_aware", "fsdp_bf16"),
         ("earlier_state", "fsdp_bf16"), ("own_call", "fsdp_bf16"),
         ("clipping_by_hand", "fsdp_bf16"), ("wgan", "single_fp8"), ("cleared_state", "single_fp8_msamp_o2"),
         ("prepared_average", "single_fp8_msamp_o2")]  # fmt: skip


class Plain:
    """What the idioms use of an Accelerator, in plain torch, in one process that has the whole batch."""

    num_processes, process_index, gradient_accumulation_steps = 1, 0, 1

    def prepare(self, *args):
        return args if len(args) > 1 else args[0]

    def backward(self, loss, **kwargs):
        (loss / self.gradient_accumulation_steps).backward(**kwargs)

    def unwrap_model(self, model):
        return model


def run(idiom):
    """What a rank runs. The weights of each rank are in a file beside its run's folder."""
    accelerator = Accelerator(project_dir=sys.argv[2])
    model = idioms.IDIOMS[idiom](accelerator)
    if weights := accelerator.get_state_dict(model):
        weights = {name: weight.float().cpu().clone() for name, weight in weights.items()}
        save_file(weights, f"{sys.argv[2]}-{accelerator.process_index}.safetensors")
    accelerator.end_training()


def vector(weights):
    """All floating-point values, in the order of their names."""
    values = {name.removeprefix("module."): value.detach().float() for name, value in weights.items()}
    return torch.cat([values[name].flatten() for name in sorted(values) if "num_batches" not in name])


def check(tmp_path, monkeypatch, idiom, config):
    wanted = vector(idioms.IDIOMS[idiom](Plain()).state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(idioms, "STEPS", 0)
        begun = vector(idioms.IDIOMS[idiom](Plain()).state_dict())
    script = functools.partial(run, idiom)
    ranks = Ranks(config, ["--output_dir", str(tmp_path / "run")], script=script)
    codes, said = set(ranks.wait(60)), REFUSED.get((idiom, config))
    if said:
        lines = [line for line in ranks.text().splitlines() if line.startswith("refused: ")]
        assert codes == {2} and len(lines) == 1 and said in lines[0], ranks.text()[-3000:]
        return
    assert codes == {0}, ranks.text()[-3000:]
    bound = BOUNDS[config] * (3 if idiom == "lbfgs" else 1)  # steps by quotients of small differences
    for file in sorted(tmp_path.glob("run-*.safetensors")):
        found = vector(load_file(file))
        assert (found - wanted).norm() < bound * (wanted - begun).norm(), "another training"


@pytest.mark.parametrize(("idiom", "config"), QUICK)
def test_an_idiom_trains_as_in_torch_or_is_refused(tmp_path, monkeypatch, idiom, config):
    check(tmp_path, monkeypatch, idiom, config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("idiom", "config"),
    [
        (idiom, config)
        for idiom in idioms.IDIOMS
        for config in BOUNDS
        if config != "single_fp16" or idiom not in BY_HAND
    ],
)
def test_every_idiom_trains_as_in_torch_or_is_refused(tmp_path, monkeypatch, idiom, config):
    check(tmp_path, monkeypatch, idiom, config)
