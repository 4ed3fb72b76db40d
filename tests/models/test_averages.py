"""Averages of weights (EMA) of a model under FSDP2 or HSDP, by classes that hold whole tensors."""

import copy
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from amp8_helpers import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from faithful import patches
from faithful.errors import Refused
from faithful.models import averages

PACKAGES = ("timm", "diffusers", "ema_pytorch")
missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (setup --extra dev)")


def averages_of(model):
    """{name: (update, its averaged parameters)}, of copies made now."""
    from diffusers.training_utils import EMAModel
    from ema_pytorch import EMA
    from timm.utils import ModelEmaV2, ModelEmaV3

    averages.of_shards()  # as prepare does; before the methods below are looked up
    torchs = {"torch": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)), "mean": AveragedModel(model)}
    timms = {"v2": ModelEmaV2(model, 0.5), "v3": ModelEmaV3(model, 0.5), "loop": ModelEmaV3(model, 0.5, foreach=False)}
    ema = EMA(model, beta=0.5, update_after_step=0, update_every=1, include_online_model=False)
    found = {name: (one.update_parameters, list(one.module.parameters())) for name, one in torchs.items()}
    found |= {name: (one.update, list(one.module.parameters())) for name, one in timms.items()}
    found["ema"] = (lambda _: ema.update(), list(ema.ema_model.parameters()))
    kept = [EMAModel(model.parameters(), decay=0.5, min_decay=0.5, foreach=each) for each in (False, True)]
    for one in kept:
        found[f"diffusers {one.foreach}"] = (lambda model, one=one: one.step(model.parameters()), one.shadow_params)
    return found, kept


def apart(rank, world):
    """The names of averages that differ in a bit from those of the same model in one piece."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 33), nn.ReLU(), nn.Linear(33, 32))
    one_piece = copy.deepcopy(model)
    (ours, kept), (theirs, _) = averages_of(model), averages_of(one_piece)
    shape, names = ((world,), ("shard",)) if world == 2 else ((2, world // 2), ("replicate", "shard"))
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    for step in range(4):
        with torch.no_grad():
            for shard, whole in zip(model.parameters(), one_piece.parameters(), strict=True):
                whole += 0.1 * torch.randn(whole.shape, generator=torch.Generator().manual_seed(step))
                shard.copy_(distribute_tensor(whole.data, shard.device_mesh, shard.placements))
        for found, of in ((ours, model), (theirs, one_piece)):
            for update, _ in found.values():
                update(of)
    wrong = [name for name, (_, found) in ours.items() if not all(map(torch.equal, found, theirs[name][1]))]
    for one in kept:  # put in for an evaluation, and taken out again
        for change, wanted in ((one.copy_to, one.shadow_params), (one.restore, list(one_piece.parameters()))):
            if change == one.copy_to:
                one.store(model.parameters())
            change(model.parameters())
            now = [shard.full_tensor() for shard in model.parameters()]
            wrong += [] if all(map(torch.equal, now, wanted)) else [f"{change.__name__} {one.foreach}"]
    return len(ours), wrong


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_averages_of_shards_are_those_of_the_whole_model_bit_for_bit(world):
    assert run_ranks(world, apart) == [(8, [])] * world


def test_the_average_of_trls_callback_is_refused_where_weights_are_in_16_bit(monkeypatch):
    class BEMACallback:
        def on_train_begin(self, *args):
            """Copies the weights."""

    monkeypatch.setitem(sys.modules, "trl.trainer.callbacks", SimpleNamespace(BEMACallback=BEMACallback))
    with patches.kept_for(1):
        averages.refuse("under zero2 DeepSpeed holds the weights in 16 bit")
        with pytest.raises(Refused, match="BEMACallback.on_train_begin would average these: use a ddp or fsdp config"):
            BEMACallback().on_train_begin(None)
    patches.release(1)
    assert BEMACallback().on_train_begin(None) is None
