"""amp8 refuses some models. Only unusual ones, or a moved state, reach the other branches that are tested."""

import copy

import pytest
import torch
import torch.distributed as dist
from amp8_helpers import linears, on_ranks, run_ranks, seeded, start, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import amp8
from amp8.optimizer import largest_move


def loss_of(model, step):
    return model(seeded(16, 32, seed=step)).square().mean()


def test_a_wrapped_model_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="initialize before DistributedDataParallel wraps the model"):
            start(DistributedDataParallel(linears(32, 32)))
    finally:
        dist.destroy_process_group()


def test_a_weight_of_another_dtype_stays():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, dtype=torch.float64))
    model, _ = start(model)
    assert model.amp8_state.skipped == [("1", "its weight is float64")]


def test_a_weight_that_is_replaced_after_initialize_is_refused():
    (model, _), (other, _) = start(linears(32, 32)), start(linears(32, 32))
    model[0].weight = other[0].weight
    with pytest.raises(RuntimeError, match="has the converted weight of another layer now: call amp8.initialize last"):
        model(torch.randn(16, 32))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_copy_is_a_plain_model_of_the_true_weights(level):
    """The copy, for evaluation say, stays as it is while the model trains."""
    model, optimizer = start(linears(32, 48, 32), level)
    train(model, optimizer, loss_of, range(2))
    twin = copy.deepcopy(model)
    true = {f"{name}.weight": layer.true_weight() for name, layer in model.named_children()}
    assert twin.amp8_state is None and [type(layer) for layer in twin] == [nn.Linear, nn.Linear]
    before = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    assert all(torch.equal(before[name], true[name]) for name in true)
    train(model, optimizer, loss_of, range(2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in twin.state_dict().items())


def test_amsgrad_s_state_is_refused():
    plain = linears(32, 32)
    adam = torch.optim.AdamW(plain.parameters(), amsgrad=True)
    plain(torch.randn(16, 32)).sum().backward()
    adam.step()
    _, optimizer = start(linears(32, 32))
    with pytest.raises(ValueError, match="amsgrad is not supported"):
        optimizer.load_state_dict(adam.state_dict())


def test_moments_of_a_converted_layer_go_to_one_that_is_not():
    model, optimizer = start(linears(32, 32, 32))
    train(model, optimizer, loss_of, range(2))
    other, second = start(linears(32, 32, 32), skip=["0"])
    second.load_state_dict(optimizer.state_dict())
    state = optimizer.state[model[0].weight]
    expected = amp8.scaling.dequantize(state["exp_avg"], state["exp_avg_scale"])
    assert torch.equal(second.state[other[0].weight]["exp_avg"], expected.view(32, 32)) and expected.any()


def test_a_parameter_with_gaps_in_memory_trains_as_torchs_adam_does():
    """No view of the parameter is one row, so its moments are not quantised."""
    values = seeded(64, 256, seed=1)
    model, plain = linears(32, 32), nn.Parameter(values.clone()[:, ::2])
    model.extra = nn.Parameter(values.clone()[:, ::2])
    model, optimizer = start(model)
    adam = torch.optim.AdamW([plain], 1e-2)
    for _ in range(3):
        for parameter, its_optimizer in ((model.extra, optimizer), (plain, adam)):
            (parameter * torch.linspace(-1, 1, 128)).square().sum().backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    assert torch.equal(model.extra, plain) and (plain - values[:, ::2]).abs().max() > 1e-2


def test_betas_without_a_bound_have_a_large_one():
    assert largest_move(0.99, 0.9) == 100.0 and 1 < largest_move(0.9, 0.999) < 100


def test_a_learning_rate_that_is_a_tensor_is_saved():
    model, optimizer = start(linears(32, 32), lr=torch.tensor(1e-2))
    train(model, optimizer, loss_of, range(2))
    saved = {name: tensor.clone() for name, tensor in amp8.exact_state(model, optimizer).items()}
    lr = optimizer.param_groups[0]["lr"]
    lr.fill_(1.0)
    amp8.load_exact_state(model, optimizer, saved)
    assert optimizer.param_groups[0]["lr"] is lr and lr == torch.tensor(1e-2)


def test_codes_say_what_they_are():
    model, _ = start(linears(32, 32))
    assert "MS-AMP's codes for" in repr(model[0].weight)


def test_products_take_multiples_of_16():
    codes = torch.zeros(16, 24).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="multiples of 16, got K=24, N=16"):
        amp8.scaling.product(codes, codes.t(), torch.ones(()), torch.ones(()))


def skipped_of(model):
    return start(model)[0].amp8_state.skipped


@on_ranks(2)
def test_what_fully_shard_has_cut_otherwise_stays(rank, world):
    model = linears(32, 32, 32)
    fully_shard(model[1])
    fully_shard(model, shard_placement_fn=lambda parameter: Shard(1) if parameter.dim() == 2 else Shard(0))
    assert skipped_of(model) == [("0", "its weight is not sharded by rows")]

    model, mesh = linears(32, 32, 32), init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "tensor"))
    parallelize_module(model[0], mesh["tensor"], ColwiseParallel())
    fully_shard(model, mesh=mesh["data"])
    assert skipped_of(model) == [("0", "its weight is sharded by something else than fully_shard too")]

    model = linears(32, 32, 32)
    fully_shard(model[0], mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model[1], mesh=init_device_mesh("cpu", (1, world), mesh_dim_names=("replicas", "shards")))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    assert skipped_of(model) == [("1", "its weight is on another mesh")]
    assert repr(model[0].weight._local_tensor).startswith("RowShard((16, 32)")


@on_ranks(2)
def test_a_gathered_weight_has_no_gradient_of_its_own(rank, world):
    model, _ = start(fully_shard(linears(32, 32)))
    out = model(torch.ones(16, 32)).sum() + model[0].weight.float().sum()
    with pytest.raises(RuntimeError, match="^0.weight was used without calling 0, as if its codes were values"):
        out.backward()


@on_ranks(2)
def test_a_sharded_layer_takes_its_rows_of_a_whole_weight(rank, world):
    model, _ = start(fully_shard(linears(32, 32, bias=False)))
    whole = seeded(32, 32, seed=5)
    model.load_state_dict({**model.state_dict(), "0.weight": whole})
    assert (model[0].sharding.values().full_tensor() - whole).abs().max() < 2**-10 * 4  # fp16 of values up to 4


@on_ranks(2)
def test_a_gradient_that_a_step_has_used_is_not_used_again(rank, world):
    """A loop that forgets zero_grad would add the gradient of a converted layer to the next step's."""
    weights = []
    for clear in (True, False):
        model, optimizer = start(fully_shard(linears(32, 32)))
        for step in range(3):
            loss_of(model, 10 * step + rank).backward()
            optimizer.step()
            if clear:
                optimizer.zero_grad()
            else:
                model[0].bias.grad = None
        weights.append(model[0].sharding.values().full_tensor())
    assert torch.equal(*weights)


def owned_layers_and_layers_with_moments(rank, world):
    model, optimizer = start(linears(32, 32, 32), "O3")
    plain = torch.optim.AdamW(linears(32, 32, 32).parameters(), 1e-2).state_dict()
    for i, shape in enumerate([(32, 32), (32,), (32, 32), (32,)]):
        moments = {"exp_avg": torch.full(shape, 0.5), "exp_avg_sq": torch.full(shape, 0.25)}
        plain["state"][i] = {"step": torch.tensor(3.0)} | moments
    optimizer.load_state_dict(plain)
    owned = [name for name, layer in model.named_children() if layer.gradient.owner == rank]
    return [owned, [name for name, layer in model.named_children() if layer.weight in optimizer.state]]


def test_under_o3_each_rank_loads_the_moments_that_it_owns():
    results = run_ranks(2, owned_layers_and_layers_with_moments)
    assert sorted(name for owned, _ in results for name in owned) == ["0", "1"]
    assert all(owned == with_moments for owned, with_moments in results), results


@on_ranks(2)
def test_a_layer_that_rests_keeps_its_weight(rank, world):
    """The second layer has no part in the second step, and no gradient that the step could use."""
    model = linears(32, 32, 32)
    for part in (*model, model):
        fully_shard(part)
    model, optimizer = start(model)
    model(torch.ones(16, 32)).square().mean().backward()
    optimizer.step()
    before = model[1].sharding.values().full_tensor()
    model[0](torch.ones(16, 32)).square().mean().backward()
    optimizer.step()
    assert torch.equal(before, model[1].sharding.values().full_tensor())


@on_ranks(2)
def test_under_fully_shard_the_optimizer_may_come_later(rank, world):
    """But not one that was made before: it has the parameters that fully_shard has replaced."""
    weights = []
    for later in (False, True):
        model = linears(32, 32)
        stale = torch.optim.AdamW(model.parameters())
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model, ours = amp8.initialize(model, None if later else optimizer, "O2")
        if later:
            with pytest.raises(ValueError, match="make it after fully_shard"):
                amp8.optimizer_of(model, stale)
            ours = amp8.optimizer_of(model, optimizer)
        train(model, ours, loss_of, range(2))
        weights.append(model[0].sharding.values().full_tensor())
    assert torch.equal(*weights)
