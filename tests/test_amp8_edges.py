"""amp8's refusals, and the branches that only an unusual model or a moved state reaches."""

import copy

import pytest
import torch
import torch.distributed as dist
from amp8_helpers import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import amp8
from amp8.optimizer import largest_move


def layers(*sizes):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair) for pair in zip(sizes, sizes[1:], strict=False)))


def start(model, level="O2", **options):
    return amp8.initialize(model, torch.optim.AdamW(model.parameters(), 1e-2), level, **options)


def train(model, optimizer, steps=2):
    for step in range(steps):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_wrapped_model_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="initialize before DistributedDataParallel wraps the model"):
            start(DistributedDataParallel(layers(32, 32)))
    finally:
        dist.destroy_process_group()


def test_a_weight_of_another_dtype_stays():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, dtype=torch.float64))
    model, _ = start(model)
    assert model.amp8_state.skipped == [("1", "its weight is float64")]


def test_a_weight_that_is_replaced_after_initialize_is_refused():
    (model, _), (other, _) = start(layers(32, 32)), start(layers(32, 32))
    model[0].weight = other[0].weight
    with pytest.raises(RuntimeError, match="has the converted weight of another layer now: call amp8.initialize last"):
        model(torch.randn(16, 32))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_copy_is_a_plain_model_of_the_true_weights(level):
    """For evaluation, say: what then trains is the model, not its copy."""
    model, optimizer = start(layers(32, 48, 32), level)
    train(model, optimizer)
    twin = copy.deepcopy(model)
    true = {f"{name}.weight": layer.true_weight() for name, layer in model.named_children()}
    assert twin.amp8_state is None and [type(layer) for layer in twin] == [nn.Linear, nn.Linear]
    before = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    assert all(torch.equal(before[name], true[name]) for name in true)
    train(model, optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in twin.state_dict().items())


def test_a_layer_that_thaws_under_o3_gets_its_master():
    model = layers(32, 32, 32)
    model[0].requires_grad_(False)
    model, optimizer = start(model, "O3")
    model[0].weight.requires_grad_(True)
    before = amp8.master_state_dict(model)["0.weight"].clone()
    train(model, optimizer)
    assert model[0].master is not None and not torch.equal(amp8.master_state_dict(model)["0.weight"], before)


def test_amsgrad_s_state_is_refused():
    plain = layers(32, 32)
    adam = torch.optim.AdamW(plain.parameters(), amsgrad=True)
    plain(torch.randn(16, 32)).sum().backward()
    adam.step()
    _, optimizer = start(layers(32, 32))
    with pytest.raises(ValueError, match="amsgrad is not supported"):
        optimizer.load_state_dict(adam.state_dict())


def test_moments_of_a_converted_layer_go_to_one_that_is_not():
    model, optimizer = start(layers(32, 32, 32))
    train(model, optimizer)
    other, second = start(layers(32, 32, 32), skip=["0"])
    second.load_state_dict(optimizer.state_dict())
    state = optimizer.state[model[0].weight]
    expected = amp8.scaling.dequantize(state["exp_avg"], state["exp_avg_scale"])
    assert torch.equal(second.state[other[0].weight]["exp_avg"], expected.view(32, 32)) and expected.any()


def test_a_parameter_with_gaps_in_memory_trains_as_torchs_adam_does():
    """Its moments are not quantised: there is no view of it as one row."""
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    model, plain = layers(32, 32), nn.Parameter(values.clone()[:, ::2])
    model.extra = nn.Parameter(values.clone()[:, ::2])
    model, optimizer = start(model)
    adam = torch.optim.AdamW([plain], 1e-2)
    for _ in range(3):
        for extra, one in ((model.extra, optimizer), (plain, adam)):
            (extra * torch.linspace(-1, 1, 128)).square().sum().backward()
            one.step()
            one.zero_grad()
    assert torch.equal(model.extra, plain) and (plain - values[:, ::2]).abs().max() > 1e-2


def test_betas_without_a_bound_have_a_large_one():
    assert largest_move(0.99, 0.9) == 100.0 and 1 < largest_move(0.9, 0.999) < 100


def test_a_learning_rate_that_is_a_tensor_is_saved():
    model = layers(32, 32)
    model, optimizer = amp8.initialize(model, torch.optim.AdamW(model.parameters(), torch.tensor(1e-2)), "O2")
    train(model, optimizer)
    saved = {name: tensor.clone() for name, tensor in amp8.exact_state(model, optimizer).items()}
    lr = optimizer.param_groups[0]["lr"]
    lr.fill_(1.0)
    amp8.load_exact_state(model, optimizer, saved)
    assert optimizer.param_groups[0]["lr"] is lr and lr == torch.tensor(1e-2)


def test_codes_say_what_they_are():
    model, _ = start(layers(32, 32))
    assert "MS-AMP's codes for" in repr(model[0].weight)


def test_products_take_multiples_of_16():
    codes = torch.zeros(16, 24).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="multiples of 16, got K=24, N=16"):
        amp8.scaling.product(codes, codes.t(), torch.ones(()), torch.ones(()))


def sharded_by_columns(rank, world):
    model = layers(32, 32, 32)
    fully_shard(model[1])
    fully_shard(model, shard_placement_fn=lambda parameter: Shard(1) if parameter.dim() == 2 else Shard(0))
    model, _ = start(model)
    return model.amp8_state.skipped


def by_tensor_parallel_too(rank, world):
    model, mesh = layers(32, 32, 32), init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "tensor"))
    parallelize_module(model[0], mesh["tensor"], ColwiseParallel())
    fully_shard(model, mesh=mesh["data"])
    return start(model)[0].amp8_state.skipped


def on_two_meshes(rank, world):
    model = layers(32, 32, 32)
    fully_shard(model[0], mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model[1], mesh=init_device_mesh("cpu", (1, world), mesh_dim_names=("replicas", "shards")))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model, _ = start(model)
    return [*model.amp8_state.skipped, repr(model[0].weight._local_tensor)]


def test_what_fully_shard_has_cut_otherwise_stays():
    for found in run_ranks(2, sharded_by_columns):
        assert found == [("0", "its weight is not sharded by rows")]
    for found in run_ranks(2, by_tensor_parallel_too):
        assert found == [("0", "its weight is sharded by something else than fully_shard too")]
    for skipped, shown in run_ranks(2, on_two_meshes):
        assert skipped == ("1", "its weight is on another mesh") and shown.startswith("RowShard((16, 32)")


def read_as_values(rank, world):
    model = layers(32, 32)
    fully_shard(model)
    model, _ = start(model)
    out = model(torch.ones(16, 32)).sum() + model[0].weight.float().sum()
    try:
        out.backward()
    except RuntimeError as error:
        return str(error)


def test_a_gathered_weight_has_no_gradient_of_its_own():
    for said in run_ranks(2, read_as_values):
        assert said.startswith("0.weight was used without calling 0, as if its codes were values")


def cast_after_initialize(rank, world):
    model = layers(32, 32)
    fully_shard(model)
    model, _ = start(model)
    try:
        model.bfloat16()(torch.ones(16, 32))
    except RuntimeError as error:
        return str(error)


def test_a_sharded_model_that_is_cast_is_refused():
    for said in run_ranks(2, cast_after_initialize):
        assert said.startswith("a converted weight is plain again: don't cast the model")


def loaded_from_a_whole_weight(rank, world):
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    fully_shard(model)
    model, _ = start(model)
    whole = torch.randn(32, 32, generator=torch.Generator().manual_seed(5))
    model.load_state_dict({**model.state_dict(), "0.weight": whole})
    return (model[0].sharding.values().full_tensor() - whole).abs().max().item()


def test_a_sharded_layer_takes_its_rows_of_a_whole_weight():
    assert max(run_ranks(2, loaded_from_a_whole_weight)) < 2**-10 * 4  # fp16 of values up to 4


def without_zero_grad(rank, world):
    found = []
    for clear in (True, False):
        model = layers(32, 32)
        fully_shard(model)
        model, optimizer = start(model)
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
            if clear:
                optimizer.zero_grad()
            else:
                model[0].bias.grad = None
        found.append(model[0].sharding.values().full_tensor())
    return torch.equal(*found)


def test_a_gradient_that_a_step_has_used_is_not_used_again():
    """The levels' own: what a loop that forgets zero_grad would add to the next step."""
    assert run_ranks(2, without_zero_grad) == [True, True]


def moments_of_the_owner(rank, world):
    model, optimizer = start(layers(32, 32, 32), "O3")
    plain = torch.optim.AdamW(layers(32, 32, 32).parameters(), 1e-2).state_dict()
    plain["state"] = {i: {"step": torch.tensor(3.0), "exp_avg": torch.full(shape, 0.5), "exp_avg_sq": torch.full(shape, 0.25)}
                      for i, shape in enumerate([(32, 32), (32,), (32, 32), (32,)])}  # fmt: skip
    optimizer.load_state_dict(plain)
    owned = [name for name, layer in model.named_children() if layer.gradient.owner == rank]
    held = [name for name, layer in model.named_children() if layer.weight in optimizer.state]
    return [owned, held]


def test_under_o3_each_rank_loads_the_moments_that_it_owns():
    found = run_ranks(2, moments_of_the_owner)
    assert sorted(name for owned, _ in found for name in owned) == ["0", "1"]
    assert all(owned == held for owned, held in found), found


def one_layer_rests(rank, world):
    """Two steps; the second layer has no part in the second one, and no gradient to be used."""
    model = layers(32, 32, 32)
    for part in (*model, model):
        fully_shard(part)
    model, optimizer = start(model)
    model(torch.ones(16, 32)).square().mean().backward()
    optimizer.step()
    before = model[1].sharding.values().full_tensor()
    model[0](torch.ones(16, 32)).square().mean().backward()
    optimizer.step()
    return torch.equal(before, model[1].sharding.values().full_tensor())


def test_a_layer_that_rests_keeps_its_weight():
    assert run_ranks(2, one_layer_rests) == [True, True]
